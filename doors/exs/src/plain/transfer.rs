//! Moves bytes between an operation's memory and a TCP socket, without ever waiting.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::Memory;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Send,
    Recv,
}

/// The progress of an operation in its memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    /// Bytes moved.
    pub(super) done: usize,
    /// The current piece of a list, and bytes moved of that piece.
    piece: usize,
    within: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The memory is used up: full, or sent completely.
    Full,
    /// The socket has no more data, or no room, at the moment.
    Later,
    /// The budget is used up; it is the turn of other sockets.
    Enough,
    /// The peer's stream has ended.
    End,
    /// The socket failed.
    Failed(Errno),
}

/// Moves bytes, starting at `cursor`, until the memory or the socket is used up, or `budget` bytes were moved.
pub(super) fn advance(
    fd: BorrowedFd<'_>,
    way: Way,
    memory: &mut Memory,
    cursor: &mut Cursor,
    budget: usize,
) -> Attempt {
    let start = cursor.done;
    loop {
        let (piece, last) = match &mut *memory {
            Memory::List(list) => {
                let Some(len) = list.get(cursor.piece).map(Memory::len) else {
                    return Attempt::Full;
                };
                if cursor.within == len {
                    cursor.piece += 1;
                    cursor.within = 0;
                    continue;
                }
                let last = cursor.piece + 1 == list.len();
                (&mut list[cursor.piece], last)
            }
            one if one.len() == cursor.within => return Attempt::Full,
            one => (one, true),
        };
        if cursor.done - start >= budget {
            return Attempt::Enough;
        }
        match once(fd, way, piece, cursor.within, !last) {
            Ok(0) if way == Way::Recv => return Attempt::End,
            Ok(n) => {
                cursor.done += n;
                cursor.within += n;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Attempt::Later,
            Err(e) => return Attempt::Failed(e),
        }
    }
}

/// One system call for the rest of `memory` after `off`, which is not empty.
fn once(
    fd: BorrowedFd<'_>,
    way: Way,
    memory: &mut Memory,
    off: usize,
    more: bool,
) -> Result<usize, Errno> {
    let number = |r: io::Result<usize>| {
        r.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput if e.raw_os_error().is_none() => Errno::FAULT,
            _ => Errno::from_io_error(&e).unwrap_or(Errno::IO),
        })
    };
    match (way, memory) {
        (
            Way::Send,
            Memory::Region {
                region,
                off: at,
                len,
            },
        ) => number(region.mr.send_to_socket(fd, *at + off, *len - off, more)),
        (
            Way::Recv,
            Memory::Region {
                region,
                off: at,
                len,
            },
        ) => number(region.mr.recv_from_socket(fd, *at + off, *len - off)),
        (Way::Send, Memory::Raw(raw)) => number(raw.send_to_socket(fd, off, raw.len() - off, more)),
        (Way::Recv, Memory::Raw(raw)) => number(raw.recv_from_socket(fd, off, raw.len() - off)),
        (Way::Send, Memory::Owned(bytes)) => {
            let mut flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            flags.set(SendFlags::MORE, more);
            rustix::net::send(fd, &bytes[off..], flags)
        }
        (Way::Recv, Memory::Owned(bytes)) => {
            rustix::net::recv(fd, &mut bytes[off..], RecvFlags::DONTWAIT).map(|(n, _)| n)
        }
        (_, Memory::List(list)) => {
            // A list within a list: find the piece.
            let mut skip = off;
            let count = list.len();
            for (i, piece) in list.iter_mut().enumerate() {
                let len = piece.len();
                if skip < len {
                    return once(fd, way, piece, skip, more || i + 1 < count);
                }
                skip -= len;
            }
            Ok(0)
        }
    }
}
