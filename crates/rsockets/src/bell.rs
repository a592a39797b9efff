//! What wakes those who wait for a socket together with other things: a descriptor that is readable once something has changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use weft_verbs::Signal;

use crate::lock::lock;

/// Silent, and without a system call, while nobody sleeps at it.
pub(crate) struct Bell {
    signal: Signal,
    sleepers: Mutex<u32>,
    anybody: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Bell> {
        Ok(Bell {
            signal: Signal::new()?,
            sleepers: Mutex::new(0),
            anybody: AtomicBool::new(false),
        })
    }

    /// Something has changed.
    pub(crate) fn ring(&self) {
        if self.anybody.load(Ordering::SeqCst) && *lock(&self.sleepers) > 0 {
            self.signal.raise();
        }
    }

    /// Somebody is about to sleep, and looks once more before.
    pub(crate) fn arm(&self) {
        *lock(&self.sleepers) += 1;
        self.anybody.store(true, Ordering::SeqCst);
    }

    /// Somebody has woken up. The last one clears it: who still sleeps has not heard it yet.
    pub(crate) fn disarm(&self) {
        let mut sleepers = lock(&self.sleepers);
        *sleepers -= 1;
        if *sleepers == 0 {
            self.anybody.store(false, Ordering::SeqCst);
            self.signal.clear();
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}
