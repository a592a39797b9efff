//! The sockets of librdmacm: the calls that begin with `r`.
//!
//! A socket's number is that of a descriptor which the system allocated, so that it is unique. The library needs another, private descriptor: a program that
//! closes the number by mistake with `close` closes only the number.
//!
//! Streams are connections, datagram sockets datagram queue pairs ([`weft_rsockets::DatagramSocket`]).

mod message;
mod option;
mod repoll;
mod table;
mod wait;

use std::ffi::{c_int, c_void};

use libc::{off_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use weft_rsockets::{DatagramSocket, Shutdown, Socket, Source};

use super::native::native;
use super::settings;
use crate::address;
use crate::call::{run, signed};

use message::memory;
pub use message::{
    rread, rreadv, rrecv, rrecvfrom, rrecvmsg, rsend, rsendmsg, rsendto, rwrite, rwritev,
};
pub use option::{rfcntl, rgetsockopt, rsetsockopt};
pub use repoll::{repoll_create, repoll_ctl, repoll_wait};
use table::{Entry, Kind, find};
pub use wait::{rpoll, rselect};

pub fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    run(|| {
        let ipv6 = match domain {
            libc::AF_INET => false,
            libc::AF_INET6 => true,
            _ => return Err(Errno::AFNOSUPPORT),
        };
        let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
        let usual = match kind & !flags {
            libc::SOCK_STREAM => libc::IPPROTO_TCP,
            libc::SOCK_DGRAM => libc::IPPROTO_UDP,
            _ => return Err(Errno::OPNOTSUPP),
        };
        if protocol != 0 && protocol != usual {
            return Err(Errno::PROTONOSUPPORT);
        }
        settings::check()?;
        let device = native()?;
        let socket = if usual == libc::IPPROTO_TCP {
            Kind::Stream(Socket::new(&device, ipv6)?)
        } else {
            Kind::Datagram(Box::new(DatagramSocket::new(&device, ipv6)?))
        };
        socket.set_options(option::defaults);
        let entry = Entry::new(socket)?;
        entry.set_nonblock(flags & libc::SOCK_NONBLOCK != 0);
        table::insert(entry)
    })
}

/// `rbind`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rbind(socket: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int {
    run(|| {
        let entry = find(socket)?;
        // SAFETY: the caller's promise.
        let addr = unsafe { address::read(addr, addrlen) }?;
        entry.socket.bind(addr).map(|()| 0)
    })
}

pub fn rlisten(socket: c_int, backlog: c_int) -> c_int {
    run(|| {
        // As the system does: at least one, and bounded.
        let backlog = backlog.clamp(1, 4096);
        find(socket)?.socket.stream()?.listen(backlog as u32)?;
        Ok(0)
    })
}

/// `raccept`
///
/// # Safety
/// As its manual page says.
pub unsafe fn raccept(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int {
    run(|| {
        let (accepted, peer) = find(socket)?.socket.stream()?.accept()?;
        let fd = table::insert(Entry::new(Kind::Stream(accepted))?)?;
        if !addr.is_null() && !addrlen.is_null() {
            // SAFETY: the caller's promise.
            unsafe { address::write_with_len(peer, addr, addrlen) }?;
        }
        Ok(fd)
    })
}

/// `rconnect`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rconnect(socket: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int {
    run(|| {
        let entry = find(socket)?;
        let to = || {
            // SAFETY: the caller's promise.
            unsafe { address::read(addr, addrlen) }
        };
        match &entry.socket {
            Kind::Stream(socket) => socket.connect(to()?)?,
            Kind::Datagram(socket) => {
                // SAFETY: the caller's promise.
                let none = unsafe { address::is_unspecified(addr, addrlen) };
                socket.connect(if none { None } else { Some(to()?) })?;
            }
        }
        Ok(0)
    })
}

pub fn rshutdown(socket: c_int, how: c_int) -> c_int {
    run(|| {
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            _ => return Err(Errno::INVAL),
        };
        find(socket)?.socket.shutdown(how).map(|()| 0)
    })
}

pub fn rclose(socket: c_int) -> c_int {
    run(|| table::close(socket).map(|()| 0))
}

/// `rgetpeername`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rgetpeername(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int {
    run(|| {
        let peer = find(socket)?.socket.peer_addr()?;
        // SAFETY: the caller's promise.
        unsafe { address::write_with_len(peer, addr, addrlen) }?;
        Ok(0)
    })
}

/// `rgetsockname`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rgetsockname(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int {
    run(|| {
        let own = find(socket)?.socket.local_addr()?;
        // SAFETY: the caller's promise.
        unsafe { address::write_with_len(own, addr, addrlen) }?;
        Ok(0)
    })
}

/// `riomap`
///
/// # Safety
/// As its manual page says: the memory stays until it is unmapped, or the socket closed.
pub unsafe fn riomap(
    socket: c_int,
    buf: *mut c_void,
    len: usize,
    prot: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    let mapped: isize = run(|| {
        let entry = find(socket)?;
        if prot & !libc::PROT_WRITE != 0 || len == 0 {
            return Err(Errno::INVAL);
        }
        let offset = match offset {
            -1 => None,
            offset => Some(u64::try_from(offset).map_err(|_| Errno::INVAL)?),
        };
        // SAFETY: the caller's promise.
        let memory = unsafe { memory(buf, len) }?;
        let writable = prot & libc::PROT_WRITE != 0;
        let offset = entry.socket.stream()?.map(&memory, writable, offset)?;
        isize::try_from(offset).map_err(|_| Errno::OVERFLOW)
    });
    mapped as off_t
}

/// `riounmap`
///
/// # Safety
/// As its manual page says.
pub unsafe fn riounmap(socket: c_int, buf: *mut c_void, len: usize) -> c_int {
    run(|| {
        let entry = find(socket)?;
        entry.socket.stream()?.unmap(buf.addr(), len).map(|()| 0)
    })
}

/// `riowrite`
///
/// # Safety
/// As its manual page says.
pub unsafe fn riowrite(
    socket: c_int,
    buf: *const c_void,
    count: usize,
    offset: off_t,
    flags: c_int,
) -> usize {
    let written: ssize_t = run(|| {
        let entry = find(socket)?;
        let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
        // SAFETY: the caller's promise.
        let memory = unsafe { memory(buf, count) }?;
        let dont_wait = flags & libc::MSG_DONTWAIT != 0;
        let written = entry
            .socket
            .stream()?
            .write_at(&[Source::Raw(&memory)], offset, dont_wait);
        written.map(signed)
    });
    written as usize
}
