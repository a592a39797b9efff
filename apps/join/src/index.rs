//! Hash indexes over columns of a loaded part, which are made once and serve all joins (7.4.4 of the thesis).

use std::ops::Range;

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::common::hash_utils::{RandomState, create_hashes};
use datafusion::error::Result;

use crate::space::Space;

/// The hash of keys. Another one than that by which parts are made, for the keys of a part have that in common.
const HASH: RandomState = RandomState::with_seed(0x696e_6478);

/// The hashes of rows with these keys.
///
/// # Errors
/// If keys of a type cannot be hashed.
pub fn hashes(keys: &[ArrayRef], rows: usize) -> Result<Vec<u64>> {
    let mut hashes = vec![0; rows];
    create_hashes(keys, &HASH, &mut hashes)?;
    Ok(hashes)
}

/// A row, and the bits of its hash that do not say in which bucket it is.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    tag: u32,
    row: u32,
}

/// An index: rows in the order of the leading bits of their hashes.
#[derive(Debug)]
pub struct Index {
    /// The columns of the keys.
    pub keys: Vec<usize>,
    shift: u32,
    /// The first entry of each bucket, and the end.
    starts: Vec<u32>,
    entries: Vec<Entry>,
    /// The first row of each batch.
    firsts: Vec<u32>,
    /// Its memory.
    pub space: Space,
}

impl Index {
    /// Makes an index over these columns; `None` if there are too many rows.
    ///
    /// # Errors
    /// If there is no space for it.
    pub fn new(batches: &[RecordBatch], keys: &[usize], mut space: Space) -> Result<Option<Self>> {
        let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
        if rows > 1 << 31 {
            return Ok(None);
        }
        // At least two, so that the shift is less than the bits of a hash.
        let buckets = rows.next_power_of_two().max(2);
        let shift = u64::BITS - buckets.trailing_zeros();
        let bytes = rows * size_of::<Entry>() + (buckets + 1 + batches.len()) * size_of::<u32>();
        let temporary = rows * size_of::<u64>();
        space.grow(bytes + temporary)?;
        let (mut all, mut firsts) = (Vec::with_capacity(rows), Vec::with_capacity(batches.len()));
        for batch in batches {
            firsts.push(all.len() as u32);
            let columns: Vec<_> = keys.iter().map(|&k| batch.column(k).clone()).collect();
            all.extend(hashes(&columns, batch.num_rows())?);
        }
        // Count, add up, and put each entry in its place.
        let mut starts = vec![0u32; buckets + 1];
        for hash in &all {
            starts[(hash >> shift) as usize] += 1;
        }
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let mut entries = vec![Entry::default(); rows];
        for (row, hash) in all.iter().enumerate().rev() {
            let start = &mut starts[(hash >> shift) as usize];
            *start -= 1;
            entries[*start as usize] = Entry {
                tag: *hash as u32,
                row: row as u32,
            };
        }
        drop(all);
        space.shrink(temporary);
        Ok(Some(Self {
            keys: keys.to_vec(),
            shift,
            starts,
            entries,
            firsts,
            space,
        }))
    }

    /// The entries among which the rows with this hash are.
    pub fn candidates(&self, hash: u64) -> Range<usize> {
        let bucket = (hash >> self.shift) as usize;
        self.starts[bucket] as usize..self.starts[bucket + 1] as usize
    }

    /// The row of an entry, if its hash can be this one.
    pub fn row(&self, entry: usize, hash: u64) -> Option<u32> {
        let entry = self.entries[entry];
        (entry.tag == hash as u32).then_some(entry.row)
    }

    /// The batch of a row, and its place there.
    pub fn place(&self, row: u32) -> (usize, usize) {
        let batch = self.firsts.partition_point(|&first| first <= row) - 1;
        (batch, (row - self.firsts[batch]) as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use datafusion::arrow::array::{Int64Array, StringArray};

    use super::*;
    use crate::space::Ledger;

    fn batch(numbers: Range<i64>) -> RecordBatch {
        let text = StringArray::from_iter_values(numbers.clone().map(|n| format!("t{}", n % 10)));
        let numbers = Int64Array::from_iter_values(numbers.map(|n| n % 50));
        RecordBatch::try_from_iter([
            ("n", Arc::new(numbers) as ArrayRef),
            ("t", Arc::new(text) as ArrayRef),
        ])
        .unwrap()
    }

    #[test]
    fn all_rows_of_a_key_are_among_its_candidates() {
        let batches = [
            batch(0..300),
            batch(0..0),
            batch(300..301),
            batch(301..1000),
        ];
        let ledger = Ledger::new(1 << 20);
        for keys in [&[0][..], &[1], &[1, 0]] {
            let index = Index::new(&batches, keys, Space::new(&ledger));
            let index = index.unwrap().unwrap();
            for (number, batch) in batches.iter().enumerate() {
                let columns: Vec<_> = keys.iter().map(|&k| batch.column(k).clone()).collect();
                for (row, hash) in hashes(&columns, batch.num_rows())
                    .unwrap()
                    .into_iter()
                    .enumerate()
                {
                    let found = index
                        .candidates(hash)
                        .filter_map(|entry| index.row(entry, hash));
                    let found: BTreeSet<_> = found.map(|row| index.place(row)).collect();
                    assert!(found.contains(&(number, row)), "{keys:?}: {number}, {row}");
                    // Other keys are rarely among them.
                    assert!(found.len() <= 110, "{keys:?}: {}", found.len());
                }
            }
            assert!(ledger.used() > 8000);
        }
        assert_eq!(ledger.used(), 0);
        let none = Index::new(&[], &[0], Space::new(&ledger)).unwrap().unwrap();
        assert!(none.candidates(u64::MAX).is_empty() && none.candidates(0).is_empty());
        assert!(Index::new(&batches, &[0], Space::new(&Ledger::new(10_000))).is_err());
    }
}
