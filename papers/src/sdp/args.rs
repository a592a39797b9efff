//! Options of `weft-papers sdp`.

use super::plan::{Row, SdpFigure};
use crate::args::seconds;
use crate::driver::Transport;
use crate::output::OutputArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  # everything, in some minutes
  weft-papers sdp --html sdp.html
  # throughput and overlap in shared memory
  weft-papers sdp --figure 6b,7a --transport local
  # buffered SDP beside plain TCP
  weft-papers sdp --stack bsdp,tcp --quick";

/// Options of `weft-papers sdp`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct SdpArgs {
    /// Which table and figures of the paper [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub figure: Vec<SdpFigure>,
    /// What is measured beside each other [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub stack: Vec<Row>,
    /// What carries SDP's connections
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [Transport::Local, Transport::Tcp])]
    pub transport: Vec<Transport>,
    /// Runs of each point; stacks take turns within each [default: 5, quick: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,
    /// Seconds of each run [default: 0.1, quick: 0.03]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Fewer places on the axes and short runs
    #[arg(long)]
    pub quick: bool,
    /// Results of earlier runs (of --json), which the tables, conclusions and files are to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl SdpArgs {
    pub(crate) fn runs(&self) -> u32 {
        self.runs.unwrap_or(if self.quick { 3 } else { 5 })
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.03 } else { 0.1 })
    }

    /// The measured rows, in the tables' order.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let wanted = |row: &Row| self.stack.is_empty() || self.stack.contains(row);
        let all = Row::value_variants().iter().copied();
        all.filter(wanted).collect()
    }
}
