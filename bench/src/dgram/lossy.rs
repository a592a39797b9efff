//! Datagrams over a link that loses packets: the datagram paper's figs. 8 and 9.
//!
//! The sender sends without waiting for anything but its pacing; the receiver counts what is valid. Nothing is sent again.

use crate::args::DgramArgs;
use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Reply, Task, unexpected};
use crate::progress::Progress;
use crate::record::{Metric, Record};
use crate::report::{Section, Table};
use crate::stats::Summary;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};
use weft_link::{Link, Shape};
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, RecvWr, RemoteAddr, SendWr, UdDest, UdInit, UdPort, UdQp, Wc,
    WcOpcode,
};

const QKEY: u32 = 0x0010_55e5;
const RECVS: u32 = 4096;
const SENDS: u32 = 256;
/// Packets lost of a million.
const LOSSES: [u32; 4] = [1_000, 5_000, 10_000, 50_000];
const SIZES: [u64; 5] = [1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Payload of a segment: one that is a packet of the link, and the longest, which IP cuts into packets.
const SEGMENTS: [u32; 2] = [1400, 65_408];
const MTU: u32 = 1500;
/// Bytes of a run.
const VOLUME: u64 = 16 << 20;
/// After so long without news everything has come that will.
const IDLE: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(30);
/// After so long without any news nothing comes.
const NOTHING: Duration = Duration::from_secs(5);

/// What is sent, as both ends must know it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    ip: IpAddr,
    way: Way,
    bytes: u64,
    segment: u32,
}

/// How messages travel, and what counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    /// Send: whole messages.
    Send,
    /// Write-Record: the ranges that came.
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

/// A queue pair at one end.
struct End {
    cq: Cq,
    qp: UdQp,
    mr: Mr,
    _port: UdPort,
    _pd: Pd,
    _device: Device,
}

impl End {
    fn open(plan: &Plan, ip: IpAddr) -> Result<End> {
        let device = Device::open().map_err(stack("open the device"))?;
        let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
        let cq = device
            .create_cq(3 * RECVS, None)
            .map_err(stack("create a CQ"))?;
        let port = device
            .bind_ud(SocketAddr::new(ip, 0))
            .map_err(BenchError::system("bind a UDP port"))?;
        let init = UdInit {
            num: Some(port.local_addr().port().into()),
            max_send_wr: SENDS,
            max_recv_wr: RECVS,
            record_depth: RECVS,
            segment: plan.segment,
            partial_records: plan.way == Way::Record,
            ..UdInit::new(&port, QKEY, &cq, &cq)
        };
        let qp = pd
            .create_ud_qp(&init)
            .map_err(stack("create a queue pair"))?;
        let len = usize::try_from(plan.bytes).unwrap_or(1 << 20);
        let mr = pd
            .alloc_mr(len, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .map_err(stack("allocate a region"))?;
        Ok(End {
            cq,
            qp,
            mr,
            _port: port,
            _pd: pd,
            _device: device,
        })
    }

    fn post_recvs(&self, count: usize) -> Result<()> {
        let wr = RecvWr::new(0).sge(self.mr.whole());
        self.qp
            .post_recv(&vec![wr; count])
            .map_err(stack("post receives"))
    }
}

impl Plan {
    /// The receiver: says where it is and what may be written to, and then how many bytes were valid.
    pub(crate) fn serve(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<()> {
        let end = End::open(self, self.ip)?;
        end.post_recvs(RECVS as usize)?;
        let remote = end.mr.remote(0);
        reply(Reply::Listening {
            addr: end.qp.port().local_addr(),
        })?;
        reply(Reply::Opened {
            remote: Some(crate::driver::Remote {
                addr: remote.addr,
                rkey: remote.rkey,
            }),
        })?;
        let (mut valid, mut last, mut some) = (0, Instant::now(), false);
        let mut wcs = [Wc::default(); 64];
        while last.elapsed() < if some { IDLE } else { NOTHING } {
            let n = end.cq.wait(&mut wcs, Some(IDLE));
            let n = n.map_err(stack("wait for a CQ"))?;
            if n > 0 {
                (last, some) = (Instant::now(), true);
            }
            let mut recvs = 0;
            for wc in &wcs[..n] {
                valid += u64::from(wc.byte_len);
                match wc.opcode {
                    WcOpcode::Recv => recvs += 1,
                    WcOpcode::WriteRecord => drop(end.qp.take_record(wc.wr_id)),
                    _ => {}
                }
            }
            end.post_recvs(recvs)?;
        }
        reply(Reply::Valid { bytes: valid })
    }

    /// The sender: how many seconds it took.
    fn send(&self, count: u64, addr: SocketAddr, remote: RemoteAddr) -> Result<f64> {
        let end = End::open(self, IpAddr::V4(weft_link::NEAR))?;
        let to = UdDest {
            addr,
            qp_num: addr.port().into(),
            qkey: QKEY,
            from: None,
            traffic_class: 0,
        };
        let wr = match self.way {
            Way::Send => SendWr::send(0),
            Way::Record | Way::WholeRecord => SendWr::write(0, remote),
        };
        let wr = wr.sge(end.mr.whole());
        let start = Instant::now();
        let until = |left: u32| -> Result<()> {
            while end.qp.outstanding() > left {
                if start.elapsed() > PATIENCE {
                    return Err(BenchError::Stuck(PATIENCE.as_secs(), "sends"));
                }
                end.cq
                    .wait(&mut [Wc::default()], Some(Duration::from_millis(1)))
                    .map_err(stack("wait for a CQ"))?;
            }
            Ok(())
        };
        for _ in 0..count {
            until(SENDS - 1)?;
            end.qp.post_send(&wr, &to).map_err(stack("post a send"))?;
        }
        until(0)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// One run over this link: the share of the bytes that came and were valid, and gigabytes of them a second.
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
    let count = (VOLUME / plan.bytes).max(16);
    let near = link.near().enter(|| plan.send(count, addr, remote));
    let seconds = near.map_err(BenchError::system("enter a network namespace"))??;
    match peer.receive()? {
        Reply::Valid { bytes } => {
            let sent = count * plan.bytes;
            let share = bytes as f64 / sent as f64;
            Ok((share, bytes as f64 / 1e9 / seconds.max(1e-9)))
        }
        other => Err(unexpected(&other)),
    }
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

/// Measures all points of the figures. `failed` is told of points that could not be measured.
pub(super) fn run(
    args: &DgramArgs,
    runs: u32,
    failed: &mut dyn FnMut(&str, &BenchError),
) -> Vec<Record> {
    let sizes = match &args.size {
        Some(sizes) => sizes.0.clone(),
        None if args.quick => vec![64 << 10, 256 << 10],
        None => SIZES.to_vec(),
    };
    let losses = if args.quick { &LOSSES[2..3] } else { &LOSSES };
    let runs = runs.min(if args.quick { 1 } else { 3 });
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
            let measured: Result<Vec<_>> = (0..runs).map(|_| measure(&link, &plan)).collect();
            progress.step();
            let measured = match measured {
                Ok(measured) => measured,
                Err(error) => {
                    failed(&what, &error);
                    continue;
                }
            };
            let (shares, speeds): (Vec<f64>, Vec<f64>) = measured.into_iter().unzip();
            for (metric, samples) in [
                (Metric::bandwidth_GBps, speeds),
                (Metric::valid_share, shares),
            ] {
                let Some(summary) = Summary::of(&samples) else {
                    continue;
                };
                let mut record = Record::new(way.op(), "udp", "weft-ud", bytes, metric, summary);
                record.case = Some(case(loss, segment, way));
                records.push(record);
            }
        }
    }
    records
}

fn value(records: &[Record], op: &str, bytes: u64, case: &str, metric: Metric) -> Option<f64> {
    let found = records.iter().find(|record| {
        record.metric == metric
            && record.op == op
            && record.bytes == bytes
            && record.case.as_deref() == Some(case)
    });
    found.map(|record| record.summary.median)
}

/// A table for each loss.
pub(super) fn sections(records: &[Record]) -> Vec<Section> {
    let mut header = vec!["size".to_owned(), "segment".to_owned()];
    for way in Way::ALL {
        header.push(format!("{}: GB/s", way.name()));
        header.push("valid".to_owned());
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let sizes: BTreeSet<u64> = records.iter().map(|record| record.bytes).collect();
    let section = |loss: u32| {
        let mut table = Table::new(&header);
        for (segment, bytes) in SEGMENTS
            .into_iter()
            .flat_map(|segment| sizes.iter().map(move |bytes| (segment, *bytes)))
        {
            let of = |way: Way, metric| {
                let case = case(loss, segment, way);
                value(records, way.op(), bytes, &case, metric)
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
    value(records, op, bytes, &case, Metric::valid_share)
}
