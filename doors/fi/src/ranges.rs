//! The received byte ranges of a message.

use std::collections::BTreeMap;
use std::ops::Range;

/// The maximum number of separate ranges. Further pieces count as missing, and are requested again, because each costs memory.
const MOST: usize = 1 << 14;

/// Ends of disjoint ranges by their starts, none empty, with a gap between any two. Adding a piece costs the logarithm of their number, in any order of
/// arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds the bytes of a range, which may overlap others.
    pub fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // From behind: those that overlap or touch it.
        let mut merged = false;
        while let Some((&first, &last)) = self.0.range(..=end).next_back()
            && last >= start
        {
            self.0.remove(&first);
            (start, end) = (start.min(first), end.max(last));
            merged = true;
        }
        if merged || self.0.len() < MOST {
            self.0.insert(start, end);
        }
    }

    /// Whether all bytes below `len` have arrived.
    pub fn covers(&self, len: u64) -> bool {
        len == 0 || self.0.get(&0).is_some_and(|&end| end >= len)
    }

    /// At most `most` ranges below `len` that are not there, in order.
    pub fn missing(&self, len: u64, most: usize) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for (&start, &end) in self.0.iter().chain([(&len, &len)]) {
            if at < start.min(len) {
                gaps.push(at..start.min(len));
            }
            at = at.max(end);
            if gaps.len() == most {
                break;
            }
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_sends_crumbs_does_not_fill_memory() {
        let mut ranges = Ranges::default();
        for i in 0..3 * MOST as u64 {
            ranges.add(4 * i..4 * i + 1);
        }
        assert_eq!(ranges.0.len(), MOST);
        // Pieces that close gaps still count, and make room.
        let end = 4 * MOST as u64;
        ranges.add(1..end);
        assert!(ranges.covers(end) && ranges.0.len() == 1);
        ranges.add(2 * end..2 * end + 1);
        assert_eq!(ranges.0.len(), 2);
    }

    #[test]
    fn ranges_agree_with_a_table_of_bytes() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let mut ranges = Ranges::default();
            let mut table = [false; 64];
            for _ in 0..8 {
                let start = random(64);
                let end = start + random(65 - start);
                ranges.add(start..end);
                table[start as usize..end as usize].fill(true);
                let mut gaps = [true; 64];
                for gap in ranges.missing(64, usize::MAX) {
                    assert!(!gap.is_empty());
                    gaps[gap.start as usize..gap.end as usize].fill(false);
                }
                assert_eq!(gaps, table);
                assert_eq!(ranges.covers(64), table.iter().all(|b| *b));
            }
        }
        assert!(Ranges::default().covers(0));
        assert!(Ranges::default().missing(5, 9).iter().eq([&(0..5)]));
    }
}
