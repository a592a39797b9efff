//! One connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;
use weft_verbs::{
    Access, Cq, EndReason, Mr, Path, Qp, QpInit, QpState, RecvWr, RemoteAddr, SendWr, Signal, Wc,
    WcOpcode, WcStatus,
};
use weft_wire::exs::{
    Advert, Agreed, Body, HEADER_LEN, HELLO_LEN, Hello, Imm, MAX_LEN, Message, Packet, Remote,
};

use super::Timers;
use super::hold::{Held, Queue as Files};
use super::op::{Late, Op, Slot, Target};
use super::slab::Slab;
use crate::event::{Event, EventKind, InPlace, Ready};
use crate::lock::{lock, try_lock};
use crate::machine::policy::{Policy, Verdict};
use crate::machine::{
    Action, Completion, Config, Endpoint, OpId, Outcome, RecvFlags as Wishes, Refused, Rules, Stats,
};
use crate::{Context, Error, Kind, Memory, Options, RecvFlags, Region};

/// Messages up to this are copied into their work request; longer ones are gathered from the program's memory.
const INLINE_MAX: usize = 1024;
/// Completions taken at once.
const BATCH: usize = 32;
/// Tags in the numbers of work requests.
const TAG_RECV: u64 = 1 << 63;
const TAG_HEADER: u64 = 1 << 62;
/// Bytes of a place for a header, and how many there are.
const HEADER_SLOT: usize = 64;
const HEADER_SLOTS: usize = 256;
/// Send work requests outstanding.
const MAX_SEND_WR: u32 = 1 << 17;
/// The outcome of starting an operation; a target that will not be told comes back.
pub(crate) type Started = Result<OpId, (Errno, Target)>;

/// Closed by their programs, with something left to send.
static LINGERING: Mutex<Vec<Arc<Conn>>> = Mutex::new(Vec::new());
/// How long they have for it.
const LINGER: Duration = Duration::from_secs(30);

/// What is made before a connection, on either side.
pub(crate) struct Setup {
    pub(crate) conn: Arc<Conn>,
    /// What we tell the peer.
    pub(crate) hello: Hello,
}

/// A connection, or one to be.
pub(crate) struct Conn {
    context: Context,
    qp: Qp,
    cq: Cq,
    core: Mutex<Core>,
    /// Somebody wanted something while another had the lock.
    pending: AtomicBool,
    /// How the queue pair ended.
    end: OnceLock<EndReason>,
    /// In-place buffers that the program has given back.
    recycled: Mutex<Vec<u32>>,
    has_recycled: AtomicBool,
    /// The socket's descriptor: readable while something can be received.
    signal: Arc<Signal>,
    /// The queue that the last operation went to, as a number.
    joined: AtomicUsize,
    fd: i32,
    /// Calls that are owed, and whose turn it is to make them.
    late: Mutex<VecDeque<Late>>,
    late_turn: Mutex<()>,
    /// A file send has the way: see `hold`.
    pub(super) holding: AtomicBool,
    pub(super) files: Mutex<Files>,
    me: Weak<Conn>,
}

struct Core {
    /// There once the peer has said what it brings.
    machine: Option<Endpoint>,
    /// Of a stream that may choose its way.
    policy: Option<Meter>,
    io: Io,
}

/// The policy, and what it has been told.
struct Meter {
    policy: Policy,
    start: Instant,
    bytes: u64,
    transfers: u64,
    idle: bool,
    /// A timer will make us ask again.
    timer: bool,
}

/// The policy hears of so many bytes at once, and is not asked about less.
const METERED: u64 = 32 << 10;
/// Sends up to this never wait for an advert.
const ALWAYS_GO: u64 = 2048;

impl Meter {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// After sending: keep the policy informed.
    fn look(&mut self, stats: &Stats, sending: usize) {
        let bytes = stats.direct_bytes_sent + stats.indirect_bytes_sent;
        if bytes >= self.bytes + METERED || (sending == 0 && bytes > self.bytes) {
            let transfers = stats.direct_sent + stats.indirect_sent;
            let now = self.now();
            self.policy
                .sent(now, bytes - self.bytes, transfers - self.transfers);
            (self.bytes, self.transfers, self.idle) = (bytes, transfers, false);
        }
        if sending == 0 && !self.idle && bytes > 0 {
            self.idle = true;
            let now = self.now();
            self.policy.idle(now);
        }
    }
}

/// All but the machine.
struct Io {
    fd: i32,
    immediate: bool,
    ops: Slab<Op>,
    /// Sends among them.
    sending: usize,
    /// Control receives, `slot` bytes each.
    ctrl: Arc<Region>,
    slot: usize,
    ring: Option<Mr>,
    /// Headers of small messages that are too long to be copied, one a slot.
    headers: Option<Mr>,
    free_headers: Vec<u32>,
    /// Those in use, in the order of their work requests.
    used_headers: VecDeque<u32>,
    /// Batches for the queue pair.
    sends: Vec<SendWr>,
    recvs: Vec<RecvWr>,
    late: Vec<Late>,
    /// Room for completions, kept from one look to the next.
    wcs: Vec<Wc>,
    /// The connection is over, with this number; operations of the program get it.
    over: Option<Errno>,
    pollers: Vec<(Ready, Target, u64)>,
    shutting: Vec<(EventKind, Target, u64)>,
    shut: bool,
    /// The program has closed the socket.
    closing: bool,
    /// The queue pair has been closed.
    closed: bool,
    /// Whether the descriptor is readable.
    raised: bool,
    /// For `SO_ERROR`.
    error: Option<Errno>,
    /// A blocking call has got what it waits for, and may sleep in [`Conn::wait_for`].
    woken: bool,
}

impl Conn {
    /// Queue pair and memory for a connection; not connected yet.
    pub(crate) fn prepare(
        context: &Context,
        kind: Kind,
        options: &Options,
        signal: Arc<Signal>,
        fd: i32,
    ) -> Result<Setup, Error> {
        let (device, pd) = (context.device(), context.pd());
        let cq = device.create_cq(1 << 20, None)?;
        let mut init = QpInit::new(&cq, &cq);
        init.max_send_wr = MAX_SEND_WR;
        init.max_recv_wr = options.credits;
        init.max_sge = 32;
        init.max_inline = (INLINE_MAX + MAX_LEN) as u32;
        let qp = pd.create_qp(&init)?;
        let slot = (options.small_packet_max as usize + HEADER_LEN)
            .max(MAX_LEN)
            .next_multiple_of(64);
        let ctrl = pd.alloc_mr(slot * options.credits as usize, Access::LOCAL_WRITE)?;
        let ring = match kind {
            Kind::Stream if options.mode != crate::Mode::Direct => Some(pd.alloc_mr(
                options.buffer as usize,
                Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            )?),
            _ => None,
        };
        let headers = if options.small_packet_max as usize > INLINE_MAX {
            Some(pd.alloc_mr(HEADER_SLOT * HEADER_SLOTS, Access::LOCAL_WRITE)?)
        } else {
            None
        };
        let hello = Hello {
            kind: match kind {
                Kind::Stream => weft_wire::exs::Kind::Stream,
                Kind::SeqPacket => weft_wire::exs::Kind::SeqPacket(options.design),
            },
            mode: options.mode,
            immediate: options.immediate && device.attr().immediate,
            credits: options.credits,
            small: options.small_packet_max,
            ring: ring.as_ref().map(|ring| Remote {
                addr: ring.addr(),
                rkey: ring.rkey(),
                len: ring.len() as u32,
            }),
        };
        let recvs: Vec<RecvWr> = (0..options.credits as usize)
            .map(|i| RecvWr::new(TAG_RECV | i as u64).sge(ctrl.sge(i * slot, slot)))
            .collect();
        qp.post_recv(&recvs)
            .map_err(|e| Error::Io(std::io::Error::other(e)))?;
        let io = Io {
            fd,
            immediate: false,
            ops: Slab::default(),
            sending: 0,
            ctrl: Arc::new(Region { mr: ctrl }),
            slot,
            ring,
            free_headers: if headers.is_some() {
                (0..HEADER_SLOTS as u32).collect()
            } else {
                Vec::new()
            },
            headers,
            used_headers: VecDeque::new(),
            sends: Vec::new(),
            recvs: Vec::new(),
            late: Vec::new(),
            wcs: vec![Wc::default(); BATCH],
            over: None,
            pollers: Vec::new(),
            shutting: Vec::new(),
            shut: false,
            closing: false,
            closed: false,
            raised: false,
            error: None,
            woken: false,
        };
        let core = Core {
            machine: None,
            policy: None,
            io,
        };
        let conn = Arc::new_cyclic(|me: &Weak<Conn>| Conn {
            context: context.clone(),
            qp,
            cq,
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
        });
        let me = conn.me.clone();
        conn.cq.set_hook(move || {
            if let Some(conn) = me.upgrade() {
                conn.settle();
            }
        });
        Ok(Setup { conn, hello })
    }

    /// Why a send would be refused now.
    pub(super) fn refuses_sends(&self) -> Option<Errno> {
        self.with(|core| core.io.no_send())
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn fd(&self) -> i32 {
        self.fd
    }

    /// The queue pair, to connect it.
    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// The peer has said what it brings: the connection is there.
    ///
    /// # Errors
    /// `EPROTO` when it did not say anything that makes sense, `EPROTOTYPE` for a socket of another type.
    pub(crate) fn established(&self, hello: &Hello, private_data: &[u8]) -> Result<(), Errno> {
        let agreed = agree(hello, private_data)?;
        let me = self.me.clone();
        self.qp.on_end(move |reason| {
            if let Some(conn) = me.upgrade() {
                let _ = conn.end.set(reason);
                conn.cq.interrupt();
                conn.settle();
            }
        });
        let ring = hello.ring.map_or(0, |ring| ring.len);
        self.with(|core| {
            core.io.immediate = agreed.immediate;
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
            });
            core.machine = Some(Endpoint::new(&Config {
                kind: agreed.kind,
                mode: agreed.mode,
                // More would not fit the send queue, if each were a Write and a Send.
                send_credits: agreed.send_credits.min(MAX_SEND_WR / 2 - 64),
                recv_credits: agreed.recv_credits,
                small_send: agreed.small_send,
                small_recv: agreed.small_recv,
                peer_ring: agreed.peer_ring,
                own_ring_len: ring,
                immediate: agreed.immediate,
                rules: Rules::default(),
            }));
        });
        Ok(())
    }

    // ---- operations of the program ---------------------------------------------------------------------------------

    /// Start a send.
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
        match self.hold_back(Held::Send(memory, target, token, limit)) {
            Ok(()) => Ok(OpId(u64::MAX)),
            Err(Held::Send(memory, target, ..)) => self.send_now(memory, target, token, limit),
            Err(_) => Err((Errno::INVAL, Target::Nobody)),
        }
    }

    /// Start a send, whether or not a file send has the way.
    pub(super) fn send_now(
        &self,
        memory: Memory,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        self.join(&target);
        let len = memory.len() as u64;
        let kind = match memory {
            Memory::List(_) => EventKind::SendMsg,
            _ => EventKind::Send,
        };
        self.start(limit, target, move |machine, io, target| {
            if let Some(errno) = io.no_send() {
                return Err((errno, target));
            }
            let id = io.ops.insert(Op::new(kind, memory, target, token));
            io.sending += 1;
            if let Err(refused) = machine.send(id, len) {
                io.sending -= 1;
                let errno = match refused {
                    Refused::Shutdown => Errno::PIPE,
                    Refused::TooLong => Errno::MSGSIZE,
                };
                let op = io.ops.remove(id);
                return Err((errno, op.map_or(Target::Nobody, |op| op.target)));
            }
            Ok(id)
        })
    }

    /// Start a receive.
    pub(crate) fn recv(
        &self,
        memory: Memory,
        flags: RecvFlags,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Started {
        self.join(&target);
        let len = memory.len() as u64;
        let kind = match memory {
            Memory::List(_) => EventKind::RecvMsg,
            _ => EventKind::Recv,
        };
        self.start(limit, target, move |machine, io, target| {
            let nothing = machine.readable() == 0 && !machine.peer_closed() && io.over.is_none();
            if flags.contains(RecvFlags::DONTWAIT) && nothing {
                return Err((Errno::AGAIN, target));
            }
            let id = io.ops.insert(Op::new(kind, memory, target, token));
            let wishes = Wishes {
                waitall: flags.contains(RecvFlags::WAITALL),
                in_place: flags.contains(RecvFlags::IN_PLACE),
            };
            machine.recv(id, len, wishes);
            Ok(id)
        })
    }

    fn start(
        &self,
        limit: Option<Duration>,
        target: Target,
        f: impl FnOnce(&mut Endpoint, &mut Io, Target) -> Result<OpId, (Errno, Target)>,
    ) -> Started {
        let id = self.with(|core| match &mut core.machine {
            Some(machine) if !core.io.closing => f(machine, &mut core.io, target),
            _ => Err((core.io.over.unwrap_or(Errno::NOTCONN), target)),
        })?;
        if let Some(at) = limit.and_then(|limit| Instant::now().checked_add(limit)) {
            let me = self.me.clone();
            let set = Timers::at(at, move || {
                if let Some(conn) = me.upgrade() {
                    conn.expire(id);
                }
            });
            if let Err(error) = set {
                tracing::warn!(%error, "no thread for time limits: this one will not be kept");
            }
        }
        Ok(id)
    }

    /// Whoever waits at this target's queue drives us from now on.
    fn join(&self, target: &Target) {
        if let Target::Queue(queue) = target {
            let number = Arc::as_ptr(&queue.0).addr();
            if self.joined.load(Ordering::Relaxed) != number
                && self.joined.swap(number, Ordering::SeqCst) != number
                && let Some(me) = self.me.upgrade()
            {
                queue.0.join(&me);
            }
        }
    }

    fn expire(&self, id: OpId) {
        self.with(|core| {
            if let Some(op) = core.io.ops.get_mut(id) {
                op.timed_out = true;
                if let Some(machine) = &mut core.machine {
                    machine.cancel(id);
                }
            }
        });
    }

    /// Cancel one operation, if it is not over.
    pub(crate) fn cancel_one(&self, id: OpId) {
        self.with(|core| {
            if let (Some(_), Some(machine)) = (core.io.ops.get_mut(id), &mut core.machine) {
                machine.cancel(id);
            }
        });
    }

    /// Cancel operations; says how many there were.
    pub(crate) fn cancel(&self, token: Option<u64>) -> usize {
        let files = self.cancel_files(token);
        files
            + self.with(|core| {
                let wanted = core.io.ops.ids();
                let ids: Vec<OpId> = wanted
                    .filter(|(_, op)| token.is_none_or(|token| op.token == token))
                    .map(|(id, _)| id)
                    .collect();
                if let Some(machine) = &mut core.machine {
                    for &id in &ids {
                        machine.cancel(id);
                    }
                }
                ids.len()
            })
    }

    /// Tell once when the socket is ready.
    pub(crate) fn poll(&self, wanted: Ready, target: Target, token: u64) {
        self.join(&target);
        self.with(|core| core.io.pollers.push((wanted, target, token)));
    }

    /// A blocking call gives up.
    pub(crate) fn withdraw(&self, slot: &Arc<Slot>) {
        self.with(|core| core.io.pollers.retain(|(_, target, _)| !target.is(slot)));
    }

    /// What the socket is ready for.
    pub(crate) fn ready(&self) -> Ready {
        self.drive();
        self.with(|core| core.ready())
    }

    /// No more data from us, after all that is queued; `told` hears when the peer has been told.
    pub(crate) fn shutdown(&self, told: Option<(Target, u64)>) -> Result<(), (Errno, Target)> {
        match self.hold_back(Held::Shutdown(told)) {
            Err(Held::Shutdown(told)) => self.shutdown_now(told),
            _ => Ok(()),
        }
    }

    pub(super) fn shutdown_now(&self, told: Option<(Target, u64)>) -> Result<(), (Errno, Target)> {
        self.with(|core| match &mut core.machine {
            Some(machine) if core.io.over.is_none() => {
                if !core.io.shut {
                    core.io.shut = true;
                    machine.shutdown();
                }
                let told = told.map(|(target, token)| (EventKind::Shutdown, target, token));
                core.io.shutting.extend(told);
                Ok(())
            }
            _ => Err((Errno::NOTCONN, told.map_or(Target::Nobody, |t| t.0))),
        })
    }

    /// No more of anything: what is queued is sent, then the connection is closed.
    pub(crate) fn close(&self, told: Option<(Target, u64)>) {
        if let Err(Held::Close(told)) = self.hold_back(Held::Close(told)) {
            self.close_now(told);
        }
    }

    pub(super) fn close_now(&self, told: Option<(Target, u64)>) {
        self.with(|core| {
            let recvs: Vec<OpId> = core
                .io
                .ops
                .ids()
                .filter(|(_, op)| !op.is_send())
                .map(|(id, _)| id)
                .collect();
            for id in recvs {
                // The peer is not asked: it sees the end, or an access error if it is writing there.
                core.io.finish(id, Err(Errno::CANCELED), 0, false, None);
            }
            for (_, target, token) in std::mem::take(&mut core.io.pollers) {
                core.io.tell(
                    EventKind::Poll,
                    target,
                    token,
                    Err(Errno::BADF),
                    Ready::empty(),
                );
            }
            core.io.closing = true;
            let told = told.map(|(target, token)| (EventKind::Close, target, token));
            core.io.shutting.extend(told);
            if let Some(machine) = &mut core.machine
                && !core.io.shut
            {
                core.io.shut = true;
                machine.shutdown();
            }
        });
        // Whoever closes does not come back to drive.
        self.leave();
        if let Some(me) = self
            .me
            .upgrade()
            .filter(|_| !self.with(|core| core.io.closed))
        {
            lock(&LINGERING).push(Arc::clone(&me));
            let give_up = Arc::downgrade(&me);
            let set = Timers::at(Instant::now() + LINGER, move || {
                if let Some(conn) = give_up.upgrade() {
                    conn.with(|core| conn.fail(core, Errno::TIMEDOUT));
                }
            });
            if set.is_err() || self.with(|core| core.io.closed) {
                lock(&LINGERING).retain(|conn| !Arc::ptr_eq(conn, &me));
            }
        }
    }

    /// Counters.
    pub(crate) fn stats(&self) -> Stats {
        self.with(|core| {
            core.machine
                .as_ref()
                .map(|m| *m.stats())
                .unwrap_or_default()
        })
    }

    /// The error that `SO_ERROR` tells once.
    pub(crate) fn take_error(&self) -> Option<Errno> {
        self.with(|core| core.io.error.take())
    }

    /// Whether a send would be refused, and with what.
    pub(crate) fn path(&self) -> Option<Path> {
        self.qp.path()
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.qp.local_addr()
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        self.qp.peer_addr()
    }

    // ---- progress --------------------------------------------------------------------------------------------------

    /// Look at the connection, and do what there is to do.
    pub(crate) fn drive(&self) {
        self.turn(true);
    }

    /// Do what the engine has left to do; who drives the queue pair stays as it is.
    pub(crate) fn settle(&self) {
        self.turn(false);
    }

    /// Nobody of us will drive for a while: the engine does.
    pub(crate) fn leave(&self) {
        self.cq.release();
        self.settle();
    }

    /// For waiting, see [`Cq::epoch`].
    pub(crate) fn epoch(&self) -> u32 {
        self.cq.epoch()
    }

    /// Whether the connection can wake who sleeps in [`Conn::watch`].
    pub(crate) fn can_watch(&self) -> bool {
        self.end.get().is_none() && self.qp.state() == QpState::Rts
    }

    /// Sleep until there may be something to do.
    pub(crate) fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) {
        self.cq.watch(epoch, spin, timeout);
    }

    /// Wake whoever sleeps here.
    pub(crate) fn interrupt(&self) {
        self.cq.interrupt();
    }

    /// Wait until the slot is filled, driving the connection. Says whether that was in time.
    pub(crate) fn wait_for(&self, slot: &Slot, deadline: Option<Instant>) -> bool {
        loop {
            let epoch = self.cq.epoch();
            if slot.is_done() {
                return true;
            }
            self.drive();
            if slot.is_done() {
                return true;
            }
            let left = match deadline {
                None => None,
                Some(end) => match end.checked_duration_since(Instant::now()) {
                    Some(left) => Some(left),
                    None => return false,
                },
            };
            self.cq.watch(epoch, true, left);
        }
    }

    fn turn(&self, poll: bool) {
        loop {
            let core = try_lock(&self.core).or_else(|| {
                self.pending.store(true, Ordering::SeqCst);
                try_lock(&self.core)
            });
            let Some(core) = core else { return };
            if self.pending.load(Ordering::SeqCst) {
                self.pending.store(false, Ordering::SeqCst);
            }
            self.hold(core, |core| self.process(core, poll));
            if !self.pending.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// Do something under the lock, and what others left meanwhile.
    fn with<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let out = self.hold(lock(&self.core), |core| {
            let out = f(core);
            self.process(core, false);
            out
        });
        if self.pending.load(Ordering::SeqCst) {
            self.settle();
        }
        out
    }

    fn hold<R>(&self, mut core: MutexGuard<'_, Core>, f: impl FnOnce(&mut Core) -> R) -> R {
        let out = f(&mut core);
        if core.look_around() {
            // In order: what is posted still goes out.
            self.qp.disconnect();
            let me = self.me.clone();
            core.io.late.push(Late::other(move || {
                lock(&LINGERING).retain(|c| !std::ptr::eq(Arc::as_ptr(c), me.as_ptr()));
            }));
        }
        let readable = core.readable();
        if readable != core.io.raised {
            core.io.raised = readable;
            if readable {
                self.signal.raise();
            } else {
                self.signal.clear();
            }
        }
        if std::mem::take(&mut core.io.woken) {
            self.cq.interrupt();
        }
        if core.io.late.is_empty() {
            return out;
        }
        // In the order in which they came about, whoever makes them.
        lock(&self.late).extend(core.io.late.drain(..));
        drop(core);
        while let Some(turn) = try_lock(&self.late_turn) {
            loop {
                let next = lock(&self.late).pop_front();
                let Some(next) = next else { break };
                next.run();
            }
            drop(turn);
            // Somebody may have come while we had the turn.
            if lock(&self.late).is_empty() {
                break;
            }
        }
        out
    }

    fn process(&self, core: &mut Core, poll: bool) {
        if core.machine.is_none() {
            // What comes before the greeting has been looked at waits in the completion queue.
            return;
        }
        let mut wcs = std::mem::take(&mut core.io.wcs);
        let mut poll = poll;
        loop {
            let taken = if poll {
                self.cq.poll(&mut wcs)
            } else {
                self.cq.take(&mut wcs)
            };
            poll = false;
            let Ok(n) = taken else {
                self.fail(core, Errno::IO);
                break;
            };
            for wc in &wcs[..n] {
                if let Err(errno) = completed(core, wc) {
                    self.fail(core, errno);
                }
            }
            self.recycle(core);
            if !self.pump(core) && n == 0 {
                break;
            }
        }
        core.io.wcs = wcs;
        if let Some(reason) = self.end.get() {
            core.io.over.get_or_insert(match reason {
                EndReason::Disconnected => Errno::PIPE,
                _ => Errno::CONNRESET,
            });
        }
    }

    /// The connection cannot go on.
    fn fail(&self, core: &mut Core, errno: Errno) {
        if core.io.over.is_none() {
            core.io.over = Some(errno);
            core.io.error = Some(errno);
            self.qp.to_error();
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

    /// Carry out what the machine wants. Says whether anything was posted.
    fn pump(&self, core: &mut Core) -> bool {
        let mut posted = false;
        while let Some(action) = self.next_action(core) {
            let Some(machine) = &mut core.machine else {
                break;
            };
            if let Err(error) = self.carry_out(machine, &mut core.io, action) {
                tracing::warn!(%error, "an operation cannot be carried out");
                let errno = error.errno();
                self.fail(core, errno);
                return true;
            }
            if core.io.sends.len() >= 64 {
                posted |= self.flush(core);
            }
        }
        posted |= self.flush(core);
        if let (Some(meter), Some(machine)) = (&mut core.policy, &core.machine) {
            meter.look(machine.stats(), core.io.sending);
        }
        posted
    }

    /// What the machine wants next, with the policy's word on how to send.
    fn next_action(&self, core: &mut Core) -> Option<Action> {
        let Core {
            machine, policy, ..
        } = core;
        let machine = machine.as_mut()?;
        let Some(meter) = policy else {
            return machine.poll(true);
        };
        if machine
            .wants_indirect()
            .is_some_and(|left| left <= ALWAYS_GO)
        {
            return machine.poll(true);
        }
        let action = machine.poll(false);
        if action.is_some() || machine.wants_indirect().is_none() {
            return action;
        }
        let now = meter.now();
        match meter
            .policy
            .verdict(now, machine.stats().adverts_received > 0)
        {
            Verdict::Go => machine.poll(true),
            Verdict::Wait(until) => {
                if !meter.timer {
                    meter.timer = true;
                    let me = self.me.clone();
                    let at = meter.start + Duration::from_nanos(until);
                    let set = Timers::at(at, move || {
                        if let Some(conn) = me.upgrade() {
                            conn.with(|core| {
                                if let Some(meter) = &mut core.policy {
                                    meter.timer = false;
                                }
                            });
                        }
                    });
                    if set.is_err() {
                        meter.timer = false;
                        return machine.poll(true);
                    }
                }
                None
            }
        }
    }

    /// Hand the batches to the queue pair. Receives first: the messages say that they are there.
    fn flush(&self, core: &mut Core) -> bool {
        let io = &mut core.io;
        let mut refused = false;
        if !io.recvs.is_empty() {
            refused |= self.qp.post_recv(&io.recvs).is_err();
            io.recvs.clear();
        }
        if io.sends.is_empty() && !refused {
            return false;
        }
        if io.over.is_none() {
            refused |= self.qp.post_send(&io.sends).is_err();
        }
        io.sends.clear();
        if refused {
            // It has ended, and the end is about to be told.
            self.fail(core, Errno::CONNRESET);
        }
        true
    }

    fn carry_out(&self, machine: &mut Endpoint, io: &mut Io, action: Action) -> Result<(), Error> {
        let context = &self.context;
        match action {
            Action::Send(message) => io.send_message(&message),
            Action::Advertise {
                op,
                off,
                len,
                seq,
                phase,
                waitall,
                credits,
            } => {
                let Some(it) = io.ops.get_mut(op) else {
                    return io.only_credits(credits);
                };
                let (addr, rkey) =
                    it.open(context, off as usize, len as usize, Access::REMOTE_WRITE)?;
                let memory = Remote { addr, rkey, len };
                let body = Body::Advert(Advert {
                    seq,
                    phase,
                    waitall,
                    memory,
                });
                io.send_message(&Message { credits, body });
            }
            Action::AdvertisePacket {
                op,
                index,
                len,
                credits,
            } => {
                let Some(it) = io.ops.get_mut(op) else {
                    return io.only_credits(credits);
                };
                let (addr, rkey) = it.open(context, 0, len as usize, Access::REMOTE_WRITE)?;
                let body = Body::PktAdvert(Packet {
                    index,
                    addr,
                    rkey,
                    len,
                });
                io.send_message(&Message { credits, body });
            }
            Action::AdvertiseSource {
                op,
                index,
                len,
                credits,
            } => {
                let Some(it) = io.ops.get_mut(op) else {
                    return io.only_credits(credits);
                };
                let (addr, rkey) = it.open(context, 0, len as usize, Access::REMOTE_READ)?;
                let body = Body::Source(Packet {
                    index,
                    addr,
                    rkey,
                    len,
                });
                io.send_message(&Message { credits, body });
            }
            Action::Write {
                op,
                off,
                len,
                addr,
                rkey,
                imm,
                ..
            } => {
                let remote = RemoteAddr { addr, rkey };
                let mut wr = if io.immediate {
                    SendWr::write_imm(op.0, remote, imm.encode())
                } else {
                    SendWr::write(op.0, remote)
                };
                if let Some(it) = io.ops.get_mut(op) {
                    it.sges(context, off as usize, len as usize, &mut wr.sges)?;
                }
                io.sends.push(wr.signaled());
                if !io.immediate {
                    io.send_message(&imm.message());
                }
            }
            Action::SendSmall {
                op,
                off,
                len,
                header,
                ..
            } => {
                let (off, len) = (off as usize, len as usize);
                let mut head = [0; MAX_LEN];
                let n = header.emit(&mut head);
                let Some(it) = io.ops.get_mut(op) else {
                    return Ok(());
                };
                let slot = if n + len <= INLINE_MAX {
                    None
                } else {
                    io.free_headers.pop()
                };
                if let (Some(slot), Some(headers)) = (slot, &io.headers) {
                    let at = slot as usize * HEADER_SLOT;
                    headers.write(at, &head[..n])?;
                    let mut wr = SendWr::send(TAG_HEADER | op.0).sge(headers.sge(at, n));
                    it.sges(context, off, len, &mut wr.sges)?;
                    io.used_headers.push_back(slot);
                    io.sends.push(wr.signaled());
                    return Ok(());
                }
                let mut data = SmallVec::with_capacity(n + len);
                data.extend_from_slice(&head[..n]);
                data.resize(n + len, 0);
                it.read(off, &mut data[n..])?;
                let mut wr = SendWr::send(0);
                wr.inline = Some(data);
                io.sends.push(wr);
                // Its bytes are copied: there is nothing to wait for.
                machine.on_transferred(op);
            }
            Action::Read {
                op,
                len,
                addr,
                rkey,
            } => {
                let mut wr = SendWr::read(op.0, RemoteAddr { addr, rkey }).signaled();
                if let Some(it) = io.ops.get_mut(op) {
                    it.sges(context, 0, len as usize, &mut wr.sges)?;
                }
                io.sends.push(wr);
            }
            Action::Copy {
                op,
                off,
                ring_off,
                len,
            } => {
                if let (Some(ring), Some(it)) = (&io.ring, io.ops.get_mut(op)) {
                    it.fill(off as usize, ring, ring_off as usize, len as usize)?;
                }
            }
            Action::CopySmall {
                op,
                off,
                buffer,
                buf_off,
                len,
            } => {
                if let Some(it) = io.ops.get_mut(op) {
                    let from = buffer as usize * io.slot + HEADER_LEN + buf_off as usize;
                    it.fill(off as usize, &io.ctrl.mr, from, len as usize)?;
                }
            }
            Action::Repost { buffer } => {
                let sge = io.ctrl.mr.sge(buffer as usize * io.slot, io.slot);
                io.recvs
                    .push(RecvWr::new(TAG_RECV | u64::from(buffer)).sge(sge));
            }
            Action::Complete(Completion {
                op,
                len,
                outcome,
                in_place,
            }) => {
                let bytes = len as usize;
                let timed_out = io.ops.get_mut(op).is_some_and(|op| op.timed_out);
                let result = match outcome {
                    Outcome::Canceled if timed_out => Err(Errno::TIMEDOUT),
                    Outcome::Canceled => Err(Errno::CANCELED),
                    Outcome::Done | Outcome::Truncated | Outcome::Eof => Ok(bytes),
                };
                let place = in_place.map(|at| InPlace {
                    recycle: Some(self.recycler(at.buffer)),
                    memory: Memory::Region {
                        region: Arc::clone(&io.ctrl),
                        off: at.buffer as usize * io.slot + HEADER_LEN + at.off as usize,
                        len: bytes,
                    },
                });
                io.finish(op, result, bytes, outcome == Outcome::Truncated, place);
            }
        }
        Ok(())
    }

    /// Gives an in-place buffer back. It can be called under any lock.
    fn recycler(&self, buffer: u32) -> Box<dyn FnOnce() + Send + Sync> {
        let me = self.me.clone();
        Box::new(move || {
            if let Some(conn) = me.upgrade() {
                let mut recycled = lock(&conn.recycled);
                recycled.push(buffer);
                conn.has_recycled.store(true, Ordering::Release);
                drop(recycled);
                conn.settle();
            }
        })
    }
}

/// What both sides have in common.
pub(crate) fn agree(hello: &Hello, private_data: &[u8]) -> Result<Agreed, Errno> {
    let peer = private_data
        .get(..HELLO_LEN)
        .ok_or(Errno::PROTO)
        .and_then(|bytes| {
            Hello::parse(bytes).map_err(|error| {
                tracing::debug!(%error, "the peer is no EXS socket");
                Errno::PROTO
            })
        })?;
    hello.agree(&peer).map_err(|mismatch| {
        tracing::debug!(%mismatch, "the peer's socket does not fit");
        Errno::PROTOTYPE
    })
}

/// Tell the machine of a completion. The error is for the whole connection.
fn completed(core: &mut Core, wc: &Wc) -> Result<(), Errno> {
    let io = &mut core.io;
    let Some(machine) = &mut core.machine else {
        return Ok(());
    };
    if wc.status != WcStatus::Success {
        if wc.status != WcStatus::WrFlushErr {
            tracing::debug!(status = %wc.status, "a work request failed");
            io.error.get_or_insert(Errno::CONNRESET);
        }
        return Ok(());
    }
    if wc.wr_id & TAG_RECV == 0 {
        if wc.wr_id & TAG_HEADER != 0 {
            io.free_headers.extend(io.used_headers.pop_front());
        }
        machine.on_transferred(OpId(wc.wr_id & !TAG_HEADER));
        return Ok(());
    }
    let buffer = wc.wr_id as u32;
    let heard = if wc.opcode == WcOpcode::RecvWithImm {
        let imm = Imm::decode(wc.imm.unwrap_or_default()).map_err(|_| Errno::PROTO)?;
        machine.on_imm(buffer, imm)
    } else {
        let mut head = [0; MAX_LEN];
        let total = wc.byte_len as usize;
        let head = &mut head[..total.min(MAX_LEN)];
        let at = buffer as usize * io.slot;
        io.ctrl.mr.read(at, head).map_err(|_| Errno::IO)?;
        let message = Message::parse_head(head, total).map_err(|error| {
            tracing::debug!(%error, "a message that is none");
            Errno::PROTO
        })?;
        machine.on_message(buffer, &message)
    };
    heard.map_err(|violation| {
        tracing::debug!(%violation, "the peer broke the protocol");
        Errno::PROTO
    })
}

impl Io {
    fn send_message(&mut self, message: &Message) {
        let mut bytes = [0; MAX_LEN];
        let n = message.emit(&mut bytes);
        self.sends.push(SendWr::send(0).inline(&bytes[..n]));
    }

    /// In place of a message about an operation that is gone: the credits that it would have returned, for the one that it took.
    #[allow(clippy::unnecessary_wraps)] // said where an operation is carried out
    fn only_credits(&mut self, credits: u16) -> Result<(), Error> {
        let body = Body::Credit;
        self.send_message(&Message { credits, body });
        Ok(())
    }

    /// Why nothing can be sent.
    fn no_send(&self) -> Option<Errno> {
        if self.shut {
            Some(Errno::PIPE)
        } else {
            self.over
        }
    }

    fn finish(
        &mut self,
        id: OpId,
        result: Result<usize, Errno>,
        bytes: usize,
        truncated: bool,
        in_place: Option<InPlace>,
    ) {
        if let Some(op) = self.ops.remove(id) {
            self.woken |= op.target.is_slot();
            self.sending -= usize::from(op.is_send());
            self.late
                .extend(op.finish(self.fd, result, bytes, truncated, in_place));
        }
    }

    fn tell(
        &mut self,
        kind: EventKind,
        target: Target,
        token: u64,
        result: Result<usize, Errno>,
        ready: Ready,
    ) {
        self.woken |= target.is_slot();
        self.late.extend(target.tell(Event {
            kind,
            token,
            fd: self.fd,
            result,
            bytes: 0,
            truncated: false,
            memory: None,
            in_place: None,
            accepted: None,
            ready,
        }));
    }
}

impl Core {
    fn readable(&self) -> bool {
        let machine = self.machine.as_ref();
        self.io.over.is_some() || machine.is_some_and(|m| m.readable() > 0 || m.peer_closed())
    }

    fn ready(&self) -> Ready {
        let mut ready = Ready::empty();
        ready.set(Ready::IN, self.readable());
        if let Some(errno) = self.io.over {
            ready |= Ready::OUT | Ready::HUP;
            ready.set(Ready::ERR, errno != Errno::PIPE);
        } else if let Some(machine) = &self.machine {
            ready.set(Ready::OUT, !self.io.shut && self.io.sending == 0);
            ready.set(Ready::HUP, self.io.shut && machine.peer_closed());
        }
        ready
    }

    /// What follows from a new state: ends of operations, of the connection, and readiness. Says whether the queue pair is to be
    /// closed now.
    fn look_around(&mut self) -> bool {
        let io = &mut self.io;
        if let Some(errno) = io.over
            && !io.ops.is_empty()
        {
            // The machine has served what it could from what had come.
            let eof =
                errno == Errno::PIPE && self.machine.as_ref().is_some_and(Endpoint::peer_closed);
            let left: Vec<_> = io
                .ops
                .ids()
                .map(|(id, op)| (id, op.is_send(), op.filled))
                .collect();
            for (id, is_send, bytes) in left {
                let result = match (is_send, errno) {
                    (false, _) if eof => Ok(bytes),
                    (false, Errno::PIPE) => Err(Errno::CONNRESET),
                    (_, errno) => Err(errno),
                };
                io.finish(id, result, bytes, false, None);
            }
        }
        let out = io.over.is_some() || self.machine.as_ref().is_none_or(Endpoint::is_shut);
        // A close also waits for the memory of sends.
        let done = out && (io.sending == 0 || io.over.is_some());
        if out && !io.shutting.is_empty() {
            let failed = io.over.filter(|errno| *errno != Errno::PIPE);
            for (kind, target, token) in std::mem::take(&mut io.shutting) {
                if kind == EventKind::Close && !done {
                    io.shutting.push((kind, target, token));
                    continue;
                }
                let result = match failed {
                    Some(errno) if kind == EventKind::Shutdown => Err(errno),
                    _ => Ok(0),
                };
                io.tell(kind, target, token, result, Ready::empty());
            }
        }
        let close = done && io.closing && !io.closed;
        io.closed |= close;
        if !self.io.pollers.is_empty() {
            let ready = self.ready();
            for (wanted, target, token) in std::mem::take(&mut self.io.pollers) {
                let now = ready & (wanted | Ready::ERR | Ready::HUP);
                if now.is_empty() {
                    self.io.pollers.push((wanted, target, token));
                } else {
                    self.io.tell(EventKind::Poll, target, token, Ok(0), now);
                }
            }
        }
        close
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let core = self.core.get_mut().unwrap_or_else(PoisonError::into_inner);
        let left: Vec<OpId> = core.io.ops.ids().map(|(id, _)| id).collect();
        for id in left {
            core.io.finish(id, Err(Errno::CANCELED), 0, false, None);
        }
        std::mem::take(&mut core.io.late)
            .into_iter()
            .for_each(Late::run);
    }
}
