//! Subcommands that are programs of their own, which are found beside `weft`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use weft_cli::failure::Failure;
use weft_report::programs;

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

/// An application whose options `weft` has in its own help, manual and completion.
const fn application(name: &'static str) -> Program {
    Program {
        name,
        long: "",
        build: "./x build builds all programs of weft",
    }
}

/// `weft cc` and its daemon.
pub const CC: Program = application("weft-ccd");
/// `weft fs`.
pub const FS: Program = application("weft-fs");
/// `weft media`.
pub const MEDIA: Program = application("weft-media");

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

/// Executes the application that the command line names. Comes back where it names none, and with an error where the program
/// cannot be started; where it is missing, the parser of the whole command line still has its help.
pub fn application_of(mut args: Vec<OsString>) -> Option<Failure> {
    // Options of every subcommand have no values.
    let at = args
        .iter()
        .position(|arg| !arg.as_encoded_bytes().starts_with(b"-"))?;
    let (program, first) = match args[at].to_str()? {
        "cc" => (&CC, None),
        "ccd" => (&CC, Some("daemon")),
        "fs" => (&FS, None),
        "media" => (&MEDIA, None),
        _ => return None,
    };
    let file = programs::of_weft(program.name)?;
    match first {
        Some(first) => args[at] = first.into(),
        None => drop(args.remove(at)),
    }
    Some(exec(&file, &args))
}

impl Program {
    /// Executes the program.
    ///
    /// # Errors
    /// It is missing, or cannot be started.
    pub fn run(&self, args: &Args) -> Result<ExitCode, Failure> {
        if let Some(file) = programs::of_weft(self.name) {
            return Err(exec(&file, &args.args));
        }
        if args.args.iter().any(|arg| arg == "--help" || arg == "-h") {
            weft_cli::say(self.long);
        }
        self.missing()
    }

    /// Says that the program is missing.
    ///
    /// # Errors
    /// Always.
    pub fn missing(&self) -> Result<ExitCode, Failure> {
        let name = self.name;
        Err(Failure::failed(format!(
            "{name} is neither beside weft nor on PATH: it is a program of its own"
        ))
        .hint(format!("in weft's sources: {}", self.build)))
    }
}

/// Executes a file, which takes the place of this process: signals and the exit status are its own. Comes back where that cannot be.
fn exec(file: &Path, args: &[OsString]) -> Failure {
    let error = Command::new(file).args(args).exec();
    Failure::failed(format!("cannot run {}: {error}", file.display()))
}
