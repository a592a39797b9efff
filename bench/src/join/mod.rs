//! `weft bench join`: the figures of chapter 7 of the thesis, on rings of processes.
//!
//! Each node is a process of its own on this host, so a ring of six shares the cores of one machine. Wall time says little then. The CPU time of the
//! busiest node stands for the time that a machine of its own would need, and the output says which is which.

mod chapter;
mod engines;
mod node;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use clap::Args;
use serde::Deserialize;

use crate::error::{BenchError, Result};
use crate::output::OutputArgs;
use node::{Carrier, Doors, How, Outcome, Plan, Work, failed};

const MIB: usize = 1 << 20;

/// What can be asked for.
const FIGURES: [&str; 8] = ["7.1", "7.7", "7.9", "7.10", "7.11", "7.12", "7.14", "7.15"];

/// Options of `weft bench join`.
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
    engines: Option<std::path::PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Be a node; started by the benchmark itself
    #[arg(long, hide = true)]
    node: bool,
}

pub(crate) fn run(args: &JoinArgs) -> Result<ExitCode> {
    if args.node {
        return node::serve().map(|()| ExitCode::SUCCESS);
    }
    let mut output = args.output.open()?;
    let mut bench = Bench::start(args)?;
    let report = bench.chapter()?;
    output.lines(&bench.lines)?;
    output.finish(&report)
}

struct Process {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    doors: Doors,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start() -> Result<Self> {
        let program = std::env::current_exe().map_err(BenchError::system("this program"))?;
        let mut child = Command::new(program)
            .args(["bench", "join", "--node"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::system("starting a node"))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let from = from.ok_or_else(|| BenchError::PeerGone("no pipes".into()))?;
        let mut from = BufReader::new(from);
        let doors = hear(&mut from)?;
        Ok(Self {
            child,
            to,
            from,
            doors,
        })
    }
}

fn hear<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    let read = from.read_line(&mut line);
    match read.map_err(|e| BenchError::PeerGone(e.to_string()))? {
        0 => Err(BenchError::PeerGone("a node ended".into())),
        _ => serde_json::from_str(&line).map_err(|e| BenchError::PeerGone(e.to_string())),
    }
}

struct Bench<'a> {
    args: &'a JoinArgs,
    processes: Vec<Process>,
    turns: u64,
    lines: Vec<serde_json::Value>,
}

/// The nodes of one turn together.
#[derive(Clone, Copy, Debug, Default)]
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

/// What is measured at one point.
#[derive(Clone, Copy)]
struct Point {
    carrier: Carrier,
    nodes: usize,
    element: usize,
    work: Work,
}

impl<'a> Bench<'a> {
    fn start(args: &'a JoinArgs) -> Result<Self> {
        let processes = (0..args.nodes).map(|_| Process::start());
        Ok(Self {
            args,
            processes: processes.collect::<Result<_>>()?,
            turns: 0,
            lines: Vec::new(),
        })
    }

    /// The medians of the repetitions, each measure by itself.
    fn point(&mut self, carrier: Carrier, nodes: usize, element: usize, work: Work) -> Result<Sum> {
        Ok(self
            .points(&[Point {
                carrier,
                nodes,
                element,
                work,
            }])?
            .remove(0))
    }

    /// The same for several points that are compared: they take turns, so that what disturbs one run meets all of them.
    fn points(&mut self, points: &[Point]) -> Result<Vec<Sum>> {
        let mut sums = vec![Vec::new(); points.len()];
        for _ in 0..self.args.repetitions {
            for (point, sums) in points.iter().zip(&mut sums) {
                sums.push(self.turn(point)?);
            }
        }
        let medians: Vec<Sum> = sums.iter().map(|sums| Sum::median(sums)).collect();
        for (point, sum) in points.iter().zip(&medians) {
            self.lines.push(serde_json::json!({
                "carrier": point.carrier, "nodes": point.nodes, "element": point.element, "work": point.work, "wall": sum.wall, "setup": sum.setup,
                "setup_cpu": sum.setup_cpu, "turn_cpu": sum.turn_cpu, "waited": sum.waited, "matches": sum.matches,
            }));
        }
        Ok(medians)
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
            Carrier::Rdma => process.doors.rdma,
            Carrier::Tcp => process.doors.tcp,
        };
        let addresses: Vec<_> = self.processes[..nodes].iter().map(address).collect();
        let raw = self.processes[1].doors.raw;
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
            let text = serde_json::to_string(&plan).map_err(|e| failed("a plan")(&e))?;
            let to = self.processes[me].to.as_mut();
            let to = to.ok_or_else(|| BenchError::PeerGone("closed".into()))?;
            writeln!(to, "{text}")
                .and_then(|()| to.flush())
                .map_err(|e| BenchError::PeerGone(e.to_string()))?;
        }
        let mut sum = Sum::default();
        for process in &mut self.processes[..nodes] {
            let outcome: Outcome = hear(&mut process.from)?;
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
            // Its work grows with the square.
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
