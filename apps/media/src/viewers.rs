//! Admission: requests are checked, granted or refused, and connections are kept until they end. Viewers have no threads of their own.

use std::any::Any;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_service::{Permit, lock};
use weft_verbs::cm::{self, ConnParam, LinkOptions};
use weft_verbs::tls::Tls;
use weft_verbs::{Access, Cq, Device, Pd, Qp, QpInit, Rnr, Wc};

use crate::wire::{Grant, Refusal, Request};

/// RDMA Reads that a viewer may have outstanding.
pub const READS: u16 = 16;
/// Requests that may wait for an answer.
const BACKLOG: u32 = 4096;
/// Sends outstanding to one viewer.
pub const SENDS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(10);

/// Decides which peers are admitted.
pub trait Gate: Send + Sync {
    /// Whether the initiator of this request may watch; otherwise the reason, for the log.
    ///
    /// # Errors
    /// The reason.
    fn admit(&self, request: &cm::Request) -> Result<(), String>;
}

/// The handler of requests.
pub trait Host: Send + Sync + 'static {
    /// Answers a request; called by the listener's thread, so it must not take long.
    fn answer(self: Arc<Self>, caller: Caller, request: Request);
}

pub struct Config {
    /// Address and port; port 0 takes a free one.
    pub bind: SocketAddr,
    /// Make connections by TLS, and take no others. `None` leaves them in the clear.
    pub tls: Option<Tls>,
    /// The admission check.
    pub gate: Arc<dyn Gate>,
    /// Viewers at the same time.
    pub max_viewers: usize,
}

/// Connection settings of both sides.
pub(crate) fn param(tls: Option<Tls>, private_data: Vec<u8>, timeout: Duration) -> ConnParam {
    let options = LinkOptions {
        timeout,
        // TLS has tags of its own; in the clear it is for measurements on loopback, where TCP's checksum covers memory.
        crc: false,
        ..LinkOptions::default()
    };
    ConnParam {
        private_data,
        ird: READS,
        ord: READS,
        options,
        tls,
    }
}

/// How a server takes messages of a viewer.
pub struct Receiving<'a> {
    /// Where they complete, and the answers.
    pub cq: &'a Cq,
    /// Receives at once; further messages wait.
    pub receives: u32,
}

/// A listening address.
pub struct ViewerListener {
    listener: cm::Listener,
    shared: Arc<Shared>,
}

struct Shared {
    cq: Cq,
    tls: Option<Tls>,
    gate: Arc<dyn Gate>,
    max_viewers: usize,
    /// Places of viewers that were granted, and of requests that are being answered.
    taken: Arc<AtomicUsize>,
    viewers: Mutex<Viewers>,
    tell: Mutex<Sender<u64>>,
}

#[derive(Default)]
struct Viewers {
    next: u64,
    there: HashMap<u64, There>,
}

/// A viewer. Its connection ends before what it reads and before its place is free.
struct There {
    _qp: Arc<Qp>,
    _keep: Arc<dyn Any + Send + Sync>,
    _permit: Permit,
}

impl ViewerListener {
    /// Listens.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`; without a thread or the device's objects.
    pub fn bind(device: &Device, config: Config) -> io::Result<Self> {
        let listener = cm::Listener::bind(
            device,
            config.bind,
            BACKLOG,
            &param(config.tls.clone(), Vec::new(), PATIENCE),
        )?;
        let (tell, ended) = channel::<u64>();
        let shared = Arc::new(Shared {
            cq: device.create_cq(65_536, None).map_err(io::Error::other)?,
            tls: config.tls,
            gate: config.gate,
            max_viewers: config.max_viewers,
            taken: Arc::default(),
            viewers: Mutex::default(),
            tell: Mutex::new(tell),
        });
        let weak = Arc::downgrade(&shared);
        // A queue pair cannot be dropped by the hook that is notified of its end.
        std::thread::Builder::new()
            .name("weft-media-end".into())
            .spawn(move || {
                for id in ended {
                    let Some(shared) = weak.upgrade() else { return };
                    let gone = lock(&shared.viewers).there.remove(&id);
                    drop(gone);
                }
            })?;
        Ok(Self { listener, shared })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    pub fn viewers(&self) -> Arc<dyn Fn() -> usize + Send + Sync> {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || lock(&shared.viewers).there.len())
    }

    /// The queue where sends to viewers complete; its completions carry the `wr_id` of the send.
    pub fn cq(&self) -> Cq {
        self.shared.cq.clone()
    }

    /// Answers requests for ever.
    pub fn run(&self, host: &Arc<impl Host>) {
        while let Some(request) = self.listener.next_request(None) {
            self.receive(request, host);
            // A server of files posts nothing; a live server takes its own completions.
        }
    }

    fn receive(&self, request: cm::Request, host: &Arc<impl Host>) {
        let peer = request.peer_addr();
        let asked = Request::decode_all(request.private_data());
        let caller = Caller {
            request: Some(request),
            shared: Arc::clone(&self.shared),
            place: None,
            takes_blocks: matches!(asked, Ok((_, true))),
        };
        match asked {
            Ok((asked, _)) => {
                if let Some(caller) = caller.admitted() {
                    Arc::clone(host).answer(caller, asked);
                }
            }
            Err(e) => {
                tracing::info!("{peer}: turned away: {e}");
                caller.refuse(Refusal::Malformed);
            }
        }
    }
}

/// A viewer that waits for an answer. Dropping it rejects the request without a reason.
pub struct Caller {
    request: Option<cm::Request>,
    shared: Arc<Shared>,
    place: Option<Permit>,
    takes_blocks: bool,
}

impl Caller {
    /// Whether the viewer takes movies in blocks.
    pub fn takes_blocks(&self) -> bool {
        self.takes_blocks
    }

    fn admitted(mut self) -> Option<Self> {
        let request = self.request.as_ref()?;
        let peer = request.peer_addr();
        if let Err(why) = self.shared.gate.admit(request) {
            tracing::info!("{peer}: turned away: {why}");
            self.refuse(Refusal::UnknownPeer);
            return None;
        }
        self.place = Permit::take(&self.shared.taken, self.shared.max_viewers);
        if self.place.is_none() {
            tracing::info!("{peer}: turned away: too many viewers");
            self.refuse(Refusal::Full);
            return None;
        }
        Some(self)
    }

    /// Rejects the request with a reason.
    pub fn refuse(mut self, why: Refusal) {
        if let Some(request) = self.request.take() {
            // Fails only for private data that is too long.
            let _ = request.reject(&why.encode());
        }
    }

    /// Accepts the request on a queue pair of `pd`; `keep` stays until the connection has ended. Returns the queue pair, unless the viewer
    /// has disconnected already.
    pub fn grant(
        self,
        pd: &Pd,
        grant: &Grant,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<Qp>> {
        self.grant_and_hear(pd, grant, keep, None)
    }

    /// As [`Self::grant`], for a viewer that sends messages; the caller posts the receives. A message that finds none waits.
    pub fn grant_and_hear(
        mut self,
        pd: &Pd,
        grant: &Grant,
        keep: Arc<dyn Any + Send + Sync>,
        receiving: Option<&Receiving<'_>>,
    ) -> Option<Arc<Qp>> {
        let (request, place) = (self.request.take()?, self.place.take()?);
        let peer = request.peer_addr();
        let shared = &self.shared;
        let cq = receiving.map_or(&shared.cq, |r| r.cq);
        let init = QpInit {
            max_send_wr: SENDS,
            max_recv_wr: receiving.map_or(1, |r| r.receives),
            max_sge: 1,
            max_inline: 64,
            rnr: receiving.map_or(Rnr::Terminate, |_| Rnr::Wait),
            ..QpInit::new(cq, cq)
        };
        let qp = match pd.create_qp(&init) {
            Ok(qp) => qp,
            Err(e) => {
                tracing::warn!("{peer}: turned away: {e}");
                let _ = request.reject(&Refusal::Full.encode());
                return None;
            }
        };
        qp.set_access(Access::REMOTE_READ);
        let param = param(shared.tls.clone(), grant.encode(), PATIENCE);
        let qp = match request.accept(qp, &param) {
            Ok(connection) => Arc::new(connection.qp),
            Err(e) => {
                tracing::info!("{peer}: gone: {e}");
                return None;
            }
        };
        let id = {
            let mut viewers = lock(&shared.viewers);
            let id = viewers.next;
            viewers.next += 1;
            let viewer = There {
                _qp: Arc::clone(&qp),
                _keep: keep,
                _permit: place,
            };
            viewers.there.insert(id, viewer);
            id
        };
        let tell = lock(&shared.tell).clone();
        qp.on_end(move |_| {
            // Fails only if the listener has ended.
            let _ = tell.send(id);
        });
        Some(qp)
    }
}

/// Takes the completions that are there; calls `done` for each.
pub fn drain(cq: &Cq, mut done: impl FnMut(&Wc)) {
    let mut wcs = [Wc::default(); 64];
    while let Ok(n @ 1..) = cq.poll(&mut wcs) {
        wcs[..n].iter().for_each(&mut done);
    }
}
