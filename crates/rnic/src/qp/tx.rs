//! The transmit side: segments become FPDUs, FPDUs become flights, a flight is one `sendmsg` where the transport
//! takes it whole.
//!
//! Headers, trailers and small payloads are written to a scratch buffer; larger payloads go from registered memory
//! in the same system call. With CRC or markers every payload is copied: the bytes that the CRC was computed over
//! are then the bytes that are sent, whatever happens to the memory in between (docs/adr/0003).

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use weft_mem::{Access, LastStretch, MemError, SendList, Span};
use weft_proto::rdmap::{Fault, MAX_HEADER, Payload};
use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, UNTAGGED_LEN};
use weft_wire::mpa::MarkerInserter;

use super::convert::term_code;
use super::direct::Barrier;
use super::frame::Frame;
use super::{Core, QpInner, Slot};
use crate::engine::on_engine;
use crate::pool::Pool;
use crate::timer;
use crate::transport::Link;
use crate::transport::local::LocalLink;
use crate::types::{Ledger, SendOp, Sge, WcStatus};
use weft_wire::rdmap::TermError;

/// Payloads up to this are copied: cheaper than another entry in the list.
const COPY_MAX: u32 = 2048;
/// A flight is not made longer once it has this many bytes.
const FLIGHT_BYTES: usize = 1 << 20;
/// The same with CRC: what was copied should still be in the second-level cache when the kernel reads it.
const FLIGHT_BYTES_COPIED: usize = 256 * 1024;
/// Flights of one drive, so that one connection cannot keep the others waiting.
const FLIGHTS: u32 = 8;
/// Direct work of one drive by the engine, in bytes; the last request may go beyond.
pub(super) const DIRECT_BYTES: u64 = 4 << 20;
/// Attempts to send that the transport refuses one after the other, until it is asked only each so many times.
const REFUSALS: u32 = 8;
/// Between two looks whether a peer has left a window.
const LOOK: Duration = Duration::from_millis(1);
/// Pieces of a flight: two for each large FPDU.
const FLIGHT_PIECES: usize = 64;

/// What came of a request that does not touch the wire.
enum Local {
    Done,
    Failed,
    /// The peer is still in this window.
    Waits(u32),
}

/// A request that is complete when the peer is out of a window.
#[derive(Clone, Copy)]
struct Settling {
    seq: u64,
    stag: u32,
}

enum Piece {
    /// Bytes of the scratch buffer.
    Scratch(Range<usize>),
    /// A local buffer; looked up again for each system call, so that deregistration never waits for a slow peer.
    Local(Sge),
    /// Memory that the peer reads.
    Source { stag: u32, to: u64, len: u32 },
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Scratch(range) => range.len(),
            Piece::Local(sge) => sge.len as usize,
            Piece::Source { len, .. } => *len as usize,
        }
    }
    /// Take `n` bytes off the front.
    fn advance(&mut self, n: usize) {
        match self {
            Piece::Scratch(range) => range.start += n,
            Piece::Local(sge) => {
                sge.addr += n as u64;
                sge.len -= n as u32;
            }
            Piece::Source { to, len, .. } => {
                *to += n as u64;
                *len -= n as u32;
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Tx {
    frame: Frame,
    crc: bool,
    markers: Option<Box<MarkerInserter>>,
    scratch: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// Bytes put into flights and bytes sent, over the connection's life.
    built: u64,
    sent: u64,
    /// (position, work request): sent up to there, the request is transmitted.
    marks: VecDeque<(u64, u64)>,
    blocked: bool,
    /// Attempts to send since the transport last took something.
    refused: u32,
    terminate: u32,
    barrier: Barrier,
    /// Bytes of direct work that this drive may still do, and whether it had to leave some.
    direct_left: u64,
    direct_stopped: bool,
    /// The request that nothing is started before.
    settling: Option<Settling>,
    /// Of the peer's arenas, for direct work.
    pub(super) stretch: LastStretch,
    /// Memory that the transport still reads, by the position in the stream up to which it does.
    /// Each span to its own end, so that a request's memory is free when the request is complete.
    held: VecDeque<(u64, Span)>,
}

impl Tx {
    pub(super) fn start(&mut self, frame: Frame, crc: bool, markers: bool, prefix: &[u8]) {
        self.frame = frame;
        self.crc = crc;
        self.markers = markers.then(|| Box::new(MarkerInserter::new(crc)));
        if !prefix.is_empty() {
            self.scratch.extend_from_slice(prefix);
            self.pieces.push_back(Piece::Scratch(0..prefix.len()));
            self.built = prefix.len() as u64;
        }
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Nothing is to be sent, and the peer is waited for with nothing.
    pub(super) fn is_still(&self) -> bool {
        self.pieces.is_empty()
            && !self.blocked
            && self.settling.is_none()
            && self.held.is_empty()
            && self.marks.is_empty()
    }

    /// The transport took less than it was given.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    /// The value of the Terminate in the flight, 0 if there is none.
    pub(super) fn terminate_code(&self) -> u32 {
        self.terminate
    }

    pub(super) fn release(&mut self, pool: &Pool) {
        self.pieces = VecDeque::new();
        self.held = VecDeque::new();
        self.marks = VecDeque::new();
        self.blocked = false;
        self.settling = None;
        self.stretch = LastStretch::default();
        pool.put_tx(std::mem::take(&mut self.scratch));
    }

    /// Nothing more is started.
    pub(super) fn give_up_settling(&mut self) {
        self.settling = None;
    }

    /// So many bytes went out beside the flights.
    pub(super) fn sent_fast(&mut self, n: usize) {
        self.built += n as u64;
        self.sent += n as u64;
    }

    /// Whether work may be done directly now, before what is in the ring.
    pub(super) fn may_overtake(&mut self, local: &LocalLink) -> bool {
        if self.barrier == Barrier::Built && self.pieces.is_empty() {
            self.barrier = Barrier::Ring(local.pushed());
        }
        if let Barrier::Ring(position) = self.barrier
            && local.consumed() >= position
        {
            self.barrier = Barrier::None;
        }
        self.barrier == Barrier::None
    }

    /// The transport has taken nothing several times, so somebody spins: asking it each time only keeps the socket from
    /// whoever makes room. The engine is called when there is some.
    fn rests(&mut self) -> bool {
        let spins = self.blocked && self.refused >= REFUSALS && !on_engine();
        if spins {
            self.refused = self.refused.wrapping_add(1);
        }
        spins && !self.refused.is_multiple_of(REFUSALS)
    }

    /// Direct work of `len` bytes is about to be done in this drive. False when it has done enough: others wait.
    pub(super) fn takes_direct(&mut self, len: u32) -> bool {
        self.direct_stopped = self.direct_left == 0;
        self.direct_left = self.direct_left.saturating_sub(len.into());
        !self.direct_stopped
    }

    /// The transport still reads memory of ours.
    pub(super) fn lends(&self) -> bool {
        !self.held.is_empty()
    }

    /// Put pad, CRC and markers to an FPDU that begins at `start` in the scratch buffer, where its payload is too, unless it is sent in place.
    /// Says how long it is.
    fn finish_fpdu(&mut self, start: usize, ulpdu_len: usize, in_place: bool) -> usize {
        let trailer_from = if in_place { self.scratch.len() } else { start };
        let pad = self.frame.pad(ulpdu_len);
        self.scratch.extend_from_slice(&[0; 3][..pad]);
        if self.frame.has_crc() {
            let crc = if self.crc {
                crc32c(&self.scratch[start..])
            } else {
                0
            };
            self.scratch.extend_from_slice(&crc.to_le_bytes());
        }
        let mut fpdu_len = self.frame.total(ulpdu_len);
        if let Some(markers) = &mut self.markers {
            let fpdu = self.scratch.split_off(start);
            markers.insert(&fpdu, &mut self.scratch);
            fpdu_len = self.scratch.len() - start;
        }
        self.close_scratch(trailer_from);
        self.built += fpdu_len as u64;
        fpdu_len
    }

    fn close_scratch(&mut self, from: usize) {
        if from == self.scratch.len() {
            return;
        }
        if let Some(Piece::Scratch(last)) = self.pieces.back_mut()
            && last.end == from
        {
            last.end = self.scratch.len();
            return;
        }
        self.pieces
            .push_back(Piece::Scratch(from..self.scratch.len()));
    }

    /// One system call. `Ok(false)` when the transport takes no more now.
    fn send_once(&mut self, qp: &QpInner, link: &Link, ledger: &mut Ledger) -> io::Result<bool> {
        // The spans must outlive the list that names them. With each, where its bytes end in the stream.
        let mut spans: SmallVec<[(u64, Span); FLIGHT_PIECES / 2]> = SmallVec::new();
        let mut end = self.sent;
        for piece in self.pieces.iter().take(FLIGHT_PIECES) {
            end += piece.len() as u64;
            let span = match piece {
                Piece::Scratch(_) => continue,
                Piece::Local(sge) => qp.local_span(*sge, Access::empty()),
                Piece::Source { stag, to, len } => {
                    qp.remote_span(*stag, *to, *len, Access::REMOTE_READ)
                }
            };
            // The memory went away in the middle of an FPDU: the stream cannot be saved.
            spans.push((end, span.map_err(|e| io::Error::other(e.to_string()))?));
        }
        let mut list = SendList::new();
        let mut next = spans.iter();
        for piece in self.pieces.iter().take(FLIGHT_PIECES) {
            match piece {
                Piece::Scratch(range) => list.push_bytes(&self.scratch[range.clone()]),
                Piece::Local(_) | Piece::Source { .. } => {
                    if let Some((_, span)) = next.next() {
                        list.push_span(span, 0, span.len());
                    }
                }
            }
        }
        let total = list.len_bytes();
        ledger.tx_syscalls += 1;
        let n = match link.send(&list) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = true;
                self.refused = self.refused.wrapping_add(1);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        self.refused = 0;
        drop(list);
        self.consume(n);
        if !spans.is_empty() && link.copied(self.sent) < self.sent {
            for (end, span) in spans {
                if end - (span.len() as u64) < self.sent {
                    self.held.push_back((end.min(self.sent), span));
                }
            }
        }
        // A short count means a full buffer: the next try would only be told so.
        self.blocked = n < total;
        Ok(!self.blocked)
    }

    fn consume(&mut self, mut n: usize) {
        self.sent += n as u64;
        while n > 0 {
            let Some(first) = self.pieces.front_mut() else {
                return;
            };
            if first.len() > n {
                first.advance(n);
                return;
            }
            n -= first.len();
            self.pieces.pop_front();
        }
        while self.pieces.front().is_some_and(|p| p.len() == 0) {
            self.pieces.pop_front();
        }
    }

    /// Send what is in the flight and build no more. `Ok(true)`: all sent.
    pub(super) fn send_all(
        &mut self,
        qp: &QpInner,
        link: &Link,
        ledger: &mut Ledger,
    ) -> io::Result<bool> {
        while !self.pieces.is_empty() {
            if !self.send_once(qp, link, ledger)? && !self.pieces.is_empty() {
                return Ok(false);
            }
        }
        self.blocked = false;
        Ok(true)
    }
}

impl QpInner {
    pub(super) fn local_span(&self, sge: Sge, need: Access) -> Result<Span, MemError> {
        self.device
            .table
            .local(self.pd.id, sge.lkey, sge.addr, sge.len, need)
    }

    pub(super) fn remote_span(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        if !self.access().contains(need) {
            return Err(MemError::Access);
        }
        self.reach(stag, to, len, need)
    }

    /// Send until there is nothing to send or the transport takes no more. Says whether bytes moved.
    pub(super) fn pump_tx(self: &Arc<Self>, core: &mut Core, link: &Link) -> bool {
        if core.tx.lends() {
            note_transmitted(core, link);
        }
        let idle = core.tx.pieces.is_empty()
            && core.tx.settling.is_none()
            && core.stream.as_ref().is_none_or(|s| !s.has_work());
        if core.shut || idle {
            core.tx.blocked = false;
            return false;
        }
        if link.local().is_none() && core.tx.rests() {
            return false;
        }
        let before = core.tx.sent;
        let mut direct = false;
        // A thread of the program does its own work. The engine has other connections.
        core.tx.direct_left = if on_engine() { DIRECT_BYTES } else { u64::MAX };
        for flight in 0.. {
            if core.tx.pieces.is_empty() {
                direct |= self.build(core, link);
                if core.ended.is_some() {
                    return true;
                }
                if core.tx.pieces.is_empty() {
                    core.tx.blocked = core.tx.direct_stopped;
                    if core.tx.scratch.capacity() > 0 {
                        self.device
                            .pool()
                            .put_tx(std::mem::take(&mut core.tx.scratch));
                    }
                    break;
                }
            }
            if flight == FLIGHTS {
                // The others have waited long enough; being writable, the socket brings us back at once.
                core.tx.blocked = true;
                break;
            }
            let outcome = core.tx.send_once(self, link, &mut core.ledger);
            note_transmitted(core, link);
            match outcome {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::debug!(qp = self.num, %error, "sending failed");
                    // Why the peer hung up may be waiting to be read.
                    core.send_failed = true;
                    self.pump_rx(core, link);
                    self.end(core, super::EndReason::Lost);
                    break;
                }
            }
        }
        direct || core.tx.sent != before
    }

    /// Make the next flight, and do what can be done without one: says whether anything was.
    pub(super) fn build(self: &Arc<Self>, core: &mut Core, link: &Link) -> bool {
        let mut hdr = [0; MAX_HEADER];
        if core.tx.pieces.is_empty() {
            core.tx.scratch.clear();
        }
        let copy_all = core.tx.crc || core.tx.markers.is_some();
        let limit = flight_limit(copy_all);
        let mut bytes = 0;
        let mut failed = None;
        let mut source_gone = false;
        let mut direct = false;
        core.tx.direct_stopped = false;
        if self.waits_for_window(core) {
            return false;
        }
        loop {
            direct |= self.work_directly(core, link);
            if core.tx.direct_stopped {
                break;
            }
            let Core {
                stream: Some(stream),
                tx,
                ledger,
                confirming,
                ..
            } = core
            else {
                return direct;
            };
            let Some(segment) = stream.next_tx(&mut hdr) else {
                break;
            };
            if segment.terminate {
                tx.terminate = reason_in(&hdr);
            }
            if tx.scratch.capacity() == 0 {
                tx.scratch = self.device.pool().get_tx();
            }
            let start = tx.scratch.len();
            let ulpdu_len = segment.header_len + segment.payload.len() as usize;
            let payload = match segment.payload {
                Payload::Local { seq } => {
                    let slot = stream.request_mut(seq);
                    match slot.map_or(Local::Done, |slot| self.do_local(slot)) {
                        Local::Done => stream.transmitted(seq),
                        Local::Failed => {
                            failed = Some(Fault::LocalCatastrophic);
                            break;
                        }
                        Local::Waits(stag) => {
                            tx.settling = Some(Settling { seq, stag });
                            self.wait_for_window();
                            break;
                        }
                    }
                    continue;
                }
                payload => payload,
            };
            tx.frame.emit(ulpdu_len, &mut tx.scratch);
            tx.scratch.extend_from_slice(&hdr[..segment.header_len]);
            let inline = matches!(payload, Payload::Wr { seq, .. }
                if stream.request(seq).is_some_and(|slot| slot.wr.inline.is_some()));
            let copy = copy_all || inline || payload.len() <= COPY_MAX;
            let put = match payload {
                // The answer will need its place: better to find out before the peer is asked.
                Payload::None => match segment.completes.and_then(|seq| stream.request_mut(seq)) {
                    Some(slot) if slot.wr.op.is_sink() => self.check_sink(slot),
                    _ => Ok(()),
                },
                Payload::Local { .. } => Ok(()),
                Payload::Wr { seq, offset, len } => match stream.request_mut(seq) {
                    Some(slot) => self.put_wr(tx, slot, start, offset, len, copy),
                    None => Err(Fault::LocalCatastrophic),
                },
                Payload::Source { stag, to, len } => {
                    let put = self.put_source(tx, start, (stag, to, len), copy);
                    if let Err(error) = put {
                        // The region went away while the response was on its way: nothing of this FPDU is sent.
                        tx.scratch.truncate(start);
                        stream.fail_source(fault_of(error));
                        source_gone = true;
                        continue;
                    }
                    Ok(())
                }
            };
            if let Err(fault) = put {
                tx.scratch.truncate(start);
                failed = Some(fault);
                break;
            }
            let in_place = !copy && !payload.is_empty();
            count_fpdu(ledger, payload.len(), in_place);
            bytes += tx.finish_fpdu(start, ulpdu_len, in_place);
            if let Some(seq) = segment.completes {
                tx.marks.push_back((tx.built, seq));
            }
            // A question of our own touches nothing.
            let question = confirming.is_some()
                && (segment.completes.and_then(|seq| stream.request(seq)))
                    .is_some_and(|slot| slot.internal);
            if tx.frame == Frame::Local && touches_memory(&hdr) && !question {
                tx.barrier = Barrier::Built;
            }
            if bytes >= limit || tx.pieces.len() >= FLIGHT_PIECES {
                break;
            }
        }
        if let Some(fault) = failed {
            self.fault(core, fault);
        } else if source_gone {
            let code = core.tx.terminate_code();
            self.end(core, super::EndReason::Terminated(code));
        }
        direct
    }

    /// Put what a peer reads into the flight.
    fn put_source(
        &self,
        tx: &mut Tx,
        start: usize,
        (stag, to, len): (u32, u64, u32),
        copy: bool,
    ) -> Result<(), MemError> {
        let span = self.remote_span(stag, to, len, Access::REMOTE_READ)?;
        if copy {
            span.extend(0, span.len(), &mut tx.scratch);
        } else {
            tx.close_scratch(start);
            tx.pieces.push_back(Piece::Source { stag, to, len });
        }
        Ok(())
    }

    /// Put payload of a work request into the flight.
    fn put_wr(
        &self,
        tx: &mut Tx,
        slot: &mut Slot,
        start: usize,
        offset: u32,
        len: u32,
        copy: bool,
    ) -> Result<(), Fault> {
        if let Some(data) = &slot.wr.inline {
            let range = offset as usize..offset as usize + len as usize;
            tx.scratch
                .extend_from_slice(data.get(range).ok_or(Fault::LocalCatastrophic)?);
            return Ok(());
        }
        let pieces = tx.pieces.len();
        for sge in sub_list(&slot.wr.sges, offset, len) {
            let outcome = self.local_span(sge, Access::empty()).map(|span| {
                if copy {
                    span.extend(0, span.len(), &mut tx.scratch);
                }
            });
            if outcome.is_err() {
                tx.pieces.truncate(pieces);
                slot.fault = Some(WcStatus::LocProtErr);
                return Err(Fault::LocalCatastrophic);
            }
        }
        if !copy {
            tx.close_scratch(start);
            tx.pieces
                .extend(sub_list(&slot.wr.sges, offset, len).map(Piece::Local));
        }
        Ok(())
    }

    fn check_sink(&self, slot: &mut Slot) -> Result<(), Fault> {
        for sge in slot.wr.sges.iter().filter(|sge| sge.len > 0) {
            if self.local_span(*sge, Access::LOCAL_WRITE).is_err() {
                slot.fault = Some(WcStatus::LocProtErr);
                return Err(Fault::LocalCatastrophic);
            }
        }
        Ok(())
    }

    /// A window was invalidated while the peer used it: look again whether it still does.
    fn wait_for_window(self: &Arc<Self>) {
        let qp = Arc::downgrade(self);
        timer::after(self.engine(), LOOK, move || {
            let qp = qp.upgrade()?;
            qp.drive(false);
            let waits = qp.peek(|core| core.tx.settling.is_some()).unwrap_or(true);
            waits.then_some(LOOK)
        });
    }

    /// Whether a window that was invalidated is still used. If not, that request is complete.
    fn waits_for_window(&self, core: &mut Core) -> bool {
        let Some(Settling { seq, stag }) = core.tx.settling else {
            return false;
        };
        if self.device.table.is_overdue(self.pd.id, stag) {
            return true;
        }
        core.tx.settling = None;
        if let Some(stream) = &mut core.stream {
            stream.transmitted(seq);
        }
        false
    }

    /// Carry out a request that does not touch the wire.
    fn do_local(&self, slot: &mut Slot) -> Local {
        let table = &self.device.table;
        slot.fault = match slot.wr.op {
            SendOp::LocalInvalidate { rkey } => {
                match table.invalidate(self.pd.id, self.num, rkey) {
                    Err(MemError::InUse) => return Local::Waits(rkey),
                    done => done.err().map(|_| WcStatus::LocQpOpErr),
                }
            }
            SendOp::BindMw {
                window,
                new_rkey,
                region,
                addr,
                len,
                access,
            } => {
                let old = table.window_stag(window);
                let (pd, key) = (self.pd.id, new_rkey as u8);
                let bound = table.bind(pd, window, key, self.num, region, addr, len, access);
                match (bound, old) {
                    (Ok(_), _) => None,
                    // A window of type 1, bound anew.
                    (Err(MemError::InUse), Some(old)) if table.is_overdue(pd, old) => {
                        return Local::Waits(old);
                    }
                    (Err(_), _) => Some(WcStatus::MwBindErr),
                }
            }
            _ => None,
        };
        slot.fault.map_or(Local::Done, |_| Local::Failed)
    }
}

/// The part of a list that covers `len` bytes from `offset` on.
pub(crate) fn sub_list(sges: &[Sge], offset: u32, len: u32) -> impl Iterator<Item = Sge> + '_ {
    let mut skip = offset;
    let mut left = len;
    sges.iter().filter_map(move |sge| {
        if skip >= sge.len {
            skip -= sge.len;
            return None;
        }
        let take = (sge.len - skip).min(left);
        let part = Sge {
            addr: sge.addr.wrapping_add(u64::from(skip)),
            len: take,
            lkey: sge.lkey,
        };
        skip = 0;
        left -= take;
        (take > 0).then_some(part)
    })
}

/// What the peer is told about memory of ours that it may not use.
pub(super) fn fault_of(error: MemError) -> Fault {
    match error {
        MemError::InvalidStag => Fault::InvalidStag,
        MemError::Bounds => Fault::Bounds,
        MemError::Misaligned => Fault::Misaligned,
        MemError::Access => Fault::AccessRights,
        MemError::Pd => Fault::StagNotAssociated,
        MemError::Wrap => Fault::ToWrap,
        MemError::CannotInvalidate => Fault::CannotInvalidate,
        _ => Fault::LocalCatastrophic,
    }
}

/// Whether a segment of ours changes or reads the peer's memory other than its receives, or takes rights away.
fn touches_memory(hdr: &[u8; MAX_HEADER]) -> bool {
    use weft_wire::rdmap::Opcode;
    let Ok(header) = Header::parse(hdr) else {
        return true;
    };
    matches!(
        header.opcode(),
        Opcode::Write
            | Opcode::ReadRequest
            | Opcode::AtomicRequest
            | Opcode::SendInvalidate
            | Opcode::SendSeInvalidate
    )
}

/// Requests whose bytes are out of our memory are transmitted.
pub(super) fn note_transmitted(core: &mut Core, link: &Link) {
    let Core {
        stream: Some(stream),
        tx,
        ..
    } = core
    else {
        return;
    };
    let copied = link.copied(tx.sent);
    while tx.held.front().is_some_and(|(end, _)| *end <= copied) {
        tx.held.pop_front();
    }
    while let Some(&(position, seq)) = tx.marks.front() {
        if position > copied {
            break;
        }
        tx.marks.pop_front();
        stream.transmitted(seq);
    }
}

/// Bytes in one flight.
fn flight_limit(copied: bool) -> usize {
    if copied {
        FLIGHT_BYTES_COPIED
    } else {
        FLIGHT_BYTES
    }
}

fn count_fpdu(ledger: &mut Ledger, payload: u32, in_place: bool) {
    if in_place {
        ledger.tx_direct += u64::from(payload);
    } else {
        ledger.tx_copied += u64::from(payload);
    }
    ledger.tx_fpdus += 1;
}

/// The reason that a Terminate message gives.
fn reason_in(hdr: &[u8; MAX_HEADER]) -> u32 {
    hdr.get(UNTAGGED_LEN..UNTAGGED_LEN + 2).map_or(0, |b| {
        term_code(TermError::from_parts(b[0] >> 4, b[0] & 15, b[1]))
    })
}
