//! Datagram queue pairs in the reliable mode: docs/spec/dgram.md, "Reliable mode".

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_verbs::{
    Access, Cq, Device, Mr, Pd, PostReason, QpState, RecvWr, RemoteAddr, SendOp, SendWr, UdDest,
    UdErrorKind, UdFault, UdInit, UdPort, UdQp, UdReliable, Wc, WcOpcode, WcStatus,
};

const LONG: Duration = Duration::from_mins(1);
const QKEY: u32 = 0x2222_2222;
const ROOM: usize = 1 << 20;

/// One process of several.
struct Side {
    _device: Device,
    pd: Pd,
    cq: Cq,
    port: UdPort,
    mr: Mr,
}

impl Side {
    fn new() -> Side {
        let device = Device::open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Side {
            cq: device.create_cq(4096, None).expect("a queue"),
            port: device
                .bind_ud("127.0.0.1:0".parse().expect("an address"))
                .expect("a port"),
            mr: pd.alloc_mr(ROOM, access).expect("a region"),
            pd,
            _device: device,
        }
    }

    fn init(&self) -> UdInit {
        UdInit {
            reliable: Some(UdReliable {
                give_up: Duration::from_secs(20),
                not_ready: None,
            }),
            segment: 1400,
            max_send_wr: 512,
            max_recv_wr: 512,
            ..UdInit::new(&self.port, QKEY, &self.cq, &self.cq)
        }
    }

    fn qp(&self) -> UdQp {
        self.make(&self.init())
    }

    fn make(&self, init: &UdInit) -> UdQp {
        self.pd.create_ud_qp(init).expect("a queue pair")
    }

    fn next(&self) -> Wc {
        let mut wc = [Wc::default()];
        let n = self.cq.wait(&mut wc, Some(LONG)).expect("no overrun");
        assert_eq!(n, 1, "nothing within the time");
        wc[0]
    }

    fn quiet(&self, time: Duration) {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.wait(&mut wc, Some(time)), Ok(0), "{wc:?}");
    }

    fn recv(&self, qp: &UdQp, id: u64, off: usize, len: usize) {
        let wr = RecvWr::new(id).sge(self.mr.sge(off, len));
        qp.post_recv(&[wr]).expect("a receive");
    }
}

fn to(qp: &UdQp) -> UdDest {
    at(qp, qp.port().local_addr())
}

fn at(qp: &UdQp, addr: SocketAddr) -> UdDest {
    UdDest {
        addr,
        qp_num: qp.num(),
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    }
}

/// A network between two ports that loses, duplicates and reorders.
struct Network {
    addr: SocketAddr,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Network {
    /// `loss`: of every hundred datagrams.
    fn new(a: SocketAddr, b: SocketAddr, loss: u64) -> Network {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let addr = socket.local_addr().expect("an address");
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let wait = Duration::from_millis(2);
        socket.set_read_timeout(Some(wait)).expect("a time");
        let thread = std::thread::spawn(move || {
            let mut seed = 0x1234_5678_9abc_def1_u64;
            let mut below = |n: u64| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed % n
            };
            let (mut lost, mut buffer) = (0, vec![0; 1 << 16]);
            let mut late: Vec<(Vec<u8>, SocketAddr)> = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    let other = if from == a { b } else { a };
                    if below(100) < loss {
                        lost += 1;
                        continue;
                    }
                    if below(20) == 0 {
                        late.push((buffer[..len].to_vec(), other));
                        continue;
                    }
                    for _ in 0..=u64::from(below(50) == 0) {
                        let _ = socket.send_to(&buffer[..len], other);
                    }
                    if late.len() < 4 {
                        continue;
                    }
                }
                while let Some((datagram, other)) = late.pop() {
                    let _ = socket.send_to(&datagram, other);
                }
            }
            lost
        });
        Network {
            addr,
            end,
            thread: Some(thread),
        }
    }

    fn lost(mut self) -> u64 {
        self.end.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("running");
        thread.join().expect("no panic")
    }
}

fn len_of(n: usize) -> usize {
    match n % 5 {
        0 => 0,
        1 => 20_000 + n,
        _ => 1 + n % 1400,
    }
}

fn byte_of(n: usize, i: usize) -> u8 {
    (n * 13 + i) as u8
}

#[test]
fn every_message_comes_once_and_in_order_over_a_bad_network() {
    const COUNT: usize = 400;
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    let network = Network::new(a.port.local_addr(), b.port.local_addr(), 5);
    let dest = at(&qb, network.addr);
    let receiver = std::thread::spawn(move || {
        let slot = 32 << 10;
        for n in 0..COUNT {
            if n % 8 == 0 {
                // Now and then there is no receive for a while.
                if n % 64 == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                for i in 0..8 {
                    b.recv(&qb, (n + i) as u64, i * slot, slot);
                }
            }
            let wc = b.next();
            assert_eq!((wc.wr_id, wc.status), (n as u64, WcStatus::Success));
            assert_eq!(wc.byte_len as usize, len_of(n));
            assert_eq!(wc.imm, (n % 7 == 0).then_some(n as u64));
            let bytes = b.mr.to_vec(n % 8 * slot, len_of(n)).expect("in bounds");
            let as_sent = |(i, byte): (usize, &u8)| *byte == byte_of(n, i);
            assert!(bytes.iter().enumerate().all(as_sent), "message {n}");
        }
        (b, qb)
    });
    let slots = ROOM / (32 << 10);
    let mut done = 0;
    for n in 0..COUNT {
        while n - done >= slots {
            let wc = a.next();
            assert_eq!((wc.wr_id, wc.status), (done as u64, WcStatus::Success));
            done += 1;
        }
        let bytes: Vec<u8> = (0..len_of(n)).map(|i| byte_of(n, i)).collect();
        let off = n % slots * (32 << 10);
        a.mr.write(off, &bytes).expect("in bounds");
        let op = if n % 7 == 0 {
            SendOp::SendImm { imm: n as u64 }
        } else {
            SendOp::Send
        };
        let wr = SendWr::new(n as u64, op).sge(a.mr.sge(off, bytes.len()));
        qa.post_send(&wr.signaled(), &dest).expect("posted");
    }
    while done < COUNT {
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (done as u64, WcStatus::Success));
        done += 1;
    }
    let (_b, qb) = receiver.join().expect("no panic");
    let lost = network.lost();
    assert!(lost > 10, "{lost}");
    assert!(qa.counters().resent >= 10, "{:?}", qa.counters());
    assert_eq!(qb.counters().received, COUNT as u64);
    assert_eq!((qa.outstanding(), qa.take_error()), (0, None));
}

#[test]
fn a_receiver_without_receives_is_waited_for() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    for n in 0..50 {
        let wr = SendWr::send(n).inline(&[n as u8; 100]).signaled();
        qa.post_send(&wr, &to(&qb)).expect("posted");
    }
    a.quiet(Duration::from_millis(300));
    assert_eq!(qb.counters().no_recv, 0, "nothing is lost");
    let sent = qa.counters().sent;
    assert!(sent < 500, "it is not sent over and over: {sent}");
    for n in 0..50 {
        b.recv(&qb, n, n as usize * 100, 100);
    }
    for n in 0..50 {
        let wc = b.next();
        assert_eq!((wc.wr_id, wc.byte_len), (n, 100));
        let bytes = b.mr.to_vec(n as usize * 100, 100).expect("in bounds");
        assert_eq!(bytes, [n as u8; 100]);
        assert_eq!(a.next().wr_id, n);
    }
    assert_eq!(qa.pair_state(&to(&qb)), QpState::Rts);
}

#[test]
fn receives_of_a_shared_queue_are_waited_for_too() {
    let (a, b) = (Side::new(), Side::new());
    let srq = b.pd.create_srq(16, 1).expect("a shared queue");
    let init = UdInit {
        srq: Some(srq.clone()),
        ..b.init()
    };
    let (qa, qb) = (a.qp(), b.make(&init));
    let wr = SendWr::send(1).inline(b"patience").signaled();
    qa.post_send(&wr, &to(&qb)).expect("posted");
    a.quiet(Duration::from_millis(50));
    let recv = RecvWr::new(9).sge(b.mr.sge(0, 64));
    srq.post_recv(&[recv]).expect("posted");
    assert_eq!((b.next().wr_id, a.next().wr_id), (9, 1));
}

#[test]
fn a_peer_that_is_gone_ends_its_pair_and_no_other() {
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        reliable: Some(UdReliable {
            give_up: Duration::from_millis(300),
            not_ready: None,
        }),
        ..a.init()
    };
    let (qa, qb) = (a.make(&init), b.qp());
    // A peer that never answers.
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let gone = at(&qb, silent.local_addr().expect("an address"));
    let send = |id: u64, dest: &UdDest| {
        let wr = SendWr::send(id).inline(b"hello").signaled();
        qa.post_send(&wr, dest).expect("posted");
    };
    send(1, &gone);
    send(2, &gone);
    for id in 10..20 {
        b.recv(&qb, id, 0, 64);
        send(id, &to(&qb));
        assert_eq!(b.next().wr_id, id);
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success));
    }
    let wc = a.next();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::RetryExcErr));
    let wc = a.next();
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::WrFlushErr));
    let error = qa.take_error().expect("an error");
    assert_eq!(error.kind, UdErrorKind::Unreachable);
    assert_eq!((error.peer, error.qp_num), (Some(gone.addr), gone.qp_num));
    assert_eq!(qa.pair_state(&gone), QpState::Error);
    assert_eq!(qa.pair_state(&to(&qb)), QpState::Rts);
    send(3, &gone);
    assert_eq!(a.next().status, WcStatus::WrFlushErr);
    b.recv(&qb, 20, 0, 64);
    send(20, &to(&qb));
    assert_eq!((b.next().wr_id, a.next().wr_id), (20, 20));
    // After a reset it is tried again.
    assert!(qa.reset_pair(&gone) && !qa.reset_pair(&gone));
    assert_eq!(qa.pair_state(&gone), QpState::Rts);
    send(4, &gone);
    assert_eq!(a.next().status, WcStatus::RetryExcErr);
    assert_eq!((qa.state(), qa.outstanding()), (QpState::Rts, 0));
}

#[test]
fn what_cannot_be_delivered_ends_the_pair_until_it_is_reset() {
    let (a, b, c) = (Side::new(), Side::new(), Side::new());
    let (qa, qb, qc) = (a.qp(), b.qp(), c.qp());
    b.recv(&qb, 1, 0, 16);
    for (id, len) in [(1, 10), (2, 17), (3, 10)] {
        let wr = SendWr::send(id).sge(a.mr.sge(0, len)).signaled();
        qa.post_send(&wr, &to(&qb)).expect("posted");
    }
    assert_eq!(b.next().byte_len, 10);
    b.recv(&qb, 2, 0, 16);
    let wanted = [
        (1, WcStatus::Success),
        (2, WcStatus::RemInvReqErr),
        (3, WcStatus::WrFlushErr),
    ];
    for wanted in wanted {
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), wanted);
    }
    let error = qa.take_error().expect("an error");
    let kind = UdErrorKind::Refused(UdFault::TooLong);
    assert_eq!((error.kind, error.msn), (kind, 2));
    // Its receiver is unaffected, for other senders too.
    let qc_to_b = SendWr::send(5).inline(b"from c").signaled();
    qc.post_send(&qc_to_b, &to(&qb)).expect("posted");
    assert_eq!((b.next().wr_id, c.next().status), (2, WcStatus::Success));
    assert!(qa.reset_pair(&to(&qb)));
    b.recv(&qb, 3, 0, 16);
    let wr = SendWr::send(6).inline(b"again").signaled();
    qa.post_send(&wr, &to(&qb)).expect("posted");
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.byte_len), (3, 5));
    assert_eq!(a.next().status, WcStatus::Success);
}

#[test]
fn records_are_reliable_too() {
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        record_depth: 2,
        ..a.init()
    };
    let qa = a.make(&init);
    let qb = b.make(&UdInit {
        port: b.port.clone(),
        send_cq: b.cq.clone(),
        recv_cq: b.cq.clone(),
        ..init
    });
    let bytes: Vec<u8> = (0..50_000).map(|i| byte_of(3, i)).collect();
    a.mr.write(0, &bytes).expect("in bounds");
    let write = |id: u64, addr: u64, rkey: u32| {
        let op = SendOp::WriteImm {
            remote: RemoteAddr { addr, rkey },
            imm: id,
        };
        let wr = SendWr::new(id, op).sge(a.mr.sge(0, bytes.len()));
        qa.post_send(&wr.signaled(), &to(&qb)).expect("posted");
    };
    let remote = b.mr.remote(0);
    // More than may wait: the others are written when the waiting ones are taken.
    for id in 1..=5 {
        write(id, remote.addr + 60_000 * id, remote.rkey);
    }
    for id in 1..=5 {
        let wc = b.next();
        assert_eq!(wc.opcode, WcOpcode::WriteRecord);
        let record = qb.take_record(wc.wr_id).expect("a record");
        assert!(record.is_complete());
        assert_eq!(
            (record.imm, record.addr),
            (Some(id), remote.addr + 60_000 * id)
        );
        let there = b.mr.to_vec(60_000 * id as usize, bytes.len());
        assert_eq!(there.expect("in bounds"), bytes);
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success));
    }
    assert_eq!(qb.counters().no_record, 0);
    write(6, remote.addr, remote.rkey ^ 0x5555);
    assert_eq!(a.next().status, WcStatus::RemAccessErr);
    assert_eq!(qa.pair_state(&to(&qb)), QpState::Error);
    let error = qb.take_error().expect("an error");
    assert_eq!((error.kind, error.msn), (UdErrorKind::NoAccess, 6));
}

#[test]
fn both_ends_have_to_be_reliable() {
    let (a, b) = (Side::new(), Side::new());
    let qa = a.qp();
    let qb = b.make(&UdInit {
        reliable: None,
        ..b.init()
    });
    b.recv(&qb, 1, 0, 64);
    let wr = SendWr::send(1).inline(b"reliable").signaled();
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert_eq!(a.next().status, WcStatus::RemOpErr);
    // In the other direction it is dropped.
    let (c, back) = (Side::new(), to(&qa));
    a.recv(&qa, 1, 0, 64);
    let qc = c.make(&UdInit {
        reliable: None,
        ..c.init()
    });
    for len in [8, 4000] {
        let wr = SendWr::send(1).sge(c.mr.sge(0, len)).signaled();
        qc.post_send(&wr, &back).expect("posted");
        assert_eq!(c.next().status, WcStatus::Success);
    }
    let start = Instant::now();
    while qa.counters().dropped < 4 {
        assert!(start.elapsed() < LONG, "{:?}", qa.counters());
        std::thread::yield_now();
    }
    assert_eq!(qa.counters().received, 0);
    let group = UdDest {
        addr: "239.1.1.1:9".parse().expect("an address"),
        ..back
    };
    let refused = qa.post_send(&wr, &group).expect_err("a group");
    assert_eq!(refused.reason, PostReason::Group);
}

#[test]
fn what_is_outstanding_is_flushed() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    for id in 0..3 {
        let wr = SendWr::send(id).sge(a.mr.sge(0, 30_000)).signaled();
        qa.post_send(&wr, &to(&qb)).expect("posted");
    }
    // The first message has begun to fill a receive, and cannot continue.
    b.recv(&qb, 7, 0, 30_000);
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.byte_len), (7, 30_000));
    assert_eq!(a.next().status, WcStatus::Success);
    qa.to_error();
    for id in 1..3 {
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::WrFlushErr));
    }
    b.recv(&qb, 8, 0, 64);
    qb.to_error();
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.status), (8, WcStatus::WrFlushErr));
    assert_eq!(qa.outstanding(), 0);
}
