//! Transports, which carry the byte stream of a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weft_mem::{RecvList, SendList};
use weft_sys::Interest;
use weft_tls::{TlsError, TlsInfo};

pub(crate) mod local;
pub(crate) mod sim;
pub(crate) mod tcp;
pub(crate) mod tls;

use local::LocalLink;

/// One end of a connected, reliable byte stream. All calls are non-blocking.
pub(crate) trait ByteStream: Send + Sync {
    /// Hand bytes to the transport: fewer than asked is normal, `WouldBlock` when it takes none now.
    fn send(&self, list: &SendList<'_>) -> io::Result<usize>;
    /// Take bytes: none at the end of the stream, `WouldBlock` when there are none now.
    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received>;
    /// Stops receiving and watching for data. Returns whether the connection is lost.
    fn pause(&self) -> bool;
    /// While paused: whether the peer's end waits behind data that was not received.
    fn is_closed_behind(&self) -> bool {
        false
    }
    /// The descriptor to sleep on, see [`ByteStream::watch`].
    fn fd(&self) -> BorrowedFd<'_>;
    /// A thread is about to sleep until `recv`, or with [`Interest::WRITE`] also `send`, can proceed: returns the event to wait for on the
    /// descriptor. `None`: do not sleep, it can proceed already.
    fn watch(&self, interest: Interest) -> Option<Interest> {
        Some(interest)
    }
    /// End our direction in order.
    fn shutdown_write(&self);
    /// End both directions now.
    fn abort(&self);
    /// As [`ByteStream::abort`], and the peer finds the connection lost, not ended.
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
    /// The peer's key and the cipher, where the connection was made by TLS.
    fn tls(&self) -> Option<&TlsInfo> {
        None
    }
    /// The error that broke the TLS connection, if it ended that way.
    fn tls_error(&self) -> Option<TlsError> {
        None
    }
    /// The cipher, if the data is encrypted.
    fn cipher(&self) -> Option<&'static str> {
        None
    }
    /// Its name, as in [`Path::transport`](crate::Path).
    fn name(&self) -> &'static str;
}

/// The carrier of a connection's ULPDUs.
#[derive(Clone)]
pub(crate) enum Llp {
    /// A byte stream, in FPDUs.
    Stream(Arc<dyn ByteStream>),
    /// Rings in memory that is shared with the peer. More can be done there than sending bytes.
    Local(Arc<LocalLink>),
}

/// Calls the method of whichever it is.
macro_rules! either {
    ($self:ident, $link:ident => $call:expr) => {
        match $self {
            Llp::Stream($link) => $call,
            Llp::Local($link) => $call,
        }
    };
}

impl Llp {
    /// The shared memory, if the link uses it.
    #[inline]
    pub(crate) fn local(&self) -> Option<&LocalLink> {
        match self {
            Llp::Local(local) => Some(local),
            Llp::Stream(_) => None,
        }
    }

    /// As [`ByteStream::send`].
    pub(crate) fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        either!(self, link => link.send(list))
    }

    /// As [`ByteStream::recv`].
    #[inline]
    pub(crate) fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received> {
        either!(self, link => link.recv(list))
    }

    /// The data taken so far has been processed: payloads are in place.
    #[inline]
    pub(crate) fn placed(&self) {
        if let Llp::Local(local) = self {
            local.placed();
        }
    }

    /// As [`ByteStream::pause`].
    pub(crate) fn pause(&self) -> bool {
        either!(self, link => link.pause())
    }

    /// As [`ByteStream::is_closed_behind`].
    pub(crate) fn is_closed_behind(&self) -> bool {
        match self {
            Llp::Stream(link) => link.is_closed_behind(),
            // It reports its end outside the ring.
            Llp::Local(_) => false,
        }
    }

    /// As [`ByteStream::fd`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        either!(self, link => link.fd())
    }

    /// As [`ByteStream::watch`].
    pub(crate) fn watch(&self, interest: Interest) -> Option<Interest> {
        either!(self, link => link.watch(interest))
    }

    /// Of the `sent` bytes handed over, how many are out of the sender's memory: from there on the transport still
    /// reads it.
    pub(crate) fn copied(&self, sent: u64) -> u64 {
        match self {
            Llp::Stream(_) => sent,
            Llp::Local(local) => local.copied(sent),
        }
    }

    /// As [`ByteStream::shutdown_write`].
    pub(crate) fn shutdown_write(&self) {
        either!(self, link => link.shutdown_write());
    }

    /// As [`ByteStream::abort`].
    pub(crate) fn abort(&self) {
        either!(self, link => link.abort());
    }

    /// As [`ByteStream::cut`].
    pub(crate) fn cut(&self) {
        match self {
            Llp::Stream(link) => link.cut(),
            Llp::Local(local) => local.abort(),
        }
    }

    /// Our address.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        either!(self, link => link.local_addr())
    }

    /// The peer's address.
    pub(crate) fn peer_addr(&self) -> SocketAddr {
        either!(self, link => link.peer_addr())
    }

    /// As [`ByteStream::max_fpdu`].
    pub(crate) fn max_fpdu(&self) -> Option<u32> {
        match self {
            Llp::Stream(link) => link.max_fpdu(),
            Llp::Local(_) => None,
        }
    }

    /// The peer's key and the cipher, where the connection was made by TLS.
    pub(crate) fn tls(&self) -> Option<&TlsInfo> {
        either!(self, link => link.tls())
    }

    /// As [`ByteStream::tls_error`].
    pub(crate) fn tls_error(&self) -> Option<TlsError> {
        match self {
            Llp::Stream(link) => link.tls_error(),
            Llp::Local(_) => None,
        }
    }

    /// Whether its set-up has shown that the peer is of our user.
    pub(crate) fn attests_same_user(&self) -> bool {
        matches!(self, Llp::Local(_))
    }

    /// The cipher, if the data is encrypted.
    pub(crate) fn cipher(&self) -> Option<&'static str> {
        match self {
            Llp::Stream(link) => link.cipher(),
            Llp::Local(_) => None,
        }
    }

    /// Its name, as in [`Path::transport`](crate::Path).
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Llp::Stream(link) => link.name(),
            Llp::Local(_) => "local",
        }
    }
}

/// The result of one receiving call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Bytes.
    pub(crate) n: usize,
    /// There is no more now.
    pub(crate) drained: bool,
}
