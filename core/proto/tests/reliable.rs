//! The reliable mode over a network that loses, doubles and overtakes datagrams, in virtual time, against an oracle: each message is delivered once,
//! in the order of its pair, with its bytes. Everything comes from one seed: `WEFT_SEED` runs one.

use std::collections::BTreeMap;
use std::hash::RandomState;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::common::Rng;
use weft_proto::dgram::{
    Admit, Failure, Flows, FlowsConfig, Now, Pair, PairConfig, Resumed, Spot, Transmit,
    WindowConfig,
};
use weft_wire::dgram::{Control, FaultCode, Flow, Packet, Segment, Target};

const RECEIVER: u32 = 1;
const VIA: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const MS: Duration = Duration::from_millis(1);

/// The byte at this place of a message.
fn byte(sender: usize, message: usize, offset: u32) -> u8 {
    (sender * 31 + message * 7 + offset as usize) as u8
}

enum Datagram {
    Control(Control),
    Segment(Segment, Vec<u8>),
}

/// To the receiver from a sender, or the other way.
type Travelling = (bool, usize, Datagram);

struct Network {
    rng: Rng,
    on_way: BTreeMap<(Now, u64), Travelling>,
    count: u64,
    /// In a thousand.
    loss: u64,
    double: u64,
    /// Longest time on the way, in microseconds.
    spread: u64,
    bytes: [usize; 2],
}

impl Network {
    fn send(&mut self, now: Now, make: impl Fn() -> Travelling) {
        let copies = if self.rng.below(1000) < self.loss {
            0
        } else {
            1 + u64::from(self.rng.below(1000) < self.double)
        };
        for _ in 0..copies {
            let at = now + Duration::from_micros(50 + self.rng.below(self.spread));
            self.count += 1;
            self.on_way.insert((at, self.count), make());
        }
    }
}

fn addr(sender: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, sender as u8], 1000))
}

struct Sender {
    pair: Pair<usize>,
    lens: Vec<u32>,
    posted: usize,
    done: Vec<usize>,
}

#[derive(Default)]
struct Receiver {
    /// Receives that may be used.
    receives: usize,
    open: BTreeMap<usize, Vec<u8>>,
    delivered: BTreeMap<usize, Vec<(u32, Vec<u8>)>>,
}

type Machine = Flows<usize, Vec<u8>>;

impl Receiver {
    fn take(&mut self, machine: &mut Machine, mut spot: Spot, mut bytes: Vec<u8>) {
        loop {
            let sender = spot.segment().src_qp as usize;
            if spot.opens() && self.receives == 0 {
                return machine.starve(&spot, || (bytes.clone(), bytes.len()));
            }
            self.receives -= usize::from(spot.opens());
            let memory = self.open.entry(sender).or_default();
            assert_eq!(memory.len(), spot.segment().offset as usize);
            memory.extend_from_slice(&bytes);
            let buffer = spot.opens().then_some(sender);
            if let Some(whole) = machine.placed(&spot, buffer) {
                assert_eq!(whole.buffer, sender);
                let memory = self.open.remove(&sender).expect("open");
                assert_eq!(whole.header.len as usize, memory.len());
                let delivered = self.delivered.entry(sender).or_default();
                delivered.push((whole.header.msn, memory));
            }
            match machine.next_kept(&spot) {
                Some(next) => (spot, bytes) = next,
                None => return,
            }
        }
    }
}

fn config(segment: usize) -> PairConfig {
    PairConfig {
        window: WindowConfig::default(),
        not_ready: None,
        segment,
    }
}

fn emit(network: &mut Network, now: Now, at: usize, sender: &mut Sender) {
    sender.pair.tick(now);
    while sender.pair.ready(now).is_some() {
        let Some(transmit) = sender.pair.transmit(now) else {
            panic!("it was ready");
        };
        match transmit {
            Transmit::Control(control) => {
                network.bytes[0] += 32;
                network.send(now, || (true, at, Datagram::Control(control)));
            }
            Transmit::Segment {
                token,
                incarnation,
                packet,
                msn,
                message,
                offset,
                len,
            } => {
                assert_eq!(message, sender.lens[*token]);
                let segment = Segment {
                    dst_qp: RECEIVER,
                    src_qp: at as u32,
                    qkey: 2,
                    incarnation,
                    msn,
                    len: message,
                    offset,
                    target: token.is_multiple_of(3).then_some(Target { stag: 1, to: 9 }),
                    imm: None,
                    solicited: false,
                    reliable: Some(packet),
                };
                let (token, from) = (*token, offset);
                let payload = || (from..from + len).map(|i| byte(at, token, i)).collect();
                network.bytes[0] += 56 + len as usize;
                network.send(now, || (true, at, Datagram::Segment(segment, payload())));
            }
        }
    }
}

fn answer(network: &mut Network, now: Now, machine: &mut Machine) {
    for (to, via, control) in machine.answers() {
        assert_eq!(via, VIA);
        let IpAddr::V4(ip) = to.ip() else {
            panic!("an address that nobody has")
        };
        let at = usize::from(ip.octets()[3]);
        network.bytes[1] += 32;
        network.send(now, || (false, at, Datagram::Control(control)));
    }
}

fn run(seed: u64) {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut network = Network {
        loss: rng.below(51),
        double: rng.below(51),
        spread: 1 + rng.below(5000),
        on_way: BTreeMap::new(),
        count: 0,
        bytes: [0; 2],
        rng: Rng(rng.next() | 1),
    };
    let mut machine: Machine = Flows::new(
        FlowsConfig {
            max_kept: 20_000,
            max_kept_per_flow: 10_000,
            ..FlowsConfig::default()
        },
        RandomState::new(),
    );
    let mut receiver = Receiver::default();
    let mut senders: Vec<Sender> = (0..4)
        .map(|at| Sender {
            pair: Pair::new(config(1 + rng.below(1500) as usize), at, RECEIVER, 2),
            lens: (0..120)
                .map(|_| match rng.below(4) {
                    0 => 0,
                    1 => rng.below(3000) as u32,
                    _ => rng.below(200) as u32,
                })
                .collect(),
            posted: 0,
            done: Vec::new(),
        })
        .collect();
    let all: usize = senders.iter().map(|s| s.lens.len()).sum();
    let mut now = MS;
    let mut steps = 0;
    while senders.iter().any(|s| s.done.len() < s.lens.len()) {
        steps += 1;
        assert!(steps < 5_000_000, "no end at {now:?}");
        for (at, sender) in senders.iter_mut().enumerate() {
            while sender.posted < sender.lens.len() && rng.below(4) > 0 {
                let (token, len) = (sender.posted, sender.lens[sender.posted]);
                sender.pair.push(now, token, len, || 77 + at as u32);
                sender.posted += 1;
            }
            emit(&mut network, now, at, sender);
            assert_eq!(sender.pair.failure(), None);
        }
        // The receiver's program now and then has receives, and then not for a while.
        if rng.below(20) == 0 {
            receiver.receives += rng.below(12) as usize;
            // Of a shared queue nobody tells the machine: the senders' next tries count.
            if !seed.is_multiple_of(3) {
                loop {
                    match machine.resume(false) {
                        Resumed::Nobody => break,
                        Resumed::Told => {}
                        Resumed::Segment(spot, bytes) => {
                            receiver.take(&mut machine, spot.clone(), bytes);
                            if !machine.resumed(false, &spot) {
                                break;
                            }
                        }
                    }
                }
            }
        }
        answer(&mut network, now, &mut machine);
        now += Duration::from_micros(rng.below(400));
        // Several datagrams are often taken in at once.
        while let Some(first) = network.on_way.first_entry()
            && first.key().0 <= now
        {
            let (to_receiver, at, datagram) = first.remove();
            match datagram {
                Datagram::Control(Control::Hello { flow, .. }) => {
                    assert!(to_receiver);
                    let control = machine.welcome(now, addr(at), &flow);
                    network.send(now, || (false, at, Datagram::Control(control)));
                }
                Datagram::Control(control) => {
                    let Sender { pair, done, .. } = &mut senders[at];
                    assert!(pair.control(now, &control, |token| done.push(token)));
                }
                Datagram::Segment(segment, bytes) => {
                    let admit = machine.admit(now, addr(at), VIA, &segment, bytes.len(), || {
                        (bytes.clone(), bytes.len())
                    });
                    if let Admit::Next(spot) = admit {
                        receiver.take(&mut machine, spot, bytes);
                    }
                }
            }
            assert!(machine.held() <= 20_000);
        }
    }
    let mut count = 0;
    for (at, sender) in senders.iter().enumerate() {
        assert_eq!(sender.done, (0..sender.lens.len()).collect::<Vec<_>>());
        let delivered = &receiver.delivered[&at];
        assert_eq!(delivered.len(), sender.lens.len());
        for (token, (msn, bytes)) in delivered.iter().enumerate() {
            assert_eq!(
                (*msn as usize, bytes.len()),
                (token + 1, sender.lens[token] as usize)
            );
            for (i, b) in bytes.iter().enumerate() {
                assert_eq!(*b, byte(at, token, i as u32));
            }
        }
        count += delivered.len();
    }
    assert_eq!((count, machine.held()), (all, 0));
    assert!(receiver.open.is_empty());
}

#[test]
fn messages_are_delivered_once_and_in_order() {
    if let Ok(seed) = std::env::var("WEFT_SEED") {
        return run(seed.parse().expect("a number"));
    }
    for seed in 1..60 {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "run it again with WEFT_SEED={seed}");
    }
}

/// One sender and one receiver that hear each other.
struct Two {
    pair: Pair<usize>,
    machine: Machine,
    now: Now,
    done: Vec<usize>,
    sent: Vec<(Segment, Vec<u8>)>,
}

impl Two {
    fn new(config: PairConfig) -> Two {
        Two {
            pair: Pair::new(config, 7, RECEIVER, 2),
            machine: Flows::new(FlowsConfig::default(), RandomState::new()),
            now: MS,
            done: Vec::new(),
            sent: Vec::new(),
        }
    }

    fn segment(incarnation: u32, msn: u32, len: u32, offset: u32, packet: Packet) -> Segment {
        Segment {
            dst_qp: RECEIVER,
            src_qp: 7,
            qkey: 2,
            incarnation,
            msn,
            len,
            offset,
            target: None,
            imm: None,
            solicited: false,
            reliable: Some(packet),
        }
    }

    /// What is to go out, goes out: control datagrams are answered, segments are what is returned.
    fn transmit(&mut self) -> Vec<(Segment, Vec<u8>)> {
        let mut segments = Vec::new();
        while self.pair.ready(self.now).is_some() {
            match self.pair.transmit(self.now) {
                Some(Transmit::Control(Control::Hello { flow, .. })) => {
                    let control = self.machine.welcome(self.now, addr(7), &flow);
                    assert!(self.pair.control(self.now, &control, |_| ()));
                }
                Some(Transmit::Segment {
                    incarnation,
                    packet,
                    msn,
                    message,
                    offset,
                    len,
                    ..
                }) => {
                    let segment = Two::segment(incarnation, msn, message, offset, packet);
                    segments.push((segment, vec![0; len as usize]));
                }
                other => panic!("{other:?}"),
            }
        }
        self.sent.extend_from_slice(&segments);
        segments
    }

    fn admit(&mut self, segment: &Segment) -> Admit {
        let take = || (Vec::new(), 0);
        self.machine
            .admit(self.now, addr(7), VIA, segment, segment.len as usize, take)
    }

    fn answer(&mut self) -> Vec<Control> {
        let answers = self.machine.answers();
        let done = &mut self.done;
        for (_, _, control) in &answers {
            self.pair
                .control(self.now, control, |token| done.push(token));
        }
        answers.into_iter().map(|(_, _, control)| control).collect()
    }
}

#[test]
fn a_refused_message_ends_the_pair_with_its_number() {
    let mut two = Two::new(config(1000));
    for token in 0..3 {
        two.pair.push(two.now, token, 10, || 5);
    }
    let segments = two.transmit();
    assert_eq!(segments.len(), 3);
    let Admit::Next(spot) = two.admit(&segments[0].0) else {
        panic!("the first one");
    };
    assert!(two.machine.placed(&spot, Some(1)).is_some());
    let Admit::Next(spot) = two.admit(&segments[1].0) else {
        panic!("the second one");
    };
    assert_eq!(two.machine.refuse(&spot, FaultCode::Access), None);
    assert_eq!(two.admit(&segments[2].0), Admit::Done, "nothing behind it");
    two.answer();
    assert_eq!(two.done, [0], "what came before is delivered");
    let code = FaultCode::Access;
    assert_eq!(two.pair.failure(), Some(Failure::Refused { code, msn: 2 }));
    assert_eq!(two.pair.drain().collect::<Vec<_>>(), [1, 2]);
    assert!(two.pair.ready(two.now).is_none());
    // The program resets the pair: another flow, which takes the place of the dead one.
    two.pair = Pair::new(config(1000), 7, RECEIVER, 2);
    two.now += MS;
    two.pair.push(two.now, 9, 10, || 6);
    let again = two.transmit();
    assert!(matches!(two.admit(&again[0].0), Admit::Next(_)));
    // What the network kept of the old one does not begin it again.
    assert_eq!(two.admit(&segments[0].0), Admit::Done);
    let faults = two.answer();
    assert!(faults.iter().any(|control| matches!(
        control,
        Control::Fault {
            flow: Flow { incarnation: 5, .. },
            code: FaultCode::Unknown,
            ..
        }
    )));
    assert_eq!(two.pair.failure(), None, "that was not about this flow");
}

#[test]
fn a_peer_that_does_not_answer_is_given_up_and_one_without_receives_is_not() {
    let mut two = Two::new(config(1000));
    two.pair.push(two.now, 0, 10, || 5);
    let segments = two.transmit();
    let Admit::Next(spot) = two.admit(&segments[0].0) else {
        panic!("the first one");
    };
    two.machine.starve(&spot, || (Vec::new(), 10));
    two.answer();
    // For an hour it has no receive, and is asked ever more rarely.
    let mut asked = 0;
    while two.now < Duration::from_hours(1) {
        two.now = two.pair.next_time().expect("it is asked").max(two.now);
        two.pair.tick(two.now);
        for (segment, _) in two.transmit() {
            asked += 1;
            let Admit::Next(spot) = two.admit(&segment) else {
                panic!("there may be a receive");
            };
            two.machine.starve(&spot, || (Vec::new(), 10));
            assert_eq!(two.machine.held(), 10, "it is kept once");
        }
        two.answer();
        assert_eq!(two.pair.failure(), None);
    }
    assert!((30_000..40_000).contains(&asked), "{asked}");
    let Resumed::Segment(spot, _) = two.machine.resume(false) else {
        panic!("it was kept");
    };
    assert!(two.machine.placed(&spot, Some(1)).is_some());
    assert!(two.machine.resumed(false, &spot));
    assert_eq!(two.machine.resume(false), Resumed::Nobody);
    two.answer();
    assert_eq!(two.done, [0]);
    // Now it is gone.
    two.pair.push(two.now, 1, 10, || 6);
    let start = two.now;
    let mut sent = 0;
    while two.pair.failure().is_none() {
        sent += two.transmit().len();
        two.now = two.pair.next_time().expect("a time").max(two.now);
        two.pair.tick(two.now);
    }
    assert_eq!(two.pair.failure(), Some(Failure::Unreachable));
    let waited = two.now.saturating_sub(start);
    assert!(
        (10..30).contains(&waited.as_secs()) && sent < 20,
        "{waited:?}, {sent}"
    );
}

#[test]
fn a_flow_that_was_forgotten_is_not_begun_by_what_the_network_kept() {
    let mut two = Two::new(config(1000));
    two.pair.push(two.now, 0, 10, || 5);
    let first = two.transmit().remove(0).0;
    let Admit::Next(spot) = two.admit(&first) else {
        panic!("the first one");
    };
    assert!(two.machine.placed(&spot, Some(1)).is_some());
    two.answer();
    assert_eq!((two.done.len(), two.machine.len()), (1, 1));
    assert_eq!(two.admit(&first), Admit::Done, "a duplicate");
    two.now += Duration::from_secs(61);
    two.machine.expire(two.now);
    assert!(two.machine.is_empty());
    assert_eq!(two.admit(&first), Admit::Done);
    assert!(two.machine.is_empty());
    // The sender has not used its flow for as long: it begins another one, and all is well.
    two.pair.push(two.now, 1, 10, || 6);
    let next = two.transmit().remove(0).0;
    assert_eq!((next.incarnation, next.msn), (6, 1));
    assert!(matches!(two.admit(&next), Admit::Next(_)));
}

#[test]
fn nobody_gets_state_without_a_cookie_and_a_flood_not_more_than_there_is() {
    let config = FlowsConfig {
        max_flows: 100,
        max_flows_per_host: 40,
        ..FlowsConfig::default()
    };
    let mut machine: Machine = Flows::new(config, RandomState::new());
    let mut rng = Rng(5);
    let none = || -> (Vec<u8>, usize) { panic!("nothing is kept") };
    let segment =
        |incarnation, cookie| Two::segment(incarnation, 1, 10, 0, Packet { psn: 1, cookie });
    for _ in 0..100_000 {
        let from = SocketAddr::from(((rng.next() as u32).to_be_bytes(), rng.next() as u16));
        let forged = segment(rng.next() as u32, rng.next());
        assert_eq!(machine.admit(MS, from, VIA, &forged, 10, none), Admit::Done);
        assert!(machine.is_empty());
    }
    assert!(machine.answers().len() <= 64);
    // Hosts that have their addresses, with as many ports as they like.
    let mut begin = |host: u8, port: u16, now: Now| {
        let from = SocketAddr::from(([10, 9, 9, host], port));
        let flow = Flow {
            dst_qp: RECEIVER,
            src_qp: 7,
            incarnation: 3,
        };
        let Control::Welcome { cookie, .. } = machine.welcome(now, from, &flow) else {
            panic!("a cookie");
        };
        // Another's cookie is none.
        let other = SocketAddr::from(([10, 9, 8, host], port));
        assert_eq!(
            machine.admit(now, other, VIA, &segment(3, cookie), 10, none),
            Admit::Done
        );
        let admitted = machine.admit(now, from, VIA, &segment(3, cookie), 10, none);
        assert!(machine.len() <= 100);
        matches!(admitted, Admit::Next(_))
    };
    for host in 1..4 {
        let begun = (1..200).filter(|&port| begin(host, port, MS)).count();
        assert_eq!(begun, [40, 40, 20][usize::from(host) - 1]);
    }
    assert!(!begin(9, 1, MS), "as many as there may be");
    assert!(begin(9, 1, Duration::from_mins(2)), "they have gone");
}

#[test]
fn a_receive_that_stands_still_goes_to_another() {
    let mut two = Two::new(config(10));
    two.pair.push(two.now, 0, 100, || 5);
    let segments = two.transmit();
    let take = || (Vec::new(), 0);
    let now = two.now;
    let Admit::Next(spot) = two
        .machine
        .admit(now, addr(7), VIA, &segments[0].0, 10, take)
    else {
        panic!("the first one");
    };
    assert_eq!(two.machine.placed(&spot, Some(4)), None);
    assert_eq!(
        two.machine.evict(two.now, |_| true),
        None,
        "it has just come"
    );
    two.now += Duration::from_secs(6);
    // What has come before does not keep it.
    two.machine
        .admit(two.now, addr(7), VIA, &segments[0].0, 10, take);
    assert_eq!(two.machine.evict(two.now, |buffer| *buffer != 4), None);
    assert_eq!(two.machine.evict(two.now, |_| true), None, "not so soon");
    two.now += Duration::from_secs(1);
    assert_eq!(
        two.machine
            .evict(two.now, |_| true)
            .map(|m| (m.buffer, m.filled)),
        Some((4, 10))
    );
    let now = two.now;
    let late = two
        .machine
        .admit(now, addr(7), VIA, &segments[1].0, 10, take);
    assert_eq!(late, Admit::Done);
    two.answer();
    let code = FaultCode::Unknown;
    assert_eq!(two.pair.failure(), Some(Failure::Refused { code, msn: 1 }));
}

/// A hostile sender's segments contradict each other: its flow ends, and nobody else's.
#[test]
fn contradictions_end_a_flow() {
    for bad in 0..5 {
        let mut two = Two::new(config(10));
        two.pair.push(two.now, 0, 100, || 5);
        let segments = two.transmit();
        let now = two.now;
        let take = || (Vec::new(), 0);
        let mut admit =
            |segment: &Segment, len| two.machine.admit(now, addr(7), VIA, segment, len, take);
        let Admit::Next(spot) = admit(&segments[0].0, 10) else {
            panic!("the first one");
        };
        assert_eq!(two.machine.placed(&spot, Some(4)), None);
        let mut segment = segments[1].0;
        match bad {
            0 => segment.offset = 20,
            1 => segment.msn = 2,
            2 => segment.len = 90,
            3 => segment.imm = Some(1),
            _ => segment.target = Some(Target { stag: 1, to: 2 }),
        }
        let mut admit =
            |segment: &Segment, len| two.machine.admit(now, addr(7), VIA, segment, len, take);
        assert_eq!(admit(&segment, 10), Admit::Done, "{bad}");
        assert_eq!(admit(&segments[1].0, 10), Admit::Done, "it is over");
        let answers = two.machine.answers();
        assert!(matches!(
            answers[..],
            [(
                _,
                _,
                Control::Fault {
                    code: FaultCode::Operation,
                    ..
                }
            )]
        ));
        let released = two.machine.released();
        assert_eq!((released[0].buffer, released[0].is_whole()), (4, false));
    }
}

/// Many senders, and receives that are posted one at a time: a receive costs one answer, not one for each sender.
#[test]
fn a_receive_is_for_one_sender() {
    const SENDERS: u16 = 50;
    let mut machine: Machine = Flows::new(FlowsConfig::default(), RandomState::new());
    let flow = Flow {
        dst_qp: RECEIVER,
        src_qp: 7,
        incarnation: 3,
    };
    for port in 1..=SENDERS {
        let from = SocketAddr::from(([10, 9, 9, 9], port));
        let Control::Welcome { cookie, .. } = machine.welcome(MS, from, &flow) else {
            panic!("a cookie");
        };
        for psn in 1..=2 {
            let segment = Segment {
                msn: psn,
                ..Two::segment(3, 1, 10, 0, Packet { psn, cookie })
            };
            let keep = || (vec![7; 10], 10);
            if let Admit::Next(spot) = machine.admit(MS, from, VIA, &segment, 10, keep) {
                machine.starve(&spot, keep);
            }
        }
    }
    assert_eq!(machine.answers().len(), usize::from(SENDERS));
    // Two messages of each: each sender has its turn before the first has another one.
    for round in 0..2 * SENDERS {
        let mut taken = None;
        let mut tried = 0;
        while let Resumed::Segment(first, bytes) = machine.resume(false) {
            tried += 1;
            let mut next = Some((first.clone(), bytes));
            while let Some((spot, bytes)) = next.take() {
                if taken.is_some() {
                    machine.starve(&spot, || (bytes, 10));
                    break;
                }
                taken = Some(spot.from().port());
                assert!(machine.placed(&spot, Some(1)).is_some());
                next = machine.next_kept(&spot);
            }
            if !machine.resumed(false, &first) {
                break;
            }
        }
        assert_eq!(taken, Some(1 + round % SENDERS), "round {round}");
        assert!(tried <= 2);
        assert_eq!(machine.answers().len(), 1);
    }
    assert!(!machine.is_starving());
}

/// A receiver that has heard a sender for weeks hears it when it begins anew.
#[test]
fn a_flow_of_many_weeks_is_replaced() {
    let mut machine: Machine = Flows::new(FlowsConfig::default(), RandomState::new());
    let none = || -> (Vec<u8>, usize) { panic!("nothing is kept") };
    let begin = |machine: &mut Machine, now: Now, incarnation: u32| {
        let flow = Flow {
            dst_qp: RECEIVER,
            src_qp: 7,
            incarnation,
        };
        let Control::Welcome { cookie, .. } = machine.welcome(now, addr(7), &flow) else {
            panic!("a cookie");
        };
        let segment = Two::segment(incarnation, 1, 10, 0, Packet { psn: 1, cookie });
        machine.admit(now, addr(7), VIA, &segment, 10, none)
    };
    assert!(matches!(begin(&mut machine, MS, 1), Admit::Next(_)));
    let later = Duration::from_hours(30 * 24);
    assert!(matches!(begin(&mut machine, later, 2), Admit::Next(_)));
}
