//! Memory of another owner, under a promise.
//!
//! # Safety
//!
//! [`RawMemory::new`] is where the promise is made ([`RawMemory::leak`] keeps it itself); everything else keeps to the range that was promised, and moves bytes by
//! the racing copies only.

use crate::{MemError, copy};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// A range of memory whose owner has promised that it stays usable, see [`RawMemory::new`]. Safe code can pass it on, divide it and copy
/// it; a clone refers to the same bytes.
#[derive(Clone)]
pub struct RawMemory {
    ptr: NonNull<u8>,
    len: usize,
    /// It is all that the process has or will have: [`RawMemory::everything`].
    pub(crate) implicit: bool,
}

// SAFETY: the bytes are reached by racing copies and system calls only, from any thread.
unsafe impl Send for RawMemory {}
// SAFETY: as above.
unsafe impl Sync for RawMemory {}

impl RawMemory {
    /// `None` for a null pointer with a length.
    ///
    /// # Safety
    /// Until every clone is dropped, and every region made of it is deregistered, `ptr..ptr + len` must stay mapped and readable (and
    /// writable, if it is received into), and must not be accessed through plain Rust references or non-atomic Rust accesses that may race
    /// with the library's accesses. A caller that gives it to a connection that protects memory ([`crate::protect::guard`]) has to call
    /// [`crate::protect::settle`] before the memory is unmapped or its protection is changed.
    pub unsafe fn new(ptr: *mut u8, len: usize) -> Option<RawMemory> {
        let ptr = match NonNull::new(ptr) {
            Some(ptr) => ptr,
            None if len == 0 => NonNull::dangling(),
            None => return None,
        };
        ptr.addr().get().checked_add(len)?;
        Some(RawMemory {
            ptr,
            len,
            implicit: false,
        })
    }

    /// All memory that the process has or will have, by its addresses: the memory of an implicit region. Using unmapped memory is an error of
    /// that use. It can only be registered. `None` if the kernel does not have the required calls (Linux 5.14), or a filter forbids them.
    ///
    /// # Safety
    /// As [`RawMemory::new`], for the memory that users of the region name; but it need not be mapped.
    pub unsafe fn everything() -> Option<RawMemory> {
        /// Nothing is mapped before, and nothing of a program behind.
        const FIRST: usize = 0x1000;
        static POSSIBLE: OnceLock<bool> = OnceLock::new();
        let ptr = NonNull::new(std::ptr::without_provenance_mut(FIRST))?;
        POSSIBLE.get_or_init(copy::is_careful).then_some(RawMemory {
            ptr,
            len: isize::MAX as usize - FIRST,
            implicit: true,
        })
    }

    /// The bytes of a buffer that is never freed: for memory that is to stay as long as the process.
    pub fn leak(buffer: Vec<u8>) -> RawMemory {
        let bytes = buffer.leak();
        RawMemory {
            len: bytes.len(),
            ptr: NonNull::from(bytes).cast(),
            implicit: false,
        }
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` bytes from `off` on.
    ///
    /// # Errors
    /// [`MemError::Bounds`], for this and the copies.
    pub fn slice(&self, off: usize, len: usize) -> Result<RawMemory, MemError> {
        Ok(RawMemory {
            ptr: self.range(off, len)?,
            len,
            implicit: false,
        })
    }

    fn range(&self, off: usize, len: usize) -> Result<NonNull<u8>, MemError> {
        if self.implicit || off > self.len || len > self.len - off {
            return Err(MemError::Bounds);
        }
        // SAFETY: inside the promised range, or one past its end.
        Ok(unsafe { self.ptr.add(off) })
    }

    /// Copies `src` to `off`.
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError> {
        let p = self.range(off, src.len())?;
        // SAFETY: a checked range of memory that was promised.
        unsafe { copy::store(p.as_ptr(), src.as_ptr(), src.len()) };
        Ok(())
    }

    /// Copies the bytes at `off` out.
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), MemError> {
        let p = self.range(off, dst.len())?;
        // SAFETY: as in `write`.
        unsafe { copy::load(dst.as_mut_ptr(), p.as_ptr(), dst.len()) };
        Ok(())
    }

    /// Sends up to `len` bytes at `off` on a stream socket, as [`crate::Region::send_to_socket`] does.
    ///
    /// # Errors
    /// As there.
    pub fn send_to_socket(
        &self,
        fd: BorrowedFd<'_>,
        off: usize,
        len: usize,
        more: bool,
    ) -> io::Result<usize> {
        let p = self.range(off, len).map_err(invalid)?;
        // SAFETY: a checked range of memory that was promised, with no reference to it.
        unsafe { weft_sys::send_raw(fd, &[iovec(p, len)], more) }
    }

    /// Receives up to `len` bytes from a stream socket to `off`, as [`crate::Region::recv_from_socket`] does.
    ///
    /// # Errors
    /// As there.
    pub fn recv_from_socket(
        &self,
        fd: BorrowedFd<'_>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        let p = self.range(off, len).map_err(invalid)?;
        // SAFETY: as in `send_to_socket`.
        unsafe { weft_sys::recv_raw(fd, &[iovec(p, len)]) }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        assert!(!self.implicit, "not of everything");
        let mut out = vec![0; self.len];
        // SAFETY: as in `write`.
        unsafe { copy::load(out.as_mut_ptr(), self.ptr.as_ptr(), self.len) };
        out
    }
}

impl std::fmt::Debug for RawMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RawMemory({:p}+{})", self.ptr, self.len)
    }
}

pub(crate) fn invalid(e: MemError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, e)
}

pub(crate) fn iovec(ptr: NonNull<u8>, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: ptr.as_ptr().cast(),
        iov_len: len,
    }
}
