//! Readiness of connections: their registrations in epoll sets follow their directions.
//!
//! # Safety
//!
//! As `epoll_ctl(2)`.

use libc::{c_int, epoll_event};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::ledger::{Carrier, RING};

use crate::chan::Chan;
use crate::conn::{Conn, Inside, Reg, big};
use crate::regs::{ONESHOT, apply, catch_up, forget, has_fired, is_both, is_taken, remove};
use crate::sets::{self, OUT, control, number, parts};
use crate::{bell, late, next};

/// Follows what another process that shares the socket has changed.
#[inline]
pub(crate) fn keep_up(conn: &'static Conn, chan: &Chan) {
    if !has_followed(conn, chan) {
        follow(conn, chan, &big());
    }
}

#[inline]
fn has_followed(conn: &Conn, chan: &Chan) -> bool {
    let (tx, rx) = chan.mode();
    conn.followed.load(Relaxed) == tx << 8 | rx
}

/// Returns true if all sets with the socket can watch another descriptor for incoming bytes.
pub(crate) fn can_move(conn: &Conn, chan: &Chan, big: &MutexGuard<'_, ()>) -> bool {
    conn.slow(big).regs.iter().all(|reg| {
        sets::can_move(reg.set, reg.number, || {
            !sets::is_foreign(reg.number) && (reg.events & ONESHOT == 0 || once_can_move(reg, chan))
        })
    })
}

/// One that fires once cannot stand for two descriptors, and whether it has fired has to be known.
fn once_can_move(reg: &Reg, chan: &Chan) -> bool {
    let is_out = reg.events & OUT != 0;
    let is_here = chan.carrier == Carrier::Here;
    is_here && (!is_out || chan.mode().0 == RING) && has_fired(reg, chan).is_some()
}

/// Returns true if a registration that fires once would have to cover two descriptors if our sends were on the ring and our receives were not.
pub(crate) fn once_keeps_tcp(conn: &Conn, chan: &Chan, big: &MutexGuard<'_, ()>) -> bool {
    let keeps = |reg: &Reg| reg.events & ONESHOT != 0 && is_both(reg.events);
    chan.mode().1 != RING && conn.slow(big).regs.iter().any(keeps)
}

/// After a direction has changed: all registrations follow.
pub(crate) fn follow(conn: &'static Conn, chan: &Chan, big: &MutexGuard<'_, ()>) {
    if conn.is_behind.load(SeqCst) {
        catch_up(conn, chan, big);
    }
    let slow = conn.slow(big);
    for at in 0..slow.regs.len() {
        let (set, fd) = (slow.regs[at].set, slow.regs[at].fd);
        let taken = is_taken(&slow.regs, set, fd);
        let reg = &mut slow.regs[at];
        if number(set) == reg.number {
            let _ = apply(reg, chan, false, taken);
        } else {
            forget(reg);
        }
    }
    let (tx, rx) = chan.mode();
    conn.followed.store(tx << 8 | rx, SeqCst);
    slow.regs.retain(|reg| number(reg.set) == reg.number);
    late::follow(conn, Some(chan), &slow.regs);
    set_eager(chan, !slow.regs.is_empty());
}

/// While the socket is in a set, its bell is kept in step with the ring.
fn set_eager(chan: &Chan, eager: bool) {
    let side = chan.side();
    side.eager.store(eager.into(), SeqCst);
    if eager && side.rx_state.load(SeqCst) == RING {
        let _rx = side.rx_lock.lock();
        if let Ok((0, false)) = chan.stream.ready(chan.peer(), side.head.load(Relaxed)) {
            bell::ask(chan);
        }
    }
}

/// Changes the kernel's registration and our record of it.
///
/// # Safety
/// As `epoll_ctl(2)`.
unsafe fn in_kernel(
    conn: &'static Conn,
    chan: Option<&Chan>,
    regs: &mut Vec<Reg>,
    at: Option<usize>,
    (set, op, fd, number): (c_int, c_int, c_int, usize),
    event: *mut epoll_event,
) -> c_int {
    // A registration that has fired is not in the set.
    let is_gone = at.is_some_and(|at| regs[at].fired);
    let rc = match op {
        libc::EPOLL_CTL_DEL if is_gone => 0,
        // SAFETY: the caller's promise.
        libc::EPOLL_CTL_MOD if is_gone => unsafe {
            next::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, event)
        },
        // SAFETY: the caller's promise.
        _ => unsafe { next::epoll_ctl(set, op, fd, event) },
    };
    if rc == 0 {
        // SAFETY: the kernel has read it.
        let (events, data) = unsafe { parts(event) };
        match (op, at) {
            (libc::EPOLL_CTL_DEL, Some(at)) => forget(&mut regs.swap_remove(at)),
            (libc::EPOLL_CTL_MOD, Some(at)) => {
                let reg = &mut regs[at];
                (reg.events, reg.data, reg.tcp) = (events, data, Some(events));
                reg.told = data;
                reg.fired = false;
            }
            (libc::EPOLL_CTL_ADD, _) => {
                regs.iter_mut()
                    .filter(|reg| reg.set == set && reg.fd == fd)
                    .for_each(forget);
                regs.retain(|reg| !(reg.set == set && reg.fd == fd));
                regs.push(Reg {
                    tcp: Some(events),
                    ..Reg::new(set, number, fd, events, data)
                });
            }
            _ => {}
        }
        if let Some(chan) = chan {
            late::follow(conn, Some(chan), regs);
            set_eager(chan, !regs.is_empty());
        }
    }
    rc
}

/// Returns true if a registration would have to cover two descriptors unless sends go back to TCP; one that fires once cannot.
///
/// # Safety
/// As `epoll_ctl(2)`.
pub(crate) unsafe fn needs_tcp(chan: &Chan, op: c_int, event: *const epoll_event) -> bool {
    if op == libc::EPOLL_CTL_DEL {
        return false;
    }
    // SAFETY: the caller's promise.
    let (events, _) = unsafe { parts(event) };
    events & ONESHOT != 0 && is_both(events) && matches!(chan.mode(), (RING, rx) if rx != RING)
}

/// Registers a connection.
///
/// # Safety
/// As `epoll_ctl(2)`.
pub(crate) unsafe fn epoll_ctl(
    conn: &'static Conn,
    inside: &Inside,
    (set, op, fd): (c_int, c_int, c_int),
    event: *mut epoll_event,
) -> c_int {
    let big = big();
    let number = number(set);
    let chan = conn.chan(inside);
    if let Some(chan) = chan
        && !has_followed(conn, chan)
    {
        // Another process changed a set that it shares: we have to update its registrations.
        follow(conn, chan, &big);
    }
    if let Some(chan) = chan
        && conn.late_set.load(Relaxed) != 0
    {
        let is_known = op == libc::EPOLL_CTL_DEL || !event.is_null();
        // SAFETY: the caller's promise.
        let asked = unsafe { parts(event) };
        if let [reg] = &mut conn.slow(&big).regs[..]
            && (reg.set, reg.fd, reg.number) == (set, fd, number)
            && is_known
            && late::put_off_change(conn, chan, (reg, op), asked, &big)
        {
            return 0;
        }
        late::leave(conn, Some(chan), &big);
    }
    let slow = conn.slow(&big);
    let at = slow
        .regs
        .iter()
        .position(|reg| reg.set == set && reg.fd == fd && reg.number == number);
    let moves = chan.is_some_and(Chan::is_on_ring);
    if !moves
        || (op != libc::EPOLL_CTL_ADD && at.is_none())
        || event.is_null() && op != libc::EPOLL_CTL_DEL
    {
        // SAFETY: the caller's promise.
        return unsafe { in_kernel(conn, chan, &mut slow.regs, at, (set, op, fd, number), event) };
    }
    let Some(chan) = chan else { return -1 };
    // SAFETY: the caller's promise.
    let (events, data) = unsafe { parts(event) };
    let done = match (op, at) {
        (libc::EPOLL_CTL_ADD, Some(_)) => Err(libc::EEXIST),
        (libc::EPOLL_CTL_ADD, None) => {
            let mut reg = Reg::new(set, number, fd, events, data);
            let done = apply(&mut reg, chan, false, is_taken(&slow.regs, set, fd));
            if done.is_ok() {
                slow.regs.push(reg);
            }
            done
        }
        (libc::EPOLL_CTL_MOD, Some(at)) => {
            let taken = is_taken(&slow.regs, set, fd);
            let reg = &mut slow.regs[at];
            let before = (reg.events, reg.data);
            // Another `data` has to reach the kernel though the events are the same.
            (reg.events, reg.data) = (events, data);
            let done = apply(reg, chan, true, taken);
            if done.is_err() {
                (reg.events, reg.data) = before;
            }
            done
        }
        (libc::EPOLL_CTL_DEL, Some(at)) => {
            let mut reg = slow.regs.swap_remove(at);
            remove(&mut reg, chan);
            Ok(())
        }
        _ => Err(libc::EINVAL),
    };
    late::follow(conn, Some(chan), &slow.regs);
    set_eager(chan, !slow.regs.is_empty());
    match done {
        Ok(()) => 0,
        Err(errno) => {
            crate::set_errno(errno);
            -1
        }
    }
}

/// A descriptor of the socket is closed: its registrations go when the kernel would have them go, with the last of the process that has
/// the socket to itself; else those by this descriptor stay.
pub(crate) fn closing(
    conn: &'static Conn,
    fd: c_int,
    last: bool,
    chan: Option<&Chan>,
    big: &MutexGuard<'_, ()>,
) {
    late::leave(conn, chan, big);
    let slow = conn.slow(big);
    for reg in slow.regs.iter_mut().filter(|reg| last || reg.fd == fd) {
        if number(reg.set) == reg.number
            && let Some(chan) = chan
            && chan.side().holders.load(SeqCst) == 1
        {
            remove(reg, chan);
        }
        forget(reg);
    }
    slow.regs.retain(|reg| !last && reg.fd != fd);
    late::follow(conn, chan.filter(|_| !last), &slow.regs);
}

/// The bell gets another number (under the lock): its registrations are made again.
pub(crate) fn bell_moves(conn: &'static Conn, chan: &Chan, to: c_int, big: &MutexGuard<'_, ()>) {
    late::leave(conn, Some(chan), big);
    let slow = conn.slow(big);
    for reg in slow.regs.iter_mut().filter(|reg| reg.own_bell < 0) {
        if let Some(events) = reg.bell {
            control(reg.set, libc::EPOLL_CTL_DEL, chan.bell(), 0, 0);
            control(reg.set, libc::EPOLL_CTL_ADD, to, events, reg.data);
        }
    }
    chan.bell.store(to, SeqCst);
}
