//! State changes, destruction and queries of queue pairs.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::access::rights;
use super::event_router::{EventRouter, Of};
use super::object::{Turn, find, lock, turn};
use super::params::read_param;
use super::persona;
use super::port;
use super::qp::{self, QpObj, end};
use super::shared;
use super::transitions::{allowed, remember, sound};
use super::types::*;
use super::wire::{self, Wire};
use crate::call::status;

/// `ibv_modify_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int {
    status(|| {
        let mut behind = shared::behind(qp)?;
        let qp = &mut behind.qp;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        let mask = attr_mask as u32;
        let now = qp.state();
        if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != now {
            return Err(Errno::INVAL);
        }
        let to = if mask & IBV_QP_STATE != 0 {
            attr.qp_state
        } else {
            now
        };
        if qp.is_persona() {
            modify_persona(qp, &attr, mask, now, to)?;
        } else {
            modify_iwarp(qp, &attr, mask, now, to)?;
        }
        remember(&mut lock(&qp.attr), &attr, mask);
        let state = qp.state();
        for handle in [Some(&**qp), behind.handle.as_ref()].into_iter().flatten() {
            // SAFETY: a live object.
            unsafe { (*handle.c()).qp_base.state = state };
        }
        Ok(())
    })
}

fn modify_persona(
    qp: &mut Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    now: ibv_qp_state,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    let limits = qp.pd.device().attr().limits;
    if mask & IBV_QP_AV != 0 && attr.ah_attr.is_global == 0 {
        tracing::warn!(
            qp_num = qp.num,
            "weft_ib0 is RoCE: the path to a peer needs GIDs, not LIDs (`-g 0` of the ibv_*_pingpong programs, `-x 0` of perftest)"
        );
    }
    if !allowed(qp.kind, now, to, mask) || !sound(attr, mask, limits.max_rd_atomic) {
        return Err(Errno::INVAL);
    }
    if qp.changes && (now, to) == (IBV_QPS_INIT, IBV_QPS_RTR) {
        wire::take_for(qp, attr)?;
    }
    if let Some(roce) = &qp.roce {
        if mask & IBV_QP_ACCESS_FLAGS != 0 {
            roce.set_access(rights(attr.qp_access_flags))?;
        }
        return match to {
            IBV_QPS_RESET => reset(qp),
            IBV_QPS_ERR => fail(qp),
            _ => modify_roce(qp, attr, mask, (now, to)),
        };
    }
    if mask & IBV_QP_ACCESS_FLAGS != 0 {
        qp.native()?.set_access(rights(attr.qp_access_flags));
    }
    if mask & IBV_QP_MIN_RNR_TIMER != 0 {
        let timer = persona::rnr_timer(attr.min_rnr_timer);
        qp.native()?.set_min_rnr_timer(timer);
    }
    if mask & IBV_QP_RNR_RETRY != 0 {
        qp.native()?.set_rnr_retry(attr.rnr_retry);
    }
    match (now, to) {
        (_, IBV_QPS_RESET) => return reset(qp),
        (_, IBV_QPS_ERR) => return fail(qp),
        _ if qp.is_datagram() => return modify_datagram(qp, attr, mask, to),
        (IBV_QPS_INIT, IBV_QPS_RTR) => {
            remember(&mut lock(&qp.attr), attr, mask);
            persona::rtr(&qp.native()?, attr)?;
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => {
            let patience = persona::patience(attr.timeout, attr.retry_cnt);
            persona::rts(qp.num, patience);
            port::of(qp.ctx.which).set_patience(qp.num, patience);
        }
        (IBV_QPS_SQD, IBV_QPS_RTS) => {
            qp.resume(&*qp.native()?);
            return Ok(());
        }
        (IBV_QPS_RTS, IBV_QPS_SQD) => {
            qp.set_state(to);
            tell_drained(qp, attr, mask);
            return Ok(());
        }
        _ => {}
    }
    qp.set_state(to);
    Ok(())
}

fn modify_roce(
    qp: &Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    change: (ibv_qp_state, ibv_qp_state),
) -> Result<(), Errno> {
    let roce = qp.roce.as_ref().ok_or(Errno::INVAL)?;
    let (_, to) = change;
    if change == (IBV_QPS_SQD, IBV_QPS_SQD) && mask & IBV_QP_AV != 0 {
        // The way to the peer stays.
        return Err(Errno::INVAL);
    }
    roce.change(attr, mask)?;
    match change {
        (IBV_QPS_INIT, IBV_QPS_RTR) => roce.rtr(attr)?,
        (IBV_QPS_RTR, IBV_QPS_RTS) => roce.rts(attr)?,
        (IBV_QPS_SQD, IBV_QPS_RTS) => {
            let _resting = lock(&qp.resting);
            qp.places.send.give_back(roce.resume());
            qp.set_state(to);
        }
        _ => {}
    }
    qp.set_state(to);
    if change == (IBV_QPS_RTS, IBV_QPS_SQD) {
        tell_drained(qp, attr, mask);
    }
    Ok(())
}

fn modify_datagram(
    qp: &Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    let ud = qp.ud.as_ref().ok_or(Errno::INVAL)?;
    if to != IBV_QPS_INIT {
        let set = mask & IBV_QP_QKEY != 0;
        ud.listen(if set { attr.qkey } else { qp.attr().qkey })?;
    }
    if to == IBV_QPS_RTS {
        let _resting = lock(&qp.resting);
        qp.places.send.give_back(ud.resume());
        qp.set_state(to);
    } else {
        qp.set_state(to);
    }
    if to == IBV_QPS_SQD {
        ud.drain();
        tell_drained(qp, attr, mask);
    }
    Ok(())
}

/// The send queue is drained. Raises the event if the program asked for it and no send is under way.
fn tell_drained(qp: &QpObj, attr: &ibv_qp_attr, mask: u32) {
    let notify = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attr.en_sqd_async_notify != 0;
    if notify && qp.outstanding() == 0 {
        qp.ctx.events.push(&qp.subject, IBV_EVENT_SQ_DRAINED);
    }
}

/// The changes that providers of iWARP leave to the program. The connection manager makes the others.
fn modify_iwarp(
    qp: &mut Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    now: ibv_qp_state,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    const IGNORED: u32 = IBV_QP_ALT_PATH | IBV_QP_AV | IBV_QP_PATH_MIG_STATE;
    let limits = qp.pd.device().attr().limits;
    if !sound(attr, mask & !IGNORED, limits.max_rd_atomic) {
        return Err(Errno::INVAL);
    }
    match (now, to) {
        (_, IBV_QPS_RESET) => reset(qp),
        (_, IBV_QPS_ERR) => fail(qp),
        (IBV_QPS_RESET, IBV_QPS_INIT) => {
            qp.set_state(IBV_QPS_INIT);
            Ok(())
        }
        // Closes the connection in order.
        (IBV_QPS_RTS, IBV_QPS_SQD) => {
            qp.native()?.disconnect();
            Ok(())
        }
        (now, to) if now == to => Ok(()),
        (_, IBV_QPS_RTR | IBV_QPS_RTS) => {
            tracing::warn!(
                qp_num = qp.num,
                "ibv_modify_qp cannot connect a queue pair of weft0, which is iWARP: use the device weft_ib0 (`-d weft_ib0` of most programs, or \
                 `weft verbs --devices weft_ib0`), or connect with rdma_cm (`-R` of perftest)"
            );
            Err(Errno::INVAL)
        }
        _ => Err(Errno::INVAL),
    }
}

/// To the error state: everything posted is flushed.
fn fail(qp: &mut Turn<QpObj>) -> Result<(), Errno> {
    if wire::is_missing(qp) {
        wire::put(qp, Wire::Persona)?;
    }
    let before = qp.state();
    if qp.native.is_none() {
        {
            let _resting = lock(&qp.resting);
            qp.set_state(IBV_QPS_ERR);
            let refused = match (&qp.ud, &qp.roce) {
                (Some(ud), _) => ud.fail(),
                (_, Some(roce)) => roce.fail(),
                _ => return Err(Errno::INVAL),
            };
            qp.places.send.give_back(refused);
        }
        // One that has failed before has had it, or gets it now.
        EventRouter::get().last(qp.num);
        return Ok(());
    }
    let native = qp.native()?;
    if qp.is_persona() {
        persona::reset(qp.num);
    }
    qp.set_state(IBV_QPS_ERR);
    EventRouter::get().asked(qp.num);
    native.to_error();
    for wr in lock(&qp.resting).drain(..) {
        // It is flushed.
        if native.post_send_one(wr).is_err() {
            qp.places.send.give_back(1);
        }
    }
    if before != IBV_QPS_ERR {
        EventRouter::get().last(qp.num);
    }
    Ok(())
}

/// To RESET: with a new native queue pair of the same number.
fn reset(qp: &mut Turn<QpObj>) -> Result<(), Errno> {
    if qp.is_datagram() {
        let before = qp.alone(|qp| {
            qp.set_state(IBV_QPS_RESET);
            qp.ud.take()
        });
        let mut ud = before.ok_or(Errno::INVAL)?;
        ud.end();
        qp.forget_posted();
        let renewed = ud.renew();
        qp.alone(|qp| qp.ud = Some(ud));
        return renewed;
    }
    if qp.roce.is_some() && !qp.changes {
        let before = qp.alone(|qp| {
            qp.set_state(IBV_QPS_RESET);
            qp.roce.take()
        });
        let mut roce = before.ok_or(Errno::INVAL)?;
        roce.end();
        qp.forget_posted();
        EventRouter::get().anew(qp.num);
        let renewed = roce.renew();
        qp.alone(|qp| qp.roce = Some(roce));
        return renewed;
    }
    if qp.state.load(Ordering::Relaxed) == IBV_QPS_RESET && qp.native.is_some() {
        return Ok(());
    }
    if qp.is_persona() {
        persona::reset(qp.num);
    }
    let (before, roce) = qp.alone(|qp| {
        qp.set_state(IBV_QPS_RESET);
        lock(&qp.resting).clear();
        (qp.native.take(), qp.roce.take())
    });
    // Not while other threads wait: it takes locks of the device, whose hooks must not wait for us.
    end(before);
    if let Some(mut roce) = roce {
        roce.end();
    }
    qp.forget_posted();
    EventRouter::get().anew(qp.num);
    let native = wire::persona_qp(qp)?;
    qp.alone(|qp| qp.native = Some(native));
    Ok(())
}

/// `ibv_destroy_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    status(|| {
        if find::<QpObj>(qp)?.kind == IBV_QPT_XRC_RECV {
            return shared::destroy(qp);
        }
        let qp = turn::<QpObj>(qp)?;
        if qp.ud.as_ref().is_some_and(|ud| ud.is_attached()) {
            return Err(Errno::BUSY);
        }
        EventRouter::get().remove(Of::Qp, qp.num);
        qp::destroy(qp);
        Ok(())
    })
}

/// `ibv_query_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        if attr.is_null() || init_attr.is_null() {
            return Err(Errno::INVAL);
        }
        let further = find::<QpObj>(qp)?.is_further();
        // Before taking the handle's own turn.
        let behind = if further {
            Some(shared::seen(qp)?)
        } else {
            None
        };
        let handle = turn::<QpObj>(qp)?;
        let qp = behind.as_ref().unwrap_or(&handle);
        let mut filled = qp.attr();
        filled.qp_state = match qp.state() {
            // iWARP has one idle state, which its providers report as INIT.
            IBV_QPS_RESET if !qp.is_persona() => IBV_QPS_INIT,
            state => state,
        };
        filled.cur_qp_state = filled.qp_state;
        filled.cap = qp.cap;
        if !qp.is_persona()
            && let Some((inbound, outbound)) = qp.native()?.depths()
        {
            filled.max_dest_rd_atomic = u8::try_from(inbound).unwrap_or(u8::MAX);
            filled.max_rd_atomic = u8::try_from(outbound).unwrap_or(u8::MAX);
        }
        let draining = filled.qp_state == IBV_QPS_SQD && qp.outstanding() > 0;
        filled.sq_draining = u8::from(draining);
        let c = handle.c();
        // SAFETY: a live object, and the caller's promise.
        unsafe {
            let base = &raw mut (*c).qp_base;
            (*base).state = filled.qp_state;
            attr.write(filled);
            init_attr.write(ibv_qp_init_attr {
                qp_context: (*base).qp_context,
                send_cq: (*base).send_cq,
                recv_cq: (*base).recv_cq,
                srq: (*base).srq,
                cap: qp.cap,
                qp_type: qp.kind,
                sq_sig_all: c_int::from(qp.init.sq_sig_all),
            });
        }
        Ok(())
    })
}
