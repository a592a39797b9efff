//! `weft join sql`: asks the workers, and passes on the rows of node 0 as they arrive.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::error::DataFusionError;
use weft_roundabout::{Error, Next, Ring, RingListener, Security, VISIT};

use crate::batches::Whole;
use crate::talk::{Ask, ELEMENT, OUTCOME, Outcome, PROGRESS, Table, VERSION};

/// A query for a number of workers.
pub struct Question {
    /// The workers, in the order of the ring.
    pub workers: Vec<SocketAddr>,
    /// The tables of the query.
    pub tables: Vec<Table>,
    /// The query.
    pub sql: String,
    /// Bytes of an element of the ring.
    pub element: usize,
    /// The time within which workers must answer a connection.
    pub patience: Duration,
}

/// A failure of a query.
#[derive(Debug)]
pub enum Trouble {
    /// A worker could not be reached, or went away.
    Peer(String),
    /// The query failed.
    Query(String),
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

fn random() -> Result<[u8; 16], Trouble> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| Trouble::Query(e.to_string()))?;
    Ok(id)
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
    let listeners = listeners(&question.workers).map_err(|e| Trouble::Query(e.to_string()))?;
    let id = random()?;
    let (told, events) = mpsc::sync_channel(16);
    let met = Met {
        barrier: Barrier::new(question.workers.len()),
        all: AtomicBool::new(true),
    };
    std::thread::scope(|scope| {
        for me in 0..question.workers.len() {
            let (told, met) = (told.clone(), &met);
            let listener = door_for(&listeners, question.workers[me]);
            scope.spawn(move || {
                let tell = |event| told.send(Told::Event(event)).is_ok();
                let Some(listener) = listener else { return };
                let done = one(question, listener, id, me, met, tell);
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
            (None, Some(why)) => Err(Trouble::Query(why)),
            (None, None) => Ok(outcomes),
        }
    })
}

/// Where workers connect back to us: an address of each family that they have.
pub fn listeners(workers: &[SocketAddr]) -> Result<Vec<Arc<RingListener>>, Error> {
    let beyond = workers
        .iter()
        .any(|addr| !addr.ip().to_canonical().is_loopback());
    type OfFamily = fn(&SocketAddr) -> bool;
    let families: [(OfFamily, IpAddr, IpAddr); 2] = [
        (
            SocketAddr::is_ipv4,
            Ipv4Addr::UNSPECIFIED.into(),
            Ipv4Addr::LOCALHOST.into(),
        ),
        (
            SocketAddr::is_ipv6,
            Ipv6Addr::UNSPECIFIED.into(),
            Ipv6Addr::LOCALHOST.into(),
        ),
    ];
    families
        .into_iter()
        .filter(|(is, ..)| workers.iter().any(is))
        .map(|(_, any, own)| {
            let ip = if beyond { any } else { own };
            RingListener::open(SocketAddr::new(ip, 0), Security::Environment, None).map(Arc::new)
        })
        .collect()
}

/// The listener for a worker: that of its family.
pub fn door_for(listeners: &[Arc<RingListener>], worker: SocketAddr) -> Option<&Arc<RingListener>> {
    listeners
        .iter()
        .find(|listener| listener.local_addr().is_ipv4() == worker.is_ipv4())
}

/// No worker gets the question before all of them have been reached: they would wait for the missing one.
struct Met {
    barrier: Barrier,
    all: AtomicBool,
}

fn one(
    question: &Question,
    listener: &RingListener,
    id: [u8; 16],
    me: usize,
    met: &Met,
    tell: impl Fn(Event) -> bool,
) -> Result<Outcome, Trouble> {
    let worker = question.workers[me];
    let peer = |e: Error| {
        Trouble::Peer(match e {
            Error::Failed { why, .. } | Error::Form { why, .. } => {
                format!("node {me} ({worker}) {why}")
            }
            other => other.to_string(),
        })
    };
    let ring = Ring {
        exchange: VISIT,
        element: ELEMENT,
        elements: 4,
        patience: question.patience,
        ..Ring::new(random()?, vec![listener.local_addr(), worker], 0)
    };
    let joined = listener.join(&ring).map_err(peer);
    met.all.fetch_and(joined.is_ok(), Ordering::SeqCst);
    met.barrier.wait();
    let mut node = joined?;
    if !met.all.load(Ordering::SeqCst) {
        // The missing worker's error has the reason.
        node.give_up("another worker could not be reached");
        return Ok(Outcome::default());
    }
    let ask = Ask {
        version: VERSION,
        id,
        nodes: question.workers.clone(),
        me,
        element: question.element,
        sql: question.sql.clone(),
        tables: question.tables.clone(),
    };
    let text = serde_json::to_vec(&ask).map_err(|e| Trouble::Query(e.to_string()))?;
    let foreign = |e: &dyn std::fmt::Display| {
        Trouble::Peer(format!("node {me} ({worker}) does not make sense: {e}"))
    };
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
