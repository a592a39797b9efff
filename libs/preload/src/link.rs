//! How a connection comes to a channel, each direction onto its ring, and back.

use libc::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::ledger::{AFTER, Carrier, RING, TCP};
use weft_run::meet::{self, Ends, Why};
use weft_run::pace;

use crate::conn::{Chan, Conn, Inside, PROBING, Slow, big};
use crate::{bell, hidden, hosts, ledger, next, ready, rx};

/// Bytes that a direction's ring holds.
const RING_BYTES: u32 = 256 << 10;

/// `WEFT_RUN_LOOK`: after how many sends and receives a connection looks for its peer.
static FIRST_LOOK: AtomicU64 = AtomicU64::new(pace::FIRST_LOOK);

pub(crate) fn first_look() -> u64 {
    FIRST_LOOK.load(Relaxed)
}

pub(crate) fn look_after(n: u64) {
    FIRST_LOOK.store(n, Relaxed);
}

/// The process does what we cannot see: no connection leaves TCP any more.
static OFF: AtomicBool = AtomicBool::new(false);

pub(crate) fn turn_off() {
    OFF.store(true, SeqCst);
}

pub(crate) fn is_off() -> bool {
    OFF.load(Relaxed)
}

fn borrowed(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the caller's descriptor, which the program keeps open during the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Counts a send or receive, and looks for the peer when that is due.
#[inline]
pub(crate) fn tick(conn: &'static Conn, fd: c_int, inside: &Inside) {
    if conn.phase.load(Relaxed) != PROBING {
        return;
    }
    let n = conn.ops.fetch_add(1, Relaxed) + 1;
    if n < FIRST_LOOK.load(Relaxed)
        && conn.tx_count.load(Relaxed) + conn.rx_count.load(Relaxed) < pace::FIRST_BYTES
    {
        return;
    }
    if pace::is_due(n) || (n.is_multiple_of(pace::ANSWER) && conn.asked.load(Relaxed)) {
        look(conn, fd, n, inside);
    }
}

/// What was counted was no send or receive after all.
pub(crate) fn untick(conn: &Conn) {
    let phase = conn.phase.load(Relaxed);
    if phase == PROBING && crate::errno() == libc::EAGAIN && conn.ops.load(Relaxed) > 0 {
        conn.ops.fetch_sub(1, Relaxed);
    }
}

#[cold]
fn look(conn: &'static Conn, fd: c_int, n: u64, inside: &Inside) {
    let big = big();
    if conn.phase.load(SeqCst) != PROBING {
        return;
    }
    if is_off() {
        conn.plain(Why::IoUring);
        return;
    }
    let slow = conn.slow(&big);
    let ends = match slow.ends {
        Some(ends) => ends,
        None => match Ends::of(borrowed(fd)) {
            Ok(ends) => *slow.ends.insert(ends),
            Err(_) => return conn.plain(Why::Elsewhere),
        },
    };
    let is_local = ends.may_be_local();
    if !is_local && hosts::wanted().is_none() {
        return conn.plain(Why::Elsewhere);
    }
    ledger::begin(conn, fd, &ends);
    if conn.holders(inside) != 1 {
        conn.note(Why::Forked);
        return;
    }
    let made = match (hosts::wanted(), ends.role()) {
        (Some(carrier), _) if !is_local => hosts::look(conn, fd, n, ends, carrier, &big),
        (_, Role::Initiator) => dial(fd, &ends),
        (_, Role::Responder) => take(conn, fd, &ends, &big),
    };
    match made {
        Ok(Some(chan)) => {
            conn.note(Why::None);
            let slow = conn.slow(&big);
            slow.pending = None;
            close_wires(slow);
            conn.link(chan, &big);
            drop(big);
            join(conn, inside);
        }
        Ok(None) if n >= pace::LAST_LOOK => give_up(conn, Why::NoPeer, &big),
        Ok(None) if is_local => conn.note(Why::NoPeer),
        Ok(None) => {}
        Err(why) => give_up(conn, why, &big),
    }
}

fn give_up(conn: &'static Conn, why: Why, big: &MutexGuard<'_, ()>) {
    let slow = conn.slow(big);
    slow.pending = None;
    close_wires(slow);
    conn.plain(why);
}

/// What was needed to find the peer.
fn close_wires(slow: &mut Slow) {
    for fd in [slow.listener.take(), slow.wire.take()]
        .into_iter()
        .flatten()
    {
        hidden::close(fd);
    }
}

fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: asks for flags.
    let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

pub(crate) fn channel(stream: Stream, role: Role, bell: OwnedFd, fd: c_int) -> Result<Chan, Why> {
    bell::copy_timeouts(fd, &bell);
    // SAFETY: the bell is ours; waits on it are to block.
    unsafe { next::fcntl(bell.as_raw_fd(), libc::F_SETFL, 0) };
    let bell = hidden::hide(bell).ok_or(Why::Descriptors)?;
    Chan::new(stream, role, bell, is_nonblocking(fd)).ok_or(Why::System)
}

/// The initiator's part.
fn dial(fd: c_int, ends: &Ends) -> Result<Option<Chan>, Why> {
    let Some(wire) = meet::dial(ends)? else {
        return Ok(None);
    };
    let Some(cookie) = meet::peer_cookie(borrowed(fd))? else {
        return Ok(None);
    };
    let (stream, segment) = Stream::create(RING_BYTES).map_err(|_| Why::System)?;
    let (ours, theirs) = bell::pair().ok_or(Why::System)?;
    meet::offer(&wire, borrowed(fd), cookie, segment.as_fd(), theirs.as_fd())?;
    let mut chan = channel(stream, Role::Initiator, ours, fd)?;
    chan.peer_process = meet::peer_process(&wire);
    Ok(Some(chan))
}

/// The responder's part.
fn take(
    conn: &'static Conn,
    fd: c_int,
    ends: &Ends,
    big: &MutexGuard<'_, ()>,
) -> Result<Option<Chan>, Why> {
    let slow = conn.slow(big);
    let listener = if let Some(listener) = slow.listener {
        listener
    } else {
        // Somebody has the name: another process that shares the socket, or one that wants to keep us apart.
        let Ok(listener) = meet::listen(ends) else {
            return Ok(None);
        };
        let listener = hidden::hide(listener).ok_or(Why::Descriptors)?;
        *slow.listener.insert(listener)
    };
    let Some(offer) = meet::take(borrowed(listener), &mut slow.pending, borrowed(fd))? else {
        return Ok(None);
    };
    let stream = Stream::open(offer.segment).map_err(|_| Why::Broken)?;
    let mut chan = channel(stream, Role::Responder, offer.bell, fd)?;
    chan.peer_process = offer.process;
    Ok(Some(chan))
}

/// From here on the peer can follow what we send over TCP. Only when no send is under way.
pub(crate) fn join(conn: &Conn, inside: &Inside) -> bool {
    if conn.joined.load(SeqCst) {
        return true;
    }
    let Some(chan) = conn.chan(inside) else {
        return false;
    };
    let _big = big();
    if conn.joined.load(SeqCst) {
        return true;
    }
    if conn.in_tx.load(SeqCst) != 0 || conn.holders(inside) != 1 {
        return false;
    }
    chan.stream.join(chan.role, conn.tx_count.load(SeqCst));
    conn.joined.store(true, SeqCst);
    true
}

/// Goes over to the ring for what comes in, when all that was sent over TCP has been received, and nobody else of this process waits in the
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
    if is_off() || stream.is_closed(peer) {
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
        let _rx = side.rx_lock.lock();
        if side.rx_state.load(SeqCst) != TCP {
            return false;
        }
        // Who comes to the kernel after this sees it.
        side.rx_state.store(RING, SeqCst);
        if conn.in_rx.load(SeqCst) != 0 || !stream.switch(peer, conn.rx_count.load(SeqCst)) {
            side.rx_state.store(TCP, SeqCst);
            return false;
        }
        stream.arm(peer, side.head.load(Relaxed));
        side.armed.store(1, Relaxed);
    }
    if side.tx_state.load(SeqCst) != RING {
        ledger::switched();
    }
    moved(conn, chan, &big);
    true
}

/// Goes over to the ring for what goes out: the receiver has.
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
        acknowledge(crate::fd::any(conn));
    }
}

/// What has come over TCP is acknowledged now. The kernel leaves that to the next segment of ours, and where what goes out goes over the ring none comes: a
/// peer that has not asked for `TCP_NODELAY` would keep its next short send back for 40 ms.
#[cold]
pub(crate) fn acknowledge(fd: c_int) {
    let on: c_int = 1;
    // SAFETY: an option of that size.
    unsafe {
        next::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_QUICKACK,
            (&raw const on).cast(),
            size_of::<c_int>() as u32,
        );
    }
}

/// What goes out goes over TCP again.
pub(crate) fn tx_after(conn: &'static Conn, chan: &Chan, why: Why) {
    let big = big();
    let side = chan.side();
    if side.tx_state.swap(AFTER, SeqCst) == RING {
        gone_back(conn, why);
    }
    moved(conn, chan, &big);
}

/// What comes in comes over TCP again: the ring is empty, and closed.
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

/// The registrations in epoll sets follow.
pub(crate) fn moved(conn: &'static Conn, chan: &Chan, big: &MutexGuard<'_, ()>) {
    ledger::mode(conn, chan);
    ledger::tcp(conn);
    ready::follow(conn, chan, big);
}

/// Back to TCP in the direction that goes out; what is in the ring is still read from it.
pub(crate) fn stop_sending(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    {
        let _tx = chan.side().tx_lock.lock();
        chan.stream.close(chan.role);
    }
    if chan.stream.disarm(chan.role) {
        bell::ring(chan.bell());
    }
    if chan.side().tx_state.load(SeqCst) == RING {
        conn.note(why);
        tx_after(conn, chan, why);
    }
}

/// Back to TCP in both directions, for good. What is in the rings is still read from them.
pub(crate) fn downgrade(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        let big = big();
        if conn.phase.load(SeqCst) == PROBING {
            give_up(conn, why, &big);
        }
        return;
    };
    let (stream, side) = (&chan.stream, chan.side());
    conn.note(why);
    {
        let _tx = side.tx_lock.lock();
        stream.close(chan.role);
    }
    if stream.disarm(chan.role) {
        bell::ring(chan.bell());
    }
    if side.tx_state.load(SeqCst) == RING {
        tx_after(conn, chan, why);
    }
    if chan.carrier != Carrier::Here {
        let out_of_sight = matches!(why, Why::Exec | Why::Passed | Why::Stdio | Why::Splice);
        return hosts::want_tcp(conn, chan, out_of_sight, why);
    }
    let empty = {
        let _rx = side.rx_lock.lock();
        stream.close(chan.peer());
        bell::make_room(chan);
        let head = side.head.load(Relaxed);
        stream.ready(chan.peer(), head).is_ok_and(|(n, _)| n == 0)
    };
    if empty && side.rx_state.load(SeqCst) == RING {
        rx_after(conn, chan, why);
    }
}

/// The process becomes another program, which cannot read what is left in the ring. Where no other process can either, the connection ends: the program would
/// go on behind a hole in its stream.
pub(crate) fn end_with_unread(conn: &'static Conn) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.carrier != Carrier::Here || conn.holders(&inside) != 1 {
        return;
    }
    if rx::ring_bytes(chan).is_some_and(|n| n > 0) {
        rx::lost(conn, chan);
    }
}

/// What the process does from now on is not seen: every connection goes back, and none leaves TCP any more.
pub(crate) fn everything_back() {
    turn_off();
    crate::dgram::everything_plain(Why::IoUring);
    let mut all = Vec::new();
    crate::table::each(0, usize::MAX, |_, entry| {
        if let crate::table::Entry::Conn(conn) = entry {
            all.push(conn);
        }
    });
    for conn in all {
        downgrade(conn, Why::IoUring);
    }
}
