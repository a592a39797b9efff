//! The transmit side: which message is next, and how it is cut into segments.

use weft_wire::ddp::{self, Header, Tagged, Untagged};
use weft_wire::rdmap::{
    AtomicRequest, AtomicResponse, IMMEDIATE_LEN, Opcode, QN_ATOMIC_RESPONSE, QN_READ_REQUEST,
    QN_SEND, QN_TERMINATE, ReadRequest, Terminate,
};

use super::fault::Offender;
use super::{
    MAX_HEADER, Op, Outstanding, Payload, Progress, Response, SendWr, State, Stream, Tx, WITH_SEND,
    WRITTEN,
};

/// The message being cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Between messages.
    Idle,
    /// Work request `next`.
    Wr {
        /// Payload handed out, in bytes.
        offset: u32,
        /// The Write is out, its Immediate Data is next.
        immediate: bool,
    },
    /// See [`Stream::notify`].
    Notice { to: u64 },
    /// The first response.
    Response {
        /// Payload handed out, in bytes.
        offset: u32,
    },
}

/// The tagged offset of a notice of this kind, for [`Stream::notify`].
pub const fn notice(kind: [u8; 4], number: u32) -> u64 {
    (u32::from_be_bytes(kind) as u64) << 32 | number as u64
}

/// The number in the notice with this tagged offset, if it is of this kind.
pub fn noticed(kind: [u8; 4], to: u64) -> Option<u32> {
    (to >> 32 == u64::from(u32::from_be_bytes(kind))).then_some(to as u32)
}

impl<W> Stream<W> {
    /// The next thing to transmit, its header written to `hdr`; `None` if there is nothing that may go now.
    pub fn next_tx(&mut self, hdr: &mut [u8; MAX_HEADER]) -> Option<Tx> {
        match self.state {
            State::Open if !self.hold => {}
            State::Terminating => {
                return self
                    .terminate
                    .take()
                    .map(|terminate| emit_terminate(&terminate, hdr));
            }
            State::Open | State::Terminated | State::Closed => return None,
        }
        match self.choose()? {
            Cut::Wr { offset, immediate } => self.cut_wr(offset, immediate, hdr),
            Cut::Response { offset } => self.cut_response(offset, hdr),
            Cut::Notice { to } => Some(self.cut_notice(to, hdr)),
            Cut::Idle => None,
        }
    }

    /// Sends an empty RDMA Write to `STag` 0 with this tagged offset before the next posted work request. Peers that know the number
    /// interpret it; for others it has no effect, because no memory is touched (RFC 5040 section 5.1). The high half names the kind
    /// ([`notice`]); a later notice replaces a waiting one of its kind.
    pub fn notify(&mut self, to: u64) {
        self.notices.retain(|(other, _)| other >> 32 != to >> 32);
        self.notices
            .push_back((to, self.base + self.sq.len() as u64));
    }

    fn cut_notice(&mut self, to: u64, hdr: &mut [u8; MAX_HEADER]) -> Tx {
        self.notices.pop_front();
        let header = Header::Tagged(Tagged {
            opcode: Opcode::Write,
            last: true,
            stag: 0,
            to,
        });
        Tx {
            header_len: emit(&header, hdr),
            payload: Payload::None,
            completes: None,
            opcode: Some(Opcode::Write),
        }
    }

    /// The work request that could start now, when no message is in progress: for transports on which the initiator can carry out one-sided
    /// work itself. Report the result with [`done_directly`](Self::done_directly) or [`written_directly`](Self::written_directly). Without
    /// a report, [`next_tx`](Self::next_tx) sends it. `None` also while a notice precedes it: the peer may need the notice for the Immediate
    /// Data that follows.
    pub fn next_to_start(&self) -> Option<u64> {
        let open = self.state == State::Open && !self.hold && self.cut == Cut::Idle;
        let ready = open && self.due_notice().is_none() && self.next_may_start();
        ready.then_some(self.next)
    }

    /// The work request that [`next_to_start`](Self::next_to_start) named was carried out without the peer.
    pub fn done_directly(&mut self) {
        let next = self.next;
        if let Some(entry) = self.entry(next) {
            entry.progress = Progress::Done;
            self.finish_wr();
        }
    }

    /// The data of the Write with Immediate that [`next_to_start`](Self::next_to_start) named is in place: only its Immediate Data has to
    /// be sent.
    pub fn written_directly(&mut self) {
        let (next, msn) = (self.next, self.send_msn);
        if let Some(entry) = self.entry(next)
            && let Op::WriteImm { .. } = entry.wr.op
        {
            let offset = entry.wr.len;
            entry.progress = Progress::Started;
            entry.msn = msn;
            self.written = offset;
            self.cut = Cut::Wr {
                offset,
                immediate: true,
            };
        }
    }

    /// Whether a work request posted now would be the only one, and could start: nothing is queued, outstanding or owed to the peer.
    pub fn is_idle(&self) -> bool {
        self.state == State::Open
            && !self.hold
            && self.cut == Cut::Idle
            && self.notices.is_empty()
            && self.sq.is_empty()
            && self.outstanding.is_empty()
            && self.responses.is_empty()
    }

    /// The header of a Send of one segment that the caller sends, and completes, at once: it is not entered in the queue.
    /// Only while [`is_idle`](Self::is_idle).
    pub fn send_at_once(&mut self, solicited: bool, hdr: &mut [u8; MAX_HEADER]) -> usize {
        let msn = self.send_msn;
        self.send_msn = msn.wrapping_add(1);
        let opcode = if solicited {
            Opcode::SendSe
        } else {
            Opcode::Send
        };
        emit(&queue_0(opcode, msn), hdr)
    }

    /// As [`send_at_once`](Self::send_at_once): an Immediate Data message, of a Write of `written` bytes that the caller has carried
    /// out without the peer, if any.
    pub fn immediate_at_once(
        &mut self,
        imm: u64,
        solicited: bool,
        written: u32,
        hdr: &mut [u8; MAX_HEADER],
    ) -> usize {
        let msn = self.send_msn;
        self.send_msn = msn.wrapping_add(1);
        let told = if (1..WRITTEN).contains(&written) {
            WRITTEN | written
        } else {
            0
        };
        let header = Header::Untagged(Untagged {
            invalidate: told,
            ..untagged_0(immediate_opcode(solicited), msn)
        });
        emit_control(&header, hdr, |body| *body = imm.to_be_bytes())
    }

    /// Continues the message in progress, or chooses the next.
    pub(super) fn choose(&self) -> Option<Cut> {
        if self.cut != Cut::Idle {
            return Some(self.cut);
        }
        if let Some(to) = self.due_notice() {
            return Some(Cut::Notice { to });
        }
        let response = !self.responses.is_empty();
        if response && self.response_turn {
            return Some(Cut::Response { offset: 0 });
        }
        if self.next_may_start() {
            return Some(Cut::Wr {
                offset: 0,
                immediate: false,
            });
        }
        response.then_some(Cut::Response { offset: 0 })
    }

    /// The tagged offset of the notice that precedes the next work request.
    fn due_notice(&self) -> Option<u64> {
        let (to, before) = self.notices.front()?;
        (self.next >= *before).then_some(*to)
    }

    /// Whether there is a work request to start and neither ORD nor its fence forbids it.
    fn next_may_start(&self) -> bool {
        let index = (self.next - self.base) as usize;
        self.sq.get(index).is_some_and(|entry| {
            let waits_for_ord =
                entry.wr.op.is_answered() && self.outstanding.len() >= self.config.ord as usize;
            let waits_for_fence = entry.wr.fence && !self.outstanding.is_empty();
            !waits_for_ord && !waits_for_fence
        })
    }

    fn cut_wr(&mut self, offset: u32, immediate: bool, hdr: &mut [u8; MAX_HEADER]) -> Option<Tx> {
        let seq = self.next;
        let (send_msn, request_msn) = (self.send_msn, self.request_msn);
        let entry = self.entry(seq)?;
        let SendWr { op, len, .. } = entry.wr;
        if entry.progress == Progress::Queued {
            entry.progress = Progress::Started;
            entry.msn = if op.is_answered() {
                request_msn
            } else {
                send_msn
            };
        }
        let (header, n) = match op {
            Op::Local => {
                self.finish_wr();
                let payload = Payload::Local { seq };
                return Some(Tx {
                    header_len: 0,
                    payload,
                    completes: Some(seq),
                    opcode: None,
                });
            }
            Op::Read { .. } | Op::Atomic { .. } => {
                return Some(self.cut_request(op, len, request_msn, hdr));
            }
            Op::WriteImm { imm, solicited, .. } if immediate => {
                return Some(self.cut_immediate(imm, solicited, hdr));
            }
            Op::Imm { imm, solicited } => return Some(self.cut_immediate(imm, solicited, hdr)),
            Op::Write { stag, to } | Op::WriteImm { stag, to, .. } => {
                let (n, last) = self.piece(len - offset, ddp::TAGGED_LEN);
                let to = to.wrapping_add(offset.into());
                (
                    Header::Tagged(Tagged {
                        opcode: Opcode::Write,
                        last,
                        stag,
                        to,
                    }),
                    n,
                )
            }
            Op::SendImm { imm, solicited } => {
                return Some(self.cut_send_imm((imm, solicited), offset, len, hdr));
            }
            Op::Send {
                solicited,
                invalidate,
            } => {
                let (n, last) = self.piece(len - offset, ddp::UNTAGGED_LEN);
                let opcode = match (solicited, invalidate) {
                    (false, None) => Opcode::Send,
                    (false, Some(_)) => Opcode::SendInvalidate,
                    (true, None) => Opcode::SendSe,
                    (true, Some(_)) => Opcode::SendSeInvalidate,
                };
                let invalidate = invalidate.unwrap_or(0);
                (
                    Header::Untagged(Untagged {
                        opcode,
                        last,
                        invalidate,
                        qn: QN_SEND,
                        msn: send_msn,
                        mo: offset,
                    }),
                    n,
                )
            }
        };
        let with_immediate = matches!(op, Op::WriteImm { .. });
        let completes = header.is_last() && !with_immediate;
        if completes {
            if matches!(op, Op::Send { .. }) {
                self.send_msn = send_msn.wrapping_add(1);
            }
            self.finish_wr();
        } else {
            self.cut = Cut::Wr {
                offset: offset + n,
                immediate: header.is_last(),
            };
        }
        Some(Tx {
            header_len: emit(&header, hdr),
            payload: if n == 0 {
                Payload::None
            } else {
                Payload::Wr {
                    seq,
                    offset,
                    len: n,
                }
            },
            completes: completes.then_some(seq),
            opcode: Some(header.opcode()),
        })
    }

    /// A request that the peer answers: for a Read or an atomic operation.
    fn cut_request(&mut self, op: Op, len: u32, msn: u32, hdr: &mut [u8; MAX_HEADER]) -> Tx {
        let seq = self.next;
        let (opcode, header_len) = match op {
            Op::Read { src_stag, src_to } => {
                let sink_stag = self.ask(seq, len, false);
                let request = ReadRequest {
                    sink_stag,
                    sink_to: 0,
                    size: len,
                    src_stag,
                    src_to,
                };
                let opcode = Opcode::ReadRequest;
                let header = request_header(opcode, msn);
                (opcode, emit_control(&header, hdr, |b| request.emit(b)))
            }
            Op::Atomic {
                op,
                stag,
                to,
                add_or_swap,
                add_or_swap_mask,
                compare,
                compare_mask,
            } => {
                let request_id = self.ask(seq, 0, true);
                let request = AtomicRequest {
                    op,
                    request_id,
                    stag,
                    to,
                    add_or_swap,
                    add_or_swap_mask,
                    compare,
                    compare_mask,
                };
                let opcode = Opcode::AtomicRequest;
                let header = request_header(opcode, msn);
                (opcode, emit_control(&header, hdr, |b| request.emit(b)))
            }
            _ => unreachable!("other operations are not answered"),
        };
        Tx {
            header_len,
            payload: Payload::None,
            completes: Some(seq),
            opcode: Some(opcode),
        }
    }

    /// A piece of a Send with immediate data.
    fn cut_send_imm(
        &mut self,
        (imm, solicited): (u64, bool),
        offset: u32,
        len: u32,
        hdr: &mut [u8; MAX_HEADER],
    ) -> Tx {
        let (seq, msn) = (self.next, self.send_msn);
        let opcode = immediate_opcode(solicited);
        // The immediate data counts as the message's first bytes.
        let (before, mo) = if offset == 0 {
            (IMMEDIATE_LEN, 0)
        } else {
            (0, offset + IMMEDIATE_LEN as u32)
        };
        let (n, last) = self.piece(len - offset, ddp::UNTAGGED_LEN + before);
        let header = Header::Untagged(Untagged {
            last,
            mo,
            invalidate: WITH_SEND,
            ..untagged_0(opcode, msn)
        });
        let header_len = if offset == 0 {
            emit_control(&header, hdr, |body| *body = imm.to_be_bytes())
        } else {
            emit(&header, hdr)
        };
        if last {
            self.send_msn = msn.wrapping_add(1);
            self.finish_wr();
        } else {
            self.cut = Cut::Wr {
                offset: offset + n,
                immediate: false,
            };
        }
        let payload = if n == 0 {
            Payload::None
        } else {
            Payload::Wr {
                seq,
                offset,
                len: n,
            }
        };
        Tx {
            header_len,
            payload,
            completes: last.then_some(seq),
            opcode: Some(opcode),
        }
    }

    /// An Immediate Data message, the end of its work request.
    fn cut_immediate(&mut self, imm: u64, solicited: bool, hdr: &mut [u8; MAX_HEADER]) -> Tx {
        let seq = self.next;
        let written = std::mem::take(&mut self.written);
        let header_len = self.immediate_at_once(imm, solicited, written, hdr);
        self.finish_wr();
        Tx {
            header_len,
            payload: Payload::None,
            completes: Some(seq),
            opcode: Some(immediate_opcode(solicited)),
        }
    }

    /// Enters a Read or Atomic among the outstanding and returns the name its answer must bear.
    fn ask(&mut self, seq: u64, len: u32, atomic: bool) -> u32 {
        let key = name(self.config.sink_key, seq);
        self.outstanding.push_back(Outstanding {
            seq,
            key,
            len,
            received: 0,
            atomic,
        });
        self.request_msn = self.request_msn.wrapping_add(1);
        self.finish_wr();
        key
    }

    fn finish_wr(&mut self) {
        self.next += 1;
        self.cut = Cut::Idle;
        self.response_turn = true;
    }

    fn cut_response(&mut self, offset: u32, hdr: &mut [u8; MAX_HEADER]) -> Option<Tx> {
        let (opcode, header_len, payload, last) = match *self.responses.front()? {
            Response::Read { request, msn } => {
                let ReadRequest {
                    sink_stag: stag,
                    sink_to,
                    size,
                    src_stag,
                    src_to,
                } = request;
                let (n, last) = self.piece(size - offset, ddp::TAGGED_LEN);
                let to = sink_to.wrapping_add(offset.into());
                let header = Header::Tagged(Tagged {
                    opcode: Opcode::ReadResponse,
                    last,
                    stag,
                    to,
                });
                let source = Payload::Source {
                    stag: src_stag,
                    to: src_to.wrapping_add(offset.into()),
                    len: n,
                };
                self.sourcing = Offender {
                    header: Some(request_header(Opcode::ReadRequest, msn)),
                    ulpdu_len: (ddp::UNTAGGED_LEN + ReadRequest::LEN) as u16,
                    read_request: Some(request),
                };
                self.cut = Cut::Response { offset: offset + n };
                (
                    Opcode::ReadResponse,
                    emit(&header, hdr),
                    if n == 0 { Payload::None } else { source },
                    last,
                )
            }
            Response::Atomic {
                request_id,
                original,
            } => {
                let msn = self.atomic_response_msn;
                self.atomic_response_msn = msn.wrapping_add(1);
                let header = Header::Untagged(Untagged {
                    opcode: Opcode::AtomicResponse,
                    last: true,
                    invalidate: 0,
                    qn: QN_ATOMIC_RESPONSE,
                    msn,
                    mo: 0,
                });
                let response = AtomicResponse {
                    request_id,
                    original,
                };
                (
                    Opcode::AtomicResponse,
                    emit_control(&header, hdr, |body| response.emit(body)),
                    Payload::None,
                    true,
                )
            }
        };
        if last {
            self.responses.pop_front();
            self.cut = Cut::Idle;
            self.response_turn = false;
        }
        Some(Tx {
            header_len,
            payload,
            completes: None,
            opcode: Some(opcode),
        })
    }

    /// How many of `left` bytes the next segment carries, and whether it is the last.
    fn piece(&self, left: u32, header_len: usize) -> (u32, bool) {
        let room = self.config.max_ulpdu - header_len as u32;
        if left <= room {
            return (left, true);
        }
        // Even pieces: a short one at the end of each message would cost the receiver as much as a long one. Multiples
        // of four need no padding.
        let even = left.div_ceil(left.div_ceil(room)).next_multiple_of(4);
        (even.min(room), false)
    }
}

/// A random-looking name for the answer to request `seq`: none of our regions should happen to have it.
const fn name(key: u32, seq: u64) -> u32 {
    let mut x = key ^ (seq as u32).wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

const fn request_header(opcode: Opcode, msn: u32) -> Header {
    Header::Untagged(Untagged {
        opcode,
        last: true,
        invalidate: 0,
        qn: QN_READ_REQUEST,
        msn,
        mo: 0,
    })
}

/// The header of a message of one segment on queue 0.
const fn queue_0(opcode: Opcode, msn: u32) -> Header {
    Header::Untagged(untagged_0(opcode, msn))
}

const fn untagged_0(opcode: Opcode, msn: u32) -> Untagged {
    Untagged {
        opcode,
        last: true,
        invalidate: 0,
        qn: QN_SEND,
        msn,
        mo: 0,
    }
}

const fn immediate_opcode(solicited: bool) -> Opcode {
    if solicited {
        Opcode::ImmediateSe
    } else {
        Opcode::Immediate
    }
}

fn emit_terminate(terminate: &Terminate, hdr: &mut [u8; MAX_HEADER]) -> Tx {
    let header = Header::Untagged(Untagged {
        opcode: Opcode::Terminate,
        last: true,
        invalidate: 0,
        qn: QN_TERMINATE,
        msn: 1,
        mo: 0,
    });
    let mut body_len = 0;
    let room = emit_control(&header, hdr, |body| body_len = terminate.emit(body));
    let header_len = room - Terminate::MAX_LEN + body_len;
    Tx {
        header_len,
        payload: Payload::None,
        completes: None,
        opcode: Some(Opcode::Terminate),
    }
}

fn emit(header: &Header, hdr: &mut [u8; MAX_HEADER]) -> usize {
    hdr.first_chunk_mut().map_or(0, |room| header.emit(room))
}

/// Writes an untagged header and a body of `N` bytes; returns their length.
fn emit_control<const N: usize>(
    header: &Header,
    hdr: &mut [u8; MAX_HEADER],
    body: impl FnOnce(&mut [u8; N]),
) -> usize {
    const { assert!(ddp::UNTAGGED_LEN + N <= MAX_HEADER) };
    let len = emit(header, hdr);
    if let Some(room) = hdr[len..].first_chunk_mut() {
        body(room);
    }
    len + N
}
