//! The report of the suite: the papers' figures from the measurements.

use super::args::ExsArgs;
use super::conclusions::conclusions;
use super::data::{Data, PING_PONG, Results, STREAM, SYNC_PING_PONG, SYNC_STREAM};
use super::experiment::Experiment;
use super::summary::{
    CLIENT_CPU, DIRECT_RATIO, Figure, GIGABITS, SERVER_CPU, SWITCHES, with_interval,
};
use crate::driver::Transport;
use crate::record::Metric;
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::stats::Summary;

/// The form of a figure: its title, the label of the horizontal axis, and title and figure of each
/// plot.
type Style = (
    &'static str,
    &'static str,
    &'static [(&'static str, Figure)],
);

const SENDS: &str = "outstanding sends";
const SIZE: &str = "size";

#[rustfmt::skip]
fn style(experiment: Experiment) -> Style {
    match experiment {
        Experiment::Equal => ("Figs. 9a and 10a, table III: as many sends as receives outstanding", SENDS, &[
            ("Fig. 9a: throughput", GIGABITS),
            ("Fig. 10a: CPU of the receiver", SERVER_CPU),
        ]),
        Experiment::Half => ("Figs. 9b and 10b, table III: half as many sends as receives outstanding", SENDS, &[
            ("Fig. 9b: throughput", GIGABITS),
            ("Fig. 10b: CPU of the receiver", SERVER_CPU),
        ]),
        Experiment::Sends => ("Fig. 11: 32 receives outstanding, dynamic", SENDS, &[
            ("Fig. 11a: throughput", GIGABITS),
            ("Fig. 11b: direct transfers of all", DIRECT_RATIO),
        ]),
        Experiment::Sizes => ("Fig. 12: 4 receives and 2 sends outstanding", SIZE, &[
            ("Fig. 12a: throughput", GIGABITS),
            ("Fig. 12b: direct transfers of all", DIRECT_RATIO),
        ]),
        Experiment::Distance => ("Fig. 13: over a distance, as many sends as receives outstanding", SENDS, &[
            ("Fig. 13: throughput over a distance", GIGABITS),
            ("Direct transfers of all over a distance", DIRECT_RATIO),
        ]),
        Experiment::Small => ("Interface paper, figs. 2 and 3: small packets (seqpacket, design source)", SIZE, &[
            ("Interface fig. 2: throughput", GIGABITS),
            ("Interface fig. 3: CPU of the receiver", SERVER_CPU),
            ("Interface fig. 3: CPU of the sender", CLIENT_CPU),
        ]),
    }
}

const STROKES: [Stroke; 4] = [
    Stroke::Weft,
    Stroke::WeftOther,
    Stroke::WeftCrc,
    Stroke::Tcp,
];
/// The modes that choose between direct and indirect transfers.
const CHOOSING: [&str; 2] = ["dynamic", "published"];

pub(super) fn report(results: &Results, args: &ExsArgs) -> Report {
    let data = Data {
        cells: &results.cells,
        targets: &results.targets,
    };
    let mut report = Report::new("weft-papers exs");
    report.intro.push(machine());
    report.intro.push(format!("Load before: {}.", results.load));
    report.intro.push(
        "Medians; sender and receiver are two processes. Modes take turns within each repetition, and ratios are taken repetition by repetition. \
         Random lengths: exponential, mean 1 MiB, at most 4 MiB. Both sides sleep while they wait."
            .to_owned(),
    );
    report.intro.extend(results.notes.iter().cloned());
    report.sections.extend(verdicts(&data, &args.transport));
    for experiment in Experiment::ALL {
        for transport in [Transport::Local, Transport::Tcp] {
            report.sections.extend(figure(&data, experiment, transport));
        }
    }
    report.sections.extend(targets(&data));
    report
}

fn verdicts(data: &Data<'_>, transports: &[Transport]) -> Option<Section> {
    let title = "The papers' conclusions, and the targets";
    let section = conclusions(data, transports).section(title, "papers, or target")?;
    Some(section.text("Each with its least and most over the figure's places."))
}

/// The value of a variant in a column.
enum Shown {
    Median(Figure),
    /// With its confidence interval.
    Mean(Figure),
    /// The median of the throughput's ratios to the better of the other modes.
    OfTheBetter,
}

/// The table and the plots of an experiment on a transport.
fn figure(data: &Data<'_>, experiment: Experiment, transport: Transport) -> Option<Section> {
    let (places, variants) = data.axes(experiment, transport);
    if places.is_empty() {
        return None;
    }
    let (title, axis, plots) = style(experiment);
    let has_modes = variants.iter().any(|variant| variant == "dynamic");
    let is_small = experiment == Experiment::Small;
    let all: Vec<&str> = variants.iter().map(String::as_str).collect();
    let counted = |variant: &&str| !is_small && (!has_modes || CHOOSING.contains(variant));
    let counted: Vec<&str> = all.iter().copied().filter(counted).collect();
    let (all, counted, better) = (&all[..], &counted[..], &CHOOSING[..]);
    let groups = [
        (true, all, "Gb/s", Shown::Median(GIGABITS)),
        (has_modes, better, "of the better", Shown::OfTheBetter),
        (true, all, "CPU of receiver %", Shown::Median(SERVER_CPU)),
        (is_small, all, "CPU of sender %", Shown::Median(CLIENT_CPU)),
        (true, counted, "direct ratio", Shown::Mean(DIRECT_RATIO)),
        (true, counted, "mode switches", Shown::Mean(SWITCHES)),
    ];
    let groups = groups.iter().filter(|group| group.0);
    let columns =
        groups.flat_map(|(_, of, what, shown)| of.iter().map(move |v| (*v, *what, shown)));
    let columns: Vec<_> = columns.collect();
    let text = |place: u64, variant: &str, shown: &Shown| {
        let mut line = data.line(experiment, transport, variant);
        let cell = line.find(|cell| cell.x == place)?;
        Some(match shown {
            Shown::Median(figure) => number(Summary::of(&cell.read(figure))?.median),
            Shown::Mean(figure) => with_interval(&figure.mean(&cell.runs)?),
            Shown::OfTheBetter => number(data.best_ratio(cell)?.median),
        })
    };
    let headers = columns
        .iter()
        .map(|(variant, what, _)| format!("{variant} {what}"));
    let mut table = Table::new(
        &[axis.to_owned()]
            .into_iter()
            .chain(headers)
            .collect::<Vec<_>>(),
    );
    for &place in &places {
        let cells = columns.iter();
        let cells =
            cells.map(|(variant, _, shown)| text(place, variant, shown).unwrap_or_default());
        let place = if axis == SIZE {
            human(place)
        } else {
            place.to_string()
        };
        table.push([place].into_iter().chain(cells));
    }
    let mut section = Section::new(format!("{title} ({})", transport.name()));
    if experiment == Experiment::Distance {
        section = section.text(
            "A send is complete here when TCP has taken it. On the paper's RNICs it was when the peer's had acknowledged it, a round trip later, so \
             that the number of sends limited all three modes alike; here it limits direct-only, whose adverts travel for as long.",
        );
    }
    section = section.table(table);
    for (title, figure) in plots {
        section = section.plot(plot(data, experiment, transport, (title, figure), axis));
    }
    Some(section)
}

fn plot(
    data: &Data<'_>,
    experiment: Experiment,
    transport: Transport,
    (title, figure): (&str, &Figure),
    axis: &str,
) -> Plot {
    let x = if axis == SIZE {
        Axis::bytes()
    } else {
        Axis::linear(axis)
    };
    let title = format!("{title} ({})", transport.name());
    // The interface paper's throughput is on logarithmic axes.
    let y = if experiment == Experiment::Small && figure.name == GIGABITS.name {
        Axis::log(&figure.label())
    } else {
        Axis::linear(&figure.label())
    };
    let mut plot = Plot::new(title, x, y);
    let (_, variants) = data.axes(experiment, transport);
    for (index, variant) in variants.iter().enumerate() {
        let (mut points, mut spread) = (Vec::new(), Vec::new());
        for cell in data.line(experiment, transport, variant) {
            if let Some(summary) = Summary::of(&cell.read(figure)) {
                let x = cell.x as f64;
                points.push((x, summary.median));
                spread.push((x, summary.q1, summary.q3));
            }
        }
        let stroke = STROKES[index % STROKES.len()];
        plot = plot.series(Series::new(variant, stroke, points).spread(spread));
    }
    plot
}

/// The measurements of the targets.
fn targets(data: &Data<'_>) -> Option<Section> {
    let (speed, latency) = (Metric::bandwidth_GBps, Metric::latency_us_p50);
    let kinds = [
        (STREAM, "1 MiB stream", speed, "GB/s"),
        (PING_PONG, "64 B ping-pong, spinning", latency, "µs"),
        (SYNC_STREAM, "1 MiB stream, blocking", speed, "GB/s"),
        (SYNC_PING_PONG, "64 B ping-pong, blocking", latency, "µs"),
    ];
    let rows = kinds.into_iter().flat_map(|(op, words, metric, unit)| {
        let records = data.targets.iter();
        let records = records.filter(move |record| record.op == op && record.metric == metric);
        records.map(move |record| (words, unit, record))
    });
    let table = Table::of(
        rows,
        &[
            ("measurement", &|(words, ..)| (*words).to_owned()),
            ("transport", &|(.., record)| record.transport.clone()),
            ("stack", &|(.., record)| record.stack.clone()),
            ("median", &|(.., record)| number(record.summary.median)),
            ("least", &|(.., record)| number(record.summary.min)),
            ("most", &|(.., record)| number(record.summary.max)),
            ("unit", &|(_, unit, _)| (*unit).to_owned()),
            ("of plain TCP", &|(.., record)| {
                record.ratio_tcp.map_or_else(String::new, number)
            }),
        ],
    );
    (!table.is_empty()).then(|| {
        Section::new("What the targets were measured by")
            .text("exs: an event queue, receives outstanding. exs-sync: the blocking calls, on the library's memory. weft: raw verbs, Sends.")
            .table(table)
    })
}
