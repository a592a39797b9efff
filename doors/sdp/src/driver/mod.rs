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
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::Bell;
use weft_sockets::error::errno;
use weft_sockets::stream::{Base, Lingering, State, Stream};
use weft_verbs::{
    Access, Device, Doorbell, EndReason, Mr, Pd, PerProcess, QpInit, RecvWr, Wc, WcStatus,
};

use crate::machine::policy::{Mode, Policy};
use crate::machine::{Config, Endpoint, Op};
use crate::options::Options;
use crate::send_stats::SendStats;
use crate::wire::{HEADER_LEN, Hello, LONGEST, Message, locks};
use act::Mark;
use recv::Receiver;
use source::Source;

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
fn lingering() -> Lingering<Conn> {
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

/// The state under the lock.
pub(crate) struct Core {
    state: State,
    /// There once the peer has greeted.
    machine: Option<Endpoint>,
    policy: Policy,
    send_stats: SendStats,
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
    /// The program has closed it.
    closing: bool,
}

/// A connection, or one to be.
pub(crate) struct Conn {
    base: Base<Core>,
    pd: Pd,
    options: Options,
    /// A thread waits for memory that is being sent.
    wanted: AtomicBool,
    /// There with the machine.
    peer: OnceLock<Hello>,
    sender: Mutex<()>,
    receiver: Mutex<Receiver>,
    /// The send buffer, headers on their way, receives, locks of the peer's sources, and where the answers of atomics arrive.
    ring: Mr,
    headers: Mr,
    inbox: Mr,
    locks: Mr,
    answer: Mr,
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
            // A message may take two requests; a Read and an atomic come on top.
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
                state: State::default(),
                machine: None,
                policy: Policy::new(options.mode, options.zero_copy, options.fault_limit),
                send_stats: SendStats::default(),
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
                closing: false,
            };
            Ok(Arc::new_cyclic(|me: &Weak<Conn>| Conn {
                base: Base::new(qp, cq, core, bell),
                pd,
                options,
                wanted: AtomicBool::new(false),
                peer: OnceLock::new(),
                sender: Mutex::default(),
                receiver: Mutex::default(),
                ring,
                headers,
                inbox,
                locks: lock_words,
                answer,
                doorbell: OnceLock::new(),
                me: me.clone(),
            }))
        };
        let conn = make().map_err(|error| errno(&error))?;
        let recvs: Vec<RecvWr> = (0..u32::from(options.receives))
            .map(|place| conn.receive(place))
            .collect();
        conn.qp.post_recv(&recvs).map_err(|_| Errno::IO)?;
        Conn::set_hook(&conn.me, &conn.cq);
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

    /// Our first message.
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

    /// Settings, as they are in effect.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Handles the peer's first message: the connection is established.
    ///
    /// # Errors
    /// `EPROTO` for an invalid message.
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
        self.hear_end(self.me.clone(), lingering());
        self.with(|core| {
            core.machine = Some(Endpoint::new(&config));
            self.process(core);
        });
        Ok(())
    }

    /// Whether the connection uses shared memory.
    fn is_local(&self) -> bool {
        self.qp.path().is_some_and(|path| path.transport == "local")
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

    pub(crate) fn send_stats(&self) -> SendStats {
        self.with(|core| {
            let mut send_stats = core.send_stats;
            send_stats.mode = core.policy.mode();
            send_stats.falls = core.policy.falls();
            if let Some(machine) = &core.machine {
                let stats = machine.stats();
                send_stats.messages = stats.messages;
                send_stats.credit_messages = stats.credit_messages;
                send_stats.data_messages = stats.data_messages;
                send_stats.coalesced = stats.coalesced;
            }
            send_stats
        })
    }

    // ---- progress --------------------------------------------------------------------------------------------------

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
}

impl AsMut<State> for Core {
    fn as_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Deref for Conn {
    type Target = Base<Core>;

    fn deref(&self) -> &Base<Core> {
        &self.base
    }
}

impl Stream for Conn {
    type Core = Core;

    fn is_established(core: &Core) -> bool {
        core.machine.is_some()
    }

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

    fn go_on(&self, core: &mut Core, ended: Option<EndReason>) -> bool {
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.serve_wanted(core);
        }
        self.act(core);
        if ended.is_some() {
            Self::ended(core);
        }
        ended.is_some()
    }

    fn ready_now(&self, core: &mut Core) -> PollFlags {
        let mut ready = PollFlags::empty();
        let Some(machine) = &core.machine else {
            return ready;
        };
        let over = core.state.over.is_some();
        let end = machine.peer_closed() || core.state.read_shut || over;
        ready.set(PollFlags::IN, end || machine.readable() > 0);
        ready.set(PollFlags::PRI, core.urgent.is_some());
        ready.set(PollFlags::RDHUP, end);
        let no_send = over || core.state.send_shut;
        ready.set(PollFlags::OUT, no_send || machine.room() >= LOW);
        // Not before all received bytes have been read, because programs take `HUP` for the end of everything.
        let hung_up = machine.peer_closed() && machine.is_shut() && machine.readable() == 0;
        ready.set(PollFlags::HUP, over || hung_up);
        ready.set(PollFlags::ERR, core.state.error.is_some());
        ready
    }
}
