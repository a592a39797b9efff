//! The machine's clock. Async-signal-safe.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// The same at the kernel's last tick: a few loads.
pub(crate) fn about_now() -> u64 {
    nanoseconds(ClockId::MonotonicCoarse)
}

/// Milliseconds.
pub(crate) fn now_ms() -> u64 {
    now() / 1_000_000
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
