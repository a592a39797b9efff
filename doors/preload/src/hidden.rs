//! The library's descriptors, which the program cannot close by accident: `close` of one fails with `EBADF`, and `close_range` skips them.

use libc::c_int;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use weft_run::meet::Hidden;

use crate::private::{Guards, Private};
use crate::table::{self, Entry, MAX_FD};
use crate::{kernel, next};

/// First number of hidden descriptors where the program may have many: above those of most programs, and low enough to keep the kernel's table small.
const FIRST: u64 = 2048;

/// Numbers of hidden descriptors: those above the program's limit, if it could raise that; else a quarter of its own.
fn numbers((now, most): (u64, u64)) -> Range<u64> {
    let table = MAX_FD as u64;
    if now < most && now < table {
        return now..most.min(table);
    }
    let first = (now - now / 4).min(FIRST);
    first..(first + now / 4).min(table)
}

/// The process's limit is the program's, and stays so, while this is held: by calls that report, set or inherit it.
pub(crate) static LIMIT: Private<()> = Private::new(Guards::Limit, ());

/// Calls `take` with the numbers of hidden descriptors, and the limit as high as this process may set it, if they are above it. Another thread's call meanwhile
/// may set the limit: then that one stays.
fn above_limit(take: impl Fn(Range<u64>) -> c_int) -> c_int {
    let _lock = LIMIT.lock();
    let limits = kernel::descriptor_limits();
    let (now, most) = limits;
    let numbers = numbers(limits);
    if now < numbers.end {
        kernel::limit_descriptors(most, most);
        let taken = take(numbers);
        let found = kernel::limit_descriptors(now, most);
        if found != (most, most) {
            kernel::limit_descriptors(found.0, found.1);
        }
        return taken;
    }
    take(numbers)
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
    let new = above_limit(|numbers| {
        // SAFETY: makes a descriptor.
        let new = unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, numbers.start as libc::c_ulong) };
        if new >= 0 && new as u64 >= numbers.end {
            // SAFETY: it is ours.
            unsafe { next::close(new) };
            return -1;
        }
        new
    });
    if new < 0 {
        return None;
    }
    table::put(new, Entry::HIDDEN);
    Some(new)
}

/// A hidden descriptor for the library's own code, as one that it has just made.
pub(crate) fn show(fd: c_int) -> OwnedFd {
    table::put(fd, Entry::NONE);
    // SAFETY: it is ours, and nobody has it any more.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn close(fd: c_int) {
    table::put(fd, Entry::NONE);
    // SAFETY: it is ours.
    unsafe { next::close(fd) };
}

/// A descriptor of the library's own, closed when it is dropped.
#[derive(Debug)]
pub(crate) struct Own(pub(crate) c_int);

impl Own {
    pub(crate) fn new(fd: OwnedFd) -> Option<Own> {
        hide(fd).map(Own)
    }
}

impl AsFd for Own {
    fn as_fd(&self) -> BorrowedFd<'_> {
        kernel::borrowed(self.0)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.0 >= 0 {
            close(self.0);
        }
    }
}

impl From<Own> for OwnedFd {
    fn from(own: Own) -> OwnedFd {
        show(std::mem::ManuallyDrop::new(own).0)
    }
}

impl Hidden for Own {
    fn hide(fd: OwnedFd) -> Option<Own> {
        Own::new(fd)
    }

    fn keep(fd: OwnedFd) {
        table::put(fd.into_raw_fd(), Entry::HIDDEN);
    }
}
