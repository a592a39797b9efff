//! One connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::{lock, try_lock};
use weft_verbs::cm::ConnParam;
use weft_verbs::{Access, EndReason, Path, RecvWr, SendWr, Signal, Wc};
use weft_wire::exs::{HEADER_LEN, Hello, Remote};

use super::ends::Ends;
use super::held::{Files, Held};
use super::link::{Link, MAX_SEND_WR};
use super::op::{End, Op, Slot, Target};
use super::slab::Slab;
use super::state::{Core, INLINE_MAX, Io, Meter, Started, agree, completed, control_receive};
use super::timer::{Alarms, Timers};
use crate::bell::deadline;
use crate::event::{Event, EventKind, Ready};
use crate::late::Late;
use crate::machine::policy::Policy;
use crate::machine::{Config, Endpoint, OpId, RecvFlags as Wishes, Refused, Rules, Stats};
use crate::poller::Watched;
use crate::queue::Member;
use crate::{Context, Error, Kind, Memory, Options, RecvFlags, Region};

/// Completions polled at once.
const BATCH: usize = 32;
/// Bytes of a header slot, and the number of slots.
pub(super) const HEADER_SLOT: usize = 64;
const HEADER_SLOTS: usize = 256;
/// Sends up to this many bytes may be posted at once in one message.
const SHORT_MAX: usize = INLINE_MAX - HEADER_LEN;
/// The id of a send that is complete, or not started.
const DONE: OpId = OpId(u64::MAX);

/// The objects created before a connection is made, on either side.
pub(crate) struct Setup {
    pub(crate) conn: Arc<Conn>,
    /// Our greeting.
    pub(crate) hello: Hello,
}

impl Setup {
    /// What the connection manager needs.
    pub(crate) fn param(&self, options: &Options) -> ConnParam {
        ConnParam {
            private_data: self.hello.emit().to_vec(),
            options: options.link(),
            ..ConnParam::default()
        }
    }
}

/// A connection, or one that is being made.
pub(crate) struct Conn {
    pub(super) context: Context,
    pub(super) link: Link,
    core: Mutex<Core>,
    /// Another thread wanted progress while the lock was taken.
    pending: AtomicBool,
    /// The reason why the queue pair ended.
    end: OnceLock<EndReason>,
    /// In-place buffers that the program has returned.
    pub(super) recycled: Mutex<Vec<u32>>,
    pub(super) has_recycled: AtomicBool,
    /// The socket's descriptor, readable while there is something to receive.
    signal: Arc<Signal>,
    /// The serial number of the queue that the last operation went to.
    joined: AtomicUsize,
    fd: i32,
    /// Calls to be made without a lock, and the lock of the thread that makes them.
    pub(super) late: Mutex<VecDeque<Late>>,
    late_turn: Mutex<()>,
    /// A file send is under way, see `hold`.
    pub(super) holding: AtomicBool,
    pub(super) files: Mutex<Files>,
    pub(super) me: Weak<Conn>,
    /// A reference to itself, while the socket is closed and data is left to send.
    pub(super) lingering: Mutex<Option<Arc<Conn>>>,
}

impl Conn {
    /// Creates the memory of a connection; not connected yet.
    pub(crate) fn prepare(
        context: &Context,
        link: Link,
        kind: Kind,
        options: &Options,
        signal: Arc<Signal>,
        fd: i32,
    ) -> Result<Setup, Error> {
        let domain = Arc::clone(link.domain());
        let (slot, receives) = (options.control_slot(), options.control_receives());
        let len = slot * receives as usize;
        // The system allocates its pages when messages arrive in them.
        let ctrl = Region::of(context.pd().alloc_mr(len, Access::LOCAL_WRITE)?);
        let ctrl_sge = ctrl.sge(&domain, 0, len)?;
        let ring = match kind {
            Kind::Stream if options.mode != crate::Mode::Direct => Some(domain.alloc(
                options.buffer as usize,
                Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            )?),
            _ => None,
        };
        let hello = Hello {
            kind: match kind {
                Kind::Stream => weft_wire::exs::Kind::Stream,
                Kind::SeqPacket => weft_wire::exs::Kind::SeqPacket(options.design),
            },
            mode: options.mode,
            immediate: options.immediate && link.has_immediate(context),
            credits: receives,
            small: options.small_packet_max,
            ring: ring.as_ref().map(|ring| {
                let ((addr, rkey), len) = (ring.place(), ring.memory.len() as u32);
                Remote { addr, rkey, len }
            }),
        };
        let recvs: Vec<RecvWr> = (0..receives)
            .map(|buffer| control_receive(ctrl_sge, slot, buffer))
            .collect();
        link.post_recv(&recvs)
            .map_err(|e| Error::Io(std::io::Error::other(e)))?;
        let io = Io {
            fd,
            immediate: false,
            ops: Slab::default(),
            sending: 0,
            max_pieces: link.max_pieces(),
            ctrl,
            ctrl_sge,
            slot,
            ring,
            headers: None,
            free_headers: Vec::new(),
            used_headers: VecDeque::new(),
            prompt: SendWr::send(0).inline(&[]),
            sends: Vec::new(),
            recvs: Vec::new(),
            late: Vec::new(),
            ends: Default::default(),
            wcs: vec![Wc::default(); BATCH],
            over: None,
            pollers: Vec::new(),
            shutting: Vec::new(),
            shut: false,
            deaf: false,
            unwanted: false,
            closing: false,
            closed: false,
            raised: false,
            announces: false,
            lost: None,
            error: None,
            alarms: Alarms::default(),
            hurry: false,
            woken: false,
        };
        let core = Core {
            machine: None,
            policy: None,
            io,
        };
        let conn = Arc::new_cyclic(|me: &Weak<Conn>| Conn {
            context: context.clone(),
            link,
            core: Mutex::new(core),
            pending: AtomicBool::new(false),
            end: OnceLock::new(),
            recycled: Mutex::default(),
            has_recycled: AtomicBool::new(false),
            signal,
            joined: AtomicUsize::new(0),
            fd,
            late: Mutex::default(),
            late_turn: Mutex::default(),
            holding: AtomicBool::new(false),
            files: Mutex::default(),
            me: me.clone(),
            lingering: Mutex::default(),
        });
        let me = conn.me.clone();
        let settle = move || {
            if let Some(conn) = me.upgrade() {
                conn.settle();
            }
        };
        let watched: Weak<dyn Watched> = conn.me.clone();
        conn.link.drive_by(settle, watched)?;
        Ok(Setup { conn, hello })
    }

    /// The error that a send would be refused with now.
    pub(super) fn refuses_sends(&self) -> Option<Errno> {
        self.with(|core| core.io.no_send())
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn fd(&self) -> i32 {
        self.fd
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The peer's greeting has arrived: the connection is established. The initiator has dialled.
    ///
    /// # Errors
    /// `EPROTO` for an invalid greeting, `EPROTOTYPE` for a socket of another type.
    pub(crate) fn established(
        &self,
        hello: &Hello,
        private_data: &[u8],
        is_initiator: bool,
    ) -> Result<(), Errno> {
        let agreed = agree(hello, private_data)?;
        let me = self.me.clone();
        self.link.on_end(move |reason| {
            if let Some(conn) = me.upgrade() {
                let _ = conn.end.set(reason);
                conn.link.interrupt();
                conn.settle();
            }
        });
        if !is_initiator {
            self.link.wait_for_the_initiator();
        }
        let ring = hello.ring.map_or(0, |ring| ring.len);
        let headers = if agreed.small_send as usize > INLINE_MAX {
            let len = HEADER_SLOT * HEADER_SLOTS;
            let memory = self.link.domain().alloc(len, Access::LOCAL_WRITE);
            Some(memory.map_err(|_| Errno::NOBUFS)?)
        } else {
            None
        };
        self.with(|core| {
            if headers.is_some() {
                core.io.headers = headers;
                core.io.free_headers = (0..HEADER_SLOTS as u32).collect();
            }
            core.io.immediate = agreed.immediate;
            core.io.announces =
                agreed.kind == weft_wire::exs::Kind::SeqPacket(crate::Design::Source);
            let peer_ring = agreed.peer_ring.filter(|_| {
                agreed.mode == crate::Mode::Dynamic && agreed.kind == weft_wire::exs::Kind::Stream
            });
            core.policy = peer_ring.map(|ring| Meter {
                policy: Policy::new(ring.len),
                start: Instant::now(),
                bytes: 0,
                transfers: 0,
                idle: true,
                timer: false,
                clock: None,
            });
            core.machine = Some(Endpoint::new(&Config {
                kind: agreed.kind,
                mode: agreed.mode,
                // More would not fit into the send queue if each were a Write and a Send.
                send_credits: agreed.send_credits.min(MAX_SEND_WR / 2 - 64),
                recv_credits: agreed.recv_credits,
                small_send: agreed.small_send,
                small_recv: agreed.small_recv,
                peer_ring: agreed.peer_ring,
                own_ring_len: ring,
                immediate: agreed.immediate,
                rules: Rules::default(),
            }));
            if let Some(machine) = core.machine.as_mut()
                && is_initiator
                && !agreed.immediate
            {
                core.io.send_message(&machine.greet());
            }
        });
        Ok(())
    }

    // ---- operations of the program ---------------------------------------------------------------------------------

    pub(crate) fn send(
        &self,
        memory: Memory,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        if !self.holding.load(Ordering::SeqCst) {
            return self.send_now(memory, target, token, limit);
        }
        let deadline = deadline(limit);
        match self.hold_back(Held::Send(memory, target, token, deadline)) {
            Ok(()) => Ok(DONE),
            Err(Held::Send(memory, target, ..)) => self.send_now(memory, target, token, limit),
            Err(_) => Err((Errno::INVAL, Target::Nobody)),
        }
    }

    /// Start a send, even during a file send.
    pub(super) fn send_now(
        &self,
        memory: Memory,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        self.join(&target);
        let mut core = lock(&self.core);
        let started = self.send_locked(&mut core, memory, target, token, limit);
        self.leave_core(core);
        started
    }

    #[inline]
    fn send_locked(
        &self,
        core: &mut Core,
        memory: Memory,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        let len = memory.len();
        let kind = EventKind::of_send(&memory);
        if target.is_stopped() {
            return Err((Errno::CANCELED, target));
        }
        if len <= SHORT_MAX
            && kind == EventKind::Send
            && let Some(sent) = self.post_promptly(core, &memory)
        {
            if let Err(errno) = sent {
                return Err((errno, target));
            }
            let event = Event {
                bytes: len,
                memory: Some(memory),
                ..Event::new(kind, token, self.fd, Ok(len))
            };
            // A thread that waits behind a file send may be asleep.
            core.io.woken |= target.is_slot();
            core.io.late.extend(target.tell(event));
            return Ok(DONE);
        }
        let begun = match core.open() {
            Err(errno) => Err((errno, target)),
            Ok((_, io)) if io.no_send().is_some() => {
                Err((io.no_send().unwrap_or(Errno::PIPE), target))
            }
            Ok((machine, io)) => io
                .begin(kind, memory, target, token)
                .and_then(|id| match machine.send(id, len as u64) {
                    Ok(()) => {
                        io.sending += 1;
                        self.set_limit(io, id, limit);
                        Ok(id)
                    }
                    Err(refused) => {
                        let errno = match refused {
                            Refused::Shutdown => Errno::PIPE,
                            Refused::TooLong => Errno::MSGSIZE,
                        };
                        let op = io.ops.remove(id);
                        Err((errno, op.map_or(Target::Nobody, |op| op.target)))
                    }
                }),
        };
        self.process(core);
        begun
    }

    /// Like [`Conn::send`], for a blocking caller; `None` when the normal path is needed.
    pub(crate) fn send_and_done(&self, memory: &Memory) -> Option<Result<(), Errno>> {
        let too_long = memory.len() > SHORT_MAX || matches!(memory, Memory::List(_));
        if too_long || self.holding.load(Ordering::SeqCst) {
            return None;
        }
        let mut core = lock(&self.core);
        let sent = self.post_promptly(&mut core, memory);
        self.leave_core(core);
        sent
    }

    pub(crate) fn recv(
        &self,
        memory: Memory,
        flags: RecvFlags,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        self.join(&target);
        if flags.contains(RecvFlags::DONTWAIT) {
            // Data that has arrived counts, even if its completion has not been polled yet.
            self.drive();
        }
        let mut core = lock(&self.core);
        let started = self.recv_locked(&mut core, memory, flags, (target, token), limit);
        self.leave_core(core);
        started
    }

    #[inline]
    fn recv_locked(
        &self,
        core: &mut Core,
        memory: Memory,
        flags: RecvFlags,
        (target, token): (Target, u64),
        limit: Option<Duration>,
    ) -> Started {
        let (machine, io) = match core.open() {
            Ok(open) => open,
            Err(errno) => return Err((errno, target)),
        };
        if io.deaf && target.is_slot() {
            return Err((Errno::CANCELED, target));
        }
        let nothing = machine.readable() == 0 && !machine.peer_closed() && io.over.is_none();
        if flags.contains(RecvFlags::DONTWAIT) && nothing {
            self.process(core);
            return Err((Errno::AGAIN, target));
        }
        let len = memory.len() as u64;
        let kind = EventKind::of_recv(&memory);
        let id = io.begin(kind, memory, target, token)?;
        let wishes = Wishes {
            // A receive that must not wait takes the data that is there.
            waitall: flags.contains(RecvFlags::WAITALL) && !flags.contains(RecvFlags::DONTWAIT),
            in_place: flags.contains(RecvFlags::IN_PLACE),
        };
        machine.recv(id, len, wishes);
        self.set_limit(io, id, limit);
        // A short receive has no advert, so there is nothing to send unless its data is there.
        if !machine.is_still() {
            self.process(core);
        }
        Ok(id)
    }

    /// Call `call` at that time on the timer's thread, if the connection still exists.
    pub(super) fn call_at(
        &self,
        at: Instant,
        call: impl FnOnce(&Conn) + Send + 'static,
    ) -> Result<(), Errno> {
        let me = self.me.clone();
        Timers::at(at, move || {
            if let Some(conn) = me.upgrade() {
                call(&conn);
            }
        })
    }

    /// Threads that wait at this target's queue drive this connection from now on.
    fn join(&self, target: &Target) {
        if let Target::Queue(queue) = target {
            let number = queue.0.serial;
            if self.joined.load(Ordering::Relaxed) != number
                && self.joined.swap(number, Ordering::SeqCst) != number
                && let Some(me) = self.me.upgrade()
            {
                let me: Arc<dyn Member> = me;
                queue.0.join(&me);
            }
        }
    }

    /// Returns the number of operations cancelled.
    pub(crate) fn cancel(&self, token: Option<u64>) -> usize {
        let files = self.cancel_files(token);
        let wanted = |its: u64| token.is_none_or(|token| token == its);
        files
            + self.with(|core| {
                let wanted_op = |op: &Op| wanted(op.token) && !op.target.is_part();
                let ids = core.io.ops.oldest_first(wanted_op);
                if let Some(machine) = &mut core.machine {
                    for &id in &ids {
                        machine.cancel(id);
                    }
                }
                let mut n = ids.len();
                for (interest, target, its) in std::mem::take(&mut core.io.pollers) {
                    if wanted(its) && !target.is_slot() {
                        n += 1;
                        let result = Err(Errno::CANCELED);
                        core.io
                            .tell(EventKind::Poll, target, its, result, Ready::empty());
                    } else {
                        core.io.pollers.push((interest, target, its));
                    }
                }
                n
            })
    }

    /// Report once when the socket is ready.
    pub(crate) fn poll(&self, wanted: Ready, target: Target, token: u64) {
        self.join(&target);
        self.with(|core| core.io.pollers.push((wanted, target, token)));
    }

    /// Withdraw the poll of a blocking call.
    pub(crate) fn withdraw(&self, slot: &Arc<Slot>) {
        self.with(|core| core.io.pollers.retain(|(_, target, _)| !target.is(slot)));
    }

    pub(crate) fn ready(&self) -> Ready {
        self.drive();
        self.with(|core| core.ready())
    }

    pub(crate) fn available(&self) -> u64 {
        self.drive();
        self.with(|core| core.machine.as_ref().map_or(0, Endpoint::available))
    }

    pub(crate) fn stats(&self) -> Stats {
        self.with(|core| {
            core.machine
                .as_ref()
                .map(|m| *m.stats())
                .unwrap_or_default()
        })
    }

    /// The error for `SO_ERROR`; reading clears it.
    pub(crate) fn take_error(&self) -> Option<Errno> {
        self.with(|core| core.io.error.take())
    }

    pub(crate) fn path(&self) -> Option<Path> {
        self.link.path()
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.link.local_addr()
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        self.link.peer_addr()
    }

    // ---- progress --------------------------------------------------------------------------------------------------

    /// Wait until the slot is filled, driving the connection.
    ///
    /// # Errors
    /// As [`Slot::sleep`].
    pub(crate) fn wait_for(&self, slot: &Slot, deadline: Option<Instant>) -> Result<(), Errno> {
        loop {
            let epoch = self.link.epoch();
            if slot.is_done() {
                return Ok(());
            }
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                // A wait with no time left still polls once.
                self.drive();
                return if slot.is_done() {
                    Ok(())
                } else {
                    Err(Errno::AGAIN)
                };
            }
            // The wait polls before it sleeps if polling has paid off recently; with a completion there, the sleep is short.
            let interrupted = self.link.watch(epoch, true, left);
            self.settle();
            if interrupted && !slot.is_done() {
                return Err(Errno::INTR);
            }
        }
    }

    /// Run `f` under the lock, then make the progress that others requested.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let mut core = lock(&self.core);
        let out = f(&mut core);
        self.process(&mut core);
        self.leave_core(core);
        out
    }

    /// Release the lock, then make the progress that others requested.
    #[inline]
    fn leave_core(&self, core: MutexGuard<'_, Core>) {
        self.release_core(core);
        if self.pending.load(Ordering::SeqCst) {
            self.settle();
        }
    }

    fn release_core(&self, mut core: MutexGuard<'_, Core>) {
        if self.settle_ends(&mut core) {
            self.link.disconnect();
            let me = self.me.clone();
            core.io.late.push(Late::new(move || {
                if let Some(me) = me.upgrade() {
                    me.stop_lingering();
                }
            }));
        }
        // A closed socket is not readable, whatever arrives while it lingers.
        let readable = core.readable() && !core.io.closing;
        if readable != core.io.raised {
            core.io.raised = readable;
            if readable {
                self.signal.raise();
            } else {
                self.signal.clear();
            }
        }
        if std::mem::take(&mut core.io.woken) {
            self.link.interrupt();
        }
        if core.io.late.is_empty() {
            return;
        }
        // In the order in which they arose, whichever thread makes them.
        lock(&self.late).extend(core.io.late.drain(..));
        drop(core);
        while let Some(turn) = try_lock(&self.late_turn) {
            loop {
                let next = lock(&self.late).pop_front();
                let Some(next) = next else { break };
                next.run();
            }
            drop(turn);
            // Another thread may have added calls during this turn.
            if lock(&self.late).is_empty() {
                break;
            }
        }
    }

    fn process(&self, core: &mut Core) {
        if core.machine.is_none() {
            // Messages that arrive before the greeting has been processed wait in the completion queue.
            return;
        }
        if let Some(meter) = &mut core.policy {
            meter.clock = None;
        }
        let mut wcs = std::mem::take(&mut core.io.wcs);
        // Before the completions are taken: those of what came before the end are there by then.
        let end = self.end.get();
        loop {
            let Ok(n) = self.link.take(&mut wcs) else {
                self.fail(core, Errno::IO);
                break;
            };
            for wc in &wcs[..n] {
                if let Err(errno) = completed(core, wc) {
                    self.fail(core, errno);
                }
            }
            self.recycle(core);
            // Posted work requests may complete at once, but only completions give the machine more to do.
            let posted = self.pump(core);
            if n < wcs.len() && !posted {
                break;
            }
        }
        core.io.wcs = wcs;
        if let Some(reason) = end {
            core.io.over.get_or_insert(match reason {
                EndReason::Disconnected => Errno::PIPE,
                _ => Errno::CONNRESET,
            });
        } else if self.link.has_failed() {
            self.fail(core, Errno::CONNRESET);
        }
    }

    /// End the connection with this error.
    pub(super) fn fail(&self, core: &mut Core, errno: Errno) {
        if core.io.over.is_none() {
            core.io.over = Some(errno);
            core.io.error = Some(errno);
            self.link.to_error();
        }
    }

    fn recycle(&self, core: &mut Core) {
        if !self.has_recycled.load(Ordering::Acquire) {
            return;
        }
        let mut recycled = lock(&self.recycled);
        self.has_recycled.store(false, Ordering::Release);
        if let Some(machine) = &mut core.machine {
            for buffer in recycled.drain(..) {
                machine.recycle(buffer);
            }
        }
    }
}

impl Member for Conn {
    fn drive(&self) {
        // No completion, nothing to do: this path does not take the lock.
        if self.link.look() {
            self.settle();
        }
    }

    fn settle(&self) {
        loop {
            let core = try_lock(&self.core).or_else(|| {
                self.pending.store(true, Ordering::SeqCst);
                try_lock(&self.core)
            });
            let Some(mut core) = core else { return };
            if self.pending.load(Ordering::SeqCst) {
                self.pending.store(false, Ordering::SeqCst);
            }
            self.process(&mut core);
            self.release_core(core);
            if !self.pending.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    fn leave(&self) {
        self.link.release();
        self.settle();
    }

    fn epoch(&self) -> u32 {
        self.link.epoch()
    }

    fn can_watch(&self) -> bool {
        self.end.get().is_none() && self.link.is_up()
    }

    fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool {
        self.link.watch(epoch, spin, timeout)
    }

    fn interrupt(&self) {
        self.link.interrupt();
    }
}

impl Watched for Conn {
    fn on_ready(&self) {
        self.link.rearm();
        self.settle();
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let core = self.core.get_mut().unwrap_or_else(PoisonError::into_inner);
        for id in core.io.ops.oldest_first(|_| true) {
            core.io.finish(id, End::new(Err(Errno::CANCELED), 0));
        }
        std::mem::take(&mut core.io.late)
            .into_iter()
            .for_each(Late::run);
        core.io.ends.iter_mut().for_each(Ends::abandon);
    }
}
