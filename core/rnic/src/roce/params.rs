//! What a program says of a connected queue pair: at its creation, and at the steps to RTR and RTS.

use std::net::IpAddr;
use std::sync::Arc;

use crate::comp_counters::CompCounters;
use crate::cq::Cq;
use crate::srq::Srq;

/// The parameters of a queue pair of RoCE.
#[derive(Clone)]
pub struct RoceInit {
    /// The queue for completions of sends.
    pub send_cq: Cq,
    /// The queue for completions of receives; may be the same queue.
    pub recv_cq: Cq,
    /// Take receives from here, not from a queue of its own.
    pub srq: Option<Srq>,
    /// An unreliable connection (UC), not a reliable one (RC).
    pub unreliable: bool,
    /// Sends outstanding at once.
    pub max_send_wr: u32,
    /// Receives outstanding at once.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of one request.
    pub max_sge: u32,
    /// Inline bytes of one request.
    pub max_inline: u32,
    /// Every send makes a completion, signaled or not.
    pub sq_sig_all: bool,
    /// Its number, as for [`QpInit::num`](crate::QpInit::num), of at most 24 bits.
    pub num: Option<u32>,
    /// As [`QpInit::comp_counters`](crate::QpInit::comp_counters).
    pub comp_counters: Option<Arc<CompCounters>>,
}

impl RoceInit {
    /// As [`QpInit::new`](crate::QpInit::new): a reliable connection.
    pub fn new(send_cq: &Cq, recv_cq: &Cq) -> Self {
        RoceInit {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            unreliable: false,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
            sq_sig_all: false,
            num: None,
            comp_counters: None,
        }
    }
}

/// The way to a peer, and what it sends (the attributes of RTR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RocePath {
    /// The peer's address. With a link-local one of IPv6, `scope` is the interface.
    pub peer: IpAddr,
    /// The index of the interface, for link-local addresses; else 0.
    pub scope: u32,
    /// The peer's queue pair.
    pub dest_qp: u32,
    /// The first packet sequence number that the peer sends.
    pub rq_psn: u32,
    /// Payload of a full packet, in bytes: 256, 512, 1,024, 2,048 or 4,096, and no more than the way takes ([`roce_mtu`](crate::roce_mtu)).
    pub mtu: u32,
    /// Reads and atomics of the peer at once.
    pub ird: u8,
    /// What a sender is told to wait while there is no receive, a code of InfiniBand (table 45).
    pub rnr_timer: u8,
    /// The type of service (IPv4) or traffic class (IPv6) of what is sent; 0 is the system's usual one.
    pub traffic_class: u8,
}

/// How requests are sent (the attributes of RTS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceSend {
    /// The first packet sequence number that we send.
    pub sq_psn: u32,
    /// Reads and atomics of ours at once.
    pub ord: u8,
    /// How long an acknowledgement is waited for at first: 4.096 us times two to this power; 0: for ever. Each wait in vain makes the next one
    /// twice as long, up to half a second.
    pub timeout: u8,
    /// How often one packet is sent again, 0 to 7.
    pub retry_count: u8,
    /// How often a message is tried again whose receiver was not ready; 7: without end.
    pub rnr_retry: u8,
}
