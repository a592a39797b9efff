//! How the scheduler treats a thread.
//!
//! # Safety
//!
//! Two `unsafe` calls, `sched_getattr` and `sched_setattr`, which `rustix` lacks.

use std::io;

/// The shortest turn that the kernel grants.
const BRIEF_NS: u64 = 100_000;

/// Lets another runnable thread have this processor (`sched_yield`).
pub fn sched_yield() {
    rustix::thread::sched_yield();
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
