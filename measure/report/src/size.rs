//! Byte sizes as users write them: `64`, `4K`, `1M`, `1..64M`.

use std::fmt;
use std::str::FromStr;

/// The sizes that `--size` selects, in ascending order and without repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// Why a size or a list of sizes could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not a number with an optional suffix K, M or G.
    #[error("'{0}' is not a size: write bytes, or a number with K, M or G (powers of 1024)")]
    NotASize(String),
    /// More bytes than 64 bits count.
    #[error("'{0}' is too large")]
    TooLarge(String),
    /// The range runs downwards or starts at nothing.
    #[error(
        "'{0}' is not a range: write LOW..HIGH or LOW..HIGH*FACTOR, with 1 <= LOW <= HIGH and FACTOR >= 2"
    )]
    NotARange(String),
}

/// Reads one size in bytes; K, M and G (also KiB, MB and so on) are powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(SizeError::NotASize(text.to_owned())),
    };
    let number = digits
        .parse::<u64>()
        .map_err(|_| SizeError::NotASize(text.to_owned()))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
}

impl FromStr for Sizes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let mut sizes = Vec::new();
        for item in text.split(',') {
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
    fn one_size() {
        assert_eq!(parse_size("1"), Ok(1));
        assert_eq!(parse_size(" 4K "), Ok(4096));
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        assert_eq!(parse_size("2gb"), Ok(2 << 30));
        for bad in ["", "K", "4X", "-1", "1.5M", "0x10"] {
            assert_eq!(parse_size(bad), Err(SizeError::NotASize(bad.to_owned())));
        }
        assert_eq!(
            parse_size("18446744073709551615K"),
            Err(SizeError::TooLarge("18446744073709551615K".to_owned()))
        );
    }

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
            sizes("9223372036854775808..18446744073709551615"),
            Ok(vec![1 << 63])
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
