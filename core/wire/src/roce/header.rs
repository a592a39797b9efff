//! The base transport header (BTH, 9.2) and its extension headers (9.3, 9.4, 9.5).

use core::fmt;
use core::time::Duration;

use thiserror::Error;
use zerocopy::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DEFAULT_PKEY, MASK_24};

/// Bytes of a BTH.
pub const BTH_LEN: usize = 12;
/// Bytes of the longest header: BTH, DETH and immediate data are shorter than BTH and AtomicETH.
pub const MAX_HEADER: usize = BTH_LEN + size_of::<AtomicLayout>();

const SOLICITED: u8 = 0x80;
const MIGRATED: u8 = 0x40;
const FECN: u8 = 0x80;
const BECN: u8 = 0x40;
const ACK_REQUEST: u8 = 0x80;
const VERSION_MASK: u8 = 0x0f;
const CNP: u8 = 0x81;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct BthLayout {
    opcode: u8,
    flags: u8,
    pkey: U16,
    dest_qp: U32,
    psn: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RethLayout {
    va: U64,
    rkey: U32,
    len: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AtomicLayout {
    va: U64,
    rkey: U32,
    swap_add: U64,
    compare: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DethLayout {
    qkey: U32,
    src_qp: U32,
}

const _: () = assert!(size_of::<BthLayout>() == BTH_LEN && MAX_HEADER == 40);

/// The transport service of a queue pair: the upper three bits of the opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// The operation: the lower five bits of the opcode (table 38).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(
    missing_docs,
    reason = "the names are those of the specification's table"
)]
pub enum Op {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImm = 0x03,
    SendOnly = 0x04,
    SendOnlyImm = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImm = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImm = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Ack = 0x11,
    AtomicAck = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 23] = [
        Op::SendFirst,
        Op::SendMiddle,
        Op::SendLast,
        Op::SendLastImm,
        Op::SendOnly,
        Op::SendOnlyImm,
        Op::WriteFirst,
        Op::WriteMiddle,
        Op::WriteLast,
        Op::WriteLastImm,
        Op::WriteOnly,
        Op::WriteOnlyImm,
        Op::ReadRequest,
        Op::ReadResponseFirst,
        Op::ReadResponseMiddle,
        Op::ReadResponseLast,
        Op::ReadResponseOnly,
        Op::Ack,
        Op::AtomicAck,
        Op::CompareSwap,
        Op::FetchAdd,
        Op::SendLastInvalidate,
        Op::SendOnlyInvalidate,
    ];

    /// A packet of a Send.
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Op::SendFirst
                | Op::SendMiddle
                | Op::SendLast
                | Op::SendLastImm
                | Op::SendOnly
                | Op::SendOnlyImm
                | Op::SendLastInvalidate
                | Op::SendOnlyInvalidate
        )
    }

    /// A packet of an RDMA Write.
    pub const fn is_write(self) -> bool {
        matches!(
            self,
            Op::WriteFirst
                | Op::WriteMiddle
                | Op::WriteLast
                | Op::WriteLastImm
                | Op::WriteOnly
                | Op::WriteOnlyImm
        )
    }

    /// A packet of an answer to a Read.
    pub const fn is_read_response(self) -> bool {
        matches!(
            self,
            Op::ReadResponseFirst
                | Op::ReadResponseMiddle
                | Op::ReadResponseLast
                | Op::ReadResponseOnly
        )
    }

    /// From the responder to the requester.
    pub const fn is_response(self) -> bool {
        self.is_read_response() || matches!(self, Op::Ack | Op::AtomicAck)
    }

    /// It begins a message.
    pub const fn is_first(self) -> bool {
        matches!(
            self,
            Op::SendFirst
                | Op::SendOnly
                | Op::SendOnlyImm
                | Op::SendOnlyInvalidate
                | Op::WriteFirst
                | Op::WriteOnly
                | Op::WriteOnlyImm
                | Op::ReadRequest
                | Op::CompareSwap
                | Op::FetchAdd
                | Op::ReadResponseFirst
                | Op::ReadResponseOnly
        )
    }

    /// It ends a message.
    pub const fn is_last(self) -> bool {
        !matches!(
            self,
            Op::SendFirst
                | Op::SendMiddle
                | Op::WriteFirst
                | Op::WriteMiddle
                | Op::ReadResponseFirst
                | Op::ReadResponseMiddle
        )
    }

    /// It has a RETH.
    pub const fn has_reth(self) -> bool {
        matches!(
            self,
            Op::WriteFirst | Op::WriteOnly | Op::WriteOnlyImm | Op::ReadRequest
        )
    }

    /// It has an AETH.
    pub const fn has_aeth(self) -> bool {
        matches!(
            self,
            Op::ReadResponseFirst
                | Op::ReadResponseLast
                | Op::ReadResponseOnly
                | Op::Ack
                | Op::AtomicAck
        )
    }

    /// It has immediate data.
    pub const fn has_immediate(self) -> bool {
        matches!(
            self,
            Op::SendLastImm | Op::SendOnlyImm | Op::WriteLastImm | Op::WriteOnlyImm
        )
    }

    /// It has an AtomicETH.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Op::CompareSwap | Op::FetchAdd)
    }

    /// It has an IETH.
    pub const fn invalidates(self) -> bool {
        matches!(self, Op::SendLastInvalidate | Op::SendOnlyInvalidate)
    }
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode {
    /// The transport service.
    pub service: Service,
    /// The operation.
    pub op: Op,
}

impl Opcode {
    /// An operation of a reliable connection.
    pub const fn rc(op: Op) -> Self {
        let service = Service::Rc;
        Self { service, op }
    }

    /// An operation of an unreliable connection.
    pub const fn uc(op: Op) -> Self {
        let service = Service::Uc;
        Self { service, op }
    }

    /// An operation of an unreliable datagram.
    pub const fn ud(op: Op) -> Self {
        let service = Service::Ud;
        Self { service, op }
    }

    /// The byte on the wire.
    pub const fn to_byte(self) -> u8 {
        let service = match self.service {
            Service::Rc => 0,
            Service::Uc => 1,
            Service::Ud => 3,
        };
        service << 5 | self.op as u8
    }

    /// The opcode of a byte on the wire; `None` for one that the service does not have.
    pub fn from_byte(byte: u8) -> Option<Self> {
        let op = *Op::ALL.iter().find(|op| **op as u8 == byte & 0x1f)?;
        let service = match byte >> 5 {
            0 => Service::Rc,
            1 if (op.is_send() || op.is_write()) && !op.invalidates() => Service::Uc,
            3 if matches!(op, Op::SendOnly | Op::SendOnlyImm) => Service::Ud,
            _ => return None,
        };
        Some(Self { service, op })
    }
}

/// RDMA extended transport header: the memory of a Write or Read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reth {
    /// The virtual address.
    pub va: u64,
    /// The key of the region.
    pub rkey: u32,
    /// Bytes of the whole operation.
    pub len: u32,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// The virtual address.
    pub va: u64,
    /// The key of the region.
    pub rkey: u32,
    /// The value to swap in, or to add.
    pub swap_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Deth {
    /// The Q_Key, which must be the receiver's.
    pub qkey: u32,
    /// The sender's queue pair.
    pub src_qp: u32,
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// The kind of answer.
    pub syndrome: Syndrome,
    /// The number of messages that the responder has completed, 24 bits.
    pub msn: u32,
}

/// The first byte of an AETH (9.7.5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// Positive. The credit count, 31 where the responder does not count.
    Ack(u8),
    /// The responder has no receive: try again after [`rnr_delay`] of this code.
    RnrNak(u8),
    /// Negative.
    Nak(NakCode),
}

/// Reasons of a negative acknowledgement (table 46).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NakCode {
    /// A packet sequence number was skipped.
    SequenceError,
    /// The request is not valid for this queue pair.
    InvalidRequest,
    /// The memory may not be accessed so.
    RemoteAccess,
    /// The responder failed.
    RemoteOperation,
}

impl Syndrome {
    /// The byte on the wire.
    pub const fn to_byte(self) -> u8 {
        match self {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::RnrNak(timer) => 0x20 | timer & 0x1f,
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }

    /// The syndrome of a byte on the wire; `None` for a reserved one.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        let low = byte & 0x1f;
        Some(match byte >> 5 {
            0 => Syndrome::Ack(low),
            1 => Syndrome::RnrNak(low),
            3 => Syndrome::Nak(match low {
                0 => NakCode::SequenceError,
                1 => NakCode::InvalidRequest,
                2 => NakCode::RemoteAccess,
                3 => NakCode::RemoteOperation,
                _ => return None,
            }),
            _ => return None,
        })
    }
}

/// The time that a receiver-not-ready code stands for (table 45); codes have five bits.
pub const fn rnr_delay(code: u8) -> Duration {
    // In units of 10 microseconds.
    const UNITS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(UNITS[(code & 0x1f) as usize] as u64 * 10)
}

/// The headers of one packet. Those that the opcode does not have are `None`, and are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// What it is.
    pub opcode: Opcode,
    /// The sender asks for an event.
    pub solicited: bool,
    /// The connection is on its primary path.
    pub migrated: bool,
    /// Bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// The partition.
    pub pkey: u16,
    /// Congestion was met on the way.
    pub fecn: bool,
    /// Congestion was met on the way back.
    pub becn: bool,
    /// The receiver's queue pair, 24 bits.
    pub dest_qp: u32,
    /// An answer is wanted.
    pub ack_request: bool,
    /// The packet sequence number, 24 bits.
    pub psn: u32,
    /// Of datagrams.
    pub deth: Option<Deth>,
    /// Of Writes and Reads.
    pub reth: Option<Reth>,
    /// Of atomics.
    pub atomic: Option<AtomicEth>,
    /// Of answers.
    pub aeth: Option<Aeth>,
    /// The value before the operation, of an answer to an atomic.
    pub original: Option<u64>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// The key to invalidate.
    pub invalidate: Option<u32>,
}

/// Why a datagram is no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// Shorter than its headers and padding.
    #[error("packet shorter than its headers")]
    Short,
    /// The transport version is not 0.
    #[error("unknown transport version")]
    Version,
    /// No such opcode.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// A reserved code in its AETH.
    #[error("unknown syndrome {0:#04x}")]
    Syndrome(u8),
}

/// Takes one layout off the front.
fn take<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    rest: &mut &'a [u8],
) -> Result<&'a T, HeaderError> {
    let (layout, after) = T::ref_from_prefix(rest).map_err(|_| HeaderError::Short)?;
    *rest = after;
    Ok(layout)
}

impl Header {
    /// A header without extensions, of the default partition.
    pub const fn new(opcode: Opcode, dest_qp: u32, psn: u32) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp,
            ack_request: false,
            psn,
            deth: None,
            reth: None,
            atomic: None,
            aeth: None,
            original: None,
            immediate: None,
            invalidate: None,
        }
    }

    /// The queue pair that is to send less, if a packet is a congestion notification (CNP, annex A17.9.3).
    pub fn congested_qp(packet: &[u8]) -> Option<u32> {
        let (bth, _) = BthLayout::ref_from_prefix(packet).ok()?;
        (bth.opcode == CNP).then(|| bth.dest_qp.get() & MASK_24)
    }

    /// Appends a congestion notification for the peer's queue pair, without the ICRC: a BTH and 16 reserved bytes.
    pub fn emit_congestion(dest_qp: u32, pkey: u16, out: &mut Vec<u8>) {
        let bth = BthLayout {
            opcode: CNP,
            flags: MIGRATED,
            pkey: U16::new(pkey),
            dest_qp: U32::new(u32::from(BECN) << 24 | dest_qp & MASK_24),
            psn: U32::new(0),
        };
        out.extend_from_slice(bth.as_bytes());
        out.extend_from_slice(&[0; 16]);
    }

    /// Takes a packet apart: its headers and its payload. The ICRC is not part of `packet`.
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), HeaderError> {
        let mut rest = packet;
        let bth: &BthLayout = take(&mut rest)?;
        let opcode = Opcode::from_byte(bth.opcode).ok_or(HeaderError::Opcode(bth.opcode))?;
        if bth.flags & VERSION_MASK != 0 {
            return Err(HeaderError::Version);
        }
        let [congestion, ..] = *bth.dest_qp.as_bytes() else {
            return Err(HeaderError::Short);
        };
        let [request, ..] = *bth.psn.as_bytes() else {
            return Err(HeaderError::Short);
        };
        let mut header = Self {
            solicited: bth.flags & SOLICITED != 0,
            migrated: bth.flags & MIGRATED != 0,
            pad: bth.flags >> 4 & 3,
            pkey: bth.pkey.get(),
            fecn: congestion & FECN != 0,
            becn: congestion & BECN != 0,
            ack_request: request & ACK_REQUEST != 0,
            ..Self::new(opcode, bth.dest_qp.get() & MASK_24, bth.psn.get() & MASK_24)
        };
        let op = opcode.op;
        if opcode.service == Service::Ud {
            let deth: &DethLayout = take(&mut rest)?;
            header.deth = Some(Deth {
                qkey: deth.qkey.get(),
                src_qp: deth.src_qp.get() & MASK_24,
            });
        }
        if op.has_reth() {
            let reth: &RethLayout = take(&mut rest)?;
            header.reth = Some(Reth {
                va: reth.va.get(),
                rkey: reth.rkey.get(),
                len: reth.len.get(),
            });
        }
        if op.is_atomic() {
            let atomic: &AtomicLayout = take(&mut rest)?;
            header.atomic = Some(AtomicEth {
                va: atomic.va.get(),
                rkey: atomic.rkey.get(),
                swap_add: atomic.swap_add.get(),
                compare: atomic.compare.get(),
            });
        }
        if op.has_aeth() {
            let aeth = take::<U32>(&mut rest)?.get();
            let code = (aeth >> 24) as u8;
            header.aeth = Some(Aeth {
                syndrome: Syndrome::from_byte(code).ok_or(HeaderError::Syndrome(code))?,
                msn: aeth & MASK_24,
            });
        }
        if op == Op::AtomicAck {
            header.original = Some(take::<U64>(&mut rest)?.get());
        }
        if op.has_immediate() {
            header.immediate = Some(take::<U32>(&mut rest)?.get());
        }
        if op.invalidates() {
            header.invalidate = Some(take::<U32>(&mut rest)?.get());
        }
        let len = rest.len().checked_sub(header.pad.into());
        let payload = len.and_then(|len| rest.get(..len));
        Ok((header, payload.ok_or(HeaderError::Short)?))
    }

    /// Appends the headers. An extension that the opcode has, and that is `None`, is written as zeros.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let op = self.opcode.op;
        let flag = |set: bool, bit: u8| if set { u32::from(bit) << 24 } else { 0 };
        let set = |set: bool, bit: u8| if set { bit } else { 0 };
        let bth = BthLayout {
            opcode: self.opcode.to_byte(),
            flags: set(self.solicited, SOLICITED)
                | set(self.migrated, MIGRATED)
                | (self.pad & 3) << 4,
            pkey: U16::new(self.pkey),
            dest_qp: U32::new(
                flag(self.fecn, FECN) | flag(self.becn, BECN) | self.dest_qp & MASK_24,
            ),
            psn: U32::new(flag(self.ack_request, ACK_REQUEST) | self.psn & MASK_24),
        };
        out.extend_from_slice(bth.as_bytes());
        if self.opcode.service == Service::Ud {
            let deth = self.deth.unwrap_or(Deth { qkey: 0, src_qp: 0 });
            out.extend_from_slice(&deth.qkey.to_be_bytes());
            out.extend_from_slice(&(deth.src_qp & MASK_24).to_be_bytes());
        }
        if op.has_reth() {
            let reth = self.reth.unwrap_or(Reth {
                va: 0,
                rkey: 0,
                len: 0,
            });
            out.extend_from_slice(&reth.va.to_be_bytes());
            out.extend_from_slice(&reth.rkey.to_be_bytes());
            out.extend_from_slice(&reth.len.to_be_bytes());
        }
        if op.is_atomic() {
            let atomic = self.atomic.unwrap_or(AtomicEth {
                va: 0,
                rkey: 0,
                swap_add: 0,
                compare: 0,
            });
            out.extend_from_slice(&atomic.va.to_be_bytes());
            out.extend_from_slice(&atomic.rkey.to_be_bytes());
            out.extend_from_slice(&atomic.swap_add.to_be_bytes());
            out.extend_from_slice(&atomic.compare.to_be_bytes());
        }
        if op.has_aeth() {
            let word = self.aeth.map_or(0, |aeth| {
                u32::from(aeth.syndrome.to_byte()) << 24 | aeth.msn & MASK_24
            });
            out.extend_from_slice(&word.to_be_bytes());
        }
        if op == Op::AtomicAck {
            out.extend_from_slice(&self.original.unwrap_or(0).to_be_bytes());
        }
        if op.has_immediate() {
            out.extend_from_slice(&self.immediate.unwrap_or(0).to_be_bytes());
        }
        if op.invalidates() {
            out.extend_from_slice(&self.invalidate.unwrap_or(0).to_be_bytes());
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} {:?}, qp {:#08x}, psn {}",
            self.opcode.service, self.opcode.op, self.dest_qp, self.psn
        )?;
        if let Some(reth) = self.reth {
            write!(
                f,
                ", rkey {:#010x}, va {:#x}, {} bytes",
                reth.rkey, reth.va, reth.len
            )?;
        }
        if let Some(aeth) = self.aeth {
            write!(f, ", {:?}, msn {}", aeth.syndrome, aeth.msn)?;
        }
        Ok(())
    }
}
