//! Reads and writes on memory given as raw pointers.
//!
//! Registered memory may change while the kernel reads or writes it, so no slice of it may exist;
//! these calls hand pointers to the kernel and never look at the bytes.
//!
//! # Safety
//!
//! Every function here is `unsafe` for the same reason: each range handed over must stay mapped
//! until the call returns, writable where the kernel fills it, and no Rust reference may promise
//! that its bytes stay unchanged (or, for a filled range, exist at all). The kernel answers `EFAULT`
//! for unmapped addresses, so it is Rust's rules, not the process, that a wrong range breaks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most ranges the kernel takes in one call (`UIO_MAXIOV`); lists are cut to it.
pub const MAX_IOV: usize = 1024;

/// Retries a system call that a signal interrupted, and turns -1 into its `errno`.
pub(crate) fn retry(mut call: impl FnMut() -> libc::c_long) -> io::Result<usize> {
    loop {
        let n = call();
        if n >= 0 {
            return Ok(n as usize);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

fn message(iov: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: a msghdr of zeros is the empty message: null pointers with zero lengths.
    let mut m: libc::msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = iov.as_ptr().cast_mut();
    m.msg_iovlen = iov.len().min(MAX_IOV) as _;
    m
}

/// Sends the ranges in order on a stream socket, without blocking; `more` says that more follows
/// at once (`MSG_MORE`). Returns the bytes taken, which may be fewer than offered.
///
/// # Errors
/// `WouldBlock` if the socket's buffer is full; `BrokenPipe` (no signal) and `ConnectionReset` if the peer has closed.
///
/// # Safety
/// Each range of `iov` must stay readable for the duration of the call.
#[inline]
pub unsafe fn send_raw(fd: BorrowedFd<'_>, iov: &[libc::iovec], more: bool) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | if more { libc::MSG_MORE } else { 0 };
    let fd = fd.as_raw_fd();
    if let [one] = iov {
        // SAFETY: the caller vouches for the range; there is no destination address.
        return retry(|| unsafe {
            libc::syscall(
                libc::SYS_sendto,
                fd,
                one.iov_base,
                one.iov_len,
                flags,
                std::ptr::null::<u8>(),
                0_usize,
            )
        });
    }
    let m = message(iov);
    // SAFETY: `m` points at `iov`, which outlives the call; the caller vouches for the ranges.
    retry(|| unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const m, flags) })
}

/// Sends `len` bytes of a file from `offset` on a socket, which takes its pages without a copy (`sendfile(2)`). Returns the bytes taken. A non-blocking
/// socket does not make it wait.
///
/// # Errors
/// As [`send_raw`], but if the peer has closed, a process that does not ignore `SIGPIPE` gets it.
pub fn send_file(
    fd: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: u64,
    len: usize,
) -> io::Result<usize> {
    let mut offset = offset;
    let call = || rustix::fs::sendfile(fd, file, Some(&mut offset), len);
    Ok(rustix::io::retry_on_intr(call)?)
}

/// Receives into the ranges in order, without blocking. Returns the bytes received; 0 means that
/// the peer will send no more (or that `iov` has no room).
///
/// # Errors
/// `WouldBlock` when nothing has arrived; `ConnectionReset` when the peer aborted.
///
/// # Safety
/// Each range of `iov` must stay writable for the duration of the call, with no reference to it.
#[inline]
pub unsafe fn recv_raw(fd: BorrowedFd<'_>, iov: &[libc::iovec]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT;
    let fd = fd.as_raw_fd();
    if let [one] = iov {
        // SAFETY: the caller vouches for the range; no source address is asked for.
        return retry(|| unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                fd,
                one.iov_base,
                one.iov_len,
                flags,
                std::ptr::null_mut::<u8>(),
                std::ptr::null_mut::<u8>(),
            )
        });
    }
    let mut m = message(iov);
    // SAFETY: `m` points at `iov`, which outlives the call; the caller vouches for the ranges.
    retry(|| unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut m, flags) })
}

/// Reads from a file at `offset` into the ranges in order. Returns the bytes read, 0 at the end.
///
/// # Safety
/// Each range of `iov` must stay writable for the duration of the call, with no reference to it.
pub unsafe fn preadv_raw(
    fd: BorrowedFd<'_>,
    iov: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let count = iov.len().min(MAX_IOV);
    let fd = fd.as_raw_fd();
    // The offset is two words (low, high) in the kernel's ABI; on 64-bit the high one is ignored.
    // SAFETY: `iov` outlives the call; the caller vouches for the ranges.
    retry(|| unsafe {
        libc::syscall(
            libc::SYS_preadv,
            fd,
            iov.as_ptr(),
            count,
            offset as libc::c_ulong,
            offset >> 32,
        )
    })
}

/// Writes the ranges in order to a file at `offset`. Returns the bytes written.
///
/// # Safety
/// Each range of `iov` must stay readable for the duration of the call.
pub unsafe fn pwritev_raw(
    fd: BorrowedFd<'_>,
    iov: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let count = iov.len().min(MAX_IOV);
    let fd = fd.as_raw_fd();
    // SAFETY: as in `preadv_raw`.
    retry(|| unsafe {
        libc::syscall(
            libc::SYS_pwritev,
            fd,
            iov.as_ptr(),
            count,
            offset as libc::c_ulong,
            offset >> 32,
        )
    })
}

/// Reads up to `len` bytes from a file, pipe or socket into memory at `ptr`, at `offset` or, with
/// `None`, at the file's own position. Returns the bytes read, 0 at the end.
///
/// # Safety
/// `ptr..ptr + len` must stay writable for the duration of the call, with no reference to it.
pub unsafe fn read_raw(
    fd: BorrowedFd<'_>,
    ptr: *mut u8,
    len: usize,
    offset: Option<u64>,
) -> io::Result<usize> {
    let one = libc::iovec {
        iov_base: ptr.cast(),
        iov_len: len,
    };
    if let Some(at) = offset {
        // SAFETY: the caller's promise covers the one range.
        return unsafe { preadv_raw(fd, &[one], at) };
    }
    let fd = fd.as_raw_fd();
    // SAFETY: the caller's promise.
    retry(|| unsafe { libc::syscall(libc::SYS_read, fd, ptr, len) })
}

/// Writes up to `len` bytes from memory at `ptr` to a file, pipe or socket, at `offset` or, with
/// `None`, at the file's own position. Returns the bytes written.
///
/// # Safety
/// `ptr..ptr + len` must stay readable for the duration of the call.
pub unsafe fn write_raw(
    fd: BorrowedFd<'_>,
    ptr: *const u8,
    len: usize,
    offset: Option<u64>,
) -> io::Result<usize> {
    let one = libc::iovec {
        iov_base: ptr.cast_mut().cast(),
        iov_len: len,
    };
    if let Some(at) = offset {
        // SAFETY: the caller's promise covers the one range; the kernel only reads it.
        return unsafe { pwritev_raw(fd, &[one], at) };
    }
    let fd = fd.as_raw_fd();
    // SAFETY: the caller's promise.
    retry(|| unsafe { libc::syscall(libc::SYS_write, fd, ptr, len) })
}
