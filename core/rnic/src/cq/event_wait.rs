//! Waiting for a completion queue's event.

use std::sync::atomic::Ordering;

use super::Cq;
use super::spin::SpinBudget;
use crate::ext::CqExt;

/// Threads that wait for events of completion queues: for a moment they drive the members themselves, if that has succeeded lately. A
/// message that arrives then needs no wake-up of the engine or of the thread.
pub struct EventWait(SpinBudget);

/// So often a queue whose events were awaited keeps its members from the engine when an event is asked for.
const AWAITED: u8 = 2;

impl Default for EventWait {
    fn default() -> Self {
        EventWait(SpinBudget::new())
    }
}

impl EventWait {
    /// Drive the members of these queues until `come` says that an event is there. False: it has not come, and the engine drives them from
    /// here on; the caller may sleep.
    pub fn try_for(&self, cqs: &[Cq], come: impl Fn() -> bool) -> bool {
        let found = self.0.try_for(|| {
            for cq in cqs {
                cq.0.drive_awaited();
            }
            come()
        });
        for cq in cqs {
            if found {
                cq.0.awaited.store(AWAITED, Ordering::Relaxed);
            } else {
                cq.0.awaited.store(0, Ordering::Relaxed);
                cq.release();
            }
        }
        found
    }
}
