//! Registered memory.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use weft_cverbs::{ibv_mr, ibv_sge};
use weft_mem::{Backing, MemError, PdId, RawMemory, Region, Table};

use crate::context::Pd;
use crate::error::{Error, last};
use crate::life::{Handle, Kind};

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

impl Access {
    fn rights(self) -> weft_mem::Access {
        weft_mem::Access::from_bits_truncate(self.bits())
    }
}

/// The memory of all regions. The device has keys of its own: those of this table reach no peer.
fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| Table::new(usize::MAX))
}

/// A memory region, and its memory.
pub struct Mr {
    mr: Handle<ibv_mr>,
    /// `None` once it is deregistered.
    region: Option<Region>,
    lkey: u32,
    rkey: u32,
    pd: Pd,
}

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
        self.register(Backing::Anonymous(len), access)
    }

    /// Registers a buffer, which [`Mr::deregister`] gives back.
    ///
    /// # Errors
    /// As `ibv_reg_mr`.
    ///
    /// # Panics
    /// When it has no bytes.
    pub fn reg_mr(&self, buffer: Vec<u8>, access: Access) -> Result<Mr, Error> {
        assert!(!buffer.is_empty(), "a region has bytes");
        self.register(Backing::Owned(buffer), access)
    }

    /// Registers the memory of a region of another table, which stays as long as either.
    ///
    /// # Errors
    /// As `ibv_reg_mr`.
    ///
    /// # Panics
    /// When it has no bytes.
    pub fn reg_region(&self, region: &Region, access: Access) -> Result<Mr, Error> {
        assert!(!region.is_empty(), "a region has bytes");
        self.enter(
            table().register_part(region, 0, region.len(), 0, access.rights()),
            access,
        )
    }

    /// Registers memory of another owner, who keeps it valid by their promise.
    ///
    /// # Errors
    /// As `ibv_reg_mr`.
    ///
    /// # Panics
    /// When it has no bytes.
    pub fn reg_raw(&self, memory: &RawMemory, access: Access) -> Result<Mr, Error> {
        assert!(!memory.is_empty(), "a region has bytes");
        self.enter(
            table().register_promised(PdId(0), memory, 0, access.rights()),
            access,
        )
    }

    /// Registers the first `len` bytes of a memory file (`memfd_create(2)`) that never shrinks; they stay mapped while the region is there.
    ///
    /// # Errors
    /// As `ibv_reg_mr`; it is no such file, may not be written, or is not so long.
    pub fn reg_memfd(&self, file: impl AsFd, len: usize, access: Access) -> Result<Mr, Error> {
        // Older kernels (Linux 6.1 in the tests) pin all pages for writing, whatever the rights of the region are.
        let backing = Backing::memory_file(file, len, true);
        let backing = backing.map_err(|(what, e)| {
            let errno = e.raw_os_error().unwrap_or(libc::EINVAL);
            self.context().failed(what, errno)
        })?;
        let region =
            backing.and_then(|backing| table().register(PdId(0), backing, 0, access.rights()));
        self.enter(region, access)
    }

    fn register(&self, backing: Backing, access: Access) -> Result<Mr, Error> {
        self.enter(
            table().register(PdId(0), backing, 0, access.rights()),
            access,
        )
    }

    fn enter(&self, region: Result<Region, MemError>, access: Access) -> Result<Mr, Error> {
        let none = |error: MemError| Error::new(Some(self.context().name()), error.to_string());
        let region = region.map_err(none)?;
        let calls = &self.context().libraries().verbs;
        let calling = self.context().enter()?;
        // SAFETY: our memory, which lives until the region is gone.
        let mr = unsafe {
            let access = access.bits() as c_int;
            (calls.ibv_reg_mr)(self.raw(), region.as_ptr().cast(), region.len(), access)
        };
        if mr.is_null() {
            let needed = region.len().next_multiple_of(PAGE);
            return Err(self.context().lacks_memory("ibv_reg_mr", last(), needed));
        }
        // SAFETY: a region that the library has filled in.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        // SAFETY: ours, once.
        let destroy = move |mr| unsafe { (calls.ibv_dereg_mr)(mr) };
        Ok(Mr {
            mr: Handle::new(self.context().life(), &calling, Kind::Mr, mr, destroy),
            region: Some(region),
            lkey,
            rkey,
            pd: self.clone(),
        })
    }
}

/// Memory is locked in pages of this size at least.
const PAGE: usize = 4096;

impl Mr {
    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it has bytes")]
    pub fn len(&self) -> usize {
        self.region().len()
    }

    /// Its memory, for copies. The key and the address of the [`Region`] are not the device's.
    pub fn region(&self) -> &Region {
        self.region.as_ref().expect("only `deregister` takes it")
    }

    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for a peer's work requests.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The address of its first byte in work requests.
    pub fn addr(&self) -> u64 {
        self.region().as_ptr().addr() as u64
    }

    /// Ends it; a buffer that was registered comes back.
    ///
    /// # Errors
    /// As `ibv_dereg_mr`; the memory stays then.
    pub fn deregister(mut self) -> Result<Option<Vec<u8>>, Error> {
        let region = self
            .end()
            .map_err(|errno| self.pd.context().failed("ibv_dereg_mr", errno))?;
        Ok(region.and_then(|region| region.deregister().unwrap_or_default()))
    }

    /// Deregisters it once. Afterwards the device does not reach the memory; if that fails the memory is never freed.
    fn end(&mut self) -> Result<Option<Region>, i32> {
        let Some(region) = self.region.take() else {
            return Ok(None);
        };
        match self.mr.destroy() {
            Ok(()) => Ok(Some(region)),
            Err(errno) => {
                std::mem::forget(region);
                Err(errno)
            }
        }
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
        self.region().as_ptr().wrapping_add(range.start)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let _ = self.end();
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

/// Bytes of registered memory by their key alone. The device refuses them if the key or the range is not good, so that these numbers can be any.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Named(pub(crate) ibv_sge);

impl Named {
    /// None.
    pub const NONE: Self = Self::new(0, 0, 0);

    /// `length` bytes from this address on, of the region with this local key.
    pub const fn new(addr: u64, length: u32, lkey: u32) -> Self {
        Self(ibv_sge { addr, length, lkey })
    }
}
