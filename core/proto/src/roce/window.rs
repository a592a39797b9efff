//! How many packets may be on their way: a window that grows with acknowledgements, and halves at a loss or a congestion notification.

use super::distance;
use super::requester::ACK_EVERY;

/// Packets on their way at the start.
const FIRST: u32 = 32;
/// The least: among so many packets one asks for an acknowledgement.
const LEAST: u32 = ACK_EVERY;

#[derive(Debug)]
pub(super) struct Window {
    size: u32,
    most: u32,
    /// From here on it grows by one for each window that is acknowledged, and not for each packet.
    threshold: u32,
    acked: u32,
    /// It does not shrink again before this packet is acknowledged.
    until: Option<u32>,
}

impl Window {
    pub(super) fn new(most: u32) -> Self {
        let most = most.max(LEAST);
        Self {
            size: FIRST.min(most),
            most,
            threshold: most,
            acked: 0,
            until: None,
        }
    }

    pub(super) const fn size(&self) -> u32 {
        self.size
    }

    /// So many packets were acknowledged, all before `unacked`.
    pub(super) fn grow(&mut self, packets: u32, unacked: u32) {
        if self
            .until
            .is_some_and(|until| distance(unacked, until) >= 0)
        {
            self.until = None;
        }
        self.acked += packets;
        if self.size < self.threshold {
            self.size += self.acked;
            self.acked = 0;
        } else if self.acked >= self.size {
            self.size += 1;
            self.acked = 0;
        }
        self.size = self.size.min(self.most);
    }

    /// Packets were lost or delayed, of those before `fresh`.
    pub(super) fn shrink(&mut self, fresh: u32) {
        if self.until.is_none() {
            self.size = (self.size / 2).max(LEAST);
            self.threshold = self.size;
            self.acked = 0;
            self.until = Some(fresh);
        }
    }
}
