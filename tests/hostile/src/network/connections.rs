//! Floods: connections by the thousand.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::report::Report;

/// What the connections of a flood say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Say {
    Nothing,
    /// The first bytes of a request.
    Half,
}

/// So many descriptors as the system allows this process.
fn descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let _ = setrlimit(Resource::Nofile, wanted);
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20) as usize
}

/// `wanted` connections at once from several addresses of the loopback network; those that the victim ends are made anew for as long as `refill`.
/// The rest stays.
pub fn flood(victim: SocketAddr, wanted: usize, say: Say, refill: Duration, report: &mut Report) {
    let room = descriptors().saturating_sub(64);
    let wanted = wanted.min(room);
    let mut open: Vec<(TcpStream, Instant)> = Vec::with_capacity(wanted);
    let mut made = 0;
    let start = Instant::now();
    while made < wanted || start.elapsed() < refill {
        while open.len() < wanted {
            let from = Ipv4Addr::new(127, 0, 0, 2 + (made % 50) as u8);
            let Some(stream) = begin(victim, from) else {
                break;
            };
            open.push((stream, Instant::now()));
            made += 1;
            if made % 500 == 0 {
                sweep(&mut open, say);
            }
        }
        sweep(&mut open, say);
        thread::sleep(Duration::from_millis(10));
    }
    println!(
        "note {made} connections, {} of them still there when the last was made, after {:?}",
        open.len(),
        start.elapsed()
    );
    report.case(format!("{made} connections that say {say:?}"), Ok(()));
    // That the victim ends them is seen by its descriptors. (It cannot be seen from here: when the victim's queue is full, the kernel forgets
    // connections of which this end thinks that they were made.)
    report.keep(open);
}

/// A connection that is on its way.
fn begin(addr: SocketAddr, from: Ipv4Addr) -> Option<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    rustix::net::bind(&socket, &SocketAddr::new(from.into(), 0)).ok()?;
    match rustix::net::connect(&socket, &addr) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Some(TcpStream::from(socket)),
        Err(_) => None,
    }
}

/// Says what is to be said, and forgets the connections that the victim has ended.
fn sweep(open: &mut Vec<(TcpStream, Instant)>, say: Say) {
    open.retain_mut(|(stream, since)| {
        if say == Say::Half && since.elapsed() < Duration::from_millis(100) {
            let _ = stream.write(b"MPA ID ");
        }
        match stream.read(&mut [0; 64]) {
            Ok(0) => false,
            Ok(_) => true,
            // Not connected yet, or nothing to read.
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
        }
    });
}
