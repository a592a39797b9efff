//! What the process uses, as the kernel says.

/// Resident bytes that no file backs.
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|l| l.starts_with("RssAnon:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1));
    kib.and_then(|k| k.parse::<usize>().ok()).expect("RssAnon") * 1024
}

/// Open descriptors.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}
