//! The end of a connection: flushing, its notification, and the socket's last bytes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use weft_mem::{PEER_LIMIT, Reader};
use weft_proto::rdmap::Fault;
use weft_wire::rdmap::TermError;

use super::convert::{is_access_code, term_code};
use super::flight::note_transmitted;
use super::receives::RecvSource;
use super::rnr_queue::RnrQueue;
use super::{CallOff, Core, EndHook, QpInner, Slot};
use crate::engine::guarded;
use crate::lock::lock;
use crate::timer;
use crate::transport::Llp;
use crate::types::{AsyncEvent, QpState, TerminateCode, WcStatus};

/// InfiniBand's transport timer with its retries: how long sends to a vanished peer appear to be in flight.
const TRANSPORT_TIMER: Duration = Duration::from_millis(500);
/// The limit on how long a peer can delay the end of a failed connection by reading slowly.
const LONGEST_END: Duration = Duration::from_secs(20);

/// Between two looks whether the peer has left our memory.
const LOOK: Duration = Duration::from_millis(1);

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Both sides closed in order.
    Disconnected,
    /// The connection broke: reset, cut in the middle of an FPDU, or the peer did not close in time.
    Lost,
    /// We ended it with a Terminate of this value, see [`Wc::vendor_err`](crate::Wc::vendor_err).
    Terminated(u32),
    /// The peer ended it with a Terminate of this value.
    PeerTerminated(u32),
    /// The device was removed, or has failed: only of an RNIC of the machine.
    DeviceRemoved,
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            EndReason::Disconnected => f.write_str("both sides closed the connection"),
            EndReason::Lost => f.write_str("the connection was lost"),
            EndReason::Terminated(code) => {
                write!(f, "we ended the connection: {}", TerminateCode(code))
            }
            EndReason::DeviceRemoved => f.write_str("the device was removed, or has failed"),
            EndReason::PeerTerminated(code) => {
                write!(f, "the peer ended the connection: {}", TerminateCode(code))
            }
        }
    }
}

/// The end of a connection whose peer was still in our memory.
pub(super) struct Withheld {
    since: Instant,
    event: Option<AsyncEvent>,
}

impl QpInner {
    /// The connection is over, for this reason: flush everything.
    pub(super) fn end(self: &Arc<Self>, core: &mut Core, mut reason: EndReason) {
        if core.ended.is_some() {
            return;
        }
        let unheard = self.limits.quiet_end
            && self.state() == QpState::Rts
            && !self.life.is_orphan()
            && (is_silent(reason) || core.rx.patience.over);
        if !unheard {
            self.life.fail();
        }
        let mut inside = false;
        if let Some(connected) = self.peer.connected.get()
            && let Some(local) = connected.link.local()
        {
            // Flushed requests return their memory to the owner: the peer may not touch it from here on.
            local.lend_no_more();
            local.close_access();
            inside = local.is_inside();
            // The peer may have taken since we last looked.
            note_transmitted(core, &connected.link);
            if core.tx.lends() {
                connected.link.abort();
                reason = EndReason::Lost;
            }
        }
        core.ended = Some(reason);
        if inside {
            self.withhold(core);
        }
        core.rx.held = RnrQueue::default();
        core.tx.overdue = None;
        self.take_inbox(core);
        if unheard {
            self.reap(core);
            self.await_retry_timeout(core);
            self.keep_recv(core);
        } else {
            self.flush_sends(core);
            self.flush_recvs(core);
        }
        // The first end of a twin reports the event.
        let event = (!unheard && !self.is_twin)
            .then(|| self.event_of(reason))
            .flatten();
        match &mut core.withheld {
            Some(withheld) => withheld.event = event,
            None => {
                if let Some(event) = event {
                    self.device.raise(event);
                }
            }
        }
        self.deliver(core);
        if let Some(connected) = self.peer.connected.get() {
            core.give_up = Instant::now().checked_add(LONGEST_END);
            self.linger(core);
            if reason == EndReason::Lost {
                connected.link.abort();
                self.bury(core);
            } else {
                self.drain(core, &connected.link);
            }
        }
    }

    /// The asynchronous event for an end.
    fn event_of(&self, reason: EndReason) -> Option<AsyncEvent> {
        let qp_num = self.num;
        match reason {
            EndReason::Disconnected => None,
            EndReason::Lost | EndReason::DeviceRemoved => {
                Some(AsyncEvent::QpFatal { qp_num, reason: 0 })
            }
            EndReason::Terminated(reason) if is_access_code(reason) => {
                Some(AsyncEvent::QpAccessErr { qp_num, reason })
            }
            EndReason::Terminated(reason) | EndReason::PeerTerminated(reason) => {
                Some(AsyncEvent::QpFatal { qp_num, reason })
            }
        }
    }

    /// The peer is using our memory. The end, which gives the program its memory back, is reported when the peer has left it.
    fn withhold(self: &Arc<Self>, core: &mut Core) {
        core.withheld = Some(Withheld {
            since: Instant::now(),
            event: None,
        });
        let qp = Arc::clone(self);
        timer::after(self.engine(), LOOK, move || {
            qp.drive(false);
            let told = qp.peek(|core| core.withheld.is_none()).unwrap_or(false);
            (!told).then_some(LOOK)
        });
    }

    /// Whether an end can be reported: no peer uses our memory, or the time limit for it has passed.
    pub(super) fn may_tell(self: &Arc<Self>, core: &mut Core) -> bool {
        let Some(withheld) = &core.withheld else {
            return true;
        };
        let local = self.peer.local().filter(|local| {
            // No other thread checks the wire.
            local.check();
            local.is_inside()
        });
        if let Some(local) = local {
            if withheld.since.elapsed() < PEER_LIMIT {
                return false;
            }
            local.cut_off();
        }
        let event = core.withheld.take().and_then(|withheld| withheld.event);
        if let Some(event) = event.filter(|_| !self.life.is_orphan()) {
            self.device.raise(event);
        }
        if self.state() == QpState::Error {
            // Those that were posted meanwhile.
            self.flush_recvs(core);
        }
        true
    }

    /// The connection is over, and the queue pair was not notified. Its sends go nowhere, and fail when the transport timer has expired with its
    /// retries. They do not fail at once, because a program that has received everything may leave before the last messages to it have arrived,
    /// and its peer may end before it notices.
    pub(super) fn await_retry_timeout(self: &Arc<Self>, core: &mut Core) {
        if core.first_posted().is_none() {
            self.flush_sends(core);
            return;
        }
        if std::mem::replace(&mut core.awaits_retry_timeout, true) {
            return;
        }
        let qp = Arc::downgrade(self);
        timer::after(self.engine(), TRANSPORT_TIMER, move || {
            let qp = qp.upgrade()?;
            qp.with_core(|core| qp.end_quiet(core, Some(WcStatus::RetryExcErr)));
            None
        });
    }

    /// An end that the queue pair did not show becomes visible: `first` is the status of the first outstanding request.
    pub(super) fn end_quiet(self: &Arc<Self>, core: &mut Core, first: Option<WcStatus>) {
        if self.state() == QpState::Error {
            return;
        }
        self.life.fail();
        self.take_inbox(core);
        if let Some(slot) = core.first_posted() {
            slot.fault = slot.fault.or(first);
        }
        self.flush_sends(core);
        self.flush_recvs(core);
        self.deliver(core);
    }

    /// The receive of a message that will not be completed is the next one again.
    fn keep_recv(&self, core: &mut Core) {
        if self.state() == QpState::Rts
            && let Some(wr) = core.rx.recv.take()
        {
            self.put_back_recv(wr);
            core.gave_back = true;
        }
    }

    pub(super) fn flush_sends(&self, core: &mut Core) {
        if let Some(stream) = &mut core.stream {
            stream.flush();
        }
        self.reap(core);
    }

    pub(super) fn flush_recvs(&self, core: &mut Core) {
        if core.withheld.is_some() {
            return;
        }
        let current = core.rx.recv.take();
        let queued = match &self.recv {
            RecvSource::Own(queue) => queue.drain(),
            RecvSource::Shared(_) | RecvSource::Twin(_) | RecvSource::Xrc(_) => VecDeque::new(),
        };
        let vendor_err = match core.ended {
            Some(EndReason::Terminated(code) | EndReason::PeerTerminated(code)) => code,
            _ => 0,
        };
        for wr in current.into_iter().chain(queued) {
            core.done.recv_urgent = true;
            core.done
                .recv
                .push(self.recv_wc(wr.id, WcStatus::WrFlushErr, vendor_err));
        }
    }

    /// After the end: sends what is owed (the Terminate), closes our direction, and waits for the peer's end.
    pub(super) fn drain(self: &Arc<Self>, core: &mut Core, link: &Llp) -> bool {
        if self.life.is_dead() {
            return false;
        }
        if !core.shut {
            match core.tx.send_all(self, link, &mut core.counters) {
                Ok(true) => {
                    self.shut(core, link);
                }
                Ok(false) => {}
                Err(_) => {
                    link.abort();
                    self.bury(core);
                    return true;
                }
            }
        }
        // Later input is ignored. But unread bytes would turn our close into a reset that overtakes the Terminate.
        if core.rx.discard(link, self.device.pool()) {
            self.bury(core);
        } else if link.local().is_some() {
            // References that were sent with the last flight: when the peer has copied them, no sender waits for them.
            link.copied(core.tx.sent);
            self.watch_again(link, true);
        }
        false
    }

    /// Start the time that the connection has from here on.
    pub(super) fn linger(&self, core: &mut Core) {
        if let Some(connected) = self.peer.connected.get() {
            let until = Instant::now() + connected.linger;
            core.linger_until = Some(until);
            core.linger_mark = core.moved();
            connected.registration.set_timer(until);
        }
    }

    /// Everything is sent: the peer sees our end.
    pub(super) fn shut(&self, core: &mut Core, link: &Llp) {
        link.shutdown_write();
        core.shut = true;
        self.linger(core);
    }

    /// The time is up: give the connection more as long as bytes move, else end it.
    pub(super) fn linger_expired(self: &Arc<Self>) {
        self.with_core(|core| {
            let due = core
                .linger_until
                .is_some_and(|until| Instant::now() >= until);
            if !due || self.life.is_dead() {
                return;
            }
            let patience = core.give_up.is_none_or(|end| Instant::now() < end);
            if patience && !core.shut && core.moved() != core.linger_mark {
                self.linger(core);
                return;
            }
            if core.ended.is_none() {
                self.end(core, EndReason::Lost);
            }
            self.bury(core);
        });
    }

    /// Nothing more will happen on the socket.
    pub(super) fn bury(&self, core: &mut Core) {
        if self.life.bury() {
            if let Some(connected) = self.peer.connected.get() {
                connected.link.abort();
                connected.registration.release(connected.link.fd());
            }
            core.tx.release(self.device.pool());
            core.rx.release(self.device.pool());
            if let Some(stream) = &mut core.stream {
                stream.shrink(0);
            }
        }
    }

    pub(super) fn announce_end(&self, reason: EndReason) {
        let hook = lock(&self.on_end).take();
        if let Some(hook) = hook {
            guarded(|| hook(reason));
        }
    }
}

/// Closing by the program: in order, at once, or by dropping the queue pair.
impl QpInner {
    pub(super) fn disconnect(self: &Arc<Self>) {
        if !self.life.close() {
            return;
        }
        self.with_core(|core| {
            if core.ended.is_some() {
                self.end_quiet(core, None);
            } else {
                self.linger(core);
                // It ends when all that was posted is known to be done.
                self.take_inbox(core);
                core.want_confirmation(true, true);
                core.confirm_if_due();
            }
        });
        self.drive(true);
        self.release_lease();
    }

    /// End at once, with a Terminate when connected.
    pub(super) fn to_error(self: &Arc<Self>) {
        self.with_core(|core| self.break_off(core, None));
    }

    /// The same, with this status for the first outstanding request.
    pub(super) fn fail(self: &Arc<Self>, status: WcStatus) {
        self.with_core(|core| self.break_off(core, Some(status)));
    }

    /// The wire is cut.
    pub(super) fn cut(self: &Arc<Self>) {
        self.with_core(|core| {
            if let Some(connected) = self.peer.connected.get() {
                connected.link.cut();
                self.end(core, EndReason::Lost);
            }
        });
    }

    fn break_off(self: &Arc<Self>, core: &mut Core, first: Option<WcStatus>) {
        let Some(connected) = self.peer.connected.get() else {
            self.life.fail();
            self.call_off_dial();
            self.flush_recvs(core);
            self.flush_unconnected(core, first);
            return;
        };
        if core.ended.is_some() {
            self.end_quiet(core, first);
            return;
        }
        if core.owes_nothing() && core.tell_received() {
            self.pump_tx(core, &connected.link);
        }
        self.take_inbox(core);
        // Requests that are done already do not fail.
        note_transmitted(core, &connected.link);
        self.reap(core);
        if let Some(slot) = core.first_posted() {
            slot.fault = slot.fault.or(first);
        }
        self.fault(core, Fault::LocalCatastrophic);
    }

    /// The connection has come about, and allows no Reads and atomics: if one was posted before it, it fails.
    pub(super) fn refuse_reads(self: &Arc<Self>) {
        self.with_core(|core| {
            self.take_inbox(core);
            if core.ended.is_some() {
                return;
            }
            let refused = core.posted().find(|slot| slot.wr.op.is_sink());
            if let Some(slot) = refused {
                slot.fault = Some(WcStatus::LocQpOpErr);
                self.fault(core, Fault::LocalCatastrophic);
            }
        });
    }

    /// The owner has dropped its handle.
    pub(super) fn destroy(self: &Arc<Self>) {
        lock(&self.on_end).take();
        self.life.orphan();
        self.drive(false);
        self.with_core(|core| {
            if self.peer.connected.get().is_none() {
                // A start-up in progress finds the queue pair ended.
                self.life.fail();
                self.call_off_dial();
            } else if core.ended.is_none() && self.state() != QpState::Closing {
                // Requests may have been posted while another thread held the lock, which then left them to us.
                if let Some(connected) = self.peer.connected.get() {
                    self.take_inbox(core);
                    core.tell_received();
                    self.pump_tx(core, &connected.link);
                }
                // The bytes of the flight are still sent, nothing more is accepted. A queue pair that is closing in order continues.
                self.end(core, EndReason::Disconnected);
            }
        });
        if let RecvSource::Shared(srq) = &self.recv {
            srq.forget(&**self);
        }
        self.leave_xrc();
        self.send_cq.detach(&**self);
        self.recv_cq.detach(&**self);
        self.release_lease();
    }

    /// Wait until no peer is in our memory because of a connection that has ended.
    pub(super) fn wait_until_left(self: &Arc<Self>) {
        if let Some(local) = self.peer.local()
            && self.with_core(|core| core.withheld.is_some())
        {
            local.wait_until_outside();
        }
    }

    /// This connects it, from now on.
    pub(crate) fn dials_by(&self, dial: Weak<dyn CallOff>) {
        *lock(&self.peer.dial) = Some(dial);
    }

    /// Cancels the dial.
    fn call_off_dial(&self) {
        let dial = lock(&self.peer.dial).take();
        if let Some(dial) = dial.and_then(|dial| dial.upgrade()) {
            dial.call_off();
        }
    }

    pub(crate) fn set_end_hook(self: &Arc<Self>, hook: EndHook) {
        *lock(&self.on_end) = Some(hook);
        let ended = self.with_core(|core| core.told_end());
        if let Some(reason) = ended {
            self.announce_end(reason);
        }
    }
}

/// The peer has ended the connection of its own accord, or it was lost: InfiniBand would not notice.
fn is_silent(reason: EndReason) -> bool {
    match reason {
        EndReason::Disconnected | EndReason::Lost => true,
        EndReason::PeerTerminated(code) => code == term_code(TermError::RdmapCatastrophic),
        EndReason::Terminated(_) | EndReason::DeviceRemoved => false,
    }
}

impl Core {
    /// Nothing is in the send queue.
    #[inline]
    pub(super) fn nothing_posted(&self) -> bool {
        self.stream.as_ref().is_none_or(|s| s.posted() == 0)
    }

    /// The program's posted requests, oldest first.
    pub(super) fn posted(&mut self) -> impl Iterator<Item = &mut Slot> {
        let stream = self.stream.iter_mut();
        stream
            .flat_map(|s| s.requests_mut())
            .filter(|slot| !slot.internal)
    }

    /// Nothing waits to be sent, answers to the peer included.
    pub(super) fn owes_nothing(&self) -> bool {
        self.stream.as_ref().is_none_or(|s| !s.has_work())
    }

    pub(super) fn first_posted(&mut self) -> Option<&mut Slot> {
        self.posted().next()
    }

    /// The reason of the end, once it may be reported. A peer that has closed behind messages that wait for their receives has ended it,
    /// too.
    pub(super) fn told_end(&self) -> Option<EndReason> {
        match self.ended {
            None if self.rx.held.closed => Some(EndReason::Disconnected),
            ended => ended.filter(|_| self.withheld.is_none()),
        }
    }

    /// Bytes that have moved so far, either way.
    fn moved(&self) -> u64 {
        self.tx.sent + self.counters.rx_direct + self.counters.rx_copied
    }
}
