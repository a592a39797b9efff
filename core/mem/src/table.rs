//! The `STag` table (translation and protection table) of one device.

use crate::domain::Domain;
use crate::export;
use crate::registered::Registered;
use crate::{Access, MemError, PdId, Span};
use std::collections::{HashMap, VecDeque, hash_map};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;
use weft_lock::{Generation, Holds};

/// One for each value of an `STag`'s top 4 bits.
const SHARDS: usize = 16;
/// More would leave too few of the 2^24 indices to draw free ones from quickly.
const MAX_ENTRIES: usize = 1 << 23;
/// Freed indices that are not given again yet.
const RESTING: usize = 256;

/// Sleep between two looks at a peer that is waited for.
const NAP: Duration = Duration::from_micros(100);

/// The `STag` table of one device. Cloning gives another handle on the same table.
///
/// An `STag` is a 24-bit index drawn at random and an 8-bit key below it (RFC 5040 section 8.1.1:
/// hard to predict); a lookup must match all 32 bits. Indices freed lately are not given again.
///
/// All methods take any thread; a lookup takes one of 16 reader locks for the time of a hash lookup.
#[derive(Clone)]
pub struct Table(Arc<Inner>);

struct Inner {
    /// Ends whenever a region is taken out: see [`crate::Keys`].
    generation: Generation,
    shards: [RwLock<Shard>; SHARDS],
    entries: AtomicUsize,
    max: usize,
    indices: Mutex<Indices>,
    /// The exported domains. May be locked while a shard's lock is held.
    domains: RwLock<HashMap<PdId, Weak<Domain>>>,
}

type Shard = HashMap<u32, Entry, BuildHasherDefault<IndexHasher>>;

enum Entry {
    Region(Arc<Registered>),
    Window(Box<WindowState>),
}

/// The two types of memory windows that the verbs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowType {
    /// It is valid for every queue pair of its domain, can be bound again while it is bound, and peers cannot invalidate it.
    Type1,
    /// It is for the queue pair that it is bound on (2B of the specification), until it is invalidated.
    Type2,
}

struct WindowState {
    pd: PdId,
    kind: WindowType,
    /// The index and the key of the latest bind.
    stag: u32,
    bound: Option<Binding>,
}

struct Binding {
    region: Arc<Registered>,
    /// The queue pair whose stream may use it; none: all of the domain.
    qp: Option<u32>,
    /// The address of its first byte, as peers count.
    base: u64,
    /// Its start in the region.
    start: usize,
    len: u64,
    access: Access,
}

/// Indices are random already; this only spreads them over the bits that the map looks at.
#[derive(Default)]
pub(crate) struct IndexHasher(u64);

impl Hasher for IndexHasher {
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32((*b).into());
        }
    }

    fn write_u32(&mut self, v: u32) {
        self.write_u64(v.into());
    }

    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0 ^ v).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Random `STag`s, and the indices that rest.
#[derive(Default)]
struct Indices {
    drawn: Vec<u32>,
    resting: VecDeque<u32>,
}

impl Indices {
    /// A random `STag` whose index is neither 0 nor resting.
    fn draw(&mut self) -> Result<u32, MemError> {
        loop {
            let Some(stag) = self.drawn.pop() else {
                let mut bytes = [0; 128];
                getrandom::fill(&mut bytes).map_err(|_| MemError::NoRandom)?;
                let (words, _) = bytes.as_chunks();
                self.drawn
                    .extend(words.iter().map(|w| u32::from_ne_bytes(*w)));
                continue;
            };
            // STag 0 has a meaning of its own in the verbs.
            if index(stag) != 0 && !self.resting.contains(&index(stag)) {
                return Ok(stag);
            }
        }
    }

    fn rest(&mut self, index: u32) {
        if self.resting.len() == RESTING {
            self.resting.pop_front();
        }
        self.resting.push_back(index);
    }
}

#[inline]
fn index(stag: u32) -> u32 {
    stag >> 8
}

/// The offset of a range in a region or window, if it is inside.
#[inline]
pub(crate) fn locate(base: u64, size: u64, addr: u64, len: u64) -> Result<u64, MemError> {
    if addr.checked_add(len.saturating_sub(1)).is_none() {
        return Err(MemError::Wrap);
    }
    let start = addr.checked_sub(base).ok_or(MemError::Bounds)?;
    if start > size || len > size - start {
        return Err(MemError::Bounds);
    }
    Ok(start)
}

impl Inner {
    #[inline]
    fn shard(&self, stag: u32) -> &RwLock<Shard> {
        // By the top bits: the maps choose their buckets by the low ones.
        &self.shards[(stag >> 28) as usize]
    }

    #[inline]
    fn read(&self, stag: u32) -> RwLockReadGuard<'_, Shard> {
        let shard = self.shard(stag).read();
        shard.unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, stag: u32) -> RwLockWriteGuard<'_, Shard> {
        let shard = self.shard(stag).write();
        shard.unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self) -> Result<u32, MemError> {
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        indices.draw()
    }

    /// Enters what `make` makes for a free `STag`: `wish`, if that is free.
    fn insert<T>(
        &self,
        mut wish: Option<u32>,
        make: impl FnOnce(u32) -> (Entry, T),
    ) -> Result<T, MemError> {
        self.entries
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < self.max).then_some(n + 1)
            })
            .map_err(|_| MemError::Limit)?;
        loop {
            let drawn = || {
                self.draw().inspect_err(|_| {
                    self.entries.fetch_sub(1, Ordering::Relaxed);
                })
            };
            let stag = wish.take().map_or_else(drawn, Ok)?;
            if let hash_map::Entry::Vacant(free) = self.write(stag).entry(index(stag)) {
                let (entry, out) = make(stag);
                free.insert(entry);
                return Ok(out);
            }
        }
    }

    /// The exported domain of a protection domain, if there is one. Not in a child of `fork`, which must leave that to its parent.
    fn shown(&self, pd: PdId) -> Option<Arc<Domain>> {
        let domains = self.domains.read().unwrap_or_else(PoisonError::into_inner);
        let domain = domains.get(&pd)?.upgrade()?;
        drop(domains);
        domain.is_ours().then_some(domain)
    }

    /// Removes an entry, also from the exported table. Returns the entry, and the domain whose peers have to be waited for.
    fn remove(&self, stag: u32) -> Option<(Entry, Option<Arc<Domain>>)> {
        let mut shard = self.write(stag);
        let entry = shard.remove(&index(stag))?;
        let domain = match &entry {
            Entry::Region(r) => self.retract(r.pd, r.stag),
            Entry::Window(w) => self.retract(w.pd, w.stag),
        };
        if shard.capacity() > 64 && shard.len() < shard.capacity() / 8 {
            let room = shard.len() * 2;
            shard.shrink_to(room);
        }
        drop(shard);
        self.entries.fetch_sub(1, Ordering::Relaxed);
        let mut indices = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        indices.rest(index(stag));
        Some((entry, domain))
    }

    /// Hides an `STag` from peers of this host. Called under the lock of the entry's shard, as
    /// [`Entry::show`] is, so that what peers see follows what holds.
    fn retract(&self, pd: PdId, stag: u32) -> Option<Arc<Domain>> {
        let domain = self.shown(pd)?;
        domain.retract(stag);
        Some(domain)
    }
}

impl Entry {
    /// Shows a region or a bound window to peers of this host.
    fn show(&self, domain: &Domain) {
        match self {
            // Peers copy through the kernel, so that unmapped memory is an error and not a fault of theirs.
            Entry::Region(r) if r.implicit => {}
            Entry::Region(r) => domain.publish(&export::Entry {
                stag: r.stag,
                qp: 0,
                base: r.iova,
                len: r.len() as u64,
                rights: r.access,
                place: r.place(0),
            }),
            Entry::Window(w) => {
                // A queue pair 0 would read as any.
                if let Some(b) = w
                    .bound
                    .as_ref()
                    .filter(|b| b.qp != Some(0) && !b.region.implicit)
                {
                    domain.publish(&export::Entry {
                        stag: w.stag,
                        qp: b.qp.unwrap_or(0),
                        base: b.base,
                        len: b.len,
                        rights: b.access,
                        place: b.region.place(b.start),
                    });
                }
            }
        }
    }
}

impl Table {
    /// An empty table for at most `max_regions` regions and windows together (and never more than
    /// 2^23).
    pub fn new(max_regions: usize) -> Table {
        Table(Arc::new(Inner {
            generation: Generation::default(),
            shards: std::array::from_fn(|_| RwLock::default()),
            entries: AtomicUsize::new(0),
            max: max_regions.min(MAX_ENTRIES),
            indices: Mutex::default(),
            domains: RwLock::default(),
        }))
    }

    /// The exported domain of a protection domain: created on first need, with all present registrations and windows.
    ///
    /// # Errors
    /// The errors of creating memory files: `Unsupported` in a child of `fork` whose parent created it, and the system's error if they
    /// cannot be created (old kernels, no `/proc`, `RLIMIT_FSIZE`, too many open files).
    pub fn domain(&self, pd: PdId) -> io::Result<Arc<Domain>> {
        let lock = || {
            let domains = self.0.domains.write();
            domains.unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(domain) = self.0.shown(pd) {
            return Ok(domain);
        }
        // Both may be dropped below, and the drop of neither may see the lock.
        let (new, old);
        {
            let mut domains = lock();
            old = domains.get(&pd).and_then(Weak::upgrade);
            match &old {
                Some(domain) if domain.is_ours() => return Ok(domain.clone()),
                Some(_) => return Err(io::ErrorKind::Unsupported.into()),
                None => {}
            }
            new = Arc::new(Domain::new()?);
            domains.retain(|_, d| d.strong_count() != 0);
            domains.insert(pd, Arc::downgrade(&new));
        }
        // Later registrations export themselves.
        for shard in &self.0.shards {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            for entry in shard.values() {
                let of = match entry {
                    Entry::Region(r) => r.pd,
                    Entry::Window(w) => w.pd,
                };
                if of == pd {
                    entry.show(&new);
                }
            }
        }
        Ok(new)
    }

    /// Takes a region in, under this `STag` if it is free.
    pub(crate) fn insert(
        &self,
        mut new: Registered,
        wish: Option<u32>,
    ) -> Result<Arc<Registered>, MemError> {
        self.0
            .insert(wish.filter(|stag| index(*stag) != 0), |stag| {
                new.stag = stag;
                let inner = Arc::new(new);
                let entry = Entry::Region(inner.clone());
                if let Some(domain) = self.0.shown(inner.pd) {
                    entry.show(&domain);
                }
                (entry, inner)
            })
    }

    /// Removes a region; may be repeated. Returns the domain whose peers have to be waited for, and the holds of threads of this process.
    pub(crate) fn remove_region(&self, region: &Arc<Registered>) -> (Option<Arc<Domain>>, Holds) {
        let here = match self.0.read(region.stag).get(&index(region.stag)) {
            Some(Entry::Region(r)) => Arc::ptr_eq(r, region),
            _ => false,
        };
        if here {
            let domain = self.0.remove(region.stag).and_then(|removed| removed.1);
            (domain, self.0.generation.end(region.stag))
        } else {
            (self.0.shown(region.pd), Holds::default())
        }
    }

    /// Unbinds every window of a region that is going away. What peers of this host still use through one is kept.
    pub(crate) fn unbind_all(&self, region: &Arc<Registered>) {
        let domain = self.0.shown(region.pd);
        let mut stags = Vec::new();
        for shard in &self.0.shards {
            let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
            for entry in shard.values_mut() {
                if let Entry::Window(w) = entry
                    && let Some(bound) = w.bound.take_if(|b| Arc::ptr_eq(&b.region, region))
                {
                    region.drop_window();
                    if let Some(domain) = &domain {
                        domain.retract(w.stag);
                        stags.push((w.stag, bound.qp));
                    }
                }
            }
        }
        if let Some(domain) = domain {
            for (stag, qp) in stags {
                domain.keep_if_used(stag, qp.unwrap_or(0), region.clone());
            }
        }
    }

    /// Cuts off the peers of this host that were told to fetch bytes of a region, and have not finished.
    pub(crate) fn cut_off_borrowers(&self, region: &Registered) {
        // Of an implicit region peers borrow nothing.
        if let Some(domain) = self.0.shown(region.pd).filter(|_| !region.implicit) {
            domain.cut_off_borrowers(region.place(0), region.len() as u64);
        }
    }

    /// Checks a scatter/gather element of the owner: `STag`, protection domain, rights, bounds, in
    /// this order. `need` is [`Access::LOCAL_WRITE`] to write, empty to read. Windows have no
    /// local use.
    ///
    /// # Errors
    /// [`MemError::InvalidStag`], [`MemError::Pd`], [`MemError::Access`], [`MemError::Wrap`],
    /// [`MemError::Bounds`].
    #[inline]
    pub fn local(
        &self,
        pd: PdId,
        stag: u32,
        addr: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        match self.0.read(stag).get(&index(stag)) {
            Some(Entry::Region(r)) => region_span(r, pd, stag, addr, len, need),
            _ => Err(MemError::InvalidStag),
        }
    }

    #[inline]
    pub(crate) fn generation(&self) -> &Generation {
        &self.0.generation
    }

    /// Calls `f` with a region that cannot leave the table meanwhile.
    pub(crate) fn with_region<R>(&self, stag: u32, f: impl FnOnce(&Registered) -> R) -> Option<R> {
        match self.0.read(stag).get(&index(stag)) {
            Some(Entry::Region(r)) if r.stag == stag => Some(f(r)),
            _ => None,
        }
    }

    /// As [`Self::local`] without a use, but that the pages are made present if `fault` says so.
    ///
    /// # Errors
    /// As [`Self::local`]; [`MemError::Bounds`] too where memory that was promised is not there.
    pub fn prefetch(
        &self,
        pd: PdId,
        stag: u32,
        (addr, len): (u64, u32),
        need: Access,
        fault: bool,
    ) -> Result<(), MemError> {
        let region = match self.0.read(stag).get(&index(stag)) {
            Some(Entry::Region(r)) if r.stag == stag => r.clone(),
            _ => return Err(MemError::InvalidStag),
        };
        if region.pd != pd {
            return Err(MemError::Pd);
        }
        if !region.access.contains(need) {
            return Err(MemError::Access);
        }
        let at = locate(region.iova, region.len() as u64, addr, len.into())?;
        if fault {
            region.reach(at as usize, len as usize, need)?;
        }
        Ok(())
    }

    /// As [`Self::local`] to read, with the copy: appends the bytes to `out`. For small ranges: the table is locked (for writers) during
    /// the copy, and the region is not kept.
    ///
    /// # Errors
    /// As [`Self::local`].
    #[inline]
    pub fn copy_local_out(
        &self,
        pd: PdId,
        stag: u32,
        addr: u64,
        len: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), MemError> {
        let shard = self.0.read(stag);
        let Some(Entry::Region(r)) = shard.get(&index(stag)) else {
            return Err(MemError::InvalidStag);
        };
        let at = region_range(r, pd, stag, addr, len, Access::empty())?;
        r.append_to(at, len as usize, out);
        Ok(())
    }

    /// Checks a peer's request (RFC 5040 section 7.2, RFC 5041 section 7.1): `STag`, protection domain and queue pair, rights, bounds, in
    /// this order. A window of type 2 is valid only for the queue pair on which it was bound.
    ///
    /// # Errors
    /// As [`Self::local`]; such a window of another queue pair is [`MemError::Pd`].
    #[inline]
    pub fn remote(
        &self,
        pd: PdId,
        qp: u32,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        match self.0.read(stag).get(&index(stag)) {
            Some(Entry::Region(r)) => region_span(r, pd, stag, to, len, need),
            Some(Entry::Window(w)) => {
                let bound = w.check(pd, qp, stag)?;
                if !bound.access.contains(need) {
                    return Err(MemError::Access);
                }
                let at = locate(bound.base, bound.len, to, len.into())?;
                let start = bound.start + at as usize;
                if bound.region.implicit {
                    bound.region.reach(start, len as usize, need)?;
                }
                Ok(Span::new(bound.region.clone(), start, len as usize))
            }
            None => Err(MemError::InvalidStag),
        }
    }

    /// Unbinds a window, as Send with Invalidate (RFC 5040 section 5.3) and Local Invalidate do, without waiting. Spans made
    /// through it before live on.
    ///
    /// # Errors
    /// [`MemError::InUse`] when a peer of this host uses it itself just now: the window is unbound all the same, see [`Self::is_overdue`].
    /// [`MemError::InvalidStag`] (also for an unbound window), [`MemError::Pd`] for another
    /// domain's or queue pair's window, [`MemError::CannotInvalidate`] for a region, and for a window of type 1.
    pub fn invalidate(&self, pd: PdId, qp: u32, stag: u32) -> Result<(), MemError> {
        let (region, domain) = match self.0.write(stag).get_mut(&index(stag)) {
            Some(Entry::Region(r)) if r.stag == stag => {
                return Err(if r.pd == pd {
                    MemError::CannotInvalidate
                } else {
                    MemError::Pd
                });
            }
            Some(Entry::Window(w)) => {
                w.check(pd, qp, stag)?;
                if w.kind == WindowType::Type1 {
                    return Err(MemError::CannotInvalidate);
                }
                let domain = self.0.retract(pd, stag);
                (w.unbind(), domain)
            }
            _ => return Err(MemError::InvalidStag),
        };
        if let (Some((region, qp)), Some(domain)) = (region, domain)
            && domain.keep_if_used(stag, qp, region)
        {
            return Err(MemError::InUse);
        }
        Ok(())
    }

    /// Whether a peer of this host still uses an unbound window. After [`crate::PEER_LIMIT`] it is cut off.
    pub fn is_overdue(&self, pd: PdId, stag: u32) -> bool {
        let domain = self.0.shown(pd);
        domain.is_some_and(|domain| domain.is_overdue(stag))
    }

    /// The `STag` of a window now, given one that it has had.
    pub fn window_stag(&self, stag: u32) -> Option<u32> {
        match self.0.read(stag).get(&index(stag)) {
            Some(Entry::Window(window)) => Some(window.stag),
            _ => None,
        }
    }

    /// A new window, bound to nothing: its `STag` is invalid until [`Self::bind`].
    ///
    /// # Errors
    /// [`MemError::Limit`].
    pub fn alloc_window(&self, pd: PdId, kind: WindowType) -> Result<Window, MemError> {
        let stag = self.0.insert(None, |stag| {
            let state = WindowState {
                pd,
                kind,
                stag,
                bound: None,
            };
            (Entry::Window(Box::new(state)), stag)
        })?;
        Ok(Window {
            table: self.clone(),
            pd,
            stag,
        })
    }

    /// Binds a window to `len` bytes of a region at `addr`, for the stream of queue pair `qp` or (type 1) for all of the
    /// domain. Only the index of `window_stag` counts; the new `STag`, which is returned, has `new_key`
    /// as its low 8 bits. Peers name the bytes as in the region, or from 0 with
    /// [`Access::ZERO_BASED`]. `pd` is the queue pair's domain.
    ///
    /// Binding a bound window of type 1 again is like invalidating it first: spans made through it stay valid, and a peer of this host may
    /// use it for a while. With a length of 0 it is bound to nothing, and the region is ignored.
    ///
    /// # Errors
    /// [`MemError::InvalidStag`] when either is unknown; [`MemError::InUse`] for a bound window of type 2
    /// (invalidate it first), and when a peer of this host goes on using the old `STag` of one of type 1: it is bound anew all the
    /// same, see [`Self::is_overdue`];
    /// [`MemError::Pd`] when the three are not of one domain;
    /// [`MemError::Access`] when the region lacks [`Access::MW_BIND`], or [`Access::LOCAL_WRITE`] where the
    /// window gives peers the right to change; [`MemError::Wrap`], [`MemError::Bounds`];
    /// [`MemError::BadArgument`] for no bytes (type 2), rights that windows do not have, or the key that a bound window has.
    #[allow(clippy::too_many_arguments)] // the verbs' own list
    pub fn bind(
        &self,
        pd: PdId,
        window_stag: u32,
        new_key: u8,
        qp: u32,
        region_stag: u32,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<u32, MemError> {
        if access.intersects(Access::LOCAL_WRITE | Access::MW_BIND) {
            return Err(MemError::BadArgument);
        }
        let region = match self.0.read(region_stag).get(&index(region_stag)) {
            Some(Entry::Region(r)) if r.stag == region_stag => Ok(r.clone()),
            _ => Err(MemError::InvalidStag),
        };
        let mut shard = self.0.write(window_stag);
        let Some(Entry::Window(window)) = shard.get_mut(&index(window_stag)) else {
            return Err(MemError::InvalidStag);
        };
        let old = window.stag;
        let stag = index(window_stag) << 8 | u32::from(new_key);
        window.may_bind(pd, stag, len)?;
        let bound = if len == 0 {
            None
        } else {
            let qp = (window.kind == WindowType::Type2).then_some(qp);
            Some(Binding::new(pd, qp, region?, addr, len, access)?)
        };
        let domain = self.0.shown(pd);
        let before = window.unbind();
        if let (Some(_), Some(domain)) = (&before, &domain) {
            domain.retract(old);
        }
        window.stag = stag;
        window.bound = bound;
        if let Some(domain) = &domain
            && let Some(entry) = shard.get(&index(window_stag))
        {
            entry.show(domain);
        }
        drop(shard);
        if let (Some((region, qp)), Some(domain)) = (before, domain)
            && domain.keep_if_used(old, qp, region)
        {
            return Err(MemError::InUse);
        }
        Ok(stag)
    }
}

impl Binding {
    /// To a part of a region, which counts it.
    fn new(
        pd: PdId,
        qp: Option<u32>,
        region: Arc<Registered>,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<Binding, MemError> {
        if region.pd != pd {
            return Err(MemError::Pd);
        }
        if !region.access.contains(Access::MW_BIND)
            || (access.needs_local_write() && !region.access.contains(Access::LOCAL_WRITE))
        {
            return Err(MemError::Access);
        }
        let start = locate(region.iova, region.len() as u64, addr, len)? as usize;
        region.add_window()?;
        let zero_based = access.contains(Access::ZERO_BASED);
        Ok(Binding {
            region,
            qp,
            base: if zero_based { 0 } else { addr },
            start,
            len,
            access,
        })
    }
}

/// Checks a range of a region. Takes its `Arc` only when all is well.
#[inline]
fn region_span(
    r: &Arc<Registered>,
    pd: PdId,
    stag: u32,
    addr: u64,
    len: u32,
    need: Access,
) -> Result<Span, MemError> {
    let start = region_range(r, pd, stag, addr, len, need)?;
    Ok(Span::new(r.clone(), start, len as usize))
}

/// The offset of a range in a region, if this use is allowed.
#[inline]
fn region_range(
    r: &Registered,
    pd: PdId,
    stag: u32,
    addr: u64,
    len: u32,
    need: Access,
) -> Result<usize, MemError> {
    if r.stag != stag {
        return Err(MemError::InvalidStag);
    }
    if r.pd != pd {
        return Err(MemError::Pd);
    }
    if !r.access.contains(need) {
        return Err(MemError::Access);
    }
    let start = locate(r.iova, r.len() as u64, addr, len.into())? as usize;
    if r.implicit {
        r.reach(start, len as usize, need)?;
    }
    Ok(start)
}

impl WindowState {
    /// The binding, if this `STag` names it and this stream may use it.
    fn check(&self, pd: PdId, qp: u32, stag: u32) -> Result<&Binding, MemError> {
        match &self.bound {
            Some(b) if self.stag == stag => {
                if self.pd == pd && b.qp.is_none_or(|bound| bound == qp) {
                    Ok(b)
                } else {
                    Err(MemError::Pd)
                }
            }
            _ => Err(MemError::InvalidStag),
        }
    }

    /// Whether a queue pair of this domain may bind it to this many bytes, under this `STag`.
    fn may_bind(&self, pd: PdId, stag: u32, len: u64) -> Result<(), MemError> {
        let bound = self.bound.is_some();
        match self.kind {
            WindowType::Type2 if len == 0 => Err(MemError::BadArgument),
            WindowType::Type2 if bound => Err(MemError::InUse),
            WindowType::Type1 if bound && self.stag == stag => Err(MemError::BadArgument),
            _ if self.pd != pd => Err(MemError::Pd),
            _ => Ok(()),
        }
    }

    /// Returns the region that it was bound to, and the queue pair (0: any).
    fn unbind(&mut self) -> Option<(Arc<Registered>, u32)> {
        let Binding { region, qp, .. } = self.bound.take()?;
        region.drop_window();
        Some((region, qp.unwrap_or(0)))
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("entries", &self.0.entries.load(Ordering::Relaxed))
            .field("max", &self.0.max)
            .finish()
    }
}

/// The owner's handle on a memory window. Dropping it frees it, bound or not.
#[derive(Debug)]
pub struct Window {
    table: Table,
    pd: PdId,
    /// As allocated; binds change the key.
    stag: u32,
}

impl Window {
    /// Its `STag`: that of the latest bind, or a first one that is not valid yet.
    pub fn stag(&self) -> u32 {
        self.table.window_stag(self.stag).unwrap_or(self.stag)
    }

    /// Its protection domain.
    pub fn pd(&self) -> PdId {
        self.pd
    }
}

impl Drop for Window {
    /// Waits for a peer of this host that uses it itself, up to [`crate::PEER_LIMIT`].
    fn drop(&mut self) {
        if let Some((Entry::Window(mut w), domain)) = self.table.0.remove(self.stag)
            && let Some((region, qp)) = w.unbind()
            && let Some(domain) = domain
            && domain.keep_if_used(w.stag, qp, region)
        {
            while domain.is_overdue(w.stag) {
                std::thread::sleep(NAP);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Entry, Inner};
    use crate::registered::Registered;

    #[test]
    fn bookkeeping_is_small() {
        // Two counters of the Arc; the map is at worst just over half of 7/8 full, with a byte an entry.
        let per_entry = (size_of::<(u32, Entry)>() + 1) * 16 / 7;
        let region = size_of::<Registered>() + 16 + per_entry;
        println!(
            "{region} {} {}",
            size_of::<Registered>(),
            size_of::<Inner>()
        );
        assert!(region < 200, "{region} bytes a region");
        assert!(size_of::<Inner>() <= 1152, "{} bytes", size_of::<Inner>());
    }
}
