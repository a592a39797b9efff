//! Files that decide whom to trust: read only when no other user can have written them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
pub use weft_service::trust::Guard;
use weft_service::trust::{self, Refused};

use crate::failure::Failure;

/// Reads the file; `None` if there is none. `what` it is, for messages.
pub fn read(path: &Path, what: &str, guard: Guard) -> Result<Option<Vec<u8>>, Failure> {
    match trust::read(path, guard) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Refused::Io(e)) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(refused(path, what, &e)),
    }
}

fn refused(path: &Path, what: &str, why: &Refused) -> Failure {
    let text = format!("the {what} {} {why}", path.display());
    let failure = match why {
        Refused::Io(_) => Failure::failed(text),
        _ => Failure::usage(text),
    };
    failure.hint(why.remedy(path))
}

/// As [`read`], of a file that is open.
pub fn read_open(file: &File, path: &Path, what: &str, guard: Guard) -> Result<Vec<u8>, Failure> {
    trust::read_open(file, guard).map_err(|e| refused(path, what, &e))
}

/// Its lines that are neither empty nor comments (`#`), each with its number.
pub fn lines<'a>(
    text: &'a [u8],
    path: &Path,
    what: &str,
) -> Result<impl Iterator<Item = (usize, &'a str)>, Failure> {
    trust::lines(text).map_err(|e| refused(path, what, &e))
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
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

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
        for (guard, bad, remedy) in [
            (Guard::Secret, 0o640, "chmod 600"),
            (Guard::Public, 0o664, "chmod go-w"),
        ] {
            mode(bad);
            assert!(refused(guard).contains(remedy), "{}", refused(guard));
        }
        mode(0o600);
        let content = read(&path, "key file", Guard::Secret).unwrap();
        assert_eq!(content.unwrap(), b"content");
        let inside = std::fs::read_dir(path.parent().unwrap()).unwrap();
        assert_eq!(inside.count(), 1, "no temporary file is left");
    }
}
