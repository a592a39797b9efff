//! The program `weft-papers`, which `./x papers` builds and runs.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    weft_bench::program("weft-papers", None, weft_papers::run)
}
