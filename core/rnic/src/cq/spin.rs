//! Spinning before a sleep, as long as it succeeds often enough.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a blocking wait spins first, if spinning has succeeded lately.
const SPIN: Duration = Duration::from_micros(20);

/// Whether spinning before a sleep has succeeded lately. A few failures in a row turn it off, for longer each time.
pub(super) struct SpinBudget {
    losses: AtomicU32,
    /// In a row.
    wins: AtomicU32,
    /// Sleeps until the next try.
    pause: AtomicU32,
    next_pause: AtomicU32,
}

impl SpinBudget {
    const PATIENCE: u32 = 4;
    const STEADY: u32 = 32;
    const FIRST_PAUSE: u32 = 64;
    /// A spin that finds nothing costs 20 µs: little compared with this many sleeps. If both sides sleep because the other one does, the spin
    /// ends that.
    const LONG_PAUSE: u32 = 256;
    /// A spin during which another thread had the core costs milliseconds.
    const LONGEST_PAUSE: u32 = 8192;

    pub(super) fn new() -> Self {
        SpinBudget {
            losses: AtomicU32::new(0),
            wins: AtomicU32::new(0),
            pause: AtomicU32::new(0),
            next_pause: AtomicU32::new(Self::FIRST_PAUSE),
        }
    }
    /// Look for a while, where that has paid off lately; says whether anything was there.
    pub(super) fn try_for(&self, mut look: impl FnMut() -> bool) -> bool {
        if !self.worth_it() {
            return false;
        }
        let start = Instant::now();
        loop {
            // A peer on this core answers while we yield; on another core it answers while we spin.
            weft_sys::thread::sched_yield();
            let found = look();
            let spent = start.elapsed();
            let crowded = spent > 5 * SPIN;
            if crowded {
                // Another thread had the core in between: sleeping would have been faster, and will be for a while.
                self.losses.store(Self::PATIENCE, Ordering::Relaxed);
            }
            if found && !crowded {
                self.won();
            } else if crowded {
                self.lost(Self::LONGEST_PAUSE);
            } else if spent > SPIN {
                self.lost(Self::LONG_PAUSE);
            }
            if found || spent > SPIN {
                return found;
            }
        }
    }

    fn worth_it(&self) -> bool {
        let pause = self.pause.load(Ordering::Relaxed);
        if pause > 0 {
            self.pause.store(pause - 1, Ordering::Relaxed);
        }
        pause == 0
    }
    fn won(&self) {
        self.losses.store(0, Ordering::Relaxed);
        let wins = self.wins.load(Ordering::Relaxed).saturating_add(1);
        self.wins.store(wins, Ordering::Relaxed);
        // A single success is not significant if other threads want the core.
        if wins >= Self::STEADY {
            self.next_pause.store(Self::FIRST_PAUSE, Ordering::Relaxed);
        }
    }
    fn lost(&self, longest: u32) {
        self.wins.store(0, Ordering::Relaxed);
        let losses = self.losses.load(Ordering::Relaxed) + 1;
        self.losses.store(losses, Ordering::Relaxed);
        if losses >= Self::PATIENCE {
            let pause = self.next_pause.load(Ordering::Relaxed).min(longest);
            self.pause.store(pause, Ordering::Relaxed);
            self.next_pause
                .store((pause * 2).min(longest), Ordering::Relaxed);
            // One try is enough to find out whether anything has changed.
            self.losses.store(Self::PATIENCE - 1, Ordering::Relaxed);
        }
    }
}
