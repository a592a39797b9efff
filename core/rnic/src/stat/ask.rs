//! The client.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use weft_sys::unix::{self, Cred, Name};
use weft_sys::{Interest, poll_fds, process};

use super::{Connection, DEVICE, DeviceStat, END, MAX_PACKET, NAME, Survey};

/// More connections than a device can have: what says more is no device.
const MAX_CONNECTIONS: usize = 1 << 17;
/// The minimum time for each process, even if others before it have used up all the time.
const LEAST: Duration = Duration::from_millis(100);

/// Ask all weft processes of this host (of our network namespace, to be exact) for their connections: those of our own
/// user, or all for root. Takes about `patience` when one of them does not answer.
///
/// # Errors
/// Those of reading `/proc/net/unix`.
pub fn survey(patience: Duration) -> io::Result<Survey> {
    let mut found = Survey::default();
    let deadline = Instant::now() + patience;
    let mut asked = Vec::new();
    // All of them at once: while we listen to one, the others can speak.
    for name in names(&std::fs::read_to_string("/proc/net/unix")?) {
        let asking = unix::connect(Name::Abstract(name.as_bytes()))
            // The name only says where to connect. The kernel attests the user.
            .and_then(|wire| Ok((unix::peer_cred(&wire)?, wire)));
        match asking {
            Ok((cred, _)) if !may_ask(cred) => found.foreign += 1,
            Ok(asking) => asked.push(asking),
            // Its backlog is full: it has stopped to listen.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                found
                    .silent
                    .push(name.split('/').nth(2).and_then(|pid| pid.parse().ok()));
            }
            // Closed meanwhile.
            Err(_) => {}
        }
    }
    for (cred, wire) in asked {
        let deadline = deadline.max(Instant::now() + LEAST);
        match listen(&wire, cred, deadline) {
            Some(device) => found.devices.push(device),
            None => found.silent.push(cred.pid),
        }
    }
    found
        .devices
        .sort_by_key(|device| (device.pid, device.device));
    found.silent.sort_unstable();
    found.silent.dedup();
    Ok(found)
}

fn may_ask(process: Cred) -> bool {
    process::uid() == 0 || process.is_same_user()
}

/// The names of all processes in a table of Unix sockets: `Num RefCount Protocol Flags Type St Inode Path`.
fn names(table: &str) -> BTreeSet<&str> {
    /// `__SO_ACCEPTCON`: it listens. Accepted connections have its name too.
    const LISTENS: u32 = 1 << 16;
    let listening = |line: &&str| {
        let flags = line.split_ascii_whitespace().nth(3);
        flags.is_some_and(|f| u32::from_str_radix(f, 16).is_ok_and(|f| f & LISTENS != 0))
    };
    table
        .lines()
        .filter(listening)
        .filter_map(|line| line.split_ascii_whitespace().nth(7)?.strip_prefix('@'))
        .filter(|name| name.starts_with(NAME))
        .collect()
}

/// Everything that a process says; `None` when it does not come to the end.
fn listen(wire: &OwnedFd, cred: Cred, deadline: Instant) -> Option<DeviceStat> {
    let mut buf = [0; MAX_PACKET];
    let device = packet(wire, &mut buf, deadline)?;
    let mut device = DeviceStat {
        pid: cred.pid,
        uid: cred.uid,
        device: device.strip_prefix(DEVICE)?.parse().ok()?,
        connections: Vec::new(),
    };
    loop {
        let text = packet(wire, &mut buf, deadline)?;
        if text == END {
            return Some(device);
        }
        if device.connections.len() == MAX_CONNECTIONS {
            return None;
        }
        device.connections.push(Connection::parse(text)?);
    }
}

fn packet<'a>(wire: &OwnedFd, buf: &'a mut [u8], deadline: Instant) -> Option<&'a str> {
    loop {
        match unix::recv_with_fds(wire, buf, 0) {
            Ok(got) => return std::str::from_utf8(&buf[..got?.0]).ok(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = deadline.checked_duration_since(Instant::now())?;
                // In either case the next attempt shows the result.
                let _ = poll_fds(&[(wire.as_fd(), Interest::READ)], Some(left));
            }
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_desks_are_asked() {
        let table = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0005 01 15937 @weft-stat/1/77/0badcafe
0000000000000000: 00000003 00000000 00000000 0005 03 15938 @weft-stat/1/77/0badcafe
0000000000000000: 00000002 00000000 00010000 0001 01 15939 /run/weft-stat/1/78/0
0000000000000000: 00000002 00000000 00010000 0001 01 15940 @weft-stat/2/79/0
0000000000000000: 00000002 00000000 00010000 0001 01 15941
nonsense
";
        assert_eq!(Vec::from_iter(names(table)), ["weft-stat/1/77/0badcafe"]);
    }
}
