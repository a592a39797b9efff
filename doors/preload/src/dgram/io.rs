//! The calls that move bytes, for a descriptor that is not a TCP connection: a UDP socket, or a descriptor that weft does not follow.
//!
//! # Safety
//!
//! Each is as safe as its manual page says.

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;

use super::addr::To;
use super::rings::Out;
use super::rx::{KERNEL_ONLY, receive, receive_many};
use super::tx::{self, has_ring, went_by_kernel};
use super::{Dgram, addr, frames, of, unframed};
use crate::clock::TimeLimit;
use crate::iov::{is_bad, is_bad_list, is_optional, one, vector};
use crate::{kernel, next, set_errno};

fn bare(iov: &[iovec]) -> Out<'_> {
    Out {
        iov,
        name: null_mut(),
        name_len: null_mut(),
        header: null_mut(),
    }
}

/// # Safety
/// As `read(2)`.
pub(crate) unsafe fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        // A read of zero bytes consumes no datagram.
        let Some(d) = of(fd).filter(|_| n > 0) else {
            return next::read(fd, buf, n);
        };
        let iov = one(buf, n);
        receive(fd, d, &bare(&iov), 0, &|flags| {
            next::recv(fd, buf, n, flags)
        })
    }
}

/// # Safety
/// As `readv(2)`.
pub(crate) unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        let list = of(fd).and_then(|d| Some((d, vector(iov, n as usize)?)));
        let Some((d, list)) = list.filter(|(_, list)| list.iter().any(|one| one.iov_len > 0))
        else {
            return next::readv(fd, iov, n);
        };
        receive(fd, d, &bare(list), 0, &|flags| {
            kernel::receive(fd, list, flags)
        })
    }
}

/// `None`: it is for the kernel to answer.
///
/// # Safety
/// As `preadv2(2)`.
pub(crate) unsafe fn preadv2(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> Option<ssize_t> {
    /// The flags of the calls with lists: of these only `RWF_NOWAIT` means anything for a receive.
    const KNOWN: c_int = 0x3f;
    let d = of(fd).filter(|_| offset == -1 && flags & !KNOWN == 0)?;
    // SAFETY: the caller's promise.
    unsafe {
        let list = vector(iov, n as usize)?;
        if list.iter().all(|one| one.iov_len == 0) {
            return None;
        }
        let how = if flags & libc::RWF_NOWAIT != 0 {
            libc::MSG_DONTWAIT
        } else {
            0
        };
        let kernel = |more| kernel::receive(fd, list, how | more);
        Some(receive(fd, d, &bare(list), how, &kernel))
    }
}

/// # Safety
/// As `recvfrom(2)`.
pub(crate) unsafe fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
    name: *mut sockaddr,
    name_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        // Odd arguments are left to the kernel to judge, and do not touch the rings.
        let Some(d) = of(fd) else {
            return next::recvfrom(fd, buf, n, flags, name, name_len);
        };
        let odd = !name.is_null()
            && (is_bad(name_len) || *name_len > i32::MAX as u32 || !is_optional(name));
        let iov = one(buf, n);
        let out = Out {
            name,
            name_len: if name.is_null() { null_mut() } else { name_len },
            ..bare(&iov)
        };
        if odd {
            return if frames::looks_at(d) && flags & KERNEL_ONLY == 0 {
                unframed::receive(fd, d, &out, flags)
            } else {
                next::recvfrom(fd, buf, n, flags, name, name_len)
            };
        }
        receive(fd, d, &out, flags, &|more| {
            next::recvfrom(fd, buf, n, flags | more, name, name_len)
        })
    }
}

unsafe fn receive_message(
    fd: c_int,
    d: &'static Dgram,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        let kernel = |more| next::recvmsg(fd, message, flags | more);
        // The kernel refuses it before it looks for a datagram.
        let Some(list) = vector((*message).msg_iov, (*message).msg_iovlen) else {
            return kernel(0);
        };
        let out = Out {
            header: message,
            ..bare(list)
        };
        let is_odd = !is_optional((*message).msg_name) || !is_optional((*message).msg_control);
        if is_odd {
            return if frames::looks_at(d) && flags & KERNEL_ONLY == 0 {
                unframed::receive(fd, d, &out, flags)
            } else {
                kernel(0)
            };
        }
        receive(fd, d, &out, flags, &kernel)
    }
}

/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        match of(fd).filter(|_| !is_bad(message)) {
            Some(d) => receive_message(fd, d, message, flags),
            None => next::recvmsg(fd, message, flags),
        }
    }
}

/// # Safety
/// As `recvmmsg(2)`.
pub(crate) unsafe fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let call = || next::recvmmsg(fd, messages, n, flags, timeout);
        // The kernel fills no more.
        let most = n.min(1024) as usize;
        let Some(d) = of(fd).filter(|_| n > 0 && is_optional(timeout)) else {
            return call();
        };
        let is_short = is_bad_list(messages, most);
        if is_short && !frames::looks_at(d) {
            return call();
        }
        // Without rings one call of the kernel receives them all.
        if let Some(got) = receive_many(fd, d, call) {
            return got;
        }
        let limit = TimeLimit::begin(timeout.as_ref());
        let mut now = flags & !libc::MSG_WAITFORONE;
        let mut done = 0;
        for at in 0..most {
            let one = messages.add(at);
            if is_short && is_bad(one) {
                if at == 0 {
                    set_errno(libc::EFAULT);
                    return -1;
                }
                break;
            }
            if at > 0 && frames::looks_at(d) && !unframed::has_more(fd, d, now) {
                break;
            }
            let got = receive_message(fd, d, &raw mut (*one).msg_hdr, now);
            if got < 0 {
                if at == 0 {
                    return -1;
                }
                // The next call tells it.
                if frames::looks_at(d) && crate::errno() != libc::EAGAIN {
                    d.failed.store(crate::errno(), SeqCst);
                }
                return at as c_int;
            }
            (*one).msg_len = got as c_uint;
            done = at as c_int + 1;
            if flags & libc::MSG_WAITFORONE != 0 {
                now |= libc::MSG_DONTWAIT;
            }
            if limit.is_over(timeout.as_mut()) {
                break;
            }
        }
        done
    }
}

/// The destination as the program names it.
type Name = (*const c_void, socklen_t);
const NOBODY: Name = (std::ptr::null(), 0);

/// Sends a datagram by a ring, or to another host in a frame. `None`: it is for the kernel to send.
unsafe fn transmit(
    fd: c_int,
    d: &'static Dgram,
    to: To,
    iov: &[iovec],
    flags: c_int,
    name: Name,
) -> Option<ssize_t> {
    // SAFETY: the caller's promise.
    unsafe {
        tx::transmit(fd, d, to, iov, flags)
            .or_else(|| frames::transmit(fd, d, to, iov, flags, name))
    }
}

/// # Safety
/// As `send(2)`.
pub(crate) unsafe fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(d) = of(fd)
            && let Some(sent) = transmit(fd, d, To::Connected, &one(buf, n), flags, NOBODY)
        {
            return sent;
        }
        next::send(fd, buf, n, flags)
    }
}

/// # Safety
/// As `write(2)`.
pub(crate) unsafe fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(d) = of(fd)
            && let Some(sent) = transmit(fd, d, To::Connected, &one(buf, n), 0, NOBODY)
        {
            return sent;
        }
        next::write(fd, buf, n)
    }
}

/// # Safety
/// As `writev(2)`.
pub(crate) unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(d) = of(fd)
            && let Some(list) = vector(iov, n as usize)
            && let Some(sent) = transmit(fd, d, To::Connected, list, 0, NOBODY)
        {
            return sent;
        }
        next::writev(fd, iov, n)
    }
}

unsafe fn destination(d: &'static Dgram, name: *const c_void, len: socklen_t) -> To {
    if name.is_null() {
        return To::Connected;
    }
    // SAFETY: the caller's promise.
    match unsafe { addr::parse(name.cast(), len, d.v6.load(SeqCst)) } {
        Some(addr) => To::Addr(addr),
        None => To::Unclear,
    }
}

/// # Safety
/// As `sendto(2)`.
pub(crate) unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    name: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(d) = of(fd) {
            let to = destination(d, name.cast(), len);
            if let Some(sent) = transmit(fd, d, to, &one(buf, n), flags, (name.cast(), len)) {
                return sent;
            }
        }
        next::sendto(fd, buf, n, flags, name, len)
    }
}

unsafe fn send_message(
    fd: c_int,
    d: &'static Dgram,
    message: *const msghdr,
    flags: c_int,
) -> Option<ssize_t> {
    // SAFETY: the caller's promise.
    unsafe {
        let header = message.as_ref().filter(|_| !is_bad(message))?;
        let list = vector(header.msg_iov, header.msg_iovlen)?;
        let to = if header.msg_controllen > 0 && !header.msg_control.is_null() {
            // Source address, interface, segments...
            To::Unclear
        } else {
            destination(d, header.msg_name, header.msg_namelen)
        };
        let name = (header.msg_name.cast_const(), header.msg_namelen);
        transmit(fd, d, to, list, flags, name)
    }
}

/// # Safety
/// As `sendmsg(2)`.
pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(d) = of(fd)
            && let Some(sent) = send_message(fd, d, message, flags)
        {
            return sent;
        }
        next::sendmsg(fd, message, flags)
    }
}

/// # Safety
/// As `sendmmsg(2)`.
pub(crate) unsafe fn sendmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(d) = of(fd)
            .filter(|d| !d.is_plain() || frames::may_go(d))
            .filter(|_| n > 0 && !is_bad_list(messages, n as usize))
        else {
            return next::sendmmsg(fd, messages, n, flags);
        };
        if !has_ring(d) && !frames::may_go(d) {
            // One call of the kernel sends them all except the first, through which rings are set up.
            let first = send_message(fd, d, &raw const (*messages).msg_hdr, flags);
            let Some(sent) = first else {
                return next::sendmmsg(fd, messages, n, flags);
            };
            (*messages).msg_len = sent as c_uint;
            return 1;
        }
        for at in 0..n.min(1024) as usize {
            let one = messages.add(at);
            let header = &raw const (*one).msg_hdr;
            let sent = send_message(fd, d, header, flags)
                .unwrap_or_else(|| next::sendmsg(fd, header, flags));
            if sent < 0 {
                return if at == 0 { -1 } else { at as c_int };
            }
            (*one).msg_len = sent as c_uint;
        }
        n.min(1024) as c_int
    }
}

/// Prepares a call that always sends through the kernel.
pub(crate) fn by_kernel(fd: c_int) {
    if let Some(d) = of(fd) {
        went_by_kernel(d);
    }
}
