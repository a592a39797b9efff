//! Completion counters: the amount of a queue pair's completed work, without a completion of each request. rdma-core has them since version 65.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::ext::CqExt;
use weft_verbs::{CompCounters, Counter, Work};

use super::context::{Context, Ctx};
use super::cq::Cq;
use super::limit::{Count, Counted};
use super::object::{Kind as _, Name, PerFork, find, kind, lock, turn};
use super::params::{put, read_param};
use super::qp::QpObj;
use super::types::*;
use super::users::{Users, end_unused};
use crate::call::{pointer, status};

/// A counter, as C sees it (`<infiniband/verbs.h>` of rdma-core 65; and the structs below).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_comp_cntr {
    context: *mut ibv_context,
    handle: u32,
}

// SAFETY: a pointer, which may be NULL, and a number.
unsafe impl Zeroed for ibv_comp_cntr {}

/// The parameters of a new counter.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_comp_cntr_init_attr {
    comp_mask: u32,
    /// [`WRS`] or [`BYTES`].
    kind: c_uint,
    flags: u32,
}

/// The work of a queue pair that a counter counts.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_qp_attach_comp_cntr_attr {
    comp_mask: u32,
    op_mask: u32,
}

/// The capabilities of the device's counters.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_comp_cntr_caps {
    max_value: u64,
    max_counters: u32,
    supported_qp_attach_ops: u32,
}

const WRS: c_uint = 0;
const BYTES: c_uint = 1;

/// The bits of `op_mask`. Bits 3 and 5 are Reads and Writes of the peer, which neither side reports to the other.
const OPS: [(u32, Work); 4] = [
    (1 << 0, Work::Send),
    (1 << 1, Work::Recv),
    (1 << 2, Work::Read),
    (1 << 4, Work::Write),
];
const ALL_OPS: u32 = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 4;

/// The maximum number of counters of a process.
const MAX_COUNTERS: u32 = 1 << 16;

static COUNTERS: PerFork<Count> = PerFork::new();

/// The object behind an `ibv_comp_cntr`.
pub(crate) struct Cntr {
    ctx: Arc<Ctx>,
    counter: Arc<Counter>,
    /// Queue pairs that it is attached to.
    users: Users,
    /// Their completion queues: a thread that reads a counter drives them, as a polling thread does.
    queues: Mutex<Vec<Name<Cq>>>,
    /// Successes and errors together, at the latest read.
    seen: AtomicU64,
    _counted: Counted,
}

kind!(Cntr as ibv_comp_cntr, 0xc0c2_7e12);

impl Cntr {
    /// Drives the counted work.
    fn drive(&self) {
        let queues = lock(&self.queues).clone();
        for queue in queues {
            if let Ok(queue) = queue.get() {
                queue.native.look();
            }
        }
        let sum = [self.counter.good(), self.counter.bad()]
            .map(|of| of.load(Ordering::Acquire))
            .into_iter()
            .fold(0_u64, u64::wrapping_add);
        if self.seen.swap(sum, Ordering::Relaxed) == sum {
            // A loop of reads: the peer may need this core.
            std::thread::yield_now();
        }
    }
}

/// `_ibv_query_comp_cntr_caps`
///
/// # Safety
/// As its manual page says: `caps_size` bytes at `caps`.
pub unsafe fn _ibv_query_comp_cntr_caps(
    context: *mut ibv_context,
    caps: *mut ibv_comp_cntr_caps,
    caps_size: usize,
) -> c_int {
    status(|| {
        find::<Context>(context)?;
        if caps.is_null() || caps_size < size_of::<ibv_comp_cntr_caps>() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise. Fields that a later header adds are zero.
        unsafe {
            caps.cast::<u8>().write_bytes(0, caps_size);
            caps.write(ibv_comp_cntr_caps {
                max_value: u64::MAX,
                max_counters: MAX_COUNTERS,
                supported_qp_attach_ops: ALL_OPS,
            });
        }
        Ok(())
    })
}

/// `ibv_create_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_comp_cntr(
    context: *mut ibv_context,
    cc_attr: *mut ibv_comp_cntr_init_attr,
) -> *mut ibv_comp_cntr {
    pointer(|| {
        let context = find::<Context>(context)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(cc_attr) }?;
        if attr.comp_mask != 0 || attr.flags != 0 {
            return Err(Errno::INVAL);
        }
        if !matches!(attr.kind, WRS | BYTES) {
            return Err(Errno::OPNOTSUPP);
        }
        let body = Cntr {
            ctx: Arc::clone(&context.ctx),
            counter: Counter::new(attr.kind == BYTES),
            users: Users::default(),
            queues: Mutex::default(),
            seen: AtomicU64::new(0),
            _counted: COUNTERS.take(MAX_COUNTERS)?,
        };
        let made = Cntr::pool().make(body, |c, _| c.context = context.handle())?;
        Ok(made.handle())
    })
}

/// `ibv_destroy_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_comp_cntr(comp_cntr: *mut ibv_comp_cntr) -> c_int {
    end_unused::<Cntr>(comp_cntr, |counter| &counter.users)
}

/// Adds to one of a counter's two values, or sets it.
fn change(
    comp_cntr: *mut ibv_comp_cntr,
    which: fn(&Counter) -> &AtomicU64,
    change: impl FnOnce(&AtomicU64),
) -> c_int {
    status(|| {
        change(which(&find::<Cntr>(comp_cntr)?.counter));
        Ok(())
    })
}

/// `ibv_set_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_set_comp_cntr(comp_cntr: *mut ibv_comp_cntr, value: u64) -> c_int {
    change(comp_cntr, Counter::good, |count| {
        count.store(value, Ordering::Release);
    })
}

/// `ibv_set_err_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_set_err_comp_cntr(comp_cntr: *mut ibv_comp_cntr, value: u64) -> c_int {
    change(comp_cntr, Counter::bad, |count| {
        count.store(value, Ordering::Release);
    })
}

/// `ibv_inc_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_inc_comp_cntr(comp_cntr: *mut ibv_comp_cntr, amount: u64) -> c_int {
    change(comp_cntr, Counter::good, |count| {
        count.fetch_add(amount, Ordering::AcqRel);
    })
}

/// `ibv_inc_err_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_inc_err_comp_cntr(comp_cntr: *mut ibv_comp_cntr, amount: u64) -> c_int {
    change(comp_cntr, Counter::bad, |count| {
        count.fetch_add(amount, Ordering::AcqRel);
    })
}

/// # Safety
/// `value` is NULL, or there is room for a value.
unsafe fn read(
    comp_cntr: *mut ibv_comp_cntr,
    which: fn(&Counter) -> &AtomicU64,
    value: *mut u64,
) -> c_int {
    status(|| {
        let counter = find::<Cntr>(comp_cntr)?;
        counter.drive();
        // SAFETY: the caller's promise.
        unsafe { put(value, which(&counter.counter).load(Ordering::Acquire)) }
    })
}

/// `ibv_read_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_read_comp_cntr(comp_cntr: *mut ibv_comp_cntr, value: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { read(comp_cntr, Counter::good, value) }
}

/// `ibv_read_err_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_read_err_comp_cntr(comp_cntr: *mut ibv_comp_cntr, value: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { read(comp_cntr, Counter::bad, value) }
}

/// `ibv_qp_attach_comp_cntr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_qp_attach_comp_cntr(
    qp: *mut ibv_qp,
    comp_cntr: *mut ibv_comp_cntr,
    attr: *mut ibv_qp_attach_comp_cntr_attr,
) -> c_int {
    status(|| {
        let qp = turn::<QpObj>(qp)?;
        let counter = find::<Cntr>(comp_cntr)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        if attr.comp_mask != 0 || attr.op_mask == 0 || !Arc::ptr_eq(&qp.ctx, &counter.ctx) {
            return Err(Errno::INVAL);
        }
        if attr.op_mask & !ALL_OPS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if !matches!(qp.state(), IBV_QPS_RESET | IBV_QPS_INIT) {
            return Err(Errno::INVAL);
        }
        let comp_counters: &CompCounters = qp.comp_counters()?;
        let wanted = || OPS.into_iter().filter(|(bit, _)| attr.op_mask & bit != 0);
        // All or nothing; no other thread attaches to this queue pair meanwhile.
        if wanted().any(|(_, work)| comp_counters.counts(work)) {
            return Err(Errno::BUSY);
        }
        for (_, work) in wanted() {
            comp_counters.attach(work, &counter.counter);
        }
        qp.counted_by(counter.users.hold());
        let mut queues = lock(&counter.queues);
        // A queue that is gone needs no driving.
        queues.retain(|queue| queue.get().is_ok());
        for queue in qp.queues.into_iter().flatten() {
            if !queues.contains(&queue) {
                queues.push(queue);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As a C compiler lays them out on 64-bit machines with the header of rdma-core 65.
    #[test]
    fn the_structs_are_laid_out_as_c_has_them() {
        assert_eq!(size_of::<ibv_comp_cntr>(), 16);
        assert_eq!(
            offset_of!(ibv_comp_cntr, handle),
            size_of::<*mut ibv_context>()
        );
        assert_eq!(size_of::<ibv_comp_cntr_init_attr>(), 12);
        assert_eq!(offset_of!(ibv_comp_cntr_init_attr, flags), 8);
        assert_eq!(size_of::<ibv_qp_attach_comp_cntr_attr>(), 8);
        assert_eq!(size_of::<ibv_comp_cntr_caps>(), 16);
        assert_eq!(offset_of!(ibv_comp_cntr_caps, supported_qp_attach_ops), 12);
    }
}
