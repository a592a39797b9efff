//! The suite `weft-papers dgram`: the datagram paper's figs. 5 to 12, and their targets.

pub(crate) mod clients;
mod conclusions;
mod end;
pub(crate) mod group;
pub(crate) mod lossy;
mod sipp;
mod vlc;

use crate::args::{DgramArgs, DgramFigure};
use crate::driver::{Kind, Op, Spec, Stack, Transport};
use crate::error::{BenchError, Result};
use crate::progress::Progress;
use crate::record::{Metric, Record, of_suite};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table};
use crate::scenario::{Contender, Effort, Group, run_groups, window};
use crate::usage;
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

/// 1 B to 1 MiB, with the sizes that the paper speaks of.
const SIZES: &str = "1,16,64,256,1K,2K,4K,16K,64K,128K,256K,512K,1M";
const QUICK: &str = "64,1K,64K,512K";

/// Runs the suite: prints tables and conclusions, and writes what the options ask for.
pub(crate) fn run(args: &DgramArgs) -> Result<ExitCode> {
    let mut records: Vec<Record> = crate::output::read(&args.from)?;
    let mut output = args.output.open()?;
    output.lines(&records)?;
    let effort = Effort {
        runs: args.effort.runs(),
        target: Duration::from_secs_f64(args.effort.seconds()),
        bytes: None,
    };
    let groups = groups(args);
    let load = usage::load_average();
    let mut progress = Progress::new(groups.len() as u64);
    records.extend(run_groups(
        "dgram",
        &groups,
        &effort,
        &mut progress,
        &mut output,
    )?);
    drop(progress);
    for figure in args.figures() {
        let mut failed = |what: &str, error: &BenchError| output.failed(what, error);
        let new = match figure {
            DgramFigure::Five | DgramFigure::Six => continue,
            DgramFigure::Seven => group::run(args.effort.quick, effort.runs, &mut failed),
            DgramFigure::Nine => lossy::run(args, effort.runs, &mut failed),
            DgramFigure::Ten => vlc::run(effort.runs, &mut failed),
            DgramFigure::Eleven => sipp::run(args.effort.quick, effort.runs, &mut failed),
            DgramFigure::Twelve => clients::run(args.effort.quick, effort.runs, &mut failed),
        };
        let new = of_suite("dgram", new);
        output.lines(&new)?;
        records.extend(new);
    }
    output.finish(&report(args, &records, &effort, &load))
}

fn groups(args: &DgramArgs) -> Vec<Group> {
    let sizes = args.effort.sizes(SIZES, QUICK);
    let mut groups = Vec::new();
    for figure in args.figures() {
        for (name, op) in [("send", Op::Send), ("write", Op::Write)] {
            for &bytes in &sizes {
                let kind = match figure {
                    DgramFigure::Five => Kind::PingPong,
                    DgramFigure::Six => Kind::Stream,
                    _ => continue,
                };
                // The targets of RDMA Write-Record are learnt of by completions; those of an RDMA Write by looking at memory, as in `weft bench verbs`.
                let spec = Spec {
                    op,
                    kind,
                    bytes,
                    crc: true,
                    busy: kind == Kind::PingPong,
                    window: window(op, bytes),
                    ..Spec::BASE
                };
                let contender = |stack, transport| Contender {
                    spec: Spec {
                        stack,
                        transport,
                        ..spec
                    },
                    case: None,
                };
                groups.push(Group {
                    op: name,
                    contenders: vec![
                        contender(Stack::WeftUd, Transport::Tcp),
                        contender(Stack::WeftRd, Transport::Tcp),
                        contender(Stack::Weft, Transport::Tcp),
                        contender(Stack::Weft, Transport::Local),
                        contender(Stack::Udp, Transport::Tcp),
                        contender(Stack::WeftUd, Transport::Local),
                        contender(Stack::WeftRd, Transport::Local),
                        contender(Stack::UdpSingle, Transport::Tcp),
                    ],
                });
            }
        }
    }
    groups
}

/// The lines of a figure: stack, transport, operation, name.
#[rustfmt::skip]
const LINES: [(&str, &str, &str, &str); 16] = [
    ("weft-ud", "udp", "send", "UD send/recv"),
    ("weft-ud", "udp", "write_record", "UD Write-Record"),
    ("weft", "tcp", "send", "RC send/recv"),
    ("weft", "tcp", "write", "RC Write"),
    ("weft", "local", "send", "RC send/recv, shared memory"),
    ("weft", "local", "write", "RC Write, shared memory"),
    ("udp", "udp", "send", "bare UDP"),
    ("udp", "udp", "write", "bare UDP, beside writes"),
    ("weft-rd", "udp", "send", "reliable datagrams, send/recv"),
    ("weft-rd", "udp", "write_record", "reliable datagrams, Write-Record"),
    ("weft-ud", "local", "send", "UD send/recv, shared memory"),
    ("weft-ud", "local", "write_record", "UD Write-Record, shared memory"),
    ("weft-rd", "local", "send", "reliable datagrams, send/recv, shared memory"),
    ("weft-rd", "local", "write_record", "reliable datagrams, Write-Record, shared memory"),
    ("udp-single", "udp", "send", "bare UDP, a datagram a call"),
    ("udp-single", "udp", "write", "bare UDP, a datagram a call, beside writes"),
];

fn median(records: &[Record], line: usize, bytes: u64, metric: Metric) -> Option<f64> {
    let (stack, transport, op, _) = LINES[line];
    let found = records.iter().find(|r| {
        r.stack == stack
            && r.transport == transport
            && r.op == op
            && r.bytes == bytes
            && r.metric == metric
            && r.case.is_none()
    });
    found.map(|record| record.summary.median)
}

fn report(args: &DgramArgs, records: &[Record], effort: &Effort, load: &str) -> Report {
    let mut report = Report::new("weft-papers dgram");
    report.intro.push(
        "Datagram queue pairs over UDP beside reliable connections over TCP and shared memory, all with CRC-32C where bytes cross a network, turn by turn on one machine."
            .to_owned(),
    );
    report.intro.push(if args.from.is_empty() {
        format!(
            "Medians of {} runs of {:?} each. The load of the last minute was {load} at the start.",
            effort.runs, effort.target
        )
    } else {
        "Results of several runs of this suite, which are kept as JSON; each number's runs are counted there.".to_owned()
    });
    let sizes = sizes(records);
    let (latency, bandwidth) = (Metric::latency_us_p50, Metric::bandwidth_GBps);
    for (title, metric, unit) in [
        (
            "Latency (the paper's fig. 5), both sides spin",
            latency,
            "microseconds, one way",
        ),
        ("Bandwidth (fig. 6)", bandwidth, "GB/s, one direction"),
    ] {
        report
            .sections
            .push(lines(records, &sizes, title, metric, unit));
    }
    report.sections.push(group::section(records));
    report.sections.extend(lossy::sections(records));
    report.sections.push(vlc::section(records));
    report.sections.push(sipp::section(records));
    report.sections.push(clients::section(records));
    report
        .sections
        .extend(conclusions::section(records, &sizes));
    report.sections.retain(Section::has_rows);
    report
}

/// Sizes of the messages of figs. 5 and 6.
fn sizes(records: &[Record]) -> Vec<u64> {
    let of_lines = |record: &&Record| {
        let mut lines = LINES.iter();
        record.case.is_none()
            && lines.any(|line| (record.stack.as_str(), record.op.as_str()) == (line.0, line.2))
    };
    let sizes: BTreeSet<u64> = records
        .iter()
        .filter(of_lines)
        .map(|record| record.bytes)
        .collect();
    sizes.into_iter().collect()
}

/// A figure of lines over sizes.
fn lines(records: &[Record], sizes: &[u64], title: &str, metric: Metric, unit: &str) -> Section {
    let value = |line, bytes| median(records, line, bytes, metric);
    let mut header = vec!["size"];
    header.extend(LINES.iter().map(|(.., name)| *name));
    let mut table = Table::new(&header);
    for &bytes in sizes {
        let values: Vec<_> = (0..LINES.len()).map(|line| value(line, bytes)).collect();
        if values.iter().any(Option::is_some) {
            let values = values.into_iter();
            let cells = values.map(|v| v.map_or_else(String::new, |v| format!("{v:.3}")));
            table.push([crate::size::human(bytes)].into_iter().chain(cells));
        }
    }
    let mut plot = Plot::new(title, Axis::bytes(), Axis::log(unit));
    for (line, (stack, _, op, name)) in LINES.iter().enumerate() {
        let points = sizes
            .iter()
            .filter_map(|&bytes| Some((bytes as f64, value(line, bytes)?)));
        let stroke = match *stack {
            "weft-ud" | "weft-rd" => Stroke::Weft,
            "weft" if line < 4 => Stroke::Tcp,
            "weft" => Stroke::WeftOther,
            _ => Stroke::Other,
        };
        let series = Series::new(*name, stroke, points.collect());
        plot = plot.series(if *op == "send" {
            series
        } else {
            series.dashed()
        });
    }
    Section::new(title).text(unit).table(table).plot(plot)
}

impl DgramArgs {
    fn figures(&self) -> Vec<DgramFigure> {
        if self.figure.is_empty() && self.from.is_empty() {
            vec![DgramFigure::Five, DgramFigure::Six]
        } else {
            self.figure.clone()
        }
    }
}
