//! A sender that stays below a rate.

use std::time::{Duration, Instant};

use super::link::{Link, LinkError, Parcel};
use super::protocol::KEEPALIVE;

/// Pieces a second. The bytes of a piece go at once.
const PIECES: u64 = 20;

/// Sends parcels at a rate, in small pieces.
pub struct Pace {
    /// Bytes a second.
    rate: u64,
    /// When the next piece may go.
    next: Instant,
    /// When the peer heard of us last.
    said: Instant,
}

impl Pace {
    /// At so many bytes a second.
    pub fn new(rate: u64) -> Self {
        let now = Instant::now();
        Self {
            rate: rate.max(1),
            next: now,
            said: now,
        }
    }

    fn piece(&self) -> u32 {
        u32::try_from(self.rate / PIECES).unwrap_or(u32::MAX).max(1)
    }

    /// How long `bytes` have to wait, if they go next. Time without anything to send is not made up for.
    fn take(&mut self, now: Instant, bytes: u32) -> Duration {
        let wait = self.next.saturating_duration_since(now);
        let takes = Duration::from_secs_f64(f64::from(bytes) / self.rate as f64);
        self.next = self.next.max(now) + takes;
        wait
    }

    /// Sends all of these in order. A peer that waits for a slow block hears that we are alive.
    pub fn send_all(&mut self, link: &dyn Link, parcels: &[Parcel]) -> Result<(), LinkError> {
        for parcel in parcels {
            let message = match parcel {
                Parcel::Message(message) => message,
                Parcel::Block { slot, len, message } => {
                    let mut at = 0;
                    while at < *len {
                        let piece = self.piece().min(len - at);
                        std::thread::sleep(self.take(Instant::now(), piece));
                        link.write(*slot, at, piece)?;
                        at += piece;
                        if self.said.elapsed() >= KEEPALIVE {
                            link.keepalive()?;
                            self.said = Instant::now();
                        }
                    }
                    message
                }
            };
            link.send(message)?;
            self.said = Instant::now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenth_of_a_second_has_more_than_a_tenth_of_the_rate() {
        let mut pace = Pace::new(1 << 20);
        let piece = pace.piece();
        let start = Instant::now();
        // A second at full speed, a pause, and another second.
        let (mut now, mut sent) = (start, Vec::new());
        for i in 0..2 * PIECES {
            if i == PIECES {
                now += Duration::from_secs(10);
            }
            now += pace.take(now, piece);
            sent.push(now);
        }
        for (i, from) in sent.iter().enumerate() {
            let within = |at: &&Instant| **at < *from + Duration::from_millis(99);
            let pieces = sent[i..].iter().take_while(within).count();
            assert!(pieces as u64 * u64::from(piece) <= (1 << 20) / 10, "{i}");
        }
        assert!(now - start <= Duration::from_secs(12));
    }
}
