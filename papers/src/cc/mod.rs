//! Chapter 5 of "iWARP Applicability" on this machine: a master with a processor for itself, and distcc, distcc-pump and `weft cc` in one run.
//!
//! The scaling figure needs many machines, so workers are virtual. The master does all its work for a real build: it preprocesses, or lets workers read
//! its headers, sends the job and receives the object. A worker's compiler sleeps for the time that the real one took, and leaves the recorded object.

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
use serde_json::{Value, json};

use crate::aims::{self, Aim};
use crate::error::{BenchError, Result, failed};
use crate::output::{self, KEPT, OutputArgs};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine};
use crate::usage::load_average;

pub(crate) use part::CcPartArgs;
pub(crate) use part::part;
use scaling::Point;
use systems::{Processors, System};

const EXAMPLES: &str = "\
Examples:
  apt-get source redis
  weft-papers cc --source redis-7.0.15 --html cc.html \\
    --make '-C src MALLOC=libc redis-server'
  weft-papers cc --source redis-7.0.15 --build 3 --only-build \\
    --make '-C src MALLOC=libc redis-server'";

/// Options of `weft-papers cc`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct CcArgs {
    /// A tree of C sources that `make CC=...` builds; it is copied
    #[arg(long, value_name = "DIR", required_unless_present = "from")]
    source: Option<PathBuf>,
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
    /// Results of earlier runs (of --json), which the tables, conclusions and files are to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    from: Vec<PathBuf>,
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
    let why = format!("{}: {}", done.status, last.join("; "));
    Err(failed("make", why))
}

/// A folder that is removed at the end. distccd changes its user, so other users must be able to read the folder.
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
    let kept: Vec<Value> = output::read(&args.from)?;
    let mut output = args.output.open()?;
    let results = if args.from.is_empty() {
        measure(args)?
    } else {
        Results::read(&kept)
    };
    let verdicts = results.verdicts();
    output.lines(results.lines())?;
    output.lines(verdicts.iter().map(|aim| aim.json("cc")))?;
    output.finish(&results.report(&verdicts))
}

/// All measurements.
#[derive(Default)]
struct Results {
    /// Where and how; a paragraph each.
    about: Vec<String>,
    /// Jobs a second of one machine alone.
    alone: Option<f64>,
    points: Vec<Point>,
    /// Seconds of each build.
    builds: Vec<(System, Vec<f64>)>,
}

impl Results {
    fn verdicts(&self) -> Vec<Aim> {
        let mut verdicts = conclusions::of_points(&self.points);
        verdicts.extend(conclusions::of_builds(&self.builds));
        verdicts
    }

    fn lines(&self) -> Vec<Value> {
        let about =
            json!({"bench": "cc", "figure": "about", "text": self.about, "alone": self.alone});
        let builds = self.builds.iter().map(|(system, seconds)| {
            json!({"bench": "cc", "figure": "build", "system": system.name(), "seconds": seconds, "load": load_average()})
        });
        let points = self.points.iter().map(Point::json);
        [about].into_iter().chain(points).chain(builds).collect()
    }

    /// Reads the output of [`Results::lines`].
    fn read(lines: &[Value]) -> Self {
        let mut results = Self {
            about: vec![KEPT.to_owned()],
            ..Self::default()
        };
        for line in lines {
            let list = |name: &str| line[name].as_array().into_iter().flatten();
            match line["figure"].as_str() {
                Some("about") => {
                    let text = list("text").filter_map(Value::as_str);
                    let text = text.filter(|text| *text != KEPT);
                    results.about.extend(text.map(str::to_owned));
                    results.alone = line["alone"].as_f64();
                }
                Some("build") => {
                    let seconds = list("seconds").filter_map(Value::as_f64).collect();
                    results.builds.extend(System::of(line).zip(Some(seconds)));
                }
                _ => results.points.extend(Point::parse(line)),
            }
        }
        results
    }

    fn report(&self, verdicts: &[Aim]) -> Report {
        let mut report =
            Report::new("weft-papers cc: a distributed compiler (chapter 5 of the thesis)");
        report.intro.clone_from(&self.about);
        if !self.points.is_empty() {
            report.sections.extend(sections(&self.points, self.alone));
        }
        let all = |seconds: &[f64]| {
            let all: Vec<_> = seconds.iter().map(|s| format!("{s:.1}")).collect();
            all.join(", ")
        };
        let builds = Table::of(
            &self.builds,
            &[
                ("make with two workers of this machine", &|(system, _)| {
                    system.name().to_owned()
                }),
                ("s, median", &|(_, seconds)| {
                    format!("{:.1}", conclusions::median(seconds))
                }),
                ("s, all", &|(_, seconds)| all(seconds)),
            ],
        );
        if !builds.is_empty() {
            report.sections.push(Section::new("A build").table(builds));
        }
        let title = "The chapter's conclusions, and what weft cc is to reach";
        report.sections.extend(aims::section(title, verdicts));
        report
    }
}

fn measure(args: &CcArgs) -> Result<Results> {
    let source = args.source.as_deref();
    let source =
        source.ok_or_else(|| BenchError::Usage("--source names a tree of C sources".into()))?;
    let systems = if args.system.is_empty() {
        System::installed()
    } else {
        args.system.clone()
    };
    let words: Vec<String> = args.make.split_whitespace().map(str::to_owned).collect();
    let memory = folder(Path::new("/dev/shm"))?;
    let disk = folder(&std::env::temp_dir())?;
    let mut results = Results {
        about: vec![
            format!("{}; load before the run: {}.", machine(), load_average()),
            "Master and virtual workers are on one machine, joined by the loopback interface: the master on its first processor, all else on the others. distcc is in the clear, weft by TLS 1.3.".into(),
        ],
        ..Results::default()
    };
    if !args.only_build {
        results.about.push(format!(
            "Each point was measured once, for {} s: differences of some percent mean nothing.",
            args.seconds
        ));
        scale(
            args,
            source,
            &words,
            &systems,
            [memory.path(), disk.path()],
            &mut results,
        )?;
    }
    if args.build > 0 {
        results.builds = build(args, source, &words, &systems, memory.path())?;
        if args.build == 1 {
            let words = "Each build was made once: differences of some percent mean nothing.";
            results.about.push(words.into());
        }
    }
    Ok(results)
}

/// Records, and measures every system with every number of workers, in turn.
fn scale(
    args: &CcArgs,
    source: &Path,
    words: &[String],
    systems: &[System],
    [memory, disk]: [&Path; 2],
    results: &mut Results,
) -> Result<()> {
    let tree = scaling::copy(source, memory.join("tree"))?;
    eprintln!("recording a make");
    let recorded = record::record(&tree, words, memory, args.jobs, args.pace)?;
    let on_disk = if systems.contains(&System::TcpDisk) {
        scaling::copy(&tree, disk.join("tree"))?
    } else {
        PathBuf::new()
    };
    let count = recorded.jobs.len();
    let mean = recorded.jobs.iter().map(|job| job.compile).sum::<f64>() / count as f64;
    results.alone = Some(1.0 / mean);
    results.about.push(format!(
        "{count} compilations of `make {}` in turn; compilers took {:.0} ms on average when they were recorded, and take {:.0} ms here. Each system had jobs before that are not counted.",
        args.make,
        mean * args.pace * 1e3,
        mean * 1e3
    ));
    let processors = Processors::find()?;
    for &workers in &args.workers {
        for &system in systems {
            eprintln!("{workers} workers, {}", system.name());
            let tree = if system == System::TcpDisk {
                &on_disk
            } else {
                &tree
            };
            results.points.push(scaling::measure(
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
    Ok(())
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
fn sections(points: &[Point], alone: Option<f64>) -> [Section; 2] {
    let mut counts: Vec<u16> = points.iter().map(|p| p.workers).collect();
    counts.dedup();
    let of = |count: Option<u16>| points.iter().filter(move |p| Some(p.workers) == count);
    let systems: Vec<System> = of(counts.first().copied()).map(|p| p.system).collect();
    let mut headers = vec!["workers"];
    headers.extend(systems.iter().map(|system| system.name()));
    let mut rates = Table::new(&headers);
    for &count in &counts {
        let at = of(Some(count)).map(|p| format!("{:.1}", p.rate));
        rates.push([count.to_string()].into_iter().chain(at));
    }
    let mut plot = Plot::new(
        "Jobs a second over virtual workers",
        Axis::linear("workers"),
        Axis::linear("jobs/s"),
    );
    for &system in &systems {
        let line = points.iter().filter(|p| p.system == system);
        let line = line.map(|p| (f64::from(p.workers), p.rate)).collect();
        let (stroke, dashed) = stroke(system);
        let series = Series::new(system.name(), stroke, line);
        plot = plot.series(if dashed { series.dashed() } else { series });
    }
    let ms = |cpu: f64| format!("{:.2}", cpu * 1e3);
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let load = Table::of(
        of(counts.iter().copied().max()),
        &[
            ("system", &|p| p.system.name().to_owned()),
            ("workers", &|p| p.workers.to_string()),
            ("preprocessor, ms", &|p| ms(p.each(p.preprocess))),
            ("commands, ms", &|p| ms(p.each(p.client))),
            ("daemon, ms", &|p| ms(p.each(p.daemon))),
            ("without preprocessor, ms", &|p| ms(p.own())),
            ("all, ms", &|p| ms(p.all())),
            ("master idle", &|p| percent(p.idle)),
            ("workers compile", &|p| percent(p.busy)),
            ("other way", &|p| {
                if p.system == System::Pump && p.fell_back() {
                    return format!("{}: it preprocesses by itself", p.other);
                }
                p.other.to_string()
            }),
        ],
    );
    let mut rate = Section::new("Figure 5.10: jobs a second");
    if let Some(alone) = alone {
        rate = rate.text(format!(
            "One machine alone would do {alone:.2} jobs a second, and preprocess beside it."
        ));
    }
    [
        rate.table(rates).plot(plot),
        Section::new("Table 5.1: what a job costs the master")
            .text("CPU time of a job. The daemon is weft's, or the include server of distcc-pump. `workers compile`: the part of the workers' time in which their compilers run. `other way`: jobs that did not go out, or that the master preprocessed for a worker that was to do it.")
            .table(load),
    ]
}

/// Makes with each system in turn.
fn build(
    args: &CcArgs,
    source: &Path,
    words: &[String],
    systems: &[System],
    folder: &Path,
) -> Result<Vec<(System, Vec<f64>)>> {
    // The others differ only in resources that are not limited here.
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
            let tree = scaling::copy(source, folder.join("build"))?;
            seconds.push(scaling::build(*system, &tree, words, folder)?);
            fs::remove_dir_all(&tree).map_err(BenchError::system("remove a tree"))?;
        }
    }
    Ok(all)
}
