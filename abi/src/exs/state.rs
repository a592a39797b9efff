//! What the calls share: the context, the tables, and what becomes of them in a forked child and at the end of the program.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_exs::{Context, Sink, Socket};

use super::handles::Handles;
use super::memory::Mem;
use super::plain::Bell;
use super::queue::{QueueEntry, Started};
use super::table::Sockets;
use super::types::{EXS_VERSION1, Version};

/// Everything. It is leaked: a forked child leaves its parent's alone and begins with a new one.
pub(crate) struct State {
    context: Mutex<Option<Context>>,
    bell: Mutex<Option<Bell>>,
    pub(crate) queues: Handles<QueueEntry>,
    /// Of queues that were deleted, while there are any.
    deleted: Mutex<Vec<Weak<Started>>>,
    pub(crate) regions: Handles<Mem>,
    pub(crate) sockets: Sockets,
    pub(crate) closing: Arc<Closing>,
    /// Held by a helping thread that takes a connection of the system's.
    pub(crate) accepting: Mutex<()>,
}

static STATE: AtomicPtr<State> = AtomicPtr::new(null_mut());

/// How long the end of the program, or a blocking close, waits for what is still to be sent.
pub(crate) const LINGER: Duration = Duration::from_secs(10);

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
            accepting: Mutex::default(),
        }))
    }

    /// The program's context, made when it is first asked for.
    pub(crate) fn context(&self) -> Result<Context, Errno> {
        let mut context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = &*context {
            return Ok(context.clone());
        }
        let made = Context::shared().map_err(cannot_begin)?;
        *context = Some(made.clone());
        Ok(made)
    }

    /// Operations of queues that were deleted.
    pub(crate) fn deleted(&self) -> MutexGuard<'_, Vec<Weak<Started>>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bell of helping threads, made when it is first needed.
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

/// No `errno` says what is wrong with the environment or the machine: it is said on the standard error output, once.
fn cannot_begin(error: weft_exs::Error) -> Errno {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        eprintln!("weft: extended sockets cannot begin: {error}");
    }
    error.into()
}

/// The state of this process.
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
    // No lock and nothing to wait for, since a fork may come between any two lines. To be told twice does no harm.
    if !TOLD.load(Ordering::Acquire) {
        // SAFETY: the handlers are functions that stay.
        unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
            libc::atexit(at_exit);
        }
        TOLD.store(true, Ordering::Release);
    }
    let made = std::ptr::from_ref(State::new(Sockets::new())).cast_mut();
    let swap = STATE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
    // Of several who are first at once, one is taken; an unused state is small.
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

/// A program that ends has its sockets closed in order, as the system does it for its own: what was sent is delivered. Sockets that
/// cannot get rid of it in [`LINGER`] are cut off.
extern "C" fn at_exit() {
    // A panic must not hinder the exit, and there is nobody left to be told.
    let _ = std::panic::catch_unwind(|| {
        let state = state();
        for entry in state.sockets.take_all() {
            let closing = OneClosing::begin(&state.closing);
            // What cannot be closed has nothing to deliver; the sink is dropped, which counts as the end.
            let _ = entry.end(closing.sink());
        }
        state.closing.wait(Instant::now() + LINGER);
    });
}

/// Sockets that are being closed with nobody waiting.
#[derive(Default)]
pub(crate) struct Closing {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Closing {
    fn wait(&self, until: Instant) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        // What is left after that time is cut off by the exit.
        drop(
            self.fewer
                .wait_timeout_while(count, left, |count| *count > 0),
        );
    }
}

pub(crate) struct OneClosing(Arc<Closing>);

impl OneClosing {
    /// One more, until the value is dropped.
    pub(crate) fn begin(all: &Arc<Closing>) -> OneClosing {
        *all.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        OneClosing(Arc::clone(all))
    }

    pub(crate) fn sink(self) -> Sink {
        Sink::call(move |_| drop(self))
    }
}

impl Drop for OneClosing {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_all();
    }
}

/// A flag that one thread raises and another waits for.
#[derive(Default)]
pub(crate) struct Done {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    pub(crate) fn set(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self, limit: Duration) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(done, limit, |done| !*done));
    }
}

/// `exs_init`: the version, and the device, so that a machine that cannot do it says so here.
pub fn init(version: Version) -> Result<i32, Errno> {
    if i64::from(version) != EXS_VERSION1 {
        return Err(Errno::INVAL);
    }
    state().context()?;
    Ok(0)
}

/// Takes a flag and leaves `false`.
pub(crate) fn take(flag: &AtomicBool) -> bool {
    flag.swap(false, Ordering::AcqRel)
}
