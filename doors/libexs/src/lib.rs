//! libexs: the calls of `<sys/exs.h>` under their C names. `weft_abi::exs` implements them.
//!
//! # Safety
//!
//! Each call is as safe as its manual page states: see `weft_abi`.

use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::ptr::null;

use libc::{
    epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pollfd, sigset_t, sockaddr,
    socklen_t, ssize_t, timespec, timeval,
};
use weft_abi::call::run;
use weft_abi::exs::types::{
    AHandle, AcceptAddr, EXS_MHANDLE_UNREGISTERED, Event, IoVec, MHandle, MsgHdr, PollFd, QHandle,
    Version, XferFile,
};
use weft_abi::exs::{init, memory, option, queue, several, socket, sync};

const UNREGISTERED: MHandle = EXS_MHANDLE_UNREGISTERED as MHandle;
const NONE: c_int = 0;
const NO_MASK: *const sigset_t = null();

macro_rules! exports {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $($body:ident)::+ ($($use:ident),*);)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As on the manual page.
        // SAFETY: no other code has this name.
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)] // some of the bodies are safe
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller's promise.
            run(|| unsafe { $($body)::+($($use),*) })
        }
    )*};
}

// `exs_fcntl`, `exs_sync_fcntl` and `exs_sync_ioctl` are variadic in C. On every 64-bit system that Linux supports, their one argument is passed like the third
// argument of a fixed call.
exports! {
    exs_init(version: Version) -> c_int = init(version);
    exs_qcreate(depth: c_int) -> QHandle = queue::qcreate(depth);
    exs_qdelete(qh: QHandle) -> c_int = queue::qdelete(qh);
    exs_qmodify(qh: QHandle, attr: c_int, value: *const c_void, len: usize) -> c_int = queue::qmodify(qh, attr, value, len);
    exs_qstatus(qh: QHandle, attr: c_int, value: *mut c_void, len: usize) -> c_int = queue::qstatus(qh, attr, value, len);
    exs_qdequeue(qh: QHandle, events: *mut Event, n: c_int, timeout: *const timeval) -> c_int = queue::qdequeue(qh, events, n, timeout);
    exs_mregister(addr: *mut c_void, len: usize, flags: c_int) -> MHandle = memory::mregister(addr, len, flags);
    exs_mderegister(mh: MHandle) -> c_int = memory::mderegister(mh);
    exs_mmodify(mh: MHandle, addr: *mut c_void, len: usize, flags: c_int) -> c_int = memory::mmodify(mh, addr, len, flags);
    exs_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int = socket::socket(domain, kind, protocol);
    exs_bind(fd: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int = socket::bind(fd, addr, addrlen);
    exs_listen(fd: c_int, backlog: c_int) -> c_int = socket::listen(fd, backlog);
    exs_getsockname(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = socket::getsockname(fd, addr, addrlen);
    exs_getpeername(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = socket::getpeername(fd, addr, addrlen);
    exs_getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int = option::getsockopt(fd, level, name, value, len);
    exs_setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int = option::setsockopt(fd, level, name, value, len);
    exs_fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int = option::fcntl(fd, cmd, arg);
    exs_connect(fd: c_int, addr: *const sockaddr, addrlen: socklen_t, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::connect(fd, addr, addrlen, flags, qh, ah);
    exs_accept(fd: c_int, addr: *mut AcceptAddr, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::accept(fd, addr, flags, qh, ah);
    exs_send(fd: c_int, buf: *const c_void, len: usize, flags: c_int, qh: QHandle, ah: AHandle, mh: MHandle) -> c_int = socket::send(fd, buf, len, flags, qh, ah, mh);
    exs_recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int, qh: QHandle, ah: AHandle, mh: MHandle) -> c_int = socket::recv(fd, buf, len, flags, qh, ah, mh);
    exs_sendmsg(fd: c_int, msg: *const MsgHdr, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::sendmsg(fd, msg, flags, qh, ah);
    exs_recvmsg(fd: c_int, msg: *mut MsgHdr, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::recvmsg(fd, msg, flags, qh, ah);
    exs_sendfile(fd: c_int, vec: *const XferFile, n: c_int, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::sendfile(fd, vec, n, flags, qh, ah);
    exs_poll(fds: *const PollFd, n: c_int, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::poll(fds, n, flags, qh, ah);
    exs_shutdown(fd: c_int, how: c_int, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::shutdown(fd, how, flags, qh, ah);
    exs_close(fd: c_int, flags: c_int, qh: QHandle, ah: AHandle) -> c_int = socket::close(fd, flags, qh, ah);
    exs_cancel(fd: c_int, flags: c_int, ah: AHandle) -> c_int = socket::cancel(fd, flags, ah);
    exs_recycle_recv_buffer(fd: c_int, buffer: *mut c_void) -> c_int = socket::recycle_recv_buffer(fd, buffer);
    exs_sync_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int = sync::socket(domain, kind, protocol);
    exs_sync_bind(fd: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int = sync::bind(fd, addr, addrlen);
    exs_sync_listen(fd: c_int, backlog: c_int) -> c_int = sync::listen(fd, backlog);
    exs_sync_accept(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = sync::accept4(fd, addr, addrlen, NONE);
    exs_sync_accept4(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t, flags: c_int) -> c_int = sync::accept4(fd, addr, addrlen, flags);
    exs_sync_connect(fd: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int = sync::connect(fd, addr, addrlen);
    exs_sync_send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> ssize_t = sync::send_mh(fd, buf, len, flags, UNREGISTERED);
    exs_sync_recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> ssize_t = sync::recv_mh(fd, buf, len, flags, UNREGISTERED);
    exs_sync_sendto(fd: c_int, buf: *const c_void, len: usize, flags: c_int, addr: *const sockaddr, addrlen: socklen_t) -> ssize_t = sync::sendto(fd, buf, len, flags, addr, addrlen);
    exs_sync_recvfrom(fd: c_int, buf: *mut c_void, len: usize, flags: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> ssize_t = sync::recvfrom(fd, buf, len, flags, addr, addrlen);
    exs_sync_sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t = sync::sendmsg(fd, msg, flags);
    exs_sync_recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t = sync::recvmsg(fd, msg, flags);
    exs_sync_read(fd: c_int, buf: *mut c_void, len: usize) -> ssize_t = sync::read_mh(fd, buf, len, UNREGISTERED);
    exs_sync_write(fd: c_int, buf: *const c_void, len: usize) -> ssize_t = sync::write_mh(fd, buf, len, UNREGISTERED);
    exs_sync_readv(fd: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t = sync::readv(fd, iov, iovcnt);
    exs_sync_writev(fd: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t = sync::writev(fd, iov, iovcnt);
    exs_sync_sendfile(out_fd: c_int, in_fd: c_int, offset: *mut off_t, count: usize) -> ssize_t = sync::sendfile(out_fd, in_fd, offset, count);
    exs_sync_shutdown(fd: c_int, how: c_int) -> c_int = sync::shutdown(fd, how);
    exs_sync_close(fd: c_int) -> c_int = sync::close(fd);
    exs_sync_poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int = sync::poll(fds, n, timeout);
    exs_sync_select(n: c_int, readfds: *mut fd_set, writefds: *mut fd_set, exceptfds: *mut fd_set, timeout: *mut timeval) -> c_int = sync::select(n, readfds, writefds, exceptfds, timeout);
    exs_sync_getsockname(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = sync::getsockname(fd, addr, addrlen);
    exs_sync_getpeername(fd: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = sync::getpeername(fd, addr, addrlen);
    exs_sync_getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int = sync::getsockopt(fd, level, name, value, len);
    exs_sync_setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int = sync::setsockopt(fd, level, name, value, len);
    exs_sync_fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int = sync::fcntl(fd, cmd, arg);
    exs_sync_sendmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int = several::sendmmsg(fd, vec, n, flags);
    exs_sync_recvmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int = several::recvmmsg(fd, vec, n, flags, timeout);
    exs_sync_socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int = sync::socketpair(domain, kind, protocol, fds);
    exs_sync_dup(fd: c_int) -> c_int = sync::dup(fd);
    exs_sync_dup2(fd: c_int, new: c_int) -> c_int = sync::dup2(fd, new);
    exs_sync_dup3(fd: c_int, new: c_int, flags: c_int) -> c_int = sync::dup3(fd, new, flags);
    exs_sync_ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int = sync::ioctl(fd, request, arg);
    exs_sync_sockatmark(fd: c_int) -> c_int = sync::sockatmark(fd);
    exs_sync_ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int = sync::ppoll(fds, n, timeout, mask);
    exs_sync_pselect(n: c_int, readfds: *mut fd_set, writefds: *mut fd_set, exceptfds: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int = sync::pselect(n, readfds, writefds, exceptfds, timeout, mask);
    exs_sync_epoll_create(size: c_int) -> c_int = sync::epoll_create(size);
    exs_sync_epoll_create1(flags: c_int) -> c_int = sync::epoll_create1(flags);
    exs_sync_epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *const epoll_event) -> c_int = sync::epoll_ctl(epfd, op, fd, event);
    exs_sync_epoll_wait(epfd: c_int, events: *mut epoll_event, n: c_int, timeout: c_int) -> c_int = sync::epoll_pwait(epfd, events, n, timeout, NO_MASK);
    exs_sync_epoll_pwait(epfd: c_int, events: *mut epoll_event, n: c_int, timeout: c_int, mask: *const sigset_t) -> c_int = sync::epoll_pwait(epfd, events, n, timeout, mask);
    exs_sync_epoll_pwait2(epfd: c_int, events: *mut epoll_event, n: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int = sync::epoll_pwait2(epfd, events, n, timeout, mask);
    exs_sync_send_mh(fd: c_int, buf: *const c_void, len: usize, flags: c_int, mh: MHandle) -> ssize_t = sync::send_mh(fd, buf, len, flags, mh);
    exs_sync_recv_mh(fd: c_int, buf: *mut c_void, len: usize, flags: c_int, mh: MHandle) -> ssize_t = sync::recv_mh(fd, buf, len, flags, mh);
    exs_sync_read_mh(fd: c_int, buf: *mut c_void, len: usize, mh: MHandle) -> ssize_t = sync::read_mh(fd, buf, len, mh);
    exs_sync_write_mh(fd: c_int, buf: *const c_void, len: usize, mh: MHandle) -> ssize_t = sync::write_mh(fd, buf, len, mh);
    exs_sync_readv_mh(fd: c_int, iov: *const IoVec, iovcnt: c_int) -> ssize_t = sync::readv_mh(fd, iov, iovcnt);
    exs_sync_writev_mh(fd: c_int, iov: *const IoVec, iovcnt: c_int) -> ssize_t = sync::writev_mh(fd, iov, iovcnt);
    exs_sync_sendmsg_mh(fd: c_int, msg: *const MsgHdr, flags: c_int) -> ssize_t = sync::sendmsg_mh(fd, msg, flags);
    exs_sync_recvmsg_mh(fd: c_int, msg: *mut MsgHdr, flags: c_int) -> ssize_t = sync::recvmsg_mh(fd, msg, flags);
}
