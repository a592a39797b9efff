//! The glance: a poll detects without a lock that it has nothing to do.
//!
//! On shared memory a connection is idle if its ring is empty, nothing is queued, and it waits for nothing except frames from the peer. The
//! holder of the connection's lock publishes this when it releases the lock; from then on the ring's words are sufficient.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use weft_ring::End;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Glance {
    /// Nothing can happen except by frames of the peer in the ring. Written under the connection's lock.
    still: AtomicBool,
    ring: OnceLock<Arc<End>>,
}

impl Glance {
    /// The connection is in shared memory.
    pub(crate) fn watch(&self, ring: &Arc<End>) {
        let _ = self.ring.set(Arc::clone(ring));
    }

    /// Whether the connection uses shared memory.
    #[inline]
    pub(crate) fn has_ring(&self) -> bool {
        self.ring.get().is_some()
    }

    /// A poll would find nothing, and do nothing.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.still.load(Ordering::Acquire) && self.ring.get().is_some_and(|ring| !ring.has_news())
    }

    /// Sets whether nothing can happen except by frames of the peer in the ring.
    pub(crate) fn set(&self, still: bool) {
        if self.still.load(Ordering::Relaxed) != still {
            self.still.store(still, Ordering::Release);
        }
    }
}
