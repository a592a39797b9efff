//! Pacing: how much may be in flight to a receiver that reports how much it has taken.
//!
//! UDP does not show a sender that a receiver is slower: a datagram is lost if the receiver's socket is full. A sender of version 2 sends
//! probes in its stream of datagrams ([`Control::Probe`]), which the receiver answers with its position. The sender keeps the unreported
//! bytes within half of the room of the receiver's socket. It does not wait for a receiver that never answers (an older version, a lossy
//! return path).

use std::time::{Duration, Instant};

use weft_wire::dgram::Control;

/// The approximate space of a datagram in a socket's buffer beyond its bytes.
const OVERHEAD: u64 = 1280;
/// The window is never smaller: two of the longest datagrams have to fit.
const LEAST: u64 = 160 << 10;
/// Probes without an answer, one after the other, after which a receiver that has never answered is taken for one that does not.
const PATIENCE: u32 = 15;
/// The same for a receiver that has answered: datagrams in flight then count as arrived or lost.
const LONG_PATIENCE: u32 = 100;

/// Settings of a [`Pacer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacerConfig {
    /// Maximum bytes in flight, whatever the receiver reports, including the kernel's overhead for each datagram.
    pub window: u64,
    /// Most bytes on their way before the receiver's first answer.
    pub first: u64,
    /// How long to wait for an answer before the probe is repeated.
    pub answer: Duration,
}

impl Default for PacerConfig {
    fn default() -> Self {
        PacerConfig {
            window: 4 << 20,
            first: 192 << 10,
            answer: Duration::from_millis(20),
        }
    }
}

/// Too much is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// When to ask again if no report has come by then.
    pub until: Instant,
    /// A probe to send now: the last one, or the answer to it, was lost.
    pub probe: Option<Control>,
}

/// The way to one receiving port.
#[derive(Clone, Debug)]
pub struct Pacer {
    config: PacerConfig,
    cookie: u32,
    sent: u64,
    reported: u64,
    window: u64,
    /// The bytes sent at the last probe, and its time.
    probed: u64,
    probed_at: Option<Instant>,
    unanswered: u32,
    answered: bool,
    mute: bool,
}

impl Pacer {
    /// `cookie`: random.
    pub fn new(config: PacerConfig, cookie: u32) -> Pacer {
        Pacer {
            config,
            cookie,
            sent: 0,
            reported: 0,
            window: config.first.max(LEAST),
            probed: 0,
            probed_at: None,
            unanswered: 0,
            answered: false,
            mute: false,
        }
    }

    /// Whether a datagram of `len` bytes may be sent now.
    ///
    /// # Errors
    /// [`Wait`].
    pub fn may_send(&mut self, now: Instant, len: usize) -> Result<(), Wait> {
        let flight = self.sent - self.reported;
        if self.mute || flight == 0 || flight + cost(len) <= self.window {
            return Ok(());
        }
        let asked = *self.probed_at.get_or_insert(now);
        let until = asked + self.config.answer;
        if now < until {
            return Err(Wait { until, probe: None });
        }
        self.unanswered += 1;
        let patience = if self.answered {
            LONG_PATIENCE
        } else {
            PATIENCE
        };
        if self.unanswered < patience {
            self.probed = self.sent;
            self.probed_at = Some(now);
            return Err(Wait {
                until: now + self.config.answer,
                probe: Some(self.probe()),
            });
        }
        self.unanswered = 0;
        self.mute = !self.answered;
        self.reported = self.sent;
        self.probed_at = None;
        Ok(())
    }

    fn probe(&self) -> Control {
        Control::Probe {
            cookie: self.cookie,
            sent: self.sent,
        }
    }

    /// Whether any datagram may be sent, according to the last report.
    pub fn is_open(&self) -> bool {
        let flight = self.sent - self.reported;
        self.mute || flight == 0 || flight + cost(1 << 16) <= self.window
    }

    /// A datagram of `len` bytes was sent: returns the probe to send after it, if one is due.
    pub fn sent(&mut self, now: Instant, len: usize) -> Option<Control> {
        self.sent += cost(len);
        if self.mute || self.sent - self.probed < self.window / 4 {
            return None;
        }
        self.probed = self.sent;
        self.probed_at.get_or_insert(now);
        Some(self.probe())
    }

    /// A report has come from the receiver's port: whether it is an answer to what we asked, and news.
    pub fn report(&mut self, now: Instant, cookie: u32, sent: u64, room: u32) -> bool {
        if cookie != self.cookie || sent <= self.reported || sent > self.sent {
            return false;
        }
        self.reported = sent;
        self.window = (u64::from(room) / 2).clamp(LEAST, self.config.window.max(LEAST));
        self.answered = true;
        self.mute = false;
        self.unanswered = 0;
        self.probed_at = (self.probed > sent).then_some(now);
        true
    }
}

fn cost(len: usize) -> u64 {
    len as u64 + OVERHEAD
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u32 = 1 << 20;

    #[test]
    fn a_receiver_that_answers_is_not_overrun() {
        let mut pacer = Pacer::new(PacerConfig::default(), 7);
        let mut now = Instant::now();
        let (mut queued, mut most, mut delivered) = (0, 0, 0);
        let mut probe = None;
        for _ in 0..100_000 {
            now += Duration::from_micros(1);
            if let Ok(()) = pacer.may_send(now, 1000) {
                queued += cost(1000);
                most = most.max(queued);
                if let Some(Control::Probe { cookie, sent }) = pacer.sent(now, 1000) {
                    probe = Some((cookie, sent));
                }
            } else if let Some((cookie, sent)) = probe.take() {
                // The receiver takes everything only when the sender waits.
                queued = 0;
                delivered = sent;
                assert!(pacer.report(now, cookie, sent, ROOM));
                assert!(!pacer.report(now, cookie, sent, ROOM), "no news");
            }
        }
        assert!(most <= u64::from(ROOM), "{most}");
        assert!(delivered > 50_000 * 1000, "{delivered}");
    }

    #[test]
    fn a_receiver_that_never_answers_is_not_waited_for() {
        let mut pacer = Pacer::new(PacerConfig::default(), 7);
        let mut now = Instant::now();
        let mut waits = 0;
        for _ in 0..10_000 {
            while let Err(wait) = pacer.may_send(now, 1000) {
                assert!(wait.until > now);
                now = wait.until;
                waits += 1;
            }
            pacer.sent(now, 1000);
        }
        assert_eq!(waits, PATIENCE);
    }

    #[test]
    fn a_lost_answer_is_asked_for_again() {
        let mut pacer = Pacer::new(PacerConfig::default(), 7);
        let mut now = Instant::now();
        pacer.sent(now, 1000);
        assert!(pacer.report(now, 7, cost(1000), 0));
        while pacer.may_send(now, 1000).is_ok() {
            pacer.sent(now, 1000);
        }
        let Err(Wait { until, probe: None }) = pacer.may_send(now, 1000) else {
            panic!("an answer is on its way");
        };
        now = until;
        let again = pacer.may_send(now, 1000).unwrap_err().probe;
        let Some(Control::Probe { cookie, sent }) = again else {
            panic!("asked again");
        };
        assert_eq!(pacer.may_send(now, 1000).unwrap_err().probe, None);
        assert!(pacer.report(now, cookie, sent, ROOM));
        assert_eq!(pacer.may_send(now, 60_000), Ok(()));
    }

    #[test]
    fn forged_reports_change_nothing() {
        let mut pacer = Pacer::new(PacerConfig::default(), 7);
        let now = Instant::now();
        pacer.sent(now, 1000);
        assert!(!pacer.report(now, 8, 100, ROOM), "a wrong cookie");
        assert!(!pacer.report(now, 7, u64::MAX, ROOM), "more than was sent");
        assert!(!pacer.report(now, 7, 0, ROOM));
        assert!(
            pacer.report(now, 7, cost(1000), 0),
            "no room at all is taken for the least"
        );
        assert_eq!(pacer.may_send(now, 60_000), Ok(()));
    }
}
