//! The program `weft-bench`, which `weft bench` starts.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    weft_bench::program("weft bench", Some(weft_bench::PAPERS), weft_bench::run)
}
