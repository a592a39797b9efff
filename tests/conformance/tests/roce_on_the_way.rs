//! Queue pairs of RoCE: what happens to packets on the way, and what is put off.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_conformance::waits::alone;
use weft_verbs::{
    RecvWr, RoceFault, RoceFaults, RoceInit, RocePath, RoceSend, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::roce::{End, Options, PATIENCE, pair, pair_with};

/// A fault for one packet in so many: the same ones in each run. With a period, what is sent again could lose the same packet without end.
struct Every {
    count: AtomicU64,
    nth: u64,
    fault: RoceFault,
}

impl Every {
    fn new(nth: u64, fault: RoceFault) -> Arc<Every> {
        let count = AtomicU64::new(0);
        Arc::new(Every { count, nth, fault })
    }
}

impl RoceFaults for Every {
    fn of_packet(&self) -> Option<RoceFault> {
        // SplitMix64.
        let mut x = self
            .count
            .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31))
            .is_multiple_of(self.nth)
            .then_some(self.fault)
    }
}

/// Takes completions of both ends until each has so many.
fn complete(a: &End, b: &End, wanted: [usize; 2]) -> [Vec<Wc>; 2] {
    let mut got = [Vec::new(), Vec::new()];
    let begun = Instant::now();
    while got[0].len() < wanted[0] || got[1].len() < wanted[1] {
        for (end, got) in [a, b].into_iter().zip(&mut got) {
            let mut wcs = [Wc::default(); 16];
            let n = end.cq.poll(&mut wcs).unwrap();
            got.extend(wcs[..n].iter().map(|wc| wc.ok().unwrap()));
        }
        assert!(begun.elapsed() < PATIENCE, "{got:?}");
    }
    got
}

/// The packets of [`move_much`] at a path MTU of 1,024: the Write, eight Sends, the Read.
const PACKETS: u64 = 196 + 8 * 20 + 1;

/// A Write, Sends and a Read of many packets.
fn move_much(a: &End, b: &End) {
    const LEN: usize = 200_000;
    let sent = a.fill(LEN, 5);
    for id in 0..8 {
        let recv = RecvWr::new(id).sge(b.mr.sge(LEN, LEN));
        b.qp.post_recv(&[recv]).unwrap();
    }
    let write = SendWr::write(1, b.remote(0)).sge(a.mr.sge(0, LEN));
    a.qp.post_send(write.signaled()).unwrap();
    for id in 0..8 {
        let send = SendWr::send(id).sge(a.mr.sge(0, 20_001)).signaled();
        a.qp.post_send(send).unwrap();
    }
    let read = SendWr::read(2, b.remote(0)).sge(a.mr.sge(400_000, LEN));
    a.qp.post_send(read.signaled()).unwrap();
    let [ours, theirs] = complete(a, b, [10, 8]);
    assert_eq!(ours.last().map(|wc| wc.opcode), Some(WcOpcode::Read));
    let ids: Vec<u64> = theirs.iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(theirs.iter().all(|wc| wc.byte_len == 20_001));
    assert_eq!(b.mr.to_vec(0, LEN).unwrap(), sent);
    assert_eq!(b.mr.to_vec(LEN, 20_001).unwrap(), sent[..20_001]);
    assert_eq!(a.mr.to_vec(400_000, LEN).unwrap(), sent);
}

#[test]
fn messages_survive_each_fault_on_the_way() {
    for fault in [
        RoceFault::Drop,
        RoceFault::Duplicate,
        RoceFault::Reorder,
        RoceFault::Corrupt,
        RoceFault::Mark,
    ] {
        let (a, b) = pair_with(&Options {
            mtu: 1024,
            ..Options::default()
        });
        let faults = [Every::new(61, fault), Every::new(13, fault)];
        a.qp.set_faults(Arc::clone(&faults[0]) as _);
        b.qp.set_faults(Arc::clone(&faults[1]) as _);
        move_much(&a, &b);
        let (sent, received) = (a.qp.counters().sent, b.qp.counters().received);
        match fault {
            RoceFault::Corrupt => assert!(b.port.dropped().0 > 0, "a damaged packet was taken"),
            RoceFault::Drop => assert!(sent > received, "{sent} {received}"),
            RoceFault::Duplicate => assert!(received > PACKETS, "{received}"),
            RoceFault::Reorder => {}
            RoceFault::Mark => {
                // Each side has told the other.
                assert!(a.qp.counters().congested > 0 && b.qp.counters().congested > 0);
            }
        }
        if fault != RoceFault::Mark {
            assert_eq!(b.qp.counters().congested, 0);
        }
    }
}

/// Whatever many packets are marked, the peer is told at most once in 50 us.
#[test]
fn congestion_is_told_at_a_rate() {
    let (a, b) = pair();
    a.qp.set_faults(Every::new(1, RoceFault::Mark));
    let begun = Instant::now();
    move_much(&a, &b);
    let most = begun.elapsed().as_micros() as u64 / 50 + 1;
    let told = a.qp.counters().congested;
    assert!((1..=most).contains(&told), "{told} of at most {most}");
}

/// The lost packet is the last one: nothing that comes later shows it, and the transport timer is four seconds.
#[test]
fn a_lost_end_costs_no_transport_timer() {
    struct First(AtomicU64);
    impl RoceFaults for First {
        fn of_packet(&self) -> Option<RoceFault> {
            let first = self.0.fetch_add(1, Ordering::Relaxed) == 0;
            first.then_some(RoceFault::Drop)
        }
    }
    let timer = Duration::from_nanos(4096 << 20);
    let options = Options::default();
    let (a, b) = pair_with(&Options {
        send: RoceSend {
            timeout: 20,
            ..options.send
        },
        ..options
    });
    let transfer = || {
        let write = SendWr::write(1, b.remote(0)).inline(b"lost").signaled();
        a.qp.post_send(write).unwrap();
        complete(&a, &b, [1, 0]);
    };
    transfer();
    let begun = Instant::now();
    // The request, and then the acknowledgement.
    for end in [&a, &b] {
        end.qp.set_faults(Arc::new(First(AtomicU64::new(0))));
        transfer();
    }
    assert!(begun.elapsed() < timer / 2, "{:?}", begun.elapsed());
}

/// An acknowledgement waits for the program's next call; a queue pair that ends sends it first.
#[test]
fn an_end_takes_no_acknowledgement_away() {
    for drops in [true, false] {
        let (a, b) = pair();
        b.qp.post_recv(&[RecvWr::new(1).sge(b.mr.sge(0, 64))])
            .unwrap();
        a.qp.post_send(SendWr::send(7).inline(b"the last").signaled())
            .unwrap();
        let mut wcs = [Wc::default()];
        let begun = Instant::now();
        while b.cq.poll(&mut wcs).unwrap() == 0 {
            assert!(begun.elapsed() < PATIENCE);
        }
        assert_eq!(wcs[0].status, WcStatus::Success);
        if drops {
            drop(b);
        } else {
            b.qp.to_error();
        }
        let done = a.wait();
        assert_eq!((done.wr_id, done.status), (7, WcStatus::Success));
    }
}

/// Posts that follow each other wait for the next poll, and go together.
#[test]
fn many_small_messages_arrive_in_order_and_without_a_further_poll() {
    let (a, b) = pair();
    for id in 0..100 {
        b.qp.post_recv(&[RecvWr::new(id).sge(b.mr.sge(0, 64))])
            .unwrap();
    }
    // The port is polled from now on.
    let mut wcs = [Wc::default()];
    for _ in 0..100 {
        assert_eq!(a.cq.poll(&mut wcs).unwrap(), 0);
    }
    for id in 0..50 {
        a.qp.post_send(SendWr::send(id).inline(b"one of many"))
            .unwrap();
    }
    let more: Vec<SendWr> = (50..100)
        .map(|id| SendWr::send(id).inline(b"one of many"))
        .collect();
    a.qp.post_sends(&more).unwrap();
    // The sender polls no more: the engine sends what is put off.
    for id in 0..100 {
        assert_eq!(b.wait().ok().unwrap().wr_id, id);
    }
    let refused = a.qp.post_sends(&vec![SendWr::send(1); 200]).unwrap_err();
    assert!(refused.index < 200);
}

/// Private memory of this process, in bytes.
fn private_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    number.expect("a number of kilobytes") * 1024
}

/// Nanoseconds of the processor that the threads of this process have used.
fn cpu() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<u64>().ok()
    };
    tasks.filter_map(of).sum()
}

/// Ten thousand queue pairs that are connected, have moved a message and are idle.
#[test]
fn idle_queue_pairs_are_small_and_quiet() {
    const PAIRS: u64 = 5_000;
    const MOST: u64 = 6 << 10;
    if !alone("roce_on_the_way::idle_queue_pairs_are_small_and_quiet") {
        return;
    }
    let options = Options::default();
    let (a, b) = pair();
    let qp = |end: &End| {
        let init = RoceInit::new(&end.cq, &end.cq);
        end.pd.create_roce_qp(&init).unwrap()
    };
    let before = private_bytes();
    let mut held = Vec::with_capacity(2 * PAIRS as usize);
    for _ in 0..PAIRS {
        let pair = [qp(&a), qp(&b)];
        for (at, end) in [&a, &b].into_iter().enumerate() {
            let path = RocePath {
                peer: [&b, &a][at].port.local_addr().ip(),
                dest_qp: pair[1 - at].num(),
                ..a.path(&options)
            };
            pair[at].receive_from(&end.port, &path).unwrap();
            pair[at].send_with(&options.send).unwrap();
        }
        let write = SendWr::write(1, b.remote(0))
            .inline(b"then idle")
            .signaled();
        pair[0].post_send(write).unwrap();
        complete(&a, &b, [1, 0]);
        held.extend(pair);
    }
    let each = (private_bytes() - before) / held.len() as u64;
    println!("{each} bytes for each of {} queue pairs", held.len());
    assert!(each <= MOST, "{each}");
    // Until the timers after the latest work are over.
    let mut used = Vec::new();
    while used.last().is_none_or(|&ns| ns >= 1_000_000) {
        assert!(used.len() < 5, "{used:?} ns, each in a second");
        std::thread::sleep(Duration::from_millis(300));
        let before = cpu();
        std::thread::sleep(Duration::from_secs(1));
        used.push(cpu() - before);
    }
    println!("idle: {used:?} ns of the processor, each in a second");
}
