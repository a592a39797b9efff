//! The record of one call that moves data.
//!
//! # Safety
//!
//! The caller's memory is never read; the kernel is asked whether its pages are resident.

use libc::{c_int, c_void, ssize_t};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use weft_advise::record::{Count, Flow, GAP_ENDS, LiveProcess, LiveWay};

use crate::fds::{self, Fd, Kind};
use crate::{errno, set_errno, slot};

/// One call in this many has its processor time measured, its pages checked, the observer's cost measured.
const CPU_EACH: u64 = 16;
const PAGES_EACH: u64 = 64;
const OWN_EACH: u64 = 64;
/// Pages that are looked at for one call.
const MOST_PAGES: usize = 1024;
const PAGE: usize = 4096;
/// Buffers that are remembered in each direction.
const BUFFERS: usize = 4096;
const AREA_SHIFT: u32 = 16;

/// Sending or receiving; the place in a record.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Sends = 0,
    Receives = 1,
}

/// Arguments of a call.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) addr: *const c_void,
    pub(crate) len: usize,
    /// Pieces of memory, of which the first is at `addr`.
    pub(crate) pieces: usize,
    pub(crate) flags: c_int,
}

impl Asked {
    pub(crate) fn new(addr: *const c_void, len: usize, flags: c_int) -> Self {
        Self {
            addr,
            len,
            pieces: 1,
            flags,
        }
    }

    /// # Safety
    /// `iov` has `n` pieces, or is not looked at by the kernel either.
    pub(crate) unsafe fn pieces(iov: *const libc::iovec, n: usize, flags: c_int) -> Self {
        let mut asked = Self::new(std::ptr::null(), 0, flags);
        if iov.is_null() || n == 0 || n > 1024 {
            return asked;
        }
        // SAFETY: the caller's promise.
        let pieces = unsafe { std::slice::from_raw_parts(iov, n) };
        asked.len = pieces
            .iter()
            .fold(0, |sum, piece| sum.saturating_add(piece.iov_len));
        asked.addr = pieces[0].iov_base;
        asked.pieces = n;
        asked
    }
}

/// A used buffer: its address, the end of the last call with it, and the duration of that call.
struct Used {
    addr: AtomicU64,
    end: AtomicU64,
    took: AtomicU64,
}

struct Buffers {
    exact: [Used; BUFFERS],
    areas: [AtomicU64; BUFFERS],
}

static USED: [Buffers; 2] = [const {
    Buffers {
        exact: [const {
            Used {
                addr: AtomicU64::new(0),
                end: AtomicU64::new(0),
                took: AtomicU64::new(0),
            }
        }; BUFFERS],
        areas: [const { AtomicU64::new(0) }; BUFFERS],
    }
}; 2];

fn place(of: u64) -> usize {
    (of.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize % BUFFERS
}

/// Before a call.
struct Begun {
    /// In calls whose own cost is measured: the processor time spent here so far, and the cost of reading that clock.
    own: Option<(u64, u64)>,
    cpu: Option<u64>,
    at: u64,
}

fn begin(process: &LiveProcess, kind: Kind, way: Way, asked: &Asked) -> Begun {
    let dice = slot::dice();
    // Processor time: in time by the clock every preemption would be ours.
    let own = dice
        .is_multiple_of(OWN_EACH)
        .then(|| (slot::cpu(), slot::cpu()));
    let stream = kind == Kind::Stream;
    if stream && (dice >> 8).is_multiple_of(PAGES_EACH) {
        look_at_pages(&process.ways[way as usize], asked);
    }
    let cpu = (stream && (dice >> 16).is_multiple_of(CPU_EACH)).then(slot::cpu);
    Begun {
        own: own.map(|(first, start)| {
            let clock = start.saturating_sub(first);
            (slot::cpu().saturating_sub(start + clock), clock)
        }),
        cpu,
        at: slot::now(),
    }
}

fn look_at_pages(way: &LiveWay, asked: &Asked) {
    let first = asked.addr as usize & !(PAGE - 1);
    let len = if asked.pieces == 1 { asked.len } else { 1 };
    let pages = (asked.addr as usize % PAGE + len)
        .div_ceil(PAGE)
        .min(MOST_PAGES);
    if asked.addr.is_null() || len == 0 {
        return;
    }
    let mut there = [0u8; MOST_PAGES];
    // SAFETY: writes a byte for each page; addresses that are not mapped are an error.
    let result = unsafe { libc::mincore(first as *mut c_void, pages * PAGE, there.as_mut_ptr()) };
    if result == 0 {
        let resident = there[..pages].iter().filter(|page| **page & 1 != 0).count();
        way.add(Flow::Pages, pages as u64);
        way.add(Flow::Resident, resident as u64);
    }
}

/// Runs a call that moves data, and learns from it.
#[inline]
pub(crate) fn transfer(
    fd: c_int,
    way: Way,
    asked: Asked,
    call: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let Some((kind, place)) = fds::socket(fd) else {
        return call();
    };
    let Some(process) = slot::mine() else {
        return call();
    };
    watched(process, kind, place, fd, way, asked, call)
}

fn watched(
    process: &LiveProcess,
    kind: Kind,
    place: &Fd,
    fd: c_int,
    way: Way,
    asked: Asked,
    call: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let before = errno();
    let begun = begin(process, kind, way, &asked);
    set_errno(before);
    let result = call();
    let after = errno();
    let end = slot::now();
    let own = begun.own.map(|own| (own, slot::cpu()));
    let flow = &process.ways[way as usize];
    if kind == Kind::Stream
        && let Some(cpu) = begun.cpu
    {
        flow.add(Flow::Sampled, 1);
        flow.add(Flow::SampledCpu, slot::cpu().saturating_sub(cpu));
    }
    let took = end.saturating_sub(begun.at);
    process.set(Count::Last, end);
    if asked.flags & libc::MSG_OOB != 0 {
        process.add(Count::Urgent, 1);
    }
    match kind {
        Kind::Stream => {
            place.locate(fd, process);
            stream(process, place, way, &asked, result, after, begun.at, took);
        }
        Kind::Datagram => {
            flow.add(Flow::DatagramCalls, 1);
            flow.add(Flow::DatagramNs, took);
            if let Ok(n) = u64::try_from(result) {
                flow.add(Flow::DatagramBytes, n);
                flow.size(n);
            }
        }
        Kind::Unix | Kind::Other => {
            flow.add(Flow::UnixCalls, 1);
            flow.add(Flow::UnixBytes, u64::try_from(result).unwrap_or(0));
        }
    }
    if let Some(((spent, clock), from)) = own {
        process.set(Count::Cpu, slot::cpu_of_all());
        process.add(Count::OwnSampled, 1);
        let spent = spent + slot::cpu().saturating_sub(from + clock);
        // Five readings of the clock in this call, none in the others.
        process.add(Count::OwnNs, spent + 5 * clock / OWN_EACH);
    }
    set_errno(after);
    result
}

#[allow(clippy::too_many_arguments, reason = "one caller, which has them all")]
fn stream(
    process: &LiveProcess,
    place: &Fd,
    way: Way,
    asked: &Asked,
    result: ssize_t,
    error: c_int,
    start: u64,
    took: u64,
) {
    let flow = &process.ways[way as usize];
    flow.add(Flow::Calls, 1);
    flow.add(Flow::Ns, took);
    flow.add(Flow::Asked, asked.len as u64);
    if asked.flags & libc::MSG_PEEK != 0 {
        process.add(Count::Peeks, 1);
        return;
    }
    let Ok(n) = u64::try_from(result) else {
        let again = error == libc::EAGAIN;
        flow.add(if again { Flow::Again } else { Flow::Failed }, 1);
        return;
    };
    flow.add(Flow::Bytes, n);
    if place.is_same_host() {
        flow.add(Flow::BytesSameHost, n);
    }
    if (n as usize) < asked.len {
        flow.add(Flow::Short, 1);
    }
    let sends = way == Way::Sends;
    flow.size(if sends { asked.len as u64 } else { n });
    if asked.flags & libc::MSG_ZEROCOPY != 0 {
        process.add(Count::ZeroCopy, 1);
    }
    if place.note(sends, n) {
        process.add(Count::Turns, 1);
    }
    if asked.pieces > 1 {
        flow.add(Flow::Gathers, 1);
        flow.add(Flow::Pieces, asked.pieces as u64);
    }
    if n > 0 {
        buffer(flow, way, asked.addr as u64, n, start, took);
    }
}

/// Records whether this buffer was used before, and the time in between.
fn buffer(flow: &LiveWay, way: Way, addr: u64, n: u64, start: u64, took: u64) {
    if addr.is_multiple_of(PAGE as u64) {
        flow.add(Flow::Aligned, 1);
    }
    let used = &USED[way as usize];
    let exact = &used.exact[self::place(addr)];
    if exact.addr.load(Relaxed) == addr {
        let gap = start.saturating_sub(exact.end.load(Relaxed));
        flow.add(Flow::Again1, 1);
        flow.add(Flow::BytesAgain, n);
        flow.add(Flow::GapNs, gap);
        flow.add(Flow::OverlapNs, gap.min(exact.took.load(Relaxed)));
        let class = GAP_ENDS.iter().take_while(|end| gap >= **end).count();
        flow.gaps[class].fetch_add(1, Relaxed);
    } else {
        exact.addr.store(addr, Relaxed);
    }
    exact.end.store(start + took, Relaxed);
    exact.took.store(took, Relaxed);
    let area = (addr >> AREA_SHIFT) + 1;
    let known = &used.areas[self::place(area)];
    if known.load(Relaxed) == area {
        flow.add(Flow::AreaAgain, 1);
    } else {
        known.store(area, Relaxed);
    }
}

/// Runs a call that moves bytes of a file or a pipe into (or out of) a socket.
pub(crate) fn file(ends: [c_int; 2], call: impl FnOnce() -> ssize_t) -> ssize_t {
    let socket = ends.into_iter().find_map(fds::socket);
    let Some(((_, place), process)) = socket.zip(slot::mine()) else {
        return call();
    };
    let start = slot::now();
    let result = call();
    let after = errno();
    let end = slot::now();
    let n = u64::try_from(result).unwrap_or(0);
    process.add(Count::FileCalls, 1);
    process.add(Count::FileBytes, n);
    process.add(Count::FileNs, end.saturating_sub(start));
    process.set(Count::Last, end);
    place.note(true, n);
    set_errno(after);
    result
}

/// Enters the messages of one call after the first, which [`transfer`] has entered.
pub(crate) fn further(fd: c_int, way: Way, sizes: impl Iterator<Item = u64>) {
    let Some(((Kind::Datagram, _), process)) = fds::socket(fd).zip(slot::known()) else {
        return;
    };
    let flow = &process.ways[way as usize];
    for n in sizes {
        flow.add(Flow::DatagramBytes, n);
        flow.size(n);
    }
}
