//! `rpoll` and `rselect`, over sockets of ours and descriptors of the system together.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use libc::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, fd_set, nfds_t, pollfd, timeval};
use rustix::event::PollFlags;
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_rsockets::poll::{Entry as Place, What, poll};

use super::table::{Entry, find};
use crate::call::run;

/// Descriptors of one call at most: no program has more open.
const MOST: usize = 1 << 20;

/// `rpoll`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rpoll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    run(|| {
        let n = usize::try_from(nfds).map_err(|_| Errno::INVAL)?;
        if n > MOST {
            return Err(Errno::INVAL);
        }
        if fds.is_null() && n > 0 {
            return Err(Errno::FAULT);
        }
        // Copies: another thread may look at the originals.
        let mut wanted: SmallVec<[pollfd; 8]> = (0..n)
            // SAFETY: the caller's promise.
            .map(|i| unsafe { fds.add(i).read() })
            .collect();
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        let count = wait(&mut wanted, timeout)?;
        for (i, fd) in wanted.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { (&raw mut (*fds.add(i)).revents).write(fd.revents) };
        }
        Ok(count)
    })
}

/// Waits until something is ready, and says how many are.
fn wait(fds: &mut [pollfd], timeout: Option<Duration>) -> Result<c_int, Errno> {
    let ours: SmallVec<[Option<Arc<Entry>>; 8]> = fds.iter().map(|fd| find(fd.fd).ok()).collect();
    let mut places: SmallVec<[Place<'_>; 8]> = fds
        .iter()
        .zip(&ours)
        .map(|(fd, ours)| Place {
            what: match ours {
                Some(entry) => What::Socket(&entry.socket),
                // SAFETY: kept for the call only; a number that is no descriptor is told as such.
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
        let n = match usize::try_from(nfds) {
            Ok(n) if n <= libc::FD_SETSIZE => n,
            _ => return Err(Errno::INVAL),
        };
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
        let sets = [
            (readfds, POLLIN, POLLIN | POLLHUP | POLLERR),
            (writefds, POLLOUT, POLLOUT | POLLERR),
            (exceptfds, POLLPRI, POLLPRI),
        ];
        let mut fds: SmallVec<[pollfd; 8]> = SmallVec::new();
        for fd in 0..n as c_int {
            let mut events = 0;
            for (set, event, _) in sets {
                // SAFETY: null, or the caller's set, and `fd` is in its range.
                if !set.is_null() && unsafe { libc::FD_ISSET(fd, set) } {
                    events |= event;
                }
            }
            if events != 0 {
                fds.push(pollfd {
                    fd,
                    events,
                    revents: 0,
                });
            }
        }
        wait(&mut fds, limit)?;
        if fds.iter().any(|fd| fd.revents & POLLNVAL != 0) {
            return Err(Errno::BADF);
        }
        let mut count = 0;
        for fd in &fds {
            for (set, event, any) in sets {
                if fd.events & event == 0 {
                    continue;
                }
                if fd.revents & any != 0 {
                    count += 1;
                } else {
                    // SAFETY: the descriptor was found in this set.
                    unsafe { libc::FD_CLR(fd.fd, set) };
                }
            }
        }
        Ok(count)
    })
}
