//! Table 1: the costs of the steps of a send, in this process.

use super::plan::RECORDS;
use crate::error::{Result, stack};
use crate::record::{Metric, Record, of_suite};
use std::time::Instant;
use weft_sdp::wire::{Body, Buffer, Message};
use weft_verbs::{Access, Device, LocalMode, RawMemory, protect};

/// Sizes of the memory.
const SIZES: [usize; 2] = [64 << 10, 1 << 20];
/// Times that a step is repeated for one sample.
const TIMES: u32 = 50;

/// The steps of the table, with their words.
pub(super) const STEPS: [(&str, &str); 11] = [
    ("register", "registration and its end"),
    ("protect", "memory protect: pages that were writable"),
    (
        "protected",
        "memory protect: pages that still are protected",
    ),
    ("fault", "a write to protected pages, nothing in flight"),
    ("message", "SOURCE AVAIL message"),
    ("copy", "one copy of the bytes"),
    ("malloc", "allocation of 40 bytes"),
    (
        "malloc_hook",
        "allocation of 40 bytes and a page (malloc hook, fig. 5)",
    ),
    ("allocate", "allocation of the bytes, and its end"),
    (
        "allocate_pages",
        "the same on pages of their own (weft run --azsdp-malloc)",
    ),
    ("two_copies", "two copies of the bytes (BSDP's)"),
];

/// Memory that begins on a page and fills it.
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "only its size is used")] [u8; 4096]);

/// Microseconds of each step, `runs` samples each.
pub(super) fn measure(runs: u32) -> Result<Vec<Record>> {
    let device = Device::builder().local(LocalMode::Off).open();
    let device = device.map_err(stack("open the device"))?;
    let pd = device.alloc_pd().map_err(stack("allocate a domain"))?;
    let bell = device.doorbell(|| ()).map_err(stack("make a doorbell"))?;
    let mut records = Vec::new();
    for len in SIZES {
        let page = protect::page_size();
        let all = RawMemory::leak(vec![1; len + page]);
        let off = all.as_ptr().align_offset(page);
        let memory = all.slice(off, len).map_err(stack("allocate memory"))?;
        let from = pd.reg_mr(vec![1; len], Access::LOCAL_WRITE);
        let from = from.map_err(stack("register"))?;
        let to = pd.reg_mr(vec![2; len], Access::LOCAL_WRITE);
        let to = to.map_err(stack("register"))?;
        let guard = || {
            bell.with_fd(|fd| protect::guard(&memory, fd))
                .and_then(std::result::Result::ok)
        };
        let hold = || drop(std::hint::black_box(guard()));
        let touch = || memory.write(len / 2, &[3]);
        for (step, _) in STEPS {
            let mut samples = Vec::new();
            for _ in 0..runs {
                let mut time = 0.0;
                for at in 0..TIMES {
                    // The preparation of the step is not timed.
                    match step {
                        "protect" => protect::settle(memory.as_ptr(), len),
                        "protected" | "fault" => hold(),
                        _ => {}
                    }
                    let start = Instant::now();
                    match step {
                        "register" => drop(pd.reg_raw(&memory, Access::REMOTE_READ)),
                        "protect" | "protected" => hold(),
                        "fault" => touch().map_err(stack("write"))?,
                        "message" => drop(std::hint::black_box(source_avail(at).emit())),
                        "malloc" => drop(std::hint::black_box(Vec::<u8>::with_capacity(40))),
                        "malloc_hook" => {
                            drop(std::hint::black_box(Vec::<u8>::with_capacity(40 + page)));
                        }
                        "allocate" => drop(std::hint::black_box(Vec::<u8>::with_capacity(len))),
                        "allocate_pages" => {
                            let pages = Vec::<Page>::with_capacity(len / size_of::<Page>());
                            drop(std::hint::black_box(pages));
                        }
                        "copy" => from.copy_to(0, &to, 0, len).map_err(stack("copy"))?,
                        _ => {
                            from.copy_to(0, &to, 0, len).map_err(stack("copy"))?;
                            to.copy_to(0, &from, 0, len).map_err(stack("copy"))?;
                        }
                    }
                    time += start.elapsed().as_secs_f64();
                }
                samples.push(time * 1e6 / f64::from(TIMES));
            }
            protect::settle(memory.as_ptr(), len);
            let (bytes, us) = (len as u64, Metric::time_us);
            let record = Record::of("costs", "none", "azsdp-block", bytes, us, &samples);
            records.extend(record.map(|record| record.with_case(step)));
        }
    }
    Ok(of_suite(RECORDS, records))
}

fn source_avail(index: u32) -> Message {
    Message {
        pending: false,
        bufs: 1,
        seq: index,
        ack: 0,
        body: Body::SrcAvail {
            index,
            at: Buffer {
                addr: 0,
                key: 1,
                len: 1,
            },
        },
    }
}
