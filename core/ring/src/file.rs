//! The memory file of a segment: a control page that begins with a header, and a ring for each direction.
//!
//! # Safety
//!
//! A file cannot shrink, so that its mapping stays whole. Words are reached through `&AtomicU64` only.

use crate::OpenError;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use weft_sys::memfd::{self, Mapping};

/// Bytes of the control page.
pub(crate) const CONTROL: usize = 4096;
const MIN_RING: u32 = 16 << 10;
const MAX_RING: u32 = 16 << 20;

pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) magic: u64,
    pub(crate) version: u32,
}

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) map: Mapping,
    /// Bytes of one ring, a power of two.
    pub(crate) capacity: usize,
}

fn ring_size_ok(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_RING..=MAX_RING).contains(&bytes)
}

pub(crate) fn file_len(ring_bytes: u32) -> u64 {
    CONTROL as u64 + 2 * u64::from(ring_bytes)
}

impl File {
    /// A new file, and its descriptor for the peer. Pages take memory when they are first used.
    ///
    /// # Errors
    /// `InvalidInput` for a ring size that is no power of two in 16 KiB..=16 MiB; those of [`memfd::create`] and [`Mapping::new`].
    pub(crate) fn create(kind: &Kind, ring_bytes: u32) -> io::Result<(File, OwnedFd)> {
        if !ring_size_ok(ring_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = file_len(ring_bytes);
        let fd = memfd::create(kind.name, len)?;
        let file = File {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: ring_bytes as usize,
        };
        file.at(0).store(kind.magic, Relaxed);
        let shape = u64::from(kind.version) | u64::from(ring_bytes) << 32;
        file.at(8).store(shape, Relaxed);
        Ok((file, fd))
    }

    /// The peer's. Its seals, length, magic number, version and ring size are checked, each read once.
    pub(crate) fn open(kind: &Kind, fd: impl AsFd) -> Result<File, OpenError> {
        let len = memfd::check_sealed(&fd)?;
        if !(file_len(MIN_RING)..=file_len(MAX_RING)).contains(&len) {
            return Err(OpenError::Size(len));
        }
        let mut file = File {
            map: Mapping::new(&fd, 0, len as usize, true)?,
            capacity: MIN_RING as usize,
        };
        if file.at(0).load(Relaxed) != kind.magic {
            return Err(OpenError::Magic);
        }
        let shape = file.at(8).load(Relaxed);
        let (version, ring_bytes) = (shape as u32, (shape >> 32) as u32);
        if version != kind.version {
            return Err(OpenError::Version(version));
        }
        if !ring_size_ok(ring_bytes) {
            return Err(OpenError::Ring(ring_bytes));
        }
        if len != file_len(ring_bytes) {
            return Err(OpenError::Size(len));
        }
        file.capacity = ring_bytes as usize;
        Ok(file)
    }

    /// A word of the file.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < self.map.len());
        // SAFETY: the callers keep the offset inside the mapping and a multiple of 8; the mapping lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(offset).cast()) }
    }
}
