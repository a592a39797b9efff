//! Ends of connections whose sides are busy at that moment: what was done before the end counts as done.

use std::sync::mpsc;

use weft_conformance::bed::{ALL, PATIENCE, take, until};
use weft_conformance::local::{Local, head};
use weft_conformance::raw::{Raw, send};
use weft_conformance::victim::{Role, Wire, connected};
use weft_ring::{Front, Ref};
use weft_verbs::{EndReason, Qp, QpInit, RecvWr, SendWr, WcStatus};

fn local(raw: &Raw) -> &Local {
    raw.local.as_ref().expect("shared memory")
}

fn ending(qp: &Qp) -> mpsc::Receiver<EndReason> {
    let (tell, told) = mpsc::channel();
    qp.on_end(move |reason| {
        let _ = tell.send(reason);
    });
    told
}

/// A payload of zeroes for the peer to fetch: a hole in a domain that has no regions.
fn push_payload(local: &Local, msn: u32, len: usize) {
    local.send(&head(&send(msn, &[]), len));
    let hole = Ref {
        space: 2,
        addr: 0,
        len: len as u64,
    };
    assert_eq!(local.end.push_ref(hole), Ok(true));
}

/// The peer fetches our payload while we fetch its, and closes: all of that was in order.
#[test]
fn a_payload_fetched_during_the_last_receive_was_sent() {
    const LAST: usize = 8 << 20;
    let device = Wire::Local.device();
    for _ in 0..5 {
        let pd = device.alloc_pd().expect("a PD");
        let cq = || device.create_cq(64, None).expect("a CQ");
        let (scq, rcq) = (cq(), cq());
        let qp = pd.create_qp(&QpInit::new(&scq, &rcq)).expect("a QP");
        let sink = pd.alloc_mr(LAST, ALL).expect("a region");
        for id in 0..3 {
            qp.post_recv(&[RecvWr::new(id).sge(sink.whole())])
                .expect("post");
        }
        let (qp, raw) = connected(&device, qp, Role::Responder, Wire::Local);
        let local = local(&raw);
        local.send(&weft_conformance::local::frame(&send(1, b"go")));
        assert_eq!(take(&rcq, 1)[0].status, WcStatus::Success);
        let payload = pd.alloc_mr(64 << 10, ALL).expect("a region");
        let ended = ending(&qp);
        qp.post_send(&[SendWr::send(9).sge(payload.whole()).signaled()])
            .expect("post");
        let mut header = Vec::new();
        let lent = loop {
            match local.end.front() {
                Ok(Front::Bytes(n)) => header.extend(local.take(n)),
                Ok(Front::Ref(lent)) => break lent,
                Ok(Front::Empty) => std::thread::yield_now(),
                front => panic!("{front:?}"),
            }
        };
        assert_eq!(lent.len, payload.len() as u64);
        // Two messages, and the end, are seen in one go. Once the first is taken, the second takes its time.
        push_payload(local, 2, 4096);
        let first = local.end.pushed();
        push_payload(local, 3, LAST);
        local.publish();
        local.poke();
        until("it takes", || local.end.consumed().expect("sense") >= first);
        local.end.advance_ref(lent.len);
        let _ = local.end.release(true);
        let _ = local.end.finish();
        local.poke();
        let reason = ended.recv_timeout(PATIENCE).expect("an end");
        assert_eq!(reason, EndReason::Disconnected);
        assert_eq!(take(&scq, 1)[0].status, WcStatus::Success);
        for wc in take(&rcq, 2) {
            assert_eq!(wc.status, WcStatus::Success);
        }
    }
}
