//! Records which objects threads use on the fast path, without an atomic read-modify-write: that would cost more than the rest of a post's overhead.
//!
//! Each thread has a record into which it writes its current object, with a plain store, before it checks the gate. A thread that closes a gate makes every
//! thread of the process execute a memory barrier (`membarrier(2)`) and then reads the records: the record of a thread that had not seen the closed gate names
//! the object. On a system without such a barrier there are no records, and visitors are counted at the gate, as all others are. A barrier that fails later
//! ends the process.

use std::cell::Cell;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, compiler_fence};

use rustix::thread::{MembarrierCommand, membarrier};

use crate::once::ForkOnce;

pub(crate) struct Record {
    /// The thread's current object, or NULL.
    place: AtomicPtr<()>,
    /// The record belongs to a thread.
    taken: AtomicBool,
    next: *const Record,
}

// SAFETY: `next` is written before any other thread can see the record.
unsafe impl Sync for Record {}

/// All records. They are leaked, and reused when their thread has ended.
static RECORDS: AtomicPtr<Record> = AtomicPtr::new(null_mut());

thread_local! {
    static MINE: Cell<Option<&'static Record>> = const { Cell::new(None) };
    static RETURN: Return = const { Return };
}

/// Gives the thread's record back when the thread ends.
struct Return;

impl Drop for Return {
    fn drop(&mut self) {
        if let Some(record) = MINE.take() {
            record.taken.store(false, Ordering::Release);
        }
    }
}

/// Registers this process for the barrier unless that is done. This is free in a process of one thread. With more threads the kernel takes some ten
/// milliseconds, which would otherwise delay the first post.
pub(crate) fn register() {
    has_barrier();
}

fn has_barrier() -> bool {
    static HAS: ForkOnce<bool> = ForkOnce::new();
    *HAS.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// This thread's record, if it has one and is in no object.
#[inline]
pub(crate) fn free_record() -> Option<&'static Record> {
    match MINE.get() {
        Some(record) if record.place.load(Ordering::Relaxed).is_null() => Some(record),
        // A nested call, for example in a signal handler.
        Some(_) => None,
        None => first(),
    }
}

#[cold]
fn first() -> Option<&'static Record> {
    // A thread that is ending could not give its record back.
    if !has_barrier() || RETURN.try_with(|_| ()).is_err() {
        return None;
    }
    let given_back = records().find(|record| {
        let (free, taken) = (false, true);
        let swap = record
            .taken
            .compare_exchange(free, taken, Ordering::Acquire, Ordering::Relaxed);
        swap.is_ok()
    });
    let record = given_back.unwrap_or_else(|| {
        let record: &'static mut Record = Box::leak(Box::new(Record {
            place: AtomicPtr::new(null_mut()),
            taken: AtomicBool::new(true),
            next: null(),
        }));
        let mut next = RECORDS.load(Ordering::Acquire);
        loop {
            record.next = next;
            match RECORDS.compare_exchange(next, record, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return record,
                Err(other) => next = other,
            }
        }
    });
    MINE.set(Some(record));
    Some(record)
}

fn records() -> impl Iterator<Item = &'static Record> {
    let mut next: *const Record = RECORDS.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: records are leaked.
        let record = unsafe { next.as_ref() }?;
        next = record.next;
        Some(record)
    })
}

impl Record {
    /// The thread enters an object; it must check the gate afterwards.
    #[inline]
    pub(crate) fn go_in(&self, place: *const ()) {
        self.place.store(place.cast_mut(), Ordering::Relaxed);
        // The barrier of the thread that closes a gate orders the accesses on the processor.
        compiler_fence(Ordering::SeqCst);
    }

    /// The thread has left the object.
    #[inline]
    pub(crate) fn go_out(&self) {
        self.place.store(null_mut(), Ordering::Release);
    }
}

/// Makes every thread of the process execute a memory barrier. The barrier has worked before, so visitors are in records. Without it the process cannot tell
/// whether a thread uses memory that is about to be freed, and cannot continue.
fn pass_barrier() {
    let pass = || membarrier(MembarrierCommand::PrivateExpedited);
    let Err(errno) = pass() else {
        return;
    };
    // Kernels differ in whether a forked child is registered.
    if membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() && pass().is_ok() {
        return;
    }
    let text = format!(
        "weft: membarrier(2) fails now ({errno}), perhaps because of a seccomp filter that was set after the first call of libibverbs. \
         Without it no object can be freed safely: the process ends\n"
    );
    // Not through the standard library's lock, which a forked child may have inherited. There may be no reader.
    // SAFETY: the length is that of the text.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    std::process::abort();
}

/// The gate of this place is closed: waits until no thread is in it that saw it open.
pub(crate) fn wait_for(place: *const ()) {
    if !has_barrier() {
        return;
    }
    pass_barrier();
    for record in records() {
        while std::ptr::eq(record.place.load(Ordering::Acquire), place) {
            std::thread::yield_now();
        }
    }
}
