//! One who polls: what he takes past the queue, and what his thread remembers of the queue.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::{CqInner, Glance, Member};
use crate::types::Wc;

/// One who polls, and takes what completes while he drives. It need not go through the queue, as long as nothing is in the queue that
/// comes before it.
pub(crate) struct Poller<'a> {
    pub(super) cq: &'a CqInner,
    pub(super) out: &'a mut [Wc],
    pub(super) taken: usize,
}

impl Poller<'_> {
    /// Take completions for this queue, all or none.
    pub(crate) fn take(&mut self, cq: &CqInner, wcs: &mut SmallVec<[Wc; 8]>) {
        let room = self.out.len() - self.taken;
        // Who has asked for an event is told of all that comes.
        if wcs.is_empty()
            || !std::ptr::eq(cq, self.cq)
            || wcs.len() > room
            || cq.len.load(Ordering::Acquire) > 0
            || cq.is_armed()
        {
            return;
        }
        let to = &mut self.out[self.taken..];
        for (slot, wc) in to.iter_mut().zip(wcs.iter()) {
            *slot = *wc;
        }
        self.taken += wcs.len();
        wcs.clear();
        cq.note_taken();
    }
}

/// The only member of a queue, as a thread remembers it that polls there: valid as long as the queue has not changed since.
pub(super) struct Sole {
    cq: u64,
    changes: u32,
    pub(super) member: Weak<dyn Member>,
    glance: Arc<Glance>,
}

/// Counts completion queues.
pub(super) static QUEUES: AtomicU64 = AtomicU64::new(1);
/// Queues that a thread remembers the only members of.
const REMEMBERED: usize = 4;

thread_local! {
    static SOLES: RefCell<[Option<Sole>; REMEMBERED]> = const { RefCell::new([const { None }; REMEMBERED]) };
}

impl CqInner {
    /// Do something with what this thread remembers of the only member, if there is only one and no port.
    pub(super) fn with_sole<R>(&self, f: impl FnOnce(&Sole) -> R) -> Option<R> {
        SOLES
            .try_with(|soles| {
                let mut soles = soles.try_borrow_mut().ok()?;
                let place = &mut soles[self.id as usize % REMEMBERED];
                let changes = self.changes.load(Ordering::Acquire);
                if let Some(sole) = place
                    && (sole.cq, sole.changes) == (self.id, changes)
                {
                    return Some(f(sole));
                }
                *place = None;
                let sole = place.insert(self.find_sole(changes)?);
                Some(f(sole))
            })
            .ok()
            .flatten()
    }

    #[cold]
    fn find_sole(&self, changes: u32) -> Option<Sole> {
        let members = self
            .members
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let [one] = members.as_slice() else {
            return None;
        };
        let member = one.upgrade()?;
        (!self.has_ports.load(Ordering::Acquire)).then(|| Sole {
            cq: self.id,
            changes,
            member: Weak::clone(one),
            glance: Arc::clone(member.glance()),
        })
    }

    /// A member goes: this thread does not keep what it remembers of it. (Others do until they poll again, or end.)
    pub(super) fn forget_sole(&self) {
        let _ = SOLES.try_with(|soles| {
            let mut soles = soles.try_borrow_mut().ok()?;
            let place = &mut soles[self.id as usize % REMEMBERED];
            place.take_if(|sole| sole.cq == self.id)
        });
    }

    /// A poll would find nothing, and do nothing: told by loads alone.
    pub(super) fn is_idle(&self) -> bool {
        !self.deferred.load(Ordering::Relaxed)
            && self.with_sole(|sole| sole.glance.is_idle()) == Some(true)
            && self.len.load(Ordering::Acquire) == 0
    }
}
