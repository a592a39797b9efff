//! A value behind a lock.
//!
//! # Safety
//!
//! A guard is created when the lock's word has begun a hold, and ends the hold when it is dropped. So there is one guard at a time, and the
//! actions of one holder happen before those of the next.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};

use crate::word::Word;

/// A lock for short holds. A panic during a hold releases it, and leaves the value as it is.
///
/// The release is a plain store. A thread that failed to get the lock, and then reads data that another thread may have written, needs a
/// fence in between.
#[derive(Default)]
pub struct ShortLock<T: ?Sized> {
    word: Word,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by the holder alone, which may be any thread.
unsafe impl<T: ?Sized + Send> Send for ShortLock<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send> Sync for ShortLock<T> {}

impl<T> ShortLock<T> {
    /// A free lock.
    pub fn new(value: T) -> Self {
        ShortLock {
            word: Word::default(),
            value: UnsafeCell::new(value),
        }
    }
}

impl<T: ?Sized> ShortLock<T> {
    /// Takes the lock, and waits until it is free.
    #[inline]
    pub fn lock(&self) -> BriefGuard<'_, T> {
        self.word.begin();
        BriefGuard(self)
    }

    /// Takes the lock, unless another thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<BriefGuard<'_, T>> {
        self.word.try_begin().then(|| BriefGuard(self))
    }
}

impl<T: ?Sized + std::fmt::Debug> std::fmt::Debug for ShortLock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.try_lock() {
            Some(value) => f.debug_tuple("ShortLock").field(&&*value).finish(),
            None => f.write_str("ShortLock(<held>)"),
        }
    }
}

/// The hold of a [`ShortLock`].
#[must_use = "the lock is let go at once"]
pub struct BriefGuard<'a, T: ?Sized>(&'a ShortLock<T>);

// SAFETY: a shared guard gives shared references to the value only.
unsafe impl<T: ?Sized + Sync> Sync for BriefGuard<'_, T> {}

impl<T: ?Sized> Deref for BriefGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one of the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T: ?Sized> DerefMut for BriefGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and it is borrowed alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T: ?Sized> Drop for BriefGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.word.end();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let lock = ShortLock::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 20 } else { 100_000 } {
                        *lock.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), if cfg!(miri) { 80 } else { 400_000 });
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn a_panic_lets_go() {
        let lock = ShortLock::new(1);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("in the hold");
        }));
        assert!(caught.is_err());
        assert_eq!(*lock.lock(), 1);
    }
}
