//! The sending half of the reliable mode: what one queue pair sends to another one (docs/spec/dgram.md, "Reliable mode").
//!
//! ```text
//!             push                 Welcome                 Fault(NotReady)
//!   Idle ───────────► Asking ───────────────► Open ◄──────────────────────► Held
//!     ▲                 │ nothing comes        │ │ Fault, nothing comes       │ nothing comes
//!     └─────────────────│──────────────────────┘ ▼                            │
//!     all acknowledged, └────────────────────► Failed ◄───────────────────────┘
//!     and a long pause
//! ```
//!
//! A failed pair stays failed: the driver creates another one when the program asks for it. All methods take a time that never goes back.

use std::collections::VecDeque;
use std::time::Duration;

use weft_wire::dgram::{Control, FaultCode, Flow, Packet};

use super::each;
use super::window::{Now, Outgoing, WindowConfig};

/// A flow that has been silent for this long begins again: its receiver may forget it after [`FlowsConfig::idle`](super::FlowsConfig), which is twice as
/// long.
const RENEW: Duration = Duration::from_secs(30);
/// A receiver without a receive is asked again after so long, then after twice that, …
const HOLD: Duration = Duration::from_millis(1);
/// … at most after this.
const MOST_HOLD: Duration = Duration::from_millis(100);

/// The approximate payload bytes in one call of the kernel; room for these is enough room.
const TRAIN: u32 = 64_000;

/// Settings of a [`Pair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairConfig {
    /// Of the window. [`WindowConfig::patience`] is how long a receiver that does not answer is waited for.
    pub window: WindowConfig,
    /// How long to wait for a receiver that answers, but has no receive. `None`: as long as it answers.
    pub not_ready: Option<Duration>,
    /// The longest payload of a segment, in bytes.
    pub segment: usize,
}

/// Why a pair has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The receiver does not answer.
    Unreachable,
    /// The receiver has refused a message, or (with [`FaultCode::NotReady`]) had no receive for too long.
    Refused {
        /// Why.
        code: FaultCode,
        /// Which: messages of a flow have the numbers 1, 2, …
        msn: u32,
    },
}

/// A part of a message, on its way.
#[derive(Clone, Copy, Debug)]
struct Part {
    msn: u32,
    offset: u32,
    len: u32,
}

struct Message<T> {
    token: T,
    msn: u32,
    len: u32,
}

/// The next datagram to send.
#[derive(Debug)]
pub enum Transmit<'a, T> {
    /// A control datagram.
    Control(Control),
    /// A segment.
    Segment {
        /// The message's.
        token: &'a T,
        /// The flow's incarnation.
        incarnation: u32,
        /// Number and cookie.
        packet: Packet,
        /// The message's number.
        msn: u32,
        /// The message's length.
        message: u32,
        /// The payload's place in the message.
        offset: u32,
        /// The payload's length.
        len: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// Since when, when the last question went out (`None`: it is due), and how many.
    Asking {
        since: Now,
        asked: Option<Now>,
        times: u32,
    },
    Open {
        cookie: u64,
    },
    /// The receiver has no receive: since when, until when the oldest packet is not sent again, how long the last pause was, questions without an answer.
    Held {
        cookie: u64,
        since: Now,
        until: Now,
        pause: Duration,
        unanswered: u32,
        heard: Now,
    },
    Failed(Failure),
}

/// The sends of one queue pair to another one. `T` identifies a message for the caller.
pub struct Pair<T> {
    config: PairConfig,
    /// Ours and the receiver's number, and our `Q_Key` of the receiver.
    src_qp: u32,
    dst_qp: u32,
    qkey: u32,
    incarnation: u32,
    state: State,
    window: Outgoing<Part>,
    /// Those that are not acknowledged, oldest first.
    messages: VecDeque<Message<T>>,
    /// Of the first message of which something was not sent, and how much of it was.
    next: usize,
    offset: u32,
    last_msn: u32,
    /// New segments go out until the window is full; then not before there is room for [several](Pair::fill).
    filling: bool,
    used: Now,
    resent: u64,
}

impl<T> Pair<T> {
    /// From queue pair `src_qp` to `dst_qp`, which has this `Q_Key`.
    pub fn new(config: PairConfig, src_qp: u32, dst_qp: u32, qkey: u32) -> Pair<T> {
        Pair {
            config,
            src_qp,
            dst_qp,
            qkey,
            incarnation: 0,
            state: State::Idle,
            window: Outgoing::new(config.window),
            messages: VecDeque::new(),
            next: 0,
            offset: 0,
            last_msn: 0,
            filling: true,
            used: Duration::ZERO,
            resent: 0,
        }
    }

    /// Queues a message of `len` bytes. A pair that has [failed](Pair::failure) does not take any. `random`: of the operating system's.
    pub fn push(&mut self, now: Now, token: T, len: u32, random: impl FnOnce() -> u32) {
        let pause = now.saturating_sub(self.used);
        if self.messages.is_empty() && pause >= RENEW && matches!(self.state, State::Open { .. }) {
            self.state = State::Idle;
        }
        if self.state == State::Idle {
            self.incarnation = random();
            self.resent += self.window.resent();
            self.window = Outgoing::new(self.config.window);
            self.last_msn = 0;
            self.state = State::Asking {
                since: now,
                asked: None,
                times: 0,
            };
        }
        self.used = now;
        self.last_msn = self.last_msn.wrapping_add(1);
        self.messages.push_back(Message {
            token,
            msn: self.last_msn,
            len,
        });
    }

    /// Whether nothing is queued and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    /// When it was used last.
    pub fn last_used(&self) -> Now {
        self.used
    }

    /// Segments sent again.
    pub fn resent(&self) -> u64 {
        self.resent + self.window.resent()
    }

    /// Why it has failed, if it has.
    pub fn failure(&self) -> Option<Failure> {
        match self.state {
            State::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// The caller has found that it cannot go on.
    pub fn fail(&mut self, failure: Failure) {
        self.state = State::Failed(failure);
    }

    /// Messages that were not acknowledged when it failed, oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.window.clear();
        self.next = 0;
        std::mem::take(&mut self.messages)
            .into_iter()
            .map(|m| m.token)
    }

    fn new_part(&self) -> Option<Part> {
        let message = self.messages.get(self.next)?;
        let part = each(message.len, self.config.segment).min(message.len - self.offset);
        Some(Part {
            msn: message.msn,
            offset: self.offset,
            len: part,
        })
    }

    /// Whether new segments may be sent. A receiver acknowledges everything that it finds at once by one datagram. If each acknowledgement released one
    /// segment, each segment would be a datagram with an acknowledgement from then on. So a full window is filled again when a quarter of it is free, or when
    /// all queued segments fit.
    fn fill(&mut self, part: &Part) -> bool {
        let room = self.window.room();
        self.filling &= room > 0;
        if !self.filling && room > 0 {
            let of_this = self.messages[self.next].len - part.offset;
            let waiting = of_this.div_ceil(part.len.max(1)).max(1) as usize;
            let waiting = waiting + self.messages.len() - self.next - 1;
            let train = (TRAIN / part.len.max(1)).max(1) as usize;
            let enough = (self.window.window() / 4).min(waiting).min(train);
            self.filling = room >= enough;
        }
        self.filling
    }

    /// Whether something may be sent now: the payload's length and the message's token (none for a control datagram) that [`Pair::transmit`] returns
    /// then.
    pub fn ready(&mut self, now: Now) -> Option<(u32, Option<&T>)> {
        let part = match self.state {
            State::Idle | State::Failed(_) => return None,
            State::Asking { asked, .. } => return asked.is_none().then_some((0, None)),
            State::Held { until, .. } => *self.window.oldest().filter(|_| now >= until)?.1,
            State::Open { .. } => {
                if let Some(lost) = self.window.lost() {
                    *lost
                } else {
                    let new = self.new_part()?;
                    if !self.fill(&new) {
                        return None;
                    }
                    new
                }
            }
        };
        Some((part.len, Some(&self.message_of(&part)?.token)))
    }

    /// The message of a segment in flight, which is not acknowledged.
    fn message_of(&self, part: &Part) -> Option<&Message<T>> {
        let first = self.messages.front()?.msn;
        self.messages.get(part.msn.wrapping_sub(first) as usize)
    }

    /// The datagram to send now.
    pub fn transmit(&mut self, now: Now) -> Option<Transmit<'_, T>> {
        self.used = now;
        let new = self.new_part();
        let (cookie, psn, part) = match &mut self.state {
            State::Idle | State::Failed(_) => return None,
            State::Asking { asked, times, .. } => {
                if asked.is_some() {
                    return None;
                }
                *asked = Some(now);
                *times += 1;
                let flow = self.flow();
                let qkey = self.qkey;
                return Some(Transmit::Control(Control::Hello { flow, qkey }));
            }
            State::Held {
                cookie,
                until,
                pause,
                unanswered,
                ..
            } => {
                if now < *until {
                    return None;
                }
                *unanswered += 1;
                *pause = (*pause * 2).min(MOST_HOLD);
                *until = now + *pause;
                let (psn, part) = self.window.resend_oldest(now)?;
                (*cookie, psn, *part)
            }
            State::Open { cookie } => {
                let (psn, part) = if self.window.lost().is_some() {
                    self.window.resend(now)?
                } else {
                    let part = new.filter(|_| self.window.has_room())?;
                    self.offset += part.len;
                    if self.messages[self.next].len == self.offset {
                        self.next += 1;
                        self.offset = 0;
                    }
                    self.window.send(now, part)
                };
                (*cookie, psn, *part)
            }
        };
        let message = self.message_of(&part)?;
        Some(Transmit::Segment {
            token: &message.token,
            incarnation: self.incarnation,
            packet: Packet { psn, cookie },
            msn: part.msn,
            message: message.len,
            offset: part.offset,
            len: part.len,
        })
    }

    fn flow(&self) -> Flow {
        Flow {
            dst_qp: self.dst_qp,
            src_qp: self.src_qp,
            incarnation: self.incarnation,
        }
    }

    /// A control datagram has arrived from the receiver's address. Calls `done` for each message that it acknowledges, in order. Returns whether it was
    /// about this flow.
    pub fn control(&mut self, now: Now, control: &Control, mut done: impl FnMut(T)) -> bool {
        let flow = control.flow();
        if flow.is_none_or(|flow| {
            (flow.src_qp, flow.dst_qp) != (self.dst_qp, self.src_qp)
                || flow.incarnation != self.incarnation
        }) {
            return false;
        }
        match (self.state, control) {
            (State::Asking { .. }, &Control::Welcome { cookie, .. }) => {
                self.state = State::Open { cookie };
                self.used = now;
            }
            // The receiver takes no reliable messages, or not with this key: it says so of the question already.
            (State::Asking { .. }, &Control::Fault { code, msn, .. })
                if code != FaultCode::NotReady =>
            {
                self.state = State::Failed(Failure::Refused { code, msn });
            }
            (State::Open { .. } | State::Held { .. }, &Control::Ack { psn, sack, .. }) => {
                let news = self.acknowledged(now, psn, sack, &mut done);
                if let State::Held { cookie, .. } = self.state {
                    // It has taken something, or says that it would.
                    self.state = State::Open { cookie };
                    if !news {
                        self.window.heard(now);
                    }
                    self.window.resend_all();
                }
            }
            (
                State::Open { cookie } | State::Held { cookie, .. },
                &Control::Fault { code, psn, msn, .. },
            ) => {
                self.acknowledged(now, psn, 0, &mut done);
                if code == FaultCode::NotReady {
                    self.hold(now, cookie, psn, msn);
                } else {
                    self.state = State::Failed(Failure::Refused { code, msn });
                }
            }
            _ => {}
        }
        true
    }

    fn acknowledged(&mut self, now: Now, psn: u32, sack: u64, done: &mut impl FnMut(T)) -> bool {
        let messages = &mut self.messages;
        let next = &mut self.next;
        self.window.acknowledged(now, psn, sack, |part| {
            if let Some(first) =
                messages.pop_front_if(|m| m.msn == part.msn && part.offset + part.len == m.len)
            {
                *next = next.saturating_sub(1);
                done(first.token);
            }
        })
    }

    fn hold(&mut self, now: Now, cookie: u64, psn: u32, msn: u32) {
        if self.window.oldest().is_none_or(|(oldest, _)| oldest != psn) {
            // An old one: that message was taken since.
            return;
        }
        self.window.heard(now);
        let (since, until, pause) = match self.state {
            State::Held {
                since,
                until,
                pause,
                ..
            } => (since, until, pause),
            _ => (now, now + HOLD, HOLD),
        };
        let code = FaultCode::NotReady;
        let too_long = |most| now.saturating_sub(since) >= most;
        self.state = if self.config.not_ready.is_some_and(too_long) {
            State::Failed(Failure::Refused { code, msn })
        } else {
            State::Held {
                cookie,
                since,
                until,
                pause,
                unanswered: 0,
                heard: now,
            }
        };
    }

    /// Looks at the clock; [`Pair::failure`] says afterwards whether the receiver was given up.
    pub fn tick(&mut self, now: Now) {
        let WindowConfig {
            patience, timeouts, ..
        } = self.config.window;
        let gone = match &mut self.state {
            State::Idle | State::Failed(_) => false,
            State::Asking {
                since,
                asked,
                times,
            } => {
                let gone = now.saturating_sub(*since) >= patience && *times >= timeouts;
                if asked.is_some_and(|at| now >= at + asking_again(&self.config, *times)) {
                    *asked = None;
                }
                gone
            }
            State::Held {
                unanswered, heard, ..
            } => now.saturating_sub(*heard) >= patience && *unanswered >= timeouts,
            State::Open { .. } => !self.window.tick(now),
        };
        if gone {
            self.state = State::Failed(Failure::Unreachable);
        }
    }

    /// When [`Pair::tick`] or [`Pair::transmit`] has something to do, if nothing comes before.
    pub fn next_time(&self) -> Option<Now> {
        match self.state {
            State::Idle | State::Failed(_) => None,
            State::Asking { asked, times, .. } => {
                asked.map(|at| at + asking_again(&self.config, times))
            }
            State::Held { until, .. } => Some(until),
            State::Open { .. } => self.window.next_time(),
        }
    }
}

/// How long to wait for an answer to the request.
fn asking_again(config: &PairConfig, times: u32) -> Duration {
    let WindowConfig {
        first_rto,
        most_rto,
        ..
    } = config.window;
    (first_rto * (1 << times.saturating_sub(1).min(7))).min(most_rto)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_wire::dgram::Control;

    const CONFIG: PairConfig = PairConfig {
        window: WindowConfig {
            first_window: 64,
            first_rto: Duration::from_millis(100),
            least_rto: Duration::from_millis(20),
            most_rto: Duration::from_secs(2),
            patience: Duration::from_secs(10),
            timeouts: 8,
        },
        not_ready: None,
        segment: 1400,
    };

    /// One that may send, with so many messages of 64 bytes.
    fn open(messages: u32) -> (Pair<u32>, Flow) {
        let mut pair = Pair::new(CONFIG, 1, 2, 3);
        for n in 0..messages {
            pair.push(Duration::ZERO, n, 64, || 7);
        }
        assert_eq!(sent(&mut pair), 1, "the question");
        let flow = Flow {
            dst_qp: 1,
            src_qp: 2,
            incarnation: 7,
        };
        let cookie = 9;
        pair.control(Duration::ZERO, &Control::Welcome { flow, cookie }, |_| ());
        (pair, flow)
    }

    fn sent(pair: &mut Pair<u32>) -> usize {
        let mut count = 0;
        while pair.ready(Duration::ZERO).is_some() {
            assert!(pair.transmit(Duration::ZERO).is_some());
            count += 1;
        }
        count
    }

    fn acknowledge(pair: &mut Pair<u32>, flow: Flow, psn: u32) {
        let sack = 0;
        pair.control(Duration::ZERO, &Control::Ack { flow, psn, sack }, |_| ());
    }

    /// Else each datagram would go alone, and have an acknowledgement of its own, for as long as there is something to send.
    #[test]
    fn a_full_window_is_filled_again_when_a_quarter_of_it_is_free() {
        let (mut pair, flow) = open(1000);
        assert_eq!(sent(&mut pair), 64);
        for taken in 1..=15 {
            acknowledge(&mut pair, flow, 1 + taken);
            assert_eq!(sent(&mut pair), 0, "{taken} are free");
        }
        acknowledge(&mut pair, flow, 17);
        assert_eq!(sent(&mut pair), 16);
    }

    /// Nothing comes after it that it could go with.
    #[test]
    fn what_is_left_goes_as_soon_as_all_of_it_fits() {
        let (mut pair, flow) = open(66);
        assert_eq!(sent(&mut pair), 64);
        acknowledge(&mut pair, flow, 2);
        assert_eq!(sent(&mut pair), 0);
        acknowledge(&mut pair, flow, 3);
        assert_eq!(sent(&mut pair), 2);
        pair.push(Duration::ZERO, 66, 64, || 7);
        acknowledge(&mut pair, flow, 4);
        assert_eq!(sent(&mut pair), 1);
        acknowledge(&mut pair, flow, 68);
        assert!(pair.is_idle());
    }
}
