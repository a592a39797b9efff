//! The policy for a stream sender without an advert: wait for one, or send through the peer's buffer at once.
//!
//! The published algorithm sends at once. Safety does not depend on this: a sender may wait for any time. The speed does depend
//! on it, and on facts that neither end knows: the cost of a copy, the distance of the peer, the number of receives that its program keeps posted. So
//! the policy tries both ways and measures. It counts bytes over busy time in windows several times as long as
//! the peer's buffer, because a shorter window would measure how fast the buffer fills. It keeps to the faster way and probes the other one at
//! intervals that grow while probes find nothing new. A probe ends as soon as the other way is clearly slower.
//!
//! Waiting has a limit. If no advert comes within it, the peer's program posts no receives before data is there, or the peer
//! is far away. Then the sender uses the buffer, for a number of sends that doubles with each vain wait.
//!
//! Time is in nanoseconds of any steady clock; the caller passes it.

/// The shortest and the longest wait before it counts as vain.
const SHORTEST_PATIENCE: u64 = 1_000_000;
const LONGEST_PATIENCE: u64 = 20_000_000;
/// The fewest transfers and the longest time of a sample.
const WINDOW_TRANSFERS: u64 = 32;
const WINDOW_TIME: u64 = 20_000_000;
const FIRST_WINDOW_TIME: u64 = 2_000_000;
/// A pause longer than this starts a new sample; a program that sends without a break does not pause this long.
const IDLE: u64 = 100_000;
/// Sends of at least this length start with waiting: until more is known, a saved copy outweighs an extra message.
const LONG: u64 = 192 << 10;
/// The other way is probed after this many windows on the current one. Long sends that wait go directly, and only probes of the other way
/// prevent that for some of them. That short sends are better off waiting is unusual, and may be only an effect of a connection's slow start.
const INTERVAL: u32 = 4;
const LONG_INTERVAL: u32 = 64;
const LONGEST_INTERVAL: u32 = 512;
/// The factor by which the other way's rate must exceed the current one's. It suppresses noise, and at equal rates prefers direct transfers, which
/// take less of the receiver's time.
const MARGIN: [f64; 2] = [1.06, 1.0];
/// A probe ends early when its rate is below this share of the usual rate after this time.
const HOPELESS: f64 = 0.5;
const GLANCE: u64 = 1_000_000;
/// The next probe comes no earlier than this multiple of the time that the last one lost.
const EARNED: f64 = 32.0;
/// Sends that go at once after the first vain wait, and the most after later ones.
const FIRST_DETOUR: u32 = 4;
const LONGEST_DETOUR: u32 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Go = 0,
    Wait = 1,
}

impl Way {
    fn other(self) -> Way {
        match self {
            Way::Go => Way::Wait,
            Way::Wait => Way::Go,
        }
    }

    /// Number of windows until the other way is probed, if sends have this length.
    fn interval(self, length: u64) -> u32 {
        match self {
            Way::Wait if length >= LONG => LONG_INTERVAL,
            _ => INTERVAL,
        }
    }
}

/// The decision for a sender without an advert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send through the peer's buffer.
    Go,
    /// Wait for an advert, and call again at this time.
    Wait(u64),
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    begun: u64,
    bytes: u64,
    transfers: u64,
    /// The first part after a change of ways, which is not measured.
    settling: bool,
}

/// The policy of one direction of one connection.
#[derive(Clone, Debug)]
pub struct Policy {
    way: Way,
    /// A decision has been made.
    begun: bool,
    /// Bytes per nanosecond of each way, if measured.
    rate: [Option<f64>; 2],
    sample: Sample,
    window_bytes: u64,
    /// Windows until the next probe, and the interval after it.
    until_probe: u32,
    interval: u32,
    /// The start of the current probe.
    probing: Option<u64>,
    /// The earliest time of the next probe.
    not_before: u64,
    waiting_since: Option<u64>,
    /// Average of the successful waits.
    usual_wait: u64,
    /// Remaining sends that go at once after a vain wait.
    detour: u32,
    next_detour: u32,
    idle_since: Option<u64>,
}

impl Policy {
    /// A policy for a peer with a buffer of `peer_ring` bytes.
    pub fn new(peer_ring: u32) -> Self {
        Policy {
            way: Way::Go,
            begun: false,
            rate: [None, None],
            sample: Sample::default(),
            window_bytes: u64::from(peer_ring).max(64 << 10) * 4,
            until_probe: 0,
            interval: INTERVAL,
            probing: None,
            not_before: 0,
            waiting_since: None,
            usual_wait: 0,
            detour: 0,
            next_detour: FIRST_DETOUR,
            idle_since: None,
        }
    }

    /// True if no send waits at present: [`verdict`](Self::verdict) would return `Go` and need not be called.
    pub fn goes(&self) -> bool {
        self.begun && self.way == Way::Go && self.detour == 0
    }

    /// A send waits for an advert, as far as the policy knows.
    pub fn waits(&self) -> bool {
        self.waiting_since.is_some()
    }

    /// The decision for a send with `left` bytes left and no advert, from a peer that sends adverts.
    pub fn verdict(&mut self, now: u64, left: u64) -> Verdict {
        if !std::mem::replace(&mut self.begun, true) && left >= LONG {
            self.way = Way::Wait;
            self.interval = self.way.interval(left);
            self.until_probe = self.interval;
        }
        if self.detour > 0 {
            self.detour -= 1;
            return Verdict::Go;
        }
        if self.way == Way::Go {
            return Verdict::Go;
        }
        let since = *self.waiting_since.get_or_insert(now);
        let patience = (self.usual_wait * 4).clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE);
        if now < since + patience {
            return Verdict::Wait(since + patience);
        }
        self.waiting_since = None;
        self.detour = self.next_detour;
        self.next_detour = (self.next_detour * 2).min(LONGEST_DETOUR);
        Verdict::Go
    }

    /// `bytes` more bytes were sent, in `transfers` transfers.
    pub fn sent(&mut self, now: u64, bytes: u64, transfers: u64) {
        if let Some(since) = self.waiting_since.take() {
            let wait = now.saturating_sub(since);
            self.usual_wait = (self.usual_wait * 7 + wait) / 8;
            self.next_detour = (self.next_detour / 2).max(FIRST_DETOUR);
        }
        if self.sample.begun == 0 {
            // The time at which these bytes started to move is unknown.
            self.sample.begun = now.max(1);
            return;
        }
        self.sample.bytes += bytes;
        self.sample.transfers += transfers;
        self.look(now);
    }

    /// Nothing is left to send.
    pub fn idle(&mut self, now: u64) {
        self.idle_since.get_or_insert(now);
    }

    /// There is something to send again, even if it must wait.
    pub fn busy(&mut self, now: u64) {
        if let Some(since) = self.idle_since.take()
            && now.saturating_sub(since) > IDLE
        {
            // Only continuous sending shows the speed of a way.
            self.sample = Sample {
                settling: self.sample.settling,
                ..Sample::default()
            };
        }
    }

    fn look(&mut self, now: u64) {
        let time = now.saturating_sub(self.sample.begun);
        if time == 0 {
            return;
        }
        let rate = self.sample.bytes as f64 / time as f64;
        let usual = self.rate[self.way.other() as usize];
        if self.probing.is_some() && time >= GLANCE && usual.is_some_and(|u| rate < u * HOPELESS) {
            return self.give_up_probe(now, rate);
        }
        let Sample {
            bytes,
            transfers,
            settling,
            ..
        } = self.sample;
        let full = bytes >= self.window_bytes && transfers >= WINDOW_TRANSFERS;
        // The first comparison comes early.
        let longest = if usual.is_none() {
            FIRST_WINDOW_TIME
        } else {
            WINDOW_TIME
        };
        if !(full || (time >= longest && transfers >= 8)) {
            return;
        }
        self.sample = Sample {
            begun: now.max(1),
            ..Sample::default()
        };
        if settling {
            return;
        }
        if self.probing.is_some() {
            // A probe replaces the old rate; the rate of the current way is an average.
            self.rate[self.way as usize] = Some(rate);
            if usual.is_none_or(|usual| rate <= usual * MARGIN[self.way as usize]) {
                return self.give_up_probe(now, rate);
            }
            self.probing = None;
            self.interval = self.way.interval(bytes / transfers);
            self.until_probe = self.interval;
            return;
        }
        let known = &mut self.rate[self.way as usize];
        *known = Some(known.map_or(rate, |old| old * 0.75 + rate * 0.25));
        if self.until_probe > 0 {
            self.until_probe -= 1;
        } else if now >= self.not_before {
            self.probing = Some(now);
            self.change();
        }
    }

    /// Return to the usual way, for longer than before.
    fn give_up_probe(&mut self, now: u64, rate: f64) {
        let usual = self.rate[self.way.other() as usize].unwrap_or(rate);
        let took = now - self.probing.take().unwrap_or(now);
        let lost = took as f64 * (1.0 - rate / usual).max(0.0);
        self.not_before = now + (lost * EARNED) as u64;
        self.change();
        self.interval = (self.interval * 2).min(LONGEST_INTERVAL);
        self.until_probe = self.interval;
    }

    fn change(&mut self) {
        self.way = self.way.other();
        self.sample = Sample {
            settling: true,
            ..Sample::default()
        };
        self.detour = 0;
        self.waiting_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a sender whose two ways have these rates in bytes per nanosecond; an advert comes after `advert` ns of waiting, if at all. Returns the
    /// share of the last bytes that were sent without an advert.
    fn run(go: f64, wait: f64, advert: Option<u64>, sends: u32) -> f64 {
        let mut policy = Policy::new(1 << 20);
        let len: u64 = 256 << 10;
        let mut now = 1_000;
        let mut indirect = 0;
        let last = sends / 2;
        for i in 0..sends {
            let mut went = false;
            let asked = now;
            loop {
                match policy.verdict(now, len) {
                    Verdict::Go => {
                        went = true;
                        break;
                    }
                    Verdict::Wait(until) => match advert {
                        Some(after) if asked + after <= until => {
                            now = now.max(asked + after);
                            break;
                        }
                        _ => now = until,
                    },
                }
            }
            let rate = if went { go } else { wait };
            now += (len as f64 / rate) as u64;
            policy.sent(now, len, 1);
            if i >= last && went {
                indirect += 1;
            }
        }
        f64::from(indirect) / f64::from(sends - last)
    }

    #[test]
    fn the_faster_way_is_found() {
        assert!(run(5.0, 10.0, Some(1_000), 40_000) < 0.03);
        assert!(run(10.0, 5.0, Some(1_000), 40_000) > 0.97);
        // An advert takes longer than the copy that it saves.
        assert!(run(10.0, 20.0, Some(100_000), 40_000) > 0.97);
    }

    #[test]
    fn a_slow_start_is_forgotten() {
        // Short sends. Going at once is three times as fast as waiting, except in the first 2 ms.
        let mut policy = Policy::new(1 << 20);
        let len: u64 = 32 << 10;
        let (mut now, mut tried, mut waited) = (1_000, false, 0);
        let sends = 20_000u32;
        for i in 0..sends {
            let wait = matches!(policy.verdict(now, len), Verdict::Wait(_));
            let rate = match (wait, now) {
                (true, _) => 2.5,
                (false, ..3_000_000) => 1.0,
                (false, _) => 7.5,
            };
            now += (len as f64 / rate) as u64;
            policy.sent(now, len, 1);
            waited += u32::from(wait && i >= 4_000);
            tried |= wait;
        }
        assert!(tried, "it never waited");
        assert!(waited < sends / 50, "{waited} of {sends} waited");
    }

    #[test]
    fn a_look_at_a_slow_way_is_earned() {
        // Probes cost at most a thirtieth of the time.
        let mut policy = Policy::new(1 << 20);
        let len: u64 = 32 << 10;
        let (mut now, mut lost) = (1_000, 0);
        for _ in 0..100_000 {
            let wait = matches!(policy.verdict(now, len), Verdict::Wait(_));
            let time = (len as f64 / if wait { 0.5 } else { 8.0 }) as u64;
            lost += if wait { time } else { 0 };
            now += time;
            policy.sent(now, len, 1);
        }
        assert!(lost > 0 && lost < now / 30, "{lost} of {now} ns");
    }

    #[test]
    fn a_peer_that_posts_late_is_not_waited_for() {
        assert!(run(5.0, 10.0, None, 40_000) > 0.97);
    }

    #[test]
    fn what_it_begins_with_depends_on_the_length() {
        let mut policy = Policy::new(4096);
        assert!(!policy.goes());
        assert_eq!(policy.verdict(5, LONG - 1), Verdict::Go);
        assert!(policy.goes());
        let mut policy = Policy::new(4096);
        assert_eq!(
            policy.verdict(5, LONG),
            Verdict::Wait(5 + SHORTEST_PATIENCE)
        );
        assert!(policy.waits() && !policy.goes());
    }

    #[test]
    fn of_two_ways_that_are_as_fast_it_takes_the_direct_one() {
        assert!(run(10.0, 10.2, Some(0), 40_000) < 0.02);
        assert!(run(10.0, 9.9, Some(0), 40_000) < 0.02);
    }

    #[test]
    fn pauses_are_not_measured() {
        let mut policy = Policy::new(64 << 10);
        let mut now = 1;
        for i in 1..=200 {
            now += 1000;
            policy.busy(now - 1000);
            policy.sent(now, 8 << 10, 1);
            policy.idle(now);
            // A pause follows each burst of 50.
            now += if i % 50 == 0 { 50_000_000 } else { 10 };
        }
        let rate = policy.rate[policy.way as usize].unwrap_or_default();
        assert!(rate > 7.0, "{rate} bytes a nanosecond");
    }
}
