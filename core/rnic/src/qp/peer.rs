//! The peer of a queue pair: the connection to it, and what both sides have agreed.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use weft_mem::Access;

use super::CallOff;
use super::confirm::{CONFIRMS, visible};
use super::rnr_queue::RNR_FOR_EVER;
use crate::engine::Registration;
use crate::lock::lock;
use crate::transport::Llp;
use crate::transport::local::LocalLink;

/// See the [module](self). Nearly all of it is written once, and read by every request.
pub(super) struct Peer {
    pub(super) connected: OnceLock<Connected>,
    /// The dial of this queue pair.
    pub(super) dial: Mutex<Option<Weak<dyn CallOff>>>,
    /// Why the connection is not on shared memory.
    pub(super) reason: OnceLock<String>,
    /// Inbound and outbound Reads and atomics, once connected.
    pub(super) depths: OnceLock<(u16, u16)>,
    /// The program's depths, where room for Reads of our own was asked for in addition at start-up.
    asked_depths: Mutex<Option<(u16, u16)>>,
    /// The operations that the peer may do, as bits of [`Access`].
    access: AtomicU32,
    /// How often the peer waits for a receive for our messages, see [`Qp::set_rnr_retry`](super::Qp::set_rnr_retry).
    pub(super) rnr_retry: AtomicU8,
}

pub(super) struct Connected {
    pub(super) link: Llp,
    pub(super) registration: Registration,
    pub(super) since: Instant,
    /// See [`LinkOptions::linger`](crate::types::LinkOptions::linger).
    pub(super) linger: Duration,
}

impl Default for Peer {
    fn default() -> Self {
        Peer {
            connected: OnceLock::new(),
            dial: Mutex::default(),
            reason: OnceLock::new(),
            depths: OnceLock::new(),
            asked_depths: Mutex::default(),
            access: AtomicU32::new(Access::all().bits()),
            rnr_retry: AtomicU8::new(RNR_FOR_EVER),
        }
    }
}

impl Peer {
    /// The transport, if it is shared memory.
    #[inline]
    pub(super) fn local(&self) -> Option<&LocalLink> {
        self.connected.get()?.link.local()
    }

    /// The operations that the peer may do.
    #[inline]
    pub(super) fn access(&self) -> Access {
        Access::from_bits_truncate(self.access.load(Ordering::Relaxed))
    }

    /// From now on the peer may do this; returns what it was before.
    pub(super) fn set_access(&self, access: Access) -> Access {
        Access::from_bits_truncate(self.access.swap(access.bits(), Ordering::Relaxed))
    }

    /// Whether the connection has come about, and allows no Reads and atomics.
    #[inline]
    pub(super) fn refuses_reads(&self) -> bool {
        self.depths.get().is_some_and(|(_, ord)| *ord == 0)
    }

    /// Depths are about to be negotiated, and the program's are these: what to add to them, for Reads of our own.
    pub(super) fn ask_for_own_reads(&self, ird: u16, ord: u16) -> u16 {
        *lock(&self.asked_depths) = Some((ird, ord));
        CONFIRMS
    }

    /// The program's part of the negotiated depths. `expected`: the peer joins by number, and is prepared.
    pub(super) fn visible_depths(&self, (ird, ord): (u16, u16), expected: bool) -> (u16, u16) {
        match *lock(&self.asked_depths) {
            None => (ird, ord),
            // What it leaves is what its program accepts.
            Some(_) if expected => {
                let ours = |depth: u16| depth.checked_sub(CONFIRMS).unwrap_or(depth.min(1));
                (ours(ird), ours(ord))
            }
            Some(asked) => (visible(ird, asked.0), visible(ord, asked.1)),
        }
    }
}
