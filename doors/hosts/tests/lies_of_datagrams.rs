//! Brokers and programs that lie about datagrams: the broker under test ends that stream, and answers the next honest one.
//!
//! The test runs itself again in a new network namespace, whose host has two addresses: what it dials at one comes from the other.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use weft_dropin::{have, say};
use weft_hosts::{Broker, Config};
use weft_run::dgram::{Route, cookie};
use weft_run::ud::{self, Heard, Kind, MESSAGE, Message, Note};
use weft_sdp::{Listener, Options, RecvFlags, Sink, Source, Stream};
use weft_sys::unix;
use weft_verbs::{Device, LocalMode};

const INSIDE: &str = "WEFT_HOSTS_LIES_OF_DATAGRAMS";
const MAGIC: &[u8] = b"weftrnU1";
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn lies_end_one_stream_and_no_other() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    if !have(&[("unshare", "util-linux"), ("ip", "iproute2")]) {
        return;
    }
    let links = "ip link set lo up && ip addr add 10.9.0.1/32 dev lo && ip addr add 10.9.0.2/32 dev lo \
        && ip addr add 10.9.0.3/32 dev lo \
        && ip route replace local 10.9.0.1 dev lo src 10.9.0.2 table local";
    let run = |script: &str| {
        Command::new("unshare")
            .args(["--net", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .env(INSIDE, "1")
            .output()
            .unwrap()
    };
    if !run(links).status.success() {
        return say("skipped: no network namespaces");
    }
    let script =
        format!("{links} && exec \"$0\" --exact lies_end_one_stream_and_no_other --nocapture");
    let output = run(&script);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("@done"), "{text}");
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn route(from: &str, to: SocketAddr) -> Route {
    Route::new(addr(from), to)
}

fn message(kind: Kind, route: Route) -> Message {
    Message {
        kind,
        qkey: 0,
        route,
    }
}

fn write(stream: &Stream, bytes: &[u8]) {
    // The other end may have ended it already.
    let _ = stream.send(&[Source::Bytes(bytes)], false);
}

fn read(stream: &Stream) -> Option<Message> {
    let mut bytes = [0; MESSAGE];
    let got = stream.recv(&mut [Sink::Bytes(&mut bytes)], RecvFlags::WAITALL);
    (got == Ok(MESSAGE)).then(|| Message::parse(&bytes).unwrap())
}

/// Waits for what a function finds.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A program's session, and the `Q_Key`.
fn session() -> (OwnedFd, u32) {
    let wire = ud::session().unwrap().unwrap();
    let Heard::Key(qkey) = wait_for(|| ud::heard(&wire).unwrap()) else {
        panic!("the key is first");
    };
    (wire, qkey)
}

/// Returns true if the broker has closed a program's connection.
fn is_ended(wire: &OwnedFd) -> bool {
    let mut bytes = [0; 64];
    wait_for(|| match unix::recv_bytes(wire, &mut bytes) {
        Ok(None) => Some(true),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Some(true),
        _ => Some(false),
    })
}

struct Asker {
    device: Device,
    broker: SocketAddr,
}

impl Asker {
    fn dial(&self) -> Stream {
        let stream =
            Stream::connect(&self.device, self.broker, &Options::default(), Some(LIMIT)).unwrap();
        stream.set_recv_timeout(Some(LIMIT));
        write(&stream, MAGIC);
        stream
    }

    fn ask(&self, route: Route) -> (Stream, Message) {
        let stream = self.dial();
        write(&stream, &message(Kind::Find, route).emit());
        let answer = read(&stream).unwrap();
        assert_eq!(answer.route, route);
        (stream, answer)
    }
}

fn inside() {
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let answerer = Listener::bind(&device, addr("10.9.0.1:0"), 8, &Options::default()).unwrap();
    let broker = Broker::start(Config {
        device: device.clone(),
        bind: vec![addr("10.9.0.1:0")],
        port: answerer.local_addr().port(),
        nat: false,
        idle: None,
    })
    .unwrap();
    let asker = Asker {
        device,
        broker: broker.local_addrs()[0],
    };
    std::thread::spawn(move || broker.run());
    asks(&asker);
    answers(&answerer);
    println!("@done");
}

/// Another broker asks, and a program says which sockets take frames.
fn asks(asker: &Asker) {
    let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
    let (to, number) = (socket.local_addr().unwrap(), cookie(&socket).unwrap());
    let honest = route("10.9.0.2:9", to);
    // No program has said anything.
    assert_eq!(asker.ask(honest).1.kind, Kind::None);
    let (wire, qkey) = session();
    ud::tell(&wire, Note::Takes(number)).unwrap();
    let (watching, _) = wait_for(|| Some(asker.ask(honest)).filter(|it| it.1.kind == Kind::Found));
    assert_eq!(asker.ask(honest).1.qkey, qkey);
    assert_eq!(qkey >> 31, 0);

    // For other senders than itself, and about what no host has.
    for from in ["10.9.0.3:9", "127.0.0.1:9", "10.9.0.1:9", "10.9.0.2:0"] {
        let (_, answer) = asker.ask(route(from, to));
        assert_eq!((answer.kind, answer.qkey), (Kind::None, 0), "{from}");
    }
    for to in [
        "224.0.0.1:9",
        "127.0.0.1:9",
        "0.0.0.0:9",
        "10.9.0.1:1",
        "10.9.0.9:9",
    ] {
        assert_eq!(
            asker.ask(route("10.9.0.2:9", addr(to))).1.kind,
            Kind::None,
            "{to}"
        );
    }
    // About another address that gets to the same socket: the broker was not reached there.
    let wild = UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = wild.local_addr().unwrap().port();
    ud::tell(&wire, Note::Takes(cookie(&wild).unwrap())).unwrap();
    let reached = Route::new(addr("10.9.0.2:9"), SocketAddr::new(to.ip(), port));
    wait_for(|| (asker.ask(reached).1.kind == Kind::Found).then_some(()));
    let forwarded = Route::new(
        addr("10.9.0.2:9"),
        SocketAddr::new([10, 9, 0, 3].into(), port),
    );
    assert_eq!(asker.ask(forwarded).1.kind, Kind::None);
    // What only an answerer says, what nobody says, and half of a question.
    let find = message(Kind::Find, honest).emit();
    for kind in [2, 3, 4, 0, 5, 255] {
        let stream = asker.dial();
        let mut bytes = find;
        bytes[0] = kind;
        write(&stream, &bytes);
        assert_eq!(read(&stream), None, "{kind}");
    }
    let stream = asker.dial();
    write(&stream, &find[..20]);
    stream.shutdown(weft_sdp::Shutdown::Write).unwrap();
    assert_eq!(read(&stream), None);
    // Many questions at once, answered one by one.
    let stream = asker.dial();
    let many = find.repeat(500);
    let writer = {
        let (stream, many) = (&stream, &many);
        std::thread::scope(|scope| {
            scope.spawn(move || write(stream, many));
            (0..500).all(|_| read(stream).is_some_and(|answer| answer.kind == Kind::Found))
        })
    };
    assert!(writer);

    // A program that speaks of sockets it has not registered, and then what no program says: its sockets are gone.
    ud::tell(&wire, Note::Gone(number + 1)).unwrap();
    assert_eq!(asker.ask(honest).1.kind, Kind::Found);
    unix::send_with_fds(&wire, &[4; 9], &[]).unwrap();
    assert_eq!(read(&watching), Some(message(Kind::Lost, honest)));
    assert!(is_ended(&wire));
    assert_eq!(asker.ask(honest).1.kind, Kind::None);
    // An honest one is served.
    let (wire, _) = session();
    ud::tell(&wire, Note::Takes(number)).unwrap();
    let (watching, _) = wait_for(|| Some(asker.ask(honest)).filter(|it| it.1.kind == Kind::Found));
    ud::tell(&wire, Note::Gone(number)).unwrap();
    assert_eq!(read(&watching), Some(message(Kind::Lost, honest)));
    // One that parts hears whether anybody was told.
    for is_asked in [true, false] {
        ud::tell(&wire, Note::Takes(number)).unwrap();
        if is_asked {
            wait_for(|| Some(asker.ask(honest)).filter(|it| it.1.kind == Kind::Found));
        }
        ud::tell(&wire, Note::Part(number)).unwrap();
        let left = Heard::Left {
            cookie: number,
            was_found: is_asked,
        };
        assert_eq!(wait_for(|| ud::heard(&wire).unwrap()), left);
        assert_eq!(asker.ask(honest).1.kind, Kind::None);
    }
    // And its end is that of its sockets.
    ud::tell(&wire, Note::Takes(number)).unwrap();
    let (watching, _) = wait_for(|| Some(asker.ask(honest)).filter(|it| it.1.kind == Kind::Found));
    drop(wire);
    assert_eq!(read(&watching), Some(message(Kind::Lost, honest)));
}

/// A program asks another broker.
fn answers(answerer: &Listener) {
    let honest = route("10.9.0.2:9", addr("10.9.0.1:5060"));
    let find = message(Kind::Find, honest);
    let ask = |first: &[u8]| {
        let wire = ud::ask_host(honest.to.ip()).unwrap().unwrap();
        let stream = answerer.accept(Some(LIMIT)).unwrap();
        stream.set_recv_timeout(Some(LIMIT));
        let mut magic = [0; 8];
        let got = stream.recv(&mut [Sink::Bytes(&mut magic)], RecvFlags::WAITALL);
        assert_eq!((got, &magic[..]), (Ok(8), MAGIC));
        unix::send_with_fds(&wire, first, &[]).unwrap();
        (wire, stream)
    };
    // The program asks about another host, or says what only a broker says.
    let elsewhere = message(Kind::Find, route("10.9.0.2:9", addr("10.9.0.7:5060")));
    for lie in [elsewhere, message(Kind::Found, honest)] {
        let (wire, stream) = ask(&lie.emit());
        assert!(is_ended(&wire));
        assert_eq!(read(&stream), None);
    }
    let (wire, _stream) = ask(b"what is this?");
    assert!(is_ended(&wire));
    // The broker speaks for another host, asks in return, or says nothing that is known.
    let other = message(Kind::Found, elsewhere.route).emit();
    let mut unknown = find.emit();
    unknown[0] = 9;
    for lie in [other, find.emit(), unknown] {
        let (wire, stream) = ask(&find.emit());
        assert_eq!(read(&stream), Some(find));
        write(&stream, &lie);
        assert!(is_ended(&wire));
    }
    // An honest answer, in two pieces.
    let (wire, stream) = ask(&find.emit());
    assert_eq!(read(&stream), Some(find));
    let answer = Message {
        kind: Kind::Found,
        qkey: 77,
        route: honest,
    };
    write(&stream, &answer.emit()[..30]);
    write(&stream, &answer.emit()[30..]);
    let mut bytes = [0; MESSAGE + 1];
    let n = wait_for(|| unix::recv_bytes(&wire, &mut bytes).ok().flatten());
    assert_eq!(Message::parse(&bytes[..n]), Some(answer));
    // The broker ends.
    drop(stream);
    assert!(is_ended(&wire));
}
