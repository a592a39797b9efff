//! Registered regions of programs, and their users.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use rustix::io::Errno;
use smallvec::SmallVec;
use weft_exs::Region;

/// The object of an `exs_mhandle_t`.
pub(crate) struct Mem {
    pub(super) current: RwLock<Registered>,
    /// Number of operations that have not been dequeued.
    users: AtomicUsize,
}

pub(crate) struct Registered {
    pub(super) addr: usize,
    /// `None` when it has been deregistered.
    pub(super) region: Option<Arc<Region>>,
}

/// Marks the region as used by an operation until it is dropped.
pub(crate) struct InUse(Arc<Mem>);

impl InUse {
    pub(super) fn new(mem: Arc<Mem>) -> InUse {
        mem.users.fetch_add(1, Ordering::AcqRel);
        InUse(mem)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Mem {
    pub(super) fn new(current: Registered) -> Mem {
        Mem {
            current: RwLock::new(current),
            users: AtomicUsize::new(0),
        }
    }

    /// # Errors
    /// `EBUSY` while an operation uses it.
    pub(super) fn idle(&self) -> Result<(), Errno> {
        match self.users.load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(Errno::BUSY),
        }
    }
}

/// The regions that one operation uses, usually one.
pub(crate) type Uses = SmallVec<[InUse; 1]>;
