//! `weft-papers mpi`: the figures 13 to 19 of the datagram-iWARP paper. Our small programs run under each installed MPI, over each transport of `weft mpi`;
//! the transports run in turn, the MPI's own TCP among them.

mod hosts;
mod program;
mod report;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Args;

use self::hosts::Hosts;
use self::program::{Mpi, Programs};
use self::report::{BANDWIDTH, Key, LATENCY, MEMORY, Results};
use crate::error::{BenchError, Result, failed, stack};
use crate::link::{parse_rate, parse_time};
use crate::named::named;
use crate::output::{self, Output, OutputArgs};
use crate::progress::Progress;
use crate::size::Sizes;
use crate::usage;
use weft_link::Shape;

/// Options of `weft-papers mpi`.
#[derive(Args, Clone, Debug)]
pub struct MpiArgs {
    /// Which MPIs: openmpi, mpich (Debian's), or a folder with another's mpirun and mpicc [default: Debian's, if installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    mpi: Vec<String>,
    /// Which transports of `weft mpi`; tcp is the MPI's own
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "rc,ud,weft,tcp", value_parser = ["rc", "ud", "weft", "tcp"])]
    transport: Vec<String>,
    /// Sizes of messages: a list, or ranges by powers: 64,4K or 1..1M or 1..1M*4
    #[arg(long, value_name = "LIST", default_value = "8,2K,64K,1M")]
    size: Sizes,
    /// Numbers of ranks at which memory and kernels are measured; 0: not at all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u32).range(0..=128))]
    ranks: Vec<u32>,
    /// Which kernels run, on numbers of ranks that are powers of two
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        value_enum,
        default_value = "is,cg,mg,lu,radix,smg"
    )]
    kernel: Vec<Kernel>,
    /// The size of the kernels' problems, as the NAS Parallel Benchmarks name it
    #[arg(long, value_name = "CLASS", default_value = "S", value_parser = ["S", "W", "A", "B"])]
    class: String,
    /// Numbers of hosts, as network namespaces with lines between them; 1: this host, without a network
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u8).range(1..=i64::from(weft_link::MOST_HOSTS)))]
    hosts: Vec<u8>,
    /// How long a packet travels between two hosts
    #[arg(long, value_name = "TIME", default_value = "50us", value_parser = parse_time)]
    delay: Duration,
    /// Bits per second of the line out of each host
    #[arg(long, value_name = "RATE", default_value = "10G", value_parser = parse_rate)]
    rate: u64,
    /// Bytes of the largest packet on the lines
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=65_535))]
    mtu: u32,
    /// Whether weft uses shared memory between ranks of this host
    #[arg(long, value_name = "WHEN", default_value = "off", value_parser = ["off", "auto"])]
    local: String,
    /// Messages each way of a measurement; 0: only memory and kernels
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    rounds: u32,
    /// Turns of each measurement
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Seconds that one job may take
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    limit: u32,
    /// Results of earlier runs (of --json), which the tables, conclusions and files are to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    from: Vec<PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    output: OutputArgs,
}

named! {
    enum Kernel {
        /// No kernel
        None = "none",
        Ep = "ep",
        Is = "is",
        Cg = "cg",
        Mg = "mg",
        Lu = "lu",
        Radix = "radix",
        /// hypre's multigrid, where hypre and its headers are installed
        Smg = "smg",
    }
}

pub(crate) fn run(args: &MpiArgs) -> Result<ExitCode> {
    let mut results = Results::read(output::read(&args.from)?);
    let mut output = args.output.open()?;
    let load = usage::load_average();
    if args.from.is_empty() {
        let mpis = program::find(&args.mpi)?;
        let dir = tempfile::tempdir().map_err(BenchError::system("make a folder"))?;
        for mpi in &mpis {
            let programs = program::compile(mpi, dir.path())?;
            for &count in &args.hosts {
                let shape = Shape {
                    delay: args.delay,
                    rate: Some(args.rate),
                    ..Shape::default()
                };
                let hosts = (count > 1).then(|| Hosts::new(shape, args.mtu, count, dir.path()));
                let place = Place {
                    mpi,
                    hosts: hosts.transpose().map_err(stack("make hosts"))?,
                };
                measure(args, &place, &programs, &mut results, &mut output);
            }
        }
    }
    output.lines(results.lines())?;
    let intro = if args.from.is_empty() {
        format!(
            "Medians of {} turns; shared memory of weft is {}. Lines between hosts have {} Gb/s, {} µs each way and an MTU of {}. The load of the last minute was \
             {load} at the start.",
            args.runs,
            args.local,
            args.rate as f64 / 1e9,
            args.delay.as_micros(),
            args.mtu
        )
    } else {
        "Results of several runs of this suite, which are kept as JSON.".to_owned()
    };
    output.finish(&report::report(&results, intro))
}

/// An MPI, and the hosts of its jobs if they are others than this one.
struct Place<'a> {
    mpi: &'a Mpi,
    hosts: Option<Hosts>,
}

impl Place<'_> {
    fn name(&self) -> String {
        match &self.hosts {
            Some(hosts) => format!("{}, {} hosts", self.mpi.name, hosts.count()),
            None => self.mpi.name.clone(),
        }
    }
}

/// A program with its arguments, on this many ranks.
struct Job<'a> {
    ranks: u32,
    program: &'a Path,
    arguments: Vec<String>,
    /// The text in its output that confirms correct data.
    right: &'static str,
}

fn jobs<'a>(args: &MpiArgs, mpi: &Mpi, programs: &'a Programs) -> Vec<Job<'a>> {
    let job = |ranks, arguments| Job {
        ranks,
        program: &programs.exchange,
        arguments,
        right: "all data as sent",
    };
    let mut jobs = Vec::new();
    if args.rounds > 0 {
        let mut pair = vec!["pair".to_owned(), args.rounds.to_string()];
        pair.extend(args.size.0.iter().map(u64::to_string));
        jobs.push(job(2, pair));
    }
    let ranks = || args.ranks.iter().copied().filter(|ranks| *ranks > 0);
    jobs.extend(ranks().map(|ranks| job(ranks, vec!["memory".to_owned()])));
    for kernel in args.kernel.iter().filter(|k| **k != Kernel::None) {
        if *kernel == Kernel::Smg && !programs.smg {
            let name = &mpi.name;
            eprintln!(
                "weft: {name}: no smg: no hypre for this MPI (Debian's Open MPI: libhypre-dev)"
            );
            continue;
        }
        jobs.extend(ranks().filter(|r| r.is_power_of_two()).map(|ranks| Job {
            ranks,
            program: &programs.kernels,
            arguments: vec![kernel.name().to_owned(), args.class.clone()],
            right: " verified",
        }));
    }
    jobs
}

/// All of one MPI.
fn measure(
    args: &MpiArgs,
    place: &Place<'_>,
    programs: &Programs,
    results: &mut Results,
    output: &mut Output,
) {
    let jobs = jobs(args, place.mpi, programs);
    let name = &place.name();
    let has = |transport: &&String| place.mpi.has(transport);
    let transports: Vec<&String> = args.transport.iter().filter(has).collect();
    let steps = args.runs as usize * jobs.len() * transports.len();
    let mut progress = Progress::new(steps as u64);
    for turn in 0..args.runs {
        for job in &jobs {
            for transport in &transports {
                let what = job.arguments.join(" ");
                progress.at(&format!(
                    "{name} on {transport}, {} ranks, {what}",
                    job.ranks
                ));
                match one(args, place, transport, job) {
                    Ok(text) => take(&text, |what, at, value| {
                        let key = Key {
                            mpi: name.clone(),
                            what,
                            at,
                            transport: (*transport).clone(),
                        };
                        results.add(key, turn, value);
                    }),
                    Err(error) => {
                        let ranks = job.ranks;
                        let what = format!("{name} on {transport}, {ranks} ranks, {what}");
                        output.failed(&what, &error);
                    }
                }
                progress.step();
            }
        }
    }
}

/// Runs one job. Returns its output.
fn one(args: &MpiArgs, place: &Place<'_>, transport: &str, job: &Job<'_>) -> Result<String> {
    let mut command = match &place.hosts {
        Some(_) => hosts::surrounded("timeout"),
        None => Command::new("timeout"),
    };
    command.args(["-k", "5", &args.limit.to_string()]);
    place.mpi.command(&mut command, &args.local, transport);
    if let Some(hosts) = &place.hosts {
        place.mpi.on(&mut command, hosts);
    }
    command
        .args(["-np", &job.ranks.to_string()])
        .arg(job.program)
        .args(&job.arguments)
        .stdin(Stdio::null());
    let output = match &place.hosts {
        Some(hosts) => hosts.first().enter(|| command.output()).flatten(),
        None => command.output(),
    };
    let output = output.map_err(BenchError::system("start timeout(1)"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() && text.lines().any(|line| line.ends_with(job.right)) {
        return Ok(text);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    let why = format!("{}: {}", output.status, last.unwrap_or("it says nothing"));
    Err(failed("run a job", why))
}

/// The values of a program's output.
fn take(text: &str, mut add: impl FnMut(String, u64, f64)) {
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |word: &str| word.parse::<f64>().ok();
        match words[..] {
            ["pair", bytes, time, rate] => {
                let Some(bytes) = number(bytes) else { continue };
                for (what, value) in [(LATENCY, time), (BANDWIDTH, rate)] {
                    if let Some(value) = number(value) {
                        add(what.to_owned(), bytes as u64, value);
                    }
                }
            }
            ["memory", ranks, kib] => {
                if let (Some(ranks), Some(kib)) = (number(ranks), number(kib)) {
                    add(MEMORY.to_owned(), ranks as u64, kib);
                }
            }
            ["kernel", name, class, ranks, time, inside, kib, _] => {
                let Some(ranks) = number(ranks) else { continue };
                for (what, value) in [("s", time), ("s in MPI", inside), ("KiB", kib)] {
                    let what = format!("{name} {class}, {what}");
                    if let Some(value) = number(value) {
                        add(what.clone(), ranks as u64, value);
                    }
                }
            }
            _ => {}
        }
    }
}
