//! The progress of a long run, on standard error.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// The interval of progress lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    last_line: Instant,
    started: Instant,
}

impl Progress {
    pub fn new(total: u64) -> Self {
        let bar = crate::terminal::redraws(&std::io::stderr()).then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template(
                "{bar:30} {pos}/{len} {elapsed} (about {eta} left) {msg}",
            ) {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            total,
            done: 0,
            last_line: Instant::now(),
            started: Instant::now(),
        }
    }

    /// Shows the current measurement.
    pub fn at(&mut self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        } else if self.done == 0 || self.last_line.elapsed() > LINE_EVERY {
            self.last_line = Instant::now();
            eprintln!(
                "{:4} of {} ({} s): {what}",
                self.done,
                self.total,
                self.started.elapsed().as_secs()
            );
        }
    }

    /// One more point is done.
    pub fn step(&mut self) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
