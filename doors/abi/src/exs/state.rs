//! The state that the calls share: the context and the tables, and their handling in a forked child and at exit.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rustix::io::Errno;
use weft_exs::{Context, Socket};

use super::closing::{Closing, LINGER, OneClosing};
use super::epoll_set::Set;
use super::handles::Handles;
use super::helper::Bell;
use super::region::Mem;
use super::started::{QueueEntry, Started};
use super::table::{Entry, Found, Sockets};
use super::types::{EXS_VERSION1, Version};

/// The global state. It is leaked: a forked child leaves its parent's state alone and starts with a new one.
pub(crate) struct State {
    context: Mutex<Option<Context>>,
    bell: Mutex<Option<Bell>>,
    pub(crate) queues: Handles<QueueEntry>,
    /// The operations of deleted queues, while there are any.
    deleted: Mutex<Vec<Weak<Started>>>,
    pub(crate) regions: Handles<Mem>,
    pub(crate) sockets: Sockets,
    pub(crate) closing: Arc<Closing>,
    /// The epoll descriptors that the library has made.
    pub(crate) epolls: Mutex<HashMap<i32, Arc<Set>>>,
    /// Held by a helper thread during an accept on a kernel socket.
    pub(crate) accepting: Mutex<()>,
}

static STATE: AtomicPtr<State> = AtomicPtr::new(null_mut());

impl State {
    fn new(sockets: Sockets) -> &'static State {
        Box::leak(Box::new(State {
            context: Mutex::new(None),
            bell: Mutex::new(None),
            queues: Handles::new(),
            deleted: Mutex::default(),
            regions: Handles::new(),
            sockets,
            closing: Arc::new(Closing::default()),
            epolls: Mutex::default(),
            accepting: Mutex::default(),
        }))
    }

    /// The program's context, made on first use.
    pub(crate) fn context(&self) -> Result<Context, Errno> {
        let mut context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = &*context {
            return Ok(context.clone());
        }
        let made = Context::shared().map_err(cannot_begin)?;
        *context = Some(made.clone());
        Ok(made)
    }

    /// The socket for an asynchronous operation: one of ours, or a connected stream socket of the kernel.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`, `EOPNOTSUPP` for another type of socket, `ENOTCONN`.
    pub(crate) fn operable(&self, fd: i32) -> Result<Arc<Entry>, Errno> {
        match self.sockets.find(fd)? {
            Found::Exs(entry) => Ok(entry),
            Found::System => self.sockets.plain(fd, true, || self.context()),
        }
    }

    /// A kernel stream socket for a close, connected or not. `None` without a queue for the event (`told`) and without
    /// outstanding operations.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`, `EOPNOTSUPP` for another type of socket.
    pub(crate) fn closable(&self, fd: i32, told: bool) -> Result<Option<Arc<Entry>>, Errno> {
        if told {
            let entry = self.sockets.plain(fd, false, || self.context());
            return entry.map(Some);
        }
        self.sockets.known_plain(fd)
    }

    /// The program closes a descriptor that is none of our sockets, but may be one of epoll.
    pub(crate) fn forget_epoll(&self, fd: i32) {
        let mut epolls = self.epolls.lock().unwrap_or_else(PoisonError::into_inner);
        epolls.remove(&fd);
    }

    /// The operations of deleted queues.
    pub(crate) fn deleted(&self) -> MutexGuard<'_, Vec<Weak<Started>>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bell of helper threads, made on first use.
    pub(crate) fn bell(&self) -> Result<Socket, Errno> {
        let context = self.context()?;
        let mut bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        let bell = match &mut *bell {
            Some(bell) => bell,
            none => none.insert(Bell::new(&context)?),
        };
        Ok(bell.socket())
    }
}

/// Prints the error once to standard error, because no `errno` describes a fault of the environment or the machine.
fn cannot_begin(error: weft_exs::Error) -> Errno {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        eprintln!("weft: extended sockets cannot begin: {error}");
    }
    error.into()
}

pub(crate) fn state() -> &'static State {
    let current = STATE.load(Ordering::Acquire);
    if !current.is_null() {
        // SAFETY: only leaked states are stored.
        return unsafe { &*current };
    }
    first()
}

#[cold]
fn first() -> &'static State {
    static TOLD: AtomicBool = AtomicBool::new(false);
    // No lock and no wait, because a fork may come between any two lines. Registering twice is harmless.
    if !TOLD.load(Ordering::Acquire) {
        // SAFETY: the handlers are functions, which stay valid.
        unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
            libc::atexit(at_exit);
        }
        TOLD.store(true, Ordering::Release);
    }
    let made = std::ptr::from_ref(State::new(Sockets::new())).cast_mut();
    let swap = STATE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
    // If several threads are first at once, one state is kept; an unused state is small.
    let stored = swap.map_or_else(|theirs| theirs, |_| made);
    // SAFETY: only leaked states are stored.
    unsafe { &*stored }
}

extern "C" fn in_child() {
    // SAFETY: null, or a leaked state.
    let Some(parents) = (unsafe { STATE.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    let fresh = std::panic::catch_unwind(|| State::new(parents.sockets.inherited()));
    match fresh {
        Ok(fresh) => STATE.store(std::ptr::from_ref(fresh).cast_mut(), Ordering::Release),
        Err(_) => std::process::abort(),
    }
}

/// At exit the program's sockets are closed in order, as the kernel closes its own: sent data is delivered. Sockets that
/// cannot deliver it within [`LINGER`] are cut off.
extern "C" fn at_exit() {
    // A panic must not prevent the exit, and there is no caller to report it to.
    let _ = std::panic::catch_unwind(|| {
        let state = state();
        for entry in state.sockets.take_all() {
            let closing = OneClosing::begin(&state.closing);
            // A socket that cannot be closed has nothing to deliver; the sink is dropped, which counts as the end.
            let _ = entry.end(closing.sink());
        }
        state.closing.wait(Instant::now() + LINGER);
    });
}

/// `exs_init`: checks the version, and opens the device, so that a machine without support fails here.
pub fn init(version: Version) -> Result<i32, Errno> {
    if i64::from(version) != EXS_VERSION1 {
        return Err(Errno::INVAL);
    }
    state().context()?;
    Ok(0)
}
