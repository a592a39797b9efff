//! Several ways to one answer, in turn: their seconds, and the CPU time of all participating processes.

use std::time::Instant;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::display::array_value_to_string;
use datafusion::error::{DataFusionError, Result};
use serde_json::json;

/// One way: its name, and a function that returns its answer as text.
pub struct Way<'a> {
    pub name: &'static str,
    pub ask: Box<dyn FnMut() -> Result<String> + 'a>,
}

impl<'a> Way<'a> {
    pub fn new(name: &'static str, ask: impl FnMut() -> Result<String> + 'a) -> Self {
        let ask = Box::new(ask);
        Self { name, ask }
    }
}

/// Seconds of CPU of a process.
fn cpu(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Prints one line for each way. `pids` are the other processes that take part; `size` is the scale of the experiment.
pub fn compare(
    experiment: &str,
    size: &str,
    pids: &[u32],
    runs: usize,
    ways: Vec<Way<'_>>,
) -> Result<()> {
    let used = || cpu(std::process::id()) + pids.iter().map(|&pid| cpu(pid)).sum::<f64>();
    let mut ways: Vec<_> = ways.into_iter().map(|way| (way, Vec::new())).collect();
    let mut expected = None;
    for run in 0..=runs {
        for (way, seen) in &mut ways {
            let (before, began) = (used(), Instant::now());
            let got = (way.ask)()?;
            let (seconds, cpu) = (began.elapsed().as_secs_f64(), used() - before);
            let expected = expected.get_or_insert_with(|| got.clone());
            if got != *expected {
                let why = format!("{experiment}, {}: {got} in place of {expected}", way.name);
                return Err(DataFusionError::Execution(why));
            }
            // The first is not counted.
            if run > 0 {
                seen.push((seconds, cpu));
            }
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg")?;
    for (way, seen) in &ways {
        let (seconds, cpu): (Vec<f64>, Vec<f64>) = seen.iter().copied().unzip();
        let line = json!({"bench": "join", "experiment": experiment, "size": size, "way": way.name, "seconds": seconds, "cpu": cpu,
            "load": load.trim()});
        println!("{line}");
    }
    Ok(())
}

/// All cells of an answer.
pub fn text(batches: &[RecordBatch]) -> Result<String> {
    let mut cells = Vec::new();
    for batch in batches {
        for row in 0..batch.num_rows() {
            for column in batch.columns() {
                cells.push(array_value_to_string(column, row)?);
            }
        }
    }
    Ok(cells.join(" | "))
}
