//! [`BandJoinExec`]: joins by ranges of keys, as in the thesis's sort-merge join on each node (7.4.2).
//!
//! S, the build side, is collected and sorted once. Each batch of R is sorted when it arrives, so its rows walk along S, and each row
//! searches its range of S from the end of the last search. No part of R is kept.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions, UInt32Array, UInt64Array,
    new_null_array,
};
use datafusion::arrow::compute::{concat_batches, take};
use datafusion::arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::cast::as_boolean_array;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{JoinSide, JoinType, project_schema};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::joins::utils::{ColumnIndex, build_join_schema};
use datafusion::physical_plan::metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, Distribution, ExecutionPlan, Partitioning, PlanProperties,
};
use futures::StreamExt;
use weft_roundabout::joins::{Intervals, Place};

use crate::bounds::{Bound, Bounds};
use crate::keys::{Key, Width};

/// The parameters of the operator, without its inputs.
#[derive(Debug)]
struct Shape {
    bounds: Bounds,
    join_type: JoinType,
    projection: Option<Vec<usize>>,
    schema: SchemaRef,
    /// The source of each column of `schema`.
    columns: Vec<ColumnIndex>,
}

/// A join on a band: inner, or outer, semi, anti and mark of the build side.
#[derive(Debug)]
pub struct BandJoinExec {
    left: Arc<dyn ExecutionPlan>,
    right: Arc<dyn ExecutionPlan>,
    shape: Arc<Shape>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

/// The join types that keep rows of the build side, or of none.
pub fn stays(join_type: JoinType) -> bool {
    matches!(
        join_type,
        JoinType::Inner
            | JoinType::Left
            | JoinType::LeftSemi
            | JoinType::LeftAnti
            | JoinType::LeftMark
    )
}

impl BandJoinExec {
    /// For inputs with one partition each.
    pub fn new(
        left: Arc<dyn ExecutionPlan>,
        right: Arc<dyn ExecutionPlan>,
        bounds: Bounds,
        join_type: JoinType,
        projection: Option<Vec<usize>>,
    ) -> Result<Self> {
        if !stays(join_type) {
            return Err(DataFusionError::Internal(format!(
                "a band join keeps rows of its build side alone, so it cannot be {join_type}"
            )));
        }
        let (whole, columns) = build_join_schema(&left.schema(), &right.schema(), &join_type);
        let whole = Arc::new(whole);
        let schema = project_schema(&whole, projection.as_ref())?;
        let columns = match &projection {
            Some(projection) => projection.iter().map(|&i| columns[i].clone()).collect(),
            None => columns,
        };
        let emission = match join_type {
            JoinType::Inner => EmissionType::Incremental,
            JoinType::Left => EmissionType::Both,
            _ => EmissionType::Final,
        };
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&schema)),
            Partitioning::UnknownPartitioning(1),
            emission,
            Boundedness::Bounded,
        );
        Ok(Self {
            left,
            right,
            shape: Arc::new(Shape {
                bounds,
                join_type,
                projection,
                schema,
                columns,
            }),
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
        })
    }

    /// The kind of join: which rows are kept.
    pub fn join_type(&self) -> JoinType {
        self.shape.join_type
    }
}

impl DisplayAs for BandJoinExec {
    fn fmt_as(&self, form: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.shape;
        if matches!(form, DisplayFormatType::TreeRender) {
            return write!(f, "join_type={:?}\nband={}", shape.join_type, shape.bounds);
        }
        let (kind, bounds) = (shape.join_type, &shape.bounds);
        write!(f, "BandJoinExec: join_type={kind:?}, band={bounds}")?;
        if let Some(rest) = &bounds.rest {
            write!(f, ", filter={}", rest.expression())?;
        }
        if shape.projection.is_some() {
            let names: Vec<_> = shape
                .schema
                .fields()
                .iter()
                .map(|f| f.name().as_str())
                .collect();
            write!(f, ", projection=[{}]", names.join(", "))?;
        }
        Ok(())
    }
}

impl ExecutionPlan for BandJoinExec {
    fn name(&self) -> &'static str {
        "BandJoinExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn required_input_distribution(&self) -> Vec<Distribution> {
        vec![Distribution::SinglePartition, Distribution::SinglePartition]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.left, &self.right]
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        let bounds = &self.shape.bounds;
        let compared = bounds.upper.iter().chain(&bounds.lower);
        let compared = compared.flat_map(|bound| [&bound.s, &bound.r]);
        let rest = bounds.rest.iter().map(|rest| rest.expression());
        for expr in compared.chain(rest) {
            if f(expr)? == TreeNodeRecursion::Stop {
                return Ok(TreeNodeRecursion::Stop);
            }
        }
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let (Some(right), Some(left), true) = (children.pop(), children.pop(), children.is_empty())
        else {
            return Err(DataFusionError::Internal("two children are needed".into()));
        };
        let shape = &self.shape;
        let (bounds, projection) = (shape.bounds.clone(), shape.projection.clone());
        let new = Self::new(left, right, bounds, shape.join_type, projection)?;
        Ok(Arc::new(new))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let work = Work {
            shape: Arc::clone(&self.shape),
            left_schema: self.left.schema(),
            r: self.right.execute(partition, Arc::clone(&context))?,
            reservation: MemoryConsumer::new("BandJoin").register(context.memory_pool()),
            size: context.session_config().batch_size().max(1),
            metrics: BaselineMetrics::new(&self.metrics, partition),
        };
        let s = self.left.execute(0, context)?;
        let schema = Arc::clone(&self.shape.schema);
        Ok(match self.shape.bounds.width {
            Width::Word => Box::pin(RecordBatchStreamAdapter::new(schema, work.rows::<u64>(s))),
            Width::Wide => Box::pin(RecordBatchStreamAdapter::new(schema, work.rows::<u128>(s))),
        })
    }
}

/// The execution of a join.
struct Work {
    shape: Arc<Shape>,
    left_schema: SchemaRef,
    r: SendableRecordBatchStream,
    reservation: MemoryReservation,
    /// Rows of an output batch.
    size: usize,
    metrics: BaselineMetrics,
}

/// S, sorted.
struct Build<K> {
    batch: RecordBatch,
    intervals: Intervals<K>,
    matched: Vec<bool>,
}

/// A batch of R that is being joined.
struct Probe<K> {
    batch: RecordBatch,
    /// The row, and the ends of its interval, in the order of the low ends.
    rows: Vec<(K, K, u32)>,
    at: usize,
    place: Place,
    range: Range<usize>,
}

/// The state of the work.
enum Stage<K> {
    Collect(SendableRecordBatchStream),
    Join(Build<K>, Option<Probe<K>>),
    /// The rows of S that are returned at the end.
    Rest(Build<K>, Vec<u64>, usize),
    Over,
}

impl Work {
    fn rows<K: Key>(
        self,
        s: SendableRecordBatchStream,
    ) -> impl futures::Stream<Item = Result<RecordBatch>> {
        futures::stream::try_unfold(
            (self, Stage::<K>::Collect(s)),
            |(mut work, mut stage)| async {
                loop {
                    let (next, out) = work.step(stage).await?;
                    stage = next;
                    if let Some(out) = out.filter(|out| out.num_rows() > 0) {
                        work.metrics.record_output(out.num_rows());
                        return Ok(Some((out, (work, stage))));
                    }
                    if matches!(stage, Stage::Over) {
                        return Ok(None);
                    }
                    // Candidates without a match produce no batch to wait for: other tasks run here, and a cancelled query ends here.
                    tokio::task::yield_now().await;
                }
            },
        )
    }

    async fn step<K: Key>(&mut self, stage: Stage<K>) -> Result<(Stage<K>, Option<RecordBatch>)> {
        match stage {
            Stage::Collect(s) => {
                let build = self.collect(s).await?;
                if build.batch.num_rows() == 0 {
                    return Ok((Stage::Over, None));
                }
                Ok((Stage::Join(build, None), None))
            }
            Stage::Join(mut build, None) => Ok(match self.r.next().await {
                Some(batch) => {
                    let probe = self.probe(batch?)?;
                    (Stage::Join(build, Some(probe)), None)
                }
                None => {
                    let rest = self.rest(&mut build);
                    (Stage::Rest(build, rest, 0), None)
                }
            }),
            Stage::Join(mut build, Some(mut probe)) => {
                let metrics = self.metrics.clone();
                let _timer = metrics.elapsed_compute().timer();
                let over = self.pairs(&mut build, &mut probe);
                let (over, s, r) = over;
                let out = self.joined(&mut build, &probe.batch, s, r)?;
                Ok((Stage::Join(build, (!over).then_some(probe)), out))
            }
            Stage::Rest(build, rows, at) => {
                let end = rows.len().min(at + self.size);
                let out = self.kept(&build, &rows[at..end])?;
                let next = if end == rows.len() {
                    Stage::Over
                } else {
                    Stage::Rest(build, rows, end)
                };
                Ok((next, Some(out)))
            }
            Stage::Over => Ok((Stage::Over, None)),
        }
    }

    async fn collect<K: Key>(&mut self, mut s: SendableRecordBatchStream) -> Result<Build<K>> {
        let mut batches = Vec::new();
        while let Some(batch) = s.next().await {
            let batch = batch?;
            self.reservation.try_grow(batch.get_array_memory_size())?;
            batches.push(batch);
        }
        let metrics = self.metrics.clone();
        let _timer = metrics.elapsed_compute().timer();
        let batch = concat_batches(&self.left_schema, &batches)?;
        drop(batches);
        // The keys, their copies in order, and a mark for each row.
        let count = batch.num_rows();
        let keys = count * (5 * size_of::<K>() + 3 * size_of::<u64>() + 1);
        self.reservation.try_grow(keys)?;
        let bounds = &self.shape.bounds;
        let s = |bound: &Option<Bound>| column::<K>(bound.as_ref().map(|b| &b.s), &batch);
        let (low, high) = (s(&bounds.upper)?, s(&bounds.lower)?);
        let (mut lows, mut highs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..count {
            // A NULL in a comparison is no match.
            if let (Some(low), Some(high)) = (low.get(row, K::MIN), high.get(row, K::MAX)) {
                lows.push(low);
                highs.push(high);
                rows.push(row as u64);
            }
        }
        Ok(Build {
            intervals: Intervals::new(&lows, &highs, &rows),
            matched: vec![false; count],
            batch,
        })
    }

    fn probe<K: Key>(&self, batch: RecordBatch) -> Result<Probe<K>> {
        let bounds = &self.shape.bounds;
        let r = |bound: &Option<Bound>| column::<K>(bound.as_ref().map(|b| &b.r), &batch);
        let (low, high) = (r(&bounds.lower)?, r(&bounds.upper)?);
        let strict = |bound: &Option<Bound>| bound.as_ref().is_some_and(|b| b.strict);
        let (above, below) = (strict(&bounds.lower), strict(&bounds.upper));
        let mut rows = Vec::with_capacity(batch.num_rows());
        for row in 0..batch.num_rows() {
            // Keys are integers: beyond one is from the next one on, and beyond the last there is none.
            let from = low
                .get(row, K::MIN)
                .and_then(|key| if above { key.next() } else { Some(key) });
            let to = high
                .get(row, K::MAX)
                .and_then(|key| if below { key.previous() } else { Some(key) });
            if let (Some(from), Some(to)) = (from, to) {
                rows.push((from, to, row as u32));
            }
        }
        rows.sort_unstable();
        Ok(Probe {
            batch,
            rows,
            at: 0,
            place: Place::default(),
            range: 0..0,
        })
    }

    /// The next pairs by the band, and whether the batch of R has no more. Their number is bounded, and so is that of candidates.
    fn pairs<K: Key>(
        &self,
        build: &mut Build<K>,
        probe: &mut Probe<K>,
    ) -> (bool, Vec<u64>, Vec<u32>) {
        let (mut s_rows, mut r_rows) = (Vec::new(), Vec::new());
        // A semi join asks whether there is a match, not how many.
        let once = !matches!(self.shape.join_type, JoinType::Inner | JoinType::Left);
        let mut tries = self.size * 16;
        loop {
            let Some(position) = probe.range.next() else {
                let Some(&(low, high, _)) = probe.rows.get(probe.at) else {
                    return (true, s_rows, r_rows);
                };
                if tries == 0 {
                    return (false, s_rows, r_rows);
                }
                tries -= 1;
                probe.range = build.intervals.candidates(&mut probe.place, low, high);
                probe.at += 1;
                continue;
            };
            let (low, _, row) = probe.rows[probe.at - 1];
            let s_row = build.intervals.row(position);
            tries = tries.saturating_sub(1);
            if build.intervals.matches(position, low) && !(once && build.matched[s_row as usize]) {
                s_rows.push(s_row);
                r_rows.push(row);
            }
            if s_rows.len() >= self.size || tries == 0 {
                return (false, s_rows, r_rows);
            }
        }
    }

    /// Applies the other conditions, marks the rows of S, and makes the rows to return now.
    fn joined<K>(
        &self,
        build: &mut Build<K>,
        r: &RecordBatch,
        mut s_rows: Vec<u64>,
        mut r_rows: Vec<u32>,
    ) -> Result<Option<RecordBatch>> {
        if s_rows.is_empty() {
            return Ok(None);
        }
        if let Some(rest) = &self.shape.bounds.rest {
            let (s_index, r_index) = (UInt64Array::from(s_rows), UInt32Array::from(r_rows));
            let columns = rest.column_indices();
            let pairs = gather(rest.schema(), columns, &build.batch, &s_index, r, &r_index)?;
            let kept = rest.expression().evaluate(&pairs)?;
            let kept = kept.into_array(pairs.num_rows())?;
            let kept = as_boolean_array(&kept)?;
            let keep = |row: usize| kept.is_valid(row) && kept.value(row);
            s_rows = (0..kept.len())
                .filter(|&i| keep(i))
                .map(|i| s_index.value(i))
                .collect();
            r_rows = (0..kept.len())
                .filter(|&i| keep(i))
                .map(|i| r_index.value(i))
                .collect();
        }
        for &row in &s_rows {
            build.matched[row as usize] = true;
        }
        if !matches!(self.shape.join_type, JoinType::Inner | JoinType::Left) {
            return Ok(None);
        }
        let (s_index, r_index) = (UInt64Array::from(s_rows), UInt32Array::from(r_rows));
        let shape = &self.shape;
        gather(
            &shape.schema,
            &shape.columns,
            &build.batch,
            &s_index,
            r,
            &r_index,
        )
        .map(Some)
    }

    /// The rows of S to return after all of R has passed.
    fn rest<K>(&self, build: &mut Build<K>) -> Vec<u64> {
        let wanted = |matched: bool| match self.shape.join_type {
            JoinType::Left | JoinType::LeftAnti => !matched,
            JoinType::LeftSemi => matched,
            JoinType::LeftMark => true,
            _ => false,
        };
        let marks = build.matched.iter().enumerate();
        marks
            .filter(|&(_, &matched)| wanted(matched))
            .map(|(row, _)| row as u64)
            .collect()
    }

    fn kept<K>(&self, build: &Build<K>, rows: &[u64]) -> Result<RecordBatch> {
        let shape = &self.shape;
        let index = UInt64Array::from(rows.to_vec());
        let marks: BooleanArray = rows
            .iter()
            .map(|&row| Some(build.matched[row as usize]))
            .collect();
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(shape.columns.len());
        for (column, field) in shape.columns.iter().zip(shape.schema.fields()) {
            columns.push(match column.side {
                JoinSide::Left => take(build.batch.column(column.index), &index, None)?,
                JoinSide::Right => new_null_array(field.data_type(), rows.len()),
                JoinSide::None => Arc::new(marks.clone()),
            });
        }
        batch(&shape.schema, columns, rows.len())
    }
}

/// The keys of one end, and which are valid.
struct Ends<K> {
    keys: Option<(Vec<K>, ArrayRef)>,
}

impl<K: Key> Ends<K> {
    /// The key of a row; `open` if there is no such end, `None` for NULL.
    fn get(&self, row: usize, open: K) -> Option<K> {
        match &self.keys {
            None => Some(open),
            Some((keys, array)) => array.is_valid(row).then(|| keys[row]),
        }
    }
}

fn column<K: Key>(expr: Option<&Arc<dyn PhysicalExpr>>, batch: &RecordBatch) -> Result<Ends<K>> {
    let Some(expr) = expr else {
        return Ok(Ends { keys: None });
    };
    let array = expr.evaluate(batch)?.into_array(batch.num_rows())?;
    let keys = K::column(&array)?;
    Ok(Ends {
        keys: Some((keys, array)),
    })
}

/// Columns of both sides at these rows.
fn gather(
    schema: &SchemaRef,
    columns: &[ColumnIndex],
    s: &RecordBatch,
    s_rows: &UInt64Array,
    r: &RecordBatch,
    r_rows: &UInt32Array,
) -> Result<RecordBatch> {
    let mut arrays = Vec::with_capacity(columns.len());
    for column in columns {
        arrays.push(match column.side {
            JoinSide::Left => take(s.column(column.index), s_rows, None)?,
            JoinSide::Right => take(r.column(column.index), r_rows, None)?,
            JoinSide::None => {
                return Err(DataFusionError::Internal("a mark before the end".into()));
            }
        });
    }
    batch(schema, arrays, s_rows.len())
}

/// A batch, even of no columns.
fn batch(schema: &SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    let schema: Arc<Schema> = Arc::clone(schema);
    Ok(RecordBatch::try_new_with_options(
        schema, columns, &options,
    )?)
}
