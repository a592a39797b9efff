//! Posting sends: the checks, the inbox and the doorbell.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::QpInner;
use crate::lock::lock;
use crate::types::{PostError, PostReason, QpState, SendOp, SendWr};

/// Posts that may wait for the next poll, see [`Qp::post_send`](super::Qp::post_send).
const DEFER_MAX: u32 = 64;
/// Requests with more payload than this are never put off.
const DEFER_BYTES: u32 = 4096;

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
            let mut inbox = lock(&self.inbox);
            // Under the lock, so that a closing connection that finds the inbox empty has seen the last of it.
            let takes = match self.state() {
                QpState::Rts | QpState::Error => true,
                QpState::Init => self.expected.load(Ordering::Relaxed),
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
                        self.sq_used.fetch_add(1, Ordering::Relaxed);
                        inbox.push_back(wr);
                        self.has_inbox.store(true, Ordering::Release);
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
        if self.sq_used.load(Ordering::Relaxed) >= self.max_send_wr {
            return Err(PostReason::Full);
        }
        self.check_request(wr)
    }

    /// As [`QpInner::check_post`], independent of other posted requests.
    pub(super) fn check_request(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges {
                asked: wr.sges.len() as u32,
                max: self.max_sge,
            });
        }
        let len = wr.len().ok_or(PostReason::Length)?;
        if wr.inline.is_some() {
            let fits = matches!(
                wr.op,
                SendOp::Send
                    | SendOp::SendInvalidate { .. }
                    | SendOp::SendImm { .. }
                    | SendOp::Write { .. }
                    | SendOp::WriteImm { .. }
            ) && wr.sges.is_empty();
            if !fits {
                return Err(PostReason::Inline);
            }
            if len > self.max_inline {
                return Err(PostReason::InlineTooLong {
                    asked: len,
                    max: self.max_inline,
                });
            }
        }
        if wr.op.is_atomic() && len != 8 {
            return Err(PostReason::Length);
        }
        if wr.op.is_sink() && self.depths.get().is_some_and(|(_, ord)| *ord == 0) {
            return Err(PostReason::NoReads);
        }
        Ok(len)
    }

    /// The doorbell. While a polling thread holds the lease, only the first post after its poll is sent at once; later ones wait for the
    /// next poll, the 64th post, or the engine's tick, whichever comes first.
    pub(super) fn ring(self: &Arc<Self>, count: u32, bytes: u32) {
        // An owner that finds something at each poll never reaches `drive_polled`.
        let taken = self.taken();
        if self.seen_taken.load(Ordering::Relaxed) != taken {
            self.seen_taken.store(taken, Ordering::Relaxed);
            self.deferred.store(0, Ordering::SeqCst);
        }
        let before = self.deferred.fetch_add(count, Ordering::SeqCst);
        // A thread must be sure to drive later: a polling thread, or the engine's tick. A sleeping owner counts for neither.
        if before > 0
            && before % DEFER_MAX + count < DEFER_MAX
            && bytes / count <= DEFER_BYTES
            && self.waiters.load(Ordering::SeqCst) == 0
            && self.state() == QpState::Rts
            && (!self.armed.load(Ordering::SeqCst) || self.posts_in_a_row(before))
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
}
