//! Limits on the number of objects of a process, as its devices report them.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::object::{Inherited, PerFork};

/// The number of objects in this process.
#[derive(Default)]
pub(crate) struct Count(AtomicU32);

impl Inherited for Count {}

/// One counted object; dropping this makes room for another.
pub(crate) struct Counted(&'static Count);

impl PerFork<Count> {
    /// Counts one more.
    ///
    /// # Errors
    /// `ENOMEM` when there are `limit`.
    pub(crate) fn take(&'static self, limit: u32) -> Result<Counted, Errno> {
        let count = self.get();
        let more = |now: u32| (now < limit).then_some(now + 1);
        let (taken, looked) = (Ordering::AcqRel, Ordering::Acquire);
        match count.0.fetch_update(taken, looked, more) {
            Ok(_) => Ok(Counted(count)),
            Err(_) => Err(Errno::NOMEM),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}
