//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;

use super::context::Ctx;
use super::cq::Cq;
use super::event_router::{EventRouter, Listener, Of};
use super::events::Subject;
use super::object::{Guard, Kind as _, find, kind, turn};
use super::params::{put, read_param};
use super::pd::Pd;
use super::types::*;
use super::users::{Held, Users};
use super::xrc::Xrcd;
use crate::call::{pointer, status};

/// The object behind an `ibv_srq`.
pub(crate) struct Srq {
    pub(crate) native: weft_verbs::Srq,
    pub(crate) max_sge: usize,
    ctx: Arc<Ctx>,
    _held: [Option<Held>; 3],
    /// Queue pairs that use it.
    pub(crate) users: Users,
    pub(crate) subject: Arc<Subject>,
}

kind!(Srq as ibv_srq, 0x5134_a5ed);

/// Makes a queue and stores its actual limits in `init.attr`. With `xrc` it belongs to an XRC domain, and its receives complete in that completion queue.
fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_srq_init_attr,
    xrc: Option<(&Guard<Xrcd>, &Guard<Cq>)>,
) -> Result<Guard<Srq>, Errno> {
    let pd = find::<Pd>(pd)?;
    let limits = pd.native.device().attr().limits;
    let attr = &mut init.attr;
    if attr.max_wr == 0 || attr.max_wr > limits.max_wr || attr.max_sge > limits.max_sge {
        return Err(Errno::INVAL);
    }
    let native = match xrc {
        None => pd.native.create_srq(attr.max_wr, attr.max_sge),
        Some((xrcd, cq)) => {
            let domain = xrcd.native();
            domain.create_srq(&pd.native, &cq.native, attr.max_wr, attr.max_sge)
        }
    };
    let native = native.map_err(super::errno)?;
    let num = native.num();
    let made = Srq::pool().make_at(
        |handle| {
            Ok(Srq {
                native,
                max_sge: attr.max_sge as usize,
                ctx: Arc::clone(&pd.ctx),
                _held: [
                    Some(pd.users.hold()),
                    xrc.map(|(xrcd, _)| xrcd.users.hold()),
                    xrc.map(|(_, cq)| cq.users.hold()),
                ],
                users: Users::default(),
                subject: Subject::new(handle),
            })
        },
        |c, _| {
            c.context = pd.context();
            c.srq_context = init.srq_context;
            c.pd = pd.handle();
            c.handle = num;
        },
    )?;
    let listener = Listener::new(&made.ctx, &made.subject, false);
    EventRouter::get().add(Of::Srq, num, listener);
    Ok(made)
}

/// `ibv_create_srq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_srq(
    pd: *mut ibv_pd,
    srq_init_attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    pointer(|| {
        // SAFETY: the caller's promise.
        let mut init = unsafe { read_param(srq_init_attr) }?;
        let made = create(pd, &mut init, None)?;
        // SAFETY: as above.
        unsafe { (*srq_init_attr).attr = init.attr };
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer(|| {
        find::<super::context::Context>(context)?;
        // SAFETY: the caller's promise.
        let asked = unsafe { read_param(attr) }?;
        if asked.comp_mask >= IBV_SRQ_INIT_ATTR_RESERVED {
            return Err(Errno::INVAL);
        }
        let kind = if asked.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 {
            asked.srq_type
        } else {
            IBV_SRQT_BASIC
        };
        let xrc = match kind {
            IBV_SRQT_BASIC => None,
            IBV_SRQT_XRC => {
                const NEEDED: u32 = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
                if asked.comp_mask & NEEDED != NEEDED {
                    return Err(Errno::INVAL);
                }
                Some((find::<Xrcd>(asked.xrcd)?, find::<Cq>(asked.cq)?))
            }
            _ => return Err(Errno::OPNOTSUPP),
        };
        if asked.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            return Err(Errno::INVAL);
        }
        let mut init = ibv_srq_init_attr {
            srq_context: asked.srq_context,
            attr: asked.attr,
        };
        let xrc = xrc.as_ref().map(|(xrcd, cq)| (xrcd, cq));
        let made = create(asked.pd, &mut init, xrc)?;
        // SAFETY: as above.
        unsafe { (*attr).attr = init.attr };
        Ok(made.handle())
    })
}

/// `ibv_modify_srq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_modify_srq(
    srq: *mut ibv_srq,
    srq_attr: *mut ibv_srq_attr,
    srq_attr_mask: c_int,
) -> c_int {
    const KNOWN: u32 = IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT;
    status(|| {
        let srq = turn::<Srq>(srq)?;
        let mask = srq_attr_mask as u32;
        if srq_attr.is_null() || mask & !KNOWN != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let attr = unsafe { *srq_attr };
        let max_wr = if mask & IBV_SRQ_MAX_WR != 0 {
            attr.max_wr
        } else {
            srq.native.max_wr()
        };
        if max_wr == 0 || (mask & IBV_SRQ_LIMIT != 0 && attr.srq_limit > max_wr) {
            return Err(Errno::INVAL);
        }
        if mask & IBV_SRQ_MAX_WR != 0 {
            srq.native.resize(max_wr).map_err(|_| Errno::INVAL)?;
        }
        if mask & IBV_SRQ_LIMIT != 0 {
            srq.native.arm_limit(attr.srq_limit);
        }
        Ok(())
    })
}

/// `ibv_query_srq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_srq(srq: *mut ibv_srq, srq_attr: *mut ibv_srq_attr) -> c_int {
    status(|| {
        let srq = find::<Srq>(srq)?;
        let attr = ibv_srq_attr {
            max_wr: srq.native.max_wr(),
            max_sge: srq.native.max_sge(),
            srq_limit: srq.native.limit(),
        };
        // SAFETY: the caller's promise.
        unsafe { put(srq_attr, attr) }
    })
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int {
    status(|| {
        let srq = find::<Srq>(srq)?;
        // SAFETY: the caller's promise.
        unsafe { put(srq_num, srq.native.num()) }
    })
}

/// `ibv_destroy_srq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    status(|| {
        let srq = turn::<Srq>(srq)?;
        if srq.users.any() {
            return Err(Errno::BUSY);
        }
        EventRouter::get().remove(Of::Srq, srq.native.num());
        drop(srq.retire());
        Ok(())
    })
}
