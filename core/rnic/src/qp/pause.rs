//! Queue pairs whose port is down, to test how programs react: they send and receive nothing, and no side is notified.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use weft_mem::Access;

use super::QpInner;

impl QpInner {
    /// Nothing moves for now.
    #[inline]
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// The operations that a peer on shared memory may carry out itself.
    pub(super) fn open_rights(&self) -> Access {
        if self.is_paused() {
            Access::empty()
        } else {
            self.access()
        }
    }

    pub(super) fn set_paused(self: &Arc<Self>, paused: bool) {
        self.with_core(|core| {
            let changed = self.paused.swap(paused, Ordering::Relaxed) != paused;
            let local = self.connected.get().and_then(|c| c.link.local());
            if let Some(local) = local.filter(|_| changed && core.ended.is_none()) {
                // The doors are shut to a paused peer: its requests wait in the ring.
                local.let_in(self.open_rights());
            }
        });
        if !paused {
            self.drive(true);
            self.rearm_and_flush();
            // Sleeping threads have to watch the transport again.
            self.send_cq.kick();
            self.recv_cq.kick();
        }
    }
}
