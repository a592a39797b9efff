//! Connected sockets, their peers and their calls for the tests of libexs.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test program uses its part"
)]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is given pointers to its own locals"
)]

#[path = "../../../../tests/conformance/src/waits.rs"]
mod waits;

use std::ffi::c_int;
use std::process::{Child, Command};
use std::ptr::null_mut;

use libc::{AF_INET, sockaddr, sockaddr_in, socklen_t, timeval};
use rustix::io::Errno;
use weft_abi::exs::types::{AHandle, Event};
use weft_abi::exs::{queue, socket, sync};

use waits::state;
pub(crate) use waits::{PATIENCE, aside, asleep, until};

/// An empty handle, for operations whose event needs none.
pub(crate) const NONE: AHandle = AHandle(null_mut());

/// Any free port of this host.
pub(crate) fn any() -> sockaddr_in {
    at_port(0)
}

fn at_port(port: u16) -> sockaddr_in {
    let mut addr: sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = AF_INET as u16;
    addr.sin_port = port.to_be();
    addr.sin_addr.s_addr = u32::from_be_bytes([127, 0, 0, 1]).to_be();
    addr
}

/// A listening socket of this kind, and its address.
pub(crate) fn listening(kind: c_int) -> (c_int, sockaddr_in) {
    unsafe {
        let listener = socket::socket(AF_INET, kind, 0).unwrap();
        let mut addr = any();
        let mut len = size_of::<sockaddr_in>() as socklen_t;
        let at = (&raw mut addr).cast::<sockaddr>();
        socket::bind(listener, at, len).unwrap();
        socket::listen(listener, 5).unwrap();
        socket::getsockname(listener, at, &raw mut len).unwrap();
        (listener, addr)
    }
}

pub(crate) fn connected(kind: c_int, port: u16) -> c_int {
    let addr = at_port(port);
    let len = size_of::<sockaddr_in>() as socklen_t;
    unsafe {
        let a = socket::socket(AF_INET, kind, 0).unwrap();
        sync::connect(a, (&raw const addr).cast(), len).unwrap();
        a
    }
}

/// The next connection.
pub(crate) fn accepted(listener: c_int) -> c_int {
    unsafe { sync::accept4(listener, null_mut(), null_mut(), 0) }.unwrap()
}

/// Two connected sockets of this kind.
pub(crate) fn pair(kind: c_int) -> (c_int, c_int) {
    let (listener, addr) = listening(kind);
    let a = connected(kind, u16::from_be(addr.sin_port));
    let b = accepted(listener);
    sync::close(listener).unwrap();
    (a, b)
}

/// A command that runs this test alone, with `value` in its environment.
pub(crate) fn again(test: &str, name: &str, value: u16) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.arg(test).env(name, value.to_string());
    child
}

/// A connection to a stopped process, and the process.
pub(crate) fn stopped(kind: c_int, test: &str) -> (c_int, Child) {
    const PORT: &str = "WEFT_STOPPED_PORT";
    if let Ok(port) = std::env::var(PORT) {
        // The process must not outlive a failed test.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        connected(kind, port.parse().unwrap());
        unsafe { libc::raise(libc::SIGSTOP) };
        std::process::exit(0);
    }
    let (listener, addr) = listening(kind);
    let port = u16::from_be(addr.sin_port);
    let child = again(test, PORT, port).spawn().unwrap();
    let b = accepted(listener);
    until("it has stopped", || {
        state(&child.id().to_string()) == Some('T')
    });
    (b, child)
}

/// `exs_sync_send`
pub(crate) fn send(fd: c_int, data: &[u8], flags: c_int) -> Result<isize, Errno> {
    unsafe { sync::send_mh(fd, data.as_ptr().cast(), data.len(), flags, 0) }
}

/// `exs_sync_recv`
pub(crate) fn recv(fd: c_int, buf: &mut [u8], flags: c_int) -> Result<isize, Errno> {
    unsafe { sync::recv_mh(fd, buf.as_mut_ptr().cast(), buf.len(), flags, 0) }
}

/// The result of `exs_sync_recvmsg`.
pub(crate) fn recv_message(fd: c_int) -> Result<isize, Errno> {
    let mut buf = vec![0_u8; 1 << 16];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    unsafe { sync::recvmsg(fd, &raw mut msg, 0) }
}

/// `exs_send`
pub(crate) fn start_send(fd: c_int, data: &[u8], qh: c_int) {
    unsafe { socket::send(fd, data.as_ptr().cast(), data.len(), 0, qh, NONE, 0) }.unwrap();
}

/// `exs_recv`; the memory stays until the event.
pub(crate) fn start_recv(fd: c_int, buf: &mut [u8], flags: c_int, qh: c_int, mh: c_int) {
    let at = buf.as_mut_ptr().cast();
    unsafe { socket::recv(fd, at, buf.len(), flags, qh, NONE, mh) }.unwrap();
}

/// The next event, if it arrives in this time.
pub(crate) fn next_event(qh: c_int, seconds: i64) -> Option<Event> {
    let limit = timeval {
        tv_sec: seconds,
        tv_usec: 0,
    };
    let mut event: Event = unsafe { std::mem::zeroed() };
    let got = unsafe { queue::qdequeue(qh, &raw mut event, 1, &raw const limit) };
    (got == Ok(1)).then_some(event)
}
