//! The UDP transport: one socket for many datagram queue pairs, which are told apart by the number in the datagram (docs/spec/dgram.md).
//!
//! Whoever polls a completion queue of one of them receives for all of them; the engine does it while nobody polls. A poller's lease is
//! as in [`crate::engine`], with a timer for the tick.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use weft_lock::Brief;
use weft_proto::dgram::{Pacer, PacerConfig};
use weft_sys::udp::{RecvBatch, TRAIN, UdpSocket};
use weft_sys::{Event, Interest};
use weft_wire::dgram::{self, Control};

use super::intake::{Answering, HEADROOM, Intake, Last, Train};
use super::local::{Locals, Pipe, UdLocalPeer};
use super::{Arrived, Came, UdDest, UdInner};
use crate::cq::Port;
use crate::device::{Device, DeviceInner, Transport};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;

mod pipes;
mod room;

/// How long a poller that does not poll any more keeps the lease.
const LEASE: Duration = Duration::from_millis(1);
/// System calls of one drive, so that a flood cannot keep a poller from what it polls for.
const BATCH: usize = 8;
/// Datagrams, or trains of them, of one system call.
const PLACES: usize = 4;
/// Room for datagrams that wait to be received, in bytes as the kernel counts them.
const RECEIVE_BUFFER: usize = 4 << 20;
/// With less, senders are slowed down or datagrams are lost; who administers the system is told.
const ENOUGH: usize = 1 << 20;
/// The longest datagram, or train of them, that there is.
const ROOM: usize = 1 << 16;
/// A poller of a port with pipes looks at the kernel's socket once in so many polls: every 3 µs or so.
const SOCKET_EVERY: u32 = 64;
/// Destinations whose pace is known; one that was not sent to for the longest is forgotten.
const MAX_PATHS: usize = 4096;

/// What a [`UdPort`] has dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdPortCounters {
    /// No datagrams of this protocol, or damaged ones.
    pub malformed: u64,
    /// For queue pairs that are not there.
    pub unknown: u64,
}

#[derive(Default)]
struct Paths {
    /// With the number of the last send.
    of: HashMap<SocketAddr, (u64, Pacer)>,
    sends: u64,
}

impl Paths {
    fn get(&mut self, to: SocketAddr, cookie: impl FnOnce() -> u32) -> &mut Pacer {
        self.sends += 1;
        if self.of.len() >= MAX_PATHS && !self.of.contains_key(&to) {
            // Half of them at once, so that this is rare.
            let before = self.sends.saturating_sub(MAX_PATHS as u64 / 2);
            self.of.retain(|_, (last, _)| *last > before);
        }
        let new = || (0, Pacer::new(PacerConfig::default(), cookie()));
        let (last, pacer) = self.of.entry(to).or_insert_with(new);
        *last = self.sends;
        pacer
    }
}

/// A queue pair's address in memory, which is its own for as long as a [`Weak`] of it is kept.
type MemberId = usize;

fn member_id(member: &Weak<UdInner>) -> MemberId {
    member.as_ptr().addr()
}

struct Paced {
    until: Instant,
    member: Weak<UdInner>,
}

#[derive(Default)]
struct Waits {
    of: HashMap<(SocketAddr, MemberId), Paced>,
    /// When the engine looks at them, at the latest.
    timer: Option<Instant>,
}

/// What is at hand while datagrams are received.
struct Rx {
    batch: RecvBatch,
    /// One datagram of a pipe, with room in front.
    datagram: Vec<u8>,
    /// The port's pipes, when there were so many changes.
    pipes: Vec<Arc<Pipe>>,
    changes: u32,
    /// Who is first.
    turn: usize,
    last: Last,
}

pub(crate) struct PortInner {
    pub(crate) device: Arc<DeviceInner>,
    socket: Arc<UdpSocket>,
    addr: SocketAddr,
    registration: Registration,
    locals: Arc<Locals>,
    members: RwLock<HashMap<u32, Weak<UdInner>>>,
    /// Counts changes of `members`.
    member_changes: AtomicU32,
    /// Receiving is one thread's at a time; with the buffer for it.
    rx: Brief<Rx>,
    /// Pipes are to knock from now on, which whoever receives sees to.
    dozing: AtomicBool,
    /// What the kernel gives us of [`RECEIVE_BUFFER`].
    receive_room: u32,
    /// How fast each destination takes what is sent to it.
    paths: Mutex<Paths>,
    /// Queue pairs that wait for a report of a destination, each once for each, and when they try again without one.
    paced: Mutex<Waits>,
    /// One of those may go on: whoever drives the port sees to it.
    due: AtomicBool,
    /// When to look at queue pairs again.
    alarms: Mutex<Vec<(Instant, Weak<UdInner>)>>,
    /// The engine's epoll can fire.
    armed: AtomicBool,
    /// A timer looks after the lease.
    timed: AtomicBool,
    drive_seq: AtomicU32,
    seen_seq: AtomicU32,
    /// The socket takes no more; these wait for it.
    blocked: AtomicBool,
    waiting: Mutex<VecDeque<Weak<UdInner>>>,
    pub(super) malformed: AtomicU64,
    unknown: AtomicU64,
}

impl PortInner {
    /// The UDP port's number.
    pub(super) fn number(&self) -> u16 {
        self.addr.port()
    }

    fn interest(&self) -> Interest {
        let mut interest = Interest::READ;
        interest.set(Interest::WRITE, self.blocked.load(Ordering::SeqCst));
        interest
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn rearm(&self) {
        self.armed.store(true, Ordering::SeqCst);
        if self.locals.any() {
            self.doze();
        }
        if self.due.load(Ordering::SeqCst) {
            self.registration.poke();
        }
        loop {
            let interest = self.interest();
            self.registration.arm(self.fd(), interest);
            // Another thread may have been blocked meanwhile, and have armed before us.
            if self.interest() == interest {
                break;
            }
        }
    }

    /// A poll that found nothing: the poller receives from now on.
    pub(crate) fn drive_leased(&self) {
        // Polls that are counted once are no harm.
        let seq = self.drive_seq.load(Ordering::Relaxed).wrapping_add(1);
        self.drive_seq.store(seq, Ordering::Relaxed);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::SeqCst) {
            self.watch_lease();
        }
        self.drive_some(!self.locals.any() || seq.is_multiple_of(SOCKET_EVERY));
    }

    fn watch_lease(&self) {
        if !self.timed.swap(true, Ordering::SeqCst) {
            self.registration.set_timer(Instant::now() + LEASE);
        }
    }

    /// The poller goes to sleep elsewhere: the engine receives from now on.
    pub(crate) fn release_lease(&self) {
        self.flush_deferred();
        if !self.armed.load(Ordering::SeqCst) {
            self.rearm();
        }
    }

    /// Send what waits, and receive what is there, unless another thread is at it.
    pub(crate) fn drive(&self) {
        self.drive_some(true);
    }

    /// As [`PortInner::drive`], with the kernel's socket or without.
    /// `false`: another thread is receiving.
    fn drive_some(&self, socket: bool) -> bool {
        self.flush_deferred();
        if self.due.load(Ordering::Relaxed) && self.due.swap(false, Ordering::SeqCst) {
            let now = Instant::now();
            self.resume(|_, until| until <= now);
        }
        let Some(mut rx) = self.rx.try_lock() else {
            return false;
        };
        if socket {
            let Rx { batch, last, .. } = &mut *rx;
            self.receive_some(batch, last);
        }
        if self.locals.any() || !rx.pipes.is_empty() {
            self.receive_local(&mut rx);
            drop(rx);
            // Whoever came meanwhile to put the pipes to sleep has left that to us.
            fence(Ordering::SeqCst);
            if self.dozing.load(Ordering::SeqCst) {
                self.doze();
            }
        }
        true
    }

    fn receive_some(&self, batch: &mut RecvBatch, last: &mut Last) {
        for _ in 0..BATCH {
            if !self.receive(batch, last) {
                break;
            }
        }
    }

    /// Takes in what is there: whether there may be more.
    fn receive(&self, batch: &mut RecvBatch, last: &mut Last) -> bool {
        match self.socket.recv_batch(batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // What became of a datagram of ours, perhaps; it is the sender's trouble, and told once.
                tracing::debug!(%error, "receiving datagrams");
                return true;
            }
        }
        let now = Came::default();
        let (mut answering, mut known) = (Answering::new(), None);
        for at in 0..batch.len() {
            let Some((train, buffer)) = batch.get(at) else {
                continue;
            };
            let arrival = train.arrival;
            let mut intake = Intake {
                port: self,
                feed: Train::new(buffer, train.each),
                from: arrival.from,
                to: arrival.to.unwrap_or_else(|| self.addr.ip()),
                traffic_class: arrival.traffic_class,
                now: &now,
            };
            intake.take_all(last, &mut known, &mut answering);
        }
        // One answer to a sender for all that was here of it.
        for member in answering {
            member.answer();
        }
        batch.len() == batch.places()
    }

    pub(super) fn member_changes(&self) -> u32 {
        self.member_changes.load(Ordering::Acquire)
    }

    pub(super) fn member(&self, num: u32) -> Option<Arc<UdInner>> {
        let member = {
            let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
            members.get(&num).and_then(Weak::upgrade)
        };
        if member.is_none() {
            self.unknown.fetch_add(1, Ordering::Relaxed);
        }
        member
    }

    pub(super) fn control(&self, control: Control, arrived: &Arrived<'_>) {
        match control {
            Control::Probe { cookie, sent } => {
                // A group's members do not all answer for the group.
                if self.addr.ip().is_multicast() {
                    return;
                }
                let mut report = Vec::with_capacity(dgram::segment::PROBE_LEN);
                let room = self.receive_room;
                Control::Report { cookie, sent, room }.emit(&mut report);
                // Lost, it is asked for again. It comes from where the probe went.
                let _ = self.socket.send(&report, arrived.from, Some(arrived.to));
            }
            Control::Report { cookie, sent, room } => {
                let news = {
                    let mut paths = lock(&self.paths);
                    let path = paths.of.get_mut(&arrived.from);
                    path.is_some_and(|(_, p)| p.report(Instant::now(), cookie, sent, room))
                };
                if news {
                    self.resume(|to, _| to == arrived.from);
                }
            }
            // It has woken us. There may be room in the pipe, too.
            Control::Knock => self.resume(|to, _| to == arrived.from),
            // To a group, nobody answers for all.
            Control::Hello { flow, qkey } if flow.dst_qp != dgram::GROUP_QP => {
                if let Some(member) = self.member(flow.dst_qp) {
                    member.hello(&flow, qkey, arrived);
                }
            }
            Control::Hello { .. } => {}
            Control::Ack { flow, .. }
            | Control::Fault { flow, .. }
            | Control::Welcome { flow, .. } => {
                if let Some(member) = self.member(flow.dst_qp) {
                    member.answered(arrived.from, &control);
                }
            }
        }
    }

    /// Queue pairs that wait for a report of such a destination, until such a time, try again.
    fn resume(&self, of: impl Fn(SocketAddr, Instant) -> bool) {
        let resumed = |&(to, _): &(SocketAddr, MemberId), paced: &mut Paced| of(to, paced.until);
        // One that waits for several destinations tries them all at once.
        let waiting: HashMap<_, _> = {
            let mut paced = lock(&self.paced);
            let resumed = paced.of.extract_if(resumed);
            resumed.map(|((_, id), p)| (id, p.member)).collect()
        };
        for member in waiting.values().filter_map(Weak::upgrade) {
            member.send_on();
        }
    }

    /// Whether a datagram of `len` bytes may be sent there now, and the pipe that it goes through, if there is one.
    ///
    /// # Errors
    /// The time at which to ask again if no report has come by then.
    pub(super) fn may_send(&self, dest: &UdDest, len: usize) -> Result<Option<Arc<Pipe>>, Instant> {
        if dest.addr.ip().is_multicast() {
            return Ok(None);
        }
        if let Some(pipe) = self.locals.pipe(dest) {
            return pipe.may_send().map(|()| Some(pipe));
        }
        let cookie = || self.device.random_u32();
        let may = {
            let mut paths = lock(&self.paths);
            paths.get(dest.addr, cookie).may_send(Instant::now(), len)
        };
        may.map(|()| None).map_err(|wait| {
            if let Some(probe) = wait.probe {
                self.send_control(probe, dest);
            }
            wait.until
        })
    }

    /// Lost, it is sent again.
    pub(super) fn send_control(&self, control: Control, dest: &UdDest) {
        let mut raw = Vec::with_capacity(dgram::segment::PROBE_LEN);
        control.emit(&mut raw);
        if self.send_local(&raw, raw.len(), dest, None) {
            return;
        }
        let class = dest.traffic_class;
        let _ = self.socket.send_marked(&raw, dest.addr, dest.from, class);
    }

    /// Hand datagrams of one size to the kernel, or to a pipe: how many bytes it has taken, 0 when it has no room now.
    ///
    /// # Errors
    /// What the kernel says of a datagram that cannot go out.
    pub(super) fn send_train(
        &self,
        bytes: &[u8],
        each: usize,
        dest: &UdDest,
        known: Option<Arc<Pipe>>,
    ) -> io::Result<usize> {
        if self.send_local(bytes, each, dest, known) {
            return Ok(bytes.len());
        }
        let to = dest.addr;
        let class = dest.traffic_class;
        let sent = if bytes.len() <= each {
            let one = self.socket.send_marked(bytes, to, dest.from, class);
            one.map(|()| bytes.len())
        } else {
            self.socket.send_train(bytes, each, to, dest.from, class)
        };
        let taken = match sent {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(error),
        };
        if !to.ip().is_multicast() {
            let now = Instant::now();
            let cookie = || self.device.random_u32();
            let probe = {
                let mut paths = lock(&self.paths);
                let pacer = paths.get(to, cookie);
                let sizes = bytes[..taken].chunks(each).take(TRAIN).map(<[u8]>::len);
                sizes.fold(None, |probe, len| pacer.sent(now, len).or(probe))
            };
            if let Some(probe) = probe {
                // Behind what it asks about.
                self.send_control(probe, dest);
            }
        }
        Ok(taken)
    }

    /// This queue pair has something to send to there, and too much is on its way.
    pub(crate) fn wait_for_report(&self, until: Instant, dest: &UdDest, member: Weak<UdInner>) {
        let to = dest.addr;
        let key = (to, member_id(&member));
        lock(&self.paced).of.insert(key, Paced { until, member });
        // The report may have come before anybody waited for it.
        let open = if let Some(pipe) = self.locals.pipe(dest) {
            pipe.may_send().is_ok()
        } else {
            let paths = lock(&self.paths);
            paths.of.get(&to).is_none_or(|(_, p)| p.is_open())
        };
        if !open {
            self.paced_by(until);
            return;
        }
        if let Some(paced) = lock(&self.paced).of.get_mut(&key) {
            paced.until = Instant::now();
        }
        self.due.store(true, Ordering::SeqCst);
        // A poller sees it by itself, and gives the port back when it ceases to poll.
        if self.armed.load(Ordering::SeqCst) {
            self.registration.poke();
        }
    }

    /// The engine is to look at those who wait at this time, if it does not before. A timer for each wait would wake it as often as they wait.
    fn paced_by(&self, until: Instant) {
        {
            let mut paced = lock(&self.paced);
            if paced.timer.is_some_and(|timer| timer <= until) {
                return;
            }
            paced.timer = Some(until);
        }
        self.registration.set_timer(until);
    }

    /// Look at this queue pair again at that time.
    pub(crate) fn set_alarm(&self, at: Instant, member: Weak<UdInner>) {
        lock(&self.alarms).push((at, member));
        self.registration.set_timer(at);
    }

    fn ring_alarms(&self) {
        let now = Instant::now();
        // For these no report has come.
        self.resume(|_, until| until <= now);
        let next = {
            let mut paced = lock(&self.paced);
            paced.timer.take_if(|timer| *timer <= now);
            paced.of.values().map(|paced| paced.until).min()
        };
        if let Some(next) = next {
            self.paced_by(next);
        }
        let mut due = HashMap::new();
        lock(&self.alarms).retain(|(at, member)| {
            if *at <= now {
                due.insert(member_id(member), member.clone());
            }
            *at > now
        });
        for member in due.values().filter_map(Weak::upgrade) {
            member.alarm(now);
        }
    }
}

impl Port for PortInner {
    fn drive(&self) {
        PortInner::drive(self);
    }
    fn drive_leased(&self) {
        PortInner::drive_leased(self);
    }
    fn flush_deferred(&self) {
        PortInner::flush_deferred(self);
    }
    fn release_lease(&self) {
        PortInner::release_lease(self);
    }
}

impl Source for PortInner {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if self.armed.swap(false, Ordering::SeqCst) {
            if self.drive_some(true) {
                self.rearm();
            } else {
                // The socket stays readable for as long as a poller takes a burst out of it. Armed, it would call the engine again and again, on a
                // core that somebody needs.
                self.watch_lease();
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.ring_alarms();
        if self.locals.any() {
            self.locals.knock_again();
        }
        self.timed.store(false, Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) {
            return;
        }
        self.flush_deferred();
        let seq = self.drive_seq.load(Ordering::SeqCst);
        // Who has been receiving since the last look polls all the same.
        if self.seen_seq.swap(seq, Ordering::SeqCst) == seq && self.rx.try_lock().is_some() {
            self.rearm();
        } else {
            self.watch_lease();
        }
    }
}

/// Takes the port out of the engine with the last handle.
struct Owner(Arc<PortInner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.locals.close();
        self.0.registration.release(self.0.fd());
    }
}

/// A UDP socket that datagram queue pairs of a device share; it is closed with the last handle and queue pair. Clones are handles of the same one.
#[derive(Clone)]
pub struct UdPort(Arc<Owner>);

impl UdPort {
    /// Its address.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner().addr
    }

    /// What it has dropped so far.
    pub fn counters(&self) -> UdPortCounters {
        UdPortCounters {
            malformed: self.inner().malformed.load(Ordering::Relaxed),
            unknown: self.inner().unknown.load(Ordering::Relaxed),
        }
    }

    /// Bytes that may wait in its socket to be received, as the kernel counts them.
    pub fn receive_room(&self) -> u32 {
        self.inner().receive_room
    }

    /// Ports of this host that it shares memory with: their datagrams do not go through the kernel.
    pub fn local_peers(&self) -> Vec<UdLocalPeer> {
        self.inner().locals.peers()
    }

    pub(crate) fn inner(&self) -> &Arc<PortInner> {
        &self.0.0
    }

    pub(crate) fn add(&self, num: u32, member: &Arc<UdInner>) {
        let mut members = self
            .inner()
            .members
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        members.insert(num, Arc::downgrade(member));
        self.inner().member_changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn remove(&self, num: u32) {
        let mut members = self
            .inner()
            .members
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        members.remove(&num);
        self.inner().member_changes.fetch_add(1, Ordering::Release);
    }
}

impl Device {
    /// A UDP port for datagram queue pairs (port 0: one that the kernel picks; `[::]`: IPv4 as well).
    ///
    /// # Errors
    /// As `bind(2)`; `Unsupported` on a simulated network.
    pub fn bind_ud(&self, addr: SocketAddr) -> io::Result<UdPort> {
        if !matches!(self.0.transport, Transport::Tcp) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        UdPort::open(&self.0, UdpSocket::bind(addr, RECEIVE_BUFFER)?)
    }
}

impl UdPort {
    /// A port at which a multicast group is heard, on these interfaces.
    pub(crate) fn join(
        device: &Arc<DeviceInner>,
        group: SocketAddr,
        interfaces: &[u32],
    ) -> io::Result<UdPort> {
        UdPort::open(device, UdpSocket::join(group, interfaces, RECEIVE_BUFFER)?)
    }

    fn open(device: &Arc<DeviceInner>, socket: UdpSocket) -> io::Result<UdPort> {
        if device.tls.is_some() {
            tracing::warn!("datagrams are not encrypted: TLS protects connections only");
        }
        socket.receive_trains();
        let addr = socket.local_addr()?;
        let room = socket.receive_room()?;
        if room < ENOUGH {
            tracing::warn!(
                bytes = room,
                "the system gives a UDP socket little room to receive: senders are slowed down to it; \
                 `sysctl net.core.rmem_max={RECEIVE_BUFFER}` gives more"
            );
        }
        // Groups are many, and their messages short.
        let places = if addr.ip().is_multicast() { 1 } else { PLACES };
        let socket = Arc::new(socket);
        let inner = Arc::new(PortInner {
            device: Arc::clone(device),
            addr,
            locals: Locals::open(device, &socket, addr),
            socket,
            registration: Registration::new(&device.engine),
            members: RwLock::default(),
            member_changes: AtomicU32::new(1),
            rx: Brief::new(Rx {
                batch: RecvBatch::new(places, HEADROOM, ROOM),
                datagram: Vec::new(),
                pipes: Vec::new(),
                changes: 0,
                turn: 0,
                last: Last::default(),
            }),
            dozing: AtomicBool::new(false),
            receive_room: u32::try_from(room).unwrap_or(u32::MAX),
            paths: Mutex::default(),
            paced: Mutex::default(),
            due: AtomicBool::new(false),
            alarms: Mutex::default(),
            armed: AtomicBool::new(true),
            timed: AtomicBool::new(false),
            drive_seq: AtomicU32::new(0),
            seen_seq: AtomicU32::new(0),
            blocked: AtomicBool::new(false),
            waiting: Mutex::default(),
            malformed: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
        });
        let looks = Arc::downgrade(&inner);
        inner.locals.set_port(looks);
        let source = Arc::clone(&inner) as Arc<dyn Source>;
        let owner = Owner(inner);
        owner
            .0
            .registration
            .start(source, owner.0.fd(), Interest::READ)?;
        Ok(UdPort(Arc::new(owner)))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use weft_wire::dgram::Datagram;

    use super::super::{UdInit, UdQp, UdReliable};
    use super::*;
    use crate::Cq;
    use crate::types::SendWr;

    const HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    struct Bed {
        device: Device,
        port: UdPort,
        cq: Cq,
        /// It takes nothing, and answers nothing.
        silent: std::net::UdpSocket,
    }

    impl Bed {
        fn new() -> Bed {
            let device = Device::open().unwrap();
            let port = device.bind_ud(HERE).unwrap();
            let cq = device.create_cq(256, None).unwrap();
            let silent = std::net::UdpSocket::bind(HERE).unwrap();
            Bed {
                device,
                port,
                cq,
                silent,
            }
        }

        fn qp(&self, reliable: Option<UdReliable>) -> UdQp {
            let init = UdInit {
                max_send_wr: 1024,
                max_inline: 4096,
                reliable,
                ..UdInit::new(&self.port, 1, &self.cq, &self.cq)
            };
            self.device.alloc_pd().unwrap().create_ud_qp(&init).unwrap()
        }

        fn silent(&self) -> UdDest {
            UdDest {
                addr: self.silent.local_addr().unwrap(),
                qp_num: 1,
                qkey: 1,
                from: None,
                traffic_class: 0,
            }
        }

        /// More than goes to a destination that reports nothing.
        fn stall(&self, qp: &UdQp) {
            let dest = self.silent();
            for _ in 0..1000 {
                let wr = SendWr::send(1).inline(&[0; 256]);
                qp.post_send(&wr, &dest).unwrap();
            }
        }
    }

    /// Who waits for a report of its destination, however often it has tried, waits for it once.
    #[test]
    fn one_wait_for_each_destination() {
        let bed = Bed::new();
        let qp = bed.qp(None);
        let port = bed.port.inner();
        bed.stall(&qp);
        for _ in 0..20 {
            port.resume(|_, _| true);
            let waits = lock(&port.paced).of.len();
            assert!(waits <= 1, "{waits}");
            assert!(lock(&port.alarms).is_empty());
        }
    }

    /// A hostile receiver that lets a flow begin, says that it has no room, and then nothing any more: the engine serves others meanwhile, and what
    /// waits does not grow.
    #[test]
    fn a_receiver_that_takes_nothing_does_not_keep_the_engine() {
        let bed = Bed::new();
        let give_up = Duration::from_hours(1);
        let not_ready = None;
        let qp = bed.qp(Some(UdReliable { give_up, not_ready }));
        let other = bed.device.bind_ud(HERE).unwrap();
        let port = bed.port.inner();
        let dest = bed.silent();
        for id in 0..200 {
            let wr = SendWr::send(id).inline(&[0; 4096]).signaled();
            qp.post_send(&wr, &dest).unwrap();
        }
        let mut answers = 0;
        let mut bytes = [0; 8192];
        while answers < 2 {
            let (len, from) = bed.silent.recv_from(&mut bytes).unwrap();
            let answer = match dgram::read(&bytes[..len]) {
                Ok(Datagram::Control(Control::Hello { flow, .. })) => {
                    let (dst_qp, src_qp) = (flow.src_qp, flow.dst_qp);
                    let flow = dgram::Flow {
                        dst_qp,
                        src_qp,
                        ..flow
                    };
                    Control::Welcome { flow, cookie: 7 }
                }
                Ok(Datagram::Control(Control::Probe { cookie, sent })) => {
                    let room = 0;
                    Control::Report { cookie, sent, room }
                }
                _ => continue,
            };
            let mut raw = Vec::new();
            answer.emit(&mut raw);
            bed.silent.send_to(&raw, from).unwrap();
            answers += 1;
        }
        // Long enough for some time-outs, each twice as long as the one before.
        let start = Instant::now();
        let end = start + Duration::from_mins(1);
        while start.elapsed() < Duration::from_secs(3) {
            // The engine takes another port's datagrams, though nobody polls.
            let before = other.counters().malformed;
            bed.silent.send_to(b"?", other.local_addr()).unwrap();
            while other.counters().malformed == before {
                assert!(Instant::now() < end, "the engine does nothing else");
                std::thread::sleep(Duration::from_millis(1));
            }
            let waits = (lock(&port.paced).of.len(), lock(&port.alarms).len());
            assert!(waits.0 <= 1 && waits.1 <= 16, "{waits:?}");
        }
    }

    /// One that waits for its destination is not in the way of those that wait for the socket.
    #[test]
    fn room_in_the_socket_is_for_all_that_wait_for_it() {
        let bed = Bed::new();
        let (a, b) = (bed.qp(None), bed.qp(None));
        let port = bed.port.inner();
        // A poller has the port, not the engine.
        port.timed.store(true, Ordering::SeqCst);
        port.armed.store(false, Ordering::SeqCst);
        bed.stall(&a);
        for qp in [&a, &b] {
            let members = port.members.read().unwrap();
            port.wait_for_room(Weak::clone(&members[&qp.num()]));
        }
        port.flush();
        assert!(lock(&port.waiting).is_empty());
    }

    /// While a thread takes a burst out of the socket, the engine leaves the port alone; afterwards it takes what nobody took.
    #[test]
    fn the_engine_does_not_turn_round_beside_who_receives() {
        let bed = Bed::new();
        let port = bed.port.inner();
        let held = port.rx.try_lock().unwrap();
        bed.silent.send_to(b"?", bed.port.local_addr()).unwrap();
        let end = Instant::now() + Duration::from_mins(1);
        while port.armed.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "the engine does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(1));
            assert!(!port.armed.load(Ordering::SeqCst), "it is called again");
        }
        drop(held);
        while port.malformed.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < end, "nobody takes it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
