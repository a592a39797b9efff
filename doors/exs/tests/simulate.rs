//! Long random runs of both kinds of sockets, with real bytes and an oracle: every byte and message arrives once, in
//! order, in the receive that it belongs to, whatever the order of calls, arrivals and completions.

use crate::world::{Call, Fault, Settings, World};
use proptest::prelude::*;
use weft_exs::machine::{Design, Kind, Mode, RecvFlags, Rules};

/// xorshift64*; the seed determines the run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Mostly a short length, sometimes 0, sometimes up to `max`.
    fn len(&mut self, max: u64) -> u64 {
        match self.below(8) {
            0 => self.below(2),
            1..4 => 1 + self.below(16),
            _ => self.below(max),
        }
    }
}

/// The behaviour of the programs.
#[derive(Clone, Debug)]
struct Manners {
    settings: Settings,
    seed: u64,
    steps: u32,
    longest: u64,
    /// Operations outstanding on each side.
    sends: usize,
    recvs: usize,
    /// One of this many steps cancels; 0: none.
    cancels: u64,
    waitall: bool,
    in_place: bool,
    /// One of this many chances to go indirect is taken.
    reluctance: u64,
}

fn manners() -> impl Strategy<Value = Manners> {
    let kinds = vec![
        Kind::Stream,
        Kind::Stream,
        Kind::SeqPacket(Design::Advert),
        Kind::SeqPacket(Design::Source),
    ];
    let modes = vec![Mode::Dynamic, Mode::Published, Mode::Direct, Mode::Indirect];
    let of = |choices: &[u32]| {
        let choice = proptest::sample::select(choices.to_vec());
        (choice.clone(), choice, any::<bool>())
            .prop_map(|(a, b, same)| [a, if same { a } else { b }])
    };
    let settings = (
        proptest::sample::select(kinds),
        proptest::sample::select(modes),
        of(&[3, 4, 5, 8, 64]),
        of(&[0, 1, 16, 256]),
        of(&[0, 1, 7, 64, 1000]),
        any::<bool>(),
    )
        .prop_map(|(kind, mode, credits, small, ring, immediate)| Settings {
            kind,
            mode,
            credits,
            small,
            ring: if mode == Mode::Indirect {
                ring.map(|len| len.max(1))
            } else {
                ring
            },
            immediate,
            rules: Rules::default(),
            prompt: false,
        });
    let program = (
        1..2000u64,
        1..9usize,
        1..9usize,
        proptest::sample::select(vec![0, 10, 100]),
        any::<bool>(),
        any::<bool>(),
        proptest::sample::select(vec![1, 1, 3, 30]),
    );
    (settings, 1..u64::MAX, program).prop_map(
        |(settings, seed, (longest, sends, recvs, cancels, waitall, in_place, reluctance))| {
            Manners {
                settings,
                seed,
                steps: 1500,
                longest,
                sends,
                recvs,
                cancels,
                waitall,
                in_place,
                reluctance,
            }
        },
    )
}

fn flags(manners: &Manners, random: &mut Random) -> RecvFlags {
    RecvFlags {
        waitall: manners.waitall && random.one_in(2),
        in_place: manners.in_place && random.one_in(2),
    }
}

fn step(world: &mut World, manners: &Manners, random: &mut Random) -> Result<(), Fault> {
    let at = random.below(2) as usize;
    match random.below(16) {
        0..5 => {
            let may = random.one_in(manners.reluctance);
            // A driver polls until there is nothing more, but may be interrupted.
            for _ in 0..=random.below(12) {
                if world.poll(at, may)?.is_none() {
                    break;
                }
            }
        }
        5..7 => world.take(at)?,
        7..9 => world.deliver(at)?,
        9..11 => world.transferred(at)?,
        11 | 12 if world.ends[at].sends.len() < manners.sends && !world.ends[at].shut => {
            let len = random.len(manners.longest);
            let before = world.wires[1 - at].len();
            if random.one_in(2) {
                world.call(at, Call::SendNow(len))?;
            }
            if world.wires[1 - at].len() == before {
                world.call(at, Call::Send(len))?;
            }
        }
        13 | 14 if world.ends[at].recvs.len() < manners.recvs => {
            let flags = flags(manners, random);
            world.call(at, Call::Recv(random.len(manners.longest), flags))?;
        }
        15 if manners.cancels != 0 && random.one_in(manners.cancels) => {
            let end = &world.ends[at];
            let ops: Vec<_> = end
                .sends
                .iter()
                .map(|s| s.op)
                .chain(end.recvs.iter().map(|r| r.op))
                .collect();
            if !ops.is_empty() {
                let op = ops[random.below(ops.len() as u64) as usize];
                world.call(at, Call::Cancel(op))?;
            }
        }
        _ if !world.ends[at].held.is_empty() => world.call(at, Call::Recycle)?,
        _ => {}
    }
    Ok(())
}

/// All data arrives, and both ends see the end.
fn finish(world: &mut World, manners: &Manners, random: &mut Random) -> Result<(), Fault> {
    for at in 0..2 {
        world.call(at, Call::Shutdown)?;
    }
    for round in 0.. {
        world.settle()?;
        for at in 0..2 {
            while !world.ends[at].held.is_empty() {
                world.call(at, Call::Recycle)?;
            }
        }
        world.settle()?;
        if let Some(fault) = world.stuck() {
            return Err(fault);
        }
        let over =
            |at: usize| world.ends[at].machine.is_idle() && world.ends[at].machine.peer_closed();
        if over(0) && over(1) && world.ends.iter().all(|end| end.machine.readable() == 0) {
            break;
        }
        if round > 20_000 {
            return Err("it never ends");
        }
        for at in 0..2 {
            world.call(
                at,
                Call::Recv(1 + random.len(manners.longest), RecvFlags::default()),
            )?;
        }
    }
    // One more receive on each side reports the end.
    for at in 0..2 {
        world.call(at, Call::Recv(1, RecvFlags::default()))?;
    }
    world.settle()?;
    if world
        .ends
        .iter()
        .any(|end| !end.recvs.is_empty() || !end.sends.is_empty())
    {
        return Err("an operation without an end");
    }
    Ok(())
}

fn run(manners: &Manners) -> Result<(), Fault> {
    let mut world = World::new(&manners.settings);
    let mut random = Random(manners.seed);
    for _ in 0..manners.steps {
        step(&mut world, manners, &mut random)?;
    }
    finish(&mut world, manners, &mut random)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("WEFT_SIMULATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
    ))]

    #[test]
    fn everything_arrives(manners in manners()) {
        if let Err(fault) = run(&manners) {
            prop_assert!(false, "{}", fault);
        }
    }
}

/// Twice as many receives as sends: after the first of them the sender always finds an advert (stream paper, table III).
#[test]
fn a_receiver_ahead_gets_everything_directly() {
    let settings = Settings {
        credits: [64; 2],
        small: [16; 2],
        ring: [4096; 2],
        ..Settings::default()
    };
    let mut world = World::new(&settings);
    for _ in 0..8 {
        world
            .call(1, Call::Recv(1000, RecvFlags::default()))
            .unwrap();
    }
    world.settle().unwrap();
    for _ in 0..1000 {
        while world.ends[1].recvs.len() < 8 {
            world
                .call(1, Call::Recv(1000, RecvFlags::default()))
                .unwrap();
        }
        while world.ends[0].sends.len() < 4 {
            world.call(0, Call::Send(1000)).unwrap();
        }
        world.settle().unwrap();
    }
    let stats = world.ends[0].machine.stats();
    assert_eq!(
        (stats.indirect_sent, stats.small_sent, stats.mode_switches),
        (0, 0, 0)
    );
    assert_eq!(stats.direct_sent, 4000);
    let stats = world.ends[1].machine.stats();
    assert_eq!(stats.direct_bytes_received, 4_000_000);
}

/// Short answers need one message in each direction and no advert.
#[test]
fn ping_pong_of_short_data_takes_one_message_each_way() {
    let settings = Settings {
        credits: [64; 2],
        small: [64; 2],
        ring: [4096; 2],
        ..Settings::default()
    };
    let mut world = World::new(&settings);
    for round in 0..1000 {
        let (from, to) = (round % 2, 1 - round % 2);
        world
            .call(to, Call::Recv(64, RecvFlags::default()))
            .unwrap();
        world.call(from, Call::Send(64)).unwrap();
        world.settle().unwrap();
        assert!(world.is_idle());
    }
    for end in &world.ends {
        let stats = end.machine.stats();
        assert_eq!(stats.small_sent, 500);
        assert_eq!(
            (stats.adverts_sent, stats.acks, stats.credit_messages),
            (0, 0, 0)
        );
    }
}

/// The runs above cover all parts of the protocol.
#[test]
fn simulations_go_everywhere() {
    let mut reached = [0; 9];
    for seed in 1..60 {
        let manners = Manners {
            settings: Settings {
                credits: [6; 2],
                small: [16; 2],
                ring: [256; 2],
                prompt: false,
                ..Settings::default()
            },
            seed: seed << 20,
            steps: 1500,
            longest: 200,
            sends: 4,
            recvs: 4,
            cancels: 10,
            waitall: true,
            in_place: true,
            reluctance: 3,
        };
        let mut world = World::new(&manners.settings);
        let mut random = Random(manners.seed);
        for _ in 0..manners.steps {
            step(&mut world, &manners, &mut random).unwrap();
        }
        for end in &world.ends {
            let stats = end.machine.stats();
            for (sum, count) in reached.iter_mut().zip([
                stats.direct_received,
                stats.indirect_received,
                stats.small_received,
                stats.mode_switches,
                stats.adverts_dropped,
                stats.credit_stalls,
                stats.ring_stalls,
                stats.retracts,
                stats.acks,
            ]) {
                *sum += count;
            }
        }
    }
    println!("{reached:?}");
    assert!(reached.iter().all(|&count| count > 20), "{reached:?}");
}
