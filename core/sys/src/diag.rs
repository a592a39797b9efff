//! The users and sockets at the other end of a TCP connection on this host, and the receiver of a UDP datagram there: the kernel's socket
//! tables, by `NETLINK_SOCK_DIAG` (`sock_diag(7)`).

use rustix::fs::fstat;
use rustix::net::{AddressFamily, netlink::SOCK_DIAG};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use crate::netlink::{self, HEADER, NLM_F_REQUEST};
use crate::tcp;
use crate::unix::OVERFLOW_UID;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
const TCP_ESTABLISHED: u8 = 1;
const TCP_CLOSE_WAIT: u8 = 8;
/// The number of our only request on a socket.
const SEQUENCE: u32 = 1;
const ANY_INTERFACE: u32 = 0;
/// With `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const REQUEST: usize = HEADER + 56;
const ANSWER: usize = HEADER + 72;

/// An established TCP socket, as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    uid: u32,
    inode: u32,
    cookie: u64,
}

/// The other end of a TCP connection of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpPeer {
    /// The user that created it, in the numbering of our user namespace.
    pub uid: u32,
    /// Its number, which no other socket of this boot has or will have: the `SO_COOKIE` of its owner.
    pub cookie: u64,
}

/// The user that created the other end of this connected TCP socket, in the numbering of our user namespace. `None` if that end is not an
/// established socket of a process in our network namespace, if our user namespace does not know the user, or if our own end is no longer
/// established.
///
/// # Errors
/// The errors of a kernel, or a sandbox, that does not answer; `NotConnected`; `InvalidData` for an invalid answer.
pub fn tcp_peer_uid(fd: impl AsFd) -> io::Result<Option<u32>> {
    let peer = tcp_peer(fd)?.filter(|peer| peer.uid != OVERFLOW_UID);
    Ok(peer.map(|peer| peer.uid))
}

/// As [`tcp_peer_uid`], with the socket's number. The user is [`OVERFLOW_UID`] if our user namespace does not know it.
///
/// # Errors
/// As there.
pub fn tcp_peer(fd: impl AsFd) -> io::Result<Option<TcpPeer>> {
    let (ours, theirs) = (tcp::local_addr(&fd)?, tcp::peer_addr(&fd)?);
    let Some(peer) = find(theirs, ours)? else {
        return Ok(None);
    };
    // Only after the peer's end was found: as long as our end is established, no other socket than its peer has those addresses.
    let own = find(ours, theirs)?;
    let inode = fstat(&fd)?.st_ino;
    let is_ours = own.is_some_and(|own| u64::from(own.inode) == inode);
    Ok(is_ours.then_some(TcpPeer {
        uid: peer.uid,
        cookie: peer.cookie,
    }))
}

/// The number in `/proc/PID/fd` of the other end of this TCP connection, if that end is a socket of our user that can still send.
///
/// # Errors
/// As [`tcp_peer_uid`].
pub fn tcp_peer_inode(fd: impl AsFd) -> io::Result<Option<u32>> {
    let (ours, theirs) = (tcp::local_addr(&fd)?, tcp::peer_addr(&fd)?);
    let peer = find_in(theirs, ours, &[TCP_ESTABLISHED, TCP_CLOSE_WAIT])?;
    let peer = peer.filter(|peer| peer.uid == crate::process::uid());
    Ok(peer.map(|peer| peer.inode))
}

/// The established socket with this own address and this peer's.
fn find(own: SocketAddr, peer: SocketAddr) -> io::Result<Option<Entry>> {
    find_in(own, peer, &[TCP_ESTABLISHED])
}

/// The socket with these addresses, if it is in one of these states.
fn find_in(own: SocketAddr, peer: SocketAddr, states: &[u8]) -> io::Result<Option<Entry>> {
    let (own, peer) = (canonical(own), canonical(peer));
    let request = request(IPPROTO_TCP, own, peer, ANY_INTERFACE)?;
    answer(&ask(&request)?, own, peer, states)
}

/// Sends a request to the kernel, and returns its answer.
fn ask(request: &[u8]) -> io::Result<Vec<u8>> {
    netlink::ask(Some(SOCK_DIAG), request)
}

/// A UDP socket of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpSocket {
    /// The user that created it, in the numbering of our user namespace.
    pub uid: u32,
    /// Its number, which no other socket of this boot has or will have: the `SO_COOKIE` of its owner.
    pub cookie: u64,
}

/// The UDP socket that gets a unicast datagram from one address to another in our network namespace, by the rules of the kernel: a connected socket
/// before an unconnected one, the one of its group that `SO_REUSEPORT` chooses. Sockets that are bound to an interface are left out. `None` when there is
/// none, or none of a user that our user namespace knows.
///
/// # Errors
/// The errors of a kernel, or a sandbox, that does not answer; `InvalidInput` for addresses of two families; `InvalidData` for an invalid
/// answer.
pub fn udp_receiver(from: SocketAddr, to: SocketAddr) -> io::Result<Option<UdpSocket>> {
    udp_receiver_by(ANY_INTERFACE, from, to)
}

/// As [`udp_receiver`], of a datagram that comes by the interface with this index: sockets that are bound to that interface come first.
///
/// # Errors
/// As there.
pub fn udp_receiver_by(
    interface: u32,
    from: SocketAddr,
    to: SocketAddr,
) -> io::Result<Option<UdpSocket>> {
    let (from, to) = (canonical(from), canonical(to));
    // "Source" and "destination" are those of the datagram here, and not the socket's own and its peer's as for TCP.
    let bytes = ask(&request(IPPROTO_UDP, from, to, interface)?)?;
    let Some(message) = message(&bytes)? else {
        return Ok(None);
    };
    // It has that port, and the address or none of its own.
    let found = message.address(0);
    let fits = found.is_some_and(|(ip, port)| port == to.1 && (ip == to.0 || ip.is_unspecified()));
    let entry = message.entry();
    Ok(
        (fits && entry.inode != 0 && entry.uid != OVERFLOW_UID).then_some(UdpSocket {
            uid: entry.uid,
            cookie: entry.cookie,
        }),
    )
}

/// A socket for IPv6 that has an IPv4 peer is listed as one for IPv4.
fn canonical(addr: SocketAddr) -> (IpAddr, u16) {
    (addr.ip().to_canonical(), addr.port())
}

fn request(
    protocol: u8,
    own: (IpAddr, u16),
    peer: (IpAddr, u16),
    interface: u32,
) -> io::Result<[u8; REQUEST]> {
    let family = match (own.0, peer.0) {
        (IpAddr::V4(_), IpAddr::V4(_)) => AddressFamily::INET,
        (IpAddr::V6(_), IpAddr::V6(_)) => AddressFamily::INET6,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let mut out = [0; REQUEST];
    let mut put = |at: usize, field: &[u8]| out[at..at + field.len()].copy_from_slice(field);
    put(0, &(REQUEST as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    put(8, &SEQUENCE.to_ne_bytes());
    put(HEADER, &[family.as_raw() as u8, protocol]);
    // UDP sockets are not asked for their state.
    put(HEADER + 4, &(1_u32 << TCP_ESTABLISHED).to_ne_bytes());
    for (i, (ip, port)) in [own, peer].into_iter().enumerate() {
        put(HEADER + 8 + 2 * i, &port.to_be_bytes());
        let at = HEADER + 12 + 16 * i;
        match ip {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    put(HEADER + 44, &interface.to_ne_bytes());
    // No cookie: the addresses say which socket.
    put(HEADER + 48, &[0xff; 8]);
    Ok(out)
}

/// `struct inet_diag_msg`, whole.
struct Message<'a>(&'a [u8]);

impl Message<'_> {
    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    /// The socket's own address (0) or that of its peer (1).
    fn address(&self, i: usize) -> Option<(IpAddr, u16)> {
        let body = self.0;
        let port = u16::from_be_bytes([body[4 + 2 * i], body[5 + 2 * i]]);
        let ip: [u8; 16] = std::array::from_fn(|at| body[8 + 16 * i + at]);
        let ip = match u16::from(body[0]) {
            family if family == AddressFamily::INET.as_raw() => {
                IpAddr::V4(Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3]))
            }
            family if family == AddressFamily::INET6.as_raw() => Ipv6Addr::from(ip).to_canonical(),
            _ => return None,
        };
        Some((ip, port))
    }

    fn entry(&self) -> Entry {
        Entry {
            uid: self.word(64),
            inode: self.word(68),
            // The low half first (`struct inet_diag_sockid`).
            cookie: u64::from(self.word(44)) | u64::from(self.word(48)) << 32,
        }
    }
}

/// Parses an answer; `None`: there is no such socket.
fn message(bytes: &[u8]) -> io::Result<Option<Message<'_>>> {
    match netlink::check(bytes, SOCK_DIAG_BY_FAMILY, SEQUENCE) {
        Ok(()) if bytes.len() < ANSWER => return Err(io::ErrorKind::InvalidData.into()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        checked => checked?,
    }
    Ok(Some(Message(&bytes[HEADER..ANSWER])))
}

fn answer(
    bytes: &[u8],
    own: (IpAddr, u16),
    peer: (IpAddr, u16),
    states: &[u8],
) -> io::Result<Option<Entry>> {
    let Some(message) = message(bytes)? else {
        return Ok(None);
    };
    // Without an exact match the kernel names the listener of that address.
    let is_in = states.contains(&message.0[1]);
    if !is_in || message.address(0) != Some(own) || message.address(1) != Some(peer) {
        return Ok(None);
    }
    let entry = message.entry();
    // The kernel reports a socket that no process has open as one of user 0.
    Ok((entry.inode != 0).then_some(entry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn the_kernel_names_the_user_behind_each_kind_of_address() {
        let us = crate::process::uid();
        for (listen, dial) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("127.0.0.1:0", "::ffff:127.0.0.1"),
            ("[::1]:0", "::1"),
            // Both ends of an IPv4 connection, one of them a socket for IPv6.
            ("[::]:0", "127.0.0.1"),
        ] {
            let Ok(listener) = TcpListener::bind(listen) else {
                println!("skipped: no {listen} here");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let dialled = TcpStream::connect((dial, port)).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            assert_eq!(
                tcp_peer_uid(&accepted).unwrap(),
                Some(us),
                "{listen} {dial}"
            );
            assert_eq!(tcp_peer_uid(&dialled).unwrap(), Some(us), "{listen} {dial}");
            let cookie = rustix::net::sockopt::socket_cookie(&dialled).unwrap();
            assert_eq!(tcp_peer(&accepted).unwrap().map(|p| p.cookie), Some(cookie));
            // Closed and without an owner: the kernel would report it as a socket of root.
            drop(dialled);
            assert_eq!(tcp_peer_uid(&accepted).unwrap(), None, "{listen} {dial}");
        }
    }

    #[test]
    fn the_kernel_names_the_socket_that_gets_a_datagram() {
        let cookie = |socket: &UdpSocket| rustix::net::sockopt::socket_cookie(socket).unwrap();
        let got = |from: &str, to: &str| {
            let found = udp_receiver(from.parse().unwrap(), to.parse().unwrap()).unwrap();
            found.map(|socket| (socket.uid, socket.cookie))
        };
        let us = crate::process::uid();
        let open = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = open.local_addr().unwrap().port();
        let to = format!("127.0.0.1:{port}");
        assert_eq!(got("127.0.0.1:9", &to), Some((us, cookie(&open))));
        assert_eq!(
            got("127.0.0.1:9", &format!("[::ffff:127.0.0.1]:{port}")),
            got("127.0.0.1:9", &to)
        );
        // A connected one gets what its peer sends, and nothing else.
        let narrow = UdpSocket::bind("127.0.0.1:0").unwrap();
        narrow.connect(&*to).unwrap();
        let addr = narrow.local_addr().unwrap().to_string();
        assert_eq!(got(&to, &addr), Some((us, cookie(&narrow))));
        assert_eq!(got("127.0.0.1:9", &addr), None);
        drop(open);
        assert_eq!(got("127.0.0.1:9", &to), None);
        if let Ok(six) = UdpSocket::bind("[::1]:0") {
            let addr = six.local_addr().unwrap().to_string();
            assert_eq!(got("[::1]:9", &addr), Some((us, cookie(&six))));
            assert!(udp_receiver("127.0.0.1:9".parse().unwrap(), addr.parse().unwrap()).is_err());
        }
    }

    #[test]
    fn a_socket_of_an_interface_gets_what_comes_by_it() {
        use rustix::net::sockopt::{set_socket_reuseaddr, socket_cookie};
        use rustix::net::{self, SocketFlags, SocketType};
        use std::os::fd::AsRawFd;
        let shared = |device: &std::ffi::CStr, port: u16| {
            let flags = SocketFlags::CLOEXEC;
            let socket =
                net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).unwrap();
            set_socket_reuseaddr(&socket, true).unwrap();
            let (level, name) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
            let len = device.count_bytes() as libc::socklen_t;
            // SAFETY: a name of that length.
            let rc = unsafe {
                libc::setsockopt(socket.as_raw_fd(), level, name, device.as_ptr().cast(), len)
            };
            assert_eq!(rc, 0, "{}", io::Error::last_os_error());
            net::bind(&socket, &SocketAddr::new([0; 4].into(), port)).unwrap();
            UdpSocket::from(socket)
        };
        let open = shared(c"", 0);
        let to = SocketAddr::new([127, 0, 0, 1].into(), open.local_addr().unwrap().port());
        let from: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let lo = crate::interfaces::index_to("127.0.0.1".parse().unwrap(), from.ip()).unwrap();
        let got = |interface| udp_receiver_by(interface, from, to).unwrap().unwrap();
        let cookie = |socket: &UdpSocket| socket_cookie(socket).unwrap();
        assert_eq!(got(lo).cookie, cookie(&open));
        let narrow = shared(c"lo", to.port());
        assert_eq!(got(lo).cookie, cookie(&narrow));
        assert_eq!(got(ANY_INTERFACE).cookie, cookie(&open));
        // So does the kernel.
        UdpSocket::bind("127.0.0.1:0")
            .unwrap()
            .send_to(b"x", to)
            .unwrap();
        assert_eq!(narrow.recv(&mut [0; 2]).unwrap(), 1);
    }

    #[test]
    fn a_socket_that_is_not_accepted_yet_belongs_to_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(tcp_peer_uid(&dialled).unwrap(), None);
        assert!(tcp_peer_uid(&listener).is_err(), "not connected");
    }

    #[test]
    fn answers_to_another_question_are_refused() {
        let (own, peer) = (
            (Ipv4Addr::LOCALHOST.into(), 1000),
            (Ipv4Addr::LOCALHOST.into(), 2000),
        );
        let mut good = vec![0; ANSWER];
        good[0] = ANSWER as u8;
        good[4] = SOCK_DIAG_BY_FAMILY as u8;
        good[8] = SEQUENCE as u8;
        good[HEADER] = AddressFamily::INET.as_raw() as u8;
        good[HEADER + 1] = TCP_ESTABLISHED;
        let asked = request(IPPROTO_TCP, own, peer, ANY_INTERFACE).unwrap();
        good[HEADER + 4..HEADER + 40].copy_from_slice(&asked[HEADER + 8..HEADER + 44]);
        good[HEADER + 64] = 7;
        good[HEADER + 68] = 9;
        let entry = Entry {
            uid: 7,
            inode: 9,
            cookie: 0,
        };
        assert_eq!(
            answer(&good, own, peer, &[TCP_ESTABLISHED]).unwrap(),
            Some(entry)
        );
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            answer(&bytes, own, peer, &[TCP_ESTABLISHED])
        };
        for at in [
            HEADER,
            HEADER + 1,
            HEADER + 5,
            HEADER + 7,
            HEADER + 8,
            HEADER + 27,
        ] {
            assert_eq!(with(at, 0xee).unwrap(), None, "byte {at}");
        }
        assert_eq!(with(HEADER + 68, 0).unwrap(), None, "no process has it");
        for at in [0, 4, 8] {
            assert!(with(at, 0xee).is_err(), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(
                answer(&good[..len], own, peer, &[TCP_ESTABLISHED]).is_err(),
                "{len} bytes"
            );
        }
    }
}
