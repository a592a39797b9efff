//! `SIPp` over UDP and TCP, plain and under `weft run`: response time and calls a second (the datagram paper's fig. 11).

use std::path::Path;

use super::end::Failed;
use crate::children::{find, free_port};
use crate::error::{BenchError, Result, failed as error};
use crate::record::{Metric, Record};
use crate::report::{Section, Table};
use weft_bench::run::world::{Stack, World};

const TITLE: &str = "SIPp (fig. 11)";
/// Transport of `SIPp`, and its option: over TCP each call has a connection.
const TRANSPORTS: [(&str, &str); 2] = [("udp", "u1"), ("tcp", "tn")];
const STACKS: [Stack; 2] = [Stack::Plain, Stack::Weft];
/// Calls at once: few enough that a socket's buffer has room for all of their messages.
const AT_ONCE: u32 = 50;
/// The offered rate: more than is possible.
const RATE: u32 = 50_000;

/// The result of one run.
struct Run {
    /// Milliseconds.
    response: f64,
    /// Calls a second.
    calls: f64,
}

/// The value in the last line of a column; times are HH:MM:SS:ms or HH:MM:SS:µs.
fn column(csv: &str, name: &str) -> Option<String> {
    let mut lines = csv.lines();
    let at = lines.next()?.split(';').position(|column| column == name)?;
    Some(lines.next_back()?.split(';').nth(at)?.to_owned())
}

/// The mean of a file of response times.
fn mean(csv: &str) -> Option<f64> {
    let times = csv
        .lines()
        .skip(1)
        .filter_map(|line| line.split(';').nth(1)?.parse::<f64>().ok());
    let times: Vec<f64> = times.collect();
    (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64)
}

fn read(world: &World, file: &Path) -> Result<String> {
    std::fs::read_to_string(world.dir().join(file)).map_err(BenchError::system("read SIPp's files"))
}

fn measure(world: &World, stack: Stack, option: &str, calls: u32) -> Result<Run> {
    let port = free_port()?;
    // The server has one kind of socket for TCP.
    let server_option = if option == "u1" { "u1" } else { "t1" };
    let server = format!("sipp -sn uas -t {server_option} -i 127.0.0.1 -p {port} -nostdin");
    let server = world.server(stack, &server, port, None)?;
    let line = format!(
        "sipp -sn uac -t {option} -max_socket 2000 -i 127.0.0.1 127.0.0.1:{port} -r {RATE} -l {AT_ONCE} -m {calls} -d 0 -nostdin \
         -timeout 50 -trace_stat -stf calls.csv -fd 1 -trace_rtt -rtt_freq 1"
    );
    let begun = std::time::SystemTime::now();
    world.client(stack, &line, None)?;
    drop(server);
    let stat = read(world, Path::new("calls.csv"))?;
    let rate = column(&stat, "CallRate(C)").and_then(|rate| rate.parse().ok());
    // Its name contains the process number.
    let files = std::fs::read_dir(world.dir()).map_err(BenchError::system("read SIPp's files"))?;
    let newest = files.flatten().find(|file| {
        let name = file.file_name();
        let newer = file
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|time| time >= begun);
        newer && name.to_string_lossy().ends_with("_rtt.csv")
    });
    let newest = newest.ok_or_else(|| error("read SIPp's files", "no response times"))?;
    let times = read(world, &newest.path())?;
    let _ = std::fs::remove_file(newest.path());
    let response = mean(&times).ok_or_else(|| error("read SIPp's files", "no response times"))?;
    let calls = rate.ok_or_else(|| error("read SIPp's files", "no rate of calls"))?;
    Ok(Run { response, calls })
}

/// The figure.
pub(super) fn run(quick: bool, runs: u32, failed: &mut Failed<'_>) -> Vec<Record> {
    let world = if find("sipp").is_none() {
        Err(error(
            "start SIPp",
            "sipp is not installed (Debian: sip-tester)",
        ))
    } else {
        World::new(None, 0)
    };
    let world = match world {
        Ok(world) => world,
        Err(error) => {
            failed("SIPp", &error);
            return Vec::new();
        }
    };
    let calls = if quick { 1000 } else { 10_000 };
    let mut samples = vec![(Vec::new(), Vec::new()); TRANSPORTS.len() * STACKS.len()];
    // The stacks run in turn, so that a disturbance of the machine affects all of them.
    for _ in 0..runs {
        for (i, ((transport, option), stack)) in every().enumerate() {
            match measure(&world, stack, option, calls) {
                Ok(run) => {
                    samples[i].0.push(run.response * 1e3);
                    samples[i].1.push(run.calls);
                }
                Err(error) => failed(&format!("SIPp, {transport}, {}", stack.short()), &error),
            }
        }
    }
    let mut records = Vec::new();
    for (((transport, _), stack), (responses, rates)) in every().zip(&samples) {
        for (metric, samples) in [
            (Metric::latency_us_mean, responses),
            (Metric::messages_per_s, rates),
        ] {
            let record = Record::of("sipp", transport, stack.short(), 0, metric, samples);
            records.extend(record.map(|record| record.with_case(format!("{calls} calls"))));
        }
    }
    records
}

/// A value of `SIPp`'s.
fn value(records: &[Record], transport: &str, stack: Stack, metric: Metric) -> Option<f64> {
    let mut found = records.iter().filter(|record| record.op == "sipp");
    let found = found
        .find(|r| r.transport == transport && r.stack == stack.short() && r.metric == metric)?;
    Some(found.summary.median)
}

/// The figure's table.
pub(super) fn section(records: &[Record]) -> Section {
    let mut table = Table::new(&["over", "", "mean response, ms", "calls a second"]);
    for ((transport, _), stack) in every() {
        let of = |metric| value(records, transport, stack, metric);
        let (time, calls) = (of(Metric::latency_us_mean), of(Metric::messages_per_s));
        if time.is_some() || calls.is_some() {
            table.push([
                transport.to_owned(),
                stack.short().to_owned(),
                time.map_or_else(String::new, |us| format!("{:.2}", us / 1e3)),
                calls.map_or_else(String::new, |calls| format!("{calls:.0}")),
            ]);
        }
    }
    Section::new(TITLE)
        .text(format!(
            "{AT_ONCE} calls at once, as fast as they go; response times are counted by SIPp in milliseconds. Over TCP each call has a connection of its own."
        ))
        .table(table)
}

fn every() -> impl Iterator<Item = ((&'static str, &'static str), Stack)> {
    TRANSPORTS
        .into_iter()
        .flat_map(|transport| STACKS.map(|stack| (transport, stack)))
}

/// Response time and calls a second of `weft run` over those of plain UDP; response time of its UDP over that of its TCP.
pub(super) fn ratios(records: &[Record]) -> [Option<f64>; 3] {
    let of = |transport, stack, metric| value(records, transport, stack, metric);
    // Answers within SIPp's millisecond take none.
    let ratio = |(a, b): (f64, f64)| if a == 0.0 && b == 0.0 { 1.0 } else { a / b };
    let (response, calls) = (Metric::latency_us_mean, Metric::messages_per_s);
    let ours = of("udp", Stack::Weft, response);
    [
        ours.zip(of("udp", Stack::Plain, response)).map(ratio),
        of("udp", Stack::Weft, calls)
            .zip(of("udp", Stack::Plain, calls))
            .map(ratio),
        ours.zip(of("tcp", Stack::Weft, response)).map(ratio),
    ]
}
