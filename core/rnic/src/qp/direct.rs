//! One-sided operations that the initiator carries out itself, in memory shared with the peer.
//!
//! The peer's exported table says whether an operation is allowed. If it does not allow the operation, the operation goes through the ring,
//! and the peer checks it and answers with the error codes of the wire. So nothing here fails for a reason that the peer would have to
//! know.
//!
//! Direct operations overtake requests in the ring. This is visible only if an earlier request in the ring touches the same memory, or
//! withdraws the right to it: then the operation goes through the ring, too (see [`Barrier`](super::flight::Barrier)).

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use weft_mem::{Access, KeySpan, Keys, LastStretch, Peer, RecvList, SendList, Target};
use weft_proto::rdmap::WRITTEN;

use super::confirm::Confirming;
use super::end::EndReason;
use super::{Core, QpInner, Slot};
use crate::transport::Llp;
use crate::transport::local::{LocalLink, Marked, PROCESS_MIN, TOUCH_MAX};
use crate::types::{RemoteAddr, SendOp, SendWr};

/// The result of an attempt.
pub(super) enum Outcome {
    /// The operation goes through the ring.
    NotDirect,
    Done,
    /// The data of a Write with Immediate is in place.
    DataDone,
    Lost,
}

impl QpInner {
    /// Carries out the requests at the head of the send queue that do not need the peer. Returns whether there were any.
    pub(super) fn work_directly(self: &Arc<Self>, core: &mut Core, link: &Llp) -> bool {
        let Some(local) = link.local() else {
            return false;
        };
        let moved = self.work_past_the_ring(core, local);
        if moved {
            local.written();
        }
        moved
    }

    fn work_past_the_ring(self: &Arc<Self>, core: &mut Core, local: &LocalLink) -> bool {
        let mut moved = false;
        loop {
            let Core {
                stream: Some(stream),
                tx,
                counters,
                confirming,
                keys,
                ..
            } = core
            else {
                return moved;
            };
            // Those of our own touch no memory.
            let own = confirming.as_ref().map_or(0, Confirming::outstanding);
            let next = stream.next_to_start();
            let Some(slot) = next.and_then(|seq| stream.request(seq)) else {
                return moved;
            };
            if !is_one_sided(slot) || !tx.may_overtake(local) || stream.outbound_requests() > own {
                return moved;
            }
            let len = slot.wr.len().unwrap_or(0);
            if !tx.takes_direct(len) {
                local.come_back();
                return moved;
            }
            match self.one_sided(&slot.wr, local, keys, &mut tx.stretch) {
                Outcome::NotDirect => return moved,
                Outcome::Done => stream.done_directly(),
                Outcome::DataDone => stream.written_directly(),
                Outcome::Lost => {
                    self.end(core, EndReason::Lost);
                    return true;
                }
            }
            counters.one_sided += 1;
            counters.one_sided_bytes += u64::from(len);
            moved = true;
        }
    }

    /// Carries a request out in the peer's memory, if possible. `stretch` is the part of its arenas that was used last.
    pub(super) fn one_sided(
        &self,
        wr: &SendWr,
        local: &LocalLink,
        keys: &Keys,
        stretch: &mut LastStretch,
    ) -> Outcome {
        match wr.op {
            SendOp::Write { remote } => {
                self.write_directly(wr, remote, local, keys, stretch, Outcome::Done)
            }
            SendOp::WriteImm { remote, .. } => {
                self.write_directly(wr, remote, local, keys, stretch, Outcome::DataDone)
            }
            SendOp::Read { remote } => self.read_directly(wr, remote, local, keys),
            SendOp::FetchAdd { remote, .. }
            | SendOp::CompareSwap { remote, .. }
            | SendOp::Swap { remote, .. } => self.atomic_directly(wr, remote, local, keys),
            _ => Outcome::NotDirect,
        }
    }

    /// A Write from one range to memory that both sides have used before: as [`QpInner::one_sided`], with nothing looked up. False: nothing was
    /// done.
    #[inline]
    pub(super) fn write_known(
        &self,
        wr: &SendWr,
        remote: RemoteAddr,
        marked: &mut Marked<'_>,
        keys: &Keys,
        stretch: &LastStretch,
    ) -> bool {
        let [sge] = wr.sges.as_slice() else {
            return false;
        };
        match keys.known(self.pd.id, sge.lkey, sge.addr, sge.len, Access::empty()) {
            Some(from) if sge.len > 0 => marked.write(stretch, remote.rkey, remote.addr, &from),
            _ => false,
        }
    }

    pub(super) fn spans_of<'a>(
        &self,
        keys: &'a Keys,
        wr: &SendWr,
        need: Access,
    ) -> Option<SmallVec<[KeySpan<'a>; 2]>> {
        // By hand: collecting costs as much as the look-up.
        let mut spans = SmallVec::new();
        for sge in wr.sges.iter().filter(|sge| sge.len > 0) {
            spans.push(
                keys.local(self.pd.id, sge.lkey, sge.addr, sge.len, need)
                    .ok()?,
            );
        }
        Some(spans)
    }

    fn write_directly(
        &self,
        wr: &SendWr,
        remote: RemoteAddr,
        local: &LocalLink,
        keys: &Keys,
        stretch: &mut LastStretch,
        done: Outcome,
    ) -> Outcome {
        let Some(spans) = self.spans_of(keys, wr, Access::empty()) else {
            return Outcome::NotDirect;
        };
        let mut list = SendList::new();
        if let Some(data) = &wr.inline {
            list.push_bytes(data);
        }
        for span in &spans {
            list.push_key(span);
        }
        let len = list.len_bytes() as u32;
        if matches!(done, Outcome::DataDone) && len >= WRITTEN {
            // The peer could not be notified.
            return Outcome::NotDirect;
        }
        let need = Access::REMOTE_WRITE;
        let copied = in_parts(local, remote, len, need, |peer, target, at, now| {
            if target.place().space == 0
                && len < PROCESS_MIN
                && !(matches!(done, Outcome::Done) && local.peer_sleeps() && self.is_alone())
            {
                return Err(io::ErrorKind::Unsupported.into());
            }
            let by = (local.peer_qp(), remote.rkey);
            peer.write_by(by, target, &list, (at, now), stretch)
        });
        outcome(copied, done)
    }

    /// Whether this is the first request since a poll received something. Waking the peer is a system call too, and the peer then has to
    /// run: that pays if more requests follow.
    fn is_alone(&self) -> bool {
        let taken = self.taken();
        self.posting.alone_since.swap(taken, Ordering::Relaxed) != taken
    }

    fn read_directly(
        &self,
        wr: &SendWr,
        remote: RemoteAddr,
        local: &LocalLink,
        keys: &Keys,
    ) -> Outcome {
        let Some(spans) = self.spans_of(keys, wr, Access::LOCAL_WRITE) else {
            return Outcome::NotDirect;
        };
        let mut list = RecvList::new();
        for span in &spans {
            list.push_key(span);
        }
        let len = list.len_bytes() as u32;
        let need = Access::REMOTE_READ;
        let copied = in_parts(local, remote, len, need, |peer, target, at, now| {
            peer.pull(target.place(), &mut list, at, now)
        });
        outcome(copied, Outcome::Done)
    }

    fn atomic_directly(
        &self,
        wr: &SendWr,
        remote: RemoteAddr,
        local: &LocalLink,
        keys: &Keys,
    ) -> Outcome {
        if !remote.addr.is_multiple_of(8) {
            return Outcome::NotDirect;
        }
        let Some(spans) = self.spans_of(keys, wr, Access::LOCAL_WRITE) else {
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
        let original = original.to_ne_bytes();
        let mut rest = &original[..];
        for span in &spans {
            let (now, later) = rest.split_at(span.len().min(rest.len()));
            span.copy_in(now);
            rest = later;
        }
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

/// Copies `len` bytes in parts. Each part checks again whether the rest is allowed, so that a peer that takes its memory back waits for one
/// part only. If the rest has to go through the ring, bytes are copied twice, which does no harm.
fn in_parts(
    local: &LocalLink,
    remote: RemoteAddr,
    len: u32,
    need: Access,
    mut copy: impl FnMut(&Peer, &Target, usize, usize) -> io::Result<()>,
) -> Option<io::Result<()>> {
    let mut at = 0;
    loop {
        let now = (len - at).min(TOUCH_MAX);
        let to = remote.addr.checked_add(at.into())?;
        let copied = local.touch(remote.rkey, to, len - at, need, |peer, target| {
            copy(peer, target, at as usize, now as usize)
        })?;
        at += now;
        if copied.is_err() || at == len {
            return Some(copied);
        }
    }
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::engine::pretend_engine;
    use crate::lock::lock;
    use crate::qp::tx::DIRECT_BYTES;
    use crate::{ConnParam, Device, LocalMode, Qp, QpInit};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn qp(device: &Device) -> (crate::Pd, Qp) {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        (pd, qp)
    }

    /// The engine does so much of a long queue at once, and comes back for the rest.
    #[test]
    fn the_engine_does_not_stay_with_direct_work() {
        const LEN: u64 = 1 << 20;
        const WRITES: u64 = 4 * DIRECT_BYTES / LEN;
        let device = Device::builder().local(LocalMode::Require).open().unwrap();
        let ((near_pd, near), (far_pd, far)) = (qp(&device), qp(&device));
        let (tell, told) = mpsc::channel();
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let mut param = ConnParam::default();
        // Its first frame would be in the ring, and direct work wait for it.
        param.options.peer_to_peer = false;
        let accepting = param.clone();
        let listening = device
            .listen(any, 1, &param, move |request| {
                request.accept(&far, &accepting).unwrap();
                tell.send(far.path().unwrap().transport).unwrap();
            })
            .unwrap();
        let (tell, dialed) = mpsc::channel();
        device.dial(listening.local_addr(), None, &near, &param, move |dialed| {
            tell.send(dialed).unwrap();
        });
        dialed.recv_timeout(PATIENCE).unwrap().unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok("local"));

        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let from = near_pd.alloc_mr(LEN as usize, access).unwrap();
        let to = far_pd.alloc_mr(LEN as usize, access).unwrap();
        pretend_engine();
        let connected = near.0.peer.connected.get().unwrap();
        let core = near.0.core.lock();
        near.0.hold(core, |core| {
            let before = core.counters.one_sided;
            lock(&near.0.posting.inbox)
                .extend((0..WRITES).map(|id| SendWr::write(id, to.remote(0)).sge(from.whole())));
            near.0.posting.has_inbox.store(true, Ordering::Relaxed);
            near.0
                .posting
                .sq_used
                .fetch_add(WRITES as u32, Ordering::Relaxed);
            near.0.take_inbox(core);
            assert!(near.0.pump_tx(core, &connected.link));
            let done = core.counters.one_sided - before;
            assert_eq!((done * LEN, core.tx.blocked), (DIRECT_BYTES, true));
        });
        // No thread polls.
        let deadline = Instant::now() + PATIENCE;
        while near.counters().one_sided_bytes < WRITES * LEN {
            assert!(Instant::now() < deadline, "{:?}", near.counters());
            std::thread::yield_now();
        }
        assert_eq!(near.counters().tx_direct, 0, "all of it was done directly");
    }
}
