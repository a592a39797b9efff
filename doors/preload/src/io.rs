//! The calls that move bytes.
//!
//! # Safety
//!
//! Each is as safe as its manual page says.

use libc::{
    c_char, c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};
use std::ffi::CStr;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::Route;
use weft_run::meet::Why;

use crate::clock::TimeLimit;
use crate::iov::{MAX_RW, Source, is_bad, is_bad_list, is_optional, one, total, vector};
use crate::lend::memory::{is_active, settle, settle_all};
use crate::rx::receive;
use crate::tx::transmit;
use crate::{conn, dgram, kernel, next, return_to_tcp, ring_poll};

weft_sys::interpose! {
    "C-unwind"

    fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
        settle(buf, n);
        // The kernel refuses a length that no buffer has.
        if n == 0 || n > isize::MAX as usize || conn::of(fd).is_none() {
            return dgram::io::read(fd, buf, n);
        }
        receive(fd, &one(buf, n), 0, || next::read(fd, buf, n))
    }

    fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t) -> ssize_t {
        if n > room { libc::abort(); }
        read(fd, buf, n)
    }

    fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
        if let Some(list) = vector(iov, n as usize) { settle_all(list); }
        if conn::of(fd).is_none() {
            return dgram::io::readv(fd, iov, n);
        }
        match vector(iov, n as usize) {
            Some(list) if list.iter().any(|one| one.iov_len > 0) => receive(fd, list, 0, || next::readv(fd, iov, n)),
            _ => next::readv(fd, iov, n),
        }
    }

    fn recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t {
        settle(buf, n);
        if conn::of(fd).is_none() {
            return dgram::io::recvfrom(fd, buf, n, flags, std::ptr::null_mut(), std::ptr::null_mut());
        }
        receive(fd, &one(buf, n), flags, || next::recv(fd, buf, n, flags))
    }

    fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t, flags: c_int) -> ssize_t {
        if n > room { libc::abort(); }
        recv(fd, buf, n, flags)
    }

    fn recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t {
        settle(buf, n);
        if conn::of(fd).is_none() {
            return dgram::io::recvfrom(fd, buf, n, flags, addr, len);
        }
        // TCP returns no address.
        if !is_optional(len) { return next::recvfrom(fd, buf, n, flags, addr, len); }
        let asked = if len.is_null() { 0 } else { *len };
        if !len.is_null() && !addr.is_null() { *len = 0; }
        let got = receive(fd, &one(buf, n), flags, || {
            if !len.is_null() { *len = asked; }
            next::recvfrom(fd, buf, n, flags, addr, len)
        });
        if got < 0 && !len.is_null() { *len = asked; }
        got
    }

    fn __recvfrom_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t {
        if n > room { libc::abort(); }
        recvfrom(fd, buf, n, flags, addr, len)
    }

    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        settle_message(message);
        if conn::of(fd).is_none() || is_bad(message) {
            return dgram::io::recvmsg(fd, message, flags);
        }
        receive_message(fd, message, flags)
    }

    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        // Into a list that ends early the kernel receives what it has room for.
        let most = n.min(1024) as usize;
        let is_short = is_bad_list(messages, most);
        if !is_optional(timeout) || is_short && dgram::of(fd).is_none() { return next::recvmmsg(fd, messages, n, flags, timeout); }
        for one in (0..most).map(|at| messages.add(at)) {
            if is_short && is_bad(one) { break; }
            settle_message(&raw mut (*one).msg_hdr);
        }
        if conn::of(fd).is_none() || n == 0 {
            return dgram::io::recvmmsg(fd, messages, n, flags, timeout);
        }
        // The kernel looks for an error of the socket before anything else.
        match kernel::number(fd, libc::SO_ERROR) {
            None | Some(0) => {}
            Some(errno) => { crate::set_errno(errno); return -1; }
        }
        // Only the first one waits; the others receive the bytes that are there.
        let mut flags_now = flags & !libc::MSG_WAITFORONE;
        let limit = TimeLimit::begin(timeout.as_ref());
        for at in 0..n as usize {
            let one = messages.add(at);
            let got = receive_message(fd, &raw mut (*one).msg_hdr, flags_now);
            // At the end of the stream there are as many messages as are asked for, without bytes.
            if got < 0 { return if at == 0 { -1 } else { at as c_int }; }
            (*one).msg_len = got as c_uint;
            if flags & libc::MSG_WAITFORONE != 0 { flags_now |= libc::MSG_DONTWAIT; }
            if limit.is_over(timeout.as_mut()) { return at as c_int + 1; }
        }
        n as c_int
    }

    fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
        if n == 0 || conn::of(fd).is_none() {
            return dgram::io::write(fd, buf, n);
        }
        transmit(fd, &Source::Memory(&one(buf, n)), 0, || next::write(fd, buf, n))
    }

    fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
        if conn::of(fd).is_none() {
            return dgram::io::writev(fd, iov, n);
        }
        match vector(iov, n as usize) {
            Some(list) if list.iter().any(|one| one.iov_len > 0) => {
                transmit(fd, &Source::Memory(list), 0, || next::writev(fd, iov, n))
            }
            _ => next::writev(fd, iov, n),
        }
    }

    fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t {
        if conn::of(fd).is_none() || n == 0 {
            return dgram::io::send(fd, buf, n, flags);
        }
        transmit(fd, &Source::Memory(&one(buf, n)), flags, || next::send(fd, buf, n, flags))
    }

    fn sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t) -> ssize_t {
        if conn::of(fd).is_none() || n == 0 {
            return dgram::io::sendto(fd, buf, n, flags, addr, len);
        }
        if is_fast_open(fd, flags) {
            return next::sendto(fd, buf, n, flags, addr, len);
        }
        // The kernel judges the name by a send of no bytes.
        if !addr.is_null() && next::sendto(fd, buf, 0, flags, addr, len) < 0 {
            return -1;
        }
        transmit(fd, &Source::Memory(&one(buf, n)), flags, || next::sendto(fd, buf, n, flags, addr, len))
    }

    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        if !is_bad(message) && (*message).msg_controllen > 0 && !is_bad((*message).msg_control) {
            passing(message);
        }
        if conn::of(fd).is_none() || is_bad(message) {
            return dgram::io::sendmsg(fd, message, flags);
        }
        send_message(fd, message, flags)
    }

    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int {
        if is_bad_list(messages, n as usize) { return next::sendmmsg(fd, messages, n, flags); }
        if conn::of(fd).is_none() || n == 0 {
            for at in 0..n.min(1024) as usize {
                let header = &raw const (*messages.add(at)).msg_hdr;
                if (*header).msg_controllen > 0 && !is_bad((*header).msg_control) { passing(header); }
            }
            return dgram::io::sendmmsg(fd, messages, n, flags);
        }
        let n = n.min(libc::UIO_MAXIOV as c_uint) as usize;
        for at in 0..n {
            let one = messages.add(at);
            let header = &raw const (*one).msg_hdr;
            let sent = send_message(fd, header, flags);
            if sent < 0 {
                return if at == 0 { -1 } else { at as c_int };
            }
            (*one).msg_len = sent as c_uint;
            // The next message would come behind a gap.
            if vector((*header).msg_iov, (*header).msg_iovlen).is_some_and(|iov| (sent as usize) < total(iov)) {
                return at as c_int + 1;
            }
        }
        n as c_int
    }

    fn sendfile(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t {
        send_file(out, from, offset, n)
    }

    fn sendfile64(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t {
        send_file(out, from, offset, n)
    }

    fn preadv2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
        preadv64v2(fd, iov, n, offset, flags)
    }

    fn preadv64v2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
        let real = || next::preadv64v2(fd, iov, n, offset, flags);
        match at_position(fd, iov, n, offset, flags) {
            Some((list, flags)) => { settle_all(list); receive(fd, list, flags, real) }
            None => dgram::io::preadv2(fd, iov, n, offset, flags).unwrap_or_else(real),
        }
    }

    fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
        pwritev64v2(fd, iov, n, offset, flags)
    }

    fn pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
        let real = || next::pwritev64v2(fd, iov, n, offset, flags);
        match at_position(fd, iov, n, offset, flags) {
            Some((list, flags)) => transmit(fd, &Source::Memory(list), flags, real),
            None => real(),
        }
    }

    fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
        writes_by_stdio(fd);
        next::vdprintf(fd, format, list)
    }

    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int {
        writes_by_stdio(fd);
        next::__vdprintf_chk(fd, flag, format, list)
    }

    fn aio_read(block: *mut c_void) -> c_int { aio_read64(block) }

    fn aio_read64(block: *mut c_void) -> c_int {
        by_aio(block);
        next::aio_read64(block)
    }

    fn aio_write(block: *mut c_void) -> c_int { aio_write64(block) }

    fn aio_write64(block: *mut c_void) -> c_int {
        by_aio(block);
        next::aio_write64(block)
    }

    fn lio_listio(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
        lio_listio64(mode, list, n, event)
    }

    fn lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
        if !list.is_null() {
            for at in 0..n.max(0) as usize { by_aio(*list.add(at)); }
        }
        next::lio_listio64(mode, list, n, event)
    }

    fn splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, n: size_t, flags: c_uint) -> ssize_t {
        return_to_tcp::sends_unseen(to, Why::Splice);
        if let Some(conn) = conn::of(from) { return_to_tcp::downgrade(conn, Why::Splice); }
        for fd in [from, to] { dgram::make_plain(fd, Why::Splice); }
        if is_ring_in(from) {
            // They could not be given back to TCP.
            let is_valid = from_offset.is_null() && to_offset.is_null() && flags & !SPLICE_FLAGS == 0;
            if is_valid && n > 0 && kernel::is_pipe_to_write(to) {
                return drain_to(from, to, n, flags);
            }
        }
        next::splice(from, from_offset, to, to_offset, n, flags)
    }
}

/// The vector and the flags of a call with a position, if it means the current one and the socket is ours; no other is valid for a socket.
unsafe fn at_position<'a>(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> Option<(&'a [iovec], c_int)> {
    conn::of(fd)?;
    // SAFETY: the caller's promise.
    let list = unsafe { vector(iov, n as usize) }?;
    let is_plain = offset == -1 && flags & !libc::RWF_NOWAIT == 0;
    let has_bytes = list.iter().any(|one| one.iov_len > 0);
    let flags = if flags == 0 { 0 } else { libc::MSG_DONTWAIT };
    (is_plain && has_bytes).then_some((list, flags))
}

/// The C library writes or reads by itself from now on.
pub(crate) fn by_stdio(fd: c_int) {
    if let Some(conn) = conn::of(fd) {
        return_to_tcp::downgrade(conn, Why::Stdio);
        return_to_tcp::end_with_unread(conn);
    }
    dgram::make_plain(fd, Why::Stdio);
}

/// A stream of the C library is opened on the descriptor, in a mode of `fdopen(3)`.
pub(crate) unsafe fn opens_stream(fd: c_int, mode: *const c_char) {
    // SAFETY: the caller's promise: a string, if it is one.
    let mode = (!mode.is_null()).then(|| unsafe { CStr::from_ptr(mode) }.to_bytes());
    // Bytes that wait in the ring are for the program's own receives then.
    if mode.is_some_and(|mode| matches!(mode, [b'w' | b'a', ..]) && !mode.contains(&b'+')) {
        writes_by_stdio(fd);
    } else {
        by_stdio(fd);
    }
}

/// The C library writes by itself from now on.
pub(crate) fn writes_by_stdio(fd: c_int) {
    if conn::of(fd).is_some() {
        return_to_tcp::sends_unseen(fd, Why::Stdio);
    }
    dgram::make_plain(fd, Why::Stdio);
}

/// The same as [`by_stdio`] for the descriptor of an asynchronous request: the first member of `struct aiocb`.
unsafe fn by_aio(block: *mut c_void) {
    if !block.is_null() {
        // SAFETY: the caller's promise.
        by_stdio(unsafe { block.cast::<c_int>().read_unaligned() });
    }
}

/// Returns true if bytes may be left in the ring of this socket.
fn is_ring_in(fd: c_int) -> bool {
    conn::enter(fd).is_some_and(|(conn, inside)| {
        let chan = conn.chan(&inside);
        chan.is_some_and(|chan| chan.side().rx_state.load(SeqCst) == Route::Ring)
    })
}

/// Settles the buffers of a message before a receive.
unsafe fn settle_message(message: *mut msghdr) {
    // SAFETY: the caller's promise.
    unsafe {
        if is_active()
            && !is_bad(message)
            && let Some(header) = message.as_ref()
            && let Some(list) = vector(header.msg_iov, header.msg_iovlen)
        {
            settle_all(list);
        }
    }
}

unsafe fn receive_message(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        let header = &mut *message;
        let Some(list) = vector(header.msg_iov, header.msg_iovlen) else {
            return next::recvmsg(fd, message, flags);
        };
        let before = (header.msg_namelen, header.msg_controllen);
        header.msg_namelen = 0;
        header.msg_controllen = 0;
        let asked = header.msg_flags;
        header.msg_flags = 0;
        let by_kernel = std::cell::Cell::new(false);
        let n = receive(fd, list, flags, || {
            // SAFETY: the caller's promise.
            let header = &mut *message;
            (header.msg_namelen, header.msg_controllen) = before;
            header.msg_flags = asked;
            by_kernel.set(true);
            next::recvmsg(fd, message, flags)
        });
        if n >= 0 && !by_kernel.get() && before.1 > 0 {
            tell_left(fd, &mut *message, before.1);
        }
        if n < 0 && crate::errno() != 0 {
            let header = &mut *message;
            if header.msg_namelen == 0 && header.msg_controllen == 0 {
                (header.msg_namelen, header.msg_controllen) = before;
                header.msg_flags = asked;
            }
        }
        n
    }
}

/// Tells a program that has set `TCP_INQ` how many bytes are left, in the `room` bytes of its control buffer, as the kernel does.
unsafe fn tell_left(fd: c_int, message: &mut msghdr, room: size_t) {
    let Some((conn, inside)) = conn::enter(fd) else {
        return;
    };
    let Some(chan) = conn.chan(&inside) else {
        return;
    };
    if chan.side().inq.load(Relaxed) == 0 || is_bad(message.msg_control) {
        return;
    }
    let in_ring = chan.ring_bytes();
    let is_in_tcp = in_ring.is_none() || chan.stream.is_closed(chan.peer());
    let in_tcp = if is_in_tcp { kernel::unread(fd) } else { 0 };
    let left = in_ring.unwrap_or(0) + in_tcp.max(0) as usize;
    // The kernel counts the FIN.
    let left = left.saturating_add(usize::from(chan.stream.has_finished(chan.peer())));
    // SAFETY: macros of sizes.
    let (len, space) = unsafe { (libc::CMSG_LEN(4) as usize, libc::CMSG_SPACE(4) as usize) };
    if room < len {
        message.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    let header = libc::cmsghdr {
        cmsg_len: len,
        cmsg_level: libc::IPPROTO_TCP,
        cmsg_type: libc::TCP_CM_INQ,
    };
    let value = c_int::try_from(left).unwrap_or(c_int::MAX);
    let at = message.msg_control.cast::<u8>();
    // SAFETY: the program's control buffer, which has room for both.
    unsafe {
        at.cast::<libc::cmsghdr>().write_unaligned(header);
        at.add(len - size_of::<c_int>())
            .cast::<c_int>()
            .write_unaligned(value);
    }
    message.msg_controllen = space.min(room);
}

/// Data with the SYN (`MSG_FASTOPEN`): the kernel makes this connection, which stays on TCP.
fn is_fast_open(fd: c_int, flags: c_int) -> bool {
    let conn = conn::of(fd).filter(|_| flags & libc::MSG_FASTOPEN != 0);
    if let Some(conn) = conn {
        return_to_tcp::downgrade(conn, Why::Option);
    }
    conn.is_some()
}

unsafe fn send_message(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        let header = &*message;
        if is_fast_open(fd, flags) {
            return next::sendmsg(fd, message, flags);
        }
        if header.msg_controllen > 0 || !header.msg_name.is_null() {
            // The kernel judges them by a message of no bytes.
            let mut empty = *header;
            empty.msg_iovlen = 0;
            if next::sendmsg(fd, &raw const empty, flags) < 0 {
                return -1;
            }
        }
        match vector(header.msg_iov, header.msg_iovlen) {
            Some(list) if list.iter().any(|one| one.iov_len > 0) => {
                transmit(fd, &Source::Memory(list), flags, || {
                    next::sendmsg(fd, message, flags)
                })
            }
            _ => next::sendmsg(fd, message, flags),
        }
    }
}

/// Descriptors are handed to another process: ours among them go back to TCP first.
unsafe fn passing(message: *const msghdr) {
    // SAFETY: the caller's promise; the walk is the C library's.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header)
                    .cmsg_len
                    .saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                for at in 0..(bytes / size_of::<c_int>()).min(253) {
                    let fd = data.add(at).read_unaligned();
                    ring_poll::be_exact(fd);
                    if let Some(conn) = conn::of(fd) {
                        return_to_tcp::downgrade(conn, Why::Passed);
                        return_to_tcp::end_with_unread(conn);
                    }
                    dgram::make_plain(fd, Why::Passed);
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

unsafe fn send_file(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe {
        if conn::of(out).is_none() || n == 0 || !is_optional(offset) {
            dgram::io::by_kernel(out);
            return next::sendfile64(out, from, offset, n);
        }
        if !kernel::is_file(from) {
            // A read of it may wait. What the kernel does not refuse it sends over TCP.
            if libc::lseek64(from, 0, libc::SEEK_CUR) >= 0 {
                return_to_tcp::sends_unseen(out, Why::Splice);
            }
            return next::sendfile64(out, from, offset, n);
        }
        let start = if offset.is_null() {
            None
        } else {
            Some(*offset)
        };
        let source = Source::File {
            fd: from,
            offset: start,
            len: n.min(MAX_RW),
        };
        let by_kernel = std::cell::Cell::new(false);
        let sent = transmit(out, &source, 0, || {
            by_kernel.set(true);
            next::sendfile64(out, from, offset, n)
        });
        if sent < 0 && crate::errno() == libc::EINVAL && !by_kernel.get() {
            // A file that is read past the page cache takes aligned memory only.
            return_to_tcp::sends_unseen(out, Why::Splice);
            return next::sendfile64(out, from, offset, n);
        }
        if sent > 0 && !by_kernel.get() && !offset.is_null() {
            *offset += sent as off_t;
        }
        sent
    }
}

/// All flags of splice(2).
const SPLICE_FLAGS: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// `splice` into a pipe from a socket whose ring still has bytes: they are copied, as many as a pipe takes at once when it is writable.
unsafe fn drain_to(from: c_int, to: c_int, n: size_t, flags: c_uint) -> ssize_t {
    let mut bytes = [0_u8; libc::PIPE_BUF];
    let is_waiting = flags & libc::SPLICE_F_NONBLOCK == 0 && !kernel::is_nonblocking(to);
    // Bytes that are taken out of the ring have to be in the pipe.
    loop {
        crate::set_errno(0);
        let ready = kernel::poll_one(to, libc::POLLOUT, if is_waiting { -1 } else { 0 });
        if ready & libc::POLLERR != 0 {
            // Nobody reads it: this fails with the kernel's error and signal.
            // SAFETY: our buffer.
            return unsafe { next::write(to, bytes.as_ptr().cast(), 1) };
        }
        if ready != 0 {
            break;
        }
        if !is_waiting {
            crate::set_errno(libc::EAGAIN);
        }
        if crate::errno() != 0 {
            return -1;
        }
    }
    let wait = if flags & libc::SPLICE_F_NONBLOCK == 0 {
        0
    } else {
        libc::MSG_DONTWAIT
    };
    // SAFETY: our buffer.
    unsafe {
        let got = recv(from, bytes.as_mut_ptr().cast(), n.min(bytes.len()), wait);
        if got <= 0 {
            return got;
        }
        next::write(to, bytes.as_ptr().cast(), got as usize)
    }
}
