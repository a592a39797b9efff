//! The socket of one local address, UDP port 4791, which all queue pairs with that address share.
//!
//! A thread that polls a completion queue of one of them receives for all; the engine does it while no thread polls. Who receives is agreed as for
//! datagram queue pairs, see [`crate::port_lease`].

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Instant;

use smallvec::SmallVec;
use weft_lock::ShortLock;
use weft_proto::dgram::Now;
use weft_sys::udp::{RecvBatch, UdpSocket};
use weft_sys::{Event, Interest, Withheld, withhold};
use weft_wire::roce::cm;
use weft_wire::roce::{Header, ICRC_LEN, Icrc, PORT, Route};

use super::questions::Questions;
use super::siblings::{Membership, PortName, Siblings, Steering, warn_of_children};
use super::{WINDOW, scope_of};
use crate::cq::Port;
use crate::device::{DeviceInner, Transport};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
use crate::port_lease::PortLease;

/// Packets, or trains of them, of one system call.
const PLACES: usize = 4;
/// What the kernel needs for a packet besides its bytes.
const PACKET_EXTRA: usize = 256;
/// Room for packets that wait to be received, in bytes as the kernel counts them.
const RECEIVE_BUFFER: usize = 4 << 20;
/// The longest packet, or train of them, that there is.
const ROOM: usize = 1 << 16;
const UDP_LEN: usize = 8;
/// Queue pairs of a port whose outstanding requests are looked at after a poll.
const FEW_MEMBERS: usize = 4;
/// System calls of one drive, so that a flood cannot keep a polling thread from its completions.
const BATCH: usize = 8;

/// A queue pair behind the port.
pub(super) trait Member: Send + Sync {
    /// A packet with a right ICRC for it. Nothing is sent.
    fn take(&self, arrival: &Arrival<'_>, header: &Header, payload: &[u8]);
    /// All that is here for now has been taken, by a thread that `polled` or by the engine.
    fn answer(self: Arc<Self>, polled: bool);
    /// A peer, or a switch on the way from it, has met congestion.
    fn congested(&self, from: SocketAddr);
    /// The time given to [`PortInner::set_alarm`] has come.
    fn alarm(self: Arc<Self>);
    /// What it has waited for ([`PortInner::wait`]) is there.
    fn resume(self: Arc<Self>);
    /// The process ends: what was put off is sent, unless a thread is at it. It may be the one that was interrupted, so nothing is waited for.
    fn leave(self: Arc<Self>) {}
    /// Whether a completion is still to come: of a request, or of a receive that is posted.
    fn awaits(&self) -> bool {
        true
    }
}

/// Whose hands a packet has come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The socket.
    Wire,
    /// A sibling found that it is ours.
    Passed,
    /// The sibling in this slot asks whether it is ours; it came at this time of the host's clock.
    Asked { by: u8, at: u64 },
}

/// How a packet has come in.
pub(super) struct Arrival<'a> {
    pub(super) port: &'a PortInner,
    pub(super) now: Now,
    pub(super) route: Route,
    pub(super) traffic_class: u8,
    pub(super) origin: Origin,
    /// Its place in the train that the kernel gave us.
    pub(super) number: u16,
    /// Bytes behind the IP header.
    pub(super) udp_len: usize,
}

/// Queue pairs that have got packets.
pub(super) type Answering = SmallVec<[Arc<dyn Member>; 4]>;

/// The queue pair that was found last, and its number.
pub(super) type Last = Option<(u32, Weak<dyn Member>)>;

/// The receiver's state.
struct Rx {
    batch: RecvBatch,
    last: Last,
}

pub(crate) struct PortInner {
    pub(super) device: Arc<DeviceInner>,
    /// The socket of a multicast group is not withheld from forked children by itself.
    _withheld: Option<Withheld>,
    socket: UdpSocket,
    addr: SocketAddr,
    registration: Registration,
    members: RwLock<HashMap<u32, Weak<dyn Member>>>,
    rx: ShortLock<Rx>,
    lease: PortLease,
    /// The thread that polled sleeps on the socket.
    sleeping: AtomicBool,
    /// The socket takes no more.
    blocked: AtomicBool,
    /// Some of `waiting` may go on.
    due: AtomicBool,
    waiting: Mutex<VecDeque<Weak<dyn Member>>>,
    alarms: Mutex<Alarms>,
    started: Instant,
    pub(super) malformed: AtomicU64,
    unknown: AtomicU64,
    /// Packets, or trains of them, that came here for siblings.
    pub(super) passed: AtomicU64,
    /// A packet was too long for the way, and that was said.
    told: AtomicBool,
    pub(super) manager: Box<dyn Manages>,
    owner: OnceLock<Weak<Owner>>,
    /// Those with whom the address is shared; a group is not.
    pub(super) siblings: Option<Arc<Siblings>>,
    pub(super) steering: Mutex<Steering>,
    /// What siblings were asked.
    pub(super) questions: Mutex<Questions>,
    /// When the steering wants to know of packets that have come to the wrong process, in nanoseconds of [`PortInner::now`].
    pub(super) steer_at: AtomicU64,
}

/// When the engine looks at queue pairs, and at the connections of the manager. Each has one time.
#[derive(Default)]
struct Alarms {
    of: HashMap<usize, Instant>,
    due: BTreeMap<(Instant, usize), Weak<dyn Member>>,
    manager: Option<Instant>,
    /// The timers that the engine has: they cannot be cancelled. Each further one is earlier than all others.
    timers: BTreeSet<Instant>,
}

impl Alarms {
    /// The time for which the engine needs a timer.
    fn timer(&mut self) -> Option<Instant> {
        let first = self.due.keys().next().map(|(at, _)| *at);
        let next = [first, self.manager].into_iter().flatten().min()?;
        let has = self.timers.first().is_some_and(|timer| *timer <= next);
        (!has && self.timers.insert(next)).then_some(next)
    }
}

/// Who handles a management datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Ours,
    /// The sibling in this slot.
    Of(u8),
    /// One of the siblings.
    Someones,
    /// A request for what nobody has.
    Nobodys,
    /// Ours or a sibling's.
    Anyones,
}

/// The connection manager of a port.
pub(super) trait Manages: Any + Send + Sync {
    /// Who handles a management datagram of this peer, which came at this time of the host's clock, and about which a sibling asks or not.
    fn whose(&self, port: &PortInner, arrival: (SocketAddr, u64, bool), payload: &[u8]) -> Whose;
    /// A management datagram of this peer.
    fn hear(&self, port: &PortInner, from: SocketAddr, payload: &[u8]);
    /// The time given to [`PortInner::watch_manager`] has come.
    fn expired(&self, port: &PortInner);
    /// The peer of the connection with this number, which waits for its word, sends.
    fn heard(&self, port: &PortInner, id: u32);
    /// The state of its part for datagrams.
    fn datagrams(&self) -> &dyn Any;
}

/// A group has no connection manager.
struct Unmanaged;

impl Manages for Unmanaged {
    fn whose(
        &self,
        _port: &PortInner,
        _arrival: (SocketAddr, u64, bool),
        _payload: &[u8],
    ) -> Whose {
        Whose::Ours
    }
    fn hear(&self, _port: &PortInner, _from: SocketAddr, _payload: &[u8]) {}
    fn expired(&self, _port: &PortInner) {}
    fn heard(&self, _port: &PortInner, _id: u32) {}
    fn datagrams(&self) -> &dyn Any {
        self
    }
}

/// Takes the port out of the engine with the last handle.
struct Owner(Arc<PortInner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.registration.release(self.0.socket.as_fd());
    }
}

/// The UDP port 4791 of a local address, which the queue pairs with that address share; it is closed with the last handle and queue pair.
#[derive(Clone)]
pub struct RocePort(Arc<Owner>);

impl RocePort {
    /// Its address.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.0.addr
    }

    /// Packets that were dropped: those that are none or damaged, and those for queue pairs that are not there.
    pub fn dropped(&self) -> (u64, u64) {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (of(&self.0.0.malformed), of(&self.0.0.unknown))
    }

    /// Packets, or trains of them, that came here and were passed on to the process that they are for.
    pub fn passed(&self) -> u64 {
        self.0.0.passed.load(Ordering::Relaxed)
    }

    /// The kernel is not told any more which process of the address a packet is for: packets are passed on. For tests.
    pub fn stop_steering(&self) {
        lock(&self.0.0.steering).stop();
    }

    pub(super) fn inner(&self) -> &Arc<PortInner> {
        &self.0.0
    }
}

impl RocePort {
    /// See [`Device::bind_roce`].
    pub(super) fn bind(
        device: &Arc<DeviceInner>,
        ip: IpAddr,
        scope: u32,
        manager: Box<dyn Manages>,
    ) -> io::Result<RocePort> {
        if !matches!(device.transport, Transport::Tcp) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if device.tls.is_some() {
            tracing::error!("RoCE has no encryption, and TLS is asked for");
            return Err(rustix::io::Errno::ACCESS.into());
        }
        let ip = ip.to_canonical();
        let scope = match ip {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => scope,
            _ => 0,
        };
        let mut ports = lock(&device.roce_ports);
        let known = ports.get(&(ip, scope)).and_then(Weak::upgrade);
        if let Some(owner) = known.and_then(|known| known.downcast().ok()) {
            return Ok(RocePort(owner));
        }
        let mut addr = SocketAddr::new(ip, PORT);
        if let SocketAddr::V6(v6) = &mut addr {
            v6.set_scope_id(scope);
        }
        let siblings = siblings(device)?;
        let socket = UdpSocket::bind_in_group(addr, RECEIVE_BUFFER)?;
        warn_of_children(socket.is_withheld());
        // The ICRC covers the IP header.
        socket.forbid_fragments()?;
        let inner = PortInner::open(device, socket, PLACES, manager, Some(siblings))?;
        inner.share();
        let port = RocePort::on(inner);
        ports.retain(|_, owner| owner.strong_count() > 0);
        let owner = Arc::clone(&port.0) as Arc<dyn Any + Send + Sync>;
        ports.insert((ip, scope), Arc::downgrade(&owner));
        Ok(port)
    }

    /// A port at which packets to a multicast group are heard, on these interfaces: one of its own for each call. Other sockets of the host may have
    /// the group too, and each of them gets each packet.
    ///
    /// # Errors
    /// As [`UdpSocket::join`].
    pub(super) fn join(
        device: &Arc<DeviceInner>,
        group: SocketAddr,
        interfaces: &[u32],
    ) -> io::Result<RocePort> {
        let socket = UdpSocket::join(group, interfaces, RECEIVE_BUFFER)?;
        // Groups are many, and their messages few.
        let port = PortInner::open(device, socket, 1, Box::new(Unmanaged), None)?;
        Ok(RocePort::on(port))
    }

    /// The port of this address, if there is one. A link-local address is one of an interface, `scope`.
    pub(super) fn known(device: &DeviceInner, ip: IpAddr, scope: u32) -> Option<RocePort> {
        let scope = match ip {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => scope,
            _ => 0,
        };
        let owner = lock(&device.roce_ports).get(&(ip, scope))?.upgrade()?;
        owner.downcast().ok().map(RocePort)
    }

    fn on(inner: Arc<PortInner>) -> RocePort {
        let owner = Arc::new(Owner(inner));
        let _ = owner.0.owner.set(Arc::downgrade(&owner));
        RocePort(owner)
    }
}

/// The siblings of this device: with the first call it has a slot among them.
pub(super) fn siblings(device: &DeviceInner) -> io::Result<Arc<Siblings>> {
    let mut known = lock(&device.roce_siblings);
    let membership = known.as_deref().and_then(|any| any.downcast_ref());
    if let Some(Membership(siblings)) = membership {
        return Ok(Arc::clone(siblings));
    }
    let membership = Siblings::join(&device.engine, device.numbers_have_ports)?;
    let siblings = Arc::clone(&membership.0);
    *known = Some(Box::new(membership));
    Ok(siblings)
}

impl PortInner {
    fn open(
        device: &Arc<DeviceInner>,
        socket: UdpSocket,
        places: usize,
        manager: Box<dyn Manages>,
        siblings: Option<Arc<Siblings>>,
    ) -> io::Result<Arc<PortInner>> {
        socket.receive_trains();
        let random = || u64::from(device.random_u32());
        let secret = random() << 32 | random();
        let inner = Arc::new(PortInner {
            device: Arc::clone(device),
            addr: socket.local_addr()?,
            _withheld: if socket.is_withheld() {
                None
            } else {
                withhold(&socket).ok()
            },
            socket,
            registration: Registration::new(&device.engine),
            members: RwLock::default(),
            rx: ShortLock::new(Rx {
                batch: RecvBatch::new(places, 0, ROOM),
                last: None,
            }),
            lease: PortLease::default(),
            sleeping: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            due: AtomicBool::new(false),
            waiting: Mutex::default(),
            alarms: Mutex::default(),
            started: Instant::now(),
            malformed: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            told: AtomicBool::new(false),
            manager,
            owner: OnceLock::new(),
            siblings,
            steering: Mutex::new(Steering::new(secret)),
            questions: Mutex::default(),
            steer_at: AtomicU64::new(0),
        });
        let source = Arc::clone(&inner) as Arc<dyn Source>;
        inner
            .registration
            .start(source, inner.socket.as_fd(), Interest::READ)?;
        Ok(inner)
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// As siblings call it.
    pub(super) fn name(&self) -> PortName {
        (self.addr.ip(), scope_of(self.addr))
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// The time of the machines. It does not begin at 0, so that they can go back a little.
    pub(super) fn now(&self) -> Now {
        Now::from_secs(1) + self.started.elapsed()
    }

    pub(super) fn instant(&self, now: Now) -> Instant {
        self.started + now.saturating_sub(Now::from_secs(1))
    }

    pub(super) fn add(&self, num: u32, member: Weak<dyn Member>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.insert(num, member);
    }

    pub(super) fn remove(&self, num: u32) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.remove(&num);
    }

    /// Whether a thread polls, which will send what is put off.
    pub(super) fn is_polled(&self) -> bool {
        self.lease.is_polled() && !self.sleeping.load(Ordering::Relaxed)
    }

    /// Changes with each poll that finds nothing.
    pub(super) fn polls(&self) -> u32 {
        self.lease.polls()
    }

    /// A request is posted.
    pub(super) fn posted(&self) {
        self.lease.posted();
    }

    /// Packets of `mtu` bytes that may be on their way to a peer, whose socket has as much room as ours: three quarters of it.
    pub(super) fn window(&self, mtu: u32) -> u32 {
        let cost = (mtu as usize + PACKET_EXTRA).next_power_of_two() + PACKET_EXTRA;
        let room = self.socket.receive_room().unwrap_or(0);
        u32::try_from(room / cost * 3 / 4).map_or(WINDOW, |fit| fit.min(WINDOW))
    }

    /// Look at this queue pair at that time.
    pub(super) fn set_alarm(&self, at: Instant, member: Weak<dyn Member>) {
        let timer = {
            let mut alarms = lock(&self.alarms);
            let key = member.as_ptr().cast::<()>().addr();
            if let Some(before) = alarms.of.insert(key, at) {
                alarms.due.remove(&(before, key));
            }
            alarms.due.insert((at, key), member);
            alarms.timer()
        };
        if let Some(at) = timer {
            self.registration.set_timer(at);
        }
    }

    /// This queue pair has something to send, after a look at what has come, or when the socket has room.
    pub(super) fn wait(&self, member: Weak<dyn Member>, for_room: bool) {
        lock(&self.waiting).push_back(member);
        if for_room {
            self.blocked.store(true, Ordering::SeqCst);
        } else {
            self.due.store(true, Ordering::SeqCst);
        }
        // A poller tries by itself, and gives the port back when it ceases to poll.
        if self.lease.is_armed() {
            self.rearm();
        }
    }

    /// The port as programs have it; `None` where it is being closed.
    pub(super) fn owner(&self) -> Option<RocePort> {
        self.owner.get().and_then(Weak::upgrade).map(RocePort)
    }

    /// The engine looks at the connections of the manager at that time.
    pub(super) fn watch_manager(&self, at: Instant) {
        let timer = {
            let mut alarms = lock(&self.alarms);
            alarms.manager = Some(alarms.manager.map_or(at, |before| before.min(at)));
            alarms.timer()
        };
        if let Some(at) = timer {
            self.registration.set_timer(at);
        }
    }

    /// The kernel refuses packets.
    pub(super) fn report(&self, error: &io::Error, to: SocketAddr, len: usize) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, %to, bytes = len, "packets of RoCE cannot be sent; for \"Message too long\" a smaller path MTU helps");
        }
    }

    fn interest(&self) -> Interest {
        let mut interest = Interest::READ;
        interest.set(Interest::WRITE, self.blocked.load(Ordering::SeqCst));
        interest
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The engine receives from now on.
    fn rearm(&self) {
        self.lease.arm();
        if self.due.load(Ordering::SeqCst) {
            self.registration.poke();
        }
        self.registration.arm_for(self.fd(), || self.interest());
    }

    fn watch_lease(&self) {
        if let Some(at) = self.lease.watch() {
            self.registration.set_timer(at);
        }
    }

    /// Those that wait go on.
    fn resume(&self) {
        let due = self.due.load(Ordering::Relaxed) && self.due.swap(false, Ordering::SeqCst);
        let room =
            self.blocked.load(Ordering::Relaxed) && self.blocked.swap(false, Ordering::SeqCst);
        if !due && !room {
            return;
        }
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        for member in waiting.iter().filter_map(Weak::upgrade) {
            member.resume();
        }
    }

    /// As [`Member::leave`], of all that wait.
    pub(super) fn leave(&self) {
        if let Ok(waiting) = self.waiting.try_lock() {
            waiting
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(Member::leave);
        }
    }

    /// Receives, unless another thread does: `false`.
    fn drive_some(&self, polled: bool) -> bool {
        self.resume();
        let Some(mut rx) = self.rx.try_lock() else {
            return false;
        };
        for _ in 0..BATCH {
            if !self.receive(&mut rx, polled) {
                break;
            }
        }
        true
    }

    /// Processes available packets; returns whether there may be more.
    fn receive(&self, rx: &mut Rx, polled: bool) -> bool {
        let Rx { batch, last } = rx;
        match self.socket.recv_batch(batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                tracing::debug!(%error, "receiving packets");
                return true;
            }
        }
        let now = self.now();
        let mut answering = Answering::new();
        let shared = self.siblings.as_ref().filter(|s| !s.is_alone());
        for at in 0..batch.len() {
            let Some((train, bytes)) = batch.get(at) else {
                continue;
            };
            let to = train.arrival.to.unwrap_or_else(|| self.addr.ip());
            let mut arrival = Arrival {
                port: self,
                now,
                route: Route {
                    src: train.arrival.from,
                    dst: SocketAddr::new(to, PORT),
                },
                traffic_class: train.arrival.traffic_class,
                origin: Origin::Wire,
                number: 0,
                udp_len: 0,
            };
            if let Some(siblings) = shared {
                let train = (&*bytes, train.each);
                self.take_or_pass(siblings, &mut arrival, train, last, &mut answering);
                continue;
            }
            // A sender whose kernel cuts a train numbers its packets from 0 on: with that, the check of the ICRC is short.
            for (n, packet) in bytes.chunks(train.each.max(1)).enumerate() {
                arrival.number = n as u16;
                self.take(&mut arrival, packet, last, &mut answering);
            }
        }
        // One answer for all that was here of a peer.
        for member in answering {
            member.answer(polled);
        }
        batch.len() == batch.places()
    }

    /// One packet.
    pub(super) fn take(
        &self,
        arrival: &mut Arrival<'_>,
        whole: &[u8],
        last: &mut Last,
        answering: &mut Answering,
    ) {
        arrival.udp_len = UDP_LEN + whole.len();
        let malformed = || {
            self.malformed.fetch_add(1, Ordering::Relaxed);
        };
        let Some((packet, icrc)) = whole.split_last_chunk::<ICRC_LEN>() else {
            return malformed();
        };
        let Arrival { route, number, .. } = arrival;
        let mut crc = Icrc::new(route, *number, packet.len());
        crc.headers(packet);
        if !crc.is_valid(*icrc) {
            return malformed();
        }
        if let Some(num) = Header::congested_qp(packet) {
            if let Some(member) = self.member(num, last) {
                member.congested(route.src);
            }
            return;
        }
        let Ok((header, payload)) = Header::parse(packet) else {
            return malformed();
        };
        if let (cm::QP, Some(deth)) = (header.dest_qp, header.deth) {
            if deth.qkey == cm::QKEY {
                self.manage(arrival, whole, payload);
            }
            return;
        }
        let Some(member) = self.member(header.dest_qp, last) else {
            self.unknown.fetch_add(1, Ordering::Relaxed);
            return;
        };
        member.take(arrival, &header, payload);
        if !answering
            .iter()
            .any(|other| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&member)))
        {
            answering.push(member);
        }
    }

    pub(super) fn member(&self, num: u32, last: &mut Last) -> Option<Arc<dyn Member>> {
        if let Some((of, member)) = last
            && *of == num
            && let Some(member) = member.upgrade()
        {
            return Some(member);
        }
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let member = members.get(&num)?;
        *last = Some((num, Weak::clone(member)));
        member.upgrade()
    }

    fn ring_alarms(&self) {
        let now = Instant::now();
        let mut due = Vec::new();
        let (manager, timer) = {
            let mut alarms = lock(&self.alarms);
            alarms.timers.retain(|timer| *timer > now);
            while let Some(first) = alarms
                .due
                .first_entry()
                .filter(|first| first.key().0 <= now)
            {
                let ((_, key), member) = first.remove_entry();
                alarms.of.remove(&key);
                due.push(member);
            }
            let manager = alarms.manager.take_if(|at| *at <= now);
            (manager, alarms.timer())
        };
        if let Some(at) = timer {
            self.registration.set_timer(at);
        }
        if manager.is_some() {
            self.manager.expired(self);
        }
        for member in due.iter().filter_map(Weak::upgrade) {
            member.alarm();
        }
    }
}

impl Port for PortInner {
    fn drive(&self) {
        self.drive_some(false);
    }

    fn drive_leased(&self) {
        if self.lease.poll() {
            self.watch_lease();
        }
        self.drive_some(true);
    }

    fn flush_deferred(&self) {
        self.resume();
    }

    fn release_lease(&self) {
        self.resume();
        if !self.lease.is_armed() {
            self.rearm();
        }
    }

    fn hand_back(&self) {
        if !self.lease.taken() || self.lease.is_armed() {
            return;
        }
        let members: SmallVec<[_; FEW_MEMBERS]> = {
            let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
            if members.len() > FEW_MEMBERS {
                return;
            }
            members.values().filter_map(Weak::upgrade).collect()
        };
        if !members.iter().any(|member| member.awaits()) {
            self.release_lease();
        }
    }

    /// One thread at a time, or each packet would wake all of them; the engine receives for the others.
    fn begin_wait(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        if self.sleeping.swap(true, Ordering::SeqCst) {
            self.release_lease();
            return None;
        }
        self.resume();
        if self.lease.poll() {
            self.watch_lease();
        }
        Some((self.fd(), self.interest()))
    }

    fn end_wait(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

impl Source for PortInner {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if self.lease.disarm() {
            if self.drive_some(false) {
                self.rearm();
            } else {
                // The socket stays readable while a polling thread takes a burst out of it.
                self.watch_lease();
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.ring_alarms();
        if self.lease.expired() != Some(false) {
            return;
        }
        self.resume();
        if self.lease.is_over() && self.rx.try_lock().is_some() {
            self.rearm();
        } else {
            self.watch_lease();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Nobody;

    impl Member for Nobody {
        fn take(&self, _arrival: &Arrival<'_>, _header: &Header, _payload: &[u8]) {}
        fn answer(self: Arc<Self>, _polled: bool) {}
        fn congested(&self, _from: SocketAddr) {}
        fn alarm(self: Arc<Self>) {}
        fn resume(self: Arc<Self>) {}
    }

    /// A queue pair whose peer is never ready sets a short time and then a long one, again and again: the engine keeps few timers of it.
    #[test]
    fn the_times_of_a_queue_pair_replace_each_other() {
        let mut alarms = Alarms::default();
        let set = |alarms: &mut Alarms, at: Instant| {
            if let Some(before) = alarms.of.insert(1, at) {
                alarms.due.remove(&(before, 1));
            }
            alarms.due.insert((at, 1), Weak::<Nobody>::new());
            alarms.timer();
        };
        let mut now = Instant::now();
        for _ in 0..10_000 {
            set(&mut alarms, now + Duration::from_hours(2));
            set(&mut alarms, now + Duration::from_micros(10));
            now += Duration::from_micros(20);
            alarms.timers.retain(|timer| *timer > now);
            alarms.due.clear();
        }
        assert!(alarms.timers.len() <= 2, "{}", alarms.timers.len());
        assert_eq!(alarms.of.len(), 1);
    }
}
