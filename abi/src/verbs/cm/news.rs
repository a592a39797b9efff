//! What happens to identifiers, until the program is told.

use std::ffi::c_int;
use std::net::IpAddr;

use weft_verbs::cm::gid_of;

use super::request::Request;
use super::types::rdma_cm_event_type;

/// What happened to an identifier.
#[derive(Default)]
pub(super) struct News {
    pub(super) event: rdma_cm_event_type,
    pub(super) status: c_int,
    pub(super) private_data: Vec<u8>,
    /// Reads and atomics: what the peer will have outstanding, and what it takes.
    pub(super) depths: (u16, u16),
    pub(super) qp_num: u32,
    /// The way to a datagram queue pair.
    pub(super) ud: Option<Ud>,
    /// A multicast group is joined.
    pub(super) join: Option<Join>,
    /// What wants to be answered, with a request.
    pub(super) request: Option<Box<Request>>,
    /// What the program said of an event of its own (`rdma_write_cm_event(3)`).
    pub(super) arg: Option<u64>,
}

impl News {
    pub(super) fn new(event: rdma_cm_event_type) -> News {
        News {
            event,
            ..News::default()
        }
    }

    /// With a status: a negative errno, or the transport's own number.
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

/// A multicast group, and what the program said when it joined.
pub(super) struct Join {
    pub(super) membership: Membership,
    pub(super) context: usize,
}

/// A group that an identifier is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) group: IpAddr,
    /// To send only: the queue pair hears nothing.
    pub(super) silent: bool,
}

impl Membership {
    pub(super) fn gid(self) -> [u8; 16] {
        gid_of(self.group)
    }
}
