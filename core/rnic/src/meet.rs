//! The handshake of two processes of one host, after they have made a TCP connection (docs/spec/local.md).
//!
//! ```text
//!  initiator                                          responder
//!  TCP connect ─────────────────────────────────────► accepts
//!  Unix connect, Hello (cell) ──────────────────────► has that TCP connection? same user?
//!  same user?  ◄─────────────────────── Welcome (cell, proof) or Decline
//!  Join (proof, segment, liveness, domain) ────────────►
//!  MPA request on TCP ──────────────────────────────► the program accepts
//!              ◄──────────── Attach (liveness, domain) or Decline, then the MPA reply on TCP
//! ```
//!
//! If any step fails, the connection stays on TCP. The Attach is the only message that moves it, and it arrives before the reply for which
//! the initiator waits anyway.
//!
//! A process gets descriptors only after the kernel has attested its user, in a message that this process has just sent. It proves further
//! rights over our process by using them: it reads a secret in our memory ([`ChallengeCell`]).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_mem::Peer;
use weft_ring::{End, Role, Segment};
use weft_sys::unix::{self, Cred, Sender};
use weft_wire::crc::crc32c;
use weft_wire::local::{self, MAX_LEN, Message, Secret, SideInfo};

use crate::device::{DeviceInner, PdInner};
use crate::engine::Registration;
use crate::names::Names;
use crate::neighbours::{ChallengeCell, Neighbour, PeerProcess, Why, admitted, why};
use crate::transport::ByteStream;
use crate::transport::local::{Joint, LocalLink, RING_BYTES};
use crate::types::LocalMode;

/// How long an initiator waits for a Welcome before it continues over TCP.
const SHM_TIMEOUT: Duration = Duration::from_millis(500);
/// The same where it would not go on over TCP.
const SHM_TIMEOUT_REQUIRED: Duration = Duration::from_secs(5);
const HUNG_UP: &str = "the peer hung up";
/// The kernel does not say which; the first is what happens between peers that keep to the rules.
const TRUNCATED: &str =
    "a message came without all of its descriptors (too many open files), or was too long";
/// Descriptors of an Attach: liveness, table and up to three arenas; a Join has the segment before them.
const PARTY_FDS: usize = 5;

/// The descriptors that this side offers.
struct LocalOffer {
    party: SideInfo,
    domain: Arc<weft_mem::Domain>,
}

fn offer(pd: &PdInner, qp: u32, trusted: bool) -> Result<LocalOffer, Why> {
    let device = &pd.device;
    let domain = device
        .table
        .domain(pd.id)
        .map_err(why("cannot make shared memory"))?;
    // Marked invalid when its last user drops it.
    let _ = pd.domain.set(Arc::clone(&domain));
    Ok(LocalOffer {
        party: SideInfo {
            qp,
            trusted,
            domain: domain.id(),
        },
        domain,
    })
}

fn bytes(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(MAX_LEN);
    message.emit(&mut bytes);
    bytes
}

/// Send a message with the segment, if any, the liveness and the domain.
fn send(
    wire: BorrowedFd<'_>,
    device: &DeviceInner,
    message: &Message,
    segment: Option<BorrowedFd<'_>>,
    offer: &LocalOffer,
) -> Result<(), Why> {
    let liveness = device
        .engine
        .liveness()
        .ok_or("no memory for the sign of life")?;
    let mut fds: Vec<BorrowedFd<'_>> = segment.into_iter().collect();
    fds.push(liveness);
    fds.extend(offer.domain.fds(offer.party.trusted));
    say_signed(wire, message, &fds)
}

pub(crate) fn say_signed(
    wire: BorrowedFd<'_>,
    message: &Message,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Why> {
    unix::send_signed(wire, &bytes(message), fds).map_err(why("the peer does not listen"))
}

fn say(wire: BorrowedFd<'_>, message: &Message) {
    // A peer that has closed needs no answer.
    let _ = unix::send_with_fds(wire, &bytes(message), &[]);
}

/// A message, its descriptors, and its sender.
pub(crate) type Heard = (Message, Vec<OwnedFd>, Option<Sender>);

/// `Ok(None)`: nothing has come yet.
pub(crate) fn receive(wire: &OwnedFd) -> Result<Option<Heard>, Why> {
    let mut buf = [0; MAX_LEN];
    let packet = match unix::recv(wire, &mut buf, PARTY_FDS + 1) {
        // The peer has closed with unread data, and the kernel reports that before the peer's message.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            unix::recv(wire, &mut buf, PARTY_FDS + 1)
        }
        packet => packet,
    };
    match packet {
        Ok(Some(packet)) => match Message::parse(&buf[..packet.len]) {
            Some(message) => Ok(Some((message, packet.fds, packet.sender))),
            None => Err("the peer speaks another version".into()),
        },
        Ok(None) => Err(HUNG_UP.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(TRUNCATED.into()),
        Err(error) => Err(format!("the peer's answer: {error}")),
    }
}

/// The descriptors that the other side offers, opened.
struct PeerOffer {
    peer: Arc<Peer>,
    neighbour: Option<Arc<Neighbour>>,
    qp: u32,
    process: bool,
}

impl PeerOffer {
    /// `process`: each side can trace the other, and the peer's number leads to the peer.
    fn open(
        device: &DeviceInner,
        who: &PeerProcess,
        party: &SideInfo,
        process: bool,
        fds: Vec<OwnedFd>,
    ) -> Result<PeerOffer, Why> {
        let neighbours = &device.neighbours;
        let peer = neighbours.domain(who, party, process, fds);
        let neighbour = match (who.number(), &who.pidfd) {
            (Some(number), Some(pidfd)) if who.pid != Some(std::process::id()) => {
                let known = neighbours.neighbour(&device.engine, number, pidfd.as_fd());
                Some(known.map_err(why("watching the peer's process"))?)
            }
            _ => None,
        };
        Ok(PeerOffer {
            peer: peer.map_err(why("the peer's memory"))?,
            neighbour,
            qp: party.qp,
            process,
        })
    }

    /// Everything is there: make the link.
    fn join(
        self,
        end: End,
        wire: OwnedFd,
        ours: &LocalOffer,
        tcp: Arc<dyn ByteStream>,
    ) -> Arc<LocalLink> {
        let joint = Joint {
            end: Arc::new(end),
            peer: self.peer,
            wire,
            addrs: [tcp.local_addr(), tcp.peer_addr()],
            tls: tcp.tls().cloned(),
            tcp: Mutex::new(Some(tcp)),
            own_qp: ours.party.qp,
            peer_qp: self.qp,
            process: self.process,
            trusted: ours.party.trusted,
        };
        let link = LocalLink::new(joint, self.neighbour);
        let reader: Arc<dyn weft_mem::Reader> = Arc::clone(&link) as _;
        ours.domain.add_reader(Arc::downgrade(&reader));
        link
    }
}

/// The initiator's side of the handshake.
pub(crate) struct ShmConnecting {
    wire: OwnedFd,
    maker: Cred,
    cell: ChallengeCell,
    challenge: Secret,
    segment: (Segment, OwnedFd),
    offer: LocalOffer,
    /// Set by the Welcome.
    welcomed: Option<(PeerProcess, bool)>,
    pub(crate) deadline: Instant,
    /// The engine watches for the answer.
    pub(crate) registration: Option<Registration>,
}

/// The responder's answer.
pub(crate) enum Answer {
    Wait,
    Welcome,
    No(Why),
}

impl ShmConnecting {
    /// Sends a Hello to the Unix socket of the listener at `tcp`'s peer.
    pub(crate) fn start(
        device: &DeviceInner,
        pd: &PdInner,
        qp: u32,
        tcp: &dyn ByteStream,
    ) -> Result<ShmConnecting, Why> {
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
                _ => format!("the peer's socket for shared memory: {error}"),
            })?;
        let maker = admitted(&wire)?;
        let (cell, challenge) = ChallengeCell::new()?;
        let hello = Message::Hello {
            cell: cell.announce(challenge),
            seal: crc32c(&cell.secret()),
            from,
        };
        say_signed(wire.as_fd(), &hello, &[])?;
        // Not before: a socket that asks gets a name of its own when it sends.
        unix::ask_for_senders(&wire, true).map_err(why("asking who is there"))?;
        let patience = if device.local == LocalMode::Require {
            SHM_TIMEOUT_REQUIRED
        } else {
            SHM_TIMEOUT
        };
        // While the responder is at it.
        Ok(ShmConnecting {
            segment: Segment::create(RING_BYTES).map_err(why("a segment"))?,
            offer: offer(pd, qp, false)?,
            wire,
            maker,
            cell,
            challenge,
            welcomed: None,
            deadline: Instant::now() + patience,
            registration: None,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }

    pub(crate) fn answer(&mut self, device: &DeviceInner) -> Answer {
        let joined = match receive(&self.wire) {
            Ok(None) => return Answer::Wait,
            Ok(Some((Message::Welcome { cell, proof }, _, sender))) => {
                self.join(device, cell, proof, sender)
            }
            Ok(Some((Message::Decline(reason), ..))) => return Answer::No(reason),
            Ok(Some(_)) => Err("the peer's answer makes no sense".into()),
            Err(error) => Err(error),
        };
        match joined {
            Ok(()) => Answer::Welcome,
            Err(reason) => {
                say(self.wire.as_fd(), &Message::Decline(reason.clone()));
                Answer::No(reason)
            }
        }
    }

    fn join(
        &mut self,
        device: &DeviceInner,
        theirs: local::ChallengeCell,
        proof: Secret,
        sender: Option<Sender>,
    ) -> Result<(), Why> {
        let who = PeerProcess::sent(&self.maker, sender)?;
        unix::ask_for_senders(&self.wire, false).map_err(why("asking who is there"))?;
        let traces = proof == self.cell.secret();
        who.is_one_of_us(traces)?;
        self.cell.show(&theirs.challenge);
        // Another process gets no information.
        let found = who.look(theirs.addr);
        let found = found.filter(|(shown, _)| *shown == self.challenge);
        self.offer.party.trusted = traces;
        let join = Message::Join {
            party: self.offer.party,
            proof: found.map_or([0; 16], |(_, secret)| secret),
        };
        let segment = Some(self.segment.1.as_fd());
        send(self.wire.as_fd(), device, &join, segment, &self.offer)?;
        self.welcomed = Some((who, traces && found.is_some()));
        Ok(())
    }

    /// The responder has replied. Moves to shared memory if the responder has sent an Attach before. In that case it has moved already, so
    /// a failure here ends the connection.
    pub(crate) fn finish(
        self,
        device: &DeviceInner,
        tcp: Arc<dyn ByteStream>,
    ) -> Result<Result<Arc<LocalLink>, Why>, io::Error> {
        let Some((who, process)) = self.welcomed else {
            return Ok(Err("the peer has not welcomed us".into()));
        };
        let (party, fds) = match receive(&self.wire) {
            Ok(Some((Message::Attach(party), fds, _))) => (party, fds),
            Ok(Some((Message::Decline(reason), ..))) => return Ok(Err(reason)),
            Ok(_) => return Ok(Err("the peer did not come along".into())),
            // Without an Attach the connection has not moved.
            Err(reason) if reason == HUNG_UP => return Ok(Err(reason)),
            Err(reason) => return Err(half_way(&reason)),
        };
        let theirs = PeerOffer::open(device, &who, &party, process, fds);
        let theirs = theirs.map_err(|reason| half_way(&reason))?;
        let end = End::new(Arc::new(self.segment.0), Role::Initiator);
        Ok(Ok(theirs.join(end, self.wire, &self.offer, tcp)))
    }
}

fn half_way(reason: &str) -> io::Error {
    io::Error::other(format!(
        "meeting the peer in shared memory failed half-way: {reason}"
    ))
}

/// Whether a connection between these addresses stays on this host, as far as the addresses show.
pub(crate) fn same_host(ours: IpAddr, theirs: IpAddr) -> bool {
    let (ours, theirs) = (ours.to_canonical(), theirs.to_canonical());
    ours == theirs || theirs.is_loopback()
}

/// A connection from an initiator that has not sent anything yet.
pub(crate) struct ShmAccepted {
    wire: OwnedFd,
    maker: Cred,
}

impl ShmAccepted {
    /// `None`: refused.
    pub(crate) fn admit(wire: OwnedFd) -> Option<ShmAccepted> {
        match admitted(&wire) {
            Ok(maker) => Some(ShmAccepted { wire, maker }),
            Err(reason) => {
                say(wire.as_fd(), &Message::Decline(reason));
                None
            }
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }

    /// Its Hello and its TCP address. `Ok(None)`: nothing yet.
    pub(crate) fn hello(&self) -> Result<Option<(Hello, SocketAddr)>, Why> {
        let Some((message, _, sender)) = receive(&self.wire)? else {
            return Ok(None);
        };
        let Message::Hello { cell, seal, from } = message else {
            return Err("not a hello".into());
        };
        let who = PeerProcess::sent(&self.maker, sender)?;
        Ok(Some((Hello { who, cell, seal }, from)))
    }

    /// Ask it in.
    pub(crate) fn welcome(self, hello: Hello) -> Result<ShmPeer, Why> {
        let Hello {
            who,
            cell: theirs,
            seal,
        } = hello;
        let (cell, challenge) = ChallengeCell::new()?;
        cell.show(&theirs.challenge);
        // Another process gets no information.
        let found = who.look(theirs.addr).map(|(_, secret)| secret);
        let found = found.filter(|secret| crc32c(secret) == seal);
        let welcome = Message::Welcome {
            cell: cell.announce(challenge),
            proof: found.unwrap_or_default(),
        };
        say_signed(self.wire.as_fd(), &welcome, &[])?;
        Ok(ShmPeer {
            is_kin: who.is_kin(),
            wire: self.wire,
            maker: self.maker,
            cell,
            challenge,
            theirs: theirs.addr,
        })
    }

    pub(crate) fn decline(self, reason: Why) {
        say(self.wire.as_fd(), &Message::Decline(reason));
    }
}

/// The Hello of an initiator.
pub(crate) struct Hello {
    who: PeerProcess,
    cell: local::ChallengeCell,
    seal: u32,
}

/// An initiator that was welcomed, on the responder's side.
pub(crate) struct ShmPeer {
    wire: OwnedFd,
    maker: Cred,
    cell: ChallengeCell,
    challenge: Secret,
    /// The address of its cell.
    theirs: u64,
    /// It is in our user namespace, and may take the place of another one.
    pub(crate) is_kin: bool,
}

impl ShmPeer {
    /// The program accepts on a queue pair: moves the peer to shared memory, or sends it a Decline.
    pub(crate) fn accept(
        self,
        device: &DeviceInner,
        pd: &PdInner,
        qp: u32,
        tcp: Arc<dyn ByteStream>,
    ) -> Result<Arc<LocalLink>, Why> {
        let (theirs, end, offer) = match self.meet(device, pd, qp) {
            Ok(all) => all,
            Err(reason) => {
                say(self.wire.as_fd(), &Message::Decline(reason.clone()));
                return Err(reason);
            }
        };
        let link = theirs.join(end, self.wire, &offer, tcp);
        let attach = Message::Attach(offer.party);
        if let Err(reason) = send(link.fd(), device, &attach, None, &offer) {
            say(link.fd(), &Message::Decline(reason.clone()));
            return Err(reason);
        }
        Ok(link)
    }

    fn meet(
        &self,
        device: &DeviceInner,
        pd: &PdInner,
        qp: u32,
    ) -> Result<(PeerOffer, End, LocalOffer), Why> {
        let (party, proof, mut fds, sender) = match receive(&self.wire)? {
            Some((Message::Join { party, proof }, fds, sender)) => (party, proof, fds, sender),
            Some((Message::Decline(reason), ..)) => return Err(reason),
            _ => return Err("the peer did not come along".into()),
        };
        // It may have waited for the program long since.
        let who = PeerProcess::sent(&self.maker, sender)?;
        unix::ask_for_senders(&self.wire, false).map_err(why("asking who is there"))?;
        let traces = proof == self.cell.secret();
        who.is_one_of_us(traces)?;
        let shown = || who.look(self.theirs).map(|(shown, _)| shown);
        let process = traces && shown() == Some(self.challenge);
        if fds.is_empty() {
            return Err("no segment came".into());
        }
        let segment = Segment::open(fds.remove(0));
        let segment = segment.map_err(|error| format!("the segment: {error}"))?;
        let theirs = PeerOffer::open(device, &who, &party, process, fds)?;
        let end = End::new(Arc::new(segment), Role::Responder);
        Ok((theirs, end, offer(pd, qp, traces)?))
    }
}
