//! The clock of an endpoint: a thread that retransmits lost packets while the program does not call. It sleeps without a limit while no
//! acknowledgement is outstanding.

use std::io;
use std::process;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Endpoint, Inner, State};

/// The interval of time checks for a program that may block elsewhere.
const PERIOD: Duration = Duration::from_millis(50);
/// The same for a program that sleeps on a descriptor of the endpoint: a loss keeps it from its next message.
const SHORT_PERIOD: Duration = Duration::from_millis(10);

pub(super) struct Clock {
    /// `None` before it runs and after it has ended; with the process that has it.
    thread: Option<(JoinHandle<()>, u32)>,
    /// It waits to be woken by [`State::start_clock`].
    stopped: bool,
    ends: bool,
    period: Duration,
}

impl Clock {
    pub(super) fn new() -> Clock {
        Clock {
            thread: None,
            stopped: false,
            ends: false,
            period: PERIOD,
        }
    }
}

impl State {
    /// Called when something has been sent, or waits for company.
    pub(super) fn start_clock(&mut self) {
        if self.clock.stopped && self.machine.next_time().is_some() {
            self.clock.stopped = false;
            if let Some((thread, _)) = &self.clock.thread {
                thread.thread().unpark();
            }
        }
    }
}

impl Inner {
    pub(super) fn run_clock(self: &Arc<Self>) -> io::Result<()> {
        let inner = Arc::clone(self);
        // With the lock: what the engine sends meanwhile finds a thread to wake.
        let mut state = self.state();
        let thread = thread::Builder::new().name("weft-fi".into());
        let thread = thread.spawn(move || while inner.tick() {})?;
        state.clock.thread = Some((thread, process::id()));
        Ok(())
    }

    /// Waits for the thread's end: the library may be unloaded then.
    pub(super) fn end_clock(&self) {
        let mut state = self.state();
        state.clock.ends = true;
        let thread = state.clock.thread.take();
        drop(state);
        // A child of fork has no such thread.
        if let Some((thread, process)) = thread
            && process == process::id()
        {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }

    /// One round of the thread. `false`: the endpoint is closed.
    fn tick(&self) -> bool {
        let mut state = self.state();
        if state.clock.ends {
            return false;
        }
        self.progress(&mut state, true);
        // Under the lock: a thread that sends later sees that the clock has to be woken.
        state.clock.stopped = state.machine.next_time().is_none();
        let (stopped, period) = (state.clock.stopped, state.clock.period);
        drop(state);
        if stopped {
            thread::park();
            // Woken for the end, perhaps, and that is not said twice.
            if self.state().clock.ends {
                return false;
            }
        }
        thread::park_timeout(period);
        true
    }
}

impl Endpoint {
    /// The program sleeps on a descriptor of the endpoint: lost packets are retransmitted sooner.
    pub fn sleeps_on_descriptor(&self) {
        self.0.state().clock.period = SHORT_PERIOD;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use weft_verbs::DeviceBuilder;

    use super::super::tests::setup;
    use super::*;

    /// Whoever closes an endpoint that has nothing to send again does not wait for its thread's next look.
    #[test]
    fn the_end_comes_before_the_next_look() {
        let device = DeviceBuilder::default().open().unwrap();
        let endpoint = Endpoint::open(&device, &setup()).unwrap();
        let stopped = || {
            let end = Instant::now() + Duration::from_mins(1);
            while !endpoint.0.state().clock.stopped {
                assert!(Instant::now() < end, "it looks again and again");
                thread::yield_now();
            }
        };
        stopped();
        {
            let clock = &mut endpoint.0.state().clock;
            clock.period = Duration::from_secs(20);
            // It looks once more, and sees that.
            clock.stopped = false;
            let (thread, _) = clock.thread.as_ref().unwrap();
            thread.thread().unpark();
        }
        stopped();
        let start = Instant::now();
        drop(endpoint);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}
