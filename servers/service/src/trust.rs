//! Files that decide whom to trust: read only when no other user can have written them.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Longest file that is read, in bytes.
pub const LONGEST: u64 = 1 << 20;

/// What others may not do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Neither read nor change it: it holds a secret.
    Secret,
    /// Not change it.
    Public,
}

/// Why a file is not used; follows its name in a message.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// A folder, a device, a pipe.
    #[error("is not a regular file")]
    NotAFile,
    /// Its owner, and the user of this process.
    #[error("belongs to user {0}, and this is user {1}")]
    Foreign(u32, u32),
    /// A secret that others may read or change; its mode.
    #[error("can be used by others (mode {0:o})")]
    Shared(u32),
    /// Others may change it; its mode.
    #[error("can be changed by others (mode {0:o})")]
    Writable(u32),
    /// More than [`LONGEST`].
    #[error("is longer than {LONGEST} bytes")]
    TooLong,
    /// No UTF-8.
    #[error("is not text")]
    NoText,
}

impl Refused {
    /// What the user can do about it.
    pub fn remedy(&self, path: &Path) -> String {
        let shown = path.display();
        match self {
            Self::Io(_) => "check its name and its permissions".into(),
            Self::NotAFile | Self::TooLong | Self::NoText => "name another file".into(),
            Self::Foreign(_, us) => {
                format!("run this as its owner, or `chown {us} {shown}` if its content is yours")
            }
            Self::Shared(_) => {
                format!("run `chmod 600 {shown}`; if others may have read it, make a new key")
            }
            Self::Writable(_) => format!("look through it, then run `chmod go-w {shown}`"),
        }
    }
}

/// Reads the file.
///
/// # Errors
/// [`Refused`].
pub fn read(path: &Path, guard: Guard) -> Result<Vec<u8>, Refused> {
    let file = OpenOptions::new()
        .read(true)
        // NONBLOCK: a FIFO of this name must not make the open wait.
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    read_open(&file, guard)
}

/// As [`read`], of a file that is open.
///
/// # Errors
/// [`Refused`].
pub fn read_open(file: &File, guard: Guard) -> Result<Vec<u8>, Refused> {
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(Refused::NotAFile);
    }
    let mode = about.mode() & 0o7777;
    let us = rustix::process::geteuid().as_raw();
    if about.uid() != us && (guard == Guard::Secret || about.uid() != 0) {
        return Err(Refused::Foreign(about.uid(), us));
    }
    match guard {
        Guard::Secret if mode & 0o077 != 0 => return Err(Refused::Shared(mode)),
        Guard::Public if mode & 0o022 != 0 => return Err(Refused::Writable(mode)),
        _ => {}
    }
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(Refused::TooLong);
    }
    Ok(bytes)
}

/// Its lines that are neither empty nor comments (`#`), each with its number.
///
/// # Errors
/// [`Refused::NoText`].
pub fn lines(text: &[u8]) -> Result<impl Iterator<Item = (usize, &str)>, Refused> {
    let text = std::str::from_utf8(text).map_err(|_| Refused::NoText)?;
    Ok((1..)
        .zip(text.lines().map(str::trim))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn files_that_others_could_have_written_or_read_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "# one\n\n a \n").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        for (bits, secret, public) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o644, false, true),
            (0o640, false, true),
            (0o620, false, false),
            (0o602, false, false),
        ] {
            mode(bits);
            let read = [Guard::Secret, Guard::Public].map(|guard| read(&path, guard).is_ok());
            assert_eq!(read, [secret, public], "{bits:o}");
        }
        mode(0o600);
        let text = read(&path, Guard::Secret).unwrap();
        assert_eq!(lines(&text).unwrap().collect::<Vec<_>>(), [(3, "a")]);
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(1234), None).unwrap();
            let foreign = read(&path, Guard::Public);
            assert!(matches!(foreign, Err(Refused::Foreign(1234, 0))));
            chown(&path, Some(0), None).unwrap();
        }
        std::fs::write(&path, vec![b'x'; LONGEST as usize + 1]).unwrap();
        assert!(matches!(read(&path, Guard::Secret), Err(Refused::TooLong)));
        let fifo = dir.path().join("fifo");
        let rights = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rights).unwrap();
        for other in [&fifo, dir.path()] {
            let refused = read(other, Guard::Public);
            assert!(matches!(refused, Err(Refused::NotAFile)));
        }
    }
}
