//! The rings of a receiving socket: the choice of the next datagram, and the state of the bell.
//!
//! Rings come first. The kernel's socket is checked when all rings are empty; when a ring's next datagram was sent after others over the kernel; and
//! once in a while, in a way that never returns a datagram before an earlier one of its sender.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, iovec, msghdr, sockaddr, socklen_t, ssize_t};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;

use weft_ring::Role;
use weft_ring::stream::{Stream, Wish};
use weft_run::dgram::{self as rules, AFTER_KERNEL, HEADER, Route};
use weft_run::meet::Why;

use super::{Dgram, addr};
use crate::hidden::Own;
use crate::iov::{copy_pieces, total};
use crate::{kernel, ledger, next};

/// Senders of one socket that can have a ring; others use the kernel.
const MAX_LINKS: usize = 64;
/// Datagrams of rings after which the kernel's socket is looked at.
const TURN: u32 = 64;
/// Largest number of the kernel's datagrams received before one that was sent after some of them.
const DRAIN: u32 = 4096;
/// Rings of the bell without a datagram that a sender may make in a row: an honest one makes at most one for each datagram.
const MAX_EMPTY: u32 = 64;
/// Bell bytes read at once.
const MAX_RINGS: u64 = 1024;

/// The side that sends in a segment.
pub(crate) const SENDER: Role = Role::Initiator;

/// An incoming ring.
struct In {
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
    /// Its sender broke the rules: its datagrams are ignored.
    is_broken: bool,
    /// Datagrams of the kernel received on behalf of the next one.
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
    /// Writes to the bell that are known and not read yet.
    owed: u64,
    /// The datagram that `MSG_PEEK` or `FIONREAD` reported to the program: the next receive returns it.
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

/// Source of the next datagram.
enum Choice {
    Kernel,
    /// The ring, and the length of its datagram.
    Ring(usize, usize),
    /// No ring has a datagram; true if a ring has ended.
    Empty(bool),
}

/// The program's memory for a received datagram.
pub(crate) struct Out<'a> {
    pub(crate) iov: &'a [iovec],
    pub(crate) name: *mut sockaddr,
    pub(crate) name_len: *mut socklen_t,
    pub(crate) header: *mut msghdr,
}

pub(crate) enum Step {
    /// Its length, or -1 where the program's memory is not there.
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

    /// The end of the bell that senders get; `None` before there is a bell.
    pub(crate) fn button(&self) -> Option<c_int> {
        self.button.as_ref().map(|own| own.0)
    }

    pub(crate) fn set_button(&mut self, button: Own) {
        self.button = Some(button);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Returns true if there is a place for another ring; removes rings whose senders have gone first.
    pub(crate) fn has_place(&mut self) -> bool {
        if self.links.len() >= MAX_LINKS / 8 {
            self.is_lit();
            self.links.retain(|link| !link.is_dead());
            self.next = 0;
            self.named = None;
        }
        self.links.len() < MAX_LINKS
    }

    /// Adds a ring whose bell has been requested.
    pub(crate) fn add(&mut self, stream: Stream, route: &Route, wire: Own, row: ledger::RowOf) {
        self.links.push(In {
            stream,
            head: 0,
            from: route.from,
            to: route.to.ip(),
            wire,
            armed: true,
            empty: 0,
            is_broken: false,
            drained: 0,
            passes: None,
            until: 0,
            row,
        });
    }

    /// The bell woke the thread.
    pub(crate) fn woken(&mut self) {
        if !self.is_lit() {
            self.owed = 1;
        }
    }

    /// Notes that the kernel's first datagram was reported to the program.
    pub(crate) fn name_kernel(&mut self) {
        self.named = Some(Named::Kernel);
    }

    /// Senders use the kernel from now on.
    pub(crate) fn close_all(&mut self) {
        for link in &self.links {
            link.stream.close(SENDER);
        }
    }

    /// The same for the senders from and to such addresses.
    pub(crate) fn close_those(&mut self, which: impl Fn(SocketAddr, IpAddr) -> bool) {
        let links = self.links.iter();
        for link in links.filter(|link| which(link.from, link.to)) {
            link.stream.close(SENDER);
        }
    }

    pub(crate) fn has_data(&self) -> bool {
        self.links.iter().any(In::has_data)
    }

    /// Returns the length of the next datagram if it is in a ring. `None`: it is the kernel's, or there is none. The next receive returns that datagram.
    pub(crate) fn next_len(&mut self, fd: c_int) -> Option<usize> {
        loop {
            match self.choose() {
                Choice::Ring(at, len) => {
                    self.named = Some(Named::Ring(at, self.links[at].head));
                    return Some(len);
                }
                Choice::Kernel if !kernel::is_readable(fd) => self.kernel_empty(),
                Choice::Empty(_) if !kernel::is_readable(fd) => return None,
                Choice::Kernel | Choice::Empty(_) => {
                    self.named = Some(Named::Kernel);
                    return None;
                }
            }
        }
    }

    /// Returns true if the bell is or becomes readable without our doing.
    pub(crate) fn is_lit(&mut self) -> bool {
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

    /// Makes the bell as readable as the rings are: requests it when they are empty, and reads its bytes. Returns whether there is data.
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
            link.stream.arm(SENDER, link.head, Wish::Once);
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
        // A ring of the bell since the request may have been read with the others: there is data, and the bell has to show it.
        let raced = self.rung();
        if raced > 0 {
            self.owed += raced;
            self.light();
        }
        raced > 0
    }

    /// Rings our own bell.
    pub(crate) fn light(&mut self) {
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
            // A sender is between its ring and the bell.
            kernel::poll_one(bell, libc::POLLIN, 1);
        }
        self.owed = 0;
    }

    /// Chooses the next datagram.
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

    /// Receives the next datagram from a ring, if it is not the kernel's turn.
    ///
    /// # Safety
    /// As `recvmsg(2)`.
    pub(crate) unsafe fn step(
        &mut self,
        fd: c_int,
        d: &Dgram,
        out: &Out<'_>,
        flags: c_int,
    ) -> Step {
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

    /// Returns true if the sender had an earlier ring whose datagrams were sent first.
    fn is_behind(&self, at: usize) -> bool {
        let from = self.links[at].from;
        self.links[..at].iter().any(|link| {
            link.from == from
                && !link.is_broken
                && !matches!(link.stream.ready(SENDER, link.head), Ok((0, _)) | Err(_))
        })
    }

    /// Gives the kernel's socket its turn after the datagrams that are in the rings now.
    fn took(&mut self, fd: c_int) {
        self.since += 1;
        if self.since < TURN || self.turn {
            return;
        }
        self.since = 0;
        if kernel::is_readable(fd) {
            self.turn = true;
            for link in &mut self.links {
                let ready = link.stream.ready(SENDER, link.head).map_or(0, |(n, _)| n);
                link.until = link.head + ready as u64;
            }
        }
    }

    /// Notes that the kernel has no datagram: the ring's datagrams that had to wait for it can follow.
    pub(crate) fn kernel_empty(&mut self) {
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
    /// Stops reading a ring whose sender wrote values that no honest sender writes.
    fn broken(&mut self) {
        self.is_broken = true;
        self.stream.close(SENDER);
        self.row.why(Why::Broken);
    }

    fn has_data(&self) -> bool {
        !self.is_broken && !matches!(self.stream.ready(SENDER, self.head), Ok((0, _)))
    }

    fn is_dead(&self) -> bool {
        let n = kernel::peek(self.wire.0);
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
    let copied = copy_pieces(out.iov, 0, n, |to, len, done| {
        // SAFETY: the caller's buffers.
        unsafe { link.stream.get(SENDER, start + done as u64, to, len) }
    });
    if copied < n {
        return -1;
    }
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

/// Reads the bell's bytes, at least `owed` if there are as many. Returns how many it read.
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
