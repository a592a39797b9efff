//! Every perftest program with its options, on both devices, in shared memory and over TCP.
//!
//! This takes minutes and needs an otherwise idle machine: `cargo test -p weft-dropin --test programs perftest_matrix -- --ignored --test-threads 1` runs it
//! and prints two tables (the results; the figures compared with the native benchmark). With `WEFT_BLESS=1` it writes them into docs/figures/perftest.md. A
//! failure is reported with the output of both sides. `WEFT_MATRIX="ib_send_bw ib_read_lat"` runs only these programs, and writes only their rows.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use weft_dropin::{Done, Weft, free_port, have, libraries, say};

use super::carriers;

const LIMIT: Duration = Duration::from_mins(3);
/// A program that refuses its options does so before it opens a device.
const REFUSAL: Duration = Duration::from_secs(20);
const DOCUMENT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/figures/perftest.md"
);

const ALL: [&str; 8] = [
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
];
const OPTIONS: [&str; 8] = ["", "-a", "-b", "-e", "-q 8", "-l 16", "-I 220", "--use-srq"];
const DEVICES: [(&str, &str); 2] = [("weft0", "-R -d weft0"), ("weft_ib0", "-d weft_ib0")];

/// The numbers of iterations and bytes, where the option does not set them. Hundreds: with `-b` on an iWARP device perftest 4.5 does not end with 128 or 320
/// iterations, unless `-Q 1` makes it ask for each completion (docs/verbs.md says why).
fn sizes(program: &str, options: &str) -> &'static str {
    let (latency, atomic) = (program.ends_with("lat"), program.contains("atomic"));
    match options {
        "-a" => "-n 6",
        "-I 220" => "-n 300 -s 220",
        // A multiple of the list's length.
        "-l 16" if atomic => "-n 320",
        "-l 16" => "-n 320 -s 4096",
        _ if atomic => "-n 300",
        "" if latency => "-n 1000 -s 64",
        "" => "-n 1000 -s 65536",
        _ => "-n 300 -s 4096",
    }
}

/// Runs that perftest itself does not end, even if all completions are right.
fn endless(program: &str, device: &str, options: &str) -> bool {
    // It sleeps for its own completion while it waits for the peer's credits, which arrive in its memory.
    (program, device, options) == ("ib_send_bw", "weft0", "-e")
}

/// The outcome of a cell's run.
enum Outcome {
    /// Both sides ended well; the client's (last) line of numbers.
    Good(Vec<f64>),
    /// The program refuses the option.
    Refused,
    /// A failure, with the output of both sides.
    Bad(String),
}

/// True if a program refuses these options by itself, without a peer.
fn refuses(weft: &Weft, line: &str) -> bool {
    let done = weft
        .clone()
        .limit(REFUSAL)
        .run(&format!("{line} -p {} 127.0.0.1", free_port()));
    let tried = done.text.contains("Unable to init the socket connection");
    !done.is_good() && done.code() != 124 && !tried
}

fn run(weft: &Weft, line: &str, rows: usize) -> Outcome {
    let port = free_port();
    let server = weft.start(&format!("{line} -p {port}")).listens(port);
    let client = weft.run(&format!("{line} -p {port} 127.0.0.1"));
    if client.is_good() {
        return measured(&server.end(), &client, rows);
    }
    Outcome::Bad(format!(
        "{}\nserver: {}",
        client.show(),
        server.kill().show()
    ))
}

fn measured(server: &Done, client: &Done, rows: usize) -> Outcome {
    let mut table = client.table();
    if !server.is_good() {
        return Outcome::Bad(server.show());
    }
    match table.pop() {
        Some(last) if table.len() + 1 == rows => Outcome::Good(last),
        _ => Outcome::Bad(client.show()),
    }
}

/// The text of a cell for both carriers, and true if it is as expected.
fn cell(line: &str, program: &str, device: &str, options: &str) -> (String, bool) {
    let rows = if options == "-a" { 23 } else { 1 };
    let outcomes = carriers(device).map(|weft| {
        if refuses_known(program, options) {
            let refused = refuses(&weft, line);
            return if refused {
                Outcome::Refused
            } else {
                Outcome::Bad(format!("{line} was not refused"))
            };
        }
        run(&weft.limit(LIMIT), line, rows)
    });
    let mut good = true;
    let mut words = outcomes.iter().map(|outcome| match outcome {
        Outcome::Refused => "—".to_owned(),
        Outcome::Bad(why) => {
            say(&format!("matrix: {line}: {why}"));
            good = false;
            "**no**".to_owned()
        }
        Outcome::Good(_) => "ok".to_owned(),
    });
    let (shared, tcp) = (words.next(), words.next());
    drop(words);
    let (shared, tcp) = (shared.unwrap_or_default(), tcp.unwrap_or_default());
    let text = if shared == tcp {
        shared
    } else {
        format!("{shared} / {tcp}")
    };
    (text, good)
}

/// Options that perftest 4.5 does not have for a program. The run checks that the program refuses them.
fn refuses_known(program: &str, options: &str) -> bool {
    let (_, rest) = program.split_once('_').unwrap_or_default();
    let (verb, kind) = rest.split_once('_').unwrap_or_default();
    match options {
        "-a" => verb == "atomic",
        "-b" | "-q 8" | "-l 16" => kind == "lat",
        "-e" => verb == "write",
        "-I 220" => matches!(verb, "read" | "atomic"),
        "--use-srq" => verb != "send",
        _ => false,
    }
}

/// True if `WEFT_MATRIX` names a program, or is not set.
fn wanted(program: &str) -> bool {
    let only = std::env::var("WEFT_MATRIX").ok();
    only.is_none_or(|only| only.split_whitespace().any(|one| one == program))
}

/// Puts rows into a table of the page and replaces those that begin with the same two cells; rows of other programs stay.
fn bless(table: &str, head: &str, rows: &[String]) {
    say(&format!("perftest\n{head}{}", rows.concat()));
    if std::env::var_os("WEFT_BLESS").is_none() {
        return;
    }
    let (begin, end) = (
        format!("<!-- {table}: begin -->\n"),
        format!("<!-- {table}: end -->"),
    );
    let page = std::fs::read_to_string(DOCUMENT).expect("the page");
    let (before, rest) = page.split_once(&begin).expect("a place for the table");
    let (old, after) = rest.split_once(&end).expect("an end of the table");
    let mut text = head.to_owned();
    for program in ALL {
        for (device, _) in DEVICES {
            let start = format!("| `{program}` | {device} |");
            let new = rows.iter().map(|row| row.trim_end());
            let row = new.chain(old.lines()).find(|row| row.starts_with(&start));
            if let Some(row) = row {
                let _ = writeln!(text, "{row}");
            }
        }
    }
    std::fs::write(DOCUMENT, format!("{before}{begin}{text}{end}{after}")).expect("the page");
}

#[test]
#[ignore = "takes minutes"]
fn perftest_matrix() {
    if !have(&[("ib_send_bw", "perftest")]) {
        return;
    }
    let mut head = "| program | device |".to_owned();
    for options in OPTIONS {
        let _ = match options {
            "" => write!(head, " plain |"),
            options => write!(head, " `{options}` |"),
        };
    }
    head.push_str("\n|---|---|");
    head.push_str(&"---|".repeat(OPTIONS.len()));
    head.push('\n');
    let (mut rows, mut problems) = (Vec::new(), String::new());
    for program in ALL.into_iter().filter(|program| wanted(program)) {
        for (device, by) in DEVICES {
            let mut row = format!("| `{program}` | {device} |");
            let mut all_good = true;
            for options in OPTIONS {
                let line = format!("{program} -F {by} {} {options}", sizes(program, options));
                let text = if endless(program, device, options) {
                    "(1)".to_owned()
                } else {
                    let (text, good) = cell(&line, program, device, options);
                    all_good &= good;
                    text
                };
                let _ = write!(row, " {text} |");
            }
            say(&row);
            row.push('\n');
            if !all_good {
                problems += &row;
            }
            rows.push(row);
        }
    }
    bless("matrix", &head, &rows);
    assert!(problems.is_empty(), "{problems}");
}

/// Alternating runs of perftest and the native benchmark.
const TURNS: usize = 5;
/// Enough iterations that the start of a stream does not affect its rate and a median is meaningful. `ib_write_lat` spins on memory and competes with the
/// engine's thread, which waits for a tick of the scheduler where all cores spin.
fn iterations(program: &str) -> &'static str {
    match program {
        "ib_write_lat" => "-n 2000",
        _ => "-n 20000",
    }
}

/// The measured quantity of a program, and the command of `weft bench verbs` for the same on the same carrier.
struct Native {
    op: &'static str,
    figure: &'static str,
    bytes: u32,
    metric: &'static str,
}

fn native(program: &str) -> Native {
    let op = match program {
        "ib_send_bw" | "ib_send_lat" => "send",
        "ib_write_bw" | "ib_write_lat" => "write",
        "ib_read_bw" | "ib_read_lat" => "read",
        _ => "fetch_add",
    };
    let (figure, bytes, metric) = match program {
        _ if program.ends_with("lat") => ("latency", 64, "latency_us_p50"),
        "ib_atomic_bw" => ("bandwidth", 8, "messages_per_s"),
        _ => ("bandwidth", 65536, "bandwidth_GBps"),
    };
    Native {
        op,
        figure,
        bytes,
        metric,
    }
}

impl Native {
    /// One run of the benchmark on weft's own API, with registered memory as in a program for libibverbs.
    fn run(&self, weft: &Path, carrier: &str) -> f64 {
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("lines");
        let mut command = Command::new(weft);
        command
            .args(["--quiet", "bench", "verbs", "--stack", "weft", "--op"])
            .args([self.op, "--figure", self.figure, "--transport", carrier])
            .args(["--memory", "ordinary", "--crc", "on", "--poll", "busy"])
            .args(["--runs", "1", "--seconds", "0.3", "--json"])
            .arg(&json);
        if self.op != "fetch_add" {
            command.args(["--size", &self.bytes.to_string()]);
        }
        let output = command.output().expect("weft");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {said}");
        let lines = std::fs::read_to_string(json).expect("the results");
        let metric = format!("\"metric\":\"{}\"", self.metric);
        let line = lines.lines().find(|line| line.contains(&metric));
        let value = line.and_then(|line| line.split_once("\"median\":")?.1.split(',').next());
        let value = value.and_then(|value| value.parse().ok());
        value.unwrap_or_else(|| panic!("no {metric} in {lines}"))
    }

    /// The same quantity from perftest's line of numbers: `t_typical`, MiB/s, or millions a second.
    fn of(&self, row: &[f64]) -> f64 {
        let cell = |at: usize| row.get(at).copied().unwrap_or(f64::NAN);
        match self.metric {
            "latency_us_p50" => cell(4),
            "bandwidth_GBps" => cell(3) * f64::from(1 << 20) / 1e9,
            _ => cell(4) * 1e6,
        }
    }

    fn show(&self, value: f64) -> String {
        match self.metric {
            "latency_us_p50" => format!("{value:.2} µs"),
            "bandwidth_GBps" => format!("{value:.1} GB/s"),
            _ => format!("{:.2} M/s", value / 1e6),
        }
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The program `weft` in the place where a distribution has it for these libraries, or next to this test.
fn weft_program() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let places = [
        libraries().with_file_name("bin").join("weft"),
        test.ancestors().nth(2).unwrap().join("weft"),
    ];
    places.into_iter().find(|place| place.exists())
}

/// The measurements of each program compared with those of `weft bench verbs`, in turn, with libraries from `WEFT_VERBS_LIB`, those of a release.
#[test]
#[ignore = "takes minutes, and wants a release"]
fn perftest_matrix_beside_native() {
    if !have(&[("ib_send_bw", "perftest")]) {
        return;
    }
    let Some(weft) = weft_program() else {
        say("perftest_matrix_beside_native skipped: there is no weft program");
        return;
    };
    let mut rows = Vec::new();
    for program in ALL.into_iter().filter(|program| wanted(program)) {
        let native = native(program);
        for (device, by) in DEVICES {
            let peak = if program.ends_with("bw") { "-N" } else { "" };
            let mut line = format!("{program} -F {by} {} {peak}", iterations(program));
            if native.op != "fetch_add" {
                let _ = write!(line, " -s {}", native.bytes);
            }
            let mut row = format!("| `{program}` | {device} |");
            for (carrier, setting) in ["local", "tcp"].into_iter().zip(carriers(device)) {
                let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
                for _ in 0..TURNS {
                    let plain = native.run(&weft, carrier);
                    let measured = match run(&setting.clone().limit(LIMIT), &line, 1) {
                        Outcome::Good(row) => native.of(&row),
                        Outcome::Bad(why) => panic!("{line}: {why}"),
                        Outcome::Refused => panic!("{line} was refused"),
                    };
                    ours.push(measured);
                    theirs.push(plain);
                    ratios.push(measured / plain);
                }
                let (ours, theirs) = (native.show(median(&ours)), native.show(median(&theirs)));
                let _ = write!(row, " {ours} | {theirs} | {:.2} |", median(&ratios));
            }
            say(&row);
            row.push('\n');
            rows.push(row);
        }
    }
    let head = "| program | device | shared memory | native | ratio | TCP | native | ratio |\n|---|---|---|---|---|---|---|---|\n";
    bless("native", head, &rows);
}
