//! Looking at an empty ring for a moment before sleeping: waking a thread costs more, where the peer runs on another processor.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::clock;

/// For how long an empty ring is looked at, in nanoseconds: as long as it takes to put a thread to sleep and to wake it.
const LOOK: u64 = 20_000;
/// Others that want this processor get it after so many looks, twice as many, and so on, and each time after so many at last: the peer may be one of them.
const YIELD_FIRST: u32 = 16;
const YIELD: u32 = 128;

/// So many looks in a row that brought nothing end them,
const LOST: u32 = 8;
/// but for one of so many.
const AGAIN: u32 = 32;

/// How often a ring of datagrams, or a loan, is looked at. None where there is one processor.
pub(crate) fn spins() -> u32 {
    if weft_sys::cpu_count() < 2 { 0 } else { 200 }
}

/// Looks until there is something, for a moment at most. Returns whether there is.
fn look(mut is_there: impl FnMut() -> bool) -> bool {
    if spins() == 0 {
        return false;
    }
    let began = clock::now();
    for n in 1_u32.. {
        if is_there() {
            return true;
        }
        std::hint::spin_loop();
        if !n.is_multiple_of(8) {
            continue;
        }
        let at = clock::now();
        if at - began > LOOK {
            break;
        }
        let is_early = n >= YIELD_FIRST && n.is_power_of_two();
        if is_early || n.is_multiple_of(YIELD) {
            std::thread::yield_now();
            // Somebody else had it for long: so it is wanted.
            if clock::now() - at > LOOK {
                break;
            }
        }
    }
    is_there()
}

/// Learns whether looking pays. It does not where both ends share a processor, or the peer takes its time. Zeros are a valid value: it is in memory that
/// processes share.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Spun(AtomicU32);

/// Looks after so many looks without success, if that has a chance. Says whether there is something, and the count from then on.
fn try_look(lost: u32, is_there: impl FnMut() -> bool) -> (bool, u32) {
    if lost >= LOST && !lost.is_multiple_of(AGAIN) {
        return (false, if lost == u32::MAX { LOST } else { lost + 1 });
    }
    let found = look(is_there);
    let lost = lost.wrapping_add(1).max(1);
    (found, if found { 0 } else { lost })
}

impl Spun {
    /// Looks until there is something, for a moment at most.
    #[inline]
    pub(crate) fn wait(&self, is_there: impl FnMut() -> bool) {
        let (_, lost) = try_look(self.0.load(Relaxed), is_there);
        self.0.store(lost, Relaxed);
    }
}

thread_local! {
    static MINE: Cell<u32> = const { Cell::new(0) };
}

/// The same for a thread that waits for several connections.
pub(crate) fn wait_for_any(is_there: impl FnMut() -> bool) -> bool {
    let (found, lost) = try_look(MINE.get(), is_there);
    MINE.set(lost);
    found
}
