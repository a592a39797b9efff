//! Regions: the owner's handle on registered memory.
//!
//! # Safety
//!
//! Ranges are checked against the region's memory, which lives as long as the region (see the module `registered`).

use crate::domain::{Domain, PEER_LIMIT};
use crate::raw::{invalid, iovec};
use crate::registered::Registered;
use crate::table::Table;
use crate::{Access, Backing, MemError, PdId, RawMemory, copy};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weft_lock::Holds;

/// How long to wait for threads of this process that still use a region, after the peers have left it.
const SPAN_WAIT: Duration = Duration::from_secs(1);
/// Sleep between two looks, at first and later.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// The owner's handle of registered memory. Dropping it deregisters: windows bound to it become invalid, and the memory is freed when the
/// last [`crate::Span`] is dropped and no peer of this host uses it. If the memory belongs to another owner, the drop waits for that, for
/// peers up to [`PEER_LIMIT`].
pub struct Region {
    table: Table,
    /// `None` only after `deregister`.
    inner: Option<Arc<Registered>>,
    /// Once it is out of the table: threads that may be in it without a span ([`crate::Keys`]).
    holds: Holds,
}

impl Table {
    /// Registers memory: peers and scatter/gather elements name its first byte by address `iova`. A length
    /// of zero is legal.
    ///
    /// # Errors
    /// [`MemError::Limit`] when the table is full; [`MemError::NoMemory`]; [`MemError::Wrap`] when `iova` and the
    /// length pass the end of the address space; [`MemError::BadArgument`] when [`Access::ZERO_BASED`] comes with an
    /// `iova` other than 0; [`MemError::NeedsLocalWrite`] when the remote write or atomic right comes without
    /// [`Access::LOCAL_WRITE`].
    pub fn register(
        &self,
        pd: PdId,
        backing: Backing,
        iova: u64,
        access: Access,
    ) -> Result<Region, MemError> {
        if let Backing::Shared(len @ 1..) = backing
            && let Ok(lent) = self.domain(pd).and_then(|d| d.lend(len, access))
        {
            return self.enter(Registered::from_lent(pd, lent, len, iova, access)?);
        }
        self.enter(Registered::new(pd, backing, iova, access)?)
    }

    /// Registers memory of another owner. Dropping the region waits for its spans without a limit (so never drop it on a thread that holds
    /// one), and for peers of this host up to [`crate::PEER_LIMIT`].
    ///
    /// # Errors
    /// As [`Self::register`], and [`MemError::BadArgument`] for a null pointer with a length.
    ///
    /// # Safety
    /// Until the region is deregistered or dropped, `ptr..ptr + len` must stay mapped, readable and writable, and must not be accessed
    /// through plain Rust references or non-atomic Rust accesses that may race with a peer's accesses.
    pub unsafe fn register_raw(
        &self,
        pd: PdId,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Region, MemError> {
        self.enter(Registered::from_raw(pd, ptr, len, iova, access)?)
    }

    /// Registers promised memory, see [`RawMemory::new`].
    ///
    /// # Errors
    /// As [`Self::register`].
    pub fn register_promised(
        &self,
        pd: PdId,
        memory: &RawMemory,
        iova: u64,
        access: Access,
    ) -> Result<Region, MemError> {
        self.enter(Registered::from_promised(pd, memory, iova, access)?)
    }

    /// As [`Self::register_promised`], in the place of a region that has just been deregistered: with its `STag`, unless that is in use again.
    ///
    /// # Errors
    /// As [`Self::register`].
    pub fn register_again(
        &self,
        pd: PdId,
        memory: &RawMemory,
        iova: u64,
        access: Access,
        stag: u32,
    ) -> Result<Region, MemError> {
        let new = Registered::from_promised(pd, memory, iova, access)?;
        self.enter_as(new, Some(stag))
    }

    /// Registers `len` bytes from `off` of a region again, under an `STag`, an address and rights of their own, to open only these bytes to
    /// a peer for a while. The memory stays until both registrations have ended.
    ///
    /// # Errors
    /// As [`Self::register`], and [`MemError::Bounds`].
    pub fn register_part(
        &self,
        region: &Region,
        off: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Region, MemError> {
        self.enter(Registered::from_part(
            region.inner(),
            off,
            len,
            iova,
            access,
        )?)
    }

    fn enter(&self, new: Registered) -> Result<Region, MemError> {
        self.enter_as(new, None)
    }

    fn enter_as(&self, new: Registered, wish: Option<u32>) -> Result<Region, MemError> {
        Ok(Region {
            inner: Some(self.insert(new, wish)?),
            table: self.clone(),
            holds: Holds::default(),
        })
    }
}

impl Region {
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
        self.inner().len()
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

    /// The address of the bytes in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner().at(0).as_ptr()
    }

    /// Keeps its pages in memory (`mlock`) until deregistration.
    ///
    /// # Errors
    /// [`MemError::LockedMemory`] when the system's limit on locked memory forbids it.
    pub fn lock_pages(&self) -> Result<(), MemError> {
        self.inner().lock_pages()
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
    /// The memory is still in use: the value to ask again.
    pub fn retire(mut self) -> Result<Option<Vec<u8>>, PendingRelease> {
        let domain = self.withdraw();
        self.take_back(domain.as_deref())
            .map_err(|_| PendingRelease {
                region: self,
                domain,
                since: Instant::now(),
            })
    }

    /// Makes its `STag`, and windows bound to it, invalid. Returns the domain whose peers have to be queried, if any may use it.
    fn withdraw(&mut self) -> Option<Arc<Domain>> {
        let (domain, holds) = self.table.remove_region(self.inner());
        self.holds.add(holds);
        let inner = self.inner();
        // No bind can pass this, so the windows found next are all there will ever be.
        if inner.close_to_windows() {
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

    /// Waits until the memory is no longer used, at most this long (`None`: as long as a span lives).
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
        if r.implicit || off > r.len() || len > r.len() - off {
            return Err(MemError::Bounds);
        }
        Ok(r.at(off))
    }

    /// The same for writers.
    #[inline]
    fn range_mut(&self, off: usize, len: usize) -> Result<NonNull<u8>, MemError> {
        if self.inner().is_frozen() {
            return Err(MemError::Access);
        }
        self.range(off, len)
    }

    /// Freezes the region: writes through it are refused, and the memory must not be written through [`Self::as_ptr`] or a part of it. Bytes sent
    /// from it on a stream socket need not be copied then: the socket takes the pages themselves (`sendfile(2)`).
    ///
    /// A process that does not ignore `SIGPIPE` (Rust programs do) is killed when it sends to a peer that has closed, because that call has no
    /// flag against it.
    ///
    /// # Errors
    /// [`MemError::Access`] for a region that is written to by receives or by peers.
    pub fn freeze(&self) -> Result<(), MemError> {
        if self.access().contains(Access::LOCAL_WRITE) {
            return Err(MemError::Access);
        }
        self.inner().freeze();
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

    /// Replaces a host-endian word by `swap` if it equals `compare`, as peers' atomics do; returns the old value.
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

    /// Reads one byte (acquire), for polling a flag. The bytes of one Write may become visible in any order, so the peer must write the
    /// flag by a later Write than the data that it announces.
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
            // No thread waits for it, and its memory must not be reused before the peer has left it.
            domain.keep_if_used(inner.stag, 0, inner);
        }
    }
}

/// A deregistered region whose memory is still in use. Dropping it is as dropping the region.
#[derive(Debug)]
pub struct PendingRelease {
    region: Region,
    domain: Option<Arc<Domain>>,
    since: Instant,
}

impl PendingRelease {
    /// Checks whether it is still in use. Peers of this host that have used it for [`PEER_LIMIT`] are cut off.
    ///
    /// # Errors
    /// The memory is still in use: after that limit, by a thread of this process.
    pub fn finish(mut self) -> Result<Option<Vec<u8>>, PendingRelease> {
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
