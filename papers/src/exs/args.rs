//! Options of `weft-papers exs`.

use super::experiment::Figure;
use crate::args::seconds;
use crate::driver::Transport;
use crate::link::ShapeArgs;
use crate::output::OutputArgs;
use clap::Args;

const EXAMPLES: &str = "\
Examples:
  # everything, in some minutes
  weft-papers exs --html exs.html
  # the stream paper's figure 9 over TCP
  weft-papers exs --figure 9a,9b --transport tcp
  # over a distance of 48 ms there and back (needs root)
  weft-papers exs --figure 13 --delay 24ms
  # with jitter
  weft-papers exs --figure 13 --jitter 2ms";

/// Options of `weft-papers exs`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct ExsArgs {
    /// Which figures of the papers, and which targets [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub figure: Vec<Figure>,
    /// What carries the connections; figure 13 is always over TCP
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [Transport::Local, Transport::Tcp])]
    pub transport: Vec<Transport>,
    /// Repetitions of each point; modes take turns within each [default: 5, quick: 3; at most 3 over the distance]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repetitions: Option<u32>,
    /// Seconds of each run [default: 0.1, quick: 0.03]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Seconds of each run over the distance [default: 2]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub distance_seconds: Option<f64>,
    /// The receiver's intermediate buffer [default: the sockets' 1M; 64M over the distance]
    #[arg(long, value_name = "SIZE", value_parser = buffer)]
    pub buffer: Option<u32>,
    /// With a CRC over each FPDU
    #[arg(long)]
    pub crc: bool,
    /// Fewer places on the axes and short runs
    #[arg(long)]
    pub quick: bool,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// The link of figure 13; 4 Gb/s unless told otherwise.
    #[command(
        flatten,
        next_help_heading = "Distance (figure 13; 4 Gb/s unless --rate says otherwise)"
    )]
    pub link: ShapeArgs,
}

impl ExsArgs {
    pub(crate) fn repetitions(&self) -> u32 {
        self.repetitions.unwrap_or(if self.quick { 3 } else { 5 })
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.03 } else { 0.1 })
    }
}

fn buffer(text: &str) -> Result<u32, String> {
    let size = crate::size::parse_size(text).map_err(|error| error.to_string())?;
    let fits = u32::try_from(size)
        .ok()
        .filter(|size| (4096..=1 << 30).contains(size));
    fits.ok_or_else(|| "a buffer is from 4K to 1G".to_owned())
}
