//! The suite `weft-papers sdp`.

use super::args::SdpArgs;
use super::conclusions::conclusions;
use super::costs::{self, STEPS};
use super::plan::{Places, Plan, RECORDS, Row, SdpFigure, Shape, line};
use super::run::{Devices, Pair};
use crate::driver::Transport;
use crate::error::{BenchError, Result};
use crate::output::{self, KEPT};
use crate::process::Peer;
use crate::progress::Progress;
use crate::record::{Metric, Record, of_suite};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::stats::paired_ratio;
use crate::usage;
use std::process::ExitCode;

/// No run has more sends.
const MOST: u64 = 1 << 20;

/// Runs the suite: prints tables, and writes what the options ask for.
pub(crate) fn run(args: &SdpArgs) -> Result<ExitCode> {
    let mut records: Vec<Record> = output::read(&args.from)?;
    let mut output = args.output.open()?;
    if !args.from.is_empty() {
        output.lines(&records)?;
        return output.finish(&report(&records, args, vec![KEPT.to_owned()]));
    }
    let wants = |figure| args.figure.is_empty() || args.figure.contains(&figure);
    let mut points = Vec::new();
    for &transport in &args.transport {
        for figure in SdpFigure::measured().filter(|each| wants(*each)) {
            for (x, plan) in figure.points(args.quick) {
                points.push((figure, x, Plan { transport, ..plan }));
            }
        }
    }
    let load = usage::load_average();
    if wants(SdpFigure::Table1) {
        records.extend(costs::measure(args.runs())?);
        output.lines(&records)?;
    }
    let mut progress = Progress::new(points.len() as u64);
    let mut devices = Devices::default();
    for (figure, x, plan) in points {
        let what = format!("{} {} {x}", figure.op(), plan.transport.name());
        progress.at(&what);
        // A separate peer: its end cleans up after a failure.
        let measured = Peer::spawn(&[])
            .and_then(|mut peer| measure(&mut devices, &mut peer, figure, x, &plan, args));
        records.extend(output.keep(&what, measured)?);
        progress.step();
    }
    drop(progress);
    let intro = vec![
        format!("{}; load before the run: {load}.", machine()),
        format!("Medians of {} runs of {} s.", args.runs(), args.seconds()),
    ];
    output.finish(&report(&records, args, intro))
}

/// One point: connects and warms up all rows, then makes run after run, each with all of them in turn.
fn measure(
    devices: &mut Devices,
    peer: &mut Peer,
    figure: SdpFigure,
    x: u64,
    plan: &Plan,
    args: &SdpArgs,
) -> Result<Vec<Record>> {
    let mut pairs = Vec::new();
    for row in args.rows() {
        let plan = Plan { row, ..*plan };
        let pair = Pair::open(devices, peer, &plan)?;
        let count = calibrate(&pair, peer, args.seconds())?;
        pairs.push((row, pair, count, Vec::new()));
    }
    for _ in 0..args.runs() {
        for (_, pair, count, samples) in &mut pairs {
            let wall = pair.run(peer, *count)?;
            samples.push(value(figure, plan, *count, wall));
        }
    }
    let tcp = pairs
        .iter()
        .find(|(row, ..)| *row == Row::Tcp)
        .map(|(.., samples)| samples.clone());
    let mut records = Vec::new();
    for (row, pair, _, samples) in pairs {
        pair.close(devices, peer)?;
        let metric = if figure.is_latency() {
            Metric::latency_us_mean
        } else {
            Metric::bandwidth_GBps
        };
        let name = plan.transport.name();
        let carrier = if row == Row::Tcp { "tcp" } else { name };
        let ratio = tcp
            .as_ref()
            .filter(|_| row != Row::Tcp)
            .and_then(|tcp| paired_ratio(&samples, tcp));
        let (op, bytes) = (figure.op(), plan.bytes);
        let record = Record::of(op, carrier, row.name(), bytes, metric, &samples)
            .ok_or_else(|| BenchError::Usage("a point without a run".to_owned()))?;
        // The transport of the reference, and the place on the axis.
        records.push(record.with_ratio(ratio).with_case(format!("{name}:{x}")));
    }
    Ok(of_suite(RECORDS, records))
}

/// The number of sends that fill the time; also warms up.
fn calibrate(pair: &Pair, peer: &mut Peer, seconds: f64) -> Result<u64> {
    let mut count = 2;
    loop {
        let wall = pair.run(peer, count)?.max(1e-9);
        let wanted = (count as f64 * seconds / wall) as u64;
        if wall >= seconds / 3.0 || count >= MOST {
            return Ok(wanted.clamp(2, MOST));
        }
        count = wanted.clamp(count + 1, count * 10).min(MOST);
    }
}

/// Microseconds one way, or GB/s.
fn value(figure: SdpFigure, plan: &Plan, count: u64, wall: f64) -> f64 {
    if figure.is_latency() {
        // Four clients of a hot spot have their laps at the same time.
        return wall * 1e6 / count as f64 / 2.0;
    }
    let all = count * plan.bytes * u64::from(plan.connections);
    debug_assert!(plan.shape != Shape::HotSpot);
    all as f64 / wall / 1e9
}

fn report(records: &[Record], args: &SdpArgs, mut intro: Vec<String>) -> Report {
    let mut report = Report::new("weft-papers sdp: BSDP, ZSDP and AZ-SDP beside plain TCP");
    intro.push(
        "The experiments of the AZ-SDP paper. Two processes on one host; medians, rows turn by turn. Sends from 4 KiB on go \
         without a copy where the row says so; too many faults never end that, as in the paper. FPDUs carry no CRC. AZ-SDP receives are synchronous here."
            .to_owned(),
    );
    report.intro = intro;
    if let Some(section) = costs_section(records) {
        report.sections.push(section);
    }
    for &transport in &args.transport {
        for figure in SdpFigure::measured() {
            report
                .sections
                .extend(figure_section(records, figure, transport, &args.rows()));
        }
    }
    let found = conclusions(records, &args.transport);
    report
        .sections
        .extend(found.section("The paper's conclusions", "paper"));
    report
}

fn costs_section(records: &[Record]) -> Option<Section> {
    let rows = STEPS.into_iter().flat_map(|(step, words)| {
        let is =
            move |record: &&Record| record.op == "costs" && record.case.as_deref() == Some(step);
        let records = records.iter().filter(is);
        records.map(move |record| (words, record))
    });
    let table = Table::of(
        rows,
        &[
            ("step", &|(words, _)| (*words).to_owned()),
            ("size", &|(_, record)| human(record.bytes)),
            ("µs", &|(_, record)| number(record.summary.median)),
            ("least", &|(_, record)| number(record.summary.min)),
            ("most", &|(_, record)| number(record.summary.max)),
        ],
    );
    (!table.is_empty()).then(|| Section::new(SdpFigure::Table1.title()).table(table))
}

fn figure_section(
    records: &[Record],
    figure: SdpFigure,
    transport: Transport,
    rows: &[Row],
) -> Option<Section> {
    let title = format!("{}, {}", figure.title(), transport.name());
    let unit = if figure.is_latency() { "µs" } else { "GB/s" };
    let (sized, words) = (figure.axis() == Places::Sizes, figure.axis().words());
    let x = if sized {
        Axis::bytes()
    } else {
        Axis::linear(words)
    };
    let y = if figure.is_latency() {
        Axis::log(unit)
    } else {
        Axis::linear(unit)
    };
    let mut plot = Plot::new(title.clone(), x, y);
    let mut places: Vec<u64> = Vec::new();
    for row in rows {
        let points: Vec<_> = line(records, figure, transport, *row).collect();
        places.extend(points.iter().map(|(x, _)| *x));
        let spread = points
            .iter()
            .map(|(x, s)| (*x as f64, s.q1, s.q3))
            .collect();
        let line = points.iter().map(|(x, s)| (*x as f64, s.median)).collect();
        let stroke = match row {
            Row::Bsdp => Stroke::WeftCrc,
            Row::Zsdp => Stroke::WeftOther,
            Row::AzsdpBlock => Stroke::Weft,
            Row::AzsdpCopy => Stroke::Other,
            Row::Tcp => Stroke::Tcp,
        };
        plot = plot.series(Series::new(row.name(), stroke, line).spread(spread));
    }
    places.sort_unstable();
    places.dedup();
    if places.is_empty() {
        return None;
    }
    let names: Vec<&str> = rows.iter().map(|row| row.name()).collect();
    let mut table = Table::new(&[&[words][..], &names].concat());
    for place in places {
        let mut cells = vec![if sized {
            human(place)
        } else {
            place.to_string()
        }];
        for row in rows {
            let found = line(records, figure, transport, *row).find(|(x, _)| *x == place);
            cells.push(found.map_or_else(String::new, |(_, summary)| number(summary.median)));
        }
        table.push(cells);
    }
    Some(Section::new(title).text(unit).table(table).plot(plot))
}
