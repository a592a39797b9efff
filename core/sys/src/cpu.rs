//! Processors, and the time spent on them.
//!
//! # Safety
//!
//! One `unsafe` call, `getrusage`, which `rustix` lacks.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Processors this process may use: at least 1; affinity and cgroup quotas count, as they were at the first call (a look takes 20
/// system calls).
pub fn cpu_count() -> usize {
    // Not a `OnceLock`: a child that was forked while another thread was at its first look would wait for that for ever.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            let count = std::thread::available_parallelism().map_or(1, usize::from);
            COUNT.store(count, Ordering::Relaxed);
            count
        }
        count => count,
    }
}

/// Percent of the last ten seconds in which something on this machine waited for a processor; `None` where the kernel does not say.
pub fn cpu_pressure() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/pressure/cpu").ok()?;
    avg10(&text)
}

fn avg10(pressure: &str) -> Option<f64> {
    let mut words = pressure.split_whitespace();
    words
        .find_map(|word| word.strip_prefix("avg10="))?
        .parse()
        .ok()
}

/// Seconds of processor time of the whole process: (user, system).
pub fn rusage_self() -> (f64, f64) {
    rusage(libc::RUSAGE_SELF)
}

/// Seconds of processor time of the calling thread: (user, system).
pub fn rusage_thread() -> (f64, f64) {
    rusage(libc::RUSAGE_THREAD)
}

fn rusage(who: libc::c_int) -> (f64, f64) {
    // SAFETY: a rusage of zeros is valid, and the kernel fills it.
    let r = unsafe {
        let mut r: libc::rusage = std::mem::zeroed();
        libc::getrusage(who, &raw mut r);
        r
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    (seconds(r.ru_utime), seconds(r.ru_stime))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_pressure_counts() {
        let text = "some avg10=49.13 avg60=66.00 avg300=71.86 total=5\nfull avg10=90.00";
        assert_eq!(avg10(text), Some(49.13));
        assert_eq!(avg10("some avg10=x\nfull avg10=1.00"), None);
        assert_eq!(avg10(""), None);
    }
}
