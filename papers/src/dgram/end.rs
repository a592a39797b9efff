//! The common parts of the figures: ends that send without waiting for an answer or count messages, and runs that yield two numbers each.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use weft_verbs::{Access, Cq, Device, Mr, RecvWr, SendWr, UdDest, UdInit, UdQp, Wc, WcOpcode};

use crate::driver::open_ud;
use crate::error::{BenchError, Result, stack};
use crate::record::{Metric, Record};

/// After this time without a message, no more messages are expected.
const IDLE: Duration = Duration::from_millis(500);
/// The same before the first message.
const NOTHING: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a run.
const VOLUME: u64 = 16 << 20;

/// The number of messages of this size in a run.
pub(super) fn count(bytes: u64) -> u64 {
    (VOLUME / bytes).max(16)
}

/// A queue pair with a region for one message.
pub(super) struct End {
    pub(super) cq: Cq,
    pub(super) qp: UdQp,
    pub(super) mr: Mr,
    sends: u32,
    recvs: u32,
}

impl End {
    /// With at most this many sends and receives; `with` adjusts the queue pair's settings.
    pub(super) fn open(
        addr: SocketAddr,
        bytes: u64,
        [sends, recvs]: [u32; 2],
        with: impl FnOnce(&mut UdInit),
    ) -> Result<End> {
        let device = Device::open().map_err(stack("open the device"))?;
        let (pd, cq, qp) = open_ud(&device, addr, 3 * recvs, |init| {
            init.max_send_wr = sends;
            init.max_recv_wr = recvs;
            with(init);
        })?;
        let mr = pd.alloc_mr(bytes as usize, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let mr = mr.map_err(stack("allocate a region"))?;
        Ok(End {
            cq,
            qp,
            mr,
            sends,
            recvs,
        })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.qp.port().local_addr()
    }

    fn post_recvs(&self, count: usize) -> Result<()> {
        let wr = RecvWr::new(0).sge(self.mr.whole());
        let posted = self.qp.post_recv(&vec![wr; count]);
        posted.map_err(stack("post receives"))
    }

    /// Posts all receives.
    pub(super) fn arm(&self) -> Result<()> {
        self.post_recvs(self.recvs as usize)
    }

    /// Receives until no more messages arrive. Returns the number of valid bytes.
    pub(super) fn drain(&self) -> Result<u64> {
        let (mut valid, mut last, mut some) = (0, Instant::now(), false);
        let mut wcs = [Wc::default(); 64];
        while last.elapsed() < if some { IDLE } else { NOTHING } {
            let n = self.cq.wait(&mut wcs, Some(IDLE));
            let n = n.map_err(stack("wait for a CQ"))?;
            if n > 0 {
                (last, some) = (Instant::now(), true);
            }
            let mut recvs = 0;
            for wc in &wcs[..n] {
                valid += u64::from(wc.byte_len);
                match wc.opcode {
                    WcOpcode::Recv => recvs += 1,
                    WcOpcode::WriteRecord => drop(self.qp.take_record(wc.wr_id)),
                    _ => {}
                }
            }
            self.post_recvs(recvs)?;
        }
        Ok(valid)
    }

    /// Sends `count` times to each destination, as fast as possible. Returns the seconds.
    pub(super) fn send(&self, wr: SendWr, count: u64, to: &[UdDest]) -> Result<f64> {
        let wr = wr.sge(self.mr.whole());
        let start = Instant::now();
        let until = |left: u32| -> Result<()> {
            while self.qp.outstanding() > left {
                if start.elapsed() > PATIENCE {
                    return Err(BenchError::Stuck(PATIENCE.as_secs(), "sends"));
                }
                let waited = self
                    .cq
                    .wait(&mut [Wc::default(); 64], Some(Duration::from_millis(1)));
                waited.map_err(stack("wait for a CQ"))?;
            }
            Ok(())
        };
        for _ in 0..count {
            for to in to {
                until(self.sends - 1)?;
                self.qp.post_send(&wr, to).map_err(stack("post a send"))?;
            }
        }
        until(0)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A callback for points that could not be measured.
pub(super) type Failed<'a> = dyn FnMut(&str, &BenchError) + 'a;

/// The runs of a point, each with two numbers; `None` if one has failed.
pub(super) fn runs(
    what: &str,
    runs: u32,
    failed: &mut Failed<'_>,
    mut measure: impl FnMut() -> Result<(f64, f64)>,
) -> Option<(Vec<f64>, Vec<f64>)> {
    let measured: Result<Vec<_>> = (0..runs).map(|_| measure()).collect();
    match measured {
        Ok(measured) => Some(measured.into_iter().unzip()),
        Err(error) => {
            failed(what, &error);
            None
        }
    }
}

/// Throughput and the share of valid bytes of a point, as records.
pub(super) fn records(
    op: &str,
    bytes: u64,
    case: &str,
    (speeds, shares): &(Vec<f64>, Vec<f64>),
) -> Vec<Record> {
    let metrics = [
        (Metric::bandwidth_GBps, speeds),
        (Metric::valid_share, shares),
    ];
    let records = metrics.into_iter().filter_map(|(metric, samples)| {
        let record = Record::of(op, "udp", "weft-ud", bytes, metric, samples)?;
        Some(record.with_case(case))
    });
    records.collect()
}

/// The median of the record of a point.
pub(super) fn value(
    records: &[Record],
    op: &str,
    bytes: u64,
    case: &str,
    metric: Metric,
) -> Option<f64> {
    let found = records.iter().find(|record| {
        record.metric == metric
            && record.op == op
            && record.bytes == bytes
            && record.case.as_deref() == Some(case)
    });
    found.map(|record| record.summary.median)
}
