//! Numbers of bytes as users write them.

/// The text is no number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not a number with an optional unit.
    #[error("'{0}' is not a size: write bytes, or a number with K, M, G or T (powers of 1024)")]
    NotASize(String),
    /// More than a file can have.
    #[error("'{0}' is too large")]
    TooLarge(String),
}

/// A number of bytes: decimal digits and, perhaps, K, M, G or T (also KB, KiB and so on) for powers of 1024.
///
/// # Errors
/// The text is something else, or more than `i64::MAX` bytes.
pub fn parse(text: &str) -> Result<u64, Malformed> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return Err(Malformed::NotASize(text.to_owned())),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Malformed::NotASize(text.to_owned()));
    }
    let size = digits.parse::<u64>().ok();
    size.and_then(|size| size.checked_mul(unit))
        .filter(|size| i64::try_from(*size).is_ok())
        .ok_or_else(|| Malformed::TooLarge(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_users_write_them() {
        for (text, size) in [
            ("0", 0),
            ("64b", 64),
            ("4kB", 4096),
            ("4K", 4096),
            ("2MiB", 2 << 20),
            ("2gb", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse(text), Ok(size));
        }
        for bad in ["", "K", "4X", "-1", "+1", "1.5M", "0x10", " 4K", "4 K"] {
            assert_eq!(parse(bad), Err(Malformed::NotASize(bad.to_owned())));
        }
        for large in ["9223372036854775808", "8388608T", "18446744073709551616"] {
            assert_eq!(parse(large), Err(Malformed::TooLarge(large.to_owned())));
        }
    }
}
