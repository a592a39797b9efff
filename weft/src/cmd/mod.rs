//! One module for each subcommand: its options, and how they become calls of the library.

/// A line on standard error, in the words of `format!`.
macro_rules! tell {
    ($($words:tt)*) => {
        $crate::terminal::tell(format_args!($($words)*))
    };
}

pub mod advise;
pub mod broker;
pub mod cc;
mod cc_summary;
pub mod completion;
pub mod cp;
pub mod demo;
pub mod dispatch;
pub mod dissector;
pub mod doctor;
pub mod fs;
pub mod hello;
pub mod key;
pub mod man;
pub mod media;
pub mod mpi;
pub mod run;
pub mod stat;
pub mod verbs;
mod view;

use std::io::Write;
use std::sync::OnceLock;

use crate::failure::Failure;

/// The transport of a connection, in words.
pub(crate) fn carrier(transport: &str) -> &str {
    match transport {
        "local" => "shared memory",
        "tcp" => "TCP",
        "tls" => "TCP by TLS",
        "plain-tcp" => "plain TCP",
        other => other,
    }
}

/// Parses a number of bytes above 0, the value of an option.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    bytes(text).and_then(|size| match size {
        0 => Err("write a number above 0".to_owned()),
        _ => Ok(size),
    })
}

/// Parses a number of bytes, which may be 0.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    weft_fs::name::parse_size(text).ok_or_else(|| {
        "write a number of bytes, or one with K, M, G or T (powers of 1024)".to_owned()
    })
}

/// A count of 1 to 65,536.
pub(crate) fn at_least_one() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=65_536)
}

/// Raises the limit of open files as far as the system allows: each viewer or connection takes a few.
pub(crate) fn raise_nofile() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        tracing::info!("the limit of open files stays at {:?}: {e}", limit.current);
    }
}

/// The reason why standard output did not take everything: a full disk, for example.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line to stdout; a closed pipe is not an error.
pub(crate) fn say(line: impl std::fmt::Display) {
    print(format!("{line}\n").as_bytes());
}

/// Prints to stdout; returns whether the reader still takes output. A closed pipe is not an error, see [`lost_output`] for other errors.
pub(crate) fn print(bytes: &[u8]) -> bool {
    let mut out = std::io::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(e) => {
            if e.kind() != std::io::ErrorKind::BrokenPipe {
                let _ = LOST.set(e);
            }
            false
        }
    }
}

/// The error of stdout, to be reported at the program's end.
#[must_use]
pub fn lost_output() -> Option<Failure> {
    let error = LOST.get()?;
    Some(Failure::failed(format!(
        "cannot write to standard output: {error}"
    )))
}
