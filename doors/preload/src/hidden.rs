//! The library's descriptors, which the program cannot close by accident: `close` of one fails with `EBADF`, and `close_range` skips them.

use libc::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::OnceLock;

use crate::table::{self, Entry};
use crate::{kernel, next};

/// From this limit on a program hardly misses the numbers that are hidden among its own.
const PLENTY: u64 = 4096;

/// First number of hidden descriptors: above those of most programs, and low enough to keep the kernel's table small. Where the program may have few, they are
/// above its limit, if it could raise that; else the last quarter is all that is taken from it.
fn base() -> c_int {
    static BASE: OnceLock<c_int> = OnceLock::new();
    *BASE.get_or_init(|| {
        let (now, most) = kernel::descriptor_limits();
        let base = match now {
            PLENTY.. => PLENTY / 2,
            _ if most >= 2 * now => now,
            _ => now - now / 4,
        };
        base as c_int
    })
}

/// Calls `take` with the limit of numbers as high as this process may set it, if hidden ones are above it. Another thread's call meanwhile may set the limit:
/// then that one stays.
fn above_limit(take: impl Fn() -> c_int) -> c_int {
    let (now, most) = kernel::descriptor_limits();
    if now <= base() as u64 && now < most {
        kernel::limit_descriptors(most, most);
        let taken = take();
        let found = kernel::limit_descriptors(now, most);
        if found != (most, most) && found.0 > base() as u64 {
            kernel::limit_descriptors(found.0, found.1);
        }
        return taken;
    }
    take()
}

/// Moves a descriptor up and hides it. `None`, and it is closed, when there are too many.
pub(crate) fn hide(fd: OwnedFd) -> Option<c_int> {
    let raw = fd.into_raw_fd();
    let moved = duplicate(raw);
    // SAFETY: it is ours.
    unsafe { next::close(raw) };
    moved
}

/// A hidden duplicate.
pub(crate) fn duplicate(fd: c_int) -> Option<c_int> {
    // SAFETY: makes a descriptor.
    let new =
        above_limit(|| unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, base() as libc::c_ulong) });
    if new < 0 {
        return None;
    }
    if !table::holds(new) {
        // SAFETY: it is ours.
        unsafe { next::close(new) };
        return None;
    }
    table::put(new, Entry::HIDDEN);
    Some(new)
}

pub(crate) fn close(fd: c_int) {
    table::put(fd, Entry::NONE);
    // SAFETY: it is ours.
    unsafe { next::close(fd) };
}
