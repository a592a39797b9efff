//! `--explain` of a process that `SIGTERM`, `SIGINT` or `SIGHUP` ends by its default action: a thread of ours writes the report, because a handler may not, and ends the process
//! then by the signal. Programs see the default action.
//!
//! # Safety
//!
//! The handler stores a number and wakes the thread.

use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use libc::{c_int, sighandler_t, sigset_t};

use crate::{handlers, kernel, ledger, lock, next};

const SIGNALS: [c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signal that ends the process; 0: none has come.
static CAME: AtomicU32 = AtomicU32::new(0);
/// The process that has the thread: a child of a fork has not.
static OWNER: AtomicU32 = AtomicU32::new(0);
extern "C" fn ends(signal: c_int) {
    if OWNER.load(SeqCst) != lock::own() {
        by_default(signal);
        return;
    }
    let came = CAME.compare_exchange(0, signal.cast_unsigned(), SeqCst, SeqCst);
    if came.is_ok() {
        kernel::wake(CAME.as_ptr(), 1);
    }
}

/// Ends the process as the signal does by default, once it is not blocked any more.
fn by_default(signal: c_int) {
    // SAFETY: all zeros are the default action, and the signal goes to this process.
    unsafe {
        let default: libc::sigaction = zeroed();
        next::sigaction(signal, &raw const default, null_mut());
        libc::kill(libc::getpid(), signal);
    }
}

fn report() {
    while CAME.load(SeqCst) == 0 {
        kernel::sleep_on(CAME.as_ptr(), 0, 60_000);
    }
    ledger::explain();
    ledger::explain_datagrams();
    by_default(CAME.load(SeqCst).cast_signed());
    // This thread blocks it: another one takes it.
    kernel::nap(999_000_000);
}

/// At the start of a process that reports at its end.
pub(crate) fn watch() {
    // SAFETY: all zeros are a set and an action; each call gets its own.
    unsafe {
        let (mut all, mut before): (sigset_t, sigset_t) = (zeroed(), zeroed());
        libc::sigfillset(&raw mut all);
        next::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        let thread = std::thread::Builder::new()
            .name("weft-explain".to_owned())
            .spawn(report);
        next::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut());
        if thread.is_err() {
            return;
        }
        OWNER.store(lock::own(), SeqCst);
        let ends = ends as *const () as sighandler_t;
        handlers::stands_for_default(ends);
        for signal in SIGNALS {
            let (mut now, mut ours): (libc::sigaction, libc::sigaction) = (zeroed(), zeroed());
            next::sigaction(signal, std::ptr::null(), &raw mut now);
            if now.sa_sigaction == libc::SIG_DFL {
                ours.sa_sigaction = ends;
                ours.sa_flags = libc::SA_RESTART;
                next::sigaction(signal, &raw const ours, null_mut());
            }
        }
    }
}
