//! Subcommands that are programs of their own, which are found beside `weft`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use weft_report::programs::find;

use crate::failure::Failure;

/// A program of its own.
pub struct Program {
    /// The name of its file.
    name: &'static str,
    /// The text of `weft help SUBCOMMAND`.
    pub long: &'static str,
    /// How it is built.
    build: &'static str,
}

/// `weft join`: `DataFusion`, on which it stands, is large.
pub const JOIN: Program = Program {
    name: "weft-join",
    long: "\
Runs SQL queries with joins on a ring of workers (Data Roundabout): `weft join worker` on each machine, then `weft join sql`.

`weft join` starts the program weft-join from weft's own folder or from PATH, and passes it all arguments:
`weft join --help` is its help.",
    build: "cargo build --release --manifest-path apps/join/Cargo.toml, then copy apps/join/target/release/weft-join beside weft",
};

/// `weft bench`: what only measures is no part of what it measures.
pub const BENCH: Program = Program {
    name: "weft-bench",
    long: "\
Measures RDMA operations, unmodified programs under `weft run`, and remote files, compared with plain TCP in the same run.

`weft bench` starts the program weft-bench from weft's own folder or from PATH, and passes it all arguments:
`weft bench --help` lists the suites, and `weft bench SUITE --help` the options of each.",
    build: "./x build, or cargo build --release -p weft-bench, then copy target/release/weft-bench beside weft",
};

/// The arguments of such a program.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of the program
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARG"
    )]
    args: Vec<OsString>,
}

impl Program {
    /// Executes the program.
    ///
    /// # Errors
    /// It is missing, or cannot be started.
    pub fn run(&self, args: &Args) -> Result<ExitCode, Failure> {
        let name = self.name;
        let found = find(name);
        if found.is_none() && args.args.iter().any(|arg| arg == "--help" || arg == "-h") {
            super::say(self.long);
        }
        let program = found.ok_or_else(|| {
            Failure::failed(format!(
                "{name} is neither beside weft nor on PATH: it is a program of its own"
            ))
            .hint(format!("in weft's sources: {}", self.build))
        })?;
        // Takes the place of this process: signals and the exit status are its own.
        let error = Command::new(&program).args(&args.args).exec();
        Err(Failure::failed(format!(
            "cannot run {}: {error}",
            program.display()
        )))
    }
}
