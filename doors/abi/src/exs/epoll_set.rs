//! The extended sockets of an epoll descriptor. Its other descriptors are with the kernel.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libc::{EPOLLET, EPOLLONESHOT, POLLERR, POLLHUP};
use rustix::io::Errno;
use weft_exs::Ready;

use super::table::{Bell, Edge, Entry, READ, WRITE, told};

/// One of the sockets, and what the program wants to know about it.
pub(super) struct Member {
    pub(super) fd: i32,
    entry: Weak<Entry>,
    /// `EPOLL*`.
    wanted: u32,
    data: u64,
    /// Reported once, with `EPOLLONESHOT`.
    disarmed: bool,
    /// With `EPOLLET`.
    edge: Option<Arc<Edge>>,
}

#[derive(Default)]
pub(super) struct Members {
    all: Vec<Member>,
    /// Where the next report begins, so that each member gets its turn.
    next: usize,
}

#[derive(Default)]
pub(crate) struct Set {
    members: Mutex<Members>,
    /// Rung when the members change, or an edge is over.
    pub(super) bell: Arc<Bell>,
    /// The kernel's descriptors are reported first, at every second wait.
    pub(super) system_first: AtomicBool,
}

/// A member that a wait looks at.
pub(super) struct Watched {
    pub(super) entry: Arc<Entry>,
    pub(super) fd: i32,
    pub(super) events: i16,
    pub(super) hidden: Ready,
}

impl Set {
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `EEXIST`
    pub(super) fn add(
        &self,
        fd: i32,
        entry: &Arc<Entry>,
        wanted: u32,
        data: u64,
    ) -> Result<(), Errno> {
        let mut members = self.members();
        members.all.retain(|member| member.entry().is_some());
        let is = |member: &Member| member.fd == fd && member.is_of(entry);
        if members.all.iter().any(is) {
            return Err(Errno::EXIST);
        }
        let member = Member::new(fd, entry, (wanted, data), &self.bell);
        members.all.push(member);
        self.bell.ring();
        Ok(())
    }

    /// # Errors
    /// `ENOENT`
    pub(super) fn change(
        &self,
        fd: i32,
        entry: &Arc<Entry>,
        to: Option<(u32, u64)>,
    ) -> Result<(), Errno> {
        let mut members = self.members();
        let is = |member: &Member| member.fd == fd && member.is_of(entry);
        let at = members.all.iter().position(is).ok_or(Errno::NOENT)?;
        match to {
            Some(to) => members.all[at] = Member::new(fd, entry, to, &self.bell),
            None => drop(members.all.remove(at)),
        }
        self.bell.ring();
        Ok(())
    }

    /// The members that may be reported. Closed sockets leave the set.
    pub(super) fn watched(&self) -> Vec<Watched> {
        let mut members = self.members();
        members.all.retain(|member| member.entry().is_some());
        let armed = members.all.iter().filter(|member| !member.disarmed);
        armed.filter_map(Member::watched).collect()
    }

    /// Reports up to `most` members in these conditions, as `EPOLL*` and the program's data.
    pub(super) fn report(
        &self,
        most: usize,
        conditions: impl Fn(&Entry) -> Ready,
        mut out: impl FnMut(u32, u64),
    ) -> usize {
        let mut members = self.members();
        let (n, start, mut count) = (members.all.len(), members.next, 0);
        for turn in 0..n {
            if count == most {
                break;
            }
            let at = (start + turn) % n;
            let member = &mut members.all[at];
            let Some(entry) = member.entry().filter(|_| !member.disarmed) else {
                continue;
            };
            let events = member.told(|| conditions(&entry));
            if events != 0 {
                member.disarmed = member.wanted & EPOLLONESHOT as u32 != 0;
                out(events, member.data);
                count += 1;
                members.next = at + 1;
            }
        }
        count
    }
}

impl Member {
    fn new(fd: i32, entry: &Arc<Entry>, (wanted, data): (u32, u64), bell: &Arc<Bell>) -> Member {
        let is_edge = wanted & EPOLLET as u32 != 0;
        let edge = is_edge.then(|| Arc::new(Edge::new(Arc::clone(bell))));
        if let Some(edge) = &edge {
            entry.tell(edge);
        }
        Member {
            fd,
            entry: Arc::downgrade(entry),
            wanted,
            data,
            disarmed: false,
            edge,
        }
    }

    /// Its socket, unless the program has closed it.
    fn entry(&self) -> Option<Arc<Entry>> {
        self.entry.upgrade().filter(|entry| !entry.is_closed())
    }

    fn is_of(&self, entry: &Arc<Entry>) -> bool {
        std::ptr::eq(self.entry.as_ptr(), Arc::as_ptr(entry))
    }

    fn hidden(&self) -> Ready {
        let edge = self.edge.as_ref();
        edge.map_or(Ready::empty(), |edge| edge.seen().conditions)
    }

    fn watched(&self) -> Option<Watched> {
        Some(Watched {
            entry: self.entry()?,
            fd: self.fd,
            // The bits of epoll that poll has too have its values.
            events: self.wanted as i16 & !(POLLERR | POLLHUP),
            hidden: self.hidden(),
        })
    }

    /// Which of the conditions are reported now.
    fn told(&self, conditions: impl FnOnce() -> Ready) -> u32 {
        // Before the look: what a call ends after this is not hidden.
        let before = self.edge.as_ref().map(|edge| (edge, edge.seen()));
        let ready = conditions();
        if let Some((edge, _)) = before {
            edge.ended(!ready);
        }
        let new = ready & !self.hidden();
        let events = told(new, self.wanted as i16);
        if events != 0
            && let Some((edge, before)) = before
        {
            let mut said = Ready::empty();
            for (bit, condition) in [
                (READ, Ready::IN),
                (WRITE, Ready::OUT),
                (POLLERR, Ready::ERR),
                (POLLHUP, Ready::HUP),
            ] {
                said.set(condition, events & bit != 0);
            }
            edge.saw(said, before);
        }
        u32::from(events as u16)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use libc::{EPOLLIN, EPOLLOUT};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use weft_exs::{Kind, Socket};

    use super::super::state::state;
    use super::super::table::Found;
    use super::*;

    fn set_with(wanted: i32) -> (Set, Arc<Entry>) {
        let socket = Socket::new(&state().context().unwrap(), false, Kind::Stream);
        let fd = state()
            .sockets
            .insert(socket.unwrap(), false, true)
            .unwrap();
        let Ok(Found::Exs(entry)) = state().sockets.find(fd) else {
            panic!("{fd} is no socket")
        };
        let set = Set::default();
        set.add(fd, &entry, (wanted | EPOLLET) as u32, 0).unwrap();
        (set, entry)
    }

    fn report(set: &Set, conditions: impl Fn(&Entry) -> Ready) -> usize {
        set.report(1, conditions, |_, _| ())
    }

    #[test]
    fn a_call_during_a_report_makes_what_follows_new() {
        let (set, _entry) = set_with(EPOLLOUT);
        let fills = |entry: &Entry| {
            // Another thread's send takes the room that was just seen.
            entry.used(Ready::OUT);
            Ready::OUT
        };
        assert_eq!(report(&set, fills), 1);
        assert_eq!(report(&set, |_| Ready::OUT), 1, "there is room again");
        assert_eq!(report(&set, |_| Ready::OUT), 0);
    }

    #[test]
    fn the_end_of_a_condition_wakes_who_waits_beside_it() {
        let (set, _entry) = set_with(EPOLLIN);
        assert_eq!(report(&set, |_| Ready::IN), 1);
        let bell = set.bell.wait_at().unwrap();
        assert_eq!(report(&set, |_| Ready::empty()), 0);
        let mut fds = [PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1));
    }
}
