//! The boundary of every exported call: no panic crosses it, and errors become `-1` and `errno`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

/// Return types of exported calls, with the C value for failure.
pub trait Failed {
    /// The value that means "failed; see `errno`".
    const FAILED: Self;
}

impl Failed for libc::c_int {
    const FAILED: Self = -1;
}

impl Failed for i64 {
    const FAILED: Self = -1;
}

impl Failed for libc::ssize_t {
    const FAILED: Self = -1;
}

// SAFETY: as glibc's and musl's headers have it.
unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// Disables cancellation of the thread (`pthread_cancel(3)`) while it exists. Cancellation would unwind through our frames, which ends the process,
/// and many libc calls are cancellation points.
struct Uncancelled(libc::c_int);

impl Uncancelled {
    fn new() -> Self {
        const DISABLE: libc::c_int = 1;
        let mut before = 0;
        // SAFETY: a place for the state of before.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Uncancelled(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut disabled = 0;
        // SAFETY: as above.
        unsafe { pthread_setcancelstate(self.0, &raw mut disabled) };
    }
}

fn caught<T>(body: impl FnOnce() -> T) -> std::thread::Result<T> {
    let _uncancelled = Uncancelled::new();
    catch_unwind(AssertUnwindSafe(body))
}

/// Runs the body of an exported call. A panic is a bug of the library: the call fails with `EIO`.
pub fn run<T: Failed>(body: impl FnOnce() -> Result<T, Errno>) -> T {
    match caught(body) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => failed(errno),
        Err(_) => failed(Errno::IO),
    }
}

fn failed<T: Failed>(errno: Errno) -> T {
    set_errno(errno);
    T::FAILED
}

/// Runs the body of a call that returns an `errno` value, 0 for success. `errno` is set as well, because programs print it.
pub fn status(body: impl FnOnce() -> Result<(), Errno>) -> libc::c_int {
    told(&caught(body))
}

#[inline]
fn told(result: &std::thread::Result<Result<(), Errno>>) -> libc::c_int {
    match result {
        Ok(Ok(())) => 0,
        Ok(Err(errno)) => refused(*errno),
        Err(_) => refused(Errno::IO),
    }
}

#[cold]
fn refused(errno: Errno) -> libc::c_int {
    set_errno(errno);
    errno.raw_os_error()
}

/// Like [`status`], for a call that none of our devices supports.
#[cfg(feature = "verbs")]
pub(crate) fn unsupported() -> libc::c_int {
    refused(Errno::OPNOTSUPP)
}

/// Like [`status`], for the calls of the fast path, which contain no cancellation point.
#[inline]
pub fn quick_status(body: impl FnOnce() -> Result<(), Errno>) -> libc::c_int {
    told(&catch_unwind(AssertUnwindSafe(body)))
}

/// A call that waits on a counting descriptor with `read(2)`, and then fetches an event: `false` when another thread has taken it. The thread
/// can be cancelled during the wait, because programs end their event threads so. No frame below this one has anything to drop then.
///
/// # Safety
/// `count_of` returns a descriptor of which eight bytes can be read.
#[cfg(feature = "verbs")]
pub(crate) unsafe fn wait_and_fetch(
    count_of: impl Fn() -> Result<libc::c_int, Errno>,
    fetch: impl Fn() -> Result<bool, Errno>,
) -> libc::c_int {
    // SAFETY: libc's, from which cancelling unwinds.
    unsafe extern "C-unwind" {
        fn read(fd: libc::c_int, buf: *mut libc::c_void, count: usize) -> isize;
    }
    loop {
        let mut fd = -1;
        let begun = run(|| {
            fd = count_of()?;
            Ok(0)
        });
        let mut count = [0_u8; 8];
        // SAFETY: room for a count.
        if begun != 0 || unsafe { read(fd, (&raw mut count).cast(), count.len()) } < 0 {
            return -1;
        }
        match run(|| Ok(libc::c_int::from(fetch()?))) {
            1 => return 0,
            0 => {}
            failed => return failed,
        }
    }
}

/// Runs the body of a call that returns an address; NULL and `errno` on failure.
pub fn pointer<T>(body: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    match caught(body) {
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

/// A length in the type that the calls return. No object is longer than `isize::MAX`.
#[cfg(any(feature = "exs", feature = "verbs"))]
pub(crate) fn signed(len: usize) -> libc::ssize_t {
    libc::ssize_t::try_from(len).unwrap_or(libc::ssize_t::MAX)
}

/// A system call with the program's arguments, for descriptors that are not ours.
///
/// # Safety
/// As for the system call.
#[cfg(any(feature = "exs", feature = "verbs"))]
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
        assert_eq!(errno(), libc::EBUSY);
        assert_eq!(status(|| panic!("on purpose")), libc::EIO);
        assert_eq!(errno(), libc::EIO);
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
