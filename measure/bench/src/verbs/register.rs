//! The cost of registration compared with copying: thesis figs. 4.3 to 4.10 and the critical buffer
//! size.
//!
//! The measurement runs in the peer process, which is started with `MALLOC_MMAP_THRESHOLD_`. So
//! each new buffer is a fresh mapping without resident pages, and no unsafe code is necessary.

use crate::args::CommonArgs;
use crate::driver::{Context, Transport, deregister};
use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Task};
use crate::record::{Metric, Record};
use crate::stats::percentile;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;
use weft_verbs::{Access, Mr, Pd};

const SIZES: &str = "4K..1G*4";
const QUICK_SIZES: &str = "4K,64K,1M,16M,64M";
/// Above this size two threads' buffers are left out to save memory.
const LARGEST_PARALLEL: u64 = 256 << 20;
const THREADS: u32 = 2;
/// Small sizes are timed this often within a run, and the median counts.
const MOST_REPEATS: u64 = 32;

/// The parameters of the measurement.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    sizes: Vec<u64>,
    runs: u32,
}

/// The measured times: microseconds of each run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    stack: String,
    case: String,
    bytes: u64,
    samples: Vec<f64>,
}

/// The names of the cases in the results, with their stacks.
pub(crate) const CASES: [(&str, &str); 9] = [
    ("weft", "register, resident"),
    ("weft", "register, not resident"),
    ("weft", "deregister"),
    ("weft", "register and touch, not resident"),
    ("memcpy", "copy, resident"),
    ("memcpy", "copy, not resident"),
    ("weft", "register, 1 thread, 1 region"),
    ("weft", "register, 1 thread, 2 regions"),
    ("weft", "register, 2 threads, 2 regions"),
];

pub(crate) fn measure(common: &CommonArgs) -> Result<Vec<Record>> {
    let mut peer = Peer::spawn(&[("MALLOC_MMAP_THRESHOLD_", "4096")])?;
    peer.task(
        Task::Register,
        &Plan {
            sizes: common.effort.sizes(SIZES, QUICK_SIZES),
            runs: common.effort.runs(),
        },
    )?;
    let rows: Vec<Row> = peer.measured()?;
    Ok(rows.iter().filter_map(record).collect())
}

fn record(row: &Row) -> Option<Record> {
    let (stack, us) = (&row.stack, Metric::time_us);
    let record = Record::of("register", "none", stack, row.bytes, us, &row.samples)?;
    Some(record.with_case(&row.case))
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// A buffer without resident pages.
fn fresh(len: usize) -> Vec<u8> {
    vec![0; len]
}

/// A buffer with resident pages.
fn touched(len: usize) -> Vec<u8> {
    vec![1; len]
}

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

fn register(pd: &Pd, buffer: Vec<u8>) -> Result<Mr> {
    pd.reg_mr(buffer, RIGHTS).map_err(stack("register memory"))
}

impl Plan {
    /// Runs all timings; in the peer process.
    pub(crate) fn run(&self, context: &mut Context) -> Result<Vec<Row>> {
        let (_, pd) = context.device(Transport::Tcp)?;
        let mut rows = Vec::new();
        for &bytes in &self.sizes {
            let len = usize::try_from(bytes)
                .map_err(|_| BenchError::Usage("the size is too large".to_owned()))?;
            let repeats = ((16 << 20) / bytes.max(1)).clamp(1, MOST_REPEATS);
            let mut samples: [Vec<f64>; CASES.len()] = Default::default();
            // One additional round first, to warm up.
            for round in 0..=self.runs {
                let mut inner: [Vec<f64>; CASES.len()] = Default::default();
                for _ in 0..repeats {
                    one_round(pd, len, &mut inner)?;
                    if bytes <= LARGEST_PARALLEL {
                        parallel_round(pd, len, &mut inner)?;
                    }
                }
                for (samples, mut inner) in samples.iter_mut().zip(inner) {
                    inner.sort_unstable_by(f64::total_cmp);
                    if round > 0 {
                        samples.extend(percentile(&inner, 0.5));
                    }
                }
            }
            for ((stack, case), samples) in CASES.iter().zip(samples) {
                rows.push(Row {
                    stack: (*stack).to_owned(),
                    case: (*case).to_owned(),
                    bytes,
                    samples,
                });
            }
        }
        Ok(rows)
    }
}

fn one_round(pd: &Pd, len: usize, times: &mut [Vec<f64>; CASES.len()]) -> Result<()> {
    let source = touched(len);
    let start = Instant::now();
    let mr = register(pd, source)?;
    times[0].push(micros(start));
    let start = Instant::now();
    let source = deregister(mr)?;
    times[2].push(micros(start));

    let absent = fresh(len);
    let start = Instant::now();
    let mr = register(pd, absent)?;
    times[1].push(micros(start));
    mr.fill(0, len, 1).map_err(stack("fill a memory region"))?;
    times[3].push(micros(start));
    drop(mr);

    let mut absent = fresh(len);
    let start = Instant::now();
    absent.copy_from_slice(black_box(&source));
    times[5].push(micros(start));
    let mut present = black_box(absent);
    let start = Instant::now();
    present.copy_from_slice(black_box(&source));
    times[4].push(micros(start));
    black_box(present);
    Ok(())
}

fn parallel_round(pd: &Pd, len: usize, times: &mut [Vec<f64>; CASES.len()]) -> Result<()> {
    let buffers = [touched(len), touched(len)];
    let start = Instant::now();
    let mut regions = Vec::with_capacity(buffers.len());
    for (index, buffer) in buffers.into_iter().enumerate() {
        regions.push(register(pd, buffer)?);
        if index == 0 {
            times[6].push(micros(start));
        }
    }
    times[7].push(micros(start));
    let buffers = regions
        .into_iter()
        .map(deregister)
        .collect::<Result<Vec<_>>>()?;
    let barrier = Barrier::new(THREADS as usize);
    // Each thread measures its own time from the barrier; the pair takes as long as the slower one.
    let slowest = std::thread::scope(|scope| {
        let threads: Vec<_> = buffers
            .into_iter()
            .map(|buffer| {
                scope.spawn(|| {
                    barrier.wait();
                    let start = Instant::now();
                    let mr = register(pd, buffer)?;
                    let time = micros(start);
                    drop(mr);
                    Ok(time)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(BenchError::Usage("a thread panicked".to_owned())))
            })
            .try_fold(0.0, |slowest: f64, time: Result<f64>| {
                time.map(|time| slowest.max(time))
            })
    })?;
    times[8].push(slowest);
    Ok(())
}

/// The smallest measured size from which registering `case` is never slower than copying `copy`.
pub(crate) fn critical_size(records: &[Record], case: &str, copy: &str) -> Option<u64> {
    let times = |case: &str| {
        let mut times: Vec<(u64, f64)> = records
            .iter()
            .filter(|record| record.op == "register" && record.case.as_deref() == Some(case))
            .map(|record| (record.bytes, record.summary.median))
            .collect();
        times.sort_unstable_by_key(|time| time.0);
        times
    };
    let (registering, copying) = (times(case), times(copy));
    let slower = registering
        .iter()
        .zip(&copying)
        .rposition(|(register, copy)| register.1 > copy.1);
    let first = slower.map_or(0, |index| index + 1);
    registering.get(first).map(|time| time.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn critical_size_is_where_copying_starts_to_lose() {
        let record = |case: &str, bytes: u64, time: f64| {
            let us = Metric::time_us;
            let record = Record::of("register", "none", "weft", bytes, us, &[time]);
            record.unwrap().with_case(case)
        };
        let records = [
            record("r", 4096, 2.0),
            record("r", 65536, 3.0),
            record("r", 16384, 2.5),
            record("c", 4096, 0.5),
            record("c", 16384, 2.0),
            record("c", 65536, 9.0),
        ];
        assert_eq!(critical_size(&records, "r", "c"), Some(65536));
        assert_eq!(critical_size(&records, "c", "r"), None);
        assert_eq!(critical_size(&[], "r", "c"), None);
    }
}
