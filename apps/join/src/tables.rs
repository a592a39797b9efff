//! The shell's side of loaded tables: `weft join load`, `tables` and `drop`, and the loaded tables of a query.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::{ArrayRef, RecordBatch, StringArray, UInt64Array};
use datafusion::arrow::error::ArrowError;
use datafusion::common::TableReference;
use datafusion::sql::parser::DFParser;
use datafusion::sql::resolve::resolve_table_references;
use weft_roundabout::{Next, Own};

use crate::batches::{Cut, Whole};
use crate::sql::{STACK, check_depth};
use crate::talk::{
    GO_ON, Load, LoadId, Loaded, MIXED, ORDER, OUTCOME, Order, Outcome, PROGRESS, Part, REPORTED,
    Report, Table, VERSION, What,
};
use crate::visit::{Meeting, Trouble, Visited, distinct, door_for, listeners, random};

/// Bytes of a worker's report, at most.
const LONGEST: usize = 64 << 20;

/// A table to be loaded.
pub struct Wanted {
    /// The workers, in the order of the ring and of the parts.
    pub workers: Vec<SocketAddr>,
    /// The table and its files.
    pub table: Table,
    /// The column whose hash says in which part a row is.
    pub by: Option<String>,
    /// Bytes of an element of the ring.
    pub element: usize,
    /// The time within which workers must answer a connection.
    pub patience: Duration,
}

/// The results of one visit at each worker, which run at once.
fn each<T: Send>(
    workers: &[SocketAddr],
    patience: Duration,
    visit: impl Fn(&Visited<'_>) -> Result<T, Trouble> + Sync,
) -> Result<Vec<Result<T, Trouble>>, Trouble> {
    if workers.is_empty() {
        return Err(Trouble::Query("no workers".into()));
    }
    distinct(workers)?;
    let listeners = listeners(workers).map_err(|e| Trouble::Query(e.to_string()))?;
    let (visit, listeners) = (&visit, &listeners);
    Ok(thread::scope(|scope| {
        let visits = workers.iter().enumerate().map(|(me, &worker)| {
            scope.spawn(move || {
                // There is a listener for each family of the workers.
                let Some(listener) = door_for(listeners, worker) else {
                    let why = format!("no listener for the family of {worker}");
                    return Err(Trouble::Query(why));
                };
                visit(&Visited {
                    me,
                    worker,
                    listener,
                    patience,
                })
            })
        });
        let visits: Vec<_> = visits.collect();
        let joined = visits.into_iter().map(|visit| visit.join());
        let panicked = || Err(Trouble::Query("a thread panicked".into()));
        joined
            .map(|done| done.unwrap_or_else(|_| panicked()))
            .collect()
    }))
}

/// Gives an order to a worker that has been reached. After each report of a load, `goes_on` says whether it does.
fn order(
    visited: &Visited<'_>,
    mut node: weft_roundabout::Node,
    what: What,
    mut goes_on: impl FnMut() -> bool,
    mut progress: impl FnMut(Outcome),
) -> Result<Report, Trouble> {
    let peer = |e| visited.gone(e);
    let loads = matches!(what, What::Load(_));
    let order = Order {
        version: VERSION,
        what,
    };
    let text = serde_json::to_vec(&order).map_err(|e| Trouble::Query(e.to_string()))?;
    let mut text = Some(Cut::new(text, [ORDER, 0, 0, 0]));
    let mut whole = Whole::up_to(LONGEST);
    let (mut report, mut outcome) = (None, None);
    // The reports of a load have answers.
    let mut then = if loads { Own::Later } else { Own::Never };
    loop {
        let own = if text.is_some() { Own::Now } else { then };
        match node.next_with(own).map_err(peer)? {
            Next::Room(room) => match &mut text {
                Some(cut) => {
                    if !cut.fill(room).map_err(peer)? {
                        text = None;
                    }
                }
                None => {
                    drop(room.commit(0, 0, [GO_ON, 0, 0, 0]).map_err(peer)?);
                    then = Own::Later;
                }
            },
            Next::Element(element) if element.origin() == 1 => {
                let word = element.user()[0];
                let bytes = whole.take(&element).map_err(|e| visited.foreign(&e))?;
                drop(element);
                let Some(bytes) = bytes else { continue };
                let said = |e: serde_json::Error| visited.foreign(&e);
                match word {
                    PROGRESS => progress(serde_json::from_slice(&bytes).map_err(said)?),
                    REPORTED => {
                        report = Some(serde_json::from_slice(&bytes).map_err(said)?);
                        if loads {
                            if !goes_on() {
                                node.give_up("another worker cannot load its part");
                                return report.ok_or_else(|| visited.foreign(&"no report"));
                            }
                            then = Own::Now;
                        }
                    }
                    OUTCOME => {
                        let said: Outcome = serde_json::from_slice(&bytes).map_err(said)?;
                        outcome = Some(said);
                        then = Own::Never;
                    }
                    _ => return Err(visited.foreign(&"an unknown message")),
                }
            }
            Next::Element(_) | Next::Woken => {}
            Next::End => break,
        }
    }
    node.finish().map_err(peer)?;
    let outcome = outcome.ok_or_else(|| visited.foreign(&"no outcome"))?;
    if let Some(why) = outcome.error {
        return Err(Trouble::Query(if outcome.here {
            format!("node {} ({}): {why}", visited.me, visited.worker)
        } else {
            why
        }));
    }
    report.ok_or_else(|| visited.foreign(&"no report"))
}

/// The first failure of several: one of a worker itself is more precise than what others say of it.
fn first<T>(results: Vec<Result<T, Trouble>>) -> Result<Vec<T>, Trouble> {
    let (mut done, mut trouble) = (Vec::new(), None::<Trouble>);
    for result in results {
        match result {
            Ok(result) => done.push(result),
            Err(Trouble::Query(why)) if why.starts_with("node ") || trouble.is_none() => {
                if !matches!(trouble, Some(Trouble::Peer(_))) {
                    trouble = Some(Trouble::Query(why));
                }
            }
            Err(Trouble::Query(_)) => {}
            Err(peer) => trouble = Some(peer),
        }
    }
    trouble.map_or(Ok(done), Err)
}

/// The tables of each worker, or those with these names and their schemas.
///
/// # Errors
/// If a worker cannot be reached.
pub fn list(
    workers: &[SocketAddr],
    patience: Duration,
    names: Option<&[String]>,
) -> Result<Vec<Report>, Trouble> {
    first(each(workers, patience, |visited| {
        let what = What::List(names.map(<[String]>::to_vec));
        order(visited, visited.visit()?, what, || true, |_| ())
    })?)
}

/// Drops a table on these workers, and returns what each of them had of it.
///
/// # Errors
/// If a worker cannot be reached; the others drop the table all the same.
pub fn drop_table(
    workers: &[SocketAddr],
    patience: Duration,
    name: &str,
    load: Option<LoadId>,
) -> Result<Vec<Option<Part>>, Trouble> {
    let reports = first(each(workers, patience, |visited| {
        let what = What::Drop(name.into(), load);
        order(visited, visited.visit()?, what, || true, |_| ())
    })?)?;
    let parts = reports
        .into_iter()
        .map(|report| report.parts.into_iter().next());
    Ok(parts.collect())
}

/// Loads a table, and returns the part of each worker. All workers have their parts, or none keeps one.
///
/// # Errors
/// If a worker cannot be reached, or cannot load its part.
pub fn load(
    wanted: &Wanted,
    progress: impl Fn(usize, Outcome) + Sync,
) -> Result<Vec<Part>, Trouble> {
    let id = random()?;
    let [reached, ready, read] = [(); 3].map(|()| Meeting::new(wanted.workers.len()));
    let results = each(&wanted.workers, wanted.patience, |visited| {
        let visit = visited.visit();
        let all = reached.meet(visit.is_ok());
        let mut reports = 0;
        let done = visit.and_then(|node| {
            if !all {
                node.give_up("another worker could not be reached");
                return Ok(None);
            }
            let what = What::Load(Load {
                id,
                nodes: wanted.workers.clone(),
                me: visited.me,
                element: wanted.element,
                table: wanted.table.clone(),
                by: wanted.by.clone(),
            });
            let goes_on = || {
                reports += 1;
                match reports {
                    1 => ready.meet(true),
                    2 => read.meet(true),
                    _ => false,
                }
            };
            let report = order(visited, node, what, goes_on, |o| progress(visited.me, o))?;
            Ok(report.parts.into_iter().next())
        });
        if reports < 1 {
            ready.meet(false);
        }
        if reports < 2 {
            read.meet(false);
        }
        done
    })?;
    match first(results) {
        Ok(parts) => {
            let parts: Vec<Part> = parts.into_iter().flatten().collect();
            if parts.len() == wanted.workers.len() {
                return Ok(parts);
            }
            Err(Trouble::Query("a worker reported no part".into()))
        }
        Err(trouble) => {
            // Some may have kept their part before another one failed.
            let _ = drop_table(
                &wanted.workers,
                wanted.patience,
                &wanted.table.name,
                Some(id),
            );
            Err(trouble)
        }
    }
}

/// The tables that a query names without a file. A query that cannot be parsed has none: the workers say what is wrong.
pub fn not_in_files(sql: &str, files: &[Table]) -> Vec<String> {
    if check_depth(sql).is_err() {
        return Vec::new();
    }
    let names = thread::scope(|scope| {
        let parse = thread::Builder::new()
            .name("weft-join-names".into())
            .stack_size(STACK)
            .spawn_scoped(scope, || names(sql));
        parse.ok().and_then(|parsed| parsed.join().ok())
    });
    let in_file = |name: &String| {
        let file = |table: &Table| TableReference::from(table.name.as_str());
        files.iter().any(|table| file(table).table() == name)
    };
    let mut names = names.unwrap_or_default();
    names.retain(|name| !in_file(name));
    names.into_iter().collect()
}

fn names(sql: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for statement in DFParser::parse_sql(sql).into_iter().flatten() {
        let Ok((tables, _)) = resolve_table_references(&statement, true) else {
            continue;
        };
        for table in tables {
            match table {
                TableReference::Bare { table } => names.insert(table.to_string()),
                TableReference::Partial { schema, table } if &*schema == "public" => {
                    names.insert(table.to_string())
                }
                _ => false,
            };
        }
    }
    names
}

/// The loaded tables among these names.
///
/// # Errors
/// If a worker cannot be reached, or a part of a table is missing.
pub fn find(
    workers: &[SocketAddr],
    patience: Duration,
    names: &[String],
) -> Result<Vec<Loaded>, Trouble> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let reports = list(workers, patience, Some(names))?;
    let found = names.iter().filter_map(|name| {
        let of_worker = |report: &Report| report.parts.iter().find(|p| p.name == *name).cloned();
        let parts: Vec<Option<Part>> = reports.iter().map(of_worker).collect();
        whole(name, workers, &parts).transpose()
    });
    found.collect::<Result<_, _>>().map_err(Trouble::Query)
}

/// The table of these parts; `None` if no worker has one.
///
/// # Errors
/// If parts are missing, or are of different loads.
pub fn whole(
    name: &str,
    workers: &[SocketAddr],
    parts: &[Option<Part>],
) -> Result<Option<Loaded>, String> {
    let Some(one) = parts.iter().flatten().next() else {
        return Ok(None);
    };
    let again = "load it again (weft join load)";
    if parts.iter().flatten().any(|part| part.load != one.load) {
        return Err(format!("table {name}: the workers have {MIXED}; {again}"));
    }
    let numbers: BTreeSet<u32> = parts.iter().flatten().map(|part| part.part).collect();
    if numbers.len() < parts.iter().flatten().count() {
        return Err(format!(
            "table {name}: two workers have the same part; {again}"
        ));
    }
    let missing = one.parts as usize - numbers.len().min(one.parts as usize);
    if missing > 0 {
        let mut why = format!("table {name}: ");
        let without = workers.iter().zip(parts).filter(|(_, part)| part.is_none());
        let without: Vec<_> = without.map(|(worker, _)| worker.to_string()).collect();
        match without.as_slice() {
            [] => {
                let _ = write!(
                    why,
                    "it has {} parts, and the workers of -w only {}; name all workers that it was loaded on, or {again}",
                    one.parts,
                    numbers.len()
                );
            }
            [worker] => {
                let _ = write!(why, "worker {worker} has no part of it; {again}");
            }
            workers => {
                let _ = write!(
                    why,
                    "workers {} have no part of it; {again}",
                    workers.join(", ")
                );
            }
        }
        return Err(why);
    }
    Ok(Some(Loaded {
        name: name.into(),
        load: one.load,
        layout: parts.iter().map(|p| p.as_ref().map(|p| p.part)).collect(),
        by: one.by.clone(),
        rows: parts
            .iter()
            .flatten()
            .map(|p| p.rows)
            .fold(0, u64::saturating_add),
        schema: one.schema.clone(),
    }))
}

/// The tables in reports, a row for each worker that has or should have a part, and what is wrong with them.
///
/// # Errors
/// If the reports have too many rows for a batch.
pub fn shown(
    workers: &[SocketAddr],
    reports: &[Report],
) -> Result<(RecordBatch, Vec<String>), ArrowError> {
    let names: BTreeSet<&str> = reports
        .iter()
        .flat_map(|report| report.parts.iter().map(|part| part.name.as_str()))
        .collect();
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for name in names {
        let of_worker = |report: &Report| report.parts.iter().find(|p| p.name == *name).cloned();
        let parts: Vec<Option<Part>> = reports.iter().map(of_worker).collect();
        let is_whole = match whole(name, workers, &parts) {
            Ok(_) => true,
            Err(why) => {
                wrong.push(why);
                false
            }
        };
        let of = workers.iter().zip(parts);
        let there = of.filter(|(_, part)| part.is_some() || !is_whole);
        rows.extend(there.map(|(worker, part)| (name, worker.to_string(), part)));
    }
    let number = |of: fn(&Part) -> u64| -> ArrayRef {
        let of = |row: &(&str, String, Option<Part>)| row.2.as_ref().map(of);
        Arc::new(UInt64Array::from_iter(rows.iter().map(of)))
    };
    let by = |row: &(&str, String, Option<Part>)| row.2.as_ref().and_then(|part| part.by.clone());
    let names = StringArray::from_iter_values(rows.iter().map(|row| row.0));
    let addresses = StringArray::from_iter_values(rows.iter().map(|row| row.1.as_str()));
    let by = StringArray::from_iter(rows.iter().map(by));
    let columns: [(&str, ArrayRef); 8] = [
        ("table", Arc::new(names)),
        ("by", Arc::new(by)),
        ("worker", Arc::new(addresses)),
        ("part", number(|part| part.part.into())),
        ("parts", number(|part| part.parts.into())),
        ("rows", number(|part| part.rows)),
        ("bytes", number(|part| part.bytes)),
        ("seconds_ago", number(|part| part.age)),
    ];
    Ok((
        RecordBatch::try_from_iter_with_nullable(columns.map(|(n, c)| (n, c, true)))?,
        wrong,
    ))
}

/// The name that a planner did not find.
pub fn is_unknown<'a>(why: &str, names: &'a [String]) -> Option<&'a String> {
    let unknown =
        |name: &&String| why.contains(&format!("table 'datafusion.public.{name}' not found"));
    names.iter().find(unknown)
}

/// A failure of a query, with what to do if it is for a table that is neither in a file nor loaded.
pub fn explain(why: String, names: &[String]) -> String {
    match is_unknown(&why, names) {
        Some(name) => format!(
            "table {name}: no --table names its file, and no worker of -w has a part of it; if it was loaded, load it again (weft join load)"
        ),
        None => why,
    }
}
