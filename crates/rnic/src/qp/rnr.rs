//! Messages that find no receive posted, on queue pairs that wait for one ([`Rnr::Wait`](crate::Rnr)).
//!
//! The stream goes on as far as order allows: answers to our own Reads and atomics behind such a message are taken in, so that a
//! program may wait for one before it posts the receive. What the peer asks for behind it (Sends, Writes, Read Requests) waits in the
//! order of its arrival: copied, up to a bound, and in the transport beyond that. On shared memory the peer is not told meanwhile of what is
//! out of the ring, because it takes that for done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use weft_proto::rdmap::Fault;
use weft_wire::ddp::Header;
use weft_wire::rdmap::{Opcode, QN_ATOMIC_RESPONSE, QN_SEND, QN_TERMINATE};

use super::rx::{Segment, Stop};
use super::{Core, QpInner, RecvSource};

/// What may wait beside the transport, in bytes, for one queue pair and for all of a device; each segment counts for a little more
/// than its length.
const HELD_MAX: usize = 64 << 20;
const HELD_BY_ALL: usize = 256 << 20;
const HELD_COST: usize = 64;

/// What waits for a receive.
#[derive(Default)]
pub(super) struct Held {
    /// Something does: the first of `ulpdus`, or what the staging buffer begins with.
    waits: bool,
    /// What the staging buffer begins with has to wait there.
    stopped: bool,
    /// A Read Response has begun and not ended: nothing may come in between.
    response_open: bool,
    ulpdus: VecDeque<Box<[u8]>>,
    /// A segment that is being fetched.
    pub(super) partial: Vec<u8>,
    bytes: usize,
    /// What all of the device keep, once this keeps anything.
    by_all: Option<Arc<AtomicUsize>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(all) = &self.by_all {
            all.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Held {
    /// Room for a segment of this length, if there is any.
    fn reserve(&mut self, len: usize, by_all: &Arc<AtomicUsize>) -> bool {
        let cost = len + HELD_COST;
        let all = self.by_all.get_or_insert_with(|| Arc::clone(by_all));
        if self.bytes + cost > HELD_MAX
            || all.fetch_add(cost, Ordering::Relaxed) + cost > HELD_BY_ALL
        {
            if self.bytes + cost <= HELD_MAX {
                all.fetch_sub(cost, Ordering::Relaxed);
            }
            return false;
        }
        self.bytes += cost;
        true
    }

    fn release(&mut self, len: usize) {
        self.bytes -= len + HELD_COST;
        if let Some(all) = &self.by_all {
            all.fetch_sub(len + HELD_COST, Ordering::Relaxed);
        }
    }

    /// The segment that was being fetched is there.
    pub(super) fn fetched(&mut self) {
        self.ulpdus
            .push_back(std::mem::take(&mut self.partial).into());
    }

    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Nothing is to be received now.
    pub(super) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Nothing follows what waits.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
    }
}

impl QpInner {
    /// Whether this segment has to wait; then it is kept if there is room.
    pub(super) fn must_wait(self: &Arc<Self>, core: &mut Core, segment: &Segment<'_>) -> Wait {
        if is_response(&segment.header) {
            core.rx.held.response_open = !segment.header.is_last();
            return Wait::No;
        }
        let starving = core.rx.held.waits
            || (needs_recv(&segment.header) && core.rx.recv.is_none() && !self.fetch_recv(core));
        if !starving {
            return Wait::No;
        }
        if !core.rx.held.waits {
            self.wait_begins(core);
        }
        let rx = &mut core.rx;
        let held = &mut rx.held;
        if !segment.whole && segment.total <= segment.room {
            rx.need = segment.total;
            return Wait::Here;
        }
        if !held.reserve(segment.len, &self.device.held) {
            held.stopped = true;
            return Wait::Here;
        }
        if !segment.whole {
            held.partial = vec![0; segment.len];
            held.partial[..segment.ulpdu.len()].copy_from_slice(segment.ulpdu);
            rx.fetch_held(segment);
            return Wait::Kept;
        }
        held.ulpdus.push_back(segment.ulpdu.into());
        rx.start += segment.total;
        Wait::Kept
    }

    /// Take in what has waited, as far as there are receives for it.
    #[cold]
    pub(super) fn go_on(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
        // Whoever posts a receive clears this.
        if core.rx.held.response_open || self.starved.load(Ordering::SeqCst) {
            return Ok(());
        }
        while let Some(ulpdu) = core.rx.held.ulpdus.front() {
            let header = Header::parse(ulpdu).map_err(Fault::from)?;
            if needs_recv(&header) && core.rx.recv.is_none() && !self.fetch_recv(core) {
                return Ok(());
            }
            let held = &mut core.rx.held;
            let Some(ulpdu) = held.ulpdus.pop_front() else {
                break;
            };
            held.release(ulpdu.len());
            held.stopped = false;
            let segment = Segment {
                header,
                ulpdu: &ulpdu,
                len: ulpdu.len(),
                total: 0,
                whole: true,
                room: 0,
            };
            self.take_in(core, &segment)?;
            if core.done.recv.len() >= 64 {
                self.deliver(core);
                if core.ended.is_some() {
                    return Err(Stop::Terminated);
                }
            }
        }
        core.rx.held.waits = false;
        core.rx.held.stopped = false;
        self.tell_peer(true);
        Ok(())
    }

    fn wait_begins(&self, core: &mut Core) {
        core.rx.held.waits = true;
        if let Some(stream) = &mut core.stream {
            stream.heard();
        }
        self.tell_peer(false);
    }

    /// Whether a peer in shared memory is told of what we take out of the ring.
    fn tell_peer(&self, on: bool) {
        if let Some(local) = self.connected.get().and_then(|c| c.link.local()) {
            local.tell(on);
        }
    }

    /// Take a receive for a new message. Without one, whoever posts the next one drives this queue pair.
    fn fetch_recv(self: &Arc<Self>, core: &mut Core) -> bool {
        core.rx.recv = self.take_recv().or_else(|| {
            match &self.recv {
                RecvSource::Own(_) | RecvSource::Twin(_) => {
                    self.starved.store(true, Ordering::SeqCst);
                }
                RecvSource::Shared(srq) => {
                    if !self.starved.swap(true, Ordering::SeqCst) {
                        srq.await_recv(Arc::downgrade(self));
                    }
                }
            }
            // One may have been posted before that could be seen.
            self.take_recv()
        });
        core.rx.recv.is_some()
    }

    /// Receives were posted: go on with what has waited for them.
    pub(crate) fn feed(self: &Arc<Self>) {
        if self.starved.load(Ordering::Relaxed) && self.starved.swap(false, Ordering::SeqCst) {
            self.drive(true);
        }
    }
}

/// What [`QpInner::must_wait`] has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    /// It was copied.
    Kept,
    /// Where it is.
    Here,
}

fn needs_recv(header: &Header) -> bool {
    matches!(header, Header::Untagged(header) if header.qn == QN_SEND)
}

/// What is about requests of ours. A Terminate waits for nobody.
fn is_response(header: &Header) -> bool {
    match header {
        Header::Tagged(header) => header.opcode == Opcode::ReadResponse,
        Header::Untagged(header) => matches!(header.qn, QN_ATOMIC_RESPONSE | QN_TERMINATE),
    }
}
