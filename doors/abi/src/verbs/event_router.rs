//! The object of C that an event of the native device is about, and the queue that gets the event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use weft_verbs::AsyncEvent;

use super::context::Ctx;
use super::events::Subject;
use super::object::{Inherited, PerFork, lock};
use super::types::*;

/// The receivers of the native device's events, by number.
#[derive(Default)]
pub(crate) struct EventRouter {
    qps: Listeners,
    cqs: Listeners,
    srqs: Listeners,
}

type Listeners = Mutex<HashMap<u32, Listener>>;

/// The receiver of an object's events.
pub(crate) struct Listener {
    ctx: Arc<Ctx>,
    subject: Arc<Subject>,
    /// The queue pair's receives come from a shared queue.
    shared: bool,
    fate: Fate,
    /// Further handles of the queue pair.
    others: Vec<(Arc<Ctx>, Arc<Subject>)>,
}

/// How a queue pair ended.
#[derive(Default)]
struct Fate {
    /// The program moved it to the error state itself, and needs no event.
    asked: bool,
    /// The program has got the event that no more receives are taken from the shared receive queue.
    last: bool,
}

/// The kind of a number.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    Qp,
    Cq,
    Srq,
}

impl Listener {
    pub(crate) fn new(ctx: &Arc<Ctx>, subject: &Arc<Subject>, shared: bool) -> Listener {
        Listener {
            ctx: Arc::clone(ctx),
            subject: Arc::clone(subject),
            shared,
            fate: Fate::default(),
            others: Vec::new(),
        }
    }
}

impl Inherited for EventRouter {}

impl EventRouter {
    pub(crate) fn get() -> &'static EventRouter {
        static AUDIENCE: PerFork<EventRouter> = PerFork::new();
        AUDIENCE.get()
    }

    fn of(&self, of: Of) -> &Listeners {
        match of {
            Of::Qp => &self.qps,
            Of::Cq => &self.cqs,
            Of::Srq => &self.srqs,
        }
    }

    pub(crate) fn add(&self, of: Of, num: u32, listener: Listener) {
        lock(self.of(of)).insert(num, listener);
    }

    /// The object ends, see [`Subject::close`].
    pub(crate) fn remove(&self, of: Of, num: u32) {
        let listener = lock(self.of(of)).remove(&num);
        if let Some(listener) = listener {
            listener.subject.close(&listener.ctx.events);
        }
    }

    /// A further handle of a queue pair gets events too.
    pub(crate) fn join(&self, qp_num: u32, ctx: &Arc<Ctx>, subject: &Arc<Subject>) {
        if let Some(listener) = lock(&self.qps).get_mut(&qp_num) {
            let other = (Arc::clone(ctx), Arc::clone(subject));
            listener.others.push(other);
        }
    }

    /// One of a queue pair's handles ends.
    pub(crate) fn leave(&self, qp_num: u32, subject: &Arc<Subject>) {
        let ctx = {
            let mut qps = lock(&self.qps);
            let Some(listener) = qps.get_mut(&qp_num) else {
                return;
            };
            let others = &mut listener.others;
            let at = others.iter().position(|(_, s)| Arc::ptr_eq(s, subject));
            if let Some(at) = at {
                others.remove(at).0
            } else if !Arc::ptr_eq(&listener.subject, subject) {
                return;
            } else if others.is_empty() {
                drop(qps);
                return self.remove(Of::Qp, qp_num);
            } else {
                let (ctx, next) = others.remove(0);
                listener.subject = next;
                std::mem::replace(&mut listener.ctx, ctx)
            }
        };
        subject.close(&ctx.events);
    }

    fn tell(&self, of: Of, num: u32, what: ibv_event_type) {
        if let Some(listener) = lock(self.of(of)).get(&num) {
            listener.ctx.events.push(&listener.subject, what);
            for (ctx, subject) in &listener.others {
                ctx.events.push(subject, what);
            }
        }
    }

    /// An event of the device. The caller holds locks of the device; this takes only its own lock, for a moment.
    pub(crate) fn hear(&self, event: AsyncEvent) {
        match event {
            AsyncEvent::QpFatal { qp_num, reason } => {
                // InfiniBand has no event for a peer that went away.
                let quiet = lock(&self.qps)
                    .get(&qp_num)
                    .is_some_and(|l| l.fate.asked || (reason == 0 && l.ctx.is_persona()));
                if !quiet {
                    self.tell(Of::Qp, qp_num, IBV_EVENT_QP_FATAL);
                }
                self.last(qp_num);
            }
            AsyncEvent::QpAccessErr { qp_num, .. } => {
                self.tell(Of::Qp, qp_num, IBV_EVENT_QP_ACCESS_ERR);
                self.last(qp_num);
            }
            AsyncEvent::CqOverrun { cq_num } => self.tell(Of::Cq, cq_num, IBV_EVENT_CQ_ERR),
            AsyncEvent::SrqLimitReached { srq_num } => {
                self.tell(Of::Srq, srq_num, IBV_EVENT_SRQ_LIMIT_REACHED);
            }
        }
    }

    /// The program moves a queue pair to the error state.
    pub(crate) fn asked(&self, qp_num: u32) {
        if let Some(listener) = lock(&self.qps).get_mut(&qp_num) {
            listener.fate.asked = true;
        }
    }

    /// A queue pair is reset.
    pub(crate) fn anew(&self, qp_num: u32) {
        if let Some(listener) = lock(&self.qps).get_mut(&qp_num) {
            listener.fate = Fate::default();
        }
    }

    /// A queue pair in the error state takes no more receives from its shared receive queue.
    pub(crate) fn last(&self, qp_num: u32) {
        let first = lock(&self.qps)
            .get_mut(&qp_num)
            .is_some_and(|l| l.shared && !std::mem::replace(&mut l.fate.last, true));
        if first {
            self.tell(Of::Qp, qp_num, IBV_EVENT_QP_LAST_WQE_REACHED);
        }
    }
}
