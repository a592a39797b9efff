//! Scheduling of a thread.
//!
//! # Safety
//!
//! Two `unsafe` calls, `sched_getattr` and `sched_setattr`, which `rustix` lacks.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The shortest turn that the kernel grants.
const BRIEF_NS: u64 = 100_000;

/// Lets another runnable thread have this processor (`sched_yield`).
pub fn sched_yield() {
    rustix::thread::sched_yield();
}

/// A thread that has yielded its processor and does not get it back for this long shares it with a busy thread.
const LONG: Duration = Duration::from_micros(500);

/// Yields this processor to another runnable thread, for a thread that waits by polling. Returns false without yielding if a recent yield
/// took milliseconds. A short sleep is better then, because the kernel returns the processor sooner to a thread that wakes than to one that
/// has yielded.
#[must_use]
pub fn offer_turn() -> bool {
    static LOST: LostTurns = LostTurns::new();
    if !LOST.may_yield() {
        return false;
    }
    let begun = Instant::now();
    sched_yield();
    LOST.note(begun.elapsed());
    true
}

/// The recent cost of yields in this process. After a long one, the next yields are refused, twice as many each time; one in so many tests
/// whether the other thread still runs. Threads race for the counts, which only makes them slightly wrong.
struct LostTurns {
    refuse: AtomicU32,
    next: AtomicU32,
}

impl LostTurns {
    const FIRST: u32 = 64;
    const MOST: u32 = 8192;

    const fn new() -> Self {
        LostTurns {
            refuse: AtomicU32::new(0),
            next: AtomicU32::new(Self::FIRST),
        }
    }

    fn may_yield(&self) -> bool {
        let refuse = self.refuse.load(Ordering::Relaxed);
        if refuse > 0 {
            self.refuse.store(refuse - 1, Ordering::Relaxed);
        }
        refuse == 0
    }

    fn note(&self, took: Duration) {
        if took >= LONG {
            let next = self.next.load(Ordering::Relaxed);
            self.refuse.store(next, Ordering::Relaxed);
            let doubled = (next * 2).min(Self::MOST);
            self.next.store(doubled, Ordering::Relaxed);
        } else if self.next.load(Ordering::Relaxed) != Self::FIRST {
            self.next.store(Self::FIRST, Ordering::Relaxed);
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
    use super::{LONG, LostTurns};
    use std::time::Duration;

    #[test]
    fn turns_that_were_lost_are_not_offered_again_at_once() {
        let lost = LostTurns::new();
        let refused = || (0..100_000).take_while(|_| !lost.may_yield()).count() as u32;
        assert_eq!(refused(), 0);
        lost.note(Duration::from_micros(1));
        assert_eq!(refused(), 0);
        for wanted in [64, 128, 256, 512, 1024, 2048, 4096, 8192, 8192] {
            lost.note(LONG);
            assert_eq!(refused(), wanted);
        }
        // The other thread has stopped.
        lost.note(Duration::from_micros(1));
        assert_eq!(refused(), 0);
        lost.note(LONG);
        assert_eq!(refused(), 64);
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
