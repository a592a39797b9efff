//! The joins against a naive oracle: 10,000 random ones, cut into elements as a ring would.

use weft_roundabout::joins::{
    HashJoin, Intervals, Partitioned, Sorted, nested_loops, radix_bits, zipf,
};

const JOINS: u64 = 10_000;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % limit
    }

    /// Keys of one of several kinds: few values, all equal, at the ends of the range, anything.
    fn keys(&mut self) -> Vec<u64> {
        let kind = self.below(5);
        (0..self.below(40))
            .map(|_| match kind {
                0 => self.below(8),
                1 => 77,
                2 => u64::MAX - self.below(4),
                3 => self.below(3) << 62,
                _ => self.below(u64::MAX),
            })
            .collect()
    }
}

fn numbered(keys: &[u64]) -> Vec<u64> {
    (0..keys.len() as u64).map(|row| row * 3 + 1).collect()
}

fn oracle(r: &[u64], s: &[u64], matches: impl Fn(u64, u64) -> bool) -> Vec<(u64, u64)> {
    let mut pairs = Vec::new();
    for (i, &a) in r.iter().enumerate() {
        for (j, &b) in s.iter().enumerate() {
            if matches(a, b) {
                pairs.push((i as u64 * 3 + 1, j as u64 * 3 + 1));
            }
        }
    }
    pairs
}

fn sorted(mut pairs: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    pairs.sort_unstable();
    pairs
}

#[test]
fn ten_thousand_random_joins_are_as_the_oracle_says() {
    let seed: u64 = std::env::var("WEFT_SEED").map_or(1, |s| s.parse().unwrap());
    let mut matched = 0;
    for round in seed..seed + JOINS {
        let mut random = Random(round.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (r, s) = (random.keys(), random.keys());
        let (r_rows, s_rows) = (numbered(&r), numbered(&s));
        let cut = 1 + random.below(20) as usize;
        let told = format!("seed {round}: {r:?} and {s:?}, {cut} rows an element");
        let mut got = Vec::new();
        let expected = match random.below(4) {
            0 => {
                let hash = HashJoin::build(&s, &s_rows, random.below(5) as u32);
                let r_parts = Partitioned::new(&r, &r_rows, hash.bits());
                for p in 0..r_parts.partitions() {
                    let (keys, rows) = r_parts.partition(p);
                    for (keys, rows) in keys.chunks(cut).zip(rows.chunks(cut)) {
                        hash.probe(p, keys, rows, |a, b| got.push((a, b)));
                    }
                }
                let mut any = Vec::new();
                hash.probe_any(&r, &r_rows, |a, b| any.push((a, b)));
                assert_eq!(sorted(any), sorted(got.clone()), "{told}");
                oracle(&r, &s, |a, b| a == b)
            }
            1 => {
                let (s_sorted, r_sorted) = (Sorted::new(&s, &s_rows), Sorted::new(&r, &r_rows));
                for (keys, rows) in r_sorted.keys.chunks(cut).zip(r_sorted.rows.chunks(cut)) {
                    s_sorted.merge(keys, rows, |a, b| got.push((a, b)));
                }
                oracle(&r, &s, |a, b| a == b)
            }
            2 => {
                let (below, above) = (random.below(4), random.below(4));
                let (s_sorted, r_sorted) = (Sorted::new(&s, &s_rows), Sorted::new(&r, &r_rows));
                for (keys, rows) in r_sorted.keys.chunks(cut).zip(r_sorted.rows.chunks(cut)) {
                    s_sorted.band(keys, rows, below, above, |a, b| got.push((a, b)));
                }
                let within = |a: u64, b: u64| {
                    let (a, b) = (i128::from(a), i128::from(b));
                    a - i128::from(below) <= b && b <= a + i128::from(above)
                };
                oracle(&r, &s, within)
            }
            _ => {
                let matches = |a: u64, b: u64| a.wrapping_add(b) % 3 == 1;
                nested_loops((&r, &r_rows), (&s, &s_rows), matches, |a, b| {
                    got.push((a, b));
                });
                oracle(&r, &s, matches)
            }
        };
        matched += expected.len();
        assert_eq!(sorted(got), expected, "{told}");
    }
    assert!(matched as u64 > JOINS);
}

#[test]
fn ten_thousand_random_joins_of_intervals_are_as_nested_loops_say() {
    let seed: u64 = std::env::var("WEFT_SEED").map_or(1, |s| s.parse().unwrap());
    let mut matched = 0;
    for round in seed..seed + JOINS {
        let mut random = Random(round.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (r_low, s_low) = (random.keys(), random.keys());
        // Points, bands of one width, and intervals of any length, some with their ends exchanged.
        let mut ends = |low: &[u64]| -> Vec<u64> {
            let kind = random.below(4);
            low.iter()
                .map(|&key| match kind {
                    0 => key,
                    1 => key.saturating_add(3),
                    2 => key.wrapping_add(5),
                    _ => key.saturating_add(random.below(9)).saturating_sub(2),
                })
                .collect()
        };
        let (r_high, s_high) = (ends(&r_low), ends(&s_low));
        let (r_rows, s_rows) = (numbered(&r_low), numbered(&s_low));
        let mut got = Vec::new();
        let s = Intervals::new(&s_low, &s_high, &s_rows);
        s.probe(&r_low, &r_high, &r_rows, |a, b| got.push((a, b)));
        let mut expected = Vec::new();
        for (i, (&low, &high)) in r_low.iter().zip(&r_high).enumerate() {
            for (j, (&s_low, &s_high)) in s_low.iter().zip(&s_high).enumerate() {
                if s_low <= high && s_high >= low {
                    expected.push((r_rows[i], s_rows[j]));
                }
            }
        }
        matched += expected.len();
        let told = format!("seed {round}: R {r_low:?} {r_high:?}, S {s_low:?} {s_high:?}");
        assert_eq!(sorted(got), sorted(expected), "{told}");
    }
    assert!(matched as u64 > JOINS);
}

#[test]
fn partitions_have_the_size_of_the_cache() {
    assert_eq!(radix_bits(0), 0);
    assert_eq!(radix_bits(1000), 0);
    assert!(radix_bits(1_000_000) >= 6);
    assert_eq!(radix_bits(usize::MAX / 64), 12);
}

#[test]
fn zipf_keys_are_skewed_as_told() {
    let share = |factor| {
        let keys = zipf(20_000, 1000, factor, 7);
        assert!(keys.iter().all(|k| (1..=1000).contains(k)));
        keys.iter().filter(|&&k| k == 1).count() as f64 / 20_000.0
    };
    // The first of 1,000 keys has 1/H of the rows; H is 1,000, and 10.52 for 0.9.
    assert!((share(0.0) - 0.001).abs() < 0.001);
    assert!((share(0.9) - 0.095).abs() < 0.01, "{}", share(0.9));
}
