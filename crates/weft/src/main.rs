//! The `weft` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weft::cli::Cli;

fn main() -> ExitCode {
    // As a link with a compiler's name, it is that compiler.
    if let Some(exit) = weft::cmd::cc::masquerade() {
        return exit;
    }
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
