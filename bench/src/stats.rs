//! Order statistics of repeated runs.

use serde::{Deserialize, Serialize};

/// What ten runs say: the middle, the spread and the number of runs. All in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Middle run, or the mean of the two middle runs.
    pub median: f64,
    /// Smallest run.
    pub min: f64,
    /// Largest run.
    pub max: f64,
    /// Lower quartile.
    pub q1: f64,
    /// Upper quartile.
    pub q3: f64,
    /// How many runs.
    pub runs: usize,
}

impl Summary {
    /// Summarises `samples`; `None` when there are none, or when one is not a number.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.iter().any(|sample| sample.is_nan()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            median: percentile(&sorted, 0.5)?,
            min: *sorted.first()?,
            max: *sorted.last()?,
            q1: percentile(&sorted, 0.25)?,
            q3: percentile(&sorted, 0.75)?,
            runs: sorted.len(),
        })
    }
}

/// The value below which the share `p` (0 to 1) of ascending `sorted` lies, interpolated between neighbours.
/// `None` when `sorted` is empty.
pub fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let rank = p.clamp(0.0, 1.0) * last as f64;
    let low = rank.floor() as usize;
    let high = rank.ceil() as usize;
    let share = rank - low as f64;
    Some(sorted[low] + (sorted[high] - sorted[low]) * share)
}

/// Ratios of paired runs: run `i` of `ours` over run `i` of `theirs`. Runs were interleaved, so
/// that a disturbance of the machine meets both of a pair. Pairs with a zero divisor are left out.
pub fn paired_ratio(ours: &[f64], theirs: &[f64]) -> Option<Summary> {
    let ratios: Vec<f64> = ours
        .iter()
        .zip(theirs)
        .filter(|(_, theirs)| **theirs > 0.0)
        .map(|(ours, theirs)| ours / theirs)
        .collect();
    Summary::of(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) {
        assert!((left - right).abs() < 1e-12, "{left} is not {right}");
    }

    #[test]
    fn summary_of_odd_and_even_counts() {
        let odd = Summary::of(&[5.0, 1.0, 3.0]).unwrap();
        close(odd.median, 3.0);
        close(odd.min, 1.0);
        close(odd.max, 5.0);
        close(odd.q1, 2.0);
        close(odd.q3, 4.0);
        assert_eq!(odd.runs, 3);
        close(Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap().median, 2.5);
        let one = Summary::of(&[7.0]).unwrap();
        close(one.median, 7.0);
        close(one.q1, 7.0);
    }

    #[test]
    fn nothing_to_summarise() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn percentiles() {
        let sorted: Vec<f64> = (0..=100).map(f64::from).collect();
        close(percentile(&sorted, 0.99).unwrap(), 99.0);
        close(percentile(&sorted, 0.995).unwrap(), 99.5);
        close(percentile(&sorted, 2.0).unwrap(), 100.0);
        close(percentile(&sorted, -1.0).unwrap(), 0.0);
    }

    #[test]
    fn ratios_pair_the_runs() {
        // The second pair ran on a machine half as fast: the ratio does not notice.
        let ratio = paired_ratio(&[9.0, 4.5, 9.0], &[10.0, 5.0, 10.0]).unwrap();
        close(ratio.median, 0.9);
        close(ratio.min, 0.9);
        close(ratio.max, 0.9);
        assert_eq!(paired_ratio(&[1.0, 2.0], &[0.0, 1.0]).unwrap().runs, 1);
        assert_eq!(paired_ratio(&[1.0], &[0.0]), None);
    }
}
