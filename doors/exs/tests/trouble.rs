//! Failures: hostile and dead peers, wrong states, cancelled and late operations, deleted queues.

use crate::raw;

use std::time::{Duration, Instant};

use crate::common::{PATIENCE, aside, context, events, listener, next_event, pair, recv_limit};

use crate::raw::{greet, hello};
use weft_exs::{
    Design, Errno, EventKind, Kind, Memory, Queue, Ready, RecvFlags, Region, Sink, Socket,
};
use weft_verbs::cm::{ConnParam, connect};
use weft_verbs::{Cq, Device, LocalMode, Pd, Qp, QpInit, SendWr, Wc};
use weft_wire::exs::{Body, Hello, Imm, Transfer};

const LOCALS: [LocalMode; 2] = [LocalMode::Require, LocalMode::Off];

fn owned(len: usize) -> Memory {
    Memory::from(vec![0; len])
}

/// A peer that uses verbs and may send anything.
struct Raw {
    qp: Qp,
    cq: Cq,
    _pd: Pd,
    hello: Hello,
}

fn raw_peer(local: LocalMode, to: &Socket) -> Raw {
    let device = Device::builder().local(local).open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(4096, None).unwrap();
    let (conn, sink) = greet(to, &pd, &cq, &hello());
    let hello = Hello::parse(&conn.private_data[..32]).unwrap();
    std::mem::forget(sink);
    Raw {
        qp: conn.qp,
        cq,
        _pd: pd,
        hello,
    }
}

impl Raw {
    fn say(&self, bytes: &[u8]) {
        self.qp
            .post_send_one(SendWr::send(0).inline(bytes))
            .unwrap();
    }
    fn message(&self, credits: u16, body: Body) {
        raw::say(&self.qp, credits, body);
    }
    fn imm(&self, imm: Imm) {
        let ring = self.hello.ring.unwrap();
        let to = weft_verbs::RemoteAddr {
            addr: ring.addr,
            rkey: ring.rkey,
        };
        self.qp
            .post_send_one(SendWr::write_imm(0, to, imm.encode()))
            .unwrap();
    }
}

type Lie = fn(&Raw);

#[test]
fn peers_that_break_the_protocol_end_their_own_connection() {
    let lies: [(&str, Lie); 9] = [
        ("nothing", |raw| raw.say(&[])),
        ("junk", |raw| raw.say(&[0xff; 33])),
        ("credits that were never taken", |raw| {
            raw.message(u16::MAX, Body::Credit);
        }),
        ("an acknowledgement of nothing", |raw| {
            raw.message(0, Body::Ack { freed: 5 });
        }),
        ("a payload that is not there", |raw| {
            raw.say(&[3, 0, 0, 0, 0, 0, 0, 200, 1, 2]);
        }),
        ("data after the end", |raw| {
            raw.message(0, Body::Fin);
            raw.message(0, Body::Fin);
        }),
        ("a direct transfer without an advert", |raw| {
            raw.imm(Imm {
                transfer: Transfer::Direct,
                credits: 0,
                len: 1 << 30,
            });
        }),
        ("more than the buffer holds", |raw| {
            raw.imm(Imm {
                transfer: Transfer::Indirect,
                credits: 0,
                len: u32::MAX,
            });
        }),
        ("an answer to no question", |raw| {
            raw.message(0, Body::Retracted { seq: u64::MAX });
        }),
    ];
    for local in LOCALS {
        let context = context(local);
        let listener = listener(&context, Kind::Stream, |_| ());
        for (what, lie) in lies {
            let raw = raw_peer(local, &listener);
            let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
            let queue = Queue::new(&context, 8).unwrap();
            // Two receives: the second never gets data, but must end as well.
            for token in 0..2 {
                socket
                    .recv(owned(100_000), RecvFlags::WAITALL, queue.sink(token))
                    .unwrap();
            }
            lie(&raw);
            let mut got = events(&queue, 2);
            got.sort_by_key(|event| event.token);
            for (token, event) in (0..).zip(&got) {
                assert_eq!(event.token, token, "{what}");
                // In one of the cases the stream ends properly before the violation.
                let fair = matches!(event.result, Err(Errno::PROTO | Errno::CONNRESET) | Ok(0));
                assert!(fair, "{what}: {:?}", event.result);
                assert_eq!(event.bytes, 0, "{what}");
                assert_eq!(
                    event.memory.as_ref().unwrap().to_vec(),
                    vec![0; 100_000],
                    "{what}"
                );
            }
            // The second of two messages may still be in flight.
            let end = Instant::now() + PATIENCE;
            while !socket.ready().contains(Ready::HUP) && Instant::now() < end {
                std::thread::yield_now();
            }
            assert!(socket.ready().contains(Ready::HUP), "{what}");
            assert!(socket.send(owned(1), Sink::Nobody).is_err(), "{what}");
            let mut wcs = [Wc::default(); 64];
            let end = Instant::now() + PATIENCE;
            while raw.qp.state() != weft_verbs::QpState::Error && Instant::now() < end {
                let _ = raw
                    .cq
                    .wait(&mut wcs, Some(Duration::from_millis(50)))
                    .unwrap();
            }
            assert_eq!(
                raw.qp.state(),
                weft_verbs::QpState::Error,
                "{what}: the peer is told"
            );
        }
    }
}

#[test]
fn a_peer_that_is_no_socket_is_not_accepted() {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |_| ());
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64, None).unwrap();
    for private_data in [Vec::new(), b"hello".to_vec(), vec![0xff; 200]] {
        let param = ConnParam {
            private_data,
            ..ConnParam::default()
        };
        let addr = listener.local_addr().unwrap();
        assert!(connect(addr, &pd, &QpInit::new(&cq, &cq), &param).is_err());
    }
    // A connection for messages is refused by a stream listener.
    let other = Socket::new(&context, false, Kind::SeqPacket).unwrap();
    assert_eq!(
        other.connect_wait(listener.local_addr().unwrap()),
        Err(Errno::PROTOTYPE)
    );
    assert_eq!(
        listener
            .accept_wait(Some(Duration::from_millis(20)))
            .map(drop),
        Err(Errno::AGAIN)
    );
}

#[test]
fn a_peer_that_dies_ends_everything_once() {
    for local in LOCALS {
        let context = context(local);
        let listener = listener(&context, Kind::Stream, |_| ());
        let raw = raw_peer(local, &listener);
        let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
        let queue = Queue::new(&context, 16).unwrap();
        for token in 0..4 {
            socket
                .recv(owned(5000), RecvFlags::empty(), queue.sink(token))
                .unwrap();
            // The peer sends no adverts and has no buffer, so these wait.
            socket.send(owned(5000), queue.sink(10 + token)).unwrap();
        }
        raw.qp.to_error();
        let mut tokens: Vec<u64> = events(&queue, 8)
            .into_iter()
            .map(|event| {
                assert_eq!(event.result, Err(Errno::CONNRESET));
                event.token
            })
            .collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 10, 11, 12, 13]);
        assert_eq!(
            socket.recv_wait(
                &Region::alloc(&context, 8).unwrap().whole(),
                RecvFlags::empty()
            ),
            Err(Errno::CONNRESET)
        );
    }
}

#[test]
fn wrong_states() {
    let context = context(LocalMode::Off);
    let socket = Socket::new(&context, false, Kind::Stream).unwrap();
    assert_eq!(socket.send(owned(1), Sink::Nobody), Err(Errno::NOTCONN));
    assert_eq!(
        socket.recv(owned(1), RecvFlags::empty(), Sink::Nobody),
        Err(Errno::NOTCONN)
    );
    assert_eq!(socket.accept(Sink::Nobody), Err(Errno::INVAL));
    assert_eq!(socket.shutdown(), Err(Errno::NOTCONN));
    assert_eq!(socket.peer_addr(), Err(Errno::NOTCONN));
    assert_eq!(
        socket.bind("[::1]:0".parse().unwrap()),
        Err(Errno::AFNOSUPPORT)
    );
    assert_eq!(socket.set_options(|o| o.credits = 1), Err(Errno::INVAL));
    // No socket listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(socket.connect_wait(free), Err(Errno::CONNREFUSED));
    let listener = listener(&context, Kind::Stream, |_| ());
    let addr = listener.local_addr().unwrap();
    let second = Socket::new(&context, false, Kind::Stream).unwrap();
    assert_eq!(second.bind(addr), Err(Errno::ADDRINUSE));
    assert_eq!(listener.connect_wait(addr), Err(Errno::INVAL));
    // After the failure above another connect is possible.
    socket.connect_wait(addr).unwrap();
    assert_eq!(socket.connect_wait(addr), Err(Errno::ISCONN));
    assert_eq!(socket.set_options(|o| o.credits = 64), Err(Errno::ISCONN));
    socket.close(Sink::Nobody).unwrap();
    assert_eq!(socket.close(Sink::Nobody), Err(Errno::BADF));
    assert_eq!(socket.send(owned(1), Sink::Nobody), Err(Errno::BADF));
}

#[test]
fn a_listener_of_another_type_says_so() {
    for local in LOCALS {
        let context = context(local);
        let listener = listener(&context, Kind::Stream, |_| ());
        let addr = listener.local_addr().unwrap();
        let messages = Socket::new(&context, false, Kind::SeqPacket).unwrap();
        assert_eq!(messages.connect_wait(addr), Err(Errno::PROTOTYPE));

        let listener = Socket::new(&context, false, Kind::SeqPacket).unwrap();
        listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        listener.listen(1).unwrap();
        let other = Socket::new(&context, false, Kind::SeqPacket).unwrap();
        other.set_options(|o| o.design = Design::Source).unwrap();
        let addr = listener.local_addr().unwrap();
        assert_eq!(other.connect_wait(addr), Err(Errno::PROTOTYPE));
        // The socket can be used again.
        other.set_options(|o| o.design = Design::Advert).unwrap();
        other.connect_wait(addr).unwrap();
    }
}

#[test]
fn nothing_is_complete_at_once() {
    for local in LOCALS {
        let (context, a, b) = pair(local);
        let queue = Queue::new(&context, 4).unwrap();
        a.send(owned(0), queue.sink(1)).unwrap();
        b.recv(owned(0), RecvFlags::empty(), queue.sink(2)).unwrap();
        for event in events(&queue, 2) {
            assert_eq!(event.result, Ok(0));
        }
    }
}

#[test]
fn cancelled_and_late_operations() {
    for local in LOCALS {
        let (context, a, b) = pair(local);
        let queue = Queue::new(&context, 16).unwrap();
        for (token, len) in [(1, 100), (2, 50_000), (3, 50_000)] {
            a.recv(owned(len), RecvFlags::empty(), queue.sink(token))
                .unwrap();
        }
        assert_eq!(a.cancel(Some(2)), 1);
        assert_eq!(a.cancel(Some(77)), 0);
        let event = next_event(&queue);
        assert_eq!((event.token, event.result), (2, Err(Errno::CANCELED)));
        a.poll(Ready::IN, queue.sink(8)).unwrap();
        assert_eq!(a.cancel(Some(8)), 1);
        let event = next_event(&queue);
        assert_eq!(
            (event.kind, event.result),
            (EventKind::Poll, Err(Errno::CANCELED))
        );
        // The others continue, in order.
        let region = Region::alloc(&context, 60_000).unwrap();
        assert_eq!(b.send_wait(region.slice(0, 100).unwrap()), Ok(100));
        let event = next_event(&queue);
        assert_eq!((event.token, event.result), (1, Ok(100)));
        assert_eq!(b.send_wait(region.slice(0, 40_000).unwrap()), Ok(40_000));
        let event = next_event(&queue);
        assert_eq!((event.token, event.result), (3, Ok(40_000)));
        // A time limit that expires after some data has been received.
        recv_limit(&a, 30);
        a.recv(owned(5000), RecvFlags::WAITALL, queue.sink(4))
            .unwrap();
        a.recv(owned(5000), RecvFlags::empty(), queue.sink(5))
            .unwrap();
        assert_eq!(b.send_wait(region.slice(0, 10).unwrap()), Ok(10));
        for event in events(&queue, 2) {
            assert_eq!(event.result, Err(Errno::TIMEDOUT));
            if event.token == 4 && local == LocalMode::Off {
                assert!(event.bytes == 10 || event.bytes == 0);
            }
        }
        a.set_options(|o| o.recv_timeout = None).unwrap();
        // The connection still works.
        assert_eq!(b.send_wait(region.slice(0, 5000).unwrap()), Ok(5000));
        let mut got = 0;
        while got < 5000 {
            got += a.recv_wait(&region.whole(), RecvFlags::empty()).unwrap();
        }
    }
}

#[test]
fn queues_fill_up_and_go_away() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 3).unwrap();
    assert_eq!(Queue::new(&context, 0).map(drop), Err(Errno::INVAL));
    for token in 0..3 {
        a.recv(owned(10), RecvFlags::empty(), queue.sink(token))
            .unwrap();
    }
    let refused = a.recv(owned(10), RecvFlags::empty(), queue.sink(9));
    assert_eq!(refused, Err(Errno::AGAIN), "each operation needs a place");
    assert_eq!((queue.outstanding(), queue.waiting()), (3, 0));
    assert_eq!(queue.set_depth(2), Err(Errno::BUSY));
    queue.set_depth(4).unwrap();
    assert_eq!(
        queue.dequeue(&mut Vec::new(), 4, 5, None),
        Err(Errno::INVAL)
    );
    let start = Instant::now();
    let n = queue
        .dequeue(&mut Vec::new(), 4, 2, Some(Duration::from_millis(30)))
        .unwrap();
    assert_eq!(n, 0);
    assert!(start.elapsed() >= Duration::from_millis(30));
    // Several threads wait while it is deleted.
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let queue = queue.clone();
            std::thread::spawn(move || queue.dequeue(&mut Vec::new(), 4, 4, Some(PATIENCE)))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    queue.delete();
    for waiter in waiting {
        assert_eq!(waiter.join().unwrap(), Err(Errno::BADF));
    }
    assert!(start.elapsed() < PATIENCE / 2, "all are woken");
    assert_eq!(
        a.recv(owned(10), RecvFlags::empty(), queue.sink(9)),
        Err(Errno::BADF)
    );
    // The receives still exist and take data; their events are dropped.
    let region = Region::alloc(&context, 100).unwrap();
    for _ in 0..3 {
        assert_eq!(b.send_wait(region.slice(0, 10).unwrap()), Ok(10));
    }
    assert_eq!(b.send_wait(region.slice(0, 7).unwrap()), Ok(7));
    let after = a.recv_wait(&region.whole(), RecvFlags::empty()).unwrap();
    assert!(after <= 17 && after > 0);
}

#[test]
fn many_connections_at_one_queue() {
    for local in LOCALS {
        let context = context(local);
        let listener = listener(&context, Kind::Stream, |_| ());
        let queue = Queue::new(&context, 256).unwrap();
        let mut clients = Vec::new();
        let mut servers = Vec::new();
        for i in 0..20 {
            let client = Socket::new(&context, false, Kind::Stream).unwrap();
            client.connect_wait(listener.local_addr().unwrap()).unwrap();
            let server = listener.accept_wait(Some(PATIENCE)).unwrap();
            server
                .recv(owned(3000), RecvFlags::empty(), queue.sink(i))
                .unwrap();
            clients.push(client);
            servers.push(server);
        }
        let region = Region::alloc(&context, 3000).unwrap();
        let clients = std::thread::spawn(move || {
            for round in 0..10 {
                for client in &clients {
                    let len = 100 + round * 250;
                    assert_eq!(client.send_wait(region.slice(0, len).unwrap()), Ok(len));
                }
                // All threads are asleep by then.
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let mut total = 0;
        while total < 20 * (0..10).map(|round| 100 + round * 250).sum::<usize>() {
            for event in events(&queue, 1) {
                total += event.result.unwrap();
                let server = &servers[event.token as usize];
                server
                    .recv(
                        event.memory.unwrap(),
                        RecvFlags::empty(),
                        queue.sink(event.token),
                    )
                    .unwrap();
            }
        }
        clients.join().unwrap();
    }
}

#[test]
fn descriptors_in_epoll() {
    use rustix::event::{PollFd, PollFlags, poll};
    let readable = |fd: std::os::fd::BorrowedFd<'_>, wait: i64| {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        let wait = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: wait * 1_000_000,
        };
        poll(&mut fds, Some(&wait)).unwrap() == 1
    };
    for local in LOCALS {
        let context = context(local);
        let listener = listener(&context, Kind::Stream, |_| ());
        assert!(!readable(listener.as_fd(), 0));
        let a = Socket::new(&context, false, Kind::Stream).unwrap();
        a.connect_wait(listener.local_addr().unwrap()).unwrap();
        assert!(readable(listener.as_fd(), 999), "a connection waits");
        let b = listener.accept_wait(Some(PATIENCE)).unwrap();
        assert!(!readable(listener.as_fd(), 0));
        assert!(!readable(b.as_fd(), 0));
        let region = Region::alloc(&context, 100).unwrap();
        a.send_wait(region.whole()).unwrap();
        assert!(readable(b.as_fd(), 999), "data waits");
        assert_eq!(b.recv_wait(&region.whole(), RecvFlags::empty()), Ok(100));
        assert!(!readable(b.as_fd(), 0));
        // The descriptor of a queue.
        let queue = Queue::new(&context, 4).unwrap();
        queue.set_signal(true);
        b.recv(owned(100), RecvFlags::empty(), queue.sink(1))
            .unwrap();
        assert!(!readable(queue.as_fd(), 0));
        a.send_wait(region.whole()).unwrap();
        assert!(readable(queue.as_fd(), 999), "nobody drove");
        assert_eq!(events(&queue, 1)[0].result, Ok(100));
        assert!(!readable(queue.as_fd(), 0));
        // One-shot readiness as an event.
        b.poll(Ready::IN, queue.sink(2)).unwrap();
        a.close(queue.sink(3)).unwrap();
        let mut kinds: Vec<EventKind> = events(&queue, 2).iter().map(|e| e.kind).collect();
        kinds.sort_by_key(|kind| *kind as u8);
        assert_eq!(kinds, [EventKind::Poll, EventKind::Close]);
        assert!(readable(b.as_fd(), 999), "the end waits");
    }
}

#[test]
fn in_place_data_stays_until_it_is_given_back() {
    for local in LOCALS {
        let (context, a, b) = pair(local);
        let queue = Queue::new(&context, 64).unwrap();
        let region = Region::alloc(&context, 200).unwrap();
        let mut kept = Vec::new();
        for i in 0..20_u8 {
            b.recv(owned(200), RecvFlags::IN_PLACE, queue.sink(1))
                .unwrap();
            region.write(0, &[i; 200]).unwrap();
            a.send_wait(region.whole()).unwrap();
            let event = next_event(&queue);
            assert_eq!(event.result, Ok(200));
            kept.push((i, event.in_place.expect("small data is left in place")));
        }
        for (i, place) in kept {
            assert_eq!(place.memory().to_vec(), [i; 200]);
            place.recycle();
        }
        // Larger data does not arrive in place.
        b.recv(owned(60_000), RecvFlags::IN_PLACE, queue.sink(1))
            .unwrap();
        a.send_wait(Region::alloc(&context, 60_000).unwrap().whole())
            .unwrap();
        let event = next_event(&queue);
        assert!(event.in_place.is_none() && event.memory.is_some());
    }
}

/// The time limit of a receive that has been advertised to a peer that does not answer.
#[test]
fn a_time_limit_holds_against_a_peer_that_is_silent() {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |_| ());
    let _peer = raw_peer(LocalMode::Off, &listener);
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    recv_limit(&b, 200);
    let to = Region::alloc(&context, 1 << 16).unwrap();
    let told = aside(move || b.recv_wait(&to.whole(), RecvFlags::empty()));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Err(weft_exs::Errno::AGAIN)));
}
