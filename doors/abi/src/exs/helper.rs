//! State shared between an operation and the thread that makes its kernel connection.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use weft_exs::{Context, Socket};

use super::closing::{Done, LINGER};

/// The result of a helper thread. Absent: the operation was cancelled first, or the thread ended without a result.
pub(super) enum Found {
    Failed(Errno),
    Connected(Result<(), Errno>),
    Accepted(Result<(OwnedFd, Option<SocketAddr>), Errno>),
}

pub(super) type Shared = Arc<Mutex<Option<Found>>>;

/// An operation that a helper thread carries out.
pub(super) struct Helped {
    pub(super) bell: Socket,
    pub(super) found: Shared,
    /// Dropped to end the thread, which notices it.
    pub(super) alive: Option<OwnedFd>,
    pub(super) ended: Arc<Done>,
}

/// Before the program gets the event, the thread releases the program's socket, so that a close is final.
impl Drop for Helped {
    fn drop(&mut self) {
        self.alive = None;
        self.ended.wait(LINGER);
    }
}

impl Helped {
    fn take(&self) -> Option<Found> {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(super) fn connected(&self) -> Result<(), Errno> {
        match self.take() {
            Some(Found::Connected(result)) => result,
            Some(Found::Failed(errno)) => Err(errno),
            _ => Err(Errno::CANCELED),
        }
    }

    /// The result of the accept. The program owns the descriptor from now on.
    pub(super) fn accepted(&self) -> Result<(RawFd, Option<SocketAddr>), Errno> {
        match self.take() {
            Some(Found::Accepted(result)) => result.map(|(fd, peer)| (fd.into_raw_fd(), peer)),
            Some(Found::Failed(errno)) => Err(errno),
            _ => Err(Errno::CANCELED),
        }
    }
}

/// The connection of the process with itself.
pub(super) struct Bell {
    socket: Socket,
    _other: OwnedFd,
}

impl Bell {
    pub(super) fn socket(&self) -> Socket {
        self.socket.clone()
    }

    pub(super) fn new(context: &Context) -> Result<Bell, Errno> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType};
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let socket = || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
        };
        let (listener, one) = (socket()?, socket()?);
        rustix::net::bind(&listener, &any)?;
        rustix::net::listen(&listener, 1)?;
        rustix::net::connect(&one, &rustix::net::getsockname(&listener)?)?;
        let ours = rustix::net::getsockname(&one)?;
        loop {
            // Ignore connections from others.
            let (other, from) = rustix::net::acceptfrom_with(&listener, SocketFlags::CLOEXEC)?;
            if from.as_ref() == Some(&ours) {
                return Ok(Bell {
                    socket: Socket::from_tcp(context, one)?,
                    _other: other,
                });
            }
        }
    }
}
