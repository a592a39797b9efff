//! Anonymous page mappings and page locks.
//!
//! # Safety
//!
//! Mapping is safe (no other code has the address yet); unmapping and locking name memory that other code may use, and are `unsafe`.

use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

/// Maps `len` bytes (rounded up to pages) of private zeroed memory, readable and writable. A page
/// takes memory when it is first touched, and no swap space is set aside for it.
///
/// # Errors
/// `InvalidInput` for a length of zero, `OutOfMemory` when the address space is full.
pub fn map_anonymous(len: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: no address is asked for, so no existing mapping is replaced.
    let p = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
    };
    NonNull::new(p.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Unmaps what [`map_anonymous`] mapped.
///
/// # Safety
/// `ptr` and `len` must be those of one [`map_anonymous`], and nothing may use the memory after.
pub unsafe fn unmap(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::munmap(ptr.as_ptr().cast(), len) }.map_err(io::Error::from)
}

/// Makes the pages of a range resident and keeps them so.
///
/// # Errors
/// `OutOfMemory` or `PermissionDenied` when the limit ([`crate::limits::memlock`]) forbids it.
///
/// # Safety
/// The range must be mapped.
pub unsafe fn lock(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mlock(ptr.as_ptr().cast(), len) }.map_err(io::Error::from)
}

/// Undoes [`lock`] for every page that the range touches.
///
/// # Safety
/// The range must be mapped.
pub unsafe fn unlock(ptr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::munlock(ptr.as_ptr().cast(), len) }.map_err(io::Error::from)
}

/// Makes the pages of a range present, as reading or writing a byte of each would, but without a signal if that is impossible. No byte
/// changes.
///
/// # Errors
/// `ENOMEM` if nothing is mapped, `EFAULT` or `EHWPOISON` if a page cannot be accessed in this way, `EINVAL` for memory of devices, and for
/// everything before Linux 5.14.
pub fn populate(addr: usize, len: usize, write: bool) -> io::Result<()> {
    let first = addr & !(rustix::param::page_size() - 1);
    let Some(whole) = len.checked_add(addr - first) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    if len == 0 {
        return Ok(());
    }
    let advice = if write {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    let first = std::ptr::without_provenance_mut(first);
    // SAFETY: it does what reading a byte, or writing it back, would do, wherever the range may be.
    crate::raw::retry(|| unsafe { libc::madvise(first, whole, advice) }.into()).map(drop)
}

/// The assumed size of a huge page.
const HUGE: usize = 2 << 20;

/// Asks for huge pages for the bytes that make up whole ones: later accesses get them, and the kernel joins present small pages when it has
/// time. It is only advice and changes no byte: memory of other kinds, and systems without huge pages, are not affected. It does nothing for
/// less than a huge page.
pub fn prefer_huge_pages(ptr: NonNull<u8>, len: usize) {
    let skip = ptr.as_ptr().align_offset(HUGE);
    let whole = len.saturating_sub(skip) / HUGE * HUGE;
    if whole == 0 || cfg!(miri) {
        return;
    }
    let at = ptr.as_ptr().wrapping_add(skip);
    // SAFETY: the advice changes neither what is mapped nor any byte, wherever the range may be.
    let _ = unsafe { rustix::mm::madvise(at.cast(), whole, rustix::mm::Advice::LinuxHugepage) };
}
