//! Event queues.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use libc::timeval;
use rustix::io::Errno;
use weft_exs::{Queue, Wait};

use super::event;
use super::op::Op;
use super::started::{QueueEntry, Started};
use super::state::state;
use super::types::{
    EXS_EVTVEC_MAX, EXS_QATTR_DEPTH, EXS_QATTR_EVENTS, EXS_QATTR_SIGNAL, EXS_QATTR_WAIT,
    EXS_SIG_DISABLE, EXS_SIG_ENABLE, EXS_WAIT_ADAPTIVE, EXS_WAIT_BUSY_POLL, EXS_WAIT_NOTIFY, Event,
    QHandle, Signal,
};

/// Cancels the operations that `wanted` selects by the operation and whether its queue still exists. Returns the number that will end.
pub(super) fn cancel(wanted: impl Fn(&Op, bool) -> bool) -> usize {
    // Locked while both lists are read, so that a queue that is being deleted is in one of them.
    let deleted = state().deleted();
    let queues = state().queues.all();
    let gone: Vec<_> = deleted.iter().filter_map(Weak::upgrade).collect();
    drop(deleted);
    let here = queues.iter().map(|queue| (&queue.started, true));
    here.chain(gone.iter().map(|started| (started, false)))
        .map(|(started, there)| started.cancel(|op| wanted(op, there)))
        .sum()
}

/// The first of `count` consecutive tokens, for operations that only the library waits for.
pub(super) fn own_token(count: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(count, Ordering::Relaxed)
}

/// `exs_qcreate`
pub fn qcreate(depth: c_int) -> Result<QHandle, Errno> {
    let queue = Queue::new(&state().context()?, positive(depth)?)?;
    let started = Arc::new(Started::new());
    // The operations of a deleted queue continue, and keep their resources until they end.
    let left = Arc::clone(&started);
    queue.on_unheard(move |token| drop(left.take(token)));
    state()
        .queues
        .insert(Arc::new(QueueEntry { queue, started }))
}

/// `exs_qdelete`
pub fn qdelete(qh: QHandle) -> Result<c_int, Errno> {
    let mut deleted = state().deleted();
    let entry = state().queues.remove(qh, |_| Ok(()))?;
    // The library keeps the queue, and with it its operations, while some are outstanding.
    deleted.retain(|started| started.strong_count() > 0);
    deleted.push(Arc::downgrade(&entry.started));
    drop(deleted);
    entry.queue.delete();
    Ok(0)
}

fn positive(value: c_int) -> Result<usize, Errno> {
    match usize::try_from(value) {
        Ok(0) | Err(_) => Err(Errno::INVAL),
        Ok(value) => Ok(value),
    }
}

/// # Errors
/// `EFAULT` for null, `EINVAL` if the size differs from the attribute's.
fn attribute<T>(value: *const c_void, len: usize) -> Result<*const T, Errno> {
    if value.is_null() {
        return Err(Errno::FAULT);
    }
    if len != size_of::<T>() {
        return Err(Errno::INVAL);
    }
    Ok(value.cast())
}

unsafe fn get<T: Copy>(value: *const c_void, len: usize) -> Result<T, Errno> {
    let at = attribute::<T>(value, len)?;
    // SAFETY: the caller's promise: `len` bytes are readable.
    Ok(unsafe { at.read_unaligned() })
}

unsafe fn put<T: Copy>(new: T, value: *mut c_void, len: usize) -> Result<c_int, Errno> {
    let at = attribute::<T>(value, len)?.cast_mut();
    // SAFETY: the caller's promise: `len` bytes are writable.
    unsafe { at.write_unaligned(new) };
    Ok(0)
}

/// `exs_qmodify`
pub unsafe fn qmodify(
    qh: QHandle,
    attr: c_int,
    value: *const c_void,
    len: usize,
) -> Result<c_int, Errno> {
    let queue = &state().queues.get(qh)?.queue;
    match i64::from(attr) {
        EXS_QATTR_DEPTH => {
            // SAFETY: the caller's promise.
            let depth = unsafe { get::<c_int>(value, len) }?;
            queue.set_depth(positive(depth)?)?;
        }
        EXS_QATTR_SIGNAL => {
            // SAFETY: the caller's promise.
            let signal = unsafe { get::<Signal>(value, len) }?;
            match i64::from(signal.sig_action) {
                EXS_SIG_ENABLE => queue.set_signal(true),
                EXS_SIG_DISABLE => queue.set_signal(false),
                _ => return Err(Errno::INVAL),
            }
        }
        EXS_QATTR_WAIT => {
            // SAFETY: the caller's promise.
            let wait = unsafe { get::<c_int>(value, len) }?;
            queue.set_wait(match i64::from(wait) {
                EXS_WAIT_ADAPTIVE => Wait::Adaptive,
                EXS_WAIT_NOTIFY => Wait::Notify,
                EXS_WAIT_BUSY_POLL => Wait::BusyPoll,
                _ => return Err(Errno::INVAL),
            });
        }
        _ => return Err(Errno::INVAL),
    }
    Ok(0)
}

/// `exs_qstatus`
pub unsafe fn qstatus(
    qh: QHandle,
    attr: c_int,
    value: *mut c_void,
    len: usize,
) -> Result<c_int, Errno> {
    let queue = &state().queues.get(qh)?.queue;
    let number = match i64::from(attr) {
        EXS_QATTR_DEPTH => queue.depth() as i64,
        EXS_QATTR_EVENTS => queue.waiting() as i64,
        EXS_QATTR_WAIT => match queue.wait_mode() {
            Wait::Adaptive => EXS_WAIT_ADAPTIVE,
            Wait::Notify => EXS_WAIT_NOTIFY,
            Wait::BusyPoll => EXS_WAIT_BUSY_POLL,
        },
        EXS_QATTR_SIGNAL => {
            let action = if queue.signal() {
                EXS_SIG_ENABLE
            } else {
                EXS_SIG_DISABLE
            };
            let signal = Signal {
                sig_action: action as c_int,
                sig_fd: queue.as_fd().as_raw_fd(),
            };
            // SAFETY: the caller's promise.
            return unsafe { put(signal, value, len) };
        }
        _ => return Err(Errno::INVAL),
    };
    // SAFETY: the caller's promise.
    unsafe { put(number as c_int, value, len) }
}

/// A time-out: `None` for null.
///
/// # Errors
/// `EINVAL` for a negative one, or one with a million microseconds or more.
///
/// # Safety
/// `timeout` is null or readable.
pub(super) unsafe fn timeout(timeout: *const timeval) -> Result<Option<Duration>, Errno> {
    if timeout.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    duration(unsafe { timeout.read_unaligned() }).map(Some)
}

pub(super) fn duration(time: timeval) -> Result<Duration, Errno> {
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::INVAL)?;
    match u32::try_from(time.tv_usec) {
        Ok(micros @ 0..1_000_000) => Ok(Duration::new(seconds, micros * 1000)),
        _ => Err(Errno::INVAL),
    }
}

/// `exs_qdequeue`
pub unsafe fn qdequeue(
    qh: QHandle,
    events: *mut Event,
    n: c_int,
    time: *const timeval,
) -> Result<c_int, Errno> {
    thread_local! {
        static TAKEN: RefCell<Vec<weft_exs::Event>> = const { RefCell::new(Vec::new()) };
    }
    let entry = state().queues.get(qh)?;
    let max = n.unsigned_abs() as usize;
    if !(1..=EXS_EVTVEC_MAX as usize).contains(&max) {
        return Err(Errno::INVAL);
    }
    if events.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let limit = unsafe { timeout(time) }?;
    let at_least = match (n, limit) {
        (_, Some(Duration::ZERO)) => 0,
        (..0, _) => max,
        _ => 1,
    };
    // Taken out of the cell, so that code run by a dropped event cannot find it borrowed.
    let mut taken = TAKEN.take();
    let waited = entry.queue.dequeue(&mut taken, max, at_least, limit);
    let mut count = 0;
    for event in taken.drain(..) {
        if let Some(op) = entry.started.take(event.token) {
            // SAFETY: `count` stays below `max`, and `events` has room for `max` events.
            unsafe { events.add(count).write(event::told(event, op)) };
            count += 1;
        }
    }
    TAKEN.set(taken);
    waited?;
    Ok(count as c_int)
}
