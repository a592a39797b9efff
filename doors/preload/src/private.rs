//! The locks of this process alone, and what a fork does about them.
//!
//! - A thread that holds one puts off the program's signal handlers (signal.rs), so no handler waits for a lock of its own thread.
//! - A fork holds all of them (process.rs), so the child finds nothing half done. What belongs to one socket has a lock of its kind, which is held
//!   before the socket's own.
//! - A handler of a fault cannot be put off, and may fork in a thread that holds one. That lock stays with the thread, in both processes.
//!
//! Locks in memory that processes share are in lock.rs. A call that may be under way at a fork and is not under a lock stores its result in an atomic: a
//! `OnceLock` would keep the child waiting for a thread that it does not have.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::signal::{self, Busy};
use crate::work::LIBRARY;

/// What a lock guards. [`Guards::Connections`] is the first; no other is taken under any of the rest.
#[derive(Clone, Copy)]
pub(crate) enum Guards {
    Connections,
    Closed,
    Limit,
    Edges,
    Datagrams,
    Frames,
    Late,
    Kept,
    Folders,
    Memory,
}

thread_local! {
    /// A bit for each kind of lock that this thread holds.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// Returns true if this thread holds a lock of this kind.
pub(crate) fn holds(kind: Guards) -> bool {
    HELD.get() & 1 << kind as u32 != 0
}

pub(crate) struct Private<T> {
    kind: Guards,
    it: Mutex<T>,
}

impl<T> Private<T> {
    pub(crate) const fn new(kind: Guards, it: T) -> Private<T> {
        Private {
            kind,
            it: Mutex::new(it),
        }
    }

    pub(crate) fn lock(&'static self) -> Held<T> {
        // First the mark: a signal may come as soon as the lock is held.
        let busy = signal::enter_idle(&LIBRARY);
        let guard = self.it.lock().unwrap_or_else(PoisonError::into_inner);
        HELD.set(HELD.get() | 1 << self.kind as u32);
        Held {
            guard,
            kind: self.kind,
            _busy: busy,
        }
    }

    /// The same. `None`: this thread holds one of the kind already.
    pub(crate) fn lock_once(&'static self) -> Option<Held<T>> {
        (!holds(self.kind)).then(|| self.lock())
    }

    /// Returns true if a thread holds it.
    pub(crate) fn is_held(&self) -> bool {
        self.it.try_lock().is_err()
    }
}

/// The lock is held as long as this lives. The first that a thread takes is the last that it releases.
pub(crate) struct Held<T: 'static> {
    guard: MutexGuard<'static, T>,
    kind: Guards,
    _busy: Option<Busy>,
}

impl<T> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        HELD.set(HELD.get() & !(1 << self.kind as u32));
    }
}
