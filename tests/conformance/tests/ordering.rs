//! Work that the initiator does itself in shared memory, together with its work through the ring: the program sees the order of RFC 5040 section 5.5.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weft_conformance::bed::{ALL, Bed, End, Half, Memory, Rng, Setup};
use weft_verbs::{RecvWr, SendWr, Wc};

const ROUNDS: u64 = 1000;
/// Small Writes of a round. Their target memory is not mapped, so they use the ring.
const WRITES: u64 = 400;

/// One test at a time: both sides of it need a processor.
static TURN: Mutex<()> = Mutex::new(());

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Runs `round` while the responder polls. Before each round the initiator sends it a payload to pull, whose arrival it reports at once. Then it sends more
/// small Writes of `round << 32 | k` to `x` than the responder processes while the initiator continues.
fn rounds(mut round: impl FnMut(u64, &End, &End, &weft_verbs::Mr)) {
    let _turn = TURN.lock();
    let half = Half {
        max_send_wr: 2048,
        ..Half::default()
    };
    let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
    let (a, b) = bed.pair_with(&half, &half);
    let x = b.pd.reg_mr(vec![0; 4096], ALL).expect("a region");
    let (payload, sink) = (a.mr(8192), b.mr(8192));
    let stop = AtomicBool::new(false);
    let mut rng = Rng::new(7);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                b.rcq.poll(&mut [Wc::default(); 4]).expect("poll");
            }
        });
        // The poller must continue even after a failure.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for number in 1..=ROUNDS {
                b.post_recv(RecvWr::new(0).sge(sink.whole()));
                let mut wrs = vec![SendWr::send(1).sge(payload.whole())];
                wrs.extend((0..WRITES).map(|k| {
                    let value = number << 32 | k;
                    SendWr::write(2, x.remote(0)).inline(&value.to_ne_bytes())
                }));
                a.qp.post_send(&wrs).expect("post");
                spin(Duration::from_nanos(rng.below(80_000) as u64));
                round(number, &a, &b, &x);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_read_sees_the_writes_before_it() {
    let mut got = None;
    let mut stale = Vec::new();
    rounds(|round, a, _, x| {
        let got = got.get_or_insert_with(|| a.mr(8));
        a.run(SendWr::read(3, x.remote(0)).sge(got.whole()));
        let value = got.load_u64(0).expect("8 bytes");
        if value != round << 32 | (WRITES - 1) {
            stale.push((round, value & 0xffff_ffff));
        }
    });
    assert!(stale.is_empty(), "of {WRITES} Writes seen: {stale:?}");
}

#[test]
fn of_two_writes_the_later_one_stays() {
    let mut made = None;
    let mut lost = Vec::new();
    rounds(|round, a, b, x| {
        let (new, message, sink) = made.get_or_insert_with(|| {
            let new = a.mr(2048);
            new.fill(0, 2048, 0xee).expect("its own bytes");
            (new, a.mr(8192), b.mr(8192))
        });
        b.post_recv(RecvWr::new(0).sge(sink.whole()));
        // Long enough to be executed directly.
        a.run(SendWr::write(3, x.remote(0)).sge(new.whole()));
        // It is complete when the peer has pulled its payload: all earlier requests are in place.
        a.run(SendWr::send(4).sge(message.whole()));
        if x.load_u64(0).expect("8 bytes") != u64::from_ne_bytes([0xee; 8]) {
            lost.push(round);
        }
    });
    assert!(lost.is_empty(), "an earlier Write came later: {lost:?}");
}
