//! A polling thread: the completions that it takes without the queue, and its cache of the queue's state.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::{CqInner, Glance, Member, Port};
use crate::lock::lock;
use crate::types::Wc;

/// A polling thread that takes completions while it drives. The completions bypass the queue, as long as the queue has no earlier ones.
pub(crate) struct Poller<'a> {
    pub(super) cq: &'a CqInner,
    pub(super) out: &'a mut [Wc],
    pub(super) taken: usize,
}

impl Poller<'_> {
    /// Take completions for this queue, all or none.
    pub(crate) fn take(&mut self, cq: &CqInner, wcs: &mut SmallVec<[Wc; 8]>) {
        let room = self.out.len() - self.taken;
        // If an event was requested, every completion goes through the queue.
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

/// A thread's cache of a queue's state: valid while the queue has not changed.
struct Known {
    cq: u64,
    changes: u32,
    /// `None`: there is more than one, or nothing.
    only: Option<Only>,
}

/// All that a queue has to be driven for.
pub(super) enum Only {
    Member(Weak<dyn Member>, Arc<Glance>),
    Port(Weak<dyn Port>),
}

/// The same, kept.
pub(super) enum Kept {
    Member(Arc<dyn Member>),
    Port(Arc<dyn Port>),
}

impl Only {
    pub(super) fn keep(&self) -> Option<Kept> {
        match self {
            Only::Member(member, _) => member.upgrade().map(Kept::Member),
            Only::Port(port) => port.upgrade().map(Kept::Port),
        }
    }
}

/// Counts completion queues.
pub(super) static QUEUES: AtomicU64 = AtomicU64::new(1);
/// Queues that a thread remembers something of.
const REMEMBERED: usize = 4;

thread_local! {
    static KNOWN: RefCell<[Option<Known>; REMEMBERED]> = const { RefCell::new([const { None }; REMEMBERED]) };
}

impl CqInner {
    /// Do something with the only member or port, if there is only one.
    pub(super) fn with_only<R>(&self, f: impl FnOnce(&Only) -> R) -> Option<R> {
        KNOWN
            .try_with(|known| {
                let mut known = known.try_borrow_mut().ok()?;
                let place = &mut known[self.id as usize % REMEMBERED];
                let changes = self.changes.load(Ordering::Acquire);
                if let Some(known) = place
                    && (known.cq, known.changes) == (self.id, changes)
                {
                    return known.only.as_ref().map(f);
                }
                let known = place.insert(Known {
                    cq: self.id,
                    changes,
                    only: self.find_only(),
                });
                known.only.as_ref().map(f)
            })
            .ok()
            .flatten()
    }

    #[cold]
    fn find_only(&self) -> Option<Only> {
        let members = self
            .members
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let ports = lock(&self.ports);
        match (members.as_slice(), ports.as_slice()) {
            ([one], []) => {
                let member = one.upgrade()?;
                let glance = Arc::clone(member.glance());
                Some(Only::Member(Weak::clone(one), glance))
            }
            ([], [(port, _)]) => Some(Only::Port(Weak::clone(port))),
            _ => None,
        }
    }

    /// A member or port is removed: drop this thread's cache of it. (Other threads keep theirs until they poll again, or end.)
    pub(super) fn forget_only(&self) {
        let _ = KNOWN.try_with(|known| {
            let mut known = known.try_borrow_mut().ok()?;
            let place = &mut known[self.id as usize % REMEMBERED];
            place.take_if(|known| known.cq == self.id)
        });
    }

    /// Whether a poll would find nothing and do nothing, decided by loads only.
    pub(super) fn is_idle(&self) -> bool {
        !self.deferred.load(Ordering::Relaxed)
            && self.with_only(|only| matches!(only, Only::Member(_, glance) if glance.is_idle()))
                == Some(true)
            && self.len.load(Ordering::Acquire) == 0
    }
}
