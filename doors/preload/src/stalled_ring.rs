//! Full rings whose peer does not read.
//!
//! The kernel's TCP buffers hold more than a ring. A program may rely on that: it sends on both ends before it reads, in one thread. So a sender
//! whose peer reads nothing for [`PATIENCE_MS`] goes back to TCP. A sender that waits in `send` notices that itself; for those that must not wait,
//! `poll` and `epoll_wait` look while there is a full ring.

use libc::{c_int, timespec};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::Route;
use weft_run::meet::Why;

use crate::bell::PATIENCE_MS;
use crate::chan::Chan;
use crate::conn::Conn;
use crate::{clock, direction, table};

/// Rings of this process that a send found full. May be too high after a fork; then waits are cut for nothing until the next look.
static FULL: AtomicU32 = AtomicU32::new(0);

/// A send that must not wait found the ring full. Returns true if the peer has read nothing for [`PATIENCE_MS`], which a program that does not wait in `poll` or
/// `epoll_wait` finds out here.
pub(crate) fn found_full(chan: &Chan) -> bool {
    let side = chan.side();
    let at = chan.stream.progress(chan.role).wrapping_add(1).max(1);
    let before = side.full.swap(at, SeqCst);
    if before == 0 {
        FULL.fetch_add(1, SeqCst);
    }
    let now = clock::about_now() / 1_000_000;
    if before != at {
        side.full_since.store(now, Relaxed);
        return false;
    }
    now.saturating_sub(side.full_since.load(Relaxed)) > PATIENCE_MS as u64
}

/// There is room again.
#[inline]
pub(crate) fn has_room(chan: &Chan) {
    if chan.side().full.load(Relaxed) != 0 {
        chan.side().full.store(0, SeqCst);
    }
}

/// Moves senders whose peer has read nothing since the last look back to TCP. Returns whether one moved; counts the rings that are still full.
fn look() -> bool {
    let mut stuck: Vec<&'static Conn> = Vec::new();
    let mut full = 0;
    table::each_socket(|_, conn: &'static Conn| {
        let inside = conn.enter();
        let Some(chan) = conn.chan(&inside) else {
            return;
        };
        let side = chan.side();
        let before = side.full.load(SeqCst);
        if before == 0 {
            return;
        }
        if side.tx_state.load(SeqCst) != Route::Ring {
            side.full.store(0, SeqCst);
            return;
        }
        let now = chan.stream.progress(chan.role).wrapping_add(1).max(1);
        let room = chan.stream.room(chan.role, side.tail.load(Relaxed));
        if before == now && room == Ok(0) {
            side.full.store(0, SeqCst);
            stuck.push(conn);
        } else {
            full += 1;
            side.full.store(now, SeqCst);
        }
    });
    FULL.store(full, SeqCst);
    for conn in &stuck {
        direction::stop_sending(conn, Why::SlowReader);
    }
    !stuck.is_empty()
}

/// Waits by `call` for `timeout` milliseconds (-1: for ever), with looks in between while a ring is full.
pub(crate) fn patient(timeout: c_int, mut call: impl FnMut(c_int) -> c_int) -> c_int {
    let mut left = timeout;
    loop {
        if FULL.load(Relaxed) == 0 || (0..=PATIENCE_MS).contains(&left) {
            return call(left);
        }
        let n = call(PATIENCE_MS);
        if n != 0 {
            return n;
        }
        look();
        if left > 0 {
            left = (left - PATIENCE_MS).max(0);
        }
    }
}

/// The same for a time limit of seconds and nanoseconds.
pub(crate) fn patient_until(
    timeout: *const timespec,
    mut call: impl FnMut(*const timespec) -> c_int,
) -> c_int {
    if FULL.load(Relaxed) == 0 {
        return call(timeout);
    }
    // SAFETY: the caller's, or none.
    let given = unsafe { timeout.as_ref() };
    let millis = given.map_or(-1, |t| {
        let millis = t
            .tv_sec
            .saturating_mul(1000)
            .saturating_add((t.tv_nsec + 999_999) / 1_000_000);
        c_int::try_from(millis).unwrap_or(c_int::MAX)
    });
    patient(millis, |millis| match u64::try_from(millis) {
        Ok(millis) => call(&clock::timespec(millis * 1_000_000)),
        Err(_) => call(std::ptr::null()),
    })
}
