//! Opens what is below a directory, by no symbolic link.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Opens `path` below `dir`, by no symbolic link and out of it by no other way.
pub fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match fs::openat2(&dir, path, flags, Mode::empty(), resolve) {
        // Before Linux 5.6, and where a sandbox does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => step_by_step(dir, path, flags),
        other => Ok(other?),
    }
}

fn step_by_step(dir: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names = path.components().peekable();
    let mut at: Option<OwnedFd> = None;
    while let Some(name) = names.next() {
        let std::path::Component::Normal(name) = name else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = if names.peek().is_some() {
            step
        } else {
            flags | OFlags::NOFOLLOW
        };
        let dir = at.as_ref().map_or(dir.as_fd(), AsFd::as_fd);
        at = Some(fs::openat(dir, name, flags, Mode::empty())?);
    }
    at.ok_or(io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    #[test]
    fn both_ways_to_open_follow_no_link_and_do_not_leave() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        for name in ["top/a/b/f", "top/f", "f"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        symlink("a", top.join("to-a")).unwrap();
        symlink("f", top.join("a/b/to-f")).unwrap();
        let fd = File::open(&top).unwrap();
        type Open = fn(&File, &Path, OFlags) -> io::Result<OwnedFd>;
        let ways: [Open; 2] = [
            |d, p, f| open_beneath(d, p, f),
            |d, p, f| step_by_step(d, p, f),
        ];
        for open in ways {
            for (path, good) in [
                ("f", true),
                ("a/b/f", true),
                ("a/b", true),
                ("to-a/b/f", false),
                ("a/b/to-f", false),
                ("../f", false),
                ("/etc/passwd", false),
                ("", false),
            ] {
                let opened = open(&fd, Path::new(path), OFlags::RDONLY);
                assert_eq!(opened.is_ok(), good, "{path}");
            }
        }
    }
}
