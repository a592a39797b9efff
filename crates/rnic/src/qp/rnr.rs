//! Messages that find no receive posted, on queue pairs that wait for one ([`Rnr::Wait`](crate::Rnr)).
//!
//! The stream goes on as far as order allows: answers to our own Reads and atomics behind such a message are taken in, so that a
//! program may wait for one before it posts the receive. What the peer asks for behind it (Sends, Writes, Read Requests) waits in the
//! order of its arrival: copied, up to a bound, and in the transport beyond that. On shared memory the peer is not told meanwhile of what is
//! out of the ring, because it takes that for done.
//!
//! A peer's close behind such messages is told of at once ([`Qp::on_end`](super::Qp::on_end)): a program that waits for that alone posts no receive any
//! more. What has come before is still there for one that does.
//!
//! It waits for ever, unless somebody has said how often to wait: the peer, by a notice (docs/spec/rdmap-extensions.md), or our own
//! program's connection manager. When that time is over a Terminate names the message, and the sender learns what became of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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

/// Retries that have no end, as InfiniBand encodes them.
pub(super) const RNR_FOR_EVER: u8 = 7;
/// The longest timer that InfiniBand has, which connections of its connection manager get.
const RNR_TIMER: Duration = Duration::from_micros(655_360);
/// The tagged offset of the notice of how often to wait, but for that number in the lowest byte.
const NOTICE: u64 = u64::from_be_bytes(*b"weftRNR\0");

/// How long a message waits for its receive.
pub(super) struct Patience {
    retry: u8,
    timer: Duration,
    /// The message that waits now: its first segment, and how long that is.
    first: Option<(Header, usize)>,
    /// When it has waited too long.
    due: Option<Instant>,
    /// When the engine calls us. One timer at a time, however many messages wait one after the other.
    timed: Option<Instant>,
    over: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            retry: RNR_FOR_EVER,
            timer: RNR_TIMER,
            first: None,
            due: None,
            timed: None,
            over: false,
        }
    }
}

impl Patience {
    /// The peer has sent an empty Write to this tagged offset.
    pub(super) fn hear(&mut self, to: u64) {
        if to & !0xff == NOTICE {
            self.retry = to as u8;
        }
    }

    /// A message has waited too long.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// This message begins to wait. When to look whether it still does, unless that is known.
    fn begin(&mut self, header: Header, len: usize) -> Option<Instant> {
        self.first = Some((header, len));
        self.due = None;
        if self.retry >= RNR_FOR_EVER {
            return None;
        }
        let due = Instant::now().checked_add(self.timer.saturating_mul(u32::from(self.retry) + 1));
        self.due = due;
        if self
            .timed
            .is_some_and(|timed| due.is_none_or(|due| timed <= due))
        {
            return None;
        }
        self.timed = due;
        due
    }

    fn end(&mut self) {
        (self.first, self.due) = (None, None);
    }
}

/// What waits for a receive.
#[derive(Default)]
pub(super) struct Held {
    /// Something does: the first of `ulpdus`, or what the staging buffer begins with.
    waits: bool,
    /// What the staging buffer begins with has to wait there.
    stopped: bool,
    /// The peer has closed, behind what waits.
    closed: bool,
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

    /// The peer has closed: nothing follows what waits. The program is told now, and the queue pair ends when the last of it has its receive.
    pub(super) fn close(&mut self) {
        (self.stopped, self.closed) = (true, true);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
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
            || (needs_recv(&segment.header)
                && core.rx.recv.is_none()
                && !self.lacks_srq()
                && !self.fetch_recv(core));
        if !starving {
            return Wait::No;
        }
        if !core.rx.held.waits {
            self.wait_begins(core);
            self.time_wait(core, segment.header, segment.len);
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
        let mut went_on = false;
        while let Some(ulpdu) = core.rx.held.ulpdus.front() {
            let (header, len) = (Header::parse(ulpdu).map_err(Fault::from)?, ulpdu.len());
            if needs_recv(&header)
                && core.rx.recv.is_none()
                && !self.lacks_srq()
                && !self.fetch_recv(core)
            {
                if went_on {
                    self.time_wait(core, header, len);
                }
                return Ok(());
            }
            went_on = true;
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
        core.rx.patience.end();
        self.tell_peer(true);
        Ok(())
    }

    /// This message waits from now on.
    fn time_wait(&self, core: &mut Core, header: Header, len: usize) {
        let due = core.rx.patience.begin(header, len);
        if let (Some(due), Some(connected)) = (due, self.connected.get()) {
            connected.registration.set_timer(due);
        }
    }

    /// The engine's timer: give up on a message that has waited too long.
    pub(super) fn rnr_expired(self: &Arc<Self>) {
        let again = self.with_core(|core| {
            let now = Instant::now();
            let patience = &mut core.rx.patience;
            if patience.timed.is_none_or(|timed| timed > now) || core.ended.is_some() {
                return false;
            }
            patience.timed = patience.due.filter(|due| *due > now);
            if let (Some(timed), Some(connected)) = (patience.timed, self.connected.get()) {
                connected.registration.set_timer(timed);
            }
            let Some((header, len)) = patience.first.filter(|_| patience.due.is_some()) else {
                return false;
            };
            // Whoever has posted a receive is about to drive.
            if patience.timed.is_some() || !self.starved.load(Ordering::SeqCst) {
                return false;
            }
            if core.rx.recv.is_some() || self.fetch_recv(core) {
                self.starved.store(false, Ordering::SeqCst);
                return true;
            }
            core.rx.patience.over = true;
            if let Some(stream) = &mut core.stream {
                stream.fail_unreceived(&header, len);
            }
            self.fault(core, Fault::NoReceive);
            false
        });
        if again {
            self.drive(true);
        }
    }

    /// See [`Qp::set_rnr_retry`](super::Qp::set_rnr_retry).
    pub(super) fn set_rnr_retry(self: &Arc<Self>, retry: u8) {
        let retry = retry.min(RNR_FOR_EVER);
        let told = self.with_core(|core| {
            let news = self.rnr_retry.swap(retry, Ordering::Relaxed) != retry;
            news && self.tell_rnr_retry(core)
        });
        if told {
            self.drive(false);
        }
    }

    /// Tell the peer, if there is one, how often to wait.
    pub(super) fn tell_rnr_retry(&self, core: &mut Core) -> bool {
        let retry = self.rnr_retry.load(Ordering::Relaxed);
        let Some(stream) = core.stream.as_mut().filter(|_| core.ended.is_none()) else {
            return false;
        };
        stream.notify(NOTICE | u64::from(retry));
        true
    }

    pub(super) fn set_min_rnr_timer(self: &Arc<Self>, timer: Duration) {
        self.with_core(|core| core.rx.patience.timer = timer);
    }

    pub(super) fn min_rnr_timer(self: &Arc<Self>) -> Duration {
        self.with_core(|core| core.rx.patience.timer)
    }

    /// See [`Qp::wait_for_receives`](super::Qp::wait_for_receives).
    pub(super) fn wait_for_receives(self: &Arc<Self>, retry: u8) {
        self.rnr_wait.store(true, Ordering::Relaxed);
        self.with_core(|core| core.rx.patience.retry = retry);
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
                RecvSource::Xrc(target) => {
                    if !self.starved.swap(true, Ordering::SeqCst)
                        && let Some(srq) = target.current()
                    {
                        srq.await_recv(Arc::downgrade(self) as _);
                    }
                }
                RecvSource::Shared(srq) => {
                    if !self.starved.swap(true, Ordering::SeqCst) {
                        srq.await_recv(Arc::downgrade(self) as _);
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
