//! The responder's side of making a connection: start-up of an accepted connection, and the resulting request.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use weft_proto::mpa::{AcceptError, Config, PendingRequest, RespStep, Responder};
use weft_sys::diag::tcp_peer_uid;
use weft_sys::{Event, Interest, poll_fds};
use weft_tls::{Tls, TlsError, TlsInfo};

use super::{
    ConnParam, ConnectError, TLS_HANDSHAKE, check_connectable, deadline, read_some, send_all,
};
use crate::device::{Counted, DeviceInner, StartUp};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
use crate::meet::{ShmPeer, same_host};
use crate::qp::Qp;
use crate::transport::tcp::TcpLink;
use crate::transport::tls::TlsLink;
use crate::transport::{ByteStream, Llp};
use crate::types::LocalMode;
use crate::warnings::Warnings;

/// A connection request that waits for an answer. Dropping it rejects it.
pub struct Incoming {
    device: Arc<DeviceInner>,
    link: Arc<dyn ByteStream>,
    pending: Option<PendingRequest>,
    early: Vec<u8>,
    shm_peer: Option<Box<ShmPeer>>,
    _permit: Counted,
}

impl Incoming {
    /// The private data of the initiator's program.
    pub fn private_data(&self) -> &[u8] {
        self.pending
            .as_ref()
            .map_or(&[], PendingRequest::private_data)
    }

    /// The initiator's IRD and ORD (Reads and atomics that it serves and has outstanding), if it has sent them.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.pending.as_ref()?.enhanced().map(|e| (e.ird, e.ord))
    }

    /// The initiator's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.link.peer_addr()
    }

    /// The key that it has proved to have, and the cipher, where the connection was made by TLS.
    pub fn tls(&self) -> Option<TlsInfo> {
        self.link.tls().cloned()
    }

    /// The address that it dialled.
    pub fn local_addr(&self) -> SocketAddr {
        self.link.local_addr()
    }

    /// The user whose process dialled, as the kernel attests: `None` if it is not on this host, or not known.
    pub fn peer_uid(&self) -> Option<u32> {
        let asked = self.device.is_tcp().then(|| tcp_peer_uid(self.link.fd()));
        asked?.unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not say whose connection this is");
            None
        })
    }

    /// Whether the initiator has given up meanwhile: it has closed, or sent data out of turn. (A simulated network does not report this.)
    pub fn is_over(&self) -> bool {
        self.device.is_tcp()
            && poll_fds(&[(self.link.fd(), Interest::READ)], Some(Duration::ZERO))
                .is_ok_and(|n| n > 0)
    }

    /// Accepts on `qp`, which must be in the Init state; otherwise the request is rejected.
    ///
    /// # Errors
    /// [`ConnectError::Invalid`], [`ConnectError::Closed`] if the initiator has closed meanwhile.
    pub fn accept(mut self, qp: &Qp, param: &ConnParam) -> Result<(), ConnectError> {
        check_connectable(qp)?;
        let Some(pending) = self.pending.take() else {
            return Err(ConnectError::Closed);
        };
        let cap = self.device.limits.max_rd_atomic;
        let (ird, ord) = (param.ird.min(cap), param.ord.min(cap));
        let ask = |_| qp.0.ask_for_own_reads(ird, ord);
        let more = pending.enhanced().map_or(0, ask);
        let accepted = pending.accept(&param.private_data, ird + more, ord + more);
        let (params, reply) =
            accepted.map_err(|error: AcceptError| ConnectError::Invalid(error.to_string()))?;
        let tcp = Arc::clone(&self.link);
        let local = match self.shm_peer.take() {
            Some(shm_peer) => {
                shm_peer.accept(&self.device, qp.0.pd(), qp.0.num(), Arc::clone(&tcp))
            }
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
                let link = Llp::Local(Arc::clone(&local));
                qp.0.attach(link, &params, &param.options, &[], &[])?;
                send_all(&*tcp, &reply).inspect_err(|_| tcp.abort())?;
                local.close_tcp(&param.options, false);
                Ok(())
            }
            Err(why) => {
                if self.device.local == LocalMode::Require {
                    tcp.abort();
                    return Err(ConnectError::NotLocal(why));
                }
                if self.device.local == LocalMode::Auto && self.device.is_tcp() {
                    qp.0.set_reason(why);
                }
                let link = Llp::Stream(tcp);
                qp.0.attach(link, &params, &param.options, &reply, &self.early)?;
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

    /// Resets the connection, because no program will see the request: its initiator may repeat it ([`ConnectError::Reset`]).
    pub fn turn_away(mut self) {
        self.pending = None;
        self.link.cut();
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

/// The parts of a listener that a connection in start-up needs. The listening socket is not among them, because it may be closed meanwhile.
pub(super) struct Reception {
    pub(super) device: Arc<DeviceInner>,
    config: Config,
    timeout: Duration,
    tls: Option<Tls>,
    /// Requests given to the program that it has not answered, and how many there may be.
    waiting: Arc<AtomicU32>,
    backlog: u32,
    on_request: OnRequest,
    warnings: Arc<Warnings>,
    /// Its connections in start-up.
    greetings: Mutex<Vec<Weak<Greeting>>>,
}

impl Reception {
    pub(super) fn new(
        device: &Arc<DeviceInner>,
        backlog: u32,
        param: &ConnParam,
        on_request: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Reception {
            device: Arc::clone(device),
            config: param.config(device),
            timeout: param.options.timeout,
            tls: param.tls_on(device).cloned(),
            waiting: Arc::default(),
            backlog: backlog.max(1),
            on_request: Arc::new(on_request),
            warnings: Arc::default(),
            greetings: Mutex::default(),
        })
    }

    /// Log or count a warning about a peer, see [`Warnings`].
    pub(super) fn warn(
        &self,
        what: &'static str,
        peer: Option<SocketAddr>,
        error: Option<&dyn std::fmt::Display>,
    ) {
        self.warnings.warn(&self.device.engine, what, peer, error);
    }

    /// The connection in start-up that comes from this address. Another listener may have one from there as well: to different
    /// destinations a host uses the same port.
    pub(super) fn find(&self, from: SocketAddr) -> Option<Arc<Greeting>> {
        let wanted = (from.ip().to_canonical(), from.port());
        let greetings = lock(&self.greetings);
        greetings
            .iter()
            .rev()
            .filter_map(Weak::upgrade)
            .find(|greeting| greeting.peer() == Some(wanted))
            .filter(|greeting| self.device.local_dir.is_some() || greeting.is_on_our_host())
    }

    /// Begins start-up on a connection that was accepted.
    pub(super) fn admit(self: &Arc<Self>, engine: &Arc<Engine>, accepted: Accepted) {
        let (link, securing) = match (accepted, &self.tls) {
            (Accepted::Tcp(tcp), Some(tls)) => match tls.responder() {
                Ok(session) => {
                    let link = Arc::new(TlsLink::new(tcp, session));
                    (Arc::clone(&link) as Arc<dyn ByteStream>, Some(link))
                }
                Err(error) => {
                    self.warn("turned away: no TLS session for it", None, Some(&error));
                    return;
                }
            },
            (Accepted::Tcp(tcp), None) => (Arc::new(tcp) as Arc<dyn ByteStream>, None),
            (Accepted::Sim(link), _) => (link, None),
        };
        let permit = self.device.take_pending().or_else(|| {
            // A flood of silent peers must not keep other peers out: the one that has been silent longest is dropped.
            let oldest = {
                let mut greetings = lock(&self.device.greetings);
                std::iter::from_fn(|| greetings.pop_front()).find_map(|g| g.upgrade())?
            };
            oldest.give_up("made room for a newer connection");
            self.device.take_pending()
        });
        let Some(permit) = permit else {
            let what = "turned away: too many connections in start-up";
            self.warn(what, Some(link.peer_addr()), None);
            link.abort();
            return;
        };
        let greeting = Arc::new(Greeting {
            reception: Arc::clone(self),
            state: Mutex::new(Some(Greeted {
                link,
                securing,
                buf: Vec::new(),
                permit,
                shm_peer: None,
            })),
            registration: Registration::new(engine),
        });
        let state = lock(&greeting.state);
        let Some(greeted) = &*state else { return };
        let source = Arc::clone(&greeting) as Arc<dyn Source>;
        let registration = &greeting.registration;
        match registration.start(source, greeted.link.fd(), Interest::READ) {
            Ok(()) => {
                registration.set_timer(deadline(self.timeout));
                drop(state);
                let mut own = lock(&self.greetings);
                if own.len() == own.capacity() {
                    own.retain(|g| g.strong_count() > 0);
                }
                own.push(Arc::downgrade(&greeting));
                drop(own);
                let mut greetings = lock(&self.device.greetings);
                while greetings.front().is_some_and(|g| g.strong_count() == 0) {
                    greetings.pop_front();
                }
                greetings.push_back(Arc::downgrade(&greeting) as _);
            }
            Err(error) => self.warn("cannot watch a new connection", None, Some(&error)),
        }
    }
}

pub(super) enum Accepted {
    Tcp(TcpLink),
    Sim(Arc<dyn ByteStream>),
}

struct Greeted {
    link: Arc<dyn ByteStream>,
    /// The same link, while its TLS handshake is under way.
    securing: Option<Arc<TlsLink>>,
    buf: Vec<u8>,
    permit: Counted,
    shm_peer: Option<Box<ShmPeer>>,
}

/// An accepted connection whose request is not complete.
pub(super) struct Greeting {
    reception: Arc<Reception>,
    state: Mutex<Option<Greeted>>,
    registration: Registration,
}

impl Greeting {
    /// Its source address, during start-up.
    fn peer(&self) -> Option<(IpAddr, u16)> {
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

    /// Its initiator is on this host and has sent a Hello.
    pub(super) fn set_shm_peer(&self, shm_peer: ShmPeer) {
        if let Some(greeted) = &mut *lock(&self.state)
            && (greeted.shm_peer.is_none() || shm_peer.is_kin)
        {
            greeted.shm_peer = Some(Box::new(shm_peer));
        }
    }

    fn close(&self, state: &mut Option<Greeted>) -> Option<Greeted> {
        let greeted = state.take()?;
        self.registration.release(greeted.link.fd());
        Some(greeted)
    }
}

impl StartUp for Greeting {
    fn give_up(&self, why: &str) {
        let greeted = self.close(&mut lock(&self.state));
        if let Some(greeted) = greeted {
            tracing::debug!(peer = %greeted.link.peer_addr(), why, "closed a connection in start-up");
            greeted.link.abort();
        }
    }
}

impl Source for Greeting {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        let mut state = lock(&self.state);
        let Some(greeted) = &mut *state else {
            return Next::Done;
        };
        let secured = match &greeted.securing {
            Some(link) => link.handshake(),
            None => Ok(true),
        };
        match secured {
            Ok(true) => greeted.securing = None,
            Ok(false) => {
                let interest = greeted.link.watch(Interest::READ);
                let interest = interest.unwrap_or(Interest::READ);
                self.registration.arm(greeted.link.fd(), interest);
                return Next::Done;
            }
            Err(_) => {}
        }
        let step = secured
            .and_then(|_| read_some(&*greeted.link, &mut greeted.buf))
            .map_err(ConnectError::from)
            .and_then(|ended| {
                match Responder::new(self.reception.config).on_bytes(&greeted.buf)? {
                    RespStep::NeedMore if ended => Err(ConnectError::Closed),
                    step => Ok(step),
                }
            });
        match step {
            Ok(RespStep::NeedMore) => self.registration.arm(greeted.link.fd(), Interest::READ),
            Ok(RespStep::Request(pending)) => {
                let Some(mut greeted) = self.close(&mut state) else {
                    return Next::Done;
                };
                drop(state);
                let early = greeted
                    .buf
                    .split_off(pending.consumed().min(greeted.buf.len()));
                let reception = &self.reception;
                let count = Counted::unlimited(&reception.waiting);
                if reception.waiting.load(Ordering::Relaxed) > reception.backlog {
                    let what = "turned away: the backlog is full";
                    reception.warn(what, Some(greeted.link.peer_addr()), None);
                    greeted.link.abort();
                    return Next::Done;
                }
                drop(greeted.permit);
                (reception.on_request)(Incoming {
                    device: Arc::clone(&reception.device),
                    link: greeted.link,
                    pending: Some(pending),
                    early,
                    shm_peer: greeted.shm_peer,
                    _permit: count,
                });
            }
            Err(error) => {
                let peer = greeted.link.peer_addr();
                if matches!(error, ConnectError::Tls(TlsError::KeyRefusedByPeer)) {
                    // Programs that ask their user about a new key connect again afterwards.
                    tracing::info!(%peer, "ended by the peer, which has not accepted our key");
                } else if matches!(error, ConnectError::Tls(_)) {
                    let what = "turned away: no TLS connection with it";
                    self.reception.warn(what, Some(peer), Some(&error));
                } else if greeted.buf.first() == Some(&TLS_HANDSHAKE) {
                    let what =
                        "turned away: it speaks TLS, which is off here (WEFT_TLS, ConnParam::tls)";
                    self.reception.warn(what, Some(peer), None);
                } else {
                    tracing::debug!(%peer, %error, "start-up failed");
                }
                // With TLS its end comes in order: a reset would overtake what TLS has to say.
                if let Some(greeted) = self.close(&mut state)
                    && greeted.securing.is_none()
                {
                    greeted.link.abort();
                }
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.give_up("start-up took too long");
    }
}
