//! Sockets over verbs: every kind, mode and design, on shared memory and TCP, with contents checked.

use std::time::{Duration, Instant};

use weft_exs::{
    Context, Design, Errno, Event, EventKind, Kind, Memory, Mode, Options, Queue, RecvFlags,
    Region, Sink, Socket,
};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Device, LocalMode};

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug)]
struct Setup {
    local: LocalMode,
    v6: bool,
    tls: bool,
}

const fn setup(local: LocalMode, v6: bool, tls: bool) -> Setup {
    Setup { local, v6, tls }
}

const SETUPS: [Setup; 4] = [
    setup(LocalMode::Require, false, false),
    setup(LocalMode::Off, false, false),
    setup(LocalMode::Off, true, false),
    setup(LocalMode::Off, false, true),
];

fn context(setup: Setup) -> Context {
    let mut builder = Device::builder().local(setup.local);
    if setup.tls {
        builder = builder.tls(Tls::new(Identity::generate().unwrap()).unwrap());
    }
    Context::new(builder.open().unwrap()).unwrap()
}

struct Pair {
    a: Socket,
    b: Socket,
    ca: Context,
    cb: Context,
}

fn pair(setup: Setup, kind: Kind, f: impl Fn(&mut Options)) -> Pair {
    let (ca, cb) = (context(setup), context(setup));
    let listener = Socket::new(&cb, setup.v6, kind).unwrap();
    listener.set_options(&f).unwrap();
    let any = if setup.v6 { "[::1]:0" } else { "127.0.0.1:0" };
    listener.bind(any.parse().unwrap()).unwrap();
    listener.listen(8).unwrap();
    let a = Socket::new(&ca, setup.v6, kind).unwrap();
    a.set_options(&f).unwrap();
    a.connect_wait(listener.local_addr().unwrap()).unwrap();
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    assert_eq!(a.peer_addr(), listener.local_addr());
    Pair { a, b, ca, cb }
}

/// The byte at position `at` of the stream with this seed.
fn byte(seed: u64, at: u64) -> u8 {
    ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn pattern(seed: u64, from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(|at| byte(seed, at)).collect()
}

struct Rng(u64);
impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[derive(Clone, Copy)]
struct Plan {
    total: u64,
    largest: u64,
    sends: usize,
    recvs: usize,
    waitall: bool,
    region: bool,
    seed: u64,
}

/// Moves `total` bytes from one socket to the other, in operations of random sizes, with several outstanding on each side.
fn transfer(pair: &Pair, plan: Plan) {
    let Plan {
        total,
        largest,
        sends,
        recvs,
        waitall,
        region,
        seed,
    } = plan;
    let (a, b) = (pair.a.clone(), pair.b.clone());
    let qa = Queue::new(&pair.ca, sends).unwrap();
    let qb = Queue::new(&pair.cb, recvs).unwrap();
    let (ca, cb) = (pair.ca.clone(), pair.cb.clone());
    let sender = std::thread::spawn(move || {
        let mut rng = Rng(seed | 1);
        let (mut at, mut out, mut done) = (0, 0, 0);
        let mut events: Vec<Event> = Vec::new();
        while done < total {
            while out < sends && at < total {
                let len = (1 + rng.below(largest)).min(total - at) as usize;
                let bytes = pattern(seed, at, len);
                let memory = if region {
                    let region = Region::alloc(&ca, len).unwrap();
                    region.write(0, &bytes).unwrap();
                    region.whole()
                } else {
                    Memory::from(bytes)
                };
                a.send(memory, qa.sink(at)).unwrap();
                at += len as u64;
                out += 1;
            }
            let n = qa.dequeue(&mut events, sends, 1, Some(PATIENCE)).unwrap();
            assert!(n > 0, "sends stand still: {:?}", a.stats());
            for event in events.drain(..) {
                assert_eq!(event.kind, EventKind::Send);
                assert_eq!(event.token, done, "in order");
                let n = event.result.unwrap() as u64;
                if !region {
                    assert_eq!(
                        event.memory.unwrap().into_vec(),
                        pattern(seed, done, n as usize)
                    );
                }
                done += n;
                out -= 1;
            }
        }
        a.shutdown().unwrap();
    });
    let mut rng = Rng(seed ^ 0xdead_beef);
    let (mut at, mut posted, mut number) = (0, 0, 0);
    let mut events: Vec<Event> = Vec::new();
    let mut wanted = 0;
    let flags = if waitall {
        RecvFlags::WAITALL
    } else {
        RecvFlags::empty()
    };
    let mut ended = false;
    let mut lens = std::collections::VecDeque::new();
    while !ended || posted > 0 {
        while posted < recvs && !ended {
            let len = 1 + rng.below(largest) as usize;
            let memory = if region {
                Region::alloc(&cb, len).unwrap().whole()
            } else {
                Memory::from(vec![0; len])
            };
            b.recv(memory, flags, qb.sink(number)).unwrap();
            lens.push_back(len);
            number += 1;
            posted += 1;
        }
        let n = qb.dequeue(&mut events, recvs, 1, Some(PATIENCE)).unwrap();
        assert!(
            n > 0,
            "receives stand still at {at}: {:?} {:?}",
            b.stats(),
            pair.a.stats()
        );
        for event in events.drain(..) {
            posted -= 1;
            assert_eq!(event.token, wanted, "in order");
            wanted += 1;
            let n = event.result.unwrap();
            let asked = lens.pop_front().unwrap();
            if waitall && n < asked {
                assert_eq!(
                    at + n as u64,
                    total,
                    "only the end cuts a full receive short"
                );
            }
            let mut bytes = event.memory.unwrap().into_vec();
            bytes.truncate(n);
            assert_eq!(bytes, pattern(seed, at, n), "at {at}");
            at += n as u64;
            ended |= n == 0;
        }
    }
    assert_eq!(at, total);
    sender.join().unwrap();
}

#[test]
fn streams_of_every_mode() {
    for setup in SETUPS {
        for mode in [Mode::Dynamic, Mode::Published, Mode::Direct, Mode::Indirect] {
            for (sends, recvs) in [(1, 1), (2, 4), (4, 2), (8, 8)] {
                for (largest, small, waitall) in [
                    (300, 256, false),
                    (40_000, 256, true),
                    (40_000, 0, false),
                    (200_000, 4096, false),
                ] {
                    for immediate in [true, false] {
                        let pair = pair(setup, Kind::Stream, |o| {
                            o.mode = mode;
                            o.small_packet_max = small;
                            o.immediate = immediate;
                            o.buffer = 64 << 10;
                            o.credits = 16;
                        });
                        let total = largest * 20;
                        let start = Instant::now();
                        let plan = Plan {
                            total,
                            largest,
                            sends,
                            recvs,
                            waitall,
                            region: !immediate,
                            seed: largest + sends as u64,
                        };
                        transfer(&pair, plan);
                        assert!(start.elapsed() < PATIENCE);
                        let stats = pair.a.stats();
                        match mode {
                            Mode::Direct => assert_eq!(stats.indirect_sent + stats.small_sent, 0),
                            Mode::Indirect => assert_eq!(stats.direct_sent, 0),
                            Mode::Dynamic | Mode::Published => {}
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn messages_of_both_designs() {
    for setup in SETUPS {
        for design in [Design::Advert, Design::Source] {
            for small in [0, 256] {
                let pair = pair(setup, Kind::SeqPacket, |o| {
                    o.design = design;
                    o.small_packet_max = small;
                });
                let queue = Queue::new(&pair.cb, 64).unwrap();
                let sizes = [0, 1, 100, 256, 257, 5000, 100_000, 3];
                for (i, _) in sizes.iter().enumerate() {
                    let memory = Memory::from(vec![0; 60_000]);
                    pair.b
                        .recv(memory, RecvFlags::empty(), queue.sink(i as u64))
                        .unwrap();
                }
                let sent = Queue::new(&pair.ca, 64).unwrap();
                for (i, &len) in sizes.iter().enumerate() {
                    let memory = Memory::from(pattern(i as u64, 0, len));
                    pair.a.send(memory, sent.sink(i as u64)).unwrap();
                }
                let (mut events, mut sends) = (Vec::new(), Vec::new());
                // This thread drives both ends in turn.
                let end = Instant::now() + PATIENCE;
                while (events.len() < sizes.len() || sends.len() < sizes.len())
                    && Instant::now() < end
                {
                    queue.dequeue(&mut events, 64, 0, None).unwrap();
                    sent.dequeue(&mut sends, 64, 0, None).unwrap();
                }
                assert_eq!(events.len(), sizes.len(), "{setup:?} {design:?} {small}");
                assert_eq!(sends.len(), sizes.len());
                for (i, event) in events.into_iter().enumerate() {
                    let len = sizes[i].min(60_000);
                    assert_eq!((event.token, event.result), (i as u64, Ok(len)));
                    assert_eq!(event.truncated, sizes[i] > 60_000);
                    let bytes = event.memory.unwrap().into_vec();
                    assert_eq!(bytes[..len], pattern(i as u64, 0, len));
                }
                pair.a.close(Sink::Nobody).unwrap();
                let n = pair.b.recv_wait(
                    &Region::alloc(&pair.cb, 8).unwrap().whole(),
                    RecvFlags::empty(),
                );
                assert_eq!(n, Ok(0), "the end");
            }
        }
    }
}

#[test]
fn blocking_calls() {
    for setup in SETUPS {
        let pair = pair(setup, Kind::Stream, |_| {});
        let b = pair.b.clone();
        let cb = pair.cb.clone();
        let echo = std::thread::spawn(move || {
            let region = Region::alloc(&cb, 1 << 20).unwrap();
            loop {
                let n = b.recv_wait(&region.whole(), RecvFlags::empty()).unwrap();
                if n == 0 {
                    break;
                }
                assert_eq!(b.send_wait(region.slice(0, n).unwrap()), Ok(n));
            }
        });
        let region = Region::alloc(&pair.ca, 1 << 20).unwrap();
        for len in [1, 64, 5000, 1 << 20] {
            for round in 0..20 {
                let bytes = pattern(round, 0, len);
                region.write(0, &bytes).unwrap();
                assert_eq!(pair.a.send_wait(region.slice(0, len).unwrap()), Ok(len));
                let back = region.slice(0, len).unwrap();
                assert_eq!(pair.a.recv_wait(&back, RecvFlags::WAITALL), Ok(len));
                assert_eq!(back.to_vec(), bytes);
            }
        }
        pair.a
            .set_options(|o| o.recv_timeout = Some(Duration::from_millis(20)))
            .unwrap();
        assert_eq!(
            pair.a.recv_wait(&region.whole(), RecvFlags::empty()),
            Err(Errno::AGAIN)
        );
        assert_eq!(
            pair.a.recv_wait(&region.whole(), RecvFlags::DONTWAIT),
            Err(Errno::AGAIN)
        );
        pair.a.shutdown().unwrap();
        assert_eq!(pair.a.send_wait(region.whole()), Err(Errno::PIPE));
        echo.join().unwrap();
    }
}

/// Pieces of every kind, for a message that fits a small packet, and for a longer one.
#[test]
fn pieces_are_gathered_and_scattered() {
    for setup in SETUPS {
        let pair = pair(setup, Kind::Stream, |_| {});
        let region = Region::alloc(&pair.ca, 9000).unwrap();
        for len in [3, 3000] {
            let bytes = pattern(7, 0, 3 * len);
            region.write(5, &bytes[..len]).unwrap();
            let rest = Memory::Owned(bytes[len..].to_vec());
            let list = Memory::List(vec![
                region.slice(5, len).unwrap(),
                Memory::Owned(Vec::new()),
                rest,
            ]);
            let queue = Queue::new(&pair.ca, 4).unwrap();
            let mine = |token| queue.sink(token);
            let room = vec![
                Memory::Owned(vec![0; len + 1]),
                Memory::Owned(vec![0; 2 * len - 1]),
            ];
            let flags = RecvFlags::WAITALL;
            pair.b.recv(Memory::List(room), flags, mine(1)).unwrap();
            pair.a.send(list, mine(2)).unwrap();
            let mut events = Vec::new();
            while events.len() < 2 {
                let n = queue.dequeue(&mut events, 4, 1, Some(PATIENCE)).unwrap();
                assert!(n > 0, "nothing happens");
            }
            for event in events {
                assert_eq!(event.result, Ok(3 * len), "{:?}", event.kind);
                assert_eq!(event.memory.unwrap().to_vec(), bytes);
            }
        }
    }
}
