//! Memory of operations: registered, owned by the operation, or owned by someone else under a promise.

use std::sync::{Arc, Mutex};

use weft_sockets::lock::lock;
use weft_verbs::{Access, Mr, RawMemory, Sge, any};

use crate::registered::Domain;
use crate::{Context, Error};

/// A registered region, for any number of operations (`exs_mregister`). It is memory of the program, or memory that the library allocates, which
/// peers on the same host reach with one copy.
pub struct Region {
    /// Its registrations with RNICs of the machine, made at its first use there. Dropped before the memory.
    rnics: Mutex<Vec<(Arc<Domain>, any::Mr)>>,
    pub(crate) mr: Mr,
}

impl Region {
    /// `len` zeroed bytes that the library allocates: the fastest kind on one host.
    ///
    /// # Errors
    /// The memory cannot be allocated, or the limit of regions is reached.
    pub fn alloc(context: &Context, len: usize) -> Result<Arc<Region>, Error> {
        Ok(Region::of(context.pd().alloc_mr(len, Region::LENT)?))
    }
    /// Register memory that someone else owns.
    ///
    /// # Errors
    /// The limit of regions is reached.
    pub fn register(context: &Context, memory: &RawMemory) -> Result<Arc<Region>, Error> {
        Ok(Region::of(context.pd().reg_raw(memory, Region::ACCESS)?))
    }
    pub(crate) fn of(mr: Mr) -> Arc<Region> {
        let rnics = Mutex::default();
        Arc::new(Region { rnics, mr })
    }
    /// An element of a work request of a connection with memory in this domain.
    pub(crate) fn sge(&self, domain: &Arc<Domain>, off: usize, len: usize) -> Result<Sge, Error> {
        let Some(rnic) = domain.rnic().filter(|_| len > 0) else {
            return Ok(self.mr.sge(off, len));
        };
        let mut rnics = lock(&self.rnics);
        if let Some((_, mr)) = rnics.iter().find(|(of, _)| Arc::ptr_eq(of, domain)) {
            return Ok(mr.sge(off, len));
        }
        let mr = rnic.pd.reg_mr_of(&self.mr, Region::ACCESS)?;
        let sge = mr.sge(off, len);
        rnics.retain(|(of, _)| !of.is_gone());
        rnics.push((Arc::clone(domain), mr));
        Ok(sge)
    }
    /// Makes the library allocate memory that peers on the host can map. The key of the region itself is never sent to a peer.
    const LENT: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ);
    /// Local access only: memory that a peer may write or read gets a separate key for the duration of one operation.
    const ACCESS: Access = Access::LOCAL_WRITE;

    /// Ends the registration, or only releases this handle if others exist. The drop of the last handle ends it, and waits while a thread of this
    /// process accesses the memory.
    ///
    /// # Errors
    /// A thread still accesses the memory: the region is returned.
    pub fn deregister(self: Arc<Self>) -> Result<(), Arc<Region>> {
        let Some(last) = Arc::into_inner(self) else {
            return Ok(());
        };
        drop(last.rnics);
        match last.mr.deregister() {
            Ok(_) => Ok(()),
            Err((mr, _)) => Err(Region::of(mr)),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.mr.len()
    }
    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.mr.is_empty()
    }
    /// Copy `src` to offset `off`.
    ///
    /// # Errors
    /// Out of bounds.
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), Error> {
        Ok(self.mr.write(off, src)?)
    }
    /// Copy the bytes at `off` to `dst`.
    ///
    /// # Errors
    /// Out of bounds.
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), Error> {
        Ok(self.mr.read(off, dst)?)
    }
    /// `len` bytes at `off` as memory for an operation.
    ///
    /// # Errors
    /// Out of bounds.
    pub fn slice(self: &Arc<Self>, off: usize, len: usize) -> Result<Memory, Error> {
        if off.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(Error::Bounds);
        }
        Ok(Memory::Region {
            region: Arc::clone(self),
            off,
            len,
        })
    }
    /// The whole region as memory for an operation.
    pub fn whole(self: &Arc<Self>) -> Memory {
        Memory::Region {
            region: Arc::clone(self),
            off: 0,
            len: self.len(),
        }
    }
}

/// The memory of one operation. The operation owns it; the event returns it.
pub enum Memory {
    /// A part of a registered region.
    Region {
        /// The region.
        region: Arc<Region>,
        /// First byte.
        off: usize,
        /// Bytes.
        len: usize,
    },
    /// Unregistered memory that someone else owns. The library registers it where necessary (implicit registration).
    Raw(RawMemory),
    /// Bytes that the operation owns.
    Owned(Vec<u8>),
    /// Several pieces, in this order.
    List(Vec<Memory>),
}

impl Memory {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Memory::Region { len, .. } => *len,
            Memory::Raw(raw) => raw.len(),
            Memory::Owned(bytes) => bytes.len(),
            Memory::List(list) => list.iter().map(Memory::len).sum(),
        }
    }
    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// True if a part of it has no owner but this value.
    pub(crate) fn owns(&self) -> bool {
        match self {
            Memory::Owned(_) => true,
            Memory::List(list) => list.iter().any(Memory::owns),
            Memory::Region { .. } | Memory::Raw(_) => false,
        }
    }
    /// Its address in this process; `None` for several pieces. Memory that a peer may change meanwhile must be accessed by racing copies only, see
    /// [`RawMemory`].
    pub fn as_ptr(&self) -> Option<*mut u8> {
        match self {
            Memory::Region { region, off, .. } => Some(region.mr.as_ptr().wrapping_add(*off)),
            Memory::Raw(raw) => Some(raw.as_ptr()),
            Memory::Owned(bytes) => Some(bytes.as_ptr().cast_mut()),
            Memory::List(_) => None,
        }
    }
    /// Copy `out.len()` bytes at `off`; for a single piece only.
    #[inline]
    pub(crate) fn read(&self, off: usize, out: &mut [u8]) -> Result<(), Error> {
        match self {
            Memory::Region {
                region, off: start, ..
            } => Ok(region.mr.read(*start + off, out)?),
            Memory::Raw(raw) => Ok(raw.read(off, out)?),
            Memory::Owned(bytes) => copy_slice(bytes, off, out),
            Memory::List(_) => Err(Error::Bounds),
        }
    }
    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Memory::Region { region, off, len } => region.mr.to_vec(*off, *len).unwrap_or_default(),
            Memory::Raw(raw) => raw.to_vec(),
            Memory::Owned(bytes) => bytes.clone(),
            Memory::List(list) => list.iter().flat_map(Memory::to_vec).collect(),
        }
    }
    /// The owned bytes, or a copy of the others.
    pub fn into_vec(self) -> Vec<u8> {
        match self {
            Memory::Owned(bytes) => bytes,
            other => other.to_vec(),
        }
    }
}

pub(crate) fn copy_slice(src: &[u8], off: usize, out: &mut [u8]) -> Result<(), Error> {
    match src.get(off..off.saturating_add(out.len())) {
        Some(bytes) => {
            out.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(Error::Bounds),
    }
}

impl From<Vec<u8>> for Memory {
    fn from(bytes: Vec<u8>) -> Self {
        Memory::Owned(bytes)
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Memory::Region { off, len, .. } => write!(f, "Region({off}+{len})"),
            Memory::Raw(raw) => write!(f, "Raw({})", raw.len()),
            Memory::Owned(bytes) => write!(f, "Owned({})", bytes.len()),
            Memory::List(list) => f.debug_list().entries(list).finish(),
        }
    }
}

/// A clone is another handle of the same memory; owned bytes are copied. A region is dropped with its last operation.
impl Clone for Memory {
    fn clone(&self) -> Self {
        match self {
            Memory::Region { region, off, len } => Memory::Region {
                region: Arc::clone(region),
                off: *off,
                len: *len,
            },
            Memory::Raw(raw) => Memory::Raw(raw.clone()),
            Memory::Owned(bytes) => Memory::Owned(bytes.clone()),
            Memory::List(list) => Memory::List(list.clone()),
        }
    }
}
