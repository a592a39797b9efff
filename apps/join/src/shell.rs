//! `weft join sql`: asks the workers, and passes on the rows of node 0 as they arrive.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::error::DataFusionError;
use weft_roundabout::Next;

use crate::batches::Whole;
use crate::tables;
use crate::talk::{Ask, Loaded, MIXED, OUTCOME, Outcome, PROGRESS, STALE, Table, VERSION};
use crate::visit::{Meeting, Visited, distinct, random};

pub use crate::visit::{Trouble, door_for, listeners};

/// How often a query is asked whose loaded tables are replaced meanwhile.
const TRIES: usize = 3;
/// The time between two of them: another shell tells its workers to keep what they have loaded.
const PAUSE: Duration = Duration::from_millis(200);

/// A query for a number of workers.
pub struct Question {
    /// The workers, in the order of the ring.
    pub workers: Vec<SocketAddr>,
    /// The tables of the query that are read from files. Others are loaded tables of the workers.
    pub tables: Vec<Table>,
    /// The query.
    pub sql: String,
    /// Bytes of an element of the ring.
    pub element: usize,
    /// The time within which workers must answer a connection.
    pub patience: Duration,
}

/// The answer to a query.
pub struct Answer {
    /// The rows.
    pub batches: Vec<RecordBatch>,
    /// The outcome of each worker.
    pub outcomes: Vec<Outcome>,
}

/// An event of a running query.
pub enum Event {
    /// Rows, in the order of the answer.
    Rows(RecordBatch),
    /// The progress of the worker at this position.
    Progress(usize, Outcome),
}

enum Told {
    Event(Event),
    Done(usize, Result<Outcome, Trouble>),
}

/// Runs the query, and waits for all rows; `progress` is called with their number as they arrive.
pub fn ask(question: &Question, mut progress: impl FnMut(usize)) -> Result<Answer, Trouble> {
    let mut batches = Vec::new();
    let mut count = 0;
    let outcomes = stream(question, |event| {
        if let Event::Rows(batch) = event {
            count += batch.num_rows();
            progress(count);
            batches.push(batch);
        }
        Ok(())
    })?;
    Ok(Answer { batches, outcomes })
}

/// Runs the query, and passes its events to `hear`, whose error ends the query on all workers. A slow `hear` delays the query; few rows
/// are buffered.
pub fn stream(
    question: &Question,
    mut hear: impl FnMut(Event) -> Result<(), Trouble>,
) -> Result<Vec<Outcome>, Trouble> {
    if question.workers.is_empty() {
        return Err(Trouble::Query("no workers".into()));
    }
    distinct(&question.workers)?;
    let missing = tables::not_in_files(&question.sql, &question.tables);
    let mut heard = false;
    for _ in 1..TRIES {
        let done = once(question, &missing, &mut |event| {
            heard |= matches!(event, Event::Rows(_));
            hear(event)
        });
        match done {
            // A load was replaced between our look at it and the query: the next look finds the new one.
            Err(Trouble::Query(why)) if !heard && (why.contains(STALE) || why.contains(MIXED)) => {
                thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
    once(question, &missing, &mut hear)
}

/// Finds the loaded tables of the query, and runs it.
fn once(
    question: &Question,
    missing: &[String],
    hear: &mut dyn FnMut(Event) -> Result<(), Trouble>,
) -> Result<Vec<Outcome>, Trouble> {
    let loaded = tables::find(&question.workers, question.patience, missing)?;
    let listeners = listeners(&question.workers).map_err(|e| Trouble::Query(e.to_string()))?;
    let id = random()?;
    let (told, events) = mpsc::sync_channel(16);
    // No worker gets the question before all of them have been reached: they would wait for the missing one.
    let reached = Meeting::new(question.workers.len());
    thread::scope(|scope| {
        for me in 0..question.workers.len() {
            let (told, reached, loaded) = (told.clone(), &reached, &loaded);
            let listener = door_for(&listeners, question.workers[me]);
            scope.spawn(move || {
                let tell = |event| told.send(Told::Event(event)).is_ok();
                let Some(listener) = listener else { return };
                let visited = Visited {
                    me,
                    worker: question.workers[me],
                    listener,
                    patience: question.patience,
                };
                let done = one(&visited, ask_of(question, loaded, id, me), reached, tell);
                let _ = told.send(Told::Done(me, done));
            });
        }
        drop(told);
        let mut outcomes = vec![Outcome::default(); question.workers.len()];
        let (mut gone, mut failed) = (None, None);
        for told in events {
            match told {
                // An error of the receiver abandons the workers.
                Told::Event(event) => hear(event)?,
                Told::Done(me, Ok(outcome)) => {
                    if let Some(why) = &outcome.error {
                        let name = question.workers[me];
                        let why = if outcome.here {
                            format!("node {me} ({name}): {why}")
                        } else {
                            why.clone()
                        };
                        // A failure on the worker itself is more precise than the consequences on others.
                        if outcome.here || failed.is_none() {
                            failed = Some(why);
                        }
                        // The others wait for the ring with this worker in vain.
                        if let Some(why) = failed.take_if(|why| why.contains(STALE)) {
                            return Err(Trouble::Query(why));
                        }
                    }
                    outcomes[me] = outcome;
                }
                Told::Done(_, Err(trouble)) => {
                    gone.get_or_insert(trouble);
                }
            }
        }
        match (gone, failed) {
            (Some(trouble), _) => Err(trouble),
            (None, Some(why)) => Err(Trouble::Query(tables::explain(why, missing))),
            (None, None) => Ok(outcomes),
        }
    })
}

/// The question for the worker at this position.
fn ask_of(question: &Question, loaded: &[Loaded], id: [u8; 16], me: usize) -> Ask {
    let mut loaded = loaded.to_vec();
    for table in &mut loaded {
        // A worker with a part has the schema.
        if table.layout.get(me).is_some_and(Option::is_some) {
            table.schema = None;
        }
    }
    Ask {
        version: VERSION,
        id,
        nodes: question.workers.clone(),
        me,
        element: question.element,
        sql: question.sql.clone(),
        tables: question.tables.clone(),
        loaded,
    }
}

fn one(
    visited: &Visited<'_>,
    ask: Ask,
    reached: &Meeting,
    tell: impl Fn(Event) -> bool,
) -> Result<Outcome, Trouble> {
    let (me, worker) = (visited.me, visited.worker);
    let peer = |e| visited.gone(e);
    let foreign = |e: &dyn std::fmt::Display| visited.foreign(e);
    let visit = visited.visit();
    let all = reached.meet(visit.is_ok());
    let mut node = visit?;
    if !all {
        // The missing worker's error has the reason.
        node.give_up("another worker could not be reached");
        return Ok(Outcome::default());
    }
    let text = serde_json::to_vec(&ask).map_err(|e| Trouble::Query(e.to_string()))?;
    let unheard = || Trouble::Query("nobody wants the rows any more".into());
    let (mut asked, mut outcome) = (false, None);
    let mut partial = Whole::default();
    loop {
        match node.next(!asked).map_err(peer)? {
            Next::Room(mut room) => {
                if text.len() > room.capacity() {
                    return Err(Trouble::Query("the query is longer than 1 MiB".into()));
                }
                room.write(0, &text).map_err(peer)?;
                drop(room.commit(text.len(), 0, [0; 4]).map_err(peer)?);
                asked = true;
            }
            Next::Element(element) if element.user()[0] == PROGRESS && element.origin() == 1 => {
                // It can arrive between the elements of a batch.
                let mut bytes = vec![0; element.len()];
                element.read(0, &mut bytes).map_err(peer)?;
                let progress = serde_json::from_slice(&bytes).map_err(|e| foreign(&e))?;
                if !tell(Event::Progress(me, progress)) {
                    return Err(unheard());
                }
            }
            Next::Element(element) if element.origin() == 1 => {
                let too_long = |e: DataFusionError| Trouble::Query(e.to_string());
                let Some(bytes) = partial.take(&element).map_err(too_long)? else {
                    continue;
                };
                if element.user()[0] == OUTCOME {
                    outcome = Some(serde_json::from_slice(&bytes).map_err(|e| foreign(&e))?);
                    continue;
                }
                let mut buffer = Buffer::from_vec(bytes);
                let mut decoder = StreamDecoder::new();
                while let Some(batch) = decoder.decode(&mut buffer).map_err(|e| foreign(&e))? {
                    if !tell(Event::Rows(batch)) {
                        return Err(unheard());
                    }
                }
            }
            Next::Element(_) | Next::Woken => {}
            Next::End => break,
        }
    }
    node.finish().map_err(peer)?;
    outcome.ok_or_else(|| Trouble::Peer(format!("node {me} ({worker}) gave no outcome")))
}
