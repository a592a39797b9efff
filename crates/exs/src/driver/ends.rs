//! Ends of operations that cannot be told at once, because somebody is still in the memory of one.

use std::collections::VecDeque;

use super::op::{Late, Parked};

/// Ends of operations of one direction that are to be told: in order, so behind one whose memory somebody is still in.
#[derive(Default)]
pub(super) struct Ends {
    queue: VecDeque<Box<Parked>>,
    /// The first of them waits for its memory.
    pub(super) waiting: bool,
}

impl Ends {
    /// Ends that have not been told.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.waiting)
    }

    pub(super) fn push(&mut self, parked: Box<Parked>) {
        self.queue.push_back(parked);
    }

    /// The connection goes: the rest is told as soon as it can be.
    pub(super) fn abandon(&mut self) {
        // What was waited for is told by itself.
        self.waiting = false;
        while let Some(parked) = self.next() {
            parked.wait(|late, _| late.into_iter().for_each(Late::run));
        }
    }

    /// The next one, if none is waited for.
    pub(super) fn next(&mut self) -> Option<Box<Parked>> {
        if self.waiting {
            return None;
        }
        self.queue.pop_front()
    }
}
