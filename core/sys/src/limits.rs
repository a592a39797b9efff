//! The resource limits of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open descriptors allowed: (soft, hard). `u64::MAX` means no limit.
pub fn nofile() -> (u64, u64) {
    let r = getrlimit(Resource::Nofile);
    (r.current.unwrap_or(u64::MAX), r.maximum.unwrap_or(u64::MAX))
}

/// Raises the soft limit of descriptors as far as the hard one allows; returns what holds after.
pub fn raise_nofile() -> u64 {
    let r = getrlimit(Resource::Nofile);
    // A refusal leaves the old limit, and the answer says so.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: r.maximum,
            maximum: r.maximum,
        },
    );
    nofile().0
}

/// Bytes of memory that may be locked (soft limit). `u64::MAX` means no limit.
pub fn memlock() -> u64 {
    getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX)
}
