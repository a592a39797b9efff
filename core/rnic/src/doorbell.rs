//! Doorbells: a signal handler may ring them, and the engine answers.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use weft_sys::{Event, EventFd, Interest, PerProcess};

use crate::device::Device;
use crate::engine::{Engine, Next, Registration, Source, guarded};
use crate::lock::lock;
use crate::types::Error;

/// Descriptors of dropped doorbells. They are reused, never closed: a signal handler that is about to ring one must not write to another
/// object with the same number.
fn spare() -> Arc<Mutex<Vec<EventFd>>> {
    static SPARE: PerProcess<Mutex<Vec<EventFd>>> = PerProcess::new();
    let Ok(spare) = SPARE.get(|| Ok::<_, Infallible>(Arc::default()));
    spare
}

/// Calls a function on the engine's thread whenever it is rung: by writing eight bytes, the number 1, to its descriptor, which a signal
/// handler may do. Dropping it ends that.
pub struct Doorbell(Arc<Answer>);

struct Answer {
    registration: Registration,
    fd: Mutex<Option<EventFd>>,
    hook: Box<dyn Fn() + Send + Sync>,
}

impl Device {
    /// A bell that a signal's handler may ring: `hook` is called on the engine's thread. It must not block.
    ///
    /// # Errors
    /// [`Error::Os`] without a free descriptor.
    pub fn doorbell(&self, hook: impl Fn() + Send + Sync + 'static) -> Result<Doorbell, Error> {
        Doorbell::new(&self.0.engine, hook).map_err(|source| Error::Os {
            what: "make a doorbell",
            source,
        })
    }
}

impl Doorbell {
    fn new(engine: &Arc<Engine>, hook: impl Fn() + Send + Sync + 'static) -> io::Result<Doorbell> {
        let fd = lock(&spare()).pop();
        let fd = fd.map_or_else(EventFd::new, Ok)?;
        let it = Arc::new(Answer {
            registration: Registration::new(engine),
            fd: Mutex::new(None),
            hook: Box::new(hook),
        });
        let mut place = lock(&it.fd);
        let fd = place.insert(fd);
        let source = Arc::clone(&it) as Arc<dyn Source>;
        it.registration.start(source, fd.as_fd(), Interest::READ)?;
        drop(place);
        Ok(Doorbell(it))
    }

    /// Do something with its descriptor.
    pub fn with_fd<R>(&self, f: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        lock(&self.0.fd).as_ref().map(|fd| f(fd.as_fd()))
    }

    /// Ring it.
    pub fn ring(&self) {
        self.0.registration.poke();
    }
}

impl Source for Answer {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if let Some(fd) = &*lock(&self.fd) {
            fd.drain();
            self.registration.arm(fd.as_fd(), Interest::READ);
        }
        guarded(|| (self.hook)());
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        let Some(fd) = lock(&self.0.fd).take() else {
            return;
        };
        weft_mem::protect::forget_bell(fd.as_fd());
        self.0.registration.release(fd.as_fd());
        fd.drain();
        lock(&spare()).push(fd);
    }
}
