//! Operations, their events, and the destinations of events.

use std::sync::Arc;

use rustix::io::Errno;

use crate::{Memory, Queue, Socket};

bitflags::bitflags! {
    /// Options of one receive.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct RecvFlags: u32 {
        /// Complete only when the memory is full, or the stream ends (`MSG_WAITALL`).
        const WAITALL = 1;
        /// Small data may stay where it arrived: the event then refers to that place (EXS interface 5.2).
        const IN_PLACE = 2;
        /// Never wait: `EAGAIN` when nothing is buffered (`MSG_DONTWAIT`). Blocking calls only.
        const DONTWAIT = 4;
    }
    /// The conditions that a socket is ready for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Ready: u32 {
        /// Data, a connection or the end of the stream can be received.
        const IN = 1;
        /// A send would start at once.
        const OUT = 2;
        /// The connection has failed.
        const ERR = 4;
        /// Both directions are closed.
        const HUP = 8;
    }
}

/// The operation that an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A connect succeeded or failed.
    Connect,
    /// A listener has a new connection.
    Accept,
    /// A send is complete: the program may use its memory again.
    Send,
    /// A receive is complete.
    Recv,
    /// A gathering send is complete.
    SendMsg,
    /// A scattering receive is complete.
    RecvMsg,
    /// A file was sent.
    SendFile,
    /// The socket is ready for a requested condition.
    Poll,
    /// The sending direction is closed.
    Shutdown,
    /// The socket is closed.
    Close,
    /// The time limit for sends expired.
    SendTimeout,
    /// The time limit for receives expired.
    RecvTimeout,
}

/// Small data that stays where it arrived (EXS interface 5.2). Until it is recycled, the socket has one receive fewer for its peer.
/// Dropping it recycles it.
pub struct InPlace(pub(crate) Box<Place>);

pub(crate) struct Place {
    pub(crate) recycle: Option<Box<dyn FnOnce() + Send + Sync>>,
    pub(crate) memory: Memory,
}

impl InPlace {
    /// The data. It does not change until it is recycled.
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }
    /// Return the place to the socket (`exs_recycle_recv_buffer`).
    pub fn recycle(self) {}
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if let Some(recycle) = self.0.recycle.take() {
            recycle();
        }
    }
}

impl std::fmt::Debug for InPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InPlace")
            .field("memory", &self.0.memory)
            .finish_non_exhaustive()
    }
}

/// The result of one asynchronous operation. Each operation produces exactly one event.
#[derive(Debug)]
pub struct Event {
    /// The operation.
    pub kind: EventKind,
    /// The number that the program passed with the operation (`exs_ahandle_t`).
    pub token: u64,
    /// Descriptor number of the socket when the operation was started.
    pub fd: i32,
    /// Bytes moved, or the error. A cancelled operation has `ECANCELED`; `bytes` then holds the bytes moved before it.
    pub result: Result<usize, Errno>,
    /// Bytes moved, also when `result` is an error.
    pub bytes: usize,
    /// The message was longer than the receive (sequenced packets): the rest is lost.
    pub truncated: bool,
    /// The memory that the operation returns: of sends and receives, except `IN_PLACE` receives whose data stayed in place.
    pub memory: Option<Memory>,
    /// The place of small data, if the receive allowed that.
    pub in_place: Option<InPlace>,
    /// The new connection of an accept.
    pub accepted: Option<Socket>,
    /// The ready conditions, for [`EventKind::Poll`].
    pub ready: Ready,
}

impl Event {
    /// An event with no bytes and no memory.
    #[inline]
    pub(crate) fn new(kind: EventKind, token: u64, fd: i32, result: Result<usize, Errno>) -> Event {
        Event {
            kind,
            token,
            fd,
            result,
            bytes: 0,
            truncated: false,
            memory: None,
            in_place: None,
            accepted: None,
            ready: Ready::empty(),
        }
    }
}

impl EventKind {
    pub(crate) fn of_send(memory: &Memory) -> EventKind {
        match memory {
            Memory::List(_) => EventKind::SendMsg,
            _ => EventKind::Send,
        }
    }

    /// The kind for a receive into this memory.
    pub(crate) fn of_recv(memory: &Memory) -> EventKind {
        match memory {
            Memory::List(_) => EventKind::RecvMsg,
            _ => EventKind::Recv,
        }
    }
}

/// The destination of an operation's result.
pub enum Sink {
    /// As an event in this queue, with this number.
    Queue(Queue, u64),
    /// A call with the event, once, from the thread that completes the operation. It must not block and must not call the library.
    /// The number is the event's.
    Call(Box<dyn FnOnce(Event) + Send>, u64),
    /// The result is discarded.
    Nobody,
}

impl Queue {
    /// A sink that puts events with this number into this queue.
    pub fn sink(&self, token: u64) -> Sink {
        Sink::Queue(self.clone(), token)
    }
}

impl Sink {
    /// A sink that calls `f`, with the number 0.
    pub fn call(f: impl FnOnce(Event) + Send + 'static) -> Sink {
        Sink::Call(Box::new(f), 0)
    }
}

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sink::Queue(_, token) => write!(f, "Queue({token})"),
            Sink::Call(_, token) => write!(f, "Call({token})"),
            Sink::Nobody => f.write_str("Nobody"),
        }
    }
}

/// A piece of a file to send.
#[derive(Clone, Debug)]
pub struct FilePiece {
    /// The file.
    pub file: Arc<std::os::fd::OwnedFd>,
    /// First byte.
    pub offset: u64,
    /// Number of bytes; `None`: up to the end of the file.
    pub len: Option<u64>,
}

/// One part of a file send.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Bytes in memory: headers and trailers.
    Memory(Memory),
    /// Bytes of a file.
    File(FilePiece),
}
