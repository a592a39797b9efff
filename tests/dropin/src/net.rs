//! Ports.

use std::collections::HashSet;
use std::net::{Ipv6Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

/// A TCP port that nobody uses, and that no other caller in this process was given.
///
/// # Panics
/// When the host has none.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let given = given.get_or_insert_with(HashSet::new);
    loop {
        let probe = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind("0.0.0.0:0"))
            .expect("a free port");
        let port = probe.local_addr().expect("an address").port();
        if given.insert(port) {
            return port;
        }
    }
}

/// Whether a process listens on this TCP port, of any address. Asking disturbs nobody.
pub fn listening(port: u16) -> bool {
    // 0A: the state LISTEN
    sockets(["/proc/net/tcp", "/proc/net/tcp6"], port, "0A") > 0
}

/// How many sockets have bound this UDP port, of any address.
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
        let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(hearing(port), 1);
    }
}
