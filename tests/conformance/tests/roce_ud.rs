//! Datagram queue pairs of RoCE, multicast groups, and the part of the connection manager that finds such queue pairs; and strangers that break the
//! rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use weft_sys::udp::UdpSocket;
use weft_sys::{Interest, poll_fds};
use weft_verbs::cm::{Found, LookupError};
use weft_verbs::{
    Access, Cq, Device, Grh, Mr, Pd, PostReason, QpState, RecvWr, RemoteAddr, RoceLookupRequest,
    RocePort, RoceServing, RoceUdCounters, RoceUdInit, RoceUdQp, SendWr, UD_GROUP, UdDest, Wc,
    WcOpcode, WcStatus,
};
use weft_wire::roce::cm::{self, IpHeader, Mad, Message, PortSpace, SidrRep, SidrReq, service_id};
use weft_wire::roce::{Deth, Header, ICRC_LEN, Icrc, Op, Opcode, PORT, Route};
use weft_wire::sidr::status;

const PATIENCE: Duration = Duration::from_secs(30);
const QKEY: u32 = 0x0123_4567;
const GRH: usize = Grh::LEN;
/// The first interface of every network namespace.
const LOOPBACK: u32 = 1;

/// A loopback address that no other test of this process uses, nor another process that runs these tests now.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let last = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 128 | high, low, last).into()
}

struct Side {
    device: Device,
    pd: Pd,
    cq: Cq,
    port: RocePort,
    mr: Mr,
}

/// The address of IPv6 is everyone's, and a program that does not share it may have it: waits for it.
pub(crate) fn bind(device: &Device, ip: IpAddr) -> RocePort {
    let begun = Instant::now();
    loop {
        match device.bind_roce(ip, 0) {
            Err(error) if ip.is_ipv6() && error.kind() == std::io::ErrorKind::AddrInUse => {
                assert!(begun.elapsed() < PATIENCE, "{error}");
                std::thread::yield_now();
            }
            port => return port.unwrap(),
        }
    }
}

impl Side {
    fn at(ip: IpAddr) -> Side {
        let device = Device::open().unwrap();
        let pd = device.alloc_pd().unwrap();
        Side {
            cq: device.create_cq(1024, None).unwrap(),
            port: bind(&device, ip),
            mr: pd.alloc_mr(1 << 20, Access::all()).unwrap(),
            pd,
            device,
        }
    }

    fn new() -> Side {
        Side::at(address())
    }

    /// One that hears nothing yet.
    fn deaf(&self, change: impl FnOnce(&mut RoceUdInit)) -> RoceUdQp {
        let mut init = RoceUdInit::new(&self.cq, &self.cq);
        init.max_message = 4096;
        change(&mut init);
        self.pd.create_roce_ud_qp(&init).unwrap()
    }

    fn qp_with(&self, change: impl FnOnce(&mut RoceUdInit)) -> RoceUdQp {
        let qp = self.deaf(change);
        qp.set_qkey(QKEY);
        qp.hear_at(&self.port).unwrap();
        qp
    }

    fn qp(&self) -> RoceUdQp {
        self.qp_with(|_| {})
    }

    fn ip(&self) -> IpAddr {
        self.port.local_addr().ip()
    }

    fn to(&self, other: &Side, qp: &RoceUdQp) -> UdDest {
        UdDest {
            addr: other.port.local_addr(),
            qp_num: qp.num(),
            qkey: QKEY,
            from: Some(self.ip()),
            traffic_class: 0,
        }
    }

    fn wait(&self) -> Wc {
        let mut wc = [Wc::default()];
        let got = self.cq.wait(&mut wc, Some(PATIENCE)).unwrap();
        assert_eq!(got, 1, "nothing completes");
        wc[0]
    }

    fn receive(&self, id: u64, offset: usize, len: usize) -> RecvWr {
        RecvWr::new(id).sge(self.mr.sge(offset, len))
    }

    /// The routing header in front of a message.
    fn grh(&self, offset: usize) -> Grh {
        let raw = self.mr.to_vec(offset, GRH).unwrap();
        Grh::parse(raw[..].try_into().unwrap()).expect("a routing header")
    }
}

/// Until the queue pair has counted that.
fn until(qp: &RoceUdQp, side: &Side, counted: impl Fn(&RoceUdCounters) -> bool) {
    let begun = Instant::now();
    while !counted(&qp.counters()) {
        assert!(begun.elapsed() < PATIENCE, "{:?}", qp.counters());
        assert_eq!(side.cq.poll(&mut [Wc::default()]), Ok(0));
        std::thread::yield_now();
    }
}

fn v6() -> IpAddr {
    Ipv6Addr::LOCALHOST.into()
}

#[test]
fn messages_of_all_lengths_arrive_behind_their_routing_header() {
    let (a, b) = (Side::new(), Side::new());
    let (one, other) = (a.ip(), b.ip());
    let (qa, qb) = (a.qp(), b.qp());
    let mut to = a.to(&b, &qb);
    to.traffic_class = 0x68;
    for (n, len) in [0, 1, 2, 3, 4, 5, 255, 1024, 4093, 4096]
        .into_iter()
        .enumerate()
    {
        let sent: Vec<u8> = (0..len).map(|i| (i * 31 + n) as u8).collect();
        a.mr.write(100, &sent).unwrap();
        qb.post_recv(&[b.receive(7, 8, GRH + 4096)]).unwrap();
        let imm = n % 2 == 1;
        let wr = if imm {
            SendWr::send_imm(9, 0x0102_0304)
        } else {
            SendWr::send(9)
        };
        // From two pieces.
        let sges = [
            a.mr.sge(100, len / 3),
            a.mr.sge(100 + len / 3, len - len / 3),
        ];
        qa.post_send(&wr.sges(&sges).signaled(), &to, false)
            .unwrap();
        let done = a.wait().ok().unwrap();
        assert_eq!((done.wr_id, done.opcode), (9, WcOpcode::Send));
        assert_eq!(done.byte_len as usize, len);
        let wc = b.wait().ok().unwrap();
        assert_eq!((wc.wr_id, wc.opcode), (7, WcOpcode::Recv));
        assert_eq!(wc.byte_len as usize, GRH + len);
        assert_eq!(wc.imm, imm.then_some(0x0102_0304));
        let source = wc.source.expect("a source");
        assert_eq!((source.addr.ip(), source.qp_num), (one, qa.num()));
        assert_eq!(b.mr.to_vec(8 + GRH, len).unwrap(), sent);
        let grh = b.grh(8);
        assert_eq!(
            (grh.source, grh.dest, grh.traffic_class),
            (one, other, 0x68)
        );
        // The IPv4 header's length is that of the packet: headers, padding and ICRC.
        let raw = b.mr.to_vec(8 + 20, 4).unwrap();
        let total = usize::from(u16::from_be_bytes([raw[2], raw[3]]));
        let immediate = if imm { 4 } else { 0 };
        assert_eq!(total, 20 + 8 + 20 + immediate + len.next_multiple_of(4) + 4);
    }
    assert_eq!(qb.counters().received, 10);
    assert_eq!(qa.counters().sent, 10);
}

#[test]
fn over_ipv6_too() {
    let side = Side::at(v6());
    let (qa, qb) = (side.qp(), side.qp());
    qb.post_recv(&[side.receive(1, 0, 2000)]).unwrap();
    let to = side.to(&side, &qb);
    qa.post_send(&SendWr::send(2).inline(b"over six"), &to, false)
        .unwrap();
    let wc = side.wait().ok().unwrap();
    assert_eq!((wc.wr_id, wc.byte_len as usize), (1, GRH + 8));
    assert_eq!(side.mr.to_vec(GRH, 8).unwrap(), b"over six");
    let grh = side.grh(0);
    assert_eq!((grh.source, grh.dest), (v6(), v6()));
}

#[test]
fn what_a_datagram_cannot_be_is_refused_when_it_is_posted() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp_with(|init| init.max_message = 1024), b.qp());
    let to = a.to(&b, &qb);
    let reason = |wr: SendWr| qa.post_send(&wr, &to, false).unwrap_err().reason;
    let long = SendWr::send(1).sge(a.mr.sge(0, 1025));
    assert_eq!(reason(long.clone()), PostReason::Length);
    assert_eq!(qa.check_send(&long).unwrap_err().reason, PostReason::Length);
    let remote = RemoteAddr { addr: 0, rkey: 1 };
    assert_eq!(reason(SendWr::write(1, remote)), PostReason::Opcode);
    assert_eq!(reason(SendWr::read(1, remote)), PostReason::Opcode);
    // From an address where nothing of this device is.
    let strange = UdDest {
        from: Some(address()),
        ..to
    };
    let wr = SendWr::send(1).inline(b"x");
    assert_eq!(
        qa.post_send(&wr, &strange, false).unwrap_err().reason,
        PostReason::State
    );
    assert_eq!((qa.outstanding(), qa.counters().sent), (0, 0));
    // Memory that is none of ours fails as the request is carried out, after those before it.
    let mut bad = a.mr.sge(0, 8);
    bad.lkey ^= 0x55;
    qa.post_send(&SendWr::send(2).inline(b"x").signaled(), &to, true)
        .unwrap();
    qa.post_send(&SendWr::send(3).sge(bad), &to, true).unwrap();
    qa.no_more();
    assert_eq!(a.wait().ok().unwrap().wr_id, 2);
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (3, WcStatus::LocProtErr));
    assert_eq!(qa.state(), QpState::Rts);
}

#[test]
fn a_wrong_key_is_dropped_and_counted() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.deaf(|_| {}));
    qb.hear_at(&b.port).unwrap();
    for id in 0..2 {
        qb.post_recv(&[b.receive(id, 0, 1000)]).unwrap();
    }
    let to = a.to(&b, &qb);
    let send = |qkey| {
        let wr = SendWr::send(1).inline(b"hello");
        qa.post_send(&wr, &UdDest { qkey, ..to }, false).unwrap();
    };
    send(QKEY);
    until(&qb, &b, |counters| counters.wrong_key == 1);
    qb.set_qkey(QKEY);
    send(QKEY + 1);
    until(&qb, &b, |counters| counters.wrong_key == 2);
    send(QKEY);
    assert_eq!(b.wait().ok().unwrap().wr_id, 0);
    // The sender's own key.
    send(0x8000_0001);
    assert_eq!(b.wait().ok().unwrap().wr_id, 1);
    qa.set_qkey(7);
    send(0x8000_0001);
    until(&qb, &b, |counters| counters.wrong_key == 3);
    let counters = qb.counters();
    assert_eq!((counters.received, counters.no_recv), (2, 0));
}

#[test]
fn a_message_without_a_receive_that_fits_is_dropped() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    let to = a.to(&b, &qb);
    let send = |len: usize| {
        let wr = SendWr::send(1).sge(a.mr.sge(0, len));
        qa.post_send(&wr, &to, false).unwrap();
    };
    send(8);
    until(&qb, &b, |counters| counters.no_recv == 1);
    // There has to be room for the routing header.
    qb.post_recv(&[b.receive(4, 0, GRH + 7)]).unwrap();
    send(8);
    until(&qb, &b, |counters| counters.too_long == 1);
    send(7);
    let wc = b.wait().ok().unwrap();
    assert_eq!((wc.wr_id, wc.byte_len as usize), (4, GRH + 7));
    // A receive into memory that may not be written is an error of that receive alone.
    let mr = b.pd.alloc_mr(4096, Access::empty()).unwrap();
    qb.post_recv(&[RecvWr::new(5).sge(mr.sge(0, 4096)), b.receive(6, 0, 4096)])
        .unwrap();
    send(8);
    let wc = b.wait();
    assert_eq!((wc.wr_id, wc.status), (5, WcStatus::LocProtErr));
    send(8);
    assert_eq!(b.wait().ok().unwrap().wr_id, 6);
}

#[test]
fn several_queue_pairs_share_receives_and_a_port() {
    let (a, b) = (Side::new(), Side::new());
    let srq = b.pd.create_srq(64, 1).unwrap();
    let other = b.device.create_cq(64, None).unwrap();
    let qa = a.qp();
    let one = b.qp_with(|init| init.srq = Some(srq.clone()));
    let two = b.qp_with(|init| {
        init.srq = Some(srq.clone());
        init.recv_cq = other.clone();
    });
    assert!(one.post_recv(&[b.receive(1, 0, 100)]).is_err());
    for id in 0..8 {
        srq.post_recv(&[b.receive(id, id as usize * 200, 200)])
            .unwrap();
    }
    for round in 0..4 {
        for (qp, cq) in [(&one, &b.cq), (&two, &other)] {
            let wr = SendWr::send(1).inline(&qp.num().to_be_bytes());
            qa.post_send(&wr, &a.to(&b, qp), false).unwrap();
            let mut wc = [Wc::default()];
            assert_eq!(cq.wait(&mut wc, Some(PATIENCE)), Ok(1), "round {round}");
            assert_eq!(wc[0].ok().unwrap().qp_num, qp.num());
            let at = wc[0].wr_id as usize * 200 + GRH;
            assert_eq!(b.mr.to_vec(at, 4).unwrap(), qp.num().to_be_bytes());
        }
    }
    let wr = SendWr::send(1).inline(b"x");
    qa.post_send(&wr, &a.to(&b, &one), false).unwrap();
    until(&one, &b, |counters| counters.no_recv == 1);
    // To itself, by way of the kernel.
    srq.post_recv(&[b.receive(9, 0, 200)]).unwrap();
    one.post_send(&wr, &b.to(&b, &one), false).unwrap();
    assert_eq!(b.wait().ok().unwrap().wr_id, 9);
}

/// Posts that follow each other go to the kernel together; what it cannot take at once waits.
#[test]
fn trains_arrive_whole_and_in_order() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp_with(|init| init.max_send_wr = 64), b.qp());
    let to = a.to(&b, &qb);
    let lens = [1024, 1024, 1024, 100, 1024, 4096, 4096, 3, 0, 0, 7];
    let (mut sent, mut received) = (0_u64, 0);
    for round in 0..40 {
        let count = lens.len() as u64;
        for n in 0..count {
            let at = n as usize * 5000;
            qb.post_recv(&[b.receive(received + n, at, 5000)]).unwrap();
        }
        for (n, len) in lens.into_iter().enumerate() {
            a.mr.write(n * 4096, &[n as u8 ^ round; 4096]).unwrap();
            let wr = SendWr::send(sent).sge(a.mr.sge(n * 4096, len));
            let last = n + 1 == lens.len();
            qa.post_send(&if last { wr.signaled() } else { wr }, &to, !last)
                .unwrap();
            sent += 1;
        }
        let done = a.wait().ok().unwrap();
        assert_eq!((done.wr_id, done.wqes_retired), (sent - 1, count as u32));
        for (n, len) in lens.into_iter().enumerate() {
            let wc = b.wait().ok().unwrap();
            assert_eq!((wc.wr_id, wc.byte_len as usize), (received, GRH + len));
            let bytes = b.mr.to_vec(n * 5000 + GRH, len).unwrap();
            assert!(bytes.iter().all(|byte| *byte == n as u8 ^ round));
            received += 1;
        }
    }
    assert_eq!(qa.outstanding(), 0);
    // The queue is full of what waits for more.
    for _ in 0..64 {
        let wr = SendWr::send(1).inline(b"x");
        qa.post_send(&wr, &to, true).unwrap();
    }
    assert_eq!(qa.outstanding(), 64);
    qa.post_send(&SendWr::send(1).inline(b"x"), &to, true)
        .unwrap();
    assert_eq!(qa.outstanding(), 1);
}

/// A program that polls, and posts one by one: what is put off is sent with the next poll, or when its queue pair goes.
#[test]
fn bursts_of_single_posts_arrive_whole() {
    const BURST: u64 = 20;
    let (a, b) = (Side::new(), Side::new());
    let qb = b.qp();
    for round in 0..100_u64 {
        let qa = a.qp();
        let to = a.to(&b, &qb);
        for id in 0..BURST {
            qb.post_recv(&[b.receive(id, id as usize * 64, 64)])
                .unwrap();
        }
        let mut out = [Wc::default(); 32];
        for n in 0..BURST {
            // The lease of the port begins with the first post, which its queues learn from.
            if n == 1 {
                for _ in 0..50 {
                    a.cq.poll(&mut out).unwrap();
                }
            }
            let bytes = (round * BURST + n).to_be_bytes();
            qa.post_send(&SendWr::send(n).inline(&bytes), &to, false)
                .unwrap();
        }
        match round % 3 {
            0 => drop(qa),
            1 => qa.to_error(),
            _ => {
                while qa.outstanding() > 0 {
                    a.cq.poll(&mut out).unwrap();
                }
            }
        }
        for n in 0..BURST {
            assert_eq!(b.wait().ok().unwrap().wr_id, n);
            let bytes = b.mr.to_vec(n as usize * 64 + GRH, 8).unwrap();
            assert_eq!(bytes, (round * BURST + n).to_be_bytes(), "round {round}");
        }
    }
}

#[test]
fn the_error_state_flushes_and_a_queue_pair_that_has_gone_is_silent() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    let to = a.to(&b, &qb);
    qb.post_recv(&[b.receive(1, 0, 100)]).unwrap();
    qb.to_error();
    let wc = b.wait();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::WrFlushErr));
    qb.post_recv(&[b.receive(2, 0, 100)]).unwrap();
    assert_eq!(b.wait().wr_id, 2);
    qb.post_send(&SendWr::send(3).inline(b"x"), &b.to(&a, &qa), false)
        .unwrap();
    let wc = b.wait();
    assert_eq!((wc.wr_id, wc.status), (3, WcStatus::WrFlushErr));
    let before = b.port.dropped().1;
    let num = qb.num();
    drop(qb);
    qa.post_send(&SendWr::send(4).inline(b"x"), &to, false)
        .unwrap();
    let begun = Instant::now();
    while b.port.dropped().1 == before {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    // Its number is free.
    let again = b.qp_with(|init| init.num = Some(num));
    again.post_recv(&[b.receive(5, 0, 100)]).unwrap();
    qa.post_send(&SendWr::send(6).inline(b"x"), &to, false)
        .unwrap();
    assert_eq!(b.wait().ok().unwrap().wr_id, 5);
}

#[test]
fn nothing_passes_while_the_port_is_down() {
    static DOWN: AtomicBool = AtomicBool::new(false);
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp_with(|init| init.down = Some(&DOWN)), b.qp());
    qb.post_recv(&[b.receive(1, 0, 100)]).unwrap();
    let to = a.to(&b, &qb);
    DOWN.store(true, Ordering::Relaxed);
    let send = |id, bytes: &[u8]| {
        let wr = SendWr::send(id).inline(bytes).signaled();
        qa.post_send(&wr, &to, false).unwrap();
        assert_eq!(a.wait().ok().unwrap().wr_id, id);
    };
    send(1, b"lost");
    DOWN.store(false, Ordering::Relaxed);
    send(2, b"comes");
    b.wait().ok().unwrap();
    assert_eq!(b.mr.to_vec(GRH, 5).unwrap(), b"comes");
}

#[test]
fn a_group_is_heard_by_all_that_are_attached() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let group = SocketAddr::from(([239, 83, high, low], PORT));
    let (a, b) = (Side::new(), Side::new());
    let qa = a.qp();
    let deaf = a.qp_with(|init| init.deaf_to_itself = true);
    let (qb, qc) = (b.qp(), b.qp());
    for qp in [&qa, &deaf, &qb, &qc] {
        qp.attach(group, &[LOOPBACK]).unwrap();
        qp.attach(group, &[LOOPBACK]).expect("it stays");
        for id in 0..4 {
            let side = if [qb.num(), qc.num()].contains(&qp.num()) {
                &b
            } else {
                &a
            };
            qp.post_recv(&[side.receive(id, 0, 100)]).unwrap();
        }
    }
    assert!(qa.attach(a.port.local_addr(), &[LOOPBACK]).is_err());
    let to = UdDest {
        addr: group,
        qp_num: UD_GROUP,
        ..a.to(&b, &qb)
    };
    let heard = |side: &Side, count: usize| {
        let mut by: Vec<u32> = (0..count)
            .map(|_| {
                let wc = side.wait().ok().unwrap();
                assert_eq!(wc.opcode, WcOpcode::Recv);
                assert_eq!(side.grh(0).dest, group.ip());
                wc.qp_num
            })
            .collect();
        by.sort_unstable();
        by
    };
    let hello = SendWr::send(1).inline(b"hello");
    qa.post_send(&hello, &to, false).unwrap();
    assert_eq!(heard(&b, 2), [qb.num(), qc.num()]);
    assert_eq!(heard(&a, 2), [qa.num(), deaf.num()]);
    // Its own messages are not for the one that is deaf to itself.
    deaf.post_send(&hello, &to, false).unwrap();
    assert_eq!(heard(&b, 2), [qb.num(), qc.num()]);
    assert_eq!(heard(&a, 1), [qa.num()]);
    // A wrong key.
    qa.post_send(&hello, &UdDest { qkey: 1, ..to }, false)
        .unwrap();
    for (qp, side) in [(&qa, &a), (&deaf, &a), (&qb, &b), (&qc, &b)] {
        until(qp, side, |counters| counters.wrong_key == 1);
    }
    assert!(qc.detach(group) && !qc.detach(group));
    qa.post_send(&hello, &to, false).unwrap();
    assert_eq!(heard(&b, 1), [qb.num()]);
    assert_eq!(heard(&a, 2), [qa.num(), deaf.num()]);
    assert_eq!(qc.counters().received, 2);
}

/// A stranger with a socket.
struct Stranger {
    socket: UdpSocket,
    to: SocketAddr,
}

impl Stranger {
    fn of(port: &RocePort) -> Stranger {
        let socket = UdpSocket::bind(SocketAddr::new(address(), PORT), 1 << 20).unwrap();
        socket.forbid_fragments().unwrap();
        let to = port.local_addr();
        Stranger { socket, to }
    }

    /// A packet with a right ICRC.
    fn send(&self, packet: &[u8]) {
        let route = Route {
            src: self.socket.local_addr().unwrap(),
            dst: self.to,
        };
        let mut crc = Icrc::new(&route, 0, packet.len());
        crc.headers(packet);
        let packet = [packet, &crc.finish()].concat();
        self.socket.send(&packet, self.to, None).unwrap();
    }

    fn send_mad(&self, mad: &Mad<'_>) {
        let header = Header {
            deth: Some(Deth {
                qkey: cm::QKEY,
                src_qp: cm::QP,
            }),
            ..Header::new(Opcode::ud(Op::SendOnly), cm::QP, 0)
        };
        let mut packet = Vec::new();
        header.emit(&mut packet);
        packet.extend_from_slice(&mad.emit());
        self.send(&packet);
    }

    /// The next answer for datagrams.
    fn answer(&self) -> (u64, u8, u32, u32, Vec<u8>) {
        let mut buffer = [0; 600];
        let ready = poll_fds(&[(self.socket.as_fd(), Interest::READ)], Some(PATIENCE)).unwrap();
        assert_ne!(ready, 0, "no answer");
        let len = self.socket.recv(&mut buffer).unwrap().len;
        let (_, payload) = Header::parse(&buffer[..len - ICRC_LEN]).unwrap();
        let Some(Mad {
            transaction,
            message: Message::SidrRep(rep),
        }) = Mad::parse(payload)
        else {
            panic!("another message");
        };
        let SidrRep {
            status,
            qp,
            qkey,
            private_data,
            ..
        } = rep;
        (transaction, status, qp, qkey, private_data.to_vec())
    }
}

#[test]
fn packets_of_strangers_do_no_harm() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (a.qp(), b.qp());
    qb.post_recv(&[b.receive(1, 0, 100)]).unwrap();
    let stranger = Stranger::of(&b.port);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for n in 0..3000_usize {
        // A header of a datagram for the queue pair, cut off anywhere and with one byte changed; without the right key.
        let header = Header {
            pad: (n % 4) as u8,
            deth: Some(Deth {
                qkey: QKEY ^ 0x10,
                src_qp: 5,
            }),
            immediate: Some(n as u32),
            ..Header::new(Opcode::ud(Op::SendOnlyImm), qb.num(), 0)
        };
        let mut packet = Vec::new();
        header.emit(&mut packet);
        packet.resize(packet.len() + n % 9, 0);
        let at = random() as usize % packet.len();
        // Not the key.
        if !(12..16).contains(&at) {
            packet[at] = random() as u8;
        }
        packet.truncate(random() as usize % (packet.len() + 1));
        stranger.send(&packet);
        if n % 64 == 0 {
            assert_eq!(b.cq.poll(&mut [Wc::default()]), Ok(0));
        }
    }
    // Packets of connections, with the queue pair's number.
    for op in [Op::SendOnly, Op::WriteOnly, Op::ReadRequest, Op::Ack] {
        let mut packet = Vec::new();
        Header::new(Opcode::rc(op), qb.num(), 0).emit(&mut packet);
        packet.extend_from_slice(&[0; 64]);
        stranger.send(&packet);
    }
    let wr = SendWr::send(1).inline(b"hello");
    qa.post_send(&wr, &a.to(&b, &qb), false).unwrap();
    let wc = b.wait().ok().unwrap();
    assert_eq!((wc.wr_id, wc.source.unwrap().qp_num), (1, qa.num()));
    assert!(qb.counters().wrong_key > 100, "{:?}", qb.counters());
    assert_eq!(qb.counters().received, 1);
}

type Answers = Receiver<Result<Found, LookupError>>;

fn serving(side: &Side, number: u16, backlog: u32) -> (RoceServing, Receiver<RoceLookupRequest>) {
    let (tell, told) = channel();
    let on_request = move |request| drop(tell.send(request));
    let serving = side.port.serve(number, backlog, on_request);
    (serving.unwrap(), told)
}

#[test]
fn a_service_names_its_queue_pair() {
    let (a, b) = (Side::new(), Side::new());
    let (_serving, requests) = serving(&b, 7174, 8);
    let ask = |number| -> (_, Answers) {
        let (tell, told) = channel();
        let to = (SocketAddr::new(b.ip(), number), 0);
        let on_answer = move |answer| drop(tell.send(answer));
        let lookup = a.port.look_up(to, 4711, b"question", on_answer).unwrap();
        (lookup, told)
    };
    let next = || requests.recv_timeout(PATIENCE).unwrap();
    let answer = |told: &Answers| told.recv_timeout(PATIENCE).unwrap();
    let (_lookup, told) = ask(7174);
    let request = next();
    let addrs = (SocketAddr::new(a.ip(), 4711), SocketAddr::new(b.ip(), 7174));
    assert_eq!(request.addrs, addrs);
    assert_eq!(&request.private_data[..8], b"question");
    assert_eq!(request.private_data.len(), 180);
    request.accept(0x12_3456, QKEY, b"answer").unwrap();
    let found = answer(&told).unwrap();
    assert_eq!((found.qp_num, found.qkey), (0x12_3456, QKEY));
    assert_eq!(
        (&found.private_data[..6], found.private_data.len()),
        (&b"answer"[..], 136)
    );
    let (_lookup, told) = ask(7174);
    next().reject(b"not you");
    match answer(&told) {
        Err(LookupError::Refused {
            status: status::REJECT,
            private_data,
        }) => assert_eq!(&private_data[..7], b"not you"),
        other => panic!("{other:?}"),
    }
    let (_lookup, told) = ask(7174);
    drop(next());
    assert!(matches!(
        answer(&told),
        Err(LookupError::Refused {
            status: status::NO_QP,
            ..
        })
    ));
    let (_lookup, told) = ask(7175);
    assert_eq!(answer(&told), Err(LookupError::NoService));
    assert!(b.port.serve(7174, 1, |_| {}).is_err(), "there is one");
    // An answer that nobody waits for any more.
    let (lookup, told) = ask(7174);
    let request = next();
    drop(lookup);
    request.accept(2, 3, b"").unwrap();
    assert!(told.recv_timeout(PATIENCE).is_err(), "it was forgotten");
    let long = a
        .port
        .look_up((b.port.local_addr(), 0), 1, &[0; 181], |_| {});
    assert!(long.is_err());
}

#[test]
fn a_request_that_comes_again_gets_the_same_answer_and_strangers_are_limited() {
    let b = Side::new();
    let (_serving, requests) = serving(&b, 7176, 3);
    let stranger = Stranger::of(&b.port);
    let addresses = IpHeader {
        port: 99,
        src: Ipv4Addr::new(192, 0, 2, 9).into(),
        dst: b.ip(),
    };
    let data = addresses.emit();
    let ask = |request_id: u32, service: u16, private_data: &[u8]| {
        stranger.send_mad(&Mad {
            transaction: u64::from(request_id) + 70,
            message: Message::SidrReq(SidrReq {
                request_id,
                pkey: 0xffff,
                service_id: service_id(PortSpace::Udp, service),
                private_data,
            }),
        });
    };
    ask(1, 7176, &data);
    let request = requests.recv_timeout(PATIENCE).unwrap();
    let from = stranger.socket.local_addr().unwrap().ip();
    assert_eq!(request.addrs.0, SocketAddr::new(from, 99), "not as it says");
    // While it waits, a repetition is not heard: the next answer is that of the request behind it.
    ask(1, 7176, &data);
    ask(5, 7177, &data);
    let next = stranger.answer();
    assert_eq!((next.0, next.1), (75, status::UNSUPPORTED));
    request.accept(5, 6, b"hello").unwrap();
    let first = stranger.answer();
    assert_eq!((first.0, first.1, first.2, first.3), (71, 0, 5, 6));
    ask(1, 7176, &data);
    assert_eq!(stranger.answer(), first);
    assert!(requests.try_recv().is_err(), "a program sees it once");
    // Nobody listens, and no addresses.
    ask(2, 7177, &data);
    assert_eq!(stranger.answer().1, status::UNSUPPORTED);
    ask(3, 7176, &[0xff; 216]);
    assert_eq!(stranger.answer().1, status::UNSUPPORTED);
    // Three wait at once.
    for id in 10..20 {
        ask(id, 7176, &data);
    }
    ask(4, 7177, &data);
    assert_eq!(stranger.answer().0, 74);
    let waiting: Vec<_> = requests.try_iter().collect();
    assert_eq!(waiting.len(), 3);
    drop(waiting);
    for id in 10..13 {
        let answer = stranger.answer();
        assert_eq!((answer.0, answer.1), (id + 70, status::NO_QP));
    }
    // So many answers in a second.
    let (mut answers, begun) = (0, Instant::now());
    for id in 100..1500 {
        ask(id, 7177, &data);
        if id % 16 == 0 {
            let mut buffer = [0; 600];
            while stranger.socket.recv(&mut buffer).is_ok() {
                answers += 1;
            }
        }
    }
    // In each second, the first and the last of which are not whole.
    let seconds = begun.elapsed().as_secs() + 2;
    assert!(answers <= 512 * seconds, "{answers} in {seconds} s");
}

/// On a slow interface the socket is full most of the time.
#[test]
fn what_the_socket_has_no_room_for_waits() {
    let me = std::env::current_exe().unwrap();
    let done = Command::new("unshare")
        .args(["--net", "--"])
        .arg(me)
        .args(["--exact", "roce_ud::in_a_slow_network", "--ignored"])
        .arg("--nocapture")
        .output();
    let text = match &done {
        Ok(done) => String::from_utf8_lossy(&[&done.stdout[..], &done.stderr].concat()).into(),
        Err(error) => error.to_string(),
    };
    if text.contains("unshare: unshare failed") || done.is_err() {
        return eprintln!("skipped: no network namespace may be made here: {text}");
    }
    assert!(done.unwrap().status.success(), "{text}");
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn in_a_slow_network() {
    const MESSAGES: u64 = 2000;
    const LEN: usize = 4096;
    /// Messages on their way at once, each of which has a receive: the engine takes them however late this thread runs.
    const WINDOW: u64 = 240;
    let run = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let done = Command::new(words[0]).args(&words[1..]).status();
        done.is_ok_and(|status| status.success())
    };
    let slow = "tc qdisc add dev lo root tbf rate 200mbit burst 100kb latency 10s";
    if !run("ip link set lo up") || !run(slow) {
        return eprintln!("skipped: `{slow}` does not work here");
    }
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = (
        a.qp_with(|init| init.max_send_wr = 256),
        b.qp_with(|init| init.max_recv_wr = 256),
    );
    let to = a.to(&b, &qb);
    let receive = |id: u64| {
        let at = (id % WINDOW) as usize * (GRH + LEN);
        qb.post_recv(&[b.receive(id, at, GRH + LEN)]).unwrap();
    };
    (0..WINDOW).for_each(receive);
    let (mut posted, mut sent, mut received, mut waited) = (0, 0, 0, 0);
    let mut out = [Wc::default(); 16];
    let begun = Instant::now();
    while sent < MESSAGES || received < MESSAGES {
        assert!(begun.elapsed() < PATIENCE, "{sent}, {received}");
        while posted < MESSAGES && posted - received < WINDOW {
            let at = (posted % WINDOW) as usize * LEN;
            a.mr.write(at, &posted.to_be_bytes()).unwrap();
            let wr = SendWr::send(posted).sge(a.mr.sge(at, LEN));
            // Some are in trains.
            qa.post_send(&wr.signaled(), &to, posted % 4 != 0).unwrap();
            posted += 1;
        }
        qa.no_more();
        waited += u64::from(qa.outstanding() > 0);
        let n = a.cq.poll(&mut out).unwrap();
        for wc in &out[..n] {
            assert_eq!(wc.ok().unwrap().wr_id, sent);
            sent += 1;
        }
        let n = b.cq.poll(&mut out).unwrap();
        for wc in &out[..n] {
            assert_eq!(wc.ok().unwrap().wr_id, received);
            assert_eq!(wc.byte_len as usize, GRH + LEN);
            let at = (received % WINDOW) as usize * (GRH + LEN) + GRH;
            assert_eq!(b.mr.to_vec(at, 8).unwrap(), received.to_be_bytes());
            receive(received + WINDOW);
            received += 1;
        }
    }
    assert!(waited > 0, "the socket had always room");
    assert_eq!((qa.outstanding(), qa.counters().sent), (0, MESSAGES));
}
