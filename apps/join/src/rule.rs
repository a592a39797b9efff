//! An optimizer rule that turns a plan for one node into one for a ring.
//!
//! The rows of a distributed operator are those of all nodes together, each on one node. Scans read a part of their files. One relation of a
//! join (S) stays where it is, and the other (R) goes round once. R is the probe side, so that each node holds a part of the hash table; joins
//! that preserve rows of R swap their sides first. If a hash join's build side is much smaller, it is R: each node holds the whole hash table,
//! and no row of the large relation moves. Two loaded tables that are spread by their keys stay, both ([`crate::place`]). Aggregates work in two steps, before and after their partial results arrive at node 0. All other
//! operators that need all rows at once get them at node 0.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use datafusion::arrow::datatypes::{FieldRef, Fields};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{ColumnStatistics, JoinType, Statistics};
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfig, FileScanConfigBuilder};
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::joins::{
    CrossJoinExec, HashJoinExec, NestedLoopJoinExec, PartitionMode,
};
use datafusion::physical_plan::scalar_subquery::ScalarSubqueryExec;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, displayable, replace_children_if_necessary,
};

use crate::band::{BandJoinExec, stays};
use crate::exec::{Kind, Query, RoundaboutExec, Rows, SomeRowsExec};
use crate::indexed::IndexedJoinExec;
use crate::loaded::LoadedExec;
use crate::place::{Places, keeps_probe_side};

type Plan = Arc<dyn ExecutionPlan>;

/// Operators that process one row at a time, or the rows of one node before all rows come together.
const ROW_WISE: [&str; 9] = [
    "FilterExec",
    "ProjectionExec",
    "CoalesceBatchesExec",
    "CoalescePartitionsExec",
    "RepartitionExec",
    "UnionExec",
    "InterleaveExec",
    "UnnestExec",
    "CooperativeExec",
];

/// The sides of a join, in the order of its children.
const BUILD: usize = 0;
const PROBE: usize = 1;
/// The number of rows that are probed in the time of one insertion into a hash table.
const PROBES: usize = 3;
/// The largest build side that goes round, in bytes, if the memory of a query has no limit.
const WHOLE: usize = 256 << 20;
/// Bytes of a value without a fixed width, if the file's statistics do not have them.
const TEXT: usize = 64;
/// The fraction of a query's memory for a build side that goes round: a hash table is larger than its rows, and a query can have several.
const SHARE: usize = 8;

/// The nodes that get the rows of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowsAt {
    /// Node 0 gets all.
    First,
    /// Each node keeps those that it has.
    Each,
}

/// The sides of a hash join that go round.
#[derive(Hash)]
enum Moves {
    Build,
    Probe,
    None,
}

/// Makes plans for the ring of a query.
#[derive(Debug)]
pub struct Distribute {
    query: Arc<Query>,
    /// Bytes of the largest build side that goes round.
    whole: usize,
    rows: RowsAt,
}

impl Distribute {
    /// For a query with this much memory on each node.
    pub fn new(query: Arc<Query>, memory: Option<usize>, rows: RowsAt) -> Self {
        let whole = memory.map_or(WHOLE, |memory| memory / SHARE);
        Self { query, whole, rows }
    }
}

impl PhysicalOptimizerRule for Distribute {
    fn optimize(&self, plan: Plan, config: &ConfigOptions) -> Result<Plan> {
        if self.query.ring.nodes.len() == 1 {
            return self.can_end(plan);
        }
        let mut digest = DefaultHasher::new();
        let shown = displayable(plan.as_ref()).indent(false).to_string();
        shown.hash(&mut digest);
        let work = Work {
            query: &self.query,
            config,
            whole: self.whole,
            exchanges: AtomicU32::new(0),
            moves: RefCell::default(),
        };
        let spread = work.spread(plan)?;
        let spread = match self.rows {
            RowsAt::First => work.gather(spread)?,
            RowsAt::Each => spread.plan,
        };
        // Nodes with other statistics or another limit can choose other sides.
        work.moves.borrow().hash(&mut digest);
        let agreement = &self.query.agreement;
        agreement.store(digest.finish(), Ordering::SeqCst);
        self.can_end(spread)
    }

    fn name(&self) -> &'static str {
        "roundabout"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl Distribute {
    /// Lets joins use the indexes of loaded parts, and puts an end to them when the query ends.
    fn can_end(&self, plan: Plan) -> Result<Plan> {
        plan.transform_up(|plan| {
            if !plan.name().ends_with("JoinExec") {
                return Ok(Transformed::no(plan));
            }
            let plan = match IndexedJoinExec::of(&plan) {
                Some(indexed) => Arc::new(indexed),
                None => plan,
            };
            let watched: Plan = Arc::new(SomeRowsExec::new(
                plan,
                Rows::UntilEnded,
                Arc::clone(&self.query),
            ));
            Ok(Transformed::yes(watched))
        })
        .data()
    }
}

/// A plan, and whether its rows are all on node 0.
struct Spread {
    plan: Plan,
    first: bool,
}

struct Work<'a> {
    query: &'a Arc<Query>,
    config: &'a ConfigOptions,
    whole: usize,
    exchanges: AtomicU32,
    /// For each hash join, the side that goes round.
    moves: RefCell<Vec<Moves>>,
}

impl Work<'_> {
    fn exchange(&self, plan: Plan, kind: Kind) -> Plan {
        let plan = if plan.output_partitioning().partition_count() > 1 {
            Arc::new(CoalescePartitionsExec::new(plan))
        } else {
            plan
        };
        let exchange = self.exchanges.fetch_add(1, Ordering::Relaxed);
        Arc::new(RoundaboutExec::new(
            plan,
            kind,
            exchange,
            Arc::clone(self.query),
        ))
    }

    fn gather(&self, spread: Spread) -> Result<Plan> {
        Ok(if spread.first {
            spread.plan
        } else {
            self.exchange(spread.plan, Kind::Gather)
        })
    }

    fn only_first(&self, plan: Plan) -> Spread {
        Spread {
            plan: Arc::new(SomeRowsExec::new(
                plan,
                Rows::OfFirst,
                Arc::clone(self.query),
            )),
            first: true,
        }
    }

    fn spread(&self, plan: Plan) -> Result<Spread> {
        if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
            return self.scan(&plan, scan);
        }
        if plan.downcast_ref::<LoadedExec>().is_some() {
            return Ok(Spread { plan, first: false });
        }
        if let Some(join) = plan.downcast_ref::<HashJoinExec>() {
            let types = *join.join_type();
            if Places::new(&|join| self.build_goes_round(join)).meet(join) {
                self.moves.borrow_mut().push(Moves::None);
                return self.on_each_node(plan);
            }
            if plan.fetch().is_none() && !join.null_aware {
                let build = self.build_goes_round(join);
                let moves = if build { Moves::Build } else { Moves::Probe };
                self.moves.borrow_mut().push(moves);
                if build {
                    return self.one_goes_round(&plan, BUILD);
                }
                if keeps_probe_side(types) {
                    return self.spread(join.swap_inputs(PartitionMode::CollectLeft)?);
                }
            }
            return self.join(&plan, types);
        }
        if let Some(join) = plan.downcast_ref::<NestedLoopJoinExec>() {
            let types = *join.join_type();
            if plan.fetch().is_none() && keeps_probe_side(types) {
                return self.spread(join.swap_inputs()?);
            }
            return self.join(&plan, types);
        }
        if let Some(join) = plan.downcast_ref::<BandJoinExec>() {
            return self.join(&plan, join.join_type());
        }
        if plan.downcast_ref::<CrossJoinExec>().is_some() {
            return self.join(&plan, JoinType::Inner);
        }
        if let Some(aggregate) = plan.downcast_ref::<AggregateExec>() {
            return self.aggregate(&plan, aggregate);
        }
        if plan.downcast_ref::<ScalarSubqueryExec>().is_some() {
            let mut children = plan.children().into_iter().cloned();
            let Some(input) = children.next() else {
                return self.all_at_first(plan);
            };
            let input = self.spread(input)?;
            let mut new = vec![input.plan];
            for subquery in children {
                // Every node needs the value.
                let subquery = self.spread(subquery)?.plan;
                new.push(self.exchange(subquery, Kind::Rotate));
            }
            return Ok(Spread {
                plan: replace_children_if_necessary(plan, new)?,
                first: input.first,
            });
        }
        if plan.children().is_empty() {
            return Ok(self.only_first(plan));
        }
        if ROW_WISE.contains(&plan.name()) && plan.fetch().is_none() {
            return self.on_each_node(plan);
        }
        self.all_at_first(plan)
    }

    /// An operator that works on the rows of each node without those of others.
    fn on_each_node(&self, plan: Plan) -> Result<Spread> {
        let mut first = true;
        let mut children = Vec::new();
        for child in plan.children() {
            let child = self.spread(Arc::clone(child))?;
            first &= child.first;
            children.push(child.plan);
        }
        let plan = replace_children_if_necessary(plan, children)?;
        Ok(Spread { plan, first })
    }

    /// An operator that needs all rows: on node 0.
    fn all_at_first(&self, plan: Plan) -> Result<Spread> {
        let mut children = Vec::new();
        for child in plan.children() {
            let child = self.spread(Arc::clone(child))?;
            children.push(self.gather(child)?);
        }
        Ok(Spread {
            plan: replace_children_if_necessary(plan, children)?,
            first: true,
        })
    }

    fn join(&self, plan: &Plan, types: JoinType) -> Result<Spread> {
        if !stays(types) || plan.fetch().is_some() {
            return self.all_at_first(Arc::clone(plan));
        }
        self.one_goes_round(plan, PROBE)
    }

    /// A join of which the side `moving` goes round, and the other one stays.
    fn one_goes_round(&self, plan: &Plan, moving: usize) -> Result<Spread> {
        let children: Vec<Plan> = plan.children().into_iter().cloned().collect();
        let Ok([left, right]) = <[Plan; 2]>::try_from(children) else {
            return self.all_at_first(Arc::clone(plan));
        };
        let mut sides = [self.spread(left)?, self.spread(right)?];
        let first = sides[1 - moving].first;
        if !sides.iter().all(|side| side.first) {
            let side = &mut sides[moving].plan;
            *side = self.exchange(Arc::clone(side), Kind::Rotate);
        }
        let sides = sides.map(|side| side.plan).to_vec();
        let plan = replace_children_if_necessary(Arc::clone(plan), sides)?;
        Ok(Spread { plan, first })
    }

    /// Whether the whole build side on every node costs less than the whole probe side past every node.
    fn build_goes_round(&self, join: &HashJoinExec) -> bool {
        let types = *join.join_type();
        if types != JoinType::Inner && !keeps_probe_side(types) {
            return false;
        }
        let statistics = StatisticsContext::new();
        let of = |side: &Plan| statistics.compute(side.as_ref(), &StatisticsArgs::new());
        let (Ok(build), Ok(probe)) = (of(join.left()), of(join.right())) else {
            return false;
        };
        let (Some(&rows), Some(&probes)) = (build.num_rows.get_value(), probe.num_rows.get_value())
        else {
            return false;
        };
        rows.saturating_mul(PROBES) <= probes
            && bytes_of(rows, &build, join.left().schema().fields()) <= self.whole
    }

    fn aggregate(&self, plan: &Plan, aggregate: &AggregateExec) -> Result<Spread> {
        let input = self.spread(Arc::clone(aggregate.input()))?;
        let single = matches!(
            aggregate.mode(),
            AggregateMode::Single | AggregateMode::SinglePartitioned
        );
        if matches!(aggregate.mode(), AggregateMode::Partial) {
            let plan = replace_children_if_necessary(Arc::clone(plan), vec![input.plan])?;
            // Without groups, a node without rows still returns a row.
            return Ok(Spread { plan, first: false });
        }
        let ordered = aggregate
            .aggr_expr()
            .iter()
            .any(|expr| !expr.order_bys().is_empty());
        let whole = if !single || input.first || ordered || aggregate.limit_options().is_some() {
            replace_children_if_necessary(Arc::clone(plan), vec![self.gather(input)?])?
        } else {
            let partial: Plan = Arc::new(AggregateExec::try_new(
                AggregateMode::Partial,
                aggregate.group_expr().clone(),
                aggregate.aggr_expr().to_vec(),
                aggregate.filter_expr().to_vec(),
                input.plan,
                aggregate.input_schema(),
            )?);
            let gathered = self.exchange(partial, Kind::Gather);
            let none = vec![None; aggregate.aggr_expr().len()];
            Arc::new(AggregateExec::try_new(
                AggregateMode::Final,
                aggregate.group_expr().as_final(),
                aggregate.aggr_expr().to_vec(),
                none,
                gathered,
                aggregate.input_schema(),
            )?) as Plan
        };
        Ok(self.only_first(whole))
    }

    /// A part of the files of a scan; the first node gets files that cannot be split.
    fn scan(&self, plan: &Plan, scan: &DataSourceExec) -> Result<Spread> {
        let ring = &self.query.ring;
        let mut config = self.config.clone();
        config.optimizer.repartition_file_min_size = 0;
        let cut = match plan.repartitioned(ring.nodes.len(), &config)? {
            Some(cut) => cut,
            None => Arc::clone(plan),
        };
        let source = cut.downcast_ref::<DataSourceExec>().unwrap_or(scan);
        let Some(files) = source.data_source().downcast_ref::<FileScanConfig>() else {
            return Ok(self.only_first(Arc::clone(plan)));
        };
        if plan.fetch().is_some() || files.limit.is_some() {
            // A limit counts rows of all nodes: they must be counted in one place.
            return Ok(self.only_first(Arc::clone(plan)));
        }
        let part = |parts: &mut dyn Iterator<Item = Vec<PartitionedFile>>| {
            let mine = parts.skip(ring.me).step_by(ring.nodes.len());
            FileGroup::new(mine.flatten().collect())
        };
        let groups = files.file_groups.iter();
        let mine = if files.output_partitioning.is_some() {
            // Pieces of CSV files.
            part(&mut groups.flat_map(|group| group.iter().map(|file| vec![file.clone()])))
        } else {
            part(&mut groups.map(|group| group.files().to_vec()))
        };
        let part = FileScanConfigBuilder::from(files.clone())
            .with_file_groups(vec![mine])
            .build();
        Ok(Spread {
            plan: DataSourceExec::from_data_source(part),
            first: false,
        })
    }
}

/// An estimate of the memory of this many rows, in bytes.
fn bytes_of(rows: usize, statistics: &Statistics, fields: &Fields) -> usize {
    let column = |(field, column): (&FieldRef, &ColumnStatistics)| {
        let known = column.byte_size.get_value().copied();
        let width = || field.data_type().primitive_width().unwrap_or(TEXT);
        known.unwrap_or_else(|| rows.saturating_mul(width()))
    };
    let columns = fields.iter().zip(&statistics.column_statistics);
    columns.map(column).fold(0, usize::saturating_add)
}
