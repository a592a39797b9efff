//! The receiving half of the reliable mode: the flows from all other queue pairs to one (docs/spec/dgram.md, "Reliable mode").
//!
//! Segments come from any host that can send a datagram. So there is no state for a sender before it has shown, by a cookie, that it receives
//! datagrams at its address; a cookie is computed, not stored. No answer is longer than the datagram that it answers.
//!
//! **At most once.** A flow is forgotten after [`FlowsConfig::idle`] without a segment. Its cookie was issued before its first segment, and is valid
//! for beginning a flow within half of that time only: so segments that the network has delayed for long do not begin a forgotten flow again. A flow
//! replaces an older one of the same queue pair if its cookie is younger; the older one's segments are refused from then on.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use weft_wire::dgram::{Control, FaultCode, Flow, Segment};

use super::reassembly::host;
use super::window::{Arrival, Incoming, Now};

/// Limits of [`Flows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowsConfig {
    /// Flows at once. For one more, one that was not heard for [`FlowsConfig::idle`] is forgotten, or the new one does not begin.
    pub max_flows: usize,
    /// The same for one host (an IPv4 address, an IPv6 network of 64 bits).
    pub max_flows_per_host: usize,
    /// Bytes of early segments that are kept, of all flows. Further ones are dropped, and retransmitted.
    pub max_kept: usize,
    /// The same for one flow.
    pub max_kept_per_flow: usize,
    /// A flow that is not heard for so long is forgotten.
    pub idle: Duration,
    /// A message that has not grown for so long gives its receive to another flow that needs one.
    pub stall: Duration,
}

impl Default for FlowsConfig {
    fn default() -> Self {
        FlowsConfig {
            max_flows: 16_384,
            max_flows_per_host: 12_288,
            max_kept: 16 << 20,
            max_kept_per_flow: 4 << 20,
            idle: Duration::from_mins(1),
            stall: Duration::from_secs(5),
        }
    }
}

/// The sender of a flow: address and UDP port, and its queue pair.
type Key = (SocketAddr, u32);

/// An early segment with its payload, in the caller's form.
struct Kept<K> {
    segment: Segment,
    payload: u32,
    held: usize,
    what: K,
}

struct Open<B> {
    header: Segment,
    filled: u32,
    buffer: B,
}

struct Known<B, K> {
    dst_qp: u32,
    incarnation: u32,
    cookie: u64,
    incoming: Incoming<Kept<K>>,
    /// Bytes that are kept.
    held: usize,
    open: Option<Open<B>>,
    /// The number of the last message that has begun.
    msn: u32,
    heard: Now,
    /// When the last segment came that was placed, or that brought those behind it to their places.
    progressed: Now,
    /// The local address at which it arrives.
    via: IpAddr,
    /// It is over: why, and which packet and message was refused.
    dead: Option<(FaultCode, u32, u32)>,
    /// The expected packet found no receive: it, and its message.
    starved: Option<(u32, u32)>,
    /// In which list it belongs then.
    lacks: usize,
    /// It is in a list of starving flows.
    listed: bool,
    /// It gets an answer.
    due: bool,
}

/// The treatment of a segment.
#[derive(Debug, PartialEq, Eq)]
pub enum Admit {
    /// It is next: place it, and say so with [`Flows::placed`]; or say why not, with [`Flows::starve`] or [`Flows::refuse`].
    Next(Spot),
    /// It was dropped, or kept.
    Done,
}

/// The result of resuming a stalled flow.
#[derive(Debug, PartialEq, Eq)]
pub enum Resumed<K> {
    /// No flow is stalled for this reason.
    Nobody,
    /// It continues with this segment: treat it as [`Admit::Next`], and then call [`Flows::resumed`].
    Segment(Spot, K),
    /// Its segment was not kept: its sender is told to retransmit it.
    Told,
}

/// An admitted segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    key: Key,
    segment: Segment,
    payload: u32,
}

impl Spot {
    /// It is the first segment of its message: the buffer has to be found.
    pub fn opens(&self) -> bool {
        self.segment.offset == 0
    }

    /// Bytes of its payload.
    pub fn payload(&self) -> u32 {
        self.payload
    }

    /// Its header.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Its sender: address and UDP port.
    pub fn from(&self) -> SocketAddr {
        self.key.0
    }
}

/// A message that is whole, or will never be.
#[derive(Debug, PartialEq, Eq)]
pub struct Carried<B> {
    /// Its sender: address and UDP port.
    pub from: SocketAddr,
    /// The header of its segments, with offset 0.
    pub header: Segment,
    /// So many bytes of it are there, from the first one on.
    pub filled: u32,
    /// The place of its bytes.
    pub buffer: B,
}

impl<B> Carried<B> {
    /// Whether it is complete.
    pub fn is_whole(&self) -> bool {
        self.filled == self.header.len
    }

    fn of(from: SocketAddr, open: Open<B>) -> Carried<B> {
        Carried {
            from,
            header: open.header,
            filled: open.filled,
            buffer: open.buffer,
        }
    }
}

/// The flows to one queue pair. `B` names the place of a message's bytes, `K` is a kept payload.
pub struct Flows<B, K> {
    config: FlowsConfig,
    keys: RandomState,
    known: HashMap<Key, Known<B, K>>,
    hosts: HashMap<u64, usize>,
    /// Bytes that are kept.
    held: usize,
    /// When flows were heard, at the latest at that time: those that were heard since are put in again.
    order: VecDeque<(Now, Key)>,
    /// Flows with a pending answer.
    due: Vec<Key>,
    /// Flows whose next message found no receive, and those that found no room for its record; the next to continue is first.
    starved: [VecDeque<Key>; 2],
    /// For flows that are not there.
    strays: Vec<Answer>,
    /// Messages of flows that are over.
    released: Vec<Carried<B>>,
    open: usize,
    /// The earliest time of the next check for stalled flows.
    next_look: Now,
}

/// A control datagram to this address, from this local one.
pub type Answer = (SocketAddr, IpAddr, Control);

/// Answers to flows that are not there, until they are taken.
const MAX_STRAYS: usize = 64;
/// The interval of checks for stalled flows.
const LOOK: Duration = Duration::from_millis(50);

impl<B, K> Flows<B, K> {
    /// `keys`: of this queue pair alone, so that its cookies are of no use elsewhere.
    pub fn new(config: FlowsConfig, keys: RandomState) -> Flows<B, K> {
        Flows {
            config,
            keys,
            known: HashMap::new(),
            hosts: HashMap::new(),
            held: 0,
            order: VecDeque::new(),
            due: Vec::new(),
            starved: Default::default(),
            strays: Vec::new(),
            released: Vec::new(),
            open: 0,
            next_look: Duration::ZERO,
        }
    }

    /// Flows that are known.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there are no flows.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Bytes of early segments that are kept.
    pub fn held(&self) -> usize {
        self.held
    }

    /// The answer to a [`Control::Hello`] that this address sent: nothing is remembered of it. `flow` is the question's.
    pub fn welcome(&self, now: Now, from: SocketAddr, flow: &Flow) -> Control {
        let mut issued = millis(now);
        if let Some(known) = self.known.get(&(from, flow.src_qp))
            && known.incarnation != flow.incarnation
            && !self.is_younger(now, issued, known.cookie)
        {
            issued = issue_of(known.cookie).wrapping_add(1);
        }
        Control::Welcome {
            flow: Flow {
                dst_qp: flow.src_qp,
                src_qp: flow.dst_qp,
                incarnation: flow.incarnation,
            },
            cookie: self.cookie(from, flow.src_qp, flow.dst_qp, flow.incarnation, issued),
        }
    }

    fn cookie(
        &self,
        from: SocketAddr,
        src_qp: u32,
        dst_qp: u32,
        incarnation: u32,
        issued: u32,
    ) -> u64 {
        let proof = self
            .keys
            .hash_one((from, src_qp, dst_qp, incarnation, issued));
        u64::from(issued) << 32 | proof & u64::from(u32::MAX)
    }

    /// Decides the treatment of a segment of the reliable mode with `payload` bytes, which [`weft_wire::dgram::read`] has found to be within its message.
    /// `keep` creates a payload that can be kept, and returns how many bytes it takes. `via`: our address at which it arrived.
    pub fn admit(
        &mut self,
        now: Now,
        from: SocketAddr,
        via: IpAddr,
        segment: &Segment,
        payload: usize,
        keep: impl FnOnce() -> (K, usize),
    ) -> Admit {
        let (Some(packet), Ok(payload)) = (segment.reliable, u32::try_from(payload)) else {
            return Admit::Done;
        };
        let key = (from, segment.src_qp);
        let same = (packet.cookie, segment.incarnation);
        // One lookup for each segment that continues a known flow: the hash is keyed, because strangers choose the key.
        let known = match self.known.get_mut(&key) {
            Some(known) if (known.cookie, known.incarnation) == same => known,
            _ => {
                let begins = self.begins(now, from, via, segment, packet.cookie);
                match self.known.get_mut(&key).filter(|_| begins) {
                    Some(known) => known,
                    None => return Admit::Done,
                }
            }
        };
        known.heard = now;
        known.via = via;
        if !std::mem::replace(&mut known.due, true) {
            self.due.push(key);
        }
        if known.dead.is_some() {
            return Admit::Done;
        }
        match known.incoming.arrived(packet.psn) {
            Arrival::Next => {
                // Kept when there was no receive: now there may be one.
                if let Some(kept) = known.incoming.kept() {
                    known.held -= kept.held;
                    self.held -= kept.held;
                }
                if known.continues(segment, payload) {
                    let segment = *segment;
                    return Admit::Next(Spot {
                        key,
                        segment,
                        payload,
                    });
                }
                self.contradicts(key, segment, payload);
                Admit::Done
            }
            Arrival::Early => {
                self.keep(key, segment, payload, keep);
                Admit::Done
            }
            Arrival::Refused => Admit::Done,
        }
    }

    /// Whether a segment that does not belong to its sender's known flow, if there is one, begins another.
    fn begins(
        &mut self,
        now: Now,
        from: SocketAddr,
        via: IpAddr,
        segment: &Segment,
        cookie: u64,
    ) -> bool {
        let &Segment {
            src_qp,
            dst_qp,
            incarnation,
            ..
        } = segment;
        let key = (from, src_qp);
        let older = self.known.get(&key).map(|known| known.cookie);
        let issued = issue_of(cookie);
        let fresh = self.is_fresh(now, issued)
            && self.cookie(from, src_qp, dst_qp, incarnation, issued) == cookie
            && older.is_none_or(|older| self.is_younger(now, issued, older));
        if !fresh {
            self.stray(from, via, segment);
            return false;
        }
        if let Some(known) = self.known.get_mut(&key) {
            let old = std::mem::replace(known, Known::new(dst_qp, incarnation, cookie, via));
            (known.due, known.listed) = (old.due, old.listed);
            self.over(from, old);
            return true;
        }
        let host = host(from.ip());
        self.expire(now);
        let of_host = self.hosts.get(&host).copied().unwrap_or(0);
        if self.known.len() >= self.config.max_flows || of_host >= self.config.max_flows_per_host {
            // No answer: the sender asks again, and there may be room then.
            return false;
        }
        self.hosts.insert(host, of_host + 1);
        let known = Known::new(dst_qp, incarnation, cookie, via);
        self.known.insert(key, known);
        self.order.push_back((now, key));
        true
    }

    /// Whether a flow may begin with a cookie that was made at `issued`.
    fn is_fresh(&self, now: Now, issued: u32) -> bool {
        let age = i64::from(millis(now).wrapping_sub(issued).cast_signed());
        let most = (self.config.idle / 2).as_millis() as i64;
        // The time in a cookie may be a little ahead: two flows never have the same.
        (-1000..=most).contains(&age)
    }

    /// Whether a fresh cookie is younger than that of a known flow. The times alone are not sufficient: they wrap, and a flow may be weeks old.
    fn is_younger(&self, now: Now, issued: u32, older: u64) -> bool {
        let older = issue_of(older);
        !self.is_fresh(now, older) || is_after(issued, older)
    }

    fn stray(&mut self, from: SocketAddr, via: IpAddr, segment: &Segment) {
        if self.strays.len() < MAX_STRAYS {
            let control = Control::Fault {
                flow: Flow {
                    dst_qp: segment.src_qp,
                    src_qp: segment.dst_qp,
                    incarnation: segment.incarnation,
                },
                code: FaultCode::Unknown,
                psn: segment.reliable.map_or(0, |packet| packet.psn),
                msn: segment.msn,
            };
            self.strays.push((from, via, control));
        }
    }

    fn over(&mut self, from: SocketAddr, mut known: Known<B, K>) {
        self.held -= known.held;
        if let Some(open) = known.open.take() {
            self.open -= 1;
            self.released.push(Carried::of(from, open));
        }
    }

    fn keep(
        &mut self,
        key: Key,
        segment: &Segment,
        payload: u32,
        keep: impl FnOnce() -> (K, usize),
    ) {
        let (Some(known), Some(packet)) = (self.known.get_mut(&key), segment.reliable) else {
            return;
        };
        // The minimum space: without room for it, nothing is copied.
        let least = payload as usize;
        if self.held + least > self.config.max_kept
            || known.held + least > self.config.max_kept_per_flow
        {
            return;
        }
        let (what, held) = keep();
        known.held += held;
        self.held += held;
        let kept = Kept {
            segment: *segment,
            payload,
            held,
            what,
        };
        if let Some(old) = known.incoming.keep(packet.psn, kept) {
            known.held -= old.held;
            self.held -= old.held;
        }
    }

    /// The expected packet of a flow does not continue the previous one: the flow ends.
    fn contradicts(&mut self, key: Key, segment: &Segment, payload: u32) {
        let spot = Spot {
            key,
            segment: *segment,
            payload,
        };
        let open = self.refuse(&spot, FaultCode::Operation);
        self.released.extend(open);
    }

    /// The place of the message of a segment that does not [open](Spot::opens) one.
    pub fn buffer(&self, spot: &Spot) -> Option<&B> {
        let open = self.known.get(&spot.key)?.open.as_ref()?;
        Some(&open.buffer)
    }

    /// The payload of an admitted segment is in its place. `buffer`: of a message that this segment opens. The message, if it is whole.
    pub fn placed(&mut self, spot: &Spot, buffer: Option<B>) -> Option<Carried<B>> {
        let known = self.known.get_mut(&spot.key)?;
        known.incoming.advance();
        known.starved = None;
        known.progressed = known.heard;
        if let Some(buffer) = buffer {
            let header = Segment {
                offset: 0,
                reliable: None,
                ..spot.segment
            };
            known.msn = header.msn;
            let filled = 0;
            known.open = Some(Open {
                header,
                filled,
                buffer,
            });
            self.open += 1;
        }
        let open = known.open.as_mut()?;
        open.filled += spot.payload;
        if open.filled < open.header.len {
            return None;
        }
        let open = known.open.take()?;
        self.open -= 1;
        Some(Carried::of(spot.key.0, open))
    }

    /// There is no receive for the message of an admitted segment, or no room for its record: the flow is stalled until [`Flows::resume`], or until its
    /// sender retries. `keep` as for [`Flows::admit`].
    pub fn starve(&mut self, spot: &Spot, keep: impl FnOnce() -> (K, usize)) {
        self.keep(spot.key, &spot.segment, spot.payload, keep);
        if let (Some(known), Some(packet)) = (self.known.get_mut(&spot.key), spot.segment.reliable)
        {
            known.starved = Some((packet.psn, spot.segment.msn));
            known.lacks = usize::from(spot.segment.target.is_some());
            if !std::mem::replace(&mut known.listed, true) {
                self.starved[known.lacks].push_back(spot.key);
            }
        }
    }

    /// The message of an admitted segment can never be received: the flow ends. Returns the received part of the message, if it was open.
    pub fn refuse(&mut self, spot: &Spot, code: FaultCode) -> Option<Carried<B>> {
        let known = self.known.get_mut(&spot.key)?;
        let psn = spot.segment.reliable.map_or(0, |packet| packet.psn);
        known.dead = Some((code, psn, spot.segment.msn));
        self.end(spot.key)
    }

    /// A flow that is dead keeps nothing.
    fn end(&mut self, key: Key) -> Option<Carried<B>> {
        let known = self.known.get_mut(&key)?;
        known.incoming.clear().for_each(drop);
        self.held -= std::mem::take(&mut known.held);
        let open = known.open.take()?;
        self.open -= 1;
        Some(Carried::of(key.0, open))
    }

    /// The segment behind the one that was placed, if it has come already.
    pub fn next_kept(&mut self, spot: &Spot) -> Option<(Spot, K)> {
        self.kept_of(spot.key)
    }

    fn kept_of(&mut self, key: Key) -> Option<(Spot, K)> {
        let known = self.known.get_mut(&key)?;
        let kept = known.incoming.kept()?;
        known.held -= kept.held;
        self.held -= kept.held;
        let (segment, payload) = (kept.segment, kept.payload);
        if !known.continues(&segment, payload) {
            self.contradicts(key, &segment, payload);
            return None;
        }
        let spot = Spot {
            key,
            segment,
            payload,
        };
        Some((spot, kept.what))
    }

    /// Whether a flow is stalled for want of a receive.
    pub fn is_starving(&self) -> bool {
        self.starved.iter().any(|list| !list.is_empty())
    }

    /// There may be a receive now, or, with `records`, room for a record. Resumes the stalled flow that has waited longest; the others stay stalled until the
    /// next call.
    pub fn resume(&mut self, records: bool) -> Resumed<K> {
        let list = usize::from(records);
        while let Some(&key) = self.starved[list].front() {
            let stands_still = self.known.get(&key).is_some_and(Known::stands_still);
            if stands_still && let Some((spot, what)) = self.kept_of(key) {
                return Resumed::Segment(spot, what);
            }
            self.starved[list].pop_front();
            if let Some(known) = self.known.get_mut(&key) {
                known.listed = false;
                if stands_still {
                    known.starved = None;
                    self.answer(key);
                    return Resumed::Told;
                }
            }
        }
        Resumed::Nobody
    }

    /// The segment from [`Flows::resume`] was received as far as possible, with the following ones. `false`: its flow is stalled for the same reason again, and
    /// the others would be. If it has made no progress, it stays the next, and its sender, which knows that, is not told.
    pub fn resumed(&mut self, records: bool, spot: &Spot) -> bool {
        let Some(known) = self.known.get_mut(&spot.key) else {
            return false;
        };
        let list = usize::from(records);
        let stands_still = known.stands_still();
        let same = stands_still && known.lacks == list;
        let packet = spot.segment.reliable.map(|packet| packet.psn);
        let went_on = !stands_still || known.starved.map(|(psn, _)| psn) != packet;
        if same && !went_on {
            return false;
        }
        self.starved[list].pop_front_if(|key| *key == spot.key);
        known.listed = stands_still;
        if stands_still {
            self.starved[known.lacks].push_back(spot.key);
        }
        if went_on {
            self.answer(spot.key);
        }
        !same
    }

    /// A flow gets an answer.
    fn answer(&mut self, key: Key) {
        if let Some(known) = self.known.get_mut(&key)
            && !std::mem::replace(&mut known.due, true)
        {
            self.due.push(key);
        }
    }

    /// Acknowledgements and faults to be sent now: at most one for each flow.
    pub fn answers(&mut self) -> Vec<Answer> {
        let mut answers = std::mem::take(&mut self.strays);
        for key in std::mem::take(&mut self.due) {
            // A flow that was forgotten and has begun again is in the list twice.
            let Some(known) = self.known.get_mut(&key).filter(|known| known.due) else {
                continue;
            };
            known.due = false;
            let flow = Flow {
                dst_qp: key.1,
                src_qp: known.dst_qp,
                incarnation: known.incarnation,
            };
            let not_ready = known
                .starved
                .map(|(psn, msn)| (FaultCode::NotReady, psn, msn));
            let control = match known.dead.or(not_ready) {
                Some((code, psn, msn)) => Control::Fault {
                    flow,
                    code,
                    psn,
                    msn,
                },
                None => Control::Ack {
                    flow,
                    psn: known.incoming.expected(),
                    sack: known.incoming.sack(),
                },
            };
            answers.push((key.0, known.via, control));
        }
        answers
    }

    /// Whether [`Flows::answers`] has any.
    pub fn has_answers(&self) -> bool {
        !self.due.is_empty() || !self.strays.is_empty()
    }

    /// Messages that will never be whole: those of flows that were forgotten, replaced, or contradicted themselves.
    pub fn released(&mut self) -> Vec<Carried<B>> {
        std::mem::take(&mut self.released)
    }

    /// Takes a stalled message, to give its buffer to another one: its flow ends.
    pub fn evict(&mut self, now: Now, suits: impl Fn(&B) -> bool) -> Option<Carried<B>> {
        if self.open == 0 || now < self.next_look {
            return None;
        }
        let stall = self.config.stall;
        let mut found = None;
        for (key, known) in &self.known {
            if let Some(open) = &known.open
                && known.progressed + stall <= now
                && suits(&open.buffer)
            {
                found = Some((*key, known.incoming.expected(), open.header.msn));
                break;
            }
        }
        let Some((key, psn, msn)) = found else {
            // All flows are looked at for this: not for each segment of a flood.
            self.next_look = now + LOOK;
            return None;
        };
        if let Some(known) = self.known.get_mut(&key) {
            known.dead = Some((FaultCode::Unknown, psn, msn));
        }
        self.end(key)
    }

    /// Forgets flows without a segment for a long time; [`Flows::released`] returns their buffers.
    pub fn expire(&mut self, now: Now) {
        while let Some((at, key)) = self
            .order
            .pop_front_if(|(at, _)| *at + self.config.idle <= now)
        {
            let Some(known) = self.known.get(&key) else {
                continue;
            };
            if known.heard + self.config.idle > now {
                self.order.push_back((known.heard.max(at), key));
                continue;
            }
            if let Some(known) = self.known.remove(&key) {
                if known.listed {
                    for list in &mut self.starved {
                        list.retain(|starved| *starved != key);
                    }
                }
                self.over(key.0, known);
            }
            let host = host(key.0.ip());
            if let Some(count) = self.hosts.get_mut(&host) {
                *count -= 1;
                if *count == 0 {
                    self.hosts.remove(&host);
                }
            }
        }
    }

    /// When [`Flows::expire`] has something to do.
    pub fn next_time(&self) -> Option<Now> {
        self.order.front().map(|(at, _)| *at + self.config.idle)
    }

    /// Forgets everything, and gives the messages out that are open.
    pub fn clear(&mut self) -> Vec<Carried<B>> {
        let mut messages = self.released();
        let known = std::mem::take(&mut self.known).into_iter();
        let open = known.filter_map(|(key, known)| Some(Carried::of(key.0, known.open?)));
        messages.extend(open);
        self.hosts.clear();
        self.order.clear();
        self.due.clear();
        self.starved = Default::default();
        self.strays.clear();
        (self.held, self.open) = (0, 0);
        messages
    }
}

impl<B, K> Known<B, K> {
    fn new(dst_qp: u32, incarnation: u32, cookie: u64, via: IpAddr) -> Known<B, K> {
        Known {
            dst_qp,
            incarnation,
            cookie,
            incoming: Incoming::default(),
            held: 0,
            open: None,
            msn: 0,
            heard: Duration::ZERO,
            progressed: Duration::ZERO,
            via,
            dead: None,
            starved: None,
            lacks: 0,
            listed: false,
            due: false,
        }
    }

    /// Whether the expected packet continues the previous one.
    fn continues(&self, segment: &Segment, payload: u32) -> bool {
        let continues = match &self.open {
            Some(open) => {
                segment.offset == open.filled
                    && Segment {
                        offset: 0,
                        reliable: None,
                        ..*segment
                    } == open.header
            }
            None => segment.offset == 0 && segment.msn == self.msn.wrapping_add(1),
        };
        let end = segment.offset.checked_add(payload);
        let fits = end.is_some_and(|end| end <= segment.len) && (payload > 0 || segment.len == 0);
        continues && fits
    }

    fn stands_still(&self) -> bool {
        self.starved.is_some() && self.dead.is_none()
    }
}

/// The part of a time that a cookie has.
fn millis(now: Now) -> u32 {
    now.as_millis() as u32
}

/// When a cookie was made.
fn issue_of(cookie: u64) -> u32 {
    (cookie >> 32) as u32
}

fn is_after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}
