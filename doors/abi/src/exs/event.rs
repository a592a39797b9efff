//! Conversion of events to their C form.

use std::ffi::{c_int, c_short, c_void};
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use weft_exs::{EventKind, InPlace, RawMemory, Ready, Socket};

use super::op::{Of, Op, What};
use super::state::state;
use super::table::Entry;
use super::types::{
    AcceptAddr, EXS_EVF_IN_PLACE, EXS_EVF_TRUNC, EXS_EVT_ACCEPT, EXS_EVT_CLOSE, EXS_EVT_CONNECT,
    EXS_EVT_POLL, EXS_EVT_RECV, EXS_EVT_RECVMSG, EXS_EVT_RECVTIMEOUT, EXS_EVT_SEND,
    EXS_EVT_SENDFILE, EXS_EVT_SENDMSG, EXS_EVT_SENDTIMEOUT, EXS_EVT_SHUTDOWN, EXS_POLLERR,
    EXS_POLLHUP, EXS_POLLIN, EXS_POLLOUT, Event, EvtAccept, EvtPoll, EvtUnion, EvtXfer,
    EvtXferFile, EvtXferMsg, MsgHdr,
};
use crate::address;

/// The event for C. A new connection is added to the table; data left in place is kept until it is recycled.
pub(super) fn told(mut event: weft_exs::Event, op: Op) -> Event {
    let mut errno = event.result.err().map_or(0, Errno::raw_os_error);
    let mut flags = 0;
    if event.truncated {
        flags |= EXS_EVF_TRUNC;
    }
    // The event of a helper's operation is a poll event.
    let kind = match op.what {
        What::Connect => EXS_EVT_CONNECT,
        What::Accept(_) => EXS_EVT_ACCEPT,
        _ => kind(kind_with_limit(&event, &op)),
    };
    let union = match op.what {
        What::Accept(addr) => {
            let new = match &op.of {
                Of::Helper(helped) => helped.accepted(),
                Of::Socket(entry) => match event.accepted.take() {
                    Some(socket) => enter(socket, entry.settings().ipv6, false),
                    None => Err(event.result.err().unwrap_or(Errno::IO)),
                },
            };
            // SAFETY: the pointer that the program passed with the call.
            errno = unsafe { new_connection(&new, addr.0) };
            EvtUnion {
                exs_evt_accept: EvtAccept {
                    exs_evt_new_socket: new.map_or(-1, |(fd, _)| fd),
                    exs_evt_addr: addr.0,
                },
            }
        }
        What::Xfer { buf, len, mh } => {
            let mut at = buf.0;
            if let (Some(in_place), Of::Socket(entry)) = (event.in_place.take(), &op.of) {
                match keep(entry, in_place) {
                    Ok(place) => {
                        at = place;
                        flags |= EXS_EVF_IN_PLACE;
                    }
                    // SAFETY: the memory of the receive, which the program keeps until now.
                    Err(in_place) => unsafe { copied(&in_place, buf.0, len) },
                }
            }
            EvtUnion {
                exs_evt_xfer: EvtXfer {
                    exs_evt_buffer: at,
                    exs_evt_length: event.bytes,
                    exs_evt_mhandle: mh,
                },
            }
        }
        What::Msg(msg) => {
            if matches!(event.kind, EventKind::RecvMsg | EventKind::RecvTimeout)
                && let Of::Socket(entry) = &op.of
            {
                // SAFETY: the pointer that the program passed with the call.
                unsafe { received(msg.0, entry.socket.peer_addr().ok(), event.truncated) };
            }
            EvtUnion {
                exs_evt_xfermsg: EvtXferMsg {
                    exs_evt_msg: msg.0,
                    exs_evt_length: event.bytes,
                },
            }
        }
        What::File(vec, count) => EvtUnion {
            exs_evt_xferfile: EvtXferFile {
                exs_evt_vec: vec.0,
                exs_evt_veclen: count,
                exs_evt_length: event.bytes as u64,
            },
        },
        What::Connect => {
            if let Of::Helper(helped) = &op.of {
                errno = helped.connected().err().map_or(0, Errno::raw_os_error);
            }
            ready(Ready::empty())
        }
        What::Poll => ready(event.ready),
        What::Shutdown | What::Close => ready(Ready::empty()),
    };
    Event {
        exs_evt_type: kind as c_int,
        exs_evt_errno: errno,
        exs_evt_socket: op.fd,
        exs_evt_flags: flags as c_int,
        exs_evt_ahandle: op.ahandle,
        exs_evt_union: union,
    }
}

fn kind(kind: EventKind) -> i64 {
    match kind {
        EventKind::Connect => EXS_EVT_CONNECT,
        EventKind::Accept => EXS_EVT_ACCEPT,
        EventKind::Send => EXS_EVT_SEND,
        EventKind::Recv => EXS_EVT_RECV,
        EventKind::SendMsg => EXS_EVT_SENDMSG,
        EventKind::RecvMsg => EXS_EVT_RECVMSG,
        EventKind::SendFile => EXS_EVT_SENDFILE,
        EventKind::Poll => EXS_EVT_POLL,
        EventKind::Shutdown => EXS_EVT_SHUTDOWN,
        EventKind::Close => EXS_EVT_CLOSE,
        EventKind::SendTimeout => EXS_EVT_SENDTIMEOUT,
        EventKind::RecvTimeout => EXS_EVT_RECVTIMEOUT,
    }
}

fn ready(ready: Ready) -> EvtUnion {
    let bits = [
        (Ready::IN, EXS_POLLIN),
        (Ready::OUT, EXS_POLLOUT),
        (Ready::ERR, EXS_POLLERR),
        (Ready::HUP, EXS_POLLHUP),
    ];
    let bits = bits.iter().filter(|(r, _)| ready.contains(*r));
    // Fills the whole union: bytes that the event does not use are zero.
    let mut union = EvtUnion {
        exs_evt_xferfile: EvtXferFile {
            exs_evt_vec: std::ptr::null(),
            exs_evt_veclen: 0,
            exs_evt_length: 0,
        },
    };
    union.exs_evt_poll = EvtPoll {
        exs_evt_events: bits.fold(0, |all, (_, bit)| all | bit) as c_short,
    };
    union
}

/// The event kind: a timeout event for an operation that exceeded the socket's time limit. With `EXS_TIMEOUT_ONCE` that ends the
/// limit. An operation without a limit ends with `ETIMEDOUT` only when the whole connection does.
fn kind_with_limit(event: &weft_exs::Event, op: &Op) -> EventKind {
    let (way, kind) = match event.kind {
        EventKind::Send | EventKind::SendMsg | EventKind::SendFile => (0, EventKind::SendTimeout),
        EventKind::Recv | EventKind::RecvMsg => (1, EventKind::RecvTimeout),
        other => return other,
    };
    let Of::Socket(entry) = &op.of else {
        return event.kind;
    };
    if event.result != Err(Errno::TIMEDOUT) || !op.limited[way] {
        return event.kind;
    }
    if entry.limits.once[way].swap(false, Ordering::AcqRel) {
        // Time limits can be changed at any time.
        let _ = entry.set_limit(way, None);
    }
    kind
}

/// Adds a new connection to the table. Returns its descriptor, and the peer's address.
pub(super) fn enter(
    socket: Socket,
    ipv6: bool,
    nonblock: bool,
) -> Result<(i32, Option<SocketAddr>), Errno> {
    let peer = socket.peer_addr().ok();
    Ok((state().sockets.insert(socket, ipv6, nonblock)?, peer))
}

/// Fills in the address of an accept. Returns its `errno`.
///
/// # Safety
/// As for `exs_accept`.
unsafe fn new_connection(
    new: &Result<(i32, Option<SocketAddr>), Errno>,
    addr: *mut AcceptAddr,
) -> c_int {
    match new {
        Ok((_, peer)) => {
            if !addr.is_null() {
                // SAFETY: the caller's promise.
                unsafe {
                    let AcceptAddr {
                        aa_addr,
                        aa_addrlen,
                    } = addr.read();
                    let len = peer.map_or(0, |peer| address::write(peer, aa_addr, aa_addrlen));
                    (&raw mut (*addr).aa_addrlen).write(len);
                }
            }
            0
        }
        Err(errno) => errno.raw_os_error(),
    }
}

/// Fills in the message header fields that report a receive.
///
/// # Safety
/// As for `exs_recvmsg`.
pub(super) unsafe fn received(msg: *mut MsgHdr, peer: Option<SocketAddr>, truncated: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let MsgHdr {
            msg_name,
            msg_namelen,
            ..
        } = msg.read();
        let len = match peer {
            Some(peer) if !msg_name.is_null() => address::write(peer, msg_name.cast(), msg_namelen),
            _ => 0,
        };
        (&raw mut (*msg).msg_namelen).write(len);
        (&raw mut (*msg).msg_flags).write(if truncated { libc::MSG_TRUNC } else { 0 });
    }
}

/// Keeps data that was left in place until it is recycled. Returns its address; data without an address is returned.
fn keep(entry: &Entry, in_place: InPlace) -> Result<*mut c_void, InPlace> {
    let Some(at) = in_place.memory().as_ptr() else {
        return Err(in_place);
    };
    let at: *mut c_void = at.cast();
    let mut kept = entry
        .in_place
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if entry.is_closed() {
        // The program could not recycle it; the place is freed with the socket.
        return Err(in_place);
    }
    kept.insert(at as usize, in_place);
    Ok(at)
}

/// Copies data that was left in place to the buffer of the receive.
///
/// # Safety
/// `len` bytes at `buf` are writable.
unsafe fn copied(in_place: &InPlace, buf: *mut c_void, len: usize) {
    let bytes = in_place.memory().to_vec();
    // SAFETY: the caller's promise.
    if let Some(buffer) = unsafe { RawMemory::new(buf.cast(), len) } {
        // Data that is left in place is never longer than its receive.
        let _ = buffer.write(0, &bytes[..bytes.len().min(len)]);
    }
}
