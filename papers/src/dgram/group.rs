//! One sender and one to three receivers: a multicast group compared with a message to each (the datagram paper's fig.
//! 7).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use weft_verbs::{SendWr, UD_GROUP, UdDest};

use super::end::{self, End, Failed};
use crate::driver::ud_dest;
use crate::error::{BenchError, Result};
use crate::process::{Peer, Reply, Task};
use crate::record::{Metric, Record};
use crate::report::{Axis, Plot, Section, Series, Stroke, Table};

const RECVS: u32 = 1024;
const SENDS: u32 = 64;
const SIZES: [u64; 4] = [1 << 10, 4 << 10, 16 << 10, 60 << 10];
const QUICK: [u64; 2] = [1 << 10, 16 << 10];
const RECEIVERS: [usize; 3] = [1, 2, 3];
const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 87, 7, 7));
/// The loopback interface's number in every namespace.
const LOOPBACK: u32 = 1;

/// The parameters of a receiver.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    bytes: u64,
    /// The port of the group; `None`: each receiver has its own address.
    group: Option<u16>,
}

fn open(bytes: u64) -> Result<End> {
    let addr = (Ipv4Addr::LOCALHOST, 0).into();
    End::open(addr, bytes, [SENDS, RECVS], |_| ())
}

impl Plan {
    /// A receiver: counts bytes until no more arrive.
    pub(crate) fn serve(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<()> {
        let end = open(self.bytes)?;
        end.arm()?;
        if let Some(port) = self.group {
            let attached = end.qp.attach(SocketAddr::new(GROUP, port), &[LOOPBACK]);
            attached.map_err(BenchError::system("join a group"))?;
        }
        reply(Reply::Listening { addr: end.addr() })?;
        let bytes = end.drain()?;
        reply(Reply::Valid { bytes })
    }
}

/// One run: the bytes that all receivers got, in GB for each second of the sender, and the share that arrived.
fn measure(bytes: u64, receivers: usize, group: bool) -> Result<(f64, f64)> {
    let end = open(bytes)?;
    // The group has a port that no other process uses.
    let plan = Plan {
        bytes,
        group: group.then_some(end.addr().port() ^ 1),
    };
    let to = |addr, qp_num| UdDest {
        qp_num,
        from: Some(Ipv4Addr::LOCALHOST.into()),
        ..ud_dest(addr)
    };
    let mut peers = Vec::new();
    let mut dests = Vec::new();
    for _ in 0..receivers {
        let mut peer = Peer::spawn(&[])?;
        peer.task(Task::Group, &plan)?;
        let addr = peer.listening()?;
        peers.push(peer);
        dests.push(to(addr, addr.port().into()));
    }
    if let Some(port) = plan.group {
        dests = vec![to(SocketAddr::new(GROUP, port), UD_GROUP)];
    }
    let count = end::count(bytes);
    let seconds = end.send(SendWr::send(0).signaled(), count, &dests)?;
    let mut valid = 0;
    for peer in &mut peers {
        valid += peer.bytes()?;
    }
    let whole = count * bytes * receivers as u64;
    Ok((valid as f64 / 1e9 / seconds, valid as f64 / whole as f64))
}

/// A group, and a message to each.
const OPS: [&str; 2] = ["group", "each"];

fn case(receivers: usize) -> String {
    format!("{receivers} receivers")
}

/// The figure.
pub(super) fn run(quick: bool, runs: u32, failed: &mut Failed<'_>) -> Vec<Record> {
    let sizes: &[u64] = if quick { &QUICK } else { &SIZES };
    let mut records = Vec::new();
    for receivers in RECEIVERS {
        for &bytes in sizes {
            for op in OPS {
                let what = format!("{op}, {receivers} receivers, {bytes} B");
                let one = || measure(bytes, receivers, op == OPS[0]);
                if let Some(samples) = end::runs(&what, runs, failed, one) {
                    records.extend(end::records(op, bytes, &case(receivers), &samples));
                }
            }
        }
    }
    records
}

/// The figure's table and plot.
pub(super) fn section(records: &[Record]) -> Section {
    let title = "One sender, one to three receivers (fig. 7)";
    let mut table = Table::new(&[
        "size",
        "receivers",
        "group: GB/s",
        "came",
        "each in turn: GB/s",
        "came",
    ]);
    let mut plot = Plot::new(title, Axis::bytes(), Axis::linear("GB/s, all receivers"));
    for receivers in RECEIVERS {
        let case = case(receivers);
        let of = |op: &str, bytes, metric| end::value(records, op, bytes, &case, metric);
        for bytes in SIZES {
            let both = OPS.map(|op| {
                [Metric::bandwidth_GBps, Metric::valid_share].map(|metric| of(op, bytes, metric))
            });
            let cells: Vec<_> = both.into_iter().flatten().collect();
            if cells.iter().any(Option::is_some) {
                let cells = cells.into_iter();
                let cells = cells.map(|v| v.map_or_else(String::new, |v| format!("{v:.3}")));
                let row = [crate::size::human(bytes), receivers.to_string()];
                table.push(row.into_iter().chain(cells));
            }
        }
        for (op, name) in OPS.into_iter().zip(["group", "each in turn"]) {
            let speed = |bytes: u64| Some((bytes as f64, of(op, bytes, Metric::bandwidth_GBps)?));
            let points = SIZES.into_iter().filter_map(speed).collect();
            let name = format!("{name}, {receivers}");
            plot = plot.series(if op == OPS[0] {
                Series::new(name, Stroke::Weft, points)
            } else {
                Series::new(name, Stroke::Other, points).dashed()
            });
        }
    }
    Section::new(title)
        .text("Send/recv on the loopback interface. Groups are not paced: what a receiver does not take in time is lost.")
        .table(table)
        .plot(plot)
}

/// The total that three receivers get from a group, relative to what one gets, and to what three get in turn: for the
/// largest message.
pub(super) fn gains(records: &[Record]) -> [Option<f64>; 2] {
    let of = |op: &str, receivers: usize| {
        let case = case(receivers);
        let found = records.iter().filter(|record| {
            record.op == op
                && record.metric == Metric::bandwidth_GBps
                && record.case.as_ref() == Some(&case)
        });
        found
            .max_by_key(|record| record.bytes)
            .map(|record| record.summary.median)
    };
    let ratio = |(a, b): (f64, f64)| a / b;
    let three = of("group", 3);
    [
        three.zip(of("group", 1)).map(ratio),
        three.zip(of("each", 3)).map(ratio),
    ]
}
