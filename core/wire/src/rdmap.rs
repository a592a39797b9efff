//! RDMAP messages (RFC 5040 4, RFC 7306 4 to 6): opcodes and the headers that follow the DDP header.

use core::fmt;

use zerocopy::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

mod terminate;

pub use crate::opcode::{Opcode, QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE};
pub use terminate::{
    MpaError, OperationError, ProtectionError, TaggedError, TermError, Terminate, TerminateShort,
    UntaggedError,
};

/// Bytes of an Immediate Data message's payload (RFC 7306 6).
pub const IMMEDIATE_LEN: usize = 8;

/// A Read Request's header (RFC 5040 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadRequest {
    /// The destination of the data: a buffer of the requester.
    pub sink_stag: u32,
    /// Tagged offset in the sink, in bytes.
    pub sink_to: u64,
    /// Bytes to read.
    pub size: u32,
    /// The source of the data: a buffer of the responder.
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

/// The operation of an Atomic Request (RFC 7306 5.2.1).
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
