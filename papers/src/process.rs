//! What the suites ask of their peer, beside operations.

use serde::{Deserialize, Serialize};
pub(crate) use weft_bench::process::{Peer, Reply, read_plan, unexpected, value};

/// The tasks of the suites.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Be a server of blast at this address for one client, until it disconnects.
    BlastServe,
    /// Be a client of blast from now on.
    BlastConnect,
    /// As that client, do one run.
    Blast,
    /// Accept the connections of a plan as a session with this number.
    Sdp,
    /// Do the peer's part of this many sends of that session.
    SdpGo,
    /// Close that session.
    SdpClose,
    /// Receive over a link that loses packets.
    Lossy,
    /// Receive together with others.
    Group,
    /// Be a server of many clients, or these.
    Clients,
}
