//! Asynchronous events: fetching and acknowledging.

use std::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;

use super::context::Context;
use super::cq::Cq;
use super::object::find;
use super::qp::QpObj;
use super::srq::Srq;
use super::types::*;
use crate::call::{run, wait_and_fetch};

/// `ibv_get_async_event`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let fetch = || {
        let queue = Arc::clone(&find::<Context>(context)?.ctx.events);
        let Some((subject, event_type)) = queue.fetch() else {
            return Ok(false);
        };
        let element = ibv_async_event_element {
            qp: subject.handle as *mut ibv_qp,
        };
        // SAFETY: the caller's promise.
        unsafe {
            event.write(ibv_async_event {
                element,
                event_type,
            });
        }
        Ok(true)
    };
    let count_of = || {
        let fd = find::<Context>(context)?.ctx.events.fd();
        if event.is_null() {
            Err(Errno::INVAL)
        } else {
            Ok(fd)
        }
    };
    // SAFETY: an event queue's descriptor.
    unsafe { wait_and_fetch(count_of, fetch) }
}

/// `ibv_ack_async_event`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let _ = run::<c_int>(|| {
        if event.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise; all members are addresses.
        let (handle, event_type) = unsafe { ((*event).element.qp, (*event).event_type) };
        match event_type {
            IBV_EVENT_CQ_ERR => find::<Cq>(handle.cast())?.subject.ack(1),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                find::<Srq>(handle.cast())?.subject.ack(1);
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => find::<QpObj>(handle)?.subject.ack(1),
            _ => {}
        }
        Ok(0)
    });
}
