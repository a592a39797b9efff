//! The latency of a message to a program that sleeps on its completion channel, and to one that spins on its memory.

use std::time::{Duration, Instant};

use weft_conformance::bed::{Bed, End, Half, Memory, PATIENCE, Setup};
use weft_verbs::{CompChannel, Mr, RecvWr, SendWr, Wc};

const ROUNDS: usize = 100;

/// One side of a ping-pong: it sleeps on the channel until there is a message.
struct Side {
    end: End,
    channel: CompChannel,
    /// True: polls until the queue is empty before it asks for an event, as most programs do; false: asks at once.
    polls: bool,
}

impl Side {
    fn message(&self) {
        let mut wcs = [Wc::default(); 2];
        let mut poll = || self.end.rcq.poll(&mut wcs).expect("poll");
        loop {
            let mut n = 0;
            if self.polls {
                n = poll();
                if n > 0 {
                    assert_eq!(poll(), 0);
                }
            }
            self.end.rcq.req_notify(false);
            n += poll();
            if n > 0 {
                assert_eq!(n, 1);
                return;
            }
            self.channel.get_event(Some(PATIENCE)).expect("an event");
        }
    }
}

fn round_trip(setup: Setup, polls: bool) -> Duration {
    let bed = Bed::new(setup).expect("a bed");
    let channels = [&bed.a, &bed.b].map(|device| device.create_comp_channel().expect("a channel"));
    let halves = channels.each_ref().map(|channel| Half {
        channel: Some(channel.clone()),
        recvs: (0..ROUNDS as u64).map(RecvWr::new).collect(),
        ..Half::default()
    });
    let (a, b) = bed.pair_with(&halves[0], &halves[1]);
    let [near, far] = channels;
    let side = |end, channel| Side {
        end,
        channel,
        polls,
    };
    let (near, far) = (side(a, near), side(b, far));
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                far.message();
                far.end.post(SendWr::send(0));
            }
        });
        let ping = |_| {
            let start = Instant::now();
            near.end.post(SendWr::send(0));
            near.message();
            start.elapsed()
        };
        (0..ROUNDS).map(ping).collect()
    });
    times.sort_unstable();
    times[ROUNDS / 2]
}

fn name(setup: Setup) -> String {
    format!("{:?}, shared memory {:?}", setup.carrier, setup.local)
}

/// A program that has polled before it goes to sleep is woken as soon as one that has not: its message does not wait until the engine next checks whether the
/// program still polls.
fn polling_before_a_sleep_costs_nothing() {
    for setup in [Setup::tcp(), Setup::local(Memory::Both), Setup::roce()] {
        // A busy machine can spoil a measurement, but not each time.
        let mut tries = Vec::new();
        while tries.len() < 10 {
            let (polled, at_once) = (round_trip(setup, true), round_trip(setup, false));
            tries.push((polled, at_once));
            if polled < 4 * at_once {
                break;
            }
        }
        println!("{}: {tries:?}", name(setup));
        assert!(tries.len() < 10, "{}: {tries:?}", name(setup));
    }
}

/// The median round trip of Writes to a program that spins on its memory, and polls only until its own Write is complete. After a long spin it yields, so that
/// a machine with few cores has one for the engines.
fn written_round_trip(setup: Setup) -> Duration {
    let bed = Bed::new(setup).expect("a bed");
    let (near, far) = bed.pair();
    let memory = [&near, &far].map(|end| end.mr(8));
    let write = |end: &End, to: &Mr, round: usize| {
        let value = (round as u64 + 1).to_ne_bytes();
        end.post(SendWr::write(0, to.remote(0)).inline(&value).signaled());
        let mut wcs = [Wc::default(); 1];
        while end.scq.poll(&mut wcs).expect("poll") == 0 {}
    };
    let seen = |mr: &Mr, round: usize| {
        let begun = Instant::now();
        while mr.load_u64(0).expect("in the region") != round as u64 + 1 {
            if begun.elapsed() > Duration::from_micros(200) {
                std::thread::yield_now();
            }
            assert!(begun.elapsed() < PATIENCE, "round {round} never came");
        }
    };
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                seen(&memory[1], round);
                write(&far, &memory[0], round);
            }
        });
        let ping = |round| {
            let start = Instant::now();
            write(&near, &memory[1], round);
            seen(&memory[0], round);
            start.elapsed()
        };
        (0..ROUNDS).map(ping).collect()
    });
    times.sort_unstable();
    times[ROUNDS / 2]
}

/// True if another process occupies a processor all the time: then the two sides and the engines have fewer than two.
fn others_run() -> bool {
    let running = || {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat
            .lines()
            .find_map(|line| line.strip_prefix("procs_running "));
        line.and_then(|n| n.parse().ok()).unwrap_or(1_u32)
    };
    let busy = (0..50).filter(|_| {
        std::thread::sleep(Duration::from_millis(2));
        running() > 1
    });
    busy.count() > 25
}

/// A thread that polls now and then for a completion does not count as one that polls for arrivals: the engine places the peer's Writes as soon as for a
/// program that sleeps, not at its next check.
fn spinning_on_memory_needs_no_polls() {
    for setup in [Setup::tcp(), Setup::local(Memory::Both), Setup::roce()] {
        // A busy machine can spoil some of them, or all for a while; an engine that checks too late spoils most, always.
        let most_are_soon = || {
            let tries = [(); 9].map(|()| (written_round_trip(setup), round_trip(setup, false)));
            println!("{}: {tries:?}", name(setup));
            let soon = tries
                .iter()
                .filter(|(written, asleep)| *written < 4 * *asleep);
            soon.count() >= 5
        };
        let soon = (0..4).any(|_| most_are_soon());
        if !soon && others_run() {
            println!("{}: not judged, other programs run", name(setup));
            continue;
        }
        assert!(soon, "{}", name(setup));
    }
}

/// One after the other, because they measure.
#[test]
fn nobody_waits_for_the_tick() {
    polling_before_a_sleep_costs_nothing();
    spinning_on_memory_needs_no_polls();
}
