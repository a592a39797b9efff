//! Spinning for a moment before a sleep: waking a thread costs more if the peer runs on another processor.
//!
//! A thread that spins does not yield: beside a busy thread, `sched_yield` gives a whole time slice away.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

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

/// Looks until there is something, for `limit` nanoseconds from `began` at most. Returns when there was, by the last reading of the clock.
fn look(began: u64, limit: u64, mut is_there: impl FnMut() -> bool) -> Option<u64> {
    let mut last = began;
    for n in 1_u32.. {
        if is_there() {
            return Some(last);
        }
        std::hint::spin_loop();
        if !n.is_multiple_of(8) {
            continue;
        }
        let at = now();
        // Time that passed between two looks was another thread's: the processor is wanted, and the peer may be what wants it.
        note_lost_turn(last, at);
        last = at;
        if at - began > limit {
            break;
        }
    }
    is_there().then_some(last)
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
        let found = turns() > 0 && look(now(), SPIN, is_there).is_some();
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

/// Waits of one kind in a trial: this many in a row.
const TRIAL: u32 = 16;
/// Between two trials, in nanoseconds: the least, after the choice has changed, and the most.
const LEAST_PAUSE: u64 = 10_000_000;
const MOST_PAUSE: u64 = 1_000_000_000;
/// A sleep and a wake-up take longer than this, in nanoseconds: a spin that finds something sooner needs no trial of sleeps.
const LEAST_WAKE: u64 = 4_000;
/// Waits that took longer, in nanoseconds, are not compared, unless a spin has lost a turn of the processor: the peer was idle, and nothing
/// that this thread does makes it faster.
const IDLE: u64 = 1_000_000;
/// The longest spin of a [`SpinOrSleep`], in nanoseconds: as long as a peer may take that sleeps between messages, on an idle processor.
const LONGEST_SPIN: u64 = 50_000;

/// Whether a wait spins before it sleeps, learned from how long waits of either kind took. Beside busy threads a thread that spins uses its
/// right to preempt them up, and one that sleeps keeps it; on an idle processor a wake-up takes several times as long as an answer. Which
/// of the two holds is measured: now and then a few waits in a row are of the other kind.
///
/// Threads race for the numbers, which only makes them slightly wrong.
#[derive(Debug, Default)]
pub struct SpinOrSleep {
    sleeps: AtomicBool,
    /// Waits of the other kind that are left of a trial.
    trial: AtomicU32,
    /// Means in nanoseconds; 0 if not known: of waits that spin, and of those that sleep.
    means: [AtomicU32; 2],
    /// When the next trial begins, and how long the last pause was.
    next: AtomicU64,
    pause: AtomicU64,
}

/// A wait that has not found anything: the thread sleeps, and says when that is over ([`SpinOrSleep::slept`]).
#[derive(Debug)]
pub struct Begun {
    at: u64,
    slept_only: bool,
    /// Its spin has lost a turn of the processor.
    lost: bool,
}

impl SpinOrSleep {
    /// A wait begins.
    ///
    /// # Errors
    /// It has to sleep.
    #[inline]
    pub fn spin(&self, is_there: impl FnMut() -> bool) -> Result<(), Begun> {
        let at = now();
        let slept_only = turns() == 0 || self.sleeps_next();
        if slept_only {
            return Err(Begun {
                at,
                slept_only,
                lost: false,
            });
        }
        let found = look(at, LONGEST_SPIN, is_there);
        let until = found.unwrap_or_else(now);
        let lost = until - at > 4 * LONGEST_SPIN;
        if found.is_some() {
            self.end(false, lost, until - at, until);
            return Ok(());
        }
        Err(Begun {
            at,
            slept_only,
            lost,
        })
    }

    /// A wait that slept has ended.
    pub fn slept(&self, begun: &Begun) {
        let at = now();
        self.end(
            begun.slept_only,
            begun.lost,
            at.saturating_sub(begun.at),
            at,
        );
    }

    fn sleeps_next(&self) -> bool {
        self.sleeps.load(Relaxed) != (self.trial.load(Relaxed) > 0)
    }

    fn end(&self, slept_only: bool, lost: bool, took: u64, at: u64) {
        if took > IDLE && !lost {
            return;
        }
        let took = took.min(4 * IDLE);
        let mean = &self.means[usize::from(slept_only)];
        let (old, took) = (mean.load(Relaxed), took as u32);
        let new = match old {
            0 => took,
            old => old - old / 8 + took / 8,
        };
        // 0 has a meaning.
        let new = new.max(1);
        if new != old {
            mean.store(new, Relaxed);
        }
        let sleeps = self.sleeps.load(Relaxed);
        let left = self.trial.load(Relaxed);
        if left > 0 && slept_only != sleeps {
            self.trial.store(left - 1, Relaxed);
            if left == 1 {
                self.choose(sleeps, at);
            }
        } else if left == 0 && u64::from(new) > LEAST_WAKE && at >= self.next.load(Relaxed) {
            self.means[usize::from(!sleeps)].store(0, Relaxed);
            self.trial.store(TRIAL, Relaxed);
        }
    }

    /// A trial is over.
    fn choose(&self, sleeps: bool, at: u64) {
        let [spin, sleep] = [0, 1].map(|kind: usize| u64::from(self.means[kind].load(Relaxed)));
        // A spin costs processor time, so it has to be a good deal better; what is used stays unless the other one is clearly better.
        let best = if sleeps {
            spin * 4 >= sleep * 3
        } else {
            spin * 9 >= sleep * 8
        };
        let pause = if best == sleeps {
            (self.pause.load(Relaxed) * 2).clamp(LEAST_PAUSE, MOST_PAUSE)
        } else {
            LEAST_PAUSE
        };
        self.sleeps.store(best, Relaxed);
        self.pause.store(pause, Relaxed);
        self.next.store(at + pause, Relaxed);
    }
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

    /// Plays waits until `until`, that take as long as the two numbers say. Returns how many of them only slept, and the time.
    fn play(of: &SpinOrSleep, from: u64, waits: u32, spin: u64, sleep: u64) -> (u32, u64) {
        let (mut at, mut slept) = (from, 0);
        for _ in 0..waits {
            let sleeps = of.sleeps_next();
            let took = if sleeps { sleep } else { spin };
            at += took;
            of.end(sleeps, false, took, at);
            slept += u32::from(sleeps);
        }
        (slept, at)
    }

    #[test]
    fn waits_are_of_the_kind_that_is_faster() {
        let of = SpinOrSleep::default();
        // An idle machine: answers come soon, and a wake-up takes long.
        let (slept, at) = play(&of, 1, 100_000, 6_000, 30_000);
        assert!(slept <= 16 * 9, "{slept} of 100,000 slept");
        // Busy threads come.
        let (_, at) = play(&of, at, 60_000, 40_000, 10_000);
        let (slept, at) = play(&of, at, 100_000, 40_000, 10_000);
        assert!(slept >= 100_000 - 16 * 9, "{slept} of 100,000 slept");
        // They go.
        let (_, at) = play(&of, at, 60_000, 6_000, 30_000);
        let (slept, _) = play(&of, at, 100_000, 6_000, 30_000);
        assert!(slept <= 16 * 9, "{slept} of 100,000 slept");
    }

    #[test]
    fn answers_that_come_at_once_need_no_trial() {
        let of = SpinOrSleep::default();
        assert_eq!(play(&of, 1, 1_000_000, 600, 30_000).0, 0);
    }

    #[test]
    fn a_spin_without_a_gain_is_not_repeated() {
        let of = SpinOrSleep::default();
        let (slept, at) = play(&of, 1, 1_000, 100_000, 100_000);
        assert!(slept > 900);
        // Waits for an idle peer say nothing.
        let (slept, _) = play(&of, at, 1_000, 2_000_000, 2_000_000);
        assert_eq!(slept, 1_000);
    }
}
