//! The experiments of thesis chapter 6 on this machine: what a server of movies pays for its viewers, `weft media serve` beside nginx and a
//! plain HTTP server, all in one run.

mod live;
mod server;
mod viewer;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::error::{BenchError, Result};
use crate::report::Table;
use crate::usage::load_average;

use server::{Kind, Served};
use viewer::{Crowd, Plan};

pub use server::serve_plain_http;

/// Length of the movie that is watched.
const MOVIE: u64 = 128 << 20;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// Figs. 6.10 and 6.12: CPU and context switches of the server while so many viewers watch
    Load,
    /// Figs. 6.8 and 6.11: the same, with jumps
    Jumps,
    /// Time from a jump to its first byte
    Seek,
    /// From a live server's notice to a reader's data
    Live,
    /// What viewers cost that watch nothing
    Idle,
}

/// Options of `weft bench media`.
#[derive(Args, Clone, Debug)]
pub struct MediaArgs {
    /// What to measure [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub experiment: Vec<Experiment>,
    /// Servers to compare [default: all that are installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub server: Vec<Kind>,
    /// Viewers at the same time
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 50, 200])]
    pub viewers: Vec<usize>,
    /// What each watches, in Mb/s
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [5.3])]
    pub rate: Vec<f64>,
    /// Seconds between the jumps of each viewer
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [30.0])]
    pub jump: Vec<f64>,
    /// Seconds of each point
    #[arg(long, value_name = "SECONDS", default_value_t = 6.0)]
    pub seconds: f64,
    /// Readers of the live stream
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub readers: usize,
    /// Viewers that watch nothing
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub idle: usize,
    /// Writes the results as JSON, one object a line
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One point, as measured.
struct Point {
    experiment: &'static str,
    server: &'static str,
    viewers: usize,
    rate: f64,
    jump: Option<f64>,
    bytes: u64,
    seconds: f64,
    cpu: f64,
    switches: u64,
    late: u64,
}

impl Point {
    fn cpu_per_gb(&self) -> f64 {
        self.cpu * 1e9 / self.bytes.max(1) as f64
    }

    fn json(&self) -> Value {
        json!({
            "bench": "media", "experiment": self.experiment, "server": self.server, "viewers": self.viewers, "rate_Mbps": self.rate,
            "jump_s": self.jump, "bytes": self.bytes, "seconds": self.seconds, "cpu_s": self.cpu, "cpu_s_per_GB": self.cpu_per_gb(),
            "switches_per_s": self.switches as f64 / self.seconds, "late_fetches": self.late, "load": load_average(),
        })
    }
}

/// A conclusion: what was asked, what was measured.
struct Verdict {
    what: String,
    target: f64,
    measured: f64,
}

/// Runs the experiments.
pub(crate) fn run(args: &MediaArgs) -> Result<()> {
    let wanted = |e| args.experiment.is_empty() || args.experiment.contains(&e);
    let folder = Folder::make()?;
    let mut lines = Vec::new();
    let mut verdicts = Vec::new();
    let kinds: Vec<Kind> = if args.server.is_empty() {
        Kind::installed()
    } else {
        args.server.clone()
    };
    eprintln!(
        "load of the machine before the run: {}; servers in turn at each point",
        load_average()
    );
    let mut points = Vec::new();
    if wanted(Experiment::Load) || wanted(Experiment::Jumps) {
        for &rate in &args.rate {
            for &viewers in &args.viewers {
                let mut jumps = vec![None];
                if wanted(Experiment::Jumps) {
                    jumps.extend(args.jump.iter().copied().map(Some));
                }
                for jump in jumps {
                    for &kind in &kinds {
                        let point = measure(args, &folder, kind, viewers, rate, jump)?;
                        lines.push(point.json());
                        points.push(point);
                    }
                }
            }
        }
        show_points(&points);
        judge(&points, &mut verdicts);
    }
    if wanted(Experiment::Seek) {
        seek(&folder, &kinds, &mut lines, &mut verdicts)?;
    }
    if wanted(Experiment::Live) {
        let (p50, p99, fragments) = live::measure(args.readers, args.seconds)?;
        lines.push(json!({"bench": "media", "experiment": "live", "readers": args.readers, "fragments": fragments,
            "notice_to_data_ms_p50": p50, "notice_to_data_ms_p99": p99, "load": load_average()}));
        println!(
            "live, {} readers, {fragments} fetches: notice to data {p50:.2} ms median, {p99:.2} ms at the 99th percentile",
            args.readers
        );
        verdicts.push(Verdict {
            what: format!("live, {} readers: p99 of notice to data, ms", args.readers),
            target: 5.0,
            measured: p99,
        });
    }
    if wanted(Experiment::Idle) {
        idle(args, &folder, &mut lines, &mut verdicts)?;
    }
    show_verdicts(&verdicts, &mut lines);
    if let Some(path) = &args.json {
        let mut text = String::new();
        for line in &lines {
            text.push_str(&line.to_string());
            text.push('\n');
        }
        std::fs::write(path, text).map_err(|source| BenchError::Output {
            path: path.display().to_string(),
            source,
        })?;
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
    let served = Served::start(kind, folder.path())?;
    let plan = Plan {
        viewers,
        rate,
        jump: jump.map(Duration::from_secs_f64),
    };
    let crowd = Crowd::start(&served, &plan)?;
    // Start-up and the first buffers are not what is measured.
    std::thread::sleep(Duration::from_millis(700));
    crowd.check()?;
    let (before, had, began) = (served.usage()?, crowd.counted(), Instant::now());
    std::thread::sleep(Duration::from_secs_f64(args.seconds));
    let (after, have, seconds) = (
        served.usage()?,
        crowd.counted(),
        began.elapsed().as_secs_f64(),
    );
    crowd.check()?;
    drop(crowd);
    Ok(Point {
        experiment: if jump.is_some() { "jumps" } else { "load" },
        server: kind.name(),
        viewers,
        rate,
        jump,
        bytes: have.0 - had.0,
        seconds,
        cpu: after.cpu - before.cpu,
        switches: after.switches.saturating_sub(before.switches),
        late: have.1 - had.1,
    })
}

fn show_points(points: &[Point]) {
    let mut table = Table::new(&[
        "server",
        "viewers",
        "Mb/s",
        "jump each",
        "delivered",
        "server CPU",
        "CPU s/GB",
        "switches/s",
        "late",
    ]);
    for p in points {
        let wanted = p.viewers as f64 * p.rate * 1e6 / 8.0 * p.seconds;
        table.push([
            p.server.to_owned(),
            p.viewers.to_string(),
            format!("{:.1}", p.rate),
            p.jump.map_or("-".to_owned(), |j| format!("{j:.0} s")),
            format!("{:.0} %", 100.0 * p.bytes as f64 / wanted),
            format!("{:.2} %", 100.0 * p.cpu / p.seconds),
            format!("{:.3}", p.cpu_per_gb()),
            format!("{:.0}", p.switches as f64 / p.seconds),
            p.late.to_string(),
        ]);
    }
    println!("{}", table.to_text(None));
}

fn same(one: f64, other: f64) -> bool {
    (one - other).abs() < f64::EPSILON
}

/// Nothing over nothing is nothing.
fn ratio(ours: f64, theirs: f64) -> f64 {
    if ours == 0.0 { 0.0 } else { ours / theirs }
}

/// Compares points of the same number of viewers, rate and jumps.
fn judge(points: &[Point], verdicts: &mut Vec<Verdict>) {
    let find = |p: &Point, server: &str, jump: Option<f64>| {
        points.iter().find(|q| {
            q.server == server
                && q.viewers == p.viewers
                && same(q.rate, p.rate)
                && q.jump.is_some() == jump.is_some()
                && jump.is_none_or(|j| q.jump.is_some_and(|k| same(j, k)))
        })
    };
    let most = points.iter().map(|p| p.viewers).max().unwrap_or(0);
    for p in points.iter().filter(|p| p.viewers == most) {
        let at = format!("{} viewers at {} Mb/s", p.viewers, p.rate);
        let mut add = |what: String, target, measured| {
            verdicts.push(Verdict {
                what,
                target,
                measured,
            });
        };
        if p.jump.is_none()
            && p.server == Kind::Local.name()
            && let Some(q) = find(p, Kind::Sendfile.name(), None)
        {
            let cpu = ratio(p.cpu, q.cpu);
            add(
                format!("{at}: CPU, same host over nginx sendfile"),
                0.1,
                cpu,
            );
            let switches = p.switches as f64 / q.switches.max(1) as f64;
            add(
                format!("{at}: switches, same host over nginx sendfile"),
                0.1,
                switches,
            );
        }
        if p.jump.is_none() && p.server == Kind::Tcp.name() {
            for (other, target) in [(Kind::Sendfile, 1.25), (Kind::ReadWrite, 0.7)] {
                if let Some(q) = find(p, other.name(), None) {
                    let what = format!("{at}: CPU per GB, TCP over {}", other.name());
                    add(what, target, ratio(p.cpu_per_gb(), q.cpu_per_gb()));
                }
            }
        }
        if let Some(jump) = p.jump
            && [Kind::Local.name(), Kind::Tcp.name()].contains(&p.server)
            && let Some(q) = find(p, p.server, None)
        {
            let what = format!(
                "{at}: CPU per GB of {} with jumps each {jump} s over without",
                p.server
            );
            add(what, 1.1, ratio(p.cpu_per_gb(), q.cpu_per_gb()));
        }
    }
}

fn seek(
    folder: &Folder,
    kinds: &[Kind],
    lines: &mut Vec<Value>,
    verdicts: &mut Vec<Verdict>,
) -> Result<()> {
    const SEEKS: usize = 300;
    let mut seekers = Vec::new();
    for &kind in kinds {
        let served = Served::start(kind, folder.path())?;
        seekers.push((kind, viewer::Seeker::open(&served)?, served, Vec::new()));
    }
    // In turn, so that a disturbance meets all.
    for round in 0..SEEKS as u64 {
        let at = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (MOVIE - (1 << 20));
        for (_, seeker, _, times) in &mut seekers {
            times.push(seeker.seek(at)?.as_secs_f64() * 1e6);
        }
    }
    let mut medians = Vec::new();
    for (kind, _, _, mut times) in seekers {
        times.sort_by(f64::total_cmp);
        let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        println!(
            "seek to first byte, {}: {p50:.0} us median, {p99:.0} us at the 99th percentile",
            kind.name()
        );
        lines.push(json!({"bench": "media", "experiment": "seek", "server": kind.name(), "us_p50": p50, "us_p99": p99, "load": load_average()}));
        medians.push((kind, p50));
    }
    let of = |kind| medians.iter().find(|m| m.0 == kind).map(|m| m.1);
    for kind in [Kind::Local, Kind::Tcp, Kind::Tls] {
        if let (Some(ours), Some(theirs)) = (of(kind), of(Kind::Sendfile)) {
            verdicts.push(Verdict {
                what: format!(
                    "seek to first byte, {} over an HTTP range of nginx",
                    kind.name()
                ),
                target: 0.7,
                measured: ratio(ours, theirs),
            });
        }
    }
    Ok(())
}

fn idle(
    args: &MediaArgs,
    folder: &Folder,
    lines: &mut Vec<Value>,
    verdicts: &mut Vec<Verdict>,
) -> Result<()> {
    for kind in [Kind::Local, Kind::Tcp] {
        let served = Served::start(kind, folder.path())?;
        let viewers = viewer::idle(&served, args.idle)?;
        std::thread::sleep(Duration::from_millis(500));
        let (before, began) = (served.usage()?, Instant::now());
        std::thread::sleep(Duration::from_secs_f64(args.seconds));
        let (after, seconds) = (served.usage()?, began.elapsed().as_secs_f64());
        drop(viewers);
        let percent = 100.0 * (after.cpu - before.cpu) / seconds;
        let switches = after.switches.saturating_sub(before.switches) as f64 / seconds;
        println!(
            "{} idle viewers, {}: server CPU {percent:.3} %, {switches:.1} switches/s",
            args.idle,
            kind.name()
        );
        lines.push(json!({"bench": "media", "experiment": "idle", "server": kind.name(), "viewers": args.idle, "cpu_percent": percent,
            "switches_per_s": switches, "load": load_average()}));
        verdicts.push(Verdict {
            what: format!(
                "{} idle viewers, {}: percent of a core",
                args.idle,
                kind.name()
            ),
            target: 0.1,
            measured: percent,
        });
    }
    Ok(())
}

fn show_verdicts(verdicts: &[Verdict], lines: &mut Vec<Value>) {
    if verdicts.is_empty() {
        return;
    }
    let mut table = Table::new(&["what", "at most", "measured", "holds"]);
    for v in verdicts {
        let holds = v.measured <= v.target;
        table.push([
            v.what.clone(),
            format!("{:.2}", v.target),
            format!("{:.3}", v.measured),
            if holds { "yes" } else { "no" }.to_owned(),
        ]);
        lines.push(json!({"bench": "media", "verdict": v.what, "target": v.target, "measured": v.measured, "holds": holds}));
    }
    println!("{}", table.to_text(None));
}

/// A folder with the movie in it, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn make() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("weft-bench-media-{}", std::process::id()));
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
