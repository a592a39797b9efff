//! Limits of a device: each kind of object has one, and an ended object makes room.

use weft_verbs::{Access, Device, Error, Limits, MemError, QpInit};

use crate::bed::{Bed, Half, until};

fn small(bed: &Bed) -> Device {
    bed.device(Limits {
        max_qp: 3,
        max_cq: 3,
        max_srq: 2,
        max_mr: 3,
        max_cqe: 10,
        max_wr: 8,
        max_sge: 2,
        max_inline: 32,
        max_rd_atomic: 2,
        max_pending: 4,
    })
}

fn limit<T>(outcome: Result<T, Error>) {
    match outcome.err() {
        Some(Error::Limit(_)) => {}
        other => panic!("{other:?}"),
    }
}

/// Completion queues, and their entries.
pub fn completion_queues(bed: &Bed) {
    let device = small(bed);
    limit(device.create_cq(11, None));
    assert!(matches!(device.create_cq(0, None), Err(Error::Invalid(_))));
    let mut cqs: Vec<_> = (0..3)
        .map(|_| device.create_cq(10, None).unwrap())
        .collect();
    for _ in 0..3 {
        limit(device.create_cq(1, None));
        cqs.pop();
        cqs.push(device.create_cq(1, None).unwrap());
    }
    assert_eq!((cqs[0].depth(), cqs[2].depth()), (10, 1));
}

/// Queue pairs, and the limits of one queue pair.
pub fn queue_pairs(bed: &Bed) {
    let device = small(bed);
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(10, None).unwrap();
    let init = || {
        let mut init = QpInit::new(&cq, &cq);
        (init.max_send_wr, init.max_recv_wr) = (8, 8);
        (init.max_sge, init.max_inline) = (2, 32);
        init
    };
    for change in [
        (|i| i.max_send_wr = 9) as fn(&mut QpInit),
        |i| i.max_recv_wr = 9,
        |i| i.max_sge = 3,
        |i| i.max_inline = 33,
    ] {
        let mut init = init();
        change(&mut init);
        limit(pd.create_qp(&init));
    }
    let mut qps: Vec<_> = (0..3).map(|_| pd.create_qp(&init()).unwrap()).collect();
    for _ in 0..5 {
        limit(pd.create_qp(&init()));
        qps.pop();
        qps.push(pd.create_qp(&init()).unwrap());
    }
    let mut nums: Vec<_> = qps.iter().map(weft_verbs::Qp::num).collect();
    nums.dedup();
    assert_eq!(nums.len(), 3, "numbers are unique");
}

/// A program may choose the number of a queue pair. No other queue pair has the number while it lives.
pub fn queue_pair_numbers(bed: &Bed) {
    let device = bed.device(Limits::default());
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(10, None).unwrap();
    let qp = |num| {
        let mut init = QpInit::new(&cq, &cq);
        init.num = num;
        pd.create_qp(&init)
    };
    let first = qp(None).unwrap();
    let invalid = |num| {
        assert!(
            matches!(qp(Some(num)).err(), Some(Error::Invalid(_))),
            "{num}"
        );
    };
    invalid(0);
    invalid(first.num());
    // The device's next number is in use: it chooses another one.
    let chosen = qp(Some(first.num() + 1)).unwrap();
    assert_eq!(chosen.num(), first.num() + 1);
    let next = qp(None).unwrap();
    assert!(next.num() > chosen.num());
    let far = qp(Some(u32::MAX)).unwrap();
    for _ in 0..3 {
        invalid(u32::MAX);
    }
    drop(far);
    assert_eq!(qp(Some(u32::MAX)).unwrap().num(), u32::MAX);
    // The number of a connected queue pair is free too, as soon as the queue pair is dropped.
    let listener = bed.listener(8);
    for _ in 0..3 {
        let half = |num| Half {
            num: Some(num),
            ..Half::default()
        };
        let (a, b) = bed.pair_through(&listener, &half(0x00ff_fffe), &half(0x00ff_ffff));
        assert_eq!((a.qp.num(), b.qp.num()), (0x00ff_fffe, 0x00ff_ffff));
    }
}

/// The place of a connected queue pair is free as soon as it is dropped.
pub fn connected_queue_pairs(bed: &Bed) {
    let device = bed.device(Limits {
        max_qp: 1,
        ..Limits::default()
    });
    let listener = bed.listener(8);
    for _ in 0..10 {
        let there = bed.end(&device, &Half::default());
        let here = bed.end(&bed.b, &Half::default());
        let param = bed.param();
        let (there, here) = bed.join(&listener, there, here, (&param, &param));
        drop(there);
        until("the peer's end", || {
            here.qp.state() == weft_verbs::QpState::Error
        });
    }
}

pub fn shared_receive_queues(bed: &Bed) {
    crate::need!(bed, srq);
    let device = small(bed);
    let pd = device.alloc_pd().unwrap();
    limit(pd.create_srq(9, 1));
    limit(pd.create_srq(1, 3));
    let mut srqs: Vec<_> = (0..2).map(|_| pd.create_srq(8, 2).unwrap()).collect();
    for _ in 0..3 {
        limit(pd.create_srq(1, 1));
        srqs.pop();
        srqs.push(pd.create_srq(1, 1).unwrap());
    }
}

/// Regions and windows together, and invalid regions.
pub fn regions(bed: &Bed) {
    let device = small(bed);
    let pd = device.alloc_pd().unwrap();
    let full = |outcome: Result<(), Error>| {
        assert!(
            matches!(outcome, Err(Error::Memory(MemError::Limit))),
            "{outcome:?}"
        );
    };
    let mut mrs: Vec<_> = (0..3)
        .map(|_| pd.alloc_mr(100, Access::LOCAL_WRITE).unwrap())
        .collect();
    for _ in 0..5 {
        full(pd.alloc_mr(1, Access::empty()).map(drop));
        full(pd.reg_mr(vec![1], Access::empty()).map(drop));
        full(pd.alloc_mw().map(drop));
        mrs.pop();
        mrs.push(pd.reg_mr(vec![0; 5], Access::empty()).unwrap());
    }
    drop(mrs.pop().unwrap().deregister().map_err(|(_, e)| e).unwrap());
    let mw = pd.alloc_mw().unwrap();
    full(pd.alloc_mw().map(drop));
    drop(mw);
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let outcome = pd.alloc_mr(8, access).map(drop);
        assert!(
            matches!(outcome, Err(Error::Memory(MemError::NeedsLocalWrite))),
            "{access:?} without the local right: {outcome:?}"
        );
    }
    let outcome = pd.alloc_mr(usize::MAX / 2, Access::empty()).map(drop);
    assert!(outcome.is_err(), "more memory than there is");
    // Refused regions take no place.
    pd.alloc_mr(8, Access::empty()).unwrap();
}

/// A region checks bounds and alignment of its owner's accesses.
pub fn owner_access(bed: &Bed) {
    let pd = bed.a.alloc_pd().unwrap();
    let mr = pd.alloc_mr(20, Access::empty()).unwrap();
    assert_eq!((mr.len(), mr.is_empty(), mr.addr()), (20, false, 0));
    mr.write(0, &[1; 20]).unwrap();
    for (off, len) in [
        (0, 21),
        (20, 1),
        (21, 0),
        (usize::MAX, 1),
        (usize::MAX, usize::MAX),
    ] {
        assert_eq!(mr.to_vec(off, len), Err(MemError::Bounds), "{len} at {off}");
        assert_eq!(mr.fill(off, len, 9), Err(MemError::Bounds));
    }
    assert_eq!(mr.write(19, &[0; 2]), Err(MemError::Bounds));
    assert_eq!(mr.read(1, &mut [0; 20]), Err(MemError::Bounds));
    assert_eq!(mr.load_u8(20), Err(MemError::Bounds));
    assert_eq!(mr.load_u64(4), Err(MemError::Misaligned));
    assert_eq!(mr.load_u64(16), Err(MemError::Bounds));
    assert_eq!(mr.store_u64(16, 0), Err(MemError::Bounds));
    assert_eq!(mr.to_vec(0, 20).unwrap(), [1; 20]);
    let none = pd.alloc_mr(0, Access::empty()).unwrap();
    assert!(none.is_empty());
    assert_eq!(none.to_vec(0, 0), Ok(Vec::new()));
    let bytes: Vec<u8> = (0..100).collect();
    let mr = pd.reg_mr(bytes.clone(), Access::empty()).unwrap();
    let back = mr.deregister().map_err(|(_, e)| e).unwrap();
    assert_eq!(back, Some(bytes));
}
