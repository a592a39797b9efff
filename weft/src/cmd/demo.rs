//! `weft demo`.

use std::path::PathBuf;

use crate::demo::{self, Options};
use weft_cli::failure::{Exit, Failure};
use weft_cli::say;

/// Options of `weft demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the report to this file, as one self-contained page
    #[arg(long, value_name = "FILE", default_value = "weft-demo.html")]
    html: PathBuf,
    /// Length of the file that is moved
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = file_size)]
    size: u64,
    /// Work in this directory, for example on a disk [default: /dev/shm if it has room, so that the disk is not measured]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Number of runs of each way; the ways take turns
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Leave out the figures of the verbs
    #[arg(long)]
    no_verbs: bool,
}

/// A shorter file gives no meaningful speed.
const SMALLEST: u64 = 1 << 20;

fn file_size(text: &str) -> Result<u64, String> {
    let size = weft_report::size::parse_size(text).map_err(|e| e.to_string())?;
    if size < SMALLEST {
        return Err("the smallest file that can be timed has 1M".to_owned());
    }
    Ok(size)
}

/// Moves the file, measures, and writes the report.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let options = Options {
        html: args.html.clone(),
        size: args.size,
        dir: args.dir.clone(),
        runs: args.runs,
        verbs: !args.no_verbs,
    };
    demo::run(&options, &mut |line| say(line))?;
    Ok(Exit::Ok)
}
