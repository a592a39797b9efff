//! The thread that notices the ends of connections: nobody else waits on the event channel of a connection once it is there.
//!
//! There is one for the process, started with the first connection. It sleeps in `epoll_wait` on the channels.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::event::epoll;
use rustix::io::Errno;

use crate::error::Error;

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// One of the sides has disconnected, or the peer's process has ended.
    Disconnected,
    /// The transport has lost the peer.
    Lost,
    /// The device is being removed.
    DeviceRemoved,
}

/// What a connection's end is learned from.
pub(crate) trait Source: Send + Sync {
    /// The end of the connection, if an event says so that is there already.
    fn try_end(&self) -> Result<Option<End>, Error>;

    /// Readable while events are there.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Ends the connection, if there is one.
    fn disconnect(&self);
}

type Hook = Box<dyn FnOnce(End) + Send>;

#[derive(Default)]
struct State {
    end: Option<End>,
    hook: Option<Hook>,
}

/// A connection whose end is watched for, until this is dropped.
pub(crate) struct Watched {
    source: Arc<dyn Source>,
    key: u64,
    state: Mutex<State>,
}

struct Watch {
    epoll: OwnedFd,
    connections: Mutex<HashMap<u64, Weak<Watched>>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch() -> Result<&'static Watch, Error> {
    static WATCH: OnceLock<Result<Watch, Error>> = OnceLock::new();
    static THREAD: OnceLock<Result<(), Error>> = OnceLock::new();
    let failed = |call, errno: i32| Error::call("RDMA connections", call, errno);
    let watch = WATCH.get_or_init(|| {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| failed("epoll_create1", e.raw_os_error()))?;
        Ok(Watch {
            epoll,
            connections: Mutex::default(),
        })
    });
    let watch = watch.as_ref().map_err(Clone::clone)?;
    let thread = THREAD.get_or_init(|| {
        let builder = std::thread::Builder::new().name("weft-nic-ends".into());
        let started = builder.spawn(|| watch.run());
        started
            .map(drop)
            .map_err(|e| failed("starting a thread", e.raw_os_error().unwrap_or(0)))
    });
    thread.as_ref().map_err(Clone::clone)?;
    Ok(watch)
}

impl Watch {
    fn run(&self) {
        let mut events = [MaybeUninit::uninit(); 16];
        loop {
            let ready = match epoll::wait(&self.epoll, &mut events, None) {
                Ok((ready, _)) => ready,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            for event in ready {
                let watched = lock(&self.connections).get(&event.data.u64()).cloned();
                if let Some(watched) = watched.and_then(|weak| weak.upgrade()) {
                    watched.look(self);
                }
            }
        }
    }
}

impl Watched {
    pub(crate) fn new(source: Arc<dyn Source>) -> Result<Arc<Self>, Error> {
        static KEY: AtomicU64 = AtomicU64::new(0);
        let watch = watch()?;
        let key = KEY.fetch_add(1, Ordering::Relaxed);
        let watched = Arc::new(Self {
            source,
            key,
            state: Mutex::default(),
        });
        lock(&watch.connections).insert(key, Arc::downgrade(&watched));
        let data = epoll::EventData::new_u64(key);
        // An end that came before makes it readable at once.
        epoll::add(
            &watch.epoll,
            watched.source.fd(),
            data,
            epoll::EventFlags::IN,
        )
        .map_err(|e| Error::call("RDMA connections", "epoll_ctl", e.raw_os_error()))?;
        Ok(watched)
    }

    /// Takes the events that are there.
    fn look(&self, watch: &Watch) {
        match self.source.try_end() {
            Ok(None) => {}
            Ok(Some(end)) => self.ended(end),
            Err(_) => {
                let _ = epoll::delete(&watch.epoll, self.source.fd());
                self.ended(End::Lost);
            }
        }
    }

    fn ended(&self, end: End) {
        let hook = {
            let mut state = lock(&self.state);
            if state.end.is_some() {
                return;
            }
            state.end = Some(end);
            state.hook.take()
        };
        // With InfiniBand nothing else flushes the queues.
        self.source.disconnect();
        if let Some(hook) = hook {
            // The thread serves other connections as well.
            let _ = catch_unwind(AssertUnwindSafe(|| hook(end)));
        }
    }

    pub(crate) fn end(&self) -> Option<End> {
        lock(&self.state).end
    }

    pub(crate) fn on_end(&self, hook: Hook) {
        let mut state = lock(&self.state);
        if let Some(end) = state.end {
            drop(state);
            hook(end);
        } else {
            state.hook = Some(hook);
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Ok(watch) = watch() {
            lock(&watch.connections).remove(&self.key);
            let _ = epoll::delete(&watch.epoll, self.source.fd());
        }
        self.source.disconnect();
    }
}
