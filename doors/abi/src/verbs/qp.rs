//! Queue pairs: the object, and posting to it. `create` makes queue pairs, `modify` changes their state.
//!
//! The connection manager and the persona may call:
//!
//! * [`find`]`::<QpObj>(ptr)` and [`enter`](super::object::enter) return a guard of the object behind a program's pointer. Hold it only while no other call of
//!   the same queue pair is waited for. [`Guard::name`](super::object::Guard::name) may be kept.
//! * [`QpObj::native`]: the native queue pair, to dial or accept with. A queue pair that goes back to RESET gets a new one.
//! * [`QpObj::num`], [`QpObj::is_persona`], [`QpObj::attr`] (the attributes that `ibv_modify_qp` has set), [`QpObj::is_srq`].
//! * [`QpObj::state`], [`QpObj::set_state`]: C's state. They only load and store, so any thread may call them. The error state needs no call: it follows from
//!   the native queue pair.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::ext::QpExt;
use weft_verbs::{CompCounters, Qp, QpInit, QpState, RecvWr, SendWr, UdDest};

use super::batch::Building;
use super::context::Ctx;
use super::cq::{self, Cq};
use super::events::Subject;
use super::faults::{End, QpFaults};
use super::object::{Name, Turn, find, kind, lock};
use super::persona;
use super::places::Both;
use super::port;
use super::refused;
use super::roce::Roce;
use super::types::*;
use super::ud::Datagrams;
use super::users::Held;
use crate::call::unsupported;

/// For targets of XRC, which have no posted work.
pub(super) const NO_CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 0,
    max_recv_wr: 0,
    max_send_sge: 0,
    max_recv_sge: 0,
    max_inline_data: 0,
};

/// The object behind an `ibv_qp`.
pub(crate) struct QpObj {
    pub(crate) ctx: Arc<Ctx>,
    pub(super) num: u32,
    pub(super) init: QpInit,
    pub(super) pd: weft_verbs::Pd,
    /// The native queue pair. `None` only while it is being replaced, and for datagrams.
    pub(super) native: Option<Arc<Qp>>,
    /// Its counterpart for datagrams.
    pub(super) ud: Option<Box<Datagrams>>,
    /// And for RoCE.
    pub(super) roce: Option<Box<Roce>>,
    pub(super) state: AtomicU32,
    pub(super) kind: ibv_qp_type,
    pub(super) cap: ibv_qp_cap,
    pub(super) attr: Mutex<ibv_qp_attr>,
    pub(super) places: &'static Both,
    /// The completion queues of sends and of receives.
    pub(super) queues: [Option<Name<Cq>>; 2],
    pub(crate) subject: Arc<Subject>,
    /// Sends posted while the send queue was drained (SQD). Those of datagrams are kept elsewhere, under this lock.
    pub(super) resting: Mutex<Vec<SendWr>>,
    pub(crate) building: Building,
    pub(super) extended: bool,
    /// Its faults from `WEFT_FAULTS`.
    pub(super) faults: Option<Arc<QpFaults>>,
    /// The persona's claim on the number. It is dropped after the native queue pair, which has the number too.
    pub(super) _number: Option<persona::Number>,
    /// The objects that it uses.
    pub(super) held: [Option<Held>; 4],
    /// The attached completion counters, released when the queue pair ends.
    pub(super) counted: Mutex<Vec<Held>>,
    /// It takes the wire that its peer needs (`WEFT_IB_WIRE=auto`).
    pub(super) changes: bool,
    /// Receives, while neither native queue pair is there: the next one gets them.
    pub(super) kept: Mutex<Option<Vec<Kept>>>,
    /// Set for a further handle of another queue pair: see `shared`.
    pub(super) further: bool,
}

/// A posted receive, and what `WEFT_FAULTS` has for it.
pub(super) type Kept = (RecvWr, Option<End>);

kind!(QpObj as ibv_qp => ibv_qp_ex, 0x9b9b_a132);

impl QpObj {
    /// The native queue pair.
    ///
    /// # Errors
    /// `EINVAL` while it is being replaced.
    pub(crate) fn native(&self) -> Result<Arc<Qp>, Errno> {
        self.native.clone().ok_or(Errno::INVAL)
    }

    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    pub(crate) fn is_persona(&self) -> bool {
        self.ctx.is_persona()
    }

    /// Counts its completed work.
    ///
    /// # Errors
    /// `EINVAL` for a further handle of another queue pair.
    pub(crate) fn comp_counters(&self) -> Result<&CompCounters, Errno> {
        self.init.comp_counters.as_deref().ok_or(Errno::INVAL)
    }

    /// True if a completion counter is attached to it.
    pub(crate) fn counted_by(&self, held: Held) {
        lock(&self.counted).push(held);
    }

    /// True if it is a further handle of another queue pair, which has the body.
    #[inline]
    pub(crate) fn is_further(&self) -> bool {
        self.further
    }

    /// True if its receives come from a shared queue.
    pub(crate) fn is_srq(&self) -> bool {
        self.init.srq.is_some() || self.init.xrc.is_some()
    }

    /// True if it takes the wire that its peer needs.
    pub(crate) fn changes(&self) -> bool {
        self.changes
    }

    /// The attributes that `ibv_modify_qp` has set.
    pub(crate) fn attr(&self) -> ibv_qp_attr {
        *lock(&self.attr)
    }

    /// C's state. A connection that has ended is in the error state.
    pub(crate) fn state(&self) -> ibv_qp_state {
        let state = self.state.load(Ordering::Acquire);
        let ended = || match (&self.native, &self.roce) {
            (Some(qp), _) => qp.state() == QpState::Error,
            (None, roce) => roce.as_ref().is_some_and(|roce| roce.has_failed()),
        };
        if matches!(state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD) && ended() {
            IBV_QPS_ERR
        } else {
            state
        }
    }

    pub(crate) fn set_state(&self, state: ibv_qp_state) {
        self.state.store(state, Ordering::Release);
    }

    /// The attributes that a query returns: a TCP connection has its own time limits.
    pub(crate) fn set_timeout(&self, timeout: u8) {
        lock(&self.attr).timeout = timeout;
    }

    /// The attributes that a query returns of a queue pair that the connection manager has connected: those that it would have set on InfiniBand.
    pub(crate) fn show_connection(&self, retry_cnt: u8, rnr_retry: u8, timeout: u8) {
        let depths = self.native.as_ref().and_then(|qp| qp.depths());
        let (inbound, outbound) = depths.unwrap_or_default();
        let mut attr = lock(&self.attr);
        attr.max_dest_rd_atomic = u8::try_from(inbound).unwrap_or(u8::MAX);
        attr.max_rd_atomic = u8::try_from(outbound).unwrap_or(u8::MAX);
        (attr.retry_cnt, attr.rnr_retry, attr.timeout) = (retry_cnt, rnr_retry, timeout);
    }

    /// Those of a connection of RoCE.
    pub(crate) fn show_depths(&self, (inbound, outbound): (u8, u8)) {
        let mut attr = lock(&self.attr);
        (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (inbound, outbound);
    }

    #[inline]
    pub(crate) fn is_datagram(&self) -> bool {
        self.kind == IBV_QPT_UD
    }

    /// Its datagram part.
    ///
    /// # Errors
    /// `EINVAL` for a queue pair of another kind.
    pub(crate) fn datagrams(&self) -> Result<&Datagrams, Errno> {
        self.ud.as_deref().ok_or(Errno::INVAL)
    }

    /// True if it supports Reads and atomics.
    #[inline]
    pub(crate) fn is_reliable(&self) -> bool {
        matches!(self.kind, IBV_QPT_RC | IBV_QPT_XRC_SEND)
    }

    /// True if its messages name the shared receive queues that they are for.
    #[inline]
    pub(crate) fn is_xrc_send(&self) -> bool {
        self.kind == IBV_QPT_XRC_SEND
    }

    #[inline]
    pub(crate) fn max_send_sge(&self) -> usize {
        self.cap.max_send_sge as usize
    }

    #[inline]
    pub(crate) fn max_recv_sge(&self) -> usize {
        self.cap.max_recv_sge as usize
    }

    #[inline]
    pub(crate) fn max_inline(&self) -> usize {
        self.cap.max_inline_data as usize
    }

    /// True if the send queue has room for `count` more requests.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        let (places, max) = (&self.places.send, self.cap.max_send_wr);
        places.has_room(count, max) || {
            places.give_back(self.counted_in_silence());
            places.has_room(count, max)
        }
    }

    /// The number of sends that a counter has counted and that make no completion: their places are free.
    #[cold]
    fn counted_in_silence(&self) -> u32 {
        let comp_counters = self.init.comp_counters.as_deref();
        comp_counters.map_or(0, CompCounters::take_silent)
    }

    pub(super) fn outstanding(&self) -> u32 {
        match (&self.native, &self.ud, &self.roce) {
            (Some(qp), ..) => qp.outstanding(),
            (None, Some(ud), _) => ud.outstanding(),
            (None, None, roce) => roce.as_ref().map_or(0, |roce| roce.outstanding()),
        }
    }

    /// Posts a datagram. With `more` another one follows, or [`QpObj::no_more_datagrams`].
    pub(crate) fn post_datagram(&self, wr: &SendWr, to: &UdDest, more: bool) -> Result<(), Errno> {
        let ud = self.ud.as_ref().ok_or(Errno::INVAL)?;
        let places = &self.places.send;
        let reclaim = || self.counted_in_silence();
        places.take_or(self.cap.max_send_wr, reclaim, || {
            let state = self.state.load(Ordering::Relaxed);
            if state != IBV_QPS_SQD {
                return ud.post(state, wr, to, more);
            }
            // The send queue may be resuming at this moment.
            let _resting = lock(&self.resting);
            ud.post(self.state.load(Ordering::Relaxed), wr, to, more)
        })
    }

    /// A list of datagrams has ended early.
    #[cold]
    pub(crate) fn no_more_datagrams(&self) {
        if let Some(ud) = &self.ud {
            ud.drain();
        }
    }

    #[inline]
    pub(crate) fn post_one(&self, wr: &mut SendWr) -> Result<(), Errno> {
        let places = &self.places.send;
        let reclaim = || self.counted_in_silence();
        places.take_or(self.cap.max_send_wr, reclaim, || match &self.faults {
            None => self.post_sound(wr),
            Some(faults) => self.post_faulty(faults, wr),
        })
    }

    #[cold]
    fn post_faulty(&self, faults: &QpFaults, wr: &mut SendWr) -> Result<(), Errno> {
        let end = faults.before_send(wr);
        match (&self.native, &self.roce) {
            (Some(native), _) => end.carry_out(native),
            (None, Some(roce)) => end.carry_out_on(&*roce.native()?),
            (None, None) => return Err(Errno::INVAL),
        }
        self.post_sound(wr)
    }

    #[inline]
    pub(crate) fn post_receive(&self, wr: &RecvWr) -> Result<(), Errno> {
        if self.is_srq() {
            return Err(Errno::INVAL);
        }
        let places = &self.places.recv;
        places.take(self.cap.max_recv_wr, || self.post_counted_receive(wr))
    }

    #[inline]
    fn post_counted_receive(&self, wr: &RecvWr) -> Result<(), Errno> {
        let native = match self.receiver() {
            Ok(native) => native,
            Err(errno) => return self.post_other_receive(wr, errno),
        };
        let wrs = std::slice::from_ref(wr);
        let Some(faults) = &self.faults else {
            return native.post_recv(wrs).map_err(refused);
        };
        let end = faults.before_recv();
        end.carry_out(native);
        native.post_recv(wrs).map_err(refused)
    }

    #[cold]
    fn post_other_receive(&self, wr: &RecvWr, errno: Errno) -> Result<(), Errno> {
        match (&self.ud, &self.roce) {
            _ if self.state.load(Ordering::Relaxed) == IBV_QPS_RESET => Err(errno),
            (Some(ud), _) => ud.post_recv(wr),
            (_, Some(roce)) => {
                if let Some(faults) = &self.faults {
                    faults.before_recv().carry_out_on(&*roce.native()?);
                }
                roce.post_recv(wr)
            }
            _ => {
                let end = self.faults.as_ref().map(|faults| faults.before_recv());
                let mut kept = lock(&self.kept);
                kept.as_mut().ok_or(errno)?.push((wr.clone(), end));
                Ok(())
            }
        }
    }

    #[inline]
    fn post_sound(&self, wr: &mut SendWr) -> Result<(), Errno> {
        let Some(native) = self.native.as_ref() else {
            return self.post_roce(wr);
        };
        match self.state.load(Ordering::Relaxed) {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => native.post_send_from(wr).map_err(refused),
            IBV_QPS_SQD => self.post_later(native, wr),
            _ => Err(Errno::INVAL),
        }
    }

    #[cold]
    fn post_roce(&self, wr: &SendWr) -> Result<(), Errno> {
        let roce = self.roce.as_ref().ok_or(Errno::INVAL)?;
        let state = self.state.load(Ordering::Relaxed);
        if state != IBV_QPS_SQD {
            return roce.post(state, wr);
        }
        // The send queue may be resuming at this moment.
        let _resting = lock(&self.resting);
        roce.post(self.state.load(Ordering::Relaxed), wr)
    }

    #[cold]
    fn post_later(&self, native: &Qp, wr: &mut SendWr) -> Result<(), Errno> {
        let mut resting = lock(&self.resting);
        if self.state.load(Ordering::Relaxed) != IBV_QPS_SQD {
            drop(resting);
            return native.post_send_from(wr).map_err(refused);
        }
        // Later no caller gets the error.
        native.check_send(wr).map_err(refused)?;
        resting.push(wr.clone());
        Ok(())
    }

    /// Posts sends, in order; returns how many were accepted before the refused one.
    pub(crate) fn post(&self, wrs: &[SendWr]) -> Result<(), (usize, Errno)> {
        for (at, wr) in wrs.iter().enumerate() {
            self.post_one(&mut wr.clone())
                .map_err(|errno| (at, errno))?;
        }
        Ok(())
    }

    /// The native queue pair makes no more completions: the unpolled ones are discarded.
    pub(super) fn forget_posted(&self) {
        cq::clean(self.queues, self.num);
        lock(&self.kept).take();
        self.counted_in_silence();
        self.places.clear();
    }

    /// The native queue pair, for receives.
    #[inline]
    fn receiver(&self) -> Result<&Qp, Errno> {
        if self.state.load(Ordering::Relaxed) == IBV_QPS_RESET && self.is_persona() {
            return Err(Errno::INVAL);
        }
        self.native.as_deref().ok_or(Errno::INVAL)
    }

    /// The send queue resumes.
    pub(super) fn resume(&self, native: &Qp) {
        let mut resting = lock(&self.resting);
        for wr in resting.drain(..) {
            // There is room: the waiting sends were counted. A queue pair that has failed meanwhile flushes them.
            if native.post_send_one(wr).is_err() {
                self.places.send.give_back(1);
            }
        }
        self.set_state(IBV_QPS_RTS);
    }
}

/// Ends a native queue pair: its number is free and it makes no more completions when the threads that are joining it have released it too.
pub(super) fn end(mut native: Option<Arc<Qp>>) {
    while let Some(held) = native {
        native = match Arc::try_unwrap(held) {
            Ok(last) => {
                last.destroy();
                None
            }
            Err(held) => {
                std::thread::yield_now();
                Some(held)
            }
        };
    }
}

/// Ends a queue pair whose events are no longer delivered.
pub(super) fn destroy(qp: Turn<QpObj>) {
    if qp.is_persona() {
        persona::reset(qp.num);
    }
    QpFaults::forget(qp.num());
    port::of(qp.ctx.which).remove(qp.num);
    let mut gone = qp.retire();
    end(gone.native.take());
    gone.ud = None;
    if let Some(roce) = &mut gone.roce {
        roce.end();
    }
    gone.forget_posted();
}

/// `ibv_qp_to_qp_ex`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    match find::<QpObj>(qp) {
        Ok(qp) if qp.extended => qp.c(),
        _ => std::ptr::null_mut(),
    }
}

/// `ibv_query_qp_data_in_order`: the order in which the bytes of one message appear is not guaranteed.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// `ibv_set_ece`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    unsupported()
}

/// `ibv_query_ece`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    unsupported()
}
