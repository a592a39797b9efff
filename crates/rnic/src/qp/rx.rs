//! The receive side: bytes become segments, segments are checked and placed.
//!
//! Headers and small payloads are read into a staging buffer that the connection borrows while it has bytes to look
//! at. A large payload goes straight to its place in the next `recvmsg`, which also fetches its trailer and the next
//! header. With CRC every FPDU is staged, checked, and only then placed: nothing of a damaged FPDU touches memory
//! (docs/adr/0003).

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use weft_mem::{Access, MemError, PdId, RecvList, Span};
use weft_proto::rdmap::{Event, Fault, Rx as Step, WITH_SEND};
use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, HeaderError, UNTAGGED_LEN};
use weft_wire::mpa::{CRC_LEN, MarkerStripper};
use weft_wire::rdmap::{AtomicOp, AtomicRequest, IMMEDIATE_LEN, Opcode};

use super::convert::term_code;
use super::frame::Frame;
use super::rnr::{Held, Patience, Wait};
use super::tx::{fault_of, sub_list};
use super::{Core, EndReason, QpInner, peer_terminated};
use crate::pool::Pool;
use crate::transport::{Link, Received};
use crate::types::{QpState, RecvWr, Sge, Wc, WcOpcode, WcStatus, sg_len};

/// Segments up to this length are looked at only when they are there as a whole: every control message is shorter.
const WHOLE: usize = 256;
/// An FPDU longer than this announces bulk: of what follows only [`AHEAD`] is read, so that its payload is not staged.
const BULK: usize = 16 * 1024;
/// FPDUs longer than this announce more bulk than one FPDU: so many shorter ones in a row do not end that, as a message ends with a
/// short one, and what tells of it is one. (At 16 to 24 KiB a system call more costs as much as the copy.)
const LONG_BULK: usize = 32 * 1024;
const LONG_BULK_LASTS: u8 = 4;
/// Bytes read beyond what is known of bulk: the end of a message, what tells of it, and the next header.
const AHEAD: usize = 192;
/// Rounds of one drive, so that one connection cannot keep the others waiting.
const ROUNDS: u32 = 32;
/// Bytes of one drive, for the same reason; what is fetched last may go beyond.
const DRIVE_BYTES: usize = 16 << 20;
/// Staging buffer of a connection on shared memory, in bytes: longer payloads have their place when they are fetched.
const LOCAL_STAGE: usize = 16 * 1024;
/// What is left at the end of a drive is kept in a small buffer of its own up to this size.
const KEEP_SMALL: usize = 256;

/// Where the rest of a payload goes.
#[derive(Clone, Copy, Debug)]
enum Target {
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
    /// What waits for a receive, see [`Held`].
    Held,
}

impl Target {
    fn advance(&mut self, n: u32) {
        match self {
            Target::Write { to, .. } => *to += u64::from(n),
            Target::Read { offset, .. } => *offset += n,
            Target::Recv { mo } => *mo += n,
            Target::Held => {}
        }
    }
}

struct Direct {
    target: Target,
    left: u32,
    bulk: bool,
}

#[derive(Default)]
pub(super) struct Rx {
    frame: Frame,
    crc: bool,
    markers: Option<Box<MarkerStripper>>,
    buf: Option<Box<[u8]>>,
    pub(super) start: usize,
    end: usize,
    pub(super) held: Held,
    pub(super) patience: Patience,
    /// Immediate data that has come belongs to a Send.
    with_send: bool,
    /// Bytes left over when the buffer went back to the pool.
    small: SmallVec<[u8; 32]>,
    direct: Option<Direct>,
    /// Bytes of padding and (unchecked) CRC still to skip.
    trailer: usize,
    /// Length of the FPDU at the front of the buffer, while it is not there as a whole.
    pub(super) need: usize,
    /// Bulk is expected: so many shorter FPDUs end that.
    bulk: u8,
    /// The receive of the message in progress.
    pub(super) recv: Option<RecvWr>,
    eof: bool,
}

/// A segment whose header has come.
pub(super) struct Segment<'a> {
    pub(super) header: Header,
    /// What is there of it.
    pub(super) ulpdu: &'a [u8],
    /// Its length in bytes.
    pub(super) len: usize,
    /// Bytes of its frame in the staging buffer; 0 when it is not there any more.
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
    /// A receive of ours is at fault, and the peer with it or not.
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

    pub(super) fn take_recv(&mut self) -> Option<RecvWr> {
        self.recv.take()
    }

    pub(super) fn release(&mut self, pool: &Pool) {
        if let Some(buf) = self.buf.take() {
            pool.put_rx(buf);
        }
        self.small = SmallVec::new();
        (self.start, self.end) = (0, 0);
    }

    /// After the end: read and forget. Says whether the peer has closed.
    pub(super) fn discard(&mut self, link: &Link, pool: &Pool) -> bool {
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

    /// The rest of this segment goes to what waits. Everything staged belongs to it.
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

    /// Borrow the buffer, with what was left over at its front.
    fn borrow(&mut self, pool: &Pool) {
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
    fn give_back(&mut self, pool: &Pool) {
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
    /// Receive until the transport has nothing more. Says whether bytes moved.
    pub(super) fn pump_rx(self: &Arc<Self>, core: &mut Core, link: &Link) -> bool {
        let mut moved = false;
        core.rx.borrow(self.device.pool());
        let mut drained = false;
        let mut bytes = 0;
        for round in 0.. {
            // What the last system call brought is looked at in any case: nobody would be woken for it.
            let outcome = match self.parse(core) {
                // What waits is not done: the peer is not told.
                Ok(()) if core.rx.held.stopped() => match (link.pause(), self.state()) {
                    (false, _) => {
                        if !core.rx.held.is_closed() && link.is_closed_behind() {
                            core.rx.held.close();
                        }
                        break;
                    }
                    (true, QpState::Closing) => Err(Stop::Eof),
                    (true, _) => Err(Stop::Lost),
                },
                Ok(()) => {
                    if round > 0 && !core.rx.held.waits() {
                        link.placed();
                    }
                    if drained || round == ROUNDS || bytes >= DRIVE_BYTES {
                        break;
                    }
                    self.receive(core, link)
                }
                // What came after the fault is not placed, and the peer not told, before our doors are shut.
                Err(stop) => Err(stop),
            };
            match outcome {
                Ok(Some(received)) => {
                    (moved, drained) = (true, received.drained);
                    bytes += received.n;
                }
                Ok(None) => break,
                Err(Stop::Eof) if core.rx.held.waits() && self.state() != QpState::Closing => {
                    core.rx.held.close();
                    break;
                }
                Err(stop) => {
                    self.stop(core, stop);
                    return true;
                }
            }
            if core.done.recv.len() >= 64 {
                self.deliver(core);
            }
        }
        core.rx.give_back(self.device.pool());
        moved
    }

    fn stop(self: &Arc<Self>, core: &mut Core, stop: Stop) {
        match stop {
            Stop::Fault(fault) => self.fault(core, fault),
            Stop::Recv(fault, status) => {
                if let Some(wr) = core.rx.recv.take() {
                    core.done.recv_urgent = true;
                    core.done.recv.push(self.recv_wc(wr.id, status, 0));
                }
                self.fault(core, fault);
            }
            Stop::Sink(seq) => {
                let stream = core.stream.as_mut();
                if let Some(slot) = stream.and_then(|s| s.request_mut(seq)) {
                    slot.fault = Some(WcStatus::LocProtErr);
                }
                self.fault(core, Fault::LocalCatastrophic);
            }
            Stop::Terminated => {}
            Stop::Lost => self.end(core, EndReason::Lost),
            Stop::Eof => {
                core.rx.eof = true;
                let whole =
                    core.stream.as_ref().is_none_or(|s| !s.mid_message()) && !core.send_failed;
                let reason = if whole {
                    EndReason::Disconnected
                } else {
                    EndReason::Lost
                };
                self.end(core, reason);
            }
        }
    }

    /// One system call.
    fn receive(&self, core: &mut Core, link: &Link) -> Result<Option<Received>, Stop> {
        core.ledger.rx_syscalls += 1;
        if core.rx.markers.is_some() {
            return core.rx.receive_marked(link);
        }
        let spans = match &core.rx.direct {
            Some(direct) => self.spans(core, direct.target, direct.left)?,
            None => SmallVec::new(),
        };
        let Core { rx, ledger, .. } = core;
        let in_frame = rx.in_frame();
        let Some(buf) = &mut rx.buf else {
            return Ok(None);
        };
        let next_header = rx.frame.header_len() + UNTAGGED_LEN;
        let mut list = RecvList::new();
        let placed_max = if let Some(direct) = &rx.direct {
            for span in &spans {
                list.push_span(span, 0, span.len());
            }
            if let Target::Held = direct.target {
                let partial = &mut rx.held.partial;
                let at = partial.len() - direct.left as usize;
                list.push_buf(&mut partial[at..]);
            }
            // Bulk: little more than the trailer, whatever follows has its own place.
            let tail = if self.rnr_wait.load(Ordering::Relaxed) && rx.frame == Frame::Local {
                // The peer is to be told of this payload, whatever becomes of the next message.
                0
            } else if direct.bulk {
                (rx.trailer + AHEAD).min(buf.len())
            } else {
                buf.len()
            };
            list.push_buf(&mut buf[..tail]);
            direct.left as usize
        } else {
            if rx.start > 0 {
                buf.copy_within(rx.start..rx.end, 0);
                rx.end -= rx.start;
                rx.start = 0;
            }
            // Bulk: little more than the rest of this FPDU. What is staged beyond would be copied, or moved to the front later.
            let room = if rx.need > BULK {
                (rx.need + next_header).min(buf.len())
            } else if rx.bulk > 0 && !rx.crc {
                (rx.trailer + rx.need.max(rx.end) + AHEAD).min(buf.len())
            } else {
                buf.len()
            };
            list.push_buf(&mut buf[rx.end..room]);
            0
        };
        let received = receive_from(link, &mut list, in_frame)?;
        drop(list);
        let Some(Received { n, .. }) = received else {
            return Ok(None);
        };
        let placed = n.min(placed_max);
        ledger.rx_direct += placed as u64;
        if let Some(direct) = &mut rx.direct {
            direct.target.advance(placed as u32);
            direct.left -= placed as u32;
        }
        rx.end += n - placed;
        Ok(received)
    }

    /// Look at everything in the staging buffer.
    fn parse(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
        loop {
            if core.ended.is_some() {
                return Err(Stop::Terminated);
            }
            if let Some(direct) = &core.rx.direct {
                if direct.left > 0 {
                    return Ok(());
                }
                let held = matches!(direct.target, Target::Held);
                core.rx.direct = None;
                if held {
                    core.rx.held.fetched();
                } else {
                    self.placed(core)?;
                }
            }
            if core.rx.held.waits() {
                self.go_on(core)?;
                if core.rx.held.stopped() {
                    return Ok(());
                }
            }
            let rx = &mut core.rx;
            let skip = rx.trailer.min(rx.end - rx.start);
            rx.trailer -= skip;
            rx.start += skip;
            if rx.start == rx.end {
                (rx.start, rx.end) = (0, 0);
            }
            if rx.trailer > 0 {
                return Ok(());
            }
            // The buffer is out of the connection while payloads are placed from it.
            let Some(buf) = rx.buf.take() else {
                return Ok(());
            };
            let outcome = self.segment(core, &buf);
            core.rx.buf = Some(buf);
            if !outcome? {
                return Ok(());
            }
        }
    }

    /// The next segment, if enough of it is there. `Ok(false)`: more bytes are needed.
    fn segment(self: &Arc<Self>, core: &mut Core, buf: &[u8]) -> Result<bool, Stop> {
        let have = &buf[core.rx.start..core.rx.end];
        let frame = core.rx.frame;
        let Some((ulpdu_len, rest)) = frame.parse(have) else {
            return Ok(false);
        };
        let total = frame.total(ulpdu_len);
        let whole = have.len() >= total;
        core.rx.need = 0;
        if !whole && (core.rx.crc || total <= WHOLE || core.rx.markers.is_some()) {
            core.rx.need = total;
            return Ok(false);
        }
        if core.rx.crc {
            let (covered, trailer) = have[..total].split_at(total - CRC_LEN);
            if crc32c(covered).to_le_bytes() != trailer {
                return Err(Fault::Crc.into());
            }
        }
        let ulpdu = &rest[..ulpdu_len.min(rest.len())];
        let header = match Header::parse(ulpdu) {
            Ok(header) => header,
            Err(HeaderError::Short) if ulpdu.len() < ulpdu_len => return Ok(false),
            Err(error) => return Err(Fault::from(error).into()),
        };
        if !whole && ulpdu.len() < header.len() + before_payload(&header) {
            core.rx.need = frame.header_len() + header.len() + before_payload(&header);
            return Ok(false);
        }
        let segment = Segment {
            header,
            ulpdu,
            len: ulpdu_len,
            total,
            whole,
            room: buf.len(),
        };
        if self.rnr_wait.load(Ordering::Relaxed) {
            match self.must_wait(core, &segment) {
                Wait::No => {}
                Wait::Kept => return Ok(true),
                Wait::Here => return Ok(false),
            }
        }
        core.rx.bulk = if total > LONG_BULK {
            LONG_BULK_LASTS
        } else if total > BULK {
            core.rx.bulk.max(1)
        } else {
            core.rx.bulk.saturating_sub(1)
        };
        self.take_in(core, &segment)
    }

    /// Check a segment, and place what is there of it.
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
            ledger,
            ..
        } = core
        else {
            return Ok(false);
        };
        let step = stream.rx_segment(&header, ulpdu_len)?;
        rx.with_send = matches!(header, Header::Untagged(header) if header.invalidate == WITH_SEND);
        ledger.rx_fpdus += 1;
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
            core.ledger.rx_copied += here as u64;
        } else if here > 0 {
            let spans = self.spans(core, target, len)?;
            scatter(&spans, &payload[..here]);
            core.ledger.rx_copied += here as u64;
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
    fn spans(&self, core: &Core, target: Target, len: u32) -> Result<SmallVec<[Span; 2]>, Stop> {
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
    fn placed(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
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

impl Rx {
    /// With markers: stage the raw bytes, and keep what is left without markers.
    fn receive_marked(&mut self, link: &Link) -> Result<Option<Received>, Stop> {
        let rx = self;
        let in_frame = rx.in_frame();
        let Some(buf) = &mut rx.buf else {
            return Ok(None);
        };
        buf.copy_within(rx.start..rx.end, 0);
        rx.end -= rx.start;
        rx.start = 0;
        let mut list = RecvList::new();
        list.push_buf(&mut buf[rx.end..]);
        let received = receive_from(link, &mut list, in_frame)?;
        drop(list);
        let Some(Received { n, .. }) = received else {
            return Ok(None);
        };
        let mut plain = Vec::with_capacity(n);
        if let Some(stripper) = &mut rx.markers {
            stripper
                .strip(&buf[rx.end..rx.end + n], &mut plain)
                .map_err(|_| Fault::Marker)?;
        }
        buf[rx.end..rx.end + plain.len()].copy_from_slice(&plain);
        rx.end += plain.len();
        Ok(received)
    }

    /// Bytes of an FPDU have come, but not all of them.
    fn in_frame(&self) -> bool {
        self.direct.is_some() || self.trailer > 0 || self.end > self.start
    }
}

/// Bytes between the header and the payload that [`Stream::rx_immediate`](weft_proto::rdmap::Stream::rx_immediate) takes.
fn before_payload(header: &Header) -> usize {
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

/// One system call. `None`: nothing there now.
fn receive_from(
    link: &Link,
    list: &mut RecvList<'_>,
    in_frame: bool,
) -> Result<Option<Received>, Stop> {
    match link.recv(list) {
        Ok(received) if received.n == 0 => Err(if in_frame { Stop::Lost } else { Stop::Eof }),
        Ok(received) => Ok(Some(received)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => {
            tracing::debug!(%error, "receiving failed");
            Err(Stop::Lost)
        }
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
