//! Files of memory that two processes share (`memfd_create(2)`), and their mappings.
//!
//! A mapped file that its other owner shortens kills the reader with `SIGBUS`. So a file that came from
//! a peer is mapped only after [`check`] has seen that it can never shrink.

use rustix::fs::{
    MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// A new file of `len` zero bytes whose size is sealed for good (`F_SEAL_SHRINK`, `F_SEAL_GROW`,
/// `F_SEAL_SEAL`), closed on exec, mode 0600. `name` is for `/proc` only.
///
/// # Errors
/// `ENOSYS` without memfds, `EFBIG` above `RLIMIT_FSIZE`, `EMFILE`, `ENOMEM`, `EINVAL` for a name that
/// is too long or has a zero byte.
pub fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&fd, len)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// The length of a peer's memory file, which can be mapped that far without fear of `SIGBUS`.
///
/// # Errors
/// `InvalidData` unless it is a file of memory with `F_SEAL_SHRINK`.
pub fn check(fd: impl AsFd) -> io::Result<u64> {
    let seals = fcntl_get_seals(&fd).map_err(|_| bad("not a file of memory"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(bad("its size is not sealed"));
    }
    u64::try_from(fstat(&fd)?.st_size).map_err(|_| bad("a negative size"))
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A shared mapping (`MAP_SHARED`) of part of a file, unmapped on drop.
///
/// Whoever else has the file may change the bytes at any time: they are to be reached through atomics
/// and racing copies only.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address range that belongs to the process; using the bytes is `unsafe` anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method touches the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of the file from `offset` (a multiple of the page size), for reading and, if
    /// `writable`, writing. Bytes past the end of the file cannot be touched (`SIGBUS`): see [`check`].
    ///
    /// # Errors
    /// `EINVAL` for a length of 0 or a misaligned offset, `EACCES` or `EPERM` when the descriptor or a
    /// seal forbids writing, `ENOMEM`.
    pub fn new(fd: impl AsFd, offset: u64, len: usize, writable: bool) -> io::Result<Mapping> {
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                &fd,
                offset,
            )
        }?;
        let ptr = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { ptr, len })
    }

    /// Its first byte; `len` bytes from there stay mapped while `self` lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes mapped; never 0.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody may use the bytes after `self`.
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
