//! Queue pairs of RoCE v2: InfiniBand's packets in UDP datagrams (the machines are [`weft_proto::roce`], the codecs `weft_wire::roce`). Datagram queue
//! pairs are in `ud`, connected ones here.
//!
//! A program moves such a queue pair as InfiniBand's `modify_qp` does: [`RoceQp::receive_from`] is the step to RTR, [`RoceQp::send_with`] the one to RTS.
//! Memory, receive queues and completion queues are those of the device's other queue pairs.
//!
//! From the bottom up: `siblings`, the processes that share an address; `port`, the socket that the queue pairs of one local address share, with `shared`,
//! its part for siblings; `train`, packets that the kernel gets together; `tx` and `rx`,
//! the two directions of a connected queue pair; `cm` and `sidr`, the connection manager. One lock for each connected queue pair, `core`, is held while
//! its packets are made, sent and placed. Locks are taken in the order receiver of the port, `core`, lists of the port.

mod admit;
mod cm;
mod connections;
mod dial;
mod fault;
mod params;
mod port;
mod questions;
mod rx;
mod shared;
mod siblings;
mod sidr;
mod terms;
mod train;
mod tx;
mod ud;

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use weft_mem::{Access, KeyLock, Keys};
use weft_proto::dgram::Now;
pub use weft_proto::roce::Change as RoceChange;
use weft_proto::roce::{Config, Connection, State, Status, supports};
use weft_sys::udp::path_mtu;
use weft_wire::rdmap::{OperationError, ProtectionError, TermError};
use weft_wire::roce::{
    DEFAULT_PKEY, Header, ICRC_LEN, MASK_24, MAX_HEADER, NakCode, PORT, Service,
};

use crate::device::{Counted, DeviceInner, Pd, PdInner, QpNumber};
use crate::lock::{add_alone, lock};
use crate::qp::{Limits, RecvSource, may_be_put_off, term_code, to_proto};
use crate::queues::Queues;
use crate::timer;
use crate::types::{
    AsyncEvent, Error, INLINE_DATA, PostError, PostReason, QpState, RecvWr, SendOp, SendWr, Wc,
    WcStatus,
};
pub use cm::{
    ROCE_REJECT_DATA, ROCE_REPLY_DATA, ROCE_REQUEST_DATA, RoceConn, RoceListening, RoceRequest,
};
use fault::Faulty;
pub use fault::{RoceFault, RoceFaults};
pub use params::{RoceInit, RocePath, RoceSend};
pub use port::RocePort;
use port::{Arrival, Member, PortInner};
pub use sidr::{RoceLookup, RoceLookupRequest, RoceServing};
pub use terms::{RoceConnect, RoceEnd, RoceEvent, RoceTerms};
use train::Train;
pub use ud::{RoceUdCounters, RoceUdInit, RoceUdQp};

const UDP_LEN: usize = 8;
/// The path MTUs of InfiniBand.
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

/// Payload of the longest packet that fits IP packets of `ip_mtu` bytes, a path MTU of InfiniBand; `None` if none does.
pub fn roce_mtu(ip_mtu: u32, is_ipv6: bool) -> Option<u32> {
    let ip = if is_ipv6 { 40 } else { 20 };
    let around = ip + UDP_LEN + MAX_HEADER + ICRC_LEN;
    let fits = |mtu: &&u32| **mtu as usize + around <= ip_mtu as usize;
    MTUS.iter().rev().find(fits).copied()
}

/// Packets on their way at once, at most.
const WINDOW: u32 = 256;
/// A peer is told of congestion no more often, as adapters do it.
const NOTICE_EVERY: Duration = Duration::from_micros(50);

/// The counters of a queue pair of RoCE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceCounters {
    /// Packets sent, and those sent again.
    pub sent: u64,
    /// Packets received from the peer.
    pub received: u64,
    /// Packets dropped that came from another address than the peer's.
    pub stray: u64,
    /// Notifications of congestion received.
    pub congested: u64,
}

#[derive(Default)]
struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    stray: AtomicU64,
    congested: AtomicU64,
}

/// A request in the send queue.
pub(crate) struct Slot {
    wr: SendWr,
    /// Why it failed on this side.
    fault: Option<WcStatus>,
    /// Its data are kept when they are sent: the program may take the memory back before the peer has acknowledged them.
    keeps: bool,
}

/// What its lock protects.
pub(crate) struct Core {
    conn: Connection<Slot>,
    /// The way to the peer, once there is one.
    way: Option<Way>,
    /// Requests may be posted.
    sends: bool,
    /// The receive of the message in progress, and its status if the connection ends.
    recv: Option<RecvWr>,
    spoiled: WcStatus,
    train: Train,
    keys: Keys,
    notices: Notices,
    faulty: Option<Box<Faulty>>,
    /// Posts since the port's polls were so many.
    posts: u32,
    seen_polls: u32,
    /// Sends done without a completion.
    silent: u32,
    /// A completion queue had no room for a completion: the queue pair is to end.
    overrun: bool,
    /// When the engine looks at it.
    alarm: Option<Instant>,
    /// Some of what is owed waits for the next look at what has come, or for room in the socket.
    waits: bool,
    /// The owner has not dropped it.
    live: bool,
    /// The connection of the manager whose peer has not said that it has our answer, or 0.
    unheard: u32,
    /// A packet says so, and the manager does not know it yet; or 0.
    heard: u32,
}

/// Notifications of congestion to the peer.
#[derive(Default)]
struct Notices {
    last: Option<Now>,
    owed: bool,
}

impl Notices {
    /// A packet has met congestion.
    fn marked(&mut self, now: Now) {
        let may = |last| now.saturating_sub(last) >= NOTICE_EVERY;
        if self.last.is_none_or(may) {
            (self.last, self.owed) = (Some(now), true);
        }
    }
}

impl AsMut<Keys> for Core {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
}

/// Where packets go, and who sends them.
#[derive(Clone)]
struct Way {
    port: Arc<PortInner>,
    path: RocePath,
}

pub(crate) struct RoceInner {
    num: u32,
    pd: Arc<PdInner>,
    queues: Queues,
    recv: RecvSource,
    service: Service,
    limits: Limits,
    access: AtomicU32,
    state: AtomicU8,
    counters: Counters,
    core: KeyLock<Core>,
}

/// A connected queue pair of RoCE v2. Dropping it ends it without a word; outstanding requests get no completions.
pub struct RoceQp {
    inner: Arc<RoceInner>,
    /// The port, once it has one.
    port: Mutex<Option<RocePort>>,
    _taken: (Counted, QpNumber),
}

impl Pd {
    /// A queue pair of RoCE v2.
    ///
    /// # Errors
    /// [`Error::Limit`]; [`Error::Invalid`] for a number that is taken or has more than 24 bits.
    pub fn create_roce_qp(&self, init: &RoceInit) -> Result<RoceQp, Error> {
        let device = &self.0.device;
        let limits = &device.limits;
        limits.check_depths(
            init.max_send_wr,
            init.max_recv_wr,
            init.max_sge,
            init.max_inline,
        )?;
        let count = Counted::take(&device.qps, limits.max_qp, "queue pairs", "max_qp")?;
        let num = take_number(device, init.num)?;
        if num.num > MASK_24 || num.num < 2 {
            return Err(Error::Invalid("no number of a queue pair of RoCE"));
        }
        let service = if init.unreliable {
            Service::Uc
        } else {
            Service::Rc
        };
        let inner = Arc::new(RoceInner {
            num: num.num,
            pd: Arc::clone(&self.0),
            queues: Queues::new(&init.send_cq, &init.recv_cq, init.comp_counters.clone()),
            recv: RecvSource::of(init.srq.as_ref(), init.max_recv_wr, init.max_sge),
            service,
            limits: Limits {
                max_send_wr: init.max_send_wr,
                max_sge: init.max_sge,
                max_inline: init.max_inline,
                sq_sig_all: init.sq_sig_all,
                remote_completion: true,
                quiet_end: false,
            },
            access: AtomicU32::new(Access::all().bits()),
            state: AtomicU8::new(QpState::Init as u8),
            counters: Counters::default(),
            core: KeyLock::new(Core {
                conn: Connection::new(config(service, None, WINDOW)),
                way: None,
                sends: false,
                recv: None,
                spoiled: WcStatus::WrFlushErr,
                train: Train::default(),
                keys: Keys::new(&device.table),
                notices: Notices::default(),
                faulty: None,
                posts: 0,
                seen_polls: 0,
                silent: 0,
                overrun: false,
                alarm: None,
                waits: false,
                live: true,
                unheard: 0,
                heard: 0,
            }),
        });
        Ok(RoceQp {
            inner,
            port: Mutex::default(),
            _taken: (count, num),
        })
    }
}

/// This number, or one by which packets find this device.
fn take_number(device: &Arc<DeviceInner>, wanted: Option<u32>) -> Result<QpNumber, Error> {
    if wanted.is_some() {
        return QpNumber::take(device, wanted);
    }
    let siblings = port::siblings(device).map_err(Error::os("taking a slot for the numbers"))?;
    // A device has fewer queue pairs than a slot has numbers, or its limit is wrong.
    let mut numbers = (0..=0xffff).map(|_| siblings.number());
    let taken = numbers.find_map(|num| QpNumber::take(device, Some(num)).ok());
    taken.ok_or(Error::Invalid("all numbers of this device are taken"))
}

/// Where the peer at this address has its port.
fn peer_addr(peer: IpAddr, scope: u32) -> SocketAddr {
    match peer {
        IpAddr::V4(ip) => SocketAddr::from((ip, PORT)),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, PORT, 0, scope).into(),
    }
}

fn scope_of(addr: SocketAddr) -> u32 {
    match addr {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(addr) => addr.scope_id(),
    }
}

fn config(service: Service, path: Option<&RocePath>, window: u32) -> Config {
    Config {
        service,
        dest_qp: path.map_or(0, |path| path.dest_qp),
        pkey: DEFAULT_PKEY,
        mtu: path.map_or(256, |path| path.mtu),
        sq_psn: 0,
        rq_psn: path.map_or(0, |path| path.rq_psn),
        ord: 0,
        ird: path.map_or(0, |path| path.ird.into()),
        timeout: 0,
        retry_count: 0,
        rnr_retry: 0,
        rnr_timer: path.map_or(0, |path| path.rnr_timer),
        window,
    }
}

impl RoceQp {
    /// The queue pair's number, as peers and completions name it.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// An unreliable connection (UC).
    pub fn is_unreliable(&self) -> bool {
        self.inner.service == Service::Uc
    }

    /// `Init` until [`RoceQp::send_with`], `Rts`, or `Error`.
    pub fn state(&self) -> QpState {
        self.inner.state()
    }

    /// Changes how answers are waited for, and what a sender is told to wait while there is no receive.
    pub fn change(&self, change: &RoceChange) {
        self.inner.core.lock().conn.change(change);
    }

    /// From now on its packets have these faults.
    pub fn set_faults(&self, faults: Arc<dyn RoceFaults>) {
        let faulty = Box::new(Faulty::new(faults));
        self.inner.core.lock().faulty = Some(faulty);
    }

    /// The rights that its peer has at most.
    pub fn set_access(&self, access: Access) {
        self.inner.access.store(access.bits(), Ordering::Relaxed);
    }

    /// Requests of this peer are taken from now on (RTR).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a port of another device or an address of another family than its own, an MTU that does not exist or that the way does
    /// not take, and where it has a peer already or has failed.
    pub fn receive_from(&self, port: &RocePort, path: &RocePath) -> Result<(), Error> {
        let inner = &self.inner;
        if !Arc::ptr_eq(&inner.pd.device, &port.inner().device) {
            return Err(Error::Invalid("the port is another device's"));
        }
        let (ours, peer) = (port.local_addr().ip(), path.peer.to_canonical());
        if ours.is_ipv4() != peer.is_ipv4() {
            return Err(Error::Invalid("one address is of IPv4, the other is not"));
        }
        if !MTUS.contains(&path.mtu) {
            return Err(Error::Invalid("no path MTU of InfiniBand"));
        }
        // Without a route, packets are lost until there is one.
        let way = path_mtu(ours, peer_addr(peer, path.scope)).ok();
        let most = way.map(|way| roce_mtu(way, peer.is_ipv6()));
        if most.is_some_and(|most| most.is_none_or(|most| path.mtu > most)) {
            return Err(Error::Invalid(
                "the way to the peer takes no packets of this path MTU",
            ));
        }
        if path.dest_qp > MASK_24 {
            return Err(Error::Invalid("no number of a queue pair of RoCE"));
        }
        {
            let mut kept = lock(&self.port);
            let mut core = inner.core.lock();
            if core.way.is_some() || inner.state() != QpState::Init {
                return Err(Error::Invalid("the queue pair has a peer, or has failed"));
            }
            let window = port.inner().window(path.mtu);
            core.conn = Connection::new(config(inner.service, Some(path), window));
            core.way = Some(Way {
                port: Arc::clone(port.inner()),
                path: RocePath { peer, ..*path },
            });
            *kept = Some(port.clone());
        }
        for cq in inner.queues.each() {
            cq.attach_port(Arc::downgrade(port.inner()) as _);
        }
        let member = Arc::downgrade(inner);
        port.inner().add(inner.num, member);
        Ok(())
    }

    /// A packet of the peer tells the manager that its answer in this connection has come.
    fn await_word(&self, id: u32) {
        self.inner.core.lock().unheard = id;
    }

    /// Requests of ours may be posted from now on (RTS).
    ///
    /// # Errors
    /// [`Error::Invalid`] before [`RoceQp::receive_from`], the second time, and where it has failed.
    pub fn send_with(&self, send: &RoceSend) -> Result<(), Error> {
        let mut core = self.inner.core.lock();
        if core.way.is_none() || core.sends || self.inner.state() != QpState::Init {
            return Err(Error::Invalid(
                "the queue pair has no peer, sends already, or has failed",
            ));
        }
        let retries = (send.retry_count & 7, send.rnr_retry & 7);
        core.conn
            .start_sending(send.sq_psn, send.ord.into(), send.timeout, retries);
        core.sends = true;
        self.inner.set_state(QpState::Rts);
        Ok(())
    }

    /// Posts a request. While a thread polls, only the first post after its poll is sent at once; small ones that follow wait for the next poll, the 64th
    /// post, or the engine's tick, whichever comes first.
    ///
    /// # Errors
    /// [`PostError`], with index 0. In the error state requests are taken, and flushed.
    pub fn post_send(&self, wr: SendWr) -> Result<(), PostError> {
        self.inner.post([wr])
    }

    /// As [`RoceQp::post_send`], several at once.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused; those before it are posted.
    pub fn post_sends(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.inner.post(wrs.iter().cloned())
    }

    /// Checks whether [`RoceQp::post_send`] would take this request, given room for it.
    ///
    /// # Errors
    /// As there.
    pub fn check_send(&self, wr: &SendWr) -> Result<(), PostError> {
        let refused = |reason| PostError { index: 0, reason };
        self.inner.check(wr).map_err(refused)
    }

    /// Posts receives. They are taken in order, one a message.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let RecvSource::Own(queue) = &self.inner.recv else {
            let reason = PostReason::UsesSrq;
            return Err(PostError { index: 0, reason });
        };
        let result = queue.post(wrs);
        if self.state() == QpState::Error {
            let mut core = self.inner.core.lock();
            self.inner.flush_receives(&mut core);
        }
        result
    }

    /// Takes back the receives that are posted, in order, of a queue pair that has never had a peer: another one gets them. Those of a shared queue stay
    /// there.
    pub fn take_receives(&self) -> Vec<RecvWr> {
        match &self.inner.recv {
            RecvSource::Own(queue) => queue.drain().into(),
            RecvSource::Shared(_) | RecvSource::Twin(_) | RecvSource::Xrc(_) => Vec::new(),
        }
    }

    /// Flushes all outstanding requests and all that are posted later; the peer is not told.
    pub fn to_error(&self) {
        let mut core = self.inner.core.lock();
        self.inner.settle(&mut core);
        self.inner.end(&mut core);
        drop(core);
        self.inner.queues.call_hooks();
    }

    /// Sends that were posted and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.inner.core.lock().conn.posted() as u32
    }

    /// The counters so far.
    pub fn counters(&self) -> RoceCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.inner.counters;
        RoceCounters {
            sent: of(&counters.sent),
            received: of(&counters.received),
            stray: of(&counters.stray),
            congested: of(&counters.congested),
        }
    }
}

impl Drop for RoceQp {
    fn drop(&mut self) {
        if let Some(port) = lock(&self.port).take() {
            port.inner().remove(self.inner.num);
            for cq in self.inner.queues.each() {
                cq.detach_port(&**port.inner());
            }
        }
        // A thread with a packet for it finishes before this, or drops it.
        let mut core = self.inner.core.lock();
        self.inner.settle(&mut core);
        core.live = false;
        core.way = None;
        self.inner.end(&mut core);
    }
}

impl RoceInner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    fn device(&self) -> &Arc<DeviceInner> {
        &self.pd.device
    }

    fn check(&self, wr: &SendWr) -> Result<(), PostReason> {
        self.limits.check(wr)?;
        if !supports(self.service, &to_proto(wr).op) || matches!(wr.op, SendOp::Swap { .. }) {
            return Err(PostReason::Unsupported);
        }
        Ok(())
    }

    fn post(self: &Arc<Self>, wrs: impl IntoIterator<Item = SendWr>) -> Result<(), PostError> {
        let mut core = self.core.lock();
        let (mut count, mut bytes, mut refused) = (0, 0_u32, None);
        for wr in wrs {
            match self.enter(&mut core, wr) {
                Ok(len) => (count, bytes) = (count + 1, bytes.saturating_add(len)),
                Err(reason) => {
                    let index = count as usize;
                    refused = Some(PostError { index, reason });
                    break;
                }
            }
        }
        if count > 0 {
            if Self::may_wait(&mut core, count, bytes) {
                self.put_off(&mut core);
            } else {
                self.go_on(&mut core);
            }
        }
        drop(core);
        self.queues.call_hooks();
        refused.map_or(Ok(()), Err)
    }

    /// Enters a request in the send queue, and says how long it is.
    fn enter(&self, core: &mut Core, wr: SendWr) -> Result<u32, PostReason> {
        self.check(&wr)?;
        if !core.sends && self.state() != QpState::Error {
            return Err(PostReason::State);
        }
        if core.conn.posted() >= self.limits.max_send_wr as usize {
            return Err(PostReason::Full);
        }
        let len = wr.len().filter(|len| *len <= core.conn.max_message());
        let len = len.ok_or(PostReason::Length)?;
        let request = to_proto(&wr);
        // Others end with a completion, or take long. With half of the queue full, programs may wait for room.
        let unsignaled = !wr.signaled
            && !self.limits.sq_sig_all
            && len as usize <= INLINE_DATA
            && core.conn.posted() < self.limits.max_send_wr as usize / 2;
        let keeps = unsignaled && wr.inline.is_none();
        let slot = Slot {
            wr,
            fault: None,
            keeps,
        };
        if unsignaled {
            core.conn.post_unsignaled(request, slot);
        } else {
            core.conn.post_with(request, slot);
        }
        Ok(len)
    }

    /// The doorbell, as that of the other queue pairs.
    fn may_wait(core: &mut Core, count: u32, bytes: u32) -> bool {
        let Some(way) = &core.way else {
            return false;
        };
        way.port.posted();
        let polls = way.port.polls();
        if core.seen_polls != polls {
            (core.seen_polls, core.posts) = (polls, 0);
        }
        let before = core.posts;
        core.posts = before.wrapping_add(count);
        may_be_put_off(before, count, bytes)
            && core.conn.state() == State::Open
            && way.port.is_polled()
    }

    /// What there is to send goes after the next poll, or with what is posted before it.
    fn put_off(self: &Arc<Self>, core: &mut Core) {
        self.wait(core, false);
        self.queues.defer();
    }

    /// Sends what was put off, and what the thread that receives has not answered yet, before the end: the program may have a completion already whose
    /// acknowledgement has not gone.
    fn settle(self: &Arc<Self>, core: &mut Core) {
        if matches!(core.conn.state(), State::Open | State::Failed) {
            core.conn.acknowledge_unasked();
            self.transmit(core);
        }
    }

    /// Sends what may be sent, completes what is complete, and ends a connection that has failed.
    fn go_on(self: &Arc<Self>, core: &mut Core) {
        self.transmit(core);
        self.reap(core);
        // What was owed before, and the refusal, are sent first.
        if core.conn.state() == State::Failed && !core.waits {
            let overrun = std::mem::take(&mut core.overrun);
            self.raise(core.conn.refused_with().filter(|_| !overrun));
            self.end(core);
        }
        self.end_if_overrun(core);
        self.set_alarm(core);
    }

    /// Completes requests, in the order posted.
    fn reap(&self, core: &mut Core) {
        while let Some((done, slot)) = core.conn.pop() {
            let Slot { wr, fault, .. } = slot;
            let (status, byte_len) = match done.status {
                Status::Ok { byte_len } => (WcStatus::Success, byte_len),
                Status::LocalError => (fault.unwrap_or(WcStatus::LocProtErr), 0),
                Status::Refused(NakCode::RemoteAccess) => (WcStatus::RemAccessErr, 0),
                Status::Refused(NakCode::InvalidRequest) => (WcStatus::RemInvReqErr, 0),
                Status::Refused(_) => (WcStatus::RemOpErr, 0),
                Status::RetryExceeded => (WcStatus::RetryExcErr, 0),
                Status::RnrRetryExceeded => (WcStatus::RnrRetryExcErr, 0),
                Status::BadResponse => (WcStatus::GeneralErr, 0),
                Status::Flushed => (WcStatus::WrFlushErr, 0),
            };
            if !core.live {
                continue;
            }
            let opcode = wr.op.opcode();
            let wc = Wc {
                wr_id: wr.id,
                status,
                opcode,
                byte_len,
                qp_num: self.num,
                ..Wc::default()
            };
            let wanted = wr.signaled || self.limits.sq_sig_all;
            core.overrun |= !self.queues.sent(&mut core.silent, wanted, wc);
        }
    }

    /// A queue pair whose completions are lost ends.
    fn end_if_overrun(&self, core: &mut Core) {
        if std::mem::take(&mut core.overrun) && self.state() != QpState::Error {
            self.raise(None);
            self.end(core);
        }
    }

    /// Ends the connection.
    fn end(&self, core: &mut Core) {
        if self.state() == QpState::Error {
            return;
        }
        self.set_state(QpState::Error);
        core.conn.flush();
        if let Some(faulty) = &mut core.faulty {
            faulty.clear();
        }
        self.reap(core);
        if let Some(wr) = core.recv.take() {
            let used = core.spoiled != WcStatus::WrFlushErr;
            match &self.recv {
                RecvSource::Shared(srq) if !used || !core.live => {
                    srq.put_back(wr);
                    // Other queue pairs may wait for it; their locks are not taken under ours.
                    let srq = Arc::clone(srq);
                    timer::after(&self.device().engine, Duration::ZERO, move || {
                        srq.feed();
                        None
                    });
                }
                _ if core.live => self.queues.receive_failed(self.num, wr.id, core.spoiled),
                _ => {}
            }
        }
        self.flush_receives(core);
    }

    fn flush_receives(&self, core: &mut Core) {
        let RecvSource::Own(queue) = &self.recv else {
            return;
        };
        for wr in queue.drain() {
            if core.live {
                self.queues
                    .receive_failed(self.num, wr.id, WcStatus::WrFlushErr);
            }
        }
    }

    /// The connection has failed, or the peer has asked for something that it may not do.
    fn raise(&self, code: Option<NakCode>) {
        let qp_num = self.num;
        self.device().raise(match code {
            Some(NakCode::RemoteAccess) => AsyncEvent::QpAccessErr {
                qp_num,
                reason: term_code(TermError::Protection(ProtectionError::AccessRights)),
            },
            Some(_) => AsyncEvent::QpFatal {
                qp_num,
                reason: term_code(TermError::Operation(OperationError::Unspecified)),
            },
            None => AsyncEvent::QpFatal { qp_num, reason: 0 },
        });
    }

    /// The engine is to look when the machine's time has come.
    fn set_alarm(self: &Arc<Self>, core: &mut Core) {
        let (Some(way), Some(deadline)) = (&core.way, core.conn.deadline()) else {
            return;
        };
        let at = way.port.instant(deadline);
        if core.alarm.is_none_or(|alarm| at < alarm) {
            if core.waits && at <= Instant::now() {
                // It goes on after the wait.
                return;
            }
            core.alarm = Some(at);
            let member: Weak<RoceInner> = Arc::downgrade(self);
            way.port.set_alarm(at, member);
        }
    }

    /// [`Member::resume`] is called later.
    fn wait(self: &Arc<Self>, core: &mut Core, for_room: bool) {
        if let Some(way) = &core.way
            && !std::mem::replace(&mut core.waits, true)
        {
            let member: Weak<RoceInner> = Arc::downgrade(self);
            way.port.wait(member, for_room);
        }
    }
}

impl Member for RoceInner {
    fn take(&self, arrival: &Arrival<'_>, header: &Header, payload: &[u8]) {
        self.received(arrival, header, payload);
    }

    /// Acknowledgements and answers are sent, and what waited for acknowledgements. If a thread polls, it will post or poll again: acknowledgements wait
    /// for that.
    fn answer(self: Arc<Self>, polled: bool) {
        let mut core = self.core.lock();
        if core.way.is_none() {
            // It has ended meanwhile.
        } else if polled && core.conn.may_rest() && !core.notices.owed {
            self.reap(&mut core);
            self.end_if_overrun(&mut core);
            self.put_off(&mut core);
            self.set_alarm(&mut core);
        } else {
            self.go_on(&mut core);
        }
        let heard = match std::mem::take(&mut core.heard) {
            0 => None,
            id => core.way.as_ref().map(|way| (Arc::clone(&way.port), id)),
        };
        drop(core);
        if let Some((port, id)) = heard {
            port.manager.heard(&port, id);
        }
        self.queues.call_hooks();
    }

    fn congested(&self, from: SocketAddr) {
        let mut core = self.core.lock();
        let way = core.way.as_ref();
        if way.is_some_and(|way| way.path.peer == from.ip()) {
            add_alone(&self.counters.congested, 1);
            core.conn.congested();
        }
    }

    fn alarm(self: Arc<Self>) {
        let mut core = self.core.lock();
        core.alarm = None;
        if let Some(way) = &core.way {
            let now = way.port.now();
            core.conn.expired(now);
            self.go_on(&mut core);
        }
        drop(core);
        self.queues.call_hooks();
    }

    fn resume(self: Arc<Self>) {
        let mut core = self.core.lock();
        core.waits = false;
        if core.way.is_some() {
            self.go_on(&mut core);
        }
        drop(core);
        self.queues.call_hooks();
    }

    fn awaits(&self) -> bool {
        let receives = match &self.recv {
            RecvSource::Own(queue) => !queue.is_empty(),
            RecvSource::Shared(_) | RecvSource::Twin(_) | RecvSource::Xrc(_) => true,
        };
        receives || (self.core.try_lock()).is_none_or(|core| core.conn.posted() > 0)
    }

    fn leave(self: Arc<Self>) {
        if let Some(mut core) = self.core.try_lock_soon() {
            self.settle(&mut core);
        }
    }
}
