//! Making progress: one thread at a time holds the lock of a queue pair, sends, receives and delivers; other threads leave it their work.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use weft_lock::Transport;
use weft_mem::KeyGuard;

use super::confirm::Confirming;
use super::{Core, QpInner};
use crate::cq::Poller;
use crate::engine::{Drive, guarded, on_engine};
use crate::lock::lock;
use crate::transport::Llp;
use crate::types::QpState;

impl QpInner {
    /// Make progress, unless another thread is at it: then that one does ours as well.
    pub(super) fn drive(self: &Arc<Self>, receive: bool) -> Drive {
        self.drive_for(receive, None)
    }

    /// As [`QpInner::drive`], by a polling thread that takes the resulting completions.
    pub(super) fn drive_for(
        self: &Arc<Self>,
        receive: bool,
        mut poller: Option<&mut Poller<'_>>,
    ) -> Drive {
        let mut moved = false;
        let mut receive = receive;
        loop {
            let Some(core) = self.wake.take_or_leave(|| self.core.try_lock()) else {
                return if moved { Drive::Moved } else { Drive::Busy };
            };
            // Other threads rely on us for what they came for.
            receive |= self.wake.take_left();
            moved |= self.hold(core, |core| {
                self.progress(core, receive, poller.as_deref_mut())
            });
            if !self.wake.seen().is_left() {
                if self.wake.take_arm_wanted() {
                    self.rearm_and_flush();
                }
                return if moved { Drive::Moved } else { Drive::Still };
            }
            receive = true;
        }
    }

    /// Sending was blocked: the engine watches, unless an awake owner will (it checks before it sleeps).
    pub(super) fn watch_for_room(&self) {
        let seen = self.wake.seen();
        if seen.is_armed() || seen.has_sleepers() {
            self.rearm();
        }
    }

    /// Receiving continues: no watch for data.
    pub(super) fn watch_for_data(&self) {
        self.watch_for_room();
        self.send_cq.kick();
        self.recv_cq.kick();
    }

    /// Runs `f` under the lock, releases it, and sends the resulting notifications.
    pub(super) fn hold<R>(
        &self,
        mut core: KeyGuard<'_, Core>,
        f: impl FnOnce(&mut Core) -> R,
    ) -> R {
        let told_before = core.told_end().is_some();
        let out = f(&mut core);
        let ended = core.told_end().filter(|_| !told_before);
        let transport = Transport {
            blocked: core.tx.blocked,
            stopped: core.rx.held.stopped,
            closed: core.rx.held.closed,
        };
        let before = self.wake.publish(transport);
        self.note_still(&core);
        let gave_back = std::mem::take(&mut core.gave_back);
        self.wake.let_go(core);
        if transport.blocked && !before.blocked {
            self.watch_for_room();
        }
        if before.stopped && !transport.stopped {
            self.watch_for_data();
        }
        if gave_back {
            self.recv_was_put_back();
        }
        if let Some(reason) = ended {
            self.announce_end(reason);
        }
        if on_engine() {
            guarded(|| self.recv_cq.call_hook());
            if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
                guarded(|| self.send_cq.call_hook());
            }
            for cq in self.other_cqs() {
                guarded(|| cq.call_hook());
            }
        }
        out
    }

    /// Publishes the state before the lock is released.
    #[inline]
    pub(super) fn note_still(&self, core: &Core) {
        if self.glance.has_ring() {
            self.glance.set(self.is_still(core));
        }
    }

    fn is_still(&self, core: &Core) -> bool {
        core.ended.is_none()
            && core.tx.is_still()
            && !core.rx.held.waits
            && core.stream.as_ref().is_some_and(|s| !s.has_work())
            && core.confirming.as_ref().is_none_or(|c| !c.is_late())
            && self.peer.local().is_some_and(|local| !local.lends())
            && self.life.is_open()
            && self.wake.seen().posts() == 0
            && !self.posting.has_inbox.load(Ordering::Relaxed)
    }

    /// Reads something, unless another thread holds the lock.
    pub(super) fn peek<R>(self: &Arc<Self>, f: impl FnOnce(&Core) -> R) -> Option<R> {
        let core = self.core.try_lock()?;
        let seen = f(&core);
        self.wake.let_go(core);
        if self.wake.seen().is_left() {
            self.drive(true);
        }
        Some(seen)
    }

    /// Hold the lock for something else than progress, and then make the progress that others left to the holder.
    pub(super) fn with_core<R>(self: &Arc<Self>, f: impl FnOnce(&mut Core) -> R) -> R {
        let out = self.hold(self.core.lock(), f);
        if self.wake.seen().is_left() {
            self.drive(true);
        }
        out
    }

    pub(super) fn progress(
        self: &Arc<Self>,
        core: &mut Core,
        receive: bool,
        poller: Option<&mut Poller<'_>>,
    ) -> bool {
        let Some(connected) = self.peer.connected.get() else {
            if self.state() == QpState::Error {
                self.flush_unconnected(core, None);
            }
            return false;
        };
        let link = &connected.link;
        if core.ended.is_some() {
            if !self.may_tell(core) {
                return self.drain(core, link);
            }
            self.take_inbox(core);
            if self.state() == QpState::Error {
                self.flush_sends(core);
            } else {
                self.await_retry_timeout(core);
            }
            self.deliver(core);
            return self.drain(core, link);
        }
        if self.life.is_paused() {
            // In any case: a wake-up that is not consumed would fire again and again.
            link.pause();
            return false;
        }
        // Before receiving: requests of the peer behind the last message that the program has are answered before our end.
        let closing = receive && self.state() == QpState::Closing;
        self.take_inbox(core);
        core.confirm_if_due();
        let mut moved = self.pump_tx(core, link);
        if core.confirming.as_ref().is_some_and(Confirming::is_late) {
            self.reap(core);
            if core.ask_for_confirmation() {
                moved |= self.pump_tx(core, link);
            }
        }
        let mut received = false;
        if receive && core.ended.is_none() {
            received = self.pump_rx(core, link);
            moved |= received;
            if received && !on_engine() {
                self.owner.app_received.store(true, Ordering::Relaxed);
            }
            if core.confirming.is_some() {
                // A confirmation may allow the next request for one.
                self.reap(core);
                core.ask_for_confirmation();
            }
            if core.ended.is_none() {
                if closing {
                    core.tell_received();
                }
                moved |= self.pump_tx(core, link);
            }
        }
        // After all sending: references just lent add an event that a sleeping thread waits for.
        if core.ended.is_none() && link.local().is_some_and(|local| receive || local.lends()) {
            self.watch_again(link, received);
        }
        self.reap(core);
        if let Some(poller) = poller {
            self.hand_over(core, poller);
        }
        self.deliver(core);
        if closing && core.ended.is_none() {
            // Closing in order: once everything is sent, the peer sees our end. Requests posted before the close may have reached the inbox
            // after this drive emptied it; the closing thread drives once more.
            if core.nothing_posted()
                && core.owes_nothing()
                && core.tx.is_empty()
                && !core.shut
                && lock(&self.posting.inbox).is_empty()
            {
                self.shut(core, link);
            }
        }
        moved
    }

    /// After reading a transport whose wake-ups come once: a sleeping thread that was woken while another thread took the data has to be
    /// woken for the next data too. `received`: data was taken.
    pub(super) fn watch_again(&self, link: &Llp, received: bool) {
        if received {
            // Either we see the sleeping thread, or it sees what we have taken, and notifies the peer.
            fence(Ordering::SeqCst);
        }
        let seen = self.wake.seen();
        let (armed, sleepers) = (seen.is_armed(), seen.has_sleepers());
        if (!armed && !sleepers) || link.watch(self.interest()).is_some() {
            return;
        }
        if let Some(connected) = self.peer.connected.get().filter(|_| armed) {
            connected.registration.poke();
        }
        if sleepers {
            self.send_cq.kick();
            self.recv_cq.kick();
        }
    }

    /// Checks whether the peer is alive; the engine calls this while a thread polls.
    pub(crate) fn check_peer(self: &Arc<Self>) {
        if let Some(local) = self.peer.local()
            && !self.life.is_dead()
        {
            local.check();
            self.drive(true);
        }
    }

    /// The peer's process has ended.
    pub(super) fn peer_died(self: &Arc<Self>) {
        if let Some(local) = self.peer.local() {
            local.set_dead();
            self.drive(true);
        }
    }
}
