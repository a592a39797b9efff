//! Edges of `EPOLLOUT`: TCP reports one when a socket is registered, and when there is room after a send that found none. A bell reports one each time
//! that the peer has read from it, too. Such events of edge-triggered registrations are taken out before the program sees them.
//!
//! Edges of `EPOLLIN`: a sender rings for each arrival, a few times until its rings are taken. [`renew`] takes them for a program that reads nothing.
//!
//! # Safety
//!
//! As `epoll_wait(2)`.

use libc::{c_int, epoll_event};
use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::{Carrier, Route};

use crate::chan::Chan;
use crate::conn::{Big, Conn, Reg};
use crate::private::{Guards, Held, Private};
use crate::sets::{self, IN, OUT};
use crate::work::LIBRARY;
use crate::{bell, kernel, signal};

const EDGE: u32 = libc::EPOLLET as u32;

/// Connections by set and `data` of their registrations, if these are edge-triggered or the connection is carried to another host. Changed under the
/// big lock only.
static BY_DATA: Private<Option<ByData>> = Private::new(Guards::Edges, None);

pub(crate) type ByData = HashMap<(usize, u64), Of>;

/// The connection that a set and a `data` belong to.
pub(crate) struct Of {
    /// `None`: several have had them.
    conn: Option<&'static Conn>,
    /// Its registrations with them.
    regs: u32,
}

/// Entries of [`BY_DATA`].
static KNOWN: AtomicUsize = AtomicUsize::new(0);

/// Registrations whose first event is due.
static DUE: AtomicUsize = AtomicUsize::new(0);

fn is_edge(reg: &Reg) -> bool {
    reg.number != 0 && reg.events & EDGE != 0
}

/// Its edges of room are looked at.
fn is_watched(reg: &Reg) -> bool {
    is_edge(reg) && reg.events & OUT != 0
}

/// Held over a fork.
pub(crate) type Map = Held<Option<ByData>>;

pub(crate) fn before_fork() -> Option<Map> {
    BY_DATA.lock_once()
}

/// The connections that can be found by `data` and have it in a set.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    None,
    One(&'static Conn),
    Several,
}

pub(crate) fn find(number: usize, data: u64) -> Named {
    if KNOWN.load(Relaxed) == 0 {
        return Named::None;
    }
    let map = BY_DATA.lock();
    match map.as_ref().and_then(|map| map.get(&(number, data))) {
        Some(Of {
            conn: Some(conn), ..
        }) => Named::One(conn),
        Some(Of { conn: None, .. }) => Named::Several,
        None => Named::None,
    }
}

fn named(number: usize, data: u64) -> Option<&'static Conn> {
    match find(number, data) {
        Named::One(conn) => Some(conn),
        _ => None,
    }
}

/// The connection of a registration can be found from now on.
pub(crate) fn know(conn: &'static Conn, reg: &mut Reg, _big: &Big) {
    if reg.number == 0 || std::mem::replace(&mut reg.is_known, true) {
        return;
    }
    with_map(|map| {
        let of = map.entry((reg.number, reg.data)).or_insert(Of {
            conn: Some(conn),
            regs: 0,
        });
        of.conn = of.conn.filter(|of| std::ptr::eq(*of, conn));
        of.regs += 1;
    });
}

/// Under the big lock.
fn with_map<T>(f: impl FnOnce(&mut ByData) -> T) -> T {
    let mut map = BY_DATA.lock();
    let map = map.get_or_insert_default();
    let done = f(map);
    KNOWN.store(map.len(), SeqCst);
    done
}

/// The program has made or changed a registration, or asked for it anew: one event is due.
pub(crate) fn register(conn: &'static Conn, reg: &mut Reg, big: &Big) {
    leave(reg);
    let is_elsewhere = |chan: &Chan| chan.carrier != Carrier::Here;
    if is_edge(reg) || conn.chan_slow(big).is_some_and(is_elsewhere) {
        know(conn, reg, big);
    }
    if !is_watched(reg) {
        return;
    }
    conn.has_edges.store(true, SeqCst);
    reg.room_due = true;
    DUE.fetch_add(1, SeqCst);
}

/// The registration ends, or changes (under the big lock).
pub(crate) fn leave(reg: &mut Reg) {
    reg.room_moved = false;
    if std::mem::take(&mut reg.room_due) {
        DUE.fetch_sub(1, SeqCst);
    }
}

/// A registration waits for TCP's room in place of the bell's.
pub(crate) fn moved_to_tcp(reg: &mut Reg) {
    reg.room_moved =
        is_watched(reg) && kernel::poll_one(reg.tcp_fd(), libc::POLLOUT, 0) & libc::POLLOUT != 0;
}

/// Forgets the `data` of a registration that has ended (under the big lock).
pub(crate) fn forget(reg: &mut Reg) {
    leave(reg);
    if std::mem::take(&mut reg.is_known) {
        let key = (reg.number, reg.data);
        with_map(|map| {
            if let Some(of) = map.get_mut(&key) {
                of.regs -= 1;
                if of.regs == 0 {
                    map.remove(&key);
                }
            }
        });
    }
}

/// A send finds no room, or the socket is shut down. Called before the bell is filled and after it, so that an event in between is neither taken for an earlier one nor for the last.
#[inline]
pub(crate) fn found_full(conn: &Conn) {
    if conn.has_edges.load(Relaxed) {
        conn.fulls.fetch_add(1, SeqCst);
    }
}

/// Returns true if an event, which is not of an end, has to be looked at.
#[inline]
pub(crate) fn is_suspect(events: u32) -> bool {
    let is_out = events & OUT != 0;
    KNOWN.load(Relaxed) != 0
        && (is_out && (events & IN == 0 || DUE.load(Relaxed) != 0)
            || !is_out && events & IN != 0 && sets::has_mixed())
}

/// The kernel has reported these events of a set: senders whose rings it has reported ring again for what comes next.
pub(crate) fn renew(number: usize, events: &[epoll_event]) {
    if KNOWN.load(Relaxed) == 0 || number == 0 {
        return;
    }
    let _busy = signal::again(&LIBRARY);
    for event in events.iter().filter(|event| event.events & IN != 0) {
        let Some(conn) = named(number, event.u64) else {
            continue;
        };
        let inside = conn.enter();
        if let Some(chan) = conn.chan(&inside)
            && chan.stream.is_rung_out(chan.peer())
        {
            let side = chan.side();
            let _rx = side.rx_lock.lock();
            let head = side.head.load(Relaxed);
            if side.rx_state.load(SeqCst) == Route::Ring
                && matches!(chan.stream.ready(chan.peer(), head), Ok((1.., false)))
            {
                bell::ask_for_more(chan);
            }
        }
    }
}

/// The events that the program is to see; 0: none.
pub(crate) fn told((set, number): (c_int, usize), (events, data): (u32, u64), big: &Big) -> u32 {
    let Some(conn) = named(number, data) else {
        return events;
    };
    let is_it = |reg: &&mut Reg| reg.set == set && reg.number == number && reg.data == data;
    let (Some(chan), Some(reg)) = (
        conn.chan_slow(big),
        conn.slow(big).regs.iter_mut().find(is_it),
    ) else {
        return events;
    };
    let has_moved = std::mem::take(&mut reg.room_moved);
    // Another process that shares the socket may have found it full, and an end is an edge of all that is there.
    let may_be_due = chan.side().holders.load(SeqCst) != 1 || chan.stream.has_finished(chan.peer());
    if !is_watched(reg) || may_be_due {
        return events;
    }
    let fulls = conn.fulls.load(SeqCst);
    let is_by_bell = reg.bell.is_some_and(|events| events & OUT != 0);
    let carrier = if is_by_bell {
        reg.bell_fd(chan)
    } else {
        reg.tcp_fd()
    };
    let asks_carrier = is_by_bell || events & OUT == 0;
    let has_room =
        !asks_carrier || kernel::poll_one(carrier, libc::POLLOUT, 0) & libc::POLLOUT != 0;
    if !has_room {
        // It has been filled since. Its next room is an edge.
        return if events & IN != 0 { events } else { 0 };
    }
    // What comes by one of two descriptors is reported with what the other has, as TCP does.
    let all = events | if reg.mixed { reg.events & OUT } else { 0 };
    if all & OUT == 0 {
        return events;
    }
    let is_due = !is_by_bell && !has_moved || reg.room_due || reg.fulls != fulls;
    leave(reg);
    reg.fulls = fulls;
    if is_due || events & IN != 0 { all } else { 0 }
}
