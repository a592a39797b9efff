//! The thread that notices the ends of connections and of devices: nobody else waits on the event channel of a connection once it is there, or on that of
//! a device.
//!
//! There is one for the process, started with the first device. It sleeps in `epoll_wait` on the channels.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use crate::error::Error;
use crate::fork;

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// One of the sides has disconnected, or the peer's process has ended.
    Disconnected,
    /// The transport has lost the peer.
    Lost,
    /// The queue pair has failed (`IBV_EVENT_QP_FATAL`).
    Failed,
    /// The peer has sent a request that the queue pair does not take (`IBV_EVENT_QP_REQ_ERR`).
    BadRequest,
    /// The peer has named memory that it may not use (`IBV_EVENT_QP_ACCESS_ERR`).
    BadAccess,
    /// The device was removed, or has failed.
    DeviceRemoved,
}

/// What the end of a connection, or of a device, is learned from.
pub(crate) trait Source: Send + Sync {
    /// The end, if an event says so that is there already.
    fn try_end(&self) -> Result<Option<End>, Error>;

    /// Readable while events are there.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Ends the connection, if there is one.
    fn disconnect(&self);
}

/// What the thread looks at when one of its descriptors can be read.
pub(crate) trait Look: Send + Sync {
    fn look(&self);
}

/// Waits until something can be read, at most until `end` (`None`: for ever); false if nothing came.
pub(crate) fn readable(fd: BorrowedFd<'_>, end: Option<Instant>) -> Result<bool, Errno> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Calls on this descriptor do not block.
pub(crate) fn without_blocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Watch {
    epoll: OwnedFd,
    watched: Mutex<HashMap<u64, Weak<dyn Look>>>,
}

/// The thread, started if need be.
pub(crate) fn watch() -> Result<&'static Watch, Error> {
    // A child of fork has no such thread, and the lists are the parent's.
    if fork::is_child() {
        return Err(fork::error("RDMA connections"));
    }
    static WATCH: OnceLock<Result<Watch, Error>> = OnceLock::new();
    static THREAD: OnceLock<Result<(), Error>> = OnceLock::new();
    let watch = WATCH.get_or_init(|| {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| failed("epoll_create1", e.raw_os_error()))?;
        Ok(Watch {
            epoll,
            watched: Mutex::default(),
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

fn failed(call: &str, errno: i32) -> Error {
    Error::call("RDMA connections", call, errno)
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
                let watched = lock(&self.watched).get(&event.data.u64()).cloned();
                if let Some(watched) = watched.and_then(|weak| weak.upgrade()) {
                    watched.look();
                }
            }
        }
    }

    /// Looks at this whenever one of the descriptors can be read, until [`Watch::leave`] is called with the key that is returned.
    pub(crate) fn join(&self, look: Weak<dyn Look>, fds: &[BorrowedFd<'_>]) -> Result<u64, Error> {
        static KEY: AtomicU64 = AtomicU64::new(0);
        let key = KEY.fetch_add(1, Ordering::Relaxed);
        lock(&self.watched).insert(key, look);
        for fd in fds {
            // What came before it joined makes it readable at once.
            let data = epoll::EventData::new_u64(key);
            if let Err(e) = epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN) {
                self.leave(key, fds);
                return Err(failed("epoll_ctl", e.raw_os_error()));
            }
        }
        Ok(key)
    }

    pub(crate) fn leave(&self, key: u64, fds: &[BorrowedFd<'_>]) {
        lock(&self.watched).remove(&key);
        for fd in fds {
            self.ignore(*fd);
        }
    }

    /// Looks no more at what this descriptor says.
    pub(crate) fn ignore(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }
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
    key: OnceLock<u64>,
    state: Mutex<State>,
}

impl Look for Watched {
    fn look(&self) {
        match self.source.try_end() {
            Ok(None) => {}
            Ok(Some(end)) => self.ended(end),
            Err(_) => {
                if let Ok(watch) = watch() {
                    watch.ignore(self.source.fd());
                }
                self.ended(End::Lost);
            }
        }
    }
}

impl Watched {
    pub(crate) fn new(source: Arc<dyn Source>) -> Result<Arc<Self>, Error> {
        let watch = watch()?;
        let watched = Arc::new(Self {
            source,
            key: OnceLock::new(),
            state: Mutex::default(),
        });
        let look: Weak<dyn Look> = Arc::downgrade(&watched) as Weak<dyn Look>;
        let key = watch.join(look, &[watched.source.fd()])?;
        let _ = watched.key.set(key);
        Ok(watched)
    }

    pub(crate) fn ended(&self, end: End) {
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
        if let (Some(key), Ok(watch)) = (self.key.get(), watch()) {
            watch.leave(*key, &[self.source.fd()]);
        }
        self.source.disconnect();
    }
}
