//! The bands in the filters of joins.
//!
//! A band is one comparison `s <= r` or `s >= r` of a join's filter, or one of each. `s` is an expression over columns of the build side, `r` one
//! over the probe side. `s.x BETWEEN r.y - 5 AND r.y + 5` is such a pair, and so is `s.x - 5 <= r.y AND r.y <= s.x + 5`. Each expression is
//! evaluated unchanged, on the side of its columns. No term moves to the other side of a comparison, so overflow, rounding and the calendar are
//! those of the query.

use std::fmt;
use std::sync::Arc;

use datafusion::arrow::datatypes::Schema;
use datafusion::common::JoinSide;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, Column};
use datafusion::physical_expr::utils::collect_columns;
use datafusion::physical_expr::{PhysicalExpr, conjunction_opt, split_conjunction};
use datafusion::physical_expr_common::physical_expr::is_volatile;
use datafusion::physical_plan::joins::utils::JoinFilter;

use crate::keys::{Width, width};

type Expr = Arc<dyn PhysicalExpr>;

/// One comparison of a band.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Over the columns of the build side.
    pub s: Expr,
    /// Over the columns of the probe side.
    pub r: Expr,
    /// Equal values do not match.
    pub strict: bool,
}

/// The comparisons of a band, and the other conditions on a pair.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// `s <= r`
    pub upper: Option<Bound>,
    /// `s >= r`
    pub lower: Option<Bound>,
    /// The other conditions.
    pub rest: Option<JoinFilter>,
    /// The width of the keys.
    pub width: Width,
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = |bound: &Bound| if bound.strict { "" } else { "=" };
        let mut between = "";
        f.write_str("[")?;
        if let Some(bound) = &self.lower {
            write!(f, "{} >{} {}", bound.s, sign(bound), bound.r)?;
            between = ", ";
        }
        if let Some(bound) = &self.upper {
            write!(f, "{between}{} <{} {}", bound.s, sign(bound), bound.r)?;
        }
        f.write_str("]")
    }
}

/// A conjunct that can be a bound.
struct Candidate {
    at: usize,
    bound: Bound,
    upper: bool,
    data_type: datafusion::arrow::datatypes::DataType,
}

impl Bounds {
    /// The band in a filter between two inputs, if there is one.
    pub fn of(filter: &JoinFilter, left: &Schema, right: &Schema) -> Result<Option<Self>> {
        let conjuncts = split_conjunction(filter.expression());
        let mut candidates = Vec::new();
        for (at, conjunct) in conjuncts.iter().enumerate() {
            candidates.extend(candidate(at, conjunct, filter, left, right)?);
        }
        let Some((upper, lower)) = choose(&candidates) else {
            return Ok(None);
        };
        let used: Vec<usize> = upper.iter().chain(&lower).map(|c| c.at).collect();
        let rest = conjuncts
            .iter()
            .enumerate()
            .filter(|(at, _)| !used.contains(at))
            .map(|(_, conjunct)| Arc::clone(conjunct));
        let rest = conjunction_opt(rest).map(|expression| {
            JoinFilter::new(
                expression,
                filter.column_indices().to_vec(),
                Arc::clone(filter.schema()),
            )
        });
        let Some(width) = upper.or(lower).and_then(|c| width(&c.data_type)) else {
            return Ok(None);
        };
        Ok(Some(Self {
            upper: upper.map(|c| c.bound.clone()),
            lower: lower.map(|c| c.bound.clone()),
            rest,
            width,
        }))
    }
}

/// The two that have the most columns in common, or the only one.
fn choose(candidates: &[Candidate]) -> Option<(Option<&Candidate>, Option<&Candidate>)> {
    let common = |a: &Expr, b: &Expr| collect_columns(a).intersection(&collect_columns(b)).count();
    let mut best: Option<(usize, &Candidate, &Candidate)> = None;
    for upper in candidates.iter().filter(|c| c.upper) {
        for lower in candidates.iter().filter(|c| !c.upper) {
            if upper.data_type != lower.data_type {
                continue;
            }
            let alike =
                common(&upper.bound.s, &lower.bound.s) + common(&upper.bound.r, &lower.bound.r);
            if best.is_none_or(|(most, ..)| alike > most) {
                best = Some((alike, upper, lower));
            }
        }
    }
    match best {
        Some((_, upper, lower)) => Some((Some(upper), Some(lower))),
        None => candidates.first().map(|only| {
            if only.upper {
                (Some(only), None)
            } else {
                (None, Some(only))
            }
        }),
    }
}

/// The conjunct as a bound, if it compares one side with the other and its type has keys.
fn candidate(
    at: usize,
    conjunct: &Expr,
    filter: &JoinFilter,
    left: &Schema,
    right: &Schema,
) -> Result<Option<Candidate>> {
    let Some(comparison) = conjunct.downcast_ref::<BinaryExpr>() else {
        return Ok(None);
    };
    let (below, strict) = match comparison.op() {
        Operator::LtEq => (true, false),
        Operator::Lt => (true, true),
        Operator::GtEq => (false, false),
        Operator::Gt => (false, true),
        _ => return Ok(None),
    };
    // A volatile expression has another value for each pair.
    if is_volatile(conjunct) {
        return Ok(None);
    }
    let (a, b) = (comparison.left(), comparison.right());
    let (s, r, upper) = match (side(a, filter), side(b, filter)) {
        (Some(JoinSide::Left), Some(JoinSide::Right)) => (a, b, below),
        (Some(JoinSide::Right), Some(JoinSide::Left)) => (b, a, !below),
        _ => return Ok(None),
    };
    let (s, r) = (of_input(s, filter)?, of_input(r, filter)?);
    let data_type = s.data_type(left)?;
    if data_type != r.data_type(right)? || width(&data_type).is_none() {
        return Ok(None);
    }
    Ok(Some(Candidate {
        at,
        bound: Bound { s, r, strict },
        upper,
        data_type,
    }))
}

/// The side that all columns of an expression are of; `None` if it has columns of both, or none.
fn side(expr: &Expr, filter: &JoinFilter) -> Option<JoinSide> {
    let mut found = None;
    for column in collect_columns(expr) {
        let side = filter.column_indices().get(column.index())?.side;
        if side == JoinSide::None || found.is_some_and(|found| found != side) {
            return None;
        }
        found = Some(side);
    }
    found
}

/// An expression over the filter's columns as one over its input's.
fn of_input(expr: &Expr, filter: &JoinFilter) -> Result<Expr> {
    Arc::clone(expr)
        .transform(|expr| {
            let Some(column) = expr.downcast_ref::<Column>() else {
                return Ok(Transformed::no(expr));
            };
            let index = filter.column_indices().get(column.index());
            let index = index.ok_or_else(|| {
                DataFusionError::Internal(format!("the filter has no column {column}"))
            })?;
            let column: Expr = Arc::new(Column::new(column.name(), index.index));
            Ok(Transformed::yes(column))
        })
        .data()
}
