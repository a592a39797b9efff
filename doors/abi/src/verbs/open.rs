//! Opening devices, and the tables of calls that the inline functions of `<infiniband/verbs.h>` go through.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::context::{COMP_VECTORS, Context, Ctx};
use super::device::which;
use super::events::EventQueue;
use super::export::{self, Export};
use super::foreign::Foreign;
use super::native::native;
use super::object::{Kind, PerFork, find, lock, turn};
use super::types::*;
use super::{cq, create, device, dm, ex, mr, mw, pd, post, qp, settings, shared, srq, xrc};
use crate::call::{pointer, status};

/// `ibv_open_device`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        settings::check()?;
        let (cmd, export) = export::new(which(device)?)?;
        open(device, cmd, export, None)
    })
}

/// A context whose objects can be imported by the descriptor `cmd`: by other processes as `export` shows them. It may be `foreign`, another process'.
///
/// # Errors
/// `EINVAL` when it is not a device; the system's error when a resource is missing.
pub(super) fn open(
    device: *mut ibv_device,
    cmd: OwnedFd,
    export: Option<Arc<Export>>,
    foreign: Option<Foreign>,
) -> Result<*mut ibv_context, Errno> {
    let which = which(device)?;
    // At once, so that opening fails on a machine that cannot run the soft RNIC.
    native()?;
    let events = EventQueue::new()?;
    let (async_fd, cmd_fd) = (events.fd(), cmd.as_raw_fd());
    let stat = fstat(&cmd)?;
    let file = (stat.st_dev, stat.st_ino);
    let body = Context {
        ctx: Arc::new(Ctx {
            which,
            events,
            file,
            export,
            foreign,
        }),
        cmd,
    };
    let made = Context::pool().make(body, |c, _| {
        extended(c);
        c.sz = size_of::<verbs_context>();
        c.context.device = device;
        c.context.async_fd = async_fd;
        c.context.cmd_fd = cmd_fd;
        c.context.num_comp_vectors = COMP_VECTORS;
        c.context.abi_compat = std::ptr::without_provenance_mut(__VERBS_ABI_IS_EXTENDED);
        basic(&mut c.context.ops);
    })?;
    Ok(made.handle())
}

/// The calls of `ibv_context.ops`.
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

/// The calls of `verbs_context`. For missing ones the header's functions return `EOPNOTSUPP`.
fn extended(c: &mut verbs_context) {
    c.query_port = Some(device::query_port);
    c.query_device_ex = Some(device::query_device_ex);
    c.query_rt_values = Some(ex::query_rt_values);
    c.advise_mr = Some(mr::advise_mr);
    c.alloc_null_mr = Some(mr::alloc_null_mr);
    c.alloc_td = Some(pd::alloc_td);
    c.dealloc_td = Some(pd::dealloc_td);
    c.alloc_parent_domain = Some(pd::alloc_parent_domain);
    c.create_cq_ex = Some(ex::create_cq_ex);
    c.modify_cq = Some(cq::modify_cq);
    c.create_qp_ex = Some(create::create_qp_ex);
    c.create_srq_ex = Some(srq::create_srq_ex);
    c.get_srq_num = Some(srq::get_srq_num);
    c.open_qp = Some(shared::open_qp);
    c.open_xrcd = Some(xrc::open_xrcd);
    c.close_xrcd = Some(xrc::close_xrcd);
    c.alloc_dm = Some(dm::alloc_dm);
    c.free_dm = Some(dm::free_dm);
    c.reg_dm_mr = Some(dm::reg_dm_mr);
}

/// `ibv_close_device`. The context's queue pairs end; its other objects stay usable.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_close_device(context: *mut ibv_context) -> c_int {
    status(|| {
        let ctx = Arc::clone(&find::<Context>(context)?.ctx);
        drop(turn::<Context>(context)?.retire());
        for qp in qp::QpObj::pool().all() {
            if Arc::ptr_eq(&qp.ctx, &ctx)
                && !(qp.kind == IBV_QPT_XRC_RECV && shared::has_others(qp.num()))
            {
                if let Some(roce) = &qp.roce {
                    roce.fail();
                }
                if let Ok(native) = qp.native() {
                    native.disconnect();
                }
            }
        }
        Ok(())
    })
}

/// An open context of each device, in their order. The process opens each once and never closes it.
pub(crate) fn cm_contexts() -> Result<Vec<*mut ibv_context>, Errno> {
    /// The connection manager's contexts, one for each device of `WEFT_DEVICES`.
    static SHARED: PerFork<Mutex<Vec<usize>>> = PerFork::new();
    let mut contexts = lock(SHARED.get());
    if contexts.is_empty() {
        for device in device::devices() {
            // SAFETY: a device of ours.
            let context = unsafe { ibv_open_device(device) };
            if context.is_null() {
                return Err(super::last_errno());
            }
            contexts.push(context as usize);
        }
    }
    Ok(contexts.iter().map(|c| *c as *mut ibv_context).collect())
}
