//! Unreliable datagram queue pairs: each send names its destination, each receive reports its sender (datagram-iWARP; docs/spec/dgram.md).
//!
//! Messages may be lost, duplicated and reordered. Messages of up to [`UD_MTU`] bytes are one datagram; longer ones and RDMA Write-Record are
//! divided into segments. No faulty datagram ends the queue pair: datagrams that are damaged, have no receiver, a wrong `Q_Key` or no posted
//! receive are dropped, counted, and reported by [`UdQp::take_error`].
//!
//! In the reliable mode ([`UdInit::reliable`]) messages are acknowledged and retransmitted: each arrives once, in the order of its pair of queue
//! pairs. An error affects that pair, and not the whole queue pair.
//!
//! From the bottom up: `local` (rings) and `port` (the socket); `inbound` and `record`; the halves of a queue pair, `send` and `recv`, with `reliable`
//! and `flow` for the reliable mode; `intake`, which distributes received datagrams, and `drive`, which calls it.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_mem::KeyLock;
use weft_proto::dgram::Config;
use weft_wire::dgram;

mod burst;
mod drive;
mod echo;
mod flow;
mod inbound;
mod intake;
mod local;
mod port;
mod record;
mod recv;
mod reliable;
mod room;
mod send;

pub(crate) use burst::Burst;
use echo::Echo;
use inbound::{Counters, Inbound};
pub use local::UdLocalPeer;
use port::PortInner;
pub use port::{UdPort, UdPortCounters};
pub use record::{ValidityMap, WriteRecord};
use reliable::Reliable;
pub use reliable::UdReliable;
use send::Sends;
/// Why a receiver refuses a reliable message.
pub use weft_wire::dgram::FaultCode as UdFault;

use crate::comp_counters::CompCounters;
use crate::cq::Cq;
use crate::device::{Counted, Pd, PdInner, QpNumber};
use crate::lock::lock;
use crate::qp::RecvSource;
use crate::queues::Queues;
use crate::srq::Srq;
use crate::types::{Error, PostError, PostReason, QpState, RecvWr, SendWr, UdSource};

/// The longest message that is one datagram of version 1, in bytes: what every peer takes, and what programs of `InfiniBand` know as the MTU.
pub const UD_MTU: u32 = dgram::MAX_PAYLOAD as u32;
/// The longest message of all, in bytes.
pub const UD_MAX_MESSAGE: u32 = dgram::segment::MAX_MESSAGE;
/// The longest payload of a segment, in bytes.
pub const UD_MAX_SEGMENT: u32 = dgram::segment::MAX_PAYLOAD as u32;
/// The queue pair number that stands for all members of a multicast group (`InfiniBand` 10.5.2).
pub const UD_GROUP: u32 = dgram::GROUP_QP;
/// A key with this bit stands for the sending queue pair's own one (InfiniBand 10.2.5).
pub(crate) const OWN_QKEY: u32 = 1 << 31;
/// No `Q_Key` yet: nothing comes in.
const NO_QKEY: u64 = u64::MAX;

/// The parameters of a datagram queue pair.
#[derive(Clone)]
pub struct UdInit {
    /// The UDP port that it uses, alone or with others.
    pub port: UdPort,
    /// The queue for completions of sends.
    pub send_cq: Cq,
    /// The queue for completions of receives; may be the same queue.
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
    /// The `Q_Key` that senders need. `None`: nothing is received before [`UdQp::set_qkey`].
    pub qkey: Option<u32>,
    /// Each received message has forty bytes in front in which the addresses are ([`Grh`](crate::Grh)), as InfiniBand has it.
    pub grh: bool,
    /// While this is set, datagrams in both directions are dropped: a port that is down, for tests.
    pub down: Option<&'static AtomicBool>,
    /// It does not receive its own messages to multicast groups; other members on this host do. Default off.
    pub deaf_to_itself: bool,
    /// The longest message that may be posted, in bytes. Default [`UD_MAX_MESSAGE`].
    pub max_message: u32,
    /// The longest payload of a segment, in bytes; messages that are longer are cut. Default [`UD_MAX_SEGMENT`]. On a network that loses datagrams what
    /// fits into one packet is better: of a segment that IP has to cut, all is lost with any part.
    pub segment: u32,
    /// How long a message may go without a new segment before it is dropped. Default 100 ms.
    pub message_timeout: Duration,
    /// Messages of several segments that may be incomplete at once. Default 256.
    pub max_open: u32,
    /// RDMA Write-Records that wait for the program, incomplete ones included: further ones are refused. The completion queue of receives needs room
    /// for as many. 0, the default: the queue pair neither sends nor takes Write-Record.
    pub record_depth: u32,
    /// A Write-Record of which some segments did not come makes a record of the rest when its time is up. Default on; off, it makes none.
    pub partial_records: bool,
    /// The reliable mode: each message is delivered once and in the order of its pair of queue pairs, or the pair is put into an error state
    /// ([`UdQp::pair_state`]); a send is complete when the receiver has it. Both ends have to be made so. The `Q_Key`, own address and traffic class of the first
    /// post to a destination count for all. Default `None`: unreliable.
    pub reliable: Option<UdReliable>,
    /// Of single posts that follow each other while the program polls, the third and later ones of one length to one destination go together: with the
    /// next poll, when the train is full, or after a millisecond. For programs that post one by one. Default off. Not in the reliable mode.
    pub gather: bool,
    /// As [`QpInit::comp_counters`](crate::QpInit::comp_counters).
    pub comp_counters: Option<Arc<CompCounters>>,
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
            down: None,
            deaf_to_itself: false,
            max_message: UD_MAX_MESSAGE,
            segment: UD_MAX_SEGMENT,
            message_timeout: Config::default().timeout,
            max_open: Config::default().max_open as u32,
            record_depth: 0,
            partial_records: true,
            reliable: None,
            gather: false,
            comp_counters: None,
        }
    }
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Address and UDP port.
    pub addr: SocketAddr,
    /// The queue pair behind that port.
    pub qp_num: u32,
    /// Its `Q_Key`. With the highest bit set, our queue pair's own key is sent instead.
    pub qkey: u32,
    /// Our address as the receiver sees it; `None`: the system chooses.
    pub from: Option<IpAddr>,
    /// The type of service (IPv4) or traffic class (IPv6); 0 is the system's usual one.
    pub traffic_class: u8,
}

impl UdDest {
    /// A multicast group, or all hosts of a subnet.
    pub(crate) fn is_group(&self) -> bool {
        self.qp_num == UD_GROUP || self.addr.ip().is_multicast()
    }
}

/// The counters of a datagram queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdCounters {
    /// Datagrams handed to the kernel, or put into shared memory.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Dropped: no receive was posted.
    pub no_recv: u64,
    /// Dropped: longer than the oldest receive, which stays.
    pub too_long: u64,
    /// Dropped: a wrong `Q_Key`, or none was set yet.
    pub wrong_qkey: u64,
    /// Segments dropped: late ones, duplicates, and such as contradict others of their message.
    pub dropped: u64,
    /// Messages given up of which some segments did not come.
    pub incomplete: u64,
    /// Records of Write-Record that were made.
    pub records: u64,
    /// Write-Records dropped: as many as [`UdInit::record_depth`] waited for the program.
    pub no_record: u64,
    /// Write-Records refused: an `STag`, a range or a right that peers do not have.
    pub no_access: u64,
    /// Reliable mode: segments sent again.
    pub resent: u64,
}

/// An error of a datagram; the queue pair continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdError {
    /// What.
    pub kind: UdErrorKind,
    /// Its sender, or its destination.
    pub peer: Option<SocketAddr>,
    /// The queue pair there.
    pub qp_num: u32,
    /// The message's number, 0 where there is none.
    pub msn: u32,
}

/// The kind of a [`UdError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdErrorKind {
    /// A message found no receive.
    NoReceive,
    /// A message was longer than the oldest receive, which stays.
    TooLong,
    /// Some of a message did not come in time.
    Incomplete,
    /// A Write-Record was for memory that it may not write to.
    NoAccess,
    /// A Write-Record found as many records waiting as there may be.
    NoRecord,
    /// The kernel refused a datagram of ours, for example because there is no route.
    NotSent,
    /// Reliable mode: the receiver does not answer. The pair is in the error state.
    Unreachable,
    /// Reliable mode: the receiver refused this message. The pair is in the error state.
    Refused(UdFault),
}

impl UdError {
    fn from(kind: UdErrorKind, source: UdSource, msn: u32) -> UdError {
        UdError {
            kind,
            peer: Some(source.addr),
            qp_num: source.qp_num,
            msn,
        }
    }
}

pub(crate) struct UdInner {
    num: u32,
    pd: Arc<PdInner>,
    port: Arc<PortInner>,
    queues: Queues,
    recv: RecvSource,
    max_send_wr: u32,
    max_sge: u32,
    max_inline: u32,
    sq_sig_all: bool,
    grh: bool,
    /// Set if its own messages to groups are dropped.
    echo: Option<Echo>,
    down: Option<&'static AtomicBool>,
    qkey: AtomicU64,
    state: AtomicU8,
    max_message: u32,
    /// The longest payload of a segment.
    segment: usize,
    record_depth: u32,
    partial_records: bool,
    reliable: Option<Reliable>,
    gather: bool,
    /// A message found no receive, or no room for its record.
    starving: AtomicBool,
    sq_used: AtomicU32,
    sends: KeyLock<Sends>,
    /// Held by a thread that takes a receive until its completion is made.
    inbound: KeyLock<Inbound>,
    counters: Counters,
}

impl UdInner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    fn is_down(&self) -> bool {
        self.down.is_some_and(|down| down.load(Ordering::Relaxed))
    }

    fn report(&self, error: UdError) {
        self.hold().report(error);
    }

    fn flush(&self) {
        self.flush_sends();
        self.flush_recvs(true);
        self.queues.call_hooks();
    }

    /// The time that the port was given has come.
    fn alarm(self: &Arc<Self>, now: Instant) {
        let mut inbound = self.hold();
        inbound.timed = false;
        inbound.flows_timed = false;
        if inbound.live
            && let Some(reliable) = &self.reliable
        {
            inbound.flows.expire(reliable.since(now));
            self.give_back(&mut inbound);
            self.set_flow_alarm(reliable, &mut inbound);
        }
        if inbound.live {
            while let Some(message) = inbound.reassembler.expire(now) {
                self.over(&mut inbound, message);
            }
            self.set_alarm(&mut inbound);
        }
        drop(inbound);
        if let Some(reliable) = &self.reliable {
            self.reliable_on(reliable);
        }
        self.queues.call_hooks();
    }
}

/// A datagram queue pair. It sends and receives from the start. Dropping it ends that; outstanding requests get no completions.
pub struct UdQp {
    inner: Arc<UdInner>,
    port: UdPort,
    /// The ports on which it receives multicast groups.
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

    /// Sets the `Q_Key` that senders need from now on.
    pub fn set_qkey(&self, qkey: u32) {
        self.inner.qkey.store(u64::from(qkey), Ordering::Relaxed);
    }

    /// Joins a multicast group: receives messages to [`UD_GROUP`] at this address and port, on these interfaces (their indexes), with the queue pair's
    /// `Q_Key`. Other queue pairs, in this process too, may join the same group. A group that is joined already stays as it is. An IPv4 broadcast
    /// address, 255.255.255.255 or that of a subnet of this host, is a group too: of all hosts of the subnet, on every interface that has it.
    ///
    /// # Errors
    /// `InvalidInput` for an address that is neither; as `bind(2)`; the error of `IP_ADD_MEMBERSHIP` if no interface can join.
    pub fn attach(&self, group: SocketAddr, interfaces: &[u32]) -> io::Result<()> {
        let mut groups = lock(&self.groups);
        if groups.contains_key(&group) {
            return Ok(());
        }
        let port = UdPort::join(&self.inner.pd.device, group, interfaces)?;
        for cq in self.inner.queues.each() {
            cq.attach_port(Arc::downgrade(port.inner()) as _);
        }
        port.add(UD_GROUP, &self.inner);
        groups.insert(group, port);
        Ok(())
    }

    /// Leaves a group; `false` if it was not joined.
    pub fn detach(&self, group: SocketAddr) -> bool {
        let port = lock(&self.groups).remove(&group);
        if let Some(port) = &port {
            self.part_from(port, UD_GROUP);
        }
        port.is_some()
    }

    fn part_from(&self, port: &UdPort, num: u32) {
        port.remove(num);
        for cq in self.inner.queues.each() {
            cq.detach_port(&**port.inner());
        }
    }

    /// Post a [`SendOp::Send`](crate::SendOp::Send) or [`SendOp::SendImm`](crate::SendOp::SendImm), or with [`UdInit::record_depth`] a
    /// [`SendOp::Write`](crate::SendOp::Write) or [`SendOp::WriteImm`](crate::SendOp::WriteImm), which is an RDMA Write-Record here: it takes no
    /// receive, with immediate data or without. It is complete when the kernel has taken its datagrams, which it mostly has when this returns.
    ///
    /// # Errors
    /// [`PostError`], with index 0. On a queue pair in the error state requests are taken, and flushed.
    pub fn post_send(&self, wr: &SendWr, to: &UdDest) -> Result<(), PostError> {
        let refused = |reason| PostError { index: 0, reason };
        self.inner.post_one(wr, to).map_err(refused)
    }

    /// As [`UdQp::post_send`] for several: those of one size for one destination go out with one system call.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused; those before it were taken.
    pub fn post_sends(&self, wrs: &[(SendWr, UdDest)]) -> Result<(), PostError> {
        let refused = |(index, reason)| PostError { index, reason };
        self.inner.post_send(wrs).map_err(refused)
    }

    /// Send what waits for the next poll (see [`UdInit::gather`]).
    pub fn send_gathered(&self) {
        self.inner.send_on();
    }

    /// The record that a completion with [`WcOpcode::WriteRecord`](crate::WcOpcode::WriteRecord) names by its
    /// [`wr_id`](crate::Wc::wr_id). Taking it makes room for another one. `None` when it was taken.
    pub fn take_record(&self, wr_id: u64) -> Option<WriteRecord> {
        let record = self.inner.hold().take_record(wr_id);
        self.inner.feed();
        record
    }

    /// Reliable mode: `Error` if a message to there could not be delivered; posts are flushed then, until [`UdQp::reset_pair`]. Other
    /// destinations have nothing to do with it. A destination that failed is remembered until it is reset. `Rts` else.
    pub fn pair_state(&self, to: &UdDest) -> QpState {
        match &self.inner.reliable {
            Some(reliable) => reliable.state_of(to),
            None => QpState::Rts,
        }
    }

    /// Reliable mode: ends the error state of a destination; `false` if there was none. Flushed messages are not sent again. Whether the
    /// first of them was delivered is not known when its status was [`RetryExcErr`](crate::WcStatus::RetryExcErr) or
    /// [`RemAbortErr`](crate::WcStatus::RemAbortErr).
    pub fn reset_pair(&self, to: &UdDest) -> bool {
        let reliable = self.inner.reliable.as_ref();
        reliable.is_some_and(|reliable| reliable.reset(to))
    }

    /// The bytes that RDMA Write-Record has written to the region or window with this key, since the last [`UdQp::take_validity_map`]. Maps are
    /// kept for the 256 most recently written keys, with 4,096 ranges each; further valid bytes are not in them.
    pub fn validity_map(&self, rkey: u32) -> ValidityMap {
        self.inner.hold().maps.get(rkey)
    }

    /// As [`UdQp::validity_map`], and resets the map: only bytes that are written later are valid. To be called by the thread that reads
    /// the memory.
    pub fn take_validity_map(&self, rkey: u32) -> ValidityMap {
        self.inner.hold().maps.take(rkey)
    }

    /// Takes the oldest error; the last 64 errors are kept.
    pub fn take_error(&self) -> Option<UdError> {
        self.inner.hold().take_error()
    }

    /// Checks whether [`UdQp::post_send`] would accept this request, given room for it.
    ///
    /// # Errors
    /// As `post_send`.
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
        self.inner.feed();
        result
    }

    /// Post one receive, see [`UdQp::post_recv`].
    ///
    /// # Errors
    /// As there, index 0.
    pub fn post_recv_one(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv(&[wr])
    }

    /// Flushes all outstanding requests and all that are posted later; datagrams are dropped.
    pub fn to_error(&self) {
        self.inner.send_on();
        let error = QpState::Error as u8;
        self.inner.state.store(error, Ordering::Release);
        self.inner.flush();
    }

    /// Sends that were posted and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.inner.sq_used.load(Ordering::Relaxed)
    }

    /// The counters so far.
    pub fn counters(&self) -> UdCounters {
        let counters = &self.inner.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UdCounters {
            sent: of(&counters.sent),
            received: of(&counters.received),
            no_recv: of(&counters.no_recv),
            too_long: of(&counters.too_long),
            wrong_qkey: of(&counters.wrong_qkey),
            dropped: of(&counters.dropped),
            incomplete: of(&counters.incomplete),
            records: of(&counters.records),
            no_record: of(&counters.no_record),
            no_access: of(&counters.no_access),
            resent: of(&counters.resent),
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
        inner.send_on();
        inner.sends.lock().clear();
        if let Some(reliable) = &inner.reliable {
            reliable.clear();
        }
        // A thread with a datagram for it finishes before this, or drops it.
        inner.hold().live = false;
        inner.flush_recvs(false);
    }
}

impl UdInner {}

impl Pd {
    /// A datagram queue pair.
    ///
    /// # Errors
    /// [`Error::Limit`]; [`Error::Invalid`] for a number that is taken, and for a port of another device.
    pub fn create_ud_qp(&self, init: &UdInit) -> Result<UdQp, Error> {
        let device = &self.0.device;
        let limits = &device.limits;
        limits.check_depths(
            init.max_send_wr,
            init.max_recv_wr,
            init.max_sge,
            init.max_inline,
        )?;
        if !Arc::ptr_eq(device, &init.port.inner().device) {
            return Err(Error::Invalid("the port is another device's"));
        }
        if init.record_depth > 0 && init.record_depth >= init.recv_cq.depth() {
            return Err(Error::Invalid(
                "the completion queue of receives has no room for so many Write-Records",
            ));
        }
        let config = Config {
            timeout: init.message_timeout,
            max_open: init.max_open as usize,
            ..Config::default()
        };
        let segment = init.segment.clamp(1, UD_MAX_SEGMENT) as usize;
        let count = Counted::take(&device.qps, limits.max_qp, "queue pairs", "max_qp")?;
        let num = QpNumber::take(device, init.num)?;
        let inner = Arc::new(UdInner {
            num: num.num,
            pd: Arc::clone(&self.0),
            port: Arc::clone(init.port.inner()),
            queues: Queues::new(&init.send_cq, &init.recv_cq, init.comp_counters.clone()),
            recv: RecvSource::of(init.srq.as_ref(), init.max_recv_wr, init.max_sge),
            max_send_wr: init.max_send_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            grh: init.grh,
            down: init.down,
            echo: init.deaf_to_itself.then(Echo::default),
            qkey: AtomicU64::new(init.qkey.map_or(NO_QKEY, u64::from)),
            state: AtomicU8::new(QpState::Rts as u8),
            sq_used: AtomicU32::new(0),
            max_message: init.max_message.min(UD_MAX_MESSAGE),
            segment,
            record_depth: init.record_depth,
            partial_records: init.partial_records,
            reliable: init
                .reliable
                .map(|settings| Reliable::new(settings, segment)),
            gather: init.gather,
            starving: AtomicBool::new(false),
            sends: KeyLock::new(Sends::new(device.random_u32(), &device.table)),
            inbound: KeyLock::new(Inbound::new(config, &device.table)),
            counters: Counters::default(),
        });
        for cq in inner.queues.each() {
            cq.attach_port(Arc::downgrade(&inner.port) as _);
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
