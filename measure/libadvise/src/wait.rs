//! The calls that wait for descriptors.
//!
//! # Safety
//!
//! Each function as its manual page says.

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use weft_advise::record::Count;

use crate::{errno, next, set_errno, slot};

/// Runs a call that waits; `zero` when it has a time limit of zero.
fn waits(zero: bool, call: impl FnOnce() -> c_int) -> c_int {
    // A process without socket calls waits for something else.
    let Some(process) = slot::known() else {
        return call();
    };
    let start = slot::now();
    let result = call();
    let after = errno();
    let end = slot::now();
    process.add(Count::Waits, 1);
    process.add(Count::WaitNs, end.saturating_sub(start));
    process.set(Count::Last, end);
    if zero {
        process.add(Count::WaitsZero, 1);
    }
    if result == 0 {
        process.add(Count::WaitsEmpty, 1);
    }
    process.add(Count::Ready, u64::try_from(result).unwrap_or(0));
    set_errno(after);
    result
}

/// # Safety
/// A time, or null.
unsafe fn is_zero(time: *const timespec) -> bool {
    // SAFETY: the caller's promise.
    unsafe { time.as_ref() }.is_some_and(|time| (time.tv_sec, time.tv_nsec) == (0, 0))
}

macro_rules! waiting {
    ($($name:ident($($arg:ident: $type:ty),*), $zero:expr;)*) => { weft_sys::interpose! {"C-unwind" $(
        fn $name($($arg: $type),*) -> c_int {
            let zero = $zero;
            waits(zero, || next::$name($($arg),*))
        }
    )*}};
}

waiting! {
    poll(fds: *mut pollfd, n: nfds_t, timeout: c_int), timeout == 0;
    __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, room: size_t), timeout == 0;
    // SAFETY: the program's time.
    ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t), unsafe { is_zero(timeout) };
    // SAFETY: the program's time.
    __ppoll_chk(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t), unsafe { is_zero(timeout) };
    // SAFETY: the program's time.
    select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval), unsafe { timeout.as_ref() }.is_some_and(|t| (t.tv_sec, t.tv_usec) == (0, 0));
    // SAFETY: the program's time.
    pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *const timespec, mask: *const sigset_t), unsafe { is_zero(timeout) };
    epoll_wait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int), timeout == 0;
    epoll_pwait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int, mask: *const sigset_t), timeout == 0;
    // SAFETY: the program's time.
    epoll_pwait2(set: c_int, events: *mut epoll_event, n: c_int, timeout: *const timespec, mask: *const sigset_t), unsafe { is_zero(timeout) };
}
