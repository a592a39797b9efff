//! A list of `poll` that has become longer than the kernel accepts (`RLIMIT_NOFILE` entries), because some sockets have two entries: those are in an epoll set,
//! which is one entry.
//!
//! # Safety
//!
//! As `poll(2)`.

use libc::{c_int, epoll_event, nfds_t, pollfd};
use std::os::fd::{FromRawFd, OwnedFd};

use crate::sets::control;
use crate::{hidden, kernel, next};

/// Closed by [`hidden`].
struct Set(c_int);

impl Drop for Set {
    fn drop(&mut self) {
        hidden::close(self.0);
    }
}

fn set() -> Option<Set> {
    // SAFETY: makes a descriptor.
    let fd = unsafe { next::epoll_create1(libc::EPOLL_CLOEXEC) };
    // SAFETY: it is ours.
    (fd >= 0)
        .then(|| unsafe { OwnedFd::from_raw_fd(fd) })
        .and_then(hidden::hide)
        .map(Set)
}

/// Asks by `call` for entries of which neighbours with the same number in `of` belong together, and puts the answers there. `None`: there is no descriptor for
/// a set.
pub(crate) fn ask(
    fds: &mut [pollfd],
    of: &[usize],
    call: impl FnOnce(*mut pollfd, nfds_t) -> c_int,
) -> Option<c_int> {
    let set = set()?;
    let mut short = vec![kernel::entry(set.0, libc::POLLIN)];
    let mut place_of = vec![0];
    for (at, one) in fds.iter_mut().enumerate() {
        one.revents = 0;
        let is_double = at > 0 && of[at - 1] == of[at] || of.get(at + 1) == Some(&of[at]);
        let events = u32::from(one.events.cast_unsigned());
        // A descriptor that is in the set already has an entry of its own here.
        if !is_double || control(set.0, libc::EPOLL_CTL_ADD, one.fd, events, at as u64) != 0 {
            short.push(*one);
            place_of.push(at);
        }
    }
    let rc = call(short.as_mut_ptr(), short.len() as nfds_t);
    if rc <= 0 {
        return Some(rc);
    }
    for (one, &at) in short.iter().zip(&place_of).skip(1) {
        fds[at].revents = one.revents;
    }
    let mut events = vec![epoll_event { events: 0, u64: 0 }; fds.len()];
    // SAFETY: room for an event of each entry.
    let n = unsafe { next::epoll_wait(set.0, events.as_mut_ptr(), events.len() as c_int, 0) };
    for event in &events[..n.max(0) as usize] {
        fds[event.u64 as usize].revents = event.events as i16;
    }
    Some(rc)
}
