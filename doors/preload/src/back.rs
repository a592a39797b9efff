//! How a connection goes back to TCP.
//!
//! Both directions are closed; the bytes in the rings are still read from them. But whoever gets the socket (by `SCM_RIGHTS`, an exec, the C library's streams)
//! reads TCP, and would miss the bytes that lie in the ring. So the receiver holds its sender back, takes the bytes out of the ring, and sends them on the
//! peer's own socket, a duplicate of which it gets by `pidfd_getfd`: they are in TCP, in order, before the sender continues there.

use libc::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::ledger::{Carrier, RING, TCP};
use weft_run::meet::Why;
use weft_sys::{diag, process};

use crate::chan::Chan;
use crate::conn::{self, Conn, FRESH, PROBING, big};
use crate::direction::{close_sending, rx_after};
use crate::link::give_up;
use crate::{bell, direction, hosts, kernel, next, rx};

/// Moves both directions back to TCP for good. Bytes in the rings are still read from them.
pub(crate) fn downgrade(conn: &'static Conn, why: Why) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        let big = big();
        if matches!(conn.phase.load(SeqCst), FRESH | PROBING) {
            give_up(conn, why, &big);
        }
        return;
    };
    let (stream, side) = (&chan.stream, chan.side());
    conn.note(why);
    close_sending(conn, chan, why);
    if chan.carrier != Carrier::Here {
        let out_of_sight = is_out_of_sight(why) || why == Why::Splice;
        return hosts::want_tcp(conn, chan, out_of_sight, why);
    }
    let held = is_out_of_sight(why);
    if held {
        stream.hold(chan.peer());
    }
    let empty = {
        let _rx = side.rx_lock.lock();
        stream.close(chan.peer());
        bell::make_room(chan);
        let head = side.head.load(Relaxed);
        stream.ready(chan.peer(), head).is_ok_and(|(n, _)| n == 0)
    };
    if side.rx_state.load(SeqCst) == RING {
        if empty {
            rx_after(conn, chan, why);
        } else if held {
            give_back(conn.descriptor(), conn, chan);
        }
        if side.rx_state.load(SeqCst) != RING {
            // Threads that wait for the ring look again, at the TCP socket.
            // SAFETY: our bell.
            unsafe { next::shutdown(chan.bell(), libc::SHUT_RD) };
        }
    }
    if held {
        stream.release(chan.peer());
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
    if chan.carrier != Carrier::Here || chan.side().tx_state.load(SeqCst) == TCP {
        return downgrade(conn, why);
    }
    conn.note(why);
    direction::stop_sending(conn, why);
}

/// From now on calls that are not seen, or other programs, read the socket.
fn is_out_of_sight(why: Why) -> bool {
    matches!(
        why,
        Why::Exec | Why::Passed | Why::Stdio | Why::Descriptors | Why::Sandbox
    )
}

/// Handles bytes that could not be given back, when nothing reads the ring any more: the connection ends, because the next reader would continue behind a gap
/// in the stream.
pub(crate) fn end_with_unread(conn: &'static Conn) {
    let inside = conn.enter();
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.carrier == Carrier::Here && chan.has_bytes() {
        conn.reset(chan, Why::Unread);
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
    let Some(peer) = peers_socket(fd, chan) else {
        return;
    };
    if !is_quiet(chan) {
        return;
    }
    let Some(_giving) = rx::Giving::begin(chan.side()) else {
        return;
    };
    let bytes = rx::drain(fd, conn, chan);
    if !put(&peer, &bytes) {
        conn.reset(chan, Why::Unread);
    }
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
