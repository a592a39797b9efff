//! Faults on purpose: what becomes of packets on their way to the network.

use std::sync::Arc;

/// What becomes of a packet that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoceFault {
    /// It is lost.
    Drop,
    /// It is sent twice.
    Duplicate,
    /// It is sent after the one that follows it.
    Reorder,
    /// It is damaged after its ICRC was computed.
    Corrupt,
    /// It carries the mark of a switch that has met congestion (ECN).
    Mark,
}

/// Decides about the packets of a queue pair. It is called with locks held and must not block.
pub trait RoceFaults: Send + Sync {
    /// For each packet that is sent.
    fn of_packet(&self) -> Option<RoceFault>;

    /// Nothing is sent and nothing is received.
    fn is_down(&self) -> bool {
        false
    }
}

/// The faults of a queue pair, and the packets that they hold back.
pub(super) struct Faulty {
    faults: Arc<dyn RoceFaults>,
    /// It waits for the packet after it.
    late: Option<Vec<u8>>,
    /// These go before all others.
    next: Vec<Vec<u8>>,
}

/// What is left to do with a packet.
pub(super) enum Fate {
    /// Nothing: it goes.
    Goes,
    /// It is not sent, now.
    Gone,
    /// It goes by itself, and with this fault.
    Alone(RoceFault),
}

impl Faulty {
    pub(super) fn new(faults: Arc<dyn RoceFaults>) -> Faulty {
        Faulty {
            faults,
            late: None,
            next: Vec::new(),
        }
    }

    pub(super) fn is_down(&self) -> bool {
        self.faults.is_down()
    }

    /// A packet that goes now, as it was made.
    pub(super) fn take_next(&mut self) -> Option<Vec<u8>> {
        self.next.pop()
    }

    /// What becomes of this packet.
    pub(super) fn judge(&mut self, packet: &[u8]) -> Fate {
        if self.is_down() {
            return Fate::Gone;
        }
        let fault = self.faults.of_packet();
        if fault == Some(RoceFault::Reorder) && self.late.is_none() {
            self.late = Some(packet.to_vec());
            return Fate::Gone;
        }
        self.next.extend(self.late.take());
        match fault {
            Some(RoceFault::Drop) => Fate::Gone,
            Some(RoceFault::Duplicate) => {
                self.next.push(packet.to_vec());
                Fate::Goes
            }
            Some(fault @ (RoceFault::Corrupt | RoceFault::Mark)) => Fate::Alone(fault),
            Some(RoceFault::Reorder) | None => Fate::Goes,
        }
    }

    pub(super) fn clear(&mut self) {
        (self.late, self.next) = (None, Vec::new());
    }
}
