//! One sender and one to three receivers: a multicast group beside a message to each (the datagram paper's fig. 7).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_verbs::{
    Access, Cq, Device, Mr, RecvWr, SendWr, UD_GROUP, UdDest, UdInit, UdQp, Wc, WcOpcode,
};

use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Reply, Task, unexpected};
use crate::record::{Metric, Record};
use crate::report::{Axis, Plot, Section, Series, Stroke, Table};
use crate::stats::Summary;

const QKEY: u32 = 0x0060_0e55;
const RECVS: u32 = 1024;
const SENDS: u32 = 64;
const SIZES: [u64; 4] = [1 << 10, 4 << 10, 16 << 10, 60 << 10];
const QUICK: [u64; 2] = [1 << 10, 16 << 10];
const RECEIVERS: [usize; 3] = [1, 2, 3];
/// Bytes of a run.
const VOLUME: u64 = 16 << 20;
const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 87, 7, 7));
/// The loopback interface's number in every namespace.
const LOOPBACK: u32 = 1;
const IDLE: Duration = Duration::from_millis(400);
const NOTHING: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);

/// What a receiver is to take.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    bytes: u64,
    /// The port at which the group is heard; none: each hears at its own address.
    group: Option<u16>,
}

struct End {
    cq: Cq,
    qp: UdQp,
    mr: Mr,
}

impl End {
    fn open(bytes: u64) -> Result<End> {
        let device = Device::open().map_err(stack("open the device"))?;
        let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
        let cq = device.create_cq(2 * RECVS, None);
        let cq = cq.map_err(stack("create a CQ"))?;
        let port = device.bind_ud((Ipv4Addr::LOCALHOST, 0).into());
        let port = port.map_err(BenchError::system("bind a UDP port"))?;
        let init = UdInit {
            num: Some(port.local_addr().port().into()),
            max_send_wr: SENDS,
            max_recv_wr: RECVS,
            ..UdInit::new(&port, QKEY, &cq, &cq)
        };
        let qp = pd
            .create_ud_qp(&init)
            .map_err(stack("create a queue pair"))?;
        let mr = pd.alloc_mr(bytes as usize, Access::LOCAL_WRITE);
        let mr = mr.map_err(stack("allocate a region"))?;
        Ok(End { cq, qp, mr })
    }

    fn post_recvs(&self, count: usize) -> Result<()> {
        let wr = RecvWr::new(0).sge(self.mr.whole());
        let posted = self.qp.post_recv(&vec![wr; count]);
        posted.map_err(stack("post receives"))
    }
}

impl Plan {
    /// A receiver: counts bytes until nothing comes any more.
    pub(crate) fn serve(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<()> {
        let end = End::open(self.bytes)?;
        end.post_recvs(RECVS as usize)?;
        if let Some(port) = self.group {
            let attached = end.qp.attach(SocketAddr::new(GROUP, port), &[LOOPBACK]);
            attached.map_err(BenchError::system("join a group"))?;
        }
        reply(Reply::Listening {
            addr: end.qp.port().local_addr(),
        })?;
        let (mut valid, mut last, mut some) = (0, Instant::now(), false);
        let mut wcs = [Wc::default(); 64];
        while last.elapsed() < if some { IDLE } else { NOTHING } {
            let n = end.cq.wait(&mut wcs, Some(IDLE));
            let n = n.map_err(stack("wait for a CQ"))?;
            if n > 0 {
                (last, some) = (Instant::now(), true);
            }
            let recvs = wcs[..n].iter().filter(|wc| wc.opcode == WcOpcode::Recv);
            valid += recvs.clone().map(|wc| u64::from(wc.byte_len)).sum::<u64>();
            end.post_recvs(recvs.count())?;
        }
        reply(Reply::Valid { bytes: valid })
    }
}

/// One run: bytes that all receivers got, a second of the sender's in GB, and their share of what should have come.
fn measure(bytes: u64, receivers: usize, group: bool) -> Result<(f64, f64)> {
    let end = End::open(bytes)?;
    // The receivers hear the group at a port that nobody else has.
    let port = end.qp.port().local_addr().port();
    let plan = Plan {
        bytes,
        group: group.then_some(port ^ 1),
    };
    let mut peers = Vec::new();
    let mut dests = Vec::new();
    for _ in 0..receivers {
        let mut peer = Peer::spawn(&[])?;
        peer.task(Task::Group, &plan)?;
        let addr = peer.listening()?;
        peers.push(peer);
        dests.push((addr, addr.port().into()));
    }
    if let Some(port) = plan.group {
        dests = vec![(SocketAddr::new(GROUP, port), UD_GROUP)];
    }
    let count = (VOLUME / bytes).max(16);
    let start = Instant::now();
    let wr = SendWr::send(0).sge(end.mr.whole()).signaled();
    let mut wcs = [Wc::default(); 64];
    for _ in 0..count {
        for (addr, qp_num) in &dests {
            let to = UdDest {
                addr: *addr,
                qp_num: *qp_num,
                qkey: QKEY,
                from: Some(Ipv4Addr::LOCALHOST.into()),
                traffic_class: 0,
            };
            while end.qp.outstanding() >= SENDS {
                end.cq
                    .wait(&mut wcs, Some(Duration::from_millis(1)))
                    .map_err(stack("wait for a CQ"))?;
                if start.elapsed() > PATIENCE {
                    return Err(BenchError::Stuck(PATIENCE.as_secs(), "sends"));
                }
            }
            end.qp.post_send(&wr, &to).map_err(stack("post a send"))?;
        }
    }
    while end.qp.outstanding() > 0 && start.elapsed() < PATIENCE {
        end.cq
            .wait(&mut wcs, Some(Duration::from_millis(1)))
            .map_err(stack("wait for a CQ"))?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let mut valid = 0;
    for peer in &mut peers {
        match peer.receive()? {
            Reply::Valid { bytes } => valid += bytes,
            other => return Err(unexpected(&other)),
        }
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
pub(super) fn run(
    quick: bool,
    runs: u32,
    failed: &mut dyn FnMut(&str, &BenchError),
) -> Vec<Record> {
    let sizes: &[u64] = if quick { &QUICK } else { &SIZES };
    let mut records = Vec::new();
    for receivers in RECEIVERS {
        for &bytes in sizes {
            for op in OPS {
                let measured: Result<Vec<_>> = (0..runs)
                    .map(|_| measure(bytes, receivers, op == OPS[0]))
                    .collect();
                let measured = match measured {
                    Ok(measured) => measured,
                    Err(error) => {
                        failed(&format!("{op}, {receivers} receivers, {bytes} B"), &error);
                        continue;
                    }
                };
                let (speeds, shares): (Vec<f64>, Vec<f64>) = measured.into_iter().unzip();
                for (metric, samples) in [
                    (Metric::bandwidth_GBps, speeds),
                    (Metric::valid_share, shares),
                ] {
                    let Some(summary) = Summary::of(&samples) else {
                        continue;
                    };
                    let mut record = Record::new(op, "udp", "weft-ud", bytes, metric, summary);
                    record.case = Some(case(receivers));
                    records.push(record);
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
        let of = |op: &str, bytes, metric| {
            let case = Some(case(receivers));
            let mut found = records.iter().filter(|r| r.op == op && r.case == case);
            let found = found.find(|r| r.bytes == bytes && r.metric == metric)?;
            Some(found.summary.median)
        };
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

/// What three receivers get of a group in all, of what one gets, and of what three get in turn: for the largest message.
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
