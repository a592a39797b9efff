//! [`IndexedJoinExec`]: a hash join whose build side is a loaded part, with an index of the part in place of a hash table of its own.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions, UInt32Array,
};
use datafusion::arrow::buffer::NullBuffer;
use datafusion::arrow::compute::kernels::cmp::{eq, not_distinct};
use datafusion::arrow::compute::{and, filter_record_batch, interleave, take};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::cast::as_boolean_array;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{JoinSide, JoinType, NullEquality};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{PhysicalExpr, PhysicalExprRef};
use datafusion::physical_plan::joins::HashJoinExec;
use datafusion::physical_plan::joins::utils::{ColumnIndex, JoinFilter, build_join_schema};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, Distribution, ExecutionPlan, PlanProperties,
    replace_children_if_necessary,
};
use futures::StreamExt;

use crate::index::{Index, hashes};
use crate::loaded::LoadedExec;
use crate::store::TablePart;

/// Candidates that are looked at for one batch of output, for each of its rows.
const TRIES: usize = 16;

/// The parameters of a join.
#[derive(Debug)]
struct Shape {
    /// The columns of the part with its keys.
    keys: Vec<usize>,
    /// The other side's keys.
    probe: Vec<PhysicalExprRef>,
    /// The columns of the part that the build side has.
    build: Vec<usize>,
    nulls: NullEquality,
    filter: Option<JoinFilter>,
    schema: SchemaRef,
    /// The source of each column of `schema`.
    columns: Vec<ColumnIndex>,
}

/// An inner hash join with an index of the loaded part that is its build side.
#[derive(Debug)]
pub struct IndexedJoinExec {
    /// The join without the index, for a part whose memory has no space for one.
    join: Arc<dyn ExecutionPlan>,
    shape: Arc<Shape>,
    properties: Arc<PlanProperties>,
}

impl IndexedJoinExec {
    /// In place of this join, if its build side is a loaded part.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<Self> {
        let join = plan.downcast_ref::<HashJoinExec>()?;
        let inner = *join.join_type() == JoinType::Inner && !join.null_aware;
        if !inner || plan.fetch().is_some() {
            return None;
        }
        let (left, right) = (join.left().schema(), join.right().schema());
        let table = join.left().downcast_ref::<LoadedExec>()?;
        let (mut keys, mut probe) = (Vec::new(), Vec::new());
        for (l, r) in join.on() {
            let kind = l.data_type(&left).ok()?;
            // Arrow's kernels have no equality of nested values, and one of floats that keeps -0.0 and 0.0 apart.
            if kind.is_nested() || has_floats(&kind) || r.data_type(&right).ok()? != kind {
                return None;
            }
            keys.push(table.column(l.downcast_ref::<Column>()?.index())?);
            probe.push(Arc::clone(r));
        }
        let build = 0..left.fields().len();
        let build = build.map(|column| table.column(column));
        let (_, columns) = build_join_schema(&left, &right, &JoinType::Inner);
        let columns = match &join.projection {
            Some(projection) => projection.iter().map(|&i| columns[i].clone()).collect(),
            None => columns,
        };
        let shape = Shape {
            keys,
            probe,
            build: build.collect::<Option<_>>()?,
            nulls: join.null_equality(),
            filter: join.filter().cloned(),
            schema: plan.schema(),
            columns,
        };
        Some(Self {
            join: Arc::clone(plan),
            shape: Arc::new(shape),
            properties: Arc::clone(plan.properties()),
        })
    }
}

fn has_floats(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => has_floats(values),
        kind => kind.is_floating(),
    }
}

impl DisplayAs for IndexedJoinExec {
    fn fmt_as(&self, form: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(form, DisplayFormatType::TreeRender) {
            return Ok(());
        }
        let keys = self.shape.probe.iter().map(ToString::to_string);
        let keys: Vec<_> = keys.collect();
        write!(f, "IndexedJoinExec: probe=[{}]", keys.join(", "))?;
        if let Some(filter) = &self.shape.filter {
            write!(f, ", filter={}", filter.expression())?;
        }
        Ok(())
    }
}

impl ExecutionPlan for IndexedJoinExec {
    fn name(&self) -> &'static str {
        "IndexedJoinExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn required_input_distribution(&self) -> Vec<Distribution> {
        vec![Distribution::SinglePartition, Distribution::SinglePartition]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.join.children()
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.join.apply_expressions(f)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let join = replace_children_if_necessary(Arc::clone(&self.join), children)?;
        Ok(match Self::of(&join) {
            Some(indexed) => Arc::new(indexed),
            None => join,
        })
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let children = self.join.children();
        let (Some(left), Some(right)) = (children.first(), children.get(1)) else {
            return Err(DataFusionError::Internal("two children are needed".into()));
        };
        let part = left.downcast_ref::<LoadedExec>().and_then(LoadedExec::part);
        // Without a part there is nothing to look up, and without space for an index there is the other way.
        let Some(part) = part.cloned() else {
            return self.join.execute(partition, context);
        };
        let Some(index) = part.index(&self.shape.keys)? else {
            return self.join.execute(partition, context);
        };
        let size = context.session_config().batch_size().max(1);
        let work = Work {
            shape: Arc::clone(&self.shape),
            part,
            index,
            r: right.execute(partition, context)?,
            probe: None,
            size,
        };
        let rows = futures::stream::try_unfold(work, |mut work| async {
            loop {
                match work.step().await? {
                    Step::Over => return Ok(None),
                    Step::Rows(batch) if batch.num_rows() > 0 => return Ok(Some((batch, work))),
                    // Candidates without a match produce no batch to wait for: other tasks run here, and a cancelled query ends here.
                    _ => tokio::task::yield_now().await,
                }
            }
        });
        let schema = Arc::clone(&self.shape.schema);
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }
}

/// The execution of a join.
struct Work {
    shape: Arc<Shape>,
    part: Arc<TablePart>,
    index: Arc<Index>,
    r: SendableRecordBatchStream,
    probe: Option<Probe>,
    /// Rows of an output batch.
    size: usize,
}

/// A batch of R that is being joined.
struct Probe {
    batch: RecordBatch,
    keys: Vec<ArrayRef>,
    hashes: Vec<u64>,
    /// Rows whose keys can equal any.
    valid: Option<NullBuffer>,
    row: usize,
    /// The candidates of the row before.
    range: Range<usize>,
}

enum Step {
    Rows(RecordBatch),
    Nothing,
    Over,
}

impl Work {
    async fn step(&mut self) -> Result<Step> {
        let Some(mut probe) = self.probe.take() else {
            let Some(batch) = self.r.next().await else {
                return Ok(Step::Over);
            };
            self.probe = Some(self.begin(batch?)?);
            return Ok(Step::Nothing);
        };
        let (over, places, rows) = self.candidates(&mut probe);
        let step = if rows.is_empty() {
            Step::Nothing
        } else {
            Step::Rows(self.matches(&probe, &places, &UInt32Array::from(rows))?)
        };
        self.probe = (!over).then_some(probe);
        Ok(step)
    }

    fn begin(&self, batch: RecordBatch) -> Result<Probe> {
        let rows = batch.num_rows();
        let keys = self.shape.probe.iter();
        let keys: Vec<ArrayRef> = keys
            .map(|key| key.evaluate(&batch)?.into_array(rows))
            .collect::<Result<_>>()?;
        let mut valid = None;
        if self.shape.nulls == NullEquality::NullEqualsNothing {
            for key in &keys {
                valid = NullBuffer::union(valid.as_ref(), key.logical_nulls().as_ref());
            }
        }
        Ok(Probe {
            hashes: hashes(&keys, rows)?,
            batch,
            keys,
            valid,
            row: 0,
            range: 0..0,
        })
    }

    /// The next pairs whose hashes agree: places in the part, and rows of R. Also whether the batch of R has no more.
    fn candidates(&self, probe: &mut Probe) -> (bool, Vec<(usize, usize)>, Vec<u32>) {
        let (mut places, mut rows) = (Vec::new(), Vec::new());
        let mut tries = self.size.saturating_mul(TRIES);
        loop {
            if rows.len() >= self.size || tries == 0 {
                return (false, places, rows);
            }
            tries -= 1;
            if let Some(entry) = probe.range.next() {
                let row = probe.row - 1;
                if let Some(found) = self.index.row(entry, probe.hashes[row]) {
                    places.push(self.index.place(found));
                    rows.push(row as u32);
                }
                continue;
            }
            let Some(&hash) = probe.hashes.get(probe.row) else {
                return (true, places, rows);
            };
            let row = probe.row;
            if probe.valid.as_ref().is_none_or(|valid| valid.is_valid(row)) {
                probe.range = self.index.candidates(hash);
            }
            probe.row += 1;
        }
    }

    /// The rows of the pairs whose keys are equal, and which pass the filter.
    fn matches(
        &self,
        probe: &Probe,
        places: &[(usize, usize)],
        rows: &UInt32Array,
    ) -> Result<RecordBatch> {
        let shape = &self.shape;
        let mut same: Option<BooleanArray> = None;
        for (&column, key) in shape.keys.iter().zip(&probe.keys) {
            let (build, key) = (self.build(column, places)?, take(key, rows, None)?);
            let equal = match shape.nulls {
                NullEquality::NullEqualsNothing => eq(&build, &key)?,
                NullEquality::NullEqualsNull => not_distinct(&build, &key)?,
            };
            same = Some(match same {
                Some(same) => and(&same, &equal)?,
                None => equal,
            });
        }
        let kept = same.ok_or_else(|| DataFusionError::Internal("a join without keys".into()))?;
        let (mut places, mut rows) = (places.to_vec(), rows.clone());
        if kept.true_count() < kept.len() {
            (places, rows) = only(&kept, &places, &rows);
        }
        if let Some(filter) = &shape.filter {
            let columns = filter.column_indices();
            let pairs = self.gather(filter.schema(), columns, probe, &places, &rows)?;
            let kept = filter.expression().evaluate(&pairs)?;
            let kept = kept.into_array(pairs.num_rows())?;
            let joined = self.gather(&shape.schema, &shape.columns, probe, &places, &rows)?;
            return Ok(filter_record_batch(&joined, as_boolean_array(&kept)?)?);
        }
        self.gather(&shape.schema, &shape.columns, probe, &places, &rows)
    }

    /// A column of the part at these places.
    fn build(&self, column: usize, places: &[(usize, usize)]) -> Result<ArrayRef> {
        let batches = self.part.batches.iter();
        let arrays: Vec<&dyn Array> = batches.map(|batch| batch.column(column).as_ref()).collect();
        Ok(interleave(&arrays, places)?)
    }

    /// Columns of both sides.
    fn gather(
        &self,
        schema: &SchemaRef,
        columns: &[ColumnIndex],
        probe: &Probe,
        places: &[(usize, usize)],
        rows: &UInt32Array,
    ) -> Result<RecordBatch> {
        let columns = columns.iter().map(|column| match column.side {
            JoinSide::Left => self.build(self.shape.build[column.index], places),
            JoinSide::Right => Ok(take(probe.batch.column(column.index), rows, None)?),
            JoinSide::None => Err(DataFusionError::Internal("a mark of an inner join".into())),
        });
        let columns = columns.collect::<Result<_>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
        let schema = Arc::clone(schema);
        Ok(RecordBatch::try_new_with_options(
            schema, columns, &options,
        )?)
    }
}

/// The pairs for which `kept` is true.
fn only(
    kept: &BooleanArray,
    places: &[(usize, usize)],
    rows: &UInt32Array,
) -> (Vec<(usize, usize)>, UInt32Array) {
    let is_kept = |&pair: &usize| kept.is_valid(pair) && kept.value(pair);
    let pairs: Vec<usize> = (0..kept.len()).filter(is_kept).collect();
    let places = pairs.iter().map(|&pair| places[pair]).collect();
    let rows = pairs.iter().map(|&pair| rows.value(pair));
    (places, UInt32Array::from_iter_values(rows))
}
