//! Receive queues: a queue pair's own, or one shared by many.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use weft_lock::ShortLock;

use crate::cq::CqInner;
use crate::device::{Counted, DeviceInner, Pd, PdInner};
use crate::lock::lock;
use crate::timer;
use crate::types::{AsyncEvent, Error, LimitReached, PostError, PostReason, RecvWr, sg_len};

/// Posted receives, oldest first.
pub(crate) struct RecvQueue {
    posted: ShortLock<Posted>,
    max_sge: u32,
}

struct Posted {
    queue: VecDeque<RecvWr>,
    max_wr: u32,
}

impl RecvQueue {
    pub(crate) fn new(max_wr: u32, max_sge: u32) -> Self {
        RecvQueue {
            posted: ShortLock::new(Posted {
                queue: VecDeque::new(),
                max_wr,
            }),
            max_sge,
        }
    }

    pub(crate) fn post(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let Posted { queue, max_wr } = &mut *self.posted.lock();
        for (index, wr) in wrs.iter().enumerate() {
            let refuse = |reason| Err(PostError { index, reason });
            if queue.len() >= *max_wr as usize {
                return refuse(PostReason::Full);
            }
            if wr.sges.len() > self.max_sge as usize {
                return refuse(PostReason::TooManySges {
                    asked: wr.sges.len() as u32,
                    max: self.max_sge,
                });
            }
            if sg_len(&wr.sges).is_none() {
                return refuse(PostReason::Length);
            }
            queue.push_back(wr.clone());
        }
        Ok(())
    }

    /// The oldest receive.
    pub(crate) fn take(&self) -> Option<RecvWr> {
        self.posted.lock().queue.pop_front()
    }

    /// As [`RecvQueue::take`], of one that is found to suit, and how many are left; another one stays the oldest.
    pub(crate) fn take_if(
        &self,
        suits: impl FnOnce(&RecvWr) -> bool,
    ) -> Result<(RecvWr, usize), Lack> {
        let queue = &mut self.posted.lock().queue;
        match queue.pop_front() {
            None => Err(Lack::Empty),
            Some(wr) if suits(&wr) => Ok((wr, queue.len())),
            Some(wr) => {
                queue.push_front(wr);
                Err(Lack::Unsuited)
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.posted.lock().queue.is_empty()
    }

    /// This one was taken, and not used.
    pub(crate) fn put_back(&self, wr: RecvWr) {
        self.posted.lock().queue.push_front(wr);
    }

    pub(crate) fn drain(&self) -> VecDeque<RecvWr> {
        std::mem::take(&mut self.posted.lock().queue)
    }
}

/// Why a receive queue gives no receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    Empty,
    /// The oldest one does not suit.
    Unsuited,
}

/// A queue pair that takes its receives from a shared receive queue.
pub(crate) trait SrqConsumer: Send + Sync {
    /// There may be a receive for the message that waits for one.
    fn feed(self: Arc<Self>);
}

pub(crate) struct SrqInner {
    num: u32,
    /// The domain of the memory that its receives name.
    pub(crate) pd: Arc<PdInner>,
    /// Of an XRC domain's queue: where its receives complete.
    pub(crate) cq: Option<Arc<CqInner>>,
    queue: RecvQueue,
    limit: AtomicU32,
    /// Queue pairs that have a message and no receive for it, see [`crate::Rnr::Wait`], and whether there are any.
    hungry: Mutex<VecDeque<Weak<dyn SrqConsumer>>>,
    has_hungry: AtomicBool,
    _count: Counted,
}

impl SrqInner {
    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    /// Returns a receive that was taken, and not used; call [`SrqInner::feed`] afterwards without a lock.
    pub(crate) fn put_back(&self, wr: RecvWr) {
        self.queue.put_back(wr);
    }

    /// Registers a queue pair to be notified of a receive. It checks once more after this call.
    pub(crate) fn await_recv(&self, qp: Weak<dyn SrqConsumer>) {
        let mut hungry = lock(&self.hungry);
        hungry.push_back(qp);
        self.has_hungry.store(true, Ordering::SeqCst);
    }

    /// Removes a queue pair.
    pub(crate) fn forget(&self, qp: &dyn SrqConsumer) {
        if self.has_hungry.load(Ordering::SeqCst) {
            let mut hungry = lock(&self.hungry);
            hungry.retain(|other| !std::ptr::addr_eq(other.as_ptr(), qp));
            self.has_hungry.store(!hungry.is_empty(), Ordering::SeqCst);
        }
    }

    /// Receives were posted: notifies waiting queue pairs, as long as receives are left.
    pub(crate) fn feed(&self) {
        while self.has_hungry.load(Ordering::SeqCst) && !self.queue.is_empty() {
            let first = {
                let mut hungry = lock(&self.hungry);
                let first = hungry.pop_front();
                self.has_hungry.store(!hungry.is_empty(), Ordering::SeqCst);
                first
            };
            if let Some(qp) = first.and_then(|qp| qp.upgrade()) {
                qp.feed();
            }
        }
    }

    pub(crate) fn take(&self) -> Option<RecvWr> {
        self.take_if(|_| true).ok()
    }

    /// As [`RecvQueue::take_if`].
    pub(crate) fn take_if(&self, suits: impl FnOnce(&RecvWr) -> bool) -> Result<RecvWr, Lack> {
        let (wr, left) = self.queue.take_if(suits)?;
        let limit = self.limit.load(Ordering::Relaxed);
        if limit > 0 && (left as u32) < limit && self.limit.swap(0, Ordering::Relaxed) > 0 {
            self.pd
                .device
                .raise(AsyncEvent::SrqLimitReached { srq_num: self.num });
        }
        Ok(wr)
    }
}

impl Drop for SrqInner {
    /// Target queue pairs of an XRC domain do not hold the queue, and may wait for a receive of it. The engine's thread notifies them, because this
    /// can run under a connection's lock.
    fn drop(&mut self) {
        let mut hungry = std::mem::take(&mut *lock(&self.hungry));
        if !hungry.is_empty() {
            timer::after(&self.pd.device.engine, Duration::ZERO, move || {
                for qp in hungry.drain(..).filter_map(|qp| qp.upgrade()) {
                    qp.feed();
                }
                None
            });
        }
    }
}

/// A shared receive queue: the queue pairs created with it take their receives from here, first come, first served. Receives name memory of
/// the queue's protection domain, independent of the queue pair's.
#[derive(Clone)]
pub struct Srq(pub(crate) Arc<SrqInner>);

fn check_srq_depth(max_wr: u32, device: &DeviceInner) -> Result<(), Error> {
    let what = "receives of a shared receive queue";
    LimitReached::check(what, "max_wr", max_wr, device.limits.max_wr)
}

impl Pd {
    /// A shared receive queue for `max_wr` requests of up to `max_sge` elements.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq, Error> {
        self.create_srq_for(None, max_wr, max_sge)
    }

    pub(crate) fn create_srq_for(
        &self,
        cq: Option<Arc<CqInner>>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Srq, Error> {
        let device = &self.0.device;
        check_srq_depth(max_wr, device)?;
        LimitReached::check(
            "scatter/gather elements of a receive",
            "max_sge",
            max_sge,
            device.limits.max_sge,
        )?;
        let count = Counted::take(
            &device.srqs,
            device.limits.max_srq,
            "shared receive queues",
            "max_srq",
        )?;
        Ok(Srq(Arc::new(SrqInner {
            num: device.id(),
            pd: Arc::clone(&self.0),
            cq,
            queue: RecvQueue::new(max_wr, max_sge),
            limit: AtomicU32::new(0),
            hungry: Mutex::default(),
            has_hungry: AtomicBool::new(false),
            _count: count,
        })))
    }
}

impl Srq {
    /// The queue's number, as in [`AsyncEvent::SrqLimitReached`].
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Post receives.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let result = self.0.queue.post(wrs);
        self.0.feed();
        result
    }

    /// Post one receive, see [`Srq::post_recv`].
    ///
    /// # Errors
    /// As there, index 0.
    pub fn post_recv_one(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv(&[wr])
    }

    /// Change how many requests it takes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when more are posted than that, [`Error::Limit`].
    pub fn resize(&self, max_wr: u32) -> Result<(), Error> {
        check_srq_depth(max_wr, &self.0.pd.device)?;
        let mut posted = self.0.queue.posted.lock();
        if posted.queue.len() > max_wr as usize {
            return Err(Error::Invalid(
                "more receives are posted than the shared receive queue would take",
            ));
        }
        posted.max_wr = max_wr;
        Ok(())
    }

    /// Requests that it takes.
    pub fn max_wr(&self) -> u32 {
        self.0.queue.posted.lock().max_wr
    }

    /// Elements of one request.
    pub fn max_sge(&self) -> u32 {
        self.0.queue.max_sge
    }

    /// The armed limit; 0 when none is, or it was reached.
    pub fn limit(&self) -> u32 {
        self.0.limit.load(Ordering::Relaxed)
    }

    /// Raise [`AsyncEvent::SrqLimitReached`] once when fewer than `limit` receives are left; 0 disarms.
    pub fn arm_limit(&self, limit: u32) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Device, QpInit};

    #[test]
    fn queue_pairs_that_have_gone_are_not_waited_for() {
        let device = Device::open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1, None).unwrap();
        let srq = pd.create_srq(1, 1).unwrap();
        let init = QpInit {
            srq: Some(srq.clone()),
            ..QpInit::new(&cq, &cq)
        };
        let (one, other) = (pd.create_qp(&init).unwrap(), pd.create_qp(&init).unwrap());
        for qp in [&one, &other, &one] {
            let taker = Arc::downgrade(&qp.0);
            srq.0.await_recv(taker);
        }
        drop(one);
        assert_eq!(lock(&srq.0.hungry).len(), 1);
        drop(other);
        assert!(lock(&srq.0.hungry).is_empty() && !srq.0.has_hungry.load(Ordering::SeqCst));
    }
}
