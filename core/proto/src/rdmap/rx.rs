//! The receive side: the checks of the peer's next segment.

use weft_wire::ddp::{Header, Tagged, Untagged};
use weft_wire::rdmap::{
    AtomicRequest, AtomicResponse, IMMEDIATE_LEN, Opcode, QN_SEND, ReadRequest, Terminate,
};

use super::fault::Offender;
use super::{Fault, MAX_CONTROL, Op, Progress, Response, State, Stream, WITH_SEND, WRITTEN};

/// The action for the payload of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rx {
    /// Check rights and bounds, place the payload in the region, then [`Stream::rx_placed`]. A segment without payload
    /// touches no memory, so its `STag` is not to be checked (RFC 5040 section 5.1).
    PlaceWrite {
        /// Our region.
        stag: u32,
        /// The offset in it; `to + len` does not overflow.
        to: u64,
        /// Bytes.
        len: u32,
    },
    /// Place the payload in the scatter list of a Read, then [`Stream::rx_placed`].
    PlaceRead {
        /// The Read.
        seq: u64,
        /// The offset in its scatter list; `offset + len` is within it.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// Place the payload in the receive of the current message, then [`Stream::rx_placed`].
    PlaceRecv {
        /// A new message: take a receive; if there is none, `fail` with [`Fault::NoReceive`].
        first: bool,
        /// The offset in the message; if `mo + len` is beyond the receive, `fail` with [`Fault::ReceiveTooSmall`].
        mo: u32,
        /// Bytes.
        len: u32,
    },
    /// Give the body to [`Stream::rx_control`].
    Control {
        /// Bytes, at most [`MAX_CONTROL`].
        len: u32,
    },
}

/// Something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message is complete and consumes its receive.
    Received {
        /// Bytes placed in the receive; with the Immediate Data of an RDMA Write, those that the Write has placed.
        len: u32,
        /// The sender asked for an event.
        solicited: bool,
        /// Invalidate this `STag` before the completion; if that is not allowed, `fail` with
        /// [`Fault::CannotInvalidate`].
        invalidate: Option<u32>,
        /// An Immediate Data message: unless it had data, there was no [`Rx::PlaceRecv`], so take a receive now; if there is none,
        /// `fail` with [`Fault::NoReceive`].
        immediate: Option<u64>,
    },
    /// The peer requests a Read: check rights and bounds now (unless `len` is 0), then [`Stream::accept_read`] or `fail`.
    ReadRequested {
        /// Our region.
        stag: u32,
        /// The offset in it; `to + len` does not overflow.
        to: u64,
        /// Bytes.
        len: u32,
    },
    /// The peer requests an Atomic Operation on 8 bytes: check and do it now, then [`Stream::atomic_done`] or `fail`.
    AtomicRequested(AtomicRequest),
    /// One of our Atomics is done: store the original value in its scatter list.
    AtomicResult {
        /// The Atomic.
        seq: u64,
        /// The value before the operation.
        original: u64,
    },
    /// The peer's last message. Close the connection and [`Stream::flush`].
    Terminated(Terminate),
}

/// The caller's pending action for the segment accepted last.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pending {
    Idle,
    Write,
    Read {
        last: bool,
    },
    Recv {
        done: Option<Event>,
    },
    Control {
        opcode: Opcode,
        len: u32,
        written: u32,
    },
    AcceptRead {
        request: ReadRequest,
        msn: u32,
    },
    AtomicDone {
        request_id: u32,
    },
}

/// A tagged message whose last segment has not come.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenTagged {
    opcode: Opcode,
    stag: u32,
    to: u64,
}

/// A message on queue 0 whose last segment has not come.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenUntagged {
    opcode: Opcode,
    mo: u32,
}

impl<W> Stream<W> {
    /// Checks the next segment of the peer: `ulpdu_len` bytes with the header.
    pub fn rx_segment(&mut self, header: &Header, ulpdu_len: usize) -> Result<Rx, Fault> {
        if self.state != State::Open {
            return Err(Fault::Closed);
        }
        if !matches!(self.pending, Pending::Idle) {
            return Err(Fault::LocalCatastrophic);
        }
        let len = ulpdu_len.checked_sub(header.len()).map(u32::try_from);
        self.offender = Offender::new(header, ulpdu_len);
        let Some(Ok(len)) = len else {
            return Err(Fault::BadFrame);
        };
        let rx = match header {
            Header::Tagged(header) => self.rx_tagged(header, len),
            Header::Untagged(header) => self.rx_untagged(header, len),
        }?;
        self.hold = false;
        Ok(rx)
    }

    /// The peer's first segment has come, and is not given to [`rx_segment`](Self::rx_segment) yet.
    pub fn heard(&mut self) {
        self.hold = false;
    }

    /// A segment continues its message where the previous one ended, with the same opcode and `STag` (RFC 5041 section 5).
    fn rx_tagged(&mut self, header: &Tagged, len: u32) -> Result<Rx, Fault> {
        let Tagged {
            opcode,
            last,
            stag,
            to,
        } = *header;
        if let Some(open) = self.rx_tagged {
            if open.opcode != opcode {
                return Err(Fault::UnexpectedOpcode);
            }
            if open.stag != stag {
                return Err(Fault::InvalidStag);
            }
            if open.to != to {
                return Err(Fault::Bounds);
            }
        }
        let end = to.checked_add(len.into()).ok_or(Fault::ToWrap)?;
        let rx = match opcode {
            Opcode::Write => {
                let before = self.rx_tagged.map_or(0, |_| self.rx_written);
                self.rx_written = before.saturating_add(len);
                self.pending = Pending::Write;
                Rx::PlaceWrite { stag, to, len }
            }
            Opcode::ReadResponse => self.rx_read_response(header, len)?,
            _ => return Err(Fault::UnexpectedOpcode),
        };
        self.rx_tagged = (!last).then_some(OpenTagged {
            opcode,
            stag,
            to: end,
        });
        Ok(rx)
    }

    /// Only the oldest outstanding request can be answered, and the answer must match the request exactly.
    fn rx_read_response(&mut self, header: &Tagged, len: u32) -> Result<Rx, Fault> {
        let read = self.outstanding.front_mut().ok_or(Fault::InvalidStag)?;
        if read.atomic || header.stag != read.key {
            return Err(Fault::InvalidStag);
        }
        let offset = read.received;
        let left = read.len - offset;
        if header.to != u64::from(offset) || len > left || header.last != (len == left) {
            return Err(Fault::Bounds);
        }
        read.received += len;
        self.pending = Pending::Read { last: header.last };
        Ok(Rx::PlaceRead {
            seq: read.seq,
            offset,
            len,
        })
    }

    fn rx_untagged(&mut self, header: &Untagged, len: u32) -> Result<Rx, Fault> {
        let Untagged {
            opcode,
            last,
            invalidate,
            qn,
            msn,
            mo,
        } = *header;
        let Some(queue) = opcode.queue() else {
            return Err(Fault::UnexpectedOpcode);
        };
        if queue != qn {
            return Err(Fault::InvalidQn);
        }
        let expected = self.rx_msn.get_mut(qn as usize).ok_or(Fault::InvalidQn)?;
        if msn != *expected {
            return Err(Fault::MsnRange);
        }
        let open = self.rx_untagged.filter(|_| qn == QN_SEND);
        if open.is_some_and(|open| open.opcode != opcode) {
            return Err(Fault::UnexpectedOpcode);
        }
        if mo != open.map_or(0, |open| open.mo) {
            return Err(Fault::InvalidMo);
        }
        let mut written = 0;
        if qn == QN_SEND {
            let last = std::mem::take(&mut self.rx_written);
            written = match invalidate {
                WITH_SEND => 0,
                told if self.believes_written && told & WRITTEN != 0 => told & !WRITTEN,
                _ => last,
            };
        }
        let body = match opcode {
            Opcode::Immediate | Opcode::ImmediateSe
                if open.is_some() || !last || len as usize > IMMEDIATE_LEN =>
            {
                return self.rx_send_immediate(header, len);
            }
            Opcode::Immediate | Opcode::ImmediateSe => IMMEDIATE_LEN,
            Opcode::ReadRequest => ReadRequest::LEN,
            Opcode::AtomicRequest => AtomicRequest::LEN,
            Opcode::AtomicResponse => AtomicResponse::LEN,
            Opcode::Terminate => MAX_CONTROL,
            _ => {
                let end = mo.checked_add(len).ok_or(Fault::ReceiveTooSmall)?;
                if last {
                    *expected = msn.wrapping_add(1);
                }
                self.rx_untagged = (!last).then_some(OpenUntagged { opcode, mo: end });
                let done = last.then_some(Event::Received {
                    len: end,
                    solicited: opcode.is_solicited(),
                    invalidate: opcode.invalidates().then_some(invalidate),
                    immediate: None,
                });
                self.pending = Pending::Recv { done };
                return Ok(Rx::PlaceRecv {
                    first: open.is_none(),
                    mo,
                    len,
                });
            }
        };
        // A control message is one segment of known length. A longer one does not fit the buffer that DDP has for it.
        let shortest = if opcode == Opcode::Terminate { 0 } else { body };
        if !last || len as usize > body {
            return Err(Fault::ReceiveTooSmall);
        }
        if (len as usize) < shortest {
            return Err(Fault::BadFrame);
        }
        match opcode {
            Opcode::ReadRequest | Opcode::AtomicRequest
                if self.responses.len() >= self.config.ird as usize =>
            {
                return Err(Fault::TooManyReads);
            }
            Opcode::AtomicResponse
                if !self.outstanding.front().is_some_and(|oldest| oldest.atomic) =>
            {
                return Err(Fault::NoReceive);
            }
            _ => {}
        }
        *expected = msn.wrapping_add(1);
        self.pending = Pending::Control {
            opcode,
            len,
            written,
        };
        Ok(Rx::Control { len })
    }

    /// A segment of a Send with immediate data, which is an Immediate Data message that goes on
    /// (docs/spec/rdmap-extensions.md). `header` was checked as far as any untagged one.
    fn rx_send_immediate(&mut self, header: &Untagged, len: u32) -> Result<Rx, Fault> {
        let first = self.rx_untagged.is_none();
        let end = header.mo.checked_add(len).ok_or(Fault::ReceiveTooSmall)?;
        let before = IMMEDIATE_LEN as u32;
        // The immediate data counts as its first bytes, all of them in the first segment.
        let data_end = end.checked_sub(before).ok_or(Fault::BadFrame)?;
        let (mo, len) = if first {
            (0, data_end)
        } else {
            (header.mo - before, len)
        };
        if header.last {
            self.rx_msn[QN_SEND as usize] = header.msn.wrapping_add(1);
        }
        self.rx_untagged = (!header.last).then_some(OpenUntagged {
            opcode: header.opcode,
            mo: end,
        });
        let done = header.last.then_some(Event::Received {
            len: data_end,
            solicited: header.opcode.is_solicited(),
            invalidate: None,
            immediate: Some(0),
        });
        self.pending = Pending::Recv { done };
        Ok(Rx::PlaceRecv { first, mo, len })
    }

    /// The eight bytes before the payload of the first segment of a Send with immediate data.
    pub fn rx_immediate(&mut self, bytes: [u8; IMMEDIATE_LEN]) {
        self.rx_immediate = u64::from_be_bytes(bytes);
    }

    /// Takes the body of the control message that [`rx_segment`](Self::rx_segment) announced.
    pub fn rx_control(&mut self, body: &[u8]) -> Result<Option<Event>, Fault> {
        let Pending::Control {
            opcode,
            len,
            written,
        } = self.pending
        else {
            return Err(Fault::LocalCatastrophic);
        };
        if body.len() != len as usize {
            return Err(Fault::LocalCatastrophic);
        }
        self.pending = Pending::Idle;
        let event = match opcode {
            Opcode::ReadRequest => {
                let request = ReadRequest::parse(body).ok_or(Fault::BadFrame)?;
                self.offender.read_request = Some(request);
                let ReadRequest {
                    sink_to,
                    size,
                    src_stag: stag,
                    src_to: to,
                    ..
                } = request;
                if to.checked_add(size.into()).is_none()
                    || sink_to.checked_add(size.into()).is_none()
                {
                    return Err(Fault::ToWrap);
                }
                self.pending = Pending::AcceptRead {
                    request,
                    msn: self.request_number(),
                };
                Event::ReadRequested {
                    stag,
                    to,
                    len: size,
                }
            }
            Opcode::AtomicRequest => {
                let request = AtomicRequest::parse(body).ok_or(Fault::UnexpectedOpcode)?;
                // Before the STag is looked at, as InfiniBand devices have it.
                if !request.to.is_multiple_of(8) {
                    return Err(Fault::Misaligned);
                }
                if request.to.checked_add(8).is_none() {
                    return Err(Fault::ToWrap);
                }
                self.pending = Pending::AtomicDone {
                    request_id: request.request_id,
                };
                Event::AtomicRequested(request)
            }
            Opcode::AtomicResponse => {
                let response = AtomicResponse::parse(body).ok_or(Fault::BadFrame)?;
                let atomic = self.outstanding.front().ok_or(Fault::NoReceive)?;
                if atomic.key != response.request_id {
                    return Err(Fault::AtomicMismatch);
                }
                let seq = atomic.seq;
                self.answered();
                Event::AtomicResult {
                    seq,
                    original: response.original,
                }
            }
            Opcode::Terminate => {
                let terminate = Terminate::parse(body).map_err(|_| Fault::BadFrame)?;
                self.terminated(&terminate);
                Event::Terminated(terminate)
            }
            _ => {
                let immediate = body
                    .try_into()
                    .map(u64::from_be_bytes)
                    .map_err(|_| Fault::BadFrame)?;
                Event::Received {
                    len: written,
                    solicited: opcode.is_solicited(),
                    invalidate: None,
                    immediate: Some(immediate),
                }
            }
        };
        Ok(Some(event))
    }

    /// The payload of the segment accepted last is in place, or it had none.
    pub fn rx_placed(&mut self) -> Option<Event> {
        let event = match self.pending {
            Pending::Write | Pending::Read { last: false } => None,
            Pending::Read { last: true } => {
                self.answered();
                None
            }
            Pending::Recv { done } => done.map(|event| match event {
                Event::Received {
                    len,
                    solicited,
                    invalidate,
                    immediate: Some(_),
                } => Event::Received {
                    len,
                    solicited,
                    invalidate,
                    immediate: Some(self.rx_immediate),
                },
                event => event,
            }),
            Pending::Idle
            | Pending::Control { .. }
            | Pending::AcceptRead { .. }
            | Pending::AtomicDone { .. } => {
                return None;
            }
        };
        self.pending = Pending::Idle;
        event
    }

    /// The Read that [`Event::ReadRequested`] announced is allowed: queue its response.
    pub fn accept_read(&mut self) {
        if let Pending::AcceptRead { request, msn } = self.pending {
            self.responses.push_back(Response::Read { request, msn });
            self.pending = Pending::Idle;
        }
    }

    /// The Atomic that [`Event::AtomicRequested`] announced is done: queue its response.
    pub fn atomic_done(&mut self, original: u64) {
        if let Pending::AtomicDone { request_id } = self.pending {
            self.responses.push_back(Response::Atomic {
                request_id,
                original,
            });
            self.pending = Pending::Idle;
        }
    }

    /// The oldest outstanding request has its answer.
    fn answered(&mut self) {
        let Some(oldest) = self.outstanding.pop_front() else {
            return;
        };
        if let Some(entry) = self.entry(oldest.seq) {
            entry.progress = Progress::Done;
        }
        if self.until_answered {
            // Those before it are popped soon, so this is not long.
            self.received_before(oldest.seq);
        }
    }

    /// The peer has come to this work request: the Sends and Writes before it were received or placed. Nothing comes with the answer to an
    /// empty Read.
    pub(super) fn received_before(&mut self, seq: u64) {
        let before = seq.saturating_sub(self.base) as usize;
        for entry in self.sq.iter_mut().take(before) {
            let empty = matches!(entry.wr.op, Op::Read { .. }) && entry.wr.len == 0;
            if empty || !entry.wr.op.is_answered() {
                entry.progress = Progress::Done;
            }
        }
    }

    /// The number of the peer's complete messages on queue 0, modulo 2^32.
    pub const fn messages_received(&self) -> u32 {
        self.rx_msn[QN_SEND as usize].wrapping_sub(1)
    }

    /// The peer says how many of our messages on queue 0 it has received, modulo 2^32: they are complete, and so are the Writes before them.
    /// Only with [`complete_when_answered`](Self::complete_when_answered); of messages that have not been handed out it says nothing.
    pub fn peer_received(&mut self, messages: u32) {
        if !self.until_answered {
            return;
        }
        let sent = (self.next - self.base) as usize;
        let last = self.sq.iter().take(sent).rposition(|entry| {
            entry.wr.op.takes_receive() && messages.wrapping_sub(entry.msn) < 1 << 31
        });
        if let Some(last) = last {
            self.received_before(self.base + last as u64 + 1);
        }
    }

    /// The sequence number of the request just accepted.
    fn request_number(&self) -> u32 {
        match self.offender.header {
            Some(Header::Untagged(header)) => header.msn,
            _ => 0,
        }
    }
}
