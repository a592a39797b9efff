//! Locking without poison: a panic in another thread must not break other connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

pub use weft_service::lock;

/// Takes the lock, unless another thread holds it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Adds to a counter of which one thread at a time writes, as a lock sees to it: without a locked instruction.
#[inline]
pub(crate) fn add_alone(counter: &AtomicU64, n: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(sum, Ordering::Relaxed);
}
