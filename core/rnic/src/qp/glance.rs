//! The state that a connection publishes for polls without a lock, see [`crate::cq::Glance`].

use std::sync::atomic::Ordering;

use super::{Core, QpInner};
use crate::types::QpState;

impl QpInner {
    /// Publishes the state before the lock is released.
    #[inline]
    pub(super) fn note_still(&self, core: &Core) {
        if self.glance.has_ring() {
            self.glance.set(self.is_still(core));
        }
    }

    fn is_still(&self, core: &Core) -> bool {
        core.ended.is_none()
            && core.tx.is_still()
            && !core.rx.held.waits
            && core.stream.as_ref().is_some_and(|s| !s.has_work())
            && core.confirming.as_ref().is_none_or(|c| !c.is_late())
            && self.local().is_some_and(|local| !local.lends())
            && self.state() == QpState::Rts
            && self.deferred.load(Ordering::Relaxed) == 0
            && !self.has_inbox.load(Ordering::Relaxed)
            && !self.is_paused()
    }
}
