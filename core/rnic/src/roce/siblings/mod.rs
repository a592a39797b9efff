//! Siblings: the devices of this user, in other processes too, that speak RoCE in one network namespace and share its addresses
//! (docs/adr/0091-roce-processes-share-an-address.md).
//!
//! Each has a *slot*, the upper eight bits of the numbers of its queue pairs and connections. The slot is an abstract Unix name, which ends with the
//! process. The kernel gives a packet to any of the sockets that are bound to the address; the process that gets it passes it on to the slot that it is
//! for. All siblings have connections to each other, made when one comes: a device without any knows that it is alone, and does nothing for this.
//!
//! Another user's process can take names and make connections. Its names are passed over, and its connections closed: the kernel says whose they are.

mod message;
mod steer;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use weft_sys::unix::{self, Name};
use weft_sys::{Event, Interest, Withheld, poll_fds, withhold};

use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
pub(super) use message::{Envelope, PortName, Service};
use message::{Message, emit, parse};
pub(super) use steer::{Probe, Steering};

/// Slot 0 has the numbers of the managers, the last one that of multicast groups.
const SLOTS: Range<u8> = 1..0xff;
/// From here on the numbers of slots may contain the ports of listeners (docs/spec/persona.md).
const WITH_PORTS: u8 = 0x80;
/// Connections that are being made to us.
const BACKLOG: u32 = 256;
/// Connections, messages of one connection, before the engine looks at others.
const TURN: usize = 64;
/// Connections at once: each sibling may have one from either side.
const MOST_LINKS: usize = 2 * 256;
/// Bytes that may wait for a sibling; further packets are dropped.
const ROOM: usize = 4 << 20;
/// When a sibling is tried again that has too many connections to take: it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a device that comes waits until all siblings know it. One that is stopped delays it by this.
const GREETING: Duration = Duration::from_millis(100);
/// How long a sibling is asked first that had a listener, and how many of them are known.
const REMEMBERED: Duration = Duration::from_secs(1);
const MOST_SERVICES: usize = 4096;
/// The longest message.
const LONGEST: usize = message::HEADER + (1 << 16);

/// A port of this process, for what siblings say.
pub(super) trait Shared: Send + Sync {
    /// Packets that came to the sibling in this slot.
    fn passed(&self, by: u8, envelope: &Envelope, packets: &[u8]);
    /// A probe of ours has come to the sibling in this slot.
    fn probed(&self, slot: u8, epoch: u32, index: u8);
}

/// What a device has of its siblings.
pub(super) struct Siblings {
    slot: u8,
    next: AtomicU32,
    /// A forked child does not keep the slot.
    _withheld: Option<Withheld>,
    door: OwnedFd,
    registration: Registration,
    engine: Arc<Engine>,
    /// There is no link.
    alone: AtomicBool,
    links: RwLock<Links>,
    ports: Mutex<HashMap<PortName, Weak<dyn Shared>>>,
    /// Where the engine's thread receives, once it has to.
    buffer: Mutex<Vec<u8>>,
    /// When siblings are tried again that could not be reached.
    pause: Mutex<Duration>,
    /// Who has told us that it has the listener of a service, and until when that is believed.
    services: Mutex<HashMap<Service, (u8, Instant)>>,
}

#[derive(Default)]
struct Links {
    /// The link that is sent on, by slot.
    of: HashMap<u8, Arc<Link>>,
    all: Vec<Arc<Link>>,
}

/// A connection to a sibling.
struct Link {
    owner: Weak<Siblings>,
    _withheld: Option<Withheld>,
    fd: OwnedFd,
    /// 0: it has not said it yet.
    slot: AtomicU8,
    registration: Registration,
}

/// The device's handle: with it, the slot is given back.
pub(super) struct Membership(pub(super) Arc<Siblings>);

impl Drop for Membership {
    fn drop(&mut self) {
        let siblings = &self.0;
        siblings.registration.release(siblings.door.as_fd());
        for link in siblings.clear() {
            link.registration.release(link.fd.as_fd());
        }
    }
}

fn slot_name(slot: u8) -> String {
    format!("weft/roce/1/{slot}")
}

impl Siblings {
    /// Takes a slot, one `with_ports` or another one, and connects to the siblings that there are.
    ///
    /// # Errors
    /// `AddrInUse` if all slots are taken; those of sockets.
    pub(super) fn join(engine: &Arc<Engine>, with_ports: bool) -> io::Result<Membership> {
        let random = RandomState::new().hash_one(());
        let of = if with_ports {
            WITH_PORTS..SLOTS.end
        } else {
            SLOTS.start..WITH_PORTS
        };
        let (slot, door) = claim_slot(of, random as u8)?;
        let siblings = Arc::new(Siblings {
            slot,
            next: AtomicU32::new((random >> 32) as u32),
            _withheld: withhold(&door).ok(),
            door,
            registration: Registration::new(engine),
            engine: Arc::clone(engine),
            alone: AtomicBool::new(true),
            links: RwLock::default(),
            ports: Mutex::default(),
            buffer: Mutex::default(),
            pause: Mutex::new(FIRST_PAUSE),
            services: Mutex::default(),
        });
        let source = Arc::clone(&siblings) as Arc<dyn Source>;
        let door = siblings.door.as_fd();
        siblings.registration.start(source, door, Interest::READ)?;
        let membership = Membership(siblings);
        membership.0.dial()?;
        Ok(membership)
    }

    /// Connects to each sibling that has no connection with us. Two that come at once may do so both, and have two.
    fn dial(self: &Arc<Self>) -> io::Result<()> {
        let others = SLOTS.filter(|slot| *slot != self.slot && !self.has(*slot));
        let mut greeted = Vec::new();
        let made = |name: SlotName, fd: OwnedFd| {
            let (hello, len) = emit(&Message::Hello { slot: self.slot });
            if is_ours(&fd) && unix::send_pieces(&fd, [&hello[..len], &[]]).is_ok() {
                greeted.push((name.slot, fd));
            }
        };
        let mut unreached = None;
        let failed = |name: SlotName, error: io::Error| unreached = Some((name.slot, error));
        unix::connect_to_each(others.map(SlotName::new), made, failed)?;
        // From then on they pass on what comes for us.
        let until = Instant::now() + GREETING;
        for (slot, fd) in greeted {
            wait_for_answer(&fd, until);
            self.add(fd, slot);
        }
        if let Some((slot, error)) = unreached {
            let mut pause = lock(&self.pause);
            if *pause == FIRST_PAUSE {
                tracing::warn!(%error, slot, "another process with RoCE, or who took its name, cannot be reached yet: packets for it are lost that come to this one");
            }
            self.registration.set_timer(Instant::now() + *pause);
            *pause = (*pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    /// Takes in a connection.
    fn add(self: &Arc<Self>, fd: OwnedFd, slot: u8) {
        unix::set_send_room(&fd, ROOM);
        let link = Arc::new(Link {
            owner: Arc::downgrade(self),
            _withheld: withhold(&fd).ok(),
            fd,
            slot: AtomicU8::new(slot),
            registration: Registration::new(&self.engine),
        });
        {
            let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
            if links.all.len() >= MOST_LINKS {
                tracing::warn!("too many connections of other processes with RoCE");
                return;
            }
            links.all.push(Arc::clone(&link));
            if slot != 0 {
                links.of.insert(slot, Arc::clone(&link));
            }
            self.alone.store(false, Ordering::SeqCst);
        }
        let source = Arc::clone(&link) as Arc<dyn Source>;
        if let Err(error) = { &link.registration }.start(source, link.fd.as_fd(), Interest::READ) {
            tracing::warn!(%error, "a connection of another process with RoCE");
            self.remove(&link);
        }
    }

    /// The sibling at the other end has gone.
    fn remove(&self, link: &Arc<Link>) {
        {
            let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
            links.all.retain(|other| !Arc::ptr_eq(other, link));
            let slot = link.slot.load(Ordering::Relaxed);
            if links.of.get(&slot).is_some_and(|of| Arc::ptr_eq(of, link)) {
                links.of.remove(&slot);
                let same = |other: &&Arc<Link>| other.slot.load(Ordering::Relaxed) == slot;
                if let Some(other) = links.all.iter().find(same).cloned() {
                    links.of.insert(slot, other);
                }
            }
            self.alone.store(links.all.is_empty(), Ordering::SeqCst);
        }
        link.registration.release(link.fd.as_fd());
    }

    fn clear(&self) -> Vec<Arc<Link>> {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        self.alone.store(true, Ordering::SeqCst);
        links.of.clear();
        std::mem::take(&mut links.all)
    }

    /// The upper eight bits of its numbers.
    pub(super) fn slot(&self) -> u8 {
        self.slot
    }

    /// The next number for a queue pair; one that lives may have it.
    pub(super) fn number(&self) -> u32 {
        let low = self.next.fetch_add(1, Ordering::Relaxed);
        u32::from(self.slot) << 16 | low & 0xffff
    }

    /// Nobody shares addresses with us.
    pub(super) fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    /// How many others there are.
    pub(super) fn count(&self) -> usize {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.of.len()
    }

    /// Whether a sibling has this slot.
    pub(super) fn has(&self, slot: u8) -> bool {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.of.contains_key(&slot)
    }

    /// The port takes what siblings pass on.
    pub(super) fn open(&self, name: PortName, port: Weak<dyn Shared>) {
        let mut ports = lock(&self.ports);
        ports.retain(|_, port| port.strong_count() > 0);
        ports.insert(name, port);
    }

    fn port(&self, name: &PortName) -> Option<Arc<dyn Shared>> {
        lock(&self.ports).get(name)?.upgrade()
    }

    /// Passes packets on. False: the sibling has gone, or takes no more for now; they are lost.
    pub(super) fn pass(&self, slot: u8, envelope: &Envelope, packets: &[u8]) -> bool {
        let link = {
            let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
            links.of.get(&slot).cloned()
        };
        let message = Message::Packets(*envelope, packets);
        link.is_some_and(|link| link.say(&message))
    }

    /// Asks the siblings whose a management datagram is: the one that has said that it has this service, or all of them.
    pub(super) fn ask(&self, service: Option<&Service>, envelope: &Envelope, packet: &[u8]) {
        let known = service.and_then(|service| lock(&self.services).get(service).copied());
        let known = known.filter(|(_, until)| Instant::now() < *until);
        let all: Vec<_> = {
            let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
            match known.and_then(|(slot, _)| links.of.get(&slot)) {
                Some(link) => vec![Arc::clone(link)],
                None => links.of.values().cloned().collect(),
            }
        };
        for link in all {
            link.say(&Message::Packets(*envelope, packet));
        }
    }

    /// Tells a sibling that has asked that we have this service.
    pub(super) fn tell_serves(&self, slot: u8, service: Service) {
        self.tell(slot, &Message::Serves(service));
    }

    /// Tells a sibling that its probe has come here.
    fn tell_probed(&self, slot: u8, port: PortName, epoch: u32, index: u8) {
        self.tell(slot, &Message::Probed { port, epoch, index });
    }

    fn tell(&self, slot: u8, message: &Message<'_>) {
        let link = {
            let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
            links.of.get(&slot).cloned()
        };
        if let Some(link) = link {
            link.say(message);
        }
    }

    /// A sibling says something.
    fn hear(&self, link: &Arc<Link>, bytes: &[u8]) {
        let slot = link.slot.load(Ordering::Relaxed);
        match parse(bytes) {
            Some(Message::Hello { slot: named }) if slot == 0 && SLOTS.contains(&named) => {
                link.slot.store(named, Ordering::Relaxed);
                let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
                links.of.insert(named, Arc::clone(link));
                // Before any packet.
                link.say(&Message::Hello { slot: self.slot });
            }
            // The answer to ours.
            Some(Message::Hello { slot: named }) if slot == named => {}
            Some(Message::Packets(envelope, packets)) => {
                if let Some(port) = self.port(&envelope.port) {
                    port.passed(slot, &envelope, packets);
                }
            }
            Some(Message::Probed { port, epoch, index }) => {
                if let Some(port) = self.port(&port) {
                    port.probed(slot, epoch, index);
                }
            }
            Some(Message::Serves(service)) => {
                let mut services = lock(&self.services);
                let now = Instant::now();
                if services.len() >= MOST_SERVICES {
                    services.retain(|_, (_, until)| *until > now);
                }
                if services.len() < MOST_SERVICES {
                    services.insert(service, (slot, now + REMEMBERED));
                }
            }
            _ => tracing::debug!("a message of another process with RoCE"),
        }
    }
}

/// A slot and its name.
struct SlotName {
    slot: u8,
    name: String,
}

impl SlotName {
    fn new(slot: u8) -> SlotName {
        SlotName {
            slot,
            name: slot_name(slot),
        }
    }
}

impl AsRef<[u8]> for SlotName {
    fn as_ref(&self) -> &[u8] {
        self.name.as_bytes()
    }
}

/// A free slot, looked for from this one on: so the numbers of a process that has ended are not those of the next one.
fn claim_slot(of: Range<u8>, from: u8) -> io::Result<(u8, OwnedFd)> {
    let from = of.start + from % (of.end - of.start);
    for slot in (from..of.end).chain(of.start..from) {
        match unix::listen(Name::Abstract(slot_name(slot).as_bytes()), BACKLOG) {
            Ok(door) => return Ok((slot, door)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    tracing::error!(
        "no RoCE: all {} slots for such processes of this network namespace are taken (Unix names @weft/roce/1/{} to {}, see `ss -xl`); end some of them, or use another network namespace",
        of.len(),
        of.start,
        of.end - 1
    );
    Err(rustix::io::Errno::ADDRINUSE.into())
}

/// Waits until the sibling has answered, which it does when it has heard us, or has gone.
fn wait_for_answer(fd: &OwnedFd, until: Instant) {
    let mut answer = [0; message::HEADER];
    loop {
        match unix::recv_bytes(fd, &mut answer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || poll_fds(&[(fd.as_fd(), Interest::READ)], Some(left)).is_err() {
            return;
        }
    }
}

/// Whether the other end belongs to this user.
fn is_ours(fd: &OwnedFd) -> bool {
    unix::peer_cred(fd).is_ok_and(|cred| cred.is_same_user())
}

impl Link {
    fn say(&self, message: &Message<'_>) -> bool {
        let (header, len) = emit(message);
        let packets = match message {
            Message::Packets(_, packets) => packets,
            _ => &[][..],
        };
        unix::send_pieces(&self.fd, [&header[..len], packets]).is_ok()
    }
}

impl Source for Siblings {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        for _ in 0..TURN {
            match unix::accept(&self.door) {
                Ok(Some(fd)) => {
                    if is_ours(&fd) {
                        self.add(fd, 0);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "another process with RoCE cannot reach this one");
                    break;
                }
            }
        }
        self.registration.arm(self.door.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        if let Err(error) = self.dial() {
            tracing::debug!(%error, "connecting to other processes with RoCE");
        }
    }
}

impl Source for Link {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        let Some(owner) = self.owner.upgrade() else {
            return Next::Done;
        };
        // One thread, the engine's, is at it: the lock is free.
        let mut buffer = std::mem::take(&mut *lock(&owner.buffer));
        buffer.resize(LONGEST, 0);
        for _ in 0..TURN {
            match unix::recv_bytes(&self.fd, &mut buffer) {
                Ok(Some(len)) => owner.hear(&self, &buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => {
                    owner.remove(&self);
                    break;
                }
            }
        }
        *lock(&owner.buffer) = buffer;
        self.registration.arm(self.fd.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

/// A port number of a service that this process has at an address; another process that asks is refused as long as this lives.
pub(super) struct Claim {
    /// When it began, in nanoseconds of the host's clock.
    pub(super) since: u64,
    _withheld: Option<Withheld>,
    _name: OwnedFd,
}

/// The time, as all processes of the host see it.
pub(super) fn host_time() -> u64 {
    weft_sys::thread::now()
}

/// The name of a service.
fn service_name(kind: &str, port: PortName, number: u16) -> String {
    let (ip, scope) = port;
    format!("weft/roce/1/{kind}/{ip}%{scope}/{number}")
}

impl Claim {
    /// # Errors
    /// `AddrInUse` if another process has it.
    pub(super) fn take(kind: &str, port: PortName, number: u16) -> io::Result<Claim> {
        let name = service_name(kind, port, number);
        // Who sees the name looks later.
        let since = host_time();
        let name = unix::claim(name.as_bytes())?;
        Ok(Claim {
            since,
            _withheld: withhold(&name).ok(),
            _name: name,
        })
    }

    /// Whether a process has it.
    pub(super) fn is_taken(kind: &str, port: PortName, number: u16) -> bool {
        unix::is_claimed(service_name(kind, port, number).as_bytes())
    }
}
