//! Making connections: the TCP (or simulated) connection and the MPA start-up on it, without a thread of its own.
//!
//! ```text
//!  initiator:  dial ─ connecting ─ request sent ─ reply ──────────────> attach(qp)
//!  responder:  listen ─ accepted ─ request complete ─ Incoming ─ accept ─> attach(qp), reply goes out first
//! ```
//!
//! Start-up has a time limit on both sides, start-up frames have a longest length, and accepted connections that have
//! not completed it count against [`Limits::max_pending`](crate::Limits::max_pending): silent and flooding peers cost
//! little, and not for long.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_mem::{RecvList, SendList};
use weft_proto::mpa::{
    AcceptError, Config, InitStep, Initiator, MAX_FRAME, PendingRequest, RespStep, Responder,
    Revision, RtrSet, StartError,
};
use weft_sys::tcp::{self, BindOptions};
use weft_sys::{Event, Interest, poll_fds};

use crate::device::{Counted, Device, DeviceInner, Transport};
use crate::engine::{Engine, Next, Source, Token};
use crate::lock::{lock, try_lock};
use crate::meet::{Answer, Guest, Knock, same_host};
use crate::qp::Qp;
use crate::transport::Link;
use crate::transport::sim::{SimListener, SimPort};
use crate::transport::tcp::TcpLink;
use crate::types::{LinkOptions, LocalMode};

mod entrance;

use entrance::Entrance;

/// Bytes that may follow a start-up frame before the queue pair takes over.
const EARLY: usize = 64 * 1024;

/// Why a connection did not come about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens there.
    #[error("connection refused: nothing listens on that address and port")]
    Refused,
    /// The peer's program said no.
    #[error("the peer rejected the connection")]
    Rejected {
        /// What it said.
        private_data: Vec<u8>,
    },
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// No way there.
    #[error("the address cannot be reached")]
    Unreachable,
    /// What answered does not speak MPA, or not as agreed.
    #[error("the peer does not speak iWARP (MPA) on that port: {0}")]
    Protocol(String),
    /// The peer closed the connection during start-up.
    #[error("the peer closed the connection during start-up")]
    Closed,
    /// Private data too long, or a queue pair that cannot be connected.
    #[error("{0}")]
    Invalid(String),
    /// The device takes only connections in shared memory ([`LocalMode::Require`](crate::LocalMode)).
    #[error(
        "no shared memory with the peer, and nothing else is allowed (WEFT_LOCAL=require): {0}"
    )]
    NotLocal(String),
    /// The operating system refused.
    #[error(transparent)]
    Io(io::Error),
}

impl ConnectError {
    /// The error number of the system that says the same, as `connect(2)` has it.
    pub fn raw_os_error(&self) -> i32 {
        let errno = match self {
            ConnectError::Refused | ConnectError::Rejected { .. } => Errno::CONNREFUSED,
            ConnectError::TimedOut => Errno::TIMEDOUT,
            ConnectError::Unreachable => Errno::HOSTUNREACH,
            ConnectError::NotLocal(_) => Errno::NETUNREACH,
            ConnectError::Protocol(_) => Errno::PROTO,
            ConnectError::Closed => Errno::CONNRESET,
            ConnectError::Invalid(_) => Errno::INVAL,
            ConnectError::Io(error) => {
                return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            }
        };
        errno.raw_os_error()
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as K;
        match error.kind() {
            K::ConnectionRefused => ConnectError::Refused,
            K::TimedOut => ConnectError::TimedOut,
            K::HostUnreachable | K::NetworkUnreachable => ConnectError::Unreachable,
            K::ConnectionReset | K::BrokenPipe | K::NotConnected | K::ConnectionAborted => {
                ConnectError::Closed
            }
            _ => ConnectError::Io(error),
        }
    }
}

impl From<StartError> for ConnectError {
    fn from(error: StartError) -> Self {
        ConnectError::Protocol(error.to_string())
    }
}

/// What one side brings to a connection.
#[derive(Clone, Debug)]
pub struct ConnParam {
    /// Goes to the peer's program with the request or the reply: at most 508 bytes (512 with revision 1).
    pub private_data: Vec<u8>,
    /// Reads and atomics of the peer that we take at once.
    pub ird: u16,
    /// Reads and atomics that we have outstanding at once, at most.
    pub ord: u16,
    /// Settings of the wire protocol.
    pub options: LinkOptions,
}

impl Default for ConnParam {
    fn default() -> Self {
        ConnParam {
            private_data: Vec::new(),
            ird: 16,
            ord: 16,
            options: LinkOptions::default(),
        }
    }
}

impl ConnParam {
    fn config(&self, device: &DeviceInner) -> Config {
        let options = &self.options;
        Config {
            crc: options.crc,
            recv_markers: options.recv_markers,
            revision: if options.revision == 1 {
                Revision::One
            } else {
                Revision::Two
            },
            ird: self.ird.min(device.limits.max_rd_atomic),
            ord: self.ord.min(device.limits.max_rd_atomic),
            peer_to_peer: options.peer_to_peer.then_some(RtrSet {
                send: false,
                write: true,
                read: true,
            }),
        }
    }
}

/// The private data that came with an accepted connection, or why there is none.
pub type Dialed = Result<Vec<u8>, ConnectError>;
type DialDone = Box<dyn FnOnce(Dialed) + Send>;

enum DialStage {
    /// Waiting for the transport's connection.
    Connecting(OwnedFd),
    /// The peer is on our host: waiting to be let in.
    Knocking(Arc<dyn Link>, Box<Knock>),
    /// Waiting for the reply.
    Started(Arc<dyn Link>, Vec<u8>, Option<Box<Knock>>),
    Over,
}

/// A connection that is being made.
enum Way {
    Tcp(OwnedFd),
    Sim(Arc<dyn Link>),
}

pub(crate) struct Dial {
    qp: Arc<crate::qp::QpInner>,
    device: Arc<DeviceInner>,
    options: LinkOptions,
    machine: Initiator,
    request: Vec<u8>,
    deadline: Instant,
    stage: Mutex<DialStage>,
    done: Mutex<Option<DialDone>>,
    token: OnceLock<Token>,
    /// The queue pair does not want it any more.
    called_off: AtomicBool,
}

impl Device {
    /// Connect `qp` to a listener at `addr`. Returns at once; `done` is called once, from the engine's thread or, for
    /// errors found at once, from this one.
    pub fn dial(
        &self,
        addr: SocketAddr,
        source: Option<SocketAddr>,
        qp: &Qp,
        param: &ConnParam,
        done: impl FnOnce(Dialed) + Send + 'static,
    ) {
        let connect = || match &self.0.transport {
            Transport::Tcp => tcp::connect_start(addr, source).map(Way::Tcp),
            Transport::Sim(net) => net.connect(addr, None).map(Way::Sim),
        };
        self.dial_by(connect, qp, param, Box::new(done));
    }

    fn dial_by(
        &self,
        connect: impl FnOnce() -> io::Result<Way>,
        qp: &Qp,
        param: &ConnParam,
        done: DialDone,
    ) {
        if let Err((error, done)) = self.start_dial(connect, qp, param, done) {
            done(Err(error));
        }
    }

    fn start_dial(
        &self,
        connect: impl FnOnce() -> io::Result<Way>,
        qp: &Qp,
        param: &ConnParam,
        done: DialDone,
    ) -> Result<(), (ConnectError, DialDone)> {
        let mut config = param.config(&self.0);
        if param.options.revision == 2 {
            let more = qp.0.ask_for_own_reads();
            config.ird += more;
            config.ord += more;
        }
        let (machine, request) = match Initiator::new(config, &param.private_data) {
            Ok(started) => started,
            Err(error) => return Err((ConnectError::Invalid(error.to_string()), done)),
        };
        let stage = match connect() {
            Ok(Way::Tcp(fd)) => DialStage::Connecting(fd),
            Ok(Way::Sim(link)) => DialStage::Started(link, Vec::new(), None),
            Err(error) => return Err((error.into(), done)),
        };
        let deadline = deadline(param.options.timeout);
        let dial = Arc::new(Dial {
            qp: Arc::clone(&qp.0),
            device: Arc::clone(&self.0),
            options: param.options,
            machine,
            request,
            deadline,
            stage: Mutex::new(stage),
            done: Mutex::new(Some(done)),
            token: OnceLock::new(),
            called_off: AtomicBool::new(false),
        });
        qp.0.dials_by(&dial);
        let engine = &self.0.engine;
        let mut stage = lock(&dial.stage);
        let registered = match &*stage {
            DialStage::Connecting(fd) => engine.register(
                Arc::clone(&dial) as Arc<dyn Source>,
                fd.as_fd(),
                Interest::WRITE,
            ),
            DialStage::Started(link, ..) => {
                let sent = send_all(&**link, &dial.request);
                sent.and_then(|()| {
                    engine.register(
                        Arc::clone(&dial) as Arc<dyn Source>,
                        link.fd(),
                        Interest::READ,
                    )
                })
            }
            DialStage::Knocking(..) | DialStage::Over => return Ok(()),
        };
        match registered {
            Ok(token) => {
                let _ = dial.token.set(token);
                engine.set_timer(token, deadline);
                if dial.called_off.load(Ordering::SeqCst) {
                    engine.poke(token);
                }
                Ok(())
            }
            Err(error) => {
                *stage = DialStage::Over;
                drop(stage);
                match lock(&dial.done).take() {
                    Some(done) => Err((error.into(), done)),
                    None => Ok(()),
                }
            }
        }
    }
}

impl Dial {
    /// The queue pair goes. The peer sees that at once; the rest is done by the engine's thread, since whoever calls this may hold what the
    /// end of a dial takes.
    pub(crate) fn call_off(&self) {
        self.called_off.store(true, Ordering::SeqCst);
        // One that is at a step just now finds the queue pair gone, or is ended after it.
        if let Some(stage) = try_lock(&self.stage)
            && let DialStage::Knocking(link, _) | DialStage::Started(link, ..) = &*stage
        {
            link.abort();
        }
        if let Some(token) = self.token.get() {
            self.device.engine.poke(*token);
        }
    }

    fn finish(&self, engine: &Engine, stage: &mut DialStage, outcome: Dialed) {
        if let Some(token) = self.token.get() {
            match &*stage {
                DialStage::Connecting(fd) => engine.unregister(*token, fd.as_fd()),
                DialStage::Knocking(link, knock) => {
                    if let Some(token) = knock.token {
                        engine.unregister(token, knock.fd());
                    }
                    engine.unregister(*token, link.fd());
                    link.abort();
                }
                DialStage::Started(link, ..) => {
                    if outcome.is_err() {
                        engine.unregister(*token, link.fd());
                        link.abort();
                    }
                }
                // The step that failed has let go of the descriptor.
                DialStage::Over => engine.forget(*token),
            }
        }
        *stage = DialStage::Over;
        if let Some(done) = lock(&self.done).take() {
            done(outcome);
        }
    }

    fn step(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        stage: &mut DialStage,
    ) -> Result<(), ConnectError> {
        let Some(&token) = self.token.get() else {
            return Ok(());
        };
        if self.called_off.load(Ordering::SeqCst) {
            return Err(ConnectError::Invalid("the queue pair has gone".into()));
        }
        if let DialStage::Connecting(fd) = stage {
            if !tcp::connect_result(&*fd)? {
                engine.arm(token, fd.as_fd(), Interest::WRITE);
                return Ok(());
            }
            let DialStage::Connecting(fd) = std::mem::replace(stage, DialStage::Over) else {
                return Ok(());
            };
            let link: Arc<dyn Link> = Arc::new(TcpLink::new(fd)?);
            *stage = self.knock(engine, link)?;
        }
        if let DialStage::Knocking(_, knock) = stage {
            let why = match knock.answer() {
                Answer::Wait if Instant::now() < knock.deadline => {
                    if let Some(token) = knock.token {
                        engine.arm(token, knock.fd(), Interest::READ);
                    }
                    return Ok(());
                }
                Answer::Wait => Some("the peer's door does not answer".to_owned()),
                Answer::Welcome => None,
                Answer::No(why) => Some(why),
            };
            close_knock(engine, knock);
            let DialStage::Knocking(link, knock) = std::mem::replace(stage, DialStage::Over) else {
                return Ok(());
            };
            let knock = match why {
                None => Some(knock),
                Some(why) => {
                    // Before the request: a responder that welcomes us late must find nobody to attach to.
                    drop(knock);
                    self.stays_on_tcp(why)?;
                    None
                }
            };
            *stage = self.request(link, knock)?;
        }
        let DialStage::Started(link, buf, knock) = stage else {
            return Ok(());
        };
        let ended = read_some(&**link, buf)?;
        match self.machine.on_bytes(buf)? {
            InitStep::NeedMore if ended => Err(ConnectError::Closed),
            InitStep::NeedMore => {
                engine.arm(token, link.fd(), Interest::READ);
                Ok(())
            }
            InitStep::Rejected { private_data, .. } => Err(ConnectError::Rejected { private_data }),
            InitStep::Accepted {
                params,
                private_data,
                consumed,
            } => {
                engine.unregister(token, link.fd());
                let early = buf.split_off(consumed.min(buf.len()));
                let mut link = Arc::clone(link);
                let knock = knock.take();
                *stage = DialStage::Over;
                if let Some(knock) = knock {
                    let met = knock
                        .finish(&self.device, Arc::clone(&link))
                        .inspect_err(|_| link.abort())?;
                    match met {
                        Ok(_) if !early.is_empty() => {
                            link.abort();
                            return Err(ConnectError::Protocol(
                                "it sends FPDUs on TCP after agreeing on shared memory".into(),
                            ));
                        }
                        Ok(local) => link = local,
                        Err(why) => self.stays_on_tcp(why).inspect_err(|_| link.abort())?,
                    }
                }
                self.qp.attach(link, &params, &self.options, &[], &early)?;
                if let Some(done) = lock(&self.done).take() {
                    done(Ok(private_data));
                }
                Ok(())
            }
        }
    }
}

impl Dial {
    /// The TCP connection is there: is the peer on our host?
    fn knock(
        self: &Arc<Self>,
        engine: &Engine,
        link: Arc<dyn Link>,
    ) -> Result<DialStage, ConnectError> {
        if self.device.local == LocalMode::Off {
            return self.request(link, None);
        }
        let knocked = Knock::start(&self.device, self.qp.pd(), self.qp.num(), &*link).and_then(
            |mut knock| {
                let source = Arc::clone(self) as Arc<dyn Source>;
                let token = engine
                    .register(source, knock.fd(), Interest::READ)
                    .map_err(|error| error.to_string())?;
                engine.set_timer(token, knock.deadline);
                knock.token = Some(token);
                Ok(knock)
            },
        );
        match knocked {
            Ok(knock) => Ok(DialStage::Knocking(link, Box::new(knock))),
            Err(why) => {
                self.stays_on_tcp(why)?;
                self.request(link, None)
            }
        }
    }

    fn stays_on_tcp(&self, why: String) -> Result<(), ConnectError> {
        if self.device.local == LocalMode::Require {
            return Err(ConnectError::NotLocal(why));
        }
        tracing::debug!(qp = self.qp.num(), why, "the connection stays on TCP");
        let _ = self.qp.reason.set(why);
        Ok(())
    }

    /// Begin MPA start-up. A new socket takes a frame of this size whole.
    fn request(
        &self,
        link: Arc<dyn Link>,
        knock: Option<Box<Knock>>,
    ) -> Result<DialStage, ConnectError> {
        send_all(&*link, &self.request)?;
        Ok(DialStage::Started(link, Vec::new(), knock))
    }
}

/// The engine does not watch the door any more.
fn close_knock(engine: &Engine, knock: &mut Knock) {
    if let Some(token) = knock.token.take() {
        engine.unregister(token, knock.fd());
    }
}

impl Source for Dial {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let mut stage = lock(&self.stage);
        if let Err(error) = self.step(engine, &mut stage) {
            self.finish(engine, &mut stage, Err(error));
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, engine: &Arc<Engine>) {
        let mut stage = lock(&self.stage);
        match &*stage {
            DialStage::Over => {}
            _ if Instant::now() >= self.deadline => {
                self.finish(engine, &mut stage, Err(ConnectError::TimedOut));
            }
            DialStage::Knocking(..) => {
                if let Err(error) = self.step(engine, &mut stage) {
                    self.finish(engine, &mut stage, Err(error));
                }
            }
            _ => {}
        }
    }
}

/// When a time limit ends; a limit beyond the clock is a day.
fn deadline(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit)
        .unwrap_or_else(|| now + Duration::from_hours(24))
}

fn send_all(link: &dyn Link, bytes: &[u8]) -> io::Result<()> {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    if link.send(&list)? == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Read what is there, up to the longest start-up frame and a little more. `Ok(true)`: nothing will follow.
fn read_some(link: &dyn Link, buf: &mut Vec<u8>) -> io::Result<bool> {
    while buf.len() < EARLY {
        let have = buf.len();
        buf.resize((have + 2048).min(EARLY), 0);
        let mut list = RecvList::new();
        list.push_buf(&mut buf[have..]);
        let outcome = link.recv(&mut list);
        drop(list);
        let n = outcome.as_ref().map_or(0, |received| received.n);
        buf.truncate(have + n);
        match outcome {
            Ok(_) if n == 0 => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // What came before the reset may decide.
            Err(_) if have > 0 => return Ok(true),
            Err(error) => return Err(error),
        }
        // Enough to decide.
        if buf.len() >= MAX_FRAME {
            break;
        }
    }
    Ok(false)
}

/// A connection request that waits for an answer. Dropping it rejects it.
pub struct Incoming {
    device: Arc<DeviceInner>,
    link: Arc<dyn Link>,
    pending: Option<PendingRequest>,
    early: Vec<u8>,
    guest: Option<Box<Guest>>,
    _permit: Counted,
}

impl Incoming {
    /// What the initiator's program sent with its request.
    pub fn private_data(&self) -> &[u8] {
        self.pending
            .as_ref()
            .map_or(&[], PendingRequest::private_data)
    }

    /// Reads and atomics that the initiator takes and has outstanding (its IRD and ORD), when it said so.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.pending.as_ref()?.enhanced().map(|e| (e.ird, e.ord))
    }

    /// The initiator's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.link.peer_addr()
    }

    /// The address that it dialled.
    pub fn local_addr(&self) -> SocketAddr {
        self.link.local_addr()
    }

    /// Whether the initiator has given up meanwhile: it has closed, or said something before its turn. (A simulated network does not tell.)
    pub fn is_over(&self) -> bool {
        self.device.is_tcp()
            && poll_fds(&[(self.link.fd(), Interest::READ)], Some(Duration::ZERO))
                .is_ok_and(|n| n > 0)
    }

    /// Accept, on `qp`.
    ///
    /// # Errors
    /// [`ConnectError::Invalid`], [`ConnectError::Closed`] when the initiator has gone meanwhile.
    pub fn accept(mut self, qp: &Qp, param: &ConnParam) -> Result<(), ConnectError> {
        let Some(pending) = self.pending.take() else {
            return Err(ConnectError::Closed);
        };
        let cap = self.device.limits.max_rd_atomic;
        let more = pending.enhanced().map_or(0, |_| qp.0.ask_for_own_reads());
        let depth = |wanted: u16| wanted.min(cap) + more;
        let accepted = pending.accept(&param.private_data, depth(param.ird), depth(param.ord));
        let (params, reply) =
            accepted.map_err(|error: AcceptError| ConnectError::Invalid(error.to_string()))?;
        let tcp = Arc::clone(&self.link);
        let local = match self.guest.take() {
            Some(guest) => guest.accept(&self.device, qp.0.pd(), qp.0.num(), Arc::clone(&tcp)),
            None => Err("the initiator did not ask for shared memory".to_owned()),
        };
        match local {
            Ok(_) if !self.early.is_empty() => {
                tcp.abort();
                Err(ConnectError::Protocol(
                    "it sends FPDUs on TCP after agreeing on shared memory".into(),
                ))
            }
            Ok(local) => {
                qp.0.attach(local, &params, &param.options, &[], &[])?;
                send_all(&*tcp, &reply).inspect_err(|_| tcp.abort())?;
                Ok(())
            }
            Err(why) => {
                if self.device.local == LocalMode::Require {
                    tcp.abort();
                    return Err(ConnectError::NotLocal(why));
                }
                if self.device.local == LocalMode::Auto && self.device.is_tcp() {
                    let _ = qp.0.reason.set(why);
                }
                qp.0.attach(tcp, &params, &param.options, &reply, &self.early)?;
                Ok(())
            }
        }
    }

    /// Reject, with private data for the initiator's program.
    ///
    /// # Errors
    /// [`ConnectError::Invalid`] for private data that is too long.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), ConnectError> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let frame = pending
            .reject(private_data)
            .map_err(|e| ConnectError::Invalid(e.to_string()))?;
        self.close_with(&frame);
        Ok(())
    }

    fn close_with(&self, frame: &[u8]) {
        if send_all(&*self.link, frame).is_ok() {
            self.link.shutdown_write();
        } else {
            self.link.abort();
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            match pending.reject(&[]) {
                Ok(frame) => self.close_with(&frame),
                Err(_) => self.link.abort(),
            }
        }
    }
}

type OnRequest = Arc<dyn Fn(Incoming) + Send + Sync>;

enum Door {
    Tcp(OwnedFd),
    Sim(SimListener),
}

/// What a connection in start-up needs of its listener: not the listening socket, which may be closed meanwhile.
struct Reception {
    device: Arc<DeviceInner>,
    config: Config,
    timeout: Duration,
    /// Requests given to the program that it has not answered, and how many there may be.
    waiting: Arc<AtomicU32>,
    backlog: u32,
    on_request: OnRequest,
}

struct ListenerInner {
    reception: Arc<Reception>,
    door: Door,
    addr: SocketAddr,
    token: OnceLock<Token>,
    /// Where initiators of this host say hello.
    entrances: Mutex<Vec<Arc<Entrance>>>,
}

/// A listening address. Dropping it stops listening; connections made through it live on.
pub struct Listening(Arc<ListenerInner>);

impl Device {
    /// Listen on `addr` (port 0: any free one). Each complete request is given to `on_request`, from the engine's
    /// thread: it must not block. With `backlog` requests unanswered, further peers are turned away. Of `param`, the
    /// options and depths are used.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn listen(
        &self,
        addr: SocketAddr,
        backlog: u32,
        param: &ConnParam,
        on_request: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> io::Result<Listening> {
        self.bind(addr)?.listen(backlog, param, on_request)
    }

    /// Take an address (port 0: any free one), to listen on it or dial from it later.
    ///
    /// # Errors
    /// As `bind(2)`. A port that somebody else has taken in this way is refused no sooner than in [`Bound::listen`].
    pub fn bind(&self, addr: SocketAddr) -> io::Result<Bound> {
        self.bind_with(addr, BindOptions::default())
    }

    /// As [`Device::bind`], with a say in who else may use the address. (A simulated network knows no options.)
    ///
    /// # Errors
    /// As `bind(2)`.
    pub fn bind_with(&self, addr: SocketAddr, options: BindOptions) -> io::Result<Bound> {
        let (port, addr) = match &self.0.transport {
            Transport::Tcp => {
                let fd = tcp::bind(addr, options)?;
                let addr = tcp::local_addr(&fd)?;
                (Port::Tcp(fd), addr)
            }
            Transport::Sim(net) => {
                let port = net.bind(addr)?;
                let addr = port.addr();
                (Port::Sim(port), addr)
            }
        };
        Ok(Bound {
            device: self.clone(),
            port,
            addr,
        })
    }
}

enum Port {
    Tcp(OwnedFd),
    Sim(SimPort),
}

/// An address that is taken, see [`Device::bind`]. Dropping it gives it back.
pub struct Bound {
    device: Device,
    port: Port,
    addr: SocketAddr,
}

impl Bound {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Dial from here, as [`Device::dial`] does.
    pub fn dial(
        self,
        addr: SocketAddr,
        qp: &Qp,
        param: &ConnParam,
        done: impl FnOnce(Dialed) + Send + 'static,
    ) {
        let Bound { device, port, .. } = self;
        let connect = || match port {
            Port::Tcp(fd) => tcp::connect_bound(&fd, addr).map(|()| Way::Tcp(fd)),
            Port::Sim(port) => port.connect(addr).map(Way::Sim),
        };
        device.dial_by(connect, qp, param, Box::new(done));
    }

    /// Listen here, as [`Device::listen`] does.
    ///
    /// # Errors
    /// As `listen(2)`.
    pub fn listen(
        self,
        backlog: u32,
        param: &ConnParam,
        on_request: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> io::Result<Listening> {
        let Bound { device, port, addr } = self;
        let Device(device) = device;
        let door = match port {
            Port::Tcp(fd) => {
                tcp::listen_bound(&fd, backlog.clamp(1, 4096))?;
                Door::Tcp(fd)
            }
            Port::Sim(port) => Door::Sim(port.listen()?),
        };
        let reception = Arc::new(Reception {
            device: Arc::clone(&device),
            config: param.config(&device),
            timeout: param.options.timeout,
            waiting: Arc::default(),
            backlog: backlog.max(1),
            on_request: Arc::new(on_request),
        });
        let inner = Arc::new(ListenerInner {
            reception,
            door,
            addr,
            token: OnceLock::new(),
            entrances: Mutex::default(),
        });
        let source = Arc::clone(&inner) as Arc<dyn Source>;
        let token = device.engine.register(source, inner.fd(), Interest::READ)?;
        let _ = inner.token.set(token);
        // An event before the token was there found nothing to arm with.
        device.engine.arm(token, inner.fd(), Interest::READ);
        if device.local != LocalMode::Off {
            *lock(&inner.entrances) = entrance::open(&device, &inner);
        }
        Ok(Listening(inner))
    }
}

impl Listening {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.addr
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        for entrance in lock(&self.0.entrances).drain(..) {
            entrance.close();
        }
        if let Some(token) = self.0.token.get() {
            self.0
                .reception
                .device
                .engine
                .unregister(*token, self.0.fd());
        }
    }
}

impl ListenerInner {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.door {
            Door::Tcp(fd) => fd.as_fd(),
            Door::Sim(listener) => listener.fd(),
        }
    }

    fn accept_one(&self) -> io::Result<Option<Arc<dyn Link>>> {
        match &self.door {
            Door::Tcp(fd) => loop {
                let Some((socket, _)) = tcp::accept(fd)? else {
                    return Ok(None);
                };
                // A peer that is gone already is no reason to stop.
                if let Ok(link) = TcpLink::new(socket) {
                    return Ok(Some(Arc::new(link)));
                }
            },
            Door::Sim(listener) => Ok(listener.accept()),
        }
    }
}

impl Reception {
    fn admit(self: &Arc<Self>, engine: &Arc<Engine>, link: Arc<dyn Link>) {
        let permit = self.device.take_pending().or_else(|| {
            // A flood of silent peers must not keep the others out: the one that has been silent longest goes.
            let oldest = {
                let mut greetings = lock(&self.device.greetings);
                std::iter::from_fn(|| greetings.pop_front()).find_map(|g| g.upgrade())?
            };
            oldest.give_up(engine, "made room for a newer connection");
            self.device.take_pending()
        });
        let Some(permit) = permit else {
            tracing::warn!(peer = %link.peer_addr(), "too many connections in start-up: turned away");
            link.abort();
            return;
        };
        let greeting = Arc::new(Greeting {
            reception: Arc::clone(self),
            state: Mutex::new(Some(Greeted {
                link,
                buf: Vec::new(),
                permit,
                guest: None,
            })),
            token: OnceLock::new(),
        });
        let state = lock(&greeting.state);
        let Some(greeted) = &*state else { return };
        match engine.register(
            Arc::clone(&greeting) as Arc<dyn Source>,
            greeted.link.fd(),
            Interest::READ,
        ) {
            Ok(token) => {
                let _ = greeting.token.set(token);
                engine.set_timer(token, deadline(self.timeout));
                drop(state);
                let mut greetings = lock(&self.device.greetings);
                while greetings.front().is_some_and(|g| g.strong_count() == 0) {
                    greetings.pop_front();
                }
                greetings.push_back(Arc::downgrade(&greeting));
            }
            Err(error) => tracing::warn!(%error, "cannot watch a new connection"),
        }
    }
}

impl ListenerInner {
    /// Take in who waits: a bounded number at a time, established connections want their turn too.
    fn accept_some(&self, engine: &Arc<Engine>) -> io::Result<()> {
        for _ in 0..64 {
            match self.accept_one()? {
                Some(link) => self.reception.admit(engine, link),
                None => break,
            }
        }
        Ok(())
    }
}

impl Source for ListenerInner {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        if let Err(error) = self.accept_some(engine) {
            tracing::warn!(%error, "accepting a connection failed");
            if let Some(token) = self.token.get() {
                // No descriptors left, most likely: try again later, not in a busy loop.
                engine.set_timer(*token, Instant::now() + Duration::from_millis(50));
            }
            return Next::Done;
        }
        if let Some(token) = self.token.get() {
            engine.arm(*token, self.fd(), Interest::READ);
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, engine: &Arc<Engine>) {
        if let Some(token) = self.token.get() {
            engine.arm(*token, self.fd(), Interest::READ);
        }
    }
}

struct Greeted {
    link: Arc<dyn Link>,
    buf: Vec<u8>,
    permit: Counted,
    guest: Option<Box<Guest>>,
}

/// An accepted connection whose request is not complete.
pub(crate) struct Greeting {
    reception: Arc<Reception>,
    state: Mutex<Option<Greeted>>,
    token: OnceLock<Token>,
}

impl Greeting {
    /// Where it comes from, while it is in start-up.
    fn peer(&self) -> Option<(std::net::IpAddr, u16)> {
        let state = lock(&self.state);
        let addr = state.as_ref()?.link.peer_addr();
        Some((addr.ip().to_canonical(), addr.port()))
    }

    /// Its addresses are both this host's. In containers that share a directory they need not be.
    fn is_on_our_host(&self) -> bool {
        let state = lock(&self.state);
        state.as_ref().is_some_and(|greeted| {
            let (ours, theirs) = (greeted.link.local_addr(), greeted.link.peer_addr());
            same_host(ours.ip(), theirs.ip())
        })
    }

    /// Its initiator is on our host and has said hello.
    fn receive_guest(&self, guest: Guest) {
        if let Some(greeted) = &mut *lock(&self.state) {
            greeted.guest = Some(Box::new(guest));
        }
    }

    fn close(&self, engine: &Engine, state: &mut Option<Greeted>) -> Option<Greeted> {
        let greeted = state.take()?;
        if let Some(token) = self.token.get() {
            engine.unregister(*token, greeted.link.fd());
        }
        Some(greeted)
    }

    fn give_up(&self, engine: &Engine, why: &str) {
        let greeted = self.close(engine, &mut lock(&self.state));
        if let Some(greeted) = greeted {
            tracing::debug!(peer = %greeted.link.peer_addr(), why, "closed a connection in start-up");
            greeted.link.abort();
        }
    }
}

impl Source for Greeting {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let mut state = lock(&self.state);
        let (Some(greeted), Some(&token)) = (&mut *state, self.token.get()) else {
            return Next::Done;
        };
        let step = read_some(&*greeted.link, &mut greeted.buf)
            .map_err(ConnectError::from)
            .and_then(|ended| {
                match Responder::new(self.reception.config).on_bytes(&greeted.buf)? {
                    RespStep::NeedMore if ended => Err(ConnectError::Closed),
                    step => Ok(step),
                }
            });
        match step {
            Ok(RespStep::NeedMore) => engine.arm(token, greeted.link.fd(), Interest::READ),
            Ok(RespStep::Request(pending)) => {
                let Some(mut greeted) = self.close(engine, &mut state) else {
                    return Next::Done;
                };
                drop(state);
                let early = greeted
                    .buf
                    .split_off(pending.consumed().min(greeted.buf.len()));
                let reception = &self.reception;
                let count = Counted::unlimited(&reception.waiting);
                if reception.waiting.load(Ordering::Relaxed) > reception.backlog {
                    tracing::warn!(peer = %greeted.link.peer_addr(), "the backlog is full: turned away");
                    greeted.link.abort();
                    return Next::Done;
                }
                drop(greeted.permit);
                (reception.on_request)(Incoming {
                    device: Arc::clone(&reception.device),
                    link: greeted.link,
                    pending: Some(pending),
                    early,
                    guest: greeted.guest,
                    _permit: count,
                });
            }
            Err(error) => {
                tracing::debug!(peer = %greeted.link.peer_addr(), %error, "start-up failed");
                if let Some(greeted) = self.close(engine, &mut state) {
                    greeted.link.abort();
                }
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, engine: &Arc<Engine>) {
        self.give_up(engine, "start-up took too long");
    }
}
