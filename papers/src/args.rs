//! Options of the suites of datagrams and costs, and those that they share with `weft bench`.

use crate::named::named;
use crate::output::OutputArgs;
use crate::size::Sizes;
use clap::Args;
use std::path::PathBuf;
pub(crate) use weft_bench::args::{EffortArgs, VerbsArgs, seconds};

const DGRAM_EXAMPLES: &str = "\
Examples:
  # latency and bandwidth, in some minutes
  weft-papers dgram --html dgram.html
  # latency of two sizes
  weft-papers dgram --figure 5 --size 64,1K
  # over a link that loses packets (needs root)
  weft-papers dgram --figure 9
  # without being root
  unshare -Ur weft-papers dgram --figure 9";

/// Options of `weft-papers dgram`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = DGRAM_EXAMPLES)]
pub struct DgramArgs {
    /// Which figures of the paper [default: 5,6; none with --from]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub figure: Vec<DgramFigure>,
    /// Results of earlier runs (of --json), which the tables, conclusions and files are to have as well
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// How long and how often.
    #[command(flatten)]
    pub effort: EffortArgs,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

named! {
    /// The figures of `weft-papers dgram`.
    pub enum DgramFigure {
        /// Latency of Send and Write-Record beside RC
        Five = "5",
        /// Their bandwidth
        Six = "6",
        /// One sender and one to three receivers: a group beside a message to each
        Seven = "7",
        /// What arrives of messages over a link that loses packets, with Send and Write-Record (also 8; needs root)
        #[value(alias = "8")]
        Nine = "9",
        /// How long VLC buffers, by UDP and by HTTP, plain and under weft run (needs vlc and ffmpeg)
        Ten = "10",
        /// Calls of sipp over UDP and TCP, plain and under weft run (needs sip-tester)
        Eleven = "11",
        /// Memory of a server of 10,000 clients: datagrams beside connections
        Twelve = "12",
    }
}

const ADVISE_EXAMPLES: &str = "\
Examples:
  # all tables and figures of the chapter that can be remade, in a minute or two
  weft-papers advise --html advise.html
  # fewer sizes and runs
  weft-papers advise --quick";

/// Options of `weft-papers advise`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = ADVISE_EXAMPLES)]
pub struct AdviseArgs {
    /// Sizes of buffers: a list, or ranges by powers: 4K,1M or 1K..64M*4 [default: 1K..64M*4, quick: 4K..16M*4]
    #[arg(long, value_name = "LIST|RANGE")]
    pub size: Option<Sizes>,
    /// Runs of each point [default: 15, quick: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,
    /// Fewer sizes and short runs
    #[arg(long)]
    pub quick: bool,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}
