//! The receiving half of a datagram queue pair: segments are placed as they come, in the receive that their message has taken or in the
//! region that it names, and completions are made when a message is whole or its time is up.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use smallvec::SmallVec;
use weft_mem::{Access, MemError, Span};
use weft_proto::dgram::{Finished, Reassembler, Refusal, Source, Ticket};
use weft_wire::dgram::{self, Grh, Segment, Target};

use super::flow::{Heard, heard};
use super::record::{Maps, WriteRecord};
use super::{UdError, UdErrorKind, UdInner};
use crate::lock::{add_alone, lock};
use crate::qp::{RecvSource, scatter, sub_list};
use crate::srq::Lack;
use crate::types::{QpState, RecvWr, Sge, UdSource, Wc, WcOpcode, WcStatus, sg_len};

/// Errors that wait for the program; the oldest are forgotten.
const MAX_ERRORS: usize = 64;

/// What a datagram brings, and how it came.
pub(crate) struct Arrived<'a> {
    /// The payload, behind [`Grh::LEN`] bytes that are free.
    pub(crate) bytes: &'a mut [u8],
    pub(crate) from: SocketAddr,
    pub(crate) to: IpAddr,
    pub(crate) traffic_class: u8,
    /// When it was taken in.
    pub(crate) now: &'a Came,
}

/// When datagrams that are taken in at once have come. Messages that are one datagram do not ask, and the clock is a part of what they cost in shared memory.
#[derive(Default)]
pub(crate) struct Came(Cell<Option<Instant>>);

impl Came {
    pub(super) fn time(&self) -> Instant {
        let time = self.0.get().unwrap_or_else(Instant::now);
        self.0.set(Some(time));
        time
    }
}

/// Where a message's bytes go.
pub(super) enum Buffer {
    Recv(RecvWr),
    Region,
}

/// What a thread holds while it takes in datagrams.
pub(super) struct Taking {
    /// Somebody still wants completions.
    pub(super) live: bool,
    reassembler: Reassembler<Buffer>,
    /// What comes in the reliable mode, and whether the engine will look at what has become too old of that.
    pub(super) flows: Heard,
    flows_timed: bool,
    /// Messages of Write-Record that are open, and records that wait for the program.
    recording: usize,
    records: VecDeque<(u64, WriteRecord)>,
    next_record: u64,
    maps: Maps,
    errors: VecDeque<UdError>,
    /// The engine will look at what has become too old.
    timed: bool,
}

impl Taking {
    pub(super) fn new(config: weft_proto::dgram::Config) -> Taking {
        Taking {
            live: true,
            reassembler: Reassembler::new(config),
            flows: heard(),
            flows_timed: false,
            recording: 0,
            records: VecDeque::new(),
            next_record: 0,
            maps: Maps::default(),
            errors: VecDeque::new(),
            timed: false,
        }
    }

    pub(super) fn report(&mut self, error: UdError) {
        if self.errors.len() >= MAX_ERRORS {
            self.errors.pop_front();
        }
        self.errors.push_back(error);
    }

    pub(super) fn take_error(&mut self) -> Option<UdError> {
        self.errors.pop_front()
    }

    pub(super) fn take_record(&mut self, number: u64) -> Option<WriteRecord> {
        let at = self
            .records
            .binary_search_by_key(&number, |(n, _)| *n)
            .ok()?;
        self.records.remove(at).map(|(_, record)| record)
    }

    /// Messages of Write-Record that are open, and records that wait for the program.
    pub(super) fn records_held(&self) -> usize {
        self.recording + self.records.len()
    }

    pub(super) fn recording_begins(&mut self) {
        self.recording += 1;
    }

    /// Whether the engine has to be told of the flows' next time.
    pub(super) fn flow_alarm(&mut self) -> bool {
        !std::mem::replace(&mut self.flows_timed, true)
    }

    pub(super) fn maps(&mut self) -> &mut Maps {
        &mut self.maps
    }
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) no_recv: AtomicU64,
    pub(super) too_long: AtomicU64,
    pub(super) wrong_qkey: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) incomplete: AtomicU64,
    pub(super) records: AtomicU64,
    pub(super) no_record: AtomicU64,
    pub(super) no_access: AtomicU64,
    pub(super) resent: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl UdInner {
    /// A message of version 1 has come in for this queue pair.
    pub(crate) fn arrived(&self, header: &dgram::Header, arrived: &mut Arrived<'_>) {
        if let Some(mut taking) = self.hears(header.qkey) {
            if self.reliable.is_some() {
                // It may be doubled, or out of order: not here.
                count(&self.counters.dropped);
                return;
            }
            self.take_message(&mut taking, header, arrived);
        }
        self.call_hooks();
    }

    /// A segment has come in for this queue pair. `true`: [`UdInner::answer`] is to be called after the last datagram that is here.
    pub(crate) fn segment_arrived(
        self: &Arc<Self>,
        segment: &Segment,
        arrived: &mut Arrived<'_>,
    ) -> bool {
        let mut answers = false;
        if let Some(mut taking) = self.hears(segment.qkey) {
            match (&self.reliable, segment.reliable) {
                (Some(reliable), Some(_)) if segment.dst_qp == self.num => {
                    answers = self.take_reliable(reliable, &mut taking, segment, arrived);
                    self.set_flow_alarm(reliable, &mut taking);
                }
                (None, None) => {
                    self.take_segment(&mut taking, segment, arrived);
                    self.set_alarm(&mut taking);
                }
                (None, Some(_)) if segment.dst_qp == self.num => {
                    count(&self.counters.dropped);
                    self.refuse_reliable(segment, arrived);
                }
                _ => count(&self.counters.dropped),
            }
        }
        self.call_hooks();
        answers
    }

    pub(super) fn hears(&self, qkey: u32) -> Option<MutexGuard<'_, Taking>> {
        let taking = lock(&self.taking);
        if !taking.live || self.state() == QpState::Error || self.is_down() {
            return None;
        }
        if u64::from(qkey) != self.qkey.load(Ordering::Relaxed) {
            count(&self.counters.wrong_qkey);
            return None;
        }
        Some(taking)
    }

    /// Bytes in front of a message in its receive.
    pub(super) fn front(&self) -> u32 {
        if self.grh { Grh::LEN as u32 } else { 0 }
    }

    /// A receive for a message of so many bytes, with what stands in front.
    pub(super) fn take_recv(&self, taking: &mut Taking, len: u32) -> Result<RecvWr, Lack> {
        let fits = |wr: &RecvWr| sg_len(&wr.sges).is_some_and(|room| room >= len);
        let take = || match &self.recv {
            RecvSource::Own(queue) => queue.take_if(fits).map(|(wr, _)| wr),
            RecvSource::Shared(srq) => srq.take_if(fits),
            RecvSource::Twin(_) | RecvSource::Xrc(_) => Err(Lack::Empty),
        };
        let taken = take();
        if matches!(taken, Err(Lack::Empty))
            && let Some(other) = taking.reassembler.evict(|b| matches!(b, Buffer::Recv(_)))
        {
            // Messages that may never be whole hold receives: the one that was not heard of for the longest makes way.
            self.over(taking, other);
            return take();
        }
        taken
    }

    pub(super) fn lacks(&self, taking: &mut Taking, lack: Lack, source: UdSource, msn: u32) {
        let (counter, kind) = match lack {
            Lack::Empty => (&self.counters.no_recv, UdErrorKind::NoReceive),
            Lack::Unsuited => (&self.counters.too_long, UdErrorKind::TooLong),
        };
        count(counter);
        taking.report(UdError::from(kind, source, msn));
    }

    fn take_message(&self, taking: &mut Taking, header: &dgram::Header, arrived: &mut Arrived<'_>) {
        let front = self.front();
        let payload = arrived.bytes.len() - Grh::LEN;
        let len = payload as u32 + front;
        let source = UdSource {
            addr: arrived.from,
            qp_num: header.src_qp,
        };
        let wr = match self.take_recv(taking, len) {
            Ok(wr) => wr,
            Err(lack) => return self.lacks(taking, lack, source, header.msn),
        };
        if self.grh {
            write_grh(payload, arrived);
        }
        let placed = self.place(&wr, 0, &arrived.bytes[Grh::LEN - front as usize..]);
        self.received(&wr, placed, len, header.imm, source, header.solicited);
    }

    /// Whoever calls this holds `taking`.
    pub(super) fn received(
        &self,
        wr: &RecvWr,
        placed: Result<(), MemError>,
        len: u32,
        imm: Option<u64>,
        source: UdSource,
        solicited: bool,
    ) {
        add_alone(&self.counters.received, 1);
        let status = match placed {
            Ok(()) => WcStatus::Success,
            Err(_) => WcStatus::LocProtErr,
        };
        self.note(WcOpcode::Recv, status, len);
        let wc = Wc {
            wr_id: wr.id,
            status,
            opcode: WcOpcode::Recv,
            byte_len: len,
            qp_num: self.num,
            imm,
            source: Some(source),
            places: 1,
            ..Wc::default()
        };
        let urgent = solicited || status != WcStatus::Success;
        // One without room is of no more use, which its device's event says; the queue pair is not touched by it.
        self.recv_cq.push(&[wc], urgent);
    }

    fn take_segment(&self, taking: &mut Taking, segment: &Segment, arrived: &mut Arrived<'_>) {
        let source = Source {
            addr: arrived.from,
            qp_num: segment.src_qp,
            incarnation: segment.incarnation,
        };
        let payload = arrived.bytes.len() - Grh::LEN;
        let ticket = match taking.reassembler.admit(&source, segment, payload) {
            Ok(ticket) => ticket,
            Err(refusal) => {
                count(&self.counters.dropped);
                if refusal == Refusal::Contradiction || refusal == Refusal::Overlap {
                    tracing::debug!(%refusal, from = %arrived.from, "a segment is dropped");
                }
                return;
            }
        };
        match segment.target {
            None => self.take_send_segment(taking, segment, ticket, arrived),
            Some(target) => self.take_record_segment(taking, segment, target, ticket, arrived),
        }
    }

    fn take_send_segment(
        &self,
        taking: &mut Taking,
        segment: &Segment,
        ticket: Ticket,
        arrived: &mut Arrived<'_>,
    ) {
        let source = UdSource {
            addr: arrived.from,
            qp_num: segment.src_qp,
        };
        let front = self.front();
        // No sum wraps: messages are at most a gibibyte long.
        let len = segment.len + front;
        let opened = if ticket.opens() {
            match self.take_recv(taking, len) {
                Ok(wr) => Some(wr),
                Err(lack) => {
                    taking.reassembler.abandon(&ticket);
                    return self.lacks(taking, lack, source, segment.msn);
                }
            }
        } else {
            None
        };
        if self.grh && opened.is_some() {
            write_grh(segment.len as usize, arrived);
        }
        let placed = match (&opened, taking.reassembler.buffer(&ticket)) {
            (Some(wr), _) => {
                // What stands in front comes with the first segment that does, whichever that is.
                let payload = &arrived.bytes[Grh::LEN..];
                let grh = &arrived.bytes[Grh::LEN - front as usize..Grh::LEN];
                self.place(wr, 0, grh)
                    .and_then(|()| self.place(wr, front + segment.offset, payload))
            }
            (None, Some(Buffer::Recv(wr))) => {
                self.place(wr, front + segment.offset, &arrived.bytes[Grh::LEN..])
            }
            (None, _) => return,
        };
        if placed.is_err() {
            let open = taking.reassembler.abandon(&ticket).map(|over| over.buffer);
            let wr = opened.or(match open {
                Some(Buffer::Recv(wr)) => Some(wr),
                _ => None,
            });
            if let Some(wr) = wr {
                self.received(&wr, placed, len, segment.imm, source, segment.solicited);
            }
            return;
        }
        let buffer = || opened.map_or(Buffer::Region, Buffer::Recv);
        let (whole, evicted) = taking
            .reassembler
            .placed(arrived.now.time(), ticket, buffer);
        for finished in [whole, evicted].into_iter().flatten() {
            self.over(taking, finished);
        }
    }

    fn take_record_segment(
        &self,
        taking: &mut Taking,
        segment: &Segment,
        target: Target,
        ticket: Ticket,
        arrived: &mut Arrived<'_>,
    ) {
        let source = UdSource {
            addr: arrived.from,
            qp_num: segment.src_qp,
        };
        if ticket.opens() && taking.recording + taking.records.len() >= self.record_depth as usize {
            taking.reassembler.abandon(&ticket);
            count(&self.counters.no_record);
            taking.report(UdError::from(UdErrorKind::NoRecord, source, segment.msn));
            return;
        }
        let payload = &arrived.bytes[Grh::LEN..];
        // All of the message has to be within the region, before its first byte is placed; the rights are looked at for each segment.
        let (at, len) = if ticket.opens() {
            (0, segment.len)
        } else {
            (segment.offset, payload.len() as u32)
        };
        let to = target.to.wrapping_add(at.into());
        let table = &self.pd.device.table;
        let need = Access::REMOTE_WRITE;
        match table.remote(self.pd.id, self.num, target.stag, to, len, need) {
            Ok(span) => span.copy_in((segment.offset - at) as usize, payload),
            Err(error) => {
                tracing::debug!(%error, from = %arrived.from, stag = target.stag, "a Write-Record is refused");
                count(&self.counters.no_access);
                taking.report(UdError::from(UdErrorKind::NoAccess, source, segment.msn));
                if let Some(open) = taking.reassembler.abandon(&ticket) {
                    self.over(taking, open);
                }
                return;
            }
        }
        let opens = ticket.opens();
        let (whole, evicted) = taking
            .reassembler
            .placed(arrived.now.time(), ticket, || Buffer::Region);
        taking.recording += usize::from(opens);
        for finished in [whole, evicted].into_iter().flatten() {
            self.over(taking, finished);
        }
    }

    /// A message is over: whole, or given up.
    pub(super) fn over(&self, taking: &mut Taking, message: Finished<Buffer>) {
        let complete = message.is_complete();
        let header = message.header;
        let source = UdSource {
            addr: message.source.addr,
            qp_num: message.source.qp_num,
        };
        if !complete {
            count(&self.counters.incomplete);
            taking.report(UdError::from(UdErrorKind::Incomplete, source, header.msn));
        }
        let record = WriteRecord::of(&message);
        match (message.buffer, record) {
            (Buffer::Recv(wr), _) if complete => {
                let len = header.len + self.front();
                self.received(&wr, Ok(()), len, header.imm, source, header.solicited);
            }
            // The next message may have it.
            (Buffer::Recv(wr), _) => self.put_back(wr),
            (Buffer::Region, Some(record)) => {
                taking.recording = taking.recording.saturating_sub(1);
                taking.maps.add(&record);
                if complete || self.partial_records {
                    self.recorded(taking, record, header.solicited);
                }
            }
            (Buffer::Region, None) => {}
        }
    }

    fn put_back(&self, wr: RecvWr) {
        match &self.recv {
            RecvSource::Own(queue) => queue.put_back(wr),
            RecvSource::Shared(srq) => {
                srq.put_back(wr);
                srq.feed();
            }
            RecvSource::Twin(_) | RecvSource::Xrc(_) => {}
        }
    }

    fn recorded(&self, taking: &mut Taking, record: WriteRecord, solicited: bool) {
        count(&self.counters.records);
        let number = taking.next_record;
        taking.next_record += 1;
        let wc = Wc {
            wr_id: number,
            opcode: WcOpcode::WriteRecord,
            byte_len: record.valid_bytes(),
            qp_num: self.num,
            imm: record.imm,
            source: Some(record.source),
            ..Wc::default()
        };
        taking.records.push_back((number, record));
        self.recv_cq.push(&[wc], solicited);
    }

    /// Bytes of a message to their place in a receive that has room for them.
    pub(super) fn place(&self, wr: &RecvWr, offset: u32, bytes: &[u8]) -> Result<(), MemError> {
        let len = bytes.len() as u32;
        let local = |sge: Sge| {
            let need = Access::LOCAL_WRITE;
            let table = &self.pd.device.table;
            table.local(self.pd.id, sge.lkey, sge.addr, sge.len, need)
        };
        let spans: Result<SmallVec<[Span; 2]>, _> =
            sub_list(&wr.sges, offset, len).map(local).collect();
        scatter(&spans?, bytes);
        Ok(())
    }

    /// The engine is to look again when the first of the open messages is too old.
    fn set_alarm(self: &Arc<Self>, taking: &mut Taking) {
        if !taking.timed
            && let Some(at) = taking.reassembler.next_timeout()
        {
            taking.timed = true;
            self.port.set_alarm(at, Arc::downgrade(self));
        }
    }

    /// The time has come that the port was told of.
    pub(crate) fn alarm(self: &Arc<Self>, now: Instant) {
        let mut taking = lock(&self.taking);
        taking.timed = false;
        taking.flows_timed = false;
        if taking.live
            && let Some(reliable) = &self.reliable
        {
            taking.flows.expire(reliable.since(now));
            self.give_back(&mut taking);
            self.set_flow_alarm(reliable, &mut taking);
        }
        if taking.live {
            while let Some(message) = taking.reassembler.expire(now) {
                self.over(&mut taking, message);
            }
            self.set_alarm(&mut taking);
        }
        drop(taking);
        if let Some(reliable) = &self.reliable {
            self.reliable_on(reliable);
        }
        self.call_hooks();
    }

    /// Everything that waits for messages is over. `tell`: with completions.
    pub(super) fn flush_recvs(&self, tell: bool) {
        let mut taking = lock(&self.taking);
        let open = taking.reassembler.clear();
        let open = open.into_iter().map(|message| message.buffer);
        let flows = taking.flows.clear();
        let flows = flows.into_iter().map(|message| message.buffer);
        let mut flushed: Vec<RecvWr> = Vec::new();
        for buffer in open.chain(flows) {
            match (buffer, &self.recv) {
                (Buffer::Recv(wr), RecvSource::Shared(srq)) => srq.put_back(wr),
                (Buffer::Recv(wr), _) => flushed.push(wr),
                (Buffer::Region, _) => {}
            }
        }
        taking.recording = 0;
        if let RecvSource::Own(queue) = &self.recv {
            flushed.extend(queue.drain());
        }
        if !tell || !taking.live {
            return;
        }
        for wr in flushed {
            self.note(WcOpcode::Recv, WcStatus::WrFlushErr, 0);
            let wc = Wc {
                wr_id: wr.id,
                status: WcStatus::WrFlushErr,
                opcode: WcOpcode::Recv,
                qp_num: self.num,
                places: 1,
                ..Wc::default()
            };
            self.recv_cq.push(&[wc], true);
        }
    }
}

pub(super) fn write_grh(payload: usize, arrived: &mut Arrived<'_>) {
    let grh = Grh {
        source: arrived.from.ip(),
        dest: arrived.to,
        traffic_class: arrived.traffic_class,
    };
    if let Some(room) = arrived.bytes.first_chunk_mut() {
        grh.emit(payload, room);
    }
}
