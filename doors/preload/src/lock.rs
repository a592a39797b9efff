//! A lock in memory that several processes share. The death of its holder releases it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::kernel;

#[repr(C)]
pub(crate) struct SharedLock {
    /// The holder's process number, and the top bit if another thread waits; 0: free.
    word: AtomicU32,
    /// 1: a holder has died, and what the lock guards may be half done.
    stolen: AtomicU32,
}

const WAITED: u32 = 1 << 31;

/// A waiter checks after this time that the holder still lives.
const PATIENCE_MS: i64 = 100;

static OWN: AtomicU32 = AtomicU32::new(0);

/// Our process number, also in a child that shares our memory.
pub(crate) fn own() -> u32 {
    if OWN.load(Relaxed) == 0 {
        know_own();
    }
    OWN.load(Relaxed)
}

/// In the child of a fork that may not ask.
pub(crate) fn forget_own() {
    OWN.store(0, Relaxed);
}

/// At the start and in the child of a fork, before a child that shares our memory can ask.
pub(crate) fn know_own() {
    OWN.store(std::process::id(), Relaxed);
}

impl SharedLock {
    #[inline]
    pub(crate) fn lock(&self) -> Held<'_> {
        let own = own();
        if self
            .word
            .compare_exchange(0, own, Acquire, Relaxed)
            .is_err()
        {
            self.wait(own);
        }
        Held(self)
    }

    /// Returns true once after a holder has died (the caller holds it).
    #[inline]
    pub(crate) fn was_stolen(&self) -> bool {
        self.stolen.load(Relaxed) != 0 && self.stolen.swap(0, Relaxed) != 0
    }

    #[cold]
    fn wait(&self, own: u32) {
        for _ in 0..100 {
            std::hint::spin_loop();
            if self.word.compare_exchange(0, own, Acquire, Relaxed).is_ok() {
                return;
            }
        }
        loop {
            let now = self.word.load(Relaxed);
            if now == 0 {
                // Others may wait too.
                if self
                    .word
                    .compare_exchange(0, own | WAITED, Acquire, Relaxed)
                    .is_ok()
                {
                    return;
                }
                continue;
            }
            let waited = now | WAITED;
            if now != waited
                && self
                    .word
                    .compare_exchange(now, waited, Relaxed, Relaxed)
                    .is_err()
            {
                continue;
            }
            let errno = kernel::sleep_on(self.word.as_ptr(), waited, PATIENCE_MS);
            let holder = waited & !WAITED;
            if errno == libc::ETIMEDOUT && holder != own && weft_sys::process::is_gone(holder) {
                self.stolen.store(1, Relaxed);
                let _ = self
                    .word
                    .compare_exchange(waited, 0, Ordering::AcqRel, Relaxed);
            }
        }
    }
}

/// The lock is held as long as this lives.
pub(crate) struct Held<'a>(&'a SharedLock);

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        let lock = &self.0.word;
        if lock.swap(0, Release) & WAITED != 0 {
            kernel::wake(lock.as_ptr(), 1);
        }
    }
}
