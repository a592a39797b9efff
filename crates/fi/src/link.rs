//! The packets to and from one peer, reliable and in order.
//!
//! Every packet has a number, from 1 on. The receiver says which number it expects next and which of the 64 behind that have come. What is not
//! acknowledged in time is sent again. A window, which grows with what is acknowledged and halves when something was lost, bounds what is on its way:
//! the receives and the socket's buffer of a peer are shared by all who send to it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::wire::{HEADER, Header, stamp};

/// Packets on their way at once.
const WINDOW: usize = 64;
const FIRST_WINDOW: usize = 16;
const LEAST_WINDOW: usize = 2;
/// Packets behind a missing one that have come before it is taken for lost.
const REORDERED: u32 = 3;
/// After so many packets an acknowledgement is sent at once.
const ACK_EVERY: u32 = 16;
/// Else after so long, if no packet that goes the other way carries it.
const ACK_DELAY: Duration = Duration::from_millis(1);
const FIRST_RTO: Duration = Duration::from_millis(100);
const LEAST_RTO: Duration = Duration::from_millis(20);
const MOST_RTO: Duration = Duration::from_secs(2);
/// A peer that acknowledges nothing for so long, and after so many time-outs, is given up. Both: a program may not have called for longer than that.
const PATIENCE: Duration = Duration::from_mins(2);
const TIMEOUTS: u32 = 8;

/// Time since some instant that the caller has chosen; it never goes back.
pub type Now = Duration;

struct Unacked {
    seq: u32,
    packet: Vec<u8>,
    sent: Now,
    times: u32,
    /// The peer has it.
    here: bool,
    /// To be sent again.
    lost: bool,
    /// Packets behind it that have come since it was sent.
    passed: u32,
}

/// What is to become of a packet that came.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is the next one.
    Next,
    /// It is early and is kept by [`Link::keep`].
    Early,
    /// It has come before, or is beyond what can be kept.
    Refused,
}

/// One peer's packets.
pub struct Link {
    key: u32,
    next_seq: u32,
    pending: VecDeque<Vec<u8>>,
    /// Packets queued so far.
    pushed: u64,
    unacked: VecDeque<Unacked>,
    window: usize,
    /// Packets acknowledged since the window grew.
    grown: usize,
    /// The window does not shrink again before this number is acknowledged.
    recover: u32,
    rtt: Option<(Duration, Duration)>,
    backoff: u32,
    /// Since when nothing was acknowledged.
    waiting_since: Now,
    expected: u32,
    early: BTreeMap<u32, Vec<u8>>,
    early_bytes: usize,
    unsaid: u32,
    say_at: Option<Now>,
    /// Packets sent again, for statistics.
    pub resent: u64,
}

impl Link {
    /// For an endpoint with this key.
    pub fn new(key: u32) -> Link {
        Link {
            key,
            next_seq: 1,
            pending: VecDeque::new(),
            pushed: 0,
            unacked: VecDeque::new(),
            window: FIRST_WINDOW,
            grown: 0,
            recover: 0,
            rtt: None,
            backoff: 0,
            waiting_since: Duration::ZERO,
            expected: 1,
            early: BTreeMap::new(),
            early_bytes: 0,
            unsaid: 0,
            say_at: None,
            resent: 0,
        }
    }

    /// Queues a packet.
    pub fn push(&mut self, packet: Vec<u8>) {
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

    /// Whether everything has been acknowledged.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.unacked.is_empty()
    }

    /// Forgets all that was to be sent, acknowledgements too.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.unacked.clear();
        self.unsaid = 0;
        self.say_at = None;
    }

    fn header(&mut self, seq: u32) -> Header {
        self.unsaid = 0;
        self.say_at = None;
        let mut sack = 0;
        for &seq in self.early.keys() {
            // The expected one is missing: the first that can have come is the one behind it.
            if let Some(bit) = seq.wrapping_sub(self.expected).checked_sub(1)
                && bit < u64::BITS
            {
                sack |= 1 << bit;
            }
        }
        Header {
            key: self.key,
            seq,
            ack: self.expected,
            sack,
        }
    }

    /// The next packet to send, if one may go now, and how often it has been sent with this.
    pub fn transmit(&mut self, now: Now) -> Option<(&[u8], u32)> {
        let lost = self.unacked.iter().position(|u| u.lost);
        let index = if let Some(index) = lost {
            self.resent += 1;
            index
        } else {
            let on_way = self.unacked.iter().filter(|u| !u.here).count();
            // Numbers beyond the receiver's map would be refused.
            if on_way >= self.window || self.unacked.len() >= WINDOW {
                return None;
            }
            let packet = self.pending.pop_front()?;
            if self.unacked.is_empty() {
                self.waiting_since = now;
            }
            let seq = self.next_seq;
            self.next_seq = seq.wrapping_add(1).max(1);
            self.unacked.push_back(Unacked {
                seq,
                packet,
                sent: now,
                times: 0,
                here: false,
                lost: false,
                passed: 0,
            });
            self.unacked.len() - 1
        };
        let seq = self.unacked[index].seq;
        let header = self.header(seq);
        let entry = &mut self.unacked[index];
        entry.sent = now;
        entry.times += 1;
        entry.lost = false;
        entry.passed = 0;
        stamp(&mut entry.packet, &header);
        Some((&entry.packet, entry.times))
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

    /// Takes in what a header acknowledges.
    pub fn acknowledged(&mut self, now: Now, header: &Header) {
        let before = self.unacked.len();
        let mut sample = None;
        while let Some(first) = self.unacked.front() {
            if !precedes(first.seq, header.ack) {
                break;
            }
            if first.times == 1 && !first.here {
                sample = Some(now.saturating_sub(first.sent));
            }
            self.unacked.pop_front();
        }
        let mut came = before - self.unacked.len();
        let mut newest = None;
        for entry in &mut self.unacked {
            let bit = entry.seq.wrapping_sub(header.ack).wrapping_sub(1);
            if bit < u64::BITS && header.sack & 1 << bit != 0 {
                newest = Some(entry.seq);
                if !entry.here {
                    entry.here = true;
                    entry.lost = false;
                    came += 1;
                }
            }
        }
        if came == 0 {
            return;
        }
        self.waiting_since = now;
        self.backoff = 0;
        if let Some(sample) = sample {
            self.measured(sample);
        }
        self.grown += came;
        if self.grown >= self.window {
            self.grown = 0;
            self.window = (self.window + self.window / 4 + 1).min(WINDOW);
        }
        if let Some(newest) = newest {
            self.passed(newest, u32::try_from(came).unwrap_or(u32::MAX));
        }
    }

    /// Packets as far as `newest` have come: those before it that have not may be lost.
    fn passed(&mut self, newest: u32, came: u32) {
        let mut lost = None;
        for entry in &mut self.unacked {
            if entry.here || entry.lost || !precedes(entry.seq, newest) {
                continue;
            }
            entry.passed = entry.passed.saturating_add(came);
            if entry.passed >= REORDERED && entry.times == 1 {
                entry.lost = true;
                lost = Some(entry.seq);
            }
        }
        if lost.is_some_and(|seq| !precedes(seq, self.recover)) {
            self.shrink();
        }
    }

    fn shrink(&mut self) {
        self.window = (self.window / 2).max(LEAST_WINDOW);
        self.grown = 0;
        self.recover = self.next_seq;
    }

    fn measured(&mut self, sample: Duration) {
        self.rtt = Some(match self.rtt {
            None => (sample, sample / 2),
            Some((mean, deviation)) => (
                (mean * 7 + sample) / 8,
                (deviation * 3 + mean.abs_diff(sample)) / 4,
            ),
        });
    }

    fn rto(&self) -> Duration {
        let base = match self.rtt {
            None => FIRST_RTO,
            Some((mean, deviation)) => (mean + deviation * 4).max(LEAST_RTO),
        };
        (base * (1 << self.backoff.min(7))).min(MOST_RTO)
    }

    /// Looks at the clock. `false`: the peer is to be given up.
    #[must_use]
    pub fn tick(&mut self, now: Now) -> bool {
        let rto = self.rto();
        let Some(oldest) = self.unacked.front() else {
            return true;
        };
        if now.saturating_sub(self.waiting_since) >= PATIENCE && self.backoff >= TIMEOUTS {
            return false;
        }
        if !oldest.lost && now.saturating_sub(oldest.sent) >= rto {
            for entry in self.unacked.iter_mut().filter(|u| !u.here) {
                // What went out lately may still be on its way.
                entry.lost |= now.saturating_sub(entry.sent) >= rto;
            }
            self.backoff += 1;
            self.shrink();
        }
        true
    }

    /// When [`Link::tick`] or [`Link::acknowledge`] has something to do.
    pub fn next_time(&self) -> Option<Now> {
        let resend = self.unacked.front().map(|u| u.sent + self.rto());
        resend.into_iter().chain(self.say_at).min()
    }

    /// Says what is to become of a packet with this number.
    pub fn arrived(&mut self, now: Now, seq: u32) -> Arrival {
        self.unsaid += 1;
        let at = now + ACK_DELAY;
        let ahead = seq.wrapping_sub(self.expected);
        if ahead == 0 {
            self.say_at.get_or_insert(at);
            self.expected = self.expected.wrapping_add(1).max(1);
            return Arrival::Next;
        }
        // The sender is to know at once.
        self.say_at = Some(now);
        if ahead <= u64::BITS && !self.early.contains_key(&seq) {
            return Arrival::Early;
        }
        Arrival::Refused
    }

    /// Bytes of packets that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.early_bytes
    }

    /// Keeps an early packet, from its header on.
    pub fn keep(&mut self, seq: u32, packet: &[u8]) {
        debug_assert!(packet.len() >= HEADER, "a whole packet");
        self.early_bytes += packet.len();
        self.early.insert(seq, packet.to_vec());
    }

    /// The next packet, if it was kept.
    pub fn kept(&mut self) -> Option<Vec<u8>> {
        let packet = self.early.remove(&self.expected)?;
        self.early_bytes -= packet.len();
        self.expected = self.expected.wrapping_add(1).max(1);
        Some(packet)
    }
}

/// Whether number `a` comes before number `b`.
fn precedes(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).wrapping_sub(1) < u32::MAX / 2
}
