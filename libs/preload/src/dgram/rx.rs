//! Receiving datagrams.
//!
//! Rings first. The kernel's socket is looked at when all rings are empty; when a ring's next datagram was sent after others over the kernel; and
//! once in a while, in a way that leaves no datagram before an earlier one of its sender.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, iovec, msghdr, sockaddr, socklen_t, ssize_t};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::dgram::{self as rules, AFTER_KERNEL, HEADER};
use weft_run::meet::Why;

use super::{Dgram, Own, addr, borrowed, now_ms, ready};
use crate::rx::{each_piece, total};
use crate::spin::spins;
use crate::{hidden, ledger, link, next, set_errno, signal};

/// Senders of one socket that can have a ring; others use the kernel.
const MAX_LINKS: usize = 64;
/// Senders that have come and not spoken yet; of more the latest are turned away.
const MAX_SILENT: usize = 4;
/// Datagrams of rings after which the kernel's socket is looked at.
const TURN: u32 = 64;
/// Datagrams of the kernel that are taken before one that was sent after some of them.
const DRAIN: u32 = 4096;
/// Rings of the bell without a datagram that a sender may give in a row: an honest one gives no more than one for each datagram.
const MAX_EMPTY: u32 = 64;
/// How often a receive that must not wait looks again when it was told of data and found none.
const MAX_TURNS: u32 = 16;
/// Rings that are taken at once.
const MAX_RINGS: u64 = 1024;

/// The side that sends in a segment.
pub(crate) const SENDER: Role = Role::Initiator;

/// A ring that comes in.
pub(crate) struct In {
    stream: Stream,
    head: u64,
    from: SocketAddr,
    to: IpAddr,
    /// Ends with the sender's process.
    wire: Own,
    /// We have asked for the bell.
    armed: bool,
    /// Rings of the bell since its last datagram.
    empty: u32,
    /// Its sender broke the rules: nothing of it is looked at.
    is_broken: bool,
    /// Datagrams of the kernel taken on behalf of the next one.
    drained: u32,
    /// The datagram at this position has none of the kernel's before it.
    passes: Option<u64>,
    /// Up to where it was filled when the kernel's turn came.
    until: u64,
    row: ledger::RowOf,
}

#[derive(Default)]
pub(crate) struct Rx {
    links: Vec<In>,
    /// The end of the bell that senders have.
    button: Option<Own>,
    next: usize,
    /// Datagrams of rings since the kernel's last turn.
    since: u32,
    /// It is the kernel's turn when all rings are read up to `until`.
    turn: bool,
    /// The ring whose next datagram comes after those of the kernel, and its position.
    asking: Option<(usize, u64)>,
    /// Writes to the bell that are known of and not taken.
    owed: u64,
    /// What the program was told of by `MSG_PEEK` or `FIONREAD`: the next receive takes it.
    named: Option<Named>,
}

/// A datagram that waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Named {
    /// The first of the kernel.
    Kernel,
    /// Of a ring, at this position.
    Ring(usize, u64),
}

/// What comes next.
enum Choice {
    Kernel,
    /// The ring, and the length of its datagram.
    Ring(usize, usize),
    /// No ring has one; whether one is at its end.
    Empty(bool),
}

/// Where a datagram goes.
pub(crate) struct Out<'a> {
    pub(crate) iov: &'a [iovec],
    pub(crate) name: *mut sockaddr,
    pub(crate) name_len: *mut socklen_t,
    pub(crate) header: *mut msghdr,
}

enum Step {
    Got(ssize_t),
    /// The kernel's socket comes first.
    Kernel,
    Empty,
}

impl Rx {
    pub(crate) fn descriptors(&mut self) -> impl Iterator<Item = &mut Own> {
        let wires = self.links.iter_mut().map(|link| &mut link.wire);
        wires.chain(&mut self.button)
    }

    /// Senders use the kernel from now on.
    pub(crate) fn close_all(&mut self) {
        for link in &self.links {
            link.stream.close(SENDER);
        }
    }

    pub(crate) fn has_data(&self) -> bool {
        self.links.iter().any(In::has_data)
    }

    /// The length of the next datagram when it is in a ring. Otherwise it is the kernel's, or there is none. The next receive takes what this tells of.
    pub(crate) fn next_len(&mut self, fd: c_int) -> Option<usize> {
        loop {
            match self.choose() {
                Choice::Ring(at, len) => {
                    self.named = Some(Named::Ring(at, self.links[at].head));
                    return Some(len);
                }
                Choice::Kernel if !is_readable(fd) => self.kernel_empty(),
                Choice::Empty(_) if !is_readable(fd) => return None,
                Choice::Kernel | Choice::Empty(_) => {
                    self.named = Some(Named::Kernel);
                    return None;
                }
            }
        }
    }

    /// Whether the bell is or becomes readable without our doing.
    fn is_lit(&mut self) -> bool {
        self.owed += self.rung();
        self.owed > 0
    }

    /// How many senders have rung, or will at once, since they were asked to.
    fn rung(&mut self) -> u64 {
        let mut rung = 0;
        for link in &mut self.links {
            if link.armed && !link.stream.is_armed(SENDER) {
                link.armed = false;
                rung += 1;
                link.empty += 1;
                if link.empty > MAX_EMPTY {
                    link.broken();
                }
            }
        }
        rung
    }

    /// Makes the bell as readable as the rings are: asks for it when they are empty, and takes what was rung. Returns whether there is data.
    pub(crate) fn settle(&mut self, bell: c_int) -> bool {
        if self.has_data() {
            if !self.is_lit() {
                self.light();
            }
            return true;
        }
        self.is_lit();
        let unarmed = |link: &&mut In| !link.armed && !link.is_broken;
        for link in self.links.iter_mut().filter(unarmed) {
            link.stream.arm(SENDER, link.head);
            link.armed = true;
        }
        if self.has_data() {
            if !self.is_lit() {
                self.light();
            }
            return true;
        }
        // Even when nothing is owed: a ring that came after `quench` gave up would keep the bell lit.
        self.quench(bell);
        // Who rang since we asked may have been taken with the others: there is data, and the bell has to say so.
        let raced = self.rung();
        if raced > 0 {
            self.owed += raced;
            self.light();
        }
        raced > 0
    }

    /// Rings our own bell.
    fn light(&mut self) {
        if let Some(button) = &self.button
            && ring(button.0)
        {
            self.owed += 1;
        }
    }

    fn quench(&mut self, bell: c_int) {
        for last in [false, true] {
            self.owed = self.owed.saturating_sub(take_rings(bell, self.owed));
            if self.owed == 0 || last {
                break;
            }
            // Somebody is between the ring and its bell.
            wait(&mut [entry(bell)], 1);
        }
        self.owed = 0;
    }

    /// Which datagram is next.
    fn choose(&mut self) -> Choice {
        match self.named {
            Some(Named::Kernel) => return Choice::Kernel,
            Some(Named::Ring(at, head)) => {
                if let Some(link) = self.links.get(at)
                    && link.head == head
                    && !link.is_broken
                    && let Ok((ready @ 1.., _)) = link.stream.ready(SENDER, head)
                    && let Some((len, _)) = header(link, ready)
                {
                    return Choice::Ring(at, len);
                }
                self.named = None;
            }
            None => {}
        }
        if self.turn
            && self
                .links
                .iter()
                .all(|l| l.head.wrapping_sub(l.until) as i64 >= 0)
        {
            self.turn = false;
            return Choice::Kernel;
        }
        let mut ended = false;
        let mut at = self.next;
        for _ in 0..self.links.len() {
            at = if at + 1 < self.links.len() { at + 1 } else { 0 };
            if self.is_behind(at) {
                continue;
            }
            let link = &mut self.links[at];
            if link.is_broken {
                ended = true;
                continue;
            }
            let Ok((ready, closed)) = link.stream.ready(SENDER, link.head) else {
                link.broken();
                ended = true;
                continue;
            };
            if ready == 0 {
                ended |= closed || link.stream.has_left(SENDER);
                continue;
            }
            let Some((len, marks)) = header(link, ready) else {
                link.broken();
                ended = true;
                continue;
            };
            let first = link.passes == Some(link.head) || link.drained >= DRAIN;
            if marks & AFTER_KERNEL != 0 && !first {
                link.drained += 1;
                self.asking = Some((at, link.head));
                return Choice::Kernel;
            }
            return Choice::Ring(at, len);
        }
        Choice::Empty(ended)
    }

    /// Takes the next datagram, if it is not the kernel's turn.
    ///
    /// # Safety
    /// As `recvmsg(2)`.
    unsafe fn step(&mut self, fd: c_int, d: &Dgram, out: &Out<'_>, flags: c_int) -> Step {
        let is_peek = flags & libc::MSG_PEEK != 0;
        let ended = match self.choose() {
            Choice::Kernel => {
                if !is_peek {
                    self.named = None;
                }
                return Step::Kernel;
            }
            Choice::Empty(ended) => ended,
            Choice::Ring(at, len) => {
                let link = &mut self.links[at];
                // SAFETY: the caller's promise.
                let n = unsafe { deliver(d, link, len, out, flags) };
                if is_peek {
                    self.named = Some(Named::Ring(at, link.head));
                } else {
                    link.head += rules::footprint(len) as u64;
                    link.stream.consumed(SENDER, link.head);
                    link.drained = 0;
                    link.empty = 0;
                    link.row.received(len as u64);
                    self.next = at;
                    self.named = None;
                    self.took(fd);
                }
                return Step::Got(n);
            }
        };
        if ended {
            // A sender that leaves may have rung.
            self.is_lit();
            self.links
                .retain(|link| match link.stream.ready(SENDER, link.head) {
                    _ if link.is_broken => false,
                    Ok((0, closed)) => !closed && !link.stream.has_left(SENDER),
                    Ok(_) => true,
                    Err(_) => false,
                });
            self.next = 0;
            self.named = None;
        }
        Step::Empty
    }

    /// Whether the sender had another ring before this one, and what is in that one was sent first.
    fn is_behind(&self, at: usize) -> bool {
        let from = self.links[at].from;
        self.links[..at].iter().any(|link| {
            link.from == from
                && !link.is_broken
                && !matches!(link.stream.ready(SENDER, link.head), Ok((0, _)) | Err(_))
        })
    }

    /// The kernel's socket gets its turn behind what is in the rings now.
    fn took(&mut self, fd: c_int) {
        self.since += 1;
        if self.since < TURN || self.turn {
            return;
        }
        self.since = 0;
        if is_readable(fd) {
            self.turn = true;
            for link in &mut self.links {
                let ready = link.stream.ready(SENDER, link.head).map_or(0, |(n, _)| n);
                link.until = link.head + ready as u64;
            }
        }
    }

    /// The kernel has nothing: what was to come after it can come.
    fn kernel_empty(&mut self) {
        self.named = None;
        if let Some((at, head)) = self.asking.take()
            && let Some(link) = self.links.get_mut(at)
            && link.head == head
        {
            link.passes = Some(head);
        }
    }
}

fn header(link: &In, ready: usize) -> Option<(usize, u32)> {
    let mut bytes = [0; HEADER];
    // SAFETY: eight bytes; positions are multiples of eight, so they do not wrap.
    unsafe {
        link.stream
            .get(SENDER, link.head, bytes.as_mut_ptr(), HEADER);
    };
    rules::parse(bytes, ready)
}

impl In {
    /// The sender wrote what no honest sender writes: nothing of it is looked at any more.
    fn broken(&mut self) {
        self.is_broken = true;
        self.stream.close(SENDER);
        self.row.why(Why::Broken);
    }

    fn has_data(&self) -> bool {
        !self.is_broken && !matches!(self.stream.ready(SENDER, self.head), Ok((0, _)))
    }

    fn is_dead(&self) -> bool {
        let mut byte = 0_u8;
        // SAFETY: one byte.
        let n = unsafe {
            next::recv(
                self.wire.0,
                (&raw mut byte).cast(),
                1,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        n == 0 && matches!(self.stream.ready(SENDER, self.head), Ok((0, _)) | Err(_))
    }
}

/// Copies a datagram to where the program wants it. Returns what the call does.
///
/// # Safety
/// As `recvmsg(2)`.
unsafe fn deliver(d: &Dgram, link: &In, len: usize, out: &Out<'_>, flags: c_int) -> ssize_t {
    let start = link.head + HEADER as u64;
    let room = total(out.iov);
    let n = len.min(room);
    each_piece(out.iov, 0, n, |to, len, done| {
        // SAFETY: the caller's buffers.
        unsafe { link.stream.get(SENDER, start + done as u64, to, len) };
    });
    let v6 = d.v6.load(Relaxed);
    // SAFETY: the caller's promise.
    unsafe {
        if !out.name.is_null() && !out.name_len.is_null() {
            *out.name_len = addr::put(link.from, v6, out.name.cast(), *out.name_len);
        }
        if let Some(header) = out.header.as_mut() {
            header.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
            if len > room {
                header.msg_flags |= libc::MSG_TRUNC;
            }
            let mut used = 0;
            if d.pktinfo.load(Relaxed) {
                let (bytes, cut) = addr::put_pktinfo(header, link.to, v6);
                used = bytes;
                if cut {
                    header.msg_flags |= libc::MSG_CTRUNC;
                }
            }
            header.msg_controllen = used;
            header.msg_namelen = if out.header.is_null() || header.msg_name.is_null() {
                header.msg_namelen
            } else {
                addr::put(link.from, v6, header.msg_name, header.msg_namelen)
            };
        }
    }
    if flags & libc::MSG_TRUNC != 0 {
        len as ssize_t
    } else {
        n as ssize_t
    }
}

/// Rings a bell, which may be anything that a peer made: neither a wait nor a signal comes of it. Returns whether the receiver hears of it; it does
/// where the bell is full.
pub(crate) fn ring(button: c_int) -> bool {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: one byte.
    let n = unsafe { next::send(button, [1_u8].as_ptr().cast(), 1, flags) };
    n == 1 || crate::errno() == libc::EAGAIN
}

/// Takes what was rung, and at least `owed` where so much is there. Returns how often.
fn take_rings(bell: c_int, owed: u64) -> u64 {
    let mut taken = 0;
    loop {
        let mut byte = 0_u8;
        // SAFETY: one byte.
        let n = unsafe { next::recv(bell, (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
        if n < 0 || taken >= MAX_RINGS {
            return taken;
        }
        taken += 1;
        if taken == owed {
            return taken;
        }
    }
}

fn entry(fd: c_int) -> libc::pollfd {
    libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }
}

/// Waits so many milliseconds; -1: for ever.
fn wait(list: &mut [libc::pollfd], ms: i64) -> c_int {
    let ms = ms.min(i64::from(c_int::MAX)) as c_int;
    // SAFETY: entries of a slice.
    unsafe { next::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, ms) }
}

/// Whether the kernel has a datagram, or an error, for the socket.
pub(crate) fn is_readable(fd: c_int) -> bool {
    let mut asked = [entry(fd)];
    wait(&mut asked, 0);
    asked[0].revents != 0
}

/// Flags of receives that only the kernel answers.
const KERNEL_ONLY: c_int = libc::MSG_ERRQUEUE | libc::MSG_OOB;

/// Receives a datagram. `kernel` is the program's own call with flags added.
///
/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn receive(
    fd: c_int,
    d: &'static Dgram,
    out: &Out<'_>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    if flags & KERNEL_ONLY != 0 {
        return kernel(0);
    }
    if let Some(waiting) = ready::kernel_alone(d) {
        let n = kernel(0);
        drop(waiting);
        // A handler that interrupts its thread's work leaves what is around the datagram to the next receive.
        let Some(_busy) = signal::enter_idle(d) else {
            return n;
        };
        return from_kernel(fd, d, n, flags);
    }
    let Some(_busy) = signal::enter(d) else {
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { receive_any(fd, d, out, flags, kernel) }
}

unsafe fn receive_any(
    fd: c_int,
    d: &'static Dgram,
    out: &Out<'_>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    let may_wait = flags & libc::MSG_DONTWAIT == 0 && !d.nonblock.load(Relaxed);
    let mut spun = false;
    let mut turns = 0;
    let patience = d.patience.load(Relaxed);
    let deadline = if may_wait && patience > 0 {
        Some(precise_ms().saturating_add(patience))
    } else {
        None
    };
    loop {
        let mut rx = d.rx();
        if !d.is(fd) {
            drop(rx);
            return kernel(0);
        }
        let bell = d.bell.load(SeqCst);
        // SAFETY: the caller's promise.
        match unsafe { rx.step(fd, d, out, flags) } {
            Step::Got(n) => {
                if d.eager.load(Relaxed) {
                    after(&mut rx, d, bell);
                }
                drop(rx);
                if flags & libc::MSG_PEEK == 0 {
                    received(fd, d);
                }
                return n;
            }
            Step::Kernel => {
                drop(rx);
                let n = kernel(libc::MSG_DONTWAIT);
                if n >= 0 || crate::errno() != libc::EAGAIN {
                    return from_kernel(fd, d, n, flags);
                }
                d.rx().kernel_empty();
                continue;
            }
            Step::Empty => {}
        }
        if !may_wait {
            let n = kernel(libc::MSG_DONTWAIT);
            if n >= 0 || crate::errno() != libc::EAGAIN {
                drop(rx);
                return from_kernel(fd, d, n, flags);
            }
            let more = rx.settle(bell);
            leave_rings(d, &rx);
            drop(rx);
            turns += 1;
            if more && turns < MAX_TURNS {
                continue;
            }
            set_errno(libc::EAGAIN);
            return -1;
        }
        if !spun {
            spun = true;
            for _ in 0..spins() {
                if rx.has_data() {
                    break;
                }
                std::hint::spin_loop();
            }
            continue;
        }
        spun = false;
        turns += 1;
        if rx.settle(bell) && turns < MAX_TURNS {
            continue;
        }
        turns = 0;
        drop(rx);
        if let Some(n) = sleep(fd, d, bell, deadline, flags, kernel) {
            return n;
        }
    }
}

/// Waits for a ring or the kernel. `Some`: the call's result.
fn sleep(
    fd: c_int,
    d: &'static Dgram,
    bell: c_int,
    deadline: Option<i64>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> Option<ssize_t> {
    let mut list = [entry(fd), entry(bell)];
    let left = deadline.map_or(-1, |at| at.saturating_sub(precise_ms()).max(0));
    let n = signal::outside(|| wait(&mut list, left));
    if n < 0 {
        // With a time limit the kernel does not begin anew by itself.
        if crate::errno() == libc::EINTR && deadline.is_none() && !crate::bell::signals_interrupt()
        {
            return None;
        }
        return Some(-1);
    }
    if n == 0 {
        set_errno(libc::EAGAIN);
        return Some(-1);
    }
    if list[1].revents != 0 {
        let mut rx = d.rx();
        if !rx.is_lit() {
            rx.owed = 1;
        }
    } else {
        let n = kernel(libc::MSG_DONTWAIT);
        if n >= 0 || crate::errno() != libc::EAGAIN {
            return Some(from_kernel(fd, d, n, flags));
        }
    }
    None
}

fn from_kernel(fd: c_int, d: &'static Dgram, n: ssize_t, flags: c_int) -> ssize_t {
    if n >= 0 && flags & libc::MSG_PEEK == 0 {
        received(fd, d);
    } else if n >= 0 && d.inbound.load(SeqCst) {
        d.rx().named = Some(Named::Kernel);
    }
    n
}

/// After a receive of a socket that is in an epoll set.
fn after(rx: &mut Rx, d: &Dgram, bell: c_int) {
    if rx.settle(bell) && d.edge.load(Relaxed) {
        // The kernel tells of each datagram anew.
        rx.light();
    }
}

/// The last ring has gone: receives are the kernel's alone again.
fn leave_rings(d: &Dgram, rx: &Rx) {
    if rx.links.is_empty() {
        d.inbound.store(false, SeqCst);
    }
}

fn precise_ms() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

/// Before the program waits by `poll` or `select`: the bell is as readable as the rings.
pub(crate) fn settle_for_poll(d: &Dgram) {
    let bell = d.bell.load(SeqCst);
    // A handler finds the bell as the receive that it interrupts has it.
    if bell >= 0 && !signal::is_inside(d) {
        d.rx().settle(bell);
    }
}

/// Receives many by one call of the kernel's. `None`: there are rings to look at.
pub(crate) fn receive_many(
    fd: c_int,
    d: &'static Dgram,
    call: impl FnOnce() -> c_int,
) -> Option<c_int> {
    let waiting = ready::kernel_alone(d)?;
    let n = call();
    drop(waiting);
    if let Some(_busy) = signal::enter_idle(d) {
        for _ in 0..n.max(0) {
            received(fd, d);
        }
    }
    Some(n)
}

/// Counts a datagram, and looks for senders when that is due.
#[inline]
fn received(fd: c_int, d: &'static Dgram) {
    let n = d.received.fetch_add(1, Relaxed) + 1;
    let first = link::first_look();
    if n < first || d.is_deaf() {
        return;
    }
    if n > first + 32 && !n.is_multiple_of(64) {
        let now = now_ms();
        if now.wrapping_sub(d.looked.load(Relaxed)) < 8 {
            return;
        }
    }
    let errno = crate::errno();
    look(fd, d);
    set_errno(errno);
}

/// Lets the socket be found, and takes the rings that are offered.
#[cold]
fn look(fd: c_int, d: &'static Dgram) {
    d.looked.store(now_ms(), Relaxed);
    if link::is_off() {
        d.plain(Why::IoUring);
        return;
    }
    let mut slow = d.slow();
    if !d.is(fd) || d.is_deaf() {
        return;
    }
    if slow.listener.is_none() {
        let made = rules::cookie(borrowed(fd)).and_then(|cookie| {
            slow.cookie = cookie;
            rules::listen(cookie).map_err(|_| Why::System)
        });
        let Ok(Some(own)) = made.map(Own::new) else {
            drop(slow);
            d.deafen();
            return;
        };
        slow.listener = Some(own);
    }
    // Who had not spoken at the last look comes first.
    let mut silent = std::mem::take(&mut slow.silent);
    for _ in 0..MAX_SILENT {
        match slow.listener.as_ref().map(rules::caller) {
            Some(Ok(Some(wire))) => silent.extend(Own::new(wire)),
            Some(Err(why)) => ledger::datagrams_stay(why),
            Some(Ok(None)) | None => break,
        }
    }
    for wire in silent {
        match rules::hear(&wire, slow.cookie) {
            Ok(None) if slow.silent.len() < MAX_SILENT => slow.silent.push(wire),
            Ok(None) => {}
            Ok(Some(offer)) => {
                if let Err(why) = accept(fd, d, &mut slow, offer, wire) {
                    ledger::datagrams_stay(why);
                }
            }
            Err(why) => ledger::datagrams_stay(why),
        }
    }
}

fn bound(fd: c_int) -> u64 {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as u32;
    // SAFETY: an option of that size.
    unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_RCVBUF,
            (&raw mut value).cast(),
            &raw mut len,
        );
    }
    u64::from(value.unsigned_abs())
}

/// Takes a ring.
fn accept(
    fd: c_int,
    d: &'static Dgram,
    slow: &mut super::Slow,
    offer: rules::Offer,
    wire: Own,
) -> Result<(), Why> {
    if d.pktinfo.load(Relaxed) && !offer.route.to.ip().is_loopback() {
        return Err(Why::Option);
    }
    if !ready::can_ring(slow) {
        return Err(Why::Epoll);
    }
    let stream = Stream::open(offer.segment).map_err(|_| Why::Broken)?;
    let bell = match d.bell.load(SeqCst) {
        -1 => make_bell(fd, d)?,
        bell => bell,
    };
    let mut rx = d.rx();
    let button = rx
        .button
        .as_ref()
        .map(|own| own.0)
        .ok_or(Why::Descriptors)?;
    if rx.links.len() >= MAX_LINKS / 8 {
        rx.is_lit();
        rx.links.retain(|link| !link.is_dead());
        rx.next = 0;
        rx.named = None;
    }
    if rx.links.len() >= MAX_LINKS {
        return Err(Why::Descriptors);
    }
    let was = d.inbound.swap(true, SeqCst);
    // Another thread waits for the kernel's socket alone.
    if d.in_kernel.load(SeqCst) != 0 {
        d.inbound.store(was, SeqCst);
        return Err(Why::None);
    }
    // Before the answer: a sender that has it may publish at once, and rings only where it is asked to.
    stream.arm(SENDER, 0);
    rules::answer(&wire, bound(fd), borrowed(button))?;
    let row = ledger::RowOf::begin(fd, offer.route.to, offer.route.from, false);
    rx.links.push(In {
        stream,
        head: 0,
        from: offer.route.from,
        to: offer.route.to.ip(),
        wire,
        armed: true,
        empty: 0,
        is_broken: false,
        drained: 0,
        passes: None,
        until: 0,
        row,
    });
    rx.settle(bell);
    drop(rx);
    ready::ring_all(d, slow);
    Ok(())
}

/// A pair of sockets: senders have one end, so what they do to it does not make our reads wait.
fn make_bell(fd: c_int, d: &Dgram) -> Result<c_int, Why> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (bell, button) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .map_err(|_| Why::Descriptors)?;
    let button = Own::new(button).ok_or(Why::Descriptors)?;
    let bell = hidden::hide(bell).ok_or(Why::Descriptors)?;
    // SAFETY: asks for flags.
    let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
    d.nonblock
        .store(flags >= 0 && flags & libc::O_NONBLOCK != 0, SeqCst);
    d.rx().button = Some(button);
    d.bell.store(bell, SeqCst);
    Ok(bell)
}
