//! How a thread that polls in a loop leaves the processor to others.
//!
//! If processors are scarce, the peer that such a thread waits for may need this very one. So after the first empty polls a poll yields now and
//! then: without another thread that wants the processor, this costs a quarter of a microsecond in sixteen polls. While a yield would lose
//! milliseconds to a busy thread ([`turns_are_lost`]), a thread that has polled for as long as a wake-up costs sleeps for a moment instead: the
//! peer's doorbell ends the sleep, and the kernel prefers a thread that wakes.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use weft_sys::spin::{SPIN, Spun};
use weft_sys::thread::{now, offer_turn, turns_are_lost};

/// Empty polls between two yields of the core.
const YIELD_EVERY: u32 = 16;
/// Empty polls before the first yield: the least if the peer wants this core, the most if the peer has one of its own (some microseconds).
const LEAST_PATIENCE: u32 = 32;
const MOST_PATIENCE: u32 = 512;

/// In place of the time at which a thread has begun to spin: it sleeps after each poll, until one finds something.
const DOZES: u64 = u64::MAX;
/// The same over sockets, where a look is a system call: it sleeps before each poll, as long as turns are lost.
const DOZES_ON: u64 = u64::MAX - 1;

/// The polls of a queue that found nothing, since one found something. Several threads that poll it race for the counts, which only makes them
/// slightly wrong.
pub(super) struct EmptyPolls {
    count: AtomicU32,
    /// So many of them before the first yield: see [`EmptyPolls::end`].
    patience: AtomicU32,
    /// Beside busy threads: when they began, 0 before that is asked for, [`DOZES`] or [`DOZES_ON`]; and whether spinning has succeeded lately.
    since: AtomicU64,
    spun: Spun,
}

impl EmptyPolls {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicU32::new(0),
            patience: AtomicU32::new(LEAST_PATIENCE),
            since: AtomicU64::new(0),
            spun: Spun::default(),
        }
    }

    /// Whether the next poll sleeps before it looks at the sockets.
    pub(super) fn dozes(&self) -> bool {
        self.since.load(Relaxed) == DOZES_ON && turns_are_lost()
    }

    pub(super) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// One more. Returns whether it is time to ask [`EmptyPolls::is_tired`].
    pub(super) fn add(&self) -> bool {
        let count = self.count().wrapping_add(1);
        self.count.store(count, Relaxed);
        (count >= LEAST_PATIENCE && count.is_multiple_of(YIELD_EVERY)) || turns_are_lost()
    }

    /// Whether the caller should sleep for a moment. Yields where that loses nothing. `in_memory`: a peer that runs at the same time answers much
    /// sooner than a wake-up takes, so a spin is worth its time even beside busy threads.
    pub(super) fn is_tired(&self, in_memory: bool) -> bool {
        if !turns_are_lost() {
            return self.count() >= self.patience.load(Relaxed) && !offer_turn();
        }
        let (since, at) = (self.since.load(Relaxed), now());
        let spins = match since {
            DOZES | DOZES_ON => return true,
            0 => in_memory && self.spun.may_try(),
            since if at.saturating_sub(since) < SPIN => true,
            _ => {
                self.spun.note(false);
                false
            }
        };
        match (spins, since) {
            (false, _) => self
                .since
                .store(if in_memory { DOZES } else { DOZES_ON }, Relaxed),
            (true, 0) => self.since.store(at, Relaxed),
            (true, _) => {}
        }
        !spins
    }

    /// A poll found something. A completion that is there directly after a yield was made on this core: yield early. Other completions
    /// are made on another core, and a yield would only delay them.
    pub(super) fn end(&self) {
        let polls = self.count();
        if polls == 0 {
            return;
        }
        self.count.store(0, Relaxed);
        match self.since.load(Relaxed) {
            0 => {}
            DOZES_ON if turns_are_lost() => return,
            since => {
                self.since.store(0, Relaxed);
                if since != DOZES && since != DOZES_ON {
                    self.spun.note(true);
                }
                return;
            }
        }
        let patience = self.patience.load(Relaxed);
        let yielded = polls >= patience;
        let next = if yielded && polls.is_multiple_of(YIELD_EVERY) {
            (patience / 2).max(LEAST_PATIENCE)
        } else {
            (patience + YIELD_EVERY).min(MOST_PATIENCE)
        };
        if next != patience {
            self.patience.store(next, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use weft_sys::thread::note_lost_turn;

    use super::*;

    /// A busy thread has had the processor for half a millisecond: turns are lost for 64 times as long.
    fn lose_a_turn() {
        note_lost_turn(now() - 500_000, now());
    }

    #[test]
    fn polls_of_sockets_sleep_before_they_look_while_turns_are_lost() {
        let polls = EmptyPolls::new();
        lose_a_turn();
        assert!(!polls.dozes() && polls.add() && polls.is_tired(false));
        assert!(polls.dozes());
        // A poll that finds something does not end that; the end of the busy thread does.
        polls.end();
        lose_a_turn();
        assert!(polls.dozes());
        while turns_are_lost() {
            std::hint::spin_loop();
        }
        assert!(!polls.dozes());
    }

    #[test]
    fn polls_of_memory_spin_before_they_sleep() {
        let polls = EmptyPolls::new();
        lose_a_turn();
        let began = now();
        assert!(polls.add() && !polls.is_tired(true));
        while !polls.is_tired(true) {
            lose_a_turn();
        }
        assert!(now() - began >= SPIN);
        assert!(!polls.dozes());
    }
}
