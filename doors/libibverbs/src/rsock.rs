//! The sockets of librdmacm.

use std::ffi::{c_int, c_void};

use libc::{
    epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, ssize_t,
    timeval,
};
use weft_abi::verbs::rsock;

// `rfcntl` is variadic in C. Its one variadic argument is passed in the place of a call's third argument on every 64-bit system that Linux runs on.
exports! { "weft_cm_", rsock:
    rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    rbind(socket: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int;
    rlisten(socket: c_int, backlog: c_int) -> c_int;
    raccept(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int;
    rconnect(socket: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int;
    rshutdown(socket: c_int, how: c_int) -> c_int;
    rclose(socket: c_int) -> c_int;
    rrecv(socket: c_int, buf: *mut c_void, len: usize, flags: c_int) -> ssize_t;
    rrecvfrom(socket: c_int, buf: *mut c_void, len: usize, flags: c_int, src_addr: *mut sockaddr, addrlen: *mut socklen_t) -> ssize_t;
    rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    rsend(socket: c_int, buf: *const c_void, len: usize, flags: c_int) -> ssize_t;
    rsendto(socket: c_int, buf: *const c_void, len: usize, flags: c_int, dest_addr: *const sockaddr, addrlen: socklen_t) -> ssize_t;
    rsendmsg(socket: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    rread(socket: c_int, buf: *mut c_void, count: usize) -> ssize_t;
    rreadv(socket: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t;
    rwrite(socket: c_int, buf: *const c_void, count: usize) -> ssize_t;
    rwritev(socket: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t;
    rpoll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int;
    rselect(nfds: c_int, readfds: *mut fd_set, writefds: *mut fd_set, exceptfds: *mut fd_set, timeout: *mut timeval) -> c_int;
    rgetpeername(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int;
    rgetsockname(socket: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int;
    rsetsockopt(socket: c_int, level: c_int, optname: c_int, optval: *const c_void, optlen: socklen_t) -> c_int;
    rgetsockopt(socket: c_int, level: c_int, optname: c_int, optval: *mut c_void, optlen: *mut socklen_t) -> c_int;
    rfcntl(socket: c_int, cmd: c_int, arg: usize) -> c_int;
    repoll_create(flags: c_int) -> c_int;
    repoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    repoll_wait(epfd: c_int, events: *mut epoll_event, maxevents: c_int, timeout: c_int) -> c_int;
    riomap(socket: c_int, buf: *mut c_void, len: usize, prot: c_int, flags: c_int, offset: off_t) -> off_t;
    riounmap(socket: c_int, buf: *mut c_void, len: usize) -> c_int;
    riowrite(socket: c_int, buf: *const c_void, count: usize, offset: off_t, flags: c_int) -> usize;
}
