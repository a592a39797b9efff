//! Time limits: one thread for all sockets of the program, started with the first limit; when it looks, and the time of grace that follows.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

use crate::options::LINGER;

/// Bytes in a time of grace that make it worth while to go on, however long it takes.
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

/// Calls to make at a time.
#[derive(Default)]
pub(crate) struct Timers {
    state: Mutex<State>,
    bell: Condvar,
}

impl Timers {
    /// Call this then, on the timer's thread. It cannot be taken back: what it does looks whether it is still wanted.
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

/// When a time limit that begins now is over. `None`: it has none, or is further away than the clock goes.
pub(crate) fn deadline(limit: Option<Duration>) -> Option<Instant> {
    limit.and_then(|limit| Instant::now().checked_add(limit))
}

/// A time of grace. It is as long as bytes move; after [`LINGER`], not a few now and then only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grace {
    since: Instant,
    /// Bytes that had moved at the last look.
    moved: u64,
}

impl Grace {
    /// It begins now; so many bytes have moved before.
    pub(super) fn new(moved: u64) -> Grace {
        Grace {
            since: Instant::now(),
            moved,
        }
    }

    /// At its end: whether there is some more.
    pub(super) fn goes_on(&mut self, moved: u64) -> bool {
        let more = moved - std::mem::replace(&mut self.moved, moved);
        more >= SLOWEST || more > 0 && self.since.elapsed() < LINGER
    }
}

/// When timers look for what is late: each sooner than the one before, so that long limits and short ones in turn do not leave a timer each.
#[derive(Default)]
pub(super) struct Alarms(Vec<Instant>);

impl Alarms {
    /// Whether one more timer is needed to look then, at the latest.
    pub(super) fn add(&mut self, at: Instant) -> bool {
        let sooner = self.0.last().is_none_or(|&first| at < first);
        if sooner {
            self.0.push(at);
        }
        sooner
    }

    /// That one has looked.
    pub(super) fn remove(&mut self, at: Instant) {
        self.0.retain(|&alarm| alarm != at);
    }
}
