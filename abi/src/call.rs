//! The border of every exported call: no panic leaves, errors become `-1` and `errno`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

/// Types that an exported call returns, with C's value for "failed".
pub trait Failed {
    /// The value for "failed; see `errno`".
    const FAILED: Self;
}

impl Failed for libc::c_int {
    const FAILED: Self = -1;
}

impl Failed for libc::ssize_t {
    const FAILED: Self = -1;
}

/// Runs the body of an exported call. A panic is a mistake of the library: the call fails with `EIO`.
pub fn run<T: Failed>(body: impl FnOnce() -> Result<T, Errno>) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => failed(errno),
        Err(_) => failed(Errno::IO),
    }
}

fn failed<T: Failed>(errno: Errno) -> T {
    set_errno(errno);
    T::FAILED
}

/// Runs the body of a call that returns an `errno` value: 0 for success.
pub fn status(body: impl FnOnce() -> Result<(), Errno>) -> libc::c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(errno)) => errno.raw_os_error(),
        Err(_) => libc::EIO,
    }
}

/// Runs the body of a call that returns an address: NULL and `errno` when it fails.
pub fn pointer<T>(body: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(made)) => made,
        Ok(Err(errno)) => null(errno),
        Err(_) => null(Errno::IO),
    }
}

fn null<T>(errno: Errno) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: the address is this thread's own errno, and always valid.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
}

/// A length as the calls return it. No object is longer than `isize::MAX`.
pub(crate) fn signed(len: usize) -> libc::ssize_t {
    libc::ssize_t::try_from(len).unwrap_or(libc::ssize_t::MAX)
}

/// A system call with the program's own arguments, for descriptors that are not ours.
///
/// # Safety
/// As for the system call.
pub(crate) unsafe fn system(number: libc::c_long, args: [usize; 6]) -> Result<isize, Errno> {
    // SAFETY: the caller's promise.
    let result =
        unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if result == -1 {
        // SAFETY: this thread's own errno.
        return Err(Errno::from_raw_os_error(unsafe {
            *libc::__errno_location()
        }));
    }
    Ok(result as isize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }

    #[test]
    fn values_and_errors_pass_and_panics_stop() {
        assert_eq!(run(|| Ok(7)), 7);
        assert_eq!(run::<libc::ssize_t>(|| Err(Errno::PIPE)), -1);
        assert_eq!(errno(), libc::EPIPE);
        assert_eq!(run::<libc::c_int>(|| panic!("on purpose")), -1);
        assert_eq!(errno(), libc::EIO);
        assert_eq!(status(|| Ok(())), 0);
        assert_eq!(status(|| Err(Errno::BUSY)), libc::EBUSY);
        assert_eq!(status(|| panic!("on purpose")), libc::EIO);
        let mut value = 1_u8;
        assert!(!pointer(|| Ok(&raw mut value)).is_null());
        assert!(pointer::<u8>(|| Err(Errno::NOMEM)).is_null());
        assert_eq!(errno(), libc::ENOMEM);
    }

    #[test]
    fn system_calls_report_their_errno() {
        // SAFETY: no pointers.
        let closed = unsafe { system(libc::SYS_close, [usize::MAX, 0, 0, 0, 0, 0]) };
        assert_eq!(closed, Err(Errno::BADF));
    }
}
