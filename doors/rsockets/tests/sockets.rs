//! Sockets as their programs use them, on TCP and in shared memory.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_rsockets::poll::{Entry, What, poll};
use weft_rsockets::{Options, RecvFlags, Shutdown, Sink, Socket, Source};
use weft_verbs::{Device, LocalMode};

const MODES: [LocalMode; 2] = [LocalMode::Off, LocalMode::Auto];
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);

fn device(mode: LocalMode) -> Device {
    Device::builder().local(mode).open().unwrap()
}

fn listener(device: &Device, options: Options) -> Socket {
    let listener = Socket::new(device, false).unwrap();
    listener.set_options(|o| *o = options);
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    listener.listen(8).unwrap();
    listener
}

/// A connection with these options at both ends, of two devices: as between two processes.
fn pair_with(mode: LocalMode, options: Options) -> (Socket, Socket) {
    let listener = listener(&device(mode), options);
    let client = Socket::new(&device(mode), false).unwrap();
    client.set_options(|o| *o = options);
    client.connect(listener.local_addr().unwrap()).unwrap();
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    assert_eq!(client.peer_addr(), listener.local_addr());
    (client, server)
}

fn pair(mode: LocalMode) -> (Socket, Socket) {
    pair_with(mode, Options::default())
}

fn send(socket: &Socket, bytes: &[u8]) -> Result<usize, Errno> {
    socket.send(&[Source::Bytes(bytes)], false)
}

fn recv(socket: &Socket, max: usize, flags: RecvFlags) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; max];
    let n = socket.recv(&mut [Sink::Bytes(&mut bytes)], flags)?;
    bytes.truncate(n);
    Ok(bytes)
}

fn exactly(socket: &Socket, len: usize) -> Vec<u8> {
    let bytes = recv(socket, len, RecvFlags::WAITALL).unwrap();
    assert_eq!(bytes.len(), len);
    bytes
}

/// Bytes that differ from place to place.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            let x = (i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (x >> 56) as u8
        })
        .collect()
}

fn ready(socket: &Socket, wanted: PollFlags, timeout: Duration) -> PollFlags {
    let mut entries = [Entry {
        what: What::Socket(socket),
        wanted,
        ready: PollFlags::empty(),
    }];
    poll(&mut entries, Some(timeout)).unwrap();
    entries[0].ready
}

#[test]
fn bytes_go_both_ways_and_the_end_is_seen() {
    for mode in MODES {
        let (client, server) = pair(mode);
        assert_eq!(send(&client, b"question"), Ok(8));
        assert_eq!(exactly(&server, 8), b"question");
        assert_eq!(send(&server, b"answer"), Ok(6));
        // Of what is there, a part can be taken.
        assert_eq!(exactly(&client, 2), b"an");
        assert_eq!(recv(&client, 100, RecvFlags::empty()).unwrap(), b"swer");
        assert_eq!(send(&client, b"last words"), Ok(10));
        client.close();
        assert_eq!(exactly(&server, 10), b"last words");
        assert_eq!(recv(&server, 1, RecvFlags::empty()).unwrap(), b"");
        assert_eq!(send(&server, b"too late"), Err(Errno::PIPE));
    }
}

#[test]
fn large_streams_in_both_directions_at_once() {
    let small = Options {
        recv_buffer: 8192,
        send_buffer: 4096,
        send_queue: 16,
        recv_queue: 16,
        ..Options::default()
    };
    for mode in MODES {
        for options in [Options::default(), small] {
            let (a, b) = pair_with(mode, options);
            let len = 3_000_001;
            thread::scope(|scope| {
                for (socket, seed, other) in [(&a, 1, 2), (&b, 2, 1)] {
                    scope.spawn(move || {
                        let bytes = pattern(len, seed);
                        // In pieces of many lengths.
                        let (mut done, mut piece) = (0, 1);
                        while done < len {
                            let end = (done + piece).min(len);
                            assert_eq!(send(socket, &bytes[done..end]), Ok(end - done));
                            (done, piece) = (end, piece * 7 % 200_003);
                        }
                        socket.shutdown(Shutdown::Write).unwrap();
                    });
                    scope.spawn(move || {
                        let mut got = Vec::new();
                        loop {
                            let bytes = recv(socket, 77_777, RecvFlags::empty()).unwrap();
                            if bytes.is_empty() {
                                break;
                            }
                            got.extend(bytes);
                        }
                        assert!(got == pattern(len, other), "the bytes differ");
                    });
                }
            });
        }
    }
}

#[test]
fn half_a_connection_goes_on() {
    for mode in MODES {
        let (client, server) = pair(mode);
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(send(&client, b"x"), Err(Errno::PIPE));
        assert_eq!(recv(&server, 1, RecvFlags::empty()).unwrap(), b"");
        assert_eq!(send(&server, b"still here"), Ok(10));
        assert_eq!(exactly(&client, 10), b"still here");
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(recv(&client, 1, RecvFlags::empty()).unwrap(), b"");
        assert!(ready(&client, PollFlags::IN, LONG).contains(PollFlags::HUP));
    }
}

#[test]
fn nothing_waits_that_should_not() {
    for mode in MODES {
        let (client, server) = pair(mode);
        client.set_nonblocking(true);
        assert_eq!(recv(&client, 1, RecvFlags::empty()), Err(Errno::AGAIN));
        assert_eq!(recv(&server, 1, RecvFlags::DONTWAIT), Err(Errno::AGAIN));
        // Nobody reads: at some point no more goes in.
        let bytes = pattern(100_000, 0);
        let mut sent = 0;
        let refused = loop {
            match send(&client, &bytes[sent % 50_000..]) {
                Ok(n) => sent += n,
                Err(errno) => break errno,
            }
            assert!(sent < 1 << 20, "it went on and on");
        };
        assert_eq!(refused, Errno::AGAIN);
        assert!(sent >= 128 << 10);
        assert_eq!(
            ready(&client, PollFlags::OUT, Duration::ZERO),
            PollFlags::empty()
        );
        exactly(&server, sent);
        assert_eq!(ready(&client, PollFlags::OUT, LONG), PollFlags::OUT);
        assert!(send(&client, b"more").is_ok());
    }
}

#[test]
fn peeking_leaves_the_bytes() {
    let (client, server) = pair(LocalMode::Auto);
    send(&client, b"abc").unwrap();
    send(&client, b"def").unwrap();
    exactly(&server, 1);
    let peek = RecvFlags::PEEK | RecvFlags::WAITALL;
    assert_eq!(recv(&server, 5, peek).unwrap(), b"bcdef");
    let (mut one, mut other) = ([0; 2], [0; 9]);
    let mut sinks = [Sink::Bytes(&mut one), Sink::Bytes(&mut other)];
    assert_eq!(server.recv(&mut sinks, RecvFlags::empty()), Ok(5));
    assert_eq!((&one, &other[..3]), (b"bc", &b"def"[..]));
}

#[test]
fn pieces_are_sent_as_one() {
    let (client, server) = pair(LocalMode::Auto);
    let long = pattern(200, 3);
    let sources = [
        Source::Bytes(b"head"),
        Source::Bytes(b""),
        Source::Bytes(&long),
    ];
    assert_eq!(client.send(&sources, false), Ok(204));
    assert_eq!(exactly(&server, 204)[4..], long);
}

#[test]
fn connections_that_cannot_be_made() {
    let device = device(LocalMode::Auto);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = closed.local_addr().unwrap();
    drop(closed);
    let socket = Socket::new(&device, false).unwrap();
    assert_eq!(send(&socket, b"x"), Err(Errno::NOTCONN));
    assert_eq!(socket.connect(addr), Err(Errno::CONNREFUSED));
    // Without waiting, the error is there when one asks.
    socket.set_nonblocking(true);
    assert_eq!(socket.connect(addr), Err(Errno::INPROGRESS));
    let seen = ready(&socket, PollFlags::OUT, LONG);
    assert!(seen.contains(PollFlags::OUT | PollFlags::ERR), "{seen:?}");
    assert_eq!(socket.take_error(), Some(Errno::CONNREFUSED));
    assert_eq!(socket.take_error(), None);
    assert_eq!(
        socket.connect("[::1]:1".parse().unwrap()),
        Err(Errno::AFNOSUPPORT)
    );
    // What speaks MPA and is no rsocket.
    let cq = device.create_cq(4, None).unwrap();
    let other = weft_verbs::cm::Listener::bind(
        &device,
        "127.0.0.1:0".parse().unwrap(),
        1,
        &weft_verbs::cm::ConnParam::default(),
    )
    .unwrap();
    let addr = other.local_addr();
    let acceptor = thread::spawn({
        let pd = device.alloc_pd().unwrap();
        move || {
            let request = other.next_request(Some(LONG)).unwrap();
            let qp = pd.create_qp(&weft_verbs::QpInit::new(&cq, &cq)).unwrap();
            let conn = request.accept(qp, &weft_verbs::cm::ConnParam::default());
            let mut wc = [weft_verbs::Wc::default()];
            let _ = cq.wait(&mut wc, Some(Duration::from_millis(100)));
            drop(conn);
        }
    });
    socket.set_nonblocking(false);
    assert_eq!(socket.connect(addr), Err(Errno::PROTO));
    acceptor.join().unwrap();
}

#[test]
fn a_connection_is_made_without_waiting() {
    for mode in MODES {
        let listener = listener(&device(mode), Options::default());
        listener.set_nonblocking(true);
        assert_eq!(listener.accept().map(drop), Err(Errno::AGAIN));
        let client = Socket::new(&device(mode), false).unwrap();
        client.set_nonblocking(true);
        let addr = listener.local_addr().unwrap();
        // Under load it may be there before the call has looked.
        let begun = client.connect(addr);
        assert!(
            matches!(begun, Ok(()) | Err(Errno::INPROGRESS)),
            "{begun:?}"
        );
        assert_eq!(ready(&client, PollFlags::OUT, LONG), PollFlags::OUT);
        assert_eq!(client.take_error(), None);
        assert_eq!(client.connect(addr), Err(Errno::ISCONN));
        assert_eq!(ready(&listener, PollFlags::IN, LONG), PollFlags::IN);
        let (server, _) = listener.accept().unwrap();
        send(&client, b"hi").unwrap();
        assert_eq!(exactly(&server, 2), b"hi");
    }
}

#[test]
fn a_reset_is_a_reset() {
    for mode in MODES {
        let (client, server) = pair(mode);
        send(&client, b"lost or not").unwrap();
        client.set_linger(Some(Duration::ZERO));
        client.close();
        let seen = ready(&server, PollFlags::empty(), LONG);
        assert!(seen.contains(PollFlags::ERR | PollFlags::HUP), "{seen:?}");
        assert_eq!(server.take_error(), Some(Errno::CONNRESET));
        let end = loop {
            match recv(&server, 4, RecvFlags::empty()) {
                Ok(bytes) => assert!(!bytes.is_empty()),
                Err(errno) => break errno,
            }
        };
        assert_eq!(end, Errno::CONNRESET);
        assert_eq!(send(&server, b"x"), Err(Errno::CONNRESET));
    }
}

#[test]
fn several_are_waited_for_with_the_systems_own() {
    for mode in MODES {
        let (client, server) = pair(mode);
        let (other_client, other) = pair(mode);
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (told, tell) = mpsc::channel();
        let waiter = thread::spawn(move || {
            let mut seen = Vec::new();
            for _ in 0..3 {
                let wait = |what| Entry {
                    what,
                    wanted: PollFlags::IN,
                    ready: PollFlags::empty(),
                };
                let mut entries = [
                    wait(What::Socket(&server)),
                    wait(What::Nothing),
                    wait(What::Fd(read.as_fd())),
                    wait(What::Socket(&other)),
                ];
                assert_eq!(poll(&mut entries, Some(LONG)), Ok(1));
                let which = entries.iter().position(|e| !e.ready.is_empty()).unwrap();
                assert_eq!(entries[which].ready, PollFlags::IN);
                match which {
                    0 => drop(exactly(&server, 3)),
                    2 => drop(rustix::io::read(&read, &mut [0; 3]).unwrap()),
                    _ => drop(exactly(&other, 3)),
                }
                seen.push(which);
                told.send(which).unwrap();
            }
            seen
        });
        send(&client, b"one").unwrap();
        assert_eq!(tell.recv_timeout(LONG), Ok(0));
        rustix::io::write(&write, b"two").unwrap();
        assert_eq!(tell.recv_timeout(LONG), Ok(2));
        send(&other_client, b"333").unwrap();
        assert_eq!(tell.recv_timeout(LONG), Ok(3));
        assert_eq!(waiter.join().unwrap(), [0, 2, 3]);
    }
}

#[test]
fn a_wait_has_an_end() {
    let (client, _server) = pair(LocalMode::Auto);
    let begun = Instant::now();
    let nothing = ready(&client, PollFlags::IN, Duration::from_millis(30));
    assert_eq!(nothing, PollFlags::empty());
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[test]
fn calls_wait_as_long_as_the_socket_is_set() {
    const SHORT: Duration = Duration::from_millis(30);
    let timed = |call: &mut dyn FnMut() -> Result<usize, Errno>| {
        let begun = Instant::now();
        let outcome = call();
        assert!(begun.elapsed() >= SHORT, "{outcome:?}");
        outcome
    };
    for mode in MODES {
        let options = Options {
            recv_buffer: 64 << 10,
            send_buffer: 64 << 10,
            ..Options::default()
        };
        let listener = listener(&device(mode), options);
        listener.set_recv_timeout(Some(SHORT));
        listener.set_send_timeout(Some(SHORT));
        let nobody = timed(&mut || listener.accept().map(|_| 0));
        assert_eq!(nobody, Err(Errno::AGAIN));
        let client = Socket::new(&device(mode), false).unwrap();
        client.connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert_eq!(server.recv_timeout(), Some(SHORT));

        let mut bytes = [0; 100];
        let mut take = |flags| timed(&mut || server.recv(&mut [Sink::Bytes(&mut bytes)], flags));
        assert_eq!(take(RecvFlags::empty()), Err(Errno::AGAIN));
        send(&client, &[7; 40]).unwrap();
        assert_eq!(take(RecvFlags::WAITALL), Ok(40));

        // More than both buffers hold: what had room counts, and then nothing has.
        let much = pattern(1 << 20, 5);
        let sent = timed(&mut || send(&server, &much)).unwrap();
        assert!(sent > 0 && sent < much.len(), "{sent}");
        while let Ok(more) = timed(&mut || send(&server, &much)) {
            assert!(more < much.len(), "{more}");
        }
        assert_eq!(exactly(&client, sent), much[..sent]);
        server.set_send_timeout(None);
        assert_eq!(server.send_timeout(), None);
    }
}

#[test]
fn threads_that_wait_are_released() {
    for mode in MODES {
        let (client, server) = pair(mode);
        thread::scope(|scope| {
            let reader = scope.spawn(|| recv(&client, 1, RecvFlags::empty()));
            // A sender that waits for room, which there will not be.
            let writer = scope.spawn(|| send(&client, &pattern(4 << 20, 0)));
            assert!(ready(&server, PollFlags::IN, LONG).contains(PollFlags::IN));
            client.shutdown(Shutdown::Both).unwrap();
            assert_eq!(reader.join().unwrap().unwrap(), b"");
            let sent = writer.join().unwrap().unwrap();
            assert!(sent < 4 << 20);
        });
    }
}

#[test]
fn accepted_sockets_have_their_listeners_sizes() {
    let options = Options {
        recv_buffer: 64 << 10,
        recv_queue: 20,
        maps: 200,
        ..Options::default()
    };
    let (client, server) = pair_with(LocalMode::Auto, options);
    assert_eq!(server.options().recv_buffer, 64 << 10);
    // In eight bits there is no 200.
    assert_eq!(server.options().maps, 128);
    assert_eq!(client.options().recv_queue, 20);
}

#[test]
fn ipv6_and_both_ends_in_one_thread() {
    let device = device(LocalMode::Auto);
    let listener = Socket::new(&device, true).unwrap();
    listener.bind("[::1]:0".parse().unwrap()).unwrap();
    listener.listen(1).unwrap();
    let client = Socket::new(&device, true).unwrap();
    client.connect(listener.local_addr().unwrap()).unwrap();
    let (server, from) = listener.accept().unwrap();
    assert!(from.is_ipv6());
    client.keep_alive();
    send(&client, b"six").unwrap();
    assert_eq!(exactly(&server, 3), b"six");
}

#[test]
fn a_thread_that_others_leave_waiting_sleeps() {
    use rustix::time::{ClockId, clock_gettime};
    let listener = listener(&device(LocalMode::Off), Options::default());
    let addr = listener.local_addr().unwrap();
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..2 {
            let (tell, listener) = (tell.clone(), &listener);
            scope.spawn(move || {
                listener.set_nonblocking(true);
                loop {
                    let ready = ready(listener, PollFlags::IN, Duration::from_millis(500));
                    if ready.is_empty() || listener.accept().is_ok() {
                        break;
                    }
                }
                let spent = clock_gettime(ClockId::ThreadCPUTime);
                tell.send(Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32))
                    .unwrap();
            });
        }
        // For the test to say anything both must be asleep by then; a late one sees what is there, and the test passes.
        thread::sleep(Duration::from_millis(100));
        let client = Socket::new(&device(LocalMode::Off), false).unwrap();
        client.connect(addr).unwrap();
    });
    for _ in 0..2 {
        let spent = told.recv().unwrap();
        assert!(spent < Duration::from_millis(100), "{spent:?}");
    }
}

/// What one end still has to say when the other ends the connection is lost, and not waited for.
#[test]
fn both_ends_close_at_once() {
    for mode in MODES {
        for round in 0..100 {
            let (client, server) = pair(mode);
            if round % 2 == 0 {
                send(&client, &pattern(1000, 3)).unwrap();
            }
            let begun = Instant::now();
            thread::scope(|scope| {
                scope.spawn(|| client.close());
                scope.spawn(|| server.close());
            });
            assert!(begun.elapsed() < Duration::from_secs(5), "{mode:?} {round}");
        }
    }
}
