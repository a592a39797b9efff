//! EXS sockets: the greeting that two ends exchange as private data, their control messages, and the meaning of the immediate data of an
//! RDMA Write. docs/spec/exs.md has the diagrams. Numbers are big-endian.
//!
//! ```
//! use weft_wire::exs::{Body, Message, MAX_LEN};
//!
//! let message = Message { credits: 3, body: Body::Small { len: 5 } };
//! let mut buf = [0; MAX_LEN + 5];
//! let len = message.emit((&mut buf[..MAX_LEN]).try_into().unwrap());
//! buf[len..len + 5].copy_from_slice(b"hello");
//! assert_eq!(Message::parse(&buf[..len + 5]), Ok(message));
//! assert_eq!(message.to_string(), "Small, 5 bytes, 3 credits");
//! ```

use std::fmt;

use zerocopy::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`Hello`].
pub const HELLO_LEN: usize = 32;
/// Bytes of the part that every message has. The payload of a [`Body::Small`] follows it.
pub const HEADER_LEN: usize = 8;
/// The longest message without payload, in bytes.
pub const MAX_LEN: usize = 40;
/// The version that this module speaks.
pub const VERSION: u8 = 1;
/// The fewest control receives that an end must have posted: one for the message that returns credits, one for any
/// other, and one so that a message that returns one credit does not ask for another.
pub const MIN_CREDITS: u32 = 3;
/// The most payload that travels in the message that announces it, in bytes.
pub const MAX_SMALL: u32 = 16 << 20;

const MAGIC: [u8; 4] = *b"wexs";
const WAITALL: u8 = 1;
const TRUNCATED: u8 = 4;

/// How data moves on a SOCK_SEQPACKET socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Design {
    /// The receiver advertises its memory, and the sender writes there (stream paper II.C).
    Advert,
    /// The sender advertises its memory, and the receiver reads there (interface paper 4).
    Source,
}

/// The type of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// SOCK_STREAM.
    Stream,
    /// SOCK_SEQPACKET.
    SeqPacket(Design),
}

/// Memory that the other end may write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Its start.
    pub addr: u64,
    /// The key (STag) that gives access.
    pub rkey: u32,
    /// Its length in bytes, not 0.
    pub len: u32,
}

/// Which transfers a stream makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Direct or indirect: a sender without an advert may wait for one.
    Dynamic,
    /// Direct if an advert is available, indirect at once otherwise: the policy of the paper. A greeting does not distinguish it from
    /// [`Dynamic`](Self::Dynamic); each end chooses its own policy.
    Published,
    /// Only into advertised memory.
    Direct,
    /// Only through the intermediate buffer and in messages; nothing is advertised.
    Indirect,
}

/// The first message of an end: MPA private data, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The type of its socket.
    pub kind: Kind,
    /// The transfers that it can live with.
    pub mode: Mode,
    /// It can send and receive RDMA Writes with immediate data.
    pub immediate: bool,
    /// Control receives that it has posted.
    pub credits: u32,
    /// The payload that fits one of them, in bytes (`small_packet_max_size`); 0: none, and no more than [`MAX_SMALL`] is used.
    pub small: u32,
    /// Its intermediate buffer.
    pub ring: Option<Remote>,
}

/// The result of two greetings, seen from one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The type of both sockets.
    pub kind: Kind,
    /// The transfers that both can live with.
    pub mode: Mode,
    /// Both have immediate data.
    pub immediate: bool,
    /// Messages that this end may send at first.
    pub send_credits: u32,
    /// Messages that the other end may send at first.
    pub recv_credits: u32,
    /// The longest payload in a message to the other end, in bytes; 0: none.
    pub small_send: u32,
    /// The longest payload in a message from the other end, in bytes; 0: none.
    pub small_recv: u32,
    /// The other end's intermediate buffer.
    pub peer_ring: Option<Remote>,
}

/// Why two ends cannot talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// One is a stream, the other keeps message boundaries, or they use different designs for that.
    #[error("socket types differ: {0} here, {1} there")]
    Kind(Kind, Kind),
    /// One allows only direct transfers, the other only indirect ones.
    #[error("one end allows only direct transfers, the other only indirect ones")]
    Mode,
    /// Fewer than [`MIN_CREDITS`] control receives.
    #[error("{0} control receives are too few")]
    Credits(u32),
    /// Only indirect transfers, and an end without a buffer for them.
    #[error("only indirect transfers are allowed, and an end has no intermediate buffer")]
    NoRing,
}

/// The reason why bytes are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not the length that the contents ask for.
    #[error("wrong length")]
    Length,
    /// Not a greeting of EXS.
    #[error("not a greeting of EXS")]
    Magic,
    /// A greeting of another version.
    #[error("version {0} is not known")]
    Version(u8),
    /// A kind of message or transfer that is not known.
    #[error("kind {0} is not known")]
    Kind(u8),
    /// A bit that has no meaning, or a field with a value that it cannot have.
    #[error("a reserved bit or an impossible value")]
    Reserved,
}

/// The meaning of a finished RDMA Write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// Into memory of a receive on a stream.
    Direct,
    /// Into the intermediate buffer.
    Indirect,
    /// A message of a SOCK_SEQPACKET.
    Packet {
        /// The receive was too short: the rest of the message is lost.
        truncated: bool,
    },
}

/// The notification of an RDMA Write: its immediate data, or the [`Body::Wrote`] that follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imm {
    /// The kind of data that was written.
    pub transfer: Transfer,
    /// Control receives posted again since the last message.
    pub credits: u16,
    /// Bytes written.
    pub len: u32,
}

/// A control message: one Send into a posted control receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Control receives posted again since the last message.
    pub credits: u16,
    /// The contents.
    pub body: Body,
}

/// An ADVERT of a stream: memory of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Advert {
    /// The position in the stream that its first byte is expected to have: exact for the first of a phase.
    pub seq: u64,
    /// The phase of the receiver, even.
    pub phase: u64,
    /// The sender fills all of it, with several transfers if need be.
    pub waitall: bool,
    /// The destination of writes.
    pub memory: Remote,
}

/// Memory for, or with, one message of a SOCK_SEQPACKET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packet {
    /// The number of the message: 0 for the first of this direction.
    pub index: u64,
    /// Its start; without meaning if `len` is 0.
    pub addr: u64,
    /// The key (STag) that gives access.
    pub rkey: u32,
    /// Its length in bytes.
    pub len: u32,
}

/// The contents of a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Body {
    /// Write here.
    Advert(Advert),
    /// So many bytes of the intermediate buffer are free again.
    Ack {
        /// Bytes, not 0.
        freed: u32,
    },
    /// Data in the message itself: of the stream, or one whole message.
    Small {
        /// Bytes that follow the header.
        len: u32,
    },
    /// An RDMA Write before this message is complete: where there is no immediate data.
    Wrote {
        /// The kind of data that was written.
        transfer: Transfer,
        /// Bytes written.
        len: u32,
    },
    /// The receiver withdraws its adverts.
    Retract,
    /// The sender has forgotten all adverts that it got before the Retract.
    Retracted {
        /// Bytes (stream) or messages sent so far.
        seq: u64,
    },
    /// No data follows.
    Fin,
    /// Nothing but the credits.
    Credit,
    /// Write that message here.
    PktAdvert(Packet),
    /// Read that message here.
    Source(Packet),
    /// That message has been read.
    SourceDone {
        /// Its number.
        index: u64,
        /// Bytes read; fewer than offered when the receive was too short.
        len: u32,
    },
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHello {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    design: u8,
    bits: u8,
    credits: U32,
    small: U32,
    addr: U64,
    rkey: U32,
    len: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    kind: u8,
    flags: u8,
    credits: U16,
    len: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAdvert {
    seq: U64,
    phase: U64,
    addr: U64,
    rkey: U32,
    zero: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPacket {
    index: U64,
    addr: U64,
    rkey: U32,
    zero: U32,
}

const ADVERT: u8 = 1;
const ACK: u8 = 2;
const SMALL: u8 = 3;
const WROTE: u8 = 4;
const RETRACT: u8 = 5;
const RETRACTED: u8 = 6;
const FIN: u8 = 7;
const CREDIT: u8 = 8;
const PKT_ADVERT: u8 = 9;
const SOURCE: u8 = 10;
const SOURCE_DONE: u8 = 11;

impl Hello {
    /// The bytes of the greeting.
    pub fn emit(&self) -> [u8; HELLO_LEN] {
        let (kind, design) = match self.kind {
            Kind::Stream => (1, 0),
            Kind::SeqPacket(Design::Advert) => (2, 1),
            Kind::SeqPacket(Design::Source) => (2, 2),
        };
        let mode = match self.mode {
            Mode::Direct => 1,
            Mode::Indirect => 2,
            Mode::Dynamic | Mode::Published => 3,
        };
        let (addr, rkey, len) = self.ring.map_or((0, 0, 0), |r| (r.addr, r.rkey, r.len));
        let raw = RawHello {
            magic: MAGIC,
            version: VERSION,
            kind,
            design,
            bits: mode | u8::from(self.immediate) << 2,
            credits: self.credits.into(),
            small: self.small.into(),
            addr: addr.into(),
            rkey: rkey.into(),
            len: len.into(),
        };
        zerocopy::transmute!(raw)
    }

    /// Parse private data. A later version may be longer, but this one is exact.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let head = bytes.first_chunk::<5>().ok_or(ParseError::Length)?;
        if head[..4] != MAGIC {
            return Err(ParseError::Magic);
        }
        if head[4] != VERSION {
            return Err(ParseError::Version(head[4]));
        }
        let raw = RawHello::ref_from_bytes(bytes).map_err(|_| ParseError::Length)?;
        let ring = match (raw.addr.get(), raw.rkey.get(), raw.len.get()) {
            (0, 0, 0) => None,
            (_, _, 0) => return Err(ParseError::Reserved),
            (addr, rkey, len) => Some(Remote::new(addr, rkey, len)?),
        };
        Ok(Hello {
            kind: match (raw.kind, raw.design) {
                (1, 0) => Kind::Stream,
                (2, 1) => Kind::SeqPacket(Design::Advert),
                (2, 2) => Kind::SeqPacket(Design::Source),
                (kind, _) => return Err(ParseError::Kind(kind)),
            },
            mode: match raw.bits & !4 {
                1 => Mode::Direct,
                2 => Mode::Indirect,
                3 => Mode::Dynamic,
                _ => return Err(ParseError::Reserved),
            },
            immediate: raw.bits & 4 != 0,
            credits: raw.credits.get(),
            small: raw.small.get(),
            ring,
        })
    }

    /// The result of this end's greeting and the other's. Both ends get the same result, except for the policy of each
    /// ([`Mode::Published`]).
    pub fn agree(&self, peer: &Hello) -> Result<Agreed, Mismatch> {
        if self.kind != peer.kind {
            return Err(Mismatch::Kind(self.kind, peer.kind));
        }
        let mode = match (self.mode, peer.mode) {
            (mine, Mode::Dynamic | Mode::Published) => mine,
            (Mode::Dynamic | Mode::Published, other) => other,
            (mine, other) if mine == other => mine,
            _ => return Err(Mismatch::Mode),
        };
        let fewest = self.credits.min(peer.credits);
        if fewest < MIN_CREDITS {
            return Err(Mismatch::Credits(fewest));
        }
        if self.kind == Kind::Stream
            && mode == Mode::Indirect
            && (self.ring.is_none() || peer.ring.is_none())
        {
            return Err(Mismatch::NoRing);
        }
        Ok(Agreed {
            kind: self.kind,
            mode,
            immediate: self.immediate && peer.immediate,
            send_credits: peer.credits,
            recv_credits: self.credits,
            // Short data is copied: not as much as a peer likes.
            small_send: peer.small.min(MAX_SMALL),
            small_recv: self.small.min(MAX_SMALL),
            peer_ring: peer.ring,
        })
    }
}

impl Remote {
    fn new(addr: u64, rkey: u32, len: u32) -> Result<Self, ParseError> {
        match addr.checked_add(len.into()) {
            Some(_) if len != 0 => Ok(Remote { addr, rkey, len }),
            _ => Err(ParseError::Reserved),
        }
    }
}

impl Transfer {
    const fn bits(self) -> u8 {
        match self {
            Transfer::Direct => 1,
            Transfer::Indirect => 2,
            Transfer::Packet { truncated: false } => 3,
            Transfer::Packet { truncated: true } => 3 | TRUNCATED,
        }
    }

    const fn from_bits(bits: u8) -> Result<Self, ParseError> {
        match bits {
            1 => Ok(Transfer::Direct),
            2 => Ok(Transfer::Indirect),
            3 => Ok(Transfer::Packet { truncated: false }),
            7 => Ok(Transfer::Packet { truncated: true }),
            _ => Err(ParseError::Kind(bits)),
        }
    }
}

impl Imm {
    /// As immediate data.
    pub fn encode(self) -> u64 {
        u64::from(self.transfer.bits()) << 56 | u64::from(self.credits) << 32 | u64::from(self.len)
    }

    /// From immediate data.
    pub fn decode(imm: u64) -> Result<Self, ParseError> {
        if imm >> 48 & 0xff != 0 {
            return Err(ParseError::Reserved);
        }
        Ok(Imm {
            transfer: Transfer::from_bits((imm >> 56) as u8)?,
            credits: (imm >> 32) as u16,
            len: imm as u32,
        })
    }

    /// The message that replaces immediate data.
    pub const fn message(self) -> Message {
        Message {
            credits: self.credits,
            body: Body::Wrote {
                transfer: self.transfer,
                len: self.len,
            },
        }
    }
}

impl Packet {
    fn check(self) -> Result<Self, ParseError> {
        match self.addr.checked_add(self.len.into()) {
            Some(_) => Ok(self),
            None => Err(ParseError::Reserved),
        }
    }
}

impl Message {
    /// Write the message, without a payload, to the start of `out`; its length.
    pub fn emit(&self, out: &mut [u8; MAX_LEN]) -> usize {
        let (kind, flags, len) = match self.body {
            Body::Advert(a) => (ADVERT, u8::from(a.waitall) * WAITALL, a.memory.len),
            Body::Ack { freed } => (ACK, 0, freed),
            Body::Small { len } => (SMALL, 0, len),
            Body::Wrote { transfer, len } => (WROTE, transfer.bits(), len),
            Body::Retract => (RETRACT, 0, 0),
            Body::Retracted { .. } => (RETRACTED, 0, 0),
            Body::Fin => (FIN, 0, 0),
            Body::Credit => (CREDIT, 0, 0),
            Body::PktAdvert(p) => (PKT_ADVERT, 0, p.len),
            Body::Source(p) => (SOURCE, 0, p.len),
            Body::SourceDone { len, .. } => (SOURCE_DONE, 0, len),
        };
        let header = RawHeader {
            kind,
            flags,
            credits: self.credits.into(),
            len: len.into(),
        };
        let (head, rest) = out.split_at_mut(HEADER_LEN);
        head.copy_from_slice(header.as_bytes());
        let mut put = |fields: &[u8]| {
            rest[..fields.len()].copy_from_slice(fields);
            HEADER_LEN + fields.len()
        };
        match self.body {
            Body::Advert(a) => put(RawAdvert {
                seq: a.seq.into(),
                phase: a.phase.into(),
                addr: a.memory.addr.into(),
                rkey: a.memory.rkey.into(),
                zero: 0.into(),
            }
            .as_bytes()),
            Body::PktAdvert(p) | Body::Source(p) => put(RawPacket {
                index: p.index.into(),
                addr: p.addr.into(),
                rkey: p.rkey.into(),
                zero: 0.into(),
            }
            .as_bytes()),
            Body::Retracted { seq: n } | Body::SourceDone { index: n, .. } => put(&n.to_be_bytes()),
            _ => HEADER_LEN,
        }
    }

    /// Parse a control receive of `total` bytes, of which `head` are the first: all, or at least [`MAX_LEN`] where a payload follows.
    pub fn parse_head(head: &[u8], total: usize) -> Result<Self, ParseError> {
        let cut = total != head.len();
        if cut && (head.len() < MAX_LEN || total < head.len() || head[0] != SMALL) {
            return Err(ParseError::Length);
        }
        let message = Self::parse_bytes(head)?;
        match message.body {
            Body::Small { len } if len as usize != total - HEADER_LEN => Err(ParseError::Length),
            _ => Ok(message),
        }
    }

    /// The message in a control receive of `total` bytes that begins with `head`, if it is a [`Body::Small`] as it should be:
    /// the same as from [`Message::parse_head`], sooner.
    #[inline]
    pub fn parse_small(head: [u8; HEADER_LEN], total: usize) -> Option<Self> {
        let [kind, flags, c0, c1, len @ ..] = head;
        let len = u32::from_be_bytes(len);
        let fine =
            (kind, flags) == (SMALL, 0) && total.checked_sub(HEADER_LEN) == Some(len as usize);
        fine.then_some(Message {
            credits: u16::from_be_bytes([c0, c1]),
            body: Body::Small { len },
        })
    }

    /// Parse all bytes of a control receive. The payload of a [`Body::Small`] is what follows the header.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Self::parse_head(bytes, bytes.len())
    }

    fn parse_bytes(bytes: &[u8]) -> Result<Self, ParseError> {
        let (header, rest) = RawHeader::ref_from_prefix(bytes).map_err(|_| ParseError::Length)?;
        let len = header.len.get();
        let flags_of = |known: u8| match header.flags & !known {
            0 => Ok(()),
            _ => Err(ParseError::Reserved),
        };
        let nothing = || match (len, rest) {
            (0, []) => Ok(()),
            (0, _) => Err(ParseError::Length),
            _ => Err(ParseError::Reserved),
        };
        let number = || match rest.try_into() {
            Ok(raw) => Ok(u64::from_be_bytes(raw)),
            Err(_) => Err(ParseError::Length),
        };
        let packet = || {
            let raw = RawPacket::ref_from_bytes(rest).map_err(|_| ParseError::Length)?;
            if raw.zero.get() != 0 {
                return Err(ParseError::Reserved);
            }
            Packet {
                index: raw.index.get(),
                addr: raw.addr.get(),
                rkey: raw.rkey.get(),
                len,
            }
            .check()
        };
        if !matches!(header.kind, ADVERT | WROTE) {
            flags_of(0)?;
        }
        let body = match header.kind {
            ADVERT => {
                flags_of(WAITALL)?;
                let raw = RawAdvert::ref_from_bytes(rest).map_err(|_| ParseError::Length)?;
                if raw.zero.get() != 0 {
                    return Err(ParseError::Reserved);
                }
                Body::Advert(Advert {
                    seq: raw.seq.get(),
                    phase: raw.phase.get(),
                    waitall: header.flags & WAITALL != 0,
                    memory: Remote::new(raw.addr.get(), raw.rkey.get(), len)?,
                })
            }
            ACK | WROTE if !rest.is_empty() => return Err(ParseError::Length),
            ACK if len == 0 => return Err(ParseError::Reserved),
            ACK => Body::Ack { freed: len },
            SMALL => Body::Small { len },
            WROTE => Body::Wrote {
                transfer: Transfer::from_bits(header.flags)?,
                len,
            },
            RETRACT => nothing().map(|()| Body::Retract)?,
            RETRACTED if len != 0 => return Err(ParseError::Reserved),
            RETRACTED => Body::Retracted { seq: number()? },
            FIN => nothing().map(|()| Body::Fin)?,
            CREDIT => nothing().map(|()| Body::Credit)?,
            PKT_ADVERT => Body::PktAdvert(packet()?),
            SOURCE => Body::Source(packet()?),
            SOURCE_DONE => Body::SourceDone {
                index: number()?,
                len,
            },
            kind => return Err(ParseError::Kind(kind)),
        };
        Ok(Message {
            credits: header.credits.get(),
            body,
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Stream => "stream",
            Kind::SeqPacket(Design::Advert) => "seqpacket (adverts)",
            Kind::SeqPacket(Design::Source) => "seqpacket (sources)",
        })
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transfer::Direct => "direct",
            Transfer::Indirect => "indirect",
            Transfer::Packet { truncated: false } => "packet",
            Transfer::Packet { truncated: true } => "truncated packet",
        })
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes at {:#x} stag {:#010x}",
            self.len, self.addr, self.rkey
        )
    }
}

impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hello, {}, {:?}", self.kind, self.mode)?;
        if self.immediate {
            f.write_str(", immediate")?;
        }
        write!(f, ", {} credits, small {}", self.credits, self.small)?;
        match self.ring {
            Some(ring) => write!(f, ", buffer {ring}"),
            None => f.write_str(", no buffer"),
        }
    }
}

impl fmt::Display for Imm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.message().fmt(f)
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packet = |f: &mut fmt::Formatter<'_>, name: &str, p: &Packet| {
            write!(
                f,
                "{name} {}, {} bytes at {:#x} stag {:#010x}",
                p.index, p.len, p.addr, p.rkey
            )
        };
        match &self.body {
            Body::Advert(a) => {
                write!(f, "Advert, seq {} phase {}, {}", a.seq, a.phase, a.memory)?;
                f.write_str(if a.waitall { ", waitall" } else { "" })
            }
            Body::Ack { freed } => write!(f, "Ack, {freed} bytes freed"),
            Body::Small { len } => write!(f, "Small, {len} bytes"),
            Body::Wrote { transfer, len } => write!(f, "Wrote, {transfer}, {len} bytes"),
            Body::Retract => f.write_str("Retract"),
            Body::Retracted { seq } => write!(f, "Retracted, seq {seq}"),
            Body::Fin => f.write_str("Fin"),
            Body::Credit => f.write_str("Credit"),
            Body::PktAdvert(p) => packet(f, "PktAdvert", p),
            Body::Source(p) => packet(f, "Source", p),
            Body::SourceDone { index, len } => write!(f, "SourceDone {index}, {len} bytes"),
        }?;
        match self.credits {
            0 => Ok(()),
            n => write!(f, ", {n} credits"),
        }
    }
}
