//! The connections of this host's weft processes, as `weft stat` shows them (docs/spec/stat.md).
//!
//! Each device has a server for it: an abstract Unix socket that its engine answers. A client that connects as the same user or as root gets one
//! packet for each connection. Without clients it costs a socket. With `WEFT_STAT=off` in the environment a process opens none.

mod ask;
mod server;

use std::fmt::{self, Write};
use std::time::Duration;

use crate::types::{ConnCounters, QpState};

pub use crate::report::Connection;
pub use ask::survey;
pub(crate) use server::serve_stat;

/// The prefix of the names of all these sockets, with the version of their protocol.
const NAME: &str = "weft-stat/1/";
/// The longest packet, in bytes.
const MAX_PACKET: usize = 2048;
/// The longest reason, in bytes; longer ones are cut.
const MAX_REASON: usize = 1024;
/// The packet before the connections: `device <number>`.
const DEVICE: &str = "device ";
/// The packet after them.
const END: &str = "end";

/// A device and its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStat {
    /// The process, as our process numbers it; `None` when it is out of our sight (in another PID namespace).
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// The device's number among those of its process.
    pub device: u32,
    /// Its connections.
    pub connections: Vec<Connection>,
}

/// Everything that [`survey`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Devices that answered, by process.
    pub devices: Vec<DeviceStat>,
    /// Processes that have a device, and did not answer: stopped, ending, or children of one that ended.
    pub silent: Vec<Option<u32>>,
    /// Devices of other users, which do not answer us.
    pub foreign: usize,
}

const fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Init => "init",
        QpState::Rts => "rts",
        QpState::Closing => "closing",
        QpState::Error => "error",
    }
}

/// Appends text from another process, without control characters and separators.
fn plain(text: &str, out: &mut String) {
    let end = text.floor_char_boundary(MAX_REASON);
    let chars = text[..end].chars();
    out.extend(chars.map(|c| if c.is_control() { ' ' } else { c }));
}

/// The counters, in the order in which they are written.
fn by_name(counters: &mut ConnCounters) -> [(&'static str, &mut u64); 10] {
    [
        ("tx_direct", &mut counters.tx_direct),
        ("tx_copied", &mut counters.tx_copied),
        ("rx_direct", &mut counters.rx_direct),
        ("rx_copied", &mut counters.rx_copied),
        ("tx_fpdus", &mut counters.tx_fpdus),
        ("rx_fpdus", &mut counters.rx_fpdus),
        ("tx_syscalls", &mut counters.tx_syscalls),
        ("rx_syscalls", &mut counters.rx_syscalls),
        ("one_sided", &mut counters.one_sided),
        ("one_sided_bytes", &mut counters.one_sided_bytes),
    ]
}

/// The packet: `key=value` pairs with a space between them, the reason last, to the end.
impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "qp={} state={} local={} peer={} transport={} age_ms={}",
            self.qp,
            state_name(self.state),
            self.local,
            self.peer,
            self.transport,
            self.age.as_millis()
        )?;
        if let Some(cipher) = &self.cipher {
            write!(f, " cipher={cipher}")?;
        }
        let mut counters = self.counters;
        for (name, value) in by_name(&mut counters) {
            write!(f, " {name}={value}")?;
        }
        if let Some(reason) = &self.reason {
            let mut text = String::new();
            plain(reason, &mut text);
            write!(f, " reason={text}")?;
        }
        Ok(())
    }
}

impl Connection {
    /// Unknown keys are for later versions; `None` when one that matters is missing or makes no sense.
    fn parse(packet: &str) -> Option<Self> {
        let (pairs, reason) = match packet.split_once(" reason=") {
            Some((pairs, reason)) => (pairs, Some(reason)),
            None => (packet, None),
        };
        let (mut qp, mut state, mut local, mut peer, mut age) = (None, None, None, None, None);
        let (mut transport, mut cipher) = (String::new(), String::new());
        let mut counters = ConnCounters::default();
        for pair in pairs.split(' ') {
            let (key, value) = pair.split_once('=')?;
            match key {
                "qp" => qp = value.parse().ok(),
                "state" => {
                    state = (0..4)
                        .map(QpState::from_u8)
                        .find(|state| state_name(*state) == value);
                }
                "local" => local = value.parse().ok(),
                "peer" => peer = value.parse().ok(),
                "transport" => plain(value, &mut transport),
                "cipher" if value.is_empty() => return None,
                "cipher" => plain(value, &mut cipher),
                "age_ms" => age = value.parse().ok().map(Duration::from_millis),
                _ => {
                    let known = by_name(&mut counters)
                        .into_iter()
                        .find(|(name, _)| *name == key);
                    if let Some((_, counter)) = known {
                        *counter = value.parse().ok()?;
                    }
                }
            }
        }
        Some(Connection {
            qp: qp?,
            state: state?,
            local: local?,
            peer: peer?,
            transport: Some(transport).filter(|name| !name.is_empty())?,
            cipher: Some(cipher).filter(|name| !name.is_empty()),
            reason: reason.map(|reason| {
                let mut text = String::new();
                plain(reason, &mut text);
                text
            }),
            age: age?,
            counters,
        })
    }
}

/// The name of a socket of this process.
fn desk_name(random: u32) -> String {
    let mut name = NAME.to_owned();
    // Writing to a string cannot fail.
    let _ = write!(name, "{}/{random:08x}", std::process::id());
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(reason: Option<&str>) -> Connection {
        let mut counters = ConnCounters::default();
        for (n, (_, counter)) in by_name(&mut counters).into_iter().enumerate() {
            *counter = u64::MAX - n as u64;
        }
        Connection {
            qp: u32::MAX,
            state: QpState::Closing,
            local: "[fe80::1%4294967295]:65535".parse().unwrap(),
            peer: "127.0.0.1:1".parse().unwrap(),
            transport: "tls".into(),
            cipher: reason.map(|_| "ChaCha20-Poly1305".into()),
            reason: reason.map(str::to_owned),
            age: Duration::from_millis(u64::MAX),
            counters,
        }
    }

    #[test]
    fn a_packet_says_all_and_has_room() {
        for reason in [
            None,
            Some("the peer runs as another user"),
            Some("a reason=of b=c"),
        ] {
            let there = connection(reason);
            assert_eq!(Connection::parse(&there.to_string()), Some(there));
        }
        let long = connection(Some(&"ü\u{1b}\n".repeat(4000)));
        let packet = long.to_string();
        assert!(packet.len() <= MAX_PACKET, "{}", packet.len());
        let back = Connection::parse(&packet).unwrap().reason.unwrap();
        assert!(back.chars().all(|c| c == 'ü' || c == ' '), "{back}");
    }

    #[test]
    fn nonsense_is_refused_and_news_is_overlooked() {
        let good = connection(Some("why")).to_string();
        let (pairs, _) = good.split_once(" reason=").unwrap();
        for (at, pair) in pairs.split(' ').enumerate() {
            let without: Vec<_> = pairs.split(' ').filter(|other| *other != pair).collect();
            let parsed = Connection::parse(&without.join(" "));
            assert_eq!(parsed.is_some(), at >= 6, "without {pair}");
            let bad = pairs.replace(pair, &format!("{}=", pair.split_once('=').unwrap().0));
            assert_eq!(Connection::parse(&bad), None, "{pair}");
        }
        assert!(Connection::parse(&format!("{pairs} later=1,2 {}", "reason=x")).is_some());
        for bad in ["", "end", "device 3", "qp", "="] {
            assert_eq!(Connection::parse(bad), None, "{bad:?}");
        }
    }
}
