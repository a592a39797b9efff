//! The meeting of two processes of one host in shared memory, and its failures: then the connections stay on TCP.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use weft_conformance::bed::{Bed, Half, Memory, PATIENCE, Setup, until};
use weft_conformance::gauge::descriptors;
use weft_conformance::local::{
    Local, NOWHERE, RING, domain, door, fds, hear, hello, open_door, say, welcome,
};
use weft_conformance::raw::{Raw, send, start_frame, write};
use weft_conformance::twin::{DIAL, Pair, Twin};
use weft_conformance::victim::Bystander;
use weft_ring::Segment;
use weft_sys::unix::{self, Name};
use weft_verbs::cm::{ConnParam, ConnectError, Connection, Listener, connect};
use weft_verbs::{Cq, Device, LinkOptions, LocalMode, Path, QpInit, RecvWr, SendWr, WcStatus};
use weft_wire::local::Message;
use weft_wire::mpa::FrameKind;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

#[test]
#[ignore = "a twin's life"]
fn twin() {
    weft_conformance::twin::role();
}

fn device(mode: LocalMode) -> Device {
    Device::builder().local(mode).open().expect("a device")
}

fn param() -> ConnParam {
    ConnParam {
        options: LinkOptions {
            timeout: Duration::from_secs(5),
            peer_to_peer: false,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

struct Side {
    cq: Cq,
    conn: Result<Connection, ConnectError>,
}

impl Side {
    fn path(&self) -> Path {
        let conn = self.conn.as_ref().expect("connected");
        conn.qp.path().expect("connected")
    }
}

/// Connects through this listener; returns both sides, and the time.
fn join(a: &Device, b: &Device, listener: &Listener) -> (Side, Side, Duration) {
    let start = Instant::now();
    let make = |device: &Device| {
        let cq = device.create_cq(16, None).expect("a CQ");
        (device.alloc_pd().expect("a PD"), cq)
    };
    let ((a_pd, a_cq), (b_pd, b_cq)) = (make(a), make(b));
    std::thread::scope(|scope| {
        let init = QpInit::new(&a_cq, &a_cq);
        let addr = listener.local_addr();
        let dial = scope.spawn(move || connect(addr, &a_pd, &init, &param()));
        let mut request = None;
        while request.is_none() && !dial.is_finished() {
            request = listener.next_request(Some(Duration::from_millis(10)));
        }
        let accepted = match request {
            Some(request) => {
                let qp = b_pd.create_qp(&QpInit::new(&b_cq, &b_cq)).expect("a QP");
                qp.post_recv(&[RecvWr::new(1)]).expect("post");
                request.accept(qp, &param())
            }
            None => Err(ConnectError::Closed),
        };
        let dialled = dial.join().expect("no panic");
        (
            Side {
                cq: a_cq,
                conn: dialled,
            },
            Side {
                cq: b_cq,
                conn: accepted,
            },
            start.elapsed(),
        )
    })
}

/// Sends a message from one to the other.
fn talk(a: &Side, b: &Side) {
    let conn = a.conn.as_ref().expect("connected");
    conn.qp
        .post_send_one(SendWr::send(1).inline(&[]))
        .expect("post");
    let wc = weft_conformance::bed::take(&b.cq, 1)[0];
    assert_eq!(wc.status, WcStatus::Success);
}

#[test]
fn either_side_may_stay_away() {
    use LocalMode::{Auto, Off, Require};
    for (a_mode, b_mode, want, reasons) in [
        (Auto, Auto, "local", (false, false)),
        (Require, Auto, "local", (false, false)),
        (Auto, Require, "local", (false, false)),
        (Auto, Off, "tcp", (true, false)),
        (Off, Auto, "tcp", (false, true)),
        (Off, Off, "tcp", (false, false)),
    ] {
        let (a, b) = (device(a_mode), device(b_mode));
        let listener = Listener::bind(&b, ANY, 4, &param()).expect("a listener");
        let (a, b, _) = join(&a, &b, &listener);
        let (ours, theirs) = (a.path(), b.path());
        assert_eq!((ours.transport, theirs.transport), (want, want));
        assert_eq!(
            (ours.reason.is_some(), theirs.reason.is_some()),
            reasons,
            "{a_mode:?}, {b_mode:?}: {ours:?}, {theirs:?}"
        );
        talk(&a, &b);
    }
    for (a_mode, b_mode) in [(Require, Off), (Off, Require)] {
        let (a, b) = (device(a_mode), device(b_mode));
        let listener = Listener::bind(&b, ANY, 4, &param()).expect("a listener");
        let (a, b, _) = join(&a, &b, &listener);
        let strict = if a_mode == Require { a } else { b };
        let error = strict.conn.err().expect("no shared memory, no connection");
        assert!(matches!(error, ConnectError::NotLocal(_)), "{error}");
        assert!(error.to_string().contains("WEFT_LOCAL"), "{error}");
    }
}

#[test]
fn the_environment_decides() {
    let error = Twin::start("twin", |twin| {
        twin.env("WEFT_LOCAL", "perhaps");
    });
    let error = error.err().expect("a value that says nothing");
    assert!(error.to_string().contains("WEFT_LOCAL"), "{error}");
    for (value, want) in [("off", "tcp"), ("auto", "local"), ("require", "local")] {
        let twin = Twin::start("twin", |twin| {
            twin.env("WEFT_LOCAL", value);
        });
        let bed = bed(LocalMode::Auto);
        let end = bed.end(&bed.a, &Half::default());
        let mut pair = Pair::over(twin.expect("a twin"), &bed, end);
        let path = pair.end.qp.path().expect("connected");
        assert_eq!(path.transport, want, "{path:?}");
        pair.echo(3);
    }
}

/// A twin of another user, if we may start one.
fn nobody(change: impl FnOnce(&mut Command)) -> Option<Twin> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become somebody else");
        return None;
    }
    let twin = Twin::start("twin", |twin| {
        twin.uid(65534).gid(65534).env("WEFT_LOCAL", "auto");
        change(twin);
    });
    match twin {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            println!("skipped: nobody may not run this program");
            None
        }
        twin => Some(twin.expect("a twin")),
    }
}

fn bed(mode: LocalMode) -> Bed {
    let mut setup = Setup::local(Memory::Both);
    setup.local = mode;
    Bed::new(setup).expect("a bed")
}

#[test]
fn another_user() {
    let Some(twin) = nobody(|_| ()) else { return };
    let auto = bed(LocalMode::Auto);
    let end = auto.end(&auto.a, &Half::default());
    let mut pair = Pair::over(twin, &auto, end);
    let path = pair.end.qp.path().expect("connected");
    assert_eq!(path.transport, "tcp");
    assert!(
        path.reason.as_ref().is_some_and(|r| r.contains("user")),
        "{path:?}"
    );
    pair.echo(9);
    let theirs = pair.twin.ask("path");
    assert!(
        theirs.contains("tcp") && theirs.contains("Some"),
        "{theirs}"
    );
    // A side that requires shared memory gets the reason.
    let Some(twin) = nobody(|_| ()) else { return };
    let strict = bed(LocalMode::Require);
    let end = strict.end(&strict.a, &Half::default());
    let error = strict.dial(twin.addr, end, &strict.param()).err();
    assert!(
        matches!(&error, Some(ConnectError::NotLocal(why)) if why.contains("user")),
        "{error:?}"
    );
}

/// The same with the roles exchanged: the initiator is the other user.
#[test]
fn another_user_dials() {
    for (ours, theirs) in [
        (LocalMode::Auto, "auto"),
        (LocalMode::Auto, "require"),
        (LocalMode::Require, "auto"),
    ] {
        let bed = bed(ours);
        let listener = bed.listener(4);
        let twin = nobody(|twin| {
            twin.env(DIAL, listener.local_addr().to_string());
            twin.env("WEFT_LOCAL", theirs);
        });
        let Some(mut twin) = twin else { return };
        if theirs == "require" {
            let error = twin.answer();
            assert!(
                error.contains("user") && error.contains("WEFT_LOCAL"),
                "{error}"
            );
            continue;
        }
        let end = bed.end(&bed.b, &Half::default());
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        let accepted = end.over(|qp| request.accept(qp, &bed.param()));
        if ours == LocalMode::Require {
            let error = accepted.err();
            assert!(
                matches!(&error, Some(ConnectError::NotLocal(_))),
                "{error:?}"
            );
            println!("{}", twin.answer());
            continue;
        }
        let mut pair = Pair::of(twin, accepted.expect("accept"));
        let path = pair.end.qp.path().expect("connected");
        assert_eq!((path.transport, path.reason.is_some()), ("tcp", true));
        let path = pair.twin.ask("path");
        assert!(path.contains("tcp") && path.contains("user"), "{path}");
        pair.echo(5);
    }
}

/// Another process holds the name of a listener's door.
fn squatted(what: &str, act: impl Fn(&OwnedFd) + Sync) {
    let (a, b) = (device(LocalMode::Auto), device(LocalMode::Off));
    let listener = Listener::bind(&b, ANY, 4, &param()).expect("a listener");
    let name = door(listener.local_addr());
    let squat = unix::listen(Name::Abstract(&name), 4).expect("a door");
    let (a, b, took) = std::thread::scope(|scope| {
        scope.spawn(|| act(&squat));
        join(&a, &b, &listener)
    });
    let path = a.conn.as_ref().map(|conn| conn.qp.path());
    let path = path.unwrap_or_else(|error| panic!("{what}: {error}"));
    let path = path.expect("connected");
    assert_eq!(path.transport, "tcp", "{what}");
    assert!(path.reason.is_some(), "{what}");
    // Half a second of time limit, and the delay of a busy machine.
    assert!(took < Duration::from_millis(1500), "{what}: {took:?}");
    talk(&a, &b);
}

#[test]
fn somebody_else_at_the_door() {
    squatted("never accepts", |_| ());
    squatted("hangs up", |door| drop(open_door(door)));
    squatted("hangs up after the hello", |door| {
        let wire = open_door(door);
        assert!(hear(&wire).is_some());
    });
    squatted("speaks something else", |door| {
        let wire = open_door(door);
        unix::send_with_fds(&wire, &[7; 200], &[]).expect("it listens");
        hear(&wire);
        hear(&wire);
    });
    squatted("declines", |door| {
        let wire = open_door(door);
        say(&wire, &Message::Decline("no".into()), &[]);
        hear(&wire);
        hear(&wire);
    });
    squatted("welcomes, and says no more", |door| {
        let wire = open_door(door);
        hear(&wire);
        welcome(&wire, NOWHERE);
        hear(&wire);
    });
}

/// The same, and the other process ends after the Welcome: this looks like a listener that has gone to shared memory and died. The connection may therefore
/// fail, but soon.
#[test]
fn a_door_that_dies_after_the_welcome() {
    let (a, b) = (device(LocalMode::Auto), device(LocalMode::Off));
    let listener = Listener::bind(&b, ANY, 4, &param()).expect("a listener");
    let name = door(listener.local_addr());
    let squat = unix::listen(Name::Abstract(&name), 4).expect("a door");
    let (a, b, took) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let wire = open_door(&squat);
            hear(&wire);
            welcome(&wire, NOWHERE);
        });
        join(&a, &b, &listener)
    });
    assert!(took < Duration::from_millis(1500), "{took:?}");
    match &a.conn {
        Ok(_) => talk(&a, &b),
        Err(error) => assert!(matches!(error, ConnectError::Io(_)), "{error}"),
    }
}

#[test]
fn a_listener_whose_name_is_taken() {
    // The port is not known in advance: use the name of a port that was free a moment ago.
    let port = TcpListener::bind(ANY).expect("a port");
    let addr = port.local_addr().expect("an address");
    drop(port);
    let _squat = unix::listen(Name::Abstract(&door(addr)), 4).expect("a door");
    let (a, b) = (device(LocalMode::Auto), device(LocalMode::Auto));
    let Ok(listener) = Listener::bind(&b, addr, 4, &param()) else {
        println!("skipped: somebody took the port meanwhile");
        return;
    };
    let (a, b, took) = join(&a, &b, &listener);
    assert_eq!(a.path().transport, "tcp");
    assert!(took < Duration::from_millis(1500), "{took:?}");
    talk(&a, &b);
}

#[test]
fn one_port_on_two_addresses() {
    let b = device(LocalMode::Require);
    let first = Listener::bind(&b, ANY, 4, &param()).expect("a listener");
    let other = SocketAddr::from(([127, 0, 0, 2], first.local_addr().port()));
    let c = device(LocalMode::Require);
    let second = match Listener::bind(&c, other, 4, &param()) {
        Ok(second) => second,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let a = device(LocalMode::Require);
    for (device, listener) in [(&b, &first), (&c, &second)] {
        let (a, b, _) = join(&a, device, listener);
        assert_eq!(a.path().transport, "local");
        talk(&a, &b);
    }
}

/// The setup for visitors that break the rules: a listener, and a connection that must not be affected.
struct Stage {
    device: Device,
    listener: Listener,
    bystander: Bystander,
}

impl Stage {
    fn new() -> Stage {
        let device = device(LocalMode::Auto);
        let bystander = Bystander::new(&device);
        let listener = Listener::bind(&device, ANY, 16, &param()).expect("a listener");
        Stage {
            device,
            listener,
            bystander,
        }
    }

    fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    fn wire(&self) -> OwnedFd {
        unix::connect(Name::Abstract(&door(self.addr()))).expect("a door")
    }

    /// Checks that the connection of this peer is accepted, and on TCP.
    fn on_tcp(&self, mut raw: Raw) {
        let frame = start_frame(FrameKind::Request, false, 4).emit();
        raw.send(&frame);
        let request = self
            .listener
            .next_request(Some(PATIENCE))
            .expect("a request");
        let cq = self.device.create_cq(4, None).expect("a CQ");
        let pd = self.device.alloc_pd().expect("a PD");
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
        qp.post_recv(&[RecvWr::new(1)]).expect("post");
        let conn = request.accept(qp, &param()).expect("accept");
        assert!(raw.reply());
        assert_eq!(conn.qp.path().expect("connected").transport, "tcp");
        // The listener requires CRCs.
        raw.crc = true;
        raw.send_ulpdus(&[write(0, 0, &[]), send(1, &[])]);
        let wc = weft_conformance::bed::take(&cq, 1)[0];
        assert_eq!(wc.status, WcStatus::Success);
        self.bystander.ping();
    }
}

#[test]
fn guests_that_say_hello_and_leave() {
    let stage = Stage::new();
    // Not even a Hello.
    drop(stage.wire());
    // A Hello about an existing TCP connection; the visitor leaves before the answer.
    let raw = Raw::connect(stage.addr());
    let wire = stage.wire();
    let from = raw.stream.local_addr().expect("an address");
    say(&wire, &hello(from), &[]);
    drop(wire);
    stage.on_tcp(raw);
    // A welcomed visitor that sends no Join.
    let raw = Raw::connect(stage.addr());
    let visit = Local::visit(&raw.stream);
    assert!(matches!(visit.hello(), Some(Message::Welcome { .. })));
    stage.on_tcp(raw);
    drop(visit);
    // A welcomed visitor that leaves before the request.
    let raw = Raw::connect(stage.addr());
    let local = Local::knock(&raw.stream).expect("a welcome");
    drop(local);
    stage.on_tcp(raw);
    // A welcomed visitor whose TCP connection ends instead.
    let raw = Raw::connect(stage.addr());
    let local = Local::knock(&raw.stream).expect("a welcome");
    drop(raw);
    stage.bystander.ping();
    drop(local);
    // A Hello about a connection that does not exist.
    let wire = stage.wire();
    say(&wire, &hello(([127, 0, 0, 1], 9).into()), &[]);
    let answer = hear(&wire).map(|(message, _)| message);
    assert!(matches!(answer, Some(Message::Decline(_))), "{answer:?}");
    stage.bystander.ping();
}

/// A connection from this port of the loopback, which other connections may share.
fn from_port(port: u16, to: SocketAddr) -> std::net::TcpStream {
    use rustix::net;
    let (family, kind) = (net::AddressFamily::INET, net::SocketType::STREAM);
    let socket = net::socket(family, kind, None).expect("a socket");
    net::sockopt::set_socket_reuseaddr(&socket, true).expect("any socket takes it");
    net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).expect("a port");
    net::connect(&socket, &to).expect("connect");
    socket.into()
}

/// Connections to two listeners of a device can have the same remote address. A Hello refers to the one of the door's listener.
#[test]
fn a_hello_belongs_to_its_door() {
    let device = device(LocalMode::Auto);
    let listener = || Listener::bind(&device, ANY, 4, &param()).expect("a listener");
    let (one, two) = (listener(), listener());
    let free = TcpListener::bind(ANY).expect("a port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    // Once a later connection is through, the device knows of the earlier one.
    let settle = |listener: &Listener| {
        let _raw = Raw::request(listener.local_addr(), false, 4);
        drop(listener.next_request(Some(PATIENCE)).expect("a request"));
    };
    let first = from_port(port, one.local_addr());
    settle(&one);
    // This one's initiator does not ask for shared memory.
    let mut second = Raw::over(from_port(port, two.local_addr()));
    settle(&two);
    let _local = Local::knock(&first).expect("a welcome");
    let request = start_frame(FrameKind::Request, false, 4).emit();
    second.send_start(&request);
    let request = two.next_request(Some(PATIENCE)).expect("a request");
    let cq = device.create_cq(16, None).expect("a CQ");
    let pd = device.alloc_pd().expect("a PD");
    let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
    let conn = request.accept(qp, &param()).expect("accept");
    assert_eq!(conn.qp.path().expect("connected").transport, "tcp");
}

#[test]
fn guests_with_the_wrong_descriptors() {
    let stage = Stage::new();
    let domain = domain();
    let (_segment, file) = Segment::create(RING).expect("a segment");
    let (pipe, _writer) = rustix::pipe::pipe().expect("a pipe");
    let plain: OwnedFd = std::fs::File::open("/proc/self/exe")
        .expect("a file")
        .into();
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("unsealed", flags).expect("a memory file");
    rustix::fs::ftruncate(&unsealed, 4096 + 2 * u64::from(RING)).expect("its length");
    let good = fds(&domain);
    let with = |segment: &'_ OwnedFd| -> Vec<OwnedFd> {
        let mut all = vec![segment.try_clone().expect("a descriptor")];
        all.extend(good.iter().map(|fd| fd.try_clone_to_owned().expect("one")));
        all
    };
    let copy = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
    let mut cases: Vec<(&str, Vec<OwnedFd>)> = vec![
        ("none", Vec::new()),
        ("a pipe for a segment", with(&pipe)),
        ("a plain file for a segment", with(&plain)),
        ("an unsealed segment", with(&unsealed)),
        ("only a segment", vec![copy(&file)]),
        ("no tables", with(&file).drain(..2).collect()),
        ("one arena", with(&file).drain(..4).collect()),
    ];
    for (i, what) in (1..5).zip(["a liveness page", "a table", "an arena", "another arena"]) {
        for wrong in [&pipe, &plain, &unsealed] {
            let mut all = with(&file);
            all[i] = copy(wrong);
            cases.push((what, all));
        }
    }
    let mut many = with(&file);
    for _ in 0..40 {
        many.push(copy(&pipe));
    }
    cases.push(("too many", many));
    let before = descriptors();
    for (what, all) in &cases {
        println!("{what}");
        let raw = Raw::connect(stage.addr());
        let visit = Local::visit(&raw.stream);
        let Some(Message::Welcome { cell, .. }) = visit.hello() else {
            panic!("no welcome");
        };
        let all: Vec<_> = all.iter().map(OwnedFd::as_fd).collect();
        visit.join(cell, &domain, &all);
        stage.on_tcp(raw);
    }
    until("all descriptors are given back", || {
        // Other tests of this file run at the same time.
        descriptors() <= before + 200
    });
}

#[test]
fn guests_that_say_nothing() {
    let stage = Stage::new();
    let flood: Vec<_> = (0..300)
        .filter_map(|_| unix::connect(Name::Abstract(&door(stage.addr()))).ok())
        .collect();
    assert!(flood.len() >= 100, "{}", flood.len());
    stage.bystander.ping();
    // A good peer is served: in shared memory or, while the door is crowded, over TCP.
    let (a, b, took) = join(&device(LocalMode::Auto), &stage.device, &stage.listener);
    assert!(took < Duration::from_secs(2), "{took:?}");
    talk(&a, &b);
    // After half a second the silent visitors are rejected.
    for wire in &flood {
        let answer = hear(wire).map(|(message, _)| message);
        assert!(
            matches!(answer, None | Some(Message::Decline(_))),
            "{answer:?}"
        );
    }
    let (a, b, _) = join(&device(LocalMode::Auto), &stage.device, &stage.listener);
    assert_eq!(a.path().transport, "local");
    talk(&a, &b);
}
