//! The direction that we send.

use std::collections::VecDeque;

use super::credits::Credits;
use super::{Action, Config, From, Op, Run, Stage, Stats, Violation};
use crate::wire::{Body, Buffer};

/// Fewer bytes than this are not worth a write to a sink.
const SINK_MIN: u32 = 2048;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Item {
    /// Bytes in the send buffer, of so many sends.
    Bytes {
        len: u32,
        sends: u32,
    },
    /// One urgent byte in the send buffer.
    Urgent,
    /// A source, of which `off` bytes were written to a sink.
    Source {
        op: Op,
        at: Buffer,
        off: u32,
    },
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flight {
    op: Op,
    index: u32,
    /// Bytes announced to the peer.
    len: u32,
    /// Bytes that were not announced, because they were written to a sink before.
    off: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sink {
    position: u64,
    at: Buffer,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Sender {
    queue: VecDeque<Item>,
    flights: VecDeque<Flight>,
    /// Sources that moved after they were announced to the peer.
    moves: VecDeque<(u32, Buffer)>,
    next_index: u32,
    /// The number of stream bytes announced to the peer.
    position: u64,
    sink: Option<Sink>,
    /// Offset in the send buffer of the next byte to come, and of the next to send.
    tail: u32,
    head: u32,
    /// Bytes in the send buffer, those included that are being transmitted.
    used: u32,
    end_queued: bool,
    end_sent: bool,
}

impl Sender {
    pub(super) fn room(&self, config: &Config) -> u32 {
        config.send_buffer - self.used
    }

    pub(super) fn append(
        &mut self,
        len: u32,
        urgent: bool,
        config: &Config,
        stats: &mut Stats,
    ) -> Run {
        let len = len.min(self.room(config));
        let run = Run {
            off: self.tail,
            len,
        };
        if len == 0 || self.end_queued {
            return Run { len: 0, ..run };
        }
        self.tail = (self.tail + len) % config.send_buffer;
        self.used += len;
        if urgent {
            self.queue.push_back(Item::Urgent);
        } else if let Some(Item::Bytes { len: before, sends }) = self.queue.back_mut() {
            *before += len;
            *sends = sends.saturating_add(1);
            stats.stalls += 1;
        } else {
            self.queue.push_back(Item::Bytes { len, sends: 1 });
        }
        run
    }

    pub(super) fn advance(&mut self, len: u32) {
        self.position += u64::from(len);
    }

    pub(super) fn source(&mut self, op: Op, at: Buffer) {
        if !self.end_queued {
            self.queue.push_back(Item::Source { op, at, off: 0 });
        }
    }

    /// Sources that are queued or in flight.
    pub(super) fn sources(&self) -> usize {
        let queued = |item: &&Item| matches!(item, Item::Source { .. });
        self.flights.len() + self.queue.iter().filter(queued).count()
    }

    pub(super) fn stage(&self, op: Op) -> Stage {
        if let Some(flight) = self.flights.iter().find(|flight| flight.op == op) {
            return Stage::Flying(flight.index);
        }
        let queued = |item: &Item| matches!(item, Item::Source { op: queued, .. } if *queued == op);
        if self.queue.iter().any(queued) {
            Stage::Queued
        } else {
            Stage::Gone
        }
    }

    pub(super) fn move_source(&mut self, to: Op, place: Buffer) {
        for item in &mut self.queue {
            if let Item::Source { op, at, .. } = item
                && *op == to
            {
                *at = Buffer {
                    len: at.len,
                    ..place
                };
            }
        }
        if let Some(flight) = self.flights.iter().find(|flight| flight.op == to) {
            let at = Buffer {
                addr: place.addr.wrapping_add(u64::from(flight.off)),
                key: place.key,
                len: flight.len,
            };
            self.moves.push_back((flight.index, at));
        }
    }

    pub(super) fn transmitted(&mut self, bytes: u32) {
        self.used -= bytes.min(self.used);
    }

    pub(super) fn shutdown(&mut self) {
        if !self.end_queued {
            self.end_queued = true;
            self.queue.push_back(Item::End);
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.end_sent
    }

    /// Nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.moves.is_empty()
    }

    pub(super) fn has_urgent(&self) -> bool {
        self.queue.contains(&Item::Urgent)
    }

    pub(super) fn on_sink(&mut self, position: u64, at: Buffer) {
        // One of another position came too late: the peer knows by what we have sent.
        self.sink = (position == self.position && !self.end_sent).then_some(Sink { position, at });
    }

    pub(super) fn drop_sink(&mut self) {
        self.sink = None;
    }

    pub(super) fn on_read(&mut self, index: u32, len: u32) -> Result<Op, Violation> {
        let flight = self.flights.front().ok_or(Violation::Unexpected)?;
        if flight.index != index || flight.len != len {
            return Err(Violation::Order);
        }
        let op = flight.op;
        self.flights.pop_front();
        // It cannot have been moved: the peer has fetched it under its lock.
        self.moves.retain(|(of, _)| *of != index);
        Ok(op)
    }

    /// The next bytes go to the sink, if that is still where the stream is.
    fn sink(&self) -> Option<Sink> {
        self.sink.filter(|sink| sink.position == self.position)
    }

    fn run(&mut self, len: u32, config: &Config) -> Run {
        let run = Run {
            off: self.head,
            len,
        };
        self.head = (self.head + len) % config.send_buffer;
        run
    }

    pub(super) fn poll(
        &mut self,
        config: &Config,
        credits: &mut Credits,
        stats: &mut Stats,
    ) -> Option<Action> {
        let pending = self.has_urgent();
        if let Some(&(index, at)) = self.moves.front() {
            let message = credits.take(Body::SrcUpdate { index, at }, pending)?;
            self.moves.pop_front();
            return Some(Action::Send {
                message,
                payload: None,
            });
        }
        match *self.queue.front()? {
            Item::Bytes { len, .. } if len >= SINK_MIN && self.sink().is_some() => {
                let sink = self.sink()?;
                let len = len.min(sink.at.len);
                let message = credits.take(Body::RdmaWrCompl { len }, pending)?;
                let from = From::Ring(self.run(len, config));
                self.shorten(len);
                Some(self.written(from, sink, len, message, stats))
            }
            Item::Bytes { len, sends } => {
                let mut take = len.min(config.send_payload);
                let more = len == take && take < config.send_payload;
                let urgent = more && self.queue.get(1) == Some(&Item::Urgent);
                take += u32::from(urgent);
                let others = self.queue.iter().skip(1 + usize::from(urgent));
                let pending = others.into_iter().any(|item| *item == Item::Urgent);
                let body = Body::Data { len: take, urgent };
                let message = credits.take_data(body, pending)?;
                stats.coalesced += u64::from(sends > 1);
                self.shorten(take - u32::from(urgent));
                if urgent {
                    self.queue.pop_front();
                }
                Some(self.data(take, message, config, stats))
            }
            Item::Urgent => {
                let others = self.queue.iter().skip(1);
                let pending = others.into_iter().any(|item| *item == Item::Urgent);
                let body = Body::Data {
                    len: 1,
                    urgent: true,
                };
                let message = credits.take_data(body, pending)?;
                self.queue.pop_front();
                Some(self.data(1, message, config, stats))
            }
            Item::Source { op, at, off } => self.poll_source(op, at, off, config, credits, stats),
            Item::End => {
                let message = credits.take(Body::DisConn, false)?;
                self.queue.pop_front();
                self.end_sent = true;
                self.sink = None;
                Some(Action::Send {
                    message,
                    payload: None,
                })
            }
        }
    }

    fn poll_source(
        &mut self,
        op: Op,
        at: Buffer,
        off: u32,
        config: &Config,
        credits: &mut Credits,
        stats: &mut Stats,
    ) -> Option<Action> {
        let left = at.len - off;
        let pending = self.has_urgent();
        if let Some(sink) = self.sink() {
            let len = left.min(sink.at.len);
            let message = credits.take(Body::RdmaWrCompl { len }, pending)?;
            let last = len == left;
            if last {
                self.queue.pop_front();
            } else if let Some(Item::Source { off, .. }) = self.queue.front_mut() {
                *off += len;
            }
            let from = From::Source { op, off, len, last };
            return Some(self.written(from, sink, len, message, stats));
        }
        if self.flights.len() >= usize::from(config.sources) {
            return None;
        }
        let index = self.next_index;
        let rest = Buffer {
            addr: at.addr.wrapping_add(u64::from(off)),
            key: at.key,
            len: left,
        };
        let message = credits.take(Body::SrcAvail { index, at: rest }, pending)?;
        self.queue.pop_front();
        self.next_index = index.wrapping_add(1);
        self.flights.push_back(Flight {
            op,
            index,
            len: left,
            off,
        });
        self.advance(left);
        self.sink = None;
        stats.sources += 1;
        Some(Action::Send {
            message,
            payload: None,
        })
    }

    fn shorten(&mut self, by: u32) {
        if let Some(Item::Bytes { len, sends }) = self.queue.front_mut() {
            *len -= by;
            *sends = 1;
            if *len == 0 {
                self.queue.pop_front();
            }
        }
    }

    fn data(
        &mut self,
        len: u32,
        message: crate::wire::Message,
        config: &Config,
        stats: &mut Stats,
    ) -> Action {
        self.advance(len);
        self.sink = None;
        stats.data_messages += 1;
        Action::Send {
            message,
            payload: Some(self.run(len, config)),
        }
    }

    fn written(
        &mut self,
        from: From,
        sink: Sink,
        len: u32,
        message: crate::wire::Message,
        stats: &mut Stats,
    ) -> Action {
        self.advance(len);
        self.sink = None;
        stats.sinks += 1;
        Action::Write {
            from,
            addr: sink.at.addr,
            key: sink.at.key,
            message,
        }
    }
}
