//! The table of a context's objects for other processes, in the memory file behind `cmd_fd`. A process that is given the descriptor reads it
//! ([`super::foreign`]). The same file holds the context's device memory.
//!
//! The owner only writes to the table, so no other holder of the file can mislead it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, stat};
use rustix::io::Errno;
use rustix::process::{Resource, getpid, getrlimit};
use weft_sys::memfd::Mapping;

use super::object::lock;
use super::os_errno;
use super::which::Which;

/// The first word of a table, while its context lives.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"weftcmd1");
/// Words before the first entry, and of an entry.
const HEAD: usize = 512;
const ENTRY: usize = 8;
/// Objects that can be in the table at a time. Others cannot be imported by another process.
const ENTRIES: usize = 1 << 18;
/// Bytes of head and table.
pub(super) const TABLE: usize = (HEAD + ENTRIES * ENTRY) * 8;
/// Offset of device memory in the file. No part is used twice, so that the importer of one part never sees another's bytes.
const MEMORY: u64 = 1 << 30;
/// Holes take no memory.
const SIZE: u64 = 1 << 46;

/// Kinds of objects in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Sort {
    Pd = 1,
    /// A region of memory at `addr` in the owner.
    Mr = 2,
    /// A region of device memory: `addr` is an offset in the file.
    DmMr = 3,
    Dm = 4,
}

/// An object in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) sort: Sort,
    pub(super) handle: u32,
    pub(super) domain: u32,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) iova: u64,
    pub(super) access: u32,
}

/// The owner's side of a table.
pub(crate) struct Export {
    map: Mapping,
    slots: Mutex<Slots>,
    /// Bytes of device memory that have been allocated.
    given: AtomicU64,
}

#[derive(Default)]
struct Slots {
    used: usize,
    free: Vec<usize>,
}

/// A new file for a context, with the table in it; `None` where the machine allows no file of that size.
///
/// # Errors
/// Those of `memfd_create(2)`.
pub(super) fn new(which: Which) -> Result<(OwnedFd, Option<Arc<Export>>), Errno> {
    // The name identifies the file in /proc.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(which.name(), flags)?;
    let export = Export::new(&file, which)
        .inspect_err(|errno| tracing::debug!(%errno, "other processes cannot import this context"));
    Ok((file, export.ok().map(Arc::new)))
}

impl Export {
    fn new(file: &OwnedFd, which: Which) -> Result<Export, Errno> {
        // Past the limit the call would end the process.
        if getrlimit(Resource::Fsize)
            .current
            .is_some_and(|limit| limit < SIZE)
        {
            return Err(Errno::FBIG);
        }
        let owner = Owner::here().ok_or(Errno::NOENT)?;
        ftruncate(file, SIZE)?;
        fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = Mapping::new(file, 0, TABLE, true).map_err(|error| os_errno(&error))?;
        let words = [which as u64, owner.pid, owner.begun, owner.namespace];
        for (at, word) in words.into_iter().enumerate() {
            map.word(at + 1).store(word, Ordering::Relaxed);
        }
        map.word(0).store(MAGIC, Ordering::Release);
        Ok(Export {
            map,
            slots: Mutex::default(),
            given: AtomicU64::new(MEMORY),
        })
    }

    /// Allocates a place for device memory in the file.
    pub(super) fn give(&self, len: usize) -> Option<u64> {
        let len = (len as u64).checked_next_multiple_of(1 << 16)?;
        let end = |at: u64| at.checked_add(len).filter(|end| *end <= SIZE);
        let given = &self.given;
        given
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, end)
            .ok()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.map.word(0).store(0, Ordering::Release);
    }
}

/// An object is in the table until this is dropped.
pub(crate) struct Shown {
    export: Arc<Export>,
    slot: usize,
}

/// Adds an object to a context's table, if the context has one with room.
pub(super) fn show(export: Option<&Arc<Export>>, entry: &Entry) -> Option<Shown> {
    let export = export?;
    let slot = {
        let mut slots = lock(&export.slots);
        if let Some(slot) = slots.free.pop() {
            slot
        } else if slots.used < ENTRIES {
            slots.used += 1;
            export
                .map
                .word(5)
                .store(slots.used as u64, Ordering::Relaxed);
            slots.used - 1
        } else {
            tracing::debug!(?entry, "no place: other processes cannot import it");
            return None;
        }
    };
    let word = |at: usize| export.map.word(HEAD + slot * ENTRY + at);
    let fields = [
        u64::from(entry.handle) | u64::from(entry.domain) << 32,
        entry.addr,
        entry.len,
        entry.iova,
        entry.access.into(),
    ];
    // A reader that sees one of the new fields also sees that the previous object is gone.
    fence(Ordering::Release);
    for (at, field) in fields.into_iter().enumerate() {
        word(at + 1).store(field, Ordering::Relaxed);
    }
    // Each use of a slot has a number, so that a reader does not combine parts of two.
    let turn = word(6).load(Ordering::Relaxed).wrapping_add(1);
    word(6).store(turn, Ordering::Relaxed);
    word(0).store(turn << 8 | entry.sort as u64, Ordering::Release);
    Some(Shown {
        export: Arc::clone(export),
        slot,
    })
}

impl Shown {
    pub(super) fn export(&self) -> Arc<Export> {
        Arc::clone(&self.export)
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let state = self.export.map.word(HEAD + self.slot * ENTRY);
        state.store(0, Ordering::SeqCst);
        lock(&self.export.slots).free.push(self.slot);
    }
}

/// The entry of a table for which `wanted` is true. Any holder of the file may have written it.
pub(super) fn find(map: &Mapping, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
    let used = map.word(5).load(Ordering::Relaxed).min(ENTRIES as u64);
    (0..used as usize).find_map(|slot| {
        let word = |at: usize| map.word(HEAD + slot * ENTRY + at);
        let state = word(0).load(Ordering::Acquire);
        let sort = match state & 0xff {
            1 => Sort::Pd,
            2 => Sort::Mr,
            3 => Sort::DmMr,
            4 => Sort::Dm,
            _ => return None,
        };
        let field = |at: usize| word(at).load(Ordering::Acquire);
        let names = field(1);
        let entry = Entry {
            sort,
            handle: names as u32,
            domain: (names >> 32) as u32,
            addr: field(2),
            len: field(3),
            iova: field(4),
            access: field(5) as u32,
        };
        (word(0).load(Ordering::Relaxed) == state && wanted(&entry)).then_some(entry)
    })
}

/// A process, identified so that another one with the same number is not mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) pid: u64,
    /// Its start time, as the kernel counts.
    begun: u64,
    /// The inode of its namespace of process numbers.
    namespace: u64,
}

impl Owner {
    /// This process; `None` without `/proc`.
    pub(super) fn here() -> Option<Owner> {
        Owner::at(getpid().as_raw_nonzero().get().unsigned_abs().into())
    }

    fn at(pid: u64) -> Option<Owner> {
        let stat_line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may contain any bytes.
        let (_, rest) = stat_line.rsplit_once(')')?;
        Some(Owner {
            pid,
            begun: rest.split_whitespace().nth(19)?.parse().ok()?,
            namespace: stat("/proc/self/ns/pid").ok()?.st_ino,
        })
    }

    /// The process that a table names as its writer.
    pub(super) fn of(map: &Mapping) -> Owner {
        let [pid, begun, namespace] = [2, 3, 4].map(|at| map.word(at).load(Ordering::Relaxed));
        Owner {
            pid,
            begun,
            namespace,
        }
    }

    /// True if `/proc` of this process shows it alive.
    pub(super) fn is_seen(self) -> bool {
        Owner::at(self.pid) == Some(self)
    }
}
