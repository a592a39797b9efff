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

/// How a figure is titled and drawn.
struct Style {
    title: &'static str,
    /// What the horizontal axis is.
    axis: &'static str,
    /// Title and figure of each plot.
    plots: &'static [(&'static str, Figure)],
}

fn style(experiment: Experiment) -> Style {
    match experiment {
        Experiment::Equal => Style {
            title: "Figs. 9a and 10a, table III: as many sends as receives outstanding",
            axis: "outstanding sends",
            plots: &[
                ("Fig. 9a: throughput", GIGABITS),
                ("Fig. 10a: CPU of the receiver", SERVER_CPU),
            ],
        },
        Experiment::Half => Style {
            title: "Figs. 9b and 10b, table III: half as many sends as receives outstanding",
            axis: "outstanding sends",
            plots: &[
                ("Fig. 9b: throughput", GIGABITS),
                ("Fig. 10b: CPU of the receiver", SERVER_CPU),
            ],
        },
        Experiment::Sends => Style {
            title: "Fig. 11: 32 receives outstanding, dynamic",
            axis: "outstanding sends",
            plots: &[
                ("Fig. 11a: throughput", GIGABITS),
                ("Fig. 11b: direct transfers of all", DIRECT_RATIO),
            ],
        },
        Experiment::Sizes => Style {
            title: "Fig. 12: 4 receives and 2 sends outstanding",
            axis: "size",
            plots: &[
                ("Fig. 12a: throughput", GIGABITS),
                ("Fig. 12b: direct transfers of all", DIRECT_RATIO),
            ],
        },
        Experiment::Distance => Style {
            title: "Fig. 13: over a distance, as many sends as receives outstanding",
            axis: "outstanding sends",
            plots: &[
                ("Fig. 13: throughput over a distance", GIGABITS),
                ("Direct transfers of all over a distance", DIRECT_RATIO),
            ],
        },
        Experiment::Small => Style {
            title: "Interface paper, figs. 2 and 3: small packets (seqpacket, design source)",
            axis: "size",
            plots: &[
                ("Interface fig. 2: throughput", GIGABITS),
                ("Interface fig. 3: CPU of the receiver", SERVER_CPU),
                ("Interface fig. 3: CPU of the sender", CLIENT_CPU),
            ],
        },
    }
}

const STROKES: [Stroke; 3] = [Stroke::Weft, Stroke::WeftCrc, Stroke::Tcp];

pub(super) fn report(results: &Results, args: &ExsArgs) -> Report {
    let data = Data {
        cells: &results.cells,
        targets: &results.targets,
    };
    let mut report = Report::new("weft bench exs");
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

/// The table and the plots of an experiment on a transport.
fn figure(data: &Data<'_>, experiment: Experiment, transport: Transport) -> Option<Section> {
    let (places, variants) = data.axes(experiment, transport);
    if places.is_empty() {
        return None;
    }
    let Style { title, axis, plots } = style(experiment);
    let has_modes = variants.iter().any(|variant| variant == "dynamic");
    let is_small = experiment == Experiment::Small;
    let mut headers = vec![axis.to_owned()];
    headers.extend(variants.iter().map(|variant| format!("{variant} Gb/s")));
    if has_modes {
        headers.push("dynamic of the better".to_owned());
    }
    headers.extend(
        variants
            .iter()
            .map(|variant| format!("{variant} CPU of receiver %")),
    );
    if is_small {
        headers.extend(
            variants
                .iter()
                .map(|variant| format!("{variant} CPU of sender %")),
        );
    }
    let shown: Vec<&String> = variants
        .iter()
        .filter(|variant| !is_small && (!has_modes || *variant == "dynamic"))
        .collect();
    headers.extend(
        shown
            .iter()
            .map(|variant| format!("{variant} direct ratio")),
    );
    headers.extend(
        shown
            .iter()
            .map(|variant| format!("{variant} mode switches")),
    );
    let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
    let mut table = Table::new(&headers);
    for place in &places {
        let cell = |variant: &str| {
            let mut line = data.line(experiment, transport, variant);
            line.find(|cell| cell.x == *place)
        };
        let median = |variant: &str, figure: &Figure| {
            let summary = cell(variant).and_then(|cell| Summary::of(&cell.read(figure)));
            summary.map_or_else(String::new, |summary| number(summary.median))
        };
        let mean = |variant: &str, figure: &Figure| {
            let mean = cell(variant).and_then(|cell| figure.mean(&cell.runs));
            mean.map_or_else(String::new, |mean| with_interval(&mean))
        };
        let mut row = vec![if axis == "size" {
            human(*place)
        } else {
            place.to_string()
        }];
        row.extend(variants.iter().map(|variant| median(variant, &GIGABITS)));
        if has_modes {
            let ratio = cell("dynamic").and_then(|cell| data.best_ratio(cell));
            row.push(ratio.map_or_else(String::new, |ratio| number(ratio.median)));
        }
        row.extend(variants.iter().map(|variant| median(variant, &SERVER_CPU)));
        if is_small {
            row.extend(variants.iter().map(|variant| median(variant, &CLIENT_CPU)));
        }
        row.extend(shown.iter().map(|variant| mean(variant, &DIRECT_RATIO)));
        row.extend(shown.iter().map(|variant| mean(variant, &SWITCHES)));
        table.push(row);
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
    let x = if axis == "size" {
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

/// What the targets' points measured.
fn targets(data: &Data<'_>) -> Option<Section> {
    let mut table = Table::new(&[
        "measurement",
        "transport",
        "stack",
        "median",
        "least",
        "most",
        "unit",
        "of plain TCP",
    ]);
    for (op, words, metric, unit) in [
        (STREAM, "1 MiB stream", Metric::bandwidth_GBps, "GB/s"),
        (
            PING_PONG,
            "64 B ping-pong, spinning",
            Metric::latency_us_p50,
            "µs",
        ),
        (
            SYNC_STREAM,
            "1 MiB stream, blocking",
            Metric::bandwidth_GBps,
            "GB/s",
        ),
        (
            SYNC_PING_PONG,
            "64 B ping-pong, blocking",
            Metric::latency_us_p50,
            "µs",
        ),
    ] {
        let records = data.targets.iter();
        for record in records.filter(|record| record.op == op && record.metric == metric) {
            let Summary {
                median, min, max, ..
            } = record.summary;
            let ratio = record.ratio_tcp.map_or_else(String::new, number);
            let [median, min, max] = [median, min, max].map(number);
            table.push([
                words,
                &record.transport,
                &record.stack,
                &median,
                &min,
                &max,
                unit,
                &ratio,
            ]);
        }
    }
    (!table.is_empty()).then(|| {
        Section::new("What the targets were measured by")
            .text("exs: an event queue, receives outstanding. exs-sync: the blocking calls, on the library's memory. weft: raw verbs, Sends.")
            .table(table)
    })
}
