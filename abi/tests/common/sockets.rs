//! Connected sockets for the tests of libexs.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::Duration;

use libc::{AF_INET, sockaddr, sockaddr_in, socklen_t};
use weft_abi::exs::{socket, sync};

pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Any port of this host.
pub(crate) fn any() -> sockaddr_in {
    let mut addr: sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = AF_INET as u16;
    addr.sin_addr.s_addr = u32::from_be_bytes([127, 0, 0, 1]).to_be();
    addr
}

/// A socket of this kind that listens, and where.
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

/// Two connected sockets of this kind.
pub(crate) fn pair(kind: c_int) -> (c_int, c_int) {
    let (listener, addr) = listening(kind);
    unsafe {
        let a = socket::socket(AF_INET, kind, 0).unwrap();
        let len = size_of::<sockaddr_in>() as socklen_t;
        sync::connect(a, (&raw const addr).cast(), len).unwrap();
        let b = sync::accept(listener, null_mut(), null_mut()).unwrap();
        sync::close(listener).unwrap();
        (a, b)
    }
}
