//! The plain data of verbs: work requests, completions, states, limits and events.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use smallvec::SmallVec;
pub use weft_mem::Access;

pub use crate::errors::{Error, LimitReached, TerminateCode};

/// One scatter/gather element: a range of a registered region, named by the region's local key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address of the first byte in the region's own address space (see `Mr::addr`).
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Local key (the region's `STag`).
    pub lkey: u32,
}

/// A place in the peer's memory: tagged offset and remote key (`STag`), as the peer advertised them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Tagged offset (TO) of the first byte.
    pub addr: u64,
    /// Remote key (the `STag`).
    pub rkey: u32,
}

impl RemoteAddr {
    /// Length of [`RemoteAddr::to_bytes`].
    pub const LEN: usize = 12;

    /// The form for a message to a peer: address, then key, in network order.
    ///
    /// ```
    /// # use weft_rnic::RemoteAddr;
    /// let remote = RemoteAddr { addr: 0x1000, rkey: 0x0102_0304 };
    /// let bytes = remote.to_bytes();
    /// assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0x10, 0, 1, 2, 3, 4]);
    /// assert_eq!(RemoteAddr::from_bytes(bytes), remote);
    /// ```
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Decodes a peer's message. The peer checks the address when it is used.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [addr @ .., _, _, _, _] = bytes;
        let [_, _, _, _, _, _, _, _, rkey @ ..] = bytes;
        RemoteAddr {
            addr: u64::from_be_bytes(addr),
            rkey: u32::from_be_bytes(rkey),
        }
    }
}

/// Inline data up to this costs no allocation: a cache line and the header of a layer above.
pub const INLINE_DATA: usize = 80;
/// Bytes that a work request carries itself.
pub type InlineData = SmallVec<[u8; INLINE_DATA]>;

/// A scatter/gather list.
pub type SgList = SmallVec<[Sge; 2]>;

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Send into the peer's oldest posted receive.
    Send,
    /// Send, and invalidate this `STag` of the peer when the message is complete there.
    SendInvalidate {
        /// The peer's `STag`.
        rkey: u32,
    },
    /// Send with immediate data: both in one receive and one completion. No RFC has such a message: only weft takes it
    /// (docs/spec/rdmap-extensions.md), other peers end the stream. Without data they take it for Immediate Data alone (RFC 7306 6).
    SendImm {
        /// The eight bytes of immediate data, as a number in host order. A program in C sees the low four (see [`Wc::imm`]).
        imm: u64,
    },
    /// RDMA Write: one-sided, the peer's program does not notice. It completes when the transport has its bytes, before the peer has looked at the key:
    /// one with a wrong key "succeeds", and the connection ends a little later. With [`QpInit::remote_completion`](crate::QpInit::remote_completion) it
    /// completes with [`WcStatus::RemAccessErr`]. On a datagram queue pair: RDMA Write-Record, of which the peer's program gets
    /// a completion.
    Write {
        /// The destination of the first byte.
        remote: RemoteAddr,
    },
    /// RDMA Write followed by Immediate Data (RFC 7306 6): completes a receive of the peer.
    WriteImm {
        /// The destination of the first byte.
        remote: RemoteAddr,
        /// The eight bytes of immediate data, as a number in host order. A program in C sees the low four (see [`Wc::imm`]).
        imm: u64,
    },
    /// RDMA Read: one-sided, from the peer's memory into the scatter list.
    Read {
        /// The source of the first byte.
        remote: RemoteAddr,
    },
    /// Atomic fetch and add on eight aligned bytes of the peer; the old value lands in the scatter list.
    FetchAdd {
        /// The eight bytes.
        remote: RemoteAddr,
        /// The addend, modulo 2^64.
        add: u64,
    },
    /// Atomic compare and swap on eight aligned bytes of the peer; the old value lands in the scatter list.
    CompareSwap {
        /// The eight bytes.
        remote: RemoteAddr,
        /// The value that they must have.
        compare: u64,
        /// The value that they then get.
        swap: u64,
    },
    /// Atomic swap on eight aligned bytes of the peer; the old value lands in the scatter list.
    Swap {
        /// The eight bytes.
        remote: RemoteAddr,
        /// Their new value.
        value: u64,
    },
    /// Invalidate a memory window of our own, in the order of the send queue.
    LocalInvalidate {
        /// The window's `STag`.
        rkey: u32,
    },
    /// Bind a memory window to a range of a region, in the order of the send queue.
    BindMw {
        /// The window's current key; its low eight bits are replaced by those of `new_rkey`.
        window: u32,
        /// The key that the window has from then on.
        new_rkey: u32,
        /// The region.
        region: u32,
        /// First byte, in the region's address space.
        addr: u64,
        /// Length in bytes; a window of type 1 is bound to nothing with 0.
        len: u64,
        /// The rights of the peer through the window.
        access: Access,
    },
}

impl SendOp {
    pub(crate) const fn opcode(&self) -> WcOpcode {
        match self {
            SendOp::Send | SendOp::SendInvalidate { .. } | SendOp::SendImm { .. } => WcOpcode::Send,
            SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::Write,
            SendOp::Read { .. } => WcOpcode::Read,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::CompareSwap { .. } => WcOpcode::CompareSwap,
            SendOp::Swap { .. } => WcOpcode::Swap,
            SendOp::LocalInvalidate { .. } => WcOpcode::LocalInvalidate,
            SendOp::BindMw { .. } => WcOpcode::BindMw,
        }
    }
    /// Whether the peer's program sees the operation.
    pub(crate) const fn is_two_sided(&self) -> bool {
        matches!(
            self,
            SendOp::Send
                | SendOp::SendImm { .. }
                | SendOp::SendInvalidate { .. }
                | SendOp::WriteImm { .. }
        )
    }
    /// Whether the scatter/gather list is written to, not read.
    pub const fn is_sink(&self) -> bool {
        matches!(self, SendOp::Read { .. }) || self.is_atomic()
    }
    pub(crate) const fn is_atomic(&self) -> bool {
        matches!(
            self,
            SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. } | SendOp::Swap { .. }
        )
    }
}

/// A send work request. Unsignaled unless [`SendWr::signaled`] or the queue pair says otherwise.
#[derive(Clone, Debug)]
pub struct SendWr {
    /// The caller's number; it comes back in the completion.
    pub id: u64,
    /// The operation.
    pub op: SendOp,
    /// The local memory: the source of the data, or the destination for reads and atomics.
    pub sges: SgList,
    /// Data taken at posting time in place of the list.
    pub inline: Option<InlineData>,
    /// Whether success generates a completion. Failures always do.
    pub signaled: bool,
    /// Wait for all earlier reads and atomics first.
    pub fence: bool,
    /// Raise a solicited event at the peer.
    pub solicited: bool,
    /// The shared receive queue that takes the message, on a queue pair whose peer is of an XRC domain
    /// ([`XrcDomain`](crate::XrcDomain)).
    pub srq: Option<u32>,
}

impl SendWr {
    /// A request with this operation, no data, and no flags.
    pub fn new(id: u64, op: SendOp) -> Self {
        SendWr {
            id,
            op,
            sges: SgList::new(),
            inline: None,
            signaled: false,
            fence: false,
            solicited: false,
            srq: None,
        }
    }
    /// A Send.
    pub fn send(id: u64) -> Self {
        Self::new(id, SendOp::Send)
    }
    /// A Send with Invalidate.
    pub fn send_invalidate(id: u64, rkey: u32) -> Self {
        Self::new(id, SendOp::SendInvalidate { rkey })
    }
    /// A Send with immediate data, see [`SendOp::SendImm`].
    pub fn send_imm(id: u64, imm: u64) -> Self {
        Self::new(id, SendOp::SendImm { imm })
    }
    /// An RDMA Write.
    pub fn write(id: u64, remote: RemoteAddr) -> Self {
        Self::new(id, SendOp::Write { remote })
    }
    /// An RDMA Write with Immediate Data.
    pub fn write_imm(id: u64, remote: RemoteAddr, imm: u64) -> Self {
        Self::new(id, SendOp::WriteImm { remote, imm })
    }
    /// An RDMA Read.
    pub fn read(id: u64, remote: RemoteAddr) -> Self {
        Self::new(id, SendOp::Read { remote })
    }
    /// An atomic fetch and add; needs a scatter list of eight bytes.
    pub fn fetch_add(id: u64, remote: RemoteAddr, add: u64) -> Self {
        Self::new(id, SendOp::FetchAdd { remote, add })
    }
    /// An atomic compare and swap; needs a scatter list of eight bytes.
    pub fn compare_swap(id: u64, remote: RemoteAddr, compare: u64, swap: u64) -> Self {
        Self::new(
            id,
            SendOp::CompareSwap {
                remote,
                compare,
                swap,
            },
        )
    }
    /// An atomic swap; needs a scatter list of eight bytes.
    pub fn swap(id: u64, remote: RemoteAddr, value: u64) -> Self {
        Self::new(id, SendOp::Swap { remote, value })
    }
    /// Invalidate a window of our own.
    pub fn local_invalidate(id: u64, rkey: u32) -> Self {
        Self::new(id, SendOp::LocalInvalidate { rkey })
    }
    /// Append one scatter/gather element.
    #[must_use]
    pub fn sge(mut self, sge: Sge) -> Self {
        self.sges.push(sge);
        self
    }
    /// Append several scatter/gather elements.
    #[must_use]
    pub fn sges(mut self, sges: &[Sge]) -> Self {
        self.sges.extend_from_slice(sges);
        self
    }
    /// Take the data now: `data` may change as soon as the call that posts this returns.
    #[must_use]
    pub fn inline(mut self, data: &[u8]) -> Self {
        self.inline = Some(InlineData::from_slice(data));
        self
    }
    /// Ask for a completion.
    #[must_use]
    pub fn signaled(mut self) -> Self {
        self.signaled = true;
        self
    }
    /// Wait for all earlier reads and atomics before this one starts.
    #[must_use]
    pub fn fence(mut self) -> Self {
        self.fence = true;
        self
    }
    /// Raise a solicited event at the peer.
    #[must_use]
    pub fn solicited(mut self) -> Self {
        self.solicited = true;
        self
    }
    /// Bytes of payload; `None` when the list is longer than a message can be.
    pub(crate) fn len(&self) -> Option<u32> {
        match &self.inline {
            Some(data) => u32::try_from(data.len()).ok(),
            None => sg_len(&self.sges),
        }
    }
}

/// Total bytes of a list; `None` past 2^32 - 1.
pub(crate) fn sg_len(sges: &[Sge]) -> Option<u32> {
    (sges.iter().map(|sge| sge.len)).try_fold(0, u32::checked_add)
}

/// The part of a list that covers `len` bytes from `offset` on.
pub(crate) fn sub_list(sges: &[Sge], offset: u32, len: u32) -> impl Iterator<Item = Sge> + '_ {
    let mut skip = offset;
    let mut left = len;
    sges.iter().filter_map(move |sge| {
        if skip >= sge.len {
            skip -= sge.len;
            return None;
        }
        let take = (sge.len - skip).min(left);
        let part = Sge {
            addr: sge.addr.wrapping_add(u64::from(skip)),
            len: take,
            lkey: sge.lkey,
        };
        skip = 0;
        left -= take;
        (take > 0).then_some(part)
    })
}

/// A receive work request.
#[derive(Clone, Debug)]
pub struct RecvWr {
    /// The caller's number; it comes back in the completion.
    pub id: u64,
    /// The memory for the message.
    pub sges: SmallVec<[Sge; 1]>,
}

impl RecvWr {
    /// A request without memory: good for zero-length messages and immediate data.
    pub fn new(id: u64) -> Self {
        RecvWr {
            id,
            sges: SmallVec::new(),
        }
    }
    /// Append one scatter element.
    #[must_use]
    pub fn sge(mut self, sge: Sge) -> Self {
        self.sges.push(sge);
        self
    }
}

/// The handling of a message that finds no receive posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rnr {
    /// It ends the stream with a Terminate, as iWARP has it (RFC 5041 section 7.1).
    #[default]
    Terminate,
    /// It waits until one is posted, and so do all later requests of the peer; responses to our own Reads and atomics do not wait. The peer may set the
    /// limit ([`Qp::set_rnr_retry`](crate::Qp::set_rnr_retry)).
    /// A message that still waits when the peer ends the connection is lost.
    Wait,
}

/// The status of a completed work request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WcStatus {
    /// Done.
    #[default]
    Success,
    /// The message was longer than the receive.
    LocLenErr,
    /// The queue pair could not carry out the request.
    LocQpOpErr,
    /// The scatter/gather list names memory that is not ours to use.
    LocProtErr,
    /// The queue pair had failed or was closed before this request was carried out.
    WrFlushErr,
    /// The window could not be bound.
    MwBindErr,
    /// The peer refused access to its memory.
    RemAccessErr,
    /// The peer found the request invalid.
    RemInvReqErr,
    /// The peer could not carry out the request.
    RemOpErr,
    /// The peer could not be reached, or was lost: for [`Qp::fail`](crate::ext::QpExt::fail) from layers that join queue pairs.
    RetryExcErr,
    /// The peer had no receive for too long.
    RnrRetryExcErr,
    /// The peer gave the request up.
    RemAbortErr,
    /// Anything else.
    GeneralErr,
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WcStatus::Success => "success",
            WcStatus::LocLenErr => "local length error",
            WcStatus::LocQpOpErr => "local QP operation error",
            WcStatus::LocProtErr => "local protection error",
            WcStatus::WrFlushErr => "work request flushed",
            WcStatus::MwBindErr => "memory window bind error",
            WcStatus::RemAccessErr => "remote access error",
            WcStatus::RemInvReqErr => "remote invalid request",
            WcStatus::RemOpErr => "remote operation error",
            WcStatus::RetryExcErr => "transport retries exceeded",
            WcStatus::RnrRetryExcErr => "receiver-not-ready retries exceeded",
            WcStatus::RemAbortErr => "aborted by the peer",
            WcStatus::GeneralErr => "general error",
        })
    }
}

/// Which operation a completion is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WcOpcode {
    /// Send, of any kind.
    #[default]
    Send,
    /// RDMA Write, with or without immediate data.
    Write,
    /// RDMA Read.
    Read,
    /// Fetch and add.
    FetchAdd,
    /// Compare and swap.
    CompareSwap,
    /// Swap.
    Swap,
    /// Local invalidate.
    LocalInvalidate,
    /// Bind memory window.
    BindMw,
    /// A message arrived.
    Recv,
    /// Immediate data arrived (after the data of its write).
    RecvWithImm,
    /// An RDMA Write-Record arrived, or a part of it: its `wr_id` is for [`UdQp::take_record`](crate::UdQp::take_record), its `byte_len` says how
    /// many bytes are valid.
    WriteRecord,
}

impl fmt::Display for WcOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WcOpcode::Send => "send",
            WcOpcode::Write => "RDMA Write",
            WcOpcode::Read => "RDMA Read",
            WcOpcode::FetchAdd => "fetch and add",
            WcOpcode::CompareSwap => "compare and swap",
            WcOpcode::Swap => "swap",
            WcOpcode::LocalInvalidate => "local invalidate",
            WcOpcode::BindMw => "bind of a window",
            WcOpcode::Recv => "receive",
            WcOpcode::RecvWithImm => "receive with immediate data",
            WcOpcode::WriteRecord => "RDMA Write-Record",
        })
    }
}

/// A work completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// The number from the work request.
    pub wr_id: u64,
    /// The status. With an error, only `wr_id`, `opcode`, `qp_num` and `vendor_err` are valid.
    pub status: WcStatus,
    /// Which operation.
    pub opcode: WcOpcode,
    /// Bytes received (receives, reads, atomics), sent, or written by the Write whose immediate data was received.
    pub byte_len: u32,
    /// The queue pair.
    pub qp_num: u32,
    /// Immediate data: eight bytes (RFC 7306). C has four (`imm_data`, in network order): a peer on the drop-in libibverbs sees `htonl(imm
    /// as u32)` and not the upper half, and its immediate data arrives here as a number up to 2^32 - 1.
    pub imm: Option<u64>,
    /// Our `STag` that the peer's Send with Invalidate invalidated.
    pub invalidated: Option<u32>,
    /// The sender of a received datagram.
    pub source: Option<UdSource>,
    /// When a Terminate ended the stream: layer << 12 | type << 8 | code, as on the wire; else 0. [`TerminateCode`] has it in words.
    pub vendor_err: u32,
    /// The number of requests of its queue that it completes: its own, and for a send earlier ones without a completion.
    pub wqes_retired: u32,
}

impl Wc {
    /// The completion itself if its request succeeded, else an error that says which request failed and why.
    ///
    /// ```
    /// # use weft_rnic::{Wc, WcStatus};
    /// let failed = Wc { wr_id: 7, qp_num: 3, status: WcStatus::RemAccessErr, vendor_err: 0x1101, ..Wc::default() };
    /// assert_eq!(
    ///     failed.ok().unwrap_err().to_string(),
    ///     "work request 7 (send) of queue pair 3: remote access error, DDP tagged: base or bounds violation"
    /// );
    /// assert_eq!(format!("{:?}", failed.ok().unwrap_err()), format!("WcError({})", failed.ok().unwrap_err()));
    /// assert!(Wc::default().ok().is_ok());
    /// ```
    ///
    /// # Errors
    /// [`WcError`] unless the status is [`WcStatus::Success`].
    pub fn ok(self) -> Result<Wc, WcError> {
        match self.status {
            WcStatus::Success => Ok(self),
            _ => Err(WcError(self)),
        }
    }
}

/// A work request that failed, see [`Wc::ok`]. `{:?}` prints the text too, for programs that end with an error of `main`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WcError(pub Wc);

impl fmt::Debug for WcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WcError({self})")
    }
}

impl fmt::Display for WcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wc {
            wr_id,
            opcode,
            qp_num,
            status,
            vendor_err,
            ..
        } = self.0;
        write!(
            f,
            "work request {wr_id} ({opcode}) of queue pair {qp_num}: {status}"
        )?;
        if vendor_err != 0 {
            write!(f, ", {}", TerminateCode(vendor_err))?;
        }
        Ok(())
    }
}

impl std::error::Error for WcError {}

/// The sender of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdSource {
    /// Its address and UDP port.
    pub addr: SocketAddr,
    /// Its queue pair.
    pub qp_num: u32,
}

/// The states of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QpState {
    /// Created: receives can be posted, not yet connected.
    Init = 0,
    /// Connected.
    Rts = 1,
    /// The program has asked to disconnect; queued requests are still sent.
    Closing = 2,
    /// Ended, in order or not; everything posted is flushed.
    Error = 3,
}

impl QpState {
    pub(crate) const fn from_u8(v: u8) -> Self {
        match v {
            0 => QpState::Init,
            1 => QpState::Rts,
            2 => QpState::Closing,
            _ => QpState::Error,
        }
    }
}

/// Why a post was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostReason {
    /// The queue has its full number of requests outstanding. Unsignaled sends keep their places until a signaled one after them has completed.
    #[error("the queue is full: max_send_wr sends or max_recv_wr receives are outstanding")]
    Full,
    /// More scatter/gather elements than the queue was created for.
    #[error("{asked} scatter/gather elements, but the queue was created with max_sge {max}")]
    TooManySges {
        /// Elements of the request.
        asked: u32,
        /// Elements that the queue was created for.
        max: u32,
    },
    /// More inline data than the queue pair was created for.
    #[error("{asked} inline bytes, but the queue pair was created with max_inline {max}")]
    InlineTooLong {
        /// Bytes of the request.
        asked: u32,
        /// Bytes that the queue pair was created for.
        max: u32,
    },
    /// Inline data with an operation that does not support it, or together with a scatter/gather list.
    #[error("inline data goes with Sends and Writes, and without a scatter/gather list")]
    Inline,
    /// The list is longer than 2^32 - 1 bytes, not eight bytes for an atomic, or longer than a datagram can be.
    #[error("the scatter/gather list has a length that this operation cannot have")]
    Length,
    /// The queue pair is not connected, or closing.
    #[error("the queue pair is not connected")]
    State,
    /// The peer takes no RDMA Reads and atomics on this connection (its IRD is 0).
    #[error("the peer takes no reads or atomics on this connection")]
    NoReads,
    /// Not an operation of this kind of queue pair.
    #[error("datagram queue pairs have no such operation")]
    Opcode,
    /// A datagram queue pair in the reliable mode sends to one receiver at a time.
    #[error("a reliable queue pair sends to no multicast group")]
    Group,
    /// The queue pair takes its receives from a shared receive queue.
    #[error("the queue pair uses a shared receive queue")]
    UsesSrq,
    /// An RNIC has no such operation.
    #[error("the device has no such operation")]
    Unsupported,
    /// An RNIC, or its driver, has refused the request with this error number.
    #[error("the device refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    Device(i32),
}

/// A refused post: requests before `index` were taken, that one and those after it were not.
/// `{:?}` prints the text too, for programs that end with an error of `main`.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {index} refused: {reason}")]
pub struct PostError {
    /// Index of the refused request.
    pub index: usize,
    /// Why.
    pub reason: PostReason,
}

impl fmt::Debug for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostError({self})")
    }
}

/// Settings of one connection's wire protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Ask for `CRC32c` on every FPDU (RFC 5044 7.1: on when either side asks). Default on.
    pub crc: bool,
    /// Ask the peer for markers in what we receive. Default off; on costs a copy.
    pub recv_markers: bool,
    /// MPA revision that we start with: 1 (RFC 5044) or 2 (RFC 6581). Default 2.
    pub revision: u8,
    /// Longest ULPDU that we send, in bytes with the DDP header: 256 to 65,532. Default 65,532.
    pub max_ulpdu: u32,
    /// Limit for TCP connect and MPA start-up together. Default 10 s.
    pub timeout: Duration,
    /// Offer or take the peer-to-peer mode of RFC 6581, in which the responder may send first. Default on.
    pub peer_to_peer: bool,
    /// How long a closing connection may make no progress with sending, and then wait for the peer's end. Default 5 s.
    pub linger: Duration,
    /// Keeps the TCP connection of one that has moved to shared memory, so that its addresses stay occupied. Default on; off saves a descriptor.
    pub keep_tcp: bool,
}

impl Default for LinkOptions {
    fn default() -> Self {
        LinkOptions {
            crc: true,
            recv_markers: false,
            revision: 2,
            max_ulpdu: 65_532,
            timeout: Duration::from_secs(10),
            peer_to_peer: true,
            linger: Duration::from_secs(5),
            keep_tcp: true,
        }
    }
}

/// Use of shared memory with peers on the same host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalMode {
    /// Never: everything uses TCP.
    Off,
    /// If both sides support it; otherwise TCP, see [`Path::reason`].
    #[default]
    Auto,
    /// Only there: connections that would stay on TCP fail.
    Require,
}

impl LocalMode {
    /// The setting in the environment: `WEFT_LOCAL=off|auto|require`; `auto` if it is not set.
    ///
    /// # Errors
    /// [`Error::Setting`] for any other value.
    pub fn from_env() -> Result<Self, Error> {
        Ok(match weft_sys::settings::LOCAL.read()?.as_deref() {
            Some("off") => LocalMode::Off,
            Some("require") => LocalMode::Require,
            _ => LocalMode::Auto,
        })
    }
}

/// The transport of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// `local` (shared memory), `tcp`, or `sim`.
    pub transport: &'static str,
    /// Why it is not shared memory, where that was tried or could be expected.
    pub reason: Option<String>,
}

/// Limits of a device: a program, or a flood of peers, cannot take more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Memory regions and windows together.
    pub max_mr: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// Work requests of one queue.
    pub max_wr: u32,
    /// Scatter/gather elements of one work request.
    pub max_sge: u32,
    /// Inline bytes of one work request.
    pub max_inline: u32,
    /// RDMA Reads and atomics outstanding on one connection, in each direction.
    pub max_rd_atomic: u16,
    /// Accepted connections whose start-up is not complete, over all listeners.
    pub max_pending: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_qp: 65_536,
            max_cq: 65_536,
            max_srq: 65_536,
            max_mr: 1 << 20,
            max_cqe: 1 << 22,
            max_wr: 1 << 17,
            max_sge: 32,
            max_inline: 4096,
            max_rd_atomic: 128,
            max_pending: 1024,
        }
    }
}

impl Limits {
    /// Refuses the depths of a queue pair that are over a limit.
    pub(crate) fn check_depths(
        &self,
        sends: u32,
        recvs: u32,
        sges: u32,
        inline: u32,
    ) -> Result<(), Error> {
        LimitReached::check("outstanding sends", "max_wr", sends, self.max_wr)?;
        LimitReached::check("outstanding receives", "max_wr", recvs, self.max_wr)?;
        let elements = "scatter/gather elements of a request";
        LimitReached::check(elements, "max_sge", sges, self.max_sge)?;
        let bytes = "inline bytes of a request";
        LimitReached::check(bytes, "max_inline", inline, self.max_inline)
    }
}

/// The capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Its limits.
    pub limits: Limits,
    /// Name of the transport: `tcp`, `sim`.
    pub transport: &'static str,
    /// Atomic operations (RFC 7306).
    pub atomics: bool,
    /// Immediate data (RFC 7306).
    pub immediate: bool,
    /// Shared receive queues.
    pub srq: bool,
    /// Memory windows.
    pub windows: bool,
}

/// An event of an object, not of a work request. It prints a description, with the Terminate in words.
///
/// ```
/// # use weft_rnic::AsyncEvent;
/// let event = AsyncEvent::QpFatal { qp_num: 2, reason: 4353 };
/// assert_eq!(event.to_string(), "queue pair 2 has failed: DDP tagged: base or bounds violation");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A queue pair's stream ended by an error.
    QpFatal {
        /// Which.
        qp_num: u32,
        /// The Terminate's value, see [`TerminateCode`]; 0 when the connection was cut.
        reason: u32,
    },
    /// The peer tried to use memory that it may not use.
    QpAccessErr {
        /// Which.
        qp_num: u32,
        /// The Terminate's value, see [`TerminateCode`].
        reason: u32,
    },
    /// A completion queue had no room for a completion.
    CqOverrun {
        /// Which.
        cq_num: u32,
    },
    /// A shared receive queue fell below the limit that was armed.
    SrqLimitReached {
        /// Which.
        srq_num: u32,
    },
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            AsyncEvent::QpFatal { qp_num, reason } => {
                write!(
                    f,
                    "queue pair {qp_num} has failed: {}",
                    TerminateCode(reason)
                )
            }
            AsyncEvent::QpAccessErr { qp_num, reason } => write!(
                f,
                "the peer of queue pair {qp_num} tried to use memory that it may not use: {}",
                TerminateCode(reason)
            ),
            AsyncEvent::CqOverrun { cq_num } => {
                write!(f, "completion queue {cq_num} had no room for a completion")
            }
            AsyncEvent::SrqLimitReached { srq_num } => write!(
                f,
                "shared receive queue {srq_num} has fewer receives than its limit"
            ),
        }
    }
}

impl fmt::Debug for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncEvent({self})")
    }
}

/// Counters of one connection: how its bytes were moved, and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnCounters {
    /// Payload bytes sent straight from registered memory.
    pub tx_direct: u64,
    /// Payload bytes copied once on their way out: small ones, and all of them with CRC (docs/adr/0003).
    pub tx_copied: u64,
    /// Payload bytes received straight into their place.
    pub rx_direct: u64,
    /// Payload bytes copied once on their way in.
    pub rx_copied: u64,
    /// FPDUs sent.
    pub tx_fpdus: u64,
    /// FPDUs received.
    pub rx_fpdus: u64,
    /// System calls that sent.
    pub tx_syscalls: u64,
    /// System calls that received, empty ones as well; on shared memory, looks at the ring.
    pub rx_syscalls: u64,
    /// One-sided operations that we carried out in the peer's memory ourselves (same host).
    pub one_sided: u64,
    /// Bytes that they moved.
    pub one_sided_bytes: u64,
}
