//! Completion queues: polling, waiting, waking, overrun.

use std::time::{Duration, Instant};

use weft_verbs::{AsyncEvent, CqOverrun, Error, QpState, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

use crate::bed::{Bed, Half, PATIENCE, assert_ok, take, until};

/// A wait ends when its time is up, and not earlier.
pub fn wait_in_vain(bed: &Bed) {
    let (a, _b) = bed.pair();
    let mut out = [Wc::default(); 4];
    for time in [0, 1, 60] {
        let time = Duration::from_millis(time);
        let start = Instant::now();
        assert_eq!(a.rcq.wait(&mut out, Some(time)), Ok(0));
        assert!(start.elapsed() >= time);
    }
    // Without room for a completion a wait returns at once.
    assert_eq!(a.rcq.wait(&mut [], None), Ok(0));
    assert_eq!(a.rcq.poll(&mut []), Ok(0));
}

/// A sleeping waiter is woken by a message.
pub fn wake_by_a_message(bed: &Bed) {
    let (a, b) = bed.pair();
    for id in 0..20 {
        b.post_recv(RecvWr::new(id));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| b.received());
            a.post(SendWr::send(1));
            assert_ok(&waiter.join().expect("no panic"), id, WcOpcode::Recv, 0);
        });
    }
}

/// A sleeping waiter is woken by another thread of its process: by a flush, or by progress that the thread makes.
pub fn wake_by_another_thread(bed: &Bed) {
    let (a, b) = bed.pair();
    b.post_recv(RecvWr::new(1));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.received());
        // The other thread makes the progress: it polls the same connection through its other queue.
        until("the message", || {
            a.qp.state() == QpState::Rts && {
                a.post(SendWr::send(1));
                true
            }
        });
        while !waiter.is_finished() {
            b.scq.poll(&mut [Wc::default(); 1]).unwrap();
        }
        assert_eq!(waiter.join().expect("no panic").status, WcStatus::Success);
    });
    b.post_recv(RecvWr::new(2));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.received());
        b.qp.to_error();
        let wc = waiter.join().expect("no panic");
        assert_eq!((wc.wr_id, wc.status), (2, WcStatus::WrFlushErr));
    });
}

/// Several threads wait on one queue: each completion goes to exactly one, and none sleeps on.
pub fn several_waiters(bed: &Bed) {
    const WAITERS: u64 = 6;
    let (a, b) = bed.pair();
    for _ in 0..10 {
        for id in 0..WAITERS {
            b.post_recv(RecvWr::new(id));
        }
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..WAITERS).map(|_| scope.spawn(|| b.received())).collect();
            for id in 0..WAITERS {
                a.post(SendWr::send(id));
            }
            let mut ids: Vec<_> = waiters
                .into_iter()
                .map(|w| w.join().expect("no panic").wr_id)
                .collect();
            ids.sort_unstable();
            assert!(ids.into_iter().eq(0..WAITERS));
        });
    }
}

/// A request that one thread posts is sent while another thread sleeps on the queue pair's completions.
pub fn post_while_another_thread_waits(bed: &Bed) {
    let (a, b) = bed.pair();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut out = [Wc::default(); 1];
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let n = a.rcq.wait(&mut out, Some(Duration::from_secs(2))).unwrap();
                assert_eq!(n, 0);
            }
        });
        for round in 0..5 {
            for id in 0..10 {
                b.post_recv(RecvWr::new(id));
            }
            // The thread may be asleep by now: both cases must work.
            std::thread::yield_now();
            let start = Instant::now();
            for id in 0..10 {
                a.post(SendWr::send(id));
            }
            take(&b.rcq, 10);
            assert!(
                start.elapsed() < Duration::from_secs(1),
                "round {round}: sent only when the waiter woke"
            );
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// A sleeping thread gets the completions of a queue pair that joins the queue meanwhile, also while another one leaves.
pub fn members_come_and_go_beside_a_sleeper(bed: &Bed) {
    let cq = bed.b.create_cq(64, None).unwrap();
    let half = Half {
        cqs: Some((cq.clone(), cq.clone())),
        ..Half::default()
    };
    let listener = bed.listener(8);
    let mut before = None;
    for round in 0..6 {
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| take(&cq, 1)[0]);
            std::thread::yield_now();
            let (a, b) = bed.pair_through(&listener, &Half::default(), &half);
            // The queue pair of the last round leaves now.
            drop(before.take());
            b.post_recv(RecvWr::new(round));
            a.post(SendWr::send(1));
            let wc = sleeper.join().expect("no panic");
            assert_ok(&wc, round, WcOpcode::Recv, 0);
            assert_eq!(wc.qp_num, b.qp.num());
            before = Some((a, b));
        });
    }
}

/// A queue with too few entries keeps its completions, reports the overrun, raises an event, and its queue pair ends.
pub fn overrun(bed: &Bed) {
    let half = Half {
        depth: 4,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&Half::default(), &half);
    for id in 0..10 {
        b.post_recv(RecvWr::new(id));
    }
    for id in 0..10 {
        a.post(SendWr::send(id));
    }
    let cq_num = b.rcq.num();
    assert_eq!(b.event(), AsyncEvent::CqOverrun { cq_num });
    until("the end", || b.qp.state() == QpState::Error);
    let mut out = [Wc::default(); 16];
    assert_eq!(b.rcq.poll(&mut out), Ok(4));
    for (id, wc) in out[..4].iter().enumerate() {
        assert_ok(wc, id as u64, WcOpcode::Recv, 0);
    }
    assert_eq!(b.rcq.poll(&mut out), Err(CqOverrun));
    assert_eq!(b.rcq.wait(&mut out, None), Err(CqOverrun));
    let event = b.event();
    let qp_num = b.qp.num();
    assert!(
        matches!(event, AsyncEvent::QpFatal { qp_num: n, .. } if n == qp_num),
        "{event:?}"
    );
}

/// Exactly as many completions as entries fit.
pub fn filled_to_the_brim(bed: &Bed) {
    let half = Half {
        depth: 4,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&Half::default(), &half);
    for _ in 0..5 {
        for id in 0..4 {
            b.post_recv(RecvWr::new(id));
        }
        for id in 0..4 {
            a.post(SendWr::send(id));
        }
        a.run(SendWr::read(9, b.mr(8).remote(0)).sge(a.mr(8).sge(0, 0)));
        let mut out = [Wc::default(); 3];
        let mut ids = Vec::new();
        while ids.len() < 4 {
            let n = b.rcq.wait(&mut out, Some(PATIENCE)).unwrap();
            assert!((1..=3).contains(&n));
            ids.extend(out[..n].iter().map(|wc| wc.wr_id));
        }
        assert_eq!(ids, [0, 1, 2, 3]);
    }
    assert_eq!(b.qp.state(), QpState::Rts);
}

/// One queue for sends and receives of several queue pairs, more of them than a poller serves itself.
pub fn shared_by_many(bed: &Bed) {
    const PAIRS: usize = 12;
    let cq = bed.b.create_cq(1024, None).unwrap();
    let half = Half {
        cqs: Some((cq.clone(), cq.clone())),
        ..Half::default()
    };
    let listener = bed.listener(16);
    let pairs: Vec<_> = (0..PAIRS)
        .map(|_| bed.pair_through(&listener, &Half::default(), &half))
        .collect();
    for round in 0..5 {
        for (i, (a, b)) in pairs.iter().enumerate() {
            b.post_recv(RecvWr::new(i as u64));
            a.post(SendWr::send(round));
        }
        let mut seen = [false; PAIRS];
        for wc in take(&cq, PAIRS) {
            assert_eq!(wc.qp_num, pairs[wc.wr_id as usize].1.qp.num());
            seen[wc.wr_id as usize] = true;
        }
        assert_eq!(seen, [true; PAIRS]);
        for (i, (a, b)) in pairs.iter().enumerate() {
            a.post_recv(RecvWr::new(1));
            b.post(SendWr::send(100 + i as u64).signaled());
            assert_eq!(a.received().wr_id, 1);
        }
        let mut ids: Vec<_> = take(&cq, PAIRS).iter().map(|wc| wc.wr_id).collect();
        ids.sort_unstable();
        assert!(ids.into_iter().eq(100..100 + PAIRS as u64));
    }
    // Down to few again: the poller serves them itself from now on.
    let pairs = &pairs[..2];
    for (a, b) in pairs {
        b.post_recv(RecvWr::new(5));
        a.post(SendWr::send(1));
        assert_eq!(take(&cq, 1)[0].wr_id, 5);
    }
}

/// A queue can be made longer and shorter, but not shorter than what is in it.
pub fn resized(bed: &Bed) {
    let half = Half {
        depth: 2,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&Half::default(), &half);
    let fill = |n: u64| {
        for id in 0..n {
            b.post_recv(RecvWr::new(id));
            a.post(SendWr::send(id));
        }
        // All of them have arrived when the read is answered, and are in the queue when the thread that sent the answer releases the connection.
        a.run(SendWr::read(9, b.mr(8).remote(0)).sge(a.mr(8).sge(0, 0)));
        b.qp.counters();
    };
    fill(2);
    b.rcq.resize(5).unwrap();
    fill(3);
    assert_eq!(b.rcq.depth(), 5);
    assert!(matches!(b.rcq.resize(4), Err(Error::Invalid(_))));
    assert!(matches!(b.rcq.resize(0), Err(Error::Invalid(_))));
    let most = bed.b.attr().limits.max_cqe;
    assert!(matches!(b.rcq.resize(most + 1), Err(Error::Limit(_))));
    for (i, wc) in take(&b.rcq, 5).iter().enumerate() {
        assert_ok(wc, [0, 1, 0, 1, 2][i], WcOpcode::Recv, 0);
    }
    b.rcq.resize(1).unwrap();
    fill(1);
    take(&b.rcq, 1);
    b.post_recv(RecvWr::new(1));
    b.post_recv(RecvWr::new(2));
    a.post(SendWr::send(1));
    a.post(SendWr::send(2));
    let cq_num = b.rcq.num();
    assert_eq!(b.event(), AsyncEvent::CqOverrun { cq_num });
}
