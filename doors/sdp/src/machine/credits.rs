//! Credits: how many messages each side may send.
//!
//! Every message takes one of the receives that its receiver has posted. Each message carries the number of posted receives (`bufs`) and
//! the number of the last message received (`ack`); the difference to the earlier state are returned credits. Three rules keep both
//! directions alive, whatever the programs do:
//!
//! * The last credit is reserved for a message that carries only credits ([`Credits::take_last`]).
//! * Data keeps its receive until the program reads it, so data is only sent while more than half of the credits are left
//!   ([`Credits::take_data`]): the other half always comes back.
//! * A message that only returns credits is due at a quarter of them, and never for a single one: an answer to every
//!   such message would never end.

use super::Violation;
use crate::wire::{Body, MIN_RECEIVES, Message};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Credits {
    /// Receives that the peer has.
    capacity: u32,
    /// Messages that we may send.
    available: u32,
    /// The number of the last message that we may send, according to the peer.
    limit: u32,
    /// Messages that the peer may send.
    peer: u32,
    /// Receives posted again that were not reported to the peer.
    owed: u32,
    /// From this number of owed credits on, a message of their own returns them.
    due: u32,
    /// Numbers of the last messages sent and heard.
    sent: u32,
    heard: u32,
}

impl Credits {
    pub(super) fn new(send: u16, recv: u16) -> Self {
        let (send, recv) = (u32::from(send), u32::from(recv));
        Credits {
            capacity: send,
            available: send,
            limit: send,
            peer: recv,
            owed: 0,
            due: (recv / 4).max(2),
            sent: 0,
            heard: 0,
        }
    }

    /// A message has come.
    pub(super) fn arrived(&mut self, message: &Message) -> Result<(), Violation> {
        if message.seq != self.heard.wrapping_add(1) {
            return Err(Violation::Sequence);
        }
        self.peer = self.peer.checked_sub(1).ok_or(Violation::NoCredit)?;
        self.heard = message.seq;
        let limit = message.ack.wrapping_add(u32::from(message.bufs));
        let returned = limit.wrapping_sub(self.limit);
        let unheard = self.sent.wrapping_sub(message.ack);
        if returned > self.capacity - self.available || unheard > self.capacity {
            return Err(Violation::Credits);
        }
        self.available += returned;
        self.limit = limit;
        Ok(())
    }

    /// A receive is posted again.
    pub(super) fn reposted(&mut self) {
        self.owed += 1;
    }

    /// For a message whose receive is posted again at once.
    pub(super) fn take(&mut self, body: Body, pending: bool) -> Option<Message> {
        (self.available > 1).then(|| self.spend(body, pending))
    }

    /// Whether data may be sent.
    pub(super) fn has_for_data(&self) -> bool {
        self.available > (self.capacity / 2).max(u32::from(MIN_RECEIVES) / 2)
    }

    /// For a message whose payload may lie in its receive for long.
    pub(super) fn take_data(&mut self, body: Body, pending: bool) -> Option<Message> {
        self.has_for_data().then(|| self.spend(body, pending))
    }

    /// For a message that only returns credits, if one is due.
    pub(super) fn take_last(&mut self, pending: bool) -> Option<Message> {
        let body = Body::Data {
            len: 0,
            urgent: false,
        };
        (self.owed >= self.due && self.available > 0).then(|| self.spend(body, pending))
    }

    fn spend(&mut self, body: Body, pending: bool) -> Message {
        self.available -= 1;
        self.sent = self.sent.wrapping_add(1);
        self.peer += self.owed;
        self.owed = 0;
        Message {
            pending,
            bufs: u16::try_from(self.peer).unwrap_or(u16::MAX),
            seq: self.sent,
            ack: self.heard,
            body,
        }
    }
}
