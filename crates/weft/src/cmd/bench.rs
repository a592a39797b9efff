//! `weft bench`: the suites are in the crate weft-bench.

use std::process::ExitCode;

use weft_bench::{BenchArgs, BenchError};

use crate::failure::Failure;

/// Runs a suite.
pub fn run(args: BenchArgs) -> Result<ExitCode, Failure> {
    weft_bench::run(args).map_err(|e| match e {
        BenchError::Usage(_) => {
            Failure::usage(e.to_string()).hint("`weft bench SUITE --help` lists the options")
        }
        BenchError::Output { .. } => Failure::failed(format!("cannot write {e}"))
            .hint("name a file in a directory that you can write to"),
        _ => Failure::failed(e.to_string()).hint("`weft doctor` tells what this machine lacks"),
    })
}
