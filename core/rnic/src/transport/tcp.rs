//! The TCP transport.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use std::time::Duration;

use rustix::net::sockopt;
use weft_mem::{RecvList, SendList};
use weft_sys::{Interest, poll_fds, tcp};

use super::{ByteStream, Received};

/// A connected TCP socket.
pub(crate) struct TcpLink {
    fd: OwnedFd,
    local: SocketAddr,
    peer: SocketAddr,
}

impl TcpLink {
    /// Takes over a connected, non-blocking socket.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        // Each of our sendmsg calls is a whole batch: waiting for more would only delay it.
        tcp::set_nodelay(&fd, true)?;
        let local = tcp::local_addr(&fd)?;
        let peer = tcp::peer_addr(&fd)?;
        let link = TcpLink { fd, local, peer };
        if link.on_this_host() {
            // As weft_sys does before a connection over loopback begins; here for those by another address of this host.
            let _ = sockopt::set_tcp_congestion(&link.fd, "reno");
        } else {
            // A peer that has vanished without a word is noticed after two minutes, not never. On this host the kernel says so at once.
            sockopt::set_socket_keepalive(&link.fd, true)?;
            sockopt::set_tcp_keepidle(&link.fd, Duration::from_mins(1))?;
            sockopt::set_tcp_keepintvl(&link.fd, Duration::from_secs(10))?;
            sockopt::set_tcp_keepcnt(&link.fd, 6)?;
        }
        Ok(link)
    }
}

impl TcpLink {
    /// The bytes go over loopback.
    fn on_this_host(&self) -> bool {
        self.peer.ip().to_canonical().is_loopback() || self.local.ip() == self.peer.ip()
    }

    /// Whether the socket is ready in this way, or lost.
    fn is_now(&self, interest: Interest) -> bool {
        poll_fds(&[(self.fd.as_fd(), interest)], Some(Duration::ZERO)).is_ok_and(|n| n > 0)
    }
}

impl ByteStream for TcpLink {
    fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        list.send(self.fd.as_fd(), false)
    }
    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received> {
        let n = list.recv(self.fd.as_fd())?;
        let drained = n < list.len_bytes();
        Ok(Received { n, drained })
    }
    fn pause(&self) -> bool {
        // Without an interest, an event says that both directions are closed or that there was an error.
        self.is_now(Interest::empty())
    }
    fn is_closed_behind(&self) -> bool {
        self.is_now(Interest::PEER_CLOSED)
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
    fn shutdown_write(&self) {
        // NotConnected: the peer reset the connection first.
        let _ = tcp::shutdown_write(&self.fd);
    }
    fn abort(&self) {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
    fn cut(&self) {
        // Reset at once: a close takes effect only when no thread holds the socket.
        if rustix::net::connect_unspec(&self.fd).is_err() {
            self.abort();
        }
    }
    fn local_addr(&self) -> SocketAddr {
        self.local
    }
    fn peer_addr(&self) -> SocketAddr {
        self.peer
    }
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn max_fpdu(&self) -> Option<u32> {
        // No peer on this host is a hardware RNIC.
        if self.on_this_host() {
            return None;
        }
        tcp::mss(&self.fd).ok()
    }
}
