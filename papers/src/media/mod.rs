//! The experiments of thesis chapter 6 on this machine: the cost of viewers for a server of movies, with `weft media serve`, nginx, a plain HTTP server
//! and VLC's RTP in one run.

mod conclusions;
mod film;
mod live;
mod rtp;
pub(crate) use rtp::movie;
mod server;
mod show;
mod viewer;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use weft_sys::process::is_gone;

use crate::error::{BenchError, Result};
use crate::output::{Output, OutputArgs};
use crate::usage::{cpu_seconds, load_average};

use film::{Film, Films};
use server::{Kind, Served};
use viewer::{Crowd, Plan};

pub(crate) use server::serve_plain_http;

/// Length of the movie that is watched.
const MOVIE: u64 = 128 << 20;
/// Of the films' random numbers.
const SEED: u64 = 1;
/// The number of downloads of the movie in the experiment on a gigabyte.
const GIGABYTE: u64 = 8;
/// Until start-up and the first buffers are over.
const WARM: Duration = Duration::from_millis(1200);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// Figs. 6.3, 6.4, 6.7, 6.10 and 6.12: CPU and context switches of the server while so many viewers watch, and who of them is served in time
    Load,
    /// Figs. 6.8 and 6.11: the same with jumps, at the largest rate
    Jumps,
    /// A gigabyte as fast as it goes
    Gigabyte,
    /// Time from a jump to its first byte
    Seek,
    /// From a live server's notice to a reader's data
    Live,
    /// What viewers cost that watch nothing
    Idle,
}

const EXAMPLES: &str = "\
Examples:
  # all of it, in half an hour; a small part of it, in two minutes
  weft-papers media --html media.html
  weft-papers media --quick
  # in parts, and what they have found together
  weft-papers media --experiment load --rate 1,2.5 --json a.jsonl
  weft-papers media --experiment load --rate 5.3,8.7 --json b.jsonl
  weft-papers media --from a.jsonl,b.jsonl --html media.html";

/// Options of `weft-papers media`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct MediaArgs {
    /// What to measure [default: all; nothing with --from]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub experiment: Vec<Experiment>,
    /// Results of earlier runs (of --json), which the tables and files are to have as well; of a point that is measured again, the last result
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// Servers to compare [default: all that are installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub server: Vec<Kind>,
    /// Viewers at the same time [default: 1,50,200,500,1000, quick: 1,50]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub viewers: Vec<usize>,
    /// What each watches, in Mb/s [default: 1,2.5,5.3,8.7, quick: 5.3]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub rate: Vec<f64>,
    /// How the bytes of the films are spread over their time; VLC's film is constant
    #[arg(long, value_name = "KIND", default_value = "variable")]
    pub films: Films,
    /// Seconds between the jumps of each viewer [default: 60,30, quick: 30]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub jump: Vec<f64>,
    /// Seconds of each point [default: 4, quick: 2]
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// Readers of the live stream
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub readers: usize,
    /// Viewers that watch nothing [default: 1000, quick: 200]
    #[arg(long, value_name = "N")]
    pub idle: Option<usize>,
    /// Receive buffer of each HTTP viewer, in bytes [default: the system's, which grows to some seconds of film, and with a thousand viewers past the memory that the system has for TCP]
    #[arg(long, value_name = "BYTES")]
    pub buffer: Option<usize>,
    /// Fewer points, shorter
    #[arg(long)]
    pub quick: bool,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl MediaArgs {
    /// The options with their defaults.
    fn complete(mut self) -> Self {
        fn fill<T: Clone>(list: &mut Vec<T>, all: &[T], quick: Option<&[T]>) {
            if list.is_empty() {
                *list = quick.unwrap_or(all).to_vec();
            }
        }
        let quick = self.quick;
        fill(&mut self.server, &Kind::installed(), None);
        let viewers = [1, 50, 200, 500, 1000];
        fill(&mut self.viewers, &viewers, quick.then_some(&[1, 50]));
        let rates = [1.0, 2.5, 5.3, 8.7];
        fill(&mut self.rate, &rates, quick.then_some(&[5.3]));
        fill(&mut self.jump, &[60.0, 30.0], quick.then_some(&[30.0]));
        self.seconds.get_or_insert(if quick { 2.0 } else { 4.0 });
        self.idle.get_or_insert(if quick { 200 } else { 1000 });
        self
    }

    fn seconds(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(4.0).clamp(0.1, 30.0))
    }
}

/// One point, as measured and written.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Point {
    server: Kind,
    viewers: usize,
    #[serde(rename = "rate_Mbps")]
    rate: f64,
    #[serde(rename = "jump_s")]
    jump: Option<f64>,
    bytes: u64,
    seconds: f64,
    /// How the film's bytes were spread, and its seconds that all viewers fetched. Unknown for VLC and in results of before, whose films were constant.
    #[serde(default)]
    film: Option<(Films, f64)>,
    #[serde(rename = "cpu_s")]
    cpu: f64,
    /// CPU seconds of the viewers, which are in this process.
    #[serde(rename = "viewers_cpu_s")]
    viewers_cpu: f64,
    switches: u64,
    #[serde(rename = "late_fetches")]
    late: u64,
    starved: u64,
}

impl Point {
    fn cpu_per_gb(&self) -> f64 {
        self.cpu * 1e9 / self.bytes.max(1) as f64
    }

    /// CPU of the server and its viewers together, for a GB.
    fn both_per_gb(&self) -> f64 {
        (self.cpu + self.viewers_cpu) * 1e9 / self.bytes.max(1) as f64
    }

    /// Percent of one core.
    fn cpu_percent(&self) -> f64 {
        100.0 * self.cpu / self.seconds
    }

    fn switches_per_s(&self) -> f64 {
        self.switches as f64 / self.seconds
    }

    /// The delivered share of what the viewers wanted.
    fn delivered(&self) -> f64 {
        if let Some((_, seconds)) = self.film {
            return seconds / (self.viewers as f64 * self.seconds);
        }
        let wanted = self.viewers as f64 * self.rate * 1e6 / 8.0 * self.seconds;
        self.bytes as f64 / wanted
    }

    /// The percentage of viewers whose picture has not stopped.
    fn in_time(&self) -> f64 {
        let served = self.viewers as u64 - self.starved.min(self.viewers as u64);
        100.0 * served as f64 / self.viewers.max(1) as f64
    }

    fn json(&self) -> Value {
        let experiment = if self.jump.is_some() { "jumps" } else { "load" };
        let mut line = json!(self);
        line["bench"] = "media".into();
        line["experiment"] = experiment.into();
        line["cpu_s_per_GB"] = self.cpu_per_gb().into();
        line["switches_per_s"] = self.switches_per_s().into();
        line["viewers_in_time_percent"] = self.in_time().into();
        line["load"] = load_average().into();
        line
    }

    /// The same servers, viewers, rates and jumps.
    fn is_again(&self, other: &Self) -> bool {
        let key = |p: &Self| {
            (
                p.server,
                p.viewers,
                p.rate.to_bits(),
                p.jump.map(f64::to_bits),
            )
        };
        key(self) == key(other)
    }
}

/// Experiments with two numbers for a server: the name, and the names of the two numbers.
const SINGLES: [(&str, &str, &str); 3] = [
    ("gigabyte", "cpu_s_per_GB", "seconds_per_GB"),
    ("seek", "us_p50", "us_p99"),
    ("idle", "cpu_percent", "switches_per_s"),
];

/// A number for one server, of an experiment that is no load.
#[derive(Clone, Debug)]
struct Single {
    experiment: &'static str,
    server: Kind,
    value: f64,
    /// The second number.
    beside: f64,
}

impl Single {
    fn json(experiment: &str, server: Kind, value: f64, beside: f64) -> Value {
        let mut line = json!({"bench": "media", "experiment": experiment, "server": server.name(), "load": load_average()});
        if let Some((_, metric, other)) = SINGLES.iter().find(|s| s.0 == experiment) {
            line[metric] = value.into();
            line[other] = beside.into();
        }
        line
    }

    fn parse(line: &Value) -> Option<Self> {
        let (experiment, metric, other) =
            SINGLES.into_iter().find(|s| line["experiment"] == s.0)?;
        Some(Self {
            experiment,
            server: Kind::from_str(line["server"].as_str()?, false).ok()?,
            value: line[metric].as_f64()?,
            beside: line[other].as_f64()?,
        })
    }
}

/// The live stream, as its readers saw it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Live {
    readers: usize,
    /// Milliseconds from notice to data.
    #[serde(rename = "notice_to_data_ms_p50")]
    p50: f64,
    #[serde(rename = "notice_to_data_ms_p99")]
    p99: f64,
    #[serde(rename = "fragments")]
    fetches: usize,
}

impl Live {
    fn json(self) -> Value {
        let mut line = json!(self);
        line["bench"] = "media".into();
        line["experiment"] = "live".into();
        line["load"] = load_average().into();
        line
    }
}

/// All measurements.
#[derive(Default)]
struct Measured {
    points: Vec<Point>,
    singles: Vec<Single>,
    live: Option<Live>,
    /// The results in their written form; of repeated measurements the last one.
    lines: Vec<Value>,
    /// The measurements that failed, with the reasons.
    failed: Vec<String>,
}

impl Measured {
    /// Adds a result of this run or of an earlier one. Lines that are not results, such as the verdicts of an earlier run, are left out.
    fn take(&mut self, line: Value) {
        if let Ok(point) = Point::deserialize(&line) {
            self.points.retain(|p| !p.is_again(&point));
            self.points.push(point);
        } else if let Some(single) = Single::parse(&line) {
            let again = |s: &Single| (s.experiment, s.server) == (single.experiment, single.server);
            self.singles.retain(|s| !again(s));
            self.singles.push(single);
        } else if let Ok(live) = Live::deserialize(&line) {
            self.live = Some(live);
        } else {
            return;
        }
        const KEY: [&str; 5] = ["experiment", "server", "viewers", "rate_Mbps", "jump_s"];
        self.lines.retain(|l| KEY.iter().any(|k| l[k] != line[k]));
        self.lines.push(line);
    }
}

/// The measurements, and the files for them.
struct Kept {
    measured: Measured,
    output: Output,
}

impl Kept {
    /// Writes a result at once, so that a killed run keeps its results.
    fn take(&mut self, line: Value) -> Result<()> {
        self.output.lines([&line])?;
        self.measured.take(line);
        Ok(())
    }
}

/// Runs the experiments.
pub(crate) fn run(args: &MediaArgs) -> Result<ExitCode> {
    let args = &args.clone().complete();
    let all = args.experiment.is_empty() && args.from.is_empty();
    let wanted = |e| all || args.experiment.contains(&e);
    let earlier: Vec<Value> = crate::output::read(&args.from)?;
    let load = load_average();
    let mut measured = Measured::default();
    for line in earlier {
        measured.take(line);
    }
    let mut output = args.output.open()?;
    output.lines(&measured.lines)?;
    let mut kept = Kept { measured, output };
    let folder = Folder::make()?;
    if wanted(Experiment::Load) {
        for &rate in &args.rate {
            grow(args, &folder, rate, None, &mut kept)?;
        }
    }
    if wanted(Experiment::Jumps) {
        let rate = args.rate.iter().copied().fold(0.0, f64::max);
        let mut jumps: Vec<_> = args.jump.iter().copied().map(Some).collect();
        if !wanted(Experiment::Load) {
            jumps.insert(0, None);
        }
        for jump in jumps {
            grow(args, &folder, rate, jump, &mut kept)?;
        }
    }
    if wanted(Experiment::Gigabyte) {
        gigabyte(args, &folder, &mut kept)?;
    }
    if wanted(Experiment::Seek) {
        seek(args, &folder, &mut kept)?;
    }
    if wanted(Experiment::Idle) {
        idle(args, &folder, &mut kept)?;
    }
    if wanted(Experiment::Live) {
        let (p50, p99, fetches) = live::measure(args.readers, args.seconds().as_secs_f64())?;
        let readers = args.readers;
        kept.take(
            Live {
                readers,
                p50,
                p99,
                fetches,
            }
            .json(),
        )?;
    }
    let Kept {
        measured,
        mut output,
    } = kept;
    let bars = conclusions::bars(&measured);
    output.lines(bars.iter().map(|bar| bar.json("media")))?;
    let exit = output.finish(&show::report(&measured, &bars, args, &load))?;
    Ok(if measured.failed.is_empty() {
        exit
    } else {
        ExitCode::FAILURE
    })
}

/// One rate and kind of jumps, with more and more viewers; the servers are measured in turn at each number. A server that has delivered less than half of
/// the wanted bytes is not measured with more viewers.
fn grow(
    args: &MediaArgs,
    folder: &Folder,
    rate: f64,
    jump: Option<f64>,
    kept: &mut Kept,
) -> Result<()> {
    let mut exhausted: Vec<Kind> = Vec::new();
    for &viewers in &args.viewers {
        for &kind in &args.server {
            if exhausted.contains(&kind) {
                continue;
            }
            match measure(args, folder, kind, viewers, rate, jump) {
                Ok(point) => {
                    eprintln!(
                        "{} {viewers} x {rate} Mb/s{}: {:.1} % CPU, {:.0} % delivered",
                        kind.name(),
                        jump.map_or(String::new(), |j| format!(", jumps each {j} s")),
                        point.cpu_percent(),
                        100.0 * point.delivered(),
                    );
                    if point.delivered() < 0.5 {
                        exhausted.push(kind);
                    }
                    kept.take(point.json())?;
                }
                Err(e) => {
                    let text = format!("{}, {viewers} viewers at {rate} Mb/s: {e}", kind.name());
                    eprintln!("{text}");
                    kept.measured.failed.push(text);
                    exhausted.push(kind);
                }
            }
        }
    }
    Ok(())
}

fn measure(
    args: &MediaArgs,
    folder: &Folder,
    kind: Kind,
    viewers: usize,
    rate: f64,
    jump: Option<f64>,
) -> Result<Point> {
    let served = Served::start(kind, folder.path(), rate)?;
    let plan = Plan {
        viewers,
        film: Arc::new(Film::new(args.films, MOVIE, rate, SEED)),
        jump: jump.map(Duration::from_secs_f64),
        buffer: args.buffer,
    };
    let crowd = Crowd::start(&served, &plan)?;
    std::thread::sleep(WARM);
    crowd.check()?;
    let (before, had, began) = (served.usage()?, crowd.begin(), Instant::now());
    let (viewers_before, film_before) = (cpu_seconds(), crowd.film_seconds());
    std::thread::sleep(args.seconds());
    let viewers_cpu = cpu_seconds() - viewers_before;
    let (after, (have, late, starved)) = (served.usage()?, crowd.counted());
    let seconds = began.elapsed().as_secs_f64();
    let film = crowd.film_seconds() - film_before;
    crowd.check()?;
    drop(crowd);
    Ok(Point {
        server: kind,
        viewers,
        rate,
        jump,
        bytes: have - had,
        seconds,
        film: (kind != Kind::Vlc).then_some((args.films, film)),
        cpu: after.cpu - before.cpu,
        viewers_cpu,
        switches: after.switches.saturating_sub(before.switches),
        late,
        starved,
    })
}

fn gigabyte(args: &MediaArgs, folder: &Folder, kept: &mut Kept) -> Result<()> {
    for &kind in args.server.iter().filter(|kind| **kind != Kind::Vlc) {
        let served = Served::start(kind, folder.path(), 0.0)?;
        viewer::gulp(&served, 1)?;
        let (before, began) = (served.usage()?, Instant::now());
        let bytes = viewer::gulp(&served, GIGABYTE)?;
        let (after, seconds) = (served.usage()?, began.elapsed().as_secs_f64());
        let each = 1e9 / bytes as f64;
        let cpu = (after.cpu - before.cpu) * each;
        kept.take(Single::json("gigabyte", kind, cpu, seconds * each))?;
    }
    Ok(())
}

fn seek(args: &MediaArgs, folder: &Folder, kept: &mut Kept) -> Result<()> {
    const SEEKS: usize = 300;
    let mut seekers = Vec::new();
    for &kind in args.server.iter().filter(|kind| **kind != Kind::Vlc) {
        let served = Served::start(kind, folder.path(), 0.0)?;
        seekers.push((kind, viewer::Seeker::open(&served)?, served, Vec::new()));
    }
    // In turn, so that a disturbance affects all of them.
    for round in 0..SEEKS as u64 {
        let at = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (MOVIE - (1 << 20));
        for (_, seeker, _, times) in &mut seekers {
            times.push(seeker.seek(at)?.as_secs_f64() * 1e6);
        }
    }
    for (server, _, _, mut times) in seekers {
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times[times.len() * percent / 100];
        kept.take(Single::json("seek", server, at(50), at(99)))?;
    }
    Ok(())
}

fn idle(args: &MediaArgs, folder: &Folder, kept: &mut Kept) -> Result<()> {
    for server in [Kind::Local, Kind::Tcp] {
        let served = Served::start(server, folder.path(), 0.0)?;
        let viewers = viewer::idle(&served, args.idle.unwrap_or(1000))?;
        std::thread::sleep(WARM);
        let (before, began) = (served.usage()?, Instant::now());
        std::thread::sleep(args.seconds());
        let (after, seconds) = (served.usage()?, began.elapsed().as_secs_f64());
        drop(viewers);
        let switches = after.switches.saturating_sub(before.switches);
        let percent = 100.0 * (after.cpu - before.cpu) / seconds;
        kept.take(Single::json(
            "idle",
            server,
            percent,
            switches as f64 / seconds,
        ))?;
    }
    Ok(())
}

/// A folder with the movie in it, removed on drop.
struct Folder(PathBuf);

impl Folder {
    const PREFIX: &str = "weft-bench-media-";

    /// Removes the leftovers of killed runs.
    fn sweep() {
        for entry in std::fs::read_dir(std::env::temp_dir())
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let of = name
                .to_str()
                .and_then(|n| n.strip_prefix(Self::PREFIX)?.parse().ok());
            if of.is_some_and(is_gone) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    fn make() -> Result<Self> {
        Self::sweep();
        let path = std::env::temp_dir().join(format!("{}{}", Self::PREFIX, std::process::id()));
        let made = || -> std::io::Result<()> {
            std::fs::create_dir(&path)?;
            let mut file = std::fs::File::create(path.join(server::NAME))?;
            let mut state = 1_u64;
            let mut block = vec![0; 1 << 20];
            for _ in 0..MOVIE >> 20 {
                for word in block.chunks_exact_mut(8) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    word.copy_from_slice(&state.to_le_bytes());
                }
                file.write_all(&block)?;
            }
            Ok(())
        };
        let folder = Self(path.clone());
        made().map_err(BenchError::system(
            "write the movie to the temporary directory",
        ))?;
        Ok(folder)
    }

    fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
