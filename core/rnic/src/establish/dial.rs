//! The initiator's side of making a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use weft_proto::mpa::{InitStep, Initiator};
use weft_sys::{Event, Interest, poll_fds, tcp, thread};
use weft_tls::Tls;

use super::{ConnParam, ConnectError, TLS_ALERT, check_connectable, deadline, read_some, send_all};
use crate::device::{Device, DeviceInner, Transport};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::{lock, try_lock};
use crate::meet::{Answer, ShmConnecting};
use crate::qp::{CallOff, Qp, QpInner};
use crate::transport::tcp::TcpLink;
use crate::transport::tls::TlsLink;
use crate::transport::{ByteStream, Llp};
use crate::types::{LinkOptions, LocalMode};

/// The private data that came with an accepted connection, or why there is none.
pub type Dialed = Result<Vec<u8>, ConnectError>;
type DialDone = Box<dyn FnOnce(Dialed) + Send>;

/// How long a thread that waits for its own dial polls for an answer before it sleeps: a wake-up takes as long.
const LOOKS: Duration = Duration::from_micros(50);
/// The maximum sleep before it checks whether the dial was cancelled.
const NAP: Duration = Duration::from_millis(20);

enum DialStage {
    /// Waiting for the transport's connection.
    Connecting(OwnedFd),
    /// The TLS handshake is under way.
    Securing(Arc<TlsLink>),
    /// The peer is on our host: the handshake for shared memory is under way.
    ShmConnecting(Arc<dyn ByteStream>, Box<ShmConnecting>),
    /// Waiting for the reply.
    Started(Arc<dyn ByteStream>, Vec<u8>, Option<Box<ShmConnecting>>),
    Over,
}

/// A connection that is being made.
pub(super) enum Way {
    Tcp(OwnedFd),
    Sim(Arc<dyn ByteStream>),
}

struct Dial {
    qp: Arc<QpInner>,
    device: Arc<DeviceInner>,
    options: LinkOptions,
    tls: Option<Tls>,
    machine: Initiator,
    request: Vec<u8>,
    deadline: Instant,
    stage: Mutex<DialStage>,
    done: Mutex<Option<DialDone>>,
    registration: Registration,
    /// The engine takes its steps, and not a thread that waits for it.
    by_engine: bool,
    /// The queue pair has cancelled the dial.
    called_off: AtomicBool,
}

impl Device {
    /// Connect `qp`, which must be in the Init state, to a listener at `addr`. Returns at once; `done` is called once, from
    /// the engine's thread or, for errors found at once, from this one.
    pub fn dial(
        &self,
        addr: SocketAddr,
        source: Option<SocketAddr>,
        qp: &Qp,
        param: &ConnParam,
        done: impl FnOnce(Dialed) + Send + 'static,
    ) {
        let connect = || self.way_to(addr, source);
        self.dial_by(connect, qp, param, Box::new(done));
    }

    /// As [`Device::dial`], and wait for the outcome. This thread takes the steps itself, so that each answer of the peer wakes one thread
    /// and not two.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn dial_and_wait(
        &self,
        addr: SocketAddr,
        source: Option<SocketAddr>,
        qp: &Qp,
        param: &ConnParam,
    ) -> Dialed {
        let (tell, told) = mpsc::channel();
        let done = Box::new(move |dialed| drop(tell.send(dialed)));
        let connect = || self.way_to(addr, source);
        match self.start_dial(connect, qp, param, done, false) {
            Ok(dial) => dial.see_through(),
            Err((error, _)) => return Err(error),
        }
        told.try_recv().unwrap_or(Err(ConnectError::Closed))
    }

    fn way_to(&self, addr: SocketAddr, source: Option<SocketAddr>) -> io::Result<Way> {
        match &self.0.transport {
            Transport::Tcp => tcp::connect_start(addr, source).map(Way::Tcp),
            Transport::Sim(net) => net.connect(addr, None).map(Way::Sim),
        }
    }

    pub(super) fn dial_by(
        &self,
        connect: impl FnOnce() -> io::Result<Way>,
        qp: &Qp,
        param: &ConnParam,
        done: DialDone,
    ) {
        if let Err((error, done)) = self.start_dial(connect, qp, param, done, true) {
            done(Err(error));
        }
    }

    fn start_dial(
        &self,
        connect: impl FnOnce() -> io::Result<Way>,
        qp: &Qp,
        param: &ConnParam,
        done: DialDone,
        by_engine: bool,
    ) -> Result<Arc<Dial>, (ConnectError, DialDone)> {
        if let Err(error) = check_connectable(qp) {
            return Err((error, done));
        }
        let mut config = param.config(&self.0);
        if param.options.revision == 2 {
            let more = qp.0.ask_for_own_reads(config.ird, config.ord);
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
            tls: param.tls_on(&self.0).cloned(),
            machine,
            request,
            deadline,
            stage: Mutex::new(stage),
            done: Mutex::new(Some(done)),
            registration: Registration::new(&self.0.engine),
            by_engine,
            called_off: AtomicBool::new(false),
        });
        let call_off = Arc::downgrade(&dial);
        qp.0.dials_by(call_off);
        if check_connectable(qp).is_err() {
            // The queue pair has ended since the first check, and did not know of this dial yet.
            dial.called_off.store(true, Ordering::SeqCst);
        }
        let mut stage = lock(&dial.stage);
        match dial.begin(&self.0.engine, &mut stage) {
            Ok(()) => {
                drop(stage);
                Ok(dial)
            }
            Err(error) => {
                dial.registration.end();
                *stage = DialStage::Over;
                drop(stage);
                let done = lock(&dial.done).take();
                done.map_or(Ok(dial), |done| Err((error, done)))
            }
        }
    }
}

impl CallOff for Dial {
    /// The peer sees this at once. The engine's thread does the rest, because the caller may hold locks that the end of a dial takes.
    fn call_off(&self) {
        self.called_off.store(true, Ordering::SeqCst);
        // A dial that is in a step now finds the queue pair ended, or is ended after the step.
        if let Some(stage) = try_lock(&self.stage) {
            match &*stage {
                DialStage::Securing(link) => link.abort(),
                DialStage::ShmConnecting(link, _) | DialStage::Started(link, ..) => link.abort(),
                DialStage::Connecting(_) | DialStage::Over => {}
            }
        }
        self.registration.poke();
    }
}

impl Dial {
    /// The first steps. A connection to this host is established at once, and the peer can be told the reason for a failure without the
    /// engine.
    fn begin(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        stage: &mut DialStage,
    ) -> Result<(), ConnectError> {
        let registration = &self.registration;
        let source = || Arc::clone(self) as Arc<dyn Source>;
        match &*stage {
            DialStage::Connecting(fd) => {
                if self.by_engine {
                    registration.start(source(), fd.as_fd(), Interest::empty())?;
                }
                self.step(engine, stage)?;
            }
            DialStage::Started(link, ..) => {
                send_all(&**link, &self.request)?;
                if self.by_engine {
                    registration.start(source(), link.fd(), Interest::READ)?;
                }
            }
            DialStage::Securing(_) | DialStage::ShmConnecting(..) | DialStage::Over => {}
        }
        if self.by_engine {
            registration.set_timer(self.deadline);
            if self.called_off.load(Ordering::SeqCst) {
                registration.poke();
            }
        }
        Ok(())
    }

    /// Take all steps, and wait between them.
    fn see_through(self: &Arc<Self>) {
        let engine = &self.device.engine;
        let mut stage = lock(&self.stage);
        while !matches!(*stage, DialStage::Over) {
            self.await_answer(engine.spins(), &stage);
            if let Err(error) = self.step(engine, &mut stage) {
                self.fail(&mut stage, error);
            } else if !matches!(*stage, DialStage::Over) && Instant::now() >= self.deadline {
                self.fail(&mut stage, ConnectError::TimedOut);
            }
        }
    }

    /// Waits for the event that the next step needs, or for a [`NAP`].
    fn await_answer(&self, looks: bool, stage: &DialStage) {
        let (fd, interest) = match stage {
            DialStage::Connecting(fd) => (fd.as_fd(), Interest::WRITE),
            DialStage::Securing(link) => {
                let interest = link.watch(Interest::READ).unwrap_or(Interest::READ);
                (link.fd(), interest)
            }
            DialStage::ShmConnecting(_, shm) => (shm.fd(), Interest::READ),
            DialStage::Started(link, ..) => (link.fd(), Interest::READ),
            DialStage::Over => return,
        };
        let begun = Instant::now();
        while looks && begun.elapsed() < LOOKS {
            if poll_fds(&[(fd, interest)], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0) {
                return;
            }
            // The peer may be waiting for this very processor.
            if !thread::offer_turn() {
                break;
            }
        }
        let left = self.deadline.saturating_duration_since(begun);
        let _ = poll_fds(&[(fd, interest)], Some(left.min(NAP)));
    }

    /// Makes the engine watch for the event that the next step needs.
    fn arm(&self, fd: BorrowedFd<'_>, interest: Interest) {
        if self.by_engine {
            self.registration.arm(fd, interest);
        }
    }

    fn fail(&self, stage: &mut DialStage, error: ConnectError) {
        match &*stage {
            DialStage::Securing(link) => link.abort(),
            DialStage::ShmConnecting(link, _) | DialStage::Started(link, ..) => link.abort(),
            DialStage::Connecting(_) | DialStage::Over => {}
        }
        self.registration.end();
        *stage = DialStage::Over;
        if let Some(done) = lock(&self.done).take() {
            done(Err(error));
        }
    }

    fn step(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        stage: &mut DialStage,
    ) -> Result<(), ConnectError> {
        if self.called_off.load(Ordering::SeqCst) {
            return Err(ConnectError::Invalid("the queue pair has gone".into()));
        }
        if let DialStage::Connecting(fd) = stage {
            if !tcp::connect_result(&*fd).map_err(ConnectError::unanswered)? {
                self.arm(fd.as_fd(), Interest::WRITE);
                return Ok(());
            }
            let DialStage::Connecting(fd) = std::mem::replace(stage, DialStage::Over) else {
                return Ok(());
            };
            let tcp = TcpLink::new(fd).map_err(ConnectError::unanswered)?;
            *stage = match &self.tls {
                Some(tls) => DialStage::Securing(Arc::new(TlsLink::new(tcp, tls.initiator()?))),
                None => self.connect_shm(engine, Arc::new(tcp))?,
            };
            if !matches!(stage, DialStage::Securing(_)) {
                return Ok(());
            }
        }
        if let DialStage::Securing(link) = stage {
            if !link.handshake()? {
                let interest = link.watch(Interest::READ).unwrap_or(Interest::READ);
                self.arm(link.fd(), interest);
                return Ok(());
            }
            let DialStage::Securing(link) = std::mem::replace(stage, DialStage::Over) else {
                return Ok(());
            };
            *stage = self.connect_shm(engine, link)?;
            return Ok(());
        }
        if matches!(stage, DialStage::ShmConnecting(..)) {
            return self.step_shm(stage);
        }
        let DialStage::Started(link, buf, shm) = stage else {
            return Ok(());
        };
        // An error comes only with an empty buffer.
        let ended = read_some(&**link, buf).map_err(ConnectError::unanswered)?;
        if buf.first() == Some(&TLS_ALERT) {
            return Err(ConnectError::Protocol(
                "it takes TLS connections only (WEFT_TLS, ConnParam::tls)".into(),
            ));
        }
        match self.machine.on_bytes(buf)? {
            InitStep::NeedMore if ended => Err(ConnectError::Closed),
            InitStep::NeedMore => {
                self.arm(link.fd(), Interest::READ);
                Ok(())
            }
            InitStep::Rejected { private_data, .. } => Err(ConnectError::Rejected { private_data }),
            InitStep::Accepted {
                params,
                private_data,
                consumed,
            } => {
                if self.by_engine {
                    self.registration.release(link.fd());
                }
                let early = buf.split_off(consumed.min(buf.len()));
                let tcp = Arc::clone(link);
                let shm = shm.take();
                *stage = DialStage::Over;
                let mut link = Llp::Stream(Arc::clone(&tcp));
                if let Some(shm) = shm {
                    let joined = shm
                        .finish(&self.device, Arc::clone(&tcp))
                        .inspect_err(|_| tcp.abort())?;
                    match joined {
                        Ok(_) if !early.is_empty() => {
                            tcp.abort();
                            return Err(ConnectError::Protocol(
                                "it sends FPDUs on TCP after agreeing on shared memory".into(),
                            ));
                        }
                        Ok(local) => link = Llp::Local(local),
                        Err(why) => self.stays_on_tcp(why).inspect_err(|_| tcp.abort())?,
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
    fn connect_shm(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        link: Arc<dyn ByteStream>,
    ) -> Result<DialStage, ConnectError> {
        if self.device.local == LocalMode::Off {
            return self.request(link, None);
        }
        let started = ShmConnecting::start(&self.device, self.qp.pd(), self.qp.num(), &*link)
            .and_then(|mut shm| {
                if !self.by_engine {
                    return Ok(shm);
                }
                let source = Arc::clone(self) as Arc<dyn Source>;
                let registration = Registration::new(engine);
                registration
                    .start(source, shm.fd(), Interest::READ)
                    .map_err(|error| error.to_string())?;
                registration.set_timer(shm.deadline);
                shm.registration = Some(registration);
                Ok(shm)
            });
        match started {
            Ok(shm) => Ok(DialStage::ShmConnecting(link, Box::new(shm))),
            Err(why) => {
                self.stays_on_tcp(why)?;
                self.request(link, None)
            }
        }
    }

    /// A step of the shared-memory handshake, and the steps after it.
    fn step_shm(self: &Arc<Self>, stage: &mut DialStage) -> Result<(), ConnectError> {
        let DialStage::ShmConnecting(_, shm) = stage else {
            return Ok(());
        };
        let why = match shm.answer(&self.device) {
            Answer::Wait if Instant::now() < shm.deadline => {
                if let Some(registration) = &shm.registration {
                    registration.arm(shm.fd(), Interest::READ);
                }
                return Ok(());
            }
            Answer::Wait => {
                Some("the peer does not answer the handshake for shared memory".to_owned())
            }
            Answer::Welcome => None,
            Answer::No(why) => Some(why),
        };
        // The engine no longer watches the handshake.
        if let Some(registration) = shm.registration.take() {
            registration.release(shm.fd());
        }
        let DialStage::ShmConnecting(link, shm) = std::mem::replace(stage, DialStage::Over) else {
            return Ok(());
        };
        let shm = match why {
            None => Some(shm),
            Some(why) => {
                // Before the request: a responder that welcomes us late must not find a handshake to attach to.
                drop(shm);
                self.stays_on_tcp(why)?;
                None
            }
        };
        *stage = self.request(link, shm)?;
        Ok(())
    }

    fn stays_on_tcp(&self, why: String) -> Result<(), ConnectError> {
        if self.device.local == LocalMode::Require {
            return Err(ConnectError::NotLocal(why));
        }
        tracing::debug!(qp = self.qp.num(), why, "the connection stays on TCP");
        self.qp.set_reason(why);
        Ok(())
    }

    /// Begin MPA start-up. A new socket takes a frame of this size whole.
    fn request(
        &self,
        link: Arc<dyn ByteStream>,
        shm: Option<Box<ShmConnecting>>,
    ) -> Result<DialStage, ConnectError> {
        send_all(&*link, &self.request).map_err(ConnectError::unanswered)?;
        // The answer takes a while, and a caller of `dial` is not to be answered before that returns.
        self.arm(link.fd(), Interest::READ);
        Ok(DialStage::Started(link, Vec::new(), shm))
    }
}

impl Source for Dial {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let mut stage = lock(&self.stage);
        if let Err(error) = self.step(engine, &mut stage) {
            self.fail(&mut stage, error);
        }
        match &*stage {
            DialStage::Over => Next::Done,
            _ => Next::Soon,
        }
    }

    fn expired(self: Arc<Self>, engine: &Arc<Engine>) {
        let mut stage = lock(&self.stage);
        match &*stage {
            DialStage::Over => {}
            _ if Instant::now() >= self.deadline => {
                self.fail(&mut stage, ConnectError::TimedOut);
            }
            DialStage::ShmConnecting(..) => {
                if let Err(error) = self.step(engine, &mut stage) {
                    self.fail(&mut stage, error);
                }
            }
            _ => {}
        }
    }
}
