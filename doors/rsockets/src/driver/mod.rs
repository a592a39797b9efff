//! One connection: the machine, its memory, and the queue pair under them.
//!
//! Locks, in this order: the sender's or the receiver's turn (one program thread each, for the time of a call), then the core. Data is copied
//! and posted under a turn only, so that both directions move at once and completions are never kept waiting.

mod maps;
mod recv;
mod send;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::Bell;
use weft_sockets::error::errno;
use weft_sockets::lock::lock;
use weft_sockets::stream::{Base, Lingering, State, Stream};
use weft_verbs::ext::CqExt;
use weft_verbs::{
    Access, Device, EndReason, Mr, Pd, PerProcess, PostReason, QpInit, RecvWr, RemoteAddr, SendWr,
    Wc, WcOpcode, WcStatus,
};

use crate::machine::{Config, Endpoint};
use crate::options::Options;
use crate::wire::{
    Buffer, ENTRY_LEN, Greeting, MAP_LEN, MESSAGE_LEN, Message, Order, WeftExtensions, key_and_len,
};
use maps::Maps;

const TAG_RECV: u64 = 1 << 63;
/// Work requests of messages that are no data: there are never so many, because each answers something.
const CONTROL_WRS: u32 = 64;
/// Writes that take less than this many bytes of buffer are not announced one by one.
const QUIET: u32 = 16;

/// Closed by their programs, and not yet by their peers.
fn lingering() -> Lingering<Conn> {
    static LINGERING: PerProcess<Mutex<Vec<Arc<Conn>>>> = PerProcess::new();
    let Ok(lingering) = LINGERING.get(|| Ok::<_, Infallible>(Arc::default()));
    lingering
}

/// How long a close keeps the connection open, after everything was sent, for a peer that is not weft.
const FAREWELL: Duration = Duration::from_millis(500);

/// A run of writes with one completion, at its end.
#[derive(Clone, Copy, Default)]
struct Mark {
    messages: u32,
    /// Bytes of the send buffer.
    bytes: usize,
    /// Whether they are sent from the program's own memory.
    direct: u32,
}

/// State of the sending thread only.
#[derive(Default)]
struct Sender {
    /// The send buffer, made when it is first needed.
    buffer: Option<Mr>,
    /// The position of its next bytes.
    at: usize,
    maps: Maps,
}

/// The state under the lock.
pub(crate) struct Core {
    state: State,
    /// There once the peer has greeted.
    machine: Option<Endpoint>,
    /// Announced writes, oldest first, and those since the last one.
    marks: VecDeque<Mark>,
    open: Mark,
    /// Sum of both.
    flying: Mark,
}

/// A connection, or one to be.
pub(crate) struct Conn {
    base: Base<Core>,
    pd: Pd,
    options: Options,
    /// The order of bytes in the peer's memory, and whether it takes immediate data; there with the machine.
    peer: OnceLock<(Order, bool)>,
    sender: Mutex<Sender>,
    receiver: Mutex<()>,
    /// Receive buffer, tables, and where messages arrive.
    buffer: Mr,
    table: Mr,
    words: Mr,
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
                state: State::default(),
                machine: None,
                marks: VecDeque::new(),
                open: Mark::default(),
                flying: Mark::default(),
            };
            Ok(Arc::new_cyclic(|me: &Weak<Conn>| Conn {
                base: Base::new(qp, cq, core, bell),
                pd,
                options,
                peer: OnceLock::new(),
                sender: Mutex::default(),
                receiver: Mutex::default(),
                buffer,
                table,
                words,
                me: me.clone(),
            }))
        };
        let conn = make().map_err(|error| errno(&error))?;
        let recvs: Vec<RecvWr> = (0..options.receives()).map(|i| conn.receive(i)).collect();
        conn.qp.post_recv(&recvs).map_err(|_| Errno::IO)?;
        Conn::set_hook(&conn.me, &conn.cq);
        Ok(conn)
    }

    fn receive(&self, place: usize) -> RecvWr {
        RecvWr::new(TAG_RECV | place as u64).sge(self.words.sge(place * MESSAGE_LEN, MESSAGE_LEN))
    }

    /// Our first message.
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
            kin: Some(WeftExtensions {
                immediate: self.pd.device().attr().immediate,
            }),
        }
    }

    /// Sizes, as they are in effect.
    pub(crate) fn options(&self) -> Options {
        self.options
    }

    /// Handles the peer's first message: the connection is established.
    ///
    /// # Errors
    /// `EPROTO` for an invalid message.
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
        self.hear_end(self.me.clone(), lingering());
        self.with(|core| {
            core.machine = Some(Endpoint::new(config, peer));
            self.process(core);
        });
        Ok(())
    }

    // ---- progress --------------------------------------------------------------------------------------------------

    /// Grants free buffer space to the peer.
    fn grant(&self, core: &mut Core) {
        let Some(machine) = core.machine.as_mut().filter(|_| core.state.over.is_none()) else {
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
        // Otherwise the connection is ending, and its end is reported.
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
            core.state.read_shut = true;
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
            core.state.send_shut = true;
            self.wake();
            core.machine.is_some()
        });
        if !connected {
            return Err(Errno::NOTCONN);
        }
        // A sender that waits gives up now.
        let _turn = lock(&self.sender);
        self.with(|core| {
            if core.state.read_shut {
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

    /// The program closes the socket. Waits up to `patience` until everything has been sent. Without patience unsent bytes are lost, and the
    /// peer sees a reset.
    pub(crate) fn close(&self, patience: Duration) {
        if patience.is_zero() {
            self.with(|core| {
                core.state.read_shut = true;
                core.state.send_shut = true;
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
            (sent || core.state.over.is_some() || core.machine.is_none()).then_some(())
        });
        let others = self.with(|core| core.machine.as_ref().is_some_and(|m| !m.is_kin()));
        if others {
            // Given time: see docs/adr/0006.
            let deadline = deadline.min(Instant::now() + FAREWELL);
            self.wait_through(Some(deadline), |core| {
                let gone = core.machine.as_ref().is_none_or(Endpoint::peer_is_gone);
                (gone || core.state.over.is_some() || self.end.get().is_some()).then_some(())
            });
        }
        // The rest is sent without the program; none of it is in the program's own memory.
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

    /// Shows the peer's host that this socket is alive, without notice to its program.
    pub(crate) fn keep_alive(&self) {
        let nowhere = RemoteAddr { addr: 0, rkey: 0 };
        // Refused only when the queue is full, or the connection over: either says enough.
        let _ = self.qp.post_send_one(SendWr::write(0, nowhere));
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
        core.state.recvs.push(self.receive(place));
        let Some(machine) = &mut core.machine else {
            return Ok(());
        };
        machine.heard(word).map(drop).map_err(|violation| {
            tracing::debug!(%violation, "the peer broke the protocol");
            Errno::PROTO
        })
    }

    fn go_on(&self, core: &mut Core, ended: Option<EndReason>) -> bool {
        if !core.state.recvs.is_empty() {
            // Refused only when the connection has ended.
            let _ = self.qp.post_recv(&core.state.recvs);
            core.state.recvs.clear();
        }
        let mut changed = false;
        if ended.is_some() {
            // Writes that are not done now will not complete. They are dropped also if the peer has closed in order, so that the connection does not
            // count as broken.
            core.marks.clear();
            core.flying = core.open;
        }
        if let Some(reason) = ended
            && core.state.over.is_none()
            && !core.machine.as_ref().is_some_and(Endpoint::is_over)
        {
            tracing::debug!(?reason, "the connection ended without a farewell");
            core.state.over = Some(Errno::CONNRESET);
            core.state.error.get_or_insert(Errno::CONNRESET);
            changed = true;
        }
        self.grant(core);
        changed
    }

    fn ready_now(&self, core: &mut Core) -> PollFlags {
        self.look_for_room(core);
        let mut ready = PollFlags::empty();
        let Some(machine) = &core.machine else {
            return ready;
        };
        let over = core.state.over.is_some();
        let end = machine.peer_is_done() || core.state.read_shut || over;
        ready.set(PollFlags::IN, end || machine.readable() > 0);
        ready.set(PollFlags::RDHUP, end);
        let no_send = over || core.state.send_shut || machine.is_shut() || machine.peer_is_gone();
        ready.set(PollFlags::OUT, no_send || self.may_send(core));
        // Not before all received bytes have been read, because programs take `HUP` for the end of everything.
        let hung_up = machine.is_over() && machine.readable() == 0;
        ready.set(PollFlags::HUP, over || hung_up);
        ready.set(PollFlags::ERR, core.state.error.is_some());
        ready
    }
}
