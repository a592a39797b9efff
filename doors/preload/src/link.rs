//! How a connection gets a channel and leaves it.

use libc::c_int;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::Role;
use weft_run::connection::Phase;
use weft_run::connection::over::{self, Answer};
use weft_run::gate::Join;
use weft_run::ledger::Word;
use weft_run::meet::{self, Dialled, Ends, Why};
use weft_run::pace;
use weft_run::peers::User;

use crate::chan::Chan;
use crate::conn::{Big, Conn, Inside, Slow, big};
use crate::direction::{close_sending, tx_after};
use crate::guests::{self, count_in};
use crate::kernel::borrowed;
use crate::peer::{made, new_stream, open_stream};
use crate::{containers, counts, hidden, hosts, kernel, settings};

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
    let is_expected = || conn.asked.load(Relaxed) || conn.meets.load(Relaxed);
    if pace::is_due(n) || (n.is_multiple_of(pace::ANSWER) && is_expected()) {
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
    if !is_local && !hosts::keeps_beginnings() {
        return conn.plain(Why::Elsewhere);
    }
    // The broker is asked when nobody has come through the folder.
    let by_folder = !is_local
        && containers::folder().is_some()
        && (n <= BY_FOLDER || hosts::wanted().is_none());
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
        _ if by_folder => containers::look(conn, fd, ends, &big),
        (Some(carrier), _) if !is_local => hosts::look(conn, fd, n, ends, carrier, &big),
        (_, Role::Initiator) => dial(conn, fd, &ends, &big),
        (_, Role::Responder) => take(conn, fd, &ends, &big),
    };
    let made = match made {
        Ok(None) | Err(Why::NameTaken) if is_local && n >= LOOK_AT_USER => {
            meet_user(conn, fd, conn.slow(&big)).and(made)
        }
        made => made,
    };
    let is_meeting = conn.slow(&big).is_meeting();
    conn.meets.store(is_meeting, Relaxed);
    let is_last = n >= pace::LAST_STEP || n >= pace::LAST_LOOK && !is_meeting;
    match made {
        Ok(Some(chan)) => {
            conn.note(Why::None);
            conn.slow(&big).close_wires(false);
            conn.link(chan, &big);
            drop(big);
            join(conn, inside);
        }
        Ok(None) if is_last => give_up(conn, Why::NoPeer, &big),
        Ok(None) if (is_local || by_folder) && n >= LATE_LOOK => conn.note(Why::NoPeer),
        Ok(None) if is_local || by_folder => conn.note(Why::NotYet),
        Ok(None) => {}
        // Who has the name may let it go. In a folder that user need not be the peer's.
        Err(why) if !is_last && (why == Why::NameTaken || by_folder && why == Why::OtherUser) => {
            conn.note(why);
        }
        Err(why) => give_up(conn, why, &big),
    }
}

/// Calls of ours in which a peer under `weft run` would come through the folder.
const BY_FOLDER: u64 = 32;

/// After as many calls of ours a peer of our user would mostly have met us.
const LOOK_AT_USER: u64 = 8;

/// Notes the peer's user, once. Fails if we do not meet that user. `false`: no process has the peer's end yet.
fn meet_user(conn: &Conn, fd: c_int, slow: &mut Slow) -> Result<bool, Why> {
    if slow.knows_user {
        return Ok(true);
    }
    let peer = match meet::peer(borrowed(fd), guests::peers()) {
        Ok(Some(peer)) => peer,
        Ok(None) => return Ok(false),
        // A sandbox keeps the kernel's answer from us. That is no reason as long as no peer has come.
        Err(_) => return Ok(true),
    };
    slow.knows_user = true;
    if peer.user != Some(User::Own) {
        conn.row.put(Word::PeerUser, 1 + u64::from(peer.uid));
    }
    peer.user.map(|_| true).ok_or(Why::OtherUser)
}

/// After as many calls of ours a peer under `weft run` would have looked for us, unless it reads nothing.
const LATE_LOOK: u64 = 256;

pub(crate) fn give_up(conn: &'static Conn, why: Why, big: &Big) {
    let has_others = conn.holders(&conn.enter()) > 1;
    conn.slow(big).close_wires(has_others);
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

/// The initiator's part.
fn dial(conn: &Conn, fd: c_int, ends: &Ends, big: &Big) -> Result<Option<Chan>, Why> {
    let slow = conn.slow(big);
    let dialled = if let Some(dialled) = slow.dialled.take() {
        dialled
    } else {
        let Some(dialled) = meet::dial(ends, guests::peers())? else {
            return Ok(None);
        };
        dialled.map(hidden::hide).ok_or(Why::Descriptors)?
    };
    match meet::is_let_in(borrowed(dialled.wire)) {
        None => {
            slow.dialled = Some(dialled);
            Ok(None)
        }
        Some(true) if dialled.is_current() => offer(conn, fd, dialled),
        // The next look dials again.
        Some(_) => {
            hidden::close(dialled.wire);
            Ok(None)
        }
    }
}

/// Makes the channel whose bell is this wire.
fn offer(conn: &Conn, fd: c_int, dialled: Dialled<c_int>) -> Result<Option<Chan>, Why> {
    let wire = hidden::show(dialled.wire);
    let Some(peer) = meet::peer(borrowed(fd), guests::peers())? else {
        return Ok(None);
    };
    let user = dialled.agree(&peer)?;
    let guest = count_in(&conn.row, user)?;
    let (stream, segment) = new_stream(user)?;
    meet::offer(&wire, borrowed(fd), peer.cookie, segment.as_fd())?;
    let process = (user == User::Own).then(|| meet::peer_process(&wire));
    made((stream, Role::Initiator, wire), fd, process, guest)
}

/// The responder's part.
fn take(conn: &'static Conn, fd: c_int, ends: &Ends, big: &Big) -> Result<Option<Chan>, Why> {
    let slow = conn.slow(big);
    let listener = if let Some(listener) = slow.listener {
        listener
    } else {
        // A peer that is not met finds no listener.
        if !meet_user(conn, fd, slow)? {
            return Ok(None);
        }
        let listener = hidden::hide(meet::listen(ends)?).ok_or(Why::Descriptors)?;
        *slow.listener.insert(listener)
    };
    let (listener, socket) = (borrowed(listener), borrowed(fd));
    let Some(offer) = meet::take(listener, &mut slow.pending, socket, guests::peers())? else {
        return Ok(None);
    };
    let guest = count_in(&conn.row, offer.user)?;
    let stream = open_stream(&offer.segment, offer.user)?;
    let process = (offer.user == User::Own).then_some(offer.process);
    made((stream, Role::Responder, offer.bell), fd, process, guest)
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
