//! The protocol of an endpoint, without I/O and clock.
//!
//! A call reports an event: a program posts a send ([`Machine::send`]) or a receive ([`Machine::recv`]), a packet arrived ([`Machine::packet`]), an RDMA
//! Write-Record arrived ([`Machine::record`]), time has passed ([`Machine::tick`]). The machine calls its [`Host`] for I/O, and returns packets by
//! [`Machine::transmit`], which has to be called after any of these until it returns none. Time never goes back.
//!
//! A small message travels in packets, and is complete for its sender when it was acknowledged. A large one waits at its sender: a request is sent, the
//! receiver opens the memory of the matching receive, the sender writes to it by RDMA Write-Record and reports when it has written everything. The
//! receiver requests only the bytes that the records do not cover again. The message is complete at both ends when all of it has arrived.

mod strangers;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

pub use crate::host::{Event, Host, Outbound, Part, PeerId, Refused, Want};
use crate::peer_stream::{Arrival, Now, PeerStream};
use crate::ranges::Ranges;
use crate::wire::{self, Body, FIRST, MAX_LACKS, MORE, Meta, Target};

/// Packets that may wait for one peer before sends are refused.
const MAX_PENDING: usize = 128;
/// Limit of messages, and bytes of them, from one peer without a posted receive.
const MAX_STORED: usize = 1 << 16;
const MAX_STORED_BYTES: usize = 1 << 28;
/// Peers in all.
const MAX_PEERS: usize = 1 << 14;
/// Bytes that do not arrive within this time after the sender has written everything are requested again. It is longer than a datagram queue pair
/// takes to drop a message.
const GRACE: Duration = Duration::from_millis(150);

struct Posted {
    recv: u64,
    want: Want,
    room: u64,
    /// It takes messages until its memory is used up.
    many: bool,
}

enum Stored {
    Whole(Vec<u8>),
    /// Its peer's message that is still coming.
    Coming,
    /// A large one, under this number of its sender.
    Request(u32),
}

struct Unexpected {
    peer: PeerId,
    meta: Meta,
    stored: Stored,
}

enum Sink {
    Recv { recv: u64, room: u64 },
    Store(Vec<u8>),
}

/// A small message that is coming.
struct Coming {
    meta: Meta,
    got: u64,
    sink: Sink,
}

struct Peer {
    link: PeerStream,
    coming: Option<Coming>,
    stored: usize,
    stored_bytes: usize,
    queued: bool,
    gone: bool,
    /// The program has named it; it is not known by its packets alone.
    named: bool,
    /// No numbered packets are sent to it now.
    held: bool,
    /// Messages of more bytes are large.
    threshold: u64,
    /// Packets for it may wait for company.
    gathers: bool,
}

impl Peer {
    fn new(key: u32, threshold: u64) -> Peer {
        Peer {
            threshold,
            link: PeerStream::new(key),
            coming: None,
            stored: 0,
            stored_bytes: 0,
            queued: false,
            gone: false,
            named: true,
            held: false,
            gathers: true,
        }
    }
}

struct Outgoing {
    send: u64,
    peer: PeerId,
    len: u64,
    target: Option<(Target, u64, u64)>,
    /// It is written reliably: the peer need not be told.
    sure: bool,
    /// Packets queued for the peer up to the last `Written`.
    said: u64,
}

struct Incoming {
    recv: u64,
    peer: PeerId,
    meta: Meta,
    their_id: u32,
    target: Target,
    len: u64,
    have: Ranges,
    /// After the sender has reported that it has written everything: the time to request missing bytes.
    ask_at: Option<Now>,
}

/// See the [module](self).
pub struct Machine {
    key: u32,
    threshold: u64,
    peers: Vec<Peer>,
    posted: VecDeque<Posted>,
    unexpected: VecDeque<Unexpected>,
    claimed: HashMap<u64, Unexpected>,
    outgoing: HashMap<u32, Outgoing>,
    incoming: HashMap<u64, Incoming>,
    next_out: u32,
    next_in: u64,
    /// Peers that may have something to send.
    ready: VecDeque<PeerId>,
    scratch: Vec<u8>,
    /// Bytes asked for again, for statistics.
    asked_again: u64,
    /// The number of peers that the program has not named, and those of them that have ended, in that order.
    strangers: usize,
    gone_strangers: VecDeque<PeerId>,
    silent: Vec<PeerId>,
}

impl Machine {
    /// Messages of more than `threshold` bytes are written by RDMA Write-Record.
    pub fn new(key: u32, threshold: u64) -> Machine {
        Machine {
            key,
            threshold,
            peers: Vec::new(),
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            claimed: HashMap::new(),
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            next_out: 1,
            next_in: 1,
            ready: VecDeque::new(),
            scratch: Vec::new(),
            asked_again: 0,
            strangers: 0,
            gone_strangers: VecDeque::new(),
            silent: Vec::new(),
        }
    }

    /// Messages of more bytes to this peer are large.
    pub fn threshold(&self, peer: PeerId) -> u64 {
        self.peers[peer].threshold
    }

    /// From now on messages of more bytes to this peer are large, and packets do not wait for company; `None`: as at first.
    pub fn set_threshold(&mut self, peer: PeerId, bytes: Option<u64>) {
        self.peers[peer].threshold = bytes.unwrap_or(self.threshold);
        self.peers[peer].gathers = bytes.is_none();
    }

    /// One more peer.
    ///
    /// # Errors
    /// [`Refused::TooMany`].
    pub fn add_peer(&mut self) -> Result<PeerId, Refused> {
        if self.peers.len() >= MAX_PEERS {
            return Err(Refused::TooMany);
        }
        self.peers.push(Peer::new(self.key, self.threshold));
        Ok(self.peers.len() - 1)
    }

    /// Stops numbered packets to a peer, or allows them again.
    pub fn hold(&mut self, peer: PeerId, held: bool) {
        self.peers[peer].held = held;
        if !held {
            self.stir(peer);
        }
    }

    pub fn offer(&mut self, peer: PeerId, port: u16, token: u64) {
        self.push(peer, &Body::Offer { port, token });
    }

    /// Reliable writes to a peer may have failed: it has to request missing bytes.
    pub fn unsure(&mut self, peer: PeerId) {
        let sure = self.outgoing.iter_mut().filter_map(|(&id, o)| {
            let was = o.peer == peer && std::mem::take(&mut o.sure);
            o.target
                .filter(|_| was)
                .map(|(_, target_id, _)| (id, target_id))
        });
        let sure: Vec<_> = sure.collect();
        for (id, target_id) in sure {
            self.say_written(peer, id, target_id);
        }
    }

    /// A peer has written the whole of a large message reliably.
    pub fn placed(&mut self, host: &mut impl Host, peer: PeerId, id: u64) {
        let incoming = self.incoming.get(&id).filter(|i| i.peer == peer);
        if incoming.is_some() {
            self.fetched(host, id);
        }
    }

    /// Packets sent again, and bytes of large messages asked for again.
    pub fn repeated(&self) -> (u64, u64) {
        let resent = self.peers.iter().map(|peer| peer.link.resent()).sum();
        (resent, self.asked_again)
    }

    fn push(&mut self, peer: PeerId, body: &Body<'_>) {
        if self.peers[peer].gone {
            return;
        }
        self.peers[peer].link.push(wire::encode(body));
        self.stir(peer);
    }

    /// The peer may have something to send.
    fn stir(&mut self, peer: PeerId) {
        if !self.peers[peer].queued {
            self.peers[peer].queued = true;
            self.ready.push_back(peer);
        }
    }

    /// Sends a message. `read(at, buffer)` fills a buffer with the message's bytes from `at` on. With `synchronous` the send is complete when the peer has
    /// matched it, for any length.
    ///
    /// # Errors
    /// [`Refused`]; nothing was sent then.
    pub fn send(
        &mut self,
        host: &mut impl Host,
        send: u64,
        peer: PeerId,
        meta: Meta,
        synchronous: bool,
        mut read: impl FnMut(u64, &mut [u8]),
    ) -> Result<(), Refused> {
        let state = &self.peers[peer];
        if state.gone {
            return Err(Refused::Gone);
        }
        if state.link.pending() >= MAX_PENDING {
            return Err(Refused::Busy);
        }
        if synchronous || meta.len > state.threshold {
            let id = self.next_out;
            self.next_out = id.wrapping_add(1);
            let outgoing = Outgoing {
                send,
                peer,
                len: meta.len,
                target: None,
                sure: false,
                said: 0,
            };
            self.outgoing.insert(id, outgoing);
            self.push(peer, &Body::Request(meta, id));
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.scratch);
        let mut at = 0;
        loop {
            let most = if at == 0 { FIRST } else { MORE };
            let part = (meta.len - at).min(most as u64);
            buffer.resize(part as usize, 0);
            read(at, &mut buffer);
            if at == 0 {
                self.push(peer, &Body::Message(meta, &buffer));
            } else {
                self.push(peer, &Body::More(&buffer));
            }
            at += part;
            if at >= meta.len {
                break;
            }
        }
        self.scratch = buffer;
        host.event(Event::Sent(send));
        Ok(())
    }

    /// Posts a receive for a message of up to `room` bytes.
    pub fn recv(&mut self, host: &mut impl Host, recv: u64, want: Want, room: u64) {
        let found = self
            .unexpected
            .iter()
            .position(|u| want.takes(u.peer, &u.meta));
        match found.and_then(|index| self.unexpected.remove(index)) {
            Some(message) => self.give(host, message, recv, room),
            None => self.posted.push_back(Posted {
                recv,
                want,
                room,
                many: false,
            }),
        }
    }

    /// Posts a receive that takes one message after the other, until [`Host::carve`] says that its memory is used up. Each message completes as a receive
    /// of the number that `carve` gave.
    pub fn recv_many(&mut self, host: &mut impl Host, recv: u64, want: Want) {
        // One pass over what waits: giving one away does not bring another.
        let mut index = 0;
        while let Some(message) = self.unexpected.get(index) {
            if !want.takes(message.peer, &message.meta) {
                index += 1;
                continue;
            }
            let part = host.carve(recv, message.meta.len);
            if let Some(message) = self.unexpected.remove(index) {
                self.give(host, message, part.recv, part.room);
            }
            if part.last {
                return;
            }
        }
        self.posted.push_back(Posted {
            recv,
            want,
            room: 0,
            many: true,
        });
    }

    /// Whether an unexpected message matches such a receive. With `claim` it is reserved for [`Machine::recv_claimed`] with that number.
    pub fn peek(&mut self, want: &Want, claim: Option<u64>) -> Option<(PeerId, Meta)> {
        let index = self
            .unexpected
            .iter()
            .position(|u| want.takes(u.peer, &u.meta))?;
        let found = (self.unexpected[index].peer, self.unexpected[index].meta);
        if let Some(claim) = claim {
            let message = self.unexpected.remove(index)?;
            self.claimed.insert(claim, message);
        }
        Some(found)
    }

    /// Receives a message that was claimed; `false` if there is none of this number.
    pub fn recv_claimed(&mut self, host: &mut impl Host, claim: u64, recv: u64, room: u64) -> bool {
        let message = self.claimed.remove(&claim);
        let found = message.is_some();
        if let Some(message) = message {
            self.give(host, message, recv, room);
        }
        found
    }

    /// Takes a receive back; `false` if a message is already matched with it.
    pub fn cancel(&mut self, recv: u64) -> bool {
        let before = self.posted.len();
        self.posted.retain(|posted| posted.recv != recv);
        self.posted.len() < before
    }

    /// A stored message finds its receive.
    fn give(&mut self, host: &mut impl Host, message: Unexpected, recv: u64, room: u64) {
        let Unexpected { peer, meta, stored } = message;
        self.peers[peer].stored -= 1;
        match stored {
            Stored::Whole(bytes) => {
                self.peers[peer].stored_bytes -= bytes.len();
                let fits = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                host.place(recv, 0, &bytes[..fits]);
                host.event(Event::Received { recv, peer, meta });
            }
            Stored::Coming => {
                let state = &mut self.peers[peer];
                if let Some(coming) = &mut state.coming {
                    let sink = std::mem::replace(&mut coming.sink, Sink::Recv { recv, room });
                    if let Sink::Store(bytes) = sink {
                        state.stored_bytes -= bytes.len();
                        let fits = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                        host.place(recv, 0, &bytes[..fits]);
                    }
                }
            }
            Stored::Request(id) => self.fetch(host, peer, meta, id, recv, room),
        }
    }

    /// A large message has found its receive.
    fn fetch(
        &mut self,
        host: &mut impl Host,
        peer: PeerId,
        meta: Meta,
        their_id: u32,
        recv: u64,
        room: u64,
    ) {
        let len = meta.len.min(room);
        if len == 0 {
            self.push(peer, &Body::Done { id: their_id });
            host.event(Event::Received { recv, peer, meta });
            return;
        }
        let gone = self.peers[peer].gone;
        let Some(target) = (!gone).then(|| host.open(recv, len)).flatten() else {
            self.push(peer, &Body::Done { id: their_id });
            host.event(Event::RecvFailed { recv, peer, meta });
            return;
        };
        let id = self.next_in;
        self.next_in += 1;
        let incoming = Incoming {
            recv,
            peer,
            meta,
            their_id,
            target,
            len,
            have: Ranges::default(),
            ask_at: None,
        };
        self.incoming.insert(id, incoming);
        let ready = Body::Ready {
            id: their_id,
            target_id: id,
            target,
            len,
        };
        self.push(peer, &ready);
    }

    /// A packet arrived from a peer. An invalid packet, or one that contradicts earlier ones, ends the peer.
    pub fn packet(&mut self, host: &mut impl Host, now: Now, peer: PeerId, packet: &[u8]) {
        let Some((header, body)) = wire::decode(packet) else {
            return;
        };
        if self.peers[peer].gone {
            return;
        }
        self.peers[peer].link.acknowledged(now, &header);
        self.stir(peer);
        if matches!(body, Body::Bye) {
            // It has closed. Its complete messages stay for later receives, and its requests, so that their receives fail.
            self.has_gone(peer);
            self.fail_recvs(host, peer);
            self.fail_sends(host, peer);
            return;
        }
        if !body.is_numbered() {
            return;
        }
        if self.has_no_room(peer, header.seq, &body) {
            // As if lost: it comes again.
            return;
        }
        match self.peers[peer].link.arrived(now, header.seq) {
            Arrival::Refused => return,
            Arrival::Early => {
                self.peers[peer].link.keep(header.seq, packet);
                return;
            }
            Arrival::Next => {}
        }
        let mut sound = self.take(host, now, peer, body);
        while sound && let Some(packet) = self.peers[peer].link.kept() {
            if let Some((_, body)) = wire::decode(&packet) {
                sound = self.take(host, now, peer, body);
            }
        }
        if !sound {
            self.give_up(host, peer);
        }
    }

    /// Processes the next packet of a peer, in order. `false`: it contradicts earlier ones.
    fn take(&mut self, host: &mut impl Host, now: Now, peer: PeerId, body: Body<'_>) -> bool {
        match body {
            Body::Ack | Body::Bye => true,
            Body::Message(meta, bytes) => self.begin(host, peer, meta, bytes),
            Body::More(bytes) => self.more(host, peer, bytes),
            Body::Request(meta, id) => {
                if let Some((recv, room)) = self.matching(host, peer, &meta) {
                    self.fetch(host, peer, meta, id, recv, room);
                    return true;
                }
                self.store(peer, meta, Stored::Request(id))
            }
            Body::Ready {
                id,
                target_id,
                target,
                len,
            } => {
                let Some(outgoing) = self.outgoing.get_mut(&id).filter(|o| o.peer == peer) else {
                    return false;
                };
                // Nothing beyond the message is read, whatever the peer requests.
                if outgoing.target.is_some() || len > outgoing.len {
                    return false;
                }
                outgoing.target = Some((target, target_id, len));
                outgoing.sure = host.write(outgoing.send, peer, target, 0..len, target_id, true);
                if !outgoing.sure {
                    self.say_written(peer, id, target_id);
                }
                true
            }
            Body::Written { target_id } => {
                // It may be complete already.
                if let Some(incoming) = self.incoming.get_mut(&target_id)
                    && incoming.peer == peer
                {
                    incoming.ask_at = Some(now + GRACE);
                }
                true
            }
            Body::Lacks { id, ranges } => {
                let Some(outgoing) = self.outgoing.get(&id).filter(|o| o.peer == peer) else {
                    return false;
                };
                let Some((target, target_id, len)) = outgoing.target.filter(|_| !outgoing.sure)
                else {
                    return false;
                };
                let send = outgoing.send;
                // In order and apart: each byte is asked for once.
                let mut at = 0;
                for range in &ranges {
                    if range.start < at || range.start >= range.end || range.end > len {
                        return false;
                    }
                    at = range.end;
                }
                // A receiver requests missing bytes only after it was told that all is written, so not while that report is queued.
                let link = &self.peers[peer].link;
                if link.pushed() - (link.pending() as u64) < outgoing.said {
                    return false;
                }
                // It requests them again if the pending writes do not reach it.
                if !host.writing(send) {
                    for range in ranges {
                        host.write(send, peer, target, range, target_id, false);
                    }
                }
                self.say_written(peer, id, target_id);
                true
            }
            Body::Offer { port, token } => {
                // A stranger must not make us connect to ports of others.
                if self.peers[peer].named {
                    host.offered(peer, port, token);
                }
                true
            }
            Body::Done { id } => {
                let known = self.outgoing.get(&id).is_some_and(|o| o.peer == peer);
                if known && let Some(outgoing) = self.outgoing.remove(&id) {
                    host.event(Event::Sent(outgoing.send));
                }
                known
            }
        }
    }

    fn say_written(&mut self, peer: PeerId, id: u32, target_id: u64) {
        self.push(peer, &Body::Written { target_id });
        let pushed = self.peers[peer].link.pushed();
        if let Some(outgoing) = self.outgoing.get_mut(&id) {
            outgoing.said = pushed;
        }
    }

    /// The receive that takes a message, and its room.
    fn matching(&mut self, host: &mut impl Host, peer: PeerId, meta: &Meta) -> Option<(u64, u64)> {
        let index = self.posted.iter().position(|p| p.want.takes(peer, meta))?;
        let posted = &self.posted[index];
        let (recv, room) = (posted.recv, posted.room);
        if !posted.many {
            self.posted.remove(index);
            return Some((recv, room));
        }
        let part = host.carve(recv, meta.len);
        if part.last {
            self.posted.remove(index);
        }
        Some((part.recv, part.room))
    }

    fn store(&mut self, peer: PeerId, meta: Meta, stored: Stored) -> bool {
        let state = &mut self.peers[peer];
        state.stored += 1;
        self.unexpected.push_back(Unexpected { peer, meta, stored });
        self.peers[peer].stored <= MAX_STORED
    }

    fn begin(&mut self, host: &mut impl Host, peer: PeerId, meta: Meta, bytes: &[u8]) -> bool {
        if self.peers[peer].coming.is_some() {
            return false;
        }
        let mut sound = true;
        let sink = if let Some((recv, room)) = self.matching(host, peer, &meta) {
            Sink::Recv { recv, room }
        } else {
            sound = self.store(peer, meta, Stored::Coming);
            // Room for the received bytes, not for the announced length.
            Sink::Store(Vec::new())
        };
        self.peers[peer].coming = Some(Coming { meta, got: 0, sink });
        sound && self.more(host, peer, bytes)
    }

    fn more(&mut self, host: &mut impl Host, peer: PeerId, bytes: &[u8]) -> bool {
        let state = &mut self.peers[peer];
        let Some(coming) = &mut state.coming else {
            return false;
        };
        let left = coming.meta.len - coming.got;
        if bytes.len() as u64 > left || (bytes.is_empty() && left > 0) {
            return false;
        }
        match &mut coming.sink {
            Sink::Recv { recv, room } => {
                let fits = room.saturating_sub(coming.got).min(bytes.len() as u64);
                if fits > 0 {
                    host.place(*recv, coming.got, &bytes[..fits as usize]);
                }
            }
            Sink::Store(stored) => {
                stored.extend_from_slice(bytes);
                state.stored_bytes += bytes.len();
                if state.stored_bytes > MAX_STORED_BYTES {
                    return false;
                }
            }
        }
        coming.got += bytes.len() as u64;
        if coming.got < coming.meta.len {
            return true;
        }
        let Some(Coming { meta, sink, .. }) = state.coming.take() else {
            return false;
        };
        match sink {
            Sink::Recv { recv, .. } => host.event(Event::Received { recv, peer, meta }),
            Sink::Store(bytes) => {
                // It is the last that its peer has stored: mostly one of the last of all.
                let stored = self.unexpected.iter_mut().rev();
                let mut waiting = stored.chain(self.claimed.values_mut());
                let coming =
                    |u: &&mut Unexpected| u.peer == peer && matches!(u.stored, Stored::Coming);
                if let Some(message) = waiting.find(coming) {
                    message.stored = Stored::Whole(bytes);
                }
            }
        }
        true
    }

    /// An RDMA Write-Record of a peer came: `valid` are ranges of the region `rkey`, as addresses.
    pub fn record(
        &mut self,
        host: &mut impl Host,
        now: Now,
        peer: PeerId,
        id: u64,
        rkey: u32,
        valid: impl IntoIterator<Item = Range<u64>>,
    ) {
        let Some(incoming) = self.incoming.get_mut(&id) else {
            return;
        };
        if incoming.peer != peer || incoming.target.rkey != rkey {
            return;
        }
        let (base, end) = (incoming.target.addr, incoming.target.addr + incoming.len);
        for range in valid {
            // The queue pair placed nothing beyond the region.
            let range = range.start.max(base)..range.end.min(end);
            if range.start < range.end {
                incoming.have.add(range.start - base..range.end - base);
            }
        }
        if incoming.ask_at.is_some() {
            incoming.ask_at = Some(now + GRACE);
        }
        if incoming.have.covers(incoming.len) {
            self.fetched(host, id);
        }
    }

    /// All of a large message is there.
    fn fetched(&mut self, host: &mut impl Host, id: u64) {
        if let Some(done) = self.incoming.remove(&id) {
            let peer = done.peer;
            host.close(done.recv);
            self.push(peer, &Body::Done { id: done.their_id });
            let (recv, meta) = (done.recv, done.meta);
            host.event(Event::Received { recv, peer, meta });
        }
    }

    /// Checks the timers: packets that were not acknowledged, and bytes that were not written in time, are requested again.
    pub fn tick(&mut self, host: &mut impl Host, now: Now) {
        for peer in 0..self.peers.len() {
            if self.peers[peer].gone {
                continue;
            }
            if self.peers[peer].link.is_silent(now) {
                self.silent.push(peer);
            }
            if !self.peers[peer].link.tick(now) {
                self.give_up(host, peer);
            } else if self.peers[peer].link.next_time().is_some() {
                self.stir(peer);
            }
        }
        let mut lacking = Vec::new();
        for (&id, incoming) in &mut self.incoming {
            if incoming.ask_at.is_some_and(|at| now >= at) {
                incoming.ask_at = None;
                lacking.push(id);
            }
        }
        for id in lacking {
            let incoming = &self.incoming[&id];
            let ranges = incoming.have.missing(incoming.len, MAX_LACKS);
            self.asked_again += ranges.iter().map(|r| r.end - r.start).sum::<u64>();
            let (peer, id) = (incoming.peer, incoming.their_id);
            self.push(peer, &Body::Lacks { id, ranges });
        }
    }

    /// Peers that do not answer, each once, since the last call.
    pub fn take_silent(&mut self) -> Vec<PeerId> {
        std::mem::take(&mut self.silent)
    }

    /// When [`Machine::tick`] has something to do.
    pub fn next_time(&self) -> Option<Now> {
        let links = self.peers.iter().filter_map(|peer| peer.link.next_time());
        let asks = self.incoming.values().filter_map(|i| i.ask_at);
        links.chain(asks).min()
    }

    /// The next packet to send. `at_once`: acknowledgements do not wait for packets that could carry them.
    pub fn transmit(&mut self, now: Now, at_once: bool, out: &mut Vec<u8>) -> Option<Outbound> {
        while let Some(&peer) = self.ready.front() {
            let state = &mut self.peers[peer];
            if !state.held
                && let Some((packet, times)) = state.link.transmit(now)
            {
                out.clear();
                out.extend_from_slice(packet);
                let again = times > 1;
                return Some(Outbound { peer, again });
            }
            self.ready.pop_front();
            state.queued = false;
            if let Some(header) = state.link.acknowledge(now, at_once) {
                *out = wire::encode(&Body::Ack);
                wire::stamp(out, &header);
                let again = false;
                return Some(Outbound { peer, again });
            }
        }
        None
    }

    /// Whether all queued packets may wait until [`Machine::transmit`] is called for another reason: the program's next call, or an acknowledgement.
    pub fn gathers(&self, now: Now) -> bool {
        let mut peers = self.ready.iter().map(|&peer| &self.peers[peer]);
        peers.all(|peer| peer.gathers && peer.link.gathers(now))
    }

    /// Whether all packets were acknowledged.
    pub fn is_said(&self) -> bool {
        self.peers.iter().all(|peer| peer.link.is_idle())
    }

    /// The peer that has to write the large message with this number.
    pub fn writer(&self, id: u64) -> Option<PeerId> {
        self.incoming.get(&id).map(|incoming| incoming.peer)
    }

    /// The last packet for a peer: all that came from it has been taken.
    pub fn bye(&mut self, peer: PeerId, out: &mut Vec<u8>) {
        let header = self.peers[peer].link.unnumbered();
        *out = wire::encode(&Body::Bye);
        wire::stamp(out, &header);
    }

    /// Peers so far.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    fn give_up(&mut self, host: &mut impl Host, peer: PeerId) {
        self.has_gone(peer);
        // Messages of unnamed peers that have ended are dropped.
        let named = self.peers[peer].named;
        self.forget(peer, |stored| {
            !named || matches!(stored, Stored::Request(_))
        });
        self.fail_recvs(host, peer);
        self.fail_sends(host, peer);
    }

    /// Forgets messages of a peer that no receive has.
    fn forget(&mut self, peer: PeerId, which: impl Fn(&Stored) -> bool) {
        let state = &mut self.peers[peer];
        let mut kept = |u: &Unexpected| {
            let forgotten = u.peer == peer && which(&u.stored);
            if forgotten {
                state.stored -= 1;
                if let Stored::Whole(bytes) = &u.stored {
                    state.stored_bytes -= bytes.len();
                }
            }
            !forgotten
        };
        self.unexpected.retain(&mut kept);
        self.claimed.retain(|_, u| kept(u));
    }

    /// Fails the receives that wait for a peer that has ended.
    fn fail_recvs(&mut self, host: &mut impl Host, peer: PeerId) {
        let coming = self.peers[peer].coming.take();
        if let Some(Coming { meta, sink, .. }) = coming {
            match sink {
                Sink::Recv { recv, .. } => host.event(Event::RecvFailed { recv, peer, meta }),
                Sink::Store(bytes) => self.peers[peer].stored_bytes -= bytes.len(),
            }
        }
        self.forget(peer, |stored| matches!(stored, Stored::Coming));
        let gone: Vec<u64> = self
            .incoming
            .iter()
            .filter(|(_, i)| i.peer == peer)
            .map(|(&id, _)| id)
            .collect();
        for incoming in gone.iter().filter_map(|id| self.incoming.remove(id)) {
            host.close(incoming.recv);
            let (recv, meta) = (incoming.recv, incoming.meta);
            host.event(Event::RecvFailed { recv, peer, meta });
        }
        // A receive that names this peer alone waits for nothing.
        let waiting = self.posted.iter().filter(|p| p.want.peer == Some(peer));
        let waiting: Vec<u64> = waiting.map(|p| p.recv).collect();
        self.posted.retain(|p| p.want.peer != Some(peer));
        for recv in waiting {
            let meta = Meta::default();
            host.event(Event::RecvFailed { recv, peer, meta });
        }
    }

    fn fail_sends(&mut self, host: &mut impl Host, peer: PeerId) {
        for (_, outgoing) in self.outgoing.extract_if(|_, o| o.peer == peer) {
            host.event(Event::SendFailed(outgoing.send));
        }
    }
}
