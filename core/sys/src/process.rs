//! Other processes: whether they live, and their memory.
//!
//! # Safety
//!
//! [`vm_readv`] and [`vm_writev`] take raw memory from their caller and are `unsafe` as the functions of
//! [`crate::raw`] are. [`ForkDetector`] owns the page that it reads. `ioctl` on a process's descriptor makes a new
//! descriptor, and reads nothing of ours. [`keep_files`], [`end_with_us`], [`restrict`]
//! and [`in_own_spaces`] make system calls in a forked child.

use crate::map::{map_anonymous, unmap};
use crate::raw::{MAX_IOV, retry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{Advice, madvise};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal};
use std::ffi::CStr;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

/// A descriptor that refers to this process permanently, even if its number is reused.
///
/// # Errors
/// `ESRCH` if there is no such process, `EMFILE`.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Keeps the descriptors of this process, from 3 on, from a program that it starts. A kernel before 5.11 hands them on.
pub fn keep_files(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec there is one system call with numbers alone, which is safe after a fork. It closes nothing before the exec.
    unsafe {
        command.pre_exec(|| {
            libc::syscall(
                libc::SYS_close_range,
                3,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            Ok(())
        })
    }
}

/// Makes the kernel kill the program when the thread that starts it ends. Does not apply to a program that changes its rights at its start.
pub fn end_with_us(command: &mut Command) -> &mut Command {
    let ours = rustix::process::getpid();
    // SAFETY: between fork and exec there are two system calls with numbers alone, which are safe after a fork, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have ended before that.
            if rustix::process::getppid() == Some(ours) {
                Ok(())
            } else {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        })
    }
}

/// The version of the kernel's Landlock; 0 without it.
pub fn landlock_abi() -> u32 {
    const VERSION: libc::c_uint = 1;
    let (call, nothing) = (libc::SYS_landlock_create_ruleset, ptr::null::<u8>());
    // SAFETY: with this flag the kernel reads no attributes.
    let abi = unsafe { libc::syscall(call, nothing, 0_usize, VERSION) };
    u32::try_from(abi).unwrap_or(0)
}

/// What a program that is started may not do. Both parts are permanent, and hold for what it starts too.
#[derive(Default)]
pub struct Restrictions {
    /// A ruleset of Landlock.
    pub ruleset: Option<OwnedFd>,
    /// The instructions of a seccomp filter.
    pub filter: Option<Vec<libc::sock_filter>>,
}

impl Restrictions {
    /// Restricts the calling thread, with system calls alone: it may be a forked child.
    fn apply(&self) -> io::Result<()> {
        if self.ruleset.is_some() || self.filter.is_some() {
            rustix::thread::set_no_new_privs(true)?;
        }
        if let Some(ruleset) = &self.ruleset {
            let (call, fd) = (libc::SYS_landlock_restrict_self, ruleset.as_raw_fd());
            // SAFETY: the call takes numbers alone.
            retry(|| unsafe { libc::syscall(call, fd, 0) })?;
        }
        if let Some(filter) = &self.filter {
            let program = libc::sock_fprog {
                len: filter.len().try_into().map_err(io::Error::other)?,
                filter: filter.as_ptr().cast_mut(),
            };
            let (call, mode) = (libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER);
            // SAFETY: the kernel copies the instructions, which `self` owns during the call.
            retry(|| unsafe { libc::syscall(call, mode, 0, &raw const program) })?;
        }
        Ok(())
    }
}

/// Starts the program with these restrictions. The thread that starts it stays without them: it is outside of the program's scope of signals.
/// A process in between waits for the program, and ends as it does. When the thread that starts it ends, that process kills its own process
/// group, which is to be one that the program cannot leave.
///
/// Starting it fails if the kernel refuses a restriction.
pub fn restrict(command: &mut Command, restrictions: Restrictions) -> &mut Command {
    let ours = rustix::process::getpid();
    // SAFETY: between fork and exec there are system calls that are safe after a fork, and nothing is allocated. The second fork does not return
    // here in the waiting process.
    unsafe {
        command.pre_exec(move || {
            fork_below(|| end_group_with(ours))?;
            restrictions.apply()
        })
    }
}

/// Starts the program as the first process of its own user, PID, IPC, network and mount namespaces, with these restrictions.
/// No user is mapped there, so the program has no capabilities. A process in between waits for it, and ends as it does.
///
/// Starting it fails if the kernel refuses the namespaces or a restriction.
pub fn in_own_spaces(command: &mut Command, restrictions: Restrictions) -> &mut Command {
    const SPACES: libc::c_int = libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWNS;
    // SAFETY: between fork and exec there are system calls that are safe after a fork, and nothing is allocated. The second fork does not return
    // here in the waiting process.
    unsafe {
        command.pre_exec(move || {
            retry(|| libc::unshare(SPACES).into())?;
            fork_below(|| {})?;
            restrictions.apply()
        })
    }
}

/// Continues in a child, which is killed with this process. This process does something first; then it waits for the child, and ends as it does.
///
/// # Safety
/// In a forked process.
unsafe fn fork_below(first: impl FnOnce()) -> io::Result<()> {
    let parent = rustix::process::getpid();
    // SAFETY: a raw fork: `fork` of the C library would run handlers of threads that do not exist here.
    let child = retry(|| unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })?;
    if let Ok(child @ 1..) = libc::pid_t::try_from(child) {
        // Its memory is a copy of the starting process's: no core file, and no debugger.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
        first();
        // SAFETY: in a forked process, as the caller says.
        unsafe { wait_and_end_alike(child) }
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that. In a PID namespace of its own it has no number.
    if rustix::process::getppid().is_some_and(|now| now != parent) {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    Ok(())
}

/// From here on the end of the thread that has started this process, of the process `starter`, kills the group that this process is in.
fn end_group_with(starter: Pid) {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: a system call with numbers alone, in a handler of a signal.
        unsafe { libc::kill(0, libc::SIGKILL) };
    }
    // SAFETY: the handler makes one system call.
    unsafe { libc::signal(libc::SIGTERM, end as extern "C" fn(libc::c_int) as usize) };
    let told = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    // It may have ended before that.
    if told.is_err() || rustix::process::getppid() != Some(starter) {
        end(0);
    }
}

/// Waits for the child, and ends with its status or by its signal.
///
/// # Safety
/// In a forked process.
unsafe fn wait_and_end_alike(child: libc::pid_t) -> ! {
    let mut status = 0;
    // SAFETY: system calls that are safe after a fork. The descriptors are copies, and nothing here uses them: the starting process
    // waits until the last one of its pipe is closed.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
        while libc::waitpid(child, &raw mut status, 0) < 0
            && *libc::__errno_location() == libc::EINTR
        {}
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        libc::_exit(libc::WEXITSTATUS(status))
    }
}

/// The effective user of this process.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the process is alive (a process that ended counts as dead before its parent waits for it).
pub fn pidfd_alive(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now))).is_ok_and(|ready| ready == 0)
}

/// A number that no other process gets until the next boot; `None` before Linux 6.9.
pub fn pidfd_number(fd: impl AsFd) -> Option<u64> {
    // The `statfs` type of process descriptors (`PID_FS_MAGIC`).
    const PIDFS: i64 = 0x5049_4446;
    let is_own_file = rustix::fs::fstatfs(&fd).is_ok_and(|fs| fs.f_type == PIDFS);
    let inode = || rustix::fs::fstat(&fd).ok().map(|stat| stat.st_ino);
    is_own_file.then(inode).flatten()
}

/// Whether the process is in our user namespace, as far as the kernel shows: it shows nothing of a process that we may not inspect
/// (`PTRACE_MODE_READ`), because it is in another namespace, has more rights, or is not dumpable.
pub fn shares_user_namespace(pidfd: impl AsFd) -> bool {
    is_in_our_user_namespace(pidfd).unwrap_or(false)
}

/// The same, where what the kernel does not show is an error.
///
/// # Errors
/// The process is gone, or the kernel does not show its namespace.
pub fn is_in_our_user_namespace(pidfd: impl AsFd) -> io::Result<bool> {
    let pidfd = pidfd.as_fd();
    let theirs = namespace_by_descriptor(pidfd).or_else(|_| namespace_by_number(pidfd))?;
    Ok(theirs == namespace_at("/proc/self/ns/user")?)
}

/// The identity of a namespace.
type Namespace = (u64, u64);

fn namespace_at(path: &str) -> io::Result<Namespace> {
    let stat = rustix::fs::stat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Since Linux 6.11, also for processes without a number in our namespace.
fn namespace_by_descriptor(pidfd: BorrowedFd<'_>) -> io::Result<Namespace> {
    const PIDFD_GET_USER_NAMESPACE: libc::c_ulong = 0xff09;
    let fd = pidfd.as_raw_fd();
    // SAFETY: the request takes no memory; on another kind of descriptor it is refused.
    let fd =
        retry(|| unsafe { libc::syscall(libc::SYS_ioctl, fd, PIDFD_GET_USER_NAMESPACE, 0_usize) })?;
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: a new descriptor that nobody else has.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn namespace_by_number(pidfd: BorrowedFd<'_>) -> io::Result<Namespace> {
    // The number in the PID namespace that `/proc` shows, which need not be ours.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    let pid: u32 = pid
        .and_then(|pid| pid.trim().parse().ok())
        .ok_or(io::ErrorKind::NotFound)?;
    let namespace = namespace_at(&format!("/proc/{pid}/ns/user"))?;
    // Until now the number was its own.
    if pidfd_alive(pidfd) {
        Ok(namespace)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Fills `into` from an address of another process.
///
/// # Errors
/// As [`vm_readv`]; `UnexpectedEof` when there is less.
pub fn read_memory(pid: u32, addr: u64, into: &mut [u8]) -> io::Result<()> {
    let at = usize::try_from(addr).map_err(|_| io::ErrorKind::InvalidInput)?;
    let range = |base, len| libc::iovec {
        iov_base: base,
        iov_len: len,
    };
    let remote = range(std::ptr::without_provenance_mut(at), into.len());
    let local = range(into.as_mut_ptr().cast(), into.len());
    // SAFETY: `into` is ours alone during the call.
    let n = unsafe { vm_readv(pid, &[local], &[remote]) }?;
    if n == into.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Copies from the `remote` ranges of another process to our `local` ranges, both in order. Returns the bytes copied: fewer than requested
/// if a later range is invalid.
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
/// Each range of `local` must stay readable for the duration of the call. The other process is responsible for its own bytes; it must not
/// be this process unless no reference to the remote ranges exists.
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

/// A duplicate of the descriptor that a process has of the socket with this number (`socket:[NUMBER]` in `/proc/PID/fd`).
///
/// # Errors
/// `NotFound` if it has none; `EPERM` without the right to trace the process; `ESRCH`, `EMFILE`.
pub fn socket_of(pid: u32, inode: u32) -> io::Result<OwnedFd> {
    let process = pidfd_open(pid)?;
    let name = format!("socket:[{inode}]");
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let is_it =
            std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == name.as_str());
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|_| is_it) {
            let flags = rustix::process::PidfdGetfdFlags::empty();
            return Ok(rustix::process::pidfd_getfd(&process, number, flags)?);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Whether there is no such process, or only a zombie. Async-signal-safe; allocates nothing.
pub fn is_gone(pid: u32) -> bool {
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return true;
    };
    if rustix::process::test_kill_process(number) == Err(rustix::io::Errno::SRCH) {
        return true;
    }
    let mut path = [0; 32];
    let written = write!(&mut path[..], "/proc/{pid}/stat");
    let Ok(path) = CStr::from_bytes_until_nul(&path) else {
        return false;
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else {
        return false;
    };
    let mut text = [0; 1024];
    let n = rustix::io::read(&file, &mut text).unwrap_or(0);
    // SAFETY: opened above. `OwnedFd` would close it by the C library's function, which a preload library replaces.
    unsafe { rustix::io::close(file.into_raw_fd()) };
    written.is_ok() && is_left_over(&text[..n])
}

/// Whether a text of `/proc/PID/stat` is of a process without running threads: its first thread can end before the others.
fn is_left_over(stat: &[u8]) -> bool {
    let Some(end) = stat.iter().rposition(|&byte| byte == b')') else {
        return false;
    };
    // The third field is the state, the twentieth the number of threads.
    let mut fields = stat[end + 1..].split(|&byte| byte == b' ').skip(1);
    let state = fields.next();
    let threads = fields.nth(16);
    matches!(state, Some(b"Z" | b"X")) && matches!(threads, Some(b"0" | b"1"))
}

/// Distinguishes the process that made it from its children by `fork`, without a system call.
#[derive(Debug)]
pub struct ForkDetector(NonNull<u8>);

// SAFETY: a page of its own, of which one byte is read through an atomic.
unsafe impl Send for ForkDetector {}
// SAFETY: as above.
unsafe impl Sync for ForkDetector {}

impl ForkDetector {
    /// A mark of the calling process: a page that the kernel empties in children.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidInput` before Linux 4.14.
    pub fn new() -> io::Result<ForkDetector> {
        let mark = ForkDetector(map_anonymous(1)?);
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

impl Drop for ForkDetector {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and nobody has the address.
        let unmapped = unsafe { unmap(self.0, 1) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_process_is_gone_when_it_has_ended_and_nobody_has_asked_for_it() {
        assert!(!is_gone(std::process::id()) && is_gone(0) && is_gone(u32::MAX));
        let mut child = Command::new("true").spawn().unwrap();
        let begun = std::time::Instant::now();
        while !is_gone(child.id()) {
            assert!(begun.elapsed() < std::time::Duration::from_mins(1));
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }

    #[test]
    fn a_program_ends_with_the_thread_that_has_started_it() {
        let start = || {
            let mut command = Command::new("sleep");
            end_with_us(command.arg("600")).spawn().unwrap()
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn a_first_thread_that_has_ended_is_not_the_process() {
        let stat = |state, threads| {
            let before = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16";
            format!("7 (a ) Z b) {state} {before} {threads} 0 1 2")
        };
        assert!(is_left_over(stat("Z", 1).as_bytes()));
        assert!(!is_left_over(stat("Z", 3).as_bytes()));
        assert!(!is_left_over(stat("S", 1).as_bytes()));
        assert!(!is_left_over(b"") && !is_left_over(b"7 (a) Z 1"));
    }

    #[test]
    fn a_namespace_is_the_same_by_descriptor_and_by_number() {
        let ours = namespace_at("/proc/self/ns/user").unwrap();
        let me = pidfd_open(std::process::id()).unwrap();
        assert!(shares_user_namespace(&me));
        assert_eq!(namespace_by_number(me.as_fd()).unwrap(), ours);
        match namespace_by_descriptor(me.as_fd()) {
            Ok(theirs) => assert_eq!(theirs, ours),
            Err(error) => println!("skipped: {error}"),
        }
        assert!(!shares_user_namespace(
            std::fs::File::open("/dev/null").unwrap()
        ));
    }
}
