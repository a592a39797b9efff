//! Taking in what has come at once: datagrams of one sender that follow each other for one queue pair are one hold of its lock, and their
//! completions one look at its queue.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use weft_wire::dgram::{self, Datagram, Grh};

use super::port::PortInner;
use super::{Arrived, Came, UdInner};

/// The headers and what stands in front of them make room for the [`Grh`].
pub(super) const HEADROOM: usize = Grh::LEN - dgram::HEADER_LEN;

/// Datagrams that lie here, or can be had at once.
pub(super) trait Feed {
    /// Goes on to the next one: `false` when there is none.
    fn advance(&mut self) -> bool;
    /// Its bytes, behind [`HEADROOM`] bytes that are free.
    fn bytes(&mut self) -> &mut [u8];
}

/// Datagrams of one size, one behind the other in a buffer behind [`HEADROOM`] bytes; the last may be shorter.
pub(super) struct Train<'a> {
    buffer: &'a mut [u8],
    each: usize,
    /// Where the next one begins.
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

/// The same, from one look to the next: good while the port's queue pairs are the same.
#[derive(Default)]
pub(super) struct Last {
    changes: u32,
    number: u32,
    member: Weak<UdInner>,
}

impl Last {
    fn find(&mut self, port: &PortInner, number: u32) -> Option<Arc<UdInner>> {
        let changes = port.member_changes();
        if (self.changes, self.number) == (changes, number)
            && let Some(member) = self.member.upgrade()
        {
            return Some(member);
        }
        let member = port.member(number)?;
        *self = Last {
            changes,
            number,
            member: Arc::downgrade(&member),
        };
        Some(member)
    }
}

/// What is taken in, and how it came.
pub(super) struct Intake<'a, F> {
    pub(super) port: &'a PortInner,
    pub(super) feed: F,
    pub(super) from: SocketAddr,
    pub(super) to: IpAddr,
    pub(super) traffic_class: u8,
    pub(super) now: &'a Came,
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
    fn arrived(&mut self, start: usize, end: usize) -> Arrived<'_> {
        let start = HEADROOM + start - Grh::LEN;
        Arrived {
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
                    let arrived = Arrived {
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

impl UdInner {
    /// Takes in this datagram, and those behind it that are addressed alike. What comes then, and whether [`UdInner::answer`] is to be called
    /// after the last datagram that is here.
    fn take_in<F: Feed>(
        self: &Arc<Self>,
        number: u32,
        first: Datagram,
        intake: &mut Intake<'_, F>,
    ) -> (Option<Datagram>, bool) {
        let mut taking = self.hold();
        let mut datagram = first;
        let mut answers = false;
        let next = loop {
            match &datagram {
                Datagram::Message(header, payload) => {
                    if !self.is_echo(header.dst_qp, header.src_qp, intake.from) {
                        let mut arrived = intake.arrived(payload.start, payload.end);
                        self.message_arrived(&mut taking, header, &mut arrived);
                    }
                }
                Datagram::Segment(segment, payload) => {
                    if !self.is_echo(segment.dst_qp, segment.src_qp, intake.from) {
                        let mut arrived = intake.arrived(payload.start, payload.end);
                        answers |= self.segment_arrived(&mut taking, segment, &mut arrived);
                    }
                }
                Datagram::Control(_) => {}
            }
            match intake.read() {
                Some(other) if addressed(&other) == Some(number) => datagram = other,
                other => break other,
            }
        };
        drop(taking);
        self.call_hooks();
        (next, answers)
    }
}
