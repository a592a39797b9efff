//! The connection manager of a port (InfiniBand 12): requests, answers and ends as `rdma_cm` has them, in management datagrams to queue pair 1.
//!
//! The exchange of each connection is [`weft_proto::roce::cm::Exchange`]. This module finds it for a message, moves the queue pair, and tells the program.
//! Functions of the program are called without a lock of this module. A connection that is over is kept for a while, so that a message that comes
//! again gets its answer again. Which requests a program sees is decided in [`admit`](super::admit).

use std::any::Any;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use weft_proto::roce::cm::{Event, Phase, Reply, unknown};
use weft_wire::roce::cm::{self, Mad, Message, PortSpace, Rep, reason};
use weft_wire::roce::{Deth, Header, Icrc, MASK_24, Op, Opcode, Route};

use super::admit::refuse;
use super::connections::{Asked, Connection, Listener, Manager, OnRequest, Tell, Todo};
use super::port::{Manages, PortInner, Whose, siblings};
use super::sidr::Sidr;
use super::terms::{RoceConnect, RoceEnd, RoceEvent, RoceTerms};
use super::{RocePort, RoceQp, peer_addr, roce_mtu, scope_of};
use crate::device::{Counted, Device};
use crate::lock::lock;
use crate::timer;
use crate::types::Error;

/// Bytes of a program in a request: what the addresses leave.
pub const ROCE_REQUEST_DATA: usize = 56;
/// Bytes of a program in a reply, and in a rejection.
pub const ROCE_REPLY_DATA: usize = 196;
/// See [`ROCE_REPLY_DATA`].
pub const ROCE_REJECT_DATA: usize = 148;

/// How long a connection is kept that is over: as `rdma_cm`'s time-out with a retry.
const KEPT: Duration = Duration::from_secs(2);
/// How long a packet may be in the hands of a sibling.
const PASSING: Duration = Duration::from_millis(2);
/// How long we wait for an acknowledgement: 4.096 us times two to this power, 67 ms.
const ACK_TIMEOUT: u8 = 14;
/// 0.64 ms.
const RNR_TIMER: u8 = 12;

/// The managers of connections and of datagrams.
#[derive(Default)]
struct Managers {
    connections: Mutex<Manager>,
    datagrams: Mutex<Sidr>,
}

/// A connection that is made, or in the making. Dropping it does not end it.
pub struct RoceConn {
    pub(super) port: RocePort,
    pub(super) id: u32,
}

/// A listener. Dropping it ends it; requests that the program has are its own.
pub struct RoceListening {
    port: RocePort,
    number: u16,
    /// Of several listeners with this number, one after the other.
    serial: usize,
}

/// A peer's request. Dropping it refuses it: as the program does, or, if [`RoceRequest::seen`] was not called, as where nobody listens.
pub struct RoceRequest {
    port: RocePort,
    id: u32,
    answered: bool,
    /// It counts against the listener's backlog, until the program has seen it.
    unseen: Option<Counted>,
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
    unreliable: bool,
    dest_qp: u32,
    psn: u32,
    our_psn: u32,
    mtu: u32,
}

impl Device {
    /// The RoCE port of a local address: the same one while a handle of it lives. Other devices and processes of this user may have it too. With a link-local address of IPv6, `scope` is the interface.
    ///
    /// # Errors
    /// As `bind(2)`: `AddrInUse` if another user's process, or the kernel's `rxe`, has the port, or no slot for a further process is left; `Unsupported` on a simulated network; `PermissionDenied` with TLS.
    pub fn bind_roce(&self, ip: IpAddr, scope: u32) -> io::Result<RocePort> {
        RocePort::bind(&self.0, ip, scope, Box::<Managers>::default())
    }
}

impl Device {
    /// A number for a queue pair of RoCE, by which packets find this device among those that share an address. A queue pair may have it already.
    ///
    /// # Errors
    /// As [`Device::bind_roce`].
    pub fn roce_number(&self) -> io::Result<u32> {
        siblings(&self.0).map(|siblings| siblings.number())
    }

    /// The TCP ports whose numbers, with eight more bits behind the port, are those of this device's slot. `None` unless it was built
    /// [with such numbers](crate::DeviceBuilder::numbers_with_ports).
    ///
    /// # Errors
    /// As [`Device::bind_roce`].
    pub fn ports_of_numbers(&self) -> io::Result<Option<RangeInclusive<u16>>> {
        if !self.0.numbers_have_ports {
            return Ok(None);
        }
        let slot = siblings(&self.0)?.slot();
        let port = |low| u16::from_be_bytes([slot, low]);
        Ok(Some(port(0)..=port(0xff)))
    }
}

fn managers(port: &PortInner) -> &Managers {
    let any: &dyn Any = &*port.manager;
    let managers: Option<&Managers> = any.downcast_ref();
    managers.expect("the ports of this module have its managers")
}

pub(super) fn manager(port: &PortInner) -> MutexGuard<'_, Manager> {
    lock(&managers(port).connections)
}

impl Manages for Managers {
    fn whose(
        &self,
        port: &PortInner,
        (from, at, is_asked): (SocketAddr, u64, bool),
        payload: &[u8],
    ) -> Whose {
        port.whose_is(is_asked, payload, |message| match message {
            Message::SidrReq(req) => port.serves(req.service_id, at),
            Message::Req(req) => {
                let manager = lock(&self.connections);
                let listens = |number| {
                    let listener = manager.listeners.get(&number);
                    listener.is_some_and(|listener| listener.claim.since <= at)
                };
                let number =
                    cm::service(req.service_id).filter(|(space, _)| *space == PortSpace::Tcp);
                manager.find(from.ip(), message).is_some()
                    || number.is_some_and(|(_, number)| listens(number))
            }
            _ => true,
        })
    }

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

    fn heard(&self, port: &PortInner, id: u32) {
        port.note_heard(id);
    }
}

impl RocePort {
    /// Takes requests for connections to this port number of the address. `on_request` is called on any thread, and must not block. While
    /// `backlog` requests wait to be [`seen`](RoceRequest::seen), further ones are not heard; their peers ask again.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is a listener; [`Error::Os`] (`AddrInUse`) if another process that has the address too has one.
    pub fn listen(
        &self,
        number: u16,
        backlog: u32,
        on_request: impl Fn(RoceRequest) + Send + Sync + 'static,
    ) -> Result<RoceListening, Error> {
        let mut manager = manager(self.inner());
        if manager.listeners.contains_key(&number) {
            return Err(Error::Invalid("another listener has this port number"));
        }
        let claim = self.inner().claim(PortSpace::Tcp, number);
        let claim = claim.map_err(Error::os("claiming the port number"))?;
        let on_request: OnRequest = Arc::new(move |asked| on_request(RoceRequest::new(asked)));
        let serial = Arc::as_ptr(&on_request).addr();
        let listener = Listener {
            serial,
            on_request,
            backlog,
            unseen: Arc::default(),
            claim,
        };
        manager.listeners.insert(number, listener);
        drop(manager);
        Ok(RoceListening {
            port: self.clone(),
            number,
            serial,
        })
    }
}

impl RocePort {
    /// Before the process ends: acknowledgements that were put off are sent, and the peers of all connections are told that they are over, once. Nothing is
    /// waited for: the process may end in a signal handler, and the thread that was interrupted holds locks.
    pub fn say_farewell(&self) {
        let port = self.inner();
        port.leave();
        let mut todo = Todo::default();
        {
            let Ok(mut manager) = managers(port).connections.try_lock() else {
                return;
            };
            let ids: Vec<u32> = manager.connections.keys().copied().collect();
            for id in ids {
                let (now, transaction) = (port.now(), port.transaction());
                if let Some(connection) = manager.connections.get_mut(&id) {
                    let remote_qp = connection.remote_qp;
                    connection.exchange.disconnect(now, transaction, remote_qp);
                    port.settle(&mut manager, id, &mut todo);
                }
            }
        }
        for (to, raw) in todo.send {
            port.send_mad(to, &raw[..]);
        }
    }
}

impl Drop for RoceListening {
    fn drop(&mut self) {
        let mut manager = manager(self.port.inner());
        let ours = |listener: &Listener| listener.serial == self.serial;
        let gone = if manager.listeners.get(&self.number).is_some_and(ours) {
            manager.listeners.remove(&self.number)
        } else {
            None
        };
        drop(manager);
        drop(gone);
    }
}

impl RoceRequest {
    fn new(asked: Asked) -> RoceRequest {
        let our_psn = asked.port.inner().device.random_u32() & MASK_24;
        RoceRequest {
            port: asked.port,
            id: asked.id,
            answered: false,
            unseen: Some(asked.unseen),
            _pending: asked.pending,
            addrs: asked.addrs,
            private_data: asked.private_data,
            depths: asked.depths,
            retries: asked.retries,
            unreliable: asked.unreliable,
            dest_qp: asked.dest_qp,
            psn: asked.psn,
            our_psn,
            mtu: asked.mtu,
        }
    }

    /// The program has it: it does not count against the listener's backlog any more.
    pub fn seen(&mut self) {
        self.unseen = None;
    }

    /// Accepts it with this queue pair. One of ours has no peer yet, and sends and receives from now on; one that the program moves itself needs
    /// [`RoceRequest::terms`]. [`RoceEvent::Established`] follows when the peer is ready, or [`RoceConn::heard`] says that it has sent.
    ///
    /// # Errors
    /// As [`RoceQp::receive_from`]; [`Error::Invalid`] for too much private data, for a queue pair of another type than the peer's, and where the peer
    /// has given up. The request is refused then.
    pub fn accept(
        mut self,
        end: impl Into<RoceEnd>,
        param: &RoceConnect,
        on_event: impl Fn(RoceEvent) + Send + Sync + 'static,
    ) -> Result<RoceConn, Error> {
        let end = end.into();
        if param.private_data.len() > ROCE_REPLY_DATA {
            return Err(Error::Invalid("too much private data for a reply"));
        }
        if !end.moves_itself() && end.is_unreliable() != self.unreliable {
            self.refuse(reason::INVALID_TRANSPORT, &[]);
            return Err(Error::Invalid(
                "one queue pair is reliable (RC), the peer's is not, or the reverse",
            ));
        }
        self.seen();
        let RoceEnd::Ours(qp) = &end else {
            return self.reply(&end, param, Arc::new(on_event));
        };
        self.start(qp, param)?;
        let accepted = self.reply(&end, param, Arc::new(on_event));
        accepted.inspect_err(|_| qp.to_error())
    }

    /// Our queue pair sends and receives from now on.
    fn start(&self, qp: &RoceQp, param: &RoceConnect) -> Result<(), Error> {
        self.is_waiting()?;
        let way = (&self.port, self.addrs.0);
        self.terms().move_qp(qp, way, self.agreed(param))?;
        // The peer hears of it from now on.
        qp.await_word(self.id);
        Ok(())
    }

    /// What a program needs that moves its queue pair itself.
    pub fn terms(&self) -> RoceTerms {
        RoceTerms {
            dest_qp: self.dest_qp,
            rq_psn: self.our_psn,
            sq_psn: self.psn,
            mtu: self.mtu,
            rnr_timer: RNR_TIMER,
            timeout: ACK_TIMEOUT,
            retry_count: self.retries.0,
            rnr_retry: self.retries.1,
        }
    }

    /// Reads and atomics at once, the peer's and ours.
    fn agreed(&self, param: &RoceConnect) -> (u8, u8) {
        let (peer_takes, peer_sends) = self.depths;
        (param.ird.min(peer_sends), param.ord.min(peer_takes))
    }

    fn is_waiting(&self) -> Result<(), Error> {
        let manager = manager(self.port.inner());
        let connection = manager.connections.get(&self.id);
        let waits = connection.is_some_and(|c| c.exchange.phase() == Phase::Requested);
        waits
            .then_some(())
            .ok_or(Error::Invalid("the peer has given up"))
    }

    fn reply(mut self, end: &RoceEnd, param: &RoceConnect, tell: Tell) -> Result<RoceConn, Error> {
        let port = Arc::clone(self.port.inner());
        let depths = self.agreed(param);
        let mut private_data = param.private_data.clone();
        private_data.resize(ROCE_REPLY_DATA, 0);
        let rep = Rep {
            local_id: 0,
            remote_id: 0,
            qp: end.num(),
            psn: self.our_psn,
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
            let connection = connection.filter(|c| c.exchange.phase() == Phase::Requested);
            let connection = connection.ok_or(Error::Invalid("the peer has given up"))?;
            connection.exchange.accept(port.now(), &rep);
            connection.moves_itself = end.moves_itself();
            connection.qp = end.weak();
            connection.remote_qp = self.dest_qp;
            (connection.depths, connection.rnr_retry) = (depths, self.retries.1);
            connection.tell = Some(tell);
            port.settle(&mut manager, self.id, &mut todo);
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
            port.settle(&mut manager, self.id, &mut todo);
        }
        port.carry_out(todo);
    }
}

impl Drop for RoceRequest {
    fn drop(&mut self) {
        if !self.answered {
            let reason = match self.unseen {
                Some(_) => reason::INVALID_SERVICE,
                None => reason::CONSUMER,
            };
            self.refuse(reason, &[]);
        }
    }
}

impl Connection {
    fn hear(&mut self, id: u32, event: Event, todo: &mut Todo) {
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
    }
}

impl PortInner {
    /// A number of ours that stands for the adapter.
    pub(super) fn guid(&self) -> u64 {
        match self.local_addr().ip() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits() as u64,
        }
    }

    pub(super) fn transaction(&self) -> u64 {
        u64::from(self.device.random_u32()) << 32 | u64::from(self.device.random_u32())
    }

    /// The path MTU for the way there; where there is none yet, that of Ethernet.
    pub(super) fn mtu_to(&self, to: SocketAddr) -> Option<u32> {
        let ip = self.local_addr().ip();
        let way = weft_sys::udp::path_mtu(ip, to).unwrap_or(1500);
        roce_mtu(way, ip.is_ipv6())
    }

    /// After each change of a connection: its messages are to be sent, it is kept for a while if it is over, and the engine looks in time.
    pub(super) fn settle(&self, manager: &mut Manager, id: u32, todo: &mut Todo) {
        let Manager {
            connections,
            due,
            kept,
            ..
        } = manager;
        let Some(connection) = connections.get_mut(&id) else {
            return;
        };
        while let Some(raw) = connection.exchange.take() {
            todo.send.push((connection.peer, raw));
        }
        let next = connection.exchange.deadline();
        if next != connection.due {
            if let Some(before) = connection.due {
                due.remove(&(before, id));
            }
            due.extend(next.map(|at| (at, id)));
            connection.due = next;
        }
        if connection.exchange.phase() == Phase::Over
            && !std::mem::replace(&mut connection.is_kept, true)
        {
            kept.push_back((self.now() + KEPT, id));
        }
        self.watch(manager);
    }

    fn watch(&self, manager: &Manager) {
        if let Some(next) = manager.next() {
            self.watch_manager(self.instant(next));
        }
    }

    /// A management datagram of this peer.
    fn hear(&self, from: SocketAddr, payload: &[u8]) {
        let Some(mad) = Mad::parse(payload) else {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        if self.hear_sidr(from, &mad) || self.puts_off(from, &mad, payload) {
            return;
        }
        let now = self.now();
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let manager = &mut *manager;
            let known = manager.find(from.ip(), &mad.message);
            let connection = known.and_then(|id| Some((id, manager.connections.get_mut(&id)?)));
            match (connection, &mad.message) {
                // The peer has started again, and numbers as before.
                (Some((id, connection)), Message::Req(req))
                    if !connection.exchange.is_request(&mad) =>
                {
                    if connection.exchange.phase() == Phase::Over {
                        manager.asked.remove(&(from.ip(), req.local_id));
                        self.requested(manager, from, mad.transaction, req, &mut todo);
                    } else {
                        tracing::debug!(id, %from, "a request with the number of another connection");
                        refuse(from, mad.transaction, req, reason::STALE, &mut todo);
                    }
                }
                (Some((id, connection)), _) => {
                    if let Some(event) = connection.exchange.on(now, &mad) {
                        connection.hear(id, event, &mut todo);
                    }
                    self.settle(manager, id, &mut todo);
                }
                (None, Message::Req(req)) => {
                    self.requested(manager, from, mad.transaction, req, &mut todo);
                }
                (None, Message::Dreq(dreq)) if self.is_anothers(dreq.remote_id) => {}
                (None, Message::Rep(rep)) if self.is_anothers(rep.remote_id) => {}
                // Of a connection that is forgotten: the peer is told that it is over, or that it is not made.
                (None, Message::Dreq(dreq)) => {
                    let drep = weft_wire::roce::cm::Rtu {
                        local_id: dreq.remote_id,
                        remote_id: dreq.local_id,
                        private_data: &[],
                    };
                    todo.say(from, mad.transaction, Message::Drep(drep));
                }
                (None, Message::Rep(rep)) => todo.say(from, mad.transaction, unknown(rep)),
                (None, _) => {}
            }
        }
        self.carry_out(todo);
    }

    /// Acknowledgements may still be in the hands of a sibling when the peer's word that the connection is over comes straight to us: with sends
    /// outstanding, that word is heard a moment later.
    fn puts_off(&self, from: SocketAddr, mad: &Mad<'_>, payload: &[u8]) -> bool {
        let is_shared = self.siblings.as_ref().is_some_and(|s| !s.is_alone());
        if !is_shared || !matches!(mad.message, Message::Dreq(_)) {
            return false;
        }
        let qp = {
            let mut manager = manager(self);
            let known = manager.find(from.ip(), &mad.message);
            let connection = known.and_then(|id| manager.connections.get_mut(&id));
            connection.and_then(|connection| {
                let is_first = !std::mem::replace(&mut connection.was_put_off, true);
                is_first.then(|| connection.qp.upgrade()).flatten()
            })
        };
        let Some(owner) = qp
            .filter(|qp| qp.outstanding() > 0)
            .and_then(|_| self.owner())
        else {
            return false;
        };
        let payload = payload.to_vec();
        timer::after(&self.device.engine, PASSING, move || {
            owner.inner().hear(from, &payload);
            None
        });
        true
    }

    /// The peer of this connection sends: it has our answer.
    pub(super) fn note_heard(&self, id: u32) {
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            if let Some(connection) = manager.connections.get_mut(&id)
                && let Some(event) = connection.exchange.heard()
            {
                connection.hear(id, event, &mut todo);
                self.settle(&mut manager, id, &mut todo);
            }
        }
        self.carry_out(todo);
    }

    /// The time of some connections has come.
    fn manager_expired(&self) {
        let now = self.now();
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let manager = &mut *manager;
            while let Some((_, id)) = manager.kept.pop_front_if(|(until, _)| *until <= now) {
                manager.remove(id);
            }
            while let Some((_, id)) = manager.due.first().copied().filter(|(at, _)| *at <= now) {
                let Some(connection) = manager.connections.get_mut(&id) else {
                    manager.due.pop_first();
                    continue;
                };
                if let Some(event) = connection.exchange.expired(now) {
                    connection.hear(id, event, &mut todo);
                }
                self.settle(manager, id, &mut todo);
            }
            self.watch(manager);
        }
        self.carry_out(todo);
    }

    pub(super) fn carry_out(&self, todo: Todo) {
        // What a queue pair has put off, an acknowledgement perhaps, goes before the word that the connection is over.
        for qp in todo.end.iter().filter_map(Weak::upgrade) {
            qp.to_error();
        }
        for (to, raw) in todo.send {
            self.send_mad(to, &raw[..]);
        }
        if let Some((id, reply)) = todo.join {
            self.join(id, reply);
        }
        for (tell, event) in todo.tell {
            tell(event);
        }
        if let Some((on_request, asked)) = todo.asked {
            let peer = peer_addr(asked.addrs.0.ip(), scope_of(asked.addrs.0));
            if self.mtu_to(peer).is_some_and(|most| asked.mtu <= most) {
                on_request(asked);
            } else {
                self.refuse_mtu(asked);
            }
        }
    }

    /// The way does not take what a peer asks for. Nothing is kept of it: it is refused again when it comes again.
    fn refuse_mtu(&self, asked: Asked) {
        let id = asked.id;
        RoceRequest::new(asked).refuse(reason::INVALID_MTU, &[]);
        let mut manager = manager(self);
        if manager.kept.pop_back_if(|(_, last)| *last == id).is_some() {
            manager.remove(id);
        }
    }

    /// The peer has accepted our request. A queue pair of ours is moved, then the peer gets our word; a program that moves its own gets the terms.
    fn join(&self, id: u32, reply: Reply) {
        let (qp, peer, moves_itself, terms, depths) = {
            let manager = manager(self);
            let Some(c) = manager.connections.get(&id) else {
                return;
            };
            let terms = RoceTerms {
                dest_qp: reply.qp & MASK_24,
                rq_psn: c.psn,
                sq_psn: reply.psn,
                mtu: c.mtu,
                rnr_timer: RNR_TIMER,
                timeout: ACK_TIMEOUT,
                retry_count: c.param.retry_count,
                rnr_retry: reply.rnr_retry,
            };
            let depths = (
                c.param.ird.min(reply.initiator_depth),
                c.param.ord.min(reply.responder_resources),
            );
            (c.qp.upgrade(), c.peer, c.moves_itself, terms, depths)
        };
        let moved = match qp.zip(self.owner()) {
            _ if !is_number(reply.qp) => Err("the peer names no queue pair"),
            _ if moves_itself => Ok(()),
            None => Err("the queue pair has gone"),
            Some((qp, port)) => terms
                .move_qp(&qp, (&port, peer), depths)
                .map_err(|_| "the queue pair could not be joined"),
        };
        let mut todo = Todo::default();
        {
            let mut manager = manager(self);
            let Some(connection) = manager.connections.get_mut(&id) else {
                return;
            };
            if connection.exchange.phase() != Phase::Replied {
                // Given up meanwhile, by the program or by the peer.
                todo.end.push(Weak::clone(&connection.qp));
                drop(manager);
                return self.carry_out(todo);
            }
            connection.remote_qp = terms.dest_qp;
            let Reply {
                private_data,
                rnr_retry,
                ..
            } = reply;
            let event = match moved {
                Ok(()) if moves_itself => RoceEvent::Replied {
                    private_data,
                    depths,
                    terms,
                },
                Ok(()) => {
                    connection.exchange.ready(&[]);
                    RoceEvent::Established {
                        private_data,
                        depths,
                        rnr_retry,
                    }
                }
                Err(why) => {
                    connection.exchange.reject(reason::NO_RESOURCES, &[]);
                    RoceEvent::Failed(why)
                }
            };
            todo.tell
                .extend(connection.tell.clone().map(|tell| (tell, event)));
            self.settle(&mut manager, id, &mut todo);
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

/// Whether a queue pair of a program may have this number.
fn is_number(num: u32) -> bool {
    (2..MASK_24).contains(&num)
}
