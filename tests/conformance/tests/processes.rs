//! Two processes in shared memory: the other one dies, stops, computes, forks, or runs another program.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use weft_conformance::bed::{Bed, Half, Memory, PATIENCE, Setup, assert_bytes, pattern, take};
use weft_conformance::twin::{ADDS, DIAL, Pair, RECV, REGION, Twin, forks};
use weft_conformance::victim::Bystander;
use weft_verbs::{AsyncEvent, EndReason, RecvWr, RemoteAddr, SendWr, WcStatus};

fn pair() -> Pair {
    Pair::new("twin", &Half::default())
}

fn bed() -> Bed {
    Bed::new(Setup::local(Memory::Both)).expect("a bed")
}

fn at(region: RemoteAddr, off: usize) -> RemoteAddr {
    RemoteAddr {
        addr: region.addr + off as u64,
        ..region
    }
}

/// The survivor's activity meanwhile.
#[derive(Clone, Copy, Debug)]
enum Survivor {
    Polls,
    Waits,
    SleepsOnChannel,
    DoesNothing,
}

/// The work under way when the peer dies.
#[derive(Clone, Copy, Debug)]
enum Under {
    Nothing,
    /// A Send whose payload the peer has not pulled yet.
    LargeSend,
    /// Writes without end.
    Writes,
    /// Nothing, and the peer's sockets stay open.
    OthersHoldItsDescriptors,
}

/// Copies of all descriptors of a process, as a forked child would have them.
fn copies(pid: u32) -> Vec<OwnedFd> {
    let process = Pid::from_raw(pid.cast_signed()).expect("a process");
    let pidfd = pidfd_open(process, PidfdFlags::empty()).expect("a pidfd");
    let names = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("procfs");
    let numbers = names
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(|fd: i32| {
            // Not our pipes: the twin must see their end.
            (fd > 2).then(|| pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok())?
        })
        .collect()
}

/// Kills the twin; returns how long the survivor took to notice.
fn killed(under: Under, survivor: Survivor) -> Duration {
    let channel;
    let bystander;
    let pair = {
        let bed = bed();
        channel = bed.a.create_comp_channel().expect("a channel");
        bystander = Bystander::new(&bed.a);
        let half = Half {
            channel: Some(channel.clone()),
            ..Half::default()
        };
        Pair::with("twin", &half, &bed)
    };
    let Pair {
        twin,
        end,
        regions,
        mr,
    } = &pair;
    let (ended, end_of) = std::sync::mpsc::channel();
    end.qp.on_end(move |reason| {
        let _ = ended.send((reason, Instant::now()));
    });
    end.post_recv(RecvWr::new(1).sge(mr.sge(0, 64)));
    let mut sends = 0;
    let mut held = Vec::new();
    match under {
        Under::LargeSend => {
            twin.stop();
            end.post(SendWr::send(2).sge(mr.sge(0, RECV)).signaled());
            sends = 1;
        }
        Under::Nothing | Under::Writes => {}
        Under::OthersHoldItsDescriptors => {
            held = copies(twin.pid());
            assert!(!held.is_empty());
        }
    }
    if matches!(survivor, Survivor::SleepsOnChannel) {
        // An earlier completion makes no event.
        end.rcq.req_notify(false);
    }
    let start = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let flushed = |n: usize| {
                let mut wcs = take(&end.rcq, n);
                wcs.extend(take(&end.scq, sends));
                for wc in &wcs {
                    assert_eq!(
                        wc.status,
                        WcStatus::WrFlushErr,
                        "{under:?}, {survivor:?}: {wc:?}"
                    );
                }
            };
            match survivor {
                Survivor::Polls => {
                    let mut wc = [weft_verbs::Wc::default(); 1];
                    let deadline = Instant::now() + PATIENCE;
                    while end.rcq.poll(&mut wc).expect("no overrun") == 0 {
                        assert!(Instant::now() < deadline, "no flush");
                        std::thread::yield_now();
                    }
                    assert_eq!(wc[0].status, WcStatus::WrFlushErr);
                    flushed(0);
                }
                Survivor::Waits => flushed(1),
                Survivor::SleepsOnChannel => {
                    let event = channel.get_event(Some(PATIENCE));
                    assert_eq!(event, Some(end.rcq.num()));
                    flushed(1);
                }
                Survivor::DoesNothing => {}
            }
        });
        if matches!(under, Under::Writes) {
            let target = at(regions[0], 0);
            let until = Instant::now() + Duration::from_millis(20);
            let mut writes = 0;
            while Instant::now() < until {
                let wr = SendWr::write(9, target).sge(mr.sge(0, REGION / 2));
                writes += u32::from(end.qp.post_send_one(wr).is_ok());
            }
            assert_ne!(writes, 0);
        }
        let start = Instant::now();
        twin.signal(Signal::KILL);
        watcher.join().expect("no panic");
        start
    });
    let (reason, when) = end_of.recv_timeout(PATIENCE).expect("the end");
    assert!(
        matches!(reason, EndReason::Lost | EndReason::Disconnected),
        "{reason:?}"
    );
    if reason == EndReason::Lost {
        let event = end.device.get_async_event(Some(PATIENCE));
        let qp_num = end.qp.num();
        assert_eq!(event, Some(AsyncEvent::QpFatal { qp_num, reason: 0 }));
    }
    bystander.ping();
    drop(held);
    when.duration_since(start)
}

fn killed_in_time(under: Under) {
    for survivor in [
        Survivor::Polls,
        Survivor::Waits,
        Survivor::SleepsOnChannel,
        Survivor::DoesNothing,
    ] {
        // A machine that is busy otherwise may delay it, but not always.
        let times: Vec<_> = (0..5)
            .map(|_| killed(under, survivor))
            .scan(false, |over, time| {
                let go_on = !*over;
                *over = time < Duration::from_millis(100);
                go_on.then_some(time)
            })
            .collect();
        let best = times.iter().min().expect("one");
        assert!(
            *best < Duration::from_millis(100),
            "{under:?}, {survivor:?}: {times:?}"
        );
    }
}

#[test]
fn killed_while_idle() {
    killed_in_time(Under::Nothing);
}

#[test]
fn killed_in_the_middle_of_a_large_send() {
    killed_in_time(Under::LargeSend);
}

#[test]
fn killed_in_the_middle_of_writes() {
    killed_in_time(Under::Writes);
}

#[test]
fn killed_while_others_hold_its_descriptors() {
    killed_in_time(Under::OthersHoldItsDescriptors);
}

/// Writes, Reads and atomics of every size that need no work of the peer.
fn one_sided(pair: &Pair) {
    let Pair {
        end, regions, mr, ..
    } = pair;
    for (seed, region) in (1..).zip(regions) {
        for len in [64, 4096, 1 << 20] {
            let data = pattern(seed + len as u64, len);
            mr.write(0, &data).expect("within");
            end.run(SendWr::write(1, at(*region, 0)).sge(mr.sge(0, len)));
            // Shorter ones to memory that is not mapped go through the ring, and are complete once they are in it.
            if len >= 1024 || region == &regions[0] {
                end.run(SendWr::read(2, at(*region, 0)).sge(mr.sge(1 << 21, len)));
                assert_bytes(mr, 1 << 21, &data, "what was written");
            }
        }
    }
}

fn end_spin(pair: &Pair) {
    for region in pair.regions {
        let wr = SendWr::write(3, at(region, REGION - 8)).inline(&[0xff; 8]);
        pair.end.run(wr);
    }
}

#[test]
fn a_stopped_target_is_written_and_read() {
    let mut pair = pair();
    pair.echo(1);
    pair.twin.stop();
    let add = |id, region| {
        SendWr::fetch_add(id, at(region, REGION - 16), 5)
            .sge(pair.mr.sge(REGION - 64, 8))
            .signaled()
    };
    let data = pattern(77, 4096);
    for region in pair.regions {
        pair.mr.write(0, &data).expect("within");
        pair.end
            .run(SendWr::write(1, at(region, 0)).sge(pair.mr.sge(0, 4096)));
        pair.end
            .run(SendWr::read(2, at(region, 0)).sge(pair.mr.sge(8192, 4096)));
        assert_bytes(&pair.mr, 8192, &data, "a read of what was written");
    }
    pair.end.post(add(3, pair.regions[0]));
    assert_eq!(pair.end.sent().status, WcStatus::Success);
    one_sided_arena(&pair);
    // Requests that need the peer wait for it, in order: an atomic on memory that cannot be mapped, and messages.
    pair.end.post(add(4, pair.regions[1]));
    let back = pair.mr.sge(REGION - 32, 8);
    pair.end.post_recv(RecvWr::new(5).sge(back));
    pair.end.post(SendWr::send(6).inline(&[9; 8]));
    pair.twin.go_on();
    assert_eq!(pair.twin.ask("echo"), "echoed");
    let wc = pair.end.received();
    assert_eq!((wc.wr_id, wc.status), (5, WcStatus::Success));
    let wc = pair.end.sent();
    assert_eq!((wc.wr_id, wc.status), (4, WcStatus::Success));
    assert_eq!(pair.twin.ask("sum 0"), "5");
    assert_eq!(pair.twin.ask("sum 1"), "5");
    pair.echo(2);
}

fn one_sided_arena(pair: &Pair) {
    let region = pair.regions[0];
    for len in [1, 64, 1 << 20] {
        let data = pattern(len as u64, len);
        pair.mr.write(0, &data).expect("within");
        let wr = SendWr::write(1, at(region, 1 << 21)).sge(pair.mr.sge(0, len));
        pair.end.run(wr);
        let wr = SendWr::read(2, at(region, 1 << 21)).sge(pair.mr.sge(1 << 21, len));
        pair.end.run(wr);
        assert_bytes(&pair.mr, 1 << 21, &data, "what was written");
    }
}

#[test]
fn a_target_that_computes_is_written_and_read() {
    let mut pair = pair();
    assert_eq!(pair.twin.ask("spin"), "spinning");
    one_sided(&pair);
    end_spin(&pair);
    assert_eq!(pair.twin.answer(), "spun");
    pair.echo(3);
}

#[test]
fn another_program_in_the_peers_place() {
    let mut pair = pair();
    pair.echo(1);
    pair.end.post_recv(RecvWr::new(1));
    assert_eq!(pair.twin.ask("exec"), "goodbye");
    assert_eq!(pair.end.received().status, WcStatus::WrFlushErr);
    // Its process continues under the same number; nothing is sent there any more.
    let name = std::fs::read_to_string(format!("/proc/{}/comm", pair.twin.pid()));
    assert_eq!(name.expect("it runs").trim(), "sleep");
    for region in pair.regions {
        let wr = SendWr::write(2, region)
            .sge(pair.mr.sge(0, 8192))
            .signaled();
        if pair.end.qp.post_send_one(wr).is_ok() {
            assert_eq!(pair.end.sent().status, WcStatus::WrFlushErr);
        }
    }
}

#[test]
fn forks_on_either_side() {
    let mut pair = pair();
    for round in 0..5 {
        assert_eq!(pair.twin.ask("fork"), "forked");
        pair.echo(round);
        one_sided(&pair);
        forks();
        pair.echo(round + 10);
        one_sided(&pair);
    }
}

#[test]
fn two_processes_add_to_one_word() {
    let bed = bed();
    let half = Half::default();
    let mut pair = Pair::with("twin", &half, &bed);
    // The word is ours. The twin adds to it from its process, and another connection from this one.
    let half = Half {
        pd: Some(pair.end.pd.clone()),
        ..half
    };
    let (_near, far) = bed.pair_with(&half, &Half::default());
    let remote = pair.mr.remote(REGION - 16);
    let old = far.mr(8);
    pair.twin.tell(&format!("add {}", remote.rkey));
    for _ in 0..ADDS {
        far.run(SendWr::fetch_add(1, remote, 1).sge(old.whole()));
    }
    assert_eq!(pair.twin.answer(), "added");
    let sum = pair.mr.load_u64(REGION - 16).expect("within");
    assert_eq!(sum, 2 * ADDS);
}

#[test]
fn sleepers_miss_nothing() {
    const ROUNDS: u64 = 3000;
    for len in [8, 4096, 20_000] {
        let mut pair = pair();
        pair.twin.tell(&format!("pingpong {ROUNDS}"));
        let Pair { end, mr, .. } = &pair;
        for round in 0..ROUNDS {
            end.post_recv(RecvWr::new(round).sge(mr.sge(1 << 20, len)));
            let mut wr = SendWr::send(round).sge(mr.sge(0, len));
            // Waits for its completion now and then.
            if round % 3 == 0 {
                wr = wr.signaled();
            }
            end.post(wr);
            if round % 3 == 0 {
                assert_eq!(end.sent().status, WcStatus::Success);
            }
            let wc = end.received();
            assert_eq!((wc.wr_id, wc.status), (round, WcStatus::Success));
        }
        assert_eq!(pair.twin.answer(), "done");
    }
}

#[test]
fn sleepers_on_channels_miss_nothing() {
    const ROUNDS: u64 = 3000;
    let bed = bed();
    let channel = bed.a.create_comp_channel().expect("a channel");
    let half = Half {
        channel: Some(channel.clone()),
        ..Half::default()
    };
    let mut pair = Pair::with("twin", &half, &bed);
    pair.twin.tell(&format!("pingpong {ROUNDS}"));
    let Pair { end, mr, .. } = &pair;
    for round in 0..ROUNDS {
        end.post_recv(RecvWr::new(round).sge(mr.sge(1 << 20, 64)));
        end.rcq.req_notify(false);
        end.post(SendWr::send(round).sge(mr.sge(0, 64)));
        let event = channel.get_event(Some(PATIENCE));
        assert_eq!(event, Some(end.rcq.num()), "round {round}");
        let wc = end.received();
        assert_eq!((wc.wr_id, wc.status), (round, WcStatus::Success));
    }
    assert_eq!(pair.twin.answer(), "done");
}

/// As much as a connection carries, both ways at once, between two processes that stop now and then: the ring fills up, and no message is lost or changed and
/// no thread sleeps on.
#[test]
fn floods_both_ways() {
    let mut far = Twin::start("twin", |_| ()).expect("a twin");
    let addr = far.addr.to_string();
    let near = Twin::start("twin", |twin| {
        twin.env(DIAL, addr);
    });
    let mut near = near.expect("a twin");
    let keys = [near.answer(), far.answer()];
    assert!(near.ask("path").contains("\"local\""));
    for (twin, keys) in [(&mut far, &keys[0]), (&mut near, &keys[1])] {
        let (first, _) = keys.split_once(' ').expect("two keys");
        twin.tell(&format!("flood {first}"));
    }
    // The pace of the two, not a synchronisation.
    for twin in [&near, &far].repeat(8) {
        twin.stop();
        std::thread::sleep(Duration::from_millis(5));
        twin.go_on();
        std::thread::sleep(Duration::from_millis(2));
    }
    for twin in [&mut near, &mut far] {
        assert_eq!(twin.answer(), "flooded");
    }
}

#[test]
fn idle_costs_nothing() {
    std::thread::scope(|scope| {
        for command in ["", "wait", "event"] {
            scope.spawn(move || idle_after(command));
        }
    });
}

fn idle_after(command: &str) {
    let mut pair = pair();
    pair.echo(1);
    if !command.is_empty() {
        assert_eq!(pair.twin.ask(command), "waiting");
    }
    // Until the ticks after the latest work are over: on a busy machine that takes a while.
    let mut used = Vec::new();
    while used.last().is_none_or(|&ns| ns >= 1_000_000) {
        assert!(used.len() < 4, "{command}: {used:?} ns, each in a second");
        std::thread::sleep(Duration::from_millis(200));
        let before = pair.twin.cpu();
        std::thread::sleep(Duration::from_secs(1));
        used.push(pair.twin.cpu() - before);
    }
}
