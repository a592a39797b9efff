//! Objects that end while others still need them.

use weft_verbs::{Access, QpState, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

use crate::bed::{ALL, Bed, End, Half, assert_bytes, assert_none, assert_ok, pattern, take, until};

/// Handles of the device, the protection domain and the completion queues may be dropped before the objects that were made with them.
pub fn handles_go_first(bed: &Bed) {
    let (a, b) = bed.pair();
    let mr = b.mr(64);
    let End {
        device,
        pd,
        scq,
        rcq,
        qp,
        ..
    } = b;
    qp.post_recv(&[RecvWr::new(1).sge(mr.whole())]).unwrap();
    drop((device, pd, scq));
    a.run(SendWr::send(1).inline(&[4; 4]));
    assert_ok(&take(&rcq, 1)[0], 1, WcOpcode::Recv, 4);
    drop(rcq);
    a.run(SendWr::write(2, mr.remote(0)).inline(&[5; 4]));
    a.run(SendWr::read(3, mr.remote(0)).sge(a.mr(4).whole()));
    assert_bytes(&mr, 0, &[5; 4], "written");
    drop(qp);
    until("the end", || a.qp.state() == QpState::Error);
}

/// A device that ends closes its connections: the peer notices.
pub fn device_goes(bed: &Bed) {
    let gone = bed.device(weft_verbs::Limits::default());
    let listener = bed.listener(8);
    let ends = (
        bed.end(&gone, &Half::default()),
        bed.end(&bed.b, &Half::default()),
    );
    let param = bed.param();
    let (a, b) = bed.join(&listener, ends.0, ends.1, (&param, &param));
    drop((a, gone));
    until("the peer's end", || b.qp.state() == QpState::Error);
}

/// A dropped queue pair makes no more completions; existing ones stay, and the queue serves others.
pub fn no_completions_after_drop(bed: &Bed) {
    let (a, b) = bed.talking_pair();
    for id in 0..4 {
        b.post_recv(RecvWr::new(id));
    }
    let before = b.qp.counters().rx_fpdus;
    a.run(SendWr::send(1));
    until("one completion in the queue", || {
        // Driven by the engine or by this poll of another queue; the receive queue itself is not polled.
        b.scq.poll(&mut [Wc::default(); 1]).unwrap();
        b.qp.counters().rx_fpdus > before
    });
    let End { scq, rcq, qp, .. } = b;
    drop(qp);
    assert_ok(&take(&rcq, 1)[0], 0, WcOpcode::Recv, 0);
    assert_none(&rcq);
    assert_none(&scq);
    until("the peer's end", || a.qp.state() == QpState::Error);
    assert_none(&rcq);
}

/// A region that is deregistered while the peer uses it: the peer's requests fail, the owner gets its buffer back, and no peer writes to it afterwards.
pub fn deregistration_in_use(bed: &Bed) {
    for read in [false, true] {
        let (a, b) = bed.talking_pair();
        let len = 1 << 20;
        let mr = b.pd.reg_mr(vec![1; len], ALL).unwrap();
        let local = a.mr(len);
        local.fill(0, len, 2).unwrap();
        let remote = mr.remote(0);
        std::thread::scope(|scope| {
            let user = scope.spawn(|| {
                for id in 0.. {
                    let wr = if read {
                        SendWr::read(id, remote)
                    } else {
                        SendWr::write(id, remote)
                    };
                    if a.qp
                        .post_send_one(wr.sge(local.whole()).signaled())
                        .is_err()
                    {
                        continue;
                    }
                    let wc = a.sent();
                    if wc.status != WcStatus::Success {
                        return wc.status;
                    }
                }
                unreachable!("it goes on until it fails");
            });
            until("the user is at it", || {
                b.qp.counters().rx_fpdus + a.qp.counters().one_sided > 5
            });
            let mut bytes = mr.deregister().map_err(|(_, e)| e).unwrap().unwrap();
            bytes.fill(3);
            let status = user.join().expect("no panic");
            // A refusal is sent once, and RoCE's network may lose it.
            let may_be_lost = bed.is_roce() && status == WcStatus::RetryExcErr;
            assert!(
                matches!(status, WcStatus::RemAccessErr | WcStatus::WrFlushErr) || may_be_lost,
                "{status:?}"
            );
            // RoCE tells nobody of an end. A Read whose answer was sent whole and is asked for once more is refused without one: the peer may have it.
            let may_stay = bed.is_roce() && read;
            until("both ends", || {
                b.qp.state() == QpState::Error || may_stay && a.qp.state() == QpState::Error
            });
            assert!(bytes.iter().all(|byte| *byte == 3));
        });
    }
}

/// The same with a region of our own under our own requests: they fail with a local error or a flush.
pub fn own_region_goes(bed: &Bed) {
    for kind in 0..3 {
        let (a, b) = bed.talking_pair();
        let mr = a.mr(64);
        let target = b.mr(64);
        b.post_recv(RecvWr::new(1).sge(target.whole()));
        let sge = mr.whole();
        mr.deregister().map_err(|(_, e)| e).unwrap();
        match kind {
            0 => a.post(SendWr::send(1).sge(sge)),
            1 => a.post(SendWr::read(1, target.remote(0)).sge(sge)),
            _ => {
                a.post_recv(RecvWr::new(1).sge(sge));
                // It completes, or fails because of the peer's report, whichever comes first.
                b.post(SendWr::send(1).inline(&[1; 8]));
                let wc = a.received();
                assert_eq!((wc.wr_id, wc.status), (1, WcStatus::LocProtErr), "{wc:?}");
                continue;
            }
        }
        let wc = a.sent();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::LocProtErr), "{wc:?}");
        assert_bytes(&target, 0, &[0; 64], "the peer's memory");
    }
}

/// A receive into a region without local write fails.
pub fn receive_without_right(bed: &Bed) {
    let (a, b) = bed.pair();
    let mr = b.pd.reg_mr(vec![6; 64], Access::REMOTE_READ).unwrap();
    b.post_recv(RecvWr::new(1).sge(mr.whole()));
    a.post(SendWr::send(1).inline(&[1; 8]));
    let wc = b.received();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::LocProtErr), "{wc:?}");
    assert_bytes(&mr, 0, &[6; 64], "the region");
}

/// A large message that is posted before a disconnect: the disconnect waits for it, and the peer gets all of it.
pub fn disconnect_after_much(bed: &Bed) {
    let len = bed.setup.largest;
    let (a, b) = bed.pair();
    let (src, dst) = (a.mr(len), b.mr(len));
    src.write(0, &pattern(1, len)).unwrap();
    b.post_recv(RecvWr::new(1).sge(dst.whole()));
    b.post_recv(RecvWr::new(2));
    a.post(SendWr::send(1).sge(src.whole()));
    a.qp.disconnect();
    let wcs = take(&b.rcq, 2);
    assert_ok(&wcs[0], 1, WcOpcode::Recv, len);
    assert_eq!(wcs[1].status, WcStatus::WrFlushErr);
    assert_bytes(&dst, 0, &pattern(1, len), "message");
}

/// A drop right after a post: posted messages are sent as far as the transport accepts them at once; a short message always is.
pub fn drop_after_post(bed: &Bed) {
    let (a, b) = bed.pair();
    b.post_recv(RecvWr::new(1).sge(b.mr(64).whole()));
    b.post_recv(RecvWr::new(2));
    a.post(SendWr::send(1).inline(&[1; 32]));
    drop(a);
    let wcs = take(&b.rcq, 2);
    assert_eq!(wcs[1].status, WcStatus::WrFlushErr);
    assert_eq!(wcs[0].wr_id, 1);
}
