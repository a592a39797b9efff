//! Messages in segments over a network that loses, doubles and overtakes them, in virtual time, against an oracle that knows what was
//! delivered. Everything comes from one seed: `WEFT_SEED` runs one.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::Rng;
use weft_proto::dgram::{Config, Finished, Reassembler, Refusal, Source, cut};
use weft_wire::dgram::{Segment, Target};

const TIMEOUT: Duration = Duration::from_millis(50);

/// A xorshift generator.
/// What the oracle knows of a message.
struct Message {
    header: Segment,
    bytes: Vec<u8>,
    /// What the receiver's memory holds, byte by byte, if it was placed.
    placed: Vec<Option<u8>>,
    heard: Option<Instant>,
    over: bool,
}

impl Message {
    fn valid(&self) -> Vec<(u32, u32)> {
        let mut out: Vec<(u32, u32)> = Vec::new();
        for (i, byte) in self.placed.iter().enumerate() {
            let i = i as u32;
            match out.last_mut() {
                _ if byte.is_none() => {}
                Some((_, end)) if *end == i => *end += 1,
                _ => out.push((i, i + 1)),
            }
        }
        out
    }
}

struct World {
    messages: HashMap<(Source, u32), Message>,
    finished: usize,
}

impl World {
    fn check(&mut self, now: Instant, finished: &Finished<u32>) {
        let key = (finished.source, finished.header.msn);
        let message = self.messages.get_mut(&key).expect("one that was sent");
        assert!(!message.over, "{key:?} twice");
        message.over = true;
        self.finished += 1;
        assert_eq!(finished.header, message.header);
        assert_eq!(finished.buffer, finished.header.msn, "another one's buffer");
        assert_eq!(finished.valid.as_slice(), message.valid());
        for (byte, sent) in message.placed.iter().zip(&message.bytes) {
            assert!(byte.is_none_or(|byte| byte == *sent));
        }
        if finished.is_complete() {
            assert!(message.placed.iter().all(Option::is_some));
        } else {
            let heard = message.heard.expect("heard of");
            assert!(heard + TIMEOUT <= now, "given up early");
        }
    }
}

fn run(seed: u64) {
    let mut rng = Rng(seed | 1);
    let mut world = World {
        messages: HashMap::new(),
        finished: 0,
    };
    let start = Instant::now();
    // (arrival, a number that breaks ties) -> source, segment and payload
    let mut network: BTreeMap<(Instant, u64), (Source, Segment, Vec<u8>)> = BTreeMap::new();
    let (loss, double, spread) = (rng.below(20), rng.below(20), 1 + rng.below(80));
    for n in 0..3 {
        let source = Source {
            addr: SocketAddr::from(([127, 0, 0, 1], 1000 + n / 2)),
            qp_num: 5 + u32::from(n),
            incarnation: rng.next() as u32,
        };
        // Numbers may begin anywhere, and pass through 0.
        let first = (u32::MAX - 20).wrapping_add(u32::from(n) * 40);
        let mut sent = start;
        for i in 0..200 {
            let len = match rng.below(4) {
                0 => rng.below(3) as u32,
                1 => rng.below(300) as u32,
                _ => rng.below(5000) as u32,
            };
            let bytes: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
            let target = rng.percent(50).then(|| Target {
                stag: rng.next() as u32,
                to: rng.below(1 << 40),
            });
            let header = Segment {
                dst_qp: 1,
                src_qp: source.qp_num,
                qkey: 2,
                incarnation: source.incarnation,
                msn: first.wrapping_add(i),
                len,
                offset: 0,
                target,
                imm: rng.percent(10).then(|| rng.next()),
                solicited: rng.percent(10),
                reliable: None,
            };
            for (offset, part) in cut(len, 1 + rng.below(900) as usize) {
                let segment = Segment { offset, ..header };
                let part = bytes[offset as usize..(offset + part) as usize].to_vec();
                let copies = if rng.percent(loss) {
                    0
                } else {
                    1 + usize::from(rng.percent(double))
                };
                for _ in 0..copies {
                    let at = sent + Duration::from_millis(rng.below(spread));
                    network.insert((at, rng.next()), (source, segment, part.clone()));
                }
            }
            sent += Duration::from_micros(rng.below(3000));
            let message = Message {
                header,
                placed: vec![None; bytes.len()],
                bytes,
                heard: None,
                over: false,
            };
            world.messages.insert((source, header.msn), message);
        }
    }
    let config = Config {
        timeout: TIMEOUT,
        max_open: 1000,
        max_open_per_host: 1000,
        max_ranges: 10_000,
        ..Config::default()
    };
    let mut machine = Reassembler::new(config);
    let mut last = start;
    while let Some(((now, _), (source, segment, bytes))) = network.pop_first() {
        last = now;
        assert!(machine.next_timeout().is_some() == (machine.open() > 0));
        while let Some(finished) = machine.expire(now) {
            world.check(now, &finished);
        }
        let message = world
            .messages
            .get_mut(&(source, segment.msn))
            .expect("sent");
        let at = segment.offset as usize;
        let there = message.placed.get(at).is_some_and(Option::is_some);
        let ticket = match machine.admit(&source, &segment, bytes.len()) {
            Ok(ticket) => ticket,
            Err(refusal) => {
                let expected = if message.over {
                    Refusal::Late
                } else {
                    Refusal::Duplicate
                };
                assert_eq!(refusal, expected);
                assert!(message.over || there);
                continue;
            }
        };
        assert!(!message.over && !there);
        assert_eq!(ticket.opens(), message.heard.is_none());
        for (slot, byte) in message.placed[at..].iter_mut().zip(&bytes) {
            *slot = Some(*byte);
        }
        message.heard = Some(now);
        let (whole, evicted) = machine.placed(now, ticket, || segment.msn);
        assert!(evicted.is_none(), "there was room");
        if let Some(whole) = whole {
            assert!(whole.is_complete());
            world.check(now, &whole);
        }
    }
    let end = last + TIMEOUT;
    while let Some(finished) = machine.expire(end) {
        world.check(end, &finished);
    }
    assert_eq!((machine.open(), machine.next_timeout()), (0, None));
    let heard = world.messages.values().filter(|m| m.heard.is_some());
    assert_eq!(
        heard.count(),
        world.finished,
        "each message that was heard of is over once"
    );
    assert!(world.finished > 0);
}

#[test]
fn messages_survive_the_network() {
    if let Ok(seed) = std::env::var("WEFT_SEED") {
        return run(seed.parse().expect("a number"));
    }
    for seed in 1..60 {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "run it again with WEFT_SEED={seed}");
    }
}

/// A flood of sources that are not there, and of messages that are never whole: the state stays within its limits, and a peer that sends
/// in the middle of it is heard.
#[test]
fn a_flood_does_not_grow_the_state_and_keeps_nobody_out() {
    let config = Config {
        max_sources: 500,
        max_open: 50,
        max_open_per_host: 10,
        ..Config::default()
    };
    let mut machine: Reassembler<()> = Reassembler::new(config);
    let mut rng = Rng(99);
    let now = Instant::now();
    let honest = Source {
        addr: "10.1.2.3:4".parse().expect("an address"),
        qp_num: 1,
        incarnation: 1,
    };
    let header = |msn: u32, len: u32| Segment {
        dst_qp: 1,
        src_qp: 1,
        qkey: 1,
        incarnation: 1,
        msn,
        len,
        offset: 0,
        target: None,
        imm: None,
        solicited: false,
        reliable: None,
    };
    let (mut given_up, mut whole) = (0, 0);
    let parts: Vec<_> = cut(10_000, 1000).collect();
    let crowd = std::net::IpAddr::from([192, 168, 0, 1]);
    for round in 0..1000 {
        let at = now + Duration::from_micros(round * 10);
        // Each of the honest peer's segments comes after several of the flood's, and the same a little later.
        for &(offset, part) in &parts {
            for _ in 0..4 {
                let addr = if rng.percent(50) {
                    [192, 168, 0, 1]
                } else {
                    (rng.next() as u32).to_be_bytes()
                };
                let source = Source {
                    addr: SocketAddr::from((addr, rng.next() as u16)),
                    qp_num: rng.next() as u32,
                    incarnation: rng.next() as u32,
                };
                let ticket = machine.admit(&source, &header(1, 100), 10);
                let (none, evicted) = machine.placed(at, ticket.expect("new"), || ());
                assert!(none.is_none(), "it is not whole");
                if let Some(evicted) = evicted {
                    given_up += usize::from(evicted.source.addr.ip() == crowd);
                    assert_ne!(evicted.source, honest, "it was heard of just now");
                }
                assert!(machine.open() <= 50 && machine.sources() <= 500);
            }
            let segment = Segment {
                offset,
                ..header(round as u32 + 1, 10_000)
            };
            let ticket = machine
                .admit(&honest, &segment, part as usize)
                .expect("heard");
            whole += usize::from(machine.placed(at, ticket, || ()).0.is_some());
            assert_eq!(
                machine.admit(&honest, &segment, part as usize).map(|_| ()),
                Err(if part + offset == 10_000 {
                    Refusal::Late
                } else {
                    Refusal::Duplicate
                }),
                "it is remembered"
            );
        }
    }
    assert_eq!(whole, 1000);
    assert!(given_up > 10_000, "one host cannot have all");
    assert!(machine.clear().len() <= 50);
}

#[test]
fn a_message_in_too_many_pieces_stays_small() {
    let config = Config {
        max_ranges: 4,
        ..Config::default()
    };
    let mut machine: Reassembler<()> = Reassembler::new(config);
    let source = Source {
        addr: "10.1.2.3:4".parse().expect("an address"),
        qp_num: 1,
        incarnation: 1,
    };
    let now = Instant::now();
    let mut part = |offset: u32, len: usize| {
        let segment = Segment {
            dst_qp: 1,
            src_qp: 1,
            qkey: 1,
            incarnation: 1,
            msn: 1,
            len: 100,
            offset,
            target: None,
            imm: None,
            solicited: false,
            reliable: None,
        };
        let ticket = machine.admit(&source, &segment, len)?;
        Ok(machine.placed(now, ticket, || ()).0.is_some())
    };
    for offset in [0, 20, 40, 60] {
        assert_eq!(part(offset, 10), Ok(false));
    }
    assert_eq!(part(80, 10), Err(Refusal::Fragmented));
    assert_eq!(part(5, 10), Err(Refusal::Overlap));
    assert_eq!(part(15, 10), Err(Refusal::Overlap));
    assert_eq!(part(95, 6), Err(Refusal::Contradiction), "past the end");
    assert_eq!(part(u32::MAX, 6), Err(Refusal::Contradiction));
    for offset in [10, 70, 30, 50, 90] {
        assert_eq!(part(offset, 10), Ok(false), "it joins two");
    }
    assert_eq!(part(80, 10), Ok(true));
}
