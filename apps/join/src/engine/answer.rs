//! The worker's side: tasks of the engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use datafusion::error::{DataFusionError, Result};
use datafusion_distributed::{
    CoordinatorToWorkerMsg, DistributedExt, ExecuteTaskRequest, MaybeEncoded, ProducerHead,
    SetPlanRequest, Worker, WorkerQueryContext, WorkerToCoordinatorMsg,
};
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use url::Url;
use weft_roundabout::{Next, Node, Own, RingListener};

use super::call::Channels;
use super::files::runtime;
use super::said::{Call, Encoder, Head, NEWS, News, OVER, ROWS, VERSION, What};
use crate::batches::{Cut, external};
use crate::pull::WakeAtEnd;
use crate::talk::{ELEMENT, Outcome};

/// The time that a worker waits for another one.
const PATIENCE: Duration = Duration::from_secs(30);
/// Partitions that a call may ask for.
const PARTITIONS: usize = 4096;

fn refuse<T>(why: impl std::fmt::Display) -> Result<T> {
    Err(DataFusionError::Execution(why.to_string()))
}

/// The tasks of a worker.
pub struct Tasks(Worker);

impl Tasks {
    /// For the worker with this listener, which reads files below `dir`, and has `memory` bytes for all of them
    /// together.
    ///
    /// # Errors
    /// If a runtime with such settings cannot be made.
    pub fn new(
        listener: &Arc<RingListener>,
        dir: Option<PathBuf>,
        memory: Option<usize>,
    ) -> Result<Self> {
        let channels = Channels::new(vec![Arc::clone(listener)], PATIENCE);
        let session = move |context: WorkerQueryContext| {
            let channels = channels.clone();
            async move {
                let session = context.builder;
                Ok(session.with_distributed_channel_resolver(channels).build())
            }
        };
        let worker = Worker::from_session_builder(session)
            .with_runtime_env(runtime(dir, memory)?)
            .with_version(env!("CARGO_PKG_VERSION"));
        Ok(Self(worker))
    }

    /// Answers a call: JSON of this many bytes, followed by the engine's encoding.
    ///
    /// # Errors
    /// An error of the caller. Errors of the task are sent to the caller instead.
    pub fn answer(&self, mut node: Node, call: &[u8], json: u64, runtime: &Handle) -> Result<()> {
        let cut = usize::try_from(json).ok().filter(|&at| at <= call.len());
        let Some((json, encoded)) = cut.map(|at| call.split_at(at)) else {
            return refuse("a call that is longer than it is");
        };
        let call: Call = serde_json::from_slice(json).map_err(external)?;
        let done = if call.version == VERSION {
            self.run(&mut node, call, encoded.to_vec(), runtime)
        } else {
            refuse(format!(
                "the caller speaks version {}, this worker {VERSION}",
                call.version
            ))
        };
        let outcome = Outcome {
            here: true,
            error: done.err().map(|error| error.to_string()),
            ..Outcome::default()
        };
        outcome.give(&mut node)?;
        node.finish().map_err(external)?;
        Ok(())
    }

    fn run(&self, node: &mut Node, call: Call, encoded: Vec<u8>, runtime: &Handle) -> Result<()> {
        match call.what {
            What::Plan {
                key,
                tasks,
                url,
                began,
            } => {
                let request = SetPlanRequest {
                    task_key: key.into(),
                    task_count: tasks,
                    plan: MaybeEncoded::Encoded(encoded),
                    work_unit_feed_declarations: Vec::new(),
                    target_worker_url: Url::parse(&url).map_err(external)?,
                    query_start_time_ns: began,
                };
                self.plan(node, headers(call.headers)?, request, runtime)
            }
            What::Task {
                key,
                first,
                end,
                head,
                dropped,
            } => {
                if end.checked_sub(first).is_none_or(|all| all > PARTITIONS) {
                    return refuse("partitions that cannot be");
                }
                let request = ExecuteTaskRequest {
                    task_key: key.into(),
                    target_partition_start: first,
                    target_partition_end: end,
                    producer_head: match head {
                        Head::None => ProducerHead::None,
                        Head::Broadcast(output_partitions) => {
                            ProducerHead::BroadcastExec { output_partitions }
                        }
                        Head::Repartition => ProducerHead::RepartitionExec {
                            partitioning: MaybeEncoded::Encoded(encoded),
                        },
                    },
                };
                self.task(node, request, dropped, runtime)
            }
            What::Version => {
                let (said, mut news) = mpsc::channel(1);
                let version = News::Version(self.0.version().to_owned());
                let version = serde_json::to_vec(&version).map_err(external)?;
                // There is room for one.
                let _ = said.try_send(Ok(version));
                drop(said);
                give(node, NEWS, &mut news, || ())
            }
        }
    }

    /// Keeps a part of the plan for as long as the coordinator is connected, and reports its progress.
    fn plan(
        &self,
        node: &mut Node,
        headers: HeaderMap,
        request: SetPlanRequest,
        runtime: &Handle,
    ) -> Result<()> {
        let (coordinator, listening) = mpsc::unbounded_channel();
        // The task gets no work units.
        let _ = coordinator.send(Ok(CoordinatorToWorkerMsg::WorkUnitEos));
        let listening = futures::stream::unfold(listening, |mut listening| async move {
            Some((listening.recv().await?, listening))
        });
        let set = self
            .0
            .coordinator_channel(headers, request, listening.boxed());
        let mut news = runtime.block_on(set)?;
        let (said, mut saying) = mpsc::channel(16);
        // There may be no more news long before the coordinator has finished, and with the call the task ends.
        let mut stays = Some((coordinator, said.clone()));
        let waker = node.waker();
        let mut telling = JoinSet::new();
        telling.spawn_on(
            async move {
                while let Some(next) = news.next().await {
                    let next = match next {
                        Ok(WorkerToCoordinatorMsg::LoadInfo(load)) => Ok(News::Load(load.into())),
                        Ok(WorkerToCoordinatorMsg::LoadInfoEos) => Ok(News::NoMoreLoad),
                        // The engine encodes metrics for its own transport only.
                        Ok(WorkerToCoordinatorMsg::TaskMetrics(_)) => continue,
                        Err(error) => Err(error),
                    };
                    let next = next.and_then(|n| serde_json::to_vec(&n).map_err(external));
                    if said.send(next).await.is_err() {
                        break;
                    }
                    waker.wake();
                }
                drop(said);
                waker.wake();
            },
            runtime,
        );
        give(node, NEWS, &mut saying, || drop(stays.take()))
    }

    fn task(
        &self,
        node: &mut Node,
        request: ExecuteTaskRequest,
        dropped: bool,
        runtime: &Handle,
    ) -> Result<()> {
        let first = request.target_partition_start;
        let (streams, _) = runtime.block_on(self.0.execute_task(request))?;
        if dropped {
            return Ok(());
        }
        let (parts, mut made) = mpsc::channel(2 * streams.len() + 2);
        let mut making = JoinSet::new();
        for (partition, mut stream) in (first..).zip(streams) {
            let (parts, waker) = (parts.clone(), node.waker());
            making.spawn_on(
                async move {
                    // The sender has to be gone when the node wakes: a panic drops variables from the last to the first.
                    let at_end = WakeAtEnd(waker.clone());
                    let parts = parts;
                    let mut encoder = match Encoder::new(partition, &stream.schema()) {
                        Ok(encoder) => encoder,
                        Err(error) => return drop(parts.send(Err(error)).await),
                    };
                    while let Some(batch) = stream.next().await {
                        let part = batch.and_then(|batch| encoder.encode(batch));
                        if parts.send(part).await.is_err() {
                            break;
                        }
                        waker.wake();
                    }
                    drop((parts, at_end));
                },
                runtime,
            );
        }
        drop(parts);
        // A task that panics ends the rows too soon; its result reports that.
        give(node, ROWS, &mut made, || ())?;
        while let Some(done) = runtime.block_on(making.join_next()) {
            done.map_err(external)?;
        }
        Ok(())
    }
}

fn headers(said: Vec<(String, Vec<u8>)>) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in said {
        let name = HeaderName::try_from(name).map_err(external)?;
        headers.append(name, HeaderValue::try_from(value).map_err(external)?);
    }
    Ok(headers)
}

/// Sends what `made` yields, small pieces together, to its end. `over` is called when the caller has sent its last
/// message.
fn give(
    node: &mut Node,
    word: u64,
    made: &mut mpsc::Receiver<Result<Vec<u8>>>,
    mut over: impl FnMut(),
) -> Result<()> {
    let mut cut: Option<Cut> = None;
    let mut ended = false;
    loop {
        // A message whose first bytes are sent gets no further pieces: the caller joins all of it.
        if cut.is_none() {
            while cut.as_ref().map_or(0, Cut::left) < ELEMENT / 2 && !ended {
                match (made.try_recv(), &mut cut) {
                    (Ok(next), None) => cut = Some(Cut::new(next?, [word, 0, 0, 0])),
                    (Ok(next), Some(cut)) => cut.add(next?),
                    (Err(mpsc::error::TryRecvError::Empty), _) => break,
                    (Err(mpsc::error::TryRecvError::Disconnected), _) => ended = true,
                }
                if word != ROWS {
                    // News are sent one by one.
                    break;
                }
            }
            if cut.is_none() && ended {
                return Ok(());
            }
        }
        let own = if cut.is_some() { Own::Now } else { Own::Later };
        match node.next_with(own).map_err(external)? {
            Next::Room(room) => {
                if let Some(filling) = &mut cut
                    && !filling.fill(room).map_err(external)?
                {
                    cut = None;
                }
            }
            Next::Element(element) if element.user()[0] == OVER => over(),
            _ => {}
        }
    }
}
