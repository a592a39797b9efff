//! `weft join worker`: a node that runs its part of queries.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use datafusion::common::TableReference;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use datafusion::prelude::SessionContext;
use weft_roundabout::{Next, Node, Own, Ring, RingListener, Security};

use crate::batches::{Part, Whole, external};
use crate::engine::{Tasks, is_call};
use crate::exec::Query;
use crate::loaded::LoadedTable;
use crate::orders::Orders;
use crate::pull::{Inlet, Pulled, channel, pull, sources};
use crate::rule::RowsAt;
use crate::session::context;
use crate::sql::{STACK, query, register};
use crate::store::Store;
use crate::talk::{Ask, ORDER, PROGRESS, REPORT, check_version};

/// The most queries at a time.
const QUERIES: usize = 32;
/// The most visits at a time: queries, and calls of the engine, of which a query makes many.
const VISITS: usize = 1024;
/// Bytes of a question or a call, at most.
const LONGEST: usize = 16 << 20;
/// Bytes of an element, at most.
const LARGEST: usize = 256 << 20;
/// The time within which a shell must send its question.
const QUESTION: Duration = Duration::from_secs(30);

/// The settings of a worker.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where it listens.
    pub bind: SocketAddr,
    /// Files below it alone are read.
    pub dir: Option<PathBuf>,
    /// Bytes that a query may have in memory; beyond it spills where it can, and fails where not.
    pub memory: Option<usize>,
    /// Bytes for loaded tables; with none it loads no table.
    pub tables: usize,
}

/// A worker that listens.
pub struct Worker {
    host: Arc<Host>,
    runtime: tokio::runtime::Runtime,
}

/// The state that the threads of a worker share.
struct Host {
    listener: Arc<RingListener>,
    settings: Settings,
    tasks: Tasks,
    orders: Orders,
    visits: AtomicUsize,
    queries: AtomicUsize,
}

/// Counts one user of a limited resource until it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let counted = Self(count);
        (count.fetch_add(1, Ordering::SeqCst) < limit).then_some(counted)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Worker {
    /// Listens.
    pub fn open(mut settings: Settings) -> Result<Self> {
        if let Some(dir) = &mut settings.dir {
            *dir = dir
                .canonicalize()
                .map_err(|e| DataFusionError::Execution(format!("{}: {e}", dir.display())))?;
        }
        let listener =
            RingListener::open(settings.bind, Security::Environment, None).map_err(external)?;
        let listener = Arc::new(listener);
        let tasks = Tasks::new(&listener, settings.dir.clone(), settings.memory)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_stack_size(STACK)
            .build()?;
        let orders = Orders {
            listener: Arc::clone(&listener),
            store: Store::new(settings.tables),
            dir: settings.dir.clone(),
            memory: settings.memory,
        };
        let host = Host {
            listener,
            settings,
            tasks,
            orders,
            visits: AtomicUsize::new(0),
            queries: AtomicUsize::new(0),
        };
        Ok(Self {
            host: Arc::new(host),
            runtime,
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.host.listener.local_addr()
    }

    /// Serves until `stop` returns true.
    pub fn serve(&self, stop: impl Fn() -> bool) {
        while !stop() {
            let Some(ring) = self.host.listener.visit(Duration::from_millis(200)) else {
                continue;
            };
            let (host, runtime) = (Arc::clone(&self.host), self.runtime.handle().clone());
            let spawned = std::thread::Builder::new()
                .name("weft-join-query".into())
                .stack_size(STACK)
                .spawn(move || {
                    let asking = ring.nodes[0];
                    let Some(_visit) = Counted::new(&host.visits, VISITS) else {
                        tracing::warn!("{asking}: too many visits");
                        return;
                    };
                    if let Err(error) = answer(&host, &ring, &runtime) {
                        tracing::warn!("{asking}: {error}");
                    }
                });
            if let Err(error) = spawned {
                tracing::warn!("no thread for a query: {error}");
            }
        }
    }
}

fn answer(host: &Host, ring: &Ring, runtime: &tokio::runtime::Handle) -> Result<()> {
    let (listener, settings) = (&host.listener, &host.settings);
    let mut node = listener.join(ring).map_err(external)?;
    let canceller = node.canceller();
    // A silent shell must not keep a place.
    let limit = runtime.spawn(async move {
        tokio::time::sleep(QUESTION).await;
        canceller.cancel("no question came in time");
    });
    let mut whole = Whole::up_to(LONGEST);
    let (user, bytes) = loop {
        match node.next_with(Own::Later).map_err(external)? {
            Next::Element(element) => {
                if let Some(bytes) = whole.take(&element)? {
                    break (element.user(), bytes);
                }
            }
            Next::End => return Err(DataFusionError::Execution("no question came".into())),
            _ => {}
        }
    };
    limit.abort();
    if is_call(user[0]) {
        return host.tasks.answer(node, &bytes, user[1], runtime);
    }
    let Some(_query) = Counted::new(&host.queries, QUERIES) else {
        node.give_up("too many queries");
        return Err(DataFusionError::Execution("too many queries".into()));
    };
    if user[0] == ORDER {
        return host.orders.answer(node, &bytes, check, runtime);
    }
    let parsed = check_version(&bytes)
        .and_then(|()| serde_json::from_slice::<Ask>(&bytes).map_err(external));
    let ask = match parsed {
        Ok(ask) => ask,
        Err(why) => {
            node.give_up(&why.to_string());
            return Err(why);
        }
    };
    tracing::info!(
        "{}: node {} of {}: {}",
        ring.nodes[0],
        ask.me,
        ask.nodes.len(),
        ask.sql
    );
    let wanted = Ring {
        element: ask.element,
        ..Ring::new(ask.id, ask.nodes.clone(), ask.me)
    };
    if let Err(why) = check(&wanted) {
        node.give_up(&why.to_string());
        return Err(why);
    }
    let query = Arc::new(Query::new(Arc::clone(listener), wanted));
    let run = Run {
        query: Arc::clone(&query),
        settings: settings.clone(),
        store: &host.orders.store,
        ask,
    };
    let done = run.rows(&mut node, runtime);
    if let Err(error) = &done {
        tracing::info!("{}: ended: {error}", ring.nodes[0]);
        // The rings of the others end too.
        query.cancel(&error.to_string());
    }
    query.outcome(done.err().as_ref()).give(&mut node)?;
    node.finish().map_err(external)?;
    Ok(())
}

/// Checks the ring that a shell requests.
fn check(ring: &Ring) -> Result<()> {
    ring.check().map_err(external)?;
    if ring.element > LARGEST {
        return Err(DataFusionError::Execution(
            "the ring's settings cannot be: an element has 256 MiB at most".into(),
        ));
    }
    Ok(())
}

/// One query on one node.
struct Run<'a> {
    query: Arc<Query>,
    settings: Settings,
    store: &'a Store,
    ask: Ask,
}

impl Run<'_> {
    /// Runs the query, and sends node 0's rows to the shell.
    fn rows(&self, node: &mut Node, runtime: &tokio::runtime::Handle) -> Result<()> {
        let (plan, context) = runtime.block_on(self.plan())?;
        let _entered = runtime.enter();
        let (parts, mut own) = channel(node.waker(), sources(&plan));
        let stream = execute_stream(plan, context.task_ctx())?;
        let element = node.ring().element;
        let pulling = runtime.spawn(pull(stream, element, parts));
        let waker = node.waker();
        self.query.wake(node.waker());
        let ticking = runtime.spawn(async move {
            loop {
                tokio::time::sleep(REPORT).await;
                waker.wake();
            }
        });
        let done = self.give(node, &mut own);
        if done.is_err() {
            self.query.end();
        }
        pulling.abort();
        ticking.abort();
        done
    }

    fn give(&self, node: &mut Node, own: &mut Inlet<Part>) -> Result<()> {
        let mut part: Option<Part> = None;
        let mut reported = Instant::now();
        loop {
            if let Some(error) = self.query.failure() {
                return Err(external(error));
            }
            if part.is_none() {
                match own.next()? {
                    // Rows of other nodes are there for EXPLAIN alone, which every node answers.
                    Pulled::Piece(_) if self.ask.me != 0 => continue,
                    Pulled::Piece(next) => part = Some(next),
                    Pulled::Nothing => {}
                    Pulled::End => return Ok(()),
                }
            }
            let due = reported.elapsed() >= REPORT;
            let want = if part.is_some() || due {
                Own::Now
            } else {
                Own::Later
            };
            let Next::Room(mut room) = node.next_with(want).map_err(external)? else {
                continue;
            };
            if due {
                reported = Instant::now();
                let text = serde_json::to_vec(&self.query.outcome(None)).map_err(external)?;
                let len = text.len().min(room.capacity());
                room.write(0, &text[..len]).map_err(external)?;
                drop(room.commit(len, 0, [PROGRESS, 0, 0, 0]).map_err(external)?);
            } else if let Some(filling) = &mut part
                && !filling.fill(room).map_err(external)?
            {
                part = None;
            }
        }
    }

    async fn plan(&self) -> Result<(Arc<dyn ExecutionPlan>, SessionContext)> {
        let context = context(&self.query, self.settings.memory, RowsAt::First)?;
        let nodes = self.ask.nodes.len();
        for about in &self.ask.loaded {
            let part = self.store.expected(about, self.ask.me, nodes)?;
            let table = LoadedTable::new(about, part)?;
            let name = TableReference::bare(about.name.as_str());
            context.register_table(name, Arc::new(table))?;
        }
        for table in &self.ask.tables {
            let dir = self.settings.dir.as_deref();
            register(&context, table, dir, nodes).await?;
        }
        let frame = query(&context, &self.ask.sql).await?;
        let plan = frame.create_physical_plan().await?;
        Ok((plan, context))
    }
}
