//! Memory regions: any memory of the program, at the program's own addresses.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::{MemError, RawMemory, Sge};

use super::access::{check_access, rights};
use super::context::Context;
use super::export::{Entry, Shown, Sort, show};
use super::foreign::{self, Foreign};
use super::null::Null;
use super::object::{Guard, Kind as _, PerFork, find, kind, lock, turn};
use super::pd::Pd;
use super::types::*;
use super::users::Held;
use crate::call::{pointer, status};
use crate::pages;

/// The object behind an `ibv_mr`.
pub(crate) struct Mr {
    /// `None` only while it is being replaced, and for null regions.
    native: Option<weft_verbs::Mr>,
    /// Set for a null region.
    null: Option<Null>,
    /// Set for a region of another process.
    foreign: Option<Arc<foreign::Region>>,
    /// Its entry for other processes.
    shown: Option<Shown>,
    pd: weft_verbs::Pd,
    /// The identity of its domain.
    domain: ((u64, u64), u32),
    #[allow(dead_code)] // until it is dropped
    held: Held,
    /// The device memory that the region is in.
    dm: Option<Held>,
    access: c_uint,
    iova: u64,
}

kind!(Mr as ibv_mr, 0x3e30_4e61);

impl Mr {
    /// A region of this domain without memory yet.
    fn nothing(pd: &Guard<Pd>) -> Mr {
        Mr {
            native: None,
            null: None,
            foreign: None,
            shown: None,
            pd: pd.native.clone(),
            domain: pd.identity(),
            held: pd.users.hold(),
            dm: None,
            access: 0,
            iova: 0,
        }
    }

    pub(crate) fn key(&self) -> Result<u32, Errno> {
        Ok(self.native.as_ref().ok_or(Errno::INVAL)?.lkey())
    }
}

/// True for an implicit region: it covers whatever is mapped when it is used.
fn is_implicit(addr: *mut c_void, length: usize) -> bool {
    addr.is_null() && length == usize::MAX
}

/// True if this system supports implicit regions.
pub(super) fn has_implicit() -> bool {
    // SAFETY: the memory is not used.
    unsafe { RawMemory::everything() }.is_some()
}

/// The address in the program's memory that address 0 of an implicit region would have: the memory begins after it.
fn begin(memory: &RawMemory, implicit: bool, iova: u64) -> u64 {
    if implicit {
        memory.as_ptr().addr() as u64
    } else {
        iova
    }
}

/// The program's handle of a new region.
fn enter(
    pd: &Guard<Pd>,
    body: Mr,
    key: u32,
    addr: *mut c_void,
    length: usize,
) -> Result<*mut ibv_mr, Errno> {
    let made = Mr::pool().make(body, |c, _| {
        c.context = pd.context();
        c.pd = pd.handle();
        (c.addr, c.length) = (addr, length);
        c.handle = key;
        (c.lkey, c.rkey) = (key, key);
    })?;
    Ok(made.handle())
}

/// Checks the memory for a new region.
///
/// # Safety
/// As for `ibv_reg_mr`: the memory stays mapped until it is deregistered.
unsafe fn memory(
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<RawMemory, Errno> {
    check_access(access)?;
    if is_implicit(addr, length) {
        if iova != 0 || access & IBV_ACCESS_ON_DEMAND == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise, for the part that the caller names.
        return unsafe { RawMemory::everything() }.ok_or(Errno::OPNOTSUPP);
    }
    pages::mapped(addr as usize, length)?;
    pages::allows(addr as usize, length, access & IBV_ACCESS_LOCAL_WRITE != 0)?;
    iova.checked_add(length as u64).ok_or(Errno::INVAL)?;
    // SAFETY: the caller's promise.
    unsafe { RawMemory::new(addr.cast(), length) }.ok_or(Errno::FAULT)
}

/// `ibv_reg_mr_iova2`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        let pd = find::<Pd>(pd)?;
        let iova = if access & IBV_ACCESS_ZERO_BASED != 0 {
            0
        } else {
            iova
        };
        // SAFETY: the caller's promise.
        let memory = unsafe { memory(addr, length, iova, access) }?;
        let implicit = is_implicit(addr, length);
        let at = begin(&memory, implicit, iova);
        let native = pd.native.reg_raw_at(&memory, at, rights(access));
        let native = native.map_err(super::errno)?;
        let key = native.lkey();
        let body = Mr {
            native: Some(native),
            shown: show(
                pd.ctx.export.as_ref().filter(|_| !implicit),
                &region(key, pd.num, (addr, length), (iova, access)),
            ),
            access,
            iova,
            ..Mr::nothing(&pd)
        };
        enter(&pd, body, key, addr, length)
    })
}

/// `ibv_reg_mr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, addr as u64, access as c_uint) }
}

/// `ibv_reg_mr_iova`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// A region of device memory, whose addresses begin with 0. `place` is the offset of the memory in the context's file.
///
/// # Errors
/// As `ibv_reg_dm_mr`.
pub(crate) fn of_device_memory(
    pd: &Guard<Pd>,
    memory: &RawMemory,
    access: c_uint,
    dm: Held,
    place: Option<u64>,
) -> Result<*mut ibv_mr, Errno> {
    check_access(access)?;
    let native = pd.native.reg_raw_at(memory, 0, rights(access));
    let native = native.map_err(super::errno)?;
    let key = native.lkey();
    let body = Mr {
        native: Some(native),
        shown: place.and_then(|addr| {
            let sort = Sort::DmMr;
            let of = region(
                key,
                pd.num,
                (std::ptr::null_mut(), memory.len()),
                (0, access),
            );
            show(pd.ctx.export.as_ref(), &Entry { sort, addr, ..of })
        }),
        dm: Some(dm),
        access,
        ..Mr::nothing(pd)
    };
    enter(pd, body, key, std::ptr::null_mut(), memory.len())
}

pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    pointer(|| {
        let pd = find::<Pd>(pd)?;
        let null = Null::new(&pd.native)?;
        let key = null.drain.lkey();
        let body = Mr {
            null: Some(null),
            access: IBV_ACCESS_LOCAL_WRITE,
            ..Mr::nothing(&pd)
        };
        enter(&pd, body, key, std::ptr::null_mut(), usize::MAX)
    })
}

/// Another handle of the region with this key: it has the keys, and cannot change or end the region.
///
/// # Errors
/// `ENOENT` when the domain has no such region.
pub(super) fn import(pd: &Guard<Pd>, key: u32) -> Result<*mut ibv_mr, Errno> {
    let there = Mr::pool().all().any(|mr| {
        let own = mr
            .native
            .as_ref()
            .or(mr.null.as_ref().map(|null| &null.drain));
        mr.domain == pd.identity() && own.is_some_and(|own| own.lkey() == key)
    });
    let foreign = match &pd.ctx.foreign {
        _ if there => None,
        None => return Err(Errno::NOENT),
        Some(foreign) => Some(import_foreign(pd, foreign, key)?),
    };
    let body = Mr {
        foreign,
        ..Mr::nothing(pd)
    };
    enter(pd, body, key, std::ptr::null_mut(), 0)
}

/// A region of another process. This process makes it once, however many handles it has.
fn import_foreign(
    pd: &Guard<Pd>,
    foreign: &Foreign,
    key: u32,
) -> Result<Arc<foreign::Region>, Errno> {
    /// One import at a time: two would both find no region and make two.
    static ONE: PerFork<Mutex<()>> = PerFork::new();
    let _one = lock(ONE.get());
    let (of, domain) = pd.identity();
    let same = Mr::pool().all().find_map(|mr| {
        let region = mr.foreign.as_ref()?;
        let is = (region.of, region.domain, region.handle) == (of, domain, key);
        is.then(|| Arc::clone(region))
    });
    if let Some(region) = same {
        return Ok(region);
    }
    let context = find::<Context>(pd.context())?;
    let file = context.cmd.as_fd();
    let region = foreign.region(file, of, (&pd.native, domain), key)?;
    Ok(Arc::new(region))
}

/// The entry of a region for other processes.
fn region(
    key: u32,
    domain: u32,
    (addr, len): (*mut c_void, usize),
    (iova, access): (u64, c_uint),
) -> Entry {
    Entry {
        sort: Sort::Mr,
        handle: key,
        domain,
        addr: addr as u64,
        len: len as u64,
        iova,
        access,
    }
}

impl Mr {
    /// True for a handle of another context's region, which has only the keys.
    pub(super) fn is_imported(&self) -> bool {
        self.native.is_none() && self.null.is_none()
    }
}

/// `ibv_reg_dmabuf_mr`: there is no bus to map such buffers into.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// Invalidates the region's keys.
fn revoke(mr: &mut Mr) -> Result<(), Errno> {
    if mr.null.take().is_some() {
        return Ok(());
    }
    let native = mr.native.take().ok_or(Errno::INVAL)?;
    match native.deregister() {
        Ok(_) => Ok(()),
        Err((native, MemError::InUse)) => {
            mr.native = Some(native);
            Err(Errno::BUSY)
        }
        Err((native, _)) => {
            mr.native = Some(native);
            Err(Errno::INVAL)
        }
    }
}

/// `ibv_dereg_mr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    status(|| {
        let mut mr = turn::<Mr>(mr)?;
        mr.alone(revoke)?;
        drop(mr.retire());
        Ok(())
    })
}

/// `ibv_rereg_mr`: the region keeps its keys where it can.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let mut result = IBV_REREG_MR_ERR_INPUT;
    let status = status(|| {
        let flags = flags as c_uint;
        let to = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
        if flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0
            || flags == 0
            || (to && (length == 0 || addr.is_null()))
        {
            return Err(Errno::INVAL);
        }
        let mut mr = turn::<Mr>(mr)?;
        if mr.null.is_some() || mr.dm.is_some() {
            return Err(Errno::INVAL);
        }
        let c = mr.c();
        // SAFETY: a live object.
        if unsafe { is_implicit((*c).addr, (*c).length) } {
            return Err(Errno::INVAL);
        }
        let domain = if flags & IBV_REREG_MR_CHANGE_PD != 0 {
            Some(find::<Pd>(pd)?)
        } else {
            None
        };
        let access = if flags & IBV_REREG_MR_CHANGE_ACCESS != 0 {
            access as c_uint
        } else {
            mr.access
        };
        // SAFETY: a live object.
        let (mut at, mut bytes) = unsafe { ((*c).addr, (*c).length) };
        let mut iova = mr.iova;
        if to {
            (at, bytes, iova) = (addr, length, addr as u64);
        }
        if access & IBV_ACCESS_ZERO_BASED != 0 {
            iova = 0;
        }
        let native = domain.as_ref().map_or(&mr.pd, |pd| &pd.native).clone();
        // SAFETY: the caller's promise: the old memory or the new.
        let memory = unsafe { memory(at, bytes, iova, access) }?;
        let export = domain.as_ref().map_or_else(
            || mr.shown.as_ref().map(Shown::export),
            |pd| pd.ctx.export.clone(),
        );
        let held = domain.as_ref().map(|pd| (pd.users.hold(), pd.identity()));
        let key = mr.alone(|mr| {
            let key = mr.key()?;
            revoke(mr)?;
            mr.shown = None;
            result = IBV_REREG_MR_ERR_CMD;
            let made = native.reg_raw_again(&memory, iova, rights(access), key);
            let made = mr.native.insert(made.map_err(super::errno)?);
            let key = made.lkey();
            mr.pd = native;
            mr.access = access;
            mr.iova = iova;
            if let Some((held, domain)) = held {
                (mr.held, mr.domain) = (held, domain);
            }
            let of = region(key, mr.domain.1, (at, bytes), (iova, access));
            mr.shown = show(export.as_ref(), &of);
            Ok::<u32, Errno>(key)
        })?;
        // SAFETY: a live object; programs read the keys after this call.
        unsafe {
            ((*c).addr, (*c).length) = (at, bytes);
            ((*c).lkey, (*c).rkey) = (key, key);
            if let Some(domain) = &domain {
                (*c).pd = domain.handle();
            }
        }
        result = 0;
        Ok(())
    });
    if status != 0 {
        crate::call::set_errno(Errno::from_raw_os_error(status));
    }
    result
}

/// The error of `ibv_advise_mr` for an element, as the kernel's drivers return it.
fn unadvised(error: MemError) -> Errno {
    match error {
        MemError::InvalidStag => Errno::NOENT,
        MemError::Access | MemError::Pd => Errno::PERM,
        _ => Errno::FAULT,
    }
}

/// `ibv_advise_mr`: mapped memory is present when it is needed. A caller that waits gets an error for unmapped memory.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sges: u32,
) -> c_int {
    status(|| {
        let pd = find::<Pd>(pd)?;
        let known = matches!(
            advice,
            IBV_ADVISE_MR_ADVICE_PREFETCH
                | IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE
                | IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT
        );
        if !known || flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || num_sges == 0 || sg_list.is_null() {
            return Err(Errno::INVAL);
        }
        let write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
        let fault = advice != IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
        for at in 0..num_sges as usize {
            // SAFETY: the caller's promise: that many elements.
            let sge = unsafe { sg_list.add(at).read() };
            let element = Sge {
                addr: sge.addr,
                len: sge.length,
                lkey: sge.lkey,
            };
            let advise = |fault| pd.native.prefetch(element, write, fault).map_err(unadvised);
            advise(false)?;
            if fault && (advise(true).is_err() && flags & IBV_ADVISE_MR_FLAG_FLUSH != 0) {
                return Err(Errno::FAULT);
            }
        }
        Ok(())
    })
}
