//! Queue pairs joined by number: `weft_verbs::cm::Broker`, docs/spec/persona.md.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, geteuid, getrlimit};
use weft_verbs::cm::{Broker, ConnParam, ConnectError, Number, QpName, gid_of, ip_of};
use weft_verbs::ext::listening_user;
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, Pd, Qp, QpInit, RecvWr, Rnr, SendWr, Wc, WcStatus,
};

const LONG: Option<Duration> = Some(Duration::from_secs(20));

/// One process of two: a device, a broker, and the objects of a queue pair.
struct Side {
    broker: Broker,
    pd: Pd,
    cq: Cq,
    mr: Mr,
}

impl Side {
    fn new(local: LocalMode) -> Side {
        let device = Device::builder().local(local).open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        Side {
            broker: Broker::new(&device),
            cq: device.create_cq(64, None).expect("a queue"),
            mr: pd.alloc_mr(64, Access::LOCAL_WRITE).expect("a region"),
            pd,
        }
    }

    fn qp(&self) -> (Number, Arc<Qp>) {
        let number = self.broker.reserve().expect("a number");
        let init = QpInit {
            num: Some(number.get()),
            ..QpInit::new(&self.cq, &self.cq)
        };
        let qp = self.pd.create_qp(&init).expect("a queue pair");
        assert_eq!(qp.num(), number.get());
        (number, Arc::new(qp))
    }

    fn next(&self) -> Wc {
        let mut wc = [Wc::default()];
        let n = self.cq.wait(&mut wc, LONG).expect("no overrun");
        assert_eq!(n, 1, "nothing within the time");
        wc[0]
    }

    fn expect_message(&self, text: &[u8]) {
        let wc = self.next();
        assert_eq!(wc.status, WcStatus::Success);
        let got = self.mr.to_vec(0, wc.byte_len as usize).expect("in bounds");
        assert_eq!(got, text);
    }
}

fn name(number: &Number, ip: &str) -> QpName {
    QpName {
        num: number.get(),
        ip: ip.parse().expect("an address"),
    }
}

fn join(side: &Side, qp: &Arc<Qp>, ours: QpName, peer: QpName) {
    side.broker
        .join(qp, ours, peer, 0, &ConnParam::default())
        .expect("a peer");
}

/// Both directions, with either side joined first, and sends posted before there is a peer.
fn meet(ip: &str, local: LocalMode, first_dials: bool) {
    let (a, b) = (Side::new(local), Side::new(local));
    let ((na, qa), (nb, qb)) = (a.qp(), b.qp());
    let (ea, eb) = (name(&na, ip), name(&nb, ip));
    let first_is_a = (ea < eb) == first_dials;
    let ((x, qx, ex), (y, qy, ey)) = if first_is_a {
        ((&a, &qa, ea), (&b, &qb, eb))
    } else {
        ((&b, &qb, eb), (&a, &qa, ea))
    };
    for (side, qp) in [(x, qx), (y, qy)] {
        qp.post_recv(&[RecvWr::new(7).sge(side.mr.whole())])
            .expect("room");
    }
    join(x, qx, ex, ey);
    qx.post_send_one(SendWr::send(1).inline(b"early").signaled())
        .expect("kept");
    // Long enough for dials to be refused or kept, and repeated.
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(x.cq.poll(&mut [Wc::default()]).expect("no overrun"), 0);
    join(y, qy, ey, ex);
    qy.post_send_one(SendWr::send(2).inline(b"late"))
        .expect("room");
    y.expect_message(b"early");
    let ids: HashSet<u64> = [x.next(), x.next()].map(|wc| wc.wr_id).into();
    assert_eq!(ids, [1, 7].into());
    assert_eq!(x.mr.to_vec(0, 4).expect("in bounds"), b"late");
}

#[test]
fn queue_pairs_meet_by_number() {
    for local in [LocalMode::Off, LocalMode::Require] {
        for first_dials in [false, true] {
            meet("127.0.0.1", local, first_dials);
            meet("::1", local, first_dials);
        }
    }
}

/// A request that its sender has given up does not join a queue pair.
#[test]
fn a_peer_is_told_long_after_the_other() {
    for local in [LocalMode::Off, LocalMode::Require] {
        let (one, other) = (Side::new(local), Side::new(local));
        let ((n1, q1), (n2, q2)) = (one.qp(), other.qp());
        let (e1, e2) = (name(&n1, "127.0.0.1"), name(&n2, "127.0.0.1"));
        let ((x, qx, ex), (y, qy, ey)) = if e1 < e2 {
            ((&one, &q1, e1), (&other, &q2, e2))
        } else {
            ((&other, &q2, e2), (&one, &q1, e1))
        };
        let mut impatient = ConnParam::default();
        impatient.options.timeout = Duration::from_millis(100);
        x.broker.join(qx, ex, ey, 0, &impatient).expect("a peer");
        qy.post_recv(&[RecvWr::new(1).sge(y.mr.whole())])
            .expect("room");
        // Long enough for some requests to be given up.
        std::thread::sleep(Duration::from_millis(350));
        join(y, qy, ey, ex);
        qx.post_send_one(SendWr::send(2).inline(b"at last"))
            .expect("kept");
        y.expect_message(b"at last");
    }
}

/// A queue pair ends while its request waits for an answer, and another one replaces it.
#[test]
fn a_request_goes_with_its_queue_pair() {
    for local in [LocalMode::Off, LocalMode::Require] {
        for ends in [|qp: &Qp| qp.to_error(), |_: &Qp| ()] {
            let (one, other) = (Side::new(local), Side::new(local));
            let ((n1, q1), (n2, q2)) = (one.qp(), other.qp());
            let (e1, e2) = (name(&n1, "127.0.0.1"), name(&n2, "127.0.0.1"));
            let ((x, qx, ex), (y, qy, ey)) = if e1 < e2 {
                ((&one, q1, e1), (&other, q2, e2))
            } else {
                ((&other, q2, e2), (&one, q1, e1))
            };
            join(x, &qx, ex, ey);
            // Long enough for the request to arrive.
            std::thread::sleep(Duration::from_millis(100));
            ends(&qx);
            x.broker.leave(ex.num);
            drop(qx);
            qy.post_recv(&[RecvWr::new(1).sge(y.mr.whole())])
                .expect("room");
            join(y, &qy, ey, ex);
            let init = QpInit {
                num: Some(ex.num),
                ..QpInit::new(&x.cq, &x.cq)
            };
            let qx = Arc::new(x.pd.create_qp(&init).expect("a queue pair"));
            join(x, &qx, ex, ey);
            qx.post_send_one(SendWr::send(2).inline(b"anew"))
                .expect("kept");
            y.expect_message(b"anew");
        }
    }
}

/// A request for a queue pair that already has its peer is rejected.
#[test]
fn a_queue_pair_that_is_joined_takes_nobody_else() {
    let (x, y) = (Side::new(LocalMode::Off), Side::new(LocalMode::Off));
    let ((nx, qx), (ny, qy)) = (x.qp(), y.qp());
    let (ex, ey) = (name(&nx, "127.0.0.1"), name(&ny, "127.0.0.1"));
    for (side, qp) in [(&x, &qx), (&y, &qy)] {
        qp.post_recv(&[RecvWr::new(1).sge(side.mr.whole())])
            .expect("room");
    }
    join(&x, &qx, ex, ey);
    join(&y, &qy, ey, ex);
    // Both have it when a message has come in both directions.
    qx.post_send_one(SendWr::send(2).inline(b"there"))
        .expect("kept");
    y.expect_message(b"there");
    qy.post_send_one(SendWr::send(3).inline(b"back"))
        .expect("room");
    x.expect_message(b"back");
    for to in [ex, ey] {
        assert_refused(to);
    }
}

type Outcome = Result<Vec<u8>, ConnectError>;

/// Dials as docs/spec/persona.md says, from a queue pair of nobody's; the outcome is told.
fn stranger_asks_for(to: QpName, tell: mpsc::Sender<Outcome>) -> Qp {
    let stranger = Device::open().expect("a device");
    let pd = stranger.alloc_pd().expect("a domain");
    let cq = stranger.create_cq(1, None).expect("a queue");
    let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a queue pair");
    let mut hello = b"WQP1\0\0\0\0\0\0\x01\0".to_vec();
    hello.extend(to.num.to_be_bytes());
    hello.extend(gid_of("127.0.0.1".parse().expect("an address")));
    hello.extend(gid_of("127.0.0.1".parse().expect("an address")));
    let param = ConnParam {
        private_data: hello,
        ..ConnParam::default()
    };
    let at = ([127, 0, 0, 1], (to.num >> 8) as u16).into();
    stranger.dial(at, None, &qp, &param, move |outcome| {
        let _ = tell.send(outcome);
    });
    qp
}

fn next_outcome(told: &mpsc::Receiver<Outcome>) -> Outcome {
    let outcome = told.recv_timeout(Duration::from_secs(5));
    outcome.expect("an answer, in less time than a dial has")
}

fn assert_refused(to: QpName) {
    let (tell, told) = mpsc::channel();
    let _qp = stranger_asks_for(to, tell);
    let outcome = next_outcome(&told);
    let Err(ConnectError::Rejected { private_data }) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(private_data, b"WQP1\x02");
}

/// A queue pair whose peer comes by another way keeps no request: the one that waits is over, later ones are rejected.
#[test]
fn a_queue_pair_with_another_wire_keeps_no_request() {
    let side = Side::new(LocalMode::Off);
    let (number, qp) = side.qp();
    let to = name(&number, "127.0.0.1");
    let (tell, told) = mpsc::channel();
    let _both = [tell.clone(), tell].map(|tell| stranger_asks_for(to, tell));
    // The later of the two has replaced the other, and waits.
    assert!(next_outcome(&told).is_err());
    assert!(told.try_recv().is_err());
    side.broker.refuse(number.get());
    assert!(next_outcome(&told).is_err());
    assert_refused(to);
    // In its first state it may have a peer again.
    side.broker.leave(number.get());
    let (tell, told) = mpsc::channel();
    let _both = [tell.clone(), tell].map(|tell| stranger_asks_for(to, tell));
    assert!(next_outcome(&told).is_err());
    assert!(told.try_recv().is_err());
    drop((number, qp));
}

#[test]
fn nobody_comes() {
    let side = Side::new(LocalMode::Off);
    let ((na, qa), (nb, qb)) = (side.qp(), side.qp());
    let (ea, eb) = (name(&na, "127.0.0.1"), name(&nb, "127.0.0.1"));
    qa.post_recv(&[RecvWr::new(9)]).expect("room");
    join(&side, &qa, ea, eb);
    side.broker.set_patience(ea.num, Duration::from_millis(100));
    for id in [1, 2] {
        qa.post_send_one(SendWr::send(id).inline(b"hello"))
            .expect("kept");
    }
    let ends = [side.next(), side.next(), side.next()].map(|wc| (wc.wr_id, wc.status));
    assert_eq!(ends[0], (1, WcStatus::RetryExcErr));
    assert!(ends.contains(&(2, WcStatus::WrFlushErr)), "{ends:?}");
    assert!(ends.contains(&(9, WcStatus::WrFlushErr)), "{ends:?}");
    // A process that does not exist.
    drop((qa, na));
    let (nc, qc) = side.qp();
    let far = QpName {
        num: 1 << 8,
        ip: "127.0.0.1".parse().expect("an address"),
    };
    join(&side, &qc, name(&nc, "127.0.0.1"), far);
    side.broker
        .set_patience(nc.get(), Duration::from_millis(100));
    qc.post_send_one(SendWr::send(3)).expect("kept");
    assert_eq!(side.next().status, WcStatus::RetryExcErr);
    drop((nb, qb));
}

#[test]
fn a_queue_pair_told_another_peer_stays_alone() {
    let side = Side::new(LocalMode::Off);
    let qps = [side.qp(), side.qp(), side.qp()];
    let names = [0, 1, 2].map(|i| name(&qps[i].0, "127.0.0.1"));
    // 0 wants 2, and 2 wants 1: one of the two dials, and is rejected.
    for (from, to) in [(0, 2), (2, 1)] {
        join(&side, &qps[from].1, names[from], names[to]);
        side.broker
            .set_patience(names[from].num, Duration::from_millis(100));
        let wr = SendWr::send(from as u64).inline(b"x");
        qps[from].1.post_send_one(wr).expect("kept");
    }
    let ends = [side.next(), side.next()];
    assert!(
        ends.iter().all(|wc| wc.status == WcStatus::RetryExcErr),
        "{ends:?}"
    );
}

/// As MPI libraries do for the messages of a process to itself.
#[test]
fn a_queue_pair_is_joined_to_itself() {
    for local in [LocalMode::Off, LocalMode::Require] {
        let side = Side::new(local);
        let number = side.broker.reserve().expect("a number");
        let init = QpInit {
            num: Some(number.get()),
            rnr: Rnr::Wait,
            quiet_end: true,
            remote_completion: true,
            ..QpInit::new(&side.cq, &side.cq)
        };
        let qp = Arc::new(side.pd.create_qp(&init).expect("a queue pair"));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = side.pd.alloc_mr(64, access).expect("a region");
        let own = name(&number, "127.0.0.1");
        qp.post_recv(&[RecvWr::new(7).sge(side.mr.whole())])
            .expect("room");
        join(&side, &qp, own, own);
        for text in [b"first", b"later"] {
            qp.post_send_one(SendWr::send(1).inline(text))
                .expect("kept");
        }
        side.expect_message(b"first");
        // The second one waits for its receive.
        assert_eq!(side.cq.poll(&mut [Wc::default()]), Ok(0));
        qp.post_recv(&[RecvWr::new(8).sge(side.mr.whole())])
            .expect("room");
        let wc = side.next();
        assert_eq!((wc.wr_id, wc.qp_num), (8, number.get()));
        assert_eq!(side.mr.to_vec(0, 5).expect("in bounds"), b"later");
        mr.write(0, b"one-sided").expect("in bounds");
        let write = SendWr::write(2, mr.remote(32)).sge(mr.sge(0, 9));
        let read = SendWr::read(3, mr.remote(32)).sge(mr.sge(16, 9));
        for wr in [write, read] {
            qp.post_send_one(wr.signaled()).expect("room");
            assert_eq!(side.next().status, WcStatus::Success);
        }
        assert_eq!(mr.to_vec(16, 9).expect("in bounds"), b"one-sided");
        qp.post_recv(&[RecvWr::new(9)]).expect("room");
        qp.to_error();
        let wc = side.next();
        assert_eq!((wc.wr_id, wc.status), (9, WcStatus::WrFlushErr));
        drop((qp, number));
        assert_eq!(side.cq.poll(&mut [Wc::default()]), Ok(0));
    }
}

#[test]
fn numbers_are_unlike_and_come_back() {
    let side = Side::new(LocalMode::Off);
    let numbers: Vec<_> = (0..600)
        .map(|_| side.broker.reserve().expect("a number"))
        .collect();
    let unlike: HashSet<u32> = numbers.iter().map(Number::get).collect();
    assert_eq!(unlike.len(), 600);
    assert!(unlike.iter().all(|&n| n < 1 << 24));
    let ports: HashSet<u32> = unlike.iter().map(|n| n >> 8).collect();
    assert_eq!(ports.len(), 3);
    drop(numbers);
    let again: HashSet<u32> = (0..600)
        .map(|_| side.broker.reserve().expect("a number"))
        .map(|n| n.get() >> 8)
        .collect();
    assert!(again.is_subset(&ports), "the listeners are used again");
}

/// A socket of the kind that finds peers of one host, with the name for this port. It does not listen.
fn bind_name(port: u16) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let name = format!("weft/1/any/{port}");
    net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(fd)
}

/// Both sides of a pair look at these names, so a number has its name from the start, also without shared memory. A port whose name is another process's
/// gives no numbers.
#[test]
fn nobody_else_has_the_name_of_a_number() {
    for (local, user) in [
        (LocalMode::Off, None),
        (LocalMode::Auto, Some(geteuid().as_raw())),
    ] {
        let device = Device::builder().local(local).numbers_with_ports(true);
        let device = device.open().expect("a device");
        let ports = device.ports_of_numbers().expect("a slot");
        let mut taken: HashMap<u16, OwnedFd> = ports
            .expect("it was asked for")
            .map(|port| (port, bind_name(port).expect("a free name")))
            .collect();
        let broker = Broker::new(&device);
        let refused = broker.reserve().map(|number| number.get());
        let refused = refused.expect_err("all names are taken");
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        let free = *taken.keys().next().expect("256 of them");
        taken.remove(&free);
        let number = broker.reserve().expect("a number");
        assert_eq!(number.get() >> 8, u32::from(free));
        let at = SocketAddr::from(([0, 0, 0, 0], free));
        assert_eq!(listening_user(at).expect("an answer"), user);
        let stranger = bind_name(free).expect_err("it is taken");
        assert_eq!(stranger.kind(), io::ErrorKind::AddrInUse);
    }
}

/// One dial for each [`Broker::join`]: a second one could reach a peer that has been reset since, which would take it for the next connection.
#[test]
fn a_queue_pair_dials_once() {
    const ROUNDS: u32 = 500;
    let door = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = door.local_addr().expect("its address");
    let named = |num| QpName { num, ip: at.ip() };
    let side = Side::new(LocalMode::Off);
    for num in 1..=ROUNDS {
        let qp = side.pd.create_qp(&QpInit::new(&side.cq, &side.cq));
        let qp = Arc::new(qp.expect("a queue pair"));
        // The smaller number dials.
        join(&side, &qp, named(num), named(u32::from(at.port()) << 8));
        // It gets no answer, and no end.
        let dial = door.accept().expect("its dial");
        side.broker.leave(num);
        qp.to_error();
        drop(dial);
    }
    let last = TcpStream::connect(at).expect("a connection");
    let last = last.local_addr().expect("its address");
    let more = std::iter::repeat_with(|| door.accept().expect("a connection").1);
    assert_eq!(more.take_while(|from| *from != last).count(), 0);
}

#[test]
fn gids_are_addresses() {
    for text in ["192.0.2.1", "2001:db8::1", "::1", "127.0.0.1"] {
        let ip: IpAddr = text.parse().expect("an address");
        assert_eq!(ip_of(gid_of(ip)), ip);
    }
}

/// More queue pairs, with waiting sends, are joined at once than connections can be in start-up: none is rejected for good, and no send times out because of a
/// peer that is only busy.
#[test]
fn very_many_meet_at_once() {
    const PAIRS: usize = 1100;
    let room = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if room < 12 * PAIRS as u64 {
        println!("skipped: {room} descriptors are too few");
        return;
    }
    let (one, other) = (Side::new(LocalMode::Auto), Side::new(LocalMode::Auto));
    let queue = |side: &Side| side.pd.device().create_cq(PAIRS as u32, None);
    let done = queue(&one).expect("a queue");
    let mut pairs = Vec::new();
    for id in 0..PAIRS {
        let make = |side: &Side, cq: &Cq| {
            let number = side.broker.reserve().expect("a number");
            let init = QpInit {
                num: Some(number.get()),
                max_send_wr: 1,
                max_recv_wr: 1,
                rnr: Rnr::Wait,
                ..QpInit::new(cq, &side.cq)
            };
            let qp = side.pd.create_qp(&init).expect("a queue pair");
            (number, Arc::new(qp))
        };
        let ((n1, q1), (n2, q2)) = (make(&one, &done), make(&other, &other.cq));
        let (e1, e2) = (name(&n1, "127.0.0.1"), name(&n2, "127.0.0.1"));
        join(&one, &q1, e1, e2);
        one.broker.set_patience(n1.get(), Duration::from_secs(3));
        q1.post_send_one(SendWr::send(id as u64).signaled())
            .expect("kept");
        pairs.push((n1, q1, n2, q2, e1, e2));
    }
    for (_, _, _, q2, e1, e2) in &pairs {
        join(&other, q2, *e2, *e1);
    }
    let mut sent = HashSet::new();
    let mut wcs = [Wc::default(); 64];
    while sent.len() < PAIRS {
        let n = done.wait(&mut wcs, LONG).expect("no overrun");
        assert!(n > 0, "{} of {PAIRS} within the time", sent.len());
        for wc in &wcs[..n] {
            assert_eq!(wc.status, WcStatus::Success, "{}", wc.wr_id);
            assert!(sent.insert(wc.wr_id));
        }
    }
}
