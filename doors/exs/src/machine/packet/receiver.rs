//! The half that receives messages.

use std::collections::VecDeque;

use weft_wire::exs::{Body, Design, Packet};

use crate::machine::{
    Action, Cancel, Config, InPlace, MAX_ADVERTS, MAX_TRANSFER, OpId, Outcome, RecvFlags, Shared,
    Stats, Violation, ended,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::machine) struct Receiver {
    design: Design,
    recvs: VecDeque<Recv>,
    /// Receives, counted from the head, that have their message.
    matched: usize,
    /// Receives, counted from the head, whose message has been processed.
    acted: usize,
    /// Receives after the matched ones whose advert the peer holds.
    live: usize,
    /// Messages that have arrived.
    arrived: u64,
    /// The messages among them that have no receive.
    waiting: VecDeque<Arrival>,
    /// Messages read, not yet acknowledged.
    read: VecDeque<(u64, u32)>,
    /// Sources that the peer expects an answer for.
    sources: usize,
    canceled: usize,
    retract: Retract,
    small: u64,
    fin: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Recv {
    op: OpId,
    len: u64,
    in_place: bool,
    canceled: bool,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Open,
    Matched(Arrival),
    Reading {
        index: u64,
        len: u32,
        truncated: bool,
    },
    Done {
        len: u32,
        truncated: bool,
        in_place: Option<InPlace>,
        /// The number of a source that must be acknowledged.
        source: Option<u64>,
    },
}

impl State {
    /// The message is in the receive's memory.
    fn done(len: u32, truncated: bool, source: Option<u64>) -> State {
        State::Done {
            len,
            truncated,
            in_place: None,
            source,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Arrival {
    Small { buffer: u32, len: u32 },
    Placed { len: u32, truncated: bool },
    Source(Packet),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Retract {
    No,
    Wanted,
    Sent,
}

impl Receiver {
    pub(in crate::machine) fn new(config: &Config, design: Design) -> Self {
        Receiver {
            design,
            recvs: VecDeque::new(),
            matched: 0,
            acted: 0,
            live: 0,
            arrived: 0,
            waiting: VecDeque::new(),
            read: VecDeque::new(),
            sources: 0,
            canceled: 0,
            retract: Retract::No,
            small: config.small_recv.into(),
            fin: false,
        }
    }

    pub(in crate::machine) fn recv(
        &mut self,
        op: OpId,
        len: u64,
        flags: RecvFlags,
        shared: &mut Shared<'_>,
    ) {
        self.recvs.push_back(Recv {
            op,
            len,
            in_place: flags.in_place,
            canceled: false,
            state: State::Open,
        });
        if let Some(arrival) = self.waiting.pop_front() {
            self.give(arrival);
        }
        self.settle(shared);
    }

    /// Give the message to the first receive without one.
    fn give(&mut self, arrival: Arrival) {
        let Some(recv) = self.recvs.get_mut(self.matched) else {
            self.waiting.push_back(arrival);
            return;
        };
        recv.state = State::Matched(arrival);
        self.matched += 1;
        self.live = self.live.saturating_sub(1);
        if std::mem::replace(&mut recv.canceled, false) {
            self.forget_cancel();
        }
    }

    fn forget_cancel(&mut self) {
        self.canceled -= 1;
        if self.canceled == 0 && self.retract == Retract::Wanted {
            self.retract = Retract::No;
        }
    }

    fn arrival(&mut self) -> Result<(), Violation> {
        if self.fin {
            return Err(Violation::AfterFin);
        }
        self.arrived += 1;
        Ok(())
    }

    pub(in crate::machine) fn on_small(
        &mut self,
        buffer: u32,
        len: u32,
        stats: &mut Stats,
    ) -> Result<(), Violation> {
        if u64::from(len) > self.small {
            return Err(Violation::Length);
        }
        self.arrival()?;
        stats.small_received += 1;
        stats.small_bytes_received += u64::from(len);
        self.give(Arrival::Small { buffer, len });
        Ok(())
    }

    /// True if the next receive can take a message of `len` bytes by the shortcut, see
    /// [`Endpoint::take_now`](crate::machine::Endpoint::take_now).
    pub(in crate::machine) fn may_take(&self, len: u32) -> bool {
        // The first receive has no message, so no earlier message waits.
        self.matched == 0
            && !self.fin
            && u64::from(len) <= self.small
            && self
                .recvs
                .front()
                .is_some_and(|head| head.len >= len.into() && !head.in_place && !head.canceled)
    }

    pub(in crate::machine) fn take(&mut self, len: u32, shared: &mut Shared<'_>) -> Option<OpId> {
        self.arrived += 1;
        self.live = self.live.saturating_sub(1);
        shared.stats.small_received += 1;
        shared.stats.small_bytes_received += u64::from(len);
        Some(self.recvs.pop_front()?.op)
    }

    /// True if [`deliver`](Self::deliver) and [`control`](Self::control) have nothing to do.
    pub(in crate::machine) fn is_still(&self) -> bool {
        self.acted == self.matched
            && self.read.is_empty()
            && self.retract != Retract::Wanted
            && (self.design != Design::Advert || self.matched + self.live >= self.recvs.len())
    }

    pub(in crate::machine) fn on_packet(
        &mut self,
        len: u32,
        truncated: bool,
        stats: &mut Stats,
    ) -> Result<(), Violation> {
        if self.fin {
            return Err(Violation::AfterFin);
        }
        if self.live == 0 {
            return Err(Violation::NoAdvert);
        }
        let room = self.recvs.get(self.matched).map_or(0, |recv| recv.len);
        let room = room.min(MAX_TRANSFER.into());
        if u64::from(len) > room || truncated && u64::from(len) != room {
            return Err(Violation::Length);
        }
        self.arrival()?;
        stats.direct_received += 1;
        stats.direct_bytes_received += u64::from(len);
        self.give(Arrival::Placed { len, truncated });
        Ok(())
    }

    pub(in crate::machine) fn on_source(
        &mut self,
        source: Packet,
        stats: &mut Stats,
    ) -> Result<(), Violation> {
        if self.design != Design::Source {
            return Err(Violation::Unexpected);
        }
        if source.addr.checked_add(source.len.into()).is_none() {
            return Err(Violation::Memory);
        }
        if source.index != self.arrived {
            return Err(Violation::Order);
        }
        if source.len > MAX_TRANSFER {
            return Err(Violation::Length);
        }
        if self.sources == MAX_ADVERTS {
            return Err(Violation::TooMany);
        }
        self.arrival()?;
        self.sources += 1;
        stats.adverts_received += 1;
        self.give(Arrival::Source(source));
        Ok(())
    }

    pub(in crate::machine) fn on_read(&mut self, op: OpId, shared: &mut Shared<'_>) {
        // Reads complete in order, so the candidate is near the head.
        let reading = self.recvs.range_mut(..self.acted).find_map(|recv| {
            let State::Reading {
                index,
                len,
                truncated,
            } = recv.state
            else {
                return None;
            };
            (recv.op == op).then(|| {
                recv.state = State::done(len, truncated, Some(index));
                len
            })
        });
        if let Some(len) = reading {
            shared.stats.direct_received += 1;
            shared.stats.direct_bytes_received += u64::from(len);
            self.settle(shared);
        }
    }

    pub(in crate::machine) fn cancel(&mut self, op: OpId, shared: &mut Shared<'_>) -> Cancel {
        let open = self.recvs.range(self.matched..).position(|r| r.op == op);
        let Some(open) = open else {
            return Cancel::TooLate;
        };
        let at = self.matched + open;
        if open < self.live {
            if !std::mem::replace(&mut self.recvs[at].canceled, true) {
                self.canceled += 1;
            }
            if self.retract == Retract::No {
                self.retract = Retract::Wanted;
            }
            return Cancel::Pending;
        }
        self.remove(at, shared);
        Cancel::Done
    }

    /// Cancel an open receive.
    fn remove(&mut self, at: usize, shared: &mut Shared<'_>) {
        if let Some(recv) = self.recvs.remove(at) {
            shared.complete(recv.op, 0, Outcome::Canceled);
        }
    }

    pub(in crate::machine) fn on_retracted(
        &mut self,
        seq: u64,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        if self.retract != Retract::Sent {
            return Err(Violation::Unexpected);
        }
        if seq != self.arrived {
            return Err(Violation::Order);
        }
        self.retract = Retract::No;
        self.live = 0;
        while self.canceled != 0 {
            let Some(at) = self.recvs.iter().position(|recv| recv.canceled) else {
                break;
            };
            self.canceled -= 1;
            self.remove(at, shared);
        }
        Ok(())
    }

    pub(in crate::machine) fn on_fin(&mut self, shared: &mut Shared<'_>) -> Result<(), Violation> {
        if std::mem::replace(&mut self.fin, true) {
            return Err(Violation::AfterFin);
        }
        self.settle(shared);
        Ok(())
    }

    /// Report the complete receives, in order.
    fn settle(&mut self, shared: &mut Shared<'_>) {
        while let Some(head) = self.recvs.front() {
            match head.state {
                State::Done {
                    len,
                    truncated,
                    in_place,
                    source,
                } => {
                    self.read.extend(source.map(|index| (index, len)));
                    let outcome = if truncated {
                        Outcome::Truncated
                    } else {
                        Outcome::Done
                    };
                    let end = ended(head.op, len.into(), outcome, in_place);
                    shared.done.push_back(end);
                    self.matched -= 1;
                    self.acted -= 1;
                }
                State::Open if self.fin => {
                    shared.complete(head.op, 0, Outcome::Eof);
                    self.live = 0;
                    self.canceled = 0;
                    if self.retract == Retract::Wanted {
                        self.retract = Retract::No;
                    }
                }
                _ => break,
            }
            self.recvs.pop_front();
        }
    }

    /// Process the next message that has a receive.
    pub(in crate::machine) fn deliver(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        while self.acted < self.matched {
            let recv = self.recvs.get_mut(self.acted)?;
            let State::Matched(arrival) = recv.state else {
                return None;
            };
            self.acted += 1;
            let op = recv.op;
            let mut action = None;
            match arrival {
                Arrival::Placed { len, truncated } => {
                    recv.state = State::done(len, truncated, None);
                }
                Arrival::Small { buffer, len } if recv.in_place && u64::from(len) <= recv.len => {
                    recv.state = State::Done {
                        len,
                        truncated: false,
                        in_place: Some(InPlace { buffer, off: 0 }),
                        source: None,
                    };
                }
                Arrival::Small { buffer, len } => {
                    let placed = recv.len.min(len.into()) as u32;
                    recv.state = State::done(placed, placed < len, None);
                    action = (placed != 0).then_some(Action::CopySmall {
                        op,
                        off: 0,
                        buffer,
                        buf_off: 0,
                        len: placed,
                    });
                    shared.repost(buffer);
                }
                Arrival::Source(source) => {
                    let len = recv.len.min(source.len.into()) as u32;
                    let truncated = len < source.len;
                    if len == 0 {
                        recv.state = State::done(len, truncated, Some(source.index));
                    } else {
                        recv.state = State::Reading {
                            index: source.index,
                            len,
                            truncated,
                        };
                        action = Some(Action::Read {
                            op,
                            len,
                            addr: source.addr,
                            rkey: source.rkey,
                        });
                    }
                }
            }
            self.settle(shared);
            if action.is_some() {
                return action;
            }
        }
        None
    }

    pub(in crate::machine) fn control(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        if self.retract == Retract::Wanted {
            let action = shared.send(Body::Retract)?;
            self.retract = Retract::Sent;
            shared.stats.retracts += 1;
            return Some(action);
        }
        if let Some(&(index, len)) = self.read.front() {
            let action = shared.send(Body::SourceDone { index, len })?;
            self.read.pop_front();
            self.sources -= 1;
            return Some(action);
        }
        let next = self.matched + self.live;
        if self.design != Design::Advert
            || self.fin
            || self.retract == Retract::Sent
            || self.live == MAX_ADVERTS
            || next >= self.recvs.len()
        {
            return None;
        }
        let credits = shared.credit()?;
        let index = self.arrived + self.live as u64;
        self.live += 1;
        shared.stats.adverts_sent += 1;
        let recv = &self.recvs[next];
        Some(Action::AdvertisePacket {
            op: recv.op,
            index,
            len: recv.len.min(MAX_TRANSFER.into()) as u32,
            credits,
        })
    }

    pub(in crate::machine) fn readable(&self) -> u64 {
        self.waiting.len() as u64
    }

    pub(in crate::machine) fn available(&self) -> u64 {
        self.waiting.front().map_or(0, |first| match *first {
            Arrival::Small { len, .. } | Arrival::Placed { len, .. } => len.into(),
            Arrival::Source(packet) => packet.len.into(),
        })
    }

    pub(in crate::machine) fn eof(&self) -> bool {
        self.fin
    }

    pub(in crate::machine) fn is_idle(&self) -> bool {
        self.recvs.is_empty()
    }
}
