//! Ends of connections whose sides are busy at that moment: requests executed before the end count as executed.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use weft_conformance::bed::{
    ALL, Bed, Half, Memory, PATIENCE, Rng, Setup, assert_bytes, take, until,
};
use weft_conformance::local::{Local, frame, head};
use weft_conformance::raw::{Raw, send, untagged};
use weft_conformance::victim::{Role, Wire, connected};
use weft_mem::SendList;
use weft_ring::{Front, Ref};
use weft_verbs::{
    Cq, Device, EndReason, Mr, Pd, Qp, QpInit, QpState, RecvWr, SendWr, Wc, WcStatus,
};
use weft_wire::rdmap::{Opcode, TermError, Terminate};

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

/// Pushes a payload of zeroes for the peer to pull: a hole in a domain that has no regions.
fn push_payload(local: &Local, msn: u32, len: usize) {
    local.send(&head(&send(msn, &[]), len));
    let hole = Ref {
        space: 2,
        addr: 0,
        len: len as u64,
    };
    assert_eq!(local.end.push_ref(hole), Ok(true));
}

/// A queue pair that has received a first message, its completion queues, and its peer.
struct Receiver {
    pd: Pd,
    scq: Cq,
    rcq: Cq,
    qp: Qp,
    /// The memory of its two further receives.
    sink: Mr,
    raw: Raw,
}

fn receiver(device: &Device, sink: usize) -> Receiver {
    let pd = device.alloc_pd().expect("a PD");
    let cq = || device.create_cq(64, None).expect("a CQ");
    let (scq, rcq) = (cq(), cq());
    let qp = pd.create_qp(&QpInit::new(&scq, &rcq)).expect("a QP");
    let sink = pd.alloc_mr(sink, ALL).expect("a region");
    for id in 0..3 {
        qp.post_recv(&[RecvWr::new(id).sge(sink.whole())])
            .expect("post");
    }
    let (qp, raw) = connected(device, qp, Role::Responder, Wire::Local);
    local(&raw).send(&frame(&send(1, b"go")));
    assert_eq!(take(&rcq, 1)[0].status, WcStatus::Success);
    Receiver {
        pd,
        scq,
        rcq,
        qp,
        sink,
        raw,
    }
}

/// The peer pulls our payload while we pull its, and closes: both transfers count.
#[test]
fn a_payload_fetched_during_the_last_receive_was_sent() {
    const LAST: usize = 8 << 20;
    let device = Wire::Local.device();
    for _ in 0..5 {
        let victim = receiver(&device, LAST);
        let Receiver {
            pd, scq, rcq, qp, ..
        } = &victim;
        let local = local(&victim.raw);
        let payload = pd.alloc_mr(64 << 10, ALL).expect("a region");
        let ended = ending(qp);
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
        // Two messages and the end are seen at the same time. The second takes time after the first is received.
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
        assert_eq!(take(scq, 1)[0].status, WcStatus::Success);
        for wc in take(rcq, 2) {
            assert_eq!(wc.status, WcStatus::Success);
        }
    }
}

/// Records that a peer has published before it aborts are received.
#[test]
fn an_abort_does_not_take_back_what_was_published() {
    let device = Wire::Local.device();
    for _ in 0..20 {
        let victim = receiver(&device, 64);
        let Receiver { rcq, qp, sink, .. } = &victim;
        let local = local(&victim.raw);
        let ended = ending(qp);
        let bytes = frame(&send(2, b"last"));
        let mut message = SendList::new();
        message.push_bytes(&bytes);
        assert_eq!(local.end.push(&message, 0, bytes.len()), Ok(bytes.len()));
        let _ = local.end.publish();
        let _ = local.end.abort();
        local.poke();
        let wc = take(rcq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::Success));
        assert_bytes(sink, 0, b"last", "the message");
        let reason = ended.recv_timeout(PATIENCE).expect("an end");
        assert_eq!(reason, EndReason::Lost);
    }
}

/// A thread of the program sees the Terminate, and the engine is not woken: the engine still completes the rest.
#[test]
fn the_engine_watches_a_connection_that_has_ended() {
    let device = Wire::Local.device();
    let Receiver { rcq, qp, raw, .. } = &receiver(&device, 64);
    let local = local(raw);
    rcq.req_notify(false);
    // Asleep: publishing would wake it, were we to send the byte.
    let mut body = [0; Terminate::MAX_LEN];
    let n = Terminate::bare(TermError::RdmapCatastrophic).emit(&mut body);
    let bytes = frame(&untagged(Opcode::Terminate, true, 1, 0, &body[..n]));
    let mut list = SendList::new();
    list.push_bytes(&bytes);
    assert_eq!(local.end.push(&list, 0, bytes.len()), Ok(bytes.len()));
    let _ = local.end.publish();
    // A poll leaves the connection alone while the engine has it.
    until("the Terminate takes effect", || {
        rcq.poll(&mut [Wc::default(); 8]).expect("poll");
        qp.state() == QpState::Error
    });
    let start = Instant::now();
    if local.end.finish() {
        local.poke();
    }
    let gone = (&raw.stream).read(&mut [0]);
    assert!(!matches!(gone, Ok(1)), "{gone:?}");
    // A silent peer has five seconds.
    let time = start.elapsed();
    assert!(time < Duration::from_secs(3), "{time:?}");
}

/// Requests that were executed before the post was refused are not counted among the refused ones.
#[test]
fn a_refusal_names_the_first_request_that_was_not_carried_out() {
    const PROMPT: usize = 400;
    let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
    let half = Half {
        max_send_wr: 512,
        max_recv_wr: 512,
        sq_sig_all: true,
        ..Half::default()
    };
    let mut rng = Rng::new(11);
    let mut refused = 0;
    until("posts are refused half-way", || {
        let (a, b) = bed.pair_with(&half, &half);
        let small = b.mr(64);
        for id in 0..=PROMPT as u64 {
            b.post_recv(RecvWr::new(id).sge(small.whole()));
        }
        a.run(SendWr::send(7));
        let large = a.mr(8192);
        let mut wrs: Vec<_> = (0..PROMPT as u64)
            .map(|id| SendWr::send(id).inline(&[1; 8]))
            .collect();
        // This one cannot be executed directly.
        wrs.push(SendWr::send(PROMPT as u64).sge(large.whole()));
        let delay = Duration::from_nanos(rng.below(150_000) as u64);
        let go = AtomicBool::new(false);
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                let start = Instant::now();
                while start.elapsed() < delay {
                    std::hint::spin_loop();
                }
                a.qp.disconnect();
            });
            go.store(true, Ordering::Release);
            a.qp.post_send(&wrs)
        });
        let Err(error) = result else { return false };
        let mut wcs = vec![Wc::default(); 2 * PROMPT];
        let n = a.scq.poll(&mut wcs).expect("poll");
        assert_eq!(n, error.index, "{error:?}");
        refused += usize::from(n > 0);
        refused == 3
    });
}

/// A queue pair is dropped while another thread drives it: posted requests are still sent.
#[test]
fn a_drop_beside_a_poller_loses_no_post() {
    for setup in [Setup::tcp(), Setup::local(Memory::Both)] {
        let bed = Bed::new(setup).expect("a bed");
        for round in 0..50 {
            let (near, far) = bed.talking_pair();
            for id in 0..8 {
                far.post_recv(RecvWr::new(id));
            }
            let posted = AtomicBool::new(false);
            let rcq = near.rcq.clone();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !posted.load(Ordering::Acquire) {
                        rcq.poll(&mut [Wc::default()]).expect("poll");
                    }
                });
                for _ in 0..8 {
                    near.post(SendWr::send(1));
                }
                drop(near);
                posted.store(true, Ordering::Release);
            });
            for wc in take(&far.rcq, 8) {
                assert_eq!(wc.status, WcStatus::Success, "round {round}: {wc:?}");
            }
        }
    }
}
