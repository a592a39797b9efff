//! Files that decide whom to trust: read only when no other user can have written them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::failure::Failure;

/// Longest file that is read, in bytes.
const LONGEST: u64 = 1 << 20;

/// What others may not do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Neither read nor change it: it holds a secret.
    Secret,
    /// Not change it.
    Public,
}

/// Reads the file; `None` if there is none. `what` it is, for messages.
pub fn read(path: &Path, what: &str, guard: Guard) -> Result<Option<Vec<u8>>, Failure> {
    let opened = OpenOptions::new()
        .read(true)
        // NONBLOCK: a FIFO of this name must not make the open wait.
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(path);
    match opened {
        Ok(file) => read_open(&file, path, what, guard).map(Some),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(cannot_read(path, what, &e)),
    }
}

fn cannot_read(path: &Path, what: &str, e: &io::Error) -> Failure {
    Failure::failed(format!("cannot read the {what} {}: {e}", path.display()))
        .hint("check its name and its permissions")
}

/// As [`read`], of a file that is open.
pub fn read_open(
    mut file: &File,
    path: &Path,
    what: &str,
    guard: Guard,
) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    let cannot = |e: io::Error| cannot_read(path, what, &e);
    let meta = file.metadata().map_err(cannot)?;
    if !meta.is_file() {
        return Err(
            Failure::usage(format!("the {what} {shown} is not a regular file"))
                .hint("name another file"),
        );
    }
    let mode = meta.mode() & 0o7777;
    let us = rustix::process::geteuid().as_raw();
    if meta.uid() != us && (guard == Guard::Secret || meta.uid() != 0) {
        return Err(Failure::usage(format!(
            "the {what} {shown} belongs to user {}, and this is user {us}",
            meta.uid()
        ))
        .hint(format!(
            "run this as its owner, or `chown {us} {shown}` if its content is yours"
        )));
    }
    match guard {
        Guard::Secret if mode & 0o077 != 0 => {
            return Err(Failure::usage(format!(
                "the {what} {shown} can be used by others (mode {mode:o})"
            ))
            .hint(format!(
                "run `chmod 600 {shown}`; if others may have read it, make a new key"
            )));
        }
        Guard::Public if mode & 0o022 != 0 => {
            return Err(Failure::usage(format!(
                "the {what} {shown} can be changed by others (mode {mode:o})"
            ))
            .hint(format!("look through it, then run `chmod go-w {shown}`")));
        }
        _ => {}
    }
    let mut bytes = Vec::new();
    (&mut file)
        .take(LONGEST + 1)
        .read_to_end(&mut bytes)
        .map_err(cannot)?;
    if bytes.len() as u64 > LONGEST {
        return Err(
            Failure::usage(format!("the {what} {shown} is longer than {LONGEST} bytes"))
                .hint("name another file"),
        );
    }
    Ok(bytes)
}

/// Its lines that are neither empty nor comments (`#`), each with its number.
pub fn lines<'a>(
    text: &'a [u8],
    path: &Path,
    what: &str,
) -> Result<impl Iterator<Item = (usize, &'a str)>, Failure> {
    let text = std::str::from_utf8(text).map_err(|_| {
        Failure::usage(format!("the {what} {} is not text", path.display()))
            .hint("name another file")
    })?;
    Ok((1..)
        .zip(text.lines().map(str::trim))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#')))
}

/// Makes the directory of a file, for this user alone, if it is not there.
pub fn make_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)
        }
        _ => Ok(()),
    }
}

/// Puts a file that only its owner can read in its place, whole or not at all. `replace`: also where one stands already.
pub fn write_whole(path: &Path, content: &[u8], replace: bool) -> io::Result<()> {
    make_parent(path)?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| io::ErrorKind::Unsupported)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{:016x}", u64::from_ne_bytes(random)));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()?;
            if replace {
                std::fs::rename(&temporary, path)
            } else {
                name_new(&temporary, path)
            }
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// Gives a file a name that nothing has.
fn name_new(from: impl AsRef<Path>, to: &Path) -> io::Result<()> {
    let from = from.as_ref();
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems without this kind of rename can still refuse to link over a name.
        Err(Errno::INVAL | Errno::NOSYS) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn files_that_others_could_have_written_are_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/file");
        assert_eq!(read(&path, "key file", Guard::Secret).unwrap(), None);
        write_whole(&path, b"content", false).unwrap();
        assert!(write_whole(&path, b"other", false).is_err(), "it stays");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let refused = |guard| read(&path, "key file", guard).unwrap_err().to_string();
        for (guard, good, bad, remedy) in [
            (Guard::Secret, 0o400, 0o640, "chmod 600"),
            (Guard::Public, 0o644, 0o664, "chmod go-w"),
        ] {
            mode(good);
            let content = read(&path, "key file", guard).unwrap().unwrap();
            assert_eq!(content, b"content");
            mode(bad);
            assert!(refused(guard).contains(remedy), "{}", refused(guard));
        }
        mode(0o600);
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(1234), None).unwrap();
            assert!(refused(Guard::Public).contains("user 1234"));
            chown(&path, Some(0), None).unwrap();
        }
        write_whole(&path, &vec![0; LONGEST as usize + 1], true).unwrap();
        assert!(refused(Guard::Secret).contains("longer"));
        let inside = std::fs::read_dir(path.parent().unwrap()).unwrap();
        assert_eq!(inside.count(), 1, "no temporary file is left");
        let folder = read(dir.path(), "key file", Guard::Public);
        assert!(folder.is_err());
    }
}
