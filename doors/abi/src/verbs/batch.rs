//! State between two calls of the program: the completion that it reads field by field, and requests that it builds call by call.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use weft_verbs::{SendWr, UdDest, Wc};

/// A lock that one call of the program takes and another one releases.
#[derive(Default)]
pub(super) struct BatchLock(AtomicBool);

impl BatchLock {
    #[inline]
    pub(super) fn lock(&self) {
        while self.0.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    #[inline]
    pub(super) fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The state of `ibv_start_poll`.
#[derive(Default)]
pub(crate) struct Polling {
    pub(super) busy: BatchLock,
    pub(super) at: Mutex<Completion>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) wc: Wc,
    /// The time when it was taken, in nanoseconds of the monotonic clock and of the wall clock.
    pub(super) taken: u64,
    pub(super) wall: u64,
    /// The clocks that the program asked for.
    pub(super) clocks: u64,
}

/// Requests that are being built.
#[derive(Default)]
pub(crate) struct Building {
    pub(super) busy: BatchLock,
    pub(super) list: Mutex<Wrs>,
}

#[derive(Default)]
pub(super) struct Wrs {
    pub(super) requests: Vec<SendWr>,
    /// The destination of each request, if it is a datagram.
    pub(super) dests: Vec<Option<UdDest>>,
    /// The first error.
    pub(super) wrong: Option<Errno>,
}
