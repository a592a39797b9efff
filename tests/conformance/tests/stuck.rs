//! Peers in shared memory that stop, or report that they stay, in memory whose access is revoked. The owner waits for a limited time and then ends the
//! connection; no other thread waits.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use weft_conformance::bed::{ALL, Bed, Half, Memory, PATIENCE, Setup, assert_none, take, until};
use weft_conformance::local::{Local, frame};
use weft_conformance::raw::{Raw, send, send_invalidate};
use weft_conformance::twin::{Pair, RECV, REGION};
use weft_conformance::victim::{Bystander, READ_ID, Role, Victim, Wire, connected};
use weft_verbs::{
    Access, Cq, Device, EndReason, Mr, Mw, Qp, QpInit, QpState, RawMemory, RecvWr, SendWr, WcStatus,
};

/// Longer than any of the waits, but finite.
const BOUND: Duration = Duration::from_secs(10);
/// Shorter than they are.
const SHORTER: Duration = Duration::from_secs(2);

fn local(raw: &Raw) -> &Local {
    raw.local.as_ref().expect("shared memory")
}

/// Runs an action that may wait for a peer, while a connection of the same device continues; checks the time.
fn beside<T: Send>(bystander: &Bystander, what: &str, wait: impl FnOnce() -> T + Send) -> T {
    let (tell, told) = mpsc::channel();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = tell.send(wait());
        });
        loop {
            bystander.ping();
            match told.try_recv() {
                Ok(out) => return out,
                Err(mpsc::TryRecvError::Disconnected) => panic!("{what}: it panicked"),
                Err(mpsc::TryRecvError::Empty) => {}
            }
            if start.elapsed() > BOUND {
                // The thread cannot be left behind.
                eprintln!("{what}: no end");
                std::process::abort();
            }
        }
    })
}

/// How a region ends.
#[derive(Clone, Copy, Debug)]
enum Going {
    Deregistered,
    Dropped,
}

fn go(mr: Mr, going: Going) -> Result<(), weft_verbs::MemError> {
    match going {
        Going::Deregistered => mr.deregister().map(drop).map_err(|(_, e)| e),
        Going::Dropped => {
            drop(mr);
            Ok(())
        }
    }
}

/// The library's memory, a buffer that is passed to the library, and memory in place.
fn regions(pd: &weft_verbs::Pd) -> [Mr; 3] {
    let raw = RawMemory::leak(vec![0; 4096]);
    [
        pd.alloc_mr(4096, ALL).expect("a region"),
        pd.reg_mr(vec![0; 4096], ALL).expect("a region"),
        pd.reg_raw(&raw, ALL).expect("a region"),
    ]
}

#[test]
fn a_peer_that_never_leaves_does_not_keep_memory() {
    for going in [Going::Deregistered, Going::Dropped] {
        std::thread::scope(|scope| {
            for kind in 0..3 {
                scope.spawn(move || {
                    let what = format!("{going:?} {kind}");
                    let device = Wire::Local.device();
                    let bystander = Bystander::new(&device);
                    let (victim, raw) = Victim::on(&device, Role::Responder, Wire::Local, 3);
                    let [a, b, c] = regions(&victim.pd);
                    let mr = [a, b, c].into_iter().nth(kind).expect("one of them");
                    local(&raw).end.enter(mr.rkey());
                    let gone = beside(&bystander, &what, || go(mr, going));
                    assert_eq!(gone, Ok(()), "{what}");
                    if matches!(going, Going::Deregistered) || kind == 2 {
                        // The wait has ended the connection.
                        until(&what, || victim.qp.state() == QpState::Error);
                        let wc = take(&victim.scq, 1)[0];
                        assert_eq!((wc.wr_id, wc.status), (READ_ID, WcStatus::WrFlushErr));
                    }
                    bystander.ping();
                });
            }
        });
    }
}

/// After a queue pair is destroyed its memory is exclusively the owner's.
#[test]
fn a_queue_pair_is_destroyed_under_a_peer_that_never_leaves() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    let Opened { qp, raw, key, .. } = opened(&device);
    local(&raw).end.enter(key);
    let start = Instant::now();
    beside(&bystander, "destroy", || qp.destroy());
    assert!(start.elapsed() > SHORTER, "the peer was not waited for");
}

/// The end of a connection is reported when its peer is out of our memory.
#[test]
fn an_end_is_told_when_the_peer_has_left() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    let Opened {
        rcq, qp, raw, key, ..
    } = &opened(&device);
    local(raw).end.enter(*key);
    local(raw).finish();
    until("the end", || qp.state() == QpState::Error);
    bystander.ping();
    assert_none(rcq);
    local(raw).end.leave();
    for wc in take(rcq, 2) {
        assert_eq!(wc.status, WcStatus::WrFlushErr, "{wc:?}");
    }
}

/// The connections of many such peers end at once: the device continues, and their ends are reported.
#[test]
fn connections_end_under_peers_that_never_leave() {
    const PEERS: usize = 64;
    let device = Wire::Local.device();
    let victims: Vec<_> = (0..PEERS)
        .map(|_| Victim::on(&device, Role::Responder, Wire::Local, 3))
        .collect();
    let (tell, told) = mpsc::channel();
    for (victim, raw) in &victims {
        let tell = tell.clone();
        victim.qp.on_end(move |reason| {
            let _ = tell.send(reason);
        });
        local(raw).end.enter(victim.target.rkey());
    }
    let start = Instant::now();
    for (_, raw) in &victims {
        local(raw).finish();
    }
    // A new connection needs the engine.
    Bystander::new(&device).ping();
    let time = start.elapsed();
    assert!(time < Duration::from_secs(3), "{time:?}");
    for _ in 0..PEERS {
        told.recv_timeout(BOUND).expect("an end");
    }
    for (victim, _) in &victims {
        assert_eq!(take(&victim.scq, 1)[0].status, WcStatus::WrFlushErr);
    }
}

#[test]
fn a_peer_that_stops_does_not_keep_memory() {
    for kind in 0..3 {
        let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
        let bystander = Bystander::new(&bed.a);
        let mut pair = Pair::with("twin", &Half::default(), &bed);
        let raw = RawMemory::leak(vec![0; REGION]);
        let pd = &pair.end.pd;
        let mr = match kind {
            0 => pd.alloc_mr(REGION, ALL),
            1 => pd.reg_mr(vec![0; REGION], ALL),
            _ => pd.reg_raw(&raw, ALL),
        };
        let mr = mr.expect("a region");
        assert_eq!(pair.twin.ask(&format!("write {}", mr.rkey())), "writing");
        pair.twin.stop_inside(mr.rkey());
        let (tell, told) = mpsc::channel();
        pair.end.qp.on_end(move |reason| {
            let _ = tell.send(reason);
        });
        let gone = beside(&bystander, "a stopped peer", || go(mr, Going::Deregistered));
        assert_eq!(gone, Ok(()), "{kind}");
        assert_eq!(told.recv_timeout(PATIENCE), Ok(EndReason::Lost));
        bystander.ping();
        // Once it continues it notices that.
        pair.twin.go_on();
        assert_eq!(pair.twin.answer(), "over");
    }
}

/// A message sent by reference to a peer that stops before it pulls it.
#[test]
fn a_peer_that_stops_does_not_keep_what_it_is_to_fetch() {
    let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
    let bystander = Bystander::new(&bed.a);
    let pair = Pair::with("twin", &Half::default(), &bed);
    let raw = RawMemory::leak(vec![0; RECV]);
    let mr = pair.end.pd.reg_raw(&raw, Access::LOCAL_WRITE);
    let mr = mr.expect("a region");
    pair.twin.stop();
    let send = SendWr::send(1).sge(mr.whole()).signaled();
    pair.end.post(send);
    beside(&bystander, "a stopped peer", || drop(mr));
    assert_eq!(pair.end.sent().status, WcStatus::WrFlushErr);
}

/// A queue pair that has received a first message, and a window of its peer's.
struct Opened {
    scq: Cq,
    rcq: Cq,
    qp: Qp,
    raw: Raw,
    _mr: Mr,
    _window: Mw,
    key: u32,
}

fn opened(device: &Device) -> Opened {
    let pd = device.alloc_pd().expect("a PD");
    let cq = || device.create_cq(64, None).expect("a CQ");
    let (scq, rcq) = (cq(), cq());
    let qp = pd.create_qp(&QpInit::new(&scq, &rcq)).expect("a QP");
    let mr = pd.reg_mr(vec![0; 4096], ALL).expect("a region");
    for id in 0..3 {
        qp.post_recv(&[RecvWr::new(id)]).expect("post");
    }
    let (qp, raw) = connected(device, qp, Role::Responder, Wire::Local);
    local(&raw).send(&frame(&send(1, b"")));
    assert_eq!(take(&rcq, 1)[0].status, WcStatus::Success);
    let window = pd.alloc_mw().expect("a window");
    let (bind, key) = window.bind(1, &mr, 0, 64, Access::REMOTE_WRITE);
    qp.post_send_one(bind.signaled()).expect("post");
    assert_eq!(take(&scq, 1)[0].status, WcStatus::Success);
    Opened {
        scq,
        rcq,
        qp,
        raw,
        _mr: mr,
        _window: window,
        key,
    }
}

/// Local Invalidate is complete when the peer is out of the window, and later requests wait for that.
#[test]
fn a_window_is_invalid_when_its_peer_is_out_of_it() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    for leaves in [true, false] {
        let Opened {
            scq, qp, raw, key, ..
        } = &opened(&device);
        let peer = local(raw);
        peer.end.enter(*key);
        let invalidate = SendWr::local_invalidate(2, *key).signaled();
        qp.post_send(&[invalidate, SendWr::send(3).signaled()])
            .expect("post");
        bystander.ping();
        assert_none(scq);
        beside(&bystander, "a window", || {
            if leaves {
                peer.end.leave();
            }
            let status = if leaves {
                WcStatus::Success
            } else {
                WcStatus::WrFlushErr
            };
            let wcs = take(scq, 2);
            assert_eq!((wcs[0].wr_id, wcs[1].wr_id), (2, 3));
            assert_eq!(wcs[1].status, status, "{leaves}");
        });
    }
}

/// A peer that invalidates its own window is not in it.
#[test]
fn a_peer_that_invalidates_a_window_and_stays_in_it_ends_its_connection() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    let Opened { rcq, raw, key, .. } = &opened(&device);
    local(raw).end.enter(*key);
    local(raw).send(&frame(&send_invalidate(2, *key, b"")));
    beside(&bystander, "a window", || {
        for wc in take(rcq, 2) {
            assert_eq!(wc.status, WcStatus::WrFlushErr, "{wc:?}");
        }
    });
}
