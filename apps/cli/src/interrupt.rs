//! What is tidied up when Ctrl-C or another signal ends the program.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal, raise};

/// A signal is ending the program.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Lets a signal end the program that has begun to: what fails because of that is not told.
pub fn let_signal_end() {
    while ENDING.load(Ordering::Acquire) {
        std::thread::park();
    }
}

/// Runs `tidy` when a signal is to end the program, which then ends by that signal. Call it before there are other threads: they would take the signal.
pub fn tidy_up(tidy: impl FnOnce() + Send + 'static) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // Under nohup and the like it does not end the program.
        if !is_ignored(&status, signal) {
            signals.add(signal);
        }
    }
    if signals.thread_block().is_err() {
        return;
    }
    // Without a thread the program ends with nothing tidied up, as it would have before.
    let waiting = std::thread::Builder::new()
        .name("weft-signals".into())
        .spawn(move || {
            if let Ok(signal) = signals.wait() {
                ENDING.store(true, Ordering::Release);
                tidy();
                let _ = signals.thread_unblock();
                let _ = raise(signal);
            }
        });
    if waiting.is_err() {
        let _ = signals.thread_unblock();
    }
}

fn is_ignored(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal as i32 - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_are_ignored_are_left_alone() {
        let status = "Name:\tweft\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, Signal::SIGHUP));
        assert!(!is_ignored(status, Signal::SIGINT));
        assert!(!is_ignored("", Signal::SIGHUP));
    }
}
