//! One connection: the machine, its memory, and the queue pair under them.
//!
//! Locks, in this order: the sender's or the receiver's turn (one program thread each, for the time of a call), then the core. The engine takes the
//! core only.

mod act;
mod end;
mod recv;
mod send;
mod source;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::Bell;
use weft_sockets::error::errno;
use weft_sockets::lock::{lock, try_lock};
use weft_verbs::above::CqAbove;
use weft_verbs::{
    Access, Cq, Device, Doorbell, EndReason, Mr, Path, Pd, PerProcess, Qp, QpInit, RecvWr, Wc,
    WcStatus,
};

use crate::ledger::Ledger;
use crate::machine::policy::{Mode, Policy};
use crate::machine::{Config, Endpoint, Op};
use crate::options::Options;
use crate::wire::{HEADER_LEN, Hello, LONGEST, Message, locks};
use act::Mark;
use recv::Receiver;
use source::Source;

/// Completions taken at once.
const BATCH: usize = 32;
const TAG: u64 = 3 << 62;
const TAG_SEND: u64 = 0;
const TAG_RECV: u64 = 1 << 62;
const TAG_READ: u64 = 2 << 62;
const TAG_LOCK: u64 = 3 << 62;
/// Messages posted and not transmitted, at most.
const MOST_POSTED: u32 = 128;
/// Bytes of a message that are taken when it is posted.
const INLINE: usize = 256;
/// A send begins when the send buffer has room for this many bytes, or all.
const LOW: u32 = 2048;

/// Closed by their programs, with something left to do.
fn lingering() -> Arc<Mutex<Vec<Arc<Conn>>>> {
    static LINGERING: PerProcess<Mutex<Vec<Arc<Conn>>>> = PerProcess::new();
    let Ok(lingering) = LINGERING.get(|| Ok::<_, Infallible>(Arc::default()));
    lingering
}

/// The RDMA Read of the thread that receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetch {
    None,
    Going,
    Done,
    Failed,
}

/// What the lock guards.
struct Core {
    /// There once the peer has greeted.
    machine: Option<Endpoint>,
    policy: Policy,
    ledger: Ledger,
    /// Messages posted, oldest first, in runs that end with a completion, and those since the last.
    marks: VecDeque<Mark>,
    open: Mark,
    /// Messages in both.
    posted: u32,
    /// Place for the next header.
    header: usize,
    sources: Vec<Source>,
    next_op: u64,
    /// A lock that was asked for, and the source's index.
    locking: Option<(Op, u32)>,
    /// Bytes of copies that exist.
    copies: usize,
    read: Fetch,
    urgent: Option<u8>,
    /// Room for completions and receives, kept from one look to the next.
    wcs: Vec<Wc>,
    recvs: Vec<RecvWr>,
    /// The connection broke.
    over: Option<Errno>,
    /// For `SO_ERROR`.
    error: Option<Errno>,
    /// The program reads, or sends, no more.
    read_shut: bool,
    send_shut: bool,
    /// The program has closed it.
    closing: bool,
}

/// A connection, or one to be.
pub(crate) struct Conn {
    qp: Qp,
    cq: Cq,
    pd: Pd,
    options: Options,
    core: Mutex<Core>,
    /// Somebody had something for the core while another had the lock.
    pending: AtomicBool,
    /// A thread waits for memory that is being sent.
    wanted: AtomicBool,
    /// How the queue pair ended.
    end: OnceLock<EndReason>,
    /// There with the machine.
    peer: OnceLock<Hello>,
    /// Threads in [`Conn::wait_until`].
    waiting: AtomicU32,
    sender: Mutex<()>,
    receiver: Mutex<Receiver>,
    /// The send buffer, headers on their way, receives, locks of the peer's sources, and where the answers of atomics arrive.
    ring: Mr,
    headers: Mr,
    inbox: Mr,
    locks: Mr,
    answer: Mr,
    bell: Arc<Bell>,
    doorbell: OnceLock<Doorbell>,
    me: Weak<Conn>,
}

impl Conn {
    /// Queue pair and memory for a connection; not connected yet.
    pub(crate) fn prepare(
        device: &Device,
        options: &Options,
        bell: Arc<Bell>,
    ) -> Result<Arc<Conn>, Errno> {
        let options = options.clamped();
        let slot = HEADER_LEN.max(LONGEST) + options.payload as usize;
        let receives = usize::from(options.receives);
        let make = || -> Result<Arc<Conn>, weft_verbs::Error> {
            let pd = device.alloc_pd()?;
            // A message may be two requests; beside them a Read and an atomic.
            let sends = 2 * MOST_POSTED + 8;
            let cq = device.create_cq(sends + u32::from(options.receives), None)?;
            let mut init = QpInit::new(&cq, &cq);
            init.max_send_wr = sends;
            init.max_recv_wr = u32::from(options.receives);
            init.max_sge = 3;
            init.max_inline = INLINE as u32;
            let qp = pd.create_qp(&init)?;
            let own = Access::LOCAL_WRITE;
            let ring = pd.alloc_mr(options.send_buffer as usize, own)?;
            let headers = pd.alloc_mr(MOST_POSTED as usize * HEADER_LEN, own)?;
            let inbox = pd.alloc_mr(receives * slot, own)?;
            let count = usize::from(options.sources);
            let lock_words = pd.alloc_mr(8 * count, own | Access::REMOTE_ATOMIC)?;
            let answer = pd.alloc_mr(8, own)?;
            for index in 0..count {
                let _ = lock_words.store_u64(8 * index, locks::word(index as u32, locks::FREE));
            }
            let core = Core {
                machine: None,
                policy: Policy::new(options.mode, options.zero_copy, options.fault_limit),
                ledger: Ledger::default(),
                marks: VecDeque::new(),
                open: Mark::default(),
                posted: 0,
                header: 0,
                sources: Vec::new(),
                next_op: 0,
                locking: None,
                copies: 0,
                read: Fetch::None,
                urgent: None,
                wcs: vec![Wc::default(); BATCH],
                recvs: Vec::new(),
                over: None,
                error: None,
                read_shut: false,
                send_shut: false,
                closing: false,
            };
            Ok(Arc::new_cyclic(|me: &Weak<Conn>| Conn {
                qp,
                cq,
                pd,
                options,
                core: Mutex::new(core),
                pending: AtomicBool::new(false),
                wanted: AtomicBool::new(false),
                end: OnceLock::new(),
                peer: OnceLock::new(),
                waiting: AtomicU32::new(0),
                sender: Mutex::default(),
                receiver: Mutex::default(),
                ring,
                headers,
                inbox,
                locks: lock_words,
                answer,
                bell,
                doorbell: OnceLock::new(),
                me: me.clone(),
            }))
        };
        let conn = make().map_err(|error| errno(&error))?;
        let recvs: Vec<RecvWr> = (0..u32::from(options.receives))
            .map(|place| conn.receive(place))
            .collect();
        conn.qp.post_recv(&recvs).map_err(|_| Errno::IO)?;
        let me = conn.me.clone();
        conn.cq.set_hook(move || {
            if let Some(conn) = me.upgrade() {
                conn.settle();
            }
        });
        Ok(conn)
    }

    /// Bytes of a receive.
    fn slot(&self) -> usize {
        LONGEST + self.options.payload as usize
    }

    fn receive(&self, place: u32) -> RecvWr {
        let at = place as usize * self.slot();
        RecvWr::new(TAG_RECV | u64::from(place)).sge(self.inbox.sge(at, self.slot()))
    }

    /// What we tell the peer at first.
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            receives: self.options.receives,
            payload: self.options.payload,
            locks: self.options.sources,
            atomics: self.pd.device().attr().atomics,
            lock_addr: self.locks.addr(),
            lock_key: self.locks.rkey(),
        }
    }

    /// The queue pair, to connect it.
    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Settings, as they are in effect.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The peer has greeted: the connection is there.
    ///
    /// # Errors
    /// `EPROTO` when it said nothing that makes sense.
    pub(crate) fn established(&self, private_data: &[u8]) -> Result<(), Errno> {
        let peer = Hello::parse(private_data).map_err(|error| {
            tracing::debug!(%error, "the peer speaks no SDP");
            Errno::PROTO
        })?;
        let config = Config {
            send_receives: peer.receives,
            recv_receives: self.options.receives,
            send_payload: peer.payload.min(self.options.send_buffer / 2),
            recv_payload: self.options.payload,
            send_buffer: self.options.send_buffer,
            sources: peer.locks.min(self.options.sources),
            peer_sources: self.options.sources,
        };
        let _ = self.peer.set(peer);
        let me = self.me.clone();
        self.qp.on_end(move |reason| {
            let Some(conn) = me.upgrade() else { return };
            let _ = conn.end.set(reason);
            conn.cq.interrupt();
            conn.settle();
            lock(&lingering()).retain(|other| !Arc::ptr_eq(other, &conn));
        });
        self.with(|core| {
            core.machine = Some(Endpoint::new(&config));
            self.process(core);
        });
        Ok(())
    }

    pub(crate) fn path(&self) -> Option<Path> {
        self.qp.path()
    }

    /// Whether it goes through shared memory.
    fn is_local(&self) -> bool {
        self.qp.path().is_some_and(|path| path.transport == "local")
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.qp.local_addr()
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        self.qp.peer_addr()
    }

    pub(crate) fn mode(&self) -> Mode {
        self.with(|core| core.policy.mode())
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        self.with(|core| core.policy.set_mode(mode));
    }

    pub(crate) fn set_inline(&self, inline: bool) {
        self.with(|core| {
            if let Some(machine) = &mut core.machine {
                machine.set_inline(inline);
            }
        });
    }

    pub(crate) fn ledger(&self) -> Ledger {
        self.with(|core| {
            let mut ledger = core.ledger;
            ledger.mode = core.policy.mode();
            ledger.falls = core.policy.falls();
            if let Some(machine) = &core.machine {
                let stats = machine.stats();
                ledger.messages = stats.messages;
                ledger.credit_messages = stats.credit_messages;
                ledger.data_messages = stats.data_messages;
                ledger.coalesced = stats.coalesced;
            }
            ledger
        })
    }

    // ---- progress --------------------------------------------------------------------------------------------------

    /// Do something under the lock, and then what others left meanwhile.
    fn with<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let out = f(&mut lock(&self.core));
        if self.pending.load(Ordering::SeqCst) {
            self.settle();
        }
        out
    }

    /// Do what completions ask for. From any thread, also one that has the lock: then its holder does it.
    fn settle(&self) {
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

    /// Drive the connection once.
    fn drive(&self, core: &mut Core) {
        if self.cq.look() || self.end.get().is_some() {
            self.process(core);
        }
    }

    fn process(&self, core: &mut Core) {
        if core.machine.is_none() {
            // What comes before the greeting has been looked at waits in the completion queue.
            return;
        }
        // Completions of before the end are there when we see the end.
        let ended = self.end.get().is_some();
        let mut changed = false;
        let mut wcs = std::mem::take(&mut core.wcs);
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
        core.wcs = wcs;
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.serve_wanted(core);
        }
        self.act(core);
        if ended {
            Self::ended(core);
            changed = true;
        }
        if changed {
            self.wake();
        }
    }

    /// Something has changed that others may wait for.
    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.cq.interrupt();
        }
        self.bell.ring();
    }

    /// What a completion means. The error is for the whole connection.
    fn completed(&self, core: &mut Core, wc: &Wc) -> Result<(), Errno> {
        let good = wc.status == WcStatus::Success;
        if !good && wc.status != WcStatus::WrFlushErr {
            tracing::debug!(status = %wc.status, "a work request failed");
        }
        match wc.wr_id & TAG {
            TAG_READ if good => core.read = Fetch::Done,
            TAG_READ => core.read = Fetch::Failed,
            TAG_LOCK => self.locked(core, good),
            // The end of the queue pair follows a failure.
            _ if !good => {}
            TAG_SEND => Self::transmitted(core),
            _ => return self.arrived(core, (wc.wr_id & !TAG) as u32, wc.byte_len),
        }
        Ok(())
    }

    /// A message has come.
    fn arrived(&self, core: &mut Core, place: u32, len: u32) -> Result<(), Errno> {
        let at = place as usize * self.slot();
        let mut bytes = [0; LONGEST];
        let head = (len as usize).min(LONGEST);
        self.inbox
            .read(at, &mut bytes[..head])
            .map_err(|_| Errno::IO)?;
        let message = Message::parse(&bytes[..head], len).map_err(|error| {
            tracing::debug!(%error, "what came is no message");
            Errno::PROTO
        })?;
        let Some(machine) = &mut core.machine else {
            return Ok(());
        };
        machine.on_message(place, &message).map_err(|violation| {
            tracing::debug!(%violation, "the peer broke the protocol");
            Errno::PROTO
        })
    }

    /// The connection cannot go on.
    fn fail(&self, core: &mut Core, errno: Errno) {
        if core.over.is_none() {
            core.over = Some(errno);
            core.error = Some(errno);
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
        mut test: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<T, Errno> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let (found, epoch) = self.with(|core| {
                self.process(core);
                // Whatever changes from here on makes another epoch.
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

    /// The same whatever signals come. `None`: the time is up.
    fn wait_through<T>(
        &self,
        deadline: Option<Instant>,
        mut test: impl FnMut(&mut Core) -> Option<T>,
    ) -> Option<T> {
        loop {
            match self.wait_until(deadline, &mut test) {
                Err(Errno::INTR) => {}
                waited => return waited.ok(),
            }
        }
    }

    // ---- readiness -------------------------------------------------------------------------------------------------

    /// What the connection is ready for.
    pub(crate) fn ready(&self) -> PollFlags {
        self.with(|core| {
            self.drive(core);
            Self::ready_now(core)
        })
    }

    fn ready_now(core: &Core) -> PollFlags {
        let mut ready = PollFlags::empty();
        let Some(machine) = &core.machine else {
            return ready;
        };
        let over = core.over.is_some();
        let end = machine.peer_closed() || core.read_shut || over;
        ready.set(PollFlags::IN, end || machine.readable() > 0);
        ready.set(PollFlags::PRI, core.urgent.is_some());
        ready.set(PollFlags::RDHUP, end);
        let no_send = over || core.send_shut;
        ready.set(PollFlags::OUT, no_send || machine.room() >= LOW);
        // Not before what came has been read: programs take it for the end of everything.
        let hung_up = machine.peer_closed() && machine.is_shut() && machine.readable() == 0;
        ready.set(PollFlags::HUP, over || hung_up);
        ready.set(PollFlags::ERR, core.error.is_some());
        ready
    }

    /// Sleep until the connection is ready for something of `wanted`, or the time is up.
    ///
    /// # Errors
    /// `EINTR` when a signal's handler ran.
    pub(crate) fn wait_ready(
        &self,
        wanted: PollFlags,
        deadline: Option<Instant>,
    ) -> Result<PollFlags, Errno> {
        let wanted = wanted | PollFlags::ERR | PollFlags::HUP;
        let waited = self.wait_until(deadline, |core| {
            let ready = Self::ready_now(core) & wanted;
            (!ready.is_empty()).then_some(ready)
        });
        match waited {
            Err(Errno::AGAIN) => Ok(PollFlags::empty()),
            waited => waited,
        }
    }

    /// The program goes to sleep somewhere else: the engine drives.
    pub(crate) fn leave_it(&self) {
        self.cq.release();
    }

    /// The error that `SO_ERROR` tells once.
    pub(crate) fn take_error(&self) -> Option<Errno> {
        self.with(|core| core.error.take())
    }
}
