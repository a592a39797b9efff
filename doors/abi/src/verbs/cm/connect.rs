//! Connections: request, answer and end.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::cm::{Bound, ConnParam, ConnectError, Dialed, Incoming, LookupRequest};
use weft_verbs::ext::DeviceExt;
use weft_verbs::{Ender, Qp, RoceLookupRequest};

use super::datagram;
use super::device::{self, Nic, datagrams};
use super::exchange::{Carrier, Remote};
use super::id::{Core, Listener, Stage, core, get};
use super::link::{self, Link};
use super::news::News;
use super::patience::{FIRST_PAUSE, LONGEST_PAUSE, PATIENCE};
use super::port::Port;
use super::private_data::{self, IB_REJECT, IB_REPLY, IB_REQUEST, UD_REPLY, delivered};
use super::qp;
use super::request::{Request, Unseen};
use super::resolve;
use super::roce_datagram;
use super::roce_link::{Half, RoceLink};
use super::stages::Ending;
use super::terms::{Retries, Terms};
use super::types::{
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_UNREACHABLE,
    RDMA_MAX_INIT_DEPTH, rdma_cm_id, rdma_conn_param,
};
use crate::call::run;
use crate::verbs::types::{IBV_EVENT_COMM_EST, IBV_QPT_UC, ibv_event_type};
use crate::verbs::wire::{self, Wire};
use crate::verbs::{os_errno, settings};

/// The longest backlog of a listener, and the one that a program gets with 0.
const BACKLOG: u32 = 1024;

/// Unlimited retries of messages without a receive, and the most of messages without an answer.
const FOR_EVER: u8 = 7;

/// Reasons of an InfiniBand rejection (12.6.7.2).
const IB_NO_RESOURCES: c_int = 3;
const IB_INVALID_SERVICE: c_int = 8;
const IB_CONSUMER: c_int = 28;

/// The parameters of a program's connect or accept.
pub(super) struct Wish {
    param: ConnParam,
    qp_num: u32,
    /// For what we send, and for the peer's messages (`rdma_connect(3)`).
    retries: Retries,
}

impl Wish {
    /// # Safety
    /// Null, or as the manual page says.
    unsafe fn read(
        param: *const rdma_conn_param,
        preface: &[u8],
        nic: &Nic,
        longest: usize,
    ) -> Result<Wish, Errno> {
        let most = nic.max_rd_atomic();
        let mut wish = Wish {
            param: ConnParam {
                tls: None,
                private_data: preface.to_vec(),
                ird: most,
                ord: most,
                options: settings::link(),
            },
            qp_num: 0,
            retries: Retries {
                count: FOR_EVER,
                rnr: FOR_EVER,
            },
        };
        if !param.is_null() {
            // SAFETY: the caller's promise.
            let said = unsafe { param.read_unaligned() };
            // SAFETY: as above.
            let data = unsafe { private_data::read(said.private_data, said.private_data_len) }?;
            wish.param.private_data.extend_from_slice(&data);
            wish.param.ird = depth(said.responder_resources, most)?;
            wish.param.ord = depth(said.initiator_depth, most)?;
            wish.qp_num = said.qp_num;
            wish.retries = Retries {
                count: said.retry_count.min(FOR_EVER),
                rnr: said.rnr_retry_count.min(FOR_EVER),
            };
        }
        if nic.persona && wish.param.private_data.len() > longest {
            return Err(Errno::INVAL);
        }
        Ok(wish)
    }

    /// Puts the terms behind the private data, whose longest is `longest`.
    fn tell_terms(&mut self, longest: usize) {
        let depth = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        let terms = Terms {
            depths: (depth(self.param.ird), depth(self.param.ord)),
            retries: self.retries,
        };
        let data = std::mem::take(&mut self.param.private_data);
        self.param.private_data = terms.append(data, longest);
    }
}

/// The number of Reads and atomics; 255 stands for the device's maximum.
fn depth(said: u8, most: u16) -> Result<u16, Errno> {
    match u16::from(said) {
        said if u32::from(said) == RDMA_MAX_INIT_DEPTH => Ok(most),
        said if said > most => Err(Errno::INVAL),
        said => Ok(said),
    }
}

/// The event of a failed connection.
fn failure(error: ConnectError, persona: bool) -> News {
    let errno = -error.raw_os_error();
    let rejected = |ib, said| News {
        private_data: delivered(said, persona, IB_REJECT),
        ..News::status(RDMA_CM_EVENT_REJECTED, if persona { ib } else { errno })
    };
    match error {
        ConnectError::Rejected { private_data } => rejected(IB_CONSUMER, private_data),
        ConnectError::Refused => rejected(IB_INVALID_SERVICE, Vec::new()),
        ConnectError::Closed | ConnectError::Reset => rejected(IB_NO_RESOURCES, Vec::new()),
        ConnectError::TimedOut | ConnectError::Unreachable => {
            News::status(RDMA_CM_EVENT_UNREACHABLE, errno)
        }
        _ => News::status(RDMA_CM_EVENT_CONNECT_ERROR, errno),
    }
}

/// How a connection begins.
pub(super) struct Begin {
    /// In [`Stage::Choosing`], else in [`Stage::Routed`].
    chosen: bool,
    /// Until when the request is repeated.
    pub(super) until: Instant,
}

impl Begin {
    pub(super) fn now() -> Begin {
        Begin {
            chosen: false,
            until: Instant::now() + PATIENCE,
        }
    }

    /// The wire of this one has been chosen, and the stage is still that.
    pub(super) fn chosen(until: Instant) -> Begin {
        Begin {
            chosen: true,
            until,
        }
    }

    pub(super) fn is_at(&self, stage: &Stage) -> bool {
        matches!(
            (stage, self.chosen),
            (Stage::Routed, false) | (Stage::Choosing, true)
        )
    }
}

/// A request under way. On a network of RNICs a request arrives milliseconds after the peer's last answer, so programs such as perftest close a listener and
/// open the next one meanwhile. Here it arrives sooner: it is repeated where no program can have seen it, because nobody listened, or the listener closed
/// with the connection in its queue.
struct Calling {
    core: Arc<Core>,
    nic: Nic,
    link: Link,
    ender: Ender,
    param: ConnParam,
    src: SocketAddr,
    dst: SocketAddr,
    until: Instant,
    pause: Duration,
}

impl Calling {
    fn dial(self, port: Bound, native: &Qp) {
        let (dst, param) = (self.dst, self.param.clone());
        port.dial(dst, native, &param, move |outcome| self.dialed(outcome));
    }

    fn dialed(mut self, outcome: Dialed) {
        let unseen = matches!(outcome, Err(ConnectError::Refused | ConnectError::Reset));
        if unseen && Instant::now() < self.until {
            let pause = self.pause;
            self.pause = (pause * 2).min(LONGEST_PAUSE);
            let native = self.nic.native.clone();
            native.after(pause, move || self.repeat(outcome));
        } else {
            let Calling {
                core, link, ender, ..
            } = self;
            core.dialed(&link, &ender, self.nic.persona, outcome);
        }
    }

    /// Dials again from the same address, unless the program has given up, or another program has taken the address: then that was the outcome.
    fn repeat(mut self, outcome: Dialed) {
        let port = self.core.rejoin(self.src);
        if let (Some(port), Ok(native)) = (port, self.link.native()) {
            self.dial(port, &native);
        } else {
            self.until = Instant::now();
            self.dialed(outcome);
        }
    }
}

impl Core {
    /// The address that its last dial had, while it waits for a connection.
    fn rejoin(&self, src: SocketAddr) -> Option<Bound> {
        let setup = self.setup();
        let waits = matches!(setup.stage, Stage::Joining);
        let port = waits.then(|| Port::take(self.ps, src, setup.bind_options()))?;
        match port {
            Ok(Port::Stream(port)) => Some(port),
            _ => None,
        }
    }

    fn ends_with(self: &Arc<Self>, ender: &Ender) {
        let ending = Ending(Arc::clone(self));
        ender.on_end(move |_| drop(ending));
    }

    /// The peer's answer.
    fn dialed(self: &Arc<Self>, link: &Link, ender: &Ender, persona: bool, outcome: Dialed) {
        let answer = outcome.and_then(|private_data| match link {
            Link::Program(_) | Link::Roce(_) => Ok((None, private_data)),
            Link::Carrier(_) => Remote::split(&private_data)
                .map(|(remote, data)| (Some(remote), data.to_vec()))
                .ok_or_else(|| ConnectError::Protocol("it names no queue pair".into())),
        });
        match answer {
            Ok((remote, private_data)) => {
                let depths = link.native().ok().and_then(|qp| qp.depths());
                if !self.joined(link.clone()) {
                    link.close();
                    return;
                }
                self.setup().remote = remote;
                let (terms, private_data) = Terms::split(&private_data, IB_REPLY);
                let rnr = terms.map_or(0, |terms| terms.retries.rnr);
                self.tell(News {
                    private_data: delivered(private_data.to_vec(), persona, IB_REPLY),
                    depths: depths.unwrap_or_default(),
                    // Replies have no other count.
                    retries: Retries { count: 0, rnr },
                    qp_num: remote.map_or(0, |remote| remote.qp_num),
                    ..News::new(if remote.is_some() {
                        RDMA_CM_EVENT_CONNECT_RESPONSE
                    } else {
                        RDMA_CM_EVENT_ESTABLISHED
                    })
                });
                self.ends_with(ender);
            }
            Err(error) => {
                link.close();
                if self.failed() {
                    self.tell(failure(error, persona));
                }
            }
        }
    }

    fn connect(
        self: &Arc<Self>,
        nic: &Nic,
        link: Link,
        mut param: ConnParam,
        begin: &Begin,
    ) -> Result<(), Errno> {
        if let Link::Roce(link) = &link {
            return self.connect_roce(nic, link, &param, begin);
        }
        let native = link.native()?;
        let (port, src, dst) = {
            let mut setup = self.setup();
            if !begin.is_at(&setup.stage) {
                return Err(Errno::INVAL);
            }
            let (Some(Port::Stream(port)), Some(src), Some(dst)) =
                (setup.port.take(), setup.src, setup.dst)
            else {
                return Err(Errno::INVAL);
            };
            setup.stage = Stage::Joining;
            setup.depths = (param.ird, param.ord);
            (port, src, dst)
        };
        if let Link::Carrier(carrier) = &link {
            param.private_data = carrier.say(src.ip(), &param.private_data);
        }
        let calling = Calling {
            core: Arc::clone(self),
            nic: nic.clone(),
            link,
            ender: native.ender(),
            param,
            src: port.local_addr(),
            dst,
            until: begin.until,
            pause: FIRST_PAUSE,
        };
        calling.dial(port, &native);
        Ok(())
    }

    fn incoming(self: &Arc<Self>, nic: &Nic, incoming: Incoming) {
        let (request, private_data) = Request::new(incoming, nic);
        self.tell(News {
            private_data: delivered(private_data, nic.persona, IB_REQUEST),
            depths: request.depths(),
            retries: request.retries(),
            qp_num: request.remote().map_or(0, |remote| remote.qp_num),
            request: Some(Unseen::new(request)),
            ..News::new(RDMA_CM_EVENT_CONNECT_REQUEST)
        });
    }

    fn listen(self: &Arc<Self>, backlog: c_int) -> Result<(), Errno> {
        let nic = device::of(self.ps)?;
        if datagrams(self.ps) && !nic.persona {
            return Err(Errno::OPNOTSUPP);
        }
        if matches!(self.setup().stage, Stage::Idle) {
            resolve::bind(self, ([0, 0, 0, 0], 0).into())?;
        }
        let port = {
            let mut setup = self.setup();
            if !matches!(setup.stage, Stage::Bound) {
                return Err(Errno::INVAL);
            }
            setup.port.take().ok_or(Errno::INVAL)?
        };
        let backlog = match u32::try_from(backlog) {
            Ok(backlog @ 1..=BACKLOG) => backlog,
            _ => BACKLOG,
        };
        let core = Arc::downgrade(self);
        let listening = match port {
            Port::Stream(port) if nic.persona && wire::asked() == Wire::Roce => {
                let made = self.listen_roce(&nic, port.local_addr(), backlog)?;
                Ok(Listener::Roce(made, Some(port)))
            }
            Port::Stream(port) => {
                let also_roce = nic.persona && wire::asked() == Wire::Auto;
                let by_roce = also_roce.then(|| (nic.clone(), port.local_addr()));
                let most = nic.max_rd_atomic();
                let param = ConnParam {
                    ird: most,
                    ord: most,
                    options: settings::link(),
                    ..ConnParam::default()
                };
                let on_request = move |incoming| match core.upgrade() {
                    Some(core) => core.incoming(&nic, incoming),
                    None => incoming.turn_away(),
                };
                let listening = port.listen(backlog, &param, on_request);
                // After the other one: see `auto`.
                let further = by_roce.and_then(|(nic, addr)| {
                    let made = self.listen_roce(&nic, addr, backlog);
                    let missing = |errno: &Errno| {
                        tracing::warn!(%errno, %addr, "this listener is not heard by RoCE: peers of other hosts do not reach it");
                    };
                    made.inspect_err(missing).ok()
                });
                listening.map(|made| Listener::Stream(made, further))
            }
            Port::Datagram(port) if wire::has_roce() => {
                let on_request = move |request: RoceLookupRequest| {
                    if let Some(core) = core.upgrade() {
                        let data = request.private_data.clone();
                        core.asked(data, Request::roce_datagram(request));
                    }
                };
                let made = roce_datagram::serve(&nic, port, backlog, on_request)?;
                Ok(Listener::RoceDatagram(made))
            }
            Port::Datagram(port) => {
                let on_request = move |request: LookupRequest| {
                    if let Some(core) = core.upgrade() {
                        let data = request.private_data().to_vec();
                        core.asked(data, Request::datagram(request));
                    }
                };
                port.serve(backlog, on_request).map(Listener::Datagram)
            }
        };
        let listening = listening.map_err(|error| os_errno(&error))?;
        let mut setup = self.setup();
        if matches!(setup.stage, Stage::Bound) {
            setup.stage = Stage::Listening(listening);
        }
        Ok(())
    }

    fn accept(self: &Arc<Self>, link: &Link, mut param: ConnParam) -> Result<(), Errno> {
        let native = link.native()?;
        let request = self.request()?;
        if let Link::Carrier(carrier) = link {
            param.private_data = carrier.say(request.addrs().0.ip(), &param.private_data);
            carrier.prepare()?;
        }
        if let Err(errno) = request.accept(&native, &param) {
            self.failed();
            return Err(errno);
        }
        if !self.joined(link.clone()) {
            link.close();
            return Err(Errno::INVAL);
        }
        if let Link::Carrier(carrier) = link {
            let core = Arc::downgrade(self);
            carrier.await_ready(move || {
                if let Some(core) = core.upgrade() {
                    core.tell(News::new(RDMA_CM_EVENT_ESTABLISHED));
                }
            });
        } else {
            self.tell(News::new(RDMA_CM_EVENT_ESTABLISHED));
        }
        self.ends_with(&native.ender());
        Ok(())
    }

    /// Connects by the wire that its queue pair has.
    pub(super) fn connect_with(
        self: &Arc<Self>,
        nic: &Nic,
        mut wish: Wish,
        named: bool,
        begin: &Begin,
    ) -> Result<(), Errno> {
        let link = self.link(nic, wish.qp_num, named)?;
        link.wait_for_receives(nic, wish.retries.rnr)?;
        if nic.persona && !matches!(link, Link::Roce(_)) {
            wish.tell_terms(IB_REQUEST);
        }
        self.setup().retries = wish.retries;
        self.connect(nic, link, wish.param, begin)
    }

    /// The link of this identifier: its queue pair, or the one that the program names and moves itself.
    fn link(&self, nic: &Nic, qp_num: u32, named: bool) -> Result<Link, Errno> {
        let own = get!(self, qp);
        if !own.is_null() {
            let name = link::name(own)?;
            if let Some(timeout) = self.setup().ack_timeout {
                name.get()?.set_timeout(timeout);
            }
            return Ok(if name.get()?.roce.is_some() {
                Link::Roce(RoceLink::new(Half::Ours(name)))
            } else {
                Link::Program(name)
            });
        }
        if !named {
            return Err(Errno::INVAL);
        }
        if nic.persona && self.goes_by_roce()? {
            let unreliable = get!(self, qp_type) == IBV_QPT_UC;
            let half = Half::Programs(qp_num, unreliable);
            return Ok(Link::Roce(RoceLink::new(half)));
        }
        if nic.persona {
            return Ok(Link::Carrier(Carrier::new(nic, qp_num)?));
        }
        // An RNIC's connection manager joins the queue pair itself, even if the program made it.
        Ok(Link::Program(link::by_number(qp_num)?))
    }
}

/// `rdma_listen(3)`. A backlog of 0 is the longest.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    run(|| {
        let core = core(id)?;
        core.listen(backlog)?;
        let src = core.setup().src;
        if let Some(src) = src {
            core.show(src, None);
        }
        Ok(0)
    })
}

/// `rdma_connect(3)`.
///
/// # Safety
/// As its manual page; the parameters may be null.
pub unsafe fn rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    run(|| {
        let core = core(id)?;
        let nic = device::of(core.ps)?;
        let preface = core.setup().preface.clone();
        if datagrams(core.ps) {
            // SAFETY: the caller's promise.
            unsafe { core.ask(&nic, conn_param, &preface) }?;
            return core.complete();
        }
        // SAFETY: the caller's promise.
        let wish = unsafe { Wish::read(conn_param, &preface, &nic, IB_REQUEST) }?;
        core.choose_and_connect(&nic, wish, !conn_param.is_null())?;
        core.complete()
    })
}

/// `rdma_accept(3)`.
///
/// # Safety
/// As its manual page; the parameters may be null.
pub unsafe fn rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    run(|| {
        let core = core(id)?;
        if datagrams(core.ps) {
            // SAFETY: the caller's promise.
            unsafe { core.answer(conn_param) }?;
            return Ok(0);
        }
        let nic = device::of(core.ps)?;
        // SAFETY: the caller's promise.
        let mut wish = unsafe { Wish::read(conn_param, &[], &nic, IB_REPLY) }?;
        let has_terms = match &core.setup().stage {
            Stage::Requested(request) => request.has_terms(),
            _ => return Err(Errno::INVAL),
        };
        core.take_wire_of_request()?;
        let mut link = core.link(&nic, wish.qp_num, !conn_param.is_null())?;
        let remote = core.setup().remote;
        match (&link, remote) {
            (Link::Roce(link), _) => {
                core.accept_roce(link, &wish.param, wish.retries)?;
                return core.complete();
            }
            (Link::Program(_), None) | (Link::Carrier(_), Some(_)) => {}
            // The peer moves its queue pair itself, so ours must be joined by number too.
            (Link::Program(_), Some(_)) => {
                link = Link::Carrier(Carrier::new(&nic, qp::join(&core)?)?);
            }
            // The peer's queue pair waits at the other end of this same connection.
            (Link::Carrier(_), None) => return Err(Errno::INVAL),
        }
        link.wait_for_receives(&nic, wish.retries.rnr)?;
        if nic.persona && has_terms {
            wish.tell_terms(IB_REPLY);
        }
        core.accept(&link, wish.param)?;
        core.complete()
    })
}

/// `rdma_reject(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    run(|| {
        let core = core(id)?;
        // SAFETY: the caller's promise.
        let data = unsafe { private_data::read(private_data, private_data_len) }?;
        let longest = if datagrams(core.ps) {
            UD_REPLY
        } else {
            IB_REJECT
        };
        if device::of(core.ps)?.persona && data.len() > longest {
            return Err(Errno::INVAL);
        }
        let request = core.request()?;
        core.failed();
        request.reject(&data)?;
        Ok(0)
    })
}

/// `rdma_reject_ece(3)`: enhanced connection establishment is not sent.
///
/// # Safety
/// As for [`rdma_reject`].
pub unsafe fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { rdma_reject(id, private_data, private_data_len) }
}

/// `rdma_establish(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    run(|| {
        let core = core(id)?;
        let link = match &core.setup().stage {
            Stage::Joined(link @ (Link::Carrier(_) | Link::Roce(_))) => link.clone(),
            _ => return Err(Errno::INVAL),
        };
        match link {
            Link::Carrier(carrier) => carrier.tell_ready()?,
            Link::Roce(link) => link.establish()?,
            Link::Program(_) => {}
        }
        Ok(0)
    })
}

/// `rdma_disconnect(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    run(|| {
        let core = core(id)?;
        if datagrams(core.ps) {
            return datagram::disconnect(&core).map(|()| 0);
        }
        let (link, over) = {
            let mut setup = core.setup();
            match std::mem::replace(&mut setup.stage, Stage::Leaving) {
                Stage::Joined(link) => (Some(link), false),
                Stage::Leaving => (None, false),
                Stage::Over(link) => {
                    setup.stage = Stage::Over(None);
                    (link, true)
                }
                other => {
                    setup.stage = other;
                    return Err(Errno::INVAL);
                }
            }
        };
        match link {
            Some(link) if over => {
                link.bury();
                core.wait_out();
            }
            Some(link) => link.close(),
            None => {}
        }
        if over && core.is_sync() && !core.has_events()? {
            // The program already knows.
            return Ok(0);
        }
        core.complete()
    })
}

/// `rdma_notify(3)`: an established connection needs no notification.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    run(|| {
        let core = core(id)?;
        if event != IBV_EVENT_COMM_EST {
            return Err(Errno::INVAL);
        }
        let link = match &core.setup().stage {
            Stage::Joined(link) => link.clone(),
            _ => return Err(Errno::INVAL),
        };
        match link {
            Link::Carrier(carrier) => carrier.ready(),
            Link::Roce(link) => link.heard(),
            Link::Program(_) => {}
        }
        Ok(0)
    })
}
