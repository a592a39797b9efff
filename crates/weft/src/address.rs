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
        .or_else(|_| of_interface(text, bare, port))
        .map_err(|()| "write an IP address, ADDR:PORT or [IPV6]:PORT".into())
}

/// An address of a link with the name of an interface, as in `fe80::1%eth0`.
fn of_interface(text: &str, bare: &str, port: u16) -> Result<SocketAddr, ()> {
    let (host, port) = match text.strip_prefix('[').and_then(|t| t.split_once("]:")) {
        Some((host, number)) => (host, number.parse().map_err(drop)?),
        None => (bare, port),
    };
    if !host.contains('%') {
        return Err(());
    }
    let mut found = (host, port).to_socket_addrs().map_err(drop)?;
    found.next().ok_or(())
}

/// The first address of `HOST[:PORT]`; an IPv6 address has brackets, or no port.
pub(crate) fn resolve_peer(peer: &str, port: u16) -> Result<SocketAddr, Failure> {
    if let Ok(addr) = parse_bind(peer, port) {
        return Ok(addr);
    }
    let (host, port) = match peer.rsplit_once(':') {
        Some((host, number)) if !host.contains(':') => (host, number.parse().ok()),
        Some(_) => (peer, None),
        None => (peer, Some(port)),
    };
    let Some(port) = port.filter(|_| !host.is_empty()) else {
        return Err(Failure::usage(format!("`{peer}` is not an address"))
            .hint("write HOST, HOST:PORT or [IPV6]:PORT"));
    };
    resolve(host, port).map(|addrs| addrs[0])
}

/// The addresses that a host has, at least one.
pub(crate) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    let hint = if host.contains('@') {
        "write the host alone: keys say who is there, not user names"
    } else {
        "check the name, or give the address itself (IPv6 in brackets)"
    };
    let addrs: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Failure::peer(format!("cannot resolve `{host}`: {e}")).hint(hint))?
        .collect();
    if addrs.is_empty() {
        return Err(Failure::peer(format!("`{host}` has no address")).hint(hint));
    }
    Ok(addrs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    #[test]
    fn a_peer_is_a_host_with_or_without_a_port() {
        let found = |peer: &str| resolve_peer(peer, 7).map(|addr| addr.to_string());
        for (peer, addr) in [
            ("127.0.0.1", "127.0.0.1:7"),
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("::1", "[::1]:7"),
            ("[::1]", "[::1]:7"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(found(peer).unwrap(), addr);
        }
        // The zone is a number or, as `ip address` shows it, a name.
        for zoned in ["[fe80::1%1]:80", "[fe80::1%lo]:80", "fe80::1%lo"] {
            let addr = resolve_peer(zoned, 80).unwrap();
            assert_eq!(addr.to_string(), "[fe80::1%1]:80", "{zoned}");
        }
        for wrong in ["", ":80", "a:b", "127.0.0.1:99999", "not an address:1:2"] {
            let failure = found(wrong).unwrap_err();
            assert_eq!(failure.exit(), Exit::Usage, "{wrong}: {failure}");
        }
    }
}
