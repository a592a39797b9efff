//! Another user of the same host: run this as one.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::meeting::{DOMAIN, Meeting, RING};
use crate::network::{SLACK, is_cut};
use crate::peer::request;
use crate::report::Report;
use crate::rng::Rng;
use crate::shared::files::Files;
use crate::shared::unix_socket::{UnixSocket, kind};
use crate::target::Target;

type Outcome = Result<(), String>;

/// What it gets from this victim, whose process has this number.
pub fn run(target: &Target, process: u32, report: &mut Report) {
    let mut rng = Rng::new(u64::from(process));
    report.case("silent at the door", shown_out(target));
    report.case("a Hello", declined(target, &mut rng, false));
    report.case("a Hello and a Join", declined(target, &mut rng, true));
    report.case("somebody else's Hello", in_the_place_of(target, &mut rng));
    report.case("weft stat", asks(process));
    // As a peer on the network it is as good as any.
    let joined = Target {
        shared: false,
        ..*target
    }
    .join();
    report.case("by TCP", joined.map(drop).map_err(|e| e.to_string()));
    for n in 0..300 {
        if let Ok(socket) = UnixSocket::knock(target.addr) {
            report.keep(socket);
        } else if n < 8 {
            report.case("many at the door", Err("cannot even knock".into()));
        }
    }
}

/// Without a word it is shown out, and told nothing but that.
fn shown_out(target: &Target) -> Outcome {
    let socket = UnixSocket::knock(target.addr).map_err(|e| e.to_string())?;
    nothing_more(&socket)
}

/// Nothing comes but a Decline without descriptors, then the end.
fn nothing_more(socket: &UnixSocket) -> Outcome {
    let deadline = Instant::now() + Duration::from_millis(500) + SLACK;
    loop {
        match socket.packet(deadline.saturating_duration_since(Instant::now())) {
            Ok(None) => return Ok(()),
            Ok(Some((bytes, fds))) => {
                let decline = bytes.get(6..8) == Some(&kind::DECLINE.to_le_bytes());
                if !decline || !fds.is_empty() {
                    return Err(format!("got {bytes:02x?} and {} descriptors", fds.len()));
                }
            }
            Err(e) if is_cut(&e) => return Ok(()),
            Err(e) => return Err(format!("not shown out: {e}")),
        }
    }
}

/// A meeting goes no further than the Hello, and the connection stays where it is.
fn declined(target: &Target, rng: &mut Rng, join: bool) -> Outcome {
    let text = |e: std::io::Error| e.to_string();
    let mut meeting = Meeting::begin(*target, rng).map_err(text)?;
    let _ = meeting.hello();
    if join {
        let files = Files::new(RING, &DOMAIN).map_err(text)?;
        let _ = meeting.join(&files.all(), true);
    }
    nothing_more(&meeting.socket)?;
    let reply = meeting
        .peer
        .start(&request(&target.hello()))
        .map_err(text)?;
    target.joined(meeting.peer, &reply).map(drop).map_err(text)
}

/// A Hello that names somebody else's connections: all that there are with the victim.
fn in_the_place_of(target: &Target, rng: &mut Rng) -> Outcome {
    let table = std::fs::read_to_string("/proc/net/tcp").map_err(|e| e.to_string())?;
    let port = target.addr.port();
    for line in table.lines().skip(1).take(200) {
        let mut words = line.split_whitespace().skip(1);
        let (Some(local), Some(remote)) = (words.next(), words.next()) else {
            continue;
        };
        let number = |text: &str| u16::from_str_radix(text.rsplit(':').next().unwrap_or(""), 16);
        if number(remote) != Ok(port) {
            continue;
        }
        let Ok(theirs) = number(local) else { continue };
        let meeting = Meeting::begin(*target, rng).map_err(|e| e.to_string())?;
        let mut from = target.addr;
        from.set_port(theirs);
        let hello = meeting.cell.hello(from);
        let message = crate::shared::unix_socket::message(
            crate::shared::unix_socket::VERSION,
            kind::HELLO,
            &hello,
        );
        let _ = meeting.socket.send(&message, &[]);
        nothing_more(&meeting.socket)?;
    }
    Ok(())
}

/// The victim's counters are not for strangers.
fn asks(process: u32) -> Outcome {
    let names = std::fs::read_to_string("/proc/net/unix").map_err(|e| e.to_string())?;
    let mut asked = 0;
    for line in names.lines() {
        let Some(name) = line.split('@').nth(1) else {
            continue;
        };
        if !name.starts_with(&format!("weft-stat/1/{process}/")) {
            continue;
        }
        asked += 1;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(|e| e.to_string())?;
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| e.to_string())?;
        rustix::net::connect(&socket, &name).map_err(|e| e.to_string())?;
        match UnixSocket(socket).packet(SLACK) {
            Ok(None) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
            other => return Err(format!("{other:?}")),
        }
    }
    if asked == 0 {
        return Err("nobody to ask".into());
    }
    Ok(())
}
