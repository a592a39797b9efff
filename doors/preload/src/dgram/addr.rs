//! Addresses in the form in which programs pass and receive them, and the destinations and sources of sends.
//!
//! # Safety
//!
//! The pointers are the program's, as its call's manual page says.

use libc::{c_int, c_void, msghdr, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use crate::iov::is_bad;
use crate::kernel::borrowed;

/// Flags of sends that a ring or a frame can carry out.
pub(super) const EASY: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_CONFIRM;

/// Destination of a datagram.
#[derive(Clone, Copy)]
pub(crate) enum To {
    Connected,
    Addr(SocketAddr),
    /// Only the kernel knows.
    Unclear,
}

/// The destination of a send, of the socket's own family; `None` for one that the kernel had better look at.
///
/// # Safety
/// `addr` has `len` bytes.
pub(crate) unsafe fn parse(addr: *const sockaddr, len: socklen_t, v6: bool) -> Option<SocketAddr> {
    let len = len as usize;
    if is_bad(addr) || len < size_of::<sa_family_t>() {
        return None;
    }
    // SAFETY: the caller's promise; each read is within `len`.
    unsafe {
        let family = c_int::from(addr.cast::<sa_family_t>().read_unaligned());
        if !v6 && family == libc::AF_INET && len >= size_of::<sockaddr_in>() {
            let addr = addr.cast::<sockaddr_in>().read_unaligned();
            let ip = Ipv4Addr::from(u32::from_be(addr.sin_addr.s_addr));
            return Some(SocketAddr::new(ip.into(), u16::from_be(addr.sin_port)));
        }
        if v6 && family == libc::AF_INET6 && len >= size_of::<sockaddr_in6>() {
            let addr = addr.cast::<sockaddr_in6>().read_unaligned();
            if addr.sin6_flowinfo != 0 || addr.sin6_scope_id != 0 {
                return None;
            }
            let ip = Ipv6Addr::from(addr.sin6_addr.s6_addr).to_canonical();
            return Some(SocketAddr::new(ip, u16::from_be(addr.sin6_port)));
        }
    }
    None
}

fn bytes(addr: SocketAddr, v6: bool) -> ([u8; size_of::<sockaddr_in6>()], usize) {
    let mut out = [0; size_of::<sockaddr_in6>()];
    out[2..4].copy_from_slice(&addr.port().to_be_bytes());
    if v6 {
        out[..2].copy_from_slice(&(libc::AF_INET6 as sa_family_t).to_ne_bytes());
        out[8..24].copy_from_slice(&mapped(addr.ip()).octets());
        return (out, size_of::<sockaddr_in6>());
    }
    out[..2].copy_from_slice(&(libc::AF_INET as sa_family_t).to_ne_bytes());
    if let IpAddr::V4(ip) = addr.ip().to_canonical() {
        out[4..8].copy_from_slice(&ip.octets());
    }
    (out, size_of::<sockaddr_in>())
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// Writes a source address as the kernel does: truncated to the room, with the full length reported. Returns that length.
///
/// # Safety
/// `to` has `room` bytes, or is null.
pub(crate) unsafe fn put(
    addr: SocketAddr,
    v6: bool,
    to: *mut c_void,
    room: socklen_t,
) -> socklen_t {
    let (bytes, len) = bytes(addr, v6);
    if !to.is_null() {
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), len.min(room as usize));
        }
    }
    len as socklen_t
}

/// Writes the ancillary message with the destination address of a datagram (`IP_PKTINFO`, `IPV6_PKTINFO`) on the loopback interface. Returns the
/// bytes used, and whether it was cut.
///
/// # Safety
/// The header's control buffer is as it says.
pub(crate) unsafe fn put_pktinfo(header: &msghdr, to: IpAddr, v6: bool) -> (usize, bool) {
    /// The loopback interface's number in every network namespace.
    const LOOPBACK: u32 = 1;
    let mut data = [0_u8; 20];
    let (level, kind, len) = if v6 {
        data[..16].copy_from_slice(&mapped(to).octets());
        data[16..20].copy_from_slice(&LOOPBACK.to_ne_bytes());
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20)
    } else {
        if let IpAddr::V4(ip) = to {
            data[..4].copy_from_slice(&LOOPBACK.to_ne_bytes());
            data[4..8].copy_from_slice(&ip.octets());
            data[8..12].copy_from_slice(&ip.octets());
        }
        (libc::IPPROTO_IP, libc::IP_PKTINFO, 12)
    };
    let room = header.msg_controllen;
    let head = size_of::<libc::cmsghdr>();
    if header.msg_control.is_null() || room < head {
        return (0, true);
    }
    // SAFETY: arithmetic only.
    let (whole, space) = unsafe { (libc::CMSG_LEN(len), libc::CMSG_SPACE(len)) };
    let (whole, space) = (whole as usize, space as usize);
    let told = whole.min(room);
    // SAFETY: the caller's promise; what is written is within `room`.
    unsafe {
        let at = header.msg_control.cast::<u8>();
        at.cast::<usize>().write_unaligned(told);
        at.add(8).cast::<c_int>().write_unaligned(level);
        at.add(12).cast::<c_int>().write_unaligned(kind);
        std::ptr::copy_nonoverlapping(data.as_ptr(), at.add(head), told - head);
    }
    (space.min(room), whole > room)
}

/// The address that the kernel would send from.
pub(super) fn source(fd: c_int, to: SocketAddr) -> Option<SocketAddr> {
    let own = weft_sys::tcp::local_addr(borrowed(fd)).ok()?;
    if !own.ip().to_canonical().is_unspecified() {
        return Some(own);
    }
    let ip = routed(to)?;
    Some(SocketAddr::new(ip, own.port()))
}

/// The address that a fresh socket gets when it is connected there.
fn routed(to: SocketAddr) -> Option<IpAddr> {
    Some(weft_sys::tcp::local_addr(connected(to)?).ok()?.ip())
}

/// A fresh socket that is connected there: it shows what the kernel knows of the way.
pub(super) fn connected(to: SocketAddr) -> Option<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
    let family = if to.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    connect(&socket, &to).ok()?;
    Some(socket)
}
