//! The statistics of a connection for [`crate::stat`].

use std::sync::Arc;

use super::QpInner;
use crate::report::Connection;

impl QpInner {
    /// `None` before it is connected.
    pub(super) fn describe(self: &Arc<Self>) -> Option<Connection> {
        let connected = self.connected.get()?;
        Some(Connection {
            qp: self.num,
            state: self.state(),
            local: connected.link.local_addr(),
            peer: connected.link.peer_addr(),
            transport: connected.link.name().to_owned(),
            cipher: connected.link.cipher().map(str::to_owned),
            reason: self.reason.get().cloned(),
            age: connected.since.elapsed(),
            ledger: self.with_core(|core| core.ledger),
        })
    }
}
