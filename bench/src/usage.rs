//! CPU time and memory of this process.

use rustix::time::{ClockId, clock_gettime};

/// Seconds of CPU that all threads of this process have used so far, user and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The machine's load of the last minute, as the kernel prints it.
pub(crate) fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.unwrap_or("unknown").to_owned()
}

/// Bytes of private anonymous memory that are resident in this process, page tables not counted.
pub(crate) fn private_bytes() -> std::io::Result<u64> {
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
    fn the_load_is_a_number() {
        assert!(load_average().parse::<f64>().unwrap() >= 0.0);
    }

    #[test]
    fn private_memory_grows_when_touched() {
        let before = private_bytes().unwrap();
        let block = std::hint::black_box(vec![1u8; 8 << 20]);
        let after = private_bytes().unwrap();
        assert!(
            after - before >= 7 << 20,
            "{before} {after} {}",
            block.len()
        );
        assert_eq!(
            anonymous("Rss:  12 kB\nAnonymous:     8 kB\n"),
            Some(8 << 10)
        );
        assert_eq!(anonymous("Rss: 12 kB\n"), None);
    }
}
