//! Readiness of UDP sockets: the socket and the bell of its rings are both in epoll sets and poll lists.
//!
//! # Safety
//!
//! As `epoll_ctl(2)`.

use libc::{c_int, c_short, epoll_event};
use std::sync::atomic::Ordering::SeqCst;

use super::{Dgram, Slow};
use crate::sets::{self, control};
use crate::{hidden, next, regs, signal, table};

/// A registration in an epoll set.
#[derive(Debug)]
pub(crate) struct Reg {
    set: c_int,
    /// The set's number, which ends confusion with a later one of the same descriptor.
    number: usize,
    fd: c_int,
    events: u32,
    data: u64,
    /// Our descriptor in the set (the bell or a duplicate), and its events.
    bell: Option<(c_int, u32)>,
}

const FIXED: u32 = (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const EDGE: u32 = libc::EPOLLET as u32;

/// Events to register the bell for.
fn wanted(events: u32) -> Option<u32> {
    let mut flags = EDGE | FIXED | libc::EPOLLWAKEUP as u32;
    if events & ONESHOT != 0 {
        // It stands for the socket, which can always be written to.
        flags |= sets::OUT;
    }
    (events & IN != 0).then_some(libc::EPOLLIN as u32 | events & flags)
}

/// Returns true if all sets that the socket is in can have the bell too.
pub(crate) fn can_ring(slow: &Slow) -> bool {
    slow.regs
        .iter()
        .all(|reg| sets::can_move(reg.set, reg.number, || reg.events & ONESHOT == 0))
}

impl Reg {
    fn is_in(&self) -> bool {
        sets::number(self.set) == self.number
    }

    /// Registers the bell together with the socket, as the program's registration now is.
    fn follow(&mut self, bell: c_int) {
        let want = wanted(self.events).filter(|_| bell >= 0);
        match (self.bell, want) {
            (None, Some(events)) => {
                let mut fd = bell;
                let mut rc = control(self.set, libc::EPOLL_CTL_ADD, fd, events, self.data);
                if rc != 0 && crate::errno() == libc::EEXIST {
                    // The same socket is in the set by another descriptor too.
                    let Some(own) = hidden::duplicate(bell) else {
                        return;
                    };
                    fd = own;
                    rc = control(self.set, libc::EPOLL_CTL_ADD, fd, events, self.data);
                }
                if rc == 0 {
                    self.bell = Some((fd, events));
                    sets::count_mixed(1);
                }
            }
            (Some((fd, _)), Some(events)) => {
                control(self.set, libc::EPOLL_CTL_MOD, fd, events, self.data);
                self.bell = Some((fd, events));
            }
            (Some(_), None) => self.leave(bell),
            (None, None) => {}
        }
    }

    /// Removes the bell from the set. Senders have it too, so closing it here would not remove it.
    fn leave(&mut self, bell: c_int) {
        if let Some((fd, _)) = self.bell.take() {
            if self.is_in() || table::get(self.set).as_set() == Some(0) {
                control(self.set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            }
            if fd != bell {
                hidden::close(fd);
            }
            sets::count_mixed(-1);
        }
    }
}

fn keep_eager(d: &Dgram, slow: &Slow) {
    d.eager.store(!slow.regs.is_empty(), SeqCst);
    let edge = slow.regs.iter().any(|reg| reg.events & EDGE != 0);
    d.edge.store(edge, SeqCst);
}

/// The socket has a ring: all sets get the bell.
pub(crate) fn ring_all(d: &Dgram, slow: &mut Slow) {
    let bell = d.bell.load(SeqCst);
    for reg in &mut slow.regs {
        if reg.is_in() && reg.bell.is_none() {
            reg.follow(bell);
        }
    }
    keep_eager(d, slow);
}

/// A descriptor of the socket is closed, and others are left.
pub(crate) fn leave(d: &'static Dgram, fd: c_int) {
    let mut slow = d.slow();
    let bell = d.bell.load(SeqCst);
    for reg in slow.regs.iter_mut().filter(|reg| reg.fd == fd) {
        reg.leave(bell);
    }
    slow.regs.retain(|reg| reg.fd != fd);
    keep_eager(d, &slow);
}

pub(crate) fn leave_all(d: &Dgram, slow: &mut Slow) {
    let bell = d.bell.load(SeqCst);
    for reg in &mut slow.regs {
        reg.leave(bell);
    }
    slow.regs.clear();
}

pub(crate) fn bell_moves(d: &Dgram, slow: &Slow, to: c_int) {
    let from = d.bell.swap(to, SeqCst);
    for reg in &slow.regs {
        if let Some((fd, events)) = reg.bell
            && fd == from
        {
            control(reg.set, libc::EPOLL_CTL_DEL, from, 0, 0);
            control(reg.set, libc::EPOLL_CTL_ADD, to, events, reg.data);
        }
    }
}

/// # Safety
/// As `epoll_ctl(2)`.
pub(crate) unsafe fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let Some(d) = super::of(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next::epoll_ctl(set, op, fd, event) };
    };
    let mut slow = d.slow();
    // SAFETY: the caller's promise.
    let (events, data) = unsafe { sets::parts(event) };
    let is_once = events & ONESHOT != 0 && op != libc::EPOLL_CTL_DEL && d.inbound.load(SeqCst);
    let by_bell = is_once && fires_by_bell(d) && events & IN != 0;
    let rc = if by_bell {
        control(set, op, fd, ONESHOT, data)
    } else {
        // SAFETY: the caller's promise.
        unsafe { next::epoll_ctl(set, op, fd, event) }
    };
    if rc != 0 {
        return rc;
    }
    let bell = d.bell.load(SeqCst);
    let number = sets::number(set);
    let follows = by_bell || !is_once;
    let at = slow
        .regs
        .iter()
        .position(|reg| reg.set == set && reg.fd == fd && reg.number == number);
    match (op, at) {
        (libc::EPOLL_CTL_ADD, _) => {
            for reg in slow
                .regs
                .iter_mut()
                .filter(|reg| reg.set == set && reg.fd == fd)
            {
                reg.leave(bell);
            }
            slow.regs.retain(|reg| !(reg.set == set && reg.fd == fd));
            let mut reg = Reg {
                set,
                number,
                fd,
                events,
                data,
                bell: None,
            };
            if follows {
                reg.follow(bell);
            }
            slow.regs.push(reg);
        }
        (libc::EPOLL_CTL_MOD, Some(at)) => {
            let reg = &mut slow.regs[at];
            (reg.events, reg.data) = (events, data);
            if follows {
                reg.follow(bell);
            } else {
                reg.leave(bell);
            }
        }
        (libc::EPOLL_CTL_DEL, Some(at)) => slow.regs.swap_remove(at).leave(bell),
        _ => {}
    }
    keep_eager(d, &slow);
    drop(slow);
    if bell >= 0 {
        settle_for_poll(d);
    }
    rc
}

/// Whether a registration that fires once is to wait for the bell, because the rings have datagrams. Two descriptors cannot fire once together: senders go back
/// to the kernel, and the socket takes the bell's place when the rings are read.
fn fires_by_bell(d: &'static Dgram) -> bool {
    // Before the look: a receive that takes the last datagram does the reverse.
    d.has_once.store(true, SeqCst);
    d.eager.store(true, SeqCst);
    let mut rx = d.rx();
    rx.close_all();
    rx.has_data()
}

/// A receive has taken the last datagram of the rings: what fires once and has not done so waits for the socket.
pub(crate) fn fire_by_socket(d: &'static Dgram) {
    let mut slow = d.slow();
    if d.rx().has_data() || !d.has_once.swap(false, SeqCst) {
        return;
    }
    let bell = d.bell.load(SeqCst);
    let is_once = |reg: &&mut Reg| reg.events & ONESHOT != 0;
    for reg in slow.regs.iter_mut().filter(is_once) {
        let Some((own, _)) = reg.bell else { continue };
        let has_fired = regs::is_idle(reg.set, own) == Some(true);
        reg.leave(bell);
        if !has_fired && reg.is_in() {
            control(reg.set, libc::EPOLL_CTL_MOD, reg.fd, reg.events, reg.data);
        }
    }
}

/// Before the program waits by `poll` or `select`: the bell is as readable as the rings.
pub(crate) fn settle_for_poll(d: &'static Dgram) {
    let bell = d.bell.load(SeqCst);
    // A signal handler finds the bell in the state of the receive that it interrupts.
    if bell >= 0 && !signal::is_inside(d) {
        d.rx().settle(bell);
    }
}

/// A thread that waits for the socket in the kernel: no ring is made meanwhile.
pub(crate) struct Waiting(&'static Dgram);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.in_kernel.fetch_sub(1, SeqCst);
    }
}

/// The right to wait for the kernel's socket alone; `None`: it has rings.
pub(crate) fn kernel_alone(d: &'static Dgram) -> Option<Waiting> {
    if d.inbound.load(SeqCst) {
        return None;
    }
    // Mark first, look second: a thread that makes a ring does the reverse.
    d.in_kernel.fetch_add(1, SeqCst);
    let waiting = Waiting(d);
    (!d.inbound.load(SeqCst)).then_some(waiting)
}

/// Events of data.
const DATA: c_short = libc::POLLIN | libc::POLLRDNORM;

/// Meaning of a descriptor in a poll list.
pub(crate) enum Asked {
    /// Not a descriptor of ours.
    Stranger,
    /// The kernel's socket alone.
    Kernel(Waiting),
    /// The kernel's socket, and the bell where the program waits for data.
    Rings,
}

/// Passes the descriptors to poll for a socket in a poll list to `put`.
pub(crate) fn for_poll(fd: c_int, events: c_short, mut put: impl FnMut(c_int, c_short)) -> Asked {
    let Some(d) = super::of(fd) else {
        return Asked::Stranger;
    };
    put(fd, events);
    if let Some(waiting) = kernel_alone(d) {
        return Asked::Kernel(waiting);
    }
    let data = events & DATA;
    if data != 0 {
        settle_for_poll(d);
        put(d.bell.load(SeqCst), data);
    }
    Asked::Rings
}

/// Reports whether the rings of a socket have data for a poll list. `None`: it has no rings, or the list asks for more than data.
pub(crate) fn by_ring(fd: c_int, events: c_short) -> Option<bool> {
    if events & DATA == 0 || events & !DATA != 0 {
        return None;
    }
    let d = super::of(fd).filter(|d| d.inbound.load(SeqCst) && !signal::is_inside(*d))?;
    Some(d.rx().has_data())
}

/// Returns true if a poll list has to be looked through for this descriptor.
pub(crate) fn is_ours(fd: c_int) -> bool {
    super::of(fd).is_some_and(|d| !d.is_plain() || d.inbound.load(SeqCst))
}
