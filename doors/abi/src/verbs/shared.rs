//! Further handles of a queue pair: `ibv_open_qp`, for targets of XRC. Every program part that has a target's domain may open the target, and the target lives
//! as long as one of its handles.
//!
//! The handle that made the queue pair has its body. The others have none: their calls go to that body. When that handle is destroyed, the next one inherits
//! the body.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use super::batch::Building;
use super::context::Context;
use super::event_router::EventRouter;
use super::events::Subject;
use super::object::{Guard, Kind, Name, PerFork, Turn, find, lock, turn};
use super::params::read_param;
use super::places;
use super::qp::{self, NO_CAP, QpObj};
use super::types::*;
use super::users::Held;
use super::xrc::Xrcd;
use crate::call::pointer;

/// The handles of the targets that have several, by number; the first of them has the body.
///
/// Held while the handles of a target change, and while a further handle is used: taken before any handle's turn, and while no guard of one is held.
type Handles = HashMap<u32, Vec<Name<QpObj>>>;

fn handles() -> MutexGuard<'static, Handles> {
    static HANDLES: PerFork<Mutex<Handles>> = PerFork::new();
    lock(HANDLES.get())
}

/// The body behind a handle, for a change.
pub(super) struct Behind {
    pub(super) qp: Turn<QpObj>,
    /// The program's handle, if it is a further one.
    pub(super) handle: Option<Guard<QpObj>>,
    _handles: Option<MutexGuard<'static, Handles>>,
}

/// The queue pair behind a handle of any kind.
///
/// # Errors
/// `EINVAL` when it is none.
pub(super) fn behind(qp: *mut ibv_qp) -> Result<Behind, Errno> {
    if !find::<QpObj>(qp)?.is_further() {
        return Ok(Behind {
            qp: turn::<QpObj>(qp)?,
            handle: None,
            _handles: None,
        });
    }
    let handles = handles();
    // Another thread may have destroyed this handle meanwhile, or the one that had the body.
    let handle = find::<QpObj>(qp)?;
    let first = match handles.get(&handle.num()).and_then(|all| all.first()) {
        Some(first) if handle.is_further() => first.get()?.handle(),
        _ => qp,
    };
    Ok(Behind {
        qp: turn::<QpObj>(first)?,
        handle: Some(handle),
        _handles: Some(handles),
    })
}

/// True if a target has several handles.
pub(super) fn has_others(num: u32) -> bool {
    handles().contains_key(&num)
}

/// `ibv_open_qp`
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    const NEEDED: u32 = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    pointer(|| {
        let context = find::<Context>(context)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        if attr.comp_mask >= IBV_QP_OPEN_ATTR_RESERVED || !context.ctx.is_persona() {
            return Err(Errno::OPNOTSUPP);
        }
        if attr.comp_mask & NEEDED != NEEDED || attr.qp_type != IBV_QPT_XRC_RECV {
            return Err(Errno::INVAL);
        }
        let qp_context = if attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT != 0 {
            attr.qp_context
        } else {
            std::ptr::null_mut()
        };
        let xrcd = find::<Xrcd>(attr.xrcd)?;
        let mut handles = handles();
        let mut all = QpObj::pool().all();
        let of_domain = |qp: &Guard<QpObj>| {
            let domain = qp.init.xrc.as_ref();
            domain.is_some_and(|domain| domain.same(xrcd.native()))
        };
        let first = all
            .find(|qp| qp.num() == attr.qp_num && !qp.is_further() && of_domain(qp))
            .ok_or(Errno::INVAL)?;
        drop(all);
        let made = further(&first, &context, xrcd.users.hold(), qp_context)?;
        let of_target = handles.entry(first.num()).or_default();
        if of_target.is_empty() {
            of_target.push(first.name());
        }
        of_target.push(made.name());
        EventRouter::get().join(first.num(), &context.ctx, &made.subject);
        Ok(made.handle())
    })
}

fn further(
    first: &QpObj,
    context: &Guard<Context>,
    held: Held,
    qp_context: *mut c_void,
) -> Result<Guard<QpObj>, Errno> {
    let mut init = first.init.clone();
    init.comp_counters = None;
    let num = first.num();
    QpObj::pool().make_at(
        |handle| {
            Ok(QpObj {
                ctx: Arc::clone(&context.ctx),
                num,
                _number: None,
                init,
                pd: first.pd.clone(),
                native: None,
                ud: None,
                roce: None,
                state: AtomicU32::new(IBV_QPS_RESET),
                kind: IBV_QPT_XRC_RECV,
                cap: NO_CAP,
                attr: Mutex::new(first.attr()),
                places: places::of(num),
                queues: [None; 2],
                subject: Subject::new(handle),
                resting: Mutex::default(),
                building: Building::default(),
                extended: false,
                faults: None,
                held: [Some(held), None, None, None],
                counted: Mutex::default(),
                further: true,
                changes: false,
                kept: Mutex::default(),
            })
        },
        |c, _| {
            let qp = &mut c.qp_base;
            qp.context = context.handle();
            qp.qp_context = qp_context;
            qp.handle = num;
            qp.qp_num = num;
            qp.state = first.state();
            qp.qp_type = IBV_QPT_XRC_RECV;
        },
    )
}

/// `ibv_destroy_qp` of a target. The target ends with its last handle.
///
/// # Errors
/// `EINVAL` when it is none.
pub(super) fn destroy(qp: *mut ibv_qp) -> Result<(), Errno> {
    // First, and without a lock: the program may have to acknowledge an event.
    let (num, subject) = {
        let handle = find::<QpObj>(qp)?;
        (handle.num(), Arc::clone(&handle.subject))
    };
    EventRouter::get().leave(num, &subject);
    let mut handles = handles();
    let gone = turn::<QpObj>(qp)?;
    let mut heir = None;
    if let Some(of_target) = handles.get_mut(&num) {
        let name = gone.name();
        of_target.retain(|other| *other != name);
        heir = of_target.first().copied();
        if of_target.len() < 2 {
            handles.remove(&num);
        }
    }
    if gone.is_further() {
        drop(gone.retire());
        return Ok(());
    }
    let Some(heir) = heir else {
        qp::destroy(gone);
        return Ok(());
    };
    let mut body = gone.retire();
    let handle = heir.get()?.handle();
    turn::<QpObj>(handle)?.alone(|heir| {
        // The handle's own parts stay with the handle.
        std::mem::swap(&mut body.ctx, &mut heir.ctx);
        std::mem::swap(&mut body.subject, &mut heir.subject);
        std::mem::swap(&mut body.held, &mut heir.held);
        body.further = false;
        std::mem::swap(heir, &mut body);
    });
    Ok(())
}

/// The queue pair that `ibv_query_qp` of a further handle reports.
///
/// # Errors
/// `EINVAL` when it is none.
pub(super) fn seen(qp: *mut ibv_qp) -> Result<Guard<QpObj>, Errno> {
    let handles = handles();
    let handle = find::<QpObj>(qp)?;
    match handles.get(&handle.num()).and_then(|all| all.first()) {
        Some(first) if handle.is_further() => first.get(),
        _ => Ok(handle),
    }
}
