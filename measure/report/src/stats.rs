//! Order statistics of repeated runs.

use serde::{Deserialize, Serialize};

/// The summary of several runs: the median, the spread and the number of runs, in the unit of the samples.
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

/// A mean with the half width of its 95 % confidence interval, in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    /// The arithmetic mean.
    pub mean: f64,
    /// The interval reaches so far to either side (Student's t); `None` for a single sample.
    pub ci95: Option<f64>,
    /// The number of samples.
    pub runs: usize,
}

impl Mean {
    /// The mean of `samples`; `None` when there are none.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let runs = samples.len();
        let degrees = runs.checked_sub(1)?;
        let mean = samples.iter().sum::<f64>() / runs as f64;
        let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        let ci95 = (degrees > 0).then(|| {
            let variance = squares / degrees as f64;
            student_t(degrees) * (variance / runs as f64).sqrt()
        });
        Some(Self { mean, ci95, runs })
    }
}

/// The 97.5th percentile of Student's t distribution.
fn student_t(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042,
    ];
    let listed = degrees.checked_sub(1).and_then(|index| TABLE.get(index));
    // Beyond the table the first terms of the expansion around the normal distribution are good to three digits.
    listed.copied().unwrap_or_else(|| {
        let (z, n) = (1.959_964_f64, degrees.max(1) as f64);
        let second = 5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z;
        z + (z.powi(3) + z) / (4.0 * n) + second / (96.0 * n * n)
    })
}

/// Ratios of paired runs: run `i` of `ours` divided by run `i` of `theirs`. Runs are interleaved, so a
/// disturbance of the machine affects both of a pair. Pairs with a zero divisor are left out.
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
    fn confidence_intervals() {
        let mean = Mean::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        close(mean.mean, 3.0);
        // The standard error of these five is the square root of a half.
        close(mean.ci95.unwrap(), 2.776 * 0.5f64.sqrt());
        assert_eq!(Mean::of(&[7.0]).unwrap().ci95, None);
        assert_eq!(Mean::of(&[]), None);
        close(student_t(1), 12.706);
        close(student_t(9), 2.262);
        assert!((student_t(31) - 2.040).abs() < 0.002);
        assert!((student_t(120) - 1.980).abs() < 0.001);
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
