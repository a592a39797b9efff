//! Epoll sets, and the kernel's registrations in them.
//!
//! # Safety
//!
//! As `epoll_ctl(2)` and `epoll_wait(2)`.

use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use weft_run::events::same;

use crate::iov::is_bad;
use crate::next;
use crate::table::{self, Entry};

pub(crate) const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM | libc::EPOLLWRBAND) as u32;

pub(crate) const IN: u32 = (libc::EPOLLIN
    | libc::EPOLLRDNORM
    | libc::EPOLLRDBAND
    | libc::EPOLLPRI
    | libc::EPOLLRDHUP
    | libc::EPOLLMSG) as u32;

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

pub(crate) fn new_set(fd: c_int) {
    if fd >= 0 {
        table::put(fd, Entry::set(NEXT_SET.fetch_add(1, Relaxed)));
    }
}

pub(crate) fn after_fork() {
    FOREIGN.store(NEXT_SET.load(Relaxed), Relaxed);
}

/// Returns true if a set was made before a fork, in a parent that has it too.
pub(crate) fn is_foreign(number: usize) -> bool {
    number < FOREIGN.load(Relaxed)
}

/// Returns true if the registration's set of this number can watch another descriptor, or is gone. `is_fit`: whether the registration can.
pub(crate) fn can_move(set: c_int, number: usize, is_fit: impl FnOnce() -> bool) -> bool {
    match table::get(set).as_set() {
        Some(now) if now == number => number != 0 && is_fit(),
        // One that has two names, or none that we know.
        Some(0) => false,
        // A set that is closed by now does not matter.
        _ => number != 0,
    }
}

/// The number of an epoll set; 0: it is none that can be followed.
pub(crate) fn number(set: c_int) -> usize {
    table::get(set).as_set().unwrap_or(0)
}

pub(crate) fn control(set: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> c_int {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: an event.
    unsafe { next::epoll_ctl(set, op, fd, &raw mut event) }
}

/// Adds `n`, which may be negative, to the count of registrations that cover two descriptors.
pub(crate) fn count_mixed(n: isize) {
    MIXED.fetch_add(n.cast_unsigned(), SeqCst);
}

/// Returns true if a registration covers two descriptors.
pub(crate) fn has_mixed() -> bool {
    MIXED.load(Relaxed) != 0
}

/// Events and data; nothing for a null pointer.
pub(crate) unsafe fn parts(event: *const epoll_event) -> (u32, u64) {
    if is_bad(event) {
        return (0, 0);
    }
    // SAFETY: the caller's promise.
    let event = unsafe { event.read_unaligned() };
    (event.events, event.u64)
}

/// Two descriptors may stand for one registration at the moment: their events are put together.
pub(crate) unsafe fn merge(events: *mut epoll_event, n: c_int) -> c_int {
    let shared = n <= 64 && FORKED.load(Relaxed);
    if n < 2 || (MIXED.load(SeqCst) == 0 && !shared) {
        return n;
    }
    // SAFETY: the kernel has written `n` events.
    join(
        unsafe { std::slice::from_raw_parts_mut(events, n as usize) },
        0,
    ) as c_int
}

/// Puts the events from `from` on, a second answer of the kernel, together with those before that are of the same registration: a level-triggered socket is in
/// both, and a program that frees a connection at its event must not find it once more. 0: all with the same data. Returns how many there are then.
pub(crate) fn join(events: &mut [epoll_event], from: usize) -> usize {
    let pairs = same(events.len(), from, |at| events[at].u64);
    for &(at, first) in &pairs {
        let both = events[first].events | events[at].events;
        (events[first].events, events[at].events) = (both, 0);
    }
    let mut kept = 0;
    for at in 0..events.len() {
        // The kernel reports no event without a bit.
        if pairs.is_empty() || events[at].events != 0 {
            events[kept] = events[at];
            kept += 1;
        }
    }
    kept
}
