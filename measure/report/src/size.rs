//! Byte sizes as users write them: `64`, `4K`, `1M`, `1..64M`.

use std::fmt;
use std::str::FromStr;

use weft_service::size::Malformed;
pub use weft_service::size::parse as parse_size;

/// The sizes that `--size` selects, in ascending order and without repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// Why a list of sizes could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No number of bytes.
    #[error(transparent)]
    Size(#[from] Malformed),
    /// The range runs downwards or starts at nothing.
    #[error(
        "'{0}' is not a range: write LOW..HIGH or LOW..HIGH*FACTOR, with 1 <= LOW <= HIGH and FACTOR >= 2"
    )]
    NotARange(String),
}

impl FromStr for Sizes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let mut sizes = Vec::new();
        for item in text.split(',').map(str::trim) {
            let Some((low, high)) = item.split_once("..") else {
                sizes.push(parse_size(item)?);
                continue;
            };
            let bad = || SizeError::NotARange(item.to_owned());
            let (high, factor) = match high.split_once('*') {
                Some((high, factor)) => (high, factor.parse::<u64>().map_err(|_| bad())?),
                None => (high, 2),
            };
            let (low, high) = (parse_size(low)?, parse_size(high)?);
            if low == 0 || low > high || factor < 2 {
                return Err(bad());
            }
            let powers = std::iter::successors(Some(low), |size| size.checked_mul(factor));
            sizes.extend(powers.take_while(|size| *size <= high));
        }
        sizes.sort_unstable();
        sizes.dedup();
        Ok(Self(sizes))
    }
}

/// The sizes that a suite has where its options name none, in the language of the options.
pub fn sizes(text: &str) -> Vec<u64> {
    let sizes = text.parse::<Sizes>();
    sizes.unwrap_or_else(|error| unreachable!("{error}")).0
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, size) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}", human(*size).replace(' ', ""))?;
        }
        Ok(())
    }
}

/// A size with a binary unit, exact when it is a whole number of the unit: `64 B`, `4 KiB`, `1.5 MiB`.
pub fn human(bytes: u64) -> String {
    let (shift, unit) = match bytes {
        0..=1023 => return format!("{bytes} B"),
        1024..=0xf_ffff => (10, "KiB"),
        0x10_0000..=0x3fff_ffff => (20, "MiB"),
        _ => (30, "GiB"),
    };
    if bytes.trailing_zeros() >= shift {
        format!("{} {unit}", bytes >> shift)
    } else {
        format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        let sizes = |text: &str| text.parse::<Sizes>().map(|sizes| sizes.0);
        assert_eq!(sizes("4K,1,64,1"), Ok(vec![1, 64, 4096]));
        assert_eq!(sizes("1..16"), Ok(vec![1, 2, 4, 8, 16]));
        assert_eq!(sizes("1..1K*4,3"), Ok(vec![1, 3, 4, 16, 64, 256, 1024]));
        assert_eq!(sizes("3..20"), Ok(vec![3, 6, 12]));
        assert_eq!(sizes("8..8"), Ok(vec![8]));
        for bad in ["0..4", "8..4", "1..8*1", "1..8*x"] {
            assert_eq!(sizes(bad), Err(SizeError::NotARange(bad.to_owned())));
        }
        assert!(sizes("1,").is_err());
        assert_eq!(
            sizes("4611686018427387904..9223372036854775807"),
            Ok(vec![1 << 62])
        );
    }

    #[test]
    fn printed() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(4096), "4 KiB");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(64 << 20), "64 MiB");
        assert_eq!(human(1 << 30), "1 GiB");
        let sizes = Sizes(vec![1, 4096, 1 << 20]);
        assert_eq!(sizes.to_string().parse(), Ok(sizes));
    }
}
