//! Regions that the holder of a lock has looked up before.
//!
//! A look-up in the [`Table`] takes a reader's lock, and a [`Span`] counts a reference: four locked instructions, more than the copy of a
//! small message. The holder of a [`KeyLock`] remembers a few regions, and uses them without counting: deregistration waits for the hold
//! ([`weft_lock::Generation`]).
//!
//! # Safety
//!
//! A [`KeySpan`] without a reference of its own is made in a hold of the lock that its [`Keys`] belong to, and borrows them. They cannot leave
//! the lock meanwhile, because the end of a hold checks that they are in their place, and aborts the process if not. The region was in the table
//! when it was looked up, and the generation was the same in this hold, so a thread that removes the region waits for the end of the hold. A
//! cached region is not replaced by another one in a hold in which it was used.

use crate::registered::Registered;
use crate::table::{Table, locate};
use crate::{Access, MemError, PdId, Span, copy};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use weft_lock::{Arc, Holder, TAGS};

/// The cached data of a region.
#[derive(Clone, Copy)]
struct Known {
    /// 0: nothing.
    stag: u32,
    pd: PdId,
    access: Access,
    /// The table's generation at the look-up.
    generation: u64,
    /// The latest hold in which it was used.
    hold: u64,
    iova: u64,
    len: usize,
    ptr: NonNull<u8>,
}

const NOTHING: Known = Known {
    stag: 0,
    pd: PdId(0),
    access: Access::empty(),
    generation: 0,
    hold: 0,
    iova: 0,
    len: 0,
    ptr: NonNull::dangling(),
};

/// The place of a region in the cache: by its index without the key, because indices are random.
#[inline]
fn place_of(stag: u32) -> usize {
    (stag >> 8) as usize % TAGS
}

/// The regions that the holders of one [`KeyLock`] remember.
pub struct Keys {
    table: Table,
    holder: Arc<Holder>,
    remembers: bool,
    known: [Cell<Known>; TAGS],
}

// SAFETY: the pointers are only used in a hold, by whichever thread holds the lock.
unsafe impl Send for Keys {}

impl Keys {
    /// None yet. They are remembered once this is in a [`KeyLock`].
    pub fn new(table: &Table) -> Keys {
        let holder = Arc::new(Holder::default());
        Keys {
            remembers: table.generation().add(&holder),
            table: table.clone(),
            holder,
            known: [const { Cell::new(NOTHING) }; TAGS],
        }
    }

    /// As [`Table::local`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn local(
        &self,
        pd: PdId,
        stag: u32,
        addr: u64,
        len: u32,
        need: Access,
    ) -> Result<KeySpan<'_>, MemError> {
        if let Some(span) = self.known(pd, stag, addr, len, need) {
            return Ok(span);
        }
        let place = place_of(stag);
        let (known, hold) = (self.known[place].get(), self.holder.word.mine());
        // An entry that was used in this hold stays, so that a thread that removes the region waits.
        if known.hold != hold
            && self.remember(place, pd, stag, hold)
            && let Some(span) = self.known(pd, stag, addr, len, need)
        {
            return Ok(span);
        }
        let span = self.table.local(pd, stag, addr, len, need)?;
        Ok(KeySpan::counting(span))
    }

    /// As [`Self::local`], for a region that an earlier use has cached; `None` also in the cases in which [`Self::local`] would return an error.
    /// The result stays in registers.
    #[allow(clippy::inline_always)] // else what it gives goes through memory: docs/adr/0033
    #[inline(always)]
    pub fn known(
        &self,
        pd: PdId,
        stag: u32,
        addr: u64,
        len: u32,
        need: Access,
    ) -> Option<KeySpan<'_>> {
        let cell = &self.known[place_of(stag)];
        let known = cell.get();
        let hold = self.holder.word.mine();
        if known.stag != stag
            || stag == 0
            || known.pd != pd
            || !known.access.contains(need)
            || known.generation != self.table.generation().now()
            || hold.is_multiple_of(2)
        {
            return None;
        }
        if known.hold != hold {
            cell.set(Known { hold, ..known });
        }
        let start = locate(known.iova, known.len as u64, addr, len.into()).ok()? as usize;
        Some(KeySpan {
            // SAFETY: inside the region.
            ptr: unsafe { known.ptr.add(start) },
            len: len as usize,
            counted: None,
            _keys: PhantomData,
        })
    }

    /// Looks a region up and caches it; false without a hold, and if the region is not usable.
    #[cold]
    fn remember(&self, place: usize, pd: PdId, stag: u32, hold: u64) -> bool {
        if !self.remembers || hold.is_multiple_of(2) {
            return false;
        }
        let generation = self.table.generation().now();
        let remembered = self.table.with_region(stag, |region: &Registered| {
            if region.pd != pd || region.implicit {
                return false;
            }
            // The region cannot leave the table here, so a thread that removes it later sees this.
            self.holder.remember(place, stag);
            self.known[place].set(Known {
                stag,
                pd,
                access: region.access,
                generation,
                hold,
                iova: region.iova,
                len: region.len(),
                ptr: region.at(0),
            });
            true
        });
        remembered == Some(true)
    }
}

/// A checked range of the owner's memory, for the time of a hold. As [`Span`] otherwise.
pub struct KeySpan<'a> {
    ptr: NonNull<u8>,
    len: usize,
    /// Set if the region could not be cached.
    counted: Option<Span>,
    _keys: PhantomData<&'a Keys>,
}

impl KeySpan<'_> {
    fn counting(span: Span) -> Self {
        KeySpan {
            ptr: NonNull::new(span.range(0, span.len())).unwrap_or(NonNull::dangling()),
            len: span.len(),
            counted: Some(span),
            _keys: PhantomData,
        }
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its memory may go at any moment; such a region is never remembered.
    #[inline]
    pub(crate) fn is_implicit(&self) -> bool {
        self.counted.as_ref().is_some_and(Span::is_implicit)
    }

    /// The address of its first byte.
    #[inline]
    pub(crate) fn start(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Appends its bytes to `out`.
    #[inline]
    pub fn append_to(&self, out: &mut Vec<u8>) {
        out.reserve(self.len);
        // SAFETY: a checked range that stays as long as `self`; `reserve` made room, all of which is written.
        unsafe {
            let to = out.as_mut_ptr().add(out.len());
            copy::from(self.is_implicit(), to, self.start(), self.len, copy::load);
            out.set_len(out.len() + self.len);
        }
    }

    /// Copies `bytes` to its start; panics when they are more than it has.
    #[inline]
    pub fn copy_in(&self, bytes: &[u8]) {
        self.copy_in_at(0, bytes);
    }

    /// Copies `bytes` behind its first `at` bytes; panics when they are more than there are.
    #[inline]
    pub fn copy_in_at(&self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at);
        // SAFETY: within a checked range that stays as long as `self`.
        unsafe {
            let to = self.start().wrapping_add(at);
            copy::to(
                self.is_implicit(),
                to,
                bytes.as_ptr(),
                bytes.len(),
                copy::store,
            );
        }
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("remembers", &self.remembers)
            .finish_non_exhaustive()
    }
}

/// A lock for short holds, as [`weft_lock::ShortLock`], around a value with [`Keys`].
pub struct KeyLock<T: AsMut<Keys>> {
    holder: Arc<Holder>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by the holder alone, which may be any thread.
unsafe impl<T: AsMut<Keys> + Send> Send for KeyLock<T> {}
// SAFETY: as above.
unsafe impl<T: AsMut<Keys> + Send> Sync for KeyLock<T> {}

impl<T: AsMut<Keys>> KeyLock<T> {
    /// A free lock.
    pub fn new(mut value: T) -> Self {
        KeyLock {
            holder: Arc::clone(&value.as_mut().holder),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock, and waits until it is free.
    #[inline]
    pub fn lock(&self) -> KeyGuard<'_, T> {
        self.holder.word.begin();
        KeyGuard(self)
    }

    /// Takes the lock, unless another thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<KeyGuard<'_, T>> {
        self.holder.word.try_begin().then(|| KeyGuard(self))
    }

    /// As [`KeyLock::try_lock`]; waits a few microseconds where holds are short.
    #[inline]
    pub fn try_lock_soon(&self) -> Option<KeyGuard<'_, T>> {
        self.holder.word.try_begin_soon().then(|| KeyGuard(self))
    }
}

/// The hold of a [`KeyLock`].
#[must_use = "the lock is let go at once"]
pub struct KeyGuard<'a, T: AsMut<Keys>>(&'a KeyLock<T>);

// SAFETY: a shared guard gives shared references to the value only.
unsafe impl<T: AsMut<Keys> + Sync> Sync for KeyGuard<'_, T> {}

impl<T: AsMut<Keys>> Deref for KeyGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one of the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T: AsMut<Keys>> DerefMut for KeyGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and it is borrowed alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T: AsMut<Keys>> Drop for KeyGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let holder = &self.0.holder;
        if !Arc::ptr_eq(&self.as_mut().holder, holder) {
            // Spans that were made in this hold may outlive it.
            std::process::abort();
        }
        holder.word.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    struct Value {
        keys: Keys,
    }

    impl AsMut<Keys> for Value {
        fn as_mut(&mut self) -> &mut Keys {
            &mut self.keys
        }
    }

    const PD: PdId = PdId(1);

    fn lock(table: &Table) -> KeyLock<Value> {
        KeyLock::new(Value {
            keys: Keys::new(table),
        })
    }

    fn bytes(span: &KeySpan<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        span.append_to(&mut out);
        out
    }

    fn region(table: &Table, bytes: &[u8]) -> crate::Region {
        let backing = Backing::Owned(bytes.to_vec());
        table
            .register(PD, backing, 0x1000, Access::LOCAL_WRITE)
            .unwrap()
    }

    /// The same answers as the table's, remembered or not, in any order.
    #[test]
    fn it_says_what_the_table_says() {
        let table = Table::new(64);
        let regions: Vec<_> = (0..12u8).map(|i| region(&table, &[i; 8])).collect();
        let reader = table
            .register(PD, Backing::Anonymous(8), 0x1000, Access::empty())
            .unwrap();
        let lock = lock(&table);
        for _ in 0..3 {
            let held = lock.lock();
            for (i, region) in regions.iter().enumerate() {
                let stag = region.stag();
                let read =
                    |pd, stag, addr, len| held.keys.local(pd, stag, addr, len, Access::empty());
                assert_eq!(
                    bytes(&read(PD, stag, 0x1002, 6).ok().unwrap()),
                    [i as u8; 6]
                );
                for (pd, stag, addr, len) in [
                    (PdId(2), stag, 0x1000, 8),
                    (PD, stag ^ 1, 0x1000, 8),
                    (PD, stag, 0x0fff, 1),
                    (PD, stag, 0x1000, 9),
                    (PD, stag, 0x1009, 0),
                    (PD, stag, u64::MAX, 2),
                    (PD, 0, 0x1000, 1),
                ] {
                    let want = table.local(pd, stag, addr, len, Access::empty()).err();
                    assert!(want.is_some());
                    assert_eq!(read(pd, stag, addr, len).err(), want);
                }
            }
            let write = held
                .keys
                .local(PD, reader.stag(), 0x1000, 1, Access::LOCAL_WRITE);
            assert_eq!(write.err(), Some(MemError::Access));
        }
    }

    /// More regions in one hold than are remembered: all of them stay good.
    #[test]
    fn spans_of_many_regions_in_one_hold() {
        let table = Table::new(64);
        let regions: Vec<_> = (0..20u8).map(|i| region(&table, &[i; 8])).collect();
        let lock = lock(&table);
        let held = lock.lock();
        let read = |r: &crate::Region| {
            held.keys
                .local(PD, r.stag(), 0x1000, 8, Access::LOCAL_WRITE)
        };
        let spans: Vec<_> = regions.iter().map(|r| read(r).ok().unwrap()).collect();
        let counted = spans.iter().filter(|span| span.counted.is_some()).count();
        assert!(counted >= regions.len() - TAGS, "{counted}");
        for (span, region) in spans.iter().zip(&regions) {
            // Deregistration waits for those that count no reference.
            assert!(span.counted.is_some() || held.keys.holder.remembers(region.stag()));
        }
        for (i, span) in spans.iter().enumerate() {
            span.copy_in(&[100 + i as u8]);
            assert_eq!(bytes(span)[..2], [100 + i as u8, i as u8]);
        }
    }

    #[test]
    fn what_was_deregistered_is_not_found() {
        let table = Table::new(4);
        let lock = lock(&table);
        let one = region(&table, &[1; 8]);
        let stag = one.stag();
        let look = || {
            let held = lock.lock();
            held.keys
                .local(PD, stag, 0x1000, 8, Access::empty())
                .map(|span| bytes(&span))
        };
        assert_eq!(look(), Ok(vec![1; 8]));
        let buffer = one.deregister().map_err(|(_, e)| e).unwrap().unwrap();
        assert_eq!(look(), Err(MemError::InvalidStag));
        // Another one of the same name.
        let mut buffer = buffer;
        // SAFETY: the buffer outlives the region, and is reached through it alone.
        let memory = unsafe { crate::RawMemory::new(buffer.as_mut_ptr(), 8) }.unwrap();
        let again = table
            .register_again(PD, &memory, 0x1000, Access::LOCAL_WRITE, stag)
            .unwrap();
        again.write(0, &[9; 8]).unwrap();
        assert_eq!((again.stag(), look()), (stag, Ok(vec![9; 8])));
        drop(again);
        assert_eq!(look(), Err(MemError::InvalidStag));
    }

    /// The owner has memory back only after the hold in which it is used.
    #[test]
    fn deregistration_waits_for_the_hold() {
        let table = Table::new(4);
        let (lock, other) = (lock(&table), lock(&table));
        let one = region(&table, &[1; 8]);
        let stag = one.stag();
        let back = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let held = lock.lock();
            let span = held.keys.local(PD, stag, 0x1000, 8, Access::empty());
            let span = span.ok().unwrap();
            // No thread waits for this lock, whose cache does not contain the region.
            let _elsewhere = other.lock();
            let owner = scope.spawn(|| {
                let buffer = one.deregister().map_err(|(_, e)| e).unwrap().unwrap();
                back.store(true, Ordering::SeqCst);
                buffer
            });
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(if cfg!(miri) { 1 } else { 30 }) {
                assert!(!back.load(Ordering::SeqCst), "too early");
                assert_eq!(bytes(&span), [1; 8]);
            }
            drop(span);
            drop(held);
            assert_eq!(owner.join().unwrap(), [1; 8]);
        });
    }

    /// A hold that does not end blocks only threads that take back this memory.
    #[test]
    fn a_long_hold_is_told_of() {
        let table = Table::new(4);
        let (lock, other) = (lock(&table), self::lock(&table));
        let (one, two) = (region(&table, &[1; 8]), region(&table, &[2; 8]));
        let held = lock.lock();
        let span = held.keys.local(PD, one.stag(), 0x1000, 8, Access::empty());
        assert!(span.is_ok());
        let leaving = one.retire().expect_err("it is in use");
        let leaving = leaving.finish().expect_err("still");
        // Others come and go meanwhile.
        let near = other.lock();
        assert!(
            near.keys
                .local(PD, two.stag(), 0x1000, 8, Access::empty())
                .is_ok()
        );
        drop(near);
        assert_eq!(two.retire().ok().flatten(), Some(vec![2; 8]));
        let _third = Keys::new(&table);
        drop(span);
        drop(held);
        assert_eq!(leaving.finish().ok().flatten(), Some(vec![1; 8]));
    }

    #[test]
    fn without_a_hold_nothing_is_remembered() {
        let table = Table::new(4);
        let keys = Keys::new(&table);
        let one = region(&table, &[1; 8]);
        for _ in 0..2 {
            let span = keys.local(PD, one.stag(), 0x1000, 8, Access::empty());
            assert!(span.ok().unwrap().counted.is_some());
        }
    }
}
