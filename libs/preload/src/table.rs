//! What each descriptor of the process is to us.

use libc::c_int;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire},
};

use crate::conn::{Conn, Inside};
use crate::dgram::Dgram;

/// Descriptors from here on stay what they are.
pub(crate) const MAX_FD: usize = 1 << 16;

/// 0: not ours. Low bits 00: a [`Conn`]. 01: hidden, the library's own. 10: a [`Dgram`]. 11: an epoll set, its number above.
static TABLE: [AtomicUsize; MAX_FD] = [const { AtomicUsize::new(0) }; MAX_FD];

/// No number above has ever had an entry.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

const HIDDEN: usize = 1;
const SET: usize = 3;
const DGRAM: usize = 2;

#[derive(Clone, Copy)]
pub(crate) enum Entry {
    None,
    Hidden,
    /// An epoll set: a number that no other set of the process has had.
    Set(usize),
    Conn(&'static Conn),
    Dgram(&'static Dgram),
}

fn of(word: usize) -> Entry {
    match word {
        0 => Entry::None,
        HIDDEN => Entry::Hidden,
        word if word & 3 == SET => Entry::Set(word >> 2),
        word if word & 3 == DGRAM => {
            let at = std::ptr::with_exposed_provenance::<Dgram>(word & !3);
            // SAFETY: only `put` stores, and what it stores with this mark is an address of a `Dgram`, none of which is ever freed.
            Entry::Dgram(unsafe { &*at })
        }
        // SAFETY: only `put` stores, and what it stores is an address of a `Conn`, none of which is ever freed.
        word => Entry::Conn(unsafe { &*std::ptr::with_exposed_provenance::<Conn>(word) }),
    }
}

fn word(entry: Entry) -> usize {
    match entry {
        Entry::None => 0,
        Entry::Hidden => HIDDEN,
        Entry::Set(number) => number << 2 | SET,
        Entry::Conn(conn) => std::ptr::from_ref(conn).expose_provenance(),
        Entry::Dgram(d) => std::ptr::from_ref(d).expose_provenance() | DGRAM,
    }
}

#[inline]
pub(crate) fn get(fd: c_int) -> Entry {
    match TABLE.get(fd as usize) {
        Some(slot) => of(slot.load(Acquire)),
        None => Entry::None,
    }
}

/// The connection behind a descriptor.
#[inline]
pub(crate) fn conn(fd: c_int) -> Option<&'static Conn> {
    match get(fd) {
        Entry::Conn(conn) => Some(conn),
        _ => None,
    }
}

/// The same, with the right to use its channel.
#[inline]
pub(crate) fn enter(fd: c_int) -> Option<(&'static Conn, Inside)> {
    let conn = conn(fd)?;
    let inside = conn.enter();
    // It may have been closed, and stand for another socket by now.
    match self::conn(fd) {
        Some(now) if std::ptr::eq(now, conn) => Some((conn, inside)),
        _ => None,
    }
}

/// Puts an entry, and returns what was there. A number beyond the table has none.
pub(crate) fn put(fd: c_int, entry: Entry) -> Entry {
    if holds(fd) {
        HIGHEST.fetch_max(fd as usize, AcqRel);
    }
    match TABLE.get(fd as usize) {
        Some(slot) => of(slot.swap(word(entry), AcqRel)),
        None => Entry::None,
    }
}

pub(crate) fn holds(fd: c_int) -> bool {
    (fd as usize) < MAX_FD
}

/// All descriptors in a range that have an entry.
pub(crate) fn each(first: usize, last: usize, mut f: impl FnMut(c_int, Entry)) {
    for fd in first..=last.min(HIGHEST.load(Acquire)) {
        match get(fd as c_int) {
            Entry::None => {}
            entry => f(fd as c_int, entry),
        }
    }
}
