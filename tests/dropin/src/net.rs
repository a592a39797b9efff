//! Ports.

use std::net::{Ipv6Addr, TcpListener};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

/// Below the ephemeral ports of the system (`net.ipv4.ip_local_port_range`): each program on `weft_ib0` listens on an ephemeral port, and would answer in the
/// place of a server that starts a moment later.
const OURS: Range<u16> = 16_384..32_768;

/// A TCP port that is not in use and that no other caller has got, in this process or another.
///
/// # Panics
/// When the host has none.
pub fn free_port() -> u16 {
    /// The names that reserve this process's ports. They end with the process.
    static GIVEN: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    // Processes that start together begin their search at different places.
    let first = std::process::id().wrapping_mul(101) as usize + given.len();
    let all = OURS.len();
    for port in OURS.cycle().skip(first % all).take(all) {
        let name = format!("weft-test-port-{port}");
        let name = SocketAddr::from_abstract_name(name).expect("a short name");
        let Ok(name) = UnixListener::bind_addr(&name) else {
            continue;
        };
        let free = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", port)));
        if free.is_ok() {
            given.push(name);
            return port;
        }
    }
    panic!("no free port");
}

/// True if a process listens on this TCP port, of any address. The check has no effect on the listener.
pub fn listening(port: u16) -> bool {
    // 0A: the state LISTEN
    sockets(["/proc/net/tcp", "/proc/net/tcp6"], port, "0A") > 0
}

/// The number of sockets that are bound to this UDP port, of any address.
pub fn hearing(port: u16) -> usize {
    // 07: the state of a socket that is not connected
    sockets(["/proc/net/udp", "/proc/net/udp6"], port, "07")
}

fn sockets(tables: [&str; 2], port: u16, state: &str) -> usize {
    let local = format!(":{port:04X}");
    let in_table = |table: &&str| {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        let there = |line: &&str| {
            let mut words = line.split_whitespace().skip(1);
            let address = words.next().unwrap_or_default();
            address.ends_with(&local) && words.nth(1) == Some(state)
        };
        text.lines().filter(there).count()
    };
    tables.iter().map(in_table).sum()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_listener_is_seen_and_a_free_port_is_free() {
        // Another program may take one in between.
        let free = (0..8)
            .map(|_| free_port())
            .find(|&port| !listening(port))
            .expect("a free port that stays free");
        let listener = TcpListener::bind(("127.0.0.1", free)).unwrap();
        assert!(listening(free));
        assert_ne!(free_port(), free);
        drop(listener);
        assert!(!listening(free));
        // The system's ephemeral ports are never among them.
        let given = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        assert!(!OURS.contains(&given.local_addr().unwrap().port()));
        assert!(OURS.contains(&free));
        // Another process would see that it is in use, although it has no listener.
        let name = SocketAddr::from_abstract_name(format!("weft-test-port-{free}")).unwrap();
        assert!(UnixListener::bind_addr(&name).is_err());
        let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(hearing(port), 1);
    }
}
