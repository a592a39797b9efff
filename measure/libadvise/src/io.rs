//! The calls that move data.
//!
//! # Safety
//!
//! Each function as its manual page says.

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};

use weft_advise::record::Count;

use crate::watch::{Asked, Way, file, further, transfer};
use crate::{next, slot};

macro_rules! watched {
    ($($name:ident($fd:ident: c_int $(, $arg:ident: $type:ty)*), $way:ident, $asked:expr;)*) => { weft_sys::interpose! {"C-unwind" $(
        fn $name($fd: c_int $(, $arg: $type)*) -> ssize_t {
            let asked = $asked;
            transfer($fd, Way::$way, asked, || next::$name($fd $(, $arg)*))
        }
    )*}};
}

watched! {
    read(fd: c_int, buf: *mut c_void, n: size_t), Receives, Asked::new(buf, n, 0);
    recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int), Receives, Asked::new(buf, n, flags);
    recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t), Receives, Asked::new(buf, n, flags);
    __read_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t), Receives, Asked::new(buf, n, 0);
    __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t, flags: c_int), Receives, Asked::new(buf, n, flags);
    __recvfrom_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t), Receives, Asked::new(buf, n, flags);
    // SAFETY: the program's pieces.
    readv(fd: c_int, iov: *const iovec, n: c_int), Receives, unsafe { Asked::pieces(iov, usize::try_from(n).unwrap_or(0), 0) };
    // SAFETY: the program's message.
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int), Receives, unsafe { of_message(message, flags) };
    write(fd: c_int, buf: *const c_void, n: size_t), Sends, Asked::new(buf, n, 0);
    send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int), Sends, Asked::new(buf, n, flags);
    sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t), Sends, Asked::new(buf, n, flags);
    // SAFETY: the program's pieces.
    writev(fd: c_int, iov: *const iovec, n: c_int), Sends, unsafe { Asked::pieces(iov, usize::try_from(n).unwrap_or(0), 0) };
    // SAFETY: the program's message.
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int), Sends, unsafe { of_sent(message, flags) };
}

/// # Safety
/// `message` is a message, or null.
unsafe fn of_message(message: *const msghdr, flags: c_int) -> Asked {
    // SAFETY: the caller's promise.
    match unsafe { message.as_ref() } {
        // SAFETY: its pieces.
        Some(message) => unsafe { Asked::pieces(message.msg_iov, message.msg_iovlen, flags) },
        None => Asked::new(std::ptr::null(), 0, flags),
    }
}

/// The same; looks for descriptors that are passed on.
/// # Safety
/// `message` is a message, or null.
unsafe fn of_sent(message: *const msghdr, flags: c_int) -> Asked {
    // SAFETY: the caller's promise.
    if let Some(about) = unsafe { message.as_ref() }
        && about.msg_controllen >= size_of::<libc::cmsghdr>()
        // SAFETY: there is room for a header, and the program has filled it.
        && let Some(control) = unsafe { about.msg_control.cast::<libc::cmsghdr>().as_ref() }
        && (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS)
        && let Some(process) = slot::mine()
    {
        process.add(Count::Rights, 1);
    }
    // SAFETY: the caller's promise.
    unsafe { of_message(message, flags) }
}

/// The first of several messages.
/// # Safety
/// `messages` are `n` messages.
unsafe fn first(messages: *const mmsghdr, n: c_uint, flags: c_int) -> Asked {
    if n == 0 || messages.is_null() {
        return Asked::new(std::ptr::null(), 0, flags);
    }
    // SAFETY: the caller's promise.
    unsafe { of_message(&raw const (*messages).msg_hdr, flags) }
}

/// Runs a call of several messages: the first counts as the call, and the sizes of the others are recorded in addition.
fn several(
    fd: c_int,
    way: Way,
    asked: Asked,
    messages: *const mmsghdr,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let mut result = 0;
    // SAFETY: as many as the call says have been moved; each has its length.
    let moved = |at: usize| u64::from(unsafe { (*messages.add(at)).msg_len });
    transfer(fd, way, asked, || {
        result = call();
        if result > 0 {
            moved(0) as ssize_t
        } else {
            result as ssize_t
        }
    });
    if result > 1 {
        further(fd, way, (1..result as usize).map(moved));
    }
    result
}

weft_sys::interpose! {
    "C-unwind"

    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int {
        let asked = first(messages, n, flags);
        several(fd, Way::Sends, asked, messages, || next::sendmmsg(fd, messages, n, flags))
    }

    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        let asked = first(messages, n, flags);
        several(fd, Way::Receives, asked, messages, || next::recvmmsg(fd, messages, n, flags, timeout))
    }

    fn sendfile(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t {
        file([out, -1], || next::sendfile(out, from, offset, n))
    }

    fn sendfile64(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t {
        file([out, -1], || next::sendfile64(out, from, offset, n))
    }

    fn splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, n: size_t, flags: c_uint) -> ssize_t {
        file([to, from], || next::splice(from, from_offset, to, to_offset, n, flags))
    }
}
