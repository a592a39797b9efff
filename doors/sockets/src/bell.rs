//! A bell wakes threads that wait for a socket together with other descriptors: its descriptor becomes readable when something has changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use weft_verbs::Signal;

use crate::lock::lock;

/// Ringing it makes no system call while no thread sleeps on it.
pub struct Bell {
    signal: Signal,
    sleepers: Mutex<Sleepers>,
    anybody: AtomicBool,
}

#[derive(Default)]
struct Sleepers {
    count: u32,
    /// The number of rings.
    rings: u64,
    /// The number of sleepers that have not seen the last ring.
    deaf: u32,
}

/// The last ring that a sleeper has heard.
#[derive(Debug)]
pub struct Heard(u64);

impl Bell {
    /// A bell without sleepers.
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

    /// The calling thread is about to sleep, and checks its condition once more after this call.
    pub fn arm(&self) -> Heard {
        let mut sleepers = lock(&self.sleepers);
        sleepers.count += 1;
        self.anybody.store(true, Ordering::SeqCst);
        Heard(sleepers.rings)
    }

    /// A sleeper is awake, and about to check its condition. The last one clears the descriptor; it stays readable for the others.
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
