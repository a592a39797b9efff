//! The interface between a machine and its driver.

use std::ops::Range;

use crate::wire::{Meta, Target};

pub type PeerId = usize;

/// The calls that a machine needs.
pub trait Host {
    /// Takes the next `len` bytes, or all that are left, of the memory of a receive that takes many messages, for one of them.
    fn carve(&mut self, parent: u64, len: u64) -> Part;
    /// Copies bytes into the memory of a receive. They fit.
    fn place(&mut self, recv: u64, at: u64, bytes: &[u8]);
    /// Opens the first `len` bytes of a receive's memory to RDMA Write-Record. `None`: it cannot be.
    fn open(&mut self, recv: u64, len: u64) -> Option<Target>;
    fn close(&mut self, recv: u64);
    /// Writes a range of a send's memory to a peer's, whose first byte is at `target`, with `id` as immediate data. `whole`: the range is the whole
    /// message, and nothing of it was written before. Returns true if it is written reliably, and the peer is notified at its end (`Machine::placed`),
    /// unless `Machine::unsure` reports a failure.
    fn write(
        &mut self,
        send: u64,
        peer: PeerId,
        target: Target,
        range: Range<u64>,
        id: u64,
        whole: bool,
    ) -> bool;
    /// Whether any of these writes of a send is pending.
    fn writing(&self, send: u64) -> bool;
    /// A peer would take a connection at this port, with this token.
    fn offered(&mut self, peer: PeerId, port: u16, token: u64);
    /// Something is complete.
    fn event(&mut self, event: Event);
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outbound {
    pub peer: PeerId,
    /// It was sent before, and may be lost.
    pub again: bool,
}

/// A part of the memory of a receive that takes many messages: a receive itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its number.
    pub recv: u64,
    /// Its bytes.
    pub room: u64,
    /// Nothing is left for a further message.
    pub last: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A send's memory is the program's again: the peer has the message (large ones), or is going to have it (small ones).
    Sent(u64),
    /// The peer of a send is given up.
    SendFailed(u64),
    /// A receive has a message (`meta` of `peer`); when that is longer than its memory, the memory has the first part.
    Received { recv: u64, peer: PeerId, meta: Meta },
    /// A receive's message is lost: its peer is given up, or the memory cannot be opened.
    RecvFailed { recv: u64, peer: PeerId, meta: Meta },
}

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Too much waits for this peer: again later.
    Busy,
    /// The peer was given up.
    Gone,
    /// More peers than there may be.
    TooMany,
}

/// The condition of a receive.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// Messages with tags, or those without.
    pub tagged: bool,
    pub tag: u64,
    /// The bits of the tag that do not matter.
    pub ignore: u64,
    /// From this peer; `None`: from any.
    pub peer: Option<PeerId>,
}

impl Want {
    pub(crate) fn takes(&self, peer: PeerId, meta: &Meta) -> bool {
        self.tagged == meta.tagged
            && self.peer.is_none_or(|p| p == peer)
            && (!self.tagged || (self.tag ^ meta.tag) & !self.ignore == 0)
    }
}
