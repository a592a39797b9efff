//! Receive queues: a queue pair's own, or one shared by many.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::device::{Counted, DeviceInner};
use crate::lock::lock;
use crate::types::{AsyncEvent, PostError, PostReason, RecvWr, sg_len};

/// Posted receives, oldest first.
pub(crate) struct RecvQueue {
    queue: Mutex<VecDeque<RecvWr>>,
    max_wr: u32,
    max_sge: u32,
}

impl RecvQueue {
    pub(crate) fn new(max_wr: u32, max_sge: u32) -> Self {
        RecvQueue {
            queue: Mutex::new(VecDeque::new()),
            max_wr,
            max_sge,
        }
    }

    pub(crate) fn post(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let mut queue = lock(&self.queue);
        for (index, wr) in wrs.iter().enumerate() {
            let refuse = |reason| Err(PostError { index, reason });
            if queue.len() >= self.max_wr as usize {
                return refuse(PostReason::Full);
            }
            if wr.sges.len() > self.max_sge as usize {
                return refuse(PostReason::TooManySges);
            }
            if sg_len(&wr.sges).is_none() {
                return refuse(PostReason::Length);
            }
            queue.push_back(wr.clone());
        }
        Ok(())
    }

    /// The oldest receive and how many are left after it.
    pub(crate) fn take(&self) -> Option<(RecvWr, usize)> {
        let mut queue = lock(&self.queue);
        let wr = queue.pop_front()?;
        Some((wr, queue.len()))
    }

    pub(crate) fn drain(&self) -> VecDeque<RecvWr> {
        std::mem::take(&mut *lock(&self.queue))
    }
}

pub(crate) struct SrqInner {
    num: u32,
    queue: RecvQueue,
    limit: AtomicU32,
    device: Arc<DeviceInner>,
    _count: Counted,
}

impl SrqInner {
    pub(crate) fn take(&self) -> Option<RecvWr> {
        let (wr, left) = self.queue.take()?;
        let limit = self.limit.load(Ordering::Relaxed);
        if limit > 0 && (left as u32) < limit && self.limit.swap(0, Ordering::Relaxed) > 0 {
            self.device
                .raise(AsyncEvent::SrqLimitReached { srq_num: self.num });
        }
        Some(wr)
    }
}

/// A shared receive queue: the queue pairs created with it take their receives from here, first come, first served.
#[derive(Clone)]
pub struct Srq(pub(crate) Arc<SrqInner>);

impl Srq {
    pub(crate) fn new(
        device: &Arc<DeviceInner>,
        num: u32,
        max_wr: u32,
        max_sge: u32,
        count: Counted,
    ) -> Self {
        Srq(Arc::new(SrqInner {
            num,
            queue: RecvQueue::new(max_wr, max_sge),
            limit: AtomicU32::new(0),
            device: Arc::clone(device),
            _count: count,
        }))
    }

    /// The queue's number, as in [`AsyncEvent::SrqLimitReached`].
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Post receives.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        self.0.queue.post(wrs)
    }

    /// Raise [`AsyncEvent::SrqLimitReached`] once when fewer than `limit` receives are left; 0 disarms.
    pub fn arm_limit(&self, limit: u32) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }
}
