//! Where the rows of a plan are: joins of two relations that are spread by the hash of their keys in the same way need no exchange.

use std::cell::Cell;
use std::sync::Arc;

use datafusion::common::{JoinSide, JoinType};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::joins::HashJoinExec;
use datafusion::physical_plan::joins::utils::build_join_schema;
use datafusion::physical_plan::projection::ProjectionExec;

use crate::band::stays;
use crate::loaded::LoadedExec;

type Plan = Arc<dyn ExecutionPlan>;

/// Operators looked at for one plan, at most. A query can have joins in joins, and each one looks at those below it.
const STEPS: usize = 10_000;

/// Operators that leave each row on its node, and the columns as they are.
const UNCHANGED: [&str; 3] = [
    "CoalesceBatchesExec",
    "CoalescePartitionsExec",
    "CooperativeExec",
];

/// Whether the join can return rows of the probe side without a match, or once for several matches: no single node knows that.
pub fn keeps_probe_side(types: JoinType) -> bool {
    matches!(
        types,
        JoinType::Right | JoinType::RightSemi | JoinType::RightAnti | JoinType::RightMark
    )
}

/// Looks for the places of rows in a plan without exchanges.
pub struct Places<'a> {
    /// Whether the build side of a join goes round, if one side does.
    build_goes_round: &'a dyn Fn(&HashJoinExec) -> bool,
    steps: Cell<usize>,
}

impl<'a> Places<'a> {
    /// For one plan.
    pub fn new(build_goes_round: &'a dyn Fn(&HashJoinExec) -> bool) -> Self {
        Self {
            build_goes_round,
            steps: Cell::new(STEPS),
        }
    }

    /// Whether all partners of each row are on the row's own node. Equal keys have equal hashes, so one pair of keys suffices.
    pub fn meet(&self, join: &HashJoinExec) -> bool {
        // `NOT IN` with a NULL concerns the rows of all nodes.
        if join.null_aware || ExecutionPlan::fetch(join).is_some() {
            return false;
        }
        let (left, right) = (join.left(), join.right());
        join.on().iter().any(|(l, r)| {
            let (Some(l), Some(r)) = (l.downcast_ref::<Column>(), r.downcast_ref::<Column>())
            else {
                return false;
            };
            let same = match (l.data_type(&left.schema()), r.data_type(&right.schema())) {
                (Ok(l), Ok(r)) => l == r,
                _ => false,
            };
            same && self
                .layout(left, l.index())
                .is_some_and(|layout| self.layout(right, r.index()) == Some(layout))
        })
    }

    /// The layout of the parts in which the hash of this column says where a row is.
    fn layout<'p>(&self, plan: &'p Plan, column: usize) -> Option<&'p [Option<u32>]> {
        self.steps.set(self.steps.get().checked_sub(1)?);
        if let Some(table) = plan.downcast_ref::<LoadedExec>() {
            return table.layout_by(column);
        }
        if let Some(filter) = plan.downcast_ref::<FilterExec>() {
            if plan.fetch().is_some() {
                return None;
            }
            let column = match filter.projection() {
                Some(projection) => *projection.get(column)?,
                None => column,
            };
            return self.layout(filter.input(), column);
        }
        if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
            let expr = &projection.expr().get(column)?.expr;
            let column = expr.downcast_ref::<Column>()?.index();
            return self.layout(projection.input(), column);
        }
        if let Some(join) = plan.downcast_ref::<HashJoinExec>() {
            return self.of_join(join, column);
        }
        let only = <[&Plan; 1]>::try_from(plan.children()).ok();
        match only {
            Some([input]) if UNCHANGED.contains(&plan.name()) && plan.fetch().is_none() => {
                self.layout(input, column)
            }
            _ => None,
        }
    }

    /// Rows of a join are where those of the side are that stays. An outer join makes NULL of the other side's columns.
    fn of_join<'p>(&self, join: &'p HashJoinExec, column: usize) -> Option<&'p [Option<u32>]> {
        let types = *join.join_type();
        if join.null_aware || ExecutionPlan::fetch(join).is_some() {
            return None;
        }
        let column = match &join.projection {
            Some(projection) => *projection.get(column)?,
            None => column,
        };
        let (left, right) = (join.left(), join.right());
        let (_, columns) = build_join_schema(&left.schema(), &right.schema(), &types);
        let from = columns.get(column)?;
        let (is_left, input) = match from.side {
            JoinSide::Left => (true, left),
            JoinSide::Right => (false, right),
            JoinSide::None => return None,
        };
        let kept = types == JoinType::Inner || keeps_probe_side(types) != is_left;
        if types == JoinType::Full || !kept {
            return None;
        }
        if !self.meet(join) {
            let right_stays = (self.build_goes_round)(join) || keeps_probe_side(types);
            if right_stays == is_left || !(right_stays || stays(types)) {
                return None;
            }
        }
        self.layout(input, from.index)
    }
}
