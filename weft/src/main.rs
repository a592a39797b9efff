//! The `weft` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use weft::cli::Cli;
use weft::cmd::dispatch;
use weft_cli::program::ended;

fn main() -> ExitCode {
    // Before the parser of the whole command line is built: that would take a fifth of the time of a compilation by `weft cc`.
    if let Some(error) = dispatch::application_of(std::env::args_os().skip(1).collect()) {
        return ended(Err(error));
    }
    let cli = Cli::of_program();
    ended(cli.global.start_log().and_then(|()| cli.run()))
}
