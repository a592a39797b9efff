//! Packets that are numbered, acknowledged and retransmitted: the sender's half ([`Outgoing`]) and the receiver's ([`Incoming`]).
//!
//! Every packet has a number, from 1 on, never 0. The receiver reports the next expected number, and which of the 64 after it have arrived.
//! A packet is retransmitted if it is not acknowledged in time (RFC 6298, with back-off), or if three later ones have arrived. A window,
//! which grows with acknowledgements and halves at a loss, bounds the packets in flight.
//!
//! What a packet is (`P`, `K`) is the caller's. Two protocols stand on this: the reliable mode of datagram queue pairs, and messages of MPI.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Time since some instant that the caller has chosen; it never goes back.
pub type Now = Duration;

/// Packets on their way at once: as many as an acknowledgement can name.
pub const WINDOW: usize = 64;
const LEAST_WINDOW: usize = 2;
/// Packets behind a missing one that have come before it is taken for lost.
const REORDERED: u32 = 3;

/// Settings of [`Outgoing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowConfig {
    /// Packets on their way at first.
    pub first_window: usize,
    /// How long the first acknowledgement is waited for.
    pub first_rto: Duration,
    /// The least that an acknowledgement is waited for.
    pub least_rto: Duration,
    /// The most, with back-off.
    pub most_rto: Duration,
    /// A peer that acknowledges nothing for so long is given up …
    pub patience: Duration,
    /// … but not before so many time-outs, one after the other.
    pub timeouts: u32,
}

impl Default for WindowConfig {
    fn default() -> Self {
        WindowConfig {
            first_window: 16,
            first_rto: Duration::from_millis(100),
            least_rto: Duration::from_millis(20),
            most_rto: Duration::from_secs(2),
            patience: Duration::from_secs(10),
            timeouts: 8,
        }
    }
}

struct Unacked<P> {
    seq: u32,
    packet: P,
    sent: Now,
    times: u32,
    /// The peer has it.
    here: bool,
    /// To be sent again.
    lost: bool,
    /// Packets behind it that have come since it was sent.
    passed: u32,
}

/// Packets to one peer.
pub struct Outgoing<P> {
    config: WindowConfig,
    next_seq: u32,
    unacked: VecDeque<Unacked<P>>,
    /// Of those, how many the peer has, and how many are to be sent again.
    here: usize,
    lost: usize,
    window: usize,
    /// Packets acknowledged since the window grew.
    grown: usize,
    /// The window does not shrink again before this number is acknowledged.
    recover: u32,
    /// Mean and mean deviation.
    rtt: Option<(Duration, Duration)>,
    backoff: u32,
    /// When the oldest packet timed out last.
    timed_out: Now,
    /// Since when nothing was acknowledged.
    waiting_since: Now,
    resent: u64,
}

impl<P> Outgoing<P> {
    /// Nothing was sent yet.
    pub fn new(config: WindowConfig) -> Outgoing<P> {
        Outgoing {
            config,
            next_seq: 1,
            unacked: VecDeque::new(),
            here: 0,
            lost: 0,
            window: config.first_window.clamp(LEAST_WINDOW, WINDOW),
            grown: 0,
            recover: 0,
            rtt: None,
            backoff: 0,
            timed_out: Duration::ZERO,
            waiting_since: Duration::ZERO,
            resent: 0,
        }
    }

    /// Packets sent again.
    pub fn resent(&self) -> u64 {
        self.resent
    }

    /// Whether everything that was sent has been acknowledged.
    pub fn is_empty(&self) -> bool {
        self.unacked.is_empty()
    }

    /// Forgets the packets in flight; the numbers continue.
    pub fn clear(&mut self) {
        self.unacked.clear();
        (self.here, self.lost) = (0, 0);
    }

    /// Whether one more packet may be in flight.
    pub fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// How many more packets may be in flight.
    pub fn room(&self) -> usize {
        let on_way = self.unacked.len() - self.here;
        let room = self.window.saturating_sub(on_way);
        // Numbers beyond the receiver's map would be refused.
        room.min(WINDOW - self.unacked.len())
    }

    /// How many packets may be in flight at once.
    pub fn window(&self) -> usize {
        self.window
    }

    fn first_lost(&self) -> Option<usize> {
        let first = || self.unacked.iter().position(|u| u.lost);
        (self.lost > 0).then(first).flatten()
    }

    /// The packet that [`Outgoing::resend`] would give.
    pub fn lost(&self) -> Option<&P> {
        self.first_lost().map(|at| &self.unacked[at].packet)
    }

    /// How often that packet has been sent; 0: there is none.
    pub fn lost_times(&self) -> u32 {
        self.first_lost().map_or(0, |at| self.unacked[at].times)
    }

    /// The oldest packet that is not acknowledged, and its number.
    pub fn oldest(&self) -> Option<(u32, &P)> {
        self.unacked.front().map(|u| (u.seq, &u.packet))
    }

    /// A packet to retransmit now, with its number; call it before [`Outgoing::send`].
    pub fn resend(&mut self, now: Now) -> Option<(u32, &mut P)> {
        let at = self.first_lost()?;
        Some(self.again(now, at))
    }

    /// The oldest packet, for a retransmission in any case.
    pub fn resend_oldest(&mut self, now: Now) -> Option<(u32, &mut P)> {
        (!self.unacked.is_empty()).then(|| self.again(now, 0))
    }

    fn again(&mut self, now: Now, at: usize) -> (u32, &mut P) {
        self.resent += 1;
        let entry = &mut self.unacked[at];
        entry.sent = now;
        entry.times += 1;
        self.lost -= usize::from(std::mem::take(&mut entry.lost));
        entry.passed = 0;
        (entry.seq, &mut entry.packet)
    }

    /// A new packet is sent now: its number, and where it is. There is [room](Outgoing::has_room) for it.
    pub fn send(&mut self, now: Now, packet: P) -> (u32, &mut P) {
        if self.unacked.is_empty() {
            self.waiting_since = now;
        }
        let seq = self.next_seq;
        self.next_seq = seq.wrapping_add(1).max(1);
        let entry = self.unacked.push_back_mut(Unacked {
            seq,
            packet,
            sent: now,
            times: 1,
            here: false,
            lost: false,
            passed: 0,
        });
        (seq, &mut entry.packet)
    }

    /// Takes in an acknowledgement: `ack` is expected next, bit i of `sack` says that `ack + 1 + i` has come. Each packet that is over is given to
    /// `done`, in order. Whether that was news. What names packets that were never sent is no acknowledgement.
    pub fn acknowledged(&mut self, now: Now, ack: u32, sack: u64, mut done: impl FnMut(P)) -> bool {
        let Some(first) = self.unacked.front() else {
            return false;
        };
        if self.next_seq.wrapping_sub(first.seq) < ack.wrapping_sub(first.seq) {
            return false;
        }
        let mut sample = None;
        let mut came = 0;
        while let Some(first) = self.unacked.pop_front_if(|u| precedes(u.seq, ack)) {
            if first.times == 1 && !first.here {
                sample = Some(now.saturating_sub(first.sent));
            }
            self.here -= usize::from(first.here);
            self.lost -= usize::from(first.lost);
            came += 1;
            done(first.packet);
        }
        let mut newest = None;
        let marked = if sack == 0 { 0 } else { self.unacked.len() };
        for entry in self.unacked.range_mut(..marked) {
            let bit = entry.seq.wrapping_sub(ack).wrapping_sub(1);
            if bit < u64::BITS && sack & 1 << bit != 0 {
                newest = Some(entry.seq);
                if !std::mem::replace(&mut entry.here, true) {
                    self.here += 1;
                    self.lost -= usize::from(std::mem::take(&mut entry.lost));
                    came += 1;
                }
            }
        }
        if came == 0 {
            return false;
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
        true
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
                self.lost += 1;
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
            None => self.config.first_rto,
            Some((mean, deviation)) => (mean + deviation * 4).max(self.config.least_rto),
        };
        (base * (1 << self.backoff.min(7))).min(self.config.most_rto)
    }

    /// Everything that the peer is not known to have is sent again.
    pub fn resend_all(&mut self) {
        for entry in self.unacked.iter_mut().filter(|u| !u.here) {
            entry.lost = true;
        }
        self.lost = self.unacked.len() - self.here;
    }

    /// The peer has shown that it is there, though it acknowledges nothing.
    pub fn heard(&mut self, now: Now) {
        self.waiting_since = now;
        self.backoff = 0;
    }

    /// Checks the timers. `false`: give the peer up.
    #[must_use]
    pub fn tick(&mut self, now: Now) -> bool {
        let rto = self.rto();
        let Some(oldest) = self.unacked.front() else {
            return true;
        };
        let waited = now.saturating_sub(self.waiting_since);
        if waited >= self.config.patience && self.backoff >= self.config.timeouts {
            return false;
        }
        if now.saturating_sub(self.timing_since(oldest)) >= rto {
            let anew = !oldest.lost;
            for entry in self.unacked.iter_mut().filter(|u| !u.here) {
                // Packets that were sent lately may still be on their way.
                let late = now.saturating_sub(entry.sent) >= rto;
                self.lost += usize::from(late && !entry.lost);
                entry.lost |= late;
            }
            self.backoff = self.backoff.saturating_add(1);
            self.timed_out = now;
            if anew {
                self.shrink();
            }
        }
        true
    }

    /// The time since which the oldest packet is waited for. A packet that the caller cannot retransmit times out all the same, so that a
    /// peer that accepts nothing is given up.
    fn timing_since(&self, oldest: &Unacked<P>) -> Now {
        if oldest.lost {
            oldest.sent.max(self.timed_out).max(self.waiting_since)
        } else {
            oldest.sent
        }
    }

    /// When [`Outgoing::tick`] has something to do.
    pub fn next_time(&self) -> Option<Now> {
        let oldest = self.unacked.front()?;
        Some(self.timing_since(oldest) + self.rto())
    }
}

/// The treatment of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is the next one.
    Next,
    /// It is early: [`Incoming::keep`] keeps it.
    Early,
    /// It has arrived before, or is beyond the window.
    Refused,
}

/// Packets from one peer.
pub struct Incoming<K> {
    expected: u32,
    early: BTreeMap<u32, K>,
}

impl<K> Default for Incoming<K> {
    fn default() -> Self {
        Incoming {
            expected: 1,
            early: BTreeMap::new(),
        }
    }
}

impl<K> Incoming<K> {
    /// The number that is expected next.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// Bit i: packet `expected + 1 + i` has come.
    pub fn sack(&self) -> u64 {
        let mut sack = 0;
        for &seq in self.early.keys() {
            // The expected one is missing: the first that can have come is the one behind it.
            if let Some(bit) = seq.wrapping_sub(self.expected).checked_sub(1)
                && bit < u64::BITS
            {
                sack |= 1 << bit;
            }
        }
        sack
    }

    /// The treatment of a packet with this number. Changes no state.
    pub fn arrived(&self, seq: u32) -> Arrival {
        let ahead = seq.wrapping_sub(self.expected);
        if ahead == 0 {
            Arrival::Next
        } else if ahead <= u64::BITS && !self.early.contains_key(&seq) {
            Arrival::Early
        } else {
            Arrival::Refused
        }
    }

    /// The expected packet has been taken.
    pub fn advance(&mut self) {
        self.expected = self.expected.wrapping_add(1).max(1);
    }

    /// Keeps an early packet, or the expected one that cannot be processed yet. Returns the packet that was kept under this number.
    pub fn keep(&mut self, seq: u32, packet: K) -> Option<K> {
        self.early.insert(seq, packet)
    }

    /// The expected packet, if it was kept; it is still expected.
    pub fn kept(&mut self) -> Option<K> {
        self.early.remove(&self.expected)
    }

    /// All that was kept is forgotten, and given out.
    pub fn clear(&mut self) -> impl Iterator<Item = K> + use<K> {
        std::mem::take(&mut self.early).into_values()
    }
}

/// Whether number `a` precedes number `b`.
fn precedes(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).wrapping_sub(1) < u32::MAX / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_was_overtaken_is_sent_again_once() {
        let mut out = Outgoing::new(WindowConfig::default());
        for n in 1..=6 {
            assert_eq!(out.send(MS, n).0, n);
        }
        let mut done = Vec::new();
        // 2 is missing, 3 to 5 have come.
        assert!(out.acknowledged(2 * MS, 2, 0b111, |n| done.push(n)));
        assert_eq!(done, [1]);
        assert_eq!(out.resend(2 * MS).map(|(seq, n)| (seq, *n)), Some((2, 2)));
        assert_eq!(out.resend(2 * MS), None);
        assert!(out.acknowledged(3 * MS, 7, 0, |n| done.push(n)));
        assert_eq!((done, out.is_empty()), (vec![1, 2, 3, 4, 5, 6], true));
    }

    #[test]
    fn what_was_never_sent_is_not_acknowledged() {
        let mut out = Outgoing::new(WindowConfig::default());
        out.send(MS, ());
        for ack in [3, 0, u32::MAX, u32::MAX / 2] {
            assert!(!out.acknowledged(MS, ack, 0, |()| panic!("{ack}")));
        }
        assert!(out.acknowledged(MS, 2, u64::MAX, |()| ()));
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let config = WindowConfig {
            patience: Duration::from_secs(3),
            ..WindowConfig::default()
        };
        let mut out = Outgoing::new(config);
        out.send(MS, ());
        let mut now = MS;
        let mut sent = 0;
        while out.tick(now) {
            sent += u32::from(out.resend(now).is_some());
            now = out.next_time().expect("something waits");
        }
        assert!(now >= config.patience && sent >= config.timeouts, "{sent}");
        assert!(now < config.patience + 8 * config.most_rto, "{now:?}");
    }

    /// The caller cannot retransmit it: its connection is stalled, or pacing delays it.
    #[test]
    fn a_silent_peer_to_which_nothing_can_be_sent_is_given_up() {
        let config = WindowConfig {
            patience: Duration::from_secs(3),
            ..WindowConfig::default()
        };
        let mut out = Outgoing::new(config);
        out.send(MS, ());
        let mut now = MS;
        while out.tick(now) {
            let next = out.next_time().expect("something waits");
            assert!(next > now, "each time-out is looked for once");
            assert!(next < config.patience + 8 * config.most_rto, "{next:?}");
            now = next;
        }
        assert!(now >= config.patience && out.resent() == 0);
    }
}
