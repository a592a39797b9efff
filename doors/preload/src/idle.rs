//! Rings that have moved much and are idle give their memory back. A process looks at its rings while it waits, once a second as long as some were used.

use libc::c_int;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

use weft_run::connection::Route;
use weft_run::idle::{LEAST, PAUSE_MS, Verdict, verdict};

use crate::conn::Conn;
use crate::{clock, signal, table};

/// A ring may have pages to give back.
static USED: AtomicBool = AtomicBool::new(false);
/// When this process looked last, in milliseconds.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// A sender has published the bytes between these positions. A ring that has carried [`LEAST`] has passed a multiple of it.
#[inline]
pub(crate) fn published(from: u64, to: u64) {
    if from ^ to >= LEAST && !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

/// The time after which a wait of `ms` milliseconds (-1: for ever) is to be interrupted for a look. `None`: it is not.
#[inline]
pub(crate) fn interval(ms: c_int) -> Option<c_int> {
    const PAUSE: c_int = PAUSE_MS as c_int;
    (USED.load(Relaxed) && !(0..=PAUSE).contains(&ms)).then_some(PAUSE)
}

/// Looks at all rings, if that is due.
#[inline]
pub(crate) fn look() {
    if USED.load(Relaxed) {
        look_now();
    }
}

#[cold]
fn look_now() {
    let (now, before) = (clock::now_ms(), LOOKED.load(Relaxed));
    let is_due = now.saturating_sub(before) >= PAUSE_MS;
    if !is_due
        || LOOKED
            .compare_exchange(before, now, Relaxed, Relaxed)
            .is_err()
    {
        return;
    }
    USED.store(false, Relaxed);
    table::each_socket(|_, conn: &'static Conn| {
        // A handler of a fault may have interrupted its thread under the lock.
        if signal::is_inside(conn) {
            return USED.store(true, Relaxed);
        }
        let _busy = signal::again(conn);
        let inside = conn.enter();
        let Some(chan) = conn.chan(&inside) else {
            return;
        };
        let side = chan.side();
        if side.tx_state.load(SeqCst) != Route::Ring {
            return;
        }
        let _tx = side.tx_lock.lock();
        let tail = side.tail.load(Relaxed);
        if chan.stream.published(chan.role) != tail {
            // A process that shares the socket was killed while it sent. The next send finds that out.
            return;
        }
        let seen = side.seen.swap(tail, Relaxed);
        let before = (seen, side.given.load(Relaxed));
        match verdict(before, tail, chan.stream.progress(chan.role)) {
            Verdict::Stay => {}
            Verdict::Later => USED.store(true, Relaxed),
            Verdict::GiveBack => {
                side.given.store(tail, Relaxed);
                chan.stream.give_back(chan.role);
            }
        }
    });
}
