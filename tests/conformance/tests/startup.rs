//! Peers that misbehave before the first FPDU, or at it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use weft_conformance::bed::{PATIENCE, assert_bytes, take, tcp_device, until};
use weft_conformance::raw::{Raw, fpdu, send, start_frame, write};
use weft_conformance::victim::{Bystander, Role, Victim, Wire};
use weft_verbs::cm::{ConnParam, ConnectError, Listener, connect};
use weft_verbs::{
    Access, AsyncEvent, Cq, Device, LinkOptions, Qp, QpInit, QpState, RecvWr, SendWr, WcStatus,
};
use weft_wire::mpa::{Enhanced, FrameKind, StartFrame};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn param(timeout: Duration) -> ConnParam {
    ConnParam {
        options: LinkOptions {
            timeout,
            peer_to_peer: false,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

/// A device, a listener on it, and a connection that must not be affected.
fn stage(timeout: Duration) -> (Device, Listener, Bystander) {
    let device = tcp_device();
    let listener = Listener::bind(&device, ANY, 16, &param(timeout)).expect("a listener");
    let bystander = Bystander::new(&device);
    (device, listener, bystander)
}

fn qp(device: &Device) -> (Qp, Cq) {
    let cq = device.create_cq(64, None).expect("a CQ");
    let pd = device.alloc_pd().expect("a PD");
    (pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP"), cq)
}

/// Checks that a good peer can connect.
fn good_peer(device: &Device, listener: &Listener) {
    std::thread::scope(|scope| {
        let addr = listener.local_addr();
        let dial = scope.spawn(move || {
            let cq = device.create_cq(4, None).expect("a CQ");
            let pd = device.alloc_pd().expect("a PD");
            connect(addr, &pd, &QpInit::new(&cq, &cq), &param(PATIENCE)).expect("connect")
        });
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        request
            .accept(qp(device).0, &param(PATIENCE))
            .expect("accept");
        dial.join().expect("no panic");
    });
}

#[test]
fn a_request_in_single_bytes_is_a_request() {
    let (device, listener, _) = stage(PATIENCE);
    let mut raw = Raw::connect(listener.local_addr());
    raw.crc = true;
    let mut frame = start_frame(FrameKind::Request, true, 4);
    frame.private_data = b"slowly";
    for byte in frame.emit() {
        raw.send(&[byte]);
    }
    let request = listener.next_request(Some(PATIENCE)).expect("a request");
    assert_eq!(request.private_data(), b"slowly");
    let (qp, _cq) = qp(&device);
    let conn = request.accept(qp, &param(PATIENCE)).expect("accept");
    assert!(raw.reply());
    assert_eq!(conn.qp.state(), QpState::Rts);
}

#[test]
fn half_open_peers_are_closed_in_time() {
    let (device, listener, bystander) = stage(Duration::from_millis(300));
    let frame = start_frame(FrameKind::Request, true, 4).emit();
    let mut raws: Vec<_> = [0, 1, 16, 19, 20, frame.len() - 1]
        .into_iter()
        .map(|n| {
            let mut raw = Raw::connect(listener.local_addr());
            raw.send(&frame[..n]);
            raw
        })
        .collect();
    bystander.ping();
    for raw in &mut raws {
        raw.expect_end();
    }
    assert!(listener.next_request(Some(Duration::ZERO)).is_none());
    good_peer(&device, &listener);
}

#[test]
fn early_messages_are_received() {
    for count in [1usize, 3, 40, 500] {
        let (device, listener, _) = stage(PATIENCE);
        let mut raw = Raw::connect(listener.local_addr());
        raw.crc = true;
        let mut bytes = start_frame(FrameKind::Request, true, 4).emit();
        for msn in 1..=count {
            bytes.extend(fpdu(&send(msn as u32, &[msn as u8; 32]), true));
        }
        let last = fpdu(&send(count as u32 + 1, &[0xbb; 32]), true);
        bytes.extend(&last[..5]);
        raw.send(&bytes);
        let cq = device.create_cq(1024, None).expect("a CQ");
        let pd = device.alloc_pd().expect("a PD");
        let mut init = QpInit::new(&cq, &cq);
        init.max_recv_wr = 1024;
        let qp = pd.create_qp(&init).expect("a QP");
        let mr = pd
            .alloc_mr(32 * (count + 1), Access::LOCAL_WRITE)
            .expect("a region");
        for id in 0..=count {
            let recv = RecvWr::new(id as u64).sge(mr.sge(id * 32, 32));
            qp.post_recv(&[recv]).expect("post");
        }
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        let _conn = request.accept(qp, &param(PATIENCE)).expect("accept");
        assert!(raw.reply());
        for (id, wc) in take(&cq, count).iter().enumerate() {
            assert_eq!((wc.wr_id, wc.status), (id as u64, WcStatus::Success));
            assert_bytes(&mr, id * 32, &[(id + 1) as u8; 32], "early message");
        }
        raw.send(&last[5..]);
        assert_eq!(take(&cq, 1)[0].status, WcStatus::Success);
        assert_bytes(&mr, count * 32, &[0xbb; 32], "the one that was cut");
    }
}

#[test]
fn a_peer_that_is_silent_after_startup() {
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    for role in [Role::Initiator, Role::Responder] {
        let (victim, raw) = Victim::impatient(&device, role, Wire::Tcp { crc: true }, 2);
        bystander.ping();
        // A connection has no time limit: it is up, its read outstanding.
        assert_eq!(victim.qp.state(), QpState::Rts);
        // Disconnecting does not need the peer.
        victim.qp.disconnect();
        let wcs = victim.received(2);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::WrFlushErr));
        assert_eq!(take(&victim.scq, 1)[0].status, WcStatus::WrFlushErr);
        assert_eq!(victim.qp.state(), QpState::Error);
        bystander.ping();
        drop(raw);
    }
}

#[test]
fn a_peer_that_closes_within_an_fpdu() {
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    for role in [Role::Initiator, Role::Responder] {
        for crc in [true, false] {
            let whole = |v: &Victim| fpdu(&write(v.target.rkey(), 0, &[1; 2000]), crc);
            for cut in [1, 2, 3, 15, 16, 17, 100, 1000, 2015, 2016, 2019] {
                let (victim, mut raw) = Victim::new(&device, role, crc, 2);
                let frame = whole(&victim);
                raw.send(&frame[..cut]);
                drop(raw);
                let wcs = victim.received(2);
                assert!(wcs.iter().all(|wc| wc.status == WcStatus::WrFlushErr));
                assert_eq!(take(&victim.scq, 1)[0].status, WcStatus::WrFlushErr);
                let qp_num = victim.qp.num();
                assert_eq!(
                    device.get_async_event(Some(PATIENCE)),
                    Some(AsyncEvent::QpFatal { qp_num, reason: 0 }),
                    "cut after {cut} of {}",
                    frame.len()
                );
                if crc {
                    // No byte of an unchecked FPDU is placed.
                    victim.assert_untouched(0);
                }
            }
        }
        bystander.ping();
    }
}

/// An initiator's error against a responder that runs `act`.
fn against_initiator(param: &ConnParam, act: impl FnOnce(Raw) + Send) -> ConnectError {
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    let listener = TcpListener::bind(ANY).expect("a listener");
    let addr = listener.local_addr().expect("an address");
    let error = std::thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept().expect("accept");
            act(Raw::over(stream));
        });
        let cq = device.create_cq(4, None).expect("a CQ");
        let pd = device.alloc_pd().expect("a PD");
        let conn = connect(addr, &pd, &QpInit::new(&cq, &cq), param);
        conn.err().expect("no connection")
    });
    bystander.ping();
    error
}

#[test]
fn replies_that_are_none() {
    let good = start_frame(FrameKind::Reply, true, 4).emit();
    let changed = |at: usize, to: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + to.len()].copy_from_slice(to);
        frame
    };
    for (what, bytes) in [
        (
            "another protocol",
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        ),
        (
            "the key of a request",
            start_frame(FrameKind::Request, true, 4).emit(),
        ),
        ("revision 0", changed(17, &[0])),
        ("revision 3", changed(17, &[3])),
        (
            "private data of 513 bytes",
            [&changed(18, &513u16.to_be_bytes())[..], &[0; 600]].concat(),
        ),
    ] {
        for then_close in [true, false] {
            let bytes = bytes.clone();
            let error = against_initiator(&param(PATIENCE), move |mut raw| {
                raw.send(&bytes);
                if then_close {
                    raw.finish();
                }
                let mut sink = Vec::new();
                let _ = std::io::Read::read_to_end(&mut raw.stream, &mut sink);
            });
            assert!(
                matches!(error, ConnectError::Protocol(_)),
                "{what}, close {then_close}: {error:?}"
            );
        }
    }
}

#[test]
fn a_reply_of_a_higher_revision_than_the_request() {
    let mut param = param(PATIENCE);
    param.options.revision = 1;
    let error = against_initiator(&param, |mut raw| {
        raw.send(&start_frame(FrameKind::Reply, true, 4).emit());
        raw.finish();
    });
    assert!(matches!(error, ConnectError::Protocol(_)), "{error:?}");
}

#[test]
fn a_responder_that_wants_more_reads_than_we_take() {
    let mut param = param(PATIENCE);
    param.ird = 2;
    let error = against_initiator(&param, |mut raw| {
        raw.send(&start_frame(FrameKind::Reply, true, 3).emit());
        raw.finish();
    });
    assert!(matches!(error, ConnectError::Protocol(_)), "{error:?}");
}

#[test]
fn a_silent_responder() {
    let start = Instant::now();
    let limit = Duration::from_millis(300);
    let error = against_initiator(&param(limit), |mut raw| {
        let mut sink = Vec::new();
        let _ = std::io::Read::read_to_end(&mut raw.stream, &mut sink);
        assert!(!sink.is_empty(), "the request");
    });
    assert!(matches!(error, ConnectError::TimedOut), "{error:?}");
    assert!(start.elapsed() >= limit);
}

#[test]
fn a_responder_that_hangs_up() {
    for bytes in [0, 1, 19] {
        let error = against_initiator(&param(PATIENCE), move |mut raw| {
            let frame = start_frame(FrameKind::Reply, true, 4).emit();
            raw.send(&frame[..bytes]);
        });
        // A request that it has not read makes its end a reset.
        let is_over = matches!(error, ConnectError::Closed | ConnectError::Reset);
        assert!(is_over, "{error:?}");
    }
}

#[test]
fn a_rejection_and_the_end_in_one_segment() {
    for _ in 0..10 {
        let error = against_initiator(&param(PATIENCE), |mut raw| {
            let mut frame = start_frame(FrameKind::Reply, true, 0);
            frame.reject = true;
            frame.private_data = b"not today";
            raw.send(&frame.emit());
            raw.finish();
            let mut sink = Vec::new();
            let _ = std::io::Read::read_to_end(&mut raw.stream, &mut sink);
        });
        let ConnectError::Rejected { private_data } = error else {
            panic!("{error:?}");
        };
        assert_eq!(private_data, b"not today");
    }
}

#[test]
fn a_reply_with_messages_and_the_end_in_one_segment() {
    let device = tcp_device();
    let listener = TcpListener::bind(ANY).expect("a listener");
    let addr = listener.local_addr().expect("an address");
    for crc in [true, false] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, _) = listener.accept().expect("accept");
                let mut raw = Raw::over(stream);
                let mut bytes = start_frame(FrameKind::Reply, crc, 4).emit();
                for msn in 1..=3 {
                    bytes.extend(fpdu(&send(msn, &[msn as u8; 8]), crc));
                }
                raw.send(&bytes);
                raw.finish();
                let mut sink = Vec::new();
                let _ = std::io::Read::read_to_end(&mut raw.stream, &mut sink);
            });
            let (cq, pd) = (
                device.create_cq(8, None).expect("a CQ"),
                device.alloc_pd().expect("a PD"),
            );
            let mr = pd.alloc_mr(64, Access::LOCAL_WRITE).expect("a region");
            let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
            for id in 0..4 {
                let recv = RecvWr::new(id).sge(mr.sge(id as usize * 8, 8));
                qp.post_recv(&[recv]).expect("post");
            }
            let mut param = param(PATIENCE);
            param.options.crc = crc;
            let conn = weft_verbs::cm::connect_qp(addr, qp, &device, &param).expect("connect");
            let wcs = take(&cq, 4);
            let statuses: Vec<_> = wcs.iter().map(|wc| wc.status).collect();
            use WcStatus::{Success, WrFlushErr};
            assert_eq!(statuses, [Success, Success, Success, WrFlushErr]);
            assert_bytes(&mr, 16, &[3; 8], "third message");
            until("the end", || conn.qp.state() == QpState::Error);
        });
    }
}

#[test]
fn revision_1_and_2_peers_get_their_own() {
    let (device, listener, _) = stage(PATIENCE);
    for revision in [1, 2] {
        let mut frame = start_frame(FrameKind::Request, false, 4);
        frame.revision = revision;
        if revision == 1 {
            frame.enhanced = None;
        }
        frame.private_data = &[9; 500];
        let mut raw = Raw::connect(listener.local_addr());
        raw.send(&frame.emit());
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        assert_eq!(request.private_data(), [9; 500]);
        let (qp, _cq) = qp(&device);
        let mut param = param(PATIENCE);
        param.private_data = vec![7; 508];
        let _conn = request.accept(qp, &param).expect("accept");
        let mut reply = vec![0; 20 + 508 + if revision == 2 { 4 } else { 0 }];
        std::io::Read::read_exact(&mut raw.stream, &mut reply).expect("a reply");
        let (reply, _) = StartFrame::parse(FrameKind::Reply, &reply)
            .expect("good")
            .expect("whole");
        assert_eq!(reply.revision, revision);
        assert!(reply.crc, "the listener wants CRC, so both use it");
        assert_eq!(reply.enhanced.is_some(), revision == 2);
        assert_eq!(reply.private_data, [7; 508]);
        if let Some(Enhanced { ird, ord, .. }) = reply.enhanced {
            assert!(ird <= 4 && ord <= 4, "no more than asked: {ird}, {ord}");
        }
    }
}

#[test]
fn the_responder_waits_for_the_first_fpdu() {
    let (device, listener, _) = stage(PATIENCE);
    let mut raw = Raw::request(listener.local_addr(), true, 4);
    let request = listener.next_request(Some(PATIENCE)).expect("a request");
    let (qp, cq) = qp(&device);
    let conn = request.accept(qp, &param(PATIENCE)).expect("accept");
    assert!(raw.reply());
    conn.qp
        .post_send_one(SendWr::send(1).inline(b"first").signaled())
        .expect("post");
    // RFC 5044 7.1.2: not a byte before the initiator's first FPDU.
    raw.stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .expect("time-out");
    let mut byte = [0];
    let early = std::io::Read::read(&mut raw.stream, &mut byte);
    assert!(early.is_err(), "a byte too early: {early:?}");
    raw.stream
        .set_read_timeout(Some(PATIENCE))
        .expect("time-out");
    raw.send_ulpdus(&[write(0, 0, &[])]);
    let (_, payload) = raw.segment().expect("the message");
    assert_eq!(payload, b"first");
    assert_eq!(take(&cq, 1)[0].status, WcStatus::Success);
}
