//! `weft join` beside other engines: what `weft-join-bench`, a program of the workspace of `weft join`, has measured.

use std::process::{Command, Stdio};

use serde::Deserialize;

use super::Bench;
use super::chapter::Chapter;
use crate::error::{BenchError, Result};
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

/// The median of what one way took over what another took in the same round.
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

/// A target: `ours` takes at most `target` of what `theirs` takes.
struct Aim {
    experiment: &'static str,
    ours: &'static str,
    theirs: &'static str,
    what: &'static str,
    of: fn(&Way) -> &[f64],
    target: f64,
}

const AIMS: [Aim; 7] = [
    Aim {
        experiment: "channels",
        ours: "weft",
        theirs: "gRPC, lz4",
        what: "batches come twice as fast as on the other engine's gRPC, as it is unless told otherwise",
        of: seconds,
        target: 0.5,
    },
    Aim {
        experiment: "channels",
        ours: "weft",
        theirs: "gRPC",
        what: "... and without its compression",
        of: seconds,
        target: 0.5,
    },
    Aim {
        experiment: "join",
        ours: "ring",
        theirs: "DataFusion, one process",
        what: "two workers take at most 1.3 times the CPU of one process",
        of: cpu,
        target: 1.3,
    },
    Aim {
        experiment: "join",
        ours: "ring",
        theirs: "distributed over gRPC, lz4",
        what: "at most 0.8 of the time of datafusion-distributed on its gRPC, as it is unless told otherwise",
        of: seconds,
        target: 0.8,
    },
    Aim {
        experiment: "join",
        ours: "ring",
        theirs: "distributed over gRPC",
        what: "... and without its compression",
        of: seconds,
        target: 0.8,
    },
    Aim {
        experiment: "band",
        ours: "ring",
        theirs: "DataFusion, one process",
        what: "a band join takes at most a tenth of DataFusion's nested loops",
        of: seconds,
        target: 0.1,
    },
    Aim {
        experiment: "band",
        ours: "ring",
        theirs: "DuckDB",
        what: "a band join has at least half of DuckDB's speed",
        of: seconds,
        target: 2.0,
    },
];

impl Bench<'_> {
    /// Runs the program, if it is named.
    pub(super) fn engines(&mut self, chapter: &mut Chapter) -> Result<()> {
        let Some(program) = &self.args.engines else {
            return Ok(());
        };
        let out = Command::new(program)
            .args(["--runs", &self.args.repetitions.to_string()])
            .stderr(Stdio::inherit())
            .output()
            .map_err(BenchError::system("starting weft-join-bench"))?;
        if !out.status.success() {
            let why = format!("{} failed", program.display());
            return Err(BenchError::PeerGone(why));
        }
        let text = String::from_utf8_lossy(&out.stdout);
        let mut ways = Vec::new();
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line)
                .map_err(|e| BenchError::PeerGone(format!("weft-join-bench: {e}")))?;
            ways.push(Way::deserialize(&value).map_err(|e| BenchError::PeerGone(e.to_string()))?);
            self.lines.push(value);
        }
        show(&ways, chapter);
        Ok(())
    }
}

fn show(ways: &[Way], chapter: &mut Chapter) {
    let same = |a: &Way, b: &Way| a.experiment == b.experiment && a.size == b.size;
    for group in ways.chunk_by(same) {
        let Some(first) = group.first() else { continue };
        let mut table = Table::new(&["", "s", "CPU s", "time, of the first", "CPU, of the first"]);
        for way in group {
            table.push([
                way.name.clone(),
                number(median(way.seconds.iter().copied())),
                number(median(way.cpu.iter().copied())),
                number(ratio((way, first), seconds)),
                number(ratio((way, first), cpu)),
            ]);
        }
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
        for aim in AIMS.iter().filter(|aim| aim.experiment == first.experiment) {
            let of = |name| group.iter().find(|way| way.name == name);
            if let (Some(ours), Some(theirs)) = (of(aim.ours), of(aim.theirs)) {
                let ratio = ratio((ours, theirs), aim.of);
                let here = format!("{} ({})", number(ratio), first.size);
                chapter.says("aim", aim.what, ratio <= aim.target, here);
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
