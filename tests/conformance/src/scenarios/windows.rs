//! Type 2 memory windows: binding, rights, bounds, invalidation.

use weft_verbs::{
    Access, AsyncEvent, MemError, Mr, Mw, QpState, RecvWr, SendWr, WcOpcode, WcStatus,
};

use crate::bed::{Bed, End, Half, PATIENCE, assert_bytes, assert_ok, pattern, until};
use crate::need;

const RIGHTS: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// A region of 4096 bytes that peers access through windows only.
fn region(end: &End) -> Mr {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    end.pd.alloc_mr(4096, access).expect("a region")
}

fn bind(end: &End, mw: &Mw, mr: &Mr, off: usize, len: usize, access: Access) -> u32 {
    let (wr, rkey) = mw.bind(77, mr, off, len, access);
    let wc = end.run(wr);
    assert_ok(&wc, 77, WcOpcode::BindMw, 0);
    assert_eq!(mw.rkey(), rkey);
    rkey
}

fn at(rkey: u32, addr: u64) -> weft_verbs::RemoteAddr {
    weft_verbs::RemoteAddr { addr, rkey }
}

/// Asserts that the peer's access fails, with an access error of a read (which always has an answer).
fn refused(a: &End, remote: weft_verbs::RemoteAddr, len: usize) {
    let mr = a.mr(len.max(1));
    a.post(SendWr::read(9, remote).sge(mr.sge(0, len)));
    let wc = a.sent();
    assert_eq!((wc.wr_id, wc.status), (9, WcStatus::RemAccessErr), "{wc:?}");
}

/// A bound window gives the peer its range, at the region's addresses; one byte beyond either end ends the stream.
pub fn bind_and_use(bed: &Bed) {
    need!(bed, windows);
    for (off, len, fits) in [
        (100, 200, true),
        (99, 1, false),
        (299, 2, false),
        (300, 1, false),
    ] {
        let (a, b) = bed.talking_pair();
        let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
        mr.write(100, &pattern(1, 200)).unwrap();
        let rkey = bind(&b, &mw, &mr, 100, 200, RIGHTS);
        if fits {
            let local = a.mr(400);
            a.run(SendWr::read(1, at(rkey, off)).sge(local.sge(0, len)));
            assert_bytes(&local, 0, &pattern(1, 200), "read through the window");
            local.write(0, &pattern(2, 100)).unwrap();
            a.run(SendWr::write(2, at(rkey, 200)).sge(local.sge(0, 100)));
            a.run(SendWr::fetch_add(3, at(rkey, 104), 1).sge(local.sge(200, 8)));
            assert_bytes(&mr, 200, &pattern(2, 100), "written through the window");
            assert_bytes(&mr, 0, &[0; 100], "before the window");
            assert_bytes(&mr, 300, &[0; 3796], "after the window");
        } else {
            refused(&a, at(rkey, off), len);
        }
    }
}

/// A zero-based window is addressed from 0.
pub fn zero_based(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
    let rkey = bind(&b, &mw, &mr, 1000, 64, RIGHTS | Access::ZERO_BASED);
    a.run(SendWr::write(1, at(rkey, 60)).inline(&[5; 4]));
    a.run(SendWr::read(2, at(rkey, 0)).sge(a.mr(64).whole()));
    assert_bytes(&mr, 1060, &[5; 4], "written through the window");
    refused(&a, at(rkey, 1000), 1);
}

/// A window has the rights of its bind, not those of its region.
pub fn rights(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let mr = b.mr(4096);
    let mw = b.pd.alloc_mw().unwrap();
    let rkey = bind(&b, &mw, &mr, 0, 4096, Access::REMOTE_WRITE);
    let first = at(rkey, mr.addr());
    a.run(SendWr::write(1, first).inline(&[1; 4]));
    refused(&a, first, 4);
}

/// After a Local Invalidate the key is invalid; the window can be bound again, with another key.
pub fn local_invalidate(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
    let first = bind(&b, &mw, &mr, 0, 64, RIGHTS);
    let wc = b.run(SendWr::local_invalidate(5, first));
    assert_ok(&wc, 5, WcOpcode::LocalInvalidate, 0);
    let second = bind(&b, &mw, &mr, 64, 64, RIGHTS);
    assert_ne!(first, second);
    a.run(SendWr::write(1, at(second, 64)).inline(&[1; 8]));
    refused(&a, at(first, 0), 8);
}

/// A Send with Invalidate reports the invalidated key, which is invalid when the receive completes.
pub fn send_with_invalidate(bed: &Bed) {
    need!(bed, windows);
    for solicited in [false, true] {
        let (a, b) = bed.talking_pair();
        let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
        let landing = b.mr(64);
        for round in 0..3 {
            let rkey = bind(&b, &mw, &mr, 0, 64, RIGHTS);
            b.post_recv(RecvWr::new(round).sge(landing.whole()));
            a.run(SendWr::write(1, at(rkey, 0)).inline(&[7; 8]));
            let wr = SendWr::send_invalidate(2, rkey).inline(&[3; 5]);
            a.run(if solicited { wr.solicited() } else { wr });
            let wc = b.received();
            assert_ok(&wc, round, WcOpcode::Recv, 5);
            assert_eq!(wc.invalidated, Some(rkey));
            if round == 2 {
                refused(&a, at(rkey, 0), 8);
            }
        }
    }
}

/// A Send with Invalidate of a key that it may not invalidate ends the stream: regions, unbound windows, windows of other queue pairs.
pub fn send_with_invalidate_refused(bed: &Bed) {
    need!(bed, windows);
    for kind in 0..3 {
        let (a, b) = bed.talking_pair();
        let mr = b.mr(64);
        let mw = b.pd.alloc_mw().unwrap();
        let other = (kind == 2).then(|| {
            bed.pair_with(
                &Half::default(),
                &Half {
                    pd: Some(b.pd.clone()),
                    ..Half::default()
                },
            )
        });
        let rkey = match (kind, &other) {
            (0, _) => mr.rkey(),
            (2, Some((x, y))) => {
                y.post_recv(RecvWr::new(0));
                x.run(SendWr::send(0));
                bind(y, &mw, &mr, 0, 64, RIGHTS)
            }
            _ => mw.rkey(),
        };
        b.post_recv(RecvWr::new(3));
        a.post(SendWr::send_invalidate(1, rkey));
        let wc = b.received();
        assert_eq!((wc.wr_id, wc.status), (3, WcStatus::WrFlushErr), "{wc:?}");
        until("the sender's end", || a.qp.state() == QpState::Error);
        let event = b.device.get_async_event(Some(PATIENCE));
        let num = b.qp.num();
        let told = match event {
            Some(AsyncEvent::QpAccessErr { qp_num, .. }) => qp_num == num,
            // InfiniBand calls some of them an invalid request.
            Some(AsyncEvent::QpFatal { qp_num, .. }) => qp_num == num && bed.is_roce(),
            _ => false,
        };
        assert!(told, "{event:?}");
        if let Some((x, _)) = &other {
            // The other queue pair's window is unchanged.
            x.run(SendWr::write(1, at(rkey, mr.addr())).inline(&[1; 8]));
        }
    }
}

/// A window is valid only on the queue pair that it was bound on.
pub fn other_queue_pair(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let half = Half {
        pd: Some(b.pd.clone()),
        ..Half::default()
    };
    let (x, _y) = bed.pair_with(&Half::default(), &half);
    let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
    let rkey = bind(&b, &mw, &mr, 0, 64, RIGHTS);
    refused(&x, at(rkey, 0), 8);
    a.run(SendWr::write(1, at(rkey, 0)).inline(&[1; 8]));
}

/// Invalid binds: each fails with a bind error, and ends the queue pair.
pub fn refused_binds(bed: &Bed) {
    need!(bed, windows);
    for kind in 0..7 {
        let (_a, b) = bed.talking_pair();
        let other = b.device.alloc_pd().unwrap();
        let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
        let plain = b.pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
        let fixed = b.pd.alloc_mr(64, Access::MW_BIND).unwrap();
        let foreign = other.alloc_mw().unwrap();
        let foreign_mr = other.alloc_mr(64, crate::bed::ALL).unwrap();
        let (wr, what) = match kind {
            0 => (mw.bind(1, &mr, 4000, 97, RIGHTS).0, "past the end"),
            1 => (mw.bind(1, &mr, 0, 0, RIGHTS).0, "no bytes"),
            2 => (mw.bind(1, &plain, 0, 64, RIGHTS).0, "no right to bind"),
            3 => (
                mw.bind(1, &fixed, 0, 64, RIGHTS).0,
                "more rights than the owner has",
            ),
            4 => (foreign.bind(1, &foreign_mr, 0, 64, RIGHTS).0, "another PD"),
            5 => (
                mw.bind(1, &foreign_mr, 0, 64, RIGHTS).0,
                "a region of another PD",
            ),
            _ => {
                bind(&b, &mw, &mr, 0, 64, RIGHTS);
                (mw.bind(1, &mr, 0, 64, RIGHTS).0, "bound already")
            }
        };
        b.post(wr);
        let wc = b.sent();
        assert_eq!(
            (wc.wr_id, wc.status, wc.opcode),
            (1, WcStatus::MwBindErr, WcOpcode::BindMw),
            "{what}: {wc:?}"
        );
        until("the end", || b.qp.state() == QpState::Error);
    }
}

/// A Local Invalidate of a key that is not a bound window's fails.
pub fn local_invalidate_refused(bed: &Bed) {
    need!(bed, windows);
    for kind in 0..2 {
        let (_a, b) = bed.talking_pair();
        let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
        let rkey = if kind == 0 { mr.rkey() } else { mw.rkey() };
        b.post(SendWr::local_invalidate(1, rkey));
        let wc = b.sent();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::LocQpOpErr), "{wc:?}");
    }
}

/// Binding and invalidating more often than there are keys: every key is valid in its time.
pub fn many_binds(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
    for round in 0..300u64 {
        let rkey = bind(&b, &mw, &mr, 0, 8, RIGHTS);
        a.run(SendWr::write(1, at(rkey, 0)).inline(&round.to_ne_bytes()));
        a.run(SendWr::read(2, at(rkey, 0)).sge(a.mr(8).whole()));
        assert_eq!(mr.load_u64(0).unwrap(), round);
        b.run(SendWr::local_invalidate(3, rkey));
    }
}

/// In the order of the send queue: a bind, then a Send that carries the key, posted together.
pub fn bind_then_send_in_one_post(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let (mr, mw) = (region(&b), b.pd.alloc_mw().unwrap());
    let landing = a.mr(8);
    a.post_recv(RecvWr::new(1).sge(landing.sge(0, 4)));
    let (wr, rkey) = mw.bind(1, &mr, 0, 64, RIGHTS);
    b.qp.post_send(&[wr, SendWr::send(2).inline(&rkey.to_be_bytes())])
        .unwrap();
    assert_ok(&a.received(), 1, WcOpcode::Recv, 4);
    let mut told = [0; 4];
    landing.read(0, &mut told).unwrap();
    a.run(SendWr::write(1, at(u32::from_be_bytes(told), 0)).inline(&[1; 8]));
    a.run(SendWr::read(2, at(rkey, 0)).sge(a.mr(8).whole()));
}

/// A region with bound windows is not deregistered; the error returns it. Dropping the window frees it.
pub fn region_in_use(bed: &Bed) {
    need!(bed, windows);
    let (a, b) = bed.talking_pair();
    let mw = b.pd.alloc_mw().unwrap();
    let mr = b.pd.reg_mr(vec![7; 64], crate::bed::ALL).unwrap();
    let rkey = bind(&b, &mw, &mr, 0, 64, RIGHTS);
    let Err((mr, error)) = mr.deregister() else {
        panic!("deregistered under a window");
    };
    assert_eq!(error, MemError::InUse);
    a.run(SendWr::write(1, at(rkey, 0)).inline(&[1; 8]));
    a.run(SendWr::read(2, at(rkey, 0)).sge(a.mr(8).whole()));
    drop(mw);
    let bytes = mr.deregister().map_err(|(_, e)| e).unwrap().unwrap();
    assert_eq!((&bytes[..8], &bytes[8..]), (&[1; 8][..], &[7; 56][..]));
    refused(&a, at(rkey, 0), 8);
}
