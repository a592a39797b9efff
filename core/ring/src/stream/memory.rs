//! The memory of a [`Stream`]: a mapping of a file that both ends have.
//!
//! # Safety
//!
//! As in `segment.rs`: the mapping is of a file that cannot shrink, control words are at constant offsets below `CONTROL`, ring positions
//! are masked, copies are cut at the ring's end, and no reference to the bytes is formed but `&AtomicU64`.

use crate::file::{CONTROL, File, Kind};
use crate::{OpenError, Role};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
pub(super) use std::sync::atomic::{AtomicU64, fence};
use weft_mem::checked;
use weft_sys::memfd;

const KIND: Kind = Kind {
    name: "weft-run-ring",
    magic: u64::from_ne_bytes(*b"weftrun\0"),
    version: 3,
};

/// After a sequentially consistent exchange that the other side's loads follow: nothing more is needed.
#[inline]
pub(super) fn announced() {}

/// The memory that both ends of a connection share.
#[derive(Debug)]
pub struct Stream {
    file: File,
    /// The peer may offer sources.
    takes_sources: bool,
}

impl Stream {
    fn new(file: File) -> Stream {
        Stream {
            file,
            takes_sources: true,
        }
    }

    /// Takes no sources: a peer that offers one breaks the rules.
    pub fn refuse_sources(&mut self) {
        self.takes_sources = false;
    }

    #[inline]
    pub(crate) fn takes_sources(&self) -> bool {
        self.takes_sources
    }

    /// A new one, and the file for the peer. `ring_bytes` is the capacity of each direction: a power of two in 16 KiB..=16 MiB. Pages take
    /// memory when they are first used.
    ///
    /// # Errors
    /// `InvalidInput` for another size; those of `memfd_create(2)` and `mmap(2)`.
    pub fn create(ring_bytes: u32) -> io::Result<(Stream, OwnedFd)> {
        let (file, fd) = File::create(&KIND, ring_bytes)?;
        Ok((Stream::new(file), fd))
    }

    /// As [`Stream::create`], with all of its memory: it is charged to this process, and neither side can be charged or refused later.
    ///
    /// # Errors
    /// As there; `ENOMEM` and `ENOSPC` too if there is not enough.
    pub fn create_filled(ring_bytes: u32) -> io::Result<(Stream, OwnedFd)> {
        let made = Stream::create(ring_bytes)?;
        made.0.fill(&made.1)?;
        Ok(made)
    }

    /// The peer's. Its seals, length, magic number, version and ring size are checked, each read once.
    pub fn open(fd: impl AsFd) -> Result<Stream, OpenError> {
        File::open(&KIND, fd).map(Stream::new)
    }

    /// As [`Stream::open`], of a file whose memory the peer has allocated.
    ///
    /// # Errors
    /// As there.
    pub fn open_filled(fd: impl AsFd) -> Result<Stream, OpenError> {
        // The seals come first: only a memory file has them, and of others even a look can wait.
        memfd::check_sealed(&fd)?;
        memfd::check_filled(&fd)?;
        Stream::open(fd)
    }

    /// Allocates all of its memory, as [`Stream::create_filled`] does. `fd`: its file.
    ///
    /// # Errors
    /// `ENOMEM` and `ENOSPC` if there is not enough.
    pub fn fill(&self, fd: impl AsFd) -> io::Result<()> {
        memfd::fill(fd, self.file.map.len() as u64)
    }

    /// Bytes that each direction's ring holds.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.file.capacity
    }

    #[inline]
    pub(crate) fn at(&self, offset: usize) -> &AtomicU64 {
        self.file.at(offset)
    }

    /// Copies `n` bytes to the position; they are not visible until [`Stream::publish`]. `n` is cut at the capacity. Returns how many could be
    /// read: see [`weft_mem::checked`].
    ///
    /// # Safety
    /// `from..from + n` must be memory that may be read, where there is any.
    #[inline]
    pub unsafe fn put(&self, sender: Role, position: u64, from: *const u8, n: usize) -> usize {
        let (at, first, start) = self.piece(sender, position);
        let n = n.min(self.file.capacity);
        let first = first.min(n);
        // SAFETY: both pieces are inside the ring; the caller's promise for the source.
        unsafe {
            let done = checked::copy(at, from, first);
            if done < first || first == n {
                return done;
            }
            done + checked::copy(start, from.wrapping_add(first), n - first)
        }
    }

    /// The position in memory, the bytes from there to the end of the ring, and its beginning.
    #[inline]
    pub fn piece(&self, sender: Role, position: u64) -> (*mut u8, usize, *mut u8) {
        let index = position as usize & (self.file.capacity - 1);
        let ring = CONTROL + self.file.capacity * sender as usize;
        // SAFETY: the ring is inside the mapping, and the index inside the ring.
        let (start, at) = unsafe {
            let start = self.file.map.as_ptr().add(ring);
            (start, start.add(index))
        };
        (at, self.file.capacity - index, start)
    }

    /// Copies `n` bytes of the position out. `n` is cut at the capacity. Returns how many could be written: see [`weft_mem::checked`].
    ///
    /// # Safety
    /// `to..to + n` must be memory that may be written, where there is any.
    #[inline]
    pub unsafe fn get(&self, sender: Role, position: u64, to: *mut u8, n: usize) -> usize {
        let (at, first, start) = self.piece(sender, position);
        let n = n.min(self.file.capacity);
        let first = first.min(n);
        // SAFETY: both pieces are inside the ring; the caller's promise for the target.
        unsafe {
            let done = checked::copy(to, at, first);
            if done < first || first == n {
                return done;
            }
            done + checked::copy(to.wrapping_add(first), start, n - first)
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
