//! Joins by a range of keys on two workers, compared with DataFusion's nested loops in one process, and with DuckDB where a Python has
//! it.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use datafusion::arrow::array::{Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::error::{DataFusionError, Result};
use weft_join::talk::Table;

use crate::compare::{Way, compare};
use crate::joins::{Setting, write};

/// About eleven rows of `b` for each of `a`.
const SQL: &str =
    "SELECT count(*), sum(a.v), max(b.v) FROM a JOIN b ON a.k BETWEEN b.k - 5 AND b.k + 5";
/// Rows of a batch that is written.
const BATCH: u64 = 8192;

/// Keys in no order, each once.
fn table(folder: &Path, name: &str, rows: u64) -> Result<Table> {
    let fields = ["k", "v"].map(|name| Field::new(name, DataType::Int64, false));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    // A prime that does not divide the number of rows: all keys are different.
    let key = |row: u64| (row * 7_368_787 % rows) as i64;
    let batches = (0..rows.div_ceil(BATCH)).map(|batch| {
        let rows = batch * BATCH..rows.min((batch + 1) * BATCH);
        let keys = Int64Array::from_iter_values(rows.clone().map(key));
        let values = Int64Array::from_iter_values(rows.map(|row| (row % 1000) as i64));
        RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(keys), Arc::new(values)])
    });
    write(folder, name, batches)
}

/// A Python with DuckDB that answers queries.
struct Duck {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

const SCRIPT: &str = "
import duckdb, sys
c = duckdb.connect()
c.execute('SET threads = 2')
print('ready', flush=True)
for line in sys.stdin:
    print(' | '.join(str(v) for v in c.execute(line).fetchone()), flush=True)
";

impl Duck {
    /// `None` without DuckDB.
    fn start() -> Result<Option<Self>> {
        let python = std::env::var("WEFT_DUCKDB_PYTHON").unwrap_or_else(|_| "python3".into());
        let started = Command::new(python)
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut child) = started else {
            return Ok(None);
        };
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Ok(None);
        };
        let from = BufReader::new(from);
        let mut duck = Self { child, to, from };
        Ok((duck.line()? == "ready").then_some(duck))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn ask(&mut self, sql: &str) -> Result<String> {
        writeln!(self.to, "{sql}")?;
        self.line()
    }
}

impl Drop for Duck {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn measure(rows: u64, runs: usize) -> Result<()> {
    if rows.is_multiple_of(7_368_787) {
        let why = "that many rows would have keys that are equal";
        return Err(DataFusionError::Execution(why.into()));
    }
    let duck = Duck::start()?.map(RefCell::new);
    if duck.is_none() {
        eprintln!("no DuckDB (WEFT_DUCKDB_PYTHON names a Python that has it): left out");
    }
    for (rows, nested) in [(rows / 25, true), (rows, false)] {
        let folder = tempfile::tempdir()?;
        let tables = vec![
            table(folder.path(), "a", rows)?,
            table(folder.path(), "b", rows)?,
        ];
        let mut there = SQL.to_owned();
        for table in &tables {
            let file = format!(" read_parquet('{}') {} ", table.file, table.name);
            there = there.replace(&format!(" {} ", table.name), &file);
        }
        let setting = Setting::new(tables, SQL)?;
        let mut pids: Vec<u32> = setting.weft.iter().map(|worker| worker.id()).collect();
        let mut ways = vec![Way::new("ring", || setting.ring())];
        if nested {
            ways.push(Way::new("DataFusion, one process", || setting.alone()));
        }
        if let Some(duck) = &duck {
            pids.push(duck.borrow().child.id());
            ways.push(Way::new("DuckDB", || duck.borrow_mut().ask(&there)));
        }
        compare("band", &format!("{rows} rows"), &pids, runs, ways)?;
    }
    Ok(())
}
