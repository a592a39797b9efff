//! Credits: the number of messages that each end may still send.
//!
//! Every control message and every notification consumes one of the control receives that its receiver has posted. The
//! receiver reports in each of its messages how many it has posted again. Three rules keep both directions alive whatever
//! the programs do:
//!
//! * The last credit is reserved for a message that only returns credits ([`Credits::take_last`]).
//! * Data inside a message occupies its buffer as long as the program leaves it there, so it is sent only while more
//!   than half of the credits are left ([`Credits::take_small`]): the other half always comes back.
//! * A message that only returns credits is due at a quarter of them, and never for a single one: otherwise the answers to
//!   such messages would never end.

use weft_wire::exs::MIN_CREDITS;

use super::Violation;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Credits {
    /// Control receives that the peer has posted.
    capacity: u32,
    /// Messages that we may still send.
    available: u32,
    /// Messages that the peer may still send.
    peer: u32,
    /// Receives posted again, but not yet reported to the peer.
    owed: u32,
    /// The number of owed credits at which a separate message returns them.
    due: u32,
}

impl Credits {
    pub(super) fn new(send: u32, recv: u32) -> Self {
        Credits {
            capacity: send,
            available: send,
            peer: recv,
            owed: 0,
            due: (recv / 4).max(MIN_CREDITS - 1),
        }
    }

    /// A message has arrived, with credits.
    pub(super) fn arrived(&mut self, returned: u16) -> Result<(), Violation> {
        self.peer = self.peer.checked_sub(1).ok_or(Violation::NoCredit)?;
        let returned = u32::from(returned);
        if returned > self.capacity - self.available {
            return Err(Violation::Credits);
        }
        self.available += returned;
        Ok(())
    }

    /// A control receive is posted again.
    pub(super) fn reposted(&mut self) {
        self.owed += 1;
    }

    /// For a message of any kind: the credits that it returns.
    pub(super) fn take(&mut self) -> Option<u16> {
        (self.available > 1).then(|| self.spend())
    }

    /// For a message whose payload may stay in its buffer for a long time.
    pub(super) fn take_small(&mut self) -> Option<u16> {
        (self.available > (self.capacity / 2).max(MIN_CREDITS)).then(|| self.spend())
    }

    /// For a message that only returns credits, if one is due.
    pub(super) fn take_last(&mut self) -> Option<u16> {
        self.is_due().then(|| self.spend())
    }

    pub(super) fn is_due(&self) -> bool {
        self.owed >= self.due && self.available > 0
    }

    /// For a message whatever is left.
    pub(super) fn spend(&mut self) -> u16 {
        self.available -= 1;
        let returned = u16::try_from(self.owed).unwrap_or(u16::MAX);
        self.owed -= u32::from(returned);
        self.peer += u32::from(returned);
        returned
    }
}
