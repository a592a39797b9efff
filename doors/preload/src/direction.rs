//! The switch of each direction of a connection to its ring, and back to TCP.

use libc::c_int;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::stream::Wish;
use weft_run::connection::over::{self, Answer, Next, Step};
use weft_run::connection::send;
use weft_run::connection::{Carrier, Route};
use weft_run::ledger::Word;
use weft_run::meet::Why;

use crate::bell::Heard;
use crate::chan::Chan;
use crate::conn::{Big, Conn, Inside, big};
use crate::{bell, counts, kernel, ledger, ready, settings, signal};

/// Switches the incoming direction to the ring if all bytes sent over TCP have been received, and no other thread of this process waits in the
/// kernel for more.
#[inline]
pub(crate) fn try_switch_rx(conn: &'static Conn, chan: &Chan, inside: &Inside) -> bool {
    let may = chan
        .stream
        .may_switch(chan.peer(), conn.rx_count.load(SeqCst));
    may && go_over(conn, chan, inside)
}

/// Takes the incoming direction over, step by step. If the peer is on another host, the receiver looks at both from then on.
#[cold]
pub(crate) fn go_over(conn: &'static Conn, chan: &Chan, inside: &Inside) -> bool {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let is_here = chan.carrier == Carrier::Here;
    let big = big();
    let mut rx = None;
    let mut step = Step::FIRST;
    let end = loop {
        let count = conn.rx_count.load(SeqCst);
        let answer: Answer = match step {
            Step::IsOpen => (!settings::is_off() && !stream.is_closed(peer)).into(),
            Step::IsAlone => (conn.holders(inside) == 1).into(),
            Step::CanMove => ready::can_move(conn, chan, &big).into(),
            Step::IsOnTcp => {
                rx = Some(side.rx_lock.lock());
                (side.rx_state.load(SeqCst) == Route::Tcp).into()
            }
            Step::IsCarried => (is_here || bell::probe(chan.bell()) != Heard::End).into(),
            Step::Mark => {
                side.rx_state.store(over::marked(chan.carrier), SeqCst);
                Answer::Yes
            }
            Step::NobodyWaits => (conn.in_rx.load(SeqCst) == 0).into(),
            // All that was sent has been received: a byte that is left is of a call that is not seen.
            Step::Count if is_here => over::compare(count, counts::arrived(conn.descriptor())),
            Step::Count => over::compare(count, counts::received(conn.descriptor())),
            Step::Arm => {
                stream.arm(peer, side.head.load(Relaxed), Wish::Once);
                Answer::Yes
            }
            Step::Tell if is_here => stream.switch(peer, count).into(),
            Step::Tell => {
                stream.consent(peer, count);
                Answer::Yes
            }
        };
        match step.next(answer) {
            Next::Do(next) => step = next,
            end => break end,
        }
    };
    if let Next::Not { unmark: true, .. } | Next::Never { unmark: true, .. } = end {
        side.rx_state.store(Route::Tcp, SeqCst);
    }
    drop(rx);
    match end {
        Next::Not { why, .. } => {
            if why != Why::None {
                conn.note(why);
            }
            false
        }
        Next::Never { why, .. } => {
            drop(big);
            conn.note(why);
            if is_here {
                stream.close(peer);
            }
            rx_after(conn, chan, why);
            false
        }
        Next::Over | Next::Do(_) => {
            if is_here && side.tx_state.load(SeqCst) != Route::Ring {
                ledger::switched();
            }
            moved(conn, chan, &big);
            true
        }
    }
}

/// Switches the outgoing direction to the ring: the receiver has switched.
pub(crate) fn switch_tx(conn: &'static Conn, chan: &Chan) {
    let big = big();
    let side = chan.side();
    if side.tx_state.change(Route::Tcp, Route::Ring, SeqCst) {
        if side.rx_state.load(SeqCst) != Route::Ring {
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
    if side.tx_state.swap(Route::After, SeqCst) == Route::Ring {
        gone_back(conn, why);
    }
    moved(conn, chan, &big);
}

/// Shuts the socket down for sending by `call`. A send of another thread either is published before the FIN, or is TCP's to refuse.
pub(crate) fn shut_sending(chan: &Chan, call: impl FnOnce() -> c_int) -> c_int {
    let _busy = signal::begin();
    let _tx = chan.side().tx_lock.lock();
    let rc = call();
    if rc == 0 {
        chan.side().tx_state.store(Route::After, SeqCst);
    }
    rc
}

/// Moves the incoming direction back to TCP: the ring is empty and closed.
pub(crate) fn rx_after(conn: &'static Conn, chan: &Chan, why: Why) {
    let big = big();
    let side = chan.side();
    if side.rx_state.swap(Route::After, SeqCst) == Route::Ring {
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
pub(crate) fn moved(conn: &'static Conn, chan: &Chan, big: &Big) {
    let (tx, rx) = chan.mode();
    conn.row
        .put(Word::Mode, u64::from((tx as u32) << 8 | rx.told() as u32));
    conn.tell_tcp();
    ready::follow(conn, chan, big);
}

/// Moves the outgoing direction back to TCP; the peer still reads the bytes in the ring.
pub(crate) fn stop_sending(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.side().tx_state.load(SeqCst) == Route::Ring {
        conn.note(why);
    }
    close_sending(conn, chan, why);
}

/// The same for a connection that the caller is inside of.
pub(crate) fn close_sending(conn: &'static Conn, chan: &Chan, why: Why) {
    let side = chan.side();
    {
        let _tx = side.tx_lock.lock();
        chan.stream.close(chan.role);
    }
    if send::rings_at_close(why, chan.carrier) {
        bell::ring_for_tcp(chan);
    }
    if side.tx_state.load(SeqCst) == Route::Ring {
        tx_after(conn, chan, why);
    }
}
