//! The functions that the fuzz targets call.

use crate::options::{Family, check_job, parse_as};

/// Arbitrary bytes as each message of the protocol, and as command lines.
pub fn cc_wire(data: &[u8]) {
    crate::wire::check_any(data);
    let words: Vec<_> = String::from_utf8_lossy(data)
        .split('\0')
        .map(|word| word.replace('@', ""))
        .collect();
    let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
    for family in [Family::Gcc, Family::Clang] {
        let _ = check_job(family, &words);
        if let Ok(plan) = parse_as(family, std::path::Path::new("/"), &args) {
            // A worker accepts every job that is sent.
            assert_eq!(check_job(family, &plan.job), Ok(()));
        }
    }
    if let Some((entry, len)) = crate::tree::Entry::decode(data) {
        assert_eq!(entry.encode(), data[..len]);
    }
    let _ = crate::options::stays(data);
    assert!(crate::options::built_in(data).end <= data.len());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn corpus() -> Vec<Vec<u8>> {
        let dir =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/cc_wire");
        let files = std::fs::read_dir(dir).expect("a corpus");
        let mut all: Vec<_> = files
            .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
            .collect();
        all.sort();
        all
    }

    proptest! {
        #[test]
        fn damaged_messages_hold(
            which in 0_usize..100,
            damage in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
        ) {
            let all = corpus();
            let mut bytes = all[which % all.len()].clone();
            for &(at, value) in &damage {
                let at = usize::from(at) % bytes.len();
                bytes[at] = value;
            }
            super::cc_wire(&bytes);
        }
    }

    #[test]
    fn the_corpus_holds() {
        let all = corpus();
        assert!(!all.is_empty());
        for bytes in &all {
            super::cc_wire(bytes);
        }
    }
}
