//! The progress engine: one thread for each device. It drives the objects that no other thread drives.
//!
//! A thread that polls or waits on a completion queue takes a *lease* of the queue pairs behind it and reads their sockets itself. The
//! engine does not touch leased queue pairs, so a message wakes one thread, not two. The lease costs the thread one atomic load for each
//! poll.
//!
//! A source (queue pair, listener, handshake) is *armed* while its one-shot registration in the engine's epoll can fire. When it fires, or
//! when a polling thread takes the lease, the source is disarmed. Leased queue pairs are in the list `leased`, which the engine checks
//! every [`TICK`] while it is not empty. If the owner of a queue pair has not polled since the last check, and does not sleep on it, the
//! engine drives it from then on and arms it again.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use weft_sys::liveness::Liveness;
use weft_sys::{Epoll, Event, EventFd, Interest};

use crate::lock::lock;
use crate::report::Connection;

/// How often the engine checks leased queue pairs: the maximum delay of work that their owners left undone.
const TICK: Duration = Duration::from_millis(1);
/// The same while owners have polled continuously for [`STEADY_TICKS`], and have deferred nothing: each check takes a core from a spinning
/// thread.
const SLOW_TICK: Duration = Duration::from_millis(4);
const STEADY_TICKS: u32 = 32;
/// Quiet ticks (all leased queue pairs have a sleeping owner) after which the engine sleeps until it is called.
const QUIET_TICKS: u32 = 20;
/// How long the engine continues to poll queue pairs that just moved data, before it arms them again.
const HOT_SPIN: Duration = Duration::from_micros(10);
/// How long the engine polls for the next message of a peer that makes a connection before it sleeps: a wake-up takes as long.
const SOON: Duration = Duration::from_micros(50);
/// Ticks between two looks at whether the peers of polled queue pairs are alive.
const CHECK_TICKS: u32 = 8;
/// How often to check whether the engine's thread has started, after which checks are [`LIVENESS_LOOK`] apart.
const LIVENESS_LOOKS: u32 = 10_000;
const LIVENESS_YIELDS: u32 = 100;
const LIVENESS_LOOK: Duration = Duration::from_micros(100);
const WAKE_TOKEN: u64 = u64::MAX;

/// Something with a descriptor that the engine serves.
pub(crate) trait Source: Send + Sync {
    /// The source is ready, and disarmed. The source arms itself again through [`Registration::arm`].
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, event: Event) -> Next;
    /// Its time has come (see [`Registration::set_timer`]).
    fn expired(self: Arc<Self>, engine: &Arc<Engine>);
    /// It panicked while the engine served it.
    fn panicked(self: Arc<Self>) {}
    /// The statistics for [`crate::stat`], if it is a connection.
    fn stat(self: Arc<Self>) -> Option<Connection> {
        None
    }
}

/// The engine's action on a source after `ready`.
pub(crate) enum Next {
    /// Nothing.
    Done,
    /// A peer that is making a connection is about to say more.
    Soon,
    /// It moved data: look at it again soon, then arm it.
    Hot(Arc<dyn Driven>),
    /// Its owner drives it.
    Lent(Arc<dyn Driven>),
}

/// A source that either its owner or the engine drives: a connection.
pub(crate) trait Driven: Source {
    /// The owner's activity since the last check.
    fn lease_state(&self) -> Lease;
    /// The engine drives it.
    fn drive_engine(self: Arc<Self>) -> Drive;
    /// Whether work was deferred until the owner's next poll.
    fn has_deferred(&self) -> bool;
    /// Whether no owner sleeps on it.
    fn is_awake(&self) -> bool;
    /// Whether it has to be added to the engine's list of leased objects.
    fn enter_leased(&self) -> bool;
    /// The engine takes it back, see [`Engine::lend`].
    fn take_back(self: Arc<Self>);
    /// The engine leaves the object; another thread was driving it at the last check.
    fn leave_driven(self: Arc<Self>);
    /// The engine leaves the object: arms it again, and sends deferred requests.
    fn rearm_and_flush(self: Arc<Self>);
    /// Look whether the peer is still there.
    fn check_peer(self: Arc<Self>);
}

/// The result of an attempt to make progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drive {
    /// Another thread is at it.
    Busy,
    /// Nothing to do.
    Still,
    /// Bytes moved.
    Moved,
}

/// Names a source; stale names are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Token(u64);

/// A source's registration with the engine. It is made before the source, which can therefore own it, and begins with
/// [`Registration::start`] or [`Registration::enter`]; from then on the engine holds the source. It ends with
/// [`Registration::end`] or when it is dropped: then the engine lets go of the source.
pub(crate) struct Registration {
    engine: Arc<Engine>,
    token: Token,
}

impl Registration {
    /// A registration that has yet to begin.
    pub(crate) fn new(engine: &Arc<Engine>) -> Registration {
        Registration {
            engine: Arc::clone(engine),
            token: engine.reserve(),
        }
    }

    /// Watch the source's descriptor, armed with `interest`.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`. The engine does not hold the source then.
    pub(crate) fn start(
        &self,
        source: Arc<dyn Source>,
        fd: BorrowedFd<'_>,
        interest: Interest,
    ) -> std::io::Result<()> {
        // Before the descriptor: an event finds the source.
        self.enter(source);
        let epoll = &self.engine.epoll;
        epoll
            .add(fd, self.token.0, interest | Interest::ONESHOT)
            .inspect_err(|_| self.end())
    }

    /// Take in a source without a descriptor, for timers.
    pub(crate) fn enter(&self, source: Arc<dyn Source>) {
        self.engine.enter(self.token, source);
    }

    /// Arm the source again.
    pub(crate) fn arm(&self, fd: BorrowedFd<'_>, interest: Interest) {
        // Fails only if the descriptor is no longer watched: then no source waits for it.
        let epoll = &self.engine.epoll;
        let _ = epoll.modify(fd, self.token.0, interest | Interest::ONESHOT);
    }

    /// Arms the source for what is of interest. Another thread may have been blocked meanwhile, and have armed before us: it is looked at once more.
    pub(crate) fn arm_for(&self, fd: BorrowedFd<'_>, interest: impl Fn() -> Interest) {
        let mut now = interest();
        loop {
            self.arm(fd, now);
            let armed = std::mem::replace(&mut now, interest());
            if now == armed {
                break;
            }
        }
    }

    /// Calls the source's `expired` at this time. A timer cannot be cancelled: a source ignores those that it does not need. It is not
    /// called after the end of the registration.
    pub(crate) fn set_timer(&self, at: Instant) {
        self.engine.set_timer(self.token, at);
    }

    /// Call the source's `ready` as if its descriptor had become readable.
    pub(crate) fn poke(&self) {
        self.engine.poke(self.token);
    }

    /// Ends the registration. The descriptor will be closed, or the source ignores one more event.
    pub(crate) fn end(&self) {
        self.engine.forget(self.token);
    }

    /// Ends the registration. The descriptor stays open, perhaps with another registration.
    pub(crate) fn release(&self, fd: BorrowedFd<'_>) {
        let _ = self.engine.epoll.delete(fd);
        self.end();
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.end();
    }
}

#[derive(Default)]
struct Slots {
    entries: Vec<(u32, Option<Arc<dyn Source>>)>,
    free: Vec<u32>,
    /// The engine has ended: slots are no longer available.
    over: bool,
}

impl Slots {
    /// The slot, unless the name is stale.
    fn entry(&mut self, token: Token) -> Option<&mut (u32, Option<Arc<dyn Source>>)> {
        let entry = self.entries.get_mut(token.0 as u32 as usize)?;
        (u64::from(entry.0) == token.0 >> 32).then_some(entry)
    }

    fn get(&mut self, token: Token) -> Option<Arc<dyn Source>> {
        self.entry(token)?.1.clone()
    }
}

pub(crate) struct Engine {
    epoll: Epoll,
    wake: EventFd,
    slots: Mutex<Slots>,
    timers: Mutex<BTreeSet<(Instant, Token)>>,
    leased: Mutex<Vec<Weak<dyn Driven>>>,
    /// Sources that are ready without their descriptor saying so.
    poked: Mutex<Vec<Token>>,
    /// Shows peers of this host that our address space is still the one they met. The engine's thread sets it first of all.
    liveness: OnceLock<Option<OwnedFd>>,
    /// The engine checks `leased` every tick; if false, a thread that needs the check has to wake it.
    ticking: AtomicBool,
    /// The engine ticks slowly; a thread that defers work has to wake it.
    slow: AtomicBool,
    stop: AtomicBool,
    ticks: AtomicU32,
    /// There are cores to spare for spinning.
    spins: bool,
}

impl Engine {
    /// Start the engine's thread.
    pub(crate) fn start(cores: usize, with_liveness: bool) -> std::io::Result<Arc<Engine>> {
        let engine = Arc::new(Engine {
            epoll: Epoll::new()?,
            wake: EventFd::new()?,
            slots: Mutex::default(),
            timers: Mutex::default(),
            leased: Mutex::default(),
            poked: Mutex::default(),
            liveness: OnceLock::new(),
            ticking: AtomicBool::new(false),
            slow: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            ticks: AtomicU32::new(0),
            spins: cores > 1,
        });
        engine
            .epoll
            .add(engine.wake.as_fd(), WAKE_TOKEN, Interest::READ)?;
        let runner = Arc::clone(&engine);
        // No thread waits for it: it sees its work when it starts.
        std::thread::Builder::new()
            .name("weft-engine".into())
            .spawn(move || {
                // The thread does little work, and another thread waits for it, perhaps spinning on this very core.
                if let Err(error) = weft_sys::thread::ask_for_short_turns() {
                    tracing::debug!(%error, "the engine takes turns of the usual length");
                }
                // It lives as long as the thread.
                let liveness = with_liveness.then(Liveness::start).transpose();
                let shown = liveness.as_ref().map_err(|error| error.kind().into());
                let shown = shown.and_then(|liveness| {
                    let fd = liveness
                        .as_ref()
                        .map(|liveness| liveness.fd().try_clone_to_owned());
                    fd.transpose()
                });
                if let Err(error) = &shown {
                    let error: &std::io::Error = liveness.as_ref().err().unwrap_or(error);
                    tracing::warn!(%error, "no same-host connections");
                }
                let _ = runner.liveness.set(shown.ok().flatten());
                runner.run();
            })?;
        Ok(engine)
    }

    /// For peers of this host, if they can be served. Waits for a thread that has only just been started, but not for ever: a child of `fork`
    /// has none.
    pub(crate) fn liveness(&self) -> Option<BorrowedFd<'_>> {
        let mut looks = 0;
        while self.liveness.get().is_none() && looks < LIVENESS_LOOKS {
            if looks < LIVENESS_YIELDS {
                weft_sys::thread::sched_yield();
            } else {
                std::thread::sleep(LIVENESS_LOOK);
            }
            looks += 1;
        }
        self.liveness.get()?.as_ref().map(AsFd::as_fd)
    }

    /// Whether there are enough processors to poll before sleeping.
    pub(crate) fn spins(&self) -> bool {
        self.spins
    }

    pub(crate) fn shut_down(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.signal();
    }

    /// A slot for a source that is about to come.
    fn reserve(&self) -> Token {
        let mut slots = lock(&self.slots);
        if slots.over {
            return Token(u64::MAX);
        }
        let index = if let Some(index) = slots.free.pop() {
            index
        } else {
            slots.entries.push((0, None));
            (slots.entries.len() - 1) as u32
        };
        let generation = slots.entries[index as usize].0;
        Token(u64::from(generation) << 32 | u64::from(index))
    }

    /// Put the source into the slot that was reserved for it. Nothing once the engine has ended.
    fn enter(&self, token: Token, source: Arc<dyn Source>) {
        let mut slots = lock(&self.slots);
        if let Some(entry) = slots.entry(token) {
            entry.1 = Some(source);
        }
    }

    /// The first source in the slots from `from` on, and its slot.
    pub(crate) fn source_from(&self, from: usize) -> Option<(usize, Arc<dyn Source>)> {
        let slots = lock(&self.slots);
        let mut rest = slots.entries.iter().enumerate().skip(from);
        rest.find_map(|(index, (_, source))| Some((index, Arc::clone(source.as_ref()?))))
    }

    /// Call the source's `ready` as if its descriptor had become readable.
    fn poke(&self, token: Token) {
        lock(&self.poked).push(token);
        self.wake.signal();
    }

    /// Free a slot; again is fine.
    fn forget(&self, token: Token) {
        let mut slots = lock(&self.slots);
        let Some(entry) = slots.entry(token) else {
            return;
        };
        entry.0 = entry.0.wrapping_add(1) & 0x7fff_ffff;
        let gone = entry.1.take();
        slots.free.push(token.0 as u32);
        // The source may be dropped here, and its drop may end other registrations.
        drop(slots);
        drop(gone);
    }

    fn set_timer(&self, token: Token, at: Instant) {
        let first = {
            let mut timers = lock(&self.timers);
            timers.insert((at, token));
            timers.first() == Some(&(at, token))
        };
        if first {
            self.call();
        }
    }

    /// Makes the engine's thread check for work again. It does so by itself before it sleeps.
    fn call(&self) {
        if ON_ENGINE.get() != self.address() {
            self.wake.signal();
        }
    }

    /// An identifier of this engine.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// A poller drives this queue pair now.
    pub(crate) fn lend(&self, qp: &Arc<impl Driven + 'static>) {
        if qp.enter_leased() {
            let weak = Arc::downgrade(qp);
            lock(&self.leased).push(weak);
        }
        self.keep_ticking();
    }

    /// As [`Engine::lend`], from the engine's own thread.
    fn lend_again(&self, qp: &Arc<dyn Driven>) {
        if qp.enter_leased() {
            lock(&self.leased).push(Arc::downgrade(qp));
        }
        self.keep_ticking();
    }

    /// Work was put off: make sure that leased queue pairs are looked at within a [`TICK`].
    pub(crate) fn hurry(&self) {
        if self.slow.load(Ordering::SeqCst) && self.slow.swap(false, Ordering::SeqCst) {
            self.call();
        }
        self.keep_ticking();
    }

    /// Make sure that leased queue pairs are looked at.
    pub(crate) fn keep_ticking(&self) {
        if !self.ticking.load(Ordering::SeqCst) && !self.ticking.swap(true, Ordering::SeqCst) {
            self.call();
        }
    }

    fn run(self: Arc<Self>) {
        ON_ENGINE.set(self.address());
        let mut events = Vec::with_capacity(64);
        let mut hot = Vec::new();
        let (mut quiet, mut steady) = (0, 0);
        let mut next_tick = Instant::now();
        let mut last_tick = next_tick;
        let mut ticked = false;
        let mut soon = None;
        while !self.stop.load(Ordering::SeqCst) {
            let now = Instant::now();
            let ticks = self.ticking.load(Ordering::SeqCst);
            if ticks && !ticked {
                next_tick = now + TICK;
            }
            ticked = ticks;
            let timer = lock(&self.timers)
                .first()
                .map(|(at, _)| at.saturating_duration_since(now));
            let tick = ticks.then(|| next_tick.saturating_duration_since(now));
            soon = soon.filter(|end| now < *end);
            let timeout = match (timer, tick) {
                _ if soon.is_some() => Some(Duration::ZERO),
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if let Err(error) = self.epoll.wait(&mut events, timeout) {
                tracing::error!(%error, "the engine's epoll failed");
                std::thread::sleep(Duration::from_millis(10));
            }
            if events.iter().any(|event| event.token == WAKE_TOKEN) {
                self.wake.drain();
                let poked = std::mem::take(&mut *lock(&self.poked));
                events.extend(poked.into_iter().map(|token| Event {
                    token: token.0,
                    readable: true,
                    writable: false,
                    hangup: false,
                }));
            }
            // The peer may be waiting for this very processor.
            if soon.is_some() && events.is_empty() && !weft_sys::thread::offer_turn() {
                soon = None;
            }
            for event in &events {
                if event.token == WAKE_TOKEN {
                    continue;
                }
                let source = || lock(&self.slots).get(Token(event.token));
                let ready = |it: Arc<dyn Source>| serve(source, || it.ready(&self, *event));
                match source().and_then(ready) {
                    None | Some(Next::Done) => {}
                    Some(Next::Soon) => soon = self.spins.then(|| Instant::now() + SOON),
                    Some(Next::Hot(qp)) => hot.push((qp, false)),
                    Some(Next::Lent(qp)) => self.lend_again(&qp),
                }
            }
            // Values dropped on the way may belong to the program.
            guarded(|| self.drive_hot(&mut hot));
            guarded(|| self.run_timers());
            if ticked && Instant::now() >= next_tick {
                let only_polled = guarded(|| self.tick(&mut quiet)) == Some(true);
                steady = if only_polled { steady + 1 } else { 0 };
                let slow = steady >= STEADY_TICKS;
                self.slow.store(slow, Ordering::SeqCst);
                last_tick = Instant::now();
                next_tick = last_tick + if slow { SLOW_TICK } else { TICK };
            } else if steady >= STEADY_TICKS && !self.slow.load(Ordering::SeqCst) {
                // A source needs attention soon.
                steady = 0;
                next_tick = last_tick + TICK;
            }
        }
        // Sources hold the engine, so drop them. Their registrations end with them, and take the lock.
        let over = Slots {
            over: true,
            ..Slots::default()
        };
        let gone = std::mem::replace(&mut *lock(&self.slots), over);
        drop(gone);
        lock(&self.leased).clear();
    }

    /// Data comes in bursts: stay with the queue pairs that just moved some, for a bounded time, unless their owner
    /// has come back.
    ///
    /// One that another thread is driving (the flag), perhaps only to post, is looked at again as well: left leased at once, it would
    /// wait for the next tick when that thread is done.
    fn drive_hot(&self, hot: &mut Vec<(Arc<dyn Driven>, bool)>) {
        if hot.is_empty() {
            return;
        }
        let start = Instant::now();
        let mut last_move = start;
        loop {
            let (mut moved, mut busy) = (false, false);
            hot.retain_mut(|(qp, driven)| {
                let drive = || {
                    if matches!(qp.lease_state(), Lease::Polled | Lease::Asleep) {
                        self.lend_again(qp);
                        return None;
                    }
                    Some(Arc::clone(qp).drive_engine())
                };
                let drove = serve(|| Some(Arc::clone(qp)), drive);
                let Some(drove) = drove.flatten() else {
                    return false;
                };
                moved |= drove == Drive::Moved;
                *driven = drove == Drive::Busy;
                busy |= *driven;
                true
            });
            let now = Instant::now();
            if moved {
                last_move = now;
            }
            // Others wait: look at them at least every tick.
            if hot.is_empty() || !self.spins || now - last_move > HOT_SPIN || now - start > TICK {
                break;
            }
            // The thread that drives it may have lost this core to the engine.
            if busy && !weft_sys::thread::offer_turn() {
                break;
            }
            std::hint::spin_loop();
        }
        for (qp, driven) in hot.drain(..) {
            let leave = || {
                let qp = Arc::clone(&qp);
                if driven {
                    qp.leave_driven();
                } else {
                    qp.rearm_and_flush();
                }
            };
            serve(|| Some(Arc::clone(&qp)), leave);
        }
    }

    fn run_timers(self: &Arc<Self>) {
        let now = Instant::now();
        // Those that are due now: one that is set meanwhile, however early, waits until the descriptors had their turn.
        let due: Vec<_> = {
            let timers = lock(&self.timers);
            let due = timers.iter().take_while(|(at, _)| *at <= now);
            due.copied().collect()
        };
        for (at, token) in due {
            if !lock(&self.timers).remove(&(at, token)) {
                continue;
            }
            let source = || lock(&self.slots).get(token);
            if let Some(it) = source() {
                serve(source, || it.expired(self));
            }
        }
    }

    /// Checks leased objects, and takes over those without a driving thread. Returns whether all of them were polled, and nothing was
    /// deferred.
    fn tick(&self, quiet: &mut u32) -> bool {
        let leased = std::mem::take(&mut *lock(&self.leased));
        let mut keep = Vec::with_capacity(leased.len());
        let mut active = false;
        let mut only_polled = !leased.is_empty();
        let ticks = self.ticks.fetch_add(1, Ordering::Relaxed);
        let look = ticks.is_multiple_of(CHECK_TICKS);
        for weak in leased {
            let Some(qp) = weak.upgrade() else { continue };
            let look_at = || {
                let state = qp.lease_state();
                match state {
                    Lease::Polled => {
                        only_polled &= !qp.has_deferred();
                        if look {
                            Arc::clone(&qp).check_peer();
                        }
                    }
                    Lease::Asleep => {}
                    Lease::Idle => Arc::clone(&qp).take_back(),
                }
                state
            };
            let state = serve(|| Some(Arc::clone(&qp)), look_at);
            let polled = matches!(state, Some(Lease::Polled));
            active |= polled;
            only_polled &= polled;
            if polled || matches!(state, Some(Lease::Asleep)) {
                keep.push(weak);
            }
        }
        *quiet = if active { 0 } else { *quiet + 1 };
        let mut leased = lock(&self.leased);
        let news = !leased.is_empty();
        leased.append(&mut keep);
        if leased.is_empty() || (*quiet >= QUIET_TICKS && !news) {
            *quiet = 0;
            self.ticking.store(false, Ordering::SeqCst);
            // A sleeper that woke meanwhile saw the engine ticking, and counts on it.
            if leased
                .iter()
                .filter_map(Weak::upgrade)
                .any(|qp| qp.is_awake())
            {
                self.ticking.store(true, Ordering::SeqCst);
            }
        }
        only_polled
    }
}

thread_local! {
    /// The address of the engine whose thread this is; 0: of none.
    static ON_ENGINE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Whether the calling thread is an engine's thread.
pub(crate) fn on_engine() -> bool {
    ON_ENGINE.get() != 0
}

/// Take this thread for an engine's.
#[cfg(test)]
pub(crate) fn pretend_engine() {
    ON_ENGINE.set(1);
}

/// Run what may call into the program: its panic ends one connection's callback, not the progress of all the others.
pub(crate) fn guarded<T>(run: impl FnOnce() -> T) -> Option<T> {
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    if outcome.is_err() {
        // The log subscriber belongs to the program as well, and may be what panicked.
        let _ = std::panic::catch_unwind(|| {
            tracing::error!("a callback panicked on the engine's thread");
        });
    }
    outcome.ok()
}

/// Do something for a source: its panic, wherever it comes from, ends this source and not the engine's thread.
fn serve<S: Source + ?Sized, T>(
    source: impl FnOnce() -> Option<Arc<S>>,
    run: impl FnOnce() -> T,
) -> Option<T> {
    let out = guarded(run);
    if out.is_none()
        && let Some(source) = source()
    {
        guarded(|| source.panicked());
    }
    out
}

/// The activity of the owner of a leased queue pair since the last check.
pub(crate) enum Lease {
    /// It polled.
    Polled,
    /// It sleeps on the queue pair's socket, and will drive it when it wakes.
    Asleep,
    /// No activity, or the queue pair is not leased.
    Idle,
}

#[cfg(test)]
mod tests {
    use tracing::span;

    use super::*;
    use crate::ext::CqExt;
    use crate::testing::{connected, readable};
    use crate::{Device, LocalMode, QpState, RecvWr, RemoteAddr, SendWr, Wc};

    /// The program's own, which panics when a stream is terminated.
    struct Subscriber;

    impl tracing::Subscriber for Subscriber {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.target().starts_with("weft_rnic::qp")
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            panic!("on the engine's thread");
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    /// Its time is always up.
    struct Restless {
        registration: Registration,
        due: Instant,
        calls: AtomicU32,
    }

    impl Source for Restless {
        fn ready(self: Arc<Self>, _: &Arc<Engine>, _: Event) -> Next {
            Next::Done
        }

        fn expired(self: Arc<Self>, _: &Arc<Engine>) {
            // Without end, the engine would be in here for good, and the test has to end.
            assert!(self.calls.fetch_add(1, Ordering::SeqCst) < 1000);
            self.registration.set_timer(self.due);
        }
    }

    /// A timer set to a time in the past does not starve the others.
    #[test]
    fn a_timer_is_run_once_in_a_turn() {
        let device = Device::builder().local(LocalMode::Off).open().unwrap();
        let engine = Arc::clone(&device.0.engine);
        engine.shut_down();
        // From here on this thread is the engine's.
        while Arc::strong_count(&engine) > 2 {
            std::thread::yield_now();
        }
        *lock(&engine.slots) = Slots::default();
        let source = Arc::new(Restless {
            registration: Registration::new(&engine),
            due: Instant::now(),
            calls: AtomicU32::new(0),
        });
        source.registration.enter(Arc::clone(&source) as _);
        source.registration.set_timer(source.due);
        engine.run_timers();
        assert_eq!(source.calls.load(Ordering::SeqCst), 1);
    }

    /// If any part of a queue pair panics, only that queue pair ends, and the engine continues.
    #[test]
    fn a_panic_ends_one_connection() {
        let device = Device::builder().local(LocalMode::Off).open().unwrap();
        let (first, second, good) = (connected(&device), connected(&device), connected(&device));
        // From here on this thread is the engine's.
        let engine = Arc::clone(&device.0.engine);
        engine.shut_down();
        while !lock(&engine.slots).entries.is_empty() {
            std::thread::yield_now();
        }
        pretend_engine();
        let nowhere = RemoteAddr { addr: 0, rkey: 1 };
        for broken in [&first, &second] {
            let write = SendWr::write(1, nowhere).inline(b"lost");
            broken.near.qp.post_send(&[write]).unwrap();
            readable(&broken.far.qp);
        }
        good.far.qp.post_recv(&[RecvWr::new(7)]).unwrap();
        good.near.qp.post_send(&[SendWr::send(1)]).unwrap();
        readable(&good.far.qp);
        tracing::subscriber::with_default(Subscriber, || {
            // Its owner has polled before that, and polls no more.
            assert!(matches!(first.far.qp.0.lease_state(), Lease::Polled));
            engine.drive_hot(&mut vec![(Arc::clone(&first.far.qp.0) as _, false)]);
            assert_eq!(first.far.qp.state(), QpState::Error);
            for _ in 0..2 {
                engine.tick(&mut 0);
            }
        });
        assert_eq!(second.far.qp.state(), QpState::Error);
        let mut wc = [Wc::default()];
        assert_eq!((good.far.cq.take(&mut wc), wc[0].wr_id), (Ok(1), 7));
        assert_eq!(good.far.qp.state(), QpState::Rts);
    }
}
