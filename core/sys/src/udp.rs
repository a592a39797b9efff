//! UDP sockets, always non-blocking and closed on exec, that report the sender of each datagram and the local address to which it was sent.
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
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::fork::{Withheld, withhold};
use crate::raw::retry;
use crate::tcp::BindOptions;

mod group;

pub use group::Choice;

/// Room for a packet information, traffic classes of both families and a segment length, with the kernel's alignment.
#[derive(Default)]
struct Control {
    words: [u64; 16],
    /// Bytes that are attached.
    used: usize,
}

/// A bound UDP socket.
#[derive(Debug)]
pub struct UdpSocket {
    /// A forked child would be a member of the group, and never receive. Dropped before the descriptor.
    withheld: Option<Withheld>,
    fd: OwnedFd,
    v6: bool,
    /// Longest datagrams that the kernel may be asked to cut out of a train: it has refused longer ones.
    gso: AtomicUsize,
}

/// A datagram that has come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its length; more than the buffer had room for if it was cut.
    pub len: usize,
    /// The sender. IPv4 addresses are such on a dual-stack socket too.
    pub from: SocketAddr,
    /// The address that it was sent to, if the kernel says.
    pub to: Option<IpAddr>,
    /// Its type of service (IPv4) or traffic class (IPv6).
    pub traffic_class: u8,
}

/// Most datagrams of one [`UdpSocket::send_train`] (the kernel's `UDP_MAX_SEGMENTS` of old).
pub const TRAIN: usize = 64;
/// Their maximum bytes, including the kernel's headers.
const TRAIN_BYTES: usize = 65_000;
/// Most places of a [`RecvBatch`].
pub const PLACES: usize = 4;

/// Datagrams of one size and one sender, one behind the other; mostly a single one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Train {
    /// As for a single one, with the length of all together.
    pub arrival: Arrival,
    /// Bytes of each; the last may be shorter.
    pub each: usize,
}

/// Buffers for [`UdpSocket::recv_batch`], and the datagrams of the last call.
#[derive(Debug)]
pub struct RecvBatch {
    bytes: Box<[u8]>,
    headroom: usize,
    room: usize,
    places: usize,
    /// The last look found nothing.
    idle: bool,
    arrivals: Vec<Option<Train>>,
}

impl RecvBatch {
    /// `places` buffers (at most [`PLACES`]) of `room` bytes, each with `headroom` bytes in front. Longer datagrams are cut off.
    pub fn new(places: usize, headroom: usize, room: usize) -> RecvBatch {
        let places = places.clamp(1, PLACES);
        RecvBatch {
            bytes: vec![0; places * (headroom + room)].into_boxed_slice(),
            headroom,
            room,
            places,
            idle: false,
            arrivals: Vec::with_capacity(places),
        }
    }

    /// Datagrams, or trains of them, that came last.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// Buffers that it has.
    pub fn places(&self) -> usize {
        self.places
    }

    /// One of the received datagrams, and its buffer with the headroom before it: as long as the datagram, or as the room for it. `None` for
    /// a datagram without a sender.
    pub fn get(&mut self, at: usize) -> Option<(Train, &mut [u8])> {
        let train = (*self.arrivals.get(at)?)?;
        let slot = self.headroom + self.room;
        let len = self.headroom + train.arrival.len.min(self.room);
        Some((train, &mut self.bytes[at * slot..][..len]))
    }
}

/// The local address from which the kernel would send there.
///
/// # Errors
/// The kernel's error about the route.
pub fn source_of(to: SocketAddr) -> io::Result<IpAddr> {
    let family = if to.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let fd = net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    net::connect(&fd, &to)?;
    Ok(crate::tcp::local_addr(&fd)?.ip())
}

/// The longest IP packet that the way to an address takes, in bytes, as far as the kernel knows.
///
/// # Errors
/// The kernel's error about the route.
pub fn path_mtu(from: IpAddr, to: SocketAddr) -> io::Result<u32> {
    let socket = UdpSocket::bind(SocketAddr::new(from, 0), 0)?;
    socket.connect(to)?;
    let (level, option) = if to.is_ipv6() {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU)
    } else {
        (libc::IPPROTO_IP, libc::IP_MTU)
    };
    let mut mtu: libc::c_int = 0;
    let mut len = size_of_val(&mtu) as libc::socklen_t;
    let (fd, value) = (socket.fd.as_raw_fd(), &raw mut mtu);
    let length = &raw mut len;
    // SAFETY: the kernel writes at most `len` bytes to `mtu`, and the new length to `len`.
    retry(|| unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, option, value, length) })?;
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Whether datagrams to this address go to all hosts of a subnet: the limited broadcast address, or that of a subnet of ours.
///
/// # Errors
/// Those of `socket(2)`.
pub fn is_broadcast(ip: IpAddr) -> io::Result<bool> {
    let IpAddr::V4(ip) = ip.to_canonical() else {
        return Ok(false);
    };
    if ip.is_broadcast() || ip.is_unspecified() {
        return Ok(ip.is_broadcast());
    }
    // The kernel knows, and refuses a socket without the option.
    let flags = SocketFlags::CLOEXEC;
    let fd = net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    let refused = net::connect(&fd, &SocketAddr::from((ip, 9)));
    Ok(refused == Err(rustix::io::Errno::ACCESS))
}

impl UdpSocket {
    /// Binds an address (port 0: chosen by the kernel), exclusively; `[::]` includes IPv4. `buffer`: bytes that may wait to be received, as far as
    /// the system allows.
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

    /// As [`UdpSocket::bind`], with options for sharing the address.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_with(
        addr: SocketAddr,
        buffer: usize,
        options: BindOptions,
    ) -> io::Result<UdpSocket> {
        UdpSocket::make(addr, buffer, options, false)
    }

    fn make(
        addr: SocketAddr,
        buffer: usize,
        options: BindOptions,
        in_group: bool,
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
        // Both, because an IPv6 socket may receive IPv4. If the kernel does not report it, the class reads as 0.
        let _ = set_option(fd.as_fd(), libc::IPPROTO_IP, libc::IP_RECVTOS, &1);
        let _ = set_option(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, &1);
        if sockopt::set_socket_recv_buffer_size_force(&fd, buffer).is_err() {
            // Not privileged: within the system's limit.
            sockopt::set_socket_recv_buffer_size(&fd, buffer)?;
        }
        sockopt::set_socket_reuseaddr(&fd, options.share)?;
        sockopt::set_socket_broadcast(&fd, true)?;
        if in_group {
            sockopt::set_socket_reuseport(&fd, true)?;
        }
        let withheld = if in_group { withhold(&fd).ok() } else { None };
        net::bind(&fd, &addr)?;
        Ok(UdpSocket {
            withheld,
            fd,
            v6,
            gso: AtomicUsize::new(usize::MAX),
        })
    }

    /// Receives datagrams to this multicast group and port on any of these interfaces (their indexes), as other sockets of this host may too.
    /// Interfaces without room or multicast are left out as long as there are others. A broadcast address is received on every interface that
    /// has it.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`]; `NoSuchDevice` and the like when no interface is left; `InvalidInput` for another address.
    pub fn join(group: SocketAddr, interfaces: &[u32], buffer: usize) -> io::Result<UdpSocket> {
        let shared = BindOptions {
            v6_only: true,
            share: true,
        };
        if !group.ip().is_multicast() {
            if !is_broadcast(group.ip())? {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            return UdpSocket::bind_with(group, buffer, shared);
        }
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

    /// The socket's number, which no other socket of this boot has or will have (`SO_COOKIE`).
    ///
    /// # Errors
    /// Those of a kernel before 4.12.
    pub fn cookie(&self) -> io::Result<u64> {
        Ok(sockopt::socket_cookie(&self.fd)?)
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
        self.send_marked(bytes, to, from, 0)
    }

    /// As [`UdpSocket::send`], with a type of service (IPv4) or traffic class (IPv6); 0 is the socket's own.
    ///
    /// # Errors
    /// As there.
    pub fn send_marked(
        &self,
        bytes: &[u8],
        to: SocketAddr,
        from: Option<IpAddr>,
        traffic_class: u8,
    ) -> io::Result<()> {
        let mut route = Route::new(self.v6, to, from, traffic_class, None)?;
        self.send_one(bytes, &mut route)
    }

    fn send_one(&self, bytes: &[u8], route: &mut Route) -> io::Result<()> {
        let iov = iovec(bytes);
        let m = route.message(&iov);
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the message points at values and bytes that outlive the call; see above.
        retry(|| unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const m, flags) })?;
        Ok(())
    }

    /// Sends several datagrams that lie one behind the other in `bytes`: each of `each` bytes, but for the last, which may be shorter. At most
    /// [`TRAIN`] of them. The kernel cuts them where it can (`UDP_SEGMENT`), else it gets them in one system call. Returns how many bytes it has
    /// taken; those behind have to be sent again.
    ///
    /// # Errors
    /// As [`UdpSocket::send`], when it has taken none.
    pub fn send_train(
        &self,
        bytes: &[u8],
        each: usize,
        to: SocketAddr,
        from: Option<IpAddr>,
        traffic_class: u8,
    ) -> io::Result<usize> {
        if each == 0 || bytes.len() <= each {
            self.send_marked(bytes, to, from, traffic_class)?;
            return Ok(bytes.len());
        }
        if self.send_cut(bytes, each, to, from, traffic_class)? {
            return Ok(bytes.len());
        }
        self.send_each(bytes, each, to, from, traffic_class)
    }

    /// As [`UdpSocket::send_train`], all of them or none: false where the kernel cannot cut them.
    ///
    /// # Errors
    /// As [`UdpSocket::send`].
    pub fn send_cut(
        &self,
        bytes: &[u8],
        each: usize,
        to: SocketAddr,
        from: Option<IpAddr>,
        traffic_class: u8,
    ) -> io::Result<bool> {
        let Some(segment) = u16::try_from(each)
            .ok()
            .filter(|_| each <= self.gso.load(Ordering::Relaxed) && bytes.len() <= TRAIN_BYTES)
        else {
            return Ok(false);
        };
        let mut route = Route::new(self.v6, to, from, traffic_class, Some(segment))?;
        match self.send_one(bytes, &mut route) {
            Ok(()) => Ok(true),
            // Longer than the way's MTU, or the interface cannot compute the checksums: this way, or any.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP)
                ) =>
            {
                self.gso.fetch_min(each - 1, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`UdpSocket::send_train`], each by itself.
    ///
    /// # Errors
    /// As there.
    pub fn send_each(
        &self,
        bytes: &[u8],
        each: usize,
        to: SocketAddr,
        from: Option<IpAddr>,
        traffic_class: u8,
    ) -> io::Result<usize> {
        let mut route = Route::new(self.v6, to, from, traffic_class, None)?;
        let iovs: Vec<libc::iovec> = bytes.chunks(each).take(TRAIN).map(iovec).collect();
        let first = route.message(&iovs[0]);
        let message = |iov: &libc::iovec| libc::mmsghdr {
            msg_hdr: libc::msghdr {
                msg_iov: std::ptr::from_ref(iov).cast_mut(),
                ..first
            },
            msg_len: 0,
        };
        let mut messages: Vec<libc::mmsghdr> = iovs.iter().map(message).collect();
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        let sent = retry(|| {
            let (first, count) = (messages.as_mut_ptr(), messages.len());
            // SAFETY: the messages point at values and bytes that outlive the call; see above.
            unsafe { libc::syscall(libc::SYS_sendmmsg, fd, first, count, flags) }
        })?;
        Ok(bytes.len().min(sent * each))
    }

    /// From now on no datagram is cut up on its way; a longer one than the way takes is refused. IPv4 headers have the identification 0 then.
    ///
    /// # Errors
    /// None that are known.
    pub fn forbid_fragments(&self) -> io::Result<()> {
        sockopt::set_ip_mtu_discover(&self.fd, sockopt::Ipv4PathMtuDiscovery::DO)?;
        if self.v6 {
            sockopt::set_ipv6_mtu_discover(&self.fd, sockopt::Ipv6PathMtuDiscovery::DO)?;
        }
        Ok(())
    }

    /// From now on [`UdpSocket::recv_batch`] may get several datagrams of a sender as one (`UDP_GRO`), where the kernel knows how.
    pub fn receive_trains(&self) {
        let _ = set_option(self.fd.as_fd(), libc::SOL_UDP, libc::UDP_GRO, &1);
    }

    /// Bytes that may wait to be received, as the kernel counts them: those that it needs for itself as well.
    ///
    /// # Errors
    /// None that are known.
    pub fn receive_room(&self) -> io::Result<usize> {
        Ok(sockopt::socket_recv_buffer_size(&self.fd)?)
    }

    /// Receives what is there, as many datagrams (or trains of them) as the batch has places; but one only after a look that found nothing: who
    /// looks again and again waits for a first one, and it would wait for the kernel's look at a second.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; what the network says of one that was sent, once.
    pub fn recv_batch(&self, batch: &mut RecvBatch) -> io::Result<()> {
        let received = if batch.idle {
            self.recv_places::<1>(batch)
        } else {
            self.recv_places::<PLACES>(batch)
        };
        let none = |e: &io::Error| e.kind() == io::ErrorKind::WouldBlock;
        batch.idle = received.as_ref().is_err_and(none);
        received
    }

    fn recv_places<const N: usize>(&self, batch: &mut RecvBatch) -> io::Result<()> {
        let RecvBatch {
            bytes,
            headroom,
            room,
            arrivals,
            places,
            ..
        } = batch;
        let places = N.min(*places);
        arrivals.clear();
        let slot = *headroom + *room;
        let mut controls: [Control; N] = std::array::from_fn(|_| Control::default());
        let mut names: [MaybeUninit<libc::sockaddr_storage>; N] =
            [const { MaybeUninit::zeroed() }; N];
        // SAFETY: all zeros is the empty message, and no part of an address.
        let (mut messages, mut iovs): ([libc::mmsghdr; N], [libc::iovec; N]) = unsafe {
            (
                MaybeUninit::zeroed().assume_init(),
                MaybeUninit::zeroed().assume_init(),
            )
        };
        let buffers = bytes.chunks_exact_mut(slot).take(places);
        for (i, buffer) in buffers.enumerate() {
            let into = &mut buffer[*headroom..];
            iovs[i].iov_base = into.as_mut_ptr().cast();
            iovs[i].iov_len = into.len();
            let m = &mut messages[i].msg_hdr;
            m.msg_iov = &raw mut iovs[i];
            m.msg_iovlen = 1;
            m.msg_name = names[i].as_mut_ptr().cast();
            m.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            m.msg_control = controls[i].words.as_mut_ptr().cast();
            m.msg_controllen = size_of_val(&controls[i].words) as _;
        }
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        let none = std::ptr::null_mut::<libc::timespec>();
        let count = retry(|| {
            let first = messages.as_mut_ptr();
            // SAFETY: the messages point at buffers that outlive the call, with their lengths; see above.
            unsafe { libc::syscall(libc::SYS_recvmmsg, fd, first, places, flags, none) }
        })?;
        for (message, name) in messages.iter().zip(&names).take(count) {
            // SAFETY: zeros, or what the kernel wrote.
            let name = unsafe { name.assume_init_ref() };
            let told = told(&message.msg_hdr);
            let len = message.msg_len as usize;
            let whole = message.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            arrivals.push(peer(name).map(|from| {
                Train {
                    arrival: Arrival {
                        len,
                        from,
                        to: told.to,
                        traffic_class: told.traffic_class,
                    },
                    each: told
                        .segment
                        .filter(|&each| whole && each > 0)
                        .unwrap_or(len),
                }
            }));
        }
        Ok(())
    }

    /// Receives one datagram; what does not fit is cut off.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub fn recv(&self, into: &mut [u8]) -> io::Result<Arrival> {
        let mut control = Control::default();
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
        m.msg_control = control.words.as_mut_ptr().cast();
        m.msg_controllen = size_of_val(&control.words) as _;
        let fd = self.fd.as_raw_fd();
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: the message points at buffers that outlive the call, with their lengths; see above.
        let len = retry(|| unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut m, flags) })?;
        // SAFETY: zeros, or what the kernel wrote.
        let name = unsafe { name.assume_init() };
        let told = told(&m);
        Ok(Arrival {
            len,
            from: peer(&name).ok_or(io::ErrorKind::InvalidData)?,
            to: told.to,
            traffic_class: told.traffic_class,
        })
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// `value` is plain numbers.
pub(crate) fn set_option<T: Copy>(
    fd: BorrowedFd<'_>,
    level: i32,
    option: i32,
    value: &T,
) -> io::Result<()> {
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

fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// Where a message goes, in the kernel's form.
struct Route {
    name: Name,
    control: Control,
}

enum Name {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Route {
    /// From a socket of the family that `v6` says.
    fn new(
        v6: bool,
        to: SocketAddr,
        from: Option<IpAddr>,
        traffic_class: u8,
        segment: Option<u16>,
    ) -> io::Result<Route> {
        let mismatch = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut control = Control::default();
        let name = if v6 {
            let name = sockaddr_v6(match to {
                SocketAddr::V4(to) => SocketAddrV6::new(to.ip().to_ipv6_mapped(), to.port(), 0, 0),
                SocketAddr::V6(to) => to,
            });
            if let Some(from) = from {
                if from.is_ipv4() != to.ip().to_canonical().is_ipv4() {
                    return Err(mismatch());
                }
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr {
                        s6_addr: mapped(from).octets(),
                    },
                    // A group is one of an interface.
                    ipi6_ifindex: if name.sin6_addr.s6_addr[0] == 0xff {
                        name.sin6_scope_id as _
                    } else {
                        0
                    },
                };
                control.attach(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
            Name::V6(name)
        } else {
            let SocketAddr::V4(to) = to else {
                return Err(mismatch());
            };
            if let Some(from) = from {
                let IpAddr::V4(from) = from else {
                    return Err(mismatch());
                };
                let info = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: in_addr(from),
                    ipi_addr: in_addr(Ipv4Addr::UNSPECIFIED),
                };
                control.attach(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            Name::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as _,
                sin_port: to.port().to_be(),
                sin_addr: in_addr(*to.ip()),
                sin_zero: [0; 8],
            })
        };
        if traffic_class != 0 {
            let (level, kind) = if to.ip().to_canonical().is_ipv4() {
                (libc::IPPROTO_IP, libc::IP_TOS)
            } else {
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
            };
            control.attach(level, kind, libc::c_int::from(traffic_class));
        }
        if let Some(segment) = segment {
            control.attach(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        Ok(Route { name, control })
    }

    /// A message along it. It points at the route and at `iov`.
    fn message(&mut self, iov: &libc::iovec) -> libc::msghdr {
        // SAFETY: all zeros is the empty message.
        let mut m: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        m.msg_iov = std::ptr::from_ref(iov).cast_mut();
        m.msg_iovlen = 1;
        (m.msg_name, m.msg_namelen) = match &mut self.name {
            Name::V4(name) => (std::ptr::from_mut(name).cast(), size_of_val(name) as _),
            Name::V6(name) => (std::ptr::from_mut(name).cast(), size_of_val(name) as _),
        };
        if self.control.used > 0 {
            m.msg_control = self.control.words.as_mut_ptr().cast();
            m.msg_controllen = self.control.used as _;
        }
        m
    }
}

impl Control {
    /// Adds `value` to the ancillary data.
    fn attach<T: Copy>(&mut self, level: i32, kind: i32, value: T) {
        let len = size_of::<T>() as u32;
        let used = self.used;
        // SAFETY: these two only compute.
        let (space, end) = unsafe { (libc::CMSG_SPACE(len), libc::CMSG_LEN(len)) };
        self.used += space as usize;
        assert!(self.used <= size_of_val(&self.words));
        // SAFETY: there is room for one more header and value behind those that are there, whose space is a multiple of a word.
        unsafe {
            let header = self.words.as_mut_ptr().add(used / size_of::<u64>());
            let header = header.cast::<libc::cmsghdr>();
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            (*header).cmsg_len = end as _;
            libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        }
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

/// What a received message's ancillary data tells.
#[derive(Default)]
struct Told {
    /// Our address that it was sent to.
    to: Option<IpAddr>,
    traffic_class: u8,
    /// The length of each datagram of a train.
    segment: Option<usize>,
}

fn told(m: &libc::msghdr) -> Told {
    /// The value behind a header.
    ///
    /// # Safety
    /// A header within the control data that the kernel wrote, and a type of plain numbers.
    unsafe fn value<T: Copy>(header: *const libc::cmsghdr) -> Option<T> {
        // SAFETY: this only computes.
        let wanted = unsafe { libc::CMSG_LEN(size_of::<T>() as u32) } as _;
        // SAFETY: the caller's promise.
        let (has, at) = unsafe { ((*header).cmsg_len, libc::CMSG_DATA(header)) };
        // SAFETY: long enough, as just checked.
        (has >= wanted).then(|| unsafe { at.cast::<T>().read_unaligned() })
    }
    let mut told = Told::default();
    // SAFETY: the control data that the kernel wrote, as long as it said.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(m) };
    while !header.is_null() {
        // SAFETY: as above.
        match unsafe { ((*header).cmsg_level, (*header).cmsg_type) } {
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: as above.
                let info = unsafe { value::<libc::in6_pktinfo>(header) };
                told.to = info.map(|i| Ipv6Addr::from(i.ipi6_addr.s6_addr).to_canonical());
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: as above.
                let info = unsafe { value::<libc::in_pktinfo>(header) };
                told.to = info.map(|i| Ipv4Addr::from(i.ipi_addr.s_addr.to_ne_bytes()).into());
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                // SAFETY: as above.
                told.traffic_class = unsafe { value::<u8>(header) }.unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                // SAFETY: as above.
                let class = unsafe { value::<libc::c_int>(header) };
                told.traffic_class = class.map_or(0, |class| class as u8);
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                // SAFETY: as above.
                let each = unsafe { value::<libc::c_int>(header) };
                told.segment = each.and_then(|each| usize::try_from(each).ok());
            }
            _ => {}
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(m, header) };
    }
    told
}

#[cfg(test)]
mod tests;
