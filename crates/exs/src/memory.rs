//! Memory of operations: registered, the caller's own, or somebody else's under a promise.

use std::sync::Arc;

use weft_verbs::{Access, Mr, RawMemory};

use crate::{Context, Error};

/// A registered region, for as many operations as one likes (`exs_mregister`). The library allocates it, so that peers of the
/// same host reach it with one copy, or it is memory of the program.
pub struct Region {
    pub(crate) mr: Mr,
}

impl Region {
    /// `len` zeroed bytes that the library allocates: the fastest kind on one host.
    ///
    /// # Errors
    /// Without memory, or past the limit of regions.
    pub fn alloc(context: &Context, len: usize) -> Result<Arc<Region>, Error> {
        let mr = context.pd().alloc_mr(len, Region::LENT)?;
        Ok(Arc::new(Region { mr }))
    }
    /// Memory that somebody else owns.
    ///
    /// # Errors
    /// Past the limit of regions.
    pub fn register(context: &Context, memory: &RawMemory) -> Result<Arc<Region>, Error> {
        let mr = context.pd().reg_raw(memory, Region::ACCESS)?;
        Ok(Arc::new(Region { mr }))
    }
    /// Decides which memory of the library it comes from: what peers of the host can map. Its own key is never told to anybody.
    const LENT: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ);
    /// Only for ourselves: what a peer may write or read gets a key of its own, for the time of one operation.
    const ACCESS: Access = Access::LOCAL_WRITE;

    /// Ends the registration, unless there are other handles: then it ends with the last of them, whose drop waits for as long as a thread of
    /// this process is in the memory.
    ///
    /// # Errors
    /// Such a thread stays in it: the region comes back.
    pub fn deregister(self: Arc<Self>) -> Result<(), Arc<Region>> {
        let Some(last) = Arc::into_inner(self) else {
            return Ok(());
        };
        match last.mr.deregister() {
            Ok(_) => Ok(()),
            Err((mr, _)) => Err(Arc::new(Region { mr })),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.mr.len()
    }
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.mr.is_empty()
    }
    /// Copy `src` in at `off`.
    ///
    /// # Errors
    /// Out of bounds.
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), Error> {
        Ok(self.mr.write(off, src)?)
    }
    /// Copy out from `off`.
    ///
    /// # Errors
    /// Out of bounds.
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), Error> {
        Ok(self.mr.read(off, dst)?)
    }
    /// `len` bytes from `off` on as memory of an operation.
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
    /// All of it as memory of an operation.
    pub fn whole(self: &Arc<Self>) -> Memory {
        Memory::Region {
            region: Arc::clone(self),
            off: 0,
            len: self.len(),
        }
    }
}

/// The memory of one operation. It goes to the library with the operation and comes back with the event.
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
    /// Somebody else's memory, not registered: the library does that where it has to (implicit registration).
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
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether a part of it belongs to this value alone.
    pub(crate) fn owns(&self) -> bool {
        match self {
            Memory::Owned(_) => true,
            Memory::List(list) => list.iter().any(Memory::owns),
            Memory::Region { .. } | Memory::Raw(_) => false,
        }
    }
    /// Where it is in this process; nothing for several pieces. What may change under a peer's hands is for racing copies only, see
    /// [`RawMemory`].
    pub fn as_ptr(&self) -> Option<*mut u8> {
        match self {
            Memory::Region { region, off, .. } => Some(region.mr.as_ptr().wrapping_add(*off)),
            Memory::Raw(raw) => Some(raw.as_ptr()),
            Memory::Owned(bytes) => Some(bytes.as_ptr().cast_mut()),
            Memory::List(_) => None,
        }
    }
    /// Copy `out.len()` bytes from `off` on, of a single piece.
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
    /// A copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Memory::Region { region, off, len } => region.mr.to_vec(*off, *len).unwrap_or_default(),
            Memory::Raw(raw) => raw.to_vec(),
            Memory::Owned(bytes) => bytes.clone(),
            Memory::List(list) => list.iter().flat_map(Memory::to_vec).collect(),
        }
    }
    /// The owned bytes.
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

/// One region after another is dropped with its last operation; a clone is another handle of the same memory, except of owned bytes.
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
