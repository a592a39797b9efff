//! The scenarios, drivers and reports of `weft bench`.
//!
//! A scenario is data: an operation, sizes and stacks. One loop runs all scenarios, with a thin driver for each stack. The stacks are
//! measured in turn within each run, so that a disturbance of the machine affects all of them, and ratios are computed run by run. Each side
//! is a separate process, so that CPU time belongs to one side. Other libraries are measured through their own benchmark programs.
//!
//! [`run()`] is the command, and [`program()`] the body of a program of suites. The modules are public for the suites of the papers, which are in
//! a workspace of their own (papers/) and have the same loop, drivers, peer process and output.
#![forbid(unsafe_code)]

pub mod aims;
pub mod args;
mod busy;
pub mod children;
pub mod driver;
pub mod error;
mod fs;
pub mod output;
pub mod patience;
pub mod peer;
pub mod process;
pub mod progress;
pub mod run;
pub mod scenario;
mod sshfs;
pub mod usage;
pub mod verbs;

pub use args::VerbsArgs;
pub use busy::BusyArgs;
pub use error::BenchError;
pub use fs::FsArgs;
pub use process::PEER_ARGS;
pub use run::{PartArgs, RunArgs};

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use weft_report::{self as report, named, record, size, stats, terminal};

/// Where the suites are that are no longer here.
pub const PAPERS: &str = "The experiments of the papers (exs, sdp, dgram, advise, media, cc, join, mpi, link, \
blast) are in weft's sources: `./x papers SUITE`";

/// Measures weft beside plain TCP in the same run.
#[derive(Parser, Clone, Debug)]
#[command(name = "weft-bench", bin_name = "weft bench", version, after_help = PAPERS)]
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
    /// Programs from Debian under `weft run` beside plain TCP: iperf3, redis, nginx, memcached, postgres and more, and what they are to reach
    Run(RunArgs),
    /// The peers of our own in that comparison; started by the benchmark itself
    #[command(hide = true)]
    RunPart(PartArgs),
    /// Short messages beside busy loops: verbs, EXS and rsockets, each in turn with plain TCP
    Busy(BusyArgs),
    /// Remote memory as files: beside tmpfs, raw RDMA and itself through FUSE
    Fs(FsArgs),
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
        Suite::Busy(args) => busy::run(&args),
        Suite::Fs(args) => fs::run(&args),
        Suite::Run(args) => run::run_suite(&args),
        Suite::RunPart(args) => run::part(&args).map(|()| ExitCode::SUCCESS),
        Suite::Peer => peer::serve(&mut peer::OfVerbs).map(|()| ExitCode::SUCCESS),
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

/// The body of a program of suites: reads the command line, runs what it asks for, and reports an error; `elsewhere` says where suites are that
/// it does not have.
pub fn program<P: Parser>(
    name: &str,
    elsewhere: Option<&str>,
    run: impl FnOnce(P) -> Result<ExitCode, BenchError>,
) -> ExitCode {
    let args = P::try_parse().unwrap_or_else(|error| {
        let _ = error.print();
        if let Some(elsewhere) = elsewhere.filter(|_| error.kind() == ErrorKind::InvalidSubcommand)
        {
            eprintln!("\n{elsewhere}");
        }
        std::process::exit(error.exit_code())
    });
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
