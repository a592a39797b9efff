//! Spinning on an empty ring for a moment before sleeping: waking a thread costs more if the peer runs on another processor.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::clock;

/// Spin time on an empty ring, in nanoseconds: the cost of putting a thread to sleep and waking it.
const LOOK: u64 = 20_000;
/// Spinning stops after this many unsuccessful spins in a row,
const LOST: u32 = 8;
/// except for one of this many.
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
        // Time that passed between two looks was another thread's: the processor is wanted, and the peer may be what wants it.
        if at - began > LOOK {
            break;
        }
    }
    is_there()
}

/// Learns whether spinning pays. It does not if both ends share a processor, or the peer is slow. Zeros are a valid value: it is in memory that
/// processes share.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Spun(AtomicU32);

/// Spins after `lost` unsuccessful spins, if that has a chance. Returns whether there is something, and the new count.
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
