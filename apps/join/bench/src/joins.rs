//! TPC-H's lineitem joined with its orders, on two workers: Data Roundabout, `datafusion-distributed` over weft and over gRPC and DataFusion
//! in one process.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::error::ArrowError;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::file::properties::WriterProperties;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_distributed::{
    ChannelResolver, CompressionType, DistributedExt, SessionStateBuilderExt, WorkerResolver, grpc,
};
use tokio::runtime::Runtime;
use tpchgen::generators::{LineItemGenerator, OrderGenerator};
use tpchgen_arrow::{LineItemArrow, OrderArrow};
use url::Url;
use weft_join::engine::{self, Asked};
use weft_join::shell::{Question, Trouble, ask};
use weft_join::sql::register;
use weft_join::talk::Table;

use crate::compare::{Way, compare, text};
use crate::external;
use crate::process::{Part, Process};

/// Rows of a row group, which a worker of a ring reads as a whole.
const GROUP: usize = 37_500;
/// Partitions of one process, and of each task.
const PARTITIONS: usize = 2;
const SQL: &str = "SELECT count(*), sum(l_extendedprice), max(l_comment), max(o_totalprice) \
                   FROM lineitem JOIN orders ON l_orderkey = o_orderkey";

/// Writes a table as one file.
pub fn write(
    folder: &Path,
    name: &str,
    batches: impl Iterator<Item = std::result::Result<RecordBatch, ArrowError>>,
) -> Result<Table> {
    let file = folder.join(format!("{name}.parquet"));
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(GROUP))
        .build();
    let mut writer = None;
    for batch in batches {
        let batch = batch?;
        let writer = match &mut writer {
            Some(writer) => writer,
            none => none.insert(ArrowWriter::try_new(
                File::create(&file)?,
                batch.schema(),
                Some(properties.clone()),
            )?),
        };
        writer.write(&batch)?;
    }
    if let Some(writer) = writer {
        writer.close()?;
    }
    Ok(Table {
        name: name.into(),
        file: file.to_string_lossy().into_owned(),
    })
}

/// A query with its tables and its workers.
pub struct Setting<'a> {
    pub runtime: Runtime,
    pub tables: Vec<Table>,
    pub sql: &'a str,
    pub weft: Vec<Process>,
}

struct Workers(Vec<Url>);

impl WorkerResolver for Workers {
    fn get_urls(&self) -> Result<Vec<Url>> {
        Ok(self.0.clone())
    }
}

fn failed(trouble: Trouble) -> DataFusionError {
    match trouble {
        Trouble::Peer(why) | Trouble::Query(why) => DataFusionError::Execution(why),
    }
}

fn config() -> SessionConfig {
    SessionConfig::new().with_target_partitions(PARTITIONS)
}

impl<'a> Setting<'a> {
    pub fn new(tables: Vec<Table>, sql: &'a str) -> Result<Self> {
        let weft = [Process::start(Part::Weft)?, Process::start(Part::Weft)?];
        Ok(Self {
            runtime: Runtime::new()?,
            tables,
            sql,
            weft: weft.into(),
        })
    }

    fn question(&self) -> Question {
        Question {
            workers: self.weft.iter().map(|worker| worker.address).collect(),
            tables: self.tables.clone(),
            sql: self.sql.into(),
            element: 4 << 20,
            patience: Duration::from_secs(30),
        }
    }

    async fn collect(&self, context: &SessionContext) -> Result<String> {
        let pieces = context.copied_config().target_partitions();
        for table in &self.tables {
            register(context, table, None, pieces).await?;
        }
        text(&context.sql(self.sql).await?.collect().await?)
    }

    pub fn alone(&self) -> Result<String> {
        let context = SessionContext::new_with_config(config());
        self.runtime.block_on(self.collect(&context))
    }

    pub fn ring(&self) -> Result<String> {
        text(&ask(&self.question(), |_| ()).map_err(failed)?.batches)
    }

    fn over_weft(&self) -> Result<String> {
        let mut batches = Vec::new();
        let asked = Asked {
            question: &self.question(),
            split: Some(1),
            partitions: PARTITIONS,
        };
        let done = engine::stream(&asked, |batch| {
            batches.push(batch);
            Ok(())
        });
        done.map_err(failed)?;
        text(&batches)
    }

    fn over_grpc(
        &self,
        workers: &[Process],
        channels: &Arc<dyn ChannelResolver + Send + Sync>,
        compression: Option<CompressionType>,
    ) -> Result<String> {
        let urls = workers.iter();
        let urls = urls.map(|w| Url::parse(&format!("http://{}", w.address)).map_err(external));
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(config())
            .with_distributed_planner()
            .with_distributed_worker_resolver(Workers(urls.collect::<Result<_>>()?))
            .with_distributed_channel_resolver(Arc::clone(channels))
            .with_distributed_metrics_collection(false)?
            .with_distributed_file_scan_config_bytes_per_partition(1)?
            .with_distributed_compression(compression)?;
        let context = SessionContext::from(state.build());
        self.runtime.block_on(self.collect(&context))
    }
}

pub fn measure(scale: f64, runs: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let lines = LineItemArrow::new(LineItemGenerator::new(scale, 1, 1));
    let orders = OrderArrow::new(OrderGenerator::new(scale, 1, 1));
    let tables = vec![
        write(folder.path(), "lineitem", lines)?,
        write(folder.path(), "orders", orders)?,
    ];
    let setting = Setting::new(tables, SQL)?;
    let grpc = [Process::start(Part::Grpc)?, Process::start(Part::Grpc)?];
    let channels: Arc<dyn ChannelResolver + Send + Sync> =
        Arc::new(grpc::DefaultChannelResolver::default());
    let lz4 = Some(CompressionType::LZ4_FRAME);
    let pids: Vec<u32> = setting.weft.iter().chain(&grpc).map(Process::id).collect();
    let ways = vec![
        Way::new("DataFusion, one process", || setting.alone()),
        Way::new("ring", || setting.ring()),
        Way::new("distributed over weft", || setting.over_weft()),
        Way::new("distributed over gRPC, lz4", || {
            setting.over_grpc(&grpc, &channels, lz4)
        }),
        Way::new("distributed over gRPC", || {
            setting.over_grpc(&grpc, &channels, None)
        }),
    ];
    compare("join", &format!("SF {scale}"), &pids, runs, ways)
}
