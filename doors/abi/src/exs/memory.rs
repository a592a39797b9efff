//! Memory of programs: registered regions, and the buffers of operations.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, PoisonError};

use rustix::io::Errno;
use weft_exs::{Memory, RawMemory, Region};

use super::region::{InUse, Mem, Registered, Uses};
use super::state::state;
use super::types::{EXS_MHANDLE_UNREGISTERED, EXS_MRF_SHARED, IoVec, MHandle};

/// # Safety
/// As for `exs_mregister`: the memory stays mapped until it is deregistered.
unsafe fn registered(addr: *mut c_void, len: usize, flags: c_int) -> Result<Registered, Errno> {
    if i64::from(flags) & !EXS_MRF_SHARED != 0 || len == 0 {
        return Err(Errno::INVAL);
    }
    if addr.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let raw = unsafe { RawMemory::new(addr.cast(), len) }.ok_or(Errno::FAULT)?;
    crate::pages::mapped(addr as usize, len)?;
    let region = Region::register(&state().context()?, &raw)?;
    Ok(Registered {
        addr: addr as usize,
        region: Some(region),
    })
}

/// `exs_mregister`
pub unsafe fn mregister(addr: *mut c_void, len: usize, flags: c_int) -> Result<MHandle, Errno> {
    // SAFETY: the caller's promise.
    let current = unsafe { registered(addr, len, flags) }?;
    state().regions.insert(Arc::new(Mem::new(current)))
}

/// `exs_mderegister`
pub fn mderegister(mh: MHandle) -> Result<c_int, Errno> {
    let mem = state().regions.get(mh)?;
    mem.idle()?;
    let mut current = mem.current.write().unwrap_or_else(PoisonError::into_inner);
    mem.idle()?; // an operation may have begun meanwhile
    let region = current.region.take().ok_or(Errno::BADF)?;
    if let Err(region) = region.deregister() {
        current.region = Some(region);
        return Err(Errno::BUSY);
    }
    drop(current);
    state().regions.remove(mh, |_| Ok(()))?;
    Ok(0)
}

/// `exs_mmodify`
pub unsafe fn mmodify(
    mh: MHandle,
    addr: *mut c_void,
    len: usize,
    flags: c_int,
) -> Result<c_int, Errno> {
    let mem = state().regions.get(mh)?;
    mem.idle()?;
    // SAFETY: the caller's promise.
    let new = unsafe { registered(addr, len, flags) }?;
    let mut current = mem.current.write().unwrap_or_else(PoisonError::into_inner);
    mem.idle()?; // one may have begun meanwhile
    *current = new;
    Ok(0)
}

/// The memory of an operation: `len` bytes at `buf`, in the region of `mh` unless `mh` means unregistered.
///
/// # Errors
/// `EFAULT` for a null buffer with a length, or one outside its region; `EBADF` for an invalid handle.
///
/// # Safety
/// The memory stays usable until the operation's event has been dequeued.
pub(super) unsafe fn memory(
    buf: *mut c_void,
    len: usize,
    mh: MHandle,
    uses: &mut Uses,
) -> Result<Memory, Errno> {
    // SAFETY: the caller's promise.
    let raw = unsafe { RawMemory::new(buf.cast(), len) }.ok_or(Errno::FAULT)?;
    if i64::from(mh) == EXS_MHANDLE_UNREGISTERED {
        return Ok(Memory::Raw(raw));
    }
    let mem = state().regions.get(mh)?;
    let current = mem.current.read().unwrap_or_else(PoisonError::into_inner);
    let off = (buf as usize)
        .checked_sub(current.addr)
        .ok_or(Errno::FAULT)?;
    let region = current.region.as_ref().ok_or(Errno::BADF)?;
    let memory = region.slice(off, len)?;
    uses.push(InUse::new(Arc::clone(&mem)));
    Ok(memory)
}

/// Checks the number of vector elements at `at`.
///
/// # Errors
/// `EINVAL` outside 0 to `IOV_MAX`, `EFAULT` for a null pointer with elements.
pub(super) fn elements<T>(at: *const T, count: c_int) -> Result<usize, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    match count {
        0 => Ok(0),
        1..=1024 if at.is_null() => Err(Errno::FAULT),
        1..=1024 => Ok(count),
        _ => Err(Errno::INVAL),
    }
}

/// The memory of a vector.
///
/// # Errors
/// Those of [`memory`], and `EINVAL` for lengths whose sum does not fit a `ssize_t`.
///
/// # Safety
/// `iov` has `count` elements, and each is as in [`memory`].
pub(super) unsafe fn vector(
    iov: *const IoVec,
    count: c_int,
    uses: &mut Uses,
) -> Result<Memory, Errno> {
    let count = elements(iov, count)?;
    // SAFETY: one of the elements.
    let pieces = (0..count).map(|i| unsafe { iov.add(i).read() });
    // SAFETY: the caller's promise.
    unsafe { gathered(pieces, uses) }
}

/// Like [`vector`], for the kernel's vectors.
///
/// # Errors
/// # Safety
/// As in [`vector`].
pub(super) unsafe fn plain_vector(iov: *const libc::iovec, count: usize) -> Result<Memory, Errno> {
    let count = elements(iov, c_int::try_from(count).map_err(|_| Errno::INVAL)?)?;
    let pieces = (0..count).map(|i| {
        // SAFETY: one of the elements.
        let piece = unsafe { iov.add(i).read() };
        IoVec {
            iov_base: piece.iov_base,
            iov_len: piece.iov_len,
            iov_mhandle: EXS_MHANDLE_UNREGISTERED as MHandle,
        }
    });
    // SAFETY: the caller's promise.
    unsafe { gathered(pieces, &mut Uses::new()) }
}

/// # Safety
/// Each piece is as in [`memory`].
unsafe fn gathered(
    pieces: impl ExactSizeIterator<Item = IoVec>,
    uses: &mut Uses,
) -> Result<Memory, Errno> {
    let mut list = Vec::with_capacity(pieces.len());
    let mut total = 0_isize;
    for piece in pieces {
        total = isize::try_from(piece.iov_len)
            .ok()
            .and_then(|len| total.checked_add(len))
            .ok_or(Errno::INVAL)?;
        // SAFETY: the caller's promise.
        list.push(unsafe { memory(piece.iov_base, piece.iov_len, piece.iov_mhandle, uses) }?);
    }
    Ok(Memory::List(list))
}
