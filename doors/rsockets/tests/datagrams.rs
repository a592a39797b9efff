//! Datagram sockets as their programs use them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_rsockets::poll::{Entry, What, poll};
use weft_rsockets::{
    DatagramSocket, MAX_DATAGRAM, Options, Received, RecvFlags, Shutdown, Sink, Source,
};
use weft_verbs::Device;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);
const V4: &str = "127.0.0.1:0";
const V6: &str = "[::1]:0";

/// A socket with an address, of a device of its own: as of another process.
fn bound(addr: &str) -> DatagramSocket {
    let device = Device::open().unwrap();
    let addr: std::net::SocketAddr = addr.parse().unwrap();
    let socket = DatagramSocket::new(&device, addr.is_ipv6()).unwrap();
    socket.bind(addr).unwrap();
    socket.set_recv_timeout(Some(LONG));
    socket.set_send_timeout(Some(LONG));
    socket
}

fn connected(addr: &str) -> (DatagramSocket, DatagramSocket) {
    let (a, b) = (bound(addr), bound(addr));
    a.connect(Some(b.local_addr().unwrap())).unwrap();
    b.connect(Some(a.local_addr().unwrap())).unwrap();
    (a, b)
}

fn send(socket: &DatagramSocket, bytes: &[u8]) -> Result<usize, Errno> {
    socket.send(&[Source::Bytes(bytes)], None, false)
}

fn send_to(from: &DatagramSocket, bytes: &[u8], to: &DatagramSocket) {
    let to = to.local_addr().unwrap();
    let sent = from.send(&[Source::Bytes(bytes)], Some(to), false);
    assert_eq!(sent, Ok(bytes.len()));
}

fn recv(
    socket: &DatagramSocket,
    room: usize,
    flags: RecvFlags,
) -> Result<(Vec<u8>, Received), Errno> {
    let mut bytes = vec![0; room];
    let message = socket.recv(&mut [Sink::Bytes(&mut bytes)], flags)?;
    let message = message.expect("nobody has shut it down");
    bytes.truncate(message.len);
    Ok((bytes, message))
}

fn wait_for(socket: &DatagramSocket, wanted: PollFlags, timeout: Duration) -> PollFlags {
    let mut entries = [Entry {
        what: What::Socket(socket),
        wanted,
        ready: PollFlags::empty(),
    }];
    poll(&mut entries, Some(timeout)).unwrap();
    entries[0].ready
}

#[test]
fn each_message_comes_whole_with_its_sender() {
    for addr in [V4, V6] {
        let (a, b, c) = (bound(addr), bound(addr), bound(addr));
        for len in [0, 1, 1000, 4096, 4097, 60_000, MAX_DATAGRAM] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            for from in [&a, &b] {
                send_to(from, &bytes, &c);
                let (got, message) = recv(&c, MAX_DATAGRAM, RecvFlags::empty()).unwrap();
                assert!(got == bytes, "{len} bytes");
                assert_eq!((message.len, message.full), (len, len));
                assert_eq!(message.from, from.local_addr().unwrap());
                // And the answer finds its way.
                send_to(&c, b"answer", from);
                let (answer, message) = recv(from, 100, RecvFlags::empty()).unwrap();
                assert_eq!(answer, b"answer");
                assert_eq!(message.from, c.local_addr().unwrap());
            }
        }
        let too_long = vec![0; MAX_DATAGRAM + 1];
        let to = Some(c.local_addr().unwrap());
        let sent = a.send(&[Source::Bytes(&too_long)], to, false);
        assert_eq!(sent, Err(Errno::MSGSIZE));
    }
}

#[test]
fn pieces_and_what_is_cut_off() {
    let (a, b) = connected(V4);
    let pieces = [
        Source::Bytes(b"one "),
        Source::Bytes(b""),
        Source::Bytes(b"message"),
    ];
    assert_eq!(a.send(&pieces, None, false), Ok(11));
    let (seen, message) = recv(&b, 3, RecvFlags::PEEK).unwrap();
    assert_eq!((seen.as_slice(), message.full), (&b"one"[..], 11));
    let (mut head, mut tail) = ([0; 2], [0; 5]);
    let mut sinks = [Sink::Bytes(&mut head), Sink::Bytes(&mut tail)];
    let message = b.recv(&mut sinks, RecvFlags::empty()).unwrap().unwrap();
    assert_eq!((message.len, message.full), (7, 11));
    assert_eq!((&head, &tail), (b"on", b"e mes"));
    // The rest is gone, and the next one is next.
    send(&a, b"next").unwrap();
    assert_eq!(recv(&b, 100, RecvFlags::empty()).unwrap().0, b"next");
    assert_eq!(
        recv(&b, 100, RecvFlags::DONTWAIT).unwrap_err(),
        Errno::AGAIN
    );
}

#[test]
fn a_connected_socket_hears_its_peer_alone() {
    let (a, b) = connected(V4);
    let stranger = bound(V4);
    assert_eq!(send(&stranger, b"to whom?"), Err(Errno::DESTADDRREQ));
    send_to(&stranger, b"hello", &b);
    send(&a, b"from the peer").unwrap();
    assert_eq!(
        recv(&b, 100, RecvFlags::empty()).unwrap().0,
        b"from the peer"
    );
    // It may still send to others.
    send_to(&b, b"hello, stranger", &stranger);
    assert_eq!(
        recv(&stranger, 100, RecvFlags::empty()).unwrap().0,
        b"hello, stranger"
    );
    b.connect(None).unwrap();
    assert_eq!(b.peer_addr(), Err(Errno::NOTCONN));
    send_to(&stranger, b"hello again", &b);
    assert_eq!(recv(&b, 100, RecvFlags::empty()).unwrap().0, b"hello again");
    let v6 = "[::1]:9".parse().unwrap();
    assert_eq!(b.connect(Some(v6)), Err(Errno::AFNOSUPPORT));
}

#[test]
fn an_address_is_taken_where_none_was_given() {
    let device = Device::open().unwrap();
    let client = DatagramSocket::new(&device, false).unwrap();
    assert_eq!(client.local_addr().unwrap(), "0.0.0.0:0".parse().unwrap());
    let server = bound("0.0.0.0:0");
    let port = server.local_addr().unwrap().port();
    client.connect(Some(([127, 0, 0, 1], port).into())).unwrap();
    let mine = client.local_addr().unwrap();
    assert!(mine.ip().is_loopback() && mine.port() != 0, "{mine}");
    send(&client, b"hello").unwrap();
    let (_, message) = recv(&server, 100, RecvFlags::empty()).unwrap();
    assert_eq!(message.from, mine);
    assert_eq!(client.bind(V4.parse().unwrap()), Err(Errno::INVAL));
    let taken = DatagramSocket::new(&device, false).unwrap();
    let result = taken.bind(([127, 0, 0, 1], port).into());
    assert_eq!(result, Err(Errno::ADDRINUSE));
}

/// Two sockets of one device at one port of two addresses: their queue pairs would have one number.
#[test]
fn one_port_of_two_addresses() {
    let device = Device::open().unwrap();
    let first = DatagramSocket::new(&device, false).unwrap();
    first.bind(V4.parse().unwrap()).unwrap();
    let port = first.local_addr().unwrap().port();
    let second = DatagramSocket::new(&device, false).unwrap();
    second.bind(([127, 0, 0, 2], port).into()).unwrap();
    for (from, to) in [(&first, &second), (&second, &first)] {
        to.set_recv_timeout(Some(LONG));
        send_to(from, b"hello", to);
        let (got, message) = recv(to, 100, RecvFlags::empty()).unwrap();
        assert_eq!(
            (got.as_slice(), message.from),
            (&b"hello"[..], from.local_addr().unwrap())
        );
    }
}

#[test]
fn ipv4_by_a_socket_for_ipv6() {
    let device = Device::open().unwrap();
    let dual = bound("[::]:0");
    let v4 = DatagramSocket::new(&device, false).unwrap();
    let port = dual.local_addr().unwrap().port();
    v4.connect(Some(([127, 0, 0, 1], port).into())).unwrap();
    send(&v4, b"hello").unwrap();
    let (_, message) = recv(&dual, 100, RecvFlags::empty()).unwrap();
    let mapped = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    assert_eq!(message.from.ip(), mapped);
    dual.connect(Some(message.from)).unwrap();
    assert_eq!(dual.peer_addr().unwrap().ip(), mapped);
    send(&dual, b"hello, IPv4").unwrap();
    v4.set_recv_timeout(Some(LONG));
    assert_eq!(
        recv(&v4, 100, RecvFlags::empty()).unwrap().0,
        b"hello, IPv4"
    );
    send(&v4, b"connected").unwrap();
    assert_eq!(
        recv(&dual, 100, RecvFlags::empty()).unwrap().0,
        b"connected"
    );
}

#[test]
fn readiness_limits_of_time_and_ends() {
    let (a, b) = connected(V4);
    assert_eq!(
        wait_for(&b, PollFlags::IN, Duration::ZERO),
        PollFlags::empty()
    );
    assert_eq!(
        wait_for(&b, PollFlags::IN | PollFlags::OUT, LONG),
        PollFlags::OUT
    );
    thread::scope(|s| {
        // One alone, which this thread drives; and two, which the engine does.
        s.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            send(&a, b"x").unwrap();
        });
        assert_eq!(wait_for(&b, PollFlags::IN, LONG), PollFlags::IN);
    });
    recv(&b, 1, RecvFlags::empty()).unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            send(&a, b"x").unwrap();
        });
        let place = |socket| Entry {
            what: What::Socket(socket),
            wanted: PollFlags::IN,
            ready: PollFlags::empty(),
        };
        let mut entries = [place(&a), place(&b)];
        assert_eq!(poll(&mut entries, Some(LONG)), Ok(1));
        assert_eq!(entries[1].ready, PollFlags::IN);
    });
    recv(&b, 1, RecvFlags::empty()).unwrap();
    b.set_recv_timeout(Some(Duration::from_millis(30)));
    let begun = Instant::now();
    assert_eq!(recv(&b, 1, RecvFlags::empty()).unwrap_err(), Errno::AGAIN);
    assert!(begun.elapsed() >= Duration::from_millis(30));
    // A receive that waits hears that its direction was ended.
    b.set_recv_timeout(None);
    thread::scope(|s| {
        let waiting = s.spawn(|| b.recv(&mut [], RecvFlags::empty()));
        thread::sleep(Duration::from_millis(20));
        b.shutdown(Shutdown::Read).unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(None));
    });
    b.shutdown(Shutdown::Write).unwrap();
    assert_eq!(send(&b, b"x"), Err(Errno::PIPE));
    a.connect(None).unwrap();
    assert_eq!(a.shutdown(Shutdown::Both), Err(Errno::NOTCONN));
    thread::scope(|s| {
        let waiting = s.spawn(|| a.recv(&mut [], RecvFlags::empty()));
        thread::sleep(Duration::from_millis(20));
        a.close();
        assert_eq!(waiting.join().unwrap(), Err(Errno::BADF));
    });
    assert_eq!(wait_for(&a, PollFlags::IN, Duration::ZERO), PollFlags::NVAL);
}

/// More than a queue has places for: the rest is lost, and no message is damaged.
#[test]
fn what_finds_no_place_is_lost() {
    let device = Device::open().unwrap();
    let b = DatagramSocket::new(&device, false).unwrap();
    let few = Options {
        recv_queue: 16,
        ..Options::default()
    };
    b.set_options(|options| *options = few);
    b.bind(V4.parse().unwrap()).unwrap();
    assert!(b.has_begun());
    let a = bound(V4);
    for i in 0..100_u8 {
        send_to(&a, &[i; 100], &b);
    }
    // What was sent is there, or lost, before this.
    let mut seen = Vec::new();
    let end = Instant::now() + LONG;
    while seen.len() < 16 {
        assert!(Instant::now() < end, "{} came", seen.len());
        if let Ok((bytes, _)) = recv(&b, 200, RecvFlags::DONTWAIT) {
            assert_eq!(bytes, [bytes[0]; 100]);
            seen.push(bytes[0]);
        }
    }
    assert!(seen.is_sorted(), "{seen:?}");
    // Places are free again; what is lost meanwhile is sent again.
    b.set_recv_timeout(Some(Duration::from_millis(100)));
    let is_last = |bytes: &[u8]| bytes == b"the last";
    loop {
        assert!(Instant::now() < end, "no place is free");
        send_to(&a, b"the last", &b);
        if recv(&b, 200, RecvFlags::empty()).is_ok_and(|(bytes, _)| is_last(&bytes)) {
            break;
        }
    }
}

#[test]
fn many_messages_both_ways_at_once() {
    const COUNT: u32 = 20_000;
    let (a, b) = connected(V4);
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            // Until the last one has been heard, not only answered: answers are lost, too.
            b.set_recv_timeout(Some(Duration::from_millis(50)));
            let mut bytes = [0; 4];
            while !done.load(Ordering::SeqCst) {
                let message = b.recv(&mut [Sink::Bytes(&mut bytes)], RecvFlags::empty());
                if let Ok(Some(_)) = message {
                    send(&b, &bytes).unwrap();
                }
            }
        });
        let mut heard = 0;
        let mut bytes = [0; 4];
        let mut take = |wait: bool| {
            let flags = if wait {
                RecvFlags::empty()
            } else {
                RecvFlags::DONTWAIT
            };
            a.recv(&mut [Sink::Bytes(&mut bytes)], flags).map(|_| bytes)
        };
        for i in 0..COUNT {
            send(&a, &i.to_be_bytes()).unwrap();
            while take(false).is_ok() {
                heard += 1;
            }
        }
        // Lost, it is sent again.
        a.set_recv_timeout(Some(Duration::from_millis(200)));
        loop {
            send(&a, &[0xff; 4]).unwrap();
            match take(true) {
                Ok(last) if last == [0xff; 4] => break,
                Ok(_) => heard += 1,
                Err(_) => {}
            }
        }
        done.store(true, Ordering::SeqCst);
        // On a machine with other work `b` seldom has a processor, and what overflows its socket is lost.
        assert!(heard > COUNT / 100, "{heard} of {COUNT}");
    });
}
