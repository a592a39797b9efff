//! Connections whose peer is on another host: the channel leads to our user's broker, which forwards the bytes.
//!
//! In contrast to a peer on this host, the receiver cannot see when all bytes sent over TCP have arrived. So it *consents* first: from
//! then on it looks at TCP and the bell ([`Route::Both`]). The sender switches by itself, between two sends, and the broker hands its count over: the
//! receiver switches when it has read as many bytes from TCP. The broker publishes nothing before that, so the bell announces nothing that a
//! receive could not keep. The formats and the order of steps are in `docs/spec/run.md`.
//!
//! # Safety
//!
//! The program's buffers are as its call says: functions that take them are as safe as `recvmsg(2)`.

use libc::{c_int, epoll_event, iovec, ssize_t};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use weft_ring::stream::Stream;
use weft_ring::{Role, checked};
use weft_run::connection::{Carrier, Route, back, ready as readiness};
use weft_run::hosts::{self, Answer, BEGINNING, ENOUGH, Registration};
use weft_run::ledger::Word;
use weft_run::meet::{Ends, Why};
use weft_run::pace;
use weft_sys::settings::LOCAL_DIR;

use crate::bell::{self, Heard};
use crate::chan::Chan;
use crate::conn::{Big, Conn, Inside, big};
use crate::edges::{self, Named};
use crate::iov::{self, Source};
use crate::kernel::{self, borrowed, entry};
use crate::regs::apply;
use crate::{counts, direction, hidden, ledger, ready, sets, signal, table};

/// Bytes that a direction's ring holds.
const RING_BYTES: u32 = 1 << 20;
/// How long a process that is about to lose sight of a socket waits for the peer's host to go back to TCP.
const PARTING_MS: c_int = 2000;
/// A socket whose TCP stream has ended checks after this time again whether the broker has reported the end.
const END_MS: c_int = 20;
const END: Duration = Duration::from_millis(END_MS as u64);

/// The carrier of connections to other hosts; `None`: they stay on TCP.
pub(crate) fn wanted() -> Option<Carrier> {
    static WANTED: OnceLock<Option<Carrier>> = OnceLock::new();
    *WANTED.get_or_init(|| {
        Some(match std::env::var(hosts::ENV).ok()?.as_str() {
            "auto" | "bsdp" => Carrier::Bsdp,
            _ => return None,
        })
    })
}

/// Whether the first bytes of connections are kept: a broker, or a peer in another network namespace, is shown that they are the same.
pub(crate) fn keeps_beginnings() -> bool {
    static KEEPS: OnceLock<bool> = OnceLock::new();
    *KEEPS.get_or_init(|| wanted().is_some() || LOCAL_DIR.path().is_some())
}

/// Keeps the first bytes of what goes out (before they are counted).
pub(crate) fn note_sent(conn: &Conn, source: &Source<'_>, n: u64) {
    let position = conn.gate.count();
    if position < BEGINNING as u64
        && keeps_beginnings()
        && let Source::Memory(iov) = source
    {
        note(conn, iov, position, n, true);
    }
}

/// Keeps the first bytes of what comes in (before they are counted).
pub(crate) fn note_received(conn: &Conn, iov: &[iovec], n: u64) {
    let position = conn.rx_count.load(Relaxed);
    if position < BEGINNING as u64 && keeps_beginnings() {
        note(conn, iov, position, n, false);
    }
}

#[cold]
fn note(conn: &Conn, iov: &[iovec], position: u64, n: u64, is_sent: bool) {
    let mut bytes = [0_u8; BEGINNING];
    let n = BEGINNING.min(n as usize);
    let len = iov::copy_pieces(iov, 0, n, |from, piece, done| {
        // SAFETY: the program's buffers; ours has room for `n`.
        unsafe { checked::copy(bytes.as_mut_ptr().add(done), from, piece) }
    });
    let big = big();
    let (sent, received) = &mut **conn.slow(&big).beginnings.get_or_insert_default();
    let of = if is_sent { sent } else { received };
    of.note(position, &bytes[..len]);
}

/// Looks for the broker's answer once, under the lock. Returns the connection's next state: a channel, nothing yet, or TCP for good.
pub(crate) fn look(
    conn: &Conn,
    fd: c_int,
    n: u64,
    ends: Ends,
    carrier: Carrier,
    big: &Big,
) -> Result<Option<Chan>, Why> {
    let slow = conn.slow(big);
    let Some(wire) = slow.wire else {
        let (sent, received) = slow.beginnings.as_deref().cloned().unwrap_or_default();
        if sent.bytes().len() + received.bytes().len() < ENOUGH {
            return if n >= pace::LAST_LOOK {
                Err(Why::NotConfirmed)
            } else {
                Ok(None)
            };
        }
        let what = Registration {
            ends,
            dialled: conn.dialled.load(Relaxed),
            carrier,
            sent,
            received,
        };
        match hosts::register(&what)? {
            Some(wire) => {
                slow.wire = Some(hidden::hide(wire).ok_or(Why::Descriptors)?);
                conn.asked.store(true, Relaxed);
            }
            None if n >= pace::LAST_LOOK => return Err(Why::NoBroker),
            None => conn.note(Why::NoBroker),
        }
        return Ok(None);
    };
    // Ours, and closed under the lock only.
    let wire = borrowed(wire);
    match hosts::answer(wire)? {
        None if n >= pace::LAST_LOOK => Err(Why::NotConfirmed),
        None => {
            conn.note(Why::NotConfirmed);
            Ok(None)
        }
        Some(Answer::No(why)) => Err(why),
        Some(Answer::Go(carrier)) => {
            let (stream, segment) = Stream::create(RING_BYTES).map_err(|_| Why::System)?;
            let (ours, theirs) = bell::pair().ok_or(Why::System)?;
            hosts::link(wire, segment.as_fd(), theirs.as_fd())?;
            let mut chan = bell::channel(stream, Role::Initiator, ours, fd)?;
            chan.carrier = carrier;
            conn.row.put(Word::Carrier, carrier as u64);
            Ok(Some(chan))
        }
    }
}

/// Makes the receiver look at both from now on, at the pace of looks.
pub(crate) fn try_consent(conn: &'static Conn, chan: &Chan, inside: &Inside) {
    let tries = u64::from(chan.side().pauses.fetch_add(1, Relaxed)) + 1;
    if pace::is_due(tries) && conn.gate.is_joined() && direction::go_over(conn, chan, inside) {
        if conn.why.load(Relaxed) == Why::Epoll as u32 {
            conn.note(Why::None);
        }
        bell::ring(chan.bell());
    }
}

/// Leaves [`Route::Both`] when it is clear how the stream goes on. Returns whether it has.
pub(crate) fn leave_both(conn: &'static Conn, chan: &Chan) -> bool {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    // In this order: a broker publishes the count before it closes.
    let closed = stream.is_closed(peer);
    if stream.may_switch(peer, stream.seen(peer)) {
        let big = big();
        {
            let _rx = side.rx_lock.lock();
            if side.rx_state.load(SeqCst) != Route::Both {
                return true;
            }
            if !stream.switch(peer, stream.seen(peer)) {
                return false;
            }
            side.rx_state.store(Route::Ring, SeqCst);
        }
        if side.tx_state.load(SeqCst) != Route::Ring {
            ledger::switched();
        }
        conn.note(Why::None);
        direction::moved(conn, chan, &big);
        drop(big);
        bell::ring(chan.bell());
        return true;
    }
    if closed && !stream.has_joined(peer) {
        let why = back::reason(closed, is_at_end(conn, chan));
        direction::rx_after(conn, chan, why);
        return true;
    }
    side.rx_state.load(SeqCst) != Route::Both
}

/// The time-out of the program's receives, in milliseconds.
fn patience(fd: c_int) -> c_int {
    match kernel::time_limit(fd, libc::SO_RCVTIMEO) {
        None => -1,
        Some(limit) => {
            let ms = limit.tv_sec * 1000 + (limit.tv_usec + 999) / 1000;
            c_int::try_from(ms).unwrap_or(c_int::MAX)
        }
    }
}

/// Receives from TCP while the broker may come in at any time. `None`: it has, or has said that it will not.
///
/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn receive(
    fd: c_int,
    conn: &'static Conn,
    chan: &Chan,
    iov: &[iovec],
    flags: c_int,
) -> Option<ssize_t> {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let may_block = flags & libc::MSG_DONTWAIT == 0 && side.nonblock.load(Relaxed) == 0;
    let mut waited = 0;
    loop {
        if leave_both(conn, chan) {
            return None;
        }
        if !stream.has_consented(peer) {
            // Another thread is about to consent, with the count so far. Bytes received before it has done so would be missing from the count. It holds the lock.
            drop(side.rx_lock.lock());
            if side.rx_state.load(SeqCst) != Route::Both {
                return None;
            }
        }
        let now = (flags | libc::MSG_DONTWAIT) & !libc::MSG_WAITALL;
        // SAFETY: the caller's promise.
        let n = unsafe { kernel::receive(fd, iov, now) };
        if n > 0 {
            if flags & libc::MSG_PEEK == 0 {
                stream.add_seen(peer, n as u64);
                conn.rx_count.fetch_add(n as u64, SeqCst);
                conn.tell_tcp();
                leave_both(conn, chan);
            }
            return Some(n);
        }
        let mut fds = [entry(chan.bell(), libc::POLLIN), entry(fd, libc::POLLIN)];
        if n == 0 {
            if iov::total(iov) == 0 {
                // It asked for nothing: that is not the end.
                return Some(0);
            }
            if leave_both(conn, chan) {
                return None;
            }
            // In this order: the count may have come since.
            if stream.has_joined(peer) {
                if leave_both(conn, chan) {
                    return None;
                }
                // The end came before what the peer's host says was sent.
                return Some(conn.reset(chan, Why::SideLost));
            }
            if bell::probe(chan.bell()) == Heard::End {
                return gone(conn, chan);
            }
            // The broker says whether that is all, or ends the bell.
            let limit = patience(fd);
            if !may_block || (limit >= 0 && waited >= limit) {
                crate::set_errno(libc::EAGAIN);
                return Some(-1);
            }
            match signal::outside(|| kernel::poll(&mut fds[..1], END_MS)) {
                0 => {}
                // A bell that was left there: it does not say more.
                1.. if !leave_both(conn, chan) => std::thread::sleep(END),
                1.. => return None,
                _ if crate::errno() == libc::EINTR && !signal::interrupts() => {}
                _ => return Some(-1),
            }
            waited = waited.saturating_add(END_MS);
            continue;
        }
        if crate::errno() != libc::EAGAIN {
            return Some(n);
        }
        if bell::probe(chan.bell()) == Heard::End {
            return gone(conn, chan);
        }
        if !may_block {
            crate::set_errno(libc::EAGAIN);
            return Some(-1);
        }
        match signal::outside(|| kernel::poll(&mut fds, patience(fd))) {
            0 => {
                crate::set_errno(libc::EAGAIN);
                return Some(-1);
            }
            1.. => {}
            _ if crate::errno() == libc::EINTR && !signal::interrupts() => {}
            _ => return Some(-1),
        }
    }
}

/// The broker's end of the bell is closed: `None` when it has said before how the stream goes on.
fn gone(conn: &'static Conn, chan: &Chan) -> Option<ssize_t> {
    if leave_both(conn, chan) {
        return None;
    }
    Some(conn.reset(chan, Why::SideLost))
}

/// Returns true if a broken bell means lost bytes: the broker closes a direction before it ends.
pub(crate) fn is_lost(chan: &Chan, sender: Role) -> bool {
    chan.carrier != Carrier::Here && !chan.stream.is_closed(sender)
}

/// Returns true if the broker has closed a direction because the peer's program has ended it: TCP has ended, too.
pub(crate) fn is_at_end(conn: &Conn, chan: &Chan) -> bool {
    let fd = conn.descriptor();
    if chan.carrier == Carrier::Here || fd < 0 {
        return false;
    }
    // A receive would take the error of a reset, which is for the program.
    let ends = libc::POLLRDHUP | libc::POLLHUP;
    kernel::poll_one(fd, libc::POLLRDHUP, 0) & ends != 0 && kernel::unread(fd) == 0
}

/// Returns true if the broker has closed a ring that a direction of ours is still on.
pub(crate) fn has_ended(chan: &Chan) -> bool {
    let (tx, rx) = chan.mode();
    let stream = &chan.stream;
    chan.carrier != Carrier::Here
        && (tx == Route::Ring && stream.is_closed(chan.role)
            || rx == Route::Ring && stream.is_closed(chan.peer()))
}

/// Follows a peer that has gone back to TCP, once its last bytes in the ring are read: from then on the readiness of the TCP socket counts.
pub(crate) fn follow_back(conn: &'static Conn, chan: &Chan) {
    let side = chan.side();
    let is_over = side.rx_state.load(SeqCst) == Route::Ring && {
        let _rx = side.rx_lock.lock();
        let ready = chan.stream.ready(chan.peer(), side.head.load(Relaxed));
        readiness::is_over(side.rx_state.load(SeqCst), ready.ok())
    };
    if is_over {
        let why = back::reason(true, is_at_end(conn, chan));
        direction::rx_after(conn, chan, why);
    }
}

/// Moves the directions of such rings back to TCP, before the program is told what the bell says. Returns false while the incoming ring has bytes.
pub(crate) fn follow_end(conn: &'static Conn, chan: &Chan) -> bool {
    follow_back(conn, chan);
    let (tx, _) = chan.mode();
    if tx == Route::Ring && chan.stream.is_closed(chan.role) {
        direction::tx_after(conn, chan, back::reason(true, is_at_end(conn, chan)));
    }
    !chan.mode().1.uses_ring()
}

/// The connections to other hosts whose rings have ended, of those that the events may be of.
fn ended_of(set: c_int, list: &[epoll_event]) -> Vec<&'static Conn> {
    let number = sets::number(set);
    let mut ended: Vec<&'static Conn> = Vec::new();
    let mut is_clear = number != 0;
    for event in list {
        match edges::find(number, event.u64) {
            Named::One(conn) => ended.push(conn),
            Named::Several => is_clear = false,
            Named::None => {}
        }
    }
    if !is_clear {
        ended.clear();
        table::each_socket(|_, conn: &'static Conn| ended.push(conn));
    }
    ended.sort_unstable_by_key(|conn| std::ptr::from_ref::<Conn>(conn));
    ended.dedup_by_key(|conn| std::ptr::from_ref::<Conn>(conn));
    ended.retain(|conn| conn.chan(&conn.enter()).is_some_and(has_ended));
    ended
}

/// The bell of a connection to another host rings when its broker closes a ring, and ends when both are closed; the TCP connection may live on. The
/// registrations move to it, and the kernel reports what it has. Returns how many of the first `n` events are left.
///
/// # Safety
/// As `epoll_wait(2)`, which has written `n` events.
pub(crate) unsafe fn settle(set: c_int, events: *mut epoll_event, n: c_int) -> c_int {
    if n <= 0 || wanted().is_none() {
        return n;
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
    let ended = ended_of(set, list);
    if ended.is_empty() {
        return n;
    }
    let mut told: Vec<u64> = list.iter().map(|event| event.u64).collect();
    told.sort_unstable();
    let (mut moved, mut unread) = (Vec::new(), Vec::new());
    for conn in ended {
        let inside = conn.enter();
        let Some(chan) = conn.chan(&inside) else {
            continue;
        };
        let watches = {
            let big = big();
            let regs = conn.slow(&big).regs.iter();
            let watches = regs.filter(|reg| reg.set == set && reg.bell.is_some());
            watches.map(|reg| reg.data).collect::<Vec<_>>()
        };
        if !follow_end(conn, chan) {
            unread.extend(watches);
            continue;
        }
        let big = big();
        for reg in &mut conn.slow(&big).regs {
            if watches.contains(&reg.data) && told.binary_search(&reg.data).is_ok() {
                // It has fired, and its event is not told to the program: the kernel reports it anew.
                let _ = apply(reg, chan, reg.set == set, false);
            }
        }
        moved.extend(watches);
    }
    moved.sort_unstable();
    unread.sort_unstable();
    let mut kept = 0;
    for at in 0..list.len() {
        let mut event = list[at];
        let of = event.u64;
        if moved.binary_search(&of).is_ok() {
            continue;
        }
        let rest = event.events & !(ready::END | libc::EPOLLRDHUP as u32);
        if rest != 0 && unread.binary_search(&of).is_ok() {
            event.events = rest;
        }
        list[kept] = event;
        kept += 1;
    }
    kept as c_int
}

/// The sender goes over between two sends, when the peer's host is ready for it.
pub(crate) fn try_switch_tx(fd: c_int, conn: &'static Conn, chan: &Chan) -> bool {
    let (stream, role) = (&chan.stream, chan.role);
    // A broker that is gone carries nothing on.
    if !stream.has_consented(role)
        || stream.is_closed(role)
        || bell::probe(chan.bell()) == Heard::End
        || !pace::is_due(u64::from(chan.side().run.fetch_add(1, Relaxed)) + 1)
        || counts::sent(fd, conn.dialled.load(Relaxed)) != Some(conn.gate.count())
        || !stream.switch_over(role)
    {
        return false;
    }
    direction::switch_tx(conn, chan);
    bell::ring(chan.bell());
    true
}

/// The program has ended its direction: the broker says so when all has gone.
pub(crate) fn shut_write(chan: &Chan) {
    {
        let _tx = chan.side().tx_lock.lock();
        chan.stream.close(chan.role);
    }
    bell::ring(chan.bell());
}

/// Asks the peer's host to send the rest over TCP. Where others read the socket from the return on, it is waited for; what cannot
/// be had in order ends the connection.
pub(crate) fn want_tcp(conn: &'static Conn, chan: &Chan, why: Why) {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let is_over = || !side.rx_state.load(SeqCst).uses_ring();
    if is_over() {
        return;
    }
    stream.want_tcp(peer);
    bell::ring(chan.bell());
    if !back::is_out_of_sight(why) {
        return;
    }
    let slice = 10;
    for _ in 0..PARTING_MS / slice {
        if stream.is_closed(peer) || bell::probe(chan.bell()) == Heard::End {
            break;
        }
        std::thread::sleep(Duration::from_millis(slice as u64));
    }
    let empty = {
        let _rx = side.rx_lock.lock();
        matches!(stream.ready(peer, side.head.load(Relaxed)), Ok((0, true)))
    };
    if empty {
        direction::rx_after(conn, chan, why);
    } else {
        conn.cut(chan, Why::SideLost);
    }
}
