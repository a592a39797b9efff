//! A million sources, each with its own address, send one datagram each to a port with an unreliable and a reliable queue pair. The state kept about them is
//! bounded, an honest peer is served all the time, and no source gets an answer that is longer than its datagram. In a process of its own,
//! because it measures the memory of that.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use weft_conformance::waits::alone;
use weft_sys::Interest;
use weft_sys::udp::UdpSocket;
use weft_verbs::{
    Access, Cq, Device, LocalMode, RecvWr, SendWr, UdDest, UdInit, UdQp, UdReliable, Wc, WcStatus,
};
use weft_wire::dgram::{Control, FaultCode, Flow, Header, Packet, Segment, Target, seal};

const SOURCES: u32 = 1_000_000;
/// Datagrams before the port is asked for its progress: as many as a socket of the system's default size holds.
const ROUND: u32 = 250;
const QKEY: u32 = 0x1111_1111;
const KINDS: u32 = 12;

/// Resident memory of this process, in kilobytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.expect("a number of kilobytes")
}

/// From 127.1.0.0 on.
fn address(n: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x7f01_0000 + n))
}

fn number(addr: IpAddr) -> Option<u32> {
    let IpAddr::V4(addr) = addr else { return None };
    addr.to_bits().checked_sub(0x7f01_0000)
}

/// The datagram of the source with this number: every valid kind, and invalid ones.
fn datagram(n: u32, plain: u32, reliable: u32, raw: &mut Vec<u8>) {
    let packet = Packet {
        psn: 1,
        cookie: u64::from(n) << 32 | 0x1234_5678,
    };
    let flow = |dst_qp| Flow {
        dst_qp,
        src_qp: 7,
        incarnation: n,
    };
    let segment = Segment {
        dst_qp: plain,
        src_qp: 7,
        qkey: QKEY,
        incarnation: n,
        msn: 1,
        len: 100,
        offset: 0,
        target: None,
        imm: None,
        solicited: false,
        reliable: None,
    };
    raw.clear();
    let mut emit = |segment: Segment, payload: usize| {
        segment.emit(payload, raw);
        raw.resize(raw.len() + payload, n as u8);
        seal(raw);
    };
    let psn = 1;
    match n % KINDS {
        // A message that never becomes complete.
        0 => emit(segment, 10),
        // Memory that it may not write.
        1 => {
            let target = Some(Target { stag: n, to: 0 });
            emit(Segment { target, ..segment }, 100);
        }
        // Segments of the reliable mode with a guessed cookie, to a queue pair in that mode and to one that is not.
        kind @ (2 | 3) => emit(
            Segment {
                dst_qp: if kind == 2 { reliable } else { plain },
                reliable: Some(packet),
                len: 0,
                ..segment
            },
            0,
        ),
        4 => {
            let header = Header {
                dst_qp: plain,
                src_qp: 7,
                qkey: QKEY + 1,
                msn: 1,
                solicited: false,
                imm: None,
            };
            header.emit(raw);
            seal(raw);
        }
        5 => raw.extend((0..n % 40).map(|i| (n.wrapping_mul(2_654_435_761) >> (i % 24)) as u8)),
        6 => Control::Hello {
            flow: flow(reliable),
            qkey: QKEY,
        }
        .emit(raw),
        7 => Control::Probe { cookie: n, sent: 1 }.emit(raw),
        8 => Control::Report {
            cookie: n,
            sent: 1,
            room: 1,
        }
        .emit(raw),
        9 => Control::Ack {
            flow: flow(reliable),
            psn,
            sack: u64::MAX,
        }
        .emit(raw),
        10 => Control::Fault {
            flow: flow(reliable),
            code: FaultCode::Unknown,
            psn,
            msn: 1,
        }
        .emit(raw),
        _ => Control::Welcome {
            flow: flow(reliable),
            cookie: 1,
        }
        .emit(raw),
    }
}

struct Attack {
    socket: UdpSocket,
    to: SocketAddr,
    answered: Vec<bool>,
    answers: u32,
    plain: u32,
    reliable: u32,
}

impl Attack {
    /// Receives the waiting answers. Returns true if one is to the question with this cookie.
    fn take(&mut self, barrier: u32) -> bool {
        let mut buffer = [0; 2048];
        let mut raw = Vec::new();
        let mut passed = false;
        while let Ok(answer) = self.socket.recv(&mut buffer) {
            let Some(n) = answer.to.and_then(number).filter(|&n| n < SOURCES) else {
                let is = Control::Report {
                    cookie: barrier,
                    sent: 0,
                    room: 0,
                };
                is.emit(&mut raw);
                passed |= buffer[..8] == raw[..8];
                raw.clear();
                continue;
            };
            datagram(n, self.plain, self.reliable, &mut raw);
            assert!(answer.len <= raw.len(), "kind {}", n % KINDS);
            let again = std::mem::replace(&mut self.answered[n as usize], true);
            assert!(!again, "two answers to one datagram of kind {}", n % KINDS);
            self.answers += 1;
        }
        passed
    }

    /// Waits until the port has received all datagrams sent to it.
    fn wait(&mut self, round: u32) {
        let mut raw = Vec::new();
        let probe = Control::Probe {
            cookie: round,
            sent: 0,
        };
        probe.emit(&mut raw);
        // A number of attempts and not a time: the machine may have stood still.
        for _ in 0..1000 {
            let _ = self
                .socket
                .send(&raw, self.to, Some(Ipv4Addr::LOCALHOST.into()));
            let fds = [(self.socket.as_fd(), Interest::READ)];
            let _ = weft_sys::poll_fds(&fds, Some(Duration::from_millis(100)));
            for _ in 0..100 {
                if self.take(round) {
                    return;
                }
                std::thread::yield_now();
            }
        }
        panic!("the port takes nothing any more");
    }
}

fn completion(cq: &Cq, limit: Duration) -> Option<Wc> {
    let mut wc = [Wc::default()];
    let n = cq.wait(&mut wc, Some(limit)).expect("no overrun");
    (n == 1).then(|| wc[0])
}

#[test]
fn a_million_sources_are_survived() {
    if !alone("million::a_million_sources_are_survived") {
        return;
    }
    let here = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let device = Device::open().expect("a device");
    let pd = device.alloc_pd().expect("a domain");
    let cq = device.create_cq(1024, None).expect("a queue");
    let port = device.bind_ud(here).expect("a port");
    let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let mr = mr.expect("a region");
    let init = UdInit {
        record_depth: 64,
        ..UdInit::new(&port, QKEY, &cq, &cq)
    };
    let plain = pd.create_ud_qp(&init).expect("a queue pair");
    let mode = Some(UdReliable::default());
    let reliable: UdQp = pd
        .create_ud_qp(&UdInit {
            reliable: mode,
            ..UdInit::new(&port, QKEY, &cq, &cq)
        })
        .expect("a queue pair");
    let recv = |id| plain.post_recv(&[RecvWr::new(id).sge(mr.sge(0, 256))]);
    (0..64).for_each(|id| recv(id).expect("a receive"));

    // An honest peer, through the kernel like the others.
    let peer = Device::builder().local(LocalMode::Off).open().expect("one");
    let peer_cq = peer.create_cq(64, None).expect("a queue");
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let peer_port = peer.bind_ud(loopback).expect("a port");
    let peer_qp = peer.alloc_pd().expect("a domain");
    let peer_qp = peer_qp
        .create_ud_qp(&UdInit::new(&peer_port, QKEY, &peer_cq, &peer_cq))
        .expect("a queue pair");
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port.local_addr().port()));
    let dest = UdDest {
        addr: to,
        qp_num: plain.num(),
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    };

    let socket = UdpSocket::bind(here, 4 << 20).expect("a socket");
    let mut attack = Attack {
        socket,
        to,
        answered: vec![false; SOURCES as usize],
        answers: 0,
        plain: plain.num(),
        reliable: reliable.num(),
    };
    let (mut raw, mut heard, mut before) = (Vec::new(), 0, resident());
    let begun = Instant::now();
    for n in 0..SOURCES {
        datagram(n, plain.num(), reliable.num(), &mut raw);
        attack
            .socket
            .send(&raw, to, Some(address(n)))
            .expect("the loopback interface takes it");
        if n % ROUND == ROUND - 1 {
            attack.wait(n);
        }
        if n == SOURCES / 10 {
            println!("{} KiB at the first tenth", resident() - before);
            before = resident();
        }
        if n % (SOURCES / 100) == 7 {
            // It may be lost, but not each time.
            heard += u32::from((0..20).any(|_| {
                peer_qp
                    .post_send(&SendWr::send(1).inline(b"honest"), &dest)
                    .expect("posted");
                completion(&cq, Duration::from_secs(1)).is_some_and(|wc| {
                    assert_eq!(wc.status, WcStatus::Success);
                    assert_eq!(wc.source.map(|s| s.addr), Some(peer_port.local_addr()));
                    assert_eq!(wc.byte_len, 6);
                    recv(wc.wr_id).is_ok()
                })
            }));
        }
    }
    let grown = resident().saturating_sub(before);
    let (counters, dropped) = (plain.counters(), port.counters());
    println!(
        "{SOURCES} sources in {:.1?}: {grown} KiB more than after the first tenth, {} answers; {counters:?}, {dropped:?}",
        begun.elapsed(),
        attack.answers
    );
    assert_eq!(heard, 100, "honest messages");
    assert!(grown < 16 << 10, "{grown} KiB");
    // The datagrams were processed, and not lost before the port.
    let each = u64::from(SOURCES / KINDS);
    for (what, count) in [
        ("no access", counters.no_access),
        ("wrong key", counters.wrong_qkey),
        ("given up", counters.incomplete),
        ("nonsense", dropped.malformed),
        ("answers to four kinds", u64::from(attack.answers) / 4),
    ] {
        assert!(count > each / 2, "{what}: {count} of {each}");
    }
    assert_eq!(counters.records, 0);
    assert!(
        mr.to_vec(256, 4096 - 256)
            .expect("in bounds")
            .iter()
            .all(|&b| b == 0)
    );
}
