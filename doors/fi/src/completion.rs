//! Completions, as programs get them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::address::Address;
use crate::wire::Meta;

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The program's context of the operation.
    pub context: usize,
    /// A receive, not a send.
    pub is_recv: bool,
    /// Of the message. Of a receive that was too short, the whole message's.
    pub meta: Meta,
    /// Bytes of the receive's memory.
    pub room: u64,
    /// The offset of the message, for a receive that takes many.
    pub at: usize,
    /// The receive takes many, and this was the last: its memory is the program's again.
    pub released: bool,
    pub from: Option<Address>,
    pub status: Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Done,
    /// The peer has ended.
    Failed,
    /// The program took it back.
    Canceled,
    /// There is no such message (`Endpoint::peek`).
    NoMessage,
}

/// The queue of completions for the program.
#[derive(Default)]
pub struct List {
    waiting: Mutex<VecDeque<Completion>>,
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A list that endpoints and the program share.
pub type Queue = Arc<List>;

impl List {
    /// The waiting completions.
    pub fn lock(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has this called whenever something has been added. It must not block. Only the first one counts.
    pub fn on_push(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Box::new(wake));
    }

    pub(crate) fn push(&self, completion: Completion) {
        self.lock().push_back(completion);
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }
}

/// The number of completed operations.
#[derive(Debug, Default)]
pub struct Counter {
    done: AtomicU64,
    failed: AtomicU64,
}

impl Counter {
    /// Operations that ended well.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Acquire)
    }

    /// Sets the number of those that ended well.
    pub fn set(&self, value: u64) {
        self.done.store(value, Ordering::Release);
    }

    /// Sets the number of those that failed.
    pub fn set_failed(&self, value: u64) {
        self.failed.store(value, Ordering::Release);
    }

    /// Adds to the number of those that ended well.
    pub fn add(&self, value: u64) {
        self.done.fetch_add(value, Ordering::AcqRel);
    }

    /// Adds to the number of those that failed.
    pub fn add_failed(&self, value: u64) {
        self.failed.fetch_add(value, Ordering::AcqRel);
    }

    pub(crate) fn count(&self, status: Status) {
        if status == Status::Done {
            self.add(1);
        } else {
            self.add_failed(1);
        }
    }
}
