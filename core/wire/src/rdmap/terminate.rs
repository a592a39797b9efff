//! Terminate (RFC 5040 4.8) and the errors it names (also RFC 5041 7, RFC 5044 8, RFC 6581).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-------+-------+---------------+-+-+-+-------------------------+
//! | layer | etype |  error code   |M|D|R|        reserved         |
//! +-------+-------+---------------+-+-+-+-------------------------+
//! | DDP segment length if M       |  DDP header if D              :
//! +-------------------------------+                               +
//! :                               |  RDMAP header if R            :
//! +---------------------------------------------------------------+
//! ```

use core::fmt;

use thiserror::Error;

use super::ReadRequest;
use crate::ddp;

/// M, D and R as siw sends them on little-endian hosts: the lowest bit is M.
const SIW_FLAGS: u8 = 0x07;
const CONTROL_LEN: usize = 4;
const SEGMENT_LEN: usize = 2;

const M: u8 = 0x80;
const D: u8 = 0x40;
const R: u8 = 0x20;

/// Declares an enum of error codes of one layer and type, with its codes and the words for them.
macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_doc])* #[error($text)] $variant = $code,)*
        }

        impl $name {
            const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// RDMAP remote protection errors: the responder does not allow access to the memory in the request.
    ProtectionError {
        /// No such STag.
        InvalidStag = 0x00, "invalid STag";
        /// Outside the buffer.
        BaseBounds = 0x01, "base or bounds violation";
        /// The buffer does not allow this access.
        AccessRights = 0x02, "access rights violation";
        /// The STag belongs to another protection domain or stream.
        StagNotAssociated = 0x03, "STag not associated with the RDMAP stream";
        /// Offset plus length overflows.
        ToWrap = 0x04, "TO wrap";
        /// The STag of a Send with Invalidate cannot be invalidated.
        CannotInvalidate = 0x09, "STag cannot be invalidated";
        /// Anything else.
        Unspecified = 0xff, "unspecified";
    }
}

codes! {
    /// RDMAP remote operation errors: the message itself is wrong, or the responder failed.
    OperationError {
        /// RV is not 1.
        InvalidVersion = 0x05, "invalid RDMAP version";
        /// Unknown opcode, or not on this queue.
        UnexpectedOpcode = 0x06, "unexpected opcode";
        /// Failure of this stream only.
        CatastrophicStream = 0x07, "catastrophic error of the stream";
        /// Failure of the RNIC.
        CatastrophicGlobal = 0x08, "catastrophic error of the RNIC";
        /// The STag of a Send with Invalidate cannot be invalidated.
        CannotInvalidate = 0x09, "STag cannot be invalidated";
        /// Anything else.
        Unspecified = 0xff, "unspecified";
    }
}

codes! {
    /// DDP tagged buffer errors.
    TaggedError {
        /// No such STag.
        InvalidStag = 0x00, "invalid STag";
        /// Outside the buffer.
        BaseBounds = 0x01, "base or bounds violation";
        /// The STag belongs to another protection domain or stream.
        StagNotAssociated = 0x02, "STag not associated with the DDP stream";
        /// Offset plus length overflows.
        ToWrap = 0x03, "TO wrap";
        /// DV is not 1.
        InvalidVersion = 0x04, "invalid DDP version";
    }
}

codes! {
    /// DDP untagged buffer errors.
    UntaggedError {
        /// No such queue.
        InvalidQn = 0x01, "invalid QN";
        /// Invalid MSN: no buffer available, as when no receive is posted.
        NoBuffer = 0x02, "invalid MSN, no buffer available";
        /// Invalid MSN: the MSN range is not valid, as after a gap.
        MsnRange = 0x03, "invalid MSN, MSN range not valid";
        /// The offset is not where the message is.
        InvalidMo = 0x04, "invalid MO";
        /// The message is too long for its buffer.
        TooLong = 0x05, "DDP message too long for the buffer";
        /// DV is not 1.
        InvalidVersion = 0x06, "invalid DDP version";
    }
}

codes! {
    /// MPA errors (RFC 5044 8, the last three RFC 6581).
    MpaError {
        /// The TCP connection closed, ended or was lost.
        TcpClosed = 0x01, "TCP connection closed, terminated or lost";
        /// A CRC does not fit its FPDU.
        CrcError = 0x02, "CRC error";
        /// A marker and the length fields disagree.
        MarkerMismatch = 0x03, "marker and ULPDU length do not agree";
        /// A bad Request or Reply Frame.
        InvalidFrame = 0x04, "invalid MPA request or reply frame";
        /// The local end failed.
        LocalCatastrophic = 0x05, "local catastrophic error";
        /// The peer's IRD is too small for us.
        InsufficientIrd = 0x06, "insufficient IRD";
        /// The two ends have no ready-to-receive message in common.
        NoMatchingRtr = 0x07, "no matching RTR option";
    }
}

/// The reason why a stream ended: layer, error type and error code of a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum TermError {
    /// Layer RDMAP: the sender of the Terminate failed.
    #[error("RDMAP: local catastrophic error")]
    RdmapCatastrophic,
    /// Layer RDMAP, remote protection error.
    #[error("RDMAP protection: {0}")]
    Protection(ProtectionError),
    /// Layer RDMAP, remote operation error.
    #[error("RDMAP operation: {0}")]
    Operation(OperationError),
    /// Layer DDP: the sender of the Terminate failed.
    #[error("DDP: local catastrophic error")]
    DdpCatastrophic,
    /// Layer DDP, tagged buffer error.
    #[error("DDP tagged: {0}")]
    Tagged(TaggedError),
    /// Layer DDP, untagged buffer error.
    #[error("DDP untagged: {0}")]
    Untagged(UntaggedError),
    /// Layer LLP, here MPA.
    #[error("MPA: {0}")]
    Mpa(MpaError),
    /// A combination that no RFC names.
    #[error("{}: layer {layer}, type {etype}, code {code:#04x}", kind(*layer, *etype))]
    Other {
        /// Four bits.
        layer: u8,
        /// Four bits.
        etype: u8,
        /// The error code.
        code: u8,
    },
}

/// The meaning of layer and error type, independent of the code.
const fn kind(layer: u8, etype: u8) -> &'static str {
    match (layer, etype) {
        (0, 0) => "RDMAP catastrophic",
        (0, 1) => "RDMAP protection",
        (0, 2) => "RDMAP operation",
        (1, 0) => "DDP catastrophic",
        (1, 1) => "DDP tagged",
        (1, 2) => "DDP untagged",
        (2, 0) => "MPA",
        _ => "unknown",
    }
}

impl TermError {
    /// From layer (four bits), error type (four bits) and error code. [`Other`](Self::Other) only where nothing else fits.
    pub const fn from_parts(layer: u8, etype: u8, code: u8) -> Self {
        let (layer, etype) = (layer & 0xf, etype & 0xf);
        macro_rules! known {
            ($variant:ident, $codes:ident) => {
                if let Some(error) = $codes::from_code(code) {
                    return Self::$variant(error);
                }
            };
        }
        match (layer, etype) {
            // These have one code, zero; siw ends a stream with (0, 0, 0xff).
            (0, 0) if code == 0 => return Self::RdmapCatastrophic,
            (0, 1) => known!(Protection, ProtectionError),
            (0, 2) => known!(Operation, OperationError),
            (1, 0) if code == 0 => return Self::DdpCatastrophic,
            (1, 1) => known!(Tagged, TaggedError),
            (1, 2) => known!(Untagged, UntaggedError),
            (2, 0) => known!(Mpa, MpaError),
            _ => {}
        }
        Self::Other { layer, etype, code }
    }

    /// Layer (four bits), error type (four bits) and error code.
    pub const fn parts(self) -> (u8, u8, u8) {
        match self {
            Self::RdmapCatastrophic => (0, 0, 0),
            Self::Protection(error) => (0, 1, error as u8),
            Self::Operation(error) => (0, 2, error as u8),
            Self::DdpCatastrophic => (1, 0, 0),
            Self::Tagged(error) => (1, 1, error as u8),
            Self::Untagged(error) => (1, 2, error as u8),
            Self::Mpa(error) => (2, 0, error as u8),
            Self::Other { layer, etype, code } => (layer & 0xf, etype & 0xf, code),
        }
    }
}

/// A Terminate's header (RFC 5040 4.8).
///
/// The three copies nest: without a segment length there is no DDP header, and without that no RDMAP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terminate {
    /// The error.
    pub error: TermError,
    /// M: bytes of the offending DDP segment, header included.
    pub ddp_segment_len: Option<u16>,
    /// D: the offending segment's header.
    pub ddp_header: Option<ddp::Header>,
    /// R: the offending Read Request's header.
    pub read_request: Option<ReadRequest>,
}

/// A Terminate shorter than its control field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[error("Terminate shorter than its control field")]
pub struct TerminateShort;

impl Terminate {
    /// Bytes of the longest Terminate.
    pub const MAX_LEN: usize = CONTROL_LEN + SEGMENT_LEN + ddp::MAX_LEN + ReadRequest::LEN;

    /// A Terminate that copies nothing of the offending segment.
    pub const fn bare(error: TermError) -> Self {
        Self {
            error,
            ddp_segment_len: None,
            ddp_header: None,
            read_request: None,
        }
    }

    /// Reads the payload of a Terminate segment.
    ///
    /// Copied headers that are cut short or make no sense (they may be there because they made none) are left out.
    ///
    /// One exception to the RFC: the kernel's siw on little-endian hosts fills this header by bit fields. So layer and error type change
    /// places, and M, D and R are in the low bits of their byte, which are reserved (docs/adr/0006). If those bits are set, or layer and
    /// type are invalid in the right order, the header is read in siw's order.
    pub fn parse(payload: &[u8]) -> Result<Self, TerminateShort> {
        let (&[types, code, flags, _], rest) = payload
            .split_first_chunk::<CONTROL_LEN>()
            .ok_or(TerminateShort)?;
        let as_sent = TermError::from_parts(types >> 4, types & 0xf, code);
        let swapped = TermError::from_parts(types & 0xf, types >> 4, code);
        let low_bits = flags & SIW_FLAGS != 0 && flags & (M | D | R) == 0;
        let unknown = |error| matches!(error, TermError::Other { .. });
        let siw = low_bits || (unknown(as_sent) && !unknown(swapped));
        let flags = if low_bits {
            flags.reverse_bits()
        } else {
            flags
        };
        let mut terminate = Self::bare(if siw { swapped } else { as_sent });
        if flags & M == 0 {
            return Ok(terminate);
        }
        let Some((&len, rest)) = rest.split_first_chunk() else {
            return Ok(terminate);
        };
        terminate.ddp_segment_len = Some(u16::from_be_bytes(len));
        if flags & D == 0 {
            return Ok(terminate);
        }
        terminate.ddp_header = ddp::Header::parse(rest).ok();
        if flags & R != 0
            && let Some(header) = terminate.ddp_header
        {
            terminate.read_request = rest.get(header.len()..).and_then(ReadRequest::parse);
        }
        Ok(terminate)
    }

    /// Writes it to the start of `out` and returns its length in bytes; the rest of `out` stays as it is.
    pub fn emit(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let (layer, etype, code) = self.error.parts();
        out[..CONTROL_LEN].copy_from_slice(&[layer << 4 | etype, code, 0, 0]);
        let mut len = CONTROL_LEN;
        let Some(segment_len) = self.ddp_segment_len else {
            return len;
        };
        out[2] |= M;
        out[len..][..SEGMENT_LEN].copy_from_slice(&segment_len.to_be_bytes());
        len += SEGMENT_LEN;
        let Some(header) = &self.ddp_header else {
            return len;
        };
        out[2] |= D;
        let mut raw = [0; ddp::MAX_LEN];
        let header_len = header.emit(&mut raw);
        out[len..][..header_len].copy_from_slice(&raw[..header_len]);
        len += header_len;
        let Some(read_request) = &self.read_request else {
            return len;
        };
        out[2] |= R;
        let mut raw = [0; ReadRequest::LEN];
        read_request.emit(&mut raw);
        out[len..][..ReadRequest::LEN].copy_from_slice(&raw);
        len + ReadRequest::LEN
    }
}

impl fmt::Display for Terminate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)?;
        if let Some(len) = self.ddp_segment_len {
            write!(f, ", segment of {len} bytes")?;
        }
        if let Some(header) = &self.ddp_header {
            write!(f, ": {header}")?;
        }
        if let Some(read_request) = &self.read_request {
            write!(f, ": {read_request}")?;
        }
        Ok(())
    }
}
