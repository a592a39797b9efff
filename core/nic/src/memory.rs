//! Registered memory.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Range;

use weft_cverbs::{ibv_mr, ibv_sge};

use crate::context::Pd;
use crate::error::{Error, last};

bitflags::bitflags! {
    /// The allowed uses of a region. The owner may always read. The numbers are those of `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// Receives, Reads and atomics of the owner may write it.
        const LOCAL_WRITE = weft_cverbs::IBV_ACCESS_LOCAL_WRITE;
        /// Peers may write it.
        const REMOTE_WRITE = weft_cverbs::IBV_ACCESS_REMOTE_WRITE;
        /// Peers may read it.
        const REMOTE_READ = weft_cverbs::IBV_ACCESS_REMOTE_READ;
        /// Peers may use atomics on it.
        const REMOTE_ATOMIC = weft_cverbs::IBV_ACCESS_REMOTE_ATOMIC;
    }
}

/// Pages are of this size at least.
const PAGE: usize = 4096;

/// A memory region, and its memory.
pub struct Mr {
    mr: *mut ibv_mr,
    memory: *mut u8,
    layout: Layout,
    lkey: u32,
    rkey: u32,
    pd: Pd,
}

// SAFETY: the memory is reached by copies only, and the library's calls may come from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Pd {
    /// Allocates `len` zeroed bytes in pages of their own and registers them.
    ///
    /// # Errors
    /// As `ibv_reg_mr`; where memory may not be locked, with the number that is needed.
    ///
    /// # Panics
    /// When `len` is 0.
    pub fn alloc_mr(&self, len: usize, access: Access) -> Result<Mr, Error> {
        assert!(len > 0, "a region has bytes");
        let layout =
            Layout::from_size_align(len.next_multiple_of(PAGE), PAGE).expect("a length of memory");
        // SAFETY: not empty.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        let calls = &self.context().libraries().verbs;
        // SAFETY: our memory, which lives until the region is gone.
        let mr = unsafe {
            let access = access.bits() as c_int;
            (calls.ibv_reg_mr)(self.raw(), memory.cast(), len, access)
        };
        if mr.is_null() {
            let errno = last();
            // SAFETY: allocated above; nothing is registered.
            unsafe { dealloc(memory, layout) };
            return Err(self
                .context()
                .lacks_memory("ibv_reg_mr", errno, layout.size()));
        }
        // SAFETY: a region that the library has filled in.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Mr {
            mr,
            memory,
            layout,
            lkey,
            rkey,
            pd: self.clone(),
        })
    }
}

impl Mr {
    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it has bytes")]
    pub fn len(&self) -> usize {
        // SAFETY: a region that lives; the library does not change its length.
        unsafe { (*self.mr).length }
    }

    /// The bytes of a range, for a work request of this device.
    ///
    /// # Panics
    /// When the range is not in the region.
    pub fn sge(&self, range: Range<usize>) -> Sge<'_> {
        let at = self.at(&range);
        let sge = ibv_sge {
            addr: at.addr() as u64,
            length: range.len() as u32,
            lkey: self.lkey,
        };
        Sge(sge, PhantomData)
    }

    /// An address in it, for a peer's work request.
    pub fn remote(&self, offset: usize) -> Remote {
        Remote {
            addr: self.at(&(offset..offset)).addr() as u64,
            rkey: self.rkey,
        }
    }

    /// Copies bytes into it.
    ///
    /// # Panics
    /// When they are not in the region.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let at = self.at(&(offset..offset + bytes.len()));
        // SAFETY: registered memory, which lives as long as the region.
        unsafe { weft_mem::racing_store(at, bytes.as_ptr(), bytes.len()) }
    }

    /// Copies bytes out of it.
    ///
    /// # Panics
    /// When they are not in the region.
    pub fn read(&self, range: Range<usize>) -> Vec<u8> {
        let at = self.at(&range);
        let mut bytes = vec![0; range.len()];
        // SAFETY: as above; the bytes are ours alone.
        unsafe { weft_mem::racing_load(bytes.as_mut_ptr(), at, bytes.len()) }
        bytes
    }

    fn at(&self, range: &Range<usize>) -> *mut u8 {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} of {} bytes",
            self.len()
        );
        // SAFETY: within the memory, or just behind it.
        unsafe { self.memory.add(range.start) }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let calls = &self.pd.context().libraries().verbs;
        // SAFETY: ours, once. Afterwards the device does not reach the memory; if it fails the memory stays.
        unsafe {
            if (calls.ibv_dereg_mr)(self.mr) == 0 {
                dealloc(self.memory, self.layout);
            }
        }
    }
}

/// Where a peer's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address.
    pub addr: u64,
    /// The key.
    pub rkey: u32,
}

/// Bytes of registered memory, as a work request names them.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Sge<'a>(pub(crate) ibv_sge, PhantomData<&'a Mr>);
