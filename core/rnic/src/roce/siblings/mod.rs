//! Siblings: the devices of this user, in other processes too, that speak RoCE in one network namespace and share its addresses
//! (docs/adr/0091-roce-processes-share-an-address.md).
//!
//! Each has a *slot*, the upper eight bits of the numbers of its queue pairs and connections. The slot is an abstract Unix name, which ends with the
//! process. The kernel gives a packet to any of the sockets that are bound to the address; the process that gets it passes it on to the slot that it is
//! for. All siblings have connections to each other, made when one comes: a device without any knows that it is alone, and does nothing for this.
//!
//! Another user's process can take names and make connections. Its names are passed over, and its connections closed: the kernel says whose they are.

mod message;
mod probe;
mod steer;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use weft_sys::unix;
use weft_sys::{Event, Interest, PrivateFd, poll_fds};

use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
pub(super) use message::{Envelope, PortName, Service};
use message::{Message, emit, parse};
pub(super) use probe::Probe;
pub(super) use steer::Steering;

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
/// When connections are accepted again after an error.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
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
    fn probed(&self, slot: u8, probe: &Probe);
}

/// What a device has of its siblings.
pub(super) struct Siblings {
    slot: u8,
    next: AtomicU32,
    door: PrivateFd,
    /// Who has no connection with us sees that the slot is taken, without one.
    _claim: PrivateFd,
    /// Accepting has failed: the door is armed with the next timer.
    door_rests: AtomicBool,
    registration: Registration,
    engine: Arc<Engine>,
    /// There is no link.
    alone: AtomicBool,
    links: RwLock<Links>,
    ports: Mutex<HashMap<PortName, Weak<dyn Shared>>>,
    /// Where the engine's thread receives, once it has to.
    buffer: Mutex<Vec<u8>>,
    retry: Mutex<Retry>,
    /// Who has told us that it has the listener of a service, and until when that is believed.
    services: Mutex<HashMap<Service, (u8, Instant)>>,
}

/// The slots whose owners could not be reached yet, and when they are tried again.
struct Retry {
    slots: Vec<u8>,
    pause: Duration,
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
    fd: PrivateFd,
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
        let (slot, claim, door) = claim_slot(of, random as u8)?;
        let siblings = Arc::new(Siblings {
            slot,
            next: AtomicU32::new((random >> 32) as u32),
            door,
            _claim: claim,
            door_rests: AtomicBool::new(false),
            registration: Registration::new(engine),
            engine: Arc::clone(engine),
            alone: AtomicBool::new(true),
            links: RwLock::default(),
            ports: Mutex::default(),
            buffer: Mutex::default(),
            retry: Mutex::new(Retry {
                slots: Vec::new(),
                pause: FIRST_PAUSE,
            }),
            services: Mutex::default(),
        });
        let source = Arc::clone(&siblings) as Arc<dyn Source>;
        let door = siblings.door.as_fd();
        siblings.registration.start(source, door, Interest::READ)?;
        let membership = Membership(siblings);
        // From then on they pass on what comes for us.
        membership.0.dial(SLOTS.collect(), GREETING)?;
        Ok(membership)
    }

    /// Connects to the siblings in these slots that have no connection with us, and waits until they have heard us. Two that come at once may do so both,
    /// and have two.
    fn dial(self: &Arc<Self>, slots: Vec<u8>, patience: Duration) -> io::Result<()> {
        let is_other = |slot: &u8| *slot != self.slot && !self.has(*slot);
        let others = slots.into_iter().filter(is_other);
        let mut greeted = Vec::new();
        let made = |name: SlotName, fd: PrivateFd| {
            let (hello, len) = emit(&Message::Hello { slot: self.slot });
            if is_ours(&fd) && unix::send_pieces(&fd, [&hello[..len], &[]]).is_ok() {
                greeted.push((name.slot, fd));
            }
        };
        let mut unreached = Vec::new();
        let failed = |name: SlotName, error: io::Error| {
            // It has too many connections to take for now. Other errors are those of names that a sibling does not make.
            if error.kind() == io::ErrorKind::WouldBlock {
                unreached.push(name.slot);
            } else {
                tracing::debug!(%error, slot = name.slot, "a name that is none of a process with RoCE");
            }
        };
        let asked = unix::connect_to_each(others.map(SlotName::new), made, failed);
        let until = Instant::now() + patience;
        for (slot, fd) in greeted {
            if !patience.is_zero() {
                wait_for_answer(&fd, until);
            }
            self.add(fd, slot);
        }
        asked?;
        self.try_again(unreached);
        Ok(())
    }

    /// These are tried again after a while.
    fn try_again(&self, slots: Vec<u8>) {
        let mut retry = lock(&self.retry);
        if slots.is_empty() {
            retry.pause = FIRST_PAUSE;
            return;
        }
        if retry.pause == FIRST_PAUSE {
            tracing::warn!(
                ?slots,
                "other processes with RoCE, or who took their names, cannot be reached yet: packets for them are lost that come to this one"
            );
        }
        retry.slots = slots;
        self.registration.set_timer(Instant::now() + retry.pause);
        retry.pause = (retry.pause * 2).min(LONGEST_PAUSE);
    }

    /// Takes in a connection.
    fn add(self: &Arc<Self>, fd: PrivateFd, slot: u8) {
        warn_of_children(fd.is_withheld());
        unix::set_send_room(&fd, ROOM);
        let link = Arc::new(Link {
            owner: Arc::downgrade(self),
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

    /// Whether a process has this slot, also one that has no connection with us yet.
    pub(super) fn is_of_another(&self, slot: u8) -> bool {
        slot != self.slot
            && SLOTS.contains(&slot)
            && (self.has(slot) || unix::is_claimed(slot_name(slot).as_bytes()))
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

    /// The sibling that has said that it has this service.
    pub(super) fn who_serves(&self, service: &Service) -> Option<u8> {
        let known = lock(&self.services).get(service).copied();
        let (slot, _) = known.filter(|(_, until)| Instant::now() < *until)?;
        self.has(slot).then_some(slot)
    }

    /// Asks all siblings whose a management datagram is.
    pub(super) fn ask_all(&self, envelope: &Envelope, packet: &[u8]) {
        let all: Vec<_> = {
            let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
            links.of.values().cloned().collect()
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
    fn tell_probed(&self, slot: u8, port: PortName, probe: Probe) {
        self.tell(slot, &Message::Probed { port, probe });
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
            Some(Message::Probed { port, probe }) => {
                if let Some(port) = self.port(&port) {
                    port.probed(slot, &probe);
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
fn claim_slot(of: Range<u8>, from: u8) -> io::Result<(u8, PrivateFd, PrivateFd)> {
    let from = of.start + from % (of.end - of.start);
    for slot in (from..of.end).chain(of.start..from) {
        let name = slot_name(slot);
        let claim = unix::claim(name.as_bytes());
        let taken = claim.and_then(|claim| {
            let door = unix::listen_alone(name.as_bytes(), BACKLOG)?;
            Ok((claim, door))
        });
        match taken {
            Ok((claim, door)) => {
                warn_of_children(claim.is_withheld() && door.is_withheld());
                return Ok((slot, claim, door));
            }
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
fn wait_for_answer(fd: &PrivateFd, until: Instant) {
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

/// Says once what follows when too many descriptors are withheld.
pub(super) fn warn_of_children(is_withheld: bool) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !is_withheld && !SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "this process has too many sockets for RoCE to keep all of them from forked children: a child that runs on may get packets of its parent, which are lost"
        );
    }
}

/// Whether the other end belongs to this user.
fn is_ours(fd: impl AsFd) -> bool {
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
                        self.add(PrivateFd::new(fd), 0);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    // No descriptors left, most likely: try again later, not in a busy loop.
                    tracing::warn!(%error, "another process with RoCE cannot reach this one");
                    self.door_rests.store(true, Ordering::SeqCst);
                    self.registration.set_timer(Instant::now() + ACCEPT_PAUSE);
                    return Next::Done;
                }
            }
        }
        self.registration.arm(self.door.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        if self.door_rests.swap(false, Ordering::SeqCst) {
            self.registration.arm(self.door.as_fd(), Interest::READ);
        }
        let slots = std::mem::take(&mut lock(&self.retry).slots);
        if slots.is_empty() {
            return;
        }
        // The engine's thread waits for nobody.
        if let Err(error) = self.dial(slots.clone(), Duration::ZERO) {
            tracing::debug!(%error, "connecting to other processes with RoCE");
            self.try_again(slots);
        }
    }
}

impl Source for Link {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        let Some(owner) = self.owner.upgrade() else {
            return Next::Done;
        };
        let _rearm = Rearm(&self);
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
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

/// Arms the link, also when a function of the program has panicked.
struct Rearm<'a>(&'a Link);

impl Drop for Rearm<'_> {
    fn drop(&mut self) {
        let link = self.0;
        link.registration.arm(link.fd.as_fd(), Interest::READ);
    }
}

/// A port number of a service that this process has at an address; another process that asks is refused as long as this lives.
pub(super) struct Claim {
    /// When it began, in nanoseconds of the host's clock.
    pub(super) since: u64,
    _name: PrivateFd,
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
        warn_of_children(name.is_withheld());
        Ok(Claim { since, _name: name })
    }

    /// Whether a process has it.
    pub(super) fn is_taken(kind: &str, port: PortName, number: u16) -> bool {
        unix::is_claimed(service_name(kind, port, number).as_bytes())
    }
}
