//! The program's sends, until each has been reported as complete.

use std::collections::VecDeque;

use super::{Action, Body, Cancel, Message, OpId, Outcome, Stats, ended};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Send {
    pub(super) op: OpId,
    pub(super) len: u64,
    /// Bytes handed to the transport.
    pub(super) off: u64,
    /// All of them were sent directly.
    direct: bool,
    /// Transfers that have not completed.
    pub(super) in_flight: u32,
    /// Cancelled after a part of it had been handed over: the send ends with that part.
    cut: bool,
}

/// Sends in the order of their calls: first those that have been handed over completely, then the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Sends {
    handed: VecDeque<Send>,
    waiting: VecDeque<Send>,
    fin: Fin,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Fin {
    #[default]
    Open,
    Wanted,
    Sent,
}

impl Sends {
    pub(super) fn push(&mut self, op: OpId, len: u64) {
        self.waiting.push_back(Send {
            op,
            len,
            off: 0,
            direct: true,
            in_flight: 0,
            cut: false,
        });
    }

    /// The first send with something left to hand over.
    pub(super) fn head(&self) -> Option<&Send> {
        self.waiting.front()
    }

    /// `len` more bytes of the head are sent in one transfer. True when these are its last.
    pub(super) fn hand_over(&mut self, len: u64, directly: bool, stats: &mut Stats) -> bool {
        let Some(send) = self.waiting.front_mut() else {
            return false;
        };
        send.off += len;
        send.direct &= directly;
        send.in_flight += 1;
        let last = send.off == send.len;
        if last {
            stats.sent(send.direct);
            self.handed.extend(self.waiting.pop_front());
        }
        last
    }

    /// Like [`Self::hand_over`], but `len` bytes at `off` of the head are sent in the message that announces them.
    pub(super) fn hand_over_small(
        &mut self,
        (op, off): (OpId, u64),
        len: u32,
        credits: u16,
        stats: &mut Stats,
    ) -> Action {
        Action::SendSmall {
            op,
            off,
            len,
            header: Message {
                credits,
                body: Body::Small { len },
            },
            last: self.hand_over(len.into(), false, stats),
        }
    }

    /// The head needs no transfer.
    pub(super) fn skip(&mut self) {
        self.handed.extend(self.waiting.pop_front());
    }

    /// One transfer of a send is complete. False when there is no such send.
    pub(super) fn transferred(&mut self, op: OpId) -> bool {
        // Transfers complete in order, so the first candidate is the right one, unless the driver reports another id.
        let send = self
            .handed
            .iter_mut()
            .chain(self.waiting.front_mut())
            .find(|send| send.op == op && send.in_flight != 0);
        send.map(|send| send.in_flight -= 1).is_some()
    }

    /// Report the complete sends, in order.
    pub(super) fn complete(&mut self, done: &mut VecDeque<Action>) {
        while let Some(send) = self.handed.pop_front_if(|send| send.in_flight == 0) {
            let outcome = if send.cut {
                Outcome::Canceled
            } else {
                Outcome::Done
            };
            done.push_back(ended(send.op, send.len, outcome, None));
        }
    }

    /// `None`: no such send. A send that is partly handed over is cut there if it `may_be_cut`.
    pub(super) fn cancel(
        &mut self,
        op: OpId,
        may_be_cut: bool,
        done: &mut VecDeque<Action>,
    ) -> Option<Cancel> {
        if let Some(at) = self.waiting.iter().position(|send| send.op == op) {
            let send = &mut self.waiting[at];
            if send.off != 0 && !may_be_cut {
                return Some(Cancel::TooLate);
            }
            if send.off != 0 {
                // Only the first send can be partly sent.
                (send.len, send.cut) = (send.off, true);
                self.skip();
                self.complete(done);
                return Some(Cancel::Done);
            }
            self.waiting.remove(at);
            done.push_back(ended(op, 0, Outcome::Canceled, None));
            return Some(Cancel::Done);
        }
        let handed = self.handed.iter().any(|send| send.op == op);
        handed.then_some(Cancel::TooLate)
    }

    pub(super) fn shutdown(&mut self) {
        if self.fin == Fin::Open {
            self.fin = Fin::Wanted;
        }
    }

    pub(super) fn is_shut(&self) -> bool {
        self.fin != Fin::Open
    }

    pub(super) fn is_finished(&self) -> bool {
        self.fin == Fin::Sent
    }

    /// The half-close is due.
    pub(super) fn wants_fin(&self) -> bool {
        self.fin == Fin::Wanted && self.waiting.is_empty()
    }

    pub(super) fn fin_sent(&mut self) {
        self.fin = Fin::Sent;
    }

    /// No send or half-close is unfinished.
    pub(super) fn is_idle(&self) -> bool {
        self.handed.is_empty() && self.is_still()
    }

    pub(super) fn is_still(&self) -> bool {
        self.waiting.is_empty() && self.fin != Fin::Wanted
    }
}
