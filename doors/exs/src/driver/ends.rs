//! Completed operations that cannot be reported yet, because the memory of one is still in use.

use std::collections::VecDeque;

use super::op::Parked;
use crate::late::Late;

/// Completed operations of one direction, to be reported in order: each waits for the memory of those before it.
#[derive(Default)]
pub(super) struct Ends {
    queue: VecDeque<Box<Parked>>,
    /// The first one waits for its memory.
    pub(super) waiting: bool,
}

impl Ends {
    /// Number of operations not reported yet.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.waiting)
    }

    pub(super) fn push(&mut self, parked: Box<Parked>) {
        self.queue.push_back(parked);
    }

    /// The connection is dropped: report each of the others as soon as its memory is free.
    pub(super) fn abandon(&mut self) {
        // The one that waits is reported by its own callback.
        self.waiting = false;
        while let Some(parked) = self.next() {
            parked.wait(|late, _| late.into_iter().for_each(Late::run));
        }
    }

    /// The next one, unless one is waiting.
    pub(super) fn next(&mut self) -> Option<Box<Parked>> {
        if self.waiting {
            return None;
        }
        self.queue.pop_front()
    }
}
