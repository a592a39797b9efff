//! An endpoint: the machine over a datagram queue pair.
//!
//! The calling thread drives the endpoint ([`Endpoint::progress`]). While no thread calls, the device's engine receives packets, places them and
//! acknowledges them, and a thread of the endpoint retransmits lost packets.
//!
//! Small messages are copied into their packet, from there into registered memory, at the receiver out of registered memory, and into their place.
//! Large ones are sent from the program's memory and arrive in it.

mod clock;
mod connected;
mod held;
mod outgoing;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use weft_verbs::ext::{CqExt, lock};
use weft_verbs::{
    Access, Cq, Device, Error, Mr, RawMemory, RecvWr, SendWr, UdDest, UdInit, UdQp, UdSource, Wc,
    WcOpcode, WcStatus,
};

use self::clock::Clock;
pub use crate::address::{ADDRESS, Address};
pub use crate::completion::{Completion, Counter, Queue, Status};
use crate::faults::FaultInjector;
pub use crate::faults::FaultRates;
use crate::machine::{Event, Machine, PeerId, Refused, Want};
use crate::memory::{Many, Memory, Recv, Send, read_ranges};
use crate::rc::{self, Connections, Inbox, RC};
use crate::wire::{self, HEADER, MAX_PACKET, Meta};

/// Messages that are longer go by RDMA Write-Record, unless asked otherwise.
pub const THRESHOLD: u64 = 32 << 10;
/// The same for peers with a connection: a Write into the receive saves two copies, and needs no record there.
pub const CONNECTED_THRESHOLD: u64 = 12 << 10;

/// Packets that may come before they are looked at, and be on their way into the kernel.
const RECVS: u32 = 256;
const SLOTS: u32 = 128;
const WRITES: u32 = 64;
const RECORDS: u32 = 512;
const BATCH: usize = 32;
const TICK: Duration = Duration::from_millis(1);
/// How long a closing endpoint waits for acknowledgements of its sends.
const LINGER: Duration = Duration::from_secs(5);
/// Set in the number of a request that is a Write.
const WRITE: u64 = 1 << 63;

struct State {
    machine: Machine,
    memory: Memory,
    peers: Vec<UdDest>,
    known: HashMap<(SocketAddr, u32), PeerId>,
    free: Vec<u32>,
    /// Writes that the queue pairs have.
    writing: u32,
    connections: Connections,
    /// Sends of a connection that are not posted yet.
    connected: Vec<SendWr>,
    ticked: Duration,
    clock: Clock,
    packet: Vec<u8>,
    wcs: Vec<Wc>,
    batch: Vec<(SendWr, UdDest)>,
    sky: FaultInjector,
    sent_to: Queue,
    received_to: Queue,
    sends_counted: Vec<Arc<Counter>>,
    recvs_counted: Vec<Arc<Counter>>,
}

struct Inner {
    state: Mutex<State>,
    /// The engine found it locked.
    pending: AtomicBool,
    device: Device,
    /// Connections only to peers of this host.
    near: bool,
    connected_threshold: u64,
    inbox: Inbox,
    weak: Weak<Inner>,
    qp: UdQp,
    cq: Cq,
    /// Packets that come, and packets on their way into the kernel.
    come: Mr,
    go: Mr,
    start: Instant,
    address: Address,
}

/// The parameters of an endpoint.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The address to listen on; port 0: any.
    pub addr: SocketAddr,
    /// Messages that are longer go by RDMA Write-Record.
    pub threshold: u64,
    /// The same for peers with a connection.
    pub connected_threshold: u64,
    /// Simulated network faults.
    pub weather: FaultRates,
    /// Connections to the busiest peers there may be.
    pub connections: usize,
    /// Only to peers of this host.
    pub near: bool,
}

/// See the [module](self). Dropping it waits until all sends are acknowledged, for five seconds at most.
pub struct Endpoint(Arc<Inner>);

fn other(error: &Error) -> io::Error {
    io::Error::other(error.to_string())
}

impl Endpoint {
    /// A new one.
    ///
    /// # Errors
    /// As `bind(2)`; the limits of the device.
    pub fn open(device: &Device, setup: &Setup) -> io::Result<Endpoint> {
        let pd = device.alloc_pd().map_err(|e| other(&e))?;
        let connections = u32::try_from(setup.connections).unwrap_or(u32::MAX);
        let depth = 2 * (RECVS + SLOTS + WRITES + RECORDS);
        let depth = depth.saturating_add(connections.saturating_mul(rc::depth(WRITES)));
        let cq = device.create_cq(depth, None).map_err(|e| other(&e))?;
        let port = device.bind_ud(setup.addr)?;
        let addr = port.local_addr();
        let mut random = [0; 12];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        let (key, seed) = random.split_at(4);
        // A key with the highest bit set stands for the sender's own key.
        let key = u32::from_be_bytes(key.try_into().unwrap_or_default()) >> 1 | 1;
        let seed = u64::from_be_bytes(seed.try_into().unwrap_or_default());
        let init = UdInit {
            num: Some(addr.port().into()),
            max_send_wr: SLOTS + WRITES,
            max_recv_wr: RECVS,
            record_depth: RECORDS,
            ..UdInit::new(&port, key, &cq, &cq)
        };
        let qp = pd.create_ud_qp(&init).map_err(|e| other(&e))?;
        let alloc = |slots: u32| {
            let mr = pd.alloc_mr(slots as usize * MAX_PACKET, Access::LOCAL_WRITE);
            mr.map_err(|e| other(&e))
        };
        let (come, go) = (alloc(RECVS)?, alloc(SLOTS)?);
        let memory = Memory {
            pd,
            sends: HashMap::new(),
            recvs: HashMap::new(),
            many: HashMap::new(),
            connected: HashSet::new(),
            offers: Vec::new(),
            next: 0,
            writes: VecDeque::new(),
            events: Vec::new(),
        };
        let state = State {
            machine: Machine::new(key, setup.threshold),
            memory,
            peers: Vec::new(),
            known: HashMap::new(),
            free: (0..SLOTS).rev().collect(),
            writing: 0,
            connections: Connections::new(setup.connections),
            connected: Vec::new(),
            ticked: Duration::ZERO,
            clock: Clock::new(),
            packet: Vec::with_capacity(MAX_PACKET),
            wcs: vec![Wc::default(); BATCH],
            batch: Vec::with_capacity(BATCH),
            sky: FaultInjector::new(setup.weather, seed),
            sent_to: Queue::default(),
            received_to: Queue::default(),
            sends_counted: Vec::new(),
            recvs_counted: Vec::new(),
        };
        let inner = Arc::new_cyclic(|weak| Inner {
            weak: weak.clone(),
            state: Mutex::new(state),
            pending: AtomicBool::new(false),
            device: device.clone(),
            near: setup.near,
            connected_threshold: setup.connected_threshold,
            inbox: Inbox::default(),
            qp,
            cq,
            come,
            go,
            start: Instant::now(),
            address: Address { addr, key },
        });
        let slots: Vec<u32> = (0..RECVS).collect();
        inner.post_recvs(&slots);
        let weak = Arc::downgrade(&inner);
        inner.cq.set_hook(move || held::drive(&weak));
        inner.run_clock()?;
        Ok(Endpoint(inner))
    }

    pub fn address(&self) -> Address {
        self.0.address
    }

    /// Has completions of sends and receives put into these queues.
    pub fn complete_to(&self, sent: Option<&Queue>, received: Option<&Queue>) {
        let mut state = self.0.state();
        if let Some(queue) = sent {
            state.sent_to = Arc::clone(queue);
        }
        if let Some(queue) = received {
            state.received_to = Arc::clone(queue);
        }
    }

    /// Has sends and receives counted when they are complete, whether they make completions or not.
    pub fn count_to(&self, sent: Option<&Arc<Counter>>, received: Option<&Arc<Counter>>) {
        let mut state = self.0.state();
        state.sends_counted.extend(sent.cloned());
        state.recvs_counted.extend(received.cloned());
    }

    /// The peer at an address.
    ///
    /// # Errors
    /// [`Refused::TooMany`].
    pub fn peer(&self, address: &Address) -> Result<PeerId, Refused> {
        let mut state = self.0.state();
        let peer = state.peer(address, Machine::add_peer)?;
        state.machine.name(peer);
        Ok(peer)
    }

    /// Sends a message, whose bytes are in these ranges, one behind the other. With no context it makes no completion, and its memory is the caller's again
    /// at once; that is for messages up to the threshold.
    ///
    /// # Errors
    /// As [`Machine::send`].
    pub fn send(
        &self,
        peer: PeerId,
        ranges: &[RawMemory],
        meta: Meta,
        context: Option<usize>,
        synchronous: bool,
    ) -> Result<(), Refused> {
        let mut guard = self.0.state();
        let state = &mut *guard;
        let number = state.memory.number();
        let read = |at: u64, buffer: &mut [u8]| read_ranges(ranges, at as usize, buffer);
        let mut mr = None;
        if ranges.len() > 1 && (synchronous || meta.len > state.machine.threshold(peer)) {
            // The memory of a Write is one region.
            let mut whole = vec![0; meta.len as usize];
            read(0, &mut whole);
            let region = state.memory.pd.reg_mr(whole, Access::empty());
            mr = Some(region.map_err(|_| Refused::Busy)?);
        }
        let send = Send {
            memory: ranges.first().cloned(),
            context,
            meta,
            mr,
            writes: 0,
            ended: None,
        };
        state.memory.sends.insert(number, send);
        let done = state
            .machine
            .send(&mut state.memory, number, peer, meta, synchronous, read);
        let now = self.0.now();
        if done.is_err() {
            state.memory.sends.remove(&number);
        } else if state.connections.sent(peer, meta.len) {
            self.0.offer(state, now, peer);
        }
        self.0.flush_burst(state, now);
        state.complete_events();
        done
    }

    /// Posts a receive; with `claim`, of the message that [`Endpoint::peek`] has kept under that number. `false`: there is none.
    pub fn recv(
        &self,
        memory: RawMemory,
        want: Want,
        claim: Option<usize>,
        context: usize,
    ) -> bool {
        let mut guard = self.0.state();
        let state = &mut *guard;
        let number = state.memory.number();
        let room = memory.len() as u64;
        let recv = Recv {
            memory,
            context,
            mr: None,
            parent: None,
        };
        state.memory.recvs.insert(number, recv);
        let mut found = true;
        if let Some(claim) = claim {
            let (machine, memory) = (&mut state.machine, &mut state.memory);
            found = machine.recv_claimed(memory, claim as u64, number, room);
            if !found {
                state.memory.recvs.remove(&number);
            }
        } else {
            state.machine.recv(&mut state.memory, number, want, room);
        }
        let now = self.0.now();
        self.0.flush_burst(state, now);
        state.complete_events();
        found
    }

    /// Posts a receive that takes one message behind the other, until less than `least` bytes are left of its memory.
    pub fn recv_many(&self, memory: RawMemory, want: Want, least: usize, context: usize) {
        let mut guard = self.0.state();
        let state = &mut *guard;
        let number = state.memory.number();
        let many = Many {
            memory,
            context,
            used: 0,
            least,
            coming: 0,
            spent: false,
        };
        state.memory.many.insert(number, many);
        state.machine.recv_many(&mut state.memory, number, want);
        let now = self.0.now();
        self.0.flush_burst(state, now);
        state.complete_events();
    }

    /// Completes with the message that such a receive would take, or with [`Status::NoMessage`]. With `claim` the message is kept for the
    /// receive that names this context.
    pub fn peek(&self, want: &Want, claim: bool, context: usize) {
        let mut state = self.0.state();
        self.0.progress(&mut state, false);
        let found = state.machine.peek(want, claim.then_some(context as u64));
        let (peer, meta) = found.unzip();
        let completion = Completion {
            context,
            is_recv: true,
            meta: meta.unwrap_or_default(),
            room: u64::MAX,
            at: 0,
            released: false,
            from: peer.map(|peer| state.address(peer)),
            status: if peer.is_some() {
                Status::Done
            } else {
                Status::NoMessage
            },
        };
        state.received_to.push(completion);
    }

    /// Takes the receive with this context back, unless it has a message.
    pub fn cancel(&self, context: usize) {
        let mut state = self.0.state();
        let Some(number) = state.memory.latest(context) else {
            return;
        };
        if state.machine.cancel(number) {
            let meta = Meta::default();
            state.received(number, None, meta, Status::Canceled);
        }
    }

    /// Processes received packets, and sends waiting ones.
    pub fn progress(&self) {
        self.0.progress(&mut self.0.state(), false);
    }

    /// Waits until something may have happened; not longer than `limit`.
    pub fn wait(&self, limit: Duration) {
        let epoch = self.0.cq.epoch();
        let limit = limit.min(TICK * 5);
        self.0.cq.watch(epoch, true, Some(limit));
    }

    /// Connections there are, and those that broke.
    pub fn connections(&self) -> (usize, usize) {
        self.0.state().connections.count()
    }

    /// Packets sent again, and bytes of large messages that were asked for again.
    pub fn repeated(&self) -> (u64, u64) {
        self.0.state().machine.repeated()
    }
}

impl Inner {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn post_recvs(&self, slots: &[u32]) {
        let wrs: Vec<RecvWr> = slots
            .iter()
            .map(|&slot| {
                let sge = self.come.sge(slot as usize * MAX_PACKET, MAX_PACKET);
                RecvWr::new(slot.into()).sge(sge)
            })
            .collect();
        if let Err(error) = self.qp.post_recv(&wrs) {
            tracing::error!("receives of packets: {error}");
        }
    }

    fn progress(&self, state: &mut State, at_once: bool) {
        let now = self.now();
        self.read_news(state);
        let mut wcs = std::mem::take(&mut state.wcs);
        // Bounded: a sender that never stops must not keep a caller here.
        for _ in 0..8 {
            let polled = if at_once {
                self.cq.take(&mut wcs)
            } else {
                self.cq.poll(&mut wcs)
            };
            let count = polled.unwrap_or_else(|_| {
                tracing::error!("completions were lost");
                0
            });
            let mut again = Vec::new();
            for wc in &wcs[..count] {
                self.completed(state, now, wc, &mut again);
            }
            if !again.is_empty() {
                self.post_recvs(&again);
            }
            if count < wcs.len() {
                break;
            }
        }
        state.wcs = wcs;
        if now.saturating_sub(state.ticked) >= TICK {
            state.ticked = now;
            state.machine.tick(&mut state.memory, now);
            for peer in state.machine.take_silent() {
                // The user of the job is to know it at any level of the log.
                eprintln!(
                    "weft: no packet has come from {} in answer: does a firewall keep UDP out, or is it an address that this host does not reach? \
                     WEFT_FI_ADDR=NETWORK/BITS says in which network each rank takes its address",
                    state.peers[peer].addr
                );
            }
            state.connections.tick(now);
        }
        self.take_offers(state);
        self.flush(state, now, at_once);
        state.complete_events();
    }

    fn completed(&self, state: &mut State, now: Duration, wc: &Wc, again: &mut Vec<u32>) {
        if wc.wr_id & (RC | WRITE) == RC && wc.opcode != WcOpcode::WriteRecord {
            Self::completed_connected(state, now, wc);
            return;
        }
        match wc.opcode {
            WcOpcode::Send => state.free.push(wc.wr_id as u32),
            WcOpcode::Write => {
                state.writing -= 1;
                state.written(wc.wr_id & !WRITE);
            }
            WcOpcode::WriteRecord => self.recorded(state, now, wc),
            _ => {
                let slot = wc.wr_id as u32;
                again.push(slot);
                if wc.status == WcStatus::Success {
                    self.came(state, now, wc, slot as usize * MAX_PACKET);
                }
            }
        }
    }

    fn came(&self, state: &mut State, now: Duration, wc: &Wc, at: usize) {
        let Some(UdSource { addr, qp_num }) = wc.source else {
            return;
        };
        let len = (wc.byte_len as usize).min(MAX_PACKET);
        let mut packet = std::mem::take(&mut state.packet);
        packet.resize(len, 0);
        if len >= HEADER && self.come.read(at, &mut packet).is_ok() {
            let (times, late) = state.sky.came(addr, qp_num, &packet);
            for _ in 0..times {
                Self::arrived(state, now, addr, qp_num, &packet);
            }
            if let Some((addr, qp_num, packet)) = late {
                Self::arrived(state, now, addr, qp_num, &packet);
            }
        }
        state.packet = packet;
    }

    fn arrived(state: &mut State, now: Duration, addr: SocketAddr, qp_num: u32, packet: &[u8]) {
        if let Some((header, body)) = wire::decode(packet)
            && u32::from(addr.port()) == qp_num
            && let key = header.key
            && let numbered = body.is_numbered()
            && let Ok(peer) = state.peer(&Address { addr, key }, |machine| {
                let peer = numbered.then(|| machine.add_stranger());
                peer.unwrap_or(Err(Refused::Gone))
            })
        {
            let memory = &mut state.memory;
            state.machine.packet(memory, now, peer, packet);
        }
    }

    fn recorded(&self, state: &mut State, now: Duration, wc: &Wc) {
        let Some(record) = self.qp.take_record(wc.wr_id) else {
            return;
        };
        let Some(id) = record.imm else {
            return;
        };
        let Some(peer) = state.machine.writer(id) else {
            return;
        };
        let from = &state.peers[peer];
        if from.addr != record.source.addr || from.qp_num != record.source.qp_num {
            return;
        }
        let addr = record.addr;
        let valid = record.valid.iter();
        let valid = valid.map(|r| addr + u64::from(r.start)..addr + u64::from(r.end));
        let memory = &mut state.memory;
        state
            .machine
            .record(memory, now, peer, id, record.rkey, valid);
    }

    /// Waits for acknowledgements, then tells the peers that the endpoint closes.
    fn close(&self) {
        let end = Instant::now() + LINGER;
        let mut state = self.state();
        self.progress(&mut state, false);
        while !state.machine.is_said() && Instant::now() < end {
            drop(state);
            let epoch = self.cq.epoch();
            self.cq.watch(epoch, true, Some(TICK));
            state = self.state();
            self.progress(&mut state, false);
        }
        let mut packet = Vec::new();
        // One may be lost.
        for peer in (0..state.machine.peers()).chain(0..state.machine.peers()) {
            let Some(slot) = state.free.pop() else {
                self.progress(&mut state, false);
                continue;
            };
            state.machine.bye(peer, &mut packet);
            let at = slot as usize * MAX_PACKET;
            if self.go.write(at, &packet).is_ok() {
                let wr = SendWr::send(slot.into()).sge(self.go.sge(at, packet.len()));
                let _ = self.qp.post_send(&wr.signaled(), &state.peers[peer]);
            }
        }
        let end = Instant::now() + Duration::from_millis(200);
        while self.qp.outstanding() > 0 && Instant::now() < end {
            self.progress(&mut state, false);
        }
        // The engine may still drive for late packets: the program's memory must not be accessed any more.
        state.memory.writes.clear();
        state.memory.recvs.clear();
        state.memory.many.clear();
        state.memory.sends.clear();
        let (packets, bytes) = state.machine.repeated();
        let (connections, broken) = state.connections.count();
        tracing::info!(
            packets,
            bytes,
            connections,
            broken,
            "endpoint closed; packets sent again, bytes of large messages asked for again, connections"
        );
        let connections = std::mem::take(&mut state.connections);
        drop(state);
        // Without the lock, because the end of a connection is reported to us.
        drop(connections);
    }
}

impl State {
    fn peer(
        &mut self,
        address: &Address,
        add: impl FnOnce(&mut Machine) -> Result<PeerId, Refused>,
    ) -> Result<PeerId, Refused> {
        let Address { addr, key } = *address;
        if let Some(&peer) = self.known.get(&(addr, key)) {
            return Ok(peer);
        }
        // The new receive may get the number of a finished one, which pending events still name.
        self.complete_events();
        let peer = add(&mut self.machine)?;
        self.known.insert((addr, key), peer);
        let dest = UdDest {
            addr,
            qp_num: addr.port().into(),
            qkey: key,
            from: None,
            traffic_class: 0,
        };
        if let Some(place) = self.peers.get_mut(peer) {
            let gone = std::mem::replace(place, dest);
            self.known.remove(&(gone.addr, gone.qkey));
        } else {
            self.peers.push(dest);
        }
        Ok(peer)
    }

    /// Turns the machine's events into completions.
    fn complete_events(&mut self) {
        for event in std::mem::take(&mut self.memory.events) {
            match event {
                Event::Sent(send) => self.sent(send, Status::Done),
                Event::SendFailed(send) => self.sent(send, Status::Failed),
                Event::Received { recv, peer, meta } => {
                    self.received(recv, Some(peer), meta, Status::Done);
                }
                Event::RecvFailed { recv, peer, meta } => {
                    self.received(recv, Some(peer), meta, Status::Failed);
                }
            }
        }
    }

    fn sent(&mut self, number: u64, status: Status) {
        let Some(send) = self.memory.sends.get_mut(&number) else {
            return;
        };
        send.ended = Some(status);
        // Writes that are not posted are not needed any more.
        let writes = &mut self.memory.writes;
        let before = writes.len();
        if send.writes > 0 {
            writes.retain(|write| write.send != number);
            send.writes -= before - writes.len();
        }
        self.finish(number);
    }

    fn written(&mut self, number: u64) {
        if let Some(send) = self.memory.sends.get_mut(&number) {
            send.writes -= 1;
            self.finish(number);
        }
    }

    /// A send is over when the peer has it and the queue pair does not need its memory.
    fn finish(&mut self, number: u64) {
        let over = |send: &Send| send.writes == 0 && send.ended.is_some();
        if !self.memory.sends.get(&number).is_some_and(over) {
            return;
        }
        let Some(send) = self.memory.sends.remove(&number) else {
            return;
        };
        let status = send.ended.unwrap_or(Status::Failed);
        for counter in &self.sends_counted {
            counter.count(status);
        }
        if let Some(context) = send.context {
            self.sent_to.push(Completion {
                context,
                is_recv: false,
                meta: send.meta,
                room: u64::MAX,
                at: 0,
                released: false,
                from: None,
                status,
            });
        }
    }

    fn received(&mut self, number: u64, peer: Option<PeerId>, meta: Meta, status: Status) {
        let many = &mut self.memory.many;
        let (memory, context, released);
        if let Some(recv) = self.memory.recvs.remove(&number) {
            let parent = recv.parent.and_then(|parent| many.get_mut(&parent));
            released = parent.is_some_and(|many| {
                many.coming -= 1;
                many.spent && many.coming == 0
            });
            if let Some(parent) = recv.parent.filter(|_| released) {
                many.remove(&parent);
            }
            (memory, context) = (recv.memory, recv.context);
        } else if let Some(recv) = many.get_mut(&number) {
            // It was cancelled, or its peer has ended. Messages that are still arriving keep the memory.
            recv.spent = true;
            released = recv.coming == 0;
            (memory, context) = (recv.memory.clone(), recv.context);
            if released {
                many.remove(&number);
            }
        } else {
            return;
        }
        for counter in &self.recvs_counted {
            counter.count(status);
        }
        self.received_to.push(Completion {
            context,
            is_recv: true,
            meta,
            room: memory.len() as u64,
            at: memory.as_ptr() as usize,
            released,
            from: peer.map(|peer| self.address(peer)),
            status,
        });
    }

    fn address(&self, peer: PeerId) -> Address {
        let UdDest { addr, qkey, .. } = self.peers[peer];
        Address { addr, key: qkey }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.0.close();
        self.0.end_clock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On any port, without connections.
    pub(super) fn setup() -> Setup {
        Setup {
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            threshold: THRESHOLD,
            connected_threshold: CONNECTED_THRESHOLD,
            weather: FaultRates::default(),
            connections: 0,
            near: false,
        }
    }

    #[test]
    fn a_closed_endpoint_has_no_memory_of_the_program() {
        let endpoint = Endpoint::open(&Device::open().unwrap(), &setup()).unwrap();
        let inner = Arc::clone(&endpoint.0);
        let want = Want {
            tagged: false,
            tag: 0,
            ignore: 0,
            peer: None,
        };
        assert!(endpoint.recv(RawMemory::leak(vec![0; 64]), want, None, 1));
        drop(endpoint);
        assert!(lock(&inner.state).memory.recvs.is_empty());
    }
}
