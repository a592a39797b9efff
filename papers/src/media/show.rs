//! Tables and plots.

use super::conclusions::{NOT_REMADE, conclusions};
use super::server::Kind;
use super::{Measured, MediaArgs, Point};
use crate::aims::{self, Aim};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};

/// The value of a point in a plot.
type Value = fn(&Point) -> f64;

fn series(kind: Kind, points: Vec<(f64, f64)>) -> Series {
    let stroke = match kind {
        Kind::Local => Stroke::Weft,
        Kind::Tcp => Stroke::WeftCrc,
        Kind::Tls => Stroke::WeftOther,
        Kind::Sendfile | Kind::Plain => Stroke::Tcp,
        Kind::ReadWrite | Kind::Vlc => Stroke::Other,
    };
    let series = Series::new(kind.name(), stroke, points);
    match kind {
        Kind::Plain | Kind::Vlc => series.dashed(),
        _ => series,
    }
}

fn plot(measured: &Measured, title: String, unit: &str, at: (f64, Option<f64>), of: Value) -> Plot {
    let mut plot = Plot::new(title, Axis::linear("viewers"), Axis::linear(unit));
    let mut kinds: Vec<Kind> = Vec::new();
    for point in &measured.points {
        if !kinds.contains(&point.server) {
            kinds.push(point.server);
        }
    }
    let key = |at: (f64, Option<f64>)| (at.0.to_bits(), at.1.map(f64::to_bits));
    for kind in kinds {
        let points = measured.points.iter();
        let line = points.filter(|p| p.server == kind && key((p.rate, p.jump)) == key(at));
        plot = plot.series(series(
            kind,
            line.map(|p| (p.viewers as f64, of(p))).collect(),
        ));
    }
    plot
}

fn load_section(measured: &Measured, rate: f64, jump: Option<f64>) -> Section {
    let name = match jump {
        None => format!("{rate} Mb/s each, figs. 6.3, 6.4, 6.7, 6.10, 6.12"),
        Some(jump) => format!("{rate} Mb/s each, a jump each {jump} s, figs. 6.8, 6.11"),
    };
    let same = |p: &&Point| {
        p.rate.to_bits() == rate.to_bits() && p.jump.map(f64::to_bits) == jump.map(f64::to_bits)
    };
    let table = Table::of(
        measured.points.iter().filter(same),
        &[
            ("viewers", &|p| p.viewers.to_string()),
            ("server", &|p| p.server.to_string()),
            ("delivered %", &|p| format!("{:.0}", 100.0 * p.delivered())),
            ("viewers in time %", &|p| format!("{:.0}", p.in_time())),
            ("CPU %", &|p| format!("{:.2}", p.cpu_percent())),
            ("CPU s/GB", &|p| format!("{:.3}", p.cpu_per_gb())),
            ("with viewers s/GB", &|p| format!("{:.2}", p.both_per_gb())),
            ("switches/s", &|p| format!("{:.0}", p.switches_per_s())),
            ("late fetches", &|p| p.late.to_string()),
        ],
    );
    let mut section = Section::new(name.clone()).table(table);
    let values: [(&str, &str, Value); 3] = [
        ("CPU of the server", "% of a core", Point::cpu_percent),
        (
            "context switches of the server",
            "a second",
            Point::switches_per_s,
        ),
        ("viewers that are served in time", "%", Point::in_time),
    ];
    for (what, unit, of) in values {
        let title = format!("{what}, {}", name.split(", fig").next().unwrap_or_default());
        section = section.plot(plot(measured, title, unit, (rate, jump), of));
    }
    section
}

fn single_section(
    measured: &Measured,
    experiment: &str,
    title: &str,
    columns: [&str; 2],
) -> Option<Section> {
    let singles = measured.singles.iter();
    let table = Table::of(
        singles.filter(|s| s.experiment == experiment),
        &[
            ("server", &|s| s.server.to_string()),
            (columns[0], &|s| number(s.value)),
            (columns[1], &|s| number(s.beside)),
        ],
    );
    (!table.is_empty()).then(|| Section::new(title).table(table))
}

/// The shortest and the longest time of a point, which earlier runs may have measured.
fn seconds_of(measured: &Measured, args: &MediaArgs) -> String {
    let all = || measured.points.iter().map(|p| p.seconds);
    let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    if least > most {
        return number(args.seconds().as_secs_f64());
    }
    if most - least < 0.1 {
        return format!("{most:.0}");
    }
    format!("{least:.0} to {most:.0}")
}

/// The system's choice.
fn congestion() -> String {
    let file = "/proc/sys/net/ipv4/tcp_congestion_control";
    let text = std::fs::read_to_string(file).unwrap_or_else(|_| "unknown".into());
    text.trim().to_owned()
}

pub(super) fn report(measured: &Measured, bars: &[Aim], args: &MediaArgs, load: &str) -> Report {
    let mut report = Report::new("weft-papers media: what a server of movies pays for its viewers");
    report.intro = vec![
        format!("{}; load before the run: {load}.", machine()),
        format!(
            "The experiments of thesis chapter 6, {} s a point, servers in turn at each number of viewers. All viewers are in one process beside the server. Those of HTTP \
             take what they need four times a second of what their sockets hold, some seconds of film; those of weft have no such buffer in the kernel and fetch a second at a time. A fetch is late, and its viewer not in time, when it is done a second after it was due; of RTP, when a \
             datagram is lost. weft-local: viewers of the same host; weft-tcp: over TCP in the clear, without CRC, as HTTP is; nginx has one worker. CPU and switches \
             are those of the server's process, as the kernel counts them; with viewers: CPU of the server and of all viewers. TCP's congestion control: {}; weft's connections on \
             loopback take reno.",
            seconds_of(measured, args),
            congestion(),
        ),
        NOT_REMADE.to_owned(),
    ];
    if !measured.failed.is_empty() {
        let table = Table::of(
            &measured.failed,
            &[("could not be measured", &|text| (*text).clone())],
        );
        report.sections.push(Section::new("Failures").table(table));
    }
    report
        .sections
        .extend(aims::section("What is asked of weft", bars));
    report
        .sections
        .extend(conclusions(measured).section("The thesis's conclusions", "thesis"));
    let mut shown: Vec<(u64, Option<u64>)> = Vec::new();
    for point in &measured.points {
        let key = (point.rate.to_bits(), point.jump.map(f64::to_bits));
        if !shown.contains(&key) {
            shown.push(key);
            report
                .sections
                .push(load_section(measured, point.rate, point.jump));
        }
    }
    let singles = [
        ("gigabyte", "A gigabyte at once", ["CPU s/GB", "s/GB"]),
        (
            "seek",
            "From a jump to its first 8 KiB",
            ["µs, median", "µs, 99th percentile"],
        ),
        (
            "idle",
            "Viewers that watch nothing",
            ["CPU %", "switches/s"],
        ),
    ];
    for (experiment, title, columns) in singles {
        report
            .sections
            .extend(single_section(measured, experiment, title, columns));
    }
    if let Some(live) = measured.live {
        let table = Table::of(
            [live],
            &[
                ("readers", &|live| live.readers.to_string()),
                ("fetches", &|live| live.fetches.to_string()),
                ("ms, median", &|live| format!("{:.2}", live.p50)),
                ("ms, 99th percentile", &|live| format!("{:.2}", live.p99)),
            ],
        );
        let section = Section::new("Live: from the server's notice to a reader's data, 6.4.4");
        report.sections.push(section.table(table));
    }
    report
}
