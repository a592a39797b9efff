//! `exs_sync_sendmmsg` and `exs_sync_recvmmsg`: several messages by one call.

use std::ffi::{c_int, c_uint};
use std::time::Instant;

use libc::{mmsghdr, timespec};
use rustix::io::Errno;

use super::socket::on_system;
use super::state::state;
use super::sync::{recvmsg, send_message};
use super::sync_poll::timespec_limit;
use super::table::Found;

/// The most messages of one call, as in the kernel.
const MOST: c_uint = 1024;

/// Carries out `one` for each message until it fails, or says that it was the last: it returns the bytes, and whether to go on. The error of a later
/// message is left to the next call.
///
/// # Safety
/// `vec` has `n` elements.
unsafe fn each(
    vec: *mut mmsghdr,
    n: c_uint,
    mut one: impl FnMut(*mut mmsghdr, bool) -> Result<(isize, bool), Errno>,
) -> Result<c_int, Errno> {
    if vec.is_null() && n > 0 {
        return Err(Errno::FAULT);
    }
    let mut count = 0;
    for i in 0..n.min(MOST) {
        // SAFETY: the caller's promise.
        let message = unsafe { vec.add(i as usize) };
        let (bytes, goes_on) = match one(message, i == 0) {
            Ok(done) => done,
            Err(errno) if count == 0 => return Err(errno),
            Err(_) => break,
        };
        // SAFETY: the caller's promise.
        unsafe { (&raw mut (*message).msg_len).write(bytes as c_uint) };
        count += 1;
        if !goes_on {
            break;
        }
    }
    Ok(count)
}

/// `exs_sync_sendmmsg`
pub unsafe fn sendmmsg(
    fd: c_int,
    vec: *mut mmsghdr,
    n: c_uint,
    flag: c_int,
) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        let args = [vec as usize, n as usize, flag as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_sendmmsg, fd, &args) };
    };
    let one = |message: *mut mmsghdr, _| {
        // SAFETY: the caller's promise.
        let (sent, of) = unsafe { send_message(&entry, &raw const (*message).msg_hdr, flag) }?;
        // The rest of a message that a stream took in part comes before the next.
        Ok((sent, sent.unsigned_abs() == of))
    };
    // SAFETY: the caller's promise.
    unsafe { each(vec, n, one) }
}

/// `exs_sync_recvmmsg`
pub unsafe fn recvmmsg(
    fd: c_int,
    vec: *mut mmsghdr,
    n: c_uint,
    flag: c_int,
    time: *mut timespec,
) -> Result<c_int, Errno> {
    let Found::Exs(_) = state().sockets.find(fd)? else {
        let args = [vec as usize, n as usize, flag as usize, time as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_recvmmsg, fd, &args) };
    };
    // SAFETY: the caller's promise.
    let limit = unsafe { timespec_limit(time) }?;
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    let (plain, later) = match flag & libc::MSG_WAITFORONE {
        0 => (flag, 0),
        bit => (flag & !bit, libc::MSG_DONTWAIT),
    };
    let one = |message: *mut mmsghdr, first: bool| {
        let flag = if first { plain } else { plain | later };
        // SAFETY: the caller's promise.
        let bytes = unsafe { recvmsg(fd, &raw mut (*message).msg_hdr, flag) }?;
        Ok((bytes, until.is_none_or(|until| Instant::now() < until)))
    };
    // SAFETY: the caller's promise.
    unsafe { each(vec, n, one) }
}
