//! The switch of each direction of a connection to its ring, and back to TCP.

use libc::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::stream::Wish;
use weft_run::ledger::{AFTER, Carrier, RING, TCP, Word};
use weft_run::meet::Why;

use crate::chan::{BOTH, Chan};
use crate::conn::{Conn, Inside, big};
use crate::{bell, counts, kernel, ledger, ready, settings};

/// Switches the incoming direction to the ring if all bytes sent over TCP have been received, and no other thread of this process waits in the
/// kernel for more.
#[inline]
pub(crate) fn try_switch_rx(conn: &'static Conn, chan: &Chan, inside: &Inside) -> bool {
    let (stream, peer) = (&chan.stream, chan.peer());
    if !stream.may_switch(peer, conn.rx_count.load(SeqCst)) {
        return false;
    }
    switch_rx(conn, chan, inside)
}

#[cold]
fn switch_rx(conn: &'static Conn, chan: &Chan, inside: &Inside) -> bool {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let big = big();
    if settings::is_off() || stream.is_closed(peer) {
        return false;
    }
    if conn.holders(inside) != 1 {
        conn.note(Why::Forked);
        return false;
    }
    if !ready::can_move(conn, chan, &big) {
        conn.note(Why::Epoll);
        return false;
    }
    {
        let rx = side.rx_lock.lock();
        if side.rx_state.load(SeqCst) != TCP {
            return false;
        }
        match counts::received(conn.descriptor()) {
            Some(all) if all == conn.rx_count.load(SeqCst) => {}
            Some(_) => {
                drop(rx);
                drop(big);
                return never_switch(conn, chan);
            }
            // The peer has ended its direction, or bytes move at this moment.
            None => return false,
        }
        // A thread that enters the kernel after this store sees it.
        side.rx_state.store(RING, SeqCst);
        // The sender's first bytes in the ring are rung for: the request stands before it may send any.
        stream.arm(peer, side.head.load(Relaxed), Wish::Once);
        if conn.in_rx.load(SeqCst) != 0 || !stream.switch(peer, conn.rx_count.load(SeqCst)) {
            side.rx_state.store(TCP, SeqCst);
            return false;
        }
    }
    if side.tx_state.load(SeqCst) != RING {
        ledger::switched();
    }
    moved(conn, chan, &big);
    true
}

/// Bytes have been received by a call that is not seen: the rest of the stream comes over TCP.
#[cold]
fn never_switch(conn: &'static Conn, chan: &Chan) -> bool {
    conn.note(Why::Unseen);
    chan.stream.close(chan.peer());
    rx_after(conn, chan, Why::Unseen);
    false
}

/// Switches the outgoing direction to the ring: the receiver has switched.
pub(crate) fn switch_tx(conn: &'static Conn, chan: &Chan) {
    let big = big();
    let side = chan.side();
    if side
        .tx_state
        .compare_exchange(TCP, RING, SeqCst, SeqCst)
        .is_ok()
    {
        if side.rx_state.load(SeqCst) != RING {
            ledger::switched();
        }
        if ready::once_keeps_tcp(conn, chan, &big) {
            drop(big);
            return stop_sending(conn, Why::Epoll);
        }
        moved(conn, chan, &big);
        acknowledge(conn.descriptor());
    }
}

/// Acknowledges the bytes received over TCP now. The kernel leaves that to our next segment, and none follows if the outgoing direction is on the ring: a
/// peer without `TCP_NODELAY` would hold its next short send back for 40 ms.
#[cold]
pub(crate) fn acknowledge(fd: c_int) {
    let on: c_int = 1;
    kernel::set_option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, &on);
}

/// Moves the outgoing direction back to TCP.
pub(crate) fn tx_after(conn: &'static Conn, chan: &Chan, why: Why) {
    chan.await_release();
    let big = big();
    let side = chan.side();
    if side.tx_state.swap(AFTER, SeqCst) == RING {
        gone_back(conn, why);
    }
    moved(conn, chan, &big);
}

/// Moves the incoming direction back to TCP: the ring is empty and closed.
pub(crate) fn rx_after(conn: &'static Conn, chan: &Chan, why: Why) {
    let big = big();
    let side = chan.side();
    if side.rx_state.swap(AFTER, SeqCst) == RING {
        gone_back(conn, why);
    }
    moved(conn, chan, &big);
}

fn gone_back(conn: &Conn, why: Why) {
    if why != Why::None {
        if conn.why.load(Relaxed) == Why::None as u32 {
            conn.note(why);
        }
        ledger::back();
    }
}

/// Updates the registrations in epoll sets.
pub(crate) fn moved(conn: &'static Conn, chan: &Chan, big: &MutexGuard<'_, ()>) {
    let (tx, rx) = chan.mode();
    let rx = if rx == BOTH { TCP } else { rx };
    conn.row.put(Word::Mode, u64::from(tx << 8 | rx));
    conn.tell_tcp();
    ready::follow(conn, chan, big);
}

/// Moves the outgoing direction back to TCP; the peer still reads the bytes in the ring.
pub(crate) fn stop_sending(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.side().tx_state.load(SeqCst) == RING {
        conn.note(why);
    }
    close_sending(conn, chan, why);
}

/// There may be bytes in TCP behind a closed ring: wakes a receiver that waits for the ring.
#[inline]
pub(crate) fn ring_for_tcp(chan: &Chan) {
    if chan.stream.is_armed(chan.role) && chan.stream.take_wish(chan.role) {
        bell::ring(chan.bell());
    }
}

/// The same for a connection that the caller is inside of.
pub(crate) fn close_sending(conn: &'static Conn, chan: &Chan, why: Why) {
    let side = chan.side();
    {
        let _tx = side.tx_lock.lock();
        chan.stream.close(chan.role);
    }
    // The receiver looks at TCP when there is something: our next send over TCP rings. What others send is not seen.
    let is_seen = matches!(
        why,
        Why::ShutRead | Why::SlowReader | Why::Epoll | Why::Peer
    );
    if !is_seen || chan.carrier != Carrier::Here {
        ring_for_tcp(chan);
    }
    if side.tx_state.load(SeqCst) == RING {
        tx_after(conn, chan, why);
    }
}
