//! Peers that the program has not named. An attacker that knows the endpoint's key can invent them, so all of them together have little room; and no
//! named peer is dropped because of them.

use super::{MAX_PEERS, Machine, Peer, PeerId, Refused, Sink, Unexpected};
use crate::wire::Body;

/// Peers at once that the program has not named.
const MAX_STRANGERS: usize = 1 << 10;
/// Bytes of all of them: messages without a receive, and packets that came early.
const MAX_STRANGE_BYTES: usize = 1 << 26;
/// The same for one.
const MAX_STRANGER_BYTES: usize = MAX_STRANGE_BYTES / 8;
/// The space of a message beyond its bytes: its place in a list that may be half empty, and an allocation.
const ENTRY: usize = 2 * size_of::<Unexpected>() + 32;

const _: () = assert!(MAX_STRANGERS <= MAX_PEERS);

impl Peer {
    /// Bytes that are kept of it.
    fn kept(&self) -> usize {
        self.stored * ENTRY + self.stored_bytes + self.link.kept_bytes()
    }
}

impl Machine {
    /// Adds a peer that is known only by a numbered packet. At the limit it takes the place, and the number, of one that has ended and left nothing.
    ///
    /// # Errors
    /// [`Refused::TooMany`].
    pub fn add_stranger(&mut self) -> Result<PeerId, Refused> {
        if self.strangers < MAX_STRANGERS
            && let Ok(peer) = self.add_peer()
        {
            self.peers[peer].named = false;
            self.strangers += 1;
            return Ok(peer);
        }
        let peers = &self.peers;
        let left_nothing = |&peer: &PeerId| peers[peer].kept() == 0;
        let at = self.gone_strangers.iter().position(left_nothing);
        let peer = at.and_then(|at| self.gone_strangers.remove(at));
        let peer = peer.ok_or(Refused::TooMany)?;
        self.peers[peer] = Peer {
            // It may still be in the list of peers with queued packets.
            queued: self.peers[peer].queued,
            named: false,
            ..Peer::new(self.key, self.threshold)
        };
        Ok(peer)
    }

    pub fn name(&mut self, peer: PeerId) {
        if !self.peers[peer].named {
            self.peers[peer].named = true;
            self.strangers -= 1;
            self.gone_strangers.retain(|gone| *gone != peer);
        }
    }

    /// Bytes of packets of all peers that came early and are kept.
    pub fn kept_bytes(&self) -> usize {
        self.peers.iter().map(|p| p.link.kept_bytes()).sum()
    }

    /// Nothing more is sent to a peer, or taken from it.
    pub(super) fn has_gone(&mut self, peer: PeerId) {
        let state = &mut self.peers[peer];
        state.link.clear();
        if !std::mem::replace(&mut state.gone, true) && !state.named {
            self.gone_strangers.push_back(peer);
        }
    }

    /// Whether a numbered packet would have to be stored, and strangers store as much as they may.
    pub(super) fn has_no_room(&self, peer: PeerId, seq: u32, body: &Body<'_>) -> bool {
        let state = &self.peers[peer];
        if state.named || (state.link.expects(seq) && !self.would_store(peer, body)) {
            return false;
        }
        let strangers = || self.peers.iter().filter(|p| !p.named);
        state.kept() > MAX_STRANGER_BYTES
            || strangers().map(Peer::kept).sum::<usize>() > MAX_STRANGE_BYTES
    }

    /// Whether the next packet of a peer finds no receive.
    fn would_store(&self, peer: PeerId, body: &Body<'_>) -> bool {
        match body {
            Body::Message(meta, _) | Body::Request(meta, _) => {
                !self.posted.iter().any(|p| p.want.takes(peer, meta))
            }
            Body::More(_) => {
                let coming = self.peers[peer].coming.as_ref();
                coming.is_some_and(|c| matches!(c.sink, Sink::Store(_)))
            }
            _ => false,
        }
    }
}
