//! Queue pairs and work requests.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use weft_cverbs::{
    IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_QPT_UD, IBV_SEND_FENCE,
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, Zeroed, ibv_ah, ibv_ah_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_qp_state, ibv_recv_wr, ibv_send_wr, ibv_send_wr_wr,
    ibv_send_wr_wr_atomic, ibv_send_wr_wr_rdma, ibv_send_wr_wr_ud, ibv_sge,
};

use crate::context::{Context, Keeper, Pd};
use crate::error::{Error, last, status};
use crate::info::{Gid, GidKind, Link, Port};
use crate::life::{Handle, Kind};
use crate::memory::{Access, Named, Remote, Sge};
use crate::queue::{Cq, list, receive};
use crate::srq::Srq;

/// The kind of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpKind {
    /// Reliable, connected.
    Rc,
    /// Datagrams.
    Ud,
}

/// What a queue pair is made of.
#[derive(Clone, Copy)]
pub struct QpInit<'a> {
    /// Its kind.
    pub kind: QpKind,
    /// Where its sends complete.
    pub send_cq: &'a Cq,
    /// Where its receives complete.
    pub recv_cq: &'a Cq,
    /// Where it takes its receives from, if not from a queue of its own.
    pub srq: Option<&'a Srq>,
    /// Work requests in each queue.
    pub max_wr: u32,
    /// Pieces of memory of each.
    pub max_sge: u32,
    /// Bytes that can be sent inline.
    pub max_inline: u32,
}

impl<'a> QpInit<'a> {
    /// A reliable one with sixteen work requests of one piece, and both completions in one queue.
    pub fn new(cq: &'a Cq) -> Self {
        Self {
            kind: QpKind::Rc,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            max_wr: 16,
            max_sge: 1,
            max_inline: 0,
        }
    }

    pub(crate) fn attributes(&self) -> ibv_qp_init_attr {
        let mut init = ibv_qp_init_attr::zeroed();
        (init.send_cq, init.recv_cq) = (self.send_cq.raw(), self.recv_cq.raw());
        init.srq = self.srq.map_or(ptr::null_mut(), Srq::raw);
        init.qp_type = match self.kind {
            QpKind::Rc => IBV_QPT_RC,
            QpKind::Ud => IBV_QPT_UD,
        };
        init.cap.max_send_wr = self.max_wr;
        init.cap.max_send_sge = self.max_sge;
        init.cap.max_inline_data = self.max_inline;
        if self.srq.is_none() {
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (self.max_wr, self.max_sge);
        }
        init
    }

    /// Bytes of its queues, about.
    pub(crate) fn memory(&self) -> usize {
        let wr = size_of::<ibv_send_wr>() + self.max_inline as usize;
        2 * self.max_wr as usize * (wr + self.max_sge as usize * size_of::<Sge<'_>>())
    }
}

/// A queue pair.
pub struct Qp {
    qp: Handle<ibv_qp>,
    number: u32,
    kind: QpKind,
    max_inline: u32,
    pd: Pd,
    _queues: (Cq, Cq, Option<Srq>),
    /// The identifier of librdmacm that it belongs to.
    _keeper: Option<Arc<dyn Keeper>>,
}

impl Pd {
    /// A new queue pair.
    ///
    /// # Errors
    /// As `ibv_create_qp`.
    pub fn create_qp(&self, init: &QpInit<'_>) -> Result<Qp, Error> {
        let context = self.context();
        let calling = context.enter()?;
        let calls = &context.libraries().verbs;
        init.check(context)?;
        let mut attributes = init.attributes();
        // SAFETY: a domain that lives, and attributes with queues that live.
        let qp = unsafe { (calls.ibv_create_qp)(self.raw(), &raw mut attributes) };
        if qp.is_null() {
            return Err(context.lacks_memory("ibv_create_qp", last(), init.memory()));
        }
        // SAFETY: ours, once.
        let destroy = move |qp| unsafe { (calls.ibv_destroy_qp)(qp) };
        Ok(Qp {
            // SAFETY: a queue pair of the library.
            number: unsafe { (*qp).qp_num },
            qp: Handle::new(context.life(), &calling, Kind::Qp, qp, destroy),
            kind: init.kind,
            max_inline: attributes.cap.max_inline_data,
            pd: self.clone(),
            _queues: init.queues(),
            _keeper: None,
        })
    }
}

impl QpInit<'_> {
    /// Drivers take each object for one of their own.
    pub(crate) fn check(&self, context: &Context) -> Result<(), Error> {
        let queues = [self.send_cq, self.recv_cq].map(Cq::context);
        let all = queues.into_iter().chain(self.srq.map(Srq::context));
        if all.into_iter().all(|other| other.is(context)) {
            return Ok(());
        }
        Err(context.failed("ibv_create_qp with a queue of another device", libc::EINVAL))
    }

    fn queues(&self) -> (Cq, Cq, Option<Srq>) {
        (
            self.send_cq.clone(),
            self.recv_cq.clone(),
            self.srq.cloned(),
        )
    }
}

/// The way to a queue pair, for the transports of InfiniBand.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    port: u8,
    /// `enum ibv_mtu`.
    mtu: u32,
    lid: u16,
    gid: [u8; 16],
    gid_index: u8,
    /// The GID is in each packet (always with `RoCE`).
    global: bool,
}

impl Path {
    /// The way from this port to the GID, which may be one of its own.
    pub fn new(port: &Port, own: &Gid, peer: [u8; 16], peer_lid: u16) -> Self {
        Self {
            port: port.number,
            mtu: port
                .mtu
                .checked_ilog2()
                .map_or(0, |log| log.saturating_sub(7)),
            lid: peer_lid,
            gid: peer,
            gid_index: own.index as u8,
            global: port.link != Link::InfiniBand || own.kind != GidKind::Ib,
        }
    }

    fn address(&self) -> ibv_ah_attr {
        let mut address = ibv_ah_attr::zeroed();
        address.dlid = self.lid;
        address.port_num = self.port;
        address.is_global = self.global.into();
        address.grh.dgid.raw = self.gid;
        address.grh.sgid_index = self.gid_index;
        address.grh.hop_limit = 64;
        address
    }
}

/// An address handle: where datagrams go.
pub struct Ah {
    ah: Handle<ibv_ah>,
    pd: Pd,
}

impl Pd {
    /// A new address handle.
    ///
    /// # Errors
    /// As `ibv_create_ah`.
    pub fn create_ah(&self, path: &Path) -> Result<Ah, Error> {
        let context = self.context();
        let calling = context.enter()?;
        let calls = &context.libraries().verbs;
        let mut address = path.address();
        // SAFETY: a domain that lives, and an address.
        let ah = unsafe { (calls.ibv_create_ah)(self.raw(), &raw mut address) };
        if ah.is_null() {
            return Err(context.failed("ibv_create_ah", last()));
        }
        // SAFETY: ours, once; every queue pair was destroyed before, or is not asked to use it any more.
        let destroy = move |ah| unsafe { (calls.ibv_destroy_ah)(ah) };
        Ok(Ah {
            ah: Handle::new(context.life(), &calling, Kind::Ah, ah, destroy),
            pd: self.clone(),
        })
    }
}

/// What a work request does.
#[derive(Clone, Copy)]
pub enum Op<'a> {
    /// A Send, with immediate data or without.
    Send(Option<u32>),
    /// An RDMA Write, with immediate data or without.
    Write(Remote, Option<u32>),
    /// An RDMA Read.
    Read(Remote),
    /// Swaps the eight bytes if they are as expected; they come back as they were.
    CompareSwap {
        /// Where they are.
        at: Remote,
        /// What is expected.
        compare: u64,
        /// What is stored then.
        swap: u64,
    },
    /// Adds to the eight bytes; they come back as they were.
    FetchAdd {
        /// Where they are.
        at: Remote,
        /// What is added.
        add: u64,
    },
    /// A datagram, with immediate data or without.
    Datagram {
        /// The host.
        to: &'a Ah,
        /// The queue pair.
        qp: u32,
        /// Its key.
        qkey: u32,
        /// Immediate data.
        imm: Option<u32>,
    },
}

/// A work request for the send queue.
#[derive(Clone, Copy)]
pub struct SendWr<'a> {
    /// Its number, for the completion.
    pub id: u64,
    /// What it does.
    pub op: Op<'a>,
    /// The bytes on this side.
    pub sges: &'a [Sge<'a>],
    /// The bytes are copied by the call that posts them.
    pub inline: bool,
    /// It makes a completion.
    pub signaled: bool,
    /// The peer's completion makes an event.
    pub solicited: bool,
    /// It begins after the Reads and atomics before it.
    pub fence: bool,
}

impl<'a> SendWr<'a> {
    /// One that makes a completion.
    pub fn new(id: u64, op: Op<'a>, sges: &'a [Sge<'a>]) -> Self {
        Self {
            id,
            op,
            sges,
            inline: false,
            signaled: true,
            solicited: false,
            fence: false,
        }
    }

    fn raw(&self) -> ibv_send_wr {
        let mut wr = self.op.raw();
        (wr.wr_id, wr.sg_list, wr.num_sge) = (self.id, list(self.sges), self.sges.len() as c_int);
        wr.send_flags = flag(self.inline, IBV_SEND_INLINE)
            | flag(self.signaled, IBV_SEND_SIGNALED)
            | flag(self.solicited, IBV_SEND_SOLICITED)
            | flag(self.fence, IBV_SEND_FENCE);
        wr
    }
}

fn flag(is: bool, flag: u32) -> u32 {
    if is { flag } else { 0 }
}

impl Op<'_> {
    fn raw(self) -> ibv_send_wr {
        let mut wr = ibv_send_wr::zeroed();
        let rdma = |at: Remote| ibv_send_wr_wr {
            rdma: ibv_send_wr_wr_rdma {
                remote_addr: at.addr,
                rkey: at.rkey,
            },
        };
        let atomic = |at: Remote, compare_add, swap| ibv_send_wr_wr {
            atomic: ibv_send_wr_wr_atomic {
                remote_addr: at.addr,
                compare_add,
                swap,
                rkey: at.rkey,
            },
        };
        let with = |imm: Option<u32>, with, without| if imm.is_some() { with } else { without };
        let imm;
        (wr.opcode, imm) = match self {
            Op::Send(imm) => (with(imm, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND), imm),
            Op::Write(at, imm) => {
                wr.wr = rdma(at);
                (
                    with(imm, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE),
                    imm,
                )
            }
            Op::Read(at) => {
                wr.wr = rdma(at);
                (IBV_WR_RDMA_READ, None)
            }
            Op::CompareSwap { at, compare, swap } => {
                wr.wr = atomic(at, compare, swap);
                (IBV_WR_ATOMIC_CMP_AND_SWP, None)
            }
            Op::FetchAdd { at, add } => {
                wr.wr = atomic(at, add, 0);
                (IBV_WR_ATOMIC_FETCH_AND_ADD, None)
            }
            Op::Datagram { to, qp, qkey, imm } => {
                let (ah, remote_qpn, remote_qkey) = (to.ah.raw(), qp, qkey);
                wr.wr.ud = ibv_send_wr_wr_ud {
                    ah,
                    remote_qpn,
                    remote_qkey,
                };
                (with(imm, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND), imm)
            }
        };
        wr.imm_data = imm.unwrap_or(0).to_be();
        wr
    }
}

/// A work request for the send queue, whose memory is named by keys.
pub struct Request<'a> {
    /// Its number, for the completion.
    pub id: u64,
    /// What it does.
    pub op: Op<'a>,
    /// The bytes on this side.
    pub data: Data<'a>,
    /// It makes a completion.
    pub signaled: bool,
    /// The peer's completion makes an event.
    pub solicited: bool,
    /// It begins after the Reads and atomics before it.
    pub fence: bool,
}

/// Work requests that are posted with one call of the driver, at most.
pub const LIST: usize = 16;

impl Request<'_> {
    /// In C's form; `inline` is the element of bytes that are copied.
    fn raw(&self, inline: &mut Named) -> ibv_send_wr {
        let mut wr = self.op.raw();
        let elements = match self.data {
            Data::Named(named) => named,
            Data::Inline(bytes) => {
                *inline = Named::new(bytes.as_ptr().addr() as u64, bytes.len() as u32, 0);
                std::slice::from_ref(inline)
            }
        };
        // A `Named` is an `ibv_sge` (`repr(transparent)`), and the call only reads the list.
        wr.sg_list = elements.as_ptr().cast::<ibv_sge>().cast_mut();
        wr.num_sge = elements.len() as c_int;
        wr.wr_id = self.id;
        wr.send_flags = flag(matches!(self.data, Data::Inline(_)), IBV_SEND_INLINE)
            | flag(self.signaled, IBV_SEND_SIGNALED)
            | flag(self.solicited, IBV_SEND_SOLICITED)
            | flag(self.fence, IBV_SEND_FENCE);
        wr
    }
}

/// The bytes of a [`Request`].
#[derive(Clone, Copy)]
pub enum Data<'a> {
    /// In registered memory.
    Named(&'a [Named]),
    /// Copied by the call that posts them.
    Inline(&'a [u8]),
}

/// Reads and atomics of each side on their way; every device that has them takes one.
const RD_ATOMIC: u8 = 1;
/// 0.64 ms, after which a message without a receive is tried again.
const RNR_TIMER: u8 = 12;
/// 67 ms: 4.096 us * 2^14.
const TIMEOUT: u8 = 14;
/// Always again.
const RNR_RETRY: u8 = 7;
const RETRIES: u8 = 7;

/// The states that a queue pair goes through, and their names.
const INIT: (ibv_qp_state, &str) = (IBV_QPS_INIT, "INIT");
const RTR: (ibv_qp_state, &str) = (IBV_QPS_RTR, "RTR");
const RTS: (ibv_qp_state, &str) = (IBV_QPS_RTS, "RTS");

impl Qp {
    /// That of an identifier of librdmacm, the keeper.
    pub(crate) fn of_cm(
        qp: Handle<ibv_qp>,
        number: u32,
        max_inline: u32,
        init: &QpInit<'_>,
        pd: &Pd,
        keeper: Arc<dyn Keeper>,
    ) -> Self {
        Self {
            qp,
            number,
            kind: init.kind,
            max_inline,
            pd: pd.clone(),
            _queues: init.queues(),
            _keeper: Some(keeper),
        }
    }

    /// Whether its device was removed, or has failed: then it is destroyed, and every call fails.
    pub fn is_gone(&self) -> bool {
        self.qp.with(|_| ()).is_err()
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes that can be sent inline; the device may allow more than was asked for.
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// To this state, with the attributes of the mask.
    fn modify(
        &self,
        (state, name): (ibv_qp_state, &str),
        attributes: &mut ibv_qp_attr,
        mask: u32,
    ) -> Result<(), Error> {
        let context = self.pd.context();
        attributes.qp_state = state;
        let mask = mask | IBV_QP_STATE;
        let modify = context.libraries().verbs.ibv_modify_qp;
        let _calling = context.enter()?;
        // SAFETY: a queue pair that lives, and its attributes.
        let answer = unsafe { modify(self.qp.raw(), attributes, mask as c_int) };
        status(answer).map_err(|errno| context.failed(&format!("ibv_modify_qp to {name}"), errno))
    }

    /// From RESET to INIT, on this port; peers may do what `access` says, as far as their keys allow it.
    ///
    /// # Errors
    /// As `ibv_modify_qp`.
    pub fn init(&self, port: &Port, access: Access) -> Result<(), Error> {
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.port_num = port.number;
        attributes.qp_access_flags = access.bits();
        let mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(INIT, &mut attributes, mask)
    }

    /// From INIT to RTS, connected to the queue pair `peer`; both count their packets from 0.
    ///
    /// # Errors
    /// As `ibv_modify_qp`.
    pub fn connect(&self, path: &Path, peer: u32) -> Result<(), Error> {
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.ah_attr = path.address();
        attributes.path_mtu = path.mtu;
        attributes.dest_qp_num = peer;
        attributes.max_dest_rd_atomic = RD_ATOMIC;
        attributes.min_rnr_timer = RNR_TIMER;
        let mask = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(RTR, &mut attributes, mask)?;
        attributes.timeout = TIMEOUT;
        attributes.retry_cnt = RETRIES;
        attributes.rnr_retry = RNR_RETRY;
        attributes.max_rd_atomic = RD_ATOMIC;
        let mask = IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(RTS, &mut attributes, mask)
    }

    /// From RESET to RTS, for datagrams with this key.
    ///
    /// # Errors
    /// As `ibv_modify_qp`.
    pub fn datagrams(&self, port: &Port, qkey: u32) -> Result<(), Error> {
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.port_num = port.number;
        attributes.qkey = qkey;
        let mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        self.modify(INIT, &mut attributes, mask)?;
        self.modify(RTR, &mut attributes, 0)?;
        self.modify(RTS, &mut attributes, IBV_QP_SQ_PSN)
    }

    /// Why the driver must not see the work request: it would take what it finds for an address handle of its own, or copy more than it has room for.
    fn check(&self, wr: &SendWr<'_>) -> Option<&'static str> {
        let fits = match (self.kind, wr.op) {
            (QpKind::Ud, Op::Datagram { to, .. }) => to.pd.context().is(self.pd.context()),
            (QpKind::Rc, op) => !matches!(op, Op::Datagram { .. }),
            (QpKind::Ud, _) => false,
        };
        let bytes: usize = wr.sges.iter().map(|sge| sge.0.length as usize).sum();
        if !fits {
            Some("ibv_post_send of an operation of another kind of queue pair")
        } else if wr.inline && bytes > self.max_inline as usize {
            Some("ibv_post_send of more inline data than the queue pair takes")
        } else {
            None
        }
    }

    /// Posts a work request to the send queue.
    ///
    /// # Errors
    /// As `ibv_post_send`; `EINVAL` for an operation that this kind of queue pair does not have, and for too many inline bytes.
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<(), Error> {
        let context = self.pd.context();
        if let Some(why) = self.check(wr) {
            return Err(context.failed(why, libc::EINVAL));
        }
        let (mut wr, mut bad) = (wr.raw(), ptr::null_mut());
        let call = context.ops().post_send;
        let call = call.ok_or_else(|| context.failed("ibv_post_send", libc::EOPNOTSUPP))?;
        let qp = &self.qp;
        // SAFETY: the table's own call, a queue pair that lives, and a work request with its list.
        let answer = qp.with(|qp| unsafe { call(qp, &raw mut wr, &raw mut bad) })?;
        status(answer).map_err(|errno| context.failed("ibv_post_send", errno))
    }

    /// Posts requests whose memory is named by keys, or whose bytes are copied by this call: up to [`LIST`] with one call of the driver.
    ///
    /// # Errors
    /// As `ibv_post_send`; `EINVAL` as in [`Qp::post_send`]. With the index of the first request that was not posted.
    pub fn post(&self, requests: &[Request<'_>]) -> Result<(), (usize, Error)> {
        for (number, requests) in requests.chunks(LIST).enumerate() {
            let posted = match requests {
                // Without room for a list, which would have to be filled with zeros.
                [_] => self.post_list::<1>(requests),
                _ => self.post_list::<LIST>(requests),
            };
            posted.map_err(|(index, error)| (number * LIST + index, error))?;
        }
        Ok(())
    }

    fn post_list<const MOST: usize>(&self, requests: &[Request<'_>]) -> Result<(), (usize, Error)> {
        let context = self.pd.context();
        let mut wrs = [ibv_send_wr::zeroed(); MOST];
        let mut inline = [Named::NONE; MOST];
        // What comes before a request that is refused is posted.
        let mut refused = None;
        let mut count = 0;
        for (request, inline) in requests.iter().zip(&mut inline) {
            if let Some(why) = self.refuses(request) {
                refused = Some((count, context.failed(why, libc::EINVAL)));
                break;
            }
            wrs[count] = request.raw(inline);
            count += 1;
        }
        if count > 0 {
            let base = wrs.as_mut_ptr();
            for at in 1..count {
                // SAFETY: two of the list.
                unsafe { (*base.add(at - 1)).next = base.add(at) };
            }
            let mut bad = ptr::null_mut();
            let failed = |errno| context.failed("ibv_post_send", errno);
            let call = context.ops().post_send;
            let call = call.ok_or_else(|| (0, failed(libc::EOPNOTSUPP)))?;
            let qp = &self.qp;
            // SAFETY: the table's own call, a queue pair that lives, and work requests with their lists. The driver reads only inline data, which are borrowed.
            let answer = qp.with(|qp| unsafe { call(qp, base, &raw mut bad) });
            let answer = status(answer.map_err(|error| (0, error))?);
            answer.map_err(|errno| {
                let of = |wr: &ibv_send_wr| ptr::eq(wr, bad);
                (wrs.iter().position(of).unwrap_or(0), failed(errno))
            })?;
        }
        refused.map_or(Ok(()), Err)
    }

    /// As [`Qp::check`].
    fn refuses(&self, request: &Request<'_>) -> Option<&'static str> {
        if self.kind != QpKind::Rc || matches!(request.op, Op::Datagram { .. }) {
            return Some("ibv_post_send of an operation of another kind of queue pair");
        }
        match request.data {
            Data::Inline(bytes) if bytes.len() > self.max_inline as usize => {
                Some("ibv_post_send of more inline data than the queue pair takes")
            }
            _ => None,
        }
    }

    /// Posts a receive into memory that is named by keys.
    ///
    /// # Errors
    /// As `ibv_post_recv`.
    pub fn post_recv_named(&self, id: u64, named: &[Named]) -> Result<(), Error> {
        self.receive(receive(id, named.as_ptr().cast(), named.len()))
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// As `ibv_post_recv`.
    pub fn post_recv(&self, id: u64, sges: &[Sge<'_>]) -> Result<(), Error> {
        self.receive(receive(id, list(sges), sges.len()))
    }

    fn receive(&self, mut wr: ibv_recv_wr) -> Result<(), Error> {
        let (context, mut bad) = (self.pd.context(), ptr::null_mut());
        let call = context.ops().post_recv;
        let call = call.ok_or_else(|| context.failed("ibv_post_recv", libc::EOPNOTSUPP))?;
        let qp = &self.qp;
        // SAFETY: as in `post_send`.
        let answer = qp.with(|qp| unsafe { call(qp, &raw mut wr, &raw mut bad) })?;
        status(answer).map_err(|errno| context.failed("ibv_post_recv", errno))
    }
}
