//! Device memory. A soft device has none of its own: it is ordinary memory of the process, which programs reach by offsets only.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use weft_verbs::RawMemory;

use super::context::{Context, Users};
use super::mr;
use super::object::{Guard, Inherited, Kind, PerFork, Pool, find, turn};
use super::pd::Pd;
use super::types::*;
use crate::call::{pointer, status};

/// Device memory of a process, in bytes.
pub(crate) const MAX_DM: usize = 256 << 20;
/// Alignments are of powers of two up to this one: pages have more than any request needs.
const MAX_LOG_ALIGN: u32 = 12;

/// Bytes that are allocated.
#[derive(Default)]
struct Used(AtomicUsize);

impl Inherited for Used {}

static USED: PerFork<Used> = PerFork::new();

/// What an `ibv_dm` stands for.
pub(crate) struct Dm {
    pub(crate) memory: RawMemory,
    pages: Arc<Pages>,
    /// The handle that it can be imported by, and the file of the context that it was made in.
    num: u32,
    file: (u64, u64),
    /// Regions of it.
    pub(crate) users: Users,
}

impl Kind for Dm {
    type C = ibv_dm;
    type Handle = ibv_dm;
    const MARK: u32 = 0xd3e1_c301;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Dm>> = PerFork::new();
        POOL.get()
    }
}

/// Pages of our own, zeroed.
struct Pages {
    at: *mut c_void,
    len: usize,
}

// SAFETY: an address and a length; what is there is only reached through checked copies.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: usize) -> Result<Pages, Errno> {
        let used = &USED.get().0;
        if used.fetch_add(len, Ordering::AcqRel) + len > MAX_DM {
            used.fetch_sub(len, Ordering::AcqRel);
            return Err(Errno::NOMEM);
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at no address of ours.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE) };
        let at = at.inspect_err(|_| {
            used.fetch_sub(len, Ordering::AcqRel);
        })?;
        Ok(Pages { at, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and no region of it is left.
        let _ = unsafe { munmap(self.at, self.len) };
        USED.get().0.fetch_sub(self.len, Ordering::AcqRel);
    }
}

pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer(|| {
        // It needs nothing of the context, so a child may use its parent's.
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
        let pages = Pages::new(attr.length)?;
        // SAFETY: the pages are there as long as the object.
        let memory = unsafe { RawMemory::new(pages.at.cast(), pages.len) }.ok_or(Errno::NOMEM)?;
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let body = Dm {
            memory,
            pages: Arc::new(pages),
            num: NEXT.fetch_add(1, Ordering::Relaxed),
            file: find::<Context>(context).map_or((0, 0), |context| context.ctx.file),
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
    let own = Dm::pool()
        .all()
        .find(|dm| dm.num == num && dm.file == context.ctx.file)
        .ok_or(Errno::NOENT)?;
    let body = Dm {
        memory: own.memory.clone(),
        pages: Arc::clone(&own.pages),
        num,
        file: own.file,
        users: Users::default(),
    };
    made(body, context.handle())
}

pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    status(|| {
        let dm = turn::<Dm>(dm)?;
        if dm.users.any() {
            return Err(Errno::BUSY);
        }
        drop(dm.retire());
        Ok(())
    })
}

/// Device memory is copied in words of this size.
const WORD: usize = 4;

/// As [`part`], for a copy: offset and length are multiples of four bytes, as adapters want it.
///
/// # Errors
/// `EINVAL`.
fn words(dm: &Dm, offset: u64, length: usize) -> Result<RawMemory, Errno> {
    if !offset.is_multiple_of(WORD as u64) || !length.is_multiple_of(WORD) {
        return Err(Errno::INVAL);
    }
    part(dm, offset, length)
}

/// `EINVAL` for a range that is not all inside.
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
        let to = words(&dm, dm_offset, length)?;
        if length == 0 {
            return Ok(());
        }
        if host_addr.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise: memory of the program, which nobody changes meanwhile.
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
        let from = words(&dm, dm_offset, length)?;
        if length == 0 {
            return Ok(());
        }
        if host_addr.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise: memory for so many bytes, which is the program's alone.
        let to = unsafe { std::slice::from_raw_parts_mut(host_addr.cast::<u8>(), length) };
        from.read(0, to).map_err(|_| Errno::INVAL)
    })
}

/// `ibv_reg_dm_mr`: addresses of the region begin with 0, as the kernel demands it.
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
        mr::of_device_memory(&pd, &memory, access, dm.users.hold())
    })
}
