//! Two connections of RoCE over a network that loses, doubles and overtakes packets, in virtual time, against an oracle: each message is
//! delivered once and in order, memory is as if every request had been carried out once and in order, atomics exactly once. Everything comes
//! from one seed: `WEFT_SEED` runs one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::common::Rng;
use weft_proto::dgram::Now;
use weft_proto::rdmap::{Op, Payload, SendWr};
use weft_proto::roce::{Atomic, Config, Connection, Received, Rx, State, Status, supports};
use weft_wire::rdmap::AtomicOp;
use weft_wire::roce::{DEFAULT_PKEY, Header, Service};

/// The region: a counter for atomics, bytes for Writes, and bytes that nobody writes, for Reads.
const COUNTER: u64 = 0x1000;
const WRITES: u64 = 0x2000;
const SPACE: usize = 1 << 16;
const READS: u64 = 0x10_0000;
const RKEY: u32 = 77;

/// Bytes of a request's scatter/gather list.
fn byte(side: usize, seq: u64, offset: u32) -> u8 {
    (side as u64 * 31 + seq * 7 + u64::from(offset) * 13) as u8
}

fn readable(va: u64) -> u8 {
    (va * 5 + (va >> 8)) as u8
}

const CONFIG: Config = Config {
    service: Service::Rc,
    dest_qp: 9,
    pkey: DEFAULT_PKEY,
    mtu: 256,
    sq_psn: 0,
    rq_psn: 0,
    ord: 4,
    ird: 4,
    timeout: 10,
    retry_count: 7,
    rnr_retry: 7,
    rnr_timer: 5,
    window: 64,
};

/// A request as its oracle keeps it.
#[derive(Clone)]
struct Posted {
    wr: SendWr,
    /// Where a Read puts its answer, and the bytes of an atomic's.
    sink: Vec<u8>,
    original: Option<u64>,
}

struct Side {
    conn: Connection<Posted>,
    counter: u64,
    written: Vec<u8>,
    receives: u32,
    in_progress: Vec<u8>,
    received: Vec<(Received, Vec<u8>)>,
    done: Vec<(Status, Posted)>,
    atomics: u32,
}

impl Side {
    fn new(config: Config) -> Self {
        Self {
            conn: Connection::new(config),
            counter: 0,
            written: vec![0; SPACE],
            receives: 0,
            in_progress: Vec::new(),
            received: Vec::new(),
            done: Vec::new(),
            atomics: 0,
        }
    }

    fn post(&mut self, wr: SendWr) -> u64 {
        let len = match wr.op {
            Op::Read { .. } => wr.len as usize,
            _ => 0,
        };
        let sink = vec![0; len];
        let original = None;
        let posted = Posted { wr, sink, original };
        // Two of three are those of a program that does not wait for each.
        if wr.len.is_multiple_of(3) {
            self.conn.post_with(wr, posted)
        } else {
            self.conn.post_unsignaled(wr, posted)
        }
    }

    /// Everything that may go now, as packets.
    fn transmit(&mut self, side: usize, now: Now, mut send: impl FnMut(Vec<u8>)) {
        loop {
            let mut packet = Vec::new();
            let Some(tx) = self.conn.next_tx(now, &mut packet) else {
                if self.conn.is_interrupted() {
                    continue;
                }
                return;
            };
            match tx.payload {
                Payload::None => {}
                Payload::Wr { seq, offset, len } => {
                    packet.extend((offset..offset + len).map(|at| byte(side, seq, at)));
                }
                Payload::Source { stag, to, len } => {
                    assert_eq!(stag, RKEY);
                    packet.extend((to..to + u64::from(len)).map(readable));
                }
                Payload::Local { seq } => {
                    self.conn.local_done(seq);
                    continue;
                }
            }
            packet.extend(vec![0; tx.pad.into()]);
            send(packet);
        }
    }

    fn receive(&mut self, now: Now, packet: &[u8]) {
        let (header, payload) = Header::parse(packet).expect("a packet of ours");
        match self.conn.rx(now, &header, payload.len() as u32) {
            Rx::Nothing => {}
            Rx::PlaceWrite {
                rkey,
                va,
                len,
                takes_receive,
            } => {
                if takes_receive && self.receives == 0 {
                    return self.conn.not_ready();
                }
                if len > 0 {
                    assert_eq!(rkey, RKEY);
                    let at = (va - WRITES) as usize;
                    self.written[at..at + len as usize].copy_from_slice(payload);
                }
                self.placed();
            }
            Rx::PlaceRead { seq, offset, len } => {
                let sink = &mut self.conn.request_mut(seq).unwrap().sink;
                sink[offset as usize..][..len as usize].copy_from_slice(payload);
                self.placed();
            }
            Rx::PlaceRecv { first, offset, .. } => {
                if first && self.receives == 0 {
                    return self.conn.not_ready();
                }
                if first {
                    self.in_progress.clear();
                }
                assert_eq!(offset as usize, self.in_progress.len());
                self.in_progress.extend_from_slice(payload);
                self.placed();
            }
            Rx::ReadRequested { rkey, .. } => {
                assert_eq!(rkey, RKEY);
                self.conn.accept_read();
            }
            Rx::AtomicRequested { rkey, va, op } => {
                assert_eq!((rkey, va), (RKEY, COUNTER));
                let original = self.counter;
                self.counter = match op {
                    Atomic::FetchAdd { add } => original.wrapping_add(add),
                    Atomic::CompareSwap { compare, swap } if compare == original => swap,
                    Atomic::CompareSwap { .. } => original,
                };
                self.atomics += 1;
                self.conn.atomic_done(original);
            }
            Rx::AtomicResult { seq, original } => {
                self.conn.request_mut(seq).unwrap().original = Some(original);
                self.placed();
            }
        }
    }

    fn placed(&mut self) {
        if let Some(received) = self.conn.rx_placed() {
            self.receives -= 1;
            let bytes = if received.write {
                Vec::new()
            } else {
                std::mem::take(&mut self.in_progress)
            };
            self.received.push((received, bytes));
        }
    }

    fn reap(&mut self) {
        while let Some((done, posted)) = self.conn.pop() {
            assert_eq!(done.seq, self.done.len() as u64, "in the order posted");
            self.done.push((done.status, posted));
        }
    }
}

#[derive(Clone, Copy)]
struct Path {
    /// In a thousand.
    loss: u64,
    double: u64,
    /// Longest time on the way, in microseconds.
    spread: u64,
}

struct Net {
    rng: Rng,
    path: Path,
    now: Now,
    count: u64,
    on_way: BTreeMap<(Now, u64), (usize, Vec<u8>)>,
    sides: [Side; 2],
}

impl Net {
    fn new(seed: u64, path: Path, config: Config) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let psns = [rng.next() as u32 & 0xff_ffff, rng.next() as u32 & 0xff_ffff];
        let side = |sq_psn, rq_psn| {
            Side::new(Config {
                sq_psn,
                rq_psn,
                ..config
            })
        };
        Self {
            sides: [side(psns[0], psns[1]), side(psns[1], psns[0])],
            rng,
            path,
            now: Now::from_secs(1),
            count: 0,
            on_way: BTreeMap::new(),
        }
    }

    fn transmit(&mut self) {
        for from in 0..2 {
            let (rng, on_way, count) = (&mut self.rng, &mut self.on_way, &mut self.count);
            let (now, path) = (self.now, self.path);
            self.sides[from].transmit(from, now, |packet| {
                let copies = if rng.below(1000) < path.loss {
                    0
                } else {
                    1 + u64::from(rng.below(1000) < path.double)
                };
                for _ in 0..copies {
                    *count += 1;
                    let delay = Duration::from_micros(20 + rng.below(path.spread));
                    on_way.insert((now + delay, *count), (1 - from, packet.clone()));
                }
            });
            self.sides[from].reap();
        }
    }

    /// One step: the next packet or the next deadline. Says whether there was any.
    fn step(&mut self) -> bool {
        self.transmit();
        let deadline = self
            .sides
            .iter()
            .filter_map(|side| side.conn.deadline())
            .min();
        let arrival = self.on_way.first_key_value().map(|((at, _), _)| *at);
        let Some(at) = [deadline, arrival].into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(at);
        if arrival == Some(at) {
            let (_, (to, packet)) = self.on_way.pop_first().unwrap();
            self.sides[to].receive(self.now, &packet);
        } else {
            for side in &mut self.sides {
                side.conn.expired(self.now);
            }
        }
        true
    }
}

fn random_wr(rng: &mut Rng) -> SendWr {
    let len = match rng.below(4) {
        0 => rng.below(3) as u32,
        1 => rng.below(600) as u32,
        2 => 256 * rng.below(5) as u32,
        _ => rng.below(9000) as u32,
    };
    let to = WRITES + rng.below(SPACE as u64 - 9000);
    let (imm, solicited) = (rng.next() & 0xffff_ffff, rng.below(2) == 0);
    let atomic = |op, add_or_swap, compare| Op::Atomic {
        op,
        stag: RKEY,
        to: COUNTER,
        add_or_swap,
        add_or_swap_mask: if op == AtomicOp::FetchAdd {
            0
        } else {
            u64::MAX
        },
        compare,
        compare_mask: u64::MAX,
    };
    let op = match rng.below(9) {
        0 => Op::Send {
            solicited,
            invalidate: None,
        },
        1 => Op::Send {
            solicited,
            invalidate: Some(imm as u32),
        },
        2 => Op::SendImm { imm, solicited },
        3 => Op::Write { stag: RKEY, to },
        4 => Op::WriteImm {
            stag: RKEY,
            to,
            imm,
            solicited,
        },
        5 => Op::Read {
            src_stag: RKEY,
            src_to: READS + rng.below(1000),
        },
        6 => atomic(AtomicOp::FetchAdd, imm, 0),
        7 => atomic(AtomicOp::CompareSwap, imm, rng.below(2)),
        _ => Op::Local,
    };
    assert!(supports(Service::Rc, &op));
    SendWr {
        op,
        len,
        fence: rng.below(5) == 0,
    }
}

/// What the peer of a side must have, after all its requests.
fn check(seed: u64, from: usize, side: &Side, peer: &Side) {
    let mut written = vec![0; SPACE];
    let mut counter = 0u64;
    let mut atomics = 0;
    let mut messages: VecDeque<&(Received, Vec<u8>)> = peer.received.iter().collect();
    for (seq, (status, posted)) in side.done.iter().enumerate() {
        let (seq, wr) = (seq as u64, posted.wr);
        assert!(
            matches!(status, Status::Ok { .. }),
            "seed {seed}: {status:?} of {wr:?}"
        );
        let bytes: Vec<u8> = (0..wr.len).map(|at| byte(from, seq, at)).collect();
        let expected = match wr.op {
            Op::Send {
                solicited,
                invalidate,
            } => Some((solicited, invalidate, None, false)),
            Op::SendImm { imm, solicited } => Some((solicited, None, Some(imm as u32), false)),
            Op::WriteImm { imm, solicited, .. } => Some((solicited, None, Some(imm as u32), true)),
            _ => None,
        };
        if let Some((solicited, invalidate, immediate, write)) = expected {
            let received = Received {
                len: wr.len,
                solicited,
                invalidate,
                immediate,
                write,
            };
            let (is, data) = messages.pop_front().expect("a message for each");
            assert_eq!(*is, received, "seed {seed}, request {seq}");
            if !write {
                assert!(*data == bytes, "seed {seed}, request {seq}");
            }
        }
        match wr.op {
            Op::Write { to, .. } | Op::WriteImm { to, .. } => {
                let at = (to - WRITES) as usize;
                written[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            Op::Read { src_to, .. } => {
                let right = (src_to..)
                    .zip(&posted.sink)
                    .all(|(va, b)| readable(va) == *b);
                assert!(right, "seed {seed}, request {seq}");
            }
            Op::Atomic {
                op,
                add_or_swap,
                compare,
                ..
            } => {
                atomics += 1;
                assert_eq!(posted.original, Some(counter), "seed {seed}, request {seq}");
                if op == AtomicOp::FetchAdd {
                    counter = counter.wrapping_add(add_or_swap);
                } else if counter == compare {
                    counter = add_or_swap;
                }
            }
            _ => {}
        }
    }
    assert!(
        messages.is_empty(),
        "seed {seed}: more messages than were sent"
    );
    assert!(written == peer.written, "seed {seed}: memory");
    assert_eq!(
        (counter, atomics),
        (peer.counter, peer.atomics),
        "seed {seed}"
    );
}

fn run(seed: u64, path: Path) {
    let mut net = Net::new(seed, path, CONFIG);
    let requests = 40 + net.rng.below(40) as usize;
    let mut posted = [0; 2];
    for round in 0.. {
        for (side, posted) in posted.iter_mut().enumerate() {
            if *posted < requests && net.rng.below(6) == 0 {
                let wr = random_wr(&mut net.rng);
                net.sides[side].post(wr);
                *posted += 1;
            }
            if net.rng.below(9) == 0 {
                net.sides[side].receives += 1;
            }
        }
        let busy = net.step();
        net.transmit();
        if !busy && posted == [requests; 2] {
            break;
        }
        assert!(round < 2_000_000, "seed {seed}: no end");
        assert!(
            net.sides.iter().all(|s| s.conn.state() == State::Open),
            "seed {seed}"
        );
    }
    let [a, b] = &net.sides;
    assert_eq!(
        (a.done.len(), b.done.len()),
        (requests, requests),
        "seed {seed}"
    );
    check(seed, 0, a, b);
    check(seed, 1, b, a);
}

#[test]
fn everything_arrives_once_and_in_order_whatever_the_network_does() {
    let paths = [
        (0, 0, 1),
        (10, 0, 1),
        (50, 0, 1),
        (0, 100, 200),
        (20, 20, 60),
        (0, 0, 400),
    ]
    .map(|(loss, double, spread)| Path {
        loss,
        double,
        spread,
    });
    let one = std::env::var("WEFT_SEED")
        .ok()
        .map(|seed| seed.parse().unwrap());
    let seeds = one.map_or(1..=60, |seed: u64| seed..=seed);
    for seed in seeds {
        for path in paths {
            run(seed, path);
        }
    }
}
