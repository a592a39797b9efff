//! Checks and places the received bytes of a segment, and carries out its effects.

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;
use weft_mem::{Access, MemError, PdId, RecvList, Span};
use weft_proto::rdmap::{Event, Fault, Rx as Step, WITH_SEND};
use weft_wire::ddp::Header;
use weft_wire::mpa::MarkerStripper;
use weft_wire::rdmap::{AtomicOp, AtomicRequest, IMMEDIATE_LEN, Opcode};

use super::convert::{fault_of, term_code};
use super::end::EndReason;
use super::frame::Frame;
use super::rnr_queue::{Patience, RnrQueue};
use super::{Core, QpInner, peer_terminated};
use crate::pool::Pool;
use crate::transport::Llp;
use crate::types::{RecvWr, Sge, Wc, WcOpcode, WcStatus, sg_len, sub_list};

/// Staging buffer of a connection on shared memory, in bytes: longer payloads have their place when they are fetched.
const LOCAL_STAGE: usize = 16 * 1024;
/// Leftovers of a drive up to this size are kept in a small buffer of their own.
const KEEP_SMALL: usize = 256;
/// Rounds of one drive, so that one connection cannot keep the others waiting.
pub(super) const ROUNDS: u32 = 32;

/// The destination of the rest of a payload.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Write {
        stag: u32,
        to: u64,
    },
    Read {
        seq: u64,
        offset: u32,
    },
    Recv {
        mo: u32,
    },
    /// Data that waits for a receive, see [`RnrQueue`].
    Held,
}

impl Target {
    pub(super) fn advance(&mut self, n: u32) {
        match self {
            Target::Write { to, .. } => *to += u64::from(n),
            Target::Read { offset, .. } => *offset += n,
            Target::Recv { mo } => *mo += n,
            Target::Held => {}
        }
    }
}

pub(super) struct Direct {
    pub(super) target: Target,
    pub(super) left: u32,
    pub(super) bulk: bool,
}

#[derive(Default)]
pub(super) struct Rx {
    pub(super) frame: Frame,
    pub(super) crc: bool,
    pub(super) markers: Option<Box<MarkerStripper>>,
    pub(super) buf: Option<Box<[u8]>>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) held: RnrQueue,
    pub(super) patience: Patience,
    /// Immediate data that has come belongs to a Send.
    with_send: bool,
    /// Bytes left over when the buffer went back to the pool.
    small: SmallVec<[u8; 32]>,
    pub(super) direct: Option<Direct>,
    /// Bytes of padding and (unchecked) CRC still to skip.
    pub(super) trailer: usize,
    /// Length of the FPDU at the front of the buffer, while it is not there as a whole.
    pub(super) need: usize,
    /// Bulk is expected: so many shorter FPDUs end that.
    pub(super) bulk: u8,
    /// The receive of the message in progress.
    pub(super) recv: Option<RecvWr>,
    pub(super) eof: bool,
}

/// A segment whose header has come.
pub(super) struct Segment<'a> {
    pub(super) header: Header,
    /// Its available bytes.
    pub(super) ulpdu: &'a [u8],
    /// Its length in bytes.
    pub(super) len: usize,
    /// Bytes of its frame in the staging buffer; 0 if it has been removed.
    pub(super) total: usize,
    /// All of it is there.
    pub(super) whole: bool,
    /// Bytes that the staging buffer holds.
    pub(super) room: usize,
}

/// Why receiving stops.
#[derive(Clone, Copy)]
pub(super) enum Stop {
    Fault(Fault),
    /// One of our receives is at fault; the peer may be at fault as well.
    Recv(Fault, WcStatus),
    /// The scatter list of this Read or atomic of ours is at fault.
    Sink(u64),
    Terminated,
    Lost,
    Eof,
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Stop::Fault(fault)
    }
}

impl Rx {
    pub(super) fn start(&mut self, frame: Frame, crc: bool, markers: bool, early: &[u8]) {
        self.frame = frame;
        self.crc = crc;
        self.markers = markers.then(|| Box::new(MarkerStripper::new(crc)));
        let mut plain = Vec::new();
        let stripped = self
            .markers
            .as_mut()
            .is_some_and(|stripper| stripper.strip(early, &mut plain).is_ok());
        // With a bad marker the bytes stay as they are, and fail as the FPDU that they are not.
        let early = if stripped { &plain } else { early };
        self.small = SmallVec::from_slice(early);
    }

    pub(super) fn release(&mut self, pool: &Pool) {
        if let Some(buf) = self.buf.take() {
            pool.put_rx(buf);
        }
        self.small = SmallVec::new();
        (self.start, self.end) = (0, 0);
    }

    /// After the end: read and forget. Says whether the peer has closed.
    pub(super) fn discard(&mut self, link: &Llp, pool: &Pool) -> bool {
        if self.eof {
            return true;
        }
        let mut buf = self.buf.take().unwrap_or_else(|| pool.get_rx());
        for _ in 0..ROUNDS {
            let mut list = RecvList::new();
            list.push_buf(&mut buf);
            match link.recv(&mut list) {
                Ok(received) if received.n == 0 => self.eof = true,
                Ok(_) => {
                    link.placed();
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.eof = true,
            }
            break;
        }
        pool.put_rx(buf);
        self.eof
    }

    /// The rest of this segment is added to the held data. All staged bytes belong to it.
    pub(super) fn fetch_held(&mut self, segment: &Segment<'_>) {
        self.direct = Some(Direct {
            target: Target::Held,
            left: (segment.len - segment.ulpdu.len()) as u32,
            bulk: true,
        });
        self.start += self.frame.header_len() + segment.ulpdu.len();
        self.trailer = self.frame.trailer_len(segment.len);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Borrows the buffer, with the leftovers at its front.
    pub(super) fn borrow(&mut self, pool: &Pool) {
        if self.buf.is_none() && self.frame == Frame::Local {
            // Its own, and kept: on shared memory two locks would be felt.
            self.buf = Some(vec![0; LOCAL_STAGE].into_boxed_slice());
            (self.start, self.end) = (0, 0);
        }
        if self.buf.is_none() {
            let mut buf = pool.get_rx();
            let n = self.small.len().min(buf.len());
            buf[..n].copy_from_slice(&self.small[..n]);
            self.small.clear();
            self.buf = Some(buf);
            (self.start, self.end) = (0, n);
        }
    }

    /// Give the buffer back if there is little in it.
    pub(super) fn give_back(&mut self, pool: &Pool) {
        if self.frame == Frame::Mpa
            && self.end - self.start <= KEEP_SMALL
            && let Some(buf) = self.buf.take()
        {
            self.small = SmallVec::from_slice(&buf[self.start..self.end]);
            (self.start, self.end) = (0, 0);
            pool.put_rx(buf);
        }
    }
}

impl QpInner {
    /// Checks a segment, and places its available bytes.
    #[inline]
    pub(super) fn take_in(
        self: &Arc<Self>,
        core: &mut Core,
        segment: &Segment<'_>,
    ) -> Result<bool, Stop> {
        let Segment {
            header,
            ulpdu,
            len: ulpdu_len,
            total,
            whole,
            ..
        } = *segment;
        let Core {
            stream: Some(stream),
            rx,
            counters,
            ..
        } = core
        else {
            return Ok(false);
        };
        let step = stream.rx_segment(&header, ulpdu_len)?;
        rx.with_send = matches!(header, Header::Untagged(header) if header.invalidate == WITH_SEND);
        counters.rx_fpdus += 1;
        let mut payload = &ulpdu[header.len().min(ulpdu.len())..];
        let mut before = 0;
        let mut told = None;
        let (target, len) = match step {
            Step::Control { len } => {
                let body = payload.get(..len as usize).ok_or(Fault::BadFrame)?;
                let event = stream.rx_control(body)?;
                rx.start += total;
                if let Some(event) = event {
                    self.event(core, event)?;
                }
                return Ok(true);
            }
            Step::PlaceWrite { stag, to, len } => {
                if len == 0 && stag == 0 {
                    rx.patience.hear(to);
                    told = Some(to);
                }
                (Target::Write { stag, to }, len)
            }
            Step::PlaceRead { seq, offset, len } => (Target::Read { seq, offset }, len),
            Step::PlaceRecv { first, mo, len } => {
                // One that was waited for is there already.
                if first && rx.recv.is_none() {
                    let wr = self.take_recv().ok_or_else(|| self.no_receive())?;
                    rx.recv = Some(wr);
                }
                let room = rx
                    .recv
                    .as_ref()
                    .and_then(|wr| sg_len(&wr.sges))
                    .unwrap_or(0);
                if before_payload(&header) > 0 {
                    let (immediate, rest) = payload.split_first_chunk().ok_or(Fault::BadFrame)?;
                    stream.rx_immediate(*immediate);
                    (payload, before) = (rest, immediate.len());
                }
                if mo.checked_add(len).is_none_or(|end| end > room) {
                    return Err(Stop::Recv(Fault::ReceiveTooSmall, WcStatus::LocLenErr));
                }
                (Target::Recv { mo }, len)
            }
        };
        if let Some(to) = told {
            core.hear_received(to);
            self.hear_srq(core, to)?;
        }
        // The whole segment is checked before its first byte is placed: where none of it is here yet, when it is fetched.
        let here = payload.len().min(len as usize);
        if let (true, Target::Recv { mo: 0 }, Some([sge])) = (
            whole && len > 0,
            target,
            core.rx.recv.as_ref().map(|wr| wr.sges.as_slice()),
        ) {
            // The common case, without keeping the region: one piece into one buffer.
            let need = Access::LOCAL_WRITE;
            let (pd, payload) = (self.recv_pd(), &payload[..here]);
            if let Some(span) = core.keys.known(pd, sge.lkey, sge.addr, here as u32, need) {
                span.copy_in(payload);
            } else {
                core.keys
                    .local(pd, sge.lkey, sge.addr, here as u32, need)
                    .map_err(|_| Stop::Recv(Fault::BadReceive, WcStatus::LocProtErr))?
                    .copy_in(payload);
            }
            core.counters.rx_copied += here as u64;
        } else if here > 0 {
            let spans = self.spans(core, target, len)?;
            scatter(&spans, &payload[..here]);
            core.counters.rx_copied += here as u64;
        }
        let rx = &mut core.rx;
        if whole {
            rx.start += total;
            self.placed(core)?;
        } else {
            let mut target = target;
            target.advance(here as u32);
            rx.direct = Some(Direct {
                target,
                left: len - here as u32,
                bulk: rx.bulk > 0,
            });
            // Everything staged belongs to this payload, but for bytes of padding and CRC that came with its end.
            let frame = rx.frame;
            rx.start += frame.header_len() + header.len() + before + here;
            rx.trailer = frame.trailer_len(ulpdu_len);
            if rx.start == rx.end {
                (rx.start, rx.end) = (0, 0);
            }
        }
        Ok(true)
    }

    /// Checked ranges of memory for `len` bytes at this target.
    pub(super) fn spans(
        &self,
        core: &Core,
        target: Target,
        len: u32,
    ) -> Result<SmallVec<[Span; 2]>, Stop> {
        match target {
            Target::Write { stag, to } => {
                let span = self
                    .remote_span(stag, to, len, Access::REMOTE_WRITE)
                    .map_err(fault_of)?;
                Ok(SmallVec::from_iter([span]))
            }
            Target::Read { seq, offset } => {
                let stream = core.stream.as_ref();
                let slot = stream.and_then(|s| s.request(seq));
                let slot = slot.ok_or(Fault::LocalCatastrophic)?;
                self.list_spans(self.pd.id, &slot.wr.sges, offset, len)
                    .map_err(|_| Stop::Sink(seq))
            }
            Target::Held => Ok(SmallVec::new()),
            Target::Recv { mo } => {
                let sges = core.rx.recv.as_ref().map_or(&[][..], |wr| &wr.sges);
                self.list_spans(self.recv_pd(), sges, mo, len)
                    .map_err(|_| Stop::Recv(Fault::BadReceive, WcStatus::LocProtErr))
            }
        }
    }

    fn list_spans(
        &self,
        pd: PdId,
        sges: &[Sge],
        offset: u32,
        len: u32,
    ) -> Result<SmallVec<[Span; 2]>, MemError> {
        let table = &self.device.table;
        sub_list(sges, offset, len)
            .map(|sge| table.local(pd, sge.lkey, sge.addr, sge.len, Access::LOCAL_WRITE))
            .collect()
    }

    /// The payload of the segment is in place.
    pub(super) fn placed(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
        let Some(stream) = &mut core.stream else {
            return Ok(());
        };
        match stream.rx_placed() {
            Some(event) => self.event(core, event),
            None => Ok(()),
        }
    }

    fn event(self: &Arc<Self>, core: &mut Core, event: Event) -> Result<(), Stop> {
        let Some(stream) = &mut core.stream else {
            return Ok(());
        };
        match event {
            Event::Received {
                len,
                solicited,
                invalidate,
                immediate,
            } => {
                let wr = match immediate {
                    Some(_) => core.rx.recv.take().or_else(|| self.take_recv()),
                    None => core.rx.recv.take(),
                };
                let Some(wr) = wr else {
                    return Err(self.no_receive().into());
                };
                if let Some(stag) = invalidate
                    && let Err(error) = self.device.table.invalidate(self.own_pd(), self.num, stag)
                {
                    core.rx.recv = Some(wr);
                    return Err(match error {
                        MemError::Pd => Fault::StagNotAssociated,
                        _ => Fault::CannotInvalidate,
                    }
                    .into());
                }
                self.note(WcOpcode::Recv, WcStatus::Success, len);
                core.done.recv_urgent |= solicited;
                core.done.recv.push(Wc {
                    wr_id: wr.id,
                    status: WcStatus::Success,
                    opcode: if immediate.is_some() && !core.rx.with_send {
                        WcOpcode::RecvWithImm
                    } else {
                        WcOpcode::Recv
                    },
                    byte_len: len,
                    qp_num: self.num,
                    imm: immediate,
                    invalidated: invalidate,
                    wqes_retired: 1,
                    ..Wc::default()
                });
            }
            Event::ReadRequested { stag, to, len } => {
                if len > 0 {
                    // Checked now for the peer's sake; the memory is looked up again when the response is sent.
                    self.remote_span(stag, to, len, Access::REMOTE_READ)
                        .map_err(fault_of)?;
                }
                stream.accept_read();
            }
            Event::AtomicRequested(request) => {
                let original = self.atomic(&request).map_err(fault_of)?;
                stream.atomic_done(original);
            }
            Event::AtomicResult { seq, original } => {
                let spans = self.spans(core, Target::Read { seq, offset: 0 }, 8)?;
                scatter(&spans, &original.to_ne_bytes());
            }
            Event::Terminated(terminate) => {
                debug_assert!(peer_terminated(stream));
                let code = term_code(terminate.error);
                tracing::debug!(qp = self.num, error = ?terminate.error, "the peer terminated the stream");
                self.end(core, EndReason::PeerTerminated(code));
                return Err(Stop::Terminated);
            }
        }
        Ok(())
    }

    fn atomic(&self, request: &AtomicRequest) -> Result<u64, MemError> {
        let span = self.remote_span(request.stag, request.to, 8, Access::REMOTE_ATOMIC)?;
        match request.op {
            AtomicOp::FetchAdd => {
                span.fetch_add_masked(request.add_or_swap, request.add_or_swap_mask)
            }
            AtomicOp::Swap => span.swap_masked(request.add_or_swap, request.add_or_swap_mask),
            AtomicOp::CompareSwap => span.compare_swap_masked(
                request.compare,
                request.compare_mask,
                request.add_or_swap,
                request.add_or_swap_mask,
            ),
        }
    }
}

/// Bytes between the header and the payload that [`Stream::rx_immediate`](weft_proto::rdmap::Stream::rx_immediate) takes.
pub(super) fn before_payload(header: &Header) -> usize {
    match header {
        Header::Untagged(header)
            if matches!(header.opcode, Opcode::Immediate | Opcode::ImmediateSe)
                && header.mo == 0 =>
        {
            IMMEDIATE_LEN
        }
        _ => 0,
    }
}

/// Spread bytes over spans, in order.
fn scatter(spans: &[Span], mut bytes: &[u8]) {
    for span in spans {
        let (now, later) = bytes.split_at(span.len().min(bytes.len()));
        span.copy_in(0, now);
        bytes = later;
    }
}
