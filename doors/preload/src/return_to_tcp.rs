//! How a connection goes back to TCP, by the steps of [`weft_run::connection::back`]. The peer's own socket is a duplicate by `pidfd_getfd`.

use libc::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::Carrier;
use weft_run::connection::back::{Give, Going, Step, stays_incoming};
use weft_run::meet::Why;
use weft_sys::{diag, process};

use crate::chan::Chan;
use crate::conn::{self, Conn, big};
use crate::direction::{close_sending, rx_after};
use crate::link::give_up;
use crate::{bell, direction, hosts, kernel, next, rx};

/// Moves both directions back to TCP for good. Bytes in the rings are still read from them.
pub(crate) fn downgrade(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        let big = big();
        if conn.phase.load(SeqCst).may_meet() {
            give_up(conn, why, &big);
        }
        return;
    };
    conn.note(why);
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let (mut is_empty, mut last) = (false, None);
    loop {
        let going = Going {
            why,
            carrier: chan.carrier,
            into: side.rx_state.load(SeqCst),
            is_empty,
        };
        last = going.next(last);
        match last {
            None => return,
            Some(Step::CloseOut) => close_sending(conn, chan, why),
            Some(Step::AskHost) => hosts::want_tcp(conn, chan, why),
            Some(Step::Hold) => stream.hold(peer),
            Some(Step::CloseIn) => {
                let _rx = side.rx_lock.lock();
                stream.close(peer);
                bell::make_room(chan);
                let head = side.head.load(Relaxed);
                is_empty = stream.ready(peer, head).is_ok_and(|(n, _)| n == 0);
            }
            Some(Step::ReadTcp) => rx_after(conn, chan, why),
            Some(Step::GiveBack) => give_back(conn.descriptor(), conn, chan),
            // SAFETY: our bell.
            Some(Step::Wake) => _ = unsafe { next::shutdown(chan.bell(), libc::SHUT_RD) },
            Some(Step::Release) => stream.release(peer),
        }
    }
}

/// The outgoing direction is on TCP for good: calls that are not seen send.
pub(crate) fn sends_unseen(fd: c_int, why: Why) {
    let Some((conn, inside)) = conn::enter(fd) else {
        return;
    };
    let Some(chan) = conn.chan(&inside) else {
        // What is sent by calls that are not seen would be missing from the count.
        return downgrade(conn, why);
    };
    if !stays_incoming(chan.side().tx_state.load(SeqCst), chan.carrier) {
        return downgrade(conn, why);
    }
    conn.note(why);
    direction::stop_sending(conn, why);
}

/// Handles bytes that could not be given back, when nothing reads the ring any more: the connection ends, because the next reader would continue behind a gap
/// in the stream.
pub(crate) fn end_with_unread(conn: &'static Conn) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.carrier == Carrier::Here && chan.has_bytes() {
        conn.cut(chan, Why::Unread);
    }
}

/// The same when this process only is about to lose the ring: others read it if they have it.
pub(crate) fn end_with_unread_of_all(conn: &'static Conn) {
    if conn.holders(&conn.enter()) == 1 {
        end_with_unread(conn);
    }
}

/// Takes the unread bytes out of the ring, whose direction is held, and puts them into TCP. Where that cannot be, they are still in the ring. A connection whose
/// bytes do not all fit into TCP is reset.
fn give_back(fd: c_int, conn: &'static Conn, chan: &Chan) {
    let (mut peer, mut giving) = (None, None);
    let mut step = Some(Give::FIRST);
    while let Some(give) = step {
        let goes_on = match give {
            Give::PeersSocket => {
                peer = takes_more(fd).then(|| peers_socket(fd, chan)).flatten();
                peer.is_some()
            }
            Give::Quiet => is_quiet(chan),
            Give::Begin => {
                giving = rx::Giving::begin(chan.side());
                giving.is_some()
            }
            Give::Move => {
                if let Some(bytes) = rx::drain(fd, conn, chan)
                    && !peer.as_ref().is_some_and(|peer| put(peer, &bytes))
                {
                    conn.cut(chan, Why::Unread);
                }
                true
            }
        };
        step = give.next().filter(|_| goes_on);
    }
    drop(giving);
}

/// Sends all bytes on a peer's socket, whose buffer is made larger where they do not fit. `false`: some are not sent.
fn put(peer: &OwnedFd, bytes: &[u8]) -> bool {
    let fd = peer.as_raw_fd();
    let mut before = None;
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = &bytes[sent..];
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: bytes of a slice.
        let n = unsafe { next::send(fd, rest.as_ptr().cast(), rest.len(), flags) };
        match n {
            1.. => sent += n as usize,
            _ if crate::errno() == libc::EINTR => {}
            // The program reads nothing now.
            _ if before.is_none() => {
                before = kernel::number(fd, libc::SO_SNDBUF);
                let Some(now) = before else { return false };
                let more = (2 * rest.len()).saturating_add(now as usize);
                let more = c_int::try_from(more).unwrap_or(c_int::MAX / 2);
                kernel::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &more);
                kernel::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &more);
            }
            _ => break,
        }
    }
    if let Some(before) = before {
        // The kernel doubles what it is given.
        kernel::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &(before / 2));
    }
    sent == bytes.len()
}

/// Waits until no send over TCP is under way, a moment at most.
fn is_quiet(chan: &Chan) -> bool {
    for _ in 0..1000 {
        if !chan.stream.is_sending(chan.peer()) {
            return true;
        }
        kernel::nap(100_000);
    }
    false
}

/// Whether TCP takes bytes from the peer: it has not ended its direction, and this side has not shut down both.
fn takes_more(fd: c_int) -> bool {
    kernel::is_established(fd) || kernel::poll_one(fd, libc::POLLRDHUP, 0) & libc::POLLRDHUP == 0
}

/// A duplicate of the peer's socket.
fn peers_socket(fd: c_int, chan: &Chan) -> Option<OwnedFd> {
    if chan.peer_process == 0 {
        return None;
    }
    let inode = diag::tcp_peer_inode(kernel::borrowed(fd)).ok()??;
    let met = process::socket_of(chan.peer_process, inode).ok();
    met.or_else(|| of_any(inode))
}

/// The same from whatever process has it: the one that has met us may have handed it on.
fn of_any(inode: u32) -> Option<OwnedFd> {
    let processes = std::fs::read_dir("/proc").ok()?;
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    processes
        .filter_map(|entry| number(entry.ok()?))
        .find_map(|process| process::socket_of(process, inode).ok())
}
