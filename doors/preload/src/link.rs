//! How a connection gets a channel and leaves it.

use libc::c_int;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::connection::Phase;
use weft_run::connection::over::{self, Answer};
use weft_run::gate::Join;
use weft_run::meet::{self, Ends, Why};
use weft_run::pace;

use crate::bell::{self, channel};
use crate::chan::Chan;
use crate::conn::{Big, Conn, Inside, Slow, big};
use crate::direction::{close_sending, tx_after};
use crate::kernel::borrowed;
use crate::{counts, hidden, hosts, kernel, settings};

/// Bytes that a direction's ring holds.
const RING_BYTES: u32 = 256 << 10;

/// Counts a send or receive, and looks for the peer when that is due.
#[inline]
pub(crate) fn tick(conn: &'static Conn, fd: c_int, inside: &Inside) {
    if conn.phase.load(Relaxed) != Phase::Probing {
        return;
    }
    let n = conn.ops.fetch_add(1, Relaxed) + 1;
    if n < settings::first_look()
        && conn.gate.count() + conn.rx_count.load(Relaxed) < pace::FIRST_BYTES
    {
        return;
    }
    if pace::is_due(n) || (n.is_multiple_of(pace::ANSWER) && conn.asked.load(Relaxed)) {
        look(conn, fd, n, inside);
    }
}

/// Takes back the count of a call that neither sent nor received.
pub(crate) fn untick(conn: &Conn) {
    let phase = conn.phase.load(Relaxed);
    if phase == Phase::Probing && crate::errno() == libc::EAGAIN && conn.ops.load(Relaxed) > 0 {
        conn.ops.fetch_sub(1, Relaxed);
    }
}

#[cold]
fn look(conn: &'static Conn, fd: c_int, n: u64, inside: &Inside) {
    let big = big();
    if conn.phase.load(SeqCst) != Phase::Probing {
        return;
    }
    if settings::is_off() {
        conn.plain(Why::IoUring);
        return;
    }
    let slow = conn.slow(&big);
    let is_first = slow.ends.is_none();
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
    conn.row.begin(fd, &ends);
    // Those that are set later are seen; these may come from the listener.
    if is_first && kernel::has_options_of_tcp(fd) {
        return give_up(conn, Why::Option, &big);
    }
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
        Ok(None) if is_local && n >= LATE_LOOK => conn.note(Why::NoPeer),
        Ok(None) if is_local => conn.note(Why::NotYet),
        Ok(None) => {}
        Err(why) => give_up(conn, why, &big),
    }
}

/// After as many calls of ours a peer under `weft run` would have looked for us, unless it reads nothing.
const LATE_LOOK: u64 = 256;

pub(crate) fn give_up(conn: &'static Conn, why: Why, big: &Big) {
    let slow = conn.slow(big);
    slow.pending = None;
    close_wires(slow);
    conn.plain(why);
}

/// The program has ended its direction while the broker was asked for the peer's host. Without another call it would not hear the answer, and a receiver
/// there that has gone over would wait for the broker's word of the end.
pub(crate) fn stop_asking(conn: &'static Conn) {
    if conn.asked.load(Relaxed) {
        let big = big();
        if conn.phase.load(SeqCst) == Phase::Probing {
            give_up(conn, Why::NotConfirmed, &big);
        }
    }
}

/// Closes the descriptors that were needed to find the peer.
fn close_wires(slow: &mut Slow) {
    for fd in [slow.listener.take(), slow.wire.take()]
        .into_iter()
        .flatten()
    {
        hidden::close(fd);
    }
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
fn take(conn: &'static Conn, fd: c_int, ends: &Ends, big: &Big) -> Result<Option<Chan>, Why> {
    let slow = conn.slow(big);
    let listener = if let Some(listener) = slow.listener {
        listener
    } else {
        // The name is taken: by another process that shares the socket, or by one that wants to prevent the meeting.
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
    if stream.capacity() != RING_BYTES as usize {
        return Err(Why::Broken);
    }
    let mut chan = channel(stream, Role::Responder, offer.bell, fd)?;
    chan.peer_process = offer.process;
    Ok(Some(chan))
}

/// From here on the peer can follow what we send over TCP. Only when no send is under way, and the kernel has the count that we have. `false`: not yet.
#[inline]
pub(crate) fn join(conn: &'static Conn, inside: &Inside) -> bool {
    conn.gate.is_joined() || try_join(conn, inside)
}

#[cold]
fn try_join(conn: &'static Conn, inside: &Inside) -> bool {
    let Some(chan) = conn.chan(inside) else {
        return false;
    };
    let big = big();
    if !over::may_join(conn.holders(inside), chan.side().tx_state.load(SeqCst)) {
        return conn.gate.is_joined();
    }
    let dialled = conn.dialled.load(Relaxed);
    let mut answer = Answer::No;
    let joined = conn.gate.join(|count| {
        answer = over::compare(count, counts::sent(conn.descriptor(), dialled));
        if answer == Answer::Yes {
            chan.stream.join(chan.role, count);
        }
        answer == Answer::Yes
    });
    drop(big);
    // The kernel does not say how many while bytes move, and after the end of the direction.
    if joined == Join::Refused && answer == Answer::Never {
        conn.note(Why::Unseen);
        close_sending(conn, chan, Why::Unseen);
        tx_after(conn, chan, Why::Unseen);
    }
    joined == Join::Done
}
