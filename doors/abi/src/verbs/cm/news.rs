//! Events of identifiers before the program fetches them.

use std::ffi::c_int;
use std::net::IpAddr;

use weft_verbs::cm::gid_of;

use super::request::Unseen;
use super::terms::Retries;
use super::types::rdma_cm_event_type;

/// An event of an identifier.
#[derive(Default)]
pub(super) struct News {
    pub(super) event: rdma_cm_event_type,
    pub(super) status: c_int,
    pub(super) private_data: Vec<u8>,
    /// Reads and atomics: how many the peer will have outstanding, and how many it accepts.
    pub(super) depths: (u16, u16),
    pub(super) retries: Retries,
    pub(super) qp_num: u32,
    /// The destination of a datagram queue pair.
    pub(super) ud: Option<Ud>,
    /// A multicast group is joined.
    pub(super) join: Option<Join>,
    pub(super) request: Option<Unseen>,
    /// The argument of the program's own event (`rdma_write_cm_event(3)`).
    pub(super) arg: Option<u64>,
}

impl News {
    pub(super) fn new(event: rdma_cm_event_type) -> News {
        News {
            event,
            ..News::default()
        }
    }

    /// With a status: a negative errno, or the transport's code.
    pub(super) fn status(event: rdma_cm_event_type, status: c_int) -> News {
        News {
            status,
            ..News::new(event)
        }
    }
}

/// How to send to a datagram queue pair.
#[derive(Clone, Copy)]
pub(super) struct Ud {
    pub(super) dgid: [u8; 16],
    pub(super) qkey: u32,
}

/// A multicast group, and the program's parameters for it.
pub(super) struct Join {
    pub(super) membership: Membership,
    pub(super) context: usize,
}

/// A group that an identifier is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) group: IpAddr,
    /// Send only: the queue pair receives nothing.
    pub(super) silent: bool,
}

impl Membership {
    pub(super) fn gid(self) -> [u8; 16] {
        gid_of(self.group)
    }
}
