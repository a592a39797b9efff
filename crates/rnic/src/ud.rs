//! Unreliable datagram queue pairs: each send names its destination, each receive says where it came from (datagram-iWARP;
//! docs/spec/dgram.md).
//!
//! Messages are one datagram of up to [`UD_MTU`] bytes; they may be lost, doubled and overtaken. No error of a datagram ends the queue pair: what is
//! damaged, for nobody, with a wrong `Q_Key` or without a posted receive is dropped, and counted.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;
use weft_mem::{Access, MemError, Span};
use weft_wire::dgram::{self, Grh};

use crate::cq::{Cq, CqInner};
use crate::device::{Counted, Pd, PdInner, QpNumber};
use crate::engine::{guarded, on_engine};
use crate::lock::lock;
use crate::qp::{RecvSource, scatter, sub_list};
use crate::srq::{RecvQueue, Srq};
use crate::transport::udp::{PortInner, UdPort};
use crate::types::{
    Error, PostError, PostReason, QpState, RecvWr, SendOp, SendWr, UdSource, Wc, WcOpcode,
    WcStatus, sg_len,
};

/// The longest message of a datagram queue pair, in bytes.
pub const UD_MTU: u32 = dgram::MAX_PAYLOAD as u32;
/// The number of the queue pairs of a multicast group, whatever theirs are (`InfiniBand` 10.5.2).
pub const UD_GROUP: u32 = dgram::GROUP_QP;
/// A key with this bit stands for the sending queue pair's own one (InfiniBand 10.2.5).
const OWN_QKEY: u32 = 1 << 31;
/// No `Q_Key` yet: nothing comes in.
const NO_QKEY: u64 = u64::MAX;

/// What a datagram queue pair is made of.
#[derive(Clone)]
pub struct UdInit {
    /// The UDP port that it uses, alone or with others.
    pub port: UdPort,
    /// Where completions of sends go.
    pub send_cq: Cq,
    /// Where completions of receives go; may be the same queue.
    pub recv_cq: Cq,
    /// Take receives from here, not from a queue of its own.
    pub srq: Option<Srq>,
    /// Sends outstanding at once.
    pub max_send_wr: u32,
    /// Receives outstanding at once.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of one request.
    pub max_sge: u32,
    /// Inline bytes of one request.
    pub max_inline: u32,
    /// Every send makes a completion, signaled or not.
    pub sq_sig_all: bool,
    /// Its number, as for [`QpInit::num`](crate::QpInit::num).
    pub num: Option<u32>,
    /// What senders must know. `None`: nothing is received before [`UdQp::set_qkey`].
    pub qkey: Option<u32>,
    /// Each received message has forty bytes in front in which the addresses are ([`Grh`]), as InfiniBand has it.
    pub grh: bool,
}

impl UdInit {
    /// As [`QpInit::new`](crate::QpInit::new), with a `Q_Key` and without routing headers.
    pub fn new(port: &UdPort, qkey: u32, send_cq: &Cq, recv_cq: &Cq) -> Self {
        UdInit {
            port: port.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
            sq_sig_all: false,
            num: None,
            qkey: Some(qkey),
            grh: false,
        }
    }
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Address and UDP port.
    pub addr: SocketAddr,
    /// The queue pair behind that port.
    pub qp_num: u32,
    /// Its `Q_Key`. With the highest bit set, our queue pair's own key is sent instead.
    pub qkey: u32,
    /// The address of ours that the receiver is to see; `None`: the system chooses.
    pub from: Option<IpAddr>,
}

/// What has gone through a datagram queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdCounters {
    /// Datagrams handed to the kernel.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Dropped: no receive was posted.
    pub no_recv: u64,
    /// Dropped: a wrong `Q_Key`, or none was set yet.
    pub wrong_qkey: u64,
}

#[derive(Default)]
struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    no_recv: AtomicU64,
    wrong_qkey: AtomicU64,
}

/// A datagram for a queue pair.
pub(crate) struct Message<'a> {
    pub(crate) header: dgram::Header,
    /// The payload, behind [`Grh::LEN`] bytes that are free.
    pub(crate) bytes: &'a mut [u8],
    pub(crate) from: SocketAddr,
    pub(crate) to: IpAddr,
}

struct Sends {
    /// Of the last message sent.
    msn: u32,
    /// Sends that the kernel had no room for, oldest first.
    waiting: VecDeque<(SendWr, UdDest)>,
    /// What is being sent.
    datagram: Vec<u8>,
}

pub(crate) struct UdInner {
    num: u32,
    pd: Arc<PdInner>,
    port: Arc<PortInner>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    recv: RecvSource,
    max_send_wr: u32,
    max_sge: u32,
    max_inline: u32,
    sq_sig_all: bool,
    grh: bool,
    qkey: AtomicU64,
    state: AtomicU8,
    sq_used: AtomicU32,
    /// Sends done without a completion, since the last one that made one. Written under the lock of `sends`.
    silent: AtomicU32,
    sends: Mutex<Sends>,
    /// Held by whoever takes a receive until its completion is made; tells whether anybody still wants completions.
    taking: Mutex<bool>,
    counters: Counters,
}

enum Sent {
    Done(WcStatus),
    NoRoom,
}

impl UdInner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    fn post_send(self: &Arc<Self>, wr: &SendWr, to: &UdDest) -> Result<(), PostReason> {
        let len = self.check_post(wr)?;
        let mut sends = lock(&self.sends);
        if self.sq_used.load(Ordering::Relaxed) >= self.max_send_wr {
            return Err(PostReason::Full);
        }
        self.sq_used.fetch_add(1, Ordering::Relaxed);
        if self.state() == QpState::Error {
            self.sent(wr, WcStatus::WrFlushErr, 0);
            return Ok(());
        }
        let sent = if sends.waiting.is_empty() {
            self.transmit(&mut sends, wr, to)
        } else {
            Sent::NoRoom
        };
        match sent {
            Sent::Done(status) => self.sent(wr, status, len),
            Sent::NoRoom => {
                sends.waiting.push_back((wr.clone(), *to));
                if sends.waiting.len() == 1 {
                    self.port.wait_for_room(Arc::downgrade(self));
                }
            }
        }
        Ok(())
    }

    fn check_post(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if !matches!(wr.op, SendOp::Send | SendOp::SendImm { .. }) {
            return Err(PostReason::Opcode);
        }
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges);
        }
        if let Some(data) = &wr.inline
            && (data.len() > self.max_inline as usize || !wr.sges.is_empty())
        {
            return Err(PostReason::Inline);
        }
        wr.len()
            .filter(|len| *len <= UD_MTU)
            .ok_or(PostReason::Length)
    }

    /// Copied: the bytes that the CRC was computed over are the bytes that are sent (docs/adr/0003).
    fn transmit(&self, sends: &mut Sends, wr: &SendWr, to: &UdDest) -> Sent {
        let Sends { msn, datagram, .. } = sends;
        let own = self.qkey.load(Ordering::Relaxed);
        let qkey = match u32::try_from(own) {
            Ok(own) if to.qkey & OWN_QKEY != 0 => own,
            _ => to.qkey,
        };
        let header = dgram::Header {
            dst_qp: to.qp_num,
            src_qp: self.num,
            qkey,
            msn: msn.wrapping_add(1),
            solicited: wr.solicited,
            imm: match wr.op {
                SendOp::SendImm { imm } => Some(imm),
                _ => None,
            },
        };
        datagram.clear();
        header.emit(datagram);
        if let Some(data) = &wr.inline {
            datagram.extend_from_slice(data);
        } else {
            let table = &self.pd.device.table;
            for sge in wr.sges.iter().filter(|sge| sge.len > 0) {
                let copied =
                    table.copy_local_out(self.pd.id, sge.lkey, sge.addr, sge.len, datagram);
                if copied.is_err() {
                    return Sent::Done(WcStatus::LocProtErr);
                }
            }
        }
        dgram::seal(datagram);
        if !self.port.send(datagram, to.addr, to.from) {
            return Sent::NoRoom;
        }
        *msn = header.msn;
        self.counters.sent.fetch_add(1, Ordering::Relaxed);
        Sent::Done(WcStatus::Success)
    }

    /// A send is over.
    fn sent(&self, wr: &SendWr, status: WcStatus, len: u32) {
        self.sq_used.fetch_sub(1, Ordering::Relaxed);
        let failed = status != WcStatus::Success;
        let silent = self.silent.load(Ordering::Relaxed);
        if failed || wr.signaled || self.sq_sig_all {
            self.silent.store(0, Ordering::Relaxed);
            let wc = Wc {
                wr_id: wr.id,
                status,
                opcode: WcOpcode::Send,
                byte_len: if failed { 0 } else { len },
                qp_num: self.num,
                places: 1 + silent,
                ..Wc::default()
            };
            deliver(&self.send_cq, wc, failed);
        } else {
            self.silent.store(silent + 1, Ordering::Relaxed);
        }
    }

    /// The kernel may have room again: `false` when it has too little.
    pub(crate) fn send_on(self: &Arc<Self>) -> bool {
        let mut sends = lock(&self.sends);
        while let Some((wr, to)) = sends.waiting.pop_front() {
            match self.transmit(&mut sends, &wr, &to) {
                Sent::Done(status) => self.sent(&wr, status, wr.len().unwrap_or(0)),
                Sent::NoRoom => {
                    sends.waiting.push_front((wr, to));
                    self.port.wait_for_room(Arc::downgrade(self));
                    return false;
                }
            }
        }
        true
    }

    /// A datagram has come in for this queue pair.
    pub(crate) fn arrived(&self, message: &mut Message<'_>) {
        let taking = lock(&self.taking);
        if !*taking || self.state() == QpState::Error {
            return;
        }
        let header = &message.header;
        if u64::from(header.qkey) != self.qkey.load(Ordering::Relaxed) {
            self.counters.wrong_qkey.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let wr = match &self.recv {
            RecvSource::Own(queue) => queue.take().map(|(wr, _)| wr),
            RecvSource::Shared(srq) => srq.take(),
            RecvSource::Twin(_) => None,
        };
        let Some(wr) = wr else {
            self.counters.no_recv.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let bytes = if self.grh {
            let payload = message.bytes.len() - Grh::LEN;
            let grh = Grh {
                source: message.from.ip(),
                dest: message.to,
            };
            if let Some(room) = message.bytes.first_chunk_mut() {
                grh.emit(payload, room);
            }
            &*message.bytes
        } else {
            &message.bytes[Grh::LEN..]
        };
        let status = match self.place(&wr, bytes) {
            Ok(()) => WcStatus::Success,
            Err(MemError::Bounds) => WcStatus::LocLenErr,
            Err(_) => WcStatus::LocProtErr,
        };
        self.counters.received.fetch_add(1, Ordering::Relaxed);
        let wc = Wc {
            wr_id: wr.id,
            status,
            opcode: WcOpcode::Recv,
            byte_len: bytes.len() as u32,
            qp_num: self.num,
            imm: header.imm,
            source: Some(UdSource {
                addr: message.from,
                qp_num: header.src_qp,
            }),
            places: 1,
            ..Wc::default()
        };
        let urgent = header.solicited || status != WcStatus::Success;
        deliver(&self.recv_cq, wc, urgent);
    }

    /// All of it or nothing; [`MemError::Bounds`] when the receive is too short.
    fn place(&self, wr: &RecvWr, bytes: &[u8]) -> Result<(), MemError> {
        let len = bytes.len() as u32;
        if sg_len(&wr.sges).is_none_or(|room| room < len) {
            return Err(MemError::Bounds);
        }
        let local = |sge: crate::Sge| {
            let need = Access::LOCAL_WRITE;
            let table = &self.pd.device.table;
            // A request that is too long for its region is no message that is too long for the request.
            table
                .local(self.pd.id, sge.lkey, sge.addr, sge.len, need)
                .map_err(|_| MemError::Access)
        };
        let spans: Result<SmallVec<[Span; 2]>, _> = sub_list(&wr.sges, 0, len).map(local).collect();
        scatter(&spans?, bytes);
        Ok(())
    }

    fn flush(&self) {
        let mut sends = lock(&self.sends);
        for (wr, _) in std::mem::take(&mut sends.waiting) {
            self.sent(&wr, WcStatus::WrFlushErr, 0);
        }
        drop(sends);
        let taking = lock(&self.taking);
        if let RecvSource::Own(queue) = &self.recv
            && *taking
        {
            for wr in queue.drain() {
                let wc = Wc {
                    wr_id: wr.id,
                    status: WcStatus::WrFlushErr,
                    opcode: WcOpcode::Recv,
                    qp_num: self.num,
                    places: 1,
                    ..Wc::default()
                };
                deliver(&self.recv_cq, wc, true);
            }
        }
    }
}

/// A completion queue without room is of no more use, which its device's event says; the queue pair is not touched by it.
fn deliver(cq: &CqInner, wc: Wc, urgent: bool) {
    cq.push(&[wc], urgent);
    if on_engine() {
        guarded(|| cq.call_hook());
    }
}

/// A datagram queue pair. It sends and receives from the start; dropping it ends that, and what is outstanding makes no completions any
/// more.
pub struct UdQp {
    inner: Arc<UdInner>,
    port: UdPort,
    /// Where it hears multicast groups.
    groups: Mutex<HashMap<SocketAddr, UdPort>>,
    _taken: (Counted, QpNumber),
}

impl UdQp {
    /// The queue pair's number, as senders and completions name it.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// Its port.
    pub fn port(&self) -> &UdPort {
        &self.port
    }

    /// `Rts`, or `Error` after [`UdQp::to_error`].
    pub fn state(&self) -> QpState {
        self.inner.state()
    }

    /// What senders must know from now on.
    pub fn set_qkey(&self, qkey: u32) {
        self.inner.qkey.store(u64::from(qkey), Ordering::Relaxed);
    }

    /// Hear what is sent to [`UD_GROUP`] at this multicast group and port, on these interfaces (their indexes), with the queue pair's `Q_Key`. Others,
    /// in this process too, may hear the same. A group that is heard already stays as it is.
    ///
    /// # Errors
    /// `InvalidInput` for what is no group; as `bind(2)`; as `setsockopt(2)` says of `IP_ADD_MEMBERSHIP` when it can be heard on no interface.
    pub fn attach(&self, group: SocketAddr, interfaces: &[u32]) -> io::Result<()> {
        if !group.ip().is_multicast() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut groups = lock(&self.groups);
        if groups.contains_key(&group) {
            return Ok(());
        }
        let port = UdPort::join(&self.inner.pd.device, group, interfaces)?;
        for cq in self.inner.queues() {
            cq.attach_port(port.inner());
        }
        port.add(UD_GROUP, &self.inner);
        groups.insert(group, port);
        Ok(())
    }

    /// Hear a group no more: `false` if it was not heard.
    pub fn detach(&self, group: SocketAddr) -> bool {
        let port = lock(&self.groups).remove(&group);
        if let Some(port) = &port {
            self.part_from(port, UD_GROUP);
        }
        port.is_some()
    }

    fn part_from(&self, port: &UdPort, num: u32) {
        port.remove(num);
        for cq in self.inner.queues() {
            cq.detach_port(port.inner());
        }
    }

    /// Post a [`SendOp::Send`] or [`SendOp::SendImm`] of at most [`UD_MTU`] bytes. It is complete when the kernel has taken the datagram,
    /// which it mostly has when this returns.
    ///
    /// # Errors
    /// [`PostError`], with index 0. On a queue pair in the error state requests are taken, and flushed.
    pub fn post_send(&self, wr: &SendWr, to: &UdDest) -> Result<(), PostError> {
        let refused = |reason| PostError { index: 0, reason };
        self.inner.post_send(wr, to).map_err(refused)
    }

    /// Whether [`UdQp::post_send`] would take a request like this, given room for it.
    ///
    /// # Errors
    /// As there.
    pub fn check_send(&self, wr: &SendWr) -> Result<(), PostError> {
        match self.inner.check_post(wr) {
            Ok(_) => Ok(()),
            Err(reason) => Err(PostError { index: 0, reason }),
        }
    }

    /// Post receives. They are taken in order, one a message.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let RecvSource::Own(queue) = &self.inner.recv else {
            return Err(PostError {
                index: 0,
                reason: PostReason::UsesSrq,
            });
        };
        let result = queue.post(wrs);
        if self.state() == QpState::Error {
            self.inner.flush();
        }
        result
    }

    /// Everything outstanding is flushed, and so is whatever is posted from now on; datagrams are dropped.
    pub fn to_error(&self) {
        let error = QpState::Error as u8;
        self.inner.state.store(error, Ordering::Release);
        self.inner.flush();
    }

    /// Sends that were posted and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.inner.sq_used.load(Ordering::Relaxed)
    }

    /// What has gone through so far.
    pub fn counters(&self) -> UdCounters {
        let counters = &self.inner.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UdCounters {
            sent: of(&counters.sent),
            received: of(&counters.received),
            no_recv: of(&counters.no_recv),
            wrong_qkey: of(&counters.wrong_qkey),
        }
    }
}

impl Drop for UdQp {
    fn drop(&mut self) {
        let inner = &self.inner;
        self.part_from(&self.port, inner.num);
        for (_, port) in lock(&self.groups).drain() {
            self.part_from(&port, UD_GROUP);
        }
        lock(&inner.sends).waiting.clear();
        // Whoever has a datagram for it in hand is done after this, or drops it.
        *lock(&inner.taking) = false;
        if let RecvSource::Own(queue) = &inner.recv {
            queue.drain();
        }
    }
}

impl UdInner {
    fn queues(&self) -> SmallVec<[&Arc<CqInner>; 2]> {
        let mut queues = SmallVec::from_iter([&self.send_cq]);
        if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
            queues.push(&self.recv_cq);
        }
        queues
    }
}

impl Pd {
    /// A datagram queue pair.
    ///
    /// # Errors
    /// [`Error::Limit`]; [`Error::Invalid`] for a number that is taken, and for a port of another device.
    pub fn create_ud_qp(&self, init: &UdInit) -> Result<UdQp, Error> {
        let device = &self.0.device;
        let limits = &device.limits;
        if init.max_send_wr > limits.max_wr
            || init.max_recv_wr > limits.max_wr
            || init.max_sge > limits.max_sge
            || init.max_inline > limits.max_inline
        {
            return Err(Error::Limit(
                "work requests, elements or inline bytes of a queue pair",
            ));
        }
        if !Arc::ptr_eq(device, &init.port.inner().device) {
            return Err(Error::Invalid("the port is another device's"));
        }
        let count = Counted::take(&device.qps, limits.max_qp, "queue pairs")?;
        let num = QpNumber::take(device, init.num)?;
        let inner = Arc::new(UdInner {
            num: num.num,
            pd: Arc::clone(&self.0),
            port: Arc::clone(init.port.inner()),
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            recv: match &init.srq {
                Some(srq) => RecvSource::Shared(Arc::clone(&srq.0)),
                None => RecvSource::Own(RecvQueue::new(init.max_recv_wr, init.max_sge)),
            },
            max_send_wr: init.max_send_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            grh: init.grh,
            qkey: AtomicU64::new(init.qkey.map_or(NO_QKEY, u64::from)),
            state: AtomicU8::new(QpState::Rts as u8),
            sq_used: AtomicU32::new(0),
            silent: AtomicU32::new(0),
            sends: Mutex::new(Sends {
                msn: 0,
                waiting: VecDeque::new(),
                datagram: Vec::new(),
            }),
            taking: Mutex::new(true),
            counters: Counters::default(),
        });
        for cq in inner.queues() {
            cq.attach_port(&inner.port);
        }
        init.port.add(num.num, &inner);
        Ok(UdQp {
            inner,
            port: init.port.clone(),
            groups: Mutex::default(),
            _taken: (count, num),
        })
    }
}
