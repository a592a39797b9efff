//! The experiments of the papers and of the thesis on weft, with what each paper concludes and whether it holds here.
//!
//! Scenarios, drivers, the peer process and the output are those of `weft bench`; each suite adds its own experiments.
#![forbid(unsafe_code)]

mod advise;
mod args;
mod blast;
mod cc;
mod conclusions;
mod dgram;
pub mod exs;
mod join;
mod link;
mod media;
mod mpi;
mod peer;
mod process;
mod sdp;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
pub use weft_bench::BenchError;
pub use weft_bench::driver::Transport;
use weft_bench::{aims, children, driver, error, output, patience, progress, scenario, usage};
use weft_report::{self as report, named, record, size, stats};

/// Runs the experiments of the papers on weft, and says which of their conclusions hold.
#[derive(Parser, Clone, Debug)]
#[command(name = "weft-papers", version)]
pub struct PapersArgs {
    /// What to run.
    #[command(subcommand)]
    pub suite: Suite,
}

/// The suites.
#[derive(Subcommand, Clone, Debug)]
pub enum Suite {
    /// Extended sockets: the papers' experiments with blast, over distance too, and what they are to reach
    Exs(Box<exs::ExsArgs>),
    /// A stream over extended sockets between two processes or hosts: the tool of the stream paper
    #[command(long_about = blast::LONG)]
    Blast(Box<blast::Args>),
    /// BSDP, ZSDP and AZ-SDP beside plain TCP: the experiments of the AZ-SDP paper
    Sdp(Box<sdp::SdpArgs>),
    /// Datagrams beside reliable connections and bare UDP: the datagram paper's figures 5, 6, 8 and 9, and what they are to reach
    Dgram(Box<args::DgramArgs>),
    /// MPI over connections, datagrams and weft's provider, beside the MPI's own TCP: the datagram paper's figures 13 to 15
    Mpi(mpi::MpiArgs),
    /// Chapter 4 of the thesis on this machine: set-up, registration, copies, pins, overlap, and whether its conclusions hold
    Advise(args::AdviseArgs),
    /// A distributed compiler: the thesis's chapter 5, weft cc beside distcc and distcc-pump, with virtual workers and a real build
    Cc(Box<cc::CcArgs>),
    /// Workers and daemon of that comparison; started by the suite itself
    #[command(hide = true)]
    CcPart(cc::CcPartArgs),
    /// Movies: what a server pays for its viewers, weft media beside nginx and plain HTTP; seeks, live streams, idle viewers
    Media(Box<media::MediaArgs>),
    /// The plain HTTP server of that comparison; started by the suite itself
    #[command(hide = true)]
    MediaHttp {
        /// What it serves
        file: PathBuf,
    },
    /// Data Roundabout: the figures of the thesis's chapter 7, on rings of processes, and its TCP twin
    Join(join::JoinArgs),
    /// Run a command at the end of a long link: two network namespaces with delay, jitter, rate and queue between them
    Link(Box<link::LinkArgs>),
    /// The far end of a suite; started by the suite itself
    #[command(hide = true)]
    Peer,
}

/// Runs a suite.
///
/// # Errors
/// As of [`weft_bench::run()`].
pub fn run(args: PapersArgs) -> Result<ExitCode, BenchError> {
    match args.suite {
        Suite::Exs(args) => exs::run_suite(&args),
        Suite::Blast(args) => blast::run(&args),
        Suite::Sdp(args) => sdp::run_suite(&args),
        Suite::Dgram(args) => dgram::run(&args),
        Suite::Mpi(args) => mpi::run(&args),
        Suite::Advise(args) => advise::run_suite(&args),
        Suite::Cc(args) => cc::run(&args),
        Suite::CcPart(args) => cc::part(&args).map(|()| ExitCode::SUCCESS),
        Suite::Media(args) => media::run(&args),
        Suite::MediaHttp { file } => media::serve_plain_http(&file).map(|()| ExitCode::SUCCESS),
        Suite::Join(args) => join::run(&args),
        Suite::Link(args) => link::run(&args),
        Suite::Peer => {
            weft_bench::peer::serve(&mut peer::Served::default()).map(|()| ExitCode::SUCCESS)
        }
    }
}
