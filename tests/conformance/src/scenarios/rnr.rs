//! Messages that find no receive posted, on queue pairs that wait for one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weft_verbs::ext::QpExt;
use weft_verbs::{EndReason, QpState, RecvWr, Rnr, SendWr, WcOpcode, WcStatus};

use super::states::watch_end;
use crate::bed::{
    Bed, End, Half, PATIENCE, Rng, assert_bytes, assert_none, assert_ok, pattern, take, until,
};
use crate::need;

fn half() -> Half {
    Half {
        rnr: Rnr::Wait,
        ..Half::default()
    }
}

fn pair(bed: &Bed) -> (End, End) {
    bed.pair_with(&half(), &half())
}

/// A message waits for its receive, and the peer's later requests wait as well; earlier ones are executed.
pub fn one_by_one(bed: &Bed) {
    let (a, b) = pair(bed);
    let mr = b.mr(256);
    let wr = |id: u64| SendWr::send(id).inline(&[id as u8; 40]);
    a.post(SendWr::write(0, mr.remote(200)).inline(b"before"));
    for id in 1..=4 {
        a.post(wr(id));
    }
    a.post(SendWr::write_imm(5, mr.remote(100), 55).inline(b"behind"));
    a.post(wr(6).solicited().signaled());
    until("what came before is in place", || {
        mr.to_vec(200, 6).unwrap() == b"before"
    });
    assert_none(&b.rcq);
    for id in 1..=6 {
        assert_eq!(b.qp.state(), QpState::Rts);
        b.post_recv(RecvWr::new(id).sge(mr.sge(0, 64)));
        let wc = b.received();
        if id == 5 {
            assert_eq!((wc.opcode, wc.imm), (WcOpcode::RecvWithImm, Some(55)));
            assert_bytes(&mr, 100, b"behind", "write with immediate");
        } else {
            assert_ok(&wc, id, WcOpcode::Recv, 40);
            assert_bytes(&mr, 0, &[id as u8; 40], "message");
        }
    }
    assert_eq!(a.sent().wr_id, 6);
    // Posted receives are consumed as usual.
    b.post_recv(RecvWr::new(7).sge(mr.sge(0, 64)));
    a.run(wr(7));
    assert_ok(&b.received(), 7, WcOpcode::Recv, 40);
}

/// More data than either side keeps in memory waits in the transport, and then arrives.
pub fn much(bed: &Bed) {
    let (a, b) = pair(bed);
    let len = bed.setup.largest.min(300_000);
    let data = pattern(7, len);
    let from = a.mr_of(&data);
    let to = b.mr(len);
    for id in 0..20 {
        a.post(SendWr::send(id).sge(from.whole()).signaled());
    }
    for id in 0..20 {
        to.fill(0, len, 0).unwrap();
        b.post_recv(RecvWr::new(id).sge(to.whole()));
        assert_ok(&b.received(), id, WcOpcode::Recv, len);
        assert_bytes(&to, 0, &data, "message");
    }
    assert_eq!(take(&a.scq, 20).len(), 20);
}

/// Our own requests are sent while a message waits, and their answers arrive after it in the stream.
pub fn answers_do_not_wait(bed: &Bed) {
    let (a, b) = pair(bed);
    let len = bed.setup.largest.min(200_000);
    let data = pattern(3, len);
    let (there, here) = (a.mr_of(&data), b.mr(len));
    let word = a.mr(8);
    a.post_recv(RecvWr::new(9));
    a.post(SendWr::send(1).inline(b"waits"));
    a.run(SendWr::write(2, here.remote(0)));
    for _ in 0..3 {
        here.fill(0, len, 0).unwrap();
        let wc = b.run(SendWr::read(3, there.remote(0)).sge(here.whole()));
        assert_eq!(wc.byte_len as usize, len);
        assert_bytes(&here, 0, &data, "what was read");
        b.run(SendWr::fetch_add(4, word.remote(0), 1).sge(here.sge(0, 8)));
    }
    assert_eq!(word.load_u64(0), Ok(3));
    b.run(SendWr::send(5));
    assert_ok(&a.received(), 9, WcOpcode::Recv, 0);
    b.post_recv(RecvWr::new(6).sge(here.whole()));
    assert_ok(&b.received(), 6, WcOpcode::Recv, 5);
}

/// The peer's requests keep their order after a waiting message.
pub fn requests_wait(bed: &Bed) {
    let (a, b) = pair(bed);
    let (from, to) = (a.mr(64), b.mr(64));
    // Zero bytes: a peer in shared memory would execute a longer read itself.
    a.post(SendWr::send(1).inline(b"waits").signaled());
    a.post(SendWr::read(2, to.remote(0)).sge(from.sge(0, 0)).signaled());
    a.post(SendWr::send(3));
    assert_eq!(a.sent().wr_id, 1);
    b.run(SendWr::read(4, from.remote(0)).sge(to.sge(0, 0)));
    assert_none(&a.scq);
    assert_eq!(a.qp.outstanding(), 2);
    b.post_recv(RecvWr::new(5).sge(to.whole()));
    assert_ok(&b.received(), 5, WcOpcode::Recv, 5);
    assert_eq!(a.sent().wr_id, 2);
    b.post_recv(RecvWr::new(6));
    assert_ok(&b.received(), 6, WcOpcode::Recv, 0);
    // Given up: outstanding requests complete with the reason.
    a.post(SendWr::send(7).signaled());
    a.post(SendWr::read(8, to.remote(0)).sge(from.sge(0, 0)));
    a.post(SendWr::send(9));
    assert_eq!(a.sent().wr_id, 7);
    until("the last one is transmitted", || a.qp.outstanding() == 2);
    a.qp.fail(WcStatus::RnrRetryExcErr);
    let wc = a.sent();
    assert_eq!((wc.wr_id, wc.status), (8, WcStatus::RnrRetryExcErr));
    let wc = a.sent();
    assert_eq!((wc.wr_id, wc.status), (9, WcStatus::WrFlushErr));
}

/// A message with a retry limit is given up and named; earlier messages were received.
pub fn limited(bed: &Bed) {
    let (a, b) = pair(bed);
    let (timer, len) = (Duration::from_millis(20), bed.setup.largest.min(100_000));
    a.qp.set_rnr_retry(1);
    b.qp.set_min_rnr_timer(timer);
    let (from, to) = (a.mr(len), b.mr(len));
    let end = watch_end(&b);
    b.post_recv(RecvWr::new(1).sge(to.whole()));
    let start = Instant::now();
    for id in 1..=3 {
        a.post(SendWr::send(id).sge(from.whole()).signaled());
    }
    assert_ok(&b.received(), 1, WcOpcode::Recv, len);
    let sent = take(&a.scq, 3);
    let reason = end.recv_timeout(PATIENCE).expect("the end is announced");
    assert!(start.elapsed() >= 2 * timer);
    assert_eq!(reason, EndReason::Terminated(0x1202));
    until("the end", || b.qp.state() == QpState::Error);
    assert_eq!(sent[0].status, WcStatus::Success);
    if bed.setup.remote_completion {
        assert_eq!(sent[1].status, WcStatus::RnrRetryExcErr);
        assert_eq!(sent[2].status, WcStatus::WrFlushErr);
    }
}

/// Another thread posts receives at any time, while the receiver polls or sleeps.
pub fn posted_by_another_thread(bed: &Bed) {
    let (a, b) = bed.pair_with(
        &half(),
        &Half {
            max_recv_wr: 64,
            ..half()
        },
    );
    let count = 600;
    let mut rng = Rng::new(5);
    let len = bed.setup.largest.min(3000);
    let from = a.mr_of(&pattern(1, len));
    let to = b.mr(len);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(6);
            let mut posted = 0;
            while posted < count {
                let n = (1 + rng.below(4)).min(count - posted);
                for _ in 0..n {
                    let wr = RecvWr::new(posted as u64).sge(to.whole());
                    until("room", || b.qp.post_recv(std::slice::from_ref(&wr)).is_ok());
                    posted += 1;
                }
                for _ in 0..rng.below(200) {
                    std::thread::yield_now();
                }
            }
        });
        scope.spawn(|| {
            for id in 0..count {
                let wr = SendWr::send(id as u64).sge(from.sge(0, rng.below(len)));
                let wr = wr.signaled();
                until("room", || a.qp.post_send_one(wr.clone()).is_ok());
                if id % 16 == 15 {
                    for wc in take(&a.scq, 16) {
                        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
                    }
                }
            }
        });
        for id in 0..count {
            let wc = b.received();
            assert_eq!((wc.wr_id, wc.status), (id as u64, WcStatus::Success));
        }
    });
}

/// Waiting queue pairs share a receive queue: each new receive goes to one of them.
pub fn shared_queue(bed: &Bed) {
    need!(bed, srq);
    let pd = bed.b.alloc_pd().unwrap();
    let srq = pd.create_srq(64, 2).unwrap();
    let cq = || bed.b.create_cq(1024, None).unwrap();
    let shared = Half {
        pd: Some(pd),
        srq: Some(srq.clone()),
        cqs: Some((cq(), cq())),
        ..half()
    };
    let listener = bed.listener(8);
    let mut pairs: Vec<_> = (0..4)
        .map(|_| bed.pair_through(&listener, &half(), &shared))
        .collect();
    for (a, _) in &pairs {
        for id in 0..3 {
            a.post(SendWr::send(id));
        }
    }
    let (a, b) = &pairs[0];
    if bed.setup.remote_completion {
        a.post(SendWr::send(3));
    } else {
        a.run(SendWr::send(3));
    }
    let rcq = b.rcq.clone();
    assert_none(&rcq);
    let mut seen = Vec::new();
    for id in 0..5 {
        srq.post_recv(&[RecvWr::new(id)]).unwrap();
        let wc = take(&rcq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success));
        seen.push(wc.qp_num);
    }
    // One that ends takes no receive from the others.
    let (_, gone) = pairs.remove(3);
    gone.qp.to_error();
    let wrs: Vec<_> = (5..20).map(RecvWr::new).collect();
    srq.post_recv(&wrs).unwrap();
    for (a, _) in &pairs {
        a.run(SendWr::send(9));
    }
    let messages = 5 + 4 + 4;
    seen.retain(|num| *num != gone.qp.num());
    for wc in take(&rcq, messages - seen.len()) {
        assert_eq!(wc.status, WcStatus::Success);
        seen.push(wc.qp_num);
    }
    for ((_, b), count) in pairs.iter().zip([5, 4, 4]) {
        let of = seen.iter().filter(|num| **num == b.qp.num());
        assert_eq!(of.count(), count);
    }
    assert_none(&rcq);
}

/// The connection ends while a message waits.
pub fn ends(bed: &Bed) {
    for way in 0..4 {
        let (a, b) = pair(bed);
        let end = watch_end(&b);
        let mr = b.mr(64);
        a.post(SendWr::send(1).inline(b"waits"));
        a.post(SendWr::send(2).inline(b"too"));
        let near = a.mr(64);
        b.run(SendWr::read(3, near.remote(0)).sge(mr.sge(0, 0)));
        match way {
            0 => a.qp.to_error(),
            1 => b.qp.to_error(),
            2 => {
                b.qp.disconnect();
                a.qp.disconnect();
            }
            _ => {
                // Closed in order: the message can still be received.
                a.qp.disconnect();
                b.post_recv(RecvWr::new(4).sge(mr.whole()));
                assert_ok(&b.received(), 4, WcOpcode::Recv, 5);
                b.post_recv(RecvWr::new(5).sge(mr.whole()));
                assert_ok(&b.received(), 5, WcOpcode::Recv, 3);
            }
        }
        let reason = end.recv_timeout(PATIENCE).expect("the end is announced");
        if way == 3 {
            assert_eq!(reason, EndReason::Disconnected);
        }
        until("the end", || b.qp.state() == QpState::Error);
        b.post_recv(RecvWr::new(6).sge(mr.whole()));
        assert_eq!(b.received().status, WcStatus::WrFlushErr, "way {way}");
    }
}

/// A waiting message does not keep a sleeping thread awake.
pub fn sleeps_beside_it(bed: &Bed) {
    let (a, b) = pair(bed);
    a.post(SendWr::send(1).inline(&[1; 200]));
    a.run(SendWr::send(2).inline(&[2; 200]));
    let mr = b.mr(256);
    let awake = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for id in [1, 2] {
                let wc = b.received();
                assert_ok(&wc, id, WcOpcode::Recv, 200);
            }
            awake.store(true, Ordering::SeqCst);
        });
        let before = b.qp.counters().rx_syscalls;
        // Enough time to notice a busy loop.
        std::thread::sleep(Duration::from_millis(50));
        let looks = b.qp.counters().rx_syscalls - before;
        assert!(
            looks < 1000,
            "{looks} looks at the transport while nothing can be received"
        );
        assert!(!awake.load(Ordering::SeqCst));
        b.post_recv(RecvWr::new(1).sge(mr.whole()));
        b.post_recv(RecvWr::new(2).sge(mr.whole()));
    });
}

/// A long waiting message does not delay the answers after it.
pub fn answers_pass_a_long_message(bed: &Bed) {
    let (a, b) = pair(bed);
    let len = bed.setup.largest.min(1 << 20);
    let data = pattern(4, len);
    let (from, to) = (a.mr_of(&data), b.mr(len));
    let word = a.mr(8);
    for round in 0..3 {
        a.post(SendWr::send(1).sge(from.whole()));
        b.run(SendWr::read(2, word.remote(0)).sge(to.sge(0, 0)));
        b.run(SendWr::fetch_add(3, word.remote(0), 1).sge(to.sge(0, 8)));
        assert_eq!(word.load_u64(0), Ok(round + 1));
        b.post_recv(RecvWr::new(4).sge(to.whole()));
        assert_ok(&b.received(), 4, WcOpcode::Recv, len);
        assert_bytes(&to, 0, &data, "message");
    }
}
