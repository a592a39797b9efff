//! End points: identifiers that are set up in one call and used with calls that block.

use std::ffi::c_int;

use rustix::io::Errno;

use super::channel::ack;
use super::id::{Core, Template, core, get, set};
use super::life;
use super::qp;
use super::resolve::{rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route};
use super::types::{RAI_PASSIVE, RDMA_CM_EVENT_CONNECT_REQUEST, rdma_addrinfo, rdma_cm_id};
use crate::call::run;
use crate::verbs::last_errno;
use crate::verbs::types::{ibv_pd, ibv_qp_init_attr};

/// Time limit of resolving in one call.
const PATIENCE_MS: c_int = 2000;

fn worked(result: c_int) -> Result<(), Errno> {
    if result == 0 {
        Ok(())
    } else {
        Err(last_errno())
    }
}

/// # Safety
/// As for [`rdma_create_ep`].
unsafe fn set_up(
    core: &Core,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    let id = core.handle();
    let mut wanted = if attr.is_null() {
        None
    } else {
        // SAFETY: the caller's promise.
        let mut wanted = unsafe { attr.read() };
        wanted.qp_type = res.ai_qp_type as u32;
        Some(wanted)
    };
    if res.ai_flags & RAI_PASSIVE != 0 {
        // SAFETY: the caller's promise.
        worked(unsafe { rdma_bind_addr(id, res.ai_src_addr) })?;
        core.setup().template = wanted.map(Template);
        if !pd.is_null() {
            set!(core, pd = pd);
        }
        return Ok(());
    }
    // SAFETY: as above.
    worked(unsafe { rdma_resolve_addr(id, res.ai_src_addr, res.ai_dst_addr, PATIENCE_MS) })?;
    // SAFETY: as above.
    worked(unsafe { rdma_resolve_route(id, PATIENCE_MS) })?;
    if let Some(wanted) = &mut wanted {
        qp::create_short(core, pd, wanted)?;
        // SAFETY: as above.
        unsafe { attr.write(*wanted) };
    }
    if res.ai_connect_len > 0 && !res.ai_connect.is_null() {
        let len = res.ai_connect_len.min(usize::from(u8::MAX));
        let mut preface = vec![0_u8; len];
        // SAFETY: as above.
        unsafe {
            res.ai_connect
                .cast::<u8>()
                .copy_to(preface.as_mut_ptr(), len);
        };
        core.setup().preface = preface;
    }
    Ok(())
}

/// `rdma_create_ep(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    run(|| {
        if id.is_null() || res.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let res = unsafe { res.read() };
        let made = life::new(
            None,
            std::ptr::null_mut(),
            res.ai_port_space as u32,
            res.ai_qp_type as u32,
        )?;
        // SAFETY: as above.
        if let Err(errno) = unsafe { set_up(&made, &res, pd, qp_init_attr) } {
            destroy(made.handle())?;
            return Err(errno);
        }
        // SAFETY: as above.
        unsafe { id.write(made.handle()) };
        Ok(0)
    })
}

fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let core = core(id)?;
    qp::destroy(&core);
    qp::destroy_srq(&core);
    life::destroy(id)
}

/// `rdma_destroy_ep(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    run(|| destroy(id).map(|()| 0));
}

/// `rdma_get_request(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `id`.
pub unsafe fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    run(|| {
        let listener = core(listen)?;
        if id.is_null() || !listener.is_sync() {
            return Err(Errno::INVAL);
        }
        listener.ack_own();
        let event = listener.channel()?.get()?;
        // SAFETY: an event that the program has not seen yet.
        let (kind, status, new) = unsafe { ((*event).event, (*event).status, (*event).id) };
        if kind != RDMA_CM_EVENT_CONNECT_REQUEST || status != 0 {
            ack(event)?;
            return Err(Errno::INVAL);
        }
        let request = core(new)?;
        let template = listener.setup().template;
        if let Some(Template(mut attr)) = template
            && let Err(errno) = qp::create_short(&request, get!(listener, pd), &mut attr)
        {
            ack(event)?;
            destroy(new)?;
            return Err(errno);
        }
        set!(request, event = event);
        // SAFETY: the caller's promise.
        unsafe { id.write(new) };
        Ok(0)
    })
}
