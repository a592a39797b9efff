//! Two machines against each other, with messages and memory in between.

use super::*;
use crate::wire::{WeftExtensions, key_and_len};
use proptest::prelude::*;

/// A side with its memory; addresses are offsets.
struct Side {
    machine: Endpoint,
    buffer: Vec<u8>,
    table: Vec<u8>,
    out: VecDeque<Out>,
    stream: u64,
    read: u64,
}

enum Out {
    /// Into the buffer, or the table.
    Bytes(bool, u64, Vec<u8>),
    Word(u32),
}

const TABLE: u32 = 7;
const BUFFER: u32 = 8;

fn greeting(config: Config, kin: bool) -> Greeting {
    Greeting {
        order: Order::HOST,
        credits: config.credits,
        table: Buffer {
            addr: 0,
            key: TABLE,
            len: 2,
        },
        data: Buffer {
            addr: 0,
            key: BUFFER,
            len: config.half,
        },
        maps: config.maps,
        kin: kin.then_some(WeftExtensions { immediate: false }),
    }
}

/// The byte at a position of a stream.
fn byte(at: u64) -> u8 {
    (at ^ (at >> 8)) as u8
}

impl Side {
    fn new(config: Config, peer: Greeting) -> Side {
        Side {
            machine: Endpoint::new(config, peer),
            buffer: vec![0; config.half as usize * 2],
            table: vec![0; 2 * ENTRY_LEN + MAP_LEN * usize::from(config.maps)],
            out: VecDeque::new(),
            stream: 0,
            read: 0,
        }
    }

    fn send(&mut self, max: u32) {
        if let Some(slot) = self.machine.entry_wanted() {
            let at = slot * ENTRY_LEN;
            let word = |at: usize| u64::from_ne_bytes(self.table[at..at + 8].try_into().unwrap());
            let (key, len) = key_and_len(word(at + 8));
            if len > 0 {
                let addr = word(at);
                self.table[at + 8..at + 16].fill(0);
                self.machine.entry(Buffer { addr, key, len });
            }
        }
        if let Some(write) = self.machine.write(max) {
            assert_eq!(write.key, BUFFER);
            let bytes = (0..write.len).map(|i| byte(self.stream + u64::from(i)));
            self.out
                .push_back(Out::Bytes(true, write.addr, bytes.collect()));
            self.out
                .push_back(Out::Word(Message::Data(write.len).encode()));
            self.stream += u64::from(write.len);
        }
    }

    fn grant(&mut self) {
        while let Some(grant) = self.machine.grant() {
            if let Some(entry) = grant.entry {
                assert_eq!(entry.key, TABLE);
                let buffer = Buffer {
                    addr: u64::from(entry.off),
                    key: BUFFER,
                    len: entry.len,
                };
                let bytes = self.machine.order().entry(buffer).to_vec();
                self.out.push_back(Out::Bytes(false, entry.addr, bytes));
            }
            self.out.push_back(Out::Word(grant.message.encode()));
        }
    }

    fn read(&mut self, max: usize) {
        let (at, run) = self.machine.next_run(0);
        let n = run.min(max);
        for i in 0..n {
            assert_eq!(self.buffer[at + i], byte(self.read + i as u64));
        }
        self.read += n as u64;
        self.machine.consumed(n);
    }

    fn deliver(&mut self, out: Out) {
        match out {
            Out::Bytes(buffer, addr, bytes) => {
                let memory = if buffer {
                    &mut self.buffer
                } else {
                    &mut self.table
                };
                memory[addr as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            Out::Word(word) => {
                self.machine.heard(word).unwrap();
            }
        }
    }
}

fn pair(a: Config, b: Config, kin: bool) -> [Side; 2] {
    [
        Side::new(a, greeting(b, kin)),
        Side::new(b, greeting(a, kin)),
    ]
}

fn config(credits: u16, half: u32) -> Config {
    Config {
        credits,
        half,
        maps: 0,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(bool, u32),
    Grant(bool),
    Read(bool, usize),
    Deliver(bool, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (any::<bool>(), 1..80_u32).prop_map(|(side, n)| Step::Send(side, n)),
        any::<bool>().prop_map(Step::Grant),
        (any::<bool>(), 1..80_usize).prop_map(|(side, n)| Step::Read(side, n)),
        (any::<bool>(), 1..8_usize).prop_map(|(side, n)| Step::Deliver(side, n)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For any order of events: the bytes read are the bytes sent, no side breaks a rule, and the connection does not stall.
    #[test]
    fn streams_arrive_in_any_order_of_events(
        credits in (4..40_u16, 4..40_u16),
        halves in (1..64_u32, 1..64_u32),
        kin in any::<bool>(),
        steps in prop::collection::vec(step(), 0..400),
    ) {
        let mut sides = pair(config(credits.0, halves.0), config(credits.1, halves.1), kin);
        for step in steps {
            match step {
                Step::Send(side, n) => sides[usize::from(side)].send(n),
                Step::Grant(side) => sides[usize::from(side)].grant(),
                Step::Read(side, n) => sides[usize::from(side)].read(n),
                Step::Deliver(from, n) => {
                    for _ in 0..n {
                        let Some(out) = sides[usize::from(from)].out.pop_front() else { break };
                        sides[usize::from(!from)].deliver(out);
                    }
                }
            }
        }
        // From wherever they are, both go on: a thousand bytes each way.
        let goals = [sides[0].stream + 1000, sides[1].stream + 1000];
        for _ in 0..20_000 {
            for i in 0..2 {
                if sides[i].stream < goals[i] {
                    sides[i].send(50);
                }
                sides[i].read(1000);
                sides[i].grant();
                while let Some(out) = sides[i].out.pop_front() {
                    sides[1 - i].deliver(out);
                }
            }
        }
        prop_assert!(sides[0].read >= goals[1] && sides[1].read >= goals[0]);
    }
}

#[test]
fn a_peer_is_held_to_credits_and_room() {
    let [mut a, _] = pair(config(4, 10), config(4, 10), true);
    let data = |n| Message::Data(n).encode();
    assert_eq!(a.machine.heard(data(11)), Err(Violation::TooMuch(11)));
    // Messages of nothing count as well.
    let [mut a, _] = pair(config(4, 10), config(4, 10), true);
    for _ in 0..4 {
        a.machine.heard(data(0)).unwrap();
    }
    assert_eq!(a.machine.heard(data(1)), Err(Violation::NoCredit));
    assert_eq!(a.machine.readable(), 0);
    a.grant();
    a.machine.heard(data(10)).unwrap();
    assert_eq!(
        a.machine.heard(Message::Map(0).encode()),
        Err(Violation::NoSuchMap(0))
    );
}

#[test]
fn others_credits_are_not_used_up() {
    let [mut a, _] = pair(config(4, 10), config(384, 1 << 16), false);
    let mut n = 0;
    while a.machine.write(1).is_some() {
        n += 1;
    }
    assert_eq!(n, 376);
    // The kernel's sockets do not return the credit of an iomap entry, so it is not counted.
    let maps = Config {
        maps: 3,
        ..config(384, 10)
    };
    let [mut a, _] = pair(config(4, 10), maps, false);
    assert_eq!(a.machine.map(3), None);
    let place = a.machine.map(2).unwrap();
    assert_eq!((place.addr, place.len), (2 * 16 + 2 * 24, 24));
    a.machine.heard(Message::Credit(384).encode()).unwrap();
    assert_eq!(a.machine.sent, 0);
}

#[test]
fn ends_are_told_once() {
    let both = config(4, 10);
    let [mut a, mut b] = pair(both, both, true);
    assert_eq!(a.machine.shut_down(), Some(Message::Shutdown));
    assert_eq!(a.machine.shut_down(), None);
    b.machine.heard(Message::Shutdown.encode()).unwrap();
    assert!(b.machine.peer_is_done() && !b.machine.is_over());
    assert_eq!(b.machine.shut_down(), Some(Message::Disconnect));
    assert_eq!(b.machine.leave(), None);
    a.machine.heard(Message::Disconnect.encode()).unwrap();
    assert!(a.machine.is_over() && b.machine.is_over());
    assert_eq!(a.machine.leave(), None);
    assert_eq!(a.machine.grant(), None);
}
