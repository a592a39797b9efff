//! Floods and stalls: many silent connections, peers that stop reading, peers that send requests without end. Memory stays bounded, good peers can connect, and
//! other connections continue.
//!
//! The tests of this file measure the memory and the descriptors of their process, so each has one of its own.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use weft_conformance::bed::{ALL, PATIENCE, assert_bytes, pattern, take, tcp_device, until};
use weft_conformance::gauge::{descriptors, given_back, resident};
use weft_conformance::raw::{Raw, read_request, send, start_frame, write};
use weft_conformance::victim::{Bystander, Role, Victim, Wire};
use weft_conformance::waits::alone;
use weft_verbs::cm::{ConnParam, Listener, connect};
use weft_verbs::{Device, Limits, LinkOptions, LocalMode, QpInit, QpState, SendWr, WcStatus};
use weft_wire::mpa::FrameKind;
use weft_wire::rdmap::ReadRequest;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const MIB: usize = 1 << 20;

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

/// Open descriptors that this process may still have.
fn spare_descriptors() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("procfs");
    let line = limits.lines().find(|l| l.starts_with("Max open files"));
    let soft = line.and_then(|l| l.split_whitespace().nth(3));
    let soft = soft.and_then(|s| s.parse().ok()).unwrap_or(usize::MAX);
    soft.saturating_sub(descriptors())
}

/// Connects and accepts a good peer in the middle of a flood, and tries again when it is rejected.
fn good_peer_gets_in(device: &Device, listener: &Listener) {
    let (done, over) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let addr = listener.local_addr();
        scope.spawn(move || {
            let cq = device.create_cq(4, None).expect("a CQ");
            let pd = device.alloc_pd().expect("a PD");
            let deadline = Instant::now() + PATIENCE;
            loop {
                let mut param = param(Duration::from_secs(5));
                param.private_data = b"good".to_vec();
                match connect(addr, &pd, &QpInit::new(&cq, &cq), &param) {
                    Ok(conn) => {
                        done.send(conn).expect("the test waits");
                        return;
                    }
                    Err(error) if Instant::now() > deadline => panic!("shut out: {error}"),
                    Err(_) => {}
                }
            }
        });
        let cq = device.create_cq(4, None).expect("a CQ");
        let pd = device.alloc_pd().expect("a PD");
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "a good peer in time");
            if let Some(request) = listener.next_request(Some(Duration::from_millis(100)))
                && request.private_data() == b"good"
            {
                let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
                let accepted = request.accept(qp, &param(PATIENCE));
                if accepted.is_ok() && over.recv_timeout(Duration::from_secs(5)).is_ok() {
                    return;
                }
            }
        }
    });
}

#[test]
fn two_thousand_connections_that_say_nothing() {
    if !alone("pressure::two_thousand_connections_that_say_nothing") {
        return;
    }
    let wanted = 2000;
    let flood = wanted.min(spare_descriptors().saturating_sub(200) / 2);
    if flood < wanted {
        println!("only {flood} connections: the limit on open descriptors is low");
    }
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    let listener = Listener::bind(&device, ANY, 1024, &param(PATIENCE)).expect("a listener");
    bystander.ping();
    let before = resident();
    let frame = start_frame(FrameKind::Request, true, 4).emit();
    let mut flood: Vec<_> = (0..flood)
        .map(|i| {
            let mut raw = Raw::connect(listener.local_addr());
            // Some send a part of a frame.
            raw.send(&frame[..if i % 4 == 0 { frame.len() - 1 } else { 0 }]);
            if i % 100 == 0 {
                bystander.ping();
            }
            raw
        })
        .collect();
    good_peer_gets_in(&device, &listener);
    bystander.ping();
    let grown = resident().saturating_sub(before);
    println!("{} connections, {grown} bytes", flood.len());
    assert!(grown < 32 * MIB, "{grown} bytes for a flood");
    // Beyond the device's limit the oldest were rejected: never more than that are held.
    let most = device.attr().limits.max_pending as usize;
    let mut open = 0;
    for raw in &mut flood {
        raw.stream.set_nonblocking(true).expect("non-blocking");
        let state = raw.stream.read(&mut [0; 16]);
        open += usize::from(state.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
    }
    println!("{open} of {} are still held", flood.len());
    assert!(open <= most, "{open} held, the limit is {most}");
    drop(flood);
    good_peer_gets_in(&device, &listener);
    bystander.ping();
}

#[test]
fn floods_beyond_a_small_limit() {
    if !alone("pressure::floods_beyond_a_small_limit") {
        return;
    }
    let limits = Limits {
        max_pending: 16,
        ..Limits::default()
    };
    let device = Device::builder()
        .local(LocalMode::Off)
        .limits(limits)
        .open()
        .expect("a device");
    let bystander = Bystander::new(&device);
    let listener = Listener::bind(&device, ANY, 64, &param(PATIENCE)).expect("a listener");
    let flood: Vec<_> = (0..200)
        .map(|_| TcpStream::connect(listener.local_addr()).expect("connect"))
        .collect();
    good_peer_gets_in(&device, &listener);
    bystander.ping();
    drop(flood);
}

#[test]
fn requests_that_nobody_answers() {
    if !alone("pressure::requests_that_nobody_answers") {
        return;
    }
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    let listener = Listener::bind(&device, ANY, 8, &param(PATIENCE)).expect("a listener");
    // Complete requests, far more than the backlog accepts: the rest is rejected.
    let mut raws: Vec<_> = (0..40)
        .map(|_| Raw::request(listener.local_addr(), true, 4))
        .collect();
    let mut ended = 0;
    for raw in &mut raws {
        raw.stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .expect("time-out");
        let outcome = raw.stream.read(&mut [0; 64]);
        ended += usize::from(!outcome.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
    }
    assert!(ended >= 40 - 8 - 1, "{ended} of 40 turned away");
    bystander.ping();
    let mut waiting = 0;
    while let Some(request) = listener.next_request(Some(Duration::ZERO)) {
        waiting += 1;
        drop(request);
    }
    assert!((1..=9).contains(&waiting), "{waiting} in a backlog of 8");
    good_peer_gets_in(&device, &listener);
}

#[test]
fn a_peer_that_stops_reading() {
    if !alone("pressure::a_peer_that_stops_reading") {
        return;
    }
    const LEN: usize = 16 * MIB;
    for (role, wire) in [
        (Role::Initiator, Wire::Tcp { crc: true }),
        (Role::Responder, Wire::Tcp { crc: true }),
        (Role::Initiator, Wire::Tcp { crc: false }),
        (Role::Initiator, Wire::Local),
        (Role::Responder, Wire::Local),
    ] {
        for goes_on in [true, false] {
            let device = wire.device();
            let bystander = Bystander::new(&device);
            let (victim, mut raw) = Victim::on(&device, role, wire, 1);
            // Its own read must not delay sends. The program's memory, which no peer maps: all of it goes through the ring.
            let big = victim.pd.reg_mr(vec![0; LEN], ALL).expect("a region");
            big.write(LEN - 64, &pattern(3, 64)).expect("within");
            bystander.ping();
            let before = resident();
            let nowhere = weft_verbs::RemoteAddr { addr: 0, rkey: 1 };
            for id in 0..4 {
                let wr = SendWr::write(100 + id, nowhere).sge(big.whole()).signaled();
                victim.qp.post_send_one(wr).expect("post");
            }
            for _ in 0..20 {
                bystander.ping();
            }
            // Reading the region maps its zero page, which is not counted.
            let grown = resident().saturating_sub(before);
            assert!(grown < 16 * MIB, "{role:?}, {wire:?}: {grown} bytes");
            assert_eq!(victim.qp.state(), QpState::Rts);
            if goes_on {
                // The answer to the victim's read lets its writes complete, in order.
                raw.send_ulpdus(&[weft_conformance::raw::tagged(
                    weft_wire::rdmap::Opcode::ReadResponse,
                    true,
                    victim.sink,
                    0,
                    &[0; weft_conformance::victim::READ_LEN],
                )]);
                let mut total = 0;
                while total < 4 * LEN {
                    let (_, payload) = raw.segment().expect("the writes");
                    total += payload.len();
                }
                for (id, wc) in take(&victim.scq, 4).iter().enumerate() {
                    assert_eq!((wc.wr_id, wc.status), (100 + id as u64, WcStatus::Success));
                }
            } else {
                drop(raw);
                for wc in take(&victim.scq, 5) {
                    assert_eq!(wc.status, WcStatus::WrFlushErr);
                }
                assert_eq!(victim.qp.state(), QpState::Error);
            }
            bystander.ping();
        }
    }
}

#[test]
fn a_peer_that_reads_without_taking_the_answers() {
    if !alone("pressure::a_peer_that_reads_without_taking_the_answers") {
        return;
    }
    const LEN: usize = 64 * MIB;
    for (role, wire) in [
        (Role::Initiator, Wire::Tcp { crc: true }),
        (Role::Responder, Wire::Tcp { crc: true }),
        (Role::Initiator, Wire::Local),
        (Role::Responder, Wire::Local),
    ] {
        let device = wire.device();
        let bystander = Bystander::new(&device);
        let (victim, mut raw) = Victim::on(&device, role, wire, 1);
        let big = victim.pd.reg_mr(vec![0; LEN], ALL).expect("a region");
        bystander.ping();
        let before = resident();
        for msn in 1..=4 {
            raw.send_ulpdus(&[read_request(
                msn,
                &ReadRequest {
                    sink_stag: 7,
                    sink_to: 0,
                    size: LEN as u32,
                    src_stag: big.rkey(),
                    src_to: 0,
                },
            )]);
        }
        for _ in 0..20 {
            bystander.ping();
        }
        let grown = resident().saturating_sub(before);
        assert!(grown < 16 * MIB, "{role:?}, {wire:?}: {grown} bytes");
        // Answers that it does not read do not delay its other traffic.
        let data = pattern(8, 100);
        raw.send_ulpdus(&[write(victim.target.rkey(), 0, &data)]);
        until("the write", || {
            victim.target.to_vec(0, 100).is_ok_and(|now| now == data)
        });
        // The owner ends it without waiting for the peer.
        victim.qp.to_error();
        assert_eq!(take(&victim.rcq, 1)[0].status, WcStatus::WrFlushErr);
        bystander.ping();
    }
}

#[test]
fn a_peer_that_never_closes() {
    if !alone("pressure::a_peer_that_never_closes") {
        return;
    }
    let limits = Limits {
        max_qp: 8,
        ..Limits::default()
    };
    let wires = [Wire::Tcp { crc: true }, Wire::Local];
    let devices = wires.map(|wire| {
        let device = wire.device_with(limits);
        let bystander = Bystander::new(&device);
        (wire, device, bystander)
    });
    // Each victim ends; its peer neither reads nor closes. Queue pairs and descriptors are still released.
    let mut raws = Vec::new();
    let before = descriptors();
    for (wire, device, bystander) in &devices {
        for round in 0..20 {
            let (victim, mut raw) = Victim::impatient(device, Role::Responder, *wire, 1);
            raw.send_ulpdus(&[send(7, &[round])]);
            until("the victim's end", || victim.qp.state() == QpState::Error);
            raws.push(raw);
        }
        bystander.ping();
    }
    // The remaining ones are the raw peers'.
    let theirs: usize = raws.iter().map(Raw::descriptors).sum();
    given_back(before + theirs + 4);
}

#[test]
fn connections_come_and_go() {
    if !alone("pressure::connections_come_and_go") {
        return;
    }
    let device = tcp_device();
    let bystander = Bystander::new(&device);
    let round = || {
        let (victim, mut raw) = Victim::new(&device, Role::Responder, true, 1);
        raw.send_ulpdus(&[send(1, b"hello")]);
        assert_eq!(take(&victim.rcq, 1)[0].status, WcStatus::Success);
        assert_bytes(&victim.private, 0, b"hello", "message");
    };
    for _ in 0..100 {
        round();
    }
    until("the first ones are gone", || descriptors() < 100);
    let before = resident();
    for _ in 0..400 {
        round();
    }
    until("all are gone", || descriptors() < 100);
    let grown = resident().saturating_sub(before);
    assert!(grown < 8 * MIB, "{grown} bytes after 400 connections");
    bystander.ping();
}

#[test]
fn a_slow_peer_gets_all_before_the_end() {
    if !alone("pressure::a_slow_peer_gets_all_before_the_end") {
        return;
    }
    std::thread::scope(|scope| {
        for wire in [Wire::Tcp { crc: false }, Wire::Local] {
            for role in [Role::Initiator, Role::Responder] {
                scope.spawn(move || a_slow_peer(wire, role));
            }
        }
    });
}

fn a_slow_peer(wire: Wire, role: Role) {
    const WRITES: usize = 60;
    const LEN: usize = MIB / 4;
    let device = wire.device();
    let (victim, mut raw) = Victim::on(&device, role, wire, 1);
    raw.send_ulpdus(&[weft_conformance::raw::tagged(
        weft_wire::rdmap::Opcode::ReadResponse,
        true,
        victim.sink,
        0,
        &[0; weft_conformance::victim::READ_LEN],
    )]);
    let big = victim.pd.reg_mr(vec![0; LEN], ALL).expect("a region");
    let nowhere = weft_verbs::RemoteAddr { addr: 0, rkey: 1 };
    for _ in 0..WRITES {
        let wr = SendWr::write(1, nowhere).sge(big.whole());
        victim.qp.post_send_one(wr).expect("post");
    }
    let wr = SendWr::send(2).inline(b"that was all");
    victim.qp.post_send_one(wr).expect("post");
    victim.qp.disconnect();
    // It reads a little now and then, for longer than any time limit for a silent peer.
    let slow = Instant::now();
    let (mut total, mut last) = (0, Vec::new());
    while let Some((header, payload)) = raw.segment() {
        if header.opcode() == weft_wire::rdmap::Opcode::Send {
            last = payload;
        } else {
            total += payload.len();
        }
        if slow.elapsed() < Duration::from_secs(4) {
            // The pace of the peer, not a synchronisation.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    let want = (WRITES * LEN, &b"that was all"[..]);
    assert_eq!((total, &last[..]), want, "{wire:?}, {role:?}");
}
