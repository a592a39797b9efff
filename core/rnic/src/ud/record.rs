//! The results of RDMA Write-Record at its target: a record for each message, and a map of the valid bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use weft_proto::dgram::Ranges;
use weft_wire::dgram::{Segment, Target};

use crate::types::UdSource;

/// Ranges of one map: bytes beyond that are not marked valid.
const MAX_RANGES: usize = 4096;
/// Regions with a map at once, for one queue pair.
const MAX_MAPS: usize = 256;

/// One RDMA Write-Record message that has arrived, completely or in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteRecord {
    /// The writer. Its message sequence number is [`WriteRecord::msn`].
    pub source: UdSource,
    /// The message's number: the source counts the messages of several segments and Write-Records that it sends, to whomever.
    pub msn: u32,
    /// The region or window that was written to.
    pub rkey: u32,
    /// Address of the message's first byte there.
    pub addr: u64,
    /// Length of the whole message in bytes.
    pub len: u32,
    /// The writer's immediate data.
    pub imm: Option<u64>,
    /// Ranges of the message (not of the region) that have come and are placed, in order.
    pub valid: Vec<Range<u32>>,
}

/// The data of a [`WriteRecord`] until the program takes it.
pub(super) struct Written {
    pub(super) source: UdSource,
    pub(super) msn: u32,
    pub(super) target: Target,
    pub(super) len: u32,
    pub(super) imm: Option<u64>,
    pub(super) valid: Ranges,
}

impl Written {
    pub(super) fn new(source: UdSource, segment: &Segment, target: Target, valid: Ranges) -> Self {
        Written {
            source,
            msn: segment.msn,
            target,
            len: segment.len,
            imm: segment.imm,
            valid,
        }
    }

    pub(super) fn record(&self) -> WriteRecord {
        let valid = self.valid.as_slice().iter();
        WriteRecord {
            source: self.source,
            msn: self.msn,
            rkey: self.target.stag,
            addr: self.target.to,
            len: self.len,
            imm: self.imm,
            valid: valid.map(|&(start, end)| start..end).collect(),
        }
    }
}

impl WriteRecord {
    /// Whether all of the message has arrived.
    pub fn is_complete(&self) -> bool {
        self.valid_bytes() == self.len
    }

    /// Bytes that have come.
    pub fn valid_bytes(&self) -> u32 {
        self.valid.iter().map(|range| range.end - range.start).sum()
    }

    /// Ranges of the message that have not come, in order.
    pub fn missing(&self) -> Vec<Range<u32>> {
        let starts = std::iter::once(0).chain(self.valid.iter().map(|range| range.end));
        let ends = self.valid.iter().map(|range| range.start).chain([self.len]);
        let gaps = starts.zip(ends).map(|(start, end)| start..end);
        gaps.filter(|gap| !gap.is_empty()).collect()
    }
}

/// The bytes of a region that RDMA Write-Record has written since the map was last taken. Missing bytes of a message are not valid, even if
/// they were valid from an earlier message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValidityMap {
    /// Start and end, with a gap between any two.
    ranges: BTreeMap<u64, u64>,
}

impl ValidityMap {
    /// The valid ranges, as addresses of the region, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// Whether each byte of a range is valid.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let before = self.ranges.range(..=range.start).next_back();
        range.is_empty() || before.is_some_and(|(_, &end)| range.end <= end)
    }

    /// Valid bytes.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    fn clear(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        let touched: Vec<_> = self
            .ranges
            .range(..range.end)
            .rev()
            .take_while(|(_, end)| **end > range.start)
            .map(|(&start, &end)| start..end)
            .collect();
        for old in touched {
            self.ranges.remove(&old.start);
            if old.start < range.start {
                self.ranges.insert(old.start, range.start);
            }
            if old.end > range.end {
                self.ranges.insert(range.end, old.end);
            }
        }
    }

    fn mark(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.clear(range);
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&s, &e)) = self.ranges.range(..start).next_back()
            && e == start
        {
            start = s;
        }
        if let Some(e) = self.ranges.remove(&end) {
            end = e;
        }
        if self.ranges.contains_key(&start) || self.ranges.len() < MAX_RANGES {
            self.ranges.insert(start, end);
        }
    }

    fn add(&mut self, record: &WriteRecord) {
        let at = |range: &Range<u32>| {
            // The region was found to hold all of the message: no sum wraps.
            record.addr.wrapping_add(range.start.into())..record.addr.wrapping_add(range.end.into())
        };
        for range in record.missing() {
            self.clear(&at(&range));
        }
        for range in &record.valid {
            self.mark(&at(range));
        }
    }
}

/// The maps of all regions that a queue pair's peers have written to.
#[derive(Default)]
pub(super) struct Maps {
    /// With the age of the last write.
    of: BTreeMap<u32, (u64, ValidityMap)>,
    age: u64,
}

impl Maps {
    /// A message is over; `complete`: all of it has come.
    pub(super) fn add_message(&mut self, message: &Written, complete: bool) {
        let map = self.map(message.target.stag);
        let start = message.target.to;
        // Mostly a buffer is used again and again.
        if !(complete && map.contains(&(start..start.wrapping_add(message.len.into())))) {
            map.add(&message.record());
        }
    }

    fn map(&mut self, rkey: u32) -> &mut ValidityMap {
        self.age += 1;
        if self.of.len() >= MAX_MAPS && !self.of.contains_key(&rkey) {
            let oldest = self.of.iter().min_by_key(|(_, (age, _))| *age);
            if let Some(oldest) = oldest.map(|(&rkey, _)| rkey) {
                self.of.remove(&oldest);
            }
        }
        let (age, map) = self.of.entry(rkey).or_default();
        *age = self.age;
        map
    }

    pub(super) fn get(&self, rkey: u32) -> ValidityMap {
        self.of
            .get(&rkey)
            .map(|(_, map)| map.clone())
            .unwrap_or_default()
    }

    pub(super) fn take(&mut self, rkey: u32) -> ValidityMap {
        self.of
            .remove(&rkey)
            .map(|(_, map)| map)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(addr: u64, len: u32, valid: &[Range<u32>]) -> WriteRecord {
        WriteRecord {
            source: UdSource {
                addr: "127.0.0.1:1".parse().unwrap(),
                qp_num: 1,
            },
            msn: 1,
            rkey: 7,
            addr,
            len,
            imm: None,
            valid: valid.to_vec(),
        }
    }

    #[test]
    fn what_is_missing_is_what_is_not_valid() {
        let all = record(0, 10, std::slice::from_ref(&(0..10)));
        assert!(all.is_complete() && all.missing().is_empty());
        let some = record(0, 10, &[2..4, 6..9]);
        assert_eq!(some.missing(), [0..2, 4..6, 9..10]);
        assert_eq!((some.valid_bytes(), some.is_complete()), (5, false));
        let empty = record(0, 0, &[]);
        assert!(empty.is_complete() && empty.missing().is_empty());
    }

    /// Against a byte for each byte.
    #[test]
    fn a_map_says_of_each_byte_whether_it_is_valid() {
        let mut seed = 0x1234_5678_u32;
        let mut below = |n: u32| {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
            seed % n
        };
        let mut maps = Maps::default();
        let mut bytes = [false; 300];
        for _ in 0..3000 {
            let (addr, len) = (u64::from(below(200)), below(100));
            let mut valid = Vec::new();
            let mut at = 0;
            while at < len {
                let start = at + below(20);
                let end = (start + 1 + below(20)).min(len);
                if start < end {
                    valid.push(start..end);
                }
                at = end.max(start) + 1;
            }
            let record = record(addr, len, &valid);
            maps.map(record.rkey).add(&record);
            for i in 0..len {
                bytes[addr as usize + i as usize] = valid.iter().any(|range| range.contains(&i));
            }
            let map = maps.get(7);
            let mut last = None;
            for range in map.ranges() {
                assert!(last < Some(range.start) && range.start < range.end);
                last = Some(range.end);
            }
            for (i, valid) in bytes.iter().enumerate() {
                let i = i as u64;
                assert_eq!(map.contains(&(i..i + 1)), *valid, "byte {i}");
            }
            assert_eq!(
                map.bytes(),
                bytes.iter().filter(|valid| **valid).count() as u64
            );
        }
        assert!(maps.take(7).bytes() > 0);
        assert_eq!(maps.get(7), ValidityMap::default());
    }

    #[test]
    fn maps_have_a_limit() {
        let mut maps = Maps::default();
        for i in 0..MAX_RANGES as u64 + 10 {
            maps.map(7)
                .add(&record(2 * i, 1, std::slice::from_ref(&(0..1))));
        }
        assert_eq!(maps.get(7).ranges().count(), MAX_RANGES);
        for rkey in 0..MAX_MAPS as u32 + 10 {
            let of = WriteRecord {
                rkey,
                ..record(0, 1, std::slice::from_ref(&(0..1)))
            };
            maps.map(of.rkey).add(&of);
        }
        assert_eq!(maps.of.len(), MAX_MAPS);
        assert_eq!(maps.get(MAX_MAPS as u32 + 9).bytes(), 1);
    }
}
