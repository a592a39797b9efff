//! The protocol between a command and the daemon. The daemon does the rest: it preprocesses, finds a worker, and writes the object.
//!
//! The launcher (apps/launcher) implements it without a library, so it is a byte format, not JSON. A message that begins with a zero byte is a command: four bytes
//! of its umask and four of the number of its arguments, both little-endian; then, each terminated by NUL, its directory, its arguments, its environment. The
//! message also carries its standard error as a descriptor. The answer is a byte: 0 and the exit status; 1 or 2 and the path of the compiler that the command has to
//! execute, with 2 while the connection stays open.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The launcher's name. Under another one it is a compiler of that name.
pub const NAME: &str = "weft-cc";
/// The path of the launcher that executed `weft cc`: it is no compiler.
pub const FROM: &str = "WEFT_CC_LAUNCHER";
/// The longest path that the launcher takes.
const MAX_PATH: usize = 4190;

/// A command, with all that it depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) umask: u32,
    pub(crate) dir: PathBuf,
    /// The first one is the compiler, or [`NAME`], and then the compiler comes next.
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(OsString, OsString)>,
}

impl Launch {
    /// This process's, with other arguments, and these variables set.
    ///
    /// # Errors
    /// There is no working directory.
    pub(crate) fn own(args: Vec<OsString>, set: &[(&str, OsString)]) -> io::Result<Self> {
        let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o77));
        rustix::process::umask(umask);
        let kept = std::env::vars_os().filter(|(name, _)| set.iter().all(|(new, _)| name != new));
        let set = set.iter().map(|(name, value)| (name.into(), value.clone()));
        Ok(Self {
            umask: umask.bits(),
            dir: std::env::current_dir()?,
            args,
            env: kept.chain(set).collect(),
        })
    }

    pub(crate) fn var(&self, name: &str) -> Option<&OsStr> {
        let found = self.env.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_os_str())
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(self.umask.to_le_bytes());
        bytes.extend((self.args.len() as u32).to_le_bytes());
        let mut put = |texts: &[&OsStr]| {
            for text in texts {
                bytes.extend(text.as_bytes());
            }
            bytes.push(0);
        };
        put(&[self.dir.as_os_str()]);
        for arg in &self.args {
            put(&[arg]);
        }
        for (name, value) in &self.env {
            put(&[name, OsStr::new("="), value]);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<9>()?;
        let number = |at: usize| Some(u32::from_le_bytes(head[at..at + 4].try_into().ok()?));
        let count = usize::try_from(number(5)?).ok()?;
        let mut texts = rest
            .strip_suffix(b"\0")?
            .split(|&b| b == 0)
            .map(|text| OsString::from_vec(text.to_vec()));
        let dir = PathBuf::from(texts.next()?);
        let args: Vec<_> = texts.by_ref().take(count).collect();
        let pair = |text: OsString| {
            let bytes = text.as_bytes();
            let at = bytes.iter().position(|&b| b == b'=')?;
            let part = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
            Some((part(&bytes[..at]), part(&bytes[at + 1..])))
        };
        let good = head[0] == 0 && dir.is_absolute() && !args.is_empty() && args.len() == count;
        good.then(|| Self {
            umask: number(1).unwrap_or(0) & 0o777,
            dir,
            args,
            env: texts.filter_map(pair).collect(),
        })
    }
}

/// The answer to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// It ends, with this status.
    End(u8),
    /// It becomes the compiler; `held`: which has a place among those that run here, while the connection is open.
    Compiler { path: PathBuf, held: bool },
}

impl Next {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::End(code) => vec![0, *code],
            Self::Compiler { path, held } => {
                let mut bytes = vec![1 + u8::from(*held)];
                bytes.extend(path.as_os_str().as_bytes());
                if bytes.len() > MAX_PATH {
                    return vec![0, 127];
                }
                bytes
            }
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (first, rest) = bytes.split_first()?;
        match (first, rest) {
            (0, [code]) => Some(Self::End(*code)),
            (1 | 2, [_, ..]) => Some(Self::Compiler {
                path: OsStr::from_bytes(rest).into(),
                held: *first == 2,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_answers_come_as_they_were_sent() {
        let launch = Launch {
            umask: 0o27,
            dir: "/a b".into(),
            args: vec![
                "gcc".into(),
                "".into(),
                OsString::from_vec(vec![0xff, b'=']),
                "x=\ny".into(),
            ],
            env: vec![("A".into(), "b=c".into()), ("E".into(), "".into())],
        };
        assert_eq!(Launch::decode(&launch.encode()), Some(launch.clone()));
        let bytes = launch.encode();
        for end in 0..bytes.len() {
            // No field is longer than the received bytes.
            if let Some(part) = Launch::decode(&bytes[..end]) {
                assert_eq!(part.args, launch.args);
            }
        }
        assert_eq!(
            Launch::decode(&[&[0; 5][..], &[0xff; 4], b"/\0x\0"].concat()),
            None
        );
        for next in [
            Next::End(3),
            Next::Compiler {
                path: "/bin/gcc".into(),
                held: true,
            },
        ] {
            assert_eq!(Next::decode(&next.encode()), Some(next));
        }
        for bad in [&b""[..], b"\0", b"\x01", b"\x03x", b"\0\0\0"] {
            assert_eq!(Next::decode(bad), None);
        }
    }
}
