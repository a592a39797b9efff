//! CPU time and memory of this process.

use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::path::Path;

/// Seconds of CPU that all threads of this process have used so far, user and system.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The first field of a thread's schedstat: nanoseconds on a processor.
pub fn on_processor(thread: &Path) -> Option<u64> {
    let text = fs::read_to_string(thread.join("schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Seconds of CPU of all threads of another process, those that have ended not counted.
pub fn process_cpu(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let each = threads.filter_map(|thread| on_processor(&thread.path()));
    each.sum::<u64>() as f64 / 1e9
}

/// The processes whose CPU time is counted.
#[derive(Clone, Copy)]
pub enum Whose {
    /// The process, including threads that have ended.
    Its,
    /// The children that it has waited for, including their children.
    Children,
}

/// Seconds of CPU from the stat file of a process, with a resolution of hundredths of a second.
pub fn told_cpu(pid: u32, whose: Whose) -> f64 {
    let told = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain any character. After it: utime, stime, cutime and cstime, the 14th to 17th of all
    // fields.
    let words = told.rsplit(')').next().unwrap_or_default();
    let skip = match whose {
        Whose::Its => 11,
        Whose::Children => 13,
    };
    let ticks = words.split_whitespace().skip(skip).take(2);
    let ticks: f64 = ticks.filter_map(|word| word.parse::<f64>().ok()).sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}

/// The machine's load of the last minute, as the kernel prints it.
pub fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.unwrap_or("unknown").to_owned()
}

/// Bytes of private anonymous memory that are resident in this process, page tables not counted.
pub fn private_bytes() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    anonymous(&text).ok_or_else(|| std::io::Error::other("no Anonymous line in smaps_rollup"))
}

fn anonymous(rollup: &str) -> Option<u64> {
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_seconds();
        let mut sum = 0u64;
        while cpu_seconds() - before < 0.002 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0);
    }

    #[test]
    fn the_cpu_time_of_a_process_is_found() {
        // A kernel without CONFIG_SCHED_INFO has no such file.
        if !Path::new("/proc/self/schedstat").exists() {
            return;
        }
        let mut busy = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let began = std::time::Instant::now();
        let found = loop {
            let found = process_cpu(busy.id());
            if found >= 0.01 || began.elapsed() > std::time::Duration::from_secs(30) {
                break found;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(found >= 0.01, "{found} s in {:?}", began.elapsed());
    }

    #[test]
    fn the_load_is_a_number() {
        assert!(load_average().parse::<f64>().unwrap() >= 0.0);
    }

    #[test]
    fn private_memory_grows_when_touched() {
        // Other tests of this process may free as much at the same time.
        let mut blocks = Vec::new();
        let grows = (0..20).any(|_| {
            let before = private_bytes().unwrap();
            blocks.push(std::hint::black_box(vec![1u8; 8 << 20]));
            private_bytes().unwrap() >= before + (7 << 20)
        });
        assert!(grows, "{} blocks", blocks.len());
        assert_eq!(
            anonymous("Rss:  12 kB\nAnonymous:     8 kB\n"),
            Some(8 << 10)
        );
        assert_eq!(anonymous("Rss: 12 kB\n"), None);
    }
}
