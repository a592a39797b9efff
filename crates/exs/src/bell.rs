//! What threads sleep at that signals' handlers are to wake, too: a condition variable of the standard library sleeps on.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

/// The longest sleep at once. A sleep with an end is not restarted by the system after a handler, also under `SA_RESTART`: so all waits are
/// alike, as `poll(2)` is.
const LONGEST: Duration = Duration::from_hours(1);

#[derive(Default)]
pub(crate) struct Bell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

/// How often it had rung.
#[derive(Clone, Copy)]
pub(crate) struct Rings(u32);

impl Bell {
    /// To be asked before the last look that comes before a sleep.
    pub(crate) fn rings(&self) -> Rings {
        Rings(self.rings.load(Ordering::SeqCst))
    }

    /// Wake all who sleep.
    pub(crate) fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        // Who is not seen here sees the ring, and does not fall asleep.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // It fails for no word of ours.
            let _ = futex::wake(&self.rings, Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Sleep until it has rung once more than `rings`, or for no reason.
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
            // Rung before it slept, or the end of this sleep: the caller looks.
            _ => Ok(()),
        }
    }
}
