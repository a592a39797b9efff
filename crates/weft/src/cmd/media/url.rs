//! `[weft://]HOST[:PORT][/NAME]`: a server, and a title on it.

use std::net::SocketAddr;

use crate::failure::Failure;

/// A server, and a title on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    /// Name or address, without brackets.
    pub(super) host: String,
    /// TCP port.
    pub(super) port: u16,
    /// The title; empty: none.
    pub(super) name: String,
}

const FORM: &str =
    "write HOST/NAME, HOST:PORT/NAME or [IPV6]:PORT/NAME, for example localhost/a.mp4";

impl Url {
    /// Parses a URL; `port` is the default port.
    pub(super) fn parse(text: &str, port: u16) -> Result<Self, Failure> {
        let wrong = |what: String| Failure::usage(what).hint(FORM);
        let rest = text.strip_prefix("weft://").unwrap_or(text);
        let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port_text) = match authority.strip_prefix('[') {
            Some(inner) => {
                let (host, after) = inner
                    .split_once(']')
                    .ok_or_else(|| wrong(format!("`{text}` has `[` without `]`")))?;
                let port =
                    match after {
                        "" => None,
                        _ => Some(after.strip_prefix(':').ok_or_else(|| {
                            wrong(format!("`{text}`: what follows `]` is no port"))
                        })?),
                    };
                (host, port)
            }
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        if host.is_empty() || text.contains("://") && !text.starts_with("weft://") {
            return Err(wrong(format!("`{text}` names no host")));
        }
        let port = match port_text {
            None => port,
            Some(digits) => digits
                .parse()
                .ok()
                .filter(|&p| p != 0)
                .ok_or_else(|| wrong(format!("`{text}` has no valid port")))?,
        };
        Ok(Self {
            host: host.into(),
            port,
            name: name.into(),
        })
    }

    /// The server alone, as [`Url::parse`] reads it.
    pub(super) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The addresses of the host.
    pub(super) fn resolve(&self) -> Result<Vec<SocketAddr>, Failure> {
        crate::address::resolve(&self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let url = |host: &str, port, name: &str| Url {
            host: host.into(),
            port,
            name: name.into(),
        };
        for (text, good) in [
            ("h", url("h", 7, "")),
            ("h/a b.mp4", url("h", 7, "a b.mp4")),
            ("weft://h:99/s/a.mp4", url("h", 99, "s/a.mp4")),
            ("[::1]/x:y", url("::1", 7, "x:y")),
            ("[fe80::1%eth0]:8/x", url("fe80::1%eth0", 8, "x")),
        ] {
            assert_eq!(Url::parse(text, 7).unwrap(), good, "{text}");
        }
        for text in [
            "",
            "/x",
            "h:0/x",
            "h:x/y",
            "h:99999/x",
            "[::1/x",
            "[::1]9/x",
            "http://h/x",
        ] {
            assert!(Url::parse(text, 7).is_err(), "{text}");
        }
    }
}
