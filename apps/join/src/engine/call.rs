//! The caller's side: the engine's channels to workers.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::buffer::Buffer;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_distributed::{
    ChannelResolver, CoordinatorToWorkerMsg, DistributedConfig, ExecuteTaskRequest,
    GetWorkerInfoRequest, GetWorkerInfoResponse, ProducerHead, SetPlanRequest, WorkerChannel,
    WorkerToCoordinatorMsg,
};
use futures::StreamExt;
use futures::stream::BoxStream;
use http::HeaderMap;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use url::Url;
use weft_roundabout::{Canceller, Next, Node, Own, Ring, RingListener, VISIT, Waker};

use super::said::{CALL, Call, Decoder, Head, NEWS, News, OVER, ROWS, VERSION, What, frames};
use crate::batches::{Cut, Whole, external};
use crate::exec::lock;
use crate::shell::door_for;
use crate::talk::{ELEMENT, OUTCOME, Outcome};

fn foreign(why: impl std::fmt::Display) -> DataFusionError {
    DataFusionError::Execution(format!("a worker does not make sense: {why}"))
}

/// The engine's URL of a worker.
///
/// # Errors
/// None is known: every address is valid in a URL.
pub fn url_of(worker: SocketAddr) -> Result<Url> {
    Url::parse(&format!("weft://{worker}")).map_err(external)
}

fn address_of(url: &Url) -> Result<SocketAddr> {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().unwrap_or_default();
    let address = format!("{host}:{port}").parse();
    address.map_err(|_| DataFusionError::Execution(format!("{url} is no worker of weft")))
}

/// The engine's channels to workers: visits at their listeners.
#[derive(Clone)]
pub struct Channels {
    listeners: Vec<Arc<RingListener>>,
    patience: Duration,
}

impl Channels {
    /// From these listeners, where workers connect back to.
    pub fn new(listeners: Vec<Arc<RingListener>>, patience: Duration) -> Self {
        Self {
            listeners,
            patience,
        }
    }
}

#[async_trait]
impl ChannelResolver for Channels {
    async fn get_worker_client_for_url(&self, url: &Url) -> Result<Box<dyn WorkerChannel>> {
        let worker = address_of(url)?;
        let listener = door_for(&self.listeners, worker).cloned();
        let listener = listener.ok_or_else(|| {
            DataFusionError::Execution(format!("no listener here for the family of {worker}"))
        })?;
        Ok(Box::new(Channel {
            listener,
            worker,
            patience: self.patience,
        }))
    }
}

/// The channel to one worker.
#[derive(Clone)]
struct Channel {
    listener: Arc<RingListener>,
    worker: SocketAddr,
    patience: Duration,
}

/// Ends a call from outside.
#[derive(Default)]
struct Ending(Mutex<Ends>);

#[derive(Default)]
struct Ends {
    cancelled: bool,
    /// The coordinator has sent its last message.
    over: bool,
    node: Option<(Canceller, Waker)>,
}

impl Ending {
    fn begins(&self, node: &Node) {
        let mut ends = lock(&self.0);
        if ends.cancelled {
            node.canceller().cancel("nobody wants it any more");
        }
        ends.node = Some((node.canceller(), node.waker()));
    }

    fn cancel(&self) {
        let mut ends = lock(&self.0);
        ends.cancelled = true;
        if let Some((canceller, _)) = &ends.node {
            canceller.cancel("nobody wants it any more");
        }
    }

    fn over(&self) {
        let mut ends = lock(&self.0);
        ends.over = true;
        if let Some((_, waker)) = &ends.node {
            waker.wake();
        }
    }

    fn is_over(&self) -> bool {
        lock(&self.0).over
    }
}

/// Cancels when it is dropped; a call that is over does not notice.
struct CancelLater(Arc<Ending>);

impl Drop for CancelLater {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A message of a worker.
enum Said {
    /// A message of this kind.
    More(u64, Vec<u8>),
    /// The end.
    All,
}

/// A call and what the engine has encoded for it.
struct Text {
    bytes: Vec<u8>,
    json: usize,
    /// The coordinator reports when the query is over.
    stays: bool,
}

impl Text {
    fn new(headers: &HeaderMap, what: What, encoded: &[u8]) -> Result<Self> {
        let stays = matches!(what, What::Plan { .. });
        let headers = headers.iter();
        let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        let call = Call {
            version: VERSION,
            headers: headers.collect(),
            what,
        };
        let mut bytes = serde_json::to_vec(&call).map_err(external)?;
        let json = bytes.len();
        bytes.extend(encoded);
        Ok(Self { bytes, json, stays })
    }
}

impl Channel {
    fn visit(&self) -> Result<Node> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|e| DataFusionError::Execution(e.to_string()))?;
        let ring = Ring {
            exchange: VISIT,
            element: ELEMENT,
            elements: 4,
            patience: self.patience,
            ..Ring::new(id, vec![self.listener.local_addr(), self.worker], 0)
        };
        self.listener.join(&ring).map_err(external)
    }

    /// Makes a call, and passes each answer to `hear` until the worker reports its outcome.
    fn call(
        &self,
        text: Text,
        ending: &Ending,
        mut hear: impl FnMut(Said) -> Result<()>,
    ) -> Result<()> {
        let mut node = self.visit()?;
        ending.begins(&node);
        let mut call = Some(Cut::new(text.bytes, [CALL, text.json as u64, 0, 0]));
        let (mut stays, mut whole, mut complete) = (text.stays, Whole::default(), false);
        loop {
            let own = match (&call, stays, ending.is_over()) {
                (Some(_), ..) | (None, true, true) => Own::Now,
                (None, true, false) => Own::Later,
                (None, false, _) => Own::Never,
            };
            match node.next_with(own).map_err(external)? {
                Next::Room(room) => match &mut call {
                    Some(cut) => {
                        if !cut.fill(room).map_err(external)? {
                            call = None;
                        }
                    }
                    None => {
                        drop(room.commit(0, 0, [OVER, 0, 0, 0]).map_err(external)?);
                        stays = false;
                    }
                },
                Next::Element(element) if element.origin() == 1 => {
                    let word = element.user()[0];
                    let bytes = whole.take(&element)?;
                    // The ring continues meanwhile.
                    drop(element);
                    match bytes {
                        Some(bytes) if word == OUTCOME => {
                            let said: Outcome = serde_json::from_slice(&bytes).map_err(foreign)?;
                            if let Some(why) = said.error {
                                let why = format!("{}: {why}", self.worker);
                                return Err(DataFusionError::Execution(why));
                            }
                            hear(Said::All)?;
                            (complete, stays) = (true, false);
                        }
                        Some(bytes) => hear(Said::More(word, bytes))?,
                        None => {}
                    }
                }
                Next::Element(_) | Next::Woken => {}
                Next::End => break,
            }
        }
        if !complete {
            return Err(foreign("no outcome"));
        }
        // All data has arrived, so errors of the goodbye do not matter.
        if let Err(error) = node.finish() {
            tracing::info!("{}: the end of a call: {error}", self.worker);
        }
        Ok(())
    }
}

/// Accounts for the memory of received rows that no stream has taken yet.
struct Held {
    reservation: Mutex<MemoryReservation>,
    budget: usize,
    /// The receivers have gone.
    given_up: AtomicBool,
    freed: Condvar,
}

impl Held {
    /// Accounts for `bytes`, and waits while the budget is exceeded. Rows larger than the budget are let in
    /// alone.
    fn grow(&self, bytes: usize) {
        let mut held = lock(&self.reservation);
        while held.size() > 0
            && held.size() + bytes > self.budget
            && !self.given_up.load(Ordering::SeqCst)
        {
            held = self
                .freed
                .wait(held)
                .unwrap_or_else(PoisonError::into_inner);
        }
        held.grow(bytes);
    }

    fn shrink(&self, bytes: usize) {
        let held = lock(&self.reservation);
        held.shrink(bytes.min(held.size()));
        drop(held);
        self.freed.notify_all();
    }

    fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        drop(lock(&self.reservation));
        self.freed.notify_all();
    }
}

/// An event of one partition.
enum Came {
    /// Rows, and the bytes that they hold.
    Rows(Vec<RecordBatch>, usize),
    Failed(DataFusionError),
    /// All rows have arrived. Without this event some are missing, whatever ended the call.
    End,
}

/// A task whose rows are requested when the first stream polls for some.
struct Task {
    channel: Channel,
    waiting: Mutex<Option<(Vec<UnboundedSender<Came>>, Text)>>,
    /// The call to send if no stream has polled: the task's own requests to other tasks must end.
    dropped: Mutex<Option<Text>>,
    held: Arc<Held>,
    ending: Arc<Ending>,
    first: usize,
}

impl Task {
    fn start(&self) {
        let Some((senders, text)) = lock(&self.waiting).take() else {
            return;
        };
        let (channel, first) = (self.channel.clone(), self.first);
        let (held, ending) = (Arc::clone(&self.held), Arc::clone(&self.ending));
        let failing = senders.clone();
        let run = move || {
            let mut senders = senders;
            let mut decoders: Vec<_> = senders.iter().map(|_| Decoder::default()).collect();
            let done = channel.call(text, &ending, |said| {
                let bytes = match said {
                    Said::More(ROWS, bytes) => bytes,
                    Said::More(..) => return Err(foreign("something else than rows")),
                    Said::All => {
                        // Receivers of rows do not wait for the goodbyes of the ring.
                        for sender in senders.drain(..) {
                            let _ = sender.send(Came::End);
                        }
                        return Ok(());
                    }
                };
                for (partition, bytes) in frames(bytes)? {
                    let at = partition.wrapping_sub(first);
                    let (Some(sender), Some(decoder)) = (senders.get(at), decoders.get_mut(at))
                    else {
                        return Err(foreign("rows of another partition"));
                    };
                    give(&held, sender, decoder, bytes)?;
                }
                Ok(())
            });
            if let Err(error) = done {
                fail(&senders, error);
            }
        };
        let thread = thread::Builder::new().name("weft-join-call".into());
        if let Err(error) = thread.spawn(run) {
            fail(&failing, external(error));
        }
    }
}

fn fail(senders: &[UnboundedSender<Came>], error: DataFusionError) {
    let error = Arc::new(error);
    for sender in senders {
        let _ = sender.send(Came::Failed(DataFusionError::Shared(Arc::clone(&error))));
    }
}

fn give(
    held: &Held,
    sender: &UnboundedSender<Came>,
    decoder: &mut Decoder,
    bytes: Buffer,
) -> Result<()> {
    if sender.is_closed() {
        // Other partitions continue.
        return Ok(());
    }
    let len = bytes.len();
    held.grow(len);
    let batches = decoder.decode(bytes)?;
    if sender.send(Came::Rows(batches, len)).is_err() {
        held.shrink(len);
    }
    Ok(())
}

impl Drop for Task {
    fn drop(&mut self) {
        self.held.give_up();
        let never_started = lock(&self.waiting).take().is_some();
        let text = lock(&self.dropped).take();
        match text {
            Some(text) if never_started => {
                let (channel, ending) = (self.channel.clone(), Arc::clone(&self.ending));
                let run = move || {
                    if let Err(error) = channel.call(text, &ending, |_| Ok(())) {
                        tracing::info!("{}: a task nobody wants: {error}", channel.worker);
                    }
                };
                let spawned = thread::Builder::new().name("weft-join-call".into());
                if let Err(error) = spawned.spawn(run) {
                    tracing::warn!("no thread for a call: {error}");
                }
            }
            _ => self.ending.cancel(),
        }
    }
}

/// The rows of one partition of a task. Batches that arrived together are returned one by one.
fn rows(task: Arc<Task>, came: UnboundedReceiver<Came>) -> BoxStream<'static, Result<RecordBatch>> {
    let state = (task, came, VecDeque::<RecordBatch>::new(), 0);
    futures::stream::unfold(Some(state), |state| async move {
        let (task, mut came, mut ready, mut held) = state?;
        loop {
            if let Some(batch) = ready.pop_front() {
                if ready.is_empty() {
                    task.held.shrink(std::mem::take(&mut held));
                }
                return Some((Ok(batch), Some((task, came, ready, held))));
            }
            task.start();
            let error = match came.recv().await {
                // A schema without a batch.
                Some(Came::Rows(batches, len)) if batches.is_empty() => {
                    task.held.shrink(len);
                    continue;
                }
                Some(Came::Rows(batches, len)) => {
                    (ready, held) = (batches.into(), len);
                    continue;
                }
                Some(Came::Failed(error)) => error,
                None => DataFusionError::Execution("a call ended before its rows".into()),
                Some(Came::End) => return None,
            };
            return Some((Err(error), None));
        }
    })
    .boxed()
}

#[async_trait]
impl WorkerChannel for Channel {
    async fn coordinator_channel(
        &mut self,
        headers: HeaderMap,
        request: SetPlanRequest,
        mut said: BoxStream<'static, CoordinatorToWorkerMsg>,
        _: ExecutionPlanMetricsSet,
        context: &Arc<TaskContext>,
    ) -> Result<BoxStream<'static, Result<WorkerToCoordinatorMsg>>> {
        if !request.work_unit_feed_declarations.is_empty() {
            let why = "plans that are fed with units of work";
            return Err(DataFusionError::NotImplemented(why.into()));
        }
        let what = What::Plan {
            key: request.task_key.into(),
            tasks: request.task_count,
            url: request.target_worker_url.to_string(),
            began: request.query_start_time_ns,
        };
        let text = Text::new(&headers, what, &request.plan.encode(context)?)?;
        let ending = Arc::new(Ending::default());
        let listening = Arc::clone(&ending);
        tokio::spawn(async move {
            // Without work units the end is the only message.
            while said.next().await.is_some() {}
            listening.over();
        });
        let (news, told) = unbounded_channel();
        let (channel, calling) = (self.clone(), Arc::clone(&ending));
        let run = move || {
            let done = channel.call(text, &calling, |said| {
                let bytes = match said {
                    Said::More(NEWS, bytes) => bytes,
                    Said::More(..) => return Err(foreign("something else than news")),
                    Said::All => return Ok(()),
                };
                let said = match serde_json::from_slice(&bytes).map_err(foreign)? {
                    News::Load(load) => WorkerToCoordinatorMsg::LoadInfo(load.into()),
                    News::NoMoreLoad => WorkerToCoordinatorMsg::LoadInfoEos,
                    News::Version(_) => return Err(foreign("a version")),
                };
                let _ = news.send(Ok(said));
                Ok(())
            });
            if let Err(error) = done {
                let _ = news.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name("weft-join-call".into());
        thread.spawn(run).map_err(external)?;
        let state = (told, CancelLater(ending));
        Ok(
            futures::stream::unfold(state, |(mut told, later)| async move {
                Some((told.recv().await?, (told, later)))
            })
            .boxed(),
        )
    }

    async fn execute_task(
        &mut self,
        headers: HeaderMap,
        request: ExecuteTaskRequest,
        _: ExecutionPlanMetricsSet,
        context: &Arc<TaskContext>,
    ) -> Result<Vec<BoxStream<'static, Result<RecordBatch>>>> {
        let config = DistributedConfig::from_session_config(context.session_config())?;
        let pool = context.memory_pool();
        let held = Arc::new(Held {
            reservation: Mutex::new(MemoryConsumer::new("weft-join-call").register(pool)),
            budget: config.worker_connection_buffer_budget_bytes,
            given_up: AtomicBool::new(false),
            freed: Condvar::new(),
        });
        let (first, end) = (request.target_partition_start, request.target_partition_end);
        let (head, encoded) = match request.producer_head {
            ProducerHead::None => (Head::None, Vec::new()),
            ProducerHead::BroadcastExec { output_partitions } => {
                (Head::Broadcast(output_partitions), Vec::new())
            }
            ProducerHead::RepartitionExec { partitioning } => {
                (Head::Repartition, partitioning.encode(context)?)
            }
        };
        let key = request.task_key.into();
        let text = |dropped, head| {
            let what = What::Task {
                key,
                first,
                end,
                head,
                dropped,
            };
            Text::new(&headers, what, &encoded)
        };
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (first..end).map(|_| unbounded_channel()).unzip();
        let task = Arc::new(Task {
            channel: self.clone(),
            waiting: Mutex::new(Some((senders, text(false, head)?))),
            dropped: Mutex::new(Some(text(true, head)?)),
            held,
            ending: Arc::default(),
            first,
        });
        let streams = receivers.into_iter();
        Ok(streams.map(|came| rows(Arc::clone(&task), came)).collect())
    }

    async fn get_worker_info(&mut self, _: GetWorkerInfoRequest) -> Result<GetWorkerInfoResponse> {
        let (channel, text) = (
            self.clone(),
            Text::new(&HeaderMap::new(), What::Version, &[])?,
        );
        let asking = tokio::task::spawn_blocking(move || {
            let mut version = None;
            channel.call(text, &Ending::default(), |said| {
                if let Said::More(NEWS, bytes) = said
                    && let News::Version(said) = serde_json::from_slice(&bytes).map_err(foreign)?
                {
                    version = Some(said);
                }
                Ok(())
            })?;
            version.ok_or_else(|| foreign("no version"))
        });
        let version = asking.await.map_err(external)??;
        Ok(GetWorkerInfoResponse { version })
    }
}
