//! Several threads on the same objects, and a stress test against a model.

use std::sync::atomic::{AtomicU64, Ordering};

use weft_verbs::{PostReason, RecvWr, RemoteAddr, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, End, Half, Mr, Rng, assert_bytes, pattern, take, until};

/// Two threads post to one queue pair: nothing is lost or doubled, and each thread's requests keep their order.
pub fn two_post_to_one(bed: &Bed) {
    const EACH: u64 = 1000;
    let half = Half {
        max_recv_wr: 4096,
        depth: 8192,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&half, &half);
    let landing = b.mr(2 * EACH as usize * 8);
    for id in 0..2 * EACH {
        b.post_recv(RecvWr::new(id).sge(landing.sge(id as usize * 8, 8)));
    }
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let a = &a;
            scope.spawn(move || {
                for i in 0..EACH {
                    let value = thread << 32 | i;
                    loop {
                        let wr = SendWr::send(value).inline(&value.to_ne_bytes());
                        match a.qp.post_send_one(wr.signaled()) {
                            Ok(()) => break,
                            Err(e) => assert_eq!(e.reason, PostReason::Full),
                        }
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut next = [0; 2];
        for wc in take(&b.rcq, 2 * EACH as usize) {
            assert_eq!(wc.status, WcStatus::Success);
            let value = landing.load_u64(wc.wr_id as usize * 8).unwrap();
            let (thread, i) = ((value >> 32) as usize, value & 0xffff_ffff);
            assert_eq!(i, next[thread], "order of thread {thread}");
            next[thread] += 1;
        }
        assert_eq!(next, [EACH; 2]);
        let mut next = [0; 2];
        for wc in take(&a.scq, 2 * EACH as usize) {
            let (thread, i) = ((wc.wr_id >> 32) as usize, wc.wr_id & 0xffff_ffff);
            assert_eq!(i, next[thread]);
            next[thread] += 1;
        }
    });
}

/// More data than the transport accepts at once is posted while another thread sleeps on the queue pair's receives: all of it is sent, although neither thread
/// drives the queue pair again.
pub fn much_posted_beside_a_sleeper(bed: &Bed) {
    let len = 1 << 20;
    let count = if bed.setup.largest < len { 1 } else { 16 };
    let (a, b) = bed.talking_pair();
    let (src, dst) = (a.mr(len), b.mr(len));
    src.fill(0, len, 7).unwrap();
    a.post_recv(RecvWr::new(5));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| a.received());
        // The thread may be asleep by now: both cases must work.
        std::thread::yield_now();
        for id in 0..count {
            a.post(SendWr::write(id, dst.remote(0)).sge(src.whole()));
        }
        let done = dst.remote(0);
        a.post(SendWr::write(99, done).inline(&1u64.to_ne_bytes()));
        until("the last write", || dst.load_u64(0).unwrap() == 1);
        b.post(SendWr::send(1));
        assert_eq!(sleeper.join().expect("no panic").wr_id, 5);
    });
}

/// A long stream of large writes to a target that only sleeps on its completion queue: the Send after them arrives.
pub fn stream_to_a_sleeper(bed: &Bed) {
    let len = bed.setup.largest.min(1 << 20);
    let count = if len < 1 << 20 { 2 } else { 16 };
    let (a, b) = bed.pair();
    let (src, dst) = (a.mr(len), b.mr(len));
    for round in 0..4u8 {
        b.post_recv(RecvWr::new(u64::from(round)));
        src.fill(0, len, round + 1).unwrap();
        std::thread::scope(|scope| {
            // One wait without a poll in between, as in a blocking program; the time-out is the test's.
            let sleeper = scope.spawn(|| b.received());
            for id in 0..count {
                a.post(SendWr::write(id, dst.remote(0)).sge(src.whole()));
            }
            a.run(SendWr::send(99));
            let wc = sleeper.join().expect("no panic");
            assert_eq!((wc.wr_id, wc.status), (u64::from(round), WcStatus::Success));
        });
        assert_bytes(&dst, 0, &vec![round + 1; len], "written");
    }
}

/// A queue pair is used, ended and dropped by different threads at once: no thread hangs, every request is flushed.
pub fn ended_while_in_use(bed: &Bed) {
    for _ in 0..20 {
        let (a, b) = bed.talking_pair();
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut posted = 0;
                while a
                    .qp
                    .post_send_one(SendWr::write(posted, b.mr(8).remote(0)).signaled())
                    .is_ok()
                    || a.qp.state() != weft_verbs::QpState::Error
                {
                    posted += 1;
                    written.store(posted, Ordering::Relaxed);
                    let wc = take(&a.scq, 1)[0];
                    if wc.status == WcStatus::WrFlushErr || posted > 100_000 {
                        break;
                    }
                }
            });
            scope.spawn(|| {
                until("some traffic", || written.load(Ordering::Relaxed) > 3);
                if bed.is_roce() {
                    // The peer is told, and does not have to find out by its retries.
                    b.qp.disconnect();
                } else {
                    b.qp.to_error();
                }
            });
            scope.spawn(|| {
                b.post_recv(RecvWr::new(1));
                assert_eq!(b.received().status, WcStatus::WrFlushErr);
            });
        });
    }
}

/// Bytes of the peer's memory that each side of the stress test uses.
const ARENA: usize = 256 * 1024;
/// Longest operation of the stress test.
const LONGEST: usize = 40_000;

/// Many threads, connections and random operations, both ways at once, checked against a model of the peer's memory.
pub fn stress(bed: &Bed) {
    const PAIRS: u64 = 4;
    let rounds = if bed.setup.largest < 1 << 20 { 40 } else { 150 };
    let listener = bed.listener(8);
    let half = Half {
        max_recv_wr: 4096,
        depth: 8192,
        ..Half::default()
    };
    let pairs: Vec<_> = (0..PAIRS)
        .map(|_| {
            let (a, b) = bed.pair_through(&listener, &half, &half);
            b.post_recv(RecvWr::new(u64::MAX));
            a.run(SendWr::send(0));
            b.received();
            (a, b)
        })
        .collect();
    let counters: Vec<_> = pairs.iter().map(|(a, b)| (a.mr(8), b.mr(8))).collect();
    let added = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (i, (a, b)) in pairs.iter().enumerate() {
            let arenas = (a.mr(2 * ARENA), b.mr(2 * ARENA));
            let landings = (a.mr(4096 * 64), b.mr(4096 * 64));
            for (end, landing) in [(a, &landings.0), (b, &landings.1)] {
                for id in 0..4000 {
                    end.post_recv(RecvWr::new(id).sge(landing.sge(id as usize * 64, 64)));
                }
            }
            let (counter_a, counter_b) = &counters[i];
            let (added, seed) = (&added, i as u64);
            scope.spawn(move || {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let arenas = (&arenas.0, &arenas.1);
                        one_side(
                            a,
                            arenas,
                            counter_b.remote(0),
                            &landings.0,
                            rounds,
                            2 * seed,
                            added,
                        );
                    });
                    let arenas = (&arenas.1, &arenas.0);
                    one_side(
                        b,
                        arenas,
                        counter_a.remote(0),
                        &landings.1,
                        rounds,
                        2 * seed + 1,
                        added,
                    );
                });
            });
        }
    });
    let total: u64 = counters
        .iter()
        .map(|(a, b)| a.load_u64(0).unwrap() + b.load_u64(0).unwrap())
        .sum();
    assert_eq!(total, added.load(Ordering::Relaxed));
}

/// Batches of random operations on the upper half of the peer's arena. Data is prepared and placed in the lower half of our own. A write after a read is
/// fenced, so that the model can predict each read.
fn one_side(
    end: &End,
    (own, peer): (&Mr, &Mr),
    counter: RemoteAddr,
    landing: &Mr,
    rounds: usize,
    seed: u64,
    added: &AtomicU64,
) {
    let mut rng = Rng::new(seed ^ 0xfeed);
    let mut model = vec![0; ARENA];
    let (mut sent, mut sum) = (0u64, 0u64);
    let old = end.mr(8 * 16);
    let sink = end.mr(ARENA);
    for round in 0..rounds {
        let mut batch = Vec::new();
        let mut reads: Vec<(usize, usize, Vec<u8>)> = Vec::new();
        let mut atomics = Vec::new();
        let mut scratch = 0;
        for id in 0..=rng.below(16) as u64 {
            let len = match rng.below(4) {
                0 => rng.below(64),
                1 | 2 => rng.below(3000),
                _ => rng.below(LONGEST),
            };
            let off = rng.below(ARENA - len);
            let room = scratch + len <= ARENA;
            let wr = match rng.below(8) {
                0..=2 if room => {
                    let data = pattern(rng.number(), len);
                    own.write(scratch, &data).unwrap();
                    model[off..off + len].copy_from_slice(&data);
                    let (first, second) = (len / 3, len - len / 3);
                    let wr = SendWr::write(id, peer.remote(ARENA + off))
                        .sge(own.sge(scratch, first))
                        .sge(own.sge(scratch + first, second))
                        .fence();
                    scratch += len;
                    wr
                }
                3..=5 if room => {
                    let wr = SendWr::read(id, peer.remote(ARENA + off)).sge(sink.sge(scratch, len));
                    reads.push((scratch, len, model[off..off + len].to_vec()));
                    scratch += len;
                    wr
                }
                6 => {
                    let add = rng.number() >> 40;
                    atomics.push((batch.len(), sum));
                    sum += add;
                    SendWr::fetch_add(id, counter, add).sge(old.sge(batch.len() * 8, 8))
                }
                _ if sent < 3900 => {
                    sent += 1;
                    SendWr::send(id).inline(&sent.to_ne_bytes())
                }
                _ => SendWr::write(id, peer.remote(0)),
            };
            batch.push(wr.signaled());
        }
        let count = batch.len();
        end.qp.post_send(&batch).unwrap();
        for (id, wc) in take(&end.scq, count).iter().enumerate() {
            assert_eq!(
                (wc.wr_id, wc.status),
                (id as u64, WcStatus::Success),
                "side {seed}, round {round}: {wc:?}"
            );
        }
        for (at, _, data) in &reads {
            assert_bytes(&sink, *at, data, "a read of the model");
        }
        for (at, before) in atomics {
            assert_eq!(old.load_u64(at * 8).unwrap(), before);
        }
    }
    added.fetch_add(sum, Ordering::Relaxed);
    // The end of our sends; then the peer's, in order, until its end.
    end.run(SendWr::send(1).inline(&u64::MAX.to_ne_bytes()));
    let mut expected = 1;
    loop {
        let wc = end.received();
        assert_eq!((wc.status, wc.opcode), (WcStatus::Success, WcOpcode::Recv));
        let value = landing.load_u64(wc.wr_id as usize * 64).unwrap();
        if value == u64::MAX {
            break;
        }
        assert_eq!(value, expected, "side {seed}");
        expected += 1;
    }
    // Our writes are in place when a later read is answered.
    end.run(SendWr::read(2, peer.remote(0)).sge(sink.sge(0, 1)));
    assert_bytes(peer, ARENA, &model, "the whole arena");
}
