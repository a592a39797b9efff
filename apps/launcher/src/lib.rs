//! `weft-cc`, the program that a make starts for each source in place of `weft cc`: `program/main.rs`, compiled by the build script.
#![forbid(unsafe_code)]

/// The program; empty where there is none for this machine (other than Linux on x86-64 and aarch64).
pub const LAUNCHER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/weft-cc"));

#[cfg(test)]
mod tests {
    use super::LAUNCHER;

    #[test]
    fn it_has_no_interpreter_and_no_library() {
        if LAUNCHER.is_empty() {
            return eprintln!("skipped: there is none for this machine");
        }
        let number = |at: usize, len: usize| {
            let bytes = LAUNCHER[at..at + len].iter().rev();
            bytes.fold(0, |sum, &b| sum << 8 | usize::from(b))
        };
        assert_eq!(LAUNCHER[..4], *b"\x7fELF");
        // The start time grows with its size, and each relocation would cost a page.
        assert!(LAUNCHER.len() < 16 << 10, "{}", LAUNCHER.len());
        let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
        let kinds: Vec<_> = (0..count).map(|n| number(table + n * size, 4)).collect();
        // PT_DYNAMIC, PT_INTERP
        assert!(!kinds.contains(&2) && !kinds.contains(&3), "{kinds:?}");
    }
}
