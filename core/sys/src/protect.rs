//! Write protection of a program's memory while it is sent from there, and the handler of `SIGSEGV` behind it.
//!
//! A *zone* is a run of whole pages that are read-only for the program. [`guard`] protects one and gives a [`Hold`]: bytes of
//! the zone are on their way as long as there are holds. A thread that writes to a zone faults. The handler then
//!
//! * makes the zone writable again at once, if there are no holds, and
//! * otherwise marks the zone as wanted, rings the bells of those who hold it, and sleeps until the last hold is gone.
//!
//! So a zone stays protected after its last hold is dropped, until somebody writes to it: memory that is sent again untouched
//! costs no system call. [`settle`] takes the protection of a range away from outside, for memory that is about to be
//! unmapped, or written by a system call (system calls get `EFAULT` from a protected page, and no signal).
//!
//! Where nobody else can end the holds, because the process has no thread for it, the waiting thread does it itself: by the function that
//! [`set_helper`] was given.
//!
//! The handler uses atomics, `futex`, `write` on an eventfd, `mprotect` and `sched_yield` only, with all signals blocked. Faults
//! that are not of a zone go to the action that the program has installed ([`swap_program_action`]).
//!
//! A zone of a shared mapping has aliases, other addresses of the same pages in this process, which are protected with it (shared.rs). Other processes
//! cannot be made to wait: memory that they can have is refused.
//!
//! A child of `fork` inherits protected pages, but nothing that is on its way: its handler makes them writable at once.
//!
//! # Safety
//!
//! [`guard`] is `unsafe`, because it takes an address from its caller: who guards memory promises that it stays mapped until
//! it is settled. The table is static and made of atomics; the program's action is an immutable leaked copy.

mod handler;
mod mapping;
mod shared;

pub use shared::{begin_sharing, end_sharing, settle_shared, trust_others};

pub use handler::{handler_address, swap_program_action, use_sigaction};

use crate::PerProcess;
use crate::process::ForkDetector;
use rustix::mm::MprotectFlags;
use rustix::thread::futex;
use std::convert::Infallible;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Zones of a process, at most.
pub const MOST_ZONES: usize = 256;
/// Holders of one zone that have different bells, at most.
const BELLS: usize = 4;
/// Other addresses at which a zone of a shared mapping is mapped, at most.
const ALIASES: usize = 4;
/// How long a thread that waits for a zone sleeps before it rings again.
const RING_AGAIN: Duration = Duration::from_millis(10);

// A zone's state: its age, its phase, and the number of its holds.
const PHASE: u64 = 3 << 30;
const FREE: u64 = 0;
/// A thread is changing the protection, with signals blocked.
const CHANGING: u64 = 1 << 30;
/// Protected.
const OPEN: u64 = 2 << 30;
const HOLDS: u64 = (1 << 30) - 1;
/// Counts the uses of the slot, so that a stale look at it is recognised.
const AGE: u64 = 1 << 32;

/// Why memory is not protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// Not whole pages.
    Unaligned,
    /// A part of it is not mapped, or not writable.
    ReadOnly,
    /// A part of it is a shared mapping that another process can have, or that has too many names in this one.
    Shared,
    /// A part of it is a stack, where the kernel could not put the signal's frame.
    Stack,
    /// It overlaps a zone of other borders with holds, or a zone that a thread waits for.
    Busy,
    /// There are no more zones, or a zone has too many holders.
    Full,
    /// The program has replaced our handler of `SIGSEGV`.
    Handler,
    /// The system refused.
    System,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::Unaligned => "not whole pages",
            Refused::ReadOnly => "not writable",
            Refused::Shared => "a shared mapping that others can have",
            Refused::Stack => "on a stack",
            Refused::Busy => "protected already, with other borders, or waited for",
            Refused::Full => "too many protected zones",
            Refused::Handler => "the program has its own SIGSEGV handler",
            Refused::System => "refused by the system",
        })
    }
}

struct Zone {
    state: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
    /// A thread waits for the last hold.
    wanted: AtomicU32,
    /// Changes whenever a waiter should look again.
    word: AtomicU32,
    /// Descriptors to ring, or -1.
    bells: [AtomicI32; BELLS],
    /// It is of a shared mapping.
    shared: AtomicBool,
    /// Its other mappings, which are protected as well; from 0 to 0: none.
    aliases: [(AtomicUsize, AtomicUsize); ALIASES],
}

impl Zone {
    const fn new() -> Zone {
        Zone {
            state: AtomicU64::new(FREE),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            wanted: AtomicU32::new(0),
            word: AtomicU32::new(0),
            bells: [const { AtomicI32::new(-1) }; BELLS],
            shared: AtomicBool::new(false),
            aliases: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; ALIASES],
        }
    }

    /// All addresses that it has.
    fn ranges(&self) -> impl Iterator<Item = (usize, usize)> {
        let others = self.aliases.iter().map(|(start, end)| {
            let (start, end) = (start.load(Ordering::Acquire), end.load(Ordering::Acquire));
            (start, end)
        });
        std::iter::once(self.range()).chain(others.filter(|(start, end)| start < end))
    }

    fn overlaps(&self, start: usize, end: usize) -> bool {
        self.ranges().any(|(from, to)| from < end && start < to)
    }

    /// Makes it writable again, wherever it is mapped.
    fn unprotect(&self) -> bool {
        // All of them, also after a failure.
        self.ranges()
            .fold(true, |made, (start, end)| unprotect(start, end) && made)
    }

    fn range(&self) -> (usize, usize) {
        (
            self.start.load(Ordering::Acquire),
            self.end.load(Ordering::Acquire),
        )
    }

    /// Wakes waiting threads.
    fn wake(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Marks it as wanted, and notifies its holders. Async-signal-safe.
    fn want(&self) {
        self.wanted.store(1, Ordering::SeqCst);
        for bell in &self.bells {
            let fd = bell.load(Ordering::Acquire);
            if fd >= 0 {
                // SAFETY: a bell is taken out of all zones before its descriptor is closed; at worst a write to a wrong
                // or closed descriptor of eight bytes fails or rings once too often while that happens.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
            }
        }
    }

    /// Have the process's helper end holds of it, or wait for that. False: there is no helper. Async-signal-safe.
    fn help(&self) -> bool {
        let helper = HELPER.load(Ordering::SeqCst);
        if helper == 0 {
            return false;
        }
        // SAFETY: stored by `set_helper`, from a function of this type.
        let helper = unsafe { std::mem::transmute::<usize, Helper>(helper) };
        let (start, end) = self.range();
        helper(start, end);
        true
    }

    /// Sleep until something about it changes after `seen`, or it is time to ring again. Async-signal-safe.
    fn sleep(&self, seen: u32) {
        let limit = rustix::thread::Timespec {
            tv_sec: 0,
            tv_nsec: RING_AGAIN.as_nanos() as i64,
        };
        let _ = futex::wait(&self.word, futex::Flags::PRIVATE, seen, Some(&limit));
    }

    /// Removes the protection of a zone without holds whose state is `state`: false if another thread was faster. Signals must be blocked:
    /// a handler of the program that faults here would wait for its own thread. Async-signal-safe.
    fn lift(&self, state: u64) -> Lifted {
        let changing = state & !PHASE | CHANGING;
        if self
            .state
            .compare_exchange(state, changing, Ordering::SeqCst, Ordering::SeqCst)
            .is_err()
        {
            return Lifted::NotNow;
        }
        let made = self.unprotect();
        self.release(changing);
        if made { Lifted::Yes } else { Lifted::Failed }
    }

    /// The slot may be used for other memory.
    fn release(&self, changing: u64) {
        self.wanted.store(0, Ordering::SeqCst);
        for bell in &self.bells {
            bell.store(-1, Ordering::Release);
        }
        self.shared.store(false, Ordering::SeqCst);
        for (start, end) in &self.aliases {
            start.store(0, Ordering::Release);
            end.store(0, Ordering::Release);
        }
        let age = (changing & !(PHASE | HOLDS)).wrapping_add(AGE);
        self.state.store(age | FREE, Ordering::SeqCst);
        self.wake();
    }

    /// Wait until nothing of it is on its way, and take the protection away. Async-signal-safe with signals blocked.
    /// False: the system refused.
    fn resolve(&self, mut state: u64) -> bool {
        let age = state & !(PHASE | HOLDS);
        loop {
            if state & !(PHASE | HOLDS) != age || state & PHASE == FREE {
                return true;
            }
            if state & PHASE == CHANGING {
                crate::thread::sched_yield();
            } else if state & HOLDS == 0 {
                match self.lift(state) {
                    Lifted::Yes => {
                        LIFTS.fetch_add(1, Ordering::Relaxed);
                        return true;
                    }
                    Lifted::Failed => return false,
                    Lifted::NotNow => {}
                }
            } else {
                let seen = self.word.load(Ordering::SeqCst);
                self.want();
                state = self.state.load(Ordering::SeqCst);
                if state & HOLDS != 0 && !self.help() {
                    self.sleep(seen);
                }
            }
            state = self.state.load(Ordering::SeqCst);
        }
    }
}

enum Lifted {
    Yes,
    /// Its state has changed.
    NotNow,
    /// The system refused.
    Failed,
}

static ZONES: [Zone; MOST_ZONES] = [const { Zone::new() }; MOST_ZONES];
/// Slots from here on have never been used.
static HIGH: AtomicUsize = AtomicUsize::new(0);
/// Distinguishes the process that guards from its children; leaked.
static MARK: AtomicPtr<ForkDetector> = AtomicPtr::new(null_mut());
/// Faults that the handler has dealt with.
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// Zones whose protection was taken away.
static LIFTS: AtomicU64 = AtomicU64::new(0);

/// See [`set_helper`].
pub type Helper = fn(usize, usize);
/// The helper's address; 0: none.
static HELPER: AtomicUsize = AtomicUsize::new(0);

/// A thread that waits for the last hold of a zone calls this function again and again, with the first address of the zone and the one behind it,
/// until there are none: the function ends holds, or sleeps for a little while until it can. It has to be async-signal-safe: it is called by the
/// handler, with all signals blocked.
pub fn set_helper(helper: Helper) {
    HELPER.store(helper as usize, Ordering::SeqCst);
}

/// In a child of `fork`, before anything else runs there: makes the memory that its parent had protected writable, so that system calls can write
/// to it too. Async-signal-safe.
pub fn in_child() {
    shared::in_child();
    for zone in in_use() {
        let state = zone.state.load(Ordering::SeqCst);
        if state & PHASE != FREE {
            zone.unprotect();
            zone.release(state);
        }
    }
}

/// Makes a new anonymous shared mapping by `make`, and remembers it. `make` returns its address, or `None`.
pub fn made_shared(make: impl FnOnce() -> Option<*const u8>) {
    // What a parent had is forgotten before, not at the first zone.
    let is_ours = is_here() || {
        let table = table();
        let _table = lock(&table);
        Table::become_ours().is_ok()
    };
    if is_ours {
        shared::made(make);
    } else {
        make();
    }
}

/// The counters of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Faults of threads that wrote to a zone.
    pub faults: u64,
    /// Zones whose protection was taken away.
    pub lifts: u64,
}

/// The counters of this process.
pub fn counters() -> Counters {
    Counters {
        faults: FAULTS.load(Ordering::Relaxed),
        lifts: LIFTS.load(Ordering::Relaxed),
    }
}

fn in_use() -> &'static [Zone] {
    &ZONES[..HIGH.load(Ordering::Acquire).min(MOST_ZONES)]
}

/// Whether the zones belong to this process, and not to a parent.
fn is_here() -> bool {
    let mark = MARK.load(Ordering::Acquire);
    // SAFETY: null, or leaked before it was stored.
    unsafe { mark.as_ref() }.is_some_and(ForkDetector::is_here)
}

fn unprotect(start: usize, end: usize) -> bool {
    let at = std::ptr::with_exposed_provenance_mut(start);
    let rights = MprotectFlags::READ | MprotectFlags::WRITE;
    // SAFETY: the pages of a zone, which were readable and writable before; whoever guarded them has promised that they
    // are still mapped.
    unsafe { rustix::mm::mprotect(at, end - start, rights) }.is_ok()
}

/// The right to change the table.
struct Table(());

fn table() -> Arc<Mutex<Table>> {
    static TABLE: PerProcess<Mutex<Table>> = PerProcess::new();
    let Ok(table) = TABLE.get(|| Ok::<_, Infallible>(Arc::new(Mutex::new(Table(())))));
    table
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    /// Forget the zones of a parent, in a child.
    fn become_ours() -> Result<(), Refused> {
        if is_here() {
            return Ok(());
        }
        in_child();
        let mark = ForkDetector::new().map_err(|_| Refused::System)?;
        MARK.store(Box::into_raw(Box::new(mark)), Ordering::Release);
        Ok(())
    }

    fn guard(start: usize, end: usize, bell: RawFd) -> Result<Hold, Refused> {
        Self::become_ours()?;
        handler::install()?;
        if let Some(hold) = Self::again(start, end, bell)? {
            return Ok(hold);
        }
        let part = mapping::check(start, end)?;
        // Before it takes a place, perhaps another zone's.
        part.as_ref().map_or(Ok(()), shared::allowed)?;
        let (index, state) = Self::slot()?;
        let zone = &ZONES[index];
        let age = state & !(PHASE | HOLDS);
        let blocked = SignalsBlocked::new();
        zone.start.store(start, Ordering::Release);
        zone.end.store(end, Ordering::Release);
        zone.bells[0].store(bell, Ordering::Release);
        zone.shared.store(part.is_some(), Ordering::SeqCst);
        zone.state.store(age | CHANGING, Ordering::SeqCst);
        // After the state: a thread that creates another mapping of it, or shares it, waits from now on until this is done.
        if let Some(part) = part
            && let Err(why) = shared::enter(&part, zone)
        {
            zone.release(age | CHANGING);
            return Err(why);
        }
        for (start, end) in zone.ranges() {
            let at = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: the caller of `guard` has promised that these pages are mapped, and that whoever writes to them may be made to wait;
            // they, and the other names of the same pages, were just seen to be writable.
            let made = unsafe { rustix::mm::mprotect(at, end - start, MprotectFlags::READ) };
            if made.is_err() {
                // Perhaps the first pages were.
                zone.unprotect();
                zone.release(age | CHANGING);
                return Err(Refused::System);
            }
        }
        zone.state.store(age | OPEN | 1, Ordering::SeqCst);
        zone.wake();
        drop(blocked);
        Ok(Hold { zone, fresh: true })
    }

    /// Another hold of a zone that is there, with exactly these borders. Zones that overlap it otherwise, and have no holds, are lifted.
    fn again(start: usize, end: usize, bell: RawFd) -> Result<Option<Hold>, Refused> {
        for zone in in_use() {
            loop {
                let state = zone.state.load(Ordering::SeqCst);
                let (from, to) = zone.range();
                if state & PHASE == FREE || !zone.overlaps(start, end) {
                    break;
                }
                if zone.wanted.load(Ordering::SeqCst) != 0 {
                    return Err(Refused::Busy);
                }
                if state & PHASE == CHANGING {
                    crate::thread::sched_yield();
                    continue;
                }
                if (from, to) == (start, end) {
                    add_bell(zone, bell)?;
                    let more = zone.state.compare_exchange(
                        state,
                        state + 1,
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    );
                    if more.is_ok() {
                        return Ok(Some(Hold { zone, fresh: false }));
                    }
                    continue;
                }
                if state & HOLDS != 0 {
                    return Err(Refused::Busy);
                }
                let blocked = SignalsBlocked::new();
                if let Lifted::Failed = zone.lift(state) {
                    return Err(Refused::System);
                }
                drop(blocked);
            }
        }
        Ok(None)
    }

    /// A free slot, perhaps of a zone that was without holds.
    fn slot() -> Result<(usize, u64), Refused> {
        for (index, zone) in ZONES.iter().enumerate() {
            let state = zone.state.load(Ordering::SeqCst);
            if state & PHASE == FREE {
                HIGH.fetch_max(index + 1, Ordering::SeqCst);
                return Ok((index, state));
            }
        }
        for (index, zone) in ZONES.iter().enumerate() {
            let state = zone.state.load(Ordering::SeqCst);
            if state & (PHASE | HOLDS) == OPEN {
                let blocked = SignalsBlocked::new();
                if let Lifted::Yes = zone.lift(state) {
                    return Ok((index, zone.state.load(Ordering::SeqCst)));
                }
                drop(blocked);
            }
        }
        Err(Refused::Full)
    }
}

fn add_bell(zone: &Zone, bell: RawFd) -> Result<(), Refused> {
    if bell < 0 {
        return Ok(());
    }
    if zone.bells.iter().any(|b| b.load(Ordering::Acquire) == bell) {
        return Ok(());
    }
    let free = zone.bells.iter().find(|b| b.load(Ordering::Acquire) < 0);
    free.ok_or(Refused::Full)?.store(bell, Ordering::Release);
    Ok(())
}

/// Signals are blocked in this thread while it lives. Not that of a fault, which would end the process.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> SignalsBlocked {
        // SAFETY: signal sets are plain data; both are ours.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::sigdelset(&raw mut all, libc::SIGSEGV);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            SignalsBlocked(before)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set that was in effect before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, null_mut()) };
    }
}

/// A hold: bytes of a zone are in flight while it lives. The zone stays protected afterwards, until a thread writes to it.
#[derive(Debug)]
pub struct Hold {
    zone: &'static Zone,
    fresh: bool,
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = self.range();
        write!(f, "{start:#x}..{end:#x}")
    }
}

impl Hold {
    /// Its number, to be kept in memory that signal handlers reach; [`Hold::from_raw`] makes a hold of it again. Not 0.
    pub fn into_raw(self) -> usize {
        let base = ZONES.as_ptr();
        let index = (std::ptr::from_ref(self.zone).addr() - base.addr()) / size_of::<Zone>();
        std::mem::forget(self);
        index + 1
    }

    /// The hold that became this number; once for each number that [`Hold::into_raw`] gave. `None` for no such number.
    pub fn from_raw(raw: usize) -> Option<Hold> {
        let zone = ZONES.get(raw.checked_sub(1)?)?;
        Some(Hold { zone, fresh: false })
    }

    /// A thread waits until it is dropped.
    pub fn is_wanted(&self) -> bool {
        self.zone.wanted.load(Ordering::SeqCst) != 0
    }

    /// Whether the pages had to be protected for it, because they were not protected.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !is_here() {
            // A child's zones are not held by anything of its parent's.
            return;
        }
        self.zone.state.fetch_sub(1, Ordering::SeqCst);
        if self.zone.wanted.load(Ordering::SeqCst) != 0 {
            self.zone.wake();
        }
    }
}

/// Bytes of a page: what zones are multiples of.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Protect whole pages against writing, and hold them. `bell` is an eventfd that is rung (by a signal's handler) when a thread
/// waits for the hold; take it out with [`forget_bell`] before it is closed.
///
/// # Errors
/// [`Refused`]: nothing has changed.
///
/// # Safety
/// The pages must stay mapped, with their rights, until [`settle`] has returned for them: code that unmaps them or changes their protection
/// settles them first. Only threads that may be made to wait write to them.
pub unsafe fn guard(start: NonNull<u8>, len: usize, bell: BorrowedFd<'_>) -> Result<Hold, Refused> {
    // SAFETY: the caller's promise.
    unsafe { guard_for(start, len, bell.as_raw_fd()) }
}

/// The same without a bell: the process's helper ends the hold ([`set_helper`]).
///
/// # Errors
/// [`Refused`]: nothing has changed.
///
/// # Safety
/// As [`guard`].
pub unsafe fn guard_helped(start: NonNull<u8>, len: usize) -> Result<Hold, Refused> {
    // SAFETY: the caller's promise.
    unsafe { guard_for(start, len, -1) }
}

unsafe fn guard_for(start: NonNull<u8>, len: usize, bell: RawFd) -> Result<Hold, Refused> {
    let start = start.as_ptr().expose_provenance();
    let end = start.checked_add(len).ok_or(Refused::Unaligned)?;
    let page = page_size();
    if len == 0 || !start.is_multiple_of(page) || !len.is_multiple_of(page) {
        return Err(Refused::Unaligned);
    }
    let table = table();
    let _table = lock(&table);
    Table::guard(start, end, bell)
}

/// Waits until nothing of the range is in flight, and makes it writable. Call it before memory is unmapped, remapped or protected, or written
/// by a system call. A thread that other threads need to end their holds must not call it.
pub fn settle(start: *const u8, len: usize) {
    let start = start.addr();
    let end = start.saturating_add(len);
    if in_use().is_empty() || !is_here() {
        return;
    }
    for zone in in_use() {
        let state = zone.state.load(Ordering::SeqCst);
        if state & PHASE != FREE && zone.overlaps(start, end) {
            let _blocked = SignalsBlocked::new();
            zone.resolve(state);
        }
    }
}

/// Whether a byte of the range is protected.
pub fn is_guarded(start: *const u8, len: usize) -> bool {
    let start = start.addr();
    let end = start.saturating_add(len);
    in_use()
        .iter()
        .any(|zone| zone.state.load(Ordering::SeqCst) & PHASE != FREE && zone.overlaps(start, end))
}

/// This descriptor will be closed: no handler rings it any more.
pub fn forget_bell(bell: BorrowedFd<'_>) {
    for zone in in_use() {
        for slot in &zone.bells {
            let _ = slot.compare_exchange(bell.as_raw_fd(), -1, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_never_among_the_blocked_signals() {
        let is_blocked = |signal| {
            // SAFETY: asks for the thread's mask, into a set of ours.
            unsafe {
                let mut now: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut now);
                libc::sigismember(&raw const now, signal) == 1
            }
        };
        let blocked = SignalsBlocked::new();
        assert!(is_blocked(libc::SIGALRM) && !is_blocked(libc::SIGSEGV));
        drop(blocked);
        assert!(!is_blocked(libc::SIGALRM));
    }
}
