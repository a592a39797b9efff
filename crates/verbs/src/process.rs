//! What a process has one of, made at its first use, and made anew in a forked child: threads do not cross a fork.

use std::sync::{Arc, Mutex, PoisonError};

/// One `T` per process, for a `static`.
pub struct PerProcess<T>(Mutex<Option<(u32, Arc<T>)>>);

impl<T> PerProcess<T> {
    /// Nothing is made yet.
    #[must_use]
    pub const fn new() -> Self {
        PerProcess(Mutex::new(None))
    }

    /// The one of this process; the first caller makes it, and after a failure the next one tries again.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<Arc<T>, E>) -> Result<Arc<T>, E> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        match &*slot {
            Some((of, it)) if *of == process => return Ok(Arc::clone(it)),
            // The parent's is left alone: descriptors in it are shared with the parent.
            Some(_) => std::mem::forget(slot.take()),
            None => {}
        }
        let it = make()?;
        *slot = Some((process, Arc::clone(&it)));
        Ok(it)
    }
}

impl<T> Default for PerProcess<T> {
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
