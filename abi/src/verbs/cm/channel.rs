//! Event channels: what happens to identifiers waits here until the program fetches it.
//!
//! Each event is one write to the channel's eventfd, and the descriptor stays readable while events wait: it works with `poll` and with
//! `epoll` of either kind. A call that blocks sleeps on a futex, because the kernel restarts that after a signal
//! when the handler asks for it (`SA_RESTART`), as it does with the calls of the real library.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::thread::futex;

use super::id::{self, Core, Fetched};
use super::request::Request;
use super::types::{
    rdma_cm_event, rdma_cm_event_param, rdma_cm_event_type, rdma_conn_param, rdma_event_channel,
};
use crate::call::{pointer, run};
use crate::verbs::object::{Kind, PerFork, Pool, find, lock, turn};

/// What happened to an identifier.
#[derive(Default)]
pub(super) struct News {
    pub(super) event: rdma_cm_event_type,
    pub(super) status: c_int,
    pub(super) private_data: Vec<u8>,
    /// Reads and atomics: what the peer will have outstanding, and what it takes.
    pub(super) depths: (u16, u16),
    pub(super) qp_num: u32,
    /// What wants to be answered, with a request.
    pub(super) request: Option<Box<Request>>,
}

impl News {
    pub(super) fn new(event: rdma_cm_event_type) -> News {
        News {
            event,
            ..News::default()
        }
    }

    /// With a status: a negative errno, or the transport's own number.
    pub(super) fn status(event: rdma_cm_event_type, status: c_int) -> News {
        News {
            status,
            ..News::new(event)
        }
    }
}

struct Waiting {
    about: Arc<Core>,
    news: News,
}

struct Inner {
    queue: VecDeque<Waiting>,
    /// None once the channel is destroyed.
    fd: Option<OwnedFd>,
}

/// An event channel.
pub(super) struct Channel {
    inner: Mutex<Inner>,
    /// Counts events, for those who sleep.
    moved: AtomicU32,
    handle: OnceLock<Handle>,
}

#[derive(Clone, Copy)]
struct Handle(*mut rdma_event_channel);

// SAFETY: an address only; what is behind it is reached through the pool.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The channel as C holds it.
pub(super) struct Held(pub(super) Arc<Channel>);

impl Kind for Held {
    type C = rdma_event_channel;
    type Handle = rdma_event_channel;
    const MARK: u32 = 0x636d_6368;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Held>> = PerFork::new();
        POOL.get()
    }
}

/// An event as C holds it, until it is acknowledged.
struct Event {
    #[allow(dead_code)] // counts until it is dropped
    fetched: Fetched,
    #[allow(dead_code)] // C points to it
    private_data: Box<[u8]>,
}

impl Kind for Event {
    type C = rdma_cm_event;
    type Handle = rdma_cm_event;
    const MARK: u32 = 0x636d_6576;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Event>> = PerFork::new();
        POOL.get()
    }
}

impl Channel {
    pub(super) fn create() -> Result<Arc<Channel>, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        let raw = fd.as_raw_fd();
        let channel = Arc::new(Channel {
            inner: Mutex::new(Inner {
                queue: VecDeque::new(),
                fd: Some(fd),
            }),
            moved: AtomicU32::new(0),
            handle: OnceLock::new(),
        });
        let held = Held::pool().make(Held(Arc::clone(&channel)), |c, _| c.fd = raw)?;
        let _ = channel.handle.set(Handle(held.handle()));
        Ok(channel)
    }

    /// What C calls it by.
    pub(super) fn handle(&self) -> *mut rdma_event_channel {
        self.handle
            .get()
            .map_or(std::ptr::null_mut(), |handle| handle.0)
    }

    /// The descriptor is closed, and what waited is dropped. Who still waits for an event does so for ever, as with the real library:
    /// programs exit with a thread in that call.
    pub(super) fn destroy(&self) {
        if let Ok(turn) = turn::<Held>(self.handle()) {
            drop(turn.retire());
        }
        let (queue, fd) = {
            let mut inner = lock(&self.inner);
            (std::mem::take(&mut inner.queue), inner.fd.take())
        };
        // Not under the lock: requests among them are rejected, identifiers let go.
        drop((queue, fd));
    }

    /// Queue an event.
    pub(super) fn push(&self, about: Arc<Core>, news: News) {
        let refused = {
            let mut inner = lock(&self.inner);
            let waiting = Waiting { about, news };
            if let Some(fd) = &inner.fd {
                // Fails only when the counter is at its end: then the descriptor is readable.
                let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
                inner.queue.push_back(waiting);
                self.moved.fetch_add(1, Ordering::Relaxed);
                None
            } else {
                Some(waiting)
            }
        };
        drop(refused);
        self.wake();
    }

    fn wake(&self) {
        let _ = futex::wake(&self.moved, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Takes out what waits about an identifier.
    pub(super) fn take(&self, about: &Arc<Core>) -> Vec<News> {
        let mut inner = lock(&self.inner);
        let queue = std::mem::take(&mut inner.queue);
        let (taken, left): (Vec<_>, Vec<_>) = queue
            .into_iter()
            .partition(|waiting| Arc::ptr_eq(&waiting.about, about));
        inner.queue = left.into();
        if inner.queue.is_empty()
            && let Some(fd) = &inner.fd
        {
            clear(fd);
        }
        taken.into_iter().map(|waiting| waiting.news).collect()
    }

    /// Whether something waits about an identifier.
    pub(super) fn has(&self, about: &Arc<Core>) -> bool {
        let inner = lock(&self.inner);
        inner
            .queue
            .iter()
            .any(|waiting| Arc::ptr_eq(&waiting.about, about))
    }

    /// The next event, counted as fetched; waits for it unless the descriptor is `O_NONBLOCK`.
    fn next(&self) -> Result<(Fetched, News), Errno> {
        loop {
            let seen = {
                let mut inner = lock(&self.inner);
                let Inner { queue, fd } = &mut *inner;
                let fd = fd.as_ref().ok_or(Errno::BADF)?;
                if let Some(Waiting { about, news }) = queue.pop_front() {
                    if queue.is_empty() {
                        clear(fd);
                    }
                    return Ok((Fetched::new(about), news));
                }
                if fcntl_getfl(fd)?.contains(OFlags::NONBLOCK) {
                    return Err(Errno::AGAIN);
                }
                self.moved.load(Ordering::Relaxed)
            };
            match futex::wait(&self.moved, futex::Flags::PRIVATE, seen, None) {
                Ok(()) | Err(Errno::AGAIN) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The next event, as C gets it.
    pub(super) fn get(&self) -> Result<*mut rdma_cm_event, Errno> {
        let (fetched, mut news) = self.next()?;
        let about = fetched.about().handle();
        let (id, listen_id) = match news.request.take() {
            // A request that finds no room is dropped, which rejects it.
            Some(request) => (id::requested(fetched.about(), *request)?.handle(), about),
            None => (about, std::ptr::null_mut()),
        };
        let private_data = news.private_data.into_boxed_slice();
        let at = private_data.as_ptr();
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        let depth = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        let conn = rdma_conn_param {
            private_data: if len == 0 {
                std::ptr::null()
            } else {
                at.cast()
            },
            private_data_len: len,
            responder_resources: depth(news.depths.0),
            initiator_depth: depth(news.depths.1),
            flow_control: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            srq: 0,
            qp_num: news.qp_num,
        };
        let event = Event {
            fetched,
            private_data,
        };
        let made = Event::pool().make(event, |c, _| {
            c.id = id;
            c.listen_id = listen_id;
            c.event = news.event;
            c.status = news.status;
            c.param = rdma_cm_event_param { conn };
        })?;
        Ok(made.handle())
    }
}

/// The eventfd is not readable any more. Only called with the channel's lock, so that nobody reads in between.
fn clear(fd: &OwnedFd) {
    if readable(fd.as_fd()) {
        let _ = rustix::io::read(fd, &mut [0; 8]);
    }
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)) == Ok(1)
}

/// Lets go of an event.
pub(super) fn ack(event: *mut rdma_cm_event) -> Result<(), Errno> {
    drop(turn::<Event>(event)?.retire());
    Ok(())
}

/// The program's channel.
pub(super) fn channel(handle: *mut rdma_event_channel) -> Result<Arc<Channel>, Errno> {
    Ok(Arc::clone(&find::<Held>(handle)?.0))
}

/// `rdma_create_event_channel(3)`.
///
/// # Safety
/// None is needed.
pub unsafe fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(|| Ok(Channel::create()?.handle()))
}

/// `rdma_destroy_event_channel(3)`. Identifiers that are still there get no events any more.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    run(|| {
        self::channel(channel)?.destroy();
        Ok(0)
    });
}

/// `rdma_get_cm_event(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `event`.
pub unsafe fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    run(|| {
        let channel = self::channel(channel)?;
        if event.is_null() {
            return Err(Errno::INVAL);
        }
        let got = channel.get()?;
        // SAFETY: the caller's promise.
        unsafe { event.write(got) };
        Ok(0)
    })
}

/// `rdma_ack_cm_event(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    run(|| ack(event).map(|()| 0))
}
