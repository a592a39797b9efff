//! Datagrams over a link that loses packets: the datagram paper's figs. 8 and 9.
//!
//! The sender waits only for its pacing; the receiver counts valid bytes. Lost messages are not sent again.

use super::end::{self, End, Failed};
use crate::args::DgramArgs;
use crate::driver::{Remote, ud_dest};
use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Reply, Task, unexpected};
use crate::progress::Progress;
use crate::record::{Metric, Record};
use crate::report::{Section, Table};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;
use weft_link::{Link, Shape};
use weft_verbs::{RemoteAddr, SendWr};

const RECVS: u32 = 4096;
const SENDS: u32 = 256;
/// Packets lost of a million.
const LOSSES: [u32; 4] = [1_000, 5_000, 10_000, 50_000];
/// Payload of a segment: one that is a packet of the link, and the longest, which IP cuts into packets.
const SEGMENTS: [u32; 2] = [1400, 65_408];
const MTU: u32 = 1500;

/// The parameters of a run, for both ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    ip: IpAddr,
    way: Way,
    bytes: u64,
    segment: u32,
}

/// The operation, and the bytes that count as valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    /// Send: whole messages.
    Send,
    /// Write-Record: the ranges that arrived.
    Record,
    /// Write-Record without partial placement: whole messages.
    WholeRecord,
}

impl Way {
    const ALL: [Way; 3] = [Way::Send, Way::Record, Way::WholeRecord];

    fn op(self) -> &'static str {
        match self {
            Way::Send => "send",
            Way::Record | Way::WholeRecord => "write_record",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::Send => "send/recv",
            Way::Record => "Write-Record",
            Way::WholeRecord => "Write-Record, whole ones only",
        }
    }
}

impl Plan {
    fn open(&self, ip: IpAddr) -> Result<End> {
        let addr = SocketAddr::new(ip, 0);
        End::open(addr, self.bytes, [SENDS, RECVS], |init| {
            init.record_depth = RECVS;
            init.segment = self.segment;
            init.partial_records = self.way == Way::Record;
        })
    }

    /// The receiver: reports its address and its buffer, and then the number of valid bytes.
    pub(crate) fn serve(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<()> {
        let end = self.open(self.ip)?;
        end.arm()?;
        let RemoteAddr { addr, rkey } = end.mr.remote(0);
        reply(Reply::Listening { addr: end.addr() })?;
        let remote = Some(Remote { addr, rkey });
        reply(Reply::Opened { remote })?;
        let bytes = end.drain()?;
        reply(Reply::Valid { bytes })
    }

    /// The sender: how many seconds it took.
    fn send(&self, count: u64, addr: SocketAddr, remote: RemoteAddr) -> Result<f64> {
        let end = self.open(IpAddr::V4(weft_link::NEAR))?;
        let wr = match self.way {
            Way::Send => SendWr::send(0),
            Way::Record | Way::WholeRecord => SendWr::write(0, remote),
        };
        end.send(wr, count, &[ud_dest(addr)])
    }
}

/// One run over this link: gigabytes a second of the valid bytes that arrived, and their share.
fn measure(link: &Link, plan: &Plan) -> Result<(f64, f64)> {
    let spawn = |command: &mut Command| link.far().enter(|| command.spawn())?;
    let mut peer = Peer::start(&[], spawn)?;
    peer.task(Task::Lossy, plan)?;
    let addr = peer.listening()?;
    let remote = match peer.receive()? {
        Reply::Opened { remote: Some(r) } => RemoteAddr {
            addr: r.addr,
            rkey: r.rkey,
        },
        other => return Err(unexpected(&other)),
    };
    let count = end::count(plan.bytes);
    let near = link.near().enter(|| plan.send(count, addr, remote));
    let seconds = near.map_err(BenchError::system("enter a network namespace"))??;
    let (bytes, sent) = (peer.bytes()?, count * plan.bytes);
    let share = bytes as f64 / sent as f64;
    Ok((bytes as f64 / 1e9 / seconds.max(1e-9), share))
}

/// A point as its records name it.
fn case(loss: u32, segment: u32, way: Way) -> String {
    let percent = f64::from(loss) / 10_000.0;
    let whole = if way == Way::WholeRecord {
        ", whole only"
    } else {
        ""
    };
    format!("loss {percent} %, segments of {segment}{whole}")
}

/// Measures all points of the figures. `failed` is called for points that could not be measured.
pub(super) fn run(args: &DgramArgs, runs: u32, failed: &mut Failed<'_>) -> Vec<Record> {
    let sizes = args.effort.sizes("1K,16K,64K,256K,1M", "64K,256K");
    let losses = if args.effort.quick {
        &LOSSES[2..3]
    } else {
        &LOSSES
    };
    let runs = runs.min(if args.effort.quick { 1 } else { 3 });
    let points = losses.len() * SEGMENTS.len() * sizes.len() * Way::ALL.len();
    let mut progress = Progress::new(points as u64);
    let mut records = Vec::new();
    for &loss in losses {
        let percent = f64::from(loss) / 10_000.0;
        let shape = Shape {
            delay: Duration::from_micros(100),
            loss,
            ..Shape::default()
        };
        let link = match Link::new(shape, MTU) {
            Ok(link) => link,
            Err(error) => {
                let what = format!("loss of {percent} %");
                failed(&what, &stack("make a link")(error));
                continue;
            }
        };
        let points = SEGMENTS.iter().flat_map(|segment| {
            let sizes = sizes.iter();
            sizes.flat_map(move |bytes| Way::ALL.map(|way| (*segment, *bytes, way)))
        });
        for (segment, bytes, way) in points {
            let size = crate::size::human(bytes);
            let what = format!("{}, {size}, loss {percent} %", way.name());
            progress.at(&what);
            let plan = Plan {
                ip: IpAddr::V4(weft_link::FAR),
                way,
                bytes,
                segment,
            };
            let samples = end::runs(&what, runs, failed, || measure(&link, &plan));
            progress.step();
            if let Some(samples) = samples {
                let case = case(loss, segment, way);
                records.extend(end::records(way.op(), bytes, &case, &samples));
            }
        }
    }
    records
}

/// A table for each loss.
pub(super) fn sections(records: &[Record]) -> Vec<Section> {
    let mut header = vec!["size".to_owned(), "segment".to_owned()];
    for way in Way::ALL {
        header.push(format!("{}: GB/s", way.name()));
        header.push("valid".to_owned());
    }
    let sizes: BTreeSet<u64> = records.iter().map(|record| record.bytes).collect();
    let section = |loss: u32| {
        let mut table = Table::new(&header);
        for (segment, bytes) in SEGMENTS
            .into_iter()
            .flat_map(|segment| sizes.iter().map(move |bytes| (segment, *bytes)))
        {
            let of = |way: Way, metric| {
                let case = case(loss, segment, way);
                end::value(records, way.op(), bytes, &case, metric)
            };
            let cells = Way::ALL.map(|way| {
                let speed = of(way, Metric::bandwidth_GBps).map(|v| format!("{v:.4}"));
                let share = of(way, Metric::valid_share).map(|v| format!("{v:.3}"));
                [speed, share]
            });
            if cells.iter().flatten().any(Option::is_some) {
                let cells = cells.into_iter().flatten().map(Option::unwrap_or_default);
                let row = [crate::size::human(bytes), segment.to_string()];
                table.push(row.into_iter().chain(cells));
            }
        }
        let percent = f64::from(loss) / 10_000.0;
        Section::new(format!(
            "Loss of {percent} % of packets of {MTU} bytes (figs. 8 and 9)"
        ))
        .table(table)
    };
    LOSSES.into_iter().map(section).collect()
}

/// The share of valid bytes of a point: partial messages count where they can.
pub(super) fn share(
    records: &[Record],
    op: &str,
    bytes: u64,
    loss: u32,
    segment: u32,
) -> Option<f64> {
    let case = case(loss, segment, Way::Record);
    end::value(records, op, bytes, &case, Metric::valid_share)
}
