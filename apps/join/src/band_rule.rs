//! An optimizer rule: it makes band joins of the nested loops whose filters have a band ([`crate::bounds`]).

use std::sync::Arc;

use datafusion::common::JoinType;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::joins::NestedLoopJoinExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use crate::band::BandJoinExec;
use crate::bounds::Bounds;

/// Makes band joins of nested loops.
#[derive(Debug)]
pub struct Bands;

impl PhysicalOptimizerRule for Bands {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|plan| {
            Ok(match band(&plan)? {
                Some(band) => Transformed::yes(band),
                None => Transformed::no(plan),
            })
        })
        .data()
    }

    fn name(&self) -> &'static str {
        "band_join"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

fn band(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let Some(join) = plan.downcast_ref::<NestedLoopJoinExec>() else {
        return Ok(None);
    };
    let Some(filter) = join.filter() else {
        return Ok(None);
    };
    let (left, right) = (join.left(), join.right());
    if matches!(
        join.join_type(),
        JoinType::Right | JoinType::RightSemi | JoinType::RightAnti | JoinType::RightMark
    ) {
        // S is the side whose rows are kept. A swap can add a projection above the join.
        if Bounds::of(&filter.swap(), &right.schema(), &left.schema())?.is_none() {
            return Ok(None);
        }
        let swapped = join.swap_inputs()?;
        let swapped = swapped.transform_up(|plan| {
            // The joins below are done already.
            let ours = plan.downcast_ref::<NestedLoopJoinExec>();
            if !ours.is_some_and(|new| Arc::ptr_eq(new.left(), right)) {
                return Ok(Transformed::no(plan));
            }
            Ok(match band(&plan)? {
                Some(band) => Transformed::yes(band),
                None => Transformed::no(plan),
            })
        });
        return swapped.data().map(Some);
    }
    if *join.join_type() == JoinType::Full {
        return Ok(None);
    }
    let Some(bounds) = Bounds::of(filter, &left.schema(), &right.schema())? else {
        return Ok(None);
    };
    let single = |input: &Arc<dyn ExecutionPlan>| -> Arc<dyn ExecutionPlan> {
        if input.output_partitioning().partition_count() > 1 {
            Arc::new(CoalescePartitionsExec::new(Arc::clone(input)))
        } else {
            Arc::clone(input)
        }
    };
    let projection = join.projection().as_ref().map(|columns| columns.to_vec());
    let band = BandJoinExec::new(
        single(left),
        single(right),
        bounds,
        *join.join_type(),
        projection,
    )?;
    Ok(Some(Arc::new(band)))
}
