//! `weft bench mpi`: the figures 13 to 15 of the datagram-iWARP paper. A small program of ours runs under each MPI that is installed, over each transport of
//! `weft mpi`; the transports take turns, the MPI's own TCP among them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::{Args, ValueEnum};

use crate::error::{BenchError, Result};
use crate::progress::Progress;
use crate::report::Table;
use crate::size::{Sizes, human};
use crate::stats::{Summary, paired_ratio};

const SOURCE: &str = include_str!("job.c");
/// What is compared with.
const YARDSTICK: &str = "tcp";
/// Seconds that one job may take.
const LIMIT: &str = "120";

/// Options of `weft bench mpi`.
#[derive(Args, Clone, Debug)]
pub struct MpiArgs {
    /// Which MPIs [default: those that are installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_enum)]
    mpi: Vec<Kind>,
    /// Which transports of `weft mpi`; tcp is the MPI's own
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "rc,ud,weft,tcp", value_parser = ["rc", "ud", "weft", "tcp"])]
    transport: Vec<String>,
    /// Sizes of messages: a list, or ranges by powers: 64,4K or 1..1M or 1..1M*4
    #[arg(long, value_name = "LIST", default_value = "8,2K,64K,1M")]
    size: Sizes,
    /// Numbers of ranks at which memory is measured; 0: not at all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u32).range(0..=128))]
    ranks: Vec<u32>,
    /// Messages each way of a measurement
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// Turns of each measurement
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Writes the results as JSON, one object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Openmpi,
    Mpich,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Openmpi => "openmpi",
            Kind::Mpich => "mpich",
        }
    }

    /// Debian has several MPIs side by side under these names.
    fn tool(self, tool: &str) -> String {
        format!("{tool}.{}", self.name())
    }

    /// Debian's MPICH is built on UCX.
    fn has(self, transport: &str) -> bool {
        self == Kind::Openmpi || transport != "weft"
    }
}

/// What was measured: MPI, transport, quantity, and bytes or ranks; a value for each turn.
type Results = BTreeMap<(&'static str, &'static str, u64, String), Vec<f64>>;

const LATENCY: &str = "time one way, µs";
const BANDWIDTH: &str = "bidirectional bandwidth, MB/s";
const MEMORY: &str = "memory of a rank, KiB";

fn trouble(what: &'static str) -> impl Fn(String) -> BenchError {
    move |why| BenchError::Stack { what, why }
}

fn installed(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

pub(crate) fn run(args: &MpiArgs) -> Result<ExitCode> {
    let asked = if args.mpi.is_empty() {
        &[Kind::Openmpi, Kind::Mpich][..]
    } else {
        &args.mpi
    };
    let mut kinds = Vec::new();
    for &kind in asked {
        match ["mpirun", "mpicc"].map(|tool| kind.tool(tool)) {
            tools if tools.iter().all(|tool| installed(tool)) => kinds.push(kind),
            [mpirun, mpicc] => eprintln!(
                "weft: {}: not measured: {mpirun} or {mpicc} is not installed (Debian: {})",
                kind.name(),
                if kind == Kind::Openmpi {
                    "openmpi-bin, libopenmpi-dev"
                } else {
                    "mpich, libmpich-dev"
                }
            ),
        }
    }
    if kinds.is_empty() {
        return Err(trouble("find an MPI")("none is installed".into()));
    }
    let dir = tempfile::tempdir().map_err(BenchError::system("make a folder"))?;
    let source = dir.path().join("job.c");
    fs::write(&source, SOURCE).map_err(BenchError::system("write a file"))?;
    let (mut results, mut failures) = (Results::new(), 0);
    for kind in kinds {
        let job = dir.path().join(kind.name());
        let output = Command::new(kind.tool("mpicc"))
            .args(["-O2", "-o"])
            .args([&job, &source])
            .output()
            .map_err(BenchError::system("start mpicc"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(trouble("compile the program")(said));
        }
        failures += measure(args, kind, &job, &mut results);
    }
    report(args, &results)?;
    Ok(if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// All of one MPI. Returns how many jobs failed.
fn measure(args: &MpiArgs, kind: Kind, job: &Path, results: &mut Results) -> u32 {
    let mut pair = vec!["pair".to_owned(), args.rounds.to_string()];
    pair.extend(args.size.0.iter().map(u64::to_string));
    let memory = vec!["memory".to_owned()];
    let mut jobs = vec![(2, &pair)];
    let ranks = args.ranks.iter().filter(|ranks| **ranks > 0);
    jobs.extend(ranks.map(|&ranks| (ranks, &memory)));
    let transports: Vec<&String> = args
        .transport
        .iter()
        .filter(|transport| kind.has(transport))
        .collect();
    let steps = args.runs as usize * jobs.len() * transports.len();
    let mut progress = Progress::new(steps as u64);
    let mut failures = 0;
    for _ in 0..args.runs {
        for (ranks, arguments) in &jobs {
            for transport in &transports {
                progress.at(&format!("{} on {transport}, {ranks} ranks", kind.name()));
                match one(kind, transport, *ranks, job, arguments) {
                    Ok(text) => take(kind, transport, &text, results),
                    Err(error) => {
                        failures += 1;
                        eprintln!("weft: {} on {transport}: {error}", kind.name());
                    }
                }
                progress.step();
            }
        }
    }
    failures
}

/// One job; what it says.
fn one(
    kind: Kind,
    transport: &str,
    ranks: u32,
    job: &Path,
    arguments: &[String],
) -> Result<String> {
    let weft = std::env::current_exe().map_err(BenchError::system("find this program"))?;
    let mut command = Command::new("timeout");
    command.args(["-k", "5", LIMIT]).arg(weft);
    command.args(["mpi", "--local", "off", "--transport", transport, "--"]);
    command.arg(kind.tool("mpirun"));
    command.args(["-np", &ranks.to_string()]);
    if kind == Kind::Openmpi {
        command.arg("--oversubscribe");
        // On one host, as whoever runs the benchmark.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_plm", "isolated");
    }
    command
        .env("WEFT_FI_ADDR", "127.0.0.1")
        .arg(job)
        .args(arguments)
        .stdin(Stdio::null());
    let output = command
        .output()
        .map_err(BenchError::system("start timeout(1)"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() && text.contains("all data as sent") {
        return Ok(text);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    let why = format!("{}: {}", output.status, last.unwrap_or("it says nothing"));
    Err(trouble("run a job")(why))
}

fn take(kind: Kind, transport: &str, text: &str, results: &mut Results) {
    let mut add = |what, at, value| {
        let key = (kind.name(), what, at, transport.to_owned());
        results.entry(key).or_default().push(value);
    };
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| words.get(i).and_then(|word| word.parse::<f64>().ok());
        match (words.first(), number(1), number(2), number(3)) {
            (Some(&"pair"), Some(bytes), Some(time), Some(rate)) => {
                add(LATENCY, bytes as u64, time);
                add(BANDWIDTH, bytes as u64, rate);
            }
            (Some(&"memory"), Some(ranks), Some(kib), _) => add(MEMORY, ranks as u64, kib),
            _ => {}
        }
    }
}

fn report(args: &MpiArgs, results: &Results) -> Result<()> {
    let mut table = Table::new(&["MPI", "what", "at", "transport", "median", "to tcp"]);
    let mut lines = String::new();
    for ((mpi, what, at, transport), values) in results {
        let Some(median) = Summary::of(values).map(|s| s.median) else {
            continue;
        };
        let yardstick = results.get(&(*mpi, *what, *at, YARDSTICK.to_owned()));
        let same = yardstick.filter(|y| y.len() == values.len() && transport != YARDSTICK);
        let ratio = same.and_then(|y| paired_ratio(values, y)).map(|s| s.median);
        let place = if *what == MEMORY {
            format!("{at} ranks")
        } else {
            human(*at)
        };
        table.push([
            (*mpi).to_owned(),
            (*what).to_owned(),
            place,
            transport.clone(),
            format!("{median:.2}"),
            ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
        ]);
        let object = serde_json::json!({
            "mpi": mpi, "what": what, "at": at, "transport": transport, "values": values, "median": median, "to_tcp": ratio,
        });
        lines.push_str(&object.to_string());
        lines.push('\n');
    }
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{}", table.to_text(None));
    if let Some(file) = &args.json {
        fs::write(file, lines).map_err(|source| BenchError::Output {
            path: file.display().to_string(),
            source,
        })?;
    }
    Ok(())
}
