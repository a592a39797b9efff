//! Time limits: one thread for all sockets of the program, started with the first limit.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

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
