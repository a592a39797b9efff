//! The lock of an endpoint's state. The engine never waits for it: the thread that holds the lock does the engine's work after it has released the
//! lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, fence};
use std::sync::{MutexGuard, TryLockError, Weak};

use super::{Inner, State, lock};

/// The state, for a call of the program.
pub(super) struct Held<'a> {
    inner: &'a Inner,
    /// Taken when it is dropped.
    guard: Option<MutexGuard<'a, State>>,
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_ref().expect("held until it is dropped")
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_mut().expect("held until it is dropped")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        drop(self.guard.take());
        // Either the engine gets the lock at its second try, or it is seen here that it did not.
        fence(Ordering::SeqCst);
        if self.inner.pending.load(Ordering::Relaxed) {
            self.inner.drive();
        }
    }
}

/// For what calls us: the engine, when something has completed, and the connection manager.
pub(super) fn drive(weak: &Weak<Inner>) {
    if let Some(inner) = weak.upgrade() {
        inner.drive();
    }
}

impl Inner {
    pub(super) fn state(&self) -> Held<'_> {
        Held {
            inner: self,
            guard: Some(lock(&self.state)),
        }
    }

    fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Processes completions, unless another thread holds the lock, which will do it then.
    fn drive(&self) {
        loop {
            let state = self.try_state().or_else(|| {
                self.pending.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                self.try_state()
            });
            let Some(mut state) = state else { return };
            self.pending.store(false, Ordering::Relaxed);
            self.progress(&mut state, true);
            drop(state);
            fence(Ordering::SeqCst);
            if !self.pending.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}
