//! Socket addresses in C form.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use rustix::io::Errno;

/// The address at `addr`.
///
/// # Errors
/// `EFAULT` for a null pointer, `EINVAL` for a length too short, `EAFNOSUPPORT` for another family.
///
/// # Safety
/// `addr` is null or has `len` readable bytes.
pub unsafe fn read(addr: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    if addr.is_null() {
        return Err(Errno::FAULT);
    }
    let len = len as usize;
    if len < size_of::<libc::sa_family_t>() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the family is at the beginning, within `len`.
    let family = unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() };
    match i32::from(family) {
        libc::AF_INET if len >= size_of::<sockaddr_in>() => {
            // SAFETY: `len` bytes are readable, and any bytes are a `sockaddr_in`.
            let v4 = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(Errno::INVAL),
        _ => Err(Errno::AFNOSUPPORT),
    }
}

/// True for `AF_UNSPEC`, which dissolves the association of a datagram socket with its peer.
///
/// # Safety
/// As [`read`].
#[cfg(feature = "verbs")]
pub unsafe fn is_unspecified(addr: *const sockaddr, len: socklen_t) -> bool {
    if addr.is_null() || (len as usize) < size_of::<libc::sa_family_t>() {
        return false;
    }
    // SAFETY: the family is at the beginning, within `len`.
    let family = unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() };
    i32::from(family) == libc::AF_UNSPEC
}

/// Writes the address into `room` bytes at `to`, truncated if necessary, and returns its full length.
///
/// # Safety
/// `to` is null (nothing is written) or has `room` writable bytes.
pub unsafe fn write(addr: SocketAddr, to: *mut sockaddr, room: socklen_t) -> socklen_t {
    // SAFETY: all zero is a value of these structures.
    let (mut v4, mut v6): (sockaddr_in, sockaddr_in6) = unsafe { std::mem::zeroed() };
    let (from, len) = match addr {
        SocketAddr::V4(addr) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = addr.port().to_be();
            v4.sin_addr.s_addr = u32::from(*addr.ip()).to_be();
            ((&raw const v4).cast::<u8>(), size_of::<sockaddr_in>())
        }
        SocketAddr::V6(addr) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = addr.port().to_be();
            v6.sin6_addr.s6_addr = addr.ip().octets();
            v6.sin6_flowinfo = addr.flowinfo();
            v6.sin6_scope_id = addr.scope_id();
            ((&raw const v6).cast::<u8>(), size_of::<sockaddr_in6>())
        }
    };
    if !to.is_null() {
        // SAFETY: `len` bytes are there to read and at least the smaller number to write; ours are not the program's.
        unsafe { std::ptr::copy_nonoverlapping(from, to.cast(), len.min(room as usize)) };
    }
    len as socklen_t
}

/// Like [`write()`], with the room read from `len`, which is set to the length, as in `accept` and `getsockname`.
///
/// # Errors
/// `EFAULT` when `len` is null, or `to` although it has room.
///
/// # Safety
/// `len` is null or points to the number of writable bytes at `to`, which may be null.
pub unsafe fn write_with_len(
    addr: SocketAddr,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise; a null pointer is not read.
    if len.is_null() || to.is_null() && unsafe { *len } != 0 {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    unsafe { *len = write(addr, to, *len) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(addr: &str) {
        let addr: SocketAddr = addr.parse().unwrap();
        let mut bytes = [0_u8; 64];
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: 64 bytes.
        let len = unsafe { write(addr, to, 64) };
        // SAFETY: as above.
        assert_eq!(unsafe { read(to, len) }, Ok(addr));
        // SAFETY: as above.
        assert_eq!(unsafe { read(to, len - 1) }, Err(Errno::INVAL));
        assert!(bytes[len as usize..].iter().all(|&b| b == 0));
    }

    #[test]
    fn addresses_go_there_and_back() {
        there_and_back("127.0.0.1:4791");
        there_and_back("[fe80::1]:65535");
    }

    #[test]
    fn no_more_is_written_than_there_is_room() {
        let mut bytes = [0xaa_u8; 8];
        let (to, addr) = (bytes.as_mut_ptr(), "1.2.3.4:5".parse().unwrap());
        // SAFETY: 6 bytes of 8.
        let full = unsafe { write(addr, to.cast(), 6) };
        assert_eq!(full, 16);
        assert_eq!(bytes, [2, 0, 0, 5, 1, 2, 0xaa, 0xaa]);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let unix = [1_u8, 0, b'/', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let cases: [(*const u8, u32, Errno); 4] = [
            (std::ptr::null(), 16, Errno::FAULT),
            (unix.as_ptr(), 16, Errno::AFNOSUPPORT),
            (unix.as_ptr(), 1, Errno::INVAL),
            (unix.as_ptr(), 0, Errno::INVAL),
        ];
        for (addr, len, errno) in cases {
            // SAFETY: null, or 16 bytes.
            assert_eq!(unsafe { read(addr.cast(), len) }, Err(errno));
        }
    }
}
