//! `weft-papers join`: the figures of chapter 7 of the thesis, on rings of processes.
//!
//! Each node is a separate process on this host, so a ring of six shares the cores of one machine, and wall time has little meaning. The CPU time of
//! the busiest node stands for the time on separate machines, and the output labels each.

mod chapter;
mod engines;
mod node;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::children::{Talk, this_program};
use crate::error::{BenchError, Result, stack};
use crate::output::{self, OutputArgs};
use node::{Addresses, Carrier, How, Outcome, Plan, Work};

const MIB: usize = 1 << 20;

/// The values of `--figure`.
const FIGURES: [&str; 8] = ["7.1", "7.7", "7.9", "7.10", "7.11", "7.12", "7.14", "7.15"];

/// Options of `weft-papers join`.
#[derive(Args, Clone, Debug)]
pub struct JoinArgs {
    /// Rows of each relation in the joins, in thousands (16 bytes a row)
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rows: u32,
    /// Nodes of the largest ring
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(2..=16))]
    nodes: u32,
    /// Bytes that pass a link when transport alone is measured, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    volume: u32,
    /// Runs of each point; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    /// Only these figures (7.1 is the table of the loop delay; 7.14 stands beside 7.9)
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = FIGURES)]
    figure: Vec<String>,
    /// Measure `weft join` beside other engines, too, with this program: weft-join-bench of apps/join, which is built on its own
    #[arg(long, value_name = "PROGRAM")]
    engines: Option<PathBuf>,
    /// Results of an earlier run (of --json), which the tables, conclusions and files are to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    from: Vec<PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Be a node; started by the benchmark itself
    #[arg(long, hide = true)]
    node: bool,
}

impl JoinArgs {
    /// With the relations, nodes and bytes of an earlier run.
    fn of(&self, kept: &[Line]) -> Self {
        let mut args = self.clone();
        let most =
            |of: &dyn Fn(&Line) -> Option<usize>| Some(kept.iter().filter_map(of).max()? as u32);
        args.nodes = most(&|line| Some(line.point.nodes)).unwrap_or(args.nodes);
        let rows = most(&|line| match line.point.work {
            Work::Join {
                how: How::Hash,
                rows,
                ..
            } => Some(rows / 1000),
            _ => None,
        });
        args.rows = rows.unwrap_or(args.rows);
        let volume = most(&|line| match line.point.work {
            Work::Link { bytes } => Some(bytes / MIB),
            _ => None,
        });
        args.volume = volume.unwrap_or(args.volume);
        args
    }
}

pub(crate) fn run(args: &JoinArgs) -> Result<ExitCode> {
    if args.node {
        return node::serve().map(|()| ExitCode::SUCCESS);
    }
    let lines: Vec<Value> = output::read(&args.from)?;
    let (ways, lines): (Vec<_>, Vec<_>) = lines.into_iter().partition(engines::is_way);
    let kept = lines.into_iter().map(serde_json::from_value);
    let kept: Vec<Line> = kept
        .collect::<std::result::Result<_, _>>()
        .map_err(stack("read a line"))?;
    let args = &args.of(&kept);
    let mut output = args.output.open()?;
    let mut bench = Bench::start(args, kept, ways)?;
    let report = bench.chapter()?;
    output.lines(&bench.lines)?;
    output.finish(&report)
}

struct Process {
    talk: Talk,
    listeners: Addresses,
}

impl Process {
    fn start() -> Result<Self> {
        let mut command = Command::new(this_program()?);
        command.args(["join", "--node"]);
        let mut talk = Talk::start(&mut command, Command::spawn)?;
        let listeners = talk.hear()?;
        Ok(Self { talk, listeners })
    }
}

/// A point in its written form.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    point: Point,
    #[serde(flatten)]
    sum: Sum,
}

struct Bench<'a> {
    args: &'a JoinArgs,
    processes: Vec<Process>,
    turns: u64,
    /// The lines of an earlier run. If there are some, nothing is measured.
    kept: Vec<Line>,
    /// Its results for other engines.
    ways: Vec<Value>,
    lines: Vec<Value>,
}

/// The nodes of one turn together.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Sum {
    wall: f64,
    setup: f64,
    setup_cpu: f64,
    turn_cpu: f64,
    waited: f64,
    matches: u64,
}

impl Sum {
    fn median(sums: &[Self]) -> Self {
        let median = |of: fn(&Self) -> f64| {
            let mut values: Vec<f64> = sums.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        Self {
            wall: median(|sum| sum.wall),
            setup: median(|sum| sum.setup),
            setup_cpu: median(|sum| sum.setup_cpu),
            turn_cpu: median(|sum| sum.turn_cpu),
            waited: median(|sum| sum.waited),
            // The same in every run.
            matches: sums[0].matches,
        }
    }

    /// Set-up and join.
    fn cpu(&self) -> f64 {
        self.setup_cpu + self.turn_cpu
    }
}

/// The parameters of one point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Point {
    carrier: Carrier,
    nodes: usize,
    element: usize,
    work: Work,
}

impl<'a> Bench<'a> {
    fn start(args: &'a JoinArgs, kept: Vec<Line>, ways: Vec<Value>) -> Result<Self> {
        let processes = if args.from.is_empty() { args.nodes } else { 0 };
        let processes = (0..processes).map(|_| Process::start());
        Ok(Self {
            args,
            processes: processes.collect::<Result<_>>()?,
            turns: 0,
            kept,
            ways,
            lines: Vec::new(),
        })
    }

    /// The medians of the repetitions, separately for each measure. Several points are measured in turn, so that a disturbance affects all of them.
    fn points(&mut self, points: &[Point]) -> Result<Vec<Sum>> {
        let medians = if self.args.from.is_empty() {
            let mut sums = vec![Vec::new(); points.len()];
            for _ in 0..self.args.repetitions {
                for (point, sums) in points.iter().zip(&mut sums) {
                    sums.push(self.turn(point)?);
                }
            }
            sums.iter().map(|sums| Sum::median(sums)).collect()
        } else {
            let sums = points.iter().map(|point| self.kept(point));
            sums.collect::<Result<Vec<Sum>>>()?
        };
        for (&point, &sum) in points.iter().zip(&medians) {
            let line = serde_json::to_value(Line { point, sum });
            self.lines.push(line.map_err(stack("write a line"))?);
        }
        Ok(medians)
    }

    /// The earlier run's result for a point. Figures measure some points anew, so each result is used once, in order.
    fn kept(&mut self, point: &Point) -> Result<Sum> {
        let at = self.kept.iter().position(|line| line.point == *point);
        let missing = "the earlier run has not measured all of this; --figure chooses";
        let at = at.ok_or_else(|| BenchError::Usage(missing.to_owned()))?;
        Ok(self.kept.remove(at).sum)
    }

    fn turn(&mut self, point: &Point) -> Result<Sum> {
        let Point {
            carrier,
            nodes,
            element,
            work,
        } = *point;
        self.turns += 1;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.turns.to_be_bytes());
        let address = |process: &Process| match carrier {
            Carrier::Rdma => process.listeners.rdma,
            Carrier::Tcp => process.listeners.tcp,
        };
        let addresses: Vec<_> = self.processes[..nodes].iter().map(address).collect();
        let raw = self.processes[1].listeners.raw;
        for me in 0..nodes {
            let plan = Plan {
                carrier,
                nodes: addresses.clone(),
                raw,
                me,
                id,
                element,
                work,
            };
            self.processes[me].talk.say(&plan)?;
        }
        let mut sum = Sum::default();
        for process in &mut self.processes[..nodes] {
            let outcome: Outcome = process.talk.hear()?;
            sum.wall = sum.wall.max(outcome.turn);
            sum.setup = sum.setup.max(outcome.setup);
            sum.setup_cpu = sum.setup_cpu.max(outcome.setup_cpu);
            sum.turn_cpu = sum.turn_cpu.max(outcome.turn_cpu);
            sum.waited = sum.waited.max(outcome.waited);
            sum.matches += outcome.matches;
        }
        Ok(sum)
    }

    fn rows(&self) -> usize {
        self.args.rows as usize * 1000
    }

    fn joining(
        &self,
        carrier: Carrier,
        nodes: usize,
        how: How,
        skew: f64,
        threads: usize,
    ) -> Point {
        let rows = match how {
            // The work of nested loops grows with the square.
            How::Nested => self.rows() / 40,
            _ => self.rows(),
        };
        let work = Work::Join {
            how,
            rows,
            skew,
            threads,
        };
        Point {
            carrier,
            nodes,
            element: 4 * MIB,
            work,
        }
    }
}
