//! The broker: registered connections, hosts without a broker, and its threads.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_ring::stream::Stream as Rings;
use weft_run::connection::Carrier;
use weft_run::hosts::{self, Answer, First, Registration};
use weft_run::meet::Why;
use weft_sdp::{Listener, Options, Source, Stream};
use weft_sys::process::is_gone;
use weft_sys::{Interest, poll_fds, unix};
use weft_verbs::Device;
use weft_verbs::ext::lock;

use crate::datagrams::{self, Sockets};
use crate::meet::{self, Waiting};
use crate::pump::{End, Pump};
use crate::wire::Frame;

/// Time limit of a dial.
const DIAL: Duration = Duration::from_secs(5);
/// How long the broker does not retry a host without a broker, or a service without one behind it.
const FORGET: Duration = Duration::from_mins(1);
/// Entries of the list of such hosts and services.
const PLACES: usize = 1024;
/// Connections that wait for their peer's broker.
const WAITING: usize = 4096;
/// Largest number of threads at a time.
const THREADS: usize = 8192;
const _: () = assert!(datagrams::ALL_STREAMS <= THREADS / 2);
/// Processes whose end the broker watches for.
const PROCESSES: usize = 4096;
/// A thread's stack.
const STACK: usize = 256 << 10;

/// Settings of a broker.
pub struct Config {
    /// Its RNIC, which makes all SDP streams, with its TLS settings.
    pub device: Device,
    /// Addresses on which other brokers reach it; none: it only dials.
    pub bind: Vec<SocketAddr>,
    /// The port that the brokers of other hosts listen on.
    pub port: u16,
    /// Addresses are translated on the way: connections with other addresses than the peer's broker names are considered too, if exactly one
    /// has the right beginning. Two with equal beginnings can then be confused.
    pub nat: bool,
    /// The broker ends after this idle time, once no process lives that has ever connected to it ([`hosts::is_there`]); `None`: never.
    pub idle: Option<Duration>,
}

#[derive(Default)]
struct Registry {
    next: u64,
    waiting: Vec<Waiting>,
    /// Hosts (port 0) and services that are not dialled until that time, and why.
    plain: HashMap<SocketAddr, (Instant, Why)>,
}

struct Inner {
    device: Device,
    options: Options,
    port: u16,
    nat: bool,
    /// UDP sockets of programs that take frames.
    sockets: Sockets,
    registry: Mutex<Registry>,
    /// Signals a new registration.
    came: Condvar,
    threads: AtomicUsize,
}

pub struct Broker {
    inner: Arc<Inner>,
    programs: OwnedFd,
    listeners: Vec<Listener>,
    idle: Option<Duration>,
}

impl Broker {
    /// Listens for programs, and for other brokers.
    ///
    /// # Errors
    /// `AddrInUse` when this user has a broker in this network namespace already, or another program has the port.
    pub fn start(config: Config) -> io::Result<Broker> {
        let programs = hosts::listen()?;
        let sockets = Sockets::new()?;
        let options = Options::default();
        let mut listeners = Vec::new();
        for addr in config.bind {
            listeners.push(Listener::bind(&config.device, addr, 128, &options)?);
        }
        Ok(Broker {
            inner: Arc::new(Inner {
                device: config.device,
                options,
                port: config.port,
                nat: config.nat,
                sockets,
                registry: Mutex::default(),
                came: Condvar::new(),
                threads: AtomicUsize::new(0),
            }),
            programs,
            listeners,
            idle: config.idle,
        })
    }

    /// Addresses on which other brokers reach it.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.listeners.iter().map(Listener::local_addr).collect()
    }

    /// Serves until it has been idle for the idle time; without one, for ever.
    ///
    /// # Errors
    /// Those of waiting.
    pub fn run(self) -> io::Result<()> {
        for listener in self.listeners {
            let inner = Arc::clone(&self.inner);
            thread::Builder::new()
                .name("weft-hosts".into())
                .spawn(move || inner.accept(&listener))?;
        }
        let mut since = Instant::now();
        // `weft run` comes before it becomes the program: a server that waits for its first client is one of them.
        let mut lives = BTreeSet::new();
        loop {
            match unix::accept(&self.programs) {
                Ok(Some(wire)) => {
                    since = Instant::now();
                    if self.idle.is_some()
                        && lives.len() < PROCESSES
                        && let Ok(cred) = unix::peer_cred(&wire)
                        && cred.is_same_user()
                    {
                        lives.extend(cred.pid);
                    }
                    self.inner.spawn(move |inner| inner.program(wire));
                    continue;
                }
                Ok(None) => {}
                Err(error) => {
                    // Too many open files, above all: others have to end first.
                    tracing::warn!(%error, "a program could not be let in");
                    thread::sleep(Duration::from_millis(100));
                }
            }
            lives.retain(|&pid| !is_gone(pid));
            if !lives.is_empty() || self.inner.is_busy() {
                since = Instant::now();
            }
            if self.idle.is_some_and(|idle| since.elapsed() >= idle) {
                return Ok(());
            }
            match poll_fds(&[(self.programs.as_fd(), Interest::READ)], self.idle) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
        }
    }
}

impl Inner {
    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Arc<Inner>) + Send + 'static) {
        if self.threads.fetch_add(1, Ordering::SeqCst) >= THREADS {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!("{THREADS} connections at a time: one more is refused");
            return;
        }
        let inner = Arc::clone(self);
        let done = thread::Builder::new()
            .name("weft-hosts".into())
            .stack_size(STACK)
            .spawn(move || {
                work(&inner);
                inner.threads.fetch_sub(1, Ordering::SeqCst);
            });
        if let Err(error) = done {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%error, "a connection is refused");
        }
    }

    fn is_busy(&self) -> bool {
        let mut registry = lock(&self.registry);
        registry.waiting.retain(|one| !one.is_gone());
        self.threads.load(Ordering::SeqCst) > 0 || !registry.waiting.is_empty()
    }

    /// Serves a program that has connected.
    fn program(self: &Arc<Self>, wire: OwnedFd) {
        let first = wait_for(&wire, Duration::from_secs(5), |wire| {
            hosts::take_first(wire)
        });
        match first {
            Ok(First::Connection(what)) => self.connection(wire, *what),
            Ok(First::Session) => datagrams::session(&wire, &self.sockets),
            Ok(First::Host(ip)) => self.ask(&wire, ip),
            Err(error) => tracing::debug!(%error, "a program said nothing that is known"),
        }
    }

    /// Passes a program's questions on to another host.
    fn ask(&self, wire: &OwnedFd, ip: IpAddr) {
        let host = SocketAddr::new(ip, 0);
        if self.is_plain(&[host]).is_some() {
            return;
        }
        match self.reach(ip) {
            Ok((stream, _)) => datagrams::relay(wire, &stream, ip),
            Err(why) => self.leave_plain(host, why),
        }
    }

    fn connection(self: &Arc<Self>, wire: OwnedFd, what: Registration) {
        if what.dialled {
            match self.dial(&what) {
                Ok((stream, theirs)) => Self::carry(&wire, stream, what.carrier, theirs),
                Err(why) => refuse(&wire, why),
            }
            return;
        }
        let mut registry = lock(&self.registry);
        if registry.waiting.len() >= WAITING {
            registry.waiting.retain(|one| !one.is_gone());
        }
        if registry.waiting.len() >= WAITING {
            drop(registry);
            return refuse(&wire, Why::System);
        }
        registry.next += 1;
        let id = registry.next;
        registry.waiting.push(Waiting { id, what, wire });
        drop(registry);
        self.came.notify_all();
    }

    /// Why one of these places is not dialled at present.
    fn is_plain(&self, places: &[SocketAddr]) -> Option<Why> {
        let mut registry = lock(&self.registry);
        let now = Instant::now();
        registry.plain.retain(|_, (until, _)| *until > now);
        let known = places.iter().find_map(|place| registry.plain.get(place));
        known.map(|&(_, why)| why)
    }

    /// Does not dial a place for a while.
    fn leave_plain(&self, place: SocketAddr, why: Why) {
        let mut registry = lock(&self.registry);
        if registry.plain.len() < PLACES {
            let until = Instant::now() + FORGET;
            registry.plain.insert(place, (until, why));
        }
    }

    /// Connects to the broker of a host.
    fn reach(&self, ip: IpAddr) -> Result<(Stream, SocketAddr), Why> {
        let place = SocketAddr::new(ip, self.port);
        match Stream::connect(&self.device, place, &self.options, Some(DIAL)) {
            Ok(stream) => Ok((stream, place)),
            Err(error) => {
                tracing::debug!(%error, %place, "no broker answers");
                Err(Why::PlainHost)
            }
        }
    }

    /// The peer's broker, once it has agreed.
    fn dial(&self, what: &Registration) -> Result<(Stream, SocketAddr), Why> {
        let service = what.ends.peer;
        let host = SocketAddr::new(service.ip(), 0);
        if let Some(why) = self.is_plain(&[host, service]) {
            return Err(why);
        }
        let (stream, place) = self
            .reach(service.ip())
            .inspect_err(|&why| self.leave_plain(host, why))?;
        meet::dialler(&stream, what).inspect_err(|&why| self.leave_plain(service, why))?;
        Ok((stream, place))
    }

    /// Accepts other brokers.
    fn accept(self: &Arc<Self>, listener: &Listener) {
        loop {
            match listener.accept(None) {
                Ok(stream) => self.spawn(move |inner| inner.peer(stream)),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => {
                    tracing::warn!(%error, "a broker could not be let in");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn peer(self: &Arc<Self>, stream: Stream) {
        let Some(from) = stream.peer_addr() else {
            return;
        };
        let from_ip = from.ip().to_canonical();
        let magic = match meet::first(&stream) {
            Ok(magic) => magic,
            Err(error) => return tracing::debug!(%from, %error, "a broker said nothing"),
        };
        if magic == datagrams::MAGIC {
            return datagrams::serve(&stream, from_ip, &self.sockets);
        }
        match meet::acceptor(&stream, magic, from_ip, self.nat, &**self) {
            Ok(met) => Self::carry(&met.wire, stream, met.what.carrier, from),
            Err(error) => tracing::debug!(%from, %error, "no connection in common"),
        }
    }

    /// Gets the program's rings once the two brokers mean the same connection.
    fn carry(wire: &OwnedFd, stream: Stream, carrier: Carrier, peer: SocketAddr) {
        let linked = unix::send_with_fds(wire, &Answer::Go(carrier).emit(), &[])
            .and_then(|()| wait_linked(wire, &stream))
            .and_then(|(segment, bell)| {
                Ok((Rings::open(segment).map_err(io::Error::other)?, bell))
            });
        let (rings, bell) = match linked {
            Ok(linked) => linked,
            Err(error) => {
                // The peer's program may have gone over, and waits for the word that all comes over TCP.
                let last = [Frame::End.emit(), Frame::Gone.emit()].concat();
                let _ = stream.send(&[Source::Bytes(&last)], false);
                return tracing::debug!(%peer, %error, "the program did not go over");
            }
        };
        match Pump::new(rings, bell, stream).run() {
            End::Done => tracing::debug!(%peer, "a connection is done"),
            end => tracing::info!(%peer, "a connection ended: {end}"),
        }
    }
}

impl meet::Candidates for Inner {
    fn wait(
        &self,
        until: Instant,
        mut pick: impl FnMut(&[Waiting]) -> Option<Vec<u64>>,
    ) -> Vec<u64> {
        let mut registry = lock(&self.registry);
        loop {
            registry.waiting.retain(|one| !one.is_gone());
            if let Some(ids) = pick(&registry.waiting) {
                return ids;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Vec::new();
            }
            // At least now and then: a program may have gone, or the time for an exact match have passed.
            let nap = left.min(Duration::from_secs(1));
            registry = self
                .came
                .wait_timeout(registry, nap)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn look<T>(&self, id: u64, look: impl FnOnce(&Registration) -> T) -> Option<T> {
        let registry = lock(&self.registry);
        let one = registry.waiting.iter().find(|one| one.id == id)?;
        Some(look(&one.what))
    }

    fn take(&self, id: u64) -> Option<Waiting> {
        let mut registry = lock(&self.registry);
        let at = registry.waiting.iter().position(|one| one.id == id)?;
        Some(registry.waiting.swap_remove(at))
    }
}

fn refuse(wire: &OwnedFd, why: Why) {
    // An error means that the program is gone.
    let _ = unix::send_with_fds(wire, &Answer::No(why).emit(), &[]);
}

/// Waits for a message of a program.
fn wait_for<T>(
    wire: &OwnedFd,
    limit: Duration,
    take: impl Fn(&OwnedFd) -> io::Result<T>,
) -> io::Result<T> {
    let until = Instant::now() + limit;
    loop {
        match take(wire) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match poll_fds(&[(wire.as_fd(), Interest::READ)], Some(left)) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
    }
}

/// Waits for the program's rings, as long as the peer's broker is there.
fn wait_linked(wire: &OwnedFd, stream: &Stream) -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::event::PollFlags;
    let is_over = || {
        let ends = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        stream.ready().intersects(ends)
    };
    loop {
        // In this order: a program that has gone over before the end waits for the pump to tell it of that.
        let has_ended = is_over();
        match hosts::take_link(wire) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        if has_ended {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let heard = stream.arm();
        let fds = [
            (wire.as_fd(), Interest::READ),
            (stream.as_fd(), Interest::READ),
        ];
        let waited = if is_over() {
            Ok(0)
        } else {
            poll_fds(&fds, None)
        };
        stream.disarm(heard);
        match waited {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
    }
}
