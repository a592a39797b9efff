//! The traits of `tokio` over EXS streams.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, copy_bidirectional, split};
use tokio::net::{TcpListener, TcpStream};
use weft_exs::futures::{Listener, Stream};
use weft_exs::tokio::{Buffers, IoStream};
use weft_exs::{Context, Socket};

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn listen() -> (Listener<Stream>, SocketAddr) {
    let listener = Stream::listen(&Context::global().unwrap(), any()).unwrap();
    let addr = listener.socket().local_addr().unwrap();
    (listener, addr)
}

async fn connect(addr: SocketAddr) -> IoStream {
    let stream = Stream::connect(&Context::global().unwrap(), addr).await;
    IoStream::new(stream.unwrap()).unwrap()
}

async fn streams() -> (IoStream, IoStream) {
    let (listener, addr) = listen();
    let (near, far) = tokio::join!(connect(addr), listener.accept());
    (near, IoStream::new(far.unwrap()).unwrap())
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[tokio::test]
async fn echo_and_half_close() {
    let (mut near, mut far) = streams().await;
    near.write_all(b"hello").await.unwrap();
    near.shutdown().await.unwrap();
    let e = near.write_all(b"late").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::BrokenPipe);
    let mut all = Vec::new();
    far.read_to_end(&mut all).await.unwrap();
    assert_eq!(all, b"hello");
    assert_eq!(far.read(&mut [0; 4]).await.unwrap(), 0, "and again");
    far.write_all(b"still there").await.unwrap();
    drop(far);
    let mut all = Vec::new();
    near.read_to_end(&mut all).await.unwrap();
    assert_eq!(all, b"still there", "written before the drop");
}

#[tokio::test]
async fn large_transfers_both_ways_at_once() {
    let (near, far) = streams().await;
    let echo = tokio::spawn(async move {
        let (mut reader, mut writer) = split(far);
        let n = copy(&mut reader, &mut writer).await.unwrap();
        writer.shutdown().await.unwrap();
        n
    });
    let data = pattern(40 << 20);
    let (mut reader, mut writer) = split(near);
    let send = async {
        // All sizes, also those that wrap in the buffer.
        let (mut at, mut len) = (0, 1);
        while at < data.len() {
            let now = len.min(data.len() - at);
            writer.write_all(&data[at..at + now]).await.unwrap();
            at += now;
            len = (len * 3 + 1) % 500_009;
        }
        writer.flush().await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let mut got = Vec::new();
    let (n, ()) = tokio::join!(reader.read_to_end(&mut got), send);
    assert_eq!(n.unwrap(), data.len());
    assert!(got == data);
    assert_eq!(echo.await.unwrap(), data.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_to_ordinary_tcp() {
    let origin = TcpListener::bind(any()).await.unwrap();
    let origin_addr = origin.local_addr().unwrap();
    let served = tokio::spawn(async move {
        let (mut tcp, _) = origin.accept().await.unwrap();
        let mut request = Vec::new();
        tcp.read_to_end(&mut request).await.unwrap();
        tcp.write_all(&pattern(3 << 20)).await.unwrap();
        tcp.shutdown().await.unwrap();
        request
    });
    let (listener, addr) = listen();
    let gateway = tokio::spawn(async move {
        let mut exs = IoStream::new(listener.accept().await.unwrap()).unwrap();
        let mut tcp = TcpStream::connect(origin_addr).await.unwrap();
        copy_bidirectional(&mut exs, &mut tcp).await.unwrap()
    });
    let mut client = connect(addr).await;
    client.write_all(&pattern(1 << 20)).await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert!(answer == pattern(3 << 20));
    assert!(served.await.unwrap() == pattern(1 << 20));
    assert_eq!(gateway.await.unwrap(), (1 << 20, 3 << 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_connections() {
    const CONNECTIONS: u32 = 60;
    let (listener, addr) = listen();
    let server = tokio::spawn(async move {
        for _ in 0..CONNECTIONS {
            let stream = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = split(IoStream::new(stream).unwrap());
                copy(&mut reader, &mut writer).await.unwrap();
                writer.shutdown().await.unwrap();
            });
        }
    });
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|n| {
            tokio::spawn(async move {
                let mut stream = connect(addr).await;
                for round in 0..20_u32 {
                    let message = vec![n as u8; (round * 300 + n) as usize + 1];
                    stream.write_all(&message).await.unwrap();
                    let mut answer = vec![0; message.len()];
                    stream.read_exact(&mut answer).await.unwrap();
                    assert!(answer == message);
                }
                stream.shutdown().await.unwrap();
                assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    server.await.unwrap();
}

#[tokio::test]
async fn writes_wait_for_a_reader_and_dropped_reads_and_writes_lose_nothing() {
    let (mut near, mut far) = streams().await;
    let data = pattern(64 << 20);
    let mut written = 0;
    // Nothing is read, so the stream stops accepting data at some point.
    while let Ok(n) =
        tokio::time::timeout(Duration::from_millis(200), near.write(&data[written..])).await
    {
        written += n.unwrap();
    }
    assert!(written < 16 << 20, "{written}");
    // Some of the reads are abandoned.
    let mut got = Vec::new();
    let mut buf = vec![0; 10_000];
    while got.len() < written {
        tokio::select! {
            biased;
            () = tokio::task::yield_now() => {}
            n = far.read(&mut buf) => got.extend_from_slice(&buf[..n.unwrap()]),
        }
    }
    assert!(got == data[..written]);
    near.flush().await.unwrap();
    let end = b"end".as_slice();
    near.write_all(end).await.unwrap();
    far.read_exact(&mut buf[..3]).await.unwrap();
    assert_eq!(&buf[..3], end);
}

#[tokio::test]
async fn the_same_over_ordinary_tcp() {
    let listener = TcpListener::bind(any()).await.unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap());
    let (peer, ours) = tokio::join!(peer, listener.accept());
    let (mut peer, ours) = (peer.unwrap(), ours.unwrap().0.into_std().unwrap());
    let socket = Socket::from_tcp(&Context::global().unwrap(), ours.into()).unwrap();
    let mut near = IoStream::new(Stream::new(socket)).unwrap();
    let echo = tokio::spawn(async move {
        let (mut reader, mut writer) = split(&mut peer);
        copy(&mut reader, &mut writer).await.unwrap();
        writer.shutdown().await.unwrap();
    });
    let data = pattern(10 << 20);
    let mut got = Vec::new();
    let (mut reader, mut writer) = split(&mut near);
    let send = async {
        writer.write_all(&data).await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let (n, ()) = tokio::join!(reader.read_to_end(&mut got), send);
    assert_eq!(n.unwrap(), data.len());
    assert!(got == data);
    echo.await.unwrap();
}

/// The time limit applies to operations: it makes no hole in the data that writes have accepted.
#[tokio::test]
async fn a_limit_of_sends_makes_no_hole_in_what_was_written() {
    let (mut near, mut far) = streams().await;
    let limit = Some(Duration::from_millis(300));
    near.socket()
        .set_options(|options| options.send_timeout = limit)
        .unwrap();
    let data = pattern(4 << 20);
    let mut written = 0;
    // Until the peer's memory is full, and writes have waited for some time.
    while let Ok(n) =
        tokio::time::timeout(Duration::from_millis(200), near.write(&data[written..])).await
    {
        written += n.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(400)).await;
    let mut all = vec![0; written];
    let read = tokio::time::timeout(Duration::from_secs(5), far.read_exact(&mut all)).await;
    assert!(read.is_ok(), "bytes that were written do not come");
    assert!(all == data[..written]);
    near.write_all(b"and on").await.unwrap();
    near.shutdown().await.unwrap();
    let mut rest = Vec::new();
    far.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"and on");
}

#[tokio::test]
async fn small_odd_buffers() {
    let (listener, addr) = listen();
    let context = Context::global().unwrap();
    let (near, far) = tokio::join!(Stream::connect(&context, addr), listener.accept());
    let sizes = |chunk, receives, send| Buffers {
        chunk,
        receives,
        send,
    };
    let mut near = IoStream::with_buffers(near.unwrap(), sizes(7, 1, 5)).unwrap();
    let mut far = IoStream::with_buffers(far.unwrap(), sizes(3, 2, 100)).unwrap();
    let data = pattern(5000);
    let mut got = vec![0; 5000];
    let (a, b) = tokio::join!(near.write_all(&data), far.read_exact(&mut got));
    a.unwrap();
    b.unwrap();
    assert_eq!(got, data);

    let (third, fourth) = tokio::join!(Stream::connect(&context, addr), listener.accept());
    let zero = IoStream::with_buffers(third.unwrap(), sizes(0, 1, 1)).err();
    assert_eq!(zero, Some(weft_exs::Errno::INVAL));
    let wraps = IoStream::with_buffers(fourth.unwrap(), sizes(usize::MAX, 2, 1)).err();
    assert_eq!(wraps, Some(weft_exs::Errno::INVAL));
}
