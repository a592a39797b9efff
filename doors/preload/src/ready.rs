//! Readiness of connections: their registrations in epoll sets follow their directions.
//!
//! # Safety
//!
//! As `epoll_ctl(2)`.

use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::{Carrier, Phase, Route};

use crate::chan::Chan;
use crate::conn::{Big, Conn, Inside, Reg, big};
use crate::iov::is_bad;
use crate::regs::{
    EXCLUSIVE, ONESHOT, adopt, apply, catch_up, forget, has_fired, is_both, is_taken,
    leave_to_kernel, remove,
};
use crate::sets::{self, OUT, control, number, parts};
use crate::{bell, edges, next, ring_poll, table};

const EDGE: u32 = libc::EPOLLET as u32;
/// What a descriptor reports at its end, whatever it is asked for.
pub(crate) const END: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;

/// Follows what another process that shares the socket has changed.
#[inline]
pub(crate) fn keep_up(conn: &'static Conn, chan: &Chan) {
    if !has_followed(conn, chan) {
        follow(conn, chan, &big());
    }
}

#[inline]
fn has_followed(conn: &Conn, chan: &Chan) -> bool {
    conn.followed.load(Relaxed) == chan.follow_key()
}

/// Returns true if all sets with the socket can watch another descriptor for incoming bytes.
pub(crate) fn can_move(conn: &Conn, chan: &Chan, big: &Big) -> bool {
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
    is_here && (!is_out || chan.mode().0 == Route::Ring) && has_fired(reg, chan).is_some()
}

/// Returns true if a registration that fires once would have to cover two descriptors if our sends were on the ring and our receives were not.
pub(crate) fn once_keeps_tcp(conn: &Conn, chan: &Chan, big: &Big) -> bool {
    let keeps = |reg: &Reg| reg.events & ONESHOT != 0 && is_both(reg.events);
    chan.mode().1 != Route::Ring && conn.slow(big).regs.iter().any(keeps)
}

/// After a direction has changed: all registrations follow.
pub(crate) fn follow(conn: &'static Conn, chan: &Chan, big: &Big) {
    if conn.is_behind.load(SeqCst) {
        catch_up(conn, chan, big);
    }
    let slow = conn.slow(big);
    for at in 0..slow.regs.len() {
        let (set, fd) = (slow.regs[at].set, slow.regs[at].fd);
        let taken = is_taken(&slow.regs, set, fd);
        let reg = &mut slow.regs[at];
        if number(set) == reg.number {
            if chan.carrier != Carrier::Here {
                edges::know(conn, reg, big);
            }
            let _ = apply(reg, chan, false, taken);
        } else {
            forget(reg);
        }
    }
    conn.followed.store(chan.follow_key(), SeqCst);
    slow.regs.retain(|reg| number(reg.set) == reg.number);
    ring_poll::follow(conn, Some(chan), &slow.regs);
    set_eager(chan, &slow.regs);
}

/// While the socket is in a set, its bell is kept in step with the ring. The registrations are this process's: while others have the socket too, they may
/// need more than it, and the wish is not lowered.
fn set_eager(chan: &Chan, regs: &[Reg]) {
    let side = chan.side();
    let is_edge = regs.iter().any(|reg| reg.events & EDGE != 0);
    let eager = match (regs.is_empty(), is_edge) {
        (true, _) => 0,
        (false, true) => bell::EDGE,
        (false, false) => 1,
    };
    if side.holders.load(SeqCst) == 1 {
        side.eager.store(eager, SeqCst);
    } else {
        side.eager.fetch_max(eager, SeqCst);
    }
    let eager = side.eager.load(SeqCst);
    if eager != 0 && side.rx_state.load(SeqCst) == Route::Ring {
        let _rx = side.rx_lock.lock();
        match chan.stream.ready(chan.peer(), side.head.load(Relaxed)) {
            Ok((0, false)) => _ = bell::ask(chan),
            Ok((1.., false)) if is_edge => bell::ask_for_more(chan),
            _ => {}
        }
    }
}

/// The connections that are in the set of this number.
pub(crate) fn in_set(number: usize) -> Vec<&'static Conn> {
    let mut found = Vec::new();
    if number == 0 {
        return found;
    }
    let big = big();
    table::each_socket(|_, conn: &'static Conn| {
        let regs = &conn.slow(&big).regs;
        if regs.iter().any(|reg| reg.number == number) {
            found.push(conn);
        }
    });
    found
}

/// Takes events out of the first `n` that TCP would not report. Returns how many are left, and whether any was taken out.
///
/// - The end of a bell: it ends when its peer closes the socket or dies, and the kernel shows that differently from the end of a TCP connection. The same
///   holds for a TCP connection that the kernel has ended by itself.
///   These registrations move to the TCP socket, which has a FIN or reset of its own, and the kernel reports what the socket has.
/// - Edges of room that no sender has waited for ([`edges`]).
///
/// # Safety
/// As `epoll_wait(2)`, which has written `n` events.
pub(crate) unsafe fn settle(set: c_int, events: *mut epoll_event, n: c_int) -> (c_int, bool) {
    if n <= 0 {
        return (n, false);
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
    let is_end = |event: &epoll_event| event.events & END != 0;
    let is_suspect = |event: &epoll_event| is_end(event) || edges::is_suspect(event.events);
    if !list.iter().any(is_suspect) {
        return (n, false);
    }
    let big = big();
    let mut ends: Vec<u64> = list
        .iter()
        .filter(|it| is_end(it))
        .map(|it| it.u64)
        .collect();
    ends.sort_unstable();
    let moved = move_ended(set, &ends, &big);
    let number = number(set);
    let mut kept = 0;
    for at in 0..list.len() {
        let mut event = list[at];
        let of = event.u64;
        if is_end(&event) {
            if moved.binary_search(&of).is_ok() {
                continue;
            }
        } else if edges::is_suspect(event.events) {
            event.events = edges::told((set, number), (event.events, of), &big);
            if event.events == 0 {
                continue;
            }
        }
        list[kept] = event;
        kept += 1;
    }
    if ends.is_empty() {
        return (kept as c_int, kept < list.len());
    }
    // TCP is watched for its end beside a bell.
    (sets::join(&mut list[..kept], 0) as c_int, kept < list.len())
}

/// Moves the registrations of a set with one of these `data` (in order) whose bells have ended to their TCP sockets. Returns the `data` of those, in order.
fn move_ended(set: c_int, ends: &[u64], big: &Big) -> Vec<u64> {
    let mut moved = Vec::new();
    if ends.is_empty() {
        return moved;
    }
    table::each_socket(|_, conn: &'static Conn| {
        let is_it = |reg: &Reg| {
            reg.set == set && reg.bell.is_some() && ends.binary_search(&reg.data).is_ok()
        };
        let Some(data) = conn
            .slow(big)
            .regs
            .iter()
            .find(|reg| is_it(reg))
            .map(|reg| reg.data)
        else {
            return;
        };
        let Some(chan) = conn.chan_slow(big) else {
            return;
        };
        if chan.carrier != Carrier::Here
            || !bell::is_cut(chan.bell()) && !bell::follow_abort(conn.descriptor(), chan)
        {
            return;
        }
        ring_poll::leave(conn, Some(chan), big);
        bell::follow_death(conn.descriptor(), chan);
        chan.side().ended.store(1, SeqCst);
        for reg in &mut conn.slow(big).regs {
            // It has fired, and its event is not told to the program: the kernel reports it anew.
            let again = reg.set == set && ends.binary_search(&reg.data).is_ok();
            let _ = apply(reg, chan, again, false);
        }
        follow(conn, chan, big);
        moved.push(data);
    });
    moved.sort_unstable();
    moved
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
    big: &Big,
) -> c_int {
    // A registration that has fired is not in the kernel's set.
    let is_gone = at.is_some_and(|at| regs[at].fired);
    let rc = match op {
        libc::EPOLL_CTL_DEL if is_gone => 0,
        libc::EPOLL_CTL_ADD if is_gone => {
            crate::set_errno(libc::EEXIST);
            -1
        }
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
                edges::forget(reg);
                (reg.events, reg.data, reg.tcp) = (events, data, Some(events));
                edges::register(conn, reg, big);
                reg.told = data;
                reg.fired = false;
            }
            (libc::EPOLL_CTL_ADD, _) => {
                regs.iter_mut()
                    .filter(|reg| reg.set == set && reg.fd == fd)
                    .for_each(forget);
                regs.retain(|reg| !(reg.set == set && reg.fd == fd));
                let mut reg = Reg::new(set, number, fd, events, data);
                reg.tcp = Some(events);
                edges::register(conn, &mut reg, big);
                regs.push(reg);
            }
            _ => {}
        }
        if let Some(chan) = chan {
            ring_poll::follow(conn, Some(chan), regs);
            set_eager(chan, regs);
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
    events & ONESHOT != 0
        && is_both(events)
        && matches!(chan.mode(), (Route::Ring, rx) if rx != Route::Ring)
}

/// Whether the kernel refuses these events beside `EPOLLEXCLUSIVE`, or a change of such a registration, which had the events `before`.
fn is_refused(op: c_int, events: u32, before: u32) -> bool {
    const WITH: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) as u32
        | (libc::EPOLLWAKEUP | libc::EPOLLET | libc::EPOLLEXCLUSIVE) as u32;
    let is_add = op == libc::EPOLL_CTL_ADD;
    let is_exclusive = events & EXCLUSIVE != 0;
    is_exclusive && (!is_add || events & !WITH != 0) || !is_add && before & EXCLUSIVE != 0
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
        let is_known = op == libc::EPOLL_CTL_DEL || !is_bad(event);
        // SAFETY: the caller's promise.
        let asked = unsafe { parts(event) };
        if let [reg] = &mut conn.slow(&big).regs[..]
            && (reg.set, reg.fd, reg.number) == (set, fd, number)
            && !reg.is_orphan
            && is_known
            && ring_poll::put_off_change(conn, chan, (reg, op), asked, &big)
        {
            return 0;
        }
        ring_poll::leave(conn, Some(chan), &big);
    }
    let slow = conn.slow(&big);
    let at = slow
        .regs
        .iter()
        .position(|reg| reg.set == set && reg.fd == fd && reg.number == number);
    if let Some(at) = at.filter(|&at| slow.regs[at].is_orphan) {
        adopt(&mut slow.regs[at]);
    }
    let moves = chan.is_some_and(Chan::is_on_ring);
    if !moves
        || (op != libc::EPOLL_CTL_ADD && at.is_none())
        || is_bad(event) && op != libc::EPOLL_CTL_DEL
    {
        // SAFETY: the caller's promise.
        return unsafe {
            in_kernel(
                conn,
                chan,
                &mut slow.regs,
                at,
                (set, op, fd, number),
                event,
                &big,
            )
        };
    }
    let Some(chan) = chan else { return -1 };
    // SAFETY: the caller's promise.
    let (events, data) = unsafe { parts(event) };
    let before = at.map_or(0, |at| slow.regs[at].events);
    let done = match (op, at) {
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _) if is_refused(op, events, before) => {
            Err(libc::EINVAL)
        }
        (libc::EPOLL_CTL_ADD, Some(_)) => Err(libc::EEXIST),
        (libc::EPOLL_CTL_ADD, None) => {
            let mut reg = Reg::new(set, number, fd, events, data);
            let done = apply(&mut reg, chan, false, is_taken(&slow.regs, set, fd));
            if done.is_ok() {
                edges::register(conn, &mut reg, &big);
                slow.regs.push(reg);
            } else {
                // One of its two descriptors may be in the set.
                remove(&mut reg, chan);
            }
            done
        }
        (libc::EPOLL_CTL_MOD, Some(at)) => {
            let taken = is_taken(&slow.regs, set, fd);
            let reg = &mut slow.regs[at];
            let before = (reg.events, reg.data);
            edges::forget(reg);
            // Another `data` has to reach the kernel though the events are the same.
            (reg.events, reg.data) = (events, data);
            let done = apply(reg, chan, true, taken);
            if done.is_err() {
                (reg.events, reg.data) = before;
            }
            edges::register(conn, reg, &big);
            done
        }
        (libc::EPOLL_CTL_DEL, Some(at)) => {
            let mut reg = slow.regs.swap_remove(at);
            remove(&mut reg, chan);
            Ok(())
        }
        _ => Err(libc::EINVAL),
    };
    ring_poll::follow(conn, Some(chan), &slow.regs);
    set_eager(chan, &slow.regs);
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
pub(crate) fn closing(conn: &'static Conn, fd: c_int, last: bool, chan: Option<&Chan>, big: &Big) {
    ring_poll::leave(conn, chan, big);
    let slow = conn.slow(big);
    for reg in slow.regs.iter_mut().filter(|reg| last || reg.fd == fd) {
        if !last {
            if conn.phase.load(Relaxed) == Phase::Plain {
                reg.is_orphan = true;
            } else if !reg.is_orphan {
                leave_to_kernel(reg);
            }
            continue;
        }
        if number(reg.set) == reg.number
            && let Some(chan) = chan
            && chan.side().holders.load(SeqCst) == 1
        {
            remove(reg, chan);
        }
        forget(reg);
    }
    if last {
        slow.regs.clear();
    }
    ring_poll::follow(conn, chan.filter(|_| !last), &slow.regs);
}

/// The bell gets another number (under the lock): its registrations are made again.
pub(crate) fn bell_moves(conn: &'static Conn, chan: &Chan, to: c_int, big: &Big) {
    ring_poll::leave(conn, Some(chan), big);
    let slow = conn.slow(big);
    for reg in slow.regs.iter_mut().filter(|reg| reg.own_bell < 0) {
        if let Some(events) = reg.bell {
            control(reg.set, libc::EPOLL_CTL_DEL, chan.bell(), 0, 0);
            control(reg.set, libc::EPOLL_CTL_ADD, to, events, reg.data);
        }
    }
    chan.bell.store(to, SeqCst);
}
