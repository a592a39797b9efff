//! One connection of the connection manager (12.9): the exchange of REQ, REP and RTU that makes it, and of DREQ and DREP that ends it.
//!
//! ```text
//!  requester                                  responder
//!
//!  request()    ReqSent   -- REQ -->  Requested        requested()
//!                         <-- MRA --                   (more time)
//!               Replied   <-- REP --  RepSent          accept()
//!  ready()      Ready     -- RTU -->  Ready
//!                         <-- REJ --  Over             reject()
//!
//!  disconnect() DreqSent  -- DREQ ->  Over
//!               Over      <-- DREP --
//! ```
//!
//! A message that wants an answer is sent again until it comes. A repeated message gets its answer again, also when the connection is over:
//! keep the exchange for a while then. A REJ also ends what this side believes made: the peer gave up before our word came.
//!
//! Any host can send a request, so what it says of times only counts within limits ([`LEAST_WAIT`], [`MOST_WAIT`], [`MOST_DELAY`]). A message that
//! names a connection counts if both identifiers fit: a host that has forged its address does not learn ours.
//!
//! # Contract
//!
//! The caller finds the exchange by the identifiers in a message and gives it to [`on`](Exchange::on), calls [`expired`](Exchange::expired) at the
//! [`deadline`](Exchange::deadline), and after each call sends everything that [`take`](Exchange::take) has.

use std::collections::VecDeque;
use std::time::Duration;

use weft_wire::roce::cm::{About, Dreq, MAD_LEN, Mad, Message, Mra, Rej, Rep, Req, Rtu, reason};

use crate::dgram::Now;

/// The state of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Our request waits for its answer.
    ReqSent,
    /// The peer's request waits for [`accept`](Exchange::accept) or [`reject`](Exchange::reject).
    Requested,
    /// Our answer waits for the peer's word that it has come.
    RepSent,
    /// The peer's answer waits for [`ready`](Exchange::ready) or [`reject`](Exchange::reject).
    Replied,
    /// The connection is made.
    Ready,
    /// We end it, and wait for the peer's word.
    DreqSent,
    /// Ended, or never made.
    Over,
}

/// What the peer has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It accepts.
    Replied(Reply),
    /// It refuses.
    Rejected {
        /// One of [`reason`].
        reason: u16,
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// It has our answer: the connection is made.
    Ready,
    /// The connection is over: it has ended it, or confirms our end, or does not answer that.
    Disconnected,
    /// It does not answer.
    TimedOut,
}

/// A peer's answer to our request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its queue pair.
    pub qp: u32,
    /// The first packet sequence number that we shall send.
    pub psn: u32,
    /// Reads and atomics that it takes at once.
    pub responder_resources: u8,
    /// Reads and atomics that it sends at once.
    pub initiator_depth: u8,
    /// Our retry count for receivers that are not ready.
    pub rnr_retry: u8,
    /// Its private data.
    pub private_data: Vec<u8>,
}

type Raw = Box<[u8; MAD_LEN]>;

/// The answer to our REP is waited for at least so long, a power: 0.27 s.
pub const LEAST_WAIT: u8 = 16;
/// And at most so long: 2.1 s.
pub const MOST_WAIT: u8 = 19;
/// The longest delay that one side grants the other, a power: 69 s, which is what Linux asks for.
pub const MOST_DELAY: u8 = 24;

/// One connection in the making, or made. See the [module](self).
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    local_id: u32,
    remote_id: u32,
    /// Of the request.
    transaction: u64,
    /// The message that is sent again.
    last: Option<Raw>,
    patience: Duration,
    most_tries: u8,
    tries: u8,
    /// The peer has asked for more time for the answer.
    delayed: bool,
    due: Option<Now>,
    /// Our queue pair, once it is known, and our adapter.
    qp: Option<u32>,
    ca_guid: u64,
    out: VecDeque<Raw>,
}

/// The time of a power in a message.
pub fn timeout(power: u8) -> Duration {
    Duration::from_nanos(4096 << u32::from(power & 31))
}

impl Exchange {
    /// Asks for a connection.
    pub fn request(now: Now, transaction: u64, req: &Req<'_>) -> Self {
        let mut exchange = Self {
            phase: Phase::ReqSent,
            local_id: req.local_id,
            remote_id: 0,
            transaction,
            last: None,
            patience: timeout(req.remote_timeout),
            most_tries: req.max_cm_retries,
            tries: 0,
            delayed: false,
            due: None,
            qp: Some(req.qp),
            ca_guid: req.ca_guid,
            out: VecDeque::new(),
        };
        exchange.send_until_answered(now, transaction, Message::Req(*req));
        exchange
    }

    /// The peer asks for a connection; `local_id` is our number of it.
    pub fn requested(transaction: u64, local_id: u32, req: &Req<'_>) -> Self {
        Self {
            phase: Phase::Requested,
            local_id,
            remote_id: req.local_id,
            transaction,
            last: None,
            patience: timeout(req.local_timeout.clamp(LEAST_WAIT, MOST_WAIT)),
            most_tries: req.max_cm_retries,
            tries: 0,
            delayed: false,
            due: None,
            qp: None,
            ca_guid: 0,
            out: VecDeque::new(),
        }
    }

    /// The phase.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Our number of the connection, and the peer's, 0 while it is not known.
    pub const fn ids(&self) -> (u32, u32) {
        (self.local_id, self.remote_id)
    }

    /// The next message to send to the peer.
    pub fn take(&mut self) -> Option<Raw> {
        self.out.pop_front()
    }

    /// The time for [`expired`](Self::expired).
    pub const fn deadline(&self) -> Option<Now> {
        self.due
    }

    /// The message of the peer that waits for our answer.
    fn unanswered(&self) -> Option<About> {
        match self.phase {
            Phase::Requested => Some(About::Req),
            Phase::Replied => Some(About::Rep),
            _ => None,
        }
    }

    /// The answer to the peer's request, or our word that we are ready, will take this long, a power: the peer shall not ask again before.
    pub fn delay(&mut self, service_timeout: u8) {
        let Some(about) = self.unanswered() else {
            return;
        };
        let mra = Mra {
            local_id: self.local_id,
            remote_id: self.remote_id,
            about,
            service_timeout,
            private_data: &[],
        };
        self.answer(self.transaction, Message::Mra(mra));
    }

    /// Accepts the peer's request. The identifiers in `rep` are set here.
    pub fn accept(&mut self, now: Now, rep: &Rep<'_>) {
        if self.phase == Phase::Requested {
            self.phase = Phase::RepSent;
            (self.qp, self.ca_guid) = (Some(rep.qp), rep.ca_guid);
            let rep = Rep {
                local_id: self.local_id,
                remote_id: self.remote_id,
                ..*rep
            };
            self.send_until_answered(now, self.transaction, Message::Rep(rep));
        }
    }

    /// Refuses the peer's request, or its answer.
    pub fn reject(&mut self, reason: u16, private_data: &[u8]) {
        let Some(about) = self.unanswered() else {
            return;
        };
        let rej = Rej {
            local_id: self.local_id,
            remote_id: self.remote_id,
            about,
            reason,
            ari: &[],
            private_data,
        };
        self.over();
        self.answer(self.transaction, Message::Rej(rej));
    }

    /// Gives up a connection that we have asked for and that is not made. The peer is told: it may have accepted meanwhile.
    pub fn abandon(&mut self) {
        match self.phase {
            Phase::ReqSent => self.time_out(About::Req),
            Phase::Replied => self.reject(reason::CONSUMER, &[]),
            _ => {}
        }
    }

    /// The peer's answer is accepted: the connection is made.
    pub fn ready(&mut self, private_data: &[u8]) {
        if self.phase == Phase::Replied {
            self.phase = Phase::Ready;
            let rtu = Rtu {
                local_id: self.local_id,
                remote_id: self.remote_id,
                private_data,
            };
            self.answer(self.transaction, Message::Rtu(rtu));
        }
    }

    /// A packet of the peer came on the queue pair: it has our answer, even if its word was lost.
    pub fn heard(&mut self) -> Option<Event> {
        (self.phase == Phase::RepSent).then(|| self.made())
    }

    /// Ends the connection. `transaction` is new; `remote_qp` is the peer's queue pair.
    pub fn disconnect(&mut self, now: Now, transaction: u64, remote_qp: u32) {
        if matches!(self.phase, Phase::Ready | Phase::RepSent) {
            self.phase = Phase::DreqSent;
            let dreq = Dreq {
                local_id: self.local_id,
                remote_id: self.remote_id,
                remote_qp,
                private_data: &[],
            };
            self.send_until_answered(now, transaction, Message::Dreq(dreq));
        }
    }

    /// The time of the [`deadline`](Self::deadline) has come.
    pub fn expired(&mut self, now: Now) -> Option<Event> {
        if self.due.is_none_or(|due| now < due) {
            return None;
        }
        if self.tries > 0
            && let Some(last) = self.last.clone()
        {
            self.tries -= 1;
            self.due = Some(now + self.patience);
            self.out.push_back(last);
            return None;
        }
        match self.phase {
            Phase::ReqSent => self.time_out(About::Req),
            Phase::RepSent => self.time_out(About::Rep),
            Phase::DreqSent => {
                self.over();
                return Some(Event::Disconnected);
            }
            _ => {
                self.due = None;
                return None;
            }
        }
        Some(Event::TimedOut)
    }

    /// The peer, whose identifier we may not know, finds the connection by our adapter.
    fn time_out(&mut self, about: About) {
        let guid = self.ca_guid.to_be_bytes();
        let rej = Rej {
            local_id: self.local_id,
            remote_id: self.remote_id,
            about,
            reason: reason::TIMEOUT,
            ari: &guid,
            private_data: &[],
        };
        self.over();
        self.answer(self.transaction, Message::Rej(rej));
    }

    /// Whether this request is the one that the exchange is about.
    pub fn is_request(&self, mad: &Mad<'_>) -> bool {
        matches!(&mad.message, Message::Req(req) if req.local_id == self.remote_id)
            && mad.transaction == self.transaction
    }

    /// Whether the identifiers in a message, its sender's first, are those of this connection.
    const fn fits(&self, of_sender: u32, of_receiver: u32) -> bool {
        of_sender == self.remote_id && of_receiver == self.local_id
    }

    /// A message of the peer about this connection.
    pub fn on(&mut self, now: Now, mad: &Mad<'_>) -> Option<Event> {
        match (&mad.message, self.phase) {
            (Message::Req(_), Phase::Requested) if self.is_request(mad) => {
                // The program has not decided yet.
                self.delay(MOST_DELAY);
                None
            }
            // It did not get our answer.
            (Message::Req(_), Phase::RepSent | Phase::Ready | Phase::Over)
                if self.is_request(mad) =>
            {
                self.again();
                None
            }
            (Message::Rep(rep), Phase::ReqSent) if rep.remote_id == self.local_id => {
                self.phase = Phase::Replied;
                self.remote_id = rep.local_id;
                self.settled();
                Some(Event::Replied(Reply {
                    qp: rep.qp,
                    psn: rep.psn,
                    responder_resources: rep.responder_resources,
                    initiator_depth: rep.initiator_depth,
                    rnr_retry: rep.rnr_retry,
                    private_data: rep.private_data.to_vec(),
                }))
            }
            // The program has not said yet that it is ready.
            (Message::Rep(rep), Phase::Replied) if self.fits(rep.local_id, rep.remote_id) => {
                self.delay(MOST_DELAY);
                None
            }
            // It did not get our word.
            (Message::Rep(rep), Phase::Ready | Phase::Over)
                if self.fits(rep.local_id, rep.remote_id) =>
            {
                self.again();
                None
            }
            // We had given up before it accepted.
            (Message::Rep(rep), Phase::Over)
                if self.remote_id == 0 && rep.remote_id == self.local_id =>
            {
                self.answer(mad.transaction, unknown(rep));
                None
            }
            (Message::Rtu(rtu), Phase::RepSent) if self.fits(rtu.local_id, rtu.remote_id) => {
                Some(self.made())
            }
            (Message::Mra(mra), Phase::ReqSent | Phase::RepSent)
                if mra.remote_id == self.local_id
                    && (self.remote_id == 0 || mra.local_id == self.remote_id) =>
            {
                // Once for each message.
                if !std::mem::replace(&mut self.delayed, true) {
                    let delay = timeout(mra.service_timeout.min(MOST_DELAY));
                    self.due = Some(now + self.patience + delay);
                }
                None
            }
            (Message::Rej(rej), phase) => self.on_rej(phase, mad.transaction, rej),
            (Message::Dreq(dreq), phase)
                if phase != Phase::ReqSent
                    && self.fits(dreq.local_id, dreq.remote_id)
                    && self.qp.is_none_or(|qp| qp == dreq.remote_qp) =>
            {
                let drep = Rtu {
                    local_id: self.local_id,
                    remote_id: self.remote_id,
                    private_data: &[],
                };
                self.over();
                self.answer(mad.transaction, Message::Drep(drep));
                (phase != Phase::Over).then_some(Event::Disconnected)
            }
            (Message::Drep(drep), Phase::DreqSent) if self.fits(drep.local_id, drep.remote_id) => {
                self.over();
                Some(Event::Disconnected)
            }
            _ => None,
        }
    }

    fn on_rej(&mut self, phase: Phase, transaction: u64, rej: &Rej<'_>) -> Option<Event> {
        let fits = match phase {
            // A peer that keeps nothing of our request has no number for it.
            Phase::ReqSent => rej.remote_id == self.local_id,
            // A peer that gives up its request may not know our number. It knows the request's transaction, which others have not seen.
            Phase::Requested | Phase::RepSent if rej.remote_id == 0 => {
                rej.local_id == self.remote_id && transaction == self.transaction
            }
            Phase::Requested | Phase::RepSent => self.fits(rej.local_id, rej.remote_id),
            Phase::Replied | Phase::Ready | Phase::DreqSent => {
                self.fits(rej.local_id, rej.remote_id)
            }
            Phase::Over => false,
        };
        if !fits {
            return None;
        }
        self.over();
        Some(match phase {
            // It does not have the connection that we believed made.
            Phase::Ready | Phase::DreqSent => Event::Disconnected,
            _ => Event::Rejected {
                reason: rej.reason,
                private_data: rej.private_data.to_vec(),
            },
        })
    }

    fn made(&mut self) -> Event {
        self.phase = Phase::Ready;
        self.due = None;
        Event::Ready
    }

    /// The message that was sent until it was answered has its answer.
    fn settled(&mut self) {
        self.due = None;
        self.last = None;
    }

    fn over(&mut self) {
        self.phase = Phase::Over;
        self.settled();
    }

    fn again(&mut self) {
        self.out.extend(self.last.clone());
    }

    fn send_until_answered(&mut self, now: Now, transaction: u64, message: Message<'_>) {
        self.due = Some(now + self.patience);
        self.tries = self.most_tries;
        self.delayed = false;
        self.answer(transaction, message);
    }

    fn answer(&mut self, transaction: u64, message: Message<'_>) {
        let raw: Raw = Box::new(
            Mad {
                transaction,
                message,
            }
            .emit(),
        );
        self.last = Some(raw.clone());
        self.out.push_back(raw);
    }
}

/// Refuses the answer to a request that we do not know, or not any more.
pub fn unknown<'a>(rep: &Rep<'_>) -> Message<'a> {
    Message::Rej(Rej {
        local_id: rep.remote_id,
        remote_id: rep.local_id,
        about: About::Rep,
        reason: reason::INVALID_ID,
        ari: &[],
        private_data: &[],
    })
}
