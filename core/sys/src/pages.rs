//! Private pages of a known kind: small or huge, resident or not, locked or not. For measuring what pages cost.
//!
//! # Safety
//!
//! The mapping belongs to this value from `new` to `drop`, and no other code has its address.

use rustix::mm::{Advice, madvise};
use std::io;
use std::ptr::NonNull;

use crate::map;

/// The assumed size of a huge page.
const HUGE: usize = 2 << 20;

/// An anonymous private mapping.
#[derive(Debug)]
pub struct Pages {
    mapped: NonNull<u8>,
    mapped_len: usize,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory that this value alone has.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps `len` bytes, none of them resident, that begin on a huge page. `huge`: huge pages are asked for; otherwise they are refused.
    ///
    /// # Errors
    /// `InvalidInput` for a length of zero or one that is too large, `OutOfMemory` when the address space is full.
    pub fn new(len: usize, huge: bool) -> io::Result<Self> {
        let mapped_len = len
            .checked_add(HUGE)
            .filter(|_| len > 0)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let mapped = map::map_anonymous(mapped_len)?;
        let off = mapped.as_ptr().align_offset(HUGE);
        // SAFETY: within the mapping, which is longer by a huge page.
        let at = unsafe { mapped.add(off) };
        let pages = Self {
            mapped,
            mapped_len,
            at,
            len,
        };
        let advice = if huge {
            Advice::LinuxHugepage
        } else {
            Advice::LinuxNoHugepage
        };
        // A kernel without huge pages knows neither, and gives small ones.
        // SAFETY: our own range; nothing is in it yet.
        let _ = unsafe { madvise(at.as_ptr().cast(), len, advice) };
        Ok(pages)
    }

    /// The bytes; touching them makes them resident.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, initialised by the kernel, and borrowed from the one owner.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Writes a byte to each page of 4 KiB.
    pub fn touch(&mut self) {
        self.bytes().iter_mut().step_by(4096).for_each(|b| *b = 1);
    }

    /// Gives the pages back: none is resident, all are zero again.
    ///
    /// # Errors
    /// When they are locked.
    pub fn release(&mut self) -> io::Result<()> {
        // SAFETY: our own range, with no reference into it.
        unsafe { madvise(self.at.as_ptr().cast(), self.len, Advice::LinuxDontNeed) }?;
        Ok(())
    }

    /// Makes the first `len` bytes (at most all) resident and keeps them so.
    ///
    /// # Errors
    /// As [`map::lock`].
    pub fn lock(&mut self, len: usize) -> io::Result<()> {
        // SAFETY: our own range.
        unsafe { map::lock(self.at, len.min(self.len)) }
    }

    /// Undoes [`Pages::lock`].
    ///
    /// # Errors
    /// Those of `munlock`.
    pub fn unlock(&mut self, len: usize) -> io::Result<()> {
        // SAFETY: our own range.
        unsafe { map::unlock(self.at, len.min(self.len)) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody uses it after.
        let unmapped = unsafe { map::unmap(self.mapped, self.mapped_len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_and_go() {
        for huge in [false, true] {
            let mut pages = Pages::new(3 << 20, huge).unwrap();
            assert!(pages.bytes().as_ptr().addr().is_multiple_of(HUGE));
            pages.touch();
            assert_eq!(pages.bytes()[4096], 1);
            pages.release().unwrap();
            assert!(pages.bytes().iter().all(|b| *b == 0));
            // Not everybody may lock memory.
            if pages.lock(4096).is_ok() {
                pages.unlock(4096).unwrap();
            }
        }
        assert!(Pages::new(0, false).is_err());
        assert!(Pages::new(usize::MAX, true).is_err());
    }
}
