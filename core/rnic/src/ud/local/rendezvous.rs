//! How two UDP ports of one host and user set up a pipe (docs/spec/dgram.md, "Between processes of one host").
//!
//! ```text
//!  sender's port                                     receiver's port
//!  whose socket gets this? ask the kernel: number R
//!  connects to the rendezvous of R, same user?
//!  Offer (own number S, R, addresses) ─────────────► same user, and one of us?
//!                                                    whose socket has the sender's address? ask the kernel: S
//!                        ◄───────────────────────── Accept, with the segment
//!  same user, and one of us?
//! ```
//!
//! A process gets descriptors only after the kernel has attested its user, in a message that this process has just sent.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use weft_ring::{Role, Segment};
use weft_sys::unix::{self, Cred, Name};
use weft_sys::{Event, Interest, diag, process, udp};
use weft_wire::local::Message;

use super::pipe::{Pipe, RING_BYTES, Wire};
use super::{Key, Locals};
use crate::device::Counted;
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
use crate::meet::{receive, same_host, say_signed};
use crate::neighbours::{PeerProcess, Why, admitted, why};
use crate::report::Connection;
use crate::types::QpState;

/// The time limit for each message of a peer.
const PATIENCE: Duration = Duration::from_millis(500);

fn name(cookie: u64) -> Vec<u8> {
    format!("weft/1/udp/{cookie:016x}").into_bytes()
}

/// A listening Unix socket, named by the number of the port's UDP socket.
pub(super) struct RendezvousListener {
    fd: OwnedFd,
    locals: Weak<Locals>,
    pub(super) registration: Registration,
}

impl RendezvousListener {
    pub(super) fn open(
        locals: &Arc<Locals>,
        engine: &Arc<Engine>,
    ) -> io::Result<Arc<RendezvousListener>> {
        let fd = unix::listen(Name::Abstract(&name(locals.cookie)), 64)?;
        unix::ask_for_senders(&fd, true)?;
        let rendezvous = Arc::new(RendezvousListener {
            fd,
            locals: Arc::downgrade(locals),
            registration: Registration::new(engine),
        });
        let source = Arc::clone(&rendezvous) as Arc<dyn Source>;
        rendezvous
            .registration
            .start(source, rendezvous.fd.as_fd(), Interest::READ)?;
        Ok(rendezvous)
    }

    pub(super) fn close(&self) {
        self.registration.release(self.fd.as_fd());
    }
}

impl Source for RendezvousListener {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let Some(locals) = self.locals.upgrade() else {
            return Next::Done;
        };
        for key in locals.take_wanted() {
            if let Err(reason) = offer(&locals, engine, key) {
                tracing::debug!(to = %key.0, reason, "datagrams stay with the kernel");
            }
        }
        for _ in 0..64 {
            match unix::accept(&self.fd) {
                Ok(Some(wire)) => {
                    let stage = admitted(&wire).and_then(|maker| {
                        let device = locals.device.upgrade().ok_or("the device ends")?;
                        let permit = device
                            .take_pending()
                            .ok_or("too many peers are in start-up")?;
                        Ok(Stage::Visited { maker, permit })
                    });
                    if let Ok(stage) = stage {
                        Visit::begin(&locals, engine, wire, stage);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::debug!(%error, "accepting a port of this host");
                    let later = Instant::now() + Duration::from_millis(50);
                    self.registration.set_timer(later);
                    return Next::Done;
                }
            }
        }
        self.registration.arm(self.fd.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.registration.arm(self.fd.as_fd(), Interest::READ);
    }
}

/// Whether these addresses can belong to one host, as far as they show.
fn may_be_local(from: SocketAddr, to: SocketAddr) -> bool {
    // Addresses of a link mean nothing without their interface.
    let plain = |ip: IpAddr| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    from != to && from.port() != 0 && same_host(from.ip(), to.ip()) && plain(from.ip())
}

/// The number of our user's socket that receives datagrams from one address to another.
fn receiver(from: SocketAddr, to: SocketAddr) -> Result<u64, Why> {
    let found = diag::udp_receiver(from, to).map_err(why("asking whose socket it is"))?;
    let socket = found.ok_or("nobody receives there")?;
    if socket.uid != process::uid() {
        return Err("the receiver runs as another user".into());
    }
    Ok(socket.cookie)
}

pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

/// Asks the port behind an address for a pipe.
fn offer(locals: &Arc<Locals>, engine: &Arc<Engine>, key: Key) -> Result<(), Why> {
    let (to, via) = (canonical(key.0), key.1);
    let bound = Some(locals.addr.ip()).filter(|ip| !ip.is_unspecified());
    let ip = match via.or(bound) {
        Some(ip) => ip.to_canonical(),
        None => udp::source_of(to)
            .map_err(why("the way there"))?
            .to_canonical(),
    };
    let from = SocketAddr::new(ip, locals.addr.port());
    if !may_be_local(from, to) {
        return Err("the receiver is on another host".into());
    }
    let peer = receiver(from, to)?;
    if peer == locals.cookie {
        return Err("it is the sender itself".into());
    }
    let wire = unix::connect(Name::Abstract(&name(peer)))
        .map_err(why("the receiver's rendezvous socket"))?;
    let maker = admitted(&wire)?;
    let own = locals.cookie;
    let message = Message::Offer {
        own,
        peer,
        from,
        to,
    };
    say_signed(wire.as_fd(), &message, &[])?;
    // Not before: a socket that asks gets a name of its own when it sends.
    unix::ask_for_senders(&wire, true).map_err(why("asking who is there"))?;
    let stage = Stage::Offered {
        maker,
        addrs: [from, to],
        peer,
    };
    Visit::begin(locals, engine, wire, stage);
    Ok(())
}

enum Stage {
    /// A peer has connected, and has to send an offer.
    Visited {
        maker: Cred,
        #[allow(dead_code)] // holds its place
        permit: Counted,
    },
    /// We have made one.
    Offered {
        maker: Cred,
        addrs: [SocketAddr; 2],
        peer: u64,
    },
    /// Any further event is the end: a process that ends closes its sockets.
    Linked(Arc<Pipe>),
}

/// The exchange on the Unix socket between two ports.
struct Visit {
    wire: Arc<Wire>,
    stage: Mutex<Stage>,
    locals: Weak<Locals>,
}

impl Visit {
    fn begin(locals: &Arc<Locals>, engine: &Arc<Engine>, fd: OwnedFd, stage: Stage) {
        let wire = Arc::new(Wire {
            fd,
            registration: Registration::new(engine),
        });
        let source = Arc::new(Visit {
            wire: Arc::clone(&wire),
            stage: Mutex::new(stage),
            locals: Arc::downgrade(locals),
        });
        let registration = &wire.registration;
        if let Ok(()) = registration.start(source, wire.fd.as_fd(), Interest::READ) {
            registration.set_timer(Instant::now() + PATIENCE);
        }
    }

    /// Receives the peer's message, if there is one.
    fn hear(&self, locals: &Locals, stage: &Stage) -> Result<Option<Arc<Pipe>>, Why> {
        let Some((message, mut fds, sender)) = receive(&self.wire.fd)? else {
            return Ok(None);
        };
        let (&Stage::Visited { maker, .. } | &Stage::Offered { maker, .. }) = stage else {
            return Err("the peer has gone".into());
        };
        let who = PeerProcess::sent(&maker, sender)?;
        who.is_one_of_us(false)?;
        let wire = Arc::downgrade(&self.wire);
        let pipe = match (stage, message) {
            (
                Stage::Visited { .. },
                Message::Offer {
                    own,
                    peer,
                    from,
                    to,
                },
            ) => {
                if peer != locals.cookie || !may_be_local(from, to) {
                    return Err("the offer is not for this socket".into());
                }
                // Datagrams in the pipe have the sender's address, and are for ours.
                if receiver(to, from)? != own || receiver(from, to)? != peer {
                    return Err("the sender does not have the address that it names".into());
                }
                locals.has_room_for(own)?;
                let (segment, fd) = Segment::create(RING_BYTES).map_err(why("a segment"))?;
                let pipe = Pipe::new(segment, Role::Initiator, [to, from], own, wire);
                say_signed(self.wire.fd.as_fd(), &Message::Accept, &[fd.as_fd()])?;
                pipe
            }
            (&Stage::Offered { addrs, peer, .. }, Message::Accept) => {
                let fd = fds.pop().ok_or("no segment came")?;
                let segment = Segment::open(fd).map_err(|error| format!("the segment: {error}"))?;
                locals.has_room_for(peer)?;
                Pipe::new(segment, Role::Responder, addrs, peer, wire)
            }
            _ => return Err("the peer's message makes no sense".into()),
        };
        Ok(Some(Arc::new(pipe)))
    }
}

impl Source for Visit {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        let Some(locals) = self.locals.upgrade() else {
            self.wire.release();
            return Next::Done;
        };
        let mut stage = lock(&self.stage);
        if let Stage::Linked(pipe) = &*stage {
            let pipe = Arc::clone(pipe);
            drop(stage);
            locals.peer_left(&pipe);
            return Next::Done;
        }
        match self.hear(&locals, &stage) {
            Ok(None) => {}
            Ok(Some(pipe)) => {
                let _ = unix::ask_for_senders(&self.wire.fd, false);
                *stage = Stage::Linked(Arc::clone(&pipe));
                drop(stage);
                locals.add(pipe);
            }
            Err(reason) => {
                tracing::debug!(reason, "datagrams stay with the kernel");
                self.wire.release();
                return Next::Done;
            }
        }
        let Wire { fd, registration } = &*self.wire;
        registration.arm(fd.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        if !matches!(*lock(&self.stage), Stage::Linked(_)) {
            self.wire.release();
        }
    }

    fn stat(self: Arc<Self>) -> Option<Connection> {
        let Stage::Linked(pipe) = &*lock(&self.stage) else {
            return None;
        };
        Some(Connection {
            qp: 0,
            state: QpState::Rts,
            local: pipe.ours,
            peer: pipe.peer,
            transport: "local-ud".to_owned(),
            cipher: None,
            reason: None,
            age: pipe.since.elapsed(),
            counters: pipe.counters(),
        })
    }
}

/// Whether the addresses allow a pipe with a key of this address.
pub(super) fn is_candidate(bound: IpAddr, to: IpAddr) -> bool {
    let to = to.to_canonical();
    let bound = bound.to_canonical();
    to.is_loopback() || !to.is_multicast() && (bound.is_unspecified() || bound == to)
}
