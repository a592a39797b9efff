//! The rendezvous of two UDP sockets of one host.
//!
//! A receiving socket listens on an abstract Unix socket whose name is its own number (`SO_COOKIE`). A sender asks the kernel which
//! socket would get its datagrams (`NETLINK_SOCK_DIAG`), dials the name of that number, and [offers](offer()) a segment with a ring. The
//! receiver in turn asks the kernel which socket has the source address of the offer: it has to be the socket that offers, of
//! the same user. So no datagram comes through a ring under an address that its sender does not have. The [answer](answer()) carries the receiver's
//! bell. Formats and checks are in `docs/spec/run.md`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use weft_sys::unix::{self, Name};
use weft_sys::{diag, interfaces, process};

use crate::addr::{get_addr, put_addr};
use crate::meet::{Why, same_user};

const OFFER_MAGIC: [u8; 8] = *b"weftudp1";
const ANSWER_MAGIC: [u8; 8] = *b"weftudpA";
const OFFER: usize = 8 + 8 + 8 + 18 + 18;
const ANSWER: usize = 8 + 8;

/// In front of each datagram in a ring: its length, and [`AFTER_KERNEL`].
pub const HEADER: usize = 8;
/// The longest datagram that goes through a ring; the kernel handles longer ones.
pub const MAX_DATAGRAM: usize = 65_000;
/// The sender has sent over the kernel's socket since the last datagram of the ring: that comes first.
pub const AFTER_KERNEL: u32 = 1;
/// A sender asks the kernel again after this many milliseconds whether the receiver is still the same.
pub const CHECK_MS: u64 = 50;

/// Returns the bytes of the ring that a datagram occupies.
#[inline]
#[must_use]
pub fn footprint(len: usize) -> usize {
    HEADER + len.next_multiple_of(8)
}

/// The header's bytes.
#[inline]
#[must_use]
pub fn header(len: usize, flags: u32) -> [u8; HEADER] {
    (len as u64 | u64::from(flags) << 32).to_ne_bytes()
}

/// Length and flags of a header, when the datagram is one that `ready` bytes can hold.
#[inline]
#[must_use]
pub fn parse(header: [u8; HEADER], ready: usize) -> Option<(usize, u32)> {
    let word = u64::from_ne_bytes(header);
    let (len, flags) = ((word & 0xffff_ffff) as usize, (word >> 32) as u32);
    (len <= MAX_DATAGRAM && footprint(len) <= ready && flags & !AFTER_KERNEL == 0)
        .then_some((len, flags))
}

/// Source and destination of datagrams. IPv4 addresses of IPv6 sockets count as IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The sender's address.
    pub from: SocketAddr,
    /// The receiver's, as the sender names it.
    pub to: SocketAddr,
}

fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

/// Returns true if the kind of the address allows that it belongs to this host.
#[must_use]
pub fn is_unicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_multicast() && !ip.is_broadcast() && !ip.is_unspecified(),
        // Addresses of a link mean nothing without their interface.
        IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unspecified() && !ip.is_unicast_link_local(),
    }
}

impl Route {
    /// Makes a route between these addresses.
    #[must_use]
    pub fn new(from: SocketAddr, to: SocketAddr) -> Route {
        Route {
            from: canonical(from),
            to: canonical(to),
        }
    }

    /// Returns true if they may belong to two hosts.
    #[must_use]
    pub fn may_be_remote(&self) -> bool {
        let (from, to) = (self.from.ip(), self.to.ip());
        is_unicast(from)
            && is_unicast(to)
            && !from.is_loopback()
            && !to.is_loopback()
            && from != to
            && from.is_ipv4() == to.is_ipv4()
            && self.from.port() != 0
            && self.to.port() != 0
    }

    /// Returns true if both can belong to one host: a host that sends to one of its own addresses sends from the same one, or one of the two is a loopback
    /// address.
    #[must_use]
    pub fn may_be_local(&self) -> bool {
        let (from, to) = (self.from.ip(), self.to.ip());
        is_unicast(from)
            && is_unicast(to)
            && self.from != self.to
            && self.from.port() != 0
            && (from == to || from.is_loopback() || to.is_loopback())
    }
}

/// Describes why datagrams stay with the kernel; empty for no reason.
#[must_use]
pub fn stays(why: Why) -> &'static str {
    match why {
        Why::None => "",
        Why::Elsewhere => {
            "the destination is not on this host, or is a group, a broadcast address or the socket itself"
        }
        Why::NoPeer => "the receiver runs without weft",
        Why::Impostor => "who offered a ring does not have the address that it named",
        Why::Stdio => {
            "the socket became one of the first three descriptors, or a standard I/O stream"
        }
        Why::Option => "an option, flag or call was used that only the kernel's UDP has",
        Why::Broken => "the sender broke the rules of the shared ring",
        Why::Descriptors => "there are too many descriptors or senders",
        Why::ShutRead => "the socket was shut down",
        other => other.text(),
    }
}

fn name(cookie: u64) -> Vec<u8> {
    format!("weft-run/udp/1/{cookie:016x}").into_bytes()
}

/// Returns the number of a socket.
///
/// # Errors
/// [`Why::System`].
pub fn cookie(fd: impl AsFd) -> Result<u64, Why> {
    rustix::net::sockopt::socket_cookie(fd).map_err(|_| Why::System)
}

/// Makes the listener by which senders find the socket of this number.
///
/// # Errors
/// `AddrInUse` if the name is taken.
pub fn listen(cookie: u64) -> io::Result<OwnedFd> {
    unix::listen(Name::Abstract(&name(cookie)), 16)
}

/// Returns the number of the socket that receives datagrams sent on a route. `None` if there is none.
///
/// # Errors
/// [`Why::OtherUser`], and [`Why::System`] if the kernel does not report it.
pub fn receiver(route: &Route) -> Result<Option<u64>, Why> {
    ours(diag::udp_receiver(route.from, route.to))
}

/// The same for datagrams from another host, which may find a socket that is bound to their interface. They come by the interface by which we reach that host,
/// or by another one: `None` if that makes a difference.
///
/// # Errors
/// As there.
pub fn receiver_from_afar(route: &Route) -> Result<Option<u64>, Why> {
    let (own, peer) = (route.to.ip(), route.from.ip());
    let by = interfaces::index_to(own, peer).map_err(|_| Why::System)?;
    let found = ours(diag::udp_receiver_by(by, route.from, route.to))?;
    Ok(found.filter(|_| receiver(route) == Ok(found)))
}

fn ours(found: io::Result<Option<diag::UdpSocket>>) -> Result<Option<u64>, Why> {
    match found.map_err(|_| Why::System)? {
        Some(socket) if socket.uid == process::uid() => Ok(Some(socket.cookie)),
        Some(_) => Err(Why::OtherUser),
        None => Ok(None),
    }
}

/// Connects to the listener of the socket of this number. `None` if it has none.
///
/// # Errors
/// [`Why::OtherUser`] when another user has its name.
pub fn dial(cookie: u64) -> Result<Option<OwnedFd>, Why> {
    let wire = match unix::connect(Name::Abstract(&name(cookie))) {
        Ok(wire) => wire,
        Err(e) => match e.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock => return Ok(None),
            _ => return Err(Why::System),
        },
    };
    same_user(&wire)?;
    Ok(Some(wire))
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// Sends the sender's message: the numbers of both sockets, the route, and the segment with it.
///
/// # Errors
/// [`Why::System`].
pub fn offer(
    wire: impl AsFd,
    own: u64,
    peer: u64,
    route: &Route,
    segment: BorrowedFd<'_>,
) -> Result<(), Why> {
    let mut bytes = [0; OFFER];
    bytes[..8].copy_from_slice(&OFFER_MAGIC);
    bytes[8..16].copy_from_slice(&own.to_ne_bytes());
    bytes[16..24].copy_from_slice(&peer.to_ne_bytes());
    bytes[24..42].copy_from_slice(&put_addr(route.from));
    bytes[42..60].copy_from_slice(&put_addr(route.to));
    unix::send_with_fds(wire, &bytes, &[segment]).map_err(|_| Why::System)
}

/// A verified offer to a receiver.
#[derive(Debug)]
pub struct Offer {
    /// The file of the segment; not looked at yet.
    pub segment: OwnedFd,
    /// From the address that the sender's socket has, to one of ours.
    pub route: Route,
    /// The sender's socket.
    pub peer: u64,
}

/// Accepts a sender on `listener`, if one has come: the connection for its [offer](hear) and the [answer](answer()). It ends with the sender.
///
/// # Errors
/// Why it was refused; the next call looks at the next one.
pub fn caller(listener: impl AsFd) -> Result<Option<OwnedFd>, Why> {
    let Some(wire) = unix::accept(listener).map_err(|_| Why::System)? else {
        return Ok(None);
    };
    same_user(&wire)?;
    Ok(Some(wire))
}

/// Checks a sender's offer to the socket with the number `own`. `None`: it has not sent one yet. It can lose its processor between its connection and its
/// offer, so it is kept for the next look.
///
/// # Errors
/// Why it is refused.
pub fn hear(wire: impl AsFd, own: u64) -> Result<Option<Offer>, Why> {
    let mut bytes = [0; OFFER + 1];
    let (n, fds) = match unix::recv_with_fds(wire, &mut bytes, 1) {
        Ok(Some(got)) => got,
        Ok(None) => return Err(Why::Impostor),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(_) => return Err(Why::System),
    };
    if n != OFFER || bytes[..8] != OFFER_MAGIC || number(&bytes, 16) != own {
        return Err(Why::Impostor);
    }
    let peer = number(&bytes, 8);
    let route = Route {
        from: get_addr(&std::array::from_fn(|i| bytes[24 + i])),
        to: get_addr(&std::array::from_fn(|i| bytes[42 + i])),
    };
    let back = Route {
        from: route.to,
        to: route.from,
    };
    if !route.may_be_local() || receiver(&back)? != Some(peer) || receiver(&route)? != Some(own) {
        return Err(Why::Impostor);
    }
    let Ok([segment]) = <[OwnedFd; 1]>::try_from(fds) else {
        return Err(Why::Impostor);
    };
    Ok(Some(Offer {
        segment,
        route,
        peer,
    }))
}

/// Sends the receiver's answer: how many bytes may wait in the ring, and its bell with it.
///
/// # Errors
/// [`Why::System`].
pub fn answer(wire: impl AsFd, bound: u64, bell: BorrowedFd<'_>) -> Result<(), Why> {
    let mut bytes = [0; ANSWER];
    bytes[..8].copy_from_slice(&ANSWER_MAGIC);
    bytes[8..].copy_from_slice(&bound.to_ne_bytes());
    unix::send_with_fds(wire, &bytes, &[bell]).map_err(|_| Why::System)
}

/// Returns the receiver's answer, if it has come: its bound and its bell.
///
/// # Errors
/// [`Why::NoPeer`] if it has refused the offer.
pub fn answered(wire: impl AsFd) -> Result<Option<(u64, OwnedFd)>, Why> {
    let mut bytes = [0; ANSWER + 1];
    let (n, fds) = match unix::recv_with_fds(wire, &mut bytes, 1) {
        Ok(Some(got)) => got,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        // If a receiver closes without having read, that is a reset.
        Ok(None) | Err(_) => return Err(Why::NoPeer),
    };
    let Ok([bell]) = <[OwnedFd; 1]>::try_from(fds) else {
        return Err(Why::Impostor);
    };
    if n != ANSWER || bytes[..8] != ANSWER_MAGIC {
        return Err(Why::Impostor);
    }
    Ok(Some((number(&bytes, 8), bell)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use weft_ring::stream::Stream;
    use weft_sys::EventFd;

    fn pair() -> (UdpSocket, UdpSocket, Route) {
        let (a, b) = (
            UdpSocket::bind("127.0.0.1:0").unwrap(),
            UdpSocket::bind("127.0.0.1:0").unwrap(),
        );
        let route = Route::new(a.local_addr().unwrap(), b.local_addr().unwrap());
        (a, b, route)
    }

    #[test]
    fn a_sender_finds_its_receiver_and_gets_its_bell() {
        let (a, b, route) = pair();
        let (own, peer) = (cookie(&a).unwrap(), cookie(&b).unwrap());
        assert!(route.may_be_local());
        assert_eq!(receiver(&route), Ok(Some(peer)));
        assert!(dial(peer).unwrap().is_none());
        let listener = listen(peer).unwrap();
        assert!(caller(&listener).unwrap().is_none());
        let wire = dial(peer).unwrap().unwrap();
        // The dialler sends its offer late.
        let end = caller(&listener).unwrap().unwrap();
        assert!(hear(&end, peer).unwrap().is_none());
        let (_ring, segment) = Stream::create(1 << 16).unwrap();
        offer(&wire, own, peer, &route, segment.as_fd()).unwrap();
        assert!(answered(&wire).unwrap().is_none());
        let got = hear(&end, peer).unwrap().unwrap();
        assert_eq!((got.route, got.peer), (route, own));
        assert!(Stream::open(got.segment).is_ok());
        let bell = EventFd::new().unwrap();
        answer(&end, 1234, bell.as_fd()).unwrap();
        let (bound, _bell) = answered(&wire).unwrap().unwrap();
        assert_eq!(bound, 1234);
        drop(end);
        assert_eq!(answered(&wire).err(), Some(Why::NoPeer));
    }

    #[test]
    fn an_address_that_the_sender_does_not_have_is_refused() {
        let (a, b, route) = pair();
        let (other, _far, _) = pair();
        let (own, peer) = (cookie(&a).unwrap(), cookie(&b).unwrap());
        let listener = listen(peer).unwrap();
        let (_ring, segment) = Stream::create(1 << 16).unwrap();
        let try_it = |own: u64, peer: u64, route: Route| {
            let wire = dial(cookie(&b).unwrap()).unwrap().unwrap();
            offer(&wire, own, peer, &route, segment.as_fd()).unwrap();
            hear(caller(&listener).unwrap().unwrap(), cookie(&b).unwrap()).err()
        };
        let forged = Route {
            from: other.local_addr().unwrap(),
            ..route
        };
        assert_eq!(try_it(own, peer, forged), Some(Why::Impostor), "another's");
        let nobody = Route {
            from: "127.0.0.1:1".parse().unwrap(),
            ..route
        };
        assert_eq!(try_it(own, peer, nobody), Some(Why::Impostor), "nobody's");
        let far = Route {
            from: "192.0.2.1:9".parse().unwrap(),
            ..route
        };
        assert_eq!(try_it(own, peer, far), Some(Why::Impostor), "far away");
        let elsewhere = Route {
            to: other.local_addr().unwrap(),
            ..route
        };
        assert_eq!(
            try_it(own, peer, elsewhere),
            Some(Why::Impostor),
            "not ours"
        );
        assert_eq!(try_it(own + 1, peer, route), Some(Why::Impostor), "number");
        assert_eq!(try_it(own, peer + 1, route), Some(Why::Impostor), "for us");
        assert_eq!(try_it(own, peer, route), None);
        // Nothing at all.
        drop(dial(peer).unwrap().unwrap());
        let end = caller(&listener).unwrap().unwrap();
        assert_eq!(hear(end, peer).err(), Some(Why::Impostor));
    }

    #[test]
    fn headers_are_read_back_and_lies_are_not() {
        for len in [0, 1, 7, 8, 1472, MAX_DATAGRAM] {
            for flags in [0, AFTER_KERNEL] {
                assert_eq!(
                    parse(header(len, flags), footprint(len)),
                    Some((len, flags))
                );
            }
            assert_eq!(parse(header(len, 0), footprint(len) - 1), None);
            assert_eq!(parse(header(len, 2), 1 << 20), None);
        }
        assert_eq!(parse(header(MAX_DATAGRAM + 1, 0), 1 << 20), None);
        assert_eq!(parse([0xff; 8], usize::MAX), None);
    }

    #[test]
    fn only_addresses_of_one_host_are_looked_at() {
        let local = |from: &str, to: &str| {
            Route::new(from.parse().unwrap(), to.parse().unwrap()).may_be_local()
        };
        assert!(local("127.0.0.1:1", "127.0.0.1:2"));
        assert!(local("[::ffff:10.0.0.1]:1", "10.0.0.1:2"));
        assert!(local("[::1]:1", "[::1]:2"));
        assert!(!local("10.0.0.1:1", "10.0.0.2:2"));
        assert!(!local("127.0.0.1:1", "127.0.0.1:1"), "itself");
        assert!(!local("127.0.0.1:1", "224.0.0.1:2"));
        assert!(!local("127.0.0.1:1", "255.255.255.255:2"));
        assert!(!local("127.0.0.1:1", "0.0.0.0:2"));
        assert!(!local("[fe80::1]:1", "[fe80::1]:2"));
        assert!(!local("127.0.0.1:0", "127.0.0.1:2"), "not bound");
    }
}
