//! Sending datagrams.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, iovec, ssize_t};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use weft_ring::stream::{Published, Stream};
use weft_run::dgram::{self as rules, AFTER_KERNEL, CHECK_MS, HEADER, MAX_DATAGRAM, Route};
use weft_run::meet::Why;
use weft_run::pace;

use super::addr::{EASY, To, source};
use super::rings::{SENDER, ring};
use super::{Dgram, frames, now_ms};
use crate::hidden::Own;
use crate::iov::{copy_pieces, total};
use crate::kernel::borrowed;
use crate::{hidden, ledger, set_errno, settings, signal};

/// Destinations of one socket that are counted.
const MAX_DESTS: usize = 32;
/// Bytes of a ring.
const RING_BYTES: u32 = 256 << 10;
/// How often a send that may wait looks for room in a full ring, and how many of these times it only lets others run: about 20 ms in all.
const PAUSES: u32 = 32;
const YIELDS: u32 = 8;
enum State {
    /// Over the kernel; looked at from time to time.
    New,
    /// Offered; the answer is awaited.
    Offered(Box<Offered>),
    Linked(Box<Out>),
    /// The kernel's, until the socket's addresses change.
    Never,
}

struct Offered {
    /// Until the answer comes.
    stream: Option<Stream>,
    wire: Own,
    route: Route,
    peer: u64,
}

/// An outgoing ring.
struct Out {
    stream: Stream,
    tail: u64,
    /// Bytes that may wait in the ring.
    bound: usize,
    bell: Own,
    wire: Own,
    route: Route,
    peer: u64,
    /// When the kernel was last asked whether the receiver still is the one.
    checked: u64,
    /// Something went over the kernel since the last datagram.
    detour: bool,
    /// Position of a receiver that consumed nothing while a send waited for it.
    stuck: Option<u64>,
    row: ledger::RowOf,
}

struct Dest {
    addr: SocketAddr,
    count: u64,
    state: State,
}

#[derive(Default)]
pub(crate) struct Tx {
    dests: Vec<Dest>,
    last: usize,
    hand: usize,
    /// Of a connected socket; `None`: not asked yet.
    connected: Option<SocketAddr>,
    pub(super) frames: frames::Dests,
}

impl Drop for Offered {
    fn drop(&mut self) {
        // The receiver may have taken it.
        if let Some(stream) = &self.stream {
            stream.leave(SENDER);
        }
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        // Without a ring of the bell: it would look as if there were data.
        self.stream.leave(SENDER);
    }
}

impl Tx {
    pub(crate) fn descriptors(&mut self) -> impl Iterator<Item = &mut Own> {
        self.dests.iter_mut().flat_map(|dest| {
            let two = match &mut dest.state {
                State::Offered(offered) => [Some(&mut offered.wire), None],
                State::Linked(out) => {
                    let Out { bell, wire, .. } = &mut **out;
                    [Some(bell), Some(wire)]
                }
                State::New | State::Never => [None, None],
            };
            two.into_iter().flatten()
        })
    }

    /// Moves all destinations to the kernel; new ones are examined again.
    pub(crate) fn forget_all(&mut self) {
        *self = Tx::default();
    }

    /// Drops the rings in the child of a fork: the parent goes on with them.
    pub(crate) fn abandon(&mut self) {
        for dest in std::mem::take(self).dests {
            // The receiver must not learn that the sender has gone.
            match dest.state {
                State::Linked(out) => {
                    let out = std::mem::ManuallyDrop::new(out);
                    hidden::close(out.bell.0);
                    hidden::close(out.wire.0);
                }
                State::Offered(mut offered) => drop(offered.stream.take()),
                State::New | State::Never => {}
            }
        }
    }

    fn dest(&mut self, addr: SocketAddr) -> &mut Dest {
        if self
            .dests
            .get(self.last)
            .is_none_or(|dest| dest.addr != addr)
        {
            self.last = match self.dests.iter().position(|dest| dest.addr == addr) {
                Some(at) => at,
                None => self.add(addr),
            };
        }
        &mut self.dests[self.last]
    }

    fn add(&mut self, addr: SocketAddr) -> usize {
        let new = Dest {
            addr,
            count: 0,
            state: State::New,
        };
        if self.dests.len() < MAX_DESTS {
            self.dests.push(new);
            return self.dests.len() - 1;
        }
        // Entries are replaced in turn, but those with a ring stay if there is another.
        let n = self.dests.len();
        let start = self.hand;
        let free = (0..n)
            .map(|k| (start + k) % n)
            .find(|&at| matches!(self.dests[at].state, State::New | State::Never));
        let at = free.unwrap_or(start);
        self.hand = (at + 1) % n;
        self.dests[at] = new;
        at
    }

    /// The destination of a connected socket. Another process that has the socket may connect it anew.
    pub(super) fn connected(&mut self, fd: c_int, is_shared: bool) -> Option<SocketAddr> {
        if self.connected.is_none() || is_shared {
            let errno = crate::errno();
            let peer = weft_sys::tcp::peer_addr(borrowed(fd)).ok();
            let peer = peer.map(|peer| SocketAddr::new(peer.ip().to_canonical(), peer.port()));
            set_errno(errno);
            if self.connected.is_some() && peer != self.connected {
                // Its own address may be another, too.
                self.forget_all();
            }
            self.connected = peer;
        }
        self.connected
    }
}

/// Sends a datagram by a ring. `None`: it is for the kernel to send.
///
/// # Safety
/// The vector is readable.
pub(crate) unsafe fn transmit(
    fd: c_int,
    d: &'static Dgram,
    to: To,
    iov: &[iovec],
    flags: c_int,
) -> Option<ssize_t> {
    if d.is_plain() {
        return None;
    }
    if flags & (libc::MSG_MORE | libc::MSG_ZEROCOPY) != 0 {
        d.plain(Why::Option);
        return None;
    }
    let Some(_busy) = signal::enter(d) else {
        return Some(-1);
    };
    let mut tx = d.tx();
    if !d.is(fd) {
        return None;
    }
    let addr = match to {
        To::Connected => tx.connected(fd, d.is_deaf()),
        To::Addr(addr) => Some(addr),
        To::Unclear => None,
    };
    let Some(addr) = addr else {
        // It may go to any of them.
        tx.dests.iter_mut().for_each(detour);
        return None;
    };
    let dest = tx.dest(addr);
    dest.count += 1;
    if !matches!(dest.state, State::Linked(_)) {
        advance(fd, d, dest);
    }
    let State::Linked(out) = &mut dest.state else {
        return None;
    };
    let len = total(iov);
    if len > MAX_DATAGRAM || flags & !EASY != 0 {
        out.detour = true;
        return None;
    }
    if !out.is_valid() {
        dest.state = State::New;
        dest.count = 0;
        return None;
    }
    let may_wait = flags & libc::MSG_DONTWAIT == 0 && !d.nonblock.load(Relaxed);
    // SAFETY: the caller's promise.
    match unsafe { out.put(iov, len, may_wait) } {
        Put::Done(bell) => {
            // The bell is a descriptor that stays open while the lock is held; ringing does not wait.
            if bell {
                let errno = crate::errno();
                if !ring(out.bell.0) {
                    // The receiver hears nothing: what comes goes over the kernel, which wakes it.
                    out.stream.close(SENDER);
                }
                set_errno(errno);
                out.row.rang();
            }
            Some(len as ssize_t)
        }
        Put::Fault => {
            set_errno(libc::EFAULT);
            Some(-1)
        }
        Put::Closed => {
            dest.state = State::New;
            dest.count = 0;
            None
        }
    }
}

fn detour(dest: &mut Dest) {
    if let State::Linked(out) = &mut dest.state {
        out.detour = true;
    }
}

/// Something was sent by a call that is not followed further.
pub(crate) fn went_by_kernel(d: &'static Dgram) {
    // A handler's datagram has no place among those of the send that it interrupts.
    if signal::is_inside(d) {
        return;
    }
    d.tx().dests.iter_mut().for_each(detour);
}

/// The socket's own address or its peer may have changed: all destinations are examined again.
pub(crate) fn readdressed(d: &'static Dgram) {
    d.tx().forget_all();
}

enum Put {
    /// Sent, or dropped as a full socket buffer drops it. True: ring the bell.
    Done(bool),
    Closed,
    /// The program's memory is not there.
    Fault,
}

impl Out {
    /// Returns true if the kernel would still give the datagram to the same socket.
    fn is_valid(&mut self) -> bool {
        let now = now_ms();
        if now.wrapping_sub(self.checked) < CHECK_MS {
            return true;
        }
        self.checked = now;
        let errno = crate::errno();
        let same = rules::receiver(&self.route) == Ok(Some(self.peer))
            && matches!(rules::answered(&self.wire), Ok(None));
        set_errno(errno);
        same
    }

    /// Returns true if `need` bytes are within the bound. As with `SO_RCVBUF`, the first datagram always fits.
    fn fits(&self, need: usize) -> bool {
        let room = self.stream.room(SENDER, self.tail).unwrap_or(0);
        let used = self.stream.capacity() - room;
        need <= room && (used == 0 || used + need <= self.bound)
    }

    /// Waits a moment for an active receiver to make room (for sends that may wait), so that a slower receiver does not lose most datagrams.
    /// Returns whether there is room.
    #[cold]
    fn await_room(&mut self, need: usize) -> bool {
        let begun = self.stream.progress(SENDER);
        if self.stuck == Some(begun) {
            // It may wait for a processor.
            std::thread::yield_now();
            return self.fits(need);
        }
        for _ in 0..weft_sys::spin::turns() {
            if self.fits(need) {
                self.stuck = None;
                return true;
            }
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
        for pause in 0..PAUSES {
            if pause < YIELDS {
                std::thread::yield_now();
            } else {
                let us = (20 << ((pause - YIELDS) / 2)).min(1000);
                std::thread::sleep(std::time::Duration::from_micros(us));
            }
            if self.fits(need) {
                self.stuck = None;
                return true;
            }
            if self.stream.is_closed(SENDER) {
                return false;
            }
        }
        let now = self.stream.progress(SENDER);
        self.stuck = (now == begun).then_some(begun);
        false
    }

    /// # Safety
    /// The vector is readable.
    unsafe fn put(&mut self, iov: &[iovec], len: usize, may_wait: bool) -> Put {
        let need = rules::footprint(len);
        let fits = self.fits(need) || may_wait && self.await_room(need);
        if !fits {
            if self.stream.is_closed(SENDER) || self.stream.room(SENDER, self.tail).is_err() {
                return Put::Closed;
            }
            self.row.dropped();
            return Put::Done(false);
        }
        let (stream, tail) = (&self.stream, self.tail);
        let marks = if self.detour { AFTER_KERNEL } else { 0 };
        let header = rules::header(len, marks);
        stream.put_slice(SENDER, tail, &header);
        let copied = copy_pieces(iov, 0, len, |from, len, done| {
            // SAFETY: the caller's buffers.
            unsafe { stream.put(SENDER, tail + (HEADER + done) as u64, from, len) }
        });
        if copied < len {
            return Put::Fault;
        }
        match stream.publish(SENDER, tail, tail + need as u64) {
            Ok(Published::Closed) | Err(_) => Put::Closed,
            Ok(how) => {
                self.tail = tail + need as u64;
                self.detour = false;
                self.row.sent(len as u64);
                Put::Done(how == Published::Ring)
            }
        }
    }
}

/// Takes the next step of a destination towards a ring, if that is due.
fn advance(fd: c_int, d: &'static Dgram, dest: &mut Dest) {
    let first = settings::first_look();
    if dest.count < first || matches!(dest.state, State::Never) {
        return;
    }
    let n = dest.count - first + 1;
    let errno = crate::errno();
    match &dest.state {
        State::New if pace::is_due(n) => {
            dest.state = match offer(fd, d, dest.addr) {
                Ok(Some(offered)) => State::Offered(Box::new(offered)),
                Ok(None) if n < pace::LAST_LOOK => State::New,
                Ok(None) => never(Why::NoPeer),
                // Frames may go there.
                Err(Why::Elsewhere) if frames::may_go(d) => State::Never,
                Err(why) => never(why),
            };
        }
        // Looked for at each send for a while, then less often.
        State::Offered(_) if n <= 64 || n.is_multiple_of(16) => settle(fd, dest),
        _ => {}
    }
    set_errno(errno);
}

fn never(why: Why) -> State {
    ledger::datagrams_stay(why);
    State::Never
}

fn offer(fd: c_int, d: &'static Dgram, to: SocketAddr) -> Result<Option<Offered>, Why> {
    if settings::is_off() {
        return Err(Why::IoUring);
    }
    if d.is_plain() {
        return Err(Why::Option);
    }
    let from = source(fd, to).ok_or(Why::Elsewhere)?;
    let route = Route::new(from, to);
    if !route.may_be_local() {
        return Err(Why::Elsewhere);
    }
    let own = rules::cookie(borrowed(fd))?;
    let Some(peer) = rules::receiver(&route)? else {
        return Ok(None);
    };
    if peer == own {
        return Err(Why::Elsewhere);
    }
    let Some(wire) = rules::dial(peer)? else {
        return Ok(None);
    };
    let (stream, segment) = Stream::create(RING_BYTES).map_err(|_| Why::System)?;
    let file = borrowed(std::os::fd::AsRawFd::as_raw_fd(&segment));
    if rules::offer(&wire, own, peer, &route, file).is_err() {
        // The receiver has disconnected; it may have closed the socket, and another one may follow.
        return Ok(None);
    }
    let wire = Own::new(wire).ok_or(Why::Descriptors)?;
    Ok(Some(Offered {
        stream: Some(stream),
        wire,
        route,
        peer,
    }))
}

/// Looks for the answer to an offer.
fn settle(fd: c_int, dest: &mut Dest) {
    let State::Offered(offered) = &dest.state else {
        return;
    };
    let answer = match rules::answered(&offered.wire) {
        Ok(None) => return,
        Ok(Some(answer)) => Some(answer),
        Err(_) => None,
    };
    let State::Offered(mut offered) = std::mem::replace(&mut dest.state, State::New) else {
        return;
    };
    let Some((bound, bell)) = answer else { return };
    let Some(bell) = Own::new(bell) else {
        dest.state = never(Why::Descriptors);
        return;
    };
    let wire = std::mem::replace(&mut offered.wire, Own(-1));
    let (route, peer) = (offered.route, offered.peer);
    let Some(stream) = offered.stream.take() else {
        return;
    };
    let bound = (bound as usize).clamp(1, stream.capacity());
    dest.state = State::Linked(Box::new(Out {
        row: ledger::RowOf::begin(fd, route.from, route.to, true),
        stream,
        tail: 0,
        bound,
        bell,
        wire,
        route,
        peer,
        checked: now_ms(),
        detour: true,
        stuck: None,
    }));
}

/// Returns true if the socket has an outgoing ring. Without one a single call of the kernel can send many messages.
pub(crate) fn has_ring(d: &'static Dgram) -> bool {
    let linked = |dest: &Dest| matches!(dest.state, State::Linked(_));
    !d.is_plain() && d.tx().dests.iter().any(linked)
}
