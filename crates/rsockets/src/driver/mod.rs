//! One connection: the machine, its memory, and the queue pair under them.
//!
//! Locks, in this order: the sender's or the receiver's turn (one program thread each, for the time of a call), then the core. Data is copied
//! and posted under a turn only, so that both directions move at once and completions are never kept waiting.

mod maps;
mod recv;
mod send;

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
    Access, Cq, Device, EndReason, Mr, Path, Pd, PerProcess, PostReason, Qp, QpInit, RecvWr,
    RemoteAddr, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::machine::{Config, Endpoint};
use crate::options::Options;
use crate::wire::{
    Buffer, ENTRY_LEN, Greeting, Kin, MAP_LEN, MESSAGE_LEN, Message, Order, key_and_len,
};
use send::Sender;

/// Completions taken at once.
const BATCH: usize = 32;
const TAG_RECV: u64 = 1 << 63;
/// Work requests of messages that are no data: there are never so many, because each answers something.
const CONTROL_WRS: u32 = 64;
/// Writes that take less than this many bytes of buffer are not told of one by one.
const QUIET: u32 = 16;

/// Closed by their programs, and not yet by their peers.
fn lingering() -> Arc<Mutex<Vec<Arc<Conn>>>> {
    static LINGERING: PerProcess<Mutex<Vec<Arc<Conn>>>> = PerProcess::new();
    let Ok(lingering) = LINGERING.get(|| Ok::<_, Infallible>(Arc::default()));
    lingering
}

/// How long a close leaves the connection open for a peer that is not one of us, once everything is sent.
const FAREWELL: Duration = Duration::from_millis(500);

/// A run of writes whose completion is told at its end.
#[derive(Clone, Copy, Default)]
struct Mark {
    /// Messages in it.
    messages: u32,
    /// Bytes of the send buffer.
    bytes: usize,
    /// Whether they go out from the program's own memory.
    direct: u32,
}

/// What the lock guards.
struct Core {
    /// There once the peer has greeted.
    machine: Option<Endpoint>,
    /// Writes that are told of, oldest first, and those since the last.
    marks: VecDeque<Mark>,
    open: Mark,
    /// Sum of both.
    flying: Mark,
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
    /// How the queue pair ended.
    end: OnceLock<EndReason>,
    /// The order of bytes in the peer's memory, and whether it takes immediate data; there with the machine.
    peer: OnceLock<(Order, bool)>,
    /// Threads in [`Conn::wait_until`].
    waiting: AtomicU32,
    sender: Mutex<Sender>,
    receiver: Mutex<()>,
    /// Receive buffer, tables, and where messages arrive.
    buffer: Mr,
    table: Mr,
    words: Mr,
    bell: Arc<Bell>,
    me: Weak<Conn>,
}

impl Conn {
    /// Queue pair and memory for a connection; not connected yet.
    pub(crate) fn prepare(
        device: &Device,
        options: Options,
        bell: Arc<Bell>,
    ) -> Result<Arc<Conn>, Errno> {
        let options = options.clamped();
        let make = || -> Result<Arc<Conn>, weft_verbs::Error> {
            let pd = device.alloc_pd()?;
            let sends = 2 * u32::from(options.send_queue) + CONTROL_WRS;
            let recvs = options.receives() as u32;
            let cq = device.create_cq(sends + recvs, None)?;
            let mut init = QpInit::new(&cq, &cq);
            init.max_send_wr = sends;
            init.max_recv_wr = recvs;
            init.max_sge = 2;
            init.max_inline = u32::from(options.inline).max(MAP_LEN as u32);
            let qp = pd.create_qp(&init)?;
            let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let buffer = pd.alloc_mr(options.recv_buffer as usize, remote)?;
            let table = pd.alloc_mr(2 * ENTRY_LEN + MAP_LEN * usize::from(options.maps), remote)?;
            let words = pd.alloc_mr(MESSAGE_LEN * options.receives(), Access::LOCAL_WRITE)?;
            let core = Core {
                machine: None,
                marks: VecDeque::new(),
                open: Mark::default(),
                flying: Mark::default(),
                wcs: vec![Wc::default(); BATCH],
                recvs: Vec::new(),
                over: None,
                error: None,
                read_shut: false,
                send_shut: false,
            };
            Ok(Arc::new_cyclic(|me: &Weak<Conn>| Conn {
                qp,
                cq,
                pd,
                options,
                core: Mutex::new(core),
                pending: AtomicBool::new(false),
                end: OnceLock::new(),
                peer: OnceLock::new(),
                waiting: AtomicU32::new(0),
                sender: Mutex::default(),
                receiver: Mutex::default(),
                buffer,
                table,
                words,
                bell,
                me: me.clone(),
            }))
        };
        let conn = make().map_err(|error| errno(&error))?;
        let recvs: Vec<RecvWr> = (0..options.receives()).map(|i| conn.receive(i)).collect();
        conn.qp.post_recv(&recvs).map_err(|_| Errno::IO)?;
        let me = conn.me.clone();
        conn.cq.set_hook(move || {
            if let Some(conn) = me.upgrade() {
                conn.settle();
            }
        });
        Ok(conn)
    }

    fn receive(&self, place: usize) -> RecvWr {
        RecvWr::new(TAG_RECV | place as u64).sge(self.words.sge(place * MESSAGE_LEN, MESSAGE_LEN))
    }

    /// What we tell the peer at first.
    pub(crate) fn greeting(&self) -> Greeting {
        Greeting {
            order: Order::HOST,
            credits: self.options.recv_queue,
            table: Buffer {
                addr: self.table.addr(),
                key: self.table.rkey(),
                len: 2,
            },
            data: Buffer {
                addr: self.buffer.addr(),
                key: self.buffer.rkey(),
                len: self.options.recv_buffer / 2,
            },
            maps: self.options.maps,
            kin: Some(Kin {
                immediate: self.pd.device().attr().immediate,
            }),
        }
    }

    /// The queue pair, to connect it.
    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Sizes, as they are in effect.
    pub(crate) fn options(&self) -> Options {
        self.options
    }

    /// The peer has greeted: the connection is there.
    ///
    /// # Errors
    /// `EPROTO` when it said nothing that makes sense.
    pub(crate) fn established(&self, private_data: &[u8]) -> Result<(), Errno> {
        let peer = Greeting::parse(private_data).map_err(|error| {
            tracing::debug!(%error, "the peer is no rsocket");
            Errno::PROTO
        })?;
        let config = Config {
            credits: self.options.recv_queue,
            half: self.options.recv_buffer / 2,
            maps: self.options.maps,
        };
        let ours = self.pd.device().attr().immediate;
        let immediate = ours && peer.kin.is_some_and(|kin| kin.immediate);
        let _ = self.peer.set((peer.order, immediate));
        let me = self.me.clone();
        self.qp.on_end(move |reason| {
            let Some(conn) = me.upgrade() else { return };
            let _ = conn.end.set(reason);
            conn.cq.interrupt();
            conn.settle();
            lock(&lingering()).retain(|other| !Arc::ptr_eq(other, &conn));
        });
        self.with(|core| {
            core.machine = Some(Endpoint::new(config, peer));
            self.process(core);
        });
        Ok(())
    }

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
        let ended = self.end.get().copied();
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
        if !core.recvs.is_empty() {
            // Refused only when the connection has ended.
            let _ = self.qp.post_recv(&core.recvs);
            core.recvs.clear();
        }
        if ended.is_some() {
            // What was not done by then never will be, and is not to be waited for: also where the peer had said farewell, so that nothing is broken.
            core.marks.clear();
            core.flying = core.open;
        }
        if let Some(reason) = ended
            && core.over.is_none()
            && !core.machine.as_ref().is_some_and(Endpoint::is_over)
        {
            tracing::debug!(?reason, "the connection ended without a farewell");
            core.over = Some(Errno::CONNRESET);
            core.error.get_or_insert(Errno::CONNRESET);
            changed = true;
        }
        self.grant(core);
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
        if wc.status != WcStatus::Success {
            if wc.status != WcStatus::WrFlushErr {
                tracing::debug!(status = %wc.status, "a work request failed");
            }
            // The end of the queue pair follows.
            return Ok(());
        }
        if wc.wr_id & TAG_RECV == 0 {
            if let Some(mark) = core.marks.pop_front() {
                core.flying.messages -= mark.messages;
                core.flying.bytes -= mark.bytes;
                core.flying.direct -= mark.direct;
            }
            return Ok(());
        }
        let place = (wc.wr_id & !TAG_RECV) as usize;
        let word = if wc.opcode == WcOpcode::RecvWithImm {
            let word = wc.imm.and_then(|imm| u32::try_from(imm).ok());
            word.ok_or(Errno::PROTO)?
        } else {
            if wc.byte_len as usize != MESSAGE_LEN {
                return Err(Errno::PROTO);
            }
            let mut word = [0; MESSAGE_LEN];
            self.words
                .read(place * MESSAGE_LEN, &mut word)
                .map_err(|_| Errno::IO)?;
            u32::from_ne_bytes(word)
        };
        core.recvs.push(self.receive(place));
        let Some(machine) = &mut core.machine else {
            return Ok(());
        };
        machine.heard(word).map(drop).map_err(|violation| {
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

    /// Give the peer what is free.
    fn grant(&self, core: &mut Core) {
        let Some(machine) = core.machine.as_mut().filter(|_| core.over.is_none()) else {
            return;
        };
        let order = machine.order();
        let mut refused = None;
        while let Some(grant) = machine.grant() {
            let word = SendWr::send(0).inline(&order.u32(grant.message.encode()));
            let posted = match grant.entry {
                None => self.qp.post_send_one(word),
                Some(entry) => {
                    let half = Buffer {
                        addr: self.buffer.addr() + u64::from(entry.off),
                        key: self.buffer.rkey(),
                        len: entry.len,
                    };
                    let remote = RemoteAddr {
                        addr: entry.addr,
                        rkey: entry.key,
                    };
                    let write = SendWr::write(0, remote).inline(&order.entry(half));
                    self.qp.post_send(&[write, word])
                }
            };
            if let Err(error) = posted {
                refused = Some(error.reason);
                break;
            }
        }
        // Otherwise the connection is ending, and its end is told.
        if refused == Some(PostReason::Full) {
            tracing::debug!("the peer takes grants faster than it can know of them");
            self.fail(core, Errno::PROTO);
        }
    }

    /// Post a message that is no data.
    fn tell(&self, core: &mut Core, message: Message) {
        let Some(machine) = &core.machine else { return };
        let word = machine.order().u32(message.encode());
        core.open.messages += 1;
        core.flying.messages += 1;
        core.marks.push_back(std::mem::take(&mut core.open));
        if self
            .qp
            .post_send_one(SendWr::send(0).inline(&word).signaled())
            .is_err()
        {
            tracing::debug!(?message, "too late to tell the peer");
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

    /// The same whatever signals come.
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
            self.ready_now(core)
        })
    }

    fn ready_now(&self, core: &mut Core) -> PollFlags {
        self.look_for_room(core);
        let mut ready = PollFlags::empty();
        let Some(machine) = &core.machine else {
            return ready;
        };
        let over = core.over.is_some();
        let end = machine.peer_is_done() || core.read_shut || over;
        ready.set(PollFlags::IN, end || machine.readable() > 0);
        ready.set(PollFlags::RDHUP, end);
        let no_send = over || core.send_shut || machine.is_shut() || machine.peer_is_gone();
        ready.set(PollFlags::OUT, no_send || self.may_send(core));
        // Not before what came has been read: programs take it for the end of everything.
        let hung_up = machine.is_over() && machine.readable() == 0;
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
            let ready = self.ready_now(core) & wanted;
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

    /// Look whether our table has a new half of the peer's buffer.
    fn look_for_room(&self, core: &mut Core) {
        let Some(machine) = &mut core.machine else {
            return;
        };
        let Some(slot) = machine.entry_wanted() else {
            return;
        };
        let at = slot * ENTRY_LEN;
        // The peer may be writing: it writes from the beginning, and says when it is done. Half an entry looks empty, or does not stay as it is.
        let load = || self.table.load_u64(at + 8).unwrap_or(0);
        let word = load();
        let (key, len) = key_and_len(word);
        if len == 0 {
            return;
        }
        let addr = self.table.load_u64(at).unwrap_or(0);
        if load() != word {
            return;
        }
        // Used up: the peer does not touch it before this half is full.
        let _ = self.table.store_u64(at + 8, 0);
        machine.entry(Buffer { addr, key, len });
    }

    // ---- ends ------------------------------------------------------------------------------------------------------

    /// The program reads no more.
    pub(crate) fn shut_read(&self) -> Result<(), Errno> {
        self.with(|core| {
            let Some(machine) = &core.machine else {
                return Err(Errno::NOTCONN);
            };
            let shut = machine.is_shut();
            core.read_shut = true;
            self.wake();
            if shut {
                self.part(core);
            }
            Ok(())
        })
    }

    /// The program sends no more.
    pub(crate) fn shut_write(&self) -> Result<(), Errno> {
        let connected = self.with(|core| {
            core.send_shut = true;
            self.wake();
            core.machine.is_some()
        });
        if !connected {
            return Err(Errno::NOTCONN);
        }
        // A sender that waits gives up now.
        let _turn = lock(&self.sender);
        self.with(|core| {
            if core.read_shut {
                self.part(core);
            } else if let Some(message) = core.machine.as_mut().and_then(Endpoint::shut_down) {
                self.tell(core, message);
            }
        });
        Ok(())
    }

    /// Neither direction is left: say so.
    fn part(&self, core: &mut Core) {
        if let Some(message) = core.machine.as_mut().and_then(Endpoint::leave) {
            self.tell(core, message);
        }
    }

    /// The program is done with it. Waits up to `patience` until everything has been sent; without patience what has not been is lost, and the
    /// peer sees a reset.
    pub(crate) fn close(&self, patience: Duration) {
        if patience.is_zero() {
            self.with(|core| {
                core.read_shut = true;
                core.send_shut = true;
                self.fail(core, Errno::CONNRESET);
                self.wake();
            });
            self.unmap_all();
            return;
        }
        let _ = self.shut_read();
        let _ = self.shut_write();
        let deadline = Instant::now() + patience;
        self.wait_through(Some(deadline), |core| {
            let sent = core.flying.messages == core.open.messages;
            (sent || core.over.is_some() || core.machine.is_none()).then_some(())
        });
        let others = self.with(|core| core.machine.as_ref().is_some_and(|m| !m.is_kin()));
        if others {
            // Given time: see docs/adr/0006.
            let deadline = deadline.min(Instant::now() + FAREWELL);
            self.wait_through(Some(deadline), |core| {
                let gone = core.machine.as_ref().is_none_or(Endpoint::peer_is_gone);
                (gone || core.over.is_some() || self.end.get().is_some()).then_some(())
            });
        }
        // What is left goes on without the program; its own memory is not among it.
        self.unmap_all();
        if let Some(me) = self.me.upgrade() {
            let lingering = lingering();
            lock(&lingering).push(Arc::clone(&me));
            self.qp.disconnect();
            self.cq.release();
            if self.end.get().is_some() || self.with(|core| core.machine.is_none()) {
                lock(&lingering).retain(|other| !Arc::ptr_eq(other, &me));
            }
        }
    }

    /// Tell the peer's host that we are there, which its program does not notice.
    pub(crate) fn keep_alive(&self) {
        let nowhere = RemoteAddr { addr: 0, rkey: 0 };
        // Refused only when the queue is full, or the connection over: either says enough.
        let _ = self.qp.post_send_one(SendWr::write(0, nowhere));
    }
}
