//! Faults in the peer's data, and the Terminate for each.

use weft_wire::ddp::{Header, HeaderError};
use weft_wire::rdmap::{
    MpaError, OperationError, ProtectionError, ReadRequest, TaggedError, TermError, Terminate,
    UntaggedError,
};

/// A reason to end the stream. The caller finds those about memory and receives, the stream those about order and
/// form; [`Stream::fail`](super::Stream::fail) turns either into a Terminate message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The `STag` names no region (RFC 5041 section 7.1, RFC 5040 section 4.8).
    #[error("invalid STag")]
    InvalidStag,
    /// Offset or length beyond the region.
    #[error("base or bounds violation")]
    Bounds,
    /// The region does not allow this operation.
    #[error("access rights violation")]
    AccessRights,
    /// The region is of another protection domain or stream.
    #[error("STag not associated with this stream")]
    StagNotAssociated,
    /// An atomic on an address that is no multiple of 8 (RFC 7306 section 5).
    #[error("misaligned atomic")]
    Misaligned,
    /// Tagged offset plus length passes 2^64.
    #[error("tagged offset wraps")]
    ToWrap,
    /// A Send with Invalidate names an `STag` that may not be invalidated.
    #[error("STag cannot be invalidated")]
    CannotInvalidate,
    /// An untagged message with no buffer posted for it.
    #[error("no receive posted")]
    NoReceive,
    /// An untagged message longer than its buffer.
    #[error("message longer than its receive")]
    ReceiveTooSmall,
    /// Not the next message sequence number of its queue.
    #[error("message sequence number out of order")]
    MsnRange,
    /// Not the next message offset of its message.
    #[error("message offset out of order")]
    InvalidMo,
    /// No such queue, or not the queue of this opcode.
    #[error("invalid queue number")]
    InvalidQn,
    /// The DDP version is not 1.
    #[error("invalid DDP version")]
    DdpVersion {
        /// The header's tagged bit, which selects the code.
        tagged: bool,
    },
    /// The RDMAP version is not 1.
    #[error("invalid RDMAP version")]
    RdmapVersion,
    /// An opcode that is unknown, does not fit its buffer model, or breaks into another message.
    #[error("unexpected opcode")]
    UnexpectedOpcode,
    /// More Reads and Atomics at once than our IRD.
    #[error("more inbound reads than agreed")]
    TooManyReads,
    /// An Atomic Response with the request identifier of another request.
    #[error("atomic response does not match its request")]
    AtomicMismatch,
    /// The CRC of an FPDU does not match (RFC 5044 section 8).
    #[error("CRC mismatch")]
    Crc,
    /// A marker does not point to the start of its FPDU (RFC 5044 section 8).
    #[error("marker and FPDU length disagree")]
    Marker,
    /// A segment shorter than its header, or a control message of the wrong size.
    #[error("malformed segment")]
    BadFrame,
    /// The responder's ORD exceeds the initiator's IRD (RFC 6581 section 8).
    #[error("IRD insufficient")]
    InsufficientIrd,
    /// No ready-to-receive message that both sides know (RFC 6581 section 8).
    #[error("no matching ready-to-receive option")]
    NoMatchingRtr,
    /// One of our receives names invalid memory: the message cannot be placed, and its sender has to know which.
    #[error("the receive cannot be used")]
    BadReceive,
    /// Something on our side: no memory, a broken invariant, or the user asked for an abortive end.
    #[error("local catastrophic error")]
    LocalCatastrophic,
    /// The stream had ended already; never put on the wire.
    #[error("stream is closed")]
    Closed,
}

impl From<HeaderError> for Fault {
    /// The fault for a header that does not parse.
    fn from(error: HeaderError) -> Self {
        match error {
            HeaderError::Short => Self::BadFrame,
            HeaderError::DdpVersion { tagged } => Self::DdpVersion { tagged },
            HeaderError::RdmapVersion => Self::RdmapVersion,
            HeaderError::Opcode(_) | HeaderError::Model(_) => Self::UnexpectedOpcode,
            HeaderError::Queue { .. } => Self::InvalidQn,
        }
    }
}

/// The segment that a fault is about.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offender {
    pub(super) header: Option<Header>,
    pub(super) ulpdu_len: u16,
    pub(super) read_request: Option<ReadRequest>,
}

impl Offender {
    pub(super) fn new(header: &Header, ulpdu_len: usize) -> Self {
        Self {
            header: Some(*header),
            // The field of a Terminate has 16 bits; frames longer than that exist only on shared memory.
            ulpdu_len: u16::try_from(ulpdu_len).unwrap_or(u16::MAX),
            read_request: None,
        }
    }

    /// The code for `fault` (RFC 5040 section 4.8, RFC 5041 section 7.1, RFC 5044 section 8).
    ///
    /// An error of an `STag` is reported by DDP for a tagged segment, and by RDMAP for an `STag` in a request's body. DDP has no code for
    /// missing rights, so RDMAP always reports those. A request beyond our IRD finds no buffer on its queue. A segment too short for its
    /// header breaks the delivery of MPA to DDP, which has no finer code for it.
    fn term_error(&self, fault: Fault) -> TermError {
        let tagged = matches!(self.header, Some(Header::Tagged(_)));
        let stag = |by_ddp, by_rdmap| {
            if tagged {
                TermError::Tagged(by_ddp)
            } else {
                TermError::Protection(by_rdmap)
            }
        };
        match fault {
            Fault::InvalidStag => stag(TaggedError::InvalidStag, ProtectionError::InvalidStag),
            Fault::Bounds => stag(TaggedError::BaseBounds, ProtectionError::BaseBounds),
            Fault::StagNotAssociated => stag(
                TaggedError::StagNotAssociated,
                ProtectionError::StagNotAssociated,
            ),
            Fault::ToWrap => stag(TaggedError::ToWrap, ProtectionError::ToWrap),
            Fault::AccessRights => TermError::Protection(ProtectionError::AccessRights),
            Fault::CannotInvalidate => TermError::Protection(ProtectionError::CannotInvalidate),
            Fault::NoReceive | Fault::TooManyReads => TermError::Untagged(UntaggedError::NoBuffer),
            Fault::ReceiveTooSmall => TermError::Untagged(UntaggedError::TooLong),
            Fault::MsnRange => TermError::Untagged(UntaggedError::MsnRange),
            Fault::InvalidMo => TermError::Untagged(UntaggedError::InvalidMo),
            Fault::InvalidQn => TermError::Untagged(UntaggedError::InvalidQn),
            Fault::DdpVersion { tagged: true } => TermError::Tagged(TaggedError::InvalidVersion),
            Fault::DdpVersion { tagged: false } => {
                TermError::Untagged(UntaggedError::InvalidVersion)
            }
            Fault::RdmapVersion => TermError::Operation(OperationError::InvalidVersion),
            Fault::UnexpectedOpcode => TermError::Operation(OperationError::UnexpectedOpcode),
            Fault::Misaligned | Fault::AtomicMismatch | Fault::BadReceive => {
                TermError::Operation(OperationError::Unspecified)
            }
            Fault::Crc => TermError::Mpa(MpaError::CrcError),
            Fault::Marker => TermError::Mpa(MpaError::MarkerMismatch),
            Fault::InsufficientIrd => TermError::Mpa(MpaError::InsufficientIrd),
            Fault::NoMatchingRtr => TermError::Mpa(MpaError::NoMatchingRtr),
            Fault::BadFrame => TermError::DdpCatastrophic,
            Fault::LocalCatastrophic | Fault::Closed => TermError::RdmapCatastrophic,
        }
    }

    /// The Terminate for `fault`. As the kernel's siw does, headers are copied only where their layout was understood: not
    /// for wrong versions and unknown opcodes, nor for MPA errors and our own failures. The
    /// DDP Segment Length is the whole ULPDU's, as RNICs fill it in; siw counts the payload alone.
    pub(super) fn terminate(&self, fault: Fault) -> Terminate {
        let error = self.term_error(fault);
        let header = match error {
            TermError::Protection(_) | TermError::Operation(OperationError::Unspecified) => {
                self.header
            }
            TermError::Tagged(e) if e != TaggedError::InvalidVersion => self.header,
            // A header with a wrong queue did not parse: the one we have belongs to an earlier segment.
            TermError::Untagged(e)
                if !matches!(e, UntaggedError::InvalidVersion | UntaggedError::InvalidQn) =>
            {
                self.header
            }
            _ => None,
        };
        Terminate {
            error,
            ddp_segment_len: header.map(|_| self.ulpdu_len),
            ddp_header: header,
            read_request: self
                .read_request
                .filter(|_| matches!(error, TermError::Protection(_))),
        }
    }
}
