//! Numbers of bytes as users write them.

/// A number of bytes: decimal digits and, perhaps, K, M, G or T (also KB, KiB and so on) for powers of 1024.
pub fn parse(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return None,
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let size = digits.parse::<u64>().ok()?.checked_mul(unit)?;
    i64::try_from(size).is_ok().then_some(size)
}
