//! Queue pairs: posting, progress, and the end of a connection.
//!
//! ```text
//!   Init --attach--> Rts --disconnect--> Closing --queues empty, peer closed--> Error
//!                     |                     |
//!                     +--- any error -------+---------------------------------> Error
//! ```
//!
//! Two locks: `inbox` takes what is posted, `core` holds the protocol machine and is only ever *tried*. Whoever
//! fails to get it sets `pending`, and the holder looks at `pending` after letting go: nobody waits for a system
//! call that another thread makes.

mod rx;
mod tx;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use weft_proto::mpa::{Params, Rtr};
use weft_proto::rdmap::{self, DoneStatus, Fault, State as StreamState, Stream};
use weft_sys::{Event, Interest};
use weft_wire::mpa::MAX_MARKED_ULPDU;
use weft_wire::rdmap::{OperationError, ProtectionError, TaggedError, TermError};

use crate::cq::{Cq, CqInner};
use crate::device::{Counted, DeviceInner, PdInner};
use crate::engine::{Engine, Lease, Next, Source, Token};
use crate::lock::{lock, try_lock};
use crate::srq::{RecvQueue, Srq, SrqInner};
use crate::transport::Link;
use crate::types::{
    AsyncEvent, Error, Ledger, LinkOptions, PostError, PostReason, QpState, RecvWr, SendOp, SendWr,
    Wc, WcOpcode, WcStatus,
};
use rx::Rx;
use tx::Tx;

/// How long a closed connection may take to send what it owes and to see the peer's end.
const LINGER: Duration = Duration::from_secs(2);
/// Posts that may wait for the next poll, see [`Qp::post_send`].
const DEFER_MAX: u32 = 64;
/// Requests with more payload than this are never put off.
const DEFER_BYTES: u32 = 4096;

/// What a queue pair is made of.
#[derive(Clone)]
pub struct QpInit {
    /// Where completions of sends go.
    pub send_cq: Cq,
    /// Where completions of receives go; may be the same queue.
    pub recv_cq: Cq,
    /// Take receives from here, not from a queue of its own.
    pub srq: Option<Srq>,
    /// Sends outstanding at once.
    pub max_send_wr: u32,
    /// Receives outstanding at once.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of one request.
    pub max_sge: u32,
    /// Inline bytes of one request.
    pub max_inline: u32,
    /// Every send makes a completion, signaled or not.
    pub sq_sig_all: bool,
}

impl QpInit {
    /// 128 sends, 128 receives, 4 elements, 256 inline bytes, completions only where asked for.
    pub fn new(send_cq: &Cq, recv_cq: &Cq) -> Self {
        QpInit {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
            sq_sig_all: false,
        }
    }
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Both sides closed in order.
    Disconnected,
    /// The connection broke: reset, cut in the middle of an FPDU, or the peer did not close in time.
    Lost,
    /// We ended it with a Terminate of this value, see [`Wc::vendor_err`].
    Terminated(u32),
    /// The peer ended it with a Terminate of this value.
    PeerTerminated(u32),
}

type EndHook = Box<dyn FnOnce(EndReason) + Send>;

/// One request in the send queue.
struct Slot {
    wr: SendWr,
    /// Made by ourselves: no completion, and not counted.
    internal: bool,
    /// What went wrong with it on our side, if something did.
    fault: Option<WcStatus>,
}

enum RecvSource {
    Own(RecvQueue),
    Shared(Arc<SrqInner>),
}

/// What a lock holder may touch.
struct Core {
    stream: Option<Box<Stream>>,
    sq: VecDeque<Slot>,
    /// Sequence number of the first slot.
    sq_base: u64,
    tx: Tx,
    rx: Rx,
    done: Completions,
    ledger: Ledger,
    /// Why it ended, once it has.
    ended: Option<EndReason>,
    /// Our direction is closed.
    shut: bool,
    linger_until: Option<Instant>,
}

/// Completions made under the lock, delivered in batches.
#[derive(Default)]
struct Completions {
    send: SmallVec<[Wc; 8]>,
    recv: SmallVec<[Wc; 8]>,
    send_urgent: bool,
    recv_urgent: bool,
}

struct Connected {
    link: Arc<dyn Link>,
    token: Token,
}

pub(crate) struct QpInner {
    num: u32,
    device: Arc<DeviceInner>,
    pd: Arc<PdInner>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    recv: RecvSource,
    max_send_wr: u32,
    max_sge: u32,
    max_inline: u32,
    sq_sig_all: bool,
    state: AtomicU8,
    sq_used: AtomicU32,
    inbox: Mutex<VecDeque<SendWr>>,
    pending: AtomicBool,
    /// Posts since the last poll.
    deferred: AtomicU32,
    connected: OnceLock<Connected>,
    /// Nothing more will happen on the socket.
    dead: AtomicBool,
    /// The owner's handle is gone: no more completions.
    orphan: AtomicBool,
    armed: AtomicBool,
    in_lent: AtomicBool,
    tx_blocked: AtomicBool,
    drive_seq: AtomicU32,
    seen_seq: AtomicU32,
    waiters: AtomicU32,
    core: Mutex<Core>,
    on_end: Mutex<Option<EndHook>>,
}

impl QpInner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.device.engine
    }

    /// Bring the queue pair to life on a connected link. `prefix` goes out before the first FPDU (the MPA reply),
    /// `early` came in after the peer's start-up frame.
    pub(crate) fn attach(
        self: &Arc<Self>,
        link: Arc<dyn Link>,
        params: &Params,
        options: &LinkOptions,
        prefix: &[u8],
        early: &[u8],
    ) -> io::Result<()> {
        let marked = if params.tx_markers {
            MAX_MARKED_ULPDU as u32
        } else {
            u32::MAX
        };
        let max_ulpdu = max_ulpdu(options.max_ulpdu, link.max_fpdu()).min(marked);
        {
            let mut core = lock(&self.core);
            if self.state() != QpState::Init || core.stream.is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the queue pair has been connected before",
                ));
            }
            core.stream = Some(Box::new(Stream::new(rdmap::Config {
                max_ulpdu,
                ird: u32::from(params.ird),
                ord: u32::from(params.ord),
                hold_until_first_rx: params.must_wait_for_first_fpdu,
                sink_key: self.device.random_u32(),
            })));
            core.tx.start(params.crc, params.tx_markers, prefix);
            core.rx.start(params.crc, params.rx_markers, early);
            match params.rtr {
                // The frame that tells the responder that it may send (RFC 6581 4.2); only the initiator has `rtr`.
                Some(Rtr::Write) if !params.must_wait_for_first_fpdu => {
                    self.post_internal(&mut core, zero_write())
                }
                Some(Rtr::Read) if !params.must_wait_for_first_fpdu => {
                    self.post_internal(&mut core, zero_read())
                }
                Some(Rtr::Send) if !params.must_wait_for_first_fpdu => {
                    self.post_internal(&mut core, SendWr::send(0))
                }
                _ => {}
            }
            self.armed.store(true, Ordering::SeqCst);
            let token = self.engine().register(
                Arc::clone(self) as Arc<dyn Source>,
                link.fd(),
                Interest::READ,
            )?;
            if self.connected.set(Connected { link, token }).is_err() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the queue pair has been connected before",
                ));
            }
            self.state.store(QpState::Rts as u8, Ordering::Release);
        }
        self.drive(true);
        // The engine may have looked before there was anything to see.
        self.rearm();
        Ok(())
    }

    fn post_internal(&self, core: &mut Core, wr: SendWr) {
        let Core {
            stream: Some(stream),
            sq,
            ..
        } = core
        else {
            return;
        };
        stream.post(to_proto(&wr));
        sq.push_back(Slot {
            wr,
            internal: true,
            fault: None,
        });
    }

    fn post_send(self: &Arc<Self>, wrs: impl Iterator<Item = SendWr>) -> Result<(), PostError> {
        if !matches!(self.state(), QpState::Rts | QpState::Error) {
            return Err(PostError {
                index: 0,
                reason: PostReason::State,
            });
        }
        let mut refused = None;
        let mut count = 0;
        let mut bytes = 0u32;
        {
            let mut inbox = lock(&self.inbox);
            for (index, wr) in wrs.enumerate() {
                match self.check_post(&wr) {
                    Ok(len) => {
                        bytes = bytes.saturating_add(len);
                        self.sq_used.fetch_add(1, Ordering::Relaxed);
                        inbox.push_back(wr);
                        count += 1;
                    }
                    Err(reason) => {
                        refused = Some(PostError { index, reason });
                        break;
                    }
                }
            }
        }
        if count > 0 {
            self.ring(count, bytes);
        }
        match refused {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn check_post(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if self.sq_used.load(Ordering::Relaxed) >= self.max_send_wr {
            return Err(PostReason::Full);
        }
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges);
        }
        let len = wr.len().ok_or(PostReason::Length)?;
        if let Some(data) = &wr.inline {
            let fits = matches!(
                wr.op,
                SendOp::Send
                    | SendOp::SendInvalidate { .. }
                    | SendOp::Write { .. }
                    | SendOp::WriteImm { .. }
            ) && wr.sges.is_empty();
            if data.len() > self.max_inline as usize || !fits {
                return Err(PostReason::Inline);
            }
        }
        if wr.op.is_atomic() && len != 8 {
            return Err(PostReason::Length);
        }
        Ok(len)
    }

    /// The doorbell. While a poller holds the lease, only the first post after its poll goes out at once; the ones
    /// after it ride along with the next poll, the 64th post, or the engine's tick, whichever comes first.
    fn ring(self: &Arc<Self>, count: u32, bytes: u32) {
        let before = self.deferred.fetch_add(count, Ordering::SeqCst);
        // Somebody must be sure to come by: a poller, or the engine's tick. A sleeping owner counts for neither.
        let lent = !self.armed.load(Ordering::SeqCst)
            && self.waiters.load(Ordering::SeqCst) == 0
            && self.state() == QpState::Rts;
        if lent
            && before > 0
            && before % DEFER_MAX + count < DEFER_MAX
            && bytes / count <= DEFER_BYTES
        {
            self.send_cq.deferred.store(true, Ordering::Relaxed);
            self.recv_cq.deferred.store(true, Ordering::Relaxed);
            self.engine().keep_ticking();
            return;
        }
        self.drive(false);
    }

    /// A poll that found completions: send what was put off.
    pub(crate) fn flush_deferred(self: &Arc<Self>) {
        if self.deferred.swap(0, Ordering::SeqCst) > 1 {
            self.drive(false);
        }
    }

    /// A poll that found nothing: take the lease, and look at the socket.
    pub(crate) fn drive_leased(self: &Arc<Self>) {
        if self.dead.load(Ordering::Relaxed) || self.connected.get().is_none() {
            return;
        }
        self.drive_seq.store(
            self.drive_seq.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
        self.take_lease();
        self.deferred.store(0, Ordering::SeqCst);
        self.drive(true);
    }

    fn take_lease(self: &Arc<Self>) {
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::SeqCst) {
            self.engine().lend(self);
        }
    }

    /// The owner goes to sleep somewhere else: the engine takes over at once.
    pub(crate) fn release_lease(self: &Arc<Self>) {
        if !self.armed.load(Ordering::Relaxed) {
            self.rearm();
            self.flush_deferred();
        }
    }

    /// The owner goes to sleep on this socket.
    pub(crate) fn begin_wait(self: &Arc<Self>) -> Option<(BorrowedFd<'_>, Interest)> {
        let connected = self.connected.get()?;
        if self.dead.load(Ordering::Relaxed) {
            return None;
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // A post before it saw this waiter may have been put off.
        self.flush_deferred();
        self.take_lease();
        Some((connected.link.fd(), self.interest()))
    }

    pub(crate) fn end_wait(&self) {
        self.drive_seq.fetch_add(1, Ordering::Relaxed);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        self.engine().keep_ticking();
    }

    fn interest(&self) -> Interest {
        if self.tx_blocked.load(Ordering::SeqCst) {
            Interest::READ | Interest::WRITE
        } else {
            Interest::READ
        }
    }

    /// Let the engine's epoll fire for this queue pair again.
    pub(crate) fn rearm(&self) {
        let Some(connected) = self.connected.get() else {
            return;
        };
        if !self.dead.load(Ordering::SeqCst) {
            self.armed.store(true, Ordering::SeqCst);
            self.engine()
                .arm(connected.token, connected.link.fd(), self.interest());
        }
    }

    /// For the engine's tick. `Idle` takes the queue pair off the lent list.
    pub(crate) fn lease_state(&self) -> Lease {
        let seq = self.drive_seq.load(Ordering::SeqCst);
        let polled = self.seen_seq.swap(seq, Ordering::SeqCst) != seq;
        if polled {
            Lease::Polled
        } else if self.waiters.load(Ordering::SeqCst) > 0 {
            Lease::Asleep
        } else {
            Lease::Idle
        }
    }

    /// Whether it has to be put on the engine's list of lent queue pairs now.
    pub(crate) fn enter_lent(&self) -> bool {
        !self.in_lent.swap(true, Ordering::SeqCst)
    }

    /// The engine takes a lent queue pair back.
    pub(crate) fn take_back(self: &Arc<Self>) {
        self.in_lent.store(false, Ordering::SeqCst);
        if !self.armed.load(Ordering::SeqCst) {
            self.drive(true);
            self.rearm();
        }
    }

    pub(crate) fn drive_engine(self: &Arc<Self>) -> bool {
        self.drive(true)
    }

    /// Make progress, unless another thread is at it: then that one does ours as well. Says whether anything moved.
    fn drive(self: &Arc<Self>, receive: bool) -> bool {
        let mut moved = false;
        let mut receive = receive;
        self.pending.store(true, Ordering::SeqCst);
        loop {
            let Some(mut core) = try_lock(&self.core) else {
                return moved;
            };
            self.pending.store(false, Ordering::SeqCst);
            let was_blocked = self.tx_blocked.load(Ordering::Relaxed);
            let ended_before = core.ended.is_some();
            moved |= self.progress(&mut core, receive);
            let ended = if ended_before { None } else { core.ended };
            let blocked = core.tx.blocked();
            self.tx_blocked.store(blocked, Ordering::SeqCst);
            drop(core);
            if blocked && !was_blocked && self.armed.load(Ordering::SeqCst) {
                self.rearm();
            }
            if let Some(reason) = ended {
                self.announce_end(reason);
            }
            if !self.pending.load(Ordering::SeqCst) {
                return moved;
            }
            receive = true;
        }
    }

    fn progress(self: &Arc<Self>, core: &mut Core, receive: bool) -> bool {
        let Some(connected) = self.connected.get() else {
            if self.state() == QpState::Error {
                self.flush_unconnected(core);
            }
            return false;
        };
        let link = &*connected.link;
        if core.ended.is_some() {
            self.take_inbox(core);
            self.flush_sends(core);
            self.deliver(core);
            return self.drain(core, link);
        }
        self.take_inbox(core);
        let mut moved = self.pump_tx(core, link);
        if receive && core.ended.is_none() {
            moved |= self.pump_rx(core, link);
            if core.ended.is_none() {
                moved |= self.pump_tx(core, link);
            }
        }
        self.reap(core);
        self.deliver(core);
        if core.ended.is_none() && self.state() == QpState::Closing {
            self.try_close(core, link);
        }
        moved
    }

    /// Requests posted to a queue pair that failed before it was connected.
    fn flush_unconnected(self: &Arc<Self>, core: &mut Core) {
        for wr in lock(&self.inbox).drain(..) {
            self.sq_used.fetch_sub(1, Ordering::Relaxed);
            core.done.send_urgent = true;
            core.done.send.push(Wc {
                wr_id: wr.id,
                status: WcStatus::WrFlushErr,
                opcode: wr.op.opcode(),
                qp_num: self.num,
                ..Wc::default()
            });
        }
        self.deliver(core);
    }

    fn take_inbox(&self, core: &mut Core) {
        let mut inbox = lock(&self.inbox);
        if inbox.is_empty() {
            return;
        }
        let Core {
            stream: Some(stream),
            sq,
            ..
        } = core
        else {
            return;
        };
        for wr in inbox.drain(..) {
            stream.post(to_proto(&wr));
            sq.push_back(Slot {
                wr,
                internal: false,
                fault: None,
            });
        }
        if inbox.capacity() > 1024 {
            inbox.shrink_to(64);
        }
    }

    /// Move finished sends to the completion batch.
    fn reap(&self, core: &mut Core) {
        let Core {
            stream: Some(stream),
            sq,
            sq_base,
            done,
            ended,
            ..
        } = core
        else {
            return;
        };
        while let Some(finished) = stream.pop_completed() {
            let Some(slot) = sq.pop_front() else { return };
            *sq_base += 1;
            if slot.internal {
                continue;
            }
            self.sq_used.fetch_sub(1, Ordering::Relaxed);
            let mut vendor_err = 0;
            let (status, byte_len) = match finished.status {
                _ if slot.fault.is_some() => (slot.fault.unwrap_or_default(), 0),
                DoneStatus::Ok { byte_len } => (WcStatus::Success, byte_len),
                DoneStatus::RemoteError(error) => {
                    vendor_err = term_code(&error);
                    (remote_status(&error), 0)
                }
                DoneStatus::Flushed => {
                    if let Some(EndReason::Terminated(code) | EndReason::PeerTerminated(code)) =
                        ended
                    {
                        vendor_err = *code;
                    }
                    (WcStatus::WrFlushErr, 0)
                }
            };
            let failed = status != WcStatus::Success;
            if failed || slot.wr.signaled || self.sq_sig_all {
                done.send_urgent |= failed;
                done.send.push(Wc {
                    wr_id: slot.wr.id,
                    status,
                    opcode: slot.wr.op.opcode(),
                    byte_len,
                    qp_num: self.num,
                    vendor_err,
                    ..Wc::default()
                });
            }
        }
        if sq.is_empty() && sq.capacity() > 256 {
            sq.shrink_to(0);
        }
    }

    fn deliver(self: &Arc<Self>, core: &mut Core) {
        let done = &mut core.done;
        if self.orphan.load(Ordering::Relaxed) {
            *done = Completions::default();
            return;
        }
        let mut fits = true;
        if !done.send.is_empty() {
            fits &= self.send_cq.push(&done.send, done.send_urgent);
            done.send.clear();
            done.send_urgent = false;
        }
        if !done.recv.is_empty() {
            fits &= self.recv_cq.push(&done.recv, done.recv_urgent);
            done.recv.clear();
            done.recv_urgent = false;
        }
        if !fits && core.ended.is_none() {
            self.fault(core, Fault::LocalCatastrophic);
        }
    }

    fn take_recv(&self) -> Option<RecvWr> {
        match &self.recv {
            RecvSource::Own(queue) => queue.take().map(|(wr, _)| wr),
            RecvSource::Shared(srq) => srq.take(),
        }
    }

    /// We found something wrong with what the peer sent (or with ourselves): send a Terminate and end.
    fn fault(self: &Arc<Self>, core: &mut Core, fault: Fault) {
        tracing::debug!(qp = self.num, %fault, "terminating the stream");
        if let Some(stream) = &mut core.stream {
            stream.fail(fault);
        }
        // The Terminate goes into the flight before the stream is flushed.
        self.build(core);
        let code = core.tx.terminate_code();
        self.end(core, EndReason::Terminated(code));
    }

    /// The connection is over, for this reason: flush everything.
    fn end(self: &Arc<Self>, core: &mut Core, reason: EndReason) {
        if core.ended.is_some() {
            return;
        }
        core.ended = Some(reason);
        self.state.store(QpState::Error as u8, Ordering::Release);
        self.take_inbox(core);
        self.flush_sends(core);
        self.flush_recvs(core);
        match reason {
            EndReason::Disconnected => {}
            EndReason::Lost => self.device.raise(AsyncEvent::QpFatal {
                qp_num: self.num,
                reason: 0,
            }),
            EndReason::Terminated(reason) if is_access_code(reason) => {
                self.device.raise(AsyncEvent::QpAccessErr {
                    qp_num: self.num,
                    reason,
                });
            }
            EndReason::Terminated(reason) | EndReason::PeerTerminated(reason) => {
                self.device.raise(AsyncEvent::QpFatal {
                    qp_num: self.num,
                    reason,
                });
            }
        }
        self.deliver(core);
        if let Some(connected) = self.connected.get() {
            let until = Instant::now() + LINGER;
            core.linger_until = Some(until);
            self.engine().set_timer(connected.token, until);
            if reason == EndReason::Lost {
                connected.link.abort();
                self.bury(core);
            } else {
                self.drain(core, &*connected.link);
            }
        }
    }

    fn flush_sends(&self, core: &mut Core) {
        if let Some(stream) = &mut core.stream {
            stream.flush();
        }
        self.reap(core);
    }

    fn flush_recvs(&self, core: &mut Core) {
        let current = core.rx.take_recv();
        let queued = match &self.recv {
            RecvSource::Own(queue) => queue.drain(),
            RecvSource::Shared(_) => VecDeque::new(),
        };
        let vendor_err = match core.ended {
            Some(EndReason::Terminated(code) | EndReason::PeerTerminated(code)) => code,
            _ => 0,
        };
        for wr in current.into_iter().chain(queued) {
            core.done.recv_urgent = true;
            core.done
                .recv
                .push(self.recv_wc(wr.id, WcStatus::WrFlushErr, vendor_err));
        }
    }

    fn recv_wc(&self, wr_id: u64, status: WcStatus, vendor_err: u32) -> Wc {
        Wc {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qp_num: self.num,
            vendor_err,
            ..Wc::default()
        }
    }

    /// After the end: send what is owed (the Terminate), close our direction, and wait for the peer's end.
    fn drain(self: &Arc<Self>, core: &mut Core, link: &dyn Link) -> bool {
        if self.dead.load(Ordering::Relaxed) {
            return false;
        }
        if !core.shut {
            match core.tx.send_all(self, link, &mut core.ledger) {
                Ok(true) => {
                    link.shutdown_write();
                    core.shut = true;
                }
                Ok(false) => {}
                Err(_) => {
                    link.abort();
                    self.bury(core);
                    return true;
                }
            }
        }
        // What still comes in is of no interest, but unread bytes would turn our close into a reset that overtakes
        // the Terminate.
        if core.rx.discard(link, self.device.pool()) {
            self.bury(core);
        }
        false
    }

    /// Closing in order: everything is sent.
    fn try_close(self: &Arc<Self>, core: &mut Core, link: &dyn Link) {
        if core.sq.is_empty() && core.tx.is_empty() && !core.shut {
            link.shutdown_write();
            core.shut = true;
        }
    }

    /// Nothing more will happen on the socket.
    fn bury(&self, core: &mut Core) {
        if !self.dead.swap(true, Ordering::SeqCst) {
            if let Some(connected) = self.connected.get() {
                connected.link.abort();
                self.engine()
                    .unregister(connected.token, connected.link.fd());
            }
            core.tx.release(self.device.pool());
            core.rx.release(self.device.pool());
            core.sq = VecDeque::new();
        }
    }

    fn announce_end(&self, reason: EndReason) {
        let hook = lock(&self.on_end).take();
        if let Some(hook) = hook {
            hook(reason);
        }
    }

    fn disconnect(self: &Arc<Self>) {
        let rts = QpState::Rts as u8;
        let closing = QpState::Closing as u8;
        if self
            .state
            .compare_exchange(rts, closing, Ordering::SeqCst, Ordering::SeqCst)
            .is_err()
        {
            return;
        }
        if let Some(connected) = self.connected.get() {
            let until = Instant::now() + LINGER;
            lock(&self.core).linger_until = Some(until);
            self.engine().set_timer(connected.token, until);
        }
        self.drive(true);
        self.release_lease();
    }

    /// End at once, with a Terminate when connected.
    fn to_error(self: &Arc<Self>) {
        let mut core = lock(&self.core);
        let ended_before = core.ended.is_some();
        if self.connected.get().is_some() {
            if !ended_before {
                self.fault(&mut core, Fault::LocalCatastrophic);
            }
        } else {
            self.state.store(QpState::Error as u8, Ordering::Release);
            self.flush_recvs(&mut core);
            self.deliver(&mut core);
        }
        let ended = if ended_before { None } else { core.ended };
        drop(core);
        if let Some(reason) = ended {
            self.announce_end(reason);
        }
    }

    /// The owner's handle is gone.
    fn destroy(self: &Arc<Self>) {
        lock(&self.on_end).take();
        self.orphan.store(true, Ordering::SeqCst);
        if self.connected.get().is_some() {
            self.drive(false);
            let mut core = lock(&self.core);
            if core.ended.is_none() {
                // What was posted is sent (the flight is kept), nothing more is accepted.
                self.end(&mut core, EndReason::Disconnected);
            }
        }
        self.send_cq.detach(self);
        self.recv_cq.detach(self);
        self.release_lease();
    }

    pub(crate) fn set_end_hook(&self, hook: EndHook) {
        *lock(&self.on_end) = Some(hook);
    }
}

impl Source for QpInner {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if !self.armed.swap(false, Ordering::SeqCst) {
            return Next::Done;
        }
        match self.lease_state() {
            Lease::Polled | Lease::Asleep => Next::Lent(self),
            Lease::Idle => {
                self.drive_engine();
                Next::Hot(self)
            }
        }
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        let mut core = lock(&self.core);
        let due = core
            .linger_until
            .is_some_and(|until| Instant::now() >= until);
        if !due || self.dead.load(Ordering::SeqCst) {
            return;
        }
        let ended_before = core.ended.is_some();
        if !ended_before {
            self.end(&mut core, EndReason::Lost);
        }
        self.bury(&mut core);
        let ended = if ended_before { None } else { core.ended };
        drop(core);
        if let Some(reason) = ended {
            self.announce_end(reason);
        }
    }
}

/// A queue pair: a send queue, a receive queue and the connection that joins them to a peer's. Dropping it closes the
/// connection; requests that have not completed by then make no completions any more.
pub struct Qp(pub(crate) Arc<QpInner>, #[allow(dead_code)] Counted);

impl Qp {
    pub(crate) fn new(pd: &Arc<PdInner>, num: u32, init: &QpInit, count: Counted) -> Qp {
        let device = &pd.device;
        let recv = match &init.srq {
            Some(srq) => RecvSource::Shared(Arc::clone(&srq.0)),
            None => RecvSource::Own(RecvQueue::new(init.max_recv_wr, init.max_sge)),
        };
        let inner = Arc::new(QpInner {
            num,
            device: Arc::clone(device),
            pd: Arc::clone(pd),
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            recv,
            max_send_wr: init.max_send_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            state: AtomicU8::new(QpState::Init as u8),
            sq_used: AtomicU32::new(0),
            inbox: Mutex::default(),
            pending: AtomicBool::new(false),
            deferred: AtomicU32::new(0),
            connected: OnceLock::new(),
            dead: AtomicBool::new(false),
            orphan: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            in_lent: AtomicBool::new(false),
            tx_blocked: AtomicBool::new(false),
            drive_seq: AtomicU32::new(0),
            seen_seq: AtomicU32::new(0),
            waiters: AtomicU32::new(0),
            core: Mutex::new(Core {
                stream: None,
                sq: VecDeque::new(),
                sq_base: 0,
                tx: Tx::default(),
                rx: Rx::default(),
                done: Completions::default(),
                ledger: Ledger::default(),
                ended: None,
                shut: false,
                linger_until: None,
            }),
            on_end: Mutex::new(None),
        });
        inner.send_cq.attach(&inner);
        if !init.send_cq.same(&init.recv_cq) {
            inner.recv_cq.attach(&inner);
        }
        Qp(inner, count)
    }

    /// The queue pair's number, as in [`Wc::qp_num`].
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.0.state()
    }

    /// Post sends. The first post after a poll goes out before this returns (as far as the transport takes it);
    /// a run of small ones without a poll between them is sent in batches, at the latest after a millisecond.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused. On a queue pair in the error state requests are
    /// taken, and flushed.
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.0.post_send(wrs.iter().cloned())
    }

    /// Post one send, see [`Qp::post_send`].
    ///
    /// # Errors
    /// As [`Qp::post_send`], index 0.
    pub fn post_send_one(&self, wr: SendWr) -> Result<(), PostError> {
        self.0.post_send(std::iter::once(wr))
    }

    /// Post receives. They are taken in order, one a message.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        let RecvSource::Own(queue) = &self.0.recv else {
            return Err(PostError {
                index: 0,
                reason: PostReason::UsesSrq,
            });
        };
        let result = queue.post(wrs);
        if self.0.state() == QpState::Error {
            let mut core = lock(&self.0.core);
            self.0.flush_recvs(&mut core);
            self.0.deliver(&mut core);
        }
        result
    }

    /// Close in order: what was posted is sent, then the peer sees the end. Receives are flushed when the peer has
    /// closed its side too. Returns at once.
    pub fn disconnect(&self) {
        self.0.disconnect();
    }

    /// End the connection at once; the peer gets a Terminate. Everything outstanding is flushed.
    pub fn to_error(&self) {
        self.0.to_error();
    }

    /// What the connection's bytes cost so far.
    pub fn ledger(&self) -> Ledger {
        lock(&self.0.core).ledger
    }

    /// Our address, once connected.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.connected.get().map(|c| c.link.local_addr())
    }

    /// The peer's address, once connected.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.connected.get().map(|c| c.link.peer_addr())
    }

    /// Call this once when the connection ends, from whichever thread notices. Only one hook: the last one set.
    pub fn on_end(&self, hook: impl FnOnce(EndReason) + Send + 'static) {
        self.0.set_end_hook(Box::new(hook));
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

fn zero_write() -> SendWr {
    SendWr::write(0, crate::types::RemoteAddr { addr: 0, rkey: 0 })
}

fn zero_read() -> SendWr {
    SendWr::read(0, crate::types::RemoteAddr { addr: 0, rkey: 0 })
}

/// The longest ULPDU whose FPDU fits the path: 2 bytes of length and 4 of CRC around it, and no padding.
fn max_ulpdu(wanted: u32, max_fpdu: Option<u32>) -> u32 {
    let path = max_fpdu.map_or(u32::MAX, |fpdu| (fpdu & !3).saturating_sub(6));
    wanted.min(path)
}

fn to_proto(wr: &SendWr) -> rdmap::SendWr {
    use weft_wire::rdmap::AtomicOp;
    let atomic = |op, remote: crate::types::RemoteAddr, add_or_swap, compare| rdmap::Op::Atomic {
        op,
        stag: remote.rkey,
        to: remote.addr,
        add_or_swap,
        // An add without carry boundaries, or a swap of all bits (RFC 7306 5.2).
        add_or_swap_mask: if op == AtomicOp::FetchAdd {
            0
        } else {
            u64::MAX
        },
        compare,
        compare_mask: u64::MAX,
    };
    let op = match wr.op {
        SendOp::Send => rdmap::Op::Send {
            solicited: wr.solicited,
            invalidate: None,
        },
        SendOp::SendInvalidate { rkey } => rdmap::Op::Send {
            solicited: wr.solicited,
            invalidate: Some(rkey),
        },
        SendOp::Write { remote } => rdmap::Op::Write {
            stag: remote.rkey,
            to: remote.addr,
        },
        SendOp::WriteImm { remote, imm } => rdmap::Op::WriteImm {
            stag: remote.rkey,
            to: remote.addr,
            imm,
            solicited: wr.solicited,
        },
        SendOp::Read { remote } => rdmap::Op::Read {
            src_stag: remote.rkey,
            src_to: remote.addr,
        },
        SendOp::FetchAdd { remote, add } => atomic(AtomicOp::FetchAdd, remote, add, 0),
        SendOp::CompareSwap {
            remote,
            compare,
            swap,
        } => atomic(AtomicOp::CompareSwap, remote, swap, compare),
        SendOp::Swap { remote, value } => atomic(AtomicOp::Swap, remote, value, 0),
        SendOp::LocalInvalidate { .. } | SendOp::BindMw { .. } => rdmap::Op::Local,
    };
    rdmap::SendWr {
        op,
        len: wr.len().unwrap_or(0),
        fence: wr.fence,
    }
}

/// Layer, type and code of a Terminate as one number, laid out as on the wire.
fn term_code(error: &TermError) -> u32 {
    let (layer, etype, code) = error.parts();
    u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code)
}

fn is_access_code(code: u32) -> bool {
    let (layer, etype, code) = ((code >> 12) as u8, (code >> 8 & 15) as u8, code as u8);
    matches!(
        TermError::from_parts(layer, etype, code),
        TermError::Protection(_) | TermError::Tagged(_)
    )
}

fn remote_status(error: &TermError) -> WcStatus {
    match error {
        TermError::Protection(ProtectionError::CannotInvalidate) => WcStatus::RemInvReqErr,
        TermError::Tagged(TaggedError::InvalidVersion)
        | TermError::Operation(OperationError::InvalidVersion | OperationError::UnexpectedOpcode) => {
            WcStatus::RemInvReqErr
        }
        TermError::Protection(_) | TermError::Tagged(_) => WcStatus::RemAccessErr,
        _ => WcStatus::RemOpErr,
    }
}

/// Whether the stream has ended by what the peer said.
fn peer_terminated(stream: &Stream) -> bool {
    stream.state() == StreamState::Terminated
}

pub(crate) fn check_init(init: &QpInit, device: &DeviceInner) -> Result<(), Error> {
    let limits = &device.limits;
    let over = init.max_send_wr > limits.max_wr
        || init.max_recv_wr > limits.max_wr
        || init.max_sge > limits.max_sge
        || init.max_inline > limits.max_inline;
    if over {
        Err(Error::Limit(
            "work requests, elements or inline bytes of a queue pair",
        ))
    } else {
        Ok(())
    }
}
