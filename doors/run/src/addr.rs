//! Addresses in messages: IPv6 (IPv4 as mapped), then the port, big-endian.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Bytes of an address.
pub const ADDR: usize = 18;

/// Writes an address.
pub fn put_addr(addr: SocketAddr) -> [u8; ADDR] {
    let ip = match addr.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut bytes = [0; ADDR];
    bytes[..16].copy_from_slice(&ip.octets());
    bytes[16..].copy_from_slice(&addr.port().to_be_bytes());
    bytes
}

/// Reads an address.
pub fn get_addr(bytes: &[u8; ADDR]) -> SocketAddr {
    let ip: [u8; 16] = std::array::from_fn(|i| bytes[i]);
    let port = u16::from_be_bytes([bytes[16], bytes[17]]);
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(ip)).to_canonical(), port)
}
