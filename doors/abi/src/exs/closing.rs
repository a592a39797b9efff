//! Waiting for sockets that are being closed, and for other threads.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weft_exs::Sink;

/// How long the exit of the program, or a blocking close, waits for unsent data.
pub(crate) const LINGER: Duration = Duration::from_secs(10);

/// The number of sockets that are being closed without a waiting thread.
#[derive(Default)]
pub(crate) struct Closing {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Closing {
    pub(super) fn wait(&self, until: Instant) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        // The exit cuts off the rest after that time.
        drop(
            self.fewer
                .wait_timeout_while(count, left, |count| *count > 0),
        );
    }
}

pub(crate) struct OneClosing(Arc<Closing>);

impl OneClosing {
    /// Count one more close, until the value is dropped.
    pub(crate) fn begin(all: &Arc<Closing>) -> OneClosing {
        *all.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        OneClosing(Arc::clone(all))
    }

    pub(crate) fn sink(self) -> Sink {
        Sink::call(move |_| drop(self))
    }
}

impl Drop for OneClosing {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_all();
    }
}

/// A flag that one thread sets and another waits for.
#[derive(Default)]
pub(crate) struct Done {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    pub(crate) fn set(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self, limit: Duration) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(done, limit, |done| !*done));
    }
}
