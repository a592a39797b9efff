//! What is asked for and what comes back: operations, events, and where events go.

use std::sync::Arc;

use rustix::io::Errno;

use crate::{Memory, Queue, Socket};

bitflags::bitflags! {
    /// Options of one receive.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct RecvFlags: u32 {
        /// Complete only when the memory is full, or the stream ends (`MSG_WAITALL`).
        const WAITALL = 1;
        /// Small data may be left where it arrived: the event then names that place (EXS interface 5.2).
        const IN_PLACE = 2;
        /// Never wait: `EAGAIN` when nothing is buffered (`MSG_DONTWAIT`). Blocking calls only.
        const DONTWAIT = 4;
    }
    /// What a socket is ready for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Ready: u32 {
        /// Data, a connection or the peer's end can be received.
        const IN = 1;
        /// A send would start at once.
        const OUT = 2;
        /// The connection has failed.
        const ERR = 4;
        /// Both directions are closed.
        const HUP = 8;
    }
}

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A connection was made, or could not be.
    Connect,
    /// A listener has a new connection.
    Accept,
    /// A send is complete: its memory is the program's again.
    Send,
    /// A receive is complete.
    Recv,
    /// A gathering send is complete.
    SendMsg,
    /// A scattering receive is complete.
    RecvMsg,
    /// A file was sent.
    SendFile,
    /// The socket is ready for what was asked.
    Poll,
    /// Our direction is closed.
    Shutdown,
    /// The socket is closed.
    Close,
    /// The time limit of sends ran out.
    SendTimeout,
    /// The time limit of receives ran out.
    RecvTimeout,
}

/// Small data left where it arrived (EXS interface 5.2). The socket has one receive fewer for its peer until it is recycled;
/// dropping it recycles it.
pub struct InPlace(pub(crate) Box<Place>);

pub(crate) struct Place {
    pub(crate) recycle: Option<Box<dyn FnOnce() + Send + Sync>>,
    pub(crate) memory: Memory,
}

impl InPlace {
    /// Where the data is. It stays as it is until it is recycled.
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }
    /// Give the place back (`exs_recycle_recv_buffer`).
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

/// The end of one asynchronous operation. Each operation makes exactly one.
#[derive(Debug)]
pub struct Event {
    /// What it is about.
    pub kind: EventKind,
    /// The number that the program gave with the operation (`exs_ahandle_t`).
    pub token: u64,
    /// Descriptor number of the socket when the operation was started.
    pub fd: i32,
    /// Bytes moved, or what went wrong. A cancelled operation has `ECANCELED`, and `bytes` says what it had got before.
    pub result: Result<usize, Errno>,
    /// Bytes moved, also when `result` is an error.
    pub bytes: usize,
    /// The message was longer than the receive (sequenced packets): the rest is lost.
    pub truncated: bool,
    /// The memory of the operation, back from the library: of sends and receives, not of `IN_PLACE` ones that were left in place.
    pub memory: Option<Memory>,
    /// Where small data was left, when the receive allowed that.
    pub in_place: Option<InPlace>,
    /// The new connection of an accept.
    pub accepted: Option<Socket>,
    /// What the socket is ready for, of [`EventKind::Poll`].
    pub ready: Ready,
}

impl Event {
    /// An event that moved no bytes and brings nothing back.
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
    /// Of a send of this memory.
    pub(crate) fn of_send(memory: &Memory) -> EventKind {
        match memory {
            Memory::List(_) => EventKind::SendMsg,
            _ => EventKind::Send,
        }
    }

    /// Of a receive into this memory.
    pub(crate) fn of_recv(memory: &Memory) -> EventKind {
        match memory {
            Memory::List(_) => EventKind::RecvMsg,
            _ => EventKind::Recv,
        }
    }
}

/// Where the end of an operation is told.
pub enum Sink {
    /// As an event in this queue, with this number.
    Queue(Queue, u64),
    /// By this call, once, from whichever thread notices; it must not block and not call the library. The number is the event's.
    Call(Box<dyn FnOnce(Event) + Send>, u64),
    /// Nobody wants to know.
    Nobody,
}

impl Queue {
    /// Events with this number into this queue.
    pub fn sink(&self, token: u64) -> Sink {
        Sink::Queue(self.clone(), token)
    }
}

impl Sink {
    /// A call, with the number 0.
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
    /// Bytes; `None`: to its end.
    pub len: Option<u64>,
}

/// A part of what a file send sends.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Bytes in memory: headers and trailers.
    Memory(Memory),
    /// Bytes of a file.
    File(FilePiece),
}
