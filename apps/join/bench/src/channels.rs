//! Batches from one process to another: on weft's channel, and on the gRPC of `datafusion-distributed`, with its compression and without.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use datafusion::error::Result;
use datafusion::execution::{SessionStateBuilder, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_distributed::{
    ChannelResolver, DistributedExt, ExecuteTaskRequest, MaybeEncoded, ProducerHead,
    SetPlanRequest, TaskKey, grpc,
};
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue};
use url::Url;
use uuid::Uuid;
use weft_join::engine::{Channels, url_of};
use weft_join::shell::listeners;

use crate::compare::{Way, compare};
use crate::external;
use crate::process::{Part, Process};

/// Bytes of a row: eight numbers.
const ROW: usize = 64;

struct Stack {
    name: &'static str,
    process: Process,
    channels: Arc<dyn ChannelResolver + Send + Sync>,
    url: Url,
    headers: HeaderMap,
    calls: Cell<u128>,
}

fn compression(of: &'static str) -> HeaderMap {
    let name = "x-datafusion-distributed-config-distributed.compression";
    let name = HeaderName::from_static(name);
    HeaderMap::from_iter([(name, HeaderValue::from_static(of))])
}

fn stacks() -> Result<Vec<Stack>> {
    let process = Process::start(Part::Weft)?;
    let listeners = listeners(&[process.address]).map_err(external)?;
    let mut stacks = vec![Stack {
        name: "weft",
        url: url_of(process.address)?,
        process,
        channels: Arc::new(Channels::new(listeners, Duration::from_secs(30))),
        headers: HeaderMap::new(),
        calls: Cell::new(0),
    }];
    for (name, of) in [("gRPC, lz4", "lz4"), ("gRPC", "none")] {
        let process = Process::start(Part::Grpc)?;
        stacks.push(Stack {
            name,
            url: Url::parse(&format!("http://{}", process.address)).map_err(external)?,
            process,
            channels: Arc::new(grpc::DefaultChannelResolver::default()),
            headers: compression(of),
            calls: Cell::new(0),
        });
    }
    Ok(stacks)
}

pub fn measure(rows: usize, runs: usize) -> Result<()> {
    let stacks = stacks()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let columns = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| format!("value {name}"));
    let columns = columns.join(", ");
    let sql = format!("SELECT {columns} FROM generate_series(1, {rows})");
    let plan = runtime.block_on(async {
        let config = SessionConfig::new().with_target_partitions(1);
        let session = SessionContext::new_with_config(config);
        session.sql(&sql).await?.create_physical_plan().await
    })?;
    let pids: Vec<u32> = stacks.iter().map(|stack| stack.process.id()).collect();
    let (runtime, plan) = (&runtime, &plan);
    let ways = stacks.iter().map(|stack| {
        let ask = move || Ok(runtime.block_on(exchange(stack, plan))?.to_string());
        Way::new(stack.name, ask)
    });
    let size = format!("{:.3} GB", (rows * ROW) as f64 / 1e9);
    compare("channels", &size, &pids, runs, ways.collect())
}

fn context(stack: &Stack) -> Arc<TaskContext> {
    SessionStateBuilder::new()
        .with_default_features()
        .with_distributed_channel_resolver(Arc::clone(&stack.channels))
        .build()
        .task_ctx()
}

/// Sends the plan and receives its rows.
async fn exchange(stack: &Stack, plan: &Arc<dyn ExecutionPlan>) -> Result<usize> {
    let context = context(stack);
    let mut channel = stack.channels.get_worker_client_for_url(&stack.url).await?;
    stack.calls.set(stack.calls.get() + 1);
    let task_key = TaskKey {
        query_id: Uuid::from_u128(stack.calls.get()),
        stage_id: 0,
        task_number: 0,
    };
    let request = SetPlanRequest {
        task_key,
        task_count: 1,
        plan: MaybeEncoded::Decoded(Arc::clone(plan)),
        work_unit_feed_declarations: Vec::new(),
        target_worker_url: stack.url.clone(),
        query_start_time_ns: 0,
    };
    let (over, waiting) = tokio::sync::oneshot::channel::<()>();
    let silent = futures::stream::once(waiting).filter_map(|_| std::future::ready(None));
    let headers = stack.headers.clone();
    let news = channel.coordinator_channel(
        headers.clone(),
        request,
        silent.boxed(),
        Default::default(),
        &context,
    );
    let mut news = news.await?;
    let listening = tokio::spawn(async move { while news.next().await.is_some() {} });
    let request = ExecuteTaskRequest {
        task_key,
        target_partition_start: 0,
        target_partition_end: 1,
        producer_head: ProducerHead::None,
    };
    let rows = channel.execute_task(headers, request, Default::default(), &context);
    let mut count = 0;
    for mut rows in rows.await? {
        while let Some(batch) = rows.next().await {
            count += batch?.num_rows();
        }
    }
    drop(over);
    listening.await.map_err(external)?;
    Ok(count)
}
