//! Work requests, and their completions.

use weft_wire::rdmap::{AtomicOp, Opcode, TermError};

/// A work request for the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The operation.
    pub op: Op,
    /// Bytes of its scatter/gather list: the payload of a Send or Write, the sink of a Read. Ignored for [`Op::Imm`],
    /// [`Op::Atomic`] and [`Op::Local`].
    pub len: u32,
    /// Do not start before every earlier Read and Atomic is complete.
    pub fence: bool,
}

/// The operations of the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Send, with Solicited Event and with Invalidate as asked (RFC 5040 sections 4.6 and 4.7).
    Send {
        /// Ask for an event at the receiver.
        solicited: bool,
        /// An `STag` of the peer to invalidate when the message is delivered.
        invalidate: Option<u32>,
    },
    /// RDMA Write (RFC 5040 section 4.3).
    Write {
        /// The peer's region.
        stag: u32,
        /// The offset in it.
        to: u64,
    },
    /// RDMA Write followed by an Immediate Data message (RFC 7306 section 6).
    WriteImm {
        /// The peer's region.
        stag: u32,
        /// The offset in it.
        to: u64,
        /// The 8 bytes of immediate data, big-endian on the wire.
        imm: u64,
        /// Ask for an event at the receiver.
        solicited: bool,
    },
    /// Send and eight bytes of immediate data in one message, which no RFC has: docs/spec/rdmap-extensions.md.
    SendImm {
        /// The 8 bytes of immediate data, big-endian on the wire.
        imm: u64,
        /// Ask for an event at the receiver.
        solicited: bool,
    },
    /// Immediate Data alone (RFC 7306 section 6).
    Imm {
        /// The 8 bytes of immediate data, big-endian on the wire.
        imm: u64,
        /// Ask for an event at the receiver.
        solicited: bool,
    },
    /// RDMA Read (RFC 5040 section 4.4).
    Read {
        /// The peer's region.
        src_stag: u32,
        /// The offset in it.
        src_to: u64,
    },
    /// An Atomic Operation on 8 bytes of the peer's memory (RFC 7306 section 5).
    Atomic {
        /// Which one.
        op: AtomicOp,
        /// The peer's region.
        stag: u32,
        /// The offset in it; the peer requires 8-byte alignment.
        to: u64,
        /// The value to add, or to swap in.
        add_or_swap: u64,
        /// Its mask.
        add_or_swap_mask: u64,
        /// The value to compare with (compare and swap).
        compare: u64,
        /// Its mask.
        compare_mask: u64,
    },
    /// Work that puts nothing on the wire but keeps its place in the queue: Local Invalidate, Bind Memory Window.
    Local,
}

impl Op {
    /// True for the operations that the peer answers, which ORD bounds and fences wait for.
    pub const fn is_answered(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Atomic { .. })
    }

    /// True for the operations that consume a receive of the peer's.
    pub const fn takes_receive(&self) -> bool {
        matches!(
            self,
            Self::Send { .. } | Self::SendImm { .. } | Self::Imm { .. } | Self::WriteImm { .. }
        )
    }
}

/// One thing for the transmit loop to do, from [`next_tx`](super::Stream::next_tx).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tx {
    /// Bytes of the header buffer in use: the DDP/RDMAP header and, for control messages, their body.
    /// The ULPDU length is this plus the payload's length.
    pub header_len: usize,
    /// The user bytes that follow.
    pub payload: Payload,
    /// The work request whose last segment this is: call [`transmitted`](super::Stream::transmitted) once it is sent.
    pub completes: Option<u64>,
    /// The opcode of the segment; `None` for [`Payload::Local`].
    pub opcode: Option<Opcode>,
}

impl Tx {
    /// This is a Terminate message: nothing follows it, close the stream after it.
    pub fn is_terminate(&self) -> bool {
        self.opcode == Some(Opcode::Terminate)
    }
}

/// The source of a segment's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// The header is the whole segment.
    None,
    /// From the scatter/gather list of a work request.
    Wr {
        /// The work request.
        seq: u64,
        /// Bytes of its list that went before.
        offset: u32,
        /// Bytes to take, at least 1.
        len: u32,
    },
    /// From registered memory, for a Read Response. If the memory has become invalid meanwhile, drop this segment and call
    /// [`fail_source`](super::Stream::fail_source).
    Source {
        /// Our region.
        stag: u32,
        /// The offset in it.
        to: u64,
        /// Bytes to take, at least 1.
        len: u32,
    },
    /// No segment at all: execute the [`Op::Local`] work request, then call
    /// [`transmitted`](super::Stream::transmitted).
    Local {
        /// The work request.
        seq: u64,
    },
}

impl Payload {
    /// Bytes of payload on the wire.
    pub const fn len(&self) -> u32 {
        match *self {
            Self::Wr { len, .. } | Self::Source { len, .. } => len,
            Self::None | Self::Local { .. } => 0,
        }
    }

    /// True if no payload follows the header.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A finished work request of the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number that [`post_with`](super::Stream::post_with) gave it.
    pub seq: u64,
    /// Its status.
    pub status: DoneStatus,
}

/// The status of a finished work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoneStatus {
    /// Done: a Send or Write is with the transport, a Read or Atomic has its answer in place.
    Ok {
        /// Bytes moved.
        byte_len: u32,
    },
    /// The peer's Terminate names this work request.
    RemoteError(TermError),
    /// The stream ended first.
    Flushed,
}
