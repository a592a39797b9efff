//! The gate between the sends of a process that the peer cannot follow and those that it can.
//!
//! Until a direction is *joined*, its sends over TCP are counted here. At the join the count goes to the segment, and the peer compares it with what it
//! has received: a send that were counted on neither side of that moment would be overtaken by the ring. So a send enters the gate before it is made,
//! and looks whether the gate is still open after it has entered; a join closes the gate, and looks whether it is empty after it has closed it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

const OPEN: u32 = 0;
/// A join looks at the count; sends wait for its end.
const CLOSING: u32 = 1;
const JOINED: u32 = 2;

/// Outcome of [`Gate::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// From here on sends are counted in the segment.
    Done,
    /// A send is under way: try again.
    Busy,
    /// The count was not confirmed.
    Refused,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU32,
    /// Sends under way, between [`Gate::enter`] and [`Gate::leave`].
    inside: AtomicU32,
    /// Bytes sent over TCP.
    count: AtomicU64,
}

impl Gate {
    /// Begins a send over TCP. `false`: the direction is joined, or is being joined; the caller looks again.
    pub fn enter(&self) -> bool {
        self.inside.fetch_add(1, SeqCst);
        fence(SeqCst);
        if self.state.load(SeqCst) == OPEN {
            return true;
        }
        self.inside.fetch_sub(1, SeqCst);
        false
    }

    /// Ends it: `n` bytes were taken by TCP.
    pub fn leave(&self, n: u64) {
        self.count.fetch_add(n, SeqCst);
        self.inside.fetch_sub(1, SeqCst);
    }

    /// Joins, if no send is under way and `confirm` agrees to the count, which it passes on. One thread at a time.
    pub fn join(&self, confirm: impl FnOnce(u64) -> bool) -> Join {
        if self.is_joined() {
            return Join::Done;
        }
        self.state.store(CLOSING, SeqCst);
        fence(SeqCst);
        if self.inside.load(SeqCst) != 0 {
            self.state.store(OPEN, SeqCst);
            return Join::Busy;
        }
        if !confirm(self.count.load(SeqCst)) {
            self.state.store(OPEN, SeqCst);
            return Join::Refused;
        }
        self.state.store(JOINED, SeqCst);
        Join::Done
    }

    /// Whether sends are counted in the segment.
    pub fn is_joined(&self) -> bool {
        self.state.load(SeqCst) == JOINED
    }

    /// Bytes sent over TCP so far.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Adds bytes of a send that the segment counts.
    pub fn add(&self, n: u64) {
        self.count.fetch_add(n, SeqCst);
    }

    /// In the child of a fork: the sends under way are those of the parent's threads.
    pub fn in_child(&self) {
        self.inside.store(0, SeqCst);
        if self.state.load(SeqCst) == CLOSING {
            self.state.store(OPEN, SeqCst);
        }
    }

    /// For another connection.
    pub fn reset(&self) {
        self.state.store(OPEN, Relaxed);
        self.inside.store(0, Relaxed);
        self.count.store(0, Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_join_waits_for_sends_and_needs_the_kernels_count() {
        let gate = Gate::default();
        assert!(gate.enter());
        assert_eq!(gate.join(|_| unreachable!()), Join::Busy);
        gate.leave(7);
        assert_eq!(gate.join(|count| count == 8), Join::Refused);
        assert!(gate.enter(), "it is open again");
        gate.leave(1);
        assert_eq!(gate.join(|count| count == 8), Join::Done);
        assert!(!gate.enter());
        assert_eq!(gate.join(|_| unreachable!()), Join::Done);
        gate.reset();
        assert!(gate.enter() && !gate.is_joined() && gate.count() == 0);
    }
}
