//! The `weft` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weft::cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.global.start_log();
    match cli.run() {
        Ok(exit) => exit,
        Err(failure) => {
            eprintln!("weft: {failure}");
            failure.exit().into()
        }
    }
}
