//! Machines on a network that loses, doubles and delays, against an oracle: every message comes once, whole, and in the order of its sender.
//! `WEFT_SEED` repeats a run.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Duration;

use weft_fi::machine::{Event, Host, Machine, Part, PeerId, Refused, Want};
use weft_fi::wire::{self, Body, Header, Meta, Target};

const NODES: usize = 3;
const THRESHOLD: u64 = 20_000;
/// What a Write-Record is cut into.
const SEGMENT: u64 = 4096;
const TAGS: u64 = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(1000) < percent * 10
    }
}

enum Flying {
    Packet(Vec<u8>),
    Record {
        id: u64,
        rkey: u32,
        bytes: Vec<(u64, Vec<u8>)>,
    },
}

struct Write {
    send: u64,
    to: PeerId,
    target: Target,
    range: Range<u64>,
    id: u64,
}

#[derive(Default)]
struct Memory {
    recvs: HashMap<u64, Vec<u8>>,
    open: HashMap<u32, (u64, u64)>,
    next_key: u32,
    writes: Vec<Write>,
    events: Vec<Event>,
}

impl Host for Memory {
    fn carve(&mut self, _: u64, _: u64) -> Part {
        unreachable!("no receive here takes many messages");
    }

    fn place(&mut self, recv: u64, at: u64, bytes: &[u8]) {
        let at = at as usize;
        self.recvs.get_mut(&recv).expect("a posted receive")[at..at + bytes.len()]
            .copy_from_slice(bytes);
    }

    fn open(&mut self, recv: u64, len: u64) -> Option<Target> {
        self.next_key += 1;
        let (rkey, addr) = (self.next_key, 0x1000);
        self.open.insert(rkey, (recv, len));
        Some(Target { rkey, addr })
    }

    fn close(&mut self, recv: u64) {
        self.open.retain(|_, (other, _)| *other != recv);
    }

    fn offered(&mut self, _: PeerId, _: u16, _: u64) {}

    fn write(
        &mut self,
        send: u64,
        to: PeerId,
        target: Target,
        range: Range<u64>,
        id: u64,
        _: bool,
    ) -> bool {
        self.writes.push(Write {
            send,
            to,
            target,
            range,
            id,
        });
        false
    }

    fn writing(&self, send: u64) -> bool {
        self.writes.iter().any(|write| write.send == send)
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

struct Node {
    machine: Machine,
    memory: Memory,
    sends: HashMap<u64, Vec<u8>>,
    next: u64,
    /// Sends that are not complete.
    open_sends: usize,
}

struct World {
    random: Random,
    now: Duration,
    nodes: Vec<Node>,
    flying: BTreeMap<(Duration, u64), (usize, usize, Flying)>,
    count: u64,
    loss: u64,
    doubles: u64,
    /// What was sent from, to, with this tag, and has not been received, in order.
    oracle: HashMap<(usize, usize, u64), std::collections::VecDeque<u64>>,
    received: u64,
}

/// Of message `id`.
fn content(id: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| (id * 31 + i * 7 + (i >> 8)) as u8)
        .collect()
}

/// Peers are numbered as nodes are, without oneself.
fn peer_of(me: usize, other: usize) -> PeerId {
    if other < me { other } else { other - 1 }
}

fn node_of(me: usize, peer: PeerId) -> usize {
    if peer < me { peer } else { peer + 1 }
}

impl World {
    fn new(seed: u64, loss: u64, doubles: u64) -> World {
        let nodes = (0..NODES).map(|i| {
            let mut machine = Machine::new(i as u32 + 1, THRESHOLD);
            for _ in 1..NODES {
                machine.add_peer().unwrap();
            }
            Node {
                machine,
                memory: Memory::default(),
                sends: HashMap::new(),
                next: 1,
                open_sends: 0,
            }
        });
        World {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Duration::from_secs(1),
            nodes: nodes.collect(),
            flying: BTreeMap::new(),
            count: 0,
            loss,
            doubles,
            oracle: HashMap::new(),
            received: 0,
        }
    }

    fn launch(&mut self, from: usize, to: usize, what: Flying, late: Duration) {
        self.count += 1;
        let delay = Duration::from_micros(20 + self.random.below(300)) + late;
        self.flying
            .insert((self.now + delay, self.count), (from, to, what));
    }

    fn packet(&mut self, from: usize, to: usize, bytes: &[u8]) {
        let copies =
            u64::from(!self.random.chance(self.loss)) + u64::from(self.random.chance(self.doubles));
        for _ in 0..copies {
            self.launch(from, to, Flying::Packet(bytes.to_vec()), Duration::ZERO);
        }
    }

    /// Cuts a write, loses some of it, and lets one record tell of the rest.
    fn write(&mut self, from: usize, write: &Write) {
        let data = self.nodes[from].sends[&write.send].clone();
        let mut bytes = Vec::new();
        let mut at = write.range.start;
        let mut whole = true;
        while at < write.range.end {
            let end = (at + SEGMENT).min(write.range.end);
            if self.random.chance(self.loss) {
                whole = false;
            } else {
                bytes.push((at, data[at as usize..end as usize].to_vec()));
            }
            at = end;
        }
        if bytes.is_empty() {
            return;
        }
        let (id, rkey) = (write.id, write.target.rkey);
        // What is not whole is known of only when it is given up.
        let late = Duration::from_millis(if whole { 0 } else { 100 });
        let to = node_of(from, write.to);
        self.launch(from, to, Flying::Record { id, rkey, bytes }, late);
    }

    fn carry_out(&mut self, at: usize) {
        let mut out = Vec::new();
        while let Some(outbound) = self.nodes[at].machine.transmit(self.now, false, &mut out) {
            self.packet(at, node_of(at, outbound.peer), &out);
        }
        for write in std::mem::take(&mut self.nodes[at].memory.writes) {
            self.write(at, &write);
        }
        for event in std::mem::take(&mut self.nodes[at].memory.events) {
            self.event(at, event);
        }
    }

    fn event(&mut self, at: usize, event: Event) {
        match event {
            Event::Sent(send) => {
                assert!(self.nodes[at].sends.remove(&send).is_some(), "sent twice");
                self.nodes[at].open_sends -= 1;
            }
            Event::Received { recv, peer, meta } => {
                let from = node_of(at, peer);
                let tag = if meta.tagged { meta.tag } else { TAGS };
                let expected = self.oracle.get_mut(&(from, at, tag)).unwrap();
                let id = expected.pop_front().expect("a message that was sent");
                assert_eq!(meta.data, Some(id), "in order");
                let memory = self.nodes[at].memory.recvs.remove(&recv).unwrap();
                let fits = memory.len().min(meta.len as usize);
                assert!(memory[..fits] == content(id, meta.len)[..fits], "its bytes");
                self.received += 1;
            }
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, from: usize, to: usize) -> bool {
        let id = self.count + 1_000_000 * from as u64;
        self.count += 1;
        let len = match self.random.below(10) {
            0 => 0,
            1..=5 => self.random.below(2000),
            6..=7 => self.random.below(THRESHOLD + 1),
            _ => THRESHOLD + self.random.below(200_000),
        };
        let tag = self.random.below(TAGS + 1);
        let meta = Meta {
            tagged: tag < TAGS,
            tag: if tag < TAGS { tag } else { 0 },
            data: Some(id),
            len,
        };
        let synchronous = self.random.chance(10);
        let data = content(id, len);
        let node = &mut self.nodes[from];
        let send = node.next;
        node.next += 1;
        node.sends.insert(send, data.clone());
        let read = |at: u64, buffer: &mut [u8]| {
            buffer.copy_from_slice(&data[at as usize..at as usize + buffer.len()]);
        };
        let peer = peer_of(from, to);
        let done = node
            .machine
            .send(&mut node.memory, send, peer, meta, synchronous, read);
        match done {
            Ok(()) => {
                node.open_sends += 1;
                let queue = self.oracle.entry((from, to, tag)).or_default();
                queue.push_back(id);
            }
            Err(Refused::Busy) => {
                node.sends.remove(&send);
            }
            Err(other) => panic!("{other:?}"),
        }
        self.carry_out(from);
        done.is_ok()
    }

    /// A receive for a given sender and tag; now and then too short, or for whoever comes.
    fn recv(&mut self, at: usize, from: usize, tag: u64) {
        let room = if self.random.chance(10) { 500 } else { 300_000 };
        let want = Want {
            tagged: tag < TAGS,
            tag: if tag < TAGS { tag } else { 0 },
            ignore: 0,
            peer: (!self.random.chance(20)).then(|| peer_of(at, from)),
        };
        let node = &mut self.nodes[at];
        let recv = node.next;
        node.next += 1;
        node.memory.recvs.insert(recv, vec![0; room]);
        if want.tagged && node.machine.peek(&want, Some(recv)).is_some() {
            let memory = &mut node.memory;
            assert!(node.machine.recv_claimed(memory, recv, recv, room as u64));
        } else {
            node.machine.recv(&mut node.memory, recv, want, room as u64);
        }
        self.carry_out(at);
    }

    fn step(&mut self) -> bool {
        let timers = self.nodes.iter().filter_map(|n| n.machine.next_time());
        let flight = self.flying.keys().next().map(|key| key.0);
        let Some(next) = timers.chain(flight).min() else {
            return false;
        };
        self.now = self.now.max(next);
        if flight.is_some_and(|at| at <= self.now) {
            let (_, (from, to, what)) = self.flying.pop_first().unwrap();
            self.deliver(from, to, what);
            return true;
        }
        for at in 0..NODES {
            let node = &mut self.nodes[at];
            node.machine.tick(&mut node.memory, self.now);
            self.carry_out(at);
        }
        true
    }

    fn deliver(&mut self, from: usize, to: usize, what: Flying) {
        let node = &mut self.nodes[to];
        let peer = peer_of(to, from);
        match what {
            Flying::Packet(bytes) => {
                node.machine
                    .packet(&mut node.memory, self.now, peer, &bytes);
            }
            Flying::Record { id, rkey, bytes } => {
                // A closed region takes nothing.
                let Some(&(recv, len)) = node.memory.open.get(&rkey) else {
                    return;
                };
                let mut valid = Vec::new();
                for (at, bytes) in bytes {
                    let end = at + bytes.len() as u64;
                    assert!(end <= len, "within what was opened");
                    node.memory.place(recv, at, &bytes);
                    valid.push(0x1000 + at..0x1000 + end);
                }
                node.machine
                    .record(&mut node.memory, self.now, peer, id, rkey, valid);
            }
        }
        self.carry_out(to);
    }
}

fn run(seed: u64, loss: u64, doubles: u64, messages: u64) -> (u64, u64) {
    println!("WEFT_SEED={seed}, {loss} % lost");
    let mut world = World::new(seed, loss, doubles);
    let mut sent = 0;
    let mut steps = 0u64;
    loop {
        steps += 1;
        assert!(steps < 2_000_000, "it goes on");
        if sent < messages && world.random.chance(30) {
            let from = world.random.below(NODES as u64) as usize;
            let to = (from + 1 + world.random.below(NODES as u64 - 1) as usize) % NODES;
            sent += u64::from(world.send(from, to));
        }
        // As many receives as there are messages, before they come or after.
        if world.random.chance(30) {
            let missing = world.oracle.iter().find(|(key, queue)| {
                let posted = &world.nodes[key.1].memory.recvs;
                !queue.is_empty() && posted.is_empty()
            });
            if let Some((&(from, to, tag), _)) = missing {
                world.recv(to, from, tag);
            }
        }
        let moved = world.step();
        let open = world.nodes.iter().map(|n| n.open_sends).sum::<usize>();
        if sent == messages && world.received == sent && open == 0 {
            break;
        }
        let waiting = world.oracle.values().any(|queue| !queue.is_empty());
        assert!(moved || waiting || sent < messages, "stuck");
    }
    let mut all = (0, 0);
    for node in &world.nodes {
        let (packets, bytes) = node.machine.repeated();
        all = (all.0 + packets, all.1 + bytes);
    }
    all
}

fn seeds() -> Vec<u64> {
    match std::env::var("WEFT_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (1..=6).collect(),
    }
}

#[test]
fn nothing_is_repeated_where_nothing_is_lost() {
    for seed in seeds() {
        let (packets, bytes) = run(seed, 0, 0, 300);
        assert_eq!(bytes, 0);
        // Delay alone may look like loss now and then.
        assert!(packets < 100, "{packets} packets");
    }
}

#[test]
fn all_comes_once_and_in_order_whatever_is_lost() {
    for seed in seeds() {
        for loss in [1, 5, 20] {
            let (packets, bytes) = run(seed, loss, 3, 200);
            assert!(packets > 0 && (bytes > 0 || loss == 1), "{packets} {bytes}");
        }
    }
}

#[test]
fn nonsense_ends_no_machine() {
    let mut random = Random(7);
    let mut machine = Machine::new(1, THRESHOLD);
    let peer = machine.add_peer().unwrap();
    let mut memory = Memory::default();
    for _ in 0..20_000 {
        let mut packet = vec![b'F', 1, random.below(10) as u8, random.below(4) as u8];
        for _ in 0..random.below(80) {
            let end = if random.chance(50) { 3 } else { 256 };
            packet.push(random.below(end) as u8);
        }
        machine.packet(&mut memory, Duration::from_secs(1), peer, &packet);
    }
    assert!(memory.writes.is_empty(), "nobody sent anything");
}

#[test]
fn a_receiver_cannot_ask_for_more_than_the_message() {
    for (asked, taken) in [(200_000, true), (200_001, false), (u64::MAX, false)] {
        let mut machine = Machine::new(1, THRESHOLD);
        let peer = machine.add_peer().unwrap();
        let mut memory = Memory::default();
        let meta = Meta {
            len: 200_000,
            ..Meta::default()
        };
        machine
            .send(&mut memory, 5, peer, meta, false, |_, _| {})
            .unwrap();
        let target = Target { rkey: 1, addr: 0 };
        let ready = Body::Ready {
            id: 1,
            target_id: 9,
            target,
            len: asked,
        };
        let mut packet = wire::encode(&ready);
        let header = Header {
            key: 2,
            seq: 1,
            ack: 1,
            sack: 0,
        };
        wire::stamp(&mut packet, &header);
        machine.packet(&mut memory, Duration::from_secs(1), peer, &packet);
        assert_eq!(memory.writes.len(), usize::from(taken));
        let failed = memory.events.contains(&Event::SendFailed(5));
        assert_eq!(failed, !taken);
    }
}
