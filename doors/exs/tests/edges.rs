//! Edge cases: operations behind file sends, time limits, unequal ends, threads that race for events, dropped sockets.

use crate::common;
use crate::raw;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, aside, asleep, context, events, file_of, listener, pair, pair_of, send_limit, until,
};
use weft_exs::{
    Context, Design, Errno, EventKind, Kind, Memory, Mode, Options, Piece, Queue, RecvFlags,
    Region, Sink, Socket,
};
use weft_verbs::ext::CqExt;
use weft_verbs::{Device, LocalMode};
use weft_wire::exs::{HELLO_LEN, Hello};

fn whole(len: usize) -> Vec<Piece> {
    common::whole(&file_of(&vec![7; len]))
}

/// The peer's `small_packet_max` is larger than what our work requests carry inline.
#[test]
fn ends_with_different_small_packets_understand_each_other() {
    let (context, a, b) = pair_of(
        LocalMode::Off,
        Kind::Stream,
        |_| (),
        |o| o.small_packet_max = 16 << 10,
    );
    let to = Region::alloc(&context, 8192).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    a.send(Memory::from(vec![1; 4000]), queue.sink(1)).unwrap();
    let sent = events(&queue, 1);
    assert_eq!(sent[0].result, Ok(4000), "the whole connection is lost");
    assert_eq!(b.recv_wait(&to.whole(), RecvFlags::empty()), Ok(4000));
}

/// Sends `n` messages with these bytes, all as small packets.
fn sends_small_packets(small: u32, credits: u32, n: u64, memory: impl FnOnce(&Context) -> Memory) {
    let both = |o: &mut Options| {
        o.small_packet_max = small;
        o.credits = credits;
    };
    let (context, a, b) = pair_of(LocalMode::Off, Kind::SeqPacket, both, both);
    let memory = memory(&context);
    let queue = Queue::new(&context, 1 << 12).unwrap();
    for i in 0..n {
        a.send(memory.clone(), queue.sink(i)).unwrap();
    }
    let sent = events(&queue, n as usize);
    let bad = sent.iter().filter(|e| e.result != Ok(memory.len())).count();
    assert_eq!((sent.len(), bad), (n as usize, 0));
    drop(b);
}

/// More small packets in flight than header slots.
#[test]
fn many_long_small_packets() {
    sends_small_packets(4096, 4096, 1000, |_| Memory::from(vec![1; 4000]));
}

/// A list of messages of 12 MiB, from memory that is no region and in pieces, each in one message: the receiver's setting decides.
#[test]
fn small_packets_of_many_megabytes() {
    const LEN: usize = 12 << 20;
    let large = |o: &mut Options| o.small_packet_max = 16 << 20;
    let list = || {
        let pieces = [1u8, 2, 3].map(|byte| Memory::from(vec![byte; LEN / 3]));
        Memory::List(pieces.into())
    };
    for local in [LocalMode::Off, LocalMode::Require] {
        for kind in [Kind::Stream, Kind::SeqPacket] {
            let (context, a, b) = pair_of(local, kind, |_| (), large);
            let sent = Queue::new(&context, 8).unwrap();
            let got = Queue::new(&context, 8).unwrap();
            for i in 0..3 {
                let to = Memory::from(vec![0; LEN]);
                b.recv(to, RecvFlags::WAITALL, got.sink(i)).unwrap();
                a.send(list(), sent.sink(i)).unwrap();
                let event = events(&got, 1).remove(0);
                assert_eq!(event.result, Ok(LEN), "{local:?} {kind:?}");
                let bytes = event.memory.unwrap().into_vec();
                let fine = (0..LEN).all(|at| usize::from(bytes[at]) == at / (LEN / 3) + 1);
                assert!(fine, "{local:?} {kind:?}");
                assert_eq!(events(&sent, 1)[0].result, Ok(LEN));
            }
            let stats = a.stats();
            let moved = [stats.small_sent, stats.direct_sent, stats.indirect_sent];
            assert_eq!(moved, [3, 0, 0], "{local:?} {kind:?}");
        }
    }
}

/// What peers may send before the program receives is bounded, whatever the settings: with longer small packets there are fewer control receives.
#[test]
fn the_memory_of_control_receives_is_bounded() {
    let context = context(LocalMode::Off);
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let pd = device.alloc_pd().unwrap();
    for (small, posted) in [(16 << 20, 15), (1 << 20, 255), (1 << 10, 65_535)] {
        let set = |o: &mut Options| {
            o.small_packet_max = small;
            o.credits = 65_535;
        };
        let listener = listener(&context, Kind::Stream, set);
        let cq = device.create_cq(4096, None).unwrap();
        let (conn, _sink) = raw::greet(&listener, &pd, &cq, &raw::hello());
        let hello = Hello::parse(&conn.private_data[..HELLO_LEN]).unwrap();
        assert_eq!((hello.small, hello.credits), (small, posted));
    }
}

/// What peers may send before the program accepts is bounded too: each of these connections has 241 MiB.
#[test]
fn the_memory_of_connections_that_wait_is_bounded() {
    let context = context(LocalMode::Off);
    let listener = Socket::new(&context, false, Kind::Stream).unwrap();
    let set = |o: &mut Options| o.small_packet_max = 16 << 20;
    listener.set_options(set).unwrap();
    listener.listen(128).unwrap();
    let addr = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()).into();
    let connect = || {
        let socket = Socket::new(&context, false, Kind::Stream).unwrap();
        socket.connect_wait(addr).map(|()| socket)
    };
    let waiting: Vec<Socket> = std::iter::from_fn(|| connect().ok()).take(20).collect();
    assert_eq!(waiting.len(), 16);
    assert_eq!(connect().err(), Some(Errno::CONNREFUSED));
    listener.accept_wait(None).unwrap();
    connect().unwrap();
}

#[test]
fn a_small_packet_has_at_most_16_mib() {
    let context = context(LocalMode::Off);
    let socket = Socket::new(&context, false, Kind::Stream).unwrap();
    let set = |small| socket.set_options(|o| o.small_packet_max = small);
    assert_eq!(set(16 << 20), Ok(()));
    assert_eq!(set((16 << 20) + 1), Err(Errno::INVAL));
    assert_eq!(socket.options().small_packet_max, 16 << 20);
}

/// A gathered message in the design where the sender adverts.
#[test]
fn gathered_messages_where_the_sender_adverts() {
    let design = |o: &mut Options| o.design = Design::Source;
    let (context, a, b) = pair_of(LocalMode::Off, Kind::SeqPacket, design, design);
    let to = Region::alloc(&context, 8192).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    b.recv(to.whole(), RecvFlags::empty(), queue.sink(2))
        .unwrap();
    let list = Memory::List(vec![
        Memory::from(vec![1; 2000]),
        Memory::from(vec![2; 2000]),
    ]);
    a.send(list, queue.sink(1)).unwrap();
    for event in events(&queue, 2) {
        assert_eq!(event.result, Ok(4000), "{:?}", event.kind);
    }
}

/// A short blocking send behind a file send wakes up when it is complete.
#[test]
fn a_short_blocking_send_behind_a_file_wakes_up() {
    for local in [LocalMode::Off, LocalMode::Require] {
        let (context, a, b) = pair(local);
        // More than the peer's buffer holds.
        let len = (1 << 20) + (64 << 10);
        let queue = Queue::new(&context, 8).unwrap();
        a.send_file(whole(len), queue.sink(1)).unwrap();
        let sender = a.clone();
        let told = asleep(move || sender.send_wait(Memory::from(vec![9; 8])));
        let to = Region::alloc(&context, 1 << 20).unwrap();
        // Just enough for the rest of the file.
        let got = b.recv_wait(&to.slice(0, 256 << 10).unwrap(), RecvFlags::WAITALL);
        assert_eq!(got, Ok(256 << 10));
        // The sender's own thread must notice the end of the file, too, so this thread must not drive the connection.
        until("the file has been sent", || queue.waiting() == 1);
        let sent = told.recv_timeout(PATIENCE);
        assert_eq!(
            sent,
            Ok(Ok(8)),
            "its message has gone, but the sender sleeps ({local:?})"
        );
    }
}

/// The file and a close behind it complete after the socket has been dropped.
#[test]
fn a_close_behind_a_file_send_is_told_and_the_file_arrives() {
    let (context, a, b) = pair(LocalMode::Off);
    let len = 8 << 20;
    let queue = Queue::new(&context, 8).unwrap();
    a.send_file(whole(len), queue.sink(1)).unwrap();
    a.send(Memory::from(vec![9; 8]), queue.sink(2)).unwrap();
    a.close(queue.sink(3)).unwrap();
    drop(a);
    let to = Region::alloc(&context, len + 8).unwrap();
    let got = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
    let told: Vec<_> = {
        let mut out = Vec::new();
        let _ = queue.dequeue(&mut out, 3, 3, Some(PATIENCE));
        out.iter().map(|e| (e.kind, e.result)).collect()
    };
    assert_eq!(
        (got, told),
        (
            Ok(len + 8),
            vec![
                (EventKind::SendFile, Ok(len)),
                (EventKind::Send, Ok(8)),
                (EventKind::Close, Ok(0))
            ]
        )
    );
}

/// Two threads that each wait for one event.
#[test]
fn a_wait_for_ever_brings_an_event() {
    let (context, a, b) = pair(LocalMode::Require);
    let queue = Queue::new(&context, 64).unwrap();
    queue.set_wait(weft_exs::Wait::Notify);
    let (none, rounds) = (Arc::new(AtomicUsize::new(0)), 6000);
    let taken = Arc::new(AtomicUsize::new(0));
    let takers: Vec<_> = (0..2)
        .map(|_| {
            let (queue, none, taken) = (queue.clone(), Arc::clone(&none), Arc::clone(&taken));
            std::thread::spawn(move || {
                while taken.load(Ordering::SeqCst) < rounds {
                    let mut out = Vec::new();
                    match queue.dequeue(&mut out, 1, 1, None) {
                        Ok(0) => {
                            none.fetch_add(1, Ordering::SeqCst);
                        }
                        Ok(n) => {
                            taken.fetch_add(n, Ordering::SeqCst);
                        }
                        Err(_) => return,
                    }
                }
            })
        })
        .collect();
    for i in 0..rounds {
        a.send(Memory::from(vec![1]), queue.sink(i as u64)).unwrap();
        let end = Instant::now() + PATIENCE;
        // The two threads have both cores.
        while taken.load(Ordering::SeqCst) <= i && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        let _ = b.recv(Memory::from(vec![0]), RecvFlags::empty(), Sink::Nobody);
    }
    queue.delete();
    for taker in takers {
        taker.join().unwrap();
    }
    assert_eq!(
        none.load(Ordering::SeqCst),
        0,
        "waits for ever that brought nothing"
    );
}

/// `MSG_WAITALL | MSG_DONTWAIT` receives only the available data.
#[test]
fn a_receive_that_does_not_wait_does_not_wait_for_all() {
    let (context, a, b) = pair(LocalMode::Off);
    a.send_wait(Memory::from(vec![1; 10])).unwrap();
    let end = Instant::now() + PATIENCE;
    while !b.ready().contains(weft_exs::Ready::IN) && Instant::now() < end {}
    let to = Region::alloc(&context, 100).unwrap();
    let receiver = b.clone();
    let told =
        aside(move || receiver.recv_wait(&to.whole(), RecvFlags::WAITALL | RecvFlags::DONTWAIT));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(10)));
}

/// Outstanding accepts end when the last handle of their listener is dropped.
#[test]
fn a_listener_that_goes_ends_its_accepts() {
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |_| ());
    let queue = Queue::new(&context, 8).unwrap();
    listener.accept(queue.sink(1)).unwrap();
    drop(listener);
    let mut out = Vec::new();
    let _ = queue.dequeue(&mut out, 1, 1, Some(Duration::from_secs(1)));
    assert_eq!((out.len(), queue.outstanding()), (1, 0));
}

/// An accept with a zero timeout, and a connection that arrives at the same moment.
#[test]
fn no_connection_is_lost_by_an_accept_that_does_not_wait() {
    let context = context(LocalMode::Require);
    let listener = Socket::new(&context, false, Kind::Stream).unwrap();
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    listener.listen(128).unwrap();
    let addr = listener.local_addr().unwrap();
    let rounds = std::env::var("ROUNDS").map_or(400, |r| r.parse().unwrap());
    let taker = listener.clone();
    let enough = Arc::new(AtomicUsize::new(0));
    let stop = Arc::clone(&enough);
    let accepting = std::thread::spawn(move || {
        let mut got = Vec::new();
        while stop.load(Ordering::SeqCst) == 0 {
            if let Ok(socket) = taker.accept_wait(Some(Duration::ZERO)) {
                got.push(socket);
            }
        }
        while let Ok(socket) = taker.accept_wait(Some(Duration::from_millis(200))) {
            got.push(socket);
        }
        got.len()
    });
    let mut made = Vec::new();
    for _ in 0..rounds {
        let a = Socket::new(&context, false, Kind::Stream).unwrap();
        a.set_options(|o| {
            o.buffer = 4096;
            o.credits = 8;
        })
        .unwrap();
        a.connect_wait(addr).unwrap();
        made.push(a);
        if made.len() > 100 {
            made.clear();
        }
    }
    enough.store(1, Ordering::SeqCst);
    assert_eq!(accepting.join().unwrap(), rounds);
}

/// An ordinary socket that is dropped with a send under way.
#[test]
fn a_dropped_ordinary_socket_sends_what_was_queued() {
    let context = context(LocalMode::Off);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let a = Socket::from_tcp(&context, near.into()).unwrap();
    let len = 32 << 20;
    a.send(Memory::from(vec![1; len]), Sink::Nobody).unwrap();
    drop(a);
    let mut got = Vec::new();
    let _ = std::io::Read::read_to_end(&mut far, &mut got);
    assert_eq!(got.len(), len);
}

/// A closed socket's descriptor in the program's epoll.
#[test]
fn a_closed_socket_is_silent_in_epoll() {
    use rustix::event::epoll;
    let (context, a, b) = pair(LocalMode::Off);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    // As in libexs: the program has its own descriptor for the socket.
    let number = rustix::io::fcntl_dupfd_cloexec(a.as_fd(), 0).unwrap();
    epoll::add(
        &epoll,
        &number,
        epoll::EventData::new_u64(7),
        epoll::EventFlags::IN,
    )
    .unwrap();
    // More than there is room for, so the close has to wait.
    a.send(Memory::from(vec![1; 16 << 20]), Sink::Nobody)
        .unwrap();
    a.close(Sink::Nobody).unwrap();
    drop(a);
    drop(number);
    b.send_wait(Memory::from(vec![2; 10])).unwrap();
    let mut seen: Vec<epoll::Event> = Vec::with_capacity(4);
    let wait = rustix::event::Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    let n = epoll::wait(
        &epoll,
        rustix::buffer::spare_capacity(&mut seen),
        Some(&wait),
    )
    .unwrap();
    assert_eq!(n, 0, "an event of a descriptor that was closed");
    drop((context, b));
}

#[test]
fn the_future_of_a_close_behind_a_file_ends() {
    use std::future::Future;
    use std::task::{Context as Task, Poll, Waker};
    let (context, a, b) = pair(LocalMode::Off);
    let near = weft_exs::futures::Stream::new(a);
    let len = 8 << 20;
    let _file = near.send_file(whole(len));
    let mut close = std::pin::pin!(near.close());
    std::thread::spawn(move || {
        let to = Region::alloc(&context, len).unwrap();
        let _ = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
        std::thread::sleep(PATIENCE);
    });
    let end = Instant::now() + PATIENCE;
    loop {
        match close.as_mut().poll(&mut Task::from_waker(Waker::noop())) {
            Poll::Ready(result) => return assert_eq!(result, Ok(())),
            Poll::Pending => assert!(Instant::now() < end, "it never ends"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Cancelling token 0 does not affect the parts of a file send with another token.
#[test]
fn a_cancel_of_zero_leaves_other_files_alone() {
    let (context, a, b) = pair(LocalMode::Off);
    let len = 8 << 20;
    let queue = Queue::new(&context, 8).unwrap();
    a.send_file(whole(len), queue.sink(5)).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(a.cancel(Some(0)), 0, "nothing has this number");
    let to = Region::alloc(&context, len).unwrap();
    let reader = std::thread::spawn(move || b.recv_wait(&to.whole(), RecvFlags::WAITALL));
    assert_eq!(events(&queue, 1)[0].result, Ok(len));
    assert_eq!(reader.join().unwrap(), Ok(len));
}

/// A peer that reads nothing and then breaks the protocol, without CRCs, during a long send.
#[test]
fn a_hostile_peer_does_not_stop_the_engine() {
    use weft_verbs::{Access, LinkOptions, SendWr};
    let context = context(LocalMode::Off);
    let listener = listener(&context, Kind::Stream, |o| o.crc = false);
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(4096, None).unwrap();
    // The peer's engine reads nothing after the first completion.
    let stuck = Arc::new(AtomicUsize::new(0));
    let in_hook = Arc::clone(&stuck);
    let (end_of_test, goes_on) = channel::<()>();
    let goes_on = std::sync::Mutex::new(goes_on);
    cq.set_hook(move || {
        in_hook.store(1, Ordering::SeqCst);
        let _ = goes_on.lock().unwrap().recv();
    });
    let ring = pd
        .alloc_mr(256 << 20, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    let hello = weft_wire::exs::Hello {
        ring: Some(weft_wire::exs::Remote {
            addr: ring.addr(),
            rkey: ring.rkey(),
            len: 256 << 20,
        }),
        ..raw::hello()
    };
    let link = LinkOptions {
        crc: false,
        ..LinkOptions::default()
    };
    let (conn, sink) = raw::greet_over(link, &listener, &pd, &cq, &hello);

    let a = listener.accept_wait(Some(PATIENCE)).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    a.send(Memory::from(vec![1; 8]), Sink::Nobody).unwrap();
    until("it is stuck", || stuck.load(Ordering::SeqCst) == 1);
    let len = 200 << 20;
    let (tell, told) = channel();
    a.send(
        Memory::from(vec![1; len]),
        Sink::call(move |event| tell.send(event.result).unwrap()),
    )
    .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // The peer now breaks the protocol.
    conn.qp
        .post_send_one(SendWr::send(0).inline(&[0xff; 33]))
        .unwrap();
    let sent = told.recv_timeout(PATIENCE);
    println!("the send: {sent:?}");
    // Other connections on the device.
    let other = Socket::new(&context, false, Kind::Stream).unwrap();
    let addr = listener.local_addr().unwrap();
    let told = aside(move || other.connect_wait(addr));
    let others = told.recv_timeout(PATIENCE);
    assert!(
        others.is_ok(),
        "the engine stands still: nobody can connect"
    );
    drop((a, queue, end_of_test));
    std::mem::forget((conn, ring, sink, cq));
}

/// The time limit of a blocking send that waits behind a file.
#[test]
fn a_time_limit_holds_behind_a_file() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.send_file(whole(8 << 20), queue.sink(1)).unwrap();
    // The limit does not apply to the file.
    send_limit(&a, 200);
    let told = aside(move || a.send_wait(Memory::from(vec![9; 8])));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Err(weft_exs::Errno::AGAIN)));
    drop(b);
}

/// A send with a time limit ends although the peer does not receive all of it.
fn ends_in_time(start: impl FnOnce(&Socket, Sink)) {
    let (context, a, b) = pair(LocalMode::Off);
    send_limit(&a, 200);
    let queue = Queue::new(&context, 8).unwrap();
    start(&a, queue.sink(1));
    assert_eq!(events(&queue, 1).len(), 1, "an event of any kind in 5 s");
    drop(b);
}

#[test]
fn a_time_limit_ends_a_file_send() {
    ends_in_time(|a, sink| a.send_file(whole(8 << 20), sink).unwrap());
}

/// The time limit of a send that the peer receives in part.
#[test]
fn a_time_limit_ends_a_send_that_is_stuck_halfway() {
    ends_in_time(|a, sink| a.send(Memory::from(vec![1; 8 << 20]), sink).unwrap());
}

/// More long small packets than header slots, and a busy peer.
#[test]
fn many_very_long_small_packets() {
    let n = std::env::var("SENDS").map_or(900, |n| n.parse().unwrap());
    sends_small_packets(64 << 10, 2048, n, |context| {
        Region::alloc(context, 60_000).unwrap().whole()
    });
}

/// An accept that starts while the listener is being closed.
#[test]
fn an_accept_at_the_moment_of_a_close_ends() {
    let context = context(LocalMode::Off);
    for round in 0..3000 {
        let listener = Socket::new(&context, false, Kind::Stream).unwrap();
        listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        listener.listen(8).unwrap();
        let accepting = listener.clone();
        let go = Arc::new(AtomicUsize::new(0));
        let wait = Arc::clone(&go);
        let told = aside(move || {
            while wait.load(Ordering::SeqCst) == 0 {
                std::hint::spin_loop();
            }
            for _ in 0..round % 50 {
                std::hint::spin_loop();
            }
            accepting.accept_wait(None).map(drop)
        });
        go.store(1, Ordering::SeqCst);
        listener.close(Sink::Nobody).unwrap();
        let end = told.recv_timeout(PATIENCE);
        assert!(end.is_ok(), "round {round}: it waits for ever");
    }
}

/// The bytes that an event reports for a receive that was cut off in the middle of direct transfers.
#[test]
fn the_bytes_of_a_receive_that_was_cut_off() {
    let (context, a, b) = pair(LocalMode::Off);
    let to = Region::alloc(&context, 1 << 20).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    b.recv(to.whole(), RecvFlags::WAITALL, queue.sink(1))
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let from = Region::alloc(&context, 1 << 18).unwrap();
    from.write(0, &vec![5; 1 << 18]).unwrap();
    a.send_wait(from.whole()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let direct = b.stats().direct_bytes_received;
    b.cancel(None);
    let end = events(&queue, 1).remove(0);
    println!(
        "cancelled: {:?} {} bytes, {direct} came directly",
        end.result, end.bytes
    );
    assert_eq!(end.bytes, 1 << 18);
    b.recv(to.whole(), RecvFlags::WAITALL, queue.sink(1))
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    a.send_wait(from.whole()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let direct = b.stats().direct_bytes_received - direct;
    let before = b.take_error();
    // The peer disconnects without a message.
    let hold = a.stats();
    b.close(Sink::Nobody).unwrap();
    let end = events(&queue, 1).remove(0);
    println!(
        "closed: {:?} {} bytes, {direct} came directly {before:?} {}",
        end.result, end.bytes, hold.direct_sent
    );
    assert_eq!(end.bytes, 1 << 18, "bytes that are in the memory");
}

/// A very long timeout does not overflow to a short one.
#[test]
fn a_very_long_busy_wait_waits() {
    let context = context(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    queue.set_wait(weft_exs::Wait::BusyPoll);
    let waiter = queue.clone();
    let told = aside(move || {
        let long = Duration::from_secs(i64::MAX as u64);
        waiter.dequeue(&mut Vec::new(), 1, 1, Some(long))
    });
    let early = told.recv_timeout(Duration::from_millis(500));
    queue.delete();
    assert!(early.is_err(), "{early:?}");
}

/// Two closed ends with data left for each other do not wait for each other, over any transport.
#[test]
fn two_closed_ends_let_go_of_each_other() {
    let modes = [Mode::Dynamic, Mode::Published, Mode::Direct, Mode::Indirect];
    let modes = modes.map(|m| (Kind::Stream, m, None));
    let designs = [Design::Advert, Design::Source];
    let designs = designs.map(|d| (Kind::SeqPacket, Mode::Dynamic, Some(d)));
    for (kind, mode, design) in modes.into_iter().chain(designs) {
        for local in [LocalMode::Off, LocalMode::Require] {
            let set = |o: &mut Options| {
                o.mode = mode;
                o.design = design.unwrap_or(o.design);
            };
            let (context, a, b) = pair_of(local, kind, set, set);
            let queue = Queue::new(&context, 16).unwrap();
            for (socket, token) in [(a, 1), (b, 2)] {
                for _ in 0..3 {
                    let data = Memory::from(vec![1; 4 << 20]);
                    socket.send(data, Sink::Nobody).unwrap();
                }
                // All credits.
                for _ in 0..300 {
                    let data = Memory::from(vec![1; 8]);
                    socket.send(data, Sink::Nobody).unwrap();
                }
                socket.close(queue.sink(token)).unwrap();
            }
            let closed = events(&queue, 2);
            assert_eq!(closed.len(), 2, "{kind:?} {mode:?} {design:?} {local:?}");
        }
    }
}

/// A thread that loses the race for an event still observes its timeout.
#[test]
fn a_taker_who_loses_a_race_keeps_to_its_time_limit() {
    let (context, a, b) = pair(LocalMode::Require);
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for round in 0..3000_usize {
            let queue = Queue::new(&context, 4).unwrap();
            queue.set_wait(weft_exs::Wait::Notify);
            a.send(Memory::from(vec![1]), queue.sink(1)).unwrap();
            let _ = b.recv(Memory::from(vec![0]), RecvFlags::empty(), Sink::Nobody);
            let ready = Arc::new(AtomicUsize::new(0));
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    let (queue, ready) = (queue.clone(), Arc::clone(&ready));
                    std::thread::spawn(move || {
                        ready.fetch_add(1, Ordering::SeqCst);
                        while ready.load(Ordering::SeqCst) < 2 {
                            std::hint::spin_loop();
                        }
                        let limit = Some(Duration::from_millis(1));
                        queue.dequeue(&mut Vec::new(), 1, 1, limit).unwrap()
                    })
                })
                .collect();
            let taken: usize = takers.into_iter().map(|t| t.join().unwrap()).sum();
            assert_eq!(taken, 1, "round {round}");
        }
        tell.send(()).unwrap();
    });
    let ended = told.recv_timeout(Duration::from_mins(1));
    assert_eq!(ended, Ok(()), "a taker waits for ever");
}

/// The function that changes the settings may call the socket, and does not undo changes of another thread.
#[test]
fn settings_are_changed_without_a_lock() {
    let context = context(LocalMode::Off);
    let socket = Socket::new(&context, false, Kind::Stream).unwrap();
    let (done, ended) = channel();
    let other = socket.clone();
    std::thread::spawn(move || {
        let mut calls = 0;
        let set = other.set_options(|options| {
            calls += 1;
            assert_eq!(other.options(), *options);
            if calls == 1 {
                other.set_options(|o| o.credits = 77).unwrap();
            }
            options.crc = false;
        });
        done.send((set, calls)).unwrap();
    });
    let outcome = ended.recv_timeout(PATIENCE).expect("no deadlock");
    assert_eq!(outcome, (Ok(()), 2));
    let options = socket.options();
    assert_eq!((options.credits, options.crc), (77, false));
}
