//! Addresses of endpoints.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Bytes of an address.
pub const ADDRESS: usize = 32;
/// The address of an endpoint, which peers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Address and UDP port.
    pub addr: SocketAddr,
    /// Drawn at random for each endpoint. Datagrams without it are dropped.
    pub key: u32,
}

impl Address {
    /// As programs exchange it: IPv6 address (IPv4 as `::ffff:a.b.c.d`), port, 0 (2), key, scope, 0 (4).
    pub fn to_bytes(&self) -> [u8; ADDRESS] {
        let mut out = [0; ADDRESS];
        let ip = match self.addr.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let scope = match self.addr {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(addr) => addr.scope_id(),
        };
        out[..16].copy_from_slice(&ip.octets());
        out[16..18].copy_from_slice(&self.addr.port().to_be_bytes());
        out[20..24].copy_from_slice(&self.key.to_be_bytes());
        out[24..28].copy_from_slice(&scope.to_be_bytes());
        out
    }

    /// Decodes [`Address::to_bytes`]; `None` for an invalid address.
    pub fn from_bytes(bytes: &[u8; ADDRESS]) -> Option<Address> {
        let (ip, rest) = bytes.split_first_chunk::<16>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let (key, rest) = rest[2..].split_first_chunk::<4>()?;
        let (scope, zeros) = rest.split_first_chunk::<4>()?;
        let port = u16::from_be_bytes(*port);
        if port == 0 || bytes[18..20] != [0; 2] || zeros != [0; 4] {
            return None;
        }
        let ip = Ipv6Addr::from(*ip);
        let addr = match ip.to_ipv4_mapped() {
            Some(ip) => SocketAddr::from((ip, port)),
            None => SocketAddrV6::new(ip, port, 0, u32::from_be_bytes(*scope)).into(),
        };
        let key = u32::from_be_bytes(*key);
        Some(Address { addr, key })
    }
}
