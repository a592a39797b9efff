//! Queue pairs: posting, progress, and the end of a connection.
//!
//! ```text
//!   Init --attach--> Rts --disconnect--> Closing --queues empty, peer closed--> Error
//!                     |                     |
//!                     +--- any error -------+---------------------------------> Error
//! ```
//!
//! Two locks: `core` holds the protocol machine and is only ever *tried*; `inbox` takes requests of threads that find it taken. A thread that fails to take `core`
//! leaves its work to the holder, which looks for that after it has released the lock. So no thread waits for a system call of another one. Which
//! thread drives, watches or sleeps is agreed in one word, [`weft_lock::Wake`]; the state of the queue pair is another one, `life`.
//!
//! From the bottom up: `frame` and `convert`; what a queue pair is made of (`limits`, `peer`, and the data of its streams: `flight`, `held`, `confirm`);
//! `completions` and the `end`; the effects of segments and requests (`receives`, `place`, `rnr`, `direct`); `tx` and `rx`; who makes progress (`drive`,
//! `lease`); the calls of programs (`connect`, `post`, `fast_path`, `handle`).

mod completions;
mod confirm;
mod connect;
mod convert;
mod direct;
mod drive;
mod end;
mod fast_path;
mod flight;
mod frame;
mod handle;
mod lease;
mod life;
mod limits;
mod peer;
mod place;
mod post;
mod receives;
mod rnr;
mod rnr_queue;
mod roles;
mod rx;
mod tx;

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use smallvec::SmallVec;
use weft_lock::Wake;
use weft_mem::{KeyLock, Keys};
use weft_proto::rdmap::{self, State as StreamState};

use crate::comp_counters::CompCounters;
use crate::cq::{CqInner, Glance};
use crate::device::{DeviceInner, PdInner};
use crate::engine::Engine;
use crate::types::{ConnCounters, QpState, SendWr, WcStatus};
use completions::Completions;
use confirm::Confirming;
pub(crate) use convert::{term_code, to_proto};
pub use end::EndReason;
use end::Withheld;
use flight::Tx;
pub use handle::{Ender, Qp, QpInit};
use lease::Owner;
use life::Life;
pub(crate) use limits::Limits;
use peer::Peer;
use place::Rx;
use post::Posting;
pub(crate) use post::may_be_put_off;
pub(crate) use receives::RecvSource;
pub(crate) use tx::{Local, do_local};

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
    counters: ConnCounters,
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
    comp_counters: Option<Arc<CompCounters>>,
    limits: Limits,
    peer: Peer,
    glance: Arc<Glance>,
    posting: Posting,
    owner: Owner,
    life: Life,
    wake: Wake,
    core: KeyLock<Core>,
    on_end: Mutex<Option<EndHook>>,
}

impl QpInner {
    fn state(&self) -> QpState {
        self.life.state()
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.device.engine
    }

    pub(crate) fn pd(&self) -> &PdInner {
        &self.pd
    }

    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    /// The connection goes over TCP, for this reason.
    pub(crate) fn set_reason(&self, reason: String) {
        let _ = self.peer.reason.set(reason);
    }

    /// Depths are about to be negotiated, and the program's are these: what to add to them, for Reads of our own.
    pub(crate) fn ask_for_own_reads(&self, ird: u16, ord: u16) -> u16 {
        if self.limits.remote_completion {
            self.peer.ask_for_own_reads(ird, ord)
        } else {
            0
        }
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
