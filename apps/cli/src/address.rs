//! Servers that users name, for commands that connect to them.

use std::net::SocketAddr;

use weft_service::endpoint::Endpoint;

use crate::failure::Failure;

/// The first address of `HOST[:PORT]`.
pub fn resolve_peer(peer: &str, port: u16) -> Result<SocketAddr, Failure> {
    let endpoint = Endpoint::parse(peer, port)
        .map_err(|e| Failure::usage(e.to_string()).hint("write HOST, HOST:PORT or [IPV6]:PORT"))?;
    resolve(&endpoint).map(|addrs| addrs[0])
}

/// The addresses that a server's host has, at least one.
pub fn resolve(endpoint: &Endpoint) -> Result<Vec<SocketAddr>, Failure> {
    let host = &endpoint.host;
    let hint = if host.contains('@') {
        "write the host alone: keys say who is there, not user names"
    } else {
        "check the name, or give the address itself (IPv6 in brackets)"
    };
    endpoint
        .resolve()
        .map_err(|e| Failure::peer(format!("cannot resolve `{host}`: {e}")).hint(hint))
}
