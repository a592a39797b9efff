//! The source of a queue pair's receives, and the memory that belongs to them.

use std::sync::{Arc, Weak};

use weft_mem::{Access, MemError, PdId, Span};
use weft_proto::rdmap::{Fault, notice, noticed};

use super::convert::zero_write;
use super::{Core, QpInner, Slot, Stream, to_proto};
use crate::cq::{CqInner, Member};
use crate::lock::lock;
use crate::srq::{Lack, RecvQueue, Srq, SrqInner};
use crate::types::{QpState, RecvWr, SendOp, SendWr, Sge, Wc, WcOpcode, WcStatus, sg_len};
use crate::xrc::{NAMED, XrcTarget};

pub(crate) enum RecvSource {
    Own(RecvQueue),
    Shared(Arc<SrqInner>),
    /// Of the queue pair whose other end this is, see [`Qp::twin`](super::Qp::twin).
    Twin(Weak<QpInner>),
    /// Those that messages name.
    Xrc(XrcTarget),
}

impl RecvSource {
    /// The shared receive queue, or one of its own for so many receives of so many elements.
    pub(crate) fn of(srq: Option<&Srq>, max_wr: u32, max_sge: u32) -> Self {
        match srq {
            Some(srq) => RecvSource::Shared(Arc::clone(&srq.0)),
            None => RecvSource::Own(RecvQueue::new(max_wr, max_sge)),
        }
    }

    pub(crate) fn take(&self) -> Option<RecvWr> {
        match self {
            RecvSource::Own(queue) => queue.take(),
            RecvSource::Shared(srq) => srq.take(),
            RecvSource::Twin(first) => first.upgrade()?.take_recv(),
            RecvSource::Xrc(target) => target.current()?.take(),
        }
    }

    /// Takes the oldest receive for a datagram, if it has room for so many bytes.
    pub(crate) fn take_fitting(&self, len: u32) -> Result<RecvWr, Lack> {
        let fits = |wr: &RecvWr| sg_len(&wr.sges).is_some_and(|room| room >= len);
        match self {
            RecvSource::Own(queue) => queue.take_if(fits).map(|(wr, _)| wr),
            RecvSource::Shared(srq) => srq.take_if(fits),
            RecvSource::Twin(_) | RecvSource::Xrc(_) => Err(Lack::Empty),
        }
    }

    /// The domain of the memory that receives name, on a queue pair of the domain `own`.
    pub(crate) fn pd(&self, own: PdId) -> PdId {
        match self {
            RecvSource::Xrc(target) => target.current().map_or(own, |srq| srq.pd.id),
            RecvSource::Shared(srq) => srq.pd.id,
            RecvSource::Own(_) | RecvSource::Twin(_) => own,
        }
    }
}

impl QpInner {
    pub(super) fn take_recv(&self) -> Option<RecvWr> {
        self.recv.take()
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

/// The special rules of XRC queue pairs ([`crate::xrc`]).
impl QpInner {
    fn xrc(&self) -> Option<&XrcTarget> {
        match &self.recv {
            RecvSource::Xrc(target) => Some(target),
            _ => None,
        }
    }

    /// The domain of the memory that receives name.
    #[inline]
    pub(super) fn recv_pd(&self) -> PdId {
        self.recv.pd(self.pd.id)
    }

    /// The domain whose windows the peer may invalidate.
    pub(super) fn own_pd(&self) -> PdId {
        self.xrc().map_or(self.pd.id, |_| self.recv_pd())
    }

    /// Memory that the peer names.
    pub(super) fn reach(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        let table = &self.device.table;
        let Some(target) = self.xrc() else {
            return table.remote(self.pd.id, self.num, stag, to, len, need);
        };
        // The answer to a Read is fetched when a later message may have named another queue: any of them will do.
        let mut refused = MemError::Pd;
        for pd in target.domain.pds() {
            match table.remote(pd.id, self.num, stag, to, len, need) {
                Err(MemError::Pd) => {}
                Err(error) => refused = error,
                found => return found,
            }
        }
        Err(refused)
    }

    pub(super) fn local_span(&self, sge: Sge, need: Access) -> Result<Span, MemError> {
        self.device
            .table
            .local(self.pd.id, sge.lkey, sge.addr, sge.len, need)
    }

    pub(super) fn remote_span(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        if !self.peer.access().contains(need) {
            return Err(MemError::Access);
        }
        self.reach(stag, to, len, need)
    }

    /// Messages are for a queue that is not there.
    pub(super) fn lacks_srq(&self) -> bool {
        self.xrc().is_some_and(|target| target.current().is_none())
    }

    /// Why there is no receive for a message.
    pub(super) fn no_receive(&self) -> Fault {
        if self.lacks_srq() {
            // Of those that copy the header, so that the sender knows which message it was.
            Fault::ReceiveTooSmall
        } else {
            Fault::NoReceive
        }
    }

    /// The peer has sent an empty Write to this tagged offset: perhaps it names the queue of the messages that follow.
    pub(super) fn hear_srq(self: &Arc<Self>, core: &mut Core, to: u64) -> Result<(), Fault> {
        let (Some(target), Some(num)) = (self.xrc(), noticed(NAMED, to)) else {
            return Ok(());
        };
        if core.rx.recv.is_some() {
            return Err(Fault::UnexpectedOpcode);
        }
        // The completions so far belong to the previous queue.
        self.deliver(core);
        let Some(srq) = target.domain.find(num) else {
            // The message that follows is at fault, and the Terminate names that one.
            tracing::debug!(qp = self.num, srq = num, "no such queue in the XRC domain");
            target.choose_none();
            return Ok(());
        };
        target.choose(&srq);
        if let Some(cq) = &srq.cq {
            let mut cqs = lock(&target.cqs);
            if !cqs.iter().any(|known| Arc::ptr_eq(known, cq)) {
                cqs.push(Arc::clone(cq));
                cq.attach(Arc::downgrade(self) as Weak<dyn Member>);
            }
        }
        Ok(())
    }

    /// The queue that received messages complete in; `None`: it went with the shared receive queue that was named last.
    pub(super) fn with_recv_cq<R>(&self, f: impl FnOnce(&CqInner) -> R) -> Option<R> {
        let Some(target) = self.xrc() else {
            return Some(f(&self.recv_cq));
        };
        Some(f(target.current()?.cq.as_deref()?))
    }

    /// Further completion queues in which it may have completions.
    pub(super) fn other_cqs(&self) -> Vec<Arc<CqInner>> {
        self.xrc().map_or_else(Vec::new, XrcTarget::cqs)
    }

    /// The queue pair is destroyed.
    pub(super) fn leave_xrc(self: &Arc<Self>) {
        if let Some(target) = self.xrc() {
            if let Some(srq) = target.current() {
                srq.forget(&**self);
            }
            for cq in target.cqs() {
                cq.detach(&**self);
            }
        }
    }
}

/// Before a request that is for another queue than the one before it: name its queue.
pub(super) fn name_srq(stream: &mut Stream, named: &mut Option<u32>, wr: &SendWr) {
    let Some(srq) = wr.srq.filter(|srq| Some(*srq) != *named) else {
        return;
    };
    if !wr.op.is_two_sided() {
        return;
    }
    *named = Some(srq);
    let mut wr = zero_write();
    if let SendOp::Write { remote } = &mut wr.op {
        remote.addr = notice(NAMED, srq);
    }
    let slot = Slot {
        wr,
        internal: true,
        fault: None,
    };
    stream.post_with(to_proto(&slot.wr), slot);
}
