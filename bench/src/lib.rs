//! The scenarios, drivers and reports of `weft bench`.
//!
//! A scenario is data: an operation, sizes and stacks. One loop runs all scenarios, with a thin driver for each stack. The stacks are
//! measured in turn within each run, so that a disturbance of the machine affects all of them, and ratios are computed run by run. Each side
//! is a separate process, so that CPU time belongs to one side. Other libraries are measured through their own benchmark programs.
//!
//! [`run`] is the command, and [`program`] the body of a program of suites.
#![forbid(unsafe_code)]

mod advise;
mod aims;
mod args;
mod cc;
mod children;
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
mod patience;
mod peer;
mod process;
mod progress;
mod run;
mod scenario;
pub mod sdp;
mod sshfs;
mod usage;
mod verbs;

pub use args::{
    AdviseArgs, CommonArgs, DgramArgs, DgramFigure, EffortArgs, Figure, Poll, Switch, VerbsArgs,
    VerbsOp,
};
pub use cc::{CcArgs, CcPartArgs};
pub use driver::{Memory, Stack, Transport};
pub use error::BenchError;
pub use exs::ExsArgs;
pub use fs::FsArgs;
pub use join::JoinArgs;
pub use link::{LinkArgs, ShapeArgs, parse_time};
pub use mpi::MpiArgs;
pub use output::OutputArgs;
pub use process::PEER_ARGS;
pub use run::{PartArgs, Program, RunArgs};
pub use sdp::SdpArgs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use weft_report::{self as report, named, record, size, stats, terminal};

/// Measures weft beside plain TCP in the same run.
#[derive(Parser, Clone, Debug)]
#[command(name = "weft-bench", bin_name = "weft bench", version)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub suite: Suite,
}

/// The suites.
#[derive(Subcommand, Clone, Debug)]
pub enum Suite {
    /// The verbs beside plain TCP: throughput, CPU of both sides, latency, message rate, registration, set-up and memory
    Verbs(Box<VerbsArgs>),
    /// Extended sockets: the papers' experiments with blast, over distance too, and what they are to reach
    Exs(Box<ExsArgs>),
    /// Datagrams beside reliable connections and bare UDP: the datagram paper's figures 5, 6, 8 and 9, and what they are to reach
    Dgram(Box<DgramArgs>),
    /// Programs from Debian under `weft run` beside plain TCP: iperf3, redis, nginx, memcached, postgres and more, and what they are to reach
    Run(RunArgs),
    /// The peers of our own in that comparison; started by the benchmark itself
    #[command(hide = true)]
    RunPart(PartArgs),
    /// BSDP, ZSDP and AZ-SDP beside plain TCP: the experiments of the AZ-SDP paper
    Sdp(Box<SdpArgs>),
    /// Chapter 4 of the thesis on this machine: set-up, registration, copies, pins, overlap, and whether its conclusions hold
    Advise(AdviseArgs),
    /// Movies: what a server pays for its viewers, weft media beside nginx and plain HTTP; seeks, live streams, idle viewers
    Media(Box<media::MediaArgs>),
    /// The plain HTTP server of that comparison; started by the benchmark itself
    #[command(hide = true)]
    MediaHttp {
        /// What it serves
        file: PathBuf,
    },
    /// A distributed compiler: the thesis's chapter 5, weft cc beside distcc and distcc-pump, with virtual workers and a real build
    Cc(Box<CcArgs>),
    /// Workers and daemon of that comparison; started by the benchmark itself
    #[command(hide = true)]
    CcPart(CcPartArgs),
    /// Remote memory as files: beside tmpfs, raw RDMA and itself through FUSE
    Fs(FsArgs),
    /// Data Roundabout: the figures of the thesis's chapter 7, on rings of processes, and its TCP twin
    Join(JoinArgs),
    /// MPI over connections, datagrams and weft's provider, beside the MPI's own TCP: the datagram paper's figures 13 to 15
    Mpi(MpiArgs),
    /// Run a command at the end of a long link: two network namespaces with delay, jitter, rate and queue between them
    Link(Box<LinkArgs>),
    /// The far end of a benchmark; started by the benchmark itself
    #[command(hide = true)]
    Peer,
    /// Writes the manual pages into a directory, for packages
    #[command(hide = true)]
    Man {
        /// Where to
        dir: PathBuf,
    },
}

/// Runs a suite. The program that calls it must run itself as the peer when its arguments are
/// [`PEER_ARGS`]: that is, give them to this function too, parsed as [`BenchArgs`].
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
        Suite::Peer => peer::serve().map(|()| ExitCode::SUCCESS),
        Suite::Man { dir } => pages(BenchArgs::command(), &dir),
    }
}

/// Writes the manual pages of a command line.
fn pages(command: clap::Command, dir: &Path) -> Result<ExitCode, BenchError> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let written = weft_report::manual::write(&command, dir);
    written.map_err(|error| output::cannot_write(dir, error))?;
    Ok(ExitCode::SUCCESS)
}

/// The body of a program of suites: reads the command line, runs what it asks for, and reports an error.
pub fn program<P: Parser>(
    name: &str,
    run: impl FnOnce(P) -> Result<ExitCode, BenchError>,
) -> ExitCode {
    let args = P::parse();
    start_log()
        .and_then(|()| run(args))
        .unwrap_or_else(|error| {
            let (code, remedy) = match &error {
                BenchError::Usage(_) => (2, format!("`{name} SUITE --help` lists the options")),
                BenchError::Output { .. } => (
                    1,
                    "name a file in a directory that you can write to".to_owned(),
                ),
                _ => (
                    1,
                    "`weft doctor` says what this machine does not support".to_owned(),
                ),
            };
            eprintln!("{name}: {error}\n  try: {remedy}");
            ExitCode::from(code)
        })
}

/// Sends log lines to standard error, at the level of `WEFT_LOG`.
fn start_log() -> Result<(), BenchError> {
    let level = weft_verbs::settings::LOG.parse();
    let level = level.map_err(|wrong| BenchError::Usage(wrong.to_string()))?;
    tracing_subscriber::fmt()
        .with_max_level(level.unwrap_or(tracing_subscriber::filter::LevelFilter::WARN))
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_target(false)
        .init();
    Ok(())
}
