//! The half that sends messages.

use std::collections::VecDeque;

use weft_wire::exs::{Body, Design, Imm, Packet, Transfer};

use crate::machine::sends::Sends;
use crate::machine::{
    Action, Config, MAX_ADVERTS, MAX_TRANSFER, OpId, Refused, Shared, Stats, Violation,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::machine) struct Sender {
    pub(in crate::machine) sends: Sends,
    design: Design,
    /// The number of the next message.
    index: u64,
    /// Adverts for this message and those after it, without a gap.
    adverts: VecDeque<Packet>,
    /// Messages announced for the peer to read.
    sources: VecDeque<Source>,
    small: u64,
    /// The peer waits for a [`Body::Retracted`].
    retracted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Source {
    op: OpId,
    index: u64,
    len: u32,
}

impl Sender {
    pub(in crate::machine) fn new(config: &Config, design: Design) -> Self {
        Sender {
            sends: Sends::default(),
            design,
            index: 0,
            adverts: VecDeque::new(),
            sources: VecDeque::new(),
            small: config.small_send.into(),
            retracted: false,
        }
    }

    pub(in crate::machine) fn send(&mut self, op: OpId, len: u64) -> Result<(), Refused> {
        if self.sends.is_shut() {
            return Err(Refused::Shutdown);
        }
        if len > MAX_TRANSFER.into() {
            return Err(Refused::TooLong);
        }
        self.sends.push(op, len);
        Ok(())
    }

    /// The shortcut, see [`Endpoint::send_now`](crate::machine::Endpoint::send_now). Returns the credits for the message.
    pub(in crate::machine) fn send_now(
        &mut self,
        len: u64,
        shared: &mut Shared<'_>,
    ) -> Option<u16> {
        if !self.sends.is_idle() || self.sends.is_shut() || self.retracted {
            return None;
        }
        let credits = self.take_small(len, shared)?;
        shared.stats.sent(false);
        Some(credits)
    }

    /// True if [`poll`](Self::poll) has nothing to do.
    pub(in crate::machine) fn is_still(&self) -> bool {
        self.sends.is_still() && !self.retracted
    }

    pub(in crate::machine) fn on_advert(
        &mut self,
        advert: Packet,
        stats: &mut Stats,
    ) -> Result<(), Violation> {
        if self.design != Design::Advert {
            return Err(Violation::Unexpected);
        }
        if advert.addr.checked_add(advert.len.into()).is_none() {
            return Err(Violation::Memory);
        }
        stats.adverts_received += 1;
        let next = self.index + self.adverts.len() as u64;
        // The advert is for a message that was sent as a Small meanwhile.
        let stale = self.adverts.is_empty() && advert.index < next;
        if stale || self.sends.is_finished() {
            stats.adverts_dropped += 1;
            return Ok(());
        }
        if advert.index != next {
            return Err(Violation::Order);
        }
        if self.adverts.len() == MAX_ADVERTS {
            return Err(Violation::TooMany);
        }
        self.adverts.push_back(advert);
        Ok(())
    }

    pub(in crate::machine) fn on_retract(&mut self, stats: &mut Stats) -> Result<(), Violation> {
        if self.retracted || self.design != Design::Advert {
            return Err(Violation::Unexpected);
        }
        stats.adverts_dropped += self.adverts.len() as u64;
        self.adverts.clear();
        self.retracted = true;
        Ok(())
    }

    pub(in crate::machine) fn on_source_done(
        &mut self,
        index: u64,
        len: u32,
        shared: &mut Shared<'_>,
    ) -> Result<(), Violation> {
        let source = self.sources.front().ok_or(Violation::Unexpected)?;
        if source.index != index {
            return Err(Violation::Order);
        }
        if len > source.len {
            return Err(Violation::Length);
        }
        if let Some(source) = self.sources.pop_front() {
            self.sends.transferred(source.op);
        }
        self.sends.complete(shared.done);
        Ok(())
    }

    pub(in crate::machine) fn poll(&mut self, shared: &mut Shared<'_>) -> Option<Action> {
        if self.retracted {
            let action = shared.send(Body::Retracted { seq: self.index })?;
            self.retracted = false;
            return Some(action);
        }
        if let Some(send) = self.sends.head() {
            let (op, len) = (send.op, send.len as u32);
            return self.small(op, len, shared).or_else(|| match self.design {
                Design::Advert => self.write(op, len, shared),
                Design::Source => self.source(op, len, shared),
            });
        }
        if self.sends.wants_fin() {
            let action = shared.send(Body::Fin)?;
            self.sends.fin_sent();
            shared.stats.adverts_dropped += self.adverts.len() as u64;
            self.adverts.clear();
            return Some(action);
        }
        None
    }

    /// The next message is sent with its payload. Returns the credits for it.
    fn take_small(&mut self, len: u64, shared: &mut Shared<'_>) -> Option<u16> {
        if len > self.small {
            return None;
        }
        let credits = shared.credits.take_small()?;
        self.index += 1;
        // The message is sent as a Small instead.
        if self.adverts.pop_front().is_some() {
            shared.stats.adverts_dropped += 1;
        }
        shared.stats.small_sent += 1;
        shared.stats.small_bytes_sent += len;
        Some(credits)
    }

    fn small(&mut self, op: OpId, len: u32, shared: &mut Shared<'_>) -> Option<Action> {
        let credits = self.take_small(len.into(), shared)?;
        let sends = &mut self.sends;
        Some(sends.hand_over_small((op, 0), len, credits, shared.stats))
    }

    fn write(&mut self, op: OpId, len: u32, shared: &mut Shared<'_>) -> Option<Action> {
        let advert = *self.adverts.front()?;
        let credits = shared.credit()?;
        self.adverts.pop_front();
        self.index += 1;
        let placed = len.min(advert.len);
        shared.stats.direct_sent += 1;
        shared.stats.direct_bytes_sent += u64::from(placed);
        self.sends.hand_over(len.into(), true, shared.stats);
        Some(Action::Write {
            op,
            off: 0,
            len: placed,
            addr: advert.addr,
            rkey: advert.rkey,
            imm: Imm {
                transfer: Transfer::Packet {
                    truncated: placed < len,
                },
                credits,
                len: placed,
            },
            last: true,
        })
    }

    fn source(&mut self, op: OpId, len: u32, shared: &mut Shared<'_>) -> Option<Action> {
        if self.sources.len() == MAX_ADVERTS {
            return None;
        }
        let credits = shared.credit()?;
        let index = self.index;
        self.index += 1;
        self.sources.push_back(Source { op, index, len });
        self.sends.hand_over(len.into(), true, shared.stats);
        shared.stats.adverts_sent += 1;
        shared.stats.direct_sent += 1;
        shared.stats.direct_bytes_sent += u64::from(len);
        Some(Action::AdvertiseSource {
            op,
            index,
            len,
            credits,
        })
    }
}
