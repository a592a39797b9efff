//! Start-up frames: RFC 5044 7.1.1, with the enhanced form of RFC 6581.

use core::fmt;

use thiserror::Error;

use super::{MAX_PRIVATE_DATA, START_HEADER_LEN};

const KEY_LEN: usize = 16;
const KEY_REQUEST: &[u8; KEY_LEN] = b"MPA ID Req Frame";
const KEY_REPLY: &[u8; KEY_LEN] = b"MPA ID Rep Frame";

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED: u8 = 0x10;

const ENHANCED_LEN: usize = 4;
/// A and C in their words, then B and D.
const HIGH: u16 = 0x8000;
const LOW: u16 = 0x4000;
const DEPTH: u16 = 0x3fff;

/// Which of the two start-up frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// The initiator's.
    Request,
    /// The responder's.
    Reply,
}

/// An MPA Request or Reply Frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StartFrame<'a> {
    /// Request or Reply.
    pub kind: FrameKind,
    /// M: the sender wants to receive markers.
    pub markers: bool,
    /// C: the sender wants CRCs; they are used if either side asks for them.
    pub crc: bool,
    /// R: the connection is refused (only in a Reply).
    pub reject: bool,
    /// 1 (RFC 5044) or 2 (RFC 6581).
    pub revision: u8,
    /// S and the four bytes that come with it (only in revision 2).
    pub enhanced: Option<Enhanced>,
    /// The consumer's private data, without the enhanced bytes: see [`max_private_data`](Self::max_private_data).
    pub private_data: &'a [u8],
}

/// The enhanced connection data of RFC 6581, the first four bytes of the private data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Enhanced {
    /// A: peer-to-peer, the initiator sends a ready-to-receive (RTR) message first.
    pub peer_to_peer: bool,
    /// B: the RTR may be a zero-length Send.
    pub rtr_send: bool,
    /// C: the RTR may be a zero-length Write.
    pub rtr_write: bool,
    /// D: the RTR may be a zero-length Read.
    pub rtr_read: bool,
    /// Inbound reads the sender takes at once, 14 bits; [`Enhanced::NOT_NEGOTIATED`] leaves it open.
    pub ird: u16,
    /// Outbound reads that the sender wants to have outstanding, 14 bits, as above.
    pub ord: u16,
}

/// Why a start-up frame is no good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum StartError {
    /// The first bytes are not those of the expected frame: the peer speaks something else.
    #[error("not an MPA start-up frame")]
    Key,
    /// Neither 1 nor 2.
    #[error("unknown MPA revision {0}")]
    Revision(u8),
    /// More than [`MAX_PRIVATE_DATA`].
    #[error("private data of {0} bytes")]
    PrivateDataTooLong(u16),
    /// S is set and there are fewer than four bytes of private data.
    #[error("enhanced start-up frame without its data")]
    EnhancedTooShort,
}

impl FrameKind {
    const fn key(self) -> &'static [u8; KEY_LEN] {
        match self {
            Self::Request => KEY_REQUEST,
            Self::Reply => KEY_REPLY,
        }
    }
}

impl Enhanced {
    /// The depth that leaves IRD or ORD unnegotiated (RFC 6581).
    pub const NOT_NEGOTIATED: u16 = DEPTH;

    fn parse(raw: [u8; ENHANCED_LEN]) -> Self {
        let [a, b, c, d] = raw;
        let (first, second) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Self {
            peer_to_peer: first & HIGH != 0,
            rtr_send: first & LOW != 0,
            rtr_write: second & HIGH != 0,
            rtr_read: second & LOW != 0,
            ird: first & DEPTH,
            ord: second & DEPTH,
        }
    }

    fn emit(self) -> [u8; ENHANCED_LEN] {
        let word = |high, low, depth: u16| {
            (if high { HIGH } else { 0 } | if low { LOW } else { 0 } | depth.min(DEPTH))
                .to_be_bytes()
        };
        let [a, b] = word(self.peer_to_peer, self.rtr_send, self.ird);
        let [c, d] = word(self.rtr_write, self.rtr_read, self.ord);
        [a, b, c, d]
    }
}

impl<'a> StartFrame<'a> {
    /// Reads the frame of this kind at the start of `buf`, and says how many bytes it took; `None` asks for more bytes.
    ///
    /// A wrong key is an error as soon as the first byte that differs is there, so a peer that speaks another protocol is
    /// found out at once. Bytes that follow the frame are left alone.
    pub fn parse(kind: FrameKind, buf: &'a [u8]) -> Result<Option<(Self, usize)>, StartError> {
        let n = buf.len().min(KEY_LEN);
        if buf[..n] != kind.key()[..n] {
            return Err(StartError::Key);
        }
        let Some((header, rest)) = buf.split_first_chunk::<START_HEADER_LEN>() else {
            return Ok(None);
        };
        let [.., flags, revision, len_high, len_low] = *header;
        if !matches!(revision, 1 | 2) {
            return Err(StartError::Revision(revision));
        }
        let pd_length = u16::from_be_bytes([len_high, len_low]);
        let len = usize::from(pd_length);
        if len > MAX_PRIVATE_DATA {
            return Err(StartError::PrivateDataTooLong(pd_length));
        }
        // In revision 1 the S bit is reserved, and reserved bits are not looked at.
        let is_enhanced = revision == 2 && flags & ENHANCED != 0;
        if is_enhanced && len < ENHANCED_LEN {
            return Err(StartError::EnhancedTooShort);
        }
        let Some(mut private_data) = rest.get(..len) else {
            return Ok(None);
        };
        let mut enhanced = None;
        if is_enhanced && let Some((raw, consumer)) = private_data.split_first_chunk() {
            enhanced = Some(Enhanced::parse(*raw));
            private_data = consumer;
        }
        let frame = Self {
            kind,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            // In a Request the bit is reserved.
            reject: kind == FrameKind::Reply && flags & REJECT != 0,
            revision,
            enhanced,
            private_data,
        };
        Ok(Some((frame, START_HEADER_LEN + len)))
    }

    /// The most private data such a frame can carry, in bytes: [`MAX_PRIVATE_DATA`], less four if it is enhanced.
    pub const fn max_private_data(enhanced: bool) -> usize {
        MAX_PRIVATE_DATA - if enhanced { ENHANCED_LEN } else { 0 }
    }

    /// The frame's bytes. Depths beyond 14 bits go out as [`Enhanced::NOT_NEGOTIATED`].
    ///
    /// # Panics
    ///
    /// If `private_data` is longer than [`max_private_data`](Self::max_private_data): check the caller's data.
    pub fn emit(&self) -> Vec<u8> {
        let enhanced = self.enhanced.filter(|_| self.revision >= 2);
        assert!(
            self.private_data.len() <= Self::max_private_data(enhanced.is_some()),
            "private data of {} bytes in a start-up frame",
            self.private_data.len()
        );
        let len = self.private_data.len() + enhanced.map_or(0, |_| ENHANCED_LEN);
        let mut flags = 0;
        for (set, bit) in [
            (self.markers, MARKERS),
            (self.crc, CRC),
            (self.reject && self.kind == FrameKind::Reply, REJECT),
            (enhanced.is_some(), ENHANCED),
        ] {
            flags |= if set { bit } else { 0 };
        }
        let mut out = Vec::with_capacity(START_HEADER_LEN + len);
        out.extend_from_slice(self.kind.key());
        out.extend_from_slice(&[flags, self.revision]);
        out.extend_from_slice(&(len as u16).to_be_bytes());
        if let Some(enhanced) = enhanced {
            out.extend_from_slice(&enhanced.emit());
        }
        out.extend_from_slice(self.private_data);
        out
    }
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "MPA Request",
            Self::Reply => "MPA Reply",
        })
    }
}

impl fmt::Display for StartFrame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, rev {}", self.kind, self.revision)?;
        for (set, name) in [
            (self.markers, "markers"),
            (self.crc, "crc"),
            (self.reject, "reject"),
        ] {
            if set {
                write!(f, ", {name}")?;
            }
        }
        if let Some(enhanced) = &self.enhanced {
            write!(f, ", {enhanced}")?;
        }
        write!(f, ", private data {} bytes", self.private_data.len())
    }
}

impl fmt::Display for Enhanced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ird {}, ord {}", self.ird, self.ord)?;
        for (set, name) in [
            (self.peer_to_peer, "peer-to-peer"),
            (self.rtr_send, "rtr send"),
            (self.rtr_write, "rtr write"),
            (self.rtr_read, "rtr read"),
        ] {
            if set {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}
