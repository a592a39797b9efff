//! Completion queues.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::Wc;
use weft_verbs::ext::CqExt;

use super::batch::Polling;
use super::channel::{Awaited, Channel};
use super::context::{COMP_VECTORS, Context};
use super::event_router::{EventRouter, Listener, Of};
use super::events::{EventQueue, Subject};
use super::native::native;
use super::object::{Guard, Kind as _, Name, enter, find, kind, turn};
use super::places;
use super::types::*;
use super::users::{Held, Users};
use crate::call::{pointer, run, status};

/// The object behind an `ibv_cq`.
pub(crate) struct Cq {
    pub(crate) native: weft_verbs::Cq,
    /// Queue pairs that use it.
    pub(crate) users: Users,
    /// The subject of its asynchronous events.
    pub(crate) subject: Arc<Subject>,
    /// The subject of its completion events.
    pub(crate) notified: Arc<Subject>,
    channel: Option<(Arc<EventQueue<()>>, Arc<Awaited>, Held)>,
    /// The state of `ibv_start_poll` and what follows it.
    pub(crate) polling: Polling,
    /// True if `ibv_create_cq_ex` made it.
    pub(crate) extended: bool,
}

kind!(Cq as ibv_cq => ibv_cq_ex, 0xc0a7_1e7e);

impl Cq {
    /// Takes up to `out.len()` completions for the program.
    ///
    /// # Errors
    /// `EIO` when the queue was overrun and has been emptied.
    #[inline]
    pub(crate) fn poll(&self, out: &mut [Wc]) -> Result<usize, Errno> {
        let taken = self.native.poll(out).map_err(|_| Errno::IO)?;
        places::polled(&out[..taken]);
        Ok(taken)
    }
}

/// A queue pair ends or is reset: discards its unpolled completions, as adapters do.
pub(crate) fn clean(queues: [Option<Name<Cq>>; 2], qp_num: u32) {
    let [send, recv] = queues;
    let second = recv.filter(|recv| send != Some(*recv));
    for name in [send, second].into_iter().flatten() {
        // A queue that is gone has no completions.
        if let Ok(queue) = name.get() {
            queue.native.forget(qp_num);
        }
    }
}

/// The parameters of a new completion queue.
pub(crate) struct Wanted {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) extended: bool,
}

/// Makes a queue. `fill` sets the parts that only extended queues have.
pub(crate) fn create(
    context: *mut ibv_context,
    wanted: &Wanted,
    fill: impl FnOnce(&mut ibv_cq_ex),
) -> Result<Guard<Cq>, Errno> {
    let context = find::<Context>(context)?;
    if wanted.cqe == 0 || wanted.comp_vector >= COMP_VECTORS as u32 {
        return Err(Errno::INVAL);
    }
    let device = native()?;
    if wanted.cqe > device.attr().limits.max_cqe {
        return Err(Errno::INVAL);
    }
    let channel = if wanted.channel.is_null() {
        None
    } else {
        let channel = find::<Channel>(wanted.channel)?;
        let (queue, awaited) = (Arc::clone(&channel.queue), Arc::clone(&channel.awaited));
        Some((queue, awaited, channel.users.hold()))
    };
    let made = Cq::pool().make_at(
        |handle| {
            let (subject, notified) = (Subject::new(handle), Subject::new(handle));
            let native = match &channel {
                Some((queue, ..)) => {
                    let (queue, notified) = (Arc::clone(queue), Arc::clone(&notified));
                    device.create_cq_notify(wanted.cqe, move || queue.push(&notified, ()))
                }
                None => device.create_cq(wanted.cqe, None),
            };
            let native = native.map_err(super::errno)?;
            Ok(Cq {
                native,
                users: Users::default(),
                subject,
                notified,
                channel,
                polling: Polling::default(),
                extended: wanted.extended,
            })
        },
        |c, _| {
            c.context = context.handle();
            c.channel = wanted.channel;
            c.cq_context = wanted.cq_context;
            c.cqe = wanted.cqe as c_int;
            fill(c);
        },
    )?;
    if let Some((_, awaited, _)) = &made.channel {
        awaited.add(&made.native);
    }
    let num = made.native.num();
    // SAFETY: a live object that the program does not have yet.
    unsafe { (*made.c()).handle = num };
    let listener = Listener::new(&context.ctx, &made.subject, false);
    EventRouter::get().add(Of::Cq, num, listener);
    Ok(made)
}

/// `ibv_create_cq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer(|| {
        let wanted = Wanted {
            cqe: u32::try_from(cqe).map_err(|_| Errno::INVAL)?,
            cq_context,
            channel,
            comp_vector: u32::try_from(comp_vector).map_err(|_| Errno::INVAL)?,
            extended: false,
        };
        Ok(create(context, &wanted, |_| ())?.handle())
    })
}

/// `ibv_resize_cq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    status(|| {
        let cq = turn::<Cq>(cq)?;
        let depth = u32::try_from(cqe).map_err(|_| Errno::INVAL)?;
        cq.native.resize(depth).map_err(|_| Errno::INVAL)?;
        // SAFETY: a live object.
        unsafe { (*cq.c()).cqe = cqe };
        Ok(())
    })
}

/// `ibv_destroy_cq`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    status(|| {
        let cq = turn::<Cq>(cq)?;
        if cq.users.any() {
            return Err(Errno::BUSY);
        }
        EventRouter::get().remove(Of::Cq, cq.native.num());
        if let Some((queue, awaited, _)) = &cq.channel {
            awaited.remove(&cq.native);
            cq.notified.close(queue);
        }
        drop(cq.retire());
        Ok(())
    })
}

/// `ibv_ack_cq_events`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) {
    let _ = run::<c_int>(|| {
        find::<Cq>(cq)?.notified.ack(nevents);
        Ok(0)
    });
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    status(|| {
        // SAFETY: the program has just looked into it.
        let cq = unsafe { enter::<Cq>(cq) }?;
        cq.native.req_notify(solicited_only != 0);
        Ok(())
    })
}

/// `ibv_modify_cq`: moderation is a hint. The device never waits for more completions.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    status(|| {
        let _cq = find::<Cq>(cq)?;
        // SAFETY: NULL, or what the caller promises.
        if attr.is_null() || unsafe { (*attr).attr_mask } & !IBV_CQ_ATTR_MODERATE != 0 {
            return Err(Errno::INVAL);
        }
        Ok(())
    })
}
