//! Operators of distributed plans: [`RoundaboutExec`] passes the rows of all nodes by, [`SomeRowsExec`] keeps those of node 0, or those
//! that come before the query ends.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use datafusion::arrow::array::RecordBatch;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
};
use futures::StreamExt;
use tokio::sync::mpsc;
use weft_roundabout::{Canceller, Element, Load, Node, Ring, RingListener, Waker, Watch};

use crate::batches::{Assembly, Part, external};
use crate::pull::{Outlet, Side, channel, pull, sources, turn};
use crate::talk::Outcome;

/// The state that the operators of one query share.
pub struct Query {
    /// Where this node's neighbours connect.
    pub listener: Arc<RingListener>,
    /// The ring; each exchange has a ring for itself.
    pub ring: Ring,
    /// A digest of the plan for one node, which all nodes must have.
    pub agreement: AtomicU64,
    cancellers: Mutex<(Option<String>, Vec<Canceller>)>,
    loads: Mutex<Vec<Exchange>>,
    /// The query ends: no operator continues.
    ended: AtomicBool,
    /// The first failure of an exchange, and the task to wake for it.
    failed: Mutex<(Option<weft_roundabout::Error>, Option<Waker>)>,
}

/// One exchange of a query, running or over.
enum Exchange {
    Running(Watch),
    Over(Load),
}

impl fmt::Debug for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} of {}", self.ring.me, self.ring.nodes.len())
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Query {
    /// On this ring.
    pub fn new(listener: Arc<RingListener>, ring: Ring) -> Self {
        Self {
            listener,
            ring,
            agreement: AtomicU64::new(0),
            cancellers: Mutex::default(),
            loads: Mutex::default(),
            ended: AtomicBool::new(false),
            failed: Mutex::default(),
        }
    }

    /// Ends all its turns, on all nodes.
    pub fn cancel(&self, why: &str) {
        self.ended.store(true, Ordering::SeqCst);
        let mut cancellers = lock(&self.cancellers);
        cancellers.0.get_or_insert_with(|| why.into());
        for canceller in &cancellers.1 {
            canceller.cancel(why);
        }
    }

    /// Ends the work of its operators on this node.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// An error once it has ended.
    fn goes_on(&self) -> Result<()> {
        if self.ended.load(Ordering::SeqCst) {
            return Err(DataFusionError::Execution("the query has ended".into()));
        }
        Ok(())
    }

    /// Sets the task that is woken when an exchange fails: the operators above it may be busy for long.
    pub fn wake(&self, waker: Waker) {
        lock(&self.failed).1 = Some(waker);
    }

    /// The first failure of an exchange.
    pub fn failure(&self) -> Option<weft_roundabout::Error> {
        lock(&self.failed).0.clone()
    }

    fn fail(&self, error: &weft_roundabout::Error) {
        self.ended.store(true, Ordering::SeqCst);
        let mut failed = lock(&self.failed);
        failed.0.get_or_insert_with(|| error.clone());
        if let Some(waker) = &failed.1 {
            waker.wake();
        }
    }

    /// The sum of what the exchanges have moved through this node so far.
    pub fn load(&self) -> Load {
        let mut sum = Load::default();
        for exchange in lock(&self.loads).iter() {
            let load = match exchange {
                Exchange::Over(load) => *load,
                Exchange::Running(watch) => match watch.load() {
                    Some(load) => load,
                    // The exchange has failed, or its last figures arrive in a moment.
                    None => continue,
                },
            };
            sum.received += load.received;
            sum.received_bytes += load.received_bytes;
            sum.sent += load.sent;
            sum.sent_bytes += load.sent_bytes;
            sum.waited += load.waited;
        }
        sum
    }

    /// What it has come to on this node, with the error that ended it.
    pub fn outcome(&self, error: Option<&DataFusionError>) -> Outcome {
        let load = self.load();
        Outcome {
            error: error.map(ToString::to_string),
            here: error.is_some_and(|error| !is_elsewhere(error)),
            received: load.received_bytes,
            sent: load.sent_bytes,
            waited: load.waited.as_secs_f64(),
        }
    }

    /// Begins to count what a node does; the number is for [`Query::over`].
    fn running(&self, node: &Node) -> usize {
        let mut loads = lock(&self.loads);
        loads.push(Exchange::Running(node.watch()));
        loads.len() - 1
    }

    /// Counts the whole of what a node did.
    fn over(&self, number: usize, load: Load) {
        if let Some(exchange) = lock(&self.loads).get_mut(number) {
            *exchange = Exchange::Over(load);
        }
    }

    /// One exchange: what the task reads of `what` goes round, and `side` sees it and the other nodes' rows. The task runs in parallel with the ring:
    /// it may itself wait for other nodes, which wait for us to forward.
    pub(crate) fn exchange<T, F: Future<Output = ()> + Send + 'static>(
        &self,
        exchange: u32,
        what: String,
        runtime: &tokio::runtime::Handle,
        task: impl FnOnce(Outlet<T>) -> F,
        side: &mut impl Side<T>,
    ) -> Result<()> {
        let mut node = self.join(exchange).map_err(external)?;
        let number = self.running(&node);
        let (pieces, mut own) = channel(node.waker(), what);
        let reading = runtime.spawn(task(pieces));
        let done = turn(&mut node, &mut own, side);
        reading.abort();
        if let Err(error) = done {
            node.give_up(&error.to_string());
            return Err(error);
        }
        let load = node.finish().map_err(external)?;
        self.over(number, load);
        Ok(())
    }

    /// Takes this node's place in the ring of an exchange.
    pub(crate) fn join(&self, exchange: u32) -> Result<Node, weft_roundabout::Error> {
        let ring = Ring {
            exchange,
            agreement: self.agreement.load(Ordering::SeqCst),
            ..self.ring.clone()
        };
        let node = self.listener.join(&ring)?;
        let mut cancellers = lock(&self.cancellers);
        match &cancellers.0 {
            Some(why) => node.canceller().cancel(why),
            None => cancellers.1.push(node.canceller()),
        }
        Ok(node)
    }
}

/// Whether an error is that of another node.
fn is_elsewhere(error: &DataFusionError) -> bool {
    match error.find_root() {
        DataFusionError::External(error) => matches!(
            error.downcast_ref::<weft_roundabout::Error>(),
            Some(weft_roundabout::Error::Failed { .. })
        ),
        _ => false,
    }
}

/// The nodes that get the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Every node gets the rows of all nodes: the rotating relation.
    Rotate,
    /// Node 0 gets the rows of all nodes.
    Gather,
}

/// The rows of all nodes, as they pass on the ring.
#[derive(Debug)]
pub struct RoundaboutExec {
    input: Arc<dyn ExecutionPlan>,
    kind: Kind,
    exchange: u32,
    query: Arc<Query>,
    properties: Arc<PlanProperties>,
}

fn one_partition(input: &Arc<dyn ExecutionPlan>) -> Arc<PlanProperties> {
    Arc::new(PlanProperties::new(
        EquivalenceProperties::new(input.schema()),
        Partitioning::UnknownPartitioning(1),
        EmissionType::Incremental,
        Boundedness::Bounded,
    ))
}

fn only(mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
    match (children.pop(), children.is_empty()) {
        (Some(child), true) => Ok(child),
        _ => Err(DataFusionError::Internal("one child is needed".into())),
    }
}

impl RoundaboutExec {
    /// For an input with one partition.
    pub fn new(
        input: Arc<dyn ExecutionPlan>,
        kind: Kind,
        exchange: u32,
        query: Arc<Query>,
    ) -> Self {
        let properties = one_partition(&input);
        Self {
            input,
            kind,
            exchange,
            query,
            properties,
        }
    }
}

impl DisplayAs for RoundaboutExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = self.query.ring.nodes.len();
        write!(
            f,
            "RoundaboutExec: {:?}, exchange={}, nodes={nodes}",
            self.kind, self.exchange
        )
    }
}

impl ExecutionPlan for RoundaboutExec {
    fn name(&self) -> &'static str {
        "RoundaboutExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let query = Arc::clone(&self.query);
        Ok(Arc::new(Self::new(
            only(children)?,
            self.kind,
            self.exchange,
            query,
        )))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, context)?;
        let schema = self.schema();
        let (rows, out) = mpsc::channel(4);
        let pump = Pump {
            query: Arc::clone(&self.query),
            exchange: self.exchange,
            rows: (self.kind == Kind::Rotate || self.query.ring.me == 0).then_some(rows.clone()),
            assembly: Assembly::new(schema.clone(), self.query.ring.nodes.len()),
            what: sources(&self.input),
        };
        let runtime = tokio::runtime::Handle::current();
        let (query, over) = (Arc::clone(&self.query), Arc::clone(&self.query));
        std::thread::Builder::new()
            .name("weft-join-pump".into())
            .spawn(move || {
                // A dropped receiver needs neither rows nor errors.
                let end = pump.run(input, &runtime).map(|()| None);
                if let Err(DataFusionError::External(cause)) = &end
                    && let Some(cause) = cause.downcast_ref()
                {
                    query.fail(cause);
                }
                let _ = rows.blocking_send(end);
            })
            .map_err(DataFusionError::IoError)?;
        let stream = futures::stream::unfold(Some((out, over)), |state| async {
            let (mut out, over) = state?;
            // Rows that arrived before the end are not processed.
            let next = match out.recv().await {
                Some(next) => next.and_then(|next| over.goes_on().map(|()| next)),
                None => Err(DataFusionError::Execution(
                    "the thread of an exchange panicked".into(),
                )),
            };
            match next.transpose()? {
                Ok(batch) => Some((Ok(batch), Some((out, over)))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, stream)))
    }
}

/// The query thread of one exchange: gives our rows to the ring, and the ring's rows to the operator above. It continues to the end of the
/// turn even if the operator above needs no more rows: other nodes do.
struct Pump {
    query: Arc<Query>,
    exchange: u32,
    rows: Option<mpsc::Sender<Result<Option<RecordBatch>>>>,
    assembly: Assembly,
    /// The files of our rows.
    what: String,
}

impl Pump {
    fn run(
        mut self,
        input: SendableRecordBatchStream,
        runtime: &tokio::runtime::Handle,
    ) -> Result<()> {
        let (query, element) = (Arc::clone(&self.query), self.query.ring.element);
        let what = std::mem::take(&mut self.what);
        query.exchange(
            self.exchange,
            what,
            runtime,
            |parts| pull(input, element, parts),
            &mut self,
        )
    }

    fn give(&mut self, batches: Vec<RecordBatch>) {
        for batch in batches {
            let taken = self
                .rows
                .as_ref()
                .is_none_or(|rows| rows.blocking_send(Ok(Some(batch))).is_ok());
            if !taken {
                self.rows = None;
            }
        }
    }
}

impl Side<Part> for Pump {
    fn own(&mut self, mut part: Part) -> Result<Option<Part>> {
        self.give(std::mem::take(&mut part.batches));
        Ok(Some(part))
    }

    fn other(&mut self, element: Element) -> Result<()> {
        if self.rows.is_some() {
            let batches = self.assembly.take(&element)?;
            drop(element);
            self.give(batches);
        }
        Ok(())
    }
}

/// The rows of an operator that pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Only the rows of node 0: for an operator that produces rows without any input, on every node.
    OfFirst,
    /// All rows until the query has ended. A join can make rows from one batch of R for minutes, and nothing else stops it.
    UntilEnded,
}

/// The rows of its input, or some of them.
#[derive(Debug)]
pub struct SomeRowsExec {
    input: Arc<dyn ExecutionPlan>,
    rows: Rows,
    query: Arc<Query>,
}

impl SomeRowsExec {
    /// For this input.
    pub fn new(input: Arc<dyn ExecutionPlan>, rows: Rows, query: Arc<Query>) -> Self {
        Self { input, rows, query }
    }
}

impl DisplayAs for SomeRowsExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SomeRowsExec: {:?}", self.rows)
    }
}

impl ExecutionPlan for SomeRowsExec {
    fn name(&self) -> &'static str {
        "SomeRowsExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let query = Arc::clone(&self.query);
        Ok(Arc::new(Self::new(only(children)?, self.rows, query)))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        // The input runs on every node: it can take part in exchanges.
        let input = self.input.execute(partition, context)?;
        let (rows, query) = (self.rows, Arc::clone(&self.query));
        let some = input.filter_map(move |batch| {
            let goes_on = match rows {
                Rows::UntilEnded => query.goes_on(),
                Rows::OfFirst => Ok(()),
            };
            let left_out = rows == Rows::OfFirst && query.ring.me != 0 && batch.is_ok();
            let batch = goes_on.and(batch);
            std::future::ready((!left_out).then_some(batch))
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), some)))
    }
}
