//! What tshark makes of our formats with the dissector of `weft dissector`.
//!
//! What goes between two ends goes through a socket of the test, which writes it as a capture: no rights are needed, and nothing is made up but the
//! headers of IP, UDP and TCP.

mod capture;
mod streams;

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use capture::{Capture, have_tshark};
use weft_verbs::{
    Access, Device, RecvWr, RemoteAddr, SendWr, UdDest, UdInit, UdReliable, Wc, WcStatus,
};

const LONG: Duration = Duration::from_secs(30);

/// What comes to the socket, until it is so many datagrams that the test wants.
fn record(
    socket: &UdpSocket,
    into: &mut Vec<Vec<u8>>,
    wanted: impl Fn(&[u8]) -> bool,
    count: usize,
) {
    let start = Instant::now();
    let mut seen = 0;
    let mut buffer = vec![0; 1 << 16];
    while seen < count {
        assert!(start.elapsed() < LONG, "{seen} of {count} datagrams came");
        match socket.recv(&mut buffer) {
            Ok(n) => {
                seen += usize::from(wanted(&buffer[..n]));
                into.push(buffer[..n].to_vec());
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn tshark_reads_our_datagrams() {
    if !have_tshark() {
        return;
    }
    let recorder = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    recorder
        .set_read_timeout(Some(Duration::from_millis(20)))
        .expect("a time limit");
    let device = Device::open().expect("a device");
    let pd = device.alloc_pd().expect("a domain");
    let cq = device.create_cq(1024, None).expect("a queue");
    let loopback: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    let port = device.bind_ud(loopback).expect("a port");
    let mr = pd.alloc_mr(1 << 20, Access::LOCAL_WRITE).expect("a region");
    let init = UdInit {
        record_depth: 16,
        num: Some(0x1234),
        segment: 1000,
        ..UdInit::new(&port, 0x1111_1111, &cq, &cq)
    };
    let qp = pd.create_ud_qp(&init).expect("a queue pair");
    let dest = UdDest {
        addr: recorder.local_addr().expect("an address"),
        qp_num: 0xabcd,
        qkey: 0x1111_1111,
        from: None,
        traffic_class: 0,
    };
    let send = |wr: SendWr| qp.post_send(&wr, &dest).expect("posted");
    let mut seen = Vec::new();
    let all = |_: &[u8]| true;
    send(SendWr::send(1).inline(b"version 1"));
    send(SendWr::send_imm(2, 0x1_0000_0001).inline(b"x").solicited());
    send(SendWr::send(3).sge(mr.sge(0, 2500)));
    let remote = RemoteAddr {
        addr: 0x10_0000,
        rkey: 0x0102_0304,
    };
    send(SendWr::write_imm(4, remote, 0x55).sge(mr.sge(0, 1500)));
    record(&recorder, &mut seen, all, 1 + 1 + 3 + 2);
    // So much that a probe comes; a port of ours answers it.
    let is_probe = |bytes: &[u8]| bytes.starts_with(&[0x57, 0x28]);
    let before = seen.len();
    while !seen.iter().any(|bytes| is_probe(bytes)) {
        send(SendWr::send(5).sge(mr.sge(0, 1000)));
        let mut wc = [Wc::default()];
        let _ = cq.poll(&mut wc);
        record(&recorder, &mut seen, all, 1);
        assert!(seen.len() < 2000, "no probe");
    }
    let probe = seen.iter().find(|bytes| is_probe(bytes)).cloned();
    let probe = probe.expect("it came");
    seen.truncate(before);
    seen.push(probe.clone());
    let to = port.local_addr();
    recorder.send_to(&probe, to).expect("sent");
    let mut more = Vec::new();
    let is_report = |bytes: &[u8]| bytes.starts_with(&[0x57, 0x29]);
    record(&recorder, &mut more, is_report, 1);
    seen.extend(more.into_iter().filter(|bytes| is_report(bytes)));
    // One that was damaged, and what is none of ours.
    let mut damaged = seen[0].clone();
    damaged[33] ^= 1;
    seen.push(damaged);
    seen.push(b"WWW is not of this protocol, and neither are others".to_vec());

    let mut capture = Capture::new();
    for datagram in &seen {
        capture.udp(datagram);
    }
    let fields = [
        "weft.version",
        "weft.opcode",
        "weft.src_qp",
        "weft.msn",
        "weft.offset",
        "weft.length",
        "weft.ddp.last",
        "weft.stag",
        "weft.to",
        "weft.imm",
        "weft.control",
        "weft.crc.good",
    ];
    let rows = capture.rows(&fields);
    let expected = [
        "1;3;0x00001234;1;0;;1;;;;;1",
        "1;9;0x00001234;2;0;;1;;;0x0000000100000001;;1",
        "2;3;0x00001234;1;0;2500;0;;;;;1",
        "2;3;0x00001234;1;896;2500;0;;;;;1",
        "2;3;0x00001234;1;1792;2500;1;;;;;1",
        "2;0;0x00001234;2;0;1500;0;0x01020304;0x0000000000100000;0x0000000000000055;;1",
        "2;0;0x00001234;2;768;1500;1;0x01020304;0x0000000000100300;0x0000000000000055;;1",
        "2;;;;;;;;;;0x28;1",
        "2;;;;;;;;;;0x29;1",
        "1;3;0x00001234;1;0;;1;;;;;0",
        ";;;;;;;;;;;",
    ];
    assert_eq!(rows, expected);
    let expert = capture.rows(&["_ws.expert.message", "_ws.col.Protocol"]);
    let (bad, good) = (&expert[9], &expert[2]);
    assert!(bad.contains("CRC is wrong"), "{bad:?}");
    assert_eq!(good, ";weft");
}

#[test]
fn tshark_reads_the_reliable_mode() {
    if !have_tshark() {
        return;
    }
    let between = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    between
        .set_read_timeout(Some(Duration::from_millis(20)))
        .expect("a time limit");
    let device = Device::open().expect("a device");
    let pd = device.alloc_pd().expect("a domain");
    let cq = device.create_cq(64, None).expect("a queue");
    let recv_cq = device.create_cq(64, None).expect("a queue");
    let loopback: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).expect("a region");
    let make = |num| {
        let port = device.bind_ud(loopback).expect("a port");
        let init = UdInit {
            num: Some(num),
            reliable: Some(UdReliable::default()),
            ..UdInit::new(&port, 0x1111_1111, &cq, &recv_cq)
        };
        pd.create_ud_qp(&init).expect("a queue pair")
    };
    let (qa, qb) = (make(0x1234), make(0x5678));
    let recv = RecvWr::new(1).sge(mr.sge(0, 100));
    qb.post_recv(&[recv.clone(), recv]).expect("posted");
    let dest = UdDest {
        addr: between.local_addr().expect("an address"),
        qp_num: 0x5678,
        qkey: 0x1111_1111,
        from: None,
        traffic_class: 0,
    };
    for (id, len) in [(1, 100), (2, 101)] {
        let wr = SendWr::send(id).sge(mr.sge(0, len)).signaled();
        qa.post_send(&wr, &dest).expect("posted");
    }
    let (mut done, mut seen) = (Vec::new(), Vec::new());
    let mut buffer = [0; 4096];
    let start = Instant::now();
    while done.len() < 2 {
        assert!(start.elapsed() < LONG, "{done:?}");
        let mut wc = [Wc::default()];
        if cq.poll(&mut wc) == Ok(1) {
            done.push(wc[0].status);
        }
        if let Ok((n, from)) = between.recv_from(&mut buffer) {
            let (a, b) = (qa.port().local_addr(), qb.port().local_addr());
            let to = if from == a { b } else { a };
            seen.push(buffer[..n].to_vec());
            between.send_to(&buffer[..n], to).expect("sent");
        }
    }
    assert_eq!(done, [WcStatus::Success, WcStatus::RemInvReqErr]);
    let mut capture = Capture::new();
    for datagram in &seen {
        capture.udp(datagram);
    }
    let fields = [
        "weft.control",
        "weft.src_qp",
        "weft.psn",
        "weft.msn",
        "weft.fault",
        "weft.qkey",
        "weft.length",
        "weft.flow_cookie",
        "_ws.expert.message",
    ];
    let mut rows: Vec<Vec<String>> = capture
        .rows(&fields)
        .iter()
        .map(|row| row.split(';').map(str::to_owned).collect())
        .collect();
    // The same cookie in the welcome and in each segment.
    let cookie = rows[1][7].clone();
    assert_eq!(cookie.len(), 18, "{rows:?}");
    for row in &mut rows {
        row[7] = if row[7] == cookie { "same" } else { "" }.to_owned();
    }
    let rows: Vec<String> = rows.iter().map(|row| row.join(";")).collect();
    let wanted = [
        "0x2c;0x00001234;;;;0x11111111;;;",
        "0x2d;0x00005678;;;;;;same;",
        ";0x00001234;1;1;;0x11111111;100;same;",
        ";0x00001234;2;2;;0x11111111;101;same;",
    ];
    assert_eq!(rows[..4], wanted, "{rows:#?}");
    // The first one may be acknowledged by the fault alone.
    let fault = "0x2b;0x00005678;2;2;2;;;;";
    assert!(rows[4..].iter().any(|row| row == fault), "{rows:#?}");
}
