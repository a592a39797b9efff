//! Sends and receives.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;

use libc::{iovec, msghdr, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_rsockets::{RecvFlags, Sink, Source};
use weft_verbs::RawMemory;

use super::table::{Kind, find};
use crate::address;
use crate::call::{run, signed};

/// The maximum number of pieces of one call, as in the system.
const MOST_PIECES: usize = 1024;

/// The program's buffer.
///
/// # Safety
/// The program may pass these bytes for the time of the call.
pub(super) unsafe fn memory(buf: *const c_void, len: usize) -> Result<RawMemory, Errno> {
    // No object is longer, and the result could not represent more.
    let len = len.min(isize::MAX as usize);
    // SAFETY: the caller's promise; a caller that keeps the memory past the call justifies that itself.
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

/// The result of a receive.
struct Told {
    /// The return value of the call.
    result: ssize_t,
    /// The message was longer than the memory.
    cut: bool,
    /// The sender; `None` at a stream's end.
    from: Option<SocketAddr>,
}

fn recv(socket: c_int, to: &[RawMemory], flags: c_int) -> Result<Told, Errno> {
    let entry = find(socket)?;
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let mut wanted = RecvFlags::empty();
    wanted.set(RecvFlags::DONTWAIT, flags & libc::MSG_DONTWAIT != 0);
    wanted.set(RecvFlags::PEEK, flags & libc::MSG_PEEK != 0);
    wanted.set(RecvFlags::WAITALL, flags & libc::MSG_WAITALL != 0);
    let mut sinks: SmallVec<[Sink<'_>; 8]> = to.iter().map(Sink::Raw).collect();
    match &entry.socket {
        Kind::Stream(socket) => {
            let n = socket.recv(&mut sinks, wanted)?;
            Ok(Told {
                result: signed(n),
                cut: false,
                from: if n > 0 { socket.peer_addr().ok() } else { None },
            })
        }
        Kind::Datagram(socket) => {
            let message = socket.recv(&mut sinks, wanted)?;
            let whole = flags & libc::MSG_TRUNC != 0;
            Ok(Told {
                result: signed(message.map_or(0, |m| if whole { m.full } else { m.len })),
                cut: message.is_some_and(|m| m.full > m.len),
                from: message.map(|m| m.from),
            })
        }
    }
}

fn send(
    socket: c_int,
    from: &[RawMemory],
    to: Option<SocketAddr>,
    flags: c_int,
) -> Result<ssize_t, Errno> {
    let entry = find(socket)?;
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let sources: SmallVec<[Source<'_>; 8]> = from.iter().map(Source::Raw).collect();
    let dont_wait = flags & libc::MSG_DONTWAIT != 0;
    let sent = match &entry.socket {
        Kind::Stream(_) if to.is_some() => return Err(Errno::ISCONN),
        Kind::Stream(socket) => socket.send(&sources, dont_wait),
        Kind::Datagram(socket) => socket.send(&sources, to, dont_wait),
    };
    sent.map(signed)
}

/// The destination of a message, if the program passes one.
///
/// # Safety
/// As `sendto(2)` requires of an address and its length.
unsafe fn destination(addr: *const sockaddr, len: socklen_t) -> Result<Option<SocketAddr>, Errno> {
    if addr.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { address::read(addr, len) }.map(Some)
}

/// The parts of a message. Ancillary data is not supported.
///
/// # Safety
/// Null, or as the manual pages say.
unsafe fn header(msg: *const msghdr) -> Result<msghdr, Errno> {
    if msg.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let of = unsafe { msg.read() };
    if !of.msg_control.is_null() && of.msg_controllen > 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(of)
}

/// `rrecv`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rrecv(socket: c_int, buf: *mut c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    run(|| Ok(recv(socket, &[unsafe { memory(buf, len) }?], flags)?.result))
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
        let told = recv(socket, &[unsafe { memory(buf, len) }?], flags)?;
        if let Some(peer) = told.from
            && !src_addr.is_null()
            && !addrlen.is_null()
        {
            // SAFETY: the caller's promise.
            unsafe { address::write_with_len(peer, src_addr, addrlen) }?;
        }
        Ok(told.result)
    })
}

/// `rrecvmsg`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    run(|| {
        // SAFETY: the caller's promise.
        let of = unsafe { header(msg) }?;
        // SAFETY: the caller's promise.
        let to = unsafe { pieces(of.msg_iov, of.msg_iovlen) }?;
        let told = recv(socket, &to, flags)?;
        let cut = if told.cut { libc::MSG_TRUNC } else { 0 };
        // SAFETY: the caller's promise.
        unsafe { (&raw mut (*msg).msg_flags).write(cut) };
        if let Some(peer) = told.from
            && !of.msg_name.is_null()
        {
            // SAFETY: the caller's promise.
            unsafe {
                let len = address::write(peer, of.msg_name.cast(), of.msg_namelen);
                (&raw mut (*msg).msg_namelen).write(len);
            }
        }
        Ok(told.result)
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
        Ok(recv(socket, &unsafe { pieces(iov, count) }?, 0)?.result)
    })
}

/// `rsend`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsend(socket: c_int, buf: *const c_void, len: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    run(|| send(socket, &[unsafe { memory(buf, len) }?], None, flags))
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
        // SAFETY: the caller's promise.
        let to = unsafe { destination(dest_addr, addrlen) }?;
        // SAFETY: the caller's promise.
        send(socket, &[unsafe { memory(buf, len) }?], to, flags)
    })
}

/// `rsendmsg`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsendmsg(socket: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    run(|| {
        // SAFETY: the caller's promise.
        let of = unsafe { header(msg) }?;
        // SAFETY: the caller's promise.
        let from = unsafe { pieces(of.msg_iov, of.msg_iovlen) }?;
        // SAFETY: the caller's promise.
        let to = unsafe { destination(of.msg_name.cast(), of.msg_namelen) }?;
        send(socket, &from, to, flags)
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
        send(socket, &unsafe { pieces(iov, count) }?, None, 0)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{
        rbind, rclose, rconnect, rgetpeername, rgetsockname, rgetsockopt, rlisten, rsetsockopt,
        rsocket,
    };
    use super::*;

    fn errno() -> Option<Errno> {
        Errno::from_io_error(&std::io::Error::last_os_error())
    }

    fn any_port() -> libc::sockaddr_in {
        // SAFETY: all zero is a value of it.
        let mut addr: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        addr.sin_family = libc::AF_INET as libc::sa_family_t;
        addr.sin_addr.s_addr = u32::from(std::net::Ipv4Addr::LOCALHOST).to_be();
        addr
    }

    const ADDR_LEN: socklen_t = size_of::<libc::sockaddr_in>() as socklen_t;

    /// A socket that has an address, and that.
    fn bound() -> (c_int, libc::sockaddr_in) {
        let fd = rsocket(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_UDP);
        assert!(fd >= 0, "{:?}", errno());
        let mut addr = any_port();
        let mut len = ADDR_LEN;
        let place = &raw mut addr;
        // SAFETY: an address and its length, room for one.
        unsafe {
            assert_eq!(rbind(fd, place.cast(), len), 0);
            assert_eq!(rgetsockname(fd, place.cast(), &raw mut len), 0);
        }
        (fd, addr)
    }

    fn number(fd: c_int, level: c_int, option: c_int) -> Option<c_int> {
        let (mut value, mut len) = (-1, size_of::<c_int>() as socklen_t);
        let place: *mut c_int = &raw mut value;
        // SAFETY: room for the value, and its length.
        let result = unsafe { rgetsockopt(fd, level, option, place.cast(), &raw mut len) };
        (result == 0).then_some(value)
    }

    #[test]
    fn datagram_sockets_as_c_calls_them() {
        let tcp = rsocket(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_TCP);
        assert_eq!((tcp, errno()), (-1, Some(Errno::PROTONOSUPPORT)));
        let ((a, a_addr), (b, b_addr)) = (bound(), bound());
        assert_eq!(
            number(a, libc::SOL_SOCKET, libc::SO_TYPE),
            Some(libc::SOCK_DGRAM)
        );
        assert_eq!(
            number(a, libc::SOL_SOCKET, libc::SO_PROTOCOL),
            Some(libc::IPPROTO_UDP)
        );
        assert_eq!(number(a, libc::IPPROTO_TCP, libc::TCP_NODELAY), None);
        assert_eq!((rlisten(a, 1), errno()), (-1, Some(Errno::OPNOTSUPP)));
        let limit = libc::timeval {
            tv_sec: 30,
            tv_usec: 0,
        };
        let len = size_of::<libc::timeval>() as socklen_t;
        let mut bytes = [0_u8; 4];
        let (mut from, mut from_len) = (any_port(), ADDR_LEN);
        let from_place = (&raw mut from).cast();
        let to = (&raw const b_addr).cast();
        // SAFETY: buffers with their lengths.
        unsafe {
            let limit = (&raw const limit).cast();
            assert_eq!(
                rsetsockopt(b, libc::SOL_SOCKET, libc::SO_RCVTIMEO, limit, len),
                0
            );
            assert_eq!(rsend(a, c"x".as_ptr().cast(), 1, 0), -1);
            assert_eq!(errno(), Some(Errno::DESTADDRREQ));
            // Cut off; with the full length if the program asks for it.
            for (flags, told) in [(0, 4), (libc::MSG_TRUNC, 5)] {
                assert_eq!(rsendto(a, c"hello".as_ptr().cast(), 5, 0, to, ADDR_LEN), 5);
                let place = bytes.as_mut_ptr().cast();
                assert_eq!(
                    rrecvfrom(b, place, 4, flags, from_place, &raw mut from_len),
                    told
                );
                assert_eq!((&bytes, from.sin_port), (b"hell", a_addr.sin_port));
            }
            let mut piece = iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: 4,
            };
            let mut msg: msghdr = std::mem::zeroed();
            msg.msg_name = from_place.cast();
            msg.msg_namelen = ADDR_LEN;
            msg.msg_iov = &raw mut piece;
            msg.msg_iovlen = 1;
            for (text, cut) in [(c"whole", libc::MSG_TRUNC), (c"four", 0)] {
                let len = text.count_bytes();
                assert_eq!(
                    rsendto(a, text.as_ptr().cast(), len, 0, to, ADDR_LEN),
                    len as isize
                );
                assert_eq!(rrecvmsg(b, &raw mut msg, 0), 4);
                assert_eq!((msg.msg_flags, msg.msg_namelen), (cut, ADDR_LEN));
            }
            // With a peer, and without one again.
            assert_eq!(rconnect(a, to, ADDR_LEN), 0);
            assert_eq!(rwrite(a, c"peer".as_ptr().cast(), 4), 4);
            assert_eq!(rread(b, bytes.as_mut_ptr().cast(), 4), 4);
            assert_eq!(&bytes, b"peer");
            let mut none = any_port();
            none.sin_family = libc::AF_UNSPEC as libc::sa_family_t;
            assert_eq!(rconnect(a, (&raw const none).cast(), ADDR_LEN), 0);
            assert_eq!(rgetpeername(a, from_place, &raw mut from_len), -1);
            assert_eq!(errno(), Some(Errno::NOTCONN));
            let flags = libc::MSG_DONTWAIT;
            assert_eq!(rrecv(b, bytes.as_mut_ptr().cast(), 4, flags), -1);
            assert_eq!(errno(), Some(Errno::AGAIN));
        }
        assert_eq!((rclose(a), rclose(b)), (0, 0));
    }
}
