//! A wait object for threads that signal handlers must wake, too. A condition variable of the standard library sleeps on after a signal.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

/// The end of a time limit that starts now. `None`: no limit, or one beyond the range of the clock.
pub(crate) fn deadline(limit: Option<Duration>) -> Option<Instant> {
    limit.and_then(|limit| Instant::now().checked_add(limit))
}

/// The longest single sleep. The kernel does not restart a sleep with a time limit after a signal handler, even under `SA_RESTART`. With this limit
/// all waits behave alike, as `poll(2)` does.
const LONGEST: Duration = Duration::from_hours(1);

#[derive(Default)]
pub(crate) struct Bell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

/// The number of rings at some moment.
#[derive(Clone, Copy)]
pub(crate) struct Rings(pub(crate) u32);

impl Bell {
    /// The current count. Read it before the last check that precedes a sleep.
    pub(crate) fn rings(&self) -> Rings {
        Rings(self.rings.load(Ordering::SeqCst))
    }

    /// Wake all sleeping threads.
    pub(crate) fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        // A thread that is not counted here sees the new ring count and does not fall asleep.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // Our arguments cannot make it fail.
            let _ = futex::wake(&self.rings, Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Sleep until the ring count exceeds `rings`. It may also return early.
    ///
    /// # Errors
    /// `EAGAIN` when the time is up, `EINTR` when a signal's handler ran.
    pub(crate) fn sleep(&self, rings: Rings, deadline: Option<Instant>) -> Result<(), Errno> {
        let left = match deadline {
            None => LONGEST,
            Some(end) => end
                .checked_duration_since(Instant::now())
                .ok_or(Errno::AGAIN)?
                .min(LONGEST),
        };
        let limit = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let woken = futex::wait(&self.rings, Flags::PRIVATE, rings.0, Some(&limit));
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        match woken {
            Err(Errno::INTR) => Err(Errno::INTR),
            // The bell rang before the sleep, or this sleep ended: the caller checks.
            _ => Ok(()),
        }
    }
}
