//! Timers of the engine, one-shot or repeated.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_sys::Event;

use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;

struct Timer<F> {
    registration: Registration,
    call: Mutex<F>,
}

/// Calls `f` on the engine's thread after this time, and again after the time that it returns, until it returns `None`. Its captured values live
/// until then.
pub(crate) fn after(
    engine: &Arc<Engine>,
    time: Duration,
    call: impl FnMut() -> Option<Duration> + Send + 'static,
) {
    let timer = Arc::new(Timer {
        registration: Registration::new(engine),
        call: Mutex::new(call),
    });
    timer
        .registration
        .enter(Arc::clone(&timer) as Arc<dyn Source>);
    timer.registration.set_timer(Instant::now() + time);
}

impl<F: FnMut() -> Option<Duration> + Send> Source for Timer<F> {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        let again = (lock(&self.call))();
        match again {
            Some(time) => self.registration.set_timer(Instant::now() + time),
            None => self.registration.end(),
        }
    }
}
