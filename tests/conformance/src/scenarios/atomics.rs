//! Atomic operations (RFC 7306 5).

use weft_verbs::{PostReason, SendWr, WcOpcode, WcStatus};

use super::bed::{ALL, Bed, Half, assert_bytes, assert_ok, take};
use crate::need;

/// Each operation returns the old value and stores the new one.
pub fn each_operation(bed: &Bed) {
    need!(bed, atomics);
    let (a, b) = bed.pair();
    let (old, word) = (a.mr(16), b.mr(24));
    let target = word.remote(8);
    word.write(8, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let wc = a.run(SendWr::fetch_add(1, target, 5).sge(old.sge(8, 8)));
    assert_ok(&wc, 1, WcOpcode::FetchAdd, 8);
    assert_eq!(old.load_u64(8).unwrap(), u64::MAX - 1);
    assert_eq!(word.load_u64(8).unwrap(), 3, "modulo 2^64");
    let wc = a.run(SendWr::compare_swap(2, target, 4, 9).sge(old.sge(8, 8)));
    assert_ok(&wc, 2, WcOpcode::CompareSwap, 8);
    assert_eq!(old.load_u64(8).unwrap(), 3);
    assert_eq!(word.load_u64(8).unwrap(), 3, "did not compare equal");
    a.run(SendWr::compare_swap(3, target, 3, 1 << 60).sge(old.sge(8, 8)));
    assert_eq!(word.load_u64(8).unwrap(), 1 << 60);
    if bed.is_roce() {
        // InfiniBand has no Swap.
        let error =
            a.qp.post_send_one(SendWr::swap(4, target, 77).sge(old.sge(0, 8)));
        assert_eq!(error.unwrap_err().reason, PostReason::Unsupported);
        return;
    }
    let wc = a.run(
        SendWr::swap(4, target, 77)
            .sge(old.sge(0, 3))
            .sge(old.sge(3, 5)),
    );
    assert_ok(&wc, 4, WcOpcode::Swap, 8);
    assert_eq!(old.load_u64(0).unwrap(), 1 << 60, "over two elements");
    assert_eq!(word.load_u64(8).unwrap(), 77);
    assert_bytes(&word, 0, &[0; 8], "before the word");
    assert_bytes(&word, 16, &[0; 8], "after the word");
}

/// Concurrent atomics of two peers and of the owner's own program on one word lose no update.
pub fn concurrent(bed: &Bed) {
    need!(bed, atomics);
    const ROUNDS: u64 = 200;
    let shared = bed.b.alloc_pd().unwrap();
    let half = Half {
        pd: Some(shared.clone()),
        ..Half::default()
    };
    let listener = bed.listener(8);
    let pairs: Vec<_> = (0..3)
        .map(|_| bed.pair_through(&listener, &Half::default(), &half))
        .collect();
    let word = shared.alloc_mr(8, ALL).unwrap();
    std::thread::scope(|scope| {
        for (a, _) in &pairs {
            let remote = word.remote(0);
            scope.spawn(move || {
                let old = a.mr(8 * 50);
                let mut last = None;
                for _ in 0..ROUNDS / 50 {
                    let wrs: Vec<_> = (0..50)
                        .map(|i| {
                            SendWr::fetch_add(i as u64, remote, 1)
                                .sge(old.sge(i * 8, 8))
                                .signaled()
                        })
                        .collect();
                    a.qp.post_send(&wrs).unwrap();
                    for wc in take(&a.scq, 50) {
                        assert_eq!(wc.status, WcStatus::Success);
                        let seen = old.load_u64(wc.wr_id as usize * 8).unwrap();
                        assert!(last.is_none_or(|last| seen > last), "in order, each once");
                        last = Some(seen);
                    }
                }
            });
        }
    });
    assert_eq!(word.load_u64(0).unwrap(), 3 * ROUNDS);
}

/// An atomic is refused when its address is not a multiple of eight (whatever the key is), when it is beyond a region, and without the right.
pub fn refused(bed: &Bed) {
    need!(bed, atomics);
    let without = ALL.difference(weft_verbs::Access::REMOTE_ATOMIC);
    for (access, off, status) in [
        (ALL, 4, WcStatus::RemInvReqErr),
        (without, 4, WcStatus::RemInvReqErr),
        (ALL, 16, WcStatus::RemAccessErr),
        (without, 0, WcStatus::RemAccessErr),
    ] {
        let (a, b) = bed.pair();
        let (old, word) = (a.mr(8), b.pd.alloc_mr(16, access).unwrap());
        word.fill(0, 16, 9).unwrap();
        a.post(SendWr::fetch_add(1, word.remote(off), 1).sge(old.whole()));
        let wc = a.sent();
        assert_eq!((wc.wr_id, wc.status), (1, status), "{wc:?}");
        assert_bytes(&word, 0, &[9; 16], "the word");
    }
}
