//! `weft join`: runs the program of that name, which is built on its own because `DataFusion` is large.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::failure::Failure;

const PROGRAM: &str = "weft-join";

/// The text of `weft help join`.
pub const LONG: &str = "\
Runs SQL queries with joins on a ring of workers (Data Roundabout): `weft join worker` on each machine, then `weft join sql`.

`weft join` starts the program weft-join from weft's own folder or from PATH, and passes it all arguments:
`weft join --help` is its help.";

/// Options of `weft join`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of weft-join
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARG"
    )]
    args: Vec<OsString>,
}

fn find() -> Option<PathBuf> {
    let here = env::current_exe().ok();
    let beside = here.iter().filter_map(|path| path.parent());
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = beside.map(PathBuf::from).chain(env::split_paths(&path));
    folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(PROGRAM))
        .find(|file| file.is_file())
}

/// Executes weft-join.
///
/// # Errors
/// weft-join is missing, or cannot be started.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let found = find();
    if found.is_none() && args.args.iter().any(|arg| arg == "--help" || arg == "-h") {
        super::say(LONG);
    }
    let program = found.ok_or_else(|| {
        Failure::failed(format!(
            "{PROGRAM} is neither beside weft nor on PATH: it is built on its own"
        ))
        .hint("in weft's sources: cargo build --release --manifest-path apps/join/Cargo.toml, then copy apps/join/target/release/weft-join beside weft")
    })?;
    // Takes the place of this process: signals and the exit status are its own.
    let error = Command::new(&program).args(&args.args).exec();
    Err(Failure::failed(format!(
        "cannot run {}: {error}",
        program.display()
    )))
}
