//! Reading parameters and writing results at a program's addresses.

use std::ffi::c_int;

use rustix::io::Errno;

/// Reads the program's value.
///
/// # Errors
/// `EINVAL` for NULL.
///
/// # Safety
/// NULL, or such a value.
pub(crate) unsafe fn read_param<T: Copy>(place: *const T) -> Result<T, Errno> {
    if place.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { place.read_unaligned() })
}

/// Writes a value for the program.
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

/// A list that the program frees, terminated by NULL. Its length is stored in `count` unless that is NULL.
///
/// # Errors
/// `ENOMEM`.
///
/// # Safety
/// NULL, or there is room for the count.
pub(crate) unsafe fn list<T>(all: &[*mut T], count: *mut c_int) -> Result<*mut *mut T, Errno> {
    // SAFETY: the call takes no pointers.
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
