//! What programs say of connections, and hear.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use super::{RocePath, RocePort, RoceQp, RoceSend, scope_of};
use crate::types::Error;

/// This side's queue pair of a connection.
#[derive(Clone)]
pub enum RoceEnd {
    /// One that has no peer yet: the connection moves it, and ends it.
    Ours(Arc<RoceQp>),
    /// One that the program moves itself. The end of the connection does not change it.
    Programs {
        /// Its number.
        num: u32,
        /// UC, else RC.
        unreliable: bool,
    },
}

impl From<&Arc<RoceQp>> for RoceEnd {
    fn from(qp: &Arc<RoceQp>) -> RoceEnd {
        RoceEnd::Ours(Arc::clone(qp))
    }
}

impl RoceEnd {
    pub(super) fn num(&self) -> u32 {
        match self {
            RoceEnd::Ours(qp) => qp.num(),
            RoceEnd::Programs { num, .. } => *num,
        }
    }

    pub(super) fn is_unreliable(&self) -> bool {
        match self {
            RoceEnd::Ours(qp) => qp.is_unreliable(),
            RoceEnd::Programs { unreliable, .. } => *unreliable,
        }
    }

    pub(super) fn moves_itself(&self) -> bool {
        matches!(self, RoceEnd::Programs { .. })
    }

    /// What a connection keeps of it.
    pub(super) fn weak(&self) -> Weak<RoceQp> {
        match self {
            RoceEnd::Ours(qp) => Arc::downgrade(qp),
            RoceEnd::Programs { .. } => Weak::new(),
        }
    }
}

/// How a connection is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceConnect {
    /// Private data for the peer: at most [`ROCE_REQUEST_DATA`](crate::ROCE_REQUEST_DATA) bytes in a request,
    /// [`ROCE_REPLY_DATA`](crate::ROCE_REPLY_DATA) in a reply.
    pub private_data: Vec<u8>,
    /// Reads and atomics of the peer at once.
    pub ird: u8,
    /// Reads and atomics of ours at once.
    pub ord: u8,
    /// Retries of packets, 0 to 7, in both directions. A reply has none.
    pub retry_count: u8,
    /// How often the peer repeats a message that finds no receive here, 0 to 7.
    pub rnr_retry: u8,
}

impl Default for RoceConnect {
    fn default() -> Self {
        RoceConnect {
            private_data: Vec::new(),
            ird: 16,
            ord: 16,
            retry_count: 7,
            rnr_retry: 7,
        }
    }
}

/// What a program needs to move its queue pair itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceTerms {
    /// The peer's queue pair.
    pub dest_qp: u32,
    /// The first packet sequence numbers, the peer's and ours.
    pub rq_psn: u32,
    /// See `rq_psn`.
    pub sq_psn: u32,
    /// The path MTU in bytes.
    pub mtu: u32,
    /// How long an RNR NAK of ours makes the peer wait, InfiniBand's code.
    pub rnr_timer: u8,
    /// How long to wait for an acknowledgement, InfiniBand's code.
    pub timeout: u8,
    /// Retries of packets, 0 to 7.
    pub retry_count: u8,
    /// Retries of messages that find no receive, 0 to 7.
    pub rnr_retry: u8,
}

impl RoceTerms {
    /// A queue pair of ours sends to this peer and receives from it from now on, with so many Reads and atomics at once, the peer's and ours.
    ///
    /// # Errors
    /// As [`RoceQp::receive_from`] and [`RoceQp::send_with`].
    pub(super) fn move_qp(
        &self,
        qp: &RoceQp,
        (port, peer): (&RocePort, SocketAddr),
        (ird, ord): (u8, u8),
    ) -> Result<(), Error> {
        let path = RocePath {
            peer: peer.ip(),
            scope: scope_of(peer),
            dest_qp: self.dest_qp,
            rq_psn: self.rq_psn,
            mtu: self.mtu,
            ird,
            rnr_timer: self.rnr_timer,
            traffic_class: 0,
        };
        let send = RoceSend {
            sq_psn: self.sq_psn,
            ord,
            timeout: self.timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
        };
        qp.receive_from(port, &path)?;
        qp.send_with(&send)
    }
}

/// What becomes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoceEvent {
    /// It is made.
    Established {
        /// The private data of the reply; empty at the side that accepted.
        private_data: Vec<u8>,
        /// Reads and atomics at once, the peer's and ours.
        depths: (u8, u8),
        /// How often we repeat a message that finds no receive.
        rnr_retry: u8,
    },
    /// The peer has accepted the request of a program that moves its queue pair itself: [`RoceConn::establish`](crate::RoceConn::establish) says that it has.
    Replied {
        /// As with [`RoceEvent::Established`].
        private_data: Vec<u8>,
        /// As with [`RoceEvent::Established`].
        depths: (u8, u8),
        /// For the queue pair.
        terms: RoceTerms,
    },
    /// The peer, or its manager, refuses it. The queue pair stays as it was.
    Rejected {
        /// InfiniBand's reason (12.6.7.2): 28 is the program, 8 that nobody listens.
        reason: u16,
        /// Of the program.
        private_data: Vec<u8>,
    },
    /// The peer does not answer. A queue pair without a peer stays as it was.
    TimedOut,
    /// It could not be made on this side.
    Failed(&'static str),
    /// One side has ended it: the queue pair is in the error state.
    Disconnected,
}
