//! Waiting for a completion queue's event.

use std::sync::atomic::Ordering;

use weft_sys::spin::Spun;

use super::Cq;
use crate::ext::CqExt;

/// Threads that wait for events of completion queues: for a moment they drive the members themselves, if that has succeeded lately. A
/// message that arrives then needs no wake-up of the engine or of the thread.
#[derive(Default)]
pub struct EventWait(Spun);

/// So often a queue whose events were awaited keeps its members from the engine when an event is asked for.
const AWAITED: u8 = 2;

impl EventWait {
    /// Drive the members of these queues until `come` says that an event is there. False: it has not come, and the engine drives them from
    /// here on; the caller may sleep.
    pub fn try_for(&self, cqs: &[Cq], come: impl Fn() -> bool) -> bool {
        let may_spin = cqs.iter().all(|cq| cq.0.may_spin());
        let found = may_spin
            && self.0.wait(|| {
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
