//! TLS under MPA: admission of peers, and attacks by a party between the two ends.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use weft_conformance::bed::{PATIENCE, pattern, take};
use weft_verbs::cm::{ConnParam, ConnectError, Connection, Listener, connect};
use weft_verbs::tls::{Identity, Tls, TlsError};
use weft_verbs::{Access, Cq, Device, EndReason, LocalMode, Pd, QpInit, RecvWr, SendWr, WcStatus};

/// The duration of one check for a request.
const GLANCE: Duration = Duration::from_millis(20);

struct Side {
    device: Device,
    pd: Pd,
    cq: Cq,
}

impl Side {
    fn new() -> Self {
        let device = Device::builder().local(LocalMode::Off).open().unwrap();
        Side {
            pd: device.alloc_pd().unwrap(),
            cq: device.create_cq(64, None).unwrap(),
            device,
        }
    }
    fn init(&self) -> QpInit {
        QpInit::new(&self.cq, &self.cq)
    }
    fn listen(&self, param: &ConnParam) -> Listener {
        Listener::bind(&self.device, "127.0.0.1:0".parse().unwrap(), 16, param).unwrap()
    }
    fn dial(&self, addr: SocketAddr, param: &ConnParam) -> Result<Connection, ConnectError> {
        connect(addr, &self.pd, &self.init(), param)
    }
}

fn anybody() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

fn with(tls: Option<Tls>) -> ConnParam {
    let mut param = ConnParam {
        tls,
        ..ConnParam::default()
    };
    param.options.timeout = Duration::from_secs(5);
    param
}

/// Connects through the address that `route` makes of the listener's, and returns both ends.
fn pair(
    a: &Side,
    b: &Side,
    ours: Option<Tls>,
    theirs: Option<Tls>,
    route: impl FnOnce(SocketAddr) -> SocketAddr,
) -> Result<(Connection, Connection), ConnectError> {
    let listener = b.listen(&with(theirs.clone()));
    let addr = route(listener.local_addr());
    let given_up = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = std::iter::repeat_with(|| listener.next_request(Some(GLANCE)))
                .take_while(|request| request.is_some() || !given_up.load(Ordering::SeqCst))
                .find_map(|request| request)?;
            let qp = b.pd.create_qp(&b.init()).unwrap();
            Some(request.accept(qp, &with(theirs)))
        });
        let dialled = a.dial(addr, &with(ours));
        given_up.store(true, Ordering::SeqCst);
        let here = accepted.join().unwrap();
        let there = dialled?;
        Ok((there, here.expect("a request")?))
    })
}

/// A listener alone, for dials that fail: no request may ever arrive.
fn refused(ours: Option<Tls>, theirs: Option<Tls>) -> ConnectError {
    let (a, b) = (Side::new(), Side::new());
    let listener = b.listen(&with(theirs));
    let error = a
        .dial(listener.local_addr(), &with(ours))
        .map(|_| ())
        .expect_err("a connection");
    assert!(listener.next_request(Some(Duration::ZERO)).is_none());
    error
}

#[test]
fn one_side_without_tls_is_told_so() {
    let error = refused(None, Some(anybody()));
    assert!(matches!(error, ConnectError::Protocol(_)), "{error:?}");
    assert!(error.to_string().contains("TLS"), "{error}");

    let error = refused(Some(anybody()), None);
    assert!(
        matches!(error, ConnectError::Tls(TlsError::ClosedInHandshake)),
        "{error:?}"
    );
    assert!(error.to_string().contains("TLS"), "{error}");
}

#[test]
fn each_side_takes_only_the_keys_that_it_allows() {
    let (alice, bob) = (Identity::generate().unwrap(), Identity::generate().unwrap());
    let only = |who: &Identity, known: &Identity| {
        let known = known.public_key();
        Tls::new(who.clone())
            .unwrap()
            .allow(move |key| *key == known)
            .unwrap()
    };
    let (a, b) = (Side::new(), Side::new());
    let (there, here) = pair(
        &a,
        &b,
        Some(only(&alice, &bob)),
        Some(only(&bob, &alice)),
        |addr| addr,
    )
    .unwrap();
    let (seen, shown) = (there.qp.tls().unwrap(), here.qp.tls().unwrap());
    assert_eq!(seen.peer, bob.public_key());
    assert_eq!(shown.peer, alice.public_key());
    assert_eq!(seen.binding, shown.binding);

    let mallory = Identity::generate().unwrap();
    let error = refused(Some(only(&mallory, &bob)), Some(only(&bob, &alice)));
    assert!(
        matches!(error, ConnectError::Tls(TlsError::KeyRefusedByPeer)),
        "{error:?}"
    );
    let error = refused(Some(only(&alice, &bob)), Some(only(&mallory, &alice)));
    assert!(
        matches!(&error, ConnectError::Tls(TlsError::KeyRefused(key)) if *key == mallory.public_key()),
        "{error:?}"
    );
}

/// A relay's change to the bytes from the initiator to the responder.
type Meddle = Box<dyn FnMut(&mut Vec<u8>) + Send>;

/// Relays bytes between its peer and `to`, and changes those of the first direction. The end of one direction ends the other.
fn relay(to: SocketAddr, mut meddle: Meddle) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(to).unwrap();
        let (mut near_too, mut far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut far_too, &mut near_too);
            let _ = near_too.shutdown(Shutdown::Both);
        });
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = near.read(&mut buffer) {
            let mut bytes = buffer[..n].to_vec();
            meddle(&mut bytes);
            if far.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Both);
    });
    addr
}

/// Writes through a relay: the relay cannot read the data, and all of it arrives.
#[test]
fn a_relay_sees_nothing_of_the_data() {
    let (a, b) = (Side::new(), Side::new());
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let eye = Arc::clone(&seen);
    let (there, _here) = pair(&a, &b, Some(anybody()), Some(anybody()), |addr| {
        relay(
            addr,
            Box::new(move |bytes| eye.lock().unwrap().extend_from_slice(bytes)),
        )
    })
    .unwrap();
    let secret = pattern(1, 300_000);
    let source = a.pd.reg_mr(secret.clone(), Access::empty()).unwrap();
    let sink =
        b.pd.alloc_mr(secret.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap();
    there
        .qp
        .post_send_one(
            SendWr::write(1, sink.remote(0))
                .sge(source.whole())
                .signaled(),
        )
        .unwrap();
    assert_eq!(take(&a.cq, 1)[0].status, WcStatus::Success);
    weft_conformance::bed::until("the last byte is there", || {
        sink.to_vec(0, secret.len()).unwrap() == secret
    });
    let seen = seen.lock().unwrap();
    assert!(seen.len() > secret.len());
    let part = &secret[100_000..100_016];
    assert!(!seen.windows(part.len()).any(|bytes| bytes == part));
    assert!(
        !seen.windows(6).any(|w| w == b"MPA ID"),
        "start-up is hidden too"
    );
}

/// A single changed byte, anywhere: no connection, or a lost one; and never a changed byte in the target's memory.
#[test]
fn a_changed_byte_ends_the_connection() {
    // The hello, the end of the handshake, the start-up frame, and the records of a Write at its begin, middle and end.
    for at in [0, 3, 11, 60, 300, 400, 500, 600, 900, 2_000, 17_000, 40_000] {
        let (a, b) = (Side::new(), Side::new());
        let passed = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&passed);
        let made = pair(&a, &b, Some(anybody()), Some(anybody()), |addr| {
            relay(
                addr,
                Box::new(move |bytes| {
                    let before = count.fetch_add(bytes.len(), Ordering::SeqCst);
                    if (before..before + bytes.len()).contains(&at) {
                        bytes[at - before] ^= 0x10;
                    }
                }),
            )
        });
        let Ok((there, here)) = made else {
            continue;
        };
        let data = vec![0x5a; 50_000];
        let source = a.pd.reg_mr(data.clone(), Access::empty()).unwrap();
        let sink =
            b.pd.alloc_mr(data.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)
                .unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        here.qp.on_end(move |reason| sender.send(reason).unwrap());
        let _ = there.qp.post_send_one(
            SendWr::write(1, sink.remote(0))
                .sge(source.whole())
                .signaled(),
        );
        let reason = receiver
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("{at}: it goes on"));
        assert!(
            !matches!(reason, EndReason::Disconnected),
            "{at}: {reason:?}"
        );
        let placed = sink.to_vec(0, data.len()).unwrap();
        assert!(placed.iter().all(|b| *b == 0 || *b == 0x5a), "{at}");
        assert!(
            placed.contains(&0),
            "{at}: a record that was changed was placed"
        );
    }
}

/// The recorded bytes of a whole session, replayed to the same listener, make no connection.
#[test]
fn a_replay_makes_no_connection() {
    let (a, b) = (Side::new(), Side::new());
    let theirs = anybody();
    let recorded = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tape = Arc::clone(&recorded);
    let (there, here) = pair(&a, &b, Some(anybody()), Some(theirs.clone()), |addr| {
        relay(
            addr,
            Box::new(move |bytes| tape.lock().unwrap().extend_from_slice(bytes)),
        )
    })
    .unwrap();
    let sink = b.pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
    here.qp
        .post_recv(&[RecvWr::new(1).sge(sink.whole())])
        .unwrap();
    there
        .qp
        .post_send_one(SendWr::send(1).inline(b"pay 10").signaled())
        .unwrap();
    assert_eq!(take(&b.cq, 1)[0].status, WcStatus::Success);

    let listener = b.listen(&with(Some(theirs)));
    let mut again = TcpStream::connect(listener.local_addr()).unwrap();
    again.write_all(&recorded.lock().unwrap()).unwrap();
    // It is answered, and then closed.
    let _ = again.read_to_end(&mut Vec::new());
    assert!(listener.next_request(Some(Duration::ZERO)).is_none());
}

/// A third party that closes the TCP connection in order cannot make that look like the peer's end.
#[test]
fn a_cut_is_not_an_end_in_order() {
    let (a, b) = (Side::new(), Side::new());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let middle = listener.local_addr().unwrap();
    let streams = Arc::new(std::sync::Mutex::new(Vec::new()));
    let keep = Arc::clone(&streams);
    let (there, here) = pair(&a, &b, Some(anybody()), Some(anybody()), move |addr| {
        std::thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = TcpStream::connect(addr).unwrap();
            let pump = |mut from: TcpStream, mut to: TcpStream| {
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            };
            pump(near.try_clone().unwrap(), far.try_clone().unwrap());
            pump(far.try_clone().unwrap(), near.try_clone().unwrap());
            keep.lock().unwrap().extend([near, far]);
        });
        middle
    })
    .unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    for qp in [&there.qp, &here.qp] {
        let sender = sender.clone();
        qp.on_end(move |reason| sender.send(reason).unwrap());
    }
    for stream in &*streams.lock().unwrap() {
        stream.shutdown(Shutdown::Write).unwrap();
    }
    for _ in 0..2 {
        let reason = receiver.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(reason, EndReason::Lost), "{reason:?}");
    }
}
