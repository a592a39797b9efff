//! Memory regions and windows.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use weft_mem::{Backing, MemError, RawMemory, Region, Window, WindowType};

use crate::device::{Pd, PdInner};
use crate::pending_dereg::PendingDereg;
use crate::types::{Access, Error, LocalMode, RemoteAddr, SendOp, SendWr, Sge};

impl Pd {
    /// A region of `len` zeroed bytes that the library allocates, on pages of its own. Its addresses start at 0.
    ///
    /// # Errors
    /// [`Error::Memory`] without memory, past the limit of regions, and for rights that a peer may not have alone.
    ///
    /// ```
    /// # let pd = weft_rnic::Device::open()?.alloc_pd()?;
    /// # use weft_rnic::Access;
    /// let error = pd.alloc_mr(64, Access::REMOTE_WRITE).err().unwrap();
    /// assert_eq!(error.to_string(), "memory: the rights REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well");
    /// # Ok::<(), weft_rnic::Error>(())
    /// ```
    pub fn alloc_mr(&self, len: usize, access: Access) -> Result<Mr, Error> {
        let shared = self.0.device.local != LocalMode::Off;
        let backing = if shared {
            Backing::Shared(len)
        } else {
            Backing::Anonymous(len)
        };
        self.register(backing, access)
    }

    /// Register the first `len` bytes of a memory file (`memfd_create(2)`), which stay mapped while the region is there; `len` is not 0. Its addresses
    /// start at 0. Without [`Access::LOCAL_WRITE`] the mapping is for reading only.
    ///
    /// # Errors
    /// [`Error::Os`] unless it is a memory file that can never shrink (`F_SEAL_SHRINK`), and where it cannot be mapped; [`Error::Memory`] past its end, and
    /// past the limit of regions.
    pub fn reg_memfd(&self, file: impl AsFd, len: usize, access: Access) -> Result<Mr, Error> {
        let writable = access.contains(Access::LOCAL_WRITE);
        let backing = Backing::memory_file(file, len, writable);
        let backing = backing.map_err(|(what, source)| Error::Os { what, source })?;
        self.register(backing?, access)
    }

    /// Register a buffer; [`Mr::deregister`] gives it back. Its addresses start at 0.
    ///
    /// # Errors
    /// [`Error::Memory`] past the limit of regions.
    pub fn reg_mr(&self, buffer: Vec<u8>, access: Access) -> Result<Mr, Error> {
        self.register(Backing::Owned(buffer), access)
    }

    /// Registers memory of another owner, who keeps it valid by their promise. Its addresses start at 0.
    ///
    /// # Errors
    /// [`Error::Memory`] beyond the limit of regions.
    pub fn reg_raw(&self, memory: &RawMemory, access: Access) -> Result<Mr, Error> {
        self.reg_raw_at(memory, 0, access)
    }

    /// As [`Pd::reg_raw`], with `iova` as the address of the first byte in work requests, ours and the peer's: the memory's own
    /// address, say.
    ///
    /// # Errors
    /// [`Error::Memory`] past the limit of regions, and for addresses that pass 2^64.
    pub fn reg_raw_at(&self, memory: &RawMemory, iova: u64, access: Access) -> Result<Mr, Error> {
        let table = &self.0.device.table;
        Ok(Mr {
            region: table.register_promised(self.0.id, memory, iova, access)?,
            pd: Arc::clone(&self.0),
        })
    }

    /// Look whether an element of a region may be read or written, and if `fault` says so make its pages present.
    ///
    /// # Errors
    /// [`MemError`]: as a request with this element would be answered.
    pub fn prefetch(&self, sge: Sge, write: bool, fault: bool) -> Result<(), MemError> {
        let need = if write {
            Access::LOCAL_WRITE
        } else {
            Access::empty()
        };
        let table = &self.0.device.table;
        table.prefetch(self.0.id, sge.lkey, (sge.addr, sge.len), need, fault)
    }

    /// As [`Pd::reg_raw_at`], in the place of a region that has just been deregistered: with its key, unless that is in use again.
    ///
    /// # Errors
    /// As [`Pd::reg_raw_at`].
    pub fn reg_raw_again(
        &self,
        memory: &RawMemory,
        iova: u64,
        access: Access,
        key: u32,
    ) -> Result<Mr, Error> {
        let table = &self.0.device.table;
        Ok(Mr {
            region: table.register_again(self.0.id, memory, iova, access, key)?,
            pd: Arc::clone(&self.0),
        })
    }

    /// Registers a part of a region again, with rights and keys of its own, to open only this part to a peer for a while. Its addresses
    /// start at 0; the memory stays while either registration exists.
    ///
    /// # Errors
    /// [`Error::Memory`] out of bounds, and beyond the limit of regions.
    pub fn reg_part(&self, mr: &Mr, off: usize, len: usize, access: Access) -> Result<Mr, Error> {
        let table = &self.0.device.table;
        Ok(Mr {
            region: table.register_part(&mr.region, off, len, 0, access)?,
            pd: Arc::clone(&self.0),
        })
    }

    fn register(&self, backing: Backing, access: Access) -> Result<Mr, Error> {
        let region = self
            .0
            .device
            .table
            .register(self.0.id, backing, 0, access)?;
        Ok(Mr {
            region,
            pd: Arc::clone(&self.0),
        })
    }

    /// A type 2 memory window, not bound to anything yet.
    ///
    /// # Errors
    /// [`Error::Memory`] past the limit of regions and windows.
    pub fn alloc_mw(&self) -> Result<Mw, Error> {
        self.alloc_window(WindowType::Type2)
    }

    /// A type 1 memory window, not bound to anything yet.
    ///
    /// # Errors
    /// [`Error::Memory`] past the limit of regions and windows.
    pub fn alloc_mw_type_1(&self) -> Result<Mw, Error> {
        self.alloc_window(WindowType::Type1)
    }

    fn alloc_window(&self, kind: WindowType) -> Result<Mw, Error> {
        Ok(Mw {
            window: self.0.device.table.alloc_window(self.0.id, kind)?,
            pd: Arc::clone(&self.0),
        })
    }
}

/// A memory region. It owns its bytes, and they may change at any time while a peer may write to them: so they are
/// read and written by copies, never borrowed. Dropping it deregisters.
pub struct Mr {
    pub(crate) region: Region,
    #[allow(dead_code)] // keeps the domain alive
    pub(crate) pd: Arc<PdInner>,
}

impl Mr {
    /// Key for our own work requests.
    pub fn lkey(&self) -> u32 {
        self.region.stag()
    }
    /// The key for peers (the same `STag`; the access rights decide what a peer may do).
    pub fn rkey(&self) -> u32 {
        self.region.stag()
    }
    /// Address of its first byte in work requests: 0 for regions made in safe Rust.
    pub fn addr(&self) -> u64 {
        self.region.iova()
    }
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }
    /// Its memory, for another device that reaches it.
    #[doc(hidden)]
    pub fn region(&self) -> &Region {
        &self.region
    }
    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }
    /// The address of its first byte in this process. Peers may write there at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }
    /// Its access rights.
    pub fn access(&self) -> Access {
        self.region.access()
    }
    /// A scatter/gather element of `len` bytes from `off` on. Not checked here: a work request past the end fails.
    /// At most 2^32 - 1 bytes.
    pub fn sge(&self, off: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr().wrapping_add(off as u64),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }
    /// The whole region as one element.
    pub fn whole(&self) -> Sge {
        self.sge(0, self.len())
    }
    /// The address and key that a peer needs to reach the byte at `off`.
    pub fn remote(&self, off: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.addr().wrapping_add(off as u64),
            rkey: self.rkey(),
        }
    }
    /// Copy `src` in at `off`.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError> {
        self.region.write(off, src)
    }
    /// Copy out from `off` into `dst`. Bytes that a peer writes meanwhile may be old or new, each for itself.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), MemError> {
        self.region.read(off, dst)
    }
    /// A copy of `len` bytes from `off` on.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn to_vec(&self, off: usize, len: usize) -> Result<Vec<u8>, MemError> {
        if off.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(MemError::Bounds);
        }
        let mut out = vec![0; len];
        self.read(off, &mut out)?;
        Ok(out)
    }
    /// Copy `len` bytes from `off` to `to` in another region, or in this one.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn copy_to(&self, off: usize, dst: &Mr, to: usize, len: usize) -> Result<(), MemError> {
        self.region.copy_to(off, &dst.region, to, len)
    }
    /// Copy the bytes at `off` to promised memory: as many as it has.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn copy_to_raw(&self, off: usize, dst: &RawMemory) -> Result<(), MemError> {
        self.region.copy_to_raw(off, dst)
    }
    /// Copy promised memory to `off`: all of it.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn copy_from_raw(&self, off: usize, src: &RawMemory) -> Result<(), MemError> {
        self.region.copy_from_raw(off, src)
    }
    /// Set `len` bytes from `off` on to `byte`.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn fill(&self, off: usize, len: usize, byte: u8) -> Result<(), MemError> {
        self.region.fill(off, len, byte)
    }
    /// Load eight aligned bytes at once, host byte order: sees a peer's atomic operations and writes.
    ///
    /// # Errors
    /// [`MemError::Bounds`], [`MemError::Misaligned`].
    pub fn load_u64(&self, off: usize) -> Result<u64, MemError> {
        self.region.load_u64(off)
    }
    /// Store eight aligned bytes at once, host byte order.
    ///
    /// # Errors
    /// [`MemError::Bounds`], [`MemError::Misaligned`].
    pub fn store_u64(&self, off: usize, value: u64) -> Result<(), MemError> {
        self.region.store_u64(off, value)
    }
    /// Replaces a word by `swap` if it equals `compare`, as peers' atomics do; returns the old value.
    ///
    /// # Errors
    /// [`MemError::Misaligned`] unless its address is a multiple of 8; [`MemError::Bounds`].
    pub fn compare_swap(&self, off: usize, compare: u64, swap: u64) -> Result<u64, MemError> {
        self.region.compare_swap(off, compare, swap)
    }
    /// Load one byte: to poll for the end of a peer's write.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn load_u8(&self, off: usize) -> Result<u8, MemError> {
        self.region.load_u8(off)
    }
    /// Read from a file or socket straight into the region; `file_off: None` reads at the file's own position.
    ///
    /// # Errors
    /// As `read(2)`; `InvalidInput` out of bounds.
    pub fn read_from_file(
        &self,
        fd: impl AsFd,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        self.region.read_from_file(fd.as_fd(), file_off, off, len)
    }
    /// Write to a file or socket straight from the region; `file_off: None` writes at the file's own position.
    ///
    /// # Errors
    /// As `write(2)`; `InvalidInput` out of bounds.
    pub fn write_to_file(
        &self,
        fd: impl AsFd,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        self.region.write_to_file(fd.as_fd(), file_off, off, len)
    }
    /// Send on a stream socket straight from the region, never waiting; `more` says that more follows at once.
    ///
    /// # Errors
    /// As `send(2)` with `MSG_DONTWAIT | MSG_NOSIGNAL`; `InvalidInput` out of bounds.
    pub fn send_to_socket(
        &self,
        fd: impl AsFd,
        off: usize,
        len: usize,
        more: bool,
    ) -> io::Result<usize> {
        self.region.send_to_socket(fd.as_fd(), off, len, more)
    }
    /// Receive from a stream socket straight into the region, never waiting.
    ///
    /// # Errors
    /// As `recv(2)` with `MSG_DONTWAIT`; `InvalidInput` out of bounds.
    pub fn recv_from_socket(&self, fd: impl AsFd, off: usize, len: usize) -> io::Result<usize> {
        self.region.recv_from_socket(fd.as_fd(), off, len)
    }
    /// Freezes the region: from now on its bytes do not change, and writes to it fail. Reads of it by peers over TCP, without CRC and TLS, are then not
    /// copied, if peers of this host may read its memory ([`Pd::alloc_mr`](crate::Pd::alloc_mr)). A process that does not ignore `SIGPIPE` is killed if such
    /// a peer disconnects.
    ///
    /// # Errors
    /// [`MemError::Access`] for a region that is written to by receives or by peers ([`Access::LOCAL_WRITE`]).
    pub fn freeze(&self) -> Result<(), MemError> {
        self.region.freeze()
    }
    /// Keep the region's pages in memory. Never needed for correctness: no device reads physical pages.
    ///
    /// # Errors
    /// [`MemError::LockedMemory`] when the limit on locked memory is too low.
    pub fn lock_pages(&self) -> Result<(), MemError> {
        self.region.lock_pages()
    }
    /// Deregister: from here on the keys are stale. A buffer given to [`Pd::reg_mr`](crate::Pd::reg_mr) comes back. A peer of this host that is in
    /// the memory is waited for; the connection of one that stays for three seconds ends.
    ///
    /// # Errors
    /// [`MemError::InUse`] while windows are bound to it, and when a thread of this process stays in the memory; the region comes back too.
    pub fn deregister(self) -> Result<Option<Vec<u8>>, (Mr, MemError)> {
        let Mr { region, pd } = self;
        region
            .deregister()
            .map_err(|(region, error)| (Mr { region, pd }, error))
    }
    /// As [`Mr::deregister`], without waiting. Windows bound to it are removed, too.
    ///
    /// # Errors
    /// The memory is in use: it is returned later, see [`PendingDereg::then`].
    pub fn retire(self) -> Result<Option<Vec<u8>>, PendingDereg> {
        let Mr { region, pd } = self;
        region
            .retire()
            .map_err(|region| PendingDereg { region, pd })
    }
}

/// A memory window: a part of a region that peers may use. One of type 2 ([`Pd::alloc_mw`](crate::Pd::alloc_mw)) is for the peer of the queue pair that
/// bound it, until either of them invalidates it. One of type 1 ([`Pd::alloc_mw_type_1`](crate::Pd::alloc_mw_type_1)) is for the peers of all queue pairs of
/// its domain; a bind puts another range in its place, or none where the length is 0, and nobody can invalidate it.
pub struct Mw {
    pub(crate) window: Window,
    #[allow(dead_code)] // keeps the domain alive
    pub(crate) pd: Arc<PdInner>,
}

impl Mw {
    /// Its current key; useless to the peer until a bind has completed.
    pub fn rkey(&self) -> u32 {
        self.window.stag()
    }

    /// The work request that binds it to a range of `mr` with a new key, and that key.
    pub fn bind(&self, id: u64, mr: &Mr, off: usize, len: usize, access: Access) -> (SendWr, u32) {
        let window = self.rkey();
        let new_rkey = (window & !0xff) | (window.wrapping_add(1) & 0xff);
        let addr = mr.addr().wrapping_add(off as u64);
        let op = SendOp::BindMw {
            window,
            new_rkey,
            region: mr.rkey(),
            addr,
            len: len as u64,
            access,
        };
        (SendWr::new(id, op), new_rkey)
    }
}
