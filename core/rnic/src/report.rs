//! The report of a connection, see [`crate::stat`].

use std::net::SocketAddr;
use std::time::Duration;

use crate::types::{ConnCounters, QpState};

/// One connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The queue pair's number.
    pub qp: u32,
    /// Its state.
    pub state: QpState,
    /// Its own address.
    pub local: SocketAddr,
    /// Its peer's.
    pub peer: SocketAddr,
    /// Its transport: `local` (shared memory), `tcp` or `tls`.
    pub transport: String,
    /// The cipher of its data, for example `AES-128-GCM`; `None` without encryption.
    pub cipher: Option<String>,
    /// Why it is not shared memory, see [`Path::reason`](crate::Path::reason).
    pub reason: Option<String>,
    /// The time since it was connected.
    pub age: Duration,
    /// Its counters.
    pub counters: ConnCounters,
}
