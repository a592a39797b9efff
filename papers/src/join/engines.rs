//! `weft join` compared with other engines: the measurements of `weft-join-bench`, a program of the workspace of `weft join`.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use super::Bench;
use super::chapter::Chapter;
use crate::error::{BenchError, Result, stack};
use crate::report::{Section, Table, number};

/// One way to the answer, in turn with the others of its experiment and size.
#[derive(Debug, Deserialize)]
struct Way {
    experiment: String,
    size: String,
    #[serde(rename = "way")]
    name: String,
    seconds: Vec<f64>,
    cpu: Vec<f64>,
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median of the ratios of two ways in the same round.
fn ratio(ways: (&Way, &Way), of: fn(&Way) -> &[f64]) -> f64 {
    let pairs = of(ways.0).iter().zip(of(ways.1));
    median(pairs.map(|(a, b)| a / b))
}

fn seconds(way: &Way) -> &[f64] {
    &way.seconds
}

fn cpu(way: &Way) -> &[f64] {
    &way.cpu
}

/// A target: experiment, `ours`, `theirs`, the claim, the compared quantity, and the largest ratio of `ours` to `theirs`.
type Aim = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    fn(&Way) -> &[f64],
    f64,
);

#[rustfmt::skip]
const AIMS: [Aim; 7] = [
    ("channels", "weft", "gRPC, lz4", "batches come twice as fast as on the other engine's gRPC, as it is unless told otherwise", seconds, 0.5),
    ("channels", "weft", "gRPC", "... and without its compression", seconds, 0.5),
    ("join", "ring", "DataFusion, one process", "two workers take at most 1.3 times the CPU of one process", cpu, 1.3),
    ("join", "ring", "distributed over gRPC, lz4", "at most 0.8 of the time of datafusion-distributed on its gRPC, as it is unless told otherwise", seconds, 0.8),
    ("join", "ring", "distributed over gRPC", "... and without its compression", seconds, 0.8),
    ("band", "ring", "DataFusion, one process", "a band join takes at most a tenth of DataFusion's nested loops", seconds, 0.1),
    ("band", "ring", "DuckDB", "a band join has at least half of DuckDB's speed", seconds, 2.0),
];

impl Bench<'_> {
    /// Runs the program, if it is named.
    pub(super) fn engines(&mut self, chapter: &mut Chapter) -> Result<()> {
        let mut values = std::mem::take(&mut self.ways);
        if let Some(program) = &self.args.engines {
            values.extend(measured(program, self.args.repetitions)?);
        }
        let mut ways = Vec::new();
        for value in values {
            ways.push(Way::deserialize(&value).map_err(stack("weft-join-bench"))?);
            self.lines.push(value);
        }
        show(&ways, chapter);
        Ok(())
    }
}

/// Whether a line is the result of a way.
pub(super) fn is_way(line: &Value) -> bool {
    line["experiment"].is_string()
}

fn measured(program: &Path, runs: u32) -> Result<Vec<Value>> {
    let out = Command::new(program)
        .args(["--runs", &runs.to_string()])
        .stderr(Stdio::inherit())
        .output()
        .map_err(BenchError::system("starting weft-join-bench"))?;
    if !out.status.success() {
        let why = format!("{} failed", program.display());
        return Err(BenchError::PeerGone(why));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    let lines = text.lines().map(serde_json::from_str);
    let gone = |e| BenchError::PeerGone(format!("weft-join-bench: {e}"));
    lines.collect::<std::result::Result<_, _>>().map_err(gone)
}

fn show(ways: &[Way], chapter: &mut Chapter) {
    let same = |a: &Way, b: &Way| a.experiment == b.experiment && a.size == b.size;
    for group in ways.chunk_by(same) {
        let Some(first) = group.first() else { continue };
        let table = Table::of(
            group,
            &[
                ("", &|way| way.name.clone()),
                ("s", &|way| number(median(way.seconds.iter().copied()))),
                ("CPU s", &|way| number(median(way.cpu.iter().copied()))),
                ("time, of the first", &|way| {
                    number(ratio((way, first), seconds))
                }),
                ("CPU, of the first", &|way| number(ratio((way, first), cpu))),
            ],
        );
        let title = match first.experiment.as_str() {
            "channels" => "Batches from one process to another",
            "join" => "TPC-H's lineitem with orders on two workers",
            _ => "A join by a range of keys on two workers",
        };
        let section = Section::new(format!("{title}: {}", first.size));
        chapter.sections.push(
            section
                .text("CPU is that of all processes that take part. The ways take turns.")
                .table(table),
        );
        for (experiment, ours, theirs, what, of, target) in AIMS {
            let way = |name| group.iter().find(|way| way.name == name);
            if let (true, Some(ours), Some(theirs)) =
                (experiment == first.experiment, way(ours), way(theirs))
            {
                let ratio = ratio((ours, theirs), of);
                let here = format!("{} ({})", number(ratio), first.size);
                chapter
                    .conclusions
                    .add("aim", what, Some((ratio <= target, here)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aims_are_judged_in_pairs() {
        let line = |experiment: &str, way: &str, seconds: [f64; 3]| {
            let text = format!(
                r#"{{"experiment":"{experiment}","size":"1","way":"{way}","seconds":{seconds:?},"cpu":[1.0,2.0,3.0],"load":"0"}}"#
            );
            serde_json::from_str::<Way>(&text).unwrap()
        };
        let mut chapter = Chapter::default();
        // Slow rounds are slow for both.
        let ways = [
            line("channels", "weft", [1.0, 10.0, 1.0]),
            line("channels", "gRPC", [2.5, 25.0, 1.5]),
            line("band", "ring", [1.0, 1.0, 1.0]),
            line("band", "DuckDB", [0.4, 0.3, 0.2]),
        ];
        show(&ways, &mut chapter);
        let found: Vec<_> = chapter.conclusions.list.iter().collect();
        assert_eq!(found.len(), 2);
        assert!(found[0].holds && found[0].number.starts_with("0.40"));
        assert!(!found[1].holds && found[1].number.starts_with("3.33"));
        assert_eq!(chapter.sections.len(), 2);
    }
}
