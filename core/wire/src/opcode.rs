//! The RDMAP messages, and their DDP queues.

use core::fmt;

/// Queue of Send and Immediate Data messages (RFC 5040 4.1, RFC 7306 4.1).
pub const QN_SEND: u32 = 0;
/// Queue of Read Requests and Atomic Requests.
pub const QN_READ_REQUEST: u32 = 1;
/// Queue of the one Terminate.
pub const QN_TERMINATE: u32 = 2;
/// Queue of Atomic Responses (RFC 7306 5.2).
pub const QN_ATOMIC_RESPONSE: u32 = 3;

/// The kind of a message (RFC 5040 4.1, RFC 7306 4.1).
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

    /// Whether the field after the opcode has a meaning: the `STag` to invalidate, or weft's extension of Immediate Data.
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
