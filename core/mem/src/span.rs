//! Spans: checked ranges in flight.
//!
//! # Safety
//!
//! A span's range was checked against its region when it was made and never changes; its `Arc` keeps
//! the bytes. Every method checks its own range against the span's before a pointer is used.

use crate::registered::Registered;
use crate::{ExportAddr, MemError, copy};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A range of one region that passed all checks. While it lives, the region's memory stays.
///
/// Methods that take an offset panic when their range is not inside the span: lengths were
/// checked when it was made, so such a range is a bug of the caller, not of a peer.
pub struct Span {
    region: Arc<Registered>,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the pointer is into memory that `region`, itself Send and Sync, keeps for us.
unsafe impl Send for Span {}
// SAFETY: as above; all methods are racing copies or atomics.
unsafe impl Sync for Span {}

impl Span {
    /// `len` bytes from `offset`; both checked by the table.
    #[inline]
    pub(crate) fn new(region: Arc<Registered>, offset: usize, len: usize) -> Span {
        debug_assert!(len <= region.len() - offset);
        Span {
            ptr: region.at(offset),
            region,
            len,
        }
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its memory may go at any moment: see [`crate::RawMemory::everything`].
    #[inline]
    pub(crate) fn is_implicit(&self) -> bool {
        self.region.implicit
    }

    /// The place of its first byte, for a peer of this host.
    pub fn place(&self) -> ExportAddr {
        self.place_of(self.ptr.as_ptr())
    }

    /// The same for an address inside.
    pub(crate) fn place_of(&self, p: *const u8) -> ExportAddr {
        self.region
            .place(p.addr() - self.region.at(0).as_ptr().addr())
    }

    /// The file with its bytes, if they are frozen ([`crate::Region::freeze`]).
    #[inline]
    pub(crate) fn frozen_file(&self) -> Option<BorrowedFd<'_>> {
        self.region.frozen_file()
    }

    /// The address of `len` bytes at `off`.
    #[inline]
    pub(crate) fn range(&self, off: usize, len: usize) -> *mut u8 {
        assert!(
            off <= self.len && len <= self.len - off,
            "{off}+{len} is outside a span of {} bytes",
            self.len
        );
        self.ptr.as_ptr().wrapping_add(off)
    }

    /// Copies `src` to `off`.
    #[inline]
    pub fn copy_in(&self, off: usize, src: &[u8]) {
        let p = self.range(off, src.len());
        let implicit = self.region.implicit;
        // SAFETY: a checked range that lives as long as `self`.
        unsafe { copy::to(implicit, p, src.as_ptr(), src.len(), copy::store) };
    }

    /// Copies from `off` to `dst`.
    #[inline]
    pub fn copy_out(&self, off: usize, dst: &mut [u8]) {
        let p = self.range(off, dst.len());
        let implicit = self.region.implicit;
        // SAFETY: as in `copy_in`.
        unsafe { copy::from(implicit, dst.as_mut_ptr(), p, dst.len(), copy::load) };
    }

    /// Appends `len` bytes from `off` to `out`.
    pub fn extend(&self, off: usize, len: usize, out: &mut Vec<u8>) {
        let p = self.range(off, len);
        out.reserve(len);
        // SAFETY: a checked range; `reserve` made room for `len` bytes, all of which `load` writes.
        unsafe {
            let to = out.as_mut_ptr().add(out.len());
            copy::from(self.region.implicit, to, p, len, copy::load);
            out.set_len(out.len() + len);
        }
    }

    /// The span's first eight bytes.
    fn word(&self) -> Result<&AtomicU64, MemError> {
        if self.len < 8 {
            return Err(MemError::Bounds);
        }
        if self.region.implicit {
            return Err(MemError::Access);
        }
        let p = self.ptr.cast::<u64>();
        if !p.is_aligned() {
            return Err(MemError::Misaligned);
        }
        // SAFETY: checked size and alignment; the bytes are never behind a plain reference.
        Ok(unsafe { AtomicU64::from_ptr(p.as_ptr()) })
    }

    fn update(&self, f: impl Fn(u64) -> u64) -> Result<u64, MemError> {
        let (Ok(old) | Err(old)) =
            self.word()?
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |v| Some(f(v)));
        Ok(old)
    }

    /// Adds to the host-endian word at the span's start, atomically also with respect to the owner's `AtomicU64`; returns the old value.
    /// RFC 7306 section 5.1.
    ///
    /// # Errors
    /// [`MemError::Misaligned`] unless its address is a multiple of 8, [`MemError::Bounds`] for a
    /// span under 8 bytes; the same for the other atomics.
    pub fn fetch_add(&self, v: u64) -> Result<u64, MemError> {
        Ok(self.word()?.fetch_add(v, Ordering::SeqCst))
    }

    /// As [`Self::fetch_add`] on several fields of the word at once: each set bit of `mask` is the top
    /// bit of a field, whose carry is lost.
    pub fn fetch_add_masked(&self, v: u64, mask: u64) -> Result<u64, MemError> {
        self.update(|old| ((old & !mask).wrapping_add(v & !mask)) ^ ((old ^ v) & mask))
    }

    /// Replaces the word; returns the old value.
    pub fn swap(&self, v: u64) -> Result<u64, MemError> {
        Ok(self.word()?.swap(v, Ordering::SeqCst))
    }

    /// Replaces the bits set in `mask`; returns the whole old word.
    pub fn swap_masked(&self, v: u64, mask: u64) -> Result<u64, MemError> {
        self.update(|old| (old & !mask) | (v & mask))
    }

    /// Replaces the word by `swap` if it equals `compare`; returns the old value.
    pub fn compare_swap(&self, compare: u64, swap: u64) -> Result<u64, MemError> {
        let (Ok(old) | Err(old)) =
            self.word()?
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
        Ok(old)
    }

    /// Replaces the bits set in `swap_mask` if the bits set in `compare_mask` equal `compare`'s; returns
    /// the whole old word.
    pub fn compare_swap_masked(
        &self,
        compare: u64,
        compare_mask: u64,
        swap: u64,
        swap_mask: u64,
    ) -> Result<u64, MemError> {
        self.update(|old| {
            if (old ^ compare) & compare_mask == 0 {
                (old & !swap_mask) | (swap & swap_mask)
            } else {
                old
            }
        })
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Span")
            .field("stag", &format_args!("{:#010x}", self.region.stag))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
