//! Chapter 5 of "iWARP Applicability" on this machine: a master with a processor of its own, distcc, distcc-pump and `weft cc` in one run.
//!
//! The scaling figure needs more machines than there are. So workers are virtual: the master does all that it does for a real build (it preprocesses, or lets
//! workers read its headers, hands over, takes the object), and a worker's compiler sleeps as long as the real one took and leaves the object that it left.

mod conclusions;
mod part;
mod record;
mod scaling;
mod systems;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use serde_json::json;

use crate::aims;
use crate::error::{BenchError, Result};
use crate::output::OutputArgs;
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine};
use crate::usage::load_average;

pub use part::CcPartArgs;
pub(crate) use part::part;
use scaling::Point;
use systems::{Processors, System};

const EXAMPLES: &str = "\
Examples:
  apt-get source redis
  weft bench cc --source redis-7.0.15 --html cc.html \\
    --make '-C src MALLOC=libc redis-server'
  weft bench cc --source redis-7.0.15 --build 3 --only-build \\
    --make '-C src MALLOC=libc redis-server'";

/// Options of `weft bench cc`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct CcArgs {
    /// A tree of C sources that `make CC=...` builds; it is copied
    #[arg(long, value_name = "DIR")]
    source: PathBuf,
    /// Arguments of make, with blanks between
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "",
        allow_hyphen_values = true
    )]
    make: String,
    /// Virtual workers
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 2, 4, 7, 10, 14], value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: Vec<u16>,
    /// Compilers to compare [default: all that are installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    system: Vec<System>,
    /// Seconds of each point
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    seconds: f64,
    /// Compilations of the make that are recorded and replayed
    #[arg(long, value_name = "N", default_value_t = 40)]
    jobs: usize,
    /// Virtual workers are so many times as fast as this machine
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pace: f64,
    /// Make so many times with each system and two workers that compile
    #[arg(long, value_name = "N", default_value_t = 0)]
    build: u32,
    /// Leave the virtual workers out
    #[arg(long)]
    only_build: bool,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Runs make with this compiler.
fn make(
    tree: &Path,
    args: &[String],
    compiler: &str,
    at_once: usize,
    env: &[(OsString, OsString)],
) -> Result<()> {
    let done = Command::new("make")
        .current_dir(tree)
        .args(args)
        .arg(format!("-j{at_once}"))
        .arg(format!("CC={compiler}"))
        .envs(env.iter().map(|(name, value)| (name, value)))
        .env_remove("MAKEFLAGS")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(BenchError::system("run make"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let last: Vec<_> = said.lines().rev().take(3).collect();
    Err(BenchError::Stack {
        what: "make",
        why: format!("{}: {}", done.status, last.join("; ")),
    })
}

/// A folder that is removed at the end. distccd changes its user: others must be able to read what is here.
fn folder(place: &Path) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new()
        .prefix("weft-bench-cc-")
        .tempdir_in(place)
        .map_err(BenchError::system("make a folder"))?;
    fs::set_permissions(made.path(), fs::Permissions::from_mode(0o755))
        .map_err(BenchError::system("make a folder"))?;
    Ok(made)
}

/// Runs the suite.
pub(crate) fn run(args: &CcArgs) -> Result<ExitCode> {
    if args.seconds.min(args.pace) <= 0.0 || args.jobs == 0 {
        return Err(BenchError::Usage(
            "seconds, pace and jobs are greater than 0".into(),
        ));
    }
    let mut output = args.output.open()?;
    let systems = if args.system.is_empty() {
        System::installed()
    } else {
        args.system.clone()
    };
    let words: Vec<String> = args.make.split_whitespace().map(str::to_owned).collect();
    let memory = folder(Path::new("/dev/shm"))?;
    let disk = folder(&std::env::temp_dir())?;
    let mut lines = Vec::new();
    let mut report = Report::new("weft bench cc: a distributed compiler (chapter 5 of the thesis)");
    report.intro = vec![
        format!("{}; load before the run: {}.", machine(), load_average()),
        "Master and virtual workers are on one machine, joined by the loopback interface: the master on its first processor, all else on the others. distcc is in the clear, weft by TLS 1.3.".into(),
    ];
    let mut verdicts = Vec::new();
    if !args.only_build {
        report.intro.push(format!(
            "Each point was measured once, for {} s: differences of some percent mean nothing.",
            args.seconds
        ));
        let points = scale(
            args,
            &words,
            &systems,
            memory.path(),
            disk.path(),
            &mut report,
        )?;
        lines.extend(points.iter().map(Point::json));
        verdicts.extend(conclusions::of_points(&points));
    }
    if args.build > 0 {
        let times = build(args, &words, &systems, memory.path())?;
        if args.build == 1 {
            report
                .intro
                .push("Each build was made once: differences of some percent mean nothing.".into());
        }
        let mut table = Table::new(&[
            "make with two workers of this machine",
            "s, median",
            "s, all",
        ]);
        for (system, seconds) in &times {
            let all: Vec<_> = seconds.iter().map(|s| format!("{s:.1}")).collect();
            let median = conclusions::median(seconds);
            table.push([
                system.name().to_owned(),
                format!("{median:.1}"),
                all.join(", "),
            ]);
            lines.push(json!({"bench": "cc", "figure": "build", "system": system.name(), "seconds": seconds, "load": load_average()}));
        }
        report.sections.push(Section::new("A build").table(table));
        verdicts.extend(conclusions::of_builds(&times));
    }
    lines.extend(verdicts.iter().map(|aim| aim.json("cc")));
    let title = "The chapter's conclusions, and what weft cc is to reach";
    report.sections.extend(aims::section(title, &verdicts));
    output.lines(&lines)?;
    output.finish(&report)
}

/// Records, and measures every system with every number of workers, in turn.
fn scale(
    args: &CcArgs,
    words: &[String],
    systems: &[System],
    memory: &Path,
    disk: &Path,
    report: &mut Report,
) -> Result<Vec<Point>> {
    let tree = scaling::copy(&args.source, memory.join("tree"))?;
    eprintln!("recording a make");
    let recorded = record::record(&tree, words, memory, args.jobs, args.pace)?;
    let on_disk = if systems.contains(&System::TcpDisk) {
        scaling::copy(&tree, disk.join("tree"))?
    } else {
        PathBuf::new()
    };
    let count = recorded.jobs.len();
    let mean = recorded.jobs.iter().map(|job| job.compile).sum::<f64>() / count as f64;
    report.intro.push(format!(
        "{count} compilations of `make {}` in turn; compilers took {:.0} ms on average when they were recorded, and take {:.0} ms here. Each system had jobs before that are not counted.",
        args.make,
        mean * args.pace * 1e3,
        mean * 1e3
    ));
    let processors = Processors::find()?;
    let mut points = Vec::new();
    for &workers in &args.workers {
        for &system in systems {
            eprintln!("{workers} workers, {}", system.name());
            let tree = if system == System::TcpDisk {
                &on_disk
            } else {
                &tree
            };
            points.push(scaling::measure(
                system,
                workers,
                &recorded,
                tree,
                memory,
                processors,
                args.seconds,
            )?);
        }
    }
    report
        .sections
        .extend(sections(&points, systems, 1.0 / mean));
    Ok(points)
}

fn stroke(system: System) -> (Stroke, bool) {
    match system {
        System::TcpDisk => (Stroke::Tcp, true),
        System::TcpMemory => (Stroke::Tcp, false),
        System::Pump => (Stroke::Other, false),
        System::Rdma => (Stroke::Weft, false),
        System::RdmaCore => (Stroke::WeftCrc, false),
        System::Pull => (Stroke::WeftOther, false),
    }
}

/// Fig. 5.10 and table 5.1.
fn sections(points: &[Point], systems: &[System], one: f64) -> [Section; 2] {
    let mut headers = vec!["workers"];
    headers.extend(systems.iter().map(|system| system.name()));
    let mut rates = Table::new(&headers);
    let mut counts: Vec<u16> = points.iter().map(|p| p.workers).collect();
    counts.dedup();
    for &count in &counts {
        let at = points.iter().filter(|p| p.workers == count);
        rates.push(
            [count.to_string()]
                .into_iter()
                .chain(at.map(|p| format!("{:.1}", p.rate))),
        );
    }
    let mut plot = Plot::new(
        "Jobs a second over virtual workers",
        Axis::linear("workers"),
        Axis::linear("jobs/s"),
    );
    for &system in systems {
        let line: Vec<_> = points
            .iter()
            .filter(|p| p.system == system)
            .map(|p| (f64::from(p.workers), p.rate))
            .collect();
        let (stroke, dashed) = stroke(system);
        let series = Series::new(system.name(), stroke, line);
        plot = plot.series(if dashed { series.dashed() } else { series });
    }
    let mut load = Table::new(&[
        "system",
        "workers",
        "preprocessor, ms",
        "commands, ms",
        "daemon, ms",
        "without preprocessor, ms",
        "all, ms",
        "master idle",
        "workers compile",
        "other way",
    ]);
    let most = counts.iter().copied().max();
    for p in points.iter().filter(|p| Some(p.workers) == most) {
        let ms = |cpu: f64| format!("{:.2}", cpu * 1e3);
        load.push([
            p.system.name().to_owned(),
            p.workers.to_string(),
            ms(p.each(p.preprocess)),
            ms(p.each(p.client)),
            ms(p.each(p.daemon)),
            ms(p.own()),
            ms(p.all()),
            format!("{:.0} %", 100.0 * p.idle),
            format!("{:.0} %", 100.0 * p.busy),
            if p.system == System::Pump && p.fell_back() {
                format!("{}: it preprocesses by itself", p.other)
            } else {
                p.other.to_string()
            },
        ]);
    }
    [
        Section::new("Figure 5.10: jobs a second")
            .text(format!("One machine alone would do {one:.2} jobs a second, and preprocess beside it."))
            .table(rates)
            .plot(plot),
        Section::new("Table 5.1: what a job costs the master")
            .text("CPU time of a job. The daemon is weft's, or the include server of distcc-pump. `workers compile`: the part of the workers' time in which their compilers run. `other way`: jobs that did not go out, or that the master preprocessed for a worker that was to do it.")
            .table(load),
    ]
}

/// Makes with each system in turn.
fn build(
    args: &CcArgs,
    words: &[String],
    systems: &[System],
    folder: &Path,
) -> Result<Vec<(System, Vec<f64>)>> {
    // The others differ only in what is not limited here.
    let wanted = |s: &System| !matches!(s, System::TcpDisk | System::RdmaCore);
    let mut all: Vec<(System, Vec<f64>)> = systems
        .iter()
        .copied()
        .filter(wanted)
        .map(|s| (s, Vec::new()))
        .collect();
    for turn in 0..args.build {
        for (system, seconds) in &mut all {
            eprintln!("make {}, {}", turn + 1, system.name());
            let tree = scaling::copy(&args.source, folder.join("build"))?;
            seconds.push(scaling::build(*system, &tree, words, folder)?);
            fs::remove_dir_all(&tree).map_err(BenchError::system("remove a tree"))?;
        }
    }
    Ok(all)
}
