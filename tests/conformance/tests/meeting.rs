//! The meeting of two processes of one host in shared memory, and its failures: then the connections stay on TCP.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use weft_conformance::bed::{Bed, Half, Memory, PATIENCE, Setup};
use weft_conformance::local::{Local, door};
use weft_conformance::raw::{Raw, start_frame};
use weft_conformance::twin::{DIAL, Pair, Twin};
use weft_sys::unix::{self, Name};
use weft_verbs::cm::{ConnParam, ConnectError, Connection, Listener, connect};
use weft_verbs::{Cq, Device, LinkOptions, LocalMode, Path, QpInit, RecvWr, SendWr, WcStatus};
use weft_wire::mpa::FrameKind;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

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

/// A program announces its port before it listens.
#[test]
fn a_peer_that_comes_before_the_listener_is_met() {
    let (a, b) = (device(LocalMode::Require), device(LocalMode::Require));
    let there = b.bind(ANY).expect("a port");
    there.admit().expect("a port that peers can connect to");
    let qp = |device: &Device| {
        let cq = device.create_cq(16, None).expect("a CQ");
        let pd = device.alloc_pd().expect("a PD");
        pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP")
    };
    let (ours, theirs) = (qp(&a), qp(&b));
    let (tell, dialled) = mpsc::channel();
    // On one host the hello is sent before this returns.
    let from = a.bind(ANY).expect("a port");
    from.dial(there.local_addr(), &ours, &param(), move |outcome| {
        tell.send(outcome).expect("somebody waits");
    });
    let (tell, told) = mpsc::channel();
    let listening = there.listen(4, &param(), move |incoming| {
        tell.send(incoming).expect("somebody waits");
    });
    let _listening = listening.expect("a free port");
    let incoming = told.recv_timeout(PATIENCE).expect("a request");
    incoming.accept(&theirs, &param()).expect("its peer waits");
    let outcome = dialled.recv_timeout(PATIENCE).expect("an outcome");
    outcome.expect("shared memory");
    assert_eq!(ours.path().expect("connected").transport, "local");
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
