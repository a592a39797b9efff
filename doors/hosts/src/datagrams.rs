//! Which UDP sockets of this host take frames of datagram-iWARP: what programs say of theirs, and the questions of other brokers.
//!
//! Three kinds of threads: a *session* for each program, which tells of its sockets; a *relay* for each program and host that it asks; and on that
//! host a *server* for each relay. A server answers for the socket to which the kernel delivers the datagrams that the question names, and tells the
//! relay when that socket does not take frames any more.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_run::dgram::{self as rules, Route};
use weft_run::ud::{self, Kind, LEASE_MS, MESSAGE, Message, Note};
use weft_sdp::{RecvFlags, Sink, Source, Stream};
use weft_sys::{EventFd, Interest, poll_fds, unix};
use weft_verbs::ext::lock;

use crate::wire::MAGIC_LEN;

/// The first bytes of a relay: the version is the last.
pub(crate) const MAGIC: [u8; MAGIC_LEN] = *b"weftrnU1";
/// Sockets of all programs.
const SOCKETS: usize = 1 << 18;
/// Sockets of a program.
const OURS: usize = 1 << 16;
/// Answers to a host that are watched.
const WATCHED: usize = 1 << 16;
/// For how long: the lease, and as much for an answer that is under way.
const KEPT: Duration = Duration::from_millis(2 * LEASE_MS);
/// A host with as many as it may have is looked through for old ones no more often than this.
const SWEEP: Duration = Duration::from_secs(1);
/// Streams of one host: one for each of its programs that asks. The other threads of the broker are left to other hosts.
const STREAMS: usize = 1024;
/// Streams of all hosts, each with a thread: half of those of the broker, so that connections keep the others.
pub(crate) const ALL_STREAMS: usize = 4096;
/// Time limit for a peer that takes nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes read from a stream at once.
const TAKE: usize = 64 * MESSAGE;

/// The sockets that take frames, by their cookies.
pub(crate) struct Sockets {
    qkey: u32,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    taking: HashMap<u64, Taking>,
    servers: Vec<Weak<Watch>>,
    peers: HashMap<IpAddr, Peer>,
    /// Of all of them.
    streams: usize,
}

/// Another host.
#[derive(Default)]
struct Peer {
    streams: usize,
    /// Answers to it that are watched.
    watched: usize,
    /// When old ones were last dropped.
    swept: Option<Instant>,
}

/// A socket that takes frames.
#[derive(Default)]
struct Taking {
    /// How many sessions say so.
    sessions: u32,
    /// Another host was told.
    was_found: bool,
}

/// What a server has answered.
struct Watch {
    /// The host that asks.
    from: IpAddr,
    heard: EventFd,
    routes: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    /// By socket, with the time of the last answer.
    of: HashMap<u64, HashMap<Route, Instant>>,
    /// Their sockets take no frames any more.
    lost: Vec<Route>,
}

impl Sockets {
    pub(crate) fn new() -> io::Result<Sockets> {
        Ok(Sockets {
            qkey: ud::qkey()?,
            table: Mutex::default(),
        })
    }

    fn add(&self, cookie: u64) {
        let mut table = lock(&self.table);
        if table.taking.len() < SOCKETS {
            table.taking.entry(cookie).or_default().sessions += 1;
        }
    }

    /// A session does not say so any more. Returns whether another host was told that the socket takes frames.
    fn remove(&self, cookie: u64) -> bool {
        let mut table = lock(&self.table);
        let table = &mut *table;
        let Some(taking) = table.taking.get_mut(&cookie) else {
            return false;
        };
        let was_found = taking.was_found;
        taking.sessions -= 1;
        if taking.sessions > 0 {
            return was_found;
        }
        table.taking.remove(&cookie);
        table.servers.retain(|server| {
            let Some(watch) = server.upgrade() else {
                return false;
            };
            let mut watched = lock(&watch.routes);
            if let Some(routes) = watched.of.remove(&cookie) {
                if let Some(peer) = table.peers.get_mut(&watch.from) {
                    peer.watched -= routes.len();
                }
                watched.lost.extend(routes.into_keys());
                watch.heard.signal();
            }
            true
        });
        was_found
    }

    /// A stream of this host begins, if it has not too many.
    fn enter(&self, from: IpAddr) -> bool {
        let mut table = lock(&self.table);
        if table.streams >= ALL_STREAMS {
            return false;
        }
        let peer = table.peers.entry(from).or_default();
        let is_let_in = peer.streams < STREAMS;
        peer.streams += usize::from(is_let_in);
        table.streams += usize::from(is_let_in);
        is_let_in
    }

    fn exit(&self, from: IpAddr) {
        let mut table = lock(&self.table);
        table.streams -= 1;
        if let Some(peer) = table.peers.get_mut(&from) {
            peer.streams -= 1;
            if peer.streams == 0 {
                table.peers.remove(&from);
            }
        }
    }

    /// A server has ended.
    fn forget(&self, watch: &Watch) {
        let mut table = lock(&self.table);
        let of = std::mem::take(&mut lock(&watch.routes).of);
        if let Some(peer) = table.peers.get_mut(&watch.from) {
            peer.watched -= of.values().map(HashMap::len).sum::<usize>();
        }
    }

    /// Whether the socket that gets these datagrams takes frames. From then on the server hears when it does not any more.
    fn takes(&self, route: &Route, watch: &Watch) -> bool {
        let Ok(Some(cookie)) = rules::receiver_from_afar(route) else {
            return false;
        };
        // Both under the table's lock: who removes the socket finds what is watched.
        lock(&self.table).watch(cookie, route, watch, Instant::now())
    }
}

impl Table {
    /// Whether this socket takes frames, of which the server tells another host.
    fn watch(&mut self, cookie: u64, route: &Route, watch: &Watch, now: Instant) -> bool {
        let Some(taking) = self.taking.get_mut(&cookie) else {
            return false;
        };
        let peer = self.peers.entry(watch.from).or_default();
        {
            let mut watched = lock(&watch.routes);
            let routes = watched.of.get_mut(&cookie);
            if let Some(answered) = routes.and_then(|routes| routes.get_mut(route)) {
                *answered = now;
                return true;
            }
        }
        let pause = if peer.watched < WATCHED { KEPT } else { SWEEP };
        if (peer.swept).is_none_or(|swept| now.duration_since(swept) >= pause) {
            peer.swept = Some(now);
            let servers = self.servers.iter().filter_map(Weak::upgrade);
            let of_it = servers.filter(|server| server.from == watch.from);
            peer.watched -= of_it.map(|server| server.sweep(now)).sum::<usize>();
        }
        if peer.watched >= WATCHED {
            return false;
        }
        taking.was_found = true;
        let mut watched = lock(&watch.routes);
        watched.of.entry(cookie).or_default().insert(*route, now);
        peer.watched += 1;
        true
    }
}

impl Watch {
    /// Drops answers that count no more. Returns how many.
    fn sweep(&self, now: Instant) -> usize {
        let mut dropped = 0;
        lock(&self.routes).of.retain(|_, routes| {
            let before = routes.len();
            routes.retain(|_, answered| now.duration_since(*answered) < KEPT);
            dropped += before - routes.len();
            !routes.is_empty()
        });
        dropped
    }
}

fn wait(fds: &[(std::os::fd::BorrowedFd<'_>, Interest)]) -> io::Result<()> {
    match poll_fds(fds, None) {
        Err(e) if e.kind() != io::ErrorKind::Interrupted => Err(e),
        _ => Ok(()),
    }
}

/// Hears a program until it ends: which of its sockets take frames.
pub(crate) fn session(wire: &OwnedFd, sockets: &Sockets) {
    let mut ours = HashSet::new();
    if ud::welcome(wire, sockets.qkey).is_err() {
        return;
    }
    loop {
        match ud::told(wire) {
            Ok(Some(Note::Takes(cookie))) => {
                if ours.len() < OURS && ours.insert(cookie) {
                    sockets.add(cookie);
                }
            }
            Ok(Some(Note::Gone(cookie))) => {
                if ours.remove(&cookie) {
                    sockets.remove(cookie);
                }
            }
            Ok(Some(Note::Part(cookie))) => {
                let was_found = ours.remove(&cookie) && sockets.remove(cookie);
                if ud::left(wire, cookie, was_found).is_err() {
                    break;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if wait(&[(wire.as_fd(), Interest::READ)]).is_err() {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "a program's session ends");
                break;
            }
        }
    }
    for cookie in ours {
        sockets.remove(cookie);
    }
}

/// The messages that come by a stream.
struct Incoming<'a> {
    stream: &'a Stream,
    bytes: Vec<u8>,
}

impl Incoming<'_> {
    /// The next message; `None` while there is none.
    fn next(&mut self) -> Result<Option<Message>, End> {
        if self.bytes.len() < MESSAGE {
            let mut more = [0; TAKE];
            match self
                .stream
                .recv(&mut [Sink::Bytes(&mut more)], RecvFlags::DONTWAIT)
            {
                Ok(0) => return Err(End::Peer(Errno::CONNRESET)),
                Ok(n) => self.bytes.extend_from_slice(&more[..n]),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(error) => return Err(End::Peer(error)),
            }
        }
        if self.bytes.len() < MESSAGE {
            return Ok(None);
        }
        let message = Message::parse(&self.bytes[..MESSAGE]).ok_or(End::Order)?;
        self.bytes.drain(..MESSAGE);
        Ok(Some(message))
    }
}

/// Why a relay or a server ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the program has ended")]
    Program,
    #[error("the other broker is gone: {0}")]
    Peer(Errno),
    #[error("a message that has no place here")]
    Order,
    #[error("waiting failed: {0}")]
    System(#[from] io::Error),
}

fn send(stream: &Stream, bytes: &[u8]) -> Result<(), End> {
    match stream.send(&[Source::Bytes(bytes)], false) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(End::Peer(Errno::TIMEDOUT)),
        Err(error) => Err(End::Peer(error)),
    }
}

/// Passes a program's questions on to the broker of the host `ip`, and its answers back, until one of them ends.
pub(crate) fn relay(wire: &OwnedFd, stream: &Stream, ip: IpAddr) {
    stream.set_send_timeout(Some(PATIENCE));
    let mut relay = Relay {
        wire,
        ip,
        incoming: Incoming {
            stream,
            bytes: Vec::new(),
        },
        answer: None,
    };
    let end = send(stream, &MAGIC).and_then(|()| relay.run());
    if let Err(end) = end {
        tracing::debug!(%ip, %end, "no more questions about datagrams");
    }
}

/// Takes turns until one fails. Between those that had nothing to do it sleeps, after a last look with the stream's wake-ups armed.
fn drive<T>(
    stream: &Stream,
    side: &mut T,
    turn: fn(&mut T) -> Result<bool, End>,
    sleep: fn(&mut T) -> Result<(), End>,
) -> Result<(), End> {
    loop {
        if turn(side)? {
            continue;
        }
        let heard = stream.arm();
        let done = match turn(side) {
            Ok(false) => sleep(side),
            looked => looked.map(drop),
        };
        stream.disarm(heard);
        done?;
    }
}

struct Relay<'a> {
    wire: &'a OwnedFd,
    ip: IpAddr,
    incoming: Incoming<'a>,
    /// The program has no room for it yet.
    answer: Option<Message>,
}

impl Relay<'_> {
    fn run(&mut self) -> Result<(), End> {
        drive(self.incoming.stream, self, Self::turn, Self::sleep)
    }

    fn sleep(&mut self) -> Result<(), End> {
        let mut interest = Interest::READ;
        let mut fds = Vec::with_capacity(2);
        if self.answer.is_some() {
            interest |= Interest::WRITE;
        } else {
            fds.push((self.incoming.stream.as_fd(), Interest::READ));
        }
        fds.push((self.wire.as_fd(), interest));
        Ok(wait(&fds)?)
    }

    /// Passes on what there is. Returns whether there was anything.
    fn turn(&mut self) -> Result<bool, End> {
        let mut busy = self.question()?;
        while self.answer()? {
            busy = true;
        }
        Ok(busy)
    }

    fn question(&mut self) -> Result<bool, End> {
        let mut bytes = [0; MESSAGE + 1];
        let n = match unix::recv_bytes(self.wire, &mut bytes) {
            Ok(Some(n)) => n,
            Ok(None) => return Err(End::Program),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let question = Message::parse(&bytes[..n])
            .filter(|it| it.kind == Kind::Find && it.route.to.ip() == self.ip)
            .ok_or(End::Order)?;
        send(self.incoming.stream, &question.emit())?;
        Ok(true)
    }

    fn answer(&mut self) -> Result<bool, End> {
        let answer = match self.answer.take() {
            Some(answer) => answer,
            None => match self.incoming.next()? {
                // It speaks of its own host only.
                Some(it) if it.kind == Kind::Find || it.route.to.ip() != self.ip => {
                    return Err(End::Order);
                }
                Some(answer) => answer,
                None => return Ok(false),
            },
        };
        match unix::send_pieces(self.wire, [&answer.emit(), &[]]) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.answer = Some(answer);
                Ok(false)
            }
            Err(_) => Err(End::Program),
        }
    }
}

/// Answers the questions of a broker at `from` until it ends.
pub(crate) fn serve(stream: &Stream, from: IpAddr, sockets: &Sockets) {
    if !sockets.enter(from) {
        return tracing::warn!(%from, "{STREAMS} streams of one host, or {ALL_STREAMS} of all: one more is refused");
    }
    answer_all(stream, from, sockets);
    sockets.exit(from);
}

fn answer_all(stream: &Stream, from: IpAddr, sockets: &Sockets) {
    let Some(own) = stream.local_addr() else {
        return;
    };
    let heard = match EventFd::new() {
        Ok(heard) => heard,
        Err(error) => return tracing::warn!(%error, "a broker's questions are refused"),
    };
    let watch = Arc::new(Watch {
        from,
        heard,
        routes: Mutex::default(),
    });
    {
        let mut table = lock(&sockets.table);
        table.servers.retain(|server| server.strong_count() > 0);
        table.servers.push(Arc::downgrade(&watch));
    }
    stream.set_send_timeout(Some(PATIENCE));
    let mut server = Server {
        own: own.ip().to_canonical(),
        from,
        sockets,
        watch: &watch,
        incoming: Incoming {
            stream,
            bytes: Vec::new(),
        },
    };
    if let Err(end) = server.run() {
        tracing::debug!(%from, %end, "no more answers about datagrams");
    }
    sockets.forget(&watch);
}

struct Server<'a> {
    /// The address that the other broker has reached.
    own: IpAddr,
    from: IpAddr,
    sockets: &'a Sockets,
    watch: &'a Watch,
    incoming: Incoming<'a>,
}

impl Server<'_> {
    fn run(&mut self) -> Result<(), End> {
        drive(self.incoming.stream, self, Self::turn, Self::sleep)
    }

    fn sleep(&mut self) -> Result<(), End> {
        Ok(wait(&[
            (self.watch.heard.as_fd(), Interest::READ),
            (self.incoming.stream.as_fd(), Interest::READ),
        ])?)
    }

    fn turn(&mut self) -> Result<bool, End> {
        let mut busy = self.tell_lost()?;
        while let Some(question) = self.incoming.next()? {
            if question.kind != Kind::Find {
                return Err(End::Order);
            }
            let found = self.takes(&question.route);
            self.say(if found { Kind::Found } else { Kind::None }, question.route)?;
            // News of sockets are not kept waiting by questions.
            self.tell_lost()?;
            busy = true;
        }
        Ok(busy)
    }

    /// A broker asks for its own host only: it learns nothing of what others send. And it asks about ours: where streams are passed on by another host,
    /// that one gets the datagrams.
    fn takes(&self, route: &Route) -> bool {
        route.may_be_remote()
            && route.to.ip() == self.own
            && route.from.ip() == self.from
            && self.sockets.takes(route, self.watch)
    }

    fn tell_lost(&self) -> Result<bool, End> {
        let busy = self.watch.heard.drain();
        let lost = std::mem::take(&mut lock(&self.watch.routes).lost);
        for route in lost {
            // Another socket may have taken its place.
            if !self.takes(&route) {
                self.say(Kind::Lost, route)?;
            }
        }
        Ok(busy)
    }

    fn say(&self, kind: Kind, route: Route) -> Result<(), End> {
        let qkey = if kind == Kind::Found {
            self.sockets.qkey
        } else {
            0
        };
        let message = Message { kind, qkey, route };
        send(self.incoming.stream, &message.emit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{SocketAddr, UdpSocket};

    fn watch() -> Arc<Watch> {
        Arc::new(Watch {
            from: IpAddr::from([10, 0, 0, 1]),
            heard: EventFd::new().unwrap(),
            routes: Mutex::default(),
        })
    }

    fn watched(sockets: &Sockets, watch: &Watch) -> usize {
        lock(&sockets.table).peers[&watch.from].watched
    }

    #[test]
    fn answers_are_watched_as_long_as_they_count() {
        let sockets = Sockets::new().unwrap();
        let streams = [watch(), watch()];
        let mut table = lock(&sockets.table);
        table.servers.extend(streams.iter().map(Arc::downgrade));
        table.taking.entry(7).or_default().sessions = 1;
        let to: SocketAddr = "10.0.0.2:9".parse().unwrap();
        let route = |n: usize| {
            let ip = [10, 0, 1, (n >> 15) as u8];
            Route::new(SocketAddr::new(ip.into(), 1 + (n & 0x7fff) as u16), to)
        };
        let start = Instant::now();
        // All streams of a host share the bound.
        for n in 0..WATCHED {
            assert!(table.watch(7, &route(n), &streams[n % 2], start), "{n}");
        }
        assert!(!table.watch(7, &route(WATCHED), &streams[0], start));
        // One is renewed, and the others make room.
        let later = start + KEPT / 2;
        assert!(table.watch(7, &route(0), &streams[0], later));
        assert!(!table.watch(7, &route(WATCHED), &streams[0], later));
        assert!(table.watch(7, &route(WATCHED), &streams[1], start + KEPT));
        drop(table);
        assert_eq!(watched(&sockets, &streams[0]), 2);
        sockets.forget(&streams[1]);
        assert_eq!(watched(&sockets, &streams[0]), 1);
        assert!(sockets.remove(7));
        assert_eq!(watched(&sockets, &streams[0]), 0);
        assert_eq!(lock(&streams[0].routes).lost, [route(0)]);
        assert!(lock(&streams[1].routes).lost.is_empty());
    }

    #[test]
    fn a_socket_is_found_while_a_session_says_so_and_its_end_is_told() {
        let sockets = Sockets::new().unwrap();
        let watch = watch();
        lock(&sockets.table).servers.push(Arc::downgrade(&watch));
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let from: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let route = Route::new(from, socket.local_addr().unwrap());
        let cookie = rules::cookie(&socket).unwrap();
        assert!(!sockets.takes(&route, &watch));
        sockets.add(cookie);
        sockets.add(cookie);
        assert!(sockets.takes(&route, &watch));
        assert!(sockets.takes(&route, &watch));
        assert_eq!(watched(&sockets, &watch), 1);
        // Another process has it too.
        assert!(sockets.remove(cookie));
        assert!(!watch.heard.drain());
        assert!(sockets.remove(cookie));
        assert!(watch.heard.drain());
        assert_eq!(lock(&watch.routes).lost, [route]);
        assert_eq!(watched(&sockets, &watch), 0);
        assert!(!sockets.takes(&route, &watch));
        assert!(!sockets.remove(cookie));
        // Nobody has been told of it.
        sockets.add(cookie);
        assert!(!sockets.remove(cookie));
    }

    fn one_of(sockets: &Sockets) -> IpAddr {
        *lock(&sockets.table).peers.keys().next().unwrap()
    }

    #[test]
    fn a_host_has_so_many_streams_and_no_more() {
        let sockets = Sockets::new().unwrap();
        let [one, other] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        assert!((0..STREAMS).all(|_| sockets.enter(one)));
        assert!(!sockets.enter(one));
        assert!(sockets.enter(other));
        sockets.exit(one);
        assert!(sockets.enter(one));
        (0..STREAMS).for_each(|_| sockets.exit(one));
        sockets.exit(other);
        assert!(lock(&sockets.table).peers.is_empty());
        // A host may have many addresses.
        let address = |n: usize| IpAddr::from([10, 1, 0, (n / STREAMS) as u8]);
        assert!((0..ALL_STREAMS).all(|n| sockets.enter(address(n))));
        assert!(!sockets.enter(other));
        sockets.exit(one_of(&sockets));
        assert!(sockets.enter(other));
    }
}
