//! Protection domains, parent domains and thread domains.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::context::{Context, Ctx};
use super::export::{Entry, Shown, Sort, show};
use super::limit::{Count, Counted};
use super::native::native;
use super::object::{Guard, Kind as _, PerFork, find, kind};
use super::params::read_param;
use super::types::*;
use super::users::{Held, Users, end_unused};
use crate::call::pointer;

/// The maximum number of protection domains of a process.
pub(crate) const MAX_PDS: u32 = 1 << 16;

static COUNT: PerFork<Count> = PerFork::new();

/// The object behind an `ibv_pd`.
pub(crate) struct Pd {
    pub(crate) native: weft_verbs::Pd,
    pub(crate) ctx: Arc<Ctx>,
    /// The handle for imports.
    pub(crate) num: u32,
    /// Its entry for other processes.
    _shown: Option<Shown>,
    /// The objects that were made in it.
    pub(crate) users: Users,
    /// Of a parent domain: its domain, and perhaps its thread domain.
    on: Option<(Held, Option<Held>)>,
    /// Only of a domain that is not a parent domain.
    _counted: Option<Counted>,
}

kind!(Pd as ibv_pd, 0x0da1_17d0);

/// The handle of the next domain.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The object behind an `ibv_td`: the program's promise that one thread at a time uses the objects made with it. Nothing is faster for it here.
pub(crate) struct Td {
    users: Users,
}

kind!(Td as ibv_td, 0x7d7d_7d01);

/// `ibv_alloc_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        let context = find::<Context>(context)?;
        let num = context.ctx.handle(next());
        let body = Pd {
            _shown: shown(&context.ctx, num),
            ..Pd::own(&context, num)?
        };
        made(body, context.handle())
    })
}

fn made(body: Pd, context: *mut ibv_context) -> Result<*mut ibv_pd, Errno> {
    let num = body.num;
    let made = Pd::pool().make(body, |c, _| (c.context, c.handle) = (context, num))?;
    Ok(made.handle())
}

/// Another handle of a domain, for a context that was imported.
///
/// # Errors
/// As [`Pool::make`](super::object::Pool::make).
pub(super) fn import(pd: &Pd, context: &Guard<Context>) -> Result<*mut ibv_pd, Errno> {
    made(pd.again(context, pd.num), context.handle())
}

/// A domain of another process, for that process' regions and for queue pairs of this one.
///
/// # Errors
/// `ENOENT` when there is none; as `ibv_alloc_pd`.
pub(super) fn import_foreign(context: &Guard<Context>, handle: u32) -> Result<*mut ibv_pd, Errno> {
    let foreign = context.ctx.foreign.as_ref().ok_or(Errno::NOENT)?;
    if !foreign.has_domain(handle) {
        return Err(Errno::NOENT);
    }
    made(Pd::own(context, handle)?, context.handle())
}

fn shown(ctx: &Ctx, handle: u32) -> Option<Shown> {
    let entry = Entry {
        sort: Sort::Pd,
        handle,
        domain: handle,
        addr: 0,
        len: 0,
        iova: 0,
        access: 0,
    };
    show(ctx.export.as_ref(), &entry)
}

impl Pd {
    /// A new domain, which other processes do not see.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many, and the device's errors.
    fn own(context: &Context, num: u32) -> Result<Pd, Errno> {
        Ok(Pd {
            native: native()?.alloc_pd().map_err(super::errno)?,
            ctx: Arc::clone(&context.ctx),
            num,
            _shown: None,
            users: Users::default(),
            on: None,
            _counted: Some(COUNT.take(MAX_PDS)?),
        })
    }

    /// A further handle of the same native domain.
    fn again(&self, context: &Context, num: u32) -> Pd {
        Pd {
            native: self.native.clone(),
            ctx: Arc::clone(&context.ctx),
            num,
            _shown: None,
            users: Users::default(),
            on: None,
            _counted: None,
        }
    }

    /// The file of its context, and its number: domains of other processes may have the same number.
    pub(super) fn identity(&self) -> ((u64, u64), u32) {
        (self.ctx.file, self.num)
    }
}

impl Guard<Pd> {
    /// C's handle of its context.
    pub(crate) fn context(&self) -> *mut ibv_context {
        // SAFETY: a live object.
        unsafe { (*self.c()).context }
    }
}

/// `ibv_dealloc_pd`, for parent domains too.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    end_unused::<Pd>(pd, |pd| &pd.users)
}

pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer(|| {
        let context = find::<Context>(context)?;
        // SAFETY: NULL, or what the caller promises.
        if attr.is_null() || unsafe { (*attr).comp_mask } != 0 {
            return Err(Errno::INVAL);
        }
        let body = Td {
            users: Users::default(),
        };
        let made = Td::pool().make(body, |c, _| c.context = context.handle())?;
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    end_unused::<Td>(td, |td| &td.users)
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    /// `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC` of rdma-core 65: in a confidential guest, queues may be in memory that the host
    /// can read. No device of ours reads memory from outside the guest, so it has no effect.
    const ALLOW_UNPROTECTED: u32 = 1 << 2;
    const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
        | ALLOW_UNPROTECTED;
    pointer(|| {
        let context = find::<Context>(context)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        if attr.comp_mask & !KNOWN != 0 {
            return Err(Errno::INVAL);
        }
        // The program's allocators are for memory of queues. No queue here uses such memory.
        let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
        if allocators && (attr.alloc.is_none() || attr.free.is_none()) {
            return Err(Errno::INVAL);
        }
        let pd = find::<Pd>(attr.pd)?;
        if pd.on.is_some() || !Arc::ptr_eq(&pd.ctx, &context.ctx) {
            return Err(Errno::INVAL);
        }
        let td = (!attr.td.is_null()).then(|| find::<Td>(attr.td));
        let td = td.transpose()?.map(|td| td.users.hold());
        let num = context.ctx.handle(next());
        let body = Pd {
            _shown: shown(&context.ctx, num),
            on: Some((pd.users.hold(), td)),
            ..pd.again(&context, num)
        };
        made(body, context.handle())
    })
}
