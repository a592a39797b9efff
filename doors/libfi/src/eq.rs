//! Event queues. Nothing here is connected, so the only events are those that the program writes.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::abi::{EqFid, EqOps, FI_CLASS_EQ, FI_ETOOSMALL, FI_PEEK, FabricFid, Ops};
use crate::object::{MISSING, fid, plain};

#[repr(C)]
pub(crate) struct Eq {
    fid: EqFid,
    /// Their kinds and contents.
    events: Mutex<VecDeque<(u32, Vec<u8>)>>,
    come: Condvar,
}

static EQ: Ops = plain::<Eq>();
static EQ_OPS: EqOps = EqOps {
    size: size_of::<EqOps>(),
    read,
    readerr: no_error,
    write,
    sread,
    strerror: MISSING,
};

pub(crate) unsafe extern "C" fn open(
    _: *mut FabricFid,
    _: *mut c_void,
    out: *mut *mut EqFid,
    context: *mut c_void,
) -> c_int {
    let eq = Box::new(Eq {
        fid: EqFid {
            fid: fid(FI_CLASS_EQ, context, &EQ),
            ops: &raw const EQ_OPS,
        },
        events: Mutex::default(),
        come: Condvar::new(),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(eq).cast()) };
    0
}

unsafe fn eq<'a>(fid: *mut EqFid) -> &'a Eq {
    // SAFETY: made by `open`.
    unsafe { &*fid.cast::<Eq>() }
}

unsafe extern "C" fn no_error() -> isize {
    -(libc::EAGAIN as isize)
}

unsafe extern "C" fn read(
    fid: *mut EqFid,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    // SAFETY: as libfabric's user promises.
    unsafe { sread(fid, event, buf, len, 0, flags) }
}

/// As `fi_eq_sread(3)`: with a negative time-out it waits for ever.
unsafe extern "C" fn sread(
    fid: *mut EqFid,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    // SAFETY: an object of ours.
    let eq = unsafe { eq(fid) };
    let events = eq.events.lock().unwrap_or_else(PoisonError::into_inner);
    let none = |events: &mut VecDeque<_>| events.is_empty();
    let mut events = match u64::try_from(timeout) {
        Err(_) => eq
            .come
            .wait_while(events, none)
            .unwrap_or_else(PoisonError::into_inner),
        Ok(ms) => {
            let limit = Duration::from_millis(ms);
            let waited = eq.come.wait_timeout_while(events, limit, none);
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
    };
    let Some((kind, content)) = events.front() else {
        return -(libc::EAGAIN as isize);
    };
    if content.len() > len {
        return -(FI_ETOOSMALL as isize);
    }
    let count = content.len();
    // SAFETY: a place for the kind, and `len` bytes.
    unsafe {
        event.write(*kind);
        std::ptr::copy_nonoverlapping(content.as_ptr(), buf.cast(), count);
    }
    if flags & FI_PEEK == 0 {
        events.pop_front();
    }
    count.cast_signed()
}

unsafe extern "C" fn write(
    fid: *mut EqFid,
    event: u32,
    buf: *const c_void,
    len: usize,
    _: u64,
) -> isize {
    let mut content = vec![0; len];
    // SAFETY: an object of ours, and `len` bytes.
    let eq = unsafe {
        std::ptr::copy_nonoverlapping(buf.cast(), content.as_mut_ptr(), len);
        eq(fid)
    };
    let mut events = eq.events.lock().unwrap_or_else(PoisonError::into_inner);
    events.push_back((event, content));
    eq.come.notify_all();
    len.cast_signed()
}
