//! Event-style connection management, in the manner of `rdma_cm`.
//!
//! ```text
//!   initiator: create_id ─ resolve_addr ─> AddrResolved ─ resolve_route ─> RouteResolved ─ connect ─> Established
//!   responder: create_id ─ bind_addr ─ listen ─> ConnectRequest(new id) ─ accept ─> Established
//!   both:      disconnect, or the peer does ─> Disconnected
//! ```

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_rnic::{ConnParam, ConnectError, EndReason, Incoming, Listening, Signal};

use super::{lock, wait_pop};
use crate::{Device, Qp};

/// Events that a channel keeps before it turns new connection requests away.
const MAX_EVENTS: usize = 65_536;

/// An event of an identifier.
#[derive(Debug)]
pub enum CmEventKind {
    /// The address is known.
    AddrResolved,
    /// The address could not be resolved, or is none that we reach.
    AddrError(String),
    /// There is a route.
    RouteResolved,
    /// A peer requests a connection to a listening identifier: answer on the new one.
    ConnectRequest {
        /// The identifier of the connection to be.
        id: CmId,
        /// The private data of the initiator's program.
        private_data: Vec<u8>,
    },
    /// Connected.
    Established {
        /// The responder's private data; empty on the responder's side.
        private_data: Vec<u8>,
    },
    /// The responder's program rejected the request.
    Rejected {
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// The peer does not answer, or there is no route to it.
    Unreachable(ConnectError),
    /// The connection could not be made for another reason.
    ConnectError(ConnectError),
    /// The connection has ended.
    Disconnected(EndReason),
}

/// An event.
#[derive(Debug)]
pub struct CmEvent {
    /// The identifier that it happened to: for a request, the listening one.
    pub id: CmId,
    /// The kind of event.
    pub kind: CmEventKind,
}

/// Why a call was refused.
#[derive(Debug, thiserror::Error)]
pub enum CmError {
    /// Not in this order.
    #[error("the identifier is in the wrong state for this call: {0}")]
    State(&'static str),
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The connection manager refused.
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

struct Channel {
    device: Device,
    events: Mutex<VecDeque<CmEvent>>,
    signal: Signal,
    next: AtomicU64,
    closed: AtomicBool,
}

impl Channel {
    fn push(&self, id: CmId, kind: CmEventKind) {
        {
            let mut events = lock(&self.events);
            if !self.closed.load(Ordering::SeqCst) {
                events.push_back(CmEvent { id, kind });
            }
        }
        self.signal.raise();
    }
}

/// A queue of events. Its descriptor is readable while events wait.
#[derive(Clone)]
pub struct EventChannel(Arc<Owner>);

/// The program's handle of a channel. Events refer to identifiers, and identifiers to their channel; dropping this handle removes the
/// events, which the program can no longer fetch.
struct Owner(Arc<Channel>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        let events = std::mem::take(&mut *lock(&self.0.events));
        drop(events);
    }
}

impl EventChannel {
    /// A channel for identifiers of this device.
    ///
    /// # Errors
    /// Without a free descriptor.
    pub fn new(device: &Device) -> std::io::Result<Self> {
        Ok(EventChannel(Arc::new(Owner(Arc::new(Channel {
            device: device.clone(),
            events: Mutex::default(),
            signal: Signal::new()?,
            next: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        })))))
    }

    /// A new identifier.
    pub fn create_id(&self) -> CmId {
        new_id(&self.0.0, State::Idle)
    }

    /// The next event; waits up to `timeout` (`None`: for ever). `None` when the time is up.
    pub fn get_event(&self, timeout: Option<Duration>) -> Option<CmEvent> {
        wait_pop(&self.0.0.events, &self.0.0.signal, timeout)
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.signal.as_fd()
    }
}

fn new_id(channel: &Arc<Channel>, state: State) -> CmId {
    CmId(Arc::new(IdInner {
        number: channel.next.fetch_add(1, Ordering::Relaxed),
        channel: Arc::clone(channel),
        state: Mutex::new(state),
    }))
}

enum State {
    Idle,
    Resolved {
        dst: SocketAddr,
        src: Option<SocketAddr>,
    },
    Bound(SocketAddr),
    Listening(Listening),
    Requested(Incoming),
    Connecting,
    Connected(SocketAddr, SocketAddr),
    Ended,
}

struct IdInner {
    number: u64,
    channel: Arc<Channel>,
    state: Mutex<State>,
}

/// An identifier: a connection, a connection to be, or a listener. Clones are handles of the same one.
#[derive(Clone)]
pub struct CmId(Arc<IdInner>);

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CmId({})", self.0.number)
    }
}

impl PartialEq for CmId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CmId {}

impl CmId {
    /// Its number, for maps and logs.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    fn push(&self, kind: CmEventKind) {
        self.0.channel.push(self.clone(), kind);
    }

    /// Find the address of `host`: a name, an IPv4 or an IPv6 address. Answers with
    /// [`CmEventKind::AddrResolved`] or [`CmEventKind::AddrError`]. A name is looked up by this call itself.
    ///
    /// # Errors
    /// [`CmError::State`] unless the identifier is new or bound.
    pub fn resolve_addr(&self, host: &str, port: u16) -> Result<(), CmError> {
        let mut state = lock(&self.0.state);
        let src = match &*state {
            State::Idle => None,
            State::Bound(addr) => Some(*addr),
            _ => {
                return Err(CmError::State(
                    "resolve_addr needs a new or a bound identifier",
                ));
            }
        };
        match (host, port).to_socket_addrs().map(|mut found| found.next()) {
            Ok(Some(dst)) => {
                *state = State::Resolved { dst, src };
                self.push(CmEventKind::AddrResolved);
            }
            Ok(None) => self.push(CmEventKind::AddrError(format!("{host} has no address"))),
            Err(error) => self.push(CmEventKind::AddrError(format!("{host}: {error}"))),
        }
        Ok(())
    }

    /// Find a way to the address: on a soft RNIC, the operating system's routing does that when it connects.
    ///
    /// # Errors
    /// [`CmError::State`] before the address is resolved.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        if !matches!(&*lock(&self.0.state), State::Resolved { .. }) {
            return Err(CmError::State("resolve_route needs a resolved address"));
        }
        self.push(CmEventKind::RouteResolved);
        Ok(())
    }

    /// Use this local address: to listen on, or to connect from.
    ///
    /// # Errors
    /// [`CmError::State`] unless the identifier is new.
    pub fn bind_addr(&self, addr: SocketAddr) -> Result<(), CmError> {
        let mut state = lock(&self.0.state);
        if !matches!(&*state, State::Idle) {
            return Err(CmError::State("bind_addr needs a new identifier"));
        }
        *state = State::Bound(addr);
        Ok(())
    }

    /// Listen; each request makes a [`CmEventKind::ConnectRequest`]. `param` gives options and depths.
    ///
    /// # Errors
    /// [`CmError::State`] unless bound; as `bind(2)` and `listen(2)`.
    pub fn listen(&self, backlog: u32, param: &ConnParam) -> Result<(), CmError> {
        let mut state = lock(&self.0.state);
        let State::Bound(addr) = &*state else {
            return Err(CmError::State("listen needs a bound identifier"));
        };
        let listener = Arc::downgrade(&self.0);
        let listening = self
            .0
            .channel
            .device
            .listen(*addr, backlog, param, move |incoming| {
                let Some(listener) = listener.upgrade().map(CmId) else {
                    return;
                };
                if lock(&listener.0.channel.events).len() >= MAX_EVENTS {
                    return;
                }
                let private_data = incoming.private_data().to_vec();
                let id = new_id(&listener.0.channel, State::Requested(incoming));
                listener.push(CmEventKind::ConnectRequest { id, private_data });
            })?;
        *state = State::Listening(listening);
        Ok(())
    }

    /// Connect `qp`. Answers with [`CmEventKind::Established`], or with why not.
    ///
    /// # Errors
    /// [`CmError::State`] before the address is resolved.
    pub fn connect(&self, qp: &Qp, param: &ConnParam) -> Result<(), CmError> {
        let (dst, src) = {
            let mut state = lock(&self.0.state);
            let State::Resolved { dst, src } = *state else {
                return Err(CmError::State("connect needs a resolved address"));
            };
            *state = State::Connecting;
            (dst, src)
        };
        let id = self.clone();
        let ender = qp.ender();
        self.0
            .channel
            .device
            .dial(dst, src, qp, param, move |outcome| match outcome {
                Ok(private_data) => {
                    let local = src.unwrap_or(match dst.ip() {
                        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
                        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
                    });
                    id.set(State::Connected(local, dst));
                    id.push(CmEventKind::Established { private_data });
                    ender.on_end(id.ended());
                }
                Err(error) => {
                    id.set(State::Ended);
                    id.push(match error {
                        ConnectError::Rejected { private_data } => {
                            CmEventKind::Rejected { private_data }
                        }
                        ConnectError::Refused
                        | ConnectError::Unreachable
                        | ConnectError::TimedOut => CmEventKind::Unreachable(error),
                        error => CmEventKind::ConnectError(error),
                    });
                }
            });
        Ok(())
    }

    /// Accept the request that this identifier came with, on `qp`. [`CmEventKind::Established`] follows.
    ///
    /// # Errors
    /// [`CmError::State`] without a request; [`CmError::Connect`] if the initiator has closed, or the queue pair cannot be connected.
    pub fn accept(&self, qp: &Qp, param: &ConnParam) -> Result<(), CmError> {
        let mut state = lock(&self.0.state);
        let State::Requested(_) = &*state else {
            return Err(CmError::State("accept needs a request"));
        };
        let State::Requested(incoming) = std::mem::replace(&mut *state, State::Connecting) else {
            return Ok(());
        };
        let (local, peer) = (incoming.local_addr(), incoming.peer_addr());
        // The state is right before anything can happen on the connection.
        *state = State::Connected(local, peer);
        drop(state);
        if let Err(error) = incoming.accept(qp, param) {
            self.set(State::Ended);
            return Err(error.into());
        }
        self.push(CmEventKind::Established {
            private_data: Vec::new(),
        });
        qp.on_end(self.ended());
        Ok(())
    }

    /// Reject the request that this identifier came with.
    ///
    /// # Errors
    /// [`CmError::State`] without a request; [`CmError::Connect`] for private data that is too long.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        let mut state = lock(&self.0.state);
        let State::Requested(_) = &*state else {
            return Err(CmError::State("reject needs a request"));
        };
        let State::Requested(incoming) = std::mem::replace(&mut *state, State::Ended) else {
            return Ok(());
        };
        Ok(incoming.reject(private_data)?)
    }

    /// Close the connection in order. [`CmEventKind::Disconnected`] follows when both sides have.
    pub fn disconnect(&self, qp: &Qp) {
        qp.disconnect();
    }

    /// The local address, where it is known.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &*lock(&self.0.state) {
            State::Bound(addr) | State::Connected(addr, _) => Some(*addr),
            State::Resolved { src, .. } => *src,
            State::Listening(listening) => Some(listening.local_addr()),
            State::Requested(incoming) => Some(incoming.local_addr()),
            State::Idle | State::Connecting | State::Ended => None,
        }
    }

    /// The peer's address, where it is known.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        match &*lock(&self.0.state) {
            State::Connected(_, addr) | State::Resolved { dst: addr, .. } => Some(*addr),
            State::Requested(incoming) => Some(incoming.peer_addr()),
            _ => None,
        }
    }

    fn set(&self, new: State) {
        let old = std::mem::replace(&mut *lock(&self.0.state), new);
        drop(old);
    }

    /// The action at the end of the connection. It is set after the connection was announced, so it comes after it too.
    fn ended(&self) -> impl FnOnce(EndReason) + Send + 'static {
        let id = self.clone();
        move |reason| {
            id.set(State::Ended);
            id.push(CmEventKind::Disconnected(reason));
        }
    }
}
