//! UDP sockets, always non-blocking and closed on exec, that say where each datagram came from and which address of ours it was sent to.
//!
//! # Safety
//!
//! `sendmsg`, `recvmsg` and `setsockopt` with packet information, which `rustix` lacks: the kernel gets pointers to
//! values and buffers that outlive the call, with their lengths, and ancillary data is walked with the C library's macros within the length that
//! the kernel has told.

use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::raw::retry;
use crate::tcp::BindOptions;

/// Room for one packet information, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// A bound UDP socket.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    v6: bool,
}

/// A datagram that has come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its length; more than the buffer had room for if it was cut.
    pub len: usize,
    /// Who sent it. IPv4 addresses are such on a dual-stack socket too.
    pub from: SocketAddr,
    /// The address that it was sent to, if the kernel says.
    pub to: Option<IpAddr>,
}

impl UdpSocket {
    /// Takes an address (port 0: one that the kernel picks), alone; `[::]` stands for IPv4 as well. `buffer`: bytes that may wait to be received, as
    /// far as the system lets us have that much.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `PermissionDenied` (low ports).
    pub fn bind(addr: SocketAddr, buffer: usize) -> io::Result<UdpSocket> {
        let alone = BindOptions {
            v6_only: false,
            share: false,
        };
        UdpSocket::bind_with(addr, buffer, alone)
    }

    /// As [`UdpSocket::bind`], with a say in who else may use the address.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_with(
        addr: SocketAddr,
        buffer: usize,
        options: BindOptions,
    ) -> io::Result<UdpSocket> {
        let v6 = addr.is_ipv6();
        let family = if v6 {
            AddressFamily::INET6
        } else {
            AddressFamily::INET
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = net::socket_with(family, SocketType::DGRAM, flags, None)?;
        let (level, option) = if v6 {
            sockopt::set_ipv6_v6only(&fd, options.v6_only)?;
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
        } else {
            (libc::IPPROTO_IP, libc::IP_PKTINFO)
        };
        set_option(fd.as_fd(), level, option, &1)?;
        if sockopt::set_socket_recv_buffer_size_force(&fd, buffer).is_err() {
            // Not privileged: what the system's limit allows.
            sockopt::set_socket_recv_buffer_size(&fd, buffer)?;
        }
        sockopt::set_socket_reuseaddr(&fd, options.share)?;
        net::bind(&fd, &addr)?;
        Ok(UdpSocket { fd, v6 })
    }

    /// Hears what is sent to this multicast group and port on any of these interfaces (their indexes), as others on this host may too. Interfaces
    /// that have no room or no multicast are left out while there are others.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`]; `NoSuchDevice` and the like when no interface is left.
    pub fn join(group: SocketAddr, interfaces: &[u32], buffer: usize) -> io::Result<UdpSocket> {
        let shared = BindOptions {
            v6_only: true,
            share: true,
        };
        // Bound to the group's address, it hears nothing else.
        let socket = UdpSocket::bind_with(group, buffer, shared)?;
        let fd = socket.as_fd();
        let all = match group {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL),
        };
        // Only from the interfaces named. Older kernels know this for IPv4 alone.
        let _ = set_option(fd, all.0, all.1, &0);
        let mut joined = Err(io::ErrorKind::InvalidInput.into());
        for &interface in interfaces {
            let now = match group {
                SocketAddr::V4(group) => {
                    let request = libc::ip_mreqn {
                        imr_multiaddr: in_addr(*group.ip()),
                        imr_address: in_addr(Ipv4Addr::UNSPECIFIED),
                        imr_ifindex: i32::try_from(interface).unwrap_or(-1),
                    };
                    set_option(fd, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &request)
                }
                SocketAddr::V6(group) => {
                    let request = libc::ipv6_mreq {
                        ipv6mr_multiaddr: libc::in6_addr {
                            s6_addr: group.ip().octets(),
                        },
                        ipv6mr_interface: interface,
                    };
                    set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)
                }
            };
            if joined.is_err() {
                joined = now;
            }
        }
        joined.map(|()| socket)
    }

    /// From now on only this peer is heard, and [`UdpSocket::recv`] tells what the network says about the way to it.
    ///
    /// # Errors
    /// What the kernel knows of the way there.
    pub fn connect(&self, to: SocketAddr) -> io::Result<()> {
        Ok(net::connect(&self.fd, &to)?)
    }

    /// The socket's own address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        crate::tcp::local_addr(&self.fd)
    }

    /// Sends one datagram, from this address of ours if one is given.
    ///
    /// # Errors
    /// `WouldBlock` when the socket's buffer is full; `InvalidInput` for addresses of families that do not go together; what the kernel knows
    /// of the way there.
    pub fn send(&self, bytes: &[u8], to: SocketAddr, from: Option<IpAddr>) -> io::Result<()> {
        let mismatch = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut control = Control([0; 64]);
        // SAFETY: all zeros is the empty message.
        let mut m: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        let iov = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        m.msg_iov = (&raw const iov).cast_mut();
        m.msg_iovlen = 1;
        let (v4, v6);
        if self.v6 {
            v6 = sockaddr_v6(match to {
                SocketAddr::V4(to) => SocketAddrV6::new(to.ip().to_ipv6_mapped(), to.port(), 0, 0),
                SocketAddr::V6(to) => to,
            });
            m.msg_name = (&raw const v6).cast_mut().cast();
            m.msg_namelen = size_of_val(&v6) as _;
            if let Some(from) = from {
                if from.is_ipv4() != to.ip().to_canonical().is_ipv4() {
                    return Err(mismatch());
                }
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr {
                        s6_addr: mapped(from).octets(),
                    },
                    // A group is one of an interface.
                    ipi6_ifindex: if v6.sin6_addr.s6_addr[0] == 0xff {
                        v6.sin6_scope_id as _
                    } else {
                        0
                    },
                };
                attach(
                    &mut m,
                    &mut control,
                    libc::IPPROTO_IPV6,
                    libc::IPV6_PKTINFO,
                    info,
                );
            }
        } else {
            let SocketAddr::V4(to) = to else {
                return Err(mismatch());
            };
            v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as _,
                sin_port: to.port().to_be(),
                sin_addr: in_addr(*to.ip()),
                sin_zero: [0; 8],
            };
            m.msg_name = (&raw const v4).cast_mut().cast();
            m.msg_namelen = size_of_val(&v4) as _;
            if let Some(from) = from {
                let IpAddr::V4(from) = from else {
                    return Err(mismatch());
                };
                let info = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: in_addr(from),
                    ipi_addr: in_addr(Ipv4Addr::UNSPECIFIED),
                };
                attach(
                    &mut m,
                    &mut control,
                    libc::IPPROTO_IP,
                    libc::IP_PKTINFO,
                    info,
                );
            }
        }
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the message points at values and bytes that outlive the call; see above.
        retry(|| unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const m, flags) })?;
        Ok(())
    }

    /// Receives one datagram; what does not fit is cut off.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub fn recv(&self, into: &mut [u8]) -> io::Result<Arrival> {
        let mut control = Control([0; 64]);
        let mut name = MaybeUninit::<libc::sockaddr_storage>::zeroed();
        // SAFETY: all zeros is the empty message.
        let mut m: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        let iov = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        m.msg_iov = (&raw const iov).cast_mut();
        m.msg_iovlen = 1;
        m.msg_name = name.as_mut_ptr().cast();
        m.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
        m.msg_control = control.0.as_mut_ptr().cast();
        m.msg_controllen = size_of::<Control>() as _;
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: the message points at buffers that outlive the call, with their lengths; see above.
        let len = retry(|| unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut m, flags) })?;
        // SAFETY: zeros, or what the kernel wrote.
        let name = unsafe { name.assume_init() };
        Ok(Arrival {
            len,
            from: peer(&name).ok_or(io::ErrorKind::InvalidData)?,
            to: arrived_at(&m),
        })
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// `value` is plain numbers.
fn set_option<T: Copy>(fd: BorrowedFd<'_>, level: i32, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the value outlives the call, with its length.
    retry(|| unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            fd.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value),
            size_of::<T>(),
        )
    })?;
    Ok(())
}

fn in_addr(ip: Ipv4Addr) -> libc::in_addr {
    libc::in_addr {
        s_addr: u32::from_ne_bytes(ip.octets()),
    }
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

fn sockaddr_v6(addr: SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as _,
        sin6_port: addr.port().to_be(),
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr {
            s6_addr: addr.ip().octets(),
        },
        sin6_scope_id: addr.scope_id(),
    }
}

/// Makes `value` the one piece of ancillary data of a message.
fn attach<T: Copy>(m: &mut libc::msghdr, control: &mut Control, level: i32, kind: i32, value: T) {
    const { assert!(size_of::<T>() <= 32, "no room for the value and its header") }
    let len = size_of::<T>() as u32;
    m.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: these two only compute; there is room for both, as asserted.
    let (space, end) = unsafe { (libc::CMSG_SPACE(len), libc::CMSG_LEN(len)) };
    m.msg_controllen = space as _;
    // SAFETY: `m` has a control buffer with room for one header and the value.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(m);
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = end as _;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
    }
}

fn peer(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let name = std::ptr::from_ref(name);
    // SAFETY: the storage has room for each kind of address, and each is made of plain numbers.
    match i32::from(unsafe { (*name).ss_family }) {
        libc::AF_INET => {
            // SAFETY: as above.
            let addr = unsafe { *name.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(addr.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::from((ip, u16::from_be(addr.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let addr = unsafe { *name.cast::<libc::sockaddr_in6>() };
            let port = u16::from_be(addr.sin6_port);
            let ip = Ipv6Addr::from(addr.sin6_addr.s6_addr);
            Some(match ip.to_canonical() {
                IpAddr::V4(ip) => SocketAddr::from((ip, port)),
                IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, addr.sin6_scope_id).into(),
            })
        }
        _ => None,
    }
}

/// Our address in a received message's packet information.
fn arrived_at(m: &libc::msghdr) -> Option<IpAddr> {
    let data = |header: *const libc::cmsghdr, len: usize| {
        // SAFETY: a header within the control data; this only computes.
        let wanted = unsafe { libc::CMSG_LEN(len as u32) } as _;
        // SAFETY: as above.
        let (has, at) = unsafe { ((*header).cmsg_len, libc::CMSG_DATA(header)) };
        (has >= wanted).then_some(at)
    };
    // SAFETY: the control data that the kernel wrote, as long as it said.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(m) };
    while !header.is_null() {
        // SAFETY: as above.
        match unsafe { ((*header).cmsg_level, (*header).cmsg_type) } {
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let at = data(header, size_of::<libc::in6_pktinfo>())?;
                // SAFETY: long enough, as just checked.
                let info = unsafe { at.cast::<libc::in6_pktinfo>().read_unaligned() };
                return Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let at = data(header, size_of::<libc::in_pktinfo>())?;
                // SAFETY: long enough, as just checked.
                let info = unsafe { at.cast::<libc::in_pktinfo>().read_unaligned() };
                return Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into());
            }
            _ => {}
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(m, header) };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Interest, poll_fds};

    fn exchange(one: &str, other: &str, from: &str, to: &str) {
        let bind = |addr: &str| UdpSocket::bind(addr.parse().unwrap(), 1 << 16).unwrap();
        let (a, b) = (bind(one), bind(other));
        let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let ports = [&a, &b].map(|s| s.local_addr().unwrap().port());
        a.send(b"first", (to, ports[1]).into(), Some(from)).unwrap();
        let mut buf = [0; 3];
        poll_fds(&[(b.as_fd(), Interest::READ)], None).unwrap();
        let arrival = b.recv(&mut buf).unwrap();
        assert_eq!(&buf, b"fir");
        assert_eq!(
            arrival.len, 5,
            "its own length, not what there was room for"
        );
        assert_eq!(arrival.from, (from, ports[0]).into());
        assert_eq!(arrival.to, Some(to));
        let none = b.recv(&mut buf).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        let again = UdpSocket::bind(b.local_addr().unwrap(), 1 << 16);
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    fn loopback() -> u32 {
        // The first interface of every network namespace.
        1
    }

    #[test]
    fn a_group_is_heard_by_all_who_have_joined() {
        let joined = |group| UdpSocket::join(group, &[loopback(), 77_777], 1 << 16).unwrap();
        // Other runs of this test on the host have others.
        let [.., high, low] = std::process::id().to_be_bytes();
        let [group, another] =
            [5, 6].map(|net| SocketAddr::from(([239, 80 + net, high, low], 22273)));
        let hearers = [joined(group), joined(group)];
        let other = joined(another);
        let sender = UdpSocket::bind("[::]:0".parse().unwrap(), 1 << 16).unwrap();
        let from: IpAddr = "127.0.0.1".parse().unwrap();
        let send = |bytes: &[u8], to| sender.send(bytes, to, Some(from)).unwrap();
        send(b"to one", group);
        send(b"to the other", another);
        for (socket, expected) in [
            (&hearers[0], &b"to one"[..]),
            (&hearers[1], b"to one"),
            (&other, b"to the other"),
        ] {
            let mut buf = [0; 32];
            poll_fds(&[(socket.as_fd(), Interest::READ)], None).unwrap();
            let arrival = socket.recv(&mut buf).unwrap();
            assert_eq!(&buf[..arrival.len], expected);
            assert_eq!(arrival.from.ip(), from);
            assert!(arrival.to.is_some_and(|to| to.is_multicast()));
            let none = socket.recv(&mut buf).unwrap_err();
            assert_eq!(none.kind(), io::ErrorKind::WouldBlock, "once only");
        }
        assert!(UdpSocket::join(group, &[77_777], 1 << 16).is_err());
        assert!(UdpSocket::join(group, &[], 1 << 16).is_err());
    }

    #[test]
    fn one_who_asks_where_nobody_is_is_told() {
        let bind = || UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1 << 16).unwrap();
        let (a, b) = (bind(), bind());
        let gone = b.local_addr().unwrap();
        a.connect(gone).unwrap();
        drop(b);
        a.send(b"hello", gone, None).unwrap();
        poll_fds(&[(a.as_fd(), Interest::READ)], None).unwrap();
        let refused = a.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn datagrams_say_where_they_went() {
        exchange("127.0.0.1:0", "0.0.0.0:0", "127.0.0.1", "127.0.0.2");
        exchange("0.0.0.0:0", "0.0.0.0:0", "127.0.0.3", "127.0.0.2");
        if UdpSocket::bind("[::1]:0".parse().unwrap(), 1 << 16).is_ok() {
            exchange("[::]:0", "[::]:0", "127.0.0.3", "127.0.0.2");
            exchange("[::]:0", "[::]:0", "::1", "::1");
        }
    }
}
