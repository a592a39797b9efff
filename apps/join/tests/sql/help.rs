//! Workers in threads, and what their rows are compared with.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::error::Result;
use datafusion::prelude::{CsvReadOptions, ParquetReadOptions, SessionContext};
use weft_join::shell::Question;
use weft_join::sql::csv_schema;
use weft_join::talk::Table;
use weft_join::worker::{Settings, Worker};

/// Workers in threads of this process.
pub struct Workers {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
    pub addresses: Vec<SocketAddr>,
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(count: usize) -> Self {
        Self::with_memory(count, None)
    }

    /// Starts `count` workers with a memory limit for each query.
    pub fn with_memory(count: usize, memory: Option<usize>) -> Self {
        Self::open(&vec!["127.0.0.1:0"; count], memory).unwrap()
    }

    /// At these addresses; `None` if one cannot be had.
    pub fn at(addresses: &[&str]) -> Option<Self> {
        Self::open(addresses, None).ok()
    }

    /// Starts `count` workers, each with the settings that the function returns for its address.
    pub fn with(count: usize, settings: impl Fn(SocketAddr) -> Settings) -> Self {
        Self::serving((0..count).map(|_| settings("127.0.0.1:0".parse().unwrap()))).unwrap()
    }

    /// Starts workers with so many bytes each for loaded tables.
    pub fn with_tables(bytes: &[usize]) -> Self {
        Self::serving(bytes.iter().map(|&tables| Settings {
            bind: "127.0.0.1:0".parse().unwrap(),
            dir: None,
            memory: None,
            tables,
        }))
        .unwrap()
    }

    fn open(binds: &[&str], memory: Option<usize>) -> Result<Self> {
        Self::serving(binds.iter().map(|bind| Settings {
            bind: bind.parse().unwrap(),
            dir: None,
            memory,
            tables: 64 << 20,
        }))
    }

    fn serving(settings: impl Iterator<Item = Settings>) -> Result<Self> {
        let open = settings.map(Worker::open).collect::<Result<Vec<_>>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let addresses = open.iter().map(Worker::local_addr).collect();
        let serve = |worker: Worker| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || worker.serve(|| stop.load(Ordering::SeqCst)))
        };
        let threads = open.into_iter().map(serve).collect();
        Ok(Self {
            stop,
            threads,
            addresses,
        })
    }

    /// A query for all of them, with small elements.
    pub fn question(&self, tables: &[Table], sql: &str) -> Question {
        Question {
            workers: self.addresses.clone(),
            tables: tables.to_vec(),
            sql: sql.into(),
            element: 4096,
            patience: Duration::from_mins(1),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The rows as text.
pub fn rows_in_order(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("NULL");
    let mut rows = Vec::new();
    for batch in batches {
        let columns: Vec<_> = batch
            .columns()
            .iter()
            .map(|column| ArrayFormatter::try_new(column.as_ref(), &options).unwrap())
            .collect();
        for row in 0..batch.num_rows() {
            let cells: Vec<_> = columns.iter().map(|c| c.value(row).to_string()).collect();
            rows.push(cells.join("|"));
        }
    }
    rows
}

/// The rows as text, sorted.
pub fn rows(batches: &[RecordBatch]) -> Vec<String> {
    sorted(rows_in_order(batches))
}

pub fn sorted(mut rows: Vec<String>) -> Vec<String> {
    rows.sort();
    rows
}

/// Runs a query in one process, without weft.
pub fn run_alone(tables: &[Table], sql: &str) -> Result<Vec<RecordBatch>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let context = SessionContext::new();
        for table in tables {
            if table.file.ends_with(".csv") {
                // DataFusion's own inference refuses some files: see `csv_schema`.
                let schema = csv_schema(Path::new(&table.file));
                let mut options = CsvReadOptions::new();
                options.schema = schema.as_ref();
                context
                    .register_csv(&table.name, &table.file, options)
                    .await?;
            } else {
                let options = ParquetReadOptions::new();
                context
                    .register_parquet(&table.name, &table.file, options)
                    .await?;
            }
        }
        context.sql(sql).await?.collect().await
    })
}

/// The rows of one process, sorted.
pub fn alone(tables: &[Table], sql: &str) -> Vec<String> {
    sorted(alone_in_order(tables, sql))
}

/// The rows of one process.
pub fn alone_in_order(tables: &[Table], sql: &str) -> Vec<String> {
    match run_alone(tables, sql) {
        Ok(batches) => rows_in_order(&batches),
        Err(error) => panic!("{sql}: {error}"),
    }
}

/// The Python that has DuckDB, if any.
pub fn duckdb() -> Option<String> {
    let python = std::env::var("WEFT_DUCKDB_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python)
        .args(["-c", "import duckdb"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        println!(
            "skipped: no Python with DuckDB (pip install duckdb; WEFT_DUCKDB_PYTHON names the interpreter)"
        );
    }
    found.then_some(python)
}

/// DuckDB's answer to each query over these Parquet files: rows as text, in its order.
pub fn duckdb_says(
    python: &str,
    folder: &Path,
    tables: &[Table],
    queries: &[String],
) -> Vec<Vec<String>> {
    let mut script = String::from("import duckdb\nc = duckdb.connect()\n");
    for table in tables {
        script.push_str(&format!(
            "c.execute(\"CREATE TABLE {} AS SELECT * FROM read_parquet('{}')\")\n",
            table.name, table.file
        ));
    }
    script.push_str("def show(v): return 'NULL' if v is None else str(v)\n");
    for sql in queries {
        script.push_str(&format!(
            "for row in c.execute(\"\"\"{sql}\"\"\").fetchall(): print('|'.join(show(v) for v in row))\nprint('--')\n"
        ));
    }
    // Ten thousand queries are too much for an argument.
    let file = folder.join("queries.py");
    std::fs::write(&file, script).unwrap();
    let out = Command::new(python).arg(&file).output().unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let text = String::from_utf8(out.stdout).unwrap();
    let answers = text.split_terminator("--\n");
    let answers: Vec<Vec<String>> = answers
        .map(|rows| rows.lines().map(str::to_owned).collect())
        .collect();
    assert_eq!(answers.len(), queries.len());
    answers
}
