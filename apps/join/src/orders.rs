//! The worker's side of orders about loaded tables: load, list, drop.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use datafusion::prelude::SessionContext;
use tokio::runtime::Handle;
use weft_roundabout::{Next, Node, Own, Ring, RingListener};

use crate::batches::{Cut, external};
use crate::exec::Query;
use crate::load::Loader;
use crate::pull::sources;
use crate::rule::RowsAt;
use crate::session::context;
use crate::sql::{STACK, register};
use crate::store::{Store, TablePart, part_of};
use crate::talk::{
    GO_ON, Load, Order, Outcome, PROGRESS, REPORT, REPORTED, Report, What, check_version,
    table_name,
};

/// The time in which a shell must answer a report of a load. Other workers can be at work in it: they search CSV files for quotes before
/// they are ready.
const SILENCE: Duration = Duration::from_mins(10);
/// The column names in an error, at most.
const NAMES: usize = 20;

/// The loaded tables of a worker, and what orders about them need.
pub struct Orders {
    /// The worker's listener.
    pub listener: Arc<RingListener>,
    /// The tables.
    pub store: Store,
    /// The folder below which files are read.
    pub dir: Option<PathBuf>,
    /// Bytes that the plan that reads a table may have.
    pub memory: Option<usize>,
}

/// What a load reads.
struct Input {
    /// Its rows are those of this worker's part of the files.
    plan: Arc<dyn ExecutionPlan>,
    context: SessionContext,
    /// The number of the column by which the rows are split.
    by: Option<usize>,
}

fn refuse<T>(why: String) -> Result<T> {
    Err(DataFusionError::Execution(why))
}

impl Orders {
    /// Answers an order. `check` says whether a ring can be.
    ///
    /// # Errors
    /// An error of the shell. Errors of the order are sent to the shell instead.
    pub fn answer(
        &self,
        mut node: Node,
        order: &[u8],
        check: fn(&Ring) -> Result<()>,
        runtime: &Handle,
    ) -> Result<()> {
        let parsed = check_version(order)
            .and_then(|()| serde_json::from_slice::<Order>(order).map_err(external));
        let order = match parsed {
            Ok(order) => order,
            Err(error) => {
                node.give_up(&plain(&error));
                return Err(error);
            }
        };
        let outcome = self.obey(&mut node, order.what, check, runtime)?;
        outcome.give(&mut node)?;
        node.finish().map_err(external)?;
        Ok(())
    }

    fn obey(
        &self,
        node: &mut Node,
        what: What,
        check: fn(&Ring) -> Result<()>,
        runtime: &Handle,
    ) -> Result<Outcome> {
        // A query needs schemas.
        let with_schema = matches!(what, What::List(Some(_)));
        let parts = match what {
            What::List(names) => self.store.parts(names.as_deref()),
            What::Drop(name, load) => self.store.forget(&name, load).into_iter().collect(),
            What::Load(load) => {
                let wanted = Ring {
                    element: load.element,
                    ..Ring::new(load.id, load.nodes.clone(), load.me)
                };
                let name = table_name(&load.table.name);
                if name.as_ref() != Ok(&load.table.name) {
                    let why = name.err();
                    return Ok(failed(why.unwrap_or_else(|| "a name in capitals".into())));
                }
                if let Err(why) = check(&wanted) {
                    return Ok(failed(why.to_string()));
                }
                return self.load(node, &load, wanted, runtime);
            }
        };
        match self.store.report(&parts, with_schema) {
            Ok(report) => tell(node, &report)?,
            Err(error) => return Ok(failed(plain(&error))),
        }
        Ok(Outcome::default())
    }

    /// Loads a part. The shell says when to begin, for a ring cannot be formed with a worker that refuses, and when to keep the part.
    fn load(&self, node: &mut Node, order: &Load, ring: Ring, runtime: &Handle) -> Result<Outcome> {
        let name = &order.table.name;
        let loading = match self.store.begin(name) {
            Ok(loading) => loading,
            Err(error) => return Ok(failed(plain(&error))),
        };
        let query = Arc::new(Query::new(Arc::clone(&self.listener), ring));
        let input = match runtime.block_on(self.input(&query, order)) {
            Ok(input) => input,
            Err(error) => return Ok(failed(format!("table {name}: {}", plain(&error)))),
        };
        agree(
            node,
            &self.store.report(&[], false)?,
            name,
            SILENCE,
            runtime,
        )?;
        tracing::info!("loading part {} of table {name}", order.me);
        let waker = node.waker();
        let ticking = runtime.spawn(async move {
            loop {
                tokio::time::sleep(REPORT).await;
                waker.wake();
            }
        });
        let read = thread::scope(|scope| {
            let (done, read) = mpsc::sync_channel(1);
            let waker = node.waker();
            let reading = {
                let query = &query;
                thread::Builder::new()
                    .name("weft-join-load".into())
                    .stack_size(STACK)
                    .spawn_scoped(scope, move || {
                        let part = self.read(query, order, input, runtime);
                        let _ = done.send(part);
                        waker.wake();
                    })
            };
            match reading {
                Ok(reading) => {
                    let part = watch(node, &query, &read);
                    // A scope whose threads are not joined panics with them.
                    match reading.join() {
                        Ok(()) => part,
                        Err(_) => refuse("a thread panicked".into()),
                    }
                }
                Err(error) => Err(DataFusionError::IoError(error)),
            }
        });
        ticking.abort();
        let part = match read {
            Ok(part) => part,
            Err(error) => {
                tracing::info!("table {name} is not loaded: {error}");
                // The rings of the others end too.
                query.cancel(&error.to_string());
                let mut outcome = query.outcome(Some(&error));
                outcome.error = Some(format!("table {name}: {}", plain(&error)));
                return Ok(outcome);
            }
        };
        let report = self.store.report(&[Arc::clone(&part)], false)?;
        agree(node, &report, name, SILENCE, runtime)?;
        self.store.keep(loading, part);
        Ok(query.outcome(None))
    }

    fn read(
        &self,
        query: &Arc<Query>,
        order: &Load,
        input: Input,
        runtime: &Handle,
    ) -> Result<Arc<TablePart>> {
        let _entered = runtime.enter();
        let schema = input.plan.schema();
        let loader = Loader {
            query: Arc::clone(query),
            by: input.by,
            limit: self.store.limit(),
            what: sources(&input.plan),
        };
        let input = execute_stream(input.plan, input.context.task_ctx())?;
        let (batches, space) = loader.load(input, self.store.space(), runtime)?;
        Ok(Arc::new(part_of(order, schema, batches, space)))
    }

    async fn input(&self, query: &Arc<Query>, order: &Load) -> Result<Input> {
        let context = context(query, self.memory, RowsAt::Each)?;
        register(
            &context,
            &order.table,
            self.dir.as_deref(),
            order.nodes.len(),
        )
        .await?;
        let frame = context.table(&order.table.name).await?;
        let plan = frame.create_physical_plan().await?;
        let schema = plan.schema();
        let by = order.by.as_ref().map(|by| {
            schema.index_of(by).or_else(|_| {
                let names = schema.fields().iter().map(|field| field.name().as_str());
                let names: Vec<_> = names.take(NAMES).collect();
                refuse(format!(
                    "there is no column {by}; columns are {}",
                    names.join(", ")
                ))
            })
        });
        let by = by.transpose()?;
        Ok(Input { plan, context, by })
    }
}

/// An error in its own words.
fn plain(error: &DataFusionError) -> String {
    match error {
        DataFusionError::Execution(why) | DataFusionError::ResourcesExhausted(why) => why.clone(),
        other => other.to_string(),
    }
}

fn failed(why: String) -> Outcome {
    Outcome {
        here: true,
        error: Some(why),
        ..Outcome::default()
    }
}

/// Waits until a part is read, and reports the progress. Without a shell the load ends.
fn watch(
    node: &mut Node,
    query: &Query,
    read: &mpsc::Receiver<Result<Arc<TablePart>>>,
) -> Result<Arc<TablePart>> {
    let mut reported = Instant::now();
    loop {
        match read.try_recv() {
            Ok(part) => return part,
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return refuse("a thread panicked".into()),
        }
        let due = reported.elapsed() >= REPORT;
        let next = match node.next_with(if due { Own::Now } else { Own::Later }) {
            Ok(next) => next,
            Err(error) => {
                query.cancel(&error.to_string());
                // It ends soon.
                drop(read.recv());
                return Err(external(error));
            }
        };
        if let Next::Room(mut room) = next {
            reported = Instant::now();
            let text = serde_json::to_vec(&query.outcome(None)).map_err(external)?;
            let len = text.len().min(room.capacity());
            room.write(0, &text[..len]).map_err(external)?;
            drop(room.commit(len, 0, [PROGRESS, 0, 0, 0]).map_err(external)?);
        }
    }
}

/// Sends a report, and waits until the shell says that the load goes on. A shell that is silent for this long holds no load up.
fn agree(
    node: &mut Node,
    report: &Report,
    name: &str,
    silence: Duration,
    runtime: &Handle,
) -> Result<()> {
    let canceller = node.canceller();
    let limit = runtime.spawn(async move {
        tokio::time::sleep(silence).await;
        let seconds = silence.as_secs();
        canceller.cancel(&format!("the shell said nothing for {seconds} seconds"));
    });
    let agreed = tell(node, report).and_then(|()| told(node, name));
    limit.abort();
    agreed
}

/// Waits until the shell says that the load goes on.
fn told(node: &mut Node, name: &str) -> Result<()> {
    loop {
        match node.next_with(Own::Later).map_err(external)? {
            Next::Element(element) if element.user()[0] == GO_ON => return Ok(()),
            Next::End => return refuse(format!("table {name} is not to be loaded")),
            _ => {}
        }
    }
}

/// Sends a report.
fn tell(node: &mut Node, report: &Report) -> Result<()> {
    let text = serde_json::to_vec(report).map_err(external)?;
    let mut text = Some(Cut::new(text, [REPORTED, 0, 0, 0]));
    while let Some(cut) = &mut text {
        if let Next::Room(room) = node.next_with(Own::Now).map_err(external)?
            && !cut.fill(room).map_err(external)?
        {
            text = None;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_roundabout::Security;

    #[test]
    fn a_silent_shell_holds_no_load_up() {
        let [a, b] = [(); 2].map(|()| {
            RingListener::open("127.0.0.1:0".parse().unwrap(), Security::SameUser, None).unwrap()
        });
        let nodes = vec![a.local_addr(), b.local_addr()];
        let ring = |me| Ring::new([3; 16], nodes.clone(), me);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        thread::scope(|scope| {
            let shell = scope.spawn(|| {
                let mut node = a.join(&ring(0)).unwrap();
                loop {
                    if let Err(error) = node.next_with(Own::Later) {
                        return error.to_string();
                    }
                }
            });
            let mut node = b.join(&ring(1)).unwrap();
            let silence = Duration::from_secs(1);
            let why = agree(
                &mut node,
                &Report::default(),
                "t",
                silence,
                runtime.handle(),
            );
            let why = why.unwrap_err().to_string();
            assert!(why.contains("said nothing for 1 seconds"), "{why}");
            drop(node);
            let why = shell.join().unwrap();
            assert!(why.contains("said nothing"), "{why}");
        });
    }
}
