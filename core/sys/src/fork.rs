//! An object of which a process has one, created at its first use, and created again in a forked child, because threads do not survive a
//! fork.
//!
//! # Safety
//!
//! Slots are leaked before they are published, so references to them stay valid.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// One `T` per process, for a `static`. If a child is forked while another thread of the parent creates the parent's object, the child does not wait
/// for it: locks belong to a process as well.
pub struct PerProcess<T>(AtomicPtr<Slot<T>>);

struct Slot<T> {
    process: u32,
    it: Mutex<Option<Arc<T>>>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Nothing is made yet.
    #[must_use]
    pub const fn new() -> Self {
        PerProcess(AtomicPtr::new(null_mut()))
    }

    /// The one of this process; the first caller makes it while others wait, and after a failure the next one tries again. A parent's is left alone:
    /// descriptors in it are shared with the parent.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<E>(&'static self, make: impl FnOnce() -> Result<Arc<T>, E>) -> Result<Arc<T>, E> {
        let mut it = self
            .slot()
            .it
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(it) = &*it {
            return Ok(Arc::clone(it));
        }
        let made = make()?;
        Ok(Arc::clone(it.insert(made)))
    }

    fn slot(&'static self) -> &'static Slot<T> {
        let process = std::process::id();
        let mut seen = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or leaked before it was stored.
            if let Some(slot) = unsafe { seen.as_ref() }
                && slot.process == process
            {
                return slot;
            }
            let ours = Box::into_raw(Box::new(Slot {
                process,
                it: Mutex::new(None),
            }));
            let swap = self
                .0
                .compare_exchange(seen, ours, Ordering::AcqRel, Ordering::Acquire);
            match swap {
                // SAFETY: stored and leaked just now.
                Ok(_) => return unsafe { &*ours },
                Err(other) => {
                    // SAFETY: no other thread has seen it.
                    drop(unsafe { Box::from_raw(ours) });
                    seen = other;
                }
            }
        }
    }
}

impl<T: Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn is_made_once_and_tried_again_after_a_failure() {
        static ONE: PerProcess<u32> = PerProcess::new();
        assert_eq!(ONE.get(|| Err("not now")), Err("not now"));
        let made = ONE.get(|| Ok::<_, ()>(Arc::new(7))).unwrap();
        let again = ONE.get(|| Err("not asked for")).unwrap();
        assert!(Arc::ptr_eq(&made, &again));
    }
}
