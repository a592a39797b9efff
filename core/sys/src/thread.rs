//! Scheduling of a thread.
//!
//! # Safety
//!
//! `sched_getattr` and `sched_setattr`, which `rustix` lacks, and `clock_gettime`, of which `rustix` looks for the fast form in the file headers of the
//! kernel's own library: under valgrind that is an invalid read.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The shortest turn that the kernel grants.
const BRIEF_NS: u64 = 100_000;

/// Nanoseconds of the monotonic clock.
pub fn now() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a place for the time. This clock exists everywhere.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Lets another runnable thread have this processor (`sched_yield`).
pub fn sched_yield() {
    rustix::thread::sched_yield();
}

/// A thread that has yielded its processor and does not get it back for so many nanoseconds shares it with a busy thread.
const LONG_NS: u64 = 500_000;
/// After such a yield none is offered for so many times as long as it took: all of them together cost one part in so many.
const REST: u64 = 64;
/// Nor for longer than this.
const LONGEST_REST_NS: u64 = 1_000_000_000;

/// Yields this processor to another runnable thread, for a thread that waits by polling. Returns false without yielding if a recent yield
/// took milliseconds. A short sleep is better then, because the kernel returns the processor sooner to a thread that wakes than to one that
/// has yielded.
#[must_use]
pub fn offer_turn() -> bool {
    if turns_are_lost() {
        return false;
    }
    let begun = now();
    sched_yield();
    LOST.note(begun, now());
    true
}

/// Whether [`offer_turn`] would not yield now.
pub fn turns_are_lost() -> bool {
    // Without busy threads the clock is not read.
    LOST.0.load(Ordering::Relaxed) != 0 && LOST.at(now())
}

/// A thread that spins has found that its last look was at `last`: if that is long ago, a busy thread has had the processor since.
pub fn note_lost_turn(last: u64, now: u64) {
    if now.saturating_sub(last) >= LONG_NS {
        LOST.note(last, now);
    }
}

/// Of this process.
static LOST: LostTurns = LostTurns(AtomicU64::new(0));

/// Up to when yields are not offered; 0: that time is over. Threads race for it, which only makes it slightly wrong.
struct LostTurns(AtomicU64);

impl LostTurns {
    fn at(&self, now: u64) -> bool {
        let lost = now < self.0.load(Ordering::Relaxed);
        if !lost {
            self.0.store(0, Ordering::Relaxed);
        }
        lost
    }

    fn note(&self, begun: u64, ended: u64) {
        let took = ended.saturating_sub(begun);
        if took >= LONG_NS {
            let rest = (took * REST).min(LONGEST_REST_NS);
            self.0.store(ended + rest, Ordering::Relaxed);
        } else if self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }
}

/// Asks for short turns of the processor for the calling thread: 0.1 ms each, in exchange for getting one sooner after it
/// wakes. Since Linux 6.12 a thread with a shorter turn takes the processor from one with a longer turn when it wakes;
/// otherwise it may have to wait until that turn is over, milliseconds, beside a thread that spins. Its share of the
/// processor stays the same. Older kernels take the request and do nothing.
///
/// # Errors
/// `PermissionDenied` where a seccomp filter forbids it; `Unsupported` for a thread with a real-time policy, which needs none.
pub fn ask_for_short_turns() -> io::Result<()> {
    // SAFETY: a sched_attr of zeros is valid.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel fills at most `size` bytes of `attr`; thread 0 is the calling one.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    if attr.sched_policy != libc::SCHED_OTHER as u32 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    attr.size = size;
    attr.sched_runtime = BRIEF_NS;
    // SAFETY: the kernel reads `size` bytes of `attr`; thread 0 is the calling one.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{LONG_NS, LONGEST_REST_NS, LostTurns, REST};
    use std::sync::atomic::AtomicU64;

    #[test]
    fn turns_that_were_lost_are_not_offered_again_at_once() {
        let lost = LostTurns(AtomicU64::new(0));
        assert!(!lost.at(1));
        lost.note(1, 1 + LONG_NS - 1);
        assert!(!lost.at(LONG_NS));
        lost.note(10, 10 + LONG_NS);
        let end = 10 + LONG_NS + REST * LONG_NS;
        assert!(lost.at(10 + LONG_NS) && lost.at(end - 1) && !lost.at(end));
        // The other thread has stopped.
        lost.note(end, end + 300);
        assert!(!lost.at(end + 300));
        lost.note(0, u64::MAX / REST);
        let end = u64::MAX / REST + LONGEST_REST_NS;
        assert!(lost.at(end - 1) && !lost.at(end));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn turns_can_be_short() {
        // On a thread of its own: the test's other threads stay as they are.
        let asked = std::thread::spawn(super::ask_for_short_turns).join();
        match asked.unwrap() {
            Ok(()) => {}
            // A container may forbid it.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
        }
    }
}
