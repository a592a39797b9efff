//! Folders of jobs, and their removal. A compiler may leave folders below each other to any depth, and thousands of them.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, chmodat, openat, renameat, unlinkat};
use rustix::io::Errno;

/// A new folder, removed with this value.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// Its name begins with `prefix`.
    pub(super) fn new(prefix: &str, place: &Path) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(place)?;
        Ok(Self(dir.keep()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(e) = remove(&self.0) {
            tracing::warn!("{}: {e}", self.0.display());
        }
    }
}

/// Removes a folder with all that is in it, with a stack and descriptors that do not depend on its depth: the folders in a folder are moved to
/// the top before it is removed.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let mut top = Dir::new(open(CWD, path)?)?;
    let mut number = 0;
    loop {
        let mut empty = true;
        top.rewind();
        while let Some(name) = next(&mut top)? {
            empty = false;
            let at = top.fd()?;
            if is_gone(at, &name)? {
                continue;
            }
            let mut below = Dir::new(open(at, &name)?)?;
            while let Some(inner) = next(&mut below)? {
                let from = below.fd()?;
                if !is_gone(from, &inner)? {
                    lift(from, &inner, at, &mut number)?;
                }
            }
            // One that still has names is met again.
            match unlinkat(at, &name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
        if empty {
            return Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?);
        }
    }
}

/// The next name in a folder.
fn next(dir: &mut Dir) -> io::Result<Option<CString>> {
    while let Some(entry) = dir.read() {
        let entry = entry?;
        if ![&b"."[..], b".."].contains(&entry.file_name().to_bytes()) {
            return Ok(Some(entry.file_name().to_owned()));
        }
    }
    Ok(None)
}

/// Removes a file or an empty folder; false for a folder that has names, which then can be opened and moved.
fn is_gone(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    let removed = match unlinkat(dir, name, AtFlags::empty()) {
        // A folder, which some file systems say with EPERM.
        Err(Errno::ISDIR | Errno::PERM) => unlinkat(dir, name, AtFlags::REMOVEDIR),
        other => other,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY) => {
            // Its maker can have left it without rights for its owner.
            chmodat(dir, name, Mode::RWXU, AtFlags::empty())?;
            Ok(false)
        }
        Err(e) => Err(e.into()),
    }
}

/// Moves a folder to a name at the top that nothing else has.
fn lift(
    from: BorrowedFd<'_>,
    name: &CStr,
    top: BorrowedFd<'_>,
    number: &mut u64,
) -> io::Result<()> {
    loop {
        *number += 1;
        match renameat(from, name, top, format!("moved-{number}")) {
            Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
            moved => return Ok(moved?),
        }
    }
}

fn open(dir: impl AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mkdirat;

    #[test]
    fn folders_of_any_depth_are_removed() {
        // Memory: a disk takes half a minute. The standard library's remover overflows its stack at this depth.
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let scratch = Scratch::new("deep-", place.path()).unwrap();
        let mut at = open(CWD, scratch.path()).unwrap();
        for depth in 0..50_000 {
            for name in ["d", "moved-7"] {
                mkdirat(&at, name, Mode::RWXU).unwrap();
            }
            if depth % 1000 == 0 {
                let flags = OFlags::CREATE | OFlags::WRONLY;
                openat(&at, "file", flags, Mode::empty()).unwrap();
            }
            at = open(&at, "d").unwrap();
        }
        drop(at);
        drop(scratch);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
