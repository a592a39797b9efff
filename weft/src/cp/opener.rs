//! Opens files that a walk has found, and refuses replacements.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{self, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::open_below::open_beneath;
use super::walk::{Entry, Plan, id_of};

/// Opens the files of a plan.
pub struct Opener<'a> {
    plan: &'a Plan,
    /// The argument that the last file came from, if it is a directory.
    last: Option<(usize, OwnedFd)>,
}

impl<'a> Opener<'a> {
    /// For files of this plan.
    pub fn new(plan: &'a Plan) -> Self {
        Self { plan, last: None }
    }

    /// Opens a file for reading: the one that was found, or says why not.
    pub fn open(&mut self, entry: &Entry) -> Result<(File, Stat), String> {
        let fd = self
            .open_now(entry)
            .map_err(|e| match Errno::from_io_error(&e) {
                Some(Errno::LOOP) => {
                    "is reached by a symbolic link now, which is not followed".into()
                }
                _ => e.to_string(),
            })?;
        let stat = fs::fstat(&fd).map_err(|e| e.to_string())?;
        if id_of(&stat) != entry.id {
            return Err("is not the file any more that was found; send it again".into());
        }
        Ok((File::from(fd), stat))
    }

    fn open_now(&mut self, entry: &Entry) -> io::Result<OwnedFd> {
        // NONBLOCK: the file may have been replaced by a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let root = &self.plan.roots[entry.root];
        let Ok(below) = entry.source.strip_prefix(&root.path) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if below.as_os_str().is_empty() {
            // A link that the user names is followed.
            return Ok(fs::open(&root.path, flags, Mode::empty())?);
        }
        let dir = match self.last.take() {
            Some((of, dir)) if of == entry.root => dir,
            _ => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = fs::open(&root.path, flags, Mode::empty())?;
                if id_of(&fs::fstat(&dir)?) != root.id {
                    return Err(io::Error::other(format!(
                        "{} is not the directory any more that was found",
                        root.path.display()
                    )));
                }
                dir
            }
        };
        let (_, dir) = self.last.insert((entry.root, dir));
        open_beneath(&*dir, below, flags)
    }
}
