//! The scenarios, drivers and reports of `weft bench`.
//!
//! A scenario is data: which operation, which sizes, which stacks. One loop runs them all, and a
//! thin driver per stack carries them out. The stacks take turns within each run, so that a
//! disturbance of the machine meets all of them, and ratios are taken run by run. Each side is a
//! process of its own, so that CPU time belongs to one side. Other libraries stand beside weft through their own benchmark programs.
//!
//! [`run`] is the command; [`report`] makes tables, plots and self-contained pages for others too.
#![forbid(unsafe_code)]

pub mod advise;
mod aims;
mod args;
mod cc;
mod conclusions;
mod dgram;
mod driver;
mod error;
pub mod exs;
mod fs;
mod join;
mod link;
pub mod media;
mod mpi;
mod output;
mod process;
mod progress;
pub mod record;
pub mod report;
mod run;
mod scenario;
pub mod sdp;
pub mod size;
mod sshfs;
pub mod stats;
mod usage;
mod verbs;

pub use args::{
    AdviseArgs, BenchArgs, CommonArgs, DgramArgs, DgramFigure, ExsArgs, Figure, Poll, SdpArgs,
    Suite, Switch, VerbsArgs, VerbsOp,
};
pub use cc::{CcArgs, CcPartArgs};
pub use driver::{Memory, Stack, Transport};
pub use error::BenchError;
pub use fs::FsArgs;
pub use join::JoinArgs;
pub use link::{LinkArgs, ShapeArgs, parse_time};
pub use mpi::MpiArgs;
pub use output::OutputArgs;
pub use process::PEER_ARGS;
pub use run::{PartArgs, Program, RunArgs};

use std::process::ExitCode;

/// Runs a suite. The program that calls it must run itself as the peer when its arguments begin
/// with [`PEER_ARGS`]: that is, give them to this function too, parsed as [`BenchArgs`].
///
/// # Errors
/// [`BenchError`] when the options do not fit together, a result file cannot be written or the
/// peer process cannot be started. Points that fail are reported on standard error, left out of the
/// results, and make the exit code a failure.
pub fn run(args: BenchArgs) -> Result<ExitCode, BenchError> {
    match args.suite {
        Suite::Verbs(args) => verbs::run(&args),
        Suite::Dgram(args) => dgram::run(&args),
        Suite::Exs(args) => exs::run_suite(&args),
        Suite::Cc(args) => cc::run(&args),
        Suite::CcPart(args) => cc::part(&args).map(|()| ExitCode::SUCCESS),
        Suite::Fs(args) => fs::run(&args),
        Suite::Join(args) => join::run(&args),
        Suite::Media(args) => media::run(&args),
        Suite::Mpi(args) => mpi::run(&args),
        Suite::MediaHttp { file } => media::serve_plain_http(&file).map(|()| ExitCode::SUCCESS),
        Suite::Run(args) => run::run_suite(&args),
        Suite::RunPart(args) => run::part(&args).map(|()| ExitCode::SUCCESS),
        Suite::Sdp(args) => sdp::run_suite(&args),
        Suite::Advise(args) => advise::run_suite(&args),
        Suite::Link(args) => link::run(&args),
        Suite::Peer => process::serve_peer().map(|()| ExitCode::SUCCESS),
    }
}
