//! Queue pairs of RoCE: every operation between two devices on addresses of their own, and peers that break the rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use weft_verbs::{
    Access, AsyncEvent, Cq, Device, Mr, Mw, Pd, PostReason, QpState, ROCE_REPLY_DATA,
    ROCE_REQUEST_DATA, RecvWr, RemoteAddr, RoceConnect, RoceEvent, RoceInit, RoceListening,
    RocePath, RocePort, RoceQp, RoceRequest, RoceSend, SendOp, SendWr, Wc, WcOpcode, WcStatus,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A loopback address that no other test uses, also of another process.
pub(crate) fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 0x80 | high, low, NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) port: RocePort,
    pub(crate) qp: Arc<RoceQp>,
    pub(crate) mr: Mr,
}

pub(crate) struct Options {
    pub(crate) unreliable: bool,
    pub(crate) mtu: u32,
    pub(crate) send: RoceSend,
    pub(crate) depth: u8,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            unreliable: false,
            mtu: 1024,
            send: RoceSend {
                sq_psn: 0xff_fff0,
                ord: 4,
                timeout: 14,
                retry_count: 7,
                rnr_retry: 7,
            },
            depth: 4,
        }
    }
}

impl End {
    pub(super) fn new(ip: IpAddr, init: impl FnOnce(&Device, &Pd, &mut RoceInit)) -> End {
        Self::on(&Device::open().unwrap(), ip, init)
    }

    pub(crate) fn on(
        device: &Device,
        ip: IpAddr,
        init: impl FnOnce(&Device, &Pd, &mut RoceInit),
    ) -> End {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256, None).unwrap();
        let mut parameters = RoceInit::new(&cq, &cq);
        init(device, &pd, &mut parameters);
        End {
            port: crate::roce_ud::bind(device, ip),
            qp: Arc::new(pd.create_roce_qp(&parameters).unwrap()),
            mr: pd.alloc_mr(1 << 20, Access::all()).unwrap(),
            device: device.clone(),
            pd,
            cq,
        }
    }

    pub(crate) fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr {
            addr: offset,
            rkey: self.mr.rkey(),
        }
    }

    pub(crate) fn wait(&self) -> Wc {
        let mut wc = [Wc::default()];
        let got = self.cq.wait(&mut wc, Some(PATIENCE)).unwrap();
        assert_eq!(got, 1, "nothing completes");
        wc[0]
    }

    /// The way to it.
    pub(crate) fn path(&self, options: &Options) -> RocePath {
        RocePath {
            peer: self.port.local_addr().ip(),
            scope: 0,
            dest_qp: self.qp.num(),
            rq_psn: options.send.sq_psn,
            mtu: options.mtu,
            ird: options.depth,
            rnr_timer: 1,
            traffic_class: 0,
        }
    }

    pub(crate) fn fill(&self, len: usize, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251) as u8 ^ seed).collect();
        self.mr.write(0, &bytes).unwrap();
        bytes
    }
}

pub(crate) fn join(a: &End, b: &End, options: &Options) {
    a.qp.receive_from(&a.port, &b.path(options)).unwrap();
    b.qp.receive_from(&b.port, &a.path(options)).unwrap();
    a.qp.send_with(&options.send).unwrap();
    b.qp.send_with(&options.send).unwrap();
}

pub(crate) fn pair_with(options: &Options) -> (End, End) {
    let unreliable = options.unreliable;
    let end = || End::new(address(), |_, _, init| init.unreliable = unreliable);
    let (a, b) = (end(), end());
    join(&a, &b, options);
    (a, b)
}

pub(crate) fn pair() -> (End, End) {
    pair_with(&Options::default())
}

#[test]
fn messages_of_all_lengths_arrive_at_all_mtus() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let options = Options {
            mtu,
            ..Options::default()
        };
        let (a, b) = pair_with(&options);
        let mtu = mtu as usize;
        for (n, len) in [0, 1, 3, mtu - 1, mtu, mtu + 1, 5 * mtu + 7, 300_000]
            .into_iter()
            .enumerate()
        {
            let sent = a.fill(len, n as u8);
            b.qp.post_recv(&[RecvWr::new(7).sge(b.mr.sge(0, 1 << 20))])
                .unwrap();
            a.qp.post_send(SendWr::send(9).sge(a.mr.sge(0, len)).signaled())
                .unwrap();
            let received = b.wait().ok().unwrap();
            assert_eq!((received.wr_id, received.byte_len as usize), (7, len));
            assert_eq!(received.opcode, WcOpcode::Recv);
            assert_eq!(b.mr.to_vec(0, len).unwrap(), sent);
            let done = a.wait().ok().unwrap();
            assert_eq!((done.wr_id, done.byte_len as usize), (9, len));
        }
    }
}

#[test]
fn immediate_data_arrives_with_a_send_and_with_a_write() {
    let (a, b) = pair();
    a.fill(5000, 1);
    for _ in 0..2 {
        b.qp.post_recv(&[RecvWr::new(1).sge(b.mr.sge(0, 8192))])
            .unwrap();
    }
    let send = SendWr::send_imm(1, 0x0102_0304).sge(a.mr.sge(0, 5000));
    a.qp.post_send(send).unwrap();
    let wc = b.wait().ok().unwrap();
    assert_eq!(
        (wc.opcode, wc.imm, wc.byte_len),
        (WcOpcode::Recv, Some(0x0102_0304), 5000)
    );
    let write = SendWr::write_imm(2, b.remote(10_000), 7).sge(a.mr.sge(0, 5000));
    a.qp.post_send(write).unwrap();
    let wc = b.wait().ok().unwrap();
    assert_eq!(
        (wc.opcode, wc.imm, wc.byte_len),
        (WcOpcode::RecvWithImm, Some(7), 5000)
    );
    assert_eq!(
        b.mr.to_vec(10_000, 5000).unwrap(),
        a.mr.to_vec(0, 5000).unwrap()
    );
}

#[test]
fn reads_writes_and_atomics_reach_memory() {
    let (a, b) = pair();
    let sent = a.fill(200_001, 3);
    let write = SendWr::write(1, b.remote(4)).sges(&[a.mr.sge(0, 100), a.mr.sge(100, 199_901)]);
    a.qp.post_send(write.signaled()).unwrap();
    a.wait().ok().unwrap();
    assert_eq!(b.mr.to_vec(4, 200_001).unwrap(), sent);
    // Into two pieces.
    let sink = [a.mr.sge(500_000, 70_000), a.mr.sge(700_000, 130_001)];
    a.qp.post_send(SendWr::read(2, b.remote(4)).sges(&sink).signaled())
        .unwrap();
    let done = a.wait().ok().unwrap();
    assert_eq!((done.opcode, done.byte_len), (WcOpcode::Read, 200_001));
    assert_eq!(a.mr.to_vec(500_000, 70_000).unwrap(), sent[..70_000]);
    assert_eq!(a.mr.to_vec(700_000, 130_001).unwrap(), sent[70_000..]);
    b.mr.store_u64(1 << 19, 40).unwrap();
    let at = b.remote(1 << 19);
    let old = a.mr.sge(0, 8);
    a.qp.post_send(SendWr::fetch_add(3, at, 2).sge(old).signaled())
        .unwrap();
    a.wait().ok().unwrap();
    assert_eq!(a.mr.load_u64(0).unwrap(), 40);
    for (compare, now) in [(41, 42), (42, 5)] {
        a.qp.post_send(SendWr::compare_swap(4, at, compare, 5).sge(old).signaled())
            .unwrap();
        a.wait().ok().unwrap();
        assert_eq!(a.mr.load_u64(0).unwrap(), 42);
        assert_eq!(b.mr.load_u64(1 << 19).unwrap(), now);
    }
}

#[test]
fn both_ends_may_be_of_one_port_and_of_ipv6() {
    for ip in [address(), Ipv6Addr::LOCALHOST.into()] {
        let device = Device::open().unwrap();
        let end = || End::on(&device, ip, |_, _, _| {});
        let (a, b) = (end(), end());
        join(&a, &b, &Options::default());
        let sent = a.fill(50_000, 3);
        a.qp.post_send(
            SendWr::write(1, b.remote(0))
                .sge(a.mr.sge(0, 50_000))
                .signaled(),
        )
        .unwrap();
        a.wait().ok().unwrap();
        assert_eq!(b.mr.to_vec(0, 50_000).unwrap(), sent);
    }
}

#[test]
fn a_message_waits_for_its_receive() {
    let (a, b) = pair();
    a.fill(3000, 9);
    for id in 0..3 {
        a.qp.post_send(SendWr::send(id).sge(a.mr.sge(0, 3000)).signaled())
            .unwrap();
    }
    let mut wc = [Wc::default()];
    let early = a.cq.wait(&mut wc, Some(Duration::from_millis(50))).unwrap();
    assert_eq!(early, 0, "{wc:?}");
    for id in 0..3 {
        b.qp.post_recv(&[RecvWr::new(id).sge(b.mr.sge(0, 4096))])
            .unwrap();
        assert_eq!(b.wait().ok().unwrap().wr_id, id);
        assert_eq!(a.wait().ok().unwrap().wr_id, id);
    }
}

#[test]
fn without_a_receive_the_send_fails_after_its_tries() {
    let (a, b) = pair_with(&Options {
        send: RoceSend {
            rnr_retry: 3,
            ..Options::default().send
        },
        ..Options::default()
    });
    a.qp.post_send(SendWr::send(1).inline(b"nobody")).unwrap();
    a.qp.post_send(SendWr::send(2).inline(b"nobody")).unwrap();
    let (first, second) = (a.wait(), a.wait());
    assert_eq!((first.wr_id, first.status), (1, WcStatus::RnrRetryExcErr));
    assert_eq!((second.wr_id, second.status), (2, WcStatus::WrFlushErr));
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Error, QpState::Rts));
    // What is posted later is flushed.
    a.qp.post_send(SendWr::send(3)).unwrap();
    a.qp.post_recv(&[RecvWr::new(4)]).unwrap();
    for id in 3..5 {
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::WrFlushErr));
    }
}

#[test]
fn a_peer_that_is_gone_ends_the_connection_after_the_retries() {
    let (a, b) = pair_with(&Options {
        send: RoceSend {
            timeout: 12,
            retry_count: 2,
            ..Options::default().send
        },
        ..Options::default()
    });
    drop(b);
    let begun = Instant::now();
    a.qp.post_recv(&[RecvWr::new(9)]).unwrap();
    a.qp.post_send(SendWr::send(1).inline(b"?")).unwrap();
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::RetryExcErr));
    // Three times 16.8 ms.
    assert!(
        begun.elapsed() >= Duration::from_millis(50),
        "{:?}",
        begun.elapsed()
    );
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (9, WcStatus::WrFlushErr));
}

/// What a peer may not do is refused: no byte changes, and both ends are over.
#[test]
fn memory_that_was_not_opened_is_not_reached() {
    type Breach = fn(&End, &End) -> SendWr;
    let breaches: [(&str, WcStatus, Breach); 6] = [
        ("another key", WcStatus::RemAccessErr, |a, b| {
            let rkey = b.mr.rkey() ^ 0x100;
            SendWr::write(1, RemoteAddr { addr: 0, rkey }).sge(a.mr.sge(0, 4))
        }),
        ("behind the end", WcStatus::RemAccessErr, |a, b| {
            SendWr::write(1, b.remote((1 << 20) - 3)).sge(a.mr.sge(0, 4))
        }),
        ("a read behind the end", WcStatus::RemAccessErr, |a, b| {
            SendWr::read(1, b.remote(1 << 20)).sge(a.mr.sge(0, 1))
        }),
        (
            "a region that is not open",
            WcStatus::RemAccessErr,
            |a, b| {
                let closed = b.pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
                let remote = RemoteAddr {
                    addr: 0,
                    rkey: closed.rkey(),
                };
                std::mem::forget(closed);
                SendWr::write(1, remote).sge(a.mr.sge(0, 4))
            },
        ),
        ("an odd atomic", WcStatus::RemInvReqErr, |a, b| {
            SendWr::fetch_add(1, b.remote(4), 1).sge(a.mr.sge(0, 8))
        }),
        ("too long a message", WcStatus::RemInvReqErr, |a, b| {
            b.qp.post_recv(&[RecvWr::new(5).sge(b.mr.sge(0, 10))])
                .unwrap();
            SendWr::send(1).sge(a.mr.sge(0, 11))
        }),
    ];
    for (what, status, breach) in breaches {
        let (a, b) = pair();
        a.fill(64, 0xff);
        let wr = breach(&a, &b);
        a.qp.post_send(wr).unwrap();
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (1, status), "{what}");
        assert!(
            b.mr.to_vec(0, 1 << 20).unwrap().iter().all(|b| *b == 0),
            "{what}"
        );
        let event = b.device.get_async_event(Some(PATIENCE));
        let access = match event.unwrap() {
            AsyncEvent::QpAccessErr { qp_num, .. } => (true, qp_num),
            AsyncEvent::QpFatal { qp_num, .. } => (false, qp_num),
            other => panic!("{other}"),
        };
        let expected = (status == WcStatus::RemAccessErr, b.qp.num());
        assert_eq!(access, expected, "{what}");
        assert_eq!(
            (a.qp.state(), b.qp.state()),
            (QpState::Error, QpState::Error)
        );
        if what == "too long a message" {
            let wc = b.wait();
            assert_eq!((wc.wr_id, wc.status), (5, WcStatus::LocLenErr));
        }
    }
}

#[test]
fn rights_of_the_queue_pair_count() {
    let (a, b) = pair();
    b.qp.set_access(Access::REMOTE_READ);
    a.qp.post_send(
        SendWr::read(1, b.remote(0))
            .sge(a.mr.sge(0, 100))
            .signaled(),
    )
    .unwrap();
    a.wait().ok().unwrap();
    a.qp.post_send(SendWr::write(2, b.remote(0)).sge(a.mr.sge(0, 100)))
        .unwrap();
    assert_eq!(a.wait().status, WcStatus::RemAccessErr);
}

#[test]
fn memory_of_our_own_that_is_not_ours_fails_its_request() {
    type Bad = fn(&End) -> SendWr;
    let bad: [Bad; 2] = [
        |a| {
            let mut sge = a.mr.sge(0, 4);
            sge.lkey ^= 0x100;
            SendWr::send(2).sge(sge)
        },
        |a| {
            let mut sge = a.mr.sge(0, 4);
            sge.lkey ^= 0x100;
            SendWr::read(2, RemoteAddr { addr: 0, rkey: 0 }).sge(sge)
        },
    ];
    for (n, bad) in bad.into_iter().enumerate() {
        let (a, b) = pair();
        let mut wr = bad(&a);
        if let SendOp::Read { remote } = &mut wr.op {
            *remote = b.remote(0);
        }
        b.qp.post_recv(&[RecvWr::new(7)]).unwrap();
        a.qp.post_send(SendWr::send(1).signaled()).unwrap();
        a.qp.post_send(wr).unwrap();
        a.qp.post_send(SendWr::send(3)).unwrap();
        let expected = [
            WcStatus::Success,
            WcStatus::LocProtErr,
            WcStatus::WrFlushErr,
        ];
        for (id, status) in (1..).zip(expected) {
            let wc = a.wait();
            assert_eq!((wc.wr_id, wc.status), (id, status), "{n}");
        }
    }
}

#[test]
fn an_unreliable_connection_does_not_complete_what_it_could_not_send() {
    for first in [0, 2_000_000] {
        let (a, b) = pair_with(&Options {
            unreliable: true,
            ..Options::default()
        });
        let big = a.pd.alloc_mr(2_000_000, Access::all()).unwrap();
        let sink = b.pd.alloc_mr(2_000_000, Access::all()).unwrap();
        let write = SendWr::write(1, sink.remote(0)).sge(big.sge(0, first));
        a.qp.post_send(write.signaled()).unwrap();
        let mut bad = a.mr.sge(0, 4);
        bad.lkey ^= 0x100;
        a.qp.post_send(SendWr::send(2).sge(a.mr.sge(0, 4)).sge(bad))
            .unwrap();
        a.qp.post_send(SendWr::send(3)).unwrap();
        let expected = [
            WcStatus::Success,
            WcStatus::LocProtErr,
            WcStatus::WrFlushErr,
        ];
        for (id, status) in (1..).zip(expected) {
            let wc = a.wait();
            assert_eq!((wc.wr_id, wc.status), (id, status), "{first}");
        }
    }
}

/// What the peer is owed before a refusal comes before it, also where it takes several calls to send.
#[test]
fn answers_precede_a_refusal() {
    let (a, b) = pair();
    for _ in 0..3 {
        let read = SendWr::read(1, b.remote(0)).sge(a.mr.sge(0, 300_000));
        a.qp.post_send(read.signaled()).unwrap();
    }
    let rkey = b.mr.rkey() ^ 0x100;
    let write = SendWr::write(2, RemoteAddr { addr: 0, rkey }).sge(a.mr.sge(0, 4));
    a.qp.post_send(write).unwrap();
    for _ in 0..3 {
        a.wait().ok().unwrap();
    }
    let wc = a.wait();
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::RemAccessErr));
}

/// The receive of a message that did not end goes back to the shared queue.
#[test]
fn a_queue_pair_that_goes_returns_its_receive() {
    let device = Device::open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let srq = pd.create_srq(4, 1).unwrap();
    let mr = pd.alloc_mr(100_000, Access::LOCAL_WRITE).unwrap();
    srq.post_recv_one(RecvWr::new(5).sge(mr.whole())).unwrap();
    let (ip, other) = (address(), address());
    let options = Options {
        unreliable: true,
        ..Options::default()
    };
    let end = |ip, shared: bool| {
        End::on(&device, ip, |_, _, init| {
            init.unreliable = true;
            init.srq = shared.then(|| srq.clone());
        })
    };
    let (a, b) = (end(ip, false), end(other, true));
    join(&a, &b, &options);
    // Its second half is not ours, and is not sent.
    let mut bad = a.mr.sge(0, 1024);
    bad.lkey ^= 0x100;
    a.qp.post_send(SendWr::send(1).sge(a.mr.sge(0, 1024)).sge(bad))
        .unwrap();
    assert_eq!(a.wait().status, WcStatus::LocProtErr);
    let begun = Instant::now();
    while b.qp.counters().received == 0 {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    drop(b);
    let (c, d) = (end(ip, false), end(other, true));
    join(&c, &d, &options);
    c.qp.post_send(SendWr::send(1).inline(b"again")).unwrap();
    assert_eq!(d.wait().ok().unwrap().wr_id, 5);
}

#[test]
fn windows_are_bound_and_invalidated() {
    let (a, b) = pair();
    let window: Mw = b.pd.alloc_mw().unwrap();
    let (bind, bound) = window.bind(1, &b.mr, 100, 50, Access::REMOTE_WRITE);
    b.qp.post_send(bind.signaled()).unwrap();
    b.wait().ok().unwrap();
    a.fill(50, 1);
    let remote = RemoteAddr {
        addr: 100,
        rkey: bound,
    };
    a.qp.post_send(SendWr::write(2, remote).sge(a.mr.sge(0, 50)).signaled())
        .unwrap();
    a.wait().ok().unwrap();
    assert_eq!(b.mr.to_vec(100, 50).unwrap(), a.mr.to_vec(0, 50).unwrap());
    b.qp.post_recv(&[RecvWr::new(3)]).unwrap();
    a.qp.post_send(SendWr::send_invalidate(3, bound)).unwrap();
    assert_eq!(b.wait().ok().unwrap().invalidated, Some(bound));
    a.qp.post_send(SendWr::write(4, remote).sge(a.mr.sge(0, 50)))
        .unwrap();
    assert_eq!(a.wait().status, WcStatus::RemAccessErr);
}

#[test]
fn shared_receive_queues_serve_several() {
    let (ip, other) = (address(), address());
    let device = Device::open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let srq = pd.create_srq(64, 1).unwrap();
    let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
    for id in 0..8 {
        srq.post_recv_one(RecvWr::new(id).sge(mr.sge(id as usize * 16, 16)))
            .unwrap();
    }
    let ends: Vec<(End, End)> = (0..2)
        .map(|_| {
            let a = End::on(&device, ip, |_, _, _| {});
            let b = End::on(&device, other, |_, _, init| init.srq = Some(srq.clone()));
            join(&a, &b, &Options::default());
            (a, b)
        })
        .collect();
    for round in 0..4u64 {
        for (n, (a, b)) in ends.iter().enumerate() {
            a.qp.post_send(SendWr::send(1).inline(&[n as u8; 16]))
                .unwrap();
            let wc = b.wait().ok().unwrap();
            assert_eq!(wc.wr_id, round * 2 + n as u64);
            let bytes = mr.to_vec(wc.wr_id as usize * 16, 16).unwrap();
            assert_eq!(bytes, [n as u8; 16]);
        }
    }
}

#[test]
fn unreliable_connections_carry_sends_and_writes() {
    let (a, b) = pair_with(&Options {
        unreliable: true,
        ..Options::default()
    });
    let sent = a.fill(10_000, 3);
    b.qp.post_recv(&[RecvWr::new(1).sge(b.mr.sge(0, 10_000))])
        .unwrap();
    a.qp.post_send(SendWr::send(1).sge(a.mr.sge(0, 10_000)).signaled())
        .unwrap();
    b.wait().ok().unwrap();
    a.wait().ok().unwrap();
    assert_eq!(b.mr.to_vec(0, 10_000).unwrap(), sent);
    let read = SendWr::read(2, b.remote(0)).sge(a.mr.sge(0, 8));
    assert_eq!(
        a.qp.post_send(read).unwrap_err().reason,
        PostReason::Unsupported
    );
    // A message without a receive is lost, and the sender does not notice.
    a.qp.post_send(SendWr::send(3).sge(a.mr.sge(0, 10_000)).signaled())
        .unwrap();
    a.wait().ok().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    b.qp.post_recv(&[RecvWr::new(4).sge(b.mr.sge(0, 10_000))])
        .unwrap();
    a.qp.post_send(SendWr::send_imm(5, 5).sge(a.mr.sge(0, 2000)))
        .unwrap();
    let wc = b.wait().ok().unwrap();
    assert_eq!((wc.wr_id, wc.imm, wc.byte_len), (4, Some(5), 2000));
}

/// Many requests at once, from a thread that polls and from one that sleeps, in both directions.
#[test]
fn much_traffic_arrives_in_order() {
    const MESSAGES: u64 = 20_000;
    let (a, b) = pair();
    std::thread::scope(|scope| {
        for (end, sleeps) in [(&a, false), (&b, true)] {
            scope.spawn(move || {
                let (mut posted, mut sent, mut received, mut wanted) = (0, 0, 0, 0);
                let mut out = [Wc::default(); 32];
                while sent < MESSAGES || received < MESSAGES {
                    while wanted < MESSAGES && wanted - received < 100 {
                        let slot = (wanted % 100) as usize * 64;
                        end.qp
                            .post_recv(&[RecvWr::new(wanted).sge(end.mr.sge(slot, 64))])
                            .unwrap();
                        wanted += 1;
                    }
                    while posted < MESSAGES && posted - sent < 100 {
                        let bytes = [posted.to_be_bytes(); 4].concat();
                        end.qp
                            .post_send(SendWr::send(posted).inline(&bytes).signaled())
                            .unwrap();
                        posted += 1;
                    }
                    let n = if sleeps {
                        end.cq.wait(&mut out, Some(PATIENCE)).unwrap()
                    } else {
                        end.cq.poll(&mut out).unwrap()
                    };
                    for wc in &out[..n] {
                        wc.ok().unwrap();
                        if wc.opcode == WcOpcode::Recv {
                            assert_eq!(wc.wr_id, received);
                            let slot = (received % 100) as usize * 64;
                            let bytes = end.mr.to_vec(slot, 32).unwrap();
                            assert_eq!(bytes, [received.to_be_bytes(); 4].concat());
                            received += 1;
                        } else {
                            assert_eq!(wc.wr_id, sent);
                            sent += 1;
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn a_channel_is_told_of_completions() {
    let (a, b) = pair();
    let channel = b.device.create_comp_channel().unwrap();
    let cq = b.device.create_cq(16, Some(&channel)).unwrap();
    let c = End::on(&b.device, address(), |_, _, init| init.recv_cq = cq.clone());
    let d = End::on(&a.device, address(), |_, _, _| {});
    join(&c, &d, &Options::default());
    for id in 0..20 {
        c.qp.post_recv(&[RecvWr::new(id)]).unwrap();
        cq.req_notify(false);
        let mut wc = [Wc::default()];
        assert_eq!(cq.poll(&mut wc), Ok(0));
        d.qp.post_send(SendWr::send(1)).unwrap();
        assert!(channel.get_event(Some(PATIENCE)).is_some());
        assert_eq!(cq.poll(&mut wc), Ok(1));
        assert_eq!(wc[0].ok().unwrap().wr_id, id);
    }
}

#[test]
fn packets_from_other_addresses_are_not_the_peers() {
    let (a, b) = pair();
    // Another device with the queue pair's numbers and packet sequence numbers.
    let forger = End::new(address(), |_, _, _| {});
    let options = Options::default();
    forger
        .qp
        .receive_from(&forger.port, &b.path(&options))
        .unwrap();
    forger.qp.send_with(&options.send).unwrap();
    forger.fill(64, 0xff);
    let write = SendWr::write(1, b.remote(0)).sge(forger.mr.sge(0, 64));
    forger.qp.post_send(write).unwrap();
    let begun = Instant::now();
    while b.qp.counters().stray == 0 {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert!(b.mr.to_vec(0, 64).unwrap().iter().all(|b| *b == 0));
    a.fill(64, 1);
    let write = SendWr::write(1, b.remote(0)).sge(a.mr.sge(0, 64));
    a.qp.post_send(write.signaled()).unwrap();
    a.wait().ok().unwrap();
}

/// The events of a connection.
pub(super) fn events() -> (
    impl Fn(RoceEvent) + Send + Sync + 'static,
    Receiver<RoceEvent>,
) {
    let (tell, told) = channel();
    (move |event| drop(tell.send(event)), told)
}

pub(super) fn listening(end: &End, number: u16) -> (RoceListening, Receiver<RoceRequest>) {
    let (tell, told) = channel();
    let listening = end.port.listen(number, 64, move |mut request| {
        request.seen();
        drop(tell.send(request));
    });
    (listening.unwrap(), told)
}

#[test]
fn the_connection_manager_makes_and_ends_connections() {
    let end = || End::new(address(), |_, _, _| {});
    let (a, b) = (end(), end());
    let (_listening, requests) = listening(&b, 7174);
    let to = SocketAddr::new(b.port.local_addr().ip(), 7174);
    let param = RoceConnect {
        private_data: b"question".to_vec(),
        ird: 3,
        ord: 9,
        ..RoceConnect::default()
    };
    let (tell, told) = events();
    let ours = a.port.dial(&a.qp, (to, 0), 4711, &param, tell).unwrap();
    let request = requests.recv_timeout(PATIENCE).unwrap();
    let from = SocketAddr::new(a.port.local_addr().ip(), 4711);
    assert_eq!(request.addrs, (from, to));
    assert_eq!(&request.private_data[..8], b"question");
    assert_eq!(request.private_data.len(), ROCE_REQUEST_DATA);
    assert_eq!((request.depths, request.retries), ((3, 9), (7, 7)));
    b.qp.post_recv(&[RecvWr::new(5).sge(b.mr.sge(0, 64))])
        .unwrap();
    let (tell, theirs_told) = events();
    let answer = RoceConnect {
        private_data: b"answer".to_vec(),
        ird: 4,
        ord: 4,
        rnr_retry: 2,
        ..RoceConnect::default()
    };
    let theirs = request.accept(&b.qp, &answer, tell).unwrap();
    match told.recv_timeout(PATIENCE).unwrap() {
        RoceEvent::Established {
            private_data,
            depths,
            rnr_retry,
        } => {
            assert_eq!(
                (&private_data[..6], private_data.len()),
                (&b"answer"[..], ROCE_REPLY_DATA)
            );
            assert_eq!((depths, rnr_retry), ((3, 4), 2));
        }
        other => panic!("{other:?}"),
    }
    let ready = theirs_told.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(ready, RoceEvent::Established { depths: (4, 3), .. }),
        "{ready:?}"
    );
    a.qp.post_send(SendWr::send(1).inline(b"hello").signaled())
        .unwrap();
    assert_eq!(b.wait().ok().unwrap().wr_id, 5);
    a.wait().ok().unwrap();
    b.qp.post_recv(&[RecvWr::new(6)]).unwrap();
    ours.disconnect();
    for told in [&told, &theirs_told] {
        assert_eq!(
            told.recv_timeout(PATIENCE).unwrap(),
            RoceEvent::Disconnected
        );
    }
    assert_eq!(
        (a.qp.state(), b.qp.state()),
        (QpState::Error, QpState::Error)
    );
    assert_eq!(b.wait().status, WcStatus::WrFlushErr);
    theirs.disconnect();
    assert!(
        told.recv_timeout(Duration::from_millis(50)).is_err(),
        "nothing comes twice"
    );
}

#[test]
fn requests_are_refused_by_programs_and_where_nobody_listens() {
    let end = || End::new(address(), |_, _, _| {});
    let (a, b) = (end(), end());
    let (listener, requests) = listening(&b, 7174);
    let dial = |number| {
        let (tell, told) = events();
        let to = SocketAddr::new(b.port.local_addr().ip(), number);
        let param = RoceConnect::default();
        a.port.dial(&a.qp, (to, 0), 1, &param, tell).unwrap();
        told
    };
    let rejected = |told: Receiver<RoceEvent>| match told.recv_timeout(PATIENCE).unwrap() {
        RoceEvent::Rejected {
            reason,
            private_data,
        } => (reason, private_data),
        other => panic!("{other:?}"),
    };
    let told = dial(7174);
    requests.recv_timeout(PATIENCE).unwrap().reject(b"not you");
    let (reason, data) = rejected(told);
    assert_eq!((reason, &data[..7]), (28, &b"not you"[..]));
    assert_eq!(rejected(dial(7175)).0, 8);
    drop(listener);
    assert_eq!(rejected(dial(7174)).0, 8);
    // The queue pair of a request that was refused may ask again.
    let (_listener, requests) = listening(&b, 7174);
    let told = dial(7174);
    let (tell, _theirs) = events();
    let request = requests.recv_timeout(PATIENCE).unwrap();
    request
        .accept(&b.qp, &RoceConnect::default(), tell)
        .unwrap();
    let made = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(made, RoceEvent::Established { .. }), "{made:?}");
}

#[test]
fn a_port_that_another_program_has_is_an_error() {
    let ip = address();
    let other = std::net::UdpSocket::bind((ip, 4791)).unwrap();
    let device = Device::open().unwrap();
    let refused = device.bind_roce(ip, 0).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::AddrInUse);
    drop(other);
    device.bind_roce(ip, 0).unwrap();
}
