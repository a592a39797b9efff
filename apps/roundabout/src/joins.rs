//! The thesis's joins (7.4) as functions over columns: keys with row numbers.
//!
//! The part `S_i` of the stationary relation is prepared once: [`HashJoin::build`] or [`Sorted::new`]. The rotating relation is prepared once too, by
//! the node that it starts from ([`Partitioned::new`] or [`Sorted::new`]), and travels in that order. Each matching pair goes to a closure: a pair of
//! row numbers, first that of R.

use std::ops::Range;

/// Bytes of a partition with its table that fit into a core's L2 cache.
const PARTITION: usize = 256 << 10;
/// Most bits of radix partitioning in one pass: its write positions fit into the L1 cache.
const MAX_BITS: u32 = 12;
/// Bytes of a row of S in a partition: key, row, link, and its part of the heads.
const ROW: usize = 8 + 8 + 4 + 8;
/// The end of a chain.
const NONE: u32 = u32::MAX;

fn mix(key: u64) -> u64 {
    // The multiplication spreads the low bits upwards, so hashes are taken from above.
    (key ^ (key >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn partition_of(key: u64, bits: u32) -> usize {
    if bits == 0 {
        return 0;
    }
    (mix(key) >> (64 - bits)) as usize
}

/// The radix bits with which a relation of `rows` rows gets partitions of the size of the L2 cache.
pub fn radix_bits(rows: usize) -> u32 {
    let parts = (rows * ROW).div_ceil(PARTITION).max(1);
    parts.next_power_of_two().ilog2().min(MAX_BITS)
}

/// A relation in partitions by the hash of its keys.
pub struct Partitioned {
    /// Keys, partition by partition.
    pub keys: Vec<u64>,
    pub rows: Vec<u64>,
    /// The start of each partition; one more than there are partitions.
    pub starts: Vec<usize>,
    bits: u32,
}

impl Partitioned {
    /// In `1 << bits` partitions; at most 12 bits.
    ///
    /// # Panics
    /// If the columns differ in length.
    pub fn new(keys: &[u64], rows: &[u64], bits: u32) -> Self {
        assert_eq!(keys.len(), rows.len());
        let bits = bits.min(MAX_BITS);
        let mut starts = vec![0; (1 << bits) + 1];
        for &key in keys {
            starts[partition_of(key, bits) + 1] += 1;
        }
        for i in 1..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut at = starts.clone();
        let (mut out_keys, mut out_rows) = (vec![0; keys.len()], vec![0; keys.len()]);
        for (&key, &row) in keys.iter().zip(rows) {
            let to = &mut at[partition_of(key, bits)];
            out_keys[*to] = key;
            out_rows[*to] = row;
            *to += 1;
        }
        Self {
            keys: out_keys,
            rows: out_rows,
            starts,
            bits,
        }
    }

    pub fn partitions(&self) -> usize {
        1 << self.bits
    }

    /// Keys and rows of one.
    pub fn partition(&self, partition: usize) -> (&[u64], &[u64]) {
        let range = self.starts[partition]..self.starts[partition + 1];
        (&self.keys[range.clone()], &self.rows[range])
    }
}

/// The stationary side of a radix-partitioned hash join: a chained hash table for each partition.
pub struct HashJoin {
    s: Partitioned,
    /// The start of the heads of each partition; their number is a power of two.
    heads: Vec<usize>,
    table: Vec<u32>,
    /// The next row of the chain, within the partition.
    next: Vec<u32>,
}

impl HashJoin {
    /// Partitions S and builds the tables.
    ///
    /// # Panics
    /// If the columns differ in length, or one partition has 2^32 - 1 rows.
    pub fn build(keys: &[u64], rows: &[u64], bits: u32) -> Self {
        let s = Partitioned::new(keys, rows, bits);
        let mut heads = vec![0];
        for p in 0..s.partitions() {
            let len = s.starts[p + 1] - s.starts[p];
            assert!(len < NONE as usize, "too many rows in a partition");
            heads.push(heads[p] + len.next_power_of_two().max(1));
        }
        let mut table = vec![NONE; heads[s.partitions()]];
        let mut next = vec![NONE; s.keys.len()];
        for p in 0..s.partitions() {
            let slots = &mut table[heads[p]..heads[p + 1]];
            let (keys, _) = s.partition(p);
            let links = &mut next[s.starts[p]..s.starts[p + 1]];
            for (i, &key) in keys.iter().enumerate() {
                let slot = &mut slots[slot_of(key, s.bits, slots.len())];
                links[i] = *slot;
                *slot = i as u32;
            }
        }
        Self {
            s,
            heads,
            table,
            next,
        }
    }

    /// The radix bits, which R must be partitioned by.
    pub fn bits(&self) -> u32 {
        self.s.bits
    }

    /// Joins rows of R that all belong to this partition.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn probe(
        &self,
        partition: usize,
        keys: &[u64],
        rows: &[u64],
        mut pair: impl FnMut(u64, u64),
    ) {
        let slots = &self.table[self.heads[partition]..self.heads[partition + 1]];
        let start = self.s.starts[partition];
        let (s_keys, s_rows) = self.s.partition(partition);
        let links = &self.next[start..start + s_keys.len()];
        for (&key, &row) in keys.iter().zip(rows) {
            let mut at = slots[slot_of(key, self.s.bits, slots.len())];
            while at != NONE {
                let i = at as usize;
                if s_keys[i] == key {
                    pair(row, s_rows[i]);
                }
                at = links[i];
            }
        }
    }

    /// Joins rows of R in any order: for R that is not partitioned.
    pub fn probe_any(&self, keys: &[u64], rows: &[u64], mut pair: impl FnMut(u64, u64)) {
        for (key, row) in keys.iter().zip(rows) {
            let partition = partition_of(*key, self.s.bits);
            self.probe(
                partition,
                std::slice::from_ref(key),
                std::slice::from_ref(row),
                &mut pair,
            );
        }
    }
}

fn slot_of(key: u64, bits: u32, slots: usize) -> usize {
    // The bits below those of the partition.
    (mix(key) << bits >> 32) as usize & (slots - 1)
}

/// A relation in the order of its keys.
pub struct Sorted {
    /// Keys, ascending.
    pub keys: Vec<u64>,
    pub rows: Vec<u64>,
}

impl Sorted {
    /// Sorts it.
    ///
    /// # Panics
    /// If the columns differ in length.
    pub fn new(keys: &[u64], rows: &[u64]) -> Self {
        assert_eq!(keys.len(), rows.len());
        let mut pairs: Vec<(u64, u64)> = keys.iter().copied().zip(rows.iter().copied()).collect();
        pairs.sort_unstable();
        let (keys, rows) = pairs.into_iter().unzip();
        Self { keys, rows }
    }

    /// Joins a sorted run of R on equal keys.
    pub fn merge(&self, keys: &[u64], rows: &[u64], pair: impl FnMut(u64, u64)) {
        self.band(keys, rows, 0, 0, pair);
    }

    /// Joins a sorted run of R: keys `s` with `r - below <= s <= r + above`.
    pub fn band(
        &self,
        keys: &[u64],
        rows: &[u64],
        below: u64,
        above: u64,
        mut pair: impl FnMut(u64, u64),
    ) {
        let Some(&first) = keys.first() else { return };
        // A run is a part of R: its place in S is searched for once.
        let mut low = self
            .keys
            .partition_point(|&s| s < first.saturating_sub(below));
        for (&key, &row) in keys.iter().zip(rows) {
            let (from, to) = (key.saturating_sub(below), key.saturating_add(above));
            while self.keys.get(low).is_some_and(|&s| s < from) {
                low += 1;
            }
            let matching = self.keys[low..].iter().zip(&self.rows[low..]);
            for (_, &s_row) in matching.take_while(|&(&s, _)| s <= to) {
                pair(row, s_row);
            }
        }
    }
}

/// The stationary side of a band join in its general form: each row of S has an interval of keys, each row of R has one, and two rows match when
/// the intervals overlap. In the band join of the thesis (7.4.2) the rows of one side are points, `low == high`.
///
/// S is sorted by the low ends. The high ends are searched by their running maximum, which always ascends. If the high ends themselves
/// ascend (a band of one width), a range contains matches only; otherwise each candidate is checked.
pub struct Intervals<K> {
    /// Ascending.
    low: Vec<K>,
    /// The greatest high end up to here.
    reach: Vec<K>,
    /// The high ends, unless they are the same as `reach`.
    high: Option<Vec<K>>,
    rows: Vec<u64>,
}

/// The position of the last search of an [`Intervals`]: the next one starts there, so a sorted run of R scans S once.
#[derive(Debug, Clone, Copy, Default)]
pub struct Place {
    low: usize,
    high: usize,
}

impl<K: Ord + Copy> Intervals<K> {
    /// Sorts S. A row whose high end is below its low end can still match, as the two comparisons say.
    ///
    /// # Panics
    /// If the columns differ in length.
    pub fn new(low: &[K], high: &[K], rows: &[u64]) -> Self {
        assert!(low.len() == rows.len() && high.len() == rows.len());
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_unstable_by_key(|&i| (low[i], high[i], rows[i]));
        let highs: Vec<K> = order.iter().map(|&i| high[i]).collect();
        let mut reach = highs.clone();
        for i in 1..reach.len() {
            reach[i] = reach[i].max(reach[i - 1]);
        }
        Self {
            low: order.iter().map(|&i| low[i]).collect(),
            high: (highs != reach).then_some(highs),
            reach,
            rows: order.iter().map(|&i| rows[i]).collect(),
        }
    }

    /// The positions of S among which the matches of a row of R are: rows with `S.low <= high` and, if [`Intervals::matches`] says so too,
    /// `S.high >= low`.
    pub fn candidates(&self, place: &mut Place, low: K, high: K) -> Range<usize> {
        place.high = seek(&self.low, place.high, |&s| s <= high);
        place.low = seek(&self.reach, place.low, |&s| s < low);
        place.low.min(place.high)..place.high
    }

    /// Whether a candidate matches a row of R with this low end.
    pub fn matches(&self, position: usize, low: K) -> bool {
        self.high.as_ref().is_none_or(|high| high[position] >= low)
    }

    pub fn row(&self, position: usize) -> u64 {
        self.rows[position]
    }

    /// Bytes that it has in memory.
    pub fn bytes(&self) -> usize {
        let columns = if self.high.is_some() { 3 } else { 2 };
        self.rows.len() * (columns * size_of::<K>() + size_of::<u64>())
    }

    /// Joins rows of R, sorted or not.
    ///
    /// # Panics
    /// If the columns differ in length.
    pub fn probe(&self, low: &[K], high: &[K], rows: &[u64], mut pair: impl FnMut(u64, u64)) {
        assert!(low.len() == rows.len() && high.len() == rows.len());
        let mut place = Place::default();
        for ((&low, &high), &row) in low.iter().zip(high).zip(rows) {
            for position in self.candidates(&mut place, low, high) {
                if self.matches(position, low) {
                    pair(row, self.rows[position]);
                }
            }
        }
    }
}

/// The first position whose key is not `before`, searched in growing steps away from `from`.
fn seek<K>(keys: &[K], from: usize, before: impl Fn(&K) -> bool) -> usize {
    let from = from.min(keys.len());
    let mut step = 1;
    if keys.get(from).is_some_and(&before) {
        let mut low = from + 1;
        while low + step <= keys.len() && before(&keys[low + step - 1]) {
            low += step;
            step *= 2;
        }
        let high = keys.len().min(low + step);
        return low + keys[low..high].partition_point(before);
    }
    let mut high = from;
    while high >= step && !before(&keys[high - step]) {
        high -= step;
        step *= 2;
    }
    let low = high.saturating_sub(step);
    low + keys[low..high].partition_point(before)
}

/// Joins on any predicate, by nested loops; `matches` gets a key of R and one of S.
pub fn nested_loops(
    (r_keys, r_rows): (&[u64], &[u64]),
    (s_keys, s_rows): (&[u64], &[u64]),
    matches: impl Fn(u64, u64) -> bool,
    mut pair: impl FnMut(u64, u64),
) {
    for (&r, &r_row) in r_keys.iter().zip(r_rows) {
        for (&s, &s_row) in s_keys.iter().zip(s_rows) {
            if matches(r, s) {
                pair(r_row, s_row);
            }
        }
    }
}

/// Keys that follow Zipf's law: key `k` of `1..=keys` with a probability proportional to `1 / k^factor`. The same seed gives the same keys.
pub fn zipf(count: usize, keys: u64, factor: f64, seed: u64) -> Vec<u64> {
    let mut state = seed;
    let mut uniform = move || {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    if factor <= 0.0 {
        let last = keys.max(1);
        return (0..count)
            .map(|_| (1 + (uniform() * last as f64) as u64).min(last))
            .collect();
    }
    let mut sum = 0.0;
    let cumulated: Vec<f64> = (1..=keys.max(1))
        .map(|k| {
            sum += (k as f64).powf(-factor);
            sum
        })
        .collect();
    (0..count)
        .map(|_| {
            let at = uniform() * sum;
            (cumulated.partition_point(|&c| c < at) as u64 + 1).min(keys.max(1))
        })
        .collect()
}
