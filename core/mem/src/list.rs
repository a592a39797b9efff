//! Lists of ranges for one send or receive.
//!
//! # Safety
//!
//! Each entry was made from a borrow that the list's lifetime keeps: a slice, or a span (which keeps its region). So every range is mapped
//! while the list exists; a `&mut [u8]` stays exclusively ours, and the rest of the memory is touched by system calls and racing copies
//! only. The raw pointers make the lists neither `Send` nor `Sync`, which is not needed.

use crate::{ExportAddr, KeySpan, Span, copy};
use libc::iovec;
use smallvec::SmallVec;
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

/// Entries kept without allocating.
const INLINE: usize = 64;

/// From so many bytes on a socket gets the pages of memory that does not change. A copy of less costs less than a system call more.
const BY_PAGES: usize = 16 << 10;

/// The data of one sending system call: plain bytes and spans, in order.
#[derive(Default)]
pub struct SendList<'a> {
    iov: SmallVec<[iovec; INLINE]>,
    /// The owner of each entry's bytes.
    origins: SmallVec<[Origin<'a>; INLINE]>,
    bytes: usize,
    /// There are entries that go by pages.
    by_pages: bool,
    /// There are entries of implicit regions.
    implicit: bool,
    _borrow: PhantomData<&'a [u8]>,
}

#[derive(Clone, Copy)]
enum Origin<'a> {
    Plain,
    /// Registered memory, which is not to be read by a plain copy.
    Span(&'a Span),
    Key,
}

/// One entry of a [`SendList`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its place for a peer of this host; `None` for plain bytes and those of implicit regions, which may be unmapped before a peer reads
    /// them.
    pub place: Option<ExportAddr>,
    /// Bytes.
    pub len: usize,
}

impl<'a> SendList<'a> {
    /// An empty list; 64 entries need no allocation.
    #[inline]
    pub fn new() -> Self {
        SendList {
            iov: SmallVec::new(),
            origins: SmallVec::new(),
            bytes: 0,
            by_pages: false,
            implicit: false,
            _borrow: PhantomData,
        }
    }

    /// An empty list with room for `n` entries.
    pub fn with_capacity(n: usize) -> Self {
        SendList {
            iov: SmallVec::with_capacity(n),
            origins: SmallVec::with_capacity(n),
            bytes: 0,
            by_pages: false,
            implicit: false,
            _borrow: PhantomData,
        }
    }

    #[inline]
    fn push(&mut self, base: *const u8, len: usize, origin: Origin<'a>) {
        if len != 0 {
            self.bytes += len;
            self.origins.push(origin);
            self.iov.push(iovec {
                iov_base: base.cast_mut().cast(),
                iov_len: len,
            });
        }
    }

    /// Appends plain bytes.
    #[inline]
    pub fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr(), bytes.len(), Origin::Plain);
    }

    /// Appends `len` bytes of a span from `off`; panics when they are not inside it.
    #[inline]
    pub fn push_span(&mut self, span: &'a Span, off: usize, len: usize) {
        self.by_pages |= len >= BY_PAGES && span.frozen_file().is_some();
        self.implicit |= span.is_implicit();
        self.push(span.range(off, len), len, Origin::Span(span));
    }

    /// Appends a range of a hold, which is no [`ExportAddr`] for peers.
    #[inline]
    pub fn push_key(&mut self, span: &'a KeySpan<'a>) {
        self.implicit |= span.is_implicit();
        self.push(span.start(), span.len(), Origin::Key);
    }

    /// Bytes in the list.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Entries in the list (empty ranges are not kept). One system call takes 1,024.
    #[inline]
    pub fn iovs(&self) -> usize {
        self.iov.len()
    }

    /// The entries in order, and where they are for a peer of this host.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.iov.iter().zip(&self.origins).map(|(v, origin)| Piece {
            place: match origin {
                Origin::Span(span) if !span.is_implicit() => Some(span.place_of(v.iov_base.cast())),
                Origin::Span(_) | Origin::Plain | Origin::Key => None,
            },
            len: v.iov_len,
        })
    }

    fn is_registered(&self, entry: usize) -> bool {
        !matches!(self.origins[entry], Origin::Plain)
    }

    /// The memory of `n` bytes from byte `skip` on, or of what there is of them.
    pub(crate) fn ranges(&self, skip: usize, n: usize) -> impl Iterator<Item = iovec> {
        ranges(&self.iov, skip, n)
    }

    /// Sends on a stream socket without blocking; `more` says that more follows at once. Returns
    /// the bytes the socket took.
    ///
    /// # Errors
    /// Those of [`weft_sys::send_raw`]: `WouldBlock`, `BrokenPipe`, `ConnectionReset`...
    #[inline]
    pub fn send(&self, fd: BorrowedFd<'_>, more: bool) -> io::Result<usize> {
        if self.by_pages {
            return self.send_by_pages(fd, more);
        }
        // SAFETY: every entry's borrow is held by `'a`.
        unsafe { weft_sys::send_raw(fd, &self.iov, more) }
    }

    /// The same: frozen bytes are sent from their file, without a copy, and the bytes between by one call each.
    fn send_by_pages(&self, fd: BorrowedFd<'_>, more: bool) -> io::Result<usize> {
        let (mut sent, mut from) = (0, 0);
        // Bytes sent so far count; an error occurs again at the next call.
        let took = |sent: usize, now: io::Result<usize>| match now {
            Ok(n) => Ok(n),
            Err(_) if sent > 0 => Ok(0),
            Err(e) => Err(e),
        };
        for (at, v) in self.iov.iter().enumerate() {
            let Origin::Span(span) = self.origins[at] else {
                continue;
            };
            let Some(file) = span.frozen_file().filter(|_| v.iov_len >= BY_PAGES) else {
                continue;
            };
            let before = &self.iov[from..at];
            if !before.is_empty() {
                // SAFETY: every entry's borrow is held by `'a`.
                let now = took(sent, unsafe { weft_sys::send_raw(fd, before, true) })?;
                sent += now;
                if now < before.iter().map(|v| v.iov_len).sum() {
                    return Ok(sent);
                }
            }
            let place = span.place_of(v.iov_base.cast());
            let now = took(sent, weft_sys::send_file(fd, file, place.addr, v.iov_len))?;
            sent += now;
            if now < v.iov_len {
                return Ok(sent);
            }
            from = at + 1;
        }
        let rest = &self.iov[from..];
        if !rest.is_empty() {
            // SAFETY: as above.
            sent += took(sent, unsafe { weft_sys::send_raw(fd, rest, more) })?;
        }
        Ok(sent)
    }

    /// Appends the first `max` bytes of the list to `out`; returns how many there were.
    pub fn copy_to(&self, out: &mut Vec<u8>, max: usize) -> usize {
        self.copy_range(0, out, max)
    }

    /// Appends up to `max` bytes of the list, from its byte `skip` on, to `out`; returns how many there were.
    pub fn copy_range(&self, skip: usize, out: &mut Vec<u8>, max: usize) -> usize {
        let start = out.len();
        let total = max.min(self.bytes.saturating_sub(skip));
        out.reserve(total);
        // SAFETY: the entries' borrows are held by `'a`; `reserve` made room for all.
        unsafe {
            let to = out.as_mut_ptr().add(start);
            let copied = for_range(&self.iov, skip, total, |i, from, done, now| {
                let to = to.add(done);
                if self.is_registered(i) {
                    copy::from(self.implicit, to, from, now, copy::load);
                } else {
                    to.copy_from_nonoverlapping(from, now);
                }
            });
            out.set_len(start + copied);
            copied
        }
    }

    /// Copies `n` bytes of the list, from its byte `skip` on, to `to`; fewer when the list ends before.
    /// Returns the bytes copied. Spans may change meanwhile, and so may the bytes at `to`.
    ///
    /// # Safety
    /// `to..to + n` must be mapped, writable, and not be accessed through plain references.
    #[inline]
    pub unsafe fn copy_range_to(&self, skip: usize, to: *mut u8, n: usize) -> usize {
        // SAFETY: the entries' borrows are held by `'a`; the rest is the caller's promise.
        unsafe {
            for_range(&self.iov, skip, n, |i, from, done, now| {
                let to = to.add(done);
                if self.is_registered(i) {
                    copy::from(self.implicit, to, from, now, copy::relay);
                } else {
                    copy::store(to, from, now);
                }
            })
        }
    }
}

/// The parts of `n` bytes from byte `skip` on.
fn ranges(iov: &[iovec], mut skip: usize, mut n: usize) -> impl Iterator<Item = iovec> {
    iov.iter().filter_map(move |v| {
        let skipped = skip.min(v.iov_len);
        skip -= skipped;
        let len = (v.iov_len - skipped).min(n);
        n -= len;
        (len != 0).then(|| iovec {
            iov_base: v.iov_base.wrapping_byte_add(skipped),
            iov_len: len,
        })
    })
}

/// Calls `f(entry, its address, bytes done before, bytes)` for each part of `n` bytes from byte `skip`
/// on; returns how many bytes there were.
#[inline]
fn for_range(
    iov: &[iovec],
    mut skip: usize,
    n: usize,
    mut f: impl FnMut(usize, *mut u8, usize, usize),
) -> usize {
    let mut done = 0;
    for (i, v) in iov.iter().enumerate() {
        if skip >= v.iov_len {
            skip -= v.iov_len;
            continue;
        }
        let now = (v.iov_len - skip).min(n - done);
        if now == 0 {
            break;
        }
        f(i, v.iov_base.cast::<u8>().wrapping_add(skip), done, now);
        done += now;
        skip = 0;
    }
    done
}

/// The destination of one receiving system call: plain buffers and spans, in order.
#[derive(Default)]
pub struct RecvList<'a> {
    iov: SmallVec<[iovec; INLINE]>,
    bytes: usize,
    /// There are entries of implicit regions.
    implicit: bool,
    _borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> RecvList<'a> {
    /// An empty list; 64 entries need no allocation.
    #[inline]
    pub fn new() -> Self {
        RecvList {
            iov: SmallVec::new(),
            bytes: 0,
            implicit: false,
            _borrow: PhantomData,
        }
    }

    #[inline]
    fn push(&mut self, base: *mut u8, len: usize) {
        if len != 0 {
            self.bytes += len;
            self.iov.push(iovec {
                iov_base: base.cast(),
                iov_len: len,
            });
        }
    }

    /// Appends a plain buffer.
    #[inline]
    pub fn push_buf(&mut self, buf: &'a mut [u8]) {
        self.push(buf.as_mut_ptr(), buf.len());
    }

    /// Appends `len` bytes of a span from `off`; panics when they are not inside it.
    #[inline]
    pub fn push_span(&mut self, span: &'a Span, off: usize, len: usize) {
        self.implicit |= span.is_implicit();
        self.push(span.range(off, len), len);
    }

    /// Appends a range of a hold.
    #[inline]
    pub fn push_key(&mut self, span: &'a KeySpan<'a>) {
        self.implicit |= span.is_implicit();
        self.push(span.start(), span.len());
    }

    /// Room in the list, in bytes.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The memory of `n` bytes from byte `skip` on, or of what there is of them.
    pub(crate) fn ranges(&mut self, skip: usize, n: usize) -> impl Iterator<Item = iovec> {
        ranges(&self.iov, skip, n)
    }

    /// Receives from a stream socket without blocking; returns the bytes received, 0 at the end of
    /// the stream (or when the list has no room).
    ///
    /// # Errors
    /// Those of [`weft_sys::recv_raw`]: `WouldBlock`, `ConnectionReset`...
    #[inline]
    pub fn recv(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: every entry's borrow is held by `'a`, exclusively or as a span.
        unsafe { weft_sys::recv_raw(fd, &self.iov) }
    }

    /// Fills the list from `src`, from the list's start; returns the bytes that fitted.
    pub fn fill_from(&mut self, src: &[u8]) -> usize {
        self.fill_at(0, src)
    }

    /// Fills the list from `src`, from the list's byte `skip` on; returns the bytes that fitted.
    pub fn fill_at(&mut self, skip: usize, src: &[u8]) -> usize {
        let implicit = self.implicit;
        // SAFETY: the entries' borrows are held by `'a`.
        unsafe {
            for_range(&self.iov, skip, src.len(), |_, to, done, now| {
                copy::to(implicit, to, src[done..].as_ptr(), now, copy::store);
            })
        }
    }

    /// Copies `n` bytes at `from` into the list from its byte `skip` on; fewer when the list ends before.
    /// Returns the bytes copied. Both sides may change meanwhile.
    ///
    /// # Safety
    /// `from..from + n` must be mapped, and not be written through plain references.
    #[inline]
    pub unsafe fn fill_range_from(&mut self, skip: usize, from: *const u8, n: usize) -> usize {
        let implicit = self.implicit;
        // SAFETY: the entries' borrows are held by `'a`; the rest is the caller's promise.
        unsafe {
            for_range(&self.iov, skip, n, |_, to, done, now| {
                copy::to(implicit, to, from.add(done), now, copy::relay);
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Backing, PdId, Table};

    /// Every range of a list of plain and registered pieces, copied out and in by raw address.
    #[test]
    fn ranges_by_address() {
        let table = Table::new(1);
        let region = table
            .register(
                PdId(1),
                Backing::Owned((5..12).collect()),
                0,
                Access::LOCAL_WRITE,
            )
            .unwrap();
        let span = table
            .local(PdId(1), region.stag(), 0, 7, Access::LOCAL_WRITE)
            .unwrap();
        let mut send = SendList::new();
        send.push_bytes(&[0, 1, 2, 3, 4]);
        send.push_span(&span, 0, 7);
        send.push_bytes(&[12, 13, 14]);
        for skip in 0..17 {
            for n in 0..17 {
                let mut out = [99; 20];
                // SAFETY: a buffer of our own, longer than `n`.
                let copied = unsafe { send.copy_range_to(skip, out.as_mut_ptr(), n) };
                assert_eq!(copied, n.min(15_usize.saturating_sub(skip)));
                assert!((0..copied).all(|i| usize::from(out[i]) == skip + i));
                assert!(out[copied..].iter().all(|&b| b == 99));
                let mut appended = vec![99];
                assert_eq!(send.copy_range(skip, &mut appended, n), copied);
                assert_eq!(appended[1..], out[..copied]);
            }
        }

        let from: Vec<u8> = (100..120).collect();
        for skip in 0..12 {
            for n in 0..12 {
                span.copy_in(0, &[7; 7]);
                let mut buffer = [7; 3];
                let mut recv = RecvList::new();
                recv.push_buf(&mut buffer);
                recv.push_span(&span, 1, 6);
                // SAFETY: a buffer of our own, longer than `n`.
                let copied = unsafe { recv.fill_range_from(skip, from.as_ptr(), n) };
                assert_eq!(copied, n.min(9_usize.saturating_sub(skip)));
                assert_eq!(recv.fill_at(skip, &from[..n]), copied);
                let mut got = buffer.to_vec();
                span.extend(0, 7, &mut got);
                assert_eq!(got.remove(3), 7, "the byte before the span's part");
                let mut want = vec![7; 9];
                let end = skip + copied;
                want.splice(skip.min(9)..end.min(9), from[..copied].iter().copied());
                assert_eq!(got, want);
            }
        }
    }
}
