//! The source of a queue pair's receives.

use std::sync::{Arc, Weak};

use super::QpInner;
use crate::srq::{RecvQueue, SrqInner};
use crate::types::{QpState, RecvWr, Wc, WcOpcode, WcStatus};
use crate::xrc::XrcTarget;

pub(crate) enum RecvSource {
    Own(RecvQueue),
    Shared(Arc<SrqInner>),
    /// Of the queue pair whose other end this is, see [`Qp::twin`](super::Qp::twin).
    Twin(Weak<QpInner>),
    /// Those that messages name.
    Xrc(XrcTarget),
}

impl QpInner {
    pub(super) fn take_recv(&self) -> Option<RecvWr> {
        match &self.recv {
            RecvSource::Own(queue) => queue.take(),
            RecvSource::Shared(srq) => srq.take(),
            RecvSource::Twin(first) => first.upgrade()?.take_recv(),
            RecvSource::Xrc(target) => target.current()?.take(),
        }
    }

    /// Returns a receive that was taken, and not used. Its waiters are notified once the lock is released: [`QpInner::recv_was_put_back`].
    pub(super) fn put_back_recv(&self, wr: RecvWr) {
        match &self.recv {
            RecvSource::Own(queue) => queue.put_back(wr),
            RecvSource::Shared(srq) => srq.put_back(wr),
            RecvSource::Xrc(target) => {
                if let Some(srq) = target.current() {
                    srq.put_back(wr);
                }
            }
            RecvSource::Twin(first) => {
                if let Some(first) = first.upgrade() {
                    first.put_back_recv(wr);
                }
            }
        }
    }

    /// A receive was put back, and the lock is released: other queue pairs may use it.
    #[cold]
    pub(super) fn recv_was_put_back(&self) {
        match &self.recv {
            RecvSource::Own(_) => {}
            RecvSource::Shared(srq) => srq.feed(),
            RecvSource::Xrc(target) => {
                if let Some(srq) = target.current() {
                    srq.feed();
                }
            }
            RecvSource::Twin(first) => {
                // It may have been flushed without this one.
                if let Some(first) = first.upgrade()
                    && first.state() == QpState::Error
                {
                    first.with_core(|core| {
                        first.flush_recvs(core);
                        first.deliver(core);
                    });
                }
            }
        }
    }

    /// The completion of a receive that failed.
    pub(super) fn recv_wc(&self, wr_id: u64, status: WcStatus, vendor_err: u32) -> Wc {
        self.note(WcOpcode::Recv, status, 0);
        Wc {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qp_num: self.num,
            vendor_err,
            wqes_retired: 1,
            ..Wc::default()
        }
    }
}
