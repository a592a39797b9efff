//! Waits for a peer that is between two steps, and the time limit of a call.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::{clock, kernel};

/// A part of the time, one in so many, that a peer may make calls wait which must not wait.
const SHARE: u64 = 16;
/// The most of it at a time, in nanoseconds: an honest peer loses its processor for tens of milliseconds.
const AT_ONCE: u64 = 100_000_000;

/// What a peer may still make such calls wait. A peer that stays between two steps, because it is stopped or hostile, uses it up. All zeros are a full one.
#[repr(transparent)]
pub(crate) struct Patience {
    /// When the waits so far, each [`SHARE`] times as long as it was, are over.
    due: AtomicU64,
}

impl Patience {
    pub(crate) const fn new() -> Patience {
        Patience {
            due: AtomicU64::new(0),
        }
    }

    /// Waits by `call` for the nanoseconds that are left, at most `limit`. `None`: nothing is left.
    fn spend<T>(&self, limit: u64, call: impl FnOnce(u64) -> T) -> Option<T> {
        let begun = clock::now();
        let due = self.due.load(Relaxed).max(begun);
        let left = (SHARE * AT_ONCE).saturating_sub(due - begun) / SHARE;
        if left == 0 {
            return None;
        }
        let result = call(left.min(limit));
        let spent = clock::now().saturating_sub(begun);
        self.due.store(due.saturating_add(SHARE * spent), Relaxed);
        Some(result)
    }

    /// Pauses for `nanoseconds`. `false`, and no pause: nothing is left.
    pub(crate) fn nap(&self, nanoseconds: i64) -> bool {
        self.spend(u64::MAX, |_| kernel::nap(nanoseconds)).is_some()
    }

    /// Pauses until it is over, for `limit` nanoseconds at most. Returns whether it is.
    pub(crate) fn wait(&self, limit: u64, mut is_over: impl FnMut() -> bool) -> bool {
        const NAP: i64 = 50_000;
        is_over()
            || self
                .spend(limit, |most| {
                    let begun = clock::now();
                    while clock::now() - begun < most {
                        kernel::nap(NAP);
                        if is_over() {
                            return true;
                        }
                    }
                    false
                })
                .unwrap_or(false)
    }

    /// Waits until a descriptor is readable, for `limit` nanoseconds at most.
    pub(crate) fn wait_readable(&self, fd: libc::c_int, limit: u64) {
        self.spend(limit, |most| {
            kernel::poll_one(fd, libc::POLLIN, (most / 1_000_000) as libc::c_int)
        });
    }
}

/// When a call with a time limit (its own, or `SO_RCVTIMEO`, `SO_SNDTIMEO`) has to be over. It counts from the call's first wait on.
#[derive(Default)]
pub(crate) struct Deadline(Option<u64>);

impl Deadline {
    /// The nanoseconds that the call may still wait; `None`: without end. `limit` is its socket's; 0: none.
    pub(crate) fn left(&mut self, limit: &AtomicU64) -> Option<u64> {
        let limit = limit.load(Relaxed);
        if limit == 0 {
            return None;
        }
        Some(self.left_of(limit))
    }

    /// The same of a limit that the call was given.
    pub(crate) fn left_of(&mut self, limit: u64) -> u64 {
        let now = clock::now();
        let at = *self.0.get_or_insert(now.saturating_add(limit));
        at.saturating_sub(now)
    }
}

/// As `poll(2)` takes a time.
pub(crate) fn millis(left: Option<u64>) -> libc::c_int {
    left.map_or(-1, |ns| {
        libc::c_int::try_from(ns.div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
    })
}
