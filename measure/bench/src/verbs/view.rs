//! Records in the form of tables and plots.

use crate::record::{Metric, Record, Side};
use crate::report::{Axis, Plot, Series, Stroke, number};

/// Records with common properties.
#[derive(Clone)]
pub(super) struct View<'a>(pub(super) Vec<&'a Record>);

impl<'a> View<'a> {
    pub(super) fn filter(&self, keep: impl Fn(&Record) -> bool) -> Self {
        Self(
            self.0
                .iter()
                .copied()
                .filter(|record| keep(record))
                .collect(),
        )
    }

    pub(super) fn op(&self, op: &str) -> Self {
        self.filter(|record| record.op == op)
    }

    pub(super) fn metric(&self, metric: Metric) -> Self {
        self.filter(|record| record.metric == metric)
    }

    pub(super) fn line(&self, line: &Line) -> Self {
        self.filter(|record| {
            record.stack == line.stack
                && record.transport == line.transport
                && record.crc == line.crc
                && record.case == line.case
        })
    }

    pub(super) fn poll(&self, poll: &str) -> Self {
        self.filter(|record| record.poll.as_deref() == Some(poll))
    }

    pub(super) fn stack(&self, stack: &str) -> Self {
        self.filter(|record| record.stack == stack)
    }

    pub(super) fn case(&self, case: &str) -> Self {
        self.filter(|record| record.case.as_deref() == Some(case))
    }

    pub(super) fn side(&self, side: Side) -> Self {
        self.filter(|record| record.side == Some(side))
    }

    pub(super) fn transport(&self, transport: &str) -> Self {
        self.filter(|record| record.transport == transport)
    }

    /// The transports, in the order in which they were measured.
    pub(super) fn transports(&self) -> Vec<String> {
        let mut transports = Vec::new();
        for record in &self.0 {
            if !transports.contains(&record.transport) {
                transports.push(record.transport.clone());
            }
        }
        transports
    }

    pub(super) fn first(&self) -> Option<&'a Record> {
        self.0.first().copied()
    }

    pub(super) fn at(&self, bytes: u64) -> Option<&'a Record> {
        self.0.iter().copied().find(|record| record.bytes == bytes)
    }

    pub(super) fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.0.iter().map(|record| record.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The stacks and variants, in the order of their measurement.
    pub(super) fn lines(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for record in &self.0 {
            let line = Line::of(record);
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines
    }

    /// Medians over sizes, with the spread of the runs.
    pub(super) fn series(&self, label: String, stroke: Stroke) -> Series {
        let mut records = self.0.clone();
        records.sort_unstable_by_key(|record| record.bytes);
        let points = records
            .iter()
            .map(|record| (record.bytes as f64, record.summary.median));
        let spread = records.iter().map(|record| {
            let summary = &record.summary;
            (record.bytes as f64, summary.q1, summary.q3)
        });
        Series::new(label, stroke, points.collect()).spread(spread.collect())
    }
}

impl View<'_> {
    /// All lines over sizes, with these labels.
    pub(super) fn plot(&self, title: &str, y: Axis, label: impl Fn(&Line) -> String) -> Plot {
        let plot = Plot::new(title, Axis::bytes(), y);
        self.lines().iter().fold(plot, |plot, line| {
            plot.series(self.line(line).series(label(line), line.stroke()))
        })
    }
}

/// One line of a plot, one group of columns of a table.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) stack: String,
    pub(super) transport: String,
    crc: Option<bool>,
    pub(super) case: Option<String>,
}

impl Line {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            stack: record.stack.clone(),
            transport: record.transport.clone(),
            crc: record.crc,
            case: record.case.clone(),
        }
    }

    pub(super) fn has_crc(&self) -> bool {
        self.crc == Some(true)
    }

    pub(super) fn is_weft(&self) -> bool {
        self.stack.starts_with("weft")
    }

    pub(super) fn is_exs(&self) -> bool {
        self.stack.starts_with("exs")
    }

    pub(super) fn label(&self) -> String {
        let mut label = self.stack.clone();
        if (self.is_weft() || self.is_exs()) && self.transport != "tcp" {
            label = format!("{label} {}", self.transport);
        }
        if self.crc == Some(true) {
            label.push_str(" CRC");
        }
        if let Some(case) = &self.case {
            label = format!("{label} {case}");
        }
        label
    }

    pub(super) fn stroke(&self) -> Stroke {
        match (self.stack.as_str(), self.crc, self.case.as_deref()) {
            ("tcp" | "memcpy", _, _) => Stroke::Tcp,
            ("weft-iw" | "weft-tls", _, _) | (_, _, Some("reregister")) => Stroke::WeftOther,
            ("tcp-tls", _, _) | (_, _, Some("copy" | "ordinary")) => Stroke::Other,
            _ if self.is_exs() => Stroke::Other,
            _ if self.transport == "local" => Stroke::WeftOther,
            (_, Some(true), _) => Stroke::WeftCrc,
            _ => Stroke::Weft,
        }
    }
}

/// A median with the spread of its runs.
pub(super) fn spread(record: Option<&Record>) -> String {
    record.map_or_else(
        || "-".to_owned(),
        |record| {
            let summary = &record.summary;
            format!(
                "{} ({}..{})",
                number(summary.median),
                number(summary.min),
                number(summary.max)
            )
        },
    )
}

pub(super) fn median(record: Option<&Record>) -> String {
    record.map_or_else(|| "-".to_owned(), |record| number(record.summary.median))
}

pub(super) fn ratio(record: Option<&Record>) -> String {
    share(record.and_then(|record| record.ratio_tcp))
}

pub(super) fn share(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
}

/// A column of ratios: its header, and its cell for a record.
pub(super) type Ratio = (&'static str, fn(Option<&Record>) -> String);

/// The ratios of a line, in the columns behind its own.
pub(super) fn ratios(line: &Line) -> &'static [Ratio] {
    pub(super) const TCP: Ratio = ("of TCP", ratio);
    pub(super) const TLS: Ratio = ("of TCP with TLS", |record| {
        share(record.and_then(|record| record.ratio_tcp_tls))
    });
    match line.stack.as_str() {
        "tcp" => &[],
        "weft-tls" => &[TCP, TLS],
        _ => &[TCP],
    }
}
