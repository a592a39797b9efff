//! The conclusions of the papers and the targets of extended sockets: whether each holds here, with the
//! number.

use super::data::{Data, PING_PONG, STREAM, SYNC_PING_PONG, SYNC_STREAM};
use super::experiment::Experiment;
use super::summary::{DIRECT_RATIO, Figure, GIGABITS, SERVER_CPU};
use crate::aims::Limit::{Above, AtLeast, AtMost, Below, Within};
use crate::conclusions::{Conclusions, Range, claims};
use crate::driver::Transport;
use crate::record::{Metric, Record};
use crate::report::number;
use crate::size::human;

/// Sends from which on the paper saw little variation in fig. 11.
const SETTLED: u64 = 6;
/// The size up to which the interface paper found small packets faster.
const BREAK_EVEN: u64 = 100_000;
/// The size from which on all transfers were direct in fig. 12b.
const ALL_DIRECT: u64 = 512 << 10;
/// The sources of the claims on the dynamic protocol: with the paper's policy (mode `published`), and with ours.
const FIGURES: [&str; 7] = [
    "fig. 9a",
    "fig. 9b",
    "table III",
    "fig. 10b",
    "fig. 12a",
    "fig. 12b",
    "IV.C",
];
const OUR_POLICY: [&str; 7] = [
    "fig. 9a, our policy",
    "fig. 9b, our policy",
    "table III, our policy",
    "fig. 10b, our policy",
    "fig. 12a, our policy",
    "fig. 12b, our policy",
    "IV.C, our policy",
];
const OF_DIRECT: &str = " of direct-only";
const OF_INDIRECT: &str = " of indirect-only";
const OF_THE_BETTER: &str = "dynamic: at least 0.95 of the better other mode at every point";

/// All conclusions that the measured figures allow.
pub(super) fn conclusions(data: &Data<'_>, transports: &[Transport]) -> Conclusions {
    let mut found = Conclusions::default();
    for transport in transports {
        found.over(*transport);
        paper(data, *transport, &mut found);
        policies(data, *transport, &mut found);
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
    use Experiment::{Equal, Half, Sends, Small};
    let small = |figure: &Figure, sizes: std::ops::RangeInclusive<u64>| {
        let ratios = data.ratios(Small, transport, figure, "small", "not small");
        Range::of(ratios.filter(|(size, _)| sizes.contains(size)))
    };
    let both = |figure: &Figure, over: &str, under: &str| {
        let equal = data.ratios(Equal, transport, figure, over, under);
        Range::of(equal.chain(data.ratios(Half, transport, figure, over, under)))
    };
    let from = |experiment, variant: &str, figure: &Figure, least: u64| {
        let medians = data.medians(experiment, transport, variant, figure);
        Range::of(medians.filter(|(x, _)| *x >= least))
    };
    let settled = |size: u64| {
        let range = from(Sends, &human(size), &GIGABITS, SETTLED)?;
        Some(range.high.0 / range.low.0)
    };
    let settled = settled(512 << 10).zip(settled(2 << 20));
    claims! { found;
        "fig. 9", "indirect-only is always slower than direct-only" =>
            both(&GIGABITS, "indirect", "direct").map(|r| r.all(Below(1.0), OF_DIRECT));
        "fig. 10", "indirect-only: the receiver's CPU approaches 100 %" =>
            from(Equal, "indirect", &SERVER_CPU, 0).map(|r| r.largest(AtLeast(90.0), " %"));
        "fig. 10", "direct-only: the receiver's CPU is always lower" =>
            both(&SERVER_CPU, "direct", "indirect").map(|r| r.all(Below(1.0), OF_INDIRECT));
        "fig. 11a", "throughput rises with the message size (128 KiB, 512 KiB, 2 MiB)" =>
            rising(data, transport);
        "fig. 11a", "more than 5 sends: throughput varies little (512 KiB, 2 MiB)" =>
            settled.map(|(left, right)| {
                let words = format!("fastest over slowest: {}, {}", number(left), number(right));
                (left.max(right) <= 1.15, words)
            });
        "interface fig. 2", "small packets are faster up to about 100,000 B" =>
            small(&GIGABITS, 0..=BREAK_EVEN).map(|r| r.all(Above(1.0), " times as fast"));
        "interface fig. 2", "and not above" =>
            small(&GIGABITS, BREAK_EVEN + 1..=u64::MAX).map(|r| r.all(AtMost(1.0), " times as fast"));
        "interface fig. 3", "small packets take more CPU at the receiver" =>
            small(&SERVER_CPU, 0..=u64::MAX).map(|r| r.all(Above(1.0), " times as much"));
        "interface fig. 3", "not small: never above 30 % CPU at the receiver" =>
            from(Small, "not small", &SERVER_CPU, 0).map(|r| r.all(AtMost(30.0), " %"));
        "interface fig. 3", "not small: close to 0 from 1,000,000 B on (< 5 %)" =>
            from(Small, "not small", &SERVER_CPU, 1_000_000).map(|r| r.all(Below(5.0), " %"));
        "interface fig. 3", "small packets: never below 40 % CPU at the receiver" =>
            from(Small, "small", &SERVER_CPU, 0).map(|r| r.all(AtLeast(40.0), " %"));
    }
}

/// The claims on the paper's dynamic protocol, for its policy and for ours.
fn policies(data: &Data<'_>, transport: Transport, found: &mut Conclusions) {
    use Experiment::{Equal, Half, Sizes};
    for (mode, sources) in [("published", &FIGURES), ("dynamic", &OUR_POLICY)] {
        let ratio = |experiment, figure: &Figure, under: &str| {
            Range::of(data.ratios(experiment, transport, figure, mode, under))
        };
        let from = |experiment, figure: &Figure, least: u64| {
            let medians = data.medians(experiment, transport, mode, figure);
            Range::of(medians.filter(|(x, _)| *x >= least))
        };
        let [f9a, f9b, table, f10b, f12a, f12b, conclusion] = *sources;
        claims! { found;
            f9a, "as many sends as receives: dynamic falls to the level of indirect-only" =>
                ratio(Equal, &GIGABITS, "indirect").map(|r| r.all(AtMost(1.1), OF_INDIRECT));
            f9b, "twice as many receives: dynamic is as fast as direct-only" =>
                ratio(Half, &GIGABITS, "direct").map(|r| r.all(AtLeast(0.95), OF_DIRECT));
            table, "as many sends as receives: hardly any direct transfers (< 0.1)" =>
                from(Equal, &DIRECT_RATIO, 0).map(|r| r.all(Below(0.1), ""));
            table, "twice as many receives, 8 sends and more: all transfers direct" =>
                from(Half, &DIRECT_RATIO, 8).map(|r| r.all(AtLeast(0.99), ""));
            f10b, "where dynamic is direct, it adds little CPU at the receiver" =>
                ratio(Half, &SERVER_CPU, "direct").map(|r| r.all(AtMost(1.1), OF_DIRECT));
            f12a, "throughput rises with the message size up to about 2 MiB" =>
                from(Sizes, &GIGABITS, 0).map(|range| {
                    let (most, at) = range.high;
                    (at >= 512 << 10, format!("the peak is {} Gb/s at {}", number(most), human(at)))
                });
            f12b, "from 512 KiB on all transfers are direct" =>
                from(Sizes, &DIRECT_RATIO, ALL_DIRECT).map(|r| r.all(AtLeast(0.99), ""));
            f12b, "the share of direct transfers is least at about 32 KiB" =>
                from(Sizes, &DIRECT_RATIO, 0).map(|range| {
                    let (least, at) = range.low;
                    let middle = (8 << 10..=128 << 10).contains(&at);
                    let words = format!("least: {} at {}", number(least), human(at));
                    (middle && least < range.high.0, words)
                });
            conclusion, "throughput is much higher with more receives than sends" =>
                more_receives(data, transport, mode);
        }
    }
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

/// A mode with twice as many receives as sends over as many, at each number of sends.
fn more_receives(data: &Data<'_>, transport: Transport, mode: &str) -> Option<(bool, String)> {
    let equal: Vec<(u64, f64)> = data
        .medians(Experiment::Equal, transport, mode, &GIGABITS)
        .collect();
    let ratios = data
        .medians(Experiment::Half, transport, mode, &GIGABITS)
        .filter_map(|(x, more)| {
            let (_, same) = equal.iter().find(|(other, _)| *other == x)?;
            (*same > 0.0).then_some((x, more / same))
        });
    Some(Range::of(ratios)?.all(Above(1.2), " times as fast"))
}

fn distance(data: &Data<'_>, found: &mut Conclusions) {
    let transport = Transport::Tcp;
    let ratio = |over: &str, under: &str| {
        data.ratios(Experiment::Distance, transport, &GIGABITS, over, under)
            .filter(|(x, _)| *x >= 4)
            .collect::<Vec<_>>()
    };
    let indirect = ratio("indirect", "direct");
    let published = ratio("published", "direct");
    let dynamic = ratio("dynamic", "direct");
    let all = [indirect.clone(), published.clone()].concat();
    claims! { found;
        "fig. 13", "4 operations and more: all three are similar (within a quarter)" =>
            Range::of(all).map(|r| r.all(Within(0.75, 1.25), OF_DIRECT));
        "fig. 13", "4 operations and more: indirect-only is faster than direct-only" =>
            Range::of(indirect).map(|r| r.all(Above(1.0), OF_DIRECT));
        "fig. 13", "dynamic adapts: at least as fast as direct-only" =>
            Range::of(published).map(|r| r.all(AtLeast(0.98), OF_DIRECT));
        "fig. 13, our policy", "dynamic adapts: at least as fast as direct-only" =>
            Range::of(dynamic).map(|r| r.all(AtLeast(0.98), OF_DIRECT));
    }
}

fn targets(data: &Data<'_>, transport: Transport, found: &mut Conclusions) {
    let record = |op: &str, stack: &str, metric: Metric| -> Option<&Record> {
        data.targets.iter().find(|record| {
            (record.op.as_str(), record.stack.as_str()) == (op, stack)
                && record.metric == metric
                && (record.transport == transport.name())
        })
    };
    let of_tcp = |op: &str, stack: &str, metric: Metric| record(op, stack, metric)?.ratio_tcp;
    let reaches =
        |ratio: f64, least: f64| Some((ratio >= least, format!("{} of it", number(ratio))));
    let latency = |stack: &str| {
        record(PING_PONG, stack, Metric::latency_us_p50).map(|record| record.summary.median)
    };
    let dynamic = |experiment, place: fn(u64) -> String| {
        Range::of(data.of_the_best(experiment, transport)).map(|range| {
            let least = format!(", the least at {}", place(range.low.1));
            range.all(AtLeast(0.95), &least)
        })
    };
    let sends = |count| format!("{count} sends");
    let direct = Range::of(data.medians(Experiment::Half, transport, "dynamic", &DIRECT_RATIO));
    let (least, stream) = match transport {
        Transport::Local => (3.0, "1 MiB stream: at least 3 times loopback TCP"),
        Transport::Tcp => (0.95, "1 MiB stream: at least 0.95 of loopback TCP"),
    };
    claims! { found;
        "target, fig. 9a", OF_THE_BETTER => dynamic(Experiment::Equal, sends);
        "target, fig. 9b", OF_THE_BETTER => dynamic(Experiment::Half, sends);
        "target, fig. 12", OF_THE_BETTER => dynamic(Experiment::Sizes, human);
        "target", "twice as many receives as sends: at least 99 % direct" =>
            direct.map(|Range { low: (share, sends), .. }| {
                (share >= 0.99, format!("{:.1} % with {sends} sends", share * 100.0))
            });
        "target", stream =>
            of_tcp(STREAM, "exs", Metric::bandwidth_GBps).and_then(|ratio| reaches(ratio, least));
        "target", "64 B ping-pong: at most 1.2 times raw verbs" =>
            latency("exs").zip(latency("weft")).map(|(exs, verbs)| {
                let ratio = exs / verbs;
                let [ours, theirs] = [exs, verbs].map(number);
                (ratio <= 1.2, format!("{} of it: {ours} and {theirs} µs", number(ratio)))
            });
        "target", "blocking calls, 1 MiB stream: at least 0.9 of plain sockets" =>
            of_tcp(SYNC_STREAM, "exs-sync", Metric::bandwidth_GBps).and_then(|ratio| reaches(ratio, 0.9));
        "target", "blocking calls, 64 B ping-pong: at least 0.9 of plain sockets' speed" =>
            of_tcp(SYNC_PING_PONG, "exs-sync", Metric::latency_us_p50)
                .filter(|ratio| *ratio > 0.0)
                .and_then(|ratio| reaches(1.0 / ratio, 0.9));
    }
}
