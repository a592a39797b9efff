//! What is between two calls of the program: the completion that it looks at field by field, and requests that it builds call by call.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use weft_verbs::{SendWr, UdDest, Wc};

/// A lock that is taken in one call of the program and released in another one.
#[derive(Default)]
pub(super) struct Across(AtomicBool);

impl Across {
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

/// Where `ibv_start_poll` is.
#[derive(Default)]
pub(crate) struct Polling {
    pub(super) busy: Across,
    pub(super) at: Mutex<Completion>,
}

/// The completion that is looked at.
#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) wc: Wc,
    /// When it was taken, in nanoseconds of the monotonic clock and of the wall's.
    pub(super) taken: u64,
    pub(super) wall: u64,
    /// Which of both somebody wants.
    pub(super) clocks: u64,
}

/// Requests that are being built.
#[derive(Default)]
pub(crate) struct Building {
    pub(super) busy: Across,
    pub(super) list: Mutex<Wrs>,
}

#[derive(Default)]
pub(super) struct Wrs {
    pub(super) requests: Vec<SendWr>,
    /// Where each of them goes, if it is a datagram.
    pub(super) dests: Vec<Option<UdDest>>,
    /// What was wrong first.
    pub(super) wrong: Option<Errno>,
}
