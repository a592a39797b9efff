//! Messages that find no receive posted, on queue pairs that wait for one ([`Rnr::Wait`](crate::Rnr)).
//!
//! The stream continues as far as the order allows. Responses to our own Reads and atomics behind such a message are processed, because a
//! program may wait for one before it posts the receive. Requests of the peer behind it (Sends, Writes, Read Requests) wait in the order of
//! their arrival: copied, up to a limit, and in the transport beyond that. On shared memory the ring's consumer position is not published
//! meanwhile, because the peer takes published frames as done.
//!
//! A peer's close behind such messages is reported at once ([`Qp::on_end`](super::Qp::on_end)): a program that waits only for the close posts no
//! further receive. The messages can still be received by a program that posts one.
//!
//! The wait has no limit, unless the peer has set one by a notice (docs/spec/rdmap-extensions.md), or our own program's connection manager
//! has. When the limit ends, a Terminate names the message, and the sender gets its error.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proto::rdmap::Fault;
use weft_wire::ddp::Header;
use weft_wire::rdmap::{Opcode, QN_ATOMIC_RESPONSE, QN_SEND, QN_TERMINATE};

use super::place::{Segment, Stop};
use super::receives::RecvSource;
use super::rnr_queue::{NOTICE, RNR_FOR_EVER};
use super::{Core, QpInner};

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

    /// Processes waiting messages, as far as there are receives for them.
    #[cold]
    pub(super) fn go_on(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
        // A thread that posts a receive clears this.
        if core.rx.held.response_open || self.wake.seen().is_starved() {
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
        if let (Some(due), Some(connected)) = (due, self.peer.connected.get()) {
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
            if let (Some(timed), Some(connected)) = (patience.timed, self.peer.connected.get()) {
                connected.registration.set_timer(timed);
            }
            let Some((header, len)) = patience.first.filter(|_| patience.due.is_some()) else {
                return false;
            };
            // A thread that has posted a receive is about to drive.
            if patience.timed.is_some() || !self.wake.seen().is_starved() {
                return false;
            }
            if core.rx.recv.is_some() || self.fetch_recv(core) {
                self.wake.feed();
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
            let news = self.peer.rnr_retry.swap(retry, Ordering::Relaxed) != retry;
            news && self.tell_rnr_retry(core)
        });
        if told {
            self.drive(false);
        }
    }

    /// Sends the peer, if there is one, the retry limit.
    pub(super) fn tell_rnr_retry(&self, core: &mut Core) -> bool {
        let retry = self.peer.rnr_retry.load(Ordering::Relaxed);
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
        self.life.wait_for_receives();
        self.with_core(|core| core.rx.patience.retry = retry);
    }

    fn wait_begins(&self, core: &mut Core) {
        core.rx.held.waits = true;
        if let Some(stream) = &mut core.stream {
            stream.heard();
        }
        self.tell_peer(false);
    }

    /// Sets whether a peer in shared memory sees what we take out of the ring.
    fn tell_peer(&self, on: bool) {
        if let Some(local) = self.peer.local() {
            local.tell(on);
        }
    }

    /// Takes a receive for a new message. Without one, the thread that posts the next one drives this queue pair.
    fn fetch_recv(self: &Arc<Self>, core: &mut Core) -> bool {
        core.rx.recv = self.take_recv().or_else(|| {
            match &self.recv {
                RecvSource::Own(_) | RecvSource::Twin(_) => {
                    self.wake.starve();
                }
                RecvSource::Xrc(target) => {
                    if self.wake.starve()
                        && let Some(srq) = target.current()
                    {
                        srq.await_recv(Arc::downgrade(self) as _);
                    }
                }
                RecvSource::Shared(srq) => {
                    if self.wake.starve() {
                        srq.await_recv(Arc::downgrade(self) as _);
                    }
                }
            }
            // One may have been posted before that could be seen.
            self.take_recv()
        });
        core.rx.recv.is_some()
    }

    /// Receives were posted: continues with the messages that waited for them.
    pub(crate) fn feed(self: &Arc<Self>) {
        if self.wake.feed() {
            self.drive(true);
        }
    }
}

/// The decision of [`QpInner::must_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    /// It was copied.
    Kept,
    /// Its place.
    Here,
}

fn needs_recv(header: &Header) -> bool {
    matches!(header, Header::Untagged(header) if header.qn == QN_SEND)
}

/// Responses to our own requests. A Terminate never waits.
fn is_response(header: &Header) -> bool {
    match header {
        Header::Tagged(header) => header.opcode == Opcode::ReadResponse,
        Header::Untagged(header) => matches!(header.qn, QN_ATOMIC_RESPONSE | QN_TERMINATE),
    }
}
