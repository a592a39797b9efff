//! Transports: what carries the byte stream of a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use weft_mem::{RecvList, SendList};

pub(crate) mod sim;
pub(crate) mod tcp;

/// One end of a connected, reliable byte stream. All calls are non-blocking.
pub(crate) trait Link: Send + Sync {
    /// Hand bytes to the transport: fewer than asked is normal, `WouldBlock` when it takes none now.
    fn send(&self, list: &SendList<'_>) -> io::Result<usize>;
    /// Take bytes: 0 at the end of the stream, `WouldBlock` when there are none now.
    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<usize>;
    /// Becomes readable when `recv` would, writable when `send` would.
    fn fd(&self) -> BorrowedFd<'_>;
    /// End our direction in order.
    fn shutdown_write(&self);
    /// End both directions now.
    fn abort(&self);
    /// Our address.
    fn local_addr(&self) -> SocketAddr;
    /// The peer's address.
    fn peer_addr(&self) -> SocketAddr;
    /// Longest FPDU, in bytes, that every peer on this path takes (RFC 5044 5.1); `None` when only the 16-bit length
    /// field bounds it.
    fn max_fpdu(&self) -> Option<u32>;
}
