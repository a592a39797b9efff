//! The command line of `weft bench`.

use crate::driver::{Memory, Stack, Transport};
use crate::named::named;
use crate::output::OutputArgs;
use crate::size::{Sizes, sizes};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use weft_verbs::any::Choice;

const VERBS_EXAMPLES: &str = "\
Examples:
  # the page of results that are kept, with each plot as a file beside it
  weft bench verbs --from docs/figures/verbs.jsonl --html verbs.html --svg .";

/// Options of `weft bench verbs`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = VERBS_EXAMPLES)]
pub struct VerbsArgs {
    /// Results of earlier runs (of --json), which the tables and files are to have as well
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// What to measure, separated by commas [default: send,write,read,rate; nothing with --from; all: everything]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        hide_possible_values = false
    )]
    pub op: Vec<VerbsOp>,
    /// What to report of the transfers
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [Figure::Bandwidth, Figure::Latency])]
    pub figure: Vec<Figure>,
    /// Beside the other ways of one host, in the same run: memcpy, a bare system call, and the benchmarks of UCX and
    /// libfabric where installed; 8 B to 16 MiB, spinning [--op, --stack and --size still choose]
    #[arg(long)]
    pub peers: bool,
    /// Beside TLS, in the same run: weft over TCP with TLS 1.3 (weft-tls: fresh keys, any key taken, no CRC) and rustls over
    /// plain TCP (tcp-tls), with the same ciphers; short for adding weft-tls,tcp-tls to --stack
    #[arg(long)]
    pub tls: bool,
    /// The machine's RNIC of this name (`weft doctor` lists them), both ends on it, beside perftest on the same; short for --stack
    /// device,perftest-device, without CRC and spinning
    #[arg(long, value_name = "NAME")]
    pub device: Option<Choice>,
    /// What runs beside.
    #[command(flatten)]
    pub load: LoadArgs,
    /// The options that every suite has.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Busy processes beside a measurement.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Busy loops that run beside the measurement, to see what holds on a busy machine
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1024))]
    pub loops: u32,
    /// The niceness of these loops
    #[arg(long, value_name = "N", default_value_t = 0, requires = "loops", value_parser = clap::value_parser!(i32).range(0..=19))]
    pub loops_nice: i32,
}

/// Options that every suite has.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// How long and how often.
    #[command(flatten)]
    pub effort: EffortArgs,
    /// What carries weft's bytes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [Transport::Tcp])]
    pub transport: Vec<Transport>,
    /// Whose code carries the bytes, separated by commas [default: weft,tcp; with --tls: weft-tls,tcp-tls too; with --peers:
    /// all but these and weft-iw]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        hide_possible_values = false
    )]
    pub stack: Vec<Stack>,
    /// Whose memory weft's buffers are [default: allocated; both for streams of writes over local]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub memory: Vec<Memory>,
    /// With or without the CRC of each FPDU
    #[arg(long, value_name = "WHICH", default_value_t = Switch::Both)]
    pub crc: Switch,
    /// How both sides wait in latency points: spinning or sleeping
    #[arg(long, value_name = "WHICH", default_value_t = Poll::Both)]
    pub poll: Poll,
    /// Bytes that one run of a throughput point moves, instead of a time
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse_size)]
    pub bytes: Option<u64>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Writes each plot as an SVG file into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
}

impl CommonArgs {
    pub fn stacks(&self) -> &[Stack] {
        if self.stack.is_empty() {
            &[Stack::Weft, Stack::Tcp]
        } else {
            &self.stack
        }
    }
}

/// How long a suite measures, how often, and which sizes of messages.
#[derive(Args, Clone, Debug)]
pub struct EffortArgs {
    /// Message sizes: a list, or ranges by powers: 64,4K or 1..64M or 1..64M*4 [default: those of each figure]
    #[arg(long, value_name = "LIST|RANGE")]
    pub size: Option<Sizes>,
    /// Runs of each point; the stacks take turns within each run [default: 10, quick: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,
    /// Seconds that one run of a point should take [default: 0.15, quick: 0.03]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Few sizes and short runs
    #[arg(long)]
    pub quick: bool,
}

impl EffortArgs {
    pub fn runs(&self) -> u32 {
        self.runs.unwrap_or(if self.quick { 3 } else { 10 })
    }

    pub fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.03 } else { 0.15 })
    }

    /// The chosen sizes, or `full` (`quick` with `--quick`).
    pub fn sizes(&self, full: &str, quick: &str) -> Vec<u64> {
        match &self.size {
            Some(sizes) => sizes.0.clone(),
            None => sizes(if self.quick { quick } else { full }),
        }
    }
}

pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 3600.0 => Ok(value),
        _ => Err("write a number of seconds from 0 to 3600".to_owned()),
    }
}

/// What `--op` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum VerbsOp {
    /// Send
    Send,
    /// RDMA Write
    Write,
    /// RDMA Write with immediate data
    WriteImm,
    /// RDMA Read
    Read,
    /// Atomic fetch and add
    FetchAdd,
    /// Atomic compare and swap
    CompareSwap,
    /// Atomic swap
    Swap,
    /// 64 B sends, 128 in flight
    Rate,
    /// Registration beside copying (thesis figs. 4.3-4.10)
    Register,
    /// Steps of a connection's life (thesis table 4.1)
    Setup,
    /// The iw library beside the verbs (thesis fig. 3.21)
    Iw,
    /// Buffers reused, registered anew or copied (thesis fig. 4.11)
    Buffers,
    /// Memory per idle connection
    Memory,
    /// Everything
    All,
}

named! {
    /// The values of `--figure`.
    pub enum Figure {
        /// Throughput and CPU time
        Bandwidth = "bandwidth",
        /// Latency
        Latency = "latency",
    }
}

named! {
    /// On, off or one after the other.
    pub enum Switch {
        On = "on",
        Off = "off",
        Both = "both",
    }
}

impl Switch {
    pub fn values(self) -> &'static [bool] {
        match self {
            Self::On => &[true],
            Self::Off => &[false],
            Self::Both => &[false, true],
        }
    }
}

named! {
    /// How a side waits for completions.
    pub enum Poll {
        Busy = "busy",
        Block = "block",
        Both = "both",
    }
}

impl Poll {
    /// Whether to spin: the values to measure.
    pub fn values(self) -> &'static [bool] {
        match self {
            Self::Busy => &[true],
            Self::Block => &[false],
            Self::Both => &[true, false],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BenchArgs, Suite};
    use clap::Parser;

    fn verbs(line: &str) -> Result<VerbsArgs, clap::Error> {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        match BenchArgs::try_parse_from(words)?.suite {
            Suite::Verbs(args) => Ok(*args),
            _ => panic!("{line} is not the verbs suite"),
        }
    }

    #[test]
    fn defaults() {
        let args = verbs("verbs").unwrap();
        assert!(args.op.is_empty());
        assert_eq!(args.common.effort.runs(), 10);
        assert_eq!(args.common.crc.values(), [false, true]);
        assert_eq!(args.common.stacks(), [Stack::Weft, Stack::Tcp]);
        assert!(!args.peers && !args.tls);
        assert_eq!(args.common.effort.sizes("1,2", "3"), [1, 2]);
    }

    #[test]
    fn options() {
        let args = verbs("verbs --op write_imm,fetch_add --size 1..4K*4,3 --crc on --poll block --quick --runs 2 --seconds 0.5 --json a --html b").unwrap();
        assert_eq!(args.op, [VerbsOp::WriteImm, VerbsOp::FetchAdd]);
        assert_eq!(
            args.common.effort.sizes("1", "1"),
            [1, 3, 4, 16, 64, 256, 1024, 4096]
        );
        assert_eq!(args.common.effort.runs(), 2);
        assert_eq!(args.common.crc.values(), [true]);
        assert_eq!(args.common.poll.values(), [false]);
        for bad in [
            "verbs --runs 0",
            "verbs --seconds 0",
            "verbs --size x",
            "verbs --op fly",
            "verbs --transport pigeon",
            "verbs --stack ucx",
            "verbs --memory borrowed",
            "",
        ] {
            assert!(verbs(bad).is_err(), "{bad}");
        }
    }
}
