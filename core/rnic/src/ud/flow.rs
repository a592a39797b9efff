//! The receiving half of a datagram queue pair in the reliable mode: messages are taken in the order in which they were sent
//! (docs/spec/dgram.md, "Reliable mode").

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use weft_proto::dgram::{Admit, Carried, Finished, Ranges, Resumed, Source, Spot};
use weft_wire::dgram::{Control, FaultCode, Flow, Grh, Segment, Target};

use super::inbound::{ArrivalTime, Buffer, Early, Inbound, Incoming, count, write_grh};
use super::reliable::Reliable;
use super::{UdDest, UdError, UdErrorKind, UdInner};
use crate::srq::Lack;
use crate::types::{QpState, RecvWr, UdSource};

/// The number of senders with dropped segments that are told, when a receive is posted, to retransmit at once. Further senders retry by
/// themselves.
const TOLD: usize = 16;

/// The reason why a segment is not placed.
enum Stop {
    Starved,
    Refused(FaultCode),
}

impl UdInner {
    /// A segment of the reliable mode has arrived. `true`: call [`UdInner::answer`] after the last available datagram.
    pub(super) fn take_reliable(
        &self,
        reliable: &Reliable,
        inbound: &mut Inbound,
        segment: &Segment,
        arrived: &mut Incoming<'_>,
    ) -> bool {
        let now = reliable.since(arrived.now.time());
        let payload = arrived.bytes.len() - Grh::LEN;
        let admit = inbound
            .flows
            .admit(now, arrived.from, arrived.to, segment, payload, || {
                Early::of(arrived)
            });
        match admit {
            Admit::Next(spot) => self.take_spot(inbound, &spot, arrived),
            Admit::Done => {}
        }
        self.give_back(inbound);
        inbound.flows.has_answers()
    }

    /// The expected segment of a flow, and those behind it that are here already.
    fn take_spot(&self, inbound: &mut Inbound, spot: &Spot, arrived: &mut Incoming<'_>) {
        if !self.place_spot(inbound, spot, arrived) {
            return;
        }
        let mut next = inbound.flows.next_kept(spot);
        while let Some((spot, mut early)) = next {
            let mut arrived = Incoming {
                bytes: &mut early.bytes,
                from: spot.from(),
                to: early.to,
                traffic_class: early.traffic_class,
                now: arrived.now,
            };
            next = if self.place_spot(inbound, &spot, &mut arrived) {
                inbound.flows.next_kept(&spot)
            } else {
                None
            };
        }
    }

    /// Whether it was placed, so that the flow continues.
    fn place_spot(&self, inbound: &mut Inbound, spot: &Spot, arrived: &mut Incoming<'_>) -> bool {
        let segment = *spot.segment();
        let placed = match segment.target {
            None => self.place_send(inbound, spot, arrived),
            Some(target) => self.place_record(inbound, spot, target, arrived),
        };
        match placed {
            Ok(buffer) => {
                if let Some(whole) = inbound.flows.placed(spot, buffer) {
                    self.carried(inbound, whole);
                }
                true
            }
            Err(Stop::Starved) => {
                inbound.flows.starve(spot, || Early::of(arrived));
                false
            }
            Err(Stop::Refused(code)) => {
                if let Some(open) = inbound.flows.refuse(spot, code) {
                    self.carried(inbound, open);
                }
                false
            }
        }
    }

    fn place_send(
        &self,
        inbound: &mut Inbound,
        spot: &Spot,
        arrived: &mut Incoming<'_>,
    ) -> Result<Option<Buffer>, Stop> {
        let segment = spot.segment();
        let front = self.front();
        let source = source_of(spot);
        let wr = if spot.opens() {
            match self.receive_for(inbound, segment.len + front, arrived.now.time()) {
                Ok(wr) => Some(wr),
                Err(Lack::Empty) => return Err(Stop::Starved),
                Err(lack) => {
                    self.lacks(inbound, lack, source, segment.msn);
                    return Err(Stop::Refused(FaultCode::TooLong));
                }
            }
        } else {
            None
        };
        let placed = match (&wr, inbound.flows.buffer(spot)) {
            (Some(wr), _) => {
                if self.grh {
                    write_grh(segment.len as usize, arrived);
                }
                let bytes = &arrived.bytes[Grh::LEN - front as usize..];
                self.place(&inbound.keys, wr, 0, bytes)
            }
            (None, Some(Buffer::Recv(wr))) => {
                let bytes = &arrived.bytes[Grh::LEN..];
                self.place(&inbound.keys, wr, front + segment.offset, bytes)
            }
            (None, _) => return Err(Stop::Refused(FaultCode::Operation)),
        };
        if placed.is_err() {
            // The memory of the receive is invalid: the flow ends, and the sender is notified.
            let open = inbound.flows.refuse(spot, FaultCode::Operation);
            let open = open.map(|open| open.buffer);
            let taken = wr.map(Buffer::Recv).or(open);
            if let Some(Buffer::Recv(wr)) = taken {
                let len = segment.len + front;
                let (imm, solicited) = (segment.imm, segment.solicited);
                self.received(inbound, &wr, placed, len, imm, source, solicited);
            }
            return Err(Stop::Refused(FaultCode::Operation));
        }
        Ok(wr.map(Buffer::Recv))
    }

    /// Takes a receive for a reliable message, from a stalled message if there is no other.
    fn receive_for(&self, inbound: &mut Inbound, len: u32, now: Instant) -> Result<RecvWr, Lack> {
        let first = self.take_recv(inbound, len);
        if !matches!(first, Err(Lack::Empty)) {
            return first;
        }
        if let Some(reliable) = &self.reliable {
            let now = reliable.since(now);
            let still = inbound.flows.evict(now, |b| matches!(b, Buffer::Recv(_)));
            if let Some(still) = still {
                self.carried(inbound, still);
            }
        }
        // A thread that posts a receive from now on serves starving flows. One may have been posted just before.
        self.starving.store(true, Ordering::SeqCst);
        self.take_recv(inbound, len)
    }

    fn place_record(
        &self,
        inbound: &mut Inbound,
        spot: &Spot,
        target: Target,
        arrived: &mut Incoming<'_>,
    ) -> Result<Option<Buffer>, Stop> {
        let segment = spot.segment();
        let opens = spot.opens();
        if opens && self.record_depth == 0 {
            return Err(Stop::Refused(FaultCode::Operation));
        }
        if opens && inbound.records_held() >= self.record_depth as usize {
            self.starving.store(true, Ordering::SeqCst);
            return Err(Stop::Starved);
        }
        let payload = &arrived.bytes[Grh::LEN..];
        // As for unreliable messages: the whole message has to be within the region, and each segment needs the right.
        let (at, len) = if opens {
            (0, segment.len)
        } else {
            (segment.offset, payload.len() as u32)
        };
        let to = target.to.wrapping_add(at.into());
        let skip = (segment.offset - at) as usize;
        match self.write_remote(&inbound.keys, target.stag, to, len, skip, payload) {
            Ok(()) => {}
            Err(error) => {
                tracing::debug!(%error, from = %arrived.from, stag = target.stag, "a reliable Write-Record is refused");
                count(&self.counters.no_access);
                let kind = UdErrorKind::NoAccess;
                inbound.report(UdError::from(kind, source_of(spot), segment.msn));
                return Err(Stop::Refused(FaultCode::Access));
            }
        }
        if opens {
            inbound.recording += 1;
            return Ok(Some(Buffer::Region));
        }
        Ok(None)
    }

    /// A message is over: whole, or its flow has ended.
    fn carried(&self, inbound: &mut Inbound, message: Carried<Buffer>) {
        let finished = Finished {
            source: Source {
                addr: message.from,
                qp_num: message.header.src_qp,
                incarnation: message.header.incarnation,
            },
            valid: Ranges::up_to(message.filled),
            header: message.header,
            buffer: message.buffer,
        };
        self.over(inbound, finished);
    }

    /// Receives of messages that will never be whole are the oldest again.
    pub(super) fn give_back(&self, inbound: &mut Inbound) {
        for open in inbound.flows.released() {
            self.carried(inbound, open);
        }
    }

    /// Acknowledgements, and what else senders are to know, of everything that has come in.
    pub(crate) fn answer(&self) {
        let answers = self.hold().flows.answers();
        for (to, via, control) in answers {
            self.send_answer(to, via, control);
        }
    }

    fn send_answer(&self, to: SocketAddr, via: IpAddr, control: Control) {
        let dest = UdDest {
            addr: to,
            qp_num: 0,
            qkey: 0,
            from: Some(via),
            traffic_class: 0,
        };
        // If it is lost, it is sent again when the sender retries.
        self.port.send_control(control, &dest);
    }

    /// There may be receives, or room for records, for flows that found none.
    pub(super) fn feed(self: &Arc<Self>) {
        let Some(reliable) = &self.reliable else {
            return;
        };
        if !self.starving.load(Ordering::SeqCst) || !self.starving.swap(false, Ordering::SeqCst) {
            return;
        }
        let mut inbound = self.hold();
        if !inbound.live || self.state() == QpState::Error {
            return;
        }
        for records in [false, true] {
            self.feed_one_kind(&mut inbound, records);
        }
        if inbound.flows.is_starving() {
            self.starving.store(true, Ordering::SeqCst);
        }
        self.give_back(&mut inbound);
        self.set_flow_alarm(reliable, &mut inbound);
        drop(inbound);
        self.answer();
        self.queues.call_hooks();
    }

    /// Flows that need receives, or room for records, continue one after the other until one finds none.
    fn feed_one_kind(&self, inbound: &mut Inbound, records: bool) {
        let now = ArrivalTime::default();
        let mut told = 0;
        while told < TOLD {
            match inbound.flows.resume(records) {
                Resumed::Nobody => return,
                Resumed::Told => told += 1,
                Resumed::Segment(spot, mut early) => {
                    let mut arrived = Incoming {
                        bytes: &mut early.bytes,
                        from: spot.from(),
                        to: early.to,
                        traffic_class: early.traffic_class,
                        now: &now,
                    };
                    self.take_spot(inbound, &spot, &mut arrived);
                    if !inbound.flows.resumed(records, &spot) {
                        return;
                    }
                }
            }
        }
    }

    /// A queue pair asks for a cookie.
    pub(crate) fn hello(&self, flow: &Flow, qkey: u32, arrived: &Incoming<'_>) {
        let control = {
            let inbound = self.hold();
            if !self.hears(&inbound, qkey) {
                return;
            }
            match &self.reliable {
                Some(reliable) => {
                    let now = reliable.since(arrived.now.time());
                    inbound.flows.welcome(now, arrived.from, flow)
                }
                None => not_reliable(flow.src_qp, flow.dst_qp, flow.incarnation, 0, 0),
            }
        };
        self.send_answer(arrived.from, arrived.to, control);
    }

    /// A reliable segment for a queue pair that is not reliable.
    pub(super) fn refuse_reliable(&self, segment: &Segment, arrived: &Incoming<'_>) {
        let psn = segment.reliable.map_or(0, |packet| packet.psn);
        let Segment {
            src_qp,
            dst_qp,
            incarnation,
            msn,
            ..
        } = *segment;
        let control = not_reliable(src_qp, dst_qp, incarnation, psn, msn);
        self.send_answer(arrived.from, arrived.to, control);
    }

    /// Sets the engine's timer for flows that have to be forgotten.
    pub(super) fn set_flow_alarm(self: &Arc<Self>, reliable: &Reliable, inbound: &mut Inbound) {
        if let Some(at) = inbound.flows.next_time()
            && !std::mem::replace(&mut inbound.flows_timed, true)
        {
            let this = Arc::downgrade(self);
            self.port.set_alarm(reliable.at(at), this);
        }
    }
}

fn not_reliable(src_qp: u32, dst_qp: u32, incarnation: u32, psn: u32, msn: u32) -> Control {
    Control::Fault {
        flow: Flow {
            dst_qp: src_qp,
            src_qp: dst_qp,
            incarnation,
        },
        code: FaultCode::Operation,
        psn,
        msn,
    }
}

fn source_of(spot: &Spot) -> UdSource {
    UdSource {
        addr: spot.from(),
        qp_num: spot.segment().src_qp,
    }
}
