//! The responder: the checks of the peer's requests, and the answers to them.

use weft_wire::roce::{Aeth, Header, MASK_24, NakCode, Op, Opcode, Service, Syndrome};

use super::{
    Atomic, Connection, MOST_PACKETS, Received, Rx, State, Status, Tx, ahead, distance, is_within,
};
use crate::dgram::Now;
use crate::rdmap::Payload;

/// The credit count of a responder that does not count receives.
const UNLIMITED: u8 = 31;
/// Packets of answers until what the peer says is looked at.
pub(super) const BURST: u32 = 64;
/// The message in progress.
#[derive(Clone, Copy, Debug)]
pub(super) enum Open {
    Send {
        received: u32,
    },
    Write {
        rkey: u32,
        /// The address of the next byte.
        va: u64,
        left: u32,
        len: u32,
    },
}

/// The effects of the packet that the caller works on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pending {
    Message {
        open: Option<Open>,
        received: Option<Received>,
        last: bool,
        ack: bool,
    },
    Read {
        rkey: u32,
        va: u64,
        len: u32,
    },
    Atomic,
    /// Of an answer to this request of ours.
    Answer {
        seq: u64,
        now: Now,
    },
}

/// A Read or atomic of the peer, for when it is repeated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resource {
    psn: u32,
    packets: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read { rkey: u32, va: u64, len: u32 },
    Atomic { original: u64 },
}

/// An answer that is owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Out {
    Ack {
        psn: u32,
    },
    Nak {
        psn: u32,
        syndrome: Syndrome,
    },
    Atomic {
        psn: u32,
        original: u64,
        /// The peer has asked for it again.
        again: bool,
    },
    Read {
        /// The number of the next packet.
        psn: u32,
        rkey: u32,
        va: u64,
        left: u32,
        first: bool,
        again: bool,
    },
}

impl Out {
    const fn is_answer(&self) -> bool {
        matches!(self, Out::Read { .. } | Out::Atomic { .. })
    }

    const fn is_again(&self) -> bool {
        matches!(
            self,
            Out::Read { again: true, .. } | Out::Atomic { again: true, .. }
        )
    }
}

impl<W> Connection<W> {
    /// Checks a packet for this queue pair: `len` bytes of payload.
    pub fn rx(&mut self, now: Now, header: &Header, len: u32) -> Rx {
        if self.state != State::Open
            || self.pending.is_some()
            || header.opcode.service != self.config.service
            || header.pkey & 0x7fff != self.config.pkey & 0x7fff
        {
            return Rx::Nothing;
        }
        if header.opcode.op.is_response() {
            return self.rx_answer(now, header, len);
        }
        self.looked_at = header.psn;
        match distance(header.psn, self.expected) {
            0 => {}
            _ if self.config.service == Service::Uc => {
                // Packets were lost, and the message that they belong to.
                self.open = None;
                self.expected = header.psn;
                if !header.opcode.op.is_first() {
                    self.expected = ahead(header.psn, 1);
                    return Rx::Nothing;
                }
            }
            ..0 => {
                self.rx_again(header);
                return Rx::Nothing;
            }
            _ => {
                // The newest packet comes again where the peer asks what is here: it has not got what was said.
                let asks = header.ack_request && self.early == Some(header.psn);
                if !self.nak_sent || asks {
                    self.nak_sent = true;
                    self.tell(Syndrome::Nak(NakCode::SequenceError));
                }
                if self
                    .early
                    .is_none_or(|early| distance(header.psn, early) > 0)
                {
                    self.early = Some(header.psn);
                }
                return Rx::Nothing;
            }
        }
        match self.rx_request(header, len) {
            Ok((rx, pending)) => {
                self.pending = Some(pending);
                rx
            }
            Err(code) => {
                if self.config.service == Service::Uc {
                    self.open = None;
                    self.expected = ahead(self.expected, 1);
                } else {
                    self.refuse(code);
                }
                Rx::Nothing
            }
        }
    }

    /// The packet expected.
    fn rx_request(&self, header: &Header, len: u32) -> Result<(Rx, Pending), NakCode> {
        let op = header.opcode.op;
        let invalid = NakCode::InvalidRequest;
        let mtu = self.config.mtu;
        if op.is_first() != self.open.is_none() {
            return Err(invalid);
        }
        if op.is_send() || op.is_write() {
            let fits = match (op.is_first(), op.is_last()) {
                (_, false) => len == mtu,
                (true, true) => len <= mtu,
                (false, true) => (1..=mtu).contains(&len),
            };
            if !fits {
                return Err(invalid);
            }
        }
        if op.is_send() {
            return self.rx_send(header, len).ok_or(invalid);
        }
        if op.is_write() {
            return self.rx_write(header, len);
        }
        // Reads and atomics, whose answers are bounded.
        let owed = |out: &&Out| out.is_answer() && !out.is_again();
        if len != 0 || self.out.iter().filter(owed).count() >= self.config.ird as usize {
            return Err(invalid);
        }
        if let (Op::ReadRequest, Some(reth)) = (op, header.reth) {
            let (rkey, va, len) = (reth.rkey, reth.va, reth.len);
            if va.checked_add(len.into()).is_none() {
                return Err(NakCode::RemoteAccess);
            }
            if self.config.packets(len) > MOST_PACKETS {
                return Err(invalid);
            }
            return Ok((
                Rx::ReadRequested { rkey, va, len },
                Pending::Read { rkey, va, len },
            ));
        }
        let atomic = header.atomic.filter(|a| a.va.is_multiple_of(8));
        let atomic = atomic.ok_or(invalid)?;
        let op = match op {
            Op::FetchAdd => Atomic::FetchAdd {
                add: atomic.swap_add,
            },
            _ => Atomic::CompareSwap {
                compare: atomic.compare,
                swap: atomic.swap_add,
            },
        };
        let (rkey, va) = (atomic.rkey, atomic.va);
        Ok((Rx::AtomicRequested { rkey, va, op }, Pending::Atomic))
    }

    fn rx_send(&self, header: &Header, len: u32) -> Option<(Rx, Pending)> {
        let offset = match self.open {
            None => 0,
            Some(Open::Send { received }) => received,
            Some(Open::Write { .. }) => return None,
        };
        let received = offset.checked_add(len)?;
        let last = header.opcode.op.is_last();
        let rx = Rx::PlaceRecv {
            first: offset == 0 && header.opcode.op.is_first(),
            offset,
            len,
        };
        let pending = Pending::Message {
            open: (!last).then_some(Open::Send { received }),
            received: last.then_some(Received {
                len: received,
                solicited: header.solicited,
                invalidate: header.invalidate,
                immediate: header.immediate,
                write: false,
            }),
            last,
            ack: header.ack_request,
        };
        Some((rx, pending))
    }

    fn rx_write(&self, header: &Header, len: u32) -> Result<(Rx, Pending), NakCode> {
        let invalid = NakCode::InvalidRequest;
        let (rkey, va, left, total) = match (self.open, header.reth) {
            (None, Some(reth)) => (reth.rkey, reth.va, reth.len, reth.len),
            (
                Some(Open::Write {
                    rkey,
                    va,
                    left,
                    len,
                }),
                _,
            ) => (rkey, va, left, len),
            _ => return Err(invalid),
        };
        va.checked_add(left.into()).ok_or(NakCode::RemoteAccess)?;
        let left = left.checked_sub(len).ok_or(invalid)?;
        let last = header.opcode.op.is_last();
        // A message has exactly the bytes that it announces.
        if last != (left == 0) {
            return Err(invalid);
        }
        let immediate = header.immediate;
        let rx = Rx::PlaceWrite {
            rkey,
            va,
            len,
            takes_receive: immediate.is_some(),
        };
        let open = Open::Write {
            rkey,
            va: va + u64::from(len),
            left,
            len: total,
        };
        let pending = Pending::Message {
            open: (!last).then_some(open),
            received: immediate.map(|_| Received {
                len: total,
                solicited: header.solicited,
                invalidate: None,
                immediate,
                write: true,
            }),
            last,
            ack: header.ack_request,
        };
        Ok((rx, pending))
    }

    /// The payload of the packet is in place, or it had none.
    pub fn rx_placed(&mut self) -> Option<Received> {
        match self.pending.take()? {
            Pending::Message {
                open,
                received,
                last,
                ack,
            } => {
                self.open = open;
                self.msn = ahead(self.msn, u32::from(last));
                self.advance(1);
                if self.config.service == Service::Rc {
                    self.unsaid = true;
                    if ack {
                        self.acknowledge();
                    }
                }
                received
            }
            Pending::Answer { seq, now } => {
                self.answer_placed(seq, now);
                None
            }
            other => {
                self.pending = Some(other);
                None
            }
        }
    }

    /// The Read is allowed: its answer follows.
    pub fn accept_read(&mut self) {
        if let Some(Pending::Read { rkey, va, len }) = self.pending {
            self.pending = None;
            let (psn, packets) = (self.expected, self.config.packets(len));
            self.remember(psn, packets, Kind::Read { rkey, va, len });
            self.owe(Out::Read {
                psn,
                rkey,
                va,
                left: len,
                first: true,
                again: false,
            });
            self.msn = ahead(self.msn, 1);
            self.advance(packets);
        }
    }

    /// The atomic is done: its answer follows.
    pub fn atomic_done(&mut self, original: u64) {
        if let Some(Pending::Atomic) = self.pending {
            self.pending = None;
            let psn = self.expected;
            self.remember(psn, 1, Kind::Atomic { original });
            self.owe(Out::Atomic {
                psn,
                original,
                again: false,
            });
            self.msn = ahead(self.msn, 1);
            self.advance(1);
        }
    }

    /// There is no receive for the message: the peer sends it again later. On an unreliable connection it is lost.
    pub fn not_ready(&mut self) {
        if self.pending.take().is_none() {
            return;
        }
        if self.config.service == Service::Uc {
            self.open = None;
            self.advance(1);
            return;
        }
        // What follows on its heels is not missing, and comes again with it.
        (self.nak_sent, self.early) = (true, None);
        self.tell(Syndrome::RnrNak(self.config.rnr_timer & 31));
    }

    /// Says that the packet expected is not there or cannot be used, in place of what was last said and is not sent yet.
    fn tell(&mut self, syndrome: Syndrome) {
        let answer = self.out.iter().rposition(Out::is_answer);
        let settled = answer.map_or(0, |at| at + 1);
        let unsent = (settled..self.out.len()).find(|at| matches!(self.out[*at], Out::Nak { .. }));
        let psn = self.expected;
        if let Some(unsent) = unsent {
            let waits = matches!(self.out[unsent], Out::Nak { psn: of, syndrome: Syndrome::RnrNak(_) } if of == psn);
            if waits && syndrome == Syndrome::Nak(NakCode::SequenceError) {
                // The packet is here, and the peer is to wait before it sends it again.
                return;
            }
            self.out.remove(unsent);
        }
        self.out.push_back(Out::Nak { psn, syndrome });
    }

    /// An answer to a new request, within the peer's limit: so its oldest one is complete, and is not repeated any more.
    fn owe(&mut self, answer: Out) {
        let owed = self.out.iter().filter(|out| out.is_answer()).count();
        if owed >= self.config.ird as usize
            && let Some(oldest) = self.out.iter().position(Out::is_again)
        {
            self.out.remove(oldest);
        }
        self.out.push_back(answer);
    }

    /// The message of the peer in progress, for a report: whether it is a Write, and its bytes so far (a Send) or to come (a Write).
    pub fn in_progress(&self) -> Option<(bool, u32)> {
        self.open.map(|open| match open {
            Open::Send { received } => (false, received),
            Open::Write { left, .. } => (true, left),
        })
    }

    /// What [`rx`](Self::rx) named last cannot be carried out, before or right after its [`rx_placed`](Self::rx_placed): the peer is told, and
    /// the connection has failed. The answer to a request of ours fails that request. On an unreliable connection the message is dropped.
    pub fn refuse(&mut self, code: NakCode) {
        if let Some(Pending::Answer { seq, .. }) = self.pending.take() {
            return self.fail(seq, Status::LocalError);
        }
        if let Some(Out::Ack { psn }) = self.out.back_mut()
            && *psn == self.looked_at
        {
            *psn = psn.wrapping_sub(1) & MASK_24;
        }
        if self.config.service == Service::Uc {
            self.open = None;
            if self.looked_at == self.expected {
                self.advance(1);
            }
        } else if self.state == State::Open {
            self.state = State::Failed;
            self.refusal = Some(code);
            self.out.push_back(Out::Nak {
                psn: self.looked_at,
                syndrome: Syndrome::Nak(code),
            });
        }
    }

    /// The memory of the answer that [`next_tx`](Self::next_tx) named last can no longer be read. If the peer has asked for that answer once more, it is told and
    /// the connection goes on: the request was late and the peer has the answer, or the peer fails.
    pub fn source_gone(&mut self) {
        let (psn, again) = self.sourcing;
        let told = Out::Nak {
            psn,
            syndrome: Syndrome::Nak(NakCode::RemoteAccess),
        };
        if again {
            let rest = ahead(psn, 1);
            if matches!(self.out.front(), Some(Out::Read { psn, .. }) if *psn == rest) {
                self.out.pop_front();
            }
            self.out.push_front(told);
            return;
        }
        self.out.clear();
        if self.state == State::Open {
            self.looked_at = psn;
            self.refuse(NakCode::RemoteAccess);
        } else {
            // A later request was refused before. Only the first of both is said.
            self.out.push_back(told);
        }
    }

    fn advance(&mut self, packets: u32) {
        self.expected = ahead(self.expected, packets);
        self.nak_sent = false;
        self.early = None;
    }

    /// The connection is about to end: the peer is told of messages that have arrived, although it has not asked.
    pub fn acknowledge_unasked(&mut self) {
        if self.unsaid && self.state == State::Open {
            self.acknowledge();
        }
    }

    /// Everything before the packet expected has arrived.
    fn acknowledge(&mut self) {
        self.unsaid = false;
        let psn = self.expected.wrapping_sub(1) & MASK_24;
        let mut unsent = self.out.iter_mut().rev().take_while(|out| !out.is_answer());
        if let Some(Out::Ack { psn: last }) = unsent.find(|out| matches!(out, Out::Ack { .. })) {
            *last = psn;
        } else {
            self.out.push_back(Out::Ack { psn });
        }
    }

    fn remember(&mut self, psn: u32, packets: u32, kind: Kind) {
        while self.resources.len() >= self.config.ird.max(1) as usize {
            self.resources.pop_front();
        }
        self.resources.push_back(Resource { psn, packets, kind });
    }

    /// A request that was carried out already: its answer may have been lost.
    fn rx_again(&mut self, header: &Header) {
        let op = header.opcode.op;
        if op.is_send() || op.is_write() {
            self.acknowledge();
            return;
        }
        let psn = header.psn;
        // The newest first: numbers wrap, and an old one may have been in the same range.
        let known = self
            .resources
            .iter()
            .rev()
            .find(|resource| is_within(psn, resource.psn, resource.packets));
        let Some(&Resource {
            psn: first,
            packets,
            kind,
        }) = known
        else {
            return;
        };
        match (kind, header.reth) {
            (Kind::Atomic { original }, None) => {
                let known = |out: &Out| matches!(out, Out::Atomic { psn: of, .. } if *of == psn);
                if !self.out.iter().any(known) {
                    let again = true;
                    self.out.push_back(Out::Atomic {
                        psn,
                        original,
                        again,
                    });
                }
            }
            (Kind::Read { rkey, va, len }, Some(reth)) => {
                let skipped = distance(psn, first).cast_unsigned() * self.config.mtu;
                let same = reth.rkey == rkey
                    && skipped <= len
                    && reth.va == va.wrapping_add(skipped.into())
                    && reth.len == len - skipped;
                if !same {
                    return;
                }
                let answer = |again| Out::Read {
                    psn,
                    rkey,
                    va: reth.va,
                    left: reth.len,
                    first: true,
                    again,
                };
                let in_progress = self.out.iter_mut().find(
                    |out| matches!(out, Out::Read { psn, .. } if is_within(*psn, first, packets)),
                );
                match in_progress {
                    // What was never sent whole, the peer cannot have.
                    Some(out) => *out = answer(out.is_again()),
                    None => self.out.push_back(answer(true)),
                }
            }
            _ => {}
        }
    }

    /// The next packet that is owed to the peer.
    pub(super) fn next_answer(&mut self, header: &mut Vec<u8>) -> Option<Tx> {
        let config = self.config;
        if matches!(self.out.front()?, Out::Read { .. }) {
            if self.burst == 0 {
                (self.burst, self.interrupted) = (BURST, true);
                return None;
            }
            self.burst -= 1;
        }
        let out = self.out.pop_front()?;
        let aeth = |syndrome| {
            let msn = self.msn;
            Some(Aeth { syndrome, msn })
        };
        let ok = aeth(Syndrome::Ack(UNLIMITED));
        let of = |op, psn| Header {
            pkey: config.pkey,
            ..Header::new(Opcode::rc(op), config.dest_qp, psn)
        };
        let mut payload = Payload::None;
        let mut pad = 0;
        let packet = match out {
            Out::Ack { psn } => Header {
                aeth: ok,
                ..of(Op::Ack, psn)
            },
            Out::Nak { psn, syndrome } => Header {
                aeth: aeth(syndrome),
                ..of(Op::Ack, psn)
            },
            Out::Atomic { psn, original, .. } => Header {
                aeth: ok,
                original: Some(original),
                ..of(Op::AtomicAck, psn)
            },
            Out::Read {
                psn,
                rkey,
                va,
                left,
                first,
                again,
            } => {
                self.sourcing = (psn, again);
                let len = left.min(config.mtu);
                let last = len == left;
                if !last {
                    self.out.push_front(Out::Read {
                        psn: ahead(psn, 1),
                        rkey,
                        va: va + u64::from(len),
                        left: left - len,
                        first: false,
                        again,
                    });
                }
                let op = match (first, last) {
                    (true, true) => Op::ReadResponseOnly,
                    (true, false) => Op::ReadResponseFirst,
                    (false, false) => Op::ReadResponseMiddle,
                    (false, true) => Op::ReadResponseLast,
                };
                if len > 0 {
                    payload = Payload::Source {
                        stag: rkey,
                        to: va,
                        len,
                    };
                }
                pad = len.wrapping_neg() as u8 & 3;
                Header {
                    pad,
                    aeth: ok.filter(|_| op.has_aeth()),
                    ..of(op, psn)
                }
            }
        };
        packet.emit(header);
        Some(Tx { payload, pad })
    }
}
