//! `weft completion`.

use clap_complete::Shell;

use crate::failure::{Exit, Failure};

/// Options of `weft completion`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints a completion script of this command line.
pub fn run(args: &Args, command: &mut clap::Command) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "weft", &mut script);
    super::print(&script);
    Ok(Exit::Ok)
}
