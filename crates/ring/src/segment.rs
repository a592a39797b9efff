//! The mapped memory.
//!
//! # Safety
//!
//! Every segment is a mapping of `CONTROL + 2 * capacity` bytes of a file that cannot shrink, and
//! `capacity` is a power of two kept in private memory. Control words are at constant offsets below `CONTROL`; ring
//! positions are masked; copies are cut at the ring's end. No reference to the bytes is ever formed but
//! `&AtomicU64`.

use crate::{OpenError, Role, Word};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
pub(crate) use std::sync::atomic::{AtomicU64, fence};
use weft_mem::{RecvList, SendList};
use weft_sys::memfd::{self, Mapping};

/// Bytes of the control page.
const CONTROL: usize = 4096;
/// Bytes between control words: two cache lines, since processors fetch them in pairs.
const LINE: usize = 128;
/// Lines set aside for the words of one side; the first line of the page is the header's.
const LINES: usize = 8;
const MAGIC: u64 = u64::from_ne_bytes(*b"weftring");
const VERSION: u32 = 1;
const MIN_RING: u32 = 16 << 10;
const MAX_RING: u32 = 16 << 20;

/// The memory that the two ends of a connection share.
#[derive(Debug)]
pub struct Segment {
    map: Mapping,
    capacity: usize,
}

fn ring_size_ok(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_RING..=MAX_RING).contains(&bytes)
}

fn file_len(ring_bytes: u32) -> u64 {
    CONTROL as u64 + 2 * u64::from(ring_bytes)
}

impl Segment {
    /// A new segment, and the file to pass to the peer. `ring_bytes` is the capacity for each
    /// direction: a power of two in 16 KiB..=16 MiB. Pages take memory when they are first used.
    ///
    /// # Errors
    /// `InvalidInput` for another ring size; those of [`memfd::create`] and [`Mapping::new`].
    pub fn create(ring_bytes: u32) -> io::Result<(Segment, OwnedFd)> {
        if !ring_size_ok(ring_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = file_len(ring_bytes);
        let fd = memfd::create("weft-ring", len)?;
        let segment = Segment {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: ring_bytes as usize,
        };
        segment.at(0).store(MAGIC, Relaxed);
        let shape = u64::from(VERSION) | u64::from(ring_bytes) << 32;
        segment.at(8).store(shape, Relaxed);
        Ok((segment, fd))
    }

    /// The peer's segment. Its seals, length, magic number, version and ring size are checked, each
    /// read once.
    #[expect(clippy::needless_pass_by_value, reason = "of no use once it is mapped")]
    pub fn open(fd: OwnedFd) -> Result<Segment, OpenError> {
        let len = memfd::check(&fd)?;
        if !(file_len(MIN_RING)..=file_len(MAX_RING)).contains(&len) {
            return Err(OpenError::Size(len));
        }
        let mut segment = Segment {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: MIN_RING as usize,
        };
        if segment.at(0).load(Relaxed) != MAGIC {
            return Err(OpenError::Magic);
        }
        let shape = segment.at(8).load(Relaxed);
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
        segment.capacity = ring_bytes as usize;
        Ok(segment)
    }

    /// Bytes of one ring.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    #[inline]
    fn at(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < self.map.len());
        // SAFETY: the callers keep the offset inside the mapping and a multiple of 8; the mapping
        // lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(offset).cast()) }
    }

    /// A control word that `role` owns.
    #[inline]
    pub(crate) fn control(&self, role: Role, word: Word) -> &AtomicU64 {
        self.at(LINE * (1 + LINES * role as usize + word as usize))
    }

    /// The word at a position of the ring that `role` sends through.
    #[inline]
    pub(crate) fn word(&self, role: Role, position: u64) -> &AtomicU64 {
        let index = position as usize & (self.capacity - 8);
        self.at(CONTROL + self.capacity * role as usize + index)
    }

    /// Calls `copy(address, bytes done before, bytes)` for the one or two pieces of the ring that
    /// `n` bytes from `position` are; until a piece is not done whole. Returns the bytes done.
    #[inline]
    fn pieces(
        &self,
        role: Role,
        position: u64,
        n: usize,
        mut copy: impl FnMut(*mut u8, usize, usize) -> usize,
    ) -> usize {
        let n = n.min(self.capacity);
        let index = position as usize & (self.capacity - 1);
        let first = n.min(self.capacity - index);
        let ring = CONTROL + self.capacity * role as usize;
        // SAFETY: the ring is inside the mapping, `index` inside the ring.
        let (start, at) = unsafe {
            let start = self.map.as_ptr().add(ring);
            (start, start.add(index))
        };
        let done = copy(at, 0, first);
        if done < first || n == first {
            return done;
        }
        done + copy(start, first, n - first)
    }

    /// Copies `n` bytes of the list from `skip` on into the ring; returns the bytes that there were.
    #[inline]
    pub(crate) fn copy_in(
        &self,
        role: Role,
        position: u64,
        list: &SendList<'_>,
        skip: usize,
        n: usize,
    ) -> usize {
        self.pieces(role, position, n, |to, done, now| {
            // SAFETY: a piece of the ring, which is reached by racing copies only.
            unsafe { list.copy_range_to(skip + done, to, now) }
        })
    }

    /// Copies `n` bytes of the ring into the list from `skip` on; returns the bytes it had room for.
    #[inline]
    pub(crate) fn copy_out(
        &self,
        role: Role,
        position: u64,
        list: &mut RecvList<'_>,
        skip: usize,
        n: usize,
    ) -> usize {
        self.pieces(role, position, n, |from, done, now| {
            // SAFETY: as in `copy_in`.
            unsafe { list.fill_range_from(skip + done, from, now) }
        })
    }
}

/// Stores `value`; a following [`look`] is not reordered before it. If two sides each announce and then look at the other's announcement,
/// at least one sees the other's.
#[inline]
pub(crate) fn announce(word: &AtomicU64, value: u64) {
    word.store(value, SeqCst);
}

/// As [`announce`], but the word only rises.
#[inline]
pub(crate) fn announce_max(word: &AtomicU64, value: u64) {
    word.fetch_max(value, SeqCst);
}

/// See [`announce`].
#[inline]
pub(crate) fn look(word: &AtomicU64) -> u64 {
    word.load(SeqCst)
}
