//! One-sided work that the initiator does itself, in the memory that it shares with the peer.
//!
//! The peer's exported table says whether an operation is allowed. Where it does not say so, the operation goes through
//! the ring like any other, and the peer judges it, with the error codes of the wire: so nothing here ever fails for a
//! reason that the peer would have to be told.
//!
//! Work done directly overtakes what is in the ring. That is seen by nobody but where earlier work in the ring touches
//! the same memory, or takes the right to touch it away: then it waits its turn there too (see [`Barrier`]).

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;
use weft_mem::{Access, RecvList, SendList, Span};

use super::rx::scatter;
use super::{Core, EndReason, QpInner, Slot};
use crate::transport::Link;
use crate::transport::local::{LocalLink, PROCESS_MIN};
use crate::types::{RemoteAddr, SendOp, SendWr};

/// Earlier work of ours, in the ring, that direct work must not overtake: Writes, Reads and atomics that went that way,
/// and Sends that invalidate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Barrier {
    /// None.
    #[default]
    None,
    /// In a flight that is not sent yet.
    Built,
    /// Up to this position of the ring.
    Ring(u64),
}

/// What came of trying.
pub(super) enum Outcome {
    /// It goes through the ring.
    NotDirect,
    Done,
    /// The data of a Write with Immediate is in place.
    DataDone,
    Lost,
}

impl QpInner {
    /// Do what can be done at the head of the send queue without the peer. Says whether anything was.
    pub(super) fn work_directly(self: &Arc<Self>, core: &mut Core, link: &dyn Link) -> bool {
        let Some(local) = link.local() else {
            return false;
        };
        let mut moved = false;
        loop {
            let Core {
                stream: Some(stream),
                sq,
                sq_base,
                tx,
                ledger,
                ..
            } = core
            else {
                return moved;
            };
            let Some(slot) = stream.next_to_start().and_then(|seq| {
                let index = usize::try_from(seq.checked_sub(*sq_base)?).ok()?;
                sq.get(index)
            }) else {
                return moved;
            };
            if !is_one_sided(slot) || !tx.may_overtake(local) || stream.outbound_requests() > 0 {
                return moved;
            }
            let len = slot.wr.len().unwrap_or(0);
            match self.one_sided(&slot.wr, local) {
                Outcome::NotDirect => return moved,
                Outcome::Done => stream.done_directly(),
                Outcome::DataDone => stream.written_directly(),
                Outcome::Lost => {
                    self.end(core, EndReason::Lost);
                    return true;
                }
            }
            ledger.one_sided += 1;
            ledger.one_sided_bytes += u64::from(len);
            moved = true;
        }
    }

    pub(super) fn one_sided(&self, wr: &SendWr, local: &LocalLink) -> Outcome {
        match wr.op {
            SendOp::Write { remote } => self.write_directly(wr, remote, local, Outcome::Done),
            SendOp::WriteImm { remote, .. } => {
                self.write_directly(wr, remote, local, Outcome::DataDone)
            }
            SendOp::Read { remote } => self.read_directly(wr, remote, local),
            SendOp::FetchAdd { remote, .. }
            | SendOp::CompareSwap { remote, .. }
            | SendOp::Swap { remote, .. } => self.atomic_directly(wr, remote, local),
            _ => Outcome::NotDirect,
        }
    }

    pub(super) fn spans_of(&self, wr: &SendWr, need: Access) -> Option<SmallVec<[Span; 2]>> {
        // By hand: collecting costs as much as the look-up.
        let mut spans = SmallVec::new();
        for sge in wr.sges.iter().filter(|sge| sge.len > 0) {
            spans.push(self.local_span(*sge, need).ok()?);
        }
        Some(spans)
    }

    fn write_directly(
        &self,
        wr: &SendWr,
        remote: RemoteAddr,
        local: &LocalLink,
        done: Outcome,
    ) -> Outcome {
        let Some(spans) = self.spans_of(wr, Access::empty()) else {
            return Outcome::NotDirect;
        };
        let mut list = SendList::new();
        if let Some(data) = &wr.inline {
            list.push_bytes(data);
        }
        for span in &spans {
            list.push_span(span, 0, span.len());
        }
        let len = list.len_bytes() as u32;
        let copied = local.touch(
            remote.rkey,
            remote.addr,
            len,
            Access::REMOTE_WRITE,
            |peer, target| {
                if target.place().space == 0 && len < PROCESS_MIN {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                peer.write(target, &list)
            },
        );
        outcome(copied, done)
    }

    fn read_directly(&self, wr: &SendWr, remote: RemoteAddr, local: &LocalLink) -> Outcome {
        let Some(spans) = self.spans_of(wr, Access::LOCAL_WRITE) else {
            return Outcome::NotDirect;
        };
        let mut list = RecvList::new();
        for span in &spans {
            list.push_span(span, 0, span.len());
        }
        let len = list.len_bytes() as u32;
        let copied = local.touch(
            remote.rkey,
            remote.addr,
            len,
            Access::REMOTE_READ,
            |peer, target| peer.read(target, &mut list),
        );
        outcome(copied, Outcome::Done)
    }

    fn atomic_directly(&self, wr: &SendWr, remote: RemoteAddr, local: &LocalLink) -> Outcome {
        let Some(spans) = self.spans_of(wr, Access::LOCAL_WRITE) else {
            return Outcome::NotDirect;
        };
        let original = local.touch(
            remote.rkey,
            remote.addr,
            8,
            Access::REMOTE_ATOMIC,
            |peer, target| match wr.op {
                SendOp::FetchAdd { add, .. } => peer.fetch_add(target, add),
                SendOp::CompareSwap { compare, swap, .. } => {
                    peer.compare_swap(target, compare, swap)
                }
                SendOp::Swap { value, .. } => peer.swap(target, value),
                _ => None,
            },
        );
        let Some(Some(original)) = original else {
            return Outcome::NotDirect;
        };
        scatter(&spans, &original.to_ne_bytes());
        Outcome::Done
    }
}

/// Work that touches the peer's memory and nothing else of it. Empty Writes and Reads do not even do that: they are
/// signs of life, and go through the ring.
fn is_one_sided(slot: &Slot) -> bool {
    !slot.internal
        && slot.wr.len().is_some_and(|len| len > 0)
        && matches!(
            slot.wr.op,
            SendOp::Write { .. }
                | SendOp::WriteImm { .. }
                | SendOp::Read { .. }
                | SendOp::FetchAdd { .. }
                | SendOp::CompareSwap { .. }
                | SendOp::Swap { .. }
        )
}

fn outcome(copied: Option<io::Result<()>>, done: Outcome) -> Outcome {
    match copied {
        None => Outcome::NotDirect,
        Some(Ok(())) => done,
        Some(Err(error)) if error.kind() == io::ErrorKind::Unsupported => Outcome::NotDirect,
        Some(Err(error)) => {
            tracing::debug!(%error, "the peer's memory is gone");
            Outcome::Lost
        }
    }
}
