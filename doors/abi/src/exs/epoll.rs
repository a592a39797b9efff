//! `exs_sync_epoll_*`: the kernel's epoll for its descriptors, a set of the library for extended sockets, and waits for both.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, POLLIN, epoll_event, pollfd, sigset_t, timespec,
};
use rustix::io::Errno;

use super::epoll_set::Set;
use super::socket::on_system;
use super::state::state;
use super::sync_poll::{MASK_LEN, Ours, Patience, conditions, millis_limit, timespec_limit, wait};
use super::table::Found;

/// `exs_sync_epoll_create1`
pub fn epoll_create1(flags: c_int) -> Result<c_int, Errno> {
    // SAFETY: no pointers.
    let fd: c_int = unsafe { on_system(libc::SYS_epoll_create1, flags, &[]) }?;
    let mut epolls = state()
        .epolls
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    epolls.insert(fd, Arc::default());
    Ok(fd)
}

/// `exs_sync_epoll_create`
pub fn epoll_create(size: c_int) -> Result<c_int, Errno> {
    if size <= 0 {
        return Err(Errno::INVAL);
    }
    epoll_create1(0)
}

fn set_of(epfd: c_int) -> Option<Arc<Set>> {
    let epolls = state()
        .epolls
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    epolls.get(&epfd).cloned()
}

/// The object of `fd` has the number `new` too.
pub(super) fn epoll_duplicated(fd: c_int, new: c_int) {
    let mut epolls = state()
        .epolls
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    match epolls.get(&fd).cloned() {
        Some(set) => epolls.insert(new, set),
        None => epolls.remove(&new),
    };
}

/// `exs_sync_epoll_ctl`
pub unsafe fn epoll_ctl(
    epfd: c_int,
    what: c_int,
    fd: c_int,
    event: *const epoll_event,
) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        let args = [what as usize, fd as usize, event as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_epoll_ctl, epfd, &args) };
    };
    let Some(set) = set_of(epfd) else {
        // SAFETY: not kept; an invalid number gives EBADF.
        rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(epfd) })?;
        return Err(Errno::INVAL);
    };
    if what == EPOLL_CTL_DEL {
        return set.change(fd, &entry, None).map(|()| 0);
    }
    if event.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let event = unsafe { event.read_unaligned() };
    match what {
        EPOLL_CTL_ADD => set.add(fd, &entry, event.events, event.u64),
        EPOLL_CTL_MOD => set.change(fd, &entry, Some((event.events, event.u64))),
        _ => Err(Errno::INVAL),
    }
    .map(|()| 0)
}

/// `exs_sync_epoll_pwait`, and `exs_sync_epoll_wait` without a mask.
pub unsafe fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    time: c_int,
    mask: *const sigset_t,
) -> Result<c_int, Errno> {
    let patience = Patience::new(millis_limit(time), mask);
    if let Some(set) = set_of(epfd) {
        // SAFETY: the caller's promise.
        return unsafe { wait_for_set(epfd, &set, events, most, patience) };
    }
    let args = [
        events as usize,
        most as usize,
        time as usize,
        mask as usize,
        MASK_LEN,
    ];
    // SAFETY: the caller's promise.
    unsafe { on_system(libc::SYS_epoll_pwait, epfd, &args) }
}

/// `exs_sync_epoll_pwait2`
pub unsafe fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    time: *const timespec,
    mask: *const sigset_t,
) -> Result<c_int, Errno> {
    if let Some(set) = set_of(epfd) {
        // SAFETY: the caller's promise.
        let patience = Patience::new(unsafe { timespec_limit(time) }?, mask);
        // SAFETY: the caller's promise.
        return unsafe { wait_for_set(epfd, &set, events, most, patience) };
    }
    let args = [
        events as usize,
        most as usize,
        time as usize,
        mask as usize,
        MASK_LEN,
    ];
    // SAFETY: the caller's promise.
    unsafe { on_system(libc::SYS_epoll_pwait2, epfd, &args) }
}

/// # Safety
/// `events` has room for `most` events.
unsafe fn wait_for_set(
    epfd: c_int,
    set: &Set,
    events: *mut epoll_event,
    most: c_int,
    patience: Patience,
) -> Result<c_int, Errno> {
    let most = usize::try_from(most).unwrap_or(0);
    if most == 0 {
        return Err(Errno::INVAL);
    }
    if events.is_null() {
        return Err(Errno::FAULT);
    }
    loop {
        // SAFETY: the caller's promise.
        let count = unsafe { report(epfd, set, events, most) }?;
        if count > 0 || patience.is_over() {
            return Ok(count as c_int);
        }
        // The bell first: it tells of all that changes after this look.
        let bell = set.bell.wait_at().ok();
        let patience = match bell {
            Some(_) => patience,
            None => patience.short(),
        };
        let readable = |fd| pollfd {
            fd,
            events: POLLIN,
            revents: 0,
        };
        let bell = bell.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut fds = vec![readable(epfd), readable(bell)];
        let mut ours = vec![None, None];
        for watched in set.watched() {
            fds.push(pollfd {
                events: watched.events,
                ..readable(watched.fd)
            });
            ours.push(Some(Ours {
                entry: watched.entry,
                hidden: watched.hidden,
            }));
        }
        wait(&mut fds, &ours, patience)?;
    }
}

/// Reports what is ready, of the kernel's descriptors and of ours.
///
/// # Safety
/// `events` has room for `most` events.
unsafe fn report(
    epfd: c_int,
    set: &Set,
    events: *mut epoll_event,
    most: usize,
) -> Result<usize, Errno> {
    let system = |from: usize| -> Result<usize, Errno> {
        if from == most {
            return Ok(0);
        }
        // SAFETY: the caller's promise; `from` is less than `most`.
        let at = unsafe { events.add(from) };
        let args = [at as usize, most - from, 0, 0, MASK_LEN];
        // SAFETY: the caller's promise.
        unsafe { on_system(libc::SYS_epoll_pwait, epfd, &args) }
    };
    let ours = |from: usize| {
        let mut at = from;
        set.report(most - from, conditions, |conditions, data| {
            let event = epoll_event {
                events: conditions,
                u64: data,
            };
            // SAFETY: the caller's promise; at most `most - from` events follow `from`.
            unsafe { events.add(at).write_unaligned(event) };
            at += 1;
        })
    };
    // Either could leave no room for the other for ever.
    if set.system_first.fetch_xor(true, Ordering::Relaxed) {
        let count = system(0)?;
        return Ok(count + ours(count));
    }
    let count = ours(0);
    match system(count) {
        Err(errno) if count == 0 => Err(errno),
        more => Ok(count + more.unwrap_or(0)),
    }
}
