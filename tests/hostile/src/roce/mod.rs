//! A hostile peer of RoCE v2: UDP datagrams to port 4791, from the headers and the CRC to the connection manager's messages made here from the
//! InfiniBand Architecture Specification (volume 1, release 1.4, and its annexes A11 and A17).

pub mod forger;
pub mod packet;
pub mod peer;
pub mod session;
pub mod strangers;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::report::Report;

/// The UDP port.
pub const PORT: u16 = 4791;

/// A loopback address for this process: each address has the port once.
pub fn own_address(of: u8) -> Ipv4Addr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, of, high, low)
}

/// What came of an attack; `None`: the words mean nothing.
pub fn attack(attack: &str, addr: SocketAddr, rest: &[String]) -> Option<Report> {
    let IpAddr::V4(ip) = addr.ip() else {
        return None;
    };
    let target = session::Target {
        ip,
        service: addr.port(),
    };
    let number = |at: usize, or: u64| rest.get(at).map_or(Some(or), |word| word.parse().ok());
    let (seed, rounds) = (number(0, 1)?, number(1, 40)? as usize);
    let mut report = Report::default();
    match attack {
        "peer" => peer::run(target, seed, rounds, &mut report),
        "forger" => forger::run(target, seed, rounds, &mut report),
        "strangers" => strangers::run(target, seed, rounds, &mut report),
        _ => return None,
    }
    Some(report)
}
