//! The library's record of each descriptor of the process.

use libc::c_int;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire},
};

/// Descriptors from here on stay what they are.
pub(crate) const MAX_FD: usize = 1 << 16;

static TABLE: [AtomicUsize; MAX_FD] = [const { AtomicUsize::new(0) }; MAX_FD];

/// No number above has ever had an entry.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// The low bits of an entry's word.
const MARKS: usize = 3;
const HIDDEN: usize = 1;
const SET: usize = 3;
/// In the word of a set: see [`be_exact`].
const EXACT: usize = 4;
const NUMBER_SHIFT: u32 = 3;

/// A kind of sockets that are followed. They stand in the table by their addresses.
///
/// # Safety
/// `MARK` is 0 or 2, and no other kind's. Values have addresses that are multiples of four.
pub(crate) unsafe trait Socket: Sync + 'static {
    const MARK: usize;
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(usize);

impl Entry {
    /// Not ours.
    pub(crate) const NONE: Entry = Entry(0);
    /// The library's own.
    pub(crate) const HIDDEN: Entry = Entry(HIDDEN);

    /// An epoll set: a number that no other set of the process has had; 0 for one that has two names.
    pub(crate) fn set(number: usize) -> Entry {
        Entry(number << NUMBER_SHIFT | SET)
    }

    pub(crate) fn socket<T: Socket>(socket: &'static T) -> Entry {
        Entry(std::ptr::from_ref(socket).expose_provenance() | T::MARK)
    }

    /// The number of an epoll set.
    #[inline]
    pub(crate) fn as_set(self) -> Option<usize> {
        (self.0 & MARKS == SET).then_some(self.0 >> NUMBER_SHIFT)
    }

    /// Returns true if it is the set of this number, and the kernel's view of it need not be exact.
    pub(crate) fn is_loose_set(self, number: usize) -> bool {
        self == Entry::set(number)
    }

    /// The socket, if it is one of this kind.
    #[inline]
    pub(crate) fn as_socket<T: Socket>(self) -> Option<&'static T> {
        if self == Entry::NONE || self.0 & MARKS != T::MARK {
            return None;
        }
        let at = std::ptr::with_exposed_provenance::<T>(self.0 & !MARKS);
        // SAFETY: only `socket` makes an entry with this mark, from a reference to a `T` that is never freed.
        Some(unsafe { &*at })
    }
}

#[inline]
pub(crate) fn get(fd: c_int) -> Entry {
    match TABLE.get(fd as usize) {
        Some(slot) => Entry(slot.load(Acquire)),
        None => Entry::NONE,
    }
}

/// Returns true if the program must not use a descriptor, and sets `errno` then.
pub(crate) fn refuses(fd: c_int) -> bool {
    let is_hidden = get(fd) == Entry::HIDDEN;
    if is_hidden {
        crate::set_errno(libc::EBADF);
    }
    is_hidden
}

/// Puts an entry. A number beyond the table has none.
pub(crate) fn put(fd: c_int, entry: Entry) {
    if let Some(slot) = TABLE.get(fd as usize) {
        HIGHEST.fetch_max(fd as usize, AcqRel);
        slot.swap(entry.0, AcqRel);
    }
}

/// Something waits for a set itself, or it has another descriptor: the kernel's view of it has to be exact for good. Returns the set's number if that is new.
pub(crate) fn be_exact(fd: c_int) -> Option<usize> {
    let slot = TABLE.get(fd as usize)?;
    let mut now = slot.load(Acquire);
    loop {
        let number = Entry(now).as_set()?;
        if now & EXACT != 0 {
            return None;
        }
        match slot.compare_exchange(now, now | EXACT, AcqRel, Acquire) {
            Ok(_) => return Some(number),
            Err(other) => now = other,
        }
    }
}

pub(crate) fn holds(fd: c_int) -> bool {
    (fd as usize) < MAX_FD
}

/// All descriptors in a range that have an entry.
pub(crate) fn each(first: usize, last: usize, mut f: impl FnMut(c_int, Entry)) {
    for fd in first..=last.min(HIGHEST.load(Acquire)) {
        match get(fd as c_int) {
            Entry::NONE => {}
            entry => f(fd as c_int, entry),
        }
    }
}

/// All descriptors that are sockets of this kind.
pub(crate) fn each_socket<T: Socket>(mut f: impl FnMut(c_int, &'static T)) {
    each(0, MAX_FD, |fd, entry| {
        if let Some(socket) = entry.as_socket() {
            f(fd, socket);
        }
    });
}
