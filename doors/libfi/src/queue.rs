//! Completion queues.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use weft_fi::endpoint::{Completion, Endpoint, Queue, Status};

use crate::abi::{
    CqAttr, CqEntry, CqErrEntry, CqFid, CqOps, DomainFid, FI_ADDR_UNSPEC, FI_CLASS_CQ,
    FI_CQ_FORMAT_CONTEXT, FI_CQ_FORMAT_DATA, FI_CQ_FORMAT_MSG, FI_CQ_FORMAT_TAGGED,
    FI_CQ_FORMAT_UNSPEC, FI_EAVAIL, FI_ETRUNC, FI_GETWAIT, FI_GETWAITOBJ, FI_MSG, FI_MULTI_RECV,
    FI_RECV, FI_REMOTE_CQ_DATA, FI_SEND, FI_TAGGED, FI_WAIT_FD, FI_WAIT_UNSPEC, FabricFid, Fid,
    Ops,
};
use crate::av::Addresses;
use crate::object::{MISSING, fid, plain};

#[repr(C)]
pub(crate) struct Cq {
    fid: CqFid,
    /// Locked after `endpoints` by a thread that needs both: endpoints that make progress put completions here.
    pub queue: Queue,
    entry: usize,
    /// With the address vector that each is bound to, once it is.
    endpoints: Mutex<Vec<(Weak<Endpoint>, Vector)>>,
    /// Readable when a completion has come, if the program asked for a descriptor.
    ready: Option<Arc<OwnedFd>>,
}

type Vector = Arc<OnceLock<Arc<Addresses>>>;

static CQ: Ops = Ops {
    control,
    ..plain::<Cq>()
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
    let ready = match wait {
        0 | FI_WAIT_UNSPEC => None,
        FI_WAIT_FD => {
            // SAFETY: plain numbers.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if fd < 0 {
                let error = std::io::Error::last_os_error();
                return -error.raw_os_error().unwrap_or(libc::EMFILE);
            }
            // SAFETY: it is ours.
            Some(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) }))
        }
        _ => return -libc::ENOSYS,
    };
    let entry = match format {
        FI_CQ_FORMAT_UNSPEC | FI_CQ_FORMAT_TAGGED => size_of::<CqEntry>(),
        FI_CQ_FORMAT_CONTEXT => std::mem::offset_of!(CqEntry, flags),
        FI_CQ_FORMAT_MSG => std::mem::offset_of!(CqEntry, buf),
        FI_CQ_FORMAT_DATA => std::mem::offset_of!(CqEntry, tag),
        _ => return -libc::ENOSYS,
    };
    let cq = Box::new(Cq {
        fid: CqFid {
            fid: fid(FI_CLASS_CQ, context, &CQ),
            ops: &raw const CQ_OPS,
        },
        queue: Queue::default(),
        entry,
        endpoints: Mutex::default(),
        ready,
    });
    if let Some(ready) = &cq.ready {
        let ready = Arc::clone(ready);
        cq.queue.on_push(move || {
            let one = 1u64;
            // SAFETY: eight bytes. A counter that is full is readable as well.
            unsafe { libc::write(ready.as_raw_fd(), (&raw const one).cast(), 8) };
        });
    }
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(cq).cast()) };
    0
}

impl Cq {
    pub(crate) fn add(&self, endpoint: &Arc<Endpoint>, vector: &Vector) {
        let weak = Arc::downgrade(endpoint);
        let mut endpoints = self.endpoints();
        let known = endpoints.iter().any(|(known, _)| known.ptr_eq(&weak));
        if !known && self.ready.is_some() {
            endpoint.sleeps_on_descriptor();
        }
        endpoints.retain(|(known, _)| known.strong_count() > 0 && !known.ptr_eq(&weak));
        endpoints.push((weak, Arc::clone(vector)));
    }

    fn endpoints(&self) -> MutexGuard<'_, Vec<(Weak<Endpoint>, Vector)>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) {
        for (endpoint, _) in &*self.endpoints() {
            if let Some(endpoint) = endpoint.upgrade() {
                endpoint.progress();
            }
        }
    }

    fn wait(&self, limit: Duration) {
        let first = self.endpoints().iter().find_map(|(e, _)| e.upgrade());
        match first {
            Some(endpoint) => endpoint.wait(limit),
            None => std::thread::sleep(limit.min(Duration::from_millis(1))),
        }
    }

    /// Reads up to `count` completions, and their senders if `from` is not null; 0 if there are none, `-FI_EAVAIL` if an error is next.
    unsafe fn take(&self, buf: *mut c_void, count: usize, from: *mut u64) -> isize {
        let endpoints = (!from.is_null()).then(|| self.endpoints());
        let mut queue = self.queue.lock();
        let mut taken = 0;
        while taken < count
            && let Some(completion) = queue.pop_front_if(|c| error(c).is_none())
        {
            let entry = entry(&completion);
            // SAFETY: room for `count` entries of this queue's format, which is the beginning of `CqEntry`.
            unsafe {
                let to = buf.cast::<u8>().add(taken * self.entry);
                std::ptr::copy_nonoverlapping((&raw const entry).cast(), to, self.entry);
                if let Some(endpoints) = &endpoints {
                    from.add(taken).write(source(endpoints, &completion));
                }
            }
            taken += 1;
        }
        if taken == 0 && !queue.is_empty() && count > 0 {
            return -(FI_EAVAIL as isize);
        }
        taken.cast_signed()
    }
}

/// The index of a sender in the address vector; unspecified for one that is not in it.
fn source(endpoints: &[(Weak<Endpoint>, Vector)], completion: &Completion) -> u64 {
    let index = |from| {
        endpoints
            .iter()
            .find_map(|(_, vector)| vector.get()?.index(from))
    };
    let found = completion.from.as_ref().and_then(index);
    found.unwrap_or(FI_ADDR_UNSPEC)
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
    if completion.released {
        flags |= FI_MULTI_RECV;
    }
    CqEntry {
        op_context: completion.context as *mut c_void,
        flags,
        len: meta.len.min(completion.room) as usize,
        buf: completion.at as *mut c_void,
        data: meta.data.unwrap_or(0),
        tag: meta.tag,
    }
}

unsafe fn cq<'a>(fid: *mut CqFid) -> &'a Cq {
    // SAFETY: made by `open`.
    unsafe { &*fid.cast::<Cq>() }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: an object of ours.
    let cq = unsafe { &*fid.cast::<Cq>() };
    let value = match (command, &cq.ready) {
        (FI_GETWAIT, Some(ready)) => ready.as_raw_fd(),
        (FI_GETWAITOBJ, Some(_)) => FI_WAIT_FD,
        (FI_GETWAITOBJ, None) => 0,
        _ => return -libc::ENOSYS,
    };
    // SAFETY: a place for a number.
    unsafe { arg.cast::<c_int>().write(value) };
    0
}

/// Reports whether the program may sleep on the descriptors of these queues: 0, or `-FI_EAGAIN` while there are completions.
pub(crate) unsafe extern "C" fn trywait(
    _: *mut FabricFid,
    fids: *mut *mut Fid,
    count: c_int,
) -> c_int {
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `count` objects of ours.
        let fid = unsafe { *fids.add(i) };
        // SAFETY: as above.
        if unsafe { (*fid).fclass } != FI_CLASS_CQ {
            return -libc::EINVAL;
        }
        // SAFETY: its class says so.
        let cq = unsafe { &*fid.cast::<Cq>() };
        let Some(ready) = &cq.ready else {
            return -libc::EINVAL;
        };
        let mut count = 0u64;
        // First this: what comes from here on makes it readable again. SAFETY: room for eight bytes.
        unsafe { libc::read(ready.as_raw_fd(), (&raw mut count).cast(), 8) };
        cq.progress();
        if !cq.queue.lock().is_empty() {
            return -libc::EAGAIN;
        }
    }
    0
}

unsafe extern "C" fn read(fid: *mut CqFid, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: as libfabric's user promises.
    unsafe { readfrom(fid, buf, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(
    fid: *mut CqFid,
    buf: *mut c_void,
    count: usize,
    from: *mut u64,
) -> isize {
    // SAFETY: an object of ours, and room for `count` entries, and senders if there is any.
    unsafe {
        let cq = cq(fid);
        let taken = cq.take(buf, count, from);
        if taken != 0 {
            return taken;
        }
        cq.progress();
        match cq.take(buf, count, from) {
            0 => -(libc::EAGAIN as isize),
            taken => taken,
        }
    }
}

unsafe extern "C" fn readerr(fid: *mut CqFid, out: *mut CqErrEntry, _: u64) -> isize {
    // SAFETY: an object of ours.
    let cq = unsafe { cq(fid) };
    let mut queue = cq.queue.lock();
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
    condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: as libfabric's user promises.
    unsafe { sreadfrom(fid, buf, count, std::ptr::null_mut(), condition, timeout) }
}

unsafe extern "C" fn sreadfrom(
    fid: *mut CqFid,
    buf: *mut c_void,
    count: usize,
    from: *mut u64,
    _: *const c_void,
    timeout: c_int,
) -> isize {
    let end = u64::try_from(timeout).ok();
    let end = end.map(|ms| Instant::now() + Duration::from_millis(ms));
    loop {
        // SAFETY: as libfabric's user promises.
        let taken = unsafe { readfrom(fid, buf, count, from) };
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
        // SAFETY: `len` bytes of room are there.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), part);
            buf.add(part - 1).write(0);
        }
    }
    text.as_ptr()
}
