//! Sending.
//!
//! # Safety
//!
//! The program's buffers are as its call says: every function here that takes them is as safe as `sendmsg(2)`.

use libc::{c_int, ssize_t};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::stream::Published;
use weft_run::connection::send::{self, Asked, NoRoom};
use weft_run::connection::{Carrier, Route};
use weft_run::ledger::Word;
use weft_run::meet::Why;

use crate::bell::{self, Heard};
use crate::chan::Chan;
use crate::conn::{self, Conn, Inside};
use crate::iov::{Source, copy_pieces, cut};
use crate::lend::{self, Plan};
use crate::lock::Held;
use crate::patience::{Deadline, millis};
use crate::{
    direction, edges, hosts, kernel, link, next, ready, return_to_tcp, set_errno, signal,
    stalled_ring,
};

/// Bytes published at once, so that the receiver begins while the rest is copied.
const CHUNK: usize = 64 << 10;
/// Number of consecutive sends over TCP after which the sender pauses for the receiver to catch up, and the number of pauses.
const RUN: u32 = 3;
const PAUSES: u32 = 64;

enum Step {
    Done(ssize_t),
    /// The send continues over TCP, with this many bytes sent already.
    Tcp(usize),
}

/// Sends. `real` is the program's own call.
///
/// # Safety
/// As `sendmsg(2)`.
#[inline]
pub(crate) unsafe fn transmit(
    fd: c_int,
    source: &Source<'_>,
    flags: c_int,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    let Some(conn) = conn::of(fd) else {
        return real();
    };
    if !conn.phase.load(Relaxed).is_followed() {
        return real();
    }
    let Some(_busy) = signal::enter(conn) else {
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { transmit_looking(fd, source, flags, &|| signal::outside(&real)) }
}

unsafe fn transmit_looking(
    fd: c_int,
    source: &Source<'_>,
    flags: c_int,
    real: &dyn Fn() -> ssize_t,
) -> ssize_t {
    let Some((conn, inside)) = conn::enter(fd) else {
        return real();
    };
    if flags & libc::MSG_OOB != 0 {
        return_to_tcp::downgrade(conn, Why::Urgent);
    }
    if flags & libc::MSG_ZEROCOPY != 0 {
        return_to_tcp::downgrade(conn, Why::Option);
    }
    link::tick(conn, fd, &inside);
    let mut has_waited = false;
    loop {
        if has_waited && !conn.is(fd) {
            let Source::Memory(iov) = source else {
                set_errno(libc::EBADF);
                return -1;
            };
            // SAFETY: the caller's promise.
            return signal::outside(|| unsafe { kernel::send(conn.socket(fd), iov, flags) });
        }
        let Some(chan) = conn.chan(&inside) else {
            // A thread that has just made the channel closes the gate.
            if let Some(n) = over_tcp(conn, source, real) {
                return n;
            }
            continue;
        };
        ready::keep_up(conn, chan);
        match chan.side().tx_state.load(SeqCst) {
            Route::Ring => {
                // SAFETY: the caller's promise.
                match unsafe { into_ring(conn, chan, source, flags) } {
                    Step::Done(n) => return n,
                    Step::Tcp(0) => has_waited = true,
                    Step::Tcp(sent) => {
                        // SAFETY: the caller's promise.
                        return unsafe { rest(conn.socket(fd), chan, source, flags, sent) };
                    }
                }
            }
            Route::Tcp => {
                if let Some(n) = following(fd, conn, chan, source, flags, &inside, real) {
                    return n;
                }
            }
            Route::After | Route::Both => {
                let n = after(chan, source.len(), flags, real);
                if n > 0 {
                    conn.gate.add(n as u64);
                    conn.tell_tcp();
                }
                return n;
            }
        }
    }
}

/// Notes a send over TCP that found no room for all bytes.
#[inline]
fn note_room(conn: &Conn, source: &Source<'_>, n: ssize_t) {
    if conn.has_edges.load(Relaxed) && n < source.len() as ssize_t {
        edges::found_full(conn);
    }
}

/// Sends over TCP before the peer follows the count. `None`: it does by now, or is about to.
fn over_tcp(conn: &Conn, source: &Source<'_>, real: &dyn Fn() -> ssize_t) -> Option<ssize_t> {
    if !conn.gate.enter() {
        return None;
    }
    let n = real();
    note_room(conn, source, n);
    let sent = n.max(0) as u64;
    if sent > 0 {
        hosts::note_sent(conn, source, sent);
    }
    conn.gate.leave(sent);
    if sent > 0 {
        conn.tell_tcp();
    }
    Some(n)
}

/// Begins a send over TCP in a closed direction, once its receiver does not hold us back. `false`, with `errno` set: the send is over.
fn begin_after(chan: &Chan, flags: c_int) -> bool {
    chan.stream.begin_after(chan.role) || await_release(chan, flags)
}

#[cold]
fn await_release(chan: &Chan, flags: c_int) -> bool {
    const PAUSE_MS: c_int = 2;
    let mut deadline = Deadline::default();
    loop {
        if chan.await_release() && chan.stream.begin_after(chan.role) {
            return true;
        }
        let left = deadline.left(&chan.side().send_limit);
        if must_not_wait(chan, flags) || left == Some(0) {
            set_errno(libc::EAGAIN);
            return false;
        }
        let rc = signal::outside(|| kernel::poll(&mut [], PAUSE_MS));
        if rc < 0 && (left.is_some() || signal::interrupts()) {
            set_errno(libc::EINTR);
            return false;
        }
    }
}

/// Returns true if the call must not wait, by its flags or its descriptor.
#[inline]
fn must_not_wait(chan: &Chan, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || chan.side().nonblock.load(Relaxed) != 0
}

/// Sends `len` bytes over TCP after the direction was closed, unless the receiver holds us back.
fn after(chan: &Chan, len: usize, flags: c_int, real: &dyn Fn() -> ssize_t) -> ssize_t {
    if chan.carrier != Carrier::Here {
        return real();
    }
    if !begin_after(chan, flags) {
        return -1;
    }
    if send::rings_first(len) {
        bell::ring_for_tcp(chan);
    }
    let n = real();
    chan.stream.end_tcp(chan.role, 0);
    if n > 0 {
        bell::ring_for_tcp(chan);
    }
    n
}

/// Sends over TCP while the peer follows the count. `None`: the direction has switched.
fn following(
    fd: c_int,
    conn: &'static Conn,
    chan: &Chan,
    source: &Source<'_>,
    flags: c_int,
    inside: &Inside,
    real: &dyn Fn() -> ssize_t,
) -> Option<ssize_t> {
    let (stream, side) = (&chan.stream, chan.side());
    if !link::join(conn, inside) {
        return over_tcp(conn, source, real);
    }
    let is_here = chan.carrier == Carrier::Here;
    if !is_here && hosts::try_switch_tx(fd, conn, chan) {
        return None;
    }
    if !stream.begin_tcp(chan.role) {
        direction::switch_tx(conn, chan);
        return None;
    }
    let n = real();
    note_room(conn, source, n);
    let sent = n.max(0) as u64;
    conn.gate.add(sent);
    stream.end_tcp(chan.role, sent);
    // A sender that never stops leaves the receiver no moment in which all bytes are received.
    if is_here && n > 0 && flags & libc::MSG_OOB == 0 && side.run.fetch_add(1, Relaxed) >= RUN {
        pause(chan);
    }
    Some(n)
}

#[cold]
fn pause(chan: &Chan) {
    let (stream, side) = (&chan.stream, chan.side());
    if !stream.has_joined(chan.peer())
        || side.pauses.load(Relaxed) >= PAUSES
        || stream.is_closed(chan.role)
    {
        return;
    }
    side.pauses.fetch_add(1, Relaxed);
    for _ in 0..20 {
        if stream.has_switched(chan.role) {
            return;
        }
        kernel::nap(10_000);
    }
}

/// Sends the rest over TCP, after the direction was closed in the middle of a send.
unsafe fn rest(fd: c_int, chan: &Chan, source: &Source<'_>, flags: c_int, sent: usize) -> ssize_t {
    let Source::Memory(iov) = source else {
        // The file's position is behind the bytes sent.
        return sent as ssize_t;
    };
    let all = source.len();
    let mut sent = sent;
    let mut deadline = Deadline::default();
    while sent < all {
        // Some bytes have gone: the next call reports the error, and a signal ends the wait, even if its handler restarts calls.
        let now = flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the caller's promise.
        let n = after(chan, all - sent, flags, &|| unsafe {
            kernel::send(fd, &cut(iov, sent), now)
        });
        if n >= 0 {
            sent += n as usize;
            continue;
        }
        let is_full = crate::errno() == libc::EAGAIN && !must_not_wait(chan, flags);
        let left = deadline.left(&chan.side().send_limit);
        let mut room = [kernel::entry(fd, libc::POLLOUT)];
        if !is_full || signal::outside(|| kernel::poll(&mut room, millis(left))) <= 0 {
            break;
        }
    }
    sent as ssize_t
}

fn partial(sent: usize, errno: c_int) -> Step {
    if sent > 0 {
        return Step::Done(sent as ssize_t);
    }
    set_errno(errno);
    Step::Done(-1)
}

/// Copies up to `n` bytes of the source behind its first `sent` to the position.
///
/// # Safety
/// As [`transmit`].
unsafe fn copy_in(
    chan: &Chan,
    source: &Source<'_>,
    sent: usize,
    tail: u64,
    n: usize,
) -> Result<usize, c_int> {
    let (stream, role) = (&chan.stream, chan.role);
    match *source {
        Source::Memory(iov) => {
            let copied = copy_pieces(iov, sent, n, |from, len, done| {
                // SAFETY: the caller's buffers.
                unsafe { stream.put(role, tail + done as u64, from, len) }
            });
            // As the kernel: a piece that is not all there is not sent.
            if copied < n {
                return Err(libc::EFAULT);
            }
            Ok(copied)
        }
        Source::File { fd, offset, .. } => {
            let (at, first, _) = stream.piece(role, tail);
            let n = n.min(first);
            // SAFETY: a piece of the ring, which the kernel writes; the peer reads none of it yet.
            let got = unsafe {
                match offset {
                    Some(offset) => libc::pread64(fd, at.cast(), n, offset + sent as i64),
                    None => next::read(fd, at.cast(), n),
                }
            };
            usize::try_from(got).map_err(|_| crate::errno())
        }
    }
}

/// Outcome of a loan.
enum Lent {
    /// It is sent.
    Sent,
    /// It is sent, and the call ends: a signal, or the peer's end.
    Last,
    /// It is not sent: the direction continues over TCP from here on.
    Closed,
    Broken,
}

/// Publishes the mark of a loan, and waits for its end unless its memory is protected.
fn lent(
    conn: &'static Conn,
    chan: &Chan,
    call: &mut lend::Call,
    offer: &lend::Offer,
    held: Held<'_>,
    (tail, is_protected): (u64, bool),
) -> Lent {
    let (stream, role) = (&chan.stream, chan.role);
    stream.put_slice(role, tail, &[0]);
    let how = match stream.publish(role, tail, tail + 1) {
        Err(_) => {
            offer.withdrawn(chan);
            return Lent::Broken;
        }
        Ok(Published::Closed) => {
            offer.withdrawn(chan);
            drop(held);
            direction::tx_after(conn, chan, Why::Peer);
            return Lent::Closed;
        }
        Ok(how) => how,
    };
    stalled_ring::has_room(chan);
    chan.side().tail.store(tail + 1, Relaxed);
    offer.published(conn, chan);
    drop(held);
    if how == Published::Ring {
        conn.row.count(Word::Bells, 1);
        // The end of the peer shows below, or at the next call.
        bell::ring(chan.bell());
    }
    if is_protected {
        return Lent::Sent;
    }
    match call.wait_for_fetch(conn, chan, offer) {
        Heard::Alive | Heard::Late | Heard::Refused => Lent::Sent,
        Heard::Interrupted => Lent::Last,
        Heard::End => {
            direction::tx_after(conn, chan, Why::None);
            Lent::Last
        }
    }
}

/// Next step of a send.
enum Next {
    Over(Step),
    /// There is more, and nothing to wait for: this many bytes are sent.
    More(usize),
    /// There is no room.
    Full(Heard),
}

/// The peer's end is closed.
fn at_end(conn: &'static Conn, chan: &Chan, sent: usize) -> Step {
    if hosts::is_lost(chan, chan.role) {
        return Step::Done(conn.reset(chan, Why::SideLost));
    }
    bell::follow_death(conn.descriptor(), chan);
    direction::tx_after(conn, chan, Why::None);
    if sent > 0 {
        Step::Done(sent as ssize_t)
    } else {
        Step::Tcp(0)
    }
}

/// Copies up to `n` bytes to the position, publishes them and rings.
unsafe fn publish(
    conn: &'static Conn,
    chan: &Chan,
    source: &Source<'_>,
    held: Held<'_>,
    (tail, sent, n): (u64, usize, usize),
) -> Next {
    let (stream, role, side) = (&chan.stream, chan.role, chan.side());
    let want = source.len();
    // SAFETY: the caller's promise.
    let n = match unsafe { copy_in(chan, source, sent, tail, n) } {
        Ok(0) if want > 0 => return Next::Over(Step::Done(sent as ssize_t)),
        Ok(n) => n,
        Err(errno) => return Next::Over(partial(sent, errno)),
    };
    let how = match stream.publish(role, tail, tail + n as u64) {
        Err(_) => return Next::Over(Step::Done(conn.reset(chan, Why::Broken))),
        Ok(Published::Closed) => {
            drop(held);
            if let Source::File {
                fd, offset: None, ..
            } = *source
            {
                // SAFETY: puts the file's position back to where it was.
                unsafe { libc::lseek64(fd, -(n as i64), libc::SEEK_CUR) };
            }
            direction::tx_after(conn, chan, Why::Peer);
            return Next::Over(Step::Tcp(sent));
        }
        Ok(how) => how,
    };
    stalled_ring::has_room(chan);
    side.tail.store(tail + n as u64, Relaxed);
    let sent = sent + n;
    conn.row.count(Word::TxRing, n as u64);
    drop(held);
    if how == Published::Ring {
        conn.row.count(Word::Bells, 1);
        match bell::ring(chan.bell()) {
            Heard::End if hosts::is_lost(chan, role) => {
                return Next::Over(Step::Done(conn.reset(chan, Why::SideLost)));
            }
            Heard::End => {
                direction::tx_after(conn, chan, Why::None);
                return Next::Over(Step::Done(sent as ssize_t));
            }
            Heard::Late => return Next::Over(Step::Done(conn.reset(chan, Why::Broken))),
            Heard::Alive | Heard::Interrupted | Heard::Refused => {}
        }
    }
    if sent == want {
        return Next::Over(Step::Done(sent as ssize_t));
    }
    Next::More(sent)
}

/// A process that shares the socket was killed while it sent (under `tx_lock`): what it has published is sent, and may not be rung for.
#[cold]
fn follow_dead_sender(chan: &Chan) {
    let side = chan.side();
    let (known, published) = (side.tail.load(Relaxed), chan.stream.published(chan.role));
    // The peer can write this word too: another value would only end the connection.
    if published.wrapping_sub(known) <= chan.stream.capacity() as u64 {
        side.tail.store(published, Relaxed);
    }
    bell::ring_for_tcp(chan);
}

/// Sends as much as there is room for, by a copy or a loan. `must_ring`: fill the bell if there is no room.
unsafe fn step(
    conn: &'static Conn,
    chan: &Chan,
    source: &Source<'_>,
    call: &mut lend::Call,
    (sent, must_ring): (usize, bool),
) -> Next {
    let (stream, role, side) = (&chan.stream, chan.role, chan.side());
    let want = source.len();
    let held = side.tx_lock.lock();
    if side.tx_state.load(SeqCst) != Route::Ring {
        return Next::Over(Step::Tcp(sent));
    }
    if side.tx_lock.was_stolen() {
        follow_dead_sender(chan);
    }
    let tail = side.tail.load(Relaxed);
    let Ok(room) = stream.room(role, tail) else {
        return Next::Over(Step::Done(conn.reset(chan, Why::Broken)));
    };
    if room > 0 || want == 0 {
        return match call.plan(conn, chan, source, sent) {
            Plan::Copy(most) => {
                let n = room.min(want - sent).min(CHUNK).min(most);
                // SAFETY: the caller's promise.
                unsafe { publish(conn, chan, source, held, (tail, sent, n)) }
            }
            Plan::Wait(completed) => {
                drop(held);
                match call.wait_for_room(conn, chan, completed) {
                    Heard::Interrupted => Next::Over(partial(sent, libc::EINTR)),
                    Heard::End => {
                        direction::tx_after(conn, chan, Why::None);
                        Next::Over(Step::Tcp(sent))
                    }
                    Heard::Alive | Heard::Late | Heard::Refused => Next::More(sent),
                }
            }
            Plan::Lend {
                start,
                len,
                protect,
            } => {
                // SAFETY: the caller's promise.
                let offer = unsafe { call.offer(conn, chan, tail, (start, len, protect)) };
                let Some(offer) = offer else {
                    return Next::More(sent);
                };
                match lent(conn, chan, call, &offer, held, (tail, protect)) {
                    Lent::Sent if sent + len < want => Next::More(sent + len),
                    Lent::Closed => Next::Over(Step::Tcp(sent)),
                    Lent::Broken => Next::Over(Step::Done(conn.reset(chan, Why::Broken))),
                    Lent::Sent | Lent::Last => Next::Over(Step::Done((sent + len) as ssize_t)),
                }
            }
        };
    }
    match send::on_full(stream.is_closed(role), must_ring) {
        NoRoom::GoBack => {
            drop(held);
            direction::tx_after(conn, chan, Why::Peer);
            return Next::Over(Step::Tcp(sent));
        }
        NoRoom::Spin => return Next::Full(Heard::Alive),
        NoRoom::Ask => {}
    }
    let has_room = || stream.room(role, tail).is_ok_and(|room| room > 0);
    stream.want_room(role);
    if has_room() {
        return Next::More(sent);
    }
    edges::found_full(conn);
    let heard = bell::fill(chan);
    edges::found_full(conn);
    if has_room() {
        return Next::More(sent);
    }
    Next::Full(heard)
}

/// Before the program waits for room by `poll` or `select`: a ring that a send has filled exactly is as full as one that a send has found full.
pub(crate) fn fill_bell_for_poll(conn: &Conn, chan: &Chan) {
    let (stream, role, side) = (&chan.stream, chan.role, chan.side());
    let _tx = side.tx_lock.lock();
    let is_full = || stream.room(role, side.tail.load(Relaxed)) == Ok(0);
    if side.tx_state.load(SeqCst) != Route::Ring
        || side.full.load(Relaxed) != 0
        || stream.is_closed(role)
        || !is_full()
    {
        return;
    }
    stream.want_room(role);
    if is_full() {
        edges::found_full(conn);
        bell::fill(chan);
        edges::found_full(conn);
        stalled_ring::found_full(chan);
    }
}

/// Spins on a full ring for a moment, before the caller sleeps or reports that there is no room.
fn spin(chan: &Chan) {
    let (stream, role) = (&chan.stream, chan.role);
    let tail = chan.side().tail.load(Relaxed);
    chan.side().spun_full.wait(|| {
        let room = stream.room(role, tail);
        room.is_ok_and(|room| room >= stream.capacity() / 4)
    });
}

unsafe fn into_ring(conn: &'static Conn, chan: &Chan, source: &Source<'_>, flags: c_int) -> Step {
    let (stream, role, side) = (&chan.stream, chan.role, chan.side());
    let mut sent = 0;
    let mut spun = false;
    let mut deadline = Deadline::default();
    let mut call = lend::Call::new(chan, flags);
    if stream.has_left(chan.peer()) {
        direction::tx_after(conn, chan, Why::None);
        return Step::Tcp(0);
    }
    loop {
        // SAFETY: the caller's promise.
        match unsafe { step(conn, chan, source, &mut call, (sent, spun)) } {
            Next::Over(step) => return step,
            Next::More(now) => {
                spun = spun && now == sent;
                sent = now;
                continue;
            }
            Next::Full(Heard::End) => return at_end(conn, chan, sent),
            Next::Full(_) => {}
        }
        if !spun {
            spun = true;
            spin(chan);
            continue;
        }
        match send::asked(!must_not_wait(chan, flags), || {
            stalled_ring::found_full(chan)
        }) {
            Asked::Return => return partial(sent, libc::EAGAIN),
            Asked::Close => {
                direction::stop_sending(conn, Why::SlowReader);
                continue;
            }
            Asked::Sleep => {}
        }
        spun = false;
        let left = deadline.left(&side.send_limit);
        if left == Some(0) {
            return partial(sent, libc::EAGAIN);
        }
        conn.row.count(Word::Sleeps, 1);
        let progress = stream.progress(role);
        match bell::wait_out(chan, left, sent > 0) {
            Heard::End => return at_end(conn, chan, sent),
            Heard::Late if stream.progress(role) == progress => {
                direction::stop_sending(conn, Why::SlowReader);
            }
            Heard::Alive | Heard::Late => {}
            Heard::Refused => direction::stop_sending(conn, Why::Descriptors),
            Heard::Interrupted => return partial(sent, libc::EINTR),
        }
    }
}
