//! Hostile listeners: a victim that dials one gets its answer, or its error, in time.
//!
//! Each lie has a listener of its own. `dial NAME ADDR MILLISECONDS` tells the test which there are, and how long the victim may take to make a
//! connection or give it up.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use crate::frames::{CRC, ENHANCED, MARKERS, REJECT, REPLY, REQUEST, Startup, fpdu};
use crate::local::forged::forged;
use crate::meeting::{DOMAIN, Meeting, RING};
use crate::network::startup::LIMIT;
use crate::peer::{PATIENCE, Peer};
use crate::report::Report;
use crate::rng::Rng;
use crate::shared::files::Files;
use crate::shared::ring::{Ring, word};
use crate::shared::unix_socket::{Cell, Received, UnixSocket, VERSION, kind, message};
use crate::target::{Kind, Target};

/// What an initiator waits for a Welcome.
const WELCOME: Duration = Duration::from_millis(500);

/// A listener's part in one lie.
type Part = Box<dyn FnOnce(&Listener) -> io::Result<()> + Send>;

struct Lie {
    name: String,
    /// How long the victim may wait.
    limit: Duration,
    /// Whether there is a socket beside the listener.
    socket: bool,
    part: Part,
}

struct Listener {
    tcp: TcpListener,
    socket: Option<UnixSocket>,
    /// With this the victim's program goes on.
    greeting: Vec<u8>,
}

/// A reply with which an initiator of weft's goes on: it sends a Read of nothing first (RFC 6581).
fn honest(greeting: &[u8]) -> Startup {
    Startup::with_depths(REPLY, 0x8004, 0x4004, greeting)
}

impl Listener {
    /// An honest reply to the request that comes.
    fn reply(&self, peer: &mut Peer) -> io::Result<()> {
        peer.startup_frame()?;
        peer.raw(&honest(&self.greeting).bytes())
    }

    /// The visitor's socket and its Hello.
    fn hello(&self) -> io::Result<(UnixSocket, Received)> {
        let visitor = self.socket.as_ref().expect("a socket").visitor()?;
        let hello = visitor.message(PATIENCE)?;
        Ok((visitor, hello))
    }

    /// A meeting up to its Welcome, and what joins.
    fn joined(&self, rng: &mut Rng) -> io::Result<(UnixSocket, Received)> {
        let (visitor, hello) = self.hello()?;
        let cell = Cell::new(rng);
        welcome(&visitor, &cell, &hello)?;
        let join = visitor.message(PATIENCE)?;
        Ok((visitor, join))
    }
}

/// An honest Welcome. (The secret of who says Hello is not read: a proof of zeros says so.)
fn welcome(visitor: &UnixSocket, cell: &Cell, hello: &Received) -> io::Result<()> {
    cell.show(hello.body.get(8..24).unwrap_or(&[0; 16]));
    let mut body = cell.bytes();
    body.extend([0; 16]);
    visitor.send(&message(VERSION, kind::WELCOME, &body), &[])
}

/// Stays as it is until the victim leaves.
fn hold(mut peer: Peer) {
    peer.ending(LIMIT + PATIENCE);
}

/// All listeners of the lies for this kind of victim; they stay.
pub fn run(kind: Kind, seed: u64, report: &mut Report) {
    let mut lies = replies(kind, seed);
    lies.extend(times());
    lies.extend(welcomes(seed));
    lies.extend(attaches(seed));
    open(kind, lies, report);
}

/// A listener of another user's, whose socket nobody must speak at.
pub fn squat(kind: Kind, report: &mut Report) {
    let lie = Lie {
        name: "squatter".into(),
        limit: LIMIT,
        socket: true,
        part: Box::new(|listener| {
            let mut peer = Peer::accept(&listener.tcp)?;
            let visitor = listener.socket.as_ref().expect("a socket").visitor()?;
            if let Ok(Some((bytes, _))) = visitor.packet(WELCOME) {
                println!("fault a stranger is told {bytes:02x?}");
            }
            drop(visitor);
            listener.reply(&mut peer)?;
            hold(peer);
            Ok(())
        }),
    };
    open(kind, vec![lie], report);
}

fn open(kind: Kind, lies: Vec<Lie>, report: &mut Report) {
    for lie in lies {
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = tcp.local_addr().expect("an address");
        let target = Target {
            kind,
            addr,
            shared: false,
        };
        // No other lie gets its port.
        report.keep(tcp.try_clone().expect("descriptors"));
        let listener = Listener {
            tcp,
            socket: lie.socket.then(|| UnixSocket::open(addr).expect("a name")),
            greeting: target.hello(),
        };
        println!(
            "dial {} {addr} {}",
            lie.name.replace(' ', "-"),
            lie.limit.as_millis()
        );
        report.case(&lie.name, Ok(()));
        report.keep(thread::spawn(move || {
            if let Err(e) = (lie.part)(&listener) {
                // The victim left first.
                println!("note {}: {e}", lie.name);
            }
            drop(listener);
        }));
    }
}

fn tcp(
    name: impl Into<String>,
    part: impl FnOnce(Peer, &Listener) -> io::Result<()> + Send + 'static,
) -> Lie {
    Lie {
        name: name.into(),
        limit: LIMIT,
        socket: false,
        part: Box::new(move |listener| part(Peer::accept(&listener.tcp)?, listener)),
    }
}

/// Answers to a request.
fn replies(kind: Kind, seed: u64) -> Vec<Lie> {
    let target = Target {
        kind,
        addr: "127.0.0.1:0".parse().expect("an address"),
        shared: false,
    };
    let greeting = target.hello();
    let good = honest(&greeting);
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    let mut rng = Rng::new(seed);
    all.push((
        "a request for a reply".into(),
        Startup::new(REQUEST, &greeting).bytes(),
    ));
    all.push((
        "another key".into(),
        Startup::new(*b"MPA ID Rep frame", &greeting).bytes(),
    ));
    all.push(("HTTP".into(), b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()));
    for revision in [0, 1, 3, 255] {
        all.push((
            format!("revision {revision}"),
            Startup {
                revision,
                ..good.clone()
            }
            .bytes(),
        ));
    }
    for flags in [
        0,
        CRC,
        ENHANCED,
        MARKERS,
        MARKERS | CRC | ENHANCED,
        REJECT,
        REJECT | ENHANCED,
        0x0f,
        0xff,
    ] {
        all.push((
            format!("flags {flags:#x}"),
            Startup {
                flags,
                ..good.clone()
            }
            .bytes(),
        ));
    }
    for len in [0, 1, 3, 4, 5, 20, 36, 44, 511, 512, 513, 600] {
        let private = rng.bytes(len);
        let claimed = len as u16;
        all.push((
            format!("{len} bytes of private data"),
            Startup {
                claimed,
                private,
                ..good.clone()
            }
            .bytes(),
        ));
    }
    for (ird, ord) in [(0, 0), (!0, !0), (0x3fff, 0x3fff), (0x8000, 0x8000)] {
        all.push((
            format!("depths {ird:#x}, {ord:#x}"),
            Startup::with_depths(REPLY, ird, ord, &greeting).bytes(),
        ));
    }
    for at in 0..greeting.len() {
        let mut changed = greeting.clone();
        changed[at] = if at % 2 == 0 { 0xff } else { 0 };
        all.push((
            format!("greeting with another byte {at}"),
            honest(&changed).bytes(),
        ));
    }
    all.push((
        "a reply twice".into(),
        [good.bytes(), good.bytes()].concat(),
    ));
    all.push((
        "noise behind the reply".into(),
        [good.bytes(), rng.bytes(3000)].concat(),
    ));
    all.push((
        "frames of noise behind the reply".into(),
        [good.bytes(), fpdu(&rng.bytes(80))].concat(),
    ));
    all.into_iter()
        .map(|(name, bytes)| {
            tcp(name, move |mut peer, _| {
                peer.startup_frame()?;
                peer.raw(&bytes)?;
                hold(peer);
                Ok(())
            })
        })
        .collect()
}

/// Answers that do not come, or not whole.
fn times() -> Vec<Lie> {
    let mut lies = vec![
        tcp("no answer", |peer, _| {
            hold(peer);
            Ok(())
        }),
        tcp("a reset", |peer, _| {
            peer.reset();
            Ok(())
        }),
        tcp("the end", |_, _| Ok(())),
        tcp("a reset after the request", |mut peer, _| {
            peer.startup_frame()?;
            peer.reset();
            Ok(())
        }),
        tcp("a reset after the reply", |mut peer, listener| {
            listener.reply(&mut peer)?;
            peer.reset();
            Ok(())
        }),
        tcp("a reply byte by byte", |mut peer, listener| {
            peer.startup_frame()?;
            for byte in honest(&listener.greeting).bytes() {
                peer.raw(&[byte])?;
                thread::sleep(Duration::from_secs(1));
            }
            hold(peer);
            Ok(())
        }),
    ];
    for len in [1, 16, 19, 20, 22] {
        lies.push(tcp(
            format!("{len} bytes of a reply"),
            move |mut peer, listener| {
                peer.startup_frame()?;
                let reply = honest(&listener.greeting).bytes();
                peer.raw(&reply[..len])?;
                hold(peer);
                Ok(())
            },
        ));
    }
    lies
}

/// A lie at the socket; TCP beside it is answered as it should be.
fn socket(
    name: impl Into<String>,
    limit: Duration,
    part: impl FnOnce(&Listener) -> io::Result<()> + Send + 'static,
) -> Lie {
    Lie {
        name: name.into(),
        limit,
        socket: true,
        part: Box::new(move |listener| {
            let mut peer = Peer::accept(&listener.tcp)?;
            part(listener)?;
            listener.reply(&mut peer)?;
            hold(peer);
            Ok(())
        }),
    }
}

fn welcomes(seed: u64) -> Vec<Lie> {
    let mut lies = vec![
        // The socket stays shut; the visitor is in the kernel's queue.
        socket("a socket that nobody opens", WELCOME, |_| Ok(())),
        socket("a socket that is shut again", WELCOME, |listener| {
            drop(listener.socket.as_ref().expect("a socket").visitor()?);
            Ok(())
        }),
        socket("no Welcome", WELCOME, |listener| {
            let (visitor, _) = listener.hello()?;
            // Until the visitor has had enough.
            let _ = visitor.packet(PATIENCE);
            Ok(())
        }),
        socket("a Decline", WELCOME, |listener| {
            let (visitor, _) = listener.hello()?;
            visitor.send(&message(VERSION, kind::DECLINE, b"\x1b[31mno\0\n"), &[])
        }),
    ];
    type Make = fn(&Received, &mut Rng) -> Vec<u8>;
    let packets: [(&str, Make); 14] = [
        ("an empty packet", |_, _| Vec::new()),
        ("one byte", |_, _| vec![1]),
        ("noise", |_, rng| rng.bytes(200)),
        ("a long packet", |_, rng| rng.bytes(4000)),
        ("a Welcome alone", |_, _| {
            message(VERSION, kind::WELCOME, &[])
        }),
        ("a Welcome of zeros", |_, _| {
            message(VERSION, kind::WELCOME, &[0; 40])
        }),
        ("a Welcome of ones", |_, _| {
            message(VERSION, kind::WELCOME, &[0xff; 40])
        }),
        ("a Welcome that is too long", |_, _| {
            message(VERSION, kind::WELCOME, &[0; 41])
        }),
        ("a Welcome of version 1", |_, _| {
            message(1, kind::WELCOME, &[0; 40])
        }),
        ("the Hello back", |hello, _| {
            message(VERSION, kind::HELLO, &hello.body)
        }),
        ("a cell in the kernel", |_, _| {
            let mut body = 0xffff_8000_0000_0000_u64.to_le_bytes().to_vec();
            body.extend([1; 32]);
            message(VERSION, kind::WELCOME, &body)
        }),
        ("the victim's own cell", |hello, _| {
            let mut body = hello.body[..24].to_vec();
            body.extend([0; 16]);
            message(VERSION, kind::WELCOME, &body)
        }),
        ("an Attach at once", |_, _| {
            message(VERSION, kind::ATTACH, &Meeting::party(7, true))
        }),
        ("kind 77", |_, _| message(VERSION, 77, &[0; 40])),
    ];
    for (name, make) in packets {
        lies.push(socket(
            format!("{name} for a Welcome"),
            WELCOME,
            move |listener| {
                let mut rng = Rng::new(seed);
                let (visitor, hello) = listener.hello()?;
                let zero = std::fs::File::open("/dev/zero")?;
                let _ = visitor.send(&make(&hello, &mut rng), &[zero.as_fd(), zero.as_fd()]);
                Ok(())
            },
        ));
    }
    lies
}

/// A lie in an Attach, or instead of one.
fn attach(
    name: impl Into<String>,
    seed: u64,
    part: impl FnOnce(&UnixSocket, &Files, Received) -> io::Result<()> + Send + 'static,
) -> Lie {
    socket(name, LIMIT, move |listener| {
        let (visitor, join) = listener.joined(&mut Rng::new(seed))?;
        let files = Files {
            segment: None,
            ..Files::new(RING, &DOMAIN)?
        };
        part(&visitor, &files, join)?;
        // The socket stays as long as the process: its end would be the connection's.
        std::mem::forget((visitor, files));
        Ok(())
    })
}

fn send_attach(visitor: &UnixSocket, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = Meeting::party(7, true);
    visitor.send(&message(VERSION, kind::ATTACH, &body), fds)
}

fn attaches(seed: u64) -> Vec<Lie> {
    let mut lies = vec![
        attach("no Attach", seed, |_, _, _| Ok(())),
        attach("a Decline after the Join", seed, |visitor, _, _| {
            visitor.send(&message(VERSION, kind::DECLINE, b"no"), &[])
        }),
        attach("an Attach twice", seed, |visitor, files, _| {
            send_attach(visitor, &files.all())?;
            send_attach(visitor, &files.all())
        }),
        attach(
            "an Attach, and silence in the ring",
            seed,
            |visitor, files, _| send_attach(visitor, &files.all()),
        ),
        attach(
            "an Attach, and scribbles in the segment",
            seed,
            |visitor, files, join| {
                send_attach(visitor, &files.all())?;
                let segment = std::fs::File::from(
                    join.fds
                        .into_iter()
                        .next()
                        .ok_or(io::ErrorKind::InvalidData)?,
                );
                let len = (segment.metadata()?.len() - 4096) / 2;
                let socket = UnixSocket(visitor.0.try_clone()?);
                thread::spawn(move || {
                    let ring = Ring::new(segment, socket, len as u32, false, Vec::new());
                    let mut rng = Rng::new(len);
                    while ring.wake().is_ok() {
                        let word = [word::HEAD, word::END, word::MARK, word::DOORS, word::CAPS]
                            [rng.below(5)];
                        let value = rng.next() >> rng.below(64);
                        if ring.store(word, value).is_err() {
                            break;
                        }
                        thread::sleep(Duration::from_millis(1));
                    }
                });
                Ok(())
            },
        ),
        socket(
            "a socket that is left after the Join",
            LIMIT,
            move |listener| listener.joined(&mut Rng::new(seed)).map(drop),
        ),
        socket(
            "a socket that is left after the Attach",
            LIMIT,
            move |listener| {
                let (visitor, _) = listener.joined(&mut Rng::new(seed))?;
                let files = Files::new(RING, &DOMAIN)?;
                send_attach(&visitor, &files.all()[1..])
            },
        ),
    ];
    for count in [0, 1, 3, 4, 6, 100] {
        lies.push(attach(
            format!("an Attach with {count} descriptors"),
            seed,
            move |visitor, files, _| {
                let all = files.all();
                let fds: Vec<_> = (0..count).map(|n| all[n % all.len()]).collect();
                send_attach(visitor, &fds)
            },
        ));
    }
    // Without the segment, which only a Join has.
    for which in 1..6 {
        for (name, file) in forged(which) {
            let Ok(file) = file else { continue };
            lies.push(attach(
                format!("an Attach with {name} in place {which}"),
                seed,
                move |visitor, files, _| {
                    let mut fds = files.all();
                    fds[which - 1] = file.as_fd();
                    send_attach(visitor, &fds)
                },
            ));
        }
    }
    lies
}
