//! Datagram queue pairs of RoCE v2: each send names its destination, each receive reports its sender. A message is one packet.
//!
//! No packet ends the queue pair: one with a wrong `Q_Key`, or that finds no receive that is long enough, is dropped and counted (InfiniBand 9.8.3 and
//! 9.9.3: nobody is told).
//!
//! The queue pair receives at every port that it is given ([`RoceUdQp::hear_at`]), and sends from the one of its address that the destination names. A
//! multicast group has a port of its own for each member. A thread that polls drives the ports on which something has come or gone, until thousands of
//! messages in a row come from another one; the engine drives the others. Two locks, one for each direction: `sends` and `inbound`. Neither is taken under the other.

mod recv;
mod send;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use weft_mem::KeyLock;
use weft_wire::roce::Header;

use super::port::{Arrival, Member, PortInner, RocePort};
use super::{scope_of, take_number};
use crate::comp_counters::CompCounters;
use crate::cq::Cq;
use crate::device::{Counted, Pd, PdInner, QpNumber};
use crate::lock::lock;
use crate::qp::{Limits, RecvSource};
use crate::queues::Queues;
use crate::srq::Srq;
use crate::types::{Error, PostError, PostReason, QpState, RecvWr, SendWr};
use crate::ud::{UD_GROUP, UdDest};
use recv::Inbound;
use send::Sends;

/// No `Q_Key` yet: nothing comes in.
const NO_QKEY: u64 = u64::MAX;

/// The parameters of a datagram queue pair of RoCE.
#[derive(Clone)]
pub struct RoceUdInit {
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
    /// Its number, as for [`QpInit::num`](crate::QpInit::num), of at most 24 bits.
    pub num: Option<u32>,
    /// The longest message that may be posted, in bytes: a path MTU of InfiniBand that the ways take ([`roce_mtu`](crate::roce_mtu)).
    pub max_message: u32,
    /// While this is set, packets in both directions are dropped: a port that is down, for tests.
    pub down: Option<&'static AtomicBool>,
    /// It does not receive its own messages to multicast groups; other members on this host do. Default off.
    pub deaf_to_itself: bool,
    /// As [`QpInit::comp_counters`](crate::QpInit::comp_counters).
    pub comp_counters: Option<Arc<CompCounters>>,
}

impl RoceUdInit {
    /// As [`QpInit::new`](crate::QpInit::new), for messages of up to 1,024 bytes.
    pub fn new(send_cq: &Cq, recv_cq: &Cq) -> Self {
        RoceUdInit {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
            sq_sig_all: false,
            num: None,
            max_message: 1024,
            down: None,
            deaf_to_itself: false,
            comp_counters: None,
        }
    }
}

/// The counters of a datagram queue pair of RoCE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceUdCounters {
    /// Packets handed to the kernel.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Dropped: no receive was posted.
    pub no_recv: u64,
    /// Dropped: longer than the oldest receive, which stays.
    pub too_long: u64,
    /// Dropped: a wrong `Q_Key` or partition, or no `Q_Key` was set yet.
    pub wrong_key: u64,
}

#[derive(Default)]
struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    no_recv: AtomicU64,
    too_long: AtomicU64,
    wrong_key: AtomicU64,
}

/// The ports of a queue pair.
#[derive(Default)]
struct Ports {
    /// At which it is heard.
    heard: Vec<RocePort>,
    groups: HashMap<SocketAddr, RocePort>,
    /// Those that a thread drives which polls one of its completion queues.
    polled: Vec<RocePort>,
    /// The owner has dropped it.
    gone: bool,
}

struct Inner {
    num: u32,
    pd: Arc<PdInner>,
    queues: Queues,
    recv: RecvSource,
    limits: Limits,
    max_message: u32,
    down: Option<&'static AtomicBool>,
    deaf_to_itself: bool,
    qkey: AtomicU64,
    state: AtomicU8,
    counters: Counters,
    ports: Mutex<Ports>,
    sends: KeyLock<Sends>,
    inbound: KeyLock<Inbound>,
}

/// A datagram queue pair of RoCE v2. Dropping it ends it; outstanding requests get no completions.
pub struct RoceUdQp {
    inner: Arc<Inner>,
    _taken: (Counted, QpNumber),
}

impl Pd {
    /// A datagram queue pair of RoCE v2. It sends from the start; it receives when it has a `Q_Key` ([`RoceUdQp::set_qkey`]) and a port
    /// ([`RoceUdQp::hear_at`]).
    ///
    /// # Errors
    /// [`Error::Limit`]; [`Error::Invalid`] for a number that is taken or has more than 24 bits.
    pub fn create_roce_ud_qp(&self, init: &RoceUdInit) -> Result<RoceUdQp, Error> {
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
        if num.num >= UD_GROUP || num.num < 2 {
            return Err(Error::Invalid("no number of a queue pair of RoCE"));
        }
        let inner = Arc::new(Inner {
            num: num.num,
            pd: Arc::clone(&self.0),
            queues: Queues::new(&init.send_cq, &init.recv_cq, init.comp_counters.clone()),
            recv: RecvSource::of(init.srq.as_ref(), init.max_recv_wr, init.max_sge),
            limits: Limits {
                max_send_wr: init.max_send_wr,
                max_sge: init.max_sge,
                max_inline: init.max_inline,
                sq_sig_all: init.sq_sig_all,
                remote_completion: false,
                quiet_end: false,
            },
            max_message: init.max_message.min(super::MTUS[super::MTUS.len() - 1]),
            down: init.down,
            deaf_to_itself: init.deaf_to_itself,
            qkey: AtomicU64::new(NO_QKEY),
            state: AtomicU8::new(QpState::Rts as u8),
            counters: Counters::default(),
            ports: Mutex::default(),
            sends: KeyLock::new(Sends::new(&device.table)),
            inbound: KeyLock::new(Inbound::new(&device.table)),
        });
        Ok(RoceUdQp {
            inner,
            _taken: (count, num),
        })
    }
}

impl RoceUdQp {
    /// The queue pair's number, as senders and completions name it.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// `Rts`, or `Error` after [`RoceUdQp::to_error`].
    pub fn state(&self) -> QpState {
        self.inner.state()
    }

    /// Receives what comes to this address from now on.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a port of another device.
    pub fn hear_at(&self, port: &RocePort) -> Result<(), Error> {
        let inner = &self.inner;
        if !Arc::ptr_eq(&inner.pd.device, &port.inner().device) {
            return Err(Error::Invalid("the port is another device's"));
        }
        inner.hear_at(&mut lock(&inner.ports), port);
        Ok(())
    }

    /// Whether it has a port.
    pub fn is_heard(&self) -> bool {
        !lock(&self.inner.ports).heard.is_empty()
    }

    /// Sets the `Q_Key` that senders need from now on.
    pub fn set_qkey(&self, qkey: u32) {
        self.inner.qkey.store(u64::from(qkey), Ordering::Relaxed);
    }

    /// Joins a multicast group, at its address and port 4791, on these interfaces (their indexes): receives messages to it that have the queue pair's
    /// `Q_Key`. A group that is joined already stays as it is. An IPv4 broadcast address is a group too.
    ///
    /// # Errors
    /// `InvalidInput` for an address that is no group; as `bind(2)`; the error of `IP_ADD_MEMBERSHIP` if no interface can join.
    pub fn attach(&self, group: SocketAddr, interfaces: &[u32]) -> io::Result<()> {
        let inner = &self.inner;
        let mut ports = lock(&inner.ports);
        if ports.groups.contains_key(&group) {
            return Ok(());
        }
        let port = RocePort::join(&inner.pd.device, group, interfaces)?;
        let member = Arc::downgrade(inner);
        port.inner().add(UD_GROUP, member);
        ports.groups.insert(group, port);
        Ok(())
    }

    /// Leaves a group; `false` if it was not joined.
    pub fn detach(&self, group: SocketAddr) -> bool {
        let left = {
            let mut ports = lock(&self.inner.ports);
            let Some(port) = ports.groups.remove(&group) else {
                return false;
            };
            port.inner().remove(UD_GROUP);
            let same = |other: &RocePort| Arc::ptr_eq(other.inner(), port.inner());
            if let Some(at) = ports.polled.iter().position(same) {
                ports.polled.swap_remove(at);
                self.inner.detach_port(port.inner());
            }
            port
        };
        // The next port may have its place in memory.
        self.inner.inbound.lock().last = 0;
        // Its end waits for the engine, which may be in it, and takes our locks.
        drop(left);
        true
    }

    /// Posts a [`SendOp::Send`](crate::SendOp::Send) or [`SendOp::SendImm`](crate::SendOp::SendImm). It is complete when the kernel has its packet,
    /// which it mostly has when this returns. `to` has our address and port 4791. With `more`, another post follows at once: packets of one length for
    /// one destination go together then. So do the third and later ones of a program that posts one by one while a thread polls, as with
    /// [`UdInit::gather`](crate::UdInit::gather).
    ///
    /// # Errors
    /// [`PostError`], with index 0. On a queue pair in the error state requests are taken, and flushed. Earlier posts with `more` are sent.
    pub fn post_send(&self, wr: &SendWr, to: &UdDest, more: bool) -> Result<(), PostError> {
        let refused = |reason| PostError { index: 0, reason };
        self.inner.post(wr, to, more).map_err(refused)
    }

    /// Sends what waits for another post, or for the next poll.
    pub fn no_more(&self) {
        self.inner.send_staged();
    }

    /// Checks whether [`RoceUdQp::post_send`] would take this request, given room for it.
    ///
    /// # Errors
    /// As there.
    pub fn check_send(&self, wr: &SendWr) -> Result<(), PostError> {
        let refused = |reason| PostError { index: 0, reason };
        self.inner.check(wr).map(drop).map_err(refused)
    }

    /// Posts receives. They are taken in order, one a message, whose first 40 bytes are the routing header ([`Grh`](crate::Grh)).
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
            self.inner.flush_receives();
        }
        result
    }

    /// Flushes all outstanding requests and all that are posted later; packets are dropped.
    pub fn to_error(&self) {
        self.inner.send_staged();
        let error = QpState::Error as u8;
        self.inner.state.store(error, Ordering::Release);
        self.inner.flush_sends();
        self.inner.flush_receives();
        self.inner.queues.call_hooks();
    }

    /// Sends that were posted and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.inner.sends.lock().used()
    }

    /// The counters so far.
    pub fn counters(&self) -> RoceUdCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.inner.counters;
        RoceUdCounters {
            sent: of(&counters.sent),
            received: of(&counters.received),
            no_recv: of(&counters.no_recv),
            too_long: of(&counters.too_long),
            wrong_key: of(&counters.wrong_key),
        }
    }
}

impl Drop for RoceUdQp {
    fn drop(&mut self) {
        let inner = &self.inner;
        let Ports {
            heard,
            groups,
            polled,
            ..
        } = std::mem::replace(
            &mut *lock(&inner.ports),
            Ports {
                gone: true,
                ..Ports::default()
            },
        );
        for port in &heard {
            port.inner().remove(inner.num);
        }
        for port in groups.values() {
            port.inner().remove(UD_GROUP);
        }
        for port in &polled {
            inner.detach_port(port.inner());
        }
        inner.send_staged();
        inner.sends.lock().end();
        // A thread with a packet for it finishes before this, or drops it.
        inner.inbound.lock().live = false;
    }
}

/// Whether a port has this address of ours. A link-local one is one of an interface, `scope`.
fn is_at(port: SocketAddr, ip: IpAddr, scope: u32) -> bool {
    let own = scope_of(port);
    port.ip() == ip && (own == 0 || scope == 0 || own == scope)
}

impl Inner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    fn is_down(&self) -> bool {
        self.down.is_some_and(|down| down.load(Ordering::Relaxed))
    }

    fn hear_at(self: &Arc<Self>, ports: &mut Ports, port: &RocePort) {
        let same = |other: &RocePort| Arc::ptr_eq(other.inner(), port.inner());
        if !ports.gone && !ports.heard.iter().any(same) {
            let member = Arc::downgrade(self);
            port.inner().add(self.num, member);
            ports.heard.push(port.clone());
        }
    }

    /// The port of this address of ours, which the queue pair hears at from now on; `None` where there is none.
    fn port_of(self: &Arc<Self>, ip: IpAddr, scope: u32) -> Option<RocePort> {
        let mut ports = lock(&self.ports);
        let is = |port: &&RocePort| is_at(port.local_addr(), ip, scope);
        if let Some(port) = ports.heard.iter().find(is) {
            return Some(port.clone());
        }
        let port = RocePort::known(&self.pd.device, ip, scope)?;
        self.hear_at(&mut ports, &port);
        Some(port)
    }

    /// A thread that polls a completion queue of ours drives this port from now on. False: it is not ours any more.
    fn poll_port(&self, port: &PortInner) -> bool {
        let Some(port) = port.owner() else {
            return false;
        };
        let mut ports = lock(&self.ports);
        let same = |other: &RocePort| Arc::ptr_eq(other.inner(), port.inner());
        if !ports.heard.iter().any(same) && !ports.groups.values().any(same) {
            // Left or dropped while its packet was on the way.
            return false;
        }
        if ports.polled.iter().any(same) {
            return true;
        }
        for cq in self.queues.each() {
            cq.attach_port(Arc::downgrade(port.inner()) as _);
        }
        ports.polled.push(port);
        true
    }

    /// Only this port, and the one of the last send, are polled from now on. A message at another one changes that.
    fn leave_idle_ports(&self, busy: &PortInner) {
        let sending = self.sends.lock().port();
        let stays = |port: &RocePort| {
            let last = |last| Arc::ptr_eq(last, port.inner());
            std::ptr::eq(&raw const **port.inner(), busy) || sending.as_ref().is_some_and(last)
        };
        let mut ports = lock(&self.ports);
        let polled = std::mem::take(&mut ports.polled);
        let (stay, idle): (Vec<_>, Vec<_>) = polled.into_iter().partition(stays);
        ports.polled = stay;
        for port in &idle {
            self.detach_port(port.inner());
        }
        // They may be the last handles of their ports.
        drop(ports);
    }

    fn detach_port(&self, port: &Arc<PortInner>) {
        for cq in self.queues.each() {
            cq.detach_port(&**port);
        }
    }
}

impl Member for Inner {
    fn take(&self, arrival: &Arrival<'_>, header: &Header, payload: &[u8]) {
        self.received(arrival, header, payload);
    }

    fn answer(self: Arc<Self>, _polled: bool) {
        self.complete_receives();
        self.queues.call_hooks();
    }

    /// Datagrams have no rate that could be lowered.
    fn congested(&self, _from: SocketAddr) {}

    fn alarm(self: Arc<Self>) {}

    fn resume(self: Arc<Self>) {
        self.send_waiting();
        self.queues.call_hooks();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::Device;

    /// A thread that polls does not pay for a port at which nothing comes any more, until something does.
    #[test]
    fn a_port_without_messages_is_not_polled() {
        let device = Device::open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let ports = [1, 2].map(|n| {
            let ip = Ipv4Addr::new(127, 32 | (high & 31), low, n);
            device.bind_roce(ip.into(), 0).unwrap()
        });
        let cqs = [(); 2].map(|()| device.create_cq(4, None).unwrap());
        let [from, to] = cqs.each_ref().map(|cq| {
            let qp = pd.create_roce_ud_qp(&RoceUdInit::new(cq, cq)).unwrap();
            qp.set_qkey(7);
            qp
        });
        for port in &ports {
            to.hear_at(port).unwrap();
        }
        let mr = pd.alloc_mr(64, crate::Access::LOCAL_WRITE).unwrap();
        let send = |port: &RocePort| {
            let dest = UdDest {
                addr: port.local_addr(),
                qp_num: to.num(),
                qkey: 7,
                from: Some(ports[0].local_addr().ip()),
                traffic_class: 0,
            };
            to.post_recv(&[RecvWr::new(1).sge(mr.whole())]).unwrap();
            from.post_send(&SendWr::send(2), &dest, false).unwrap();
            let wait = Some(std::time::Duration::from_secs(30));
            let got = cqs[1].wait(&mut [crate::Wc::default()], wait).unwrap();
            assert_eq!(got, 1);
        };
        let polled = || lock(&to.inner.ports).polled.len();
        send(&ports[0]);
        send(&ports[1]);
        assert_eq!(polled(), 2);
        for _ in 0..2 * recv::IN_A_ROW {
            send(&ports[1]);
        }
        assert_eq!(polled(), 1);
        send(&ports[0]);
        assert_eq!(polled(), 2);
    }

    /// The first packet to a group may be on its way to the queue pair while the program leaves the group: the group's socket is not kept for it.
    #[test]
    fn a_group_that_is_left_is_not_polled() {
        let device = Device::open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(4, None).unwrap();
        let qp = pd.create_roce_ud_qp(&RoceUdInit::new(&cq, &cq)).unwrap();
        let group = SocketAddr::from(([239, 77, 3, 9], weft_wire::roce::PORT));
        qp.attach(group, &[1]).unwrap();
        let port = lock(&qp.inner.ports).groups[&group].clone();
        assert!(qp.inner.poll_port(port.inner()));
        assert!(qp.detach(group));
        assert!(!qp.inner.poll_port(port.inner()));
        assert!(lock(&qp.inner.ports).polled.is_empty());
        // And none of a queue pair that is gone.
        qp.attach(group, &[1]).unwrap();
        let port = lock(&qp.inner.ports).groups[&group].clone();
        let inner = Arc::clone(&qp.inner);
        drop(qp);
        assert!(!inner.poll_port(port.inner()));
        assert!(lock(&inner.ports).polled.is_empty());
    }
}
