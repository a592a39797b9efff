//! A peer's broker that lies at each step, and programs that do: the broker under test ends that connection, and serves the next honest one.
//!
//! The test runs itself again in a new network namespace, because a broker's name belongs to its user and namespace.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use weft_dropin::{have, say};
use weft_hosts::wire::{self, DIGEST, Frame, HEAD, Open, Prover};
use weft_hosts::{Broker, Config};
use weft_ring::Role;
use weft_ring::stream::Stream as Rings;
use weft_run::connection::Carrier;
use weft_run::hosts::{self, Answer, Beginning, Registration};
use weft_run::meet::Ends;
use weft_sdp::{Options, RecvFlags, Sink, Source, Stream};
use weft_verbs::{Device, LocalMode};

const INSIDE: &str = "WEFT_HOSTS_LIES";
const REQUEST: &[u8] = b"the first bytes of a request";
const ANSWER: &[u8] = b"and those of the answer";
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn lies_end_one_connection_and_no_other() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    if !have(&[("unshare", "util-linux"), ("ip", "iproute2")]) {
        return;
    }
    let script =
        "ip link set lo up && exec \"$0\" --exact lies_end_one_connection_and_no_other --nocapture";
    let run = |script: &str| {
        Command::new("unshare")
            .args(["--net", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .env(INSIDE, "1")
            .output()
            .unwrap()
    };
    if !run("ip link set lo up").status.success() {
        return say("skipped: no network namespaces");
    }
    let output = run(script);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("@done"), "{text}");
}

/// A program's end of a connection that it has accepted, as its library would describe it.
struct Program {
    wire: OwnedFd,
    /// The other end, whose addresses the dialling broker names.
    dialled: Ends,
    _sockets: [TcpStream; 2],
}

impl Program {
    fn register() -> Program {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let what = Registration {
            ends: Ends::of(&server).unwrap(),
            dialled: false,
            carrier: Carrier::Bsdp,
            sent: Beginning::new(ANSWER),
            received: Beginning::new(REQUEST),
        };
        Program {
            wire: hosts::register(&what).unwrap().unwrap(),
            dialled: Ends::of(&client).unwrap(),
            _sockets: [client, server],
        }
    }

    /// Hands rings over, once the broker says so.
    fn link(&self) -> (Rings, UnixStream) {
        let until = Instant::now() + LIMIT;
        loop {
            match hosts::answer(&self.wire) {
                Ok(Some(Answer::Go(Carrier::Bsdp))) => break,
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                other => panic!("{other:?}"),
            }
        }
        let (rings, segment) = Rings::create(1 << 16).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        hosts::link(&self.wire, segment.as_fd(), theirs.as_fd()).unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        (rings, ours)
    }
}

/// Returns true if the broker has closed the bell.
fn is_closed(mut bell: &UnixStream) -> bool {
    use std::io::Read;
    let mut bytes = [0; 16];
    loop {
        match bell.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return true,
            Err(_) => return false,
        }
    }
}

fn read<const N: usize>(stream: &Stream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let got = stream.recv(&mut [Sink::Bytes(&mut bytes)], RecvFlags::WAITALL);
    (got == Ok(N)).then_some(bytes)
}

fn write(stream: &Stream, bytes: &[u8]) {
    // The other end may have ended it already.
    let _ = stream.send(&[Source::Bytes(bytes)], false);
}

fn opening(dialled: Ends, request: &[u8]) -> Open {
    Open {
        own: dialled.own,
        peer: dialled.peer,
        known: [request.len() as u8, ANSWER.len() as u8],
        nonce: [5; 32],
    }
}

struct Peer {
    device: Device,
    addr: SocketAddr,
}

impl Peer {
    fn dial(&self) -> Stream {
        let stream =
            Stream::connect(&self.device, self.addr, &Options::default(), Some(LIMIT)).unwrap();
        stream.set_recv_timeout(Some(LIMIT));
        stream
    }

    /// The opening, up to the verdict: which of the offered, and whether the acceptor's proof is right.
    fn open(&self, dialled: Ends, request: &[u8]) -> (Stream, Option<(u8, bool)>) {
        let stream = self.dial();
        write(&stream, &opening(dialled, request).emit());
        let count = match read::<1>(&stream) {
            None | Some([0]) => return (stream, None),
            Some([count]) => count,
        };
        let nonces = [[5; 32], read::<32>(&stream).unwrap()];
        let mut lens = [0; 2];
        for _ in 0..count {
            lens = read::<2>(&stream).unwrap();
            let proof = wire::digest(Prover::Dialler, &nonces, lens, request, ANSWER).unwrap();
            write(&stream, &hmac::Mac::finalize(proof).into_bytes());
        }
        let [which] = read::<1>(&stream).unwrap();
        let theirs = read::<DIGEST>(&stream).unwrap();
        let expected = wire::digest(Prover::Acceptor, &nonces, lens, request, ANSWER).unwrap();
        let right = hmac::Mac::verify_slice(expected, &theirs).is_ok();
        (stream, Some((which, right)))
    }
}

fn inside() {
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let broker = Broker::start(Config {
        device: device.clone(),
        bind: vec!["127.0.0.1:0".parse().unwrap()],
        port: 1,
        nat: false,
        idle: None,
    })
    .unwrap();
    let peer = Peer {
        device,
        addr: broker.local_addrs()[0],
    };
    std::thread::spawn(move || broker.run());

    // No opening of ours, and one that ends.
    for bytes in [&[0xff; 80][..], b"weftrunH"] {
        let stream = peer.dial();
        write(&stream, bytes);
        stream.shutdown(weft_sdp::Shutdown::Write).unwrap();
        assert_eq!(read::<1>(&stream), None);
    }
    // Its claimed bytes differ in one byte: the connection stays for a peer that knows them.
    let program = Program::register();
    let mut other = REQUEST.to_vec();
    other[3] ^= 1;
    let (_, verdict) = peer.open(program.dialled, &other);
    assert_eq!(verdict, Some((wire::NONE, false)));
    assert_eq!(hosts::answer(&program.wire), Ok(None));
    honest(&peer, &program);

    // Another connection with the same first bytes, from another port: it is not the one that is meant.
    let (one, two) = (Program::register(), Program::register());
    drop(one.wire);
    let stream = peer.dial();
    // Longer than a broker that accepts other ports would need.
    stream.set_recv_timeout(Some(Duration::from_secs(3)));
    write(&stream, &opening(one.dialled, REQUEST).emit());
    assert_eq!(read::<1>(&stream), None);
    assert_eq!(hosts::answer(&two.wire), Ok(None));
    honest(&peer, &two);

    let data = |len: u32| Frame::Data(len).emit().to_vec();
    let switch = |offset: u64| [&Frame::Switch.emit()[..], &offset.to_be_bytes()].concat();
    let mut foreign = [0; HEAD];
    foreign[0] = 9;
    let lies: [(&str, Vec<u8>); 8] = [
        ("an unknown frame", foreign.to_vec()),
        (
            "data before the switch",
            [data(3), b"abc".to_vec()].concat(),
        ),
        ("a switch without consent", switch(4)),
        ("consent twice", Frame::Consent.emit().repeat(2)),
        ("end twice", Frame::End.emit().repeat(2)),
        ("a frame that is too long", data(wire::MAX_DATA + 1)),
        ("an empty data frame", data(0)),
        ("half a frame", vec![1, 0, 0]),
    ];
    for (what, bytes) in lies {
        let program = Program::register();
        let (stream, verdict) = peer.open(program.dialled, REQUEST);
        assert_eq!(verdict, Some((0, true)), "{what}");
        let (rings, bell) = program.link();
        write(&stream, &bytes);
        stream.shutdown(weft_sdp::Shutdown::Write).unwrap();
        assert!(is_closed(&bell), "{what}");
        // A direction that has not switched stays on TCP.
        assert!(rings.is_closed(Role::Initiator), "{what}");
        // The program has not consented: its connection stays on TCP.
        assert!(rings.is_closed(Role::Responder), "{what}");
        assert!(!rings.has_switched(Role::Responder), "{what}");
    }
    // An offset that the program never comes to: no byte is shown to it.
    let program = Program::register();
    let (stream, _) = peer.open(program.dialled, REQUEST);
    let (rings, bell) = program.link();
    rings.consent(Role::Responder, 10);
    nudge(&bell);
    assert_eq!(read::<HEAD>(&stream), Some(Frame::Consent.emit()));
    write(&stream, &[switch(7), data(3), b"abc".to_vec()].concat());
    stream.shutdown(weft_sdp::Shutdown::Write).unwrap();
    assert!(!rings.may_switch(Role::Responder, 10));
    assert_eq!(rings.ready(Role::Responder, 0), Ok((0, false)));
    // The program closes its socket: no thread stays with the connection.
    drop(bell);
    let since = Instant::now();
    while read::<1>(&stream).is_some() {}
    assert!(since.elapsed() < LIMIT, "the broker keeps the connection");
    // A program that claims bytes which its ring cannot hold.
    let program = Program::register();
    let (stream, _) = peer.open(program.dialled, REQUEST);
    let (rings, bell) = program.link();
    rings.publish(Role::Initiator, 0, 1 << 40).unwrap();
    nudge(&bell);
    assert!(is_closed(&bell));
    drop(stream);
    honest(&peer, &Program::register());
    println!("@done");
}

fn nudge(mut bell: &UnixStream) {
    use std::io::Write;
    bell.write_all(b"!").unwrap();
}

/// One message each way.
fn honest(peer: &Peer, program: &Program) {
    let (stream, verdict) = peer.open(program.dialled, REQUEST);
    assert_eq!(verdict, Some((0, true)));
    let (rings, bell) = program.link();
    let me = Role::Initiator;
    rings.consent(Role::Responder, 28);
    rings.arm(Role::Responder, 0, weft_ring::stream::Wish::Once);
    rings.join(me, 23);
    nudge(&bell);
    assert_eq!(read::<HEAD>(&stream), Some(Frame::Consent.emit()));
    let switch = |offset: u64| [&Frame::Switch.emit()[..], &offset.to_be_bytes()].concat();
    write(
        &stream,
        &[
            &Frame::Consent.emit()[..],
            &switch(28),
            &Frame::Data(3).emit(),
            b"abc",
            &Frame::End.emit(),
        ]
        .concat(),
    );
    let until = Instant::now() + LIMIT;
    while !(rings.has_consented(me) && rings.is_closed(Role::Responder)) {
        assert!(Instant::now() < until, "the broker is silent");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(rings.ready(Role::Responder, 0), Ok((3, true)));
    let mut got = [0; 3];
    rings.get_slice(Role::Responder, 0, &mut got);
    assert_eq!(&got, b"abc");
    assert!(rings.switch_over(me));
    rings.put_slice(me, 0, b"defg");
    rings.publish(me, 0, 4).unwrap();
    rings.close(me);
    nudge(&bell);
    assert_eq!(read::<16>(&stream).map(Vec::from), Some(switch(23)));
    assert_eq!(read::<HEAD>(&stream), Some(Frame::Data(4).emit()));
    assert_eq!(read::<4>(&stream).as_ref(), Some(b"defg"));
    assert_eq!(read::<HEAD>(&stream), Some(Frame::End.emit()));
    assert!(is_closed(&bell));
}
