//! Operations under way.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use weft_exs::Socket;

use super::helper::Helped;
use super::region::Uses;
use super::table::Entry;
use super::types::{AHandle, AcceptAddr, MHandle, MsgHdr, XferFile};

/// A pointer of the program's, used when the event is dequeued and not before.
#[derive(Clone, Copy)]
pub(super) struct Ptr<T>(pub(super) *mut T);
// SAFETY: the program may dequeue in any thread, and promises that the pointer is good there.
unsafe impl<T> Send for Ptr<T> {}

/// What an operation was, with what its event needs.
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

/// Whose operation it is.
pub(super) enum Of {
    /// A socket's.
    Socket(Arc<Entry>),
    /// A thread's, which makes a connection of the system.
    Helper(Helped),
}

/// An operation that has not been dequeued.
pub(super) struct Op {
    pub(super) fd: i32,
    pub(super) ahandle: AHandle,
    pub(super) of: Of,
    pub(super) what: What,
    /// Held until then.
    pub(super) uses: Uses,
    /// Whether sends and receives had a limit of time when it was started.
    pub(super) limited: [bool; 2],
}

impl Op {
    pub(super) fn new(entry: &Arc<Entry>, ahandle: AHandle, what: What) -> Op {
        let (send, recv) = entry.socket.limits();
        Op {
            limited: [send.is_some(), recv.is_some()],
            fd: entry.fd,
            ahandle,
            of: Of::Socket(Arc::clone(entry)),
            what,
            uses: Uses::new(),
        }
    }

    /// Whether it is one of the socket that has this number now. What went on after the close of another with the number is not.
    /// A helper's is known by its number only, so not when its queue is gone as well (`there`).
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
