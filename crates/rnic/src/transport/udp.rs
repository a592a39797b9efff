//! The UDP transport: one socket for many datagram queue pairs, which are told apart by the number in the datagram (docs/spec/dgram.md).
//!
//! Whoever polls a completion queue of one of them receives for all of them; the engine does it while nobody polls. A poller's lease is
//! as in [`crate::engine`], with a timer for the tick.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use weft_sys::udp::UdpSocket;
use weft_sys::{Event, Interest};
use weft_wire::dgram::{self, Grh};

use crate::device::{Device, DeviceInner, Transport};
use crate::engine::{Engine, Next, Source, Token};
use crate::lock::{lock, try_lock};
use crate::ud::{Message, UdInner};

/// How long a poller that does not poll any more keeps the lease.
const LEASE: Duration = Duration::from_millis(1);
/// Datagrams of one drive, so that a flood cannot keep a poller from what it polls for.
const BATCH: usize = 32;
/// Room for datagrams that wait to be received, in bytes as the kernel counts them.
const RECEIVE_BUFFER: usize = 4 << 20;
/// The headers and what stands in front of them make room for the [`Grh`].
const HEADROOM: usize = Grh::LEN - dgram::HEADER_LEN;
/// One byte more than the longest datagram: a longer one shows.
const ROOM: usize = HEADROOM + dgram::MAX_LEN + 1;

/// What a [`UdPort`] has dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdPortCounters {
    /// No datagrams of this protocol, or damaged ones.
    pub malformed: u64,
    /// For queue pairs that are not there.
    pub unknown: u64,
}

pub(crate) struct PortInner {
    pub(crate) device: Arc<DeviceInner>,
    socket: UdpSocket,
    addr: SocketAddr,
    token: OnceLock<Token>,
    members: RwLock<HashMap<u32, Weak<UdInner>>>,
    /// Receiving is one thread's at a time; with the buffer for it.
    rx: Mutex<Box<[u8; ROOM]>>,
    /// The engine's epoll can fire.
    armed: AtomicBool,
    /// A timer looks after the lease.
    timed: AtomicBool,
    drive_seq: AtomicU32,
    seen_seq: AtomicU32,
    /// The socket takes no more; these wait for it.
    blocked: AtomicBool,
    waiting: Mutex<VecDeque<Weak<UdInner>>>,
    malformed: AtomicU64,
    unknown: AtomicU64,
}

impl PortInner {
    fn interest(&self) -> Interest {
        let mut interest = Interest::READ;
        interest.set(Interest::WRITE, self.blocked.load(Ordering::SeqCst));
        interest
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn rearm(&self) {
        let Some(token) = self.token.get() else {
            return;
        };
        self.armed.store(true, Ordering::SeqCst);
        loop {
            let interest = self.interest();
            self.device.engine.arm(*token, self.fd(), interest);
            // Another thread may have been blocked meanwhile, and have armed before us.
            if self.interest() == interest {
                break;
            }
        }
    }

    /// A poll that found nothing: the poller receives from now on.
    pub(crate) fn drive_leased(&self) {
        self.drive_seq.fetch_add(1, Ordering::Relaxed);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::SeqCst) {
            self.watch_lease();
        }
        self.drive();
    }

    fn watch_lease(&self) {
        if let Some(token) = self.token.get()
            && !self.timed.swap(true, Ordering::SeqCst)
        {
            let at = Instant::now() + LEASE;
            self.device.engine.set_timer(*token, at);
        }
    }

    /// The poller goes to sleep elsewhere: the engine receives from now on.
    pub(crate) fn release_lease(&self) {
        if !self.armed.load(Ordering::SeqCst) {
            self.rearm();
        }
    }

    /// Send what waits, and receive what is there, unless another thread is at it.
    pub(crate) fn drive(&self) {
        if self.blocked.load(Ordering::Relaxed) {
            self.flush();
        }
        let Some(mut buffer) = try_lock(&self.rx) else {
            return;
        };
        for _ in 0..BATCH {
            if !self.receive(&mut buffer) {
                break;
            }
        }
    }

    fn receive(&self, buffer: &mut [u8; ROOM]) -> bool {
        let arrival = match self.socket.recv(&mut buffer[HEADROOM..]) {
            Ok(arrival) => arrival,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // What became of a datagram of ours, perhaps; it is the sender's trouble, and told once.
                tracing::debug!(%error, "receiving datagrams");
                return true;
            }
        };
        let datagram = buffer[HEADROOM..].get(..arrival.len).unwrap_or_default();
        let (header, payload) = match dgram::parse(datagram) {
            Ok(parsed) => parsed,
            Err(error) => {
                self.malformed.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%error, from = %arrival.from, "a datagram is dropped");
                return true;
            }
        };
        let member = {
            let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
            members.get(&header.dst_qp).and_then(Weak::upgrade)
        };
        let Some(member) = member else {
            self.unknown.fetch_add(1, Ordering::Relaxed);
            return true;
        };
        let start = HEADROOM + payload.start;
        let room = start - Grh::LEN;
        member.arrived(&mut Message {
            header,
            bytes: &mut buffer[room..HEADROOM + payload.end],
            from: arrival.from,
            to: arrival.to.unwrap_or_else(|| self.addr.ip()),
        });
        true
    }

    /// Hand a datagram to the kernel: `false` when that has no room for it now. A datagram that cannot go out is lost, as any may be.
    pub(crate) fn send(
        &self,
        datagram: &[u8],
        to: SocketAddr,
        from: Option<std::net::IpAddr>,
    ) -> bool {
        match self.socket.send(datagram, to, from) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, %to, "a datagram is lost");
                true
            }
        }
    }

    /// This queue pair has something to send, and the socket takes nothing now.
    pub(crate) fn wait_for_room(&self, member: Weak<UdInner>) {
        lock(&self.waiting).push_back(member);
        self.blocked.store(true, Ordering::SeqCst);
        // A poller tries by itself, and gives the port back when it ceases to poll.
        if self.armed.load(Ordering::SeqCst) {
            self.rearm();
        }
    }

    fn flush(&self) {
        if !self.blocked.swap(false, Ordering::SeqCst) {
            return;
        }
        loop {
            let Some(first) = lock(&self.waiting).pop_front() else {
                return;
            };
            if first.upgrade().is_some_and(|member| !member.send_on()) {
                // It waits again, and the others still do.
                return;
            }
        }
    }
}

impl Source for PortInner {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if self.armed.swap(false, Ordering::SeqCst) {
            self.drive();
            self.rearm();
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.timed.store(false, Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) {
            return;
        }
        let seq = self.drive_seq.load(Ordering::SeqCst);
        if self.seen_seq.swap(seq, Ordering::SeqCst) == seq {
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
        if let Some(token) = self.0.token.get() {
            self.0.device.engine.unregister(*token, self.0.fd());
        }
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
    }

    pub(crate) fn remove(&self, num: u32) {
        let mut members = self
            .inner()
            .members
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        members.remove(&num);
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
        let inner = Arc::new(PortInner {
            device: Arc::clone(device),
            addr: socket.local_addr()?,
            socket,
            token: OnceLock::new(),
            members: RwLock::default(),
            rx: Mutex::new(Box::new([0; ROOM])),
            armed: AtomicBool::new(true),
            timed: AtomicBool::new(false),
            drive_seq: AtomicU32::new(0),
            seen_seq: AtomicU32::new(0),
            blocked: AtomicBool::new(false),
            waiting: Mutex::default(),
            malformed: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
        });
        let source = Arc::clone(&inner) as Arc<dyn Source>;
        let token = device.engine.register(source, inner.fd(), Interest::READ)?;
        let _ = inner.token.set(token);
        // The engine may have been here before there was a token to arm it with again.
        inner.rearm();
        Ok(UdPort(Arc::new(Owner(inner))))
    }
}
