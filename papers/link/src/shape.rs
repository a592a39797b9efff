//! The link's effect on a packet: a state machine without clock and sockets.

use std::time::Duration;

/// A link's properties, the same each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How long a packet travels, after its last bit has left.
    pub delay: Duration,
    /// The delay varies by at most this much, from one random point to the next in four times this time; it is never below
    /// zero. Packets keep their order.
    pub jitter: Duration,
    /// Bits per second of IP packets; `None`: as fast as this machine forwards.
    pub rate: Option<u64>,
    /// Bytes that may wait for the line when there is a rate; packets beyond are dropped.
    pub queue: u64,
    /// Packets lost of a million, one by one.
    pub loss: u32,
    /// Seed of jitter and loss.
    pub seed: u64,
}

impl Default for Shape {
    /// 24 ms each way, as fast as the machine forwards, 64 MiB of queue where a rate is set.
    fn default() -> Self {
        Self {
            delay: Duration::from_millis(24),
            jitter: Duration::ZERO,
            rate: None,
            queue: 64 << 20,
            loss: 0,
            seed: 1,
        }
    }
}

/// One direction. Times are since any fixed moment, and never go back.
#[derive(Debug)]
pub(crate) struct Shaper {
    shape: Shape,
    seed: u64,
    /// When the line has sent all admitted packets.
    free: Duration,
    /// When the packet admitted last arrives.
    last: Duration,
    /// Packets seen.
    seen: u64,
}

impl Shaper {
    pub(crate) fn new(shape: Shape, direction: u64) -> Self {
        Self {
            shape,
            seed: shape.seed ^ direction.rotate_left(32),
            free: Duration::ZERO,
            last: Duration::ZERO,
            seen: 0,
        }
    }

    /// When a packet of `len` bytes arrives that is sent `now`; `None` when the queue is full, and for one that is lost.
    pub(crate) fn admit(&mut self, now: Duration, len: usize) -> Option<Duration> {
        if self.shape.loss > 0 {
            self.seen += 1;
            // Complemented, so that it does not reuse the random numbers of the jitter.
            if self.point(!self.seen) < f64::from(self.shape.loss) / 5e5 - 1.0 {
                return None;
            }
        }
        let mut sent = now;
        if let Some(rate) = self.shape.rate {
            let rate = rate.max(1) as f64;
            let start = self.free.max(now);
            let waiting = start.saturating_sub(now).as_secs_f64() * rate / 8.0;
            if waiting + len as f64 > self.shape.queue as f64 {
                return None;
            }
            sent = start + seconds(len as f64 * 8.0 / rate);
            self.free = sent;
        }
        let delay = seconds(self.shape.delay.as_secs_f64() + self.jitter(now));
        self.last = self.last.max(sent.saturating_add(delay));
        Some(self.last)
    }

    /// Returns the current addition to the delay, in seconds.
    fn jitter(&self, now: Duration) -> f64 {
        let jitter = self.shape.jitter.as_secs_f64();
        if jitter == 0.0 {
            return 0.0;
        }
        // This slope is too gentle to make a packet overtake another.
        let place = now.as_secs_f64() / (4.0 * jitter);
        let (slice, share) = (place.floor(), place.fract());
        let [from, to] = [slice, slice + 1.0].map(|slice| self.point(slice as u64));
        jitter * (from + (to - from) * share)
    }

    /// A random number from -1 to 1 for each `index`, by splitmix64.
    fn point(&self, index: u64) -> f64 {
        let mut z = self
            .seed
            .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// A duration from seconds: none for negative ones, and never more than a day.
fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value.clamp(0.0, 86_400.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_fixed_delay_is_added() {
        let mut shaper = Shaper::new(Shape::default(), 0);
        assert_eq!(shaper.admit(MS, 1500), Some(25 * MS));
        assert_eq!(shaper.admit(2 * MS, 1500), Some(26 * MS));
    }

    #[test]
    fn the_rate_spaces_packets_and_the_queue_ends() {
        let shape = Shape {
            delay: 10 * MS,
            rate: Some(8_000_000),
            queue: 3000,
            ..Shape::default()
        };
        let mut shaper = Shaper::new(shape, 0);
        // 1,000 bytes at a million bytes a second need a millisecond.
        assert_eq!(shaper.admit(Duration::ZERO, 1000), Some(11 * MS));
        assert_eq!(shaper.admit(Duration::ZERO, 1000), Some(12 * MS));
        assert_eq!(shaper.admit(Duration::ZERO, 1000), Some(13 * MS));
        assert_eq!(shaper.admit(Duration::ZERO, 1000), None);
        // One has left by now.
        assert_eq!(shaper.admit(MS, 1000), Some(14 * MS));
        // The line has been idle for long: no credit is saved up.
        assert_eq!(shaper.admit(100 * MS, 1000), Some(111 * MS));
    }

    #[test]
    fn jitter_varies_within_its_bounds_keeps_the_order_and_repeats() {
        let shape = Shape {
            jitter: 5 * MS,
            ..Shape::default()
        };
        let run = |direction| {
            let mut shaper = Shaper::new(shape, direction);
            let arrivals = (0..10_000).map(|n| shaper.admit(n * MS / 10, 100).unwrap());
            arrivals.collect::<Vec<_>>()
        };
        let first = run(0);
        assert_eq!(first, run(0));
        assert_ne!(first, run(1));
        assert!(first.is_sorted());
        let (mut early, mut late) = (false, false);
        for (n, arrival) in first.iter().enumerate() {
            let took = arrival.saturating_sub(n as u32 * MS / 10);
            assert!(took >= 19 * MS && took <= 29 * MS, "{took:?}");
            early |= took < 23 * MS;
            late |= took > 25 * MS;
        }
        assert!(early && late);
    }

    #[test]
    fn as_many_are_lost_as_it_says() {
        for loss in [1_000, 10_000, 500_000] {
            let shape = Shape {
                loss,
                ..Shape::default()
            };
            let run = || {
                let mut shaper = Shaper::new(shape, 0);
                let sent = (0..200_000).map(|n| shaper.admit(n * MS / 100, 100).is_some());
                sent.collect::<Vec<_>>()
            };
            let arrived = run();
            assert_eq!(arrived, run(), "the same with the same seed");
            let lost = arrived.iter().filter(|arrived| !**arrived).count();
            let expected = 200_000 * loss as usize / 1_000_000;
            assert!(
                lost.abs_diff(expected) < expected / 4 + 10,
                "{lost} of {expected}"
            );
        }
    }

    #[test]
    fn nonsense_does_no_harm() {
        let shape = Shape {
            delay: Duration::MAX,
            jitter: Duration::MAX,
            rate: Some(0),
            queue: u64::MAX,
            loss: 0,
            seed: 0,
        };
        let mut shaper = Shaper::new(shape, 0);
        for _ in 0..100 {
            assert!(shaper.admit(Duration::ZERO, 1 << 16).is_some());
        }
    }
}
