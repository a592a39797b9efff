//! Datagram queue pairs of one host and user, which share memory: docs/spec/dgram.md, "Between processes of one host".

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use weft_conformance::bed::Rng;
use weft_conformance::twin::again;
use weft_conformance::waits::{PATIENCE, until};
use weft_mem::SendList;
use weft_ring::{End, Front, Role, Segment};
use weft_sys::memfd::{self, Mapping};
use weft_sys::udp::UdpSocket;
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, diag, poll_fds};
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, Pd, RecvWr, SendOp, SendWr, UdDest, UdInit, UdPort, UdQp,
    UdReliable, Wc, WcStatus,
};
use weft_wire::dgram::{Header, seal};
use weft_wire::local::{MAX_LEN, Message};

const QKEY: u32 = 0x1111_1111;
const HERE: &str = "127.0.0.1:0";
const ROOM: usize = 256;

/// A process, or its equivalent.
struct Side {
    cq: Cq,
    port: UdPort,
    qp: UdQp,
    mr: Mr,
    _pd: Pd,
    _device: Device,
}

impl Side {
    fn with(mode: LocalMode, change: impl FnOnce(&mut UdInit)) -> Side {
        let device = Device::builder().local(mode).open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(8192, None).expect("a queue");
        let port = device.bind_ud(HERE.parse().expect("an address"));
        let port = port.expect("a port");
        let mut init = UdInit {
            max_send_wr: 1024,
            max_recv_wr: 1024,
            max_inline: 4096,
            ..UdInit::new(&port, QKEY, &cq, &cq)
        };
        change(&mut init);
        Side {
            qp: pd.create_ud_qp(&init).expect("a queue pair"),
            mr: pd
                .alloc_mr(ROOM * 1024, Access::LOCAL_WRITE)
                .expect("a region"),
            cq,
            port,
            _pd: pd,
            _device: device,
        }
    }

    fn new() -> Side {
        Side::with(LocalMode::Auto, |_| {})
    }

    fn dest(&self) -> UdDest {
        dest(self.port.local_addr(), self.qp.num())
    }

    fn recv(&self, id: u64) {
        let wr = RecvWr::new(id).sge(self.mr.sge(id as usize * ROOM, ROOM));
        self.qp.post_recv(&[wr]).expect("a receive");
    }

    fn recv_many(&self) {
        (0..64).for_each(|id| self.recv(id));
    }

    fn send(&self, bytes: &[u8], to: &UdDest) {
        let wr = SendWr::new(0, SendOp::Send).inline(bytes);
        self.qp.post_send(&wr, to).expect("posted");
    }

    fn next(&self, spin: bool) -> Wc {
        let start = Instant::now();
        let mut wc = [Wc::default()];
        loop {
            let n = if spin {
                self.cq.poll(&mut wc)
            } else {
                self.cq.wait(&mut wc, Some(PATIENCE))
            };
            if n.expect("no overrun") == 1 {
                return wc[0];
            }
            assert!(start.elapsed() < PATIENCE, "nothing within the time");
        }
    }

    fn bytes(&self, wc: &Wc) -> Vec<u8> {
        let at = wc.wr_id as usize * ROOM;
        self.mr.to_vec(at, wc.byte_len as usize).expect("in bounds")
    }

    /// Datagrams through shared memory, sent and received, with all peers.
    fn shared(&self) -> (u64, u64) {
        let peers = self.port.local_peers();
        let sum = |(s, r), peer: &weft_verbs::UdLocalPeer| (s + peer.sent, r + peer.received);
        peers.iter().fold((0, 0), sum)
    }

    /// Waits until messages to that address, which echoes each, go through shared memory both ways.
    fn meet(&self, to: &UdDest) {
        let start = Instant::now();
        while self.shared().0 < 4 || self.shared().1 < 4 {
            assert!(start.elapsed() < PATIENCE, "{:?}", self.port.local_peers());
            self.recv(0);
            self.send(b"?", to);
            assert_eq!(self.next(false).status, WcStatus::Success);
        }
    }
}

fn dest(addr: SocketAddr, qp_num: u32) -> UdDest {
    UdDest {
        addr,
        qp_num,
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    }
}

/// Sends each message back to its sender, as long as `wanted` returns true.
fn echo(side: &Side, wanted: impl Fn() -> bool) {
    while wanted() {
        let mut wc = [Wc::default()];
        let wait = Some(Duration::from_millis(20));
        if side.cq.wait(&mut wc, wait).expect("no overrun") == 1 {
            let source = wc[0].source.expect("a source");
            let bytes = side.bytes(&wc[0]);
            side.recv(wc[0].wr_id);
            side.send(&bytes, &dest(source.addr, source.qp_num));
        }
    }
}

/// A separate process that echoes.
struct Twin {
    child: Child,
    _input: ChildStdin,
    _output: BufReader<ChildStdout>,
    to: UdDest,
}

impl Twin {
    fn start() -> Twin {
        let mut command = again(&[], "datagrams_local::twin").expect("this program");
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.env("WEFT_ECHO", "1").spawn().expect("a process");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.starts_with('@') {
            line.clear();
            assert!(output.read_line(&mut line).expect("a line") > 0, "it ended");
        }
        let (addr, num) = line[1..].trim().split_once(' ').expect("two words");
        Twin {
            to: dest(
                addr.parse().expect("an address"),
                num.parse().expect("a number"),
            ),
            _input: child.stdin.take().expect("piped"),
            _output: output,
            child,
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a process");
        kill_process(pid, signal).expect("a process of ours");
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "another process of the others"]
fn twin() {
    if std::env::var_os("WEFT_ECHO").is_none() {
        return;
    }
    let side = Side::new();
    side.recv_many();
    println!("@{} {}", side.port.local_addr(), side.qp.num());
    std::io::stdout().flush().expect("a pipe");
    let (tell, over) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        drop(tell);
    });
    let wanted = || over.try_recv() == Err(mpsc::TryRecvError::Empty);
    echo(&side, wanted);
}

#[test]
fn two_processes_share_memory() {
    let (side, twin) = (Side::new(), Twin::start());
    side.meet(&twin.to);
    let before = side.shared();
    for round in 0..2000_u32 {
        // Asleep, and by polling alone.
        let text = format!("message {round}").repeat(1 + round as usize % 10);
        side.recv(1);
        side.send(text.as_bytes(), &twin.to);
        let wc = side.next(round % 2 == 0);
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::Success));
        assert_eq!(side.bytes(&wc), text.as_bytes());
        let source = wc.source.expect("a source");
        assert_eq!((source.addr, source.qp_num), (twin.to.addr, twin.to.qp_num));
    }
    assert_eq!(side.shared().0 - before.0, 2000);
    // An earlier answer may come late, and the latest count after its completion.
    until("the messages in shared memory", || {
        side.shared().1 - before.1 >= 2000
    });
    assert_eq!(side.qp.counters().dropped + side.qp.counters().no_recv, 0);
}

#[test]
fn who_keeps_to_himself_is_sent_to_by_the_kernel() {
    let off = Side::with(LocalMode::Off, |_| {});
    let on = Side::new();
    off.recv_many();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| echo(&off, || !done.load(Ordering::Relaxed)));
        for _ in 0..200 {
            on.recv(0);
            on.send(b"x", &off.dest());
            assert_eq!(on.next(false).status, WcStatus::Success);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(on.port.local_peers().is_empty() && off.port.local_peers().is_empty());
}

#[test]
fn what_finds_no_receive_is_dropped_and_counted() {
    let (side, twin) = (Side::new(), Twin::start());
    side.meet(&twin.to);
    // Echoes come back, and find no receive.
    for _ in 0..50 {
        side.send(b"x", &twin.to);
    }
    until("the counter no_recv", || side.qp.counters().no_recv == 50);
    side.recv(3);
    side.send(b"y", &twin.to);
    assert_eq!(side.next(false).wr_id, 3);
}

#[test]
fn a_peer_that_is_killed_is_sent_to_by_the_kernel_and_one_in_its_place_is_met() {
    let (side, twin) = (Side::new(), Twin::start());
    side.meet(&twin.to);
    let to = twin.to;
    drop(twin);
    until("no peer is left", || side.port.local_peers().is_empty());
    for _ in 0..100 {
        side.send(b"x", &to);
    }
    until("all sends are done", || {
        let _ = side.cq.poll(&mut [Wc::default()]);
        side.qp.outstanding() == 0
    });
    let next = Twin::start();
    side.meet(&next.to);
}

#[test]
fn a_peer_that_closes_just_after_a_poll_is_removed_without_another_poll() {
    let side = Side::new();
    for _ in 0..20 {
        let other = Side::new();
        other.recv_many();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(&other, || !done.load(Ordering::Relaxed)));
            side.meet(&other.dest());
            done.store(true, Ordering::Relaxed);
        });
        let _ = side.cq.poll(&mut [Wc::default()]);
        drop(other);
        until("no peer is left", || side.port.local_peers().is_empty());
    }
}

#[test]
fn a_peer_that_is_stopped_holds_nobody_up() {
    let (side, twin, other) = (Side::new(), Twin::start(), Twin::start());
    side.meet(&twin.to);
    side.meet(&other.to);
    twin.signal(Signal::STOP);
    let start = Instant::now();
    // Eight times what the ring holds.
    for _ in 0..8000 {
        while side.qp.outstanding() >= 1000 {
            let _ = side.cq.poll(&mut [Wc::default()]);
            assert!(start.elapsed() < PATIENCE, "it waits");
        }
        side.send(&[7; 200], &twin.to);
    }
    let lost = || {
        let peers = side.port.local_peers();
        peers.iter().map(|peer| peer.lost).sum::<u64>()
    };
    until("3000 are lost", || {
        side.qp.outstanding() == 0 && lost() > 3000
    });
    side.recv(5);
    side.send(b"on we go", &other.to);
    let wc = side.next(false);
    assert_eq!((wc.wr_id, side.bytes(&wc)), (5, b"on we go".to_vec()));
    // There are more echoes than receives here, and they arrive.
    twin.signal(Signal::CONT);
    until("the counter no_recv", || side.qp.counters().no_recv > 0);
}

#[test]
fn the_reliable_mode_keeps_its_promises() {
    const COUNT: u64 = 20_000;
    let reliable = |init: &mut UdInit| init.reliable = Some(UdReliable::default());
    let (a, b) = (
        Side::with(LocalMode::Auto, reliable),
        Side::with(LocalMode::Auto, reliable),
    );
    let to = b.dest();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for id in 0..COUNT {
                let start = Instant::now();
                while a.qp.outstanding() >= 512 {
                    let mut wc = [Wc::default()];
                    let wait = Some(Duration::from_millis(100));
                    let _ = a.cq.wait(&mut wc, wait);
                    assert!(start.elapsed() < PATIENCE, "no acknowledgement");
                }
                let wr = SendWr::new(id, SendOp::Send).inline(&id.to_le_bytes());
                a.qp.post_send(&wr.signaled(), &to).expect("posted");
            }
        });
        for id in 0..COUNT {
            // Mostly too late: the sender must wait.
            b.recv(id % 8);
            let wc = b.next(id % 3 == 0);
            assert_eq!((wc.wr_id, wc.status), (id % 8, WcStatus::Success));
            assert_eq!(b.bytes(&wc), id.to_le_bytes(), "in order, and once");
        }
    });
    assert!(b.shared().1 > COUNT / 2, "{:?}", b.port.local_peers());
}

// ---- peers that break the rules

/// A program of the same user that knows the protocol.
struct Raw {
    socket: UdpSocket,
    addr: SocketAddr,
}

impl Raw {
    fn new() -> Raw {
        let socket = UdpSocket::bind(HERE.parse().expect("an address"), 1 << 16);
        let socket = socket.expect("a socket");
        let addr = socket.local_addr().expect("an address");
        Raw { socket, addr }
    }

    /// The victim's answer to an offer.
    fn offer(&self, to: SocketAddr, change: impl FnOnce(&mut Message)) -> Option<OwnedFd> {
        let victim = diag::udp_receiver(self.addr, to).expect("a kernel that tells");
        let peer = victim.expect("a victim").cookie;
        let name = format!("weft/1/udp/{peer:016x}");
        let wire = unix::connect(Name::Abstract(name.as_bytes())).expect("a door");
        let mut message = Message::Offer {
            own: self.socket.cookie().expect("a number"),
            peer,
            from: self.addr,
            to,
        };
        change(&mut message);
        let mut bytes = Vec::new();
        message.emit(&mut bytes);
        unix::send_signed(&wire, &bytes, &[]).expect("sent");
        poll_fds(&[(wire.as_fd(), Interest::READ)], Some(PATIENCE)).expect("an answer");
        let mut answer = [0; MAX_LEN];
        let (len, mut fds) = unix::recv_with_fds(&wire, &mut answer, 1).ok()??;
        assert_eq!(Message::parse(&answer[..len]), Some(Message::Accept));
        // It stays open as long as the test runs.
        std::mem::forget(wire);
        fds.pop()
    }
}

fn datagram(to: &UdDest, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        dst_qp: to.qp_num,
        src_qp: 77,
        qkey: QKEY,
        msn: 1,
        solicited: false,
        imm: None,
    };
    let mut out = Vec::new();
    header.emit(&mut out);
    out.extend_from_slice(payload);
    seal(&mut out);
    out
}

fn push(end: &End, bytes: &[u8]) {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    assert_eq!(end.push(&list, 0, bytes.len()), Ok(bytes.len()));
    let _ = end.publish();
}

/// The victim still answers another peer.
fn goes_on(victim: &Side, honest: &Side) {
    victim.recv(9);
    honest.send(b"honest", &victim.dest());
    let wc = victim.next(false);
    assert_eq!((wc.wr_id, victim.bytes(&wc)), (9, b"honest".to_vec()));
}

#[test]
fn nobody_comes_under_an_address_that_is_not_his() {
    let (victim, other, raw) = (Side::new(), Raw::new(), Raw::new());
    let to = victim.port.local_addr();
    let cookie = raw.socket.cookie().expect("a number");
    type Lie<'a> = (&'a str, Box<dyn Fn(&mut Message) + 'a>);
    let lies: [Lie<'_>; 5] = [
        (
            "another's address",
            Box::new(|m| {
                if let Message::Offer { from, .. } = m {
                    *from = other.addr;
                }
            }),
        ),
        (
            "nobody's address",
            Box::new(|m| {
                if let Message::Offer { from, .. } = m {
                    from.set_port(1);
                }
            }),
        ),
        (
            "another host's",
            Box::new(|m| {
                if let Message::Offer { from, .. } = m {
                    from.set_ip([192, 0, 2, 1].into());
                }
            }),
        ),
        (
            "another socket",
            Box::new(|m| {
                if let Message::Offer { own, .. } = m {
                    *own += 1;
                }
            }),
        ),
        (
            "for another socket",
            Box::new(|m| {
                if let Message::Offer { peer, .. } = m {
                    *peer = cookie;
                }
            }),
        ),
    ];
    for (what, lie) in lies {
        assert!(raw.offer(to, |m| lie(m)).is_none(), "{what}");
    }
    assert!(raw.offer(to, |m| *m = Message::Accept).is_none());
    assert!(
        raw.offer(to, |m| *m = Message::Decline("no".into()))
            .is_none()
    );
    assert!(victim.port.local_peers().is_empty());
    let fd = raw.offer(to, |_| {}).expect("the truth is accepted");
    let end = End::new(
        Segment::open(fd).expect("a segment").into(),
        Role::Responder,
    );
    until("the peer is known", || victim.port.local_peers().len() == 1);
    victim.recv(2);
    push(&end, &datagram(&victim.dest(), b"from memory"));
    let wc = victim.next(true);
    assert_eq!((wc.wr_id, victim.bytes(&wc)), (2, b"from memory".to_vec()));
    let source = wc.source.expect("a source");
    assert_eq!((source.addr, source.qp_num), (raw.addr, 77));
    goes_on(&victim, &Side::new());
}

#[test]
fn pipes_to_one_socket_have_a_limit() {
    let (victim, raw) = (Side::new(), Raw::new());
    let to = victim.port.local_addr();
    let given = (0..8).filter(|_| raw.offer(to, |_| {}).is_some()).count();
    assert_eq!(given, 2);
    goes_on(&victim, &Side::new());
}

#[test]
fn nonsense_in_the_memory_ends_that_pipe_and_no_other() {
    let (victim, twin) = (Side::new(), Twin::start());
    let honest = Side::new();
    victim.meet(&twin.to);
    let mut rng = Rng::new(7);
    for round in 0..40 {
        let raw = Raw::new();
        let to = victim.port.local_addr();
        let fd = raw.offer(to, |_| {}).expect("accepted");
        let len = memfd::check(&fd).expect("a sealed file") as usize;
        assert!(memfd::grow(&fd, 2 * len as u64).is_err());
        let there = |peer: &weft_verbs::UdLocalPeer| peer.addr == raw.addr;
        until("the peer is known", || {
            victim.port.local_peers().iter().any(there)
        });
        match round % 4 {
            // All of the ring, again and again while the victim reads.
            0 | 1 => {
                let map = Mapping::new(&fd, 0, len, true).expect("mapped");
                let file = std::fs::File::from(fd);
                for _ in 0..50 {
                    let bytes = rng.bytes(8192);
                    let at = rng.below(len - 8192) as u64;
                    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, at).expect("written");
                    let _ = victim.cq.poll(&mut [Wc::default()]);
                }
                drop(map);
            }
            // A record longer than any datagram.
            2 => {
                let end = End::new(
                    Segment::open(fd).expect("a segment").into(),
                    Role::Responder,
                );
                push(&end, &vec![0x57; 80_000]);
                until("the peer is forgotten", || {
                    let _ = victim.cq.poll(&mut [Wc::default()]);
                    !victim.port.local_peers().iter().any(there)
                });
            }
            // Records that are not datagrams.
            _ => {
                let end = End::new(
                    Segment::open(fd).expect("a segment").into(),
                    Role::Responder,
                );
                let before = victim.port.counters().malformed;
                for len in 1..100 {
                    let bytes = rng.bytes(len);
                    push(&end, &bytes);
                }
                until("malformed records are counted", || {
                    let _ = victim.cq.poll(&mut [Wc::default()]);
                    victim.port.counters().malformed >= before + 99
                });
                assert_ne!(end.front(), Ok(Front::Aborted));
            }
        }
        goes_on(&victim, &honest);
    }
    victim.meet(&twin.to);
    let before = victim.shared();
    victim.recv(0);
    victim.send(b"still", &twin.to);
    assert_eq!(victim.bytes(&victim.next(false)), b"still");
    assert!(victim.shared().0 > before.0, "the honest pipe is there");
}

#[test]
fn a_receiver_that_takes_nothing_holds_nobody_up() {
    let (victim, raw, other) = (Side::new(), Raw::new(), Twin::start());
    let fd = raw
        .offer(victim.port.local_addr(), |_| {})
        .expect("accepted");
    until("the peer is known", || victim.port.local_peers().len() == 1);
    let start = Instant::now();
    for _ in 0..2000 {
        while victim.qp.outstanding() >= 1000 {
            let _ = victim.cq.poll(&mut [Wc::default()]);
            assert!(start.elapsed() < PATIENCE, "it waits");
        }
        victim.send(&[1; 2048], &dest(raw.addr, 1));
    }
    until("all sends are done", || victim.qp.outstanding() == 0);
    victim.meet(&other.to);
    drop(fd);
}
