//! A peer's domain, as a process of the same host sees it.
//!
//! # Safety
//!
//! Data from the peer is hostile: its table is read through atomics and each number is checked against the length of a file that cannot
//! shrink, before a byte is mapped or touched. Arenas are mapped in stretches that live while a copy holds them, and are never behind a
//! reference. The peer's own address space is reached through the kernel, which checks the addresses.

use crate::export::{self, Words};
use crate::export_addr::{ExportAddr, RW};
use crate::list::{RecvList, SendList};
use crate::table::{IndexHasher, locate};
use crate::{Access, KeySpan, copy};
use libc::iovec;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Instant;
use weft_sys::liveness::PeerLiveness;
use weft_sys::memfd::{self, Mapping};
use weft_sys::process::{pidfd_alive, vm_readv, vm_writev};

/// Bytes of one mapping of an arena.
const STRETCH: u64 = 64 << 20;
/// Stretches kept mapped.
const MAX_STRETCHES: usize = 1024;
/// From this size on, pages that were not touched yet are made present in one system call: the first Write of 64 KiB
/// takes 8 us with it and 22 us without, that of 1 MiB 90 us and 320 us.
const POPULATE: usize = 64 << 10;
/// Parts of a stretch that are remembered as present.
const GRAIN: usize = 64 << 10;
/// How often the peer's process is checked, in addition to its liveness.
const ASK_EVERY_MS: u64 = 1;

/// A peer's process, for memory that is not in arenas.
#[derive(Debug)]
pub struct Process {
    /// Its number, as this process sees it.
    pub pid: u32,
    /// A descriptor of the process.
    pub pidfd: OwnedFd,
    /// Shows whether its address space is still the one of the peer's table.
    pub liveness: PeerLiveness,
}

/// A range of a peer's memory that its exported table allows to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    place: ExportAddr,
    len: u32,
}

impl Target {
    /// The place of its first byte.
    pub fn place(&self) -> ExportAddr {
        self.place
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // a length of zero is nothing special
    pub fn len(&self) -> u32 {
        self.len
    }
}

/// A peer's [`crate::Domain`]: looks up its `STag`s, and copies.
///
/// Before [`Self::find`] the caller publishes the `STag` that it is about to use, where the peer's [`crate::Reader`] checks, and passes a
/// full fence (`SeqCst`); it withdraws that when the copy is done. Otherwise the peer may take its memory back meanwhile.
pub struct Peer {
    table: Mapping,
    arenas: SmallVec<[Arena; 3]>,
    stretches: RwLock<HashMap<u64, Slot, BuildHasherDefault<IndexHasher>>>,
    /// Counts stretches made, to know roughly which was not used for longest.
    clock: AtomicU64,
    process: OnceLock<Process>,
    started: Instant,
    /// Milliseconds after `started` when the process was last asked for.
    asked: AtomicU64,
}

struct Arena {
    fd: OwnedFd,
    len: u64,
}

/// The mapped part of a peer's arenas that its owner used last, and the `STag` of that use: a repeated use need not look either up. It
/// belongs to one queue pair of the peer.
#[derive(Default)]
pub struct LastStretch {
    stretch: Option<(u64, Arc<Stretch>)>,
    known: Known,
}

/// The meaning of an `STag`, as far as it is in this stretch.
#[derive(Clone, Copy)]
struct Known {
    /// 0: nothing.
    stag: u32,
    rights: Access,
    /// The offset of its entry in the table, and the entry's generation.
    entry: usize,
    generation: u64,
    /// The addresses of the peer that are in the stretch, and where the first of them is there.
    base: u64,
    len: u64,
    offset: usize,
}

impl Default for Known {
    fn default() -> Self {
        Known {
            stag: 0,
            rights: Access::empty(),
            entry: 0,
            generation: 0,
            base: 0,
            len: 0,
            offset: 0,
        }
    }
}

struct Slot {
    stretch: Arc<Stretch>,
    used: AtomicU64,
}

struct Stretch {
    mapping: Mapping,
    /// A bit for each grain that was made present.
    present: [AtomicU64; STRETCH as usize / GRAIN / 64],
}

impl Stretch {
    /// Makes pages present that were not touched yet.
    fn prepare(&self, offset: usize, len: usize) {
        if len < POPULATE {
            return;
        }
        let mut fresh = false;
        for grain in offset / GRAIN..=(offset + len - 1) / GRAIN {
            let bit = 1 << (grain % 64);
            let word = &self.present[grain / 64];
            if word.load(Ordering::Relaxed) & bit == 0 {
                fresh = true;
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        if fresh {
            let start = offset & !(PAGE - 1);
            let end = (offset + len)
                .next_multiple_of(PAGE)
                .min(self.mapping.len());
            self.mapping.populate(start, end - start);
        }
    }
}

fn stretch_key(space: u32, addr: u64) -> u64 {
    (u64::from(space) << 56) | (addr / STRETCH)
}

/// Good enough for advice on ranges.
const PAGE: usize = 4096;

fn unsupported() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A transfer that failed before its first byte may go another way.
fn at_start(done: usize, e: io::Error) -> io::Error {
    if done == 0 { unsupported() } else { e }
}

impl Peer {
    /// Takes a peer's descriptors, in the order of [`crate::Domain::fds`].
    ///
    /// # Errors
    /// `InvalidData` for the wrong number of them, for files that could shrink, and for a table that is not one or not
    /// in use.
    pub fn open(fds: Vec<OwnedFd>) -> io::Result<Peer> {
        if !(3..=4).contains(&fds.len()) {
            return Err(invalid("three or four files make a domain"));
        }
        let mut fds = fds.into_iter();
        let table = fds.next().ok_or_else(|| invalid("no table"))?;
        if memfd::check(&table)? < export::BYTES as u64 {
            return Err(invalid("the table is too short"));
        }
        let peer = Peer {
            table: Mapping::new(&table, 0, export::BYTES, false)?,
            arenas: fds
                .map(|fd| {
                    let len = memfd::check(&fd)?;
                    Ok(Arena { fd, len })
                })
                .collect::<io::Result<_>>()?,
            stretches: RwLock::default(),
            clock: AtomicU64::new(0),
            process: OnceLock::new(),
            started: Instant::now(),
            asked: AtomicU64::new(0),
        };
        match peer.id() {
            Some(_) => Ok(peer),
            None => Err(invalid("not a table in use")),
        }
    }

    fn words(&self) -> Words<'_> {
        // SAFETY: a mapping of the right size that lives as long as `self`.
        unsafe { Words::of(self.table.as_ptr()) }
    }

    /// The name of its domain; `None` if the domain has ended.
    pub fn id(&self) -> Option<[u8; 16]> {
        self.words().id()
    }

    /// Allows memory of the peer's process to be used. Only the first call counts.
    pub fn set_process(&self, process: Process) {
        let _ = self.process.set(process);
    }

    /// Whether the peer's address space exists; true while no process is set.
    #[inline]
    pub fn alive(&self) -> bool {
        self.process.get().is_none_or(|p| p.liveness.beats())
    }

    /// Reads 16 bytes at an address of the peer's process: whether that works at all, and whether it is
    /// the right process.
    pub fn probe(&self, addr: u64, cookie: &[u8; 16]) -> bool {
        let mut bytes = [0; 16];
        let mut list = RecvList::new();
        list.push_buf(&mut bytes);
        let place = ExportAddr { space: 0, addr };
        self.pull(place, &mut list, 0, 16).is_ok() && bytes == *cookie
    }

    /// Looks an `STag` up in the peer's table, for its queue pair `qp`. `None` when the table does not know it, or does
    /// not allow the rights and the range, or when this process cannot reach the memory: then the peer is asked to do it.
    #[inline]
    pub fn find(&self, qp: u32, stag: u32, to: u64, len: u32, need: Access) -> Option<Target> {
        let e = self.words().look(stag)?;
        if (e.qp != 0 && e.qp != qp) || !e.rights.contains(need) {
            return None;
        }
        let at = locate(e.base, e.len, to, len.into()).ok()?;
        let place = ExportAddr {
            addr: e.place.addr.checked_add(at)?,
            ..e.place
        };
        let end = place.addr.checked_add(len.into())?;
        if place.space == 0 {
            self.process.get()?;
        } else {
            let arena = self.arena(place.space)?;
            let change = need.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            if end > arena.len || (change && place.space != RW) {
                return None;
            }
        }
        Some(Target { place, len })
    }

    #[inline]
    fn arena(&self, space: u32) -> Option<&Arena> {
        self.arenas.get((space as usize).checked_sub(1)?)
    }

    /// The stretch with this byte of an arena.
    fn stretch<'a>(
        &self,
        space: u32,
        addr: u64,
        last: &'a mut LastStretch,
    ) -> io::Result<&'a Stretch> {
        let key = stretch_key(space, addr);
        if last.stretch.as_ref().is_none_or(|(known, _)| *known != key) {
            last.known.stag = 0;
            last.stretch = Some((key, self.find_stretch(key, space, addr)?));
        }
        match &last.stretch {
            Some((_, stretch)) => Ok(stretch),
            None => Err(unsupported()),
        }
    }

    /// Remember what `stag` means to the peer's queue pair `qp`, as far as it is in the last stretch.
    fn remember(&self, qp: u32, stag: u32, last: &mut LastStretch) {
        let LastStretch {
            stretch: Some((key, stretch)),
            known,
        } = last
        else {
            return;
        };
        known.stag = 0;
        let Some((entry, generation, e)) = self.words().look_at(stag) else {
            return;
        };
        let ExportAddr { space, addr } = e.place;
        if (e.qp != 0 && e.qp != qp) || space != RW {
            return;
        }
        // The part of the region that is in the stretch, in addresses of the arena.
        let start = (*key & (u64::MAX >> 8)) * STRETCH;
        let (from, to) = (
            addr.max(start),
            addr.saturating_add(e.len)
                .min(start.saturating_add(stretch.mapping.len() as u64)),
        );
        let base = e.base.checked_add(from.saturating_sub(addr));
        let (Some(base), true, true) = (base, from < to, *key == stretch_key(space, from)) else {
            return;
        };
        *known = Known {
            stag,
            rights: e.rights,
            entry,
            generation,
            base,
            len: to - from,
            offset: (from - start) as usize,
        };
    }

    /// Copies to the peer's memory with the cached data of the last use; false: nothing was done. As for [`Self::find`], the caller has
    /// published the `STag` before.
    #[inline]
    pub fn write_known(&self, last: &LastStretch, stag: u32, to: u64, from: &KeySpan<'_>) -> bool {
        let known = &last.known;
        let Some((_, stretch)) = &last.stretch else {
            return false;
        };
        let start = to.wrapping_sub(known.base);
        let len = from.len();
        if known.stag != stag
            || !known.rights.contains(Access::REMOTE_WRITE)
            || len >= POPULATE
            || start > known.len
            || len as u64 > known.len - start
            || !self.words().is_still(known.entry, known.generation)
        {
            return false;
        }
        // SAFETY: `offset..offset + len` is inside the stretch since it was remembered, and the bytes are inside that; the span is of
        // a hold. Both are reached by racing copies only.
        unsafe {
            let to = stretch.mapping.as_ptr().add(known.offset + start as usize);
            copy::relay(to, from.start(), len);
        }
        true
    }

    fn find_stretch(&self, key: u64, space: u32, addr: u64) -> io::Result<Arc<Stretch>> {
        let now = self.clock.load(Ordering::Relaxed);
        let stretches = self
            .stretches
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = stretches.get(&key) {
            if slot.used.load(Ordering::Relaxed) != now {
                slot.used.store(now, Ordering::Relaxed);
            }
            return Ok(slot.stretch.clone());
        }
        drop(stretches);
        let arena = self.arena(space).ok_or_else(unsupported)?;
        let start = addr / STRETCH * STRETCH;
        let len = arena.len.saturating_sub(start).min(STRETCH);
        let stretch = Arc::new(Stretch {
            mapping: Mapping::new(&arena.fd, start, len as usize, space == RW)?,
            present: [const { AtomicU64::new(0) }; _],
        });
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        let mut stretches = self
            .stretches
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if stretches.len() >= MAX_STRETCHES {
            let used = |s: &Slot| s.used.load(Ordering::Relaxed);
            let oldest = stretches
                .iter()
                .min_by_key(|(_, s)| used(s))
                .map(|(k, _)| *k);
            oldest.and_then(|k| stretches.remove(&k));
        }
        let slot = Slot {
            stretch: stretch.clone(),
            used: AtomicU64::new(now),
        };
        stretches.insert(key, slot);
        Ok(stretch)
    }

    /// Calls `f(address, bytes done before, bytes)` for each part of a range of an arena.
    fn in_arena(
        &self,
        place: ExportAddr,
        n: usize,
        write: bool,
        last: &mut LastStretch,
        mut f: impl FnMut(*mut u8, usize, usize),
    ) -> io::Result<()> {
        let arena = self.arena(place.space).ok_or_else(unsupported)?;
        let end = place.addr.checked_add(n as u64);
        if end.is_none_or(|end| end > arena.len) {
            return Err(invalid("outside the arena"));
        }
        if write && place.space != RW {
            return Err(unsupported());
        }
        let mut done = 0;
        while done < n {
            let addr = place.addr + done as u64;
            let stretch = self
                .stretch(place.space, addr, last)
                .map_err(|e| at_start(done, e))?;
            let offset = (addr % STRETCH) as usize;
            let now = (stretch.mapping.len() - offset).min(n - done);
            stretch.prepare(offset, now);
            // SAFETY: `offset` is inside the mapping, which holds `now` bytes more.
            f(unsafe { stretch.mapping.as_ptr().add(offset) }, done, now);
            done += now;
        }
        Ok(())
    }

    /// The process, if it is alive as far as is known.
    fn process(&self) -> io::Result<&Process> {
        let process = self.process.get().ok_or_else(unsupported)?;
        let dead = || io::Error::new(io::ErrorKind::NotConnected, "the peer's process is gone");
        let now = self.started.elapsed().as_millis() as u64 + 1;
        let asked = self.asked.load(Ordering::Relaxed);
        if now >= asked + ASK_EVERY_MS {
            if !pidfd_alive(&process.pidfd) {
                return Err(dead());
            }
            self.asked.store(now, Ordering::Relaxed);
        }
        // Last: this thread may have been stopped for long at the end of that system call.
        if !process.liveness.beats() {
            return Err(dead());
        }
        Ok(process)
    }

    /// Moves the bytes of `local` to or from an address of the peer's process, by `call`.
    fn by_kernel(
        &self,
        mut local: &mut [iovec],
        mut addr: u64,
        mut call: impl FnMut(u32, &[iovec], &[iovec]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut done = 0;
        while !local.is_empty() {
            let batch = &local[..local.len().min(weft_sys::raw::MAX_IOV)];
            let len = batch.iter().map(|v| v.iov_len).sum();
            let at = usize::try_from(addr).map_err(|_| invalid("not an address"))?;
            let remote = iovec {
                iov_base: std::ptr::without_provenance_mut(at),
                iov_len: len,
            };
            let n = match call(self.process()?.pid, batch, &[remote]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => n.min(len),
                Err(e) => {
                    return Err(match e.raw_os_error() {
                        Some(libc::EPERM | libc::ENOSYS) => at_start(done, e),
                        _ => e,
                    });
                }
            };
            done += n;
            addr = addr.wrapping_add(n as u64);
            let mut left = n;
            while let Some(first) = local.first_mut() {
                if left < first.iov_len {
                    first.iov_base = first.iov_base.wrapping_byte_add(left);
                    first.iov_len -= left;
                    break;
                }
                left -= first.iov_len;
                local = &mut local[1..];
            }
        }
        Ok(())
    }

    /// Copies the list's bytes to the target, which may be longer.
    ///
    /// # Errors
    /// `Unsupported`: nothing was written, use the ring. Other errors end the connection: `InvalidInput` (the list is longer than the
    /// target), `EFAULT`, `NotConnected` and `ESRCH` (the peer's process has ended), `InvalidData` (the peer's numbers are wrong).
    pub fn write(&self, target: &Target, from: &SendList<'_>) -> io::Result<()> {
        self.write_part(
            target,
            from,
            0,
            from.len_bytes(),
            &mut LastStretch::default(),
        )
    }

    /// As [`Self::write`], of `n` bytes of the list from its byte `skip` on, by an `STag` of the peer's queue pair `qp`, which is remembered for
    /// [`Self::write_known`]. `last` is kept by the caller, for this peer only.
    ///
    /// # Errors
    /// As there.
    pub fn write_by(
        &self,
        (qp, stag): (u32, u32),
        target: &Target,
        from: &SendList<'_>,
        (skip, n): (usize, usize),
        last: &mut LastStretch,
    ) -> io::Result<()> {
        self.write_part(target, from, skip, n, last)?;
        if target.place.space == RW && n < POPULATE {
            self.remember(qp, stag, last);
        }
        Ok(())
    }

    fn write_part(
        &self,
        target: &Target,
        from: &SendList<'_>,
        skip: usize,
        n: usize,
        last: &mut LastStretch,
    ) -> io::Result<()> {
        let there = from.len_bytes().checked_sub(skip);
        if n as u64 > target.len.into() || there.is_none_or(|there| n > there) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if target.place.space != 0 {
            // SAFETY: the peer's memory is mapped for the call, and reached by racing copies and atomics only.
            return self.in_arena(target.place, n, true, last, |to, done, now| unsafe {
                from.copy_range_to(skip + done, to, now);
            });
        }
        let mut local: SmallVec<[iovec; 64]> = from.ranges(skip, n).collect();
        self.by_kernel(&mut local, target.place.addr, |pid, local, remote| {
            // SAFETY: the list keeps its ranges.
            unsafe { vm_writev(pid, local, remote) }
        })
    }

    /// Fills the list from the target's start; the target may be longer.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn read(&self, target: &Target, into: &mut RecvList<'_>) -> io::Result<()> {
        let n = into.len_bytes();
        if n as u64 > target.len.into() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.pull(target.place, into, 0, n)
    }

    /// Fills `n` bytes of the list, from its byte `skip` on, from the peer's memory.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn pull(
        &self,
        place: ExportAddr,
        into: &mut RecvList<'_>,
        skip: usize,
        n: usize,
    ) -> io::Result<()> {
        if skip > into.len_bytes() || n > into.len_bytes() - skip {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if place.space != 0 {
            let last = &mut LastStretch::default();
            return self.in_arena(place, n, false, last, |from, done, now| {
                // SAFETY: as in `write`.
                unsafe { into.fill_range_from(skip + done, from, now) };
            });
        }
        let mut local: SmallVec<[iovec; 64]> = into.ranges(skip, n).collect();
        self.by_kernel(&mut local, place.addr, |pid, local, remote| {
            // SAFETY: the list keeps its ranges, to which no other reference exists while it is borrowed.
            unsafe { vm_readv(pid, local, remote) }
        })
    }

    /// Runs an atomic on the target's first eight bytes.
    fn atomic(&self, target: &Target, f: impl FnOnce(&AtomicU64) -> u64) -> Option<u64> {
        let ExportAddr { space, addr } = target.place;
        if space != RW || addr % 8 != 0 || target.len < 8 {
            return None;
        }
        let mut f = Some(f);
        let mut old = None;
        let last = &mut LastStretch::default();
        self.in_arena(target.place, 8, true, last, |p, _, _| {
            #[allow(clippy::cast_ptr_alignment)] // checked above; stretches begin on pages
            let p = p.cast::<u64>();
            // SAFETY: eight mapped bytes (an aligned word is in one stretch), never behind a plain reference.
            old = f.take().map(|f| f(unsafe { AtomicU64::from_ptr(p) }));
        })
        .ok()?;
        old
    }

    /// Adds to the host-endian word at the target's start, atomically also with respect to its owner; returns the old value. `None` unless
    /// the word is in an arena that peers may write, and at a multiple of 8: then the peer has to do it. The same for the other atomics.
    pub fn fetch_add(&self, target: &Target, v: u64) -> Option<u64> {
        self.atomic(target, |w| w.fetch_add(v, Ordering::SeqCst))
    }

    /// Replaces the word; returns the old value.
    pub fn swap(&self, target: &Target, v: u64) -> Option<u64> {
        self.atomic(target, |w| w.swap(v, Ordering::SeqCst))
    }

    /// Replaces the word by `swap` if it equals `compare`; returns the old value.
    pub fn compare_swap(&self, target: &Target, compare: u64, swap: u64) -> Option<u64> {
        self.atomic(target, |w| {
            let (Ok(old) | Err(old)) =
                w.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
            old
        })
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("arenas", &self.arenas.len())
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}
