//! Unread bytes of a ring go back to TCP, when another program is about to read the socket.
//!
//! Whoever gets the socket (by `SCM_RIGHTS`, an exec, the C library's streams) reads TCP, and would miss the bytes that lie in the ring. So the receiver
//! closes the direction and holds its sender back, takes the bytes out of the ring, and sends them on the peer's own socket, a duplicate of which it gets
//! by `pidfd_getfd`: they are in TCP, in order, before the sender continues there.

use libc::c_int;
use std::os::fd::{AsRawFd, OwnedFd};

use weft_ring::Role;
use weft_sys::{diag, process};

use crate::chan::Chan;
use crate::conn::Conn;
use crate::{kernel, rx};

/// Takes the unread bytes out of the ring, whose direction is held, and puts them into TCP. `false`: they are still in the ring, or only a part is in TCP.
pub(crate) fn give_back(fd: c_int, conn: &'static Conn, chan: &Chan) -> bool {
    let Some(peer) = peers_socket(fd, chan) else {
        return false;
    };
    if !is_quiet(chan) {
        return false;
    }
    let mut bytes = rx::drain(fd, conn, chan);
    take_all(fd, &mut bytes);
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = libc::iovec {
            iov_base: bytes[sent..].as_ptr().cast_mut().cast(),
            iov_len: bytes.len() - sent,
        };
        // SAFETY: bytes of a slice.
        let n = unsafe {
            kernel::send(
                peer.as_raw_fd(),
                &[rest],
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        match n {
            1.. => sent += n as usize,
            _ if crate::errno() == libc::EINTR => {}
            // Nothing makes room: the program reads nothing now.
            _ => return false,
        }
    }
    true
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

/// Takes the bytes that TCP has: they are behind those of the ring.
fn take_all(fd: c_int, bytes: &mut Vec<u8>) {
    let mut some = vec![0_u8; 64 << 10];
    loop {
        let iov = [libc::iovec {
            iov_base: some.as_mut_ptr().cast(),
            iov_len: some.len(),
        }];
        // SAFETY: our buffer.
        let n = unsafe { kernel::receive(fd, &iov, libc::MSG_DONTWAIT) };
        if n <= 0 {
            return;
        }
        bytes.extend_from_slice(&some[..n as usize]);
    }
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

/// How long a sender waits for a receiver that holds it back, in milliseconds.
const HELD_MS: u32 = 2000;

/// Waits until the receiver of a closed direction does not hold its sender back any more.
#[inline]
pub(crate) fn await_release(chan: &Chan, role: Role) {
    if chan.stream.is_held(role) {
        wait(chan, role);
    }
}

#[cold]
fn wait(chan: &Chan, role: Role) {
    for _ in 0..HELD_MS * 10 {
        if !chan.stream.is_held(role) {
            return;
        }
        kernel::nap(100_000);
    }
}
