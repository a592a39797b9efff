//! The receiving half (figs. 3 to 5).

use std::collections::VecDeque;

use weft_wire::exs::{Body, Mode};

use super::is_direct;
use crate::machine::{
    Action, Cancel, Config, InPlace, MAX_ADVERTS, MAX_TRANSFER, OpId, Outcome, RecvFlags, Rules,
    Shared, Violation, WARY_ADVERTS, ended,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::machine) struct Receiver {
    recvs: VecDeque<Recv>,
    /// Receives, counted from the head, that need no further advert in this phase.
    seen: usize,
    /// Adverts of this phase that the peer has not used up.
    live: usize,
    /// Cancelled receives that wait for the peer's answer.
    canceled: usize,
    retract: Retract,
    /// `P_r`.
    phase: u64,
    /// `S_r`: bytes in the memory of receives.
    seq: u64,
    /// `S'_r`: the position of the next advert.
    expected: u64,
    /// Data that has arrived and has not been copied to a receive.
    buffered: VecDeque<Segment>,
    /// `b_r`: the bytes in `buffered`.
    waiting: u64,
    ring: Ring,
    small: u64,
    mode: Mode,
    /// The peer has sent its half-close.
    fin: bool,
    /// A direct transfer has arrived in this phase.
    direct_seen: bool,
    /// No advert of the last phase was used.
    wary: bool,
    rules: Rules,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Recv {
    op: OpId,
    len: u64,
    filled: u64,
    flags: RecvFlags,
    /// The last advert for it.
    advert: Option<Granted>,
    /// Its data stays in this place.
    in_place: Option<InPlace>,
    canceled: bool,
    /// It came when no advert could be sent. Under the published rules it gets none later.
    passed_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Granted {
    phase: u64,
    /// Offset in the receive's memory where the advert ends.
    end: u64,
}

/// Data in the order of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Segment {
    Ring { len: u32 },
    Small { buffer: u32, off: u32, len: u32 },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ring {
    len: u32,
    /// Offset of the next byte to copy.
    at: u32,
    /// Bytes that have not been copied.
    used: u32,
    /// Bytes copied, but not yet reported to the peer.
    freed: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Retract {
    No,
    Wanted,
    Sent,
}

impl Recv {
    fn is_full(&self) -> bool {
        self.filled == self.len
    }

    /// True if its advert covers the rest of the memory: false only for a long WAITALL.
    fn is_covered(&self) -> bool {
        !self.flags.waitall || self.advert.is_none_or(|granted| granted.end == self.len)
    }
}

impl Receiver {
    pub(in crate::machine) fn new(config: &Config) -> Self {
        Receiver {
            recvs: VecDeque::new(),
            seen: 0,
            live: 0,
            canceled: 0,
            retract: Retract::No,
            phase: 0,
            seq: 0,
            expected: 0,
            buffered: VecDeque::new(),
            waiting: 0,
            ring: Ring {
                len: config.own_ring_len,
                at: 0,
                used: 0,
                freed: 0,
            },
            small: config.small_recv.into(),
            mode: config.mode,
            fin: false,
            direct_seen: false,
            wary: false,
            rules: config.rules,
        }
    }

    pub(in crate::machine) fn recv(
        &mut self,
        op: OpId,
        len: u64,
        flags: RecvFlags,
        shared: &mut Shared<'_>,
    ) {
        let in_the_way = |recv: &Recv| {
            recv.passed_over
                || recv
                    .advert
                    .is_some_and(|granted| granted.phase != self.phase)
        };
        let passed_over =
            !self.rules.retry && (!self.buffered.is_empty() || self.recvs.iter().any(in_the_way));
        self.recvs.push_back(Recv {
            op,
            len,
            filled: 0,
            flags,
            advert: None,
            in_place: None,
            canceled: false,
            passed_over,
        });
        self.settle(shared);
    }

    pub(in crate::machine) fn cancel(&mut self, op: OpId, shared: &mut Shared<'_>) -> Cancel {
        let Some(at) = self.recvs.iter().position(|recv| recv.op == op) else {
            return Cancel::TooLate;
        };
        if self.is_live(at) {
            if !std::mem::replace(&mut self.recvs[at].canceled, true) {
                self.canceled += 1;
            }
            if self.retract == Retract::No {
                self.retract = Retract::Wanted;
            }
            return Cancel::Pending;
        }
        let recv = &self.recvs[at];
        if recv.filled != 0 && !recv.flags.waitall {
            // Between two copies: it completes with the next one.
            return Cancel::TooLate;
        }
        self.remove(at, Outcome::Canceled, shared);
        self.settle(shared);
        Cancel::Done
    }

    /// True if the peer may still write to it.
    fn is_live(&self, at: usize) -> bool {
        let granted = self.recvs.get(at).and_then(|recv| recv.advert);
        granted.is_some_and(|granted| granted.phase == self.phase)
    }

    /// End a receive.
    fn remove(&mut self, at: usize, outcome: Outcome, shared: &mut Shared<'_>) {
        let live = self.is_live(at);
        let Some(recv) = self.recvs.remove(at) else {
            return;
        };
        self.live -= usize::from(live);
        self.seen -= usize::from(at < self.seen);
        if recv.canceled {
            self.canceled -= 1;
            if self.canceled == 0 && self.retract == Retract::Wanted {
                self.retract = Retract::No;
            }
        }
        let end = ended(recv.op, recv.filled, outcome, recv.in_place);
        shared.done.push_back(end);
    }

    /// Complete the receives that need no data: full ones at the head, and all when the stream has ended.
    fn settle(&mut self, shared: &mut Shared<'_>) {
        while let Some(head) = self.recvs.front() {
            if head.is_full() {
                self.remove(0, Outcome::Done, shared);
            } else if self.fin && self.buffered.is_empty() {
                self.remove(0, Outcome::Eof, shared);
            } else {
                break;
            }
        }
    }

    /// All adverts are void: end the cancelled receives, which waited for that.
    fn void_adverts(&mut self, shared: &mut Shared<'_>) {
        self.live = 0;
        self.seen = 0;
        for recv in &mut self.recvs {
            recv.advert = None;
        }
        while self.canceled != 0 {
            let Some(at) = self.recvs.iter().position(|recv| recv.canceled) else {
                break;
            };
            self.remove(at, Outcome::Canceled, shared);
        }
        self.settle(shared);
    }

    /// Fig. 4, lines 1 to 6.
    pub(in crate::machine) fn on_direct(
        &mut self,
        len: u32,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        if self.fin {
            return Err(Violation::AfterFin);
        }
        if !is_direct(self.phase) || !self.is_live(0) {
            return Err(Violation::NoAdvert);
        }
        let head = self.recvs.front_mut().ok_or(Violation::NoAdvert)?;
        let end = head.advert.map_or(0, |granted| granted.end);
        if len == 0 {
            return Err(Violation::Length);
        }
        if u64::from(len) > end - head.filled {
            return Err(Violation::NoAdvert);
        }
        head.filled += u64::from(len);
        self.seq += u64::from(len);
        if !head.flags.waitall {
            self.expected += u64::from(len) - 1;
        }
        let complete = head.is_full() || !head.flags.waitall;
        if !complete && head.filled == end {
            // A WAITALL longer than one advert needs another.
            head.advert = None;
            self.live -= 1;
            self.seen = 0;
        }
        self.direct_seen = true;
        self.wary = false;
        shared.stats.direct_received += 1;
        shared.stats.direct_bytes_received += u64::from(len);
        if complete {
            self.remove(0, Outcome::Done, shared);
            self.settle(shared);
        }
        Ok(())
    }

    /// Fig. 4, lines 7 to 12.
    pub(in crate::machine) fn on_indirect(
        &mut self,
        len: u32,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        self.check_indirect(len)?;
        let ring = &mut self.ring;
        // A transfer must end at the end of the buffer; the next one starts at the beginning.
        let taken = ring.used + ring.freed;
        let to_end = if ring.len == 0 {
            0
        } else {
            ring.len - ((u64::from(ring.at) + u64::from(ring.used)) % u64::from(ring.len)) as u32
        };
        if len > ring.len - taken || len > to_end {
            return Err(Violation::Overfilled);
        }
        ring.used += len;
        self.waiting += u64::from(len);
        if let Some(Segment::Ring { len: last }) = self.buffered.back_mut() {
            *last += len;
        } else {
            self.buffered.push_back(Segment::Ring { len });
        }
        shared.stats.indirect_received += 1;
        shared.stats.indirect_bytes_received += u64::from(len);
        self.enter_indirect(shared);
        Ok(())
    }

    pub(in crate::machine) fn on_small(
        &mut self,
        buffer: u32,
        len: u32,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        self.check_indirect(len)?;
        if u64::from(len) > self.small {
            return Err(Violation::Length);
        }
        let off = 0;
        self.buffered.push_back(Segment::Small { buffer, off, len });
        self.waiting += u64::from(len);
        shared.stats.small_received += 1;
        shared.stats.small_bytes_received += u64::from(len);
        self.enter_indirect(shared);
        Ok(())
    }

    /// True if the receive at the head can take a message of `len` bytes by the shortcut, see
    /// [`Endpoint::take_now`](crate::machine::Endpoint::take_now).
    pub(in crate::machine) fn may_take(&self, len: u32) -> bool {
        let Some(head) = self.recvs.front() else {
            return false;
        };
        let rest = head.len - head.filled;
        let whole = if head.flags.waitall {
            rest == len.into()
        } else {
            rest >= len.into()
        };
        let in_turn = self.buffered.is_empty() || !self.rules.take_in_turn;
        whole
            && in_turn
            && head.filled == 0
            && !head.flags.in_place
            && self.canceled == 0
            && u64::from(len) <= self.small
            && self.check_indirect(len).is_ok()
            && self.rules.resync_seq
    }

    pub(in crate::machine) fn take(&mut self, len: u32, shared: &mut Shared<'_>) -> Option<OpId> {
        shared.stats.small_received += 1;
        shared.stats.small_bytes_received += u64::from(len);
        self.enter_indirect(shared);
        self.seq += u64::from(len);
        let head = self.recvs.pop_front()?;
        self.seen = self.seen.saturating_sub(1);
        self.settle(shared);
        Some(head.op)
    }

    /// True if [`deliver`](Self::deliver) and [`control`](Self::control) have nothing to do.
    pub(in crate::machine) fn is_still(&self) -> bool {
        let Ring { len, freed, .. } = self.ring;
        let short = |recv: &Recv| {
            let rest = recv.len - recv.filled;
            rest != 0 && rest <= self.small && self.mode == Mode::Dynamic && len != 0
        };
        (self.buffered.is_empty() || self.recvs.is_empty())
            && (freed == 0 || freed < len / 4)
            && self.retract != Retract::Wanted
            && self.recvs.get(self.seen).is_none_or(short)
            && self.rules.check_k_b
    }

    fn check_indirect(&self, len: u32) -> Result<(), Violation> {
        if self.fin {
            Err(Violation::AfterFin)
        } else if self.mode == Mode::Direct {
            Err(Violation::Unexpected)
        } else if len == 0 {
            Err(Violation::Length)
        } else {
            Ok(())
        }
    }

    fn enter_indirect(&mut self, shared: &mut Shared<'_>) {
        if !is_direct(self.phase) {
            return;
        }
        self.phase += 1;
        self.wary |= self.live != 0 && !self.direct_seen;
        self.direct_seen = false;
        self.live = 0;
        if self.rules.check_k_a {
            self.seen = 0;
        }
        if self.retract == Retract::Wanted {
            self.retract = Retract::No;
        }
        if self.canceled != 0 {
            self.void_adverts(shared);
        }
    }

    pub(in crate::machine) fn on_retracted(
        &mut self,
        seq: u64,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        if self.retract != Retract::Sent {
            return Err(Violation::Unexpected);
        }
        if seq != self.seq + self.waiting {
            return Err(Violation::Order);
        }
        self.retract = Retract::No;
        self.void_adverts(shared);
        Ok(())
    }

    pub(in crate::machine) fn on_fin(&mut self, shared: &mut Shared<'_>) -> Result<(), Violation> {
        if std::mem::replace(&mut self.fin, true) {
            return Err(Violation::AfterFin);
        }
        self.settle(shared);
        Ok(())
    }

    /// Fig. 5: the next copy.
    pub(in crate::machine) fn deliver(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        let head = self.recvs.front_mut()?;
        let segment = self.buffered.front_mut()?;
        let (op, off, rest) = (head.op, head.filled, head.len - head.filled);
        let (len, action, emptied) = match segment {
            Segment::Ring { len: left } => {
                let ring = &mut self.ring;
                let contiguous = (*left).min(ring.len - ring.at);
                let len = rest.min(contiguous.into()) as u32;
                let ring_off = ring.at;
                ring.at = (ring.at + len) % ring.len;
                ring.used -= len;
                ring.freed += len;
                *left -= len;
                let copy = Action::Copy {
                    op,
                    off,
                    ring_off,
                    len,
                };
                (len, Some(copy), *left == 0)
            }
            Segment::Small {
                buffer,
                off: buf_off,
                len: left,
            } => {
                let buffer = *buffer;
                let fits = off == 0
                    && u64::from(*left) <= rest
                    && (!head.flags.waitall || u64::from(*left) == rest);
                if head.flags.in_place && fits {
                    let (len, off) = (u64::from(*left), *buf_off);
                    return self.deliver_in_place(len, InPlace { buffer, off }, shared);
                }
                let len = rest.min((*left).into()) as u32;
                let copy = Action::CopySmall {
                    op,
                    off,
                    buffer,
                    buf_off: *buf_off,
                    len,
                };
                *buf_off += len;
                *left -= len;
                if *left == 0 {
                    shared.repost(buffer);
                }
                (len, Some(copy), *left == 0)
            }
        };
        head.filled += u64::from(len);
        self.account_copy(len.into());
        if emptied {
            self.buffered.pop_front();
        }
        let head = self.recvs.front()?;
        if head.is_full() || self.buffered.is_empty() && !head.flags.waitall {
            if !self.rules.resync_seq && head.advert.is_some() && !head.flags.waitall {
                self.expected = self.expected.wrapping_sub(1);
            }
            self.remove(0, Outcome::Done, shared);
        }
        self.settle(shared);
        action
    }

    /// Complete the head with data that stays in its message.
    fn deliver_in_place(
        &mut self,
        len: u64,
        at: InPlace,
        shared: &mut Shared<'_>,
    ) -> Option<Action> {
        self.buffered.pop_front();
        let head = self.recvs.front_mut()?;
        head.filled = len;
        head.in_place = Some(at);
        self.account_copy(len);
        self.remove(0, Outcome::Done, shared);
        self.settle(shared);
        self.deliver(shared)
    }

    /// Fig. 5, lines 4 to 7. `S'_r` is set anew in each phase, so only the published rules change it here.
    fn account_copy(&mut self, len: u64) {
        self.seq += len;
        self.waiting -= len;
        if self.rules.resync_seq {
            return;
        }
        let head = self.recvs.front();
        if head.is_some_and(|r| r.advert.is_some() && !r.flags.waitall) {
            self.expected = self.expected.wrapping_add(len);
        }
    }

    /// Acknowledge freed buffer space, also between two copies, so that the sender continues meanwhile.
    pub(in crate::machine) fn acknowledge(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        let Ring { len, freed, .. } = self.ring;
        // A quarter keeps the number of messages low, and is enough for a sender that waits for a quarter to be free.
        if freed == 0 || freed < len / 4 || self.fin {
            return None;
        }
        let action = shared.send(Body::Ack { freed })?;
        self.ring.freed = 0;
        shared.stats.acks += 1;
        Some(action)
    }

    pub(in crate::machine) fn control(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        if self.retract == Retract::Wanted {
            let action = shared.send(Body::Retract)?;
            self.retract = Retract::Sent;
            shared.stats.retracts += 1;
            return Some(action);
        }
        if let Some(action) = self.acknowledge(shared) {
            return Some(action);
        }
        self.advertise(shared)
    }

    fn may_advertise(&self) -> bool {
        self.buffered.is_empty()
            && !self.fin
            && self.retract == Retract::No
            && self.mode != Mode::Indirect
    }

    /// Fig. 3: send adverts in the order of the receives, without a gap (`k_b`), while the buffer is empty (`b_r`). Receives from
    /// an earlier phase are advertised again first (`k_a`).
    fn advertise(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        if !self.may_advertise() {
            return None;
        }
        let is_dynamic = self.mode == Mode::Dynamic;
        let limit = if self.wary && is_dynamic {
            WARY_ADVERTS
        } else {
            MAX_ADVERTS
        };
        let indirect_pays = is_dynamic && self.ring.len != 0;
        while self.live < limit && self.seen < self.recvs.len() {
            if self.seen > 0 && !self.recvs[self.seen - 1].is_covered() {
                return None;
            }
            let recv = &self.recvs[self.seen];
            let rest = recv.len - recv.filled;
            if rest == 0 || recv.advert.is_some() && !self.rules.check_k_a {
                self.seen += 1;
                continue;
            }
            if recv.advert.is_some() && !self.rules.retry {
                return None;
            }
            // Short data arrives in a message sooner than an advert could make the round trip.
            if rest <= self.small && indirect_pays || recv.passed_over {
                if self.rules.check_k_b {
                    return None;
                }
                self.seen += 1;
                continue;
            }
            let credits = shared.credit()?;
            if !is_direct(self.phase) {
                self.phase += 1;
            }
            if self.live == 0 && self.rules.resync_seq {
                self.expected = self.seq;
            }
            let len = rest.min(MAX_TRANSFER.into()) as u32;
            let seq = self.expected;
            let recv = &mut self.recvs[self.seen];
            recv.advert = Some(Granted {
                phase: self.phase,
                end: recv.filled + u64::from(len),
            });
            self.expected = seq.wrapping_add(if recv.flags.waitall { len.into() } else { 1 });
            self.live += 1;
            self.seen += 1;
            shared.stats.adverts_sent += 1;
            return Some(Action::Advertise {
                op: recv.op,
                off: recv.filled,
                len,
                seq,
                phase: self.phase,
                waitall: recv.flags.waitall,
                credits,
            });
        }
        None
    }

    pub(in crate::machine) fn received(&self, op: OpId) -> u64 {
        let recv = self.recvs.iter().find(|recv| recv.op == op);
        recv.map_or(0, |recv| recv.filled)
    }

    pub(in crate::machine) fn readable(&self) -> u64 {
        self.waiting
    }

    pub(in crate::machine) fn eof(&self) -> bool {
        self.fin
    }

    pub(in crate::machine) fn is_idle(&self) -> bool {
        self.recvs.is_empty()
    }
}
