//! Regions: who owns the memory, and how it comes back.
//!
//! # Safety
//!
//! A `Registered` owns its bytes through a raw pointer. The table and every [`crate::Span`] hold it by `Arc`,
//! so the bytes live as long as anybody can reach them: the last holder releases them, to the
//! owner if it waits, else to the system. Only `Storage::Raw`, and parts of such, are not ours to keep, so dropping
//! such a region waits for the spans.

use crate::domain::{Domain, Lent, PEER_LIMIT};
use crate::table::Table;
use crate::{Access, MemError, PdId, Place, RawMemory, copy};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weft_lock::Holds;
use weft_sys::memfd::Mapping;

/// How long threads of ours that are still in a region are waited for after peers have been.
const SPAN_WAIT: Duration = Duration::from_secs(1);
/// Sleep between two looks, at first and later.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Set in `Registered::windows` once no more windows may be bound.
const CLOSED: u32 = 1 << 31;

/// Where a region's bytes come from.
#[derive(Debug)]
pub enum Backing {
    /// A buffer given up by its owner; [`Region::deregister`] gives it back.
    Owned(Vec<u8>),
    /// So many bytes of new zeroed memory, on pages of its own; pages take memory when touched.
    Anonymous(usize),
    /// So many bytes of new zeroed memory that peers of this host can map, if their connection is a local one and the
    /// access rights let them: in the protection domain's arena of memory that peers may write
    /// (`REMOTE_WRITE`, `REMOTE_ATOMIC`), may read (`REMOTE_READ`), or may not reach. *Every* such peer of the domain can reach
    /// all regions of its kind there, whatever its windows. The same as `Anonymous` where memory files are not to be had.
    ///
    /// A child of `fork` shares these bytes with its parent, rather than getting a copy: both see what either writes.
    Shared(usize),
    /// A mapping of a memory file, which must be one that never shrinks ([`weft_sys::memfd::check`]). Peers of this host reach it in this process.
    File(Mapping),
}

enum Storage {
    Heap {
        capacity: usize,
    },
    Map,
    /// Part of an arena.
    Lent(Box<Lent>),
    /// A mapped file, whose mapping goes with it.
    File(#[allow(dead_code)] Mapping),
    /// Somebody else's.
    Raw,
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
    /// Its bytes do not change any more.
    frozen: AtomicBool,
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
                (ptr, v.len(), Storage::Heap { capacity })
            }
            Backing::Anonymous(0) | Backing::Shared(0) => {
                (NonNull::dangling(), 0, Storage::Nothing)
            }
            // Those that could be lent are made by `from_lent`.
            Backing::Anonymous(len) | Backing::Shared(len) => {
                let ptr = weft_sys::map::map_anonymous(len).map_err(|_| MemError::Limit)?;
                (ptr, len, Storage::Map)
            }
            Backing::File(mapping) => {
                let ptr = NonNull::new(mapping.as_ptr()).ok_or(MemError::BadArgument)?;
                (ptr, mapping.len(), Storage::File(mapping))
            }
        };
        Registered::build(pd, ptr, len, storage, iova, access)
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
        let ptr = NonNull::new(lent.as_ptr()).ok_or(MemError::Limit)?;
        Registered::build(pd, ptr, len, Storage::Lent(Box::new(lent)), iova, access)
    }

    /// Whether its bytes are in an arena.
    pub(crate) fn is_lent(&self) -> bool {
        match &self.storage {
            Storage::Lent(_) => true,
            Storage::Part(whole, _) => whole.is_lent(),
            _ => false,
        }
    }

    /// Whether its bytes are somebody's who has them back when the region is gone, and not the library's.
    fn is_promised(&self) -> bool {
        matches!(self.storage, Storage::Raw | Storage::Part(..))
    }

    /// Whether peers of this host can have been let in: by its own `STag`, or by windows.
    fn is_open(&self) -> bool {
        self.access.intersects(Access::REMOTE | Access::MW_BIND)
    }

    /// Where the byte at an offset is, for a peer of this host.
    pub(crate) fn place(&self, offset: usize) -> Place {
        match &self.storage {
            Storage::Lent(lent) => Place {
                space: lent.place.space,
                addr: lent.place.addr + offset as u64,
            },
            Storage::Part(whole, off) => whole.place(off + offset),
            _ => Place {
                space: 0,
                addr: self.at(offset).as_ptr().addr() as u64,
            },
        }
    }

    /// The file that its bytes are in, if they do not change any more.
    pub(crate) fn frozen_file(&self) -> Option<BorrowedFd<'_>> {
        match &self.storage {
            Storage::Lent(lent) if self.frozen.load(Ordering::Acquire) => Some(lent.file()),
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
        let new = Registered {
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
        if iova.checked_add(len as u64).is_none()
            || (access.contains(Access::ZERO_BASED) && iova != 0)
            || (access.needs_local_write() && !access.contains(Access::LOCAL_WRITE))
        {
            return Err(MemError::BadArgument);
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
        // SAFETY: inside the allocation, or one past its end.
        unsafe { self.ptr.add(offset) }
    }

    /// Appends `len` bytes from `offset` to `out`; panics when they are not inside the region.
    #[inline]
    pub(crate) fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        assert!(offset <= self.len && len <= self.len - offset);
        out.reserve(len);
        // SAFETY: a checked range of memory that lives as long as `self`; `reserve` made room, all of which is written.
        unsafe {
            copy::load(
                out.as_mut_ptr().add(out.len()),
                self.at(offset).as_ptr(),
                len,
            );
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
    fn close_if_no_windows(&self) -> bool {
        self.windows
            .compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
            || self.windows.load(Ordering::Acquire) == CLOSED
    }

    /// Takes the storage apart; the buffer comes back if there was one.
    fn release(&mut self) -> Option<Vec<u8>> {
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
            // The mapping goes, and with it the memory.
            Storage::Lent(_)
            | Storage::File(_)
            | Storage::Raw
            | Storage::Part(..)
            | Storage::Nothing => None,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        drop(self.release());
    }
}

/// The owner's handle on registered memory. Dropping it deregisters: windows bound to it become
/// invalid, and the memory is freed when the last [`crate::Span`] is gone and no peer of this host uses it itself any more. Where the
/// memory is somebody else's, the drop waits for that, for peers up to [`PEER_LIMIT`].
pub struct Region {
    table: Table,
    /// `None` only after `deregister`.
    inner: Option<Arc<Registered>>,
    /// Once it is out of the table: threads that may be in it without a span ([`crate::Keys`]).
    holds: Holds,
}

impl Region {
    pub(crate) fn new(table: Table, inner: Arc<Registered>) -> Region {
        Region {
            table,
            inner: Some(inner),
            holds: Holds::default(),
        }
    }

    #[inline]
    pub(crate) fn inner(&self) -> &Arc<Registered> {
        self.inner.as_ref().expect("a region has its memory")
    }

    /// The handle that peers and scatter/gather elements name it by.
    pub fn stag(&self) -> u32 {
        self.inner().stag
    }

    /// The address of the first byte, as peers and scatter/gather elements count.
    pub fn iova(&self) -> u64 {
        self.inner().iova
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.inner().len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rights given at registration.
    pub fn access(&self) -> Access {
        self.inner().access
    }

    /// Its protection domain.
    pub fn pd(&self) -> PdId {
        self.inner().pd
    }

    /// Where the bytes are in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner().ptr.as_ptr()
    }

    /// Keeps its pages in memory (`mlock`) until deregistration.
    ///
    /// # Errors
    /// [`MemError::Limit`] when the system's limit on locked memory forbids it.
    pub fn lock_pages(&self) -> Result<(), MemError> {
        let r = self.inner();
        if r.len == 0 || r.locked.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the range is mapped as long as the region lives.
        unsafe { weft_sys::map::lock(r.ptr, r.len) }.map_err(|_| {
            r.locked.store(false, Ordering::Release);
            MemError::Limit
        })
    }

    /// Ends the registration and gives an [`Backing::Owned`] buffer back. From the call on the `STag` is
    /// invalid. Peers of this host that use the memory themselves are waited for, up to [`PEER_LIMIT`], after which they are cut off;
    /// spans in flight a second longer.
    ///
    /// # Errors
    /// [`MemError::InUse`] when windows are bound to it (nothing has changed then), or when a span
    /// outlasts the wait: the `STag` stays invalid, and deregistering again waits again.
    pub fn deregister(mut self) -> Result<Option<Vec<u8>>, (Region, MemError)> {
        if !self.inner().close_if_no_windows() {
            return Err((self, MemError::InUse));
        }
        let domain = self.withdraw();
        match self.wait(domain.as_deref(), Some(PEER_LIMIT + SPAN_WAIT)) {
            Ok(buffer) => Ok(buffer),
            Err(error) => Err((self, error)),
        }
    }

    /// Ends the registration without waiting: from the call on the `STag` is invalid, and windows bound to the region are. Gives the buffer
    /// back, if it was a [`Backing::Owned`] one.
    ///
    /// # Errors
    /// Somebody is still in the memory: what is to be asked again.
    pub fn retire(mut self) -> Result<Option<Vec<u8>>, Leaving> {
        let domain = self.withdraw();
        self.take_back(domain.as_deref()).map_err(|_| Leaving {
            region: self,
            domain,
            since: Instant::now(),
        })
    }

    /// Makes its `STag`, and windows bound to it, invalid. Tells where peers of this host are to be asked, if any can have been let in.
    fn withdraw(&mut self) -> Option<Arc<Domain>> {
        let (domain, holds) = self.table.remove_region(self.inner());
        self.holds.add(holds);
        let inner = self.inner();
        // No bind can pass this, so the windows found next are all there will ever be.
        if inner.windows.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED != 0 {
            self.table.unbind_all(inner);
        }
        domain.filter(|_| inner.is_open())
    }

    /// The memory, if no peer of this host and no span is in it.
    fn take_back(&mut self, domain: Option<&Domain>) -> Result<Option<Vec<u8>>, MemError> {
        let stag = self.stag();
        if domain.is_some_and(|domain| domain.is_used(stag, 0)) {
            return Err(MemError::InUse);
        }
        if !self.holds.are_over_soon() {
            return Err(MemError::InUse);
        }
        let Some(inner) = self.inner.take() else {
            return Ok(None);
        };
        match Arc::try_unwrap(inner) {
            Ok(mut last) => Ok(last.release()),
            Err(shared) => {
                self.inner = Some(shared);
                Err(MemError::InUse)
            }
        }
    }

    /// As [`Self::take_back`], after so long a time: cuts off the peers that have been waited for long enough.
    fn insist(
        &mut self,
        domain: Option<&Domain>,
        waited: Duration,
    ) -> Result<Option<Vec<u8>>, MemError> {
        if let Some(domain) = domain {
            // Windows that were taken away before keep the region too.
            domain.is_overdue(self.stag());
        }
        if waited >= PEER_LIMIT {
            let inner = self.inner();
            if let Some(domain) = domain {
                domain.cut_off_users(inner.stag, 0);
            }
            self.table.cut_off_borrowers(inner);
        }
        self.take_back(domain)
    }

    /// Waits until nobody is in the memory, at most so long (`None`: as long as a span lives).
    fn wait(
        &mut self,
        domain: Option<&Domain>,
        limit: Option<Duration>,
    ) -> Result<Option<Vec<u8>>, MemError> {
        if let Ok(buffer) = self.take_back(domain) {
            return Ok(buffer);
        }
        let start = Instant::now();
        let mut nap = SHORTEST_NAP;
        loop {
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
            let waited = start.elapsed();
            match self.insist(domain, waited) {
                Err(_) if limit.is_none_or(|limit| waited < limit) => {}
                over => return over,
            }
        }
    }

    /// The address of `len` bytes at `off`.
    #[inline]
    fn range(&self, off: usize, len: usize) -> Result<NonNull<u8>, MemError> {
        let r = self.inner();
        if off > r.len || len > r.len - off {
            return Err(MemError::Bounds);
        }
        Ok(r.at(off))
    }

    /// The same for whoever writes there.
    #[inline]
    fn range_mut(&self, off: usize, len: usize) -> Result<NonNull<u8>, MemError> {
        if self.inner().frozen.load(Ordering::Acquire) {
            return Err(MemError::Access);
        }
        self.range(off, len)
    }

    /// From now on its bytes do not change: whoever writes to it by this is refused, and nobody may write to it by [`Self::as_ptr`] or a part of
    /// it. What is sent of it on a stream socket need not be copied then: the socket takes the pages themselves (`sendfile(2)`).
    ///
    /// A process that does not ignore `SIGPIPE` (Rust's do) is ended by it when it sends to a peer that is gone: that call cannot be told not to.
    ///
    /// # Errors
    /// [`MemError::Access`] for a region that is written to by receives or by peers.
    pub fn freeze(&self) -> Result<(), MemError> {
        if self.access().contains(Access::LOCAL_WRITE) {
            return Err(MemError::Access);
        }
        self.inner().frozen.store(true, Ordering::Release);
        Ok(())
    }

    /// Copies `src` into the region at `off`.
    ///
    /// # Errors
    /// [`MemError::Bounds`], for this and the other accessors; [`MemError::Access`] for those that write, after [`Self::freeze`].
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError> {
        let p = self.range_mut(off, src.len())?;
        // SAFETY: a checked range of memory that lives as long as `self`.
        unsafe { copy::store(p.as_ptr(), src.as_ptr(), src.len()) };
        Ok(())
    }

    /// Copies the bytes at `off` out. A peer may be writing them: the copy may mix old and new.
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), MemError> {
        let p = self.range(off, dst.len())?;
        // SAFETY: as in `write`.
        unsafe { copy::load(dst.as_mut_ptr(), p.as_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `off` to `to` in another region. The two may overlap.
    pub fn copy_to(&self, off: usize, dst: &Region, to: usize, len: usize) -> Result<(), MemError> {
        let (from, into) = (self.range(off, len)?, dst.range_mut(to, len)?);
        // SAFETY: two checked ranges of memory that lives as long as the regions.
        unsafe { copy::relay(into.as_ptr(), from.as_ptr(), len) };
        Ok(())
    }

    /// Copies the bytes at `off` to promised memory: as many as it has.
    pub fn copy_to_raw(&self, off: usize, dst: &RawMemory) -> Result<(), MemError> {
        let from = self.range(off, dst.len())?;
        // SAFETY: a checked range of memory that lives as long as `self`, and one that was promised.
        unsafe { copy::relay(dst.as_ptr(), from.as_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies promised memory to `off`: all of it.
    pub fn copy_from_raw(&self, off: usize, src: &RawMemory) -> Result<(), MemError> {
        let to = self.range_mut(off, src.len())?;
        // SAFETY: as in `copy_to_raw`.
        unsafe { copy::relay(to.as_ptr(), src.as_ptr(), src.len()) };
        Ok(())
    }

    /// Sets `len` bytes at `off`.
    pub fn fill(&self, off: usize, len: usize, byte: u8) -> Result<(), MemError> {
        let p = self.range_mut(off, len)?;
        // SAFETY: as in `write`.
        unsafe { copy::fill(p.as_ptr(), byte, len) };
        Ok(())
    }

    fn word(&self, off: usize) -> Result<&AtomicU64, MemError> {
        let p = self.range(off, 8)?.cast::<u64>();
        if !p.is_aligned() {
            return Err(MemError::Misaligned);
        }
        // SAFETY: checked range and alignment; the bytes are never behind a plain reference.
        Ok(unsafe { AtomicU64::from_ptr(p.as_ptr()) })
    }

    /// Reads a host-endian word at once (acquire).
    ///
    /// # Errors
    /// [`MemError::Misaligned`] unless its address is a multiple of 8; [`MemError::Bounds`].
    pub fn load_u64(&self, off: usize) -> Result<u64, MemError> {
        Ok(self.word(off)?.load(Ordering::Acquire))
    }

    /// Writes a host-endian word at once (release).
    ///
    /// # Errors
    /// As [`Self::load_u64`].
    pub fn store_u64(&self, off: usize, v: u64) -> Result<(), MemError> {
        self.range_mut(off, 8)?;
        self.word(off)?.store(v, Ordering::Release);
        Ok(())
    }

    /// Replaces a host-endian word by `swap` if it equals `compare`, as peers' atomics do; returns what was there.
    ///
    /// # Errors
    /// As [`Self::load_u64`].
    pub fn compare_swap(&self, off: usize, compare: u64, swap: u64) -> Result<u64, MemError> {
        self.range_mut(off, 8)?;
        let word = self.word(off)?;
        let (Ok(old) | Err(old)) =
            word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
        Ok(old)
    }

    /// Reads one byte (acquire), for polling a flag. Bytes of one peer write may become visible in
    /// any order, so the flag must come by a later write than what it stands for.
    pub fn load_u8(&self, off: usize) -> Result<u8, MemError> {
        let p = self.range(off, 1)?;
        // SAFETY: as in `word`; a byte is always aligned.
        Ok(unsafe { AtomicU8::from_ptr(p.as_ptr()) }.load(Ordering::Acquire))
    }

    /// Reads up to `len` bytes of a file (from `file_off`, or from its own position) into the region at
    /// `off`, without a copy in between. Returns the bytes read, 0 at the end of the file.
    ///
    /// # Errors
    /// `InvalidInput` for a range outside the region, or the system call's.
    pub fn read_from_file(
        &self,
        fd: BorrowedFd<'_>,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        let p = self.range_mut(off, len).map_err(invalid)?;
        // SAFETY: a checked range that lives as long as `self`, with no reference to it.
        unsafe { weft_sys::read_raw(fd, p.as_ptr(), len, file_off) }
    }

    /// Writes up to `len` bytes of the region at `off` to a file (at `file_off`, or at its own position).
    /// Returns the bytes written.
    ///
    /// # Errors
    /// As [`Self::read_from_file`].
    pub fn write_to_file(
        &self,
        fd: BorrowedFd<'_>,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        let p = self.range(off, len).map_err(invalid)?;
        // SAFETY: as in `read_from_file`.
        unsafe { weft_sys::write_raw(fd, p.as_ptr(), len, file_off) }
    }

    /// Sends up to `len` bytes of the region at `off` on a stream socket, never waiting; `more` says that more follows at
    /// once. Returns the bytes taken.
    ///
    /// # Errors
    /// `InvalidInput` for a range outside the region, `WouldBlock`, or the system call's (without a signal).
    pub fn send_to_socket(
        &self,
        fd: BorrowedFd<'_>,
        off: usize,
        len: usize,
        more: bool,
    ) -> io::Result<usize> {
        let p = self.range(off, len).map_err(invalid)?;
        // SAFETY: as in `read_from_file`.
        unsafe { weft_sys::send_raw(fd, &[iovec(p, len)], more) }
    }

    /// Receives up to `len` bytes from a stream socket into the region at `off`, never waiting. Returns the bytes received, 0 at
    /// the end of the stream.
    ///
    /// # Errors
    /// As [`Self::send_to_socket`].
    pub fn recv_from_socket(
        &self,
        fd: BorrowedFd<'_>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        let p = self.range_mut(off, len).map_err(invalid)?;
        // SAFETY: as in `read_from_file`.
        unsafe { weft_sys::recv_raw(fd, &[iovec(p, len)]) }
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

impl Drop for Region {
    fn drop(&mut self) {
        if self.inner.is_none() {
            return;
        }
        let domain = self.withdraw();
        let promised = self.inner().is_promised();
        if !promised && !self.holds.are_over_soon() {
            self.holds.wait();
        }
        let taken = if promised {
            self.wait(domain.as_deref(), None)
        } else {
            self.take_back(domain.as_deref())
        };
        if taken.is_err()
            && let Some(domain) = domain
            && let Some(inner) = self.inner.take()
        {
            // Nobody waits for it, and nobody else may get it before the peer is out.
            domain.keep_if_used(inner.stag, 0, inner);
        }
    }
}

/// A region that is deregistered but for those who are still in its memory. Dropping it is as dropping the region.
#[derive(Debug)]
pub struct Leaving {
    region: Region,
    domain: Option<Arc<Domain>>,
    since: Instant,
}

impl Leaving {
    /// Looks whether they have left. Peers of this host that have stayed for [`PEER_LIMIT`] are cut off.
    ///
    /// # Errors
    /// Somebody is still in the memory: past that limit, a thread of this process.
    pub fn finish(mut self) -> Result<Option<Vec<u8>>, Leaving> {
        let waited = self.since.elapsed();
        let taken = self.region.insist(self.domain.as_deref(), waited);
        taken.map_err(|_| self)
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region")
            .field("stag", &format_args!("{:#010x}", self.stag()))
            .field("iova", &format_args!("{:#x}", self.iova()))
            .field("len", &self.len())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}
