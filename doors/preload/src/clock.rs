//! The machine's clock. Async-signal-safe.

use libc::{c_int, timespec};
use rustix::time::{ClockId, clock_gettime};

pub(crate) use weft_sys::thread::now;

/// The same at the kernel's last tick: a few loads.
pub(crate) fn about_now() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Nanoseconds as the kernel's calls take them.
pub(crate) fn timespec(ns: u64) -> timespec {
    timespec {
        tv_sec: (ns / 1_000_000_000).cast_signed(),
        tv_nsec: (ns % 1_000_000_000).cast_signed(),
    }
}

/// The nanoseconds of a time limit of `poll(2)`. `None`: there is no limit.
pub(crate) fn in_ns(ms: c_int) -> Option<u64> {
    u64::try_from(ms).ok().map(|ms| ms * 1_000_000)
}

/// The reverse of `timespec`, of a time that is not below 0.
pub(crate) fn nanoseconds_of(time: timespec) -> u64 {
    let seconds = time.tv_sec.cast_unsigned().saturating_mul(1_000_000_000);
    seconds.saturating_add(time.tv_nsec.cast_unsigned())
}

/// Milliseconds.
pub(crate) fn now_ms() -> u64 {
    now() / 1_000_000
}

/// The time limit of `recvmmsg`. As in the kernel, it is checked after each message only.
pub(crate) struct TimeLimit(Option<i128>);

impl TimeLimit {
    pub(crate) fn begin(limit: Option<&timespec>) -> TimeLimit {
        let nanoseconds =
            |t: &timespec| i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec);
        TimeLimit(limit.map(|limit| i128::from(now()) + nanoseconds(limit)))
    }

    /// Returns whether the time is over, and writes what is left of it.
    pub(crate) fn is_over(&self, limit: Option<&mut timespec>) -> bool {
        let (Some(until), Some(limit)) = (self.0, limit) else {
            return false;
        };
        let left = (until - i128::from(now())).max(0);
        limit.tv_sec = (left / 1_000_000_000) as i64;
        limit.tv_nsec = (left % 1_000_000_000) as i64;
        left == 0
    }
}
