//! `HOST[:PORT]:DIR`: where files are sent to.

use weft_service::endpoint::{Endpoint, host_of};

use super::DEFAULT_PORT;
use super::protocol::RelPath;
use weft_cli::failure::Failure;

/// A host, a port and a directory on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The listener.
    pub server: Endpoint,
    /// Directory below the one that the listener gave; `None` is that one itself.
    pub dir: Option<RelPath>,
}

const FORM: &str =
    "write HOST:DIR, HOST:PORT:DIR or [IPV6]:PORT:DIR; DIR may be empty, as in `host:`";

impl Target {
    /// Reads a target.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |what: String| Failure::usage(what).hint(FORM);
        let (host, rest) = host_of(text).map_err(|e| wrong(e.to_string()))?;
        let rest = rest.strip_prefix(':').ok_or_else(|| {
            Failure::usage(format!("`{text}` is not HOST[:PORT]:DIR")).hint(format!(
                "the last argument is where the files go; {FORM}. To fetch files: HOST:FILE... DIR, from a listener with --serve"
            ))
        })?;
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        let (port, dir) = match rest.split_once(':') {
            Some((port, dir)) if digits(port) => {
                let port = port.parse().ok().filter(|&p| p != 0);
                (
                    port.ok_or_else(|| wrong(format!("`{text}` has no valid port")))?,
                    dir,
                )
            }
            None if digits(rest) => {
                return Err(
                    Failure::usage(format!("`{text}`: is {rest} a port or a directory?")).hint(
                        format!(
                            "write {host}:{rest}: for the port, {host}:./{rest} for the directory"
                        ),
                    ),
                );
            }
            _ => (DEFAULT_PORT, rest),
        };
        let mut relative = dir.trim_end_matches('/');
        while let Some(rest) = relative.strip_prefix("./") {
            relative = rest.trim_start_matches('/');
        }
        let dir = match relative {
            "" if dir.starts_with('/') => {
                return Err(wrong(format!(
                    "`{dir}` is absolute; DIR lies below the listener's directory"
                )));
            }
            "" | "." => None,
            path => Some(RelPath::new(path.as_bytes()).map_err(|e| {
                Failure::usage(format!("the directory `{dir}` cannot be used: {e}"))
                    .hint("DIR is relative to the listener's directory and cannot lead out of it")
            })?),
        };
        Ok(Self {
            server: Endpoint {
                host: host.into(),
                port,
            },
            dir,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let t = |host: &str, port, dir: &str| Target {
            server: Endpoint {
                host: host.into(),
                port,
            },
            dir: (!dir.is_empty()).then(|| RelPath::new(dir.as_bytes()).unwrap()),
        };
        for (text, target) in [
            ("h:", t("h", DEFAULT_PORT, "")),
            ("h:.", t("h", DEFAULT_PORT, "")),
            ("h:a/b/", t("h", DEFAULT_PORT, "a/b")),
            ("h:99:", t("h", 99, "")),
            ("h:99:a", t("h", 99, "a")),
            ("h:./99", t("h", DEFAULT_PORT, "99")),
            ("h:a:b", t("h", DEFAULT_PORT, "a:b")),
            ("[::1]:", t("::1", DEFAULT_PORT, "")),
            ("[fe80::1%eth0]:7:x", t("fe80::1%eth0", 7, "x")),
        ] {
            assert_eq!(Target::parse(text).unwrap(), target, "{text}");
        }
        for text in [
            "h", ":d", "[::1]", "[::1:d", "h:99", "h:0:", "h:70000:", "h:/etc", "h:/", "h:../x",
            "h:a/../b",
        ] {
            let failure = Target::parse(text).unwrap_err();
            assert_eq!(failure.exit(), weft_cli::failure::Exit::Usage, "{text}");
        }
    }
}
