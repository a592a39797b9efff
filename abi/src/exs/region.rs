//! Registered regions of programs, and who uses them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use rustix::io::Errno;
use smallvec::SmallVec;
use weft_exs::Region;

/// What an `exs_mhandle_t` stands for.
pub(crate) struct Mem {
    pub(super) current: RwLock<Registered>,
    /// Operations that have not been dequeued.
    users: AtomicUsize,
}

pub(crate) struct Registered {
    pub(super) addr: usize,
    /// Not there when it has been deregistered.
    pub(super) region: Option<Arc<Region>>,
}

/// An operation uses the region until this is dropped.
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

/// The regions that one operation uses: mostly one.
pub(crate) type Uses = SmallVec<[InUse; 1]>;
