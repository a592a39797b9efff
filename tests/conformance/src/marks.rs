//! The marks in the segments that this process shares with its peers, and the table of the regions that it exports (docs/spec/local.md), through `/proc`. The
//! tests of other crates include this file too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The offsets of the marks of the initiator and of the responder in a segment.
const MARKS: [u64; 2] = [640, 1664];
/// The exported table: offset, length and number of its entries.
const ENTRIES: (u64, usize, usize) = (4096, 64, 8 * 8192);

fn mapped(name: &str) -> Vec<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let lines = maps.lines().filter(|line| line.contains(name));
    lines
        .filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok())
        .collect()
}

fn memory() -> File {
    let mut options = File::options();
    let open = options.read(true).write(true).open("/proc/self/mem");
    open.expect("procfs")
}

/// The segments that are mapped here; a segment whose both ends are here appears twice.
pub fn segments() -> Vec<u64> {
    mapped("memfd:weft-ring")
}

/// The marks that either side of these segments has set.
pub fn set(segments: &[u64]) -> Vec<u32> {
    let memory = memory();
    let places = segments.iter().flat_map(|at| MARKS.map(|mark| at + mark));
    places
        .filter_map(|at| {
            let mut word = [0; 8];
            memory.read_exact_at(&mut word, at).ok()?;
            Some(u64::from_ne_bytes(word) as u32).filter(|mark| *mark != 0)
        })
        .collect()
}

/// Sets the mark of a connection's initiator to this `STag`.
pub fn put(segment: u64, stag: u32) {
    let word = u64::from(stag).to_ne_bytes();
    let at = segment + MARKS[0];
    memory().write_all_at(&word, at).expect("a segment");
}

/// The `STags` of exported regions of this length.
pub fn opened(len: usize) -> Vec<u32> {
    let memory = memory();
    let (start, size, count) = ENTRIES;
    let mut found = Vec::new();
    for table in mapped("memfd:weft-stags") {
        let mut bytes = vec![0; size * count];
        if memory.read_exact_at(&mut bytes, table + start).is_err() {
            continue;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<_> = words.iter().map(|w| u64::from_ne_bytes(*w)).collect();
        let entries = words.chunks(size / 8).filter(|e| e[3] == len as u64);
        found.extend(entries.map(|e| e[1] as u32).filter(|stag| *stag != 0));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Stops another process while it touches our memory, and leaves it in that state: the memory of this `STag`, or any.
pub fn stop_inside(pid: Pid, segments: &[u64], stag: Option<u32>) {
    let is_inside = || {
        set(segments)
            .iter()
            .any(|s| stag.is_none_or(|stag| *s == stag))
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    loop {
        assert!(Instant::now() < deadline, "it is not seen in our memory");
        if !is_inside() {
            continue;
        }
        kill_process(pid, Signal::STOP).expect("a process of ours");
        let stopped = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T"));
        while !stopped() {
            std::thread::yield_now();
        }
        if is_inside() {
            return;
        }
        kill_process(pid, Signal::CONT).expect("a process of ours");
    }
}
