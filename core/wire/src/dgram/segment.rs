//! Version 2 of the datagram format: segments of messages, RDMA Write-Record, and short control datagrams (docs/spec/dgram.md).
//!
//! A segment names its message (source queue pair, incarnation, message sequence number), the message's length, and its own offset in the
//! message. So each segment can be placed independently of the others.

use std::fmt;
use std::ops::Range;

use super::{CRC_LEN, DatagramError, IMM_LEN, MAGIC, VERSION_MASK};
use crate::crc::crc32c;
use crate::ddp::{self, Tagged, Untagged};
use crate::rdmap::{Opcode, QN_SEND};

/// Bytes in front of the payload (or of the immediate data) of an untagged segment.
pub const UNTAGGED_LEN: usize = ADDRESSING + ddp::UNTAGGED_LEN;
/// Bytes in front of the payload (or of the immediate data) of a tagged segment.
pub const TAGGED_LEN: usize = ADDRESSING + PLACE + ddp::TAGGED_LEN;
/// The longest datagram: what UDP over IPv4 carries (RFC 768, RFC 791).
pub const MAX_LEN: usize = 65_507;
/// The longest payload of a segment, in bytes: any segment of that length fits into a UDP datagram over IPv4 and IPv6.
pub const MAX_PAYLOAD: usize = 65_408;
/// The longest message, in bytes.
pub const MAX_MESSAGE: u32 = 1 << 30;
/// The length of a [`Control::Probe`] and of a [`Control::Report`]: the answer is not longer than the question.
pub const PROBE_LEN: usize = 24;
/// The length of the control datagrams of the reliable mode: an answer is as long as the question ([`Control::Hello`]), and shorter than any
/// reliable segment.
pub const ACK_LEN: usize = 32;
/// The length of the fields of a reliable segment between its addresses and the DDP header.
pub const RELIABLE_LEN: usize = 12;

const ADDRESSING: usize = 22;
/// Message sequence number and offset, which a tagged DDP header does not have.
const PLACE: usize = 8;
pub(super) const VERSION: u8 = 0x20;
const IMMEDIATE: u8 = 1;
const SOLICITED: u8 = 2;
const RELIABLE: u8 = 4;
const CONTROL: u8 = 8;

const PROBE: u8 = CONTROL;
const REPORT: u8 = CONTROL | 1;
const ACK: u8 = CONTROL | 2;
const FAULT: u8 = CONTROL | 3;
const HELLO: u8 = CONTROL | 4;
const WELCOME: u8 = CONTROL | 5;
const KNOCK: u8 = CONTROL | 6;

/// The destination of the bytes of an RDMA Write-Record message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The STag of the receiver's region or window.
    pub stag: u32,
    /// Tagged offset of the message's first byte (not of the segment's).
    pub to: u64,
}

/// A part of a message, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The queue pair that it is for.
    pub dst_qp: u32,
    /// The queue pair that sent it.
    pub src_qp: u32,
    /// The `Q_Key` that the receiving queue pair must have.
    pub qkey: u32,
    /// Drawn at random when the sending queue pair (or, in the reliable mode, its flow to this receiver) begins: sequence
    /// numbers of another incarnation have nothing to do with these.
    pub incarnation: u32,
    /// Message sequence number: 1, 2, … for each message of the incarnation.
    pub msn: u32,
    /// Length of the whole message in bytes, at most [`MAX_MESSAGE`].
    pub len: u32,
    /// Place of the payload's first byte in the message.
    pub offset: u32,
    /// Set for RDMA Write-Record; `None` for a Send.
    pub target: Option<Target>,
    /// Immediate data: the same in each segment of the message.
    pub imm: Option<u64>,
    /// The receiver is to raise a solicited event.
    pub solicited: bool,
    /// Set in the reliable mode: the receiver acknowledges it ([`Control::Ack`]).
    pub reliable: Option<Packet>,
}

/// The additional fields of segments in the reliable mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packet {
    /// Packet sequence number: 1, 2, … for each segment of the incarnation, the same when it is sent again. Never 0.
    pub psn: u32,
    /// The cookie that the receiver has sent to the sender's address ([`Control::Welcome`]).
    pub cookie: u64,
}

/// A header that is being written: appended to a datagram as one.
struct Raw {
    bytes: [u8; TAGGED_LEN + RELIABLE_LEN + IMM_LEN],
    len: usize,
}

impl Default for Raw {
    fn default() -> Raw {
        Raw {
            bytes: [0; _],
            len: 0,
        }
    }
}

impl Raw {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.bytes[self.len..][..N].copy_from_slice(&bytes);
        self.len += N;
    }
}

impl Segment {
    /// Bytes in front of the payload.
    pub fn header_len(&self) -> usize {
        let imm = if self.imm.is_some() { IMM_LEN } else { 0 };
        let reliable = if self.reliable.is_some() {
            RELIABLE_LEN
        } else {
            0
        };
        imm + reliable
            + match self.target {
                Some(_) => TAGGED_LEN,
                None => UNTAGGED_LEN,
            }
    }

    /// Appends the header, and the immediate data. `payload`: bytes of the message that follow; the segment that reaches the
    /// message's end is marked as its last (RFC 5041 4.1).
    pub fn emit(&self, payload: usize, out: &mut Vec<u8>) {
        let last = u64::from(self.offset) + payload as u64 == u64::from(self.len);
        let mut flags = VERSION;
        for (set, flag) in [
            (self.imm.is_some(), IMMEDIATE),
            (self.solicited, SOLICITED),
            (self.reliable.is_some(), RELIABLE),
        ] {
            flags |= if set { flag } else { 0 };
        }
        let mut raw = Raw::default();
        raw.put([MAGIC, flags]);
        raw.put(self.dst_qp.to_be_bytes());
        raw.put(self.src_qp.to_be_bytes());
        raw.put(self.qkey.to_be_bytes());
        raw.put(self.incarnation.to_be_bytes());
        raw.put(self.len.to_be_bytes());
        if let Some(packet) = self.reliable {
            raw.put(packet.psn.to_be_bytes());
            raw.put(packet.cookie.to_be_bytes());
        }
        let mut ddp = [0; ddp::MAX_LEN];
        if let Some(target) = self.target {
            let header = ddp::Header::Tagged(Tagged {
                opcode: Opcode::Write,
                last,
                stag: target.stag,
                to: target.to.wrapping_add(u64::from(self.offset)),
            });
            header.emit(&mut ddp);
            raw.put::<{ ddp::TAGGED_LEN }>(std::array::from_fn(|i| ddp[i]));
            raw.put(self.msn.to_be_bytes());
            raw.put(self.offset.to_be_bytes());
        } else {
            let header = ddp::Header::Untagged(Untagged {
                opcode: Opcode::Send,
                last,
                invalidate: 0,
                qn: QN_SEND,
                msn: self.msn,
                mo: self.offset,
            });
            header.emit(&mut ddp);
            raw.put::<{ ddp::UNTAGGED_LEN }>(ddp);
        }
        if let Some(imm) = self.imm {
            raw.put(imm.to_be_bytes());
        }
        out.extend_from_slice(raw.bytes.get(..raw.len).unwrap_or_default());
    }

    /// Parses the datagram without the CRC: the segment, and the range of its payload.
    #[inline]
    pub(super) fn parse(covered: &[u8]) -> Result<(Segment, Range<usize>), DatagramError> {
        let mut rest = Reader(covered);
        let head: [u8; ADDRESSING] = rest.take()?;
        let flags = head[1];
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let reliable = if flags & RELIABLE == 0 {
            None
        } else {
            let (psn, cookie) = (rest.u32()?, u64::from_be_bytes(rest.take()?));
            if psn == 0 {
                return Err(DatagramError::Place);
            }
            Some(Packet { psn, cookie })
        };
        let ddp = ddp::Header::parse(rest.0)?;
        rest.skip(ddp.len())?;
        let (msn, offset, target) = match ddp {
            ddp::Header::Tagged(Tagged {
                opcode: Opcode::Write,
                stag,
                to,
                ..
            }) => {
                let (msn, offset) = (rest.u32()?, rest.u32()?);
                let to = to.checked_sub(offset.into()).ok_or(DatagramError::Place)?;
                (msn, offset, Some(Target { stag, to }))
            }
            ddp::Header::Untagged(Untagged {
                opcode: Opcode::Send,
                msn,
                mo,
                ..
            }) => (msn, mo, None),
            _ => return Err(DatagramError::Message),
        };
        let imm = if flags & IMMEDIATE == 0 {
            None
        } else {
            Some(u64::from_be_bytes(rest.take()?))
        };
        let segment = Segment {
            dst_qp: word(2),
            src_qp: word(6),
            qkey: word(10),
            incarnation: word(14),
            msn,
            len: word(18),
            offset,
            target,
            imm,
            solicited: flags & SOLICITED != 0,
            reliable,
        };
        segment.check(rest.0.len(), ddp.is_last())?;
        Ok((segment, covered.len() - rest.0.len()..covered.len()))
    }

    /// Whether the range of `payload` bytes is valid in the message, and in the address space of the STag.
    #[inline]
    fn check(&self, payload: usize, last: bool) -> Result<(), DatagramError> {
        if payload > MAX_PAYLOAD || self.len > MAX_MESSAGE {
            return Err(DatagramError::Length);
        }
        // No sum wraps: the offset has 32 bits, the payload 16.
        let end = u64::from(self.offset) + payload as u64;
        let empty = payload == 0 && self.len != 0;
        if end > u64::from(self.len) || empty || last != (end == u64::from(self.len)) {
            return Err(DatagramError::Place);
        }
        if let Some(target) = self.target
            && target.to.checked_add(self.len.into()).is_none()
        {
            return Err(DatagramError::Place);
        }
        Ok(())
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Segment, qp {:#08x} > {:#08x}, qkey {:#010x}, incarnation {:#010x}, msn {}, from {} of {}",
            self.src_qp, self.dst_qp, self.qkey, self.incarnation, self.msn, self.offset, self.len
        )?;
        if let Some(Target { stag, to }) = self.target {
            write!(f, ", write-record, stag {stag:#010x}, to {to:#x}")?;
        }
        if let Some(imm) = self.imm {
            write!(f, ", imm {imm:#x}")?;
        }
        f.write_str(if self.solicited { ", solicited" } else { "" })?;
        match self.reliable {
            Some(packet) => write!(f, ", psn {}", packet.psn),
            None => Ok(()),
        }
    }
}

/// Why the receiver of a reliable message ends the flow that it came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultCode {
    /// No receive was posted for it. The flow continues when the sender retries.
    NotReady,
    /// Longer than the receive that was posted for it.
    TooLong,
    /// An STag, a range or a right that the receiver does not grant.
    Access,
    /// The receiver cannot carry it out: its own memory, or an operation that it does not have.
    Operation,
    /// The receiver knows nothing of this flow, or expects something else: it was restarted.
    Unknown,
}

impl FaultCode {
    const ALL: [FaultCode; 5] = [
        FaultCode::NotReady,
        FaultCode::TooLong,
        FaultCode::Access,
        FaultCode::Operation,
        FaultCode::Unknown,
    ];

    /// Its number on the wire, from 1.
    pub fn code(self) -> u8 {
        self as u8 + 1
    }

    /// The fault of this number.
    pub fn from_code(code: u8) -> Option<FaultCode> {
        FaultCode::ALL
            .into_iter()
            .find(|fault| fault.code() == code)
    }
}

/// A datagram that carries no part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// "How much of what I sent have you taken out of your socket?" Port to port, for pacing.
    Probe {
        /// Random, so that only a host that received the probe can answer it.
        cookie: u32,
        /// The sender's count of bytes sent to this port, in its own counting.
        sent: u64,
    },
    /// The answer: everything in front of that probe.
    Report {
        /// The probe's.
        cookie: u32,
        /// The probe's.
        sent: u64,
        /// Bytes that may wait in the receiver's socket, as the kernel counts them (`SO_RCVBUF`).
        room: u32,
    },
    /// Of the reliable mode: what of a flow has arrived.
    Ack {
        /// Whose.
        flow: Flow,
        /// The packet that is expected next: all before it have arrived, and the messages that end with them are delivered.
        psn: u32,
        /// Bit i: packet `psn + 1 + i` has arrived.
        sack: u64,
    },
    /// Of the reliable mode: this message cannot be delivered, and the flow ends or is stalled.
    Fault {
        /// Whose.
        flow: Flow,
        /// Why.
        code: FaultCode,
        /// The packet that was refused.
        psn: u32,
        /// Its message.
        msn: u32,
    },
    /// Of the reliable mode: a queue pair is going to send, and asks for a cookie.
    Hello {
        /// Whose.
        flow: Flow,
        /// The `Q_Key` that the receiving queue pair must have.
        qkey: u32,
    },
    /// The answer: each segment of the flow has to carry this cookie, which shows that the sender receives datagrams at its address.
    Welcome {
        /// Whose.
        flow: Flow,
        /// The cookie.
        cookie: u64,
    },
    /// A wake-up for a sleeping port of the same host, to check the shared memory. It carries nothing else, and a forged one only wakes a port.
    Knock,
}

/// Which flow of the reliable mode a control datagram is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The queue pair that the datagram is for.
    pub dst_qp: u32,
    /// The queue pair that sends the datagram.
    pub src_qp: u32,
    /// Of the flow; its sender has drawn it.
    pub incarnation: u32,
}

impl Control {
    /// The flow of the reliable mode that it is about.
    pub fn flow(&self) -> Option<Flow> {
        match *self {
            Control::Probe { .. } | Control::Report { .. } | Control::Knock => None,
            Control::Ack { flow, .. }
            | Control::Fault { flow, .. }
            | Control::Hello { flow, .. }
            | Control::Welcome { flow, .. } => Some(flow),
        }
    }

    /// Appends the whole datagram, with its CRC.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        // Two words and a double word, independent of the kind.
        let (kind, code, first, last) = match *self {
            Control::Probe { sent, .. } => (PROBE, 0, 0, sent),
            Control::Report { sent, room, .. } => (REPORT, 0, room, sent),
            Control::Ack { psn, sack, .. } => (ACK, 0, psn, sack),
            Control::Fault { code, psn, msn, .. } => {
                (FAULT, code.code(), psn, u64::from(msn) << 32)
            }
            Control::Hello { qkey, .. } => (HELLO, 0, qkey, 0),
            Control::Welcome { cookie, .. } => (WELCOME, 0, 0, cookie),
            Control::Knock => (KNOCK, 0, 0, 0),
        };
        out.extend_from_slice(&[MAGIC, VERSION | kind, code, 0]);
        if let Control::Probe { cookie, .. } | Control::Report { cookie, .. } = self {
            out.extend_from_slice(&cookie.to_be_bytes());
            out.extend_from_slice(&last.to_be_bytes());
            out.extend_from_slice(&first.to_be_bytes());
        } else if let Control::Knock = self {
            out.extend_from_slice(&[0; PROBE_LEN - 4 - CRC_LEN]);
        } else if let Some(flow) = self.flow() {
            for word in [flow.dst_qp, flow.src_qp, flow.incarnation, first] {
                out.extend_from_slice(&word.to_be_bytes());
            }
            out.extend_from_slice(&last.to_be_bytes());
        }
        let crc = crc32c(&out[start..]).to_le_bytes();
        out.extend_from_slice(&crc);
    }

    pub(super) fn parse(covered: &[u8]) -> Result<Control, DatagramError> {
        let mut rest = Reader(covered);
        let [_, kind, code, _] = rest.take()?;
        let control = match kind & !VERSION_MASK {
            kind @ (PROBE | REPORT | KNOCK) => {
                let (cookie, sent) = (rest.u32()?, u64::from_be_bytes(rest.take()?));
                let room = rest.u32()?;
                match kind {
                    PROBE => Control::Probe { cookie, sent },
                    REPORT => Control::Report { cookie, sent, room },
                    _ => Control::Knock,
                }
            }
            kind @ ACK..=WELCOME => {
                let flow = Flow {
                    dst_qp: rest.u32()?,
                    src_qp: rest.u32()?,
                    incarnation: rest.u32()?,
                };
                let (first, last) = (rest.u32()?, u64::from_be_bytes(rest.take()?));
                match kind {
                    ACK => Control::Ack {
                        flow,
                        psn: first,
                        sack: last,
                    },
                    FAULT => Control::Fault {
                        flow,
                        code: FaultCode::from_code(code).ok_or(DatagramError::Message)?,
                        psn: first,
                        msn: (last >> 32) as u32,
                    },
                    HELLO => Control::Hello { flow, qkey: first },
                    _ => Control::Welcome { flow, cookie: last },
                }
            }
            _ => return Err(DatagramError::Message),
        };
        if rest.0.is_empty() {
            Ok(control)
        } else {
            Err(DatagramError::Length)
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, flow) = match self {
            Control::Probe { cookie, sent } => {
                return write!(f, "Probe {cookie:#010x}, sent {sent}");
            }
            Control::Report { cookie, sent, room } => {
                return write!(f, "Report {cookie:#010x}, sent {sent}, room {room}");
            }
            Control::Knock => return f.write_str("Knock"),
            Control::Ack { flow, .. } => ("Ack", flow),
            Control::Fault { flow, .. } => ("Fault", flow),
            Control::Hello { flow, .. } => ("Hello", flow),
            Control::Welcome { flow, .. } => ("Welcome", flow),
        };
        write!(
            f,
            "{name}, qp {:#08x} > {:#08x}, incarnation {:#010x}",
            flow.src_qp, flow.dst_qp, flow.incarnation
        )?;
        match self {
            Control::Ack { psn, sack, .. } => write!(f, ", psn {psn}, sack {sack:#x}"),
            Control::Fault { code, psn, msn, .. } => write!(f, ", {code:?}, psn {psn}, msn {msn}"),
            Control::Hello { qkey, .. } => write!(f, ", qkey {qkey:#010x}"),
            _ => Ok(()),
        }
    }
}

/// Bytes that are read from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], DatagramError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(DatagramError::Length)?;
        self.0 = rest;
        Ok(*first)
    }

    #[inline]
    fn u32(&mut self) -> Result<u32, DatagramError> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    #[inline]
    fn skip(&mut self, n: usize) -> Result<(), DatagramError> {
        self.0 = self.0.get(n..).ok_or(DatagramError::Length)?;
        Ok(())
    }
}

/// Whether the second byte of a datagram of version 2 marks a [`Control`].
pub(super) fn is_control(second: u8) -> bool {
    second & CONTROL != 0
}

/// Whether a datagram of this length is short enough for a control datagram.
pub(super) fn fits(len: usize) -> bool {
    len <= MAX_LEN && len > CRC_LEN + 2
}

#[cfg(test)]
mod tests {
    use super::super::{Datagram, read, seal};
    use super::*;

    fn segment() -> Segment {
        Segment {
            dst_qp: 0x00ab_cd01,
            src_qp: 0x0012_3402,
            qkey: 0x1111_1111,
            incarnation: 0xfeed_f00d,
            msn: 7,
            len: 15,
            offset: 10,
            target: None,
            imm: None,
            solicited: false,
            reliable: None,
        }
    }

    fn datagram(segment: &Segment, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        segment.emit(payload.len(), &mut out);
        assert_eq!(out.len(), segment.header_len());
        out.extend_from_slice(payload);
        seal(&mut out);
        out
    }

    /// The first example of docs/spec/dgram.md.
    #[test]
    fn a_segment_looks_as_the_specification_says() {
        let raw = datagram(&segment(), b"hello");
        let expected = [
            0x57, 0x20, 0x00, 0xab, 0xcd, 0x01, 0x00, 0x12, 0x34, 0x02, 0x11, 0x11, 0x11, 0x11,
            0xfe, 0xed, 0xf0, 0x0d, 0, 0, 0, 15, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0,
            0, 0, 10, b'h', b'e', b'l', b'l', b'o',
        ];
        assert_eq!(raw[..raw.len() - CRC_LEN], expected);
        assert_eq!(read(&raw), Ok(Datagram::Segment(segment(), 40..45)));
    }

    /// The second one.
    #[test]
    fn a_write_record_looks_as_the_specification_says() {
        let target = Some(Target {
            stag: 0x0102_0304,
            to: 0x1000,
        });
        let record = Segment {
            target,
            imm: Some(0x55),
            solicited: true,
            reliable: Some(Packet { psn: 3, cookie: 9 }),
            ..segment()
        };
        let raw = datagram(&record, b"he");
        let expected = [
            0x57, 0x27, 0x00, 0xab, 0xcd, 0x01, 0x00, 0x12, 0x34, 0x02, 0x11, 0x11, 0x11, 0x11,
            0xfe, 0xed, 0xf0, 0x0d, 0, 0, 0, 15, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9, 0x81, 0x40, 1,
            2, 3, 4, 0, 0, 0, 0, 0, 0, 0x10, 0x0a, 0, 0, 0, 7, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0,
            0x55, b'h', b'e',
        ];
        assert_eq!(raw[..raw.len() - CRC_LEN], expected);
        assert_eq!(read(&raw), Ok(Datagram::Segment(record, 64..66)));
        assert!(record.to_string().contains("stag 0x01020304, to 0x1000"));
    }

    #[test]
    fn a_place_outside_of_the_message_is_none() {
        let bad = |segment: Segment, payload: &[u8]| {
            let mut out = Vec::new();
            segment.emit(payload.len(), &mut out);
            out.extend_from_slice(payload);
            seal(&mut out);
            read(&out).unwrap_err()
        };
        let base = segment();
        assert_eq!(bad(base, b"longer"), DatagramError::Place);
        assert_eq!(bad(base, b""), DatagramError::Place, "an empty part");
        let wraps = Segment {
            offset: u32::MAX,
            ..base
        };
        assert_eq!(bad(wraps, b"xx"), DatagramError::Place);
        let huge = Segment {
            len: MAX_MESSAGE + 1,
            ..base
        };
        assert_eq!(bad(huge, b"x"), DatagramError::Length);
        for to in [u64::MAX, u64::MAX - 14] {
            let target = Some(Target { stag: 1, to });
            assert_eq!(bad(Segment { target, ..base }, b"x"), DatagramError::Place);
        }
        // An offset below the minimum for the tagged offset.
        let mut raw = datagram(
            &Segment {
                target: Some(Target { stag: 1, to: 0 }),
                ..base
            },
            b"x",
        );
        raw.truncate(raw.len() - CRC_LEN);
        raw[28..36].fill(0);
        seal(&mut raw);
        assert_eq!(read(&raw), Err(DatagramError::Place));
        // The last segment that does not say so, and one that wrongly does.
        for (payload, control) in [(&b"hello"[..], 0x01), (b"h", 0x41)] {
            let mut raw = datagram(&base, payload);
            raw.truncate(raw.len() - CRC_LEN);
            raw[22] = control;
            seal(&mut raw);
            assert_eq!(read(&raw), Err(DatagramError::Place));
        }
    }

    #[test]
    fn whatever_is_damaged_is_no_segment() {
        let raw = datagram(&segment(), b"hello");
        for at in 0..raw.len() {
            let mut bad = raw.clone();
            bad[at] ^= 0x20;
            assert!(read(&bad).is_err(), "byte {at}");
            assert!(read(&raw[..at]).is_err(), "cut to {at}");
        }
    }

    #[test]
    fn control_datagrams_come_back() {
        let flow = Flow {
            dst_qp: 1,
            src_qp: 2,
            incarnation: 3,
        };
        let probe = Control::Probe { cookie: 7, sent: 8 };
        let report = Control::Report {
            cookie: 7,
            sent: 8,
            room: 9,
        };
        let mut all = vec![(probe, PROBE_LEN), (report, PROBE_LEN)];
        let (psn, msn) = (4, 5);
        let sack = 0x8000_0000_0000_0001;
        let reliable = [
            Control::Ack { flow, psn, sack },
            Control::Hello { flow, qkey: 6 },
            Control::Welcome { flow, cookie: 7 },
        ];
        all.extend(reliable.map(|control| (control, ACK_LEN)));
        for code in FaultCode::ALL {
            let fault = Control::Fault {
                flow,
                code,
                psn,
                msn,
            };
            all.push((fault, ACK_LEN));
        }
        for (control, len) in all {
            let mut raw = Vec::new();
            control.emit(&mut raw);
            assert_eq!(raw.len(), len);
            assert_eq!(read(&raw), Ok(Datagram::Control(control)));
            let shorter = &raw[..len - CRC_LEN - 1];
            let mut cut = shorter.to_vec();
            seal(&mut cut);
            assert_eq!(read(&cut), Err(DatagramError::Length), "{control}");
        }
        assert_eq!(FaultCode::from_code(0), None);
        assert_eq!(FaultCode::from_code(6), None);
        // An answer is never longer than the datagram that it answers.
        const { assert!(ACK_LEN < UNTAGGED_LEN + RELIABLE_LEN + CRC_LEN) };
    }
}
