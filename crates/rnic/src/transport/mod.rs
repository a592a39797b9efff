//! Transports: what carries the byte stream of a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use weft_mem::{RecvList, SendList};
use weft_sys::Interest;

pub(crate) mod local;
pub(crate) mod sim;
pub(crate) mod tcp;
pub(crate) mod udp;

use local::LocalLink;

/// One end of a connected, reliable byte stream. All calls are non-blocking.
pub(crate) trait Link: Send + Sync {
    /// Hand bytes to the transport: fewer than asked is normal, `WouldBlock` when it takes none now.
    fn send(&self, list: &SendList<'_>) -> io::Result<usize>;
    /// Take bytes: none at the end of the stream, `WouldBlock` when there are none now.
    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received>;
    /// What the bytes taken so far ask for has been done: payloads are in their place.
    fn placed(&self) {}
    /// Nothing is received for now, and nobody watches for data. Says whether the connection is lost.
    fn pause(&self) -> bool;
    /// What to sleep on, see [`Link::watch`].
    fn fd(&self) -> BorrowedFd<'_>;
    /// Somebody is about to sleep until `recv`, or with [`Interest::WRITE`] `send` as well, would do something: what to
    /// wait for on the descriptor. `None`: do not sleep, there is something already.
    fn watch(&self, interest: Interest) -> Option<Interest> {
        Some(interest)
    }
    /// Of the `sent` bytes handed over, how many are out of the sender's memory: from there on the transport still
    /// reads it.
    fn settled(&self, sent: u64) -> u64 {
        sent
    }
    /// End our direction in order.
    fn shutdown_write(&self);
    /// End both directions now.
    fn abort(&self);
    /// As [`Link::abort`], and the peer finds the connection lost, not ended.
    fn cut(&self) {
        self.abort();
    }
    /// Our address.
    fn local_addr(&self) -> SocketAddr;
    /// The peer's address.
    fn peer_addr(&self) -> SocketAddr;
    /// Longest FPDU, in bytes, that every peer on this path takes (RFC 5044 5.1); `None` when only the 16-bit length
    /// field bounds it.
    fn max_fpdu(&self) -> Option<u32>;
    /// Shared memory joins us to the peer: more can be done than sending bytes.
    fn local(&self) -> Option<&LocalLink> {
        None
    }
    /// Its name, as in [`Path::transport`](crate::Path).
    fn name(&self) -> &'static str;
}

/// What one receiving call brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Bytes.
    pub(crate) n: usize,
    /// There is no more now.
    pub(crate) drained: bool,
}
