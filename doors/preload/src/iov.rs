//! The memory vectors that programs pass to calls.

use libc::{c_int, c_void, iovec, size_t};
use weft_ring::checked;

/// The kernel transfers no more bytes in one call.
pub(crate) const MAX_RW: usize = 0x7fff_f000;

pub(crate) fn one(buf: *const c_void, n: size_t) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: n.min(MAX_RW),
    }]
}

/// Returns true for an address at which no program has memory.
#[inline]
fn is_outside<T>(address: *const T) -> bool {
    /// Nothing is mapped below (`vm.mmap_min_addr`).
    const FIRST: usize = 4096;
    /// The end of user space with the largest page tables.
    const END: usize = 1 << 56;
    !(FIRST..END).contains(&address.addr())
}

/// Returns true if there is no value to be read at the address: the kernel answers it with `EFAULT`.
#[inline]
pub(crate) fn is_bad<T>(address: *const T) -> bool {
    is_outside(address) || !checked::is_readable(address)
}

/// The same for `n` values.
#[inline]
pub(crate) fn is_bad_list<T>(list: *const T, n: usize) -> bool {
    // Those whose distance is less than a page, and the last: each page has one.
    let mut of_pages = (0..n)
        .step_by(4096 / size_of::<T>())
        .chain(n.checked_sub(1));
    of_pages.any(|at| is_bad(list.wrapping_add(at)))
}

/// Returns true for null, or an address that is not bad.
#[inline]
pub(crate) fn is_optional<T>(address: *const T) -> bool {
    address.is_null() || !is_bad(address)
}

/// The vector of a call, if the kernel would accept it.
pub(crate) unsafe fn vector<'a>(iov: *const iovec, n: usize) -> Option<&'a [iovec]> {
    if n == 0 {
        return Some(&[]);
    }
    if n > 1024 || is_bad_list(iov, n) {
        return None;
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(iov, n) };
    let is_length = |one: &iovec| isize::try_from(one.iov_len).is_ok();
    list.iter().all(is_length).then_some(list)
}

/// Bytes of the vector.
pub(crate) fn total(iov: &[iovec]) -> usize {
    iov.iter()
        .fold(0, |sum, one| sum.saturating_add(one.iov_len))
}

/// The vector without its first bytes.
pub(crate) fn cut(iov: &[iovec], mut skip: usize) -> Vec<iovec> {
    let mut out = Vec::with_capacity(iov.len());
    for one in iov {
        if skip >= one.iov_len {
            skip -= one.iov_len;
            continue;
        }
        out.push(iovec {
            iov_base: one.iov_base.wrapping_byte_add(skip),
            iov_len: one.iov_len - skip,
        });
        skip = 0;
    }
    out
}

/// Calls `f(address, length, bytes before it)` for the pieces of the vector between `from` and `from + n`, up to the first for which it returns less than
/// the length. Returns the sum.
#[inline]
pub(crate) fn each_piece(
    iov: &[iovec],
    from: usize,
    n: usize,
    mut f: impl FnMut(*mut u8, usize, usize) -> usize,
) -> usize {
    let (mut skip, mut left, mut done) = (from, n, 0);
    for one in iov {
        if left == 0 {
            break;
        }
        if skip >= one.iov_len {
            skip -= one.iov_len;
            continue;
        }
        let now = left.min(one.iov_len - skip);
        let moved = f(one.iov_base.cast::<u8>().wrapping_add(skip), now, done);
        done += moved;
        if moved < now {
            break;
        }
        skip = 0;
        left -= now;
    }
    done
}

/// As [`each_piece`], for an `f` that copies: the program's memory may not be there.
#[inline]
pub(crate) fn copy_pieces(
    iov: &[iovec],
    from: usize,
    n: usize,
    mut f: impl FnMut(*mut u8, usize, usize) -> usize,
) -> usize {
    each_piece(iov, from, n, |at, len, done| {
        if is_outside(at) { 0 } else { f(at, len, done) }
    })
}

/// Source of the bytes.
pub(crate) enum Source<'a> {
    /// The program's memory.
    Memory(&'a [iovec]),
    /// Bytes of a file, from an offset or from its current position.
    File {
        fd: c_int,
        offset: Option<i64>,
        len: usize,
    },
}

impl Source<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Source::Memory(iov) => total(iov),
            Source::File { len, .. } => *len,
        }
    }
}
