//! Completion queues.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use weft_fi::endpoint::{Completion, Endpoint, Queue, Status};

use crate::abi::{
    CqAttr, CqEntry, CqErrEntry, CqFid, CqOps, DomainFid, FI_ADDR_UNSPEC, FI_CLASS_CQ,
    FI_CQ_FORMAT_CONTEXT, FI_CQ_FORMAT_DATA, FI_CQ_FORMAT_MSG, FI_CQ_FORMAT_TAGGED,
    FI_CQ_FORMAT_UNSPEC, FI_EAVAIL, FI_ETRUNC, FI_MSG, FI_RECV, FI_REMOTE_CQ_DATA, FI_SEND,
    FI_TAGGED, FI_WAIT_UNSPEC, Fid, Ops,
};
use crate::domain::close;
use crate::{MISSING, no_bind, no_control};

#[repr(C)]
pub(crate) struct Cq {
    fid: CqFid,
    pub queue: Queue,
    /// Bytes of an entry.
    entry: usize,
    endpoints: Mutex<Vec<Weak<Endpoint>>>,
}

static CQ: Ops = Ops {
    size: size_of::<Ops>(),
    close: close::<Cq>,
    bind: no_bind,
    control: no_control,
    missing: [MISSING; 3],
};
static CQ_OPS: CqOps = CqOps {
    size: size_of::<CqOps>(),
    read,
    readfrom,
    readerr,
    sread,
    sreadfrom,
    signal: MISSING,
    strerror,
};

pub(crate) unsafe extern "C" fn open(
    _: *mut DomainFid,
    attr: *mut CqAttr,
    out: *mut *mut CqFid,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a valid structure or null.
    let (format, wait) = unsafe { attr.as_ref() }.map_or((0, 0), |a| (a.format, a.wait_obj));
    if wait > FI_WAIT_UNSPEC {
        return -libc::ENOSYS;
    }
    let entry = match format {
        FI_CQ_FORMAT_UNSPEC | FI_CQ_FORMAT_TAGGED => size_of::<CqEntry>(),
        FI_CQ_FORMAT_CONTEXT => std::mem::offset_of!(CqEntry, flags),
        FI_CQ_FORMAT_MSG => std::mem::offset_of!(CqEntry, buf),
        FI_CQ_FORMAT_DATA => std::mem::offset_of!(CqEntry, tag),
        _ => return -libc::ENOSYS,
    };
    let cq = Box::new(Cq {
        fid: CqFid {
            fid: Fid {
                fclass: FI_CLASS_CQ,
                context,
                ops: &raw const CQ,
            },
            ops: &raw const CQ_OPS,
        },
        queue: Queue::default(),
        entry,
        endpoints: Mutex::default(),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(cq).cast()) };
    0
}

impl Cq {
    pub(crate) fn add(&self, endpoint: Weak<Endpoint>) {
        let mut endpoints = self.endpoints();
        endpoints.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&endpoint));
        endpoints.push(endpoint);
    }

    fn endpoints(&self) -> MutexGuard<'_, Vec<Weak<Endpoint>>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) {
        for endpoint in self.endpoints().iter().filter_map(Weak::upgrade) {
            endpoint.progress();
        }
    }

    fn wait(&self, limit: Duration) {
        let first = self.endpoints().iter().find_map(Weak::upgrade);
        match first {
            Some(endpoint) => endpoint.wait(limit),
            None => std::thread::sleep(limit.min(Duration::from_millis(1))),
        }
    }

    /// Takes up to `count` completions; 0 when there are none, `-FI_EAVAIL` when an error is next.
    unsafe fn take(&self, buf: *mut c_void, count: usize) -> isize {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = 0;
        while taken < count
            && let Some(completion) = queue.pop_front_if(|c| error(c).is_none())
        {
            let entry = entry(&completion);
            // SAFETY: room for `count` entries of this queue's format, which is the beginning of `CqEntry`.
            unsafe {
                let to = buf.cast::<u8>().add(taken * self.entry);
                std::ptr::copy_nonoverlapping((&raw const entry).cast(), to, self.entry);
            }
            taken += 1;
        }
        if taken == 0 && !queue.is_empty() && count > 0 {
            return -(FI_EAVAIL as isize);
        }
        taken.cast_signed()
    }
}

/// The error of a completion, if it is none of success.
fn error(completion: &Completion) -> Option<c_int> {
    match completion.status {
        Status::Done if completion.meta.len > completion.room => Some(FI_ETRUNC),
        Status::Done => None,
        Status::Failed => Some(libc::ECONNRESET),
        Status::Canceled => Some(libc::ECANCELED),
        Status::NoMessage => Some(libc::ENOMSG),
    }
}

fn entry(completion: &Completion) -> CqEntry {
    let meta = &completion.meta;
    let mut flags = if completion.is_recv { FI_RECV } else { FI_SEND };
    flags |= if meta.tagged { FI_TAGGED } else { FI_MSG };
    if completion.is_recv && meta.data.is_some() {
        flags |= FI_REMOTE_CQ_DATA;
    }
    CqEntry {
        op_context: completion.context as *mut c_void,
        flags,
        len: meta.len.min(completion.room) as usize,
        buf: std::ptr::null_mut(),
        data: meta.data.unwrap_or(0),
        tag: meta.tag,
    }
}

unsafe fn cq<'a>(fid: *mut CqFid) -> &'a Cq {
    // SAFETY: made by `open`.
    unsafe { &*fid.cast::<Cq>() }
}

unsafe extern "C" fn read(fid: *mut CqFid, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: an object of ours, and room for `count` entries; below as well.
    unsafe {
        let cq = cq(fid);
        let taken = cq.take(buf, count);
        if taken != 0 {
            return taken;
        }
        cq.progress();
        match cq.take(buf, count) {
            0 => -(libc::EAGAIN as isize),
            taken => taken,
        }
    }
}

unsafe extern "C" fn readfrom(
    fid: *mut CqFid,
    buf: *mut c_void,
    count: usize,
    from: *mut u64,
) -> isize {
    // SAFETY: as libfabric's user promises.
    unsafe {
        let taken = read(fid, buf, count);
        forget_source(taken, from);
        taken
    }
}

/// Who sent is not told (`FI_SOURCE` is not offered).
unsafe fn forget_source(taken: isize, from: *mut u64) {
    for i in 0..usize::try_from(taken).unwrap_or(0) {
        if !from.is_null() {
            // SAFETY: room for as many as there are completions.
            unsafe { from.add(i).write(FI_ADDR_UNSPEC) };
        }
    }
}

unsafe extern "C" fn readerr(fid: *mut CqFid, out: *mut CqErrEntry, _: u64) -> isize {
    // SAFETY: an object of ours.
    let cq = unsafe { cq(fid) };
    let mut queue = cq.queue.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(completion) = queue.pop_front_if(|c| error(c).is_some()) else {
        return -(libc::EAGAIN as isize);
    };
    let err = error(&completion).unwrap_or(libc::EIO);
    let entry = CqErrEntry {
        olen: (completion.meta.len as usize).saturating_sub(completion.room as usize),
        entry: entry(&completion),
        err,
        prov_errno: err,
        err_data: std::ptr::null_mut(),
        err_data_size: 0,
    };
    // SAFETY: a place for it. The last two fields are the caller's room for more, of which there is none.
    unsafe {
        let bytes = std::mem::offset_of!(CqErrEntry, err_data);
        std::ptr::copy_nonoverlapping((&raw const entry).cast::<u8>(), out.cast(), bytes);
        (&raw mut (*out).err_data_size).write(0);
    }
    1
}

unsafe extern "C" fn sread(
    fid: *mut CqFid,
    buf: *mut c_void,
    count: usize,
    _: *const c_void,
    timeout: c_int,
) -> isize {
    let end = u64::try_from(timeout).ok();
    let end = end.map(|ms| Instant::now() + Duration::from_millis(ms));
    loop {
        // SAFETY: as `read`.
        let taken = unsafe { read(fid, buf, count) };
        if taken != -(libc::EAGAIN as isize) {
            return taken;
        }
        let left = match end {
            None => Duration::MAX,
            Some(end) => end.saturating_duration_since(Instant::now()),
        };
        if left.is_zero() {
            return taken;
        }
        // SAFETY: an object of ours.
        unsafe { cq(fid) }.wait(left);
    }
}

unsafe extern "C" fn sreadfrom(
    fid: *mut CqFid,
    buf: *mut c_void,
    count: usize,
    from: *mut u64,
    condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: as libfabric's user promises.
    unsafe {
        let taken = sread(fid, buf, count, condition, timeout);
        forget_source(taken, from);
        taken
    }
}

unsafe extern "C" fn strerror(
    _: *mut CqFid,
    error: c_int,
    _: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    let text: &CStr = match error {
        FI_ETRUNC => c"the message is longer than the receive",
        libc::ECONNRESET => c"the peer has gone or does not answer",
        libc::ECANCELED => c"the receive was canceled",
        libc::ENOMSG => c"there is no such message",
        _ => c"unknown",
    };
    if !buf.is_null() && len > 0 {
        let bytes = text.to_bytes_with_nul();
        let part = bytes.len().min(len);
        // SAFETY: so much room is there.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), part);
            buf.add(part - 1).write(0);
        }
    }
    text.as_ptr()
}
