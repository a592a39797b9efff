//! Processing of datagrams that arrive together: consecutive datagrams of one sender for one queue pair share one hold of its lock, and one
//! access to its completion queue.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use smallvec::SmallVec;
use weft_wire::dgram::{self, Control, Datagram, Grh, Segment};

use super::UdInner;
use super::inbound::{ArrivalTime, Inbound, Incoming, count};
use super::port::{HEADROOM, Last, MemberId, Paced, PortInner};
use crate::lock::lock;

/// Datagrams that lie here, or can be had at once.
pub(super) trait Feed {
    /// Advances to the next datagram; `false` if there is none.
    fn advance(&mut self) -> bool;
    /// Its bytes, behind [`HEADROOM`] bytes that are free.
    fn bytes(&mut self) -> &mut [u8];
}

/// Datagrams of one size, one behind the other in a buffer behind [`HEADROOM`] bytes; the last may be shorter.
pub(super) struct Train<'a> {
    buffer: &'a mut [u8],
    each: usize,
    /// The position of the next one.
    next: Option<usize>,
    start: usize,
}

impl<'a> Train<'a> {
    pub(super) fn new(buffer: &'a mut [u8], each: usize) -> Train<'a> {
        Train {
            buffer,
            each: each.max(1),
            // An empty datagram is one, too.
            next: Some(HEADROOM),
            start: HEADROOM,
        }
    }

    fn end(&self) -> usize {
        self.buffer.len().min(self.start + self.each)
    }
}

impl Feed for Train<'_> {
    fn advance(&mut self) -> bool {
        let Some(start) = self.next else {
            return false;
        };
        self.start = start;
        let end = self.end();
        self.next = (end < self.buffer.len()).then_some(end);
        true
    }

    fn bytes(&mut self) -> &mut [u8] {
        let end = self.end();
        &mut self.buffer[self.start - HEADROOM..end]
    }
}

/// Queue pairs that have answers for their senders.
pub(super) type Answering = SmallVec<[Arc<UdInner>; 4]>;

/// The queue pair of the last datagram and the number by which it was addressed: mostly it is the next one's, too.
pub(super) type Known = Option<(u32, Arc<UdInner>)>;

/// The datagrams to process, and their origin.
pub(super) struct Intake<'a, F> {
    pub(super) port: &'a PortInner,
    pub(super) feed: F,
    pub(super) from: SocketAddr,
    pub(super) to: IpAddr,
    pub(super) traffic_class: u8,
    pub(super) now: &'a ArrivalTime,
}

impl<F: Feed> Intake<'_, F> {
    /// The next datagram that is one.
    fn read(&mut self) -> Option<Datagram> {
        while self.feed.advance() {
            match dgram::read(&self.feed.bytes()[HEADROOM..]) {
                Ok(datagram) => return Some(datagram),
                Err(error) => {
                    self.port.malformed.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(%error, from = %self.from, "a datagram is dropped");
                }
            }
        }
        None
    }

    /// The payload of the last one, which begins at `start` of it.
    fn arrived(&mut self, start: usize, end: usize) -> Incoming<'_> {
        let start = HEADROOM + start - Grh::LEN;
        Incoming {
            bytes: &mut self.feed.bytes()[start..HEADROOM + end],
            from: self.from,
            to: self.to,
            traffic_class: self.traffic_class,
            now: self.now,
        }
    }

    /// All of them. Queue pairs that have answers are noted.
    pub(super) fn take_all(
        &mut self,
        last: &mut Last,
        known: &mut Known,
        answering: &mut Answering,
    ) {
        let mut next = self.read();
        while let Some(datagram) = next {
            let Some(number) = addressed(&datagram) else {
                if let Datagram::Control(control) = datagram {
                    let arrived = Incoming {
                        bytes: &mut [],
                        from: self.from,
                        to: self.to,
                        traffic_class: self.traffic_class,
                        now: self.now,
                    };
                    self.port.control(control, &arrived);
                }
                next = self.read();
                continue;
            };
            if known.as_ref().is_none_or(|(of, _)| *of != number) {
                let found = last.find(self.port, number);
                *known = found.map(|member| (number, member));
            }
            let Some((_, member)) = known else {
                next = self.read();
                continue;
            };
            let answers;
            (next, answers) = member.take_in(number, datagram, self);
            if answers && !answering.iter().any(|other| Arc::ptr_eq(other, member)) {
                answering.push(Arc::clone(member));
            }
        }
    }
}

/// The queue pair that it is for; `None` of a control datagram.
fn addressed(datagram: &Datagram) -> Option<u32> {
    match datagram {
        Datagram::Message(header, _) => Some(header.dst_qp),
        Datagram::Segment(segment, _) => Some(segment.dst_qp),
        Datagram::Control(_) => None,
    }
}

impl PortInner {
    fn control(&self, control: Control, arrived: &Incoming<'_>) {
        match control {
            Control::Probe { cookie, sent } => {
                // A group's members do not all answer for the group.
                if self.is_group {
                    return;
                }
                let mut report = Vec::with_capacity(dgram::segment::PROBE_LEN);
                let room = self.receive_room;
                Control::Report { cookie, sent, room }.emit(&mut report);
                // Lost, it is asked for again. It comes from where the probe went.
                let _ = self.socket.send(&report, arrived.from, Some(arrived.to));
            }
            Control::Report { cookie, sent, room } => {
                let news = {
                    let mut paths = lock(&self.paths);
                    let path = paths.of.get_mut(&arrived.from);
                    path.is_some_and(|(_, p)| p.report(Instant::now(), cookie, sent, room))
                };
                if news {
                    self.resume(|to, _| to == arrived.from);
                }
            }
            // It has woken us. There may be room in the pipe, too.
            Control::Knock => self.resume(|to, _| to == arrived.from),
            // No member answers for a group.
            Control::Hello { flow, qkey } if flow.dst_qp != dgram::GROUP_QP => {
                if let Some(member) = self.member(flow.dst_qp) {
                    member.hello(&flow, qkey, arrived);
                }
            }
            Control::Hello { .. } => {}
            Control::Ack { flow, .. }
            | Control::Fault { flow, .. }
            | Control::Welcome { flow, .. } => {
                if let Some(member) = self.member(flow.dst_qp) {
                    member.answered(arrived.from, &control);
                }
            }
        }
    }

    /// Queue pairs that wait for a report of such a destination, until such a time, try again.
    pub(super) fn resume(&self, of: impl Fn(SocketAddr, Instant) -> bool) {
        let resumed = |&(to, _): &(SocketAddr, MemberId), paced: &mut Paced| of(to, paced.until);
        // One that waits for several destinations tries them all at once.
        let waiting: HashMap<_, _> = {
            let mut paced = lock(&self.paced);
            let resumed = paced.of.extract_if(resumed);
            resumed.map(|((_, id), p)| (id, p.member)).collect()
        };
        for member in waiting.values().filter_map(Weak::upgrade) {
            member.send_on();
        }
    }
}

impl UdInner {
    /// Processes this datagram, and the following ones with the same addresses. Returns the next datagram, and whether to call
    /// [`UdInner::answer`] after the last available one.
    fn take_in<F: Feed>(
        self: &Arc<Self>,
        number: u32,
        first: Datagram,
        intake: &mut Intake<'_, F>,
    ) -> (Option<Datagram>, bool) {
        let mut inbound = self.hold();
        let mut datagram = first;
        let mut answers = false;
        let next = loop {
            match &datagram {
                Datagram::Message(header, payload) => {
                    if !self.is_echo(header.dst_qp, header.src_qp, intake.from) {
                        let mut arrived = intake.arrived(payload.start, payload.end);
                        self.message_arrived(&mut inbound, header, &mut arrived);
                    }
                }
                Datagram::Segment(segment, payload) => {
                    if !self.is_echo(segment.dst_qp, segment.src_qp, intake.from) {
                        let mut arrived = intake.arrived(payload.start, payload.end);
                        answers |= self.segment_arrived(&mut inbound, segment, &mut arrived);
                    }
                }
                Datagram::Control(_) => {}
            }
            match intake.read() {
                Some(other) if addressed(&other) == Some(number) => datagram = other,
                other => break other,
            }
        };
        drop(inbound);
        self.queues.call_hooks();
        (next, answers)
    }

    /// A message of version 1 has come in for this queue pair.
    fn message_arrived(
        &self,
        inbound: &mut Inbound,
        header: &dgram::Header,
        arrived: &mut Incoming<'_>,
    ) {
        if !self.hears(inbound, header.qkey) {
            return;
        }
        if self.reliable.is_some() {
            // It may be doubled, or out of order: not here.
            count(&self.counters.dropped);
            return;
        }
        self.take_message(inbound, header, arrived);
    }

    /// A segment has arrived for this queue pair. `true`: call [`UdInner::answer`] after the last available datagram.
    fn segment_arrived(
        self: &Arc<Self>,
        inbound: &mut Inbound,
        segment: &Segment,
        arrived: &mut Incoming<'_>,
    ) -> bool {
        if !self.hears(inbound, segment.qkey) {
            return false;
        }
        match (&self.reliable, segment.reliable) {
            (Some(reliable), Some(_)) if segment.dst_qp == self.num => {
                let answers = self.take_reliable(reliable, inbound, segment, arrived);
                self.set_flow_alarm(reliable, inbound);
                return answers;
            }
            (None, None) => {
                self.take_segment(inbound, segment, arrived);
                self.set_alarm(inbound);
            }
            (None, Some(_)) if segment.dst_qp == self.num => {
                count(&self.counters.dropped);
                self.refuse_reliable(segment, arrived);
            }
            _ => count(&self.counters.dropped),
        }
        false
    }
}
