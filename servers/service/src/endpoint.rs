//! Servers as users name them: hosts, ports, and the addresses to listen on.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// The ports of servers where none is named.
pub mod port {
    /// `weft cp --listen`.
    pub const CP: u16 = 7471;
    /// `weft hello --listen`.
    pub const HELLO: u16 = 7472;
    /// `./x papers blast --listen`.
    pub const BLAST: u16 = 7473;
    /// `weft fs serve`.
    pub const FS: u16 = 7474;
    /// `weft media serve`.
    pub const MEDIA: u16 = 7475;
    /// `weft media live`.
    pub const LIVE: u16 = 7476;
    /// `weft cc worker`.
    pub const CC: u16 = 7477;
    /// `weft join worker`.
    pub const JOIN: u16 = 7478;
    // 7479 is that of the broker of `weft run --hosts`: weft_run::hosts::PORT.
    /// The web page of `weft media proxy`.
    pub const HTTP: u16 = 8473;
}

/// Characters that the name of a host may have.
const LONGEST: usize = 253;

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Endpoint {
    /// A name or an address, IPv6 without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// Why a text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No host, or one with characters that no host has.
    #[error("`{0}` names no host")]
    Host(String),
    /// They do not hold an IPv6 address, or something else than a port follows them.
    #[error("`{0}`: brackets hold an IPv6 address, and a colon and a port may follow")]
    Brackets(String),
    /// It is no number from 1 to 65535.
    #[error("`{0}` has no valid port")]
    Port(String),
}

/// Whether it is an IPv6 address, perhaps with the number or the name of an interface (`fe80::1%eth0`).
fn is_ipv6(text: &str) -> bool {
    let (ip, zone) = text.split_once('%').unwrap_or((text, "0"));
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    ip.parse::<Ipv6Addr>().is_ok() && !zone.is_empty() && zone.bytes().all(plain)
}

/// The host at the beginning of a text, without its brackets, and what follows it: nothing, or a colon and more.
///
/// # Errors
/// [`Malformed`].
pub fn host_of(text: &str) -> Result<(&str, &str), Malformed> {
    if let Some(inner) = text.strip_prefix('[') {
        return inner
            .split_once(']')
            .filter(|(host, rest)| is_ipv6(host) && (rest.is_empty() || rest.starts_with(':')))
            .ok_or_else(|| Malformed::Brackets(text.into()));
    }
    let (host, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
    // `@` is for those who write a user, whom the resolver tells that there is no such host.
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.@".contains(&b);
    if host.is_empty() || host.len() > LONGEST || !host.bytes().all(plain) {
        return Err(Malformed::Host(text.into()));
    }
    Ok((host, rest))
}

impl Endpoint {
    /// Reads `HOST`, `HOST:PORT`, `[IPV6]:PORT` or an IPv6 address alone; `port` is that of a text without one.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(text: &str, port: u16) -> Result<Self, Malformed> {
        let endpoint = Self::with_any_port(text, port)?;
        if endpoint.port == 0 {
            return Err(Malformed::Port(text.into()));
        }
        Ok(endpoint)
    }

    fn with_any_port(text: &str, port: u16) -> Result<Self, Malformed> {
        let (host, rest) = if is_ipv6(text) {
            (text, "")
        } else {
            host_of(text)?
        };
        let port = match rest.strip_prefix(':') {
            None => port,
            // No sign.
            Some(digits) => Some(digits)
                .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(|| Malformed::Port(text.into()))?,
        };
        Ok(Self {
            host: host.into(),
            port,
        })
    }

    /// The addresses that the host has, at least one.
    ///
    /// # Errors
    /// Those of the resolver.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it has no address"));
        }
        Ok(found)
    }
}

/// As files of known peers have it: in lower case, IPv6 in brackets.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host.to_ascii_lowercase();
        if host.contains(':') {
            write!(f, "[{host}]:{}", self.port)
        } else {
            write!(f, "{host}:{}", self.port)
        }
    }
}

/// An address to listen on: `ADDR`, `ADDR:PORT` or `[IPV6]:PORT`, and no name of a host. Port 0 is for the system to choose.
///
/// # Errors
/// What to write instead.
pub fn parse_bind(text: &str, port: u16) -> Result<SocketAddr, &'static str> {
    let is_address = |at: &Endpoint| at.host.parse::<IpAddr>().is_ok() || is_ipv6(&at.host);
    Endpoint::with_any_port(text, port)
        .ok()
        .filter(is_address)
        .and_then(|at| at.resolve().ok()?.first().copied())
        .ok_or("write an IP address, ADDR:PORT or [IPV6]:PORT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_as_users_write_them() {
        for (text, host, port) in [
            ("h", "h", 7),
            ("127.0.0.1", "127.0.0.1", 7),
            ("h-2.a_b:80", "h-2.a_b", 80),
            ("me@h", "me@h", 7),
            ("::1", "::1", 7),
            ("[::1]", "::1", 7),
            ("[::1]:80", "::1", 80),
            ("fe80::1%eth0", "fe80::1%eth0", 7),
            ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ] {
            let endpoint = Endpoint::parse(text, 7).unwrap();
            assert_eq!((&*endpoint.host, endpoint.port), (host, port), "{text}");
            let again = Endpoint::parse(&endpoint.to_string(), 1);
            assert_eq!(again, Ok(endpoint), "{text}");
        }
        for wrong in [
            "",
            ":80",
            "a:b",
            "h:",
            "h:0",
            "h:+1",
            "h:70000",
            "a b",
            "h/x",
            "h:1:2",
            "[::1",
            "[::1]9",
            "[x]:1",
            "[h]:1",
            "[fe80::1%]:1",
            "[::1%a b]",
            "::1%",
            &"h".repeat(254),
        ] {
            assert!(Endpoint::parse(wrong, 7).is_err(), "{wrong}");
        }
        let shown = Endpoint::parse("Host", 7).unwrap().to_string();
        assert_eq!(shown, "host:7");
    }

    #[test]
    fn addresses_to_listen_on() {
        for (text, addr) in [
            ("127.0.0.1", "127.0.0.1:7"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("::1", "[::1]:7"),
            ("[::1]", "[::1]:7"),
            ("[::1]:80", "[::1]:80"),
            // The zone is a number or, as `ip address` shows it, a name.
            ("[fe80::1%1]:80", "[fe80::1%1]:80"),
            ("[fe80::1%lo]:80", "[fe80::1%1]:80"),
            ("fe80::1%lo", "[fe80::1%1]:7"),
        ] {
            assert_eq!(parse_bind(text, 7).unwrap().to_string(), addr, "{text}");
        }
        for wrong in [
            "",
            "localhost",
            ":80",
            "127.0.0.1:99999",
            "fe80::1%none-such",
        ] {
            assert!(parse_bind(wrong, 7).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_host_has_addresses() {
        let found = Endpoint::parse("127.0.0.1", 7).unwrap().resolve().unwrap();
        assert_eq!(found, ["127.0.0.1:7".parse().unwrap()]);
    }
}
