//! The memory of a [`Stream`]: a mapping of a file that both ends have.
//!
//! # Safety
//!
//! As in `segment.rs`: the mapping is of a file that cannot shrink, control words are at constant offsets below `CONTROL`, ring positions
//! are masked, copies are cut at the ring's end, and no reference to the bytes is formed but `&AtomicU64`.

use crate::{OpenError, Role};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
pub(super) use std::sync::atomic::{AtomicU64, fence};
use weft_sys::memfd::{self, Mapping};

const CONTROL: usize = 4096;
const MAGIC: u64 = u64::from_ne_bytes(*b"weftrun\0");
const VERSION: u32 = 3;
const MIN_RING: u32 = 16 << 10;
const MAX_RING: u32 = 16 << 20;

/// After a sequentially consistent exchange that the other side's loads follow: nothing more is needed.
#[inline]
pub(super) fn announced() {}

/// The memory that both ends of a connection share.
#[derive(Debug)]
pub struct Stream {
    map: Mapping,
    pub(super) capacity: usize,
}

fn ring_size_ok(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_RING..=MAX_RING).contains(&bytes)
}

pub(super) fn file_len(ring_bytes: u32) -> u64 {
    CONTROL as u64 + 2 * u64::from(ring_bytes)
}

impl Stream {
    /// A new one, and the file for the peer. `ring_bytes` is the capacity of each direction: a power of two in 16 KiB..=16 MiB. Pages take
    /// memory when they are first used.
    ///
    /// # Errors
    /// `InvalidInput` for another size; those of [`memfd::create`] and [`Mapping::new`].
    pub fn create(ring_bytes: u32) -> io::Result<(Stream, OwnedFd)> {
        if !ring_size_ok(ring_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = file_len(ring_bytes);
        let fd = memfd::create("weft-run-ring", len)?;
        let stream = Stream {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: ring_bytes as usize,
        };
        stream.at(0).store(MAGIC, Relaxed);
        stream
            .at(8)
            .store(u64::from(VERSION) | u64::from(ring_bytes) << 32, Relaxed);
        Ok((stream, fd))
    }

    /// The peer's. Its seals, length, magic number, version and ring size are checked, each read once.
    #[expect(clippy::needless_pass_by_value, reason = "of no use once it is mapped")]
    pub fn open(fd: OwnedFd) -> Result<Stream, OpenError> {
        let len = memfd::check(&fd)?;
        if !(file_len(MIN_RING)..=file_len(MAX_RING)).contains(&len) {
            return Err(OpenError::Size(len));
        }
        let mut stream = Stream {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: MIN_RING as usize,
        };
        if stream.at(0).load(Relaxed) != MAGIC {
            return Err(OpenError::Magic);
        }
        let shape = stream.at(8).load(Relaxed);
        let (version, ring_bytes) = (shape as u32, (shape >> 32) as u32);
        if version != VERSION {
            return Err(OpenError::Version(version));
        }
        if !ring_size_ok(ring_bytes) {
            return Err(OpenError::Ring(ring_bytes));
        }
        if len != file_len(ring_bytes) {
            return Err(OpenError::Size(len));
        }
        stream.capacity = ring_bytes as usize;
        Ok(stream)
    }

    /// Bytes that each direction's ring holds.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    #[inline]
    pub(crate) fn at(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < CONTROL);
        // SAFETY: the callers keep the offset inside the control page and a multiple of 8; the mapping lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(offset).cast()) }
    }

    /// Copies `n` bytes to the position; they are not visible until [`Stream::publish`]. `n` is cut at the capacity.
    ///
    /// # Safety
    /// `from..from + n` must be readable.
    #[inline]
    pub unsafe fn put(&self, sender: Role, position: u64, from: *const u8, n: usize) {
        let (at, first, start) = self.piece(sender, position);
        let n = n.min(self.capacity);
        let first = first.min(n);
        // SAFETY: both pieces are inside the ring; the caller's promise for the source.
        unsafe {
            weft_mem::racing_store(at, from, first);
            weft_mem::racing_store(start, from.add(first), n - first);
        }
    }

    /// The position in memory, the bytes from there to the end of the ring, and its beginning.
    #[inline]
    pub fn piece(&self, sender: Role, position: u64) -> (*mut u8, usize, *mut u8) {
        let index = position as usize & (self.capacity - 1);
        let ring = CONTROL + self.capacity * sender as usize;
        // SAFETY: the ring is inside the mapping, and the index inside the ring.
        let (start, at) = unsafe {
            let start = self.map.as_ptr().add(ring);
            (start, start.add(index))
        };
        (at, self.capacity - index, start)
    }

    /// Copies `n` bytes of the position out. `n` is cut at the capacity.
    ///
    /// # Safety
    /// `to..to + n` must be writable.
    #[inline]
    pub unsafe fn get(&self, sender: Role, position: u64, to: *mut u8, n: usize) {
        let (at, first, start) = self.piece(sender, position);
        let n = n.min(self.capacity);
        let first = first.min(n);
        // SAFETY: both pieces are inside the ring; the caller's promise for the target.
        unsafe {
            weft_mem::racing_load(to, at, first);
            weft_mem::racing_load(to.add(first), start, n - first);
        }
    }

    /// [`Stream::put`] from a slice.
    pub fn put_slice(&self, sender: Role, position: u64, from: &[u8]) {
        // SAFETY: a slice is readable.
        unsafe { self.put(sender, position, from.as_ptr(), from.len()) };
    }

    /// [`Stream::get`] into a slice; bytes beyond the capacity stay unchanged.
    pub fn get_slice(&self, sender: Role, position: u64, to: &mut [u8]) {
        // SAFETY: a slice is writable.
        unsafe { self.get(sender, position, to.as_mut_ptr(), to.len()) };
    }
}
