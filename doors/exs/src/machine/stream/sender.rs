//! The sending half (fig. 2).

use std::collections::VecDeque;

use weft_wire::exs::{Advert, Body, Imm, Mode, Remote, Transfer};

use super::is_direct;
use crate::machine::sends::Sends;
use crate::machine::{
    Action, Config, MAX_ADVERTS, MAX_TRANSFER, OpId, Refused, Rules, Shared, Stats, Violation,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::machine) struct Sender {
    pub(in crate::machine) sends: Sends,
    /// `S_s`: bytes sent.
    seq: u64,
    /// `P_s`.
    phase: u64,
    /// `q_A`; `memory` of the head is the unused rest.
    adverts: VecDeque<Advert>,
    /// The phase of the last advert that arrived.
    advert_phase: u64,
    ring: Option<Ring>,
    small: u64,
    mode: Mode,
    /// The peer waits for a [`Body::Retracted`].
    retracted: bool,
    rules: Rules,
}

/// The most bytes of an indirect transfer are a quarter of the peer's buffer, but at least this many.
const SHORTEST_PIECE: u32 = 64 << 10;

/// The peer's intermediate buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ring {
    memory: Remote,
    /// Offset of the next byte.
    at: u32,
    /// `b_s`.
    free: u32,
}

impl Sender {
    pub(in crate::machine) fn new(config: &Config) -> Self {
        Sender {
            sends: Sends::default(),
            seq: 0,
            phase: 0,
            adverts: VecDeque::new(),
            advert_phase: 0,
            ring: config.peer_ring.map(|memory| Ring {
                memory,
                at: 0,
                free: memory.len,
            }),
            small: config.small_send.into(),
            mode: config.mode,
            retracted: false,
            rules: config.rules,
        }
    }

    pub(in crate::machine) fn send(&mut self, op: OpId, len: u64) -> Result<(), Refused> {
        if self.sends.is_shut() {
            return Err(Refused::Shutdown);
        }
        self.sends.push(op, len);
        Ok(())
    }

    /// The shortcut, see [`Endpoint::send_now`](crate::machine::Endpoint::send_now). Returns the credits for the message.
    pub(in crate::machine) fn send_now(
        &mut self,
        len: u64,
        shared: &mut Shared<'_>,
    ) -> Option<u16> {
        let in_turn = self.sends.is_idle() && self.adverts.is_empty() && !self.retracted;
        if self.rules.send_in_turn && !in_turn
            || self.sends.is_shut()
            || self.mode == Mode::Direct
            || len == 0
            || len > self.small
        {
            return None;
        }
        let credits = shared.credits.take_small()?;
        self.go_indirect(len, shared.stats);
        shared.stats.small_sent += 1;
        shared.stats.small_bytes_sent += len;
        shared.stats.sent(false);
        Some(credits)
    }

    /// True if [`poll`](Self::poll) has nothing to do.
    pub(in crate::machine) fn is_still(&self) -> bool {
        self.sends.is_still() && !self.retracted
    }

    pub(in crate::machine) fn on_advert(
        &mut self,
        advert: Advert,
        stats: &mut Stats,
    ) -> Result<(), Violation> {
        if self.mode == Mode::Indirect {
            return Err(Violation::Unexpected);
        }
        let Remote { addr, len, .. } = advert.memory;
        if len == 0 || addr.checked_add(len.into()).is_none() {
            return Err(Violation::Memory);
        }
        // The receiver is at most one phase ahead, and only when it has all our indirect transfers. While we
        // send directly, it is in our phase (lemma 4). Dropped adverts may have moved us ahead of it.
        let highest = self.phase + u64::from(!is_direct(self.phase));
        let lowest = if is_direct(self.phase) {
            self.phase
        } else {
            self.advert_phase
        };
        if !is_direct(advert.phase)
            || !(lowest..=highest).contains(&advert.phase) && self.rules.advance_phase
        {
            return Err(Violation::Phase);
        }
        self.advert_phase = advert.phase;
        stats.adverts_received += 1;
        if self.adverts.len() == MAX_ADVERTS {
            return Err(Violation::TooMany);
        }
        self.adverts.push_back(advert);
        // An advert that is stale now stays stale. Without this, unused adverts could accumulate while nothing is sent.
        while self
            .adverts
            .front()
            .is_some_and(|a| !is_direct(self.phase) && self.is_stale(a, false))
        {
            self.drop_advert(stats);
        }
        if self.sends.is_finished() {
            stats.adverts_dropped += self.adverts.len() as u64;
            self.adverts.clear();
        }
        Ok(())
    }

    /// True if an advert is useless in an indirect phase (fig. 2, line 3). `now`: a transfer is about to use it.
    fn is_stale(&self, advert: &Advert, now: bool) -> bool {
        advert.phase < self.phase
            || advert.seq < self.seq
            || now && self.rules.exact_match && advert.seq != self.seq
    }

    /// Fig. 2, lines 5 to 8. The phase also makes all later adverts of the same phase stale.
    fn drop_advert(&mut self, stats: &mut Stats) {
        if let Some(advert) = self.adverts.pop_front() {
            stats.adverts_dropped += 1;
            if self.rules.advance_phase && self.phase < advert.phase {
                self.phase = advert.phase + 1;
            }
        }
    }

    pub(in crate::machine) fn on_ack(&mut self, freed: u32) -> Result<(), Violation> {
        let ring = self.ring.as_mut().ok_or(Violation::Ack)?;
        if freed == 0 || freed > ring.memory.len - ring.free {
            return Err(Violation::Ack);
        }
        ring.free += freed;
        Ok(())
    }

    pub(in crate::machine) fn on_retract(&mut self, stats: &mut Stats) -> Result<(), Violation> {
        if self.retracted || self.mode == Mode::Indirect {
            return Err(Violation::Unexpected);
        }
        stats.adverts_dropped += self.adverts.len() as u64;
        self.adverts.clear();
        self.retracted = true;
        Ok(())
    }

    pub(in crate::machine) fn wants_indirect(&self) -> Option<u64> {
        let send = self.sends.head()?;
        (self.mode == Mode::Dynamic && self.adverts.is_empty()).then_some(send.len - send.off)
    }

    pub(in crate::machine) fn poll(
        &mut self,
        may_go_indirect: bool,
        shared: &mut Shared<'_>,
    ) -> Option<Action> {
        if self.retracted {
            let action = shared.send(Body::Retracted { seq: self.seq })?;
            self.retracted = false;
            return Some(action);
        }
        while let Some(send) = self.sends.head() {
            let (op, off, rest) = (send.op, send.off, send.len - send.off);
            if rest == 0 {
                self.sends.skip();
                self.sends.complete(shared.done);
                continue;
            }
            let Some(&advert) = self.adverts.front() else {
                return match self.mode {
                    Mode::Direct => None,
                    Mode::Dynamic if !may_go_indirect => None,
                    _ => self.indirect(op, off, rest, shared),
                };
            };
            if !is_direct(self.phase) && self.is_stale(&advert, true) {
                self.drop_advert(shared.stats);
                continue;
            }
            return self.direct(op, off, rest, advert, shared);
        }
        if self.sends.wants_fin() {
            let action = shared.send(Body::Fin)?;
            self.sends.fin_sent();
            shared.stats.adverts_dropped += self.adverts.len() as u64;
            self.adverts.clear();
            return Some(action);
        }
        None
    }

    /// Fig. 2, lines 10 to 14.
    fn direct(
        &mut self,
        op: OpId,
        off: u64,
        rest: u64,
        advert: Advert,
        shared: &mut Shared<'_>,
    ) -> Option<Action> {
        let credits = shared.credit()?;
        if !is_direct(self.phase) {
            self.phase = advert.phase;
            shared.stats.mode_switches += 1;
        }
        let len = rest.min(advert.memory.len.into()).min(MAX_TRANSFER.into()) as u32;
        self.seq += u64::from(len);
        let Remote { addr, rkey, .. } = advert.memory;
        if advert.waitall && len < advert.memory.len {
            if let Some(head) = self.adverts.front_mut() {
                head.memory.addr += u64::from(len);
                head.memory.len -= len;
            }
        } else {
            self.adverts.pop_front();
        }
        shared.stats.direct_sent += 1;
        shared.stats.direct_bytes_sent += u64::from(len);
        Some(Action::Write {
            op,
            off,
            len,
            addr,
            rkey,
            imm: Imm {
                transfer: Transfer::Direct,
                credits,
                len,
            },
            last: self.sends.hand_over(len.into(), true, shared.stats),
        })
    }

    /// Fig. 2, lines 17 to 24: in a message if the rest is short, otherwise through the peer's buffer.
    fn indirect(
        &mut self,
        op: OpId,
        off: u64,
        rest: u64,
        shared: &mut Shared<'_>,
    ) -> Option<Action> {
        if rest <= self.small
            && let Some(credits) = shared.credits.take_small()
        {
            self.go_indirect(rest, shared.stats);
            shared.stats.small_sent += 1;
            shared.stats.small_bytes_sent += rest;
            let sends = &mut self.sends;
            return Some(sends.hand_over_small((op, off), rest as u32, credits, shared.stats));
        }
        let ring = self.ring.as_mut()?;
        // Wait rather than send tiny pieces. The peer withholds acknowledgements for less than a quarter of its buffer, so this
        // much will become free. The paper's sender takes what is free.
        let is_published = self.mode == Mode::Published;
        let least = if is_published {
            1
        } else {
            rest.min((ring.memory.len / 4).max(1).into())
        };
        let full = u64::from(ring.free) < least;
        shared.stats.ring_full(full);
        if full {
            return None;
        }
        let credits = shared.credit()?;
        // Send in pieces: while the receiver copies one piece, the next is in flight.
        let piece = if is_published {
            ring.memory.len
        } else {
            (ring.memory.len / 4).max(SHORTEST_PIECE)
        };
        let room = ring
            .free
            .min(ring.memory.len - ring.at)
            .min(piece)
            .min(MAX_TRANSFER);
        let len = rest.min(room.into()) as u32;
        let addr = ring.memory.addr + u64::from(ring.at);
        let rkey = ring.memory.rkey;
        ring.at = (ring.at + len) % ring.memory.len;
        ring.free -= len;
        self.go_indirect(len.into(), shared.stats);
        shared.stats.indirect_sent += 1;
        shared.stats.indirect_bytes_sent += u64::from(len);
        Some(Action::Write {
            op,
            off,
            len,
            addr,
            rkey,
            imm: Imm {
                transfer: Transfer::Indirect,
                credits,
                len,
            },
            last: self.sends.hand_over(len.into(), false, shared.stats),
        })
    }

    /// The receiver changes its phase when this transfer arrives. Our phase advances past every advert that it has sent,
    /// including those that it took back.
    fn go_indirect(&mut self, len: u64, stats: &mut Stats) {
        stats.mode_switches += u64::from(is_direct(self.phase));
        if self.rules.advance_phase || is_direct(self.phase) {
            self.phase = self.phase.max(self.advert_phase + 1);
        }
        self.seq += len;
    }
}
