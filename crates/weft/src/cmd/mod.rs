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

/// What carries a connection, in words.
pub(crate) fn carrier(transport: &str) -> &str {
    match transport {
        "local" => "shared memory",
        "tcp" => "TCP",
        "tls" => "TCP by TLS",
        "plain-tcp" => "plain TCP",
        other => other,
    }
}

/// As many open files as the system lets this process have: each viewer or connection takes a few.
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

/// Prints a line to stdout; a reader that has gone is not an error.
pub(crate) fn say(line: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{line}");
}
