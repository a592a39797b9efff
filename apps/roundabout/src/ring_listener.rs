//! Admission of predecessors, and the forming of a ring.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use weft_service::{Admission, Entry, Permit};
use weft_session::acceptor::{STRANGER, judge};
use weft_verbs::cm::{self, ConnParam, ConnectError, LinkOptions};
use weft_verbs::tls::{PublicKey, Tls};
use weft_verbs::{Device, LocalMode, settings};

use crate::kept::Kept;
use crate::link::{In, Out, Ring};
use crate::node::Node;
use crate::rdma::{Prepared, RdmaIn, RdmaOut};
use crate::tcp::TcpLink;
use crate::wire::{HELLO, Hello, VERSION};
use crate::{Error, VISIT, VISIT_ELEMENT, lock};

/// How often the listening thread checks whether it has to end.
const LOOK: Duration = Duration::from_millis(100);
/// How long a request waits for its ring.
const KEEP: Duration = Duration::from_mins(1);
/// How long a node with an unreachable successor waits for its predecessor.
const GRACE: Duration = Duration::from_secs(1);
/// Requests that wait at once.
const WAITING: usize = 256;
/// The time limit for a connection's greeting, whatever it sends meanwhile.
const GREETING: Duration = Duration::from_secs(5);
/// Plain connections that are greeting at once; those over verbs are bounded by the device.
const GREETERS: usize = 64;

/// The keys that are admitted.
pub type Admit = Arc<dyn Fn(&PublicKey) -> bool + Send + Sync>;

/// The peers that may be neighbours.
#[derive(Clone)]
pub enum Security {
    /// Processes of our user on this host; the kernel says so.
    SameUser,
    /// In addition, by TLS, the peers that the environment names (`WEFT_TLS=on`, `WEFT_TLS_KEY`, `WEFT_TLS_PEERS`, see docs/tls.md).
    Environment,
    /// In addition to the first, by TLS, peers with an admitted key. Our successor needs one too, by the settings' own rule.
    Keys(Tls, Admit),
}

enum Guest {
    Rdma(cm::Request, bool),
    Tcp(TcpStream),
}

struct Waits {
    guest: Guest,
    hello: Hello,
    since: Instant,
    /// It is a visitor, and was returned to the node.
    told: bool,
    /// Given up when its ring is formed.
    _entry: Entry,
}

struct Waiting {
    guests: Mutex<HashMap<([u8; 16], u32), Waits>>,
    admission: Admission,
    came: Condvar,
}

impl Waiting {
    fn new() -> Self {
        Self {
            guests: Mutex::default(),
            admission: Admission::new(WAITING, "too many wait"),
            came: Condvar::new(),
        }
    }

    /// Keeps a guest from this address until its ring is formed; gives it back, with the reason, when there is no place. One that has
    /// not shown who it is takes none of the places of the others.
    fn put(
        &self,
        hello: Hello,
        guest: Guest,
        is_known: bool,
        from: IpAddr,
    ) -> Result<(), (Box<Guest>, &'static str)> {
        let mut guests = lock(&self.guests);
        guests.retain(|_, waits| waits.since.elapsed() < KEEP);
        let key = (hello.id, hello.exchange);
        if guests.contains_key(&key) {
            return Err((Box::new(guest), "this place in the ring is taken"));
        }
        let entry = match self.admission.admit(is_known, from) {
            Ok(entry) => entry,
            Err(why) => return Err((Box::new(guest), why)),
        };
        let waits = Waits {
            _entry: entry,
            guest,
            hello,
            since: Instant::now(),
            told: false,
        };
        guests.insert(key, waits);
        drop(guests);
        self.came.notify_all();
        Ok(())
    }

    /// The address and the greeting of a visitor, which continues to wait for its ring. Each is returned once.
    fn visitor(&self, end: Instant) -> Option<(SocketAddr, Hello)> {
        let mut guests = lock(&self.guests);
        loop {
            for waits in guests.values_mut() {
                if let (Guest::Rdma(request, _), VISIT) = (&waits.guest, waits.hello.exchange)
                    && !std::mem::replace(&mut waits.told, true)
                {
                    let ip = request.peer_addr().ip();
                    return Some((SocketAddr::new(ip, waits.hello.port), waits.hello));
                }
            }
            let left = end.checked_duration_since(Instant::now())?;
            let (held, _) = self
                .came
                .wait_timeout(guests, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            guests = held;
        }
    }

    /// The guest of a ring; `None` when it does not come by then, or the ring cannot be formed.
    fn take(&self, ring: &Ring, end: Instant, over: &AtomicBool) -> Option<(Guest, Hello)> {
        let mut guests = lock(&self.guests);
        let (mut end, mut ending) = (end, false);
        loop {
            if let Some(waits) = guests.remove(&(ring.id, ring.exchange)) {
                return Some((waits.guest, waits.hello));
            }
            if over.load(Ordering::SeqCst) && !ending {
                ending = true;
                end = end.min(Instant::now() + GRACE);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let (held, _) = self
                .came
                .wait_timeout(guests, left.min(LOOK))
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            guests = held;
        }
    }
}

#[derive(Clone)]
enum Carrier {
    Rdma { device: Device, security: Security },
    Tcp,
}

/// The address of a node, for as many rings as it takes part in.
pub struct RingListener {
    carrier: Carrier,
    addr: SocketAddr,
    waiting: Arc<Waiting>,
    stop: Arc<AtomicBool>,
    /// Wakes the listening thread.
    wake: Arc<OwnedFd>,
    kept: Arc<Kept>,
    listening: Option<JoinHandle<()>>,
}

fn param(security: &Security, private_data: Vec<u8>, timeout: Duration) -> ConnParam {
    ConnParam {
        private_data,
        ird: 1,
        ord: 1,
        options: LinkOptions {
            timeout,
            ..LinkOptions::default()
        },
        tls: match security {
            Security::SameUser | Security::Environment => None,
            Security::Keys(tls, _) => Some(tls.clone()),
        },
    }
}

/// Whether the environment turns TLS on and names the peers.
fn named_peers() -> bool {
    settings::TLS.is("on") == Ok(true) && settings::TLS_PEERS.path().is_some()
}

fn our_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

impl RingListener {
    /// Listens for neighbours over verbs: shared memory where they are on this host, TCP (by TLS with keys) elsewhere.
    ///
    /// # Errors
    /// [`Error::Local`] when the address cannot be had; [`Error::Invalid`] for an address beyond this host without keys.
    pub fn open(
        bind: SocketAddr,
        security: Security,
        local: Option<LocalMode>,
    ) -> Result<Self, Error> {
        let keys = match security {
            Security::SameUser => false,
            Security::Environment => named_peers(),
            Security::Keys(..) => true,
        };
        if !keys && !bind.ip().to_canonical().is_loopback() {
            return Err(Error::Invalid(format!(
                "{bind} is reached from other hosts, which needs keys: WEFT_TLS=on, WEFT_TLS_KEY and WEFT_TLS_PEERS"
            )));
        }
        let said = |e: &dyn std::fmt::Display| Error::Local(format!("{bind}: {e}"));
        let builder = Device::builder();
        let builder = match local {
            Some(mode) => builder.local(mode),
            None => builder,
        };
        let device = builder.open().map_err(|e| said(&e))?;
        let settings = param(&security, Vec::new(), GREETING);
        let listener = cm::Listener::bind(&device, bind, 64, &settings).map_err(|e| said(&e))?;
        let addr = listener.local_addr();
        let carrier = Carrier::Rdma {
            device,
            security: security.clone(),
        };
        Self::start(carrier, addr, move |waiting, stop, wake| {
            while !stop.load(Ordering::SeqCst) {
                wait_for(listener.as_fd(), wake);
                while let Some(request) = listener.next_request(Some(Duration::ZERO)) {
                    greet(request, &security, waiting);
                }
            }
        })
    }

    /// Listens for neighbours over plain TCP, for comparison. It knows no keys, so it stays on this host.
    ///
    /// # Errors
    /// As [`RingListener::open`].
    pub fn open_tcp(bind: SocketAddr) -> Result<Self, Error> {
        if !bind.ip().to_canonical().is_loopback() {
            return Err(Error::Invalid("plain TCP is for this host alone".into()));
        }
        let said = |e: std::io::Error| Error::Local(format!("{bind}: {e}"));
        let listener = TcpListener::bind(bind).map_err(said)?;
        let addr = listener.local_addr().map_err(said)?;
        listener.set_nonblocking(true).map_err(said)?;
        let greeting = Arc::new(AtomicUsize::new(0));
        Self::start(Carrier::Tcp, addr, move |waiting, stop, wake| {
            while !stop.load(Ordering::SeqCst) {
                wait_for(listener.as_fd(), wake);
                let Ok((stream, peer)) = listener.accept() else {
                    continue;
                };
                if !is_ours(&stream, Instant::now()) {
                    continue;
                }
                let Some(place) = Permit::take(&greeting, GREETERS) else {
                    continue;
                };
                // In a thread of its own: one that is slow does not hold up the others. Without a thread it is closed.
                let waiting = Arc::clone(waiting);
                let _ = thread::Builder::new()
                    .name("weft-ring-greet".into())
                    .spawn(move || {
                        if let Some((hello, stream)) = greeted(stream) {
                            let _ = waiting.put(hello, Guest::Tcp(stream), true, peer.ip());
                        }
                        drop(place);
                    });
            }
        })
    }

    fn start(
        carrier: Carrier,
        addr: SocketAddr,
        listen: impl FnOnce(&Arc<Waiting>, &AtomicBool, BorrowedFd<'_>) + Send + 'static,
    ) -> Result<Self, Error> {
        let waiting = Arc::new(Waiting::new());
        let stop = Arc::new(AtomicBool::new(false));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::Local(format!("no eventfd: {e}")))?;
        let wake = Arc::new(wake);
        let (for_thread, stop_thread) = (Arc::clone(&waiting), Arc::clone(&stop));
        let wake_thread = Arc::clone(&wake);
        let listening = thread::Builder::new()
            .name("weft-ring-listener".into())
            .spawn(move || listen(&for_thread, &stop_thread, wake_thread.as_fd()))
            .map_err(|e| Error::Local(format!("no thread: {e}")))?;
        Ok(Self {
            carrier,
            addr,
            waiting,
            stop,
            wake,
            kept: Arc::default(),
            listening: Some(listening),
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Takes our place in a ring: connects to the successor, waits for the predecessor. All nodes do it at about the same time.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Form`], [`Error::Local`].
    pub fn join(&self, ring: &Ring) -> Result<Node, Error> {
        ring.check()?;
        match &self.carrier {
            Carrier::Rdma { device, security } => self.join_rdma(ring, device, security),
            Carrier::Tcp => self.join_tcp(ring),
        }
    }

    fn join_rdma(&self, ring: &Ring, device: &Device, security: &Security) -> Result<Node, Error> {
        let said = |e: weft_verbs::Error| Error::Local(e.to_string());
        let memory = self.kept.registered(device, ring).map_err(said)?;
        if ring.nodes.len() == 1 {
            return Node::start(ring.clone(), Some(memory), None, &self.kept);
        }
        let end = Instant::now() + ring.patience;
        let (out_base, out_qp) = Prepared::out(&memory).map_err(said)?;
        let (in_base, in_qp) = Prepared::from(&memory).map_err(said)?;
        let next = ring.next();
        let over = AtomicBool::new(false);
        let (out, from) = thread::scope(|scope| {
            let dial = scope.spawn(|| {
                let out = dial(ring, device, security, out_qp, end);
                // A predecessor that connects soon notices it at once; there is no need to wait longer.
                over.store(out.is_err(), Ordering::SeqCst);
                out
            });
            let from = self.guest(ring, end, &over).and_then(|guest| {
                let Guest::Rdma(request, known) = guest else {
                    return Err(form(ring, ring.previous(), "it came by plain TCP"));
                };
                accept(ring, security, request, known, in_qp)
            });
            let out = dial
                .join()
                .unwrap_or_else(|_| Err(form(ring, next, "the connecting thread panicked")));
            (out, from)
        });
        let (out, from) = (out?, from?);
        let out = RdmaOut::new(out_base, out, Arc::clone(&memory));
        let from = RdmaIn::new(in_base, from, Arc::clone(&memory));
        Node::start(
            ring.clone(),
            Some(memory),
            Some((Box::new(from), Box::new(out))),
            &self.kept,
        )
    }

    fn join_tcp(&self, ring: &Ring) -> Result<Node, Error> {
        if ring.nodes.len() == 1 {
            return Node::start(ring.clone(), None, None, &self.kept);
        }
        let end = Instant::now() + ring.patience;
        let to = ring.nodes[ring.next()];
        let failed = |e: std::io::Error| form(ring, ring.next(), &e.to_string());
        let mut out = TcpStream::connect_timeout(&to, ring.patience).map_err(failed)?;
        if !is_ours(&out, end) {
            return Err(form(ring, ring.next(), STRANGER));
        }
        out.write_all(&ring.hello(ring.me).encode())
            .map_err(failed)?;
        let Guest::Tcp(from) = self.guest(ring, end, &AtomicBool::new(false))? else {
            return Err(form(ring, ring.previous(), "it came by RDMA"));
        };
        let said = |e: std::io::Error| Error::Local(e.to_string());
        let (from, out) = (
            TcpLink::new(from).map_err(said)?,
            TcpLink::new(out).map_err(said)?,
        );
        let links = (Box::new(from) as Box<dyn In>, Box::new(out) as Box<dyn Out>);
        Node::start(ring.clone(), None, Some(links), &self.kept)
    }

    /// The next visitor: a node that requests a ring of two with us ([`VISIT`]), which [`RingListener::join`] then forms. `None`: no visitor in time.
    pub fn visit(&self, wait: Duration) -> Option<Ring> {
        let (visitor, hello) = self.waiting.visitor(Instant::now() + wait)?;
        let element = hello.element as usize;
        if hello.nodes != 2 || hello.from != 0 || hello.home || element > VISIT_ELEMENT {
            return None;
        }
        Some(Ring {
            exchange: VISIT,
            agreement: hello.agreement,
            element,
            elements: 4,
            ..Ring::new(hello.id, vec![visitor, self.addr], 1)
        })
    }

    /// Our predecessor, which agrees with us.
    fn guest(&self, ring: &Ring, end: Instant, over: &AtomicBool) -> Result<Guest, Error> {
        let previous = ring.previous();
        let Some((guest, hello)) = self.waiting.take(ring, end, over) else {
            return Err(form(ring, previous, "it did not connect in time"));
        };
        if let Some(why) = hello.differs(&ring.hello(previous)) {
            if let Guest::Rdma(request, _) = guest {
                let _ = request.reject(why.as_bytes());
            }
            return Err(form(ring, previous, &why));
        }
        Ok(guest)
    }
}

impl Drop for RingListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // The counter of an eventfd cannot be full here.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.listening.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until a listener has something, or its listener closes.
fn wait_for(listener: BorrowedFd<'_>, wake: BorrowedFd<'_>) {
    let mut fds = [listener, wake].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let time = Timespec::try_from(LOOK).ok();
    // It looks again after an error too.
    if poll(&mut fds, time.as_ref()).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The greeting of a plain connection, in time.
fn greeted(mut stream: TcpStream) -> Option<(Hello, TcpStream)> {
    let end = Instant::now() + GREETING;
    stream.set_nonblocking(false).ok()?;
    let mut bytes = [0; HELLO];
    let mut have = 0;
    while have < HELLO {
        let left = end.checked_duration_since(Instant::now())?;
        stream
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))
            .ok()?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return None,
            Ok(n) => have += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    Some((Hello::decode(&bytes)?, stream))
}

fn form(ring: &Ring, node: usize, why: &str) -> Error {
    Error::Form {
        node,
        name: ring.nodes[node],
        why: why.into(),
    }
}

/// Looks at a request, and keeps it for its ring.
fn greet(request: cm::Request, security: &Security, waiting: &Waiting) {
    let peer = request.peer_addr();
    let refuse = |request: cm::Request, why: &str| {
        tracing::warn!("{peer}: turned away: {why}");
        let _ = request.reject(why.as_bytes());
    };
    let Some(hello) = Hello::decode(request.private_data()) else {
        return refuse(request, "it does not speak the protocol of rings");
    };
    if hello.version != VERSION {
        return refuse(
            request,
            &format!("versions differ: {} there, {VERSION} here", hello.version),
        );
    }
    let known = judge(Some(&request), |key| match security {
        Security::SameUser => false,
        // Without a file of peers any key would be accepted, and that was not requested.
        Security::Environment => named_peers(),
        Security::Keys(_, admit) => admit(key),
    });
    let known = match known {
        Ok(known) if known || peer.ip().to_canonical().is_loopback() => known,
        Ok(_) => return refuse(request, STRANGER),
        Err(why) => return refuse(request, &why),
    };
    let guest = Guest::Rdma(request, known);
    if let Err((guest, why)) = waiting.put(hello, guest, known, peer.ip())
        && let Guest::Rdma(request, _) = *guest
    {
        refuse(request, why);
    }
}

fn accept(
    ring: &Ring,
    security: &Security,
    request: cm::Request,
    known: bool,
    qp: weft_verbs::Qp,
) -> Result<weft_verbs::Qp, Error> {
    let refused = |why: &str| form(ring, ring.previous(), why);
    let settings = param(security, Vec::new(), KEEP);
    let conn = request
        .accept(qp, &settings)
        .map_err(|e| refused(&e.to_string()))?;
    if !known && !conn.qp.attests_same_user() {
        return Err(refused(STRANGER));
    }
    Ok(conn.qp)
}

/// Whether the kernel attests that the other end is of our user. It cannot do so before the listener has accepted, so ask until `end`.
fn is_ours(stream: &TcpStream, end: Instant) -> bool {
    loop {
        match weft_verbs::tcp_peer_uid(stream) {
            Ok(Some(uid)) => return uid == our_user(),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            _ => return false,
        }
    }
}

fn dial(
    ring: &Ring,
    device: &Device,
    security: &Security,
    qp: weft_verbs::Qp,
    end: Instant,
) -> Result<weft_verbs::Qp, Error> {
    let next = ring.next();
    let hello = ring.hello(ring.me).encode().to_vec();
    let left = end.saturating_duration_since(Instant::now());
    let settings = param(security, hello, left.max(LOOK));
    let conn = cm::connect_qp(ring.nodes[next], qp, device, &settings).map_err(|e| {
        let why = match &e {
            ConnectError::Rejected { private_data } if !private_data.is_empty() => {
                format!("it refused: {}", crate::wire::failure_text(private_data))
            }
            other => other.to_string(),
        };
        form(ring, next, why.trim_end())
    })?;
    // With keys, the handshake has refused a successor whose key is not named.
    let known = match security {
        Security::SameUser => false,
        Security::Environment => conn.qp.tls().is_some() && named_peers(),
        Security::Keys(..) => conn.qp.tls().is_some(),
    };
    if !known && !conn.qp.attests_same_user() && conn.qp.peer_uid() != Some(our_user()) {
        return Err(form(ring, next, STRANGER));
    }
    Ok(conn.qp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_that_wait_do_not_keep_a_known_node_out() {
        let waiting = Waiting::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let put = |number: u32, is_known| {
            let hello = Hello {
                version: VERSION,
                from: 0,
                nodes: 2,
                home: false,
                exchange: number,
                element: 4096,
                id: [7; 16],
                agreement: 0,
                port: 1,
            };
            let guest = Guest::Tcp(stream.try_clone().unwrap());
            waiting.put(hello, guest, is_known, [127, 0, 0, 1].into())
        };
        let strangers = 1..2 * WAITING as u32;
        let kept = strangers
            .filter(|&number| put(number, false).is_ok())
            .count();
        assert!(kept > 0);
        assert!(put(0, true).is_ok(), "{kept} strangers wait");
    }
}
