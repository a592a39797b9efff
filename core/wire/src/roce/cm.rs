//! Messages of the connection manager (12.6 to 12.9), each in a management datagram (MAD, 13.4) of 256 bytes to queue pair 1.
//!
//! `rdma_cm` puts a header of its own at the front of a request's private data ([`IpHeader`], annex A11), and its port space and port
//! into the service identifier ([`service_id`]).
//!
//! ```
//! use weft_wire::roce::cm::{Mad, Message, Rtu};
//!
//! let rtu = Mad { transaction: 9, message: Message::Rtu(Rtu { local_id: 1, remote_id: 2, private_data: b"hello" }) };
//! let raw = rtu.emit();
//! let Some(Mad { message: Message::Rtu(back), .. }) = Mad::parse(&raw) else { panic!() };
//! assert_eq!(&back.private_data[..5], b"hello");
//! ```

use std::net::IpAddr;

use super::MASK_24;

/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;
/// The queue pair that it goes to, and comes from.
pub const QP: u32 = 1;
/// Its Q_Key.
pub const QKEY: u32 = 0x8001_0000;

const HEADER_LEN: usize = 24;
const BODY_LEN: usize = MAD_LEN - HEADER_LEN;
const ARI_LEN: usize = 72;
const BASE_VERSION: u8 = 1;
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 3;

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;

/// A port space of `rdma_cm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum PortSpace {
    /// Connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
}

/// The service identifier of a port.
pub const fn service_id(space: PortSpace, port: u16) -> u64 {
    (space as u64) << 16 | port as u64
}

/// The port space and port of a service identifier; `None` for one that is not `rdma_cm`'s.
pub fn service(id: u64) -> Option<(PortSpace, u16)> {
    let space = match id >> 16 {
        0x0106 => PortSpace::Tcp,
        0x0111 => PortSpace::Udp,
        _ => return None,
    };
    Some((space, id as u16))
}

/// The addresses at the front of a request's private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// The requester's port.
    pub port: u16,
    /// The requester.
    pub src: IpAddr,
    /// The address that it asked for.
    pub dst: IpAddr,
}

impl IpHeader {
    /// Bytes of it.
    pub const LEN: usize = 36;

    /// The bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[1] = if self.dst.is_ipv4() { 0x40 } else { 0x60 };
        out[2..4].copy_from_slice(&self.port.to_be_bytes());
        for (at, address) in [(4, self.src), (20, self.dst)] {
            match address {
                IpAddr::V4(address) => out[at + 12..at + 16].copy_from_slice(&address.octets()),
                IpAddr::V6(address) => out[at..at + 16].copy_from_slice(&address.octets()),
            }
        }
        out
    }

    /// The header at the front of private data, and what follows.
    pub fn parse(private_data: &[u8]) -> Option<(Self, &[u8])> {
        let (raw, rest) = private_data.split_first_chunk::<{ Self::LEN }>()?;
        let (version, ip_version) = (raw[0] >> 4, raw[1] >> 4);
        let address = |at: usize| {
            let raw: [u8; 16] = core::array::from_fn(|i| raw[at + i]);
            let [.., a, b, c, d] = raw;
            match ip_version {
                4 => Some(IpAddr::from([a, b, c, d])),
                6 => Some(IpAddr::from(raw)),
                _ => None,
            }
        };
        let header = Self {
            port: u16::from_be_bytes([raw[2], raw[3]]),
            src: address(4)?,
            dst: address(20)?,
        };
        (version == 0).then_some((header, rest))
    }
}

/// REQ: asks for a connection (12.6.5). The alternate path, end-to-end contexts and flow control are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req<'a> {
    /// The requester's number of the connection.
    pub local_id: u32,
    /// See [`service_id`].
    pub service_id: u64,
    /// The requester's adapter.
    pub ca_guid: u64,
    /// The requester's queue pair.
    pub qp: u32,
    /// Reads and atomics that the requester takes at once.
    pub responder_resources: u8,
    /// Reads and atomics that it sends at once.
    pub initiator_depth: u8,
    /// How long the requester waits for an answer to its messages: 4.096 us times two to this power.
    pub remote_timeout: u8,
    /// The time in which it answers.
    pub local_timeout: u8,
    /// A reliable connection (0) or an unreliable one (1), two bits.
    pub service: u8,
    /// The first packet sequence number that the responder shall send.
    pub psn: u32,
    /// The retry count of the responder's queue pair.
    pub retry_count: u8,
    /// The retry count of it for receivers that are not ready.
    pub rnr_retry: u8,
    /// The partition.
    pub pkey: u16,
    /// The path MTU: 1 is 256 bytes, 5 is 4,096.
    pub mtu: u8,
    /// How often a message is sent again.
    pub max_cm_retries: u8,
    /// It has a shared receive queue.
    pub srq: bool,
    /// Its GID.
    pub local_gid: [u8; 16],
    /// The responder's GID.
    pub remote_gid: [u8; 16],
    /// The time within which the path brings an acknowledgement, a power as above.
    pub ack_timeout: u8,
    /// 92 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// REP: takes a request (12.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep<'a> {
    /// The responder's number of the connection.
    pub local_id: u32,
    /// The requester's.
    pub remote_id: u32,
    /// The responder's queue pair.
    pub qp: u32,
    /// The first packet sequence number that the requester shall send.
    pub psn: u32,
    /// Reads and atomics that the responder takes at once.
    pub responder_resources: u8,
    /// Reads and atomics that it sends at once.
    pub initiator_depth: u8,
    /// The time in which it acknowledges, a power as in [`Req`].
    pub ack_delay: u8,
    /// The retry count of the requester for receivers that are not ready.
    pub rnr_retry: u8,
    /// It has a shared receive queue.
    pub srq: bool,
    /// The responder's adapter.
    pub ca_guid: u64,
    /// 196 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// RTU: the requester has the answer (12.6.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rtu<'a> {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// 224 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// Which message a [`Rej`] or [`Mra`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum About {
    /// A request.
    Req = 0,
    /// An answer.
    Rep = 1,
    /// Another one.
    Other = 2,
}

impl About {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => About::Req,
            1 => About::Rep,
            _ => About::Other,
        }
    }
}

/// Reasons of a [`Rej`] (table 108).
pub mod reason {
    /// No queue pair.
    pub const NO_QP: u16 = 1;
    /// No resources.
    pub const NO_RESOURCES: u16 = 3;
    /// No answer in time.
    pub const TIMEOUT: u16 = 4;
    /// The service is not supported.
    pub const UNSUPPORTED: u16 = 5;
    /// The communication identifier is not known.
    pub const INVALID_ID: u16 = 6;
    /// No program listens.
    pub const INVALID_SERVICE: u16 = 8;
    /// The type of service is not the listener's.
    pub const INVALID_TRANSPORT: u16 = 9;
    /// The same queue pair already has a connection.
    pub const STALE: u16 = 10;
    /// A GID is not the one of the sender, or of the receiver.
    pub const INVALID_GID: u16 = 12;
    /// The path MTU is none, or too long for the way.
    pub const INVALID_MTU: u16 = 26;
    /// The program refuses.
    pub const CONSUMER: u16 = 28;
}

/// REJ: ends the establishment of a connection (12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej<'a> {
    /// The sender's number of the connection, 0 if it has none.
    pub local_id: u32,
    /// The receiver's, 0 if the sender does not know it.
    pub remote_id: u32,
    /// What is rejected.
    pub about: About,
    /// One of [`reason`].
    pub reason: u16,
    /// Additional information, up to 72 bytes: with [`reason::TIMEOUT`] the sender's adapter (eight bytes), by which the receiver finds the
    /// connection.
    pub ari: &'a [u8],
    /// 148 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// MRA: the answer takes longer (12.6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra<'a> {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// What takes longer.
    pub about: About,
    /// The time that it takes: 4.096 us times two to this power.
    pub service_timeout: u8,
    /// 222 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// DREQ: ends a connection (12.6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq<'a> {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's.
    pub remote_id: u32,
    /// The receiver's queue pair.
    pub remote_qp: u32,
    /// 220 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// SIDR_REQ: asks for the datagram queue pair of a service (12.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq<'a> {
    /// The requester's number of the request.
    pub request_id: u32,
    /// The partition.
    pub pkey: u16,
    /// See [`service_id`].
    pub service_id: u64,
    /// 216 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// SIDR_REP: the answer (12.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep<'a> {
    /// The requester's number of the request.
    pub request_id: u32,
    /// One of [`crate::sidr::status`].
    pub status: u8,
    /// The queue pair.
    pub qp: u32,
    /// See [`service_id`].
    pub service_id: u64,
    /// Its Q_Key.
    pub qkey: u32,
    /// 136 bytes, fewer when it is emitted.
    pub private_data: &'a [u8],
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each has a type of its name")]
pub enum Message<'a> {
    Req(Req<'a>),
    Rep(Rep<'a>),
    Rtu(Rtu<'a>),
    Rej(Rej<'a>),
    Mra(Mra<'a>),
    Dreq(Dreq<'a>),
    /// The answer to a DREQ (12.6.11).
    Drep(Rtu<'a>),
    SidrReq(SidrReq<'a>),
    SidrRep(SidrRep<'a>),
}

/// A management datagram of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad<'a> {
    /// The sender's number of the exchange; an answer has that of the message that it answers.
    pub transaction: u64,
    /// The contents.
    pub message: Message<'a>,
}

/// Fields of a body, by their offset in it.
struct Body([u8; BODY_LEN]);

impl Body {
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }

    /// 24 bits, with a byte behind them.
    fn put_24(&mut self, at: usize, value: u32, behind: u8) {
        self.put(at, (value << 8 | u32::from(behind)).to_be_bytes());
    }

    fn ids(&mut self, local: u32, remote: u32) {
        self.put(0, local.to_be_bytes());
        self.put(4, remote.to_be_bytes());
    }

    /// What is too long for the field is cut.
    fn private_data(&mut self, at: usize, data: &[u8]) {
        let len = data.len().min(BODY_LEN - at);
        self.0[at..at + len].copy_from_slice(&data[..len]);
    }
}

/// As [`Body`], to be read.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [u8; BODY_LEN]);

impl<'a> Fields<'a> {
    fn get<const N: usize>(self, at: usize) -> [u8; N] {
        core::array::from_fn(|i| self.0[at + i])
    }

    fn byte(self, at: usize) -> u8 {
        self.0[at]
    }

    fn word(self, at: usize) -> u32 {
        u32::from_be_bytes(self.get(at))
    }

    fn long(self, at: usize) -> u64 {
        u64::from_be_bytes(self.get(at))
    }

    fn short(self, at: usize) -> u16 {
        u16::from_be_bytes(self.get(at))
    }

    fn rest(self, at: usize) -> &'a [u8] {
        &self.0[at..]
    }
}

impl<'a> Mad<'a> {
    /// The datagram. Private data that is longer than its field is cut.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut body = Body([0; BODY_LEN]);
        let attribute = match &self.message {
            Message::Req(req) => {
                req.emit(&mut body);
                REQ
            }
            Message::Rep(rep) => {
                rep.emit(&mut body);
                REP
            }
            Message::Rtu(rtu) => {
                rtu.emit(&mut body);
                RTU
            }
            Message::Drep(drep) => {
                drep.emit(&mut body);
                DREP
            }
            Message::Rej(rej) => {
                body.ids(rej.local_id, rej.remote_id);
                let ari = rej.ari.get(..ARI_LEN).unwrap_or(rej.ari);
                body.put(8, [(rej.about as u8) << 6, (ari.len() as u8) << 1]);
                body.private_data(12, ari);
                body.put(10, rej.reason.to_be_bytes());
                body.private_data(84, rej.private_data);
                REJ
            }
            Message::Mra(mra) => {
                body.ids(mra.local_id, mra.remote_id);
                body.put(8, [(mra.about as u8) << 6, mra.service_timeout << 3]);
                body.private_data(10, mra.private_data);
                MRA
            }
            Message::Dreq(dreq) => {
                body.ids(dreq.local_id, dreq.remote_id);
                body.put_24(8, dreq.remote_qp, 0);
                body.private_data(12, dreq.private_data);
                DREQ
            }
            Message::SidrReq(req) => {
                body.put(0, req.request_id.to_be_bytes());
                body.put(4, req.pkey.to_be_bytes());
                body.put(8, req.service_id.to_be_bytes());
                body.private_data(16, req.private_data);
                SIDR_REQ
            }
            Message::SidrRep(rep) => {
                body.put(0, rep.request_id.to_be_bytes());
                body.put(4, [rep.status]);
                body.put_24(8, rep.qp, 0);
                body.put(12, rep.service_id.to_be_bytes());
                body.put(20, rep.qkey.to_be_bytes());
                body.private_data(96, rep.private_data);
                SIDR_REP
            }
        };
        let mut out = [0; MAD_LEN];
        out[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        out[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        out[16..18].copy_from_slice(&attribute.to_be_bytes());
        out[HEADER_LEN..].copy_from_slice(&body.0);
        out
    }

    /// The message in a datagram; `None` for one that is not the connection manager's.
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        let (header, body) = datagram.split_first_chunk::<HEADER_LEN>()?;
        let body = Fields(body.first_chunk()?);
        if header[..4] != [BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND] {
            return None;
        }
        let message = match u16::from_be_bytes([header[16], header[17]]) {
            REQ => Message::Req(Req::parse(body)),
            REP => Message::Rep(Rep::parse(body)),
            RTU => Message::Rtu(Rtu::parse(body)),
            DREP => Message::Drep(Rtu::parse(body)),
            REJ => Message::Rej(Rej {
                local_id: body.word(0),
                remote_id: body.word(4),
                about: About::from_bits(body.byte(8) >> 6),
                reason: body.short(10),
                ari: body
                    .rest(12)
                    .get(..ARI_LEN.min(usize::from(body.byte(9) >> 1)))?,
                private_data: body.rest(84),
            }),
            MRA => Message::Mra(Mra {
                local_id: body.word(0),
                remote_id: body.word(4),
                about: About::from_bits(body.byte(8) >> 6),
                service_timeout: body.byte(9) >> 3,
                private_data: body.rest(10),
            }),
            DREQ => Message::Dreq(Dreq {
                local_id: body.word(0),
                remote_id: body.word(4),
                remote_qp: body.word(8) >> 8,
                private_data: body.rest(12),
            }),
            SIDR_REQ => Message::SidrReq(SidrReq {
                request_id: body.word(0),
                pkey: body.short(4),
                service_id: body.long(8),
                private_data: body.rest(16),
            }),
            SIDR_REP => Message::SidrRep(SidrRep {
                request_id: body.word(0),
                status: body.byte(4),
                qp: body.word(8) >> 8,
                service_id: body.long(12),
                qkey: body.word(20),
                private_data: body.rest(96),
            }),
            _ => return None,
        };
        Some(Mad {
            transaction: u64::from_be_bytes(core::array::from_fn(|i| header[8 + i])),
            message,
        })
    }
}

impl<'a> Req<'a> {
    fn emit(&self, body: &mut Body) {
        body.put(0, self.local_id.to_be_bytes());
        body.put(8, self.service_id.to_be_bytes());
        body.put(16, self.ca_guid.to_be_bytes());
        body.put_24(32, self.qp & MASK_24, self.responder_resources);
        body.put_24(36, 0, self.initiator_depth);
        let times = (self.remote_timeout & 0x1f) << 3 | (self.service & 3) << 1;
        body.put_24(40, 0, times);
        let retries = (self.local_timeout & 0x1f) << 3 | self.retry_count & 7;
        body.put_24(44, self.psn & MASK_24, retries);
        body.put(48, self.pkey.to_be_bytes());
        body.put(50, [(self.mtu & 0xf) << 4 | self.rnr_retry & 7]);
        body.put(
            51,
            [(self.max_cm_retries & 0xf) << 4 | u8::from(self.srq) << 3],
        );
        // The primary path: the local identifiers are those of no subnet, and the time to live is what the kernel gives.
        body.put(52, [0xff; 4]);
        body.put(56, self.local_gid);
        body.put(72, self.remote_gid);
        body.put(93, [64]);
        body.put(95, [(self.ack_timeout & 0x1f) << 3]);
        body.private_data(140, self.private_data);
    }

    fn parse(body: Fields<'a>) -> Self {
        Self {
            local_id: body.word(0),
            service_id: body.long(8),
            ca_guid: body.long(16),
            qp: body.word(32) >> 8,
            responder_resources: body.byte(35),
            initiator_depth: body.byte(39),
            remote_timeout: body.byte(43) >> 3,
            service: body.byte(43) >> 1 & 3,
            psn: body.word(44) >> 8,
            local_timeout: body.byte(47) >> 3,
            retry_count: body.byte(47) & 7,
            pkey: body.short(48),
            mtu: body.byte(50) >> 4,
            rnr_retry: body.byte(50) & 7,
            max_cm_retries: body.byte(51) >> 4,
            srq: body.byte(51) & 8 != 0,
            local_gid: body.get(56),
            remote_gid: body.get(72),
            ack_timeout: body.byte(95) >> 3,
            private_data: body.rest(140),
        }
    }
}

impl<'a> Rep<'a> {
    fn emit(&self, body: &mut Body) {
        body.ids(self.local_id, self.remote_id);
        body.put_24(12, self.qp & MASK_24, 0);
        body.put_24(20, self.psn & MASK_24, 0);
        body.put(24, [self.responder_resources, self.initiator_depth]);
        let srq = u8::from(self.srq) << 4;
        body.put(
            26,
            [
                (self.ack_delay & 0x1f) << 3,
                (self.rnr_retry & 7) << 5 | srq,
            ],
        );
        body.put(28, self.ca_guid.to_be_bytes());
        body.private_data(36, self.private_data);
    }

    fn parse(body: Fields<'a>) -> Self {
        Self {
            local_id: body.word(0),
            remote_id: body.word(4),
            qp: body.word(12) >> 8,
            psn: body.word(20) >> 8,
            responder_resources: body.byte(24),
            initiator_depth: body.byte(25),
            ack_delay: body.byte(26) >> 3,
            rnr_retry: body.byte(27) >> 5,
            srq: body.byte(27) & 0x10 != 0,
            ca_guid: body.long(28),
            private_data: body.rest(36),
        }
    }
}

impl<'a> Rtu<'a> {
    fn emit(&self, body: &mut Body) {
        body.ids(self.local_id, self.remote_id);
        body.private_data(8, self.private_data);
    }

    fn parse(body: Fields<'a>) -> Self {
        Self {
            local_id: body.word(0),
            remote_id: body.word(4),
            private_data: body.rest(8),
        }
    }
}
