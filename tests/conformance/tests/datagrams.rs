//! Datagram queue pairs: docs/spec/dgram.md.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use weft_conformance::waits::{PATIENCE, until};
use weft_verbs::cm::Broker;
use weft_verbs::ext::CqExt;
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, PostReason, QpState, RecvWr, SendOp, SendWr, UD_GROUP, UD_MTU,
    UdDest, UdInit, UdPort, UdQp, Wc, WcOpcode, WcStatus,
};
use weft_wire::dgram::{Grh, Header, seal};

const QKEY: u32 = 0x1111_1111;

/// One process of two.
struct Side {
    device: Device,
    pd: Pd,
    cq: Cq,
    port: UdPort,
    mr: Mr,
}

impl Side {
    fn new() -> Side {
        let device = Device::open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        Side {
            cq: device.create_cq(1024, None).expect("a queue"),
            port: device
                .bind_ud("127.0.0.1:0".parse().expect("an address"))
                .expect("a port"),
            mr: pd.alloc_mr(16384, Access::LOCAL_WRITE).expect("a region"),
            pd,
            device,
        }
    }

    fn init(&self) -> UdInit {
        UdInit::new(&self.port, QKEY, &self.cq, &self.cq)
    }

    fn qp(&self) -> UdQp {
        self.pd.create_ud_qp(&self.init()).expect("a queue pair")
    }

    fn next(&self) -> Wc {
        let mut wc = [Wc::default()];
        let n = self.cq.wait(&mut wc, Some(PATIENCE)).expect("no overrun");
        assert_eq!(n, 1, "nothing within the time");
        wc[0]
    }

    /// The next completion, by polling alone.
    fn poll(&self) -> Wc {
        let start = Instant::now();
        let mut wc = [Wc::default()];
        while self.cq.poll(&mut wc).expect("no overrun") == 0 {
            assert!(start.elapsed() < PATIENCE, "nothing within the time");
        }
        wc[0]
    }

    fn recv(&self, qp: &UdQp, id: u64, off: usize, len: usize) {
        let wr = RecvWr::new(id).sge(self.mr.sge(off, len));
        qp.post_recv(&[wr]).expect("a receive");
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

#[test]
fn a_receive_says_where_the_message_came_from() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    b.recv(&qb, 1, 0, 64);
    b.recv(&qb, 2, 64, 64);
    a.mr.write(0, b"from memory").expect("in bounds");
    let wr = SendWr::send(7).sge(a.mr.sge(0, 4)).sge(a.mr.sge(4, 7));
    qa.post_send(&wr.signaled(), &to(&qb)).expect("posted");
    let sent = a.poll();
    assert_eq!(
        (sent.wr_id, sent.status, sent.byte_len),
        (7, WcStatus::Success, 11)
    );
    assert_eq!(sent.opcode, WcOpcode::Send);
    let wc = b.poll();
    assert_eq!(
        (wc.wr_id, wc.status, wc.byte_len),
        (1, WcStatus::Success, 11)
    );
    assert_eq!(
        (wc.opcode, wc.qp_num, wc.imm),
        (WcOpcode::Recv, qb.num(), None)
    );
    assert_eq!(b.mr.to_vec(0, 11).expect("in bounds"), b"from memory");
    let source = wc.source.expect("a source");
    assert_eq!(source.qp_num, qa.num());
    assert_eq!(source.addr, qa.port().local_addr());
    // The answer goes to the sender of the message; asleep this time.
    a.recv(&qa, 9, 0, 64);
    let back = UdDest {
        addr: source.addr,
        qp_num: source.qp_num,
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    };
    let wr = SendWr::new(8, SendOp::SendImm { imm: 0x1234 }).inline(b"back");
    qb.post_send(&wr, &back).expect("posted");
    let wc = a.next();
    assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (9, 4, Some(0x1234)));
    assert_eq!((qa.counters().sent, qa.counters().received), (1, 1));
    assert_eq!(qb.outstanding(), 0);
}

#[test]
fn the_engine_receives_for_a_channel() {
    let (a, b) = (Side::new(), Side::new());
    let channel = b.device.create_comp_channel().expect("a channel");
    let cq = b.device.create_cq(16, Some(&channel)).expect("a queue");
    let init = UdInit {
        recv_cq: cq.clone(),
        ..b.init()
    };
    let (qa, qb) = (a.qp(), b.pd.create_ud_qp(&init).expect("a queue pair"));
    for (solicited, round) in [(false, 0), (true, 1), (false, 2)] {
        b.recv(&qb, round, 0, 64);
        cq.req_notify(solicited);
        assert_eq!(cq.poll(&mut [Wc::default()]), Ok(0));
        let wr = SendWr::send(1).inline(b"wake up");
        if solicited {
            qa.post_send(&wr, &to(&qb)).expect("posted");
            b.recv(&qb, round, 0, 64);
            assert_eq!(channel.get_event(Some(Duration::from_millis(1))), None);
            qa.post_send(&wr.solicited(), &to(&qb)).expect("posted");
        } else {
            qa.post_send(&wr, &to(&qb)).expect("posted");
        }
        assert_eq!(channel.get_event(Some(PATIENCE)), Some(cq.num()));
        let mut wc = [Wc::default(); 2];
        let n = cq.poll(&mut wc).expect("no overrun");
        assert_eq!(n, 1 + usize::from(solicited));
        assert_eq!(wc[0].wr_id, round);
    }
}

/// A layer above handles completions on the engine's thread: it posts more, and ends the queue pair.
#[test]
fn a_hook_may_use_its_queue_pair() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), Arc::new(OnceLock::<UdQp>::new()));
    let (cq, dest, this) = (b.cq.clone(), to(&qa), Arc::clone(&qb));
    let (tell, told) = mpsc::channel();
    b.cq.set_hook(move || {
        let Some(qp) = this.get() else { return };
        let post = |id| {
            let answer = SendWr::send(id).inline(b"answer").signaled();
            qp.post_send(&answer, &dest).expect("posted");
        };
        let mut wc = [Wc::default()];
        while cq.take(&mut wc) == Ok(1) {
            let Wc { wr_id, status, .. } = wc[0];
            let _ = tell.send((wr_id, status));
            match wr_id {
                1 => post(11),
                11 => post(12),
                2 => qp.to_error(),
                _ => {}
            }
        }
    });
    let qb = qb.get_or_init(|| b.qp());
    for id in 1..=3 {
        b.recv(qb, id, 0, 64);
    }
    let expect = |wanted: &[(u64, WcStatus)]| {
        for wanted in wanted {
            assert_eq!(told.recv_timeout(PATIENCE).as_ref(), Ok(wanted));
        }
    };
    let ask = || {
        let send = SendWr::send(1).inline(b"a question");
        qa.post_send(&send, &to(qb)).expect("posted");
    };
    ask();
    let ok = WcStatus::Success;
    expect(&[(1, ok), (11, ok), (12, ok)]);
    ask();
    expect(&[(2, ok), (3, WcStatus::WrFlushErr)]);
}

#[test]
fn a_routing_header_stands_in_front() {
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        grh: true,
        ..b.init()
    };
    let (qa, qb) = (a.qp(), b.pd.create_ud_qp(&init).expect("a queue pair"));
    for imm in [None, Some(5)] {
        let wr = RecvWr::new(1).sge(b.mr.sge(0, 40)).sge(b.mr.sge(100, 64));
        qb.post_recv(&[wr]).expect("a receive");
        let op = imm.map_or(SendOp::Send, |imm| SendOp::SendImm { imm });
        let wr = SendWr::new(1, op).inline(b"payload");
        qa.post_send(&wr, &to(&qb)).expect("posted");
        let wc = b.poll();
        assert_eq!(
            (wc.status, wc.byte_len, wc.imm),
            (WcStatus::Success, 47, imm)
        );
        let raw = b.mr.to_vec(0, 40).expect("in bounds");
        let grh = Grh::parse(raw.first_chunk().expect("forty bytes")).expect("a header");
        let here = a.port.local_addr().ip();
        assert_eq!((grh.source, grh.dest), (here, here));
        assert_eq!(b.mr.to_vec(100, 7).expect("in bounds"), b"payload");
    }
}

#[test]
fn messages_are_as_long_as_the_mtu_and_no_longer() {
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        max_message: UD_MTU,
        ..a.init()
    };
    let (qa, qb) = (a.pd.create_ud_qp(&init).expect("a queue pair"), b.qp());
    let mtu = UD_MTU as usize;
    let pattern: Vec<u8> = (0..mtu).map(|i| (i * 7 + i / 256) as u8).collect();
    a.mr.write(0, &pattern).expect("in bounds");
    b.recv(&qb, 1, 8192, mtu);
    let wr = SendWr::send(1).sge(a.mr.sge(0, mtu));
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert_eq!(b.poll().byte_len, UD_MTU);
    assert!(b.mr.to_vec(8192, mtu).expect("in bounds") == pattern);

    let refused = |wr: SendWr| qa.post_send(&wr, &to(&qb)).map_err(|e| e.reason);
    let longer = SendWr::send(1).sge(a.mr.sge(0, mtu + 1));
    assert_eq!(refused(longer), Err(PostReason::Length));
    let remote = b.mr.remote(0);
    assert_eq!(refused(SendWr::write(1, remote)), Err(PostReason::Opcode));
    let inline = SendWr::send(1).inline(&pattern);
    assert!(matches!(
        refused(inline),
        Err(PostReason::InlineTooLong { .. })
    ));
}

#[test]
fn what_is_wrong_is_dropped_and_the_queue_pair_goes_on() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    let send = |dest: &UdDest| {
        let wr = SendWr::send(1).inline(b"x");
        qa.post_send(&wr, dest).expect("posted");
    };
    // No receive, a wrong key, no queue pair of that number.
    send(&to(&qb));
    send(&UdDest { qkey: 1, ..to(&qb) });
    send(&UdDest {
        qp_num: qb.num() + 1,
        ..to(&qb)
    });
    // Damaged, cut, too long, and empty.
    let header = Header {
        dst_qp: qb.num(),
        src_qp: 1,
        qkey: QKEY,
        msn: 1,
        solicited: false,
        imm: None,
    };
    let mut datagram = Vec::new();
    header.emit(&mut datagram);
    datagram.extend_from_slice(b"forged");
    seal(&mut datagram);
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let hostile = |bytes: &[u8]| {
        let n = stranger.send_to(bytes, b.port.local_addr());
        assert_eq!(n.expect("sent"), bytes.len());
    };
    let mut damaged = datagram.clone();
    damaged[33] ^= 1;
    hostile(&damaged);
    hostile(&datagram[..datagram.len() - 1]);
    hostile(&vec![0x57; 9000]);
    hostile(&[]);
    until("the counter malformed", || b.port.counters().malformed == 4);
    until("the counter unknown", || b.port.counters().unknown == 1);
    assert_eq!(qb.counters().no_recv, 1);
    assert_eq!(qb.counters().wrong_qkey, 1);

    // A receive that is too short stays for a message that fits; one with memory that is not ours is used up.
    b.recv(&qb, 1, 0, 5);
    b.recv(&qb, 2, 1 << 20, 64);
    b.recv(&qb, 3, 0, 64);
    hostile(&datagram);
    until("the counter too_long", || qb.counters().too_long == 1);
    let mut shorter = Vec::new();
    header.emit(&mut shorter);
    shorter.extend_from_slice(b"fits.");
    seal(&mut shorter);
    for (bytes, id, status) in [
        (&shorter, 1, WcStatus::Success),
        (&datagram, 2, WcStatus::LocProtErr),
        (&datagram, 3, WcStatus::Success),
    ] {
        hostile(bytes);
        let wc = b.poll();
        assert_eq!((wc.wr_id, wc.status), (id, status));
    }
    assert_eq!(b.mr.to_vec(0, 6).expect("in bounds"), b"forged");
    // A send from memory that is not ours.
    let wr = SendWr::send(4).sge(a.mr.sge(1 << 20, 8));
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert_eq!(a.poll().status, WcStatus::LocProtErr);
    // To an address without a receiver: lost, and complete.
    let nowhere = UdDest {
        addr: "127.0.0.1:9".parse().expect("an address"),
        ..to(&qb)
    };
    let wr = SendWr::send(5).inline(b"x").signaled();
    qa.post_send(&wr, &nowhere).expect("posted");
    assert_eq!(a.poll().status, WcStatus::Success);
    assert_eq!((qa.state(), qb.state()), (QpState::Rts, QpState::Rts));
}

#[test]
fn a_port_that_is_down_loses_what_comes_and_goes() {
    static DOWN: AtomicBool = AtomicBool::new(true);
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        down: Some(&DOWN),
        ..b.init()
    };
    let (qa, other) = (a.qp(), b.qp());
    let qb = b.pd.create_ud_qp(&init).expect("a queue pair");
    b.recv(&qb, 1, 0, 64);
    b.recv(&other, 2, 64, 64);
    a.recv(&qa, 3, 0, 64);
    let wr = SendWr::send(1).inline(b"x");
    // One after the other, to and from the same port.
    for to in [to(&qb), to(&other)] {
        qa.post_send(&wr, &to).expect("posted");
    }
    assert_eq!(b.poll().wr_id, 2);
    qb.post_send(&wr.clone().signaled(), &to(&qa))
        .expect("posted");
    assert_eq!(b.poll().opcode, WcOpcode::Send);
    DOWN.store(false, Ordering::SeqCst);
    qb.post_send(&SendWr::send(2).inline(b"yz"), &to(&qa))
        .expect("posted");
    assert_eq!(a.poll().byte_len, 2, "the second one");
    qa.post_send(&wr, &to(&qb)).expect("posted");
    assert_eq!(b.poll().wr_id, 1);
}

#[test]
fn keys_may_come_late_and_may_be_ones_own() {
    let (a, b) = (Side::new(), Side::new());
    let init = UdInit {
        qkey: None,
        ..b.init()
    };
    let (qa, qb) = (a.qp(), b.pd.create_ud_qp(&init).expect("a queue pair"));
    b.recv(&qb, 1, 0, 64);
    let own = UdDest {
        qkey: 0x8000_0000,
        ..to(&qb)
    };
    let wr = SendWr::send(1).inline(b"x");
    qa.post_send(&wr, &own).expect("posted");
    until("the counter wrong_qkey", || qb.counters().wrong_qkey == 1);
    qb.set_qkey(QKEY);
    qa.post_send(&wr, &own).expect("posted");
    assert_eq!(b.poll().status, WcStatus::Success);
}

#[test]
fn queue_pairs_share_receives_and_ports() {
    let (a, b) = (Side::new(), Side::new());
    let srq = b.pd.create_srq(8, 1).expect("a shared queue");
    let init = UdInit {
        srq: Some(srq.clone()),
        ..b.init()
    };
    let pair = [(); 2].map(|()| b.pd.create_ud_qp(&init).expect("a queue pair"));
    let wrs = [1, 2].map(|id| RecvWr::new(id).sge(b.mr.sge(0, 64)));
    srq.post_recv(&wrs).expect("receives");
    assert_eq!(
        pair[0].post_recv(&wrs[..1]).map_err(|e| e.reason),
        Err(PostReason::UsesSrq)
    );
    let qa = a.qp();
    let mut seen = HashSet::new();
    for (qp, id) in pair.iter().zip([1, 2]) {
        let wr = SendWr::send(1).inline(b"x");
        qa.post_send(&wr, &to(qp)).expect("posted");
        let wc = b.poll();
        assert_eq!((wc.wr_id, wc.qp_num), (id, qp.num()));
        seen.insert(wc.qp_num);
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn an_error_flushes_and_a_drop_is_silent() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    b.recv(&qb, 1, 0, 64);
    qb.to_error();
    let flushed = b.poll();
    assert_eq!((flushed.wr_id, flushed.status), (1, WcStatus::WrFlushErr));
    b.recv(&qb, 2, 0, 64);
    assert_eq!(b.poll().wr_id, 2);
    qb.post_send(&SendWr::send(3), &to(&qa)).expect("posted");
    let flushed = b.poll();
    assert_eq!((flushed.wr_id, flushed.status), (3, WcStatus::WrFlushErr));
    let num = qb.num();
    drop(qb);
    let init = UdInit {
        num: Some(num),
        ..b.init()
    };
    let again = b.pd.create_ud_qp(&init).expect("the number is free");
    b.recv(&again, 4, 0, 64);
    drop(again);
    let third = b.pd.create_ud_qp(&init).expect("the number is free");
    b.recv(&third, 5, 0, 64);
    let wr = SendWr::send(1).inline(b"x");
    qa.post_send(&wr, &to(&third)).expect("posted");
    assert_eq!(b.poll().wr_id, 5, "nothing of the queue pair before");
}

/// A slow receiver loses messages. Those that arrive are whole, in order on one host, and each fills one receive.
#[test]
fn a_flood_is_survived() {
    const COUNT: u64 = 20_000;
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    for id in 0..64 {
        b.recv(&qb, id, id as usize * 256, 256);
    }
    let dest = to(&qb);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..COUNT {
                let body = [n.to_be_bytes(); 32].concat();
                let wr = SendWr::send(n).inline(&body).signaled();
                while qa.post_send(&wr, &dest).is_err() {
                    std::thread::yield_now();
                }
                assert_eq!(a.poll().status, WcStatus::Success);
            }
            // Receives are posted again for the end.
            loop {
                let wr = SendWr::send(0).inline(b"the end").signaled();
                qa.post_send(&wr, &dest).expect("posted");
                assert_eq!(a.poll().status, WcStatus::Success);
                let sent = COUNT + 1;
                if qb.state() == QpState::Error || qa.counters().sent > 4 * sent {
                    break;
                }
                std::thread::yield_now();
            }
        });
        // Not in order: messages through shared memory pass those that the kernel still has.
        let mut seen = std::collections::HashSet::new();
        let mut came = 0;
        loop {
            let wc = b.poll();
            assert_eq!(wc.status, WcStatus::Success);
            let off = wc.wr_id as usize * 256;
            let got = b.mr.to_vec(off, wc.byte_len as usize).expect("in bounds");
            b.recv(&qb, wc.wr_id, off, 256);
            if got == b"the end" {
                break;
            }
            let n = u64::from_be_bytes(*got.first_chunk().expect("eight bytes"));
            assert_eq!(got, [n.to_be_bytes(); 32].concat());
            assert!(seen.insert(n), "{n} came twice");
            came += 1;
        }
        qb.to_error();
        assert!(came > 0);
    });
}

#[test]
fn numbers_lead_to_ports() {
    let device = Device::open().expect("a device");
    let broker = Broker::new(&device);
    let stream = broker.reserve().expect("a number");
    let (first, port) = broker.reserve_datagram().expect("a number");
    let (second, same) = broker.reserve_datagram().expect("a number");
    assert_eq!(first.get() >> 8, u32::from(port.local_addr().port()));
    assert_eq!(port.local_addr(), same.local_addr());
    let distinct = HashSet::from([stream.get(), first.get(), second.get()]);
    assert_eq!(distinct.len(), 3);

    // A port in use is not taken.
    let other = Broker::new(&device);
    let number = other.reserve().expect("a number");
    let squatted = SocketAddr::from(([0, 0, 0, 0], (number.get() >> 8) as u16));
    let _squatter = UdpSocket::bind(squatted).expect("free for UDP");
    let (elsewhere, port) = other.reserve_datagram().expect("a number");
    assert_ne!(elsewhere.get() >> 8, number.get() >> 8);
    assert_eq!(elsewhere.get() >> 8, u32::from(port.local_addr().port()));
}

/// The loopback interface has a broadcast address.
#[test]
fn a_broadcast_is_heard_by_all_that_are_attached() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let port = 20_000 + (u16::from_be_bytes([high, low]) % 10_000);
    let everyone = SocketAddr::from(([127, 255, 255, 255], port));
    let name = everyone.to_string();
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb, qc) = (a.qp(), b.qp(), b.qp());
    for qp in [&qa, &qb] {
        qp.attach(everyone, &[]).expect("attached");
    }
    a.recv(&qa, 1, 0, 64);
    b.recv(&qb, 2, 0, 64);
    b.recv(&qc, 3, 64, 64);
    a.mr.write(128, b"to all").expect("in bounds");
    let wr = SendWr::send(7).sge(a.mr.sge(128, 6));
    qa.post_send(&wr, &to_group(&name, 5)).expect("posted");
    qa.post_send(&wr, &to_group(&name, QKEY)).expect("posted");
    assert_eq!(a.next().wr_id, 1, "the sender hears it too");
    assert_eq!(b.next().wr_id, 2);
    assert_eq!(qb.counters().wrong_qkey, 1);
    let mut got = [0; 6];
    b.mr.read(0, &mut got).expect("in bounds");
    assert_eq!(&got, b"to all");
    // Many in a row: nothing waits for a report of the receivers, and none goes to a ring.
    for number in 0..100 {
        a.recv(&qa, number, 0, 64);
        b.recv(&qb, number, 0, 64);
        qa.post_send(&wr, &to_group(&name, QKEY)).expect("posted");
        assert_eq!((a.next().wr_id, b.next().wr_id), (number, number));
    }
    assert!(qb.detach(everyone) && !qb.detach(everyone));
    assert_eq!(qc.counters().received, 0);
}

/// The first interface of every network namespace.
const LOOPBACK: u32 = 1;

fn to_group(group: &str, qkey: u32) -> UdDest {
    UdDest {
        addr: group.parse().unwrap(),
        qp_num: UD_GROUP,
        qkey,
        from: Some([127, 0, 0, 1].into()),
        traffic_class: 0,
    }
}

#[test]
fn a_group_is_heard_by_all_that_are_attached() {
    // Other runs of this test on the host have another group.
    let [.., high, low] = std::process::id().to_be_bytes();
    let group = SocketAddr::from(([239, 82, high, low], 22273));
    let name = group.to_string();
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb, qc) = (a.qp(), b.qp(), b.qp());
    for qp in [&qa, &qb, &qc] {
        qp.attach(group, &[LOOPBACK]).expect("attached");
        qp.attach(group, &[LOOPBACK]).expect("still attached");
    }
    assert!(
        qa.attach("127.0.0.1:22273".parse().unwrap(), &[LOOPBACK])
            .is_err()
    );
    assert!(
        qa.attach("239.87.2.2:22273".parse().unwrap(), &[77_777])
            .is_err()
    );
    a.recv(&qa, 1, 0, 64);
    b.recv(&qb, 2, 0, 64);
    b.recv(&qc, 3, 64, 64);
    a.mr.write(128, b"to all").expect("in bounds");
    let wr = SendWr::send(7).sge(a.mr.sge(128, 6));
    // Neither messages with another key, nor messages that name a single queue pair.
    qa.post_send(&wr, &to_group(&name, 5)).expect("posted");
    let mut one = to_group(&name, QKEY);
    one.qp_num = qb.num();
    qa.post_send(&wr, &one).expect("posted");
    // Nor datagrams of another protocol.
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let _ = stranger.send_to(b"junk", group);
    qa.post_send(&wr, &to_group(&name, QKEY)).expect("posted");
    assert_eq!(a.next().wr_id, 1, "the sender hears it too");
    let heard: HashSet<u64> = [b.poll(), b.next()].map(|wc| wc.wr_id).into();
    assert_eq!(heard, HashSet::from([2, 3]));
    assert_eq!(qb.counters().received, 1);
    assert_eq!(qb.counters().wrong_qkey, 1);
    let mut got = [0; 6];
    b.mr.read(64, &mut got).expect("in bounds");
    assert_eq!(&got, b"to all");
    // A member that has left receives nothing, and the others still do.
    assert!(qb.detach(group) && !qb.detach(group));
    b.recv(&qb, 4, 0, 64);
    b.recv(&qc, 5, 0, 64);
    a.recv(&qa, 6, 0, 64);
    qa.post_send(&wr, &to_group(&name, QKEY)).expect("posted");
    assert_eq!((a.next().wr_id, b.next().wr_id), (6, 5));
    drop(qc);
    a.recv(&qa, 8, 0, 64);
    qa.post_send(&wr, &to_group(&name, QKEY)).expect("posted");
    assert_eq!(a.next().wr_id, 8);
    assert_eq!(b.cq.poll(&mut [Wc::default()]).expect("no overrun"), 0);
}
