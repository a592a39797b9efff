//! `weft mpi --there`: a host's side of the check of [`super::hosts`].
//!
//! It says the address that ranks will have here, with a port on which it listens by TCP and UDP. Then it reads a token and the addresses of the other hosts, sends
//! to each, and says which it did not reach. It answers others until its input ends. Datagrams are answered only if they are the token.

use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use weft_cli::failure::Failure;
use weft_cli::start::{EXIT_OWN, fail};
use weft_verbs::settings::mpi_address;

/// What each line of ours begins with; other lines are of the user's shell.
pub(super) const MARK: &str = "weft-mpi-there ";
/// What a line about a peer that is not reached begins with, before the protocol.
pub(super) const FAILS: &str = "no-";
/// How long it tries to reach the others.
pub(super) const TIME: Duration = Duration::from_secs(5);
/// How long it runs at most.
const LIFE: Duration = Duration::from_mins(3);
/// The most bytes of its input: a thousand hosts.
const MOST: u64 = 64 << 10;
/// A datagram that is lost by chance is sent again after this time.
const AGAIN: Duration = Duration::from_millis(100);

/// Runs the check; `theirs` is the version of the job's weft.
pub(super) fn run(
    theirs: &str,
    libraries: impl FnOnce() -> Result<(), Failure>,
) -> Result<ExitCode, Failure> {
    let ours = env!("CARGO_PKG_VERSION");
    if theirs != ours {
        let what =
            format!("its weft is version {ours}, and the job is started by version {theirs}");
        let failure = Failure::refused(what).hint("install the same version on all hosts");
        return Ok(fail(EXIT_OWN, &failure));
    }
    if let Err(failure) = libraries() {
        return Ok(fail(EXIT_OWN, &failure));
    }
    let ip = match mpi_address() {
        Ok(ip) => ip,
        Err(wrong) => return Ok(fail(EXIT_OWN, &wrong.into())),
    };
    let (listener, socket) = listen(ip)?;
    thread::spawn(|| {
        thread::sleep(LIFE);
        std::process::exit(i32::from(EXIT_OWN));
    });
    let own = listener.local_addr().map_err(failed)?;
    say(&own.to_string())?;
    let mut input = io::stdin().lock().take(MOST);
    let mut lines = input
        .by_ref()
        .lines()
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty());
    // Alone, it is told nothing.
    if let Some(token) = lines.next() {
        let peers: Vec<SocketAddr> = lines.filter_map(|line| line.parse().ok()).collect();
        let answer = token.clone();
        thread::spawn(move || answers(&socket, answer.as_bytes()));
        let probes = peers.iter().map(|&peer| {
            let token = token.clone();
            (
                peer,
                thread::spawn(move || probe(own.ip(), peer, token.as_bytes())),
            )
        });
        for (peer, probe) in probes.collect::<Vec<_>>() {
            for protocol in probe.join().unwrap_or_default() {
                say(&format!("{FAILS}{protocol} {peer}"))?;
            }
        }
        say("done")?;
        // Others may not have tried yet.
        let _ = io::copy(&mut input, &mut io::sink());
    }
    drop(listener);
    Ok(ExitCode::SUCCESS)
}

fn failed(e: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("cannot look at the network: {e}"))
}

fn say(words: &str) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    writeln!(output, "{MARK}{words}")
        .and_then(|()| output.flush())
        .map_err(failed)
}

/// One port of both protocols. The kernel completes TCP's connections by itself.
fn listen(ip: IpAddr) -> Result<(TcpListener, UdpSocket), Failure> {
    let both = || {
        let listener = TcpListener::bind((ip, 0))?;
        let socket = UdpSocket::bind(listener.local_addr()?)?;
        Ok((listener, socket))
    };
    let mut last = both();
    for _ in 0..16 {
        if !last
            .as_ref()
            .is_err_and(|e: &io::Error| e.kind() == io::ErrorKind::AddrInUse)
        {
            break;
        }
        last = both();
    }
    last.map_err(|e| {
        Failure::failed(format!("cannot listen on {ip}: {e}"))
            .hint("WEFT_FI_ADDR is an address of this host, or a network in which it has one")
    })
}

/// Sends the token back to those who know it.
fn answers(socket: &UdpSocket, token: &[u8]) {
    let mut data = [0; 256];
    loop {
        if let Ok((len, from)) = socket.recv_from(&mut data)
            && data[..len] == *token
        {
            let _ = socket.send_to(token, from);
        }
    }
}

/// The protocols by which a peer is not reached.
fn probe(own: IpAddr, peer: SocketAddr, token: &[u8]) -> Vec<&'static str> {
    let tcp = TcpStream::connect_timeout(&peer, TIME).is_ok();
    let udp = by_udp(own, peer, token).unwrap_or(false);
    let all = [(tcp, "tcp"), (udp, "udp")].into_iter();
    all.filter(|(reached, _)| !reached)
        .map(|(_, name)| name)
        .collect()
}

fn by_udp(own: IpAddr, peer: SocketAddr, token: &[u8]) -> io::Result<bool> {
    let socket = UdpSocket::bind((own, 0))?;
    socket.connect(peer)?;
    socket.set_read_timeout(Some(AGAIN))?;
    let until = Instant::now() + TIME;
    let mut data = [0; 256];
    while Instant::now() < until {
        // A refusal that comes back by ICMP is an error of the next call.
        let sent = socket.send(token);
        let sent = sent.and_then(|_| socket.recv(&mut data));
        match sent {
            Ok(len) if data[..len] == *token => return Ok(true),
            // The peer may begin to answer a moment later.
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => thread::sleep(AGAIN),
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_is_answered_and_silence_is_told() {
        let ip = IpAddr::from([127, 0, 0, 1]);
        let (listener, socket) = listen(ip).unwrap();
        let at = socket.local_addr().unwrap();
        assert_eq!(listener.local_addr().unwrap(), at);
        thread::spawn(move || answers(&socket, b"right"));
        assert!(probe(ip, at, b"right").is_empty());
        assert_eq!(probe(ip, at, b"wrong"), ["udp"]);
        drop(listener);
        assert_eq!(probe(ip, at, b"right"), ["tcp"]);
    }
}
