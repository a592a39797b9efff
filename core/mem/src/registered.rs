//! The memory of regions: whose it is, and how it comes back.
//!
//! # Safety
//!
//! A `Registered` owns its bytes through a raw pointer. The table and every [`crate::Span`] hold it by `Arc`, so the bytes live as long as
//! they can be reached. The last holder releases them: to the owner if it waits, else to the system. `Storage::Raw`, and parts of it,
//! belong to another owner, so dropping such a region waits for the spans.

use crate::domain::{Lent, Memory};
use crate::{Access, ExportAddr, MemError, PdId, RawMemory, copy};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use weft_sys::memfd::Mapping;

/// Set in `Registered::windows` once no more windows may be bound.
const CLOSED: u32 = 1 << 31;

/// The source of a region's bytes.
#[derive(Debug)]
pub enum Backing {
    /// A buffer given up by its owner; [`crate::Region::deregister`] gives it back.
    Owned(Vec<u8>),
    /// So many bytes of new zeroed memory, on pages of its own; pages take memory when touched.
    Anonymous(usize),
    /// New zeroed memory of this length that peers of this host can map, if their connection is a local one and the access rights allow it:
    /// in the protection domain's arena of memory that peers may write (`REMOTE_WRITE`, `REMOTE_ATOMIC`), may read (`REMOTE_READ`), or may
    /// not reach. *Every* such peer of the domain can reach all regions of its kind there, independent of its windows. The same as
    /// `Anonymous` if memory files cannot be created.
    ///
    /// A child of `fork` shares these bytes with its parent instead of getting a copy: both see each other's writes.
    Shared(usize),
    /// A mapping of a memory file, which must be one that never shrinks ([`weft_sys::memfd::check`]). Peers of this host reach it in this process.
    File(Mapping),
}

impl Backing {
    /// The first `len` bytes of a memory file that never shrinks, for reading only unless `writable`. The inner error: it is not so long, or `len` is 0.
    ///
    /// # Errors
    /// It is no such file, or cannot be mapped; with what was tried.
    pub fn memory_file(
        file: impl AsFd,
        len: usize,
        writable: bool,
    ) -> Result<Result<Self, MemError>, (&'static str, io::Error)> {
        let held = weft_sys::memfd::check(&file).map_err(|e| ("a memory file", e))?;
        if len == 0 || held < len as u64 {
            return Ok(Err(MemError::Bounds));
        }
        let mapping = Mapping::new(&file, 0, len, writable);
        let mapping = mapping.map_err(|e| ("mapping a memory file", e))?;
        Ok(Ok(Self::File(mapping)))
    }
}

enum Storage {
    Heap {
        capacity: usize,
    },
    Map,
    /// Part of an arena.
    Lent(Box<Lent>),
    /// A mapped file; the mapping is dropped with it.
    File(#[allow(dead_code)] Mapping),
    /// Memory of another owner.
    Raw,
    /// The memory that the process has mapped at that address when it is used.
    Implicit,
    /// A range of another registration, from this offset on: it keeps that one's memory.
    Part(Arc<Registered>, usize),
    Nothing,
}

/// A region as the table and the spans see it.
pub(crate) struct Registered {
    ptr: NonNull<u8>,
    len: usize,
    pub(crate) iova: u64,
    pub(crate) stag: u32,
    pub(crate) pd: PdId,
    pub(crate) access: Access,
    /// Windows bound, and `CLOSED`.
    windows: AtomicU32,
    locked: AtomicBool,
    /// Its bytes are frozen.
    frozen: AtomicBool,
    /// Addresses of it may have no memory: it is reached by the kernel's copies alone.
    pub(crate) implicit: bool,
    storage: Storage,
}

// SAFETY: the bytes are reached by racing copies, atomics and system calls only, from any thread;
// everything else in it is Send and Sync.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    pub(crate) fn new(
        pd: PdId,
        backing: Backing,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        let (ptr, len, storage) = match backing {
            Backing::Owned(v) => {
                let mut v = ManuallyDrop::new(v);
                let capacity = v.capacity();
                // SAFETY: a Vec's pointer is never null.
                let ptr = unsafe { NonNull::new_unchecked(v.as_mut_ptr()) };
                weft_sys::map::prefer_huge_pages(ptr, v.len());
                (ptr, v.len(), Storage::Heap { capacity })
            }
            Backing::Anonymous(0) | Backing::Shared(0) => {
                (NonNull::dangling(), 0, Storage::Nothing)
            }
            // Those that could be lent are made by `from_lent`.
            Backing::Anonymous(len) | Backing::Shared(len) => {
                let ptr = weft_sys::map::map_anonymous(len).map_err(|_| MemError::NoMemory)?;
                weft_sys::map::prefer_huge_pages(ptr, len);
                (ptr, len, Storage::Map)
            }
            Backing::File(mapping) => {
                let ptr = NonNull::new(mapping.as_ptr()).ok_or(MemError::BadArgument)?;
                (ptr, mapping.len(), Storage::File(mapping))
            }
        };
        Registered::build(pd, ptr, len, storage, iova, access)
    }

    /// Of memory that was promised.
    pub(crate) fn from_promised(
        pd: PdId,
        memory: &RawMemory,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        let (ptr, len) = (memory.as_ptr(), memory.len());
        if !memory.implicit {
            return Registered::from_raw(pd, ptr, len, iova, access);
        }
        let ptr = NonNull::new(ptr).ok_or(MemError::BadArgument)?;
        Registered::build(pd, ptr, len, Storage::Implicit, iova, access)
    }

    pub(crate) fn from_raw(
        pd: PdId,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        let ptr = match NonNull::new(ptr) {
            Some(p) => p,
            None if len == 0 => NonNull::dangling(),
            None => return Err(MemError::BadArgument),
        };
        weft_sys::map::prefer_huge_pages(ptr, len);
        Registered::build(pd, ptr, len, Storage::Raw, iova, access)
    }

    /// `len` bytes from `off` of what another one has, under rights of its own.
    pub(crate) fn from_part(
        whole: &Arc<Registered>,
        off: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        if off > whole.len || len > whole.len - off {
            return Err(MemError::Bounds);
        }
        let storage = Storage::Part(Arc::clone(whole), off);
        Registered::build(whole.pd, whole.at(off), len, storage, iova, access)
    }

    /// `len` bytes of an arena.
    pub(crate) fn from_lent(
        pd: PdId,
        lent: Lent,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        let ptr = NonNull::new(lent.as_ptr()).ok_or(MemError::NoMemory)?;
        Registered::build(pd, ptr, len, Storage::Lent(Box::new(lent)), iova, access)
    }

    /// Whether its bytes belong to another owner, who gets them back when the region ends.
    pub(crate) fn is_promised(&self) -> bool {
        matches!(
            self.storage,
            Storage::Raw | Storage::Implicit | Storage::Part(..)
        )
    }

    /// Whether peers of this host may use it: by its own `STag`, or by windows.
    pub(crate) fn is_open(&self) -> bool {
        self.access.intersects(Access::REMOTE | Access::MW_BIND)
    }

    /// The place of the byte at an offset, for a peer of this host.
    pub(crate) fn place(&self, offset: usize) -> ExportAddr {
        match &self.storage {
            Storage::Lent(lent) => ExportAddr {
                space: lent.place.space,
                addr: lent.place.addr + offset as u64,
            },
            Storage::Part(whole, off) => whole.place(off + offset),
            _ => ExportAddr {
                space: 0,
                addr: self.at(offset).as_ptr().addr() as u64,
            },
        }
    }

    /// The file with its bytes, if they are frozen.
    pub(crate) fn frozen_file(&self) -> Option<BorrowedFd<'_>> {
        match &self.storage {
            Storage::Lent(lent) if self.is_frozen() => Some(lent.file()),
            _ => None,
        }
    }

    fn build(
        pd: PdId,
        ptr: NonNull<u8>,
        len: usize,
        storage: Storage,
        iova: u64,
        access: Access,
    ) -> Result<Registered, MemError> {
        let implicit = match &storage {
            Storage::Part(whole, _) => whole.implicit,
            storage => matches!(storage, Storage::Implicit),
        };
        let new = Registered {
            implicit,
            ptr,
            len,
            iova,
            stag: 0,
            pd,
            access,
            windows: AtomicU32::new(0),
            locked: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            storage,
        };
        // Judged after the storage has its owner, so that a refusal frees it.
        if iova.checked_add(len as u64).is_none() {
            return Err(MemError::Wrap);
        }
        if access.contains(Access::ZERO_BASED) && iova != 0 {
            return Err(MemError::BadArgument);
        }
        if access.needs_local_write() && !access.contains(Access::LOCAL_WRITE) {
            return Err(MemError::NeedsLocalWrite);
        }
        Ok(new)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of an offset, which must not pass the end.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len);
        // SAFETY: no sum of an address and an offset inside, or one past the end, is 0.
        unsafe { NonNull::new_unchecked(self.ptr.as_ptr().wrapping_add(offset)) }
    }

    /// Whether a range of an implicit region is mapped for such a use. If it is unmapped a moment later, the use counts as earlier.
    ///
    /// # Errors
    /// [`MemError::Bounds`]; [`MemError::Access`] for atomics, which no call of the kernel performs.
    #[cold]
    pub(crate) fn reach(&self, offset: usize, len: usize, need: Access) -> Result<(), MemError> {
        if need.contains(Access::REMOTE_ATOMIC) {
            return Err(MemError::Access);
        }
        let write = need.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let at = self.at(offset).as_ptr().addr();
        weft_sys::map::populate(at, len, write).map_err(|_| MemError::Bounds)
    }

    /// Appends `len` bytes from `offset` to `out`; panics when they are not inside the region.
    #[inline]
    pub(crate) fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        assert!(offset <= self.len && len <= self.len - offset);
        out.reserve(len);
        // SAFETY: a checked range of memory that lives as long as `self`; `reserve` made room, all of which is written.
        unsafe {
            let to = out.as_mut_ptr().add(out.len());
            copy::from(self.implicit, to, self.at(offset).as_ptr(), len, copy::load);
            out.set_len(out.len() + len);
        }
    }

    /// Counts one more window, unless the region is going away.
    pub(crate) fn add_window(&self) -> Result<(), MemError> {
        self.windows
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < CLOSED - 1).then_some(n + 1)
            })
            .map(drop)
            .map_err(|_| MemError::InvalidStag)
    }

    pub(crate) fn drop_window(&self) {
        self.windows.fetch_sub(1, Ordering::AcqRel);
    }

    /// Forbids further windows if there are none; again is fine.
    pub(crate) fn close_if_no_windows(&self) -> bool {
        self.windows
            .compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
            || self.windows.load(Ordering::Acquire) == CLOSED
    }

    /// Forbids further windows; whether there are any.
    pub(crate) fn close_to_windows(&self) -> bool {
        self.windows.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED != 0
    }

    /// Keeps its pages in memory.
    pub(crate) fn lock_pages(&self) -> Result<(), MemError> {
        if self.len == 0 || self.locked.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the range is mapped as long as the region lives.
        unsafe { weft_sys::map::lock(self.ptr, self.len) }.map_err(|_| {
            self.locked.store(false, Ordering::Release);
            MemError::LockedMemory
        })
    }

    /// From now on its bytes do not change.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    /// Takes the storage apart; the buffer comes back if there was one.
    pub(crate) fn release(&mut self) -> Option<Vec<u8>> {
        let storage = std::mem::replace(&mut self.storage, Storage::Nothing);
        if *self.locked.get_mut() && !matches!(storage, Storage::Nothing | Storage::Part(..)) {
            // SAFETY: the range is still mapped. A failure leaves the lock, which harms nobody.
            let _ = unsafe { weft_sys::map::unlock(self.ptr, self.len) };
        }
        match storage {
            Storage::Heap { capacity } => {
                // SAFETY: the parts of a Vec taken apart, and we are the last holder.
                Some(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), self.len, capacity) })
            }
            Storage::Map => {
                // SAFETY: our own mapping, and we are the last holder.
                let unmapped = unsafe { weft_sys::map::unmap(self.ptr, self.len) };
                debug_assert!(unmapped.is_ok());
                None
            }
            // Dropping the mapping frees the memory.
            Storage::Lent(_)
            | Storage::File(_)
            | Storage::Raw
            | Storage::Implicit
            | Storage::Part(..)
            | Storage::Nothing => None,
        }
    }
}

impl Memory for Registered {
    fn is_lent(&self) -> bool {
        match &self.storage {
            Storage::Lent(_) => true,
            Storage::Part(whole, _) => whole.is_lent(),
            _ => false,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        drop(self.release());
    }
}
