//! The library's descriptors, which the program cannot close by accident: `close` of one fails with `EBADF`, and `close_range` skips them.

use libc::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::OnceLock;

use crate::table::{self, Entry};
use crate::{kernel, next};

/// First number of hidden descriptors: above those of most programs, and low enough to keep the kernel's table small.
fn base() -> c_int {
    static BASE: OnceLock<c_int> = OnceLock::new();
    *BASE.get_or_init(|| {
        let most = kernel::most_descriptors();
        if most >= 4096 {
            2048
        } else {
            (most / 2) as c_int
        }
    })
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
    let new = unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, base() as libc::c_ulong) };
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
