//! The program behind `weft join`.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use datafusion::arrow::array::RecordBatch;
use weft_join::engine;
use weft_join::print::{self, Printer};
use weft_join::shell::{Event, Question, Trouble, stream};
use weft_join::tables;
use weft_join::talk::{Outcome, PORT, Table, table_name};
use weft_join::worker::{Settings, Worker};
use weft_service::endpoint::{Endpoint, parse_bind};

/// The time within which a worker must answer a connection.
const PATIENCE: Duration = Duration::from_secs(30);
const LONG: &str = "\
Each worker holds a part of every table. A join keeps the part of its build side where it is, and the rows of its probe side
go once round the ring of the workers, in shared memory between workers of one host and user, else over TCP. The workers must
see the same files under the same paths.

`load` puts a table into the workers' memory, where it stays between queries; a query names it like a table of --table.

A worker that is reached from other hosts needs keys: WEFT_TLS=on, WEFT_TLS_KEY and WEFT_TLS_PEERS, on all workers and
for the shell (`weft help` describes them). Workers connect back to the shell.";
const EXITS: &str = "\
Exit status:
  0  success
  1  failure of the query or of the load (a message names it)
  2  wrong usage of the command line
  3  a worker could not be reached or ended the connection";

/// SQL joins on a ring of workers
#[derive(Parser)]
#[command(name = "weft-join", bin_name = "weft join", version, long_about = LONG, after_long_help = EXITS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a part of queries for others
    Worker(WorkerArgs),
    /// Run a query on workers and print its rows
    Sql(SqlArgs),
    /// Put a table into the memory of workers
    Load(LoadArgs),
    /// Show the loaded tables of workers
    Tables(TablesArgs),
    /// Remove a loaded table from the memory of workers
    Drop(DropArgs),
}

#[derive(clap::Args)]
struct WorkerArgs {
    /// Where to listen [default: 127.0.0.1:7478]
    #[arg(long, value_name = "ADDR:PORT", value_parser = |text: &str| parse_bind(text, PORT))]
    bind: Option<SocketAddr>,
    /// Read files below this folder alone
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Memory of one query in MiB; beyond it sorts and aggregates spill to disk, and joins fail [default: no limit]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    memory: Option<u32>,
    /// Memory for loaded tables in MiB, all together; without it the worker loads none
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    tables: Option<u32>,
}

#[derive(clap::Args)]
struct Ring {
    /// The workers, in the order of the ring
    #[arg(
        short,
        long,
        value_name = "HOST:PORT",
        value_delimiter = ',',
        required = true
    )]
    workers: Vec<String>,
}

impl Ring {
    fn resolve(&self) -> Result<Vec<SocketAddr>, Trouble> {
        self.workers.iter().map(|worker| resolve(worker)).collect()
    }
}

#[derive(clap::Args)]
struct LoadArgs {
    #[command(flatten)]
    ring: Ring,
    /// The table: a Parquet or CSV file (by its extension), or a folder of Parquet files, under the path that workers see
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_loaded)]
    table: Table,
    /// Put rows with the same value of this column on one worker: joins by it with a table that is loaded by its key move no
    /// row of either table [default: workers get rows in turn]
    #[arg(long, value_name = "COLUMN")]
    by: Option<String>,
    /// Size of the ring's elements in KiB
    #[arg(long, value_name = "KIB", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(4..=262_144))]
    element: u32,
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct TablesArgs {
    #[command(flatten)]
    ring: Ring,
    /// How tables are printed
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Say nothing of the workers' memory
    #[arg(short, long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct DropArgs {
    #[command(flatten)]
    ring: Ring,
    /// The table
    #[arg(value_name = "NAME", value_parser = table_name)]
    name: String,
}

#[derive(clap::Args)]
struct SqlArgs {
    #[command(flatten)]
    ring: Ring,
    /// A table: a Parquet or CSV file (by its extension), or a folder of Parquet files, under the path that workers see. Other
    /// tables of the query are loaded ones
    #[arg(long = "table", value_name = "NAME=FILE", value_parser = parse_table)]
    tables: Vec<Table>,
    /// How rows are printed
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Size of the ring's elements in KiB
    #[arg(long, value_name = "KIB", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(4..=262_144))]
    element: u32,
    /// Who plans and runs the query
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The query; EXPLAIN shows what each node does
    sql: String,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Engine {
    /// Data Roundabout: relations that rotate through the ring of workers
    #[default]
    Ring,
    /// datafusion-distributed: batches go to where the hash of their keys says, and the shell has the last step; it needs the files too
    Distributed,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    #[default]
    Table,
    Csv,
    Json,
}

impl From<Format> for print::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Table => Self::Table,
            Format::Csv => Self::Csv,
            Format::Json => Self::Json,
        }
    }
}

fn parse_table(text: &str) -> Result<Table, String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok(Table {
            name: name.into(),
            file: std::path::absolute(file)
                .map_err(|e| e.to_string())?
                .to_string_lossy()
                .into_owned(),
        }),
        _ => Err("write NAME=FILE".into()),
    }
}

fn parse_loaded(text: &str) -> Result<Table, String> {
    let table = parse_table(text)?;
    Ok(Table {
        name: table_name(&table.name)?,
        ..table
    })
}

fn resolve(text: &str) -> Result<SocketAddr, Trouble> {
    let worker = Endpoint::parse(text, PORT).map_err(|e| Trouble::Peer(e.to_string()))?;
    let found = worker.resolve();
    let found = found.map_err(|e| Trouble::Peer(format!("cannot resolve `{text}`: {e}")))?;
    Ok(found[0])
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match weft_sys::settings::LOG.parse() {
        Ok(level) => level,
        Err(wrong) => {
            eprintln!("weft join: {wrong}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_max_level(level.unwrap_or(tracing_subscriber::filter::LevelFilter::WARN))
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    let (trouble, code) = match cli.command {
        Command::Worker(args) => match worker(args) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(e) => (e.to_string(), 1),
        },
        Command::Sql(args) => by_cause(sql(&args)),
        Command::Load(args) => by_cause(load(&args)),
        Command::Tables(args) => by_cause(show(&args)),
        Command::Drop(args) => by_cause(drop_table(&args)),
    };
    if code == 0 {
        return ExitCode::SUCCESS;
    }
    // It may be in a worker's words.
    let trouble = weft_service::text::printable_lines(trouble.as_bytes());
    eprintln!("weft join: {trouble}");
    ExitCode::from(code)
}

fn by_cause(done: Result<(), Trouble>) -> (String, u8) {
    match done {
        Ok(()) => (String::new(), 0),
        Err(Trouble::Peer(why)) => (why, 3),
        Err(Trouble::Query(why)) => (why, 1),
    }
}

fn worker(args: WorkerArgs) -> datafusion::error::Result<()> {
    let bind = args.bind.unwrap_or((Ipv4Addr::LOCALHOST, PORT).into());
    let worker = Worker::open(Settings {
        bind,
        dir: args.dir,
        memory: args.memory.map(|mib| mib as usize * (1 << 20)),
        tables: args.tables.map_or(0, |mib| mib as usize * (1 << 20)),
    })?;
    let mut out = std::io::stdout();
    let _ = writeln!(out, "working on {}", worker.local_addr());
    let _ = out.flush();
    worker.serve(|| false);
    Ok(())
}

fn sql(args: &SqlArgs) -> Result<(), Trouble> {
    let question = Question {
        workers: args.ring.resolve()?,
        tables: args.tables.clone(),
        sql: args.sql.clone(),
        element: args.element as usize * 1024,
        patience: PATIENCE,
    };
    let mut line = ProgressLine::new(args.quiet, question.workers.len());
    let out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut printer = Printer::new(args.format.into(), out);
    let mut unread = false;
    let mut print = |batch: &RecordBatch, line: &mut ProgressLine| {
        line.rows += batch.num_rows();
        line.clear();
        printer.batch(batch).map_err(|e| {
            unread = e.kind() == std::io::ErrorKind::BrokenPipe;
            Trouble::Query(e.to_string())
        })
    };
    let asked = match args.engine {
        Engine::Ring => stream(&question, |event| match event {
            Event::Progress(worker, progress) => {
                line.received[worker] = progress.received;
                line.draw();
                Ok(())
            }
            Event::Rows(batch) => print(&batch, &mut line),
        }),
        Engine::Distributed => {
            let asked = engine::Asked {
                question: &question,
                split: None,
                partitions: std::thread::available_parallelism().map_or(2, NonZero::get),
            };
            engine::stream(&asked, |batch| print(&batch, &mut line)).map(|()| Vec::new())
        }
    };
    line.clear();
    if unread {
        // The reader of our output has closed it, as `| head` does.
        return Ok(());
    }
    let outcomes = asked?;
    match printer.finish() {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
        done => done.map_err(|e| Trouble::Query(e.to_string()))?,
    }
    if !args.quiet && args.engine == Engine::Ring {
        received(&outcomes, &question, line.began.elapsed());
    }
    Ok(())
}

fn load(args: &LoadArgs) -> Result<(), Trouble> {
    let wanted = tables::Wanted {
        workers: args.ring.resolve()?,
        table: args.table.clone(),
        by: args.by.clone(),
        element: args.element as usize * 1024,
        patience: PATIENCE,
    };
    let line = Mutex::new(ProgressLine::new(args.quiet, wanted.workers.len()));
    let lock = || line.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = tables::load(&wanted, |worker, progress| {
        let mut line = lock();
        line.received[worker] = progress.received;
        line.draw();
    });
    lock().clear();
    let parts = loaded?;
    if !args.quiet {
        let took = lock().began.elapsed().as_secs_f64();
        let (name, count) = (&wanted.table.name, parts.len());
        let rows: u64 = parts.iter().map(|part| part.rows).sum();
        let mb = parts.iter().map(|part| part.bytes).sum::<u64>() as f64 / 1e6;
        eprintln!("{name}: {rows} rows, {mb:.1} MB, in {count} parts, {took:.3} s");
    }
    Ok(())
}

fn show(args: &TablesArgs) -> Result<(), Trouble> {
    let workers = args.ring.resolve()?;
    let reports = tables::list(&workers, PATIENCE, None)?;
    let (batch, wrong) =
        tables::shown(&workers, &reports).map_err(|e| Trouble::Query(e.to_string()))?;
    let out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut printer = Printer::new(args.format.into(), out);
    let printed = printer.batch(&batch).and_then(|()| printer.finish());
    match printed {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
        done => done.map_err(|e| Trouble::Query(e.to_string()))?,
    }
    if !args.quiet {
        for (worker, report) in workers.iter().zip(&reports) {
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let (used, limit) = (mib(report.used), mib(report.limit));
            eprintln!("{worker:<22} {used:>10.1} of {limit:.1} MiB");
        }
    }
    for why in wrong {
        eprintln!(
            "weft join: {}",
            weft_service::text::printable_lines(why.as_bytes())
        );
    }
    Ok(())
}

fn drop_table(args: &DropArgs) -> Result<(), Trouble> {
    let workers = args.ring.resolve()?;
    let dropped = tables::drop_table(&workers, PATIENCE, &args.name, None)?;
    if dropped.iter().all(Option::is_none) {
        let name = &args.name;
        let why = format!("table {name}: no worker of -w has a part of it");
        return Err(Trouble::Query(why));
    }
    Ok(())
}

/// The progress line on a terminal while a query runs.
struct ProgressLine {
    shown: bool,
    began: Instant,
    rows: usize,
    /// Bytes, by worker.
    received: Vec<u64>,
    on_screen: bool,
}

impl ProgressLine {
    fn new(quiet: bool, workers: usize) -> Self {
        Self {
            shown: !quiet && std::io::stderr().is_terminal(),
            began: Instant::now(),
            rows: 0,
            received: vec![0; workers],
            on_screen: false,
        }
    }

    fn draw(&mut self) {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        if !self.shown {
            return;
        }
        let most = self.received.iter().max().copied().unwrap_or(0).max(1);
        let bar = |&bytes: &u64| BARS[(u128::from(bytes) * 7 / u128::from(most)) as usize];
        let bars: String = self.received.iter().map(bar).collect();
        let sum: u64 = self.received.iter().sum();
        let (time, mb) = (self.began.elapsed().as_secs_f64(), sum as f64 / 1e6);
        let rows = self.rows;
        eprint!("\r\x1b[K{time:.1} s, {rows} rows, {mb:.1} MB round the ring {bars}");
        self.on_screen = true;
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.on_screen) {
            eprint!("\r\x1b[K");
        }
    }
}

/// The amount that each worker moved, as bars, on stderr.
fn received(outcomes: &[Outcome], question: &Question, took: Duration) {
    const WIDTH: u64 = 40;
    let most = outcomes.iter().map(|o| o.received).max();
    let most = most.unwrap_or(0).max(1);
    eprintln!(
        "{:.3} s; received from the ring, and time in which an exchange waited for it:",
        took.as_secs_f64()
    );
    for (outcome, addr) in outcomes.iter().zip(&question.workers) {
        let bar = "#"
            .repeat((u128::from(outcome.received) * u128::from(WIDTH) / u128::from(most)) as usize);
        let mb = outcome.received as f64 / 1e6;
        eprintln!("  {addr:<22} {mb:>10.1} MB {:>8.2} s {bar}", outcome.waited);
    }
}
