//! `exs_sync_poll`, `exs_sync_select` and their like, for our sockets and kernel descriptors together.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{POLLIN, POLLNVAL, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use rustix::io::Errno;
use weft_exs::Ready;
use weft_sys::spin::SpinOrSleep;

use super::queue::timeout;
use super::state::state;
use super::table::{Entry, Found, READ, WRITE, told};
use crate::call::system;
use crate::{option, select};

thread_local! {
    /// Whether a call of this thread polls before it sleeps. A message to a sleeping thread must wake first the engine, then the thread.
    static SPINS: SpinOrSleep = SpinOrSleep::default();
}

/// The bytes of the kernel's signal mask.
pub(super) const MASK_LEN: usize = 8;

/// How long a wait sleeps when the process can have no more descriptors to wait at.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// One of our sockets among the descriptors of a call.
pub(super) struct Ours {
    pub(super) entry: Arc<Entry>,
    /// Conditions that do not count.
    pub(super) hidden: Ready,
}

/// How long a call waits, and its signal mask; null: the thread's.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    pub(super) until: Option<Instant>,
    pub(super) mask: *const sigset_t,
}

impl Patience {
    pub(super) fn new(limit: Option<Duration>, mask: *const sigset_t) -> Patience {
        Patience {
            until: limit.and_then(|limit| Instant::now().checked_add(limit)),
            mask,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// For a wait that cannot hear of everything: it looks again soon.
    pub(super) fn short(self) -> Patience {
        let soon = Instant::now() + LOOK_AGAIN;
        Patience {
            until: Some(self.until.map_or(soon, |until| until.min(soon))),
            ..self
        }
    }

    /// For a check without waiting.
    fn none() -> Patience {
        Patience {
            until: Some(Instant::now()),
            mask: std::ptr::null(),
        }
    }
}

/// # Errors
/// `EINVAL`
///
/// # Safety
/// `time` is null or readable.
pub(super) unsafe fn timespec_limit(time: *const timespec) -> Result<Option<Duration>, Errno> {
    if time.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let time = unsafe { time.read_unaligned() };
    match (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec)) {
        (Ok(seconds), Ok(nanos @ 0..1_000_000_000)) => Ok(Some(Duration::new(seconds, nanos))),
        _ => Err(Errno::INVAL),
    }
}

pub(super) fn millis_limit(time: c_int) -> Option<Duration> {
    u64::try_from(time).ok().map(Duration::from_millis)
}

/// `exs_sync_poll`
pub unsafe fn poll(fds: *mut pollfd, n: nfds_t, time: c_int) -> Result<c_int, Errno> {
    let patience = Patience::new(millis_limit(time), std::ptr::null());
    // SAFETY: the caller's promise.
    unsafe { select::poll(fds, n, |fds| wait_for_any(fds, patience)) }
}

/// `exs_sync_ppoll`
pub unsafe fn ppoll(
    fds: *mut pollfd,
    n: nfds_t,
    time: *const timespec,
    mask: *const sigset_t,
) -> Result<c_int, Errno> {
    // SAFETY: the caller's promise.
    let patience = Patience::new(unsafe { timespec_limit(time) }?, mask);
    // SAFETY: the caller's promise.
    unsafe { select::poll(fds, n, |fds| wait_for_any(fds, patience)) }
}

/// Waits until a descriptor is ready. Returns the number of ready ones.
fn wait_for_any(fds: &mut [pollfd], patience: Patience) -> Result<c_int, Errno> {
    let ours: Vec<Option<Ours>> = fds
        .iter()
        .map(|fd| match state().sockets.find(fd.fd) {
            Ok(Found::Exs(entry)) => Some(Ours {
                entry,
                hidden: Ready::empty(),
            }),
            _ => None,
        })
        .collect();
    wait(fds, &ours, patience)
}

/// As [`wait_for_any`], for known sockets of ours.
pub(super) fn wait(
    fds: &mut [pollfd],
    ours: &[Option<Ours>],
    patience: Patience,
) -> Result<c_int, Errno> {
    for fd in &mut *fds {
        fd.revents = 0;
    }
    if ours.iter().all(Option::is_none) {
        return system_poll(fds, patience);
    }
    let mut begun = None;
    loop {
        // Check ours and the kernel's without waiting.
        let ready = look(fds, ours)?;
        if ready > 0 || patience.is_over() {
            if let Some(begun) = begun.filter(|_| ready > 0) {
                SPINS.with(|spins| spins.slept(&begun));
            }
            if ready == 0 && !patience.mask.is_null() {
                // As in the kernel, signals that only the mask admits come in also without a wait.
                return system_poll(&mut [], patience);
            }
            return Ok(ready);
        }
        if begun.is_none() {
            let mut found = Ok(0);
            let spun = SPINS.with(|spins| {
                spins.spin(|| {
                    found = look(fds, ours);
                    !matches!(found, Ok(0))
                })
            });
            match spun {
                Ok(()) => return found,
                Err(waits) => begun = Some(waits),
            }
        }
        sleep(fds, ours, patience)?;
    }
}

/// Sleeps until a descriptor may be ready.
fn sleep(fds: &[pollfd], ours: &[Option<Ours>], mut patience: Patience) -> Result<(), Errno> {
    let mut all = of_system(fds, ours);
    let mut readable = |fd: BorrowedFd<'_>| {
        all.push(pollfd {
            fd: fd.as_raw_fd(),
            events: POLLIN,
            revents: 0,
        });
    };
    let mut kept = Vec::new();
    for (ours, fd) in ours.iter().zip(fds) {
        let Some(Ours { entry, hidden }) = ours else {
            continue;
        };
        let reads = fd.events & READ != 0 && !hidden.contains(Ready::IN);
        let writes = fd.events & WRITE != 0 && !hidden.contains(Ready::OUT);
        if reads && entry.connecting().is_none() {
            readable(entry.socket.as_fd());
        }
        let other = match entry.connecting() {
            Some(end) => end,
            // Nothing follows the end that its descriptor does not show.
            None if hidden.intersects(Ready::ERR | Ready::HUP) => continue,
            // Conditions that the socket's descriptor does not show.
            None if !reads || writes => match entry.watch(writes) {
                Ok(watch) => watch,
                // It was closed, or has ended: the next check finds that.
                Err(Errno::BADF | Errno::NOTCONN) => return Ok(()),
                Err(_) => {
                    patience = patience.short();
                    continue;
                }
            },
            None => continue,
        };
        readable(other.as_fd());
        kept.push(other);
    }
    system_poll(&mut all, patience).map(drop)
}

/// The kernel descriptors among them, without ours.
fn of_system(fds: &[pollfd], ours: &[Option<Ours>]) -> Vec<pollfd> {
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
fn look(fds: &mut [pollfd], ours: &[Option<Ours>]) -> Result<c_int, Errno> {
    if ours.iter().all(Option::is_some) {
        return Ok(ours_ready(fds, ours) as c_int);
    }
    let mut theirs = of_system(fds, ours);
    let count = system_poll(&mut theirs, Patience::none())? as usize;
    for ((fd, theirs), ours) in fds.iter_mut().zip(&theirs).zip(ours) {
        if ours.is_none() {
            fd.revents = theirs.revents;
        }
    }
    Ok((count + ours_ready(fds, ours)) as c_int)
}

/// True if it neither listens nor is connected.
fn unconnected(entry: &Entry) -> bool {
    !entry.listening.load(Ordering::Acquire) && entry.socket.peer_addr() == Err(Errno::NOTCONN)
}

/// The conditions of one of our sockets now; none while it connects.
pub(super) fn conditions(entry: &Entry) -> Ready {
    if entry.connecting().is_some() {
        return Ready::empty();
    }
    let mut ready = entry.socket.ready();
    if !entry.has_room() {
        ready.remove(Ready::OUT);
    }
    if unconnected(entry) {
        // The same condition as for kernel sockets.
        ready |= Ready::OUT | Ready::HUP;
        ready.set(Ready::ERR, entry.error.load(Ordering::Acquire) != 0);
    }
    ready
}

/// Checks our sockets. Returns the number of ready ones.
fn ours_ready(fds: &mut [pollfd], ours: &[Option<Ours>]) -> usize {
    let mut count = 0;
    for (fd, ours) in fds.iter_mut().zip(ours) {
        let Some(Ours { entry, hidden }) = ours else {
            continue;
        };
        fd.revents = if entry.is_closed() {
            // By another thread.
            POLLNVAL
        } else {
            told(conditions(entry) & !*hidden, fd.events)
        };
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
    system_poll(&mut fds, Patience::new(None, std::ptr::null())).map(drop)
}

/// The kernel's `poll`.
fn system_poll(fds: &mut [pollfd], patience: Patience) -> Result<c_int, Errno> {
    let until = patience.until;
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let mut time = left.map(|left| timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let time = time
        .as_mut()
        .map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let (at, n, mask) = (fds.as_mut_ptr() as usize, fds.len(), patience.mask as usize);
    // SAFETY: the array and its length; the time is ours, the mask the program's.
    let count = unsafe { system(libc::SYS_ppoll, [at, n, time as usize, mask, MASK_LEN, 0]) }?;
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
    let patience = Patience::new(limit, std::ptr::null());
    // SAFETY: the caller's promise.
    let count =
        unsafe { select::select(n, read, write, except, |fds| wait_for_any(fds, patience)) }?;
    if let Some(limit) = limit {
        // As Linux does: store the remaining time.
        let left = limit.saturating_sub(begun.elapsed());
        // SAFETY: not null, since there is a limit; the caller's promise.
        unsafe { time.write(option::time(Some(left))) };
    }
    Ok(count)
}

/// `exs_sync_pselect`
pub unsafe fn pselect(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    time: *const timespec,
    mask: *const sigset_t,
) -> Result<c_int, Errno> {
    // SAFETY: the caller's promise.
    let patience = Patience::new(unsafe { timespec_limit(time) }?, mask);
    // SAFETY: the caller's promise.
    unsafe { select::select(n, read, write, except, |fds| wait_for_any(fds, patience)) }
}
