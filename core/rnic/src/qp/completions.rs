//! Completions: finished requests become work completions, which go to the completion queues in batches.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use weft_proto::rdmap::{DoneStatus, Fault};

use super::convert::{remote_status, term_code};
use super::end::EndReason;
use super::{Core, QpInner};
use crate::comp_counters::CompCounters;
use crate::cq::Poller;
use crate::lock::lock;
use crate::types::{Wc, WcOpcode, WcStatus};

/// Completions made under the lock, delivered in batches.
#[derive(Default)]
pub(super) struct Completions {
    pub(super) send: SmallVec<[Wc; 8]>,
    pub(super) recv: SmallVec<[Wc; 8]>,
    pub(super) send_urgent: bool,
    pub(super) recv_urgent: bool,
}

impl Completions {
    #[inline]
    fn is_empty(&self) -> bool {
        self.send.is_empty() && self.recv.is_empty()
    }
}

impl QpInner {
    /// Move finished sends to the completion batch.
    #[inline]
    pub(super) fn reap(&self, core: &mut Core) {
        if !core.nothing_posted() {
            self.reap_posted(core);
        }
    }

    fn reap_posted(&self, core: &mut Core) {
        let Core {
            stream: Some(stream),
            silent,
            done,
            ended,
            confirming,
            ..
        } = core
        else {
            return;
        };
        while let Some((finished, slot)) = stream.pop() {
            if slot.internal {
                if let Some(confirming) = confirming {
                    confirming.answered(slot.wr.op);
                }
                continue;
            }
            self.posting.sq_used.fetch_sub(1, Ordering::Relaxed);
            let mut vendor_err = 0;
            let (status, byte_len) = match finished.status {
                _ if slot.fault.is_some() => (slot.fault.unwrap_or_default(), 0),
                DoneStatus::Ok { byte_len } => (WcStatus::Success, byte_len),
                DoneStatus::RemoteError(error) => {
                    vendor_err = term_code(error);
                    (remote_status(&slot.wr.op, error), 0)
                }
                DoneStatus::Flushed => {
                    if let Some(EndReason::Terminated(code) | EndReason::PeerTerminated(code)) =
                        ended
                    {
                        vendor_err = *code;
                    }
                    (WcStatus::WrFlushErr, 0)
                }
            };
            self.note(slot.wr.op.opcode(), status, byte_len);
            let failed = status != WcStatus::Success;
            if failed || slot.wr.signaled || self.limits.sq_sig_all {
                done.send_urgent |= failed;
                done.send.push(Wc {
                    wr_id: slot.wr.id,
                    status,
                    opcode: slot.wr.op.opcode(),
                    byte_len,
                    qp_num: self.num,
                    vendor_err,
                    wqes_retired: 1 + std::mem::take(silent),
                    ..Wc::default()
                });
            } else {
                CompCounters::done_silently(
                    self.comp_counters.as_ref(),
                    slot.wr.op.opcode(),
                    silent,
                );
            }
        }
        stream.shrink(256);
    }

    /// Requests posted to a queue pair that failed before it was connected: `first` is the status of the first one.
    pub(super) fn flush_unconnected(
        self: &Arc<Self>,
        core: &mut Core,
        mut first: Option<WcStatus>,
    ) {
        self.posting.has_inbox.store(false, Ordering::Relaxed);
        for wr in lock(&self.posting.inbox).drain(..) {
            self.posting.sq_used.fetch_sub(1, Ordering::Relaxed);
            let status = first.take().unwrap_or(WcStatus::WrFlushErr);
            self.note(wr.op.opcode(), status, 0);
            core.done.send_urgent = true;
            core.done.send.push(Wc {
                wr_id: wr.id,
                status,
                opcode: wr.op.opcode(),
                qp_num: self.num,
                wqes_retired: 1,
                ..Wc::default()
            });
        }
        self.deliver(core);
    }

    /// Counts completed work, if the program has attached a counter.
    #[inline]
    pub(super) fn note(&self, opcode: WcOpcode, status: WcStatus, len: u32) {
        if let Some(comp_counters) = &self.comp_counters
            && !self.life.is_orphan()
        {
            comp_counters.note(opcode, status, len);
        }
    }

    /// Passes completions to the polling thread that drives, as far as they belong to that queue.
    #[inline]
    pub(super) fn hand_over(&self, core: &mut Core, poller: &mut Poller<'_>) {
        if core.withheld.is_none() && !self.life.is_orphan() {
            let done = &mut core.done;
            poller.take(&self.send_cq, &mut done.send);
            let _ = self.with_recv_cq(|cq| poller.take(cq, &mut done.recv));
        }
    }

    #[inline]
    pub(super) fn deliver(self: &Arc<Self>, core: &mut Core) {
        if !core.done.is_empty() {
            self.deliver_some(core);
        }
    }

    fn deliver_some(self: &Arc<Self>, core: &mut Core) {
        if core.withheld.is_some() {
            return;
        }
        let done = &mut core.done;
        if self.life.is_orphan() {
            *done = Completions::default();
            return;
        }
        let mut fits = true;
        if !done.send.is_empty() {
            fits &= self.send_cq.push(&done.send, done.send_urgent);
            done.send.clear();
            done.send_urgent = false;
        }
        if !done.recv.is_empty() {
            // Completions for a dropped queue of an XRC domain are discarded.
            fits &= self
                .with_recv_cq(|cq| cq.push(&done.recv, done.recv_urgent))
                .unwrap_or(true);
            done.recv.clear();
            done.recv_urgent = false;
        }
        if !fits && core.ended.is_none() {
            self.fault(core, Fault::LocalCatastrophic);
        }
    }
}
