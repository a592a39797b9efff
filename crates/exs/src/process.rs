//! What a process has one of, made at its first use, and made anew in a forked child: threads do not cross a fork.

use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use rustix::process::{Pid, getpid};

use crate::lock::lock;

/// One `T` per process.
pub(crate) struct PerProcess<T>(Mutex<Option<(Pid, Arc<T>)>>);

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        PerProcess(Mutex::new(None))
    }

    /// The one of this process; the first caller makes it, and after a failure the next one tries again.
    pub(crate) fn get(
        &self,
        make: impl FnOnce() -> Result<Arc<T>, Errno>,
    ) -> Result<Arc<T>, Errno> {
        let mut slot = lock(&self.0);
        let pid = getpid();
        match &*slot {
            Some((of, it)) if *of == pid => return Ok(Arc::clone(it)),
            // The parent's is left alone: descriptors in it are shared with the parent.
            Some(_) => std::mem::forget(slot.take()),
            None => {}
        }
        let it = make()?;
        *slot = Some((pid, Arc::clone(&it)));
        Ok(it)
    }
}
