//! The program's handle of a queue pair.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use weft_lock::Wake;
use weft_mem::{Access, KeyLock, Keys};
use weft_sys::diag::tcp_peer_uid;
use weft_tls::{TlsError, TlsInfo};

use super::flight::Tx;
use super::lease::Owner;
use super::life::Life;
use super::limits::Limits;
use super::peer::Peer;
use super::place::Rx;
use super::post::Posting;
use super::{Completions, Core, EndReason, QpInner, RecvSource};
use crate::comp_counters::CompCounters;
use crate::cq::{Cq, Member};
use crate::device::{Counted, Pd, PdInner, QpNumber};
use crate::ext::QpExt;
use crate::srq::Srq;
use crate::types::{
    ConnCounters, Error, Path, PostError, PostReason, QpState, RecvWr, Rnr, SendWr, WcStatus,
};
use crate::xrc::{XrcDomain, XrcTarget};

/// The parameters of a queue pair.
#[derive(Clone)]
pub struct QpInit {
    /// The queue for completions of sends.
    pub send_cq: Cq,
    /// The queue for completions of receives; may be the same queue.
    pub recv_cq: Cq,
    /// Take receives from here, not from a queue of its own.
    pub srq: Option<Srq>,
    /// Receives come from the queues of this XRC domain, as messages name them. Such a queue pair is made in [`XrcDomain::pd`], with
    /// [`XrcDomain::cq`].
    pub xrc: Option<XrcDomain>,
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
    /// Its number, which no other queue pair of the device may have; it is free again once the [`Qp`] is dropped. `None`: the device
    /// chooses.
    pub num: Option<u32>,
    /// The handling of a message that finds no receive posted.
    pub rnr: Rnr,
    /// A Send or Write is complete when the peer has received or placed it, as in InfiniBand; false: when the transport has taken its
    /// bytes, as in iWARP, and a Write with a wrong key, or to a peer that dies, has succeeded. It costs an empty Read of our own behind requests that are signaled (one for all that are posted together,
    /// and none where a Write is carried out in shared memory). A connection that allows no Reads is as with false.
    pub remote_completion: bool,
    /// If true, the queue pair does not react when its peer has closed or is lost. Only a send, outstanding then or posted later, fails with
    /// [`WcStatus::RetryExcErr`] and flushes everything else. Until then the queue pair and its receives stay as they are ([`Qp::on_end`] is
    /// called in any case). This is InfiniBand's behaviour. False is iWARP's: the end flushes at once.
    pub quiet_end: bool,
    /// A counter of completed work. Default `None`.
    pub comp_counters: Option<Arc<CompCounters>>,
}

impl QpInit {
    /// 128 sends, 128 receives, 4 elements, 256 inline bytes, completions only where asked for.
    pub fn new(send_cq: &Cq, recv_cq: &Cq) -> Self {
        QpInit {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            xrc: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
            sq_sig_all: false,
            num: None,
            rnr: Rnr::default(),
            remote_completion: false,
            quiet_end: false,
            comp_counters: None,
        }
    }
}

impl Pd {
    /// A queue pair, not connected yet.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn create_qp(&self, init: &QpInit) -> Result<Qp, Error> {
        let device = &self.0.device;
        device.limits.check_depths(
            init.max_send_wr,
            init.max_recv_wr,
            init.max_sge,
            init.max_inline,
        )?;
        let count = Counted::take(&device.qps, device.limits.max_qp, "queue pairs", "max_qp")?;
        let num = QpNumber::take(device, init.num)?;
        Ok(Qp::new(&self.0, num, init, count))
    }
}

/// A queue pair: a send queue, a receive queue and the connection to a peer's queue pair. Dropping it closes the connection: requests that
/// have not completed by then get no completions, and may not be carried out.
pub struct Qp(
    pub(crate) Arc<QpInner>,
    #[allow(dead_code)] Option<(Counted, QpNumber)>,
);

impl Qp {
    fn new(pd: &Arc<PdInner>, num: QpNumber, init: &QpInit, count: Counted) -> Qp {
        let recv = match &init.xrc {
            Some(domain) => RecvSource::Xrc(XrcTarget::new(Arc::clone(&domain.0))),
            None => RecvSource::of(init.srq.as_ref(), init.max_recv_wr, init.max_sge),
        };
        Qp(
            Self::make(pd, num.num, init, recv, false),
            Some((count, num)),
        )
    }

    fn make(
        pd: &Arc<PdInner>,
        num: u32,
        init: &QpInit,
        recv: RecvSource,
        is_twin: bool,
    ) -> Arc<QpInner> {
        let device = &pd.device;
        let inner = Arc::new(QpInner {
            num,
            is_twin,
            twin: OnceLock::new(),
            device: Arc::clone(device),
            pd: Arc::clone(pd),
            send_cq: Arc::clone(&init.send_cq.0),
            recv_cq: Arc::clone(&init.recv_cq.0),
            recv,
            comp_counters: init.comp_counters.clone(),
            limits: Limits {
                max_send_wr: init.max_send_wr,
                max_sge: init.max_sge,
                max_inline: init.max_inline,
                sq_sig_all: init.sq_sig_all,
                remote_completion: init.remote_completion,
                quiet_end: init.quiet_end,
            },
            peer: Peer::default(),
            glance: Arc::default(),
            posting: Posting::default(),
            owner: Owner::default(),
            life: Life::new(init.rnr == Rnr::Wait),
            wake: Wake::default(),
            core: KeyLock::new(Core {
                keys: Keys::new(&device.table),
                stream: None,
                confirming: None,
                named_srq: None,
                gave_back: false,
                silent: 0,
                tx: Tx::default(),
                rx: Rx::default(),
                done: Completions::default(),
                counters: ConnCounters::default(),
                ended: None,
                withheld: None,
                awaits_retry_timeout: false,
                nudges: SmallVec::new(),
                send_failed: false,
                shut: false,
                linger_until: None,
                linger_mark: 0,
                give_up: None,
            }),
            on_end: Mutex::new(None),
        });
        let member = || Arc::downgrade(&inner) as Weak<dyn Member>;
        inner.send_cq.attach(member());
        if !init.send_cq.same(&init.recv_cq) {
            inner.recv_cq.attach(member());
        }
        inner
    }

    /// The queue pair's number, as in [`Wc::qp_num`](crate::Wc::qp_num).
    pub fn num(&self) -> u32 {
        self.0.num
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.0.state()
    }

    /// Posts sends. The first post after a poll is sent before this returns (as far as the transport takes it). Further small ones without
    /// a poll in between are sent in batches, after a few milliseconds at the latest.
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused. On a queue pair in the error state requests are
    /// taken, and flushed.
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        let done = self.0.post_fast(wrs);
        if done == wrs.len() {
            return Ok(());
        }
        self.0.post_send(done, wrs[done..].iter().cloned())
    }

    /// Post one send, see [`Qp::post_send`].
    ///
    /// # Errors
    /// As [`Qp::post_send`], index 0.
    pub fn post_send_one(&self, mut wr: SendWr) -> Result<(), PostError> {
        self.post_send_from(&mut wr)
    }

    /// As [`Qp::post_send_one`], for a request that is not to be moved more often than needed: it may be an empty one afterwards.
    ///
    /// # Errors
    /// As [`Qp::post_send`], index 0.
    pub fn post_send_from(&self, wr: &mut SendWr) -> Result<(), PostError> {
        if self.0.post_fast(std::slice::from_ref(wr)) == 1 {
            return Ok(());
        }
        let wr = std::mem::replace(wr, SendWr::send(0));
        self.0.post_send(0, std::iter::once(wr))
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
        self.0.feed();
        if let Some(twin) = self.0.twin.get().and_then(Weak::upgrade) {
            twin.feed();
        }
        if self.0.state() == QpState::Error {
            self.0.with_core(|core| {
                self.0.flush_recvs(core);
                self.0.deliver(core);
            });
        }
        result
    }

    /// Post one receive, see [`Qp::post_recv`].
    ///
    /// # Errors
    /// As there, index 0.
    pub fn post_recv_one(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv(&[wr])
    }

    /// Sets the operations that the peer may do through this queue pair, in addition to the checks of regions and windows: remote rights
    /// that are not in `access` are refused. By default all are allowed.
    pub fn set_access(&self, access: Access) {
        self.0.set_access(access);
        if let Some(twin) = self.0.twin.get().and_then(Weak::upgrade) {
            twin.set_access(access);
        }
    }

    /// Sets how long the peer waits for a receive for our messages: `retry` + 1 times its timer ([`Qp::set_min_rnr_timer`]); 7 or more, the
    /// default, mean no limit. Without a receive by then, the message ends with [`WcStatus::RnrRetryExcErr`]. A peer that does not wait
    /// ([`Rnr::Terminate`]), or is not weft, ignores this.
    pub fn set_rnr_retry(&self, retry: u8) {
        self.0.set_rnr_retry(retry);
    }

    /// Sets the timer for the peer's messages, see [`Qp::set_rnr_retry`]. The default is 655.36 ms, InfiniBand's maximum.
    pub fn set_min_rnr_timer(&self, timer: Duration) {
        self.0.set_min_rnr_timer(timer);
        if let Some(twin) = self.0.twin.get().and_then(Weak::upgrade) {
            twin.set_min_rnr_timer(timer);
        }
    }

    /// Closes in order: posted requests are sent, then the peer sees the end. Receives are flushed when the peer has closed its side too.
    /// Returns at once.
    pub fn disconnect(&self) {
        self.0.disconnect();
    }

    /// End the connection at once; the peer gets a Terminate. Everything outstanding is flushed.
    pub fn to_error(&self) {
        self.0.to_error();
    }

    /// Sends that were posted and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.0.posting.sq_used.load(Ordering::Relaxed)
    }

    /// The cost of the connection's bytes so far.
    pub fn counters(&self) -> ConnCounters {
        self.0.with_core(|core| core.counters)
    }

    /// RDMA Reads and atomics that the connection may have at once: (inbound, outbound), as agreed at start-up.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.0.peer.depths.get().copied()
    }

    /// The transport of the connection, once connected.
    pub fn path(&self) -> Option<Path> {
        self.0.peer.connected.get().map(|c| Path {
            transport: c.link.name(),
            reason: self.0.peer.reason.get().cloned(),
        })
    }

    /// Whether its set-up has shown that the peer is of our user: only processes of one user meet in shared memory.
    pub fn attests_same_user(&self) -> bool {
        let connected = self.0.peer.connected.get();
        connected.is_some_and(|c| c.link.attests_same_user())
    }

    /// The key that the peer has proved to have, and the cipher, where the connection was made by TLS. In shared memory
    /// ([`Path::transport`] `local`) nothing is encrypted after that.
    pub fn tls(&self) -> Option<TlsInfo> {
        self.0.peer.connected.get()?.link.tls().cloned()
    }

    /// The error that broke the TLS connection, if it ended that way: damage, forgery, or a cut.
    pub fn tls_error(&self) -> Option<TlsError> {
        self.0.peer.connected.get()?.link.tls_error()
    }

    /// Our address, once connected.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.peer.connected.get().map(|c| c.link.local_addr())
    }

    /// The peer's address, once connected.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.peer.connected.get().map(|c| c.link.peer_addr())
    }

    /// The user whose process made the other end of the connection, as the kernel attests: `None` if it is not on this host, or not known. In
    /// shared memory ([`Path::transport`] `local`) it is always our own user, and `None` here.
    pub fn peer_uid(&self) -> Option<u32> {
        tcp_peer_uid(self.0.peer.connected.get()?.link.fd()).unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not say whose connection this is");
            None
        })
    }

    /// Call this once when the connection ends, from whichever thread notices; at once if it has ended already. Only one
    /// hook: the last one set. With [`Rnr::Wait`] it is called for a peer that has closed behind messages without receives too; the state
    /// changes when these are received, or given up.
    pub fn on_end(&self, hook: impl FnOnce(EndReason) + Send + 'static) {
        self.0.set_end_hook(Box::new(hook));
    }

    /// As dropping it, and waits until the peer of a connection on this host, which may reach memory by itself, is out of it. One that stays is
    /// waited for for three seconds.
    pub fn destroy(self) {
        let inner = Arc::clone(&self.0);
        drop(self);
        inner.wait_until_left();
    }

    /// Sets the hook of [`Qp::on_end`] later, from a place that does not hold the queue pair.
    pub fn ender(&self) -> Ender {
        Ender(Arc::downgrade(&self.0))
    }
}

impl QpExt for Qp {
    fn check_send(&self, wr: &SendWr) -> Result<(), PostError> {
        match self.0.check_request(wr) {
            Ok(_) => Ok(()),
            Err(reason) => Err(PostError { index: 0, reason }),
        }
    }

    fn allow_early_posts(&self) {
        self.0.life.expect();
    }

    fn wait_for_receives(&self, retry: u8) {
        self.0.wait_for_receives(retry);
    }

    fn pause(&self, paused: bool) {
        self.0.set_paused(paused);
        if let Some(twin) = self.0.twin.get().and_then(Weak::upgrade) {
            twin.set_paused(paused);
        }
    }

    fn cut(&self) {
        self.0.cut();
    }

    fn fail(&self, status: WcStatus) {
        self.0.fail(status);
    }

    fn take_receives(&self) -> Vec<RecvWr> {
        match &self.0.recv {
            RecvSource::Own(queue) => queue.drain().into(),
            RecvSource::Shared(_) | RecvSource::Twin(_) | RecvSource::Xrc(_) => Vec::new(),
        }
    }

    fn twin(&self) -> Option<Qp> {
        let first = &self.0;
        let init = QpInit {
            max_send_wr: 0,
            max_recv_wr: 0,
            max_sge: first.limits.max_sge,
            rnr: if first.life.waits_for_receives() {
                Rnr::Wait
            } else {
                Rnr::Terminate
            },
            remote_completion: first.limits.remote_completion,
            quiet_end: first.limits.quiet_end,
            comp_counters: first.comp_counters.clone(),
            ..QpInit::new(
                &Cq(Arc::clone(&first.send_cq)),
                &Cq(Arc::clone(&first.recv_cq)),
            )
        };
        let recv = match &first.recv {
            RecvSource::Shared(srq) => RecvSource::Shared(Arc::clone(srq)),
            RecvSource::Own(_) => RecvSource::Twin(Arc::downgrade(first)),
            RecvSource::Twin(_) | RecvSource::Xrc(_) => return None,
        };
        let twin = Self::make(&first.pd, first.num, &init, recv, true);
        twin.set_access(first.peer.access());
        twin.set_min_rnr_timer(first.min_rnr_timer());
        let qp = Qp(twin, None);
        first.twin.set(Arc::downgrade(&qp.0)).ok()?;
        Some(qp)
    }
}

/// See [`Qp::ender`].
pub struct Ender(Weak<QpInner>);

impl Ender {
    /// As [`Qp::on_end`]; does nothing if the queue pair was dropped.
    pub fn on_end(&self, hook: impl FnOnce(EndReason) + Send + 'static) {
        if let Some(qp) = self.0.upgrade() {
            qp.set_end_hook(Box::new(hook));
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.0.destroy();
    }
}
