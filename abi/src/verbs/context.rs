//! Open devices, and the tables of calls that the inline functions of `<infiniband/verbs.h>` go through.

use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::device::{Which, which};
use super::events::EventQueue;
use super::object::{Kind, PerFork, Pool, find, lock, turn};
use super::types::*;
use super::{cq, device, dm, ex, mr, mw, pd, post, qp, settings, srq, xrc};
use crate::call::{pointer, status};

/// What the objects of a context share.
pub(crate) struct Ctx {
    pub(crate) which: Which,
    /// Asynchronous events.
    pub(crate) events: Arc<EventQueue<ibv_event_type>>,
}

impl Ctx {
    pub(crate) fn is_persona(&self) -> bool {
        self.which == Which::Persona
    }
}

/// What an `ibv_context` stands for.
pub(crate) struct Context {
    pub(crate) ctx: Arc<Ctx>,
    /// Programs want a descriptor there. It stands for nothing.
    _cmd: OwnedFd,
}

impl Kind for Context {
    type C = verbs_context;
    type Handle = ibv_context;
    const OFFSET: usize = offset_of!(verbs_context, context);
    const MARK: u32 = 0xc027_e087;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Context>> = PerFork::new();
        POOL.get()
    }
}

/// Counts the objects that need another one.
#[derive(Default)]
pub(crate) struct Users(Arc<AtomicU32>);

/// Says that an object is needed, until this is dropped.
pub(crate) struct Held(Arc<AtomicU32>);

impl Users {
    pub(crate) fn hold(&self) -> Held {
        self.0.fetch_add(1, Ordering::AcqRel);
        Held(Arc::clone(&self.0))
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// `ibv_open_device`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        settings::check()?;
        let which = which(device)?;
        // Here, so that a machine that cannot do it says so here.
        device::native()?;
        let events = EventQueue::new()?;
        let cmd = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let (async_fd, cmd_fd) = (events.fd(), cmd.as_raw_fd());
        let body = Context {
            ctx: Arc::new(Ctx { which, events }),
            _cmd: cmd,
        };
        let made = Context::pool().make(body, |c, _| {
            extended(c);
            c.sz = size_of::<verbs_context>();
            c.context.device = device;
            c.context.async_fd = async_fd;
            c.context.cmd_fd = cmd_fd;
            c.context.num_comp_vectors = device::COMP_VECTORS;
            c.context.abi_compat = std::ptr::without_provenance_mut(__VERBS_ABI_IS_EXTENDED);
            basic(&mut c.context.ops);
        })?;
        Ok(made.handle())
    })
}

/// What goes through `ibv_context.ops`.
fn basic(ops: &mut ibv_context_ops) {
    ops.alloc_mw = Some(mw::alloc_mw);
    ops.bind_mw = Some(mw::bind_mw);
    ops.dealloc_mw = Some(mw::dealloc_mw);
    ops.poll_cq = Some(post::poll_cq);
    ops.req_notify_cq = Some(cq::req_notify_cq);
    ops.post_srq_recv = Some(post::post_srq_recv);
    ops.post_send = Some(post::post_send);
    ops.post_recv = Some(post::post_recv);
}

/// What goes through `verbs_context`. What is not there makes `EOPNOTSUPP` in the header's functions.
fn extended(c: &mut verbs_context) {
    c.query_port = Some(device::query_port);
    c.query_device_ex = Some(device::query_device_ex);
    c.query_rt_values = Some(device::query_rt_values);
    c.advise_mr = Some(mr::advise_mr);
    c.alloc_null_mr = Some(mr::alloc_null_mr);
    c.alloc_td = Some(pd::alloc_td);
    c.dealloc_td = Some(pd::dealloc_td);
    c.alloc_parent_domain = Some(pd::alloc_parent_domain);
    c.create_cq_ex = Some(ex::create_cq_ex);
    c.modify_cq = Some(cq::modify_cq);
    c.create_qp_ex = Some(qp::create_qp_ex);
    c.create_srq_ex = Some(srq::create_srq_ex);
    c.get_srq_num = Some(srq::get_srq_num);
    c.open_xrcd = Some(xrc::open_xrcd);
    c.close_xrcd = Some(xrc::close_xrcd);
    c.alloc_dm = Some(dm::alloc_dm);
    c.free_dm = Some(dm::free_dm);
    c.reg_dm_mr = Some(dm::reg_dm_mr);
}

/// `ibv_close_device`. The context's queue pairs come to their end; other objects that are left stay usable.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_close_device(context: *mut ibv_context) -> c_int {
    status(|| {
        let ctx = Arc::clone(&find::<Context>(context)?.ctx);
        drop(turn::<Context>(context)?.retire());
        for qp in qp::QpObj::pool().all() {
            if Arc::ptr_eq(&qp.ctx, &ctx)
                && let Ok(native) = qp.native()
            {
                native.disconnect();
            }
        }
        Ok(())
    })
}

/// An open context of each device, in their order; opened once for the process and never closed.
pub(crate) fn cm_contexts() -> Result<Vec<*mut ibv_context>, Errno> {
    /// The contexts that the connection manager works with, one for each device of `WEFT_DEVICES`.
    static SHARED: PerFork<Mutex<Vec<usize>>> = PerFork::new();
    let mut contexts = lock(SHARED.get());
    if contexts.is_empty() {
        for device in device::devices() {
            // SAFETY: a device of ours.
            let context = unsafe { ibv_open_device(device) };
            if context.is_null() {
                return Err(device::last_errno());
            }
            contexts.push(context as usize);
        }
    }
    Ok(contexts.iter().map(|c| *c as *mut ibv_context).collect())
}

/// Whether a context is of the InfiniBand persona.
pub(crate) fn is_persona(context: *mut ibv_context) -> Result<bool, Errno> {
    Ok(find::<Context>(context)?.ctx.is_persona())
}

/// `ibv_import_device`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_import_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_pd(_context: *mut ibv_context, _pd_handle: u32) -> *mut ibv_pd {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_unimport_pd`: there are none.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_pd(_pd: *mut ibv_pd) {}

/// `ibv_import_mr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_mr(_pd: *mut ibv_pd, _mr_handle: u32) -> *mut ibv_mr {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_unimport_mr`: there are none.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_mr(_mr: *mut ibv_mr) {}

/// `ibv_import_dm`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_dm(_context: *mut ibv_context, _dm_handle: u32) -> *mut ibv_dm {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_unimport_dm`: there are none.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_dm(_dm: *mut ibv_dm) {}
