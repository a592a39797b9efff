//! `weft demo`: a file between two processes by RDMA Writes and by plain TCP, in turns; then the verbs compared with plain TCP; all on one
//! page.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::Value;
use sha2::{Digest, Sha256};
use weft_report::programs;
use weft_report::record::{Metric, Record, read_lines};
use weft_report::size::human;
use weft_report::stats::{Summary, paired_ratio};
use weft_report::{Axis, Bars, Plot, Report, Section, Series, Stroke, Table, machine, number};

use crate::cp::auth::hex;
use weft_cli::failure::{Failure, check_writable, write_file};

/// The options.
#[derive(Debug, Clone)]
pub struct Options {
    /// The path of the report.
    pub html: PathBuf,
    /// Length of the file in bytes.
    pub size: u64,
    /// The working directory, if not the default.
    pub dir: Option<PathBuf>,
    /// Runs of each way.
    pub runs: u32,
    /// Whether to measure the verbs too.
    pub verbs: bool,
}

/// One way to move the file.
struct Way {
    name: &'static str,
    /// The value of `WEFT_LOCAL`.
    local: &'static str,
    args: &'static [&'static str],
    stroke: Stroke,
}

const WAYS: [Way; 3] = [
    Way {
        name: "weft in shared memory",
        local: "auto",
        args: &[],
        stroke: Stroke::WeftOther,
    },
    Way {
        name: "weft over TCP by TLS",
        local: "off",
        args: &[],
        stroke: Stroke::Weft,
    },
    Way {
        name: "plain TCP, not encrypted",
        local: "off",
        args: &["--plain-tcp"],
        stroke: Stroke::Tcp,
    },
];
const TCP: usize = WAYS.len() - 1;

/// The measurements of one way's runs.
#[derive(Default)]
struct Measured {
    gbps: Vec<f64>,
    sender_cpu: Vec<f64>,
    receiver_cpu: Vec<f64>,
}

fn broken(what: &str) -> impl Fn(std::io::Error) -> Failure {
    move |e| {
        Failure::failed(format!("{what}: {e}"))
            .hint("--dir DIR works elsewhere; `weft doctor` says what is missing")
    }
}

/// Runs the demonstration; `say` gets a line at a time.
pub fn run(options: &Options, say: &mut dyn FnMut(&str)) -> Result<(), Failure> {
    // A report that cannot be written is better known before the measurements than after.
    check_writable(&options.html)?;
    let work = WorkDir::new(options)?;
    say(&format!(
        "weft demo in {} on {}",
        work.0.display(),
        machine()
    ));
    let crowding = weft_report::crowding();
    if let Some(notice) = &crowding {
        say(&format!("notice: {notice}"));
    }
    let source = work.0.join("file");
    let (sum, took) = make_file(&source, options.size)?;
    say(&format!(
        "made a file of {} in {took:.1} s, SHA-256 {}",
        human(options.size),
        &sum[..16]
    ));

    let mut measured: [Measured; WAYS.len()] = Default::default();
    let receivers = WAYS
        .iter()
        .map(|way| Receiver::start(way, &work.0))
        .collect::<Result<Vec<_>, _>>()?;
    // One round before the ones that count: the memory of all processes has been touched then.
    for run in 0..=options.runs {
        for turn in 0..WAYS.len() {
            // Each way comes first and last in turn.
            let at = (turn + run as usize) % WAYS.len();
            let one = transfer(&WAYS[at], &work.0, &receivers[at], &source, &sum)?;
            if run > 0 {
                let to = &mut measured[at];
                to.gbps.push(options.size as f64 / one.seconds / 1e9);
                to.sender_cpu.push(one.cpu / (options.size as f64 / 1e9));
                to.receiver_cpu
                    .push(one.peer_cpu / (options.size as f64 / 1e9));
            }
        }
    }
    drop(receivers);
    let (section, lines) = file_section(options, &measured);
    for line in &lines {
        say(line);
    }

    let program = options.verbs.then(|| programs::of_weft("weft-bench"));
    let records = match program {
        Some(Some(program)) => {
            say("measuring the verbs beside plain TCP ...");
            bench(&program, &work.0)?
        }
        Some(None) => {
            say(
                "the verbs are not measured: weft-bench, which `./x build` builds, is neither beside weft nor on PATH",
            );
            Vec::new()
        }
        None => Vec::new(),
    };
    let mut report = Report::new("weft demo");
    report.intro = vec![
        format!("weft {} on {}.", env!("CARGO_PKG_VERSION"), machine()),
        format!(
            "Made by `weft demo --size {} --runs {}`; the file was in {}. Sender and receiver are two processes; both ways \
             read the file, move it over the loopback interface, checksum every block, write it to a temporary file and rename it. \
             Every transfer was verified by SHA-256.",
            options.size,
            options.runs,
            work.0.display()
        ),
    ];
    report
        .intro
        .extend(crowding.map(|notice| format!("When it began, {notice}.")));
    let gains = gains(options, &measured, &records);
    say(&gains.words());
    report.sections.push(opening(gains));
    report.sections.push(section);
    report.sections.extend(verbs_sections(&records));
    write_file(&options.html, &report.to_html())?;
    say(&format!("report: {}", options.html.display()));
    Ok(())
}

/// The beginning of the directories' names; the process's number follows.
const WORK: &str = "weft-demo-";

/// A directory that is removed with its contents.
struct WorkDir(PathBuf);

impl WorkDir {
    fn new(options: &Options) -> Result<Self, Failure> {
        // The file, the finished copy and the one that grows.
        let need = options.size.saturating_mul(3).saturating_add(64 << 20);
        let room = |dir: &Path| {
            rustix::fs::statvfs(dir).is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) >= need)
        };
        let base = match &options.dir {
            Some(dir) => dir.clone(),
            None if room(Path::new("/dev/shm")) => "/dev/shm".into(),
            None => std::env::temp_dir(),
        };
        if !base.is_dir() {
            return Err(
                Failure::failed(format!("{} is not a directory", base.display()))
                    .hint("name one that exists and that you can write to with --dir DIR"),
            );
        }
        if !room(&base) {
            return Err(Failure::failed(format!(
                "{} has no room for {}",
                base.display(),
                human(need)
            ))
            .hint("--dir DIR works elsewhere, --size SIZE moves less"));
        }
        remove_stale(&base);
        let dir = base.join(format!("{WORK}{}", std::process::id()));
        fs::create_dir(&dir).map_err(broken("cannot make a directory to work in"))?;
        let gone = dir.clone();
        weft_cli::tidy_up(move || {
            // The demonstration goes on until the process ends, and can make a file in a directory that is being removed.
            let again = |e: &std::io::Error| e.kind() == std::io::ErrorKind::DirectoryNotEmpty;
            while fs::remove_dir_all(&gone).is_err_and(|e| again(&e)) {}
        });
        Ok(Self(dir))
    }
}

/// Removes what demonstrations left that were ended by a signal: in /dev/shm it would take memory for ever.
fn remove_stale(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of = name.to_str().and_then(|name| name.strip_prefix(WORK));
        let gone = |pid: &str| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists();
        if of.is_some_and(gone) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes bytes that look random and are the same each time; their SHA-256 and the seconds that it took.
fn make_file(path: &Path, size: u64) -> Result<(String, f64), Failure> {
    let began = Instant::now();
    let error = broken("cannot make the file");
    let mut file = File::create(path).map_err(&error)?;
    let mut sum = Sha256::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut left = size;
    let mut block = vec![0; 1 << 20];
    while left > 0 {
        for word in block.as_chunks_mut::<8>().0 {
            // Xorshift: fast, and no compressor or deduplicator finds anything in it.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        let n = left.min(block.len() as u64) as usize;
        sum.update(&block[..n]);
        file.write_all(&block[..n]).map_err(&error)?;
        left -= n as u64;
    }
    Ok((hex(&sum.finalize()), began.elapsed().as_secs_f64()))
}

fn sha256(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex(&sum.finalize())),
            n => sum.update(&block[..n]),
        }
    }
}

/// `weft cp`, the way that is asked for.
fn this_program(way: &Way, work: &Path) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(broken("cannot find this program's file"))?;
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).arg("cp");
    command.env("WEFT_LOCAL", way.local);
    // Keys of its own, which go away with it.
    command.env("XDG_CONFIG_HOME", work);
    Ok(command)
}

/// A running `weft cp --listen`.
struct Receiver {
    child: Child,
    addr: String,
    dir: PathBuf,
}

impl Receiver {
    fn start(way: &Way, work: &Path) -> Result<Self, Failure> {
        let error = broken("cannot start the receiver");
        let dir = work.join(format!(
            "into-{}{}",
            way.local,
            way.args.first().copied().unwrap_or_default()
        ));
        fs::create_dir(&dir).map_err(&error)?;
        let mut child = this_program(way, work)?
            .args(["--bind", "127.0.0.1:0", "--listen"])
            .arg(&dir)
            .args(way.args)
            .stdout(Stdio::piped())
            .spawn()
            .map_err(&error)?;
        let mut line = String::new();
        let stdout = child.stdout.take();
        let mut receiver = Self {
            child,
            addr: String::new(),
            dir,
        };
        if let Some(stdout) = stdout {
            let mut stdout = BufReader::new(stdout);
            stdout.read_line(&mut line).map_err(&error)?;
            // Read on, so that it never waits for us; ends with the receiver.
            std::thread::spawn(move || stdout.lines().count());
        }
        let addr = line
            .strip_prefix("listening on ")
            .and_then(|l| l.split(',').next());
        let Some(addr) = addr else {
            return Err(Failure::failed("the receiver did not start").hint("see its message above"));
        };
        addr.clone_into(&mut receiver.addr);
        Ok(receiver)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One transfer, verified.
struct Transfer {
    seconds: f64,
    cpu: f64,
    peer_cpu: f64,
}

fn transfer(
    way: &Way,
    work: &Path,
    receiver: &Receiver,
    source: &Path,
    sum: &str,
) -> Result<Transfer, Failure> {
    let out = this_program(way, work)?
        .args(["--json", "--no-progress"])
        .args(way.args)
        .arg(source)
        .arg(format!("{}:", receiver.addr))
        .stderr(Stdio::inherit())
        .output()
        .map_err(broken("cannot start the sender"))?;
    if !out.status.success() {
        return Err(
            Failure::failed(format!("{}: the transfer failed", way.name))
                .hint("see its message above"),
        );
    }
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
    let field = |name: &str| {
        summary[name].as_f64().ok_or_else(|| {
            Failure::failed(format!(
                "{}: the sender's summary has no `{name}`",
                way.name
            ))
        })
    };
    let copy = receiver.dir.join("file");
    let got = sha256(&copy).map_err(broken("cannot verify the copy"))?;
    if got != sum {
        return Err(Failure::failed(format!(
            "{}: the copy differs from the file: SHA-256 {got}",
            way.name
        ))
        .hint("this is a bug: please report it"));
    }
    fs::remove_file(&copy).map_err(broken("cannot remove the copy"))?;
    Ok(Transfer {
        seconds: field("seconds")?,
        cpu: field("cpu_s")?,
        peer_cpu: field("peer_cpu_s")?,
    })
}

/// The gain of each way over plain TCP, at each size: the file, then the verbs.
fn gains(options: &Options, measured: &[Measured; WAYS.len()], records: &[Record]) -> Bars {
    let files = WAYS[..TCP].iter().zip(measured).filter_map(|(way, of)| {
        let ratio = paired_ratio(&of.gbps, &measured[TCP].gbps)?;
        Some((
            format!("a file of {}, {}", human(options.size), way.name),
            ratio,
        ))
    });
    let mut rows: Vec<_> = files.collect();
    for (transport, words) in [("local", "shared memory"), ("tcp", "over TCP")] {
        for (op, metric, what) in [
            ("write", Metric::bandwidth_GBps, "throughput of a Write"),
            ("send", Metric::latency_us_p50, "latency of a Send"),
        ] {
            let mut of: Vec<_> = records
                .iter()
                .filter(|r| (&*r.op, r.metric, &*r.stack) == (op, metric, "weft"))
                .filter(|r| r.transport == transport && r.crc != Some(true))
                .collect();
            of.sort_by_key(|r| r.bytes);
            for record in of {
                let ratios = [record.ratio_tcp, record.ratio_tcp_min, record.ratio_tcp_max];
                let [Some(ratio), Some(least), Some(most)] = ratios else {
                    continue;
                };
                let all = [least, ratio, most];
                // Of two times the shorter one is better.
                let is_time = metric == Metric::latency_us_p50;
                let better = all.map(|ratio| if is_time { 1.0 / ratio } else { ratio });
                let label = format!("{words}: {what}, {}", human(record.bytes));
                rows.extend(Summary::of(&better).map(|summary| (label, summary)));
            }
        }
    }
    Bars::gains("times as good as plain TCP", rows)
}

/// The beginning of the page.
fn opening(gains: Bars) -> Section {
    Section::new("What weft gains beside plain TCP, and where it does not")
        .text(gains.words())
        .text(
            "Blue is better than plain TCP, red is worse, and the thick stroke at 1 is plain TCP itself; the thin line goes from the least to the most of the runs. \
             Both ends are processes of this machine, which sleep while they wait. For latency it is TCP's time over weft's. The file's speed is limited by reading and writing it.",
        )
        .bars(gains)
}

/// The file's part of the report, and its lines for the terminal.
fn file_section(options: &Options, measured: &[Measured; WAYS.len()]) -> (Section, Vec<String>) {
    let mut table = Table::new(&[
        "way",
        "GB/s",
        "min",
        "max",
        "beside TCP",
        "sender CPU s/GB",
        "receiver CPU s/GB",
    ]);
    let mut plot = Plot::new(
        format!("{} file, every run", human(options.size)),
        Axis::linear("run"),
        Axis::linear("GB/s"),
    );
    let mut lines = Vec::new();
    let median =
        |samples: &[f64]| Summary::of(samples).map_or_else(String::new, |s| number(s.median));
    for (way, m) in WAYS.iter().zip(measured) {
        let Some(speed) = Summary::of(&m.gbps) else {
            continue;
        };
        let ratio = paired_ratio(&m.gbps, &measured[TCP].gbps)
            .map_or_else(String::new, |r| number(r.median));
        lines.push(format!(
            "{:<24} {} GB/s (median of {}, {} to {}), {ratio} of plain TCP, CPU {} + {} s/GB",
            way.name,
            number(speed.median),
            speed.runs,
            number(speed.min),
            number(speed.max),
            median(&m.sender_cpu),
            median(&m.receiver_cpu),
        ));
        table.push([
            way.name.to_owned(),
            number(speed.median),
            number(speed.min),
            number(speed.max),
            ratio,
            median(&m.sender_cpu),
            median(&m.receiver_cpu),
        ]);
        let points = m
            .gbps
            .iter()
            .enumerate()
            .map(|(i, g)| ((i + 1) as f64, *g))
            .collect();
        plot = plot.series(Series::new(way.name, way.stroke, points));
    }
    let section = Section::new(format!("A file of {}", human(options.size)))
        .text(
            "Medians of all runs; the ways took turns, and the ratio to plain TCP is the median of the ratios run by run. Every \
             block has a checksum of its own. Over TCP `weft cp` encrypts and authenticates all that it sends; the plain way does neither.",
        )
        .table(table)
        .plot(plot);
    (section, lines)
}

/// A short `weft bench verbs`.
fn bench(program: &Path, work: &Path) -> Result<Vec<Record>, Failure> {
    let json = work.join("bench.json");
    let file = json.display().to_string();
    let args = [
        "verbs",
        "--quick",
        "--op",
        "send,write,read",
        "--size",
        "64,4K,64K,1M,4M",
        "--runs",
        "5",
        "--poll",
        "block",
        "--transport",
        "tcp,local",
        "--memory",
        "allocated",
        "--json",
        &file,
    ];
    let mut command = Command::new(program);
    let done = command.args(args).stdin(Stdio::null()).status();
    if !done.map_err(broken("cannot start weft-bench"))?.success() {
        let what = "the verbs were not measured: weft-bench failed";
        return Err(Failure::failed(what).hint("see its message above"));
    }
    let text = fs::read_to_string(&json).map_err(broken("cannot read the bench's results"))?;
    read_lines(&text).map_err(|e| Failure::failed(format!("cannot read the bench's results: {e}")))
}

/// Throughput and latency over message size, with a table for each.
fn verbs_sections(records: &[Record]) -> Vec<Section> {
    let mut sections = Vec::new();
    for (title, metric, axis) in [
        ("throughput", Metric::bandwidth_GBps, Axis::log("GB/s")),
        (
            "latency, half a round trip, median",
            Metric::latency_us_p50,
            Axis::log("µs"),
        ),
    ] {
        for op in ["send", "write", "read"] {
            let of = |r: &&Record| r.op == op && r.metric == metric;
            let mut plot = Plot::new(format!("{op}: {title}"), Axis::bytes(), axis.clone());
            let mut table =
                Table::new(&["stack", "size", metric.name(), "min", "max", "beside TCP"]);
            for (stack, transport, crc, stroke, name) in [
                (
                    "weft",
                    "local",
                    None,
                    Stroke::WeftOther,
                    "weft in shared memory",
                ),
                ("weft", "tcp", Some(false), Stroke::Weft, "weft over TCP"),
                (
                    "weft",
                    "tcp",
                    Some(true),
                    Stroke::WeftCrc,
                    "weft over TCP with CRC",
                ),
                ("tcp", "tcp", None, Stroke::Tcp, "plain TCP"),
            ] {
                let mut of: Vec<_> = records
                    .iter()
                    .filter(of)
                    .filter(|r| r.stack == stack && r.transport == transport)
                    .filter(|r| crc.is_none() || r.crc == crc)
                    .collect();
                of.sort_by_key(|r| r.bytes);
                for r in &of {
                    let s = &r.summary;
                    let ratio = r.ratio_tcp.map_or_else(String::new, number);
                    table.push([
                        name.to_owned(),
                        human(r.bytes),
                        number(s.median),
                        number(s.min),
                        number(s.max),
                        ratio,
                    ]);
                }
                let at = |r: &&Record| r.bytes as f64;
                let points = of.iter().map(|r| (at(r), r.summary.median)).collect();
                let spread = of
                    .iter()
                    .map(|r| (at(r), r.summary.min, r.summary.max))
                    .collect();
                plot = plot.series(Series::new(name, stroke, points).spread(spread));
            }
            if plot.has_points() {
                sections.push(
                    Section::new(format!("{op}: {title}"))
                        .plot(plot)
                        .table(table),
                );
            }
        }
    }
    sections
}
