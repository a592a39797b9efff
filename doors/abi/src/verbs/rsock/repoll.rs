//! `repoll_create`, `repoll_ctl`, `repoll_wait`: sets of rsockets and system descriptors together, as `epoll` has them. Each wait checks all members, as
//! `rpoll` does. Edge-triggered members are level-triggered: a member is reported as long as it is ready.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::IntoRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libc::{epoll_event, pollfd};
use rustix::event::epoll;
use rustix::io::Errno;

use super::wait::wait;
use crate::call::run;
use crate::verbs::object::{Inherited, PerFork, lock};

/// The events that `poll` and `epoll` have in common, with the same values.
const READINESS: u32 = (libc::EPOLLIN
    | libc::EPOLLPRI
    | libc::EPOLLOUT
    | libc::EPOLLRDHUP
    | libc::EPOLLERR
    | libc::EPOLLHUP) as u32;
/// The longest wait while another thread may change the set.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
struct Member {
    events: u32,
    data: u64,
}

/// The members of a set, by number.
type Set = Mutex<BTreeMap<c_int, Member>>;

/// The sets of this process, by number. A set whose number the program has closed stays until another set has the number.
#[derive(Default)]
struct Sets(Mutex<BTreeMap<c_int, Arc<Set>>>);

impl Inherited for Sets {}

static SETS: PerFork<Sets> = PerFork::new();

fn find(epfd: c_int) -> Result<Arc<Set>, Errno> {
    let sets = lock(&SETS.get().0);
    sets.get(&epfd).map(Arc::clone).ok_or(Errno::BADF)
}

/// `repoll_create`
///
/// # Safety
/// None is needed.
pub unsafe fn repoll_create(flags: c_int) -> c_int {
    run(|| {
        let flags = epoll::CreateFlags::from_bits(flags as u32).ok_or(Errno::INVAL)?;
        // This descriptor's number is the set's: the program ends the set by closing it.
        let number = epoll::create(flags)?.into_raw_fd();
        lock(&SETS.get().0).insert(number, Arc::default());
        Ok(number)
    })
}

/// `repoll_ctl`
///
/// # Safety
/// As `epoll_ctl(2)`: an event at `event`, but for `EPOLL_CTL_DEL`.
pub unsafe fn repoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    run(|| {
        let set = find(epfd)?;
        if fd == epfd || fd < 0 {
            return Err(Errno::INVAL);
        }
        let mut members = lock(&set);
        if op == libc::EPOLL_CTL_DEL {
            return members.remove(&fd).map(|_| 0).ok_or(Errno::NOENT);
        }
        if event.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise; the struct is packed on some machines.
        let event = unsafe { event.read_unaligned() };
        let member = Member {
            events: event.events,
            data: event.u64,
        };
        match (op, members.contains_key(&fd)) {
            (libc::EPOLL_CTL_ADD, true) => return Err(Errno::EXIST),
            (libc::EPOLL_CTL_MOD, false) => return Err(Errno::NOENT),
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _) => {}
            _ => return Err(Errno::INVAL),
        }
        members.insert(fd, member);
        Ok(0)
    })
}

/// Checks once, no longer than `limit`: returns at most `room` ready members with their events.
fn look(set: &Set, room: usize, limit: Duration) -> Result<Vec<epoll_event>, Errno> {
    let mut fds: Vec<pollfd> = lock(set)
        .iter()
        .filter(|(_, member)| member.events & READINESS != 0)
        .map(|(fd, member)| pollfd {
            fd: *fd,
            events: (member.events & READINESS) as i16,
            revents: 0,
        })
        .collect();
    wait(&mut fds, Some(limit))?;
    let mut members = lock(set);
    let mut ready = Vec::new();
    for fd in &fds {
        let told = fd.revents as u16 as u32 & READINESS;
        if fd.revents & libc::POLLNVAL != 0 {
            // The program has closed it; `epoll` removes it by itself.
            members.remove(&fd.fd);
            continue;
        }
        // A member that was removed meanwhile, or was already reported once, is not reported.
        let Some(member) = members.get_mut(&fd.fd) else {
            continue;
        };
        if told == 0 || member.events & READINESS == 0 || ready.len() == room {
            continue;
        }
        ready.push(epoll_event {
            events: told,
            u64: member.data,
        });
        if member.events & libc::EPOLLONESHOT as u32 != 0 {
            member.events &= !READINESS;
        }
    }
    Ok(ready)
}

/// `repoll_wait`
///
/// # Safety
/// As `epoll_wait(2)`: room for `maxevents` events at `events`.
pub unsafe fn repoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    maxevents: c_int,
    timeout: c_int,
) -> c_int {
    run(|| {
        let set = find(epfd)?;
        let room = usize::try_from(maxevents).map_err(|_| Errno::INVAL)?;
        if room == 0 {
            return Err(Errno::INVAL);
        }
        if events.is_null() {
            return Err(Errno::FAULT);
        }
        let begun = std::time::Instant::now();
        let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
        loop {
            let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
            let ready = look(&set, room, left.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN))?;
            if ready.is_empty() && left.is_none_or(|left| !left.is_zero()) {
                continue;
            }
            for (i, event) in ready.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { events.add(i).write_unaligned(*event) };
            }
            return Ok(ready.len() as c_int);
        }
    })
}
