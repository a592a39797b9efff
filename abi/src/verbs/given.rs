//! What programs hand over by its address, and get there.

use std::ffi::c_int;

use rustix::io::Errno;

/// What the program has put there.
///
/// # Errors
/// `EINVAL` for NULL.
///
/// # Safety
/// NULL, or such a value.
pub(crate) unsafe fn given<T: Copy>(place: *const T) -> Result<T, Errno> {
    if place.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { place.read_unaligned() })
}

/// Gives the program a value.
///
/// # Errors
/// `EINVAL` for NULL.
///
/// # Safety
/// NULL, or there is room for it.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Errno> {
    if place.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// A list for the program, which it frees: with a NULL behind it, and the count where that is asked for.
///
/// # Errors
/// `ENOMEM`.
///
/// # Safety
/// NULL, or there is room for the count.
pub(crate) unsafe fn list<T>(all: &[*mut T], count: *mut c_int) -> Result<*mut *mut T, Errno> {
    // SAFETY: no pointers.
    let list = unsafe { libc::calloc(all.len() + 1, size_of::<*mut T>()) };
    let list = list.cast::<*mut T>();
    if list.is_null() {
        return Err(Errno::NOMEM);
    }
    // SAFETY: there is room for all, and a NULL behind them.
    unsafe { all.as_ptr().copy_to_nonoverlapping(list, all.len()) };
    if !count.is_null() {
        // SAFETY: the caller's promise.
        unsafe { count.write(all.len() as c_int) };
    }
    Ok(list)
}
