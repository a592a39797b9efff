//! The process's resource use, from the kernel.

use std::time::Instant;

use crate::bed::PATIENCE;

/// Resident bytes that no file backs.
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|l| l.starts_with("RssAnon:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1));
    kib.and_then(|k| k.parse::<usize>().ok()).expect("RssAnon") * 1024
}

pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Waits until at most `before` descriptors are open.
pub fn given_back(before: usize) {
    let deadline = Instant::now() + PATIENCE;
    while descriptors() > before {
        assert!(
            Instant::now() < deadline,
            "{before} descriptors were open before, now {:#?}",
            described()
        );
        std::thread::yield_now();
    }
}

/// A description of each open descriptor.
fn described() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd")
        .expect("procfs")
        .flatten();
    entries
        .filter_map(|entry| {
            let what = std::fs::read_link(entry.path()).ok()?;
            Some(format!(
                "{}: {}",
                entry.file_name().display(),
                what.display()
            ))
        })
        .collect()
}
