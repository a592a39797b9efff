//! Device memory. A soft device has no memory: this is ordinary memory of the process, which programs access by offsets only.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use weft_sys::memfd::Mapping;
use weft_verbs::RawMemory;

use super::context::Context;
use super::export::{Entry, Shown, Sort, show};
use super::mr;
use super::object::{Guard, Inherited, Kind as _, PerFork, find, kind};
use super::os_errno;
use super::pd::Pd;
use super::types::*;
use super::users::{Users, end_unused};
use crate::call::{pointer, status};

/// The maximum device memory of a process, in bytes.
pub(crate) const MAX_DM: usize = 256 << 20;
/// The binary logarithm of the largest alignment: pages have more than any request needs.
const MAX_LOG_ALIGN: u32 = 12;

/// Allocated bytes.
#[derive(Default)]
struct Used(AtomicUsize);

impl Inherited for Used {}

static USED: PerFork<Used> = PerFork::new();

/// The object behind an `ibv_dm`.
pub(crate) struct Dm {
    pub(crate) memory: RawMemory,
    pages: Arc<Pages>,
    /// The handle for imports, and the file of the context that it was made in.
    num: u32,
    file: (u64, u64),
    /// Its offset in that file, if it is there, and its entry for other processes.
    place: Option<u64>,
    _shown: Option<Shown>,
    /// Regions of it.
    pub(crate) users: Users,
}

kind!(Dm as ibv_dm, 0xd3e1_c301);

/// Pages with device memory, zeroed. All their regions end before them.
struct Pages {
    map: Mapping,
    /// True for this process' own pages, not for imported ones.
    own: bool,
}

impl Pages {
    /// Pages at an offset of the context's file, or of no file.
    fn new(len: usize, place: Option<(&OwnedFd, u64)>) -> Result<Pages, Errno> {
        let used = &USED.get().0;
        if used.fetch_add(len, Ordering::AcqRel) + len > MAX_DM {
            used.fetch_sub(len, Ordering::AcqRel);
            return Err(Errno::NOMEM);
        }
        let map = match place {
            Some((file, offset)) => Mapping::new(file, offset, len, true),
            None => Mapping::anonymous(len, false),
        };
        let map = map.map_err(|error| {
            used.fetch_sub(len, Ordering::AcqRel);
            os_errno(&error)
        })?;
        Ok(Pages { map, own: true })
    }

    /// All of the pages, which live as long as the object that has `self`.
    fn memory(&self) -> Result<RawMemory, Errno> {
        // SAFETY: mapped, until `self` goes.
        unsafe { RawMemory::new(self.map.as_ptr(), self.map.len()) }.ok_or(Errno::NOMEM)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.own {
            self.map.clear();
            USED.get().0.fetch_sub(self.map.len(), Ordering::AcqRel);
        }
    }
}

pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer(|| {
        // The call uses nothing of the context, so a child may pass its parent's.
        if attr.is_null() || context.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let attr = unsafe { *attr };
        if attr.comp_mask != 0 || attr.log_align_req > MAX_LOG_ALIGN || attr.length == 0 {
            return Err(Errno::INVAL);
        }
        if attr.length > MAX_DM {
            return Err(Errno::NOMEM);
        }
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let num = NEXT.fetch_add(1, Ordering::Relaxed);
        let known = find::<Context>(context).ok();
        let known = known.as_deref();
        let export = known.and_then(|context| context.ctx.export.as_ref());
        let place = export.and_then(|export| export.give(attr.length));
        let file = known.map(|context| &context.cmd).zip(place);
        let pages = Pages::new(attr.length, file)?;
        let entry = |addr| Entry {
            sort: Sort::Dm,
            handle: num,
            domain: 0,
            addr,
            len: attr.length as u64,
            iova: 0,
            access: 0,
        };
        let body = Dm {
            memory: pages.memory()?,
            pages: Arc::new(pages),
            num: known.map_or(num, |context| context.ctx.handle(num)),
            file: known.map_or((0, 0), |context| context.ctx.file),
            place,
            _shown: place.and_then(|addr| show(export, &entry(addr))),
            users: Users::default(),
        };
        made(body, context)
    })
}

fn made(body: Dm, context: *mut ibv_context) -> Result<*mut ibv_dm, Errno> {
    let num = body.num;
    let made = Dm::pool().make(body, |c, _| {
        c.context = context;
        c.memcpy_to_dm = Some(memcpy_to_dm);
        c.memcpy_from_dm = Some(memcpy_from_dm);
        c.handle = num;
    })?;
    Ok(made.handle())
}

/// Another handle of device memory, in a context that was imported.
///
/// # Errors
/// `ENOENT` when there is none.
pub(super) fn import(context: &Guard<Context>, num: u32) -> Result<*mut ibv_dm, Errno> {
    let (file, foreign) = (context.ctx.file, context.ctx.foreign.as_ref());
    let own = Dm::pool().all().find(|dm| dm.num == num && dm.file == file);
    let (pages, place) = match (own, foreign) {
        (Some(own), _) => (Arc::clone(&own.pages), own.place),
        (None, Some(foreign)) => {
            let map = foreign.device_memory(context.cmd.as_fd(), num)?;
            (Arc::new(Pages { map, own: false }), None)
        }
        (None, None) => return Err(Errno::NOENT),
    };
    let body = Dm {
        memory: pages.memory()?,
        pages,
        num,
        file,
        place,
        _shown: None,
        users: Users::default(),
    };
    made(body, context.handle())
}

pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    end_unused::<Dm>(dm, |dm| &dm.users)
}

/// The word size of copies to and from device memory.
const WORD: usize = 4;

/// As [`part`], for a copy, if there is anything to copy: offset and length must be multiples of four bytes, as with adapters.
///
/// # Errors
/// `EINVAL`, and `EFAULT` when the program's address is not memory.
fn words(
    dm: &Dm,
    offset: u64,
    length: usize,
    host: *const c_void,
) -> Result<Option<RawMemory>, Errno> {
    if !offset.is_multiple_of(WORD as u64) || !length.is_multiple_of(WORD) {
        return Err(Errno::INVAL);
    }
    let memory = part(dm, offset, length)?;
    if length == 0 {
        return Ok(None);
    }
    if host.is_null() {
        return Err(Errno::FAULT);
    }
    Ok(Some(memory))
}

/// `EINVAL` for a range that is not entirely inside.
fn part(dm: &Dm, offset: u64, length: usize) -> Result<RawMemory, Errno> {
    let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
    dm.memory.slice(offset, length).map_err(|_| Errno::INVAL)
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    dm_offset: u64,
    host_addr: *const c_void,
    length: usize,
) -> c_int {
    status(|| {
        let dm = find::<Dm>(dm)?;
        let Some(to) = words(&dm, dm_offset, length, host_addr)? else {
            return Ok(());
        };
        // SAFETY: the caller's promise: memory of the program, which does not change meanwhile.
        let from = unsafe { std::slice::from_raw_parts(host_addr.cast::<u8>(), length) };
        to.write(0, from).map_err(|_| Errno::INVAL)
    })
}

unsafe extern "C" fn memcpy_from_dm(
    host_addr: *mut c_void,
    dm: *mut ibv_dm,
    dm_offset: u64,
    length: usize,
) -> c_int {
    status(|| {
        let dm = find::<Dm>(dm)?;
        let Some(from) = words(&dm, dm_offset, length, host_addr)? else {
            return Ok(());
        };
        // SAFETY: the caller's promise: memory of that many bytes, which no other thread uses.
        let to = unsafe { std::slice::from_raw_parts_mut(host_addr.cast::<u8>(), length) };
        from.read(0, to).map_err(|_| Errno::INVAL)
    })
}

/// `ibv_reg_dm_mr`: addresses of the region begin with 0, as the kernel requires.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    dm_offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        let (pd, dm) = (find::<Pd>(pd)?, find::<Dm>(dm)?);
        let memory = part(&dm, dm_offset, length)?;
        if access & IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVAL);
        }
        let place = dm.place.map(|place| place + dm_offset);
        mr::of_device_memory(&pd, &memory, access, dm.users.hold(), place)
    })
}
