//! Objects of another process, read from its table ([`super::export`]). A process that is given the `cmd_fd` imports a protection domain by its number and
//! device memory by the file itself. It imports a region whose memory is a file's: it maps the same bytes and registers them under the same key.
//!
//! The other process' entries are used with this process' own rights: they name files that this process could open itself.

use std::ffi::c_uint;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::process::geteuid;
use weft_sys::memfd::Mapping;
use weft_verbs::RawMemory;

use super::access::{check_access, rights};
use super::export::{self, Entry, MAGIC, Owner, Sort, TABLE};
use super::os_errno;
use super::types::IBV_ACCESS_LOCAL_WRITE;
use super::which::Which;

/// Another process' context.
pub(crate) struct Foreign {
    table: Mapping,
    owner: Owner,
}

/// A region of another process: its memory, and the key under which this process has it.
pub(super) struct Region {
    /// The region's context, its domain, and its handle there.
    pub(super) of: (u64, u64),
    pub(super) domain: u32,
    pub(super) handle: u32,
    // Dropped before the memory of the region.
    _native: weft_verbs::Mr,
    _map: Mapping,
}

/// Logs why an object cannot be imported.
fn refused(why: &str) -> Errno {
    tracing::warn!("nothing is imported from another process: {why}");
    Errno::OPNOTSUPP
}

impl Foreign {
    /// The context behind a descriptor, and its device.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when it is not a descriptor of a living context of another process, `EACCES` when that process is another user's.
    pub(super) fn open(file: BorrowedFd<'_>) -> Result<(Foreign, Which), Errno> {
        let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let stat = fstat(file)?;
        if !seals.contains(SealFlags::SHRINK) || stat.st_size < TABLE as i64 {
            return Err(refused("the descriptor is no device's"));
        }
        if stat.st_uid != geteuid().as_raw() {
            tracing::warn!("nothing is imported from another user's process");
            return Err(Errno::ACCESS);
        }
        let table = Mapping::new(file, 0, TABLE, false).map_err(|error| os_errno(&error))?;
        let owner = Owner::of(&table);
        if table.word(0).load(std::sync::atomic::Ordering::Acquire) != MAGIC
            || Owner::here() == Some(owner)
        {
            return Err(refused("the device was closed"));
        }
        let which = match table.word(1).load(std::sync::atomic::Ordering::Relaxed) {
            0 => Which::Iwarp,
            1 => Which::Persona,
            _ => return Err(refused("the descriptor is no device's")),
        };
        Ok((Foreign { table, owner }, which))
    }

    /// True if the other process has this domain.
    pub(super) fn has_domain(&self, handle: u32) -> bool {
        export::find(&self.table, |entry| {
            entry.sort == Sort::Pd && entry.handle == handle
        })
        .is_some()
    }

    /// Maps its device memory with this handle.
    ///
    /// # Errors
    /// `ENOENT` when there is none, and those of mapping.
    pub(super) fn device_memory(
        &self,
        file: BorrowedFd<'_>,
        handle: u32,
    ) -> Result<Mapping, Errno> {
        let wanted = |entry: &Entry| entry.sort == Sort::Dm && entry.handle == handle;
        let entry = export::find(&self.table, wanted).ok_or(Errno::NOENT)?;
        let len = usize::try_from(entry.len).map_err(|_| Errno::NOENT)?;
        inside(file, entry.addr, len)?;
        Mapping::new(file, entry.addr, len, true).map_err(|error| os_errno(&error))
    }

    /// Registers a region of the other process' domain in this process, under its key.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EOPNOTSUPP` where this process cannot have its memory, `EBUSY` when a region of this process has the same key.
    pub(super) fn region(
        &self,
        file: BorrowedFd<'_>,
        of: (u64, u64),
        (pd, domain): (&weft_verbs::Pd, u32),
        handle: u32,
    ) -> Result<Region, Errno> {
        let wanted = |entry: &Entry| {
            matches!(entry.sort, Sort::Mr | Sort::DmMr)
                && entry.handle == handle
                && entry.domain == domain
        };
        let entry = export::find(&self.table, wanted).ok_or(Errno::NOENT)?;
        let access: c_uint = entry.access;
        check_access(access)?;
        let len = usize::try_from(entry.len).map_err(|_| Errno::NOENT)?;
        if len == 0 {
            return Err(refused("a region without a byte"));
        }
        let writable = access & IBV_ACCESS_LOCAL_WRITE != 0;
        let (map, skip) = if entry.sort == Sort::DmMr {
            inside(file, entry.addr, len)?;
            let skip = entry.addr % page();
            let whole = len.checked_add(skip as usize).ok_or(Errno::NOENT)?;
            (
                Mapping::new(file, entry.addr - skip, whole, writable)
                    .map_err(|error| os_errno(&error))?,
                skip,
            )
        } else {
            self.shared(entry.addr, len, writable)?
        };
        // SAFETY: the mapping has that many bytes from there on, and stays until the region is gone: [`Region`] drops it last.
        let memory = unsafe { RawMemory::new(map.as_ptr().add(skip as usize), len) };
        let memory = memory.ok_or(Errno::NOMEM)?;
        let native = pd.reg_raw_again(&memory, entry.iova, rights(access), handle);
        let native = native.map_err(super::errno)?;
        if native.lkey() != handle {
            return Err(Errno::BUSY);
        }
        Ok(Region {
            of,
            domain,
            handle,
            _native: native,
            _map: map,
        })
    }

    /// Maps the memory that the other process has mapped at `addr`. The returned offset is that of the bytes in the mapping.
    fn shared(&self, addr: u64, len: usize, writable: bool) -> Result<(Mapping, u64), Errno> {
        if !self.owner.is_seen() {
            return Err(refused(
                "the process is gone, or has other process numbers than this one",
            ));
        }
        let process = format!("/proc/{}", self.owner.pid);
        let range = Range::of(&areas(&process)?, addr, len as u64)
            .ok_or_else(|| refused("the region is memory that the process shares with nobody"))?;
        let skip = range.offset % page();
        let from = range.offset - skip;
        let whole = len.checked_add(skip as usize).ok_or(Errno::NOENT)?;
        let map = own(&range, from, whole, writable)
            .or_else(|| {
                let file = open(&range, &process, writable)?;
                Mapping::new(&file, from, whole, writable).ok()
            })
            .ok_or_else(|| {
                refused("the file behind the region is not mapped here, and cannot be opened")
            })?;
        // The other process may have executed another program meanwhile, with other memory.
        if !self.owner.is_seen() {
            return Err(refused("the process is gone"));
        }
        Ok((map, skip))
    }
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// `ENOENT` unless a range lies in a file.
fn inside(file: impl AsFd, at: u64, len: usize) -> Result<(), Errno> {
    let size = u64::try_from(fstat(file)?.st_size).map_err(|_| Errno::NOENT)?;
    let end = at.checked_add(len as u64);
    if end.is_some_and(|end| end <= size) {
        Ok(())
    } else {
        Err(Errno::NOENT)
    }
}

/// A line of `/proc/PID/maps`.
struct Area {
    start: u64,
    end: u64,
    shared: bool,
    writable: bool,
    /// The mapped file: offset of the mapping, device and inode, name.
    offset: u64,
    file: (u64, u64),
    path: String,
}

fn areas(process: &str) -> Result<Vec<Area>, Errno> {
    let text = fs::read_to_string(Path::new(process).join("maps"))
        .map_err(|error| refused(&format!("{process}/maps: {error}")))?;
    Ok(text.lines().filter_map(Area::read).collect())
}

impl Area {
    fn read(line: &str) -> Option<Area> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?.as_bytes();
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let inode = words.next()?.parse().ok()?;
        let number = |word: &str| u64::from_str_radix(word, 16).ok();
        let device = rustix::fs::makedev(
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
        );
        Some(Area {
            start: number(start)?,
            end: number(end)?,
            shared: rights.get(3) == Some(&b's'),
            writable: rights.get(1) == Some(&b'w'),
            offset: number(offset)?,
            file: (device, inode),
            path: words.next().unwrap_or_default().trim_start().to_owned(),
        })
    }
}

/// Bytes of a file.
struct Range {
    file: (u64, u64),
    offset: u64,
    path: String,
}

impl Range {
    /// The file range mapped at `addr`, if all of it is one file's, contiguous and shared.
    fn of(areas: &[Area], addr: u64, len: u64) -> Option<Range> {
        let end = addr.checked_add(len)?;
        let first = areas.iter().position(|area| area.end > addr)?;
        let area = areas.get(first).filter(|area| area.start <= addr)?;
        let offset = area.offset + (addr - area.start);
        let mut at = area.start;
        for next in areas.get(first..)? {
            let follows = next.start == at
                && next.shared
                && next.file == area.file
                && next.offset.checked_sub(area.offset) == next.start.checked_sub(area.start);
            if !follows {
                return None;
            }
            at = next.end;
            if at >= end {
                return Some(Range {
                    file: area.file,
                    offset,
                    path: area.path.clone(),
                });
            }
        }
        None
    }
}

/// Maps the range once more as this process has it mapped already: this also works for memory that has no name and no descriptor.
fn own(range: &Range, from: u64, len: usize, writable: bool) -> Option<Mapping> {
    let areas = areas("/proc/self").ok()?;
    let there = areas.iter().find(|area| {
        let begins = from.checked_sub(area.offset);
        area.shared
            && area.file == range.file
            && (area.writable || !writable)
            && begins.is_some_and(|skip| {
                (area.end - area.start)
                    .checked_sub(skip)
                    .is_some_and(|rest| rest >= len as u64)
            })
    })?;
    let addr = there.start + (from - there.offset);
    Mapping::again(usize::try_from(addr).ok()?, len).ok()
}

/// The file behind a range: a descriptor of the other process, or a file that still has its name.
fn open(range: &Range, process: &str, writable: bool) -> Option<File> {
    let fds = fs::read_dir(Path::new(process).join("fd"));
    let fds = fds.into_iter().flatten();
    let paths = fds.filter_map(|entry| Some(entry.ok()?.path()));
    let is = |found: fs::Metadata| (found.dev(), found.ino()) == range.file;
    paths
        .chain([Path::new(&range.path).to_path_buf()])
        .filter(|path| path.is_absolute() && fs::metadata(path).is_ok_and(&is))
        .find_map(|path| {
            let file = OpenOptions::new().read(true).write(writable).open(path);
            file.ok().filter(|file| file.metadata().is_ok_and(&is))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(lines: &[&str], addr: u64, len: u64) -> Option<(u64, u64)> {
        let areas: Vec<Area> = lines.iter().filter_map(|line| Area::read(line)).collect();
        assert_eq!(areas.len(), lines.len());
        Range::of(&areas, addr, len).map(|range| (range.file.1, range.offset))
    }

    #[test]
    fn a_range_is_of_one_file_and_shared() {
        let lines = [
            "1000-3000 rw-s 00005000 00:1a 77                         /dev/shm/with space",
            "3000-4000 r--s 00007000 00:1a 77                         /dev/shm/with space",
            "4000-5000 rw-s 00001000 00:1a 77                         /dev/shm/with space",
            "5000-6000 rw-s 00002000 00:1a 78                         /memfd:other (deleted)",
            "8000-9000 rw-p 00000000 00:00 0 ",
        ];
        assert_eq!(range(&lines, 0x1000, 0x3000), Some((77, 0x5000)));
        assert_eq!(range(&lines, 0x2fff, 2), Some((77, 0x6fff)));
        assert_eq!(range(&lines, 0x4010, 0x10), Some((77, 0x1010)));
        // Another place of the file, another file, a hole, private memory, no memory at all, a wrap-around.
        assert_eq!(range(&lines, 0x3fff, 2), None);
        assert_eq!(range(&lines, 0x4fff, 2), None);
        assert_eq!(range(&lines, 0x5fff, 2), None);
        assert_eq!(range(&lines, 0x7fff, 2), None);
        assert_eq!(range(&lines, 0x8000, 16), None);
        assert_eq!(range(&lines, 0xa000, 1), None);
        assert_eq!(range(&lines, 0x2000, u64::MAX), None);
        assert_eq!(
            Area::read("1000-3000 rw-s 00005000 001a 77").map(|_| ()),
            None
        );
        assert_eq!(Area::read("").map(|_| ()), None);
    }
}
