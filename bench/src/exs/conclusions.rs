//! What the papers conclude, and what extended sockets are to reach: whether it holds here, with the number.

use super::experiment::Experiment;
use super::figures::Data;
use super::suite::{PING_PONG, STREAM, SYNC_PING_PONG, SYNC_STREAM};
use super::summary::{DIRECT_RATIO, Figure, GIGABITS, SERVER_CPU};
use crate::conclusions::Conclusions;
use crate::driver::Transport;
use crate::record::{Metric, Record};
use crate::report::number;
use crate::size::human;

/// Sends from which on the paper saw little variation in fig. 11.
const SETTLED: u64 = 6;
/// The size from which on all transfers were direct in fig. 12b.
const ALL_DIRECT: u64 = 512 << 10;

/// The smallest and the largest value, with where they are.
struct Range {
    low: (f64, u64),
    high: (f64, u64),
}

impl Range {
    fn of(values: impl IntoIterator<Item = (u64, f64)>) -> Option<Self> {
        let mut range: Option<Self> = None;
        for (x, value) in values {
            let range = range.get_or_insert(Self {
                low: (value, x),
                high: (value, x),
            });
            if value < range.low.0 {
                range.low = (value, x);
            }
            if value > range.high.0 {
                range.high = (value, x);
            }
        }
        range
    }

    fn words(&self) -> String {
        format!("{} to {}", number(self.low.0), number(self.high.0))
    }
}

/// Everything that can be said of the figures that were measured.
pub(super) fn conclusions(data: &Data<'_>, transports: &[Transport]) -> Conclusions {
    let mut found = Conclusions::default();
    for transport in transports {
        found.over(*transport);
        paper(data, *transport, &mut found);
    }
    found.over(Transport::Tcp);
    distance(data, &mut found);
    for transport in transports {
        found.over(*transport);
        targets(data, *transport, &mut found);
    }
    found
}

fn paper(data: &Data<'_>, transport: Transport, found: &mut Conclusions) {
    use Experiment::{Equal, Half, Sends, Sizes, Small};
    let ratio = |experiment, figure: &Figure, over: &str, under: &str| {
        Range::of(data.ratios(experiment, transport, figure, over, under))
    };
    let both = |figure: &Figure, over: &str, under: &str| {
        let equal = data.ratios(Equal, transport, figure, over, under);
        Range::of(equal.chain(data.ratios(Half, transport, figure, over, under)))
    };
    found.add(
        "fig. 9",
        "indirect-only is always slower than direct-only",
        both(&GIGABITS, "indirect", "direct").map(|range| {
            (
                range.high.0 < 1.0,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 9a",
        "as many sends as receives: dynamic falls to the level of indirect-only",
        ratio(Equal, &GIGABITS, "dynamic", "indirect").map(|range| {
            (
                range.high.0 <= 1.1,
                format!("{} of indirect-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 9b",
        "twice as many receives: dynamic is as fast as direct-only",
        ratio(Half, &GIGABITS, "dynamic", "direct").map(|range| {
            (
                range.low.0 >= 0.95,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
    let direct =
        |experiment| Range::of(data.medians(experiment, transport, "dynamic", &DIRECT_RATIO));
    found.add(
        "table III",
        "as many sends as receives: hardly any direct transfers (< 0.1)",
        direct(Equal).map(|range| (range.high.0 < 0.1, range.words())),
    );
    found.add(
        "table III",
        "twice as many receives, 8 sends and more: all transfers direct",
        Range::of(
            data.medians(Half, transport, "dynamic", &DIRECT_RATIO)
                .filter(|(x, _)| *x >= 8),
        )
        .map(|range| (range.low.0 >= 0.99, range.words())),
    );
    found.add(
        "fig. 10",
        "indirect-only: the receiver's CPU approaches 100 %",
        Range::of(data.medians(Equal, transport, "indirect", &SERVER_CPU))
            .map(|range| (range.high.0 >= 90.0, format!("{} %", range.words()))),
    );
    found.add(
        "fig. 10",
        "direct-only: the receiver's CPU is always lower",
        both(&SERVER_CPU, "direct", "indirect").map(|range| {
            (
                range.high.0 < 1.0,
                format!("{} of indirect-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 10b",
        "where dynamic is direct, it adds little CPU at the receiver",
        ratio(Half, &SERVER_CPU, "dynamic", "direct").map(|range| {
            (
                range.high.0 <= 1.1,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 11a",
        "throughput rises with the message size (128 KiB, 512 KiB, 2 MiB)",
        rising(data, transport),
    );
    let settled = |size: u64| {
        Range::of(
            data.medians(Sends, transport, &human(size), &GIGABITS)
                .filter(|(x, _)| *x >= SETTLED),
        )
        .map(|range| range.high.0 / range.low.0)
    };
    found.add(
        "fig. 11a",
        "more than 5 sends: throughput varies little (512 KiB, 2 MiB)",
        settled(512 << 10)
            .zip(settled(2 << 20))
            .map(|(left, right)| {
                (
                    left.max(right) <= 1.15,
                    format!("fastest over slowest: {}, {}", number(left), number(right)),
                )
            }),
    );
    found.add(
        "fig. 12a",
        "throughput rises with the message size up to about 2 MiB",
        Range::of(data.medians(Sizes, transport, "dynamic", &GIGABITS)).map(|range| {
            let (most, at) = range.high;
            (
                at >= 512 << 10,
                format!("the peak is {} Gb/s at {}", number(most), human(at)),
            )
        }),
    );
    found.add(
        "fig. 12b",
        "from 512 KiB on all transfers are direct",
        Range::of(
            data.medians(Sizes, transport, "dynamic", &DIRECT_RATIO)
                .filter(|(x, _)| *x >= ALL_DIRECT),
        )
        .map(|range| (range.low.0 >= 0.99, range.words())),
    );
    found.add(
        "fig. 12b",
        "the share of direct transfers is least at about 32 KiB",
        Range::of(data.medians(Sizes, transport, "dynamic", &DIRECT_RATIO)).map(|range| {
            let (least, at) = range.low;
            let middle = (8 << 10..=128 << 10).contains(&at);
            (
                middle && least < range.high.0,
                format!("least: {} at {}", number(least), human(at)),
            )
        }),
    );
    found.add(
        "IV.C",
        "throughput is much higher with more receives than sends",
        more_receives(data, transport),
    );
    found.add(
        "interface fig. 2",
        "small packets are faster, up to where they end",
        ratio(Small, &GIGABITS, "small", "not small").map(|range| {
            (
                range.low.0 > 1.0,
                format!("{} times as fast", range.words()),
            )
        }),
    );
    found.add(
        "interface fig. 3",
        "small packets take more CPU at the receiver",
        ratio(Small, &SERVER_CPU, "small", "not small").map(|range| {
            (
                range.low.0 > 1.0,
                format!("{} times as much", range.words()),
            )
        }),
    );
}

/// Fig. 11a: the medians over all numbers of sends from which on there is little variation.
fn rising(data: &Data<'_>, transport: Transport) -> Option<(bool, String)> {
    let typical = |size: u64| {
        let size = human(size);
        let medians = data.medians(Experiment::Sends, transport, &size, &GIGABITS);
        let settled: Vec<f64> = medians
            .filter(|(x, _)| *x >= SETTLED)
            .map(|(_, y)| y)
            .collect();
        (!settled.is_empty()).then(|| settled.iter().sum::<f64>() / settled.len() as f64)
    };
    let sizes = [128 << 10, 512 << 10, 2 << 20].map(typical);
    let [Some(small), Some(middle), Some(large)] = sizes else {
        return None;
    };
    let numbers = [small, middle, large].map(number).join(", ");
    Some((small < middle && middle < large, format!("{numbers} Gb/s")))
}

/// The dynamic mode with twice as many receives as sends over as many, at each number of sends.
fn more_receives(data: &Data<'_>, transport: Transport) -> Option<(bool, String)> {
    let equal: Vec<(u64, f64)> = data
        .medians(Experiment::Equal, transport, "dynamic", &GIGABITS)
        .collect();
    let ratios = data
        .medians(Experiment::Half, transport, "dynamic", &GIGABITS)
        .filter_map(|(x, more)| {
            let (_, same) = equal.iter().find(|(other, _)| *other == x)?;
            (*same > 0.0).then_some((x, more / same))
        });
    let range = Range::of(ratios)?;
    Some((
        range.low.0 > 1.2,
        format!("{} times as fast", range.words()),
    ))
}

fn distance(data: &Data<'_>, found: &mut Conclusions) {
    let transport = Transport::Tcp;
    let ratio = |over: &str, under: &str| {
        data.ratios(Experiment::Distance, transport, &GIGABITS, over, under)
            .filter(|(x, _)| *x >= 4)
            .collect::<Vec<_>>()
    };
    let all = ratio("indirect", "direct")
        .into_iter()
        .chain(ratio("dynamic", "direct"));
    found.add(
        "fig. 13",
        "4 operations and more: all three are similar (within a quarter)",
        Range::of(all).map(|range| {
            (
                range.low.0 > 0.75 && range.high.0 < 1.25,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 13",
        "4 operations and more: indirect-only is faster than direct-only",
        Range::of(ratio("indirect", "direct")).map(|range| {
            (
                range.low.0 > 1.0,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
    found.add(
        "fig. 13",
        "dynamic adapts: at least as fast as direct-only",
        Range::of(ratio("dynamic", "direct")).map(|range| {
            (
                range.low.0 >= 0.98,
                format!("{} of direct-only", range.words()),
            )
        }),
    );
}

fn targets(data: &Data<'_>, transport: Transport, found: &mut Conclusions) {
    for (source, experiment) in [
        ("target, fig. 9a", Experiment::Equal),
        ("target, fig. 9b", Experiment::Half),
        ("target, fig. 12", Experiment::Sizes),
    ] {
        found.add(
            source,
            "dynamic: at least 0.95 of the better other mode at every point",
            Range::of(data.of_the_best(experiment, transport)).map(|range| {
                let (least, at) = range.low;
                let place = match experiment {
                    Experiment::Sizes => human(at),
                    _ => format!("{at} sends"),
                };
                (
                    least >= 0.95,
                    format!("{}, the least at {place}", range.words()),
                )
            }),
        );
    }
    found.add(
        "target",
        "twice as many receives as sends: at least 99 % direct",
        Range::of(data.medians(Experiment::Half, transport, "dynamic", &DIRECT_RATIO)).map(
            |range| {
                (
                    range.low.0 >= 0.99,
                    format!("{:.1} % with {} sends", range.low.0 * 100.0, range.low.1),
                )
            },
        ),
    );
    let record = |op: &str, stack: &str, metric: Metric| -> Option<&Record> {
        data.targets.iter().find(|record| {
            (record.op.as_str(), record.stack.as_str()) == (op, stack)
                && record.metric == metric
                && (record.transport == transport.name())
        })
    };
    let (least, claim) = match transport {
        Transport::Local => (3.0, "1 MiB stream: at least 3 times loopback TCP"),
        Transport::Tcp => (0.95, "1 MiB stream: at least 0.95 of loopback TCP"),
    };
    let of_tcp = |op: &str, stack: &str, metric: Metric| record(op, stack, metric)?.ratio_tcp;
    found.add(
        "target",
        claim,
        of_tcp(STREAM, "exs", Metric::bandwidth_GBps)
            .map(|ratio| (ratio >= least, format!("{} of it", number(ratio)))),
    );
    let latency = |stack: &str| {
        record(PING_PONG, stack, Metric::latency_us_p50).map(|record| record.summary.median)
    };
    found.add(
        "target",
        "64 B ping-pong: at most 1.2 times raw verbs",
        latency("exs").zip(latency("weft")).map(|(exs, verbs)| {
            let words = format!(
                "{} of it: {} and {} µs",
                number(exs / verbs),
                number(exs),
                number(verbs)
            );
            (exs / verbs <= 1.2, words)
        }),
    );
    found.add(
        "target",
        "blocking calls, 1 MiB stream: at least 0.9 of plain sockets",
        of_tcp(SYNC_STREAM, "exs-sync", Metric::bandwidth_GBps)
            .map(|ratio| (ratio >= 0.9, format!("{} of it", number(ratio)))),
    );
    found.add(
        "target",
        "blocking calls, 64 B ping-pong: at least 0.9 of plain sockets' speed",
        of_tcp(SYNC_PING_PONG, "exs-sync", Metric::latency_us_p50)
            .filter(|ratio| *ratio > 0.0)
            .map(|ratio| (1.0 / ratio >= 0.9, format!("{} of it", number(1.0 / ratio)))),
    );
}
