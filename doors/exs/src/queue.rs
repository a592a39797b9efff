//! Event queues (`exs_qcreate` and related calls).
//!
//! An operation reserves its place in the queue when it starts, so its event always has room. A thread that takes events drives the connections
//! that have operations here itself. It therefore needs only one wake-up per wait.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::Signal;

use crate::bell::{Bell, deadline};
use crate::late::Late;
use crate::{Context, Event};

/// The maximum depth of a queue.
const MAX_DEPTH: usize = 1 << 20;
/// How long an adaptive wait polls several connections before it sleeps.
const LOOK: Duration = Duration::from_micros(20);

/// How a thread that takes events waits (`EXS_QATTR_WAIT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Wait {
    /// Poll for a while if polling has paid off recently, then sleep.
    Adaptive,
    /// Sleep at once.
    Notify,
    /// Never sleep.
    BusyPoll,
}

/// A connection that has operations in a queue. Threads that wait at the queue drive it.
pub(crate) trait Member: Send + Sync {
    /// Poll the connection and make all possible progress.
    fn drive(&self);

    /// Make all progress that the engine left to do. The thread that drives the queue pair stays the same.
    fn settle(&self);

    /// The program stops driving the connection for a while: the engine drives it.
    fn leave(&self);

    /// The epoch for a wait, see [`weft_verbs::Cq::epoch`].
    fn epoch(&self) -> u32;

    /// True if the connection can wake a thread that sleeps in [`Member::watch`].
    fn can_watch(&self) -> bool;

    /// Sleep until there may be something to do; true when a signal handler ended the sleep.
    fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool;

    /// Wake the threads that sleep here.
    fn interrupt(&self);
}

/// A queue of events. Clones are handles of the same queue.
#[derive(Clone)]
pub struct Queue(pub(crate) Arc<QueueInner>);

pub(crate) struct QueueInner {
    /// The number of this queue, unique in the process.
    pub(crate) serial: usize,
    events: Mutex<VecDeque<Event>>,
    len: AtomicUsize,
    /// Reserved places: those of events, and those of outstanding operations.
    used: AtomicUsize,
    depth: AtomicUsize,
    wait: AtomicU8,
    deleted: AtomicBool,
    /// Connections that have had operations here.
    members: Mutex<Vec<Weak<dyn Member>>>,
    /// Threads in a wait, and the connections on which some of them sleep, to wake them there.
    waiters: AtomicUsize,
    asleep: Mutex<Vec<Weak<dyn Member>>>,
    bell: Bell,
    signal: Signal,
    signals: AtomicBool,
    /// Called for events that are dropped because the queue is deleted.
    unheard: OnceLock<Arc<Unheard>>,
}

type Unheard = dyn Fn(u64) + Send + Sync;

impl Queue {
    /// A queue with `depth` places.
    ///
    /// # Errors
    /// `EINVAL` for a depth of 0 or above 1,048,576; `EMFILE` and `ENFILE` without a free descriptor.
    pub fn new(_context: &Context, depth: usize) -> Result<Queue, Errno> {
        if depth == 0 || depth > MAX_DEPTH {
            return Err(Errno::INVAL);
        }
        let signal = Signal::new().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::MFILE))?;
        // 0 means no queue.
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Ok(Queue(Arc::new(QueueInner {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            events: Mutex::default(),
            len: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            depth: AtomicUsize::new(depth),
            wait: AtomicU8::new(Wait::Adaptive as u8),
            deleted: AtomicBool::new(false),
            members: Mutex::default(),
            waiters: AtomicUsize::new(0),
            asleep: Mutex::default(),
            bell: Bell::default(),
            signal,
            signals: AtomicBool::new(false),
            unheard: OnceLock::new(),
        })))
    }

    /// Call `hears` with the number of each event that is dropped because the queue is deleted, so that its resources can be freed. Can be set only once.
    pub fn on_unheard(&self, hears: impl Fn(u64) + Send + Sync + 'static) {
        let _ = self.0.unheard.set(Arc::new(hears));
    }

    /// Take up to `max` events, oldest first, append them to `out`, and return their number. Waits until `at_least` events are there or the time is
    /// up (`None`: no limit). With `at_least` 0 it never waits.
    ///
    /// # Errors
    /// `EBADF` when the queue is deleted, also during the wait; `EINVAL` when `max` is 0 or less than `at_least`; `EINTR` when a signal handler
    /// ran during the wait and there is no event. (With some events, but fewer than `at_least`, it returns those; [`Wait::BusyPoll`] ignores signals.)
    pub fn dequeue(
        &self,
        out: &mut Vec<Event>,
        max: usize,
        at_least: usize,
        timeout: Option<Duration>,
    ) -> Result<usize, Errno> {
        if max == 0 || max < at_least {
            return Err(Errno::INVAL);
        }
        let q = &*self.0;
        // A wait polls the connections itself.
        if at_least == 0 && q.len.load(Ordering::Acquire) == 0 {
            q.drive();
        }
        let mut interrupted = false;
        let (mut taken, mut until) = (0, None);
        loop {
            let wanted = at_least.saturating_sub(taken);
            if q.len.load(Ordering::Acquire) < wanted {
                // A deadline beyond the range of the clock means no limit.
                let end = *until.get_or_insert_with(|| deadline(timeout));
                interrupted = q.wait_for(wanted, end);
            }
            if q.deleted.load(Ordering::SeqCst) {
                for event in out.drain(out.len() - taken..) {
                    if let Some(late) = q.unheard(event.token) {
                        late.run();
                    }
                }
                return Err(Errno::BADF);
            }
            taken += q.take(out, max - taken);
            if taken >= at_least || interrupted {
                break;
            }
            // The time is up, or another thread took the events.
            if until.flatten().is_some_and(|end| end <= Instant::now()) {
                break;
            }
        }
        if q.signals.load(Ordering::SeqCst) && q.len.load(Ordering::SeqCst) == 0 {
            q.leave();
        }
        if interrupted && taken == 0 {
            return Err(Errno::INTR);
        }
        Ok(taken)
    }

    /// A descriptor for `epoll`. While [`Queue::set_signal`] is on, it is readable while there are events, and the engine
    /// collects them without a call of the program. While it is off, it is never readable.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.signal.as_fd()
    }

    /// Set how waiting threads wait.
    pub fn set_wait(&self, wait: Wait) {
        self.0.wait.store(wait as u8, Ordering::Relaxed);
    }

    /// How waiting threads wait.
    pub fn wait_mode(&self) -> Wait {
        match self.0.wait.load(Ordering::Relaxed) {
            0 => Wait::Adaptive,
            1 => Wait::Notify,
            _ => Wait::BusyPoll,
        }
    }

    /// Turn the descriptor on or off, see [`Queue::as_fd`]. Default off.
    pub fn set_signal(&self, on: bool) {
        let q = &*self.0;
        let events = lock(&q.events);
        q.signals.store(on, Ordering::SeqCst);
        if on && !events.is_empty() {
            q.signal.raise();
        } else {
            q.signal.clear();
        }
        drop(events);
        if on {
            q.leave();
        }
    }

    /// True if the descriptor is on.
    pub fn signal(&self) -> bool {
        self.0.signals.load(Ordering::SeqCst)
    }

    /// Change the number of places.
    ///
    /// # Errors
    /// Like [`Queue::new`]; `EBUSY` when more places than `depth` are reserved.
    pub fn set_depth(&self, depth: usize) -> Result<(), Errno> {
        if depth == 0 || depth > MAX_DEPTH {
            return Err(Errno::INVAL);
        }
        // The lock under which places are reserved, see `reserve`.
        let _members = lock(&self.0.members);
        if self.0.used.load(Ordering::SeqCst) > depth {
            return Err(Errno::BUSY);
        }
        self.0.depth.store(depth, Ordering::SeqCst);
        Ok(())
    }

    /// The number of places.
    pub fn depth(&self) -> usize {
        self.0.depth.load(Ordering::SeqCst)
    }

    /// Number of events in the queue.
    pub fn waiting(&self) -> usize {
        self.0.len.load(Ordering::SeqCst)
    }

    /// Number of operations whose events will enter the queue.
    pub fn outstanding(&self) -> usize {
        let used = self.0.used.load(Ordering::SeqCst);
        used.saturating_sub(self.waiting())
    }

    /// Delete the queue (`exs_qdelete`): outstanding operations continue, their events are dropped. Waiting threads get `EBADF`.
    pub fn delete(&self) {
        let q = &*self.0;
        q.deleted.store(true, Ordering::SeqCst);
        let events = {
            let mut events = lock(&q.events);
            q.len.store(0, Ordering::SeqCst);
            q.signal.clear();
            std::mem::take(&mut *events)
        };
        for event in events {
            if let Some(late) = q.unheard(event.token) {
                late.run();
            }
        }
        q.wake();
    }
}

impl QueueInner {
    /// Reserve a place for an operation.
    pub(crate) fn reserve(&self) -> Result<(), Errno> {
        if self.deleted.load(Ordering::SeqCst) {
            return Err(Errno::BADF);
        }
        let depth = self.depth.load(Ordering::SeqCst);
        if self.used.fetch_add(1, Ordering::SeqCst) >= depth {
            self.used.fetch_sub(1, Ordering::SeqCst);
            return Err(Errno::AGAIN);
        }
        Ok(())
    }

    /// Free a reserved place that no event will use.
    pub(crate) fn release(&self) {
        self.used.fetch_sub(1, Ordering::SeqCst);
    }

    /// Put an event into its operation's reserved place. After all locks are released, the caller wakes the threads that wait for it.
    #[inline]
    pub(crate) fn push(&self, event: Event) -> Option<Late> {
        let waiters = {
            let mut events = lock(&self.events);
            if self.deleted.load(Ordering::SeqCst) {
                drop(events);
                self.release();
                return self.unheard(event.token);
            }
            events.push_back(event);
            self.len.store(events.len(), Ordering::Release);
            if events.len() == 1 && self.signals.load(Ordering::SeqCst) {
                self.signal.raise();
            }
            // Read under the lock, as the last check of threads that are about to sleep.
            self.waiters.load(Ordering::SeqCst)
        };
        if waiters > 0 {
            self.wake();
        }
        None
    }

    #[cold]
    fn unheard(&self, token: u64) -> Option<Late> {
        let hears = Arc::clone(self.unheard.get()?);
        Some(Late::new(move || hears(token)))
    }

    /// Register a connection that now has an operation in this queue.
    pub(crate) fn join(&self, conn: &Arc<dyn Member>) {
        let mut members = lock(&self.members);
        let here = Arc::as_ptr(conn);
        if !members.iter().any(|m| std::ptr::addr_eq(m.as_ptr(), here)) {
            members.retain(|m| m.strong_count() > 0);
            members.push(Arc::downgrade(conn));
            drop(members);
            // Waiting threads must poll this connection as well.
            if self.waiters.load(Ordering::SeqCst) > 0 {
                self.wake();
            }
            if self.signals.load(Ordering::SeqCst) {
                conn.leave();
            }
        }
    }

    fn take(&self, out: &mut Vec<Event>, max: usize) -> usize {
        if self.len.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut events = lock(&self.events);
        let n = events.len().min(max);
        out.reserve(n);
        for _ in 0..n {
            out.extend(events.pop_front());
        }
        self.len.store(events.len(), Ordering::Release);
        if events.is_empty() && n > 0 && self.signals.load(Ordering::SeqCst) {
            self.signal.clear();
        }
        drop(events);
        self.used.fetch_sub(n, Ordering::SeqCst);
        n
    }

    fn members(&self) -> Vec<Arc<dyn Member>> {
        lock(&self.members)
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// The connection, if there is exactly one.
    fn only_member(&self) -> Option<Arc<dyn Member>> {
        match lock(&self.members).as_slice() {
            [one] => one.upgrade(),
            _ => None,
        }
    }

    fn drive(&self) {
        if let Some(conn) = self.only_member() {
            conn.drive();
        } else {
            for conn in self.members() {
                conn.drive();
            }
        }
    }

    /// Stop polling: the engine drives the connections again.
    fn leave(&self) {
        self.members().iter().for_each(|conn| conn.leave());
    }

    /// True when a signal handler ended the wait.
    fn wait_for(&self, at_least: usize, deadline: Option<Instant>) -> bool {
        let mode = self.wait.load(Ordering::Relaxed);
        let there =
            || self.len.load(Ordering::SeqCst) >= at_least || self.deleted.load(Ordering::SeqCst);
        if mode == Wait::BusyPoll as u8 {
            self.spin(there, deadline);
            return false;
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let adaptive = mode == Wait::Adaptive as u8;
        let mut looked = false;
        let mut interrupted = false;
        while !interrupted && !there() {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                // A wait with no time left still polls once.
                self.drive();
                break;
            }
            if let Some(conn) = self.only_member().filter(|c| c.can_watch()) {
                let epoch = conn.epoch();
                lock(&self.asleep).push(Arc::downgrade(&conn));
                // A push that did not see this thread wait happened before this check.
                let over = {
                    let events = lock(&self.events);
                    events.len() >= at_least || self.deleted.load(Ordering::SeqCst)
                };
                if !over {
                    interrupted = conn.watch(epoch, adaptive, left);
                }
                let mut asleep = lock(&self.asleep);
                let here = Arc::as_ptr(&conn);
                if let Some(at) = asleep
                    .iter()
                    .position(|c| std::ptr::addr_eq(c.as_ptr(), here))
                {
                    asleep.swap_remove(at);
                }
                drop(asleep);
                conn.settle();
                continue;
            }
            if adaptive && !looked {
                looked = true;
                let end = Instant::now() + LOOK;
                while !there() && Instant::now() < end {
                    self.drive();
                    std::hint::spin_loop();
                }
                continue;
            }
            // The engine drives them all, and their completions enter this queue.
            let rings = self.bell.rings();
            self.leave();
            // A push that did not see this thread wait happened before this check.
            let over = {
                let events = lock(&self.events);
                events.len() >= at_least || self.deleted.load(Ordering::SeqCst)
            };
            interrupted = !over && self.bell.sleep(rings, deadline) == Err(Errno::INTR);
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        interrupted
    }

    fn spin(&self, there: impl Fn() -> bool, deadline: Option<Instant>) {
        let mut turn = 0u8;
        let mut only = None;
        loop {
            if turn.is_multiple_of(64) {
                only = self.only_member();
            }
            turn = turn.wrapping_add(1);
            match &only {
                Some(conn) => conn.drive(),
                None => self.drive(),
            }
            // A pause after the awaited event would add latency: a pause takes as long as a poll.
            if there() {
                return;
            }
            std::hint::spin_loop();
            // Reading the clock costs as much as polling the connection.
            if turn.is_multiple_of(64) && deadline.is_some_and(|end| Instant::now() >= end) {
                return;
            }
        }
    }

    fn wake(&self) {
        for conn in lock(&self.asleep).iter().filter_map(Weak::upgrade) {
            conn.interrupt();
        }
        self.bell.ring();
    }
}
