//! The life of a queue pair: allowed posts, flushed requests, and the ends of a connection.

use weft_verbs::cm::ConnectError;
use weft_verbs::ext::QpExt;
use weft_verbs::{EndReason, PostReason, QpState, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

use crate::bed::{Bed, End, Half, PATIENCE, assert_bytes, assert_none, assert_ok, take, until};

/// The reason that a hook of [`weft_verbs::Qp::on_end`] gets.
pub(crate) fn watch_end(end: &End) -> std::sync::mpsc::Receiver<EndReason> {
    let (tx, rx) = std::sync::mpsc::channel();
    end.qp.on_end(move |reason| {
        let _ = tx.send(reason);
    });
    rx
}

/// Before it is connected a queue pair accepts receives and no sends.
pub fn before_connected(bed: &Bed) {
    let end = bed.end(&bed.a, &Half::default());
    assert_eq!(end.qp.state(), QpState::Init);
    let error = end.qp.post_send_one(SendWr::send(1)).unwrap_err();
    assert_eq!((error.index, error.reason), (0, PostReason::State));
    end.post_recv(RecvWr::new(7));
    end.qp.to_error();
    assert_eq!(end.qp.state(), QpState::Error);
    let wc = end.received();
    assert_eq!((wc.wr_id, wc.status), (7, WcStatus::WrFlushErr));
    // In the error state both kinds are accepted, and flushed.
    end.post(SendWr::send(8));
    end.post_recv(RecvWr::new(9));
    assert_eq!(end.sent().status, WcStatus::WrFlushErr);
    assert_eq!(end.received().wr_id, 9);
}

/// Closing in order, from either side: posted requests arrive, then both sides see the end and their receives are flushed, in order. No asynchronous event is
/// raised.
pub fn disconnect(bed: &Bed) {
    for from_initiator in [true, false] {
        let (a, b) = bed.talking_pair();
        let (near, far) = if from_initiator { (a, b) } else { (b, a) };
        let ends = [watch_end(&near), watch_end(&far)];
        for i in 0..4 {
            near.post_recv(RecvWr::new(10 + i));
            far.post_recv(RecvWr::new(20 + i));
        }
        near.post(SendWr::send(1));
        near.post(SendWr::send(2).signaled());
        near.qp.disconnect();
        let error = near.qp.post_send_one(SendWr::send(3));
        assert!(
            near.qp.state() == QpState::Error || error.unwrap_err().reason == PostReason::State,
            "no more sends while closing"
        );
        let wcs = take(&far.rcq, 4);
        assert_ok(&wcs[0], 20, WcOpcode::Recv, 0);
        assert_ok(&wcs[1], 21, WcOpcode::Recv, 0);
        assert_eq!((wcs[2].wr_id, wcs[2].status), (22, WcStatus::WrFlushErr));
        assert_eq!((wcs[3].wr_id, wcs[3].status), (23, WcStatus::WrFlushErr));
        assert_ok(&near.sent(), 2, WcOpcode::Send, 0);
        far.qp.disconnect();
        for (i, wc) in take(&near.rcq, 4).iter().enumerate() {
            assert_eq!((wc.wr_id, wc.status), (10 + i as u64, WcStatus::WrFlushErr));
        }
        for end in ends {
            let reason = end.recv_timeout(PATIENCE).expect("the end is announced");
            assert_eq!(reason, EndReason::Disconnected);
        }
        assert_eq!(near.qp.state(), QpState::Error);
        assert_eq!(far.qp.state(), QpState::Error);
        for end in [&near, &far] {
            assert_eq!(
                end.device.get_async_event(Some(std::time::Duration::ZERO)),
                None
            );
        }
    }
}

/// Requests posted before an orderly end arrive, even if another thread drives the connection at that moment.
pub fn disconnect_beside_a_poller(bed: &Bed) {
    for round in 0..60 {
        let (near, far) = bed.talking_pair();
        for i in 0..8 {
            far.post_recv(RecvWr::new(i));
        }
        let posted = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The completions are not looked at: polling only drives.
                while !posted.load(std::sync::atomic::Ordering::Acquire) {
                    near.rcq.poll(&mut [Wc::default()]).expect("no overrun");
                }
            });
            for _ in 0..7 {
                near.post(SendWr::send(1));
            }
            near.post(SendWr::send(2).signaled());
            near.qp.disconnect();
            posted.store(true, std::sync::atomic::Ordering::Release);
        });
        for (i, wc) in take(&far.rcq, 8).iter().enumerate() {
            assert_ok(wc, i as u64, WcOpcode::Recv, 0);
        }
        assert_ok(&near.sent(), 2, WcOpcode::Send, 0);
        assert_ne!(near.qp.state(), QpState::Rts, "round {round}");
        far.qp.disconnect();
    }
}

/// A paused queue pair makes no progress, whichever thread drives it, and continues completely afterwards.
pub fn pause(bed: &Bed) {
    let (a, b) = bed.talking_pair();
    let (c, d) = bed.talking_pair();
    let (mem, written) = (b.mr(64), a.mr_of(&[7; 8]));
    b.post_recv(RecvWr::new(1));
    a.post_recv(RecvWr::new(2));
    b.qp.pause(true);
    a.post(SendWr::write(3, mem.remote(0)).sge(written.sge(0, 8)));
    a.post(
        SendWr::read(4, mem.remote(0))
            .sge(written.sge(0, 8))
            .signaled(),
    );
    a.post(SendWr::send(5).signaled());
    b.post(SendWr::send(6).signaled());
    // The engines and polling threads have every reason to drive it.
    for i in 0..200 {
        d.post_recv(RecvWr::new(i));
        c.run(SendWr::send(i));
        assert_eq!(d.received().wr_id, i);
        for cq in [&a.rcq, &b.rcq, &b.scq] {
            assert_none(cq);
        }
    }
    assert_bytes(&mem, 0, &[0; 8], "the peer's write");
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Rts, QpState::Rts));
    b.qp.pause(false);
    assert_ok(&b.received(), 1, WcOpcode::Recv, 0);
    assert_ok(&a.received(), 2, WcOpcode::Recv, 0);
    assert_ok(&b.sent(), 6, WcOpcode::Send, 0);
    assert_ok(&a.sent(), 4, WcOpcode::Read, 8);
    assert_ok(&a.sent(), 5, WcOpcode::Send, 0);
    assert_bytes(&mem, 0, &[7; 8], "the peer's write");
    // A thread that sleeps meanwhile is woken by an arrival.
    b.qp.pause(true);
    b.post_recv(RecvWr::new(8));
    a.post(SendWr::send(7));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| b.received().wr_id);
        for i in 0..200 {
            d.post_recv(RecvWr::new(i));
            c.run(SendWr::send(i));
            d.received();
        }
        b.qp.pause(false);
        assert_eq!(sleeper.join().expect("no panic"), 8);
    });
}

/// A cut connection is lost on both sides, without a reason.
pub fn cut(bed: &Bed) {
    let (a, b) = bed.talking_pair();
    let ends = [watch_end(&a), watch_end(&b)];
    for end in [&a, &b] {
        end.post_recv(RecvWr::new(7));
    }
    a.qp.cut();
    for (end, told) in [&a, &b].into_iter().zip(ends) {
        let wc = take(&end.rcq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::WrFlushErr));
        assert_eq!(wc.vendor_err, 0);
        let reason = told.recv_timeout(PATIENCE).expect("the end is announced");
        assert_eq!(reason, EndReason::Lost);
        assert_eq!(end.qp.state(), QpState::Error);
    }
}

/// An abortive end flushes everything on both sides: sends in the order posted, receives in the order posted.
pub fn to_error(bed: &Bed) {
    let (a, b) = bed.talking_pair();
    let ends = [watch_end(&a), watch_end(&b)];
    for i in 0..5 {
        a.post_recv(RecvWr::new(100 + i));
        b.post_recv(RecvWr::new(200 + i));
    }
    a.qp.to_error();
    assert_eq!(a.qp.state(), QpState::Error);
    for (cq, base) in [(&a.rcq, 100), (&b.rcq, 200)] {
        for (i, wc) in take(cq, 5).iter().enumerate() {
            assert_eq!(
                (wc.wr_id, wc.status, wc.opcode),
                (base + i as u64, WcStatus::WrFlushErr, WcOpcode::Recv)
            );
        }
    }
    for i in 0..5 {
        a.post(SendWr::send(300 + i));
    }
    for (i, wc) in take(&a.scq, 5).iter().enumerate() {
        assert_eq!(
            (wc.wr_id, wc.status),
            (300 + i as u64, WcStatus::WrFlushErr)
        );
    }
    let [near, far] = ends.map(|end| end.recv_timeout(PATIENCE).expect("announced"));
    assert!(matches!(near, EndReason::Terminated(_)), "{near:?}");
    assert!(matches!(far, EndReason::PeerTerminated(_)), "{far:?}");
    a.post_recv(RecvWr::new(9));
    assert_eq!(a.received().status, WcStatus::WrFlushErr);
    assert_none(&a.scq);
    assert_none(&a.rcq);
}

/// Dropping a queue pair closes its connection: the peer is flushed.
pub fn drop_of_a_qp(bed: &Bed) {
    let (a, b) = bed.pair();
    b.post_recv(RecvWr::new(1));
    b.post_recv(RecvWr::new(2));
    a.run(SendWr::send(1));
    assert_ok(&b.received(), 1, WcOpcode::Recv, 0);
    let End { qp, .. } = a;
    drop(qp);
    assert_eq!(b.received().status, WcStatus::WrFlushErr);
    until("the end", || b.qp.state() == QpState::Error);
}

/// A queue pair that expects a connection keeps posted requests until it is connected.
pub fn expected(bed: &Bed) {
    let half = Half {
        max_send_wr: 4,
        recvs: (0..3).map(RecvWr::new).collect(),
        ..Half::default()
    };
    let (a, b) = (bed.end(&bed.a, &half), bed.end(&bed.b, &half));
    let there = b.mr_of(b"there");
    let mr = a.mr(8);
    a.qp.allow_early_posts();
    assert_eq!(a.qp.state(), QpState::Init);
    a.post(SendWr::send(1));
    a.post(SendWr::send(2).signaled());
    a.post(
        SendWr::read(3, there.remote(0))
            .sge(mr.sge(0, 5))
            .signaled(),
    );
    a.post(SendWr::send(4));
    let error = a.qp.post_send_one(SendWr::send(5)).unwrap_err();
    assert_eq!((error.index, error.reason), (0, PostReason::Full));
    assert_none(&a.scq);
    b.qp.allow_early_posts();
    b.post(SendWr::send(6).signaled());
    let (a, b) = connect(bed, a, b, 16);
    for id in 0..3 {
        assert_ok(&b.received(), id, WcOpcode::Recv, 0);
    }
    assert_ok(&a.sent(), 2, WcOpcode::Send, 0);
    assert_ok(&a.sent(), 3, WcOpcode::Read, 5);
    assert_bytes(&mr, 0, b"there", "what was read");
    assert_ok(&b.sent(), 6, WcOpcode::Send, 0);
    assert_ok(&a.received(), 0, WcOpcode::Recv, 0);
    // It continues as any other.
    b.post_recv(RecvWr::new(9));
    a.run(SendWr::send(7));
    assert_ok(&b.received(), 9, WcOpcode::Recv, 0);
}

/// A Read that was posted before the connection, and that the peer does not allow, fails.
pub fn expected_read_refused(bed: &Bed) {
    let half = Half {
        recvs: vec![RecvWr::new(1)],
        ..Half::default()
    };
    let (a, b) = (bed.end(&bed.a, &half), bed.end(&bed.b, &half));
    let remote = b.mr(8).remote(0);
    a.qp.allow_early_posts();
    a.post(SendWr::read(2, remote).sge(a.mr(8).whole()));
    a.post(SendWr::send(3));
    let (a, b) = connect(bed, a, b, 0);
    let wc = a.sent();
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::LocQpOpErr));
    let wc = a.sent();
    assert_eq!((wc.wr_id, wc.status), (3, WcStatus::WrFlushErr));
    for end in [&a, &b] {
        assert_eq!(end.received().status, WcStatus::WrFlushErr);
    }
}

/// Connects these two; the initiator may have `ord` Reads outstanding.
fn connect(bed: &Bed, a: End, b: End, ord: u16) -> (End, End) {
    let listener = bed.listener(8);
    let mut param = bed.param();
    param.ord = ord;
    bed.join(&listener, a, b, (&param, &bed.param()))
}

/// A failed attempt to join queue pairs can set the reason: the first send completes with it.
pub fn fails_unconnected(bed: &Bed) {
    let end = bed.end(&bed.a, &Half::default());
    end.qp.allow_early_posts();
    end.post_recv(RecvWr::new(1));
    end.post(SendWr::send(2));
    end.post(SendWr::send(3).signaled());
    end.qp.fail(WcStatus::RetryExcErr);
    assert_eq!(end.qp.state(), QpState::Error);
    end.qp.fail(WcStatus::RemAbortErr);
    end.post(SendWr::send(4));
    let wcs = take(&end.scq, 3);
    let seen: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    let want = [
        (2, WcStatus::RetryExcErr),
        (3, WcStatus::WrFlushErr),
        (4, WcStatus::WrFlushErr),
    ];
    assert_eq!(seen, want);
    assert_eq!(end.received().status, WcStatus::WrFlushErr);
    let listener = bed.listener(8);
    let error = bed.dial(listener.local_addr(), end, &bed.param()).err();
    assert!(matches!(error, Some(ConnectError::Invalid(_))), "{error:?}");
}

/// A queue pair in the Error state accepts no request: the initiator hears that it is rejected.
pub fn accept_in_error(bed: &Bed) {
    let listener = bed.listener(8);
    let (there, here) = (
        bed.end(&bed.a, &Half::default()),
        bed.end(&bed.b, &Half::default()),
    );
    here.qp.to_error();
    std::thread::scope(|scope| {
        let dial = scope.spawn(|| bed.dial(listener.local_addr(), there, &bed.param()));
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        let error = here.over(|qp| request.accept(qp, &bed.param())).err();
        assert!(matches!(error, Some(ConnectError::Invalid(_))), "{error:?}");
        let error = dial.join().expect("no panic").err();
        assert!(
            matches!(error, Some(ConnectError::Rejected { .. })),
            "{error:?}"
        );
    });
}

/// A queue pair in InfiniBand's manner does not report that its peer has gone before a send finds out.
pub fn quiet_end(bed: &Bed) {
    let quiet = Half {
        quiet_end: true,
        ..Half::default()
    };
    for way in 0..4 {
        let (a, b) = bed.pair_with(&quiet, &quiet);
        let (near, far) = (a.mr(8), b.mr(8));
        a.run(SendWr::read(0, far.remote(0)).sge(near.whole()));
        let end = watch_end(&b);
        b.post_recv(RecvWr::new(1));
        b.post_recv(RecvWr::new(2));
        match way {
            0 => a.qp.disconnect(),
            1 => a.qp.to_error(),
            2 => drop(a.qp),
            _ => a.qp.fail(WcStatus::RetryExcErr),
        }
        end.recv_timeout(PATIENCE).expect("the end is announced");
        assert_eq!(b.qp.state(), QpState::Rts, "way {way}");
        assert_none(&b.rcq);
        b.post_recv(RecvWr::new(3));
        assert_eq!(b.qp.outstanding(), 0);
        if way == 3 {
            b.qp.to_error();
        } else {
            b.post(SendWr::send(4));
            assert_eq!(b.sent().status, WcStatus::RetryExcErr);
            b.post(SendWr::send(5));
            assert_eq!(b.sent().status, WcStatus::WrFlushErr);
        }
        assert_eq!(b.qp.state(), QpState::Error);
        for (wc, id) in take(&b.rcq, 3).iter().zip(1..) {
            assert_eq!((wc.wr_id, wc.status), (id, WcStatus::WrFlushErr));
        }
        let none = b.device.get_async_event(Some(std::time::Duration::ZERO));
        assert_eq!(none, None);
    }
    // An error of the peer is reported, and so is our own.
    let (a, b) = bed.pair_with(&quiet, &quiet);
    b.post_recv(RecvWr::new(1));
    a.post_recv(RecvWr::new(1));
    let mr = b.mr(8);
    a.post(SendWr::write(9, mr.remote(8)).inline(b"beyond"));
    for end in [&a, &b] {
        assert_eq!(end.received().status, WcStatus::WrFlushErr);
        assert_eq!(end.qp.state(), QpState::Error);
    }
}
