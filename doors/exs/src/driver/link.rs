//! The queue pair of a connection and its completion queue, on the soft RNIC or on an RNIC of the machine.
//!
//! The machine, the operations and the program's calls are the same on both. What an RNIC needs in addition is in `rnic`.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use weft_verbs::ext::CqExt;
use weft_verbs::{
    Cq, CqOverrun, EndReason, Path, PostError, Qp, QpInit, QpState, RecvWr, SendWr, Wc,
};
use weft_wire::exs::MAX_LEN;

use super::rnic::Rnic;
use super::state::{INLINE_MAX, MAX_SGE};
use crate::poller::Watched;
use crate::registered::Domain;
use crate::{Context, Error, Options};

/// The most outstanding send work requests.
pub(super) const MAX_SEND_WR: u32 = 1 << 17;
/// The most pieces of a list that one work request names; a header can precede them.
const MAX_PIECES: usize = 24;

pub(crate) enum Link {
    Soft(Soft),
    Rnic(Box<Rnic>),
}

pub(crate) struct Soft {
    qp: Qp,
    cq: Cq,
    domain: Arc<Domain>,
}

impl Soft {
    /// Bytes that the transport has accepted from us, and those that it has moved in both directions.
    fn moved(&self) -> (u64, u64) {
        let counters = self.qp.counters();
        let out = counters.tx_direct + counters.tx_copied + counters.one_sided_bytes;
        (out, out + counters.rx_direct + counters.rx_copied)
    }
}

impl Link {
    pub(crate) fn soft(context: &Context, options: &Options) -> Result<Link, Error> {
        let cq = context.device().create_cq(1 << 20, None)?;
        let mut init = QpInit::new(&cq, &cq);
        init.max_send_wr = MAX_SEND_WR;
        init.max_recv_wr = options.control_receives();
        init.max_sge = MAX_SGE;
        init.max_inline = (INLINE_MAX + MAX_LEN) as u32;
        let domain = Arc::clone(context.domain());
        let qp = domain.pd().create_qp(&init)?;
        Ok(Link::Soft(Soft { qp, cq, domain }))
    }

    pub(crate) fn rnic(rnic: Rnic) -> Link {
        Link::Rnic(Box::new(rnic))
    }

    /// The queue pair of the soft RNIC.
    pub(crate) fn soft_qp(&self) -> Option<&Qp> {
        match self {
            Link::Soft(soft) => Some(&soft.qp),
            Link::Rnic(_) => None,
        }
    }

    pub(crate) fn rnic_qp(&self) -> Option<&weft_verbs::any::Qp> {
        match self {
            Link::Soft(_) => None,
            Link::Rnic(rnic) => Some(rnic.qp()),
        }
    }

    #[inline]
    pub(super) fn domain(&self) -> &Arc<Domain> {
        match self {
            Link::Soft(soft) => &soft.domain,
            Link::Rnic(rnic) => rnic.domain(),
        }
    }

    /// A Write can carry the eight bytes that announce it. Immediate data of an RNIC have four.
    pub(super) fn has_immediate(&self, context: &Context) -> bool {
        match self {
            Link::Soft(_) => context.device().attr().immediate,
            Link::Rnic(_) => false,
        }
    }

    /// The most pieces of a list that one work request names, beside a header.
    pub(super) fn max_pieces(&self) -> usize {
        match self {
            Link::Soft(_) => MAX_PIECES,
            Link::Rnic(rnic) => rnic.max_pieces().min(MAX_PIECES),
        }
    }

    /// Calls `settle` when there are completions and no thread of the program drives the connection.
    pub(super) fn drive_by(
        &self,
        settle: impl Fn() + Send + Sync + 'static,
        conn: Weak<dyn Watched>,
    ) -> Result<(), Error> {
        match self {
            Link::Soft(soft) => soft.cq.set_hook(settle),
            Link::Rnic(rnic) => rnic.watch_by(conn)?,
        }
        Ok(())
    }

    /// Asks for the next call of [`Watched::on_ready`]; the completions that are there must be taken afterwards.
    pub(super) fn rearm(&self) {
        if let Link::Rnic(rnic) = self {
            rnic.rearm();
        }
    }

    #[inline]
    pub(super) fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        match self {
            Link::Soft(soft) => soft.qp.post_send(wrs),
            Link::Rnic(rnic) => rnic.post_send(wrs),
        }
    }

    #[inline]
    pub(super) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match self {
            Link::Soft(soft) => soft.qp.post_recv(wrs),
            Link::Rnic(rnic) => rnic.qp().post_recv(wrs),
        }
    }

    /// As [`CqExt::take`].
    #[inline]
    pub(super) fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        match self {
            Link::Soft(soft) => soft.cq.take(out),
            Link::Rnic(rnic) => rnic.take(out),
        }
    }

    /// As [`CqExt::look`]; an RNIC does not tell without a completion being taken.
    #[inline]
    pub(super) fn look(&self) -> bool {
        match self {
            Link::Soft(soft) => soft.cq.look(),
            Link::Rnic(_) => true,
        }
    }

    /// As [`CqExt::watch`].
    #[inline]
    pub(super) fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool {
        match self {
            Link::Soft(soft) => soft.cq.watch(epoch, spin, timeout),
            Link::Rnic(rnic) => rnic.watch(epoch, spin, timeout),
        }
    }

    /// As [`CqExt::epoch`].
    #[inline]
    pub(super) fn epoch(&self) -> u32 {
        match self {
            Link::Soft(soft) => soft.cq.epoch(),
            Link::Rnic(rnic) => rnic.epoch(),
        }
    }

    /// As [`CqExt::interrupt`].
    #[inline]
    pub(super) fn interrupt(&self) {
        match self {
            Link::Soft(soft) => soft.cq.interrupt(),
            Link::Rnic(rnic) => rnic.interrupt(),
        }
    }

    /// As [`CqExt::release`]. An RNIC needs nobody who drives it.
    pub(super) fn release(&self) {
        if let Link::Soft(soft) = self {
            soft.cq.release();
        }
    }

    pub(super) fn on_end(&self, hook: impl FnOnce(EndReason) + Send + 'static) {
        match self {
            Link::Soft(soft) => soft.qp.on_end(hook),
            Link::Rnic(rnic) => rnic.qp().on_end(hook),
        }
    }

    /// A request has failed, and the queue pair is of no use any more.
    pub(super) fn has_failed(&self) -> bool {
        match self {
            Link::Soft(_) => false,
            Link::Rnic(rnic) => rnic.has_failed(),
        }
    }

    /// The peer has all that was posted, or will have it whatever happens on this side. If not, a later completion says so.
    pub(super) fn is_delivered(&self) -> bool {
        match self {
            // A disconnect of the soft RNIC is ordered behind the sends.
            Link::Soft(_) => true,
            Link::Rnic(rnic) => rnic.is_delivered(),
        }
    }

    pub(super) fn disconnect(&self) {
        match self {
            Link::Soft(soft) => soft.qp.disconnect(),
            Link::Rnic(rnic) => rnic.qp().disconnect(),
        }
    }

    /// Ends the connection at once.
    pub(super) fn to_error(&self) {
        match self {
            Link::Soft(soft) => soft.qp.to_error(),
            Link::Rnic(rnic) => rnic.qp().disconnect(),
        }
    }

    /// True while requests can be posted.
    pub(super) fn is_up(&self) -> bool {
        match self {
            Link::Soft(soft) => soft.qp.state() == QpState::Rts,
            Link::Rnic(rnic) => !rnic.has_failed(),
        }
    }

    /// Sends of a responder wait until the initiator has spoken, as MPA wants it. `siw` gives up a connection where they arrive with the reply.
    pub(super) fn wait_for_the_initiator(&self) {
        if let Link::Rnic(rnic) = self {
            rnic.hold();
        }
    }

    /// Bytes that the transport has moved, in both directions.
    pub(super) fn moved(&self) -> u64 {
        match self {
            Link::Soft(soft) => soft.moved().1,
            Link::Rnic(rnic) => rnic.moved().1,
        }
    }

    /// Bytes that the transport has accepted from us.
    pub(super) fn moved_out(&self) -> u64 {
        match self {
            Link::Soft(soft) => soft.moved().0,
            Link::Rnic(rnic) => rnic.moved().0,
        }
    }

    pub(super) fn path(&self) -> Option<Path> {
        match self {
            Link::Soft(soft) => soft.qp.path(),
            Link::Rnic(rnic) => rnic.qp().path(),
        }
    }

    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Link::Soft(soft) => soft.qp.local_addr(),
            Link::Rnic(rnic) => rnic.qp().local_addr(),
        }
    }

    pub(super) fn peer_addr(&self) -> Option<SocketAddr> {
        match self {
            Link::Soft(soft) => soft.qp.peer_addr(),
            Link::Rnic(rnic) => rnic.qp().peer_addr(),
        }
    }
}
