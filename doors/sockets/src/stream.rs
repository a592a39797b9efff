//! Code that the connections of all stream sockets share: a queue pair, its completions, and a lock whose holder also does the work that
//! other threads leave meanwhile.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_verbs::ext::CqExt;
use weft_verbs::{Cq, EndReason, Path, Qp, RecvWr, Wc};

use crate::bell::Bell;
use crate::lock::{lock, try_lock};

/// Completions taken at once.
const BATCH: usize = 32;

/// The state of every connection under its lock.
pub struct State {
    /// Room for completions and receives, kept from one look to the next.
    wcs: Vec<Wc>,
    /// Receives to be posted again.
    pub recvs: Vec<RecvWr>,
    /// The connection broke.
    pub over: Option<Errno>,
    /// For `SO_ERROR`.
    pub error: Option<Errno>,
    /// The program reads no more.
    pub read_shut: bool,
    /// The program sends no more.
    pub send_shut: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            wcs: vec![Wc::default(); BATCH],
            recvs: Vec::new(),
            over: None,
            error: None,
            read_shut: false,
            send_shut: false,
        }
    }
}

/// The state of every connection, apart from the content `C` of its lock.
pub struct Base<C> {
    /// The queue pair.
    pub qp: Qp,
    /// Its completions.
    pub cq: Cq,
    core: Mutex<C>,
    /// Another thread had work for the core while the lock was held.
    pending: AtomicBool,
    /// How the queue pair ended.
    pub end: OnceLock<EndReason>,
    /// Threads in [`Stream::wait_until`].
    waiting: AtomicU32,
    /// For threads that wait for several sockets.
    pub bell: Arc<Bell>,
}

impl<C> Base<C> {
    /// Of a connection that is not connected yet.
    pub fn new(qp: Qp, cq: Cq, core: C, bell: Arc<Bell>) -> Self {
        Self {
            qp,
            cq,
            core: Mutex::new(core),
            pending: AtomicBool::new(false),
            end: OnceLock::new(),
            waiting: AtomicU32::new(0),
            bell,
        }
    }

    /// As [`Qp::path`].
    pub fn path(&self) -> Option<Path> {
        self.qp.path()
    }

    /// As [`Qp::local_addr`].
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.qp.local_addr()
    }

    /// As [`Qp::peer_addr`].
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.qp.peer_addr()
    }

    /// The program will sleep elsewhere: the engine drives the connection.
    pub fn leave_it(&self) {
        self.cq.release();
    }

    /// Something has changed that others may wait for.
    pub fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.cq.interrupt();
        }
        self.bell.ring();
    }
}

/// Connections closed by their programs, with something left to do.
pub type Lingering<T> = Arc<Mutex<Vec<Arc<T>>>>;

/// A connection of a stream socket. The required methods say what its kind makes of completions.
pub trait Stream: Deref<Target = Base<Self::Core>> + Send + Sync + Sized + 'static {
    /// The state under the lock.
    type Core: AsMut<State> + Send;

    /// Whether the peer's first message has arrived. Completions before that wait in the queue.
    fn is_established(core: &Self::Core) -> bool;

    /// Handles a completion.
    ///
    /// # Errors
    /// An error that ends the whole connection.
    fn completed(&self, core: &mut Self::Core, wc: &Wc) -> Result<(), Errno>;

    /// Completions have been looked at, and the queue pair has ended or not: go on. Says whether others may wait for what changed.
    fn go_on(&self, core: &mut Self::Core, ended: Option<EndReason>) -> bool;

    /// The present readiness of the connection.
    fn ready_now(&self, core: &mut Self::Core) -> PollFlags;

    /// Let the engine drive `me` whenever something completes.
    fn set_hook(me: &Weak<Self>, cq: &Cq) {
        let me = me.clone();
        cq.set_hook(move || {
            if let Some(conn) = me.upgrade() {
                conn.make_progress();
            }
        });
    }

    /// Notice the queue pair's end, after which a connection does not linger.
    fn hear_end(&self, me: Weak<Self>, lingering: Lingering<Self>) {
        self.qp.on_end(move |reason| {
            let Some(conn) = me.upgrade() else { return };
            let _ = conn.end.set(reason);
            conn.cq.interrupt();
            conn.make_progress();
            lock(&lingering).retain(|other| !Arc::ptr_eq(other, &conn));
        });
    }

    /// Do something under the lock, and then what others left meanwhile.
    fn with<R>(&self, f: impl FnOnce(&mut Self::Core) -> R) -> R {
        let out = f(&mut lock(&self.core));
        if self.pending.load(Ordering::SeqCst) {
            self.make_progress();
        }
        out
    }

    /// Do what completions ask for. From any thread, also one that has the lock: then its holder does it.
    fn make_progress(&self) {
        loop {
            let core = try_lock(&self.core).or_else(|| {
                self.pending.store(true, Ordering::SeqCst);
                try_lock(&self.core)
            });
            let Some(mut core) = core else { return };
            self.pending.store(false, Ordering::SeqCst);
            self.process(&mut core);
            drop(core);
            if !self.pending.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// Take the completions that are there, and go on.
    fn process(&self, core: &mut Self::Core) {
        if !Self::is_established(core) {
            return;
        }
        // Completions of before the end are there when we see the end.
        let ended = self.end.get().copied();
        let mut changed = false;
        let mut wcs = std::mem::take(&mut core.as_mut().wcs);
        loop {
            let Ok(n) = self.cq.take(&mut wcs) else {
                self.fail(core, Errno::IO);
                break;
            };
            for wc in &wcs[..n] {
                if let Err(errno) = self.completed(core, wc) {
                    self.fail(core, errno);
                }
            }
            changed |= n > 0;
            if n < wcs.len() {
                break;
            }
        }
        core.as_mut().wcs = wcs;
        if self.go_on(core, ended) || changed {
            self.wake();
        }
    }

    /// Do what completions ask for, if there are any.
    fn drive(&self, core: &mut Self::Core) {
        if self.cq.look() || self.end.get().is_some() {
            self.process(core);
        }
    }

    /// The connection cannot go on.
    fn fail(&self, core: &mut Self::Core, errno: Errno) {
        let state = core.as_mut();
        if state.over.is_none() {
            state.over = Some(errno);
            state.error = Some(errno);
            self.qp.to_error();
        }
    }

    /// Sleep until `test` finds something; drives the connection.
    ///
    /// # Errors
    /// `EAGAIN` when the time is up, `EINTR` when a signal's handler ran.
    fn wait_until<T>(
        &self,
        deadline: Option<Instant>,
        mut test: impl FnMut(&mut Self::Core) -> Option<T>,
    ) -> Result<T, Errno> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let (found, epoch) = self.with(|core| {
                self.process(core);
                // Later changes make another epoch.
                (test(core), self.cq.epoch())
            });
            if let Some(found) = found {
                break Ok(found);
            }
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break Err(Errno::AGAIN);
            }
            if self.cq.watch(epoch, true, left) {
                break Err(Errno::INTR);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// The same, but not interrupted by signals. `None`: the time is up.
    fn wait_through<T>(
        &self,
        deadline: Option<Instant>,
        mut test: impl FnMut(&mut Self::Core) -> Option<T>,
    ) -> Option<T> {
        loop {
            match self.wait_until(deadline, &mut test) {
                Err(Errno::INTR) => {}
                waited => return waited.ok(),
            }
        }
    }

    /// The readiness of the connection; drives it once.
    fn ready(&self) -> PollFlags {
        self.with(|core| {
            self.drive(core);
            self.ready_now(core)
        })
    }

    /// Sleep until the connection is ready for something of `wanted`, or the time is up.
    ///
    /// # Errors
    /// `EINTR` when a signal's handler ran.
    fn wait_ready(&self, wanted: PollFlags, deadline: Option<Instant>) -> Result<PollFlags, Errno> {
        let wanted = wanted | PollFlags::ERR | PollFlags::HUP;
        let waited = self.wait_until(deadline, |core| {
            let ready = self.ready_now(core) & wanted;
            (!ready.is_empty()).then_some(ready)
        });
        match waited {
            Err(Errno::AGAIN) => Ok(PollFlags::empty()),
            waited => waited,
        }
    }

    /// Takes the error for `SO_ERROR`.
    fn take_error(&self) -> Option<Errno> {
        self.with(|core| core.as_mut().error.take())
    }
}

/// Which direction of a connection a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Bytes from the peer are discarded. (The peer is not notified.)
    Read,
    /// Nothing more is sent.
    Write,
    /// Both.
    Both,
}
