//! Sockets over ordinary TCP, whose peer is a plain program.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use weft_exs::{Context, Errno, Event, Memory, Queue, RecvFlags, Region, Sink, Socket};

const PATIENCE: Duration = Duration::from_secs(20);

fn context() -> Context {
    Context::global().unwrap()
}

/// A socket and its peer.
fn pair(context: &Context) -> (Socket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    (Socket::from_tcp(context, near.into()).unwrap(), far)
}

fn event(queue: &Queue) -> Event {
    let mut out = Vec::new();
    queue.dequeue(&mut out, 1, 1, Some(PATIENCE)).unwrap();
    out.pop().expect("an event")
}

/// `DONTWAIT` and `WAITALL` together receive the available data, as kernel sockets do.
#[test]
fn a_receive_that_does_not_wait_does_not_wait_for_all_of_tcp() {
    let context = context();
    let (a, mut far) = pair(&context);
    let (tell, told) = channel();
    let to = Region::alloc(&context, 100).unwrap();
    let flags = RecvFlags::WAITALL | RecvFlags::DONTWAIT;
    assert_eq!(a.recv_wait(&to.whole(), flags), Err(Errno::AGAIN));
    far.write_all(&[1; 10]).unwrap();
    a.poll_wait(weft_exs::Ready::IN, Some(PATIENCE)).unwrap();
    let waiter = a.clone();
    std::thread::spawn(move || {
        let _ = tell.send(waiter.recv_wait(&to.whole(), flags));
    });
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(10)));
    // The same with an event.
    let queue = Queue::new(&context, 1).unwrap();
    let recv = || {
        let sink = queue.sink(7);
        a.recv(Memory::from(vec![0; 100]), flags, sink)
    };
    for _ in 0..3 {
        assert_eq!(recv(), Err(Errno::AGAIN));
        assert_eq!(queue.outstanding(), 0, "it keeps no place in the queue");
    }
    far.write_all(&[2; 10]).unwrap();
    a.poll_wait(weft_exs::Ready::IN, Some(PATIENCE)).unwrap();
    recv().unwrap();
    let end = event(&queue);
    assert_eq!((end.token, end.result), (7, Ok(10)));
    assert_eq!(&end.memory.unwrap().into_vec()[..10], &[2; 10]);
    drop(far);
    a.poll_wait(weft_exs::Ready::IN, Some(PATIENCE)).unwrap();
    recv().unwrap();
    assert_eq!(event(&queue).result, Ok(0), "the end of the stream");
}

/// Arriving data belongs to the earlier receive.
#[test]
fn a_receive_that_does_not_wait_does_not_wait_behind_another() {
    let context = context();
    let (a, mut far) = pair(&context);
    let queue = Queue::new(&context, 1).unwrap();
    let rounds = 500;
    a.recv(
        Memory::from(vec![0; rounds]),
        RecvFlags::WAITALL,
        queue.sink(1),
    )
    .unwrap();
    let (tell, told) = channel();
    let b = a.clone();
    std::thread::spawn(move || {
        let to = Region::alloc(&context, 100).unwrap();
        for _ in 1..rounds {
            far.write_all(&[1]).unwrap();
            // The thread that takes it is about to run.
            let _ = tell.send(b.recv_wait(&to.whole(), RecvFlags::DONTWAIT));
        }
        far.write_all(&[1]).unwrap();
    });
    for round in 1..rounds {
        let end = told.recv_timeout(PATIENCE);
        assert_eq!(end, Ok(Err(Errno::AGAIN)), "round {round}");
    }
    assert_eq!(event(&queue).result, Ok(rounds));
}

/// "Close the socket: … queued data is sent, then the peer sees the end", even if other handles exist.
#[test]
fn the_peer_of_a_closed_ordinary_socket_sees_the_end() {
    let context = context();
    let (a, mut far) = pair(&context);
    let queue = Queue::new(&context, 8).unwrap();
    let len = 16 << 20;
    a.send(Memory::from(vec![1; len]), Sink::Nobody).unwrap();
    a.close(queue.sink(1)).unwrap();
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), len);
    assert_eq!(event(&queue).result, Ok(0));
    drop(a);
}

/// A peer that reads nothing does not keep a closed socket's descriptor open. This takes 30 seconds; `plain/tests.rs` has a short test.
#[test]
#[ignore = "takes half a minute"]
fn a_closed_ordinary_socket_gives_its_descriptor_up() {
    let (a, far) = pair(&context());
    let fd = a.as_fd().as_raw_fd();
    a.send(Memory::from(vec![1; 32 << 20]), Sink::Nobody)
        .unwrap();
    a.close(Sink::Nobody).unwrap();
    drop(a);
    let there = || std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
    let before = there();
    let end = Instant::now() + Duration::from_secs(40);
    while there() == before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_ne!(there(), before, "after 40 s it is still open");
    drop(far);
}
