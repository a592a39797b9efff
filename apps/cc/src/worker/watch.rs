//! The limits of a master's compiler as a whole, which the kernel's limits for one process do not give: its processes, their memory, and the bytes of its files.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::process::Pid;

/// Processes and threads that a compiler may have; gcc has five.
pub(super) const PROCESSES: u64 = 128;
/// Folders below each other in a job's folder.
const DEPTH: usize = 200;

/// The process group of a compiler.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub(super) id: Pid,
    /// Its first process, which waits for the compiler. Its memory is a copy of the worker's.
    pub(super) first: Pid,
}

/// What a job's processes may take together.
pub(super) struct Watch {
    /// The job's folder, which has all files that the job can write.
    pub(super) dir: PathBuf,
    /// Bytes of its files.
    pub(super) bytes: u64,
    /// Bytes of memory of its processes.
    pub(super) memory: u64,
}

/// What they have.
#[derive(Default)]
struct Used {
    processes: u64,
    bytes: u64,
    memory: u64,
    /// Files without a name, by device and inode.
    removed: HashSet<(u64, u64)>,
}

impl Watch {
    /// Why the processes of the group have more than they may.
    pub(super) fn exceeded(&self, group: Group) -> Option<String> {
        let mut used = Used::default();
        match self.count(group, &mut used) {
            Ok(()) => self.excess(&used),
            // Of its making: nothing else changes its folder.
            Err(e) => Some(format!("the compiler's files cannot be counted: {e}")),
        }
    }

    fn excess(&self, used: &Used) -> Option<String> {
        if used.processes > PROCESSES {
            return Some(format!("the compiler has more than {PROCESSES} processes"));
        }
        if used.bytes > self.bytes {
            let most = self.bytes;
            return Some(format!("the compiler's files have more than {most} bytes"));
        }
        let most = self.memory;
        (used.memory > most).then(|| format!("the compiler has more than {most} bytes of memory"))
    }

    /// Until it is more than there may be.
    fn count(&self, group: Group, used: &mut Used) -> io::Result<()> {
        self.count_files(used)?;
        let first = group.first.to_string();
        for process in fs::read_dir("/proc")?.flatten() {
            let number = process.file_name();
            if !number.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                continue;
            }
            let Some(threads) = threads_in(&process.path(), group.id) else {
                continue;
            };
            used.processes += threads;
            if self.excess(used).is_some() {
                break;
            }
            if number.to_str() != Some(&first) {
                self.count_process(&process.path(), used)?;
            }
        }
        Ok(())
    }

    /// The memory of a process, and the files without a name that its threads have open; each may have descriptors of its own, and the first one may have ended.
    fn count_process(&self, process: &Path, used: &mut Used) -> io::Result<()> {
        let mut memory = 0;
        // The process may have ended.
        for thread in entries(&process.join("task")) {
            // They share their memory.
            memory = memory_of(&thread).max(memory);
            for open in entries(&thread.join("fd")) {
                let removed = |about: &Metadata| about.is_file() && about.nlink() == 0;
                if let Ok(about) = fs::metadata(open)
                    && removed(&about)
                    && used.removed.insert((about.dev(), about.ino()))
                {
                    used.bytes += about.blocks() * 512;
                }
            }
            // A mapping alone does not show its file's length, and compilers have none of such a file.
            let maps = fs::read(thread.join("maps")).unwrap_or_default();
            let maps = String::from_utf8_lossy(&maps);
            let dir = self.dir.to_string_lossy();
            let removed = |line: &str| line.ends_with(" (deleted)") && line.contains(&*dir);
            if maps.lines().any(removed) {
                return Err(io::Error::other("it has mapped a file that it removed"));
            }
        }
        used.memory += memory;
        Ok(())
    }

    /// By descriptors: a compiler may make paths that are too long to be named.
    fn count_files(&self, used: &mut Used) -> io::Result<()> {
        let mut dirs = vec![Dir::new(openat(CWD, &self.dir, flags(), Mode::empty())?)?];
        while let Some(entries) = dirs.last_mut()
            && self.excess(used).is_none()
        {
            let Some(entry) = entries.read() else {
                dirs.pop();
                continue;
            };
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
            used.bytes += (about.st_blocks as u64 * 512).max(4096);
            if FileType::from_raw_mode(about.st_mode) == FileType::Directory {
                let below = match openat(dir, entry.file_name(), flags(), Mode::empty()) {
                    Err(rustix::io::Errno::NOENT) => continue,
                    below => Dir::new(below?)?,
                };
                if dirs.len() > DEPTH {
                    return Err(io::Error::other("folders too deep"));
                }
                dirs.push(below);
            }
        }
        Ok(())
    }
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// The entries of a folder, if it is there.
fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Bytes of a thread's memory that are of no file, in memory or swapped out, and of its page tables. Files count elsewhere.
fn memory_of(thread: &Path) -> u64 {
    let text = fs::read_to_string(thread.join("status")).unwrap_or_default();
    let kib = |line: &str| -> Option<u64> {
        let (name, value) = line.split_once(':')?;
        let counts = matches!(name, "RssAnon" | "VmSwap" | "VmPTE");
        counts.then_some(value.trim().strip_suffix(" kB")?.parse().ok()?)
    };
    text.lines().filter_map(kib).sum::<u64>() * 1024
}

fn threads_in(process: &Path, group: Pid) -> Option<u64> {
    let text = fs::read_to_string(process.join("stat")).ok()?;
    // After the name, which may have any characters: state, parent, group; and as the 18th of these the threads.
    let fields: Vec<_> = text.rsplit_once(") ")?.1.split(' ').collect();
    let own = fields.get(2)?.parse() == Ok(group.as_raw_nonzero().get());
    own.then_some(fields.get(17)?.parse().ok()?)
}
