//! `weft-cc COMPILER ...` is `weft cc COMPILER ...` in a program of its own, which starts in a fraction of the time: a build starts it for each source.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    weft::cmd::cc::alone()
}
