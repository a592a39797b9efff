//! How many packets may be on their way: a window that grows with acknowledgements, and shrinks at a loss or a congestion notification.
//!
//! A notification halves it, as it says that a queue is filling. A lost packet takes away a quarter: single packets are also lost without congestion, and
//! one in a thousand would keep a window that halves below forty packets, fewer than trains of full length need.

use super::distance;
use super::requester::ACK_EVERY;

/// Packets on their way at the start.
const FIRST: u32 = 32;
/// Its growth after it has shrunk.
const STEP: u32 = 2;
/// The least: among so many packets one asks for an acknowledgement.
const LEAST: u32 = ACK_EVERY;

#[derive(Debug)]
pub(super) struct Window {
    size: u32,
    most: u32,
    /// From here on it grows by [`STEP`] for each window that is acknowledged, and not by one for each packet.
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
            self.size += STEP;
            self.acked = 0;
        }
        self.size = self.size.min(self.most);
    }

    /// A packet was lost, of those before `fresh`.
    pub(super) fn lost(&mut self, fresh: u32) {
        self.shrink(self.size - self.size / 4, fresh);
    }

    /// Packets were marked, of those before `fresh`.
    pub(super) fn congested(&mut self, fresh: u32) {
        self.shrink(self.size / 2, fresh);
    }

    fn shrink(&mut self, size: u32, fresh: u32) {
        if self.until.is_none() {
            self.size = size.max(LEAST);
            self.threshold = self.size;
            self.acked = 0;
            self.until = Some(fresh);
        }
    }
}
