//! The receiving half of a datagram queue pair: segments are placed as they arrive, in the receive that their message has taken or in the
//! region that it names. A completion follows when a message is complete or its time is up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use weft_mem::{Keys, MemError};
use weft_proto::dgram::{Finished, Ranges, Refusal, Source, Ticket, Whole};
use weft_wire::dgram::{self, Grh, Segment, Target};

use super::inbound::{Buffer, Inbound, Incoming, count, write_grh};
use super::record::Written;
use super::{UdError, UdErrorKind, UdInner};
use crate::lock::add_alone;
use crate::memory;
use crate::qp::RecvSource;
use crate::srq::Lack;
use crate::types::{QpState, RecvWr, UdSource, Wc, WcOpcode, WcStatus};

impl UdInner {
    pub(super) fn hears(&self, inbound: &Inbound, qkey: u32) -> bool {
        if !inbound.live || self.state() == QpState::Error || self.is_down() {
            return false;
        }
        let right = u64::from(qkey) == self.qkey.load(Ordering::Relaxed);
        if !right {
            count(&self.counters.wrong_qkey);
        }
        right
    }

    /// Bytes in front of a message in its receive.
    pub(super) fn front(&self) -> u32 {
        if self.grh { Grh::LEN as u32 } else { 0 }
    }

    /// Takes a receive for a message of this many bytes, plus the header space.
    pub(super) fn take_recv(&self, inbound: &mut Inbound, len: u32) -> Result<RecvWr, Lack> {
        let take = || self.recv.take_fitting(len);
        let taken = take();
        if matches!(taken, Err(Lack::Empty))
            && let Some(other) = inbound.reassembler.evict(|b| matches!(b, Buffer::Recv(_)))
        {
            // Messages that may never be whole hold receives: the one that was not heard of for the longest makes way.
            self.over(inbound, other);
            return take();
        }
        taken
    }

    pub(super) fn lacks(&self, inbound: &mut Inbound, lack: Lack, source: UdSource, msn: u32) {
        let (counter, kind) = match lack {
            Lack::Empty => (&self.counters.no_recv, UdErrorKind::NoReceive),
            Lack::Unsuited => (&self.counters.too_long, UdErrorKind::TooLong),
        };
        count(counter);
        inbound.report(UdError::from(kind, source, msn));
    }

    /// A message of version 1, which is one datagram.
    pub(super) fn take_message(
        &self,
        inbound: &mut Inbound,
        header: &dgram::Header,
        arrived: &mut Incoming<'_>,
    ) {
        let front = self.front();
        let payload = arrived.bytes.len() - Grh::LEN;
        let len = payload as u32 + front;
        let source = UdSource {
            addr: arrived.from,
            qp_num: header.src_qp,
        };
        let wr = match self.take_recv(inbound, len) {
            Ok(wr) => wr,
            Err(lack) => return self.lacks(inbound, lack, source, header.msn),
        };
        if self.grh {
            write_grh(payload, arrived);
        }
        let bytes = &arrived.bytes[Grh::LEN - front as usize..];
        let placed = self.place(&inbound.keys, &wr, 0, bytes);
        let (imm, solicited) = (header.imm, header.solicited);
        self.received(inbound, &wr, placed, len, imm, source, solicited);
    }

    #[expect(clippy::too_many_arguments, reason = "what a completion says")]
    pub(super) fn received(
        &self,
        inbound: &mut Inbound,
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
        self.queues.note(WcOpcode::Recv, status, len);
        inbound.urgent |= solicited || status != WcStatus::Success;
        inbound.made.push(Wc {
            wr_id: wr.id,
            status,
            opcode: WcOpcode::Recv,
            byte_len: len,
            qp_num: self.num,
            imm,
            source: Some(source),
            wqes_retired: 1,
            ..Wc::default()
        });
    }

    pub(super) fn take_segment(
        &self,
        inbound: &mut Inbound,
        segment: &Segment,
        arrived: &mut Incoming<'_>,
    ) {
        let source = Source {
            addr: arrived.from,
            qp_num: segment.src_qp,
            incarnation: segment.incarnation,
        };
        let payload = arrived.bytes.len() - Grh::LEN;
        if let Some(target) = segment.target
            && let Some(whole) = inbound.reassembler.admit_whole(&source, segment, payload)
        {
            return self.take_whole_record(inbound, segment, target, whole, arrived);
        }
        let ticket = match inbound.reassembler.admit(&source, segment, payload) {
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
            None => self.take_send_segment(inbound, segment, ticket, arrived),
            Some(target) => self.take_record_segment(inbound, segment, target, ticket, arrived),
        }
    }

    fn take_send_segment(
        &self,
        inbound: &mut Inbound,
        segment: &Segment,
        ticket: Ticket,
        arrived: &mut Incoming<'_>,
    ) {
        let source = UdSource {
            addr: arrived.from,
            qp_num: segment.src_qp,
        };
        let front = self.front();
        // No sum wraps: messages are at most a gibibyte long.
        let len = segment.len + front;
        let opened = if ticket.opens() {
            match self.take_recv(inbound, len) {
                Ok(wr) => Some(wr),
                Err(lack) => {
                    inbound.reassembler.abandon(&ticket);
                    return self.lacks(inbound, lack, source, segment.msn);
                }
            }
        } else {
            None
        };
        if self.grh && opened.is_some() {
            write_grh(segment.len as usize, arrived);
        }
        let placed = match (&opened, inbound.reassembler.buffer(&ticket)) {
            (Some(wr), _) => {
                // The header space is filled with the first segment to arrive.
                let payload = &arrived.bytes[Grh::LEN..];
                let grh = &arrived.bytes[Grh::LEN - front as usize..Grh::LEN];
                self.place(&inbound.keys, wr, 0, grh)
                    .and_then(|()| self.place(&inbound.keys, wr, front + segment.offset, payload))
            }
            (None, Some(Buffer::Recv(wr))) => {
                let payload = &arrived.bytes[Grh::LEN..];
                self.place(&inbound.keys, wr, front + segment.offset, payload)
            }
            (None, _) => return,
        };
        if placed.is_err() {
            let open = inbound.reassembler.abandon(&ticket).map(|over| over.buffer);
            let wr = opened.or(match open {
                Some(Buffer::Recv(wr)) => Some(wr),
                _ => None,
            });
            if let Some(wr) = wr {
                let (imm, solicited) = (segment.imm, segment.solicited);
                self.received(inbound, &wr, placed, len, imm, source, solicited);
            }
            return;
        }
        let buffer = || opened.map_or(Buffer::Region, Buffer::Recv);
        let (whole, evicted) = inbound
            .reassembler
            .placed(arrived.now.time(), ticket, buffer);
        for finished in [whole, evicted].into_iter().flatten() {
            self.over(inbound, finished);
        }
    }

    /// A Write-Record that is one segment, as short ones are.
    fn take_whole_record(
        &self,
        inbound: &mut Inbound,
        segment: &Segment,
        target: Target,
        whole: Whole,
        arrived: &Incoming<'_>,
    ) {
        // In any case, further segments of it are late.
        inbound.reassembler.came(whole);
        let source = UdSource {
            addr: arrived.from,
            qp_num: segment.src_qp,
        };
        if inbound.records_held() >= self.record_depth as usize {
            return self.lacks_record(inbound, source, segment.msn);
        }
        let payload = &arrived.bytes[Grh::LEN..];
        let keys = &inbound.keys;
        let placed = self.write_remote(keys, target.stag, target.to, segment.len, 0, payload);
        if let Err(error) = placed {
            return self.no_access(inbound, error, target.stag, source, segment.msn);
        }
        let valid = Ranges::up_to(segment.len);
        let written = Written::new(source, segment, target, valid);
        inbound.maps.add_message(&written, true);
        self.recorded(inbound, written, segment.len, segment.solicited);
    }

    fn lacks_record(&self, inbound: &mut Inbound, source: UdSource, msn: u32) {
        count(&self.counters.no_record);
        inbound.report(UdError::from(UdErrorKind::NoRecord, source, msn));
    }

    fn no_access(
        &self,
        inbound: &mut Inbound,
        error: MemError,
        stag: u32,
        source: UdSource,
        msn: u32,
    ) {
        tracing::debug!(%error, from = %source.addr, stag, "a Write-Record is refused");
        count(&self.counters.no_access);
        inbound.report(UdError::from(UdErrorKind::NoAccess, source, msn));
    }

    fn take_record_segment(
        &self,
        inbound: &mut Inbound,
        segment: &Segment,
        target: Target,
        ticket: Ticket,
        arrived: &mut Incoming<'_>,
    ) {
        let source = UdSource {
            addr: arrived.from,
            qp_num: segment.src_qp,
        };
        if ticket.opens() && inbound.records_held() >= self.record_depth as usize {
            inbound.reassembler.abandon(&ticket);
            return self.lacks_record(inbound, source, segment.msn);
        }
        let payload = &arrived.bytes[Grh::LEN..];
        // All of the message has to be within the region, before its first byte is placed; the rights are looked at for each segment.
        let (at, len) = if ticket.opens() {
            (0, segment.len)
        } else {
            (segment.offset, payload.len() as u32)
        };
        let to = target.to.wrapping_add(at.into());
        let skip = (segment.offset - at) as usize;
        let placed = self.write_remote(&inbound.keys, target.stag, to, len, skip, payload);
        if let Err(error) = placed {
            self.no_access(inbound, error, target.stag, source, segment.msn);
            if let Some(open) = inbound.reassembler.abandon(&ticket) {
                self.over(inbound, open);
            }
            return;
        }
        let opens = ticket.opens();
        let (whole, evicted) = inbound
            .reassembler
            .placed(arrived.now.time(), ticket, || Buffer::Region);
        inbound.recording += usize::from(opens);
        for finished in [whole, evicted].into_iter().flatten() {
            self.over(inbound, finished);
        }
    }

    /// A message is over: whole, or given up.
    pub(super) fn over(&self, inbound: &mut Inbound, message: Finished<Buffer>) {
        let complete = message.is_complete();
        let header = message.header;
        let source = UdSource {
            addr: message.source.addr,
            qp_num: message.source.qp_num,
        };
        if !complete {
            count(&self.counters.incomplete);
            inbound.report(UdError::from(UdErrorKind::Incomplete, source, header.msn));
        }
        match message.buffer {
            Buffer::Recv(wr) if complete => {
                let len = header.len + self.front();
                let (imm, solicited) = (header.imm, header.solicited);
                self.received(inbound, &wr, Ok(()), len, imm, source, solicited);
            }
            // The next message may have it.
            Buffer::Recv(wr) => self.put_back(wr),
            Buffer::Region => {
                inbound.recording = inbound.recording.saturating_sub(1);
                let Some(target) = header.target else {
                    return;
                };
                let bytes = message.valid.bytes();
                let written = Written::new(source, &header, target, message.valid);
                inbound.maps.add_message(&written, complete);
                if complete || self.partial_records {
                    self.recorded(inbound, written, bytes, header.solicited);
                }
            }
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

    fn recorded(&self, inbound: &mut Inbound, written: Written, bytes: u32, solicited: bool) {
        add_alone(&self.counters.records, 1);
        let number = inbound.next_record;
        inbound.next_record += 1;
        inbound.urgent |= solicited;
        inbound.made.push(Wc {
            wr_id: number,
            opcode: WcOpcode::WriteRecord,
            byte_len: bytes,
            qp_num: self.num,
            imm: written.imm,
            source: Some(written.source),
            ..Wc::default()
        });
        inbound.records.push_back((number, written));
    }

    /// Bytes of a message to their place in a receive that has room for them.
    pub(super) fn place(
        &self,
        keys: &Keys,
        wr: &RecvWr,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), MemError> {
        memory::scatter(keys, self.pd.id, &wr.sges, offset, bytes)
    }

    /// Bytes to the memory that a peer names, `skip` behind its beginning; all of it, `len` bytes, has to be the peer's to write.
    pub(super) fn write_remote(
        &self,
        keys: &Keys,
        stag: u32,
        to: u64,
        len: u32,
        skip: usize,
        bytes: &[u8],
    ) -> Result<(), MemError> {
        let peer = (self.pd.id, self.num);
        let table = &self.pd.device.table;
        memory::write_remote(table, keys, peer, (stag, to, len), skip, bytes)
    }

    /// The engine is to look again when the first of the open messages is too old.
    pub(super) fn set_alarm(self: &Arc<Self>, inbound: &mut Inbound) {
        if !inbound.timed
            && let Some(at) = inbound.reassembler.next_timeout()
        {
            inbound.timed = true;
            self.port.set_alarm(at, Arc::downgrade(self));
        }
    }

    /// Ends all waiting receives. `tell`: with completions.
    pub(super) fn flush_recvs(&self, tell: bool) {
        let mut inbound = self.hold();
        let open = inbound.reassembler.clear();
        let open = open.into_iter().map(|message| message.buffer);
        let flows = inbound.flows.clear();
        let flows = flows.into_iter().map(|message| message.buffer);
        let mut flushed: Vec<RecvWr> = Vec::new();
        for buffer in open.chain(flows) {
            match (buffer, &self.recv) {
                (Buffer::Recv(wr), RecvSource::Shared(srq)) => srq.put_back(wr),
                (Buffer::Recv(wr), _) => flushed.push(wr),
                (Buffer::Region, _) => {}
            }
        }
        inbound.recording = 0;
        if let RecvSource::Own(queue) = &self.recv {
            flushed.extend(queue.drain());
        }
        if !tell || !inbound.live {
            return;
        }
        for wr in flushed {
            self.queues
                .receive_failed(self.num, wr.id, WcStatus::WrFlushErr);
        }
    }
}
