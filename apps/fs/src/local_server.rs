//! The server for programs of its own host and user: a Unix socket through which `open` returns a descriptor of the memory file.
//!
//! It has an abstract name with the server's port, so it is visible only in the server's network namespace. Both ends check the other's user, which the kernel
//! attests. A request and its reply are one message each, as in [`crate::wire`]; a connection carries one of each, and the reply carries the descriptor of the
//! opened file.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds};

use crate::error::Error;
use crate::wire::{MAX_MESSAGE, PROTOCOL, Reply, Request};

/// The time limit of either end.
const PATIENCE: Duration = Duration::from_secs(10);

fn name(port: u16) -> Vec<u8> {
    // Programs of another version do not find it, and connect as from another host, where each says which version it has.
    format!("weft-fs/{}/{port}", PROTOCOL.version).into_bytes()
}

/// Listens on the Unix socket for the server's port.
pub(crate) fn listen(port: u16) -> io::Result<OwnedFd> {
    unix::listen(Name::Abstract(&name(port)), 64)
}

/// Accepts a connection of a program of our user; `None` for another user's.
pub(crate) fn accept(socket: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let Some(conn) = unix::accept(socket)? else {
        return Ok(None);
    };
    let ours = unix::peer_cred(&conn).is_ok_and(|cred| cred.is_same_user());
    Ok(ours.then_some(conn))
}

/// Waits for the one message of a connection.
pub(crate) fn receive(conn: &OwnedFd, fds: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE + 64];
    loop {
        match unix::recv_with_fds(conn, &mut bytes, fds) {
            Ok(Some((len, fds))) => {
                bytes.truncate(len);
                return Ok((bytes, fds));
            }
            Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let ready = poll_fds(&[(conn.as_fd(), Interest::READ)], Some(PATIENCE))?;
                if ready == 0 {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

pub(crate) fn send(conn: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    unix::send_with_fds(conn, bytes, fds)
}

/// Whether an address is one of this host.
fn is_here(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok()
}

/// Asks the server of our host and user at this address. `None`: there is none, so the server has to be reached by RDMA.
///
/// # Errors
/// [`Error::Gone`] if it does not answer.
pub fn ask(addr: SocketAddr, request: &Request) -> Result<Option<(Reply, Option<OwnedFd>)>, Error> {
    if !is_here(addr.ip()) {
        return Ok(None);
    }
    let Ok(conn) = unix::connect(Name::Abstract(&name(addr.port()))) else {
        return Ok(None);
    };
    if !unix::peer_cred(&conn).is_ok_and(|cred| cred.is_same_user()) {
        return Ok(None);
    }
    let gone = |_| Error::Gone("the server of this host does not answer");
    unix::send_with_fds(&conn, &request.encode(), &[]).map_err(gone)?;
    let (bytes, mut fds) = receive(&conn, 1).map_err(gone)?;
    let reply = Reply::decode(&bytes).map_err(|e| Error::Foreign(e.0))?;
    Ok(Some((reply, fds.pop())))
}
