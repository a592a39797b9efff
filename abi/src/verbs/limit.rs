//! Objects of which a process may have so many, as its devices say.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::object::{Inherited, PerFork};

/// How many there are in this process.
#[derive(Default)]
pub(crate) struct Count(AtomicU32);

impl Inherited for Count {}

/// One of them; dropping it makes room for another.
pub(crate) struct Counted(&'static Count);

impl PerFork<Count> {
    /// One more.
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
