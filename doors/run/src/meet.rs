//! The rendezvous of the two ends of a TCP connection.
//!
//! The rendezvous adds nothing to the TCP stream, and no call waits. The end with the larger address listens on an abstract Unix socket whose name is
//! the connection's two addresses; the other one dials it, is let in, and sends an [offer](offer()) with the shared segment. From then on the wire is the
//! bell: each process has its own end, and nobody else has it. Abstract names belong to a network namespace, as the connection does. Any process can take a
//! name. So the dialler asks the kernel which process listens (`SO_PEERCRED`) and which user has the connection's other end (`NETLINK_SOCK_DIAG`), the listener
//! asks the same of the dialler and of the sender of the offer (`SCM_CREDENTIALS`), and each checks the other socket's number (`SO_COOKIE`), which excludes an
//! earlier connection of the same addresses. All that the kernel names have to be one user, which is one of [`Peers`].
//!
//! To close a descriptor can take any time (`SO_LINGER`, a file of FUSE). So nobody's messages bring descriptors but those of a dialler that was let in
//! (`SO_PASSRIGHTS`, Linux 6.16). One that has sent others than a sealed memory file is [kept](Wire) with them until the process ends. Where the file is one
//! of FUSE, the end of the process waits for it.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use weft_ring::Role;
use weft_sys::unix::{self, Kind, Name};
use weft_sys::{diag, process, tcp};

use crate::peers::{Peers, User};
pub use crate::wire::{Hidden, Wire};
use crate::wire::{LET_IN, strangers};

const MAGIC: [u8; 8] = *b"weftrun1";
const OFFER: usize = 8 + 8 + 8;

/// Why two ends do not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Why {
    /// No reason.
    None = 0,
    /// Too short a connection to look for its peer.
    Short = 1,
    /// The peer's address is not of this host and namespace, or is this socket itself.
    Elsewhere = 2,
    /// The peer runs without weft: it has not looked for us, however often we looked for it.
    NoPeer = 3,
    /// The peer belongs to another user.
    OtherUser = 4,
    /// The message from the peer's name was not from the connection's other end.
    Impostor = 5,
    /// A system call failed.
    System = 6,
    /// The process uses `io_uring`, whose requests are not seen.
    IoUring = 7,
    /// A standard I/O stream was opened on the socket.
    Stdio = 8,
    /// The socket was handed to another process.
    Passed = 9,
    /// Another program was executed with the socket.
    Exec = 10,
    /// Urgent data.
    Urgent = 11,
    /// A socket option that only the kernel's TCP has.
    Option = 12,
    /// Several processes have used the socket since a fork.
    Forked = 13,
    /// An epoll set that cannot be moved: one-shot for both directions, inherited or duplicated.
    Epoll = 14,
    /// The peer went back to TCP.
    Peer = 15,
    /// The peer did not read for a while and the ring was full.
    SlowReader = 16,
    /// `shutdown` for reading.
    ShutRead = 17,
    /// splice.
    Splice = 18,
    /// The peer broke the rules of the shared ring.
    Broken = 19,
    /// Too many descriptors.
    Descriptors = 20,
    /// No broker of this user runs, which could reach the peer's host.
    NoBroker = 21,
    /// Nothing of weft answers on the peer's host.
    PlainHost = 22,
    /// The two hosts could not agree that they mean the same connection.
    NotConfirmed = 23,
    /// The connection between the hosts broke while bytes were on it.
    SideLost = 24,
    /// Memory that the peer had offered could not be read.
    SourceLost = 25,
    /// The kernel's counts of the TCP connection are not ours: a call that is not seen has moved bytes.
    Unseen = 26,
    /// Bytes that were not read yet could not go back to TCP for the next reader.
    Unread = 27,
    /// The process limits its own system calls.
    Sandbox = 28,
    /// The peer has not looked for us yet.
    NotYet = 29,
    /// A fork into another PID namespace: the locks that both processes would share name their holders by PID.
    PidNamespace = 30,
    /// A user that we do not meet has taken the name by which the two ends meet.
    NameTaken = 31,
    /// The peer's user has as many connections as another user gets.
    TooMany = 32,
}

impl Why {
    /// Converts a number of a ledger.
    pub fn of(number: u32) -> Why {
        const ALL: [Why; 33] = [
            Why::None,
            Why::Short,
            Why::Elsewhere,
            Why::NoPeer,
            Why::OtherUser,
            Why::Impostor,
            Why::System,
            Why::IoUring,
            Why::Stdio,
            Why::Passed,
            Why::Exec,
            Why::Urgent,
            Why::Option,
            Why::Forked,
            Why::Epoll,
            Why::Peer,
            Why::SlowReader,
            Why::ShutRead,
            Why::Splice,
            Why::Broken,
            Why::Descriptors,
            Why::NoBroker,
            Why::PlainHost,
            Why::NotConfirmed,
            Why::SideLost,
            Why::SourceLost,
            Why::Unseen,
            Why::Unread,
            Why::Sandbox,
            Why::NotYet,
            Why::PidNamespace,
            Why::NameTaken,
            Why::TooMany,
        ];
        ALL.get(number as usize).copied().unwrap_or(Why::None)
    }

    /// In words; empty for none.
    pub fn text(self) -> &'static str {
        match self {
            Why::None => "",
            Why::Short => "the connection has been too short so far to look for its peer",
            Why::Elsewhere => {
                "the peer is not on this host and network namespace (`weft run --hosts` goes further)"
            }
            Why::NoPeer => "the peer runs without `weft run`: start it with it too",
            Why::NotYet => {
                "the peer has not looked for us: it has made few calls so far, or runs without `weft run`"
            }
            Why::OtherUser => {
                "the peer belongs to another user: name each other's user with --with, or run both as one"
            }
            Why::Impostor => "what answered in the peer's place is not the connection's other end",
            Why::System => "a system call that is needed to meet the peer failed",
            Why::IoUring => {
                "the process uses io_uring, whose requests are not seen: let it use epoll"
            }
            Why::Stdio => "a standard I/O stream was opened on the socket",
            Why::Passed => "the socket was handed to another process",
            Why::Exec => "another program was started with the socket",
            Why::Urgent => "urgent data was sent",
            Why::Option => "a socket option was set that only the kernel's TCP has",
            Why::Forked => "several processes share the socket since a fork",
            Why::Epoll => {
                "the socket is in an epoll set that cannot be moved (one-shot for both directions, inherited or duplicated)"
            }
            Why::Peer => "the peer went back to TCP",
            Why::SlowReader => "the peer did not read for a while",
            Why::ShutRead => "the socket was shut down for reading",
            Why::Splice => "splice was called",
            Why::Broken => "the peer broke the rules of the shared ring",
            Why::Descriptors => "there are too many open descriptors",
            Why::NoBroker => {
                "no broker runs here that reaches other hosts (`weft run --hosts` starts one)"
            }
            Why::PlainHost => {
                "no broker of weft answers on the peer's host, or it does not let us in"
            }
            Why::NotConfirmed => {
                "the peer runs without `weft run --hosts`, or what both ends know of the connection differs"
            }
            Why::SideLost => "the connection between the hosts broke",
            Why::SourceLost => {
                "memory that the peer had offered could not be read: it was killed, or has given it away"
            }
            Why::Unseen => "bytes were moved by a call that weft does not see",
            Why::Sandbox => "the process limits its own system calls (seccomp)",
            Why::PidNamespace => "a process in another PID namespace has got the socket by a fork",
            Why::NameTaken => "another user has taken the name by which the two ends would meet",
            Why::TooMany => "the peer's user has as many connections as another user gets",
            Why::Unread => {
                "unread bytes could not go back to TCP for the program that gets the socket"
            }
        }
    }
}

/// The two ends of a connection, from the view of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Our address, as IPv4 also for an IPv6 socket.
    pub own: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

impl Ends {
    /// Returns the ends of a connected socket.
    ///
    /// # Errors
    /// `NotConnected`, and `InvalidInput` for a socket that is connected to itself.
    pub fn of(fd: impl AsFd) -> io::Result<Ends> {
        let ends = Ends {
            own: canonical(tcp::local_addr(&fd)?),
            peer: canonical(tcp::peer_addr(&fd)?),
        };
        if ends.own == ends.peer {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(ends)
    }

    /// Returns true if both are addresses that one host can have: a connection to another host has two different ones, and neither is a
    /// loopback address. A host that talks to itself by one of its own addresses has the same one twice.
    pub fn may_be_local(&self) -> bool {
        let (own, peer) = (self.own.ip(), self.peer.ip());
        own == peer || own.is_loopback() || peer.is_loopback()
    }

    /// Returns the role of this end: the smaller address dials and makes the segment.
    pub fn role(&self) -> Role {
        if self.own < self.peer {
            Role::Initiator
        } else {
            Role::Responder
        }
    }

    /// The name that the responder listens on.
    fn name(&self) -> Vec<u8> {
        let (low, high) = if self.own < self.peer {
            (self.own, self.peer)
        } else {
            (self.peer, self.own)
        };
        let mut name = String::with_capacity(96);
        let _ = write!(name, "weft-run/1/{low}/{high}");
        name.into_bytes()
    }
}

/// Makes the responder's listening socket.
///
/// # Errors
/// [`Why::NameTaken`], which can end; [`Why::System`].
pub fn listen(ends: &Ends) -> Result<OwnedFd, Why> {
    let listener = unix::listen_for_strangers(Name::Abstract(&ends.name()), Kind::Stream, BACKLOG);
    listener.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => Why::NameTaken,
        _ => Why::System,
    })
}

/// Diallers that wait at a responder: more than one if processes that are not the peer dial its name.
const BACKLOG: u32 = 4;

/// A connection to the responder's socket.
#[derive(Clone, Copy, Debug)]
pub struct Dialled<W> {
    /// The wire, which becomes our end of the bell.
    pub wire: W,
    /// The user behind it, by number.
    uid: u32,
    user: User,
    /// Our own user when it was dialled.
    own: u32,
}

impl<W> Dialled<W> {
    /// The same with the wire in another form.
    pub fn map<V>(self, to: impl FnOnce(W) -> Option<V>) -> Option<Dialled<V>> {
        Some(Dialled {
            wire: to(self.wire)?,
            uid: self.uid,
            user: self.user,
            own: self.own,
        })
    }

    /// Whether we are the user still that has dialled: the responder takes an offer of that user only.
    pub fn is_current(&self) -> bool {
        self.own == process::uid()
    }

    /// What the responder is to us, if it is of the user that has the connection's other end.
    pub fn agree(&self, peer: &Peer) -> Result<User, Why> {
        let owner = peer.user.ok_or(Why::OtherUser)?;
        // Somebody else has the name.
        if peer.uid != self.uid {
            return Err(Why::NameTaken);
        }
        Ok(owner.and(self.user))
    }
}

/// Dials the responder. `None` when nobody listens.
pub fn dial(ends: &Ends, peers: &Peers) -> Result<Option<Dialled<OwnedFd>>, Why> {
    let own = process::uid();
    let wire = match unix::connect_to_stranger(Name::Abstract(&ends.name()), Kind::Stream) {
        Ok(wire) => wire,
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
        // A full queue: at a peer nobody waits but us, so it is another's name, or others dial it.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(Why::NameTaken),
        Err(_) => return Err(Why::System),
    };
    let (uid, user) = behind(&wire, peers)?;
    let user = user.ok_or(Why::NameTaken)?;
    Ok(Some(Dialled {
        wire,
        uid,
        user,
        own,
    }))
}

/// Whether the responder lets us make our offer; `None`: not yet.
pub fn is_let_in(wire: impl AsFd) -> Option<bool> {
    let mut byte = [0];
    // By this call no descriptor comes.
    match rustix::net::recv(wire, &mut byte, RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN) => None,
        Ok((1, _)) => Some(byte == [LET_IN]),
        _ => Some(false),
    }
}

/// The user whose process has made the other end of a wire: its number, and what it is to us. `None`: we do not meet it.
pub(crate) fn behind(wire: impl AsFd, peers: &Peers) -> Result<(u32, Option<User>), Why> {
    let cred = unix::peer_cred(&wire).map_err(|_| Why::System)?;
    let process = unix::peer_process(&wire);
    Ok((cred.uid, judge(peers, cred, process)))
}

fn judge(peers: &Peers, cred: unix::Cred, process: io::Result<OwnedFd>) -> Option<User> {
    let process = match process {
        // Before Linux 6.5. Later a process without a descriptor has ended, and its number may be another's.
        Err(e) if e.raw_os_error() == Some(Errno::NOPROTOOPT.raw_os_error()) => {
            cred.pid.and_then(|pid| process::pidfd_open(pid).ok())
        }
        process => process.ok(),
    };
    peers.judge_process(cred.uid, process.as_ref().map(AsFd::as_fd))
}

pub(crate) fn same_user(wire: impl AsFd) -> Result<(), Why> {
    let cred = unix::peer_cred(wire).map_err(|_| Why::System)?;
    if cred.is_same_user() {
        Ok(())
    } else {
        Err(Why::OtherUser)
    }
}

/// The connection's other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its socket's number.
    pub cookie: u64,
    /// Its user's number.
    pub uid: u32,
    /// What that user is to us; `None`: it is not met.
    pub user: Option<User>,
}

/// Asks the kernel for the connection's other end. `None` if no process has it open yet.
pub fn peer(fd: impl AsFd, peers: &Peers) -> Result<Option<Peer>, Why> {
    let peer = diag::tcp_peer(fd).map_err(|_| Why::System)?;
    Ok(peer.map(|diag::TcpPeer { uid, cookie }| Peer {
        cookie,
        uid,
        user: peers.judge(uid),
    }))
}

fn own_cookie(fd: impl AsFd) -> Result<u64, Why> {
    rustix::net::sockopt::socket_cookie(fd).map_err(|_| Why::System)
}

/// The process behind the meeting's socket, as this one numbers it; 0: it is in a place whose processes we do not see.
pub fn peer_process(wire: impl AsFd) -> u32 {
    unix::peer_cred(wire)
        .ok()
        .and_then(|cred| cred.pid)
        .unwrap_or(0)
}

/// Sends the dialler's message: its own cookie and the peer's, with the segment.
pub fn offer(
    wire: impl AsFd,
    own: impl AsFd,
    peer_cookie: u64,
    segment: BorrowedFd<'_>,
) -> Result<(), Why> {
    let mut bytes = [0; OFFER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&own_cookie(own)?.to_ne_bytes());
    bytes[16..].copy_from_slice(&peer_cookie.to_ne_bytes());
    unix::send_signed(wire, &bytes, &[segment]).map_err(|_| Why::System)
}

/// An offer to the responder.
#[derive(Debug)]
pub struct Offer {
    /// The file of the segment.
    pub segment: OwnedFd,
    /// The responder's end of the bell.
    pub bell: OwnedFd,
    /// The initiator's process, see [`peer_process`].
    pub process: u32,
    /// Its user.
    pub user: User,
}

/// Diallers that have come to the responder's socket and not sent an offer yet, the oldest first.
pub type Pending<W> = Vec<Wire<W>>;

/// Most of them. A dialler that has come later takes the place of the oldest.
const MOST_PENDING: usize = 4;

/// Checks the offers of diallers that have come to the responder's socket. `fd` is the responder's TCP socket. A dialler that is not of the user of the
/// connection's other end costs nothing but its `accept`. One of our own user that is not the peer ends the search; one of another user does not.
pub fn take<W: Hidden>(
    listener: impl AsFd,
    pending: &mut Pending<W>,
    fd: impl AsFd,
    peers: &Peers,
) -> Result<Option<Offer>, Why> {
    let mut peer = None;
    for _ in 0..2 * BACKLOG {
        let Some(wire) = unix::accept(&listener).map_err(|_| Why::System)? else {
            break;
        };
        let wire = W::hide(wire).ok_or(Why::Descriptors)?;
        let (uid, user) = behind(&wire, peers)?;
        // None: it has closed the connection meanwhile.
        let Some(owner) = learn(&mut peer, &fd, peers)? else {
            return Ok(None);
        };
        let Some(user) = user.filter(|_| uid == owner.uid && owner.user.is_some()) else {
            continue;
        };
        if user != User::Own && strangers::is_barred(uid) {
            // Another process of our user may be the peer.
            if owner.user == Some(User::Own) {
                continue;
            }
            return Err(Why::Broken);
        }
        if pending.len() == MOST_PENDING {
            pending.remove(0);
        }
        pending.extend(Wire::let_in(wire, uid, user));
    }
    for wire in std::mem::take(pending) {
        match hear(&wire, &fd, peers) {
            Ok(Heard::Offer(segment, process, user)) => {
                let bell = wire.into_bell().ok_or(Why::Impostor)?;
                return Ok(Some(Offer {
                    segment,
                    bell,
                    process,
                    user,
                }));
            }
            Ok(Heard::Nothing) => pending.push(wire),
            // It has ended, or could not make its offer this time.
            Ok(Heard::End) => {}
            Err(Why::Impostor) if wire.user() != User::Own => {}
            Err(why) => return Err(why),
        }
    }
    Ok(None)
}

/// The connection's other end, asked for once.
fn learn(known: &mut Option<Peer>, fd: impl AsFd, peers: &Peers) -> Result<Option<Peer>, Why> {
    if known.is_none() {
        *known = peer(fd, peers)?;
    }
    Ok(*known)
}

enum Heard {
    Nothing,
    End,
    Offer(OwnedFd, u32, User),
}

/// Takes the offer of one dialler, and checks it.
fn hear<W: Hidden>(wire: &Wire<W>, fd: impl AsFd, peers: &Peers) -> Result<Heard, Why> {
    let mut bytes = [0; OFFER];
    let packet = match wire.receive(&mut bytes) {
        Ok(Some(packet)) => packet,
        Ok(None) => return Ok(Heard::End),
        Err(e) => {
            return match e.kind() {
                io::ErrorKind::WouldBlock => Ok(Heard::Nothing),
                io::ErrorKind::InvalidData => Err(Why::Impostor),
                io::ErrorKind::ConnectionReset => Ok(Heard::End),
                _ => Err(Why::System),
            };
        }
    };
    let theirs = u64::from_ne_bytes(std::array::from_fn(|i| bytes[8 + i]));
    let ours = u64::from_ne_bytes(std::array::from_fn(|i| bytes[16 + i]));
    if packet.len != OFFER || bytes[..8] != MAGIC || ours != own_cookie(&fd)? {
        return Err(Why::Impostor);
    }
    // None: it has closed the connection meanwhile.
    let peer = peer(&fd, peers)?.ok_or(Why::Short)?;
    let owner = peer.user.ok_or(Why::OtherUser)?;
    let sender = packet.sender.ok_or(Why::Impostor)?;
    if peer.cookie != theirs || [peer.uid, sender.cred.uid] != [wire.uid(); 2] {
        return Err(Why::Impostor);
    }
    let process = sender.pidfd.ok_or_else(|| wire.no_process());
    let signed = judge(peers, sender.cred, process).ok_or(Why::Impostor)?;
    let [segment] = <[OwnedFd; 1]>::try_from(packet.fds).map_err(|_| Why::Impostor)?;
    Ok(Heard::Offer(
        segment,
        sender.cred.pid.unwrap_or(0),
        owner.and(wire.user()).and(signed),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use weft_ring::stream::Stream;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        // The initiator first.
        if Ends::of(&dialled).unwrap().role() == Role::Initiator {
            (dialled, accepted)
        } else {
            (accepted, dialled)
        }
    }

    /// Offers as the peer does, and lets the responder look: once to let it in, and once for the offer.
    fn offered(
        [a, b, own]: [&TcpStream; 3],
        listener: &OwnedFd,
        cookie: u64,
        segment: &OwnedFd,
    ) -> Result<Option<Offer>, Why> {
        let mut pending = Pending::<OwnedFd>::new();
        let peers = Peers::default();
        let dialled = dial(&Ends::of(a).unwrap(), &peers).unwrap().unwrap();
        assert_eq!(is_let_in(&dialled.wire), None);
        assert!(take(listener, &mut pending, b, &peers)?.is_none());
        assert_eq!(is_let_in(&dialled.wire), Some(true));
        offer(&dialled.wire, own, cookie, segment.as_fd()).unwrap();
        take(listener, &mut pending, b, &peers)
    }

    fn cookie_of_peer(a: &TcpStream) -> u64 {
        peer(a, &Peers::default()).unwrap().unwrap().cookie
    }

    #[test]
    fn the_two_ends_of_a_connection_meet() {
        let (a, b) = pair();
        let (ends_a, ends_b) = (Ends::of(&a).unwrap(), Ends::of(&b).unwrap());
        assert_eq!(ends_a.role().peer(), ends_b.role());
        assert!(dial(&ends_a, &Peers::default()).unwrap().is_none());
        let listener = listen(&ends_b).unwrap();
        let none = take(
            &listener,
            &mut Pending::<OwnedFd>::new(),
            &b,
            &Peers::default(),
        );
        assert!(none.unwrap().is_none());
        let (_segment, fd) = Stream::create(1 << 16).unwrap();
        let got = offered([&a, &b, &a], &listener, cookie_of_peer(&a), &fd);
        let got = got.unwrap().unwrap();
        assert!(Stream::open(got.segment).is_ok());
        assert_eq!(got.user, User::Own);
        assert_eq!(got.process, std::process::id());
    }

    #[test]
    fn an_offer_of_another_connection_is_refused() {
        let (a, b) = pair();
        let (other, _rest) = pair();
        let listener = listen(&Ends::of(&b).unwrap()).unwrap();
        let (_segment, fd) = Stream::create(1 << 16).unwrap();
        let (bell, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let (cookie, bell) = (cookie_of_peer(&a), bell.into());
        // The last one has something that is no memory file.
        for (own, cookie, segment) in [
            (&other, cookie, &fd),
            (&a, cookie + 1, &fd),
            (&a, cookie, &bell),
        ] {
            let got = offered([&a, &b, own], &listener, cookie, segment);
            assert_eq!(got.err(), Some(Why::Impostor));
        }
    }

    #[test]
    fn a_peer_that_ends_while_meeting_is_no_impostor() {
        let (a, b) = pair();
        let (ends, peers) = (Ends::of(&a).unwrap(), Peers::default());
        let listener = listen(&Ends::of(&b).unwrap()).unwrap();
        let mut pending = Pending::<OwnedFd>::new();
        let mut look = || take(&listener, &mut pending, &b, &peers);
        drop(dial(&ends, &peers).unwrap().unwrap());
        for _ in 0..2 {
            let taken = look();
            assert!(matches!(taken, Ok(None)), "it may dial again: {taken:?}");
        }
        let wire = dial(&ends, &peers).unwrap().unwrap().wire;
        assert!(look().unwrap().is_none());
        let (_segment, fd) = Stream::create(1 << 16).unwrap();
        offer(&wire, &a, cookie_of_peer(&a), fd.as_fd()).unwrap();
        drop(a);
        assert_eq!(look().err(), Some(Why::Short));
    }

    #[test]
    fn a_dialler_that_was_not_let_in_sends_no_descriptors() {
        let (a, b) = pair();
        let (reader, _writer) = std::io::pipe().unwrap();
        let (ends, peers) = (Ends::of(&a).unwrap(), Peers::default());
        let listener = listen(&Ends::of(&b).unwrap()).unwrap();
        let wire = dial(&ends, &peers).unwrap().unwrap().wire;
        if !unix::take_rights(&listener, false) {
            return;
        }
        assert_eq!(sends(&wire, &reader), Err(rustix::io::Errno::PERM));
        let accepted = unix::accept(&listener).unwrap().unwrap();
        assert_eq!(sends(&wire, &reader), Err(rustix::io::Errno::PERM));
        // Nor does the responder.
        assert_eq!(sends(&accepted, &reader), Err(rustix::io::Errno::PERM));
    }

    fn sends(wire: &OwnedFd, what: impl AsFd) -> Result<(), rustix::io::Errno> {
        let sent = unix::send_with_fds(wire, b"!", &[what.as_fd()]);
        sent.map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap())
    }

    #[test]
    fn reasons_survive_the_ledger() {
        for number in 0..=32 {
            assert_eq!(Why::of(number) as u32, number);
            assert_eq!(Why::of(number).text().is_empty(), number == 0);
        }
        assert_eq!(Why::of(77), Why::None);
    }
}
