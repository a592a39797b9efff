//! Posting sends: the checks, the inbox and the doorbell.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::convert::to_proto;
use super::receives::name_srq;
use super::{Core, QpInner, Slot, Stream};
use crate::comp_counters::CompCounters;
use crate::lock::lock;
use crate::types::{PostError, PostReason, QpState, SendWr};

/// Posts that may wait for the next poll, see [`Qp::post_send`](super::Qp::post_send).
const DEFER_MAX: u32 = 64;
/// Requests with more payload than this are never put off.
const DEFER_BYTES: u32 = 4096;

/// Whether so many requests with so many bytes in all may wait for the next poll, which `before` posts have preceded since the last one: the first is sent
/// at once, the 64th ends the wait, and long ones do not wait.
pub(crate) fn may_be_put_off(before: u32, count: u32, bytes: u32) -> bool {
    before > 0 && before % DEFER_MAX + count < DEFER_MAX && bytes / count <= DEFER_BYTES
}

/// What threads that post have left: requests for the holder of the lock, and counts.
#[derive(Default)]
pub(super) struct Posting {
    /// Requests that are posted and not complete.
    pub(super) sq_used: AtomicU32,
    pub(super) inbox: Mutex<VecDeque<SendWr>>,
    /// Something is in the inbox. Set under its lock.
    pub(super) has_inbox: AtomicBool,
    /// The value of [`QpInner::taken`] at the last post, and at the last small Write to a sleeping peer.
    pub(super) seen_taken: AtomicU32,
    pub(super) alone_since: AtomicU32,
}

/// Whether the program waits for some of the requests that were posted, and whether the peer's program sees some.
#[derive(Clone, Copy, Default)]
struct Wishes {
    wanted: bool,
    told: bool,
}

enum Sent {
    Now,
    Later,
}

/// What one call has posted.
#[derive(Default)]
struct Batch {
    count: u32,
    bytes: u32,
    refused: Option<PostReason>,
}

impl QpInner {
    /// A thread that gets the lock enters its requests in the send queue itself. Otherwise they go into the inbox, and the holder takes them.
    pub(super) fn post_send(
        self: &Arc<Self>,
        first: usize,
        mut wrs: impl Iterator<Item = SendWr>,
    ) -> Result<(), PostError> {
        let mut batch = Batch::default();
        let entered = self.core.try_lock().and_then(|core| {
            let entered = self.hold(core, |core| self.post_to(core, &mut wrs, &mut batch));
            if self.wake.seen().is_left() {
                self.drive(true);
            }
            entered
        });
        match entered {
            Some(Sent::Now) => {}
            Some(Sent::Later) => self.put_off(),
            None => {
                self.post_to_inbox(&mut wrs, &mut batch);
                if batch.count > 0 && self.may_wait(&batch) {
                    self.put_off();
                } else if batch.count > 0 {
                    self.drive(false);
                }
            }
        }
        match batch.refused {
            Some(reason) => Err(PostError {
                index: first + batch.count as usize,
                reason,
            }),
            None => Ok(()),
        }
    }

    /// `None`, and nothing was done, unless the connection is there and moves.
    fn post_to(
        self: &Arc<Self>,
        core: &mut Core,
        wrs: &mut impl Iterator<Item = SendWr>,
        batch: &mut Batch,
    ) -> Option<Sent> {
        if !self.life.is_open() || core.ended.is_some() {
            return None;
        }
        // Those that were posted before.
        self.take_inbox(core);
        let mut wishes = Wishes::default();
        {
            let Core {
                stream: Some(stream),
                named_srq,
                ..
            } = core
            else {
                return None;
            };
            self.check_each(wrs, batch, |wr| {
                self.enter(stream, named_srq, wr, &mut wishes);
            });
        }
        self.want_confirmation(core, wishes);
        if batch.count > 0 && !self.may_wait(batch) {
            self.progress(core, false, None);
            return Some(Sent::Now);
        }
        Some(if batch.count > 0 {
            Sent::Later
        } else {
            Sent::Now
        })
    }

    fn post_to_inbox(&self, wrs: &mut impl Iterator<Item = SendWr>, batch: &mut Batch) {
        let mut inbox = lock(&self.posting.inbox);
        // Under the lock, so that a closing connection that finds the inbox empty has seen the last of it.
        let takes = match self.state() {
            QpState::Rts | QpState::Error => true,
            QpState::Init => self.life.is_expected(),
            QpState::Closing => false,
        };
        if !takes {
            batch.refused = Some(PostReason::State);
            return;
        }
        self.check_each(wrs, batch, |wr| {
            inbox.push_back(wr);
            self.posting.has_inbox.store(true, Ordering::Release);
        });
    }

    /// Checks requests, and counts those that may be posted, up to the first that may not.
    fn check_each(
        &self,
        wrs: &mut impl Iterator<Item = SendWr>,
        batch: &mut Batch,
        mut post: impl FnMut(SendWr),
    ) {
        for wr in wrs {
            match self.check_post(&wr) {
                Ok(len) => {
                    batch.bytes = batch.bytes.saturating_add(len);
                    batch.count += 1;
                    self.posting.sq_used.fetch_add(1, Ordering::Relaxed);
                    post(wr);
                }
                Err(reason) => {
                    batch.refused = Some(reason);
                    break;
                }
            }
        }
    }

    pub(super) fn check_post(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if self.posting.sq_used.load(Ordering::Relaxed) >= self.limits.max_send_wr {
            return Err(PostReason::Full);
        }
        self.check_request(wr)
    }

    /// As [`QpInner::check_post`], independent of other posted requests.
    #[inline]
    pub(super) fn check_request(&self, wr: &SendWr) -> Result<u32, PostReason> {
        let len = self.limits.check(wr)?;
        if wr.op.is_sink() && self.peer.refuses_reads() {
            return Err(PostReason::NoReads);
        }
        Ok(len)
    }

    /// The doorbell. While a polling thread holds the lease, only the first post after its poll is sent at once; later ones wait for the
    /// next poll, the 64th post, or the engine's tick, whichever comes first.
    fn may_wait(self: &Arc<Self>, batch: &Batch) -> bool {
        // An owner that finds something at each poll never reaches `drive_polled`.
        let taken = self.taken();
        if self.posting.seen_taken.load(Ordering::Relaxed) != taken {
            self.posting.seen_taken.store(taken, Ordering::Relaxed);
            self.wake.take_deferred();
        }
        let seen = self.wake.defer(batch.count);
        let before = seen.posts();
        // A thread must be sure to drive later: a polling thread, or the engine's tick. A sleeping owner counts for neither.
        may_be_put_off(before, batch.count, batch.bytes)
            && !seen.has_sleepers()
            && self.state() == QpState::Rts
            && (!seen.is_armed() || self.posts_in_a_row(before))
    }

    /// Requests wait for the next poll, or the engine's tick.
    fn put_off(&self) {
        self.send_cq.deferred.store(true, Ordering::Relaxed);
        self.recv_cq.deferred.store(true, Ordering::Relaxed);
        self.engine().hurry();
    }

    /// Changes with each poll that takes completions.
    pub(super) fn taken(&self) -> u32 {
        let (send, recv) = (&self.send_cq.taken, &self.recv_cq.taken);
        send.load(Ordering::Relaxed)
            .wrapping_add(recv.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn take_inbox(&self, core: &mut Core) {
        // The posting thread drives after its post, or leaves that to us; we check once more then.
        if !self.posting.has_inbox.load(Ordering::Acquire) {
            return;
        }
        let mut inbox = lock(&self.posting.inbox);
        let Core {
            stream: Some(stream),
            named_srq,
            ..
        } = core
        else {
            return;
        };
        let mut wishes = Wishes::default();
        for wr in inbox.drain(..) {
            self.enter(stream, named_srq, wr, &mut wishes);
        }
        self.posting.has_inbox.store(false, Ordering::Relaxed);
        if inbox.capacity() > 1024 {
            inbox.shrink_to(64);
        }
        drop(inbox);
        self.want_confirmation(core, wishes);
        core.confirm_if_due();
    }

    /// Enters a request in the send queue.
    #[inline]
    fn enter(
        &self,
        stream: &mut Stream,
        named_srq: &mut Option<u32>,
        wr: SendWr,
        wishes: &mut Wishes,
    ) {
        let counts = |comp_counters: &Arc<CompCounters>| comp_counters.counts_op(&wr.op);
        wishes.wanted |= wr.signaled || self.comp_counters.as_ref().is_some_and(counts);
        wishes.told |= wr.op.is_two_sided();
        name_srq(stream, named_srq, &wr);
        let slot = Slot {
            wr,
            internal: false,
            fault: None,
        };
        stream.post_with(to_proto(&slot.wr), slot);
    }

    /// Requests were entered in the send queue.
    #[inline]
    fn want_confirmation(&self, core: &mut Core, wishes: Wishes) {
        if core.confirming.is_some() {
            // Those that make no completion take room in the queue until they are known to be done.
            let used = self.posting.sq_used.load(Ordering::Relaxed);
            let short_of_room = used >= self.limits.max_send_wr / 2;
            let wanted = wishes.wanted || self.limits.sq_sig_all || short_of_room;
            core.want_confirmation(wanted, wishes.told);
        }
    }
}
