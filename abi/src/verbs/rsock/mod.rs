//! The sockets of librdmacm: the calls that begin with `r`.
//!
//! A socket's number is that of a descriptor which the system gave us, so that it can be no other's. The library needs one of its own
//! beside it: what a program closes by mistake with `close` is only the number.
//!
//! Stream sockets only: `SOCK_DGRAM` is refused with `ESOCKTNOSUPPORT`.

mod option;
mod repoll;
mod table;
mod wait;

use std::ffi::{c_int, c_void};
use std::time::Duration;

use libc::{iovec, msghdr, off_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_rsockets::{RecvFlags, Shutdown, Sink, Socket, Source};
use weft_verbs::RawMemory;

use super::device::native;
use super::settings;
use crate::address;
use crate::call::{run, signed};

pub use option::{rfcntl, rgetsockopt, rsetsockopt};
pub use repoll::{repoll_create, repoll_ctl, repoll_wait};
use table::{Entry, find};
pub use wait::{rpoll, rselect};

/// Pieces of one call, as the system has it.
const MOST_PIECES: usize = 1024;

/// `rsocket`
pub fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    run(|| {
        let ipv6 = match domain {
            libc::AF_INET => false,
            libc::AF_INET6 => true,
            _ => return Err(Errno::AFNOSUPPORT),
        };
        let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
        match kind & !flags {
            libc::SOCK_STREAM => {}
            libc::SOCK_DGRAM => return Err(Errno::SOCKTNOSUPPORT),
            _ => return Err(Errno::OPNOTSUPP),
        }
        if protocol != 0 && protocol != libc::IPPROTO_TCP {
            return Err(Errno::PROTONOSUPPORT);
        }
        settings::check()?;
        let socket = Socket::new(&native()?, ipv6)?;
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

/// `rlisten`
pub fn rlisten(socket: c_int, backlog: c_int) -> c_int {
    run(|| {
        // As the system: no less than one, and not without end.
        let backlog = backlog.clamp(1, 4096);
        find(socket)?.socket.listen(backlog as u32).map(|()| 0)
    })
}

/// `raccept`
///
/// # Safety
/// As its manual page says.
pub unsafe fn raccept(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int {
    run(|| {
        let (accepted, peer) = find(socket)?.socket.accept()?;
        let fd = table::insert(Entry::new(accepted)?)?;
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
        // SAFETY: the caller's promise.
        let addr = unsafe { address::read(addr, addrlen) }?;
        entry.socket.connect(addr).map(|()| 0)
    })
}

/// `rshutdown`
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

/// `rclose`
pub fn rclose(socket: c_int) -> c_int {
    run(|| table::close(socket).map(|()| 0))
}

/// What the program gave for bytes, as memory of its own.
///
/// # Safety
/// The bytes are the program's to give, for the time of the call.
unsafe fn memory(buf: *const c_void, len: usize) -> Result<RawMemory, Errno> {
    // No object is longer, and the result could not be told.
    let len = len.min(isize::MAX as usize);
    // SAFETY: the caller's promise; whoever keeps the memory past the call says so where it does.
    unsafe { RawMemory::new(buf.cast_mut().cast(), len) }.ok_or(Errno::FAULT)
}

/// # Safety
/// As [`memory`], for each piece.
unsafe fn pieces(iov: *const iovec, count: usize) -> Result<SmallVec<[RawMemory; 8]>, Errno> {
    if count > MOST_PIECES {
        return Err(Errno::INVAL);
    }
    if iov.is_null() && count > 0 {
        return Err(Errno::FAULT);
    }
    (0..count)
        .map(|i| {
            // SAFETY: the caller's promise.
            let piece = unsafe { iov.add(i).read() };
            // SAFETY: as above.
            unsafe { memory(piece.iov_base, piece.iov_len) }
        })
        .collect()
}

fn recv(socket: c_int, to: &[RawMemory], flags: c_int) -> Result<ssize_t, Errno> {
    let entry = find(socket)?;
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let mut wanted = RecvFlags::empty();
    wanted.set(RecvFlags::DONTWAIT, flags & libc::MSG_DONTWAIT != 0);
    wanted.set(RecvFlags::PEEK, flags & libc::MSG_PEEK != 0);
    wanted.set(RecvFlags::WAITALL, flags & libc::MSG_WAITALL != 0);
    let mut sinks: SmallVec<[Sink<'_>; 8]> = to.iter().map(Sink::Raw).collect();
    entry.socket.recv(&mut sinks, wanted).map(signed)
}

fn send(socket: c_int, from: &[RawMemory], flags: c_int) -> Result<ssize_t, Errno> {
    let entry = find(socket)?;
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let sources: SmallVec<[Source<'_>; 8]> = from.iter().map(Source::Raw).collect();
    let dont_wait = flags & libc::MSG_DONTWAIT != 0;
    entry.socket.send(&sources, dont_wait).map(signed)
}

/// `rrecv`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rrecv(socket: c_int, buf: *mut c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    run(|| recv(socket, &[unsafe { memory(buf, len) }?], flags))
}

/// `rrecvfrom`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rrecvfrom(
    socket: c_int,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
    src_addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> ssize_t {
    run(|| {
        // SAFETY: the caller's promise.
        let n = recv(socket, &[unsafe { memory(buf, len) }?], flags)?;
        if n > 0 && !src_addr.is_null() && !addrlen.is_null() {
            let peer = find(socket)?.socket.peer_addr()?;
            // SAFETY: the caller's promise.
            unsafe { address::write_with_len(peer, src_addr, addrlen) }?;
        }
        Ok(n)
    })
}

/// `rrecvmsg`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    run(|| {
        if msg.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise.
        let of = unsafe { msg.read() };
        if !of.msg_control.is_null() && of.msg_controllen > 0 {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the caller's promise.
        let to = unsafe { pieces(of.msg_iov, of.msg_iovlen) }?;
        let n = recv(socket, &to, flags)?;
        // SAFETY: the caller's promise.
        unsafe { (&raw mut (*msg).msg_flags).write(0) };
        if !of.msg_name.is_null() && n > 0 {
            let peer = find(socket)?.socket.peer_addr()?;
            // SAFETY: the caller's promise.
            unsafe {
                let len = address::write(peer, of.msg_name.cast(), of.msg_namelen);
                (&raw mut (*msg).msg_namelen).write(len);
            }
        }
        Ok(n)
    })
}

/// `rread`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rread(socket: c_int, buf: *mut c_void, count: usize) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { rrecv(socket, buf, count, 0) }
}

/// `rreadv`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rreadv(socket: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t {
    run(|| {
        let count = usize::try_from(iovcnt).map_err(|_| Errno::INVAL)?;
        // SAFETY: the caller's promise.
        recv(socket, &unsafe { pieces(iov, count) }?, 0)
    })
}

/// `rsend`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsend(socket: c_int, buf: *const c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    run(|| send(socket, &[unsafe { memory(buf, len) }?], flags))
}

/// `rsendto`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsendto(
    socket: c_int,
    buf: *const c_void,
    len: usize,
    flags: c_int,
    dest_addr: *const sockaddr,
    addrlen: socklen_t,
) -> ssize_t {
    run(|| {
        if !dest_addr.is_null() || addrlen > 0 {
            return Err(Errno::ISCONN);
        }
        // SAFETY: the caller's promise.
        send(socket, &[unsafe { memory(buf, len) }?], flags)
    })
}

/// `rsendmsg`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsendmsg(socket: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    run(|| {
        if msg.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise.
        let of = unsafe { msg.read() };
        if !of.msg_control.is_null() && of.msg_controllen > 0 {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the caller's promise.
        let from = unsafe { pieces(of.msg_iov, of.msg_iovlen) }?;
        send(socket, &from, flags)
    })
}

/// `rwrite`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rwrite(socket: c_int, buf: *const c_void, count: usize) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { rsend(socket, buf, count, 0) }
}

/// `rwritev`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rwritev(socket: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t {
    run(|| {
        let count = usize::try_from(iovcnt).map_err(|_| Errno::INVAL)?;
        // SAFETY: the caller's promise.
        send(socket, &unsafe { pieces(iov, count) }?, 0)
    })
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
        let offset = entry.socket.map(&memory, writable, offset)?;
        isize::try_from(offset).map_err(|_| Errno::OVERFLOW)
    });
    mapped as off_t
}

/// `riounmap`
///
/// # Safety
/// As its manual page says.
pub unsafe fn riounmap(socket: c_int, buf: *mut c_void, len: usize) -> c_int {
    run(|| find(socket)?.socket.unmap(buf.addr(), len).map(|()| 0))
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
            .write_at(&[Source::Raw(&memory)], offset, dont_wait);
        written.map(signed)
    });
    written as usize
}

/// So far apart are signs of life where the program does not say, as the system has it for TCP.
fn usual_pulse() -> Duration {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_keepalive_time");
    let seconds = text.ok().and_then(|text| text.trim().parse().ok());
    Duration::from_secs(seconds.unwrap_or(7200))
}
