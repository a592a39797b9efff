//! The word of a lock: how many holds have begun and ended. Odd: it is held.

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering, in_order};

/// Looks at a held lock before the thread gives up its turn of the processor.
const SPINS: u32 = 128;
/// Turns given up before it sleeps.
const YIELDS: u32 = 32;
/// Pauses before [`Word::try_begin_soon`] tries again, first and maximum: one to five microseconds. Meanwhile the word, and the data that the
/// lock guards, stay in the cache of the other processor, which makes many short holds in that time. If each hold moved them from one processor
/// to the other, it would take several times as long (papers/results/floor.md).
const FIRST_BACKOFF: u32 = 32;
const MOST_BACKOFF: u32 = 128;
/// The number of attempts.
const LOOKS: u32 = 8;
/// The number of yields for a hold that lasts from one attempt to the next: its thread may have lost the processor.
const TURNS: u32 = 16;
/// A sleep: the holder is in a long system call, or has lost the processor to another program.
const NAP: Duration = Duration::from_micros(50);

/// A lock by itself: how many holds have begun and ended; odd: it is held.
#[derive(Debug)]
pub struct Word(AtomicU64);

impl Default for Word {
    fn default() -> Self {
        Word(AtomicU64::new(0))
    }
}

impl Word {
    /// Begins a hold, unless one is in progress. The actions of the previous holder are visible to this one. Of two threads that each write
    /// something (`SeqCst`) and then read what the other one wrote, one by this call and one by [`Word::held`], at least one sees the other's
    /// write.
    #[inline]
    pub fn try_begin(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        let begun = seen.is_multiple_of(2)
            && self
                .0
                .compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok();
        in_order();
        begun
    }

    /// As [`Word::try_begin`]; waits some microseconds while holds are short, and yields a few times for a long hold. False: another thread
    /// still holds it.
    #[inline]
    pub fn try_begin_soon(&self) -> bool {
        self.try_begin() || self.try_begin_again()
    }

    #[cold]
    fn try_begin_again(&self) -> bool {
        let mut before = self.0.load(Ordering::Relaxed);
        let mut pauses = FIRST_BACKOFF;
        for _ in 0..LOOKS {
            back_off(pauses);
            pauses = (2 * pauses).min(MOST_BACKOFF);
            if self.try_begin() {
                return true;
            }
            let now = self.0.load(Ordering::Relaxed);
            if now == before && !now.is_multiple_of(2) {
                return self.try_begin_after_turns();
            }
            before = now;
        }
        false
    }

    fn try_begin_after_turns(&self) -> bool {
        for _ in 0..TURNS {
            give_way();
            if self.try_begin() {
                return true;
            }
        }
        false
    }

    /// As [`Word::try_begin`]; waits for another holder.
    #[inline]
    pub fn begin(&self) {
        if !self.try_begin() {
            self.begin_later();
        }
    }

    #[cold]
    fn begin_later(&self) {
        let mut waits = Waits::default();
        while !self.try_begin() {
            waits.wait();
        }
    }

    /// Ends the hold. Only its holder may call this.
    #[inline]
    pub fn end(&self) {
        let held = self.0.load(Ordering::Relaxed);
        debug_assert!(!held.is_multiple_of(2), "nobody holds it");
        self.0.store(held + 1, Ordering::Release);
    }

    /// The number of the hold that is going on.
    #[inline]
    pub fn held(&self) -> Option<u64> {
        Some(self.0.load(Ordering::SeqCst)).filter(|word| !word.is_multiple_of(2))
    }

    /// The number of the hold, for its holder; even: there is none.
    #[inline]
    pub fn mine(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether this hold is over. The actions of its holder are visible after that.
    #[inline]
    pub fn is_past(&self, hold: u64) -> bool {
        self.0.load(Ordering::Acquire) != hold
    }

    /// Waits until this hold is over. What its holder did is seen after that.
    pub fn wait_past(&self, hold: u64) {
        let mut waits = Waits::default();
        while !self.is_past(hold) {
            waits.wait();
        }
    }
}

#[derive(Default)]
struct Waits(u32);

impl Waits {
    fn wait(&mut self) {
        self.0 = self.0.saturating_add(1);
        if cfg!(loom) {
            give_way();
        } else if self.0 < SPINS {
            std::hint::spin_loop();
        } else if self.0 < SPINS + YIELDS {
            give_way();
        } else {
            std::thread::sleep(NAP);
        }
    }
}

#[cfg(not(loom))]
fn back_off(pauses: u32) {
    for _ in 0..pauses {
        std::hint::spin_loop();
    }
}

#[cfg(loom)]
fn back_off(_pauses: u32) {
    give_way();
}

#[cfg(not(loom))]
fn give_way() {
    weft_sys::thread::sched_yield();
}

#[cfg(loom)]
fn give_way() {
    loom::thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn short_holds_are_waited_for_and_long_ones_are_not() {
        let word = Word::default();
        assert!(word.try_begin());
        assert!(!word.try_begin_soon(), "somebody holds it");
        word.end();
        let rounds: u32 = if cfg!(miri) { 20 } else { 20_000 };
        let got = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        if word.try_begin_soon() {
                            // Not atomic together: two holders would lose one.
                            let seen = got.load(std::sync::atomic::Ordering::Relaxed);
                            got.store(seen + 1, std::sync::atomic::Ordering::Relaxed);
                            word.end();
                        }
                    }
                });
            }
        });
        let got = u64::from(got.into_inner());
        assert_eq!(word.mine(), 2 * (got + 1));
        assert!(got > 0);
    }
}
