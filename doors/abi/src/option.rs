//! Conversion of socket option values from and to the program.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use libc::{socklen_t, timeval};
use rustix::io::Errno;

/// # Errors
/// `EFAULT` for null, `EINVAL` for too few bytes.
///
/// # Safety
/// `len` bytes at `value` are readable, and any bytes make a `T`.
pub(crate) unsafe fn taken<T: Copy>(value: *const c_void, len: socklen_t) -> Result<T, Errno> {
    if value.is_null() {
        return Err(Errno::FAULT);
    }
    if (len as usize) < size_of::<T>() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

/// Writes an option's value for the program, truncated to the given room as the kernel does.
///
/// # Errors
/// `EFAULT` for null.
///
/// # Safety
/// `value` and `len` are as for `getsockopt`.
pub(crate) unsafe fn give<T: Copy>(
    new: &[T],
    value: *mut c_void,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    if value.is_null() || len.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let count = (*len as usize).min(size_of_val(new));
        std::ptr::copy_nonoverlapping(new.as_ptr().cast::<u8>(), value.cast(), count);
        *len = count as socklen_t;
    }
    Ok(0)
}

/// A time limit; zero means none.
pub(crate) fn time(limit: Option<Duration>) -> timeval {
    let limit = limit.unwrap_or_default();
    timeval {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_usec: limit.subsec_micros().into(),
    }
}
