//! Loaded tables in plans: [`LoadedExec`] has the rows of this worker's part.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::Session;
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Statistics, project_schema};
use datafusion::datasource::{TableProvider, TableType};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::coop::cooperative;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType, SchedulingType};
use datafusion::physical_plan::memory::MemoryStream;
use datafusion::physical_plan::statistics::StatisticsArgs;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
};
use futures::StreamExt;

use crate::store::{TablePart, schema_from};
use crate::talk::Loaded;

/// A loaded table of one query.
#[derive(Debug, Clone)]
pub struct LoadedTable {
    about: Arc<Loaded>,
    schema: SchemaRef,
    /// `None` on a worker that has no part of it.
    part: Option<Arc<TablePart>>,
}

impl LoadedTable {
    /// The table that a question names, with this worker's part of it.
    ///
    /// # Errors
    /// If there is neither a part nor a schema.
    pub fn new(about: &Loaded, part: Option<Arc<TablePart>>) -> Result<Self> {
        let schema = match (&part, &about.schema) {
            (Some(part), _) => Arc::clone(&part.schema),
            (None, Some(text)) => schema_from(text)?,
            (None, None) => {
                let why = format!("table {}: no part and no schema", about.name);
                return Err(DataFusionError::Execution(why));
            }
        };
        let about = Loaded {
            schema: None,
            ..about.clone()
        };
        Ok(Self {
            about: Arc::new(about),
            schema,
            part,
        })
    }
}

/// The rows of all parts together. They are inexact, so that no plan takes them for an answer.
fn statistics(about: &Loaded, schema: &SchemaRef) -> Statistics {
    let mut statistics = Statistics::new_unknown(schema);
    statistics.num_rows = usize::try_from(about.rows).map_or(Precision::Absent, Precision::Inexact);
    statistics
}

#[async_trait]
impl TableProvider for LoadedTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        _: &[Expr],
        _: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(LoadedExec::new(
            self.clone(),
            projection.cloned(),
        )?))
    }

    fn statistics(&self) -> Option<Statistics> {
        Some(statistics(&self.about, &self.schema))
    }
}

/// The rows of this worker's part of a loaded table.
#[derive(Debug)]
pub struct LoadedExec {
    table: LoadedTable,
    projection: Option<Vec<usize>>,
    properties: Arc<PlanProperties>,
}

impl LoadedExec {
    fn new(table: LoadedTable, projection: Option<Vec<usize>>) -> Result<Self> {
        let schema = project_schema(&table.schema, projection.as_ref())?;
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        )
        .with_scheduling_type(SchedulingType::Cooperative);
        Ok(Self {
            table,
            projection,
            properties: Arc::new(properties),
        })
    }

    /// This worker's part.
    pub fn part(&self) -> Option<&Arc<TablePart>> {
        self.table.part.as_ref()
    }

    /// The number in the table of a column of the rows.
    pub fn column(&self, column: usize) -> Option<usize> {
        match &self.projection {
            Some(projection) => projection.get(column).copied(),
            None => Some(column),
        }
    }

    /// The layout of its parts, if the hash of this column says in which one a row is.
    pub fn layout_by(&self, column: usize) -> Option<&[Option<u32>]> {
        let field = self.table.schema.fields().get(self.column(column)?)?;
        let about = &self.table.about;
        (about.by.as_ref() == Some(field.name())).then_some(&about.layout)
    }
}

impl DisplayAs for LoadedExec {
    /// The same on all workers: they compare their plans.
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let about = &self.table.about;
        let fields = self.properties.eq_properties.schema().fields();
        let columns: Vec<_> = fields.iter().map(|field| field.name().as_str()).collect();
        let columns = columns.join(", ");
        let load = u128::from_be_bytes(about.load);
        let (name, rows) = (&about.name, about.rows);
        write!(
            f,
            "LoadedExec: table={name}, rows={rows}, columns=[{columns}]"
        )?;
        if let Some(by) = &about.by {
            write!(f, ", by={by}")?;
        }
        write!(f, ", load={load:032x}")
    }
}

impl ExecutionPlan for LoadedExec {
    fn name(&self) -> &'static str {
        "LoadedExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
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
        if children.is_empty() {
            return Ok(self);
        }
        Err(DataFusionError::Internal("a leaf has no children".into()))
    }

    fn statistics_from_inputs(
        &self,
        _: &[Arc<Statistics>],
        _: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        Ok(Arc::new(statistics(&self.table.about, &self.schema())))
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (part, schema) = (self.table.part.clone(), self.schema());
        let batches = part
            .as_ref()
            .map_or_else(Vec::new, |part| part.batches.clone());
        let rows = MemoryStream::try_new(batches, Arc::clone(&schema), self.projection.clone())?;
        // The part takes its memory for as long as rows of it can be asked for.
        let rows = rows.inspect(move |_| {
            let _ = &part;
        });
        let rows = RecordBatchStreamAdapter::new(schema, rows);
        Ok(Box::pin(cooperative(rows)))
    }
}
