//! The `weft` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use weft::cli::Cli;
use weft::cmd::lost_output;

fn main() -> ExitCode {
    // As a link with a compiler's name, it is that compiler.
    if let Some(exit) = weft::cmd::cc::masquerade() {
        return exit;
    }
    let cli = Cli::of_program();
    let done = cli.global.start_log().and_then(|()| cli.run());
    weft::let_signal_end();
    match done.and_then(|exit| lost_output().map_or(Ok(exit), Err)) {
        Ok(exit) => exit,
        Err(failure) => {
            weft::tell(format_args!("weft: {failure}"));
            failure.exit().into()
        }
    }
}
