//! `exs_sync_poll` and `exs_sync_select`, for our sockets and kernel descriptors together.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{
    POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLRDNORM, POLLWRNORM, fd_set, nfds_t, pollfd,
    timeval,
};
use rustix::io::Errno;
use weft_exs::Ready;
use weft_sys::spin::SpinOrSleep;

use super::queue::timeout;
use super::state::state;
use super::table::{Entry, Found};
use crate::call::system;
use crate::{option, select};

thread_local! {
    /// Whether a call of this thread polls before it sleeps. A message to a sleeping thread must wake first the engine, then the thread.
    static SPINS: SpinOrSleep = SpinOrSleep::default();
}

const READ: i16 = POLLIN | POLLRDNORM;
const WRITE: i16 = POLLOUT | POLLWRNORM;

/// `exs_sync_poll`
pub unsafe fn poll(fds: *mut pollfd, n: nfds_t, time: c_int) -> Result<c_int, Errno> {
    let limit = u64::try_from(time).ok().map(Duration::from_millis);
    // SAFETY: the caller's promise.
    unsafe { select::poll(fds, n, |fds| wait(fds, limit)) }
}

/// Waits until a descriptor is ready. Returns the number of ready ones.
fn wait(fds: &mut [pollfd], limit: Option<Duration>) -> Result<c_int, Errno> {
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    for fd in &mut *fds {
        fd.revents = 0;
    }
    let ours: Vec<Option<Arc<Entry>>> = fds
        .iter()
        .map(|fd| match state().sockets.find(fd.fd) {
            Ok(Found::Exs(entry)) => Some(entry),
            _ => None,
        })
        .collect();
    if ours.iter().all(Option::is_none) {
        return system_poll(fds, until);
    }
    let mut begun = None;
    loop {
        // Check ours and the kernel's without waiting.
        let ready = look(fds, &ours)?;
        if ready > 0 || until.is_some_and(|until| until <= Instant::now()) {
            if let Some(begun) = begun.filter(|_| ready > 0) {
                SPINS.with(|spins| spins.slept(&begun));
            }
            return Ok(ready);
        }
        if begun.is_none() {
            let mut found = Ok(0);
            let spun = SPINS.with(|spins| {
                spins.spin(|| {
                    found = look(fds, &ours);
                    !matches!(found, Ok(0))
                })
            });
            match spun {
                Ok(()) => return found,
                Err(waits) => begun = Some(waits),
            }
        }
        sleep(fds, &ours, until)?;
    }
}

/// Sleeps until a descriptor may be ready.
fn sleep(fds: &[pollfd], ours: &[Option<Arc<Entry>>], until: Option<Instant>) -> Result<(), Errno> {
    let mut all = of_system(fds, ours);
    let mut readable = |fd: BorrowedFd<'_>| {
        all.push(pollfd {
            fd: fd.as_raw_fd(),
            events: POLLIN,
            revents: 0,
        });
    };
    let mut kept = Vec::new();
    for (entry, fd) in ours.iter().zip(fds) {
        let Some(entry) = entry else { continue };
        if fd.events & READ != 0 && entry.connecting().is_none() {
            readable(entry.socket.as_fd());
        }
        let other = match entry.connecting() {
            Some(end) => end,
            // Conditions that the socket's descriptor does not show.
            None if fd.events & READ == 0 || fd.events & WRITE != 0 => {
                match entry.watch(fd.events & WRITE != 0) {
                    Ok(watch) => watch,
                    // It was closed, or has ended: the next check finds that.
                    Err(_) => return Ok(()),
                }
            }
            None => continue,
        };
        readable(other.as_fd());
        kept.push(other);
    }
    system_poll(&mut all, until).map(drop)
}

/// The kernel descriptors among them, without ours.
fn of_system(fds: &[pollfd], ours: &[Option<Arc<Entry>>]) -> Vec<pollfd> {
    fds.iter()
        .zip(ours)
        .map(|(fd, ours)| pollfd {
            fd: if ours.is_some() { -1 } else { fd.fd },
            events: fd.events,
            revents: 0,
        })
        .collect()
}

/// Checks all of them once. Returns the number of ready ones.
fn look(fds: &mut [pollfd], ours: &[Option<Arc<Entry>>]) -> Result<c_int, Errno> {
    if ours.iter().all(Option::is_some) {
        return Ok(ours_ready(fds, ours) as c_int);
    }
    let mut theirs = of_system(fds, ours);
    let count = system_poll(&mut theirs, Some(Instant::now()))? as usize;
    for ((fd, theirs), ours) in fds.iter_mut().zip(&theirs).zip(ours) {
        if ours.is_none() {
            fd.revents = theirs.revents;
        }
    }
    Ok((count + ours_ready(fds, ours)) as c_int)
}

fn told(ready: Ready, events: i16) -> i16 {
    let mut out = 0;
    if ready.contains(Ready::IN) {
        out |= events & READ;
    }
    if ready.contains(Ready::OUT) {
        out |= events & WRITE;
    }
    if ready.contains(Ready::ERR) {
        out |= POLLERR;
    }
    if ready.contains(Ready::HUP) {
        out |= POLLHUP;
    }
    out
}

/// True if it neither listens nor is connected.
fn unconnected(entry: &Entry) -> bool {
    !entry.listening.load(Ordering::Acquire) && entry.socket.peer_addr() == Err(Errno::NOTCONN)
}

/// Checks our sockets. Returns the number of ready ones.
fn ours_ready(fds: &mut [pollfd], ours: &[Option<Arc<Entry>>]) -> usize {
    let mut count = 0;
    for (fd, entry) in fds.iter_mut().zip(ours) {
        let Some(entry) = entry else { continue };
        if entry.is_closed() {
            // Closed by another thread.
            fd.revents = POLLNVAL;
            count += 1;
            continue;
        }
        if entry.connecting().is_some() {
            fd.revents = 0;
            continue;
        }
        let mut ready = entry.socket.ready();
        if entry.read_shut.load(Ordering::Acquire) {
            ready |= Ready::IN;
        }
        if !entry.has_room() {
            ready.remove(Ready::OUT);
        }
        if unconnected(entry) {
            // The same condition as for kernel sockets.
            ready |= Ready::OUT | Ready::HUP;
            ready.set(Ready::ERR, entry.error.load(Ordering::Acquire) != 0);
        }
        fd.revents = told(ready, fd.events);
        count += usize::from(fd.revents != 0);
    }
    count
}

/// Waits until a descriptor is readable.
pub(super) fn await_readable(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut fds = [pollfd {
        fd: fd.as_raw_fd(),
        events: POLLIN,
        revents: 0,
    }];
    system_poll(&mut fds, None).map(drop)
}

/// The kernel's `poll`.
fn system_poll(fds: &mut [pollfd], until: Option<Instant>) -> Result<c_int, Errno> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let mut time = left.map(|left| libc::timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let time = time
        .as_mut()
        .map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the array and its length; the time is ours.
    let count = unsafe {
        system(
            libc::SYS_ppoll,
            [fds.as_mut_ptr() as usize, fds.len(), time as usize, 0, 0, 0],
        )
    }?;
    Ok(count as c_int)
}

/// `exs_sync_select`
pub unsafe fn select(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    time: *mut timeval,
) -> Result<c_int, Errno> {
    // SAFETY: the caller's promise.
    let limit = unsafe { timeout(time) }?;
    let begun = Instant::now();
    // SAFETY: the caller's promise.
    let count = unsafe { select::select(n, read, write, except, |fds| wait(fds, limit)) }?;
    if let Some(limit) = limit {
        // As Linux does: store the remaining time.
        let left = limit.saturating_sub(begun.elapsed());
        // SAFETY: not null, since there is a limit; the caller's promise.
        unsafe { time.write(option::time(Some(left))) };
    }
    Ok(count)
}
