//! Objects that C programs hold by address.
//!
//! A program may pass any address at any time: NULL, the address of something else, that of a destroyed object. The memory of objects is therefore type-stable:
//! it comes from pools that never free any, and a destroyed object stays unused, marked as dead, until many others of its kind have been destroyed. The part
//! behind the one that C sees (the body) is reached only through the gate of the slot, which is closed before the body is dropped.
//!
//! * The fast path ([`enter`]) checks only the mark in front of the gate: one load and a compare. See [`visit`](super::visit).
//!
//! * All other calls ([`find`], [`turn`]) first check that the address is that of a slot.
//!
//! A forked child has none of its parent's objects ([`PerFork`]).
//!
//! # Safety
//!
//! A slot is leaked, so references to it stay valid. [`Pool::make`] writes its body before the gate opens, visitors inside the gate read it, and
//! [`Turn::retire`] moves it out when the gate is closed and no visitor is inside. The C part is accessed through raw pointers only: the program reads (and may
//! write) it at any time.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::io::Errno;
pub(crate) use weft_verbs::ext::lock;

use super::types::Zeroed;
use super::visit::{self, Record};

/// A kind of object: its body, which C does not see.
pub(crate) trait Kind: Send + Sync + Sized + 'static {
    /// The part that C sees.
    type C: Zeroed;
    /// The type behind C's handles, which is at [`Kind::OFFSET`] in [`Kind::C`].
    type Handle;
    /// The offset in [`Kind::C`] that a handle points to.
    const OFFSET: usize = 0;
    /// The mark of the kind; any number that no other kind has.
    const MARK: u32;
    fn pool() -> &'static Pool<Self>;
}

/// A kind of object whose handle points to the beginning of the C part: `kind!(Body as Handle, MARK)`, or `kind!(Body as Handle => C, MARK)` where the C part
/// is larger than the handle's type.
macro_rules! kind {
    ($body:ty as $handle:ty, $mark:expr) => {
        kind!($body as $handle => $handle, $mark);
    };
    ($body:ty as $handle:ty => $c:ty, $mark:expr) => {
        impl $crate::verbs::object::Kind for $body {
            type C = $c;
            type Handle = $handle;
            const MARK: u32 = $mark;
            fn pool() -> &'static $crate::verbs::object::Pool<Self> {
                static POOL: $crate::verbs::object::PerFork<$crate::verbs::object::Pool<$body>> =
                    $crate::verbs::object::PerFork::new();
                POOL.get()
            }
        }
    };
}

pub(crate) use kind;

const DEAD: u64 = 1;
/// A thread has exclusive use of the object for a moment.
const SHUT: u64 = 2;
/// One visitor inside.
const ONE: u64 = 4;
/// Below the mark.
const COUNT: u64 = 0xffff_fffc;

/// Destroyed objects that stay unused before their memory is used again.
const RESTING: usize = 1024;
/// Slots of a pool's first chunk; each further one is twice as large.
const FIRST: usize = 16;
const CHUNKS: usize = 24;

/// The memory of one object.
#[repr(C)]
pub(crate) struct Slot<K: Kind> {
    c: UnsafeCell<K::C>,
    /// Mark (upper half), number of visitors inside, [`SHUT`], [`DEAD`].
    gate: AtomicU64,
    /// Counts the objects that lived here.
    serial: AtomicU32,
    turn: Mutex<()>,
    waiting: Mutex<()>,
    moved: Condvar,
    body: UnsafeCell<MaybeUninit<K>>,
}

// SAFETY: the gate keeps threads that move the body apart from threads that use it; the C part is reached through raw pointers.
unsafe impl<K: Kind> Sync for Slot<K> {}

impl<K: Kind> Slot<K> {
    /// The part that C sees.
    pub(crate) fn c(&self) -> *mut K::C {
        self.c.get()
    }

    pub(crate) fn handle(&self) -> *mut K::Handle {
        self.c.get().cast::<u8>().wrapping_add(K::OFFSET).cast()
    }

    #[inline]
    fn enter(&'static self) -> Result<Guard<K>, Errno> {
        loop {
            let seen = self.gate.fetch_add(ONE, Ordering::Acquire);
            if seen & (DEAD | SHUT) == 0 {
                return Ok(Guard(self));
            }
            self.wait_outside(seen)?;
        }
    }

    #[cold]
    fn wait_outside(&self, seen: u64) -> Result<(), Errno> {
        self.leave();
        if seen & DEAD != 0 {
            return Err(Errno::INVAL);
        }
        let waiting = lock(&self.waiting);
        let shut = |(): &mut ()| self.gate.load(Ordering::Acquire) & (SHUT | DEAD) == SHUT;
        drop(self.moved.wait_while(waiting, shut));
        Ok(())
    }

    #[inline]
    fn leave(&self) {
        let seen = self.gate.fetch_sub(ONE, Ordering::Release);
        if seen & (DEAD | SHUT) != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        drop(lock(&self.waiting));
        self.moved.notify_all();
    }

    /// The value that visitors write into their record.
    #[inline]
    fn place(&self) -> *const () {
        std::ptr::from_ref(self).cast()
    }

    /// The gate is closed: wait until only the caller is inside.
    fn wait_for_others(&self) {
        visit::wait_for(self.place());
        let waiting = lock(&self.waiting);
        let busy = |(): &mut ()| self.gate.load(Ordering::Acquire) & COUNT > ONE;
        drop(self.moved.wait_while(waiting, busy));
    }
}

/// An object in use: it lives until this is dropped.
pub(crate) struct Guard<K: Kind>(&'static Slot<K>);

impl<K: Kind> Guard<K> {
    /// A name of the object that may outlive it.
    pub(crate) fn name(&self) -> Name<K> {
        Name {
            slot: self.0,
            serial: self.0.serial.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn handle(&self) -> *mut K::Handle {
        self.0.handle()
    }

    /// The part that C sees.
    pub(crate) fn c(&self) -> *mut K::C {
        self.0.c()
    }
}

impl<K: Kind> Deref for Guard<K> {
    type Target = K;

    #[inline]
    fn deref(&self) -> &K {
        // SAFETY: the gate was open when we entered, so the body is there, and it stays as long as we are counted.
        unsafe { (*self.0.body.get()).assume_init_ref() }
    }
}

impl<K: Kind> Drop for Guard<K> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// An object in use by the one thread that may change or end it. Waiting for a turn while using the object in another way is a deadlock.
pub(crate) struct Turn<K: Kind> {
    guard: Guard<K>,
    _turn: MutexGuard<'static, ()>,
}

impl<K: Kind> Deref for Turn<K> {
    type Target = Guard<K>;

    fn deref(&self) -> &Guard<K> {
        &self.guard
    }
}

impl<K: Kind> Turn<K> {
    /// Runs `body` while no other thread uses the object.
    pub(crate) fn alone<T>(&mut self, body: impl FnOnce(&mut K) -> T) -> T {
        struct Open<'a, K: Kind>(&'a Slot<K>);
        impl<K: Kind> Drop for Open<'_, K> {
            fn drop(&mut self) {
                self.0.gate.fetch_and(!SHUT, Ordering::Release);
                self.0.wake();
            }
        }
        let slot = self.guard.0;
        slot.gate.fetch_or(SHUT, Ordering::Acquire);
        let open = Open(slot);
        slot.wait_for_others();
        // SAFETY: we are the only one inside, and no other thread enters before `open` is dropped.
        let result = body(unsafe { (*slot.body.get()).assume_init_mut() });
        drop(open);
        result
    }

    /// Ends the object: no thread uses it when this returns. The part that C sees stays as it is.
    pub(crate) fn retire(self) -> K {
        let slot = self.guard.0;
        slot.gate.fetch_or(DEAD, Ordering::AcqRel);
        slot.wait_for_others();
        // SAFETY: we are the only one inside, no other thread enters, and none gets here: the mark was set under `turn`, and a dead object gives no turn.
        let body = unsafe { (*slot.body.get()).assume_init_read() };
        drop(self);
        K::pool().rest(slot);
        body
    }
}

/// A name of an object that shows whether it still is the same one.
pub(crate) struct Name<K: Kind> {
    slot: &'static Slot<K>,
    serial: u32,
}

impl<K: Kind> Clone for Name<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K: Kind> Copy for Name<K> {}

impl<K: Kind> PartialEq for Name<K> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.slot, other.slot) && self.serial == other.serial
    }
}

impl<K: Kind> Name<K> {
    /// The object, if it still lives.
    pub(crate) fn get(self) -> Result<Guard<K>, Errno> {
        let guard = self.slot.enter()?;
        if self.slot.serial.load(Ordering::Relaxed) == self.serial {
            Ok(guard)
        } else {
            Err(Errno::INVAL)
        }
    }
}

/// An object in use on the fast path, for the time of one call.
pub(crate) struct Visit<K: Kind> {
    slot: &'static Slot<K>,
    /// The record that names it; `None`: the visitor is counted.
    record: Option<&'static Record>,
}

impl<K: Kind> Visit<K> {
    /// The part that C sees.
    pub(crate) fn c(&self) -> *mut K::C {
        self.slot.c()
    }
}

impl<K: Kind> Deref for Visit<K> {
    type Target = K;

    #[inline]
    fn deref(&self) -> &K {
        // SAFETY: as for `Guard`: a thread that closes the gate waits for us.
        unsafe { (*self.slot.body.get()).assume_init_ref() }
    }
}

impl<K: Kind> Drop for Visit<K> {
    #[inline]
    fn drop(&mut self) {
        match self.record {
            Some(record) => record.go_out(),
            None => self.slot.leave(),
        }
    }
}

/// The object at an address that is probably right: only its mark is checked.
///
/// # Safety
/// The memory at `handle` is readable for the size of the object.
#[inline]
pub(crate) unsafe fn enter<K: Kind>(handle: *mut K::Handle) -> Result<Visit<K>, Errno> {
    let slot = handle
        .cast::<u8>()
        .wrapping_sub(K::OFFSET)
        .cast::<Slot<K>>();
    if handle.is_null() || !slot.is_aligned() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    let mark = unsafe { (*slot).gate.load(Ordering::Relaxed) } >> 32;
    if mark != u64::from(K::MARK) {
        return Err(Errno::INVAL);
    }
    // SAFETY: with this mark it is a slot, and slots are leaked.
    let slot = unsafe { &*slot };
    if let Some(record) = visit::free_record() {
        record.go_in(slot.place());
        if slot.gate.load(Ordering::Acquire) & (DEAD | SHUT) == 0 {
            return Ok(Visit {
                slot,
                record: Some(record),
            });
        }
        record.go_out();
    }
    visit_counted(slot)
}

#[cold]
fn visit_counted<K: Kind>(slot: &'static Slot<K>) -> Result<Visit<K>, Errno> {
    std::mem::forget(slot.enter()?);
    Ok(Visit { slot, record: None })
}

/// The object at an arbitrary address. `EINVAL` when there is none.
pub(crate) fn find<K: Kind>(handle: *mut K::Handle) -> Result<Guard<K>, Errno> {
    K::pool().slot(handle).ok_or(Errno::INVAL)?.enter()
}

/// As [`find`], for a call that changes or ends the object.
pub(crate) fn turn<K: Kind>(handle: *mut K::Handle) -> Result<Turn<K>, Errno> {
    let slot = K::pool().slot(handle).ok_or(Errno::INVAL)?;
    let turn = lock(&slot.turn);
    let guard = slot.enter()?;
    Ok(Turn { guard, _turn: turn })
}

/// All objects of a kind.
pub(crate) struct Pool<K: Kind> {
    chunks: [AtomicPtr<Slot<K>>; CHUNKS],
    stock: Mutex<Stock<K>>,
}

struct Stock<K: Kind> {
    /// Slots that have been used, counted from the first chunk's first.
    used: usize,
    resting: VecDeque<&'static Slot<K>>,
}

impl<K: Kind> Default for Pool<K> {
    fn default() -> Self {
        Pool {
            chunks: [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS],
            stock: Mutex::new(Stock {
                used: 0,
                resting: VecDeque::new(),
            }),
        }
    }
}

impl<K: Kind> Pool<K> {
    /// A new object. `fill` gets the zeroed part that C sees and the address of C's handle.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    pub(crate) fn make(
        &self,
        body: K,
        fill: impl FnOnce(&mut K::C, *mut K::Handle),
    ) -> Result<Guard<K>, Errno> {
        self.make_at(|_| Ok(body), fill)
    }

    /// As [`Pool::make`], for a body that needs its address.
    ///
    /// # Errors
    /// As [`Pool::make`], and those of `body`.
    pub(crate) fn make_at(
        &self,
        body: impl FnOnce(*mut K::Handle) -> Result<K, Errno>,
        fill: impl FnOnce(&mut K::C, *mut K::Handle),
    ) -> Result<Guard<K>, Errno> {
        let slot = self.take()?;
        let body = body(slot.handle()).inspect_err(|_| self.rest(slot))?;
        let mut c = K::C::zeroed();
        fill(&mut c, slot.handle());
        // SAFETY: the object is dead: no visitor is inside the gate, and the program must not access the C part.
        unsafe {
            slot.c.get().write(c);
            (*slot.body.get()).write(body);
        }
        slot.serial.fetch_add(1, Ordering::Relaxed);
        slot.gate.fetch_add(ONE, Ordering::Relaxed);
        slot.gate.fetch_and(!DEAD, Ordering::Release);
        Ok(Guard(slot))
    }

    /// All living objects.
    pub(crate) fn all(&self) -> impl Iterator<Item = Guard<K>> + '_ {
        self.slots().filter_map(|slot| {
            let dead = slot.gate.load(Ordering::Relaxed) & DEAD != 0;
            if dead { None } else { slot.enter().ok() }
        })
    }

    fn take(&self) -> Result<&'static Slot<K>, Errno> {
        let mut stock = lock(&self.stock);
        if stock.resting.len() >= RESTING
            && let Some(slot) = stock.resting.pop_front()
        {
            return Ok(slot);
        }
        let (chunk, at) = place(stock.used);
        let first = self.chunks.get(chunk).ok_or(Errno::NOMEM)?;
        if first.load(Ordering::Relaxed).is_null() {
            let slots: Vec<Slot<K>> = (0..FIRST << chunk).map(|_| Slot::new()).collect();
            first.store(
                Box::leak(slots.into_boxed_slice()).as_mut_ptr(),
                Ordering::Release,
            );
        }
        stock.used += 1;
        // SAFETY: the chunk has `FIRST << chunk` slots, of which `at` is one, and is leaked.
        Ok(unsafe { &*first.load(Ordering::Relaxed).add(at) })
    }

    fn rest(&self, slot: &'static Slot<K>) {
        lock(&self.stock).resting.push_back(slot);
    }

    /// The slot at an address, if there is one.
    fn slot(&self, handle: *mut K::Handle) -> Option<&'static Slot<K>> {
        let addr = (handle as usize).checked_sub(K::OFFSET)?;
        for (chunk, first) in self.chunks.iter().enumerate() {
            let first = first.load(Ordering::Acquire);
            if first.is_null() {
                return None;
            }
            let Some(off) = addr.checked_sub(first as usize) else {
                continue;
            };
            let (at, rest) = (off / size_of::<Slot<K>>(), off % size_of::<Slot<K>>());
            if at < FIRST << chunk {
                // SAFETY: the chunk has that many slots, and is leaked.
                return (rest == 0).then(|| unsafe { &*first.add(at) });
            }
        }
        None
    }

    fn slots(&self) -> impl Iterator<Item = &'static Slot<K>> + '_ {
        let chunks = self.chunks.iter().enumerate();
        chunks.flat_map(|(chunk, first)| {
            let first = first.load(Ordering::Acquire);
            let slots = if first.is_null() { 0 } else { FIRST << chunk };
            // SAFETY: the chunk has that many slots, and is leaked.
            (0..slots).map(move |at| unsafe { &*first.add(at) })
        })
    }
}

impl<K: Kind> Slot<K> {
    fn new() -> Self {
        Slot {
            c: UnsafeCell::new(K::C::zeroed()),
            gate: AtomicU64::new(u64::from(K::MARK) << 32 | DEAD),
            serial: AtomicU32::new(0),
            turn: Mutex::new(()),
            waiting: Mutex::new(()),
            moved: Condvar::new(),
            body: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }
}

/// Chunk and place in it of the pool's slot number `index`.
fn place(index: usize) -> (usize, usize) {
    let chunk = (index / FIRST + 1).ilog2() as usize;
    (chunk, index - FIRST * ((1 << chunk) - 1))
}

/// A value that a forked child must not continue to use.
pub(crate) trait Inherited: Default + Sync + 'static {
    /// In the child: this value is the parent's. It stays in memory; the child must not wait for any of its locks.
    fn abandon(&self) {}
}

impl<T: Default + Send + 'static> Inherited for Mutex<T> {}

impl<K: Kind> Inherited for Pool<K> {
    /// The parent's objects are dead here.
    fn abandon(&self) {
        for slot in self.slots() {
            slot.gate.fetch_or(DEAD, Ordering::Relaxed);
        }
    }
}

/// A value of this process: made at its first use, anew in a forked child.
pub(crate) struct PerFork<T: Inherited>(AtomicPtr<T>);

/// The values that a child has to abandon.
struct ForkInherited {
    item: &'static (dyn Abandon + Sync),
    next: *const ForkInherited,
}

trait Abandon {
    fn abandon(&self);
}

static HEIRLOOMS: AtomicPtr<ForkInherited> = AtomicPtr::new(std::ptr::null_mut());

impl<T: Inherited> PerFork<T> {
    pub(crate) const fn new() -> Self {
        PerFork(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This process's value.
    pub(crate) fn get(&'static self) -> &'static T {
        let value = self.0.load(Ordering::Acquire);
        if value.is_null() {
            self.first()
        } else {
            // SAFETY: only leaked values are stored.
            unsafe { &*value }
        }
    }

    #[cold]
    fn first(&'static self) -> &'static T {
        static HEARD: AtomicBool = AtomicBool::new(false);
        // No lock and no waiting: a fork may come between any two lines. Registering the handler twice does no harm.
        if !HEARD.load(Ordering::Acquire) {
            // SAFETY: the handler is a function that stays.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            HEARD.store(true, Ordering::Release);
        }
        // Registered before the value exists, so that no child keeps it. An heirloom that is registered twice is empty the second time.
        let heirloom = Box::into_raw(Box::new(ForkInherited {
            item: self,
            next: std::ptr::null(),
        }));
        let shown = |next: *mut ForkInherited| {
            // SAFETY: only this thread has it until it is stored, and it is leaked.
            unsafe { (*heirloom).next = next };
            HEIRLOOMS.compare_exchange(next, heirloom, Ordering::AcqRel, Ordering::Acquire)
        };
        let mut next = HEIRLOOMS.load(Ordering::Acquire);
        while let Err(other) = shown(next) {
            next = other;
        }
        let made = Box::into_raw(Box::<T>::default());
        let swap = self.0.compare_exchange(
            std::ptr::null_mut(),
            made,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        let stored = swap.map_or_else(
            |theirs| {
                // SAFETY: no other thread has seen this value.
                drop(unsafe { Box::from_raw(made) });
                theirs
            },
            |_| made,
        );
        // SAFETY: only leaked values are stored.
        unsafe { &*stored }
    }
}

impl<T: Inherited> Abandon for PerFork<T> {
    fn abandon(&self) {
        let value = self.0.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !value.is_null() {
            // SAFETY: only leaked values are stored.
            unsafe { &*value }.abandon();
        }
    }
}

extern "C" fn in_child() {
    let mut next = HEIRLOOMS.swap(std::ptr::null_mut(), Ordering::AcqRel);
    while !next.is_null() {
        // SAFETY: the list's members are leaked.
        let heirloom = unsafe { &*next };
        heirloom.item.abandon();
        next = heirloom.next.cast_mut();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Thing(Arc<AtomicUsize>);
    struct Other;

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct C {
        head: u64,
        inner: u64,
    }

    // SAFETY: two numbers.
    unsafe impl Zeroed for C {}

    impl Kind for Thing {
        type C = C;
        type Handle = u64;
        const OFFSET: usize = std::mem::offset_of!(C, inner);
        const MARK: u32 = 0x7e57_0001;
        fn pool() -> &'static Pool<Self> {
            static POOL: PerFork<Pool<Thing>> = PerFork::new();
            POOL.get()
        }
    }

    kind!(Other as u64 => C, 0x7e57_0002);

    impl Drop for Thing {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn thing(drops: &Arc<AtomicUsize>) -> *mut u64 {
        let made = Thing::pool().make(Thing(Arc::clone(drops)), |c, handle| {
            c.head = 1;
            c.inner = handle as u64;
        });
        made.unwrap().handle()
    }

    fn end(handle: *mut u64) -> Result<(), Errno> {
        drop(turn::<Thing>(handle)?.retire());
        Ok(())
    }

    #[test]
    fn places_follow_each_other() {
        let mut expected = (0, 0);
        for index in 0..10_000 {
            assert_eq!(place(index), expected);
            expected.1 += 1;
            if expected.1 == FIRST << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
    }

    #[test]
    fn only_live_objects_of_the_kind_are_found() {
        let drops = Arc::default();
        let handle = thing(&drops);
        // SAFETY: it lives.
        assert_eq!(unsafe { *handle }, handle as u64);
        assert!(find::<Thing>(handle).is_ok());
        // SAFETY: it is memory of an object.
        assert!(unsafe { enter::<Thing>(handle) }.is_ok());
        for wrong in [
            std::ptr::null_mut(),
            handle.wrapping_add(1),
            handle.wrapping_byte_add(3),
            std::ptr::without_provenance_mut(4096),
            std::ptr::without_provenance_mut(usize::MAX),
        ] {
            assert_eq!(find::<Thing>(wrong).err(), Some(Errno::INVAL));
            assert!(turn::<Thing>(wrong).is_err());
        }
        let other = Other::pool().make(Other, |_, _| ()).unwrap().handle();
        assert!(find::<Thing>(other).is_err());
        assert!(find::<Other>(handle).is_err());
        let inner = other.wrapping_byte_add(Thing::OFFSET);
        // SAFETY: it is memory of an object, though of another kind.
        assert!(unsafe { enter::<Thing>(inner) }.is_err());
        // SAFETY: NULL and odd addresses are not looked at.
        assert!(unsafe { enter::<Thing>(std::ptr::null_mut()) }.is_err());

        end(handle).unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(end(handle), Err(Errno::INVAL));
        assert!(find::<Thing>(handle).is_err());
        // SAFETY: its memory is readable still.
        assert!(unsafe { enter::<Thing>(handle) }.is_err());
    }

    #[test]
    fn names_do_not_mean_the_next_one_at_their_place() {
        let drops = Arc::default();
        let handle = thing(&drops);
        let name = find::<Thing>(handle).unwrap().name();
        end(handle).unwrap();
        // Until the place is taken again.
        loop {
            assert!(name.get().is_err());
            let next = thing(&drops);
            if next == handle {
                break;
            }
            end(next).unwrap();
        }
        assert!(find::<Thing>(handle).is_ok());
        assert!(name.get().is_err());
        end(handle).unwrap();
    }

    #[test]
    fn bodies_go_when_nobody_uses_them() {
        let drops: Arc<AtomicUsize> = Arc::default();
        let handle = thing(&drops) as usize;
        let inside = find::<Thing>(handle as *mut u64).unwrap();
        let mut ends = Vec::new();
        for _ in 0..4 {
            ends.push(std::thread::spawn(move || end(handle as *mut u64).is_ok()));
        }
        while find::<Thing>(handle as *mut u64).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(inside);
        let ended = ends.into_iter().map(|e| e.join().unwrap()).filter(|e| *e);
        assert_eq!(ended.count(), 1, "one of them ended it");
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn alone_is_alone() {
        let drops = Arc::default();
        let handle = thing(&drops) as usize;
        let busy: Arc<AtomicUsize> = Arc::default();
        let users: Vec<_> = (0..4)
            .map(|n| {
                let busy = Arc::clone(&busy);
                std::thread::spawn(move || {
                    for _ in 0..2_000 {
                        if n == 0 {
                            turn::<Thing>(handle as *mut u64).unwrap().alone(|_| {
                                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0);
                                busy.fetch_sub(1, Ordering::SeqCst);
                            });
                        } else {
                            let _inside = find::<Thing>(handle as *mut u64).unwrap();
                            busy.fetch_add(1, Ordering::SeqCst);
                            busy.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        for user in users {
            user.join().unwrap();
        }
        end(handle as *mut u64).unwrap();
    }
}
