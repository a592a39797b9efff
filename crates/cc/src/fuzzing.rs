//! What the fuzz targets call.

/// Arbitrary bytes as each message of the protocol, and as command lines.
pub fn cc_wire(data: &[u8]) {
    crate::wire::check_any(data);
    let words: Vec<_> = String::from_utf8_lossy(data)
        .split('\0')
        .map(|word| word.replace('@', ""))
        .collect();
    let _ = crate::options::check_job(&words);
    let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
    if let Ok(plan) = crate::options::parse(&args) {
        // Whatever goes out, a worker takes.
        assert_eq!(crate::options::check_job(&plan.job), Ok(()));
    }
    let _ = crate::options::stays(data);
    assert!(crate::options::built_in(data).end <= data.len());
}
