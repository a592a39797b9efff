//! Registrations of connections in epoll sets.
//!
//! The kernel's epoll set holds, for each direction, the descriptor that carries it (the TCP socket or the bell) with the
//! program's `data`. The kernel does all the rest: level, edge, time-outs, nesting, other threads.

use libc::c_int;
use std::sync::atomic::Ordering::SeqCst;

use weft_run::connection::{Carrier, Route, ready};

use crate::chan::Chan;
use crate::conn::{Big, Conn, Reg};
use crate::sets::{IN, OUT, control, count_mixed, number};
use crate::{edges, hidden};

pub(crate) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(crate) const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// Event bits that remain in a registration that has fired.
const PRIVATE: u32 = ONESHOT | EXCLUSIVE | (libc::EPOLLET | libc::EPOLLWAKEUP) as u32;

/// Reports whether a registration that fires once has fired: its events are gone in `/proc`. `None`: `/proc` does not show it.
pub(crate) fn has_fired(reg: &Reg, chan: &Chan) -> Option<bool> {
    if reg.fired {
        return Some(true);
    }
    let fd = if reg.tcp.is_some() {
        reg.tcp_fd()
    } else {
        reg.bell_fd(chan)
    };
    is_idle(reg.set, fd)
}

/// Reports whether a set has no events for a descriptor.
pub(crate) fn is_idle(set: c_int, fd: c_int) -> Option<bool> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{set}")).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let is_it = words.next() == Some("tfd:") && words.next()?.parse() == Ok(fd);
        let events = words.nth(1).filter(|_| is_it)?;
        let events = u32::from_str_radix(events, 16).ok()?;
        Some(events & !PRIVATE == 0)
    })
}

pub(crate) fn is_both(events: u32) -> bool {
    events & IN != 0 && events & OUT != 0
}

/// Returns the events to register for the TCP socket and for the bell.
fn wanted(chan: &Chan, events: u32) -> (Option<u32>, Option<u32>) {
    let has_ended = chan.side().ended.load(SeqCst) != 0;
    if has_ended {
        return (Some(events), None);
    }
    let (tx, rx) = chan.mode();
    let flags = events & !(IN | OUT);
    let (mut tcp, mut bell) = (None, None);
    // A registration for neither still reports errors, from the descriptor that carries incoming bytes.
    if events & IN != 0 || events & OUT == 0 {
        // One that fires once cannot stand for two descriptors.
        let is_closed = events & ONESHOT == 0 && chan.stream.is_closed(chan.peer());
        let watch = ready::input(rx, has_ended, is_closed);
        let wanted = flags | events & IN;
        tcp = watch.tcp.then_some(wanted);
        bell = watch.bell.then_some(wanted);
    }
    if events & OUT != 0 {
        let watch = ready::output(tx, has_ended);
        let output = if watch.bell { &mut bell } else { &mut tcp };
        *output = Some(output.unwrap_or(flags) | events & OUT);
    }
    // The end of the bell alone says that a killed peer had bytes unread.
    if bell.is_none() && tx == Route::Ring && chan.carrier == Carrier::Here && events & ONESHOT == 0
    {
        bell = Some(flags);
    }
    // The kernel may end the connection by itself, which only TCP tells. What fires once, or for one set of several, cannot stand for two descriptors.
    let may_watch = events & (ONESHOT | EXCLUSIVE) == 0 && chan.carrier == Carrier::Here;
    if bell.is_some() && tcp.is_none() && may_watch {
        tcp = Some(flags);
    }
    // A Unix socket reports this, and TCP does not.
    let bell = bell.map(|events| events & !(libc::EPOLLWRBAND as u32));
    (tcp, bell)
}

/// Keeps count of the registrations that stand for two descriptors, of which more than the end is asked.
fn keep_mixed(reg: &mut Reg) {
    let is_for_more = |events: u32| events & (IN | OUT) != 0;
    let mixed = reg.tcp.is_some_and(is_for_more) && reg.bell.is_some();
    match (reg.mixed, mixed) {
        (false, true) => count_mixed(1),
        (true, false) => count_mixed(-1),
        _ => {}
    }
    reg.mixed = mixed;
}

/// The registration is one no more, for the kernel.
pub(crate) fn forget(reg: &mut Reg) {
    edges::forget(reg);
    (reg.tcp, reg.bell) = (None, None);
    keep_mixed(reg);
    reg.close_own();
}

/// The program closes the descriptor, and has others of the socket: the kernel keeps the registration. It is reached by a duplicate from here on.
pub(crate) fn leave_to_kernel(reg: &mut Reg) {
    reg.is_orphan = true;
    let tcp = reg.tcp.take();
    if number(reg.set) != reg.number {
        return;
    }
    if let Some(own) = hidden::duplicate(reg.fd) {
        reg.own_tcp = own;
        let is_once = tcp.is_some_and(|events| events & ONESHOT != 0);
        if is_once && is_idle(reg.set, reg.fd) == Some(true) {
            reg.fired = true;
        } else if let Some(events) = tcp {
            control(reg.set, libc::EPOLL_CTL_ADD, own, events, reg.data);
            reg.tcp = tcp;
        }
    }
    if tcp.is_some() {
        control(reg.set, libc::EPOLL_CTL_DEL, reg.fd, 0, 0);
    }
    keep_mixed(reg);
}

/// The number is the socket's again: the program can change the registration.
pub(crate) fn adopt(reg: &mut Reg) {
    reg.is_orphan = false;
    if reg.own_tcp >= 0 {
        if let Some(events) = reg.tcp {
            control(reg.set, libc::EPOLL_CTL_DEL, reg.own_tcp, 0, 0);
            control(reg.set, libc::EPOLL_CTL_ADD, reg.fd, events, reg.data);
        }
        hidden::close(reg.own_tcp);
        reg.own_tcp = -1;
    }
}

/// A descriptor that only a registration has gets another number: the set has it by that. Returns whether it is one.
pub(crate) fn own_moves(regs: &mut [Reg], fd: c_int, to: c_int) -> bool {
    for reg in regs {
        let (own, events) = if reg.own_bell == fd {
            (&mut reg.own_bell, reg.bell)
        } else if reg.own_tcp == fd {
            (&mut reg.own_tcp, reg.tcp)
        } else {
            continue;
        };
        *own = to;
        if let Some(events) = events {
            control(reg.set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            control(reg.set, libc::EPOLL_CTL_ADD, to, events, reg.data);
        }
        return true;
    }
    false
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
                // Another process that shares the set has removed it.
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

/// Returns true if another registration of a set uses the bell itself.
pub(crate) fn is_taken(regs: &[Reg], set: c_int, fd: c_int) -> bool {
    regs.iter().any(|other| {
        other.set == set && other.fd != fd && other.bell.is_some() && other.own_bell < 0
    })
}

/// Adapts a registration to the current directions. `again`: also if nothing changes, because a `MOD` reports readiness anew. `taken`:
/// another registration of the set has the bell.
pub(crate) fn apply(reg: &mut Reg, chan: &Chan, again: bool, taken: bool) -> Result<(), c_int> {
    if again {
        reg.fired = false;
    } else if reg.events & ONESHOT != 0
        && (reg.tcp.is_some() || reg.bell.is_some())
        && has_fired(reg, chan) == Some(true)
    {
        // It does not fire again until the program rearms it: the set holds nothing for it meanwhile.
        let fd = reg.bell_fd(chan);
        let _ = change(reg.set, fd, reg.bell.take(), None, 0, false);
        let _ = change(reg.set, reg.tcp_fd(), reg.tcp.take(), None, 0, false);
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
    let has_room = |events: Option<u32>| events.is_some_and(|events| events & OUT != 0);
    let moves_to_tcp = has_room(reg.bell) && has_room(tcp) && !again;
    // Additions come first, so that at every moment one descriptor is watched.
    let fd = reg.bell_fd(chan);
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
    if reg.is_orphan && reg.own_tcp < 0 {
        // Nothing reaches it.
        return Ok(());
    }
    let fd = reg.tcp_fd();
    match change(reg.set, fd, reg.tcp, tcp, reg.data, again) {
        // Another process that shares the set has put it in.
        Err(libc::EEXIST) => change(reg.set, fd, tcp, tcp, reg.data, true)?,
        other => other?,
    }
    reg.tcp = tcp;
    reg.told = reg.data;
    if moves_to_tcp {
        edges::moved_to_tcp(reg);
    }
    Ok(())
}

/// The kernel learns of changes that were put off.
#[cold]
pub(crate) fn catch_up(conn: &'static Conn, chan: &Chan, big: &Big) {
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

pub(crate) fn remove(reg: &mut Reg, chan: &Chan) {
    if reg.bell.take().is_some() {
        control(reg.set, libc::EPOLL_CTL_DEL, reg.bell_fd(chan), 0, 0);
    }
    if reg.tcp.take().is_some() {
        control(reg.set, libc::EPOLL_CTL_DEL, reg.tcp_fd(), 0, 0);
    }
    forget(reg);
}
