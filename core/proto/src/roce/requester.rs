//! The requester: what is sent, and what the peer's answers say about it.

use weft_wire::rdmap::AtomicOp;
use weft_wire::roce::{
    AtomicEth, Header, MASK_24, NakCode, Op as Wire, Opcode, Reth, Service, Syndrome, rnr_delay,
};

use super::responder::Pending;
use super::{
    Connection, Entry, MOST_PACKETS, Progress, Rx, State, Status, Tx, ahead, distance, is_within,
    payload_len,
};
use crate::dgram::Now;
use crate::rdmap::{Op, Payload};

/// Of a long message, each packet whose number is a multiple of this asks for an acknowledgement.
pub(super) const ACK_EVERY: u32 = 16;

impl<W> Connection<W> {
    /// The next packet of the send queue.
    pub(super) fn next_request(&mut self, now: Now, header: &mut Vec<u8>) -> Option<Tx> {
        if self.state != State::Open || self.rnr_until.is_some_and(|until| now < until) {
            return None;
        }
        if self.rnr_until.take().is_some() {
            self.since = now;
        }
        if std::mem::take(&mut self.asks)
            && let Some(tx) = self.last_again(header)
        {
            return Some(tx);
        }
        // Local work that was done stays in the queue until it is popped.
        while (self.entry(self.next))
            .is_some_and(|e| e.packets == 0 && e.progress == Progress::Done)
        {
            self.next += 1;
        }
        if self.doomed.is_some_and(|doomed| self.next >= doomed) {
            return None;
        }
        let (config, reads) = (self.config, self.reads);
        let (psn, packet, fresh, next) = (self.psn, self.packet, self.fresh, self.next);
        let flying = distance(psn, self.unacked).cast_unsigned();
        let mut full = config.service == Service::Rc && flying >= self.window.size();
        let entry = self.entry(next)?;
        if entry.progress == Progress::Queued {
            if entry.wr.fence && reads > 0 {
                return None;
            }
            if entry.wr.op == Op::Local {
                // What follows waits for it.
                entry.progress = Progress::Started;
                let payload = Payload::Local { seq: next };
                return Some(Tx { payload, pad: 0 });
            }
            if entry.wr.op.is_answered() && reads >= config.ord.max(1) {
                return None;
            }
            full |= flying + config.packets(payload_len(&entry.wr)) > MOST_PACKETS;
        } else if entry.packets == 0 {
            // Local work that is not done yet.
            return None;
        }
        if full {
            return None;
        }
        if entry.progress == Progress::Queued {
            entry.progress = Progress::Started;
            entry.first = psn;
            entry.packets = config.packets(payload_len(&entry.wr));
            self.reads += u32::from(entry.wr.op.is_answered());
        }
        let entry = self.entry(next)?;
        let again = distance(psn, fresh) < 0;
        let (tx, mut out, used) = entry.cut(next, packet, &config);
        out.psn = psn;
        let last = packet + used == entry.packets;
        let unsignaled = entry.unsignaled;
        let asks = last && (again || !unsignaled || !self.may_be_silent());
        let fills = flying + used >= self.window.size();
        out.ack_request = config.service == Service::Rc
            && (asks || fills || psn.is_multiple_of(ACK_EVERY) || (again && psn == self.unacked));
        // The wait is for what was asked for.
        if distance(self.awaited, self.unacked) <= 0 {
            self.since = now;
        }
        if out.ack_request {
            self.asked_with(ahead(psn, used));
            if !again {
                self.rtt.sent(psn, now);
            }
        }
        if last && config.service == Service::Uc {
            // Nothing will tell.
            self.entry(next)?.progress = Progress::Done;
        }
        (self.next, self.packet) = if last {
            (next + 1, 0)
        } else {
            (next, packet + used)
        };
        self.psn = ahead(psn, used);
        if distance(self.psn, fresh) > 0 {
            self.fresh = self.psn;
        }
        if config.service == Service::Uc {
            self.unacked = self.fresh;
        }
        out.emit(header);
        Some(tx)
    }

    /// The packet that was sent last, again, of a Read the request for what is missing: the peer says what it has.
    fn last_again(&mut self, header: &mut Vec<u8>) -> Option<Tx> {
        let last = ahead(self.psn, MASK_24);
        let index = self.started(last)?;
        let seq = self.base + index as u64;
        if distance(last, self.unacked) < 0 || self.doomed.is_some_and(|doomed| seq >= doomed) {
            return None;
        }
        let entry = &self.sq[index];
        let packet = if entry.wr.op.is_answered() {
            entry.received
        } else {
            distance(last, entry.first).cast_unsigned()
        };
        let (tx, mut out, _) = entry.cut(seq, packet, &self.config);
        out.psn = ahead(entry.first, packet);
        out.ack_request = true;
        self.questioned = true;
        self.asked_with(self.psn);
        self.rtt.again();
        out.emit(header);
        Some(tx)
    }

    /// Everything before this packet is asked for.
    fn asked_with(&mut self, to: u32) {
        if distance(to, self.awaited) > 0 {
            self.awaited = to;
        }
    }

    /// Whether the acknowledgement of a message may be asked for later: only where the question, which follows if nothing else does, costs no retry.
    fn may_be_silent(&self) -> bool {
        let asks = |patience| self.until_question(patience).is_some();
        self.rtt.is_known() && self.patience().is_some_and(asks)
    }

    /// Local work is done.
    pub fn local_done(&mut self, seq: u64) {
        if let Some(entry) = self.entry(seq) {
            entry.progress = Progress::Done;
        }
        self.fail_doomed();
    }

    /// The time of [`deadline`](Self::deadline) has come.
    pub fn expired(&mut self, now: Now) {
        if self.deadline().is_none_or(|deadline| now < deadline) || self.rnr_until.is_some() {
            return;
        }
        if let Some(patience) = self.patience()
            && now < self.since + patience
        {
            self.asks = true;
            self.asked += 1;
            return;
        }
        self.since = now;
        self.lost();
    }

    /// Congestion was met on the way to the peer.
    pub fn congested(&mut self) {
        self.window.congested(self.fresh);
    }

    /// A packet was lost: go back to the oldest one that is not acknowledged, if there are tries left.
    fn lost(&mut self) {
        self.window.lost(self.fresh);
        (self.asks, self.asked, self.questioned) = (false, 0, false);
        if self.unacked == self.fresh {
            return;
        }
        if self.tries == 0 {
            let seq = self.oldest();
            self.fail(seq, Status::RetryExceeded);
        } else {
            self.tries -= 1;
            self.go_back();
        }
    }

    /// A packet of an answer was lost: ask again, once until there is progress.
    fn answer_lost(&mut self) {
        if !std::mem::replace(&mut self.asked_again, true) {
            self.lost();
        }
    }

    /// The work request that is started and not complete and has this packet.
    fn started(&self, psn: u32) -> Option<usize> {
        self.sq
            .iter()
            .position(|e| e.progress == Progress::Started && e.contains(psn))
    }

    /// The oldest work request that is started and not complete.
    pub(super) fn oldest(&self) -> u64 {
        let done = self.sq.iter().position(|e| e.progress != Progress::Done);
        self.base + done.unwrap_or(0) as u64
    }

    /// The next packet sent is the oldest that is not acknowledged.
    fn go_back(&mut self) {
        let unacked = self.unacked;
        self.rtt.again();
        if let Some(index) = self.started(unacked) {
            self.next = self.base + index as u64;
            self.packet = distance(unacked, self.sq[index].first).cast_unsigned();
            self.psn = unacked;
        }
    }

    /// A packet that answers one of ours.
    pub(super) fn rx_answer(&mut self, now: Now, header: &Header, len: u32) -> Rx {
        let psn = header.psn;
        // Only what is on its way, or the packet before it, can be meant.
        let beyond = distance(psn, self.fresh) >= 0;
        if beyond || distance(psn, self.unacked) < -1 {
            return Rx::Nothing;
        }
        match (header.opcode.op, header.aeth) {
            (Wire::Ack, Some(aeth)) => {
                match aeth.syndrome {
                    Syndrome::Ack(_) => {
                        self.acked_up_to(now, ahead(psn, 1));
                    }
                    Syndrome::Nak(NakCode::SequenceError) => self.resend_from(now, psn),
                    Syndrome::RnrNak(code) => self.peer_not_ready(now, psn, code),
                    Syndrome::Nak(code) => self.refused(now, psn, code),
                }
                Rx::Nothing
            }
            (Wire::AtomicAck, _) => self.rx_atomic_answer(now, header),
            _ => self.rx_read_answer(now, header, len),
        }
    }

    /// All packets before `to` are acknowledged, but for Reads and atomics, which only their answers complete. Says whether that holds for
    /// all of them; if not, an answer was lost.
    fn acked_up_to(&mut self, now: Now, to: u32) -> bool {
        if distance(to, self.unacked) <= 0 {
            return true;
        }
        let mut reached = self.unacked;
        let mut whole = true;
        for entry in &mut self.sq {
            if entry.progress == Progress::Queued || distance(reached, to) >= 0 {
                break;
            }
            if entry.progress == Progress::Done || entry.packets == 0 {
                continue;
            }
            if entry.wr.op.is_answered() {
                whole = false;
                break;
            }
            let end = ahead(entry.first, entry.packets);
            if distance(end, to) <= 0 {
                entry.progress = Progress::Done;
                reached = end;
            } else {
                reached = to;
            }
        }
        self.progressed(now, reached);
        if !whole {
            self.answer_lost();
        }
        whole
    }

    /// Everything before `reached` is complete.
    fn progressed(&mut self, now: Now, reached: u32) {
        let packets = distance(reached, self.unacked);
        if packets <= 0 {
            return;
        }
        let packets = packets.cast_unsigned();
        self.unacked = reached;
        self.since = now;
        self.tries = self.config.retry_count;
        self.rnr_tries = self.config.rnr_retry;
        self.rnr_until = None;
        self.asked_again = false;
        (self.asks, self.asked, self.questioned) = (false, 0, false);
        self.rtt.acknowledged(reached, now);
        self.window.grow(packets, reached);
        // What was to be sent again has arrived meanwhile.
        if distance(self.psn, reached) < 0 {
            self.catch_up(reached);
        }
        self.fail_doomed();
    }

    /// The next packet sent is this one: after packets that are acknowledged, or the first that was never sent.
    fn catch_up(&mut self, psn: u32) {
        self.go_back();
        if self.psn != psn {
            // Everything that was started is complete.
            let queued = self.sq.iter().position(|e| e.progress == Progress::Queued);
            self.next = self.base + queued.unwrap_or(self.sq.len()) as u64;
            self.packet = 0;
            self.psn = psn;
        }
    }

    /// The peer has everything before `psn`, and not that one.
    fn resend_from(&mut self, now: Now, psn: u32) {
        // After a wait for a receive it is sent again anyway.
        if self.acked_up_to(now, psn) && psn == self.unacked && self.rnr_until.is_none() {
            self.since = now;
            if std::mem::take(&mut self.questioned) {
                // Questions come much sooner than the transport timer, whose retries would be used up in a moment. The next one waits twice as long.
                self.window.lost(self.fresh);
                self.asks = false;
                self.go_back();
            } else {
                self.lost();
            }
        }
    }

    fn peer_not_ready(&mut self, now: Now, psn: u32, code: u8) {
        if !self.acked_up_to(now, psn) || psn != self.unacked || self.unacked == self.fresh {
            return;
        }
        if self.config.rnr_retry != 7 {
            if self.rnr_tries == 0 {
                let seq = self.oldest();
                self.fail(seq, Status::RnrRetryExceeded);
                return;
            }
            self.rnr_tries -= 1;
        }
        // It is there: the retries are for one that is not.
        self.tries = self.config.retry_count;
        (self.asks, self.asked) = (false, 0);
        self.since = now;
        self.rnr_until = Some(now + rnr_delay(code));
        self.go_back();
    }

    fn refused(&mut self, now: Now, psn: u32, code: NakCode) {
        self.acked_up_to(now, psn);
        if let Some(index) = self.started(psn) {
            self.fail(self.base + index as u64, Status::Refused(code));
        }
    }

    /// The Read or atomic whose answer this packet is, if the earlier ones are complete.
    fn answered(&mut self, now: Now, psn: u32, atomic: bool) -> Option<usize> {
        let index = self.started(psn)?;
        let entry = &self.sq[index];
        if atomic != matches!(entry.wr.op, Op::Atomic { .. }) || !entry.wr.op.is_answered() {
            return None;
        }
        let expected = ahead(entry.first, entry.received);
        let first = entry.first;
        // The answer to a later request says that the earlier ones have arrived.
        if !self.acked_up_to(now, first) || self.state != State::Open {
            return None;
        }
        match distance(psn, expected) {
            0 => Some(index),
            ..0 => None,
            _ => {
                self.answer_lost();
                None
            }
        }
    }

    fn rx_read_answer(&mut self, now: Now, header: &Header, len: u32) -> Rx {
        let Some(index) = self.answered(now, header.psn, false) else {
            return Rx::Nothing;
        };
        let (mtu, seq) = (self.config.mtu, self.base + index as u64);
        let entry = &self.sq[index];
        let offset = entry.received * mtu;
        if len != mtu.min(entry.wr.len - offset) {
            self.fail(seq, Status::BadResponse);
            return Rx::Nothing;
        }
        self.pending = Some(Pending::Answer { seq, now });
        Rx::PlaceRead { seq, offset, len }
    }

    fn rx_atomic_answer(&mut self, now: Now, header: &Header) -> Rx {
        let (Some(original), Some(index)) = (header.original, self.answered(now, header.psn, true))
        else {
            return Rx::Nothing;
        };
        let seq = self.base + index as u64;
        self.pending = Some(Pending::Answer { seq, now });
        Rx::AtomicResult { seq, original }
    }

    /// A packet of the answer to this request is in place.
    pub(super) fn answer_placed(&mut self, seq: u64, now: Now) {
        let Some(entry) = self.entry(seq) else {
            return;
        };
        entry.received += 1;
        let reached = ahead(entry.first, entry.received);
        if entry.received == entry.packets {
            entry.progress = Progress::Done;
            self.reads -= 1;
        }
        self.progressed(now, reached);
    }
}

impl<W> Entry<W> {
    fn contains(&self, psn: u32) -> bool {
        is_within(psn, self.first, self.packets)
    }

    /// One packet, and how many numbers it uses: a Read uses one for each packet of its answer.
    fn cut(&self, seq: u64, packet: u32, config: &super::Config) -> (Tx, Header, u32) {
        let total = payload_len(&self.wr);
        let offset = packet * config.mtu;
        let len = config.mtu.min(total - offset);
        let (first, last) = (packet == 0, packet + 1 == self.packets);
        let opcode = |op| Opcode {
            service: config.service,
            op,
        };
        let header = |op| Header {
            pkey: config.pkey,
            ..Header::new(opcode(op), config.dest_qp, 0)
        };
        let reth = |rkey, va: u64, len| Some(Reth { va, rkey, len });
        let none = Tx {
            payload: Payload::None,
            pad: 0,
        };
        match self.wr.op {
            Op::Read { src_stag, src_to } => {
                let va = src_to.wrapping_add(offset.into());
                let out = Header {
                    reth: reth(src_stag, va, total - offset),
                    ..header(Wire::ReadRequest)
                };
                return (none, out, self.packets - packet);
            }
            Op::Atomic {
                op,
                stag,
                to,
                add_or_swap,
                compare,
                ..
            } => {
                let wire = match op {
                    AtomicOp::FetchAdd => Wire::FetchAdd,
                    _ => Wire::CompareSwap,
                };
                let out = Header {
                    atomic: Some(AtomicEth {
                        va: to,
                        rkey: stag,
                        swap_add: add_or_swap,
                        compare,
                    }),
                    ..header(wire)
                };
                return (none, out, 1);
            }
            _ => {}
        }
        let (kind, immediate, invalidate, solicited) = match self.wr.op {
            Op::Send {
                solicited,
                invalidate,
            } => (None, None, invalidate, solicited),
            Op::SendImm { imm, solicited } => (None, Some(imm as u32), None, solicited),
            Op::Write { stag, to } => (Some((stag, to)), None, None, false),
            Op::WriteImm {
                stag,
                to,
                imm,
                solicited,
            } => (Some((stag, to)), Some(imm as u32), None, solicited),
            Op::Imm { imm, solicited } => (Some((0, 0)), Some(imm as u32), None, solicited),
            Op::Read { .. } | Op::Atomic { .. } | Op::Local => (None, None, None, false),
        };
        let op = match (kind.is_some(), first, last) {
            (false, true, false) => Wire::SendFirst,
            (false, false, false) => Wire::SendMiddle,
            (false, only, true) => match (only, immediate, invalidate) {
                (true, Some(_), _) => Wire::SendOnlyImm,
                (true, _, Some(_)) => Wire::SendOnlyInvalidate,
                (true, ..) => Wire::SendOnly,
                (false, Some(_), _) => Wire::SendLastImm,
                (false, _, Some(_)) => Wire::SendLastInvalidate,
                (false, ..) => Wire::SendLast,
            },
            (true, true, false) => Wire::WriteFirst,
            (true, false, false) => Wire::WriteMiddle,
            (true, only, true) => match (only, immediate) {
                (true, Some(_)) => Wire::WriteOnlyImm,
                (true, None) => Wire::WriteOnly,
                (false, Some(_)) => Wire::WriteLastImm,
                (false, None) => Wire::WriteLast,
            },
        };
        let pad = len.wrapping_neg() as u8 & 3;
        let out = Header {
            pad,
            solicited: solicited && last,
            reth: kind.and_then(|(stag, to)| reth(stag, to, total)),
            immediate,
            invalidate,
            ..header(op)
        };
        let payload = if len == 0 {
            Payload::None
        } else {
            Payload::Wr { seq, offset, len }
        };
        (Tx { payload, pad }, out, 1)
    }
}
