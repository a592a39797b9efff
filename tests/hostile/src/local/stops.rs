//! A peer that stops, or ends, at some step of a meeting or of a transfer.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use crate::frames::{Startup, opcode};
use crate::meeting::{DOMAIN, Meeting, RING};
use crate::peer::{PATIENCE, request};
use crate::rng::Rng;
use crate::shared::files::Files;
use crate::shared::ring::{Ring, word};
use crate::target::{Kind, Session, Target};

pub const STEPS: [&str; 12] = [
    "connected",
    "at-the-door",
    "hello",
    "welcomed",
    "joined",
    "requested",
    "moved",
    "half-a-frame",
    "marked",
    "marked-advert",
    "sent-to",
    "full",
];

/// Goes as far as `step`, and says so.
pub fn reach(target: &Target, step: &str) -> io::Result<Option<(Session, Files)>> {
    let mut rng = Rng::new(u64::from(std::process::id()));
    let at = |s: &str| step == s;
    let mut meeting = if at("connected") {
        let peer = crate::peer::Peer::connect(target.addr, None)?;
        tell(step, peer.tcp.local_addr()?);
        let _ = kill_self(&peer);
        return Ok(None);
    } else {
        Meeting::begin(*target, &mut rng)?
    };
    let from = meeting.peer.tcp.local_addr()?;
    let mut files = Files::new(RING, &DOMAIN)?;
    let steps: [(&str, Step<'_>); 5] = [
        ("at-the-door", &mut |_, _| Ok(())),
        ("hello", &mut |m, _| m.hello()),
        ("welcomed", &mut |m, _| m.welcome()),
        ("joined", &mut |m, f| m.join(&f.all(), true)),
        ("requested", &mut |m, _| {
            let request: Startup = request(&m.target.hello());
            m.peer.raw(&request.bytes())
        }),
    ];
    for (name, act) in steps {
        act(&mut meeting, &mut files)?;
        if at(name) {
            tell(step, from);
            let _ = kill_self(&meeting);
            return Ok(None);
        }
    }
    let reply = meeting.peer.startup_frame()?;
    let met = meeting.attach(&mut files, &reply)?;
    if let Some(reason) = met.stayed {
        return Err(io::Error::other(format!("stayed on TCP: {reason}")));
    }
    let mut session = met.session;
    match step {
        "half-a-frame" => ring(&mut session).bytes(&100_u32.to_le_bytes())?,
        "marked" => {
            let stag = session.open.stag;
            // Of the verbs victim, the region that it takes away alone.
            let stag = session.told.get(1).map_or(stag, |whole| whole.stag);
            ring(&mut session).store(word::MARK, u64::from(stag))?;
        }
        "marked-advert" => {
            let stag = advert(target.kind, &mut session)?;
            ring(&mut session).store(word::MARK, u64::from(stag))?;
        }
        "sent-to" => provoke(target.kind, &mut session)?,
        "full" => {
            for _ in 0..2000 {
                if provoke(target.kind, &mut session).is_err() {
                    break;
                }
            }
        }
        _ => {}
    }
    tell(step, from);
    let _ = kill_self(&session);
    Ok(Some((session, files)))
}

type Step<'a> = &'a mut dyn FnMut(&mut Meeting, &mut Files) -> io::Result<()>;

fn ring(session: &mut Session) -> &mut Ring {
    session.peer.ring.as_mut().expect("it has moved")
}

fn tell(step: &str, from: SocketAddr) {
    println!("at {step} {}", from.port());
}

/// The STag of memory of the program's that the victim opens for a while, where it does: of a receive of EXS, of a mapping of rsockets.
fn advert(kind: Kind, session: &mut Session) -> io::Result<u32> {
    if !matches!(kind, Kind::Exs | Kind::Packets | Kind::Rsockets) {
        return Ok(session.open.stag);
    }
    // A responder says nothing before its peer has.
    provoke(kind, session)?;
    loop {
        let came = session.peer.segment(PATIENCE)?;
        let at = match (kind, came.payload.len(), came.payload.first()) {
            (Kind::Exs, 40, Some(1)) => 32,
            (Kind::Packets, 32, Some(9)) => 24,
            (Kind::Rsockets, 24, _) if came.tagged.is_some() => 16,
            _ => continue,
        };
        let stag = came.payload[at..at + 4].try_into().expect("four");
        return Ok(match kind {
            // In the byte order of this host.
            Kind::Rsockets => u32::from_le_bytes(stag),
            _ => u32::from_be_bytes(stag),
        });
    }
}

/// Something that makes the victim send, which we do not take.
fn provoke(kind: Kind, session: &mut Session) -> io::Result<()> {
    let peer = &mut session.peer;
    match kind {
        Kind::Verbs => {
            // A Write of a page, to an STag that is in no table: through the ring.
            let mut order = vec![b'W'];
            order.extend(0x0077_0001_u32.to_be_bytes());
            order.extend(0_u64.to_be_bytes());
            order.extend(4096_u32.to_be_bytes());
            peer.send(&order)
        }
        Kind::Exs | Kind::Packets => {
            let mut small = vec![3, 0, 0, 0, 0, 0, 0, 200];
            small.extend([0xee; 200]);
            peer.send(&small)
        }
        Kind::Rsockets => {
            // 8 KiB of the receive buffer, of which the echo goes to ours.
            peer.message(opcode::SEND, 0, &8192_u32.to_le_bytes())
        }
    }
}

/// How this process ends or stops. What it holds, it goes on holding while it is stopped.
fn kill_self<T>(_held: &T) -> io::Result<()> {
    let signal = match std::env::var("HOSTILE_SIGNAL").as_deref() {
        Ok("kill") => Signal::KILL,
        _ => Signal::STOP,
    };
    kill_process(getpid(), signal)?;
    // Somebody has let it go on.
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}
