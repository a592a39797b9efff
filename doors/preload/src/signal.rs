//! Signal handlers, jumps out of them, and cancellation of a thread, beside the work of a call.
//!
//! A thread that works on a socket may hold locks of this library, and what they guard may be half done. A handler that runs meanwhile could call the library
//! again, or leave by `siglongjmp`. So handlers.rs puts it off until the work is done, or until the thread waits in the kernel ([`outside`]), where it holds no lock. The
//! handlers of faults cannot be put off: a call of theirs on the same socket fails with `EAGAIN`.
//!
//! A call is a cancellation point as it begins and where it waits, and nowhere between: a thread that is cancelled has sent or received nothing by that call.
//!
//! # Safety
//!
//! A socket is never freed. The records of waits are on the stack of the calls that wait.

use std::cell::Cell;
use std::ptr::{from_ref, null};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_int;

use crate::handlers::{self, Ran};
use crate::next;
use crate::work::{BUSY, LIBRARY, What, Work};

/// A wait in the kernel.
struct Wait {
    what: What,
    cancel: c_int,
    before: *const Wait,
}

/// The program's cancellation state is not held.
const NOT_HELD: c_int = -1;

thread_local! {
    /// The program's cancellation state, as long as this thread cannot be cancelled.
    static CANCEL: Cell<c_int> = const { Cell::new(NOT_HELD) };
    static WAITS: Cell<*const Wait> = const { Cell::new(null()) };
}

/// The program cancels threads.
static CANCELS: AtomicBool = AtomicBool::new(false);

fn address(what: What) -> *const () {
    what.map_or(null(), |what| from_ref(what).cast())
}

/// This thread works on a socket as long as this lives.
pub(crate) struct Busy(What);

impl Drop for Busy {
    #[inline]
    fn drop(&mut self) {
        BUSY.set(self.0);
        if self.0.is_none() {
            end();
        }
    }
}

#[inline]
fn end() {
    if CANCELS.load(Relaxed) {
        set_cancel(CANCEL.replace(NOT_HELD));
    }
    if handlers::are_put_off() {
        handlers::deliver();
    }
}

fn set_cancel(state: c_int) -> c_int {
    let mut before = NOT_HELD;
    if state != NOT_HELD {
        // SAFETY: a state, and where the one before goes.
        unsafe { next::pthread_setcancelstate(state, &raw mut before) };
    }
    before
}

/// There is no cancellation point until the work is done.
#[cold]
fn hold_cancel() {
    if BUSY.get().is_none() && CANCEL.get() == NOT_HELD {
        CANCEL.set(set_cancel(PTHREAD_CANCEL_DISABLE));
    }
}

/// A cancellation point, as a call begins.
#[inline]
fn test_cancel() {
    if CANCELS.load(Relaxed) && BUSY.get().is_none() {
        // SAFETY: nothing is held here.
        unsafe { next::pthread_testcancel() };
    }
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// `None`, with `errno` set: it does so already, and was interrupted.
#[inline]
pub(crate) fn enter<T: Work>(socket: &'static T) -> Option<Busy> {
    if is_inside(socket) {
        crate::set_errno(libc::EAGAIN);
        return None;
    }
    test_cancel();
    Some(again(socket))
}

/// The same for a call on no particular socket.
#[inline]
pub(crate) fn begin() -> Busy {
    test_cancel();
    again(&LIBRARY)
}

/// The same. `None`: this thread works already.
#[inline]
pub(crate) fn begin_once() -> Option<Busy> {
    BUSY.get().is_none().then(begin)
}

/// Returns true if this thread works on the socket.
#[inline]
pub(crate) fn is_inside<T>(socket: &T) -> bool {
    address(BUSY.get()) == from_ref(socket).cast()
}

/// Returns `None` if the thread was interrupted in its work on a socket. Work that the call's result does not need can wait.
#[inline]
pub(crate) fn enter_idle<T: Work>(socket: &'static T) -> Option<Busy> {
    BUSY.get().is_none().then(|| again(socket))
}

/// This thread works on the socket, as it may do already.
#[inline]
pub(crate) fn again<T: Work>(socket: &'static T) -> Busy {
    if CANCELS.load(Relaxed) {
        hold_cancel();
    }
    Busy(BUSY.replace(Some(socket)))
}

/// The thread has come back from the kernel, or is cancelled there.
struct Outside(Wait);

impl Drop for Outside {
    fn drop(&mut self) {
        WAITS.set(self.0.before);
        BUSY.set(self.0.what);
        if self.0.cancel != NOT_HELD {
            set_cancel(PTHREAD_CANCEL_DISABLE);
            CANCEL.set(self.0.cancel);
        }
    }
}

/// Returns true if this thread is in a call of the library, which a handler has interrupted.
pub(crate) fn is_in_call() -> bool {
    crate::work::is_busy()
        || WAITS
            .try_with(|waits| !waits.get().is_null())
            .unwrap_or(true)
}

/// A call of the kernel, which may wait, and returns -1 if it fails. Handlers that were put off run first, and may interrupt it.
#[inline]
pub(crate) fn outside<T: From<i8>>(call: impl FnOnce() -> T) -> T {
    let outside = Outside(Wait {
        what: BUSY.take(),
        cancel: CANCEL.replace(NOT_HELD),
        before: WAITS.get(),
    });
    WAITS.set(&raw const outside.0);
    set_cancel(outside.0.cancel);
    if handlers::are_put_off() && handlers::deliver() {
        crate::set_errno(libc::EINTR);
        return T::from(-1);
    }
    handlers::forget_ran();
    call()
}

/// The thread leaves a handler by a jump to `to`: the calls that the handler interrupted, which wait, do not return.
fn jumps(to: *const libc::c_void) {
    let mut wait = WAITS.get();
    let here = from_ref(&wait).addr();
    if wait.is_null() || (here..wait.addr()).contains(&to.addr()) {
        // The handler jumps within itself: what it jumps to is on its own part of the stack.
        return;
    }
    while !wait.is_null() {
        // SAFETY: the calls have not returned.
        let now = unsafe { &*wait };
        if let Some(what) = now.what {
            what.abandoned();
        }
        wait = now.before;
    }
    WAITS.set(null());
}

weft_sys::interpose! {
    "C-unwind"

    fn pthread_cancel(thread: libc::pthread_t) -> c_int {
        if !CANCELS.swap(true, Relaxed) {
            // Calls that have begun before end first, or wait.
            crate::kernel::nap(1_000_000);
        }
        next::pthread_cancel(thread)
    }

    fn longjmp(to: *mut libc::c_void, value: c_int) -> ! {
        jumps(to);
        next::longjmp(to, value);
        libc::abort()
    }

    fn _longjmp(to: *mut libc::c_void, value: c_int) -> ! {
        jumps(to);
        next::_longjmp(to, value);
        libc::abort()
    }

    fn siglongjmp(to: *mut libc::c_void, value: c_int) -> ! {
        jumps(to);
        next::siglongjmp(to, value);
        libc::abort()
    }

    fn __longjmp_chk(to: *mut libc::c_void, value: c_int) -> ! {
        jumps(to);
        next::__longjmp_chk(to, value);
        libc::abort()
    }
}

/// Returns true if the signal that has ended the last wait of this thread ends the program's call: its handler was installed without `SA_RESTART`.
pub(crate) fn interrupts() -> bool {
    match handlers::ran() {
        Ran::Restart => false,
        Ran::Interrupt => true,
        // The signal is unknown.
        Ran::None => (1..=64).any(handlers::interrupts),
    }
}
