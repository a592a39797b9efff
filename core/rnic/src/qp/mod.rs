//! Queue pairs: posting, progress, and the end of a connection.
//!
//! ```text
//!   Init --attach--> Rts --disconnect--> Closing --queues empty, peer closed--> Error
//!                     |                     |
//!                     +--- any error -------+---------------------------------> Error
//! ```
//!
//! Two locks: `inbox` takes posted requests, `core` holds the protocol machine and is only ever *tried*. A thread that fails to take `core`
//! sets `pending`, and the holder checks `pending` after it has released the lock. So no thread waits for a system call of another one.
//!
//! From the bottom up: `frame` and `convert`; the data of a connection (`flight`: outgoing, `held`: waiting for a receive); its `end`; the effects of
//! segments and requests (`place`, `rnr`, `direct`); `tx` and `rx`; the calls of programs (`post`, `fast_path`, `close`, `handle`).

mod close;
mod confirm;
mod convert;
mod direct;
mod end;
mod fast_path;
mod flight;
mod frame;
mod glance;
mod handle;
mod held;
mod lease;
mod pause;
mod place;
mod post;
mod receives;
mod rnr;
mod roles;
mod rx;
mod stat;
mod tx;
mod xrc;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use weft_mem::{Access, KeyGuard, KeyLock, Keys};
use weft_proto::mpa::{Params, Rtr};
use weft_proto::rdmap::{self, DoneStatus, Fault, State as StreamState};
use weft_sys::{Event, Interest};
use weft_wire::mpa::MAX_MARKED_ULPDU;

use crate::cq::{CqInner, Glance, Poller};
use crate::device::{DeviceInner, PdInner};
use crate::engine::{Drive, Engine, Lease, Next, Registration, Source, guarded, on_engine};
use crate::lock::lock;
use crate::report::Connection;
use crate::tally::Tally;
use crate::transport::Link;
use crate::transport::local::LocalLink;
use crate::types::{Ledger, LinkOptions, QpState, SendWr, Wc, WcOpcode, WcStatus};
use confirm::Confirming;
use convert::{max_ulpdu, remote_status, term_code, to_proto, zero_read, zero_write};
pub use end::EndReason;
use end::Withheld;
use flight::Tx;
use frame::Frame;
pub use handle::{Ender, Qp, QpInit};
use held::RNR_FOR_EVER;
use place::Rx;
pub(crate) use receives::RecvSource;
use xrc::name_srq;

/// The longest ULPDU on shared memory, in bytes: what one connection moves before others get their turn.
const LOCAL_MAX_ULPDU: u32 = 16 << 20;

/// When an initiator that has heard nothing nudges its peer, counted from the start.
const NUDGES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];

/// A connection for a queue pair, in the making.
pub(crate) trait CallOff: Send + Sync {
    /// Cancels the dial.
    fn call_off(&self);
}

type EndHook = Box<dyn FnOnce(EndReason) + Send>;

type Stream = rdmap::Stream<Slot>;

/// One request in the send queue.
struct Slot {
    wr: SendWr,
    /// Made by ourselves: no completion, and not counted.
    internal: bool,
    /// A local error of the request, if any.
    fault: Option<WcStatus>,
}

/// The state under the lock.
struct Core {
    /// Regions of our own that requests have named lately.
    keys: Keys,
    stream: Option<Box<Stream>>,
    /// Sends and Writes are complete when the peer has them.
    confirming: Option<Confirming>,
    /// The shared receive queue of an XRC domain that was last named to the peer.
    named_srq: Option<u32>,
    /// A receive was put back in this hold.
    gave_back: bool,
    /// Requests done without a completion, since the last one that made one.
    silent: u32,
    tx: Tx,
    rx: Rx,
    done: Completions,
    ledger: Ledger,
    /// Why it ended, once it has.
    ended: Option<EndReason>,
    /// The end is not reported yet.
    withheld: Option<Withheld>,
    /// The end was not reported, and sends are outstanding.
    awaits_retry_timeout: bool,
    /// On the dialling side, while the peer is silent: the times to send something.
    nudges: SmallVec<[Instant; 2]>,
    /// The transport accepts no more bytes: the connection cannot end in order.
    send_failed: bool,
    /// Our direction is closed.
    shut: bool,
    linger_until: Option<Instant>,
    /// Bytes sent when that was set.
    linger_mark: u64,
    /// The end of all patience, once it has ended.
    give_up: Option<Instant>,
}

impl AsMut<Keys> for Core {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
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
    link: Link,
    registration: Registration,
    since: Instant,
}

pub(crate) struct QpInner {
    num: u32,
    /// It is another one's other end, see [`Qp::twin`].
    is_twin: bool,
    twin: OnceLock<Weak<QpInner>>,
    device: Arc<DeviceInner>,
    pd: Arc<PdInner>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    recv: RecvSource,
    max_send_wr: u32,
    max_sge: u32,
    max_inline: u32,
    sq_sig_all: bool,
    remote_completion: bool,
    /// The program's depths, where room for Reads of our own was asked for in addition at start-up.
    asked_depths: Mutex<Option<(u16, u16)>>,
    /// Messages without a receive wait for one.
    rnr_wait: AtomicBool,
    /// How often the peer waits for a receive for our messages, see [`Qp::set_rnr_retry`].
    rnr_retry: AtomicU8,
    quiet_end: bool,
    tally: Option<Arc<Tally>>,
    /// The operations that the peer may do, as bits of [`Access`].
    access: AtomicU32,
    /// Inbound and outbound Reads and atomics, once connected.
    depths: OnceLock<(u16, u16)>,
    state: AtomicU8,
    /// Sends are taken before the connection is there, see [`Qp::allow_early_posts`].
    expected: AtomicBool,
    sq_used: AtomicU32,
    inbox: Mutex<VecDeque<SendWr>>,
    /// Something is in the inbox. Set under its lock.
    has_inbox: AtomicBool,
    pending: AtomicBool,
    /// The driving thread has to arm the socket when it is done.
    arm_wanted: AtomicBool,
    /// How much the engine is needed although a thread polls, see the module `lease`.
    engine_hint: AtomicU32,
    /// A thread of the program has received something while it drove.
    app_received: AtomicBool,
    /// Posts since the last poll.
    deferred: AtomicU32,
    /// The value of [`QpInner::taken`] at the last post, and at the last small Write to a sleeping peer.
    seen_taken: AtomicU32,
    alone_since: AtomicU32,
    connected: OnceLock<Connected>,
    /// Why the connection is not on shared memory.
    pub(crate) reason: OnceLock<String>,
    pub(crate) glance: Arc<Glance>,
    /// See [`Qp::pause`].
    paused: AtomicBool,
    /// Nothing more will happen on the socket.
    dead: AtomicBool,
    /// The owner's handle was dropped: no more completions.
    orphan: AtomicBool,
    armed: AtomicBool,
    in_leased: AtomicBool,
    tx_blocked: AtomicBool,
    /// A message waits in the transport: nothing is received for now.
    rx_stopped: AtomicBool,
    /// The peer's end has been seen behind that.
    rx_closed: AtomicBool,
    /// A message waits: a thread that posts a receive has to clear this, and to drive.
    starved: AtomicBool,
    drive_seq: AtomicU32,
    seen_seq: AtomicU32,
    waiters: AtomicU32,
    core: KeyLock<Core>,
    on_end: Mutex<Option<EndHook>>,
    /// The dial of this queue pair.
    dial: Mutex<Option<Weak<dyn CallOff>>>,
}

impl QpInner {
    fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    /// The operations that the peer may do.
    fn access(&self) -> Access {
        Access::from_bits_truncate(self.access.load(Ordering::Relaxed))
    }

    /// From now on the peer may do this.
    fn set_access(self: &Arc<Self>, access: Access) {
        let Some(local) = self.with_core(|core| {
            let before = self.access.swap(access.bits(), Ordering::Relaxed);
            let changed = before != access.bits() && core.ended.is_none();
            let local = self.local().filter(|_| changed)?;
            local.shut_doors();
            Some(local)
        }) else {
            return;
        };
        // Without the lock: others do not wait for a peer that stays.
        if !on_engine() {
            local.wait_until_outside();
        } else if local.is_inside() {
            // It keeps to the ring from now on.
            return;
        }
        self.with_core(|core| {
            if core.ended.is_none() {
                local.let_in(self.open_rights());
            }
        });
    }

    /// The transport, if it is shared memory.
    fn local(&self) -> Option<&LocalLink> {
        self.connected.get()?.link.local()
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.device.engine
    }

    /// Starts the queue pair on a connected link. `prefix` is sent before the first FPDU (the MPA reply), `early` was received after the
    /// peer's start-up frame.
    pub(crate) fn attach(
        self: &Arc<Self>,
        link: Link,
        params: &Params,
        options: &LinkOptions,
        prefix: &[u8],
        early: &[u8],
    ) -> io::Result<()> {
        let initiator = !params.must_wait_for_first_fpdu;
        let marked = if params.tx_markers {
            MAX_MARKED_ULPDU as u32
        } else {
            u32::MAX
        };
        let shared = link.local().is_some();
        let (frame, max_ulpdu) = if shared {
            (Frame::Local, LOCAL_MAX_ULPDU)
        } else {
            let mpa = max_ulpdu(options.max_ulpdu, link.max_fpdu()).min(marked);
            (Frame::Mpa, mpa)
        };
        let mpa = |on: bool| on && !shared;
        // Work that other threads left meanwhile is done below, or, after an error, here.
        let enter = || -> io::Result<()> {
            let mut core = self.core.lock();
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
            if let Some(stream) = core.stream.as_mut().filter(|_| shared) {
                stream.believe_written();
            }
            let _ = self
                .depths
                .set(self.visible_depths((params.ird, params.ord)));
            if self.remote_completion {
                core.start_confirming(&link, params.ord);
            }
            core.tx
                .start(frame, mpa(params.crc), mpa(params.tx_markers), prefix);
            core.rx
                .start(frame, mpa(params.crc), mpa(params.rx_markers), early);
            // The frame that allows the responder to send (RFC 6581 4.2).
            if let Some(rtr) = params.rtr.filter(|_| initiator) {
                let ready = match rtr {
                    Rtr::Write => zero_write(),
                    Rtr::Read => zero_read(),
                    Rtr::Send => SendWr::send(0),
                };
                post_internal(&mut core, ready);
            }
            if self.rnr_retry.load(Ordering::Relaxed) < RNR_FOR_EVER {
                self.tell_rnr_retry(&mut core);
            }
            self.armed.store(true, Ordering::SeqCst);
            let registration = Registration::new(self.engine());
            let source = Arc::clone(self) as Arc<dyn Source>;
            registration.start(source, link.fd(), Interest::READ)?;
            let connected = Connected {
                link,
                registration,
                since: Instant::now(),
            };
            if self.connected.set(connected).is_err() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the queue pair has been connected before",
                ));
            }
            self.state.store(QpState::Rts as u8, Ordering::Release);
            if let Some(local) = self.local() {
                let watch = Arc::downgrade(self);
                local.belongs_to(watch);
                self.glance.watch(local.ring());
                local.let_in(self.open_rights());
                if let Some(neighbour) = local.neighbour()
                    && !neighbour.add(Arc::downgrade(self) as _)
                {
                    local.set_dead();
                }
            }
            Ok(())
        };
        if let Err(error) = enter() {
            fence(Ordering::SeqCst);
            if self.pending.load(Ordering::SeqCst) {
                self.drive(true);
            }
            return Err(error);
        }
        if self.depths.get().is_some_and(|(_, ord)| *ord == 0)
            && self.expected.load(Ordering::Relaxed)
        {
            self.refuse_reads();
        }
        self.drive(true);
        // The engine may have looked before there was anything to see.
        self.rearm();
        if initiator {
            self.start_nudging();
            if let Some(local) = self.connected.get().and_then(|c| c.link.local()) {
                local.close_tcp(options, true);
            }
        }
        Ok(())
    }

    /// The kernel's siw, as responder, overlooks FPDUs that arrive between its reply and the moment when it starts to watch the socket:
    /// they stay there until more data comes. So an initiator that has received nothing sends an empty Write, which has no effect (RFC 5040
    /// does not even check its `STag`).
    fn start_nudging(self: &Arc<Self>) {
        let Some(connected) = self.connected.get() else {
            return;
        };
        let at = NUDGES.map(|delay| Instant::now() + delay);
        self.with_core(|core| core.nudges = at.into());
        for at in at {
            connected.registration.set_timer(at);
        }
    }

    fn nudge(self: &Arc<Self>) {
        let sent = self.with_core(|core| {
            let due = core.nudges.first().is_some_and(|at| *at <= Instant::now());
            let silent = core.ended.is_none() && core.ledger.rx_fpdus == 0;
            if due {
                core.nudges.remove(0);
            }
            if due && silent {
                post_internal(core, zero_write());
            }
            due && silent
        });
        if sent {
            self.drive(false);
        }
    }

    /// A poll that found completions: sends deferred requests.
    pub(crate) fn flush_deferred(self: &Arc<Self>) {
        if self.deferred.swap(0, Ordering::SeqCst) > 1 {
            self.drive(false);
        }
    }

    /// After reading a transport whose wake-ups come once: a sleeping thread that was woken while another thread took the data has to be
    /// woken for the next data too. `received`: data was taken.
    fn watch_again(&self, link: &Link, received: bool) {
        if received {
            // Either we see the sleeping thread, or it sees what we have taken, and notifies the peer.
            fence(Ordering::SeqCst);
        }
        let armed = self.armed.load(Ordering::SeqCst);
        let sleepers = self.waiters.load(Ordering::SeqCst) > 0;
        if (!armed && !sleepers) || link.watch(self.interest()).is_some() {
            return;
        }
        if let Some(connected) = self.connected.get().filter(|_| armed) {
            connected.registration.poke();
        }
        if sleepers {
            self.send_cq.kick();
            self.recv_cq.kick();
        }
    }

    /// Checks whether the peer is alive; the engine calls this while a thread polls.
    pub(crate) fn check_peer(self: &Arc<Self>) {
        if let Some(local) = self.local()
            && !self.dead.load(Ordering::Relaxed)
        {
            local.check();
            self.drive(true);
        }
    }

    pub(crate) fn pd(&self) -> &PdInner {
        &self.pd
    }

    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    /// The peer's process has ended.
    fn peer_died(self: &Arc<Self>) {
        if let Some(local) = self.local() {
            local.set_dead();
            self.drive(true);
        }
    }

    /// Make progress, unless another thread is at it: then that one does ours as well.
    fn drive(self: &Arc<Self>, receive: bool) -> Drive {
        self.drive_for(receive, None)
    }

    /// As [`QpInner::drive`], by a polling thread that takes the resulting completions.
    fn drive_for(self: &Arc<Self>, receive: bool, mut poller: Option<&mut Poller<'_>>) -> Drive {
        let mut moved = false;
        let mut receive = receive;
        loop {
            let core = self.core.try_lock().or_else(|| {
                // The holder checks this after it releases the lock; it may have released it just before.
                self.pending.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                self.core.try_lock()
            });
            let Some(core) = core else {
                return if moved { Drive::Moved } else { Drive::Busy };
            };
            if self.pending.load(Ordering::SeqCst) {
                self.pending.store(false, Ordering::SeqCst);
                // Other threads rely on us for what they came for.
                receive = true;
            }
            moved |= self.hold(core, |core| {
                self.progress(core, receive, poller.as_deref_mut())
            });
            if !self.pending.load(Ordering::SeqCst) {
                if self.arm_wanted.load(Ordering::SeqCst)
                    && self.arm_wanted.swap(false, Ordering::SeqCst)
                {
                    self.rearm_and_flush();
                }
                return if moved { Drive::Moved } else { Drive::Still };
            }
            receive = true;
        }
    }

    /// Sending was blocked: the engine watches, unless an awake owner will (it checks before it sleeps).
    fn watch_for_room(&self) {
        if self.armed.load(Ordering::SeqCst) || self.waiters.load(Ordering::SeqCst) > 0 {
            self.rearm();
        }
    }

    /// Receiving continues: no watch for data.
    fn watch_for_data(&self) {
        self.watch_for_room();
        self.send_cq.kick();
        self.recv_cq.kick();
    }

    /// Runs `f` under the lock, releases it, and sends the resulting notifications.
    fn hold<R>(&self, mut core: KeyGuard<'_, Core>, f: impl FnOnce(&mut Core) -> R) -> R {
        let told_before = core.told_end().is_some();
        let out = f(&mut core);
        let ended = core.told_end().filter(|_| !told_before);
        let blocked = core.tx.blocked;
        // Written under the lock alone.
        let was_blocked = self.tx_blocked.load(Ordering::SeqCst);
        if blocked != was_blocked {
            self.tx_blocked.store(blocked, Ordering::SeqCst);
        }
        let stopped = core.rx.held.stopped;
        let was_stopped = self.rx_stopped.load(Ordering::SeqCst);
        if stopped != was_stopped {
            self.rx_stopped.store(stopped, Ordering::SeqCst);
        }
        let closed = core.rx.held.closed;
        if closed != self.rx_closed.load(Ordering::SeqCst) {
            self.rx_closed.store(closed, Ordering::SeqCst);
        }
        self.note_still(&core);
        let gave_back = std::mem::take(&mut core.gave_back);
        drop(core);
        // A thread that does not get the lock marks work as pending, and tries once more: either that succeeds, or we see `pending` from
        // here on.
        fence(Ordering::SeqCst);
        if blocked && !was_blocked {
            self.watch_for_room();
        }
        if was_stopped && !stopped {
            self.watch_for_data();
        }
        if gave_back {
            self.recv_was_put_back();
        }
        if let Some(reason) = ended {
            self.announce_end(reason);
        }
        if on_engine() {
            guarded(|| self.recv_cq.call_hook());
            if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
                guarded(|| self.send_cq.call_hook());
            }
            for cq in self.other_cqs() {
                guarded(|| cq.call_hook());
            }
        }
        out
    }

    /// Reads something, unless another thread holds the lock.
    fn peek<R>(self: &Arc<Self>, f: impl FnOnce(&Core) -> R) -> Option<R> {
        let seen = f(&*self.core.try_lock()?);
        fence(Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) {
            self.drive(true);
        }
        Some(seen)
    }

    /// Hold the lock for something else than progress, and then make the progress that others left to the holder.
    fn with_core<R>(self: &Arc<Self>, f: impl FnOnce(&mut Core) -> R) -> R {
        let out = self.hold(self.core.lock(), f);
        if self.pending.load(Ordering::SeqCst) {
            self.drive(true);
        }
        out
    }

    fn progress(
        self: &Arc<Self>,
        core: &mut Core,
        receive: bool,
        poller: Option<&mut Poller<'_>>,
    ) -> bool {
        let Some(connected) = self.connected.get() else {
            if self.state() == QpState::Error {
                self.flush_unconnected(core, None);
            }
            return false;
        };
        let link = &connected.link;
        if core.ended.is_some() {
            if !self.may_tell(core) {
                return self.drain(core, link);
            }
            self.take_inbox(core);
            if self.state() == QpState::Error {
                self.flush_sends(core);
            } else {
                self.await_retry_timeout(core);
            }
            self.deliver(core);
            return self.drain(core, link);
        }
        if self.is_paused() {
            // In any case: a wake-up that is not consumed would fire again and again.
            link.pause();
            return false;
        }
        // Before receiving: requests of the peer behind the last message that the program has are answered before our end.
        let closing = receive && self.state() == QpState::Closing;
        self.take_inbox(core);
        let mut moved = self.pump_tx(core, link);
        if core.confirming.as_ref().is_some_and(Confirming::is_late) {
            self.reap(core);
            if core.ask_for_confirmation() {
                moved |= self.pump_tx(core, link);
            }
        }
        let mut received = false;
        if receive && core.ended.is_none() {
            received = self.pump_rx(core, link);
            moved |= received;
            if received && !on_engine() {
                self.app_received.store(true, Ordering::Relaxed);
            }
            if core.confirming.is_some() {
                // A confirmation may allow the next request for one.
                self.reap(core);
                core.ask_for_confirmation();
            }
            if core.ended.is_none() {
                if closing {
                    core.tell_received();
                }
                moved |= self.pump_tx(core, link);
            }
        }
        // After all sending: references just lent add an event that a sleeping thread waits for.
        if core.ended.is_none() && link.local().is_some_and(|local| receive || local.lends()) {
            self.watch_again(link, received);
        }
        self.reap(core);
        if let Some(poller) = poller {
            self.hand_over(core, poller);
        }
        self.deliver(core);
        if closing && core.ended.is_none() {
            // Closing in order: once everything is sent, the peer sees our end. Requests posted before the close may have reached the inbox
            // after this drive emptied it; the closing thread drives once more.
            if core.nothing_posted()
                && core.owes_nothing()
                && core.tx.is_empty()
                && !core.shut
                && lock(&self.inbox).is_empty()
            {
                self.shut(core, link);
            }
        }
        moved
    }

    /// Requests posted to a queue pair that failed before it was connected: `first` is the status of the first one.
    fn flush_unconnected(self: &Arc<Self>, core: &mut Core, mut first: Option<WcStatus>) {
        self.has_inbox.store(false, Ordering::Relaxed);
        for wr in lock(&self.inbox).drain(..) {
            self.sq_used.fetch_sub(1, Ordering::Relaxed);
            let status = first.take().unwrap_or(WcStatus::WrFlushErr);
            self.note(wr.op.opcode(), status, 0);
            core.done.send_urgent = true;
            core.done.send.push(Wc {
                wr_id: wr.id,
                status,
                opcode: wr.op.opcode(),
                qp_num: self.num,
                wqes_retired: 1,
                ..Wc::default()
            });
        }
        self.deliver(core);
    }

    fn take_inbox(&self, core: &mut Core) {
        // The posting thread drives after its post, or leaves that to us; we check once more then.
        if !self.has_inbox.load(Ordering::Acquire) {
            return;
        }
        let mut inbox = lock(&self.inbox);
        let Core {
            stream: Some(stream),
            named_srq,
            ..
        } = core
        else {
            return;
        };
        let mut wanted = false;
        let mut told = false;
        for wr in inbox.drain(..) {
            wanted |= wr.signaled
                || self
                    .tally
                    .as_ref()
                    .is_some_and(|tally| tally.counts_op(&wr.op));
            told |= wr.op.is_two_sided();
            name_srq(stream, named_srq, &wr);
            let slot = Slot {
                wr,
                internal: false,
                fault: None,
            };
            stream.post_with(to_proto(&slot.wr), slot);
        }
        self.has_inbox.store(false, Ordering::Relaxed);
        if inbox.capacity() > 1024 {
            inbox.shrink_to(64);
        }
        drop(inbox);
        if core.confirming.is_some() {
            self.want_confirmation(core, wanted, told);
        }
    }

    /// Move finished sends to the completion batch.
    fn reap(&self, core: &mut Core) {
        let Core {
            stream: Some(stream),
            silent,
            done,
            ended,
            confirming,
            ..
        } = core
        else {
            return;
        };
        while let Some((finished, slot)) = stream.pop() {
            if slot.internal {
                if let Some(confirming) = confirming {
                    confirming.answered(slot.wr.op);
                }
                continue;
            }
            self.sq_used.fetch_sub(1, Ordering::Relaxed);
            let mut vendor_err = 0;
            let (status, byte_len) = match finished.status {
                _ if slot.fault.is_some() => (slot.fault.unwrap_or_default(), 0),
                DoneStatus::Ok { byte_len } => (WcStatus::Success, byte_len),
                DoneStatus::RemoteError(error) => {
                    vendor_err = term_code(error);
                    (remote_status(&slot.wr.op, error), 0)
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
            self.note(slot.wr.op.opcode(), status, byte_len);
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
                    wqes_retired: 1 + std::mem::take(silent),
                    ..Wc::default()
                });
            } else {
                Tally::done_silently(self.tally.as_ref(), slot.wr.op.opcode(), silent);
            }
        }
        stream.shrink(256);
    }

    /// Counts completed work, if the program has attached a counter.
    #[inline]
    fn note(&self, opcode: WcOpcode, status: WcStatus, len: u32) {
        if let Some(tally) = &self.tally
            && !self.orphan.load(Ordering::Relaxed)
        {
            tally.note(opcode, status, len);
        }
    }

    /// Passes completions to the polling thread that drives, as far as they belong to that queue.
    fn hand_over(&self, core: &mut Core, poller: &mut Poller<'_>) {
        if core.withheld.is_none() && !self.orphan.load(Ordering::Relaxed) {
            let done = &mut core.done;
            poller.take(&self.send_cq, &mut done.send);
            let _ = self.with_recv_cq(|cq| poller.take(cq, &mut done.recv));
        }
    }

    fn deliver(self: &Arc<Self>, core: &mut Core) {
        if core.withheld.is_some() {
            return;
        }
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
            // Completions for a dropped queue of an XRC domain are discarded.
            fits &= self
                .with_recv_cq(|cq| cq.push(&done.recv, done.recv_urgent))
                .unwrap_or(true);
            done.recv.clear();
            done.recv_urgent = false;
        }
        if !fits && core.ended.is_none() {
            self.fault(core, Fault::LocalCatastrophic);
        }
    }
}

impl Source for QpInner {
    fn stat(self: Arc<Self>) -> Option<Connection> {
        self.describe()
    }

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
        self.nudge();
        self.rnr_expired();
        self.linger_expired();
    }

    fn panicked(self: Arc<Self>) {
        // Its progress is unknown: program and peer are notified of the end.
        self.state.store(QpState::Error as u8, Ordering::Release);
        self.cut();
    }
}

/// Whether the peer has ended the stream.
fn peer_terminated(stream: &Stream) -> bool {
    stream.state() == StreamState::Terminated
}

/// Post a request of our own, which makes no completion.
fn post_internal(core: &mut Core, wr: SendWr) {
    if let Some(stream) = &mut core.stream {
        let slot = Slot {
            wr,
            internal: true,
            fault: None,
        };
        stream.post_with(to_proto(&slot.wr), slot);
    }
}
