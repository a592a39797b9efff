//! The ends of connections of RoCE that an identifier holds.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::{Error, RoceConn, RoceEnd, RoceListening, RoceQp};

use super::roce_name::RoceName;
use crate::verbs::errno;
use crate::verbs::gid::gids;
use crate::verbs::object::{Guard, Name, lock};
use crate::verbs::qp::QpObj;

/// The queue pair of a connection of RoCE, by name: [`RoceEnd`] would keep it.
#[derive(Clone)]
pub(super) enum Half {
    /// The identifier's.
    Ours(Name<QpObj>),
    /// One of this number, which the program moves itself; and whether it is unreliable (UC).
    Programs(u32, bool),
}

/// A queue pair that speaks RoCE, and its connection once there is one.
#[derive(Clone)]
pub(super) struct RoceLink {
    half: Half,
    pub(super) conn: Arc<Mutex<Option<Arc<RoceConn>>>>,
}

/// Listens until it is dropped, on each address.
pub(super) struct RoceListener {
    pub(super) _listening: Vec<RoceListening>,
    pub(super) _name: Option<RoceName>,
}

/// The interface of a link-local address; else 0.
pub(super) fn scope(addr: SocketAddr) -> u32 {
    match addr {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(addr) => addr.scope_id(),
    }
}

/// The addresses at which a listener listens: its own, or all of this host, with their interfaces.
///
/// # Errors
/// As [`gids`].
pub(super) fn addresses(addr: SocketAddr) -> Result<Vec<(IpAddr, u32)>, Errno> {
    if !addr.ip().is_unspecified() {
        return Ok(vec![(addr.ip(), scope(addr))]);
    }
    let there = gids()?.into_iter().filter(|gid| !gid.is_empty());
    let ours = there.filter(|gid| gid.ip.is_ipv4() || addr.is_ipv6());
    Ok(ours.map(|gid| (gid.ip, gid.ifindex)).collect())
}

/// Why there is no listener at one of the addresses. Another one has the port number, or another program of the host the name that stands for it.
pub(super) fn not_listening(
    error: Error,
    kind: &str,
    (ip, scope): (IpAddr, u32),
    number: u16,
) -> Errno {
    let refused = match error {
        // Of this process.
        Error::Invalid(_) => Errno::ADDRINUSE,
        error => errno(error),
    };
    tracing::warn!(
        "no listener of RoCE at {ip}, port {number}: {refused}; for \"Address in use\" end the program that has it, which `ss -xa` shows as @weft/roce/1/{kind}/{ip}%{scope}/{number}, or take another port"
    );
    refused
}

impl RoceLink {
    pub(super) fn new(half: Half) -> RoceLink {
        RoceLink {
            half,
            conn: Arc::default(),
        }
    }

    /// The queue pair, as a connection takes it.
    pub(super) fn end(&self) -> Result<RoceEnd, Errno> {
        Ok(match self.half {
            Half::Ours(_) => RoceEnd::Ours(self.qp()?),
            Half::Programs(num, unreliable) => RoceEnd::Programs { num, unreliable },
        })
    }

    /// The identifier's queue pair; `EINVAL` where the program moves its own.
    pub(super) fn object(&self) -> Result<Guard<QpObj>, Errno> {
        match &self.half {
            Half::Ours(name) => name.get(),
            Half::Programs(..) => Err(Errno::INVAL),
        }
    }

    /// As [`RoceLink::object`].
    pub(super) fn qp(&self) -> Result<Arc<RoceQp>, Errno> {
        self.object()?.roce.as_ref().ok_or(Errno::INVAL)?.native()
    }

    /// What the connection has settled, where the program asks its queue pair.
    pub(super) fn show_depths(&self, depths: (u8, u8)) {
        if let Ok(qp) = self.object() {
            qp.show_depths(depths);
        }
    }

    /// The program's queue pair, which it moves itself, is ready.
    pub(super) fn establish(&self) -> Result<(), Errno> {
        let conn = lock(&self.conn).clone().ok_or(Errno::INVAL)?;
        conn.establish().map_err(errno)
    }

    /// The program has got a message of the peer.
    pub(super) fn heard(&self) {
        if let Some(conn) = lock(&self.conn).clone() {
            conn.heard();
        }
    }

    /// Ends the connection: the peer is told.
    pub(super) fn close(&self) {
        let conn = lock(&self.conn).clone();
        match conn {
            Some(conn) => conn.disconnect(),
            None => self.bury(),
        }
    }

    /// The program has no use for the connection any more, made or not.
    pub(super) fn forget(&self) {
        if let Some(conn) = lock(&self.conn).clone() {
            conn.forget();
        }
    }

    /// The connection has ended: ends the queue pair in any state.
    pub(super) fn bury(&self) {
        if let Ok(qp) = self.qp() {
            qp.to_error();
        }
    }
}
