//! Completion queues and completion channels.
//!
//! A thread that polls or waits on a completion queue drives the connections of the queue's members itself, so no completion has to be
//! handed from one thread to another (see [`crate::engine`]).

mod channel;
mod event_wait;
mod glance;
mod idle;
mod member;
mod poller;

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use weft_lock::ShortLock;
use weft_sys::spin::SpinOrSleep;
use weft_sys::thread::turns_are_lost;
use weft_sys::{EventFd, Interest, poll_fds};

use crate::device::{Counted, Device, DeviceInner};
use crate::engine::guarded;
use crate::errors::CqOverrun;
use crate::ext::CqExt;
use crate::lock::lock;
use crate::types::{AsyncEvent, Error, LimitReached, Wc, WcOpcode};
use channel::ChannelInner;
pub use channel::CompChannel;
pub use event_wait::EventWait;
pub(crate) use glance::Glance;
use idle::EmptyPolls;
pub(crate) use member::{Member, Port};
pub(crate) use poller::Poller;
use poller::{Kept, Only, QUEUES};

/// Up to this many members a poller tries each member's socket itself; past it, trying costs more than asking the
/// engine's epoll, and the engine drives them.
pub(crate) const DIRECT_MEMBERS: usize = 8;

/// Of empty polls in a row, one in so many drives the members in any case.
const LOOK_EVERY: u32 = 16;

/// How long a poll sleeps at most while busy threads share the core: see [`idle`]. Whatever the queue is polled for ends the sleep; the program
/// may poll for other things as well.
const DOZE: Duration = Duration::from_micros(100);

/// The maximum sleep without a descriptor that could end it.
const NAP: Duration = Duration::from_millis(1);

/// Empty polls of a queue with a requested event, after which the polling thread is assumed to continue polling instead of sleeping.
const LAST_LOOKS: u32 = 16;
/// The time within which they come. Who takes longer sleeps between them, and a port's lease would end each time before the next one.
const LAST_LOOKS_TIME: Duration = Duration::from_millis(LAST_LOOKS as u64);

const DISARMED: u8 = 0;
const ARMED_SOLICITED: u8 = 1;
const ARMED_ANY: u8 = 2;

struct Ring {
    entries: VecDeque<Wc>,
    depth: usize,
    overrun: bool,
}

/// The receiver of the notification when an armed queue has a completion.
enum Notify {
    Nobody,
    Channel(Arc<ChannelInner>),
    Hook(Box<dyn Fn() + Send + Sync>),
}

impl Notify {
    fn on(channel: Option<&CompChannel>) -> Notify {
        channel.map_or(Notify::Nobody, |channel| {
            Notify::Channel(Arc::clone(&channel.0))
        })
    }
}

pub(crate) struct CqInner {
    num: u32,
    device: Arc<DeviceInner>,
    ring: ShortLock<Ring>,
    len: AtomicUsize,
    /// Counts the polls that took something.
    pub(crate) taken: AtomicU32,
    armed: AtomicU8,
    /// Empty polls since an event was asked for, up to [`LAST_LOOKS`], and when the first of them was.
    armed_polls: AtomicU32,
    first_look: Mutex<Option<Instant>>,
    waiters: AtomicU32,
    /// `wake` was signalled, and no sleeping thread has consumed that yet: one signal covers all completions added meanwhile.
    kicked: AtomicBool,
    /// Made at the first sleep, before the sleeper is counted: most queues are only polled, or have a channel.
    wake: OnceLock<EventFd>,
    notify: Notify,
    members: RwLock<Vec<Weak<dyn Member>>>,
    /// Names the queue in this process, and counts changes of `members` and `ports`: see [`Only`].
    id: u64,
    changes: AtomicU32,
    /// Ports of datagram queue pairs, with how many of those there are, and whether there are any.
    ports: Mutex<Vec<(Weak<dyn Port>, usize)>>,
    has_ports: AtomicBool,
    /// A member put off sending: the next poll sends.
    pub(crate) deferred: AtomicBool,
    /// Whether spinning before a sleep has succeeded lately.
    spins: SpinOrSleep,
    /// Whether a request for an event leaves the members to this program's threads: see [`EventWait`].
    awaited: AtomicU8,
    empty: EmptyPolls,
    /// Counts the calls of [`Cq::interrupt`].
    epoch: AtomicU32,
    hook: OnceLock<Box<dyn Fn() + Send + Sync>>,
    _count: Counted,
}

/// A completion queue. Clones are handles of the same queue.
#[derive(Clone)]
pub struct Cq(pub(crate) Arc<CqInner>);

fn check_depth(depth: u32, device: &DeviceInner) -> Result<(), Error> {
    if depth == 0 {
        return Err(Error::Invalid(
            "a completion queue needs at least one entry",
        ));
    }
    LimitReached::check(
        "entries of a completion queue",
        "max_cqe",
        depth,
        device.limits.max_cqe,
    )
}

impl Device {
    /// A completion queue with room for `depth` completions.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::Invalid`] for a depth of 0.
    pub fn create_cq(&self, depth: u32, channel: Option<&CompChannel>) -> Result<Cq, Error> {
        self.new_cq(depth, Notify::on(channel))
    }

    /// A completion queue that calls `hook` where one with a channel would announce an event on that. It is called on any thread, with
    /// locks held: it must not block, and not call this library.
    ///
    /// # Errors
    /// As [`Device::create_cq`].
    pub fn create_cq_notify(
        &self,
        depth: u32,
        hook: impl Fn() + Send + Sync + 'static,
    ) -> Result<Cq, Error> {
        self.new_cq(depth, Notify::Hook(Box::new(hook)))
    }

    fn new_cq(&self, depth: u32, notify: Notify) -> Result<Cq, Error> {
        check_depth(depth, &self.0)?;
        let count = Counted::take(
            &self.0.cqs,
            self.0.limits.max_cq,
            "completion queues",
            "max_cq",
        )?;
        Ok(Cq::new(&self.0, self.0.id(), depth, notify, count))
    }

    /// A channel for completion events.
    ///
    /// # Errors
    /// [`Error::Os`] without a free descriptor.
    pub fn create_comp_channel(&self) -> Result<CompChannel, Error> {
        CompChannel::new()
    }
}

impl Cq {
    fn new(device: &Arc<DeviceInner>, num: u32, depth: u32, notify: Notify, count: Counted) -> Cq {
        Cq(Arc::new(CqInner {
            num,
            device: Arc::clone(device),
            ring: ShortLock::new(Ring {
                entries: VecDeque::new(),
                depth: depth as usize,
                overrun: false,
            }),
            len: AtomicUsize::new(0),
            taken: AtomicU32::new(0),
            armed: AtomicU8::new(DISARMED),
            armed_polls: AtomicU32::new(0),
            first_look: Mutex::default(),
            waiters: AtomicU32::new(0),
            kicked: AtomicBool::new(false),
            wake: OnceLock::new(),
            notify,
            members: RwLock::new(Vec::new()),
            id: QUEUES.fetch_add(1, Ordering::Relaxed),
            changes: AtomicU32::new(0),
            ports: Mutex::default(),
            has_ports: AtomicBool::new(false),
            deferred: AtomicBool::new(false),
            spins: SpinOrSleep::default(),
            awaited: AtomicU8::new(0),
            empty: EmptyPolls::new(),
            epoch: AtomicU32::new(0),
            hook: OnceLock::new(),
            _count: count,
        }))
    }

    /// The queue's number, as in [`AsyncEvent::CqErr`](AsyncEvent::CqOverrun).
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Completions that it has room for.
    pub fn depth(&self) -> u32 {
        self.0.ring.lock().depth as u32
    }

    /// Change how many completions it has room for.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0, and when more completions than that are in it; [`Error::Limit`].
    pub fn resize(&self, depth: u32) -> Result<(), Error> {
        check_depth(depth, &self.0.device)?;
        let mut ring = self.0.ring.lock();
        if ring.entries.len() > depth as usize {
            return Err(Error::Invalid(
                "more completions are in the completion queue than it would have room for",
            ));
        }
        ring.depth = depth as usize;
        Ok(())
    }

    /// Take up to `out.len()` completions, oldest first; never blocks. Drives the members' connections when there is
    /// nothing to take, so a loop of polls needs no other thread.
    ///
    /// # Errors
    /// [`CqOverrun`] if the queue overflowed and its remaining completions have been taken.
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        if out.is_empty() {
            return Ok(0);
        }
        let cq = &*self.0;
        let n = cq.pop(out)?;
        if n > 0 {
            cq.flush_deferred();
            cq.empty.end();
            cq.hand_back(&out[..n]);
            return Ok(n);
        }
        if !cq.empty.count().is_multiple_of(LOOK_EVERY) && cq.is_idle() {
            cq.make_way();
            return Ok(0);
        }
        if cq.empty.dozes() {
            // Most likely nothing has come since the last poll: the sleep is over at once if something has.
            cq.flush_deferred();
            cq.doze();
        }
        let n = cq.drive_and_pop(out)?;
        if n == 0 {
            cq.make_way();
        } else {
            cq.empty.end();
            cq.hand_back(&out[..n]);
        }
        Ok(n)
    }

    /// Take up to `out.len()` completions, and block until there is at least one. `Ok(0)` when `timeout` runs out.
    /// It sleeps on the members' own sockets: a message costs no more wake-ups than a blocking `recv`.
    ///
    /// # Errors
    /// [`CqOverrun`] as in [`Cq::poll`].
    pub fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun> {
        let cq = &*self.0;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        if out.is_empty() {
            return Ok(0);
        }
        let n = cq.pop(out)?;
        if n > 0 {
            cq.flush_deferred();
            return Ok(n);
        }
        // Without a spin the sockets are not tried first: if one has something, the sleep is short.
        let mut seen = Ok(0);
        let look = || {
            seen = cq.drive_and_pop(out);
            let found = !matches!(seen, Ok(0));
            if !found {
                cq.empty.add();
            }
            found
        };
        let Err(begun) = cq.spins.spin(look) else {
            return seen;
        };
        loop {
            let left = match deadline {
                None => None,
                Some(end) => match end.checked_duration_since(Instant::now()) {
                    // Even without any time to wait, the sockets were tried once.
                    None => return cq.drive_and_pop(out),
                    left => left,
                },
            };
            cq.sleep(left, &|| false);
            // Notify all waiting threads.
            let n = cq.drive_and_pop(out).inspect_err(|_| cq.kick())?;
            if n > 0 {
                cq.spins.slept(&begun);
                // One wake-up may cover completions for several waiters.
                if cq.len.load(Ordering::SeqCst) > 0 {
                    cq.kick();
                }
                return Ok(n);
            }
        }
    }

    /// Ask for one event on the queue's channel: for the next completion, or, with `solicited_only`, for the next
    /// receive that the peer marked as solicited or the next error. A completion that is already in the queue makes
    /// no event: poll once more after asking (as with every verbs provider).
    pub fn req_notify(&self, solicited_only: bool) {
        let want = if solicited_only {
            ARMED_SOLICITED
        } else {
            ARMED_ANY
        };
        self.0.armed_polls.store(0, Ordering::Relaxed);
        self.0.armed.fetch_max(want, Ordering::SeqCst);
        self.0.look_under_lock();
        let awaited = self.0.awaited.load(Ordering::Relaxed);
        if awaited > 0 {
            // The caller drives while it waits for the event. If it does not come, the engine's tick takes over.
            self.0.awaited.store(awaited - 1, Ordering::Relaxed);
            self.0.for_members(Member::flush_deferred);
            self.0.for_ports(|port| port.flush_deferred());
            self.0.device.engine.hurry();
        } else {
            // The caller is about to sleep on the channel: the engine takes over now, not after its next look around.
            self.release();
        }
    }

    /// Whether two handles refer to the same queue.
    pub fn same(&self, other: &Cq) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl CqExt for Cq {
    fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        self.0.pop(out).inspect(|n| {
            if *n > 0 {
                self.0.empty.end();
            }
        })
    }

    fn make_way(&self) {
        self.0.make_way();
    }

    fn look(&self) -> bool {
        let cq = &*self.0;
        if cq.len.load(Ordering::Acquire) == 0 {
            cq.drive_members(None);
        } else {
            cq.flush_deferred();
        }
        cq.len.load(Ordering::Acquire) > 0
    }

    fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool {
        let cq = &*self.0;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let over = || cq.len.load(Ordering::SeqCst) > 0 || cq.epoch.load(Ordering::SeqCst) != epoch;
        if over() {
            return false;
        }
        let look = || {
            cq.drive_members(None);
            over()
        };
        let begun = spin.then(|| cq.spins.spin(look));
        if let Some(Ok(())) = begun {
            return false;
        }
        loop {
            let left = match deadline {
                None => None,
                Some(end) => match end.checked_duration_since(Instant::now()) {
                    None => {
                        cq.drive_members(None);
                        return false;
                    }
                    left => left,
                },
            };
            let interrupted = cq.sleep(left, &over);
            cq.drive_members(None);
            if over() {
                if let Some(Err(begun)) = &begun {
                    cq.spins.slept(begun);
                }
                // One wake-up may have been for several waiters, and this thread has consumed it.
                cq.kick();
                return false;
            }
            if interrupted {
                return true;
            }
        }
    }

    fn epoch(&self) -> u32 {
        self.0.epoch.load(Ordering::SeqCst)
    }

    fn interrupt(&self) {
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
        self.0.kick();
    }

    fn release(&self) {
        self.0.for_members(|member| {
            Arc::clone(&member).flush_deferred();
            member.release_lease();
        });
        self.0.for_ports(|port| port.release_lease());
    }

    fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.hook.set(Box::new(hook));
    }

    fn forget(&self, qp_num: u32) {
        let mut ring = self.0.ring.lock();
        ring.entries.retain(|wc| wc.qp_num != qp_num);
        self.0.count(&ring);
    }
}

impl CqInner {
    fn note_taken(&self) {
        let taken = self.taken.load(Ordering::Relaxed);
        self.taken.store(taken.wrapping_add(1), Ordering::Relaxed);
    }

    /// These were taken. After the last completion of one-sided requests a program may look for its peer's Writes in its memory, and poll no more: then the
    /// engine receives.
    fn hand_back(&self, taken: &[Wc]) {
        let is_one_sided = |wc: &Wc| {
            use WcOpcode::{CompareSwap, FetchAdd, Read, Swap, Write};
            matches!(wc.opcode, Write | Read | FetchAdd | CompareSwap | Swap)
        };
        if !self.has_ports.load(Ordering::Relaxed)
            || self.len.load(Ordering::Relaxed) > 0
            || !taken.iter().all(is_one_sided)
        {
            return;
        }
        let port = self.with_only(|only| match only {
            Only::Port(port) => port.upgrade(),
            Only::Member(..) => None,
        });
        if let Some(port) = port.flatten() {
            port.hand_back();
        }
    }

    /// A poll found nothing: the thread may sleep for a moment in place of the next one.
    fn make_way(&self) {
        if self.empty.add() && !self.empty.dozes() && self.empty.is_tired(self.is_in_memory()) {
            self.doze();
        }
    }

    /// Publishes the number of completions for threads that check without the lock. A thread that is about to sleep, or to request an
    /// event, must not miss later completions: it takes the lock once after it has announced that ([`CqInner::look_under_lock`]).
    fn count(&self, ring: &Ring) {
        let len = ring.entries.len() + usize::from(ring.overrun);
        self.len.store(len, Ordering::Release);
    }

    /// A thread that adds a completion after this call sees the announcement of this thread (`waiters`, `armed`); completions added before
    /// are visible to this thread. Returns whether there are completions.
    fn look_under_lock(&self) -> bool {
        let ring = self.ring.lock();
        !ring.entries.is_empty() || ring.overrun
    }

    fn pop(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        if self.len.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let mut ring = self.ring.lock();
        let n = out.len().min(ring.entries.len());
        for (slot, wc) in out.iter_mut().zip(ring.entries.drain(..n)) {
            *slot = wc;
        }
        if n == 0 && ring.overrun {
            return Err(CqOverrun);
        }
        self.note_taken();
        self.count(&ring);
        if ring.entries.is_empty() && ring.entries.capacity() > 4096 {
            ring.entries.shrink_to(256);
        }
        Ok(n)
    }

    /// Whether to spin before a sleep. Over sockets a message takes nearly as long as a wake-up, and a thread that spins beside busy ones
    /// uses its time up, while one that sleeps gets the processor as soon as it wakes.
    fn may_spin(&self) -> bool {
        !turns_are_lost() || self.is_in_memory()
    }

    /// Whether its only connection is in shared memory.
    fn is_in_memory(&self) -> bool {
        self.with_only(|only| matches!(only, Only::Member(_, glance) if glance.has_ring()))
            == Some(true)
    }

    /// Drive the members, and take what that has brought.
    fn drive_and_pop(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        let mut poller = Poller {
            cq: self,
            out,
            taken: 0,
        };
        self.drive_members(Some(&mut poller));
        match poller.taken {
            0 => self.pop(out),
            n => Ok(n),
        }
    }

    /// Drive the members for a thread that waits for the queue's event.
    fn drive_awaited(&self) {
        if self.is_armed() {
            if let Some(members) = self.few_members() {
                members.into_iter().for_each(Member::drive_awaited);
            }
            self.for_ports(|port| port.drive_leased());
        }
    }

    /// Send what members have put off.
    fn flush_deferred(&self) {
        if self.deferred.load(Ordering::Relaxed) && self.deferred.swap(false, Ordering::Relaxed) {
            self.for_members(Member::flush_deferred);
            self.for_ports(|port| port.flush_deferred());
        }
    }

    /// Append completions; says whether all found room. `solicited`: one of them is a solicited receive or an error.
    pub(crate) fn push(&self, wcs: &[Wc], solicited: bool) -> bool {
        if wcs.is_empty() {
            return true;
        }
        let fits = {
            let mut ring = self.ring.lock();
            let room = ring.depth.saturating_sub(ring.entries.len());
            let fits = room >= wcs.len() && !ring.overrun;
            if !ring.overrun {
                ring.entries.extend(wcs.iter().take(room));
            }
            if !fits && !ring.overrun {
                ring.overrun = true;
                self.device
                    .raise(AsyncEvent::CqOverrun { cq_num: self.num });
            }
            self.count(&ring);
            fits
        };
        self.kick();
        let armed = self.armed.load(Ordering::SeqCst);
        if (armed == ARMED_ANY || (armed == ARMED_SOLICITED && (solicited || !fits)))
            && self.armed.swap(DISARMED, Ordering::SeqCst) != DISARMED
        {
            match &self.notify {
                Notify::Nobody => {}
                Notify::Channel(channel) => channel.push(self.num),
                Notify::Hook(hook) => drop(guarded(hook)),
            }
        }
        fits
    }

    /// Whether an event was requested.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst) != DISARMED
    }

    /// On the engine's thread: notifies the layer above of completions.
    pub(crate) fn call_hook(&self) {
        if let Some(hook) = self.hook.get()
            && self.len.load(Ordering::SeqCst) > 0
        {
            hook();
        }
    }

    /// Wakes waiting threads, which then check the members again.
    #[inline]
    pub(crate) fn kick(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0
            && let Some(wake) = self.wake.get()
            && !self.kicked.swap(true, Ordering::SeqCst)
        {
            wake.signal();
        }
    }

    /// The descriptor that wakes sleeping threads; `None` without a free descriptor.
    fn wake(&self) -> Option<&EventFd> {
        if self.wake.get().is_none() {
            let made = EventFd::new()
                .inspect_err(|error| tracing::debug!(%error, "a completion queue is looked at again and again in place of a sleep"));
            // Another thread may have been first.
            let _ = self.wake.set(made.ok()?);
        }
        self.wake.get()
    }

    pub(crate) fn attach(&self, member: Weak<dyn Member>) {
        let mut members = self
            .members
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        members.retain(|m| m.strong_count() > 0);
        members.push(member);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn detach(&self, member: &dyn Member) {
        let mut members = self
            .members
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        members.retain(|m| m.strong_count() > 0 && !std::ptr::addr_eq(m.as_ptr(), member));
        self.changes.fetch_add(1, Ordering::Release);
        drop(members);
        self.forget_only();
    }

    /// A datagram queue pair with this port has its completions here.
    pub(crate) fn attach_port(&self, port: Weak<dyn Port>) {
        let mut ports = lock(&self.ports);
        let same =
            |(p, _): &&mut (Weak<dyn Port>, usize)| std::ptr::addr_eq(p.as_ptr(), port.as_ptr());
        if let Some((_, count)) = ports.iter_mut().find(same) {
            *count += 1;
        } else {
            ports.push((port, 1));
        }
        self.has_ports.store(true, Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn detach_port(&self, port: &dyn Port) {
        let mut ports = lock(&self.ports);
        ports.retain_mut(|(p, count)| {
            *count -= usize::from(std::ptr::addr_eq(p.as_ptr(), port));
            *count > 0
        });
        self.has_ports.store(!ports.is_empty(), Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
        drop(ports);
        self.forget_only();
    }

    fn for_ports(&self, f: impl Fn(&dyn Port)) {
        self.ports().iter().for_each(|port| f(&**port));
    }

    fn ports(&self) -> SmallVec<[Arc<dyn Port>; 2]> {
        if !self.has_ports.load(Ordering::Acquire) {
            return SmallVec::new();
        }
        let ports = lock(&self.ports);
        ports.iter().filter_map(|(p, _)| p.upgrade()).collect()
    }

    /// The members, unless they are too many for a poller to drive.
    fn few_members(&self) -> Option<SmallVec<[Arc<dyn Member>; DIRECT_MEMBERS]>> {
        let members = self
            .members
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        (members.len() <= DIRECT_MEMBERS)
            .then(|| members.iter().filter_map(Weak::upgrade).collect())
    }

    fn members(&self) -> SmallVec<[Arc<dyn Member>; DIRECT_MEMBERS]> {
        let members = self
            .members
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        members.iter().filter_map(Weak::upgrade).collect()
    }

    fn for_members(&self, f: impl Fn(Arc<dyn Member>)) {
        let few = {
            let members = self
                .members
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if let [one] = members.as_slice() {
                one.upgrade()
            } else {
                None
            }
        };
        match few {
            Some(member) => f(member),
            None => self.members().into_iter().for_each(f),
        }
    }

    /// A program that has requested an event, and has not polled many times since, is about to sleep. Other programs request it for another thread, as UCX
    /// does, or for events of one kind: then the polling thread keeps the port's lease, and the tick returns it when polling ends.
    fn is_last_look(&self) -> bool {
        let polls = self.armed_polls.load(Ordering::Relaxed);
        if polls == LAST_LOOKS {
            return false;
        }
        let mut next = polls + 1;
        if polls == 0 {
            *lock(&self.first_look) = Some(Instant::now());
        } else if next == LAST_LOOKS {
            let first = *lock(&self.first_look);
            if first.is_none_or(|first| first.elapsed() >= LAST_LOOKS_TIME) {
                next = 0;
            }
        }
        self.armed_polls.store(next, Ordering::Relaxed);
        true
    }

    fn drive_members(&self, mut poller: Option<&mut Poller<'_>>) {
        let put_off = self.deferred.load(Ordering::Relaxed);
        if put_off {
            self.deferred.store(false, Ordering::Relaxed);
        }
        let empty_polls = self.empty.count();
        let armed = self.is_armed() && self.awaited.load(Ordering::Relaxed) == 0;
        let sleeps = armed && self.is_last_look();
        let only = (!sleeps).then(|| self.with_only(Only::keep));
        match only.flatten().flatten() {
            Some(Kept::Member(member)) if !armed => {
                member.drive_polled(empty_polls, poller);
                return;
            }
            Some(Kept::Port(port)) => {
                port.drive_leased();
                return;
            }
            _ => {}
        }
        match self.few_members() {
            None if put_off => self.members().into_iter().for_each(Member::flush_deferred),
            // Many: a poll does not go through all of them, or it would take as long as they are many.
            None => {}
            Some(members) if !armed => {
                for member in members {
                    member.drive_polled(empty_polls, poller.as_deref_mut());
                }
            }
            // The last look before a sleep on the channel: the engine keeps the sockets.
            Some(members) => members.into_iter().for_each(Member::drive_unleased),
        }
        self.for_ports(|port| {
            if sleeps {
                port.drive();
                port.release_lease();
            } else {
                port.drive_leased();
            }
        });
    }

    /// Block until a member's socket, or a completion made by another thread, or the time-out wakes us; or a signal's handler, then it
    /// returns true.
    fn sleep(&self, timeout: Option<Duration>, over: &impl Fn() -> bool) -> bool {
        self.rest(timeout, over, |_| {})
    }

    /// Sleep for a moment between two polls.
    fn doze(&self) {
        self.rest(Some(DOZE), &|| false, |member| member.doze());
    }

    /// As [`CqInner::sleep`]; `fall_asleep` is called last for each member whose socket ends the sleep.
    fn rest(
        &self,
        timeout: Option<Duration>,
        over: &impl Fn() -> bool,
        fall_asleep: fn(&dyn Member),
    ) -> bool {
        let wake = self.wake();
        self.waiters.fetch_add(1, Ordering::SeqCst);
        if self.look_under_lock() || over() {
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        let timeout = match wake {
            Some(_) => timeout,
            None => Some(timeout.map_or(NAP, |timeout| timeout.min(NAP))),
        };
        let woken = self.sleep_on_members(wake, timeout, fall_asleep);
        let last = self.waiters.fetch_sub(1, Ordering::SeqCst) == 1;
        if let Some(wake) = wake.filter(|_| woken == Woken::ByKick) {
            if last {
                wake.drain();
                // A thread that saw it signalled until here has added its completion before this check of the queue.
                self.kicked.swap(false, Ordering::SeqCst);
            } else {
                // Another one was woken with us and may not have run yet: without the signal it would sleep on.
                weft_sys::thread::sched_yield();
            }
        }
        woken == Woken::BySignal
    }

    /// Sleep until a member's socket, `wake` or the time-out ends it.
    fn sleep_on_members(
        &self,
        wake: Option<&EventFd>,
        mut timeout: Option<Duration>,
        fall_asleep: fn(&dyn Member),
    ) -> Woken {
        let (members, ports) = (self.members(), self.ports());
        let mut fds: SmallVec<[(BorrowedFd<'_>, Interest); DIRECT_MEMBERS + 1]> = SmallVec::new();
        fds.extend(wake.map(|wake| (wake.as_fd(), Interest::READ)));
        let mut leased: SmallVec<[&Arc<dyn Member>; DIRECT_MEMBERS]> = SmallVec::new();
        if members.len() <= DIRECT_MEMBERS {
            for member in &members {
                if Arc::clone(member).begin_wait() {
                    leased.push(member);
                    match member.wait_on() {
                        Some((fd, Some(interest))) => {
                            fall_asleep(&**member);
                            fds.push((fd, interest));
                        }
                        _ => timeout = Some(Duration::ZERO),
                    }
                }
            }
        } else {
            let members = members.iter().map(Arc::clone);
            members.for_each(Member::release_lease);
        }
        let (few, rest) = ports.split_at(ports.len().min(DIRECT_MEMBERS));
        for port in rest {
            port.release_lease();
        }
        let watched = few.iter().filter_map(|p| Some((p, p.begin_wait()?)));
        let watched: SmallVec<[_; 2]> = watched.collect();
        fds.extend(watched.iter().map(|(_, watch)| *watch));
        let woken = match poll_fds(&fds, timeout) {
            Ok(ready) if wake.is_some() && ready & 1 != 0 => Woken::ByKick,
            Err(error) if error.kind() == ErrorKind::Interrupted => Woken::BySignal,
            Ok(_) | Err(_) => Woken::Else,
        };
        for member in leased {
            member.end_wait();
        }
        for (port, _) in &watched {
            port.end_wait();
        }
        woken
    }
}

/// The reason why a sleep ended.
#[derive(PartialEq)]
enum Woken {
    ByKick,
    BySignal,
    Else,
}

#[cfg(test)]
mod tests;
