//! The memory of a program that bytes are sent from and received into, in pieces.

use weft_verbs::{MemError, Mr, RawMemory};

/// A piece to send from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// Bytes of a Rust program.
    Bytes(&'a [u8]),
    /// Memory that its owner keeps valid for the time of the call.
    Raw(&'a RawMemory),
}

/// A piece to receive into.
pub enum Sink<'a> {
    /// Bytes of a Rust program.
    Bytes(&'a mut [u8]),
    /// Memory that its owner keeps valid for the time of the call.
    Raw(&'a RawMemory),
}

impl Source<'_> {
    /// Bytes in it.
    fn len(&self) -> usize {
        match self {
            Source::Bytes(bytes) => bytes.len(),
            Source::Raw(raw) => raw.len(),
        }
    }
}

impl Sink<'_> {
    /// Its address and length.
    pub fn place(&self) -> (*const u8, usize) {
        match self {
            Sink::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
            Sink::Raw(raw) => (raw.as_ptr(), raw.len()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Sink::Bytes(bytes) => bytes.len(),
            Sink::Raw(raw) => raw.len(),
        }
    }
}

/// Bytes in all.
pub fn total(from: &[Source<'_>]) -> usize {
    from.iter()
        .fold(0, |sum: usize, piece| sum.saturating_add(piece.len()))
}

/// Bytes in all.
pub fn room(to: &[Sink<'_>]) -> usize {
    to.iter()
        .fold(0, |sum: usize, piece| sum.saturating_add(piece.len()))
}

/// Copy `len` bytes, from `skip` on, to `at` in a region.
///
/// # Errors
/// As those of the region's and the memory's copies: `Bounds`.
pub fn gather(
    from: &[Source<'_>],
    mut skip: usize,
    mut len: usize,
    to: &Mr,
    mut at: usize,
) -> Result<(), MemError> {
    for piece in from {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let n = len.min(piece.len() - skip);
        match piece {
            Source::Bytes(bytes) => to.write(at, &bytes[skip..skip + n])?,
            Source::Raw(raw) => to.copy_from_raw(at, &raw.slice(skip, n)?)?,
        }
        (at, len, skip) = (at + n, len - n, 0);
        if len == 0 {
            break;
        }
    }
    Ok(())
}

/// Copy as many bytes as `out` has room for, from `skip` on.
///
/// # Errors
/// As [`gather`].
pub fn take(from: &[Source<'_>], mut skip: usize, out: &mut [u8]) -> Result<(), MemError> {
    let mut done = 0;
    for piece in from {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let n = (out.len() - done).min(piece.len() - skip);
        let part = &mut out[done..done + n];
        match piece {
            Source::Bytes(bytes) => part.copy_from_slice(&bytes[skip..skip + n]),
            Source::Raw(raw) => raw.read(skip, part)?,
        }
        (done, skip) = (done + n, 0);
        if done == out.len() {
            break;
        }
    }
    Ok(())
}

/// Copy `len` bytes at `at` in a region to the pieces, from `skip` on.
///
/// # Errors
/// As [`gather`].
pub fn scatter(
    from: &Mr,
    mut at: usize,
    mut len: usize,
    to: &mut [Sink<'_>],
    mut skip: usize,
) -> Result<(), MemError> {
    for piece in to {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let n = len.min(piece.len() - skip);
        match piece {
            Sink::Bytes(bytes) => from.read(at, &mut bytes[skip..skip + n])?,
            Sink::Raw(raw) => from.copy_to_raw(at, &raw.slice(skip, n)?)?,
        }
        (at, len, skip) = (at + n, len - n, 0);
        if len == 0 {
            break;
        }
    }
    Ok(())
}
