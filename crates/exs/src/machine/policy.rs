//! Whether a stream's sender that has no advert waits for one, or takes the way through the peer's buffer at once.
//!
//! The published algorithm goes at once. Safety does not depend on it: a sender may wait as long as it likes. What is faster does depend
//! on it, and on things that neither end knows: what a copy costs, how far away the peer is, how many receives its program keeps posted. So
//! the policy tries both ways and measures. It counts bytes over busy time in windows several times as long as
//! the peer's buffer (a shorter one would see how fast the buffer fills), keeps to the faster way, and looks at the other one now and then, ever more rarely while
//! that finds nothing new. A look ends as soon as the other way is clearly slower.
//!
//! Waiting has a limit. An advert that does not come within it means that the peer's program posts no receives before data is there, or that it
//! is far away: then the way through the buffer is taken, for a number of times that doubles with each disappointment.
//!
//! Time is in nanoseconds of any steady clock, and comes from the caller.

/// Waits are at least so long before they count as in vain.
const SHORTEST_PATIENCE: u64 = 1_000_000;
const LONGEST_PATIENCE: u64 = 20_000_000;
/// A sample has at least so many transfers, and lasts at most so long.
const WINDOW_TRANSFERS: u64 = 32;
const WINDOW_TIME: u64 = 20_000_000;
const FIRST_WINDOW_TIME: u64 = 2_000_000;
/// A pause longer than this begins a new sample: a program that sends one thing after another does not pause.
const IDLE: u64 = 100_000;
/// Sends of this length on begin with waiting: until more is known, one copy fewer weighs more than a message.
const LONG: u64 = 192 << 10;
/// The way not taken is measured again after so many windows on the way that is. Long sends that wait go directly, and looks at the other way are
/// what keeps them from all doing so; short ones that wait are a surprise, which the slow start of a connection may be all there is to.
const INTERVAL: u32 = 4;
const LONG_INTERVAL: u32 = 64;
const LONGEST_INTERVAL: u32 = 512;
/// It has to have so much of the other's rate: noise alone moves nothing, and where both are as fast, direct transfers take less of the
/// receiver's time.
const MARGIN: [f64; 2] = [1.06, 1.0];
/// A look at the other way ends early when that has less than this share of the usual rate, after so long.
const HOPELESS: f64 = 0.5;
const GLANCE: u64 = 1_000_000;
/// What a look has cost is earned in so many times that time, before the next.
const EARNED: f64 = 32.0;
/// Sends that go at once after the first wait in vain, and at most.
const FIRST_DETOUR: u32 = 4;
const LONGEST_DETOUR: u32 = 4096;

/// The two ways.
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

    /// Windows until the other one is tried, when it is taken for sends of this length.
    fn interval(self, length: u64) -> u32 {
        match self {
            Way::Wait if length >= LONG => LONG_INTERVAL,
            _ => INTERVAL,
        }
    }
}

/// What a sender without an advert is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send through the peer's buffer.
    Go,
    /// Wait for an advert, and ask again at this time.
    Wait(u64),
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    begun: u64,
    bytes: u64,
    transfers: u64,
    /// The first part after a change of ways is not measured.
    settling: bool,
}

/// The policy of one direction of one connection.
#[derive(Clone, Debug)]
pub struct Policy {
    way: Way,
    /// It has been asked.
    begun: bool,
    /// Bytes a nanosecond of each way, where it has been measured.
    rate: [Option<f64>; 2],
    sample: Sample,
    window_bytes: u64,
    /// Windows until the other way is tried, and after the next try.
    until_probe: u32,
    interval: u32,
    /// A look at the other way began then.
    probing: Option<u64>,
    /// The next is not before this.
    not_before: u64,
    waiting_since: Option<u64>,
    /// Average of the waits that were not in vain.
    usual_wait: u64,
    /// Sends that go at once because waiting was in vain.
    detour: u32,
    next_detour: u32,
    idle_since: Option<u64>,
}

impl Policy {
    /// For a peer's buffer of so many bytes.
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

    /// No send waits at present: [`verdict`](Self::verdict) would say go, and need not be asked.
    pub fn goes(&self) -> bool {
        self.begun && self.way == Way::Go && self.detour == 0
    }

    /// A send waits for an advert, as far as the policy knows.
    pub fn waits(&self) -> bool {
        self.waiting_since.is_some()
    }

    /// A send with `left` bytes left has no advert, and the peer sends some.
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

    /// So many bytes more went out, in so many transfers.
    pub fn sent(&mut self, now: u64, bytes: u64, transfers: u64) {
        if let Some(since) = self.waiting_since.take() {
            let wait = now.saturating_sub(since);
            self.usual_wait = (self.usual_wait * 7 + wait) / 8;
            self.next_detour = (self.next_detour / 2).max(FIRST_DETOUR);
        }
        if self.sample.begun == 0 {
            // These bytes began to move before, nobody knows when.
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

    /// There is something to send again, whether or not it can go yet.
    pub fn busy(&mut self, now: u64) {
        if let Some(since) = self.idle_since.take()
            && now.saturating_sub(since) > IDLE
        {
            // Only what is sent without a pause says how fast a way is.
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
        // The first comparison comes soon.
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
            // One look at a way that may have changed; the way that is taken has a memory.
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

    /// Back to the usual way, for longer than before.
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

    /// A sender whose two ways have these rates in bytes a nanosecond; an advert comes after `advert` ns of waiting, if at all. Says how many of
    /// the last bytes went without an advert.
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
        // Adverts take longer than the copy that they save.
        assert!(run(10.0, 20.0, Some(100_000), 40_000) > 0.97);
    }

    #[test]
    fn a_slow_start_is_forgotten() {
        // Short sends, going three times as fast as waiting, except for the first 2 ms.
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
        // What looks cost is a thirtieth of the time at most.
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
            // After each burst of 50 nothing happens for a while.
            now += if i % 50 == 0 { 50_000_000 } else { 10 };
        }
        let rate = policy.rate[policy.way as usize].unwrap_or_default();
        assert!(rate > 7.0, "{rate} bytes a nanosecond");
    }
}
