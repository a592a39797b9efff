//! The suite `weft bench dgram`: the datagram paper's figs. 5 to 9, 11 and 12, and what they are to reach.

pub(crate) mod clients;
pub(crate) mod group;
pub(crate) mod lossy;
mod sipp;

use crate::aims::{self, Aim, Limit};
use crate::args::{DgramArgs, DgramFigure};
use crate::driver::{Context, Kind, Op, Spec, Stack, Transport};
use crate::error::Result;
use crate::process::Peer;
use crate::progress::Progress;
use crate::record::{Metric, Record, of_suite};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table};
use crate::scenario::{Contender, Effort, Group, run_group, window};
use crate::usage;
use std::process::ExitCode;
use std::time::Duration;

/// 1 B to 1 MiB, with the sizes that the paper speaks of.
const SIZES: [u64; 13] = [
    1,
    16,
    64,
    256,
    1 << 10,
    2 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
];
const QUICK: [u64; 4] = [64, 1 << 10, 64 << 10, 512 << 10];

/// Runs the suite: prints tables and conclusions, and writes what the options ask for.
pub(crate) fn run(args: &DgramArgs) -> Result<ExitCode> {
    let mut output = args.output.open()?;
    let effort = Effort {
        runs: args.runs.unwrap_or(if args.quick { 3 } else { 10 }),
        target: Duration::from_secs_f64(args.seconds.unwrap_or(if args.quick {
            0.03
        } else {
            0.15
        })),
        bytes: None,
    };
    let groups = groups(args);
    let load = usage::load_average();
    let mut context = Context::default();
    let mut progress = Progress::new(groups.len() as u64);
    let mut records = Vec::new();
    for group in &groups {
        let what = group.describe();
        progress.at(&what);
        // Of its own for each point: a failure is one point's.
        let outcome = Peer::spawn(&[])
            .and_then(|mut peer| run_group(&mut context, &mut peer, group, &effort));
        let new = outcome.map(|outcome| of_suite("dgram", outcome.records));
        records.extend(output.keep(&what, new)?);
        progress.step();
    }
    drop(progress);
    let mut sections = Vec::new();
    for figure in args.figures() {
        let mut failed = |what: &str, error: &crate::error::BenchError| output.failed(what, error);
        let one = |(records, section)| (records, vec![section]);
        let (new, tables) = match figure {
            DgramFigure::Five | DgramFigure::Six => continue,
            DgramFigure::Seven => one(group::run(args.quick, effort.runs, &mut failed)),
            DgramFigure::Nine => lossy::run(args, effort.runs, &mut failed),
            DgramFigure::Eleven => one(sipp::run(args.quick, effort.runs, &mut failed)),
            DgramFigure::Twelve => one(clients::run(args.quick, effort.runs, &mut failed)),
        };
        let new = of_suite("dgram", new);
        output.lines(&new)?;
        records.extend(new);
        sections.extend(tables);
    }
    output.finish(&report(args, &records, sections, &effort, &load))
}

fn groups(args: &DgramArgs) -> Vec<Group> {
    let sizes = match &args.size {
        Some(sizes) => sizes.0.clone(),
        None if args.quick => QUICK.to_vec(),
        None => SIZES.to_vec(),
    };
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
    (
        "weft-rd",
        "udp",
        "write_record",
        "reliable datagrams, Write-Record",
    ),
    ("weft-ud", "local", "send", "UD send/recv, shared memory"),
    (
        "weft-ud",
        "local",
        "write_record",
        "UD Write-Record, shared memory",
    ),
    (
        "weft-rd",
        "local",
        "send",
        "reliable datagrams, send/recv, shared memory",
    ),
    (
        "weft-rd",
        "local",
        "write_record",
        "reliable datagrams, Write-Record, shared memory",
    ),
    ("udp-single", "udp", "send", "bare UDP, a datagram a call"),
    (
        "udp-single",
        "udp",
        "write",
        "bare UDP, a datagram a call, beside writes",
    ),
];

fn median(records: &[Record], line: usize, bytes: u64, metric: Metric) -> Option<f64> {
    let (stack, transport, op, _) = LINES[line];
    let found = records.iter().find(|r| {
        r.stack == stack
            && r.transport == transport
            && r.op == op
            && r.bytes == bytes
            && r.metric == metric
    });
    found.map(|record| record.summary.median)
}

fn report(
    args: &DgramArgs,
    records: &[Record],
    lossy: Vec<Section>,
    effort: &Effort,
    load: &str,
) -> Report {
    let mut report = Report::new("weft bench dgram");
    report.intro.push(format!(
        "Datagram queue pairs over UDP beside reliable connections over TCP and shared memory, all with CRC-32C where bytes cross a network; medians of {} runs of {:?} each, \
         all of them turn by turn on the loopback interface. The load of the last minute was {load} at the start.",
        effort.runs, effort.target
    ));
    let mut sizes: Vec<u64> = records.iter().map(|record| record.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for figure in args.figures() {
        let (title, metric, unit) = match figure {
            DgramFigure::Five => (
                "Latency (the paper's fig. 5), both sides spin",
                Metric::latency_us_p50,
                "microseconds, one way",
            ),
            DgramFigure::Six => (
                "Bandwidth (fig. 6)",
                Metric::bandwidth_GBps,
                "GB/s, one direction",
            ),
            _ => continue,
        };
        let mut header = vec!["size"];
        header.extend(LINES.iter().map(|(.., name)| *name));
        let mut table = Table::new(&header);
        for &bytes in &sizes {
            let mut row = vec![crate::size::human(bytes)];
            for line in 0..LINES.len() {
                let value = median(records, line, bytes, metric);
                row.push(value.map_or_else(String::new, |value| format!("{value:.3}")));
            }
            table.push(row);
        }
        let mut plot = Plot::new(title, Axis::bytes(), Axis::log(unit));
        for (line, (stack, _, op, name)) in LINES.iter().enumerate() {
            let points = sizes
                .iter()
                .filter_map(|&bytes| Some((bytes as f64, median(records, line, bytes, metric)?)));
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
        report
            .sections
            .push(Section::new(title).text(unit).table(table).plot(plot));
    }
    report.sections.extend(lossy);
    report.sections.extend(conclusions(records, &sizes));
    report
}

/// What the paper finds, and whether it holds here.
fn conclusions(records: &[Record], sizes: &[u64]) -> Option<Section> {
    let latency = |line, bytes| median(records, line, bytes, Metric::latency_us_p50);
    let speed = |line, bytes| median(records, line, bytes, Metric::bandwidth_GBps);
    let small = || sizes.iter().copied().filter(|bytes| *bytes <= 2048);
    let gain = |ud, rc| -> Option<f64> {
        let gains =
            small().filter_map(|bytes| Some(1.0 - latency(ud, bytes)? / latency(rc, bytes)?));
        let gains: Vec<f64> = gains.collect();
        (!gains.is_empty()).then(|| gains.iter().sum::<f64>() / gains.len() as f64)
    };
    let ratio = |ud, rc, bytes| -> Option<f64> { Some(speed(ud, bytes)? / speed(rc, bytes)?) };
    let most = |ud| -> Option<f64> {
        let bare = |bytes: &u64| Some(speed(6 + ud, *bytes)? / speed(ud, *bytes)?);
        let bare = sizes.iter().filter_map(bare);
        bare.reduce(f64::max)
    };
    let valid = |op, segment: u32| {
        let case = format!("loss 1 %, segments of {segment}");
        lossy::share(records, op, 256 << 10, &case)
    };
    let [of_one, of_each] = group::gains(records);
    let [response, calls, of_tcp] = sipp::ratios(records);
    let [saved, saved_in_all] = clients::saved(records);
    let rows = [
        (
            "UD send/recv latency below RC over TCP, up to 2 KiB (paper: 18.1 %)",
            gain(0, 2),
            Limit::AtLeast(0.18),
        ),
        (
            "Write-Record latency below RC Write over TCP, up to 2 KiB (paper: 24.4 %)",
            gain(1, 3),
            Limit::AtLeast(0.18),
        ),
        (
            "Write-Record bandwidth over RC Write, 1 KiB (paper: 2.9)",
            ratio(1, 3, 1 << 10),
            Limit::AtLeast(1.5),
        ),
        (
            "Write-Record bandwidth over RC Write, 512 KiB (paper: 3.6)",
            ratio(1, 3, 512 << 10),
            Limit::AtLeast(1.0),
        ),
        (
            "UD send/recv bandwidth over RC, 256 KiB (paper: 1.33)",
            ratio(0, 2, 256 << 10),
            Limit::AtLeast(1.0),
        ),
        (
            "Write-Record, valid bytes of 256 KiB messages, 1 % loss, segments of 1,400",
            valid("write_record", 1400),
            Limit::AtLeast(0.9),
        ),
        ("the same of send/recv", valid("send", 1400), Limit::None),
        (
            "reliable datagrams' latency over UD's, 64 B",
            latency(8, 64).zip(latency(0, 64)).map(|(rd, ud)| rd / ud),
            Limit::None,
        ),
        (
            "reliable datagrams' bandwidth over UD's, 512 KiB",
            ratio(8, 0, 512 << 10),
            Limit::None,
        ),
        (
            "shared memory: UD send/recv latency over RC's, 64 B",
            latency(10, 64).zip(latency(4, 64)).map(|(ud, rc)| ud / rc),
            Limit::AtMost(1.5),
        ),
        (
            "shared memory: Write-Record latency over RC Write's, 64 B",
            latency(11, 64).zip(latency(5, 64)).map(|(ud, rc)| ud / rc),
            Limit::None,
        ),
        (
            "UD send/recv messages a second, shared memory over UDP, 64 B",
            ratio(10, 0, 64),
            Limit::None,
        ),
        (
            "UD send/recv messages a second, shared memory over bare UDP, a datagram a call, 64 B",
            ratio(10, 14, 64),
            Limit::AtLeast(10.0),
        ),
        (
            "UD send/recv bandwidth, shared memory over UDP, 512 KiB",
            ratio(10, 0, 512 << 10),
            Limit::None,
        ),
        (
            "bare sendmmsg over UD send/recv, the largest ratio",
            most(0),
            Limit::AtMost(1.1),
        ),
        (
            "bare sendmmsg over Write-Record, the largest ratio",
            most(1),
            Limit::AtMost(1.1),
        ),
        (
            "bandwidth of a group of three receivers over that of one",
            of_one,
            Limit::None,
        ),
        (
            "bandwidth of a group of three receivers over that to each in turn",
            of_each,
            Limit::None,
        ),
        (
            "SIPp's mean response time under weft run over plain UDP's",
            response,
            Limit::AtMost(1.0),
        ),
        (
            "SIPp's calls a second under weft run over plain UDP's",
            calls,
            Limit::AtLeast(1.2),
        ),
        (
            "SIPp's mean response time, UDP over TCP, both under weft run (paper: 0.57)",
            of_tcp,
            Limit::AtMost(1.0),
        ),
        (
            "memory of a server of many clients, less with datagrams (paper: 0.241)",
            saved,
            Limit::AtLeast(0.24),
        ),
        (
            "the same with the kernel's caches of both ends",
            saved_in_all,
            Limit::AtLeast(0.24),
        ),
    ];
    let measured = rows
        .into_iter()
        .filter_map(|(what, value, limit)| Some(Aim::new(what, limit, value?)));
    aims::section("Conclusions", &measured.collect::<Vec<_>>())
}

impl DgramArgs {
    fn figures(&self) -> Vec<DgramFigure> {
        if self.figure.is_empty() {
            vec![DgramFigure::Five, DgramFigure::Six]
        } else {
            self.figure.clone()
        }
    }
}
