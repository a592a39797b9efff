//! The length of shared receive queues, and the event of few receives.

use weft_verbs::{AsyncEvent, Error, RecvWr, SendWr, WcOpcode};

use super::srq::pairs;
use crate::bed::Bed;
use crate::bed::assert_ok;
use crate::need;

/// The armed limit raises one event, when fewer receives are left.
pub fn limit_event(bed: &Bed) {
    need!(bed, srq);
    let (srq, pairs) = pairs(bed, 2, 64);
    let wrs: Vec<_> = (0..10).map(RecvWr::new).collect();
    srq.post_recv(&wrs).unwrap();
    srq.arm_limit(5);
    let none = || bed.b.get_async_event(Some(std::time::Duration::ZERO));
    for i in 0..10 {
        let (a, b) = &pairs[i % 2];
        a.run(SendWr::send(1));
        b.received();
        let left = 9 - i;
        if left == 4 {
            let srq_num = srq.num();
            assert_eq!(b.event(), AsyncEvent::SrqLimitReached { srq_num });
        }
        assert_eq!(none(), None, "{left} left");
    }
    // Armed again, it raises another event.
    srq.post_recv(&wrs[..2]).unwrap();
    srq.arm_limit(2);
    let (a, b) = &pairs[0];
    a.run(SendWr::send(1));
    b.received();
    let srq_num = srq.num();
    assert_eq!(b.event(), AsyncEvent::SrqLimitReached { srq_num });
}

/// A queue can be made longer and shorter, but not shorter than what is posted.
pub fn resized(bed: &Bed) {
    need!(bed, srq);
    let (srq, pairs) = pairs(bed, 1, 4);
    let (a, b) = &pairs[0];
    assert_eq!((srq.max_wr(), srq.max_sge(), srq.limit()), (4, 2, 0));
    let wrs: Vec<_> = (0..6).map(RecvWr::new).collect();
    assert_eq!(srq.post_recv(&wrs).unwrap_err().index, 4);
    srq.resize(6).unwrap();
    srq.post_recv(&wrs[4..]).unwrap();
    assert!(matches!(srq.resize(5), Err(Error::Invalid(_))));
    let most = bed.b.attr().limits.max_wr;
    assert!(matches!(srq.resize(most + 1), Err(Error::Limit(_))));
    assert_eq!(srq.max_wr(), 6);
    srq.arm_limit(3);
    assert_eq!(srq.limit(), 3);
    for id in 0..6 {
        a.run(SendWr::send(1));
        assert_ok(&b.received(), id, WcOpcode::Recv, 0);
    }
    assert_eq!(srq.limit(), 0, "it was reached");
    srq.resize(1).unwrap();
    assert_eq!(srq.post_recv(&wrs).unwrap_err().index, 1);
}
