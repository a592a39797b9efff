//! Identifiers: their life, and where their events go.
//!
//! ```text
//!   initiator: Idle ─[bind_addr]─ Bound ─ resolve_addr ─ Resolved ─ resolve_route ─ Routed ─ connect ─ Joining ─> Joined
//!   responder: Idle ─ bind_addr ─ Bound ─ listen ─ Listening
//!              Requested (a new identifier, with the event) ─ accept ─> Joined, or reject ─> Over
//!   datagrams: … Routed ─ connect ─ Joining ─ Asking ─> Found, or Over; Requested ─ accept ─> Found
//!   both:      Joined ─ disconnect, or the peer does, or the connection breaks ─> Over
//! ```
//!
//! Locks are taken in this order: an identifier's setup, its place, a channel's queue. None is held while a connection is asked for,
//! answered or ended, because the layers below call back.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::io::Errno;
use weft_verbs::cm::Lookup;

use super::addrinfo::Answer;
use super::channel::{Channel, News, ack, channel};
use super::connect::Link;
use super::device::{self, Nic};
use super::exchange::{Remote, gid_of};
use super::multicast::Membership;
use super::request::Request;
use super::resolve::Port;
use super::types::{
    RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_UNREACHABLE, RDMA_PS_IB, RDMA_PS_IPOIB, RDMA_PS_TCP,
    RDMA_PS_UDP, rdma_cm_id, rdma_event_channel, rdma_port_space,
};
use crate::call::run;
use crate::verbs::events::Subject;
use crate::verbs::object::{Kind, PerFork, Pool, find, lock, turn};
use crate::verbs::types::{
    IBV_MTU_4096, IBV_QPT_RC, IBV_QPT_UD, ibv_gid, ibv_qp_init_attr, ibv_qp_type, ibv_sa_path_rec,
};

/// Reads a field of an identifier's part that C sees.
macro_rules! get {
    ($core:expr, $($field:ident).+) => {
        // SAFETY: the memory of identifiers is never given back, and the types of these fields take any bytes.
        unsafe { (&raw const (*$core.handle()).$($field).+).read() }
    };
}

/// Writes a field of an identifier's part that C sees.
macro_rules! set {
    ($core:expr, $($field:ident).+ = $value:expr) => {
        // SAFETY: as for reading; the program does not look at an identifier while a call on it is under way.
        unsafe { (&raw mut (*$core.handle()).$($field).+).write($value) }
    };
}

pub(super) use {get, set};

/// How far an identifier has come.
pub(super) enum Stage {
    Idle,
    Bound,
    Resolved,
    Routed,
    Listening(#[allow(dead_code)] Listener), // listens until it is dropped
    Requested(Box<Request>),
    Joining,
    /// Datagrams: the peer is asked for its queue pair.
    Asking(#[allow(dead_code)] Lookup), // asks until it is dropped
    /// Datagrams: asked and answered.
    Found,
    Joined(Link),
    /// The program has disconnected.
    Leaving,
    /// The connection is over, or did not come about. The queue pair that was on it may not have been told yet.
    Over(Option<Link>),
    /// Destroyed.
    Gone,
}

/// What listens.
#[allow(dead_code)] // until it is dropped
pub(super) enum Listener {
    Stream(weft_verbs::cm::Listening),
    Datagram(weft_verbs::cm::Serving),
}

/// What an identifier is set up with.
pub(super) struct Setup {
    pub(super) stage: Stage,
    /// The address that it has taken.
    pub(super) port: Option<Port>,
    pub(super) src: Option<SocketAddr>,
    pub(super) dst: Option<SocketAddr>,
    /// The peer's queue pair, where programs move theirs themselves.
    pub(super) remote: Option<Remote>,
    /// Reads and atomics that we take, and that we may have outstanding.
    pub(super) depths: (u16, u16),
    pub(super) reuse: bool,
    /// IPv6 only, where the program said so.
    pub(super) only_v6: bool,
    /// What `ibv_query_qp` is to say of the queue pair, where the program said so.
    pub(super) ack_timeout: Option<u8>,
    /// What the identifiers of its requests get a queue pair of (`rdma_create_ep(3)`).
    pub(super) template: Option<Template>,
    /// Multicast groups that it is in.
    pub(super) groups: Vec<Membership>,
    /// Goes in front of the private data (`rdma_create_ep(3)`).
    pub(super) preface: Vec<u8>,
    /// What `rdma_resolve_addrinfo(3)` found.
    pub(super) answer: Option<Answer>,
}

/// Attributes of queue pairs to be made, with pointers of the program in them.
#[derive(Clone, Copy)]
pub(super) struct Template(pub(super) ibv_qp_init_attr);

// SAFETY: addresses only, handed back to the calls that check them.
unsafe impl Send for Template {}

/// Where events go.
struct Place {
    channel: Arc<Channel>,
    /// The channel is the identifier's own, and calls wait for their event.
    sync: bool,
}

/// An identifier.
pub(super) struct Core {
    handle: AtomicPtr<rdma_cm_id>,
    pub(super) ps: rdma_port_space,
    setup: Mutex<Setup>,
    place: Mutex<Option<Place>>,
    /// What its events are about.
    pub(super) subject: Arc<Subject>,
    /// The path record that C sees.
    path: OnceLock<Path>,
}

/// A record that C reads, and may write.
struct Path(UnsafeCell<ibv_sa_path_rec>);

// SAFETY: it is not read here, and written once, before C sees it.
unsafe impl Send for Path {}
// SAFETY: as above.
unsafe impl Sync for Path {}

/// An identifier as C holds it.
struct Held(Arc<Core>);

impl Kind for Held {
    type C = rdma_cm_id;
    type Handle = rdma_cm_id;
    const MARK: u32 = 0x636d_6964;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Held>> = PerFork::new();
        POOL.get()
    }
}

/// The identifier at an address.
pub(super) fn core(id: *mut rdma_cm_id) -> Result<Arc<Core>, Errno> {
    Ok(Arc::clone(&find::<Held>(id)?.0))
}

/// A new identifier; without a channel, one whose calls block.
fn create(
    channel: Option<Arc<Channel>>,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
    stage: Stage,
) -> Result<Arc<Core>, Errno> {
    let sync = channel.is_none();
    let channel = match channel {
        Some(channel) => channel,
        None => Channel::create()?,
    };
    let events = channel.handle();
    let core = Arc::new(Core {
        handle: AtomicPtr::default(),
        ps,
        setup: Mutex::new(Setup {
            stage,
            port: None,
            src: None,
            dst: None,
            remote: None,
            depths: (0, 0),
            reuse: false,
            only_v6: false,
            ack_timeout: None,
            template: None,
            groups: Vec::new(),
            preface: Vec::new(),
            answer: None,
        }),
        place: Mutex::new(Some(Place { channel, sync })),
        subject: Subject::new(std::ptr::null_mut::<rdma_cm_id>()),
        path: OnceLock::new(),
    });
    let held = Held(Arc::clone(&core));
    Held::pool().make(held, |c, handle| {
        core.handle.store(handle, Ordering::Relaxed);
        c.channel = events;
        c.context = context;
        c.ps = ps;
        c.qp_type = qp_type;
    })?;
    Ok(core)
}

/// The identifier of a request that came to `listener`.
pub(super) fn requested(listener: &Arc<Core>, request: Request) -> Result<Arc<Core>, Errno> {
    let channel = match &*lock(&listener.place) {
        Some(Place { sync: true, .. }) => None,
        Some(Place { channel, .. }) => Some(Arc::clone(channel)),
        None => return Err(Errno::INVAL),
    };
    let nic = device::of(listener.ps)?;
    let (local, peer) = request.addrs();
    let (depths, remote) = (request.depths(), request.remote());
    let core = create(
        channel,
        get!(listener, context),
        listener.ps,
        get!(listener, qp_type),
        Stage::Requested(Box::new(request)),
    )?;
    {
        let mut setup = core.setup();
        setup.depths = depths;
        setup.remote = remote;
    }
    core.at(&nic, local, Some(peer));
    core.show_path(&nic);
    Ok(core)
}

impl Core {
    /// What C calls it by.
    pub(super) fn handle(&self) -> *mut rdma_cm_id {
        self.handle.load(Ordering::Relaxed)
    }

    pub(super) fn setup(&self) -> MutexGuard<'_, Setup> {
        lock(&self.setup)
    }

    /// It is on this device, with these addresses.
    pub(super) fn at(&self, nic: &Nic, src: SocketAddr, dst: Option<SocketAddr>) {
        {
            let mut setup = self.setup();
            setup.src = Some(src);
            setup.dst = dst.or(setup.dst);
        }
        self.show(src, dst);
        set!(self, verbs = nic.context);
        set!(self, port_num = 1);
        if get!(self, pd).is_null() {
            set!(self, pd = nic.pd);
        }
    }

    /// The way to the peer is known. An RNIC has no path records.
    pub(super) fn show_path(&self, nic: &Nic) {
        let (src, dst) = {
            let setup = self.setup();
            (setup.src, setup.dst)
        };
        let (true, Some(src), Some(dst)) = (nic.persona, src, dst) else {
            return;
        };
        let path = self.path.get_or_init(|| {
            // SAFETY: all zeros is a value of the type.
            let mut path: ibv_sa_path_rec = unsafe { std::mem::zeroed() };
            path.sgid = ibv_gid {
                raw: gid_of(src.ip()),
            };
            path.dgid = ibv_gid {
                raw: gid_of(dst.ip()),
            };
            path.hop_limit = 64;
            path.reversible = 1;
            path.numb_path = 1;
            path.pkey = 0xffff;
            path.mtu_selector = 2;
            path.mtu = IBV_MTU_4096 as u8;
            Path(UnsafeCell::new(path))
        });
        set!(self, route.path_rec = path.0.get());
        set!(self, route.num_paths = 1);
    }

    /// Puts addresses where C reads them.
    pub(super) fn show(&self, src: SocketAddr, dst: Option<SocketAddr>) {
        let c = self.handle();
        let room = size_of::<libc::sockaddr_storage>() as u32;
        // SAFETY: room for a `sockaddr_storage`, in memory that is never given back.
        unsafe { crate::address::write(src, (&raw mut (*c).route.addr.src).cast(), room) };
        if let Some(dst) = dst {
            // SAFETY: as above.
            unsafe { crate::address::write(dst, (&raw mut (*c).route.addr.dst).cast(), room) };
        }
    }

    /// Whether the program has events to fetch.
    pub(super) fn has_events(&self) -> Result<bool, Errno> {
        Ok(self.channel()?.events()?.has(&self.subject))
    }

    /// An event for the program.
    pub(super) fn tell(self: &Arc<Self>, news: News) {
        let place = lock(&self.place);
        if let Some(place) = &*place {
            place.channel.push(self, news);
        }
    }

    pub(super) fn is_sync(&self) -> bool {
        lock(&self.place).as_ref().is_some_and(|place| place.sync)
    }

    /// Its channel; `EINVAL` once it is destroyed.
    pub(super) fn channel(&self) -> Result<Arc<Channel>, Errno> {
        let place = lock(&self.place);
        let place = place.as_ref().ok_or(Errno::INVAL)?;
        Ok(Arc::clone(&place.channel))
    }

    /// Acknowledges the event that the identifier itself keeps.
    pub(super) fn ack_own(&self) {
        let event = get!(self, event);
        set!(self, event = std::ptr::null_mut());
        if !event.is_null() {
            // It is the program's field: what is no event is none of ours.
            let _ = ack(event);
        }
    }

    /// The end of every call that has an event: without a channel of the program's, wait for it.
    pub(super) fn complete(&self) -> Result<c_int, Errno> {
        if !self.is_sync() {
            return Ok(0);
        }
        self.ack_own();
        let event = self.channel()?.get()?;
        set!(self, event = event);
        // SAFETY: an event that the program has not seen yet.
        let (kind, status) = unsafe { ((*event).event, (*event).status) };
        match status {
            0 => Ok(0),
            _ if kind == RDMA_CM_EVENT_REJECTED => Err(Errno::CONNREFUSED),
            // InfiniBand's number of a reason.
            status if status > 0 && kind == RDMA_CM_EVENT_UNREACHABLE => Err(Errno::CONNREFUSED),
            status => Err(Errno::from_raw_os_error(status.saturating_abs())),
        }
    }

    fn destroy(self: &Arc<Self>) {
        let stage = {
            let mut setup = self.setup();
            setup.port = None;
            std::mem::replace(&mut setup.stage, Stage::Gone)
        };
        match stage {
            Stage::Joined(link) => link.close(),
            other => drop(other),
        }
        let Some(place) = lock(&self.place).take() else {
            return;
        };
        // Requests that nobody will fetch any more are rejected.
        match place.channel.events() {
            Ok(events) => self.subject.close(&events),
            Err(_) => self.subject.settle(),
        }
        if place.sync {
            place.channel.destroy();
        }
    }

    fn migrate(self: &Arc<Self>, to: Option<Arc<Channel>>) -> Result<(), Errno> {
        let sync = to.is_none();
        let to = match to {
            Some(to) => to,
            None => Channel::create()?,
        };
        self.ack_own();
        let old = {
            let mut place = lock(&self.place);
            let place = place.as_mut().ok_or(Errno::INVAL)?;
            let next = Place {
                channel: Arc::clone(&to),
                sync,
            };
            let old = std::mem::replace(place, next);
            if !Arc::ptr_eq(&old.channel, &to) {
                old.channel.hand_over(self, &to);
            }
            old
        };
        set!(self, channel = to.handle());
        self.subject.settle();
        if old.sync {
            old.channel.destroy();
        }
        Ok(())
    }
}

/// `rdma_create_id(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `id`.
pub unsafe fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    run(|| {
        let qp_type = match ps {
            RDMA_PS_TCP | RDMA_PS_IB => IBV_QPT_RC,
            RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
            _ => return Err(Errno::PROTONOSUPPORT),
        };
        let channel = if channel.is_null() {
            None
        } else {
            Some(self::channel(channel)?)
        };
        let made = new(channel, context, ps, qp_type)?;
        if id.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        unsafe { id.write(made.handle()) };
        Ok(0)
    })
}

/// A new identifier on its way to anywhere.
pub(super) fn new(
    channel: Option<Arc<Channel>>,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<Arc<Core>, Errno> {
    device::of(ps)?;
    create(channel, context, ps, qp_type, Stage::Idle)
}

/// `rdma_destroy_id(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    run(|| destroy(id).map(|()| 0))
}

pub(super) fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let turn = turn::<Held>(id)?;
    turn.0.ack_own();
    let Held(core) = turn.retire();
    core.destroy();
    Ok(())
}

/// `rdma_migrate_id(3)`.
///
/// # Safety
/// Any pointers may be given.
pub unsafe fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    run(|| {
        let core = core(id)?;
        let to = if channel.is_null() {
            None
        } else {
            Some(self::channel(channel)?)
        };
        core.migrate(to).map(|()| 0)
    })
}
