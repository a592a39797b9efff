//! How a poll sees without a lock that there is nothing for it to do.
//!
//! On shared memory an idle connection is one whose ring is empty: nothing is to be sent, and nothing is waited for but what the peer puts
//! into the ring. Whoever holds the connection's lock says at the end whether that is so; from then on the ring's words tell all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use weft_ring::End;

use super::{Core, QpInner};
use crate::types::QpState;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Glance {
    /// Nothing can happen but by what the peer puts into the ring. Written under the connection's lock.
    still: AtomicBool,
    ring: OnceLock<Arc<End>>,
}

impl Glance {
    /// The connection is in shared memory.
    pub(super) fn watch(&self, ring: &Arc<End>) {
        let _ = self.ring.set(Arc::clone(ring));
    }

    /// A poll would find nothing, and do nothing.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.still.load(Ordering::Acquire) && self.ring.get().is_some_and(|ring| !ring.has_news())
    }

    fn set(&self, still: bool) {
        if self.still.load(Ordering::Relaxed) != still {
            self.still.store(still, Ordering::Release);
        }
    }
}

impl QpInner {
    /// The lock is about to be let go.
    #[inline]
    pub(super) fn note_still(&self, core: &Core) {
        if self.glance.ring.get().is_some() {
            self.glance.set(self.is_still(core));
        }
    }

    fn is_still(&self, core: &Core) -> bool {
        core.ended.is_none()
            && core.tx.is_still()
            && !core.rx.held.waits()
            && core.stream.as_ref().is_some_and(|s| !s.has_work())
            && core.confirming.as_ref().is_none_or(|c| !c.is_late())
            && self.local().is_some_and(|local| !local.lends())
            && self.state() == QpState::Rts
            && self.deferred.load(Ordering::Relaxed) == 0
            && !self.has_inbox.load(Ordering::Relaxed)
            && !self.is_paused()
    }
}
