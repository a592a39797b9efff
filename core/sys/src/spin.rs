//! Spinning for a moment before a sleep: waking a thread costs more if the peer runs on another processor.
//!
//! A thread that spins does not yield: beside a busy thread, `sched_yield` gives a whole time slice away.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::cpu_count;
use crate::thread::{note_lost_turn, now};

/// Spin time, in nanoseconds: the cost of putting a thread to sleep and waking it.
pub const SPIN: u64 = 20_000;
/// Spinning stops after this many unsuccessful spins in a row,
const LOST: u32 = 8;
/// except for one of this many.
const AGAIN: u32 = 32;

/// How often something is looked at without a clock. None where there is one processor: the peer cannot run while this thread spins.
pub fn turns() -> u32 {
    if cpu_count() < 2 { 0 } else { 200 }
}

/// Looks until there is something, for a moment at most. Returns whether there is.
fn look(mut is_there: impl FnMut() -> bool) -> bool {
    if turns() == 0 {
        return false;
    }
    let began = now();
    let mut last = began;
    for n in 1_u32.. {
        if is_there() {
            return true;
        }
        std::hint::spin_loop();
        if !n.is_multiple_of(8) {
            continue;
        }
        let at = now();
        // Time that passed between two looks was another thread's: the processor is wanted, and the peer may be what wants it.
        note_lost_turn(last, at);
        if at - began > SPIN {
            break;
        }
        last = at;
    }
    is_there()
}

/// Learns whether spinning pays. It does not if both ends share a processor, or the peer is slow. Zeros are a valid value: it may be in memory
/// that processes share.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Spun(AtomicU32);

impl Spun {
    /// Looks until there is something, for a moment at most, if that has a chance. Returns whether there is.
    #[inline]
    pub fn wait(&self, is_there: impl FnMut() -> bool) -> bool {
        if !self.may_try() {
            return false;
        }
        let found = look(is_there);
        self.note(found);
        found
    }

    /// Whether a spin has a chance; [`Spun::note`] follows if so.
    pub fn may_try(&self) -> bool {
        let lost = self.0.load(Relaxed);
        let may = lost < LOST || lost.is_multiple_of(AGAIN);
        if !may {
            self.0.store(lost.checked_add(1).unwrap_or(LOST), Relaxed);
        }
        may
    }

    /// A spin has found something, or has not.
    pub fn note(&self, found: bool) {
        let lost = self.0.load(Relaxed).wrapping_add(1).max(1);
        self.0.store(if found { 0 } else { lost }, Relaxed);
    }
}

thread_local! {
    static MINE: Spun = const { Spun(AtomicU32::new(0)) };
}

/// The same for a thread that waits for several connections.
pub fn wait_for_any(is_there: impl FnMut() -> bool) -> bool {
    MINE.with(|mine| mine.wait(is_there))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_that_find_nothing_become_rare() {
        let spun = Spun::default();
        let tries = |times: u32, found: bool| {
            let try_once = |_: &u32| {
                let may = spun.may_try();
                if may {
                    spun.note(found);
                }
                may
            };
            (0..times).filter(try_once).count()
        };
        assert_eq!(tries(8, false), 8);
        // One in 32 from here on, until one finds something.
        assert_eq!(tries(320, false), 10);
        assert_eq!(tries(32, true), 8);
        assert_eq!(tries(100, true), 100);
    }
}
