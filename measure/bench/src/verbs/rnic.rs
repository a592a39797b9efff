//! The machine's RNIC: weft's verbs on it, and perftest on the same.

use super::view::{View, spread};
use crate::record::Metric;
use crate::report::{Section, Table, number};
use crate::size::human;

/// The measured quantities, with their units and whether less is better.
const MEASURES: [(Metric, &str, bool); 2] = [
    (Metric::bandwidth_GBps, "GB/s, a stream", false),
    (Metric::latency_us_p50, "µs, one at a time", true),
];

pub(super) fn section(every: &View<'_>) -> Option<Section> {
    let all = every.transport("rnic");
    let mut table = Table::new(&[
        "operation",
        "size",
        "unit",
        "weft",
        "perftest",
        "times better",
    ]);
    let mut is_empty = true;
    for (metric, unit, less) in MEASURES {
        for op in ["send", "write", "read"] {
            let of_op = all.op(op).metric(metric);
            for bytes in of_op.sizes() {
                let ours = of_op.stack("device").at(bytes);
                let theirs = of_op.stack("perftest-device").at(bytes);
                let better = ours.zip(theirs).map(|(ours, theirs)| {
                    let ratio = ours.summary.median / theirs.summary.median;
                    if less { ratio.recip() } else { ratio }
                });
                is_empty = false;
                table.push([
                    op.to_owned(),
                    human(bytes),
                    unit.to_owned(),
                    spread(ours),
                    spread(theirs),
                    better.map_or_else(|| "-".to_owned(), number),
                ]);
            }
        }
    }
    let section = Section::new("The machine's RNIC").text(
        "Both ends on the same RNIC. perftest runs on the machine's own libibverbs; its programs are started anew for each run. \
         Sends and Writes one at a time are half the round trip, Reads the whole.",
    );
    (!is_empty).then(|| section.table(table))
}
