//! How long the peer's acknowledgements take, and when to ask for one that does not come.
//!
//! A lost packet is noticed when a later one arrives. The last packets of a burst, and acknowledgements, have no later one: without a question they cost the
//! whole transport timer, tens of milliseconds. So the requester repeats its last packet after about two round trips. The peer answers a packet that it
//! has by acknowledging all, and one with a gap before it by a negative acknowledgement (InfiniBand 9.7.5.1.4, 9.7.5.2.8). A question uses no retry.

use std::time::Duration;

use super::distance;
use crate::dgram::Now;

/// The shortest wait: a peer may put an acknowledgement off for a moment, and its processor may be busy.
const LEAST: Duration = Duration::from_millis(4);
/// Without a measurement, the part of the transport timer that is waited.
const UNKNOWN_PART: u32 = 8;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rtt {
    /// The mean and the mean deviation, once measured (RFC 6298).
    known: Option<(Duration, Duration)>,
    /// The packet that is timed, and when it was sent.
    timed: Option<(u32, Now)>,
}

impl Rtt {
    /// It was measured.
    pub(super) const fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// A new packet goes out that asks for an acknowledgement.
    pub(super) fn sent(&mut self, psn: u32, now: Now) {
        self.timed.get_or_insert((psn, now));
    }

    /// Packets are sent again: it is not known which of them an acknowledgement is for.
    pub(super) fn again(&mut self) {
        self.timed = None;
    }

    /// Everything before `reached` is acknowledged.
    pub(super) fn acknowledged(&mut self, reached: u32, now: Now) {
        let Some((_, sent)) = self.timed.take_if(|(psn, _)| distance(reached, *psn) > 0) else {
            return;
        };
        let took = now.saturating_sub(sent);
        self.known = Some(match self.known {
            None => (took, took / 2),
            Some((mean, deviation)) => (
                (mean * 7 + took) / 8,
                (deviation * 3 + mean.abs_diff(took)) / 4,
            ),
        });
    }

    /// How long to wait before the question after so many in vain; `timer` is the transport timer.
    pub(super) fn wait(&self, timer: Duration, asked: u32) -> Duration {
        let first = match self.known {
            None => timer / UNKNOWN_PART,
            Some((mean, deviation)) => (mean * 2 + deviation * 4).max(LEAST),
        };
        first.saturating_mul(1 << asked.min(16))
    }
}
