//! The UDP transport: one socket for many datagram queue pairs, which the number in the datagram distinguishes (docs/spec/dgram.md). This
//! module sends, and holds sends that wait. The module `intake`, driven by `drive`, processes received datagrams.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use weft_lock::ShortLock;
use weft_proto::dgram::{Pacer, PacerConfig};
use weft_sys::Interest;
use weft_sys::udp::{RecvBatch, TRAIN, UdpSocket};
use weft_wire::dgram::{self, Control, Grh};

use super::local::{Locals, Looks, Pipe, UdLocalPeer};
use super::{UdDest, UdInner};
use crate::device::{Device, DeviceInner, Transport};
use crate::engine::{Registration, Source};
use crate::lock::lock;
use crate::port_lease::PortLease;

/// Datagrams, or trains of them, of one system call.
const PLACES: usize = 4;
/// The headers and the space before them make room for the [`Grh`].
pub(super) const HEADROOM: usize = Grh::LEN - dgram::HEADER_LEN;
/// Room for datagrams that wait to be received, in bytes as the kernel counts them.
const RECEIVE_BUFFER: usize = 4 << 20;
/// With less, senders are slowed down or datagrams are lost; a warning tells the system's administrator.
const ENOUGH: usize = 1 << 20;
/// The longest datagram, or train of them, that there is.
const ROOM: usize = 1 << 16;
/// When a knock that could not be sent is sent again.
const KNOCK_AGAIN: Duration = Duration::from_millis(1);
/// Destinations whose pace is known; one that was not sent to for the longest is forgotten.
const MAX_PATHS: usize = 4096;

/// The datagrams that a [`UdPort`] has dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdPortCounters {
    /// No datagrams of this protocol, or damaged ones.
    pub malformed: u64,
    /// For queue pairs that are not there.
    pub unknown: u64,
}

#[derive(Default)]
pub(super) struct Paths {
    /// With the number of the last send.
    pub(super) of: HashMap<SocketAddr, (u64, Pacer)>,
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
pub(super) type MemberId = usize;

pub(super) fn member_id(member: &Weak<UdInner>) -> MemberId {
    member.as_ptr().addr()
}

pub(super) struct Paced {
    pub(super) until: Instant,
    pub(super) member: Weak<UdInner>,
}

#[derive(Default)]
pub(super) struct Waits {
    pub(super) of: HashMap<(SocketAddr, MemberId), Paced>,
    /// When the engine looks at them, at the latest.
    pub(super) timer: Option<Instant>,
}

/// The queue pair that was found last: good while the port's queue pairs are the same.
#[derive(Default)]
pub(super) struct Last {
    changes: u32,
    number: u32,
    member: Weak<UdInner>,
}

impl Last {
    pub(super) fn find(&mut self, port: &PortInner, number: u32) -> Option<Arc<UdInner>> {
        let changes = port.member_changes();
        if (self.changes, self.number) == (changes, number)
            && let Some(member) = self.member.upgrade()
        {
            return Some(member);
        }
        let member = port.member(number)?;
        *self = Last {
            changes,
            number,
            member: Arc::downgrade(&member),
        };
        Some(member)
    }
}

/// The receiver's state.
pub(super) struct Rx {
    pub(super) batch: RecvBatch,
    /// One datagram of a pipe, with room in front.
    pub(super) datagram: Vec<u8>,
    /// The port's pipes, when there were so many changes.
    pub(super) pipes: Vec<Arc<Pipe>>,
    changes: u32,
    /// The pipe whose turn is first.
    pub(super) turn: usize,
    pub(super) last: Last,
}

pub(crate) struct PortInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(super) socket: Arc<UdpSocket>,
    pub(super) addr: SocketAddr,
    /// It is the address of a group.
    pub(super) is_group: bool,
    pub(super) registration: Registration,
    pub(super) locals: Arc<Locals>,
    pub(super) members: RwLock<HashMap<u32, Weak<UdInner>>>,
    /// Counts changes of `members`.
    member_changes: AtomicU32,
    /// Receiving is one thread's at a time; with the buffer for it.
    pub(super) rx: ShortLock<Rx>,
    /// Pipes have to knock from now on; the receiving thread takes care of that.
    pub(super) dozing: AtomicBool,
    /// The part of [`RECEIVE_BUFFER`] that the kernel grants.
    pub(super) receive_room: u32,
    /// The pace of each destination.
    pub(super) paths: Mutex<Paths>,
    /// Queue pairs that wait for a report of a destination, each once for each, and when they try again without one.
    pub(super) paced: Mutex<Waits>,
    /// A waiting sender may continue; the thread that drives the port takes care of that.
    pub(super) due: AtomicBool,
    /// When to look at queue pairs again.
    pub(super) alarms: Mutex<Vec<(Instant, Weak<UdInner>)>>,
    pub(super) lease: PortLease,
    /// The socket takes no more; these wait for it.
    pub(super) blocked: AtomicBool,
    pub(super) waiting: Mutex<VecDeque<Weak<UdInner>>>,
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

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn rearm(&self) {
        self.lease.arm();
        if self.locals.any() {
            self.doze();
        }
        if self.due.load(Ordering::SeqCst) {
            self.registration.poke();
        }
        self.registration.arm_for(self.fd(), || self.interest());
    }

    /// Looks which pipes there are.
    pub(super) fn refresh(&self, rx: &mut Rx) {
        let changes = self.locals.changes();
        if rx.changes != changes {
            rx.changes = changes;
            rx.pipes = self.locals.pipes();
            rx.datagram.resize(HEADROOM + ROOM, 0);
        }
    }

    /// No thread polls from here on: a thread that puts a datagram into a pipe has to knock.
    pub(super) fn doze(&self) {
        self.dozing.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let Some(mut rx) = self.rx.try_lock() else {
            return;
        };
        self.dozing.store(false, Ordering::SeqCst);
        self.refresh(&mut rx);
        let mut asleep = true;
        for pipe in &rx.pipes {
            // One whose peer has left while a thread polled is still to be removed.
            asleep &= pipe.sleep() && pipe.is_open();
        }
        drop(rx);
        if !asleep {
            self.registration.poke();
        }
    }

    fn member_changes(&self) -> u32 {
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

    /// Whether a datagram of `len` bytes may be sent there now, and its pipe, if there is one.
    ///
    /// # Errors
    /// The time at which to try again if no report has arrived by then.
    pub(super) fn may_send(&self, dest: &UdDest, len: usize) -> Result<Option<Arc<Pipe>>, Instant> {
        if dest.is_group() {
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

    /// Passes datagrams of one size to the kernel, or to a pipe. Returns how many bytes it has taken, 0 if it has no room now.
    ///
    /// # Errors
    /// The kernel's error for a datagram that cannot be sent.
    pub(super) fn send_train(
        &self,
        bytes: &[u8],
        each: usize,
        dest: &UdDest,
        known: Option<Arc<Pipe>>,
    ) -> io::Result<usize> {
        if !dest.is_group() && self.send_local(bytes, each, dest, known) {
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
        if !dest.is_group() {
            let now = Instant::now();
            let cookie = || self.device.random_u32();
            let probe = {
                let mut paths = lock(&self.paths);
                let pacer = paths.get(to, cookie);
                let sizes = bytes[..taken].chunks(each).take(TRAIN).map(<[u8]>::len);
                sizes.fold(None, |probe, len| pacer.sent(now, len).or(probe))
            };
            if let Some(probe) = probe {
                // The probe follows the datagrams that it asks about.
                self.send_control(probe, dest);
            }
        }
        Ok(taken)
    }

    /// Put datagrams of one size into the pipe to their destination, if there is one: that which the sender knows already, mostly.
    fn send_local(
        &self,
        bytes: &[u8],
        each: usize,
        dest: &UdDest,
        known: Option<Arc<Pipe>>,
    ) -> bool {
        let known = known.filter(|pipe| pipe.is_open());
        let Some(pipe) = known.or_else(|| self.locals.pipe(dest)) else {
            return false;
        };
        match pipe.push(bytes, each) {
            Some(false) => true,
            Some(true) => {
                self.locals.knock(&pipe);
                true
            }
            None => {
                // A pipe whose peer has closed is emptied first.
                if pipe.is_open() {
                    self.locals.remove(&pipe);
                }
                false
            }
        }
    }

    /// This queue pair has something to send to there, and too much is on its way.
    pub(crate) fn wait_for_report(&self, until: Instant, dest: &UdDest, member: Weak<UdInner>) {
        let to = dest.addr;
        let key = (to, member_id(&member));
        lock(&self.paced).of.insert(key, Paced { until, member });
        // The report may have arrived before a sender waited for it.
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
        if self.lease.is_armed() {
            self.registration.poke();
        }
    }

    /// Sets the time at which the engine checks waiting senders. A timer for each wait would wake it as often as they wait.
    pub(super) fn paced_by(&self, until: Instant) {
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

    /// This queue pair has something to send, and the socket takes nothing now.
    pub(crate) fn wait_for_room(&self, member: Weak<UdInner>) {
        {
            let mut waiting = lock(&self.waiting);
            if !waiting.iter().any(|other| other.ptr_eq(&member)) {
                waiting.push_back(member);
            }
        }
        self.blocked.store(true, Ordering::SeqCst);
        // A poller tries by itself, and gives the port back when it ceases to poll.
        if self.lease.is_armed() {
            self.rearm();
        }
    }
}

impl Looks for PortInner {
    fn look_again(&self) {
        self.registration.poke();
    }
    fn knock_later(&self) {
        self.registration.set_timer(Instant::now() + KNOCK_AGAIN);
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

    /// The dropped datagrams so far.
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
        self.change(|members| drop(members.insert(num, Arc::downgrade(member))));
    }

    pub(crate) fn remove(&self, num: u32) {
        self.change(|members| drop(members.remove(&num)));
    }

    fn change(&self, f: impl FnOnce(&mut HashMap<u32, Weak<UdInner>>)) {
        let inner = self.inner();
        let mut members = inner
            .members
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        f(&mut members);
        inner.member_changes.fetch_add(1, Ordering::Release);
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
        UdPort::open(&self.0, UdpSocket::bind(addr, RECEIVE_BUFFER)?, false)
    }
}

impl UdPort {
    /// A port at which a multicast group is heard, on these interfaces.
    pub(crate) fn join(
        device: &Arc<DeviceInner>,
        group: SocketAddr,
        interfaces: &[u32],
    ) -> io::Result<UdPort> {
        let socket = UdpSocket::join(group, interfaces, RECEIVE_BUFFER)?;
        UdPort::open(device, socket, true)
    }

    fn open(device: &Arc<DeviceInner>, socket: UdpSocket, is_group: bool) -> io::Result<UdPort> {
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
        let places = if is_group { 1 } else { PLACES };
        let socket = Arc::new(socket);
        let inner = Arc::new(PortInner {
            device: Arc::clone(device),
            addr,
            is_group,
            locals: Locals::open(device, &socket, addr, is_group),
            socket,
            registration: Registration::new(&device.engine),
            members: RwLock::default(),
            member_changes: AtomicU32::new(1),
            rx: ShortLock::new(Rx {
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
            lease: PortLease::default(),
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
