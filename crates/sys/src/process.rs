//! Other processes: whether they live, and their memory.
//!
//! # Safety
//!
//! [`vm_readv`] and [`vm_writev`] take raw memory from their caller and are `unsafe` as the functions of
//! [`crate::raw`] are. [`Birthmark`] owns the page that it reads, and `prctl` reads
//! nothing of ours.

use crate::map::{map_anonymous, unmap};
use crate::raw::{MAX_IOV, retry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{Advice, madvise};
use rustix::process::{Pid, PidfdFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

/// A descriptor that goes on standing for this one process, whoever gets its number next.
///
/// # Errors
/// `ESRCH` when there is no such process, `EMFILE`.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// The effective user of this process.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the process has not ended yet (a process that ended is dead before its parent asks).
pub fn pidfd_alive(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now))).is_ok_and(|ready| ready == 0)
}

/// Copies from the `remote` ranges of another process to the `local` ones of ours, both in order.
/// Returns the bytes copied: fewer than asked when a later range is bad.
///
/// # Errors
/// `EPERM` unless we may trace the process, `ESRCH` without such a process, `EFAULT` when the first byte
/// cannot be copied, `ENOSYS`.
///
/// # Safety
/// Each range of `local` must stay writable for the duration of the call, with no reference to it.
pub unsafe fn vm_readv(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    // SAFETY: the caller's promise; the kernel checks the remote ranges.
    unsafe { vm(libc::SYS_process_vm_readv, pid, local, remote) }
}

/// Copies from the `local` ranges to the `remote` ones of another process, as [`vm_readv`].
///
/// # Errors
/// As [`vm_readv`].
///
/// # Safety
/// Each range of `local` must stay readable for the duration of the call. What the other process makes of
/// its bytes is its matter; the process must not be this one unless nothing refers to the remote ranges.
pub unsafe fn vm_writev(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    // SAFETY: the caller's promise; the kernel checks the remote ranges.
    unsafe { vm(libc::SYS_process_vm_writev, pid, local, remote) }
}

unsafe fn vm(
    call: libc::c_long,
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    // SAFETY: the lists outlive the call; the caller vouches for the local ranges.
    retry(|| unsafe {
        libc::syscall(
            call,
            libc::c_ulong::from(pid),
            local.as_ptr(),
            local.len().min(MAX_IOV),
            remote.as_ptr(),
            remote.len().min(MAX_IOV),
            0_usize,
        )
    })
}

/// Tells the process that made it from its children by `fork`, without a system call.
#[derive(Debug)]
pub struct Birthmark(NonNull<u8>);

// SAFETY: a page of its own, of which one byte is read through an atomic.
unsafe impl Send for Birthmark {}
// SAFETY: as above.
unsafe impl Sync for Birthmark {}

impl Birthmark {
    /// A mark of the calling process: a page that the kernel empties in children.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidInput` before Linux 4.14.
    pub fn new() -> io::Result<Birthmark> {
        let mark = Birthmark(map_anonymous(1)?);
        // SAFETY: our own mapping, so far without a content.
        unsafe { madvise(mark.0.as_ptr().cast(), 1, Advice::LinuxWipeOnFork) }?;
        mark.byte().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    fn byte(&self) -> &AtomicU8 {
        // SAFETY: mapped as long as `self` lives, and only ever reached through an atomic.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr()) }
    }

    /// Whether this is the process that made it.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.byte().load(Ordering::Relaxed) != 0
    }
}

impl Drop for Birthmark {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and nobody has the address.
        let unmapped = unsafe { unmap(self.0, 1) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Whether processes of the same user may trace us, and so read and write our memory: we are dumpable, and the
/// Yama module (if there) does not limit tracing to children.
pub fn peers_may_trace() -> bool {
    // SAFETY: the call reads nothing of ours.
    let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) } == 1;
    dumpable
        && match std::fs::read("/proc/sys/kernel/yama/ptrace_scope") {
            Ok(scope) => scope.trim_ascii() == b"0",
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
}
