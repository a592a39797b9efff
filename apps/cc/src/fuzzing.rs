//! The functions that the fuzz targets call.

/// Arbitrary bytes as each message of the protocol, and as command lines.
pub fn cc_wire(data: &[u8]) {
    crate::wire::check_any(data);
    let words: Vec<_> = String::from_utf8_lossy(data)
        .split('\0')
        .map(|word| word.replace('@', ""))
        .collect();
    let _ = crate::options::check_job(&words);
    let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
    if let Ok(plan) = crate::options::parse(std::path::Path::new("/"), &args) {
        // A worker accepts every job that is sent.
        assert_eq!(crate::options::check_job(&plan.job), Ok(()));
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
