use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Outcome, Plain, PlainOp};
use crate::{Context, FilePiece, Memory, Piece, Ready, RecvFlags, Region};

/// A time limit that is reached only if something is wrong.
const LONG: Duration = Duration::from_secs(30);

/// A socket under test and its plain peer.
fn pair() -> (Arc<Plain>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(LONG)).unwrap();
    (Plain::new(OwnedFd::from(near)).unwrap(), far)
}

type Ends = (Sender<(u64, Outcome)>, Receiver<(u64, Outcome)>);

fn op(tx: &Sender<(u64, Outcome)>, token: u64, memory: impl Into<Memory>) -> PlainOp {
    let tx = tx.clone();
    PlainOp {
        memory: memory.into(),
        flags: RecvFlags::empty(),
        token,
        deadline: None,
        done: Box::new(move |outcome| {
            let _ = tx.send((token, outcome));
        }),
    }
}

fn all(mut op: PlainOp) -> PlainOp {
    op.flags = RecvFlags::WAITALL;
    op
}

fn end(rx: &Receiver<(u64, Outcome)>) -> (u64, Result<usize, Errno>, Vec<u8>) {
    let (token, outcome) = rx.recv_timeout(LONG).unwrap();
    let mut bytes = outcome.memory.into_vec();
    bytes.truncate(outcome.bytes);
    (token, outcome.result, bytes)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn what_can_be_done_at_once_is_done_in_the_caller() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    plain.send(op(&tx, 1, b"hello".to_vec()));
    let (token, outcome) = rx.try_recv().unwrap();
    assert_eq!((token, outcome.result), (1, Ok(5)));
    let mut got = [0; 5];
    far.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");

    far.write_all(b"there").unwrap();
    while !plain.ready().contains(Ready::IN) {}
    plain.recv(op(&tx, 2, vec![0; 100]));
    assert_eq!(end(&rx), (2, Ok(5), b"there".to_vec()));
    assert_eq!(plain.peer_addr().unwrap(), far.local_addr().unwrap());
    assert_eq!(plain.local_addr().unwrap(), far.peer_addr().unwrap());
    // Nothing had to wait, so the thread was not used.
    assert!(plain.watch.lock().unwrap().poller.is_none());
}

#[test]
fn receives_complete_in_order_and_wait_for_all_where_asked() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    plain.recv(op(&tx, 1, vec![0; 3]));
    plain.recv(all(op(&tx, 2, vec![0; 10])));
    plain.recv(op(&tx, 3, vec![]));
    plain.recv(all(op(&tx, 4, vec![0; 10])));
    plain.recv(op(&tx, 5, vec![0; 4]));
    far.write_all(b"abc").unwrap();
    assert_eq!(end(&rx), (1, Ok(3), b"abc".to_vec()));
    far.write_all(b"01234").unwrap();
    far.write_all(b"56789").unwrap();
    assert_eq!(end(&rx), (2, Ok(10), b"0123456789".to_vec()));
    assert_eq!(end(&rx), (3, Ok(0), vec![]));
    far.write_all(b"xy").unwrap();
    drop(far);
    assert_eq!(end(&rx), (4, Ok(2), b"xy".to_vec()), "to the end");
    assert_eq!(end(&rx), (5, Ok(0), vec![]));
    plain.recv(op(&tx, 6, vec![0; 4]));
    assert_eq!(end(&rx), (6, Ok(0), vec![]));
}

#[test]
fn large_sends_wait_for_room_and_shutdown_for_sends() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let data = pattern(20 << 20);
    let context = Context::global().unwrap();
    let region = Region::alloc(&context, 8 << 20).unwrap();
    region.write(0, &data[4 << 20..12 << 20]).unwrap();
    plain.send(op(&tx, 1, data[..4 << 20].to_vec()));
    plain.send(op(&tx, 2, region.whole()));
    plain.send(op(
        &tx,
        3,
        Memory::List(vec![
            data[12 << 20..(12 << 20) + 5].to_vec().into(),
            Memory::List(vec![
                vec![].into(),
                data[(12 << 20) + 5..(12 << 20) + 9].to_vec().into(),
                data[(12 << 20) + 9..13 << 20].to_vec().into(),
            ]),
            vec![].into(),
            data[13 << 20..].to_vec().into(),
        ]),
    ));
    let (end_tx, end_rx) = channel();
    plain.shutdown(Box::new(move |r| end_tx.send(r).unwrap()));
    assert!(end_rx.try_recv().is_err());
    assert!(!plain.ready().contains(Ready::OUT), "others are before us");
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert!(got == data);
    for (token, len) in [(1, 4 << 20), (2, 8 << 20), (3, 8 << 20)] {
        let (t, outcome) = rx.recv_timeout(LONG).unwrap();
        assert_eq!((t, outcome.result, outcome.bytes), (token, Ok(len), len));
    }
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
    plain.send(op(&tx, 9, vec![1]));
    assert_eq!(end(&rx), (9, Err(Errno::PIPE), vec![]), "and no signal");
}

#[test]
fn registered_lists_are_filled_piece_by_piece() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let region = Region::alloc(&Context::global().unwrap(), 100).unwrap();
    let list = Memory::List(vec![
        region.slice(90, 3).unwrap(),
        vec![0; 2].into(),
        region.slice(10, 4).unwrap(),
    ]);
    plain.recv(all(op(&tx, 1, list)));
    far.write_all(b"abcd").unwrap();
    far.write_all(b"efghi").unwrap();
    assert_eq!(end(&rx), (1, Ok(9), b"abcdefghi".to_vec()));
    // A range outside its region.
    plain.recv(op(
        &tx,
        2,
        Memory::Region {
            region,
            off: 99,
            len: 2,
        },
    ));
    assert_eq!(end(&rx), (2, Err(Errno::FAULT), vec![]));
}

#[test]
fn a_peer_that_aborts_ends_everything() {
    let (plain, far) = pair();
    let (tx, rx): Ends = channel();
    plain.send(op(&tx, 1, vec![7; 64 << 20]));
    plain.recv(op(&tx, 2, vec![0; 4]));
    // Closed with unread bytes.
    drop(far);
    let mut ends = [end(&rx), end(&rx)];
    ends.sort_by_key(|e| e.0);
    assert!(matches!(ends[0].1, Err(Errno::CONNRESET | Errno::PIPE)));
    assert!(ends[0].2.len() < 64 << 20);
    assert!(matches!(ends[1].1, Err(Errno::CONNRESET) | Ok(0)));
    plain.send(op(&tx, 3, vec![1]));
    assert_eq!(end(&rx).1, Err(Errno::PIPE));
}

#[test]
fn cancel_by_token_and_all() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    plain.recv(all(op(&tx, 1, vec![0; 8])));
    plain.recv(op(&tx, 2, vec![0; 8]));
    plain.recv(op(&tx, 3, vec![0; 8]));
    far.write_all(b"abc").unwrap();
    while plain
        .recv
        .lock()
        .unwrap()
        .queue
        .front()
        .is_some_and(|job| matches!(job, super::Job::Move(moving) if moving.cursor.done < 3))
    {}
    assert_eq!(plain.cancel(Some(2)), 1);
    assert_eq!(plain.cancel(Some(2)), 0);
    assert_eq!(end(&rx), (2, Err(Errno::CANCELED), vec![]));
    assert_eq!(plain.cancel(Some(1)), 1);
    assert_eq!(end(&rx), (1, Err(Errno::CANCELED), b"abc".to_vec()));
    far.write_all(b"defg").unwrap();
    assert_eq!(end(&rx), (3, Ok(4), b"defg".to_vec()));
    plain.recv(op(&tx, 4, vec![0; 8]));
    let (poll_tx, poll_rx) = channel();
    plain.poll(Ready::IN, 5, Box::new(move |r| poll_tx.send(r).unwrap()));
    assert_eq!(plain.cancel(None), 2);
    assert_eq!(end(&rx), (4, Err(Errno::CANCELED), vec![]));
    assert_eq!(poll_rx.recv().unwrap(), Err(Errno::CANCELED));
}

#[test]
fn deadlines_end_what_is_late_and_nothing_else() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let soon = Instant::now() + Duration::from_millis(30);
    plain.recv(op(&tx, 1, vec![0; 8]));
    plain.recv(PlainOp {
        deadline: Some(soon + Duration::from_millis(20)),
        ..op(&tx, 2, vec![0; 8])
    });
    plain.recv(PlainOp {
        deadline: Some(soon),
        ..op(&tx, 3, vec![0; 8])
    });
    plain.send(PlainOp {
        deadline: Some(soon),
        ..op(&tx, 4, vec![0; 64 << 20])
    });
    let mut late = [end(&rx), end(&rx), end(&rx)];
    assert!(Instant::now() >= soon + Duration::from_millis(20));
    late.sort_by_key(|e| e.0);
    for (got, token) in late.iter().zip([2, 3, 4]) {
        assert_eq!((got.0, got.1), (token, Err(Errno::TIMEDOUT)));
    }
    assert!(late[2].2.len() < 64 << 20, "the sent part is counted");
    far.write_all(b"late").unwrap();
    assert_eq!(end(&rx), (1, Ok(4), b"late".to_vec()));
}

#[test]
fn polls_tell_once() {
    let (plain, mut far) = pair();
    let (tx, rx) = channel();
    let poll = |wanted, n| {
        let tx = tx.clone();
        plain.poll(wanted, n, Box::new(move |r| tx.send((n, r)).unwrap()));
    };
    poll(Ready::OUT, 1);
    assert_eq!(rx.try_recv().unwrap(), (1, Ok(Ready::OUT)));
    poll(Ready::IN, 2);
    poll(Ready::IN | Ready::OUT, 3);
    assert_eq!(rx.try_recv().unwrap(), (3, Ok(Ready::OUT)));
    assert!(rx.try_recv().is_err());
    far.write_all(b"x").unwrap();
    assert_eq!(rx.recv_timeout(LONG).unwrap(), (2, Ok(Ready::IN)));
    // Behind a waiting send a new one would not start.
    let (ends, sent): Ends = channel();
    plain.send(op(&ends, 1, vec![0; 64 << 20]));
    poll(Ready::OUT, 4);
    assert!(rx.try_recv().is_err());
    assert_eq!(plain.cancel(Some(1)), 1);
    assert_eq!(end(&sent).1, Err(Errno::CANCELED));
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        far.read_to_end(&mut all).unwrap();
        all.len()
    });
    assert_eq!(rx.recv_timeout(LONG).unwrap(), (4, Ok(Ready::OUT)));
    let (end_tx, end_rx) = channel();
    plain.shutdown(Box::new(move |r| end_tx.send(r).unwrap()));
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
    assert!(reader.join().unwrap() < 64 << 20);
}

#[test]
fn close_sends_what_waits_and_ends_the_rest() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let data = pattern(16 << 20);
    plain.recv(op(&tx, 1, vec![0; 8]));
    plain.send(op(&tx, 2, data.clone()));
    let (end_tx, end_rx) = channel();
    plain.close(Box::new(move |r| end_tx.send(r).unwrap()));
    assert_eq!(end(&rx), (1, Err(Errno::CANCELED), vec![]));
    plain.recv(op(&tx, 3, vec![0; 8]));
    assert_eq!(end(&rx).1, Err(Errno::BADF));
    plain.send(op(&tx, 4, vec![0; 8]));
    // The program's last handle; the waiting operation continues.
    drop(plain);
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert!(got == data);
    let mut ends = [end(&rx), end(&rx)];
    ends.sort_by_key(|e| e.0);
    assert_eq!((ends[0].0, ends[0].1), (2, Ok(16 << 20)));
    assert_eq!((ends[1].0, ends[1].1), (4, Err(Errno::BADF)));
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
}

#[test]
fn only_connected_stream_sockets() {
    use rustix::net::{AddressFamily, SocketType, socket};
    let new = |fd| Plain::new(fd).err();
    let udp = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    assert_eq!(new(udp), Some(Errno::OPNOTSUPP));
    let tcp = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let context = Context::global().unwrap();
    let socket = crate::Socket::from_tcp(&context, tcp.try_clone().unwrap());
    assert_eq!(socket.err(), Some(Errno::NOTCONN));
    // To close it.
    assert_eq!(new(tcp), None);
    let file = std::fs::File::open("/proc/self/status").unwrap();
    assert_eq!(new(file.into()), Some(Errno::NOTSOCK));
}

#[test]
fn several_threads_lose_and_swap_nothing() {
    const EACH: usize = 500;
    const LEN: usize = 3000;
    let (plain, far) = pair();
    let echo = std::thread::spawn(move || {
        std::io::copy(&mut &far, &mut &far).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let (tx, rx): Ends = channel();
    let gate = Barrier::new(3);
    std::thread::scope(|s| {
        for t in 0..2_u8 {
            let (plain, tx, gate) = (&plain, tx.clone(), &gate);
            s.spawn(move || {
                gate.wait();
                for _ in 0..EACH {
                    plain.send(op(&tx, 1, vec![t; LEN]));
                }
            });
        }
        gate.wait();
        for n in 0..2 * EACH {
            plain.recv(all(op(&tx, 2 + n as u64, vec![9; LEN])));
        }
    });
    let mut sent = 0;
    let mut next = 2;
    let mut of = [0; 2];
    for _ in 0..4 * EACH {
        let (token, result, bytes) = end(&rx);
        assert_eq!(result, Ok(LEN));
        if token == 1 {
            sent += 1;
            continue;
        }
        assert_eq!(token, next, "in order");
        next += 1;
        // Sends are not interleaved.
        assert!(bytes.iter().all(|b| *b == bytes[0]));
        of[usize::from(bytes[0])] += 1;
    }
    assert_eq!((sent, of), (2 * EACH, [EACH; 2]));
    drop(plain);
    echo.join().unwrap();
}

#[test]
fn files_with_headers_and_trailers_keep_their_place() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let data = pattern(5 << 20);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&data).unwrap();
    let file = Arc::new(OwnedFd::from(file));
    let part = |offset, len| {
        Piece::File(FilePiece {
            file: Arc::clone(&file),
            offset,
            len,
        })
    };
    let context = Context::global().unwrap();
    let (end_tx, end_rx) = channel();
    plain.send(op(&tx, 1, b"before".to_vec()));
    for n in 0..2 {
        let end_tx = end_tx.clone();
        let pieces = vec![
            Piece::Memory(b"head".to_vec().into()),
            part(3, None),
            Piece::Memory(vec![].into()),
            part((5 << 20) - 4, Some(100)),
            part(7, Some(0)),
            part(1 << 40, None),
            part(0, Some(300_000)),
            Piece::Memory(b"tail".to_vec().into()),
        ];
        let done = Box::new(move |r, bytes| end_tx.send((n, r, bytes)).unwrap());
        plain.send_file(&context, pieces, 9, None, done).unwrap();
    }
    plain.send(op(&tx, 2, b"after".to_vec()));
    plain.shutdown(Box::new(drop));
    let mut once = b"head".to_vec();
    once.extend_from_slice(&data[3..]);
    once.extend_from_slice(&data[data.len() - 4..]);
    once.extend_from_slice(&data[..300_000]);
    once.extend_from_slice(b"tail");
    let want = [b"before", &once[..], &once, b"after"].concat();
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert!(got == want);
    for n in 0..2 {
        let end = end_rx.recv_timeout(LONG).unwrap();
        assert_eq!(end, (n, Ok(once.len()), once.len()));
    }
    assert_eq!(end(&rx).0, 1);
    assert_eq!(end(&rx).0, 2);
}

#[test]
fn errors_of_files_and_cancelled_files_say_how_far_they_got() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let context = Context::global().unwrap();
    let (end_tx, end_rx) = channel();
    let send = |file: OwnedFd, offset, deadline| {
        let end_tx = end_tx.clone();
        let pieces = vec![
            Piece::Memory(b"head".to_vec().into()),
            Piece::File(FilePiece {
                file: Arc::new(file),
                offset,
                len: None,
            }),
            Piece::Memory(b"never".to_vec().into()),
        ];
        let done = Box::new(move |r, bytes| end_tx.send((r, bytes)).unwrap());
        plain
            .send_file(&context, pieces, 9, deadline, done)
            .unwrap();
    };
    let dir = std::fs::File::open("/").unwrap();
    send(dir.into(), 0, None);
    let some = std::fs::File::open("/proc/self/exe").unwrap();
    send(some.into(), u64::MAX, None);
    let write_only = tempfile::NamedTempFile::new().unwrap();
    let reopened = std::fs::File::options().write(true).open(write_only.path());
    send(reopened.unwrap().into(), 0, None);
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    send(pipe, 0, None);
    for why in [Errno::ISDIR, Errno::INVAL, Errno::BADF, Errno::SPIPE] {
        assert_eq!(end_rx.recv_timeout(LONG).unwrap(), (Err(why), 4));
    }
    plain.send(op(&tx, 1, b"next".to_vec()));
    assert_eq!(end(&rx).1, Ok(4));
    let mut got = [0; 20];
    far.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"headheadheadheadnext");

    let endless = || std::fs::File::open("/dev/zero").unwrap();
    send(endless().into(), 0, None);
    send(
        endless().into(),
        0,
        Some(Instant::now() + Duration::from_millis(20)),
    );
    plain.send(op(&tx, 2, b"!".to_vec()));
    // The first send blocks the second, which exceeds its time limit.
    let (late, none) = end_rx.recv_timeout(LONG).unwrap();
    assert_eq!((late, none), (Err(Errno::TIMEDOUT), 0));
    assert_eq!(plain.cancel(Some(9)), 1);
    let (cancelled, bytes) = end_rx.recv_timeout(LONG).unwrap();
    assert_eq!(cancelled, Err(Errno::CANCELED));
    plain.shutdown(Box::new(drop));
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), bytes + 1);
    assert_eq!(&got[..4], b"head");
    assert!(got[4..bytes].iter().all(|b| *b == 0));
    assert_eq!(got[bytes], b'!');
    assert_eq!(end(&rx).1, Ok(1));
}

#[test]
fn a_file_send_of_nothing_ends_in_its_turn() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    let context = Context::global().unwrap();
    plain.send(op(&tx, 1, vec![1; 16 << 20]));
    for pieces in [
        vec![],
        vec![Piece::File(FilePiece {
            file: Arc::new(std::fs::File::open("/").unwrap().into()),
            offset: 0,
            len: None,
        })],
    ] {
        let tx = tx.clone();
        let done = move |result, bytes| {
            let memory = vec![].into();
            let outcome = Outcome {
                result,
                bytes,
                memory,
            };
            tx.send((2, outcome)).unwrap();
        };
        plain
            .send_file(&context, pieces, 2, None, Box::new(done))
            .unwrap();
    }
    // Both have found the end of their file, but are not at the head.
    let over = |job: &super::Job| matches!(job, super::Job::File(file) if file.over.is_some());
    while plain
        .send
        .lock()
        .unwrap()
        .queue
        .iter()
        .filter(|job| over(job))
        .count()
        < 2
    {}
    assert!(rx.try_recv().is_err());
    assert!(!plain.ready().contains(Ready::OUT));
    let (end_tx, end_rx) = channel();
    plain.close(Box::new(move |r| end_tx.send(r).unwrap()));
    let reader = std::thread::spawn(move || std::io::copy(&mut far, &mut std::io::sink()));
    let ends: Vec<_> = (0..3).map(|_| end(&rx)).map(|e| (e.0, e.1)).collect();
    let want = [(1, Ok(16 << 20)), (2, Ok(0)), (2, Err(Errno::ISDIR))];
    assert_eq!(ends, want);
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
    drop(plain);
    assert_eq!(reader.join().unwrap().unwrap(), 16 << 20);
}

/// A peer that accepts nothing must not hold descriptor and memory for ever.
#[test]
fn a_closed_socket_gives_up_on_a_peer_that_takes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let linger = Duration::from_millis(200);
    let plain = Plain::lingering(near.into(), linger).unwrap();
    let (tx, rx): Ends = channel();
    plain.send(op(&tx, 1, vec![7; 64 << 20]));
    plain.send(op(&tx, 2, vec![7; 8]));
    let (end_tx, end_rx) = channel();
    let begun = Instant::now();
    plain.close_shared(Box::new(move |r| end_tx.send(r).unwrap()));
    let gone = Arc::downgrade(&plain);
    drop(plain);
    let (token, result, sent) = end(&rx);
    assert!(begun.elapsed() >= linger);
    assert_eq!((token, result), (1, Err(Errno::TIMEDOUT)));
    assert_eq!(end(&rx), (2, Err(Errno::TIMEDOUT), vec![]));
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Err(Errno::TIMEDOUT));
    while gone.strong_count() > 0 {
        assert!(begun.elapsed() < LONG, "its descriptor is still open");
        std::thread::yield_now();
    }
    // The peer received only a part, and can detect that.
    let got = far.read_to_end(&mut Vec::new());
    assert_eq!(got.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert!(sent.len() < 64 << 20);
}

#[test]
fn a_closed_socket_has_patience_with_a_slow_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let linger = Duration::from_millis(500);
    let plain = Plain::lingering(near.into(), linger).unwrap();
    let (tx, rx): Ends = channel();
    let len = 40 << 20;
    plain.send(op(&tx, 1, vec![7; len]));
    let (end_tx, end_rx) = channel();
    let begun = Instant::now();
    plain.close(Box::new(move |r| end_tx.send(r).unwrap()));
    // Pauses without a byte are shorter than the limit.
    let mut part = vec![0; 4 << 20];
    for _ in 0..10 {
        std::thread::sleep(linger / 5);
        far.read_exact(&mut part).unwrap();
    }
    assert!(begun.elapsed() > linger);
    assert_eq!(end(&rx).1, Ok(len));
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
    // After that the limit no longer applies.
    std::thread::sleep(linger + linger / 2);
    assert_eq!(far.read(&mut part).unwrap(), 0);
}

#[test]
fn the_end_follows_what_is_queued_in_the_kernel_with_bytes_unread() {
    let (plain, mut far) = pair();
    let (tx, rx): Ends = channel();
    far.write_all(&[1; 1000]).unwrap();
    while !plain.ready().contains(Ready::IN) {}
    plain.send(op(&tx, 1, vec![7; 1 << 20]));
    let (end_tx, end_rx) = channel();
    plain.close(Box::new(move |r| end_tx.send(r).unwrap()));
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), 1 << 20);
    assert_eq!(end(&rx).1, Ok(1 << 20));
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
}

/// The last handle of one socket closes only its own descriptor: the program's other descriptor for the same connection still works.
#[test]
fn a_last_handle_ends_nothing_but_itself() {
    let (plain, mut far) = pair();
    let mut other = TcpStream::from(rustix::io::dup(plain.as_fd()).unwrap());
    let (end_tx, end_rx) = channel();
    plain.close_shared(Box::new(move |r| end_tx.send(r).unwrap()));
    drop(plain);
    assert_eq!(end_rx.recv_timeout(LONG).unwrap(), Ok(()));
    other.write_all(b"still").unwrap();
    let mut got = [0; 5];
    far.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still");
}

#[test]
fn a_poll_beside_a_close_is_told() {
    let moment = Duration::from_millis(2);
    for _ in 0..100 {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let plain = Plain::new(near.into()).unwrap();
        let (tx, rx) = channel();
        std::thread::scope(|s| {
            // The poll has found the socket open and nothing to read; the close is faster than its wake-up.
            let polls = plain.polls.lock().unwrap();
            s.spawn(|| plain.poll(Ready::IN, 1, Box::new(move |r| tx.send(r).unwrap())));
            std::thread::sleep(moment);
            drop(polls);
            plain.close(Box::new(drop));
        });
        let told = rx.try_recv().unwrap();
        assert!(matches!(told, Err(Errno::CANCELED | Errno::BADF)));
    }
}
