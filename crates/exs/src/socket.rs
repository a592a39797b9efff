//! Sockets.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::{Context, Kind, Memory, Options, Piece, Ready, RecvFlags, Sink};

/// A socket. Clones are handles of the same one.
#[derive(Clone)]
pub struct Socket(Arc<()>);

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Socket").finish_non_exhaustive()
    }
}

#[allow(missing_docs, clippy::todo, unused_variables)]
impl Socket {
    pub fn new(context: &Context, ipv6: bool, kind: Kind) -> Result<Socket, Errno> {
        todo!()
    }
    pub fn from_tcp(context: &Context, fd: OwnedFd) -> Result<Socket, Errno> {
        todo!()
    }
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    pub fn options(&self) -> Options {
        todo!()
    }
    pub fn set_options(&self, f: impl FnOnce(&mut Options)) -> Result<(), Errno> {
        todo!()
    }
    pub fn kind(&self) -> Kind {
        todo!()
    }
    pub fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        todo!()
    }
    pub fn listen(&self, backlog: u32) -> Result<(), Errno> {
        todo!()
    }
    pub fn local_addr(&self) -> Result<SocketAddr, Errno> {
        todo!()
    }
    pub fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        todo!()
    }
    pub fn connect(&self, addr: SocketAddr, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn accept(&self, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn send(&self, memory: Memory, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn recv(&self, memory: Memory, flags: RecvFlags, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn send_file(&self, pieces: Vec<Piece>, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn poll(&self, wanted: Ready, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn cancel(&self, token: Option<u64>) -> usize {
        todo!()
    }
    pub fn shutdown(&self) -> Result<(), Errno> {
        todo!()
    }
    pub fn shutdown_with(&self, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn close(&self, sink: Sink) -> Result<(), Errno> {
        todo!()
    }
    pub fn connect_wait(&self, addr: SocketAddr) -> Result<(), Errno> {
        todo!()
    }
    pub fn accept_wait(&self, timeout: Option<Duration>) -> Result<Socket, Errno> {
        todo!()
    }
    pub fn send_wait(&self, memory: Memory) -> Result<usize, Errno> {
        todo!()
    }
    pub fn recv_wait(&self, memory: &Memory, flags: RecvFlags) -> Result<usize, Errno> {
        todo!()
    }
    pub fn poll_wait(&self, wanted: Ready, timeout: Option<Duration>) -> Result<Ready, Errno> {
        todo!()
    }
    pub fn ready(&self) -> Ready {
        todo!()
    }
    pub fn path(&self) -> Option<weft_verbs::Path> {
        todo!()
    }
}
