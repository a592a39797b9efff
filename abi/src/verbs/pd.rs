//! Protection domains, parent domains and thread domains.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::context::{Context, Ctx, Held, Users};
use super::export::{Entry, Shown, Sort, show};
use super::limit::{Count, Counted};
use super::native::native;
use super::object::{Guard, Kind, PerFork, Pool, find, turn};
use super::types::*;
use crate::call::{pointer, status};

/// Protection domains of a process.
pub(crate) const MAX_PDS: u32 = 1 << 16;

static COUNT: PerFork<Count> = PerFork::new();

/// What an `ibv_pd` stands for.
pub(crate) struct Pd {
    pub(crate) native: weft_verbs::Pd,
    pub(crate) ctx: Arc<Ctx>,
    /// The handle that it can be imported by.
    pub(crate) num: u32,
    /// Other processes see it.
    _shown: Option<Shown>,
    /// What was made in it.
    pub(crate) users: Users,
    /// A parent domain: the domain, and perhaps the thread domain, that it stands on.
    on: Option<(Held, Option<Held>)>,
    /// Only of one that stands on no other.
    _counted: Option<Counted>,
}

impl Kind for Pd {
    type C = ibv_pd;
    type Handle = ibv_pd;
    const MARK: u32 = 0x0da1_17d0;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Pd>> = PerFork::new();
        POOL.get()
    }
}

/// The handle of the next domain.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What an `ibv_td` stands for: a promise of the program that one thread at a time uses what is made with it. Nothing here is faster
/// for it.
pub(crate) struct Td {
    users: Users,
}

impl Kind for Td {
    type C = ibv_td;
    type Handle = ibv_td;
    const MARK: u32 = 0x7d7d_7d01;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Td>> = PerFork::new();
        POOL.get()
    }
}

/// `ibv_alloc_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        let context = find::<Context>(context)?;
        let num = context.ctx.handle(next());
        let body = Pd {
            native: native()?.alloc_pd().map_err(super::errno)?,
            ctx: Arc::clone(&context.ctx),
            num,
            _shown: shown(&context.ctx, num),
            users: Users::default(),
            on: None,
            _counted: Some(COUNT.take(MAX_PDS)?),
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
/// As [`Pool::make`].
pub(super) fn import(pd: &Pd, context: &Guard<Context>) -> Result<*mut ibv_pd, Errno> {
    let body = Pd {
        native: pd.native.clone(),
        ctx: Arc::clone(&context.ctx),
        num: pd.num,
        _shown: None,
        users: Users::default(),
        on: None,
        _counted: None,
    };
    made(body, context.handle())
}

/// A domain of another process, for regions of that process, and for queue pairs of this one.
///
/// # Errors
/// `ENOENT` when there is none; as `ibv_alloc_pd`.
pub(super) fn import_foreign(context: &Guard<Context>, handle: u32) -> Result<*mut ibv_pd, Errno> {
    let foreign = context.ctx.foreign.as_ref().ok_or(Errno::NOENT)?;
    if !foreign.has_domain(handle) {
        return Err(Errno::NOENT);
    }
    let body = Pd {
        native: native()?.alloc_pd().map_err(super::errno)?,
        ctx: Arc::clone(&context.ctx),
        num: handle,
        _shown: None,
        users: Users::default(),
        on: None,
        _counted: Some(COUNT.take(MAX_PDS)?),
    };
    made(body, context.handle())
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
    /// The domain, and the descriptor of its context: other processes' may have the same number.
    pub(super) fn identity(&self) -> ((u64, u64), u32) {
        (self.ctx.file, self.num)
    }
}

/// `ibv_dealloc_pd`; parent domains too.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    status(|| {
        let pd = turn::<Pd>(pd)?;
        if pd.users.any() {
            return Err(Errno::BUSY);
        }
        drop(pd.retire());
        Ok(())
    })
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
    status(|| {
        let td = turn::<Td>(td)?;
        if td.users.any() {
            return Err(Errno::BUSY);
        }
        drop(td.retire());
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    const KNOWN: u32 =
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    pointer(|| {
        let context = find::<Context>(context)?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let attr = unsafe { *attr };
        if attr.comp_mask & !KNOWN != 0 {
            return Err(Errno::INVAL);
        }
        // The program's allocators are for memory of queues, of which none is the device's here.
        let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
        if allocators && (attr.alloc.is_none() || attr.free.is_none()) {
            return Err(Errno::INVAL);
        }
        let pd = find::<Pd>(attr.pd)?;
        if pd.on.is_some() || !Arc::ptr_eq(&pd.ctx, &context.ctx) {
            return Err(Errno::INVAL);
        }
        let td = if attr.td.is_null() {
            None
        } else {
            Some(find::<Td>(attr.td)?.users.hold())
        };
        let num = context.ctx.handle(next());
        let body = Pd {
            native: pd.native.clone(),
            ctx: Arc::clone(&pd.ctx),
            num,
            _shown: shown(&context.ctx, num),
            users: Users::default(),
            on: Some((pd.users.hold(), td)),
            _counted: None,
        };
        made(body, context.handle())
    })
}
