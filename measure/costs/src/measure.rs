//! The measurements: this machine's copies, registrations, pins and transfers.

use crate::error::{Error, Result, error, failed};
use crate::pair::pair;
use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use weft_advise::machine::{Case, Machine, Point};
use weft_report::size::human;
use weft_report::stats::Summary;
use weft_sys::pages::Pages;
use weft_verbs::cm;
use weft_verbs::{Access, Cq, Device, LocalMode, Mr, Pd, RawMemory, RecvWr, SendWr, Wc, WcStatus};

/// Memory that cold copies go through, source and target each: more than caches hold.
const ARENA: usize = 64 << 20;
/// Below this size huge pages have no effect.
const HUGE: u64 = 2 << 20;
/// Sends larger than this are not measured one at a time.
const LARGEST_SEND: u64 = 1 << 20;
/// The largest message that the verbs carry out while it is posted.
const LARGEST_LOCAL: u64 = 4096;
/// A ring of `weft run`.
const RING: usize = 256 << 10;
/// Where transfers are overlapped with computation.
const OVERLAPPED: std::ops::RangeInclusive<u64> = 64 << 10..=4 << 20;
/// Regions of the parallel cases.
const PARALLEL: std::ops::RangeInclusive<u64> = 64 << 10..=64 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// The amount of measuring.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Sizes in bytes.
    pub sizes: Vec<u64>,
    /// Samples of each point; the minimum counts.
    pub runs: u32,
}

impl Effort {
    /// Enough for an advice, in some seconds.
    pub fn brief() -> Self {
        Self {
            sizes: (6..=12).map(|power| 1 << (2 * power)).collect(),
            runs: 9,
        }
    }
}

/// Steps that [`measure`] reports.
pub const STEPS: u64 = 8;

/// Measures the machine; `at` is called with the name of each step, [`STEPS`] times.
///
/// # Errors
/// If memory, threads or loopback sockets are not available. A measurement without the necessary rights is left out, and named in
/// [`Machine::missing`].
pub fn measure(effort: &Effort, mut at: impl FnMut(&str)) -> Result<Machine> {
    let mut machine = Machine {
        threads: weft_sys::cpu_count().clamp(2, 4),
        ..Machine::default()
    };
    let mut bench = Bench {
        runs: effort.runs.max(1),
        machine: &mut machine,
    };
    at("copies");
    bench.copies(&effort.sizes)?;
    at("registration");
    bench.registrations(&effort.sizes)?;
    at("pinned pages");
    bench.pins(&effort.sizes)?;
    at("parallel registration");
    bench.parallel(&effort.sizes)?;
    at("loopback TCP");
    bench.tcp(&effort.sizes)?;
    at("shared memory");
    bench.local(&effort.sizes)?;
    at("rings");
    bench.rings(&effort.sizes)?;
    at("overlap");
    bench.overlap(&effort.sizes)?;
    Ok(machine)
}

struct Bench<'a> {
    runs: u32,
    machine: &'a mut Machine,
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

fn memory(what: std::io::Error) -> Error {
    error("map memory")(what)
}

/// The time of one of `times` calls.
fn each(times: usize, mut call: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    for at in 0..times {
        call(at);
    }
    micros(start) / times as f64
}

fn device(local: LocalMode) -> Result<(Device, Pd)> {
    let device = Device::builder().local(local).open();
    let device = device.map_err(error("open the device"))?;
    let pd = device.alloc_pd().map_err(error("allocate a domain"))?;
    Ok((device, pd))
}

fn large(sizes: &[u64]) -> Result<usize> {
    let most = sizes.iter().copied().max().unwrap_or(4096);
    usize::try_from(most).map_err(|_| failed("measure", "the size is too large"))
}

impl Bench<'_> {
    /// Measures the samples of a point. The first one warms up and is discarded.
    fn point(
        &mut self,
        case: Case,
        bytes: u64,
        mut sample: impl FnMut() -> Result<f64>,
    ) -> Result<()> {
        sample()?;
        let samples = (0..self.runs)
            .map(|_| sample())
            .collect::<Result<Vec<_>>>()?;
        if let Some(summary) = Summary::of(&samples) {
            self.machine.points.push(Point {
                case,
                bytes,
                us: summary.min,
            });
        }
        Ok(())
    }

    fn copies(&mut self, sizes: &[u64]) -> Result<()> {
        let most = large(sizes)?;
        for huge in [false, true] {
            let mut source = Pages::new(most, huge).map_err(memory)?;
            let mut target = Pages::new(most, huge).map_err(memory)?;
            if huge {
                source.touch();
                self.machine.huge_pages = huge_pages();
                if !self.machine.huge_pages {
                    let why = "huge pages: the kernel gave none (see /sys/kernel/mm/transparent_hugepage/enabled)";
                    self.machine.missing.push(why.to_owned());
                    return Ok(());
                }
            }
            source.touch();
            let (warm, absent) = if huge {
                (Case::CopyHuge, Case::CopyAbsentHuge)
            } else {
                (Case::CopyWarm, Case::CopyAbsent)
            };
            for &bytes in sizes.iter().filter(|bytes| !huge || **bytes >= HUGE) {
                let len = bytes as usize;
                target.touch();
                let times = ((256 << 10) / len).clamp(1, 64);
                self.point(warm, bytes, || {
                    let (source, target) = (&source.bytes()[..len], &mut target.bytes()[..len]);
                    Ok(each(times, |_| {
                        black_box(&mut *target).copy_from_slice(black_box(source));
                    }))
                })?;
                self.point(absent, bytes, || {
                    target.release().map_err(memory)?;
                    let (source, target) = (&source.bytes()[..len], &mut target.bytes()[..len]);
                    Ok(each(1, |_| target.copy_from_slice(black_box(source))))
                })?;
            }
        }
        let arena = ARENA.max(most);
        let mut source = Pages::new(arena, false).map_err(memory)?;
        let mut target = Pages::new(arena, false).map_err(memory)?;
        source.touch();
        target.touch();
        let (source, target) = (source.bytes(), target.bytes());
        let mut next = 0;
        for &bytes in sizes {
            let len = bytes as usize;
            let times = ((1 << 20) / len).clamp(1, 16);
            self.point(Case::CopyCold, bytes, || {
                Ok(each(times, |_| {
                    // Small copies are far apart, so that the prefetch of one does not serve the next.
                    next = if next + len + (64 << 10) > arena {
                        0
                    } else {
                        next
                    };
                    target[next..next + len].copy_from_slice(black_box(&source[next..next + len]));
                    next += len + (64 << 10);
                }))
            })?;
        }
        Ok(())
    }

    fn registrations(&mut self, sizes: &[u64]) -> Result<()> {
        let (_device, pd) = device(LocalMode::Off)?;
        let all = RawMemory::leak(vec![1; large(sizes)?]);
        for &bytes in sizes {
            let len = bytes as usize;
            let raw = all.slice(0, len).map_err(error("take memory"))?;
            let register = || {
                pd.reg_raw(&raw, Access::REMOTE_READ)
                    .map_err(error("register memory"))
            };
            self.point(Case::Register, bytes, || {
                let start = Instant::now();
                for _ in 0..20 {
                    drop(black_box(register()?));
                }
                Ok(micros(start) / 20.0)
            })?;
            self.point(Case::Deregister, bytes, || {
                let regions = (0..20).map(|_| register()).collect::<Result<Vec<_>>>()?;
                let start = Instant::now();
                drop(black_box(regions));
                Ok(micros(start) / 20.0)
            })?;
            // Registration touches no page, so these need not be the registered pages.
            let mut absent = Pages::new(len, false).map_err(memory)?;
            self.point(Case::RegisterAbsent, bytes, || {
                absent.release().map_err(memory)?;
                let start = Instant::now();
                drop(black_box(register()?));
                absent.touch();
                Ok(micros(start))
            })?;
        }
        Ok(())
    }

    fn pins(&mut self, sizes: &[u64]) -> Result<()> {
        for huge in [false, true] {
            if huge && !self.machine.huge_pages {
                continue;
            }
            let (here, absent) = if huge {
                (Case::PinHuge, Case::PinAbsentHuge)
            } else {
                (Case::Pin, Case::PinAbsent)
            };
            for &bytes in sizes.iter().filter(|bytes| !huge || **bytes >= HUGE) {
                let len = bytes as usize;
                let mut pages = Pages::new(len, huge).map_err(memory)?;
                if let Err(error) = pages.lock(len) {
                    self.machine.missing.push(format!(
                        "pins of {} and more: {error} (see `ulimit -l`)",
                        human(bytes)
                    ));
                    break;
                }
                pages.unlock(len).map_err(error("unpin pages"))?;
                let pin = |pages: &mut Pages| {
                    let start = Instant::now();
                    pages.lock(len).map_err(error("pin pages"))?;
                    let pinned = micros(start);
                    pages.unlock(len).map_err(error("unpin pages"))?;
                    Ok((micros(start), pinned))
                };
                pages.touch();
                self.point(here, bytes, || Ok(pin(&mut pages)?.0))?;
                if !huge {
                    self.point(Case::Unpin, bytes, || {
                        let (both, pinned) = pin(&mut pages)?;
                        Ok(both - pinned)
                    })?;
                }
                self.point(absent, bytes, || {
                    pages.release().map_err(memory)?;
                    Ok(pin(&mut pages)?.0)
                })?;
            }
        }
        Ok(())
    }

    fn parallel(&mut self, sizes: &[u64]) -> Result<()> {
        let threads = self.machine.threads;
        let (_device, pd) = device(LocalMode::Off)?;
        for &bytes in sizes.iter().filter(|bytes| PARALLEL.contains(bytes)) {
            let len = bytes as usize;
            let raws: Vec<RawMemory> = (0..threads)
                .map(|_| RawMemory::leak(vec![1; 4096]))
                .collect();
            let register = |at: usize| -> Result<()> {
                // The cost of weft's registration does not depend on the size; a page for each thread is enough.
                drop(
                    pd.reg_raw(&raws[at], Access::REMOTE_READ)
                        .map_err(error("register memory"))?,
                );
                Ok(())
            };
            self.together(
                [Case::RegisterInTurn, Case::RegisterTogether],
                bytes,
                &mut vec![(); threads],
                |at, ()| register(at),
                |()| Ok(()),
            )?;
            if self.machine.at(Case::Pin, bytes).is_none() {
                continue;
            }
            for absent in [false, true] {
                let mut memories = (0..threads)
                    .map(|_| Pages::new(len, false).map_err(memory))
                    .collect::<Result<Vec<_>>>()?;
                let cases = if absent {
                    [Case::PinAbsentInTurn, Case::PinAbsentTogether]
                } else {
                    [Case::PinInTurn, Case::PinTogether]
                };
                let pinned = self.together(
                    cases,
                    bytes,
                    &mut memories,
                    |_, pages| pages.lock(len).map_err(error("pin pages")),
                    |pages| {
                        pages.unlock(len).map_err(error("unpin pages"))?;
                        if absent {
                            pages.release().map_err(memory)?;
                        } else {
                            pages.touch();
                        }
                        Ok(())
                    },
                );
                if pinned.is_err() {
                    self.machine.missing.push(format!(
                        "{threads} pins of {}: more than may be pinned (see `ulimit -l`)",
                        human(bytes)
                    ));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// One step for each of several memories, once in turn and once with a thread each; `reset` runs before each.
    fn together<T: Send>(
        &mut self,
        cases: [Case; 2],
        bytes: u64,
        memories: &mut [T],
        step: impl Fn(usize, &mut T) -> Result<()> + Sync,
        reset: impl Fn(&mut T) -> Result<()>,
    ) -> Result<()> {
        self.point(cases[0], bytes, || {
            memories.iter_mut().try_for_each(&reset)?;
            let start = Instant::now();
            for (at, memory) in memories.iter_mut().enumerate() {
                step(at, memory)?;
            }
            Ok(micros(start))
        })?;
        self.point(cases[1], bytes, || {
            memories.iter_mut().try_for_each(&reset)?;
            let barrier = Barrier::new(memories.len());
            let (barrier, step) = (&barrier, &step);
            // From the first thread's start to the last one's end.
            let times = std::thread::scope(|scope| {
                let threads: Vec<_> = memories
                    .iter_mut()
                    .enumerate()
                    .map(|(at, memory)| {
                        scope.spawn(move || {
                            barrier.wait();
                            let start = Instant::now();
                            step(at, memory)?;
                            Ok((start, Instant::now()))
                        })
                    })
                    .collect();
                let ended = threads.into_iter().map(|thread| {
                    let gone = || Err(failed("measure", "a thread panicked"));
                    thread.join().unwrap_or_else(|_| gone())
                });
                ended.collect::<Result<Vec<_>>>()
            })?;
            let first = times.iter().map(|time| time.0).min();
            let last = times.iter().map(|time| time.1).max();
            let all = first.zip(last).map_or(Duration::ZERO, |(a, b)| b - a);
            Ok(all.as_secs_f64() * 1e6)
        })?;
        memories.iter_mut().try_for_each(&reset)
    }

    fn tcp(&mut self, sizes: &[u64]) -> Result<()> {
        let io = |why: std::io::Error| error("measure loopback TCP")(why);
        let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
        let near = TcpStream::connect(listener.local_addr().map_err(io)?).map_err(io)?;
        let (far, _) = listener.accept().map_err(io)?;
        near.set_nodelay(true).map_err(io)?;
        far.set_nodelay(true).map_err(io)?;
        self.point(Case::RoundTrip, 1, || {
            std::thread::scope(|scope| {
                let echo = scope.spawn(|| -> std::io::Result<()> {
                    let mut byte = [0];
                    for _ in 0..50 {
                        (&far).read_exact(&mut byte)?;
                        (&far).write_all(&byte)?;
                    }
                    Ok(())
                });
                let mut byte = [7];
                let start = Instant::now();
                for _ in 0..50 {
                    (&near).write_all(&byte).map_err(io)?;
                    (&near).read_exact(&mut byte).map_err(io)?;
                }
                let time = micros(start) / 50.0;
                let echoed = echo.join();
                echoed
                    .unwrap_or_else(|_| Err(ErrorKind::Other.into()))
                    .map_err(io)?;
                Ok(time)
            })
        })?;
        near.set_nonblocking(true).map_err(io)?;
        far.set_nonblocking(true).map_err(io)?;
        let most = large(sizes)?.min(LARGEST_SEND as usize);
        let (out, mut into) = (vec![1; most], vec![0; most]);
        for &bytes in with_small(sizes)
            .iter()
            .filter(|bytes| **bytes <= LARGEST_SEND)
        {
            let len = bytes as usize;
            let times = ((256 << 10) / len).clamp(1, 100);
            self.point(Case::Tcp, bytes, || {
                let start = Instant::now();
                for _ in 0..times {
                    cross(&near, &far, &out[..len], &mut into[..len]).map_err(io)?;
                }
                Ok(micros(start) / times as f64)
            })?;
        }
        Ok(())
    }

    fn local(&mut self, sizes: &[u64]) -> Result<()> {
        let ends = match Ends::new(LocalMode::Require, LARGEST_LOCAL as usize) {
            Ok(ends) => ends,
            Err(error) => {
                self.machine
                    .missing
                    .push(format!("weft's shared memory: {error}"));
                return Ok(());
            }
        };
        for &bytes in with_small(sizes)
            .iter()
            .filter(|bytes| **bytes <= LARGEST_LOCAL)
        {
            let len = bytes as u32;
            let times = ((256 << 10) / len).clamp(1, 100);
            self.point(Case::Local, bytes, || {
                let start = Instant::now();
                for _ in 0..times {
                    let receive = RecvWr::new(1).sge(ends.to.sge(0, len as usize));
                    ends.far.qp.post_recv(&[receive]).map_err(error("post"))?;
                    let send = SendWr::send(1)
                        .sge(ends.from.sge(0, len as usize))
                        .signaled();
                    ends.near.qp.post_send_one(send).map_err(error("post"))?;
                    done(&ends.near_cq)?;
                    done(&ends.far_cq)?;
                }
                Ok(micros(start) / f64::from(times))
            })?;
        }
        Ok(())
    }

    fn rings(&mut self, sizes: &[u64]) -> Result<()> {
        let most = large(sizes)?.min(LARGEST_SEND as usize);
        let (source, mut ring, mut target) = (vec![1u8; most], vec![1u8; RING], vec![1u8; most]);
        let sizes = with_small(sizes);
        for &bytes in sizes.iter().filter(|bytes| **bytes <= LARGEST_SEND) {
            let len = bytes as usize;
            let times = ((256 << 10) / len).clamp(1, 100);
            self.point(Case::Rings, bytes, || {
                Ok(each(times, |at| {
                    let pieces = source[..len].chunks(RING / 2);
                    for (piece, into) in pieces.zip(target[..len].chunks_mut(RING / 2)) {
                        let off = at * len % (RING - piece.len() + 1);
                        let place = &mut ring[off..off + piece.len()];
                        place.copy_from_slice(black_box(piece));
                        into.copy_from_slice(black_box(place));
                    }
                }))
            })?;
        }
        Ok(())
    }

    fn overlap(&mut self, sizes: &[u64]) -> Result<()> {
        let sizes: Vec<u64> = sizes
            .iter()
            .copied()
            .filter(|b| OVERLAPPED.contains(b))
            .collect();
        if sizes.is_empty() {
            return Ok(());
        }
        let ends = Ends::new(LocalMode::Off, large(&sizes)?)?;
        let unit = (0..5).map(|_| each(500, compute)).fold(f64::MAX, f64::min);
        for bytes in sizes {
            let post = || {
                let read = SendWr::read(1, ends.to.remote(0)).sge(ends.from.sge(0, bytes as usize));
                let posted = ends.near.qp.post_send_one(read.signaled());
                posted.map_err(error("post a Read"))
            };
            self.point(Case::Transfer, bytes, || {
                let start = Instant::now();
                post()?;
                done(&ends.near_cq)?;
                Ok(micros(start))
            })?;
            let transfer = self.machine.at(Case::Transfer, bytes).unwrap_or(0.0);
            let units = (transfer / unit) as usize + 1;
            let work = || (0..units).for_each(compute);
            self.point(Case::Compute, bytes, || {
                let start = Instant::now();
                work();
                Ok(micros(start))
            })?;
            self.point(Case::Both, bytes, || {
                let start = Instant::now();
                post()?;
                work();
                done(&ends.near_cq)?;
                Ok(micros(start))
            })?;
        }
        Ok(())
    }
}

/// Message sizes: the given ones and three small ones.
fn with_small(sizes: &[u64]) -> Vec<u64> {
    let mut all = [&[64, 256, 1024], sizes].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Some hundred nanoseconds of work that uses no memory.
fn compute(at: usize) {
    let mut x = black_box(at as u64);
    for _ in 0..200 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    }
    black_box(x);
}

/// Sends and receives in turn, as much as the kernel accepts, until all bytes have crossed.
fn cross(
    mut near: &TcpStream,
    mut far: &TcpStream,
    out: &[u8],
    into: &mut [u8],
) -> std::io::Result<()> {
    let (mut sent, mut got) = (0, 0);
    let none = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    };
    while got < into.len() {
        if sent < out.len() {
            sent += near.write(&out[sent..]).or_else(none)?;
        }
        match far.read(&mut into[got..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            result => got += result.or_else(none)?,
        }
    }
    Ok(())
}

/// Whether this process has a huge page.
fn huge_pages() -> bool {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("AnonHugePages:"));
    line.is_some_and(|rest| rest.trim() != "0 kB")
}

/// Two connected queue pairs of this process.
struct Ends {
    near: cm::Connection,
    far: cm::Connection,
    near_cq: Cq,
    far_cq: Cq,
    from: Mr,
    to: Mr,
    _device: Device,
}

impl Ends {
    fn new(local: LocalMode, len: usize) -> Result<Self> {
        let (device, pd) = device(local)?;
        let end = (&device, &pd);
        let [(near, near_cq), (far, far_cq)] = pair(end, end, &cm::ConnParam::default())?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let region = || {
            pd.reg_mr(vec![1; len], access)
                .map_err(error("register memory"))
        };
        Ok(Self {
            near,
            far,
            near_cq,
            far_cq,
            from: region()?,
            to: region()?,
            _device: device,
        })
    }
}

fn done(cq: &Cq) -> Result<()> {
    let mut wc = [Wc::default()];
    let mut start = None;
    while cq.poll(&mut wc).map_err(error("poll"))? == 0 {
        if start.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(failed("transfer", "nothing moved"));
        }
    }
    if wc[0].status == WcStatus::Success {
        Ok(())
    } else {
        Err(failed("transfer", format!("{:?}", wc[0].status)))
    }
}
