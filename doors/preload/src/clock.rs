//! The machine's clock. Async-signal-safe.

use libc::timespec;
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// The same at the kernel's last tick: a few loads.
pub(crate) fn about_now() -> u64 {
    nanoseconds(ClockId::MonotonicCoarse)
}

/// Nanoseconds as the kernel's calls take them.
pub(crate) fn timespec(ns: u64) -> timespec {
    timespec {
        tv_sec: (ns / 1_000_000_000).cast_signed(),
        tv_nsec: (ns % 1_000_000_000).cast_signed(),
    }
}

/// The reverse, of a time that is not below 0.
pub(crate) fn nanoseconds_of(time: timespec) -> u64 {
    let seconds = time.tv_sec.cast_unsigned().saturating_mul(1_000_000_000);
    seconds.saturating_add(time.tv_nsec.cast_unsigned())
}

/// Milliseconds.
pub(crate) fn now_ms() -> u64 {
    now() / 1_000_000
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
