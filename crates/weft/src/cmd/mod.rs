//! One module for each subcommand: its options, and how they become calls of the library.

pub mod advise;
pub mod blast;
pub mod broker;
pub mod cc;
mod cc_summary;
pub mod completion;
pub mod cp;
pub mod demo;
pub mod dissector;
pub mod doctor;
pub mod fs;
pub mod hello;
pub mod join;
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
