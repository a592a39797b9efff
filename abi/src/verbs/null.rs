//! Null memory regions: whatever is read from one is zero, whatever is written to one is dropped, at any address.
//!
//! Behind them are two ranges that are as long as the longest element: one that is nothing but the system's page of zeros, and one that
//! is the same few pages over and over. A region's key is that of the second one; elements that are read from are given the other key.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use weft_verbs::{Access, RawMemory, Sge};

use super::object::{PerFork, lock};
use crate::made::Made;

/// As long as an element can be.
const LENGTH: usize = 1 << 32;
/// What is dropped goes here.
const DRAIN: usize = 16 << 20;

/// There are null regions, or were: elements have to be looked at.
static ANY: AtomicBool = AtomicBool::new(false);

/// The keys for reading, by those for writing.
static KEYS: PerFork<Mutex<HashMap<u32, u32>>> = PerFork::new();

struct Ranges {
    zeros: RawMemory,
    drain: RawMemory,
}

fn ranges() -> Result<&'static Ranges, Errno> {
    static RANGES: Made<Ranges> = Made::new();
    if let Some(ranges) = RANGES.get() {
        return Ok(ranges);
    }
    let quiet = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping, which stays.
    let zeros = unsafe { mmap_anonymous(null_mut(), LENGTH, ProtFlags::READ, quiet) }?;
    // SAFETY: as above.
    let drain = unsafe { mmap_anonymous(null_mut(), LENGTH, ProtFlags::empty(), quiet) }?;
    let pages = memfd_create("weft-null", MemfdFlags::CLOEXEC)?;
    ftruncate(&pages, DRAIN as u64)?;
    for at in (0..LENGTH).step_by(DRAIN) {
        let place = drain.cast::<u8>().wrapping_add(at).cast::<c_void>();
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: inside the mapping of before, which nobody uses yet.
        unsafe { mmap(place, DRAIN, both, flags, &pages, 0) }?;
    }
    let raw = |range: *mut c_void| {
        // SAFETY: it stays mapped, and only weft knows it.
        unsafe { RawMemory::new(range.cast(), LENGTH) }.ok_or(Errno::NOMEM)
    };
    let made = Ranges {
        zeros: raw(zeros)?,
        drain: raw(drain)?,
    };
    // Who was second has mapped in vain; that costs addresses only.
    Ok(RANGES.get_or_make(|| made))
}

/// Both regions behind a null region.
pub(crate) struct Null {
    pub(crate) drain: weft_verbs::Mr,
    _zeros: weft_verbs::Mr,
}

impl Null {
    pub(crate) fn new(pd: &weft_verbs::Pd) -> Result<Null, Errno> {
        let ranges = ranges()?;
        let drain = pd
            .reg_raw_at(&ranges.drain, 0, Access::LOCAL_WRITE)
            .map_err(super::errno)?;
        let zeros = pd
            .reg_raw_at(&ranges.zeros, 0, Access::empty())
            .map_err(super::errno)?;
        lock(KEYS.get()).insert(drain.lkey(), zeros.lkey());
        ANY.store(true, Ordering::Release);
        Ok(Null {
            drain,
            _zeros: zeros,
        })
    }
}

impl Drop for Null {
    fn drop(&mut self) {
        lock(KEYS.get()).remove(&self.drain.lkey());
    }
}

/// Give elements of null regions their place. `read`: they are read from.
#[inline]
pub(crate) fn resolve(elements: &mut [Sge], read: bool) {
    if ANY.load(Ordering::Relaxed) {
        resolve_all(elements, read);
    }
}

#[cold]
fn resolve_all(elements: &mut [Sge], read: bool) {
    let keys = lock(KEYS.get());
    for element in elements {
        if let Some(zeros) = keys.get(&element.lkey) {
            element.addr = 0;
            if read {
                element.lkey = *zeros;
            }
        }
    }
}
