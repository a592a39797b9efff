//! The connection manager.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use weft_verbs::cm::{
    CmError, CmEvent, CmEventKind, CmId, ConnParam, ConnectError, EventChannel, Listener,
};
use weft_verbs::tls::TlsError;
use weft_verbs::{EndReason, LocalMode, QpInit, QpState, RecvWr, SendWr, WcOpcode, WcStatus};

use crate::bed::{Bed, Carrier, End, Half, PATIENCE, assert_ok, pattern, take, until};

/// Longest private data of an initiator and of a responder under this setup, in bytes.
fn longest(bed: &Bed) -> usize {
    if bed.setup.options.revision == 1 {
        512
    } else {
        508
    }
}

/// Dials while `answer` handles the request.
fn dial(
    bed: &Bed,
    listener: &Listener,
    param: &ConnParam,
    answer: impl FnOnce(weft_verbs::cm::Request),
) -> Result<End, ConnectError> {
    let end = bed.end(&bed.a, &Half::default());
    std::thread::scope(|scope| {
        let dial = scope.spawn(|| bed.dial(listener.local_addr(), end, param));
        answer(listener.next_request(Some(PATIENCE)).expect("a request"));
        dial.join().expect("no panic")
    })
}

/// Private data of every length arrives unchanged in both directions.
pub fn private_data(bed: &Bed) {
    let listener = bed.listener(8);
    for len in [0, 1, 3, 100, longest(bed) - 1, longest(bed)] {
        let mut half = Half::default();
        half.param.private_data = pattern(1, len);
        let mut other = Half::default();
        other.param.private_data = pattern(2, len);
        let (a, b) = bed.pair_through(&listener, &half, &other);
        assert_eq!(a.private_data, pattern(2, len));
        assert_eq!(b.private_data, pattern(1, len));
    }
}

/// Private data that is too long is refused at once, by each of the three calls that accept it.
pub fn private_data_too_long(bed: &Bed) {
    let listener = bed.listener(8);
    let mut param = bed.param();
    param.private_data = vec![1; longest(bed) + 1];
    let end = bed.end(&bed.a, &Half::default());
    let error = bed.dial(listener.local_addr(), end, &param).err();
    assert!(matches!(error, Some(ConnectError::Invalid(_))), "{error:?}");
    assert!(listener.next_request(Some(Duration::ZERO)).is_none());
    let error = dial(bed, &listener, &bed.param(), |request| {
        let end = bed.end(&bed.b, &Half::default());
        let error = request.accept(end.qp.into_stream(), &param).err();
        assert!(matches!(error, Some(ConnectError::Invalid(_))), "{error:?}");
    });
    assert!(error.is_err());
    let error = dial(bed, &listener, &bed.param(), |request| {
        let error = request.reject(&param.private_data);
        assert!(matches!(error, Err(ConnectError::Invalid(_))), "{error:?}");
    });
    assert!(error.is_err());
}

/// A rejection arrives as such, with its private data. A request that is just dropped is rejected too.
pub fn reject(bed: &Bed) {
    let listener = bed.listener(8);
    for data in [Vec::new(), b"not you".to_vec(), pattern(3, longest(bed))] {
        let outcome = dial(bed, &listener, &bed.param(), |request| {
            request.reject(&data).expect("reject");
        });
        match outcome.err() {
            Some(ConnectError::Rejected { private_data }) => assert_eq!(private_data, data),
            other => panic!("{other:?}"),
        }
    }
    let outcome = dial(bed, &listener, &bed.param(), drop);
    assert!(matches!(outcome.err(), Some(ConnectError::Rejected { .. })));
    // The listener continues.
    bed.pair_through(&listener, &Half::default(), &Half::default());
}

/// Without a listener the connection is refused at once. So it is after a listener was dropped, although a silent peer is still connected.
pub fn refused(bed: &Bed) {
    let listener = bed.listener(8);
    let addr = listener.local_addr();
    let silent = matches!(bed.setup.carrier, Carrier::Tcp4 | Carrier::Tcp6)
        .then(|| std::net::TcpStream::connect(addr).expect("connect"));
    // A whole request after the silent peer: it shows that the listener has seen the peer.
    let pair = bed.pair_through(&listener, &Half::default(), &Half::default());
    drop(listener);
    let start = Instant::now();
    let end = bed.end(&bed.a, &Half::default());
    let error = bed.dial(addr, end, &bed.param()).err();
    assert!(matches!(error, Some(ConnectError::Refused)), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    // The address is free again, and connections made through the listener continue.
    Listener::bind(&bed.b, addr, 8, &bed.param()).expect("the same address again");
    let (a, b) = pair;
    b.post_recv(RecvWr::new(1));
    a.run(SendWr::send(1));
    assert_ok(&b.received(), 1, WcOpcode::Recv, 0);
    drop(silent);
}

/// An address has at most one listener.
pub fn address_in_use(bed: &Bed) {
    let listener = bed.listener(8);
    let again = Listener::bind(&bed.b, listener.local_addr(), 8, &bed.param());
    let error = again.err().expect("two listeners on one address");
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
}

/// Both sides know both addresses.
pub fn addresses(bed: &Bed) {
    let listener = bed.listener(8);
    let (a, b) = bed.pair_through(&listener, &Half::default(), &Half::default());
    assert_ne!(listener.local_addr().port(), 0);
    assert_eq!(a.qp.peer_addr(), Some(listener.local_addr()));
    assert_eq!(b.qp.local_addr(), Some(listener.local_addr()));
    assert_eq!(a.qp.local_addr(), b.qp.peer_addr());
    let unconnected = bed.end(&bed.a, &Half::default());
    assert_eq!(unconnected.qp.peer_addr(), None);
}

/// A queue pair is connected once in its life.
pub fn connected_once(bed: &Bed) {
    let listener = bed.listener(8);
    let (a, b) = bed.pair_through(&listener, &Half::default(), &Half::default());
    let device = bed.a.clone();
    std::thread::scope(|scope| {
        let again = scope.spawn(|| {
            weft_verbs::cm::connect_qp(
                listener.local_addr(),
                a.qp.into_stream(),
                &device,
                &bed.param(),
            )
        });
        // The request may arrive; its answer then finds no initiator.
        while !again.is_finished() {
            if let Some(request) = listener.next_request(Some(Duration::from_millis(20))) {
                let end = bed.end(&bed.b, &Half::default());
                let _ = request.accept(end.qp.into_stream(), &bed.param());
            }
        }
        assert!(again.join().expect("no panic").is_err());
    });
    let error = dial(bed, &listener, &bed.param(), |request| {
        assert!(request.accept(b.qp.into_stream(), &bed.param()).is_err());
    });
    assert!(error.is_err());
}

/// With a full backlog of unanswered requests, further ones are rejected; answered ones make room.
pub fn backlog(bed: &Bed) {
    let listener = bed.listener(2);
    let addr = listener.local_addr();
    std::thread::scope(|scope| {
        let dials: Vec<_> = (0..6)
            .map(|_| {
                let end = bed.end(&bed.a, &Half::default());
                scope.spawn(move || bed.dial(addr, end, &bed.param()))
            })
            .collect();
        // Four are rejected while two wait.
        until("four are turned away", || {
            dials.iter().filter(|d| d.is_finished()).count() == 4
        });
        let mut kept = Vec::new();
        for _ in 0..2 {
            let request = listener.next_request(Some(PATIENCE)).expect("a request");
            let end = bed.end(&bed.b, &Half::default());
            kept.push(
                request
                    .accept(end.qp.into_stream(), &bed.param())
                    .expect("accept"),
            );
        }
        let outcomes: Vec<_> = dials
            .into_iter()
            .map(|d| d.join().expect("no panic"))
            .collect();
        assert_eq!(outcomes.iter().filter(|o| o.is_ok()).count(), 2);
        for outcome in outcomes {
            if let Err(error) = outcome {
                // Where shared memory is required, a connection that did not fit into the kernel's queue is not found.
                let away = matches!(
                    error,
                    ConnectError::Closed | ConnectError::Reset | ConnectError::NotLocal(_)
                );
                assert!(away, "{error:?}");
            }
        }
    });
    bed.pair_through(&listener, &Half::default(), &Half::default());
}

/// An initiator gives up a silent peer after the time-out of the options.
pub fn time_out(bed: &Bed) {
    let listener = bed.listener(8);
    let end = bed.end(&bed.a, &Half::default());
    let mut param = bed.param();
    param.options.timeout = Duration::from_millis(200);
    let start = Instant::now();
    let device = bed.a.clone();
    let error =
        weft_verbs::cm::connect_qp(listener.local_addr(), end.qp.into_stream(), &device, &param);
    assert!(matches!(error.err(), Some(ConnectError::TimedOut)));
    assert!(start.elapsed() >= param.options.timeout);
    // The request was seen; accepting it now finds no initiator, which is not an error.
    let request = listener.next_request(Some(PATIENCE)).expect("a request");
    let end = bed.end(&bed.b, &Half::default());
    end.post_recv(RecvWr::new(1));
    if let Ok(conn) = request.accept(end.qp.into_stream(), &bed.param()) {
        until("the end", || conn.qp.state() == QpState::Error);
    }
    bed.pair_through(&listener, &Half::default(), &Half::default());
}

/// A time-out that expires after the connection was established has no effect.
pub fn time_out_after_success(bed: &Bed) {
    let mut bed_with = bed.setup;
    bed_with.options.timeout = Duration::from_millis(400);
    let bed = Bed::new(bed_with).expect("as before");
    let (a, b) = bed.talking_pair();
    // Longer than the time-out: waits for a completion that never arrives.
    let mut out = [weft_verbs::Wc::default(); 1];
    let n = b.rcq.wait(&mut out, Some(Duration::from_millis(600)));
    assert_eq!(n, Ok(0));
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Rts, QpState::Rts));
}

/// Several peers at once through one listener: each gets its own answer.
pub fn several_at_once(bed: &Bed) {
    const PEERS: usize = 16;
    let listener = bed.listener(64);
    let addr = listener.local_addr();
    std::thread::scope(|scope| {
        let dials: Vec<_> = (0..PEERS)
            .map(|i| {
                let end = bed.end(&bed.a, &Half::default());
                let mut param = bed.param();
                param.private_data = vec![i as u8; i];
                scope.spawn(move || bed.dial(addr, end, &param))
            })
            .collect();
        let mut accepted = Vec::new();
        for _ in 0..PEERS {
            let request = listener.next_request(Some(PATIENCE)).expect("a request");
            let data = request.private_data().to_vec();
            if data.len() % 4 == 3 {
                request.reject(&data).expect("reject");
            } else {
                let mut param = bed.param();
                param.private_data = data;
                let end = bed.end(&bed.b, &Half::default());
                accepted.push(
                    request
                        .accept(end.qp.into_stream(), &param)
                        .expect("accept"),
                );
            }
        }
        for (i, dial) in dials.into_iter().enumerate() {
            let said = match dial.join().expect("no panic") {
                Ok(end) => {
                    assert_ne!(i % 4, 3);
                    end.private_data
                }
                Err(ConnectError::Rejected { private_data }) => {
                    assert_eq!(i % 4, 3);
                    private_data
                }
                Err(error) => panic!("{i}: {error}"),
            };
            assert_eq!(said, vec![i as u8; i]);
        }
    });
}

/// Two hundred connections in one process, whose responders share one completion queue.
pub fn two_hundred(bed: &Bed) {
    const COUNT: usize = 200;
    let cq = bed.b.create_cq(4096, None).unwrap();
    let half = Half {
        cqs: Some((cq.clone(), cq.clone())),
        max_recv_wr: 4,
        max_send_wr: 4,
        ..Half::default()
    };
    let there = bed.a.create_cq(4096, None).unwrap();
    let first = Half {
        cqs: Some((there.clone(), there.clone())),
        ..half.clone()
    };
    let listener = bed.listener(64);
    let pairs: Vec<_> = (0..COUNT)
        .map(|_| bed.pair_through(&listener, &first, &half))
        .collect();
    for round in 0..5 {
        for (i, (a, b)) in pairs.iter().enumerate() {
            b.post_recv(RecvWr::new(i as u64));
            a.post(SendWr::send(round));
        }
        let mut seen = [false; COUNT];
        for wc in take(&cq, COUNT) {
            assert_eq!(wc.status, WcStatus::Success);
            assert_eq!(wc.qp_num, pairs[wc.wr_id as usize].1.qp.num());
            seen[wc.wr_id as usize] = true;
        }
        assert!(seen.iter().all(|seen| *seen));
        for (i, (a, b)) in pairs.iter().enumerate() {
            a.post_recv(RecvWr::new(i as u64));
            b.post(SendWr::send(round));
        }
        take(&there, COUNT);
    }
    // All of them disconnect at once.
    for (_, b) in &pairs {
        // RoCE's disconnect does not wait for acknowledgements.
        until("its sends are done", || {
            !bed.is_roce() || b.qp.outstanding() == 0
        });
        b.post_recv(RecvWr::new(7));
        b.qp.disconnect();
    }
    for wc in take(&cq, COUNT) {
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::WrFlushErr));
    }
}

fn event(channel: &EventChannel) -> CmEvent {
    channel.get_event(Some(PATIENCE)).expect("an event in time")
}

/// A listening identifier of the event style, and its address.
fn listen(bed: &Bed, channel: &EventChannel) -> (CmId, SocketAddr) {
    let id = channel.create_id();
    id.bind_addr(bed.any_addr()).unwrap();
    id.listen(8, &bed.param()).unwrap();
    let addr = id.local_addr().expect("a listening address");
    (id, addr)
}

fn resolve(channel: &EventChannel, addr: SocketAddr) -> CmId {
    let id = channel.create_id();
    id.resolve_addr(&addr.ip().to_string(), addr.port())
        .unwrap();
    let resolved = event(channel);
    assert_eq!(resolved.id, id);
    assert!(matches!(resolved.kind, CmEventKind::AddrResolved));
    id.resolve_route().unwrap();
    assert!(matches!(event(channel).kind, CmEventKind::RouteResolved));
    assert_eq!(id.peer_addr(), Some(addr));
    id
}

/// The events of a connection's whole life, on both sides, in order.
pub fn events(bed: &Bed) {
    let (ours, theirs) = (
        EventChannel::new(&bed.a).unwrap(),
        EventChannel::new(&bed.b).unwrap(),
    );
    let (listener, addr) = listen(bed, &theirs);
    for we_leave in [true, false] {
        let id = resolve(&ours, addr);
        let (a, b) = (
            bed.end(&bed.a, &Half::default()),
            bed.end(&bed.b, &Half::default()),
        );
        let mut param = bed.param();
        param.private_data = b"hello".to_vec();
        id.connect(&a.qp, &param).unwrap();
        let request = event(&theirs);
        assert_eq!(request.id, listener);
        let CmEventKind::ConnectRequest {
            id: new,
            private_data,
        } = request.kind
        else {
            panic!("{request:?}");
        };
        assert_eq!(private_data, b"hello");
        assert_eq!(new.local_addr(), Some(addr));
        b.post_recv(RecvWr::new(1));
        param.private_data = b"welcome".to_vec();
        new.accept(&b.qp, &param).unwrap();
        let up = event(&theirs);
        assert_eq!(up.id, new);
        assert!(matches!(up.kind, CmEventKind::Established { .. }), "{up:?}");
        let up = event(&ours);
        assert_eq!(up.id, id);
        match up.kind {
            CmEventKind::Established { private_data } => assert_eq!(private_data, b"welcome"),
            other => panic!("{other:?}"),
        }
        a.run(SendWr::send(1));
        assert_ok(&b.received(), 1, WcOpcode::Recv, 0);
        if we_leave {
            id.disconnect(&a.qp);
        } else {
            new.disconnect(&b.qp);
        }
        for (channel, of) in [(&ours, &id), (&theirs, &new)] {
            let down = event(channel);
            assert_eq!(&down.id, of);
            assert!(
                matches!(
                    down.kind,
                    CmEventKind::Disconnected(EndReason::Disconnected)
                ),
                "{down:?}"
            );
        }
    }
    for channel in [&ours, &theirs] {
        assert!(channel.get_event(Some(Duration::ZERO)).is_none());
    }
}

/// Rejection and refusal in events.
pub fn events_of_failure(bed: &Bed) {
    let (ours, theirs) = (
        EventChannel::new(&bed.a).unwrap(),
        EventChannel::new(&bed.b).unwrap(),
    );
    let (listener, addr) = listen(bed, &theirs);
    let a = bed.end(&bed.a, &Half::default());
    let id = resolve(&ours, addr);
    id.connect(&a.qp, &bed.param()).unwrap();
    let CmEventKind::ConnectRequest { id: new, .. } = event(&theirs).kind else {
        panic!("no request");
    };
    new.reject(b"no").unwrap();
    match event(&ours).kind {
        CmEventKind::Rejected { private_data } => assert_eq!(private_data, b"no"),
        other => panic!("{other:?}"),
    }
    // There is no listener once the engine has released it too.
    drop((listener, new));
    until("refused", || {
        let a = bed.end(&bed.a, &Half::default());
        let id = resolve(&ours, addr);
        id.connect(&a.qp, &bed.param()).unwrap();
        let failed = event(&ours);
        assert_eq!(failed.id, id);
        match failed.kind {
            CmEventKind::Unreachable(ConnectError::Refused) => true,
            CmEventKind::ConnectError(
                ConnectError::Closed
                | ConnectError::Reset
                | ConnectError::Tls(TlsError::ClosedInHandshake),
            ) => false,
            // It ended while we were at the door.
            CmEventKind::ConnectError(ConnectError::NotLocal(_))
                if bed.setup.local == LocalMode::Require =>
            {
                false
            }
            other => panic!("{other:?}"),
        }
    });
    // No such host.
    let id = ours.create_id();
    id.resolve_addr("256.256.256.256", 1).unwrap();
    assert!(matches!(event(&ours).kind, CmEventKind::AddrError(_)));
}

/// Calls out of order are refused, and have no effect.
pub fn events_out_of_order(bed: &Bed) {
    let channel = EventChannel::new(&bed.a).unwrap();
    let end = bed.end(&bed.a, &Half::default());
    let param = bed.param();
    let id = channel.create_id();
    assert!(matches!(id.resolve_route(), Err(CmError::State(_))));
    assert!(matches!(
        id.connect(&end.qp, &param),
        Err(CmError::State(_))
    ));
    assert!(matches!(id.accept(&end.qp, &param), Err(CmError::State(_))));
    assert!(matches!(id.reject(b""), Err(CmError::State(_))));
    assert!(matches!(id.listen(1, &param), Err(CmError::State(_))));
    id.bind_addr(bed.any_addr()).unwrap();
    assert!(matches!(
        id.bind_addr(bed.any_addr()),
        Err(CmError::State(_))
    ));
    id.listen(1, &param).unwrap();
    assert!(matches!(id.listen(1, &param), Err(CmError::State(_))));
    assert!(matches!(
        id.resolve_addr("localhost", 1),
        Err(CmError::State(_))
    ));
    assert_eq!(end.qp.state(), QpState::Init);
    assert!(channel.get_event(Some(Duration::ZERO)).is_none());
}

/// The descriptors of listeners and event channels are readable exactly while something waits.
pub fn descriptors(bed: &Bed) {
    let readable = |fd: &dyn AsFd, time: Duration| {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            fd.as_fd(),
            rustix::event::PollFlags::IN,
        )];
        let time = rustix::event::Timespec::try_from(time).unwrap();
        rustix::event::poll(&mut fds, Some(&time)).unwrap() == 1
    };
    let listener = bed.listener(8);
    assert!(!readable(&*listener, Duration::ZERO));
    let ours = EventChannel::new(&bed.a).unwrap();
    assert!(!readable(&ours, Duration::ZERO));
    let id = resolve(&ours, listener.local_addr());
    assert!(!readable(&ours, Duration::ZERO), "both events are fetched");
    let end = bed.end(&bed.a, &Half::default());
    id.connect(&end.qp, &bed.param()).unwrap();
    assert!(readable(&*listener, PATIENCE));
    let request = listener
        .next_request(Some(Duration::ZERO))
        .expect("a request");
    assert!(!readable(&*listener, Duration::ZERO));
    request.reject(b"").unwrap();
    assert!(readable(&ours, PATIENCE));
    assert!(matches!(event(&ours).kind, CmEventKind::Rejected { .. }));
    assert!(!readable(&ours, Duration::ZERO));
}

/// Over TCP only: a port with another protocol, and a port that never answers.
pub fn strangers(bed: &Bed) {
    if !matches!(bed.setup.carrier, Carrier::Tcp4 | Carrier::Tcp6) {
        println!("skipped: no strangers on a simulated network");
        return;
    }
    let server = std::net::TcpListener::bind(bed.any_addr()).unwrap();
    let addr = server.local_addr().unwrap();
    let half = Half::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::{Read, Write};
            let (mut stream, _) = server.accept().unwrap();
            stream
                .write_all(b"220 mail.example.invalid ESMTP\r\n")
                .unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = bed.dial(addr, bed.end(&bed.a, &half), &bed.param()).err();
        // They have no shared memory either.
        let expected = match bed.setup.local {
            _ if bed.setup.tls => matches!(error, Some(ConnectError::Tls(TlsError::NotTls))),
            LocalMode::Require => matches!(error, Some(ConnectError::NotLocal(_))),
            _ => matches!(error, Some(ConnectError::Protocol(_))),
        };
        assert!(expected, "{error:?}");
    });
    // The kernel completes connects to a listening socket even if its program never accepts.
    let end = bed.end(&bed.a, &half);
    let mut param = bed.param();
    param.options.timeout = Duration::from_millis(150);
    let device = bed.a.clone();
    let error = weft_verbs::cm::connect(addr, &end.pd, &QpInit::new(&end.scq, &end.rcq), &param);
    let error = error.err();
    let expected = match bed.setup.local {
        LocalMode::Require if !bed.setup.tls => {
            matches!(error, Some(ConnectError::NotLocal(_)))
        }
        _ => matches!(error, Some(ConnectError::TimedOut)),
    };
    assert!(expected, "{error:?}");
    // A multicast address cannot be connected to.
    let nowhere = SocketAddr::new(Ipv4Addr::new(224, 0, 0, 1).into(), 9);
    let outcome = weft_verbs::cm::connect_qp(nowhere, end.qp.into_stream(), &device, &param);
    assert!(outcome.is_err());
}

/// A bound address can be listened on, and dialled from.
pub fn bound_first(bed: &Bed) {
    let there = bed.b.bind(bed.any_addr()).unwrap();
    let addr = there.local_addr();
    assert_ne!(addr.port(), 0);
    let from = bed.a.bind(bed.any_addr()).unwrap();
    let dialled_from = from.local_addr();
    assert_ne!(dialled_from, addr);

    let (a, b) = (
        bed.end(&bed.a, &Half::default()),
        bed.end(&bed.b, &Half::default()),
    );
    b.post_recv(RecvWr::new(1));
    let (tell, told) = mpsc::channel();
    let listening = there
        .listen(4, &bed.param(), move |incoming| {
            tell.send(incoming).unwrap();
        })
        .unwrap();
    assert_eq!(listening.local_addr(), addr);
    let again = bed.b.bind(addr);
    let again = again.and_then(|bound| bound.listen(4, &bed.param(), drop));
    assert_eq!(again.err().unwrap().kind(), std::io::ErrorKind::AddrInUse);
    let (tell, dialed) = mpsc::channel();
    from.dial(addr, &a.qp, &bed.param(), move |outcome| {
        tell.send(outcome).unwrap();
    });
    let incoming = told.recv_timeout(PATIENCE).expect("a request");
    assert_eq!(incoming.peer_addr(), dialled_from);
    incoming.accept(&b.qp, &bed.param()).unwrap();
    dialed.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(a.qp.local_addr(), Some(dialled_from));
    a.run(SendWr::send(1));
    assert_ok(&b.received(), 1, WcOpcode::Recv, 0);

    // A bound address without a listener refuses connections.
    let taken = bed.b.bind(bed.any_addr()).unwrap();
    let end = bed.end(&bed.a, &Half::default());
    let error = bed.dial(taken.local_addr(), end, &bed.param()).err();
    assert!(matches!(error, Some(ConnectError::Refused)), "{error:?}");
}
