//! The connection manager of a port (InfiniBand 12): requests, answers and ends as `rdma_cm` has them, in management datagrams to queue pair 1.
//!
//! The exchange of each connection is [`weft_proto::roce::cm::Exchange`]. This module finds it for a message, moves the queue pair, and tells the program.
//! Functions of the program are called without a lock of this module. A connection that is over is kept for a while, so that a message that comes
//! again gets its answer again.

use std::any::Any;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::roce::cm::{Event, Exchange, Phase, Reply};
use weft_wire::roce::cm::{
    self, IpHeader, MAD_LEN, Mad, Message, PortSpace, Rep, Req, reason, service_id,
};
use weft_wire::roce::{DEFAULT_PKEY, Deth, Header, Icrc, MASK_24, Op, Opcode, Route};

use super::port::{Manages, PortInner};
use super::sidr::Sidr;
use super::{MTUS, RocePath, RocePort, RoceQp, RoceSend, peer_addr, roce_mtu, scope_of};
use crate::device::{Counted, Device};
use crate::lock::lock;
use crate::types::Error;

/// Bytes of a program in a request: what the addresses leave.
pub const ROCE_REQUEST_DATA: usize = 56;
/// Bytes of a program in a reply, and in a rejection.
pub const ROCE_REPLY_DATA: usize = 196;
/// See [`ROCE_REPLY_DATA`].
pub const ROCE_REJECT_DATA: usize = 148;

/// Connections of a port, those included that are over and kept.
const MAX_EXCHANGES: usize = 65_536;
/// How long a connection is kept that is over: as `rdma_cm`'s time-out with a retry.
const KEPT: Duration = Duration::from_secs(2);
/// How long we wait for an acknowledgement: 4.096 us times two to this power, 67 ms.
const ACK_TIMEOUT: u8 = 14;
/// How long the peer's adapter waits for an acknowledgement of ours, a power: 0.54 s, as Linux asks for. It may not wait longer with each try, as we do.
const PEER_ACK_TIMEOUT: u8 = 17;
/// How long the answer to a message of the manager is waited for, a power: 1.07 s.
const CM_TIMEOUT: u8 = 18;
const CM_RETRIES: u8 = 7;
/// A peer's word makes us repeat an answer no more often.
const MOST_REPEATS: u8 = 3;
/// 0.64 ms.
const RNR_TIMER: u8 = 12;

/// How a connection is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceConnect {
    /// Private data for the peer: at most [`ROCE_REQUEST_DATA`] bytes in a request, [`ROCE_REPLY_DATA`] in a reply.
    pub private_data: Vec<u8>,
    /// Reads and atomics of the peer at once.
    pub ird: u8,
    /// Reads and atomics of ours at once.
    pub ord: u8,
    /// Retries of packets, 0 to 7, in both directions. A reply has none.
    pub retry_count: u8,
    /// How often the peer repeats a message that finds no receive here, 0 to 7.
    pub rnr_retry: u8,
}

impl Default for RoceConnect {
    fn default() -> Self {
        RoceConnect {
            private_data: Vec::new(),
            ird: 16,
            ord: 16,
            retry_count: 7,
            rnr_retry: 7,
        }
    }
}

/// What becomes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoceEvent {
    /// It is made.
    Established {
        /// The private data of the reply; empty at the side that accepted.
        private_data: Vec<u8>,
        /// Reads and atomics at once, the peer's and ours.
        depths: (u8, u8),
        /// How often we repeat a message that finds no receive.
        rnr_retry: u8,
    },
    /// The peer, or its manager, refuses it. The queue pair stays as it was.
    Rejected {
        /// InfiniBand's reason (12.6.7.2): 28 is the program, 8 that nobody listens.
        reason: u16,
        /// Of the program.
        private_data: Vec<u8>,
    },
    /// The peer does not answer. A queue pair without a peer stays as it was.
    TimedOut,
    /// It could not be made on this side.
    Failed(&'static str),
    /// One side has ended it: the queue pair is in the error state.
    Disconnected,
}

type Tell = Arc<dyn Fn(RoceEvent) + Send + Sync>;
type OnRequest = Arc<dyn Fn(RoceRequest) + Send + Sync>;

/// The managers' state of a port.
#[derive(Default)]
struct Manager {
    listeners: HashMap<u16, (usize, OnRequest)>,
    connections: HashMap<u32, Connection>,
    /// The connections that peers have asked for, by address and the peer's number.
    asked: HashMap<(IpAddr, u32), u32>,
}

/// The managers of connections and of datagrams.
#[derive(Default)]
struct Managers {
    connections: Mutex<Manager>,
    datagrams: Mutex<Sidr>,
}

/// One connection.
struct Connection {
    exchange: Exchange,
    peer: SocketAddr,
    qp: Weak<RoceQp>,
    /// The number of the peer's queue pair, once it is known.
    remote_qp: u32,
    /// The first packet sequence number of the peer, and what we asked for.
    psn: u32,
    param: RoceConnect,
    mtu: u32,
    /// What the side that accepts tells when it is ready.
    depths: (u8, u8),
    rnr_retry: u8,
    tell: Option<Tell>,
    /// It is over, and goes then.
    until: Option<Now>,
}

/// What follows from a message or from a time, to be done without the lock.
#[derive(Default)]
struct Todo {
    send: Vec<(SocketAddr, Box<[u8; MAD_LEN]>)>,
    tell: Vec<(Tell, RoceEvent)>,
    /// The queue pair is over.
    end: Vec<Weak<RoceQp>>,
    /// The peer has replied: move the queue pair, then answer.
    join: Option<(u32, Reply)>,
    asked: Option<(OnRequest, RoceRequest)>,
}

/// A connection that is made, or in the making. Dropping it does not end it.
pub struct RoceConn {
    port: RocePort,
    id: u32,
}

/// A listener. Dropping it ends it; requests that the program has are its own.
pub struct RoceListening {
    port: RocePort,
    number: u16,
    /// Of several listeners with this number, one after the other.
    serial: usize,
}

/// A peer's request. Dropping it refuses it.
pub struct RoceRequest {
    port: RocePort,
    id: u32,
    answered: bool,
    /// It counts against the device's limit.
    _pending: Counted,
    /// The addresses that the peer has named: the requester and ours.
    pub addrs: (SocketAddr, SocketAddr),
    /// Private data of the program.
    pub private_data: Vec<u8>,
    /// Reads and atomics at once that the peer takes, and sends.
    pub depths: (u8, u8),
    /// The peer's retries of packets, and of messages that find no receive.
    pub retries: (u8, u8),
    dest_qp: u32,
    psn: u32,
    mtu: u32,
}

impl Device {
    /// The RoCE port of a local address: the same one while a handle of it lives. With a link-local address of IPv6, `scope` is the interface.
    ///
    /// # Errors
    /// As `bind(2)`: `AddrInUse` if another process, or the kernel's `rxe`, has the port; `Unsupported` on a simulated network; `PermissionDenied` with TLS.
    pub fn bind_roce(&self, ip: IpAddr, scope: u32) -> io::Result<RocePort> {
        RocePort::bind(&self.0, ip, scope, Box::<Managers>::default())
    }
}

fn manager(port: &PortInner) -> MutexGuard<'_, Manager> {
    let any: &dyn Any = &*port.manager;
    let managers: Option<&Managers> = any.downcast_ref();
    lock(
        &managers
            .expect("the ports of this module have its managers")
            .connections,
    )
}

impl Manages for Managers {
    fn hear(&self, port: &PortInner, from: SocketAddr, payload: &[u8]) {
        port.hear(from, payload);
    }

    fn expired(&self, port: &PortInner) {
        port.manager_expired();
        port.sidr_expired();
    }

    fn datagrams(&self) -> &dyn Any {
        &self.datagrams
    }
}

impl RocePort {
    /// Asks the listener at this address and port number for a connection of `qp`, which has no peer yet. The queue pair sends and receives when
    /// `on_event` tells that the connection is made; `from` is the port number that the peer sees. `on_event` is called on any thread, and must not block.
    ///
    /// # Errors
    /// [`Error::Invalid`] for too much private data, and where no path MTU of InfiniBand fits the way.
    pub fn dial(
        &self,
        qp: &Arc<RoceQp>,
        (peer, scope): (SocketAddr, u32),
        from: u16,
        param: &RoceConnect,
        on_event: impl Fn(RoceEvent) + Send + Sync + 'static,
    ) -> Result<RoceConn, Error> {
        let port = self.inner();
        if param.private_data.len() > ROCE_REQUEST_DATA {
            return Err(Error::Invalid("too much private data for a request"));
        }
        let (src, dst) = (port.local_addr().ip(), peer.ip().to_canonical());
        let to = peer_addr(dst, scope);
        let mtu = port.mtu_to(to).ok_or(Error::Invalid(
            "the way to the peer takes no path MTU of InfiniBand",
        ))?;
        let header = IpHeader {
            port: from,
            src,
            dst,
        };
        let mut private_data = header.emit().to_vec();
        private_data.extend_from_slice(&param.private_data);
        private_data.resize(IpHeader::LEN + ROCE_REQUEST_DATA, 0);
        let psn = port.device.random_u32() & MASK_24;
        let mut manager = manager(port);
        let id = manager.new_id(port).ok_or(Error::Invalid(
            "the port has as many connections as it may have",
        ))?;
        let req = Req {
            local_id: id,
            service_id: service_id(PortSpace::Tcp, peer.port()),
            ca_guid: port.guid(),
            qp: qp.num(),
            responder_resources: param.ird,
            initiator_depth: param.ord,
            remote_timeout: CM_TIMEOUT,
            local_timeout: CM_TIMEOUT,
            service: u8::from(qp.is_unreliable()),
            psn,
            retry_count: param.retry_count & 7,
            rnr_retry: param.rnr_retry & 7,
            pkey: DEFAULT_PKEY,
            mtu: mtu_code(mtu),
            max_cm_retries: CM_RETRIES,
            srq: false,
            local_gid: gid_of(src),
            remote_gid: gid_of(dst),
            ack_timeout: PEER_ACK_TIMEOUT,
            private_data: &private_data,
        };
        let exchange = Exchange::request(port.now(), port.transaction(), &req);
        let mut connection = Connection {
            exchange,
            peer: to,
            qp: Arc::downgrade(qp),
            remote_qp: 0,
            psn,
            param: param.clone(),
            mtu,
            depths: (0, 0),
            rnr_retry: 0,
            tell: Some(Arc::new(on_event)),
            until: None,
        };
        let mut todo = Todo::default();
        connection.collect(&mut todo);
        port.watch(&connection);
        manager.connections.insert(id, connection);
        drop(manager);
        port.carry_out(todo);
        let port = self.clone();
        Ok(RoceConn { port, id })
    }

    /// Takes requests for connections to this port number of the address. `on_request` is called on any thread, and must not block.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is a listener.
    pub fn listen(
        &self,
        number: u16,
        on_request: impl Fn(RoceRequest) + Send + Sync + 'static,
    ) -> Result<RoceListening, Error> {
        let mut manager = manager(self.inner());
        if manager.listeners.contains_key(&number) {
            return Err(Error::Invalid("another listener has this port number"));
        }
        let on_request: OnRequest = Arc::new(on_request);
        let serial = Arc::as_ptr(&on_request).addr();
        manager.listeners.insert(number, (serial, on_request));
        drop(manager);
        Ok(RoceListening {
            port: self.clone(),
            number,
            serial,
        })
    }
}

impl Drop for RoceListening {
    fn drop(&mut self) {
        let mut manager = manager(self.port.inner());
        let ours = |(serial, _): &(usize, OnRequest)| *serial == self.serial;
        let gone = if manager.listeners.get(&self.number).is_some_and(ours) {
            manager.listeners.remove(&self.number)
        } else {
            None
        };
        drop(manager);
        drop(gone);
    }
}

impl RoceConn {
    /// Ends the connection: the queue pair is in the error state from now on, and the peer is told. [`RoceEvent::Disconnected`] follows when it
    /// has confirmed that, or does not answer.
    pub fn disconnect(&self) {
        let port = self.port.inner();
        let mut todo = Todo::default();
        {
            let mut manager = manager(port);
            let Some(connection) = manager.connections.get_mut(&self.id) else {
                return;
            };
            todo.end.push(Weak::clone(&connection.qp));
            let (now, transaction) = (port.now(), port.transaction());
            let remote_qp = connection.remote_qp;
            connection.exchange.disconnect(now, transaction, remote_qp);
            connection.collect(&mut todo);
            port.watch(connection);
        }
        port.carry_out(todo);
    }

    /// Gives up: nothing is told any more. A connection in the making is not made; one that is made is ended.
    pub fn forget(&self) {
        let gone = manager(self.port.inner())
            .connections
            .get_mut(&self.id)
            .and_then(|connection| connection.tell.take());
        self.disconnect();
        drop(gone);
    }
}

impl RoceRequest {
    /// Accepts it with a queue pair that has no peer yet; it sends and receives from now on. [`RoceEvent::Established`] follows when the peer is ready.
    ///
    /// # Errors
    /// As [`RoceQp::receive_from`]; [`Error::Invalid`] for too much private data, and where the peer has given up. The request is refused then.
    pub fn accept(
        mut self,
        qp: &Arc<RoceQp>,
        param: &RoceConnect,
        on_event: impl Fn(RoceEvent) + Send + Sync + 'static,
    ) -> Result<RoceConn, Error> {
        if param.private_data.len() > ROCE_REPLY_DATA {
            return Err(Error::Invalid("too much private data for a reply"));
        }
        let port = Arc::clone(self.port.inner());
        let (peer_takes, peer_sends) = self.depths;
        let depths = (param.ird.min(peer_sends), param.ord.min(peer_takes));
        let psn = port.device.random_u32() & MASK_24;
        let path = RocePath {
            peer: self.addrs.0.ip(),
            scope: scope_of(self.addrs.0),
            dest_qp: self.dest_qp,
            rq_psn: psn,
            mtu: self.mtu,
            ird: depths.0,
            rnr_timer: RNR_TIMER,
            traffic_class: 0,
        };
        qp.receive_from(&self.port, &path)?;
        let (retry_count, rnr_retry) = self.retries;
        qp.send_with(&RoceSend {
            sq_psn: self.psn,
            ord: depths.1,
            timeout: ACK_TIMEOUT,
            retry_count,
            rnr_retry,
        })?;
        let mut private_data = param.private_data.clone();
        private_data.resize(ROCE_REPLY_DATA, 0);
        let rep = Rep {
            local_id: 0,
            remote_id: 0,
            qp: qp.num(),
            psn,
            responder_resources: depths.0,
            initiator_depth: depths.1,
            ack_delay: ACK_TIMEOUT,
            rnr_retry: param.rnr_retry & 7,
            srq: false,
            ca_guid: port.guid(),
            private_data: &private_data,
        };
        let mut todo = Todo::default();
        {
            let mut manager = manager(&port);
            let connection = manager.connections.get_mut(&self.id);
            let waits = |c: &&mut Connection| c.exchange.phase() == Phase::Requested;
            let Some(connection) = connection.filter(waits) else {
                drop(manager);
                qp.to_error();
                return Err(Error::Invalid("the peer has given up"));
            };
            connection.exchange.accept(port.now(), &rep);
            connection.qp = Arc::downgrade(qp);
            connection.remote_qp = self.dest_qp;
            (connection.depths, connection.rnr_retry) = (depths, rnr_retry);
            connection.tell = Some(Arc::new(on_event));
            connection.collect(&mut todo);
            port.watch(connection);
        }
        self.answered = true;
        port.carry_out(todo);
        let (port, id) = (self.port.clone(), self.id);
        Ok(RoceConn { port, id })
    }

    /// Refuses it, with private data of at most [`ROCE_REJECT_DATA`] bytes; further ones are left out.
    pub fn reject(mut self, private_data: &[u8]) {
        let len = private_data.len().min(ROCE_REJECT_DATA);
        self.refuse(reason::CONSUMER, &private_data[..len]);
    }

    fn refuse(&mut self, reason: u16, private_data: &[u8]) {
        self.answered = true;
        let port = self.port.inner();
        let mut todo = Todo::default();
        {
            let mut manager = manager(port);
            let Some(connection) = manager.connections.get_mut(&self.id) else {
                return;
            };
            connection.exchange.reject(reason, private_data);
            connection.collect(&mut todo);
            connection.over(port.now());
            port.watch(connection);
        }
        port.carry_out(todo);
    }
}

impl Drop for RoceRequest {
    fn drop(&mut self) {
        if !self.answered {
            self.refuse(reason::CONSUMER, &[]);
        }
    }
}

impl Manager {
    /// A number that no connection has.
    fn new_id(&self, port: &PortInner) -> Option<u32> {
        if self.connections.len() >= MAX_EXCHANGES {
            return None;
        }
        std::iter::repeat_with(|| port.device.random_u32())
            .find(|id| *id != 0 && !self.connections.contains_key(id))
    }

    /// The connection that a message of this peer is about.
    fn find(&self, from: IpAddr, message: &Message<'_>) -> Option<u32> {
        let (remote, local) = match message {
            Message::Req(req) => (req.local_id, 0),
            Message::Rep(rep) => (rep.local_id, rep.remote_id),
            Message::Rtu(rtu) | Message::Drep(rtu) => (rtu.local_id, rtu.remote_id),
            Message::Rej(rej) => (rej.local_id, rej.remote_id),
            Message::Mra(mra) => (mra.local_id, mra.remote_id),
            Message::Dreq(dreq) => (dreq.local_id, dreq.remote_id),
            Message::SidrReq(_) | Message::SidrRep(_) => return None,
        };
        let of_peer = |c: &&Connection| c.peer.ip() == from;
        if local != 0 {
            return self.connections.get(&local).filter(of_peer).map(|_| local);
        }
        self.asked.get(&(from, remote)).copied()
    }
}

impl Connection {
    /// Takes the messages that are to be sent.
    fn collect(&mut self, todo: &mut Todo) {
        while let Some(raw) = self.exchange.take() {
            todo.send.push((self.peer, raw));
        }
    }

    /// It is kept for a while, for messages that come again.
    fn over(&mut self, now: Now) {
        if self.exchange.phase() == Phase::Over {
            self.until.get_or_insert(now + KEPT);
        }
    }

    fn hear(&mut self, id: u32, event: Event, now: Now, todo: &mut Todo) {
        let mut tell = |event, last: bool| {
            let tell = if last {
                self.tell.take()
            } else {
                self.tell.clone()
            };
            todo.tell.extend(tell.map(|tell| (tell, event)));
        };
        match event {
            Event::Replied(reply) => {
                todo.join = Some((id, reply));
                return;
            }
            Event::Ready => {
                let event = RoceEvent::Established {
                    private_data: Vec::new(),
                    depths: self.depths,
                    rnr_retry: self.rnr_retry,
                };
                tell(event, false);
            }
            Event::Rejected {
                reason,
                private_data,
            } => {
                let event = RoceEvent::Rejected {
                    reason,
                    private_data,
                };
                tell(event, true);
            }
            Event::TimedOut => tell(RoceEvent::TimedOut, true),
            Event::Disconnected => tell(RoceEvent::Disconnected, true),
        }
        // One that had no peer yet stays as it was.
        if self.exchange.phase() == Phase::Over && self.remote_qp != 0 {
            todo.end.push(Weak::clone(&self.qp));
        }
        self.over(now);
    }
}

impl PortInner {
    /// A number of ours that stands for the adapter.
    fn guid(&self) -> u64 {
        match self.local_addr().ip() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits() as u64,
        }
    }

    pub(super) fn transaction(&self) -> u64 {
        u64::from(self.device.random_u32()) << 32 | u64::from(self.device.random_u32())
    }

    /// The path MTU for the way there; where there is none yet, that of Ethernet.
    fn mtu_to(&self, to: SocketAddr) -> Option<u32> {
        let ip = self.local_addr().ip();
        let way = weft_sys::udp::path_mtu(ip, to).unwrap_or(1500);
        roce_mtu(way, ip.is_ipv6())
    }

    /// The engine looks when the connection's time has come.
    fn watch(&self, connection: &Connection) {
        let next = [connection.exchange.deadline(), connection.until];
        if let Some(at) = next.into_iter().flatten().min() {
            self.watch_manager(self.instant(at));
        }
    }

    /// A management datagram of this peer.
    fn hear(&self, from: SocketAddr, payload: &[u8]) {
        let Some(mad) = Mad::parse(payload) else {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        if self.hear_sidr(from, &mad) {
            return;
        }
        let now = self.now();
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let known = manager.find(from.ip(), &mad.message);
            match (known, &mad.message) {
                (Some(id), _) => {
                    if let Some(connection) = manager.connections.get_mut(&id) {
                        if let Some(event) = connection.exchange.on(now, &mad) {
                            connection.hear(id, event, now, &mut todo);
                        }
                        connection.collect(&mut todo);
                        self.watch(connection);
                    }
                }
                (None, Message::Req(req)) => {
                    self.requested(&mut manager, from, mad.transaction, req, &mut todo);
                }
                // Of a connection that is forgotten: the peer is told that it is over.
                (None, Message::Dreq(dreq)) => {
                    let drep = weft_wire::roce::cm::Rtu {
                        local_id: dreq.remote_id,
                        remote_id: dreq.local_id,
                        private_data: &[],
                    };
                    let (transaction, message) = (mad.transaction, Message::Drep(drep));
                    let raw = Mad {
                        transaction,
                        message,
                    };
                    todo.send.push((from, Box::new(raw.emit())));
                }
                (None, _) => {}
            }
        }
        self.carry_out(todo);
    }

    fn requested(
        &self,
        manager: &mut Manager,
        from: SocketAddr,
        transaction: u64,
        req: &Req<'_>,
        todo: &mut Todo,
    ) {
        let (Some(id), Some(owner)) = (manager.new_id(self), self.owner()) else {
            return;
        };
        let req = Req {
            max_cm_retries: req.max_cm_retries.min(MOST_REPEATS),
            ..*req
        };
        let mut exchange = Exchange::requested(transaction, id, &req);
        let pending = self.device.take_pending();
        let mtu = 128u32.checked_shl(req.mtu.into()).unwrap_or(0);
        let said = IpHeader::parse(req.private_data);
        let number = match cm::service(req.service_id) {
            Some((PortSpace::Tcp, number)) => Some(number),
            _ => None,
        };
        let listener = number.and_then(|number| manager.listeners.get(&number));
        let refusal = match (&listener, &said) {
            (None, _) => Some(reason::INVALID_SERVICE),
            (_, None) => Some(reason::UNSUPPORTED),
            _ if req.service > 1 || !MTUS.contains(&mtu) => Some(reason::INVALID_TRANSPORT),
            _ => None,
        };
        let mut port = from;
        if refusal.is_none() && pending.is_none() {
            // It comes again.
            return;
        }
        if let (None, Some((header, data)), Some((_, on_request)), Some(pending)) =
            (refusal, said, listener, pending)
        {
            port.set_port(header.port);
            let ours = SocketAddr::new(self.local_addr().ip(), number.unwrap_or(0));
            let request = RoceRequest {
                port: owner,
                id,
                answered: false,
                _pending: pending,
                addrs: (port, ours),
                private_data: data.to_vec(),
                depths: (req.responder_resources, req.initiator_depth),
                retries: (req.retry_count & 7, req.rnr_retry & 7),
                dest_qp: req.qp,
                psn: req.psn,
                mtu,
            };
            todo.asked = Some((Arc::clone(on_request), request));
        } else {
            // Not kept: it is refused again when it comes again.
            exchange.reject(refusal.unwrap_or(reason::INVALID_SERVICE), &[]);
            while let Some(raw) = exchange.take() {
                todo.send.push((from, raw));
            }
            return;
        }
        let mut connection = Connection {
            exchange,
            peer: from,
            qp: Weak::new(),
            remote_qp: req.qp,
            psn: 0,
            param: RoceConnect::default(),
            mtu,
            depths: (0, 0),
            rnr_retry: 0,
            tell: None,
            until: None,
        };
        connection.collect(todo);
        manager.asked.insert((from.ip(), req.local_id), id);
        manager.connections.insert(id, connection);
    }

    /// The time of some connections has come.
    fn manager_expired(&self) {
        let now = self.now();
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let manager = &mut *manager;
            let stays = |c: &Connection| c.until.is_none_or(|until| now < until);
            manager.connections.retain(|_, c| stays(c));
            let connections = &manager.connections;
            manager.asked.retain(|_, id| connections.contains_key(id));
            for (id, connection) in &mut manager.connections {
                if let Some(event) = connection.exchange.expired(now) {
                    connection.hear(*id, event, now, &mut todo);
                }
                connection.collect(&mut todo);
            }
            let times = manager.connections.values();
            let next = times.flat_map(|c| [c.exchange.deadline(), c.until]);
            if let Some(next) = next.flatten().min() {
                self.watch_manager(self.instant(next));
            }
        }
        self.carry_out(todo);
    }

    fn carry_out(&self, todo: Todo) {
        for (to, raw) in todo.send {
            self.send_mad(to, &raw[..]);
        }
        for qp in todo.end.iter().filter_map(Weak::upgrade) {
            qp.to_error();
        }
        if let Some((id, reply)) = todo.join {
            self.join(id, reply);
        }
        for (tell, event) in todo.tell {
            tell(event);
        }
        if let Some((on_request, request)) = todo.asked {
            on_request(request);
        }
    }

    /// The peer has accepted our request: the queue pair is moved, then the peer gets our word.
    fn join(&self, id: u32, reply: Reply) {
        let seen = {
            let manager = manager(self);
            let Some(c) = manager.connections.get(&id) else {
                return;
            };
            (c.qp.upgrade(), c.peer, c.psn, c.param.clone(), c.mtu)
        };
        let (qp, peer, psn, param, mtu) = seen;
        let depths = (
            param.ird.min(reply.initiator_depth),
            param.ord.min(reply.responder_resources),
        );
        let joined = qp.zip(self.owner()).ok_or("the queue pair has gone");
        let joined = joined.and_then(|(qp, owner)| {
            let path = RocePath {
                peer: peer.ip(),
                scope: scope_of(peer),
                dest_qp: reply.qp & MASK_24,
                rq_psn: psn,
                mtu,
                ird: depths.0,
                rnr_timer: RNR_TIMER,
                traffic_class: 0,
            };
            let send = RoceSend {
                sq_psn: reply.psn,
                ord: depths.1,
                timeout: ACK_TIMEOUT,
                retry_count: param.retry_count,
                rnr_retry: reply.rnr_retry,
            };
            let moved = qp.receive_from(&owner, &path);
            let moved = moved.and_then(|()| qp.send_with(&send));
            moved.map_err(|_| "the queue pair could not be joined")
        });
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let Some(connection) = manager.connections.get_mut(&id) else {
                return;
            };
            connection.remote_qp = reply.qp & MASK_24;
            let event = match joined {
                Ok(()) => {
                    connection.exchange.ready(&[]);
                    RoceEvent::Established {
                        private_data: reply.private_data,
                        depths,
                        rnr_retry: reply.rnr_retry,
                    }
                }
                Err(why) => {
                    connection.exchange.reject(reason::NO_RESOURCES, &[]);
                    connection.over(self.now());
                    RoceEvent::Failed(why)
                }
            };
            todo.tell
                .extend(connection.tell.clone().map(|tell| (tell, event)));
            connection.collect(&mut todo);
            self.watch(connection);
        }
        self.carry_out(todo);
    }

    /// Lost, it is sent again.
    pub(super) fn send_mad(&self, to: SocketAddr, mad: &[u8]) {
        let header = Header {
            deth: Some(Deth {
                qkey: cm::QKEY,
                src_qp: cm::QP,
            }),
            ..Header::new(Opcode::ud(Op::SendOnly), cm::QP, 0)
        };
        let mut packet = Vec::with_capacity(512);
        header.emit(&mut packet);
        packet.extend_from_slice(mad);
        let dst = peer_addr(to.ip(), scope_of(to));
        let route = Route {
            src: self.local_addr(),
            dst,
        };
        let mut crc = Icrc::new(&route, 0, packet.len());
        crc.headers(&packet);
        packet.extend_from_slice(&crc.finish());
        if let Err(error) = self.socket().send(&packet, dst, None) {
            tracing::debug!(%error, %dst, "a message of the connection manager is lost");
        }
    }
}

fn mtu_code(mtu: u32) -> u8 {
    mtu.ilog2() as u8 - 7
}

fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
