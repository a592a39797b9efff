//! The program sees its own handler of `SIGSEGV`, never ours, and cannot block the signal. Only under `--mode azsdp`.
//!
//! # Safety
//!
//! Each call is as safe as its manual page says.

use libc::{c_int, sighandler_t, sigset_t};
use std::mem::zeroed;

use weft_sys::protect;

use super::memory::is_active;
use crate::{handlers, next};

unsafe extern "C" fn change(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { next::sigaction(signal, new, old) }
}

pub(super) fn start() {
    protect::use_sigaction(change);
}

/// A copy of the set without the signal of a fault: a fault that is blocked ends the process.
unsafe fn open(set: *const sigset_t) -> sigset_t {
    // SAFETY: the caller's set.
    unsafe {
        let mut set = *set;
        libc::sigdelset(&raw mut set, libc::SIGSEGV);
        set
    }
}

unsafe fn mask(
    how: c_int,
    set: *const sigset_t,
    old: *mut sigset_t,
    call: unsafe fn(c_int, *const sigset_t, *mut sigset_t) -> c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        if set.is_null() || how == libc::SIG_UNBLOCK || !is_active() {
            return call(how, set, old);
        }
        let set = open(set);
        call(how, &raw const set, old)
    }
}

weft_sys::interpose! {
    "C-unwind"

    fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        if !is_active() || signal == libc::SIGSEGV {
            return handlers::change(signal, new, old);
        }
        let Some(given) = new.as_ref() else { return handlers::change(signal, new, old) };
        let mut changed = *given;
        changed.sa_mask = open(&raw const given.sa_mask);
        handlers::change(signal, &raw const changed, old)
    }

    fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        if !is_active() || number != libc::SIGSEGV {
            return handlers::change_by_signal(number, handler);
        }
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = (zeroed(), zeroed());
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESTART;
        if sigaction(number, &raw const new, &raw mut old) != 0 { return libc::SIG_ERR; }
        old.sa_sigaction
    }

    fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t { signal(number, handler) }

    // The handlers of these are the kernel's: only what they tell of the one before is ours.
    fn sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t { handlers::told(number, next::sysv_signal(number, handler)) }

    fn __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t { handlers::told(number, next::__sysv_signal(number, handler)) }

    fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t { handlers::told(number, next::sigset(number, handler)) }

    fn siginterrupt(number: c_int, interrupts: c_int) -> c_int {
        let rc = next::siginterrupt(number, interrupts);
        if rc == 0 { handlers::restarts(number, interrupts == 0); }
        rc
    }

    fn pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
        mask(how, set, old, next::pthread_sigmask)
    }

    fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
        mask(how, set, old, next::sigprocmask)
    }
}
