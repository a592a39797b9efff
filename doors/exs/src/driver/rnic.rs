//! A connection over an RNIC of the machine.
//!
//! The machine posts without a bound, with inline data of any length, and mostly without completions. An RNIC has a queue of some depth, frees its places
//! by completions only, and takes few inline bytes. So every request makes a completion here; requests beyond the depth wait for one, and long inline data
//! go through slots of registered memory, one for each place of the queue.
//!
//! No engine drives an RNIC. The thread of `poller` takes completions when the channel of the queue says that there are some, and threads of the
//! program take them before they sleep.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use smallvec::smallvec;
use weft_sockets::lock::lock;
use weft_verbs::any::{self, CompChannel, Cq, Qp};
use weft_verbs::{Access, CqOverrun, InlineData, PostError, RemoteAddr, SendWr, Wc, WcStatus};
use weft_wire::exs::{HEADER_LEN, MAX_LEN};

use super::state::{INLINE_MAX, MAX_SGE, TAG_RECV};
use crate::bell::{Bell, Rings, deadline};
use crate::poller::{Poller, Watched};
use crate::registered::{Domain, Registered};
use crate::{Error, Options};

/// Outstanding sends.
const DEPTH: u32 = 256;
/// Bytes of a slot for inline data.
const SLOT: usize = (INLINE_MAX + MAX_LEN).next_multiple_of(64);
/// The number of the last request, see [`Rnic::is_delivered`].
const LAST: u64 = !TAG_RECV;
/// How long after a completion a wait looks for the next one before it sleeps.
const LOOK: Duration = Duration::from_micros(20);

pub(crate) struct Rnic {
    qp: Qp,
    cq: Cq,
    channel: CompChannel,
    domain: Arc<Domain>,
    max_pieces: usize,
    slots: Registered,
    sends: Mutex<Sends>,
    failed: AtomicBool,
    /// Bytes sent and received.
    moved: [AtomicU64; 2],
    /// Rung for threads that sleep in [`Rnic::watch`].
    bell: Bell,
    start: Instant,
    /// When the last completion came, in nanoseconds since the start.
    seen: AtomicU64,
    poller: OnceLock<(Arc<Poller>, u64)>,
}

struct Sends {
    depth: usize,
    /// On their way, oldest first: they complete in this order.
    posted: VecDeque<Posted>,
    /// Those that the queue has no place for.
    waiting: VecDeque<SendWr>,
    /// The slot of the next request.
    slot: usize,
    last: Last,
    /// Until the peer's first message.
    held: bool,
}

struct Posted {
    /// The machine hears of its completion.
    reported: bool,
    bytes: u64,
}

/// The last request of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    None,
    Posted,
    Complete,
}

impl Rnic {
    /// `create` makes the queue pair of the connection.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        options: &Options,
        create: impl FnOnce(&any::Pd, &any::QpInit) -> Result<Qp, weft_verbs::Error>,
    ) -> Result<Rnic, Error> {
        let rnic = domain.rnic().ok_or(Error::Io(Errno::INVAL.into()))?;
        let limits = rnic.device.attr().limits;
        let depth = DEPTH.min(limits.max_wr);
        // A header and a piece.
        let max_sge = MAX_SGE.min(limits.max_sge).max(2);
        let channel = rnic.device.create_comp_channel()?;
        let receives = options.control_receives();
        let entries = depth + receives;
        let cq = rnic.device.create_cq_on(entries, &channel)?;
        let init = any::QpInit {
            max_send_wr: depth,
            max_recv_wr: receives,
            max_sge,
            max_inline: (options.small_packet_max as usize + HEADER_LEN).clamp(MAX_LEN, INLINE_MAX)
                as u32,
            ..any::QpInit::new(&cq, &cq)
        };
        let qp = create(&rnic.pd, &init)?;
        let slots = domain.alloc(SLOT * depth as usize, Access::LOCAL_WRITE)?;
        Ok(Rnic {
            qp,
            cq,
            channel,
            domain: Arc::clone(domain),
            max_pieces: max_sge as usize - 1,
            slots,
            sends: Mutex::new(Sends {
                depth: depth as usize,
                posted: VecDeque::new(),
                waiting: VecDeque::new(),
                slot: 0,
                last: Last::None,
                held: false,
            }),
            failed: AtomicBool::new(false),
            moved: Default::default(),
            bell: Bell::default(),
            start: Instant::now(),
            seen: AtomicU64::new(0),
            poller: OnceLock::new(),
        })
    }

    pub(super) fn qp(&self) -> &Qp {
        &self.qp
    }

    pub(super) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(super) fn max_pieces(&self) -> usize {
        self.max_pieces
    }

    // ---- sends -----------------------------------------------------------------------------------------------------

    pub(super) fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        let mut sends = lock(&self.sends);
        sends.waiting.extend(wrs.iter().cloned());
        self.post_waiting(&mut sends)
    }

    fn post_waiting(&self, sends: &mut Sends) -> Result<(), PostError> {
        while !sends.held
            && sends.posted.len() < sends.depth
            && let Some(wr) = sends.waiting.pop_front()
        {
            if let Err(error) = self.post(sends, wr) {
                self.fail();
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) fn hold(&self) {
        lock(&self.sends).held = true;
    }

    fn post(&self, sends: &mut Sends, mut wr: SendWr) -> Result<(), PostError> {
        let inline = wr.inline.as_ref().map(InlineData::len);
        let bytes = inline.unwrap_or_else(|| wr.sges.iter().map(|sge| sge.len as usize).sum());
        if bytes > self.qp.max_inline() as usize
            && let Some(data) = wr.inline.take()
        {
            // As many slots as places: the request that used this one before is complete.
            let at = sends.slot * SLOT;
            let full = weft_verbs::PostReason::Inline;
            let too_long = |_| PostError {
                index: 0,
                reason: full,
            };
            self.slots.memory.write(at, &data).map_err(too_long)?;
            wr.sges = smallvec![self.slots.sge(at, bytes)];
        }
        let posted = Posted {
            reported: wr.signaled,
            bytes: bytes as u64,
        };
        wr.signaled = true;
        self.qp.post_send_one(wr)?;
        sends.posted.push_back(posted);
        sends.slot = (sends.slot + 1) % sends.depth;
        Ok(())
    }

    /// A request has failed: nothing follows it.
    fn fail(&self) {
        if !self.failed.swap(true, Ordering::SeqCst) {
            self.qp.disconnect();
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// See [`super::link::Link::is_delivered`]. A completion says little of the peer: a disconnect of `InfiniBand` overtakes what is not
    /// acknowledged, and TCP discards what is on its way when a message of the peer finds the connection closed. A Read without bytes behind
    /// all the others says that the peer's device has them.
    pub(super) fn is_delivered(&self) -> bool {
        let mut sends = lock(&self.sends);
        if sends.last == Last::None {
            sends.last = Last::Posted;
            let nowhere = RemoteAddr { addr: 0, rkey: 0 };
            let last = SendWr::read(LAST, nowhere).sge(self.slots.sge(0, 0));
            sends.waiting.push_back(last);
            let _ = self.post_waiting(&mut sends);
        }
        sends.last == Last::Complete || self.has_failed()
    }

    // ---- completions -----------------------------------------------------------------------------------------------

    /// Takes the completions that the machine hears of.
    pub(super) fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        let mut sends = lock(&self.sends);
        let mut kept = 0;
        while kept < out.len() {
            let room = &mut out[kept..];
            let taken = self.cq.poll(room)?;
            if taken == 0 {
                break;
            }
            let mut heard = 0;
            for at in 0..taken {
                if self.completed(&mut sends, &room[at]) {
                    room[heard] = room[at];
                    heard += 1;
                }
            }
            kept += heard;
            let now = self.start.elapsed().as_nanos() as u64;
            self.seen.store(now, Ordering::Relaxed);
            // After a failure the end of the connection follows.
            let _ = self.post_waiting(&mut sends);
        }
        Ok(kept)
    }

    fn completed(&self, sends: &mut Sends, wc: &Wc) -> bool {
        let [sent, received] = &self.moved;
        let is_good = wc.status == WcStatus::Success;
        if !is_good && wc.status != WcStatus::WrFlushErr {
            self.fail();
        }
        if wc.wr_id & TAG_RECV != 0 {
            sends.held = false;
            if is_good {
                received.fetch_add(u64::from(wc.byte_len), Ordering::Relaxed);
            }
            return true;
        }
        let Some(posted) = sends.posted.pop_front() else {
            return false;
        };
        sent.fetch_add(posted.bytes, Ordering::Relaxed);
        if wc.wr_id == LAST {
            sends.last = Last::Complete;
            return false;
        }
        posted.reported || !is_good
    }

    pub(super) fn moved(&self) -> (u64, u64) {
        let [sent, received] = &self.moved;
        let sent = sent.load(Ordering::Relaxed);
        (sent, sent + received.load(Ordering::Relaxed))
    }

    // ---- waiting ---------------------------------------------------------------------------------------------------

    pub(super) fn epoch(&self) -> u32 {
        self.bell.rings().0
    }

    pub(super) fn interrupt(&self) {
        self.bell.ring();
    }

    /// As [`weft_verbs::ext::CqExt::watch`], but shortly after a completion it returns at once: the caller takes completions itself then.
    pub(super) fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool {
        let seen = Duration::from_nanos(self.seen.load(Ordering::Relaxed));
        if spin && self.start.elapsed() < seen + LOOK {
            std::thread::yield_now();
            return false;
        }
        self.bell.sleep(Rings(epoch), deadline(timeout)) == Err(Errno::INTR)
    }

    /// Lets the process's thread call `conn` when there are completions.
    pub(super) fn watch_by(&self, conn: Weak<dyn Watched>) -> Result<(), Error> {
        let poller = Poller::get().map_err(std::io::Error::from)?;
        let id = poller.add(self.channel.as_fd(), conn);
        let id = id.map_err(std::io::Error::from)?;
        let _ = self.poller.set((poller, id));
        self.rearm();
        Ok(())
    }

    pub(super) fn rearm(&self) {
        if let Err(error) = self.try_rearm() {
            tracing::error!(%error, "the completion queue of an RNIC has failed");
            self.fail();
        }
    }

    fn try_rearm(&self) -> Result<(), Error> {
        while self.channel.get_event(Some(Duration::ZERO))?.is_some() {}
        self.cq.req_notify(false)?;
        if let Some((poller, id)) = self.poller.get() {
            let armed = poller.arm(self.channel.as_fd(), *id, EventFlags::IN);
            armed.map_err(std::io::Error::from)?;
        }
        Ok(())
    }
}

impl Drop for Rnic {
    fn drop(&mut self) {
        if let Some((poller, id)) = self.poller.take() {
            poller.remove(self.channel.as_fd(), id);
        }
    }
}
