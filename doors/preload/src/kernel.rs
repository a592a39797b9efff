//! Short queries to the kernel about a descriptor, by the functions behind ours.
//!
//! # Safety
//!
//! A descriptor that is not open is an error of the call, and memory is handed over only for the call.

use libc::{c_int, c_long, c_short, iovec, msghdr, pollfd, ssize_t, timeval};
use std::mem::{MaybeUninit, size_of, zeroed};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;

use crate::next;

pub(crate) fn borrowed(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: a descriptor that its owner keeps open during the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

pub(crate) fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: asks for flags.
    let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// Whether this process has more than one thread; where that is not known, it has.
pub(crate) fn has_threads() -> bool {
    std::fs::read_dir("/proc/self/task").map_or(true, |tasks| tasks.count() > 1)
}

/// Returns true if a descriptor is a pipe that can be written to.
pub(crate) fn is_pipe_to_write(fd: c_int) -> bool {
    let kind = rustix::fs::fstat(borrowed(fd)).map(|about| about.st_mode & libc::S_IFMT);
    // SAFETY: asks for flags.
    let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
    kind == Ok(libc::S_IFIFO) && flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// The limit of the numbers of descriptors.
pub(crate) fn most_descriptors() -> u64 {
    descriptor_limits().0
}

/// That limit, and the highest that this process may set.
pub(crate) fn descriptor_limits() -> (u64, u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes the limit.
    unsafe { next::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (limit.rlim_cur, limit.rlim_max)
}

/// Sets both; returns what they were.
pub(crate) fn limit_descriptors(now: u64, most: u64) -> (u64, u64) {
    let limit = libc::rlimit {
        rlim_cur: now,
        rlim_max: most,
    };
    let mut old = limit;
    // SAFETY: reads a limit and writes one.
    unsafe { next::prlimit(0, libc::RLIMIT_NOFILE, &raw const limit, &raw mut old) };
    (old.rlim_cur, old.rlim_max)
}

/// Returns true if a descriptor would be closed by an exec.
pub(crate) fn closes_on_exec(fd: c_int) -> bool {
    let flags = rustix::io::fcntl_getfd(borrowed(fd));
    flags.is_ok_and(|flags| flags.contains(rustix::io::FdFlags::CLOEXEC))
}

/// Returns true if a descriptor is a regular file or a block device: a read of one does not wait for anyone.
pub(crate) fn is_file(fd: c_int) -> bool {
    let kind = rustix::fs::fstat(borrowed(fd)).map(|about| about.st_mode & libc::S_IFMT);
    kind.is_ok_and(|kind| matches!(kind, libc::S_IFREG | libc::S_IFBLK))
}

/// Reads an option. All bytes that the kernel may write are a `T`.
unsafe fn option<T>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    // SAFETY: the caller's promise, of zeros too; an option of that size.
    unsafe {
        let mut value: T = zeroed();
        let mut len = size_of::<T>() as u32;
        let to = (&raw mut value).cast();
        (libc::getsockopt(fd, level, name, to, &raw mut len) == 0).then_some(value)
    }
}

/// An option that is a number.
pub(crate) fn option_number(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    // SAFETY: any bytes are a number.
    unsafe { option(fd, level, name) }
}

/// An option of `SOL_SOCKET` that is a number.
pub(crate) fn number(fd: c_int, name: c_int) -> Option<c_int> {
    // SAFETY: any bytes are a number.
    unsafe { option(fd, libc::SOL_SOCKET, name) }
}

/// An option of TCP that is a number.
pub(crate) fn tcp_number(fd: c_int, name: c_int) -> Option<c_int> {
    // SAFETY: any bytes are a number.
    unsafe { option(fd, libc::IPPROTO_TCP, name) }
}

/// An option of `SOL_SOCKET` that is a time limit; `None`: there is none.
pub(crate) fn time_limit(fd: c_int, name: c_int) -> Option<timeval> {
    // SAFETY: any bytes are a time.
    let limit: Option<timeval> = unsafe { option(fd, libc::SOL_SOCKET, name) };
    limit.filter(|limit| (limit.tv_sec, limit.tv_usec) != (0, 0))
}

/// Returns true if a socket has an option that only the kernel's TCP implements.
pub(crate) fn has_options_of_tcp(fd: c_int) -> bool {
    /// The name of the protocol above TCP; none has more bytes.
    type Above = [u8; 16];
    let is_set = |name| number(fd, name).is_some_and(|value| value != 0);
    let is_low = number(fd, libc::SO_RCVLOWAT).is_some_and(|bytes| bytes > 1);
    let is_at_offset = number(fd, libc::SO_PEEK_OFF).is_some_and(|offset| offset >= 0);
    // SAFETY: any bytes are a name, and no name is zeros.
    let above: Option<Above> = unsafe { option(fd, libc::IPPROTO_TCP, libc::TCP_ULP) };
    // SAFETY: asks for flags.
    let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
    is_low
        || is_at_offset
        || [
            libc::SO_TIMESTAMP,
            libc::SO_TIMESTAMPNS,
            libc::SO_TIMESTAMPING,
            libc::SO_ZEROCOPY,
        ]
        .into_iter()
        .any(is_set)
        || above.is_some_and(|name| name != Above::default())
        || flags >= 0 && flags & libc::O_ASYNC != 0
        || is_paced_or_filtered(fd)
}

/// Returns true if a socket has a limit of its rate, or a filter (of which there is an error if it is of eBPF).
fn is_paced_or_filtered(fd: c_int) -> bool {
    // SAFETY: any bytes are a number.
    let rate: Option<u32> = unsafe { option(fd, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE) };
    let mut len = 0;
    // SAFETY: no room for the filter; its length is asked.
    let rc = unsafe {
        next::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            null_mut(),
            &raw mut len,
        )
    };
    let is_filtered = rc == 0 && len > 0 || rc != 0 && crate::errno() == libc::EACCES;
    rate.is_some_and(|rate| rate != u32::MAX) || is_filtered
}

pub(crate) fn set_option<T>(fd: c_int, level: c_int, name: c_int, value: &T) {
    let from = std::ptr::from_ref(value).cast();
    // SAFETY: an option of that size.
    unsafe { next::setsockopt(fd, level, name, from, size_of::<T>() as u32) };
}

pub(crate) fn entry(fd: c_int, events: c_short) -> pollfd {
    pollfd {
        fd,
        events,
        revents: 0,
    }
}

/// A system call that is no cancellation point, as the C library's functions of the same names are.
fn uncancelled(number: c_long, args: [c_long; 5]) -> c_long {
    let [a, b, c, d, e] = args;
    // SAFETY: the callers', below.
    unsafe { next::syscall(number, a, b, c, d, e, 0) }
}

/// `send(2)`, and no cancellation point.
pub(crate) fn send_bytes(fd: c_int, bytes: &[u8], flags: c_int) -> ssize_t {
    let (from, n) = (bytes.as_ptr() as c_long, bytes.len() as c_long);
    uncancelled(libc::SYS_sendto, [fd.into(), from, n, flags.into(), 0]) as ssize_t
}

/// `recv(2)`, and no cancellation point.
pub(crate) fn take_bytes(fd: c_int, bytes: &mut [MaybeUninit<u8>], flags: c_int) -> ssize_t {
    let (to, n) = (bytes.as_mut_ptr() as c_long, bytes.len() as c_long);
    uncancelled(libc::SYS_recvfrom, [fd.into(), to, n, flags.into(), 0]) as ssize_t
}

/// Waits up to `ms` milliseconds; -1: for ever. A cancellation point.
pub(crate) fn poll(list: &mut [pollfd], ms: c_int) -> c_int {
    // SAFETY: entries of a slice.
    unsafe { next::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, ms) }
}

/// Returns the events that one descriptor is ready for within `ms` milliseconds; 0: none.
pub(crate) fn poll_one(fd: c_int, events: c_short, ms: c_int) -> c_short {
    let mut list = [entry(fd, events)];
    look(&mut list, ms);
    list[0].revents
}

/// The same for several descriptors, whose entries say it.
pub(crate) fn look(list: &mut [pollfd], ms: c_int) {
    let limit = libc::timespec {
        tv_sec: i64::from(ms) / 1000,
        tv_nsec: i64::from(ms) % 1000 * 1_000_000,
    };
    let (list_at, limit) = (list.as_mut_ptr() as c_long, (&raw const limit) as c_long);
    let limit = if ms < 0 { 0 } else { limit };
    let n = list.len() as c_long;
    uncancelled(libc::SYS_ppoll, [list_at, n, limit, 0, 0]);
}

/// Ends a connection by a reset, which the peer sees as `ECONNRESET`.
pub(crate) fn abort(fd: c_int) {
    // SAFETY: zero is a valid address, of no family.
    let nobody: libc::sockaddr = unsafe { std::mem::zeroed() };
    let len = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: an address and its length.
    unsafe { next::connect(fd, &raw const nobody, len) };
}

/// The port that an Internet socket is bound to.
pub(crate) fn local_port(fd: c_int) -> Option<u16> {
    weft_sys::tcp::local_addr(borrowed(fd))
        .map(|addr| addr.port())
        .ok()
}

/// The state of a TCP socket: the first byte of `tcp_info`.
pub(crate) fn tcp_state(fd: c_int) -> Option<c_int> {
    tcp_number(fd, libc::TCP_INFO).map(|info| info & 0xff)
}

/// Returns true if neither side of a TCP connection has ended its direction.
pub(crate) fn is_established(fd: c_int) -> bool {
    const ESTABLISHED: c_int = 1;
    tcp_state(fd) == Some(ESTABLISHED)
}

/// Returns true if the kernel has ended a TCP connection, and the program has not been told of the error.
pub(crate) fn is_aborted(fd: c_int) -> bool {
    const CLOSE: c_int = 7;
    poll_one(fd, 0, 0) & libc::POLLERR != 0 && tcp_state(fd) == Some(CLOSE)
}

/// Returns true if there is something to be read, or an error.
pub(crate) fn is_readable(fd: c_int) -> bool {
    poll_one(fd, libc::POLLIN, 0) != 0
}

/// Bytes that the kernel has for a socket; 0 if it does not say.
pub(crate) fn unread(fd: c_int) -> c_int {
    asked(fd, libc::FIONREAD).unwrap_or(0)
}

/// The number that an `ioctl` of a socket gives.
pub(crate) fn asked(fd: c_int, what: libc::c_ulong) -> Option<c_int> {
    let mut n: c_int = 0;
    let to = (&raw mut n).expose_provenance() as libc::c_ulong;
    // SAFETY: writes an int.
    (unsafe { next::ioctl(fd, what, to) } == 0).then_some(n)
}

/// Takes all bytes that the kernel has for a socket, and drops them. An error of the socket stays.
pub(crate) fn discard(fd: c_int) {
    let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: TCP writes nothing for a receive with this flag.
    while unread(fd) > 0 && unsafe { next::recv(fd, null_mut(), 1 << 30, flags) } > 0 {}
}

/// Looks at the next byte, without taking it and without a wait. Returns what `recv(2)` does.
pub(crate) fn peek(fd: c_int) -> ssize_t {
    let mut byte = [MaybeUninit::uninit()];
    take_bytes(fd, &mut byte, libc::MSG_PEEK | libc::MSG_DONTWAIT)
}

fn message(iov: &[iovec]) -> msghdr {
    // SAFETY: all zeros is the empty message.
    let mut message: msghdr = unsafe { zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len();
    message
}

/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn receive(fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    let mut message = message(iov);
    // SAFETY: the caller's promise.
    unsafe { next::recvmsg(fd, &raw mut message, flags) }
}

/// # Safety
/// As `sendmsg(2)`.
pub(crate) unsafe fn send(fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    let message = message(iov);
    // SAFETY: the caller's promise.
    unsafe { next::sendmsg(fd, &raw const message, flags) }
}

/// Sleeps for `nanoseconds`, below a second, or until a signal comes.
pub(crate) fn nap(nanoseconds: i64) {
    let nap = libc::timespec {
        tv_sec: 0,
        tv_nsec: nanoseconds,
    };
    let nap = (&raw const nap) as c_long;
    uncancelled(libc::SYS_nanosleep, [nap, 0, 0, 0, 0]);
}

/// Sleeps until the word differs from `seen`, or `millis` milliseconds have passed. Returns the error number; 0: woken, or it had changed. The word may be
/// in a mapping that is gone: that is an error. Async-signal-safe.
pub(crate) fn sleep_on(word: *const u32, seen: u32, millis: i64) -> c_int {
    let limit = libc::timespec {
        tv_sec: millis / 1000,
        tv_nsec: millis % 1000 * 1_000_000,
    };
    let limit = (&raw const limit) as c_long;
    let wait = libc::FUTEX_WAIT.into();
    // SAFETY: the kernel checks the address.
    let rc = unsafe {
        next::syscall(
            libc::SYS_futex,
            word as c_long,
            wait,
            seen.into(),
            limit,
            0,
            0,
        )
    };
    match crate::errno() {
        _ if rc == 0 => 0,
        libc::EAGAIN => 0,
        other => other,
    }
}

/// Wakes up to `most` threads that sleep on the word.
pub(crate) fn wake(word: *const u32, most: c_int) {
    let wake = libc::FUTEX_WAKE.into();
    // SAFETY: the kernel checks the address.
    unsafe { next::syscall(libc::SYS_futex, word as c_long, wake, most.into(), 0, 0, 0) };
}
