//! Outstanding operations.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use weft_exs::Socket;

use super::helper::Helped;
use super::region::Uses;
use super::table::Entry;
use super::types::{AHandle, AcceptAddr, MHandle, MsgHdr, XferFile};

/// A pointer of the program. It is used when the event is dequeued and not before.
#[derive(Clone, Copy)]
pub(super) struct Ptr<T>(pub(super) *mut T);
// SAFETY: the program may dequeue in any thread, and promises that the pointer is valid there.
unsafe impl<T> Send for Ptr<T> {}

/// The kind of an operation, with the data that its event needs.
pub(super) enum What {
    Connect,
    Accept(Ptr<AcceptAddr>),
    Xfer {
        buf: Ptr<c_void>,
        len: usize,
        mh: MHandle,
    },
    Msg(Ptr<MsgHdr>),
    File(Ptr<XferFile>, c_int),
    Poll,
    Shutdown,
    Close,
}

/// The owner of an operation.
pub(super) enum Of {
    Socket(Arc<Entry>),
    /// A helper thread, which makes a kernel connection.
    Helper(Helped),
}

/// An operation that has not been dequeued.
pub(super) struct Op {
    /// The number that the call was made with.
    pub(super) fd: i32,
    pub(super) ahandle: AHandle,
    pub(super) of: Of,
    pub(super) what: What,
    /// Held until the event is dequeued.
    pub(super) uses: Uses,
    /// For sends and for receives: true if there was a time limit when it was started.
    pub(super) limited: [bool; 2],
}

impl Op {
    pub(super) fn new(fd: i32, entry: &Arc<Entry>, ahandle: AHandle, what: What) -> Op {
        let (send, recv) = entry.socket.limits();
        Op {
            limited: [send.is_some(), recv.is_some()],
            fd,
            ahandle,
            of: Of::Socket(Arc::clone(entry)),
            what,
            uses: Uses::new(),
        }
    }

    /// True if it belongs to the socket that has this number now, not to a closed socket that had the number.
    /// A helper's operation is known by its number only, so it does not match when its queue is gone (`there` is false).
    pub(super) fn is_of(&self, fd: i32, socket: Option<&Arc<Entry>>, there: bool) -> bool {
        match &self.of {
            Of::Socket(entry) => socket.is_some_and(|socket| Arc::ptr_eq(socket, entry)),
            Of::Helper(_) => there && self.fd == fd,
        }
    }

    /// The socket to cancel it on.
    pub(super) fn socket(&self) -> Socket {
        match &self.of {
            Of::Socket(entry) => entry.socket.clone(),
            Of::Helper(helped) => helped.bell.clone(),
        }
    }
}
