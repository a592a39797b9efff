//! Closing by the program: in order, at once, or by dropping the queue pair.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use weft_proto::rdmap::Fault;

use super::end::EndReason;
use super::flight::note_transmitted;
use super::receives::RecvSource;
use super::{CallOff, Core, EndHook, QpInner};
use crate::lock::lock;
use crate::types::{QpState, WcStatus};

impl QpInner {
    pub(super) fn disconnect(self: &Arc<Self>) {
        let rts = QpState::Rts as u8;
        let closing = QpState::Closing as u8;
        if self
            .state
            .compare_exchange(rts, closing, Ordering::SeqCst, Ordering::SeqCst)
            .is_err()
        {
            return;
        }
        self.with_core(|core| {
            if core.ended.is_some() {
                self.end_quiet(core, None);
            } else {
                self.linger(core);
                // It ends when all that was posted is known to be done.
                self.take_inbox(core);
                self.want_confirmation(core, true, true);
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
            if let Some(connected) = self.connected.get() {
                connected.link.cut();
                self.end(core, EndReason::Lost);
            }
        });
    }

    fn break_off(self: &Arc<Self>, core: &mut Core, first: Option<WcStatus>) {
        let Some(connected) = self.connected.get() else {
            self.state.store(QpState::Error as u8, Ordering::Release);
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
        self.orphan.store(true, Ordering::SeqCst);
        self.drive(false);
        self.with_core(|core| {
            if self.connected.get().is_none() {
                // A start-up in progress finds the queue pair ended.
                self.state.store(QpState::Error as u8, Ordering::Release);
                self.call_off_dial();
            } else if core.ended.is_none() && self.state() != QpState::Closing {
                // Requests may have been posted while another thread held the lock, which then left them to us.
                if let Some(connected) = self.connected.get() {
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
        if let Some(local) = self.local()
            && self.with_core(|core| core.withheld.is_some())
        {
            local.wait_until_outside();
        }
    }

    /// This connects it, from now on.
    pub(crate) fn dials_by(&self, dial: Weak<dyn CallOff>) {
        *lock(&self.dial) = Some(dial);
    }

    /// Cancels the dial.
    fn call_off_dial(&self) {
        let dial = lock(&self.dial).take();
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
