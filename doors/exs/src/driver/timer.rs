//! Time limits: one timer thread for all sockets of the process, started with the first limit. Also alarms and grace periods.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

use crate::options::LINGER;

/// Bytes that must move in a grace period to extend it beyond [`LINGER`].
const SLOWEST: u64 = 64 << 10;

type Call = Box<dyn FnOnce() + Send>;

struct Entry {
    at: Instant,
    number: u64,
    call: Call,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[derive(Default)]
struct State {
    entries: BinaryHeap<Reverse<Entry>>,
    next: u64,
}

/// Calls to be made at given times.
#[derive(Default)]
pub(crate) struct Timers {
    state: Mutex<State>,
    bell: Condvar,
}

impl Timers {
    /// Make a call at that time, on the timer's thread. It cannot be withdrawn, so it must check whether it is still needed.
    pub(crate) fn at(at: Instant, call: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
        static TIMERS: PerProcess<Timers> = PerProcess::new();
        let timers = TIMERS.get(|| {
            let timers = Arc::new(Timers::default());
            let run = Arc::clone(&timers);
            std::thread::Builder::new()
                .name("exs-timer".to_owned())
                .spawn(move || run.run())
                .map_err(|_| Errno::AGAIN)?;
            Ok::<_, Errno>(timers)
        })?;
        let mut state = lock(&timers.state);
        let number = state.next;
        state.next += 1;
        let first = state.entries.peek().is_none_or(|Reverse(e)| at < e.at);
        state.entries.push(Reverse(Entry {
            at,
            number,
            call: Box::new(call),
        }));
        drop(state);
        if first {
            timers.bell.notify_one();
        }
        Ok(())
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            let first = state.entries.peek().map(|Reverse(entry)| entry.at);
            state = match first {
                Some(at) if at <= now => {
                    let due = state.entries.pop();
                    drop(state);
                    if let Some(Reverse(entry)) = due {
                        (entry.call)();
                    }
                    lock(&self.state)
                }
                Some(at) => match self.bell.wait_timeout(state, at - now) {
                    Ok((state, _)) => state,
                    Err(poison) => poison.into_inner().0,
                },
                None => match self.bell.wait(state) {
                    Ok(state) => state,
                    Err(poison) => poison.into_inner(),
                },
            };
        }
    }
}

/// A grace period. It is extended as long as bytes move; after [`LINGER`], only if they move fast enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grace {
    since: Instant,
    /// Bytes that had moved at the last check.
    moved: u64,
}

impl Grace {
    /// A grace period that starts now, when `moved` bytes have moved.
    pub(super) fn new(moved: u64) -> Grace {
        Grace {
            since: Instant::now(),
            moved,
        }
    }

    /// At its end: true if it is extended.
    pub(super) fn goes_on(&mut self, moved: u64) -> bool {
        let more = moved - std::mem::replace(&mut self.moved, moved);
        more >= SLOWEST || more > 0 && self.since.elapsed() < LINGER
    }
}

/// The times at which timers check for expired operations. Each is earlier than the one before, so that alternating long and short limits need
/// few timers.
#[derive(Default)]
pub(super) struct Alarms(Vec<Instant>);

impl Alarms {
    /// Add the time `at`. True if this needs one more timer.
    pub(super) fn add(&mut self, at: Instant) -> bool {
        let sooner = self.0.last().is_none_or(|&first| at < first);
        if sooner {
            self.0.push(at);
        }
        sooner
    }

    /// The timer of this time has done its check.
    pub(super) fn remove(&mut self, at: Instant) {
        self.0.retain(|&alarm| alarm != at);
    }
}
