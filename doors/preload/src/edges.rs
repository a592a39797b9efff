//! Edges of `EPOLLOUT`: TCP reports one when a socket is registered, and when there is room after a send that found none. A bell reports one each time
//! that the peer has read from it, too. Such events of edge-triggered registrations are taken out before the program sees them.
//!
//! # Safety
//!
//! As `epoll_wait(2)`.

use libc::c_int;
use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::conn::{Conn, Reg};
use crate::kernel;
use crate::sets::{self, IN, OUT};

const EDGE: u32 = libc::EPOLLET as u32;

/// Connections by set and `data` of their edge-triggered registrations for room; `None`: two have the same. Used under the big lock only.
static BY_DATA: LazyLock<Mutex<ByData>> = LazyLock::new(Mutex::default);

type ByData = HashMap<(usize, u64), Option<&'static Conn>>;

/// Entries of [`BY_DATA`].
static KNOWN: AtomicUsize = AtomicUsize::new(0);

/// Registrations whose first event is due.
static DUE: AtomicUsize = AtomicUsize::new(0);

fn is_watched(reg: &Reg) -> bool {
    reg.number != 0 && reg.events & EDGE != 0 && reg.events & OUT != 0
}

/// Under the big lock.
fn with_map<T>(f: impl FnOnce(&mut ByData) -> T) -> T {
    let mut map = BY_DATA.lock().unwrap_or_else(PoisonError::into_inner);
    let done = f(&mut map);
    KNOWN.store(map.len(), SeqCst);
    done
}

/// The program has made or changed a registration, or asked for it anew: one event is due.
pub(crate) fn register(conn: &'static Conn, reg: &mut Reg, _big: &MutexGuard<'_, ()>) {
    leave(reg);
    if !is_watched(reg) {
        return;
    }
    with_map(|map| {
        map.entry((reg.number, reg.data))
            .and_modify(|of| *of = of.filter(|of| std::ptr::eq(*of, conn)))
            .or_insert(Some(conn));
    });
    conn.has_edges.store(true, SeqCst);
    reg.room_due = true;
    DUE.fetch_add(1, SeqCst);
}

/// The registration ends, or changes (under the big lock).
pub(crate) fn leave(reg: &mut Reg) {
    if std::mem::take(&mut reg.room_due) {
        DUE.fetch_sub(1, SeqCst);
    }
}

/// Forgets the `data` of a registration that has ended (under the big lock).
pub(crate) fn forget(reg: &mut Reg) {
    leave(reg);
    if is_watched(reg) && KNOWN.load(SeqCst) != 0 {
        let key = (reg.number, reg.data);
        with_map(|map| {
            if map.get(&key).is_some_and(Option::is_some) {
                map.remove(&key);
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

/// Returns true if any registration is watched.
#[inline]
pub(crate) fn has_any() -> bool {
    KNOWN.load(Relaxed) != 0
}

/// Returns true if an event, which is not of an end, has to be looked at.
#[inline]
pub(crate) fn is_suspect(events: u32) -> bool {
    let is_out = events & OUT != 0;
    KNOWN.load(Relaxed) != 0
        && (is_out && (events & IN == 0 || DUE.load(Relaxed) != 0)
            || !is_out && events & IN != 0 && sets::has_mixed())
}

/// The events that the program is to see; 0: none.
pub(crate) fn told(
    (set, number): (c_int, usize),
    (events, data): (u32, u64),
    big: &MutexGuard<'_, ()>,
) -> u32 {
    let Some(Some(conn)) = with_map(|map| map.get(&(number, data)).copied()) else {
        return events;
    };
    let is_it = |reg: &&mut Reg| reg.set == set && reg.number == number && reg.data == data;
    let (Some(chan), Some(reg)) = (
        conn.chan_slow(big),
        conn.slow(big).regs.iter_mut().find(is_it),
    ) else {
        return events;
    };
    // Another process that shares the socket may have found it full, and an end is an edge of all that is there.
    let may_be_due = chan.side().holders.load(SeqCst) != 1 || chan.stream.is_closed(chan.peer());
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
    let is_due = !is_by_bell || reg.room_due || reg.fulls != fulls;
    leave(reg);
    reg.fulls = fulls;
    if is_due || events & IN != 0 { all } else { 0 }
}
