//! The content of a file that is sent: its length, its holes, and whether it has changed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;

use rustix::fs::{self, FileType, MemfdFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::walk::mtime;

/// Most bytes of a file whose length is not known before it has been read.
const MOST_UNKNOWN: u64 = 64 << 20;
/// The file system of /sys, which says 4,096 bytes of files of any length.
const SYSFS: i64 = 0x6265_6572;

/// A file that was opened to be sent.
pub struct Source {
    /// What is read.
    pub file: File,
    /// How it was when it was opened, with its true length.
    pub stat: Stat,
    /// Bytes.
    pub size: u64,
    /// Whether parts of it are holes.
    pub is_sparse: bool,
    /// The file is a copy, which does not change.
    is_copy: bool,
}

/// The content of a file whose length the kernel does not say, as in /proc and /sys; `None` if it has none.
fn copied(file: &File) -> Result<Option<(File, u64)>, String> {
    let mut bytes = Vec::new();
    file.take(MOST_UNKNOWN + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| e.to_string())?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let len = bytes.len() as u64;
    if len > MOST_UNKNOWN {
        return Err(format!(
            "its length is not known, and it has more than {} MiB",
            MOST_UNKNOWN >> 20
        ));
    }
    let copy = fs::memfd_create("weft-cp", MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
    let mut copy = File::from(copy);
    copy.write_all(&bytes).map_err(|e| e.to_string())?;
    Ok(Some((copy, len)))
}

impl Source {
    /// Looks at a file that was opened.
    pub fn new(file: File, mut stat: Stat) -> Result<Self, String> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err("is not a regular file any more".into());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let has_no_length =
            size == 0 || fs::fstatfs(&file).is_ok_and(|found| found.f_type == SYSFS);
        if has_no_length && let Some((copy, size)) = copied(&file)? {
            stat.st_size = i64::try_from(size).unwrap_or(i64::MAX);
            return Ok(Self {
                file: copy,
                stat,
                size,
                is_sparse: false,
                is_copy: true,
            });
        }
        let mut source = Self {
            file,
            stat,
            size,
            is_sparse: false,
            is_copy: false,
        };
        source.is_sparse = source.on_disk() < size && source.data(0) != Some((0, size));
        Ok(source)
    }

    fn on_disk(&self) -> u64 {
        let blocks = u64::try_from(self.stat.st_blocks).unwrap_or(0);
        blocks.saturating_mul(512).min(self.size)
    }

    /// Bytes that a copy takes on the disk.
    pub fn room(&self) -> u64 {
        if self.is_sparse {
            self.on_disk()
        } else {
            self.size
        }
    }

    /// The first piece from `from` on that is no hole, and its end; `None` if only a hole follows.
    pub fn data(&self, from: u64) -> Option<(u64, u64)> {
        if from >= self.size {
            return None;
        }
        let begin = match fs::seek(self.file.as_fd(), SeekFrom::Data(from)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => return None,
            // A file system without holes.
            Err(_) => return Some((from, self.size)),
        };
        let end = fs::seek(self.file.as_fd(), SeekFrom::Hole(begin)).unwrap_or(self.size);
        (begin < self.size).then(|| (begin, end.min(self.size)))
    }

    /// The file is as it was when it was opened.
    pub fn check_unchanged(&self) -> Result<(), String> {
        if self.is_copy {
            return Ok(());
        }
        let now = fs::fstat(&self.file).map_err(|e| e.to_string())?;
        if (now.st_size, mtime(&now)) == (self.stat.st_size, mtime(&self.stat)) {
            Ok(())
        } else {
            Err("changed while it was read; send it again".into())
        }
    }
}
