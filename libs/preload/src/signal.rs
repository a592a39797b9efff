//! Signal handlers that use the socket of the call that they have interrupted.
//!
//! The thread may hold a lock of that socket. A handler that waited for it would wait for ever, so such a call fails with `EAGAIN`. While the thread is in the
//! kernel it holds none, and the handler's call is carried out.

use std::cell::Cell;
use std::ptr::null;

thread_local! {
    /// The socket that this thread works on, outside of the kernel.
    static BUSY: Cell<*const ()> = const { Cell::new(null()) };
}

/// This thread works on a socket as long as this lives.
pub(crate) struct Busy(*const ());

impl Drop for Busy {
    #[inline]
    fn drop(&mut self) {
        BUSY.set(self.0);
    }
}

/// `None`, with `errno` set: it does so already, and was interrupted.
#[inline]
pub(crate) fn enter<T>(socket: &'static T) -> Option<Busy> {
    if is_inside(socket) {
        crate::set_errno(libc::EAGAIN);
        return None;
    }
    Some(again(socket))
}

/// Returns true if this thread works on the socket.
#[inline]
pub(crate) fn is_inside<T>(socket: &T) -> bool {
    BUSY.get() == std::ptr::from_ref(socket).cast()
}

/// Returns `None` if the thread was interrupted in its work on a socket. Work that the call's result does not need can wait.
#[inline]
pub(crate) fn enter_idle<T>(socket: &'static T) -> Option<Busy> {
    BUSY.get().is_null().then(|| again(socket))
}

/// This thread works on the socket, as it may do already.
#[inline]
pub(crate) fn again<T>(socket: &T) -> Busy {
    Busy(BUSY.replace(std::ptr::from_ref(socket).cast()))
}

/// A call of the kernel, which may wait.
#[inline]
pub(crate) fn outside<T>(call: impl FnOnce() -> T) -> T {
    let _inside = Busy(BUSY.replace(null()));
    call()
}

/// Returns true if a signal that the program handles ends its waits: one of its handlers was installed without `SA_RESTART`. The signal that
/// came is unknown.
pub(crate) fn interrupts() -> bool {
    (1..=64).any(|signal| {
        // SAFETY: asks for the handler of a signal; zeros are a valid answer.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let rc = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        rc == 0
            && ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
            && action.sa_flags & libc::SA_RESTART == 0
    })
}
