//! Counters of completions.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use weft_fi::endpoint::{Counter, Endpoint};

use crate::abi::{CntrFid, CntrOps, DomainFid, FI_CLASS_CNTR, FI_EAVAIL, Ops};
use crate::object::{fid, plain};

#[repr(C)]
pub(crate) struct Cntr {
    fid: CntrFid,
    pub counter: Arc<Counter>,
    endpoints: Mutex<Vec<Weak<Endpoint>>>,
}

static CNTR: Ops = plain::<Cntr>();
static CNTR_OPS: CntrOps = CntrOps {
    size: size_of::<CntrOps>(),
    read,
    readerr,
    add,
    set,
    wait,
    adderr,
    seterr,
};

pub(crate) unsafe extern "C" fn open(
    _: *mut DomainFid,
    _: *mut c_void,
    out: *mut *mut CntrFid,
    context: *mut c_void,
) -> c_int {
    let cntr = Box::new(Cntr {
        fid: CntrFid {
            fid: fid(FI_CLASS_CNTR, context, &CNTR),
            ops: &raw const CNTR_OPS,
        },
        counter: Arc::default(),
        endpoints: Mutex::default(),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(cntr).cast()) };
    0
}

impl Cntr {
    pub(crate) fn add(&self, endpoint: Weak<Endpoint>) {
        let mut endpoints = self
            .endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&endpoint));
        endpoints.push(endpoint);
    }

    /// Programs that look at counters alone make progress by it.
    fn progress(&self) -> Option<Arc<Endpoint>> {
        let endpoints = self
            .endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let all: Vec<_> = endpoints.iter().filter_map(Weak::upgrade).collect();
        drop(endpoints);
        for endpoint in &all {
            endpoint.progress();
        }
        all.into_iter().next()
    }
}

unsafe fn cntr<'a>(fid: *mut CntrFid) -> &'a Cntr {
    // SAFETY: made by `open`.
    unsafe { &*fid.cast::<Cntr>() }
}

unsafe extern "C" fn read(fid: *mut CntrFid) -> u64 {
    // SAFETY: an object of ours; below as well.
    let cntr = unsafe { cntr(fid) };
    cntr.progress();
    cntr.counter.done()
}

unsafe extern "C" fn readerr(fid: *mut CntrFid) -> u64 {
    // SAFETY: as above.
    let cntr = unsafe { cntr(fid) };
    cntr.progress();
    cntr.counter.failed()
}

unsafe extern "C" fn add(fid: *mut CntrFid, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { cntr(fid) }.counter.add(value);
    0
}

unsafe extern "C" fn set(fid: *mut CntrFid, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { cntr(fid) }.counter.set(value);
    0
}

unsafe extern "C" fn adderr(fid: *mut CntrFid, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { cntr(fid) }.counter.add_failed(value);
    0
}

unsafe extern "C" fn seterr(fid: *mut CntrFid, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { cntr(fid) }.counter.set_failed(value);
    0
}

/// Waits until `threshold` operations are complete; `-FI_EAVAIL` if one fails meanwhile.
unsafe extern "C" fn wait(fid: *mut CntrFid, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: as above.
    let cntr = unsafe { cntr(fid) };
    let end = u64::try_from(timeout).ok();
    let end = end.map(|ms| Instant::now() + Duration::from_millis(ms));
    let failed = cntr.counter.failed();
    loop {
        let endpoint = cntr.progress();
        if cntr.counter.done() >= threshold {
            return 0;
        }
        if cntr.counter.failed() != failed {
            return -FI_EAVAIL;
        }
        let left = match end {
            None => Duration::MAX,
            Some(end) => end.saturating_duration_since(Instant::now()),
        };
        if left.is_zero() {
            return -libc::ETIMEDOUT;
        }
        match endpoint {
            Some(endpoint) => endpoint.wait(left),
            None => std::thread::sleep(left.min(Duration::from_millis(1))),
        }
    }
}
