//! RDMAP messages (RFC 5040 4, RFC 7306 4 to 6): opcodes and the headers that follow the DDP header.

use core::fmt;

use zerocopy::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

mod terminate;

pub use terminate::{
    MpaError, OperationError, ProtectionError, TaggedError, TermError, Terminate, TerminateShort,
    UntaggedError,
};

/// Queue of Send and Immediate Data messages (RFC 5040 4.1, RFC 7306 4.1).
pub const QN_SEND: u32 = 0;
/// Queue of Read Requests and Atomic Requests.
pub const QN_READ_REQUEST: u32 = 1;
/// Queue of the one Terminate.
pub const QN_TERMINATE: u32 = 2;
/// Queue of Atomic Responses (RFC 7306 5.2).
pub const QN_ATOMIC_RESPONSE: u32 = 3;

/// Bytes of an Immediate Data message's payload (RFC 7306 6).
pub const IMMEDIATE_LEN: usize = 8;

/// What a message is (RFC 5040 4.1, RFC 7306 4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Opcode {
    /// RDMA Write.
    Write = 0,
    /// RDMA Read Request.
    ReadRequest = 1,
    /// RDMA Read Response.
    ReadResponse = 2,
    /// Send.
    Send = 3,
    /// Send with Invalidate.
    SendInvalidate = 4,
    /// Send with Solicited Event.
    SendSe = 5,
    /// Send with Solicited Event and Invalidate.
    SendSeInvalidate = 6,
    /// Terminate.
    Terminate = 7,
    /// Immediate Data.
    Immediate = 8,
    /// Immediate Data with Solicited Event.
    ImmediateSe = 9,
    /// Atomic Request.
    AtomicRequest = 10,
    /// Atomic Response.
    AtomicResponse = 11,
}

impl Opcode {
    /// All of them, in the order of their codes.
    pub const ALL: [Self; 12] = [
        Self::Write,
        Self::ReadRequest,
        Self::ReadResponse,
        Self::Send,
        Self::SendInvalidate,
        Self::SendSe,
        Self::SendSeInvalidate,
        Self::Terminate,
        Self::Immediate,
        Self::ImmediateSe,
        Self::AtomicRequest,
        Self::AtomicResponse,
    ];

    /// The opcode with this code, if any.
    #[inline]
    pub const fn from_code(code: u8) -> Option<Self> {
        if (code as usize) < Self::ALL.len() {
            Some(Self::ALL[code as usize])
        } else {
            None
        }
    }

    /// Its code on the wire, four bits.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Whether its segments use the tagged buffer model.
    #[inline]
    pub const fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// The queue its segments use, `None` if they are tagged (RFC 5040 4.1, RFC 7306 4.1).
    #[inline]
    pub const fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::Send
            | Self::SendInvalidate
            | Self::SendSe
            | Self::SendSeInvalidate
            | Self::Immediate
            | Self::ImmediateSe => Some(QN_SEND),
            Self::ReadRequest | Self::AtomicRequest => Some(QN_READ_REQUEST),
            Self::Terminate => Some(QN_TERMINATE),
            Self::AtomicResponse => Some(QN_ATOMIC_RESPONSE),
        }
    }

    /// Whether the field behind the opcode means something: the `STag` to invalidate, or what weft says with Immediate Data.
    pub const fn has_ulp_field(self) -> bool {
        self.invalidates() || matches!(self, Self::Immediate | Self::ImmediateSe)
    }

    /// Whether it names an STag to invalidate at the receiver.
    #[inline]
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSeInvalidate)
    }

    /// Whether it asks for an event at the receiver.
    #[inline]
    pub const fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSe | Self::SendSeInvalidate | Self::ImmediateSe
        )
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "Write",
            Self::ReadRequest => "Read Request",
            Self::ReadResponse => "Read Response",
            Self::Send => "Send",
            Self::SendInvalidate => "Send with Invalidate",
            Self::SendSe => "Send with SE",
            Self::SendSeInvalidate => "Send with SE and Invalidate",
            Self::Terminate => "Terminate",
            Self::Immediate => "Immediate Data",
            Self::ImmediateSe => "Immediate Data with SE",
            Self::AtomicRequest => "Atomic Request",
            Self::AtomicResponse => "Atomic Response",
        })
    }
}

/// A Read Request's header (RFC 5040 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadRequest {
    /// Where the data goes: a buffer of the requester.
    pub sink_stag: u32,
    /// Tagged offset in the sink, in bytes.
    pub sink_to: u64,
    /// Bytes to read.
    pub size: u32,
    /// Where the data comes from: a buffer of the responder.
    pub src_stag: u32,
    /// Tagged offset in the source, in bytes.
    pub src_to: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ReadRequestLayout {
    sink_stag: U32,
    sink_to: U64,
    size: U32,
    src_stag: U32,
    src_to: U64,
}

impl ReadRequest {
    /// Bytes on the wire.
    pub const LEN: usize = size_of::<ReadRequestLayout>();

    /// Reads the payload of a Read Request segment; `None` if its length is not [`LEN`](Self::LEN).
    #[inline]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let raw = ReadRequestLayout::ref_from_bytes(payload).ok()?;
        Some(Self {
            sink_stag: raw.sink_stag.get(),
            sink_to: raw.sink_to.get(),
            size: raw.size.get(),
            src_stag: raw.src_stag.get(),
            src_to: raw.src_to.get(),
        })
    }

    /// Writes it.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let raw = ReadRequestLayout {
            sink_stag: self.sink_stag.into(),
            sink_to: self.sink_to.into(),
            size: self.size.into(),
            src_stag: self.src_stag.into(),
            src_to: self.src_to.into(),
        };
        out.copy_from_slice(raw.as_bytes());
    }
}

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sink_stag,
            sink_to,
            size,
            src_stag,
            src_to,
        } = self;
        write!(
            f,
            "{size} bytes, from {src_stag:#010x}+{src_to:#x} to {sink_stag:#010x}+{sink_to:#x}"
        )
    }
}

/// What an Atomic Request does (RFC 7306 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AtomicOp {
    /// Add, with carries cut where the mask has ones.
    FetchAdd = 0,
    /// Swap the masked bits.
    Swap = 1,
    /// Swap the masked bits if the bits of another mask compare equal.
    CompareSwap = 2,
}

impl AtomicOp {
    /// The operation with this code, if any.
    #[inline]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::FetchAdd),
            1 => Some(Self::Swap),
            2 => Some(Self::CompareSwap),
            _ => None,
        }
    }

    /// Its code on the wire, four bits.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for AtomicOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FetchAdd => "FetchAdd",
            Self::Swap => "Swap",
            Self::CompareSwap => "CmpSwap",
        })
    }
}

/// An Atomic Request's header (RFC 7306 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicRequest {
    /// The operation.
    pub op: AtomicOp,
    /// The requester's name for it; comes back in the response.
    pub request_id: u32,
    /// The responder's buffer.
    pub stag: u32,
    /// Tagged offset of the 64-bit word, in bytes, a multiple of eight.
    pub to: u64,
    /// The addend, or the value to store.
    pub add_or_swap: u64,
    /// FetchAdd: ones end a field, no carry leaves it. Else: the bits to store.
    pub add_or_swap_mask: u64,
    /// CompareSwap: the value to compare with.
    pub compare: u64,
    /// CompareSwap: the bits to compare.
    pub compare_mask: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AtomicRequestLayout {
    /// 28 reserved bits, four of operation code.
    op: U32,
    request_id: U32,
    stag: U32,
    to: U64,
    add_or_swap: U64,
    add_or_swap_mask: U64,
    compare: U64,
    compare_mask: U64,
}

impl AtomicRequest {
    /// Bytes on the wire.
    pub const LEN: usize = size_of::<AtomicRequestLayout>();

    /// Reads the payload of an Atomic Request segment; `None` if its length is not [`LEN`](Self::LEN) or the operation
    /// is unknown.
    #[inline]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let raw = AtomicRequestLayout::ref_from_bytes(payload).ok()?;
        Some(Self {
            op: AtomicOp::from_code((raw.op.get() & 0xf) as u8)?,
            request_id: raw.request_id.get(),
            stag: raw.stag.get(),
            to: raw.to.get(),
            add_or_swap: raw.add_or_swap.get(),
            add_or_swap_mask: raw.add_or_swap_mask.get(),
            compare: raw.compare.get(),
            compare_mask: raw.compare_mask.get(),
        })
    }

    /// Writes it.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let raw = AtomicRequestLayout {
            op: u32::from(self.op.code()).into(),
            request_id: self.request_id.into(),
            stag: self.stag.into(),
            to: self.to.into(),
            add_or_swap: self.add_or_swap.into(),
            add_or_swap_mask: self.add_or_swap_mask.into(),
            compare: self.compare.into(),
            compare_mask: self.compare_mask.into(),
        };
        out.copy_from_slice(raw.as_bytes());
    }
}

impl fmt::Display for AtomicRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, id {}, {:#010x}+{:#x}, {:#x} mask {:#x}",
            self.op, self.request_id, self.stag, self.to, self.add_or_swap, self.add_or_swap_mask
        )?;
        if self.op == AtomicOp::CompareSwap {
            write!(
                f,
                ", compare {:#x} mask {:#x}",
                self.compare, self.compare_mask
            )?;
        }
        Ok(())
    }
}

/// An Atomic Response's header (RFC 7306 5.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicResponse {
    /// The request's.
    pub request_id: u32,
    /// The word's value before the operation.
    pub original: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AtomicResponseLayout {
    request_id: U32,
    original: U64,
}

impl AtomicResponse {
    /// Bytes on the wire.
    pub const LEN: usize = size_of::<AtomicResponseLayout>();

    /// Reads the payload of an Atomic Response segment; `None` if its length is not [`LEN`](Self::LEN).
    #[inline]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let raw = AtomicResponseLayout::ref_from_bytes(payload).ok()?;
        Some(Self {
            request_id: raw.request_id.get(),
            original: raw.original.get(),
        })
    }

    /// Writes it.
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let raw = AtomicResponseLayout {
            request_id: self.request_id.into(),
            original: self.original.into(),
        };
        out.copy_from_slice(raw.as_bytes());
    }
}

impl fmt::Display for AtomicResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id {}, original {:#x}", self.request_id, self.original)
    }
}
