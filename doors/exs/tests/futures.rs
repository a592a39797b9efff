//! Futures over sockets, with a minimal executor.

use std::future::Future;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::Thread;

use weft_exs::futures::{Connection, Listener, Packets, Stream};
use weft_exs::{Context, Errno, FilePiece, Kind, Memory, Piece, Region, Socket};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Task::from_waker(&waker)) {
            return out;
        }
        std::thread::park();
    }
}

fn pending<F: Future + Unpin>(future: &mut F) -> bool {
    pin!(future)
        .poll(&mut Task::from_waker(Waker::noop()))
        .is_pending()
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn context() -> Context {
    Context::global().unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn connected<T: Connection + Send + 'static, F: Future<Output = Result<T, Errno>>>(
    listener: &Listener<T>,
    connect: F,
) -> (T, T) {
    std::thread::scope(|s| {
        let server = s.spawn(|| block_on(listener.accept()).unwrap());
        let client = block_on(connect).unwrap();
        (client, server.join().unwrap())
    })
}

fn streams() -> (Stream, Stream) {
    let context = context();
    let listener = Stream::listen(&context, any()).unwrap();
    let addr = listener.socket().local_addr().unwrap();
    connected(&listener, Stream::connect(&context, addr))
}

fn packets() -> (Packets, Packets) {
    let context = context();
    let listener = Packets::listen(&context, any()).unwrap();
    let addr = listener.socket().local_addr().unwrap();
    connected(&listener, Packets::connect(&context, addr))
}

fn got((result, memory): (Result<usize, Errno>, Memory)) -> Vec<u8> {
    let mut bytes = memory.into_vec();
    bytes.truncate(result.unwrap());
    bytes
}

#[test]
fn several_outstanding_complete_in_order() {
    let (near, far) = streams();
    let receives: Vec<_> = (0..8).map(|_| far.recv_exact(vec![0; 1000])).collect();
    let data = pattern(8000);
    let sends: Vec<_> = data.chunks(1000).map(|c| near.send(c.to_vec())).collect();
    for (receive, chunk) in receives.into_iter().zip(data.chunks(1000)) {
        assert_eq!(got(block_on(receive)), chunk);
    }
    for (send, chunk) in sends.into_iter().zip(data.chunks(1000)) {
        let (result, memory) = block_on(send);
        assert_eq!(result, Ok(1000));
        assert_eq!(memory.into_vec(), chunk, "the memory comes back");
    }
}

#[test]
fn registered_memory_both_ways_and_the_end() {
    let (near, far) = streams();
    let (near_send, near_recv) = near.into_split();
    let (far_send, far_recv) = far.into_split();
    let data = pattern(5 << 20);
    let region = Region::alloc(&context(), 5 << 20).unwrap();
    region.write(0, &data).unwrap();
    let echo = std::thread::spawn(move || {
        block_on(async {
            let mut memory = Memory::from(vec![0; 100_000]);
            let mut total = 0;
            loop {
                let (n, filled) = far_recv.recv(memory).await;
                let n = n.unwrap();
                if n == 0 {
                    break total;
                }
                total += n;
                let mut bytes = filled.into_vec();
                bytes.truncate(n);
                let (sent, back) = far_send.send(bytes).await;
                assert_eq!(sent, Ok(n));
                let mut back = back.into_vec();
                back.resize(100_000, 0);
                memory = back.into();
            }
            // Both halves are dropped here: the peer sees the end.
        })
    });
    let answer = Region::alloc(&context(), 5 << 20).unwrap();
    let receive = near_recv.recv_exact(answer.whole());
    assert_eq!(block_on(near_send.send(region.whole())).0, Ok(5 << 20));
    assert!(got(block_on(receive)) == data);
    drop(near_send);
    assert_eq!(got(block_on(near_recv.recv(vec![0; 10]))), b"");
    assert_eq!(echo.join().unwrap(), 5 << 20);
}

#[test]
fn dropped_and_cancelled_futures_harm_nobody() {
    let (near, far) = streams();
    let mut first = far.recv_exact(vec![0; 4]);
    assert!(pending(&mut first));
    drop(first);
    let second = far.recv_exact(vec![0; 4]);
    drop(near.send(b"lost".to_vec()));
    block_on(near.send(b"kept".to_vec())).0.unwrap();
    // The operation of the dropped future has taken its bytes.
    assert_eq!(got(block_on(second)), b"kept");

    let third = far.recv(vec![0; 7]);
    far.cancel();
    let (result, memory) = block_on(third);
    assert_eq!((result, memory.len()), (Err(Errno::CANCELED), 7));
    block_on(near.send(b"later".to_vec())).0.unwrap();
    assert_eq!(got(block_on(far.recv(vec![0; 7]))), b"later");
}

#[test]
fn one_operation_is_cancelled_and_the_others_go_on() {
    let (near, far) = streams();
    // Short and long receives: only the long ones have adverts.
    for len in [4, 4000] {
        let receives: Vec<_> = (0..3).map(|_| far.recv_exact(vec![0; len])).collect();
        receives[1].cancel();
        let mut receives = receives.into_iter();
        let (first, second, third) = (receives.next(), receives.next(), receives.next());
        let (result, memory) = block_on(second.unwrap());
        assert_eq!((result, memory.len()), (Err(Errno::CANCELED), len));
        let data = pattern(2 * len);
        block_on(near.send(data.clone())).0.unwrap();
        assert!(got(block_on(first.unwrap())) == data[..len]);
        assert!(got(block_on(third.unwrap())) == data[len..]);
    }
    // Cancelling a completed operation affects neither it nor a successor in its place.
    let sent = near.send(b"gone".to_vec());
    assert_eq!(got(block_on(far.recv(vec![0; 4]))), b"gone");
    sent.cancel();
    assert_eq!(block_on(sent).0, Ok(4));
    // A transfer does not keep its connection open.
    let receive = far.recv(vec![0; 4]);
    drop(far);
    receive.cancel();
    assert_eq!(block_on(receive).0, Err(Errno::CANCELED));
}

#[test]
fn close_says_when_everything_is_sent() {
    let (near, far) = streams();
    let data = pattern(3 << 20);
    let send = near.send(data.clone());
    let receive = near.recv(vec![0; 1]);
    let close = near.close();
    assert!(got(block_on(far.recv_exact(vec![0; 3 << 20]))) == data);
    assert_eq!(got(block_on(far.recv(vec![0; 1]))), b"");
    assert_eq!(block_on(send).0, Ok(3 << 20));
    assert_eq!(block_on(receive).0, Err(Errno::CANCELED));
    drop(far);
    block_on(close).unwrap();
}

#[test]
fn refused_operations_say_why_and_keep_handles() {
    let (near, _far) = streams();
    block_on(near.shutdown()).unwrap();
    let region = Region::alloc(&context(), 10).unwrap();
    let (result, memory) = block_on(near.send(region.slice(2, 5).unwrap()));
    assert_eq!((result, memory.len()), (Err(Errno::PIPE), 5));
    let (result, memory) = block_on(near.send(vec![1, 2]));
    assert_eq!((result, memory.len()), (Err(Errno::PIPE), 0));

    let unused = std::net::TcpListener::bind(any()).unwrap();
    let addr = unused.local_addr().unwrap();
    drop(unused);
    let refused = block_on(Stream::connect(&context(), addr)).err();
    assert_eq!(refused, Some(Errno::CONNREFUSED));
    let wrong = Socket::new(&context(), false, Kind::SeqPacket).unwrap();
    let wrong = block_on(Stream::connect_with(wrong, addr)).err();
    assert_eq!(wrong, Some(Errno::PROTOTYPE));
}

#[test]
fn messages_keep_their_bounds() {
    let (near, far) = packets();
    let receives = [
        far.recv(vec![0; 10]),
        far.recv(vec![0; 2]),
        far.recv(vec![0; 1 << 20]),
    ];
    for message in [b"one".to_vec(), b"two".to_vec(), pattern(1 << 20)] {
        let len = message.len();
        let send = near.send(message);
        assert_eq!(block_on(send).0, Ok(len));
    }
    let ends: Vec<_> = receives.into_iter().map(block_on).collect();
    assert_eq!(ends[0].result, Ok(3));
    assert_eq!(&ends[0].memory.to_vec()[..3], b"one");
    assert!(!ends[0].truncated && ends[1].truncated);
    assert_eq!(ends[1].memory.to_vec(), b"tw");
    assert_eq!(ends[2].result, Ok(1 << 20));
    assert!(ends[2].memory.to_vec() == pattern(1 << 20));
    drop(near);
    assert_eq!(block_on(far.recv(vec![0; 2])).result, Ok(0));
}

#[test]
fn a_dropped_accept_loses_no_connection() {
    let context = context();
    let listener = Stream::listen(&context, any()).unwrap();
    let addr = listener.socket().local_addr().unwrap();
    {
        let mut accept = Box::pin(listener.accept());
        assert!(pending(&mut accept));
    }
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let context = context.clone();
            std::thread::spawn(move || block_on(Stream::connect(&context, addr)).unwrap())
        })
        .collect();
    std::thread::scope(|s| {
        let accepts: Vec<_> = (0..3)
            .map(|_| s.spawn(|| block_on(listener.accept()).unwrap()))
            .collect();
        let servers: Vec<Stream> = accepts.into_iter().map(|a| a.join().unwrap()).collect();
        for server in &servers {
            assert_eq!(block_on(server.send(b"hi".to_vec())).0, Ok(2));
        }
    });
    for client in clients {
        let client = client.join().unwrap();
        assert_eq!(got(block_on(client.recv_exact(vec![0; 2]))), b"hi");
    }
}

fn file(bytes: &[u8]) -> Arc<std::os::fd::OwnedFd> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Arc::new(file.into())
}

/// Sends data around files on any kind of connection. Returns the expected bytes.
fn send_files(near: &Stream) -> Vec<u8> {
    let data = pattern(5 << 20);
    let file = file(&data);
    let part = |offset, len| {
        Piece::File(FilePiece {
            file: Arc::clone(&file),
            offset,
            len,
        })
    };
    let text = |text: &str| Piece::Memory(text.as_bytes().to_vec().into());
    let before = near.send(b"before".to_vec());
    let first = near.send_file(vec![text("head"), part(3, None), text("tail")]);
    let between = near.send(b"between".to_vec());
    let second = near.send_file(vec![part((5 << 20) - 2, Some(100)), part(0, Some(5))]);
    let nothing = near.send_file(vec![]);
    let after = near.send(b"after".to_vec());
    let end = near.shutdown();
    block_on(async {
        assert_eq!(before.await.0, Ok(6));
        assert_eq!(first.await, Ok(data.len() - 3 + 8));
        assert_eq!(between.await.0, Ok(7));
        assert_eq!(second.await, Ok(2 + 5));
        assert_eq!(nothing.await, Ok(0));
        assert_eq!(after.await.0, Ok(5));
        end.await.unwrap();
    });
    let parts = [
        b"beforehead",
        &data[3..],
        b"tailbetween",
        &data[data.len() - 2..],
        &data[..5],
        b"after",
    ];
    parts.concat()
}

#[test]
fn files_keep_their_place_among_sends() {
    let (near, far) = streams();
    let receiver = std::thread::spawn(move || {
        let all = block_on(far.recv_exact(vec![0; 6 << 20]));
        assert_eq!(got(block_on(far.recv(vec![0; 1]))), b"");
        got(all)
    });
    let want = send_files(&near);
    assert!(receiver.join().unwrap() == want);
}

#[test]
fn files_that_fail_or_are_cancelled_end_with_what_they_sent() {
    let (near, far) = streams();
    let text = |text: &str| Piece::Memory(text.as_bytes().to_vec().into());
    let whole = |path: &str| {
        Piece::File(FilePiece {
            file: Arc::new(std::fs::File::open(path).unwrap().into()),
            offset: 0,
            len: None,
        })
    };
    let failed = near.send_file(vec![text("head"), whole("/"), text("never")]);
    let after = near.send(b"after".to_vec());
    assert_eq!(block_on(failed), Err(Errno::ISDIR));
    assert_eq!(got(block_on(far.recv_exact(vec![0; 9]))), b"headafter");
    assert_eq!(block_on(after).0, Ok(5));

    let endless = near.send_file(vec![whole("/dev/zero")]);
    let behind = near.send(b"behind".to_vec());
    let some = got(block_on(far.recv_exact(vec![1; 3 << 20])));
    assert!(some.iter().all(|b| *b == 0));
    near.cancel();
    assert_eq!(block_on(behind).0, Err(Errno::CANCELED));
    let rest = std::thread::spawn(move || {
        let mut total = 0;
        loop {
            let n = got(block_on(far.recv(vec![0; 1 << 20]))).len();
            total += n;
            if n == 0 {
                return total;
            }
        }
    });
    assert_eq!(block_on(endless), Err(Errno::CANCELED));
    block_on(near.shutdown()).unwrap();
    // No more than was in flight and in the intermediate buffer.
    assert!(rest.join().unwrap() < 4 << 20);

    let (near, _far) = packets();
    let refused = near.socket().send_file(vec![], weft_exs::Sink::Nobody);
    assert_eq!(refused, Err(Errno::OPNOTSUPP));
}

#[test]
fn the_same_over_ordinary_tcp() {
    let listener = std::net::TcpListener::bind(any()).unwrap();
    let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let addr = ours.local_addr().unwrap();
    let near = Stream::new(Socket::from_tcp(&context(), ours.into()).unwrap());
    assert_eq!(near.socket().local_addr(), Ok(addr));
    let answer = near.recv_exact(vec![0; 6]);
    let receiver = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        peer.write_all(b"thanks").unwrap();
        all
    });
    let want = send_files(&near);
    assert!(receiver.join().unwrap() == want);
    assert_eq!(got(block_on(answer)), b"thanks");
    assert_eq!(got(block_on(near.recv(vec![0; 1]))), b"");
    block_on(near.close()).unwrap();
}

#[test]
fn and_over_a_pair_of_unix_sockets() {
    let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
    let near = Stream::new(Socket::from_tcp(&context(), near.into()).unwrap());
    assert_eq!(block_on(near.send(b"hello".to_vec())).0, Ok(5));
    let mut got = [0; 5];
    far.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}
