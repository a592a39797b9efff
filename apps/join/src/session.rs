//! The session of a worker's query.

use std::sync::Arc;

use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::band_rule::Bands;
use crate::exec::Query;
use crate::rule::{Distribute, RowsAt};

/// A session that plans for the ring: one partition a node, and no dynamic filters, which would describe one node's part of S
/// to a scan.
pub fn context(query: &Arc<Query>, memory: Option<usize>, rows: RowsAt) -> Result<SessionContext> {
    let mut config = SessionConfig::new().with_target_partitions(1);
    let options = config.options_mut();
    options.optimizer.enable_dynamic_filter_pushdown = false;
    options.optimizer.enable_join_dynamic_filter_pushdown = false;
    options.optimizer.enable_topk_dynamic_filter_pushdown = false;
    options.optimizer.enable_aggregate_dynamic_filter_pushdown = false;
    options.execution.parquet.schema_force_view_types = false;
    options.sql_parser.map_string_types_to_utf8view = false;
    let mut environment = RuntimeEnvBuilder::new();
    if let Some(memory) = memory {
        environment = environment.with_memory_limit(memory, 1.0);
    }
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_runtime_env(environment.build_arc()?)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(Bands))
        .with_physical_optimizer_rule(Arc::new(Distribute::new(Arc::clone(query), memory, rows)))
        .build();
    Ok(SessionContext::new_with_state(state))
}
