//! The preload libraries, as `LD_PRELOAD` names them.

/// File names of the library: that of `./x dist` and of the packages, and cargo's.
pub const LIBRARIES: [&str; 2] = ["libweft-run.so", "libweft_run_preload.so"];
/// File names of the library of `--azsdp-malloc`.
pub const MALLOC_LIBRARIES: [&str; 2] = ["libweft-malloc.so", "libweft_malloc_preload.so"];

/// The value of `LD_PRELOAD` without our libraries. `None`: none of them is in it.
#[must_use]
pub fn without_ours(value: &[u8]) -> Option<Vec<u8>> {
    let is_ours = |entry: &&[u8]| {
        let name = entry.rsplit(|&byte| byte == b'/').next().unwrap_or(entry);
        let mut names = LIBRARIES.iter().chain(&MALLOC_LIBRARIES);
        names.any(|ours| ours.as_bytes() == name)
    };
    let entries = || value.split(|&byte| byte == b':' || byte == b' ');
    entries().any(|entry| is_ours(&entry)).then(|| {
        let others = entries().filter(|entry| !entry.is_empty() && !is_ours(entry));
        others.collect::<Vec<_>>().join(&b':')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entries_of_others_stay() {
        let without = |value: &str| {
            without_ours(value.as_bytes()).map(|rest| String::from_utf8(rest).unwrap())
        };
        assert_eq!(without("/a/libweft-run.so").as_deref(), Some(""));
        assert_eq!(
            without("/a/libweft-run.so:/a/libweft-malloc.so:libx.so /b/liby.so").as_deref(),
            Some("libx.so:/b/liby.so")
        );
        assert_eq!(without("/b/libweft_run_preload.so::").as_deref(), Some(""));
        assert_eq!(without("libx.so:/libweft-run.so/libz.so"), None);
        assert_eq!(without(""), None);
    }
}
