//! Null memory regions: a read returns zeros and a write is dropped, at any address.
//!
//! A null region uses two ranges that are as long as the longest element: one maps only the system's page of zeros, the other repeats the same few pages. The
//! region has the key of the second range; elements to be read get the other key.

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
use crate::once::ForkOnce;

/// As long as an element can be.
const LENGTH: usize = 1 << 32;
/// The bytes that receive dropped writes.
const DRAIN: usize = 16 << 20;

/// Set once there has been a null region: elements must be checked.
static ANY: AtomicBool = AtomicBool::new(false);

/// The keys for reading, by those for writing.
static KEYS: PerFork<Mutex<HashMap<u32, u32>>> = PerFork::new();

struct Ranges {
    zeros: RawMemory,
    drain: RawMemory,
}

fn ranges() -> Result<&'static Ranges, Errno> {
    static RANGES: ForkOnce<Ranges> = ForkOnce::new();
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
        // SAFETY: inside the mapping made above, which is not used yet.
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
    // A thread that loses the race has mapped in vain; that costs only addresses.
    Ok(RANGES.get_or_init(|| made))
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

/// Moves elements of null regions to their range. `read`: the elements are read from.
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
