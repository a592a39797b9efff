//! The measurements as a table, and whether they confirm the conclusions of the paper.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

use crate::aims::Limit::{self, AtLeast, AtMost};
use crate::report::{Report, Section, Table};
use crate::size::human;
use crate::stats::{Summary, paired_ratio};

pub(super) const LATENCY: &str = "time one way, µs";
pub(super) const BANDWIDTH: &str = "bidirectional bandwidth, MB/s";
pub(super) const MEMORY: &str = "memory of a rank, KiB";
/// Messages of more bytes go by RDMA Write-Record.
const LARGE: u64 = 64 << 10;

/// A quantity, for this many bytes or ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) mpi: String,
    pub(super) what: String,
    pub(super) at: u64,
    pub(super) transport: String,
}

/// Values by their turn.
#[derive(Default)]
pub(super) struct Results(BTreeMap<Key, BTreeMap<u32, f64>>);

impl Results {
    pub(super) fn add(&mut self, key: Key, turn: u32, value: f64) {
        self.0.entry(key).or_default().insert(turn, value);
    }

    /// The results as JSON.
    pub(super) fn lines(&self) -> impl Iterator<Item = Line> {
        self.0.iter().map(|(key, turns)| {
            let values: Vec<f64> = turns.values().copied().collect();
            let ratio = |to| self.ratio(key, to).map(|ratio| ratio.median);
            Line {
                mpi: key.mpi.clone(),
                what: key.what.clone(),
                at: key.at,
                transport: key.transport.clone(),
                turns: turns.keys().copied().collect(),
                median: Summary::of(&values).map(|summary| summary.median),
                values,
                to_tcp: ratio("tcp"),
                to_rc: ratio("rc"),
            }
        })
    }

    /// The measurements of another run, from its lines.
    pub(super) fn read(lines: Vec<Line>) -> Self {
        let mut results = Self::default();
        for line in lines {
            let key = Key {
                mpi: line.mpi,
                what: line.what,
                at: line.at,
                transport: line.transport,
            };
            for (turn, value) in line.turns.into_iter().zip(line.values) {
                results.add(key.clone(), turn, value);
            }
        }
        results
    }

    /// A transport's values over another's, of the turns that both have.
    fn ratio(&self, key: &Key, to: &str) -> Option<Summary> {
        let other = Key {
            transport: to.to_owned(),
            ..key.clone()
        };
        let (ours, theirs) = (self.0.get(key)?, self.0.get(&other)?);
        let both = ours
            .iter()
            .filter_map(|(turn, v)| Some((*v, *theirs.get(turn)?)));
        let (ours, theirs): (Vec<f64>, Vec<f64>) = both.unzip();
        paired_ratio(&ours, &theirs).filter(|_| key.transport != to)
    }
}

/// A quantity in its written form.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Line {
    mpi: String,
    what: String,
    at: u64,
    transport: String,
    turns: Vec<u32>,
    values: Vec<f64>,
    median: Option<f64>,
    to_tcp: Option<f64>,
    to_rc: Option<f64>,
}

/// The subject of a claim: a quantity, for this many bytes or ranks.
type Of = fn(&str, u64) -> bool;

const SMALL_LATENCY: Of = |what, at| what == LATENCY && at <= 2048;
const ANY_BANDWIDTH: Of = |what, _| what == BANDWIDTH;
const LARGE_BANDWIDTH: Of = |what, at| what == BANDWIDTH && at > LARGE;
const ANY_MEMORY: Of = |what, _| what == MEMORY;
const KERNEL: Of = |what, _| what.ends_with(", s");
const KERNEL_IN_MPI: Of = |what, _| what.ends_with(", s in MPI");
const DATAGRAMS: &[&str] = &["ud", "weft"];

/// A ratio's target: source, text, quantity, transports, reference transport, and the target.
type Claim = (
    &'static str,
    &'static str,
    Of,
    &'static [&'static str],
    &'static str,
    Limit,
);

#[rustfmt::skip]
const CLAIMS: &[Claim] = &[
    ("fig. 13", "time one way of messages up to 2 KiB, to RC", SMALL_LATENCY, DATAGRAMS, "rc", AtMost(0.86)),
    ("fig. 14", "bidirectional bandwidth, to RC", ANY_BANDWIDTH, DATAGRAMS, "rc", AtLeast(1.0)),
    ("fig. 14", "bandwidth of large messages by RDMA Write-Record, to UD", LARGE_BANDWIDTH, &["weft"], "ud", AtLeast(1.1)),
    ("fig. 15", "memory of a rank after all to all, to RC", ANY_MEMORY, DATAGRAMS, "rc", AtMost(0.7)),
    ("fig. 17, 19", "run time of kernels, to RC", KERNEL, DATAGRAMS, "rc", AtMost(1.0)),
    ("fig. 16, 18", "time of kernels in MPI, to RC", KERNEL_IN_MPI, DATAGRAMS, "rc", AtMost(1.0)),
    ("bar", "run time of kernels, to the MPI's own TCP", KERNEL, DATAGRAMS, "tcp", AtMost(1.05)),
];

/// The claims that were measured, one for each MPI and transport: how many of the medians of their ratios keep the bar, and the range of these.
fn conclusions(results: &Results) -> Table {
    let mut table = Table::new(&[
        "source",
        "claim",
        "MPI",
        "transport",
        "bar",
        "medians",
        "holds",
    ]);
    let mpis: BTreeSet<&str> = results.0.keys().map(|key| key.mpi.as_str()).collect();
    for (source, text, is, transports, to, limit) in CLAIMS {
        for mpi in &mpis {
            for transport in *transports {
                let keys = results.0.keys().filter(|key| {
                    key.mpi == *mpi && key.transport == *transport && is(&key.what, key.at)
                });
                let medians: Vec<f64> = keys
                    .filter_map(|key| results.ratio(key, to))
                    .map(|ratio| ratio.median)
                    .collect();
                let keeps = |median: &&f64| limit.holds(**median) == Some(true);
                let Some(range) = Summary::of(&medians) else {
                    continue;
                };
                let kept = medians.iter().filter(keeps).count();
                table.push([
                    (*source).to_owned(),
                    (*text).to_owned(),
                    (*mpi).to_owned(),
                    (*transport).to_owned(),
                    limit.to_string(),
                    format!("{:.2} to {:.2}", range.min, range.max),
                    match kept {
                        0 => "no".to_owned(),
                        all if all == medians.len() => "yes".to_owned(),
                        some => format!("{some} of {}", medians.len()),
                    },
                ]);
            }
        }
    }
    table
}

/// All measurements.
fn values(results: &Results) -> Table {
    let place = |key: &Key| match key.what.as_str() {
        LATENCY | BANDWIDTH => human(key.at),
        _ => format!("{} ranks", key.at),
    };
    let ratio = |key: &Key, to: &str| {
        let ratio = results.ratio(key, to);
        ratio.map_or(String::new(), |ratio| format!("{:.2}", ratio.median))
    };
    let rows = results.0.iter().filter_map(|(key, values)| {
        let values: Vec<f64> = values.values().copied().collect();
        Some((key, Summary::of(&values)?.median))
    });
    Table::of(
        rows,
        &[
            ("MPI", &|(key, _)| key.mpi.clone()),
            ("what", &|(key, _)| key.what.clone()),
            ("at", &|(key, _)| place(key)),
            ("transport", &|(key, _)| key.transport.clone()),
            ("median", &|(_, median)| format!("{median:.3}")),
            ("to tcp", &|(key, _)| ratio(key, "tcp")),
            ("to rc", &|(key, _)| ratio(key, "rc")),
        ],
    )
}

/// The tables, after an introduction.
pub(super) fn report(results: &Results, intro: String) -> Report {
    let mut report = Report::new("weft-papers mpi");
    report.intro.push(
        "Programs of ours under each MPI on one machine, over each transport of `weft mpi` in turn; tcp is the MPI's own. Figs. 13 to 19 of the datagram-iWARP paper. \
         Ratios are medians of those of the turns."
            .to_owned(),
    );
    report.intro.push(intro);
    report.sections.extend([
        Section::new("What was measured").table(values(results)),
        Section::new("Conclusions").table(conclusions(results)),
    ]);
    report.sections.retain(Section::has_rows);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If one of two transports loses a turn, the others do not shift.
    #[test]
    fn ratios_are_of_the_same_turn() {
        let mut results = Results::default();
        let key = |transport: &str| Key {
            mpi: "openmpi".into(),
            what: MEMORY.into(),
            at: 4,
            transport: transport.into(),
        };
        for (turn, value) in [(0, 10.0), (1, 20.0), (2, 40.0)] {
            results.add(key("rc"), turn, value);
        }
        for (turn, value) in [(0, 5.0), (2, 20.0)] {
            results.add(key("weft"), turn, value);
        }
        let ratio = results.ratio(&key("weft"), "rc").unwrap();
        assert_eq!((ratio.min, ratio.max, ratio.runs), (0.5, 0.5, 2));
        assert!(results.ratio(&key("rc"), "rc").is_none());
        let text = conclusions(&results).to_text(None);
        assert!(text.contains("fig. 15") && text.contains("yes"), "{text}");
        // The written lines are read back unchanged.
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines = results
            .lines()
            .map(|line| serde_json::to_string(&line).unwrap());
        std::fs::write(file.path(), lines.collect::<Vec<_>>().join("\n")).unwrap();
        let again = crate::output::read(&[file.path().to_owned()]).unwrap();
        assert_eq!(Results::read(again).0, results.0);
        results.add(key("weft"), 2, 40.0);
        let text = conclusions(&results).to_text(None);
        assert!(text.contains("no") && !text.contains("yes"), "{text}");
    }
}
