//! DDP segment headers (RFC 5041 4.2, 4.3) with the RDMAP control field they carry (RFC 5040 4.1).
//!
//! ```text
//!           0                   1                   2                   3
//!           0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!          +-+-+-------+---+---+---+-------+
//! tagged   |1|L| rsvd  |DV |RV |rsv|opcode |
//!          +-+-+-------+---+---+---+-------+-------------------------------+
//!          |                            stag                               |
//!          +---------------------------------------------------------------+
//!          |                             to                                |
//!          |                                                               |
//!          +-+-+-------+---+---+---+-------+-------------------------------+
//! untagged |0|L| rsvd  |DV |RV |rsv|opcode |
//!          +-+-+-------+---+---+---+-------+-------------------------------+
//!          |           stag to invalidate, or zero                         |
//!          +---------------------------------------------------------------+
//!          |                             qn                                |
//!          +---------------------------------------------------------------+
//!          |                             msn                               |
//!          +---------------------------------------------------------------+
//!          |                             mo                                |
//!          +---------------------------------------------------------------+
//! ```

use core::fmt;

use thiserror::Error;
use zerocopy::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::opcode::Opcode;

/// Bytes of a tagged header.
pub const TAGGED_LEN: usize = 14;
/// Bytes of an untagged header.
pub const UNTAGGED_LEN: usize = 18;
/// Bytes of the longest header.
pub const MAX_LEN: usize = UNTAGGED_LEN;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DV_MASK: u8 = 0x03;
const DV: u8 = 0x01;
const RV_MASK: u8 = 0xc0;
const RV: u8 = 0x40;
const OPCODE_MASK: u8 = 0x0f;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct TaggedLayout {
    ddp_control: u8,
    rdmap_control: u8,
    stag: U32,
    to: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct UntaggedLayout {
    ddp_control: u8,
    rdmap_control: u8,
    invalidate: U32,
    qn: U32,
    msn: U32,
    mo: U32,
}

const _: () =
    assert!(size_of::<TaggedLayout>() == TAGGED_LEN && size_of::<UntaggedLayout>() == UNTAGGED_LEN);

/// A tagged segment's header (RFC 5041 4.2): the payload goes to `to` in the buffer named by `stag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tagged {
    /// [`Opcode::Write`] or [`Opcode::ReadResponse`].
    pub opcode: Opcode,
    /// The message's last segment.
    pub last: bool,
    /// The data sink's STag.
    pub stag: u32,
    /// Tagged offset of the payload's first byte, in bytes.
    pub to: u64,
}

/// An untagged segment's header (RFC 5041 4.3): the payload goes to the buffer that `qn` and `msn` select.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Untagged {
    /// Any opcode but [`Opcode::Write`] and [`Opcode::ReadResponse`].
    pub opcode: Opcode,
    /// The message's last segment.
    pub last: bool,
    /// The STag to invalidate, for an opcode that [invalidates](Opcode::invalidates), and for Immediate Data a mark of weft's
    /// (docs/spec/rdmap-extensions.md); else zero on the wire, and not
    /// looked at on receipt (RFC 5040 4.1).
    pub invalidate: u32,
    /// Queue number: one of [`rdmap::QN_SEND`](crate::rdmap::QN_SEND) and its sisters.
    pub qn: u32,
    /// Message sequence number, from 1, one for each message of the queue.
    pub msn: u32,
    /// Offset of the payload's first byte in the message, in bytes.
    pub mo: u32,
}

/// The header of a DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Header {
    /// Placed by STag.
    Tagged(Tagged),
    /// Placed by queue.
    Untagged(Untagged),
}

/// Why a segment's header is no good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum HeaderError {
    /// The ULPDU is shorter than its header.
    #[error("segment shorter than its header")]
    Short,
    /// DV is not 1 (RFC 5041 7: the code to answer with depends on the model).
    #[error("unknown DDP version")]
    DdpVersion {
        /// The T bit of the offending header.
        tagged: bool,
    },
    /// RV is not 1.
    #[error("unknown RDMAP version")]
    RdmapVersion,
    /// No message has this opcode.
    #[error("unknown RDMAP opcode {0}")]
    Opcode(u8),
    /// The opcode's messages are tagged and this segment is not, or the other way round.
    #[error("{0} in the wrong buffer model")]
    Model(Opcode),
    /// The opcode's messages use another queue.
    #[error("{opcode} on queue {qn}")]
    Queue {
        /// The segment's opcode.
        opcode: Opcode,
        /// The queue it came on.
        qn: u32,
    },
}

impl Header {
    /// Reads the header at the start of `ulpdu`; [`len`](Self::len) says how many bytes it took.
    ///
    /// Reserved bits are not looked at (RFC 5041 4.1). The opcode, the buffer model and the queue fit each other in what
    /// it returns.
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<Self, HeaderError> {
        let Some(&[ddp, rdmap]) = ulpdu.first_chunk() else {
            return Err(HeaderError::Short);
        };
        let tagged = ddp & TAGGED != 0;
        if ddp & DV_MASK != DV {
            return Err(HeaderError::DdpVersion { tagged });
        }
        if rdmap & RV_MASK != RV {
            return Err(HeaderError::RdmapVersion);
        }
        let code = rdmap & OPCODE_MASK;
        let opcode = Opcode::from_code(code).ok_or(HeaderError::Opcode(code))?;
        if opcode.is_tagged() != tagged {
            return Err(HeaderError::Model(opcode));
        }
        let last = ddp & LAST != 0;
        if tagged {
            let (raw, _) = TaggedLayout::ref_from_prefix(ulpdu).map_err(|_| HeaderError::Short)?;
            return Ok(Self::Tagged(Tagged {
                opcode,
                last,
                stag: raw.stag.get(),
                to: raw.to.get(),
            }));
        }
        let (raw, _) = UntaggedLayout::ref_from_prefix(ulpdu).map_err(|_| HeaderError::Short)?;
        let qn = raw.qn.get();
        if opcode.queue() != Some(qn) {
            return Err(HeaderError::Queue { opcode, qn });
        }
        Ok(Self::Untagged(Untagged {
            opcode,
            last,
            invalidate: if opcode.has_ulp_field() {
                raw.invalidate.get()
            } else {
                0
            },
            qn,
            msn: raw.msn.get(),
            mo: raw.mo.get(),
        }))
    }

    /// Writes the header to the start of `out` and returns its length in bytes; the rest of `out` stays as it is.
    #[inline]
    pub fn emit(&self, out: &mut [u8; MAX_LEN]) -> usize {
        let control = |opcode: Opcode, last: bool, tagged: u8| {
            (
                DV | tagged | if last { LAST } else { 0 },
                RV | opcode.code(),
            )
        };
        match *self {
            Self::Tagged(Tagged {
                opcode,
                last,
                stag,
                to,
            }) => {
                let (ddp_control, rdmap_control) = control(opcode, last, TAGGED);
                let raw = TaggedLayout {
                    ddp_control,
                    rdmap_control,
                    stag: stag.into(),
                    to: to.into(),
                };
                out[..TAGGED_LEN].copy_from_slice(raw.as_bytes());
                TAGGED_LEN
            }
            Self::Untagged(Untagged {
                opcode,
                last,
                invalidate,
                qn,
                msn,
                mo,
            }) => {
                let (ddp_control, rdmap_control) = control(opcode, last, 0);
                let invalidate = if opcode.has_ulp_field() {
                    invalidate
                } else {
                    0
                };
                let raw = UntaggedLayout {
                    ddp_control,
                    rdmap_control,
                    invalidate: invalidate.into(),
                    qn: qn.into(),
                    msn: msn.into(),
                    mo: mo.into(),
                };
                out.copy_from_slice(raw.as_bytes());
                UNTAGGED_LEN
            }
        }
    }

    /// Bytes of the header on the wire, never zero.
    #[expect(clippy::len_without_is_empty, reason = "a header is never empty")]
    pub const fn len(&self) -> usize {
        match self {
            Self::Tagged(_) => TAGGED_LEN,
            Self::Untagged(_) => UNTAGGED_LEN,
        }
    }

    /// The message's opcode.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(h) => h.opcode,
            Self::Untagged(h) => h.opcode,
        }
    }

    /// Whether this is the message's last segment.
    pub const fn is_last(&self) -> bool {
        match self {
            Self::Tagged(h) => h.last,
            Self::Untagged(h) => h.last,
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tagged(h) => h.fmt(f),
            Self::Untagged(h) => h.fmt(f),
        }
    }
}

impl fmt::Display for Tagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, stag {:#010x}, to {:#x}",
            self.opcode, self.stag, self.to
        )?;
        f.write_str(if self.last { ", last" } else { "" })
    }
}

impl fmt::Display for Untagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, qn {}, msn {}, mo {}",
            self.opcode, self.qn, self.msn, self.mo
        )?;
        if self.opcode.invalidates() {
            write!(f, ", invalidate {:#010x}", self.invalidate)?;
        }
        f.write_str(if self.last { ", last" } else { "" })
    }
}
