//! Connections made and accepted: hellos exchanged, refusals explained, senders served side by side.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use weft_verbs::Device;
use weft_verbs::cm::{self, ConnParam, ConnectError, LinkOptions};

use super::START_PATIENCE;
use super::auth::fill_random;
use super::link::{Link, LinkError};
use super::protocol::{DecodeError, HELLO_LEN, Hello, Status, VERSION};
use super::rdma::{Prepared, RdmaLink};
use super::receiver::{self, Totals, Watch};
use super::sender::{self, Progress, Report, SendError};
use super::store::{Policy, Store, StoreError};
use super::target::Target;
use super::tcp::TcpLink;
use super::walk::Plan;
use crate::failure::Failure;

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// One-sided RDMA Writes; blocks carry their own checksum, so MPA's CRC is off unless the peer wants it.
    #[default]
    Rdma,
    /// The same with MPA's `CRC32c` on every FPDU.
    RdmaCrc,
    /// A plain TCP stream, to compare with.
    PlainTcp,
}

impl Wire {
    fn param(self, private_data: Vec<u8>) -> ConnParam {
        let options = LinkOptions {
            crc: self == Self::RdmaCrc,
            timeout: START_PATIENCE,
            ..LinkOptions::default()
        };
        ConnParam {
            private_data,
            options,
            ..ConnParam::default()
        }
    }
}

fn hello(key: bool, status: Status) -> Result<Hello, Failure> {
    let mut nonce = [0; 32];
    fill_random(&mut nonce)?;
    Ok(Hello {
        version: VERSION,
        status,
        key,
        nonce,
    })
}

fn no_device(e: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("cannot open the soft RNIC: {e}"))
        .hint("`weft doctor` tells what this machine lacks")
}

/// Connects to a receiver and sends everything in `plan`.
pub fn send(
    target: &Target,
    wire: Wire,
    plan: &Plan,
    options: &sender::Options,
    progress: &mut dyn Progress,
) -> Result<Report, Failure> {
    let ours = hello(options.key.is_some(), Status::Ok)?;
    let mut last = None;
    for addr in target.resolve()? {
        match dial(addr, wire, &ours, options.patience) {
            Ok((link, reply)) => {
                let theirs = check_reply(addr, &reply, options.key.is_some())?;
                return sender::send(&*link, &ours, &theirs, plan, options, progress)
                    .map_err(|e| explain(addr, &e));
            }
            Err(Dialed::Next(failure)) => last = Some(failure),
            Err(Dialed::Final(failure)) => return Err(failure),
        }
    }
    Err(last.expect("a resolved host has an address"))
}

/// Whether another address of the same host is worth trying.
enum Dialed {
    Next(Failure),
    Final(Failure),
}

fn dial(
    addr: SocketAddr,
    wire: Wire,
    ours: &Hello,
    patience: Duration,
) -> Result<(Box<dyn Link>, Vec<u8>), Dialed> {
    let unreachable = |e: &dyn std::fmt::Display| {
        Dialed::Next(
            Failure::peer(format!("cannot reach {addr}: {e}")).hint(format!(
                "check the address and that `weft cp --listen DIR --bind {addr}` runs there"
            )),
        )
    };
    if wire == Wire::PlainTcp {
        let stream =
            TcpStream::connect_timeout(&addr, START_PATIENCE).map_err(|e| unreachable(&e))?;
        let link = TcpLink::new(stream, patience).map_err(|e| unreachable(&e))?;
        let reply = link
            .send_hello(&ours.encode())
            .and_then(|()| link.recv_hello())
            .map_err(|e| unreachable(&e))?;
        return Ok((Box::new(link), reply.to_vec()));
    }
    let device = Device::open().map_err(|e| Dialed::Final(no_device(&e)))?;
    let (prepared, qp) = Prepared::new(&device).map_err(|e| Dialed::Final(no_device(&e)))?;
    match cm::connect_qp(addr, qp, &device, &wire.param(ours.encode().to_vec())) {
        Ok(conn) => Ok((
            Box::new(RdmaLink::new(prepared, conn.qp, patience)),
            conn.private_data,
        )),
        Err(ConnectError::Rejected { private_data }) => Err(Dialed::Final(
            match check_reply(addr, &private_data, ours.key) {
                Err(failure) => failure,
                Ok(_) => {
                    Failure::refused(format!("{addr} refused the connection without a reason"))
                }
            },
        )),
        Err(ConnectError::Protocol(e)) => Err(Dialed::Final(
            Failure::refused(format!("what listens on {addr} does not speak iWARP: {e}"))
                .hint("check the port; `weft cp --listen` prints the one that it uses"),
        )),
        Err(ConnectError::Closed) => Err(Dialed::Final(
            Failure::refused(format!(
                "what listens on {addr} closed the connection: it does not seem to speak iWARP"
            ))
            .hint("check the port; `weft cp --listen` prints the one that it uses"),
        )),
        Err(ConnectError::TimedOut) => Err(Dialed::Next(
            Failure::peer(format!(
                "no answer from {addr} within {} s",
                START_PATIENCE.as_secs()
            ))
            .hint("check the address and the port, and that no firewall drops the packets"),
        )),
        Err(e) => Err(unreachable(&e)),
    }
}

/// What a receiver's hello means for us.
fn check_reply(addr: SocketAddr, reply: &[u8], key: bool) -> Result<Hello, Failure> {
    let reply = &reply[..reply.len().min(HELLO_LEN)];
    let theirs = Hello::decode(reply).map_err(|e| match e {
        DecodeError::Magic | DecodeError::Short => Failure::refused(format!(
            "what listens on {addr} speaks iWARP and is not `weft cp`"
        ))
        .hint("check the port; `weft cp --listen` prints the one that it uses"),
        e => Failure::refused(format!("{addr} sent a malformed hello: {e}"))
            .hint("use the same version on both sides"),
    })?;
    let wants_key = || {
        Failure::refused(format!("the receiver at {addr} wants a key"))
            .hint("pass the key file that it uses with --key FILE")
    };
    match theirs.status {
        _ if theirs.version != VERSION => Err(Failure::refused(format!(
            "the receiver at {addr} speaks version {} of the protocol, this program version {VERSION}",
            theirs.version
        ))
        .hint("install the same version of weft on both sides")),
        Status::Version => Err(Failure::refused(format!("the receiver at {addr} does not take version {VERSION}"))
            .hint("install the same version of weft on both sides")),
        Status::Busy => Err(Failure::peer(format!("the receiver at {addr} serves as many senders as it may"))
            .hint("try again later, or start it with a greater --max-senders")),
        Status::KeyWanted => Err(wants_key()),
        Status::Ok if theirs.key && !key => Err(wants_key()),
        Status::NoKey => Err(no_key(addr)),
        Status::Ok if key && !theirs.key => Err(no_key(addr)),
        Status::Ok => Ok(theirs),
    }
}

fn no_key(addr: SocketAddr) -> Failure {
    Failure::refused(format!("the receiver at {addr} has no key to prove"))
        .hint("start it with --key FILE, or leave --key away here")
}

/// What ended a transfer, for the sender's user.
fn explain(addr: SocketAddr, e: &SendError) -> Failure {
    use super::protocol::Code;
    match e {
        SendError::Link(LinkError::Gone(why)) => {
            Failure::peer(format!("the connection to {addr} ended: {why}"))
                .hint("run the same command again: files that had begun go on where they were")
        }
        SendError::Link(LinkError::Violation(why)) => {
            Failure::refused(format!("the receiver at {addr} broke the protocol: {why}"))
                .hint("use the same version on both sides")
        }
        SendError::Link(LinkError::Local(why)) => {
            Failure::failed(why.clone()).hint("`weft doctor` tells what is missing")
        }
        SendError::Refused {
            code: Code::KeyWrong,
            ..
        }
        | SendError::Impostor => {
            Failure::refused(format!("the key is not the one of the receiver at {addr}"))
                .hint("copy the receiver's key file here; the key itself is never sent")
        }
        SendError::Refused { text, .. } => {
            Failure::refused(format!("the receiver at {addr} says: {text}"))
                .hint("run the same command again: files that had begun go on where they were")
        }
    }
}

/// How to listen.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where files go.
    pub dir: PathBuf,
    /// Address and port to listen on.
    pub bind: SocketAddr,
    /// How bytes travel.
    pub wire: Wire,
    /// What to do with existing files, whatever senders ask.
    pub policy: Policy,
    /// How each sender is served.
    pub serve: receiver::Options,
    /// Whether anybody may send.
    pub open: bool,
    /// Stop after the first sender.
    pub once: bool,
    /// Senders served at the same time.
    pub max_senders: usize,
}

/// What a listener reports.
pub trait Events: Sync + Send {
    /// A sender connected.
    fn connected(&self, peer: SocketAddr);
    /// An entry of a sender was not written.
    fn entry_failed(&self, peer: SocketAddr, path: &str, error: &StoreError);
    /// A sender is done or gone.
    fn finished(
        &self,
        peer: SocketAddr,
        totals: Totals,
        took: Duration,
        end: Result<(), LinkError>,
    );
}

enum Door {
    Rdma(Device, cm::Listener),
    Plain(TcpListener),
}

/// A receiver that listens.
pub struct Listener {
    door: Door,
    store: Store,
    config: Arc<Config>,
}

fn cannot_listen(dir: &Path, e: &std::io::Error) -> Failure {
    Failure::failed(format!("cannot receive into {}: {e}", dir.display()))
        .hint("name a directory that exists and that you can write to")
}

impl Listener {
    /// Opens the directory and listens. On any but a loopback address there has to be a key, or `open`.
    pub fn bind(config: Config) -> Result<Self, Failure> {
        if !config.bind.ip().is_loopback() && config.serve.key.is_none() && !config.open {
            return Err(Failure::usage(format!(
                "{} can be reached from other machines, and anybody there could write into {}",
                config.bind,
                config.dir.display()
            ))
            .hint("--key FILE lets only senders with the same key in (`weft cp --gen-key FILE`); --open lets everybody in"));
        }
        let dir_error = |e: std::io::Error| cannot_listen(&config.dir, &e);
        let store = Store::open(&config.dir, config.policy).map_err(dir_error)?;
        rustix::fs::access(
            &config.dir,
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
        )
        .map_err(|e| dir_error(e.into()))?;
        let bind_error = |e: &dyn std::fmt::Display| {
            Failure::failed(format!("cannot listen on {}: {e}", config.bind))
                .hint("another program may use the port; --bind ADDR:PORT chooses, port 0 takes a free one")
        };
        let door = if config.wire == Wire::PlainTcp {
            Door::Plain(TcpListener::bind(config.bind).map_err(|e| bind_error(&e))?)
        } else {
            let device = Device::open().map_err(|e| no_device(&e))?;
            let listener =
                cm::Listener::bind(&device, config.bind, 64, &config.wire.param(Vec::new()))
                    .map_err(|e| bind_error(&e))?;
            Door::Rdma(device, listener)
        };
        Ok(Self {
            door,
            store,
            config: Arc::new(config),
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        match &self.door {
            Door::Rdma(_, listener) => listener.local_addr(),
            Door::Plain(listener) => listener.local_addr().unwrap_or(self.config.bind),
        }
    }

    /// Serves senders: for ever, or until the first has come to its end with [`Config::once`], which is
    /// what the result is about.
    pub fn run(&self, events: &Arc<dyn Events>) -> Result<(), Failure> {
        let active = Arc::new(AtomicUsize::new(0));
        loop {
            let Some(caller) = self.next_caller() else {
                continue;
            };
            let peer = caller.peer();
            let place = Place::take(&active, self.config.max_senders);
            let store = match self.store.try_clone() {
                Ok(store) => store,
                Err(e) => {
                    tracing::warn!("{peer}: turned away: {e}");
                    caller.turn_away(Status::Busy);
                    continue;
                }
            };
            let session = Session {
                config: Arc::clone(&self.config),
                store,
                events: Arc::clone(events),
                peer,
            };
            let Some(place) = place else {
                tracing::warn!(
                    "{peer}: turned away: {} senders are served",
                    self.config.max_senders
                );
                caller.turn_away(Status::Busy);
                continue;
            };
            if self.config.once {
                if let Some(end) = session.serve(caller) {
                    return end;
                }
                continue;
            }
            // Without a thread the caller is dropped, which closes the connection.
            let spawned = std::thread::Builder::new()
                .name("weft-cp".into())
                .spawn(move || {
                    session.serve(caller);
                    drop(place);
                });
            if let Err(e) = spawned {
                tracing::warn!("{peer}: turned away: {e}");
            }
        }
    }

    fn next_caller(&self) -> Option<Caller> {
        match &self.door {
            Door::Rdma(device, listener) => listener
                .next_request(None)
                .map(|request| Caller::Rdma(device.clone(), Box::new(request))),
            Door::Plain(listener) => match listener.accept() {
                Ok((stream, peer)) => Some(Caller::Plain(stream, peer)),
                Err(e) => {
                    // Without descriptors accept fails at once and again: give others time to end.
                    tracing::warn!("accept: {e}");
                    std::thread::sleep(Duration::from_millis(100));
                    None
                }
            },
        }
    }
}

/// One of the places for senders; free again when dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(active: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let place = Self(Arc::clone(active));
        (active.fetch_add(1, Ordering::AcqRel) < most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Somebody who connected.
enum Caller {
    Rdma(Device, Box<cm::Request>),
    Plain(TcpStream, SocketAddr),
}

impl Caller {
    fn peer(&self) -> SocketAddr {
        match self {
            Self::Rdma(_, request) => request.peer_addr(),
            Self::Plain(_, peer) => *peer,
        }
    }

    fn turn_away(self, status: Status) {
        let reply = Hello {
            version: VERSION,
            status,
            key: false,
            nonce: [0; 32],
        }
        .encode();
        match self {
            Self::Rdma(_, request) => {
                let _ = request.reject(&reply);
            }
            Self::Plain(stream, _) => {
                let _ = TcpLink::new(stream, START_PATIENCE).map(|link| link.send_hello(&reply));
            }
        }
    }
}

/// One sender's session.
struct Session {
    config: Arc<Config>,
    store: Store,
    events: Arc<dyn Events>,
    peer: SocketAddr,
}

impl Watch for Session {
    fn entry_failed(&self, path: &str, error: &StoreError) {
        self.events.entry_failed(self.peer, path, error);
    }
}

impl Session {
    /// Serves the caller; `None` if it never became a sender.
    fn serve(self, caller: Caller) -> Option<Result<(), Failure>> {
        let (link, theirs, ours) = match self.greet(caller) {
            Ok(met) => met,
            Err(why) => {
                tracing::info!("{}: turned away: {why}", self.peer);
                return None;
            }
        };
        self.events.connected(self.peer);
        let began = Instant::now();
        let store = match self.store.try_clone() {
            Ok(store) => store,
            Err(e) => return Some(Err(cannot_listen(&self.config.dir, &e))),
        };
        let (totals, end) =
            receiver::serve(&*link, &ours, &theirs, store, &self.config.serve, &self);
        self.events
            .finished(self.peer, totals, began.elapsed(), end.clone());
        if !totals.started {
            return None;
        }
        Some(match end {
            Err(e) => Err(Failure::peer(format!("{}: {e}", self.peer))
                .hint("send again: what had begun goes on")),
            Ok(()) if !totals.complete || totals.failed > 0 => Err(Failure::failed(format!(
                "{}: failed entries: {}",
                self.peer, totals.failed
            ))
            .hint("see the lines above")),
            Ok(()) => Ok(()),
        })
    }

    /// Reads the caller's hello and answers it.
    fn greet(&self, caller: Caller) -> Result<(Box<dyn Link>, Hello, Hello), String> {
        let has_key = self.config.serve.key.is_some();
        let patience = self.config.serve.patience;
        match caller {
            Caller::Rdma(device, request) => {
                let data = request.private_data();
                let verdict = judge(&data[..data.len().min(HELLO_LEN)], has_key);
                let (theirs, ours) = match verdict {
                    Ok(met) => met,
                    Err((status, why)) => {
                        Caller::Rdma(device, request).turn_away(status);
                        return Err(why);
                    }
                };
                let (prepared, qp) = Prepared::new(&device).map_err(|e| e.to_string())?;
                let param = self.config.wire.param(ours.encode().to_vec());
                let conn = request.accept(qp, &param).map_err(|e| e.to_string())?;
                Ok((
                    Box::new(RdmaLink::new(prepared, conn.qp, patience)),
                    theirs,
                    ours,
                ))
            }
            Caller::Plain(stream, _) => {
                let link = TcpLink::new(stream, patience).map_err(|e| e.to_string())?;
                let data = link.recv_hello().map_err(|e| e.to_string())?;
                match judge(&data, has_key) {
                    Ok((theirs, ours)) => {
                        link.send_hello(&ours.encode()).map_err(|e| e.to_string())?;
                        Ok((Box::new(link), theirs, ours))
                    }
                    Err((status, why)) => {
                        let reply = Hello {
                            version: VERSION,
                            status,
                            key: false,
                            nonce: [0; 32],
                        };
                        let _ = link.send_hello(&reply.encode());
                        Err(why)
                    }
                }
            }
        }
    }
}

/// What to answer to a hello: ours, or a refusal and the reason for the log.
fn judge(theirs: &[u8], has_key: bool) -> Result<(Hello, Hello), (Status, String)> {
    let theirs = Hello::decode(theirs).map_err(|e| (Status::Version, e.to_string()))?;
    if theirs.version != VERSION {
        return Err((
            Status::Version,
            format!("it speaks version {}", theirs.version),
        ));
    }
    match (has_key, theirs.key) {
        (true, false) => Err((Status::KeyWanted, "it has no key".into())),
        (false, true) => Err((
            Status::NoKey,
            "it wants a key, and there is none here".into(),
        )),
        _ => {
            let ours = hello(has_key, Status::Ok).map_err(|e| (Status::Busy, e.to_string()))?;
            Ok((theirs, ours))
        }
    }
}
