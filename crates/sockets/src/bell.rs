//! What wakes those who wait for a socket together with other things: a descriptor that is readable once something has changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use weft_verbs::Signal;

use crate::lock::lock;

/// Silent, and without a system call, while nobody sleeps at it.
pub struct Bell {
    signal: Signal,
    sleepers: Mutex<Sleepers>,
    anybody: AtomicBool,
}

#[derive(Default)]
struct Sleepers {
    count: u32,
    /// How often it has rung.
    rings: u64,
    /// Those who have not heard the last ring yet.
    deaf: u32,
}

/// The last ring that a sleeper has heard.
#[derive(Debug)]
pub struct Heard(u64);

impl Bell {
    /// One that nobody sleeps at.
    ///
    /// # Errors
    /// As `eventfd(2)`.
    pub fn new() -> std::io::Result<Bell> {
        Ok(Bell {
            signal: Signal::new()?,
            sleepers: Mutex::default(),
            anybody: AtomicBool::new(false),
        })
    }

    /// Something has changed.
    pub fn ring(&self) {
        if !self.anybody.load(Ordering::SeqCst) {
            return;
        }
        let mut sleepers = lock(&self.sleepers);
        if sleepers.count > 0 {
            sleepers.rings += 1;
            sleepers.deaf = sleepers.count;
            self.signal.raise();
        }
    }

    /// Somebody is about to sleep, and looks once more before.
    pub fn arm(&self) -> Heard {
        let mut sleepers = lock(&self.sleepers);
        sleepers.count += 1;
        self.anybody.store(true, Ordering::SeqCst);
        Heard(sleepers.rings)
    }

    /// A sleeper is awake, and about to look. The last one clears it: for the others it goes on ringing.
    pub fn hear(&self, heard: &mut Heard) {
        self.hear_under(&mut lock(&self.sleepers), heard);
    }

    fn hear_under(&self, sleepers: &mut Sleepers, heard: &mut Heard) {
        if heard.0 != sleepers.rings {
            heard.0 = sleepers.rings;
            sleepers.deaf -= 1;
            if sleepers.deaf == 0 {
                self.signal.clear();
            }
        }
    }

    /// A sleeper sleeps no more.
    pub fn disarm(&self, mut heard: Heard) {
        let mut sleepers = lock(&self.sleepers);
        self.hear_under(&mut sleepers, &mut heard);
        sleepers.count -= 1;
        if sleepers.count == 0 {
            self.anybody.store(false, Ordering::SeqCst);
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}
