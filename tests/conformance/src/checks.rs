//! What completion queues and regions have to hold, of the kind that `super::objects` names.

use std::time::Instant;

use weft_verbs::Wc;

use super::objects::{Cq, Mr};
use crate::waits::PATIENCE;

/// Waits for this many completions.
pub fn take(cq: &Cq, count: usize) -> Vec<Wc> {
    let deadline = Instant::now() + PATIENCE;
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut out = vec![Wc::default(); count - all.len()];
        let n = cq.wait(&mut out, Some(left)).expect("no overrun");
        assert!(
            n > 0,
            "{} of {count} completions in time: {all:?}",
            all.len()
        );
        all.extend_from_slice(&out[..n]);
    }
    all
}

/// Asserts that the queue is empty now. Completions may still arrive: use it where an order of events excludes that.
pub fn assert_none(cq: &Cq) {
    let mut out = [Wc::default(); 1];
    let n = cq.poll(&mut out).expect("no overrun");
    assert_eq!(n, 0, "unexpected {:?}", out[0]);
}

/// Asserts that region and bytes agree. Reports the place of a difference rather than megabytes of data.
pub fn assert_bytes(mr: &Mr, off: usize, want: &[u8], what: &str) {
    let got = mr.to_vec(off, want.len()).expect("within the region");
    if let Some(at) = (0..want.len()).find(|i| got[*i] != want[*i]) {
        let differ = (0..want.len()).filter(|i| got[*i] != want[*i]).count();
        panic!(
            "{what}: byte {at} of {} is {:#04x}, not {:#04x}; {differ} differ",
            want.len(),
            got[at],
            want[at]
        );
    }
}
