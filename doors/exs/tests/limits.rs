//! Time limits, closes and deletions during operations, with peers that make them difficult.

use crate::common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, aside, asleep, context, events, file_of, listener, pair, recv_limit, send_limit,
    until, whole,
};
use crate::raw::{greet, heard, hello, say};
use weft_exs::{
    Context, Design, Errno, EventKind, Kind, Memory, Queue, Ready, RecvFlags, Region, Sink, Socket,
};
use weft_verbs::cm::Connection;
use weft_verbs::ext::CqExt;
use weft_verbs::{Access, Cq, Device, LocalMode, Mr, Pd, RemoteAddr, SendWr, Wc};
use weft_wire::exs::{Body, Hello, Imm, Kind as HelloKind, Packet, Remote, Transfer};

/// Verbs objects for a peer that is not a socket.
fn verbs() -> (Pd, Cq) {
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(4096, None).unwrap();
    (pd, cq)
}

/// A stream socket connected to by such a peer with this greeting, and the peer's objects.
fn meets(pd: &Pd, cq: &Cq, hello: &Hello) -> (Context, Socket, (Connection, Mr)) {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |_| ());
    let peer = greet(&listener, pd, cq, hello);
    let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
    (context, socket, peer)
}

/// The engine behind this queue stops for `time` after its first completion; the receiver signals that completion.
fn sticks(cq: &Cq, time: Duration) -> Receiver<()> {
    let (tell, told) = channel();
    cq.set_hook(move || {
        let _ = tell.send(());
        std::thread::sleep(time);
    });
    told
}

/// A proxy that limits data from its client to `rate` bytes per second. Returns its address.
fn slow(to: SocketAddr, rate: usize) -> SocketAddr {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = proxy.local_addr().unwrap();
    std::thread::spawn(move || {
        let (near, _) = proxy.accept().unwrap();
        let far = TcpStream::connect(to).unwrap();
        near.set_nodelay(true).unwrap();
        far.set_nodelay(true).unwrap();
        let (mut back, mut out) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back, &mut out);
            let _ = out.shutdown(std::net::Shutdown::Write);
        });
        let (mut near, mut far) = (near, far);
        let mut room = vec![0; (rate / 50).max(1)];
        let begun = Instant::now();
        let mut moved = 0;
        // The greeting is passed on at once.
        while let Ok(n @ 1..) = near.read(&mut room) {
            moved += n;
            let due = Duration::from_secs_f64(moved as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
            if far.write_all(&room[..n]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(std::net::Shutdown::Write);
    });
    at
}

fn slow_pair(rate: usize) -> (Context, Socket, Socket) {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |_| ());
    let a = Socket::new(&context, false, Kind::Stream).unwrap();
    a.connect_wait(slow(listener.local_addr().unwrap(), rate))
        .unwrap();
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    (context, a, b)
}

/// The time limit of a receive expires while a correct peer delivers its data slowly.
#[test]
fn a_time_limit_does_not_cost_the_connection_to_a_slow_peer() {
    let (context, a, b) = slow_pair(200_000);
    recv_limit(&b, 500);
    let len = 2 << 20;
    let to = Region::alloc(&context, len).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    b.recv(to.whole(), RecvFlags::WAITALL, queue.sink(1))
        .unwrap();
    std::thread::sleep(Duration::from_millis(200));
    a.send(Memory::from(vec![1; len]), Sink::Nobody).unwrap();
    let mut out = Vec::new();
    queue
        .dequeue(&mut out, 1, 1, Some(Duration::from_secs(20)))
        .unwrap();
    let end = out.pop().map(|e| (e.result, e.bytes));
    b.set_options(|o| o.recv_timeout = None).unwrap();
    assert_eq!(b.take_error(), None, "after {end:?} the connection is over");
}

/// A close during a long send on a slow link: bytes move all the time.
#[test]
#[ignore = "35 s, most of them asleep"]
fn a_closed_socket_goes_on_as_long_as_bytes_move() {
    let (context, a, b) = slow_pair(1_000_000);
    let len = 48 << 20;
    let to = Region::alloc(&context, len).unwrap();
    let reader = std::thread::spawn(move || b.recv_wait(&to.whole(), RecvFlags::WAITALL));
    std::thread::sleep(Duration::from_millis(300));
    let queue = Queue::new(&context, 8).unwrap();
    a.send(Memory::from(vec![1; len]), queue.sink(1)).unwrap();
    a.close(Sink::Nobody).unwrap();
    let got = reader.join().unwrap();
    assert_eq!(got, Ok(len), "sent: {:?}", events(&queue, 1));
}

/// "`guard` is dropped when the end has been reported".
#[test]
fn a_guard_outlives_the_call_that_tells_the_end() {
    struct Guard(Arc<AtomicBool>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (_context, a, b) = pair(LocalMode::Off);
    let gone = Arc::new(AtomicBool::new(false));
    let (tell, told) = channel();
    let seen = Arc::clone(&gone);
    let sink = Sink::call(move |_| tell.send(seen.load(Ordering::SeqCst)).unwrap());
    a.close_guarded(sink, Box::new(Guard(gone))).unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false), "dropped before");
    drop(b);
}

/// "Receives and polls that are outstanding end with `ECANCELED`", also during a file send.
#[test]
fn receives_end_with_a_close_behind_a_file() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    let file = file_of(&vec![7; 8 << 20]);
    a.send_file(whole(&file), Sink::Nobody).unwrap();
    a.recv(Memory::from(vec![0; 8]), RecvFlags::empty(), queue.sink(2))
        .unwrap();
    a.close(Sink::Nobody).unwrap();
    let ended = events(&queue, 1).pop().map(|e| e.result);
    assert_eq!(ended, Some(Err(Errno::CANCELED)), "no event in 5 s");
    drop(b);
}

/// Bytes that a blocking receive got before a silent peer lost the connection.
#[test]
fn bytes_that_came_are_told_when_the_peer_falls_silent() {
    let (pd, cq) = verbs();
    let (context, b, (conn, sink)) = meets(&pd, &cq, &hello());
    recv_limit(&b, 500);
    let to = Region::alloc(&context, 1 << 16).unwrap();
    let told = aside(move || b.recv_wait(&to.whole(), RecvFlags::WAITALL));
    let mut wcs = vec![Wc::default(); 1];
    let end = Instant::now() + PATIENCE;
    let wc = loop {
        assert!(Instant::now() < end);
        if cq.poll(&mut wcs).unwrap() == 1 {
            break wcs[0];
        }
    };
    let message = heard(&sink, &wc);
    let Body::Advert(advert) = message.body else {
        panic!("{message:?}");
    };
    let from = pd.reg_mr(vec![5; 100], Access::LOCAL_WRITE).unwrap();
    let imm = Imm {
        transfer: Transfer::Direct,
        credits: 0,
        len: 100,
    };
    let remote = RemoteAddr {
        addr: advert.memory.addr,
        rkey: advert.memory.rkey,
    };
    let wr = SendWr::write_imm(1, remote, imm.encode()).sge(from.sge(0, 100));
    conn.qp.post_send(&[wr]).unwrap();
    let end = told.recv_timeout(Duration::from_secs(8));
    assert_eq!(end, Ok(Ok(100)), "100 bytes are in its memory");
}

/// A close with a long receive outstanding, and data of both ends in flight.
#[test]
fn what_was_sent_before_a_close_arrives_though_a_receive_was_outstanding() {
    let (context, a, b) = pair(LocalMode::Off);
    let len = 4 << 20;
    a.recv(
        Memory::from(vec![0; 1 << 20]),
        RecvFlags::empty(),
        Sink::Nobody,
    )
    .unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    a.send(Memory::from(vec![1; len]), Sink::Nobody).unwrap();
    a.close(queue.sink(1)).unwrap();
    b.send(Memory::from(vec![2; 100_000]), queue.sink(2))
        .unwrap();
    let to = Region::alloc(&context, len).unwrap();
    let got = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
    let told: Vec<_> = events(&queue, 2)
        .iter()
        .map(|e| (e.kind, e.result))
        .collect();
    assert_eq!(got, Ok(len), "{told:?} {:?}", EventKind::Close);
}

/// A blocking send with a time limit, to a peer that reads nothing from its TCP connection.
#[test]
fn a_time_limit_holds_against_a_peer_that_takes_nothing() {
    let (pd, cq) = verbs();
    let stuck = sticks(&cq, Duration::from_secs(25));
    let len = 64 << 20;
    let ring = pd
        .alloc_mr(len, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    let hello = Hello {
        ring: Some(Remote {
            addr: ring.addr(),
            rkey: ring.rkey(),
            len: len as u32,
        }),
        ..hello()
    };
    let (_context, a, (conn, sink)) = meets(&pd, &cq, &hello);
    a.send(Memory::from(vec![1; 8]), Sink::Nobody).unwrap();
    stuck.recv_timeout(PATIENCE).unwrap();
    send_limit(&a, 200);
    let told = aside(move || a.send_wait(Memory::from(vec![1; 48 << 20])));
    let ended = told.recv_timeout(Duration::from_secs(10));
    assert!(ended.is_ok(), "200 ms are up for 10 s");
    std::mem::forget((conn, ring, sink, cq));
}

/// The time limit of a receive whose message is being read from a peer that does not serve the read.
#[test]
fn a_time_limit_holds_while_a_message_is_read() {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::SeqPacket, |o| o.design = Design::Source);
    let (pd, cq) = verbs();
    let stuck = sticks(&cq, Duration::from_secs(20));
    let hello = Hello {
        kind: HelloKind::SeqPacket(Design::Source),
        ..hello()
    };
    let (conn, sink) = greet(&listener, &pd, &cq, &hello);
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    b.send(Memory::from(vec![1; 8]), Sink::Nobody).unwrap();
    stuck.recv_timeout(PATIENCE).unwrap();
    let from = pd
        .alloc_mr(100_000, Access::LOCAL_WRITE | Access::REMOTE_READ)
        .unwrap();
    let source = Packet {
        index: 0,
        addr: from.addr(),
        rkey: from.rkey(),
        len: 100_000,
    };
    say(&conn.qp, 0, Body::Source(source));
    until("there is a message", || b.ready().contains(Ready::IN));
    recv_limit(&b, 200);
    let queue = Queue::new(&context, 8).unwrap();
    let to = Region::alloc(&context, 100_000).unwrap();
    b.recv(to.whole(), RecvFlags::empty(), queue.sink(1))
        .unwrap();
    let mut out = Vec::new();
    let _ = queue.dequeue(&mut out, 1, 1, Some(Duration::from_secs(10)));
    assert_eq!(
        out.len(),
        1,
        "200 ms, and the 3 s of a peer, are up for long"
    );
    std::mem::forget((conn, from, sink, cq));
}

/// As on the manual page of `exs_close`.
#[test]
fn a_poll_ends_with_ecanceled_when_its_socket_is_closed() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.poll(Ready::IN, queue.sink(1)).unwrap();
    a.close(Sink::Nobody).unwrap();
    let ended = events(&queue, 1).pop().map(|e| e.result);
    assert_eq!(ended, Some(Err(Errno::CANCELED)));
    drop(b);
}

/// `shutdown(SHUT_RD)`, while another thread waits for a silent peer.
#[test]
fn a_shutdown_ends_a_blocking_receive_from_a_silent_peer() {
    let (pd, cq) = verbs();
    let (context, b, _peer) = meets(&pd, &cq, &hello());
    let to = Region::alloc(&context, 1 << 16).unwrap();
    let receiver = b.clone();
    let told = asleep(move || receiver.recv_wait(&to.whole(), RecvFlags::empty()));
    let queue = Queue::new(&context, 1).unwrap();
    b.poll(Ready::IN, queue.sink(1)).unwrap();
    b.stop_waiting().unwrap();
    assert!(told.recv_timeout(2 * PATIENCE).is_ok(), "it waits on");
    assert_eq!(events(&queue, 1)[0].ready, Ready::IN);
}

/// Two threads take events and one deletes the queue: each event is either taken, or reported as dropped.
#[test]
fn no_event_is_lost_between_takers_and_a_delete() {
    let (context, a, b) = pair(LocalMode::Off);
    let drain = std::thread::spawn(move || {
        let to = Region::alloc(&context, 1 << 16).unwrap();
        while matches!(b.recv_wait(&to.whole(), RecvFlags::empty()), Ok(1..)) {}
    });
    let context = self::context(LocalMode::Off);
    let mut lost = 0;
    let rounds = 1000;
    for round in 0..rounds {
        let queue = Queue::new(&context, 8).unwrap();
        let unheard = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&unheard);
        queue.on_unheard(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        });
        let ready = Arc::new(AtomicUsize::new(0));
        let (first, its) = (queue.clone(), Arc::clone(&ready));
        let first = std::thread::spawn(move || {
            its.fetch_add(1, Ordering::SeqCst);
            let mut out = Vec::new();
            let _ = first.dequeue(&mut out, 2, 2, None);
            out.len()
        });
        while ready.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        for token in 0..2 {
            a.send(Memory::from(vec![1; 8]), queue.sink(token)).unwrap();
        }
        let end = Instant::now() + Duration::from_micros(round % 40);
        while Instant::now() < end {}
        // Another thread may be faster.
        let mut out = Vec::new();
        let _ = queue.dequeue(&mut out, 1, 0, Some(Duration::ZERO));
        while queue.outstanding() != 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(200));
        queue.delete();
        let taken = out.len() + first.join().unwrap();
        lost += usize::from(taken + unheard.load(Ordering::SeqCst) != 2);
    }
    a.close(Sink::Nobody).unwrap();
    drain.join().unwrap();
    assert_eq!(lost, 0, "of {rounds}");
}

/// A peer that accepts "small packets" of any length does not make us copy everything that the program sends.
#[test]
fn a_peer_does_not_say_how_much_is_copied() {
    if !common::alone("limits::a_peer_does_not_say_how_much_is_copied") {
        return;
    }
    let (pd, cq) = verbs();
    let stuck = sticks(&cq, Duration::from_secs(10));
    let hello = Hello {
        small: u32::MAX,
        ..hello()
    };
    let (context, a, (conn, sink)) = meets(&pd, &cq, &hello);
    a.send(Memory::from(vec![1; 8]), Sink::Nobody).unwrap();
    stuck.recv_timeout(PATIENCE).unwrap();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
        let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib >> 10
    };
    // One piece of registered memory is sent repeatedly: asynchronously, and without a copy.
    let region = Region::alloc(&context, 16 << 20).unwrap();
    region.write(0, &vec![1; 16 << 20]).unwrap();
    let before = resident();
    for _ in 0..20 {
        a.send(region.whole(), Sink::Nobody).unwrap();
    }
    let more = resident() - before;
    std::mem::forget((conn, sink, cq, a));
    assert!(
        more < 100,
        "{more} MiB of copies, as many as the peer wishes"
    );
}
