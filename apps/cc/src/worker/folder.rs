//! The folder of the directories of a worker's jobs. A killed worker leaves it behind; the next one of the same user removes it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use super::remove::{Scratch, remove};

const PREFIX: &str = "weft-cc-worker-";

/// A folder, removed with this value. The lock on it shows that its worker is alive, in any PID namespace.
pub(super) struct Folder {
    dir: Scratch,
    _lock: File,
}

impl Folder {
    /// Creates a folder below `place`, and removes those of killed workers.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn new(place: &Path) -> io::Result<Self> {
        sweep(place);
        loop {
            let dir = Scratch::new(PREFIX, place)?;
            // Another worker that starts takes it for a dead one's before it is locked.
            let lock = match File::open(dir.path()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
            if locked && dir.path().is_dir() {
                return Ok(Self { dir, _lock: lock });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the folders without a lock.
fn sweep(place: &Path) {
    let own = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry
                .metadata()
                .is_ok_and(|about| about.is_dir() && about.uid() == own);
        if !is_ours {
            continue;
        }
        let path = entry.path();
        // Locked until it is removed, so that a worker that has just created it notices the loss.
        if let Ok(dir) = File::open(&path)
            && flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
            && let Err(e) = remove(&path)
        {
            tracing::warn!("{}: {e}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_dead_workers_go_and_no_others() {
        let place = tempfile::tempdir().unwrap();
        let living = Folder::new(place.path()).unwrap();
        let dead = place.path().join(format!("{PREFIX}dead"));
        let other = place.path().join("weft-cc");
        for dir in [&dead, &other] {
            std::fs::create_dir_all(dir.join("view/r")).unwrap();
        }
        std::os::unix::fs::symlink(&other, place.path().join(format!("{PREFIX}link"))).unwrap();
        let next = Folder::new(place.path()).unwrap();
        assert!(!dead.exists() && other.join("view/r").exists());
        assert!(living.path().is_dir() && next.path().is_dir());
        let path = next.path().to_owned();
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn workers_that_start_at_once_keep_their_folders() {
        let place = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let folder = Folder::new(place.path()).unwrap();
                        assert!(folder.path().is_dir());
                    }
                });
            }
        });
    }
}
