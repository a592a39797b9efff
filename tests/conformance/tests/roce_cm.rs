//! The connection manager of RoCE and a peer that speaks to it by hand: what it is told is checked, and nothing of it lasts.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
use weft_sys::unix;
use weft_verbs::{QpState, RecvWr, RoceConnect, RoceEvent, RoceRequest, SendWr};
use weft_wire::roce::cm::{
    self, IpHeader, MAD_LEN, Mad, Message, PortSpace, Rej, Rep, Req, Rtu, reason, service_id,
};
use weft_wire::roce::{DEFAULT_PKEY, Deth, Header, ICRC_LEN, Icrc, Op, Opcode, PORT, Route};

use super::roce::{End, PATIENCE, address, events, listening};

/// Short enough for a test, and long enough to see that nothing comes.
const MOMENT: Duration = Duration::from_millis(100);
const NUMBER: u16 = 7174;

/// A host that speaks by hand.
struct Stranger {
    socket: UdpSocket,
    ip: IpAddr,
    to: IpAddr,
}

impl Stranger {
    fn new(to: IpAddr) -> Stranger {
        let ip = address();
        let socket = UdpSocket::bind((ip, PORT)).unwrap();
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
        Stranger { socket, ip, to }
    }

    fn packet(&self, header: &Header, payload: &[u8]) {
        let mut packet = Vec::new();
        header.emit(&mut packet);
        packet.extend_from_slice(payload);
        let route = Route {
            src: (self.ip, PORT).into(),
            dst: (self.to, PORT).into(),
        };
        let mut crc = Icrc::new(&route, 0, packet.len());
        crc.headers(&packet);
        packet.extend_from_slice(&crc.finish());
        self.socket.send_to(&packet, (self.to, PORT)).unwrap();
    }

    fn say(&self, transaction: u64, message: Message<'_>) {
        let header = Header {
            deth: Some(Deth {
                qkey: cm::QKEY,
                src_qp: cm::QP,
            }),
            ..Header::new(Opcode::ud(Op::SendOnly), cm::QP, 0)
        };
        let mad = Mad {
            transaction,
            message,
        };
        self.packet(&header, &mad.emit());
    }

    /// The next message within this time.
    fn hear(&self, limit: Duration) -> Option<[u8; MAD_LEN]> {
        let until = Instant::now() + limit;
        let mut packet = [0; 4096];
        loop {
            let left = until.checked_duration_since(Instant::now())?;
            self.socket
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))
                .unwrap();
            let Ok(len) = self.socket.recv(&mut packet) else {
                continue;
            };
            let (_, payload) = Header::parse(&packet[..len - ICRC_LEN]).unwrap();
            if let Ok(mad) = payload.try_into() {
                return Some(mad);
            }
        }
    }

    fn rejected(&self) -> (u16, u32) {
        let raw = self.hear(PATIENCE).expect("an answer");
        match Mad::parse(&raw).unwrap().message {
            Message::Rej(rej) => (rej.reason, rej.remote_id),
            other => panic!("{other:?}"),
        }
    }

    fn req(&self) -> Req<'static> {
        let gid = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Req {
            local_id: 77,
            service_id: service_id(PortSpace::Tcp, NUMBER),
            ca_guid: 1,
            qp: 0x11,
            responder_resources: 2,
            initiator_depth: 3,
            remote_timeout: 18,
            local_timeout: 18,
            service: 0,
            psn: 77,
            retry_count: 7,
            rnr_retry: 7,
            pkey: DEFAULT_PKEY,
            mtu: 3,
            max_cm_retries: 7,
            srq: false,
            local_gid: gid(self.ip),
            remote_gid: gid(self.to),
            ack_timeout: 14,
            private_data: Box::leak(Box::new(ip_header(self.ip, self.to))),
        }
    }

    /// The answer to a request that was accepted: our number of it, and the victim's.
    fn accepted(&self) -> (u32, u32) {
        let raw = self.hear(PATIENCE).expect("an answer");
        match Mad::parse(&raw).unwrap().message {
            Message::Rep(rep) => (rep.remote_id, rep.local_id),
            other => panic!("{other:?}"),
        }
    }
}

fn ip_header(src: IpAddr, dst: IpAddr) -> [u8; IpHeader::LEN] {
    let header = IpHeader {
        port: 4711,
        src,
        dst,
    };
    header.emit()
}

fn end() -> End {
    End::new(address(), |_, _, _| {})
}

fn ip_of(end: &End) -> IpAddr {
    end.port.local_addr().ip()
}

fn accept(request: RoceRequest, end: &End) -> std::sync::mpsc::Receiver<RoceEvent> {
    let (tell, told) = events();
    request
        .accept(&end.qp, &RoceConnect::default(), tell)
        .unwrap();
    told
}

#[test]
fn requests_that_do_not_fit_or_were_not_seen_are_refused() {
    let b = end();
    let (listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    let other = address();
    let IpAddr::V4(v4) = other else {
        unreachable!();
    };
    let gid = v4.to_ipv6_mapped().octets();
    let mine = stranger.req();
    let headers = [ip_header(other, stranger.to), ip_header(stranger.ip, other)];
    let misfits: [(&str, u16, Req<'_>); 11] = [
        (
            "another sender's GID",
            12,
            Req {
                local_gid: gid,
                ..mine
            },
        ),
        (
            "another receiver's GID",
            12,
            Req {
                remote_gid: gid,
                ..mine
            },
        ),
        (
            "another sender",
            12,
            Req {
                private_data: &headers[0],
                ..mine
            },
        ),
        (
            "another receiver",
            12,
            Req {
                private_data: &headers[1],
                ..mine
            },
        ),
        (
            "no address",
            5,
            Req {
                private_data: &[0xff; 40],
                ..mine
            },
        ),
        ("no path MTU", 26, Req { mtu: 6, ..mine }),
        ("no path MTU", 26, Req { mtu: 15, ..mine }),
        ("a datagram", 9, Req { service: 3, ..mine }),
        ("the manager's queue pair", 5, Req { qp: 1, ..mine }),
        (
            "another partition",
            5,
            Req {
                pkey: 0x8001,
                ..mine
            },
        ),
        (
            "no listener",
            8,
            Req {
                service_id: service_id(PortSpace::Tcp, 1),
                ..mine
            },
        ),
    ];
    for (what, reason, req) in misfits {
        stranger.say(9, Message::Req(req));
        assert_eq!(stranger.rejected(), (reason, 77), "{what}");
        assert!(requests.try_recv().is_err(), "{what}");
    }
    // A queue pair of another type.
    stranger.say(10, Message::Req(Req { service: 1, ..mine }));
    let request = requests.recv_timeout(PATIENCE).unwrap();
    let (tell, _told) = events();
    let refused = request.accept(&b.qp, &RoceConnect::default(), tell);
    assert!(refused.is_err() && stranger.rejected() == (9, 77));
    assert_eq!(b.qp.state(), QpState::Init);
    drop(listener);
    // What nobody has seen is refused as where nobody listens, and not as by a program.
    let (tell, unseen) = std::sync::mpsc::channel();
    let _listener = b
        .port
        .listen(NUMBER, 1, move |request| drop(tell.send(request)));
    stranger.say(11, Message::Req(mine));
    let first = unseen.recv_timeout(PATIENCE).unwrap();
    // The listener has no room for a second one, which comes again.
    let second = Req {
        local_id: 78,
        ..mine
    };
    stranger.say(12, Message::Req(second));
    assert_eq!(
        unseen.recv_timeout(MOMENT).err(),
        Some(RecvTimeoutError::Timeout)
    );
    drop(first);
    assert_eq!(stranger.rejected(), (8, 77));
    stranger.say(12, Message::Req(second));
    let mut second = unseen.recv_timeout(PATIENCE).unwrap();
    second.seen();
    drop(second);
    assert_eq!(stranger.rejected(), (28, 78));
}

/// A process that has come just now: none of the others at its address has a connection with it yet, and each believes perhaps that it is alone.
#[test]
fn nobody_answers_for_a_process_that_is_not_known_yet() {
    let b = end();
    let stranger = Stranger::new(ip_of(&b));
    let claim = |kind: &str| {
        let name = format!("weft/roce/1/{kind}/{}%0/{NUMBER}", ip_of(&b));
        unix::claim(name.as_bytes()).unwrap()
    };
    let _claims = ["tcp", "udp"].map(claim);
    let door = |slot: &u8| {
        let name = format!("weft/roce/1/{slot}");
        unix::claim(name.as_bytes()).ok()
    };
    let (slot, _door) = { 1..=254 }
        .find_map(|slot| Some((slot, door(&slot)?)))
        .unwrap();
    let theirs = u32::from(slot) << 24 | 7;
    let dreq = |remote_id| cm::Dreq {
        local_id: 5,
        remote_id,
        remote_qp: 9,
        private_data: &[],
    };
    let rep = Rep {
        local_id: 5,
        remote_id: theirs,
        qp: 0x22,
        psn: 88,
        responder_resources: 3,
        initiator_depth: 2,
        ack_delay: 14,
        rnr_retry: 7,
        srq: false,
        ca_guid: 1,
        private_data: &[],
    };
    let sidr = |number| cm::SidrReq {
        request_id: 6,
        pkey: DEFAULT_PKEY,
        service_id: service_id(PortSpace::Udp, number),
        private_data: &[],
    };
    let mine = stranger.req();
    stranger.say(1, Message::Req(mine));
    stranger.say(2, Message::SidrReq(sidr(NUMBER)));
    stranger.say(3, Message::Rep(rep));
    stranger.say(4, Message::Dreq(dreq(theirs)));
    // The first answers are those about what nobody has.
    let service_id = service_id(PortSpace::Tcp, 1);
    stranger.say(5, Message::Req(Req { service_id, ..mine }));
    stranger.say(6, Message::SidrReq(sidr(1)));
    stranger.say(7, Message::Dreq(dreq(7)));
    for expected in 5..8 {
        let raw = stranger.hear(PATIENCE).expect("an answer");
        let mad = Mad::parse(&raw).unwrap();
        assert_eq!(mad.transaction, expected, "{:?}", mad.message);
    }
}

/// A request of somebody who cannot be heard of any more ends in time, whatever time it has asked for.
#[test]
fn who_never_confirms_is_dropped_in_time() {
    let b = end();
    let (_listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    let req = Req {
        local_timeout: 31,
        max_cm_retries: 15,
        ..stranger.req()
    };
    stranger.say(9, Message::Req(req));
    let told = accept(requests.recv_timeout(PATIENCE).unwrap(), &b);
    // Four answers, and the end: 8.6 s.
    let begun = Instant::now();
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), RoceEvent::TimedOut);
    assert!(begun.elapsed() < Duration::from_secs(20));
    let mut heard = Vec::new();
    while let Some(raw) = stranger.hear(MOMENT) {
        let message = Mad::parse(&raw).unwrap().message;
        heard.push(matches!(message, Message::Rej(_)));
    }
    assert_eq!(heard, [false, false, false, false, true]);
    assert_eq!(b.qp.state(), QpState::Error);
}

/// The peer's word is lost, and its data comes.
#[test]
fn data_makes_a_connection() {
    let b = end();
    let (_listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    stranger.say(9, Message::Req(stranger.req()));
    b.qp.post_recv(&[RecvWr::new(5).sge(b.mr.sge(0, 64))])
        .unwrap();
    let told = accept(requests.recv_timeout(PATIENCE).unwrap(), &b);
    let raw = stranger.hear(PATIENCE).unwrap();
    let Message::Rep(rep) = Mad::parse(&raw).unwrap().message else {
        panic!("{raw:?}");
    };
    // Far from what is expected: it says nothing.
    let send = |psn| {
        let header = Header::new(Opcode::rc(Op::SendOnly), rep.qp, psn);
        stranger.packet(&header, &[7; 8]);
    };
    send(rep.psn.wrapping_add(99) & 0xff_ffff);
    assert!(told.recv_timeout(MOMENT).is_err());
    send(rep.psn);
    let event = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, RoceEvent::Established { .. }), "{event:?}");
    assert_eq!(b.mr.to_vec(0, 8).unwrap(), [7; 8]);
}

/// A host that has forged its source does not learn our number of the connection.
#[test]
fn a_word_without_our_number_makes_and_ends_nothing() {
    let b = end();
    let (_listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    stranger.say(9, Message::Req(stranger.req()));
    let told = accept(requests.recv_timeout(PATIENCE).unwrap(), &b);
    let (ours, theirs) = stranger.accepted();
    let word = |remote_id| Rtu {
        local_id: ours,
        remote_id,
        private_data: &[],
    };
    for guess in [0, theirs ^ 1] {
        stranger.say(9, Message::Rtu(word(guess)));
    }
    // From another address, with the right one.
    let mut other = Stranger::new(ip_of(&b));
    other.say(9, Message::Rtu(word(theirs)));
    assert!(told.recv_timeout(MOMENT).is_err());
    stranger.say(9, Message::Rtu(word(theirs)));
    let event = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, RoceEvent::Established { .. }), "{event:?}");
    let rej = Rej {
        local_id: ours,
        remote_id: 0,
        about: cm::About::Rep,
        reason: reason::TIMEOUT,
        ari: &[],
        private_data: &[],
    };
    stranger.say(9, Message::Rej(rej));
    let end = |from: &Stranger, remote_id, remote_qp| {
        let dreq = cm::Dreq {
            local_id: ours,
            remote_id,
            remote_qp,
            private_data: &[],
        };
        from.say(10, Message::Dreq(dreq));
    };
    end(&stranger, 0, b.qp.num());
    end(&stranger, theirs, b.qp.num() ^ 1);
    other.ip = stranger.ip;
    end(&other, theirs, b.qp.num());
    assert!(told.recv_timeout(MOMENT).is_err());
    end(&stranger, theirs, b.qp.num());
    assert_eq!(
        told.recv_timeout(PATIENCE).unwrap(),
        RoceEvent::Disconnected
    );
}

/// What was given up before the peer accepted is refused when its answer comes, and the queue pair does not get a peer.
#[test]
fn a_forgotten_dial_is_not_made() {
    let a = end();
    let stranger = Stranger::new(ip_of(&a));
    let to = SocketAddr::new(stranger.ip, NUMBER);
    let (tell, told) = events();
    let param = RoceConnect::default();
    let conn = a.port.dial(&a.qp, (to, 0), 1, &param, tell).unwrap();
    let raw = stranger.hear(PATIENCE).unwrap();
    let Mad {
        transaction,
        message: Message::Req(req),
    } = Mad::parse(&raw).unwrap()
    else {
        panic!("{raw:?}");
    };
    conn.forget();
    assert_eq!(stranger.rejected(), (reason::TIMEOUT, 0));
    let rep = |remote_id| Rep {
        local_id: 5,
        remote_id,
        qp: 0x22,
        psn: 88,
        responder_resources: 3,
        initiator_depth: 2,
        ack_delay: 14,
        rnr_retry: 6,
        srq: false,
        ca_guid: 2,
        private_data: &[],
    };
    // Known still, and of a connection that there never was.
    for id in [req.local_id, req.local_id ^ 1] {
        stranger.say(transaction, Message::Rep(rep(id)));
        assert_eq!(stranger.rejected(), (reason::INVALID_ID, 5));
    }
    assert!(told.recv_timeout(MOMENT).is_err(), "nothing is told");
    assert_eq!(a.qp.state(), QpState::Error);
    assert!(a.qp.post_send(SendWr::send(1)).is_ok(), "to be flushed");
}

/// A process that ends tells the peers of its connections.
#[test]
fn a_farewell_ends_connections() {
    let (a, b) = (end(), end());
    let (_listener, requests) = listening(&b, NUMBER);
    let (tell, told) = events();
    let to = SocketAddr::new(ip_of(&b), NUMBER);
    let param = RoceConnect::default();
    a.port.dial(&a.qp, (to, 0), 1, &param, tell).unwrap();
    let theirs = accept(requests.recv_timeout(PATIENCE).unwrap(), &b);
    for told in [&told, &theirs] {
        let event = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(event, RoceEvent::Established { .. }), "{event:?}");
    }
    a.port.say_farewell();
    assert_eq!(theirs.recv_timeout(PATIENCE), Ok(RoceEvent::Disconnected));
    assert_eq!(b.qp.state(), QpState::Error);
}

/// The program has not decided yet: the peer that asks again learns that.
#[test]
fn who_asks_again_is_told_to_wait() {
    let b = end();
    let (_listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    stranger.say(9, Message::Req(stranger.req()));
    let request = requests.recv_timeout(PATIENCE).unwrap();
    stranger.say(9, Message::Req(stranger.req()));
    let raw = stranger.hear(PATIENCE).unwrap();
    let message = Mad::parse(&raw).unwrap().message;
    assert!(
        matches!(message, Message::Mra(mra) if mra.remote_id == 77),
        "{message:?}"
    );
    assert!(requests.try_recv().is_err(), "it is one request");
    accept(request, &b);
    stranger.accepted();
}

/// Requests that come and are refused leave no trace: the port takes those of others, and its own dials go out.
#[test]
fn a_flood_of_requests_leaves_room() {
    let b = end();
    let (_listener, requests) = listening(&b, NUMBER);
    let stranger = Stranger::new(ip_of(&b));
    for id in 0..3000 {
        let local_id = 1000 + id;
        let req = Req {
            local_id,
            ..stranger.req()
        };
        stranger.say(u64::from(id), Message::Req(req));
        if id < 1500 {
            drop(requests.recv_timeout(PATIENCE).unwrap());
            assert_eq!(stranger.rejected(), (28, local_id));
        }
    }
    // The others fill the place that programs have for what they have not answered, and no more.
    let mut held = Vec::new();
    while let Ok(request) = requests.recv_timeout(MOMENT) {
        held.push(request);
    }
    assert!((64..=1024).contains(&held.len()), "{}", held.len());
    drop(held);
    while stranger.hear(MOMENT).is_some() {}
    let a = end();
    let (tell, told) = events();
    let to = SocketAddr::new(ip_of(&b), NUMBER);
    let param = RoceConnect::default();
    a.port.dial(&a.qp, (to, 0), 1, &param, tell).unwrap();
    // Some of the flood may be late.
    let request = loop {
        let request = requests.recv_timeout(PATIENCE).unwrap();
        if request.addrs.0.ip() == ip_of(&a) {
            break request;
        }
    };
    let _theirs = accept(request, &b);
    let event = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, RoceEvent::Established { .. }), "{event:?}");
}
