//! `weft join` compared with other engines, in turn, in one run: batches on weft's channel and on the other engine's own gRPC, a join of
//! TPC-H, and band joins. Results are JSON, one line for each way; `./x papers join` starts this program and makes tables of them.
#![forbid(unsafe_code)]

mod band;
mod channels;
mod compare;
mod joins;
mod process;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use datafusion::error::{DataFusionError, Result};

pub(crate) fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// Batches from one process to another
    Channels,
    /// Lineitem with orders on two workers
    Join,
    /// Joins by a range of keys on two workers
    Band,
}

#[derive(Parser, Debug)]
#[command(about = "weft join beside other engines, as JSON lines")]
struct Options {
    /// What to measure [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    experiment: Vec<Experiment>,
    /// Rows of 64 bytes for the channels, in thousands
    #[arg(long, value_name = "N", default_value_t = 4000)]
    rows: usize,
    /// Scale factor of TPC-H
    #[arg(long, value_name = "SF", default_value_t = 1.0)]
    scale: f64,
    /// Rows of each relation of band joins, in thousands; a 25th of them for nested loops
    #[arg(long, value_name = "N", default_value_t = 1000)]
    band: u64,
    /// Runs of each; the first is not counted
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
    #[command(subcommand)]
    part: Option<process::Part>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options.part {
        Some(part) => part.serve(),
        None => measure(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<()> {
    let wanted = |e| options.experiment.is_empty() || options.experiment.contains(&e);
    let runs = options.runs.max(1);
    if wanted(Experiment::Channels) {
        channels::measure(options.rows * 1000, runs)?;
    }
    if wanted(Experiment::Join) {
        joins::measure(options.scale, runs)?;
    }
    if wanted(Experiment::Band) {
        band::measure(options.band * 1000, runs)?;
    }
    Ok(())
}
