//! The limits of a master's compiler as a whole, which the kernel's limits for one process do not give: its processes, and the bytes of its files.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::process::Pid;

/// Processes and threads that a compiler may have; gcc has five.
pub(super) const PROCESSES: u64 = 128;
/// Folders below each other in a job's folder.
const DEPTH: usize = 200;

/// What a job's processes may take together.
pub(super) struct Watch {
    /// The job's folder, which has all files that the job can write.
    pub(super) dir: PathBuf,
    pub(super) bytes: u64,
}

impl Watch {
    /// Why the processes of the group have more than they may.
    pub(super) fn exceeded(&self, group: Pid) -> Option<String> {
        match self.count(group) {
            Ok((processes, _)) if processes > PROCESSES => {
                Some(format!("the compiler has more than {PROCESSES} processes"))
            }
            Ok((_, bytes)) if bytes > self.bytes => Some(format!(
                "the compiler's files have more than {} bytes",
                self.bytes
            )),
            Ok(_) => None,
            // Of its making: nothing else changes its folder.
            Err(e) => Some(format!("the compiler's files cannot be counted: {e}")),
        }
    }

    fn count(&self, group: Pid) -> io::Result<(u64, u64)> {
        let mut bytes = 0;
        let open = openat(CWD, &self.dir, flags(), Mode::empty())?;
        count_files(open, DEPTH, &mut bytes)?;
        let (mut processes, mut seen) = (0, HashSet::new());
        for process in fs::read_dir("/proc")?.flatten() {
            let number = process.file_name();
            if !number.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                continue;
            }
            let Some(threads) = threads_in(&process.path(), group) else {
                continue;
            };
            processes += threads;
            bytes += self.count_removed(&process.path(), &mut seen)?;
        }
        Ok((processes, bytes))
    }

    /// Bytes of the files without a name that the process has open. A mapping alone does not show its file's length, and compilers have none of such a file.
    fn count_removed(&self, process: &Path, seen: &mut HashSet<(u64, u64)>) -> io::Result<u64> {
        let mut bytes = 0;
        // The process may have ended.
        for open in fs::read_dir(process.join("fd"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let removed = |about: &Metadata| about.is_file() && about.nlink() == 0;
            if let Ok(about) = fs::metadata(open.path())
                && removed(&about)
                && seen.insert((about.dev(), about.ino()))
            {
                bytes += about.blocks() * 512;
            }
        }
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        let dir = self.dir.to_string_lossy();
        let removed = |line: &str| line.ends_with(" (deleted)") && line.contains(&*dir);
        if maps.lines().any(removed) {
            return Err(io::Error::other("it has mapped a file that it removed"));
        }
        Ok(bytes)
    }
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// By descriptors: a compiler may make paths that are too long to be named.
fn count_files(dir: OwnedFd, depth: usize, bytes: &mut u64) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::other("folders too deep"));
    }
    let mut entries = Dir::new(dir)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        if [&b"."[..], b".."].contains(&entry.file_name().to_bytes()) {
            continue;
        }
        let dir = entries.fd()?;
        let about = match statat(dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => continue,
            about => about?,
        };
        // An empty file takes memory of the kernel too.
        *bytes += (about.st_blocks as u64 * 512).max(4096);
        if FileType::from_raw_mode(about.st_mode) == FileType::Directory {
            match openat(dir, entry.file_name(), flags(), Mode::empty()) {
                Err(rustix::io::Errno::NOENT) => {}
                below => count_files(below?, depth - 1, bytes)?,
            }
        }
    }
    Ok(())
}

/// The threads of a process of this group.
fn threads_in(process: &Path, group: Pid) -> Option<u64> {
    let text = fs::read_to_string(process.join("stat")).ok()?;
    // After the name, which may have any characters: state, parent, group; and as the 18th of these the threads.
    let fields: Vec<_> = text.rsplit_once(") ")?.1.split(' ').collect();
    let own = fields.get(2)?.parse() == Ok(group.as_raw_nonzero().get());
    own.then_some(fields.get(17)?.parse().ok()?)
}
