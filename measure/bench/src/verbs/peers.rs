//! weft compared with other libraries, `memcpy` and `process_vm_writev`: a table for each measure.

use super::view::{Line, View};
use crate::record::{Metric, Record};
use crate::report::{Axis, Plot, Section, Series, Stroke, Table, number};
use crate::size::human;

/// The comparison in a table.
struct Measure {
    title: &'static str,
    text: &'static str,
    op: &'static str,
    unit: &'static str,
    metric: Metric,
    /// Less is better.
    least: bool,
    /// A number of the table from the record's size and median.
    value: fn(u64, f64) -> f64,
}

const MEASURES: [Measure; 5] = [
    Measure {
        title: "RDMA Write: throughput beside others",
        text: "weft: RDMA Write until the far application has answered; ucx: ucp_put_bw; perftest: ib_write_bw on weft's libibverbs; memcpy: within one process, so \
               the machine's limit for one copy; vm: bare process_vm_writev into the peer.",
        op: "write",
        unit: "GB/s",
        metric: Metric::bandwidth_GBps,
        least: false,
        value: |_, median| median,
    },
    Measure {
        title: "Send: throughput beside others",
        text: "weft: Send into posted receives; ucx: tag_bw; perftest: ib_send_bw on weft's libibverbs.",
        op: "send",
        unit: "GB/s",
        metric: Metric::bandwidth_GBps,
        least: false,
        value: |_, median| median,
    },
    Measure {
        title: "RDMA Write: latency beside others",
        text: "One way, both sides spinning, the mean of a run; ucx: ucp_put_lat; perftest: ib_write_lat on weft's libibverbs.",
        op: "write",
        unit: "µs",
        metric: Metric::latency_us_mean,
        least: true,
        value: |_, median| median,
    },
    Measure {
        title: "Send: latency beside others",
        text: "One way, both sides spinning, the mean of a run; ucx: tag_lat; fi: fi_pingpong; perftest: ib_send_lat on weft's libibverbs.",
        op: "send",
        unit: "µs",
        metric: Metric::latency_us_mean,
        least: true,
        value: |_, median| median,
    },
    Measure {
        title: "Send: ping-pong throughput beside others",
        text: "One message in flight, as fi_pingpong counts it: the size over the mean time of one way.",
        op: "send",
        unit: "GB/s",
        metric: Metric::latency_us_mean,
        least: false,
        value: |bytes, median| bytes as f64 / 1e3 / median,
    },
];

/// Whether the stack is another library, which weft should outperform.
fn is_library(stack: &str) -> bool {
    stack.starts_with("ucx-") || stack.starts_with("fi-")
}

fn is_beside(stack: &str) -> bool {
    is_library(stack) || stack.starts_with("perftest-") || matches!(stack, "memcpy" | "vm")
}

pub(super) fn sections(every: &View<'_>, notes: &[String]) -> Vec<Section> {
    let mut sections: Vec<Section> = MEASURES
        .iter()
        .filter_map(|measure| section(every, measure))
        .collect();
    if !notes.is_empty() {
        // A table, so that a terminal shows it even if nothing else was measured.
        let mut table = Table::new(&["note"]);
        for note in notes {
            table.push([note.clone()]);
        }
        sections.push(
            Section::new("The other libraries")
                .text(
                    "Their own benchmark programs, started anew for each run, client and server on this machine; nothing is \
                     pinned to a CPU, neither theirs nor weft's. The start is not in the numbers.",
                )
                .table(table),
        );
    }
    sections
}

fn section(every: &View<'_>, measure: &Measure) -> Option<Section> {
    let of_op = every
        .op(measure.op)
        .metric(measure.metric)
        .filter(|record| record.poll.as_deref().is_none_or(|poll| poll == "busy"));
    let lines = of_op.lines();
    if !lines.iter().any(|line| is_beside(&line.stack)) {
        return None;
    }
    let value = |record: &Record| (measure.value)(record.bytes, record.summary.median);
    let band = |record: &Record| Band::of(measure, record);
    let ours = contender(&lines);
    let ordinary = lines
        .iter()
        .find(|line| line.is_weft() && line.case.is_some());
    let has = |stack: &str| lines.iter().any(|line| line.stack == stack);
    let libraries = lines.iter().any(|line| is_library(&line.stack));

    let mut headers = vec!["size".to_owned()];
    headers.extend(
        lines
            .iter()
            .map(|line| format!("{} {}", line.label(), measure.unit)),
    );
    let of_memcpy = ours.filter(|_| has("memcpy"));
    let of_vm = ordinary.filter(|_| has("vm"));
    headers.extend(of_memcpy.map(|line| format!("{} of memcpy", line.label())));
    headers.extend(of_vm.map(|line| format!("{} of vm", line.label())));
    let mut unmodified: Vec<(&Line, &Line)> = Vec::new();
    for theirs in lines
        .iter()
        .filter(|line| line.stack.starts_with("perftest-"))
    {
        // Its CRC is off.
        let native = lines.iter().filter(|line| {
            line.stack == "weft" && line.transport == theirs.transport && !line.has_crc()
        });
        unmodified.extend(native.map(|native| (theirs, native)));
    }
    headers.extend(
        unmodified
            .iter()
            .map(|(theirs, native)| format!("{} of {}", theirs.label(), native.label())),
    );
    if libraries {
        headers.extend(ours.map(|line| format!("{} ahead of the libraries", line.label())));
    }
    let mut table = Table::new(&headers);
    for bytes in of_op.sizes() {
        let at = |line: &Line| of_op.line(line).at(bytes).map(value);
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
        let mut row = vec![human(bytes)];
        row.extend(lines.iter().map(|line| text(at(line))));
        for (line, stack) in [(of_memcpy, "memcpy"), (of_vm, "vm")] {
            if let Some(line) = line {
                let limit = of_op.stack(stack).at(bytes).map(value);
                row.push(text(at(line).zip(limit).map(|(ours, limit)| ours / limit)));
            }
        }
        for (theirs, native) in &unmodified {
            let of = at(theirs).zip(at(native));
            row.push(text(of.map(|(theirs, native)| theirs / native)));
        }
        if let (true, Some(line)) = (libraries, ours) {
            let others = lines.iter().filter(|line| is_library(&line.stack));
            let others = others.filter_map(|line| {
                Some((line.stack.as_str(), of_op.line(line).at(bytes).map(band)?))
            });
            let ours = of_op.line(line).at(bytes).map(band);
            row.push(verdict(ours, others, measure.least));
        }
        table.push(row);
    }
    let axis = if measure.least {
        Axis::log(measure.unit)
    } else {
        Axis::linear(measure.unit)
    };
    let mut plot = Plot::new(measure.title, Axis::bytes(), axis);
    for line in &lines {
        let Some((stroke, dashed)) = look(line) else {
            continue;
        };
        let records = of_op.line(line);
        let points = of_op
            .sizes()
            .into_iter()
            .filter_map(|bytes| Some((bytes as f64, records.at(bytes).map(value)?)));
        let series = Series::new(line.label(), stroke, points.collect());
        plot = plot.series(if dashed { series.dashed() } else { series });
    }
    Some(
        Section::new(measure.title)
            .text(measure.text)
            .plot(plot)
            .table(table),
    )
}

/// The line that should be ahead: weft over shared memory if it was measured, in the library's own memory as the others'.
fn contender(lines: &[Line]) -> Option<&Line> {
    let weft = || {
        let lines = lines.iter();
        lines.filter(|line| line.stack == "weft" && line.case.is_none())
    };
    weft()
        .find(|line| line.transport == "local")
        .or_else(|| weft().next())
}

/// A median with the middle half of its runs.
#[derive(Clone, Copy)]
struct Band {
    median: f64,
    low: f64,
    high: f64,
}

impl Band {
    fn of(measure: &Measure, record: &Record) -> Self {
        let value = |of: f64| (measure.value)(record.bytes, of);
        let (q1, q3) = (value(record.summary.q1), value(record.summary.q3));
        Self {
            median: value(record.summary.median),
            low: q1.min(q3),
            high: q1.max(q3),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.low <= other.high && other.low <= self.high
    }
}

/// The factor between `ours` and the best of `others`: 1.5 is half as much again. If the middle halves of the runs
/// overlap, the factor may be noise, and the verdict mentions it.
fn verdict<'a>(
    ours: Option<Band>,
    others: impl Iterator<Item = (&'a str, Band)>,
    least: bool,
) -> String {
    let Some(ours) = ours else {
        return "-".to_owned();
    };
    let factor = |other: &Band| {
        if least {
            other.median / ours.median
        } else {
            ours.median / other.median
        }
    };
    let factors = others.map(|(stack, other)| (stack, factor(&other), ours.overlaps(&other)));
    match factors.min_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((stack, factor, overlap)) => {
            let word = if factor > 1.0 { "of" } else { "BEHIND" };
            let noise = if overlap { ", within noise" } else { "" };
            format!("{factor:.2} {word} {stack}{noise}")
        }
        None => "-".to_owned(),
    }
}

/// Colour and dashes in the plots; the libraries over TCP are left to the tables.
fn look(line: &Line) -> Option<(Stroke, bool)> {
    Some(match (line.stack.as_str(), line.case.is_some()) {
        ("weft", false) => (Stroke::Weft, line.transport == "tcp"),
        ("weft", true) => (Stroke::WeftCrc, false),
        ("vm", _) => (Stroke::WeftCrc, true),
        ("memcpy", _) => (Stroke::Tcp, false),
        ("tcp", _) => (Stroke::Tcp, true),
        ("ucx-posix", _) => (Stroke::Other, false),
        ("ucx-cma", _) => (Stroke::Other, true),
        ("fi-shm", _) => (Stroke::WeftOther, false),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    fn record(op: &str, stack: &str, transport: &str, metric: Metric, value: f64) -> Record {
        let summary = Summary::of(&[value]).unwrap();
        let mut record = Record::new(op, transport, stack, 64, metric, summary);
        if metric == Metric::latency_us_mean {
            record.poll = Some("busy".to_owned());
        }
        record
    }

    fn text(records: &[Record], notes: &[String]) -> String {
        let mut report = crate::report::Report::new("test");
        report.sections = sections(&View(records.iter().collect()), notes);
        report.to_text(None)
    }

    #[test]
    fn the_local_row_is_held_against_the_best_other() {
        let metric = Metric::bandwidth_GBps;
        let mut ordinary = record("write", "weft", "local", metric, 9.0);
        ordinary.case = Some("ordinary".to_owned());
        let mut records = vec![
            record("write", "weft", "tcp", metric, 1.0),
            record("write", "weft", "local", metric, 12.0),
            ordinary,
            record("write", "memcpy", "local", metric, 16.0),
            record("write", "vm", "local", metric, 10.0),
            record("write", "ucx-posix", "local", metric, 8.0),
            record("write", "ucx-cma", "local", metric, 6.0),
        ];
        let ahead = text(&records, &[]);
        assert!(ahead.contains("1.50 of ucx-posix"), "{ahead}");
        assert!(ahead.contains("0.75") && ahead.contains("0.90"), "{ahead}");
        assert!(!ahead.contains("BEHIND"), "{ahead}");
        records.push(record("write", "ucx-tcp", "tcp", metric, 24.0));
        assert!(text(&records, &[]).contains("0.50 BEHIND ucx-tcp"));
    }

    #[test]
    fn of_latencies_the_least_is_best() {
        let metric = Metric::latency_us_mean;
        let records = [
            record("send", "weft", "local", metric, 0.5),
            record("send", "fi-shm", "local", metric, 0.4),
            record("send", "ucx-cma", "local", metric, 1.0),
        ];
        let text = text(&records, &[]);
        assert!(text.contains("0.80 BEHIND fi-shm"), "{text}");
        // 64 bytes in 0.5 µs.
        assert!(
            text.contains("ping-pong throughput") && text.contains("0.13"),
            "{text}"
        );
    }

    #[test]
    fn a_lead_within_the_spread_is_called_noise() {
        let metric = Metric::latency_us_mean;
        let mut records = [
            record("send", "weft", "local", metric, 0.5),
            record("send", "fi-shm", "local", metric, 0.6),
        ];
        assert!(!text(&records, &[]).contains("noise"));
        records[1].summary = Summary::of(&[0.4, 0.6, 0.8]).unwrap();
        let text = text(&records, &[]);
        assert!(text.contains("1.20 of fi-shm, within noise"), "{text}");
    }

    #[test]
    fn weft_and_tcp_alone_have_no_such_table() {
        let metric = Metric::bandwidth_GBps;
        let records = ["weft", "tcp"].map(|stack| record("write", stack, "tcp", metric, 1.0));
        assert!(sections(&View(records.iter().collect()), &[]).is_empty());
        assert!(text(&records, &["not installed".to_owned()]).contains("not installed"));
    }
}
