//! How two processes of one host meet, beside the TCP connection that they have just made (docs/spec/local.md).
//!
//! ```text
//!  initiator                                          responder
//!  TCP connect ─────────────────────────────────────► accepts
//!  Unix connect, Hello (segment, heart, domain) ────► has that TCP connection? same user?
//!              ◄───────────────────────────── Welcome or Decline
//!  MPA request on TCP ──────────────────────────────► the program accepts
//!              ◄──────────── Attach (heart, domain) or Decline, then the MPA reply on TCP
//! ```
//!
//! Whatever goes wrong on the way, at any point, the connection stays on TCP: the Attach is the only message that
//! moves it, and it is there before the reply that the initiator waits for anyway.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use weft_mem::{Peer, Process};
use weft_ring::{End, Role, Segment};
use weft_sys::heart::Pulse;
use weft_sys::unix::{self, Cred, Name};
use weft_sys::{Event, Interest, process};
use weft_wire::local::{MAX_LEN, Message, Party};

use crate::device::{DeviceInner, PdInner};
use crate::engine::{Engine, Next, Source, Token};
use crate::lock::lock;
use crate::qp::QpInner;
use crate::transport::Link;
use crate::transport::local::{Joint, LocalLink, RING_BYTES};

/// How long an initiator waits to be welcomed before it goes on over TCP.
pub(crate) const KNOCK_TIME: Duration = Duration::from_millis(500);
/// The number of users that our user namespace does not know (`/proc/sys/kernel/overflowuid`).
const OVERFLOW_UID: u32 = 65_534;
const HUNG_UP: &str = "the peer hung up";
/// The kernel does not say which; the first is what happens between peers that keep to the rules.
const TRUNCATED: &str =
    "a message came without all of its descriptors (too many open files), or was too long";
/// Descriptors of an Attach: heart, table and up to three arenas; a Hello has the segment before them.
const PARTY_FDS: usize = 5;

/// Why a connection is not on shared memory: a text for people.
pub(crate) type Why = String;

fn why(what: &'static str) -> impl Fn(io::Error) -> Why {
    move |error| format!("{what}: {error}")
}

/// Names under which a listener's door can be found, likeliest first.
pub(crate) struct Names {
    pub(crate) abstracts: Vec<Vec<u8>>,
    pub(crate) paths: Vec<PathBuf>,
}

impl Names {
    /// For connecting to `addr`: that very address, or a listener on all of them.
    fn to(addr: SocketAddr, dir: Option<&std::path::Path>) -> Names {
        let ip = addr.ip().to_canonical().to_string();
        let hosts = [ip.as_str(), "any"];
        Names {
            abstracts: hosts.map(|host| abstract_name(host, addr.port())).into(),
            paths: dir
                .map(|dir| hosts.map(|host| path_name(dir, host, addr.port())).into())
                .unwrap_or_default(),
        }
    }

    /// For listening on `addr`.
    pub(crate) fn at(addr: SocketAddr, dir: Option<&std::path::Path>) -> Names {
        let ip = addr.ip().to_canonical();
        let host = if ip.is_unspecified() {
            "any".to_owned()
        } else {
            ip.to_string()
        };
        Names {
            abstracts: vec![abstract_name(&host, addr.port())],
            paths: dir
                .map(|dir| vec![path_name(dir, &host, addr.port())])
                .unwrap_or_default(),
        }
    }

    fn connect(&self) -> io::Result<OwnedFd> {
        let mut last = io::ErrorKind::ConnectionRefused.into();
        let abstracts = self.abstracts.iter().map(|name| Name::Abstract(name));
        for name in abstracts.chain(self.paths.iter().map(|path| Name::Path(path))) {
            match unix::connect(name) {
                Ok(fd) => return Ok(fd),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn abstract_name(host: &str, port: u16) -> Vec<u8> {
    format!("weft/1/{host}/{port}").into_bytes()
}

/// An IPv6 address has colons, which are fine in a file's name.
fn path_name(dir: &std::path::Path, host: &str, port: u16) -> PathBuf {
    dir.join(format!("weft-{host}-{port}.sock"))
}

/// A peer's domain as the kernel and it name it: its process, which it cannot make up, and a number of its own.
type DomainKey = (Option<u32>, [u8; 16]);

/// What a device has for all its connections on this host.
#[derive(Default)]
pub(crate) struct Neighbours {
    domains: Mutex<HashMap<DomainKey, Weak<Peer>>>,
    processes: Mutex<HashMap<u32, Weak<Neighbour>>>,
}

/// Another process of this host, watched so that its death is noticed even when its children keep its sockets open.
pub(crate) struct Neighbour {
    pidfd: OwnedFd,
    qps: Mutex<Vec<Weak<QpInner>>>,
    token: OnceLock<Token>,
    engine: Weak<Engine>,
}

impl Neighbour {
    /// Tell this queue pair when the process ends. False when it has.
    pub(crate) fn add(&self, qp: &Arc<QpInner>) -> bool {
        let mut qps = lock(&self.qps);
        if qps.len() == qps.capacity() {
            qps.retain(|qp| qp.strong_count() > 0);
        }
        qps.push(Arc::downgrade(qp));
        drop(qps);
        process::pidfd_alive(&self.pidfd)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if let (Some(engine), Some(token)) = (self.engine.upgrade(), self.token.get()) {
            engine.unregister(*token, self.pidfd.as_fd());
        }
    }
}

/// The engine's hold on a neighbour, which must not keep it.
struct Watch(Weak<Neighbour>);

impl Source for Watch {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if let Some(neighbour) = self.0.upgrade() {
            let qps = std::mem::take(&mut *lock(&neighbour.qps));
            for qp in qps.iter().filter_map(Weak::upgrade) {
                qp.peer_died();
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

impl Neighbours {
    fn neighbour(&self, engine: &Arc<Engine>, pid: u32) -> io::Result<Arc<Neighbour>> {
        let mut processes = lock(&self.processes);
        if let Some(known) = processes.get(&pid).and_then(Weak::upgrade)
            && process::pidfd_alive(&known.pidfd)
        {
            return Ok(known);
        }
        processes.retain(|_, known| known.strong_count() > 0);
        let neighbour = Arc::new(Neighbour {
            pidfd: process::pidfd_open(pid)?,
            qps: Mutex::default(),
            token: OnceLock::new(),
            engine: Arc::downgrade(engine),
        });
        let watch = Arc::new(Watch(Arc::downgrade(&neighbour)));
        let token = engine.register(watch, neighbour.pidfd.as_fd(), Interest::READ)?;
        let _ = neighbour.token.set(token);
        processes.insert(pid, Arc::downgrade(&neighbour));
        Ok(neighbour)
    }

    /// The peer's domain: mapped once, however many connections lead there.
    fn domain(&self, cred: Cred, party: &Party, mut fds: Vec<OwnedFd>) -> io::Result<Arc<Peer>> {
        if fds.len() < 2 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let heart = fds.remove(0);
        let key = (cred.pid, party.domain);
        let mut domains = lock(&self.domains);
        if let Some(known) = domains.get(&key).and_then(Weak::upgrade)
            && known.alive()
        {
            return Ok(known);
        }
        domains.retain(|_, known| known.strong_count() > 0);
        let peer = Arc::new(Peer::open(fds)?);
        if let Some(pid) = cred.pid {
            let pulse = Pulse::open(&heart)?;
            let pidfd = process::pidfd_open(pid)?;
            peer.set_process(Process { pid, pidfd, pulse });
        }
        domains.insert(key, Arc::downgrade(&peer));
        Ok(peer)
    }
}

/// What both sides bring.
struct Bringing {
    party: Party,
    domain: Arc<weft_mem::Domain>,
}

fn bring(pd: &PdInner, qp: u32) -> Result<Bringing, Why> {
    let device = &pd.device;
    let domain = device
        .table
        .domain(pd.id)
        .map_err(why("no shared memory to be had"))?;
    // Declared void when nobody holds it any more.
    let _ = pd.domain.set(Arc::clone(&domain));
    Ok(Bringing {
        party: Party {
            qp,
            trusted: process::peers_may_trace(),
            cookie_addr: device.cookie.as_ptr() as u64,
            cookie: *device.cookie,
            domain: domain.id(),
        },
        domain,
    })
}

/// Send a message with the segment, if any, the heart and the domain.
fn send(
    wire: &OwnedFd,
    device: &DeviceInner,
    message: &Message,
    segment: Option<BorrowedFd<'_>>,
    bringing: &Bringing,
) -> Result<(), Why> {
    let heart = device
        .engine
        .heart()
        .ok_or("no memory for the sign of life")?;
    let mut fds: Vec<BorrowedFd<'_>> = segment.into_iter().collect();
    fds.push(heart);
    fds.extend(bringing.domain.fds(bringing.party.trusted));
    let mut bytes = Vec::with_capacity(MAX_LEN);
    message.emit(&mut bytes);
    unix::send_with_fds(wire, &bytes, &fds).map_err(why("the peer does not listen"))
}

fn send_plain(wire: &OwnedFd, message: &Message) {
    let mut bytes = Vec::with_capacity(MAX_LEN);
    message.emit(&mut bytes);
    // Whoever is gone needs no answer.
    let _ = unix::send_with_fds(wire, &bytes, &[]);
}

/// `Ok(None)`: nothing has come yet.
fn receive(wire: &OwnedFd) -> Result<Option<(Message, Vec<OwnedFd>)>, Why> {
    let mut buf = [0; MAX_LEN];
    match unix::recv_with_fds(wire, &mut buf, PARTY_FDS + 1) {
        Ok(Some((n, fds))) => match Message::parse(&buf[..n]) {
            Some(message) => Ok(Some((message, fds))),
            None => Err("the peer speaks another version".into()),
        },
        Ok(None) => Err(HUNG_UP.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(TRUNCATED.into()),
        Err(error) => Err(format!("the peer's answer: {error}")),
    }
}

fn same_user(wire: &OwnedFd) -> Result<Cred, Why> {
    let cred = unix::peer_cred(wire).map_err(why("asking who is there"))?;
    // Where user namespaces do not map a user, everybody has this number.
    if cred.uid != process::uid() || cred.uid == OVERFLOW_UID {
        return Err("the peer runs as another user".into());
    }
    Ok(cred)
}

/// Everything is there: make the link.
fn join(
    device: &DeviceInner,
    end: End,
    met: Met,
    ours: &Bringing,
    tcp: Arc<dyn Link>,
) -> Result<Arc<LocalLink>, Why> {
    let Met {
        wire,
        cred,
        party,
        fds,
    } = met;
    let peer = device
        .neighbours
        .domain(cred, &party, fds)
        .map_err(why("the peer's memory"))?;
    let process = cred.pid.is_some() && peer.probe(party.cookie_addr, &party.cookie);
    let neighbour = match cred.pid {
        Some(pid) if pid != std::process::id() => Some(
            device
                .neighbours
                .neighbour(&device.engine, pid)
                .map_err(why("watching the peer's process"))?,
        ),
        _ => None,
    };
    let link = LocalLink::new(
        Joint {
            end,
            peer,
            wire,
            tcp,
            peer_qp: party.qp,
            process,
            trusted: ours.party.trusted,
        },
        neighbour,
    );
    let reader: Arc<dyn weft_mem::Reader> = Arc::clone(&link) as _;
    ours.domain.add_reader(Arc::downgrade(&reader));
    Ok(link)
}

/// The other side, once it has said who it is.
struct Met {
    wire: OwnedFd,
    cred: Cred,
    party: Party,
    fds: Vec<OwnedFd>,
}

/// An initiator at the door.
pub(crate) struct Knock {
    wire: OwnedFd,
    cred: Cred,
    end: End,
    bringing: Bringing,
    pub(crate) deadline: Instant,
    pub(crate) token: Option<Token>,
}

/// What came of knocking.
pub(crate) enum Answer {
    Wait,
    Welcome,
    No(Why),
}

impl Knock {
    /// Say hello to whoever listens beside `tcp`'s peer.
    pub(crate) fn start(
        device: &DeviceInner,
        pd: &PdInner,
        qp: u32,
        tcp: &dyn Link,
    ) -> Result<Knock, Why> {
        let (from, to) = (tcp.local_addr(), tcp.peer_addr());
        if device.local_dir.is_none() && !same_host(from.ip(), to.ip()) {
            return Err("the peer is on another host".into());
        }
        let wire = Names::to(to, device.local_dir.as_deref())
            .connect()
            .map_err(|error| match error.kind() {
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
                    "the peer offers no shared memory".to_owned()
                }
                _ => format!("the peer's door: {error}"),
            })?;
        let cred = same_user(&wire)?;
        let bringing = bring(pd, qp)?;
        let (segment, fd) = Segment::create(RING_BYTES).map_err(why("a segment"))?;
        let hello = Message::Hello {
            party: bringing.party,
            from,
        };
        send(&wire, device, &hello, Some(fd.as_fd()), &bringing)?;
        Ok(Knock {
            wire,
            cred,
            end: End::new(Arc::new(segment), Role::Initiator),
            bringing,
            deadline: Instant::now() + KNOCK_TIME,
            token: None,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }

    pub(crate) fn answer(&self) -> Answer {
        match receive(&self.wire) {
            Ok(None) => Answer::Wait,
            Ok(Some((Message::Welcome, _))) => Answer::Welcome,
            Ok(Some((Message::Decline(reason), _))) => Answer::No(reason),
            Ok(Some(_)) => Answer::No("the peer's answer makes no sense".into()),
            Err(error) => Answer::No(error),
        }
    }

    /// The responder has replied: on to shared memory, if it said so before that. It has gone there already then: when
    /// following fails, so does the connection.
    pub(crate) fn finish(
        self,
        device: &DeviceInner,
        tcp: Arc<dyn Link>,
    ) -> Result<Result<Arc<LocalLink>, Why>, io::Error> {
        let (party, fds) = match receive(&self.wire) {
            Ok(Some((Message::Attach(party), fds))) => (party, fds),
            Ok(Some((Message::Decline(reason), _))) => return Ok(Err(reason)),
            Ok(_) => return Ok(Err("the peer did not come along".into())),
            // Without an Attach it has gone nowhere.
            Err(reason) if reason == HUNG_UP => return Ok(Err(reason)),
            Err(reason) => return Err(half_way(&reason)),
        };
        let met = Met {
            wire: self.wire,
            cred: self.cred,
            party,
            fds,
        };
        match join(device, self.end, met, &self.bringing, tcp) {
            Ok(link) => Ok(Ok(link)),
            Err(reason) => Err(half_way(&reason)),
        }
    }
}

fn half_way(reason: &str) -> io::Error {
    io::Error::other(format!(
        "meeting the peer in shared memory failed half-way: {reason}"
    ))
}

/// Whether a connection between these addresses stays on this host, as far as addresses tell.
pub(crate) fn same_host(ours: IpAddr, theirs: IpAddr) -> bool {
    let (ours, theirs) = (ours.to_canonical(), theirs.to_canonical());
    ours == theirs || theirs.is_loopback()
}

/// An initiator that has said hello, on the responder's side.
pub(crate) struct Guest {
    met: Met,
    end: End,
}

/// Somebody at the door who has not said anything yet.
pub(crate) struct Visitor {
    wire: OwnedFd,
    cred: Cred,
}

impl Visitor {
    /// `None`: turned away.
    pub(crate) fn admit(wire: OwnedFd) -> Option<Visitor> {
        match same_user(&wire) {
            Ok(cred) => Some(Visitor { wire, cred }),
            Err(reason) => {
                send_plain(&wire, &Message::Decline(reason));
                None
            }
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }

    /// What it says: itself, and its TCP address. `Ok(None)`: nothing yet.
    pub(crate) fn hello(&self) -> Result<Option<(Hello, SocketAddr)>, Why> {
        let Some((message, mut fds)) = receive(&self.wire)? else {
            return Ok(None);
        };
        let Message::Hello { party, from } = message else {
            return Err("not a hello".into());
        };
        if fds.is_empty() {
            return Err("a hello without a segment".into());
        }
        let segment = fds.remove(0);
        let segment = Segment::open(segment).map_err(|error| format!("the segment: {error}"))?;
        Ok(Some((
            Hello {
                party,
                fds,
                segment,
            },
            from,
        )))
    }

    pub(crate) fn welcome(self, hello: Hello) -> Guest {
        send_plain(&self.wire, &Message::Welcome);
        let Hello {
            party,
            fds,
            segment,
        } = hello;
        Guest {
            met: Met {
                wire: self.wire,
                cred: self.cred,
                party,
                fds,
            },
            end: End::new(Arc::new(segment), Role::Responder),
        }
    }

    pub(crate) fn decline(self, reason: Why) {
        send_plain(&self.wire, &Message::Decline(reason));
    }
}

/// What a visitor brought.
pub(crate) struct Hello {
    party: Party,
    fds: Vec<OwnedFd>,
    segment: Segment,
}

impl Guest {
    /// The program accepts on a queue pair: take the guest along, or tell it that the connection stays on TCP.
    pub(crate) fn accept(
        self,
        device: &DeviceInner,
        pd: &PdInner,
        qp: u32,
        tcp: Arc<dyn Link>,
    ) -> Result<Arc<LocalLink>, Why> {
        let Guest { met, end } = self;
        let wire = met.wire.try_clone().map_err(why("a descriptor"))?;
        let link = bring(pd, qp).and_then(|bringing| {
            let link = join(device, end, met, &bringing, tcp)?;
            send(
                &wire,
                device,
                &Message::Attach(bringing.party),
                None,
                &bringing,
            )?;
            Ok(link)
        });
        if let Err(reason) = &link {
            send_plain(&wire, &Message::Decline(reason.clone()));
        }
        link
    }
}
