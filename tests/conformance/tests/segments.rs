//! Datagram queue pairs with messages of several segments, and RDMA Write-Record: docs/spec/dgram.md.

use std::net::UdpSocket;
use std::time::Duration;

use weft_conformance::waits::until;
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, PostReason, RecvWr, RemoteAddr, SendWr, UD_MTU, UdDest,
    UdErrorKind, UdInit, UdPort, UdQp, Wc, WcOpcode, WcStatus,
};
use weft_wire::dgram::{Segment, Target, seal};

const LONG: Duration = Duration::from_secs(30);
/// The time limit of messages that are to be given up: more than their segments take to arrive.
const SHORT: Duration = Duration::from_millis(500);
const QKEY: u32 = 0x1111_1111;
const MIB: usize = 1 << 20;

struct Side {
    pd: Pd,
    cq: Cq,
    port: UdPort,
    mr: Mr,
}

impl Side {
    fn new(addr: &str) -> Side {
        let device = Device::open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Side {
            cq: device.create_cq(4096, None).expect("a queue"),
            port: device
                .bind_ud(addr.parse().expect("an address"))
                .expect("a port"),
            mr: pd.alloc_mr(4 * MIB, access).expect("a region"),
            pd,
        }
    }

    fn init(&self) -> UdInit {
        UdInit {
            record_depth: 64,
            // A pause of a busy machine must not make messages time out.
            message_timeout: LONG,
            ..UdInit::new(&self.port, QKEY, &self.cq, &self.cq)
        }
    }

    fn qp(&self) -> UdQp {
        self.pd.create_ud_qp(&self.init()).expect("a queue pair")
    }

    fn recv(&self, qp: &UdQp, id: u64, off: usize, len: usize) {
        let wr = RecvWr::new(id).sge(self.mr.sge(off, len));
        qp.post_recv(&[wr]).expect("a receive");
    }

    fn next(&self) -> Wc {
        let mut wc = [Wc::default()];
        let n = self.cq.wait(&mut wc, Some(LONG)).expect("no overrun");
        assert_eq!(n, 1, "nothing within the time");
        wc[0]
    }

    fn none(&self) {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.poll(&mut wc), Ok(0), "{wc:?}");
    }
}

fn to(qp: &UdQp) -> UdDest {
    UdDest {
        addr: qp.port().local_addr(),
        qp_num: qp.num(),
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + seed) * 7 + i / 251) as u8).collect()
}

/// A third party that forges datagrams.
struct Forger {
    socket: UdpSocket,
    base: Segment,
    to: std::net::SocketAddr,
}

impl Forger {
    fn new(qp: &UdQp) -> Forger {
        Forger {
            socket: UdpSocket::bind("127.0.0.1:0").expect("a socket"),
            base: Segment {
                dst_qp: qp.num(),
                src_qp: 77,
                qkey: QKEY,
                incarnation: 5,
                msn: 1,
                len: 12,
                offset: 0,
                target: None,
                imm: None,
                solicited: false,
                reliable: None,
            },
            to: qp.port().local_addr(),
        }
    }

    fn send(&self, segment: &Segment, payload: &[u8]) {
        let mut raw = Vec::new();
        segment.emit(payload.len(), &mut raw);
        raw.extend_from_slice(payload);
        seal(&mut raw);
        let sent = self.socket.send_to(&raw, self.to).expect("sent");
        assert_eq!(sent, raw.len());
    }
}

fn long_messages_arrive(addr: &str, segment: u32) {
    let (a, b) = (Side::new(addr), Side::new(addr));
    let init = UdInit {
        segment,
        ..a.init()
    };
    let (qa, qb) = (a.pd.create_ud_qp(&init).expect("a queue pair"), b.qp());
    for (id, len) in [4097, 65_536, 100_001, MIB + 3].into_iter().enumerate() {
        let bytes = pattern(len, id);
        a.mr.write(0, &bytes).expect("in bounds");
        // In two pieces on both sides.
        let wr = RecvWr::new(id as u64)
            .sge(b.mr.sge(100, 1000))
            .sge(b.mr.sge(2 * MIB, 2 * MIB));
        qb.post_recv(&[wr]).expect("a receive");
        let wr = SendWr::send(9)
            .sge(a.mr.sge(0, 3000))
            .sge(a.mr.sge(3000, len - 3000));
        qa.post_send(&wr.signaled(), &to(&qb)).expect("posted");
        let sent = a.next();
        assert_eq!(
            (sent.status, sent.byte_len as usize, sent.opcode),
            (WcStatus::Success, len, WcOpcode::Send)
        );
        let wc = b.next();
        assert_eq!(
            (wc.wr_id, wc.status, wc.byte_len as usize),
            (id as u64, WcStatus::Success, len)
        );
        assert_eq!(wc.source.expect("a source").qp_num, qa.num());
        let got = [
            b.mr.to_vec(100, 1000).expect("in bounds"),
            b.mr.to_vec(2 * MIB, len - 1000).expect("in bounds"),
        ];
        assert!(
            got.concat() == bytes,
            "{len} bytes in segments of {segment}"
        );
    }
    assert_eq!(qb.counters().incomplete, 0);
}

#[test]
fn messages_of_several_segments_are_put_together() {
    long_messages_arrive("127.0.0.1:0", 65_408);
    long_messages_arrive("127.0.0.1:0", 1400);
    if UdpSocket::bind("[::1]:0").is_ok() {
        long_messages_arrive("[::1]:0", 65_408);
    } else {
        println!("skipped: no IPv6");
    }
}

/// The sender is faster than any receiver that also reads: pacing keeps the data in flight within the receiver's socket.
#[test]
fn a_fast_sender_does_not_overrun_a_receiver() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let (qa, qb) = (a.qp(), b.qp());
    let bytes = pattern(MIB, 1);
    a.mr.write(0, &bytes).expect("in bounds");
    const COUNT: u64 = 24;
    for id in 0..COUNT {
        b.recv(&qb, id, 0, MIB);
        let wr = SendWr::send(id).sge(a.mr.sge(0, MIB));
        qa.post_send(&wr, &to(&qb)).expect("posted");
    }
    for id in 0..COUNT {
        let wc = b.next();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success));
    }
    until("all sends are done", || qa.outstanding() == 0);
    assert!(b.mr.to_vec(0, MIB).expect("in bounds") == bytes);
}

#[test]
fn several_posts_go_out_together_and_in_order() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let (qa, qb) = (a.qp(), b.qp());
    for id in 0..100 {
        b.recv(&qb, id, id as usize * 64, 64);
    }
    let dest = to(&qb);
    let wrs: Vec<_> = (0..100)
        .map(|id: u64| {
            let len = if id % 10 == 9 { 8 } else { 16 };
            let body = [id.to_be_bytes(); 2].concat();
            (SendWr::send(id).inline(&body[..len]).signaled(), dest)
        })
        .collect();
    qa.post_sends(&wrs).expect("posted");
    for id in 0..100 {
        assert_eq!(a.next().wr_id, id);
    }
    for id in 0..100 {
        let wc = b.next();
        let len = if id % 10 == 9 { 8 } else { 16 };
        assert_eq!((wc.wr_id, wc.byte_len), (id, len));
        let got = b.mr.to_vec(id as usize * 64, 8).expect("in bounds");
        assert_eq!(got, id.to_be_bytes());
    }
    let mut wrs = wrs[..2].to_vec();
    wrs[1].0.op = weft_verbs::SendOp::Read {
        remote: b.mr.remote(0),
    };
    let refused = qa.post_sends(&wrs).expect_err("no reads");
    assert_eq!((refused.index, refused.reason), (1, PostReason::Opcode));
    assert_eq!(a.next().wr_id, 0, "the one before it was taken");
}

#[test]
fn a_write_record_tells_source_range_and_validity() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let (qa, qb) = (a.qp(), b.qp());
    let bytes = pattern(300_000, 3);
    a.mr.write(0, &bytes).expect("in bounds");
    let wr = SendWr::write(4, b.mr.remote(5000)).sge(a.mr.sge(0, bytes.len()));
    qa.post_send(&wr.signaled(), &to(&qb)).expect("posted");
    let sent = a.next();
    assert_eq!(
        (sent.wr_id, sent.opcode, sent.status),
        (4, WcOpcode::Write, WcStatus::Success)
    );
    // No receive was posted.
    let wc = b.next();
    assert_eq!(
        (wc.opcode, wc.status, wc.byte_len, wc.qp_num),
        (WcOpcode::WriteRecord, WcStatus::Success, 300_000, qb.num())
    );
    let record = qb.take_record(wc.wr_id).expect("a record");
    assert_eq!(qb.take_record(wc.wr_id), None);
    assert!(record.is_complete());
    assert_eq!(record.source.qp_num, qa.num());
    assert_eq!(record.source.addr, qa.port().local_addr());
    assert_eq!(
        (record.rkey, record.addr, record.len),
        (b.mr.rkey(), 5000, 300_000)
    );
    assert!(b.mr.to_vec(5000, bytes.len()).expect("in bounds") == bytes);
    let map = qb.take_validity_map(b.mr.rkey());
    assert!(map.contains(&(5000..305_000)) && map.bytes() == 300_000);
    assert_eq!(qb.validity_map(b.mr.rkey()).bytes(), 0);
    // A short one, with immediate data and a solicited event, and an empty one.
    let wr = SendWr::write_imm(5, b.mr.remote(1), 0xabcd).inline(b"short");
    qa.post_send(&wr.solicited(), &to(&qb)).expect("posted");
    let wc = b.next();
    assert_eq!(
        (wc.opcode, wc.imm, wc.byte_len),
        (WcOpcode::WriteRecord, Some(0xabcd), 5)
    );
    assert_eq!(qb.take_record(wc.wr_id).expect("a record").msn, 2);
    assert_eq!(b.mr.to_vec(0, 7).expect("in bounds"), b"\0short\0");
    let wr = SendWr::write(6, b.mr.remote(0));
    qa.post_send(&wr, &to(&qb)).expect("posted");
    let record = qb.take_record(b.next().wr_id).expect("a record");
    assert!(record.is_complete() && record.valid.is_empty());
    assert_eq!((qb.counters().records, qb.counters().no_recv), (3, 0));
}

#[test]
fn of_a_write_record_that_loses_segments_the_rest_is_usable() {
    let b = Side::new("127.0.0.1:0");
    let [qb, strict] = [true, false].map(|partial_records| {
        let init = UdInit {
            partial_records,
            message_timeout: SHORT,
            ..b.init()
        };
        b.pd.create_ud_qp(&init).expect("a queue pair")
    });
    for (qp, partial) in [(&qb, true), (&strict, false)] {
        let forger = Forger::new(qp);
        let part = |offset: u32| Segment {
            target: Some(Target {
                stag: b.mr.rkey(),
                to: 100,
            }),
            offset,
            ..forger.base
        };
        // The end first, then a part of the middle, twice; [0, 2) and [6, 8) are missing.
        forger.send(&part(8), b"iend");
        forger.send(&part(2), b"cdef");
        forger.send(&part(2), b"XXXX");
        until("the counter dropped", || qp.counters().dropped == 1);
        if partial {
            let wc = b.next();
            assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::WriteRecord, 8));
            let record = qp.take_record(wc.wr_id).expect("a record");
            assert!(!record.is_complete());
            assert_eq!(record.valid, [2..6, 8..12]);
            assert_eq!(record.missing(), [0..2, 6..8]);
        }
        until("the counter incomplete", || qp.counters().incomplete == 1);
        b.none();
        let map = qp.validity_map(b.mr.rkey());
        assert_eq!(map.ranges().collect::<Vec<_>>(), [102..106, 108..112]);
        assert_eq!(b.mr.to_vec(102, 4).expect("in bounds"), b"cdef");
        let error = qp.take_error().expect("told");
        assert_eq!(error.kind, UdErrorKind::Incomplete);
        // Segments after that are late.
        forger.send(&part(0), b"ab");
        until("the counter dropped", || qp.counters().dropped == 2);
        assert_eq!(b.mr.to_vec(100, 2).expect("in bounds"), [0, 0]);
    }
}

/// Datagrams of a hostile peer: no byte outside its writable memory changes, and other peers are served.
#[test]
fn hostile_segments_change_nothing() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let (qa, qb) = (a.qp(), b.qp());
    let readable =
        b.pd.alloc_mr(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)
            .expect("a region");
    let foreign =
        b.pd.device()
            .alloc_pd()
            .expect("a domain")
            .alloc_mr(4096, Access::REMOTE_WRITE | Access::LOCAL_WRITE)
            .expect("a region");
    let forger = Forger::new(&qb);
    let size = b.mr.len() as u64;
    let bad: [(u32, u64, u32); 8] = [
        (b.mr.rkey() ^ 1, 0, 12),
        (b.mr.rkey() ^ 0x100, 0, 12),
        (readable.rkey(), 0, 12),
        (foreign.rkey(), 0, 12),
        (b.mr.rkey(), size - 11, 12),
        (b.mr.rkey(), size, 12),
        (b.mr.rkey(), u64::MAX - 12, 12),
        // The first segment would be within the region, the message is not.
        (b.mr.rkey(), size - 12, 13),
    ];
    let mut msn = 0;
    for (count, (stag, to, len)) in bad.into_iter().enumerate() {
        msn += 1;
        let segment = Segment {
            target: Some(Target { stag, to }),
            msn,
            len,
            ..forger.base
        };
        forger.send(&segment, b"hostile byte");
        until("the counter no_access", || {
            qb.counters().no_access == count as u64 + 1
        });
        let error = qb.take_error().expect("told");
        assert_eq!((error.kind, error.msn), (UdErrorKind::NoAccess, msn));
    }
    // Segments that contradict each other, overlap, or arrive for a finished message.
    let target = Some(Target {
        stag: b.mr.rkey(),
        to: 0,
    });
    let first = Segment {
        target,
        msn: 100,
        ..forger.base
    };
    forger.send(&first, b"1234");
    let elsewhere = Some(Target {
        stag: b.mr.rkey(),
        to: 2048,
    });
    let wrong = [
        Segment {
            len: 13,
            offset: 4,
            ..first
        },
        Segment {
            target: elsewhere,
            offset: 4,
            ..first
        },
        Segment {
            target: None,
            offset: 4,
            ..first
        },
        Segment {
            imm: Some(1),
            offset: 4,
            ..first
        },
        Segment { offset: 2, ..first },
        first,
    ];
    for (count, segment) in wrong.iter().enumerate() {
        forger.send(segment, b"5678");
        until("the counter dropped", || {
            qb.counters().dropped == count as u64 + 1
        });
    }
    let rest = Segment { offset: 4, ..first };
    forger.send(&rest, b"5678last");
    let record = qb.take_record(b.next().wr_id).expect("a record");
    assert!(record.is_complete());
    forger.send(&rest, b"replayed");
    until("the counter dropped", || qb.counters().dropped == 7);
    let mut expected = vec![0; b.mr.len()];
    expected[..12].copy_from_slice(b"12345678last");
    assert!(b.mr.to_vec(0, b.mr.len()).expect("in bounds") == expected);
    assert_eq!(readable.to_vec(0, 4096).expect("in bounds"), vec![0; 4096]);
    assert_eq!(foreign.to_vec(0, 4096).expect("in bounds"), vec![0; 4096]);
    // A queue pair that accepts no Write-Record.
    let init = UdInit {
        record_depth: 0,
        ..b.init()
    };
    let closed = b.pd.create_ud_qp(&init).expect("a queue pair");
    let segment = Segment {
        dst_qp: closed.num(),
        ..first
    };
    forger.send(&segment, b"refused");
    until("the counter no_record", || closed.counters().no_record == 1);
    let wr = SendWr::write(1, RemoteAddr { addr: 0, rkey: 1 });
    let refused = closed.post_send(&wr, &to(&qb)).expect_err("refused");
    assert_eq!(refused.reason, PostReason::Opcode);
    // Honest peers are still served.
    b.recv(&qb, 7, MIB, 100_000);
    let wr = SendWr::send(1).sge(a.mr.sge(0, 100_000));
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert_eq!((b.next().wr_id, qb.counters().no_recv), (7, 0));
}

/// A sender that uses another's address and port does not know its incarnation: it is a separate source, whose segments are not part of the other's message.
#[test]
fn a_spoofed_source_adds_nothing_to_a_message() {
    let b = Side::new("127.0.0.1:0");
    let qp = b.qp();
    (0..110).for_each(|id| b.recv(&qp, id, 16 * id as usize, 16));
    let honest = Forger::new(&qp);
    let port = honest.socket.local_addr().expect("bound").port();
    let elsewhere = std::net::SocketAddr::from(([127, 0, 0, 2], port));
    let spoofer = weft_sys::udp::UdpSocket::bind(elsewhere, 1 << 16).expect("a socket");
    honest.send(&honest.base, b"honest");
    let ours = honest.socket.local_addr().expect("bound").ip();
    for guess in 100..200 {
        let segment = Segment {
            incarnation: guess,
            offset: 6,
            ..honest.base
        };
        let mut raw = Vec::new();
        segment.emit(6, &mut raw);
        raw.extend_from_slice(b"forged");
        seal(&mut raw);
        spoofer.send(&raw, honest.to, Some(ours)).expect("sent");
    }
    let rest = Segment {
        offset: 6,
        ..honest.base
    };
    honest.send(&rest, b" bytes");
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.byte_len), (0, 12));
    assert_eq!(b.mr.to_vec(0, 12).expect("in bounds"), b"honest bytes");
    assert_eq!(wc.source.map(|source| source.addr.port()), Some(port));
}

#[test]
fn records_that_nobody_takes_have_a_limit() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let (qa, qb) = (a.qp(), b.qp());
    for id in 0..80 {
        let wr = SendWr::write(id, b.mr.remote(id as usize)).inline(b"x");
        qa.post_send(&wr, &to(&qb)).expect("posted");
    }
    until("the counter no_record", || qb.counters().no_record == 16);
    assert_eq!(qb.counters().records, 64);
    assert_eq!(b.mr.to_vec(64, 16).expect("in bounds"), [0; 16]);
    for _ in 0..64 {
        assert!(qb.take_record(b.next().wr_id).is_some());
    }
    let wr = SendWr::write(99, b.mr.remote(99)).inline(b"x");
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert!(qb.take_record(b.next().wr_id).is_some());
    // A queue without room for them is refused.
    let init = UdInit {
        record_depth: 4096,
        ..b.init()
    };
    assert!(b.pd.create_ud_qp(&init).is_err());
}

/// Incomplete messages hold receives only as long as no other message needs them.
#[test]
fn a_flood_of_beginnings_keeps_nobody_out() {
    let (a, b) = (Side::new("127.0.0.1:0"), Side::new("127.0.0.1:0"));
    let init = UdInit {
        message_timeout: SHORT,
        ..b.init()
    };
    let (qa, qb) = (a.qp(), b.pd.create_ud_qp(&init).expect("a queue pair"));
    for id in 0..4 {
        b.recv(&qb, id, id as usize * 65_536, 65_536);
    }
    let forger = Forger::new(&qb);
    for msn in 1..=50 {
        let segment = Segment { msn, ..forger.base };
        forger.send(&segment, b"begun");
    }
    until("the counter incomplete", || {
        qb.counters().incomplete + qb.counters().no_recv >= 46
    });
    let wr = SendWr::send(1).inline(b"honest");
    qa.post_send(&wr, &to(&qb)).expect("posted");
    let wc = b.next();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 6));
    // The others return their receives when their time is up, and no receive is lost.
    until("the counter incomplete", || qb.counters().incomplete == 50);
    for left in (0..3).rev() {
        qa.post_send(&wr, &to(&qb)).expect("posted");
        assert_eq!(b.next().byte_len, 6, "{left} receives are left");
    }
    qa.post_send(&wr, &to(&qb)).expect("posted");
    until("the counter no_recv", || qb.counters().no_recv == 1);
}

#[test]
fn an_error_flushes_what_is_half_there() {
    let b = Side::new("127.0.0.1:0");
    let qb = b.qp();
    b.recv(&qb, 1, 0, 65_536);
    b.recv(&qb, 2, 0, 65_536);
    let forger = Forger::new(&qb);
    forger.send(&forger.base, b"begun");
    let stale = Segment {
        msn: 9,
        ..forger.base
    };
    forger.send(&stale, b"whole, twice");
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.byte_len), (2, 12));
    qb.to_error();
    let flushed = b.next();
    assert_eq!((flushed.wr_id, flushed.status), (1, WcStatus::WrFlushErr));
    b.none();
    assert_eq!(UD_MTU, 4096);
}
