//! `rpoll` and `rselect`, over rsockets and system descriptors together.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use libc::{fd_set, nfds_t, pollfd, timeval};
use rustix::event::PollFlags;
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_rsockets::poll::{Entry as Place, What, poll};

use super::table::{Entry, find};
use crate::call::run;
use crate::select;

/// `rpoll`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rpoll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: the caller's promise.
    run(|| unsafe { select::poll(fds, nfds, |fds| wait(fds, timeout)) })
}

/// Waits until something is ready, and returns the number of ready entries.
pub(super) fn wait(fds: &mut [pollfd], timeout: Option<Duration>) -> Result<c_int, Errno> {
    let ours: SmallVec<[Option<Arc<Entry>>; 8]> = fds.iter().map(|fd| find(fd.fd).ok()).collect();
    let mut places: SmallVec<[Place<'_>; 8]> = fds
        .iter()
        .zip(&ours)
        .map(|(fd, ours)| Place {
            what: match ours {
                Some(entry) => What::Socket(entry.socket.pollable()),
                // SAFETY: kept for the call only; a number that is not a descriptor is reported as such.
                None if fd.fd >= 0 => What::Fd(unsafe { BorrowedFd::borrow_raw(fd.fd) }),
                None => What::Nothing,
            },
            wanted: PollFlags::from_bits_retain(fd.events as u16),
            ready: PollFlags::empty(),
        })
        .collect();
    let count = poll(&mut places, timeout)?;
    for (fd, place) in fds.iter_mut().zip(&places) {
        fd.revents = place.ready.bits() as i16;
    }
    Ok(count as c_int)
}

/// `rselect`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rselect(
    nfds: c_int,
    readfds: *mut fd_set,
    writefds: *mut fd_set,
    exceptfds: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    run(|| {
        let limit = if timeout.is_null() {
            None
        } else {
            // SAFETY: the caller's promise.
            let time = unsafe { timeout.read() };
            let (Ok(seconds), Ok(micros)) =
                (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec))
            else {
                return Err(Errno::INVAL);
            };
            let limit = Duration::from_secs(seconds).checked_add(Duration::from_micros(micros));
            Some(limit.unwrap_or(Duration::MAX))
        };
        // SAFETY: the caller's promise.
        unsafe { select::select(nfds, readfds, writefds, exceptfds, |fds| wait(fds, limit)) }
    })
}
