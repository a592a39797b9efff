//! Statistics of a connection: how it sent, and why.

use weft_verbs::protect::Refused;

use crate::machine::policy::Mode;

/// How the bytes of a connection were sent, and the outcome of the sends that were meant to avoid a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendStats {
    /// The mode that the program has selected.
    pub mode: Mode,
    /// Bytes sent through the send buffer (BSDP), and the sends.
    pub buffered_bytes: u64,
    pub buffered_sends: u64,
    /// Bytes sent from the program's memory while it waited (ZSDP), and the sends.
    pub sync_bytes: u64,
    pub sync_sends: u64,
    /// Bytes sent from protected memory (AZ-SDP), and the sends. The unaligned ends are buffered bytes.
    pub async_bytes: u64,
    pub async_sends: u64,
    /// Of those sends: the memory was protected still, from the time before.
    pub still_protected: u64,
    /// Threads that had to wait for a buffer in flight.
    pub faults: u64,
    /// Bytes that were copied because the program wrote to them, or could not wait longer.
    pub copied_bytes: u64,
    /// Number of such copies, with the lock at the receiver, or before the receiver was told.
    pub copies: u64,
    /// How often the receiver held the lock.
    pub lock_lost: u64,
    /// How often asynchronous sends were suspended for a while, because of too many faults.
    pub falls: u64,
    /// Asynchronous sends that became synchronous, by reason.
    pub refused: Reasons,
    /// Bytes received through receives, fetched by RDMA Read, and written by the peer to a sink.
    pub received_bytes: u64,
    pub fetched_bytes: u64,
    /// Written to a sink.
    pub sunk_bytes: u64,
    /// Messages sent; those that only returned credits; data messages; those with bytes of several sends.
    pub messages: u64,
    /// Only credits.
    pub credit_messages: u64,
    pub data_messages: u64,
    /// Of several sends (reverse packetisation).
    pub coalesced: u64,
}

/// Counts, by the reason why memory could not be protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reasons {
    /// Too small, or not enough of it in whole pages.
    pub unaligned: u64,
    /// Not writable.
    pub read_only: u64,
    /// A shared mapping.
    pub shared: u64,
    pub stack: u64,
    /// It overlaps other memory in flight, or a thread waits for it.
    pub busy: u64,
    /// Too much memory is protected.
    pub full: u64,
    /// The program has its own handler of SIGSEGV.
    pub handler: u64,
    /// The system refused.
    pub system: u64,
}

impl Reasons {
    pub(crate) fn count(&mut self, why: Refused) {
        let count = match why {
            Refused::Unaligned => &mut self.unaligned,
            Refused::ReadOnly => &mut self.read_only,
            Refused::Shared => &mut self.shared,
            Refused::Stack => &mut self.stack,
            Refused::Busy => &mut self.busy,
            Refused::Full => &mut self.full,
            Refused::Handler => &mut self.handler,
            Refused::System => &mut self.system,
        };
        *count += 1;
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.unaligned
            + self.read_only
            + self.shared
            + self.stack
            + self.busy
            + self.full
            + self.handler
            + self.system
    }
}
