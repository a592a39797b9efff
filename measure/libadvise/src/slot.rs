//! This process's slot in the record.
//!
//! # Safety
//!
//! The record's file is mapped once, at the start, and stays; all of it is atomic words. It is as long as a [`Table`] when it is mapped, and
//! no process shortens it.

use std::cell::Cell;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

use weft_advise::record::{
    Count, ENVIRONMENT, LiveProcess, MAGIC, PROCESS_BYTES, PROCESSES, TABLE_BYTES, Table,
};

use crate::next;

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
static MINE: AtomicPtr<LiveProcess> = AtomicPtr::new(std::ptr::null_mut());
/// State of this process's slot: `FREE`, `BUSY` (a thread is taking one), `TAKEN`, `NONE` (none is available).
static STATE: AtomicU32 = AtomicU32::new(NONE);
const FREE: u32 = 0;
const BUSY: u32 = 1;
const TAKEN: u32 = 2;
const NONE: u32 = 3;
/// Counts forks, so that a thread knows whether it has been counted in this process.
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// The process that this memory belongs to.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static COUNTED_IN: Cell<u32> = const { Cell::new(0) };
    static DICE: Cell<u64> = const { Cell::new(0) };
}

/// Monotonic nanoseconds.
#[inline]
pub(crate) fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds of processor time of this thread.
pub(crate) fn cpu() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of processor time of this process.
pub(crate) fn cpu_of_all() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

#[inline]
fn clock(id: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the time.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A number that differs from call to call (xorshift): samples must not fall in step with the program's pattern of calls.
#[inline]
pub(crate) fn dice() -> u64 {
    DICE.with(|dice| {
        let mut x = dice.get();
        if x == 0 {
            x = now() | 1;
        }
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        dice.set(x);
        x >> 16
    })
}

/// Returns the slot, which the first call takes. `None` if the process is not observed.
#[inline]
pub(crate) fn mine() -> Option<&'static LiveProcess> {
    match STATE.load(Acquire) {
        TAKEN => {}
        FREE => take()?,
        _ => return None,
    }
    // SAFETY: while the state is TAKEN this is a slot of the table, which stays mapped.
    let slot = unsafe { MINE.load(Relaxed).as_ref() }?;
    COUNTED_IN.with(|counted| {
        let generation = GENERATION.load(Relaxed);
        if counted.get() != generation {
            counted.set(generation);
            slot.add(Count::Threads, 1);
        }
    });
    Some(slot)
}

/// The slot if this process has made a socket call before.
#[inline]
pub(crate) fn known() -> Option<&'static LiveProcess> {
    (STATE.load(Relaxed) == TAKEN).then(mine)?
}

#[cold]
fn take() -> Option<()> {
    // Another thread, or the call that a signal has interrupted, is at it: this call is not recorded.
    STATE.compare_exchange(FREE, BUSY, AcqRel, Relaxed).ok()?;
    // SAFETY: mapped for good, or null.
    let table = unsafe { TABLE.load(Relaxed).as_ref() };
    let Some(table) = table else {
        STATE.store(NONE, Release);
        return None;
    };
    let at = table.header.given.fetch_add(1, Relaxed);
    let Some(slot) = usize::try_from(at)
        .ok()
        .and_then(|at| table.processes.get(at))
    else {
        table.header.lost.fetch_add(1, Relaxed);
        // Prevents an overflow of the count.
        table.header.given.store(PROCESSES as u64, Relaxed);
        STATE.store(NONE, Release);
        return None;
    };
    let mut name = [0u8; 512];
    // SAFETY: writes at most as many bytes as there are.
    let len = unsafe {
        libc::readlink(
            c"/proc/self/exe".as_ptr(),
            name.as_mut_ptr().cast(),
            name.len(),
        )
    };
    slot.set_name(&name[..usize::try_from(len).unwrap_or(0)]);
    // SAFETY: these cannot fail.
    let (pid, parent) = unsafe { (libc::getpid(), libc::getppid()) };
    slot.set(Count::Parent, parent as u64);
    slot.set(Count::Started, now());
    slot.set(Count::Pid, pid as u64);
    MINE.store(std::ptr::from_ref(slot).cast_mut(), Relaxed);
    STATE.store(TAKEN, Release);
    Some(())
}

fn pid() -> u32 {
    // SAFETY: cannot fail.
    unsafe { libc::getpid() }.cast_unsigned()
}

/// Returns true if another process has our memory: the child of a `vfork`, whose descriptors are not ours.
pub(crate) fn is_guest() -> bool {
    OWNER.load(Relaxed) != pid()
}

extern "C" fn in_parent() {
    // SAFETY: mapped for good, or null.
    if let Some(table) = unsafe { TABLE.load(Relaxed).as_ref() } {
        table.header.forks.fetch_add(1, Relaxed);
    }
    if let Some(slot) = known() {
        slot.add(Count::Forks, 1);
    }
}

extern "C" fn in_child() {
    if TABLE.load(Relaxed).is_null() {
        return;
    }
    OWNER.store(pid(), Relaxed);
    GENERATION.fetch_add(1, Relaxed);
    STATE.store(FREE, Release);
}

pub(crate) extern "C" fn start() {
    let before = crate::errno();
    if let Some(path) = std::env::var_os(ENVIRONMENT)
        && let Some(table) = map(path.as_bytes())
    {
        // SAFETY: just mapped.
        unsafe { (*table).header.images.fetch_add(1, Relaxed) };
        OWNER.store(pid(), Relaxed);
        TABLE.store(table, Relaxed);
        STATE.store(FREE, Release);
        // SAFETY: both functions are there as long as this library, which is never unloaded before the end.
        unsafe { libc::pthread_atfork(None, Some(in_parent), Some(in_child)) };
    }
    crate::set_errno(before);
}

pub(crate) extern "C" fn end() {
    if let Some(slot) = known() {
        slot.set(Count::Cpu, cpu_of_all());
        slot.set(Count::Ended, now());
    }
}

/// Maps the record, if the file is one.
fn map(path: &[u8]) -> Option<*mut Table> {
    let mut name = [0u8; 4096];
    let room = name.len() - 1;
    name[..room].get_mut(..path.len())?.copy_from_slice(path);
    // SAFETY: the name has its end.
    let fd = unsafe {
        libc::open(
            name.as_ptr().cast(),
            libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW,
        )
    };
    if fd < 0 {
        return None;
    }
    // SAFETY: all zeros is a value of it.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writes the file's attributes to a local.
    let known = unsafe { libc::fstat(fd, &raw mut about) } == 0;
    let long_enough = known && usize::try_from(about.st_size).is_ok_and(|n| n >= TABLE_BYTES);
    let mapped = if long_enough {
        // SAFETY: a new mapping.
        unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                TABLE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        }
    } else {
        libc::MAP_FAILED
    };
    // SAFETY: it is ours.
    unsafe { next::close(fd) };
    if mapped == libc::MAP_FAILED {
        return None;
    }
    let table: *mut Table = mapped.cast();
    // SAFETY: it is as long as a table, and all of it is atomic words.
    let header = unsafe { &(*table).header };
    if header.magic.load(Relaxed) != MAGIC || header.stride.load(Relaxed) != PROCESS_BYTES as u64 {
        // SAFETY: nothing else refers to it.
        unsafe { libc::munmap(mapped, TABLE_BYTES) };
        return None;
    }
    Some(table)
}
