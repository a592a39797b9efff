//! Lies while a connection is made, and connections that are never made.
//!
//! SECURITY.md: a peer may not "keep a slot in start-up longer than the time limit (10 s)".

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::frames::{CRC, ENHANCED, MARKERS, REPLY, REQUEST, Startup, Tagged, Untagged, opcode};
use crate::network::{REACTION, SLACK, ended, is_cut, within};
use crate::peer::{Peer, request};
use crate::report::Report;
use crate::rng::Rng;
use crate::target::Target;

/// How long a start-up may take.
pub const LIMIT: Duration = Duration::from_secs(10);

type Outcome = Result<(), String>;
type Lie = Box<dyn Fn(&Target) -> Outcome + Send>;

/// All of them. Those that wait for the limit do so side by side.
pub fn run(target: &Target, seed: u64, report: &mut Report) {
    let mut waiting = Vec::new();
    for (name, lie) in half_open() {
        let target = *target;
        waiting.push(thread::spawn(move || (name, lie(&target))));
    }
    for (name, frame) in no_requests(target) {
        report.case(&name, turned_away(target, &frame));
    }
    for (name, frame) in frames(target, seed) {
        report.case(&name, answered_or_ended(target, &frame));
    }
    for (name, lie) in steps(seed) {
        report.case(&name, lie(target));
    }
    for thread in waiting {
        let (name, outcome) = thread.join().expect("an attack does not panic");
        report.case(name, outcome);
    }
}

fn connected(target: &Target) -> Result<Peer, String> {
    Peer::connect(target.addr, None).map_err(|e| format!("cannot connect: {e}"))
}

/// Sends these bytes; the victim answers or ends the connection within the limit.
fn answered_or_ended(target: &Target, bytes: &[u8]) -> Outcome {
    let mut peer = connected(target)?;
    match peer.raw(bytes).and_then(|()| peer.startup_frame()) {
        Ok(_) => Ok(()),
        Err(e) if is_cut(&e) => Ok(()),
        Err(e) => Err(format!("neither answered nor ended: {e}")),
    }
}

/// Sends these bytes, which are no request; the victim ends the connection at once, without a reply.
fn turned_away(target: &Target, bytes: &[u8]) -> Outcome {
    let mut peer = connected(target)?;
    let answer = peer
        .raw(bytes)
        .and_then(|()| peer.startup_frame_within(REACTION));
    match answer {
        Ok(reply) => Err(format!("a reply: {reply:?}")),
        Err(e) if is_cut(&e) => Ok(()),
        Err(e) => Err(format!("not ended at once: {e}")),
    }
}

/// What a victim must not take for a request.
fn no_requests(target: &Target) -> Vec<(String, Vec<u8>)> {
    let good = request(&target.hello());
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    for bit in [0_usize, 7, 64, 100, 127] {
        let mut frame = good.clone();
        frame.key[bit / 8] ^= 1 << (bit % 8);
        all.push((format!("key, bit {bit}"), frame.bytes()));
    }
    let reply = Startup::new(REPLY, &target.hello());
    all.push(("a reply for a request".into(), reply.bytes()));
    for (name, text) in [
        ("HTTP", &b"GET / HTTP/1.1\r\nHost: weft\r\n\r\n"[..]),
        (
            "TLS",
            &[
                0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
        ),
        ("zeros", &[0; 64]),
    ] {
        all.push((name.into(), text.to_vec()));
    }
    for revision in [0, 3, 127, 255] {
        let frame = Startup {
            revision,
            ..good.clone()
        };
        all.push((format!("revision {revision}"), frame.bytes()));
    }
    for len in [513, 520, 600, 0xffff] {
        let frame = Startup {
            claimed: len,
            private: vec![0; usize::from(len)],
            ..good.clone()
        };
        all.push((format!("{len} bytes of private data"), frame.bytes()));
    }
    let bare = Startup {
        claimed: 0,
        private: Vec::new(),
        ..good
    };
    all.push(("enhanced without its data".into(), bare.bytes()));
    all
}

/// Start-up frames, whole, and each with something wrong, or nearly.
fn frames(target: &Target, seed: u64) -> Vec<(String, Vec<u8>)> {
    let hello = target.hello();
    let good = request(&hello);
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    let mut rng = Rng::new(seed);
    let older = Startup {
        revision: 1,
        ..good.clone()
    };
    all.push(("revision 1".into(), older.bytes()));
    for flags in 0..=255_u8 {
        if flags.is_multiple_of(16) || flags.is_multiple_of(19) {
            let frame = Startup {
                flags,
                ..good.clone()
            };
            all.push((format!("flags {flags:#x}"), frame.bytes()));
        }
    }
    let lengths = (0..50).chain([100, 255, 256, 400]).chain(505..513);
    for len in lengths {
        for (enhanced, revision) in [(true, 2), (false, 2), (false, 1)] {
            let mut private = if len % 2 == 0 {
                good.private.clone()
            } else {
                rng.bytes(len)
            };
            private.resize(len, 0);
            let flags = CRC | if enhanced { ENHANCED } else { 0 };
            let frame = Startup {
                flags,
                revision,
                claimed: len as u16,
                private,
                ..good.clone()
            };
            let name =
                format!("{len} bytes of private data, revision {revision}, depths {enhanced}");
            all.push((name, frame.bytes()));
        }
    }
    // RFC 6581: who asks for the peer-to-peer mode (the topmost bit) sends a first frame, as which the others say. It never comes: for weft this is
    // a connection whose peer is silent, which it may be.
    for (ird, ord) in [
        (0, 0),
        (!0, !0),
        (0x3fff, 0x3fff),
        (0xc000, 0xc000),
        (0x8000, 0),
        (0x8004, 0x4004),
        (0x8004, 0x8004),
        (0xc004, 4),
        (0xffff, 0),
    ] {
        let frame = Startup::with_depths(REQUEST, ird, ord, &hello);
        all.push((format!("depths {ird:#x}, {ord:#x}"), frame.bytes()));
    }
    let twice = [good.bytes(), good.bytes()].concat();
    all.push(("a request twice".into(), twice));
    let early = [good.bytes(), crate::frames::fpdu(&[0xee; 40])].concat();
    all.push(("a request and a frame of nonsense behind it".into(), early));
    let more = Startup {
        claimed: 4,
        ..good.clone()
    };
    all.push(("less private data claimed than sent".into(), more.bytes()));
    // The program's own greeting, with each of its bytes changed.
    for at in 0..hello.len() {
        for value in [0, 0xff, hello[at] ^ 1] {
            let mut changed = hello.clone();
            changed[at] = value;
            all.push((
                format!("greeting, byte {at} is {value:#x}"),
                request(&changed).bytes(),
            ));
        }
    }
    all
}

/// Says this much, then nothing.
fn silent_after(bytes: Vec<u8>) -> Lie {
    Box::new(move |target| {
        let mut peer = connected(target)?;
        peer.raw(&bytes).map_err(|e| e.to_string())?;
        within(&mut peer, LIMIT)
    })
}

/// Connections that stay half open: the victim ends them within the limit.
fn half_open() -> Vec<(String, Lie)> {
    let good = request(&[0; 64]).bytes();
    let mut all: Vec<(String, Lie)> = Vec::new();
    for len in [0, 1, 15, 16, 17, 19, 20, 23, 24, 83] {
        all.push((
            format!("silent after {len} bytes"),
            silent_after(good[..len].to_vec()),
        ));
    }
    let huge = Startup {
        claimed: 0xffff,
        private: vec![0; 8],
        ..request(&[])
    };
    all.push((
        "silent in 65,535 bytes of private data".into(),
        silent_after(huge.bytes()),
    ));
    for (name, step) in [("one byte a second", 1000), ("five bytes a second", 200)] {
        let good = good.clone();
        all.push((
            name.into(),
            Box::new(move |target| {
                let mut peer = connected(target)?;
                let start = Instant::now();
                for byte in &good {
                    if peer.raw(&[*byte]).is_err() {
                        return Ok(());
                    }
                    if start.elapsed() > LIMIT + SLACK {
                        return Err(format!("taken byte by byte for {:?}", start.elapsed()));
                    }
                    thread::sleep(Duration::from_millis(step));
                }
                within(&mut peer, LIMIT)
            }),
        ));
    }
    all
}

/// What is done at a step of the start-up.
#[derive(Clone, Copy, Debug)]
enum Leave {
    Reset,
    Close,
    HalfClose,
}

/// Leaving at each step, in each way; and ready-to-receive frames that are not those promised.
fn steps(seed: u64) -> Vec<(String, Lie)> {
    let mut all: Vec<(String, Lie)> = Vec::new();
    for leave in [Leave::Reset, Leave::Close, Leave::HalfClose] {
        for len in [0_usize, 1, 16, 20, 24, usize::MAX] {
            let name = format!("{leave:?} after {len} bytes of the request");
            all.push((
                name,
                Box::new(move |target| {
                    let mut peer = connected(target)?;
                    let frame = request(&target.hello()).bytes();
                    peer.raw(&frame[..len.min(frame.len())])
                        .map_err(|e| e.to_string())?;
                    left(peer, leave)
                }),
            ));
        }
        for step in 0..3 {
            let name = format!("{leave:?} {step} frames after the reply");
            all.push((
                name,
                Box::new(move |target| {
                    let mut session = target.join().map_err(|e| e.to_string())?;
                    let write = Tagged::write(session.open.stag, session.open.addr, &[1; 8]);
                    for _ in 0..step {
                        session.peer.tagged(&write).map_err(|e| e.to_string())?;
                    }
                    left(session.peer, leave)
                }),
            ));
        }
    }
    for round in 0..12_u64 {
        all.push((
            format!("ready to receive, not as promised, {round}"),
            Box::new(move |target| {
                let mut rng = Rng::new(seed ^ round);
                let mut peer = connected(target)?;
                let ird = 0x8000 | (rng.next() as u16 & 0x4000) | 4;
                let ord = (rng.next() as u16 & 0xc000) | 4;
                let frame = Startup::with_depths(REQUEST, ird, ord, &target.hello());
                let began = peer.start(&frame).and_then(|_| match round % 4 {
                    0 => peer.tagged(&Tagged::write(5, 0, &[1; 8])),
                    1 => peer.message(opcode::READ_REQUEST, 1, &[0; 12]),
                    2 => peer.untagged(&Untagged::new(opcode::SEND, 0, 9, b"E")),
                    _ => peer.fpdu(&[0xff; 100]),
                });
                match began {
                    Ok(()) => ended(peer.ending(LIMIT + SLACK)),
                    Err(e) if is_cut(&e) => Ok(()),
                    Err(e) => Err(e.to_string()),
                }
            }),
        ));
    }
    let markers = Startup {
        flags: CRC | ENHANCED | MARKERS,
        ..request(&[])
    };
    all.push((
        "frames without the markers that were agreed on".into(),
        Box::new(move |target| {
            let mut peer = connected(target)?;
            let frame = Startup {
                private: request(&target.hello()).private,
                claimed: request(&target.hello()).claimed,
                ..markers.clone()
            };
            let began = peer.start(&frame).and_then(|_| {
                for _ in 0..200 {
                    peer.send(&[b'?'; 60])?;
                }
                Ok(())
            });
            match began {
                Ok(()) => ended(peer.ending(LIMIT + SLACK)),
                Err(e) if is_cut(&e) => Ok(()),
                Err(e) => Err(e.to_string()),
            }
        }),
    ));
    all
}

fn left(mut peer: Peer, leave: Leave) -> Outcome {
    match leave {
        Leave::Reset => {
            peer.reset();
            Ok(())
        }
        Leave::Close => Ok(()),
        Leave::HalfClose => {
            peer.half_close();
            match peer.ending(LIMIT + SLACK) {
                ending if ended(ending).is_ok() => Ok(()),
                ending => Err(format!(
                    "a half-closed connection is still there: {ending:?}"
                )),
            }
        }
    }
}

/// Whether somebody who behaves gets an answer: for attackers that want to know.
pub fn honest(target: &Target) -> io::Result<Duration> {
    let start = Instant::now();
    let mut peer = Peer::connect(target.addr, None)?;
    peer.start(&request(&target.hello()))?;
    Ok(start.elapsed())
}
