//! The targets of the verbs, and whether they are reached.

use super::view::{View, median};
use crate::aims::Limit::{self, AtLeast, AtMost};
use crate::aims::verdict;
use crate::record::{Metric, Record};
use crate::report::{Section, Table};

/// The reference of an aim's number, in the same run.
#[derive(Clone, Copy)]
enum Against {
    /// The median of the runs' ratios to plain TCP.
    Tcp,
    /// The median of the runs' ratios to TCP with TLS.
    TcpTls,
    /// The ratio of the medians to another stack.
    Stack(&'static str),
    /// The ratio of the medians to weft over TCP, without a CRC.
    Iwarp,
    /// No reference: the number itself is the aim.
    Nothing,
}

use Against::{Iwarp, Nothing, Stack, Tcp, TcpTls};

/// One line of the table of aims.
struct Goal {
    what: &'static str,
    stack: &'static str,
    op: &'static str,
    transport: &'static str,
    metric: Metric,
    bytes: u64,
    crc: bool,
    poll: Option<&'static str>,
    case: Option<&'static str>,
    against: Against,
    /// The ratio's target.
    limit: Limit,
    /// A sufficient value of the number itself, whatever the ratio.
    enough: Limit,
}

/// An aim for the throughput of RDMA Writes over TCP, to be changed.
const TCP: Goal = Goal {
    what: "",
    stack: "weft",
    op: "write",
    transport: "tcp",
    metric: Metric::bandwidth_GBps,
    bytes: 1 << 20,
    crc: false,
    poll: None,
    case: None,
    against: Nothing,
    limit: Limit::None,
    enough: Limit::None,
};
const LOCAL: Goal = Goal {
    transport: "local",
    ..TCP
};
/// Of ordinary memory.
const ORDINARY: Goal = Goal {
    case: Some("ordinary"),
    ..LOCAL
};
const PING_PONG: Goal = Goal {
    op: "send",
    metric: Metric::latency_us_p50,
    bytes: 64,
    poll: Some("busy"),
    ..TCP
};
const ROCE: Goal = Goal {
    stack: "weft-roce",
    transport: "udp",
    bytes: 64 << 10,
    ..TCP
};
const RATE: Goal = Goal {
    op: "rate",
    metric: Metric::messages_per_s,
    bytes: 64,
    ..TCP
};

/// A table of aims: the text of each, a base with the fields that differ from it, the reference, and the target.
macro_rules! goals {
    ($($what:literal, $like:ident $({ $($field:ident: $value:expr),* })?, $against:expr => $limit:expr;)*) => {
        [$(Goal { what: $what, against: $against, limit: $limit, $($($field: $value,)*)? ..$like }),*]
    };
}

const GOALS: [Goal; 20] = goals! {
    "1 MiB RDMA Write without CRC, at least 0.95 of plain TCP", TCP, Tcp => AtLeast(0.95);
    "1 MiB RDMA Write with CRC, at least 0.80 of plain TCP", TCP { crc: true }, Tcp => AtLeast(0.80);
    "1 MiB RDMA Write with TLS, at least 0.90 of rustls over TCP", TCP { stack: "weft-tls" }, TcpTls => AtLeast(0.90);
    "64 B Send ping-pong, spinning, at most 1.3 times plain TCP", PING_PONG, Tcp => AtMost(1.3);
    "64 B Send ping-pong, sleeping, at most 1.1 times plain TCP", PING_PONG { poll: Some("block") }, Tcp => AtMost(1.1);
    "64 B sends, 128 in flight: at least 3 times plain TCP, or 1.5 million/s", RATE { enough: AtLeast(1.5e6) }, Tcp => AtLeast(3.0);
    "same host, 64 KiB RDMA Write, library's memory: at least 0.9 of memcpy", LOCAL { bytes: 64 << 10 }, Stack("memcpy") => AtLeast(0.9);
    "same host, 1 MiB RDMA Write, library's memory: at least 0.9 of memcpy", LOCAL, Stack("memcpy") => AtLeast(0.9);
    "same host, 16 MiB RDMA Write, library's memory: at least 0.9 of memcpy", LOCAL { bytes: 16 << 20 }, Stack("memcpy") => AtLeast(0.9);
    "same host, 64 KiB RDMA Write, ordinary memory: at least 0.9 of process_vm_writev", ORDINARY { bytes: 64 << 10 }, Stack("vm") => AtLeast(0.9);
    "same host, 1 MiB RDMA Write, ordinary memory: at least 0.9 of process_vm_writev", ORDINARY, Stack("vm") => AtLeast(0.9);
    "same host, 16 MiB RDMA Write, ordinary memory: at least 0.9 of process_vm_writev", ORDINARY { bytes: 16 << 20 }, Stack("vm") => AtLeast(0.9);
    "same host, 1 MiB RDMA Write, ordinary memory: at least 3.5 times plain TCP", ORDINARY, Tcp => AtLeast(3.5);
    "same host, 64 B write-with-immediate ping-pong, spinning: at most 0.4 µs one way",
        PING_PONG { op: "write_imm", transport: "local", enough: AtMost(0.4) }, Nothing => Limit::None;
    "RoCE, 64 KiB RDMA Write: at least 0.5 of iWARP over TCP", ROCE, Iwarp => AtLeast(0.5);
    "RoCE, 64 KiB Send: at least 0.5 of iWARP over TCP", ROCE { op: "send" }, Iwarp => AtLeast(0.5);
    "RoCE, 64 KiB RDMA Read: at least 0.5 of iWARP over TCP", ROCE { op: "read" }, Iwarp => AtLeast(0.5);
    "RoCE, 64 B Send ping-pong, spinning: at most 1.3 times plain UDP",
        ROCE { op: "send", bytes: 64, metric: Metric::latency_us_p50, poll: Some("busy") }, Stack("udp-single") => AtMost(1.3);
    "RoCE, 64 KiB RDMA Write, one packet in a thousand lost: at least 0.7 of RoCE without loss",
        ROCE { stack: "weft-roce-lossy" }, Stack("weft-roce") => AtLeast(0.7);
    "same host, 64 B sends, 128 in flight: at least 8 million/s", RATE { transport: "local", enough: AtLeast(8e6) }, Nothing => Limit::None;
};

/// Bytes that an idle connection may take.
const QP_BYTES: f64 = 16384.0;

pub(super) fn goals(all: &View<'_>) -> Option<Section> {
    let mut table = Table::new(&["aim", "unit", "weft", "beside it", "ratio", "met"]);
    for goal in &GOALS {
        let points = all
            .op(goal.op)
            .metric(goal.metric)
            .filter(|record| record.bytes == goal.bytes && record.poll.as_deref() == goal.poll);
        let weft = points.filter(|record| {
            record.stack == goal.stack
                && record.transport == goal.transport
                && record.crc.unwrap_or(false) == goal.crc
                && record.case.as_deref() == goal.case
        });
        let Some(record) = weft.at(goal.bytes) else {
            continue;
        };
        let (beside, ratio) = match goal.against {
            Tcp => (points.stack("tcp").at(goal.bytes), record.ratio_tcp),
            TcpTls => (points.stack("tcp-tls").at(goal.bytes), record.ratio_tcp_tls),
            Stack(stack) => {
                let beside = points.stack(stack).at(goal.bytes);
                let ratio = beside.map(|beside| record.summary.median / beside.summary.median);
                (beside, ratio)
            }
            Iwarp => {
                let iwarp =
                    |record: &Record| record.transport == "tcp" && record.crc == Some(false);
                let beside = points.stack("weft").filter(iwarp).at(goal.bytes);
                let ratio = beside.map(|beside| record.summary.median / beside.summary.median);
                (beside, ratio)
            }
            Nothing => (None, None),
        };
        if ratio.is_none() && !matches!(goal.against, Nothing) {
            continue;
        }
        let enough = goal.enough.holds(record.summary.median) == Some(true);
        let met = enough || ratio.is_some_and(|ratio| goal.limit.holds(ratio) == Some(true));
        table.push([
            goal.what.to_owned(),
            match goal.metric {
                Metric::bandwidth_GBps => "GB/s",
                Metric::messages_per_s => "messages/s",
                _ => "µs",
            }
            .to_owned(),
            median(Some(record)),
            median(beside),
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            verdict(Some(met)).to_owned(),
        ]);
    }
    for record in &all.op("memory").0 {
        table.push([
            format!(
                "under 16 KiB for an idle connection ({})",
                record.case.as_deref().unwrap_or_default()
            ),
            "bytes".to_owned(),
            median(Some(record)),
            "-".to_owned(),
            "-".to_owned(),
            verdict(Some(record.summary.median < QP_BYTES)).to_owned(),
        ]);
    }
    (!table.is_empty()).then(|| Section::new("Aims").table(table))
}
