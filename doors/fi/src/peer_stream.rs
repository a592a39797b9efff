//! The packets to and from one peer, reliable and in order.
//!
//! Numbers, acknowledgements, window and time-outs are those of [`weft_proto::dgram`], which datagram queue pairs in the reliable mode use, too. A
//! link adds the queue of packets that wait for the window, and acknowledgements in packets of the other direction.

use std::collections::VecDeque;
use std::time::Duration;

use weft_proto::dgram::{Incoming, Outgoing, WindowConfig};

pub use weft_proto::dgram::{Arrival, Now};

use crate::wire::{HEADER, Header, stamp};

/// After so many packets an acknowledgement is sent at once.
const ACK_EVERY: u32 = 16;
/// Otherwise after this time, if no packet in the other direction carries it.
const ACK_DELAY: Duration = Duration::from_millis(1);
/// A peer that acknowledges nothing for so long is given up: a program may not have called for longer than that.
const PATIENCE: Duration = Duration::from_mins(2);

/// A peer that has never sent a packet is reported after so much time.
const SILENCE: Duration = Duration::from_secs(10);

/// Packets of a burst are sent together: a packet that is queued within this time after the previous one waits for more …
const BURST: Duration = Duration::from_micros(20);
/// … until there are so many packets, or bytes of them.
const GATHER: usize = 32;
const GATHER_BYTES: usize = 32 << 10;

/// The space of an early packet beyond its bytes.
const EARLY: usize = 64;

/// Whether a peer has sent anything yet.
enum Heard {
    /// Nothing since the first packet to it.
    Nothing {
        since: Option<Now>,
    },
    /// Nothing, and that is reported.
    Reported,
    Something,
}

/// One peer's packets.
pub struct PeerStream {
    key: u32,
    pending: VecDeque<Vec<u8>>,
    pending_bytes: usize,
    /// When the last packet with a number went.
    went: Option<Now>,
    /// Packets queued so far.
    pushed: u64,
    heard: Heard,
    outgoing: Outgoing<Vec<u8>>,
    incoming: Incoming<Vec<u8>>,
    /// The space of early packets, with overhead.
    early_bytes: usize,
    unsaid: u32,
    say_at: Option<Now>,
}

impl PeerStream {
    /// For an endpoint with this key.
    pub fn new(key: u32) -> PeerStream {
        let config = WindowConfig {
            patience: PATIENCE,
            ..WindowConfig::default()
        };
        PeerStream {
            key,
            pending: VecDeque::new(),
            pending_bytes: 0,
            went: None,
            pushed: 0,
            heard: Heard::Nothing { since: None },
            outgoing: Outgoing::new(config),
            incoming: Incoming::default(),
            early_bytes: 0,
            unsaid: 0,
            say_at: None,
        }
    }

    pub fn push(&mut self, packet: Vec<u8>) {
        self.pending_bytes += packet.len();
        self.pending.push_back(packet);
        self.pushed += 1;
    }

    /// Packets queued so far.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Packets that wait for their turn.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Whether queued packets may wait for more: a packet that was sent a moment ago is not acknowledged yet, and its acknowledgement ends the wait at
    /// the latest.
    pub fn gathers(&self, now: Now) -> bool {
        let burst = |went| now.saturating_sub(went) < BURST;
        !self.outgoing.is_empty()
            && self.went.is_some_and(burst)
            && self.pending.len() < GATHER
            && self.pending_bytes < GATHER_BYTES
            && self.outgoing.lost_times() == 0
    }

    /// Packets sent again, for statistics.
    pub fn resent(&self) -> u64 {
        self.outgoing.resent()
    }

    /// Whether everything has been acknowledged.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.outgoing.is_empty()
    }

    /// Forgets all queued packets, acknowledgements, and early packets.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.pending_bytes = 0;
        self.outgoing.clear();
        self.incoming.clear().for_each(drop);
        self.early_bytes = 0;
        self.unsaid = 0;
        self.say_at = None;
    }

    fn header(&mut self, seq: u32) -> Header {
        self.unsaid = 0;
        self.say_at = None;
        Header {
            key: self.key,
            seq,
            ack: self.incoming.expected(),
            sack: self.incoming.sack(),
        }
    }

    /// The next packet to send, if one may go now, and how often it has been sent with this.
    pub fn transmit(&mut self, now: Now) -> Option<(&[u8], u32)> {
        let times = self.outgoing.lost_times();
        if times == 0 && (self.pending.is_empty() || !self.outgoing.has_room()) {
            return None;
        }
        let header = self.header(0);
        let (seq, packet) = if times > 0 {
            self.outgoing.resend(now)?
        } else {
            let packet = self.pending.pop_front()?;
            self.pending_bytes -= packet.len();
            self.went = Some(now);
            if let Heard::Nothing { since } = &mut self.heard {
                since.get_or_insert(now);
            }
            self.outgoing.send(now, packet)
        };
        stamp(packet, &Header { seq, ..header });
        Some((packet, times + 1))
    }

    /// The header of an acknowledgement, if one is due; `at_once`: also when it could wait for company.
    pub fn acknowledge(&mut self, now: Now, at_once: bool) -> Option<Header> {
        let due = self.say_at.is_some_and(|at| at_once || now >= at) || self.unsaid >= ACK_EVERY;
        due.then(|| self.header(0))
    }

    /// A header for a packet that has no number.
    pub fn unnumbered(&mut self) -> Header {
        self.header(0)
    }

    /// Processes the acknowledgement in a header.
    pub fn acknowledged(&mut self, now: Now, header: &Header) {
        self.heard = Heard::Something;
        self.outgoing
            .acknowledged(now, header.ack, header.sack, drop);
    }

    /// Checks the timers. `false`: give the peer up.
    #[must_use]
    pub fn tick(&mut self, now: Now) -> bool {
        self.outgoing.tick(now)
    }

    /// Whether the peer has not sent a packet for long, and this is the first time that it is said.
    pub fn is_silent(&mut self, now: Now) -> bool {
        let silent = matches!(self.heard, Heard::Nothing { since: Some(since) } if now.saturating_sub(since) >= SILENCE);
        if silent {
            self.heard = Heard::Reported;
        }
        silent
    }

    /// When [`PeerStream::tick`] or [`PeerStream::acknowledge`] has something to do.
    pub fn next_time(&self) -> Option<Now> {
        self.outgoing
            .next_time()
            .into_iter()
            .chain(self.say_at)
            .min()
    }

    /// Whether this is the number of the next packet.
    pub fn expects(&self, seq: u32) -> bool {
        self.incoming.expected() == seq
    }

    /// Decides the treatment of a packet with this number.
    pub fn arrived(&mut self, now: Now, seq: u32) -> Arrival {
        self.unsaid += 1;
        let arrival = self.incoming.arrived(seq);
        if arrival == Arrival::Next {
            self.say_at.get_or_insert(now + ACK_DELAY);
            self.incoming.advance();
        } else {
            // The sender is to know at once.
            self.say_at = Some(now);
        }
        arrival
    }

    /// Bytes of packets that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.early_bytes
    }

    /// Keeps an early packet, from its header on.
    pub fn keep(&mut self, seq: u32, packet: &[u8]) {
        debug_assert!(packet.len() >= HEADER, "a whole packet");
        self.early_bytes += packet.len() + EARLY;
        self.incoming.keep(seq, packet.to_vec());
    }

    /// The next packet, if it was kept.
    pub fn kept(&mut self) -> Option<Vec<u8>> {
        let packet = self.incoming.kept()?;
        self.early_bytes -= packet.len() + EARLY;
        self.incoming.advance();
        Some(packet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Body, encode};

    #[test]
    fn only_what_goes_in_a_burst_waits() {
        let mut link = PeerStream::new(1);
        let now = Duration::from_secs(1);
        link.push(encode(&Body::Ack));
        assert!(!link.gathers(now), "the first goes at once");
        assert!(link.transmit(now).is_some());
        link.push(encode(&Body::Ack));
        assert!(link.gathers(now));
        assert!(!link.gathers(now + BURST));
        for _ in 1..GATHER {
            link.push(encode(&Body::Ack));
        }
        assert!(!link.gathers(now), "enough of them");
    }

    #[test]
    fn a_peer_that_never_answers_is_reported_once() {
        let now = Duration::from_secs(1);
        let sent = || {
            let mut link = PeerStream::new(1);
            assert!(!link.is_silent(now + SILENCE), "nothing went there");
            link.push(encode(&Body::Ack));
            assert!(link.transmit(now).is_some());
            link
        };
        let mut link = sent();
        assert!(!link.is_silent(now + SILENCE / 2));
        assert!(link.is_silent(now + SILENCE));
        assert!(!link.is_silent(now + 2 * SILENCE));
        let mut link = sent();
        let header = Header {
            key: 2,
            seq: 0,
            ack: 0,
            sack: 0,
        };
        link.acknowledged(now, &header);
        assert!(!link.is_silent(now + SILENCE), "it has sent something");
    }

    #[test]
    fn nothing_waits_for_who_has_acknowledged_all() {
        let mut link = PeerStream::new(1);
        let now = Duration::from_secs(1);
        link.push(encode(&Body::Ack));
        assert!(link.transmit(now).is_some());
        link.push(encode(&Body::Ack));
        let (next, _) = link.outgoing.oldest().unwrap();
        let header = Header {
            key: 2,
            seq: 0,
            ack: next.wrapping_add(1),
            sack: 0,
        };
        link.acknowledged(now, &header);
        assert!(!link.gathers(now));
    }
}
