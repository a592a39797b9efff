//! Datagrams of unreliable datagram queue pairs (datagram-iWARP over UDP): docs/spec/dgram.md.
//!
//! There are two versions. In version 1 a datagram is one whole message: a datagram header that names the queue pairs, a DDP untagged header (RFC 5041 4.3) of the Send
//! queue, the payload, and a CRC-32C that is always there. Also here: the forty bytes in front of a received message in which
//! InfiniBand programs look for the addresses ([`Grh`]). Version 2 ([`segment`]) adds messages of several segments and RDMA Write-Record.
//!
//! ```
//! use weft_wire::dgram;
//!
//! let header = dgram::Header { dst_qp: 0x1234_01, src_qp: 0x4321_07, qkey: 0x1111_1111, msn: 1, solicited: false, imm: None };
//! let mut datagram = Vec::new();
//! header.emit(&mut datagram);
//! datagram.extend_from_slice(b"hello");
//! dgram::seal(&mut datagram);
//! let (parsed, payload) = dgram::parse(&datagram).unwrap();
//! assert_eq!((parsed, &datagram[payload]), (header, &b"hello"[..]));
//! ```

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use thiserror::Error;

use crate::crc::crc32c;
use crate::ddp::{self, HeaderError, Untagged};
use crate::rdmap::{Opcode, QN_SEND};

pub mod segment;

pub use segment::{Control, FaultCode, Flow, Packet, Segment, Target};

/// Bytes in front of the payload, or of the immediate data if there is any.
pub const HEADER_LEN: usize = ADDRESSING + ddp::UNTAGGED_LEN;
/// Bytes of immediate data, in front of the payload.
pub const IMM_LEN: usize = 8;
/// Bytes of the CRC, behind the payload.
pub const CRC_LEN: usize = 4;
/// The longest payload of version 1.
pub const MAX_PAYLOAD: usize = 4096;
/// The destination queue pair number of datagrams to a multicast group.
pub const GROUP_QP: u32 = 0x00ff_ffff;
/// The longest datagram of version 1.
pub const MAX_LEN: usize = HEADER_LEN + IMM_LEN + MAX_PAYLOAD + CRC_LEN;

const ADDRESSING: usize = 14;
const MAGIC: u8 = b'W';
const VERSION: u8 = 0x10;
const VERSION_MASK: u8 = 0xf0;

/// The header before a message's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// The queue pair that it is for.
    pub dst_qp: u32,
    /// The queue pair that sent it.
    pub src_qp: u32,
    /// The `Q_Key` that the receiving queue pair must have.
    pub qkey: u32,
    /// Message sequence number: 1, 2, … for each message that the sending queue pair sends, to whomever.
    pub msn: u32,
    /// The receiver is to raise a solicited event.
    pub solicited: bool,
    /// Immediate data.
    pub imm: Option<u64>,
}

/// Why a datagram is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum DatagramError {
    /// Shorter than its headers, or longer than [`MAX_LEN`].
    #[error("a length that no datagram has")]
    Length,
    /// Not ours, or of a version to come.
    #[error("no datagram of this protocol")]
    Version,
    /// Damaged on the way.
    #[error("wrong CRC")]
    Crc,
    /// The DDP header is none.
    #[error(transparent)]
    Segment(#[from] HeaderError),
    /// A segment that is not a whole message, or a message that datagrams do not carry.
    #[error("no whole Send or Immediate Data message")]
    Message,
    /// A segment that is not within its message, or whose message is not within the address space.
    #[error("a segment outside of its message")]
    Place,
}

/// A datagram of any version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Datagram {
    /// A whole message of version 1, and where its payload is.
    Message(Header, Range<usize>),
    /// A segment of version 2, and where its payload is.
    Segment(Segment, Range<usize>),
    /// A control datagram of version 2.
    Control(Control),
}

/// Parses a datagram of any version. Reserved bits are ignored.
///
/// # Errors
/// [`DatagramError`]: such a datagram is dropped.
#[inline]
pub fn read(datagram: &[u8]) -> Result<Datagram, DatagramError> {
    if datagram
        .get(1)
        .is_none_or(|second| second & VERSION_MASK != segment::VERSION)
    {
        let (header, payload) = parse(datagram)?;
        return Ok(Datagram::Message(header, payload));
    }
    if !segment::fits(datagram.len()) {
        return Err(DatagramError::Length);
    }
    if datagram[0] != MAGIC {
        return Err(DatagramError::Version);
    }
    let (covered, crc) = datagram.split_at(datagram.len() - CRC_LEN);
    if crc32c(covered).to_le_bytes() != crc {
        return Err(DatagramError::Crc);
    }
    if segment::is_control(datagram[1]) {
        return Ok(Datagram::Control(Control::parse(covered)?));
    }
    let (segment, payload) = Segment::parse(covered)?;
    Ok(Datagram::Segment(segment, payload))
}

impl Header {
    /// Appends the header, and the immediate data.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let opcode = match (self.imm, self.solicited) {
            (None, false) => Opcode::Send,
            (None, true) => Opcode::SendSe,
            (Some(_), false) => Opcode::Immediate,
            (Some(_), true) => Opcode::ImmediateSe,
        };
        let segment = ddp::Header::Untagged(Untagged {
            opcode,
            last: true,
            invalidate: 0,
            qn: QN_SEND,
            msn: self.msn,
            mo: 0,
        });
        // Appended as one: the lengths of the parts are known only when they are written.
        let mut raw = [0; ADDRESSING + ddp::MAX_LEN];
        let (addressing, ddp) = raw.split_at_mut(ADDRESSING);
        addressing[..2].copy_from_slice(&[MAGIC, VERSION]);
        addressing[2..6].copy_from_slice(&self.dst_qp.to_be_bytes());
        addressing[6..10].copy_from_slice(&self.src_qp.to_be_bytes());
        addressing[10..].copy_from_slice(&self.qkey.to_be_bytes());
        if let Some(ddp) = ddp.first_chunk_mut() {
            segment.emit(ddp);
        }
        out.extend_from_slice(&raw[..HEADER_LEN]);
        if let Some(imm) = self.imm {
            out.extend_from_slice(&imm.to_be_bytes());
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Datagram, qp {:#08x} > {:#08x}, qkey {:#010x}, msn {}",
            self.src_qp, self.dst_qp, self.qkey, self.msn
        )?;
        if let Some(imm) = self.imm {
            write!(f, ", imm {imm:#x}")?;
        }
        f.write_str(if self.solicited { ", solicited" } else { "" })
    }
}

/// Appends the CRC of everything in `datagram`.
pub fn seal(datagram: &mut Vec<u8>) {
    let crc = crc32c(datagram).to_le_bytes();
    datagram.extend_from_slice(&crc);
}

/// As [`seal`], for consecutive datagrams of `each` bytes, the last of which may be shorter; each ends with [`CRC_LEN`] bytes for its CRC. A CRC directly
/// after a copy waits for the copy, so the CRCs of several datagrams are computed after all copies.
pub fn seal_all(train: &mut [u8], each: usize) {
    for datagram in train.chunks_mut(each.max(1)) {
        if let Some((covered, room)) = datagram.split_last_chunk_mut::<CRC_LEN>() {
            *room = crc32c(covered).to_le_bytes();
        }
    }
}

/// The header of a datagram, and the range of its payload. Reserved bits are ignored.
///
/// # Errors
/// [`DatagramError`]: such a datagram is dropped.
pub fn parse(datagram: &[u8]) -> Result<(Header, Range<usize>), DatagramError> {
    let short = HEADER_LEN + CRC_LEN;
    if datagram.len() < short || datagram.len() > MAX_LEN {
        return Err(DatagramError::Length);
    }
    if datagram[0] != MAGIC || datagram[1] & VERSION_MASK != VERSION {
        return Err(DatagramError::Version);
    }
    let (covered, crc) = datagram.split_at(datagram.len() - CRC_LEN);
    if crc32c(covered).to_le_bytes() != crc {
        return Err(DatagramError::Crc);
    }
    let ddp::Header::Untagged(segment) = ddp::Header::parse(&covered[ADDRESSING..])? else {
        return Err(DatagramError::Message);
    };
    let (solicited, with_imm) = match segment.opcode {
        Opcode::Send => (false, false),
        Opcode::SendSe => (true, false),
        Opcode::Immediate => (false, true),
        Opcode::ImmediateSe => (true, true),
        _ => return Err(DatagramError::Message),
    };
    if !segment.last || segment.mo != 0 {
        return Err(DatagramError::Message);
    }
    let (imm, start) = if with_imm {
        let imm = covered[HEADER_LEN..].first_chunk();
        let imm = imm.ok_or(DatagramError::Length)?;
        (Some(u64::from_be_bytes(*imm)), HEADER_LEN + IMM_LEN)
    } else {
        (None, HEADER_LEN)
    };
    if covered.len() - start > MAX_PAYLOAD {
        return Err(DatagramError::Length);
    }
    let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| covered[at + i]));
    let header = Header {
        dst_qp: word(2),
        src_qp: word(6),
        qkey: word(10),
        msn: segment.msn,
        solicited,
        imm,
    };
    Ok((header, start..covered.len()))
}

/// From where to where a message went, in the form in which InfiniBand puts it in front of the received message: a global routing
/// header, that is an IPv6 header, or with IPv4 twenty zero bytes and an IPv4 header (`RoCEv2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grh {
    /// The sender's address.
    pub source: IpAddr,
    /// The receiver's address, of the same family.
    pub dest: IpAddr,
    /// `traffic_class` of an address handle: IPv4's type of service, IPv6's traffic class.
    pub traffic_class: u8,
}

impl Grh {
    /// Its length.
    pub const LEN: usize = 40;
    const IPV4: usize = 20;
    const UDP: u8 = 17;
    const HOPS: u8 = 64;

    /// Writes it. `payload`: bytes of the message behind it. Addresses of two families are both written as IPv6's.
    pub fn emit(&self, payload: usize, out: &mut [u8; Grh::LEN]) {
        out.fill(0);
        let len = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
        if let (IpAddr::V4(source), IpAddr::V4(dest)) = (self.source, self.dest) {
            let ip = &mut out[Self::IPV4..];
            ip[0] = 0x45;
            ip[1] = self.traffic_class;
            ip[2..4].copy_from_slice(&len(20 + payload));
            ip[8] = Self::HOPS;
            ip[9] = Self::UDP;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&dest.octets());
            let sum = !ones_sum(ip);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            return;
        }
        let v6 = |ip| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        out[0] = 0x60 | self.traffic_class >> 4;
        out[1] = self.traffic_class << 4;
        out[4..6].copy_from_slice(&len(payload));
        out[6] = Self::UDP;
        out[7] = Self::HOPS;
        out[8..24].copy_from_slice(&v6(self.source));
        out[24..40].copy_from_slice(&v6(self.dest));
    }

    /// Parses it; `None` for neither kind. Bytes that could be both are an IPv4 header if its checksum is right.
    pub fn parse(raw: &[u8; Grh::LEN]) -> Option<Grh> {
        let ip = &raw[Self::IPV4..];
        let v4 = ip[0] == 0x45 && (raw[0] >> 4 != 6 || ones_sum(ip) == 0xffff);
        if v4 {
            let addr = |at: usize| Ipv4Addr::from(std::array::from_fn::<u8, 4, _>(|i| ip[at + i]));
            return Some(Grh {
                source: addr(12).into(),
                dest: addr(16).into(),
                traffic_class: ip[1],
            });
        }
        let addr = |at: usize| {
            let octets = std::array::from_fn::<u8, 16, _>(|i| raw[at + i]);
            Ipv6Addr::from(octets).to_canonical()
        };
        (raw[0] >> 4 == 6).then(|| Grh {
            source: addr(8),
            dest: addr(24),
            traffic_class: raw[0] << 4 | raw[1] >> 4,
        })
    }
}

/// The ones' complement sum of an IPv4 header (RFC 791 3.1): 0xffff for one whose checksum is right.
fn ones_sum(header: &[u8]) -> u16 {
    let words = header.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|&w| u32::from(u16::from_be_bytes(w))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            dst_qp: 0x00ab_cd01,
            src_qp: 0x0012_3402,
            qkey: 0x1111_1111,
            msn: 7,
            solicited: false,
            imm: None,
        }
    }

    fn datagram(header: Header, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        header.emit(&mut out);
        out.extend_from_slice(payload);
        seal(&mut out);
        out
    }

    /// The example of docs/spec/dgram.md.
    #[test]
    fn a_datagram_looks_as_the_specification_says() {
        let raw = datagram(header(), b"hello");
        let expected = [
            0x57, 0x10, 0x00, 0xab, 0xcd, 0x01, 0x00, 0x12, 0x34, 0x02, 0x11, 0x11, 0x11, 0x11,
            0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, b'h', b'e', b'l', b'l',
            b'o',
        ];
        assert_eq!(raw[..raw.len() - CRC_LEN], expected);
        assert_eq!(parse(&raw), Ok((header(), 32..37)));
        assert_eq!(
            header().to_string(),
            "Datagram, qp 0x123402 > 0xabcd01, qkey 0x11111111, msn 7"
        );
        let with_imm = Header {
            imm: Some(0x0102_0304),
            solicited: true,
            ..header()
        };
        let raw = datagram(with_imm, b"");
        assert_eq!(raw[14..16], [0x41, 0x49]);
        assert_eq!(raw[32..40], [0, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(parse(&raw), Ok((with_imm, 40..40)));
    }

    #[test]
    fn whatever_is_damaged_is_no_message() {
        let raw = datagram(header(), b"some payload");
        for at in 0..raw.len() {
            let mut bad = raw.clone();
            bad[at] ^= 0x20;
            assert!(parse(&bad).is_err(), "byte {at}");
            assert!(parse(&raw[..at]).is_err(), "cut to {at}");
        }
    }

    #[test]
    fn only_whole_sends_are_messages() {
        let seal_with = |at: usize, byte: u8| {
            let mut out = Vec::new();
            header().emit(&mut out);
            out[at] = byte;
            seal(&mut out);
            parse(&out)
        };
        // Not the last segment; a Send with Invalidate; a Terminate on the Send queue; a second segment.
        assert_eq!(seal_with(14, 0x01), Err(DatagramError::Message));
        assert_eq!(seal_with(15, 0x44), Err(DatagramError::Message));
        assert!(matches!(
            seal_with(15, 0x47),
            Err(DatagramError::Segment(_))
        ));
        assert_eq!(seal_with(31, 1), Err(DatagramError::Message));
        assert_eq!(seal_with(1, 0x20), Err(DatagramError::Version));
        // Immediate data that is not there.
        assert_eq!(seal_with(15, 0x48), Err(DatagramError::Length));
        let longest = datagram(header(), &[1; MAX_PAYLOAD]);
        assert!(parse(&longest).is_ok());
        let longer = datagram(header(), &[1; MAX_PAYLOAD + 1]);
        assert_eq!(parse(&longer), Err(DatagramError::Length));
    }

    #[test]
    fn a_routing_header_is_an_ip_header() {
        let v4 = Grh {
            source: "192.0.2.1".parse().unwrap(),
            dest: "198.51.100.7".parse().unwrap(),
            traffic_class: 0,
        };
        let mut raw = [1; Grh::LEN];
        v4.emit(100, &mut raw);
        assert_eq!(raw[..20], [0; 20]);
        assert_eq!(raw[20..24], [0x45, 0, 0, 120]);
        assert_eq!(ones_sum(&raw[20..]), 0xffff);
        assert_eq!(Grh::parse(&raw), Some(v4));
        let v6 = Grh {
            source: "2001:db8::1".parse().unwrap(),
            dest: "fe80::7".parse().unwrap(),
            traffic_class: 0x68,
        };
        v6.emit(100, &mut raw);
        assert_eq!(raw[..8], [0x66, 0x80, 0, 0, 0, 100, 17, 64]);
        assert_eq!(Grh::parse(&raw), Some(v6));
        assert_eq!(Grh::parse(&[0; 40]), None);
    }
}
