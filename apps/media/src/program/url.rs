//! `[weft://]HOST[:PORT][/NAME]`: a server, and a title on it.

use weft_service::endpoint::Endpoint;

use weft_cli::failure::Failure;

/// A server, and a title on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    /// The server.
    pub(super) server: Endpoint,
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
        if text.contains("://") && !text.starts_with("weft://") {
            return Err(wrong(format!("`{text}` names no host")));
        }
        Ok(Self {
            server: Endpoint::parse(authority, port).map_err(|e| wrong(e.to_string()))?,
            name: name.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let url = |host: &str, port, name: &str| Url {
            server: Endpoint {
                host: host.into(),
                port,
            },
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
