//! Addresses as users write them.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::failure::Failure;

/// `ADDR:PORT`, or an address alone (IPv6 also in brackets) for `port`.
pub(crate) fn parse_bind(text: &str, port: u16) -> Result<SocketAddr, String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(text);
    bare.parse::<IpAddr>()
        .map(|ip| SocketAddr::new(ip, port))
        .or_else(|_| text.parse())
        .map_err(|_| "write an IP address, ADDR:PORT or [IPV6]:PORT".into())
}

/// The addresses that a host has, at least one.
pub(crate) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    let hint = "check the name, or give the address itself (IPv6 in brackets)";
    let addrs: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Failure::peer(format!("cannot resolve `{host}`: {e}")).hint(hint))?
        .collect();
    if addrs.is_empty() {
        return Err(Failure::peer(format!("`{host}` has no address")).hint(hint));
    }
    Ok(addrs)
}
