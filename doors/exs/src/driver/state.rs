//! The state of a connection under its lock: the machine, its inputs, and the resources it uses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use weft_verbs::{Access, RecvWr, SendWr, Sge, Wc, WcOpcode, WcStatus};
use weft_wire::exs::{Agreed, Body, HEADER_LEN, HELLO_LEN, Hello, Imm, MAX_LEN, Message, Remote};

use super::ends::Ends;
use super::op::{End, Op, Target};
use super::slab::Slab;
use super::timer::Alarms;
use crate::event::{Event, EventKind, Ready};
use crate::late::Late;
use crate::machine::policy::Policy;
use crate::machine::{Endpoint, OpId, Stats, Violation};
use crate::registered::{Domain, Registered};
use crate::{Error, Memory, Region};

/// Messages up to this many bytes are copied into their work request; longer ones are gathered from the program's memory.
pub(super) const INLINE_MAX: usize = 1024;
/// Elements of a work request.
pub(super) const MAX_SGE: u32 = 32;

/// Tags in the numbers of work requests.
pub(super) const TAG_RECV: u64 = 1 << 63;
pub(super) const TAG_HEADER: u64 = 1 << 62;

/// The result of starting an operation. A target that will get no report is returned.
pub(crate) type Started = Result<OpId, (Errno, Target)>;

pub(super) struct Core {
    /// Set when the peer's greeting has arrived.
    pub(super) machine: Option<Endpoint>,
    /// Set for a stream that may transfer directly or indirectly.
    pub(super) policy: Option<Meter>,
    pub(super) io: Io,
}

/// The policy, and the data reported to it.
pub(super) struct Meter {
    pub(super) policy: Policy,
    pub(super) start: Instant,
    pub(super) bytes: u64,
    pub(super) transfers: u64,
    pub(super) idle: bool,
    /// A timer is set after which the policy is asked again.
    pub(super) timer: bool,
    /// The clock reading and the byte count at that time; valid for one turn under the lock.
    pub(super) clock: Option<(u64, u64)>,
}

/// Sent bytes are reported to the policy in steps of this many bytes.
pub(super) const METERED: u64 = 32 << 10;

/// Sends up to this many bytes never wait for an advert.
pub(super) const ALWAYS_GO: u64 = 2048;

impl Meter {
    /// Reads the clock at most once in a turn, unless much has been sent since: a reading costs as much as a short send.
    pub(super) fn now(&mut self, stats: &Stats) -> u64 {
        let bytes = sent(stats);
        if let Some((now, at)) = self.clock
            && bytes - at < METERED
        {
            return now;
        }
        let now = self.start.elapsed().as_nanos() as u64;
        self.clock = Some((now, bytes));
        now
    }

    /// Report sent bytes and pauses to the policy, after sending.
    pub(super) fn look(&mut self, stats: &Stats, sending: usize) {
        let (bytes, transfers) = (sent(stats), stats.direct_sent + stats.indirect_sent);
        let more = bytes - self.bytes;
        if more > 0 && more <= ALWAYS_GO * (transfers - self.transfers) {
            // The policy does not decide these sends, and they indicate nothing about those that it decides.
            (self.bytes, self.transfers) = (bytes, transfers);
            return;
        }
        if sending > 0 && self.idle && bytes > 0 {
            self.idle = false;
            let now = self.now(stats);
            self.policy.busy(now);
        }
        // Short sends and the pauses between them are reported a few at a time.
        if more >= METERED || (more > 0 && self.policy.waits()) {
            let now = self.now(stats);
            self.policy.sent(now, more, transfers - self.transfers);
            (self.bytes, self.transfers) = (bytes, transfers);
        } else if more > 0 {
            return;
        }
        if sending == 0 && !self.idle && bytes > 0 {
            self.idle = true;
            let now = self.now(stats);
            self.policy.idle(now);
        }
    }
}

fn sent(stats: &Stats) -> u64 {
    stats.direct_bytes_sent + stats.indirect_bytes_sent
}

/// The place of a small message's header, if it is too long to be copied into the work request.
pub(super) enum Head {
    /// In this slot of [`Io::headers`].
    Slot(u32),
    /// In memory of this message alone.
    Own(#[expect(dead_code, reason = "kept until the message has gone")] Registered),
}

/// The state of the connection except the machine and the policy.
pub(super) struct Io {
    pub(super) fd: i32,
    pub(super) immediate: bool,
    pub(super) ops: Slab<Op>,
    /// Number of sends among them.
    pub(super) sending: usize,
    /// The most pieces of a list that a request of the device can name.
    pub(super) max_pieces: usize,
    /// Control receives, `slot` bytes each, and all of them as the device knows them.
    pub(super) ctrl: Arc<Region>,
    pub(super) ctrl_sge: Sge,
    pub(super) slot: usize,
    pub(super) ring: Option<Registered>,
    /// Headers of small messages that are too long to be copied, one in each slot; if the peer admits such messages.
    pub(super) headers: Option<Registered>,
    pub(super) free_headers: Vec<u32>,
    /// The slots in use, in the order of their work requests.
    pub(super) used_headers: VecDeque<Head>,
    /// The work request of a send that is posted at once; its inline bytes are replaced each time.
    pub(super) prompt: SendWr,
    /// Batches of work requests for the queue pair.
    pub(super) sends: Vec<SendWr>,
    pub(super) recvs: Vec<RecvWr>,
    pub(super) late: Vec<Late>,
    /// Completed operations that are not reported, because the memory of the first is in use: receives and sends.
    pub(super) ends: [Ends; 2],
    /// A buffer for completions, reused by each poll.
    pub(super) wcs: Vec<Wc>,
    /// The connection has ended with this error, which the program's operations return.
    pub(super) over: Option<Errno>,
    pub(super) pollers: Vec<(Ready, Target, u64)>,
    pub(super) shutting: Vec<(EventKind, Target, u64)>,
    pub(super) shut: bool,
    /// Blocking receives are refused.
    pub(super) deaf: bool,
    /// The program has closed the socket: it receives no more data.
    pub(super) unwanted: bool,
    /// The socket is closed, and all earlier operations have been started.
    pub(super) closing: bool,
    /// The queue pair has been closed.
    pub(super) closed: bool,
    /// The descriptor is readable.
    pub(super) raised: bool,
    /// Our messages are announced, and the peer reads them ([`weft_wire::exs::Design::Source`]).
    pub(super) announces: bool,
    /// The error that kept data from being sent before a close.
    pub(super) lost: Option<Errno>,
    /// The error for `SO_ERROR`.
    pub(super) error: Option<Errno>,
    /// The times at which timers check for expired operations.
    pub(super) alarms: Alarms,
    /// The batches must be posted now.
    pub(super) hurry: bool,
    /// A blocking call has its result, and may sleep in [`Conn::wait_for`].
    pub(super) woken: bool,
}

/// The parameters that follow from both greetings.
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

/// Pass a completion to the machine. An error ends the whole connection.
pub(super) fn completed(core: &mut Core, wc: &Wc) -> Result<(), Errno> {
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
        if wc.wr_id & TAG_HEADER != 0
            && let Some(Head::Slot(slot)) = io.used_headers.pop_front()
        {
            io.free_headers.push(slot);
        }
        machine.on_transferred(OpId(wc.wr_id & !TAG_HEADER));
        return Ok(());
    }
    let buffer = wc.wr_id as u32;
    let heard = if wc.opcode == WcOpcode::RecvWithImm {
        let imm = Imm::decode(wc.imm.unwrap_or_default()).map_err(|_| Errno::PROTO)?;
        machine.on_imm(buffer, imm)
    } else {
        let total = wc.byte_len as usize;
        let at = buffer as usize * io.slot;
        let first = io.ctrl.mr.load_u64(at).map_err(|_| Errno::IO)?;
        let small = Message::parse_small(first.to_ne_bytes(), total);
        if let Some(message) = small
            && let Some(op) = machine.take_now(&message).map_err(broken)?
        {
            return io.take(op, buffer, total - HEADER_LEN);
        }
        let mut head = [0; MAX_LEN];
        let head = &mut head[..total.min(MAX_LEN)];
        io.ctrl.mr.read(at, head).map_err(|_| Errno::IO)?;
        let message = Message::parse_head(head, total).map_err(|error| {
            tracing::debug!(%error, "a message that is none");
            Errno::PROTO
        })?;
        machine.on_message(buffer, &message)
    };
    heard.map_err(broken)
}

/// The receive for this control buffer, of all those in `whole`.
pub(super) fn control_receive(whole: Sge, slot: usize, buffer: u32) -> RecvWr {
    RecvWr::new(TAG_RECV | u64::from(buffer)).sge(Sge {
        addr: whole.addr + u64::from(buffer) * slot as u64,
        len: slot as u32,
        lkey: whole.lkey,
    })
}

fn broken(violation: Violation) -> Errno {
    tracing::debug!(%violation, "the peer broke the protocol");
    Errno::PROTO
}

impl Io {
    /// Add an operation. Returns its id.
    ///
    /// # Errors
    /// As [`Op::new`].
    pub(super) fn begin(
        &mut self,
        kind: EventKind,
        memory: Memory,
        target: Target,
        token: u64,
    ) -> Started {
        let op = Op::new(kind, memory, target, token, self.max_pieces)?;
        Ok(self.ops.insert(op))
    }

    pub(super) fn send_message(&mut self, message: &Message) {
        let mut bytes = [0; MAX_LEN];
        let n = message.emit(&mut bytes);
        self.sends.push(SendWr::send(0).inline(&bytes[..n]));
    }

    /// Open `range` (first byte, length) of an operation to the peer, and send the message that `body` makes from its address and key. If the
    /// operation has ended, send only its credits, and return the credit that the message took.
    pub(super) fn advertise(
        &mut self,
        domain: &Domain,
        op: OpId,
        range: (u64, u32),
        access: Access,
        credits: u16,
        body: impl FnOnce(Remote) -> Body,
    ) -> Result<(), Error> {
        let body = match self.ops.get_mut(op) {
            Some(it) => {
                let (off, len) = range;
                let (addr, rkey) = it.open(domain, off as usize, len as usize, access)?;
                body(Remote { addr, rkey, len })
            }
            None => Body::Credit,
        };
        self.send_message(&Message { credits, body });
        Ok(())
    }

    /// Complete a receive with the payload of this message.
    fn take(&mut self, op: OpId, buffer: u32, len: usize) -> Result<(), Errno> {
        if let Some(it) = self.ops.get_mut(op) {
            let from = buffer as usize * self.slot + HEADER_LEN;
            it.fill(0, &self.ctrl.mr, from, len)
                .map_err(|error| error.errno())?;
        }
        self.finish(op, End::new(Ok(len), len));
        self.repost(buffer);
        Ok(())
    }

    pub(super) fn repost(&mut self, buffer: u32) {
        self.recvs
            .push(control_receive(self.ctrl_sge, self.slot, buffer));
    }

    /// The error that refuses sends, if any.
    pub(super) fn no_send(&self) -> Option<Errno> {
        if self.shut {
            Some(Errno::PIPE)
        } else {
            self.over
        }
    }

    /// True if a completed send waits for its memory. All later sends must be reported after it.
    #[inline]
    pub(super) fn has_waiting_send(&self) -> bool {
        self.ends[usize::from(true)].len() > 0
    }

    #[inline]
    pub(super) fn finish(&mut self, id: OpId, end: End) {
        let fd = self.fd;
        let finished = self.ops.remove_with(id, |op| {
            self.sending -= usize::from(op.is_send());
            let ends = &mut self.ends[usize::from(op.is_send())];
            if ends.len() > 0 {
                ends.push(op.park(fd, end));
                return None;
            }
            let is_slot = op.target.is_slot();
            match op.finish(fd, end) {
                Ok(late) => {
                    self.woken |= is_slot;
                    late
                }
                Err(parked) => {
                    ends.push(parked);
                    None
                }
            }
        });
        self.late.extend(finished.flatten());
    }

    pub(super) fn tell(
        &mut self,
        kind: EventKind,
        target: Target,
        token: u64,
        result: Result<usize, Errno>,
        ready: Ready,
    ) {
        self.woken |= target.is_slot();
        let mut event = Event::new(kind, token, self.fd, result);
        event.ready = ready;
        self.late.extend(target.tell(event));
    }
}

impl Core {
    /// The machine and the I/O state of an open connection; otherwise the error that refuses operations.
    pub(super) fn open(&mut self) -> Result<(&mut Endpoint, &mut Io), Errno> {
        match &mut self.machine {
            Some(machine) if !self.io.closing => Ok((machine, &mut self.io)),
            _ if self.io.closing => Err(Errno::BADF),
            _ => Err(self.io.over.unwrap_or(Errno::NOTCONN)),
        }
    }

    pub(super) fn readable(&self) -> bool {
        let machine = self.machine.as_ref();
        self.io.over.is_some()
            || self.io.deaf
            || machine.is_some_and(|m| m.readable() > 0 || m.peer_closed())
    }

    pub(super) fn ready(&self) -> Ready {
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

    /// Act on a new state: end operations and the connection, and report readiness. Returns true if the queue pair must be
    /// closed now. `delivered` says whether the peer has all that was sent.
    pub(super) fn look_around(&mut self, delivered: impl Fn() -> bool) -> bool {
        let io = &mut self.io;
        if let Some(errno) = io.over
            && !io.ops.is_empty()
        {
            // The machine has already served receives from the data that arrived.
            let eof =
                errno == Errno::PIPE && self.machine.as_ref().is_some_and(Endpoint::peer_closed);
            for id in io.ops.oldest_first(|_| true) {
                let Some(op) = io.ops.get_mut(id) else {
                    continue;
                };
                let direct = self.machine.as_ref().map_or(0, |m| m.received(id)) as usize;
                let (is_send, bytes) = (op.is_send(), op.filled.max(direct));
                let result = match (is_send, errno) {
                    (false, _) if io.unwanted => Err(Errno::CANCELED),
                    (false, _) if eof => Ok(bytes),
                    (false, Errno::PIPE) => Err(Errno::CONNRESET),
                    (_, errno) => Err(errno),
                };
                if is_send && io.closing {
                    io.lost.get_or_insert(errno);
                }
                io.finish(id, End::new(result, bytes));
            }
        }
        let out = io.over.is_some() || self.machine.as_ref().is_none_or(Endpoint::is_shut);
        // A close also waits for the memory of sends, and for memory that the peer still uses.
        let untold: usize = io.ends.iter().map(Ends::len).sum();
        let sent = || io.sending == 0 && (!io.closing || delivered());
        let done = out && untold == 0 && (io.over.is_some() || sent());
        if out && !io.shutting.is_empty() {
            let failed = io.over.filter(|errno| *errno != Errno::PIPE);
            for (kind, target, token) in std::mem::take(&mut io.shutting) {
                if kind == EventKind::Close && !done {
                    io.shutting.push((kind, target, token));
                    continue;
                }
                let result = match failed {
                    Some(errno) if kind == EventKind::Shutdown => Err(errno),
                    _ if kind == EventKind::Close => io.lost.map_or(Ok(0), Err),
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
