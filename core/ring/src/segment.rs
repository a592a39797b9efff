//! The mapped memory.
//!
//! # Safety
//!
//! Every segment is a mapping of `CONTROL + 2 * capacity` bytes of a file that cannot shrink, and
//! `capacity` is a power of two kept in private memory. Control words are at constant offsets below `CONTROL`; ring
//! positions are masked; copies are cut at the ring's end. No reference to the bytes is ever formed but
//! `&AtomicU64`.

use crate::file::{CONTROL, File, Kind};
use crate::{OpenError, Role, Word};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
pub(crate) use std::sync::atomic::{AtomicU64, fence};
use weft_mem::{RecvList, SendList};

/// Bytes between control words: two cache lines, since processors fetch them in pairs.
const LINE: usize = 128;
/// Lines set aside for the words of one side; the first line of the page is the header's.
const LINES: usize = 8;
const KIND: Kind = Kind {
    name: "weft-ring",
    magic: u64::from_ne_bytes(*b"weftring"),
    version: 1,
};

/// The memory that the two ends of a connection share.
#[derive(Debug)]
pub struct Segment(File);

impl Segment {
    /// A new segment, and the file to pass to the peer. `ring_bytes` is the capacity for each
    /// direction: a power of two in 16 KiB..=16 MiB. Pages take memory when they are first used.
    ///
    /// # Errors
    /// `InvalidInput` for another ring size; those of `memfd_create(2)` and `mmap(2)`.
    pub fn create(ring_bytes: u32) -> io::Result<(Segment, OwnedFd)> {
        let (file, fd) = File::create(&KIND, ring_bytes)?;
        Ok((Segment(file), fd))
    }

    /// The peer's segment. Its seals, length, magic number, version and ring size are checked, each
    /// read once.
    #[expect(clippy::needless_pass_by_value, reason = "of no use once it is mapped")]
    pub fn open(fd: OwnedFd) -> Result<Segment, OpenError> {
        File::open(&KIND, &fd).map(Segment)
    }

    /// Bytes of one ring.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// A control word that `role` owns.
    #[inline]
    pub(crate) fn control(&self, role: Role, word: Word) -> &AtomicU64 {
        self.0
            .at(LINE * (1 + LINES * role as usize + word as usize))
    }

    /// The word at a position of the ring that `role` sends through.
    #[inline]
    pub(crate) fn word(&self, role: Role, position: u64) -> &AtomicU64 {
        let index = position as usize & (self.0.capacity - 8);
        self.0.at(CONTROL + self.0.capacity * role as usize + index)
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
        let n = n.min(self.0.capacity);
        let index = position as usize & (self.0.capacity - 1);
        let first = n.min(self.0.capacity - index);
        let ring = CONTROL + self.0.capacity * role as usize;
        // SAFETY: the ring is inside the mapping, `index` inside the ring.
        let (start, at) = unsafe {
            let start = self.0.map.as_ptr().add(ring);
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
