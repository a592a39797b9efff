//! Looking at an empty ring for a moment before sleeping: waking a thread costs more, where the peer runs on another processor.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// How often an empty ring is looked at.
const SPINS: u32 = 200;
/// So many looks in a row that brought nothing end them,
const LOST: u32 = 8;
/// but for one of so many.
const AGAIN: u32 = 32;

/// None where there is one processor.
pub(crate) fn spins() -> u32 {
    static ONE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    let one = *ONE.get_or_init(|| std::thread::available_parallelism().is_ok_and(|n| n.get() < 2));
    if one { 0 } else { SPINS }
}

/// Learns whether looking pays. It does not where both ends share a processor, or the peer takes its time. Zeros are a valid value: it is in memory that
/// processes share.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Spun(AtomicU32);

impl Spun {
    /// Looks until there is something, for a moment at most.
    #[inline]
    pub(crate) fn wait(&self, is_there: impl Fn() -> bool) {
        let lost = self.0.load(Relaxed);
        if lost >= LOST && !lost.is_multiple_of(AGAIN) {
            self.0
                .store(if lost == u32::MAX { LOST } else { lost + 1 }, Relaxed);
            return;
        }
        for _ in 0..spins() {
            if is_there() {
                self.0.store(0, Relaxed);
                return;
            }
            std::hint::spin_loop();
        }
        self.0.store(lost.wrapping_add(1).max(1), Relaxed);
    }
}
