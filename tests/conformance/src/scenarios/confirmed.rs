//! Sends that complete when the peer has received the message, for queue pairs that ask for it.

use weft_verbs::ext::CqExt;
use weft_verbs::{QpState, RecvWr, Rnr, SendWr, Wc, WcOpcode, WcStatus};

use crate::bed::{Bed, End, Half, assert_bytes, assert_none, assert_ok, take, until};

fn pair(bed: &Bed) -> (End, End) {
    let half = Half {
        rnr: Rnr::Wait,
        quiet_end: true,
        ..Half::default()
    };
    bed.pair_with(&half, &half)
}

/// When this returns, `a` has processed all earlier messages of the peer: the peer's answer follows them.
fn settle(a: &End, b: &End) {
    let (near, far) = (b.mr(8), a.mr(8));
    for _ in 0..2 {
        b.run(SendWr::read(99, far.remote(0)).sge(near.sge(0, 0)));
    }
}

/// A Send completes when it was received, and not earlier; so do the requests after it.
pub fn sends(bed: &Bed) {
    let (a, b) = pair(bed);
    let mr = b.mr(64);
    a.post(SendWr::send(1).inline(b"one").signaled());
    a.post(SendWr::send(2).inline(b"two"));
    a.post(SendWr::send_imm(3, 33).inline(b"three").signaled());
    settle(&a, &b);
    assert_none(&a.scq);
    assert_eq!(a.qp.outstanding(), 3);
    b.post_recv(RecvWr::new(1).sge(mr.whole()));
    assert_ok(&b.received(), 1, WcOpcode::Recv, 3);
    assert_ok(&a.sent(), 1, WcOpcode::Send, 3);
    settle(&a, &b);
    assert_none(&a.scq);
    for id in [2, 3] {
        b.post_recv(RecvWr::new(id).sge(mr.whole()));
        assert_eq!(b.received().wr_id, id);
    }
    assert_ok(&a.sent(), 3, WcOpcode::Send, 5);
    assert_eq!(a.qp.outstanding(), 0);
}

/// A completed Write is visible in the peer's memory.
pub fn writes(bed: &Bed) {
    let (a, b) = pair(bed);
    let len = bed.setup.largest.min(100_000);
    let (from, to) = (a.mr(len), b.mr(len));
    for round in 1..=20 {
        from.fill(0, len, round).unwrap();
        a.run(SendWr::write(1, to.remote(0)).sge(from.whole()));
        assert_eq!(to.load_u8(len - 1), Ok(round));
        b.post_recv(RecvWr::new(1));
        a.run(SendWr::write_imm(2, to.remote(0), 7).inline(&[round + 1; 3]));
        assert_eq!(to.load_u8(0), Ok(round + 1));
        assert_eq!(b.received().imm, Some(7));
    }
}

/// A refused request completes with an error. The requests before it were executed, those after it are flushed.
pub fn refused(bed: &Bed) {
    let (a, b) = pair(bed);
    let mr = b.mr(8);
    a.run(SendWr::write(1, mr.remote(0)).inline(b"12345678"));
    a.post(SendWr::write(2, mr.remote(8)).inline(b"beyond"));
    a.post(SendWr::write(3, mr.remote(0)).inline(b"12345678"));
    let wcs = take(&a.scq, 2);
    let seen: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    let want = [(2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(seen, want);
}

/// Unsignaled requests do not fill the queue for good, and an orderly end waits until the peer has everything.
pub fn unsignaled(bed: &Bed) {
    let (a, b) = pair(bed);
    let wrs: Vec<_> = (0..100).map(RecvWr::new).collect();
    for _ in 0..5 {
        b.qp.post_recv(&wrs).unwrap();
        for id in 0..100 {
            let wr = SendWr::send(id);
            until("room", || a.qp.post_send_one(wr.clone()).is_ok());
        }
        assert_eq!(take(&b.rcq, 100).len(), 100);
    }
    a.post(SendWr::send(7));
    a.post(SendWr::send(8));
    a.qp.disconnect();
    for id in [7, 8] {
        b.post_recv(RecvWr::new(id));
        assert_ok(&b.received(), id, WcOpcode::Recv, 0);
    }
    until("what was posted is done", || a.qp.outstanding() == 0);
    b.qp.disconnect();
    until("the end", || a.qp.state() == QpState::Error);
    assert_none(&a.scq);
}

/// When a peer ends before it has received a Send, the Send does not succeed. RoCE's connection manager says that the peer has gone: all is flushed.
pub fn peer_goes(bed: &Bed) {
    let (a, b) = pair(bed);
    a.post(SendWr::send(1).signaled());
    a.post(SendWr::send(2));
    settle(&a, &b);
    drop(b.qp);
    let wcs = take(&a.scq, 2);
    let first = if bed.is_roce() {
        WcStatus::WrFlushErr
    } else {
        WcStatus::RetryExcErr
    };
    assert_eq!((wcs[0].wr_id, wcs[0].status), (1, first));
    assert_eq!((wcs[1].wr_id, wcs[1].status), (2, WcStatus::WrFlushErr));
}

/// A peer ends the connection when it has received everything: the sender gets its completions first.
pub fn peer_leaves(bed: &Bed) {
    const SENDS: u64 = 16;
    let rounds = if bed.setup.largest < 100_000 { 20 } else { 100 };
    for round in 0..rounds {
        let (a, b) = pair(bed);
        let len = bed.setup.largest.min(65_536);
        let (from, to) = (a.mr(len), b.mr(len));
        let wrs: Vec<_> = (0..SENDS)
            .map(|id| RecvWr::new(id).sge(to.whole()))
            .collect();
        b.qp.post_recv(&wrs).unwrap();
        let leaves = std::thread::spawn(move || {
            let mut wcs = [Wc::default(); SENDS as usize];
            let mut received = 0;
            until("all receives", || {
                received += CqExt::take(&b.rcq, &mut wcs).unwrap();
                received == wcs.len()
            });
            b.qp.disconnect();
            drop(b);
        });
        let wrs: Vec<_> = (0..SENDS)
            .map(|id| SendWr::send(id).sge(from.whole()).signaled())
            .collect();
        a.qp.post_send(&wrs).unwrap();
        for wc in take(&a.scq, SENDS as usize) {
            assert_eq!(wc.status, WcStatus::Success, "round {round}: {wc:?}");
        }
        leaves.join().unwrap();
    }
}

/// The confirming Reads do not use the program's read depth, and a connection without Reads works without them.
pub fn depths(bed: &Bed) {
    for depth in [0, 1, 16] {
        let mut half = Half {
            recvs: (0..4).map(RecvWr::new).collect(),
            ..Half::default()
        };
        (half.param.ird, half.param.ord) = (depth, depth);
        let (a, b) = bed.pair_with(&half, &half);
        if bed.setup.options.revision == 2 && !bed.is_roce() {
            assert_eq!(a.qp.depths(), Some((depth, depth)));
        }
        for id in 0..4 {
            a.run(SendWr::send(id));
            assert_eq!(b.received().wr_id, id);
        }
    }
}

/// Reads and confirmations share what a peer serves that makes no confirming Reads itself, on either side of the connection.
pub fn reads_beside_a_peer_without(bed: &Bed) {
    let (with, without) = (
        Half::default(),
        Half {
            local_completion: true,
            ..Half::default()
        },
    );
    for dials in [true, false] {
        let (a, b) = if dials {
            bed.pair_with(&with, &without)
        } else {
            bed.pair_with(&without, &with)
        };
        let (a, b) = if dials { (a, b) } else { (b, a) };
        let (from, to) = (b.mr_of(b"read me!"), a.mr(8));
        for id in 0..40 {
            a.run(SendWr::write(id, from.remote(4)).inline(b"too!"));
            a.run(SendWr::read(id, from.remote(0)).sge(to.whole()));
        }
        assert_bytes(&to, 0, b"readtoo!", "what was read");
    }
}

/// A receive into memory that the receiver may not use: the sender's request completes with a remote operation error.
pub fn receive_of_no_use(bed: &Bed) {
    let (a, b) = pair(bed);
    let mr = b.mr(8);
    let mut sge = mr.whole();
    sge.lkey ^= 0xff;
    b.post_recv(RecvWr::new(1).sge(sge));
    a.post(SendWr::send(2).inline(b"12345678"));
    assert_eq!(b.received().status, WcStatus::LocProtErr);
    assert_eq!(a.sent().status, WcStatus::RemOpErr);
}
