//! Shared receive queues.

use weft_verbs::{PostReason, QpState, RecvWr, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, End, Half, Srq, assert_bytes, assert_none, assert_ok, take, until};
use crate::need;

/// `n` pairs whose responders share a receive queue, a protection domain and completion queues.
pub(super) fn pairs(bed: &Bed, n: usize, max_wr: u32) -> (Srq, Vec<(End, End)>) {
    let pd = bed.b.alloc_pd().unwrap();
    let srq = pd.create_srq(max_wr, 2).unwrap();
    let half = Half {
        pd: Some(pd),
        srq: Some(srq.clone()),
        cqs: Some((bed.cq(1024), bed.cq(1024))),
        ..Half::default()
    };
    let listener = bed.listener(8);
    let pairs = (0..n).map(|_| bed.pair_through(&listener, &Half::default(), &half));
    (srq, pairs.collect())
}

/// Receives go to the queue pair that has a message first, in the order posted; each completion names its queue pair.
pub fn shared_by_several(bed: &Bed) {
    need!(bed, srq);
    let (srq, pairs) = pairs(bed, 3, 64);
    let (_, first) = &pairs[0];
    let mr = first.mr(64 * 64);
    let recv = |id: u64| RecvWr::new(id).sge(mr.sge(id as usize * 64, 64));
    let wrs: Vec<_> = (0..60).map(recv).collect();
    srq.post_recv(&wrs).unwrap();
    let error = first.qp.post_recv(&[recv(0)]).unwrap_err();
    assert_eq!((error.index, error.reason), (0, PostReason::UsesSrq));
    for round in 0..20u8 {
        for (i, (a, b)) in pairs.iter().enumerate() {
            let data = [round * 3 + i as u8; 33];
            a.run(SendWr::send(1).inline(&data));
            let wc = b.received();
            assert_ok(&wc, u64::from(round) * 3 + i as u64, WcOpcode::Recv, 33);
            assert_eq!(wc.qp_num, b.qp.num());
            assert_bytes(&mr, wc.wr_id as usize * 64, &data, "message");
        }
    }
}

/// All at once: every message consumes exactly one receive, on any queue pair.
pub fn shared_concurrently(bed: &Bed) {
    need!(bed, srq);
    let (srq, pairs) = pairs(bed, 4, 512);
    let wrs: Vec<_> = (0..400).map(RecvWr::new).collect();
    srq.post_recv(&wrs).unwrap();
    std::thread::scope(|scope| {
        for (a, _) in &pairs {
            scope.spawn(move || {
                for _ in 0..10 {
                    let wrs: Vec<_> = (0..10).map(|i| SendWr::send(i).signaled()).collect();
                    a.qp.post_send(&wrs).unwrap();
                    take(&a.scq, 10);
                }
            });
        }
        let mut ids: Vec<_> = take(&pairs[0].1.rcq, 400)
            .iter()
            .map(|wc| {
                assert_eq!(wc.status, WcStatus::Success);
                wc.wr_id
            })
            .collect();
        ids.sort_unstable();
        assert!(ids.into_iter().eq(0..400), "each receive once");
    });
}

/// A full queue, and too many elements, are refused; earlier receives are accepted.
pub fn refused_posts(bed: &Bed) {
    need!(bed, srq);
    let pd = bed.b.alloc_pd().unwrap();
    let srq = pd.create_srq(4, 1).unwrap();
    let mr = pd.alloc_mr(8, super::bed::ALL).unwrap();
    let wrs: Vec<_> = (0..5).map(RecvWr::new).collect();
    let error = srq.post_recv(&wrs).unwrap_err();
    assert_eq!((error.index, error.reason), (4, PostReason::Full));
    let srq = pd.create_srq(4, 1).unwrap();
    let wide = RecvWr::new(1).sge(mr.whole()).sge(mr.whole());
    let error = srq.post_recv(&[RecvWr::new(0), wide]).unwrap_err();
    assert_eq!(
        (error.index, error.reason),
        (1, PostReason::TooManySges { asked: 2, max: 1 })
    );
}

/// A queue pair that ends takes only the receive of a message in progress; the others continue. An empty queue ends the queue pair whose message finds it
/// empty; over RoCE it ends the sender, and nobody is told that a queue pair has ended.
pub fn one_member_ends(bed: &Bed) {
    need!(bed, srq);
    let (srq, mut pairs) = pairs(bed, 3, 64);
    let wrs: Vec<_> = (0..3).map(RecvWr::new).collect();
    srq.post_recv(&wrs).unwrap();
    pairs[0].1.qp.to_error();
    if !bed.is_roce() {
        until("the peer hears of it", || {
            pairs[0].0.qp.state() == QpState::Error
        });
    }
    assert_none(&pairs[0].1.rcq);
    drop(pairs.remove(0));
    for (id, pair) in [(0, 0), (1, 1), (2, 0)] {
        let (a, b) = &pairs[pair];
        a.run(SendWr::send(1));
        assert_ok(&b.received(), id, WcOpcode::Recv, 0);
    }
    let (a, b) = &pairs[0];
    a.post(SendWr::send(1));
    until("the end of the one that found none", || {
        let ends = if bed.is_roce() { a } else { b };
        ends.qp.state() == QpState::Error
    });
    let (a, b) = &pairs[1];
    assert_eq!(b.qp.state(), QpState::Rts);
    srq.post_recv(&[RecvWr::new(9)]).unwrap();
    a.run(SendWr::send(1));
    assert_ok(&b.received(), 9, WcOpcode::Recv, 0);
}
