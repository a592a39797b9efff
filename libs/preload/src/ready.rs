//! Readiness: epoll sets, `poll` and `select`.
//!
//! What stands in the kernel's epoll set for a direction is the descriptor that carries it: the TCP socket, or the bell, with the program's own
//! `data`. The kernel does all the rest: level, edge, time-outs, nesting, other threads.
//!
//! # Safety
//!
//! As `epoll_ctl(2)`, `poll(2)` and `select(2)`.

use libc::{c_int, epoll_event};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use weft_run::ledger::RING;
use weft_run::meet::Why;

use crate::conn::{BOTH, Chan, Conn, Reg, big};
use crate::table::{self, Entry};
use crate::{bell, hidden, late, link, next};

pub(crate) const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM | libc::EPOLLWRBAND) as u32;
pub(crate) const IN: u32 = (libc::EPOLLIN
    | libc::EPOLLRDNORM
    | libc::EPOLLRDBAND
    | libc::EPOLLPRI
    | libc::EPOLLRDHUP
    | libc::EPOLLMSG) as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// What is left of the events of a registration that has fired.
const PRIVATE: u32 = ONESHOT | EXCLUSIVE | (libc::EPOLLET | libc::EPOLLWAKEUP) as u32;

/// Numbers of epoll sets.
static NEXT_SET: AtomicUsize = AtomicUsize::new(1);
/// Sets below this number were made before a fork, in a parent.
static FOREIGN: AtomicUsize = AtomicUsize::new(0);
/// Registrations that stand for two descriptors at the moment.
static MIXED: AtomicUsize = AtomicUsize::new(0);

/// A fork has seen a channel: another process may change registrations of a set that it shares with us.
static FORKED: AtomicBool = AtomicBool::new(false);

pub(crate) fn shared_by_fork() {
    FORKED.store(true, SeqCst);
}

/// Follows what another process that shares the socket has changed.
#[inline]
pub(crate) fn keep_up(conn: &'static Conn, chan: &Chan) {
    if !has_followed(conn, chan) {
        follow(conn, chan, &big());
    }
}

#[inline]
fn has_followed(conn: &Conn, chan: &Chan) -> bool {
    let (tx, rx) = Conn::mode(chan);
    conn.followed.load(Relaxed) == tx << 8 | rx
}

pub(crate) fn new_set(fd: c_int) {
    if fd >= 0 {
        table::put(fd, Entry::Set(NEXT_SET.fetch_add(1, Relaxed)));
    }
}

pub(crate) fn after_fork() {
    FOREIGN.store(NEXT_SET.load(Relaxed), Relaxed);
}

/// Whether a set was made before a fork, in a parent that has it too.
pub(crate) fn is_foreign(number: usize) -> bool {
    number < FOREIGN.load(Relaxed)
}

pub(crate) fn number(set: c_int) -> usize {
    match table::get(set) {
        Entry::Set(number) => number,
        _ => 0,
    }
}

/// Whether all sets that the socket is in can be told to look elsewhere for what comes in.
pub(crate) fn can_move(conn: &Conn, chan: &Chan, big: &MutexGuard<'_, ()>) -> bool {
    conn.slow(big)
        .regs
        .iter()
        .all(|reg| match table::get(reg.set) {
            Entry::Set(number) if number == reg.number => {
                number >= FOREIGN.load(Relaxed).max(1)
                    && (reg.events & ONESHOT == 0 || once_can_move(reg, chan))
            }
            // One that has two names, or none that we know.
            Entry::Set(0) => false,
            // A set that is closed by now does not matter.
            _ => reg.number != 0,
        })
}

/// One that fires once cannot stand for two descriptors, and whether it has fired has to be known.
fn once_can_move(reg: &Reg, chan: &Chan) -> bool {
    let is_out = reg.events & OUT != 0;
    let is_here = chan.carrier == weft_run::ledger::Carrier::Here;
    is_here && (!is_out || Conn::mode(chan).0 == RING) && has_fired(reg, chan).is_some()
}

/// Whether a registration that fires once has: its events are gone, as `/proc` shows. `None`: it does not say.
fn has_fired(reg: &Reg, chan: &Chan) -> Option<bool> {
    if reg.fired {
        return Some(true);
    }
    let own = |own: c_int| if own >= 0 { own } else { chan.bell() };
    let fd = if reg.tcp.is_some() {
        reg.fd
    } else {
        own(reg.own_bell)
    };
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", reg.set)).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let is_it = words.next() == Some("tfd:") && words.next()?.parse() == Ok(fd);
        let events = words.nth(1).filter(|_| is_it)?;
        let events = u32::from_str_radix(events, 16).ok()?;
        Some(events & !PRIVATE == 0)
    })
}

/// Whether a registration that fires once would have to stand for two descriptors, were our sends on the ring and receives not.
pub(crate) fn once_keeps_tcp(conn: &Conn, chan: &Chan, big: &MutexGuard<'_, ()>) -> bool {
    let keeps = |reg: &Reg| reg.events & ONESHOT != 0 && is_both(reg.events);
    Conn::mode(chan).1 != RING && conn.slow(big).regs.iter().any(keeps)
}

fn is_both(events: u32) -> bool {
    events & IN != 0 && events & OUT != 0
}

pub(crate) fn control(set: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> c_int {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: an event.
    unsafe { next::epoll_ctl(set, op, fd, &raw mut event) }
}

/// What each of the two descriptors is to be registered for.
fn wanted(chan: &Chan, events: u32) -> (Option<u32>, Option<u32>) {
    let (tx, rx) = Conn::mode(chan);
    let flags = events & !(IN | OUT);
    let (mut tcp, mut bell) = (None, None);
    // Who waits for neither still hears of errors, from where bytes come in.
    let input = if rx == RING { &mut bell } else { &mut tcp };
    if events & IN != 0 || events & OUT == 0 {
        *input = Some(flags | events & IN);
        if rx == BOTH {
            bell = Some(flags | events & IN);
        }
    }
    let output = if tx == RING { &mut bell } else { &mut tcp };
    if events & OUT != 0 {
        *output = Some(output.unwrap_or(flags) | events & OUT);
    }
    (tcp, bell)
}

/// So many registrations more, or less, stand for two descriptors.
pub(crate) fn count_mixed(n: isize) {
    MIXED.fetch_add(n.cast_unsigned(), SeqCst);
}

/// Keeps count of the registrations that stand for two descriptors.
fn keep_mixed(reg: &mut Reg) {
    let mixed = reg.tcp.is_some() && reg.bell.is_some();
    match (reg.mixed, mixed) {
        (false, true) => count_mixed(1),
        (true, false) => count_mixed(-1),
        _ => {}
    }
    reg.mixed = mixed;
}

/// The registration is one no more, for the kernel.
fn forget(reg: &mut Reg) {
    (reg.tcp, reg.bell) = (None, None);
    keep_mixed(reg);
}

/// One descriptor of a registration.
fn change(
    set: c_int,
    fd: c_int,
    now: Option<u32>,
    then: Option<u32>,
    data: u64,
    again: bool,
) -> Result<(), c_int> {
    let rc = match (now, then) {
        (None, None) => 0,
        (Some(now), Some(then)) if now == then && !again => 0,
        (Some(_), Some(then)) if then & EXCLUSIVE != 0 => {
            // The kernel changes none of these.
            control(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            control(set, libc::EPOLL_CTL_ADD, fd, then, data)
        }
        (Some(_), Some(then)) => {
            let rc = control(set, libc::EPOLL_CTL_MOD, fd, then, data);
            if rc != 0 && crate::errno() == libc::ENOENT {
                // Another process that shares the set has taken it out.
                control(set, libc::EPOLL_CTL_ADD, fd, then, data)
            } else {
                rc
            }
        }
        (None, Some(then)) => control(set, libc::EPOLL_CTL_ADD, fd, then, data),
        (Some(_), None) => {
            control(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            0
        }
    };
    if rc == 0 { Ok(()) } else { Err(crate::errno()) }
}

/// Whether another registration of a set has the bell itself.
fn is_taken(regs: &[Reg], set: c_int, fd: c_int) -> bool {
    regs.iter().any(|other| {
        other.set == set && other.fd != fd && other.bell.is_some() && other.own_bell < 0
    })
}

fn bell_of(reg: &mut Reg, chan: &Chan) -> c_int {
    if reg.own_bell >= 0 {
        reg.own_bell
    } else {
        chan.bell()
    }
}

/// Brings a registration to what the directions are now. `again`: also where nothing changes, for a `MOD` tells of readiness anew. `taken`:
/// another registration of the set has the bell.
fn apply(reg: &mut Reg, chan: &Chan, again: bool, taken: bool) -> Result<(), c_int> {
    if again {
        reg.fired = false;
    } else if reg.events & ONESHOT != 0
        && (reg.tcp.is_some() || reg.bell.is_some())
        && has_fired(reg, chan) == Some(true)
    {
        // It fires no more until the program says so: nothing stands for it meanwhile.
        let fd = bell_of(reg, chan);
        let _ = change(reg.set, fd, reg.bell.take(), None, 0, false);
        let _ = change(reg.set, reg.fd, reg.tcp.take(), None, 0, false);
        reg.fired = true;
    }
    if reg.fired {
        keep_mixed(reg);
        return Ok(());
    }
    let done = change_both(reg, chan, again, taken);
    keep_mixed(reg);
    done
}

fn change_both(reg: &mut Reg, chan: &Chan, again: bool, taken: bool) -> Result<(), c_int> {
    let (tcp, bell) = wanted(chan, reg.events);
    // First what is new: there is no moment in which nobody looks.
    let fd = bell_of(reg, chan);
    match change(reg.set, fd, reg.bell, bell, reg.data, again) {
        // Another process that shares the set has put it in.
        Err(libc::EEXIST) if !taken => change(reg.set, fd, bell, bell, reg.data, true)?,
        Err(libc::EEXIST) => {
            // The same socket is in the set by another descriptor too.
            if let Some(own) = hidden::duplicate(chan.bell()) {
                reg.own_bell = own;
                change(reg.set, own, None, bell, reg.data, again)?;
            }
        }
        other => other?,
    }
    reg.bell = bell;
    match change(reg.set, reg.fd, reg.tcp, tcp, reg.data, again) {
        // Another process that shares the set has put it in.
        Err(libc::EEXIST) => change(reg.set, reg.fd, tcp, tcp, reg.data, true)?,
        other => other?,
    }
    reg.tcp = tcp;
    reg.told = reg.data;
    Ok(())
}

/// The kernel learns of changes that were put off.
#[cold]
pub(crate) fn catch_up(conn: &'static Conn, chan: &Chan, big: &MutexGuard<'_, ()>) {
    conn.is_behind.store(false, SeqCst);
    let slow = conn.slow(big);
    for reg in &mut slow.regs {
        if number(reg.set) != reg.number {
            forget(reg);
        } else if reg.is_gone {
            remove(reg, chan);
        } else {
            let again = reg.data != reg.told;
            let _ = change_both(reg, chan, again, false);
            keep_mixed(reg);
        }
    }
    slow.regs
        .retain(|reg| !reg.is_gone && number(reg.set) == reg.number);
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
    let (tx, rx) = Conn::mode(chan);
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

/// Events and data; nothing for a null pointer.
pub(crate) unsafe fn parts(event: *const epoll_event) -> (u32, u64) {
    if event.is_null() {
        return (0, 0);
    }
    // SAFETY: the caller's promise.
    let event = unsafe { event.read_unaligned() };
    (event.events, event.u64)
}

/// The kernel's own registration, and what is kept about it.
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
    // What has fired is not in the set.
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

/// # Safety
/// As `epoll_ctl(2)`.
pub(crate) unsafe fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let Some((conn, inside)) = table::enter(fd) else {
        late::be_exact(fd);
        // SAFETY: the caller's promise.
        return unsafe { crate::dgram::ready::epoll_ctl(set, op, fd, event) };
    };
    if op != libc::EPOLL_CTL_DEL
        // SAFETY: the caller's promise.
        && let (events, _) = unsafe { parts(event) }
        && events & ONESHOT != 0
        && is_both(events)
        && let Some(chan) = conn.chan(&inside)
        && let (RING, rx) = Conn::mode(chan)
        && rx != RING
    {
        link::stop_sending(conn, Why::Epoll);
    }
    let big = big();
    let number = number(set);
    let chan = conn.chan(&inside);
    if let Some(chan) = chan
        && !has_followed(conn, chan)
    {
        // What another process did to a set that it shares: its registrations are ours to change.
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
    let moves = chan.is_some_and(Conn::is_on_ring);
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

fn remove(reg: &mut Reg, chan: &Chan) {
    if reg.bell.take().is_some() {
        control(reg.set, libc::EPOLL_CTL_DEL, bell_of(reg, chan), 0, 0);
    }
    if reg.tcp.take().is_some() {
        control(reg.set, libc::EPOLL_CTL_DEL, reg.fd, 0, 0);
    }
    if reg.own_bell >= 0 {
        hidden::close(reg.own_bell);
        reg.own_bell = -1;
    }
    forget(reg);
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

/// Two descriptors may stand for one registration at the moment: their events are put together.
pub(crate) unsafe fn merge(events: *mut epoll_event, n: c_int) -> c_int {
    let shared = n <= 64 && FORKED.load(Relaxed);
    if n < 2 || (MIXED.load(SeqCst) == 0 && !shared) {
        return n;
    }
    // SAFETY: the kernel has written so many.
    let events = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
    let mut kept = 0;
    for at in 0..events.len() {
        let event = events[at];
        let data = event.u64;
        let same = events[..kept].iter().position(|other| {
            let other = *other;
            let of = other.u64;
            of == data
        });
        if let Some(same) = same {
            let both = events[same].events | event.events;
            events[same].events = both;
        } else {
            events[kept] = event;
            kept += 1;
        }
    }
    kept as c_int
}

/// The bell gets another number (under the lock): its registrations are made anew.
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
