//! The `Range` header of a request (RFC 9110 14.2).

/// The part of a title that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All of it.
    Whole,
    /// From one byte to before another, at least one.
    Part(u64, u64),
    /// A range that the title does not have.
    Unsatisfiable,
}

/// Reads the header for a title of so many bytes. Several ranges, other units and malformed ones count as none, as the RFC allows.
pub(super) fn wanted(header: Option<&str>, len: u64) -> Wanted {
    let parse = |digits: &str| {
        let digits = digits.trim();
        let good = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        // A number larger than any file's length.
        good.then(|| digits.parse::<u64>().unwrap_or(u64::MAX))
    };
    let range = header
        .and_then(|h| h.trim().strip_prefix("bytes="))
        .and_then(|r| r.split_once('-'));
    let Some((first, last)) = range else {
        return Wanted::Whole;
    };
    match (parse(first), parse(last)) {
        (None, Some(n)) if first.trim().is_empty() => {
            if n == 0 || len == 0 {
                Wanted::Unsatisfiable
            } else {
                Wanted::Part(len.saturating_sub(n), len)
            }
        }
        (Some(from), to) if to.is_some() || last.trim().is_empty() => {
            let end = to.map_or(len, |to| to.saturating_add(1).min(len));
            if to.is_some_and(|to| to < from) {
                Wanted::Whole
            } else if from >= len {
                Wanted::Unsatisfiable
            } else {
                Wanted::Part(from, end)
            }
        }
        _ => Wanted::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_the_rfc_has_them() {
        use Wanted::{Part, Unsatisfiable, Whole};
        for (header, len, expected) in [
            ("bytes=0-", 10, Part(0, 10)),
            ("bytes=0-0", 10, Part(0, 1)),
            ("bytes=3-4", 10, Part(3, 5)),
            ("bytes=3-99", 10, Part(3, 10)),
            ("bytes=-4", 10, Part(6, 10)),
            ("bytes=-40", 10, Part(0, 10)),
            ("bytes= 1 - 2 ", 10, Part(1, 3)),
            ("bytes=10-", 10, Unsatisfiable),
            ("bytes=0-", 0, Unsatisfiable),
            ("bytes=-0", 10, Unsatisfiable),
            ("bytes=99999999999999999999-", 10, Unsatisfiable),
            ("bytes=1-99999999999999999999", 10, Part(1, 10)),
            ("bytes=4-3", 10, Whole),
            ("bytes=-", 10, Whole),
            ("bytes=a-b", 10, Whole),
            ("bytes=+1-2", 10, Whole),
            ("bytes=1-2,4-5", 10, Whole),
            ("lines=1-2", 10, Whole),
            ("", 10, Whole),
        ] {
            assert_eq!(wanted(Some(header), len), expected, "{header}");
        }
        assert_eq!(wanted(None, 10), Whole);
    }
}
