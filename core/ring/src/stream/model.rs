//! A [`Stream`] as loom sees it: its control words, in loom's atomics, without bytes.

pub(super) use loom::sync::atomic::{AtomicU64, fence};
use std::sync::atomic::Ordering::SeqCst;

/// One word for each line of the control page that is used.
const WORDS: usize = 17;
const LINE: usize = 128;

/// The control words that both ends of a connection share.
#[derive(Debug)]
pub struct Stream {
    words: Vec<AtomicU64>,
    capacity: usize,
}

/// Loom takes sequentially consistent exchanges for weaker ones than they are, but knows such fences.
pub(super) fn announced() {
    fence(SeqCst);
}

impl Stream {
    /// One with rings of this capacity.
    pub fn model(capacity: usize) -> Stream {
        Stream {
            words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(),
            capacity,
        }
    }

    /// Bytes that each direction's ring would hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn at(&self, offset: usize) -> &AtomicU64 {
        &self.words[offset / LINE]
    }
}
