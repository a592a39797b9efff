//! Posting sends: the checks, the inbox and the doorbell.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::convert::to_proto;
use super::receives::name_srq;
use super::{Core, QpInner, Slot};
use crate::lock::lock;
use crate::types::{PostError, PostReason, QpState, SendWr};

/// Posts that may wait for the next poll, see [`Qp::post_send`](super::Qp::post_send).
const DEFER_MAX: u32 = 64;
/// Requests with more payload than this are never put off.
const DEFER_BYTES: u32 = 4096;

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

impl QpInner {
    pub(super) fn post_send(
        self: &Arc<Self>,
        first: usize,
        wrs: impl Iterator<Item = SendWr>,
    ) -> Result<(), PostError> {
        let mut refused = None;
        let mut count = 0;
        let mut bytes = 0u32;
        {
            let mut inbox = lock(&self.posting.inbox);
            // Under the lock, so that a closing connection that finds the inbox empty has seen the last of it.
            let takes = match self.state() {
                QpState::Rts | QpState::Error => true,
                QpState::Init => self.life.is_expected(),
                QpState::Closing => false,
            };
            if !takes {
                return Err(PostError {
                    index: first,
                    reason: PostReason::State,
                });
            }
            for (index, wr) in (first..).zip(wrs) {
                match self.check_post(&wr) {
                    Ok(len) => {
                        bytes = bytes.saturating_add(len);
                        self.posting.sq_used.fetch_add(1, Ordering::Relaxed);
                        inbox.push_back(wr);
                        self.posting.has_inbox.store(true, Ordering::Release);
                        count += 1;
                    }
                    Err(reason) => {
                        refused = Some(PostError { index, reason });
                        break;
                    }
                }
            }
        }
        if count > 0 {
            self.ring(count, bytes);
        }
        match refused {
            Some(error) => Err(error),
            None => Ok(()),
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
    pub(super) fn ring(self: &Arc<Self>, count: u32, bytes: u32) {
        // An owner that finds something at each poll never reaches `drive_polled`.
        let taken = self.taken();
        if self.posting.seen_taken.load(Ordering::Relaxed) != taken {
            self.posting.seen_taken.store(taken, Ordering::Relaxed);
            self.wake.take_deferred();
        }
        let seen = self.wake.defer(count);
        let before = seen.posts();
        // A thread must be sure to drive later: a polling thread, or the engine's tick. A sleeping owner counts for neither.
        if before > 0
            && before % DEFER_MAX + count < DEFER_MAX
            && bytes / count <= DEFER_BYTES
            && !seen.has_sleepers()
            && self.state() == QpState::Rts
            && (!seen.is_armed() || self.posts_in_a_row(before))
        {
            self.send_cq.deferred.store(true, Ordering::Relaxed);
            self.recv_cq.deferred.store(true, Ordering::Relaxed);
            self.engine().hurry();
            return;
        }
        self.drive(false);
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
        let mut wanted = false;
        let mut told = false;
        for wr in inbox.drain(..) {
            wanted |= wr.signaled
                || self
                    .tally
                    .as_ref()
                    .is_some_and(|tally| tally.counts_op(&wr.op));
            told |= wr.op.is_two_sided();
            name_srq(stream, named_srq, &wr);
            let slot = Slot {
                wr,
                internal: false,
                fault: None,
            };
            stream.post_with(to_proto(&slot.wr), slot);
        }
        self.posting.has_inbox.store(false, Ordering::Relaxed);
        if inbox.capacity() > 1024 {
            inbox.shrink_to(64);
        }
        drop(inbox);
        if core.confirming.is_some() {
            // Those that make no completion take room in the queue until they are known to be done.
            let used = self.posting.sq_used.load(Ordering::Relaxed);
            let short_of_room = used >= self.limits.max_send_wr / 2;
            core.want_confirmation(wanted || self.limits.sq_sig_all || short_of_room, told);
        }
    }
}
