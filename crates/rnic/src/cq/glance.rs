//! How a poll sees without a lock that there is nothing for it to do.
//!
//! On shared memory an idle connection is one whose ring is empty: nothing is to be sent, and nothing is waited for but what the peer puts
//! into the ring. Whoever holds the connection's lock says at the end whether that is so; from then on the ring's words tell all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use weft_ring::End;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Glance {
    /// Nothing can happen but by what the peer puts into the ring. Written under the connection's lock.
    still: AtomicBool,
    ring: OnceLock<Arc<End>>,
}

impl Glance {
    /// The connection is in shared memory.
    pub(crate) fn watch(&self, ring: &Arc<End>) {
        let _ = self.ring.set(Arc::clone(ring));
    }

    /// Whether the connection is in shared memory.
    #[inline]
    pub(crate) fn has_ring(&self) -> bool {
        self.ring.get().is_some()
    }

    /// A poll would find nothing, and do nothing.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.still.load(Ordering::Acquire) && self.ring.get().is_some_and(|ring| !ring.has_news())
    }

    /// Whether nothing can happen but by what the peer puts into the ring.
    pub(crate) fn set(&self, still: bool) {
        if self.still.load(Ordering::Relaxed) != still {
            self.still.store(still, Ordering::Release);
        }
    }
}
