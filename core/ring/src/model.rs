//! The segment as loom sees it: the same words, in loom's atomics, without a mapping.

use crate::{Role, Word};
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
pub(crate) use loom::sync::atomic::{AtomicU64, fence};
use weft_mem::{RecvList, SendList};

/// The memory that the two ends of a connection share.
#[derive(Debug)]
pub struct Segment {
    control: Vec<AtomicU64>,
    ring: Vec<AtomicU64>,
    capacity: usize,
}

fn zeros(n: usize) -> Vec<AtomicU64> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

impl Segment {
    /// A segment with rings of any power of two.
    pub fn model(capacity: usize) -> Segment {
        assert!(capacity.is_power_of_two() && capacity >= 32);
        Segment {
            control: zeros(16),
            ring: zeros(2 * capacity / 8),
            capacity,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn control(&self, role: Role, word: Word) -> &AtomicU64 {
        &self.control[8 * role as usize + word as usize]
    }

    pub(crate) fn word(&self, role: Role, position: u64) -> &AtomicU64 {
        let index = position as usize & (self.capacity - 8);
        &self.ring[(self.capacity * role as usize + index) / 8]
    }

    pub(crate) fn copy_in(
        &self,
        role: Role,
        position: u64,
        list: &SendList<'_>,
        skip: usize,
        n: usize,
    ) -> usize {
        let mut bytes = vec![0; n.next_multiple_of(8)];
        // SAFETY: a buffer of our own, of `n` bytes at least.
        let n = unsafe { list.copy_range_to(skip, bytes.as_mut_ptr(), n) };
        for (i, word) in bytes.as_chunks().0.iter().enumerate() {
            self.word(role, position + 8 * i as u64)
                .store(u64::from_ne_bytes(*word), Relaxed);
        }
        n
    }

    pub(crate) fn copy_out(
        &self,
        role: Role,
        position: u64,
        list: &mut RecvList<'_>,
        skip: usize,
        n: usize,
    ) -> usize {
        let start = position & !7;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < position - start + n as u64 {
            let word = self.word(role, start + bytes.len() as u64).load(Relaxed);
            bytes.extend(word.to_ne_bytes());
        }
        let bytes = &bytes[(position - start) as usize..];
        // SAFETY: a buffer of our own, of `n` bytes at least.
        unsafe { list.fill_range_from(skip, bytes.as_ptr(), n) }
    }
}

/// As in the real module. Loom takes sequentially consistent accesses for weaker ones than they are,
/// but knows such fences.
pub(crate) fn announce(word: &AtomicU64, value: u64) {
    word.store(value, Release);
    fence(SeqCst);
}

pub(crate) fn announce_max(word: &AtomicU64, value: u64) {
    word.fetch_max(value, Release);
    fence(SeqCst);
}

pub(crate) fn look(word: &AtomicU64) -> u64 {
    word.load(Acquire)
}
