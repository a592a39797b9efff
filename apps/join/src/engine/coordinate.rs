//! The shell as the engine's coordinator: it plans, sends the parts of the plan out, and runs the last one itself.

use std::thread;
use std::time::{Duration, Instant};

use datafusion::arrow::array::RecordBatch;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_distributed::{DistributedExt, SessionStateBuilderExt, WorkerResolver};
use futures::StreamExt;
use url::Url;
use weft_roundabout::Error;

use super::call::{Channels, url_of};
use super::files::runtime;
use crate::shell::{Question, Trouble, listeners};
use crate::sql::{STACK, query, register};
use crate::tables::{is_unknown, not_in_files};

/// The time that the tasks of a failed query get to end.
const GRACE: Duration = Duration::from_secs(2);

/// A query for the engine.
pub struct Asked<'a> {
    /// The query, its tables and workers. The shell reads the tables' schemas itself.
    pub question: &'a Question,
    /// Bytes of a file that a partition reads, about; `None` is the engine's own choice. With less a query uses more workers.
    pub split: Option<usize>,
    /// Partitions of each task.
    pub partitions: usize,
}

struct Workers(Vec<Url>);

impl WorkerResolver for Workers {
    fn get_urls(&self) -> Result<Vec<Url>> {
        Ok(self.0.clone())
    }
}

/// A session whose plans run on workers.
///
/// # Errors
/// If a listener cannot be opened, or a table cannot be read.
pub async fn context(asked: &Asked<'_>) -> Result<SessionContext> {
    let question = asked.question;
    let urls = question.workers.iter().map(|&worker| url_of(worker));
    let urls = urls.collect::<Result<Vec<_>>>()?;
    let listeners =
        listeners(&question.workers).map_err(|e| DataFusionError::External(Box::new(e)))?;
    // With one partition the engine has nothing to distribute.
    let partitions = asked.partitions.max(2);
    let mut state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(SessionConfig::new().with_target_partitions(partitions))
        .with_runtime_env(runtime(None, None)?)
        .with_distributed_planner()
        .with_distributed_worker_resolver(Workers(urls))
        .with_distributed_channel_resolver(Channels::new(listeners, question.patience))
        // They would travel in messages of the engine's own transport.
        .with_distributed_metrics_collection(false)?;
    if let Some(split) = asked.split {
        state = state.with_distributed_file_scan_config_bytes_per_partition(split)?;
    }
    let context = SessionContext::from(state.build());
    let pieces = partitions * question.workers.len();
    for table in &question.tables {
        register(&context, table, None, pieces).await?;
    }
    Ok(context)
}

/// Runs the query, and passes the rows to `hear`, whose error ends the query.
///
/// # Errors
/// The first failure.
pub fn stream(
    asked: &Asked<'_>,
    mut hear: impl FnMut(RecordBatch) -> Result<(), Trouble>,
) -> Result<(), Trouble> {
    let question = asked.question;
    if question.workers.is_empty() {
        return Err(Trouble::Query("no workers".into()));
    }
    let missing = not_in_files(&question.sql, &question.tables);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_stack_size(STACK)
        .build()
        .map_err(|e| Trouble::Query(e.to_string()))?;
    let done = runtime.block_on(async {
        let context = context(asked).await.map_err(trouble)?;
        let frame = query(&context, &question.sql).await;
        let mut rows = frame
            .map_err(|error| match is_unknown(&error.to_string(), &missing) {
                Some(name) => Trouble::Query(format!(
                    "table {name}: no --table names its file; loaded tables are for --engine ring"
                )),
                None => trouble(error),
            })?
            .execute_stream()
            .await
            .map_err(trouble)?;
        while let Some(batch) = rows.next().await {
            hear(batch.map_err(trouble)?)?;
        }
        Ok(())
    });
    if done.is_err() {
        // Tasks of the engine that wait for others panic if these are cancelled. They end soon without that.
        let end = Instant::now() + GRACE;
        let alive = || runtime.metrics().num_alive_tasks() > 0;
        while alive() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
    // Calls without a receiver end in parallel.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

fn trouble(error: DataFusionError) -> Trouble {
    if let DataFusionError::External(cause) = error.find_root()
        && let Some(cause) = cause.downcast_ref::<Error>()
    {
        return Trouble::Peer(cause.to_string());
    }
    Trouble::Query(error.to_string())
}
